"""OpenAI's files and batches: what a client may ask of the store, and only of its own part of it."""

import re
import secrets
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import Any
from urllib.parse import parse_qs

import msgspec

from crosstie.core.errors import BadInput
from crosstie_gateway.batch.desk import Desk
from crosstie_gateway.batch.index import ENDED, Batch, Quota
from crosstie_gateway.batch.lines import ENDPOINTS
from crosstie_gateway.batch.store import BatchStore
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.interfaces import Batches
from crosstie_gateway.wire.multipart import read_form
from crosstie_gateway.wire.request import Request

_encode = msgspec.json.Encoder().encode
_WINDOW = re.compile(r"(\d{1,4})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86400}
_MOST_WINDOW_S = 30 * 86400
_MOST_LISTED = 1000
# As OpenAI has it; and names of files.
_MOST_PAIRS, _MOST_NAME, _MOST_VALUE = 16, 64, 512
_MOST_FILENAME = 255
_MOST_CREATE_BYTES = 2**16


class _Asked(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchApi(Desk, Batches):
    what = "files"

    def __init__(self, store: BatchStore, gateway: Gateway):
        super().__init__(gateway)
        self._store = store

    def road(self, request: Request, key_id: int) -> Callable[[], bytes | Path]:
        path, method = request.path.rstrip("/"), request.method
        kind, _, rest = path.removeprefix("/v1/").partition("/")
        name, _, part = rest.partition("/")
        roads: dict[tuple[str, str, bool, str], Callable[[], bytes | Path]] = {
            ("POST", "files", False, ""): lambda: self._upload(request, key_id),
            ("GET", "files", False, ""): lambda: self._listed(request, key_id, kind),
            ("GET", "files", True, ""): lambda: self._file(key_id, name),
            ("GET", "files", True, "content"): lambda: self._content(key_id, name),
            ("DELETE", "files", True, ""): lambda: self._delete(key_id, name),
            ("POST", "batches", False, ""): lambda: self._create(request, key_id),
            ("GET", "batches", False, ""): lambda: self._listed(request, key_id, kind),
            ("GET", "batches", True, ""): lambda: _encode(self._owned_batch(key_id, name).shown()),
            ("POST", "batches", True, "cancel"): lambda: self._cancel(key_id, name),
        }
        road = roads.get((method, kind, bool(name), part))
        if road is None:
            raise RequestRejected(404, f"there is no {method} {path}", "not_found")
        return road

    def _quota(self) -> Quota:
        serving = self._gateway.serving
        size = int(serving.max_file_gib_per_key * 2**30)
        return Quota(serving.max_files_per_key, size, serving.max_batches_per_key)

    @property
    def _keep_s(self) -> float:
        return self._gateway.serving.batch_keep_days * 86400.0

    # Files

    def _upload(self, request: Request, key_id: int) -> bytes:
        kind = request.headers.get(b"content-type", b"")
        form = read_form(kind, request.body, ("file", "purpose"), request.boundaries)
        if "file" not in form:
            raise BadInput("the form has no field 'file'")
        purpose = form["purpose"].content(request.body)[:99].decode(errors="replace") if "purpose" in form else ""
        if purpose != "batch":
            raise BadInput(f"purpose '{purpose}': only batch is served here")
        name, content = form["file"].file or "file", memoryview(request.body)[form["file"].start : form["file"].end]
        return _encode(self._store.add(key_id, name[:_MOST_FILENAME], content, self._quota()).shown(self._keep_s))

    def _file(self, key_id: int, name: str) -> bytes:
        file = self._store.index.file(key_id, name)
        if file is None:
            raise _no_file(name)
        return _encode(file.shown(self._keep_s))

    def _content(self, key_id: int, name: str) -> Path:
        place = self._store.content_of(name)
        if self._store.index.file(key_id, name) is None or not place.exists():
            raise _no_file(name)
        return place

    def _delete(self, key_id: int, name: str) -> bytes:
        if self._store.index.file(key_id, name) is None:
            raise _no_file(name)
        if not self._store.delete(key_id, name):
            raise RequestRejected(409, f"'{name}' is the input of a batch that has not ended", "file_in_use")
        return _encode({"id": name, "object": "file", "deleted": True})

    def _listed(self, request: Request, key_id: int, kind: str) -> bytes:
        asked = parse_qs(request.query)
        given = asked.get("limit", ["20"])[0]
        if not given.isdigit() or not 1 <= int(given[:6]) <= 10_000:
            raise BadInput(f"limit '{given[:20]}': a whole number from 1 to 10000 is expected")
        limit, after = min(int(given), _MOST_LISTED), asked.get("after", [""])[0]
        index, page = self._store.index, list[dict[str, Any]]()
        if kind == "files":
            page = [file.shown(self._keep_s) for file in index.files(key_id, after, limit + 1)]
        else:
            page = [batch.shown() for batch in index.batches(key_id, after, limit + 1)]
        more, page = len(page) > limit, page[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return _encode({"object": "list", "data": page, **ends, "has_more": more})

    # Batches

    def _create(self, request: Request, key_id: int) -> bytes:
        if len(request.body) > _MOST_CREATE_BYTES:
            raise BadInput(f"the body has more than {_MOST_CREATE_BYTES} bytes")
        try:
            asked = msgspec.json.decode(request.body, type=_Asked)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadInput(f"the body is not as expected: {error}") from None
        pairs = (asked.metadata or {}).items()
        if len(pairs) > _MOST_PAIRS or any(len(n) > _MOST_NAME or len(value) > _MOST_VALUE for n, value in pairs):
            raise BadInput(f"metadata: at most {_MOST_PAIRS} names of {_MOST_NAME} and values of {_MOST_VALUE} letters")
        if asked.endpoint not in ENDPOINTS:
            raise BadInput(f"endpoint '{asked.endpoint}': {', '.join(ENDPOINTS)} are served in batches")
        window = _WINDOW.fullmatch(asked.completion_window)
        seconds = int(window[1]) * _UNIT_S[window[2]] if window else 0
        if not 0 < seconds <= _MOST_WINDOW_S:
            raise BadInput(f"completion_window '{asked.completion_window}': such as 90m, 24h or 7d, at most 30d")
        wished = request.headers.get(b"x-crosstie-class", b"").decode("latin-1").strip()
        if wished and wished not in self._gateway.live.classes:
            raise BadInput(f"x-crosstie-class: '{wished}' is no class of this fleet")
        now = int(time())
        batch = Batch(
            id=f"batch-{secrets.token_hex(12)}", key_id=key_id, endpoint=asked.endpoint,
            input_file_id=asked.input_file_id, completion_window=asked.completion_window, created_at=now,
            expires_at=now + seconds, metadata=asked.metadata, class_name=wished,
        )  # fmt: skip
        if not self._store.index.add_batch(batch, self._quota()):
            raise _no_file(asked.input_file_id)
        return _encode(batch.shown())

    def _owned_batch(self, key_id: int, name: str) -> Batch:
        batch = self._store.index.batch(key_id, name)
        if batch is None:
            raise RequestRejected(404, f"there is no batch '{name}' of yours", "batch_not_found")
        return batch

    def _cancel(self, key_id: int, name: str) -> bytes:
        batch = self._owned_batch(key_id, name)
        if batch.status in ENDED:
            raise RequestRejected(409, f"'{name}' has ended: {batch.status}", "batch_ended")
        self._store.index.cancel(key_id, name)
        return _encode(self._owned_batch(key_id, name).shown())


def _no_file(name: str) -> RequestRejected:
    return RequestRejected(404, f"there is no file '{name}' of yours", "file_not_found")
