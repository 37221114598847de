"""A file and a batch, as the index has them and as OpenAI's API shows them."""

from time import time
from typing import Any

import msgspec

# Statuses after which nothing changes any more.
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    # Its owner; 0: of a gateway without keys.
    key_id: int
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def shown(self, keep_s: float) -> dict[str, Any]:
        kept = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "key_id"}
        return {**kept, "object": "file", "status": "processed", "expires_at": self.created_at + int(keep_s)}


class Batch(msgspec.Struct, kw_only=True):
    id: str
    key_id: int
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    # Of the fleet's classes, for what an answer's length is like; empty: as the gateway finds it.
    class_name: str = ""
    status: str = "validating"
    # What it will be when its files are in their place.
    outcome: str = ""
    # When it came to be in one of the other statuses.
    times: dict[str, int] = {}
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    # Of the answers so far.
    answer_bytes: int = 0
    errors: list[dict[str, Any]] = []

    def become(self, status: str) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(time())

    @property
    def ended_at(self) -> int:
        """0: it has not."""
        return self.times[f"{self.status}_at"] if self.status in ENDED else 0

    def fail(self, code: str, message: str) -> None:
        """Ends the whole batch for this reason, unless it has one."""
        self.errors = self.errors or [{"code": code, "message": message, "line": None, "param": None}]

    def shown(self) -> dict[str, Any]:
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "status": self.status,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id, "completion_window": self.completion_window,
            "output_file_id": self.output_file_id, "error_file_id": self.error_file_id,
            "created_at": self.created_at, "expires_at": self.expires_at, "metadata": self.metadata,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }  # fmt: skip
