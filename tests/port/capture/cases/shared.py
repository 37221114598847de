"""Graph-capture cases: functions as they came with the issue that asked for the checker."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, S, State, collected, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


def inputs(dev, seed=0):
    """As the issue had them: lengths always sum to 80, which one function splits by."""
    q, k, v, _, score = setting.inputs(dev, seed)
    return q, k, v, torch.tensor([40, 40] if seed == 0 else [24, 56]).to(dev), score


def nonzero_static_gather(s, q, k, v, lens, score):
    i = torch.nonzero_static(score[0] > 0, size=16, fill_value=0).squeeze(-1)
    return q @ k[:, :, i].transpose(-1, -2) @ v[:, :, i]


def cached_on_first_call(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.tensor([2.0], device=q.device)
    return q * s.cache


def index_put_accumulate(s, q, k, v, lens, score):
    a = torch.zeros(S, device=q.device)
    a.index_put_((lens,), torch.ones(B, device=q.device), accumulate=True)
    return q * a.sum()


def isnan_any_guard(s, q, k, v, lens, score):
    if torch.isnan(score).any():
        raise ValueError("nan")
    return q * 2


def numpy_roundtrip(s, q, k, v, lens, score):
    import numpy as np

    return q * torch.from_numpy(np.arange(4)).to(q.device).sum()


CASES |= collected(globals())
