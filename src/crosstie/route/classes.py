"""Which class a request belongs to that names none."""

from math import log

from crosstie.core.fleet import Fleet, ServedClass


class Classes:
    """Of each model the fleet's default class, if it is of that model; else the one nearest in prompt length."""

    def __init__(self, fleet: Fleet):
        self._sizes: dict[str, list[tuple[float, ServedClass]]] = {}
        for one in fleet.classes:
            self._sizes.setdefault(one.model, []).append((log(max(one.input_tokens, 1.0)), one))
        for sizes in self._sizes.values():
            usual = [entry for entry in sizes if entry[1].name == fleet.serving.default_class]
            sizes[:] = usual or sizes

    def of(self, model: str, input_tokens: float) -> ServedClass | None:
        sizes = self._sizes.get(model)
        if sizes is None:
            return None
        if len(sizes) == 1:
            return sizes[0][1]
        size = log(input_tokens if input_tokens > 1.0 else 1.0)
        return min(sizes, key=lambda entry: abs(entry[0] - size))[1]
