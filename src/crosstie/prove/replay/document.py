"""A replay as plain values for `--json`; what is not a number is null."""

from typing import Any

from crosstie.prove.replay.accounts import Spent
from crosstie.prove.replay.outcomes import ReplayResult, plain


def result_document(result: ReplayResult, spent: Spent, usd_per_good_million: float | None) -> dict[str, Any]:
    return {
        "latencies": "seconds of the server's clock, from the moment at which each request was due",
        **plain(result),
        "attributed_usd": plain(spent.usd),
        "attributed_usd_per_million_tokens": plain(spent.usd_per_million),
        "fleet_usd_per_million_tokens_within_target": plain(usd_per_good_million),
    }
