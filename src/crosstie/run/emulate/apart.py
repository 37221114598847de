"""Prefill and decode replicas that hand a cache over as vLLM's NIXL connector and its proxies have them do.

Whoever sends a request to a prefill replica asks for one token and `do_remote_decode`, and gets a handle back; the
decode replica that is given the handle waits as long as the transfer would take, and computes only the last prompt
token. Handles live as long as vLLM's lease on the blocks; without a valid one the prompt is computed again.
"""

import asyncio
import json
from typing import Any

from crosstie.core.disaggregated import Disaggregated
from crosstie.perf.disaggregated import Sides, transfer
from crosstie.run.emulate.answers import AnswerShape, AnswerUsage
from crosstie.run.emulate.replica import Emulated, EmulatedReplica
from crosstie.run.emulate.requests import GenerationRequest, bad_request
from crosstie.run.emulate.server import EmulatedServer, Generating
from crosstie.run.wire.server import Reply

# vLLM keeps the blocks that long for whoever fetches them (docs/design/nixl_kv_cache_lease.md, vllm@a014e35f).
LEASE_S = 30.0


class CacheHandover:
    """What one service's prefill replicas hold for its decode replicas; seconds are emulated ones."""

    def __init__(self, service: Disaggregated):
        self._sides = Sides([service])
        self._handles: dict[str, float] = {}
        self._made = 0

    def offer(self, name: str, now: float) -> str:
        self._handles = {one: ends for one, ends in self._handles.items() if ends > now}
        self._made += 1
        handle = f"{name}-{self._made}"
        self._handles[handle] = now + LEASE_S
        return handle

    def take(self, handle: object, now: float) -> bool:
        """Whether the cache is still there; it is fetched once."""
        return self._handles.pop(str(handle), 0.0) > now

    def seconds(self, tokens: int) -> float:
        moved = transfer(self._sides, float(tokens))
        return float((moved.start_s + moved.wire_s)[0, 0])


class _WithHandle(AnswerShape):
    """An answer that carries the handle of the cache it leaves behind."""

    def __init__(self, inner: AnswerShape, server: "PrefillServer"):
        self._inner, self._server = inner, server

    def whole(self, text: str, usage: AnswerUsage) -> bytes:
        server = self._server
        said = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": server.name,
            "remote_request_id": server.handover.offer(server.name, server.replica.now()),
            "remote_block_ids": [list(range(-(-usage.prompt // server.block_tokens)))],
            "remote_host": server.host,
            "remote_port": server.port,
            "tp_size": server.replica.emulated.deployment.parallelism.tp,
        }
        plain = self._inner.whole(text, usage)
        return plain[:-1] + b',"kv_transfer_params":' + json.dumps(said).encode() + b"}"


class PrefillServer(EmulatedServer):
    role = "prefill"

    def __init__(
        self, replica: EmulatedReplica, index: int, handover: CacheHandover, block_tokens: int, *, seed: int = 0
    ):
        super().__init__(replica, index, seed=seed)
        self.handover, self.block_tokens = handover, block_tokens

    def _begin(self, reply: Reply, shape: AnswerShape, wanted: GenerationRequest) -> None:
        if not (wanted.handover or {}).get("do_remote_decode"):
            super()._begin(reply, shape, wanted)
            return
        if wanted.streams or wanted.output_tokens != 1:
            raise bad_request("a prefill replica is asked for max_tokens=1 and no stream", "max_tokens")
        super()._begin(reply, _WithHandle(shape, self), wanted)


class DecodeServer(EmulatedServer):
    role = "decode"

    def __init__(self, replica: EmulatedReplica, index: int, handover: CacheHandover, *, seed: int = 0):
        super().__init__(replica, index, seed=seed)
        self.handover = handover

    def _begin(self, reply: Reply, shape: AnswerShape, wanted: GenerationRequest) -> None:
        given = wanted.handover or {}
        handed = given.get("do_remote_prefill") and self.handover.take(
            given.get("remote_request_id"), self.replica.now()
        )
        if not handed:
            super()._begin(reply, shape, wanted)
            return
        self._check_room()
        moved_s = self.handover.seconds(wanted.prompt_tokens) / self.replica.speed
        Generating(self, reply, shape, wanted, handed_over_after_s=moved_s)


def sides(
    loop: asyncio.AbstractEventLoop, emulated: Emulated, kinds: tuple[Emulated, Emulated], index: int, seed: int,
    made_of: dict[str, Any],
) -> list[EmulatedServer]:  # fmt: skip
    """Both kinds of replicas of one service, each with its name: pool/0/prefill/0."""
    service = emulated.service
    assert service is not None
    handover, block = CacheHandover(service), int(service.connector.block_tokens.value)
    found: list[EmulatedServer] = [
        PrefillServer(EmulatedReplica(loop, kinds[0], **made_of), index, handover, block, seed=seed)
        for _ in range(service.prefill_replicas)
    ]
    found += [
        DecodeServer(EmulatedReplica(loop, kinds[1], **made_of), index, handover, seed=seed)
        for _ in range(service.decode_replicas)
    ]
    counts: dict[str, int] = {}
    for one in found:
        one.rename(f"{one.name}/{one.role}/{counts.get(one.role, 0)}")
        counts[one.role] = counts.get(one.role, 0) + 1
    return found
