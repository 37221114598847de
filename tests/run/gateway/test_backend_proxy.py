"""Backends behind a proxy: tunnels for https, whole addresses for http, and a proxy that will not, hangs or is gone."""

import base64
import json
from pathlib import Path

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, Running, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.fronts import Certificates, proxying, tls_before

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.errors import BadInput
from crosstie.core.fleet import BackendAccess
from crosstie.wire.address import Address
from crosstie.wire.loops import run_on_loop
from crosstie.wire.proxy import Proxy, proxies_for

SECRET = "gateway:p@ss/word"
ENCODED = "gateway:p%40ss%2Fword"


def served_by(body: bytes) -> str:
    return str(json.loads(body)["served_by"])


def told(gateway: Running) -> str:
    """All that is written about it."""
    fleet = gateway.gateway.live.fleet
    return "\n".join([*gateway.notices, gateway.gateway.metrics_page(), fleet_text(fleet), repr(fleet)])


@pytest.fixture(autouse=True)
def without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_https_goes_through_a_tunnel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Certificates(tmp_path)

    async def scenario() -> None:
        async with fakes() as (fake,), tls_before(fake.port, made.server()) as url, proxying(SECRET) as (proxy, port):
            monkeypatch.setenv("PROXY_USER", ENCODED)
            reach = BackendAccess(tls_ca=made.ca, proxy=f"http://${{PROXY_USER}}@127.0.0.1:{port}")
            async with running(fleet_of(pool_of("a", url, reach=reach))) as gateway:
                assert [served_by((await gateway.ask()).body) for _ in range(3)] == ["fake-0"] * 3
                # Of what passes, the proxy sees to whom, and nothing else.
                to = url.removeprefix("https://").removesuffix("/v1").encode()
                assert {head.split(b"\r\n")[0] for head in proxy.heads} == {b"CONNECT %b HTTP/1.1" % to}
                assert not any(b"proxy-authorization" in request.headers for request, _ in fake.hit)
                (backend,) = gateway.gateway.backends.values()
                assert backend.healthy
                page = told(gateway)
                assert "p@ss" not in page
                assert ENCODED not in page
                assert base64.b64encode(SECRET.encode()).decode() not in page

    run_on_loop(scenario())


def test_a_certificate_is_looked_at_through_a_tunnel_too(tmp_path: Path) -> None:
    made = Certificates(tmp_path)

    async def scenario() -> None:
        async with fakes() as (fake,), tls_before(fake.port, made.server()) as url, proxying() as (_, port):
            reach = BackendAccess(proxy=f"http://127.0.0.1:{port}")
            async with running(fleet_of(pool_of("a", url, reach=reach))) as gateway:
                (backend,) = gateway.gateway.backends.values()
                assert "its certificate does not verify" in backend.replica.why_down
                assert backend.dead

    run_on_loop(scenario())


def test_http_is_asked_of_the_proxy_by_its_whole_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_USER", ENCODED)

    async def scenario() -> None:
        async with fakes() as (fake,), proxying(SECRET) as (proxy, port):
            reach = BackendAccess(proxy=f"http://${{PROXY_USER}}@127.0.0.1:{port}")
            async with running(fleet_of(pool_of("a", fake.url, reach=reach))) as gateway:
                assert served_by((await gateway.ask()).body) == "fake-0"
                firsts = {head.split(b"\r\n")[0] for head in proxy.heads}
                at = f"http://127.0.0.1:{fake.port}"
                assert f"POST {at}/v1/chat/completions HTTP/1.1".encode() in firsts
                assert f"GET {at}/health HTTP/1.1".encode() in firsts
                assert fake.hit[0][0].headers[b"host"] == f"127.0.0.1:{fake.port}".encode()
                monkeypatch.setenv("PROXY_USER", "other:one")
                # As on a reload: what the environment says now, from the next connection on.
                gateway.process.load(gateway.gateway.live.fleet)
                (backend,) = gateway.gateway.backends.values()
                await until(lambda: not backend.replica.up)
                assert backend.replica.why_down == "its proxy wants other credentials (407)"

    run_on_loop(scenario())


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("hang", "no connection within 0.5 s"),
        ("502 Bad Gateway", "would not connect (502)"),
        ("407 Proxy Authentication Required", "wants other credentials (407)"),
        ("gone", "cannot be reached"),
    ],
)
def test_a_proxy_that_fails_is_named_and_others_serve(mode: str, said: str) -> None:
    async def scenario() -> None:
        serving = msgspec.structs.replace(CALM, connect_timeout_s=0.5)
        async with fakes(2) as (_, good), proxying() as (proxy, port):
            proxy.mode = mode
            reach = BackendAccess(proxy=f"http://127.0.0.1:{port if mode != 'gone' else 9}")
            behind = pool_of("b", "https://localhost:9/v1", reach=reach, usd_per_gpu_hour=0.1)
            async with running(fleet_of(pool_of("a", good.url), behind, serving=serving)) as gateway:
                backend = gateway.gateway.backends["https://localhost:9/v1"]
                for _ in range(3):
                    # As if it had just been found well: a request finds out by itself.
                    backend.probed(None, gateway.gateway.now())
                    assert served_by((await gateway.ask()).body) == "fake-1"
                await until(lambda: not backend.replica.up)
                assert said in backend.replica.why_down
                (line, *_) = [line for line in gateway.notices if "is down" in line]
                assert f"(through the proxy 127.0.0.1:{9 if mode == 'gone' else port})" in line
                # Clients are not told where it is.
                assert str(port) not in backend.replica.why_down

    run_on_loop(scenario())


@in_folder
async def test_the_environment_is_obeyed_only_where_the_file_says_so(folder: Path) -> None:
    patched = pytest.MonkeyPatch()
    async with fakes() as (fake,), proxying() as (proxy, port):
        try:
            patched.setenv("HTTP_PROXY", f"http://127.0.0.1:{port}")
            async with running(fleet_of(pool_of("a", fake.url))) as gateway:
                assert served_by((await gateway.ask()).body) == "fake-0"
            assert proxy.heads == []
            async with running(fleet_of(pool_of("a", fake.url, reach=BackendAccess(proxy="environment")))) as gateway:
                assert served_by((await gateway.ask()).body) == "fake-0"
            assert proxy.heads
            patched.setenv("NO_PROXY", "127.0.0.1")
            assert proxies_for("environment", [Address(fake.url)]) == {}
            patched.setenv("NO_PROXY", "example.com")
            assert list(proxies_for("environment", [Address(fake.url), Address("https://a/v1")])) == [fake.url]
            patched.setenv("HTTP_PROXY", "socks5://user:secret@127.0.0.1:1")
            with pytest.raises(BadInput, match="HTTP_PROXY is no proxy that is spoken to in http") as refused:
                proxies_for("environment", [Address(fake.url)])
            assert "secret" not in str(refused.value)
        finally:
            patched.undo()


@pytest.mark.parametrize(
    "said", ["https://egress:3128", "http://egress", "http://:3127", "http://egress:3128/path", "egress:x"]
)
def test_what_is_no_proxy_is_refused_and_not_repeated(said: str) -> None:
    with pytest.raises(BadInput) as refused:
        Proxy(said)
    assert said not in str(refused.value)


def test_a_variable_that_is_not_set_is_refused_by_its_pool() -> None:
    async def scenario() -> None:
        fleet = fleet_of(pool_of("a", "http://127.0.0.1:9/v1", reach=BackendAccess(proxy="${NO_SUCH_PROXY}")))
        with pytest.raises(BadInput, match=r"pool a: proxy: \$\{NO_SUCH_PROXY\}: no such variable is set"):
            async with running(fleet):
                pass

    run_on_loop(scenario())
