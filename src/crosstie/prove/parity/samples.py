"""What an endpoint said to one prompt, and how far two of them are from each other.

**The distance.** Engines give the log-probabilities of their k likeliest tokens, not of all. KL(A||B) is therefore the
least that two such lists allow: tokens that both list are compared as they are; those that A alone lists are one
outcome, of which B can have no more than as many times its least listed probability; all else is one outcome more. By
the data-processing inequality that is never above the KL of the whole vocabularies. Nothing is invented for the tail.
"""

import math

import msgspec

from crosstie.prove.parity.prompts import Prompt

Top = dict[str, float]
_LEAST = 1e-12


class SampledToken(msgspec.Struct, frozen=True):
    """One place: tokens before it, the likeliest tokens there with their log-probabilities, and the one that stands
    there. `at` tells it from others of the same text: characters before it."""

    at: int
    position: int
    token: str
    top: Top


class ToolCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class Sample(msgspec.Struct, kw_only=True):
    """`answer` is greedy. `steps` are its tokens, empty where the engine gives no log-probabilities."""

    prompt: Prompt
    answer: str = ""
    calls: tuple[ToolCall, ...] = ()
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: tuple[SampledToken, ...] = ()
    forced: tuple[SampledToken, ...] = ()
    # Empty: it was answered.
    error: str = ""

    @property
    def lists_all(self) -> bool:
        """llama.cpp leaves out tokens that are parts of a sign, so that one token more may come before a place. The
        last one, which ends an answer, is listed by some."""
        return len(self.steps) >= self.output_tokens - 1


class ComparedToken(msgspec.Struct, frozen=True):
    """A place that both have seen with the same text before it."""

    position: int
    kl: float
    agrees: bool


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two samples of one prompt. `parts_at`: tokens (words, without log-probabilities) that both answers begin with;
    None: they are equal to the end."""

    a: Sample
    b: Sample
    forced: tuple[ComparedToken, ...]
    greedy: tuple[ComparedToken, ...]
    parts_at: int | None
    # How much likelier A found its own token than B's where they part, in nats; None: not known.
    margin: float | None

    @property
    def is_clear(self) -> bool:
        """They part at no near tie: A found its own token more than twice as likely as B's."""
        return self.margin is not None and self.margin > math.log(2)


def least_kl(a: Top, b: Top) -> float:
    """The least KL(A||B), in nats, that two lists of log-probabilities allow."""
    shared = a.keys() & b.keys()
    p, q = {t: math.exp(v) for t, v in a.items()}, {t: math.exp(v) for t, v in b.items()}
    kl = math.fsum(p[t] * (a[t] - b[t]) for t in shared)
    # What is left of each outside the shared tokens; rounding may leave less than nothing.
    left_p = max(1.0 - math.fsum(p[t] for t in shared), 0.0)
    left_q = max(1.0 - math.fsum(q[t] for t in shared), 0.0)
    alone = [t for t in a if t not in shared]
    p_alone = min(math.fsum(p[t] for t in alone), left_p)
    if left_p > _LEAST:
        most = min(len(alone) * min(q.values(), default=0.0), left_q)
        q_alone = min(most, left_q * p_alone / left_p)
        kl += _term(p_alone, q_alone) + _term(left_p - p_alone, left_q - q_alone)
    return max(kl, 0.0)


def _term(p: float, q: float) -> float:
    return p * math.log(p / max(q, _LEAST)) if p > _LEAST else 0.0


def likeliest(top: Top) -> str:
    """Of equals the first by name, so that a tie is broken alike on both sides."""
    return min(top, key=lambda token: (-top[token], token))


def _point(a: SampledToken, b: SampledToken) -> ComparedToken:
    return ComparedToken(a.position, least_kl(a.top, b.top), likeliest(a.top) == likeliest(b.top))


def paired(a: Sample, b: Sample) -> Pair:
    others = {step.at: step for step in b.forced}
    forced = tuple(_point(step, others[step.at]) for step in a.forced if step.at in others)
    if a.steps and b.steps:
        said = [step.token for step in a.steps], [step.token for step in b.steps]
    else:
        said = _words(a), _words(b)
    common = next((i for i, (x, y) in enumerate(zip(*said, strict=False)) if x != y), min(map(len, said)))
    # What was said counts, not what was listed of it.
    parts_at = None if _words(a) == _words(b) else common
    # The place where they part has the same text before it too, if no token was left out; what comes after has not.
    seen = parts_at is not None and a.lists_all and b.lists_all
    greedy = tuple(_point(x, y) for x, y in list(zip(a.steps, b.steps, strict=False))[: common + seen])
    margin = None
    if seen and parts_at is not None and parts_at < min(len(a.steps), len(b.steps)):
        top = a.steps[parts_at].top
        # What is not listed is no likelier than the least that is.
        margin = max(top.values()) - top.get(b.steps[parts_at].token, min(top.values()))
    return Pair(a=a, b=b, forced=forced, greedy=greedy, parts_at=parts_at, margin=margin)


def _words(sample: Sample) -> list[str]:
    calls = [word for call in sample.calls for word in (call.name, *call.arguments.split())]
    return [*sample.answer.split(), *calls]
