"""What a model's files store: the config, how each part is quantised, and what integers are.

A model is a folder of safetensors, a GGUF file, or a config alone (a config.json or a name of the catalog). What a GGUF
file says of its model is put into the keys of a Hugging Face config.json, so that one reader serves both. Integers are
packed alike whatever their width, so the quantisation config decides.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.config import Config, load_config
from crosstie.catalog.huggingface import read_model
from crosstie.catalog.library import Catalog
from crosstie.catalog.models import model_id
from crosstie.catalog.reading import read_toml
from crosstie.core.errors import BadData, BadInput, UnknownName
from crosstie.core.model import Model, Precision
from crosstie.port.checkpoint.formats import Scheme, method_of, quantisation_config, read_scheme
from crosstie.port.checkpoint.gguf import Gguf, gguf_names, read_gguf
from crosstie.port.checkpoint.hub import Repository, read_repository, repository
from crosstie.port.checkpoint.index import Checkpoint, open_checkpoint
from crosstie.port.checkpoint.roles import ModelPart
from crosstie.port.preflight.operations import Layout, ModelOperation, Weights, compute_type, stored_facts

# Formats of the catalog -> schemes of checkpoints, for models of which only the config is there.
_SCHEMES = {"fp8": "fp8-tensor", "nf4": "bnb4", "mxfp4-a8": "mxfp4", "fp32": "bf16"}
_SPLIT = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_PARTS: tuple[ModelPart, ...] = ("linear", "moe")
_SINKS = re.compile(r"\.(attention_)?sinks?(\.weight|_bias)?$")


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Keys that the file gives, and no others; what is not here is unknown to every rule that asks for it."""
    architecture = str(gguf.metadata.get("general.architecture", ""))
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": gguf_names().families.get(architecture, architecture),
        "torch_dtype": "bfloat16",
    }
    for key, name in gguf_names().keys.items():
        value = gguf.metadata.get(f"{architecture}.{key}")
        if value is not None and not isinstance(value, list):
            found[name] = value
    found.update(_latent(gguf.metadata, architecture))
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding and len(embedding[1]) == 2:
        # GGUF writes the fastest dimension first.
        found["vocab_size"] = embedding[1][1]
    found["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    if "blk.0.attn_q.bias" in gguf.tensors:
        # The metadata do not say: what the first layer has, all should have.
        found["attention_bias"] = True
    return found


def _latent(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """MLA's head sizes: the cached key is the latent and the rotary part, the per-head key has its own length."""
    key, value = (metadata.get(f"{architecture}.attention.{name}_length_mla") for name in ("key", "value"))
    rotary = metadata.get(f"{architecture}.rope.dimension_count")
    if not isinstance(key, int) or not isinstance(value, int) or not isinstance(rotary, int):
        return {}
    return {"qk_rope_head_dim": rotary, "qk_nope_head_dim": key - rotary, "v_head_dim": value, "head_dim": None}


def as_declared(weights: Weights, quantisation: Mapping[str, Any]) -> Weights:
    """Width, groups, order and activations as the config says; "unknown" where integers of several kinds are mixed."""
    if not weights.scheme.startswith("int"):
        return weights
    said = set(_declared(weights, quantisation)) or {weights}
    return said.pop() if len(said) == 1 else msgspec.structs.replace(weights, scheme="unknown")


def _declared(weights: Weights, quantisation: Mapping[str, Any]) -> Iterator[Weights]:
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            said = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(said, Mapping) and said.get("type") == "int":
                inputs = group.get("input_activations")
                is_static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
                yield msgspec.structs.replace(
                    weights,
                    scheme=_scheme(said.get("num_bits"), weights),
                    group=_number(said.get("group_size")) or -1,
                    # "weight" and "static" reorder at quantisation and leave nothing to do at run time.
                    act_order=said.get("actorder") in (True, "group", "dynamic"),
                    activations="static" if is_static else "dynamic" if isinstance(inputs, Mapping) else "none",
                )
    elif "bits" in quantisation or "w_bit" in quantisation:
        size = _number(quantisation.get("group_size", quantisation.get("q_group_size")))
        yield msgspec.structs.replace(
            weights,
            scheme=_scheme(quantisation.get("bits", quantisation.get("w_bit")), weights),
            group=size,
            # One group a row leaves nothing to reorder.
            act_order=quantisation.get("desc_act") is True and size != -1,
            activations="none",
        )


def _scheme(bits: object, weights: Weights) -> str:
    width = _number(bits)
    return weights.scheme if width is None else f"int{width}"


def _number(value: object) -> int | None:
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    # As the user named it: what the catalog finds it by.
    asked: str
    name: str
    config: Config
    method: str
    # Each way in which dense matrices and experts are stored; the first is the main one.
    linear: tuple[Weights, ...]
    experts: tuple[Weights, ...]
    # What the KV cache is unless the user says otherwise, and whether the checkpoint has scales for it.
    kv: str = "bf16"
    kv_scales: bool = False
    dialect: str = "fn"
    converted: bool = False
    checkpoint: Checkpoint | None = None
    scheme: Scheme | None = None
    gguf: Gguf | None = None
    # Whether there are tensors of attention sinks.
    sinks: bool = False
    # Whether it is on the hub, so that there is no file to read it from again.
    remote: bool = False
    # Why the tensors were not seen, where they were not.
    unseen: str = ""
    # Why the catalog's readers do not understand the config, where they do not.
    unread: BadData | None = None

    # How memory arithmetic is to take it: as the config says, or the precision that stands for a GGUF type.
    precision: str = "native"

    def model(self, catalog: Catalog) -> Model:
        if self.unread:
            raise self.unread
        if self.gguf is None and not self.remote:
            return catalog.model(self.asked)
        file = self.gguf.file if self.gguf else Path(self.config.file)
        made, _ = read_model(
            self.config.outer, file, id=model_id(file), name=self.name, source=str(file), date=""
        )  # fmt: skip
        return made

    @property
    def family(self) -> str:
        return str(self.config.get("model_type") or self.config.outer.get("model_type") or "")

    @property
    def unties(self) -> bool:
        """Whether embedding and head are surely two: where a part of a larger config says nothing, they may be one."""
        tied = self.config.flag_outer("tie_word_embeddings")
        return tied is False or (tied is None and not self.config.nested)

    @property
    def words(self) -> str:
        parts = [f"{self.method} {self.linear[0].scheme}" if self.method != "none" else self.linear[0].scheme]
        if self.experts and self.experts[0].scheme != self.linear[0].scheme:
            parts.append(f"experts in {self.experts[0].scheme}")
        if self.checkpoint:
            parts.append(f"{len(self.checkpoint.tensors):,} tensors, {self.checkpoint.nbytes / 1e9:.1f} GB")
        return ", ".join(parts)


def read_stored(catalog: Catalog, asked: str) -> Stored:
    """A folder, a .gguf file, a config.json, a name of the catalog, or a repository of the Hugging Face hub."""
    path = Path(asked).expanduser()
    if path.is_dir():
        _refuse_other_folders(asked, path)
        if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
            return _from_folder(asked, path)
        if any(path.glob("*.gguf")):
            return _from_gguf(asked, *_gguf_files(asked, path))
        local = asked if asked.startswith((".", "/", "~")) else f"./{asked}"
        return _from_config(catalog, local, unseen=f"no safetensors or GGUF file in {asked}")
    if path.suffix == ".gguf":
        return _from_gguf(asked, *(_parts(path) if path.exists() else [path]))
    if path.suffix == ".safetensors":
        raise BadInput(f"{asked}: give the model's folder, not one of its files")
    if not path.exists() and (named := repository(asked)) and (named.by_address or not _is_known(catalog, asked)):
        return _from_repository(asked, named)
    return _from_config(catalog, asked, unseen="the config alone was given")


def _is_known(catalog: Catalog, name: str) -> bool:
    try:
        catalog.model(name)
    except UnknownName:
        return False
    return True


def _from_repository(asked: str, named: Repository) -> Stored:
    remote = read_repository(named)
    file, name = Path(named.id, "config.json"), named.id.rpartition("/")[2]
    if remote.checkpoint is None:
        stored = _of_config(asked, name, remote.config, file, _read(remote.config, file, name), remote.reason)
    else:
        scheme = read_scheme(remote.checkpoint, remote.config)
        stored = _of_checkpoint(asked, name, Config(remote.config, file), remote.checkpoint, scheme)
    return msgspec.structs.replace(stored, remote=True)


def _refuse_other_folders(asked: str, folder: Path) -> None:
    """Folders that people take for a model's, with a word on which one is meant."""
    if (folder / "config.json").exists():
        return
    snapshots = sorted(folder.glob("snapshots/*/config.json"))
    if (folder / "adapter_config.json").is_file():
        raise BadInput(f"{asked}: an adapter, not a model; give the folder of its base model, with --with lora")
    if snapshots:
        raise BadInput(f"{asked}: a folder of Hugging Face's cache; give {snapshots[-1].parent}")
    if (folder / "params.json").is_file():
        raise BadInput(f"{asked}: Mistral's own format without a config.json; give the Hugging Face one of the model")
    if (folder / "model_index.json").is_file():
        raise BadInput(f"{asked}: a pipeline of diffusers, which no engine here serves")


def _name(folder: Path) -> str:
    """Hugging Face's cache keeps models--org--name/snapshots/commit."""
    whole = folder.resolve()
    return whole.parent.parent.name.rpartition("--")[2] if whole.parent.name == "snapshots" else whole.name


def _from_folder(asked: str, folder: Path) -> Stored:
    raw, file = load_config(folder)
    checkpoint = open_checkpoint(folder)
    local = asked if asked.startswith((".", "/", "~")) else f"./{asked}"
    return _of_checkpoint(local, _name(folder), Config(raw, file), checkpoint, read_scheme(checkpoint))


def _of_checkpoint(asked: str, name: str, config: Config, checkpoint: Checkpoint, scheme: Scheme) -> Stored:
    linear, experts = (_part(scheme, part) for part in _PARTS)
    return Stored(
        asked=asked, name=name, config=config, method=scheme.method,
        linear=linear or (Weights(scheme="unknown"),), experts=experts,
        kv=scheme.kv_format or "bf16", kv_scales=bool(scheme.kv_scales),
        dialect=(scheme.dialect or "e4m3fn").removeprefix("e4m3"), converted=scheme.converted,
        checkpoint=checkpoint, scheme=scheme, sinks=any(_SINKS.search(name) for name in checkpoint.tensors),
    )  # fmt: skip


def _part(scheme: Scheme, part: ModelPart) -> tuple[Weights, ...]:
    """The main way first; what is left in 16 bits beside quantised weights is no way of its own."""
    return tuple(
        as_declared(
            Weights(scheme=way.scheme, activations=way.activations, scales=way.scales, method=scheme.method),
            scheme.quantisation,
        )
        for number, way in enumerate(scheme.parts.get(part, ()))
        if number == 0 or way.scheme not in ("bf16", "fp16")
    )


def _gguf_files(asked: str, folder: Path) -> list[Path]:
    """One model: a file, or all parts of one that was split; projectors of images stand beside it."""
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.startswith("mmproj"))
    models = {_SPLIT.sub("", file.name) for file in files}
    if len(models) != 1:
        raise BadInput(
            f"{asked}: {len(models)} models in GGUF; give one of the files ({', '.join(sorted(models)[:4])})"
        )
    return _parts(files[0])


def _parts(file: Path) -> list[Path]:
    """All files of a model that was split, by the name of any: name-00001-of-00003.gguf."""
    split = _SPLIT.search(file.name)
    if split is None:
        return [file]
    count = int(split[0][-5:])
    parts = [file.with_name(_SPLIT.sub(f"-{number:05}-of-{count:05}", file.name)) for number in range(1, count + 1)]
    for part in parts:
        if not part.exists():
            raise BadData(file.parent, part.name, f"a part of {count} that is not there")
    if not parts:
        raise BadData(file, "", "is a part of none by its name")
    return parts


def _from_gguf(asked: str, file: Path, *parts: Path) -> Stored:
    gguf = read_gguf(file)
    for part in map(read_gguf, parts):
        gguf = msgspec.structs.replace(gguf, tensors={**gguf.tensors, **part.tensors}, size=gguf.size + part.size)
    stored = (Weights(scheme=gguf.main_type, method="gguf"),)
    return Stored(
        asked=asked, name=file.stem, config=Config(config_of(gguf), file), method="gguf", linear=stored,
        experts=stored, gguf=gguf, precision=gguf.precision,
    )  # fmt: skip


def _from_config(catalog: Catalog, asked: str, *, unseen: str) -> Stored:
    path = Path(asked).expanduser()
    if path.suffix == ".json" or path.is_dir():
        raw, file = load_config(path)
        name = model_id(file)
        return _of_config(asked, name, raw, file, _read(raw, file, name), unseen)
    model = catalog.model(asked)
    file = Path(model.file)
    # Findings name the catalog's entry, not the place where Crosstie is installed.
    return _of_config(asked, model.name, read_toml(file)["config"], Path("catalog", file.name), model, unseen)


def _read(raw: Mapping[str, Any], file: Path, name: str) -> Model | BadData:
    try:
        return read_model(raw, file, id=name, name=name, source=str(file), date="")[0]
    except BadData as error:
        return error


def _of_config(
    asked: str, name: str, raw: dict[str, Any], file: Path, model: Model | BadData, unseen: str
) -> Stored:  # fmt: skip
    """A config alone; one that no reader understands whole has what it says of itself, and the rest is not known."""
    quantisation = quantisation_config(raw, file)
    method = method_of(quantisation)
    plain = compute_type(raw.get("torch_dtype") or raw.get("dtype"))
    ways = [Weights(scheme=plain if method == "none" else "unknown", method=method)]
    if isinstance(model, Model):
        ways = [as_declared(_native(model, role, method), quantisation) for role in _main_roles(model)]
    return Stored(
        asked=asked, name=name, config=Config(raw, file), method=method, linear=(ways[0],), experts=tuple(ways[1:]),
        unseen=unseen, unread=None if isinstance(model, Model) else model,
    )  # fmt: skip


def stored_in(own: Stored, model: Model, precision: Precision, method: str) -> Stored:
    """The same model as a checkpoint of another precision, which somebody's tool has made."""
    linear, *experts = (_weights(precision[role].main.id, method) for role in _main_roles(model))
    return msgspec.structs.replace(
        own, method=method, linear=(linear,), experts=tuple(experts), precision=precision.id, checkpoint=None,
        scheme=None, gguf=None, kv="bf16", kv_scales=False, unseen="only its format is known",
    )  # fmt: skip


def _main_roles(model: Model) -> tuple[str, ...]:
    """The role that stands for the dense matrices, and the experts where there are any."""
    if model.is_moe:
        return ("attention", "experts")
    return ("mlp",) if "mlp" in model.roles else ("attention",)


def _native(model: Model, role: str, method: str) -> Weights:
    shares = model.native[role]
    return _weights(max(shares, key=lambda name: shares[name]), method)


def _weights(main: str, method: str) -> Weights:
    scheme = _SCHEMES.get(main, "int4" if main.startswith("int4") else "int8" if main.startswith("int8") else main)
    activations = "none" if scheme in ("bf16", "fp16", "int4", "bnb4") else "dynamic"
    return Weights(scheme=scheme, activations=activations, method=method)


def load_operations(stored: Stored, layout: Layout) -> list[ModelOperation]:
    """What the engine's loader is given: each part in each of its formats, and the KV cache's scales."""
    operations = [
        _load(stored, part, weights)
        for part, ways in (("linear", stored.linear), ("moe", stored.experts))
        for weights in ways
    ]
    # A 16-bit cache has neither dialect nor scales: the attention's own rules speak of it.
    return operations if layout.kv in ("bf16", "fp16") else [*operations, _kv_cache(stored, layout)]


def _load(stored: Stored, part: str, weights: Weights) -> ModelOperation:
    what = "experts" if part == "moe" else "linear layers"
    said = weights.scheme if stored.method == "none" else f"{weights.scheme} ({stored.method})"
    return ModelOperation(
        kind="load", key="quantization_config", words=f"loading {what} in {said}",
        facts={
            **stored_facts(stored.config, weights), "method": stored.method, "scheme": weights.scheme, "part": part,
            "scales": weights.scales, "dialect": stored.dialect, "converted": stored.converted,
        },
    )  # fmt: skip


def _kv_cache(stored: Stored, layout: Layout) -> ModelOperation:
    config = stored.config
    sparse = config.get("index_topk", "compress_ratios") is not None
    kind = "sparse" if sparse else "mla" if config.get("kv_lora_rank") is not None else "gqa"
    scales = "checkpoint" if stored.kv_scales else "none"
    # A conversion may have left the cache's scales in the dialect that they had.
    kept = stored.scheme is not None and stored.scheme.kv_kept
    dialect = {"fn": "fnuz", "fnuz": "fn"}[stored.dialect] if kept else stored.dialect
    beside = " with scales of the checkpoint" if stored.kv_scales and layout.kv.startswith("fp8") else ""
    return ModelOperation(
        kind="kv_cache", key="num_key_value_heads", words=f"a KV cache in {layout.kv}{beside}",
        facts={
            "dtype": layout.kv, "scales": scales, "method": stored.method, "kind": kind, "dialect": dialect,
            "converted": stored.converted,
        },
    )  # fmt: skip
