"""What a tensor's name says: which layer of the language model it is in, and which parts of that layer it stores.

Families spell the parts of a layer apart, and some store several in one tensor: data/modules.toml.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_toml

_FILE = Path(__file__).parent / "data" / "modules.toml"
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


class _Module(msgspec.Struct, frozen=True):
    """A row of the file."""

    parts: str
    name: str

    @property
    def covers(self) -> Covers:
        parts = tuple(part.rstrip("?").removesuffix("/2") for part in self.parts.split())
        return Covers(parts=parts, half=self.parts.endswith("/2"), half_if_gated=self.parts.endswith("?"))


class _Modules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fragments: dict[str, str]
    usual: dict[str, str]
    module: tuple[_Module, ...]


@cache
def _modules() -> _Modules:
    return msgspec.convert(read_toml(_FILE), _Modules)


@cache
def _patterns() -> tuple[tuple[Covers, re.Pattern[str]], ...]:
    def whole(pattern: str) -> str:
        # Fragments may have others in them.
        filled = re.sub(r"\{(\w+)\}", lambda one: _modules().fragments[one[1]], pattern)
        return filled if filled == pattern else whole(filled)

    return tuple((one.covers, re.compile(whole(one.name))) for one in _modules().module)


@cache
def covers(module: str) -> tuple[Covers, ...]:
    """All that the name may stand for: which of them it is, the layer decides that has such a part."""
    return tuple(one for one, pattern in _patterns() if pattern.fullmatch(module))


def usual_name(part: str) -> str:
    return _modules().usual.get(part, part)


@cache
def is_buffer(path: str) -> bool:
    return _BUFFERS.search(path) is not None


@cache
def is_vector(path: str) -> bool:
    """Norms with their offsets, sinks and the like: vectors that belong to no matrix."""
    module = path.removesuffix(".weight").removesuffix(".bias")
    return _VECTORS.search(path) is not None or _NORM.search(module) is not None
