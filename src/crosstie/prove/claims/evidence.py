"""What claims are checked against: the catalog, estimates, measured rows and facts from public sources."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.catalog.prices import Price
from crosstie.catalog.reading import Sources, only_keys, optional_text, read_toml, table, text
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadData, BadInput, DoesNotFit
from crosstie.core.estimate import Estimate
from crosstie.core.fact import Fact
from crosstie.decide.compare.scorecard import Load, compare
from crosstie.decide.cost.prices import Quote, quote
from crosstie.decide.cost.published import Published, mi325x_against_h200
from crosstie.perf.hardware import Array
from crosstie.perf.worlds import estimate_in_worlds
from crosstie.prove.calibration.results import MeasuredRow, OperatingPoint, read_results
from crosstie.prove.calibration.tax import shipped_results
from crosstie.prove.claims.reading import Span, read_claims

SHIPPED_SOURCES = SHIPPED / "claim_sources.toml"
# What the articles mean by "70B".
LLAMA = "llama-3.1-70b"
ROUNDS = ("mlperf_v4.1", "mlperf_v5.1", "mlperf_v6.0")
# How a row of prices says that it was taken from an article whose claims are checked.
_ARTICLE = re.compile(r"\barticle [A-Z]\b|\bcatalog/data/claims\b")


def called(name: str) -> str:
    """An accelerator as articles and MLPerf write it: MI300X, H100."""
    return name.removesuffix("-sxm").upper()


def rests_on_article(price: Price) -> bool:
    """Whether a price is an article's own: what is to be checked is no evidence, for that article or another."""
    return bool(_ARTICLE.search(f"{price.provider}; {price.amount.source}"))


@dataclass(frozen=True)
class PublicFact:
    """A figure or a word of a public source, in this project's words."""

    value: float | str
    unit: str
    says: str
    source: str
    date: str


def read_public_facts(file: Path = SHIPPED_SOURCES) -> dict[str, PublicFact]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", "facts"})
    sources = Sources(file, raw.get("sources"))
    found = {}
    for name, entry in table(file, "facts", raw.get("facts")).items():
        where = f"facts.{name}"
        entry = table(file, where, entry)
        only_keys(file, where, entry, {"value", "unit", "says", "source"})
        value = entry.get("value")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise BadData(file, f"{where}.value", "must be a number or a word")
        reference, dated = sources.cite(where, entry.get("source"))
        found[name] = PublicFact(
            value=value if isinstance(value, str) else float(value),
            unit=optional_text(file, f"{where}.unit", entry.get("unit")),
            says=text(file, f"{where}.says", entry.get("says")),
            source=reference,
            date=dated,
        )
    sources.check_all_cited()
    return found


@dataclass(frozen=True)
class EstimatedRun:
    """An estimate at one operating point, per GPU."""

    deployment: Deployment
    estimate: Estimate
    load: tuple[int, int, int]

    @property
    def per_gpu(self) -> float:
        return self.estimate.output_tokens_per_s_per_gpu

    @property
    def interval(self) -> tuple[float, float]:
        """80%, per GPU; without a calibration the estimate alone."""
        made = self.estimate.interval
        return made.per_gpu(self.deployment.parallelism.gpus) if made else (self.per_gpu, self.per_gpu)

    @property
    def in_worlds(self) -> Array:
        found = estimate_in_worlds(self.deployment, self.estimate, self.load[1:])
        return np.asarray(found.output_tokens_per_s[0] / self.deployment.parallelism.gpus)

    @property
    def point(self) -> str:
        concurrency, tokens_in, tokens_out = self.load
        return f"{self.deployment.label}, {concurrency} in flight, {tokens_in:,} in, {tokens_out:,} out"


@dataclass(frozen=True)
class Ratio:
    """Of two estimates, world by world."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"


def ratio_of(above: EstimatedRun, below: EstimatedRun, factor: float = 1.0) -> Ratio:
    value, drawn = above.per_gpu / below.per_gpu, above.in_worlds / below.in_worlds
    low, high = np.quantile(drawn, [0.1, 0.9]).tolist()
    return Ratio(factor * value, factor * min(low, value), factor * max(high, value))


@dataclass
class Evidence:
    catalog: Catalog
    _runs: dict[tuple[object, ...], EstimatedRun | None] = field(default_factory=dict, repr=False)

    @cached_property
    def _facts(self) -> dict[str, PublicFact]:
        return read_public_facts()

    def claimed(self, name: str) -> Span:
        """The one figure that another claim gives."""
        return next(claim.only for claim in read_claims() if claim.id == name)

    @cached_property
    def comparison(self) -> Published:
        return mi325x_against_h200(self.catalog)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """The catalog's prices without those that rest on an article."""
        return tuple(price for price in self.catalog.prices if not rests_on_article(price))

    def own_price(self, name: str) -> bool:
        """Whether an article's own purchase price of the part is in the catalog, and left out here."""
        return any(p.accelerator == name and p.kind == "purchase" for p in self.catalog.prices if rests_on_article(p))

    @cached_property
    def points(self) -> list[OperatingPoint]:
        """The measured operating points that Crosstie ships."""
        return read_results(shipped_results()).points

    @cached_property
    def _offline(self) -> list[OperatingPoint]:
        wanted = [p for p in self.points if p["scenario"] == "Offline" and p["model"] == "Llama-2-70B"]
        return [point for point in wanted if per_gpu_rates([point])]

    def offline(self, name: str, *rounds: str) -> list[OperatingPoint]:
        """MLPerf's Llama-2-70B Offline results of an accelerator in these rounds, or in all."""
        own = [point for point in self._offline if point["accelerator"] == called(name)]
        return [point for source in rounds or ROUNDS for point in own if point["source_id"] == source]

    def fact(self, name: str) -> PublicFact:
        return self._facts[name]

    def number(self, name: str) -> float:
        value = self._facts[name].value
        assert isinstance(value, float), f"{name} is a word"
        return value

    def part(self, name: str) -> Accelerator:
        return self.catalog.accelerator(name)

    def field(self, name: str, path: str) -> Fact:
        """A fact of an accelerator by its dotted path, as `crosstie catalog show` names it."""
        found: Fact = self.named(name, path)
        return found

    def label(self, name: str, path: str) -> str:
        """The same of a word."""
        return str(self.named(name, path).value)

    def named(self, name: str, path: str) -> Any:
        group, _, key = path.partition(".")
        held = getattr(self.part(name), group)
        found = held.get(key) if isinstance(held, dict) else getattr(held, key)
        if found is None:
            raise BadInput(f"the catalog has no {path} of {name}")
        return found

    def price(self, name: str, kind: str) -> Quote | None:
        """A quote of exactly one kind."""
        return quote(self.prices, name, kind)

    def purchase(self, name: str) -> dict[str, float]:
        """USD of one by each who names a price, the middle where one gives the ends of a range."""
        found = defaultdict[str, list[float]](list)
        for price in self.prices:
            if price.accelerator == name and price.kind.startswith("purchase"):
                found[price.provider].append(price.amount.value)
        return {provider: median(values) for provider, values in found.items()}

    def run(
        self, model: str, on: str, load: tuple[int, int, int], precision: str, *, gpus: int | None = None,
        stack: str | None = None,
    ) -> EstimatedRun | None:  # fmt: skip
        """On so many GPUs by tensor parallelism, else the fewest that hold the load; None where it does not fit."""
        key = (model, on, load, precision, gpus, stack)
        if key not in self._runs:
            layout = Parallelism(tp=gpus) if gpus else None
            card = compare(
                self.catalog, self.catalog.model(model), [self.part(on)], Load(*load),
                parallelism=layout, precision=precision, stack=stack,
            )  # fmt: skip
            (one,) = card.entries
            self._runs[key] = (
                EstimatedRun(one.deployment, one.estimate, load) if one.deployment and one.estimate else None
            )
        return self._runs[key]

    def needed(
        self, model: str, on: str, load: tuple[int, int, int], precision: str, *, gpus: int | None = None,
        stack: str | None = None,
    ) -> EstimatedRun:  # fmt: skip
        """The same where a check has no use for "does not fit"."""
        run = self.run(model, on, load, precision, gpus=gpus, stack=stack)
        if run is None:
            raise DoesNotFit(f"{model} in {precision} does not fit {gpus or 'any number of'} {on}")
        return run

    def best_of_node(self, model: str, on: str, load: tuple[int, int, int], precision: str) -> EstimatedRun:
        """Of the two smallest splits of eight GPUs into like replicas that hold it, the one that gives more."""
        concurrency, tokens_in, tokens_out = load
        shares = {gpus: (max(concurrency * gpus // 8, 1), tokens_in, tokens_out) for gpus in (1, 2, 4, 8)}
        tried = (self.run(model, on, share, precision, gpus=gpus) for gpus, share in shares.items())
        smallest = list(islice(filter(None, tried), 2))
        if not smallest:
            raise DoesNotFit(f"{model} in {precision} does not fit eight {on}")
        return max(smallest, key=lambda run: run.per_gpu)

    def measured(self, **wanted: str) -> list[OperatingPoint]:
        """Measured points whose columns begin with these words."""
        return [p for p in self.points if all(p[name].startswith(value) for name, value in wanted.items())]


def output_rates(points: Iterable[OperatingPoint]) -> list[MeasuredRow]:
    """The rows of output tokens/s, per GPU or in all."""
    rows = (row for point in points for row in point.rows)
    return [row for row in rows if row.metric.kind == "throughput" and not row.metric.with_input]


def per_gpu_rates(points: Iterable[OperatingPoint]) -> list[float]:
    """Output tokens/s per GPU of each point that has them."""
    return [row.value for row in output_rates(points) if row.metric.per_gpu]
