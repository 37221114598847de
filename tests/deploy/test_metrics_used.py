"""The dashboard and the rules ask for metrics, labels and values that a gateway which has served something has."""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.promql import faults_of, groupings_of, matchers_of, metrics_of
from tests.engines.streams import get
from tests.run.gateway.fakes import CALM, fakes, fleet_of, pool_of, running, until
from tests.run.gateway.keyed import keyed
from tests.run.gateway.tellers import tellers
from tests.run.gateway.test_resume import fleet_over, identified
from tests.run.gateway.test_serving import CHAT
from tests.run.hosting.shared import MODELS, hosted, shared_pool
from tests.run.service.processes import serving
from tests.run.service.test_admin import administered, two_pools
from tests.run.service.test_trials import on_trial

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import SharedState
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.service.logs import Log
from crosstie_gateway.service.peers import PeerSharing
from crosstie_gateway.service.process import Component
from crosstie_gateway.service.record import TrafficRecorder
from crosstie_gateway.service.telemetry import Telemetry
from crosstie_gateway.share.board import Board

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "crosstie.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
Known = dict[str, dict[str, set[str]]]
VLLM = b'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'


def page_of_a_gateway_that_has_served() -> str:
    """Answers, retries, failures, cuts and refusals of every kind that a rule speaks of."""

    async def page() -> str:
        with tempfile.TemporaryDirectory() as folder:
            log = Log()
            components: list[Component] = [log, TrafficRecorder(Path(folder) / "trace.jsonl"), Telemetry()]
            # Who waits is turned away long before those who hang are given up.
            serving = msgspec.structs.replace(CALM, queue_s=0.2, first_byte_timeout_s=3.0)
            async with fakes(2) as [one, other]:
                one.metrics = other.metrics = VLLM
                pools = (
                    pool_of("one", one.url, usd_per_gpu_hour=0.1, max_in_flight=1),
                    pool_of("two", other.url, max_in_flight=1),
                )
                async with running(fleet_of(*pools, classes=(CHAT,), serving=serving), components=components) as at:
                    assert (await at.ask(stream=True)).status == 200
                    headers = {"x-crosstie-ttft-ms": "0.001", "x-crosstie-tpot-ms": "0.001"}
                    assert (await at.ask(stream=True, headers=headers)).status == 200
                    one.mode = "error"
                    assert (await at.ask(stream=True)).status == 200
                    one.mode = other.mode = "cut_mid_event"
                    assert b"upstream_cut" in (await at.ask(stream=True)).body
                    assert (await at.ask(model="unknown")).status == 404
                    one.mode = other.mode = "hang"
                    both = [asyncio.ensure_future(at.ask(stream=True)) for _ in range(2)]
                    await until(lambda: len(at.gateway.exchanges) == 2)
                    assert (await at.ask(stream=True)).status == 429
                    assert {(await each).status for each in both} == {504}
                    page = (await at.get("/metrics")).body.decode()
                    for part in components:
                        await part.stop()
                    log.close()
                    return page

    return run_on_loop(page())


async def page_of_a_gateway_with_keys(folder: Path) -> str:
    async with keyed(folder) as at:
        assert (await at.ask("not-a-key")).status == 401
        return (await at.get("/metrics", await at.key("watcher", explains=True))).body.decode()


async def page_of_a_gateway_that_goes_on_elsewhere() -> str:
    async with tellers(2) as [bad, good]:
        bad.mode = "cut-mid-event"
        async with running(fleet_over(bad, good)) as at:
            await identified(at)
            assert (await at.ask(stream=True)).status == 200
            await until(lambda: not at.gateway.exchanges)
            return (await at.get("/metrics")).body.decode()


async def page_of_a_gateway_that_loads_models() -> str:
    async with hosted(shared_pool(*MODELS[:3], replicas=1)) as one:
        for model in MODELS[:3]:
            assert (await one.running.ask(model=model, max_tokens=4)).status == 200
        return (await one.running.get("/metrics")).body.decode()


async def page_of_a_gateway_that_other_machines_know() -> str:
    """Though there is no Redis at its address."""
    with closing(Board(1)) as board:
        part = PeerSharing(board)
        async with fakes() as [fake]:
            fleet = fleet_of(pool_of("one", fake.url), state=SharedState(redis="redis://127.0.0.1:1/0"))
            async with running(fleet, components=[part]) as at:
                page = (await at.get("/metrics")).body.decode()
                await part.stop()
                return page


async def page_of_a_gateway_with_an_administrator() -> str:
    async with fakes(2) as made, administered(two_pools(made)) as admin:
        assert (await admin.raw("GET", "/admin/v1/pools", key=None)).status == 401
        return (await admin.running.get("/metrics")).body.decode()


async def page_of_a_gateway_with_a_pool_on_trial() -> str:
    async with fakes(2) as [old, new], on_trial(old, new, shadow=0.5, canary=0.1) as at:
        return (await at.running.get("/metrics")).body.decode()


def page_of_workers(folder: Path) -> str:
    file = folder / "fleet.toml"
    file.write_text(fleet_text(fleet_of(pool_of("one", "http://127.0.0.1:9/v1"))))
    with serving(folder, file, "--workers", "2") as gateway:
        return get(gateway.url, "/metrics").text


def known_of(page: str) -> Known:
    known: Known = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = known.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return known


@pytest.fixture(scope="module")
def page() -> str:
    with pytest.MonkeyPatch.context() as patch:
        # Nobody listens there, which is of no interest here.
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        return page_of_a_gateway_that_has_served()


@pytest.fixture(scope="module")
def counted(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    """By gateways with all of their components."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSTIE_ADMIN_KEY", "a-key-of-an-administrator-0123456789")
        yield _counted(page, tmp_path_factory)


def _counted(page: str, tmp_path_factory: pytest.TempPathFactory) -> Known:
    pages = [
        run_on_loop(page_of_a_gateway_with_keys(tmp_path_factory.mktemp("keys"))),
        run_on_loop(page_of_a_gateway_that_goes_on_elsewhere()),
        run_on_loop(page_of_a_gateway_that_loads_models()),
        run_on_loop(page_of_a_gateway_that_other_machines_know()),
        run_on_loop(page_of_a_gateway_with_an_administrator()),
        run_on_loop(page_of_a_gateway_with_a_pool_on_trial()),
        page_of_workers(tmp_path_factory.mktemp("workers")),
    ]
    found = known_of(page)
    for other in map(known_of, pages):
        found = {**other, **found}
    return found


@pytest.fixture(scope="module")
def known(counted: Known) -> Known:
    """Of gateways, of Prometheus itself, and what the rules record."""
    found = {**counted, "up": {}}
    for rule in recorded():
        ((_, labels),) = groupings_of(rule["expr"])[:1]
        found[rule["record"]] = {label: set() for label in labels}
    return found


def recorded() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"] if "record" in rule]


def rule_expressions() -> list[tuple[str, str]]:
    return [(rule.get("alert") or rule["record"], rule["expr"]) for group in RULES["groups"] for rule in group["rules"]]


def panel_expressions() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize(("name", "expression"), rule_expressions() + panel_expressions())
def test_every_metric_label_and_value_that_is_asked_for_exists(name: str, expression: str, known: Known) -> None:
    assert faults_of(expression, known) == []


def test_variables_of_the_dashboard_ask_for_labels_that_exist(known: Known) -> None:
    asked = [one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert len(asked) == 3
    for definition in asked:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", definition).groups()  # type: ignore[union-attr]
        assert label in known[metric] or label == "instance"


def test_what_is_renamed_is_found(counted: Known) -> None:
    """Of everything that the dashboard asks for: if it were called otherwise, a check above would fail."""
    expressions = [expression for _, expression in rule_expressions() + panel_expressions()]
    asked = {name for expression in expressions for name in metrics_of(expression) if name.startswith("crosstie_")}
    here = counted
    for name in asked:
        renamed = {f"{key}_now" if key == name else key: value for key, value in here.items()}
        assert any(f"no metric {name}" in faults_of(expression, renamed) for expression in expressions)
    for matcher in {one for expression in expressions for one in matchers_of(expression)}:
        if matcher.metric in here and matcher.label != "instance":
            without = {**here, matcher.metric: {k: v for k, v in here[matcher.metric].items() if k != matcher.label}}
            assert any(
                f"{matcher.metric} has no label {matcher.label}" in faults_of(expression, without)
                for expression in expressions
            )


@pytest.mark.parametrize(
    ("expression", "faults"),
    [
        ('sum by (pool) (rate(crosstie_a_total{how="x}y"}[5m])) > 1', []),
        ('sum by (pool) (rate(crosstie_a_total{how="z"}[5m]))', ["crosstie_a_total has no how ['z']"]),
        ('crosstie_a_total{who="x"}', ["crosstie_a_total has no label who"]),
        ("sum by (backend) (crosstie_a_total)", ["crosstie_a_total has no label ['backend']"]),
        ("crosstie_b == 1 or up == 0", ["no metric crosstie_b"]),
        ("1 + 1", ["asks for no metric"]),
        ('crosstie_a_total{job="crosstie",pool=~"$pool"}', []),
    ],
)
def test_the_check_itself(expression: str, faults: list[str]) -> None:
    known = {"crosstie_a_total": {"pool": {"p"}, "how": {"x}y"}}, "up": {}}
    assert faults_of(expression, known) == faults


# The dashboard as Grafana takes it; no Grafana has drawn it here


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["id"] is None
    assert re.fullmatch(r"[a-z0-9-]{1,40}", DASHBOARD["uid"])
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("row", "stat", "timeseries")
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_whatever_the_gateway_counts_is_on_the_dashboard(counted: Known) -> None:
    """A metric that nobody looks at is either missing there or not needed."""
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for _, text in panel_expressions() for name in metrics_of(text)}
    asked = shown | {name for _, text in rule_expressions() for name in metrics_of(text)}
    there = {re.sub(r"_(bucket|sum|count)$", "", name) for name in counted}
    assert there - asked == {"crosstie_traces_exported_total"}
