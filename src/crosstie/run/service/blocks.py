"""A prompt as Mooncake's traces have it: a number for each block of 512 tokens, the same for the same beginning.

Nobody here can count tokens, so blocks are cut by bytes, at a length that is fixed for each model as long as a
recording lasts; the engine's own count says how many there are. The numbers are keyed hashes: without the key nobody
can find out whether a text that they guess was among the prompts.
"""

from hashlib import blake2b

import msgspec

BLOCK_TOKENS = 512
KEY_BYTES = 32
# Numbers that every reader of JSON keeps exactly.
_BITS = 53
# Bytes a token of anything that is text.
LEAST_BYTES, MOST_BYTES = 1.0, 16.0


class _Prompt(msgspec.Struct):
    tools: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Prompt).decode


def prompt_of(body: bytes) -> bytes:
    """What the model reads, in about the order in which it does; without what differs between equal prompts."""
    try:
        found = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    return b"".join((found.tools, found.instructions, found.messages, found.prompt, found.input))


def bytes_per_token(prompt: bytes, tokens: int, otherwise: float) -> float:
    found = len(prompt) / max(tokens, 1)
    # Pictures are many bytes and few tokens, and say nothing of text.
    return found if LEAST_BYTES <= found <= MOST_BYTES else min(max(otherwise, LEAST_BYTES), MOST_BYTES)


def block_ids(key: bytes, model: str, prompt: bytes, tokens: int, bytes_a_token: float) -> list[int]:
    """As many as the prompt's tokens have blocks. The last is of all of it, so that only equal prompts share it."""
    blocks = max(-(-tokens // BLOCK_TOKENS), 1)
    size = max(int(BLOCK_TOKENS * bytes_a_token), 1)
    running = blake2b(model.encode() + b"\0", digest_size=8, key=key)
    view = memoryview(prompt)
    found = []
    whole = min(blocks - 1, len(prompt) // size)
    for index in range(whole):
        running.update(view[index * size : (index + 1) * size])
        found.append(_number(running.digest()))
    running.update(view[whole * size :])
    for index in range(whole, blocks):
        end = running.copy()
        end.update(b"\0%d" % index)
        found.append(_number(end.digest()))
    return found


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "big") >> (64 - _BITS)
