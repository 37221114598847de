"""Forms: what is replaced in them, and what is refused because an engine might read it otherwise."""

from typing import Any

import pytest

from crosstie.core.errors import BadInput
from crosstie_gateway.wire.multipart import Boundaries, read_form

KIND = b"multipart/form-data; boundary=x"


def form(*heads: bytes) -> bytes:
    return b"".join(b"--x\r\n%b\r\n\r\n1\r\n" % head for head in heads) + b"--x--\r\n"


def field(name: bytes) -> bytes:
    return b"content-disposition: form-data; " + name


@pytest.mark.parametrize("more", [b"", b"\r\ncontent-type: text/plain"])
def test_a_field_is_replaced_and_nothing_else(more: bytes) -> None:
    head = field(b'name="model"') + more
    body = form(field(b'name="f"; filename="f"'), head, field(b'name="g"'))
    part = read_form(KIND, body)["model"]
    assert (part.file, part.content(body)) == ("", b"1")
    assert part.replaced(body, b"longer") == body.replace(head + b"\r\n\r\n1", head + b"\r\n\r\nlonger")


@pytest.mark.parametrize(
    ("kind", "head", "name", "file"),
    [
        (KIND, field(b"name=model"), "model", ""),
        (KIND, field(b'name="a"; filename="a \\"b\\".wav";'), "a", 'a \\"b\\".wav'),
        (KIND, field(b"NAME=\"a\" ; filename*=utf-8''b.wav"), "a", "utf-8''b.wav"),
        (b'Multipart/Form-Data;charset=utf-8; boundary="x"', field(b'name="a[]"'), "a[]", ""),
    ],
)
def test_fields_are_named_as_clients_write_it(kind: bytes, head: bytes, name: str, file: str) -> None:
    ((found, part),) = read_form(kind, form(head)).items()
    assert (found, part.file) == (name, file)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        # Names that another reader takes for another.
        (KIND, form(field(b'name="a"; name="model"'))),
        (KIND, form(field(b"name=\"a\"; name*=utf-8''model"))),
        (KIND, form(field(b'name*0="mod"; name*1="el"'))),
        (KIND, form(field(b'name="mo\\del"'))),
        (KIND, form(field(b'name="a"') + b"\r\n" + field(b'name="model"'))),
        (KIND, form(field(b'name="a";') + b'\r\n name="model"')),
        (KIND, form(b"x: y\n" + field(b'name="model"') + b"\r\n" + field(b'name="a"'))),
        (KIND, form(b'content-disposition : form-data; name="model"\r\n' + field(b'name="a"'))),
        (KIND, form(b'x: form-data; name="model"')),
        (KIND, form(b'content-disposition: attachment; name="model"')),
        # Boundaries that another reader takes for text, or text for a boundary.
        (KIND, form(field(b'name="a"')).replace(b"--x\r", b"--xy\r", 1)),
        (KIND, b"--x\r\n" + field(b'name="a"') + b"\r\n\r\n1\r\n--xy\r\n\r\n\r\n--x--"),
        (KIND, b"--x\n" + field(b'name="a"') + b"\n\n1\r\n--x--"),
        (b"multipart/form-data; xboundary=x", form(field(b'name="a"'))),
        (b'multipart/form-data; a="; boundary=x"', form(field(b'name="a"'))),
        (b"multipart/form-data; boundary=x; boundary=y", form(field(b'name="a"'))),
        (b"multipart/form-data; boundary*0=x", form(field(b'name="a"'))),
        (b'multipart/form-data; boundary="\\x"', form(field(b'name="a"'))),
        (b"multipart/form-data, text/plain; boundary=x", form(field(b'name="a"'))),
    ],
)
def test_what_two_readers_would_read_differently_is_refused(kind: bytes, body: bytes) -> None:
    with pytest.raises(BadInput):
        read_form(kind, body)


def test_a_field_may_come_again_unless_it_is_read_here() -> None:
    body = form(field(b'name="image"; filename="1"'), field(b'name="image"; filename="2"'))
    assert read_form(KIND, body, once=("model",))["image"].file == "2"
    with pytest.raises(BadInput, match="two fields 'image'"):
        read_form(KIND, body, once=("image",))


def test_nothing_is_read_behind_the_end() -> None:
    body = form(field(b'name="a"')) + form(field(b'name="model"'))
    assert list(read_form(KIND, body)) == ["a"]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("before", [b"", b"\r\n", b"\n", b"preamble", b"-", b"\r\n--\r\n", b"\r\n-"])
def test_a_form_that_comes_in_pieces_is_read_as_at_once(before: bytes, piece: int) -> None:
    body = before + form(field(b'name="model"'), field(b'name="\r"'), field(b'name="b"'))
    known = Boundaries(KIND)
    for at in range(0, len(body), piece):
        assert known.feed(body[at : at + piece])
    assert known.places == [at - 2 for at in range(len(body)) if (b"\r\n" + body).startswith(b"\r\n--x", at)]
    assert outcome(body, known) == outcome(body)


def outcome(body: bytes, known: Boundaries | None = None) -> object:
    try:
        return read_form(KIND, body, known=known)
    except BadInput as error:
        return str(error)


def test_reading_a_form_that_has_come_looks_at_its_heads_alone() -> None:
    body = form(field(b'name="model"')).replace(b"1\r\n", b"\r\n--" * 2**20 + b"\r\n")
    known, looked_at = Boundaries(KIND), 0

    class Watched(bytes):
        def find(self, what: Any, start: Any = 0, end: Any = None) -> int:
            nonlocal looked_at
            looked_at += (len(self) if end is None else end) - start
            return bytes.find(self, what, start, end)

    known.feed(body)
    assert read_form(KIND, Watched(body), known=known)["model"].end == len(body) - len(b"\r\n--x--\r\n")
    assert 0 < looked_at < 2**17


def test_boundaries_are_kept_up_to_the_limit() -> None:
    known = Boundaries(KIND)
    for _ in range(100):
        known.feed(b"\r\n--x" * 1000)
    assert len(known.places) == 1002
