"""Two workers on one loop, each at a door of its own: what the one has, finds and counts, the other knows."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, CATALOG, Fake, Running, fakes, fleet_of, pool_of, until
from tests.waiting import LIMIT_S

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie_gateway.gateway.backend import IN_A_ROW
from crosstie_gateway.gateway.health import probe
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.service.supervisor import WorkerSlot
from crosstie_gateway.service.worker import Worker, counters, merged_pages
from crosstie_gateway.service.worker_link import Failed, MetricsPage, MetricsRequest, WorkerAnswer, WorkerLink
from crosstie_gateway.share.board import Board
from crosstie_gateway.wire.listener import listening

# Nobody finds out anything by itself within a test, and at its end nobody is left to drain.
SLOW = msgspec.structs.replace(CALM, health_every_s=600.0, metrics_every_s=600.0, drain_s=0.0)


class RunningWorker(Running):
    def __init__(self, process: GatewayProcess, notices: list[str], near: Worker):
        super().__init__(process, notices)
        self.near = near
        (self.backend,) = process.gateway.backends.values()


@contextlib.asynccontextmanager
async def workers(fleet: Fleet, number: int = 2) -> AsyncIterator[list[RunningWorker]]:
    made: list[RunningWorker] = []
    lines: list[socket.socket] = []
    with TemporaryDirectory(prefix="ct-") as folder, contextlib.closing(Board(number)) as board:
        try:
            for row in range(number):
                ours, theirs = socket.socketpair()
                lines += [ours, theirs]
                theirs.setblocking(False)
                slot = WorkerSlot(row, number, board, Path(folder), listening("127.0.0.1", 0), theirs)
                near, notices = Worker(slot), list[str]()
                process = GatewayProcess(
                    CATALOG,
                    fleet,
                    notify=notices.append,
                    components=[near],
                    board=board,
                    row=row,
                    sockets=slot.sockets,
                )
                await process.start("127.0.0.1", 0)
                made.append(RunningWorker(process, notices, near))
            yield made
            await until(lambda: not any(one.gateway.exchanges for one in made))
        finally:
            for one in made:
                one.origin.close()
                await one.process.stop()
            for line in lines:
                line.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def dropped(worker: RunningWorker) -> str | None:
    said = await worker.ask("/crosstie/explain")
    found: str | None = json.loads(said.body)["considered"][0]["dropped"]
    return found


async def knows(worker: RunningWorker, in_flight: int) -> None:
    """Once it decides, what the others have is at most some milliseconds old."""
    async with asyncio.timeout(LIMIT_S):
        while worker.backend.replica.elsewhere.in_flight != in_flight:
            await dropped(worker)


def release(fake: Fake) -> None:
    fake.held.pop(0).send(200, json.dumps({"choices": [], "usage": fake.usage}).encode())


def test_a_limit_is_everybody_s_and_room_wakes_those_who_wait_elsewhere() -> None:
    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url, max_in_flight=2), serving=SLOW)) as pair:
            one, two = pair
            fake.mode = "hang"
            asking = [asyncio.create_task(one.ask()) for _ in range(2)]
            await until(lambda: len(fake.held) == 2)
            assert await dropped(two) == "room: 2 in flight of 2"
            waiting = asyncio.create_task(two.ask())
            await until(lambda: len(two.gateway.waiting) == 1)
            assert len(fake.hit) == 2
            release(fake)
            await until(lambda: len(fake.held) == 2)
            assert one.backend.replica.in_flight == two.backend.replica.in_flight == 1
            assert one.backend.replica.elsewhere.in_flight <= 1
            release(fake)
            release(fake)
            assert [answer.status for answer in await asyncio.gather(*asking, waiting)] == [200] * 3

    run(scenario)


def test_load_elsewhere_is_in_predictions_and_not_taken_for_strangers() -> None:
    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=SLOW)) as (one, two):
            fake.mode = "hang"
            asking = [asyncio.create_task(one.ask()) for _ in range(3)]
            await until(lambda: len(fake.held) == 3)
            far = two.backend.replica
            await knows(two, 3)
            assert far.elsewhere.held_tokens == one.backend.replica.held_tokens > 0
            far.report(3.0, 0.0, None, two.gateway.now())
            assert (far.external_running, far.external_waiting) == (0.0, 0.0)
            far.report(3.0, 2.0, None, two.gateway.now())
            assert far.external_running + far.external_waiting == 2.0
            for _ in range(3):
                release(fake)
            await asyncio.gather(*asking)
            await knows(two, 0)

    run(scenario)


def test_a_backend_that_one_finds_down_is_down_for_all() -> None:
    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=SLOW)) as (one, two):
            assert (await two.ask()).status == 200
            fake.crash()
            assert (await one.ask()).status in (502, 503)
            await until(lambda: not two.backend.replica.up)
            assert any("is down: it refuses connections" in line for line in two.notices)
            # And up for all as soon as anyone finds it up.
            await fake.start(fake.port)
            await probe(two.gateway.context, two.backend)
            await until(lambda: one.backend.replica.up)
            assert (await one.ask()).status == 200

    run(scenario)


@pytest.mark.slow
def test_a_backend_is_asked_by_one_for_all() -> None:
    async def scenario() -> None:
        fake = Fake()
        await fake.start()
        fake.metrics = b"vllm:num_requests_running 4\nvllm:num_requests_waiting 1\n"
        began = asyncio.get_running_loop().time()
        async with workers(fleet_of(pool_of("p", fake.url)), 4) as four:
            await until(lambda: fake.probes >= 20)
            # Each by itself would make four times as many as one does; the first may be asked after twice.
            elapsed = asyncio.get_running_loop().time() - began
            assert fake.probes <= 4 + 1.5 * elapsed / CALM.health_every_s
            for one in four:
                assert one.backend.replica.reported is not None
                assert one.backend.replica.reported[:3] == (4.0, 1.0, None)
        fake.crash()

    run(scenario)


def test_a_full_engine_and_an_open_breaker_are_known_to_all() -> None:
    serving = msgspec.structs.replace(SLOW, panic_threshold=0.0)

    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=serving)) as (one, two):
            fake.mode = "full"
            assert (await one.ask()).status == 503
            assert str(await dropped(two)).startswith("busy: its engine is full")
            await until(lambda: one.gateway.now() > one.backend.replica.busy_until)
            fake.mode = "error"
            for _ in range(IN_A_ROW):
                assert (await one.ask()).status == 500
            assert one.backend.breaker.state == "open"
            await until(lambda: two.backend.breaker.state == "open")
            assert await dropped(two) == "up: its circuit breaker is open"

    run(scenario)


def test_workers_answer_or_are_left_out() -> None:
    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=SLOW), 3) as (one, two, three):

            def refuses(request: MetricsRequest) -> WorkerAnswer:
                raise BadInput("not today")

            large = "x" * 300_000
            for row, worker in enumerate((one, two, three)):
                worker.process.on(MetricsRequest, lambda _, row=row: MetricsPage(row, large))  # type: ignore[misc]
            answers = await two.process.ask_all(MetricsRequest(), MetricsPage)
            assert answers == [MetricsPage(row, large) for row in (1, 0, 2)]
            three.process.on(MetricsRequest, refuses)
            del one.process.handlers[MetricsRequest]
            missing = Failed("no MetricsRequest here")
            assert await two.process.ask_others(MetricsRequest()) == [missing, Failed("not today")]
            assert three.process.link is not None
            three.process.link.close()
            assert await two.process.ask_others(MetricsRequest()) == [missing]

    run(scenario)


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "Unheard"},
        {"kind": "MetricsRequest", "more": 1},
        {"kind": "FollowerReport", "process": "1", "asked": {}, "waiting": []},
        {"kind": "MetricsPage", "row": 0, "page": ""},
        [],
    ],
)
def test_a_message_that_is_none_is_not_answered(message: Any) -> None:
    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=SLOW)) as (one, two):
            body = msgspec.msgpack.encode(message)
            reader, writer = await asyncio.open_unix_connection(str(one.near.slot.folder / "worker-0"))
            writer.write(len(body).to_bytes(4, "big") + body)
            assert await reader.read() == b""
            writer.close()
            # And nobody is the worse for it.
            assert isinstance((await two.process.ask_others(MetricsRequest()))[0], MetricsPage)

    run(scenario)


def test_what_one_shows_is_the_sum_and_never_shrinks() -> None:
    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=SLOW)) as (one, two):
            for worker in (one, one, two):
                assert (await worker.ask()).status == 200
            assert [await worker.metric("crosstie_requests_total") for worker in (one, two)] == [3, 3]
            assert await one.metric("crosstie_workers") == 2
            # One that does not answer, as after a crash: what it had shown still counts.
            assert two.process.link is not None
            two.process.link.close()
            assert await one.metric("crosstie_requests_total") == 3
            assert await one.metric("crosstie_workers") == 1
            assert (await one.ask()).status == 200
            assert await one.metric("crosstie_requests_total") == 4

    run(scenario)


def test_queues_are_divided() -> None:
    async def scenario() -> None:
        serving = msgspec.structs.replace(SLOW, max_queued=5)
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=serving)) as pair:
            assert [one.gateway.waiting.most for one in pair] == [3, 3]

    run(scenario)


# Pages


def page(requests: int, up: int, busy: int) -> str:
    return (
        "# HELP crosstie_requests_total Requests.\n# TYPE crosstie_requests_total counter\n"
        f'crosstie_requests_total{{pool="a b",status="200"}} {requests}\n'
        "# HELP crosstie_ttft_seconds Times.\n# TYPE crosstie_ttft_seconds histogram\n"
        f'crosstie_ttft_seconds_bucket{{pool="a",le="+Inf"}} {requests}\ncrosstie_ttft_seconds_sum{{pool="a"}} 0.25\n'
        f"# HELP crosstie_backend_up Up.\n# TYPE crosstie_backend_up gauge\ncrosstie_backend_up {up}\n"
        f"# HELP crosstie_queued Waiting.\n# TYPE crosstie_queued gauge\ncrosstie_queued {busy}\n"
        f'# HELP crosstie_ttft_correction C.\n# TYPE crosstie_ttft_correction gauge\ncrosstie_ttft_correction{{b="x"}} 1.5\n'
    )


def test_pages_are_added_up() -> None:
    lines = merged_pages([(1, page(2, 1, 3)), (0, page(5, 0, 4))]).splitlines()
    assert 'crosstie_requests_total{pool="a b",status="200"} 7' in lines
    assert 'crosstie_ttft_seconds_bucket{pool="a",le="+Inf"} 7' in lines
    assert 'crosstie_ttft_seconds_sum{pool="a"} 0.5' in lines
    assert "crosstie_backend_up 0" in lines
    assert "crosstie_queued 7" in lines
    assert 'crosstie_ttft_correction{b="x",worker="0"} 1.5' in lines
    assert 'crosstie_ttft_correction{b="x",worker="1"} 1.5' in lines
    assert len([line for line in lines if line.startswith("# TYPE")]) == 5
    # Adding up what was added up changes no label again.
    again = merged_pages([(0, "\n".join(lines))])
    assert again.splitlines() == lines


def test_of_a_page_only_what_grows_is_kept() -> None:
    kept = counters(page(2, 1, 3))
    assert "crosstie_requests_total" in kept
    assert "crosstie_ttft_seconds_sum" in kept
    assert "gauge" not in kept
    assert "crosstie_queued" not in kept
    assert counters("# HELP a b\n# TYPE a gauge\na 1\n") == ""


@pytest.mark.parametrize("said", [b"", b"\0\0\0\5", b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\2xx", b"\0\0\0\2{}"])
def test_nonsense_at_a_worker_s_socket_is_ignored(said: bytes) -> None:
    async def scenario() -> None:
        broke: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: broke.append(context))
        with TemporaryDirectory(prefix="ct-") as folder:
            link = WorkerLink(Path(folder), 0, 2, {})
            await link.open()
            reader, writer = await asyncio.open_unix_connection(f"{folder}/worker-0")
            writer.write(said)
            writer.write_eof()
            await reader.read()
            writer.close()
            link.close()
        assert broke == []

    run(scenario)


def test_where_a_response_lives_is_known_to_all_workers() -> None:
    async def scenario() -> None:
        async with fakes() as (fake,), workers(fleet_of(pool_of("p", fake.url), serving=SLOW)) as pair:
            one, two = pair
            fake.mode = "responds"
            said = json.loads((await one.ask("/v1/responses", input="hello")).body)
            await until(lambda: two.gateway.context.responses.home(0, said["id"]) == fake.url)

    run(scenario)


@pytest.mark.parametrize(("ready", "said"), [((0, 1), 1), ((1, 0), 1), ((0, -1), -1), ((-1, 1), -1), ((0, 0), 0)])
def test_what_all_workers_say_of_one_thing_is_not_added_up(ready: tuple[int, int], said: int) -> None:
    def page(ready: int) -> str:
        values = {"crosstie_trial_ready": ready, "crosstie_canary_stopped": 1, "crosstie_cluster_endpoints": 3}
        return "".join(f'# HELP {name} x\n# TYPE {name} gauge\n{name}{{pool="p"}} {n}\n' for name, n in values.items())

    lines = merged_pages([(0, page(ready[0])), (1, page(ready[1]))]).splitlines()
    assert f'crosstie_trial_ready{{pool="p"}} {said}' in lines
    assert 'crosstie_canary_stopped{pool="p"} 1' in lines
    assert 'crosstie_cluster_endpoints{pool="p"} 3' in lines
