"""Whatever claims ask, the commands answer: each question of claims.toml goes to `crosstie.decide.api` as well."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide import api
from crosstie.decide.cost.prices import quote
from crosstie.decide.cost.tco import TcoRequest
from crosstie.perf.fit import Placement
from crosstie.prove.claims.check import judged
from crosstie.prove.claims.questions import ASKED, Questions
from crosstie.prove.claims.reading import read_claims
from crosstie.prove.claims.uncertain import Uncertain, likely

Call = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


class Overheard(Questions):
    """Keeps what was asked and answered; `off` makes every answer wrong by so much."""

    def __init__(self, catalog: Catalog, off: float = 1.0):
        super().__init__(catalog, {claim.id: claim.spans[0].middle for claim in read_claims() if claim.spans})
        self.off, self.calls = off, dict[Call, Any]()

    @property
    def vocabulary(self) -> dict[str, Any]:
        return {**super().vocabulary, **{name: self._heard(name, getattr(self, name)) for name in ASKED}}

    def _heard(self, name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def heard(*args: Any, **kwargs: Any) -> Any:
            kept = {key: tuple(value) if isinstance(value, list) else value for key, value in kwargs.items()}
            answer = ask(*args, **kwargs)
            known = answer * self.off if isinstance(answer, float | int | Uncertain) else answer
            self.calls[name, args, tuple(kept.items())] = known
            return answer

        return heard


def fitted(catalog: Catalog, model: str, part: str, precision: str, context: int, **more: Any) -> list[Placement]:
    return api.fit(model, [part], context=context, precisions=[precision], catalog=catalog, **more).placements


def compared(
    catalog: Catalog, model: str, part: str, precision: str, *load: int, gpus: int = 0, engine: str | None = None
) -> tuple[Any, Any]:
    card = api.compare(
        model, [part], precision=precision, concurrency=load[0], input_tokens=load[1], output_tokens=load[2],
        layout=Parallelism(tp=gpus) if gpus else None, stack=engine, catalog=catalog,
    )  # fmt: skip
    return card.entries[0].deployment, card.entries[0].estimate


def answered(catalog: Catalog, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `fit`, `compare`, `tco` and the quotes say to the same question; None for what only the catalog is asked."""
    if name in ("weights_gb", "cache_gb"):
        model, asked = args
        more: dict[str, Any] = {"precisions": [asked]} if name == "weights_gb" else {"context": asked}
        (sizes,) = api.fit(model, ["mi300x"], catalog=catalog, **more).sizes
        return (sizes.weight_bytes if name == "weights_gb" else sizes.kv_bytes_per_sequence) / 1e9
    if name == "fewest":
        fits = [one for one in fitted(catalog, *args) if one.fits and (kwargs.get("barely") or one.fewest)]
        return min(one.deployment.parallelism.gpus for one in fits)
    if name == "room_gb":
        return fitted(catalog, *args, layout=Parallelism())[0].plan.cache_bytes / 1e9
    if name == "rate":
        return compared(catalog, *args, **kwargs)[1].output_tokens_per_s_per_gpu
    if name == "tpot_ms":
        return 1e3 * compared(catalog, *args, **kwargs)[1].tpot_s
    if name == "node":
        model, part, precision, in_flight, *lengths = args
        found = [
            compared(catalog, model, part, precision, max(in_flight * n // 8, 1), *lengths, gpus=n)[1]
            for n in (1, 2, 4, 8)
        ]
        found = [one for one in found if one] or [compared(catalog, *args)[1]]
        return max(one.output_tokens_per_s_per_gpu for one in found[:2])
    if name == "ceiling":
        deployment, estimate = compared(catalog, *args, 1, 512, 128)
        return estimate.single_stream_ceiling_tokens_per_s / deployment.parallelism.gpus
    if name == "price":
        found_quote = quote(catalog.prices, *args)
        return found_quote and found_quote.usd
    if name == "saving":
        return saved(catalog, *args, **kwargs)
    return None


def saved(catalog: Catalog, first: str, second: str, **terms: Any) -> float:
    load, width, engineers = terms["load"], terms.get("width"), terms.get("engineers")
    card = api.compare(
        terms["model"], [first, second], precision=terms["precision"], concurrency=load[0], input_tokens=load[1],
        output_tokens=load[2], layout=Parallelism(tp=width) if width else None, catalog=catalog,
    )  # fmt: skip
    request = TcoRequest(
        gpus=terms["gpus"], years=terms["years"], purchase_usd=dict(zip((first, second), terms["usd"], strict=True)),
        discount=dict.fromkeys((first, second), terms["discount"]), engineers={first: engineers} if engineers else {},
    )  # fmt: skip
    usd = api.tco(card, request, catalog=catalog).assessed.usd_per_mtok
    return 100.0 * (1.0 - usd[first] / usd[second])


def apart(catalog: Catalog, overheard: Overheard, *claims: str) -> Iterator[tuple[Call, Any, Any]]:
    for claim in read_claims():
        if not claims or claim.id in claims:
            judged(overheard, claim)
    for (name, args, kwargs), answer in overheard.calls.items():
        said = answered(catalog, name, args, dict(kwargs))
        if said is not None and likely(answer) != pytest.approx(said):
            yield (name, args, kwargs), answer, said


@pytest.mark.slow
def test_every_claim_is_told_what_the_commands_say(catalog: Catalog) -> None:
    overheard = Overheard(catalog)
    assert list(apart(catalog, overheard)) == []
    told = {"weights_gb", "cache_gb", "fewest", "room_gb", "rate", "node", "tpot_ms", "ceiling", "price", "saving"}
    assert told <= {name for name, *_ in overheard.calls}


def test_claims_of_memory_are_told_what_fit_says_and_a_difference_is_seen(catalog: Catalog) -> None:
    """c36 had said four H100 where `fit` has two, barely."""
    assert not list(apart(catalog, Overheard(catalog), "c36", "c26", "c61"))
    assert list(apart(catalog, Overheard(catalog, off=2.0), "c36"))
