"""`crosstie port`: every status of a step, every reason why a file is not taken, the page, and slips in one line.

The recordings are an H200's, labelled here as those of the model and the parts that a test asks for: nothing of this
ran on an AMD GPU.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_widths import fits
from tests.conftest import Command, Outcome
from tests.port.checkpoint.test_hub import Hub, hub as hub
from tests.port.preflight import tiny
from tests.port.preflight.test_gguf_model import SHAPES, tensors, write as write_gguf
from tests.prove.parity.fake_engine import Engine, served
from tests.run.emulate.running import emulated_beside, fleet, pool

from crosstie_port.capture.parts import part
from crosstie_port.divergence.records import read, write

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "tests" / "port" / "divergence" / "data"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
KERNEL = "import triton\n\n\n@triton.jit\ndef scale(x):\n    pass\n"
STEP = "import torch\n\n\ndef decode(x):\n    return x\n"
DESK = ["model", "source", "kernels", "capture", "recipe"]
GPUS = ["record-h200", "machine", "record-mi355x", "diff", "parity"]


class Port:
    """A checkpoint, sources and an empty folder of results, all of a minute ago."""

    def __init__(self, folder: Path, crosstie: Command):
        self.model, self.source, self.results = folder / "toy", folder / "src", folder / "results"
        for one in (self.model, self.source, self.results):
            one.mkdir()
        (self.model / "config.json").write_text(json.dumps(CONFIG))
        (self.source / "ops.py").write_text(KERNEL)
        (self.source / "step.py").write_text(STEP)
        self.crosstie = crosstie
        for file in (*self.model.iterdir(), *self.source.iterdir()):
            shifted(file, -60)

    def run(self, *words: str) -> Outcome:
        where = ("--from", "h200", "--to", "mi355x", "--source", str(self.source), "--results", str(self.results))
        return self.crosstie("port", str(self.model), *where, *words)

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("--json").out)
        return found

    def steps(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.document()["steps"]}

    def save(self, name: str, document: object) -> Path:
        file = self.results / name
        text = document if isinstance(document, str) else json.dumps(document)
        file.write_text(text, errors="surrogateescape")
        return file

    def preflight(self, **changed: Any) -> dict[str, Any]:
        made = self.crosstie("preflight", str(self.model), "--on", "mi355x", "--json").out
        return {**json.loads(made), **changed}

    def sources(self, *words: str) -> dict[str, Any]:
        made = self.crosstie("preflight", "source", str(self.source), "--on", "mi355x", "--no-clang", *words, "--json")
        found: dict[str, Any] = json.loads(made.out)
        return found

    def kernels(self, *files: str, target: str = "mi355x", findings: tuple[Any, ...] = ()) -> dict[str, Any]:
        rows = [{"kernel": "scale", "file": f"{self.source}/{file}", "target": target} for file in files]
        return {"verdicts": {target: "ready"}, "findings": list(findings), "triton": "3.5", "kernels": rows}

    def capture(self, **changed: Any) -> dict[str, Any]:
        stand_in = str(part("mi355x"))
        whole = {"target": f"{self.source}/step.py:decode", "stand_in": stand_in, "verdicts": {"decode": "ok"}}
        return {**whole, "findings": [], **changed}

    def machine(self, accelerator: str = "mi355x", **changed: Any) -> dict[str, Any]:
        """A recorded H200 machine, taken for one of another part."""
        made = self.crosstie("doctor", "--from", str(ROOT / "examples/machines/h200"), "--engine", "vllm", "--json").out
        found: dict[str, Any] = json.loads(made.replace('"h200"', f'"{accelerator}"'))
        return {**found, "findings": [], "verdicts": {accelerator: "ready"}, **changed}

    def recording(self, name: str, of: str = "h200-float32", **machine: str) -> Path:
        found = read(RECORDED / f"{of}.npz")
        found.machine |= {"model": "LlamaForCausalLM", **machine}
        write(found, self.results / f"{name}.npz")
        return self.results / f"{name}.npz"

    def on_mi355x(self, of: str = "h200-float32") -> Path:
        return self.recording("mi355x", of, device="AMD Instinct MI355X", architecture="gfx950:sramecc+:xnack-")

    def parity(self, **engine: Any) -> dict[str, Any]:
        with served(Engine(models=("org/toy",))) as a, served(Engine(models=("toy",), **engine)) as b:
            quickly = ("--limit", "5", "--tokens", "6")
            found: dict[str, Any] = json.loads(self.crosstie("parity", a.url, b.url, *quickly, "--json").out)
        return found

    def desk(self) -> None:
        self.save("kernels.json", self.kernels("ops.py"))
        self.save("capture.json", self.capture())


def shifted(file: Path, seconds: float) -> None:
    at = time.time() + seconds
    os.utime(file, (at, at))


def finding(severity: str, target: str = "mi355x", file: str = "ops.py") -> dict[str, Any]:
    return {
        "check": "some", "severity": severity, "what": "this happens", "where": {"file": file}, "evidence": "e",
        "grounds": "compiled", "remedy": "do that", "target": target,
    }  # fmt: skip


@pytest.fixture
def port(tmp_path: Path, crosstie: Command) -> Port:
    return Port(tmp_path, crosstie)


def test_before_any_evidence_every_step_says_what_it_waits_for(port: Port) -> None:
    said = port.run()
    assert said.status == 0
    steps = port.steps()
    assert list(steps) == [*DESK, *GPUS]
    assert {name for name, one in steps.items() if one["status"] == "done"} == {"model", "source", "recipe"}
    for name, file in (
        ("kernels", "kernels.json"), ("capture", "capture.json"), ("record-h200", "h200.npz"),
        ("machine", "machine.json"), ("record-mi355x", "mi355x.npz"), ("parity", "parity.json"),
    ):  # fmt: skip
        assert (steps[name]["status"], steps[name]["file"]) == ("open", file)
        assert steps[name]["says"] == f"waits for {file}"
        assert f"{port.results}/{file}" in steps[name]["command"]
    assert steps["diff"]["says"] == "waits for h200.npz and mi355x.npz"
    assert port.document()["next"] == ["kernels", "capture", "record-h200"]
    assert "nothing here ran on mi355x" in said.out


def test_a_whole_port_is_ticked_off_file_by_file(port: Port) -> None:
    port.desk()
    port.recording("h200")
    assert port.document()["next"] == ["machine"]
    port.save("machine.json", port.machine())
    assert port.document()["next"] == ["record-mi355x"]
    port.on_mi355x()
    steps = port.steps()
    assert steps["diff"]["status"] == "done"
    assert steps["diff"]["says"].startswith("the same up to rounding: ")
    assert port.document()["next"] == ["parity"]
    port.save("parity.json", port.parity())
    said, found = port.run(), port.document()
    assert (said.status, found["status"], found["next"]) == (0, "done", [])
    assert {one["status"] for one in found["steps"]} == {"done"}
    assert found["effort"]["left"]["high_days"] == 0
    assert found["effort"]["all"]["high_days"] > 0
    assert "from mi355x itself: machine.json, mi355x.npz, parity.json" in said.out
    assert "on which GPUs is your word" in " ".join(said.out.split())


def test_without_sources_their_steps_are_left_out_and_said_to_be(port: Port) -> None:
    said = port.crosstie("port", str(port.model), "--from", "h200", "--to", "mi355x")
    assert said.status == 0
    assert "- left out: source, kernels, capture (--source names no sources)" in said.out
    assert "`mkdir results`, and --results results ticks steps off" in said.out
    for file in port.source.iterdir():
        file.write_text("x = 1\n")
    left_out = port.document()["left_out"]
    assert left_out == {"kernels": f"no Triton kernel in {port.source}", "capture": f"no PyTorch code in {port.source}"}


def test_links_to_nowhere_and_results_among_the_sources_are_no_trouble(port: Port) -> None:
    (port.source / "gone.py").symlink_to("nowhere.py")
    (port.source / "pipe.cu").mkdir()
    port.results = port.source / "results"
    port.results.mkdir()
    (port.results / "machine.json").mkdir()
    port.desk()
    steps = port.steps()
    assert [steps[name]["status"] for name in ("kernels", "capture", "machine")] == ["done", "done", "open"]
    assert steps["machine"]["not_taken"] == ["machine.json cannot be read: Is a directory"]


def test_what_fails_blocks_what_comes_after_and_is_status_1(port: Port) -> None:
    (port.source / "kernel.cubin").write_bytes(b"\x7fELF")
    said, steps = port.run(), port.steps()
    assert said.status == 1
    assert steps["source"]["status"] == "failed"
    assert steps["source"]["says"] == "needs changes: 1 finding in 1 file"
    assert steps["source"]["effort"]["parts"].keys() == {"rewrite, 1 file"}
    assert (steps["machine"]["status"], steps["machine"]["says"]) == ("blocked", "first: source")
    assert (steps["record-mi355x"]["status"], steps["parity"]["status"]) == ("blocked", "blocked")
    assert steps["record-h200"]["status"] == "open"
    assert port.document()["status"] == "stuck"
    # What was done on the GPU all the same stands.
    port.save("machine.json", port.machine())
    assert port.steps()["machine"]["status"] == "done"


def test_a_model_that_does_not_run_blocks_its_recipe(port: Port) -> None:
    port.save("model.json", port.preflight(findings=[finding("error")], verdicts={"mi355x": "will not run"}))
    steps = port.steps()
    assert (steps["model"]["status"], steps["model"]["evidence"]) == ("failed", ["model.json"])
    assert steps["model"]["remedies"] == ["this happens: do that"]
    assert (steps["recipe"]["status"], steps["recipe"]["says"]) == ("blocked", "first: model")


def test_what_no_rule_knows_is_open_until_both_endpoints_have_answered(port: Port) -> None:
    port.desk()
    port.save(
        "model.json", port.preflight(findings=[finding("unknown")], verdicts={"mi355x": "not known"}, settings={})
    )
    port.save("machine.json", port.machine())
    assert port.steps()["model"]["status"] == "open"
    assert port.run().status == 0
    port.save("parity.json", port.parity())
    assert port.steps()["model"]["says"] == "not known; answered by parity"
    assert port.steps()["model"]["status"] == "done"
    # Kernels that nobody has compiled are not answered by it.
    (port.source / "more.py").write_text(KERNEL)
    shifted(port.source / "more.py", -60)
    steps = port.steps()
    assert (steps["kernels"]["status"], steps["parity"]["status"]) == ("open", "done")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"checkpoint": "elsewhere/toy"}, "is of elsewhere/toy, not of "),
        ({"engine": "sglang 0.5.18"}, "is of the engine sglang 0.5.18, not of vllm"),
        ({"verdicts": {"mi300x": "ready"}}, "is of mi300x, not of mi355x"),
        ({"findings": "none"}, "is not what this `crosstie preflight --json` prints: Expected `array`, got `str`"),
    ],
)
def test_a_checked_model_of_something_else_is_not_taken(port: Port, changed: dict[str, Any], why: str) -> None:
    port.save("model.json", port.preflight(**changed))
    step = port.steps()["model"]
    assert len(step["not_taken"]) == 1
    assert step["not_taken"][0].startswith(f"model.json {why}")
    # It was worked out in its place.
    assert (step["status"], step["evidence"]) == ("done", [])
    assert f"not taken: model.json {why}" in port.run().out


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty: `crosstie preflight` has not ended, or could not run"),
        ("{", "is not what this `crosstie preflight --json` prints: Input data was truncated"),
        ("[]", "is not what this `crosstie preflight --json` prints: Expected `object`, got `array`"),
        ('{"model": "toy"}', "is not what this `crosstie preflight --json` prints: Object missing required field"),
        ("\udc80", "is not what this `crosstie preflight --json` prints: "),
    ],
)
def test_a_file_that_is_no_such_document_is_not_taken(port: Port, text: str, why: str) -> None:
    port.save("model.json", text)
    assert port.steps()["model"]["not_taken"][0].startswith(f"model.json {why}")


def test_a_saved_document_of_the_sources_spares_the_time(port: Port) -> None:
    file = port.save("source.json", port.sources())
    step = port.steps()["source"]
    assert (step["status"], step["evidence"], step["not_taken"]) == ("done", ["source.json"], [])
    for changed, why in (
        ({"source": "/elsewhere"}, "is of /elsewhere, not of"),
        ({"known": 2}, "leaves findings out: run its command without --baseline"),
        ({"files": {"cpp": 3}, "hipify": None}, "does without HIPIFY: run its command without --no-hipify"),
        ({"verdicts": {"mi300x": "no hazard found"}}, "is of mi300x, not of mi355x"),
    ):
        port.save("source.json", {**port.sources(), **changed})
        step = port.steps()["source"]
        assert step["not_taken"][0].startswith(f"source.json {why}"), changed
        assert step["evidence"] == []
    file.write_text(json.dumps(port.sources()))
    shifted(port.source / "ops.py", 60)
    assert port.steps()["source"]["not_taken"] == [
        f"source.json is older than {port.source}/ops.py: run its command again"
    ]


def test_kernels_are_done_when_every_file_with_one_was_compiled(port: Port) -> None:
    (port.source / "more.py").write_text(KERNEL)
    shifted(port.source / "more.py", -60)
    step = port.steps()["kernels"]
    assert step["says"] == "waits for kernels-more.json"
    assert step["what"] == "do the Triton kernels of more.py and 1 other file compile for mi355x?"
    port.save("kernels-more.json", port.kernels("more.py"))
    step = port.steps()["kernels"]
    assert (step["status"], step["file"]) == ("open", "kernels-ops.json")
    assert step["says"] == "compiled, 1 configuration; 1 of 2 files are not compiled yet"
    port.save("kernels-ops.json", port.kernels("ops.py"))
    assert port.steps()["kernels"]["status"] == "done"
    port.save("kernels-ops.json", port.kernels("ops.py", findings=(finding("error"),)))
    step = port.steps()["kernels"]
    assert (step["status"], step["effort"]["high_days"]) == ("failed", 60)


def test_kernels_of_something_else_are_not_taken(port: Port) -> None:
    port.save("kernels-1.json", port.kernels("ops.py", target="mi300x"))
    port.save("kernels-2.json", port.kernels("theirs.py", "../ops.py"))
    (port.source.parent / "ops.py").write_text(KERNEL)
    file = port.save("kernels-3.json", port.kernels("ops.py"))
    shifted(file, -600)
    step = port.steps()["kernels"]
    assert step["status"] == "open"
    assert step["not_taken"] == [
        "kernels-1.json is of mi300x, not of mi355x",
        f"kernels-2.json has no kernel of {port.source}",
        f"kernels-3.json is older than {max(port.source.iterdir(), key=lambda one: one.stat().st_mtime)}: "
        "run its command again",
    ]
    # Made in a container: the folder's name is in the path.
    port.save("kernels-3.json", {**port.kernels(), "kernels": [{"file": "/w/lib/ops.py", "target": "mi355x"}]})
    assert port.steps()["kernels"]["status"] == "open"
    port.save("kernels-3.json", {**port.kernels(), "kernels": [{"file": "/w/src/ops.py", "target": "mi355x"}]})
    assert port.steps()["kernels"]["status"] == "done"
    (port.results / "kernels-3.json").unlink()
    # The instruction set may be named in place of the accelerator.
    port.save("kernels-4.json", port.kernels("ops.py", target="gfx950"))
    assert port.steps()["kernels"]["status"] == "done"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"stand_in": str(part("mi300x"))}, "is of the part AMD Instinct MI300X (gfx942), not of"),
        ({"target": "torch.nn:Linear"}, "is of torch.nn:Linear, which is not in"),
    ],
)
def test_a_capture_of_something_else_is_not_taken(port: Port, changed: dict[str, Any], why: str) -> None:
    port.save("capture.json", port.capture(**changed))
    step = port.steps()["capture"]
    assert (step["status"], step["says"]) == ("open", "waits for capture.json: what is there is not taken")
    assert step["not_taken"][0].startswith(f"capture.json {why}")


def test_a_capture_is_done_failed_or_open(port: Port) -> None:
    for findings, verdict, status in (
        ([], "ok", "done"), ([finding("error", "")], "error", "failed"), ([finding("unknown", "")], "unknown", "open"),
    ):  # fmt: skip
        for target in ("step:decode", "src/step.py", f"{port.source}/step.py:STEPS[decode]"):
            port.save("capture.json", port.capture(findings=findings, verdicts={"decode": verdict}, target=target))
            step = port.steps()["capture"]
            assert (step["status"], step["says"]) == (status, f"decode {verdict}")


def test_a_machine_without_the_gpu_is_not_taken(port: Port) -> None:
    port.save("machine.json", port.machine("h200"))
    step = port.steps()["machine"]
    assert step["status"] == "open"
    assert step["not_taken"] == ["machine.json is of a machine with h200, and no mi355x"]
    port.save("machine.json", port.machine(machine={"taken": "2026-11-18", "system": "Linux"}))
    assert port.steps()["machine"]["not_taken"] == ["machine.json is of a machine with no GPU, and no mi355x"]


def test_a_machine_that_an_engine_trips_over_has_failed(port: Port) -> None:
    port.desk()
    port.save("machine.json", port.machine(findings=[finding("error")]))
    steps = port.steps()
    assert steps["machine"]["status"] == "failed"
    assert steps["record-mi355x"]["says"] == "first: machine"
    assert port.run().status == 1


def test_a_machine_with_too_few_gpus_has_failed(port: Port) -> None:
    port.save("machine.json", port.machine())
    large = port.crosstie(
        "port", "deepseek-v3", "--from", "h200", "--to", "mi355x", "--results", str(port.results), "--json"
    )
    (step,) = [one for one in json.loads(large.out)["steps"] if one["name"] == "machine"]
    assert step["status"] == "failed"
    assert re.fullmatch(r"1 x mi355x, and the recipe's replica takes \d", step["says"])


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"device": "cpu", "architecture": ""}, "was recorded on the CPU: it says nothing of mi355x"),
        ({"device": "NVIDIA H200"}, "was recorded on NVIDIA H200 (sm_90), not on mi355x"),
        (
            {"device": "AMD Instinct MI350X", "architecture": "gfx950"},
            "was recorded on AMD Instinct MI350X (gfx950), not on mi355x",
        ),
        (
            {"device": "AMD Instinct MI355X", "architecture": "gfx950", "model": "Qwen3ForCausalLM"},
            "is of another model than toy: a Qwen3ForCausalLM, not a LlamaForCausalLM",
        ),
    ],
)
def test_a_recording_of_something_else_is_not_taken(port: Port, made: dict[str, str], why: str) -> None:
    port.recording("mi355x", **made)
    step = port.steps()["record-mi355x"]
    assert (step["status"], step["not_taken"]) == ("open", [f"mi355x.npz {why}"])


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("num_hidden_layers", 6, "4 layers, not 6"), ("hidden_size", 384, "no weight is 384 wide")],
)
def test_a_recording_of_a_model_of_another_shape_is_not_taken(port: Port, key: str, value: int, why: str) -> None:
    (port.model / "config.json").write_text(json.dumps({**CONFIG, key: value}))
    shifted(port.model / "config.json", -60)
    port.recording("h200")
    assert port.steps()["record-h200"]["not_taken"] == [f"h200.npz is of another model than toy: {why}"]


def test_a_recording_of_an_engine_has_its_own_class_and_of_a_rank_some_layers(port: Port) -> None:
    file = port.recording("h200", model="LlamaForTensorParallel")
    assert port.steps()["record-h200"]["status"] == "open"
    port.recording("h200", model="LlamaForTensorParallel", engine="vllm")
    assert port.steps()["record-h200"]["status"] == "done"
    found = read(file)
    found.weights |= {f"vision.blocks.{number}.weight": [256, 256] for number in range(9)}
    write(found, file)
    assert port.steps()["record-h200"]["status"] == "done"
    found.weights = {name: shape for name, shape in found.weights.items() if ".3." not in name}
    write(found, file)
    assert port.steps()["record-h200"]["status"] == "open"
    found.machine["ranks"] = "2"
    write(found, file)
    assert port.steps()["record-h200"]["status"] == "done"


def test_recordings_are_younger_than_what_they_are_of(port: Port) -> None:
    port.recording("h200")
    port.on_mi355x()
    shifted(port.source / "step.py", 60)
    steps = port.steps()
    # What runs on the machine of today does not run the port.
    assert steps["record-h200"]["status"] == "done"
    assert steps["record-mi355x"]["not_taken"] == [
        f"mi355x.npz is older than {port.source}/step.py: run its command again"
    ]
    assert steps["diff"]["says"] == "waits for mi355x.npz"
    shifted(port.model / "config.json", 60)
    assert port.steps()["record-h200"]["status"] == "open"


def test_a_damaged_recording_is_not_taken(port: Port) -> None:
    port.save("h200.npz", "no recording")
    assert port.steps()["record-h200"]["not_taken"][0].startswith("h200.npz not a recording")


def test_recordings_that_part_are_a_failed_diff(port: Port) -> None:
    port.recording("h200", "h200-bfloat16")
    port.on_mi355x("h200-bfloat16-halved")
    step = port.steps()["diff"]
    assert step["status"] == "failed"
    assert step["says"].startswith("diverges at layers.")
    assert port.run().status == 1


def test_recordings_of_other_prompts_cannot_be_compared(port: Port) -> None:
    port.recording("h200")
    file = port.on_mi355x()
    found = read(file)
    found.seed = 7
    write(found, file)
    step = port.steps()["diff"]
    assert step["status"] == "open"
    assert "cannot be compared" in step["not_taken"][0]
    assert "seeds" in step["not_taken"][0]


@pytest.fixture
def proved(port: Port) -> Port:
    port.desk()
    port.save("machine.json", port.machine())
    return port


def test_parity_is_done_failed_or_open(proved: Port) -> None:
    for engine, status, says in (({}, "done", "the same model: "), ({"sharp": 2.0}, "failed", "not the same model: ")):
        proved.save("parity.json", proved.parity(**engine))
        step = proved.steps()["parity"]
        assert step["status"] == status
        assert step["says"].startswith(says)
    document = proved.parity()
    document["comparisons"][0]["verdict"] = "unsure"
    proved.save("parity.json", document)
    assert proved.steps()["parity"]["says"].endswith("; more prompts make it surer")
    assert proved.steps()["parity"]["status"] == "open"
    assert proved.document()["status"] == "open"
    worse = {**proved.parity(), "lm_eval": [{"worse": True}]}
    proved.save("parity.json", worse)
    assert proved.steps()["parity"]["says"] == "lm-eval: worse than before"


def test_parity_of_something_else_is_not_taken(proved: Port) -> None:
    document = proved.parity()
    (one,) = document["comparisons"]
    for changed, why in (
        ({"b_model": "llama-3.1-8b"}, "is of the model llama-3.1-8b, not of toy"),
        ({"b": one["a"]}, "compares http://"),
        ({"emulated": True}, "is of an emulated endpoint: it says nothing of mi355x"),
    ):
        proved.save("parity.json", {**document, "comparisons": [{**one, **changed}]})
        step = proved.steps()["parity"]
        assert step["status"] == "open"
        assert step["not_taken"][0].startswith(f"parity.json {why}")
    del one["emulated"]
    proved.save("parity.json", document)
    assert "missing required field `emulated`" in proved.steps()["parity"]["not_taken"][0]
    proved.save("parity.json", {**document, "comparisons": []})
    assert "compares nothing" in proved.steps()["parity"]["not_taken"][0]


def test_parity_says_nothing_of_a_gpu_that_no_machine_has(proved: Port) -> None:
    proved.save("parity.json", proved.parity())
    assert proved.steps()["parity"]["status"] == "done"
    (proved.results / "machine.json").unlink()
    assert proved.steps()["parity"]["not_taken"] == [
        "parity.json names endpoints, not GPUs: give parity --machine-b, or machine.json must show a mi355x"
    ]
    for gpus, status, says in (
        ({"b": {"mi355x": 8}}, "done", "B on mi355x, by doctor's records"),
        ({"a": {"h200": 8}, "b": {"mi355x": 8}}, "done", "A on h200 and B on mi355x"),
        ({"b": {"mi300x": 8}}, "open", "asked B on a machine with mi300x, and no mi355x"),
        ({"a": {}, "b": {"mi355x": 8}}, "open", "asked A on a machine with no GPU, and no h200"),
    ):
        proved.save("parity.json", {**proved.parity(), "gpus": gpus})
        step = proved.steps()["parity"]
        assert step["status"] == status
        assert says in " ".join([step["says"], *step["not_taken"]])


@pytest.mark.parametrize(
    ("model", "kind"), [("llama-3.1-8b", "float32"), ("llama-3.1-70b", ""), ("qwen3-32b", "bfloat16")]
)
def test_a_model_is_recorded_as_one_gpu_holds_it(crosstie: Command, model: str, kind: str) -> None:
    said = crosstie("port", model, "--from", "h100", "--to", "mi300x", "--json")
    commands = [one["command"] for one in json.loads(said.out)["steps"] if one["name"].startswith("record")]
    # Both in the same type, though an MI300X holds the largest in bfloat16 and the second in float32 too.
    assert len(commands) == 2
    assert all(one.endswith(f"--dtype {kind}") if kind else "RecordOutputs" in one for one in commands)


def test_parity_writes_the_gpus_of_a_record(port: Port, emulated: str, crosstie: Command) -> None:
    port.save("machine.json", port.machine())
    record = str(port.results / "machine.json")
    words = ("parity", emulated, emulated, "--limit", "1", "--tokens", "2")
    found = json.loads(crosstie(*words, "--machine-b", record, "--json").out)
    assert found["gpus"] == {"b": {"mi355x": 1}}
    assert "B runs on a machine with 1 x mi355x, as its record says" in crosstie(*words, "--machine-b", record).out
    Path(record).write_text("{}")
    said = crosstie(*words, "--machine", record)
    assert said.status == 2
    assert "no document of `crosstie doctor --json`" in said.err


@pytest.fixture
def emulated() -> Iterator[str]:
    with emulated_beside(fleet(pool(replicas=1)), 50.0) as made:
        yield made.fleet.pools[0].backends[0]


def test_parity_knows_an_emulated_endpoint(emulated: str, crosstie: Command) -> None:
    """No model is behind one, and two of them agree about everything."""
    found = json.loads(crosstie("parity", emulated, emulated, "--limit", "2", "--tokens", "4", "--json").out)
    (one,) = found["comparisons"]
    assert one["emulated"] is True
    assert "A or B is emulated: there is no model behind it" in one["notes"]


def test_a_gguf_file_has_no_recordings(crosstie: Command, tmp_path: Path) -> None:
    file = str(write_gguf(tmp_path / "small-Q4_K_M.gguf", *tensors(SHAPES)))
    said = crosstie("port", file, "--from", "h200", "--to", "mi300x", "--engine", "llama.cpp", "--json")
    found = json.loads(said.out)
    assert said.status == 0
    assert found["left_out"].keys() >= {"record-h200", "record-mi300x", "diff"}
    assert {one["name"]: one["status"] for one in found["steps"]} == {
        "model": "done", "recipe": "open", "machine": "open", "parity": "open"
    }  # fmt: skip


def test_a_repository_of_the_hub_is_checked_before_the_download(crosstie: Command, hub: Hub) -> None:
    tiny.write(hub.folder / "tiny", "bf16")
    said = crosstie("port", "org/tiny", "--from", "h200", "--to", "mi300x", "--json")
    steps = {one["name"]: one for one in json.loads(said.out)["steps"]}
    assert (said.status, steps["model"]["status"]) == (0, "done")
    assert (steps["recipe"]["status"], steps["recipe"]["waiting"]) == ("open", False)
    assert steps["recipe"]["command"] == "crosstie recipe MODEL --weights org/tiny --on mi300x --engine vllm"
    assert "--model ./tiny" in steps["record-h200"]["command"]


def test_the_page_has_the_answer_and_the_document(port: Port, tmp_path: Path) -> None:
    page = tmp_path / "port.html"
    said = port.run("--html", str(page))
    text = page.read_text()
    assert "report written to" in said.err
    assert "toy from h200 to mi355x on vllm" in text
    assert "crosstie preflight kernels" in text
    document = json.loads(text.partition('id="document">')[2].partition("</script>")[0])
    assert document == port.document()
    assert port.run("--html", "port.txt").status == 2


def test_it_prints_the_same_at_every_width(proved: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    proved.save("model.json", proved.preflight(findings=[finding("error")], verdicts={"mi355x": "will not run"}))
    proved.save("parity.json", {})
    fits(lambda: proved.run().out, monkeypatch)
    fits(lambda: proved.run("-v").out, monkeypatch)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["toy", "--to", "mi355x"], "Missing option '--from'"),
        (["llama-3.1-8b", "--from", "h200", "--to", "h200"], "--from and --to are both h200: nothing to port"),
        (["llama-3.1-8b", "--from", "h200", "--to", "mi35x"], "unknown accelerator 'mi35x'"),
        (["llama-3.1-8b", "--from", "h200", "--to", "mi355x", "--engine", "tgi"], "unknown engine 'tgi'"),
        (["no-model", "--from", "h200", "--to", "mi355x"], "unknown model 'no-model'"),
        (["llama-3.1-8b", "--from", "h200", "--to", "mi355x", "--source", "gone"], "--source gone: does not exist"),
        (["llama-3.1-8b", "--from", "h200", "--to", "mi355x", "--results", "gone"], "--results gone: no such folder"),
    ],
)
def test_a_slip_is_one_line_and_status_2(words: list[str], says: str, crosstie: Command) -> None:
    said = crosstie("port", *words)
    assert (said.status, said.out) == (2, "")
    assert len(said.err.splitlines()) == 1
    assert says in said.err
