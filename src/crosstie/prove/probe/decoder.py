"""A decoder of a real model's shape with random weights, for timing whole steps: real kernels, meaningless tokens."""

import math
from collections.abc import Callable
from typing import Any

from crosstie.prove.probe.device import ProbedDevice

Tensor = Any
# Rows that an 8-bit product has at least; smaller batches are padded, as engines do.
LEAST_ROWS = 16
# Room for activations and what kernels ask for beside weights and cache.
WORKSPACE_BYTES = 4e9


class Small:
    """What runs between the matrix products, each one kernel where PyTorch can compile."""

    def __init__(self, device: ProbedDevice):
        torch, functional = device.torch, device.functional
        top = torch.finfo(device.fp8).max if device.fp8 is not None else 1.0

        def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            residual = residual + x
            scaled = residual.float()
            scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-5)
            return (scaled * weight).to(x.dtype), residual

        def gated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return functional.silu(a) * b

        def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            a, b = x.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

        def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
            wide = x.float()
            scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-6) / top
            return (wide / scale).clamp(-top, top).to(device.fp8), scale

        # Compilers size their blocks by what they see first.
        tokens, hidden, dim = 128, 4096, 128
        x, residual, angle = (
            device.normal(tokens, hidden),
            device.normal(tokens, hidden),
            device.ones(tokens, 1, dim // 2),
        )
        self.add_norm = device.fused(add_norm, x, residual, device.ones(hidden))
        self.gated = device.fused(gated, x)
        self.rotate = device.fused(rotate, x.view(tokens, hidden // dim, dim), angle, angle)
        self.quantise: Callable[[Tensor], tuple[Tensor, Tensor]] = quantise
        if device.fp8 is not None:
            self.quantise = device.fused(quantise, x)


def scaled_product(device: ProbedDevice, x: Tensor, w: Tensor, rows: Tensor, channels: Tensor) -> Tensor:
    """An 8-bit product with a scale a row and a channel."""
    return device.torch._scaled_mm(x, w.T, scale_a=rows, scale_b=channels, out_dtype=device.torch.bfloat16)


class Decoder:
    """`shape`: layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, experts, experts_per_token."""

    def __init__(self, device: ProbedDevice, small: Small, shape: dict[str, int], format: str):
        self.device, self.small, self.shape, self.format = device, small, shape, format
        self.heads, self.kv_heads, self.head_dim = shape["heads"], shape["kv_heads"], shape["head_dim"]
        self.experts, self.active = shape["experts"], shape["experts_per_token"]
        if format == "fp8" and (device.fp8 is None or self.experts):
            raise RuntimeError("8-bit experts are not timed" if self.experts else "PyTorch has no 8-bit type")
        device.need(self.weight_bytes() + WORKSPACE_BYTES, "weights")
        self.layers = [self._layer() for _ in range(shape["layers"])]
        self.head = device.normal(shape["vocabulary"], shape["hidden"], scale=0.02)
        self.expert_ids = device.torch.arange(self.experts, device=device.name)

    def weight_bytes(self) -> float:
        s = self.shape
        attention = s["hidden"] * s["head_dim"] * (2 * s["heads"] + 2 * s["kv_heads"])
        mixture = 3 * s["hidden"] * s["inner"] * max(1, s["experts"])
        linear = s["layers"] * (attention + mixture)
        return linear * (1 if self.format == "fp8" else 2) + 2 * s["vocabulary"] * s["hidden"]

    def cache_bytes(self, batch: int, context: int) -> float:
        return float(batch * context * self.kv_heads * self.head_dim * 4 * self.shape["layers"])

    def _layer(self) -> dict[str, Any]:
        device, hidden, inner = self.device, self.shape["hidden"], self.shape["inner"]
        width, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        made = {
            "qkv": self._weight(width + 2 * narrow, hidden), "o": self._weight(hidden, width),
            "n1": device.ones(hidden), "n2": device.ones(hidden),
        }  # fmt: skip
        if self.experts:
            made["router"] = device.normal(self.experts, hidden, scale=0.02)
            made["up"] = device.normal(self.experts, hidden, 2 * inner, scale=0.02)
            made["down"] = device.normal(self.experts, inner, hidden, scale=0.02)
        else:
            made["up"], made["down"] = self._weight(2 * inner, hidden), self._weight(hidden, inner)
        return made

    def _weight(self, n: int, k: int) -> Any:
        if self.format == "bf16":
            return self.device.normal(n, k, scale=0.02)
        return self.device.normal(n, k).to(self.device.fp8), self.device.ones(1, n) * 0.02

    def linear(self, x: Tensor, w: Any) -> Tensor:
        if self.format == "bf16":
            return x @ w.T
        rows = x.shape[0]
        if rows < LEAST_ROWS:
            x = self.device.functional.pad(x, (0, 0, 0, LEAST_ROWS - rows))
        narrow, scales = self.small.quantise(x)
        return scaled_product(self.device, narrow, w[0], scales, w[1])[:rows]

    def mixture(self, x: Tensor, w: dict[str, Any]) -> Tensor:
        """Sort tokens by expert, two grouped products, back in order and summed."""
        torch = self.device.torch
        grouped_mm = getattr(self.device.functional, "grouped_mm", None) or torch._grouped_mm
        weights, chosen = torch.topk((x @ w["router"].T).float().softmax(-1), self.active)
        grouped, order = chosen.flatten().sort()
        # bincount would ask the host; a search in the sorted list does not.
        ends = torch.searchsorted(grouped, self.expert_ids, right=True).to(torch.int32)
        rows = grouped_mm(x[order // self.active], w["up"], offs=ends)
        rows = grouped_mm(self.small.gated(rows), w["down"], offs=ends)
        back = torch.empty_like(rows)
        back[order] = rows
        return (back.view(x.shape[0], self.active, -1) * weights[..., None].to(x.dtype)).sum(1)

    def feed_forward(self, x: Tensor, w: dict[str, Any]) -> Tensor:
        if self.experts:
            return self.mixture(x, w)
        return self.linear(self.small.gated(self.linear(x, w["up"])), w["down"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        attention = self.device.functional.scaled_dot_product_attention
        if cache is None:
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            return attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        keys, values = cache
        keys[:, :, -1], values[:, :, -1] = k, v
        return attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]

    def step(self, x: Tensor, angle: Tensor, caches: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        residual, tokens = self.device.torch.zeros_like(x), x.shape[0]
        width, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for i, w in enumerate(self.layers):
            h, residual = self.small.add_norm(x, residual, w["n1"])
            q, k, v = self.linear(h, w["qkv"]).split((width, narrow, narrow), -1)
            q = self.small.rotate(q.view(tokens, self.heads, self.head_dim), angle, angle)
            k = self.small.rotate(k.view(tokens, self.kv_heads, self.head_dim), angle, angle)
            v = v.view(tokens, self.kv_heads, self.head_dim)
            a = self.attend(q, k, v, caches[i] if caches else None)
            h, residual = self.small.add_norm(self.linear(a.reshape(tokens, width), w["o"]), residual, w["n2"])
            x = self.feed_forward(h, w)
        last = x if caches else x[-1:]
        return (last + residual[-last.shape[0] :]) @ self.head.T

    def prefill(self, tokens: int) -> Callable[[], Tensor]:
        """A prompt of `tokens`, of which only the last goes through the head."""
        x, angle = self._inputs(tokens)
        return lambda: self.step(x, angle, None)

    def decode(self, batch: int, context: int) -> Callable[[], Tensor]:
        """One token for each of `batch` sequences that have `context` in the cache."""
        self.device.need(self.cache_bytes(batch, context) + WORKSPACE_BYTES, "caches")
        size = (batch, self.kv_heads, context, self.head_dim)
        caches = [(self.device.normal(*size), self.device.normal(*size)) for _ in self.layers]
        x, angle = self._inputs(batch)
        return lambda: self.step(x, angle, caches)

    def _inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        torch, half = self.device.torch, self.head_dim // 2
        angle = torch.rand(tokens, 1, half, device=self.device.name) * math.tau
        return self.device.normal(tokens, self.shape["hidden"]), angle
