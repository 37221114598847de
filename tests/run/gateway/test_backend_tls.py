"""Backends with certificates of a private authority, that ask for the gateway's own, or that cannot be trusted."""

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from ssl import SSLContext, TLSVersion

import msgspec
import pytest
from tests.run.gateway.fakes import CATALOG, fakes, fleet_of, in_folder, pool_of, running, until
from tests.run.gateway.fronts import Certificates, tls_before

from crosstie.core.errors import BadInput
from crosstie.core.fleet import BackendAccess
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway.health import REFUSES
from crosstie_gateway.service.process import GatewayProcess
from crosstie_gateway.service.worker import _FAULTS, _health


def served_by(body: bytes) -> str:
    return str(json.loads(body)["served_by"])


@in_folder
async def test_a_pool_trusts_its_own_authority_and_shows_its_own_certificate(folder: Path) -> None:
    made = Certificates(folder)
    cert, key = made.issued("gateway")
    reach = BackendAccess(tls_ca=made.ca, tls_cert=cert, tls_key=key)
    async with fakes() as (fake,):
        fake.metrics = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
        async with (
            tls_before(fake.port, made.server(asks=True)) as url,
            running(fleet_of(pool_of("a", url, reach=reach))) as gateway,
        ):
            # Probes and metrics go the same way as requests.
            (backend,) = gateway.gateway.backends.values()
            assert backend.healthy
            assert served_by((await gateway.ask()).body) == "fake-0"
            assert fake.hit[0][0].headers[b"host"].startswith(b"localhost:")
            await until(lambda: backend.replica.reported is not None)


@in_folder
async def test_a_certificate_may_have_another_name_than_the_address(folder: Path) -> None:
    made = Certificates(folder)
    async with fakes() as (fake,), tls_before(fake.port, made.server("vllm.internal"), "127.0.0.1") as url:
        named = BackendAccess(tls_ca=made.ca, tls_server_name="vllm.internal")
        async with running(fleet_of(pool_of("a", url, reach=named))) as gateway:
            assert served_by((await gateway.ask()).body) == "fake-0"
        async with running(fleet_of(pool_of("a", url, reach=BackendAccess(tls_ca=made.ca)))) as gateway:
            answer = await gateway.ask()
            assert answer.status == 503
            (backend,) = gateway.gateway.backends.values()
            assert "its certificate does not verify: IP address mismatch" in backend.replica.why_down
            # Not even the address is told to clients.
            assert b"127.0.0.1" not in answer.body
            assert any("does not verify" in line and url in line for line in gateway.notices)


@in_folder
async def test_a_backend_that_cannot_be_trusted_is_the_operators_fault(folder: Path) -> None:
    """It is taken out at once, its reason is told, and requests go elsewhere; no prompt has reached it."""
    made = Certificates(folder)
    async with fakes(2) as (strange, good), tls_before(strange.port, made.server()) as url:
        fleet = fleet_of(pool_of("a", good.url), pool_of("b", url, usd_per_gpu_hour=0.1))
        async with running(fleet) as gateway:
            backend = gateway.gateway.backends[url]
            # As a probe has left it; a request finds out by itself, too.
            assert backend.healthy is False
            assert backend.dead
            backend.probed(None, gateway.gateway.now())
            for _ in range(3):
                assert served_by((await gateway.ask()).body) == "fake-1"
            await until(lambda: not backend.replica.up)
            assert "does not verify" in backend.replica.why_down
            assert strange.hit == []


@pytest.mark.parametrize("version", [TLSVersion.TLSv1_2, TLSVersion.TLSv1_3])
def test_a_backend_that_does_not_take_our_certificate_says_so(version: TLSVersion, tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    asking = made.server(asks=True)
    asking.minimum_version = asking.maximum_version = version

    async def asked(url: str) -> None:
        async with running(fleet_of(pool_of("a", url, reach=BackendAccess(tls_ca=made.ca)))) as gateway:
            (backend,) = gateway.gateway.backends.values()
            # A server that resets the connection after its alert may take the alert away with it.
            await until(lambda: "gateway's TLS or certificate" in backend.replica.why_down)
            assert (await gateway.ask()).status == 503

    with _refusing(asking) as url:
        run_on_loop(asked(url))


@contextmanager
def _refusing(tls: SSLContext) -> Iterator[str]:
    """As servers do, and unlike asyncio's, it says why it ends a handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with suppress(OSError), connection:
                        tls.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"https://localhost:{listener.getsockname()[1]}/v1"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@in_folder
async def test_files_are_read_again_with_the_fleet(folder: Path) -> None:
    """Without a cut: what changed is used from the next connection on, and what cannot be used changes nothing."""
    (folder / "new").mkdir()
    old, new = Certificates(folder), Certificates(folder / "new")
    async with fakes() as (fake,), tls_before(fake.port, new.server()) as url:
        fleet = fleet_of(pool_of("a", url, reach=BackendAccess(tls_ca=old.ca)))
        async with running(fleet) as gateway:
            (backend,) = gateway.gateway.backends.values()
            before = backend.origin.way
            gateway.process.load(fleet)
            assert backend.origin.way is before, "nothing has changed"
            assert not backend.replica.up
            shutil.copy(new.ca, old.ca)
            gateway.process.load(fleet)
            await until(lambda: backend.replica.up)
            assert served_by((await gateway.ask()).body) == "fake-0"
            Path(old.ca).write_text("no certificate")
            with pytest.raises(BadInput, match=r"pool a: tls_ca: .*ca.pem: has no certificates in PEM"):
                gateway.process.load(fleet)
            assert served_by((await gateway.ask()).body) == "fake-0"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tls_ca": "gone.pem"}, r"pool a: tls_ca: gone.pem: cannot be read: No such file"),
        ({"tls_key": "gone.key"}, r"pool a: tls_key: gone.key: cannot be read: No such file"),
        ({"tls_key": "b.key"}, r"pool a: tls_cert, tls_key: .*a.pem, .*b.key: the key is not that of the certificate"),
        ({"tls_key": "locked.key"}, r"pool a: tls_cert, tls_key: .*: the key is encrypted"),
        ({"tls_key": "a.pem"}, r"pool a: tls_cert, tls_key: .*: they are no certificate and its key in PEM"),
    ],
)
def test_files_that_cannot_be_used_are_refused(changes: dict[str, str], said: str, tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    cert, key = made.issued("a")
    made.issued("b")
    (tmp_path / "locked.key").write_bytes(_locked(Path(key).read_bytes()))
    reach = BackendAccess(tls_ca=made.ca, tls_cert=cert, tls_key=key)
    here = {name: str(tmp_path / file) if "gone" not in file else file for name, file in changes.items()}
    fleet = fleet_of(pool_of("a", "https://127.0.0.1:9/v1", reach=msgspec.structs.replace(reach, **here)))

    async def start() -> None:
        await GatewayProcess(CATALOG, fleet).start("127.0.0.1", 0)

    with pytest.raises(BadInput, match=said):
        run_on_loop(start())


def test_other_workers_are_told_what_kind_of_fault_it_is() -> None:
    refusal = "its certificate does not verify: certificate has expired"
    faults = [
        _FAULTS.get(_health(fault, refused=sure))
        for fault, sure in ((None, False), ("slow", False), (REFUSES, True), (refusal, True))
    ]
    assert faults[0] is None
    assert "health check failed" in (faults[1] or "")
    assert faults[2] == REFUSES
    assert "no TLS with it" in (faults[3] or "")


def _locked(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    found = serialization.load_pem_private_key(key, None)
    return found.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
