"""`crosstie serve --record`: what is in a trace, what is not, and what happens to it when files misbehave."""

import asyncio
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from errno import EMFILE
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.engines.streams import get, post
from tests.run.emulate.running import SMALL, fleet, pool
from tests.run.gateway.fakes import MODEL, Fake, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.test_serving import CHAT
from tests.run.service.processes import comes_true, command, environment, gone, serving
from tests.waiting import LIMIT_S

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.traces import read_trace
from crosstie.core.errors import BadInput
from crosstie.prove.replay.traffic import from_trace
from crosstie.wire.fetch import fetch
from crosstie_gateway.service.record import BLOCK_TOKENS, TrafficRecorder, block_ids, prompt_of
from crosstie_gateway.service.trace_file import TraceFile
from crosstie_gateway.wire.server import Reply

ROOT = Path(__file__).parents[3]
SECRET = "sk-live-4242424242"


class Counting(Fake):
    """An engine with four bytes a token, which is what it counts."""

    def _ok(self, body: dict[str, Any], reply: Reply) -> None:
        self.counted = len(json.dumps(body.get("messages") or body.get("prompt"))) // 4
        super()._ok(body, reply)

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.counted, "completion_tokens": self.tokens, "total_tokens": 0}


def words(seed: int, size: int) -> str:
    made = random.Random(seed)
    return "".join(made.choice("abcdefghij klmnopqrstuvwxyz") for _ in range(size))


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@in_folder
async def test_each_served_request_is_a_line_of_mooncake_s_format(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "trace.jsonl")
    fake = Counting()
    await fake.start()
    async with running(fleet_of(pool_of("one", fake.url), classes=(CHAT,)), components=[recorder]) as at:
        assert (await at.ask(messages=chat(words(1, 9000)))).status == 200
        said = {"model": MODEL, "prompt": words(2, 30), "stream": True}
        answer = await fetch(at.origin, "POST", "/v1/completions", body=json.dumps(said).encode())
        assert answer.status == 200
        # None of these was answered by an engine.
        assert (await at.ask(model="unknown")).status == 404
        fake.mode = "bad"
        assert (await at.ask()).status == 400
        fake.mode = "cut"
        assert (await at.ask()).status >= 500
        await until(lambda: recorder.recorded == 2)
        assert await at.metric("crosstie_recorded_total") == 2
        assert await at.metric("crosstie_record_failed") == 0
        await recorder.stop()
    fake.crash()
    first, second = lines_of(tmp_path / "trace.jsonl")
    assert list(first) == ["timestamp", "input_length", "output_length", "hash_ids", "model", "class", "pool"]
    # When a first token comes is only seen of a stream.
    assert list(second)[-3:] == ["pool", "ttft_ms", "tpot_ms"]
    assert second["ttft_ms"] > 0 <= second["tpot_ms"]
    assert (first["model"], first["class"], first["output_length"]) == (MODEL, "chat", 5)
    assert first["input_length"] == len(json.dumps(chat(words(1, 9000)))) // 4
    assert (second["input_length"], second["output_length"]) == (8, 5)
    assert 0 <= first["timestamp"] <= second["timestamp"]
    for line in (first, second):
        assert len(line["hash_ids"]) == math.ceil(line["input_length"] / BLOCK_TOKENS)
        assert all(isinstance(one, int) and 0 <= one < 2**53 for one in line["hash_ids"])


@in_folder
async def test_prompts_share_numbers_as_far_as_they_begin_alike_and_no_further(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "trace.jsonl")
    fake = Counting()
    await fake.start()
    system = words(1, 12_000)
    async with running(fleet_of(pool_of("one", fake.url)), components=[recorder]) as at:
        for text in (system + words(2, 5000), system + words(3, 9000), words(4, 5000), words(4, 5000)):
            await at.ask(messages=chat(text), temperature=random.random())
        await until(lambda: recorder.recorded == 4)
        await recorder.stop()
    fake.crash()
    one, other, third, again = (line["hash_ids"] for line in lines_of(tmp_path / "trace.jsonl"))
    alike = [a == b for a, b in zip(one, other, strict=False)]
    # 12,000 bytes are five whole blocks of 2,048 and a part of the next.
    assert alike[:5] == [True] * 5
    assert not any(alike[6:])
    assert third == again
    assert not set(third) & {*one, *other}


def test_a_conversation_that_goes_on_keeps_its_numbers_and_another_model_or_key_shares_none() -> None:
    key = b"k" * 32
    turns = [words(seed, 3000) for seed in range(4)]
    grown = [prompt_of(json.dumps({"model": "m", "messages": chat(*turns[:many])}).encode()) for many in range(1, 5)]
    ids = [block_ids(key, "m", prompt, len(prompt) // 4, 4.0) for prompt in grown]
    for shorter, longer in pairwise(ids):
        # All but the last, which was not full.
        assert longer[: len(shorter) - 1] == shorter[:-1]
        assert longer[len(shorter) - 1] != shorter[-1]
    for others in (block_ids(b"x" * 32, "m", grown[3], 3000, 4.0), block_ids(key, "n", grown[3], 3000, 4.0)):
        assert not set(others) & set(ids[3])


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1024, 1025, 5000, 200_000])
@pytest.mark.parametrize("size", [0, 10, 2047, 2048, 2049, 100_000])
def test_there_are_as_many_numbers_as_the_engine_s_count_has_blocks(tokens: int, size: int) -> None:
    found = block_ids(b"k" * 32, "m", b"x" * size, tokens, 4.0)
    assert len(found) == max(math.ceil(tokens / BLOCK_TOKENS), 1)
    assert len(set(found)) == len(found)


@in_folder
async def test_nothing_of_a_prompt_nor_its_plain_hashes_nor_a_key_nor_a_user_is_in_any_file(tmp_path: Path) -> None:
    text = words(7, 6000)
    recorder = TrafficRecorder(tmp_path / "trace.jsonl")
    fake = Counting()
    await fake.start()
    async with running(fleet_of(pool_of("one", fake.url)), components=[recorder]) as at:
        await at.ask(
            messages=chat(text), user="alice@example.com", prompt_cache_key="alices-thread",
            headers={"authorization": f"Bearer {SECRET}", "x-request-id": "alices-request"},
        )  # fmt: skip
        await until(lambda: recorder.recorded == 1)
        body = fake.hit[0][0].body
        await recorder.stop()
    fake.crash()
    files = list(tmp_path.iterdir())
    assert {one.name for one in files} == {"trace.jsonl", "trace.jsonl.salt"}
    assert (tmp_path / "trace.jsonl.salt").stat().st_mode & 0o777 == 0o600
    salt = json.loads((tmp_path / "trace.jsonl.salt").read_text().splitlines()[0])["salt"]
    trace = (tmp_path / "trace.jsonl").read_text()
    assert salt not in trace
    for content in (one.read_text() for one in files):
        assert not any(text[at : at + 5] in content for at in range(len(text) - 5))
        for secret in (SECRET, "alice", SECRET[-8:]):
            assert secret not in content
    # Whoever guesses the prompt and does not have the salt cannot find out that it is the one.
    numbers = set(lines_of(tmp_path / "trace.jsonl")[0]["hash_ids"])
    guesses = [body, prompt_of(body), text.encode(), prompt_of(body)[:2048], text.encode()[:2048]]
    for guess in guesses:
        for plain in (hashlib.md5, hashlib.sha256, hashlib.blake2b, lambda data: hashlib.blake2b(data, digest_size=8)):
            digest = plain(guess).digest()
            for order in ("big", "little"):
                value = int.from_bytes(digest[:8], order)
                assert not numbers & {value, value >> 11, value % 2**53, value % 2**63}
        assert zlib.crc32(guess) not in numbers
    unsalted = {*block_ids(b"", MODEL, prompt_of(body), 1500, 4.0), *block_ids(bytes(32), MODEL, body, 1500, 4.0)}
    assert not numbers & unsalted


# Files


def line(at_ms: int, size: int = 0) -> bytes:
    return b'{"timestamp":%d,"input_length":5,"output_length":1,"hash_ids":[%d],"model":"m%b"}\n' % (
        at_ms,
        at_ms,
        b"x" * size,
    )


def test_a_full_file_makes_room_with_whole_lines_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, most_bytes=1000, keep=2)
    order = list(range(60))
    random.Random(3).shuffle(order)
    for at_ms in order:
        file.append(line(at_ms))
    file.close()
    found = sorted(one.name for one in tmp_path.iterdir())
    assert found == ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2", "trace.jsonl.salt"]
    for name in ("trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"):
        times = [one["timestamp"] for one in lines_of(tmp_path / name)]
        assert times == sorted(times)
        assert (tmp_path / name).stat().st_size <= 1000
    kept = len(lines_of(path))
    assert sorted(one["timestamp"] for one in lines_of(path)) == sorted(order[-kept:])


APPENDS = """
import sys
from pathlib import Path
from tests.run.service.test_record import line
from crosstie_gateway.service.trace_file import TraceFile
path, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
file = TraceFile(path, most_bytes=20_000, keep=1000)
for at_ms in range(first, first + count):
    file.append(line(at_ms))
file.measure(f"model-{first}", 4.0)
file.measure("shared", float(first + 1))
file.close()
"""
# As on a disk that is nearly full: the last write gets only a part of its bytes in.
FILLS = """
import resource, sys
from pathlib import Path
from tests.run.service.test_record import line
from crosstie_gateway.service.trace_file import TraceFile
file = TraceFile(Path(sys.argv[1]), 10**6, 1)
file.append(line(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
try:
    file.append(b"".join(line(at) for at in range(2, 30)))
except OSError:
    file.append(line(40))
    print("refused")
"""


def python(code: str, folder: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    where = environment(folder)
    where["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=where, stdout=-1, text=True)


@pytest.mark.slow
def test_several_processes_append_to_one_file_and_every_line_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    workers = [python(APPENDS, tmp_path, path, str(1000 * number), "400") for number in range(3)]
    for worker in workers:
        worker.communicate(timeout=90)
        assert worker.returncode == 0
    files = [one for one in tmp_path.iterdir() if one.suffix != ".salt"]
    assert len(files) > 3
    times = [one["timestamp"] for name in files for one in lines_of(name)]
    assert sorted(times) == [1000 * number + at for number in range(3) for at in range(400)]
    again = TraceFile(path, 20_000, 1000)
    again.ready()
    assert set(again.measures) == {"model-0", "model-1000", "model-2000", "shared"}


def test_a_line_that_a_crash_has_torn_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first = TraceFile(path, 10_000, 1)
    first.append(line(1))
    first.release()
    with path.open("ab") as file:
        file.write(line(2)[:-20])
    with path.with_name("trace.jsonl.salt").open("ab") as file:
        file.write(b'{"model":"half')
    second = TraceFile(path, 10_000, 1)
    second.append(line(3))
    assert second.measure("whole", 3.5) == 3.5
    second.close()
    assert [one["timestamp"] for one in lines_of(path)] == [1, 3]
    third = TraceFile(path, 10_000, 1)
    third.ready()
    assert third.measures == {"whole": 3.5}


def test_a_restart_goes_on_with_the_same_salt_and_without_it_with_another_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    first, second, third = (TraceFile(path, 10_000, 0) for _ in range(3))
    first.append(line(1))
    second.append(line(2))
    assert (first.key, first.began) == (second.key, second.began)
    path.with_name("trace.jsonl.salt").unlink()
    third.append(line(3))
    assert third.key != first.key
    # Even where no full files are kept: it is not full, but somebody else's.
    assert [one["timestamp"] for one in lines_of(path)] == [3]
    assert [one["timestamp"] for one in lines_of(tmp_path / "trace.jsonl.1")] == [1, 2]


def test_a_full_disk_leaves_no_half_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert python(FILLS, tmp_path, path).communicate(timeout=90)[0] == "refused\n"
    assert [one["timestamp"] for one in lines_of(path)] == [1, 40]


@in_folder
async def test_a_folder_that_goes_stops_the_recording_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    recorder = TrafficRecorder(folder / "trace.jsonl", try_again_s=0.1)
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[recorder]) as at:
        await at.ask()
        await until(lambda: recorder.recorded == 1)
        shutil.rmtree(folder)
        for _ in range(3):
            assert (await at.ask()).status == 200
            await until(lambda: not recorder._records)
        await until(lambda: recorder.why)
        assert await at.metric("crosstie_record_failed") == 1
        failures = [one for one in at.notices if "NOT RECORDING" in one]
        assert len(failures) == 1
        assert "No such file" in failures[0]
        folder.mkdir()

        async def recorded_again() -> bool:
            assert (await at.ask()).status == 200
            await asyncio.sleep(0.05)
            return recorder.recorded > 1

        async with asyncio.timeout(LIMIT_S):
            while not await recorded_again():
                pass
        await until(lambda: any("again" in one for one in at.notices))
        assert await at.metric("crosstie_record_failed") == 0
        asked = len(fake.hit)
        await until(lambda: recorder.recorded + recorder.dropped == asked)
        assert await at.metric("crosstie_record_dropped_total") == recorder.dropped >= 3
        await recorder.stop()
    assert len(lines_of(folder / "trace.jsonl")) == recorder.recorded - 1


@in_folder
async def test_what_no_file_is_left_for_waits_and_is_recorded(tmp_path: Path) -> None:
    recorder, exhausted, append = TrafficRecorder(tmp_path / "trace.jsonl"), [True], TraceFile.append

    def as_the_system_has_it(file: TraceFile, lines: bytes) -> None:
        if exhausted[0] and lines:
            exhausted.append(True)
            raise OSError(EMFILE, "Too many open files")
        append(file, lines)

    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(TraceFile, "append", as_the_system_has_it)
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[recorder]) as at:
            for _ in range(3):
                assert (await at.ask()).status == 200
            await until(lambda: len(exhausted) > 2)
            exhausted[0] = False
            await until(lambda: recorder.recorded == 3)
            assert recorder.dropped == 0
            assert not recorder.why
            await recorder.stop()
    assert len(lines_of(tmp_path / "trace.jsonl")) == 3


@in_folder
async def test_a_gateway_serves_where_it_could_never_record(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "missing" / "trace.jsonl")
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[recorder]) as at:
        await until(lambda: any("NOT RECORDING" in one for one in at.notices))
        assert (await at.ask()).status == 200
        assert await at.metric("crosstie_record_failed") == 1
        await recorder.stop()


def test_what_is_no_trace_is_not_added_to(tmp_path: Path) -> None:
    other = tmp_path / "fleet.toml"
    other.write_text("format = 1\n")
    for path, why in ((other, "not of a trace"), (tmp_path, "is no file")):
        with pytest.raises(BadInput, match=why):
            TraceFile(path, 1000, 1).check()
    assert other.read_text() == "format = 1\n"
    # One line without an end could be what a crash has left of a trace, and would be cut off.
    other.write_text("the only copy of a password")
    with pytest.raises(BadInput, match="not of a trace"):
        TraceFile(other, 1000, 1).check()
    for left in (b"", b'{"times', b'{"timestamp":12,"input_le', b"\0\0\0"):
        other.write_bytes(left)
        TraceFile(other, 1000, 1).check()
    salted = tmp_path / "trace.jsonl"
    salted.with_name("trace.jsonl.salt").write_text("-----BEGIN PRIVATE KEY-----\nabc\n")
    with pytest.raises(OSError, match="is no key of a recording"):
        TraceFile(salted, 1000, 1).append(line(1))
    assert salted.with_name("trace.jsonl.salt").read_text().startswith("-----BEGIN")


def test_a_key_that_others_could_read_or_have_put_there_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, salt = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.salt"
    TraceFile(path, 1000, 1).append(line(1))
    salt.chmod(0o644)
    TraceFile(path, 1000, 1).append(line(2))
    assert salt.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(OSError, match="belongs to another user"):
        TraceFile(path, 1000, 1).append(line(3))
    monkeypatch.undo()
    salt.rename(tmp_path / "theirs")
    salt.symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic link"):
        TraceFile(path, 1000, 1).append(line(3))
    assert [one["timestamp"] for one in lines_of(path)] == [1, 2]


# Read again


def test_a_recording_is_read_while_it_is_written_in_order_of_end_and_its_classes_survive(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(9000, "batch"), (1000, "chat"), (4000, None)]
    with path.open("w") as file:
        for at_ms, name in rows:
            said = {"timestamp": at_ms, "input_length": at_ms, "output_length": 2, "hash_ids": [], "model": "m"}
            file.write(json.dumps(said | ({"class": name} if name else {})) + "\n")
    trace = read_trace(path)
    assert trace.classes == ("chat", None, "batch")
    requests = from_trace(trace)
    assert [(one.arrival_s, one.input_tokens, one.class_name) for one in requests] == [
        (0.0, 1000, "chat"),
        (3.0, 4000, None),
        (8.0, 9000, "batch"),
    ]
    assert {one.class_name for one in from_trace(trace, class_name="all")} == {"all"}


@pytest.mark.slow
def test_what_is_recorded_is_replayed_with_its_lengths_its_classes_and_its_shared_beginnings(tmp_path: Path) -> None:
    classes = "".join(f'\n[[class]]\nname = "{name}"\nmodel = "{SMALL}"\n' for name in ("chat", "batch"))
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet(pool("amd", max_context=8192))) + classes)
    source = tmp_path / "source.jsonl"
    with source.open("w") as text:
        for number in range(6):
            said = {
                "timestamp": 40 * number, "input_length": 1200 + number, "output_length": 3 + number,
                "hash_ids": [7, 8, 100 + number], "model": SMALL, "class": "chat" if number % 2 else "batch",
            }  # fmt: skip
            text.write(json.dumps(said) + "\n")
    recordings: list[list[dict[str, Any]]] = []
    for trace in (source, tmp_path / "recorded-0.jsonl"):
        recorded = tmp_path / f"recorded-{len(recordings)}.jsonl"
        with serving(tmp_path, file, "--emulate", "--speed", "20", "--record", recorded) as gateway:
            replay = subprocess.run(
                command("replay", trace, "--url", gateway.url, "--model", SMALL, "--speed", "20", "--fleet", file),
                env=environment(tmp_path), capture_output=True, text=True, timeout=90, check=False,
            )  # fmt: skip
            assert replay.returncode == 0, replay.stderr
            assert gateway.ends(signal.SIGTERM) == 0
            assert "Traceback" not in gateway.errors
        recordings.append(lines_of(recorded))
    for recording in recordings:
        assert sorted((one["class"], one["output_length"]) for one in recording) == sorted(
            ("chat" if number % 2 else "batch", 3 + number) for number in range(6)
        )
        first = {tuple(one["hash_ids"][:2]) for one in recording}
        assert len(first) == 1
        assert len({one["hash_ids"][2] for one in recording}) == 6
    lengths = [sorted(one["input_length"] for one in recording) for recording in recordings]
    # The emulator counts a few tokens for the JSON around a prompt.
    assert all(abs(a - b) <= 32 for a, b in zip(*lengths, strict=True))


@pytest.mark.slow
def test_workers_record_to_one_file_each_request_once_and_one_that_is_killed_tears_nothing(tmp_path: Path) -> None:
    file, trace = tmp_path / "fleet.toml", tmp_path / "trace.jsonl"
    file.write_text(fleet_text(fleet(pool("amd", max_context=8192))))
    with serving(tmp_path, file, "--emulate", "--speed", "50", "--record", trace, "--workers", "2") as gateway:

        def ask(number: int) -> int:
            asked = {"model": SMALL, "max_tokens": 2, "messages": chat(f"{number} {words(1, 6000)}")}
            return post(gateway.url, "/v1/chat/completions", asked).status

        with ThreadPoolExecutor(4) as hands:
            assert set(hands.map(ask, range(40))) == {200}
        assert comes_true(lambda: len(lines_of(trace)) == 40)
        assert "\ncrosstie_record_failed 0\n" in get(gateway.url, "/metrics").text
        victim = next(pid for pid in gateway.children() if "--emulate" in Path(f"/proc/{pid}/cmdline").read_text())
        before = len(gateway.children())
        os.kill(victim, signal.SIGKILL)
        assert comes_true(lambda: gone(victim))
        with ThreadPoolExecutor(4) as hands:
            assert set(hands.map(ask, range(40, 60))) == {200}
        assert comes_true(lambda: len(gateway.children()) == before)
        assert gateway.ends(signal.SIGTERM) == 0
    found = lines_of(trace)
    assert len(found) == 60
    times = [one["timestamp"] for one in found]
    assert times == sorted(times)
    # With the number in front no block is shared; each prompt was recorded by whoever served it.
    assert len({one["hash_ids"][0] for one in found}) == 60
    assert len({one["hash_ids"][-1] for one in found}) == 60
