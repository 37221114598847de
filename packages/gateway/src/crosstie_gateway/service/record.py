"""Records what was served as a trace in Mooncake's format: arrivals, lengths and shared beginnings, and no text.

The loop only queues ended requests; a thread hashes and writes. A failing file stops the recording for a while and
nothing else.

A prompt is a number for each block of 512 tokens, the same for the same beginning. Blocks are cut by bytes, at a length
fixed for each model; the engine's count says how many there are. The numbers are keyed hashes: without the key nobody
can check a guessed prompt.
"""

import asyncio
import contextlib
from collections import deque
from hashlib import blake2b
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from crosstie.core.histogram import Family
from crosstie.wire.files import EXHAUSTED
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.process import BackgroundThread, Component, GatewayProcess
from crosstie_gateway.service.trace_file import TraceFile

_WRITE_EVERY_S = 0.25
_TRY_AGAIN_S = 5.0
# Bytes of prompts that may wait to be hashed, and bytes of a batch of lines.
_MOST_WAITING = 64 * 2**20
_MOST_BATCH = 2**20
_RECORDED = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses"))
BLOCK_TOKENS = 512
_BITS = 53
# Bytes a token of anything that is text.
_LEAST_BYTES, _MOST_BYTES = 1.0, 16.0
_encode = msgspec.json.Encoder().encode


class TrafficRecorder(Component):
    def __init__(self, path: Path, *, most_mib: int = 64, keep: int = 8, try_again_s: float = _TRY_AGAIN_S):
        self.file = TraceFile(path, most_mib * 2**20, keep)
        self.try_again_s = try_again_s
        self.recorded = 0
        # Turned away by the loop, and lost by the thread: a number that both add to would miss some.
        self._turned_away = self._lost = 0
        # Why nothing is being recorded; empty while it is.
        self.why = ""
        self._again_at = 0.0
        # Those that have ended with their bodies, and bytes of them: handed over by the loop, taken by the thread.
        self._records: deque[tuple[RequestRecord, bytes]] = deque()
        self._given = self._taken = 0
        self._missed_before = 0
        # What cannot be written is reported now, not when the first request has been lost.
        self._thread = BackgroundThread("recorder", self._write, _WRITE_EVERY_S, first=self._find_out, last=self._close)

    @property
    def dropped(self) -> int:
        return self._turned_away + self._lost

    async def start(self, process: GatewayProcess) -> None:
        self.file.check()
        self._process, self._gateway = process, process.gateway
        self._gateway.listeners.append(self._on_record)
        self._thread.start()

    async def stop(self) -> None:
        # As long as a large trace takes to be put in order, on a slow disk.
        await asyncio.to_thread(self._thread.stop, 30.0)

    def families(self) -> list[Family]:
        failed = bool(self.why) or not self._thread.alive
        return [
            ("crosstie_recorded_total", "counter", "Requests that were recorded.", [({}, self.recorded)]),
            (
                "crosstie_record_dropped_total", "counter",
                "Requests that were not recorded: the file could not be written, or not as fast as they came.",
                [({}, self.dropped)],
            ),
            ("crosstie_record_failed", "gauge", "1 while nothing can be recorded.", [({}, int(failed))]),
        ]  # fmt: skip

    # On the loop

    def _on_record(self, record: RequestRecord) -> None:
        request = record.request
        if record.how != "served" or record.path not in _RECORDED or request is None:
            return
        size = len(request.body)
        if self._given - self._taken + size > _MOST_WAITING:
            self._turned_away += 1
            return
        self._given += size
        self._records.append((record, request.body))

    # In the thread

    def _write(self) -> None:
        if self.why and monotonic() < self._again_at and not self._thread.stopping:
            self._drop()
            return
        while self._records:
            taken: list[tuple[RequestRecord, bytes]] = []
            batch: list[tuple[int, bytes]] = []
            size = 0
            try:
                self.file.ready()
                while self._records and size < _MOST_BATCH:
                    taken.append(self._records.popleft())
                    record, body = taken[-1]
                    self._taken += len(body)
                    batch.append(self._line(record, body))
                    size += len(batch[-1][1])
                batch.sort(key=lambda line: line[0])
                self.file.append(b"".join(line for _, line in batch))
            except OSError as error:
                if error.errno in EXHAUSTED and not self._thread.stopping:
                    # That no file is left for now says nothing about this one: all of them wait.
                    self._taken -= sum(len(body) for _, body in taken)
                    self._records.extendleft(reversed(taken))
                else:
                    self._failed(error, len(taken))
                return
            self._wrote(len(batch))

    def _line(self, record: RequestRecord, body: bytes) -> tuple[int, bytes]:
        """Raises OSError."""
        file, tokens, prompt = self.file, max(record.input_tokens, 1), prompt_of(body)
        arrival_ms = max(int((record.arrived_at - file.began) * 1e3 * self._gateway.speed), 0)
        measure = file.measures.get(record.model, 0.0)
        if not measure and tokens > BLOCK_TOKENS:
            learnt = self._gateway.live.lengths.bytes_per_token(record.model)
            measure = file.measure(record.model, bytes_per_token(prompt, tokens, learnt))
        line: dict[str, Any] = {
            "timestamp": arrival_ms,
            "input_length": tokens,
            "output_length": record.output_tokens,
            "hash_ids": block_ids(file.key, record.model, prompt, tokens, measure),
            "model": record.model,
        }
        if record.class_name:
            line["class"] = record.class_name
        line.update(_answered(record, self._gateway.speed))
        return arrival_ms, _encode(line) + b"\n"

    def _find_out(self) -> None:
        """Whether anything could be written."""
        try:
            self.file.append(b"")
        except OSError as error:
            self._failed(error, 0)

    def _wrote(self, requests: int) -> None:
        self.recorded += requests
        if self.why:
            self.why = ""
            missed = self.dropped - self._missed_before
            sentence = f"recording to {self.file.path} again; {missed} requests are missing from it"
            self._process.notify_from_thread(Notice("record_resumed", "info", sentence, missed=missed))

    def _failed(self, error: OSError, requests: int) -> None:
        self._again_at = monotonic() + self.try_again_s
        if not self.why:
            self._missed_before = self.dropped
            why = error.strerror or str(error)
            sentence = f"NOT RECORDING to {self.file.path}: {why}; serving goes on, and it is tried again"
            self._process.notify_from_thread(Notice("record_failed", "error", sentence, why=why))
            self.why = why
        self._lost += requests
        self._drop()
        self.file.release()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self.file.close()

    def _drop(self) -> None:
        while self._records:
            _, body = self._records.popleft()
            self._taken += len(body)
            self._lost += 1


def _answered(record: RequestRecord, speed: float) -> dict[str, Any]:
    """The backend that answered and how fast, on the clock of the fleet; what was not seen is left out."""
    said: dict[str, Any] = {"pool": record.pool}
    if record.cached_tokens:
        said["cached_length"] = record.cached_tokens
    # Of an answer in one piece nobody saw when its first token was there.
    if record.streamed and record.ttft_s is not None:
        said["ttft_ms"] = round(record.ttft_s * speed * 1e3, 3)
        tpot_s = record.tpot_s(speed)
        if tpot_s is not None:
            said["tpot_ms"] = round(tpot_s * 1e3, 3)
    return said


# Prompts


class _Prompt(msgspec.Struct):
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Prompt).decode


def prompt_of(body: bytes) -> bytes:
    """What the model reads, in about the order in which it does; without what differs between equal prompts."""
    try:
        prompt = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    return b"".join(msgspec.structs.astuple(prompt))


def bytes_per_token(prompt: bytes, tokens: int, otherwise: float) -> float:
    ratio = len(prompt) / max(tokens, 1)
    # Pictures are many bytes and few tokens, and say nothing of text.
    return ratio if _LEAST_BYTES <= ratio <= _MOST_BYTES else min(max(otherwise, _LEAST_BYTES), _MOST_BYTES)


def block_ids(key: bytes, model: str, prompt: bytes, tokens: int, bytes_a_token: float) -> list[int]:
    """As many as the prompt's tokens have blocks. The last is of all of it, so that only equal prompts share it."""
    blocks = max(-(-tokens // BLOCK_TOKENS), 1)
    size = max(int(BLOCK_TOKENS * bytes_a_token), 1)
    running = blake2b(model.encode() + b"\0", digest_size=8, key=key)
    view = memoryview(prompt)
    ids = []
    whole = min(blocks - 1, len(prompt) // size)
    for index in range(whole):
        running.update(view[index * size : (index + 1) * size])
        ids.append(running.digest())
    running.update(view[whole * size :])
    for index in range(whole, blocks):
        end = running.copy()
        end.update(b"\0%d" % index)
        ids.append(end.digest())
    # Numbers that every reader of JSON keeps exactly.
    return [int.from_bytes(digest, "big") >> (64 - _BITS) for digest in ids]
