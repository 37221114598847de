"""${VARIABLE} in an address: what is secret stays in the environment, and out of files and logs."""

import os
import re

from crosstie.core.errors import BadInput

_VARIABLE = re.compile(r"\$\{(\w+)\}")


def filled(place: str) -> str:
    """With the environment's values in the place of its variables."""

    def value(match: re.Match[str]) -> str:
        said = os.environ.get(match[1], "").strip()
        if not said:
            raise BadInput(f"${{{match[1]}}}: no such variable is set")
        return said

    return _VARIABLE.sub(value, place)
