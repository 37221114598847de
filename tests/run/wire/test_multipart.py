"""Forms: what is replaced in them, and what is refused because an engine might read it otherwise."""

import pytest

from crosstie.core.errors import BadInput
from crosstie_gateway.wire.multipart import read_form

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
