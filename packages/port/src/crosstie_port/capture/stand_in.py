"""torch.cuda as it looks on a machine with one GPU, answered by the stand-in device; and autograd's backward pass.

PyTorch's engine asks the driver for streams and runs CUDA's part of the graph in threads of its own; on a machine
without a GPU it refuses. The nodes of the graph themselves run anywhere, so the pass is a walk in Python.
"""

import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.hooks import RemovableHandle

from crosstie_port.capture.device import Device, Stream
from crosstie_port.capture.device_tensor import DEVICE, DeviceTensor
from crosstie_port.capture.hazards import DEVICE_SYNC, SEEDING

# Where a node's metadata keeps its hooks.
_HOOKS = "crosstie_port.capture.hooks"
_engine = torch.autograd._engine_run_backward

LEGACY = {
    "Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64,
    "Bool": torch.bool,
}  # fmt: skip
_plain_to_dlpack, _plain_from_dlpack = torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack


def run_backward(
    roots: Any, gradients: Any, retain_graph: bool, create_graph: bool, inputs: Any, allow_unreachable: bool = True,
    accumulate_grad: bool = True,
) -> Any:  # fmt: skip
    """Takes and gives what the engine does, for roots on the device; others go to the engine."""
    if not any(root.device.type == "cuda" for root in roots):
        return _engine(roots, gradients, retain_graph, create_graph, inputs,
                       allow_unreachable=allow_unreachable, accumulate_grad=accumulate_grad)  # fmt: skip
    edges = [_edge(root) for root in roots]
    wanted = [_edge(tensor) for tensor in inputs]
    waiting = _times_reached([node for node, _ in edges])
    arrived: dict[Any, dict[int, Any]] = defaultdict(dict)
    for (node, index), gradient in zip(edges, gradients, strict=True):
        _arrive(arrived[node], index, gradient)
    ready = [node for node in dict.fromkeys(node for node, _ in edges) if not waiting[node]]
    caught: dict[tuple[Any, int], Any] = {}
    with torch.set_grad_enabled(create_graph):
        while ready:
            node = ready.pop()
            given = _after_hooks(node, arrived.pop(node, {}))
            caught.update({(node, index): gradient for index, gradient in given.items() if (node, index) in wanted})
            given_to_next = _through(
                node, given, caught_only=bool(wanted) and not (accumulate_grad and (node, 0) in wanted)
            )
            for (following, index), gradient in zip(node.next_functions, given_to_next, strict=False):
                if following is None:
                    continue
                if gradient is not None:
                    _arrive(arrived[following], index, _as_expected(following, index, gradient))
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)
    found = tuple(caught.get(edge) for edge in wanted)
    if not allow_unreachable and any(gradient is None for gradient in found):
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph. "
                           "Set allow_unused=True if this is the desired behavior.")  # fmt: skip
    return found


def add_hook(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> RemovableHandle:
    """Tensor.register_hook: the engine runs these, not the nodes."""
    node, index = _edge(tensor)
    hooks = node.metadata.setdefault(_HOOKS, {}).setdefault(index, OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _after_hooks(node: Any, given: dict[int, Any]) -> dict[int, Any]:
    for index, hooks in node.metadata.get(_HOOKS, {}).items():
        for hook in list(hooks.values()):
            changed = hook(given[index]) if index in given else None
            if changed is not None:
                given[index] = changed
    return given


def _edge(tensor: torch.Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _times_reached(roots: list[Any]) -> dict[Any, int]:
    """How many edges lead to each node: it runs when all of them have been walked."""
    times: dict[Any, int] = defaultdict(int)
    seen = set(roots)
    pending = list(seen)
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is None:
                continue
            times[following] += 1
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return times


def _arrive(at: dict[int, Any], index: int, gradient: Any) -> None:
    at[index] = gradient if at.get(index) is None else at[index] + gradient


def _through(node: Any, given: dict[int, Any], caught_only: bool) -> tuple[Any, ...]:
    """What a node passes on. A leaf accumulates, unless the caller only wants the gradients."""
    is_leaf = hasattr(node, "variable")
    if not given or (is_leaf and caught_only):
        return (None,) * len(node.next_functions)
    arguments = [given.get(index) for index in range(len(node._input_metadata))]
    out = node(*arguments) if not hasattr(node, "apply") else node.apply(*arguments)
    return out if isinstance(out, tuple) else (out,)


def _as_expected(node: Any, index: int, gradient: torch.Tensor) -> torch.Tensor:
    """The engine sums what was broadcast, and casts; formulas rely on it."""
    expected = node._input_metadata[index]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)


@contextmanager
def standing_in(device: Device) -> Iterator[None]:
    with ExitStack() as stack, warnings.catch_warnings():
        # A build without cuDNN says so of each recurrent layer.
        warnings.filterwarnings("ignore", "PyTorch was compiled without cuDNN")
        # What PyTorch warns of in its own words, about this checker's lines; warnings of user code name the user's.
        warnings.filterwarnings("ignore", module=r"crosstie\.port\.capture\.|torch\.")
        for owner, names in _replacements(device).items():
            for name, value in names.items():
                stack.enter_context(patch.object(owner, name, value, create=True))
        yield


def _replacements(device: Device) -> dict[Any, dict[str, Any]]:
    streams, properties = device.streams, device.part.properties

    class StreamContext:
        def __init__(self, stream: Stream | None):
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                self.stream.__enter__()

        def __exit__(self, *_: object) -> None:
            if self.stream is not None:
                self.stream.__exit__()

    def set_stream(stream: Stream) -> None:
        streams.current = stream

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        if not device.in_capture:
            device.random.set_state(state)

    def stance(callback: Any) -> None:
        """What torch._dynamo asks when a compiled function is called: it then runs as it is written."""
        if callback not in (None, False):
            device.does_not_follow("a function that torch.compile has wrapped, run as it is written")

    class Graph:
        """A class, because user code names it in annotations."""

        def __init__(self, *_: Any, **__: Any) -> None:
            device.cannot_follow("a graph made inside the function: give the function that is captured")

    shared = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "synchronize": lambda *_, **__: device.met(DEVICE_SYNC, "torch.cuda.synchronize()"),
        "current_stream": lambda *_, **__: streams.current,
        "set_stream": set_stream,
        "Stream": streams.stream_class,
        "Event": streams.event_class,
    }
    idle = (
        "init", "_lazy_init", "set_device", "device", "device_of", "_sleep", "empty_cache", "ipc_collect",
        "reset_peak_memory_stats", "reset_accumulated_memory_stats", "set_sync_debug_mode",
    )  # fmt: skip
    amounts = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    cuda = {
        **shared,
        **dict.fromkeys(idle, _Nothing),
        **dict.fromkeys(amounts, lambda *_: 0),
        **dict.fromkeys(("graph", "CUDAGraph", "make_graphed_callables"), Graph),
        **dict.fromkeys(("manual_seed", "manual_seed_all"), device.reseed),
        **dict.fromkeys(("seed", "seed_all"), lambda: device.met(SEEDING, "torch.cuda.seed()")),
        **{f"{name}Tensor": _legacy_class(dtype) for name, dtype in LEGACY.items()},
        "is_initialized": lambda: True,
        "_lazy_call": lambda call, **_: None,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: device.in_capture,
        "default_stream": lambda *_: streams.default,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "get_rng_state": lambda *_: device.random.get_state(),
        "set_rng_state": set_state,
        "get_sync_debug_mode": lambda: 0,
        "get_allocator_backend": lambda: "native",
        "initial_seed": lambda: device.seed or 0,
        "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        "memory_stats": lambda *_: defaultdict(int),
        "mem_get_info": lambda *_: (properties.total_memory, properties.total_memory),
    }

    triton = sys.modules.get("triton.runtime.jit")
    accelerator = {
        **shared,
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": lambda: 0,
    }
    dlpack = {"from_dlpack": from_dlpack, "to_dlpack": to_dlpack}
    return {
        **({triton.JITFunction: {"run": lambda *_, **__: device.cannot_follow("a Triton kernel")}} if triton else {}),
        torch.cuda: cuda,
        torch.accelerator: accelerator,
        torch.version: device.part.versions,
        torch: {"Generator": generator_class(device), **dlpack},
        torch.utils.dlpack: dlpack,
        torch._dynamo.eval_frame: {"_callback_from_stance": stance},
        torch.autograd: {"_engine_run_backward": run_backward},
        torch.cuda.nvtx: dict.fromkeys(
            ("range_push", "range_pop", "mark", "range", "range_start", "range_end"), _Nothing
        ),
    }


def _legacy_class(of: torch.dtype) -> Any:
    """torch.cuda.FloatTensor and its kin: made of sizes or of data, and asked with isinstance."""

    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, DeviceTensor) and value.dtype is of

    class Legacy(metaclass=Kind):
        dtype = of

        def __new__(cls, *given: Any) -> Any:
            if given and not isinstance(given[0], int):
                return torch.tensor(given[0], dtype=of, device=DEVICE)
            return torch.empty(given, dtype=of, device=DEVICE)

    return Legacy


def to_dlpack(tensor: Any) -> Any:
    """A device tensor stands for its own capsule."""
    return tensor if isinstance(tensor, DeviceTensor) else _plain_to_dlpack(tensor)


def from_dlpack(given: Any, **options: Any) -> Any:
    return given.detach() if isinstance(given, DeviceTensor) else _plain_from_dlpack(given, **options)


def generator_class(device: Device) -> type[torch.Generator]:
    class Generator(torch.Generator):
        """A generator of the device is one of the host that says it is the device's."""

        on_device: bool

        def __new__(cls, device: Any = "cpu") -> "Generator":
            made = super().__new__(cls)
            made.on_device = torch.device(device).type == "cuda"
            if made.on_device:
                owner.met(SEEDING, "torch.Generator(device='cuda')")
            return made

        @property
        def device(self) -> torch.device:
            return DEVICE if self.on_device else torch.device("cpu")

    owner = device
    return Generator


class _Nothing:
    """Called, or entered as a context, it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
