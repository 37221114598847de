"""Signals beside a saved plan: which have changed since it was made, which have not, and which only people can tell."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from crosstie.catalog.library import Catalog
from crosstie.catalog.signals import Signal
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars
from crosstie.decide.plan.market import Market
from crosstie.decide.plan.report import Saved
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
