"""A form with files in it (RFC 7578), as HTTP clients send it.

An engine reads it again. So what two readers could take differently is refused: a field with two names or in pieces, a
folded line, an unclear boundary.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

from crosstie.core.errors import BadInput

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_PARAMETER = re.compile(rb'[ \t]*+;[ \t]*+(?:(%b)=(?:"((?:[^"\\]|\\.)*+)"|([^\s;,"\\]++)))?+' % _TOKEN)
_LINE = re.compile(rb"(%b):[ \t]*+([^\r\n]*+)" % _TOKEN)
_FORM = b"multipart/form-data"
_MOST_BOUNDARY = 70
# Each takes a step here; no API has a tenth of them.
_MOST_PARTS = 1000
# All heads of parts together: they are read at once.
_MOST_HEADS = 2**16


class FormPart(NamedTuple):
    """The name of its file, empty for others, and where its content is in the body: large files are passed on, not
    copied."""

    file: str
    start: int
    end: int

    def content(self, body: bytes) -> bytes:
        return body[self.start : self.end]

    def replaced(self, body: bytes, content: bytes) -> bytes:
        """The same form with another content of this part."""
        return body[: self.start] + content + body[self.end :]


class Boundaries:
    """Where they are in a form that comes in pieces: each is searched as it comes, since of thirty megabytes that
    would keep everybody waiting."""

    def __init__(self, content_type: bytes):
        # Where there is none, the form is refused when it is read.
        self.mark = b"\r\n--" + (_boundary(content_type) or b"")
        self.places: list[int] = []
        # What may be the beginning of one, and where it is. The first may stand at the very beginning, without the end
        # of a line before it.
        self._left, self._at = b"\r\n", -2

    def feed(self, piece: bytes) -> bool:
        """Whether it may go on: it may, and whatever comes after too many is not looked at."""
        text, places, mark = self._left + piece, self.places, self.mark
        found = text.find(mark)
        while found >= 0 and len(places) <= _MOST_PARTS + 1:
            places.append(self._at + found)
            found = text.find(mark, found + len(mark))
        self._left = text[-len(mark) + 1 :]
        self._at += len(text) - len(self._left)
        return True


def read_form(
    content_type: bytes, body: bytes, once: Collection[str] = (), known: Boundaries | None = None
) -> dict[str, FormPart]:
    """Its parts by field name, the last of several; those in `once` may come once only. `known`: where its boundaries
    are, if it came in pieces. Raises BadInput."""
    if _boundary(content_type) is None:
        raise BadInput("a file is sent as multipart/form-data, with a boundary")
    if known is None:
        known = Boundaries(content_type)
        known.feed(body)
    mark, (begun, *ends) = known.mark, known.places or [-1]
    if begun == -1:
        raise BadInput("the form has no end")
    at = begun + len(mark)
    fields: dict[str, FormPart] = {}
    number = heads = 0
    while not body.startswith(b"--", at):
        number += 1
        if number > len(ends):
            raise BadInput("the form has no end")
        if number > _MOST_PARTS:
            raise BadInput(f"a form of more than {_MOST_PARTS} parts")
        end = ends[number - 1]
        head_end = body.find(b"\r\n\r\n", at, min(end, at + _MOST_HEADS + 4))
        heads += (head_end if head_end >= 0 else end) - at
        if heads > _MOST_HEADS:
            raise BadInput(f"a form whose parts have heads of more than {_MOST_HEADS} bytes")
        if not body.startswith(b"\r\n", at) or head_end < 0:
            raise BadInput("a part of the form has no head")
        name, file = _names(body[at + 2 : head_end])
        if name in fields and name in once:
            raise BadInput(f"the form has two fields '{name}'")
        fields[name] = FormPart(file, head_end + 4, end)
        at = end + len(mark)
    return fields


def _boundary(content_type: bytes) -> bytes | None:
    kind, parameters = content_type[: len(_FORM)], _parameters(content_type[len(_FORM) :])
    boundary = parameters.get(b"boundary", b"") if parameters is not None else b""
    if kind.lower() != _FORM or not 0 < len(boundary) <= _MOST_BOUNDARY or b"\\" in boundary:
        return None
    return boundary


def _names(head: bytes) -> tuple[str, str]:
    """What a part's field and file are called. Raises BadInput."""
    said: bytes | None = None
    for line in head.split(b"\r\n") if head else ():
        header = _LINE.fullmatch(line)
        if header is None:
            raise BadInput("a header in the form is not NAME: VALUE on one line")
        if header[1].lower() == b"content-disposition":
            if said is not None:
                raise BadInput("a part of the form has two names")
            said = header[2]
    kind, parameters = (b"", None) if said is None else (said[:9], _parameters(said[9:]))
    name = None if parameters is None else parameters.get(b"name")
    if kind.lower() != b"form-data" or parameters is None or name is None or b"\\" in name:
        raise BadInput("a part of the form has no name")
    file = parameters.get(b"filename") or parameters.get(b"filename*") or b""
    return name.decode(errors="replace"), file.decode(errors="replace")


def _parameters(text: bytes) -> dict[bytes, bytes] | None:
    """What follows a header's value; None where it is malformed, or where a reader of RFC 2231 (`name*0=...;
    name*1=...`) would have another name or boundary of it."""
    values: dict[bytes, bytes] = {}
    at, end = 0, len(text.rstrip(b" \t"))
    while at < end:
        parameter = _PARAMETER.match(text, at)
        if parameter is None:
            return None
        at = parameter.end()
        if parameter[1] is not None:
            name = parameter[1].lower()
            if name in values or name.startswith((b"name*", b"boundary*")):
                return None
            values[name] = parameter[2] if parameter[2] is not None else parameter[3]
    return values
