"""Files and batches on disk: contents and answers as plain files in one folder, beside the index of them.

A mark that a request was answered comes first, in a file that already has its full length, so a full disk cannot refuse
it; the answer's line follows. Whoever resumes a batch cuts off half a line and reports marks without a line as lost:
nothing is asked twice.
"""

import os
import re
import secrets
from pathlib import Path
from time import time

from crosstie.catalog.writing import in_words
from crosstie.core.errors import BadInput
from crosstie_gateway.batch.index import Batch, Index, Quota, StoredFile
from crosstie_gateway.batch.lines import BatchLine, answer_line, check_lines, custom_ids, told_ids, unanswered_line
from crosstie_gateway.wire.request import RequestLimits

_INDEX = "index.db"
# What a file system, or another process that starts beside this one, may have put there before.
_NOBODYS = re.compile(rf"{re.escape(_INDEX)}.*|\.runner|lost\+found")
_OURS = re.compile(r"((?:file|batch)-[0-9a-f]{24})\.(?:content|output|error|asked)(?:\.part)?")
# Younger ones may belong to an upload that goes on.
_ORPHAN_S = 3600.0
_LOST = "it was answered and charged, and its answer could not be written before the gateway ended"
_LATE = "the batch's completion window was over before this was run"


class BatchStore:
    """`most_bytes`: of all files together, after which no more are taken."""

    def __init__(self, folder: Path, most_bytes: int):
        self.folder, self.most_bytes = folder, most_bytes
        with in_words(f"--batches {folder}"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            there = {path.name for path in folder.iterdir()}
            others = sorted(name for name in there if not _NOBODYS.fullmatch(name))
            if others and _INDEX not in there:
                raise BadInput(f"--batches {folder}: has other things in it ('{others[0]}'): name one for it alone")
            if folder.stat().st_uid == os.geteuid():
                # Somebody else's is left as it is: what is put into it is nobody else's to read in any case.
                folder.chmod(0o700)
            os.close(_opened(folder / ".runner", os.O_CREAT))
        self.index = Index(folder / _INDEX)

    def free_bytes(self) -> int:
        space = os.statvfs(self.folder)
        return space.f_bavail * space.f_frsize

    # Files

    def add(self, key_id: int, filename: str, content: bytes | memoryview, quota: Quota) -> StoredFile:
        """Raises QuotaExceeded and NoRoom."""
        made = _stored(f"file-{secrets.token_hex(12)}", key_id, filename, "batch", len(content))
        draft, place = self.folder / f"{made.id}.content.part", self.content_of(made.id)
        try:
            _write(draft, content)
            os.replace(draft, place)
            self.index.add_file(made, quota, self.most_bytes)
        except BaseException:
            draft.unlink(missing_ok=True)
            place.unlink(missing_ok=True)
            raise
        return made

    def delete(self, key_id: int, name: str) -> bool:
        """False where a batch needs it."""
        if not self.index.delete_file(key_id, name):
            return False
        self.content_of(name).unlink(missing_ok=True)
        return True

    def content_of(self, name: str) -> Path:
        return self.folder / f"{name}.content"

    def delete_old(self, keep_s: float) -> None:
        """What has been kept for long enough."""
        for name in self.index.take_old(int(time() - keep_s)):
            self.content_of(name).unlink(missing_ok=True)

    def delete_orphans(self) -> None:
        """Deletes what a process that died has left: files of no index and no running batch."""
        files, batches = self.index.known()
        wanted = files | batches | {_adopted_id(name, kind) for name in batches for kind in ("output", "error")}
        for path in self.folder.iterdir():
            ours = _OURS.fullmatch(path.name)
            if ours is not None and ours[1] not in wanted and path.stat().st_mtime < time() - _ORPHAN_S:
                path.unlink(missing_ok=True)

    # Batches

    def check(self, batch: Batch, most_lines: int, limits: RequestLimits) -> None:
        """Checks a batch's file, and makes the faults its errors."""
        source = self.content_of(batch.input_file_id)
        batch.total, batch.errors = check_lines(source, batch.endpoint, most_lines, limits)
        if not batch.errors:
            _write(self._beside(batch, "asked"), bytes(batch.total))
        batch.become("failed" if batch.errors else "in_progress")
        self.index.save([batch])

    def resume(self, batch: Batch, limits: RequestLimits) -> bytearray:
        """Which requests of a batch are done, by its files."""
        done, marks = bytearray(batch.total), self._beside(batch, "asked").read_bytes()
        answered = {kind: self._told(batch, kind) for kind in ("output", "error")}
        if any(marks) or any(answered.values()):
            for number, custom_id in enumerate(custom_ids(self.content_of(batch.input_file_id), limits)):
                done[number] = custom_id in answered["output"] or custom_id in answered["error"]
                if marks[number] and not done[number]:
                    self._append(batch, "error", unanswered_line(batch.id, custom_id, "answer_lost", _LOST))
                    answered["error"].add(custom_id)
                    done[number] = 1
        batch.completed, batch.failed = len(answered["output"]), len(answered["error"])
        return done

    def _told(self, batch: Batch, kind: str) -> set[str]:
        """The requests that have their line. Half a line is cut off."""
        path, answered, whole = self._beside(batch, kind), set[str](), 0
        for custom_id, end in told_ids(path):
            answered.add(custom_id)
            whole = end
        if path.exists() and path.stat().st_size > whole:
            os.truncate(path, whole)
        return answered

    def mark(self, batch: Batch, line: BatchLine) -> None:
        handle = _opened(self._beside(batch, "asked"))
        try:
            os.pwrite(handle, b"\1", line.number)
        finally:
            os.close(handle)

    def keep(self, batch: Batch, line: BatchLine, status: int, request_id: str, body: bytes) -> str:
        """Writes an answer, and says into which of the two files."""
        kind = "output" if status < 400 else "error"
        self.mark(batch, line)
        self._append(batch, kind, answer_line(batch.id, line.custom_id, request_id, status, body))
        return kind

    def _append(self, batch: Batch, kind: str, line: bytes) -> None:
        """All of it or nothing."""
        handle = _opened(self._beside(batch, kind), os.O_CREAT | os.O_APPEND)
        try:
            before, left = os.fstat(handle).st_size, memoryview(line)
            try:
                while left:
                    left = left[os.write(handle, left) :]
            except OSError:
                os.ftruncate(handle, before)
                raise
        finally:
            os.close(handle)
        batch.answer_bytes += len(line)

    def finalise(self, batch: Batch, outcome: str, limits: RequestLimits) -> None:
        """Makes its answers files of its key. Done twice, it has the same result."""
        if batch.status != "finalizing":
            # Written down before anything is moved: from then on nothing more is asked.
            batch.outcome = outcome
            batch.become("finalizing")
            self.index.save([batch])
        if batch.outcome in ("expired", "failed"):
            self._tell_rest(batch, limits)
        adopted = [file for kind in ("output", "error") if (file := self._adopt(batch, kind)) is not None]
        for file in adopted:
            if file.id == _adopted_id(batch.id, "output"):
                batch.output_file_id = file.id
            else:
                batch.error_file_id = file.id
        batch.become(batch.outcome)
        self.index.save([batch], adopted)
        self._beside(batch, "asked").unlink(missing_ok=True)

    def _tell_rest(self, batch: Batch, limits: RequestLimits) -> None:
        """Writes a line for each request that was not run, with the reason."""
        why = batch.errors[0] if batch.errors else {"code": "batch_expired", "message": _LATE}
        source = self.content_of(batch.input_file_id)
        moved = any(self.content_of(_adopted_id(batch.id, kind)).exists() for kind in ("output", "error"))
        if moved or not source.exists() or not self._beside(batch, "asked").exists():
            return
        done = self.resume(batch, limits)
        for number, custom_id in enumerate(custom_ids(source, limits)):
            if not done[number]:
                self._append(batch, "error", unanswered_line(batch.id, custom_id, why["code"], why["message"]))

    def _adopt(self, batch: Batch, kind: str) -> StoredFile | None:
        """None where there is nothing."""
        made, beside = _adopted_id(batch.id, kind), self._beside(batch, kind)
        if beside.exists():
            handle = _opened(beside)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(beside, self.content_of(made))
        elif not self.content_of(made).exists():
            return None
        size = self.content_of(made).stat().st_size
        return _stored(made, batch.key_id, f"{batch.id}_{kind}.jsonl", "batch_output", size)

    def _beside(self, batch: Batch, kind: str) -> Path:
        """Where its answers (`output`), its failures (`error`) and its marks (`asked`) are while it runs."""
        return self.folder / f"{batch.id}.{kind}"


def _adopted_id(batch_id: str, kind: str) -> str:
    return f"file-{batch_id.removeprefix('batch-')[:-1]}{'0' if kind == 'output' else '1'}"


def _stored(name: str, key_id: int, filename: str, purpose: str, size: int) -> StoredFile:
    now = int(time())
    return StoredFile(id=name, key_id=key_id, filename=filename, purpose=purpose, bytes=size, created_at=now)


def _opened(path: Path, flags: int = 0) -> int:
    """For its owner alone, whatever the umask is."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)


def _write(path: Path, content: bytes | memoryview) -> None:
    handle = _opened(path, os.O_CREAT | os.O_TRUNC)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
