"""How published benchmarks were run where their rows do not say: rules, data sets and MLPerf's layouts."""

import csv
import io
from collections import Counter
from collections.abc import Mapping
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.acceptance import parse_speculation
from crosstie.catalog.reading import Sources, only_keys, read_records, read_toml, table, text, text_of
from crosstie.core.deployment import kv_bytes_per_element
from crosstie.core.errors import BadData, BadInput
from crosstie.core.fact import Word
from crosstie.core.speculation import Text

_COLUMNS = (
    "rows", "engines", "vendors", "accelerators", "models", "bits", "lengths", "attention", "sides", "load", "prompts",
)  # fmt: skip
_Column = Annotated[str, Word("what a rule may be narrowed by", _COLUMNS)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e7)]
Steps = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class BenchmarkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark set; None where it kept the engine's default."""

    kv_format: str | None = None
    # The shortest request over the nominal length: lengths are uniform between the two.
    shortest: Share | None = None
    requests_per_client: Amount | None = None
    # Tokens of a step's prompts: the larger of a number and a multiple of the prompt.
    chunk_tokens: Amount | None = None
    chunk_inputs: Amount | None = None
    max_sequences: Amount | None = None
    memory_fraction: Share | None = None
    # Steps between two looks at arrivals, with many clients and with few.
    receive_every: Steps | None = None
    receive_every_few: Steps | None = None
    few_clients: Amount | None = None
    # How rows that speculate did so, such as mtp:3, and on which kind of text.
    speculation: str | None = None
    text: Text | None = None
    # Memory of the host for each GPU that keeps what the GPU's cache drops.
    host_gib_per_gpu: Amount | None = None
    # Live sessions a GPU from which on recipes replicate attention, where rows do not say that they did.
    replicated_from: Amount | None = None
    # What the first request of each client waits for beside its prompt: kernels that are compiled when they are met.
    first_wave_s: Amount | None = None

    def over(self, other: "BenchmarkSettings") -> "BenchmarkSettings":
        """These settings, and the other's where these say nothing."""
        mine = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(other, **mine)


class ProtocolRule(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    when: dict[_Column, tuple[str, ...]]
    set: BenchmarkSettings
    source: str
    date: str

    def holds(self, of: Mapping[str, str]) -> bool:
        return all(of[key] in allowed for key, allowed in self.when.items())


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """Mean lengths of a data set in tokens; the basis is that of the input length."""

    input_mean: float
    output_mean: float | None
    basis: str
    # (round, scenario) to the p99 limits of TTFT and TPOT in seconds.
    limits: dict[tuple[str, str], tuple[float, float]]


class Protocols:
    def __init__(self, folder: Path | None = None):
        self._folder = folder or Path(str(files("crosstie.catalog") / "data"))

    @cached_property
    def rules(self) -> tuple[ProtocolRule, ...]:
        return read_rules(self._folder / "protocols.toml")

    @cached_property
    def datasets(self) -> dict[str, Dataset]:
        return read_datasets(self._folder / "datasets.toml")

    @cached_property
    def layouts(self) -> dict[tuple[str, str, str], dict[str, str]]:
        """(accelerator, model, scenario), folded, to the layout that most submissions have."""
        splits: dict[tuple[str, str, str], Counter[tuple[tuple[str, str], ...]]] = {}
        file = self._folder / "mlperf_layouts.csv"
        rows = list(csv.DictReader(io.StringIO(text_of(file))))
        needed = {"accelerator", "model", "scenario", "tp", "pp", "ep", "attention_dp", "weights"}
        missing = sorted(needed - set(rows[0] if rows else needed))
        if missing:
            raise BadData(file, "", f"lacks the column {missing[0]}")
        for row in rows:
            if None not in row.values():
                key = (row["accelerator"].casefold(), row["model"].casefold(), row["scenario"].casefold())
                layout = {name: row[name].partition("|")[0] for name in ("tp", "pp", "ep", "attention_dp", "weights")}
                if layout["tp"]:
                    splits.setdefault(key, Counter())[tuple(layout.items())] += 1
        return {key: dict(counts.most_common(1)[0][0]) for key, counts in splits.items()}

    def settings(self, of: Mapping[str, str]) -> tuple[BenchmarkSettings, tuple[str, ...]]:
        """What the rules say about a row, and the names of those that spoke."""
        result, spoke = BenchmarkSettings(), []
        for rule in self.rules:
            if rule.holds(of):
                result = rule.set.over(result)
                spoke.append(rule.name)
        return result, tuple(spoke)


@cache
def shipped_protocols() -> Protocols:
    return Protocols()


def read_rules(file: Path) -> tuple[ProtocolRule, ...]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", "rule"})
    sources = Sources(file, raw.get("sources"))
    rules = read_records(file, "rule", raw["rule"], ProtocolRule, sources) if "rule" in raw else ()
    for index, rule in enumerate(rules):
        try:
            if rule.set.kv_format:
                kv_bytes_per_element(rule.set.kv_format)
            if rule.set.speculation:
                parse_speculation(rule.set.speculation)
        except BadInput as error:
            raise BadData(file, f"rule[{index}].set", str(error)) from None
    return rules


_DATASET = {"dataset", "samples", "input_mean", "input_min", "input_max", "output_mean", "output_mean_submitted",
            "output_max", "limits"}  # fmt: skip


def read_datasets(file: Path) -> dict[str, Dataset]:
    raw = dict(read_toml(file))
    Sources(file, raw.pop("sources", None))
    datasets = {}
    for name, entry in raw.items():
        entry = table(file, name, entry)
        only_keys(file, name, entry, _DATASET)
        mean = table(file, f"{name}.input_mean", entry.get("input_mean"))
        if not isinstance(mean.get("value"), int | float):
            raise BadData(file, f"{name}.input_mean.value", "must be a number")
        try:
            limits = {
                (day, limit["scenario"].casefold()): (limit["ttft_ms"] / 1e3, limit["tpot_ms"] / 1e3)
                for limit in entry.get("limits", [])
                for day in limit["rounds"]
            }
        except (KeyError, TypeError, AttributeError):
            raise BadData(file, f"{name}.limits", "needs rounds, scenario, ttft_ms and tpot_ms") from None
        output = table(file, f"{name}.output_mean", entry.get("output_mean", {}))
        if not isinstance(output.get("value", 0.0), int | float):
            raise BadData(file, f"{name}.output_mean.value", "must be a number")
        datasets[name.casefold()] = Dataset(
            input_mean=float(mean["value"]),
            output_mean=float(output["value"]) if "value" in output else None,
            basis=text(file, f"{name}.input_mean.basis", mean.get("basis")),
            limits=limits,
        )
    return datasets
