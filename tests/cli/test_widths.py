"""At 80, 100 and 140 columns nothing is cut: what is printed on a screen without end is printed on these as well."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from tests.conftest import Command
from tests.decide.plan.test_shared import text as shared_workload
from tests.small_workload import small

from crosstie.cli.admin import pools_parts
from crosstie.cli.bench_show import bench_parts
from crosstie.cli.explain import parts as explained_parts
from crosstie.cli.findings_show import report
from crosstie.cli.show import show
from crosstie.core.figures import dollars, gigabytes, seconds, significant
from crosstie.core.finding import Finding, Location
from crosstie.prove.bench.bench import Bench, Measured, Settings
from crosstie.prove.bench.endpoint import BenchEndpoint
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.measure import BenchRun
from crosstie.prove.bench.server_counts import ServerCounts
from crosstie.prove.bench.summary import of_runs
from crosstie.prove.replay.outcomes import ClassTargets
from crosstie.prove.replay.prompts import Sizing
from crosstie.prove.replay.replay import RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.web.parts import Part, Table, across

WIDTHS = (80, 100, 140)
ENDLESS = 2000


def figures(text: str) -> set[str]:
    """Whatever has a digit in it, as a reader would copy it."""
    return {word.strip("(),;:") for word in text.split() if re.search(r"\d", word)}


def fits(printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch, widths: tuple[int, ...] = WIDTHS) -> str:
    """Prints at these widths; what comes out on the endless one."""
    monkeypatch.setenv("COLUMNS", str(ENDLESS))
    whole = printed()
    assert "…" not in whole
    for width in widths:
        monkeypatch.setenv("COLUMNS", str(width))
        shown = printed()
        # A path or an address that is too long has a line of its own, where it can be copied whole.
        wide = [line for line in shown.splitlines() if cell_len(line) > width and " " in line.strip()]
        assert wide == []
        assert figures(whole) == figures(shown)
        assert "…" not in shown
    return whole


COMPARE = ["compare", "llama-3.1-70b", "--on", "mi300x,h200,b200,h100-sxm"]
TCO = ["tco", "llama-3.1-70b", "--precision", "fp8", "--on", "mi300x,h200", "--gpus", "64", "--samples", "200"]
TESTS = Path(__file__).parents[1]
RECORDED, TRACED = TESTS / "port" / "divergence" / "data", TESTS / "prove" / "profile" / "data"
COMMANDS = {
    "scorecard": ["scorecard", "--on", "mi300x,h200,mi355x,b200", "--part", "silicon", "--part", "money"],
    "fit": ["fit", "llama-3.1-405b", "--precision", "bf16,fp8", "--context", "32768"],
    "simulate": ["simulate", "FLEET", "--requests", "300", "--processes", "1", "-v", "--policy", "fastest,round-robin"],
    "fit-one": ["fit", "llama-3.1-70b", "--on", "mi300x,h100-sxm", "-v"],
    "matrix": ["preflight", "deepseek-v4-flash", "--matrix", "--engine", "vllm", "-v"],
    "libraries": ["catalog", "show", "libraries"],
    "recipe": ["recipe", "deepseek-v3", "--on", "mi300x,h200", "--engine", "sglang", "--speculation", "mtp:3", "-v"],
    "compare": COMPARE,
    "compare-verbose": [*COMPARE, "-v", "--sweep"],
    "tco": [*TCO, "--rent", "--api"],
    "tco-verbose": [*TCO, "-v"],
    "tax": ["tax", "RESULTS", "-v"],
    "validate": ["validate", "RESULTS", "-v"],
    "claims": ["claims", "c01", "c02", "c03", "c04"],
    "claim": ["claims", "c27"],
    "diff": ["diff", f"{RECORDED}/cpu-bfloat16.npz", f"{RECORDED}/h200-bfloat16-halved.npz", "-v"],
    "profile": ["profile", f"{TRACED}/h200-dense.json.gz", "--model", "llama-3.1-8b", "--on", "h200", "-v"],
    "preflight": ["preflight", "deepseek-v3", "--on", "mi300x,h200"],
    **{f"list-{kind}": ["catalog", "list", kind] for kind in ("accelerators", "models", "stacks", "formats")},
    "list-precisions": ["catalog", "list", "precisions"],
    "list-verbose": ["catalog", "list", "accelerators", "-v"],
    "list-prices": ["catalog", "list", "prices", "--on", "mi300x,h200"],
    "show-accelerator": ["catalog", "show", "b200"],
    "show-model": ["catalog", "show", "llama-3.1-70b"],
    "show-costs": ["catalog", "show", "costs"],
    "serve": ["serve", "FLEET", "--dry-run"],
}
RESULTS = Path(__file__).parents[2] / "examples" / "results" / "published.csv"
FLEET = Path(__file__).parents[2] / "examples" / "fleets" / "two_vendors.toml"


# Several times each of these takes seconds.
LONG = {"simulate", "matrix", "compare", "compare-verbose", "tco", "tco-verbose", "validate", "fit"}


@pytest.mark.parametrize(
    "widths", [WIDTHS[:1], pytest.param(WIDTHS[1:], marks=pytest.mark.slow)], ids=["narrow", "wider"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if one in LONG else one for one in COMMANDS]
)
def test_a_command_prints_the_same_at_every_width(
    name: str, widths: tuple[int, ...], crosstie: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {"RESULTS": str(RESULTS), "FLEET": str(FLEET)}
    words = [named.get(word, word) for word in COMMANDS[name]]
    whole = fits(lambda: crosstie(*words).out, monkeypatch, widths)
    assert len(figures(whole)) > 3


@pytest.fixture(scope="module")
def workload_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small(tmp_path_factory.mktemp("workload")))


@pytest.mark.usefixtures("planned_once")
@pytest.mark.slow
def test_a_plan_prints_the_same_at_every_width(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload_file: str
) -> None:
    saved = str(tmp_path / "plan.json")
    planned = ["plan", workload_file, "--save", saved]
    fits(lambda: crosstie(*planned).out, monkeypatch)
    fits(lambda: crosstie(*planned, "-v").out, monkeypatch)
    fits(lambda: crosstie("plan", "--watch", saved).out, monkeypatch)


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("how", [["--quick"], pytest.param([], marks=pytest.mark.slow)], ids=["quick", "simulated"])
def test_a_plan_of_shared_replicas_prints_the_same_at_every_width(
    how: list[str], crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf.toml").write_text(shared_workload())
    fits(lambda: crosstie("plan", str(tmp_path / "shelf.toml"), *how, "-v").out, monkeypatch)


def test_keys_and_usage_print_the_same_at_every_width(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTIE_STORE", str(tmp_path / "crosstie.db"))
    limits = ["--rpm", "60", "--tpm", "200000", "--usd-per-day", "5", "--usd-per-month", "1000", "--expires", "30d"]
    models = ["--model", "llama-3.3-70b-instruct", "--model", "llama-3.1-8b", "--class", "documents", "--class", "chat"]
    crosstie("keys", "create", "team-of-a-long-name", *limits, *models)
    for asked in (["keys", "list"], ["keys", "show", "team-of-a-long-name"], ["usage"]):
        fits(lambda asked=asked: crosstie(*asked).out, monkeypatch)  # type: ignore[misc]


def shown(capsys: pytest.CaptureFixture[str], printing: Callable[[], Any]) -> Callable[[], str]:
    def printed() -> str:
        printing()
        return capsys.readouterr().out

    return printed


BACKEND = {
    "backend": "http://machine-of-a-long-name.example:8000", "from": "file", "state": "up", "in_flight": 12,
    "reported": {"running": 11, "waiting": 3}, "breaker": "closed", "ttft_correction": 1.07, "tpot_correction": 0.93,
    "why_down": "the last answer was 503, and those before it too, since 12:30:21",
}  # fmt: skip
POOLS = {
    "fleet": "assistant", "policy": "cheapest-meeting-target", "exchanges": 120, "queued": 2, "processes": 4,
    "pools": [{"pool": "documents-mi300x", "model": "llama-3.3-70b", "weight": None, "backends": [BACKEND] * 2}],
    "leaving": [], "changes": ["drain documents-mi300x"], "dropped": [],
}  # fmt: skip
PREDICTED = {"ttft_s": 0.412, "tpot_s": 0.0213, "usd": 8.7e-5, "cached_tokens": 1024.0, "joules": 451.2}
OF_LATE = {
    "requests": 256, "ttft_predicted_p50_s": 0.41, "ttft_seen_p50_s": 0.461, "tpot_predicted_p50_s": 0.0081,
    "tpot_seen_p50_s": 0.0083,
}  # fmt: skip
EXPLAINED = {
    "policy": "cheapest-meeting-target", "pool": "chat-mi300x", "replica": "chat-mi300x/1", "outcome": "send",
    "reason": "the cheapest of 2 that keep the targets",
    "request": {
        "model": "llama-3.3-70b", "class": "chat", "input_tokens": 3000, "expected_output_tokens": 200,
        "ttft_target_s": 1.0, "tpot_target_s": 0.05,
    },
    "considered": [
        {"pool": "chat-mi300x", "replica": "chat-mi300x/1", "predicted": PREDICTED, "dropped": None, "of_late": OF_LATE},
        {"pool": "batch-h200", "replica": None, "predicted": None, "dropped": "TTFT 1,830 ms of 1,000 ms"},
    ],
}  # fmt: skip


def replayed(verbose: bool) -> None:
    outcomes = [
        RequestOutcome(
            TimedRequest(number * 0.1, 1000, 200, class_name="documents-of-customers"), status=200, pool="chat-mi300x",
            ttft_s=0.3 + number / 100, tpot_s=0.02 + number / 1e4, input_tokens=1000, output_tokens=200,
        )
        for number in range(40)
    ]  # fmt: skip
    spent = ServerCounts(usd=0.42, tokens=1e6)
    run = BenchRun(outcomes, 0.0, 4.0, 0.1, [], interrupted=False, gave_up=False, counted=spent)
    load = BenchLoad(requests_per_s=10.0, by_trace=True)
    point = of_runs(load, [run], ClassTargets(), speed=10.0)
    gateway = BenchEndpoint("gateway:8080", "http://gateway:8080", "llama-3.3-70b", False, None, {})
    show(bench_parts(Bench(Settings(speed=10.0), [Measured(gateway, Sizing(), [point])]), verbose))


def found() -> None:
    one = Finding(
        check="mask", severity="error", what="__shfl_down_sync gets a 32-bit mask, and HIP takes 64-bit masks only",
        where=Location(file="csrc/reduce.cu", line=6), evidence="x += __shfl_down_sync(0xffffffff, x, offset);",
        grounds="read", remedy="give a 64-bit mask, 0xffffffffffffffffULL, or drop it", target="mi300x",
    )  # fmt: skip
    report("csrc: 12 files", [one], {"mi300x": "will not run"}, as_json=False, sarif_file=None, fail_on="error")


@pytest.mark.parametrize(
    "printing",
    [
        lambda: show(pools_parts(POOLS)), lambda: show(explained_parts(EXPLAINED)), partial(replayed, False),
        partial(replayed, True), found,
    ],
    ids=["pools", "explain", "replay", "replay-verbose", "findings"],
)  # fmt: skip
def test_an_answer_of_a_server_prints_the_same_at_every_width(
    printing: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fits(shown(capsys, printing), monkeypatch)


# What the JSON says is on the screen


def numbers_of_fit(made: Any) -> Iterator[str]:
    for one in made["placements"]:
        if one["fewest"]:
            yield f"{one['sequences']:,}"
            yield gigabytes(one["weight_bytes_per_gpu"])
            yield gigabytes(one["kv_bytes_left_per_gpu"])


def numbers_of_compare(made: Any) -> Iterator[str]:
    for entry in made["entries"]:
        found = entry["estimate"]
        yield seconds(found["ttft_s"])
        yield seconds(found["tpot_s"])
        yield significant(found["output_tokens_per_s_per_gpu"])
        yield significant(found["concurrency_that_fits"])


def numbers_of_tco(made: Any) -> Iterator[str]:
    for option in made["options"]:
        yield dollars(option["total_usd"])
        yield dollars(option["usd_per_mtok"])
        yield from map(dollars, option["usd_per_mtok_80"])


def numbers_of_plan(made: Any) -> Iterator[str]:
    fleet = made["fleet"]
    yield dollars(fleet["usd_per_hour"])
    yield from (f"{count} {name}" for name, count in fleet["gpus"].items())
    for pool in fleet["pools"]:
        yield f"{pool['usd_per_hour']:,.2f}"
        yield f"{pool['utilisation']:.0%}"


@pytest.mark.usefixtures("planned_once")
@pytest.mark.parametrize("width", [WIDTHS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in WIDTHS[1:])])
@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["fit", "llama-3.1-70b", "--on", "mi300x,h100-sxm"], numbers_of_fit),
        (COMPARE, numbers_of_compare),
        (TCO, numbers_of_tco),
        (["plan", "WORKLOAD"], numbers_of_plan),
    ],
    ids=["fit", "compare", "tco", "plan"],
)
def test_the_numbers_of_the_json_are_on_the_screen(
    words: list[str], numbers: Callable[[Any], Iterator[str]], width: int, crosstie: Command, workload_file: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", str(width))
    words = [workload_file if word == "WORKLOAD" else word for word in words]
    printed = " ".join(crosstie(*words).out.split())
    wanted = list(numbers(json.loads(crosstie(*words, "--json").out)))
    assert wanted
    for number in wanted:
        assert re.search(rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)", printed), number


# The renderer


@pytest.mark.parametrize(
    ("width", "part", "lines"),
    [
        (
            40, Table(["pool", ">$/h", ">TTFT", "limited by"], [["chat", "9.10", "1,812 ms", "TTFT target"]]),
            ["pool   $/h      TTFT  limited by", "─" * 33, "chat  9.10  1,812 ms  TTFT target"],
        ),
        # A table that does not fit becomes blocks.
        (
            30, Table(["pool", ">$/h", ">TTFT", "limited by"], [["chat", "9.10", "1,812 ms", "TTFT target"]]),
            ["chat", "  $/h        9.10", "  TTFT       1,812 ms", "  limited by TTFT target"],
        ),
        # Names that do not fit beside each other go below.
        (
            24, across(["mi300x", "h200", "b200"], [["TTFT", "1,812 ms", "717 ms", "92.3 ms"]]),
            ["        mi300x    h200", "─" * 22, "TTFT  1,812 ms  717 ms", "", "         b200", "─" * 13, "TTFT  92.3 ms"],
        ),
        # A long word stays whole, and lines hang under their mark.
        (
            20, "- written whole to /a/path/that/is/longer/than/the/screen/is/wide.toml",
            ["- written whole to", "  /a/path/that/is/longer/than/the/screen/is/wide.toml"],
        ),
    ],
)  # fmt: skip
def test_a_part_is_rendered_within_the_width(
    width: int, part: Part, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show([part])
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == lines


def test_prose_wraps_and_headings_wrap_before_a_table_is_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "48")
    show([Table(["class", ">tokens of the prompt", "~why"], [["chat", "1,020", "cheapest " * 8]])])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 48
    assert sum("cheapest" in line for line in lines) > 1
    assert not any("tokens of the prompt" in line for line in lines)
