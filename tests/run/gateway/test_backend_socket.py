"""Backends on sockets of this machine."""

import json
from pathlib import Path

from tests.run.gateway.fakes import fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.fronts import on_socket

from crosstie.wire.address import Address


@in_folder
async def test_an_engine_is_asked_over_its_socket_while_there_is_one(folder: Path) -> None:
    file = folder / "vllm.sock"
    async with fakes() as (fake,):
        fake.metrics = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
        async with running(fleet_of(pool_of("a", f"unix:{file}"))) as gateway:
            (backend,) = gateway.gateway.backends.values()
            assert backend.replica.why_down == "it refuses connections"
            assert (await gateway.ask()).status == 503
            async with on_socket(fake.port, file):
                await until(lambda: backend.replica.up and backend.replica.reported is not None)
                for _ in range(2):
                    assert json.loads((await gateway.ask()).body)["served_by"] == "fake-0"
                request, _ = fake.hit[0]
                assert request.path == "/v1/chat/completions"
                assert request.headers[b"host"] == b"localhost"
                assert await gateway.metric("crosstie_backend_up", backend=f"unix:{file}") == 1
            file.unlink(missing_ok=True)
            await until(lambda: not backend.replica.up)


def test_models_that_share_a_socket_are_told_apart() -> None:
    at = Address("unix:/run/llama.sock#small")
    assert (at.socket, at.base, at.root, at.url) == ("/run/llama.sock", "/v1", "", "unix:/run/llama.sock#small")
