"""`crosstie serve` over a cluster, as processes: two workers, one API server, pods that come and go meanwhile."""

import json
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.run.cluster.api_server import ApiServer, api_server, endpoint_slice
from tests.run.cluster.test_api import kubeconfig
from tests.run.service.processes import command, environment, serving
from tests.waiting import comes_true

pytestmark = pytest.mark.slow
FLEET = """\
format = 1
name = "found"
policy = "round-robin"
[serve]
slow_start_s = 0
[[pool]]
name = "a"
model = "m"
backends = ["kube:///services/vllm"]
"""


@contextmanager
def engine(name: str) -> Iterator[int]:
    """The port of a server that says who it is."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._say({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self._say({"served_by": name, "choices": [{"message": {"role": "assistant", "content": "x"}}]})

        def _say(self, what: dict[str, Any]) -> None:
            body = json.dumps(what).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def is_there(server: ApiServer, name: str, port: int, ready: bool = True) -> None:
    end = {"addresses": ["127.0.0.1"], "conditions": {"ready": ready, "serving": True, "terminating": not ready}}
    endpoint_slice(server, name, port, end)


def test_workers_follow_the_cluster_through_a_restart_of_its_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)

    def asked() -> str:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
        request = urllib.request.Request(f"{gateway.url}/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(json.load(answer)["served_by"])

    with api_server() as server, engine("one") as first, engine("two") as second:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.port)))
        is_there(server, "one", first)
        with serving(tmp_path, file, "--workers", "2") as gateway:
            assert {asked() for _ in range(6)} == {"one"}
            server.stop()
            assert comes_true(lambda: "cannot be reached" in gateway.errors)
            assert {asked() for _ in range(6)} == {"one"}
            is_there(server, "two", second)
            is_there(server, "one", first, ready=False)
            server.compact()
            server.start()
            # Of both workers, whoever is asked; none of them fails a request meanwhile.
            assert comes_true(lambda: {asked() for _ in range(12)} == {"two"})
            assert gateway.ends() == 0


def test_without_a_cluster_it_says_so_and_ends(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    nowhere = environment(tmp_path, KUBECONFIG=str(tmp_path / "none"))
    done = subprocess.run(
        command("serve", file, "--port", "0"), capture_output=True, text=True, env=nowhere, timeout=180, check=False
    )
    assert done.returncode == 2
    assert "no cluster is known here" in done.stderr
    assert "Traceback" not in done.stderr
