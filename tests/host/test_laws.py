"""Laws of residency, whatever is asked, fails or goes away: driven here step by step, by none of its own simulation."""

from benchmarks.hosting import Frequency, Recency
from hypothesis import given, strategies as st

from crosstie.host.hosted import Hosted, KeepingWorth, Move, ResidencySettings, Slot
from crosstie.host.residency import Residency

STEP_S = 0.5
LONGEST_REQUEST_S = 4.0
LONGEST_LOAD_S = 6.0


class Driver:
    """A pool served in steps of half a second; every move is checked when it begins."""

    def __init__(self, hosted: list[Hosted], rooms: list[float], settings: ResidencySettings) -> None:
        self.slots = [Slot(f"s{n}", room) for n, room in enumerate(rooms)]
        self.residency = Residency(hosted, self.slots, 0.0, settings)
        self.settings = settings
        self.now = 0.0
        self.waiting: dict[str, list[float]] = {}
        self.running: list[tuple[float, str, str]] = []
        self.loads: list[tuple[float, Move, bool]] = []
        self.loaded_at: dict[tuple[str, str], float] = {}
        self.longest_wait_s = 0.0
        self.evicted: dict[tuple[str, str], int] = {}

    def busy(self, slot: str, model: str) -> int:
        return sum((slot, model) == (where, what) for _, where, what in self.running)

    def step(self, asked: list[str], takes_s: float, fails: bool) -> None:
        self.now += STEP_S
        self.running = [one for one in self.running if one[0] > self.now]
        for end, move, failing in [one for one in self.loads if one[0] <= self.now]:
            self.loads.remove((end, move, failing))
            if failing:
                self.residency.failed(move, self.now)
            else:
                self.residency.loaded(move, self.now)
                self.loaded_at[move.slot.key, move.load.model] = self.now
        for model in asked:
            self.residency.asked(model, self.now)
            self.waiting.setdefault(model, []).append(self.now)
        for model in list(self.waiting):
            self.serve(model, takes_s, fails)
        ahead = self.residency.ahead(self.now, self.busy)
        if ahead is not None:
            self.begin(ahead, fails)

    def serve(self, model: str, takes_s: float, fails: bool) -> None:
        on = self.residency.resident(model)
        if on:
            for since in self.waiting.pop(model):
                self.longest_wait_s = max(self.longest_wait_s, self.now - since)
                self.running.append((self.now + takes_s, on[0].key, model))
            return
        move = self.residency.wanted(model, self.now, self.busy)
        if move is not None:
            self.begin(move, fails)
        else:
            assert self.residency.why_waiting(model).why
            assert self.residency.why_waiting(model).retry_s > 0

    def begin(self, move: Move, fails: bool) -> None:
        slot = move.slot
        assert slot.loading is None
        assert slot.usable
        for victim in move.evict:
            assert not self.busy(slot.key, victim), "a busy model was evicted"
            assert not self.residency.hosted[victim].pinned or len(self.residency.resident(victim)) > 1
            stayed = self.now - self.loaded_at[slot.key, victim]
            assert stayed >= self.settings.min_residence_s - 1e-9, "it had just come"
            self.evicted[slot.key, victim] = self.evicted.get((slot.key, victim), 0) + 1
        self.residency.began(move, self.now)
        assert slot.used_bytes(self.residency.hosted) <= slot.capacity_bytes
        self.loads.append((self.now + move.load.load_s, move, fails))


def models(sizes: list[int], loads: list[float], pinned: bool) -> list[Hosted]:
    pairs = zip(sizes, loads, strict=False)
    return [Hosted(f"m{n}", float(size), load, pinned=pinned and n == 0) for n, (size, load) in enumerate(pairs)]


SIZES = st.lists(st.integers(1, 10), min_size=2, max_size=6)
LOADS = st.lists(st.floats(0.1, LONGEST_LOAD_S), min_size=6, max_size=6)
SETTINGS = st.builds(
    ResidencySettings,
    min_residence_s=st.floats(0.0, 10.0),
    residence_loads=st.floats(0.0, 4.0),
    margin=st.floats(0.1, 3.0),
    patience_loads=st.floats(0.0, 3.0),
    worth=st.sampled_from([KeepingWorth, Recency, Frequency]),
    copy_at_in_flight=st.floats(1.0, 8.0),
)
# At each step: which models are asked for.
ASKED = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=5, max_size=60)


def bound_s(hosted: list[Hosted], settings: ResidencySettings) -> float:
    """Everybody else's turn before one's own, each with its residence, requests and load."""
    turn = LONGEST_REQUEST_S + LONGEST_LOAD_S + 4 * STEP_S
    turn += max(settings.residence_s(one) for one in hosted) + max(settings.waits_s(one) for one in hosted)
    return len(hosted) * turn


@given(SIZES, LOADS, st.booleans(), SETTINGS, ASKED, st.floats(0.5, LONGEST_REQUEST_S), st.integers(1, 3))
def test_memory_busy_and_pinned_models_are_respected_and_everybody_is_served_in_time(
    sizes: list[int],
    loads: list[float],
    pinned: bool,
    settings: ResidencySettings,
    asked: list[list[int]],
    takes_s: float,
    slots: int,
) -> None:
    hosted = models(sizes, loads, pinned)
    # Room for the pinned one and for any other beside it.
    driver = Driver(hosted, [float(sizes[0] + max(sizes))] * slots, settings)
    # Nobody lets up: what was asked for goes on until long after, so that no model is idle by chance.
    for step in range(len(asked) * 6):
        driver.step([f"m{n % len(hosted)}" for n in asked[step % len(asked)]], takes_s, fails=False)
    steps = 0
    while driver.waiting:
        driver.step([], takes_s, fails=False)
        steps += 1
        assert steps * STEP_S <= bound_s(hosted, settings), f"still waiting: {list(driver.waiting)}"
    assert driver.longest_wait_s <= bound_s(hosted, settings)
    if settings.min_residence_s:
        for times in driver.evicted.values():
            assert times <= driver.now / settings.min_residence_s + 1


@given(SIZES, LOADS, SETTINGS, ASKED, st.lists(st.booleans(), min_size=8, max_size=8))
def test_failing_loads_and_replicas_that_go_away_break_nothing(
    sizes: list[int], loads: list[float], settings: ResidencySettings, asked: list[list[int]], chance: list[bool]
) -> None:
    hosted = models(sizes, loads, pinned=False)
    driver = Driver(hosted, [12.0, 12.0], settings)
    for step in range(len(asked) * 3):
        if step % 7 == 3:
            away = driver.slots[step % 2]
            away.usable = chance[step % 8] or away.loading is not None
            if not away.usable:
                driver.residency.observed(away.key, [], driver.now)
                driver.running = [one for one in driver.running if one[1] != away.key]
        driver.step([f"m{n % len(hosted)}" for n in asked[step % len(asked)]], 1.0, fails=chance[(step + 3) % 8])
    for slot in driver.slots:
        slot.usable = True
    # The longest pause after failures, and then everybody's turn.
    limit_s = settings.most_backoff_s + bound_s(hosted, settings)
    until = driver.now + limit_s
    while driver.waiting and driver.now < until:
        driver.step([], 1.0, fails=False)
    assert not driver.waiting


def test_the_driver_would_notice_a_starved_model() -> None:
    """With residence without end nobody gets the replica of another."""
    hosted = models([10, 10], [1.0] * 6, pinned=False)
    driver = Driver(hosted, [10.0], ResidencySettings(min_residence_s=1e9))
    for _ in range(400):
        driver.step(["m0", "m1"], 1.0, fails=False)
    assert list(driver.waiting) == ["m1"]
