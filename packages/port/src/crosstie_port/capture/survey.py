"""All that one command line asks about: references in, a result for each callable out."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.progress import OnProgress, no_progress
from crosstie_port.capture.check import check_on
from crosstie_port.capture.device import Device
from crosstie_port.capture.hazards import CaptureResult
from crosstie_port.capture.modes import stand_in_device
from crosstie_port.capture.parts import GpuPart
from crosstie_port.capture.subject import (
    Arguments,
    callables,
    find,
    functions_of,
    load_module,
    make,
    parse_reference,
    takes,
    unknown,
)
from crosstie_port.capture.twin import EndedProcess, Twin

# The class that holds what functions keep between calls, where a module has one and no other is named.
_STATE = "State"


def survey(
    target: str, inputs: str, state: str | None, every: bool, on: GpuPart, on_progress: OnProgress = no_progress
) -> Iterator[tuple[str, CaptureResult]]:
    """Imports the modules on the stand-in device too: what they make at import time belongs there."""
    device = Device(on)
    with stand_in_device(device):
        module_name, name = parse_reference(target)
        module = load_module(module_name)
        factory = _named(inputs, module)
        chosen = functions_of(module) if every else callables(find(module, name), name)
        arguments = make(factory, 0)
        for number, (label, fn) in enumerate(chosen.items()):
            on_progress(number, len(chosen), label)
            holder = _named(state, module) if state else _state_for(fn, module, arguments)
            if every and (fn is factory or not takes(fn, arguments, before=0 if holder is None else 1)):
                continue
            with Twin(partial(_answer, device, fn, factory, holder), heard=True) as apart:
                try:
                    answer = apart.result()
                except EndedProcess as error:
                    answer = str(error)
            if isinstance(answer, CaptureResult):
                yield label, answer
            elif len(chosen) == 1:
                raise BadInput(f"{label} {answer}")
            else:
                # One of many: the others are worth their answer.
                yield label, unknown(fn, answer, "correct the function or its inputs")


def _answer(device: Device, fn: Any, factory: Any, holder: Any) -> CaptureResult | str:
    """In a process of its own: what one function does to globals, or dies of, is not the next one's."""
    try:
        return check_on(device, fn, factory, state=holder)
    except CrosstieError as error:
        return str(error)


def _state_for(fn: Any, module: Any, arguments: Arguments) -> Any:
    holder = getattr(module, _STATE, None)
    if holder is None or not takes(fn, arguments, before=1):
        return None
    # A function of any number of arguments says by the name of its first whether it means the state.
    named = next(iter(inspect.signature(fn).parameters), "") in ("s", "state")
    return holder if named or not takes(fn, arguments) else None


def _named(reference: str, module: Any) -> Callable[..., Any]:
    """MODULE:NAME, or NAME in the module of the target."""
    module_name, name = parse_reference(reference)
    found = find(load_module(module_name), name) if name else find(module, module_name)
    if not callable(found):
        raise BadInput(f"{reference} is no function")
    return found
