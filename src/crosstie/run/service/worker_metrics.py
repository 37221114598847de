"""Metrics pages of several workers as one: the page of a gateway that happens to run in several processes.

Counters and histograms are added, and so are gauges, unless they say how something is, not how much of it there is.
"""

from collections.abc import Callable, Sequence

# Gauges of which all workers speak about the same thing: what the one says who takes it for the worst.
_OF_ALL: dict[str, Callable[[float, float], float]] = {
    "crosstie_backend_up": min,
    "crosstie_breaker_open": max,
    "crosstie_engine_running": max,
    "crosstie_engine_waiting": max,
    "crosstie_target_promised": max,
    "crosstie_share_up": max,
    "crosstie_ledger_up": min,
    "crosstie_record_failed": max,
    "crosstie_telemetry_failed": max,
}
# What each has learnt by itself.
_EACH = ("crosstie_ttft_correction", "crosstie_tpot_correction")


def merged_pages(pages: Sequence[tuple[int, str]]) -> str:
    """Pages by the number of their worker; families in the order in which they first come."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, dict[str, float]] = {}
    kinds: dict[str, str] = {}
    for worker, page in pages:
        family = ""
        for line in page.splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2]
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
                if line.startswith("# TYPE "):
                    kinds[family] = line.rsplit(" ", 1)[1]
                samples.setdefault(family, {})
            elif line:
                _add(samples[family], family, kinds.get(family, ""), line, worker)
    lines: list[str] = []
    for family, head in heads.items():
        lines += head
        lines += [f"{name} {_number(value)}" for name, value in samples[family].items()]
    return "\n".join(lines) + "\n"


def _add(found: dict[str, float], family: str, kind: str, line: str, worker: int) -> None:
    name, _, text = line.rpartition(" ")
    value = float(text)
    if family in _EACH and 'worker="' not in name:
        name = f'{name[:-1]},worker="{worker}"}}' if name.endswith("}") else f'{name}{{worker="{worker}"}}'
    if name not in found:
        found[name] = value
    elif kind == "gauge" and family in _OF_ALL:
        found[name] = _OF_ALL[family](found[name], value)
    else:
        found[name] += value


def counters(page: str) -> str:
    """Of a page, what only ever grows: what a worker leaves to the one that takes its place."""
    kept: list[str] = []
    keeps, helped = False, ""
    for line in page.splitlines():
        if line.startswith("# HELP "):
            helped, keeps = line, False
        elif line.startswith("# TYPE "):
            keeps = line.endswith((" counter", " histogram"))
            kept += [helped, line] if keeps else []
        elif keeps:
            kept.append(line)
    return "\n".join(kept) + "\n" if kept else ""


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
