"""Would a graph capture of a function succeed, and would its replays be true? Asked without a GPU.

The protocol is that of PyTorch's documentation: warm-up calls, one call under capture, then replays with new inputs
copied into the captured ones. A twin of the process, forked before the first call, makes plain calls with the same
inputs in their place: a replay that gives other numbers than the twin's call is stale. The twin is a process because
state hides anywhere: in globals, closures, default arguments, caches and generators.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from crosstie.core.errors import BadInput, CrosstieError
from crosstie_port.capture import hazards
from crosstie_port.capture.device import Device
from crosstie_port.capture.device_tensor import DeviceTensor
from crosstie_port.capture.hazards import CaptureHazard, CaptureResult, Reason, verdict_of
from crosstie_port.capture.modes import stand_in_device
from crosstie_port.capture.parts import DEFAULT, part
from crosstie_port.capture.sites import Site, call_users, definition, one_line, site_of
from crosstie_port.capture.subject import (
    Arguments,
    Source,
    all_on_host,
    is_compiled,
    leaves,
    load,
    make,
    on_device,
    same,
    to_device,
    to_host,
    unknown,
    vary,
    with_device_and_seed,
)
from crosstie_port.capture.tape import NotFollowed, TapeEntry, address
from crosstie_port.capture.twin import EndedProcess, Twin, without_onednn

Numbers = dict[str, Any]
_DEPTH = 6
# Enough for another order of summation, far below what a stale value changes.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

Found = tuple[Reason, str, Site]
WARM_UP_CALLS = 3
# The second replay has the inputs of the first: what differs then is state.
SEEDS = (1, 1, 2, 3)
_SAME_INPUTS = "the factory gives the same inputs for each seed; their values were reordered for the replays"
_MOVED = "the factory gives tensors of the host; they were moved to the device before the calls"
_NO_NEW_INPUTS = "the replays had the captured inputs: reordered ones made the function fail"


def numbers(out: Any, kept: dict[str, torch.Tensor]) -> Numbers:
    """Copies of all tensors of an output and of what is kept, and all plain values."""
    leaves = [*_leaves(out, "output"), *kept.items()]
    return {at: _copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for at, leaf in leaves}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().dequantize() if tensor.is_quantized else tensor.detach()
    return plain.clone() if plain.layout is torch.strided else plain.to_dense()


def device_memory(value: Any, name: str) -> dict[str, torch.Tensor]:
    """The memory of all device tensors in it, not copied."""
    return dict(_leaves(value, name, only_device=True))


def _leaves(value: Any, name: str, only_device: bool = False, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, DeviceTensor):
        yield name, value.elem
    elif isinstance(value, (torch.Tensor, bool, int, float, complex, str)):
        if not only_device:
            yield name, value
    elif depth < _DEPTH:
        for key, part in _parts(value):
            yield from _leaves(part, f"{name}{key}", only_device, depth + 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f".{key}", tensor
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"[{key!r}]", part
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        if isinstance(value, type) or (callable(value) and not isinstance(value, torch.nn.Module)):
            return
        for key, part in vars(value).items():
            if not key.startswith("_"):
                yield f".{key}", part


def differences(replayed: Numbers, called: Numbers, exact: bool = False) -> list[str]:
    """One sentence for each name whose numbers are not the same, within rounding unless `exact`."""
    if "replay" in replayed:
        return [replayed["replay"]]
    found = [f"{name} is not in both" for name in sorted(replayed.keys() ^ called.keys())]
    for name in sorted(replayed.keys() & called.keys()):
        said = _difference(replayed[name], called[name], exact)
        if said:
            found.append(f"{name}: {said}")
    return found


def _difference(replayed: Any, called: Any, exact: bool) -> str | None:
    if not isinstance(replayed, torch.Tensor) or not isinstance(called, torch.Tensor):
        return None if replayed == called or replayed != replayed else f"{replayed!r} at replay, {called!r} in a call"
    if replayed.shape != called.shape or replayed.dtype != called.dtype:
        return f"{_kind(replayed)} at replay, {_kind(called)} in a call"
    wide = torch.complex128 if called.is_complex() else torch.float64
    left, right = replayed.to(wide), called.to(wide)
    tolerance = 0.0 if exact else _TOLERANCE.get(called.dtype, 0.0)
    unlike = ~torch.isclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not unlike.any():
        return None
    at = int(unlike.flatten().nonzero()[0])
    one, other = left.flatten()[at].item(), right.flatten()[at].item()
    return f"{int(unlike.sum())} of {unlike.numel()} values, such as {one:.8g} at replay and {other:.8g} in a call"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def stale_hazards(
    device: Device, captured: list[TapeEntry], following: list[TapeEntry], evidence: str, at: Site
) -> list[CaptureHazard]:
    """At least one. `evidence`: the numbers that differ; `at`: the function, where no line can be named."""
    found = list(between(captured, following))
    found = found or [*_from_earlier_calls(device, captured), *_from_pinned(device, captured)]
    found = found or [(hazards.OUTSIDE, "not on the captured stream", site) for site in device.outside]
    found = found or [(hazards.UNTRACED, "no single line was found", at)]
    made: dict[tuple[Any, ...], CaptureHazard] = {}
    for reason, seen, site in found:
        made.setdefault((reason, site), reason.at(site, f"{seen}; {evidence}"))
    return list(made.values())


def between(captured: list[TapeEntry], following: list[TapeEntry]) -> Iterator[Found]:
    made_before: set[int] = set()
    made_after: set[int] = set()
    for before, after in zip(captured, following, strict=False):
        if before.func is not after.func or len(before.tensors) != len(after.tensors):
            yield hazards.BRANCH, f"{before.name} in the captured call, {after.name} in the next", before.site
            return
        tensors = list(zip(before.tensors, after.tensors, strict=True))
        sizes = [(list(old.shape), list(new.shape)) for old, new in tensors if old.shape != new.shape]
        if sizes:
            yield hazards.GROWS, f"{before.name} on {sizes[0][0]}, then on {sizes[0][1]}", before.site
            return
        constants = zip(map(repr, before.constants), map(repr, after.constants), strict=False)
        other = next(((old, new) for old, new in constants if old != new), None)
        if other:
            yield hazards.CONSTANT, f"{before.name} with {other[0]}, then with {other[1]}", before.site
        for old, new in tensors:
            outer = address(old) not in made_before and address(new) not in made_after
            if outer and address(old) != address(new):
                yield hazards.REBOUND, f"{before.name} reads other memory in the next call", before.site
        made_before |= {address(out) for out in before.outs}
        made_after |= {address(out) for out in after.outs}
    if len(captured) != len(following):
        rest = (captured if len(captured) > len(following) else following)[min(len(captured), len(following))]
        counts = f"{len(captured)} operations in the captured call, {len(following)} in the next"
        yield hazards.BRANCH, counts, rest.site


def _from_earlier_calls(device: Device, captured: list[TapeEntry]) -> Iterator[Found]:
    made: set[int] = set()
    for entry in captured:
        for tensor in entry.tensors:
            memory = device.memories.of(tensor)
            if address(tensor) not in made and memory and memory.from_inputs and memory.call and memory.site:
                yield hazards.CACHED, f"made in call {memory.call}, read by {entry.name} at {entry.site}", memory.site
        made |= {address(out) for out in entry.outs}


def _from_pinned(device: Device, captured: list[TapeEntry]) -> Iterator[Found]:
    for entry in captured:
        if any(device.memories.is_pinned(tensor) for tensor in entry.tensors):
            yield hazards.PINNED, f"{entry.name} from pinned memory", entry.site


def check(
    fn: Any, inputs: Source, *, state: Callable[..., Any] | None = None, on: str = DEFAULT
) -> CaptureResult:  # fmt: skip
    """Whether `fn` can be captured, and each hazard with its line and rewrite.

    fn      a function, a torch.nn.Module, or a class or factory of a module without arguments; called with the
            inputs, and before them with what `state` gives
    inputs  a factory of the arguments: inputs(), inputs(device) or inputs(device, seed); gives a tuple or list, a
            dict of keywords, (args, kwargs), or one value
    state   a factory of what the function keeps between calls: state() or state(device)
    on      the part that the device stands for: an accelerator of the catalog, or an instruction set
    """
    device = Device(part(on))
    with stand_in_device(device):
        return check_on(device, fn, inputs, state=state)


def check_on(device: Device, fn: Any, inputs: Source, *, state: Callable[..., Any] | None = None) -> CaptureResult:
    """`check` inside `stand_in_device`, for whoever imports the user's module there too."""
    if is_compiled(fn):
        return unknown(
            fn, "a function that torch.compile has wrapped", "give the function itself, not torch.compile(function)"
        )
    threads = torch.get_num_threads()
    # One thread and one library, here and in the twin: sums come out alike, and a forked process has no other threads.
    torch.set_num_threads(1)
    try:
        with without_onednn():
            return _checked(device, fn, inputs, state)
    except NotFollowed:
        # While inputs or state were made.
        return CaptureResult(verdict="unknown", hazards=tuple(device.unfollowed))
    finally:
        torch.set_num_threads(threads)


def _checked(device: Device, fn: Any, inputs: Source, state: Callable[..., Any] | None) -> CaptureResult:
    """With the inputs as they are; where the host's lead nowhere, with those moved to the device."""

    def result(moved: bool) -> CaptureResult:
        try:
            return _Check(device, fn, inputs, state, varied=True, moved=moved).result()
        except _FailsLater:
            return _Check(device, fn, inputs, state, varied=False, moved=moved).result()

    if all_on_host(make(inputs, 0)):
        return _trial(device, partial(result, moved=False)) or result(moved=True)
    try:
        capture_result = result(moved=False)
    except _FailsAtOnce as error:
        if error.__cause__ not in device.gpu_errors and _runs_on_host(fn, inputs, state):
            return unknown(fn, f"on the stand-in device, and not on the CPU, it {error}", hazards.NOT_FOLLOWED.remedy)
        raise
    if device.in_use or capture_result.verdict == "error":
        return capture_result
    return unknown(fn, "nothing ran on the device", "inputs on the device: a factory that takes (device, seed)")


def _trial(device: Device, judge: Callable[[], CaptureResult]) -> CaptureResult | None:
    """The verdict with tensors of the host, None where they lead nowhere. In a process of its own: what a function
    makes lazily would stay on the host, in its module or a global, for the calls that count."""

    def answer() -> CaptureResult | str | None:
        try:
            capture_result = judge()
        except _FailsAtOnce:
            return None
        except NotFollowed:
            return CaptureResult(verdict="unknown", hazards=tuple(device.unfollowed))
        except CrosstieError as error:
            return str(error)
        return capture_result if device.in_use or capture_result.verdict == "error" else None

    with Twin(answer, heard=True) as apart:
        found = apart.result()
    if isinstance(found, str):
        raise BadInput(found)
    return found if isinstance(found, CaptureResult) else None


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

    def result(self) -> CaptureResult:
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
            following, self.device.hazards = self.device.tape, []
            # What differs by a rounding alone is stale if something other was launched.
            if unlike or any(between(captured, following)):
                self.device.hazards = stale_hazards(self.device, captured, following, almost[0], self.site)
        return self._answer()

    def _look_behind_refusals(self) -> None:
        """Where a refusal has ended the capture: once more without, for all hazards at once."""
        capture_hazards = list(self.device.hazards)
        if not any(hazard in capture_hazards for _, hazard in self.device.refusals):
            return
        self._capture(self.static, refuses=False)
        more = [hazard for hazard in self.device.hazards if hazard.what != hazards.RAISES.what]
        self.device.hazards = list(dict.fromkeys([*capture_hazards, *more]))

    @staticmethod
    def _unlike(replays: list[Numbers], calls: list[Numbers], exact: bool) -> list[str]:
        pairs = enumerate(zip(replays, calls, strict=True), 1)
        return [f"replay {number}: {said}" for number, pair in pairs for said in differences(*pair, exact)]

    def _answer(self) -> CaptureResult:
        found = self.device.found
        return CaptureResult(verdict=verdict_of(found), hazards=tuple(found), notes=tuple(self.notes))

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
                self.device.hazard(hazards.RAISES, one_line(error), site_of(error))
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
                yield numbers(out, kept)

    def _plain_calls(self) -> list[Numbers] | str:
        """What the twin does. A sentence where it cannot."""
        try:
            self._warm_up()
            kept = self._kept_memory()
            calls = (self._call(load(self.static, new)) for new in self.later)
            return [numbers(out, kept) for out in calls]
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
