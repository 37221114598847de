"""A Hugging Face config.json that answers with a clear error and remembers what was asked of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstie.catalog.families import IN_OBJECTS, SPELT_APART, WITH_OBJECTS
from crosstie.catalog.reading import read_json
from crosstie.core.errors import BadData

# No model has a dimension beyond this; a larger one is a slip, and would take forever to count.
_MOST = 10**8


class Config:
    """Reads keys of the language model, whether they stand at the top or under `text_config`."""

    def __init__(self, raw: Mapping[str, Any], file: Path | str, prefix: str = ""):
        self.file, self.prefix = file, prefix
        self.nested = False
        if raw.get("model_type") in WITH_OBJECTS:
            raw = self._usual_keys(raw)
        if raw.get("compress_rates") is not None:
            raw = self._in_numbers(raw)
        self.outer = raw
        text = raw.get("text_config")
        self.nested = isinstance(text, Mapping)
        self.raw: Mapping[str, Any] = text if isinstance(text, Mapping) else raw
        self.asked: set[str] = set()
        self.asked_outer: set[str] = set()

    def get(self, *names: str) -> Any:
        """The first of these keys that is there and not null; families spell the same thing apart."""
        value = None
        for name in names:
            self.asked.add(name)
            if value is None and self.raw.get(name) is not None:
                value = self.raw[name]
        return value

    def get_outer(self, name: str) -> Any:
        """A key that multimodal configs keep at the top or beside the language model."""
        self.asked_outer.add(name)
        inner = self.get(name)
        return self.outer.get(name) if inner is None else inner

    def maybe(self, *names: str, least: int = 1) -> int | None:
        """A whole number, or None where the config does not have it."""
        value = self.get(*names)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            # The same for every layer.
            value = value[0]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
            key = next(name for name in names if self.raw.get(name) is not None)
            raise self.bad(key, f"must be a whole number from {least} to {_MOST:,}, not {value!r:.60}")
        return value

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        value = self.maybe(*names, least=least)
        if value is not None:
            return value
        if default is None:
            raise self.bad(names[0], "missing: this config.json lacks the field")
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._typed(name, self.get(name), bool, "true or false", default))

    def flag_outer(self, name: str) -> bool | None:
        flag: bool | None = self._typed(name, self.get_outer(name), bool, "true or false", None)
        return flag

    def word(self, name: str) -> str:
        """A string, or "" where there is none."""
        return str(self._typed(name, self.get(name), str, "a string", ""))

    def words(self, name: str, length: int) -> list[str] | None:
        words = self._list(name, str)
        if words is not None and len(words) != length:
            raise self.bad(name, f"has {len(words)} entries for {length} layers")
        return words

    def counts(self, name: str, least_length: int = 0) -> list[int] | None:
        counts = self._list(name, int)
        if counts is not None and len(counts) < least_length:
            raise self.bad(name, f"has {len(counts)} entries for {least_length} layers")
        return counts

    def nested_config(self, name: str) -> "Config | None":
        """An object inside the config, read in the same way."""
        value = self.get(name)
        return None if value is None else Config(self.object(name, value), self.file, f"{self._where(name)}.")

    def object(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.bad(name, "must be an object")
        return value

    def bad(self, name: str, reason: str) -> BadData:
        return BadData(self.file, self._where(name), reason)

    def kept(self) -> dict[str, Any]:
        """The keys that were asked for and are there: what a catalog file needs to keep."""
        inner = {key: value for key, value in self.raw.items() if key in self.asked and value is not None}
        outer = {
            key: value
            for key, value in self.outer.items()
            if key in self.asked_outer and value is not None and key != "text_config"
        }
        return {**outer, "text_config": inner} if self.nested else {**inner, **outer}

    def unknown(self) -> list[str]:
        """Keys that nothing asked for, as a strict data file must not have them."""
        inner = [self._where(key) for key in self.raw if key not in self.asked | self.asked_outer]
        if not self.nested:
            return inner
        outer = [key for key in self.outer if key not in self.asked_outer and key != "text_config"]
        return [f"{self.prefix}{key}" for key in outer] + inner

    def _usual_keys(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The same in the keys that others use, so that one reader serves all."""
        usual = {SPELT_APART.get(key, key): value for key, value in raw.items() if key not in IN_OBJECTS}
        for key, names in IN_OBJECTS.items():
            own = self.object(key, raw.get(key) or {})
            usual |= {names[name]: value for name, value in own.items() if name in names and value not in (None, -1)}
        return usual

    def _in_numbers(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """DeepSeek-V4 as transformers writes it, with a word for each layer, in the numbers that its makers publish.

        All its routers correct their scores, which only the makers' config says.
        """
        rates = {"sliding_attention": 0, **self.object("compress_rates", raw["compress_rates"])}
        kinds, feeds = (raw.get(name) or [] for name in ("layer_types", "mlp_layer_types"))
        if not isinstance(kinds, list) or not isinstance(feeds, list):
            raise self.bad("layer_types", "must be a list of strings, as mlp_layer_types")
        for index, kind in enumerate(kinds):
            if not isinstance(kind, str) or kind not in rates:
                raise self.bad(f"layer_types[{index}]", f"{kind!r:.60} is not one of {', '.join(rates)}")
        translated = {
            "compress_ratios": [rates[kind] for kind in kinds],
            "num_hash_layers": feeds.count("hash_moe"),
            "topk_method": "noaux_tc",
        }
        words = ("compress_rates", "layer_types", "mlp_layer_types")
        return {**{key: value for key, value in raw.items() if key not in words}, **translated}

    def _typed(self, name: str, value: Any, kind: type, what: str, default: Any) -> Any:
        if value is None:
            return default
        if not isinstance(value, kind):
            raise self.bad(name, f"must be {what}, not {value!r:.60}")
        return value

    def _list(self, name: str, kind: type) -> list[Any] | None:
        value = self.get(name)
        if value is None:
            return None
        good = isinstance(value, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)
        if not good:
            raise self.bad(name, f"must be a list of {'strings' if kind is str else 'whole numbers'}")
        return list(value)

    def _where(self, name: str) -> str:
        return f"{self.prefix}{'text_config.' if self.nested else ''}{name}"


def load_config(path: Path) -> tuple[dict[str, Any], Path]:
    """A config.json, or the directory of a model that has one."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise BadData(file, "", "no such file: give a model directory or its config.json")
    raw = read_json(file)
    beside = file.with_name("hf_quant_config.json")
    if file.name == "config.json" and "quantization_config" not in raw and beside.is_file():
        raw = with_modelopt(raw, read_json(beside))
    return raw, file


def with_modelopt(raw: dict[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt writes its settings into a file of their own, hf_quant_config.json."""
    return {**raw, "quantization_config": {"quant_method": "modelopt", **beside}}
