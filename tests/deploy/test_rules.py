"""Alerts: each fires when it should and not otherwise, and says where to read on."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
ALERTS = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
CASES = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
PROMTOOL = shutil.which("promtool")
with_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: apt install prometheus)"
)


def promtool(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@with_promtool
def test_prometheus_takes_the_rules_and_every_case_holds() -> None:
    checked = promtool("check", "rules", "alerts.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", "alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.slow
@with_promtool
def test_prometheus_reads_every_query_of_the_dashboard(tmp_path: Path) -> None:
    """Its own parser, with variables as Grafana would put them in."""
    panels = json.loads((FOLDER.parent / "grafana" / "crosstie.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    rules = [
        {"record": f"panel:query_{n}", "expr": re.sub(r"\$\w+", ".*", query.replace("$__rate_interval", "1m"))}
        for n, query in enumerate(queries)
    ]
    assert len(rules) > 40
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = promtool("check", "rules", "queries.yml", folder=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "queries.yml").write_text('groups: [{name: x, rules: [{record: "x", expr: "sum(rate(a[1m])"}]}]')
    assert promtool("check", "rules", "queries.yml", folder=tmp_path).returncode != 0


@pytest.mark.slow
@with_promtool
def test_a_rule_that_is_wrong_would_fail_its_case(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    rules = (FOLDER / "alerts.yml").read_text()
    (tmp_path / "alerts.yml").write_text(
        rules.replace("expr: crosstie_backend_up == 0", "expr: crosstie_backend_up == 1")
    )
    tested = promtool("test", "rules", "alerts_test.yml", folder=tmp_path)
    assert tested.returncode == 1
    assert "CrosstieBackendDown" in tested.stdout + tested.stderr


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(alert: str) -> None:
    expected = {
        bool(test["exp_alerts"]) for case in CASES for test in case["alert_rule_test"] if test["alertname"] == alert
    }
    assert expected == {True, False}


def sections(page: str) -> dict[str, str]:
    """By the anchors that GitHub gives to headings."""
    found = {}
    for heading, text in re.findall(r"^#+ (.+)\n((?:(?!^#).*\n)*)", page, re.MULTILINE):
        found[re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")] = text
    return found


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: str(rule["alert"]))
def test_each_alert_leads_to_its_section_of_the_runbook(rule: dict[str, dict[str, str]]) -> None:
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == str(rule["alert"]).lower()
    text = sections((ROOT / file).read_text())[anchor]
    for part in ("**Means**", "**Look**", "**Do**"):
        assert part in text
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]


def test_the_runbook_has_no_section_for_an_alert_that_is_gone() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert set(re.findall(r"^### (Crosstie\w+)$", page, re.MULTILINE)) == {rule["alert"] for rule in ALERTS}
