"""A step of decoding that reads a number back to the host, which a graph cannot; and one that does not."""

from typing import Any

import torch


def inputs(device: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return (
        torch.randn(4, 64, generator=numbers).to(device),
        torch.randint(1, 64, (4,), generator=numbers).to(device),
    )


def decode(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    longest = int(lengths.max().item())
    return hidden[:, :longest].sum(dim=1)


def decode_masked(hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    kept = torch.arange(hidden.shape[1], device=hidden.device) < lengths.max()
    return (hidden * kept).sum(dim=1)
