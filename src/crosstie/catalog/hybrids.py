"""Hybrids of attention with state-space layers or convolutions: which layer is of which kind, and what each has.

Fields, their other spellings and their defaults are those of transformers 5.22: configuration_mamba.py, _mamba2.py,
_jamba.py, _bamba.py, _nemotron_h.py, _granitemoehybrid.py, _falcon_h1.py and _lfm2.py under src/transformers/models;
shapes those of the modeling_*.py beside them. Each family writes the pattern of its layers in a way of its own. A layer
with a state keeps no keys and values: its state is of one size.
"""

from collections.abc import Callable

from crosstie.catalog.attention import Attention, linear_attention, split_in, split_out, vector
from crosstie.catalog.config import Config
from crosstie.catalog.feedforward import NO_FORWARD, FeedForward, dense, experts
from crosstie.core.model import State, Tensor

Layers = list[tuple[Attention, FeedForward]]
# Words and letters of layers, in older configs and in newer ones.
_ATTENTION = ("attention", "full_attention", "*")
_STATE = ("mamba", "linear_attention", "M", "conv")
_MLP, _MOE = ("mlp", "-"), ("moe", "E")


def kinds_of_layers(config: Config, depth: int) -> list[str]:
    """attention, state, mlp or moe for each layer."""
    # LFM2 says it twice where transformers wrote it.
    named = config.counts("attn_layer_indices") or config.counts("full_attn_idxs") or []
    pattern = config.word("hybrid_override_pattern")
    if pattern:
        given = list(pattern)
    else:
        given = config.words("layers_block_type", depth) or config.words("layer_types", depth) or []
    if given:
        return [_kind(config, index, word) for index, word in enumerate(given)]
    period = config.maybe("attn_layer_period")
    if period:
        offset = config.count("attn_layer_offset", default=0, least=0)
        return ["attention" if i % period == offset else "state" for i in range(depth)]
    return ["attention" if i in named else "state" for i in range(depth)]


def _kind(config: Config, index: int, word: str) -> str:
    for kind, words in (("attention", _ATTENTION), ("state", _STATE), ("mlp", _MLP), ("moe", _MOE)):
        if word in words:
            return kind
    raise config.bad(f"layer_types[{index}]", f"'{word}' is no kind of layer that this family has")


def hybrid_layers(
    config: Config, family: str, hidden: int, depth: int, attention: Callable[[], Attention],
    forward: Callable[[int], FeedForward],
) -> Layers:  # fmt: skip
    """`attention` and `forward` are made as for any other family, where a layer has them."""
    if family in ("mamba", "falcon_mamba"):
        return [(mamba1(config, hidden), NO_FORWARD)] * depth
    if family == "mamba2":
        return [(mamba2(config, hidden), NO_FORWARD)] * depth
    if family == "falcon_h1":
        both = beside(attention(), mamba2(config, hidden, norm=config.flag("mamba_rms_norm")))
        return [(both, forward(i)) for i in range(depth)]
    kinds = kinds_of_layers(config, depth)
    if family == "nemotron_h":
        return _one_part_each(config, hidden, kinds, attention)
    if family.startswith("lfm2"):
        state = short_convolution(config, hidden)
    elif family == "jamba":
        state = mamba1(config, hidden, norms=True)
    else:
        state = mamba2(config, hidden)
    own = attention() if "attention" in kinds else NO_MIXER
    return [(own if kind == "attention" else state, forward(i)) for i, kind in enumerate(kinds)]


def _one_part_each(config: Config, hidden: int, kinds: list[str], attention: Callable[[], Attention]) -> Layers:
    """Nemotron-H: a layer is a mixer or a feed-forward, never both; nothing is gated."""
    made: dict[str, tuple[Attention, FeedForward]] = {}
    for kind in dict.fromkeys(kinds):
        if kind == "attention":
            made[kind] = attention(), NO_FORWARD
        elif kind == "state":
            made[kind] = mamba2(config, hidden), NO_FORWARD
        elif kind == "mlp":
            inner = config.count("intermediate_size")
            made[kind] = NO_MIXER, dense(hidden, inner, gated=False, bias=config.flag("mlp_bias"))
        else:
            made[kind] = NO_MIXER, _experts_without_gate(config, hidden)
    config.get("intermediate_size", "mlp_hidden_act")
    return [made[kind] for kind in kinds]


def _experts_without_gate(config: Config, hidden: int) -> FeedForward:
    inner = config.count("moe_intermediate_size")
    shared = config.maybe("moe_shared_expert_intermediate_size", least=0)
    beside_routed = config.count("n_shared_experts", default=1, least=0)
    return experts(
        hidden, inner, count=config.count("n_routed_experts"), active=config.count("num_experts_per_tok"),
        shared_inner=(inner if shared is None else shared) * beside_routed, router_bias=True, gated=False,
        latent=config.maybe("moe_latent_size"), latent_norm=False,
    )  # fmt: skip


NO_MIXER = Attention("no attention", ())


def mamba2(config: Config, hidden: int, *, norm: bool = True) -> Attention:
    heads = config.count("mamba_n_heads", "mamba_num_heads", "num_heads")
    inner = config.maybe("mamba_d_ssm") or _expand(config) * hidden
    dim = _number_or_auto(config, inner // heads, "mamba_d_head", "mamba_head_dim", "head_dim")
    state = config.count("mamba_d_state", "ssm_state_size", "state_size", default=128)
    groups = config.count("mamba_n_groups", "n_groups", default=1)
    conv = config.count("mamba_d_conv", "conv_kernel", default=4)
    inner = heads * dim
    channels = inner + 2 * groups * state
    config.get("mamba_chunk_size", "chunk_size")
    projections = (
        # The gate, what is convolved, and a step for each head.
        split_out("ssm_in", inner + channels + heads, hidden, "ssm_in"),
        *_convolution(config, channels, conv),
        # A_log, D and dt_bias.
        vector("ssm_decay", 3 * heads),
        *((vector("ssm_norm", inner),) if norm else ()),
        split_in("ssm_out", hidden, inner, "ssm_out", "output"),
        *_projection_biases(config, inner + channels + heads, hidden),
    )
    return linear_attention(
        kind="mamba2", value_heads=heads, key_dim=state, value_dim=dim, conv=conv, projections=projections,
        conv_channels=channels, state_element_bytes=_state_element_bytes(config),
    )  # fmt: skip


def mamba1(config: Config, hidden: int, *, norms: bool = False) -> Attention:
    inner = _expand(config) * hidden
    state = config.count("mamba_d_state", "state_size", default=16)
    conv = config.count("mamba_d_conv", "conv_kernel", default=4)
    rank = _number_or_auto(config, -(-hidden // 16), "mamba_dt_rank", "time_step_rank")
    projections = (
        split_out("ssm_in", 2 * inner, hidden, "ssm_in"),
        *_convolution(config, inner, conv),
        split_in("ssm_x", rank + 2 * state, inner, "ssm_x", "auxiliary"),
        split_out("ssm_dt", inner, rank, "ssm_dt", "auxiliary"),
        vector("ssm_dt_bias", inner),
        Tensor(name="ssm_decay", role="small", rows=inner, cols=state),
        vector("ssm_skip", inner),
        *((vector("ssm_norm", rank + 2 * state),) if norms else ()),
        split_in("ssm_out", hidden, inner, "ssm_out", "output"),
        *_projection_biases(config, 2 * inner, hidden),
    )
    return linear_attention(
        kind="mamba", value_heads=inner, key_dim=state, value_dim=1, conv=conv, projections=projections,
        conv_channels=inner, state_element_bytes=_state_element_bytes(config),
    )  # fmt: skip


def short_convolution(config: Config, hidden: int) -> Attention:
    """LFM2: a gated convolution over the last few tokens."""
    length = config.count("conv_L_cache", default=3)
    tensors = [
        split_out("conv_in", 3 * hidden, hidden, "conv_in"),
        Tensor(name="conv", role="small", rows=hidden, cols=length),
        split_in("conv_out", hidden, hidden, "conv_out", "output"),
    ]
    if config.flag("conv_bias"):
        tensors.append(vector("conv_bias", 5 * hidden))
    state = State(bytes=2.0 * hidden * (length - 1), decode_flop=0.0, prefill_flop=0.0, heads=hidden)
    return Attention("short convolution", tuple(tensors), (), state, 4.0 * hidden)


def beside(attention: Attention, other: Attention) -> Attention:
    """Falcon-H1: both of them see the same input, and their outputs are added."""
    return Attention(
        f"{attention.kind} beside {other.kind}", attention.tensors + other.tensors, attention.scans + other.scans,
        other.state, attention.moved_elements + other.moved_elements,
    )  # fmt: skip


def _expand(config: Config) -> int:
    return config.count("mamba_expand", "expand", default=2)


def _number_or_auto(config: Config, automatic: int, *names: str) -> int:
    return automatic if config.get(*names) == "auto" else config.count(*names, default=automatic)


def _convolution(config: Config, channels: int, conv: int) -> tuple[Tensor, ...]:
    kernel = Tensor(name="ssm_conv", role="small", rows=channels, cols=conv)
    named = "use_conv_bias" if config.get("use_conv_bias") is not None else "mamba_conv_bias"
    return (kernel, vector("ssm_conv_bias", channels)) if config.flag(named, default=True) else (kernel,)


def _projection_biases(config: Config, into: int, out: int) -> tuple[Tensor, ...]:
    # Nemotron-H has both keys, and the first decides.
    has = config.flag("mamba_proj_bias" if config.get("use_bias") is None else "use_bias")
    config.get("mamba_proj_bias")
    # Falcon-H1 has a key of its own for the way out.
    has_out = has if config.get("projectors_bias") is None else config.flag("projectors_bias")
    wanted = (("ssm_in_bias", into, has), ("ssm_out_bias", out, has_out))
    return tuple(vector(name, size) for name, size, is_there in wanted if is_there)


def _state_element_bytes(config: Config) -> float:
    """Engines keep the state in 32 bits unless the config asks for less."""
    return 4.0 if config.word("mamba_ssm_cache_dtype") in ("", "auto", "float32") else 2.0
