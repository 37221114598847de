"""Faults that ports have, injected one by one: the module is named, and the cause."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from tests.port.divergence import small

from crosstie_port.divergence.comparison import Comparison, compare
from crosstie_port.divergence.recording import record
from crosstie_port.divergence.records import Recording, read

Fault = Callable[[small.Small], object]


@cache
def fresh(dtype: torch.dtype) -> small.Small:
    return small.model(dtype)


def recorded(path: Path, fault: Fault | None = None, dtype: torch.dtype = torch.float32, **options: object) -> Path:
    made = deepcopy(fresh(dtype))
    with torch.inference_mode():
        if fault is not None:
            fault(made)
        with record(made, path, head=small.WIDTH, **options):  # type: ignore[arg-type]
            made(small.tokens())
    return path


@cache
def sound(dtype: torch.dtype) -> Recording:
    with TemporaryDirectory() as folder:
        return read(recorded(Path(folder) / "sound.npz", dtype=dtype))


def found(tmp_path: Path, fault: Fault | None, dtype: torch.dtype = torch.float32) -> Comparison:
    return compare(sound(dtype), recorded(tmp_path / "b.npz", fault, dtype))


def wrapped(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The module's own forward, then something else."""
    forward = module.forward
    module.forward = lambda *args: change(forward(*args))


def scaled(factor: float) -> Fault:
    return lambda made: made.layers[2].mlp.down_proj.weight.mul_(factor)


def by_channel(made: small.Small) -> object:
    return made.layers[1].mlp.up_proj.weight.mul_(torch.linspace(0.2, 3.0, small.INNER)[:, None])


def heads_permuted(made: small.Small) -> None:
    weight = made.layers[1].self_attn.q_proj.weight
    weight.copy_(weight.view(small.HEADS, small.WIDTH, -1)[[1, 0, 2, 3, 4, 5, 7, 6]].reshape_as(weight))


def rotary_layout(made: small.Small) -> None:
    weight = made.layers[0].self_attn.k_proj.weight
    pairs = weight.view(small.KV_HEADS, small.WIDTH // 2, 2, -1).transpose(1, 2)
    weight.copy_(pairs.reshape_as(weight).clone())


def halves(made: small.Small) -> None:
    wrapped(made.layers[3].mlp.up_proj, lambda y: torch.cat(y.chunk(2, -1)[::-1], -1))


def viewed(made: small.Small) -> None:
    """Heads before tokens, in memory that is read as tokens before heads."""

    def change(y: torch.Tensor) -> torch.Tensor:
        return y.view(1, small.TOKENS, small.KV_HEADS, small.WIDTH).transpose(1, 2).reshape(y.shape)

    wrapped(made.layers[2].self_attn.v_proj, change)


def transposed(made: small.Small) -> None:
    wrapped(made.layers[1].mlp.down_proj, lambda y: y[0].t().reshape(y.shape))


def shard_missing(made: small.Small) -> object:
    return made.layers[1].self_attn.q_proj.weight[3 * small.WIDTH : 5 * small.WIDTH].zero_()


def not_a_number(made: small.Small) -> object:
    return made.layers[2].mlp.gate_proj.weight[7, 3].fill_(torch.nan)


def overflowed(made: small.Small) -> None:
    wrapped(made.layers[2].mlp.gate_proj, lambda y: torch.where(y > 2.5, torch.inf, y))


def uncapped(made: small.Small) -> None:
    setattr(made.cap, "forward", lambda logits: logits)  # noqa: B010


def no_rope_scaling(made: small.Small) -> None:
    made.rotary.scaling = 1.0


def no_normalisation(made: small.Small) -> None:
    norm = made.layers[2].post_norm
    norm.forward = lambda x: x * norm.weight


def one_head(made: small.Small) -> object:
    return made.layers[0].self_attn.v_proj.weight[: small.WIDTH].mul_(1.3)


def tokens_reordered(made: small.Small) -> None:
    wrapped(made.layers[1].self_attn.o_proj, lambda y: y.roll(1, 1))


def coarse(made: small.Small) -> None:
    product = made.layers[2].self_attn.q_proj
    product.forward = lambda x: (x.bfloat16() @ product.weight.bfloat16().t()).to(x.dtype)


def zeroed(made: small.Small) -> object:
    return made.layers[0].mlp.down_proj.weight.zero_()


def no_bias(made: small.Small) -> object:
    return made.layers[1].self_attn.v_proj.bias.zero_()


def weight_transposed(made: small.Small) -> object:
    weight = made.layers[1].self_attn.o_proj.weight
    return weight.copy_(weight.t().clone())


FAULTS: dict[str, tuple[Fault, str, str]] = {
    "half": (scaled(0.5), "layers.2.mlp.down_proj", "factor-2"),
    "twice": (scaled(2.0), "layers.2.mlp.down_proj", "factor-2"),
    "a scale of 1": (scaled(1 / 0.0231), "layers.2.mlp.down_proj", "scale"),
    "sign": (scaled(-1.0), "layers.2.mlp.down_proj", "sign"),
    "scales by channel": (by_channel, "layers.1.mlp.up_proj", "scale-by-channel"),
    "zeros": (zeroed, "layers.0.mlp.down_proj", "zeros"),
    "a shard": (shard_missing, "layers.1.self_attn.q_proj", "zeros"),
    "nan": (not_a_number, "layers.2.mlp.gate_proj", "nan"),
    "overflow": (overflowed, "layers.2.mlp.gate_proj", "infinite"),
    "heads": (heads_permuted, "layers.1.self_attn.q_proj", "permuted-heads"),
    "tokens": (tokens_reordered, "layers.1.self_attn.o_proj", "permuted-rows"),
    "rotary layout": (rotary_layout, "layers.0.self_attn.k_proj", "halves-of-a-head-for-pairs"),
    "gate and up": (halves, "layers.3.mlp.up_proj", "halves-swapped"),
    "a view": (viewed, "layers.2.self_attn.v_proj", "heads-before-tokens"),
    "transposed": (transposed, "layers.1.mlp.down_proj", "transposed"),
    "uncapped": (uncapped, "cap", "softcap"),
    "rope scaling": (no_rope_scaling, "rotary", "positions"),
    "no normalisation": (no_normalisation, "layers.2.post_norm", "scale-by-token"),
    "no bias": (no_bias, "layers.1.self_attn.v_proj", "bias"),
    "one head": (one_head, "layers.0.self_attn.v_proj", "part"),
    "a weight transposed": (weight_transposed, "layers.1.self_attn.o_proj", "weight-transposed"),
    "bf16 product": (coarse, "layers.2.self_attn.q_proj", "precision"),
}  # fmt: skip
# In the type that models are served in. The others follow the same paths.
COARSE = ("half", "zeros", "nan", "heads", "a view", "uncapped", "rope scaling", "no bias", "one head")


# Others follow the same paths.
SECOND = (
    "twice", "a scale of 1", "a shard", "overflow", "gate and up", "transposed", "a weight transposed", "sign",
    "scales by channel", "zeros", "tokens", "rotary layout", "uncapped", "no normalisation", "one head",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SECOND else []) for name in FAULTS]
)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    is_named(name, torch.float32, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", COARSE)
def test_a_fault_is_named_in_bfloat16(name: str, tmp_path: Path) -> None:
    is_named(name, torch.bfloat16, tmp_path)


def is_named(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    fault, module, signature = FAULTS[name]
    got = found(tmp_path, fault, dtype)
    assert got.verdict == "diverges"
    assert got.first is not None
    assert got.first.step.module == module
    assert got.first.causes[0].signature == signature


@pytest.mark.slow
def test_what_is_as_small_as_rounding_is_not_told(tmp_path: Path) -> None:
    """A product in bfloat16, of a model in bfloat16."""
    assert found(tmp_path, coarse, torch.bfloat16).verdict == "same"


def test_without_a_fault_it_is_the_same(tmp_path: Path) -> None:
    """Not always to the last bit: some processors' libraries choose a kernel by how memory happens to be aligned."""
    got = found(tmp_path, None)
    assert (got.verdict, got.not_compared) == ("same", [])
    assert got.largest_error < 1e-5


def test_another_type_is_no_fault(tmp_path: Path) -> None:
    """bfloat16 against float32: every error is explained by rounding and its growth."""
    got = compare(sound(torch.float32), recorded(tmp_path / "b.npz", dtype=torch.bfloat16))
    assert got.verdict == "same"
    assert 0.0 < got.largest_error < got.explained


def in_fp8(made: small.Small, wrong: str = "") -> None:
    """As an engine stores them: e4m3 with a scale a matrix; `wrong`: whose scale is half of what it should be."""
    for name, module in made.named_modules():
        if isinstance(module, torch.nn.Linear):
            weight, bias = module.weight.detach(), module.bias
            scale = weight.abs().max() / 448.0
            stored = (weight / scale).to(torch.float8_e4m3fn)
            module.weight = torch.nn.Parameter(stored, requires_grad=False)
            used = 0.5 * scale if name == wrong else scale
            module.forward = partial(scaled_product, stored, used, bias)


def scaled_product(
    stored: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor
) -> torch.Tensor:
    made = x @ (stored.to(x.dtype) * scale).t()
    return made if bias is None else made + bias


def test_fp8_beside_bfloat16_is_no_fault_and_a_wrong_scale_is(tmp_path: Path) -> None:
    """A vLLM in FP8 beside one in BF16 was told to look at its loader: its codes are no values of the checkpoint."""
    sound_one = found(tmp_path, in_fp8, torch.bfloat16)
    assert sound_one.verdict == "same"
    assert sound_one.largest_error > 0.01
    assert 0.1 < sound_one.hides < sound_one.steps[-1].allowed + 1.0
    assert found(tmp_path, None, torch.bfloat16).hides == 0.0
    assert [machine.get("weights") for machine in sound_one.machines] == [None, "weights in float8_e4m3fn"]
    # In the first layer: roundings so large grow along the model, and hide a factor of two in the third.
    wrong = found(tmp_path, partial(in_fp8, wrong="layers.0.self_attn.q_proj"), torch.bfloat16)
    assert wrong.first is not None
    assert wrong.first.step.module == "layers.0.self_attn.q_proj"
    assert wrong.first.causes[0].signature == "factor-2"


def test_a_fault_between_modules_is_found_there(tmp_path: Path) -> None:
    def other_scale(made: small.Small) -> None:
        made.layers[1].self_attn.scale *= 4.0

    got = found(tmp_path, other_scale)
    assert got.first is not None
    assert got.first.step.what == "input 0"
    assert got.first.where == (
        "in the code of layers.1.self_attn, after layers.1.self_attn.v_proj and before layers.1.self_attn.o_proj"
    )
    assert got.first.causes[0].signature == "softmax-scale"


def test_a_residual_that_is_left_out_is_found_in_its_layer(tmp_path: Path) -> None:
    def no_residual(made: small.Small) -> None:
        layer = made.layers[1]
        layer.forward = lambda x, cos, sin: layer.mlp(
            layer.post_norm(x + layer.self_attn(layer.input_norm(x), cos, sin))
        )

    got = found(tmp_path, no_residual)
    assert got.first is not None
    assert got.first.step.module == "layers.1"
    assert got.first.where == "in layers.1's own code, after the modules inside it"


def test_what_grows_everywhere_and_jumps_nowhere_drifts(tmp_path: Path) -> None:
    """Each module adds no more than rounding may, always to the same side."""

    def chain(path: Path, factor: float) -> Path:
        torch.manual_seed(0)
        made = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(60)))
        for one in made:
            torch.nn.init.orthogonal_(one.weight)
            wrapped(one, lambda y: y * factor)
        with torch.inference_mode(), record(made, path):
            made(torch.ones(8, 64))
        return path

    got = compare(chain(tmp_path / "a.npz", 1.0), chain(tmp_path / "b.npz", 1.0 + 1.5e-6))
    assert (got.verdict, got.first) == ("drifts", None)
    assert got.largest_error > got.explained
