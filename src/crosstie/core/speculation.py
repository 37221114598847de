"""Speculative decoding: who proposes tokens, how many, and how many of them the model keeps."""

import math
from itertools import accumulate, pairwise
from operator import mul
from typing import Literal, get_args

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.fact import Basis
from crosstie.core.model import Model

# mtp: the model's own prediction layer. eagle3: a head trained for it. dspark: DeepSeek's head, which proposes all
# positions in one pass. draft: a smaller model. ngram: text that was there before.
Method = Literal["mtp", "eagle3", "dspark", "draft", "ngram"]
METHODS: tuple[str, ...] = get_args(Method)
# Of the text that is guessed; random: prompts of random words, as benchmarks send them.
Text = Literal["chat", "coding", "math", "random"]
TEXTS: tuple[str, ...] = get_args(Text)
DEEPEST = 32


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """`depth` tokens are proposed for every sequence, and one step of the model verifies them all.

    `acceptance`: by position, the chance that a draft is kept where all before it were.
    """

    method: Method
    acceptance: tuple[float, ...]
    # What runs to propose, layers and head; None: looking a text up needs no GPU.
    drafter: Model | None
    # Of the text that the acceptance was measured on, such as "coding".
    text: str
    # Acceptance lengths that other measurements and texts of this kind give, low and high.
    range: tuple[float, float]
    basis: Basis
    source: str
    date: str

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= DEEPEST:
            raise BadInput(f"speculation {self.method}: a depth of {self.depth}; must be 1 to {DEEPEST}")
        for position, share in enumerate(self.acceptance, start=1):
            if not 0.0 <= share <= 1.0:
                raise BadInput(f"speculation {self.method}: the acceptance {share} at position {position}; "
                               "must be 0 to 1")  # fmt: skip

    def __str__(self) -> str:
        """As one asks for it: mtp:3, draft:4:MODEL."""
        whose = f":{self.drafter.id}" if self.method == "draft" and self.drafter else ""
        return f"{self.method}:{self.depth}{whose}"

    @property
    def depth(self) -> int:
        return len(self.acceptance)

    @property
    def queries(self) -> int:
        """Tokens of a sequence that a verifying step computes: the last one kept, and the drafts."""
        return self.depth + 1

    @property
    def survival(self) -> tuple[float, ...]:
        """By position, the chance that the draft there is kept."""
        return tuple(accumulate(self.acceptance, mul))

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step gives: the drafts that are kept, and the one that the model itself adds."""
        return 1.0 + sum(self.survival)

    @property
    def doubt(self) -> tuple[float, float]:
        """How far the acceptance length may be from this one, less and more, as logarithms."""
        low, high = (math.log(end / self.acceptance_length) for end in self.range)
        return min(low, 0.0), max(high, 0.0)

    @property
    def passes(self) -> int:
        """Passes of the drafter for one proposal."""
        if self.drafter is None:
            return 0
        return 1 if self.method == "dspark" else self.depth

    def keeping(self, share: float) -> "Speculation":
        """The same where that share of the drafts that were kept still is."""
        first, *others = self.acceptance
        low, high = (1.0 + share * (end - 1.0) for end in self.range)
        return msgspec.structs.replace(self, acceptance=(min(first * share, 1.0), *others), range=(low, high))


def by_position(lengths: tuple[float, ...]) -> tuple[float, ...]:
    """Conditional acceptance from the acceptance lengths at depth 1, 2, ...: their differences are the survival."""
    kept = [1.0]
    for shorter, longer in pairwise((1.0, *lengths)):
        # Lengths are means of separate runs: where one falls short of the one before, nothing was kept there.
        kept.append(min(max(longer - shorter, 0.0), kept[-1]))
    return tuple(after / before if before > 0 else 0.0 for before, after in pairwise(kept))


def constant_acceptance(length: float, depth: int) -> tuple[float, ...]:
    """The same chance at every position that gives this acceptance length."""
    if not 1.0 <= length <= depth + 1.0:
        raise BadInput(f"an acceptance length of {length}: {depth} drafts give 1 to {depth + 1}")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < length else (low, middle)
    return (0.5 * (low + high),) * depth
