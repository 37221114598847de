"""Graph-capture cases: copies between host and device, pinned and pageable, and host scalars as operands. All are rows."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import copy

import torch
from tests.port.capture.cases.setting import B, State, inputs, registry, seeded

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())
