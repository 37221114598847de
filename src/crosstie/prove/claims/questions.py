"""The vocabulary of claims.toml: what an expression may ask of the product, each through what the commands run.

`rate` and its like ask `compare`, `fewest` and its like `fit`, `saving` asks `tco`, `price` the quotes, without
those that rest on an article: what is to be checked is no evidence. Whatever is asked is noted with its source. A
question without an answer raises `BadInput`, or `DoesNotFit` where GPUs cannot hold the model.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from statistics import median
from typing import Any, TypeVar

import numpy as np

from crosstie.catalog.export import export_class, shipped_export
from crosstie.catalog.library import Catalog
from crosstie.catalog.prices import Price
from crosstie.core.deployment import KV_FORMATS, Deployment, Parallelism
from crosstie.core.errors import BadInput, CrosstieError, DoesNotFit
from crosstie.core.estimate import Estimate
from crosstie.core.fact import Fact, OtherSource
from crosstie.core.units import UNITS
from crosstie.decide.compare.scorecard import Entry, Load, Scorecard, compare
from crosstie.decide.cost.prices import quote
from crosstie.decide.cost.tco import Tco, TcoRequest, tco
from crosstie.perf.fit import Placement, fit
from crosstie.perf.memory import weight_bytes
from crosstie.perf.worlds import estimate_in_worlds
from crosstie.port.checkpoint.fp8 import VALUES
from crosstie.prove.calibration.results import OperatingPoint, read_results
from crosstie.prove.calibration.tax import shipped_results
from crosstie.prove.claims.rests import (
    PublicFact,
    Rest,
    fact_rest,
    model_rest,
    quote_rest,
    read_public_facts,
    rows_rest,
    run_rest,
)
from crosstie.prove.claims.uncertain import Chosen, Uncertain, called, likely

Answer = TypeVar("Answer")
# How a row of prices says that it was taken from an article whose claims are checked.
_ARTICLE = re.compile(r"\barticle [A-Z]\b|\bcatalog/data/claims\b")
# Printed in decimal units though they are powers of two.
_PRINTED_AS = {"GiB": "GB", "KiB": "KB"}
# What articles write quantities in.
_WRITTEN_IN = {"bytes": "GB", "bytes_per_s": "TB/s", "flop_per_s": "TFLOP/s", "watts": "W"}


def rests_on_article(price: Price) -> bool:
    return bool(_ARTICLE.search(f"{price.provider}; {price.amount.source}"))


@dataclass
class Evidence:
    """What was asked on the way to a value."""

    rests: dict[Rest, None] = field(default_factory=dict)
    # Of each estimate, whether it goes beyond what was measured.
    extrapolated: list[bool] = field(default_factory=list)


class Questions:
    def __init__(self, catalog: Catalog, claimed: Mapping[str, float]):
        self.catalog, self._claimed = catalog, claimed
        self.asked = Evidence()
        self._answers: dict[tuple[object, ...], Any] = {}

    @property
    def vocabulary(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in ASKED}, **PLAIN}

    def _note(self, rest: Rest) -> None:
        self.asked.rests[rest] = None

    # Facts.

    def parts(self) -> list[str]:
        """All accelerators of the catalog."""
        return list(self.catalog.accelerators)

    def fact(self, part: str, path: str, unit: str = "", other: bool = False) -> float | str:
        """Of an accelerator, as `catalog show` names it, in the unit that articles write; 192 GiB are printed as GB.
        What is assumed confirms nothing. `other`: what another source says, kept beside the value that was chosen."""
        group, _, key = path.partition(".")
        accelerator = self.catalog.accelerator(part)
        held = self.catalog.efficiency(accelerator) if group == "efficiency" else getattr(accelerator, group)
        value = held.get(key) if isinstance(held, dict) else getattr(held, key)
        if value is None or (other and not value.alternatives):
            raise BadInput(f"the catalog has no {'other ' * other}{path} of {part}")
        self._note(fact_rest(part, path, value))
        if value.basis == "assumed":
            raise BadInput(f"{path} of {part} is assumed")
        if other:
            self._note(Rest("catalog", f"{path}: {value.chosen_because}", value.alternatives[0].source))
        return _in_unit(value.alternatives[0] if other else value, unit)

    def memory_gb(self, part: str) -> float:
        """What a program can allocate."""
        self.fact(part, "memory.capacity")
        return self.catalog.accelerator(part).memory_bytes / 1e9

    def source(self, name: str) -> float | str:
        """A figure or a word of a public source, from claim_sources.toml."""
        public_fact = self._public[name]
        self._note(public_fact.rest)
        return public_fact.value

    @cached_property
    def _public(self) -> dict[str, PublicFact]:
        return read_public_facts()

    def claimed(self, claim: str) -> float:
        """The figure of another claim, taken as given."""
        self._note(Rest("arithmetic", f"{claim}'s {self._claimed[claim]:,.10g}, taken as given"))
        return self._claimed[claim]

    def tpp(self, part: str) -> float:
        """Total processing performance, as `scorecard` gives it for the export rule."""
        export = export_class(self.catalog.accelerator(part), shipped_export())
        self._note(Rest("arithmetic", "dense TFLOP/s x bits, the largest over the formats"))
        self._note(fact_rest(part, f"dense.{export.format}", export.rate))
        return export.tpp

    def export_limit(self) -> float:
        rule = shipped_export().tpp
        self._note(Rest("source", f"{rule.note}: {rule.value:,.0f}", rule.source, rule.date))
        return rule.value

    def dialect_ratios(self) -> list[float]:
        """What FP8 bytes mean in e4m3fn over what they mean in e4m3fnuz, for all that are numbers in both."""
        ocp, fnuz = VALUES["e4m3fn"], VALUES["e4m3fnuz"]
        both = np.isfinite(ocp) & np.isfinite(fnuz) & (fnuz != 0.0)
        count = int((np.isfinite(ocp) & np.isfinite(fnuz)).sum())
        self._note(Rest("arithmetic", f"{count} of 256 bytes are finite in both dialects, as `convert` reads them"))
        return [float(ratio) for ratio in np.unique(ocp[both] / fnuz[both])]

    # Memory, as `fit` tells it.

    def weights_gb(self, model: str, precision: str) -> float:
        of_model = self.catalog.model(model)
        self._note(model_rest(of_model, f"weights in {precision}"))
        return weight_bytes(of_model, self.catalog.precision(of_model, precision)) / 1e9

    def cache_gb(self, model: str, tokens: int) -> float:
        """KV cache of one request in 16 bits."""
        of_model = self.catalog.model(model)
        self._note(model_rest(of_model, "its KV cache"))
        return of_model.cache_bytes(tokens, KV_FORMATS["bf16"]) / 1e9

    def fewest(self, model: str, part: str, precision: str, context: int, barely: bool = False) -> int:
        """GPUs that `fit` recommends for one request of the context. `barely`: on which it fits at all, if only as long
        as the engine keeps little memory for itself."""
        placed = [fit for fit in self._fit(model, part, precision, context) if fit.fits and (barely or fit.fewest)]
        if not placed:
            raise DoesNotFit("no number of GPUs within reach holds it")
        return min(placement.deployment.parallelism.gpus for placement in placed)

    def room_gb(self, model: str, part: str, precision: str, context: int) -> float:
        """What weights and engine leave of one GPU for the KV cache of requests of the context."""
        (placed,) = self._fit(model, part, precision, context, Parallelism())
        if not placed.fits:
            raise DoesNotFit(f"{model} in {precision} does not fit one {part}")
        return placed.plan.cache_bytes / 1e9

    def _fit(
        self, model: str, part: str, precision: str, context: int, layout: Parallelism | None = None
    ) -> Sequence[Placement]:
        self.fact(part, "memory.capacity")
        placements = self._once((model, part, precision, context, layout), lambda: fit(
            self.catalog, self.catalog.model(model), [self.catalog.accelerator(part)], context=context,
            precisions=[precision], layouts=[layout] if layout else None,
        ).placements)  # fmt: skip
        stack = placements[0].deployment.stack
        keeps = f"{stack.id} keeps {stack.reserved} for itself ({stack.reserved.basis})"
        self._note(Rest("model", f"memory as `fit` plans it, one request of {context:,} tokens; {keeps}"))
        return placements

    # Speed, as `compare` tells it.

    def rate(
        self, model: str, part: str, precision: str, *load: int, gpus: int = 0, engine: str | None = None
    ) -> Uncertain:
        """Output tokens/s per GPU, on so many GPUs by tensor parallelism or else the fewest that hold the load, which
        is requests in flight, tokens in and tokens out."""
        return self._rate(self._card(model, (part,), precision, load, gpus, engine))

    def node(self, model: str, part: str, precision: str, in_flight: int, prompt: int, answer: int) -> Uncertain:
        """Of the two smallest splits of eight GPUs into like replicas that hold it, the one that gives more per GPU; on
        more GPUs where eight do not hold the model."""
        shares = {gpus: (max(in_flight * gpus // 8, 1), prompt, answer) for gpus in (1, 2, 4, 8)}
        cards = (self._card(model, (part,), precision, load, gpus) for gpus, load in shares.items())
        holding = list(islice((card for card in cards if card.entries[0].estimate), 2))
        if not holding:
            return self.rate(model, part, precision, in_flight, prompt, answer)
        return self._rate(max(holding, key=lambda card: _served(card.entries[0])[1].output_tokens_per_s_per_gpu))

    def tpot_ms(self, model: str, part: str, precision: str, *load: int, gpus: int = 0) -> float:
        """Time between tokens."""
        card = self._card(model, (part,), precision, load, gpus)
        return 1e3 * self._noted(card.entries[0], card.load)[1].tpot_s

    def ceiling(self, model: str, part: str, precision: str) -> float:
        """Tokens/s of one stream that memory bandwidth allows, per GPU of the fewest that hold the model."""
        deployment, estimate = _served(self._card(model, (part,), precision, (1, 512, 128)).entries[0])
        self.fact(part, "memory.bandwidth")
        self._note(Rest("arithmetic", "memory bandwidth / bytes of the weights multiplied by"))
        return estimate.single_stream_ceiling_tokens_per_s / deployment.parallelism.gpus

    def _card(
        self, model: str, parts: tuple[str, ...], precision: str, load: Sequence[int], gpus: int = 0,
        engine: str | None = None,
    ) -> Scorecard:  # fmt: skip
        return self._once((model, parts, precision, *load, gpus, engine), lambda: compare(
            self.catalog, self.catalog.model(model), [self.catalog.accelerator(part) for part in parts], Load(*load),
            parallelism=Parallelism(tp=gpus) if gpus else None, precision=precision, stack=engine,
        ))  # fmt: skip

    def _rate(self, card: Scorecard) -> Uncertain:
        (entry,) = card.entries
        deployment, estimate = self._noted(entry, card.load)
        gpus = deployment.parallelism.gpus
        value, lengths = estimate.output_tokens_per_s_per_gpu, (card.load.input_tokens, card.load.output_tokens)
        ends = estimate.interval.per_gpu(gpus) if estimate.interval else (value, value)
        drawn = partial(estimate_in_worlds, deployment, estimate, lengths)
        # One for all who ask, as it keeps what it is in every world once somebody needs that.
        return self._once(
            ("rate", id(card)), lambda: Uncertain(value, ends, lambda: drawn().output_tokens_per_s[0] / gpus)
        )

    def _noted(self, entry: Entry, load: Load) -> tuple[Deployment, Estimate]:
        deployment, estimate = _served(entry)
        self._note(run_rest(deployment, estimate, load))
        self.asked.extrapolated.append("extrapolated" in estimate.basis)
        return deployment, estimate

    # Results that others published.

    def offline(self, part: str, round: str = "", gpus: int = 0) -> list[float]:
        """MLPerf's Llama-2-70B Offline results, tokens/s per GPU; of one round, or of one number of GPUs."""
        wanted = {"accelerator": called(part), "model": "Llama-2-70B", "scenario": "Offline"}
        wanted |= {"source_id": round} if round else {}
        return self.results(**wanted, **({"num_accelerators": str(gpus)} if gpus else {}))

    def results(self, **wanted: str) -> list[float]:
        """Output tokens/s of measured points with exactly these columns, per GPU or in all, as they were published."""
        own = self._points.get(wanted["accelerator"], [])
        points = [point for point in own if all(point[key] == value for key, value in wanted.items())]
        rows = (row for point in points for row in point.rows)
        rates = [row for row in rows if row.metric.kind == "throughput" and not row.metric.with_input]
        values = [row.value for row in rates if row.metric.per_gpu] or [row.value for row in rates]
        if not values:
            raise BadInput(f"no measured result of {', '.join(wanted.values())} is shipped")
        self._note(rows_rest(points, f"{', '.join(wanted.values())}: {len(values)} results"))
        return values

    @cached_property
    def _points(self) -> dict[str, list[OperatingPoint]]:
        points: dict[str, list[OperatingPoint]] = {}
        for point in read_results(shipped_results()).points:
            points.setdefault(point["accelerator"], []).append(point)
        return points

    # Money.

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """The catalog's, without those that rest on an article."""
        return tuple(price for price in self.catalog.prices if not rests_on_article(price))

    def price(self, part: str, kind: str) -> float:
        """USD by the hour, or for one where it is bought: what the middle one of the sellers asks."""
        asked = quote(self.prices, part, kind)
        if asked is None:
            raise BadInput(f"no {kind} price of {called(part)} by anybody but an article")
        self._note(quote_rest(asked))
        return asked.usd

    def sellers(self, *parts: str) -> list[str]:
        """Sellers that name a price of one of each part to buy, alone or with its share of a server."""
        held = [list(dict.fromkeys(price.provider for price in self._bought(part))) for part in parts]
        return [who for who in held[0] if all(who in others for others in held)]

    def asks(self, part: str, seller: str) -> float:
        """USD for one, the middle where a seller gives the ends of a range."""
        prices = [price for price in self._bought(part) if price.provider == seller]
        usd = median(price.amount.value for price in prices)
        what, said = f"{part} {prices[0].kind} {usd:,.0f} USD ({seller})", prices[0].amount
        self._note(Rest("catalog", what, said.source, said.date))
        return usd

    def _bought(self, part: str) -> list[Price]:
        return [price for price in self.prices if price.accelerator == part and price.kind.startswith("purchase")]

    def saving(self, first: str, second: str, **terms: Any) -> Uncertain:
        """Percent by which a token of the first costs less than one of the second, by `tco`."""
        assessed = self._tco(first, second, **terms).assessed
        low, high = assessed.risk.saving or (0.0, 0.0)
        if assessed.ranking[0] != first:
            # The samples are of the other's saving: the same ones the other way round.
            low, high = (1.0 - 1.0 / (1.0 - end) for end in (high, low))
        return 100.0 * Uncertain(1.0 - assessed.usd_per_mtok[first] / assessed.usd_per_mtok[second], (low, high))

    def savings_varied(self, first: str, second: str, **terms: Any) -> list[float]:
        """Least and most of it with each assumption about operation alone up or down by the share `vary`."""
        bars = [bar for bar in self._tco(first, second, **terms).assessed.tornado if bar.key in self.catalog.costs]
        ends = [end for bar in bars for end in (bar.outcome_at_low, bar.outcome_at_high)]
        return [100.0 * min(ends), 100.0 * max(ends)]

    def _tco(
        self, first: str, second: str, *, model: str, precision: str, load: Sequence[int], usd: Sequence[float],
        width: int = 0, discount: float = 0.0, engineers: float = 0.0, **asked: Any,
    ) -> Tco:  # fmt: skip
        names = (first, second)
        card = self._card(model, names, precision, load, width)
        for entry in card.entries:
            self._noted(entry, card.load)
        request = TcoRequest(
            purchase_usd=dict(zip(names, usd, strict=True)), discount=dict.fromkeys(names, discount),
            engineers={first: engineers} if engineers else {}, **asked,
        )  # fmt: skip
        return self._once(("tco", id(card), repr(request)), lambda: tco(self.catalog, card, request))

    def _once(self, key: tuple[object, ...], answer: Callable[[], Answer]) -> Answer:
        if key not in self._answers:
            self._answers[key] = answer()
        kept: Answer = self._answers[key]
        return kept


def _served(entry: Entry) -> tuple[Deployment, Estimate]:
    if entry.deployment is None or entry.estimate is None:
        raise DoesNotFit(f"{entry.accelerator.id}: {entry.problem}")
    return entry.deployment, entry.estimate


def _in_unit(fact: Fact | OtherSource | Any, unit: str) -> float | str:
    if isinstance(fact.value, str):
        return fact.value
    dimension = UNITS[fact.unit].dimension
    wanted = unit or _WRITTEN_IN.get(dimension, fact.unit)
    if _PRINTED_AS.get(fact.unit) == wanted:
        return float(fact.value)
    return float(fact.value * UNITS[fact.unit].si / UNITS[wanted].si)


def least(names: Iterable[str], of: Callable[[str], Any]) -> Chosen:
    """The accelerator with the least; those without an answer are left out."""
    return Chosen.of(dict(sorted(_each(names, of), key=lambda pair: pair[1])))


def most(names: Iterable[str], of: Callable[[str], Any]) -> Chosen:
    return Chosen.of(dict(sorted(_each(names, of), key=lambda pair: -pair[1])))


def _each(names: Iterable[str], of: Callable[[str], Any]) -> list[tuple[str, float]]:
    values = []
    for name in names:
        try:
            values.append((name, likely(of(name))))
        except CrosstieError:
            continue
    if not values:
        raise BadInput("no answer for any of them")
    return values


ASKED = tuple(name for name, held in vars(Questions).items() if not name.startswith("_") and callable(held))
PLAIN: dict[str, Any] = {
    "abs": abs, "all": all, "any": any, "ceil": math.ceil, "floor": math.floor, "least": least, "len": len,
    "likely": likely, "max": max, "min": min, "most": most, "sum": sum,
    # What the articles weigh against one another.
    "DISCUSSED": ["mi300x", "mi325x", "mi350x", "h100-sxm", "h200", "b200"],
}  # fmt: skip
VOCABULARY = frozenset(ASKED) | set(PLAIN)
