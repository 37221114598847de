"""The board by itself: rows of several processes, places that are given out and taken back, and what a death leaves."""

import contextlib
import os
from collections.abc import Callable, Iterator
from math import inf

import pytest

from crosstie_gateway.share.board import Board, Cell
from crosstie_gateway.share.tally import BoardTally

Boards = Callable[..., Board]
A, B, C = "http://a:1/v1", "http://b:1/v1", "http://c:1/v1"


@pytest.fixture
def boards() -> Iterator[Boards]:
    with contextlib.ExitStack() as stack:

        def made(*counts: int, **places: int) -> Board:
            return stack.enter_context(contextlib.closing(Board(*counts, **places)))

        yield made


def load(cell: Cell, in_flight: int, tokens: float = 100.0) -> None:
    cell.write((in_flight, 1, tokens, 2 * tokens, tokens, 5.0, 7.0, 1 / 0.5, 1 / 0.05, inf, 0.0, -inf))


def in_a_child(do: Callable[[], None]) -> None:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            do()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_each_reads_what_the_others_wrote(boards: Boards) -> None:
    board = boards(2)
    ours, theirs = (board.cells([A, B], row) for row in (0, 1))
    assert not ours[A].read()
    assert not ours[B].read()
    assert not ours[A].changed
    in_a_child(lambda: load(theirs[A], 3))
    assert ours[A].changed
    assert ours[A].in_flight_elsewhere() == 3
    assert ours[A].read() == [(3.0, 1.0, 100.0, 200.0, 100.0, 5.0, 7.0, 2.0, 20.0, inf, 0.0, -inf)]
    assert not ours[A].changed
    assert not ours[B].changed
    # What one writes oneself is no news.
    load(ours[A], 9)
    assert not ours[A].changed
    assert ours[A].in_flight_elsewhere() == 3
    assert theirs[A].in_flight_elsewhere() == 9


def test_the_dead_have_nothing_in_flight_but_have_used_what_they_used(boards: Boards) -> None:
    board = boards(2)
    ours, theirs = (board.cells([A], row) for row in (0, 1))
    tally = BoardTally(board, 1)
    tally.add(7, 100, 1, 50)
    load(theirs[A], 3)
    board.queued[1] = 4
    assert ours[A].read()
    board.clear(1)
    assert ours[A].changed
    assert ours[A].in_flight_elsewhere() == 0
    assert ours[A].read() == []
    assert BoardTally(board, 0).total(7, 100) == (1, 50)
    # Whoever takes its place is seen again.
    load(board.cells([A], 1)[A], 2)
    assert ours[A].changed
    assert ours[A].in_flight_elsewhere() == 2


def test_a_place_is_kept_as_long_as_anyone_uses_it(boards: Boards) -> None:
    board = boards(2, replicas=2)
    first = board.cells([A, B], 0)
    board.cells([A, B], 1)
    load(first[A], 1)
    # This one has left A, the other has not.
    assert set(board.cells([B, C], 0)) == {B}
    assert set(board.cells([B], 1)) == {B}
    # Nobody uses it any more, but what was sent there has not ended.
    assert set(board.cells([B, C], 0)) == {B}
    load(first[A], 0)
    found = board.cells([B, C], 0)
    assert set(found) == {B, C}
    assert found[C].at == first[A].at
    assert found[C].read() == []


def test_what_other_machines_have_is_forgotten_in_silence(boards: Boards, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("crosstie_gateway.share.board.monotonic", lambda: now[0])
    board = boards(1)
    ours, far = board.cells([A], 0)[A], board.cells([A], board.workers)[A]
    load(far, 5)
    # Never heard of: nobody says whether it is still true.
    assert ours.in_flight_elsewhere() == 0
    board.heard()
    assert ours.changed
    assert ours.in_flight_elsewhere() == 5
    assert len(ours.read()) == 1
    now[0] += 2.9
    assert ours.in_flight_elsewhere() == 5
    now[0] += 0.2
    assert ours.changed
    assert ours.in_flight_elsewhere() == 0
    assert ours.read() == []


def test_who_waits_is_woken_by_others_only(boards: Boards) -> None:
    board = boards(3)
    board.queued[0] = 2
    board.queued[1] = 1
    board.ring(0)
    assert os.read(board.bells[1][0], 10) == b"!"
    for row in (0, 2):
        with pytest.raises(BlockingIOError):
            os.read(board.bells[row][0], 10)
    # Rings that nobody hears do not block.
    for _ in range(70_000):
        board.ring(0)


def test_who_has_more_clients_lets_others_go_first(boards: Boards) -> None:
    board = boards(2)
    # The other does not serve yet.
    assert board.goes_first(0, 50)
    board.clients[1] = 48
    assert not board.goes_first(0, 50)
    assert board.goes_first(0, 49)
    board.clear(1)
    assert board.goes_first(0, 50)


def test_changes_are_told_once(boards: Boards) -> None:
    board = boards(2)
    cells, tally = board.cells([A, B], 0), BoardTally(board, 1)
    assert board.changed_replicas() == []
    load(cells[B], 1)
    load(cells[B], 2)
    tally.add(5, 1, 1, 1)
    assert board.changed_replicas() == [cells[B].at]
    assert board.changed_replicas() == []
    (at,) = board.changed_keys()
    assert board.words[at] == 6
    assert board.changed_keys() == []


# Limits


def test_processes_count_together_and_lose_nothing(boards: Boards) -> None:
    board = boards(4)

    def counted(row: int) -> None:
        tally = BoardTally(board, row)
        for n in range(2000):
            tally.add(n % 3, 1000, 1, 10)

    pids = []
    for row in range(4):
        pid = os.fork()
        if not pid:
            counted(row)
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    tally = BoardTally(board, 0)
    totals = [tally.total(key, 1000) for key in range(3)]
    assert sum(requests for requests, _ in totals) == 8000
    assert sum(tokens for _, tokens in totals) == 80_000
    assert tally.own(0, 1000) == totals[0]


def test_two_minutes_are_kept(boards: Boards) -> None:
    board = boards(2)
    ours, theirs = BoardTally(board, 0), BoardTally(board, 1)
    ours.add(1, 10, 1, 100)
    theirs.add(1, 11, 2, 50)
    ours.add(1, 11, 1, -20)
    assert ours.total(1, 10) == theirs.total(1, 10) == (1, 100)
    assert ours.total(1, 11) == theirs.total(1, 11) == (3, 30)
    assert ours.total(1, 9) == (0, 0)
    theirs.add(1, 12, 1, 1)
    ours.add(1, 12, 1, 1)
    assert ours.total(1, 10) == (0, 0)
    assert ours.total(1, 12) == (2, 2)
    # What comes too late for its minute counts in none.
    ours.add(1, 10, 1, 1)
    assert ours.total(1, 10) == (0, 0)
    assert ours.total(1, 12) == (2, 2)


def test_others_are_added_and_never_twice(boards: Boards) -> None:
    board = boards(2)
    ours, theirs = BoardTally(board, 0), BoardTally(board, 1)
    ours.add(1, 10, 1, 5)
    for _ in range(3):
        theirs.set_peers(1, 10, 4, 40)
    assert ours.total(1, 10) == (5, 45)
    assert ours.own(1, 10) == (1, 5)
    theirs.set_peers(1, 11, 1, 1)
    theirs.set_peers(1, 12, 1, 1)
    theirs.set_peers(1, 10, 9, 9)
    assert ours.total(1, 10) == (1, 5)


def test_more_keys_than_places(boards: Boards) -> None:
    board = boards(2, keys=4)
    ours, theirs = BoardTally(board, 0), BoardTally(board, 1)
    for key in range(10):
        ours.add(key, 10, 1, key)
        theirs.add(key, 10, 1, key)
    # Those with a place are counted together, the others by each alone: limits are looser, never tighter.
    totals = [ours.total(key, 10) for key in range(10)]
    assert sum(total == (2, 2 * key) for key, total in enumerate(totals)) == 4
    assert sum(total == (1, key) for key, total in enumerate(totals)) == 6
    # Places of keys that are not used any more are given to others.
    for key in range(100, 104):
        ours.add(key, 13, 1, 1)
        theirs.add(key, 13, 1, 1)
    assert [ours.total(key, 13) for key in range(100, 104)] == [(2, 2)] * 4
    assert ours.total(0, 13) == (0, 0)
