"""Graph-capture cases, third set: memory that is pinned, shared, exchanged or looked at below the tensor."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import io

import numpy
import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())
State = setting.State


def pinned_empty_like_uploaded(s, q, k, v, lens, score):
    stage = torch.empty_like(s.host_row, pin_memory=True).fill_(2)
    s.buf.copy_(stage, non_blocking=True)
    return q * s.buf[0]


def numpy_asarray_of_device(s, q, k, v, lens, score):
    try:
        numpy.asarray(score)
    except TypeError:
        return q * 2
    return q


def loaded_onto_device(s, q, k, v, lens, score):
    file = io.BytesIO()
    torch.save(s.host_row, file)
    file.seek(0)
    return q + torch.load(file, map_location="cuda").sum()


CASES |= collected(globals())
