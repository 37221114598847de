"""The question behind an answer: what every command assumes unless told otherwise, and what an answer rests on.

Commands that are asked the same differ only where their records do, so that `crosstie reconcile` can say which of it
makes which part of a difference.
"""

import math
from typing import Any, Literal

import msgspec

from crosstie.core.disaggregated import Disaggregated, Servable

# What a dollar figure is divided by: output tokens, with the prompts that go with them in the bill, or all tokens.
Per = Literal["output tokens", "tokens in and out"]


class BuyersQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The defaults are those of every command; an answer has the values that it used."""

    models: tuple[str, ...] = ()
    # Of a request: means, where lengths vary.
    input_tokens: int = 4096
    output_tokens: int = 1024
    # Tokens of one sequence, where memory alone is asked about.
    context: int = 8192
    # Requests in flight on a replica; None: as many as the targets or the traffic bring about.
    in_flight: int | None = 64
    # Of all replicas, at the peak.
    requests_per_s: float | None = None
    targets: tuple[str, ...] = ()
    # Prices of one kind: rents as sellers publish them, or "buy", which spreads a purchase over the horizon.
    price: str = "on-demand"
    precision: str = "native"
    kv_format: str = "bf16"
    # "": the accelerator's usual one.
    engine: str = ""
    # How engines draft, such as mtp:3; "": they do not.
    drafts: str = ""
    evidence: Literal["any", "stack", "layout"] = "stack"
    # In how many of the worlds it should be enough; one half: the estimates themselves.
    sure: float = 0.8
    horizon_years: float = 3.0
    # Output sold in the mean over that of the operating point.
    utilisation: float = 1.0
    per: Per = "output tokens"
    by: Literal["estimates", "closed forms", "simulation", "memory"] = "estimates"

    @property
    def line(self) -> str:
        """What is assumed, in one line for the screen."""
        if self.by == "memory":
            return f"assumes {self.context:,} tokens a sequence, {self.precision} weights, {self.kv_format} cache"
        load = f"{self.requests_per_s:.4g} requests/s at the peak" if self.requests_per_s else ""
        load = f"{self.in_flight:,} in flight a replica" if self.in_flight else load or "the most within the targets"
        said = [f"{self.input_tokens:,} tokens in, {self.output_tokens:,} out, {load}", *self.targets]
        said.append(f"{self.precision} weights{f', drafts by {self.drafts}' if self.drafts else ''}")
        if self.price:
            said.append(f"bought for {self.horizon_years:g} years" if self.price == "buy" else f"{self.price} prices")
            said.append(f"{self.utilisation:.0%} of the output sold, per million {self.per}")
        odds = "even odds" if self.sure == 0.5 else f"{self.sure:.0%} sure"
        said.append(f"by {self.by}, {odds}")
        return f"assumes {'; '.join(said)}"


USUAL = BuyersQuestion()


class Reckoning(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator in an answer: how it serves, what a GPU of it gives and costs."""

    model: str
    accelerator: str
    gpus: int
    layout: str
    # Ranks, to make the replica again; None where prefill and decode are apart.
    parallelism: dict[str, int] | None
    precision: str
    kv_format: str
    stack: str
    # How it drafts, such as mtp:3, and tokens a step that it keeps; "": not at all.
    drafts: str = ""
    kept: float = 1.0
    input_tokens: int
    output_tokens: int
    in_flight: float | None = None
    output_tokens_per_s_per_gpu: float | None = None
    # That over what estimates give at that load: below 1 in fleets that are sized to be sure, and of whole nodes.
    filled: float = 1.0
    tokens_80: tuple[float, float] | None = None
    usd_per_gpu_hour: float | None = None
    # Of which kind, and whose.
    price: str = ""
    utilisation: float = 1.0

    @property
    def usd_per_mtok(self) -> float | None:
        """Per million output tokens, the prompts included."""
        if self.usd_per_gpu_hour is None or not self.output_tokens_per_s_per_gpu:
            return None
        return self.usd_per_gpu_hour / 3600.0 / (self.output_tokens_per_s_per_gpu * self.utilisation) * 1e6

    @property
    def usd_per_mtok_80(self) -> tuple[float, float] | None:
        """By what is not known of the throughput."""
        middle, rate = self.usd_per_mtok, self.output_tokens_per_s_per_gpu
        if middle is None or rate is None or self.tokens_80 is None:
            return None
        return middle * rate / self.tokens_80[1], middle * rate / self.tokens_80[0]


def precision_word(one: Servable) -> str:
    """The model's own by that word: what it is made of may have no name, or one that also means something else."""
    own, stored = one.model.native, one.precision.by_role
    is_own = all({part.id for part in stored[role].formats} == set(shares) for role, shares in own.items())
    return "native" if is_own and one.precision.id not in ("bf16", "fp16") else one.precision.id


def reckoning(one: Servable, input_tokens: float, output_tokens: float, **figures: Any) -> Reckoning:
    """Of a replica; `figures` are what is known of it beyond how it is made."""
    apart = isinstance(one, Disaggregated)
    return Reckoning(
        model=one.model.id,
        accelerator=one.accelerator.id,
        gpus=one.gpus,
        layout=one.layout,
        parallelism=None if apart else msgspec.to_builtins(one.decode.parallelism),
        precision=precision_word(one),
        kv_format=one.kv_format,
        stack=one.stack.id,
        drafts=str(one.speculation or ""),
        kept=one.speculation.acceptance_length if one.speculation else 1.0,
        input_tokens=max(round(input_tokens), 1),
        output_tokens=max(round(output_tokens), 1),
        **figures,
    )


def assumptions(question: BuyersQuestion, reckoned: list[Reckoning]) -> dict[str, Any]:
    """As every command's `--json` has them."""
    return {
        "assumptions": {"line": question.line, **msgspec.to_builtins(question)},
        "reckoned": [
            {
                **msgspec.to_builtins(one),
                "usd_per_million_output_tokens": one.usd_per_mtok,
                "usd_per_million_output_tokens_80": one.usd_per_mtok_80,
            }
            for one in reckoned
        ],
    }


def differing(question: BuyersQuestion, other: BuyersQuestion) -> list[str]:
    """The assumptions in which two questions differ, by name."""
    return [name for name in question.__struct_fields__ if not _same(getattr(question, name), getattr(other, name))]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other
