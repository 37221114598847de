"""What each client does and what it must get: all of it a function of the seed and the request's number."""

import json
import random
from typing import Literal, NamedTuple

from crosstie_gateway.emulate.faults import POISON
from crosstie_gateway.emulate.tokens import count, filler

EMULATED, LOCAL = "llama-3.1-8b", "smollm2-135m"
Manner = Literal["plain", "leaves-while-sending", "leaves", "stalls", "sends-slowly", "together", "poison", "wrong"]
# How often each is drawn; `together` takes two more requests with it, sent in one breath on one connection.
_MANNERS: dict[Manner, float] = {
    "plain": 0.855, "leaves-while-sending": 0.01, "leaves": 0.06, "stalls": 0.005, "sends-slowly": 0.01,
    "together": 0.025, "poison": 0.005, "wrong": 0.03,
}  # fmt: skip
# The first two may do as they like; the others have a limit of requests, and a budget of fractions of a cent.
KEYS = ("plain-a", "plain-b", "limited", "poor")
_KEY_SHARES = (0.45, 0.44, 0.08, 0.03)
_FILLING = "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor "
# Questions to the real engines, whose answers are taken down before anything goes wrong.
QUESTIONS = ("The capital of France is", "One, two, three,", "Water is made of", "The opposite of hot is")
LOCAL_TOKENS = 5
_TOO_LONG_S = 15.0
WRONG = ("no-json", "no-model", "unknown-model", "too-long", "wrong-key", "no-key")


class Plan(NamedTuple):
    number: int
    manner: Manner
    key: str
    local: bool
    chat: bool
    stream: bool
    # Asked with `stream_options`, so that the client sees what it is charged for.
    usage: bool
    tokens: int
    prompt: str
    # After how many bytes of the answer a client leaves or stalls; for how long it does.
    after_bytes: int
    for_s: float
    wrong: str

    @property
    def id(self) -> bytes:
        return b"chaos-%d" % self.number

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def prompt_tokens(self) -> int:
        """As the emulator counts them."""
        return max(count(len(self.prompt)), 1)

    @property
    def text(self) -> str:
        return filler(0, self.tokens)

    def body(self) -> bytes:
        if self.wrong == "no-json":
            return b'{"model": '
        said: dict[str, object] = {"model": LOCAL if self.local else EMULATED, "max_tokens": self.tokens}
        if self.wrong == "no-model":
            del said["model"]
        if self.wrong == "unknown-model":
            said["model"] = "nobody-serves-this"
        if self.wrong == "too-long":
            said["max_tokens"] = 10**7
        if self.chat:
            said["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            said["prompt"] = self.prompt
        if self.local:
            said |= {"temperature": 0, "cache_prompt": False}
        else:
            said["ignore_eos"] = True
        if self.stream:
            said["stream"] = True
            if self.usage:
                said["stream_options"] = {"include_usage": True}
        return json.dumps(said).encode()


def planned(seed: int, number: int, local_share: float) -> Plan:
    draw = random.Random(seed * 10**9 + number)
    manner: Manner = draw.choices(list(_MANNERS), list(_MANNERS.values()))[0]
    local = manner in ("plain", "leaves") and draw.random() < local_share
    size = draw.choice((8, 60, 60, 400, 3000))
    prompt = f"request {number} {draw.random()} {_FILLING * (size // 76 + 1)}"[: size + 24]
    tokens = draw.choice((1, 2, 5, 10, 20, 40, 80))
    if manner == "poison":
        prompt = f"request {number} {POISON}"
    if manner == "stalls":
        # More than sockets hold for who does not read.
        tokens = 3000
    return Plan(
        number=number,
        manner=manner,
        key=draw.choices(KEYS, _KEY_SHARES)[0] if not local else KEYS[number % 2],
        local=local,
        chat=draw.random() < 0.6,
        stream=manner in ("stalls", "leaves") or draw.random() < 0.7,
        usage=draw.random() < 0.5,
        tokens=LOCAL_TOKENS if local else tokens,
        prompt=QUESTIONS[draw.randrange(len(QUESTIONS))] if local else prompt,
        after_bytes=draw.choice((0, 0, 1, 200, 600, 2000)),
        # Some who do not read do so for longer than the gateway bears.
        for_s=draw.uniform(0.1, 3.0) if manner != "stalls" or draw.random() < 0.7 else _TOO_LONG_S,
        wrong=draw.choice(WRONG) if manner == "wrong" else "",
    )
