"""What machines tell each other, without anything that carries it: totals that may come twice, late, or not at all."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from math import exp, inf

import msgspec
import pytest

from crosstie_gateway.share import peers as module
from crosstie_gateway.share.board import Board
from crosstie_gateway.share.peers import PeerReport, Peers, known_as, store_name
from crosstie_gateway.share.tally import BoardTally

A, B = "http://a:1/v1", "http://b:1/v1"


class Site:
    """One machine with two processes."""

    def __init__(self, stack: ExitStack, clock: list[float], store: str = "s"):
        self.board = stack.enter_context(closing(Board(2)))
        self.machines = Peers(self.board, store, lambda: clock[0], lambda: clock[0])
        self.machines.replicas([A, B])
        self.cells = [self.board.cells([A, B], row) for row in (0, 1)]
        self.tallies = [BoardTally(self.board, row) for row in (0, 1)]
        self.machines.news(True, 0)
        self.board.heard()

    def load(self, row: int, in_flight: int, url: str = A) -> None:
        self.cells[row][url].write((in_flight, 0, 0.0, 10.0 * in_flight, *(0.0,) * 5, inf, 0.0, -inf))

    def sees(self, url: str = A) -> int:
        """What others have there, as its second process reads it."""
        own = self.cells[0][url].in_flight_elsewhere()
        return own - int(self.board.numbers[self.board._own(self.cells[1][url].at, "in_flight") + 1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("crosstie_gateway.share.board.monotonic", lambda: now[0])
    return now


@pytest.fixture
def sites(clock: list[float]) -> Iterator[list[Site]]:
    with ExitStack() as stack:
        yield [Site(stack, clock) for _ in range(3)]


def tell(sites: list[Site], teller: int, whole: bool = False, minute: int = 10) -> bool:
    told = sites[teller].machines.news(whole, minute)
    if told is None:
        return False
    for site in sites:
        site.machines.hear(told, 10)
    return True


def test_load_of_all_processes_is_told_once(sites: list[Site]) -> None:
    one, two, three = sites
    assert not tell(sites, 0)
    one.load(0, 2)
    one.load(1, 3)
    assert tell(sites, 0)
    assert (one.sees(), two.sees(), three.sees()) == (0, 5, 5)
    assert two.sees(B) == 0
    # What was heard is not told again, or two machines would never fall silent.
    assert not tell(sites, 0)
    assert not tell(sites, 1)
    two.load(1, 1)
    tell(sites, 1)
    assert (one.sees(), two.sees(), three.sees()) == (1, 5, 6)
    one.load(0, 0)
    one.load(1, 0)
    tell(sites, 0)
    assert (one.sees(), two.sees(), three.sees()) == (1, 0, 1)


def test_what_comes_twice_counts_once(sites: list[Site]) -> None:
    one, two, _ = sites
    one.load(0, 4)
    told = one.machines.news(False, 10)
    assert told is not None
    for _ in range(3):
        two.machines.hear(told, 10)
    assert two.sees() == 4
    # What did not get through is told with the next.
    one.machines.take_back(told)
    assert tell(sites, 0)
    assert two.sees() == 4


def test_who_says_less_than_nothing_takes_nothing_off_what_others_used(sites: list[Site]) -> None:
    one = sites[0]
    one.tallies[0].add(1, 10, 3, 30)
    one.machines.hear_used("liar", 1, 10, -5, -50)
    one.machines.hear_used("other", 1, 10, 2, 20)
    assert one.tallies[0].total(1, 10) == (5, 50)


def test_the_silent_and_those_who_leave_have_nothing(sites: list[Site], clock: list[float]) -> None:
    one, two, three = sites
    one.load(0, 4)
    three.load(0, 1)
    tell(sites, 0)
    tell(sites, 2)
    assert len(two.machines) == 2
    clock[0] += 2.0
    two.board.heard()
    tell(sites, 2, whole=True)
    clock[0] += 1.5
    two.board.heard()
    two.machines.forget_silent(10)
    assert two.sees() == 1
    assert len(two.machines) == 1
    told = three.machines.news(True, 10)
    assert told is not None
    told.leaving, told.load = True, {}
    two.machines.hear(told, 10)
    assert two.sees() == 0
    assert len(two.machines) == 0
    # Heard of again, it counts again.
    tell(sites, 0, whole=True)
    assert two.sees() == 4


def test_without_a_voice_of_one_s_own_nothing_is_believed(sites: list[Site], clock: list[float]) -> None:
    one, two, _ = sites
    one.load(0, 4)
    tell(sites, 0)
    assert two.sees() == 4
    clock[0] += 3.1
    assert two.sees() == 0
    # One's own words come back: what carries them works.
    tell(sites, 1, whole=True)
    assert two.sees() == 4


def test_one_that_was_started_anew_under_its_name_has_what_it_says_now(sites: list[Site]) -> None:
    one, two, three = sites
    one.load(0, 4)
    one.load(0, 2, B)
    tell(sites, 0)
    # Killed, and back before anyone has noticed: nothing of what it had counts any more.
    three.board.identity = one.board.identity
    three.load(0, 1, B)
    told = three.machines.news(True, 10)
    assert told is not None
    two.machines.hear(told, 10)
    assert (two.sees(), two.sees(B)) == (0, 1)


def test_rates_of_others_fade_as_one_s_own(sites: list[Site], clock: list[float]) -> None:
    one, two, three = sites
    one.cells[0][A].write((1, 0, 0.0, 0.0, 0.0, 100.0, clock[0], 0.0, 0.0, inf, 0.0, -inf))
    tell(sites, 0)
    clock[0] += 2.0
    # News of a third makes what the first said two seconds ago no younger.
    three.load(0, 1)
    tell(sites, 2)
    two.board.heard()
    (row,) = two.cells[0][A].read()
    assert row[5] == pytest.approx(100.0 * exp(-0.2))
    assert row[6] == clock[0]


def test_how_far_the_first_prompt_in_the_queue_is_is_known_to_all(sites: list[Site], clock: list[float]) -> None:
    one, two, three = sites
    one.cells[0][A].write((2, 1, 500.0, *(0.0,) * 6, 990.0, 300.0, 995.0))
    one.cells[1][A].write((1, 1, 70.0, *(0.0,) * 6, 998.0, 70.0, -inf))
    three.cells[0][A].write((1, 1, 40.0, *(0.0,) * 6, 985.0, 40.0, 997.0))
    tell(sites, 0)
    tell(sites, 2)
    (row,) = two.cells[0][A].read()
    assert row[9:] == (985.0, 40.0, 997.0)
    # Its prompt is done: the next is the first.
    three.cells[0][A].write((1, *(0.0,) * 8, inf, 0.0, 999.0))
    tell(sites, 2)
    (row,) = two.cells[0][A].read()
    assert row[9:11] == (990.0, 300.0)


def test_an_older_version_is_understood_and_a_newer_one(sites: list[Site]) -> None:
    one, two, _ = sites
    one.load(0, 4)
    told = one.machines.news(True, 10)
    assert told is not None
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(told))
    decode = msgspec.msgpack.Decoder(PeerReport).decode
    # Before money in flight and queues were told of; and with what is not known yet.
    for said in (fields[:6], [*fields, "more"]):
        two.machines.hear(decode(msgspec.msgpack.encode(said)), 10)
        assert two.sees() == 4
    with pytest.raises(msgspec.MsgspecError):
        decode(msgspec.msgpack.encode(fields[:4]))


def test_clocks_that_do_not_agree_leave_nothing_behind(sites: list[Site]) -> None:
    one, two, _ = sites
    one.tallies[0].add(7, 10_000, 5, 5)
    one.tallies[0].add(8, 10, 5, 5)
    one.load(0, 3)
    told = one.machines.news(True, 10_000)
    assert told is not None
    two.machines.hear(told, 10)
    # What is in flight needs no clock; what was used counts in its minute, where that is one here too.
    assert two.sees() == 3
    assert two.machines._used == {}
    assert two.tallies[0].total(7, 10) == (0, 0)


def test_memory_is_bounded_whatever_is_said(sites: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    _, two, _ = sites
    nothing = (0.0,) * 12
    for number in range(1500):
        load = {f"http://{number}-{n}": nothing for n in range(5)}
        two.machines.hear(PeerReport(f"stranger {number}", True, load, "s", []), 10)
    assert len(two.machines._peers) == 1024
    assert not any(one.load for one in two.machines._peers.values())
    assert module._MOST_KEYS == 65_536
    # A key that finds no room on the board was looked for in all of it.
    monkeypatch.setattr(module, "_MOST_KEYS", 500)
    held = [(key, (1.0, 0.0)) for key in range(600)]
    two.machines.hear(PeerReport("stranger 0", True, {}, "s", [], held=held), 10)
    assert len(two.machines._peers["stranger 0"].held) == 500


def test_limits_are_totals_by_machine(sites: list[Site]) -> None:
    one, two, three = sites
    one.tallies[0].add(7, 10, 1, 100)
    one.tallies[1].add(7, 10, 2, 50)
    tell(sites, 0)
    assert two.tallies[1].total(7, 10) == (3, 150)
    assert one.tallies[1].total(7, 10) == (3, 150)
    two.tallies[0].add(7, 10, 1, 1)
    two.tallies[0].add(7, 9, 5, 5)
    told = two.machines.news(False, 10)
    assert told is not None
    for _ in range(2):
        for site in sites:
            site.machines.hear(told, 10)
    assert [site.tallies[0].total(7, 10) for site in sites] == [(4, 151)] * 3
    assert three.tallies[0].total(7, 9) == (5, 5)
    # What was estimated too high is taken back everywhere.
    one.tallies[0].add(7, 10, 0, -100)
    tell(sites, 0)
    assert [site.tallies[0].total(7, 10) for site in sites] == [(4, 51)] * 3


def test_what_is_in_flight_of_a_budget_is_known_to_all(sites: list[Site], clock: list[float]) -> None:
    one, two, three = sites
    one.tallies[0].hold(7, 0.5, 2.0)
    one.tallies[1].hold(7, 0.25, 0.0)
    # Of the other process of the same machine at once, and nobody's own.
    assert one.tallies[0].held(7) == (0.25, 0.0)
    assert one.tallies[1].held(7) == (0.5, 2.0)
    tell(sites, 0)
    two.tallies[0].hold(7, 1.0, 0.0)
    tell(sites, 1)
    assert three.tallies[0].held(7) == (1.75, 2.0)
    assert two.tallies[0].held(7) == (0.75, 2.0)
    assert one.tallies[0].held(7) == (1.25, 0.0)
    # It is a total: what comes twice, or less than before, is that.
    one.tallies[0].hold(7, 0.0, 0.0)
    tell(sites, 0)
    tell(sites, 0, whole=True)
    assert three.tallies[0].held(7) == (1.25, 0.0)
    # A process that has ended has nothing in flight, nor has a machine that is silent.
    one.board.clear(1)
    assert one.tallies[0].held(7) == (1.0, 0.0)
    clock[0] += 3.1
    three.machines.forget_silent(10)
    assert three.tallies[0].held(7) == (0.0, 0.0)


def test_a_place_with_something_in_flight_is_not_given_away() -> None:
    with closing(Board(1, keys=1)) as board:
        tally = BoardTally(board, 0)
        tally.hold(7, 0.5, 0.0)
        tally.hold(8, 0.5, 0.0)
        assert board.words[board.keys_at] == 8, "key 7 has the place: its number and one"
        tally.hold(7, 0.0, 0.0)
        tally.hold(8, 0.5, 0.0)
        assert board.words[board.keys_at] == 9


def test_keys_of_another_store_are_other_keys(clock: list[float]) -> None:
    with ExitStack() as stack:
        sites = [Site(stack, clock, store) for store in ("s", "t")]
        sites[0].tallies[0].add(7, 10, 1, 100)
        tell(sites, 0)
        assert sites[1].tallies[0].total(7, 10) == (0, 0)


def test_names_that_mean_the_same_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_as("http://10.0.0.1:8000/v1") == "http://10.0.0.1:8000/v1"
    for url in ("http://127.0.0.1:1/v1", "http://localhost:1/v1", "http://[::1]:1/v1"):
        here = known_as(url)
        assert here != url
        monkeypatch.setattr(module, "this_machine", lambda: "elsewhere")
        assert known_as(url) not in (url, here)
        monkeypatch.undo()
    assert store_name(None) == ""
    near, far = "postgresql://u:secret@db/crosstie", "postgresql://u@10.0.0.9:5432/crosstie"
    assert store_name(near) == store_name(far) == "postgresql/crosstie"
    assert "secret" not in store_name(near)
    assert store_name("a.db") == store_name("sqlite://a.db") == store_name("./a.db") != store_name("b.db")
