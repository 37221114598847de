"""What processes learn from each other: the same as from what they saw themselves, once, and nothing from strangers."""

import msgspec
import pytest
from tests.run.emulate.running import SMALL, fleet, pool

from crosstie.catalog.library import Catalog
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.corrections import Observations
from crosstie.route.live import LiveFleet
from crosstie.route.policies import make_policy
from crosstie.route.prefix import prefix_hashes
from crosstie.route.router import Router
from crosstie_gateway.share.learnt import Learnt, LearntReport

PLACES = ("http://10.0.0.1:1/v1", "http://10.0.0.2:1/v1")
decode = msgspec.msgpack.Decoder(LearntReport).decode


class Site:
    def __init__(self, name: str, catalog: Catalog, store: str = "s"):
        self.live: LiveFleet = live_fleet(catalog, fleet(pool("amd", replicas=2, backends=PLACES)), 0.0)
        self.router = Router(self.live, make_policy("cheapest-meeting-target", 0))
        self.learnt = Learnt(name, store)
        self.learnt.serve(self.live)

    def serve(self, prefix: tuple[int, ...] = (), slow: float = 5.0) -> str:
        """One request, so many times as slow as it was predicted; where it went."""
        ask = Ask(
            model=SMALL, class_name=None, input_tokens=4000.0, output_tokens=100.0, prefix=prefix, prompt_bytes=16_000
        )
        decision = self.router.decide(ask, 1.0)
        assert decision.replica is not None
        assert decision.prediction is not None
        flight = decision.replica.start(ask, decision.prediction, 1.0)
        first_s = slow * decision.prediction.raw_ttft_s
        flight.first_token(1.0 + first_s)
        flight.end(
            1.0 + first_s + slow * 99 * decision.prediction.raw_tpot_s,
            output_tokens=100,
            input_tokens=4000,
            completed=True,
        )
        return decision.replica.key

    def factors(self) -> list[tuple[float, float]]:
        return [(one.ttft.factor(9.0), one.tpot.factor(9.0)) for one in self.live.replicas()]

    def held(self, prefix: tuple[int, ...]) -> list[int]:
        return [one.prefixes.match(prefix) for one in self.live.replicas()]


@pytest.fixture
def sites(catalog: Catalog) -> list[Site]:
    return [Site(name, catalog) for name in ("a", "b", "c")]


def told(one: Site) -> LearntReport:
    report = one.learnt.news()
    assert report is not None
    return decode(msgspec.msgpack.encode(report))


def test_others_learn_what_one_has_seen(sites: list[Site]) -> None:
    one, two, _ = sites
    prefix = prefix_hashes(b"x" * 9000)
    where = one.serve(prefix)
    before = two.factors()
    assert before == [(1.0, 1.0)] * 2
    two.learnt.hear(told(one), 7.0)
    for learnt, seen in zip(two.factors(), one.factors(), strict=True):
        # A little later, so that it lasts a little longer.
        assert learnt == pytest.approx(seen, rel=0.02)
    assert max(ttft for ttft, _ in two.factors()) > 2.0
    assert two.held(prefix) == one.held(prefix)
    assert sum(two.held(prefix)) == 4
    assert two.live.lengths.expected_output(None, SMALL, None) == one.live.lengths.expected_output(None, SMALL, None)
    assert two.live.lengths.bytes_per_token(SMALL) == one.live.lengths.bytes_per_token(SMALL)
    # The next with the same beginning goes where the first one went, whoever is asked.
    assert two.serve(prefix, slow=1.0) == where or two.held(prefix) == [4, 4]


def test_what_comes_twice_is_learnt_once_and_nothing_is_told_on(sites: list[Site]) -> None:
    one, two, three = sites
    one.serve()
    report = told(one)
    two.learnt.hear(report, 7.0)
    once = two.factors()
    two.learnt.hear(report, 7.0)
    assert two.factors() == once
    assert two.learnt.heard == 3
    # What was heard is not told again, or it would never end.
    assert two.learnt.news() is None
    assert one.learnt.news() is None
    # One's own voice teaches nothing either.
    before = one.factors()
    one.learnt.hear(report, 7.0)
    assert one.factors() == before
    # One that was started anew has another name, and is heard from its first word on.
    three.learnt.process = "a again"
    three.serve(slow=2.0)
    two.learnt.hear(told(three), 8.0)
    assert two.factors() != once


def test_tenants_of_another_store_are_other_tenants(catalog: Catalog) -> None:
    one, same, other = Site("a", catalog), Site("b", catalog), Site("c", catalog, store="t")
    own, common = prefix_hashes(b"x" * 9000, tenant=7), prefix_hashes(b"y" * 9000)
    # The name of an adapter makes a number longer than any that travels as one.
    adapter = prefix_hashes(b"z" * 9000, tenant=0xFFFFFFFF << 52 | 7)
    for prefix in (own, common, adapter):
        one.serve(prefix)
    report = told(one)
    for site in (same, other):
        site.learnt.hear(report, 7.0)
    assert [sum(same.held(prefix)) for prefix in (own, common, adapter)] == [4, 4, 4]
    assert [sum(other.held(prefix)) for prefix in (own, common, adapter)] == [0, 4, 0]


def test_replicas_and_models_that_are_not_served_here_are_passed_over(sites: list[Site]) -> None:
    _, two, _ = sites
    before = two.factors()
    seen = (0, 1.0, 1.0, 1.0, 1.0)
    report = LearntReport(
        "z", 1, "s", ["http://elsewhere"], [seen, (99, 1.0, 1.0, 1.0, 1.0)], [seen], [(0, (b"", [1])), (7, (b"", [1]))],
        [(None, "no-such-model", 5, 5, 20)],
    )  # fmt: skip
    two.learnt.hear(decode(msgspec.msgpack.encode(report)), 7.0)
    assert two.factors() == before
    assert "no-such-model" not in two.live.lengths._by_model


@pytest.mark.parametrize(
    "wrong",
    [
        b"", b"hello", b"\xff" * 50, b"\x90",
        # An older version's: fewer fields; others are of the right shape and no gateway's numbers.
        msgspec.msgpack.encode(["a", 1, "s"]),
        msgspec.msgpack.encode(["a", 1, "s", ["n"], [[0, 1e9, 0.0, 0.0, 0.0]], [], [], []]),
        msgspec.msgpack.encode(["a", 1, "s", ["n"], [[0, float("nan"), 0.0, 0.0, 0.0]], [], [], []]),
        msgspec.msgpack.encode(["a", 1, "s", ["n"], [], [], [[0, [b"x" * 99, [1]]]], []]),
        msgspec.msgpack.encode(["a", 1, "s", ["n"], [], [], [[0, [b"", [1] * 5000]]], []]),
        msgspec.msgpack.encode(["a", -1, "s", ["n" * 5000], [], [], [], []]),
    ],
)  # fmt: skip
def test_what_is_no_report_is_not_read_as_one(wrong: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(wrong)


def test_a_newer_version_s_report_is_read_as_far_as_it_is_known(sites: list[Site]) -> None:
    one, two, _ = sites
    one.serve()
    report = one.learnt.news()
    assert report is not None
    newer = [*msgspec.msgpack.decode(msgspec.msgpack.encode(report)), {"more": 1}]
    two.learnt.hear(decode(msgspec.msgpack.encode(newer)), 7.0)
    assert two.learnt.heard == 3


def test_memory_is_bounded_while_there_is_nobody_to_tell() -> None:
    seen = Observations(most=3)
    for _ in range(10):
        seen.first.append(("k", 0.0, 0.0, 1.0, 1.0))
        seen.decoded.append(("k", 0.0, 0.0, 1.0, 1.0))
        seen.sent.append(("k", (1,)))
        seen.lengths.append((None, "m", 1, 1, 1))
    assert len(seen) == 12


def test_strangers_without_end_are_not_all_kept(sites: list[Site]) -> None:
    _, two, _ = sites
    for number in range(3000):
        two.learnt.hear(LearntReport(f"stranger {number}", 1, "s", [], [], [], [], []), 7.0)
    assert len(two.learnt._last) == 1024
