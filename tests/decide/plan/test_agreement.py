"""Plan and gateway agree: where the routing guide sends requests, an idle gateway of that fleet sends them too; and both
expect the same of a request on a replica."""

from functools import cache
from pathlib import Path

import msgspec
import pytest
from tests.present import present

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import EXAMPLES, read_workload
from crosstie.core.fleet import Fleet
from crosstie.core.workload import RequestClass, Slice
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.market import adjusted
from crosstie.decide.plan.plan import Plan, plan
from crosstie.perf.estimate import estimate
from crosstie.route.ask import Ask
from crosstie.route.build import Tables, live_fleet
from crosstie.route.decision import Decision
from crosstie.route.policies import make_policy
from crosstie.route.router import Router

CATALOG = Catalog()
TABLES = Tables()
# Of a quick run: one of them on few accelerators, which takes a fraction of the time.
FEW = {"demo on two": ("demo", ["mi355x", "b200"])}
BUNDLED = [*FEW, *(pytest.param(file.stem, marks=pytest.mark.slow) for file in sorted(EXAMPLES.glob("*.toml")))]


@cache
def made(name: str) -> tuple[Plan, Fleet]:
    example, accelerators = FEW.get(name, (name, None))
    found = plan(CATALOG, adjusted(read_workload(CATALOG, EXAMPLES / f"{example}.toml"), accelerators=accelerators))
    fleet = fleet_of(found)
    pools = [
        msgspec.structs.replace(one, backends=tuple(f"http://{one.name}-{n}:1" for n in range(one.replicas)))
        for one in fleet.pools
    ]
    return found, msgspec.structs.replace(fleet, pools=tuple(pools))


def asked(
    fleet: Fleet, one: RequestClass, input_tokens: float, output_tokens: float, pin: str | None = None
) -> Decision:
    """Of a gateway that has just started."""
    router = Router(live_fleet(CATALOG, fleet, 0.0, tables=TABLES), make_policy(fleet.policy, 0))
    ask = Ask(
        model=one.model, class_name=one.name, input_tokens=input_tokens, output_tokens=output_tokens, pin=pin,
        ttft_s=one.ttft.seconds if one.ttft else None, tpot_s=one.tpot.seconds if one.tpot else None,
    )  # fmt: skip
    return router.decide(ask, 1.0, explain=True)


def guided(found: Plan, one: RequestClass, piece: Slice) -> set[str]:
    return {
        pool.name
        for pool in present(found.fleet).pools
        for carried in pool.carried
        if carried.part.request_class == one and carried.part.slice == piece
    }


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.slow
def test_every_slice_goes_where_the_guide_says_or_the_decision_says_why_not(name: str) -> None:
    found, fleet = made(name)
    walked = count = 0
    for one in found.workload.classes:
        for piece in one.slices:
            wanted = guided(found, one, piece)
            assert wanted
            for length in (piece.input_tokens, float(piece.longest_input)):
                count += 1
                decision = asked(fleet, one, length, piece.output_tokens)
                planned = {seen.pool for seen in decision.considered if seen.planned}
                assert planned == wanted
                if present(decision.replica).pool.name in wanted:
                    walked += 1
                    continue
                # A pool of the plan is late, or dearer now that nobody waits.
                for seen in decision.considered:
                    if seen.pool in wanted:
                        late = seen.dropped is not None and seen.dropped.startswith("target: ")
                        dearer = (
                            present(seen.prediction).predicted_usd > 1.02 * present(decision.prediction).predicted_usd
                        )
                        assert late or dearer, (one.name, length, seen.pool)
    # Else the guide would be of no use.
    assert 2 * walked >= count


@pytest.mark.parametrize("name", BUNDLED)
def test_the_guide_of_the_answer_is_where_the_gateway_of_its_fleet_file_sends(name: str, tmp_path: Path) -> None:
    """By another path: the fleet as it is written and read again."""
    found, fleet = made(name)
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet))
    again = read_fleet(CATALOG, file)
    told = {(one.class_name, one.up_to_input): one for one in found.guide}
    assert len(told) == sum(len(one.slices) for one in found.workload.classes)
    for one in found.workload.classes:
        for piece in one.slices:
            decision = asked(again, one, piece.input_tokens, piece.output_tokens)
            assert present(decision.replica).pool.name == told[one.name, piece.longest_input].pool


@pytest.mark.parametrize("name", BUNDLED)
def test_both_expect_the_same_of_a_request_on_an_idle_replica(name: str) -> None:
    found, fleet = made(name)
    for pool in present(found.fleet).pools:
        for carried in pool.carried:
            one, piece = carried.part.request_class, carried.part.slice
            inputs, outputs = max(round(piece.input_tokens), 1), max(round(piece.output_tokens), 2)
            plans = estimate(pool.deployment.decode, concurrency=1, input_tokens=inputs, output_tokens=outputs)
            prediction = present(asked(fleet, one, inputs, outputs, pool.name).prediction)
            assert prediction.ttft_s == pytest.approx(plans.ttft_s, rel=0.1), (pool.name, inputs)
            assert prediction.tpot_s == pytest.approx(plans.tpot_s, rel=0.1), (pool.name, inputs)
