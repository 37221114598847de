"""State-space layers and short convolutions: a config's numbers in, a layer's tensors and its state out.

Fields, their other spellings and their defaults are those of transformers 5.22: configuration_mamba.py, _mamba2.py,
_jamba.py, _bamba.py, _nemotron_h.py, _granitemoehybrid.py, _falcon_h1.py and _lfm2.py under src/transformers/models;
shapes those of the modeling_*.py beside them. Such a layer keeps no keys and values: its state is of one size.
"""

from crosstie.catalog.attention import Attention, linear_attention, split_in, split_out, vector
from crosstie.catalog.config import Config
from crosstie.core.model import State, Tensor

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
