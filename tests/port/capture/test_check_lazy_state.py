"""State that a function makes in its first call: tensors of the host, tried first, leave nothing of theirs in it."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crosstie_port.capture.check import check
from crosstie_port.capture.twin import Twin

KEPT = SimpleNamespace(stage=None, count=None, buffer=None, by_device={})


def copy_pageable(x: torch.Tensor) -> torch.Tensor:
    if KEPT.stage is None:
        KEPT.stage = torch.ones(8), torch.zeros(8, device=x.device)
    KEPT.stage[1].copy_(KEPT.stage[0])
    return x + KEPT.stage[1]


def python_counter(x: torch.Tensor) -> torch.Tensor:
    if KEPT.count is None:
        KEPT.count = [0, torch.zeros(8, device=x.device)]
    KEPT.count[0] += 1
    return x * KEPT.count[0] + KEPT.count[1]


def lazy_buffer(x: torch.Tensor) -> torch.Tensor:
    if KEPT.buffer is None:
        KEPT.buffer = torch.zeros(8, device=x.device)
    KEPT.buffer.copy_(x.sum(0))
    return KEPT.buffer * 2


def solved(x: torch.Tensor, solver: Any) -> torch.Tensor:
    matrix = KEPT.by_device.setdefault("matrix", torch.eye(8, device=x.device) * 2)
    return x @ solver(matrix)


def cache_by_device(x: torch.Tensor) -> torch.Tensor:
    return x + KEPT.by_device.setdefault(str(x.device), torch.ones(8, device=x.device))


class LazyLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ones: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ones is None:
            self.ones = torch.ones(8, device=x.device)
        return x + self.ones


CASES: dict[str, tuple[Any, str]] = {
    "copy_pageable": (copy_pageable, "error"),
    "python_counter": (python_counter, "stale"),
    "lazy_buffer": (lazy_buffer, "ok"),
    "linalg_inv": (lambda x: solved(x, torch.linalg.inv), "error"),
    "linalg_inv_ex": (lambda x: solved(x, lambda matrix: torch.linalg.inv_ex(matrix).inverse), "ok"),
    "cache_by_device": (cache_by_device, "ok"),
    "lazy_layer": (LazyLayer(), "ok"),
}


def on_host(seed: int = 0) -> tuple[torch.Tensor]:
    return (torch.randn(4, 8),)


def on_device(device: str, seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 8, device=device),)


@pytest.mark.parametrize("inputs", [on_host, on_device])
@pytest.mark.parametrize("name", CASES)
def test_verdict_is_the_same_wherever_the_inputs_are_made(name: str, inputs: Any) -> None:
    function, expected = CASES[name]
    with Twin(partial(verdict, function, inputs)) as apart:
        assert apart.result() == expected


def verdict(function: Any, inputs: Any) -> str:
    return check(function, inputs).verdict


def test_a_refusal_of_the_trial_is_told() -> None:
    def fails_anywhere(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such layer")

    with pytest.raises(Exception, match="no such layer"):
        check(fails_anywhere, on_host)
