"""How soon a gateway hears of pods: from the API server's word to the first answer of a new one, and to none of one
that leaves.

    python benchmarks/discovery.py [--rounds 20] [--kubeconfig FILE] [--json]

    come    an EndpointSlice has the pod as ready: until the gateway has answered with it, asked without a pause
    go      it has the pod as terminating: until the gateway has taken it out; and requests that it got after that

Without --kubeconfig the API server is that of the tests. With one it is the cluster's, whose namespace `default` gets
EndpointSlices called crosstie-bench-N for a while, with addresses of this machine. Gateway and engines (which answer at
once) are in this process; what kubelet and the endpoint controller take comes on top.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.run.cluster.api_server import api_server, endpoint_slice
from tests.run.gateway.fakes import fleet_of, pool_of, running

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.cluster.api import ClusterApi
from crosstie_gateway.service.discovery import ClusterDiscovery

SERVICE = "crosstie-bench"
# (number of the pod, its port, whether it leaves); made known before it returns.
Put = Callable[[int, int, bool], None]


@asynccontextmanager
async def engine(name: str, asked: list[str]) -> AsyncIterator[int]:
    """Answers whatever it is asked with its own name, at every address of this machine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                await reader.readexactly(sum(length))
                if head.startswith(b"POST"):
                    asked.append(name)
                body = json.dumps({"served_by": name, "object": "chat.completion", "choices": []}).encode()
                kind = b"Content-Type: application/json\r\nContent-Length: "
                writer.write(b"HTTP/1.1 200 OK\r\n" + kind + str(len(body)).encode() + b"\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(serve, "0.0.0.0", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextmanager
def of_tests(address: str) -> Iterator[tuple[Callable[[], ClusterApi], Put]]:
    with api_server() as server:

        def put(number: int, port: int, leaves: bool) -> None:
            end = {"addresses": [address], "conditions": conditions(leaves)}
            endpoint_slice(server, f"{SERVICE}-{number}", port, end, service=SERVICE)

        yield server.api, put


@contextmanager
def of_cluster(file: str, address: str) -> Iterator[tuple[Callable[[], ClusterApi], Put]]:
    from kubernetes import client, config

    os.environ["KUBECONFIG"] = file
    config.load_kube_config(config_file=file)
    api = client.DiscoveryV1Api()
    made: set[str] = set()

    def put(number: int, port: int, leaves: bool) -> None:
        name = f"{SERVICE}-{number}"
        whole: dict[str, Any] = {
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": conditions(leaves)}],
            "ports": [{"name": "http", "port": port}],
        }
        if name in made:
            api.patch_namespaced_endpoint_slice(name, "default", whole)
        else:
            made.add(name)
            api.create_namespaced_endpoint_slice("default", whole)

    try:
        yield ClusterApi, put
    finally:
        for name in made:
            api.delete_namespaced_endpoint_slice(name, "default")


def conditions(leaves: bool) -> dict[str, bool]:
    return {"ready": not leaves, "serving": True, "terminating": leaves}


def own_address() -> str:
    """Not of loopback, which a real API server refuses in an EndpointSlice. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        try:
            made.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(made.getsockname()[0])


async def rounds(count: int, connect: Callable[[], ClusterApi], put: Put) -> dict[str, Any]:
    come, go, after, asked = [], [], 0, list[str]()
    discovery = ClusterDiscovery(connect)
    fleet = fleet_of(pool_of("a", f"kube://default/services/{SERVICE}"), policy="round-robin")
    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(engine(f"pod-{n}", asked)) for n in range(count + 1)]
        put(0, ports[0], False)
        at = await stack.enter_async_context(running(fleet, components=[discovery]))
        for number in range(1, count + 1):
            name, began = f"pod-{number}", perf_counter()
            await asyncio.to_thread(put, number, ports[number], False)
            while json.loads((await at.ask()).body)["served_by"] != name:
                pass
            come.append(perf_counter() - began)
            began = perf_counter()
            await asyncio.to_thread(put, number, ports[number], True)
            while any(url.endswith(f":{ports[number]}/v1") for url in at.gateway.backends):
                await asyncio.sleep(0)
            go.append(perf_counter() - began)
            asked.clear()
            for _ in range(10):
                await at.ask()
            after += asked.count(name)
        await discovery.stop()
    return {"rounds": count, "come_s": come, "go_s": go, "requests_after": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kubeconfig", metavar="FILE")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    address = own_address()
    with of_cluster(given.kubeconfig, address) if given.kubeconfig else of_tests(address) as (connect, put):
        found = run_on_loop(rounds(given.rounds, connect, put))
    if given.json:
        print(json.dumps(found))
        return
    for what, seconds in (("come", found["come_s"]), ("go", found["go_s"])):
        print(f"{what:5} median {1e3 * statistics.median(seconds):.0f} ms, worst {1e3 * max(seconds):.0f} ms")
    print(f"requests that a pod got after it was taken out: {found['requests_after']}")


if __name__ == "__main__":
    main()
