"""An API server, asked through Kubernetes' own client library: listings, and the stream of changes after them.

Read-only, and three kinds only. Answers are decoded here: the library would build models for every event of every pod.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from crosstie.core.errors import BadInput, MissingExtra

Resource = Literal["pods", "endpointslices", "inferencepools"]
_OWN = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INFERENCE = ("inference.networking.k8s.io", "v1")
# How long a watch lasts, and how long it may be silent (servers send bookmarks about every minute).
_LASTS_S, _SILENT_S, _CONNECT_S = 300, 90.0, 5.0
GONE = 410


class ApiFault(Exception):
    """An API server that does not answer as asked. Status 0: it could not be reached."""

    def __init__(self, status: int, said: str):
        super().__init__(said)
        self.status, self.said = status, said


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class ClusterObject(msgspec.Struct, frozen=True):
    """An object of any kind; its kind's reader decodes the parts."""

    metadata: Metadata = Metadata()
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"{}")
    endpoints: msgspec.Raw = msgspec.Raw(b"[]")
    ports: msgspec.Raw = msgspec.Raw(b"[]")
    address_type: str = msgspec.field(name="addressType", default="")
    # Of an error in a stream.
    code: int = 0
    message: str = ""


class Listing(msgspec.Struct, frozen=True):
    metadata: Metadata = Metadata()
    items: tuple[ClusterObject, ...] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: ClusterObject


_listing = msgspec.json.Decoder(Listing)
_event = msgspec.json.Decoder(WatchEvent)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked at: objects of a kind in a namespace, by their labels, or one by its name."""

    resource: Resource
    namespace: str
    labels: str = ""
    name: str = ""


class ClusterApi:
    """`configuration` is the library's own; without one it is that of the pod this runs in, or of a kubeconfig."""

    def __init__(self, configuration: Any = None, *, silent_s: float = _SILENT_S):
        try:
            from kubernetes import client, config
        except ImportError:
            raise MissingExtra("kube:// backends need Kubernetes' library", "kubernetes", "crosstie-gateway") from None
        self._silent_s = silent_s
        self.namespace = "default"
        if configuration is None:
            configuration = client.Configuration()
            self.namespace = _configured(config, configuration)
        # Callers try again in their own time.
        configuration.retries = False
        made = client.ApiClient(configuration)
        self._core, self._discovery = client.CoreV1Api(made), client.DiscoveryV1Api(made)
        self._custom = client.CustomObjectsApi(made)

    def list(self, asked: Asked) -> Listing:
        answer = self._ask(asked)
        with _closing(answer), _faults():
            return _listing.decode(answer.read())

    def watch(self, asked: Asked, version: str) -> "WatchStream":
        """What happens after `version`. Raises ApiFault where nobody answers, or that is too long ago (GONE)."""
        return WatchStream(
            self._ask(asked, watch=True, resource_version=version, allow_watch_bookmarks=True, timeout_seconds=_LASTS_S)
        )

    def _ask(self, asked: Asked, **more: Any) -> Any:
        more |= {"_preload_content": False, "_request_timeout": (_CONNECT_S, self._silent_s)}
        if asked.labels:
            more["label_selector"] = asked.labels
        if asked.name:
            more["field_selector"] = f"metadata.name={asked.name}"
        # Bytes as they come, whatever kind of list the library says it gives.
        answer: Any
        with _faults():
            if asked.resource == "pods":
                answer = self._core.list_namespaced_pod(asked.namespace, **more)
            elif asked.resource == "endpointslices":
                answer = self._discovery.list_namespaced_endpoint_slice(asked.namespace, **more)
            else:
                answer = self._custom.list_namespaced_custom_object(
                    *_INFERENCE, asked.namespace, asked.resource, **more
                )
        if answer.status != 200:
            with _closing(answer), _faults():
                raise ApiFault(answer.status, _said(answer.read()))
        return answer


class WatchStream:
    """Events, one by one, until the server ends it; `close` from another thread ends it too."""

    def __init__(self, answer: Any):
        self._answer = answer

    def __iter__(self) -> Iterator[WatchEvent]:
        left = b""
        with _closing(self._answer), _faults():
            # Chunks as they come: reading for a whole buffer would hold events back.
            for chunk in self._answer.stream(amt=None, decode_content=True) if self._answer.chunked else self._rest():
                *lines, left = (left + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _decoded(line)

    def _rest(self) -> Iterator[bytes]:
        while chunk := self._answer.read1():
            yield chunk

    def close(self) -> None:
        # Closing what another thread reads would wait for it: its socket is shut instead.
        held = getattr(getattr(self._answer, "connection", None), "sock", None)
        if held is not None:
            with contextlib.suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)


def _decoded(line: bytes) -> WatchEvent:
    event = _event.decode(line)
    if event.type == "ERROR":
        raise ApiFault(event.object.code or 500, event.object.message or "an error without a reason")
    return event


@contextlib.contextmanager
def _closing(answer: Any) -> Iterator[None]:
    try:
        yield
    finally:
        answer.close()
        answer.release_conn()


@contextlib.contextmanager
def _faults() -> Iterator[None]:
    """Turns what the library and urllib3 raise into ApiFault."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise ApiFault(error.status or 0, _said(error.body or b"") or str(error.reason)) from None
    except (HTTPError, OSError) as error:
        raise ApiFault(0, _line(error)) from None
    except msgspec.MsgspecError as error:
        raise ApiFault(0, f"what it answers is not Kubernetes' ({error})") from None


def _said(body: bytes | str) -> str:
    try:
        return msgspec.json.decode(body, type=ClusterObject).message
    except msgspec.MsgspecError:
        text = body.decode(errors="replace") if isinstance(body, bytes) else body
        return text.strip().splitlines()[0][:200] if text.strip() else ""


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _configured(config: Any, configuration: Any) -> str:
    """Of the pod that this runs in, unless a kubeconfig is named; the namespace that is meant where none is."""
    named = os.environ.get("KUBECONFIG")
    try:
        if _OWN.exists() and not named:
            config.load_incluster_config(client_configuration=configuration)
            return _OWN.read_text(encoding="utf-8").strip()
        file = named or str(Path.home() / ".kube" / "config")
        config.load_kube_config(config_file=file, client_configuration=configuration)
        return str(config.list_kube_config_contexts(config_file=file)[1]["context"].get("namespace") or "default")
    except (config.ConfigException, OSError) as error:
        raise BadInput(f"kube:// backends: no cluster is known here: {_line(error)}") from None
