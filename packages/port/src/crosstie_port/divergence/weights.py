"""A module's weights on two machines, from samples: the same, scaled, transposed, shared, or another tensor's."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from crosstie_port.divergence.digest import LAYOUTS, Floats, grid_size, positions

Samples = Mapping[str, Floats]
# Weights of two types agree to a few roundings of bfloat16.
_SAME = 2.0**-6
# What is shared where anything is: the embedding and the head.
_ENDS = ("embed", "wte", "head")
_TRANSPOSED = 1 + list(LAYOUTS).index("transposed")


def sampled(module: Any, seed: int) -> dict[str, Floats]:
    """A grid of values of every matrix among the parameters, shared ones under each of their names, and the same places
    of its transpose. Values only: nothing as large as a weight leaves the device."""
    import torch

    found: dict[str, Floats] = {}
    for name, one in module.named_parameters(remove_duplicate=False):
        if one.ndim > 1 and one.numel() and one.is_floating_point() and one.device.type != "meta":
            count = grid_size(tuple(one.shape))[0] * grid_size(tuple(one.shape))[1]
            every = positions(tuple(one.shape), seed, 0)
            at = np.concatenate([every[:count], every[_TRANSPOSED * count : (_TRANSPOSED + 1) * count]])
            index = torch.from_numpy(at).to(one.device)
            found[name] = _taken(one.detach(), index).to("cpu", torch.float64).numpy()
    return found


def _taken(weight: Any, index: Any) -> Any:
    """By row and column: a view as one row would copy a weight that is not contiguous."""
    import torch

    places = []
    for size in reversed(weight.shape):
        places.append(index % size)
        index = torch.div(index, size, rounding_mode="floor")
    return weight[tuple(reversed(places))]


def relation(module: str, first: Samples, second: Samples) -> tuple[str, str] | None:
    """Of a module's own matrices, the first that differs: a signature ("" where all agree) and a sentence. None where
    neither recording has samples of any."""
    own = [name for name in first if name.rpartition(".")[0] == module and name in second]
    if not own:
        return None
    for name in own:
        a, b = first[name], second[name]
        if a.shape != b.shape or _same(_here(a), _here(b)):
            continue
        return next(_named(name, first, second), ("weight-other", f"{name} holds other values, by no known relation"))
    return "", f"its weights agree in {sum(_here(first[name]).size for name in own)} sampled values"


def _here(samples: Floats) -> Floats:
    return samples[: samples.size // 2]


def _same(a: Floats, b: Floats, within: float = _SAME) -> bool:
    size = float(np.abs(b).max())
    return a.shape == b.shape and float(np.abs(a - b).max()) <= within * size if size else not a.any()


def _named(name: str, first: Samples, second: Samples) -> Iterator[tuple[str, str]]:
    a, b = _here(first[name]), _here(second[name])
    for one, other, here, there in ((first, second, "first", "second"), (second, first, "second", "first")):
        shared = _twin(name, one)
        if shared is not None and _twin(name, other) != shared and any(word in name for word in _ENDS):
            yield (
                "tied-weights",
                f"{name} is shared with {shared} in the {here}, and a matrix of its own in the {there}",
            )
    moved = first[name][a.size :]
    if _same(moved, b):
        yield "weight-transposed", f"{name} is the first's transposed"
    size = float((a * a).sum())
    factor = float((a * b).sum()) / size if size else 0.0
    if factor and _same(factor * a, b):
        yield "weight-scaled", f"{name} itself is {factor:.4g} times the first's"
    elsewhere = next((key for key, one in first.items() if key != name and _same(one, second[name], 1e-6)), None)
    if elsewhere is not None:
        yield "weight-swapped", f"{name} holds what {elsewhere} has in the first"


def _twin(name: str, samples: Samples) -> str | None:
    """Another weight with the same values."""
    mine = samples[name]
    if not mine.any():
        return None
    return next((key for key, one in samples.items() if key != name and np.array_equal(one, mine)), None)
