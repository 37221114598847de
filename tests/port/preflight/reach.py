"""Values that meet a condition of a row: what tests of the rows make cases from."""

import re

from crosstie.port.preflight.rules import Value


def meeting(conditions: tuple[Value, ...]) -> list[Value]:
    """At the limit of each condition, and on its right side of it."""
    found: list[Value] = []
    for condition in conditions:
        match = re.match(r"^(<=|>=|<|>|!%|%|!)?(.*)$", str(condition))
        assert match
        sign, number = match.groups()
        if isinstance(condition, bool | int) or not sign:
            found.append(condition)
        elif sign == "!":
            found.append("something else")
        else:
            limit = int(number)
            found += {
                "<=": [limit, limit - 1], ">=": [limit, limit + 1], "<": [limit - 1, limit - 3],
                ">": [limit + 1, limit + 8], "%": [limit, 3 * limit],
                "!%": [limit + 1, limit + 32, 3 * limit // 2, 5],
            }[sign]  # fmt: skip
    return found
