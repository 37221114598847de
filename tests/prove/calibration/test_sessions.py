"""Rows of agents' sessions and of shared prefixes, whose benchmarks say what the rows do not."""

from pathlib import Path

import numpy as np
import pytest
from tests.prove.calibration.rows import point

from crosstie.catalog.benchmarks import PrefixBenchmark, SessionBenchmark, read_benchmarks, shipped_benchmarks
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.perf.steady_state import HOST_S_PER_CACHED_TOKEN
from crosstie.prove.calibration.cases import Cases, MeasuredCase
from crosstie.prove.calibration.predict import Predictor
from crosstie.prove.calibration.stages import StageReplica, stage

AGENTX = {
    "accelerator": "B200", "num_accelerators": "8", "model": "DeepSeek-V4-Pro", "precision": "fp4", "engine": "vllm",
    "input_len": "", "output_len": "", "concurrency": "14", "spec_decode": "mtp", "parallelism": "8 GPUs decode TP8",
    "scenario": "agentic_traces (AgentX multi-turn coding traces, closed loop over sessions)",
}  # fmt: skip
GUIDE = {
    "accelerator": "H100", "num_accelerators": "16", "model": "Qwen3-32B", "precision": "", "engine": "vLLM",
    "input_len": "", "output_len": "", "tp": "2", "parallelism": "8 replicas x TP2",
    "concurrency": "open loop, 40 requests/s target",
}  # fmt: skip
_ROUTED = "shared-prefix workload (inference-perf), Poisson/constant rate, routing: "


@pytest.fixture(scope="module")
def resolve(catalog: Catalog) -> Cases:
    return Cases(catalog)


def one(resolve: Cases, row: dict[str, str], **changes: str) -> MeasuredCase:
    return resolve.of(point(**{**row, **changes}))


def predicted(*cases: MeasuredCase) -> dict[str, list[float]]:
    return {name: values.tolist() for name, values in Predictor(cases).predict().items()}


def named(name: str) -> SessionBenchmark | PrefixBenchmark:
    return next(benchmark for benchmark in shipped_benchmarks() if benchmark.name == name)


def test_a_row_without_lengths_has_those_of_its_benchmark(resolve: Cases) -> None:
    case = one(resolve, AGENTX)
    assert (case.input_tokens, case.output_tokens) == named("agentx").lengths
    assert case.method == "sessions"
    assert 0.95 < case.cached_tokens / case.input_tokens < 0.98
    assert any("lengths of agentx" in said for said in case.assumed)
    # Lengths of the row's own hold.
    given = one(resolve, AGENTX, input_len="50000", output_len="400")
    assert (given.input_tokens, given.output_tokens) == (50000, 400)


def test_sessions_keep_littles_law(resolve: Cases) -> None:
    """Live sessions are requests a second times a turn: the pause, the first token and the others."""
    case = one(resolve, AGENTX)
    got = predicted(case)
    agentx = named("agentx")
    assert isinstance(agentx, SessionBenchmark)
    turns_per_s = got["output_tokens_per_s"][0] / case.output_tokens
    turn_s = agentx.pause_s + got["ttft_mean"][0] + got["tpot"][0] * (case.output_tokens - 1)
    assert turns_per_s * turn_s == pytest.approx(14, rel=0.01)
    # One session alone does not wait out its pauses: the benchmark skips an idle system ahead.
    alone = predicted(one(resolve, AGENTX, concurrency="1"))
    turn_s = agentx.pause_alone_s + alone["ttft_mean"][0] + alone["tpot"][0] * (case.output_tokens - 1)  # type: ignore[operator]
    assert alone["output_tokens_per_s"][0] / case.output_tokens * turn_s == pytest.approx(1, rel=0.01)


def test_quantiles_of_first_tokens_are_over_whole_prompts(resolve: Cases) -> None:
    """Prompts that bring much that is new are seldom the longest, so p90 of the whole is below the sum of two p90s."""
    case = one(resolve, AGENTX, concurrency="1")
    got, benchmark = predicted(case), named("agentx")
    assert isinstance(benchmark, SessionBenchmark)
    found, new = benchmark.parts
    assert (found.mean(), new.mean()) == pytest.approx((1.0, 1.0), abs=0.1)
    host_s = HOST_S_PER_CACHED_TOKEN * case.cached_tokens
    takes_s = host_s * found + (got["ttft_mean"][0] - host_s) * new
    assert got["ttft_p50"][0] == pytest.approx(float(np.median(takes_s)))
    assert got["ttft_p50"][0] < got["ttft_mean"][0]
    # One session on eight GPUs adds a fortieth.
    assert got["ttft_p90"][0] == pytest.approx(1.025 * np.quantile(takes_s, 0.9))
    apart_s = host_s * np.quantile(found, 0.9) + (got["ttft_mean"][0] - host_s) * np.quantile(new, 0.9)
    assert got["ttft_p90"][0] < 0.95 * apart_s


def test_sessions_that_no_memory_keeps_are_computed_again(resolve: Cases) -> None:
    few, many = (one(resolve, AGENTX, model="GLM-5.2", concurrency=n) for n in ("8", "400"))
    assert few.cached_tokens > 0.95 * few.input_tokens
    assert many.cached_tokens < 0.6 * many.input_tokens
    got = predicted(few, many)
    assert got["ttft_p50"][1] > 5 * got["ttft_p50"][0]
    assert got["hit"] == pytest.approx([c.cached_tokens / c.input_tokens for c in (few, many)])


def test_sides_of_which_only_gpus_are_counted(resolve: Cases) -> None:
    for layout in ("P:4 GPUs D:8 GPUs (decode TP8)", "prefill 4 GPUs decode 8 GPUs (label 4p_8d)"):
        case = one(resolve, AGENTX, accelerator="GB300", num_accelerators="12", disagg="True", parallelism=layout)
        assert case.service is not None
        assert (case.service.prefill.parallelism.gpus, case.service.decode.parallelism.gpus) == (4, 8)
        assert predicted(case)["tpot"][0] > 0


def test_where_prefixes_are_gathered_nobody_waits(resolve: Cases) -> None:
    """llm-d's guide at 40 requests/s: a plain service computes most prefixes anew and falls behind."""
    spread, gathered = (one(resolve, GUIDE, scenario=_ROUTED + how) for how in ("k8s round robin", "llm-d precise"))
    assert spread.cached_tokens < 0.3 * spread.input_tokens < 0.9 * spread.input_tokens < gathered.cached_tokens
    got = predicted(spread, gathered)
    assert got["ttft_mean"][0] > 30 > 0.5 > got["ttft_mean"][1]
    assert got["ttft_p90"][0] > 1.5 * got["ttft_mean"][0]
    assert got["output_tokens_per_s"][1] > 1.5 * got["output_tokens_per_s"][0]


def test_a_stage_ends_with_its_last_answer() -> None:
    """Steps of 10 ms whoever is there: 20 requests in 20 s, of 101 tokens each, and one that fits at a time."""
    many = np.array([1.0, 100.0])
    roomy = StageReplica(many, many * 0 + 0.01, many * 0 + 0.1, 0.001, 1e6, lambda n: n * 1000, 256.0)
    seen = stage(roomy, 20, 20.0, 101)
    assert seen.ttft_mean_s == pytest.approx(0.1, abs=0.01)
    assert seen.tpot_s == pytest.approx(0.01, rel=0.05)
    assert 19 < seen.lasts_s < 22
    narrow = StageReplica(many, many * 0 + 0.02, many * 0 + 0.1, 0.001, 1500.0, lambda n: n * 1000, 256.0)
    held = stage(narrow, 20, 20.0, 101)
    assert held.lasts_s == pytest.approx(20 * 2, rel=0.1)
    assert held.ttft_mean_s == pytest.approx(10, rel=0.3)


def test_requests_for_one_prompt_hold_it_once() -> None:
    guide = named("llmd-guide")
    assert isinstance(guide, PrefixBenchmark)
    assert guide.held_tokens(1, 1) == pytest.approx(7200)
    everything = guide.groups * guide.shared + guide.groups * guide.prompts * guide.question
    assert guide.held_tokens(1e6, 1) == pytest.approx(everything)
    assert guide.held_tokens(100, 8) < guide.held_tokens(100, 1)


def test_a_slip_in_the_file_is_named(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "src/crosstie/catalog/data/benchmarks.toml"
    text = shipped.read_text().replace("pause_alone_s", "pause_lone_s")
    (tmp_path / "b.toml").write_text(text)
    with pytest.raises(BadData, match=r"sessions\.agentx\.pause_lone_s"):
        read_benchmarks(tmp_path / "b.toml")
