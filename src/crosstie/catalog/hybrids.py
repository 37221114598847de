"""Hybrids of attention with state-space layers or convolutions: which layer is of which kind, as their configs say it.

Each family writes the pattern of its layers in a way of its own; sources as in statespace.py.
"""

from collections.abc import Callable

from crosstie.catalog.attention import Attention
from crosstie.catalog.config import Config
from crosstie.catalog.feedforward import NO_FORWARD, FeedForward, dense, experts
from crosstie.catalog.statespace import NO_MIXER, beside, mamba1, mamba2, short_convolution

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
