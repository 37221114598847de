"""`crosstie scale` as a user meets it: what would be done and why, a day beforehand, and one line for every mistake."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.core.progress import OnProgress
from crosstie.decide.plan.subject import Subject, read_subject

FLEET = str(Path(__file__).parents[2] / "examples" / "fleets" / "two_vendors.toml")
RULES = """[scale]
day = "servegen-language"
every_s = 1800

[[supply]]
name = "amd"
pool = "mi300x"
most = 8

[[supply]]
name = "amd-spot"
pool = "mi300x"
kind = "spot"
usd_per_gpu_hour = 0.7
lost_per_hour = 0.05
most = 4
"""


_SUBJECTS: dict[str, Subject] = {}


@pytest.fixture(autouse=True)
def subject_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example fleet's capacities, which most tests do not ask about, are worked out once."""

    def read_once(catalog: Catalog, what: Path, on_progress: OnProgress) -> Subject:
        if str(what) != FLEET:
            return read_subject(catalog, what, on_progress)
        if FLEET not in _SUBJECTS:
            _SUBJECTS[FLEET] = read_subject(catalog, what, on_progress)
        return _SUBJECTS[FLEET]

    monkeypatch.setattr("crosstie_gateway.cli.scale.read_subject", read_once)


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "scale.toml"
    file.write_text(RULES)
    return file


def test_a_dry_run_says_what_would_be_done_and_why(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    got = crosstie("scale", FLEET, "--dry-run", "--rate", "chat=110", "--at", "20:30")
    assert got.status == 0, got.err
    lines = got.out.splitlines()
    assert lines[0] == "two_vendors at 20:30: what would be done; nothing was"
    assert "more: serving in about" in got.out
    assert all(len(line) <= 80 for line in lines)


def test_the_same_as_json(crosstie: Command, rules: Path) -> None:
    given = ("--rules", str(rules), "--rate", "chat=28", "--replicas", "amd=1", "--json")
    got = crosstie("scale", FLEET, "--dry-run", *given)
    assert got.status == 0, got.err
    made = json.loads(got.out)
    assert made["seen"]["ready"] == {"amd": 1, "amd-spot": 0}
    orders = made["decision"]["orders"]
    # Half of the traffic may depend on what may be taken away.
    assert orders["amd"]["replicas"] >= 1
    assert orders["amd-spot"]["replicas"] >= 1
    assert made["decision"]["short"] == ""


def test_more_than_can_be_had_is_status_1_with_what_to_do(crosstie: Command) -> None:
    got = crosstie("scale", FLEET, "--dry-run", "--rate", "chat=900")
    assert got.status == 1
    assert "Short: all replicas that can be had carry" in got.out
    assert "raise `most` of mi300x, h200" in " ".join(got.out.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--dry-run",), "--dry-run needs what comes: --gateway URL, or --rate CLASS=X"),
        (("--dry-run", "--rate", "chet=3"), "--rate chet: no such class; there are chat"),
        (("--dry-run", "--rate", "chat=-1"), "must not be below 0"),
        (("--dry-run", "--rate", "chat=1", "--at", "25:00"), "--at 25:00: write a time of day"),
        (("--dry-run", "--rate", "chat=1", "--replicas", "h100=1"), "--replicas h100: no such supply"),
        (("--dry-run", "--rate", "chat=1", "--replicas", "h200=99"), "a whole number up to 2, its most"),
        (("--rate", "chat=1"), "--rate, --replicas and --at are for --dry-run"),
        ((), "--gateway URL: whose traffic is to be followed"),
        (("--gateway", "http://127.0.0.1:9"), "nothing would be done: --patch, --hook, --keda or --port"),
        (("--dry-run", "--gateway", "http://127.0.0.1:9"), "--gateway:"),
        (("--gateway", "http://127.0.0.1:9", "--patch", "pod"), "this is no pod with a service account"),
        (("--gateway", "http://127.0.0.1:9", "--hook", "true", "--admin", "http://127.0.0.1:8"), "--admin needs"),
        (("--dry-run", "--speed", "9"), "--speed is for a scaler that runs"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    crosstie: Command, given: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CROSSTIE_ADMIN_KEY", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    got = crosstie("scale", FLEET, *given)
    assert got.status == 2, got.out
    assert said in got.err
    assert len(got.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('pool = "mi300x"\nmost = 8', 'pool = "mi300"\nmost = 8', "supply[0].pool: the fleet has no pool 'mi300'"),
        ("most = 8", "most = 8\nleast = 9", "supply[0].least: 9 is more than most, which is 8"),
        ("most = 8", "most = 0", "supply[0].most"),
        ("most = 8", "mst = 8", "supply[0].mst"),
        ('name = "amd-spot"', 'name = "amd"', "supply[1].name: 'amd' is there twice"),
        ('"servegen-language"', '"servegen"', "scale.day"),
        ("every_s = 1800", "evry_s = 1800", "scale.evry_s"),
        ("every_s = 1800", 'recording = "x.jsonl"', "scale.day: and scale.recording say the same"),
    ],
)
def test_a_slip_in_the_rules_is_named_with_its_key(
    crosstie: Command, rules: Path, old: str, new: str, said: str
) -> None:  # fmt: skip
    rules.write_text(RULES.replace(old, new))
    got = crosstie("scale", FLEET, "--rules", str(rules), "--dry-run", "--rate", "chat=1")
    assert got.status == 2, got.out
    assert said in got.err
    assert "scale.toml" in got.err
    assert len(got.err.strip().splitlines()) == 1
