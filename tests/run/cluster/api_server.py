"""An API server as far as discovery sees one: lists, watches over chunked HTTP, bookmarks, 410, and restarts.

Versions count up with every change; what happened before a version that is no longer kept cannot be watched, as after
a compaction of etcd.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from crosstie_gateway.cluster.api import ClusterApi

KINDS = {
    "/api/v1/namespaces/default/pods": "Pod",
    "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices": "EndpointSlice",
    "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools": "InferencePool",
}


class ApiServer:
    """Its state outlives restarts, as etcd does."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 100
        # Changes after this version can still be watched.
        self.kept = 100
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.history: list[tuple[int, str, str, dict[str, Any]]] = []
        # (path, whether it was a watch) of everything that was asked.
        self.asked: list[tuple[str, bool]] = []
        # By kind, a status with which it is refused.
        self.refusals: dict[str, int] = {}
        self.port = 0
        self.generation = self.ended = 0
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        self.generation += 1
        self._server = _Server(("127.0.0.1", self.port), _handler(self, self.generation))
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """As a process that is killed: streams end in the middle."""
        assert self._server is not None
        with self.changed:
            self.generation += 1
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._server = None

    def put(self, kind: str, name: str, **content: Any) -> None:
        with self.changed:
            self.version += 1
            event = "MODIFIED" if (kind, name) in self.objects else "ADDED"
            meta = {"name": name, "namespace": "default", **content.pop("metadata", {})}
            made = {"kind": kind, **content, "metadata": meta | {"resourceVersion": str(self.version)}}
            self.objects[kind, name] = made
            self.history.append((self.version, kind, event, made))
            self.changed.notify_all()

    def delete(self, kind: str, name: str) -> None:
        with self.changed:
            self.version += 1
            made = json.loads(json.dumps(self.objects.pop((kind, name))))
            made["metadata"]["resourceVersion"] = str(self.version)
            self.history.append((self.version, kind, "DELETED", made))
            self.changed.notify_all()

    def compact(self) -> None:
        """What has happened can no longer be watched; who watches already goes on."""
        with self.changed:
            self.kept = self.version

    def end_streams(self) -> None:
        """As it does after a few minutes: properly, and while it goes on."""
        with self.changed:
            self.ended += 1
            self.changed.notify_all()

    def lists(self, kind: str) -> int:
        return sum(not watched for path, watched in self.asked if KINDS.get(path) == kind)

    def watches(self, kind: str) -> int:
        return sum(watched for path, watched in self.asked if KINDS.get(path) == kind)

    def api(self, **settings: Any) -> ClusterApi:
        # Imported here: it takes as long as all else that these tests import.
        from kubernetes.client import Configuration

        return ClusterApi(Configuration(host=f"http://127.0.0.1:{self.port}"), **settings)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave as they like."""


def _handler(api: ApiServer, generation: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            asked = {key: values[0] for key, values in parse_qs(parts.query).items()}
            watched = asked.get("watch") in ("true", "True")
            api.asked.append((parts.path, watched))
            kind = KINDS.get(parts.path, "")
            status = api.refusals.get(kind, 200 if kind else 404)
            if status != 200:
                self._answer(
                    status, {"kind": "Status", "status": "Failure", "code": status, "message": "as it happens"}
                )
            elif watched:
                self._watch(kind, asked)
            else:
                with api.changed:
                    items = [one for (of, _), one in api.objects.items() if of == kind and _chosen(one, asked)]
                    whole = {"kind": f"{kind}List", "metadata": {"resourceVersion": str(api.version)}, "items": items}
                self._answer(200, whole)

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _watch(self, kind: str, asked: dict[str, str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            at, ended = int(asked["resourceVersion"]), api.ended
            if at < api.kept:
                # As a real one says it: in the stream, and not as its status.
                self._event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
                self.wfile.write(b"0\r\n\r\n")
                return
            while True:
                with api.changed:
                    if api.version == at and (api.generation, api.ended) == (generation, ended):
                        api.changed.wait(0.2)
                    if api.generation != generation:
                        self.close_connection = True
                        return
                    if api.ended != ended:
                        self.wfile.write(b"0\r\n\r\n")
                        return
                    news = [(event, made) for version, of, event, made in api.history if version > at and of == kind]
                    at = api.version
                for event, made in news:
                    if _chosen(made, asked):
                        self._event(event, made)
                self._event("BOOKMARK", {"kind": kind, "metadata": {"resourceVersion": str(at)}})

        def _event(self, event: str, made: dict[str, Any]) -> None:
            line = json.dumps({"type": event, "object": made}).encode() + b"\n"
            # In two pieces: lines and chunks have nothing to do with each other.
            for piece in (line[:7], line[7:]):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.flush()

    return Handler


def _chosen(made: dict[str, Any], asked: dict[str, str]) -> bool:
    labels = made["metadata"].get("labels", {})
    wanted = dict(one.split("=", 1) for one in asked.get("labelSelector", "").split(",") if one)
    name = asked.get("fieldSelector", "").removeprefix("metadata.name=")
    return wanted.items() <= labels.items() and name in ("", made["metadata"]["name"])


@contextmanager
def api_server() -> Iterator[ApiServer]:
    made = ApiServer()
    made.start()
    try:
        yield made
    finally:
        if made._server is not None:
            made.stop()


def pod(
    server: ApiServer, name: str, address: str, *, ready: bool = True, leaving: bool = False, **labels: str
) -> None:
    told = {"app": "vllm"} | {f"crosstie.io/{key}": value for key, value in labels.items()}
    meta: dict[str, Any] = {"labels": told} | ({"deletionTimestamp": "2026-11-16T20:00:00Z"} if leaving else {})
    condition = {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": None}
    server.put(
        "Pod",
        name,
        metadata=meta,
        spec={"containers": []},
        status={"phase": "Running", "podIP": address, "conditions": [condition]},
    )


def endpoint_slice(
    server: ApiServer, name: str, port: int, *ends: dict[str, Any], service: str = "vllm", family: str = "IPv4"
) -> None:
    meta = {"labels": {"kubernetes.io/service-name": service}}
    server.put(
        "EndpointSlice",
        name,
        metadata=meta,
        addressType=family,
        endpoints=[*ends] or None,
        ports=[{"name": "http", "port": port, "protocol": "TCP"}],
    )
