"""What a tensor's name says: which layer of the language model it is in, and which parts of that layer it stores.

The parts are those that `catalog` counts (`core.model.Tensor.name`). Families spell them apart, and some store several
parts in one tensor. A spelling that is not here is not known; nothing is guessed from a likeness.
"""

import re
from collections.abc import Iterable
from functools import cache

import msgspec

_ATTENTION = r"(?:self_attn|self_attention|attention|attn|attn\.attention|norm_attn_norm\.attn|mixer)\."
_FORWARD = r"(?:(?:mlp|feed_forward|ffn|mixer)\.)?"
_MIXTURE = r"(?:(?:mlp|feed_forward|ffn|mixer|block_sparse_moe|moe)\.)"
_EXPERTS = rf"{_MIXTURE}experts\.(?:mlp\.)?"
_SHARED = rf"{_MIXTURE}?shared_(?:experts?|mlp)\."
_MAMBA = r"(?:mamba|mixer)\."
# Parts -> modules inside a layer that store them, as in checkpoints of the Hugging Face hub. "/2": half of its rows.
_MODULES: tuple[tuple[str, str], ...] = (
    ("q", rf"{_ATTENTION}(?:q_proj|wq)"),
    ("k", rf"{_ATTENTION}(?:k_proj|wk)"),
    ("v", rf"{_ATTENTION}(?:v_proj|wv)"),
    ("q k v", rf"{_ATTENTION}(?:qkv_proj|W_pack|query_key_value|c_attn|Wqkv|wqkv)"),
    ("o", rf"(?:{_ATTENTION}(?:o_proj|out_proj|dense|c_proj|wo)|linear_attn\.out_proj)"),
    ("gate", rf"{_ATTENTION}(?:g_proj|gate_proj)"),
    # Latent attention, and the index of a sparse one.
    ("q_a", rf"{_ATTENTION}(?:q_a_proj|wq_a)"),
    ("q_b", rf"{_ATTENTION}(?:q_b_proj|wq_b)"),
    ("kv_a", rf"{_ATTENTION}kv_a_proj_with_mqa"),
    ("q_a kv_a", rf"{_ATTENTION}fused_qkv_a_proj_with_mqa"),
    ("kv_b", rf"{_ATTENTION}kv_b_proj"),
    ("index_q", rf"{_ATTENTION}indexer\.wq_b"),
    ("index_k", rf"{_ATTENTION}indexer\.wk"),
    ("index_weights", rf"{_ATTENTION}indexer\.weights_proj"),
    # DeepSeek-V4's compressed attention.
    ("kv", rf"{_ATTENTION}wkv"),
    ("o_a", rf"{_ATTENTION}wo_a"),
    ("o_b", rf"{_ATTENTION}wo_b"),
    ("compressor_kv", rf"{_ATTENTION}compressor\.wkv"),
    ("compressor_gate", rf"{_ATTENTION}compressor\.wgate"),
    ("index_compressor_kv", rf"{_ATTENTION}indexer\.compressor\.wkv"),
    ("index_compressor_gate", rf"{_ATTENTION}indexer\.compressor\.wgate"),
    # Gated delta rules.
    ("qkv z", r"linear_attn\.in_proj_qkvz"),
    ("qkv", r"linear_attn\.in_proj_qkv"),
    ("z", r"linear_attn\.in_proj_z"),
    ("beta_alpha", r"linear_attn\.in_proj_ba"),
    ("beta_alpha/2", r"linear_attn\.in_proj_[ab]"),
    ("conv", r"linear_attn\.conv1d"),
    # State-space models and short convolutions.
    ("ssm_in", rf"{_MAMBA}in_proj"),
    ("ssm_conv", rf"{_MAMBA}conv1d"),
    ("ssm_x", rf"{_MAMBA}x_proj"),
    ("ssm_dt", rf"{_MAMBA}dt_proj"),
    ("ssm_decay", rf"{_MAMBA}A_log"),
    ("ssm_out", rf"{_MAMBA}out_proj"),
    ("conv_in", r"conv\.in_proj"),
    ("conv", r"conv\.conv"),
    ("conv_out", r"conv\.out_proj"),
    # Feed-forward. "?": half of the rows where gate and up stand side by side, else all.
    ("mlp_up/2", rf"{_FORWARD}(?:gate_proj|w1)"),
    ("mlp_up?", rf"{_FORWARD}(?:up_proj|w3|fc1|c_fc|fc_in|dense_h_to_4h)"),
    ("mlp_up", rf"{_FORWARD}gate_up_proj"),
    ("mlp_down", rf"{_FORWARD}(?:down_proj|w2|fc2|fc_out|c_proj|dense_4h_to_h)"),
    ("shared_up/2", rf"{_SHARED}(?:gate_proj|w1)"),
    ("shared_up?", rf"{_SHARED}(?:up_proj|w3)"),
    ("shared_up", rf"{_SHARED}(?:gate_up_proj|input_linear)"),
    ("shared_down", rf"{_SHARED}(?:down_proj|w2|output_linear)"),
    ("shared_gate", rf"{_MIXTURE}shared_expert_gate"),
    # Granite-4 without experts: what is shared elsewhere is all there is.
    ("mlp_up", r"shared_mlp\.input_linear"),
    ("mlp_down", r"shared_mlp\.output_linear"),
    ("experts_up/2", rf"{_EXPERTS}(?:gate_proj|w1)"),
    ("experts_up?", rf"{_EXPERTS}(?:up_proj|w3|v1)"),
    ("experts_up", rf"(?:{_EXPERTS}gate_up_proj|{_MIXTURE}input_linear)"),
    ("experts_down", rf"(?:{_EXPERTS}(?:down_proj|w2)|{_MIXTURE}output_linear)"),
    ("router", rf"{_MIXTURE}(?:gate|router)(?:\.layer|\.gate)?"),
    ("latent_in", rf"{_MIXTURE}fc1_latent_proj"),
    ("latent_out", rf"{_MIXTURE}fc2_latent_proj"),
)  # fmt: skip
_PATTERNS = tuple((tuple(parts.split()), re.compile(pattern)) for parts, pattern in _MODULES)
# Usual names, for a part that is nowhere: what people would look for.
_USUAL = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "mlp_up": "mlp.gate_proj and mlp.up_proj", "mlp_down": "mlp.down_proj", "router": "mlp.gate",
    "experts_up": "mlp.experts.*.gate_proj and up_proj", "experts_down": "mlp.experts.*.down_proj",
    "q_a": "self_attn.q_a_proj", "q_b": "self_attn.q_b_proj", "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_b": "self_attn.kv_b_proj", "ssm_in": "mixer.in_proj", "ssm_out": "mixer.out_proj",
}  # fmt: skip
_LAYER = re.compile(r"(?P<prefix>(?:.*?\.)?)(?:layers|h|blocks)\.(?P<number>\d+)\.(?P<rest>.+)", re.DOTALL)
_EXPERT = re.compile(r"(?<=\bexperts\.)(\d+)\.")
_EMBEDDING = re.compile(
    r"(?P<prefix>(?:.*\.)?)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|embeddings?|embed)\.weight"
)
# "lm_head.qweight" as well: a head may be quantised.
_HEAD = re.compile(
    r"(?:language_model\.|model\.|model\.language_model\.|llm\.|thinker\.)?(?:lm_head|embed_out|output|head)"
    r"\.(?:weight|qweight|weight_packed)"
)
# Towers that see or hear, and drafts: a model of their own beside the language model.
_BESIDE = re.compile(
    r"(^|\.)(vision\w*|visual|vit|vpm|audio\w*|speech\w*|talker|code2wav|token2wav|mtp\w*|nextn\w*|image_\w+|encoder"
    r"|eagle\w*|draft\w*|multi_modal_projector|mm_projector|aligner|perception\w*|resampler|sam_model)\."
)
# Buffers that older libraries wrote: made again at load.
_BUFFERS = re.compile(
    r"(rotary_emb\.\w+|inv_freq|masked_bias|(?:^|\.)attn(?:\.attention)?\.bias|attention\.bias|slope_rate|\w+_decay"
    r"|rotary_pos_emb\.\w+|position_ids)$"
)
_NORM = re.compile(r"(?:^|[._])(?:\w*norm\w*|ln_\w+|ln)$")
_VECTORS = re.compile(
    r"(?:\.|^)(?:sinks|attn_sink|A_log|D|dt_bias|e_score_correction_bias|expert_bias|per_expert_scale|scale|ape"
    r"|hc_\w+|tid2eid)$"
)


class TensorPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a tensor is. `path`: its module inside the layer, without the number of an expert."""

    layer: int
    expert: int | None
    path: str


class Covers(msgspec.Struct, frozen=True, kw_only=True):
    """The parts that a module stores; of the only one perhaps half, or half where the part is gated."""

    parts: tuple[str, ...]
    half: bool = False
    half_if_gated: bool = False


def embeddings(names: Iterable[str]) -> list[tuple[str, str]]:
    """(prefix of the language model, name of its embedding): one in a whole checkpoint."""
    found = []
    for name in names:
        match = _EMBEDDING.fullmatch(name)
        if match and not _LAYER.fullmatch(name) and not _BESIDE.search(name):
            found.append((match["prefix"], name))
    return found


def is_head(name: str) -> bool:
    return _HEAD.fullmatch(name) is not None


def place(name: str, prefix: str) -> TensorPlace | None:
    """The layer of the language model, or None for what is outside of its layers."""
    match = _LAYER.fullmatch(name)
    if match is None or match["prefix"] != prefix or _BESIDE.search(match["rest"]):
        return None
    expert = _EXPERT.search(match["rest"])
    path = _EXPERT.sub("", match["rest"], count=1)
    return TensorPlace(layer=int(match["number"]), expert=int(expert[1]) if expert else None, path=path)


def is_after_layers(name: str, prefix: str) -> bool:
    """A norm, a table of positions or the like of the language model that is in none of its layers."""
    rest = name.removeprefix(prefix)
    outside = name.startswith(prefix) and _LAYER.fullmatch(name) is None and _BESIDE.search(name) is None
    return outside and (is_vector(rest) or rest in ("wpe.weight", "embed_positions.weight"))


def prefixes(names: Iterable[str]) -> dict[str, int]:
    """Where numbered layers are, and how many: for checkpoints whose embedding is missing."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _LAYER.fullmatch(name)
        if match and not _BESIDE.search(name):
            found.setdefault(match["prefix"], set()).add(int(match["number"]))
    return {prefix: len(numbers) for prefix, numbers in found.items()}


@cache
def covers(module: str) -> tuple[Covers, ...]:
    """All that the name may stand for: which of them it is, the layer decides that has such a part."""
    return tuple(
        Covers(
            parts=tuple(part.rstrip("?").removesuffix("/2") for part in parts),
            half=parts[-1].endswith("/2"),
            half_if_gated=parts[-1].endswith("?"),
        )
        for parts, pattern in _PATTERNS
        if pattern.fullmatch(module)
    )


def usual_name(part: str) -> str:
    return _USUAL.get(part, part)


@cache
def is_buffer(path: str) -> bool:
    return _BUFFERS.search(path) is not None


@cache
def is_vector(path: str) -> bool:
    """Norms with their offsets, sinks and the like: vectors that belong to no matrix."""
    module = path.removesuffix(".weight").removesuffix(".bias")
    return _VECTORS.search(path) is not None or _NORM.search(module) is not None
