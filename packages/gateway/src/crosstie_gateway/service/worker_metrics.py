"""Metrics pages of several workers as one. Counters and histograms add up, and gauges unless they say how something
is."""

from collections.abc import Callable, Iterator, Sequence

# Gauges of which all workers speak about the same thing: what the one says who takes it for the worst.
_OF_ALL: dict[str, Callable[[float, float], float]] = {
    "crosstie_backend_up": min,
    "crosstie_breaker_open": max,
    "crosstie_engine_running": max,
    "crosstie_engine_waiting": max,
    "crosstie_target_promised": max,
    "crosstie_provider_max_usd": max,
    "crosstie_jwks_keys": min,
    "crosstie_share_up": max,
    "crosstie_ledger_up": min,
    "crosstie_record_failed": max,
    "crosstie_telemetry_failed": max,
    "crosstie_discovered_addresses": min,
    "crosstie_kv_blocks": min,
    "crosstie_kv_known": min,
    "crosstie_plugin_up": min,
}
# What each has learnt by itself.
_EACH = ("crosstie_ttft_correction", "crosstie_tpot_correction")


def _families(page: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Of each family its name, its kind, its head and the lines of its samples."""
    for family in page.split("# HELP ")[1:]:
        helped, typed, *lines = family.splitlines()
        _, _, name, kind = typed.split()
        yield name, kind, f"# HELP {helped}\n{typed}\n", lines


def merged_pages(pages: Sequence[tuple[int, str]]) -> str:
    """Pages by the number of their worker; families in the order in which they first come."""
    heads: dict[str, str] = {}
    samples: dict[str, dict[str, float]] = {}
    for worker, page in pages:
        for name, kind, head, lines in _families(page):
            heads.setdefault(name, head)
            merged = samples.setdefault(name, {})
            for line in lines:
                _add(merged, name, kind, line, worker)
    return "".join(
        head + "".join(f"{sample} {_number(value)}\n" for sample, value in samples[name].items())
        for name, head in heads.items()
    )


def _add(merged: dict[str, float], family: str, kind: str, line: str, worker: int) -> None:
    name, _, text = line.rpartition(" ")
    value = float(text)
    if family in _EACH and 'worker="' not in name:
        name = f'{name[:-1]},worker="{worker}"}}' if name.endswith("}") else f'{name}{{worker="{worker}"}}'
    if name not in merged:
        merged[name] = value
    elif kind == "gauge" and family in _OF_ALL:
        merged[name] = _OF_ALL[family](merged[name], value)
    else:
        merged[name] += value


def counters(page: str) -> str:
    """A page's counters and histograms, which a worker leaves to its successor."""
    grows = [(head, lines) for _, kind, head, lines in _families(page) if kind in ("counter", "histogram")]
    return "".join(head + "".join(f"{line}\n" for line in lines) for head, lines in grows)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
