"""What an expression of Prometheus asks for: metrics, their labels, and values of these."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"')
_SELECTOR = re.compile(r"\b(crosstie[a-z0-9_:]*|up)\b(?:\s*\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
# What Prometheus itself knows of a sample.
OF_THE_TARGET = frozenset(("instance", "job"))


class Matcher(NamedTuple):
    metric: str
    label: str
    values: tuple[str, ...]


def metrics_of(expression: str) -> list[str]:
    return [found[1] for found in _SELECTOR.finditer(_TEXT.sub('""', expression))]


def matchers_of(expression: str) -> list[Matcher]:
    """A variable of a dashboard matches anything, so it has no values."""
    found = []
    for metric, within in ((one[1], one[2] or "") for one in _SELECTOR.finditer(_kept_apart(expression))):
        for label, _, value in _MATCHER.findall(within.replace("\0", "}")):
            values = () if "$" in value else tuple(value.split("|"))
            found.append(Matcher(metric, label, values))
    return found


def _kept_apart(expression: str) -> str:
    """Without closing braces inside of texts, and without metrics' names there."""
    return _TEXT.sub(lambda text: '"' + text[1].replace("}", "\0").replace("crosstie", "Crosstie") + '"', expression)


def groupings_of(expression: str) -> list[tuple[str, frozenset[str]]]:
    """Each with the metric that it is about: the next one."""
    plain = _TEXT.sub('""', expression)
    found = []
    for grouping in _GROUPING.finditer(plain):
        following = _SELECTOR.search(plain, grouping.end())
        labels = frozenset(label.strip() for label in grouping[1].split(",") if label.strip())
        if following is not None:
            found.append((following[1], labels))
    return found


def faults_of(expression: str, known: Mapping[str, Mapping[str, Iterable[str]]]) -> list[str]:
    """What it asks for that there is not; `known`: metrics, their labels, and values that these have."""
    faults = []
    names = metrics_of(expression)
    if not names:
        faults.append("asks for no metric")
    for name in names:
        if name not in known:
            faults.append(f"no metric {name}")
    for matcher in matchers_of(expression):
        if matcher.metric in known and matcher.label not in OF_THE_TARGET:
            labels = known[matcher.metric]
            if matcher.label not in labels:
                faults.append(f"{matcher.metric} has no label {matcher.label}")
            elif unknown := set(matcher.values) - set(labels[matcher.label]):
                faults.append(f"{matcher.metric} has no {matcher.label} {sorted(unknown)}")
    for name, labels_asked in groupings_of(expression):
        if name in known and (missing := labels_asked - OF_THE_TARGET - set(known[name])):
            faults.append(f"{name} has no label {sorted(missing)}")
    return faults
