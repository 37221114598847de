"""A form with files in it (RFC 7578), as HTTP clients send it: the whole body is there already."""

import re
from typing import NamedTuple

from crosstie.core.errors import BadInput

_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;,]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[; ]name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(rb'filename="([^"]*)"', re.IGNORECASE)
# Each takes a step here; no API has a tenth of them.
_MOST_PARTS = 1000


def with_field(body: bytes, name: str, value: str) -> bytes:
    """The same form with another value in one of its fields that are no files."""
    start = re.search(rb'name="%b"[^\r]*(?:\r\n[^\r]+)*\r\n\r\n' % re.escape(name.encode()), body)
    if start is None:
        return body
    end = body.index(b"\r\n", start.end())
    return body[: start.end()] + value.encode() + body[end:]


class FormPart(NamedTuple):
    """The name of its file, which is empty for others, and where in the body its content is: a recording of thirty
    megabytes is passed on and not looked at, so it is not copied either."""

    file: str
    start: int
    end: int

    def content(self, body: bytes) -> bytes:
        return body[self.start : self.end]


def read_form(content_type: bytes, body: bytes) -> dict[str, FormPart]:
    """Its parts by the names of their fields. Raises BadInput."""
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith(b"multipart/form-data") or found is None:
        raise BadInput("a file is sent as multipart/form-data, with a boundary")
    mark = b"\r\n--" + (found[1] or found[2])
    # The first may stand at the very beginning, without the end of a line before it.
    begun = -2 if body.startswith(mark[2:]) else body.find(mark)
    if begun == -1:
        raise BadInput("the form has no end")
    at = begun + len(mark)
    fields: dict[str, FormPart] = {}
    number = 0
    while (end := body.find(mark, at)) >= 0:
        number += 1
        if number > _MOST_PARTS:
            raise BadInput(f"a form of more than {_MOST_PARTS} parts")
        head_end = body.find(b"\r\n\r\n", at, end)
        head = body[at:head_end] if head_end >= 0 else b""
        name = _NAME.search(head)
        if name is None:
            raise BadInput("a part of the form has no name")
        file = _FILENAME.search(head)
        fields[name[1].decode(errors="replace")] = FormPart(
            file[1].decode(errors="replace") if file else "", head_end + 4, end
        )
        at = end + len(mark)
    if not body.startswith(b"--", at):
        raise BadInput("the form has no end")
    return fields
