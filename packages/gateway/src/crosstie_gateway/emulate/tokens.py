"""Tokens without a tokenizer: four bytes of text are one; what is written says that no model wrote it. It counts the
same when a client sends it back."""

import math
import zlib
from statistics import NormalDist

BYTES_PER_TOKEN = 4
# What vision models of the usual tilings spend on a picture of ordinary size, and on half a minute of speech.
IMAGE_TOKENS = 1024
AUDIO_TOKENS = 750
# Answers scatter: the standard deviation of the logarithm of their lengths.
_SCATTER = 0.6
_NORMAL = NormalDist()

_SENTENCE = "This answer is emulated by Crosstie: it keeps the time of an accelerator and no model wrote it. "
_FILLER = _SENTENCE * 64


def count(size_bytes: int) -> int:
    return -(-size_bytes // BYTES_PER_TOKEN)


def pieces(text: str) -> tuple[str, ...]:
    """The tokens of a text; characters that two tokens share are replaced."""
    raw = text.encode("utf-8", "surrogatepass")
    return tuple(
        raw[at : at + BYTES_PER_TOKEN].decode("utf-8", "replace") for at in range(0, len(raw), BYTES_PER_TOKEN)
    )


def logprob(token: str, place: int) -> float:
    """The chosen token's log probability: at least half."""
    return -0.69 * (zlib.crc32(token.encode("utf-8", "replace"), place) % 1000) / 1000


def filler(start: int, end: int) -> str:
    """Tokens `start` to `end` of an answer: plain ASCII that JSON need not escape."""
    first = start * BYTES_PER_TOKEN % len(_SENTENCE)
    size = (end - start) * BYTES_PER_TOKEN
    if first + size <= len(_FILLER):
        return _FILLER[first : first + size]
    return (_SENTENCE * (size // len(_SENTENCE) + 2))[first : first + size]


def begun(text: bytes) -> int:
    """How many tokens of an answer a text ends with, where the answer is to be resumed."""
    sentence, tokens = _SENTENCE.encode(), 0
    at = text.rfind(sentence[:BYTES_PER_TOKEN])
    if at < 0 or not (sentence + sentence).startswith(text[at:]):
        return 0
    while True:
        size = len(text) - at
        if size % BYTES_PER_TOKEN == 0:
            tokens = size // BYTES_PER_TOKEN
        at -= len(sentence)
        if at < 0 or text[at : at + len(sentence)] != sentence:
            return tokens


def drawn_length(prompt: bytes, seed: int, mean: float) -> int:
    """How long an answer would be if nothing limited it: scattered around the mean, the same for the same prompt."""
    draw = zlib.crc32(prompt, seed & 0xFFFFFFFF)
    z = _NORMAL.inv_cdf((draw + 0.5) / 2**32)
    return max(round(mean * math.exp(_SCATTER * z - 0.5 * _SCATTER**2)), 1)
