"""A host-backed stand-in for a GPU: runs every operation on the host's numbers and keeps account of what capture means.

One idea: below autograd, every operation on a device tensor passes `Device.operation`. There it is judged by the rules
of capture, run on the host's numbers, and written on the tape. A replay runs the tape again, and nothing else.
Streams and events keep account of what is part of the capture, and whether all of it comes back to where it began.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import count
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from crosstie_port.capture import hazards
from crosstie_port.capture.device_tensor import DEVICE, HOST, DeviceTensor, Memories, MemoryRecord, plain_bytes
from crosstie_port.capture.hazards import CaptureHazard, Reason
from crosstie_port.capture.parts import GpuPart, Rule, part
from crosstie_port.capture.rules import hazards_of, may_mix
from crosstie_port.capture.sites import Site, user_site
from crosstie_port.capture.tape import Baked, NotFollowed, TapeEntry, arguments_of, run_on_host, stays_on_host

_PYTORCHS = ("aten", "prims", "prim", "profiler")
# Batch norm updates these, and its schema does not say so.
_WRITTEN_UNDECLARED = ("running_mean", "running_var")
# What PyTorch itself refuses under capture, and how it says so: user code that catches the error can go on, and the
# capture stays good. Any other hazard comes from the driver and spoils the capture, caught or not.
_REFUSED_COPY = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
    "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)
_REFUSALS = {
    hazards.TO_DEVICE: _REFUSED_COPY,
    hazards.SCALAR_TO_DEVICE: _REFUSED_COPY,
    hazards.TO_HOST: _REFUSED_COPY,
    hazards.GENERATOR: "Attempt to increase offset for a CUDA generator not in capture mode.",
    hazards.SEEDING: "Cannot call CUDAGeneratorImpl::set_current_seed during CUDA graph capture.",
}


class Streams:
    """The current stream is a thread's own, as in CUDA: what another thread launches is not captured."""

    def __init__(self, device: "Device") -> None:
        # Classes of this device: user code calls them, and asks isinstance of them.
        self.stream_class = type("Stream", (Stream,), {"_of": device})
        self.event_class = type("Event", (Event,), {"_of": device})
        self._numbers = count()
        self.all: list[Stream] = []
        self.default: Stream = self.stream_class()
        self._current = threading.local()
        self.origin: Stream | None = None

    def enter(self, stream: "Stream") -> int:
        self.all.append(stream)
        return next(self._numbers)

    @property
    def current(self) -> "Stream":
        return getattr(self._current, "stream", self.default)

    @current.setter
    def current(self, stream: "Stream") -> None:
        self._current.stream = stream

    def begin_capture(self) -> None:
        self.origin = self.current = self.stream_class()
        self.current.captured = True

    def end_capture(self) -> "list[Stream]":
        """The streams with work that never joined."""
        unjoined = [s for s in self.all if s.captured and s is not self.origin and s.unjoined is not None]
        for stream in self.all:
            stream.captured = False
        self.current = self.default
        return unjoined


class Stream:
    _of: "Device"

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority, self.captured = DEVICE, priority, False
        # Whether it has run operations before the capture, so that the allocator keeps memory for it.
        self.has_memory = False
        # Whether a library has its handle for this stream, where it keeps one a stream.
        self.has_handle = False
        # Where it took on work that no other captured stream has waited for.
        self.unjoined: Site | None = None
        self.stream_id = self.cuda_stream = self._of.streams.enter(self) if hasattr(self._of, "streams") else 0
        self._outer: list[Stream] = []

    def wait_stream(self, stream: "Stream") -> None:
        self._wait(stream.captured, stream, f"{self}.wait_stream({stream})")

    def wait_event(self, event: "Event") -> None:
        # An event that was never recorded is waited for by nobody.
        if event.stream is not None:
            self._wait(event.captured, event.stream, f"{self}.wait_event(event of {event.stream})")

    def _wait(self, captured: bool, other: "Stream", said: str) -> None:
        if other is self:
            return
        if captured:
            if self is self._of.streams.default:
                self._of.hazard(hazards.LEGACY, said)
                return
            # What the other has not brought back is this one's to bring back.
            self.captured, self.unjoined = True, self.unjoined or other.unjoined
            other.unjoined = None
        elif self.captured:
            self._of.met(hazards.ISOLATION, said)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or self._of.streams.event_class()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._of.met(hazards.STREAM_SYNC, "stream.synchronize()")

    def query(self) -> bool:
        self._of.met(hazards.EVENT_QUERY, "stream.query()")
        return True

    def is_capturing(self) -> bool:
        return self.captured

    def __enter__(self) -> "Stream":
        self._outer.append(self._of.streams.current)
        self._of.streams.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self._of.streams.current = self._outer.pop()

    def __str__(self) -> str:
        return f"stream {self.stream_id}"


class Event:
    _of: "Device"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.captured, self.device = False, DEVICE
        self.stream: Stream | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self.stream = on = stream or self._of.streams.current
        self.captured = on.captured

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or self._of.streams.current).wait_event(self)

    def synchronize(self) -> None:
        self._of.met(hazards.STREAM_SYNC, "event.synchronize()")

    def query(self) -> bool:
        self._of.met(hazards.EVENT_QUERY, "event.query()")
        return True

    def elapsed_time(self, end: "Event") -> float:
        self._of.met(hazards.EVENT_QUERY, "event.elapsed_time()")
        return 1.0


class Device:
    def __init__(self, stands_for: GpuPart | None = None) -> None:
        self.part = stands_for or part()
        self.memories = Memories()
        self.streams = Streams(self)
        # The device's default generator; seeded for each call, so that the n-th replay and the n-th call draw the same.
        self.random = torch.Generator()
        self.seed: int | None = None
        # Enters again, inside an operation, what leads to this device; `modes.stand_in_device` sets it.
        self.modes: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.call = 0
        # Whether what is checked has tensors on the device, or makes some.
        self.in_use = False
        self.capturing = False
        self.hazards: list[CaptureHazard] = []
        self.refusals: list[tuple[RuntimeError, CaptureHazard]] = []
        self.refuses = True
        # What was raised because a GPU raises it, in a plain call too.
        self.gpu_errors: list[Exception] = []
        # Kept over all calls: user code that catches the error goes another way than on a GPU.
        self.unfollowed: list[CaptureHazard] = []
        # Where work was put on streams that are not part of the capture, and serial numbers of the memory it made.
        self.outside: list[Site] = []
        self._made_outside: set[int] = set()
        self.tape: list[TapeEntry] = []
        # By serial number of the memory: its bytes, and what they were before the capture.
        self._overwritten: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._first_of_capture = 0
        self._lock = threading.RLock()

    @property
    def found(self) -> list[CaptureHazard]:
        return [*self.hazards, *self.unfollowed]

    def begin_check(self) -> None:
        self.call, self.hazards, self.unfollowed = 0, [], []
        self.in_use = False

    def begin_call(self) -> None:
        self.call += 1
        self.random.manual_seed(self.call)

    def begin_capture(self, refuses: bool = True) -> None:
        """Without `refuses`, what PyTorch would refuse is noted and done, to find what comes after it."""
        self.capturing, self.tape, self.hazards, self.outside = True, [], [], []
        self.refuses, self.refusals = refuses, []
        self._overwritten.clear()
        self._made_outside.clear()
        self._first_of_capture = self.memories.count
        self.streams.begin_capture()

    def end_capture(self) -> None:
        """Nothing runs on a device while it is captured: what was written is put back."""
        for stream in self.streams.end_capture():
            self.hazard(
                hazards.UNJOINED, f"{stream} took on work and no captured stream waited for it", stream.unjoined
            )
        self.capturing = False
        with _plainly():
            for now, before in self._overwritten.values():
                now.copy_(before)

    def replay(self) -> None:
        self.begin_call()
        with _plainly():
            for entry in self.tape:
                entry.replay(self.run)

    def hazard(self, reason: Reason, evidence: str, site: Site | None = None) -> None:
        self.add(reason.at(site or user_site(), evidence))

    def add(self, capture_hazard: CaptureHazard) -> None:
        if capture_hazard not in self.hazards:
            self.hazards.append(capture_hazard)

    def as_on_gpu(self, error: Exception) -> Exception:
        """Notes that a GPU raises this as well."""
        self.gpu_errors.append(error)
        return error

    def refusal_behind(self, error: BaseException | None) -> CaptureHazard | None:
        """What was refused with this error, or with what it was raised for."""
        while error is not None:
            for refusal, hazard in self.refusals:
                if refusal is error:
                    return hazard
            error = error.__cause__ or error.__context__
        return None

    def does_not_follow(self, what: str, site: Site | None = None) -> None:
        capture_hazard = hazards.NOT_FOLLOWED.at(site or user_site(), what)
        if capture_hazard not in self.unfollowed:
            self.unfollowed.append(capture_hazard)

    def cannot_follow(self, what: str) -> NoReturn:
        self.does_not_follow(what)
        raise NotFollowed(what)

    def reseed(self, seed: int) -> None:
        """PyTorch lets a captured function repeat the seed that is set, to no effect, and no other."""
        if not self.in_capture:
            self.seed = seed
            self.random.manual_seed(seed)
        elif seed != self.seed:
            self.met(hazards.SEEDING, f"seed {seed} in place of {self.seed}")

    def met(self, reason: Reason, evidence: str, site: Site | None = None) -> None:
        """Raises where PyTorch would, and else goes on: all hazards of a call are found at once."""
        if not self.capturing:
            return
        if not (self.refuses and self.in_capture and reason in _REFUSALS):
            self.hazard(reason, evidence, site)
            return
        error = RuntimeError(_REFUSALS[reason])
        self.refusals.append((error, reason.at(site or user_site(), evidence)))
        raise error

    @property
    def in_capture(self) -> bool:
        """Whether an operation of this thread goes into the graph now."""
        return self.capturing and self.streams.current.captured

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            self.cannot_follow(f"the higher-order operator {func}")
        leaves, spec = tree_flatten((args, kwargs))
        if not any(map(_is_devices, leaves)):
            return self._host_operation(func, args, kwargs)
        if _is_composed(func):
            # PyTorch takes it apart in autograd; in inference mode, which has none, it comes here whole.
            with self.modes(), torch._C.DisableTorchFunction():
                # The C++ that a GPU runs, not the Python that `func.decompose` may have in its place.
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if func.namespace not in _PYTORCHS:
            in_python = _python_kernel(func)
            if in_python is not None:
                with self.modes():
                    return in_python(*args, **kwargs)
            # Its kernel for the host may run; what its kernel for the device does, nobody has seen.
            self.does_not_follow(f"{func._schema.name}, an operator that is not PyTorch's")
        with self._lock:
            return self._device_operation(func, args, kwargs, leaves, spec)

    def _host_operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name == "aten::is_pinned":
            return self.memories.is_pinned(args[0])
        pinned = name == "aten::_pin_memory" or kwargs.get("pin_memory")
        if name == "aten::_pin_memory":
            out = args[0].clone(memory_format=torch.contiguous_format)
        else:
            out = func(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
        if pinned:
            self.memories.pin(out)
        return out

    def _device_operation(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: list[Any], spec: Any) -> Any:
        site = user_site()
        self.in_use = True
        if self.capturing:
            self._judge(func, args, kwargs, site)
        if "_nested_" in func._schema.name:
            self.cannot_follow("a nested tensor on the device")
        refused = _mixed_devices(func, args, leaves)
        if refused:
            raise self.as_on_gpu(RuntimeError(refused))
        host_args, host_kwargs = _for_the_host(
            [leaf.elem if isinstance(leaf, DeviceTensor) else leaf for leaf in leaves], spec
        )
        if self.capturing:
            self._remember_what_is_written(func, host_args, host_kwargs)
        try:
            out = tree_map_only(torch.Tensor, _resolved, self.run(func, host_args, host_kwargs))
        except NotFollowed as error:
            self.cannot_follow(str(error))
        count = self.memories.count
        made = self._note_memory((host_args, host_kwargs), out, site)
        target = kwargs.get("device")
        to_host = target is not None and target.type == "cpu"
        if to_host and (kwargs.get("non_blocking") or kwargs.get("pin_memory")):
            # PyTorch gives a copy that does not wait pinned memory of its own.
            self.memories.pin(out)
        if self.in_capture:
            launched = _for_the_host([self._as_launched(leaf) for leaf in leaves], spec)
            self.tape.append(TapeEntry(func, launched, out, site))
            self._reads_of_outside(func, host_args, host_kwargs, site)
            self.streams.current.unjoined = site
        elif self.capturing:
            self.outside.append(site)
            self._made_outside |= {memory.serial for memory in made if memory.serial >= count}
            # Memory that the stream gave back earlier is taken again; new memory may not be asked for now.
            if any(memory.serial >= count for memory in made) and not self.streams.current.has_memory:
                self.hazard(hazards.NOT_CAPTURED, f"{func._schema.name} on {self.streams.current}", site)
        else:
            self.streams.current.has_memory = True
            if any(rule.first_on_side_stream for rule in self._own_rules(func)):
                self.streams.current.has_handle = True
        wrappers = {id(leaf.elem): leaf for leaf in leaves if isinstance(leaf, DeviceTensor)}
        if func._schema.is_mutable:
            for wrapper in wrappers.values():
                wrapper.follow_elem()
        if to_host:
            return out
        stays = stays_on_host(func, out)

        def returned(tensor: torch.Tensor) -> torch.Tensor:
            known = wrappers.get(id(tensor))
            return known if known is not None else tensor if tensor is stays else self.wrap(tensor)

        return tree_map_only(torch.Tensor, returned, out)

    def _judge(self, func: Any, args: Any, kwargs: dict[str, Any], site: Site) -> None:
        own = [rule for rule in self._own_rules(func) if not rule.first_on_side_stream or self._is_first(func)]
        for reason, evidence in hazards_of(func, args, kwargs, self.memories, own):
            # On a stream outside the capture, what waits is refused as well: torch.cuda.graph captures "global".
            if self.in_capture or reason is not hazards.GENERATOR:
                self.met(reason, evidence, site)

    def _own_rules(self, func: Any) -> list[Rule]:
        return self.part.rules.get(str(func._schema.name).removeprefix("aten::"), [])

    def _is_first(self, func: Any) -> bool:
        """The first operation of its kind on a side stream of the capture; the capture's own stream is made ready."""
        stream = self.streams.current
        return self.in_capture and stream is not self.streams.origin and not stream.has_handle

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return run_on_host(func, args, kwargs, self.random)

    def wrap(self, elem: torch.Tensor) -> DeviceTensor:
        if elem.is_nested or elem.layout is torch.jagged:
            self.cannot_follow("a nested tensor on the device")
        return DeviceTensor(elem, self)

    def _as_launched(self, leaf: Any) -> Any:
        if isinstance(leaf, DeviceTensor):
            return leaf.elem
        return Baked(leaf) if isinstance(leaf, torch.Tensor) and not self.memories.is_pinned(leaf) else leaf

    def _note_memory(self, given: Any, out: Any, site: Site) -> list[MemoryRecord]:
        """What is computed from the inputs, and where: a cache filled from them in warm-up is stale at replay."""
        known = [self.memories.of(tensor) for tensor in _strided(given)]
        from_inputs = any(memory is not None and memory.from_inputs for memory in known)
        made = [self.memories.note(tensor, self.call, site) for tensor in _strided(out)]
        for memory in made:
            memory.from_inputs = memory.from_inputs or from_inputs
        return made

    def _reads_of_outside(self, func: Any, args: Any, kwargs: Any, site: Site) -> None:
        for tensor in _strided((args, kwargs)) if self._made_outside else ():
            memory = self.memories.of(tensor)
            if memory is not None and memory.serial in self._made_outside:
                self.hazard(hazards.OUTSIDE, f"{func._schema.name} reads memory made at {memory.site}", site)

    def _remember_what_is_written(self, func: Any, args: Any, kwargs: Any) -> None:
        for argument, value in arguments_of(func, args, kwargs):
            declared = argument.alias_info is not None and argument.alias_info.is_write
            if not declared and argument.name not in _WRITTEN_UNDECLARED:
                continue
            for tensor in _strided(value):
                memory = self.memories.note(tensor)
                if memory.serial < self._first_of_capture and memory.serial not in self._overwritten:
                    now = plain_bytes(tensor.untyped_storage())
                    self._overwritten[memory.serial] = (now, now.clone())


@contextmanager
def _plainly() -> Iterator[None]:
    """On the host's memory. In inference mode: what was made in it can be written in it alone."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode():
        yield


def _is_devices(leaf: Any) -> bool:
    return isinstance(leaf, DeviceTensor) or (isinstance(leaf, torch.device) and leaf.type != "cpu")


@cache
def _is_composed(func: Any) -> bool:
    """Whether PyTorch makes it of other operations on every device."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _python_kernel(func: Any) -> Callable[..., Any] | None:
    """The function behind torch.library.custom_op, for CUDA or for all devices: its parts can be followed."""
    operator = torch._library.custom_ops._maybe_get_opdef(func)
    kernels = operator._backend_fns if operator is not None else {}
    return kernels.get("cuda") or kernels.get(None)


def _for_the_host(leaves: list[Any], spec: Any) -> Any:
    """(args, kwargs) of the same operation on the host."""
    args, kwargs = tree_unflatten([HOST if isinstance(leaf, torch.device) else leaf for leaf in leaves], spec)
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    return args, kwargs


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Conjugation and negation done, not noted: a device tensor has no such mark of its own."""
    return tensor.resolve_conj().resolve_neg() if tensor.layout is torch.strided else tensor


def _strided(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.layout is torch.strided]


def _mixed_devices(func: Any, args: Any, leaves: list[Any]) -> str | None:
    if func._schema.name == "aten::_pack_padded_sequence" and isinstance(args[1], DeviceTensor):
        return "'lengths' argument should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor"
    strangers = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor) and t.dim() > 0]
    if not strangers or may_mix(func):
        return None
    return f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func})"
