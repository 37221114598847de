"""A workload that plans in a tenth of a second, to be spoilt in one place at a time."""

from pathlib import Path

SMALL = """\
name = "small"

[traffic]
requests_per_s = 5

[[class]]
name = "chat"
model = "llama-3.1-8b"
share = 1
input = 1000
output = 200
ttft_ms = { p95 = 1000 }
tpot_ms = { p90 = 50 }

[constraints]
whole_nodes = false
accelerators = ["mi300x", "h200"]
"""

SECOND = """\
[[class]]
name = "second"
model = "llama-3.1-8b"
share = 0.5
input = 100
output = 10
"""

Change = tuple[str, str]
ALLOWED = 'accelerators = ["mi300x", "h200"]\n'


def small_text(*changes: Change) -> str:
    """The workload with each first string, which it must have, replaced by the second."""
    text = SMALL
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def small(folder: Path, *changes: Change, name: str = "small.toml") -> Path:
    file = folder / name
    file.write_text(small_text(*changes), encoding="utf-8")
    return file


def constrained(more: str) -> Change:
    """One more line under [constraints]."""
    return ALLOWED, f"{ALLOWED}{more}\n"


def tables(more: str) -> Change:
    """More tables at the end."""
    return ALLOWED, f"{ALLOWED}\n{more}\n"
