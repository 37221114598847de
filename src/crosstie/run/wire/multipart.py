"""A form with files in it (RFC 7578), as HTTP clients send it: the whole body is there already."""

import re

from crosstie.core.errors import BadInput

_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;,]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'[; ]name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(rb'filename="([^"]*)"', re.IGNORECASE)


def with_field(body: bytes, name: str, value: str) -> bytes:
    """The same form with another value in one of its fields that are no files."""
    start = re.search(rb'name="%b"[^\r]*(?:\r\n[^\r]+)*\r\n\r\n' % re.escape(name.encode()), body)
    if start is None:
        return body
    end = body.index(b"\r\n", start.end())
    return body[: start.end()] + value.encode() + body[end:]


def read_form(content_type: bytes, body: bytes) -> dict[str, tuple[str, bytes]]:
    """By field, the name of its file, which is empty for others, and its content. Raises BadInput."""
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith(b"multipart/form-data") or found is None:
        raise BadInput("a file is sent as multipart/form-data, with a boundary")
    mark = b"--" + (found[1] or found[2])
    parts = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(parts) < 2 or not parts[-1].startswith(b"--"):
        raise BadInput("the form has no end")
    fields: dict[str, tuple[str, bytes]] = {}
    for part in parts[1:-1]:
        head, sep, content = part.partition(b"\r\n\r\n")
        name = _NAME.search(head)
        if not sep or name is None:
            raise BadInput("a part of the form has no name")
        file = _FILENAME.search(head)
        fields[name[1].decode(errors="replace")] = (file[1].decode(errors="replace") if file else "", content)
    return fields
