"""Which settings of the engine make an accelerator fit for a model: those that the rules know, tried one by one.

A setting is a variable or a flag that some rule asks for. What it would change is looked up as everything else is,
so a setting that cures one operation and breaks another does not win.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from crosstie.core.finding import Finding, rank
from crosstie.port.preflight.rules import SETTINGS, Value, rules

Settings = Mapping[str, Value]
Choose = Callable[[Settings], list[Finding]]
# More would be a search for a needle, and nobody sets them.
_MOST = 3


def candidates(engine: str) -> list[tuple[str, Value]]:
    """Each setting that a rule asks for; of the spellings of one value the first."""
    found = {
        (key, values[0]): None
        for rule in rules(engine)
        for key, values in rule.when.items()
        if key.startswith(SETTINGS) and isinstance(values[0], str) and values[0][:1] not in ("", *"!<>%")
    }
    return list(found)


def best_settings(engine: str, given: Settings, choose: Choose) -> tuple[dict[str, Value], list[Finding]]:
    """Settings beside the given ones that leave the least grave findings, and those findings; none if none helps."""
    best, chosen = choose(given), dict[str, Value]()
    while any(_gravity(best)) and len(chosen) < _MOST:
        options = [(key, value) for key, value in candidates(engine) if key not in given and key not in chosen]
        # Two at once where none helps alone: a switch that turns all kernels on, and one that leaves some of them off.
        for together in range(1, min(2, _MOST - len(chosen)) + 1):
            tried = [
                (dict(some), choose({**given, **chosen, **dict(some)}))
                for some in combinations(options, together)
                if len(dict(some)) == together
            ]
            step, findings = min(tried, key=lambda one: _gravity(one[1]), default=({}, best))
            if _gravity(findings) < _gravity(best):
                break
        else:
            break
        chosen, best = {**chosen, **step}, findings
    return chosen, best


def _gravity(findings: Sequence[Finding]) -> list[int]:
    return sorted((rank(finding.severity) for finding in findings), reverse=True)


def words(settings: Settings) -> list[str]:
    """As they are typed: NAME=VALUE for a variable, --name value for a flag."""
    return [
        f"{key.removeprefix('env.')}={value}" if key.startswith("env.") else f"--{key.removeprefix('flag.')} {value}"
        for key, value in settings.items()
    ]
