"""Pools on trial: a share of a model's requests is copied to one and compared, or sent to one while it does well.

A copy is made after the answer, past router, keys and accounts: three greedy chats, two to a backend in service, whose
difference is the noise, and one to the pool on trial. They are held to what `crosstie parity` measures. Of several
workers the first copies its own requests.
"""

import asyncio
import random
from collections import Counter, deque
from statistics import median
from time import monotonic
from typing import Any, Final

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Pool
from crosstie.core.histogram import Family
from crosstie.prove.parity.endpoint import Asking, ParityEndpoint, Passes, Rejected
from crosstie.prove.parity.prompts import OfferedTool, Prompt
from crosstie.prove.parity.samples import Sample
from crosstie.prove.parity.verdict import Parity, judged
from crosstie.route.ask import Ask
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.interfaces import Steering, TrialPools
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.service.trial_view import LEAST_FAILED, TrialGauge, TrialView, readiness, together
from crosstie_gateway.service.worker_link import Done, TrialsAnswer, TrialsRequest, TrialStopped
from crosstie_gateway.wire.tasks import Tasks

_PATH: Final = "/v1/chat/completions"
# Copies at once; longer requests are not copied.
_MOST_AT_ONCE: Final = 2
_MOST_BYTES: Final = 2**18
# Compared answers that are kept, and how often all of them are judged again.
_KEPT, _JUDGE_EVERY = 128, 8
# Short answers with few alternatives, so that what is kept stays small.
_ASKING: Final = Asking(top=10, tokens=32, timeout_s=60.0)
# Latencies of each side that are kept, and below which nothing is said of them.
_LATEST, _LEAST = 200, 30
# Latencies are looked at once in so many requests.
_LOOK_EVERY = 16
# Differences below these are nobody's business, whatever their ratio.
_LEAST_TTFT_S, _LEAST_TOKEN_S = 0.02, 0.002


class _Copied(msgspec.Struct):
    """What a copy has of a request: what is asked, and nothing of sampling."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Copied).decode


class Trial:
    """One pool's trial, while its settings stay as they are."""

    def __init__(self, pool: Pool, faults: int):
        self.pool = pool
        self.copies: Counter[str] = Counter()
        self.trios: deque[tuple[Sample, Sample, Sample]] = deque(maxlen=_KEPT)
        self.ratios: deque[float] = deque(maxlen=_KEPT)
        self.parity: Parity | None = None
        self.under_way = 0
        # The canary: requests that it has served, faults before it began, and latencies of it and of other pools.
        self.served, self.noted, self.faults_before, self.stopped = 0, 0, faults, ""
        self.ttft_s: tuple[deque[float], deque[float]] = (deque(maxlen=_LATEST), deque(maxlen=_LATEST))
        self.token_s: tuple[deque[float], deque[float]] = (deque(maxlen=_LATEST), deque(maxlen=_LATEST))

    def is_about(self, model: str, class_name: str | None) -> bool:
        return self.pool.model == model and self.pool.trial_class in (None, class_name)


class TrialsService(Component, TrialPools):
    async def start(self, process: GatewayProcess) -> None:
        self._process, self._gateway = process, process.gateway
        self._trials: dict[str, Trial] = {}
        self._tasks = Tasks()
        # Which of them take log-probabilities is learnt once.
        self._endpoints: dict[str, ParityEndpoint] = {}
        self._gateway.listeners.append(self._on_record)
        process.on(TrialsRequest, lambda _: TrialsAnswer(self.views()))
        process.on(TrialStopped, self._on_stopped)
        self.reloaded(process.fleet)

    def reloaded(self, fleet: Fleet) -> None:
        """Results of a pool stay while its trial's settings do."""
        before, self._trials = self._trials, {}
        for pool in fleet.pools:
            if pool.shadow or pool.canary is not None:
                known = before.get(pool.name)
                same = known is not None and _settings(known.pool) == _settings(pool)
                faults = self._gateway.metrics.faults[pool.name]
                self._trials[pool.name] = known if known is not None and same else Trial(pool, faults)
        sends = any(trial.pool.canary is not None for trial in self._trials.values())
        self._gateway.context.trials = self if sends else None

    async def stop(self) -> None:
        await self._tasks.cancel()

    # The canary

    def steer(self, ask: Ask) -> Steering:
        never: tuple[str, ...] = ()
        first: tuple[str, ...] = ()
        pools = self._gateway.live.by_model.get(ask.model, ())
        if ask.pin is not None or ask.tried:
            return Steering(never, first)
        for pool in pools:
            trial = self._trials.get(pool.name)
            if trial is None or trial.pool.canary is None:
                continue
            chosen = trial.is_about(ask.model, ask.class_name) and random.random() < trial.pool.canary
            own = tuple(replica.key for replica in pool.replicas)
            if trial.stopped or not chosen:
                others = [replica for other in pools if other is not pool for replica in other.replicas]
                # Better than nobody, unless it has failed.
                if trial.stopped or any(replica.up and not replica.draining for replica in others):
                    never += own
            else:
                first += tuple(replica.key for other in pools if other is not pool for replica in other.replicas)
        return Steering(never, first)

    def _on_record(self, record: RequestRecord) -> None:
        for trial in self._trials.values():
            if not trial.is_about(record.model, record.class_name):
                continue
            if trial.pool.canary is not None and not trial.stopped:
                self._note(trial, record)
            if self._process.row == 0 and trial.pool.shadow and random.random() < trial.pool.shadow:
                self._copy(trial, record)

    def _note(self, trial: Trial, record: RequestRecord) -> None:
        if record.how == "served":
            trial.noted += 1
            is_other = record.pool != trial.pool.name
            trial.served += not is_other
            if record.streamed and record.ttft_s is not None:
                trial.ttft_s[is_other].append(record.ttft_s)
            if record.output_tokens:
                trial.token_s[is_other].append(record.seconds / record.output_tokens)
        why = self._fault_of(trial)
        if why:
            self._stop(trial, why)

    def _faults(self, trial: Trial) -> int:
        return self._gateway.metrics.faults[trial.pool.name] - trial.faults_before

    def _fault_of(self, trial: Trial) -> str:
        pool, faults = trial.pool, self._faults(trial)
        asked = trial.served + faults
        if faults >= LEAST_FAILED and faults > pool.max_failed * asked:
            return f"{faults} of {asked} requests failed there, and {pool.max_failed:.1%} may"
        if trial.noted % _LOOK_EVERY:
            return ""
        sides = ("first tokens", trial.ttft_s, _LEAST_TTFT_S), ("tokens", trial.token_s, _LEAST_TOKEN_S)
        for what, (own, others), least_s in sides:
            ratio = _ratio(own, others)
            if ratio is not None and ratio > pool.max_slower and median(own) - median(others) > least_s:
                return f"{what} take {ratio:.2f} times as long as elsewhere, and may {pool.max_slower:g} times"
        return ""

    def _stop(self, trial: Trial, why: str) -> None:
        """Sends all requests to the other pools, until the file changes this trial."""
        if trial.pool.canary is None or trial.stopped:
            return
        trial.stopped = why
        name = trial.pool.name
        sentence = f"pool {name}: its canary has ended, requests go to the other pools again: {why}"
        self._process.notify(Notice("canary_stopped", "warning", sentence, pool=name, why=why))
        self._tasks.spawn(self._process.ask_others(TrialStopped(name, why)))

    def _on_stopped(self, message: TrialStopped) -> Done:
        trial = self._trials.get(message.pool)
        if trial is not None:
            trial.stopped = trial.stopped or message.why
        return Done()

    # Shadow traffic

    def _copy(self, trial: Trial, record: RequestRecord) -> None:
        request = record.request
        if record.how != "served" or record.path != _PATH or request is None or record.pool == trial.pool.name:
            return
        reference, tried = self._gateway.backends.get(record.backend), self._on_trial(trial)
        # Nobody pays a provider for a copy.
        if reference is None or reference.pool.token_price is not None or tried is None:
            trial.copies["no backend"] += 1
        elif len(request.body) > _MOST_BYTES:
            trial.copies["too long"] += 1
        elif trial.under_way >= _MOST_AT_ONCE or len(self._gateway.waiting):
            # Clients come first.
            trial.copies["no room"] += 1
        else:
            trial.under_way += 1
            self._tasks.spawn(self._compare(trial, request.body, reference, tried))

    def _on_trial(self, trial: Trial) -> Backend | None:
        backends = [backend for backend in self._gateway.backends.values() if backend.pool.name == trial.pool.name]
        up = [backend for backend in backends if backend.replica.up]
        return min(up, key=lambda backend: backend.replica.in_flight, default=None)

    async def _endpoint(self, backend: Backend) -> ParityEndpoint:
        key = backend.replica.key
        known = self._endpoints.get(key)
        if known is None or known.origin is not backend.origin:
            given = backend.authorization.removeprefix(b"Bearer ").decode() if backend.authorization else None
            known = ParityEndpoint(key, model=backend.model, api_key=given, asking=_ASKING, origin=backend.origin)
            await known.learn_logprobs()
            self._endpoints[key] = known
        return known

    async def _compare(self, trial: Trial, body: bytes, reference: Backend, tried: Backend) -> None:
        failing = "failed in service"
        try:
            copied = await asyncio.to_thread(_decode, body)
            asked = {name: value for name, value in msgspec.structs.asdict(copied).items() if value is not None}
            prompt = _prompt_of(copied)
            a = await self._endpoint(reference)
            first, a_s = await _timed(a, prompt, asked)
            again, _ = await _timed(a, prompt, asked)
            failing = "failed"
            b = await self._endpoint(tried)
            other, b_s = await _timed(b, prompt, asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            trial.copies["not read"] += 1
        except (BadInput, Rejected, OSError):
            trial.copies[failing] += 1
        else:
            if first.calls:
                # Whether a tool was to be called is known by the original that does.
                for sample in (first, again, other):
                    sample.prompt = msgspec.structs.replace(prompt, kind="tool")
            trial.copies["compared"] += 1
            trial.ratios.append(b_s / max(a_s, 1e-6))
            trial.trios.append((first, again, other))
            if trial.copies["compared"] % _JUDGE_EVERY == 0:
                await self._judge(trial, a, b)
        finally:
            trial.under_way -= 1

    async def _judge(self, trial: Trial, a: ParityEndpoint, b: ParityEndpoint) -> None:
        first, again, other = zip(*trial.trios, strict=True)
        passes = Passes(
            a_model=a.model, b_model=b.model, way=None, top=min(a.top, b.top), concurrency=1, first=first, again=again,
            other=other, emulated=a.emulated or b.emulated,
        )  # fmt: skip
        trial.parity = await asyncio.to_thread(judged, a.url, b.url, passes)
        differing = [gauge.name for gauge in trial.parity.gauges if gauge.says == "differs"]
        if differing:
            self._stop(trial, f"its answers differ ({', '.join(differing)})")

    # What is known

    def views(self) -> tuple[TrialView, ...]:
        return tuple(self._view(trial) for trial in self._trials.values())

    def _view(self, trial: Trial) -> TrialView:
        pool, parity = trial.pool, trial.parity
        gauges = parity.gauges if parity is not None else ()
        made = TrialView(
            pool=pool.name, model=pool.model, class_name=pool.trial_class, shadow=pool.shadow, canary=pool.canary,
            copies=dict(trial.copies), compared=trial.copies["compared"],
            verdict=parity.verdict if parity is not None else None,
            gauges=msgspec.convert(gauges, tuple[TrialGauge, ...], from_attributes=True),
            slower=median(trial.ratios) if trial.ratios else None, served=trial.served,
            faults=self._faults(trial) if pool.canary is not None else 0, ttft_ratio=_ratio(*trial.ttft_s),
            token_ratio=_ratio(*trial.token_s), stopped=trial.stopped,
            emulated=parity is not None and parity.emulated, ready="", why=(),
        )  # fmt: skip
        return readiness(made, pool.max_slower, pool.max_failed)

    async def of_all(self) -> list[TrialView]:
        """As all processes have it."""
        by_pool: dict[str, list[TrialView]] = {view.pool: [view] for view in self.views()}
        for answer in await self._process.ask_others(TrialsRequest()):
            if isinstance(answer, TrialsAnswer):
                for view in answer.trials:
                    by_pool.setdefault(view.pool, []).append(view)
        pools = {name: trial.pool for name, trial in self._trials.items()}
        return [
            together(views, pools[name].max_slower, pools[name].max_failed)
            for name, views in by_pool.items() if name in pools
        ]  # fmt: skip

    def families(self) -> list[Family]:
        if not self._trials:
            return []
        views = self.views()
        copies = [
            ({"pool": view.pool, "outcome": outcome}, float(count))
            for view in views for outcome, count in ({"compared": 0, "failed": 0} | view.copies).items()
        ]  # fmt: skip
        said = {"no": -1.0, "not yet": 0.0, "yes": 1.0}
        return [
            ("crosstie_shadow_copies_total", "counter", "Copies of requests, by what came of them.", copies),
            ("crosstie_trial_ready", "gauge", "1 where a pool on trial is ready, -1 where it is not, 0: not known yet.",
             [({"pool": view.pool}, said[view.ready]) for view in views]),
            ("crosstie_canary_requests_total", "counter", "Requests that canaries have served.",
             [({"pool": view.pool}, float(view.served)) for view in views if view.canary is not None]),
            ("crosstie_canary_stopped", "gauge", "1 where a canary has ended for what it did.",
             [({"pool": view.pool}, float(bool(view.stopped))) for view in views if view.canary is not None]),
        ]  # fmt: skip


async def _timed(endpoint: ParityEndpoint, prompt: Prompt, asked: dict[str, Any]) -> tuple[Sample, float]:
    """Raises Rejected where it does not answer."""
    began = monotonic()
    sample = await endpoint.answer(prompt, asked)
    if sample.error:
        raise Rejected(sample.error)
    return sample, monotonic() - began


def _settings(pool: Pool) -> tuple[object, ...]:
    return pool.model, pool.shadow, pool.canary, pool.trial_class, pool.max_failed, pool.max_slower


def _ratio(own: deque[float], others: deque[float]) -> float | None:
    """Of medians; None: there are too few of either."""
    if len(own) < _LEAST or len(others) < _LEAST:
        return None
    return median(own) / max(median(others), 1e-9)


def _prompt_of(copied: _Copied) -> Prompt:
    said = [message.get("content") for message in copied.messages]
    text = "\n\n".join(part for part in said if isinstance(part, str))
    is_json = (copied.response_format or {}).get("type") in ("json_object", "json_schema")
    tools = tuple(made for tool in copied.tools or () if (made := _tool_of(tool)) is not None)
    return Prompt(id="", language="", kind="json" if is_json else "chat", text=text, tools=tools)


def _tool_of(tool: dict[str, Any]) -> OfferedTool | None:
    try:
        function = tool["function"]
        schema = function.get("parameters") or {}
        return OfferedTool(
            name=str(function["name"]), description="", properties=dict(schema.get("properties") or {}),
            required=tuple(schema.get("required") or ()),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
