"""Saved plans against today's catalog: which decisions have flipped, and by what; and of the signals beside a plan,
which have changed since it was made, which have not, and which only people can tell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from crosstie.catalog.library import Catalog
from crosstie.catalog.signals import Signal
from crosstie.core.errors import BadData, BadInput, CrosstieError
from crosstie.core.figures import dollars
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import Workload
from crosstie.decide.plan.market import Market
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.report import DIGEST, Saved, SavedPrice, mark_of, meet_folders, read_saved
from crosstie.port.preflight.engine import engines
from crosstie.port.preflight.rules import rules

State = Literal["changed", "quiet", "by hand"]


@dataclass(frozen=True, slots=True)
class Sign:
    """A signal, how it stands, and what is known of it in words."""

    signal: Signal
    state: State
    now: str


def signs(catalog: Catalog, saved: Saved, market: Market) -> list[Sign]:
    """Of the signals that concern a plan."""
    return [sign for signal in catalog.signals.values() for sign in _signs(signal, saved, market)]


def _signs(signal: Signal, saved: Saved, market: Market) -> Iterator[Sign]:
    mine = {pool.stack for pool in saved.pools}
    weighed = {*saved.prices, *market.left_out} | {item.id for item in market.items}
    if signal.accelerators and not weighed & set(signal.accelerators):
        return
    if signal.kind == "price":
        yield from _prices(signal, saved, market)
    elif signal.kind == "by-hand":
        yield Sign(signal, "by hand", signal.how)
    else:
        known = engines().get(signal.engine)
        if known is None:
            raise BadInput(f"signal {signal.id}: unknown engine '{signal.engine}': one of {', '.join(engines())}")
        if known.stack in mine:
            yield (
                _release(signal, saved, known.stack, known.newest)
                if signal.kind == "release"
                else _gap(signal, known.newest)
            )


def _prices(signal: Signal, saved: Saved, market: Market) -> Iterator[Sign]:
    now = {item.id: item.quote.usd for item in market.items}
    for name in signal.accelerators:
        then = saved.prices.get(name)
        if then is not None and name in now:
            moved = now[name] / then.usd - 1.0
            state: State = "changed" if abs(moved) >= signal.share else "quiet"
            yield Sign(signal, state, f"{name}: {dollars(then.usd)} then, {dollars(now[name])} now ({moved:+.0%})")
        elif name in now:
            yield Sign(signal, "changed", f"{name}: no price then, {dollars(now[name])} now")
        elif then is not None:
            yield Sign(signal, "changed", f"{name}: {dollars(then.usd)} then, no price now")
        elif name in market.left_out:
            yield Sign(signal, "quiet", f"{name}: no price of that kind, then or now")


def _release(signal: Signal, saved: Saved, stack: str, newest: Version) -> Sign:
    then = sorted({pool.release for pool in saved.pools if pool.stack == stack and pool.release})
    older = [one for one in then if _version(one) is not None and (_version(one) or newest) < newest]
    if older:
        return Sign(signal, "changed", f"{signal.engine} {newest} has been read, the plan has {', '.join(older)}")
    return Sign(signal, "quiet", f"{signal.engine} {newest} is the newest that has been read")


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _gap(signal: Signal, newest: Version) -> Sign:
    row = next((rule for rule in rules(signal.engine) if rule.id == signal.rule), None)
    if row is not None and SpecifierSet(row.versions).contains(newest, prereleases=True):
        return Sign(signal, "quiet", f"open in {signal.engine} {newest}: {row.says}")
    return Sign(signal, "changed", f"closed: {signal.rule} no longer speaks of {signal.engine} {newest}")


# A price that moved less is the same.
_SAME = 1e-3


@dataclass(frozen=True, slots=True)
class PriceMove:
    accelerator: str
    then: float
    now: float
    # Of the price that it is; empty where the user gave it.
    dated: str

    @property
    def change(self) -> float:
        return self.now / self.then - 1.0


@dataclass(frozen=True, slots=True)
class Watched:
    """A saved plan beside the one that would be made today."""

    file: str
    then: Saved
    now: Plan
    moves: list[PriceMove]
    # Accelerators that had no price then, or have none now.
    appeared: list[str]
    gone: list[str]
    recalibrated: bool
    # What else would change it, of the catalog's signals.
    signs: list[Sign]
    # "prices", "the catalog or its calibration", "prices and the catalog"; empty where nothing flipped.
    because: str

    @property
    def flipped(self) -> bool:
        """Whether the accelerators of the fleet are others than they were."""
        return set(self.then.gpus) != set(self.now.gpus)

    @property
    def newer_prices(self) -> list[PriceMove]:
        """Prices that are dated after the plan was made."""
        return [move for move in self.moves if move.dated[:10] > self.then.made[: len(move.dated[:10])]]


def watched(
    catalog: Catalog, files: Sequence[Path], today: str = "", on_progress: OnProgress = no_progress
) -> list[Watched]:
    return [_watched(catalog, file, today, on_progress) for file in saved_plans(files)]


def saved_plans(given: Sequence[Path]) -> list[Path]:
    """The files, and those of the folders among them."""
    paths: list[Path] = []
    for path in given:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise BadInput(
                f"{path}: no saved plan (*.json) in this folder; `crosstie plan WORKLOAD --save FILE` makes one"
            )
        paths += inside
    return paths


def _watched(catalog: Catalog, file: Path, today: str, on_progress: OnProgress) -> Watched:
    on_progress(0, 0, f"{file.name}, planned again")
    saved = read_saved(file)
    meet_folders(catalog, file, saved.workload)
    try:
        now = plan(catalog, saved.workload, today=today, confirm=saved.confirmed is not None, on_progress=on_progress)
    except CrosstieError as error:
        raise BadData(file, "", f"cannot be planned again: {error}") from None
    prices = {item.id: item.quote for item in now.market.items}
    moves = [
        PriceMove(name, then.usd, prices[name].usd, prices[name].date)
        for name, then in saved.prices.items()
        if name in prices and abs(prices[name].usd / then.usd - 1.0) > _SAME
    ]
    found = Watched(
        file=str(file),
        then=saved,
        now=now,
        moves=moves,
        appeared=sorted(set(prices) - set(saved.prices)),
        gone=sorted(set(saved.prices) - set(prices)),
        recalibrated=saved.calibration.get(DIGEST) != mark_of(catalog.calibration)[DIGEST],
        signs=signs(catalog, saved, now.market),
        because="",
    )
    return replace(found, because=_because(catalog, found)) if found.flipped else found


def _because(catalog: Catalog, found: Watched) -> str:
    """What flipped it: made again with the prices of then, has it flipped all the same?"""
    known = {name: then for name, then in found.then.prices.items() if name in catalog.accelerators}
    if known and (found.moves or found.appeared or found.gone):
        confirm = found.then.confirmed is not None
        at_old_prices = set(plan(catalog, _with_prices(found.then.workload, known), confirm=confirm).accelerators)
        if at_old_prices == set(found.then.gpus):
            return "prices"
        if at_old_prices != set(found.now.gpus):
            return "prices and the catalog"
    return "the catalog or its calibration"


def _with_prices(workload: Workload, prices: dict[str, SavedPrice]) -> Workload:
    """As it was then: the same accelerators at the same prices, whatever their discount was for."""
    fixed = msgspec.structs.replace(
        workload.prices, usd_per_gpu_hour={name: then.usd for name, then in prices.items()}, discount={}
    )
    limits = msgspec.structs.replace(workload.constraints, accelerators=tuple(prices))
    return msgspec.structs.replace(workload, prices=fixed, constraints=limits)
