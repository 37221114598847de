"""A graph as a GPU would keep it: the operations of one call, at fixed addresses, with the host's values baked in.

What an operation of the device computes is computed on the host, in the call and at each replay.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from crosstie_port.capture.sites import Site, one_line

Runner = Callable[[Any, Any, Any], Any]
# Memory that nobody has written: a replay leaves what is there.
UNWRITTEN = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::empty_permuted",
}  # fmt: skip

RESIZING = {"aten::resize_", "aten::resize_as_", "aten::set_"}

# Types for which CUDA has kernels that the CPU lacks.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float8_e4m3fn: torch.float32,
          torch.float8_e5m2: torch.float32, torch.int32: torch.float64, torch.int64: torch.float64}  # fmt: skip


class Baked:
    """A host scalar among the arguments: read when the kernel is launched, so only its value gets into the graph."""

    def __init__(self, tensor: torch.Tensor):
        self.value = tensor.detach().clone()


class TapeEntry:
    """One operation. A tensor among its arguments is device or pinned memory, by reference; all else is constant."""

    def __init__(self, func: Any, arguments: Any, out: Any, site: Site):
        """`arguments`: (args, kwargs) with host tensors in place of device tensors, and `Baked` host scalars."""
        self.func, self.site = func, site
        leaves, self.spec = tree_flatten(arguments)
        # Of their own: a later operation may change the sizes of the user's tensors in place.
        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.outs = [tensor.detach() for tensor in tensors_in(out)]
        held = {address(tensor) for tensor in self.tensors}
        self.fresh = [address(out) not in held for out in self.outs]

    @property
    def name(self) -> str:
        return str(self.func._schema.name)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def constants(self) -> list[Any]:
        plain = (leaf.value.tolist() if isinstance(leaf, Baked) else leaf for leaf in self.leaves)
        return [leaf for leaf in plain if not isinstance(leaf, torch.Tensor)]

    def replay(self, run: Runner) -> None:
        # A view is where it was.
        resized = torch.Tag.inplace_view in self.func.tags or self.name in RESIZING
        if resized or self.name in UNWRITTEN or not (any(self.fresh) or self.func._schema.is_mutable):
            return
        given = [leaf.value if isinstance(leaf, Baked) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(given, self.spec)
        for out, new, fresh in zip(self.outs, tensors_in(run(self.func, args, kwargs)), self.fresh, strict=True):
            if fresh:
                out.copy_(new)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def arguments_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Each argument of an operator's schema, with what was given for it or else its default."""
    for position, argument in enumerate(func._schema.arguments):
        default = args[position] if position < len(args) else argument.default_value
        yield argument, kwargs.get(argument.name, default)


def address(tensor: torch.Tensor) -> int:
    """The same for all views of one memory."""
    if tensor.layout is torch.strided:
        return int(tensor.untyped_storage()._cdata)
    return address(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values())


class NotFollowed(RuntimeError):
    """Something that the stand-in device cannot run: a kernel of somebody else's, or one that the host lacks."""


def run_on_host(func: Any, args: Any, kwargs: dict[str, Any], random: torch.Generator) -> Any:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return _run(func, args, kwargs)
    # The device has its own generator; the host's must not notice.
    if kwargs.get("generator") is not None:
        return _run(func, args, kwargs)
    hosts = torch.get_rng_state()
    torch.set_rng_state(random.get_state())
    try:
        return _run(func, args, kwargs)
    finally:
        random.set_state(torch.get_rng_state())
        torch.set_rng_state(hosts)


def stays_on_host(func: Any, out: Any) -> Any:
    """The one output that CUDA keeps on the host."""
    return out[1] if func._schema.name == "aten::_pack_padded_sequence" else None


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    only_cuda = _ONLY_CUDA.get(func._schema.name)
    if only_cuda is not None:
        return only_cuda(*args, **kwargs)
    if func._schema.name == "aten::copy_" and _is_same_memory(*args[:2]):
        return args[0]
    try:
        out = func(*args, **kwargs)
        # A GPU gives what happens to be there; the same here and in the twin, or chance would decide the verdict.
        return out.zero_() if func._schema.name in UNWRITTEN else out
    except NotImplementedError as error:
        return _without_a_host_kernel(func, args, kwargs, error)
    except RuntimeError as error:
        # "addcmul" not implemented for 'Half'
        if "not implemented for" not in str(error):
            raise
        return _without_a_host_kernel(func, args, kwargs, error)


def _is_same_memory(target: torch.Tensor, source: torch.Tensor) -> bool:
    """matmul(out=...) copies its result onto itself in another shape, which the host's kernel refuses."""
    whole = target.is_contiguous() and source.is_contiguous() and target.numel() == source.numel()
    return bool(whole and target.data_ptr() == source.data_ptr() and target.dtype == source.dtype)


def _without_a_host_kernel(func: Any, args: Any, kwargs: dict[str, Any], error: Exception) -> Any:
    """A decomposition where PyTorch has one; else the same in a wider type, rounded back."""
    made_of = torch._decomp.decomposition_table.get(func)
    if made_of is not None:
        return made_of(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    narrow = next((tensor.dtype for tensor in tensors if tensor.dtype in _WIDER), None)
    refusal = f"{func._schema.name} has no kernel on the host: {one_line(error)}"
    if narrow is None or func._schema.is_mutable:
        raise NotFollowed(refusal) from None
    wide = _WIDER[narrow]
    widened = tree_map_only(torch.Tensor, lambda t: t.to(wide) if t.dtype == narrow else t, (args, kwargs))
    try:
        out = func(*widened[0], **widened[1])
    except RuntimeError:
        raise NotFollowed(refusal) from None
    return tree_map_only(torch.Tensor, lambda t: t.to(narrow) if t.dtype == wide else t, out)


def _lstm_cell(
    input_gates: Any, hidden_gates: Any, cell: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any, Any]:  # fmt: skip
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    enter, forget, new, leave = gates.chunk(4, -1)
    kept = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * kept.tanh(), kept, gates


def _gru_cell(
    input_gates: Any, hidden_gates: Any, hidden: Any, input_bias: Any = None, hidden_bias: Any = None
) -> tuple[Any, Any]:  # fmt: skip
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    (r, z, n), (hidden_r, hidden_z, hidden_n) = input_gates.chunk(3, -1), hidden_gates.chunk(3, -1)
    reset, update = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
    new = (n + reset * hidden_n).tanh()
    return new + update * (hidden - new), torch.cat([reset, update, new, hidden, hidden_n], -1)


# Operations that PyTorch has for CUDA alone.
_ONLY_CUDA: dict[str, Any] = {
    "aten::_use_cudnn_ctc_loss": lambda *_, **__: False,
    "aten::_use_miopen_ctc_loss": lambda *_, **__: False,
    "aten::_thnn_fused_lstm_cell": _lstm_cell,
    "aten::_thnn_fused_gru_cell": _gru_cell,
}
