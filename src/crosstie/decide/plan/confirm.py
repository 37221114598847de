"""A fleet that simulation confirms, and the best that each vendor alone has beside it."""

from dataclasses import replace

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.progress import OnProgress
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import MOST_TIMES, Alternative
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Indices, Solution
from crosstie.decide.plan.scaling import WorldScaling
from crosstie.decide.plan.search import (
    REQUESTS,
    RIVALS_TOLERANCE,
    TOLERANCE,
    Confirmed,
    Proposal,
    Question,
    Search,
    Shown,
    family_bounds,
)
from crosstie.decide.plan.survey import Column, Offers, Survey, offers, undominated
from crosstie.decide.plan.uncertainty import JointErrors, family_of

# How far below what was asked a fleet may be before it is confirmed once more.
_NEARLY = 0.03
# A vendor alone has half of the simulations and not a quarter where its fleet costs so many times what it might, and
# that is less than so many times what the answer costs.
_LOOSE, _NEAR = 1.25, 1.5
# Accelerators of a vendor alone, the cheapest by their bounds, that are simulated by themselves: for `assistant` the
# third of NVIDIA's makes its cheapest fleet, and mixtures cost up to 64% more where one looks as long.
_FAMILIES = 3


class Confirming:
    """The simulations of one question: of its fleet, and later of its rivals, which use what that has shown.

    Where a fleet is proposed that rests on more estimates than the closed form's did and is less sure for it, the
    search goes on with each estimate surer, and among fleets of one accelerator and stack alone, which need not be.
    """

    def __init__(
        self, catalog: Catalog, workload: Workload, surveyed: list[Survey], asked: Choice, each: float,
        on_progress: OnProgress,
    ):  # fmt: skip
        """`each`: how sure each estimate is taken to be."""
        self._workload, self._surveyed, self._asked, self._each = workload, surveyed, asked, each
        self._on_progress = on_progress
        self._by_sureness: dict[float, Offers] = {}
        self._shown = Shown(catalog, workload, asked.peak)
        self._search: Search | None = None

    def confirmed(self, with_rivals: bool) -> tuple[Confirmed, dict[str, Alternative]] | None:
        """The cheapest of all fleets that hold; None where none was found."""
        if self._search is None:
            self._search, _ = self._searched()
        best = self._shown.answering(self._search.question)
        rivals: dict[str, Proposal] = {}
        for vendor in self._asked.market.vendors if with_rivals and best else ():
            if best is not None and self._put(self._each, None, vendor).everything.columns:
                self._on_progress(0, 0, f"{vendor} alone")
                _, rival = self._searched(vendor, MOST_TIMES * best.usd_per_hour, RIVALS_TOLERANCE)
                rivals |= {vendor: rival} if rival else {}
        best = self._shown.answering(self._search.question)
        if best is None:
            return None
        seen = self._search.confirmed(best)
        paid = seen.answer.usd_per_hour
        beside = {
            vendor: Alternative(fleet.gpus, fleet.usd_per_hour, fleet.usd_per_hour / paid - 1.0, confirmed=True)
            for vendor, fleet in rivals.items()
            if fleet.usd_per_hour >= paid and seen.vendors != {vendor}
        }
        return self._beside_others(seen) if seen.question.family or seen.question.vendor else seen, beside

    def _put(self, sure: float, family: tuple[str, str] | None = None, vendor: str | None = None) -> Question:
        scaling, asked = WorldScaling(self._workload, sure), self._asked
        if sure not in self._by_sureness:
            self._by_sureness[sure] = offers(self._surveyed, scaling, peak=asked.peak)
        everything = self._by_sureness[sure]
        if family or vendor:
            everything = everything.only(_places(everything, family, vendor, True))
        # Of one vendor alone no share is asked for others.
        free = asked.with_vendor_share(np.zeros_like(asked.problem.vendor_share)) if vendor else asked
        same = (sure, family, vendor) == (self._each, None, None)
        return Question(everything, asked if same else free.by(everything), scaling, family, vendor)

    def _surer(self, question: Question, corrected: Choice, fleet: Solution) -> Question | None:
        errors = JointErrors(self._surveyed, corrected, question.scaling)
        together = errors.each_sure(fleet, self._workload.sureness)
        enough = errors.enough(fleet) >= self._workload.sureness - _NEARLY
        return None if enough or together <= question.scaling.sure else self._put(together, None, question.vendor)

    def _searched(
        self, vendor: str | None = None, below: float = np.inf, tolerance: float = TOLERANCE
    ) -> tuple[Search, Proposal | None]:
        shown, sure = self._shown, self._workload.sureness
        # Of a vendor's fleets those of one accelerator, below, are the likelier ones.
        left = REQUESTS // (4 if vendor else 1)
        question = self._put(self._each, None, vendor)
        search = Search(shown, question, surer=self._surer, on_progress=self._on_progress, left=left)
        best = search.run(below, tolerance)
        least = search.bound_usd_per_hour
        near = least < _NEAR * below / MOST_TIMES
        if vendor and near and (best is None or best.usd_per_hour > _LOOSE * least):
            # A rival that comes near the answer and may be far too dear would mislead.
            search.left += REQUESTS // 4
            best = search.run(below, tolerance)
        if vendor or search.question.scaling.sure > sure:
            for number, (family, bound) in enumerate(family_bounds(search, self._put(sure, None, vendor))):
                least = min(below, best.usd_per_hour if best else np.inf)
                # A rival's fleet of one accelerator is looked for whatever the mixtures before have cost.
                left = max(search.left, REQUESTS // 4 if vendor and number < _FAMILIES else 0)
                if bound < least * (1.0 - tolerance) and left > 0:
                    alone = Search(shown, self._put(sure, family, vendor), on_progress=self._on_progress, left=left)
                    alone.run(least, tolerance)
                    search.left = alone.left
                    search.bound_usd_per_hour = min(search.bound_usd_per_hour, alone.bound_usd_per_hour)
                    best = shown.answering(search.question)
        return search, best

    def _beside_others(self, seen: Confirmed) -> Confirmed:
        """The same fleet in the question with the other accelerators in it again, for what stands beside it."""
        read = offers(self._surveyed, seen.question.scaling, peak=seen.asked.peak).corrected(seen.asked.correction)
        others = undominated(read.only(_places(read, seen.question.family, seen.question.vendor, False)))
        answer = seen.answer
        none = np.zeros((len(others.columns), answer.share.shape[1]))
        wider = replace(
            answer,
            replicas=np.concatenate([answer.replicas, np.zeros(len(none), answer.replicas.dtype)]),
            share=np.concatenate([answer.share, none]),
        )
        return replace(seen, asked=seen.asked.with_offers(seen.asked.offers.beside(others)), answer=wider)


def _places(offered: Offers, family: tuple[str, str] | None, vendor: str | None, wanted: bool) -> Indices:
    """Of columns of an accelerator with its stack, or of a vendor; or of all the others."""
    return np.array(
        [i for i, column in enumerate(offered.columns) if _is_of(column, family, vendor) == wanted], np.int64
    )


def _is_of(column: Column, family: tuple[str, str] | None, vendor: str | None) -> bool:
    made = column.deployment.decode
    return (family is None or family_of(made) == family) and (vendor is None or made.accelerator.vendor == vendor)
