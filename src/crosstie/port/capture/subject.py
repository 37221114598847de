"""What is checked, brought onto the stand-in device."""

import copy
import inspect
from typing import Any

import torch

from crosstie.core.errors import BadInput
from crosstie.port.capture.device_tensor import DEVICE
from crosstie.port.capture.hazards import Hazard, Result
from crosstie.port.capture.inputs import Arguments, with_device_and_seed
from crosstie.port.capture.reasons import NOT_FOLLOWED
from crosstie.port.capture.sites import definition, one_line
from crosstie.port.capture.targets import takes


def is_compiled(fn: Any) -> bool:
    return hasattr(fn, "_torchdynamo_orig_callable") or type(fn).__name__ == "OptimizedModule"


def unknown(fn: Any, evidence: str, remedy: str) -> Result:
    at = definition(fn)
    hazard = Hazard(kind=NOT_FOLLOWED.kind, what=NOT_FOLLOWED.what, file=at.file, line=at.line, function=at.function,
                    evidence=evidence, remedy=remedy)  # fmt: skip
    return Result(verdict="unknown", hazards=(hazard,))


def on_device(fn: Any, arguments: Arguments) -> Any:
    """The function itself, or a module as a copy on the device; a class or factory is called for it."""
    if inspect.isclass(fn) or (inspect.isroutine(fn) and not takes(fn, arguments) and _takes_no_inputs(fn)):
        fn = with_device_and_seed(fn, 0)
    if not callable(fn):
        raise BadInput(f"{type(fn).__name__} cannot be called")
    if not isinstance(fn, torch.nn.Module):
        return fn
    try:
        return copy.deepcopy(fn).to(DEVICE)
    except Exception as error:
        raise BadInput(f"{type(fn).__name__} cannot be copied to the device: {one_line(error)}") from error


def _takes_no_inputs(fn: Any) -> bool:
    return all(name in ("dev", "device", "seed") for name in inspect.signature(fn).parameters)
