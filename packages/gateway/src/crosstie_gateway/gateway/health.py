"""Looks after a backend: asks whether it is well, and reads its load off its metrics."""

import asyncio
from math import inf

from crosstie.wire.fetch import Answer
from crosstie.wire.files import is_exhausted
from crosstie.wire.way import TlsRefused
from crosstie_gateway.gateway.backend import ENGINES, Backend, engine_load
from crosstie_gateway.gateway.body import owner_of_models
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.errors import without_address

REFUSES = "it refuses connections"
# A page that an engine did not have may come with its next version.
_ASK_AGAIN_S = 60.0
_MISSING = (404, 405, 501)
# A provider is asked for the list of its models, and not as often as one's own.
_PROVIDER_EVERY_S = 30.0


async def watch(context: Context, backend: Backend) -> None:
    """Until it is cancelled."""
    due, read_at = 0.0, -inf
    while True:
        serving, bought = context.serving, backend.pool.token_price is not None
        now = context.loop.time()
        workers = context.workers
        if now >= due:
            if workers is None or workers.takes_probe(backend):
                await probe(context, backend)
            due = now + (max(serving.health_every_s, _PROVIDER_EVERY_S) if bought else serving.health_every_s)
        # A backend that has just not answered is first of all asked once more whether it is well.
        if backend.healthy and not backend.fails and not bought:
            # What another worker has read costs nothing to look at.
            is_due = now - read_at >= serving.metrics_every_s if workers is None else workers.takes_load(backend)
            if is_due:
                read_at = now
                await _read_load(context, backend)
            # Each by itself: nobody tells the others which engine it is.
            if not backend.identified:
                await _identify(context, backend)
        else:
            # An engine that comes back has another load.
            read_at = -inf
        if backend.judge(context.now()):
            context.on_backend_changed(backend)
        await asyncio.sleep(max(min(serving.metrics_every_s, due - context.loop.time()), 0.05))


async def probe(context: Context, backend: Backend) -> None:
    at = backend.origin.address
    fault, refused, answered = None, False, False
    try:
        answer = await _get(context, backend, f"{at.root}/health")
        if answer is None:
            answer = await _get(context, backend, f"{backend.base.decode()}/models")
        if answer is not None and answer.status >= 500:
            fault, answered = f"its health check answered {answer.status}", True
        elif answer is not None and answer.status == 407:
            fault, answered = "its proxy wants other credentials (407)", True
    except (ConnectionRefusedError, FileNotFoundError):
        # The file of a socket is there while somebody listens.
        fault, refused = REFUSES, True
    except TlsRefused as error:
        # No second look at it will do: somebody has to mend it.
        fault, refused = without_address(error), True
    except OSError as error:
        if is_exhausted(error):
            # It was not asked at all.
            context.on_exhausted()
            return
        fault = f"its health check failed: {without_address(error)}"
    changed = backend.probed(fault, context.now(), refused=refused, answered=answered)
    if context.workers is not None:
        context.workers.probed(backend, fault, refused=refused)
    if changed:
        context.on_backend_changed(backend)


async def _identify(context: Context, backend: Backend) -> None:
    """Finds out which engine it is; for unknown ones the fleet file's word stays."""
    try:
        answer = await _get(context, backend, f"{backend.base.decode()}/models")
    except OSError:
        # To be asked again.
        return
    backend.identified = True
    if answer is not None:
        backend.engine = ENGINES.get(owner_of_models(answer.body), backend.engine)


async def _read_load(context: Context, backend: Backend) -> None:
    try:
        answer = await _get(context, backend, f"{backend.origin.address.root}/metrics")
    except OSError:
        # Whether it is well is the probe's to say.
        return
    load = engine_load(answer.body) if answer is not None and answer.status == 200 else None
    if load is not None:
        lasts_s = context.serving.metrics_last_s
        backend.replica.report(load.running, load.waiting, load.kv_used_fraction, context.now(), lasts_s)
        if context.workers is not None:
            context.workers.reported(backend, load)


async def _get(context: Context, backend: Backend, path: str) -> Answer | None:
    """None where the engine has no such page."""
    now = context.loop.time()
    if backend.lacks.get(path, 0.0) > now:
        return None
    answer = await backend.ask("GET", path, max(context.serving.health_every_s, context.serving.connect_timeout_s))
    if answer.status in _MISSING:
        backend.lacks[path] = now + _ASK_AGAIN_S
        return None
    return answer
