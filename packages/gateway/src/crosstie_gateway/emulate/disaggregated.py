"""Prefill and decode replicas that hand a cache over as engines and their proxies have them do.

vLLM (NIXL connector): a request for one token with `do_remote_decode` gets a handle from the prefill replica; a decode
replica that is given the handle waits as long as the transfer takes and computes the last prompt token only. Handles
live as long as vLLM's lease; with a dead one the request fails (`kv_load_failure_policy`), without one the prompt is
computed where it is decoded.

SGLang (bootstrap): both replicas get the request with the same room; decode waits for prefill, and neither takes a
request without a room.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from crosstie.core.disaggregated import Disaggregated
from crosstie.core.fleet import HANDING
from crosstie.perf.disaggregated import Sides, transfer
from crosstie_gateway.emulate.answers import AnswerShape, AnswerUsage
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.replica import Emulated, EmulatedReplica
from crosstie_gateway.emulate.requests import EngineError, GenerationRequest, bad_request
from crosstie_gateway.emulate.server import EmulatedServer, Generating
from crosstie_gateway.wire.server import Reply

# vLLM keeps blocks that long to be fetched (docs/design/nixl_kv_cache_lease.md, vllm@a014e35f).
LEASE_S = 30.0
# SGLang waits that long for the other side (SGLANG_DISAGGREGATION_WAITING_TIMEOUT, environ.py, sglang@cce0a124).
WAITING_S = 300.0


class CacheHandover:
    """What the prefill replicas of a service hold for its decode replicas; seconds are emulated ones."""

    def __init__(self, service: Disaggregated):
        self._sides = Sides([service])
        # Of each handle its replica, its end and its prompt.
        self._handles: dict[str, tuple[str, float, bytes]] = {}
        self._made = 0
        # By room: prompts that have been computed, and requests that wait for theirs.
        self._computed: dict[int, tuple[str, float, bytes]] = {}
        self._waiting: dict[int, Generating] = {}

    def offer(self, name: str, now: float, prompt: bytes = b"") -> str:
        self._handles = {name_of: kept for name_of, kept in self._handles.items() if kept[1] > now}
        self._made += 1
        handle = f"{name}-{self._made}"
        self._handles[handle] = (name, now + LEASE_S, prompt)
        return handle

    def take(self, handle: object, now: float, prompt: bytes = b"") -> bool:
        """Whether the cache is there and that prompt's. It can be taken once."""
        _, ends, of = self._handles.pop(str(handle), ("", 0.0, b""))
        return ends > now and of == prompt

    def compute(self, name: str, room: int, prompt: bytes, now: float) -> None:
        """A prefill replica has a room's prompt."""
        self._computed = {key: kept for key, kept in self._computed.items() if kept[1] > now}
        self._computed[room] = (name, now + WAITING_S, prompt)
        waiting = self._waiting.pop(room, None)
        if waiting is not None:
            self._meet(room, waiting)

    def wait(self, room: int, request: Generating) -> None:
        if room in self._waiting:
            raise bad_request(f"room {room} is taken", "bootstrap_room")
        self._waiting[room] = request
        if room in self._computed:
            self._meet(room, self._waiting.pop(room))

    def _meet(self, room: int, request: Generating) -> None:
        _, _, prompt = self._computed.pop(room)
        if prompt != request.wanted.prompt:
            request.fail(_failed("the cache in this room is another prompt's"))
        else:
            request.arrive(self.seconds(request.wanted.prompt_tokens))

    def time_out(self, room: int) -> None:
        request = self._waiting.pop(room, None)
        if request is not None:
            request.fail(_failed(f"Request {room} timed out waiting for its cache"))

    @property
    def waiting(self) -> int:
        """Requests whose clients are there that wait for their prompts."""
        return sum(not request.reply.gone for request in self._waiting.values())

    def lose(self, name: str) -> None:
        """All that a prefill replica held."""
        self._handles = {key: kept for key, kept in self._handles.items() if kept[0] != name}
        self._computed = {key: kept for key, kept in self._computed.items() if kept[0] != name}

    def seconds(self, tokens: int) -> float:
        moved = transfer(self._sides, float(tokens))
        return float((moved.start_s + moved.wire_s)[0, 0])


def _failed(message: str) -> EngineError:
    return EngineError(500, "InternalServerError", message)


class _Finishing(AnswerShape):
    """An answer at whose end something is done, and reported in it."""

    def __init__(self, inner: AnswerShape, done: Callable[[AnswerUsage], dict[str, Any]]):
        self._inner, self._done = inner, done
        self.begun, self.piece = inner.begun, inner.piece  # type: ignore[method-assign]

    def ending(self, text: str, whole: str, usage: AnswerUsage) -> bytes:
        self._done(usage)
        return self._inner.ending(text, whole, usage)

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        more = self._done(usage)
        plain = self._inner.whole(text, usage)
        return plain[:-1] + b"," + json.dumps(more).encode()[1:] if more else plain


class SideServer(EmulatedServer):
    """`handing`: the protocol that it speaks; see HANDING."""

    def __init__(
        self, replica: EmulatedReplica, index: int, handover: CacheHandover, block_tokens: int, handing: str, *,
        seed: int = 0,
    ):  # fmt: skip
        super().__init__(replica, index, seed=seed)
        self.handover, self.block_tokens, self.handing = handover, block_tokens, handing

    def _room(self, wanted: GenerationRequest) -> int:
        if wanted.meeting is None:
            raise bad_request("Invalid request: Disaggregated request received without bootstrap room id.")
        host, port, room = wanted.meeting
        if not host or not port:
            raise bad_request(f"room {room} has no bootstrap_host or bootstrap_port", "bootstrap_host")
        return room


class PrefillServer(SideServer):
    role = "prefill"

    def inject(self, fault: Fault) -> None:
        if fault.kind == "crash":
            self.handover.lose(self.name)
        super().inject(fault)

    def _begin(self, reply: Reply, shape: AnswerShape, wanted: GenerationRequest) -> None:
        if self.handing == "bootstrap":
            room = self._room(wanted)

            def meet(usage: AnswerUsage) -> dict[str, Any]:
                self.handover.compute(self.name, room, wanted.prompt, self.replica.now())
                return {}

            # However many tokens are asked for, it makes the first.
            first_token = replace(wanted, output_tokens=1, written=min(wanted.written, 1))
            super()._begin(reply, _Finishing(shape, meet), first_token)
        elif not (wanted.handover or {}).get("do_remote_decode"):
            super()._begin(reply, shape, wanted)
        elif wanted.streams or wanted.output_tokens != 1:
            raise bad_request("a prefill replica is asked for max_tokens=1 and no stream", "max_tokens")
        else:
            super()._begin(reply, _Finishing(shape, lambda usage: self._params(wanted, usage)), wanted)

    def _params(self, wanted: GenerationRequest, usage: AnswerUsage) -> dict[str, Any]:
        said = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.name,
            "remote_request_id": self.handover.offer(self.name, self.replica.now(), wanted.prompt),
            "remote_block_ids": [list(range(-(-usage.prompt // self.block_tokens)))],
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": self.replica.emulated.deployment.parallelism.tp,
        }
        return {"kv_transfer_params": said}


class DecodeServer(SideServer):
    role = "decode"

    def _begin(self, reply: Reply, shape: AnswerShape, wanted: GenerationRequest) -> None:
        given = wanted.handover or {}
        if self.handing == "bootstrap":
            room = self._room(wanted)
            self._check_room()
            self.handover.wait(room, Generating(self, reply, shape, wanted, waits=True))
            self.loop.call_later(WAITING_S / self.replica.speed, self.handover.time_out, room)
        elif not given.get("do_remote_prefill"):
            super()._begin(reply, shape, wanted)
        elif not self.handover.take(given.get("remote_request_id"), self.replica.now(), wanted.prompt):
            raise _failed("KV load failed: the blocks are not there, or no longer")
        else:
            self._check_room()
            request = Generating(self, reply, shape, wanted, waits=True)
            request.arrive(self.handover.seconds(wanted.prompt_tokens))


def sides(
    loop: asyncio.AbstractEventLoop, emulated: Emulated, kinds: tuple[Emulated, Emulated], name: str, counts:
    tuple[int, int], index: int | None, seed: int, made_of: dict[str, Any],
) -> list[EmulatedServer]:  # fmt: skip
    """Both kinds of replicas of a service, each named like pool/0/prefill/0. `index`: of the service; None: they are
    counted themselves."""
    service = emulated.service
    assert service is not None
    connector = service.connector
    handover, block = CacheHandover(service), int(connector.block_tokens.value)
    handing = HANDING.get(connector.id, "nixl")
    servers: list[EmulatedServer] = []
    for made, kind, count in zip((PrefillServer, DecodeServer), kinds, counts, strict=True):
        for n in range(count):
            at = n if index is None else index
            server = made(EmulatedReplica(loop, kind, **made_of), at, handover, block, handing, seed=seed)
            server.rename(f"{name}/{server.role}/{n}")
            servers.append(server)
    return servers
