"""What an engine counts of itself while it is loaded: its prefix cache, and the drafts of its speculation."""

import re
from typing import NamedTuple

from crosstie.prove.bench.endpoint import BenchEndpoint
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch_once
from crosstie.wire.loops import run_on_loop

# vLLM's counters, by the field that each adds to; older releases write the name without `_total`.
_FIELDS = {
    "prefix_cache_queries": "looked_up",
    "prefix_cache_hits": "hit",
    "spec_decode_num_drafts": "drafts",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "kept",
}
_COUNTER = re.compile(rf"^vllm:({'|'.join(_FIELDS)})(?:_total)?(?:\{{[^}}]*\}})? ([0-9.eE+]+)$", re.MULTILINE)


class EngineCounts(NamedTuple):
    """Tokens of prompts looked up in the prefix cache, and found there; drafts, their tokens, and those kept."""

    looked_up: float = 0.0
    hit: float = 0.0
    drafts: float = 0.0
    drafted: float = 0.0
    kept: float = 0.0

    def since(self, before: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, other: "EngineCounts") -> "EngineCounts":
        return EngineCounts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def depth(self) -> int:
        """Tokens of a draft."""
        return round(self.drafted / self.drafts) if self.drafts else 0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step gives a sequence."""
        return 1.0 + self.kept / self.drafts if self.drafts else 1.0


def engine_counts(endpoint: BenchEndpoint, api_key: str | None) -> EngineCounts | None:
    """Since the engine was started; None where it does not say."""
    address = Address(endpoint.url)
    headers = [(b"authorization", f"Bearer {api_key}".encode())] if api_key else []
    try:
        answer = run_on_loop(fetch_once(address, "GET", f"{address.root}/metrics", headers=headers, timeout_s=10.0))
    except OSError:
        return None
    counted: dict[str, float] = {}
    for name, value in _COUNTER.findall(answer.body.decode(errors="replace")):
        counted[_FIELDS[name]] = counted.get(_FIELDS[name], 0.0) + float(value)
    return EngineCounts(**counted) if counted else None
