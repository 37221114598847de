"""What the gateway answers, by path: the API, and its own pages beside it."""

from collections.abc import Callable
from urllib.parse import unquote

import msgspec

from crosstie.route.ask import Ask
from crosstie.route.decision import Considered
from crosstie.route.disaggregated import choose_prefill
from crosstie.route.live import Replica
from crosstie_gateway.gateway.attempt import OWN_HEADERS
from crosstie_gateway.gateway.errors import RequestRejected, error_body, retry_after
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.guard import Guard
from crosstie_gateway.gateway.interfaces import CountedPrompt, Tokenizing
from crosstie_gateway.gateway.messages import COUNT_TOKENS, chat_for, error_message
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.roads import SERVED, tidy_path
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

# For those who watch the gateway.
OPS = ("/health", "/ready", "/metrics")
_RESPONSES = "/v1/responses/"
_BATCHED = ("/v1/files", "/v1/batches")
_encode = msgspec.json.Encoder().encode
Page = Callable[[Gateway, Request], tuple[int, bytes, bytes]]
# What pages of other origins may read of an answer, and how long browsers remember that they may ask.
_EXPOSED = b"access-control-expose-headers: %b\r\n" % b", ".join((*OWN_HEADERS, b"retry-after"))
_REMEMBERED_S = 600
_JSON, _TEXT = b"application/json", b"text/plain; version=0.0.4; charset=utf-8"


def handler(gateway: Gateway) -> Callable[[Request, Reply], None]:
    def handle(request: Request, reply: Reply) -> None:
        path, origins = request.path, gateway.serving.cors_origins
        if origins and answers_browser(origins, request, reply):
            return
        if path not in SERVED:
            path = tidy_path(request)
        if path in SERVED:
            if request.method == "POST":
                gateway.serve(request, reply)
            else:
                reply.send(405, error_body(405, f"{path} takes POST", "method_not_allowed"), b"allow: POST\r\n")
            return
        own = gateway.context.own_pages
        if own is not None and path in own.paths:
            own.handle(request, reply)
            return
        if own is not None and path == "/" and b"text/html" in request.headers.get(b"accept", b""):
            reply.send(303, b"", b"location: /crosstie/\r\n")
            return
        if path.startswith(_BATCHED) and gateway.context.batches is not None:
            gateway.context.batches.handle(request, reply)
            return
        if path.startswith(_RESPONSES) and gateway.context.responses.is_stored:
            gateway.context.responses.handle(request, reply)
            return
        if path in OPS:
            if gateway.ops_apart:
                reply.send(404, error_body(404, f"{path} has a port of its own here", "not_found"))
                return
            _watched(gateway, request, reply, gateway.context.guard)
            return
        if path in _COUNTING and gateway.context.tokenizing is not None:
            _count_first(gateway.context.tokenizing, gateway, request, reply)
        else:
            _tell(gateway, request, reply, None)

    return gateway.front(handle)


def answers_browser(origins: tuple[str, ...], request: Request, reply: Reply) -> bool:
    """Whether it was a browser's preflight (CORS), answered here; other answers will say whether the page may read
    them. Keys come in headers that a page sets, never in cookies: credentials are not allowed."""
    origin = request.headers.get(b"origin")
    if origin is None:
        return False
    allowed = "*" in origins or origin.decode("latin-1") in origins
    if allowed:
        named = b"*" if "*" in origins else origin
        reply.lines = b"access-control-allow-origin: %b\r\nvary: origin\r\n%b" % (named, _EXPOSED)
    if request.method != "OPTIONS" or b"access-control-request-method" not in request.headers:
        return False
    wanted = request.headers.get(b"access-control-request-headers", b"authorization, content-type")
    may = b"access-control-allow-methods: GET, POST\r\naccess-control-allow-headers: %b\r\n" % wanted
    may += b"access-control-max-age: %d\r\n" % _REMEMBERED_S
    reply.start(204, may if allowed else b"", 0)
    reply.end()
    return True


def _count_first(tokenizing: Tokenizing, gateway: Gateway, request: Request, reply: Reply) -> None:
    """A page that is about the tokens of a prompt, which may take time to count. Nobody without a key makes it."""
    try:
        key_id, guard = _key_id(gateway, request), gateway.context.guard
        if guard is not None:
            guard.check_open(key_id)
        asked = chat_for(request, counting=True)[0] if request.path == COUNT_TOKENS else request
    except RequestRejected:
        _tell(gateway, request, reply, None)
    else:
        tokenizing.read(asked, reply, lambda prompt: _tell(gateway, request, reply, prompt))


def _tell(gateway: Gateway, request: Request, reply: Reply, prompt: CountedPrompt | None) -> None:
    try:
        status, body, kind = _page(gateway, request, prompt)
    except RequestRejected as refused:
        _refuse(request, reply, refused)
    else:
        reply.send(status, body, content_type=kind)


def _refuse(request: Request, reply: Reply, refused: RequestRejected) -> None:
    status, lines = refused.status, refused.headers + retry_after(refused.retry_after_s)
    body = error_body(status, str(refused), refused.code)
    reply.send(status, error_message(status, body) if request.path == COUNT_TOKENS else body, lines)


def ops_handler(gateway: Gateway) -> Callable[[Request, Reply], None]:
    """Of a port that is not for clients."""

    def handle(request: Request, reply: Reply) -> None:
        path = tidy_path(request)
        if path in OPS:
            _watched(gateway, request, reply, None)
        else:
            reply.send(404, error_body(404, f"there is no {path}; here are {', '.join(OPS)}", "not_found"))

    return handle


def _watched(gateway: Gateway, request: Request, reply: Reply, guard: Guard | None) -> None:
    """`guard`: of a port that is for clients as well."""
    workers = gateway.context.workers
    try:
        if request.path == "/metrics" and guard is not None:
            # They name backends, teams and their spending: not for all who have keys.
            guard.may_explain(guard.known(request), "metrics")
    except RequestRejected as refused:
        _refuse(request, reply, refused)
        return
    if request.path == "/metrics" and request.method == "GET" and workers is not None:
        workers.metrics_to(lambda page: reply.send(200, page.encode(), content_type=_TEXT))
    else:
        _tell(gateway, request, reply, None)


def _page(gateway: Gateway, request: Request, prompt: CountedPrompt | None = None) -> tuple[int, bytes, bytes]:
    path, method = request.path, request.method
    counting = _COUNTING.get(path)
    if counting is not None and method == "POST":
        return counting(gateway, request, prompt)
    page = _PAGES.get(path)
    if page is None and path.startswith("/v1/models/"):
        page = _model
    if page is None and path.startswith(_BATCHED):
        raise RequestRejected(404, "no batches here: the gateway was started without --batches", "not_found")
    if page is None and counting is None:
        raise RequestRejected(404, f"there is no {path}; the API is under /v1", "not_found")
    wanted = ("POST",) if counting is not None else ("GET", "HEAD")
    if page is None or method not in wanted:
        raise RequestRejected(405, f"{path} takes {wanted[0]}", "method_not_allowed")
    return page(gateway, request)


def _key_id(gateway: Gateway, request: Request) -> int:
    """Whose a page is that shows to each key its own models. Raises RequestRejected."""
    return gateway.context.guard.known(request) if gateway.context.guard is not None else 0


def _home(gateway: Gateway, request: Request) -> tuple[int, bytes, bytes]:
    """Where things are, for people who open the address in a browser."""
    own = gateway.context.own_pages
    page = "/crosstie/" if own is not None else "none here: start the gateway with --dashboard"
    places = {"gateway": "crosstie", "api": "/v1", "dashboard": page, "health": "/health", "metrics": "/metrics"}
    return 200, _encode(places), _JSON


def _health(gateway: Gateway, request: Request) -> tuple[int, bytes, bytes]:
    """The process runs; whether it can serve is `/ready`'s to say."""
    return 200, _encode({"status": "ok", "fleet": gateway.live.fleet.name}), _JSON


def _ready(gateway: Gateway, request: Request) -> tuple[int, bytes, bytes]:
    pools: dict[str, dict[str, object]] = {name: _up(replicas) for name, replicas in _by_pool(gateway).items()}
    for pool in gateway.live.pools:
        if pool.prefill is not None:
            # Of a side, those that are well; a pool has none up while either side has none.
            well = [gateway.backends[replica.key].is_well for replica in pool.replicas]
            sides = {"prefill": _up(pool.prefill.replicas), "decode": {"up": sum(well), "of": len(well)}}
            pools[pool.name] |= sides
    said = "draining" if gateway.draining else "ready" if gateway.ready else "no backend is up"
    return 200 if gateway.ready else 503, _encode({"status": said, "pools": pools}), _JSON


def _up(replicas: list[Replica]) -> dict[str, object]:
    return {"up": sum([replica.up for replica in replicas]), "of": len(replicas)}


def _by_pool(gateway: Gateway) -> dict[str, list[Replica]]:
    """A pool that hosts several models has a replica for each of them on each of its machines."""
    pools: dict[str, list[Replica]] = {}
    for pool in gateway.live.pools:
        pools.setdefault(pool.pool.name, []).extend(pool.replicas)
    return pools


def _metrics(gateway: Gateway, request: Request) -> tuple[int, bytes, bytes]:
    return 200, gateway.metrics_page().encode(), _TEXT


def _models(gateway: Gateway, request: Request) -> tuple[int, bytes, bytes]:
    return 200, _encode({"object": "list", "data": _listed(gateway, _key_id(gateway, request))}), _JSON


def _model(gateway: Gateway, request: Request) -> tuple[int, bytes, bytes]:
    name = unquote(request.path.removeprefix("/v1/models/"))
    listed = next((model for model in _listed(gateway, _key_id(gateway, request)) if model["id"] == name), None)
    if listed is None:
        raise RequestRejected(404, f"no pool serves '{name}'", "model_not_found")
    return 200, _encode(listed), _JSON


def _listed(gateway: Gateway, key_id: int) -> list[dict[str, object]]:
    live = gateway.live
    names = live.names if gateway.context.guard is None else gateway.context.guard.names(key_id)
    listed = []
    for name, model in names.items():
        having, adapter = [pool.pool for pool in live.pools if pool.pool.model == model], live.adapters.get(name)
        if adapter is not None:
            having = [pool for pool in having if pool.name in adapter]
        listed.append(
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "crosstie",
                "max_model_len": max(pool.max_context for pool in having),
                "pools": [pool.name for pool in having],
                # As vLLM says whose adapter it is.
                **({"parent": model} if adapter is not None else {}),
            }
        )
    return listed


def _explain(gateway: Gateway, request: Request, prompt: CountedPrompt | None) -> tuple[int, bytes, bytes]:
    """The decision for a request as the API would take it, without sending it. To a key it costs a request."""
    key_id, guard = _key_id(gateway, request), gateway.context.guard
    if guard is not None:
        guard.may_explain(key_id)
        guard.check_open(key_id)
    _, ask = gateway.read(request, key_id, prompt)
    _charge(gateway, key_id, request, ask)
    decision = gateway.router.decide(ask, gateway.now(), exclude=ask.tried, explain=True)
    replica, names = decision.replica, _names(gateway)
    said = {
        "policy": gateway.live.fleet.policy,
        "outcome": decision.outcome,
        "reason": decision.reason,
        "pool": replica.pool.pool.name if replica else None,
        "replica": names[replica.key] if replica else None,
        **_prompt_goes_to(gateway, replica, ask),
        "session": _session(gateway, ask, names),
        "meets_target": decision.meets,
        "request": {
            "model": ask.model,
            "class": ask.class_name,
            "input_tokens": ask.input_tokens,
            "expected_output_tokens": ask.output_tokens,
            "most_output_tokens": ask.most_output,
            "ttft_target_s": ask.ttft_s,
            "tpot_target_s": ask.tpot_s,
            "priority": ask.priority,
            "pool": ask.pin,
            "modalities": sorted(ask.modalities),
        },
        "considered": [
            _considered(gateway, considered, names)
            for considered in decision.considered
            if guard is None or guard.may_see(key_id, considered.pool)
        ],
    }
    return 200, _encode(said), _JSON


def _prompt_goes_to(gateway: Gateway, replica: Replica | None, ask: Ask) -> dict[str, object]:
    """Of a disaggregated pool: which prefill replica would compute the prompt, and how much of it that one holds."""
    if replica is None or replica.pool.prefill is None:
        return {}
    tokens = gateway.live.lengths.tokens_a_block(ask)
    choice = choose_prefill(replica.pool.prefill, ask, gateway.now(), tokens, ask.tried)
    if choice is None:
        return {"prefill": None}
    place = replica.pool.prefill.replicas.index(choice[0]) + 1
    return {"prefill": {"replica": f"{replica.pool.name}/prefill/{place}", "cached_tokens": choice[1]}}


def _session(gateway: Gateway, ask: Ask, names: dict[str, str]) -> dict[str, object] | None:
    """The session that it goes on with: where its last prompt and answer are, and how long they are kept in mind."""
    session = gateway.live.sessions.find(ask)
    if session is None:
        return None
    return {
        "home": names.get(session.home.key) if session.home else None,
        "turns": session.turns,
        "tokens": session.tokens,
        "in_flight": session.in_flight,
        "waited_for_s": max(session.until - gateway.now(), 0.0) if session.weight and not session.in_flight else 0.0,
        "usd": session.usd,
    }


def _charge(gateway: Gateway, key_id: int, request: Request, ask: Ask) -> None:
    """A page that costs a request of a key's rate, and none of its tokens. Raises RequestRejected."""
    guard = gateway.context.guard
    if guard is not None:
        record = RequestRecord(b"", request.path, 0.0, "told", 200)
        record.grant = guard.admit(key_id, ask, gateway.serving.max_open_per_key)
        guard.settle(record)


def _count_tokens(gateway: Gateway, request: Request, prompt: CountedPrompt | None) -> tuple[int, bytes, bytes]:
    """What a message of Anthropic's would be taken to have for its length: counted, or the router's estimate."""
    key_id = _key_id(gateway, request)
    _, ask = gateway.read(chat_for(request, counting=True)[0], key_id, prompt)
    _charge(gateway, key_id, request, ask)
    return 200, _encode({"input_tokens": max(round(ask.input_tokens), 1)}), _JSON


def _names(gateway: Gateway) -> dict[str, str]:
    """What replicas are called to clients: by their pool and place in it. Where they are is not for them to know."""
    return {
        replica.key: f"{pool.name}/{n}" for pool in gateway.live.pools for n, replica in enumerate(pool.replicas, 1)
    }


def _considered(gateway: Gateway, considered: Considered, names: dict[str, str]) -> dict[str, object]:
    seen, counts = considered.prediction, gateway.metrics.pools.get(considered.pool)
    return {
        "pool": considered.pool,
        "replica": None if considered.backend is None else names[considered.backend],
        "planned": considered.planned,
        "dropped": considered.dropped,
        "score": considered.score,
        "predicted": None
        if seen is None
        else {
            "ttft_s": seen.ttft_s,
            "tpot_s": seen.tpot_s,
            "usd": seen.predicted_usd,
            "cached_tokens": seen.cached_tokens,
            "joules": considered.joules,
        },
        # What the pool's last requests saw, beside what was predicted of each at its own moment.
        "of_late": counts.of_late() if counts is not None else None,
    }


_PAGES: dict[str, Page] = {
    "/": _home,
    "/health": _health,
    "/ready": _ready,
    "/metrics": _metrics,
    "/v1/models": _models,
}
# Those that are about a prompt, and so about its tokens.
_COUNTING: dict[str, Callable[[Gateway, Request, CountedPrompt | None], tuple[int, bytes, bytes]]] = {
    COUNT_TOKENS: _count_tokens,
    "/crosstie/explain": _explain,
}
