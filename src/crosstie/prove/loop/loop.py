"""The loop: predict, start the engine, measure where least is known, learn, predict and plan again.

Everything that was worked out or measured is in the folder before the next thing begins, so that a loop that was ended
at any moment goes on from there. Points that there is no time for are left out. The report says what was predicted,
what was measured, and what that changes.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from crosstie.catalog.library import Catalog, user_directories
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.core.document import picked
from crosstie.core.errors import BadInput
from crosstie.core.figures import plural
from crosstie.core.progress import OnProgress
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import Workload
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.report import mark_of
from crosstie.prove.bench.bench import Settings, bench, fitted
from crosstie.prove.bench.document import document
from crosstie.prove.bench.endpoint import described
from crosstie.prove.bench.gpus import local_tool
from crosstie.prove.bench.loads import BenchLengths, BenchLoad
from crosstie.prove.calibration.calibrate import Calibrated, calibrate, kept_files
from crosstie.prove.calibration.own import OWN
from crosstie.prove.loop.design import METRICS, Budget, LoopPoint, asked_points, design, predicted
from crosstie.prove.loop.engine import running_engine
from crosstie.prove.loop.folder import LoopAsked, LoopFolder, LoopState, PreparedReplica
from crosstie.prove.loop.prepare import prepared
from crosstie.prove.replay.texts import read_texts
from crosstie.wire.address import Address, is_loopback

# What an engine's start is taken for until it has started once, of the time that there is.
_START_SHARE = 0.15
# Given to an engine whatever is left of the time.
_LEAST_START_S = 60.0
_VARY = 0.2
# Names of METRICS as files of `bench` have them.
_MEASURED = {"ttft_s": "ttft_s_p50", "tpot_s": "tpot_s_p50", "output_tokens_per_s": "output_tokens_per_s"}


@dataclass(frozen=True)
class LoopSettings:
    """What every run has in common, and is not kept: a key, and how progress is told."""

    on_progress: OnProgress
    # A line of what has just come about.
    tell: Callable[[str], object]
    api_key: str | None = None


@dataclass
class LoopResult:
    """What reports are made of."""

    state: LoopState
    measured: dict[str, dict[str, Any]]
    # By name of the point: what is predicted of it by what was learnt; and of the questions, in their order.
    after: dict[str, dict[str, Any]]
    questions_after: list[dict[str, Any]]
    learnt: Calibrated | None = None
    # By what was known before, and by what was learnt.
    plans: tuple[Plan, Plan] | None = None
    # Why there is no plan.
    unplanned: str = ""
    interrupted: bool = False

    @property
    def points(self) -> list[LoopPoint]:
        """Those that were measured to their end."""
        return [point for point in self.state.design if point.name in self.measured]

    @property
    def failed(self) -> int:
        return sum(int(measured_point["failed"]) for measured_point in self.measured.values())


def begun(folder: LoopFolder, given: dict[str, Any]) -> LoopState:
    """What the folder has, or a new one. `given`: what was asked for this time."""
    loop_state = folder.read()
    if loop_state is None:
        return LoopState(asked=LoopAsked(**given))
    loop_state.asked = loop_state.asked.gone_on_with(given, folder.path)
    return loop_state


class MachineLoop:
    """One folder's. `run` does everything that is not done yet."""

    def __init__(self, catalog: Catalog, folder: LoopFolder, state: LoopState, settings: LoopSettings):
        self.catalog, self.folder, self.state, self.settings = catalog, folder, state, settings
        asked = state.asked.workload
        self.workload = read_workload(catalog, find_workload(Path(asked))) if asked else None
        self._before_s, self._began = state.spent_s, time.monotonic()

    def run(self) -> LoopResult:
        """Raises EngineFailed where the engine does not start; what was measured is kept."""
        self._predict_first()
        interrupted = self._measure()
        loop_result = LoopResult(self.state, self.folder.measured(self.state), {}, [], interrupted=interrupted)
        if loop_result.measured and not interrupted:
            _learn(self.catalog, self.folder, loop_result, self.settings)
            if self.workload is not None:
                _plan_again(self.catalog, loop_result, self.workload, self.settings)
        return loop_result

    @property
    def _spent_s(self) -> float:
        return self._before_s + time.monotonic() - self._began

    def _keep(self) -> None:
        self.state.spent_s = round(self._spent_s, 2)
        self.folder.write(self.folder.state, self.state)

    def _predict_first(self) -> None:
        state, settings = self.state, self.settings
        if state.design:
            return
        settings.on_progress(0, 0, "doctor and recipe")
        made, deployment = prepared(self.catalog, state.asked, self.folder.path, settings.api_key)
        settings.tell(f"{made.replica}; {_doctor_words(made)}")
        settings.on_progress(0, 0, "what is known least")
        asked = asked_points(self.workload, deployment, made.longest)
        for_points_s = 60.0 * state.asked.minutes * (1.0 - (_START_SHARE if made.command else 0.0))
        budget = Budget(state.asked.points, for_points_s, state.asked.speed)
        state.design = design(self.catalog, made.conditions, asked, deployment, made.longest, budget)
        known = predicted(self.catalog, asked, made.conditions)
        state.questions = [
            msgspec.structs.replace(each, predicted=told) for each, told in zip(asked, known, strict=True)
        ]
        state.prepared, state.calibration = made, mark_of(self.catalog.calibration)
        self._keep()

    def _measure(self) -> bool:
        """Whether somebody interrupted it."""
        state = self.state
        made = state.prepared
        assert made is not None, "predicted before it is measured"
        left = [point for point in state.design if point.name not in self.folder.measured(state)]
        # As long as it took the last time.
        start_s = state.starts_s[-1] if made.command and state.starts_s else 0.0
        if not any(self._has_time(point, start_s) for point in left):
            return False
        if not made.command:
            return self._measure_at(state.asked.endpoint, made, left, lambda: None)
        wait_s = max(60.0 * state.asked.minutes - self._spent_s, _LEAST_START_S)
        engine = running_engine(
            made.command, made.variables, self.folder.log, health=made.health, wait_s=min(made.start_s, wait_s),
            environment=os.environ, on_progress=self.settings.on_progress,
        )  # fmt: skip
        with engine as running:
            state.starts_s.append(round(running.started_s, 2))
            self._keep()
            self.settings.tell(f"engine healthy after {running.started_s:.0f} s")
            try:
                return self._measure_at(running.url, made, left, running.check)
            except BadInput:
                running.check()
                raise

    def _has_time(self, point: LoopPoint, before_s: float = 0.0) -> bool:
        """The first point is always measured: a loop without any says nothing."""
        until_s = self._spent_s + before_s + point.expected_s
        return until_s <= 60.0 * self.state.asked.minutes or point == self.state.design[0]

    def _measure_at(self, url: str, made: PreparedReplica, left: list[LoopPoint], check: Callable[[], object]) -> bool:
        """`check`: raises EngineFailed where the engine is no more; what it did not answer is then no measurement."""
        state, settings = self.state, self.settings
        endpoint = described(url, made.asks_for, settings.api_key, True, _given(made), self.catalog)
        if endpoint.emulated and not made.emulated:
            # Whatever the command was: nobody may take this for a measurement.
            state.prepared = msgspec.structs.replace(made, emulated=True, replica=f"{made.replica}, EMULATED")
            self._keep()
        tool = None if endpoint.emulated or not is_loopback(Address(url).host) else local_tool()
        dropped = 0
        for point in left:
            if not self._has_time(point):
                # One that tells less may be shorter.
                dropped += 1
                continue
            told = f"{state.design.index(point) + 1} of {len(state.design)}, {point.short}"
            load, asked = BenchLoad(clients=point.clients), fitted(_settings(state, point, settings), [endpoint])

            def on_progress(done: int, total: int, what: str, point: str = told) -> None:
                settings.on_progress(done, total, f"{point}: {what}")

            measured = bench([endpoint], [load], asked, gpus=(tool,) if tool else (), on_progress=on_progress)
            if any(point_result.failed for point_result in measured.measured[0].points):
                check()
            if measured.interrupted:
                return True
            self.folder.write(self.folder.point_file(point), document(measured))
            self._keep()
            settings.tell(f"{told}: {_compared(point, self.folder.measured(state).get(point.name))}")
        if dropped:
            settings.tell(f"{state.asked.minutes:g} minutes: {plural(dropped, 'point')} left out")
        return False


def _doctor_words(made: PreparedReplica) -> str:
    if made.emulated:
        return "no GPU runs"
    verdicts = ", ".join(f"{name}: {verdict}" for name, verdict in made.doctor.get("verdicts", {}).items())
    return f"doctor: {verdicts}" if verdicts else "doctor was not asked about another machine"


def _given(made: PreparedReplica) -> dict[str, str]:
    """What the endpoint need not say of itself; its model it names, or its folder does."""
    return {name: value for name, value in made.conditions.items() if name not in ("model", "model_config")}


def _settings(state: LoopState, point: LoopPoint, settings: LoopSettings) -> Settings:
    prompts = state.asked.prompts
    return Settings(
        prompts=read_texts(Path(prompts)) if prompts else None,
        lengths=BenchLengths(point.input_tokens, point.output_tokens, vary=_VARY), requests=point.requests,
        speed=state.asked.speed, api_key=settings.api_key,
    )  # fmt: skip


def _compared(point: LoopPoint, measured: Mapping[str, Any] | None) -> str:
    if not measured or not measured["metrics"]:
        return "no request was answered"
    tpot, foretold = measured["metrics"]["tpot_s_p50"]["value"], point.predicted["tpot_s"]
    inside = "inside" if foretold.low <= tpot <= foretold.high else "OUTSIDE"
    ends = f"{1e3 * foretold.low:.3g} to {1e3 * foretold.high:.3g} ms"
    return f"TPOT {1e3 * tpot:.3g} ms, predicted {1e3 * foretold.value:.3g} ({ends}): {inside}"


def _learn(catalog: Catalog, folder: LoopFolder, ended: LoopResult, settings: LoopSettings) -> None:
    """By the results here, beside those that the user has added to the catalog; nothing of it is put there."""
    state = ended.state
    assert state.prepared is not None
    own = user_directories()
    files = [folder.point_file(point) for point in ended.points]
    kept = kept_files(own[-1]) if own and not state.prepared.emulated else []
    ended.learnt = calibrate([*kept, *files], quick=True, on_progress=settings.on_progress)
    after = catalog.calibrated_by(ended.learnt.calibration)
    conditions = state.prepared.conditions
    known = predicted(after, ended.points, conditions)
    ended.after = dict(zip((point.name for point in ended.points), known, strict=True))
    ended.questions_after = list(predicted(after, state.questions, conditions))
    if not state.prepared.emulated:
        ended.learnt.write(folder.path / "calibration.json")


def _plan_again(catalog: Catalog, loop_result: LoopResult, workload: Workload, settings: LoopSettings) -> None:
    assert loop_result.learnt is not None
    catalogs = catalog, catalog.calibrated_by(loop_result.learnt.calibration)
    confirm = not loop_result.state.asked.quick
    try:
        before, after = (plan(known, workload, confirm=confirm, on_progress=settings.on_progress) for known in catalogs)
    except ModuleNotFoundError as error:
        loop_result.unplanned = f"planning needs {error.name}, which is not here: `crosstie loop --out` plans elsewhere"
        return
    except BadInput as error:
        loop_result.unplanned = str(error)
        return
    loop_result.plans = before, after


def report_document(loop_result: LoopResult) -> dict[str, Any]:
    state = loop_result.state
    assert state.prepared is not None
    questions = _questions(loop_result)
    points = [_point(loop_result, point) for point in loop_result.points]
    # Median errors of the measured rows: as predicted, and by what was learnt from the others.
    errors = loop_result.learnt.calibration.errors if loop_result.learnt else {}
    rows = [row for point in points for row in point["metrics"].values()]
    return {
        "crosstie_loop": 1,
        "title": f"The loop: {state.prepared.replica}",
        **picked(state.prepared, "emulated replica"),
        "conditions": {k: v for k, v in state.prepared.conditions.items() if k != "model_config"},
        **picked(state, "command=prepared.command doctor=prepared.doctor notes=prepared.notes"),
        **picked(state, "spent_s starts_s calibration_before=calibration"),
        "inside": sum(row["inside"] for row in rows),
        "rows": len(rows),
        "points": points,
        "doubtful": _doubtful(loop_result),
        "not_measured": [point.short for point in state.design if point.name not in loop_result.measured],
        "questions": questions,
        # The median of the widths, before and now.
        "widths": {
            name: [median(question["widths"][name][when] for question in questions) for when in (0, 1)]
            for name in (METRICS if questions else ())
        },
        "errors": {title: errors[title] for title in OWN.values() if title in errors},
        "plan": _plans(loop_result),
        "not_planned": loop_result.unplanned,
    }


def _point(loop_result: LoopResult, point: LoopPoint) -> dict[str, Any]:
    measured = loop_result.measured[point.name]
    metrics = {}
    for name in METRICS:
        before, value = point.predicted[name], (measured["metrics"].get(_MEASURED[name]) or {}).get("value")
        if value is None:
            continue
        after = loop_result.after.get(point.name, {}).get(name)
        metrics[name] = {
            "predicted": msgspec.to_builtins(before), "measured": value,
            "error": before.value / value - 1.0, "inside": before.low <= value <= before.high,
            "predicted_after": msgspec.to_builtins(after) if after else None,
        }  # fmt: skip
    return {
        **picked(point, "name short input_tokens output_tokens clients"),
        **{key: measured[key] for key in ("requests", "failed", "arrivals")},
        "width_left": point.width_left, "metrics": metrics,
    }  # fmt: skip


def _doubtful(ended: LoopResult) -> dict[str, list[str]]:
    """Why, and which points: what of them is not learnt."""
    doubtful: dict[str, list[str]] = {}
    for point in ended.points:
        measured = ended.measured[point.name]
        for applies, why in (
            (measured["bent"], "the client was too slow for their TTFT, which is not learnt"),
            (measured["arrivals"] == "unsettled", "clients were never all at work, so nothing of them is learnt"),
        ):
            if applies:
                doubtful.setdefault(why, []).append(point.short)
    return doubtful


def _questions(loop_result: LoopResult) -> list[dict[str, Any]]:
    """Of every load that is asked about, by metric: the interval's width, high over low, before and now."""
    pairs = zip(loop_result.state.questions, loop_result.questions_after, strict=False)
    return [
        {
            "short": point.short,
            "before": msgspec.to_builtins(point.predicted),
            "after": msgspec.to_builtins(after),
            "widths": {name: [point.predicted[name].width, after[name].width] for name in METRICS},
        }
        for point, after in pairs
        if set(point.predicted) == set(after) == set(METRICS)
    ]


def _plans(loop_result: LoopResult) -> dict[str, Any] | None:
    if loop_result.plans is None:
        return None
    before, after = loop_result.plans
    less = HOURS_PER_MONTH * (before.usd_per_hour - after.usd_per_hour) if before.answered and after.answered else None
    return {
        "workload": before.workload.name, "before": _plan(before), "after": _plan(after), "usd_per_month_less": less,
    }  # fmt: skip


def _plan(plan: Plan) -> dict[str, Any]:
    known = plan.uncertainty
    ends = [known and known.low_usd_per_hour, known and known.high_usd_per_hour]
    return {
        **picked(plan, "answered holds"),
        "usd_per_hour": plan.usd_per_hour if plan.answered else None,
        **picked(plan, "usd_per_million=fleet.cost.usd_per_million gpus"),
        "pools": {
            pool.name: f"{pool.replicas} x {pool.deployment.label}, {pool.deployment.model.id}"
            for pool in (plan.fleet.pools if plan.fleet else ())
        },
        "interval_usd_per_hour": None if None in ends else ends,
    }
