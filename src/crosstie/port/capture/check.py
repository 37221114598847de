"""Would a graph capture of a function succeed, and would its replays be true? Asked without a GPU.

The protocol is that of PyTorch's documentation: warm-up calls, one call under capture, then replays with new inputs
copied into the captured ones. A twin of the process, forked before the first call, makes plain calls with the same
inputs in their place: a replay that gives other numbers than the twin's call is stale. The twin is a process because
state hides anywhere: in globals, closures, default arguments, caches and generators.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from crosstie.core.errors import BadInput
from crosstie.port.capture.attribution import between, stale_hazards
from crosstie.port.capture.device import Device
from crosstie.port.capture.device_tensor import DeviceTensor
from crosstie.port.capture.hazards import Result, verdict_of
from crosstie.port.capture.inputs import (
    Arguments,
    Source,
    all_on_host,
    leaves,
    load,
    make,
    same,
    to_device,
    to_host,
    vary,
    with_device_and_seed,
)
from crosstie.port.capture.kernels import NotFollowed
from crosstie.port.capture.modes import stand_in_device
from crosstie.port.capture.outputs import Numbers, copies, device_memory, differences, numbers
from crosstie.port.capture.reasons import NOT_FOLLOWED, RAISES
from crosstie.port.capture.sites import call_users, definition, one_line, site_of
from crosstie.port.capture.subject import is_compiled, on_device, unknown
from crosstie.port.capture.twin import EndedProcess, Twin

WARM_UP_CALLS = 3
# The second replay has the inputs of the first: what differs then is state.
SEEDS = (1, 1, 2, 3)
_SAME_INPUTS = "the factory gives the same inputs for each seed; their values were reordered for the replays"
_MOVED = "the factory gives tensors of the host; they were moved to the device before the calls"
_NO_NEW_INPUTS = "the replays had the captured inputs: reordered ones made the function fail"


def check(fn: Any, inputs: Source, *, state: Callable[..., Any] | None = None) -> Result:
    """Whether `fn` can be captured, and each hazard with its line and rewrite.

    fn      a function, a torch.nn.Module, or a class or factory of a module without arguments; called with the
            inputs, and before them with what `state` gives
    inputs  a factory of the arguments: inputs(), inputs(device) or inputs(device, seed); gives a tuple or list, a
            dict of keywords, (args, kwargs), or one value
    state   a factory of what the function keeps between calls: state() or state(device)
    """
    device = Device()
    with stand_in_device(device):
        return check_on(device, fn, inputs, state=state)


def check_on(device: Device, fn: Any, inputs: Source, *, state: Callable[..., Any] | None = None) -> Result:
    """`check` inside `stand_in_device`, for whoever imports the user's module there too."""
    if is_compiled(fn):
        return unknown(
            fn, "a function that torch.compile has wrapped", "give the function itself, not torch.compile(function)"
        )
    threads = torch.get_num_threads()
    # One thread, here and in the twin: sums come out alike, and a forked process has no other threads.
    torch.set_num_threads(1)
    try:
        return _checked(device, fn, inputs, state)
    except NotFollowed:
        # While inputs or state were made.
        return Result(verdict="unknown", hazards=tuple(device.unfollowed))
    finally:
        torch.set_num_threads(threads)


def _checked(device: Device, fn: Any, inputs: Source, state: Callable[..., Any] | None) -> Result:
    """With the inputs as they are; where the host's lead nowhere, with those moved to the device."""
    try:
        result = _with_new_inputs(device, fn, inputs, state)
    except _FailsAtOnce as error:
        if all_on_host(make(inputs, 0)):
            return _with_new_inputs(device, fn, inputs, state, moved=True)
        if error.__cause__ not in device.gpu_errors and _runs_on_host(fn, inputs, state):
            return unknown(fn, f"on the stand-in device, and not on the CPU, it {error}", NOT_FOLLOWED.remedy)
        raise
    if device.in_use or result.verdict == "error":
        return result
    if all_on_host(make(inputs, 0)):
        return _with_new_inputs(device, fn, inputs, state, moved=True)
    return unknown(fn, "nothing ran on the device", "inputs on the device: a factory that takes (device, seed)")


def _with_new_inputs(
    device: Device, fn: Any, inputs: Source, state: Callable[..., Any] | None, moved: bool = False
) -> Result:  # fmt: skip
    try:
        return _Check(device, fn, inputs, state, varied=True, moved=moved).result()
    except _FailsLater:
        return _Check(device, fn, inputs, state, varied=False, moved=moved).result()


def _runs_on_host(fn: Any, inputs: Source, state: Callable[..., Any] | None) -> bool:
    """Whether one call with tensors that are plain ones succeeds: code may ask for what a stand-in is not."""

    def call() -> bool:
        try:
            kept = () if state is None else (with_device_and_seed(state, 0, "cpu"),)
            args, kwargs = to_host(make(inputs, 0, "cpu"))
            fn(*kept, *args, **kwargs)
        except (Exception, SystemExit):  # noqa: BLE001 - user code may raise anything
            return False
        return True

    with Twin(call) as apart:
        try:
            return bool(apart.result())
        except EndedProcess:
            return False


class _Check:
    def __init__(
        self, device: Device, fn: Any, inputs: Source, state: Callable[..., Any] | None, varied: bool, moved: bool
    ):  # fmt: skip
        def made(seed: int) -> Arguments:
            return to_device(make(inputs, seed)) if moved else make(inputs, seed)

        self.device = device
        self.notes = [_MOVED] if moved else []
        device.begin_check()
        self.site = definition(fn)
        arguments = made(0)
        self.function = on_device(fn, arguments)
        self.kept = None if state is None else with_device_and_seed(state, 0)
        kept = () if state is None else (self.kept,)
        self.static = _after(kept, arguments)
        self.later = [_after(kept, made(seed)) for seed in SEEDS]
        self.varied = all(same(self.static, other) for other in self.later)
        if self.varied and varied:
            self.later = [vary(self.static, seed) for seed in SEEDS]
        if self.varied:
            self.notes.append(_SAME_INPUTS if varied else _NO_NEW_INPUTS)
        given = [leaf for leaf in leaves(arguments) if isinstance(leaf, DeviceTensor)]
        for leaf in given:
            device.memories.note(leaf.elem).from_inputs = True
        device.in_use = bool(given)

    def result(self) -> Result:
        with Twin(self._plain_calls) as twin:
            self._warm_up()
            kept = self._kept_memory()
            out = self._capture(self.static)
            captured = self.device.tape
            if self.device.found:
                self._look_behind_refusals()
                return self._answer()
            replays = list(self._replays(out, kept))
            calls = twin.result()
        if isinstance(calls, str):
            raise _FailsLater(calls)
        unlike = self._unlike(replays, calls, exact=False)
        almost = unlike or self._unlike(replays, calls, exact=True)
        if almost:
            self._capture(load(self.static, self.later[0]))
            # What differs by a rounding alone is stale if something other was launched.
            stale = unlike or any(between(captured, self.device.tape))
            self.device.hazards = (
                stale_hazards(self.device, captured, self.device.tape, almost[0], self.site) if stale else []
            )
        return self._answer()

    def _look_behind_refusals(self) -> None:
        """Where a refusal has ended the capture: once more without, for all hazards at once."""
        found = list(self.device.hazards)
        if not any(hazard in found for _, hazard in self.device.refusals):
            return
        self._capture(self.static, refuses=False)
        more = [hazard for hazard in self.device.hazards if hazard.what != RAISES.what]
        self.device.hazards = list(dict.fromkeys([*found, *more]))

    @staticmethod
    def _unlike(replays: list[Numbers], calls: list[Numbers], exact: bool) -> list[str]:
        pairs = enumerate(zip(replays, calls, strict=True), 1)
        return [f"replay {number}: {said}" for number, pair in pairs for said in differences(*pair, exact)]

    def _answer(self) -> Result:
        found = self.device.found
        return Result(verdict=verdict_of(found), hazards=tuple(found), notes=tuple(self.notes))

    def _call(self, arguments: Arguments) -> Any:
        self.device.begin_call()
        out = call_users(self.function, *arguments.args, **arguments.kwargs)
        if inspect.isgenerator(out) or inspect.iscoroutine(out) or inspect.isasyncgen(out):
            # An asynchronous generator has no close to call here.
            getattr(out, "close", lambda: None)()
            self.device.does_not_follow(f"a {type(out).__name__}, whose body the call does not run", self.site)
        return out

    def _warm_up(self) -> None:
        for _ in range(WARM_UP_CALLS):
            try:
                self._call(self.static)
            except NotFollowed:
                # The capture meets the same, and what is before it.
                return
            except NotImplementedError as error:
                self.device.does_not_follow(one_line(error), site_of(error))
                return
            except (Exception, SystemExit) as error:
                raise _FailsAtOnce(f"fails in a plain call, before any capture: {one_line(error)}") from error

    def _capture(self, arguments: Arguments, refuses: bool = True) -> Any:
        self.device.begin_capture(refuses)
        try:
            return self._call(arguments)
        except NotFollowed:
            return None
        except NotImplementedError as error:
            self.device.does_not_follow(one_line(error), site_of(error))
            return None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            refusal = self.device.refusal_behind(error)
            if refusal is not None:
                self.device.add(refusal)
            elif not self.device.unfollowed:
                self.device.hazard(RAISES, one_line(error), site_of(error))
            return None
        finally:
            self.device.end_capture()
            # It ran nothing, so the first replay stands for the call after the warm-up.
            self.device.call -= 1

    def _replays(self, out: Any, kept: dict[str, torch.Tensor]) -> Iterator[Numbers]:
        for new in self.later:
            load(self.static, new)
            try:
                self.device.replay()
            except (RuntimeError, IndexError) as error:
                # An index that the host checks is one that the device reads or writes out of bounds.
                yield {"replay": f"fails ({one_line(error)})"}
            else:
                yield {**numbers(out), **copies(kept)}

    def _plain_calls(self) -> list[Numbers] | str:
        """What the twin does. A sentence where it cannot."""
        try:
            self._warm_up()
            kept = self._kept_memory()
            calls = (self._call(load(self.static, new)) for new in self.later)
            return [{**numbers(out), **copies(kept)} for out in calls]
        except (Exception, SystemExit) as error:  # noqa: BLE001 - user code may raise anything
            return f"fails in a plain call with new inputs: {one_line(error)}"

    def _kept_memory(self) -> dict[str, torch.Tensor]:
        return {**device_memory(self.kept, "state"), **device_memory(self.function, "module")}


class _FailsAtOnce(BadInput):
    """In the first plain call."""


class _FailsLater(BadInput):
    """With other inputs than the first."""


def _after(kept: tuple[Any, ...], arguments: Arguments) -> Arguments:
    return Arguments((*kept, *arguments.args), arguments.kwargs)
