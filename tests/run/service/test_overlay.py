"""Changes over a fleet: what holds, what undoes what, and what no longer applies."""

import msgspec
import pytest
from tests.run.gateway.fakes import fleet_of, pool_of

from crosstie.core.fleet import Fleet, Route, ServedClass
from crosstie_gateway.service.overlay import Change, laid_over, with_change

A, B, C = (f"http://10.0.0.{i}:8000/v1" for i in (1, 2, 3))
MODEL = "llama-3.1-8b"


def a_class(*routes: Route, model: str = MODEL) -> ServedClass:
    return ServedClass(
        name="chat", model=model, requests_per_s=1.0, input_tokens=10.0, output_tokens=10.0, ttft=None, tpot=None,
        routes=routes,
    )  # fmt: skip


def fleet(**changes: object) -> Fleet:
    return fleet_of(pool_of("one", A, B), pool_of("two", C), **changes)  # type: ignore[arg-type]


def refusal(under: Fleet, change: Change) -> str:
    laid = laid_over(under, [change])
    assert laid.fleet is under, "a change that does not apply changes nothing"
    ((left, why),) = laid.left_out
    assert left is change
    return why


def test_a_drain_changes_nothing_but_who_is_asked() -> None:
    under = fleet()
    laid = laid_over(under, [Change(action="drain", pool="one"), Change(action="drain", pool="two", backend=C)])
    assert laid.fleet is under
    assert laid.drained == {"one", C}


def test_a_pool_that_its_file_has_drained_is_admitted_and_drained_again() -> None:
    waiting = fleet_of(pool_of("one", A, B, drained=True), pool_of("two", C))
    admit = Change(action="admit", pool="one")
    assert laid_over(waiting, ()).drained == {"one"}
    laid = laid_over(waiting, [admit])
    assert (laid.drained, laid.fleet.pools[0].drained, admit.words) == (frozenset(), False, "admit pool one")
    assert with_change((admit,), Change(action="drain", pool="one")) == ()
    backend = Change(action="drain", pool="one", backend=A)
    assert with_change((admit,), backend) == (admit, backend)
    assert "not drained in the fleet file" in refusal(fleet(), admit)


def test_backends_and_pools_come_and_go() -> None:
    added = pool_of("three", "http://10.0.0.9:8000/v1")
    laid = laid_over(
        fleet(),
        [
            Change(action="add-backend", pool="two", backend="http://10.0.0.4:8000/v1"),
            Change(action="remove-backend", pool="one", backend=A),
            Change(action="add-pool", pool="three", made=added),
            Change(action="remove-pool", pool="one"),
            Change(action="weight", weights={"two": 3.0}),
        ],
    )
    assert not laid.left_out
    assert [(p.name, p.backends, p.replicas, p.weight) for p in laid.fleet.pools] == [
        ("two", (C, "http://10.0.0.4:8000/v1"), 2, 3.0),
        ("three", ("http://10.0.0.9:8000/v1",), 1, None),
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Change(action="drain", pool="on"), "did you mean one"),
        (Change(action="drain", pool="one", backend="http://x:1/v1"), "no pool has the backend"),
        (Change(action="remove-backend", pool="two", backend=C), "only backend of pool two"),
        (Change(action="add-backend", pool="two", backend=A), "already; it would get twice its share"),
        (Change(action="add-pool", pool="one", made=pool_of("one", "http://x:1/v1")), "is there twice"),
        (Change(action="add-pool", pool="p", made=pool_of("p", "http://x:1/v1", model="m", served_as=MODEL)), "name m"),
        (Change(action="add-pool", pool="p"), "no pool is given"),
        (Change(action="weight", weights={"one": -1.0}), "not from 0"),
        (Change(action="weight", weights={"one": float("nan")}), "not from 0"),
        (Change(action="weight", weights={"nine": 1.0}), "no pool 'nine'"),
    ],
)
def test_what_does_not_apply_is_left_out_with_its_reason(change: Change, why: str) -> None:
    assert why in refusal(fleet(), change)


def test_the_last_pool_of_a_fleet_and_of_a_class_stay() -> None:
    alone = fleet_of(pool_of("one", A))
    assert "only pool" in refusal(alone, Change(action="remove-pool", pool="one"))
    of_two = fleet_of(pool_of("one", A), pool_of("two", C, model="other"), classes=(a_class(),))
    assert "class chat asks for" in refusal(of_two, Change(action="remove-pool", pool="one"))


def test_weights_must_stay_comparable_under_the_weighted_policy() -> None:
    weighted = fleet(policy="weighted")
    assert "give all of them a weight" in refusal(weighted, Change(action="weight", weights={"one": 1.0}))
    both = laid_over(weighted, [Change(action="weight", weights={"one": 1.0, "two": 0.0})])
    assert [pool.weight for pool in both.fleet.pools] == [1.0, 0.0]


def test_routes_of_a_removed_pool_are_taken_over_in_proportion() -> None:
    routes = (
        Route(pool="one", share=0.5, up_to_input=100), Route(pool="two", share=0.3, up_to_input=100),
        Route(pool="three", share=0.2, up_to_input=100), Route(pool="one", share=1.0), Route(pool="two", share=0.0),
        Route(pool="three", share=0.0),
    )  # fmt: skip
    three = pool_of("three", "http://10.0.0.9:8000/v1")
    under = fleet_of(pool_of("one", A), pool_of("two", C), three, classes=(a_class(*routes),))
    laid = laid_over(under, [Change(action="remove-pool", pool="one")])
    assert [(r.pool, r.up_to_input, round(r.share, 9)) for r in laid.fleet.classes[0].routes] == [
        ("two", 100, 0.6),
        ("three", 100, 0.4),
        ("two", None, 0.5),
        ("three", None, 0.5),
    ]


def test_a_file_that_changed_drops_what_it_no_longer_allows_and_keeps_the_rest() -> None:
    changes = [Change(action="drain", pool="one"), Change(action="add-backend", pool="two", backend=A)]
    laid = laid_over(fleet_of(pool_of("two", C)), changes)
    assert [change.words for change, _ in laid.left_out] == ["drain pool one"]
    assert laid.kept == (changes[1],)
    assert laid.fleet.pools[0].backends == (C, A)


def test_what_undoes_an_earlier_change_takes_it_away() -> None:
    add = Change(action="add-backend", pool="two", backend=A)
    remove = Change(action="remove-backend", pool="two", backend=A)
    drain = Change(action="drain", pool="two", backend=A)
    assert with_change((add, drain), remove) == ()
    assert with_change((remove,), add) == ()
    assert with_change((add,), add) == (add,)
    made = Change(action="add-pool", pool="three", made=pool_of("three", B))
    heavy = Change(action="weight", weights={"three": 2.0, "two": 1.0})
    gone = Change(action="remove-pool", pool="three")
    left = with_change((made, heavy, Change(action="drain", pool="three")), gone)
    assert left == (Change(action="weight", weights={"two": 1.0}),)
    # A pool of the file that was replaced by another of its name: the file's stays away.
    assert with_change((gone, made), gone) == (gone,)


def test_the_last_weight_of_a_pool_counts() -> None:
    first = Change(action="weight", weights={"one": 1.0, "two": 2.0})
    changes = with_change((first,), Change(action="weight", weights={"two": 5.0}))
    assert [change.weights for change in changes] == [{"one": 1.0}, {"two": 5.0}]


def test_changes_travel_between_processes() -> None:
    changes = (
        Change(action="add-pool", pool="p", made=pool_of("p", A, modalities=("text",))),
        Change(action="weight", weights={"p": 1.5}),
        Change(action="drain", pool="p", backend=A),
    )
    carried = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(changes)))
    assert msgspec.convert(carried, tuple[Change, ...]) == changes
