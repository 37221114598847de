"""Where clients come in, as a user starts it: certificates, both families of addresses, unix sockets; one process and
several."""

import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.conftest import Command
from tests.needs import one_in
from tests.run.gateway.fakes import fleet_of, pool_of
from tests.run.service.processes import Running, comes_true, command, environment, serving
from tests.wire.certificates import OTHER_CA, client_tls, pair

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.errors import BadInput
from crosstie_gateway.service.edge import Edge
from crosstie_gateway.wire.listener import UnixSocket


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "fleet.toml"
    made.write_text(fleet_text(fleet_of(pool_of("one", "http://127.0.0.1:9/v1"))))
    return made


def shown_by(running: Running) -> str:
    """The name in the certificate that it shows to whoever comes now."""
    with (
        socket.create_connection(("127.0.0.1", running.port)) as raw,
        client_tls().wrap_socket(raw, server_hostname="localhost") as one,
    ):
        found = one.getpeercert() or {}
    return str(dict(part[0] for part in found["subject"])["commonName"])  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
def test_certificates_are_replaced_while_it_serves(workers: str, file: Path, tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    with serving(tmp_path, file, "--workers", workers, "--tls-cert", cert, "--tls-key", key) as running:
        assert running.url.startswith("https://")
        with httpx2.Client(verify=client_tls()) as client:
            assert client.get(f"{running.url}/models").status_code == 200
            _, other_key = pair(tmp_path, "other")
            other_key.replace(key)
            assert comes_true(lambda: "certificate refused, the old one goes on" in running.errors)
            assert {shown_by(running) for _ in range(5)} == {"server"}
            fresh_cert, fresh_key = pair(tmp_path, "fresh")
            fresh_cert.replace(cert)
            fresh_key.replace(key)
            assert comes_true(lambda: {shown_by(running) for _ in range(8)} == {"fresh"})
            # Who was there before goes on, and a signal has them read again whatever has changed.
            assert client.get(f"{running.url}/models").status_code == 200
            before = running.errors.count("certificate read again")
            assert before
            running.send(signal.SIGHUP)
            assert comes_true(lambda: running.errors.count("certificate read again") > before)
            assert running.ends() == 0
        assert "Traceback" not in running.errors


def test_clients_without_a_certificate_stay_outside(file: Path, tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    ca = tmp_path / "clients.pem"
    OTHER_CA.cert_pem.write_to_path(ca)
    with serving(tmp_path, file, "--tls-cert", cert, "--tls-key", key, "--tls-client-ca", ca) as running:
        with httpx2.Client(verify=client_tls(pair(tmp_path, "alice", ca=OTHER_CA))) as client:
            assert client.get(f"{running.url}/models").status_code == 200
        with httpx2.Client(verify=client_tls()) as client, pytest.raises(httpx2.TransportError):
            client.get(f"{running.url}/models")
        assert running.ends() == 0
        assert "Traceback" not in running.errors


@pytest.mark.parametrize("workers", one_in(2, ("1", "2")))
def test_both_families_and_a_unix_socket_are_listened_on(workers: str, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    arguments = ("--host", "::", "--unix", path, "--unix-mode", "660", "--workers", workers)
    with serving(tmp_path, file, *arguments) as running:
        assert running.said["unix"] == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        for host in ("127.0.0.1", "[::1]"):
            assert httpx2.get(f"http://{host}:{running.port}/v1/models").status_code == 200
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://localhost/v1/models").status_code == 200
            running.send(signal.SIGTERM)
            assert running.ends(None) == 0
        assert not path.exists()
        assert "Traceback" not in running.errors


@pytest.mark.slow
def test_a_unix_socket_may_be_all_there_is(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with UnixSocket(path):
        # Closed without a word, it leaves its path behind.
        pass
    with serving(tmp_path, file, "--unix", path, "--no-tcp") as running:
        assert running.url == "http://localhost/v1"
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
            assert client.get(f"{running.url}/models").status_code == 200
        refused = run("serve", file, "--unix", path, "--no-tcp", folder=tmp_path)
        assert refused.returncode == 2
        assert f"{path}: cannot listen there: another server listens there" in refused.stderr
        assert running.ends() == 0
    assert not path.exists()


def test_a_path_that_is_another_servers_by_now_stays(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    with UnixSocket(path) as first:
        path.unlink()
        with UnixSocket(path) as second:
            first.leave()
            assert path.exists()
            second.leave()
            assert not path.exists()
    path.write_text("mine")
    with pytest.raises(OSError, match="something else than a socket"):
        UnixSocket(path)


def run(*arguments: str | Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command(*arguments), env=environment(folder), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tls_cert": "server.pem"}, "--tls-cert and --tls-key go together"),
        ({"tls_client_ca": "server.pem"}, "--tls-client-ca goes with"),
        ({"no_tcp": True}, "--no-tcp and --unix-mode go with --unix"),
        (
            {"no_tcp": True, "unix": "x", "tls_cert": "server.pem", "tls_key": "server.key"},
            "with --no-tcp there are none",
        ),
        ({"tls_cert": "server.pem", "tls_key": "nowhere"}, "nowhere: No such file"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], why: str, tmp_path: Path) -> None:
    pair(tmp_path)
    arguments: dict[str, Any] = {key: tmp_path / one if isinstance(one, str) else one for key, one in given.items()}
    with pytest.raises(BadInput, match=why):
        Edge("127.0.0.1", 0, **arguments)


def test_a_dry_run_tells_what_could_not_be_served(crosstie: Command, file: Path, tmp_path: Path) -> None:
    cert, _ = pair(tmp_path)
    _, other = pair(tmp_path, "other")
    done = crosstie("serve", str(file), "--dry-run", "--tls-cert", str(cert), "--tls-key", str(other))
    assert done.status == 2
    assert done.err.endswith(f"{other}: is not the key of the certificate in {cert}\n")
    assert done.err.count("\n") == 1
    done = crosstie("serve", str(file), "--dry-run", "--unix", "x", "--unix-mode", "999")
    assert done.status == 2
    assert "no mode of three octal digits" in done.err


def test_a_good_certificate_passes_a_dry_run(crosstie: Command, file: Path, tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    done = crosstie("serve", str(file), "--dry-run", "--tls-cert", str(cert), "--tls-key", str(key))
    assert (done.status, done.err) == (0, "")


def test_http2_is_spoken_by_what_stands_in_front(crosstie: Command, file: Path, tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    with serving(tmp_path, file, "--tls-cert", cert, "--tls-key", key) as running:
        context = client_tls()
        context.set_alpn_protocols(["h2", "http/1.1"])
        with (
            socket.create_connection(("127.0.0.1", running.port)) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as one,
        ):
            assert one.selected_alpn_protocol() == "http/1.1"
        assert running.ends() == 0
