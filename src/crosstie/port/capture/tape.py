"""A graph as a GPU would keep it: the operations of one call, at fixed addresses, with the host's values baked in."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from crosstie.port.capture.sites import Site

Runner = Callable[[Any, Any, Any], Any]
# Memory that nobody has written: a replay leaves what is there.
UNWRITTEN = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::empty_permuted",
}  # fmt: skip


RESIZING = {"aten::resize_", "aten::resize_as_", "aten::set_"}


class Baked:
    """A host scalar among the arguments: read when the kernel is launched, so only its value gets into the graph."""

    def __init__(self, tensor: torch.Tensor):
        self.value = tensor.detach().clone()


class Entry:
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


def address(tensor: torch.Tensor) -> int:
    """The same for all views of one memory."""
    if tensor.layout is torch.strided:
        return int(tensor.untyped_storage()._cdata)
    return address(tensor._values() if tensor.layout is torch.sparse_coo else tensor.values())
