"""What a device operation computes, computed on the host."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from crosstie.port.capture.sites import one_line
from crosstie.port.capture.tape import UNWRITTEN

# Types for which CUDA has kernels that the CPU lacks.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float8_e4m3fn: torch.float32,
          torch.float8_e5m2: torch.float32, torch.int32: torch.float64, torch.int64: torch.float64}  # fmt: skip


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
