"""What the gateway reads of a request's body, and the little that it changes; the rest is nobody's business here.

Only a handful of fields are decoded. The prompt stays bytes: its length and its beginnings are all that is used.
"""

import re
from collections import Counter
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import astuple

from crosstie.core.errors import BadInput
from crosstie.core.images import MOST_URL_BYTES, size_of_data_url
from crosstie_gateway.gateway.fields import (
    ABSENT,
    HELD_TO_AT,
    READ_AT,
    AnswerFields,
    Fields,
    StreamOptionFields,
    UsageFields,
    decode,
    decode_answer,
    decode_list,
    decode_models,
    decode_parts,
    readable,
)
from crosstie_gateway.wire.multipart import FormPart, read_form
from crosstie_gateway.wire.outline import Outline, left_out, next_left_out
from crosstie_gateway.wire.request import Request

# A list of texts, or of lists.
_SEVERAL: Final = re.compile(rb'\[\s*["\[]')
# Longer bodies are read by their outline, where they have one.
_LONG: Final = 2**18
# How much of an outline is searched for pictures; later ones are charged as text.
_SEARCHED: Final = 2**18
# More than any answer or prompt has; beyond it a number is a mistake, and may be too large to reckon with.
_MOST_TOKENS: Final = 10**9
# Fields of a form that are read here: of two, an engine might read the other.
_FORM_FIELDS: Final = frozenset(("model", "stream", "prompt"))
# More than any prompt of a picture or a recording has; it is decoded at once.
_MOST_FORM_TEXT: Final = 2**20
# No engine takes more.
_MOST_COPIES: Final = 10**4
_USAGE_WISH: Final = b'"stream_options":{"include_usage":true}'
# The same at every event, so that a stream which breaks off has been counted.
_CONTINUOUS_WISH: Final = b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}'
# What names a part that is no text, and whether it is a key there.
_KINDS: Final = {
    b"image_url": "image", b"input_image": "image",
    b"input_audio": "audio", b"audio_url": "audio",
    b"video_url": "video", b"input_video": "video",
}  # fmt: skip
_MARK: Final = re.compile(rb'"(%b)"(:)?' % b"|".join(_KINDS))
# What comes along in the place of a link. Quotes in a text are escaped; other files count as text.
_ALONG: Final = re.compile(rb'"(?:url|image_url|audio_url|video_url)"\s*:\s*"data:(image|audio|video)/')


_encode: Final = msgspec.json.Encoder().encode
# Found without a look at the modules that have them.
_UNSET: Final = msgspec.UNSET
_ABSENT: Final = ABSENT
_READ_AT: Final[int] = READ_AT
_HELD_TO_AT: Final[int] = HELD_TO_AT
_astuple: Final = astuple
_decode: Final = decode
_decode_answer: Final = decode_answer


class Attached(NamedTuple):
    """Pictures, sound and film in a prompt: how many, how many bytes of it they are, and of which kinds."""

    number: int
    size: int
    kinds: frozenset[str]
    # How many are pictures; width and height of those that came along and say so in their first bytes.
    images: int = 0
    sizes: tuple[tuple[int, int], ...] = ()


_NOTHING: Final = Attached(0, 0, frozenset())


class RequestBody:
    def __init__(self, fields: Fields, body: bytes, text: bytes):
        """`text`: what its fields were read from, which is the body or its outline."""
        outlined = text is not body
        # By position, since looking up two dozen names takes longer than all else; the first are in the order of
        # `Fields`.
        values: tuple[Any, ...] = _astuple(fields)
        self.model: str | None = _restored(values[0], body) if outlined else values[0]
        self.stream = values[1] is True
        options: StreamOptionFields | None = None if values[2] is _UNSET else values[2]
        # Whether it came as a form, with files in it; and where its model stands in that.
        self.is_form = False
        self.model_part: FormPart | None = None
        # Whether the client said nothing about its stream, so that a wish is added without a decoder; and whether it
        # wants the usage itself.
        self.options_absent = values[2] is _UNSET
        self.wants_usage = self.wants_continuous = False
        if options is not None:
            self.wants_usage = bool(options.include_usage)
            self.wants_continuous = self.wants_usage and bool(options.continuous_usage_stats)
        allowed: int | None = values[4] or values[3] or values[5]
        self.most_output = min(allowed, _MOST_TOKENS) if allowed is not None and allowed > 0 else None
        several: int = values[6] or 1
        best_of: int = values[7] or 1
        # Answers that its answer is to have: of each prompt, where there are several.
        self.choices = min(max(several, 1), _MOST_COPIES)
        # And those that it asks for at once: each costs what one costs.
        self.copies = min(max(self.choices, best_of), _MOST_COPIES)
        self.session = _name(values[9]) or _name(values[8])
        # The response that it goes on from.
        self.previous = _name(values[10])
        if outlined:
            self.session, self.previous = _restored(self.session, body), _restored(self.previous, body)
        # What the model will read: everything counts that an engine may give it. Nothing long is copied.
        size = held_to = 0
        for index in range(_READ_AT, len(values)):
            value = values[index]
            if value is not _ABSENT:
                length = len(value)
                if outlined:
                    length += left_out(bytes(value))
                if index < _HELD_TO_AT:
                    size += length
                else:
                    held_to += length
        # Prompts beside each other, each of which is answered.
        self.prompts, ids_bytes = 1, 0
        self.token_ids: int | None = None
        # One of these is in every mark: without either nothing else is looked for. By `find`, since `in` takes bytes
        # for a number first.
        searched = text[:_SEARCHED] if outlined else text
        marked = searched.find(b'_url"') >= 0 or searched.find(b'"input_') >= 0
        messages, prompt, asked = values[_READ_AT], values[_READ_AT + 1], values[_READ_AT + 2]
        parts: list[bytes] = []
        for given in (messages, prompt, asked):
            if given is _ABSENT:
                continue
            is_chat = given is messages
            if not len(given) or (is_chat and not marked) or bytes(memoryview(given)[:1]) != b"[":
                continue
            said = bytes(given)
            parts.append(said)
            if is_chat:
                continue
            ids = _token_ids(said)
            if ids is not None:
                # Token ids in the place of text: their number is known.
                self.token_ids, ids_bytes = (self.token_ids or 0) + ids, ids_bytes + len(said)
            self.prompts = _prompts(said)
            if given is prompt:
                self.copies *= self.prompts
                self.choices *= self.prompts
        # Searching long texts for what is attached would take longer than the rest of all this.
        self.attached = _attached(b"".join(parts)[: len(searched)], body) if marked and parts else _NOTHING
        # Without what is told as token ids.
        self.prompt_bytes = size + held_to - ids_bytes
        # Whether all of these bytes are tokens, so that their number tells how long a token is.
        self.all_read = not held_to
        self._key = b'"messages"' if messages is not _ABSENT else b'"prompt"' if prompt is not _ABSENT else b'"input"'
        self.find_prompt(body)

    def find_prompt(self, body: bytes) -> None:
        """Where the prompt begins in the body, for what it has in common with others'."""
        searched = body if len(body) <= _SEARCHED else body[:_SEARCHED]
        self.prompt_at = max(searched.find(self._key), 0)


def read_body(body: bytes, outline: Outline | None = None) -> RequestBody:
    text = body
    if outline is not None and len(body) > _LONG:
        # Decoding and searching thirty megabytes of text would take a tenth of a second, for everybody else too.
        text = outline.text
        if not outline.utf8:
            raise BadInput("the body is no JSON: it is not UTF-8")
    try:
        if text is body and not body.isascii():
            # What is skipped here is not looked at, and would be stumbled over where the model's name is changed.
            body.decode()
        return RequestBody(_decode(text), body, text)
    except msgspec.ValidationError as error:
        raise BadInput(f"the body is not as expected: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise BadInput("the body is nested too deeply") from None


def read_form_body(request: Request) -> RequestBody:
    """Of a form with files in it: its model, and the length of its texts. Raises BadInput."""
    form = read_form(request.headers.get(b"content-type", b""), request.body, _FORM_FIELDS, request.boundaries)
    texts = dict.fromkeys(_FORM_FIELDS, b"")
    for name in _FORM_FIELDS:
        part = form.get(name)
        if part is not None and not part.file:
            texts[name] = part.content(request.body)
            if len(texts[name]) > _MOST_FORM_TEXT:
                raise BadInput(f"the field '{name}' of the form has more than {_MOST_FORM_TEXT} bytes")
    model = texts["model"].decode(errors="replace") or None
    streams = texts["stream"].lower() in (b"true", b"1")
    prompt = msgspec.Raw(_encode(texts["prompt"].decode(errors="replace")))
    made = RequestBody(Fields(model=model, stream=streams, prompt=prompt), b"", b"")
    made.is_form, made.model_part = True, form.get("model")
    return made


def _name(value: object) -> str | None:
    """What is no text names nothing."""
    return value if isinstance(value, str) else None


def _restored(name: str | None, body: bytes) -> str | None:
    """A long name as it is in the body, where the outline leaves it out."""
    missing = None if name is None else next_left_out(name.encode())
    if missing is None:
        return name
    opening, start, length = missing
    return str(msgspec.json.decode(b'"%b"' % body[start - opening : start + length]))


def _attached(prompt: bytes, body: bytes) -> Attached:
    """`prompt`: out of the body, or of its outline."""
    counts, keys = Counter[str](), Counter[str]()
    for mark in _MARK.finditer(prompt):
        kind = _KINDS[mark[1]]
        counts[kind] += 1
        keys[kind] += bool(mark[2])
    # A part names its kind twice, as its type and as its key, and may leave out the first.
    numbers = {kind: max(count // 2, keys[kind], 1) for kind, count in counts.items()}
    size, sizes = 0, []
    for along in _ALONG.finditer(prompt):
        at = along.start(1) - len(b"data:")
        end = prompt.find(b'"', at)
        if end < 0:
            break
        length, url = end - at, prompt[at : min(end, at + MOST_URL_BYTES)]
        missing = next_left_out(url)
        if missing is not None:
            begun, start, more = missing
            length, url = begun + more, body[start - begun : start - begun + MOST_URL_BYTES]
        size += length
        if along[1] == b"image":
            known = size_of_data_url(url)
            if known is not None:
                sizes.append(known)
    images = numbers.get("image", 0)
    return Attached(sum(numbers.values()), size, frozenset(numbers), images, tuple(sizes[:images]))


def _token_ids(prompt: bytes) -> int | None:
    """The number of tokens of a prompt that is a list of ids, or of such lists."""
    start = prompt[:16].translate(None, b" \n\r\t").lstrip(b"[")[:1]
    return prompt.count(b",") + 1 if start.isdigit() else None


def _prompts(prompt: bytes) -> int:
    """How many texts, or lists of token ids, a list has; of ids it is one."""
    return max(len(decode_list(prompt)), 1) if _SEVERAL.match(prompt) else 1


def with_model(body: bytes, model: str) -> bytes:
    """The same body with another model's name; the other values keep their bytes."""
    parts = decode_parts(body)
    parts["model"] = msgspec.Raw(_encode(model))
    return _encode(parts)


def with_member(body: bytes, member: bytes) -> bytes:
    """The same body with another member in front, byte for byte; what the client says by the same name holds."""
    start = body.index(b"{") + 1
    rest = body[start:]
    return b"{" + member + (b"" if rest.lstrip()[:1] == b"}" else b",") + rest


def with_usage_requested(body: bytes, options_absent: bool, continuous: bool = False) -> bytes:
    """The same body, asking for the usage at the end of its stream, or all along."""
    if options_absent:
        return with_member(body, _CONTINUOUS_WISH if continuous else _USAGE_WISH)
    parts = decode_parts(body)
    wished = msgspec.json.decode(parts["stream_options"]) or {}
    wished["include_usage"] = True
    if continuous:
        wished["continuous_usage_stats"] = True
    parts["stream_options"] = msgspec.Raw(_encode(wished))
    return _encode(parts)


# Tokens of the prompt, of the answer, and of the prompt those not computed anew, as told; a plain tuple, for speed.
Usage = tuple[int, int, int]


def read_answer(answer: bytes) -> AnswerFields | None:
    """What is read of an answer or an event; None: it cannot be read."""
    try:
        # Every answer: by itself, compiled.
        return _decode_answer(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def usage_of(answer: bytes) -> Usage | None:
    """What an answer, or an event of one, says of its tokens."""
    fields = read_answer(answer)
    return None if fields is None else usage_in(fields)


def usage_in(fields: AnswerFields) -> Usage | None:
    usage = fields.usage
    if usage is None and fields.response is not None:
        usage = fields.response.usage
    return usage_of_fields(usage) if usage is not None else None


def usage_of_fields(usage: UsageFields) -> Usage | None:
    # By position, as above.
    values: tuple[Any, ...] = _astuple(usage)
    given: int | None = values[2] if values[0] is None else values[0]
    made: int = (values[3] if values[1] is None else values[1]) or 0
    if given is None or not (0 <= given <= _MOST_TOKENS and 0 <= made <= _MOST_TOKENS):
        return None
    details = values[4] or values[5]
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return given, made, min(max(cached, 0), given) if type(cached) is int else 0


def owner_of_models(answer: bytes) -> str:
    """The owner of the first model in a list, by which engines are known."""
    models = readable(decode_models, answer)
    return models.data[0].owned_by if models is not None and models.data else ""
