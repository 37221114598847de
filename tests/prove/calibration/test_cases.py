"""Rows as cases: names, layouts, precisions, lengths and loads; what cannot be one says why."""

import csv
import json
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.prove.calibration.rows import point, row, written

from crosstie.catalog.benchmarks import Dataset, Protocols
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadData
from crosstie.prove.calibration.cases import Cases, MeasuredCase
from crosstie.prove.calibration.columns import NotPredicted
from crosstie.prove.calibration.results import Metric, read_results
from crosstie.prove.calibration.validate import validate


@pytest.fixture(scope="module")
def resolve(catalog: Catalog) -> Cases:
    return Cases(catalog)


def one(resolve: Cases, **changes: str) -> MeasuredCase:
    return resolve.of(point(**changes))


def test_attention_in_replicas_is_read_from_the_layout(resolve: Cases) -> None:
    moe = {"model": "deepseek-r1", "precision": "fp8", "num_accelerators": "8", "tp": "8"}
    assert one(resolve, parallelism="TP8EP8DPA", **moe).deployment.parallelism == Parallelism(dp=8, ep=8)
    assert one(resolve, parallelism="TP8EP1DPA", **moe).deployment.parallelism == Parallelism(dp=8)
    assert one(resolve, parallelism="TP8EP8", **moe).deployment.parallelism == Parallelism(tp=8, ep=8)


APART = {"disagg": "True", "model": "deepseek-r1", "precision": "fp4", "accelerator": "gb200", "engine": "dynamo-trt",
         "input_len": "8192", "output_len": "1024", "concurrency": "2000", "kv_format": "fp8"}  # fmt: skip


def test_both_sides_are_read_from_the_layout_and_the_notes(resolve: Cases) -> None:
    notes = "prefill 40 GPUs dp_attention=True, decode 16 GPUs (decode_tp x workers) dp_attention=False; more"
    case = one(resolve, **APART, parallelism="P:10xTP4EP4 D:1xTP16EP16", num_accelerators="56", notes=notes)
    service = case.service
    assert service is not None
    assert service.layout == "10xDP4·EP4:1xTP16·EP16"
    assert (service.connector.id, service.link, case.gpus) == ("tensorrt-llm", "fabric", 56)
    assert service.prefill.kv_format == "fp8"


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        # Not said: experts that are spread over a busy side come with attention replicas.
        ({"parallelism": "P:1xTP4EP4 D:2xTP8EP8", "num_accelerators": "20"}, "1xDP4·EP4:2xDP8·EP8"),
        ({"parallelism": "P:1xTP4EP4 D:2xTP8EP8", "num_accelerators": "20", "concurrency": "8"}, "1xTP4·EP4:2xTP8·EP8"),
        # Ones for widths that nobody knows; the experts' width where it is the worker's.
        ({"parallelism": "P:1xTP1EP8 D:2xTP1EP8", "num_accelerators": "24"}, "1xDP8·EP8:2xDP8·EP8"),
        (
            {"parallelism": "P:1xTP1EP1 D:2xTP1EP1", "num_accelerators": "20",
             "notes": "prefill 4 GPUs dp_attention=True, decode 16 GPUs dp_attention=True; and more"},
            "1xTP4·EP4:2xDP8·EP8",
        ),
        # 48 groups with copies of some of the 256 experts.
        ({"parallelism": "P:2xTP4EP4 D:1xTP48EP48", "num_accelerators": "56"}, "2xDP4·EP4:1xDP48·EP16"),
        ({"parallelism": "P:2xTP8 D:1xTP8 DPA", "num_accelerators": "24"}, "2xDP8:1xDP8"),
        # The same GPUs for every worker, where nobody says how many.
        ({"parallelism": "P:1xTP1EP1 D:4xTP1EP1", "num_accelerators": "20"}, "1xTP4·EP4:4xTP4·EP4"),
        ({"parallelism": "1P3D, TP8 each", "num_accelerators": "32"}, "1xTP8:3xTP8"),
        # Attention over two nodes is taken as a piece in each.
        (
            {"parallelism": "P:1xTP16EP1 D:1xTP16EP1", "num_accelerators": "32", "accelerator": "h100-sxm",
             "precision": "fp8", "concurrency": "16"},
            "1xTP8·DP2·EP16:1xTP8·DP2·EP16",
        ),
    ],
)  # fmt: skip
def test_layouts_of_both_sides(resolve: Cases, changes: dict[str, str], layout: str) -> None:
    service = one(resolve, **{**APART, **changes}).service
    assert service is not None
    assert service.layout == layout


def test_a_rate_per_gpu_is_over_the_gpus_that_its_source_counts(resolve: Cases) -> None:
    sides = {**APART, "parallelism": "P:1xTP4EP4 D:2xTP8EP8", "num_accelerators": "20"}
    plain, own = one(resolve, **sides), one(resolve, **sides, notes="disagg per-GPU normalisation is InferenceX own")
    out, total = Metric("throughput", per_gpu=True), Metric("throughput", per_gpu=True, with_input=True)
    assert (plain.gpus_counted(out), own.gpus_counted(out), own.gpus_counted(total)) == (20, 16, 20)


R1 = {"model": "deepseek-r1", "precision": "fp8", "num_accelerators": "8", "tp": "8"}


@pytest.mark.parametrize(
    ("changes", "wanted", "length"),
    [
        ({"spec_decode": "mtp1"}, "mtp:1", 1.81),
        ({"spec_decode": "MTP3", "spec_accept_len": "2.9"}, "mtp:3", 2.9),
        # Where a row does not say it, the benchmark's recipes do.
        ({"spec_decode": "mtp", "source_id": "inferencex_dsr1", "engine": "sglang"}, "mtp:2", 2.31),
        ({"spec_decode": "mtp", "source_id": "inferencex_dsr1", "engine": "tensorrt-llm"}, "mtp:3", 2.54),
        (
            {
                "spec_decode": "mtp",
                "source_id": "inferencex_dsr1",
                "engine": "tensorrt-llm",
                "parallelism": "TP8EP8DPA",
            },
            "mtp:1",
            1.81,
        ),
        (
            {"spec_decode": "mtp", "source_id": "inferencex_dump_2026-07-20", "model": "minimax-m3"},
            "eagle3:3",
            2.83,
        ),
        ({"spec_decode": "mtp3", "model": "deepseek-v4-pro", "source_id": "rocm_atom_nightly"}, "mtp:3", 2.39),
        # Nobody says how many: the engine's default.
        ({"spec_decode": "mtp", "engine": "sglang"}, "mtp:3", 2.54),
        ({"spec_decode": "mtp", "engine": "vllm"}, "mtp:1", 1.81),
        ({"spec_decode": "mtp", "engine": "tensorrt-llm"}, "mtp:1", 1.81),
        ({"spec_decode": "mtp", "engine": "atom", "accelerator": "mi355x"}, "mtp:3", 2.54),
        # SGLang's EAGLE is the model's own prediction layer where it has one; another model needs a head.
        ({"spec_decode": "EAGLE", "engine": "sglang"}, "mtp:3", 2.54),
        ({"spec_decode": "eagle", "engine": "sglang", "model": "glm-4.7", "precision": ""}, "mtp:3", 2.7),
        ({"spec_decode": "EAGLE-3", "model": "llama-3.3-70b", "spec_accept_len": "2.2"}, "eagle3:3", 2.2),
        ({"spec_decode": "mtp", "model": "kimi-k2.5", "precision": "int4", "accelerator": "b200"}, "eagle3:3", 2.88),
        ({"spec_decode": "ngram", "engine": "sglang", "spec_accept_len": "2"}, "ngram:12", 2.0),
    ],
)
def test_rows_that_speculate_are_read_as_they_did(
    resolve: Cases, changes: dict[str, str], wanted: str, length: float
) -> None:
    found = one(resolve, **{**R1, **changes})
    speculation = found.deployment.speculation
    assert str(speculation) == wanted
    assert speculation is not None
    assert speculation.acceptance_length == pytest.approx(length, abs=1e-6)
    said = any("tokens a step" in assumed for assumed in found.assumed)
    assert said == ("spec_accept_len" not in changes)


def test_recipes_draft_less_where_prefill_and_decode_are_apart_at_high_load(resolve: Cases) -> None:
    apart = {**APART, "parallelism": "P:1xTP4EP4 D:2xTP8EP8", "num_accelerators": "20", "spec_decode": "mtp"}
    said = {"source_id": "inferencex_dsr1"}
    few, many = (one(resolve, **{**apart, **said, "concurrency": n}).service for n in ("64", "2000"))
    assert few
    assert many
    assert (str(few.decode.speculation), str(many.decode.speculation)) == ("mtp:3", "mtp:1")


def test_a_measured_acceptance_length_belongs_to_its_point(tmp_path: Path) -> None:
    base = {"spec_decode": "mtp3", **R1}
    measured = row(metric="spec_accept_len", unit="tok/fwd", value="2.9", **base)
    file = written(tmp_path / "a.csv", row(**base), measured, row(concurrency="4", **base))
    found = read_results(file)
    assert [point["spec_accept_len"] for point in found.points] == ["2.9", ""]
    assert [row.reason for row in found.unusable] == ["metric spec_accept_len is not predicted"]


def test_what_a_row_does_not_say_of_its_drafts_is_said(resolve: Cases) -> None:
    case = one(resolve, **R1, spec_decode="eagle", engine="sglang")
    assert "eagle is mtp: deepseek-r1 has a prediction layer" in case.assumed
    assert any("mtp:3, the engine's default (sgl-project/sglang@" in said for said in case.assumed)
    head = one(resolve, spec_decode="eagle3", engine="vllm", model="llama-3.3-70b", precision="fp8")
    assert any("eagle3:3, assumed (vllm-project/vllm@" in said for said in head.assumed)
    plain = one(resolve, **R1, spec_decode="mtp3", spec_accept_len="2.5", engine="sglang")
    assert not any("mtp" in said for said in plain.assumed)


def test_what_ran_had_room(resolve: Cases) -> None:
    """671 GB on four B200 of 192 GB: 169 GB a GPU, and SGLang's usual 0.88 is 169."""
    four = {"model": "deepseek-r1", "precision": "fp8", "engine": "sglang", "accelerator": "b200"}
    case = one(resolve, **four, num_accelerators="4", parallelism="TP4EP1", kv_format="fp8")
    assert "memory fraction 0.95" in case.assumed
    assert case.deployment.stack.memory_fraction.value == 0.95
    eight = one(resolve, **four, num_accelerators="8", parallelism="TP8EP1", kv_format="fp8")
    assert not any("memory" in said for said in eight.assumed)
    # Attention replicas hold more: with a prediction layer 136 GB of an H200's 151.
    pro = {
        "model": "deepseek-v4-pro",
        "precision": "fp8",
        "engine": "vllm",
        "accelerator": "h200",
        "spec_decode": "mtp2",
    }
    case = one(resolve, **pro, num_accelerators="8", parallelism="TP8EP8DPA", kv_format="fp8")
    assert case.deployment.parallelism == Parallelism(dp=8, ep=8)


def test_experts_over_eight_gpus_are_eight_gpus(resolve: Cases) -> None:
    moe = {"model": "deepseek-r1", "precision": "fp8", "parallelism": "TP1EP8", "tp": "1"}
    for count in ("8", ""):
        case = one(resolve, **moe, num_accelerators=count)
        assert (case.deployment.parallelism, case.gpus) == (Parallelism(dp=8, ep=8), 8)
    assert one(resolve, **moe, num_accelerators="16").replicas == 2
    # A count made of the tensor-parallel widths falls short of the experts' width.
    notes = "prefill 8 GPUs dp_attention=True, decode 2 GPUs (decode_tp x workers) dp_attention=True; and more"
    sides = {**APART, "precision": "fp8", "accelerator": "mi355x", "engine": "mori-sglang", "num_accelerators": "10"}
    case = one(resolve, **sides, parallelism="P:1xTP1EP8 D:2xTP1EP8", notes=notes)
    assert case.service is not None
    assert (case.service.layout, case.gpus) == ("1xDP8·EP8:2xDP8·EP8", 24)
    assert "24 GPUs, as the layout has them" in case.assumed


def test_ranks_that_sglang_counts_twice_and_attention_over_nodes(resolve: Cases) -> None:
    moe = {"model": "deepseek-r1", "precision": "fp8", "engine": "sglang"}
    assert one(resolve, **moe, parallelism="TP8DP8", num_accelerators="8").deployment.parallelism == Parallelism(dp=8)
    case = one(resolve, **moe, accelerator="h800", parallelism="TP16", num_accelerators="16")
    assert case.deployment.parallelism == Parallelism(tp=8, dp=2, ep=16)
    assert "attention in a piece for each node" in case.assumed


def test_a_checkpoints_name_says_its_precision_where_the_row_does_not(resolve: Cases) -> None:
    named = {"model": "nvidia/Llama-3.3-70B-Instruct-FP4", "accelerator": "b200"}
    assert one(resolve, **named, precision="").deployment.precision.id == "nvfp4"
    assert one(resolve, **named, precision="fp8").deployment.precision.id == "fp8"


def test_int4_of_weights_that_are_native_int4_is_the_checkpoint(resolve: Cases) -> None:
    kimi = {"model": "kimi-k2.5", "accelerator": "b200", "num_accelerators": "8", "tp": "8"}
    assert one(resolve, **kimi, precision="int4").deployment.precision.id == "int4-g32"
    assert one(resolve, **kimi, precision="fp4").deployment.precision.id == "nvfp4"
    assert one(resolve, model="qwen3-32b", precision="int4").deployment.precision.id == "int4"


def test_arrivals_in_an_open_loop_are_a_rate(resolve: Cases) -> None:
    assert one(resolve, concurrency="open loop, 2.5 requests/s target").requests_per_s == 2.5


def test_sglang_runs_fewer_requests_with_speculation_unless_told(resolve: Cases) -> None:
    qwen = {"model": "qwen3.5-397b-a17b", "engine": "sglang", "num_accelerators": "8", "tp": "8"}
    assert one(resolve, **qwen).deployment.max_sequences == 1024
    assert one(resolve, spec_decode="mtp3", **qwen).deployment.max_sequences == 48
    assert one(resolve, spec_decode="mtp3", max_sequences="200", **qwen).deployment.max_sequences == 200


REFUSED = {
    "accelerator": ({"accelerator": "tpu-v9"}, "accelerator 'tpu-v9' is not in the catalog"),
    "no accelerator": ({"accelerator": ""}, "accelerator '' is not in the catalog"),
    "model": ({"model": "gpt-9"}, "model 'gpt-9' is not in the catalog"),
    "no model": ({"model": ""}, "model '' is not in the catalog"),
    "engine": ({"engine": "mystery"}, "stack 'mystery' is not in the catalog"),
    "engine of another vendor": ({"engine": "tensorrt-llm", "accelerator": "mi300x"}, "does not run on mi300x"),
    "precision": ({"precision": "fp7"}, "precision 'fp7' is not in the catalog"),
    "weights that an engine does not read": ({"precision": "q4_k_m"}, "does not read"),
    "cache": ({"kv_format": "fp3"}, "unknown KV format 'fp3'"),
    "tp beyond the GPUs": ({"parallelism": "tp8", "num_accelerators": "4"}, "TP8 needs 8 GPUs and the row has 4"),
    "tp that divides no heads": ({"tp": "3", "num_accelerators": "3"}, "tp 3 does not divide"),
    "tp of nothing": ({"parallelism": "tp0"}, "tp 0: must be at least 1"),
    "tp in words": ({"tp": "two"}, "tp 'two' is no positive whole number"),
    "half a GPU": ({"num_accelerators": "0.5"}, "num_accelerators '0.5' is no positive whole number"),
    "no GPU": ({"num_accelerators": "0"}, "num_accelerators '0' is no positive whole number"),
    "GPUs without end": ({"num_accelerators": "inf"}, "is no positive whole number"),
    "a layout of five thousand digits": ({"parallelism": "tp" + "9" * 5000}, "tp 999999999 does not divide"),
    "no input": ({"input_len": ""}, "input_len is missing"),
    "input in words": ({"input_len": "long"}, "input_len is no number"),
    "input that is no number": ({"input_len": "nan"}, "input_len is no number"),
    "negative input": ({"input_len": "-7"}, "input_len -7 is less than one token"),
    "a mean of dots": ({"input_len": "ShareGPT mean 1.2.3"}, "input_len is no number"),
    "no output": ({"output_len": ""}, "output_len is missing"),
    "output of nothing": ({"output_len": "0"}, "output_len 0 is less than one token"),
    "beyond the context": ({"input_len": "131072"}, "beyond the 131072 that llama-3.1-8b supports"),
    "no clients": ({"concurrency": "0"}, "concurrency 0 is less than one client"),
    "negative clients": ({"concurrency": "-4"}, "concurrency -4 is less than one client"),
    "clients missing": ({"concurrency": ""}, "concurrency is missing"),
    "clients in words": ({"concurrency": "many"}, "concurrency is no number"),
    "a rate of dots": ({"concurrency": "rate .. req/s"}, "concurrency is no number"),
    "limits not known": ({"concurrency": "", "scenario": "Server", "model": "qwen3-8b"}, "the latency limits are not known"),
    "limits of dots": (
        {"concurrency": "", "scenario": "Server", "model": "qwen3-8b", "notes": "p99 limits TTFT . ms TPOT . ms"},
        "the latency limits are not known",
    ),
    "apart without sides": ({"disagg": "true"}, "does not say which of its GPUs prefill and which decode"),
    "apart without workers": (
        {"disagg": "true", "parallelism": "P:TP2EP1 D:TP2EP1", "num_accelerators": "4"},
        "does not say how many workers prefill",
    ),
    "sides that are not the GPUs": (
        {"disagg": "true", "parallelism": "P:1xTP2 D:1xTP2", "num_accelerators": "8"},
        "prefill 2 and decode 2 GPUs are not the 8 of the row",
    ),
    "a side without its part": (
        {"disagg": "true", "parallelism": "P:1xTP2 D:0xTP2", "num_accelerators": "2"},
        "does not say how many workers",
    ),
    "speculation of an unknown kind": ({"spec_decode": "magic3"}, "speculative decoding 'magic3' is not known"),
    "acceptance beyond the drafts": ({"spec_decode": "eagle3", "spec_accept_len": "9"}, "3 drafts give 1 to 4"),
    "too large": ({"model": "llama-3.1-405b"}, "the weights alone exceed the memory"),
    "no room beside the weights": ({"model": "llama-3.3-70b", "input_len": "65536"}, "the weights leave no room"),
    "prompts that begin alike": (
        {"concurrency": "open loop, 5 requests/s target", "scenario": "250 prefix groups x 5 prompts"},
        "prompts share prefixes",
    ),
    "workers of unknown width": (
        {"disagg": "true", "parallelism": "P:3xTP1EP1 D:1xTP1EP1", "num_accelerators": "72"},
        "does not say how wide its workers",
    ),
    "a count of workers for one of GPUs": (
        {"disagg": "true", "parallelism": "P:1xTP1EP1 D:4xTP1EP1", "num_accelerators": "8",
         "notes": "prefill 4 GPUs dp_attention=False, decode 4 GPUs (decode_tp x workers) dp_attention=True"},
        "does not say how wide its workers",
    ),
    "experts of a dense model": ({"parallelism": "DEP2", "num_accelerators": "2"}, "has no experts to spread"),
    "a mixed fleet": ({"accelerator": "8xH200+8xMI350X"}, "accelerator '8xH200+8xMI350X' is not in the catalog"),
}  # fmt: skip


def test_what_cannot_be_predicted_is_counted_with_its_reason(crosstie: Command, tmp_path: Path) -> None:
    file = written(tmp_path / "a.csv", *(row(**changes) for changes, _ in REFUSED.values()), row(input_len="64"))
    target = tmp_path / "out.csv"
    got = crosstie("validate", str(file), "--json", "--predictions", str(target))
    assert (got.status, got.err) == (0, "")
    found = json.loads(got.out)
    assert (found["rows"], found["covered"]) == (len(REFUSED) + 1, 1)
    assert sum(found["uncovered"].values()) == len(REFUSED)
    with target.open(newline="") as lines:
        *refused, predicted = csv.DictReader(lines)
    assert predicted["reason"] == ""
    for (case, (_, reason)), line in zip(REFUSED.items(), refused, strict=True):
        assert reason in line["reason"], case
        assert line["reason"] in found["uncovered"]


@pytest.mark.parametrize(
    ("model", "gpus", "written_as", "wanted"),
    [
        ("qwen3-30b-a3b", 4, "gpus4 tp2 attention_dp2 ep4", Parallelism(tp=2, dp=2, ep=4)),
        ("qwen3-30b-a3b", 8, "TP8EP1", Parallelism(tp=8)),
        ("qwen3-30b-a3b", 4, "DEP4", Parallelism(dp=4, ep=4)),
        ("qwen3-30b-a3b", 4, "DEP2,PP2", Parallelism(dp=2, ep=2, pp=2)),
        ("qwen3-30b-a3b", 8, "TEP8", Parallelism(tp=8, ep=8)),
        ("qwen3-30b-a3b", 8, "TEP4,PP2", Parallelism(tp=4, ep=4, pp=2)),
        ("qwen3-30b-a3b", 4, "tp=4 ep=2", Parallelism(tp=4, ep=2)),
        ("llama-3.1-8b", 2, "tp1 pp2", Parallelism(pp=2)),
        # Replicas of a dense model share nothing: two replicas of two GPUs.
        ("llama-3.1-8b", 4, "tp2 dp2 ep1", Parallelism(tp=2)),
        ("llama-3.1-8b", 1, "", Parallelism()),
    ],
)
def test_layouts_are_understood_as_written(
    resolve: Cases, model: str, gpus: int, written_as: str, wanted: Parallelism
) -> None:
    case = one(resolve, model=model, num_accelerators=str(gpus), parallelism=written_as)
    assert case.deployment.parallelism == wanted
    assert case.replicas == gpus / wanted.gpus
    assert case.gpus == gpus
    assert "layout" not in case.assumed


def test_a_layout_that_nobody_wrote_is_assumed_and_said(resolve: Cases) -> None:
    case = one(resolve, model="llama-3.1-70b", num_accelerators="8")
    assert "layout" in case.assumed
    assert case.gpus == 8


def test_replicas_by_the_name_of_the_machine(resolve: Cases) -> None:
    assert one(resolve, num_accelerators="8", accelerator_raw="8xH200 2FP8").deployment.parallelism.tp == 4
    # No replicas, nonsense as it is, is no crash.
    assert one(resolve, num_accelerators="8", accelerator_raw="8xH200 0FP8").deployment.parallelism.tp == 8


def test_mlperf_layouts_are_those_published(resolve: Cases) -> None:
    case = one(resolve, accelerator="MI350X", model="Llama-2-70B", scenario="Offline", precision="fp4", input_len="",
               output_len="", concurrency="", num_accelerators="8", engine="vllm")  # fmt: skip
    assert case.deployment.parallelism == Parallelism()
    assert case.method == "full"
    assert case.replicas == 8
    # Lengths of the data set, and the word that they are guessed or measured.
    assert case.input_tokens == 290
    assert case.output_tokens == pytest.approx(294.45)
    assert any("input length of the data set" in said for said in case.assumed)
    limited = one(resolve, accelerator="MI350X", model="Llama-2-70B", scenario="Interactive", precision="fp4",
                  input_len="", output_len="", concurrency="", num_accelerators="8", source_id="mlperf_v6.0")  # fmt: skip
    assert limited.method == "limits"
    assert (limited.ttft_limit_s, limited.tpot_limit_s) == (0.45, 0.04)


def test_limits_are_those_of_the_round(catalog: Catalog) -> None:
    rules = Protocols()
    limits = {("v1", "server"): (1.0, 0.1), ("v2", "server"): (2.0, 0.2), ("v3", "server"): (3.0, 0.3)}
    rules.__dict__["datasets"] = {"qwen3-8b": Dataset(input_mean=100, output_mean=50, basis="spec", limits=limits)}
    resolve = Cases(catalog, rules)
    for source, wanted in (("mlperf_v1", 1.0), ("mlperf_v2", 2.0), ("of my own", 3.0)):
        case = one(resolve, model="qwen3-8b", scenario="Server", concurrency="", source_id=source)
        assert (case.ttft_limit_s, case.tpot_limit_s) == (wanted, wanted / 10)
    assert one(resolve, model="qwen3-8b", scenario="Server", concurrency="", input_len="").input_tokens == 100


@pytest.mark.parametrize(
    ("accelerator", "model", "name", "wanted"),
    [
        ("mi355x", "llama-3.1-70b", "fp4", "mxfp4"),
        ("b200", "llama-3.1-70b", "fp4", "nvfp4"),
        ("b200", "llama-3.1-70b", "NVFP4", "nvfp4"),
        ("b200", "gpt-oss-120b", "fp4", "native"),
        ("mi355x", "gpt-oss-120b", "mxfp4", "native"),
        ("h200", "gpt-oss-120b", "fp8", "native"),
        ("mi355x", "deepseek-v3", "fp8", "native"),
        ("h200", "llama-3.1-8b", "fp8", "fp8"),
        ("h200", "llama-3.1-8b", "BFloat16", "bf16"),
        ("h200", "llama-3.1-8b", "float16", "fp16"),
        ("h200", "llama-3.1-8b", "", "native"),
    ],
)
def test_precisions_are_understood_as_written(
    resolve: Cases, catalog: Catalog, accelerator: str, model: str, name: str, wanted: str
) -> None:
    case = one(resolve, accelerator=accelerator, model=model, precision=name, tp="8", num_accelerators="8")
    assert case.deployment.precision == catalog.precision(catalog.model(model), wanted)


def test_the_kind_of_load_is_told_from_the_row(resolve: Cases) -> None:
    assert one(resolve).method == "loop"
    assert one(resolve).requests == 160
    assert one(resolve, num_prompts="40").requests == 40
    batch = one(resolve, scenario="fixed batch latency")
    assert (batch.method, batch.clients, batch.requests) == ("batch", 16, 16)
    queue = one(resolve, concurrency="max_num_seqs 256", num_prompts="1000")
    assert (queue.method, queue.clients) == ("batch", 1000)
    rate = one(resolve, concurrency="rate 2.5 req/s", num_prompts="100")
    assert (rate.method, rate.requests_per_s, rate.requests) == ("rate", 2.5, 100)
    assert one(resolve, concurrency="max load").method == "full"
    limits = one(resolve, concurrency="", scenario="Server", notes="p99 limits TTFT 1500 ms TPOT 30 ms")
    assert (limits.method, limits.ttft_limit_s, limits.tpot_limit_s) == ("limits", 1.5, 0.03)
    alone = one(resolve, metric="decode_step_ms", unit="ms", engine="nobody knows", output_len="")
    assert (alone.method, alone.deployment.stack.id, alone.output_tokens) == ("alone", "pytorch", 1)


def test_the_row_wins_over_the_rules(resolve: Cases) -> None:
    ruled = one(resolve, source_id="rocm_vllm_devdocker", accelerator="mi300x")
    assert ruled.deployment.kv_format == "fp8"
    assert ruled.deployment.stack.chunk_tokens.value == 65536
    assert ruled.deployment.stack.chunk_tokens.note == "set by the benchmark"
    own = one(resolve, source_id="rocm_vllm_devdocker", accelerator="mi300x", kv_format="bf16", chunk_tokens="4096")
    assert own.deployment.kv_format == "bf16"
    assert own.deployment.stack.chunk_tokens.value == 4096
    assert one(resolve, notes="random lengths 80-100% of these").shortest == 0.8
    assert one(resolve, max_sequences="5").deployment.stack.max_sequences.value == 5


def test_an_engine_that_nobody_wrote_is_assumed_and_said(resolve: Cases) -> None:
    case = one(resolve, engine="")
    assert case.deployment.stack.id == "vllm"
    assert "engine" in case.assumed


def test_settings_of_one_row_do_not_leak_into_the_next(resolve: Cases) -> None:
    before = one(resolve).deployment
    one(resolve, chunk_tokens="256", max_sequences="3", kv_format="fp8")
    assert one(resolve).deployment == before


def test_an_error_of_the_catalog_itself_is_no_row_s_fault(tmp_path: Path) -> None:
    """A calibration that cannot be read ends the command, instead of counting every row as unpredictable."""
    (tmp_path / "calibration.json").write_text("{}")
    with pytest.raises(BadData, match=r"calibration\.json"):
        Cases(Catalog([tmp_path])).of(point())


@pytest.mark.parametrize("changes", [{"model": "./none"}, {"model": "x.json"}, {"accelerator": "bad.toml"}])
def test_a_row_that_names_a_file_costs_only_itself(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("x = 1\n")
    found = validate(catalog, read_results(written(tmp_path / "a.csv", row(**changes), row())))
    assert (found.rows, len(found.outcomes), len(found.missed)) == (2, 1, 1)


def test_there_is_no_half_replica(resolve: Cases) -> None:
    with pytest.raises(NotPredicted):
        one(resolve, parallelism="tp4", num_accelerators="6")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompts": "plenty"},
        {"num_prompts": "-5"},
        {"chunk_tokens": "big"},
        {"max_sequences": "-1"},
        {"metric": "decode_step_ms", "unit": "ms", "concurrency": "many"},
        {"concurrency": "rate 0 req/s"},
    ],
)
def test_what_a_row_says_is_not_dropped_in_silence(resolve: Cases, changes: dict[str, str]) -> None:
    with pytest.raises(NotPredicted):
        resolve.of(point(**changes))


def test_the_precision_of_the_row_is_kept_or_said(resolve: Cases) -> None:
    case = one(resolve, accelerator="H200", model="Llama-2-70B", scenario="Offline", precision="bf16", concurrency="",
               num_accelerators="8", input_len="290", output_len="294")  # fmt: skip
    assert case.deployment.precision.id == "bf16" or any("precision" in said for said in case.assumed)


@pytest.mark.parametrize(("metric", "unit"), [("batch_e2e_latency_s", "s"), ("mean_step_ms_derived", "ms")])
def test_a_latency_of_a_batch_is_of_a_batch(resolve: Cases, metric: str, unit: str) -> None:
    assert one(resolve, metric=metric, unit=unit).method == "batch"
