"""What a server counts of itself while it is loaded: an engine its prefix cache and its drafts, a gateway its money."""

from typing import NamedTuple

from crosstie.core.errors import BadInput
from crosstie.core.histogram import samples_of
from crosstie.wire.address import Address
from crosstie.wire.fetch import ask, fetch_once
from crosstie.wire.loops import run_on_loop

# By the field that each counter adds to; older releases of vLLM write the name without `_total`.
_FIELDS = {
    "vllm:prefix_cache_queries": "looked_up",
    "vllm:prefix_cache_hits": "hit",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "kept",
    "crosstie_usd": "usd",
    "crosstie_tokens": "tokens",
}


class ServerCounts(NamedTuple):
    """Tokens of prompts looked up in the prefix cache, and found there; drafts, their tokens, and those kept; dollars
    that a gateway has attributed, and the tokens that they are for."""

    looked_up: float = 0.0
    hit: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    kept: float = 0.0
    usd: float = 0.0
    tokens: float = 0.0

    @classmethod
    def read(cls, page: str) -> "ServerCounts | None":
        """From its /metrics; None where it counts nothing of this."""
        counted: dict[str, float] = {}
        for name, _, value in samples_of(page):
            if field := _FIELDS.get(name.removesuffix("_total")):
                counted[field] = counted.get(field, 0.0) + value
        return cls(**counted) if counted else None

    def since(self, before: "ServerCounts") -> "ServerCounts":
        return ServerCounts(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, other: "ServerCounts") -> "ServerCounts":
        return ServerCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def depth(self) -> int:
        """Tokens of a draft."""
        return round(self.drafted / self.drafts) if self.drafts else 0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step gives a sequence."""
        return 1.0 + self.kept / self.drafts if self.drafts else 1.0

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Attributed: each request pays for its share of the replica that served it."""
        return self.usd / self.tokens * 1e6 if self.tokens else None


def metrics_page(option: str, at: Address, path: str) -> str:
    """What somebody has named by an option must answer."""
    try:
        answer = run_on_loop(fetch_once(at, "GET", path))
    except OSError as error:
        raise BadInput(f"{option}: cannot be asked: {error}") from None
    if answer.status != 200:
        raise BadInput(f"{option}: answers with status {answer.status}")
    return answer.body.decode("utf-8", "replace")


def server_counts(url: str, api_key: str | None) -> ServerCounts | None:
    """Since the server was started; None where it does not say, or not to this key."""
    at = Address(url)
    try:
        answer = run_on_loop(ask(at, "GET", f"{at.root}/metrics", key=api_key, timeout_s=10.0))
    except OSError:
        return None
    return ServerCounts.read(answer.body.decode("utf-8", "replace")) if answer.status == 200 else None
