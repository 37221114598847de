"""What is counted, in buckets or not, and the page on which Prometheus reads it."""

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate

# A metric: its name, its kind, what it says (or nothing), and its values by their labels. Samples that have a
# name of their own, as those of a histogram do, have it as the label __name__.
Samples = list[tuple[dict[str, str], float]]
Family = tuple[str, str, str, Samples]

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples_of(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """What a page says: names, labels and values; what is no number is left out."""
    for name, labels, text in _SAMPLE.findall(page):
        try:
            yield name, dict(_LABEL.findall(labels)), float(text)
        except ValueError:
            continue


class Histogram:
    """`bounds`: the upper ends of the buckets, each belonging to its own; what is above the last has one more."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        # The sum of all values.
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        # One after the other: compiled, that is sooner done than a call which has to make objects of its numbers.
        index = 0
        for bound in self.bounds:
            if value <= bound:
                break
            index += 1
        self.counts[index] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, int]]:
        """By upper end, how many values are not above it."""
        return list(zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True))


def histogram_samples(name: str, labels: dict[str, str], histogram: Histogram) -> Samples:
    samples: Samples = [
        ({"__name__": f"{name}_bucket", **labels, "le": bound}, count) for bound, count in histogram.buckets()
    ]
    samples.append(({"__name__": f"{name}_sum", **labels}, histogram.total))
    samples.append(({"__name__": f"{name}_count", **labels}, histogram.count))
    return samples


def exposition(families: Iterable[Family]) -> str:
    lines: list[str] = []
    for name, kind, what, samples in families:
        if what:
            lines.append(f"# HELP {name} {what}")
        lines.append(f"# TYPE {name} {kind}")
        for labels, value in samples:
            sample = labels.pop("__name__", name)
            said = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"{sample}{{{said}}} {value}" if said else f"{sample} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
