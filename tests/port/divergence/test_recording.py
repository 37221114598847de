"""What a recording holds, what it costs, and which files are refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.port.divergence import small

from crosstie.core.errors import BadData, BadInput
from crosstie_port.divergence import routing
from crosstie_port.divergence.comparison import compare
from crosstie_port.divergence.digest import LAYOUTS, TensorSummary, chosen, draws, positions, summarise
from crosstie_port.divergence.engines import RecordOutputs, loaded_model, sglang_hook
from crosstie_port.divergence.recording import TensorRecorder, record
from crosstie_port.divergence.records import read

DATA = Path(__file__).with_name("data")


def linear(path: Path, *, seed: int = 0, width: int = 8, value: float = 1.0, calls: int = 1, times: int = 1) -> Path:
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU())
    with torch.inference_mode(), record(made, path, seed=seed, calls=calls):
        for _ in range(times):
            made(torch.full((4, 8), value))
    return path


def test_the_same_run_writes_the_same_bytes(tmp_path: Path) -> None:
    assert linear(tmp_path / "a.npz").read_bytes() == linear(tmp_path / "b.npz").read_bytes()


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = small.model()
    with torch.inference_mode(), record(made, tmp_path / "a.npz", head=small.WIDTH) as recorder:
        made(small.tokens())
    got, was = read(tmp_path / "a.npz"), recorder.recording
    assert (got.entries, got.weights, got.machine, got.seed) == (was.entries, was.weights, was.machine, was.seed)
    for one, other in zip(got.summaries, was.summaries, strict=True):
        assert (one.shape, one.dtype, one.hash, one.norm) == (other.shape, other.dtype, other.hash, other.norm)
        np.testing.assert_array_equal(one.samples, other.samples.astype(np.float32))
    assert {entry.module for entry in got.entries} == {
        name for name, module in made.named_modules() if name != "layers"
    }


def test_a_large_model_takes_a_few_megabytes() -> None:
    """A tensor of a thousand heads' width takes what a small one takes: about two kilobytes."""
    held = summarise(torch.randn(64, 8192), 0, 128)
    assert held.samples.nbytes / 2 + held.rows.nbytes / 2 + held.groups.nbytes / 2 < 4096


def test_nothing_is_written_where_the_model_fails(tmp_path: Path) -> None:
    made = torch.nn.Linear(4, 4)
    with pytest.raises(RuntimeError), record(made, tmp_path / "a.npz"):
        made(torch.zeros(3))
    assert not list(tmp_path.iterdir())
    assert not made._forward_hooks
    assert not made._forward_pre_hooks


def test_each_call_is_kept_as_often_as_asked(tmp_path: Path) -> None:
    calls = [entry.call for entry in read(linear(tmp_path / "a.npz", calls=2, times=3)).entries if entry.module == "1"]
    assert calls == [0, 0, 1, 1]


def test_patterns_choose_modules(tmp_path: Path) -> None:
    made = small.model()
    with torch.inference_mode(), record(made, tmp_path / "a.npz", modules=["layers.1.*"]):
        made(small.tokens())
    assert all(entry.module.startswith("layers.1.") for entry in read(tmp_path / "a.npz").entries)
    with (
        pytest.raises(BadInput, match=r"no module is called nowhere\.\*; such as "),
        record(made, tmp_path / "b.npz", modules=["nowhere.*"]),
    ):
        pass


def test_a_block_that_runs_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing was recorded"), record(torch.nn.Linear(2, 2), tmp_path / "a.npz"):
        pass


def test_inputs_are_taken_before_a_module_writes_into_them(tmp_path: Path) -> None:
    made = torch.nn.ReLU(inplace=True)
    with torch.inference_mode(), record(made, tmp_path / "a.npz"):
        made(torch.tensor([[-1.0, 2.0]]))
    before, after = (read(tmp_path / "a.npz").summaries[i] for i in (0, 1))
    assert before.norm == pytest.approx(5.0**0.5)
    assert after.norm == pytest.approx(2.0)


def test_samples_lie_where_they_lay_on_every_machine() -> None:
    """The positions are part of the format: other ones need another version."""
    assert draws(0, 1, 4, 1000).tolist() == [700, 519, 226, 561]
    assert chosen(7, 3, 4, 50).tolist() == sorted(set(chosen(7, 3, 4, 50).tolist()))
    assert chosen(7, 3, 4, 50)[[0, -1]].tolist() == [0, 49]
    for shape in ((1, 1), (3,), (24, 256), (2, 5, 96), (1000, 7)):
        found = positions(shape, 0, 32)
        assert found.min() >= 0
        assert found.max() < np.prod(shape)
        assert len(found) % (len(LAYOUTS) + 1) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float16])
def test_every_type_is_summarised(dtype: torch.dtype) -> None:
    held: TensorSummary = summarise(torch.tensor([[0.0, 1.0, 1.0, 0.0]]).to(dtype), 0)
    assert held.norm == pytest.approx(2.0**0.5)
    assert (held.zeros, held.nans) == (2, 0)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 1}, r"a\.npz and .*b\.npz have other seeds, 0 and 1"),
    "input": ({"value": 2.0}, r"have other inputs: input 0 of the model differs"),
    "model": ({"width": 9}, r"are of other models: 0\.weight is \[8, 8\] and \[9, 8\]"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_the_same_question_is_refused(name: str, tmp_path: Path) -> None:
    options, said = REFUSALS[name]
    with pytest.raises(BadInput, match=said):
        compare(linear(tmp_path / "a.npz"), linear(tmp_path / "b.npz", **options))


def changed(path: Path, **keys: Any) -> Path:
    with np.load(path) as opened:
        arrays = dict(opened)
    header = json.loads(bytes(arrays["header"])) | keys
    header = {name: value for name, value in header.items() if value is not None}
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"version": 9}, r"version: 9; this Crosstie reads 2: record again"),
        ({"format": "other"}, "not a recording"),
        ({"machine": None}, "damaged: .* missing required field `machine`"),
        ({"shapes": [[4, 8]]}, "damaged"),
        ({"entries": [["", "Linear", True, 0, "in", 0, 99]]}, "an entry without a summary"),
    ],
)
def test_a_damaged_file_is_refused(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=said):
        read(changed(linear(tmp_path / "a.npz"), **keys))


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    file = linear(tmp_path / "a.npz")
    (tmp_path / "cut.npz").write_bytes(file.read_bytes()[:-200])
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").touch()
    np.save(tmp_path / "array.npy", np.zeros(3))
    for name in ("cut.npz", "text.npz", "empty.npz", "array.npy", "none.npz"):
        with pytest.raises(BadData, match=name):
            read(tmp_path / name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_h200_and_a_processor_agree_up_to_rounding(dtype: str) -> None:
    """The model of small.py on an H200 (PyTorch 2.11) and on a processor (2.13), 2026-11-16."""
    got = compare(DATA / f"cpu-{dtype}.npz", DATA / f"h200-{dtype}.npz")
    assert (got.verdict, got.compared, got.not_compared) == ("same", 58, [])
    assert got.machines[1]["device"] == "NVIDIA H200"
    assert 0.0 < got.largest_error < got.explained


def test_a_fault_on_an_h200_is_named_from_a_processor() -> None:
    got = compare(DATA / "cpu-bfloat16.npz", DATA / "h200-bfloat16-halved.npz")
    assert got.first is not None
    assert got.first.step.module == "layers.2.mlp.down_proj"
    assert got.first.causes[0].signature == "factor-2"


class Worker(RecordOutputs):
    """As vLLM makes one: its own worker class with the extension among its bases."""

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def get_model(self) -> torch.nn.Module:
        return self.model


def test_the_worker_s_extension_records_between_two_calls(tmp_path: Path) -> None:
    worker = Worker(torch.nn.Linear(4, 4))
    with pytest.raises(BadInput, match="crosstie_record was not called before"):
        worker.crosstie_record_end()
    assert worker.crosstie_record(str(tmp_path / "a.npz"), "3") == str(tmp_path / "a.npz")
    worker.model(torch.ones(2, 4))
    worker.crosstie_record_end()
    worker.model(torch.ones(2, 4))
    got = read(tmp_path / "a.npz")
    assert (got.seed, got.machine["engine"], len(got.entries)) == (3, "vllm", 2)


def test_sglang_s_hook_writes_when_the_next_pass_begins(tmp_path: Path) -> None:
    """SGLang calls the factory with the model in memory, then the model's forward, without the module's own call."""
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(200)))
    assert loaded_model() is made
    sglang_hook({"path": str(tmp_path / "a.npz")})
    made.forward(torch.ones(2, 4))
    assert not (tmp_path / "a.npz").exists()
    made.forward(torch.ones(2, 4))
    got = read(tmp_path / "a.npz")
    assert (got.machine["engine"], len(got.entries)) == ("sglang", 400)
    assert not made[0]._forward_hooks
    with pytest.raises(BadInput, match="needs a path"):
        sglang_hook({})


def test_nonsense_is_refused() -> None:
    with pytest.raises(BadInput, match="calls 0"):
        TensorRecorder(torch.nn.Linear(2, 2), calls=0)


class Router(torch.nn.Module):
    bias = torch.zeros(4)

    def forward(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores.softmax(-1), (scores + self.bias).topk(1, -1).indices


class Routed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), torch.nn.Embedding(4, 16)

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        return self.experts(self.router(scores)[1])[:, 0]


def routed(path: Path, nudge: float, tokens: int, of: int = 12) -> Path:
    torch.manual_seed(0)
    made, scores = Routed(), torch.randn(of, 4)
    # Two experts score the same up to a rounding.
    scores[:tokens, 1] = scores[:tokens].max(-1).values + 1.0
    scores[:tokens, 2] = torch.nextafter(scores[:tokens, 1], torch.tensor(nudge))
    with torch.inference_mode(), record(made, path):
        made(scores)
    return path


def test_a_near_tie_of_a_router_is_no_divergence(tmp_path: Path) -> None:
    """However many there are: the margins say what rounding turned over, and no token goes elsewhere in spite of one."""
    for tokens in (2, 12):
        got = compare(routed(tmp_path / "a.npz", 9.0, tokens), routed(tmp_path / "b.npz", -9.0, tokens))
        assert got.verdict == "same"
        assert [(one.module, one.tokens, one.of) for one in got.flips] == [("router", tokens, 12)]
        assert got.flips[0].largest_margin < routing.TURNS * got.flips[0].scores_off


def test_tokens_beyond_those_whose_choice_is_kept_may_flip_too(tmp_path: Path) -> None:
    got = compare(routed(tmp_path / "a.npz", 9.0, 100, 100), routed(tmp_path / "b.npz", -9.0, 100, 100))
    assert got.verdict == "same"
    assert got.flips[0].tokens >= got.flips[0].of == 64


def test_other_experts_in_spite_of_a_margin_are_a_fault(tmp_path: Path) -> None:
    def run(name: str, bias: float) -> Path:
        torch.manual_seed(0)
        made, scores = Routed(), torch.randn(12, 4)
        made.router.bias = torch.tensor([bias, 0.0, 0.0, 0.0])
        with torch.inference_mode(), record(made, tmp_path / name):
            made(scores)
        return tmp_path / name

    got = compare(run("a.npz", 0.0), run("b.npz", 3.0))
    assert got.first is not None
    assert (got.first.step.module, got.first.causes[0].signature) == ("router", "indices")
    assert "margins between the experts up to" in got.first.causes[0].evidence


def test_the_order_in_which_experts_are_taken_is_no_choice() -> None:
    scores, indices = torch.tensor([[0.5, 0.1, 0.4]]), torch.tensor([[2, 0]])
    assert routing.margins(scores, indices) == pytest.approx(0.3 / math.sqrt(0.42 / 3))
    # Others than those that score most: by a bias, so the margin is not known.
    assert routing.margins(scores, torch.tensor([[1, 0]])) == -1.0


CAUSAL = torch.ones(6, 6).tril().bool()
LEAST = torch.finfo(torch.float16).min
MASKS = {
    "minus infinity": torch.zeros(6, 6).masked_fill(~CAUSAL, -torch.inf),
    "the least of float16": torch.zeros(6, 6, dtype=torch.float16).masked_fill(~CAUSAL, LEAST),
    "bool": CAUSAL,
    "ones and zeros": CAUSAL.long(),
}
OTHER_MASKS = {
    "blocks nothing": torch.ones(6, 6).bool(),
    "inverted": ~CAUSAL,
    "shifted": torch.ones(6, 6).tril(1).bool(),
    "a sliding window or padding is left out": CAUSAL,
    "padding that the first has not": CAUSAL & torch.ones(6, 6).triu(-1).bool(),
}


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + bias


class Attends(torch.nn.Module):
    def __init__(self, mask: torch.Tensor | None):
        super().__init__()
        self.inner, self.mask = Masked(), mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, attention_mask=self.mask, bias=x * 2)


def masked(path: Path, mask: torch.Tensor | None) -> Path:
    made = Attends(mask)
    with torch.inference_mode(), record(made, path):
        made(torch.ones(6, 6))
    return path


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_what_it_blocks(name: str, tmp_path: Path) -> None:
    got = compare(masked(tmp_path / "a.npz", MASKS["minus infinity"]), masked(tmp_path / "b.npz", MASKS[name]))
    assert (got.verdict, got.not_compared) == ("same", [])


def test_a_backend_without_a_mask_is_compared_in_the_rest(tmp_path: Path) -> None:
    got = compare(masked(tmp_path / "a.npz", MASKS["bool"]), masked(tmp_path / "b.npz", None))
    assert (got.verdict, got.not_compared) == ("same", ["inner input attention_mask"])


@pytest.mark.parametrize("said", OTHER_MASKS)
def test_another_mask_is_named(said: str, tmp_path: Path) -> None:
    first = CAUSAL & torch.ones(6, 6).triu(-1).bool() if "left out" in said else CAUSAL
    got = compare(masked(tmp_path / "a.npz", first), masked(tmp_path / "b.npz", OTHER_MASKS[said]))
    assert got.first is not None
    assert (got.first.step.what, got.first.causes[0].signature) == ("input attention_mask", "mask")
    assert said in got.first.causes[0].what


def test_a_recording_of_the_h200_is_compared_with_one_of_now(tmp_path: Path) -> None:
    """The H200's were made before tensors had names, which were put into the files afterwards, from a recording here."""
    made = small.model()
    with torch.inference_mode(), record(made, tmp_path / "b.npz", head=small.WIDTH):
        made(small.tokens())
    got = compare(DATA / "h200-float32.npz", tmp_path / "b.npz")
    assert (got.verdict, got.compared, got.not_compared) == ("same", 58, [])
