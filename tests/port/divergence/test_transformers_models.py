"""Small models of transformers with random weights: other types and backends are no fault, and injected faults are."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from crosstie_port.divergence.comparison import Comparison, compare
from crosstie_port.divergence.recording import record
from crosstie_port.divergence.records import Recording, read

pytestmark = pytest.mark.transformers
WIDTH, VOCABULARY = 128, 512
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.08,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES),
    "moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
            {**SIZES, "moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 4}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel",
             {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 4, "n_head": 8, "n_positions": 256,
              "initializer_range": 0.08, "bos_token_id": 0, "eos_token_id": 0}),
}  # fmt: skip
Fault = Callable[[Any], object]
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16


def made(kind: str, dtype: torch.dtype = FLOAT, attention: str = "eager", seed: int = 0) -> Any:
    import transformers

    config, model, sizes = MODELS[kind]
    torch.manual_seed(seed)
    built = getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval()
    built.set_attn_implementation(attention)
    for name, one in built.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(one, std=0.3)
        # As `from_pretrained` does: tables of angles stay in float32.
        one.data = one.data.to(dtype)
    return built


def recorded(path: Path, model: Any, tokens: int = 40, seed: int = 0) -> Path:
    ids = torch.randint(0, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode(), record(model, path):
        model(ids, use_cache=False)
    return path


@cache
def sound(
    kind: str, dtype: torch.dtype = FLOAT, attention: str = "eager", seed: int = 0, tokens: int = 40
) -> Recording:
    with TemporaryDirectory() as folder:
        return read(recorded(Path(folder) / "a.npz", made(kind, dtype, attention, seed), tokens, seed))


def broken(tmp_path: Path, kind: str, fault: Fault, dtype: torch.dtype = FLOAT) -> Comparison:
    model = made(kind, dtype)
    with torch.no_grad():
        fault(model)
    return compare(sound(kind, dtype), recorded(tmp_path / "b.npz", model))


RUNS = [(FLOAT, "eager"), (FLOAT, "sdpa"), (BFLOAT, "eager"), (BFLOAT, "sdpa"), (HALF, "eager"), (HALF, "sdpa")]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("other", RUNS[1:], ids=str)
def test_another_type_or_backend_is_no_fault(kind: str, other: tuple[torch.dtype, str]) -> None:
    for first in RUNS[: RUNS.index(other)]:
        got = compare(sound(kind, *first), sound(kind, *other))
        assert got.verdict == "same", (first, got.first)


@pytest.mark.parametrize(("seed", "tokens"), [(1, 100), (2, 48), (3, 100)])
def test_routing_flips_are_told_with_their_margins(seed: int, tokens: int) -> None:
    one, other = (sound("moe", dtype, "eager", seed, tokens) for dtype in (FLOAT, BFLOAT))
    got = compare(one, other)
    assert got.verdict == "same"
    assert got.flips
    for flips in got.flips:
        assert 0.0 <= flips.largest_margin <= 8.0 * flips.scores_off


def weight(name: str, change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Fault:
    return lambda model: model.get_parameter(name).copy_(change(model.get_parameter(name), model))


def wrapped(name: str, change: Callable[[Any], Any]) -> Fault:
    def fault(model: Any) -> None:
        module = model.get_submodule(name)
        forward = module.forward
        module.forward = lambda *args, **named: change(forward(*args, **named))

    return fault


def scaling(name: str, factor: float) -> Fault:
    def fault(model: Any) -> None:
        model.get_submodule(name).scaling *= factor

    return fault


def rotary_shifted(model: Any) -> None:
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids + 1)


def table_shifted(model: Any) -> None:
    forward = model.transformer.wpe.forward
    model.transformer.wpe.forward = lambda ids: forward(ids + 2)


def ids_shifted(model: Any) -> None:
    model.transformer.wpe.register_forward_pre_hook(lambda _, args: (args[0] + 2,), prepend=True)


def other_theta(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq**1.1


def masked_by(hidden: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Fault:
    """A backend that makes its own mask inside the layer's attention."""

    def fault(model: Any) -> None:
        attention = model.model.layers[1].self_attn
        forward = attention.forward
        at = torch.arange(40)
        mask = torch.zeros(40, 40).masked_fill(hidden(at[:, None], at[None]), torch.finfo(FLOAT).min)[None, None]
        attention.forward = lambda *args, attention_mask=None, **named: forward(*args, attention_mask=mask, **named)

    return fault


def tiled_heads(model: Any) -> None:
    import transformers.models.llama.modeling_llama as llama

    attention = model.model.layers[1].self_attn
    forward, repeat = attention.forward, llama.repeat_kv

    def tiled(*args: Any, **named: Any) -> Any:
        llama.repeat_kv = lambda keys, times: keys.repeat(1, times, 1, 1)
        try:
            return forward(*args, **named)
        finally:
            llama.repeat_kv = repeat

    attention.forward = tiled


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def untied(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.08)


def other_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def not_renormalised(model: Any) -> None:
    gate = model.model.layers[1].mlp.gate
    gate.norm_topk_prob = not gate.norm_topk_prob


def random(one: torch.Tensor, _model: Any) -> torch.Tensor:
    return torch.randn(one.shape, generator=torch.Generator().manual_seed(7)) * 0.08


L, H = "model.layers.1.", "transformer.h.1."
O_PROJ, DOWN = f"{L}self_attn.o_proj", f"{L}mlp.down_proj"
# The model, the fault, the module, the cause; and whether bfloat16 hides it below its rounding.
FAULTS: dict[str, tuple[str, Fault, str, str, bool]] = {
    "rotary shifted": ("llama", rotary_shifted, "model.rotary_emb", "position-shift", False),
    "rope theta": ("llama", other_theta, "model.rotary_emb", "positions", False),
    "5%": ("llama", weight(f"{DOWN}.weight", lambda w, _: w * 1.05), DOWN, "scale", False),
    "half": ("llama", weight(f"{DOWN}.weight", lambda w, _: w * 0.5), DOWN, "factor-2", False),
    "softmax 5% sharper": ("llama", scaling(f"{L}self_attn", 1.05), O_PROJ, "softmax-scale", True),
    "softmax 5% flatter": ("llama", scaling(f"{L}self_attn", 0.95), O_PROJ, "softmax-scale", True),
    "softmax twice": ("llama", scaling(f"{L}self_attn", 2.0), O_PROJ, "softmax-scale", False),
    "transposed": ("llama", weight(f"{O_PROJ}.weight", lambda w, _: w.t().clone()), O_PROJ, "weight-transposed", False),
    "up for gate": ("llama", weight(f"{L}mlp.gate_proj.weight", lambda _, m: m.get_parameter(f"{L}mlp.up_proj.weight")),
                    f"{L}mlp.gate_proj", "weight-swapped", False),
    "v for k": ("llama", weight(f"{L}self_attn.k_proj.weight",
                                lambda _, m: m.get_parameter(f"{L}self_attn.v_proj.weight")),
                f"{L}self_attn.k_proj", "weight-swapped", False),
    "another layer's": ("llama", weight(f"{L}mlp.up_proj.weight",
                                        lambda _, m: m.get_parameter("model.layers.2.mlp.up_proj.weight")),
                        f"{L}mlp.up_proj", "weight-swapped", False),
    "random": ("llama", weight(f"{L}mlp.up_proj.weight", random), f"{L}mlp.up_proj", "weight-other", False),
    "tied": ("llama", tied, "lm_head", "tied-weights", False),
    "not causal": ("llama", masked_by(lambda row, column: row != row), O_PROJ, "mask", False),
    "window": ("llama", masked_by(lambda row, column: (column > row) | (row - column > 8)), O_PROJ, "window", False),
    "heads tiled": ("llama", tiled_heads, O_PROJ, "head-groups", False),
    "activation": ("llama", other_activation, f"{L}mlp.act_fn", "other-module", False),
    "embedding": ("llama", wrapped("model.embed_tokens", lambda y: y * math.sqrt(WIDTH)), "model.embed_tokens", "scale",
                  False),
    "not renormalised": ("moe", not_renormalised, f"{L}mlp.gate", "scale-by-token", False),
    "router": ("moe", weight(f"{L}mlp.gate.weight", random), f"{L}mlp.gate", "weight-other", False),
    "indices": ("moe", wrapped(f"{L}mlp.gate", lambda out: (*out[:2], (out[2] + 1) % 16)), f"{L}mlp.gate", "indices",
                False),
    "experts": ("moe", weight(f"{L}mlp.experts.down_proj", lambda w, _: w.roll(1, 0)), f"{L}mlp.experts",
                "weight-other", False),
    "rotary of moe": ("moe", rotary_shifted, "model.rotary_emb", "position-shift", False),
    "table shifted": ("gpt2", table_shifted, "transformer.wpe", "position-shift", False),
    "ids shifted": ("gpt2", ids_shifted, "transformer.wpe", "position-shift", False),
    "conv1d": ("gpt2", weight(f"{H}attn.c_proj.weight", lambda w, _: w.t().clone()), f"{H}attn.c_proj",
               "weight-transposed", False),
    "untied": ("gpt2", untied, "lm_head", "tied-weights", False),
    "no bias": ("gpt2", weight(f"{H}mlp.c_proj.bias", lambda b, _: b * 0.0), f"{H}mlp.c_proj", "bias", False),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    kind, fault, module, signature, _ = FAULTS[name]
    named(broken(tmp_path, kind, fault), module, signature)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_bfloat16(name: str, tmp_path: Path) -> None:
    kind, fault, module, signature, is_hidden = FAULTS[name]
    got = broken(tmp_path, kind, fault, BFLOAT)
    if is_hidden:
        assert got.verdict == "same"
    else:
        named(got, module, signature)


def named(got: Comparison, module: str, signature: str) -> None:
    assert got.first is not None
    assert (got.first.step.module, got.first.causes[0].signature) == (module, signature)


@pytest.mark.parametrize("factor", [0.5, 1.2])
def test_a_fault_behind_routing_flips_is_found(factor: float, tmp_path: Path) -> None:
    model = made("moe", BFLOAT, seed=2)
    name = "model.layers.3.self_attn.o_proj"
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").mul_(factor)
    got = compare(sound("moe", FLOAT, "eager", 2, 48), recorded(tmp_path / "b.npz", model, 48, 2))
    assert got.flips
    assert got.first is not None
    assert got.first.step.module == name
