"""What keys have used of their limits, counted by all processes of this machine together, and peers' beside it."""

from time import time

from crosstie_gateway.share.board import Board

# Places that are looked at for a key before it counts as having none.
_PROBED = 64
# Two minutes are kept: the present one and the one before.
_FIELDS = 3


class BoardTally:
    """As `ledger.tally.Tally`. A process adds to its own row and reads all.

    Another process may add between reading and adding: limits are overshot by one request a process at most. Counts
    stay when a process dies.
    """

    def __init__(self, board: Board, row: int):
        self._board, self._row = board, row
        self._numbers, self._words = board.numbers, board.words
        self._places: dict[int, int] = {}
        # Of keys for which the board has no place, by minute: counted by this process alone.
        self._alone: dict[tuple[int, int], tuple[int, int]] = {}

    def add(self, key_id: int, minute: int, requests: int, tokens: int) -> None:
        at = self._place(key_id, minute)
        if not at:
            before = self._alone.get((key_id, minute), (0, 0))
            self._alone = {key: used for key, used in self._alone.items() if key[1] >= minute - 1}
            self._alone[key_id, minute] = (before[0] + requests, before[1] + tokens)
            return
        mark = self._board.mark_of_key(at)
        numbers, at = self._numbers, self._cell(at, self._row, minute)
        if numbers[at] != minute:
            if numbers[at] > minute:
                # Too late: that minute's place belongs to a later one.
                return
            numbers[at + 1] = numbers[at + 2] = 0.0
            numbers[at] = minute
        numbers[at + 1] += requests
        numbers[at + 2] += tokens
        self._board.memory[mark] = 1

    def total(self, key_id: int, minute: int) -> tuple[int, int]:
        return self._sum(key_id, minute, self._board.rows)

    def own(self, key_id: int, minute: int) -> tuple[int, int]:
        """Of all processes of this machine."""
        return self._sum(key_id, minute, self._board.workers)

    def set_peers(self, key_id: int, minute: int, requests: int, tokens: int) -> None:
        """Sets all that peers have used of a minute."""
        at = self._place(key_id, minute)
        if at:
            numbers, at = self._numbers, self._cell(at, self._board.workers, minute)
            if numbers[at] <= minute:
                numbers[at], numbers[at + 1], numbers[at + 2] = minute, requests, tokens

    def hold(self, key_id: int, usd: float, more_usd: float) -> None:
        self._hold(key_id, self._row, usd, more_usd)

    def held(self, key_id: int) -> tuple[float, float]:
        usd, more_usd = self._held(key_id, self._board.rows)
        own_usd, own_more_usd = self._held(key_id, self._row + 1, self._row)
        return max(usd - own_usd, 0.0), max(more_usd - own_more_usd, 0.0)

    def own_held(self, key_id: int) -> tuple[float, float]:
        """Of all processes of this machine."""
        return self._held(key_id, self._board.workers)

    def set_peers_held(self, key_id: int, usd: float, more_usd: float) -> None:
        self._hold(key_id, self._board.workers, usd, more_usd, news=False)

    def _hold(self, key_id: int, row: int, usd: float, more_usd: float, news: bool = True) -> None:
        at = self._place(key_id, int(time() // 60.0))
        if at:
            held = at + self._board.held_at + 2 * row
            self._numbers[held], self._numbers[held + 1] = max(usd, 0.0), max(more_usd, 0.0)
            if news:
                self._board.memory[self._board.mark_of_key(at)] = 1

    def _held(self, key_id: int, rows: int, first: int = 0) -> tuple[float, float]:
        at = self._place(key_id, int(time() // 60.0))
        if not at:
            return 0.0, 0.0
        held = at + self._board.held_at
        values = self._numbers[held + 2 * first : held + 2 * rows].tolist()
        return sum(values[::2]), sum(values[1::2])

    def _sum(self, key_id: int, minute: int, rows: int) -> tuple[int, int]:
        at = self._place(key_id, minute)
        if not at:
            return self._alone.get((key_id, minute), (0, 0))
        requests = tokens = 0.0
        values = self._numbers[self._cell(at, 0, minute) : self._cell(at, rows, minute)].tolist()
        for n in range(0, len(values), 2 * _FIELDS):
            if values[n] == minute:
                requests += values[n + 1]
                tokens += values[n + 2]
        return int(requests), int(tokens)

    @staticmethod
    def _cell(at: int, row: int, minute: int) -> int:
        return at + 1 + _FIELDS * (2 * row + minute % 2)

    def _place(self, key_id: int, minute: int) -> int:
        at = self._places.get(key_id, 0)
        if at and self._words[at] == key_id + 1:
            return at
        at = self._find(key_id, minute)
        self._places[key_id] = at
        return at

    def _find(self, key_id: int, minute: int) -> int:
        """Its own place, or a free one, or one unused lately."""
        board, words = self._board, self._words
        first = key_id * 0x9E3779B97F4A7C15 % 2**64 % board.keys
        places = [board.keys_at + (first + n) % board.keys * board.key_stride for n in range(min(_PROBED, board.keys))]
        with board.locked():
            for at in places:
                if words[at] == key_id + 1:
                    return at
            for at in places:
                if not words[at] or self._stale(at, minute):
                    end = at + board.key_stride
                    board.memory[8 * at : 8 * end] = bytes(8 * board.key_stride)
                    words[at] = key_id + 1
                    return at
        return 0

    def _stale(self, at: int, minute: int) -> bool:
        held = at + self._board.held_at
        minutes = self._numbers[at + 1 : held].tolist()[::_FIELDS]
        return max(minutes) < minute - 1 and not any(self._numbers[held : at + self._board.key_stride].tolist())
