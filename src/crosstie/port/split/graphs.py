"""One capture and its replays: a CUDA or HIP graph on a GPU, a tape of operations on the CPU.

Both keep to the rule that makes splitting safe for modules with state: a capture leaves no trace in memory that was
there before it, and a replay acts once. The tape is a stand-in for tests and for looking at a split without a GPU; it
reads and writes the same memory at every replay, as a graph does, so what would be stale there is stale here.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosstie.port.capture.sites import NOWHERE
from crosstie.port.capture.tape import TapeEntry, arguments_of


class GpuRecorder:
    """Captures functions one after the other; their graphs are replayed in that order. torch.cuda is HIP on ROCm.

    One memory pool for all pieces: they run in order and never at the same time.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool: Any = None
        # Graphs that are not let go yet: with the last of them PyTorch forgets the pool, and refuses its name.
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        if not self.living:
            self.pool = torch.cuda.graph_pool_handle()
        try:
            with (
                torch.cuda.device(self.device),
                # Other threads of a server may allocate meanwhile: only this thread's calls count.
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                outputs = function()
        except Exception:
            _end_capture_of_random_numbers(self.device)
            raise
        self.living.add(graph)
        return graph, outputs

    def wait(self) -> None:
        """Until no graph runs any more: before graphs are let go."""
        torch.cuda.synchronize(self.device)


def _end_capture_of_random_numbers(device: torch.device) -> None:
    """A capture that fails leaves the generator as if it went on, and every later draw refused: a new state, then."""
    generator = torch.cuda.default_generators[device.index or 0]
    fresh = torch.Generator(device)
    fresh.manual_seed(generator.initial_seed())
    fresh.set_offset(generator.get_offset())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


class TapeRecorder:
    def capture(self, function: Callable[[], Any]) -> tuple[Any, Any]:
        tape = Tape()
        with tape:
            outputs = function()
        tape.put_back()
        return tape, outputs

    def wait(self) -> None:
        """A tape is replayed before its caller goes on."""


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[TapeEntry] = []
        self.born: set[int] = set()
        self.before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_arguments(func, args, kwargs):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.born and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = (storage, storage.clone())
        out = func(*args, **kwargs)
        entry = TapeEntry(func, (args, kwargs), out, NOWHERE)
        self.born.update(address(new) for new, fresh in zip(entry.outs, entry.fresh, strict=True) if fresh)
        self.entries.append(entry)
        return out

    def put_back(self) -> None:
        for storage, saved in self.before.values():
            storage.copy_(saved)
        self.before.clear()

    def replay(self) -> None:
        for entry in self.entries:
            entry.replay(lambda func, args, kwargs: func(*args, **kwargs))


GraphRecorder = GpuRecorder | TapeRecorder


def recorder(device: torch.device) -> GraphRecorder:
    return GpuRecorder(device) if device.type == "cuda" else TapeRecorder()


def address(tensor: torch.Tensor) -> int:
    """Where the memory starts that a tensor and its views share."""
    return int(tensor.untyped_storage().data_ptr())


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What of the arguments the operator's schema says it writes to: tensors, or the nodes that stand for them."""
    given = arguments_of(func, args, kwargs)
    written = [value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor | torch.fx.Node)]
