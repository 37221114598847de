"""Texts that prompts are cut from: a folder of documents, or what somebody asked before, in a file.

Texts stand one after the other, so that a prompt that is longer than its text goes on in the next. They are cut into
words, each with the white space before it; where the engine says how many tokens each has, a prompt is as many words as
its length asks for and a part of one more. All prompts of a run begin with the same short line, which no other run has:
what texts have in common stays so, and no run is served from what another left in a cache.
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec

from crosstie.catalog.reading import text_of
from crosstie.core.errors import BadData, BadInput

Kind = Literal["documents", "requests", "chats"]
# Of all texts together: enough for any benchmark, and sent to every process that sends.
_MOST_CHARACTERS = 1_000_000
# A word with the white space before it.
_PIECE = re.compile(r"\s*\S.{0,40}?(?=\s|$)|\s+$", re.DOTALL)
_LONGEST_PIECE = 200
_BETWEEN = "\n\n"
# Of each text, how far on another round of the texts begins, in pieces.
_ROUND = 7


class PromptTexts(msgspec.Struct, frozen=True, dict=True):
    kind: Kind
    # Its name alone: the path is the machine's business.
    source: str
    sha256: str
    texts: tuple[str, ...]
    # Tokens of every piece, by its text; empty where nobody has counted.
    tokens: Mapping[str, int] = {}

    @property
    def told(self) -> dict[str, object]:
        """What a file says of them: not the texts."""
        return {"kind": self.kind, "source": self.source, "sha256": self.sha256, "texts": len(self.texts)}

    @cached_property
    def _laid_out(self) -> tuple[list[str], list[int]]:
        """All pieces, and at which of them each text begins."""
        pieces: list[str] = []
        begins = []
        for text in self.texts:
            begins.append(len(pieces))
            pieces += pieces_of(text + _BETWEEN)
        return pieces, begins

    @property
    def pieces(self) -> set[str]:
        return set(self._laid_out[0])

    def counted(self, tokens: Mapping[str, int]) -> "PromptTexts":
        return msgspec.structs.replace(self, tokens=tokens)

    @cached_property
    def _ends(self) -> list[float]:
        """By piece: tokens, or characters where nobody has counted, up to its end."""
        ends, so_far = [], 0.0
        for piece in self._laid_out[0]:
            so_far += self.tokens[piece] if self.tokens else len(piece)
            ends.append(so_far)
        return ends

    def cut(self, number: int, length: float) -> str:
        """The prompt of a request: so many tokens, or characters where nobody has counted."""
        pieces, begins = self._laid_out
        turn, place = divmod(number, len(begins))
        return self._from((begins[place] + _ROUND * turn) % len(pieces), length)

    def _from(self, begin: int, length: float) -> str:
        pieces, ends = self._laid_out[0], self._ends
        taken: list[str] = []
        while length > 0:
            before = ends[begin - 1] if begin else 0.0
            end = bisect_right(ends, before + length)
            taken += pieces[begin:end]
            if end < len(pieces):
                left = length - (ends[end - 1] - before if end > begin else 0.0)
                size = ends[end] - (ends[end - 1] if end else 0.0)
                taken.append(pieces[end][: round(len(pieces[end]) * left / size)])
                break
            length -= ends[-1] - before
            begin = 0
        return "".join(taken)


def pieces_of(text: str) -> list[str]:
    """Together they are the text."""
    pieces: list[str] = []
    at = 0
    for match in _PIECE.finditer(text):
        # What no piece begins with, as a very long word, is cut.
        pieces += _cut(text[at : match.end()])
        at = match.end()
    return [*pieces, *_cut(text[at:])]


def _cut(text: str) -> list[str]:
    return [text[at : at + _LONGEST_PIECE] for at in range(0, len(text), _LONGEST_PIECE)]


def read_texts(path: Path) -> PromptTexts:
    """A folder of documents; JSON of conversations; JSON lines of requests or conversations; or one document."""
    if path.is_dir():
        return _made("documents", path, _documents(path))
    if not path.is_file():
        raise BadInput(f"--prompts {path}: there is no such file or folder")
    text = text_of(path)
    if path.suffix in (".jsonl", ".ndjson"):
        return _logged(path, _lines(path, text))
    if path.suffix == ".json":
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadData(str(path), "", f"is no JSON: {error}") from None
        return _logged(path, enumerate(raw if isinstance(raw, list) else [raw], start=1))
    return _made("documents", path, [text])


def _documents(folder: Path) -> Iterator[str]:
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        try:
            yield file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            # A picture or a program among them is no text.
            continue


def _lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise BadData(str(path), f"line {number}", f"is no JSON: {error}") from None


def _logged(path: Path, entries: Iterator[tuple[int, Any]]) -> PromptTexts:
    prompts, kinds = [], set[Kind]()
    for number, entry in entries:
        kind, text = _said(entry)
        if text is None:
            raise BadData(str(path), f"entry {number}", "has no messages, prompt or conversations with text in them")
        kinds.add(kind)
        prompts.append(text)
    return _made("chats" if kinds == {"chats"} else "requests", path, prompts)


def _said(entry: Any) -> tuple[Kind, str | None]:
    """What one entry asks: an OpenAI request, or the record of one, or a conversation as ShareGPT has it."""
    if not isinstance(entry, dict):
        return "requests", None
    for inner in ("body", "request"):
        if isinstance(entry.get(inner), dict):
            return _said(entry[inner])
    if isinstance(entry.get("conversations"), list):
        return "chats", _joined([turn.get("value") for turn in entry["conversations"] if isinstance(turn, dict)])
    if isinstance(entry.get("messages"), list):
        return "requests", _joined([_content(message) for message in entry["messages"] if isinstance(message, dict)])
    prompt = entry.get("prompt")
    return "requests", _joined(prompt if isinstance(prompt, list) else [prompt])


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return _BETWEEN.join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _joined(parts: Sequence[Any]) -> str | None:
    return _BETWEEN.join(part for part in parts if isinstance(part, str) and part.strip()) or None


def _made(kind: Kind, path: Path, texts: Iterator[str] | Sequence[str]) -> PromptTexts:
    prompts: list[str] = []
    room, digest = _MOST_CHARACTERS, hashlib.sha256()
    for text in texts:
        digest.update(text.encode(errors="replace") + b"\0")
        if text.strip() and room > 0:
            prompts.append(text[:room])
            room -= len(text)
    if not prompts:
        raise BadInput(f"--prompts {path}: has no text")
    return PromptTexts(kind, path.name or path.resolve().name, digest.hexdigest()[:16], tuple(prompts))
