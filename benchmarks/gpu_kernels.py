"""Times the kernels of an LLM step on the CUDA or ROCm GPU at hand and writes them as CSV.

    python benchmarks/gpu_kernels.py OUT.csv [part ...]

Parts: copy, gemm, attention, dense (whole decode and prefill steps of dense models) and moe. Weights
are random, kernels are real, times are medians of device events, steps run inside a graph so that
launch gaps stay out. The rows measured on an H200 are data of this project (docs/measurements.md);
the efficiencies of the `hopper` family were fitted on them. Needs PyTorch and nothing else.
"""

import csv
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"
FP8 = torch.float8_e4m3fn
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
ROWS: list[dict[str, Any]] = []


def note(**row: Any) -> None:
    ROWS.append(row)
    print(row, flush=True)


def median_ms(run: Callable[[], Any], budget_s: float = 0.1, least: int = 5) -> float:
    """Median of device-event times; in a graph where capture works."""
    run()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
        call = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        call = run
    call()
    torch.cuda.synchronize()
    times: list[float] = []
    start = time.time()
    while len(times) < least or (time.time() - start < budget_s and len(times) < 50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16) * scale


def attempt(measure: Callable[[], dict[str, Any]], **what: Any) -> None:
    """A shape that a kernel refuses is a row too, with the reason."""
    try:
        note(**what, **measure())
    except RuntimeError as error:
        note(**{**what, "kind": f"{what['kind']}-failed"}, error=str(error)[:120])


def copy() -> None:
    """A kernel's copy, not the copy engine's: that is what an operator reaches."""
    for mib in (256, 1024, 4096):
        source = torch.rand(mib << 18, device=DEVICE)
        target = torch.empty_like(source)
        ms = median_ms(lambda: torch.mul(source, 1.5, out=target))
        note(kind="copy", fmt="fp32", m=mib, ms=ms, tb_s=2 * 4 * source.numel() / ms / 1e9)


def gemm() -> None:
    shapes = [
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (10240, 8192), (57344, 8192),
        (8192, 28672), (28672, 8192), (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (1536, 2048), (2048, 768),
    ]  # fmt: skip
    for n, k in shapes:
        for m in (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384):
            for fmt in ("bf16", "fp8"):
                if m * n <= 16384 * 57344 // 2 and (fmt == "bf16" or m > 1):
                    attempt(lambda: one_gemm(m, n, k, fmt), kind="gemm", fmt=fmt, m=m, n=n, k=k)


def one_gemm(m: int, n: int, k: int, fmt: str) -> dict[str, Any]:
    """Several weights in turn, so that the cache holds none of them."""
    copies = max(1, min(24, int(400e6 // (n * k * (2 if fmt == "bf16" else 1))) + 1))
    x, weights = normal(m, k), [normal(n, k) for _ in range(copies)]
    if fmt == "fp8":
        x, weights = x.to(FP8), [w.to(FP8) for w in weights]

    def run() -> None:
        for w in weights:
            x @ w.T if fmt == "bf16" else scaled_product(x, w)

    ms = median_ms(run, 0.04) / copies
    return {"ms": ms, "tflop_s": 2 * m * n * k / ms / 1e9}


def scaled_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Per-row and per-channel scales, as engines use them."""
    rows = torch.ones(x.shape[0], 1, device=DEVICE)
    channels = torch.ones(1, w.shape[0], device=DEVICE)
    return torch._scaled_mm(x, w.T, scale_a=rows, scale_b=channels, out_dtype=torch.bfloat16)


def attention() -> None:
    for heads, kv, dim in ((32, 8, 128), (64, 8, 128), (8, 1, 128), (64, 64, 128), (64, 8, 64)):
        what = {"n": heads, "k": dim, "kv": kv}
        for backend in BACKENDS:
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                attempt(
                    lambda: prefill_attention(backend, length, **what),
                    kind="attn-prefill",
                    fmt=backend,
                    m=length,
                    **what,
                )
            for batch in (1, 8, 32, 128):
                for context in (512, 2048, 4096, 16384):
                    if batch * context * kv * dim * 4 < 30e9:
                        attempt(
                            lambda: decode_attention(backend, batch, context, **what),
                            kind="attn-decode",
                            fmt=backend,
                            m=batch,
                            ctx=context,
                            **what,
                        )


def prefill_attention(backend: str, length: int, n: int, k: int, kv: int) -> dict[str, Any]:
    q, key, value = normal(1, n, length, k), normal(1, kv, length, k), normal(1, kv, length, k)
    with sdpa_kernel(BACKENDS[backend]):
        ms = median_ms(
            lambda: functional.scaled_dot_product_attention(q, key, value, is_causal=True, enable_gqa=True), 0.05
        )
    return {"ms": ms, "tflop_s": 2 * length * length * n * k / ms / 1e9}


def decode_attention(backend: str, batch: int, context: int, n: int, k: int, kv: int) -> dict[str, Any]:
    read = batch * context * kv * k * 4
    copies = max(1, min(16, int(200e6 // read)))
    q = normal(batch, n, 1, k)
    caches = [(normal(batch, kv, context, k), normal(batch, kv, context, k)) for _ in range(copies)]

    def run() -> None:
        for key, value in caches:
            functional.scaled_dot_product_attention(q, key, value, enable_gqa=True)

    with sdpa_kernel(BACKENDS[backend]):
        ms = median_ms(run, 0.04) / copies
    return {"ms": ms, "tb_s": read / ms / 1e9}


@torch.compile(dynamic=True)
def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    residual = residual + x
    scaled = residual.float()
    scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (scaled * weight).to(x.dtype), residual


@torch.compile(dynamic=True)
def gated(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return functional.silu(a) * b


@torch.compile(dynamic=True)
def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Decoder:
    """A decoder of a real model's shape with random weights: real kernels, meaningless tokens."""

    def __init__(self, layers: int, hidden: int, inner: int, heads: int, kv: int, dim: int, vocab: int, fmt: str,
                 experts: int = 0, active: int = 0):  # fmt: skip
        self.count, self.hidden, self.heads, self.kv, self.dim = layers, hidden, heads, kv, dim
        self.fmt, self.experts, self.active = fmt, experts, active
        self.layers = [self._layer(hidden, inner) for _ in range(layers)]
        self.head = normal(vocab, hidden, scale=0.02)
        self.expert_ids = torch.arange(experts, device=DEVICE)

    def _layer(self, hidden: int, inner: int) -> dict[str, torch.Tensor]:
        width = self.heads * self.dim
        made = {
            "qkv": self._weight(width + 2 * self.kv * self.dim, hidden), "o": self._weight(hidden, width),
            "n1": torch.ones(hidden, device=DEVICE), "n2": torch.ones(hidden, device=DEVICE),
        }  # fmt: skip
        if self.experts:
            made["router"] = normal(self.experts, hidden, scale=0.02)
            made["up"] = normal(self.experts, hidden, 2 * inner, scale=0.02)
            made["down"] = normal(self.experts, inner, hidden, scale=0.02)
        else:
            made["up"], made["down"] = self._weight(2 * inner, hidden), self._weight(hidden, inner)
        return made

    def _weight(self, n: int, k: int) -> torch.Tensor:
        w = normal(n, k, scale=0.02)
        return w if self.fmt == "bf16" else w.to(FP8)

    def linear(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if self.fmt == "bf16":
            return x @ w.T
        x8 = x.to(FP8)
        if x.shape[0] < 16:
            x8 = functional.pad(x8.view(torch.uint8), (0, 0, 0, 16 - x.shape[0])).view(FP8)
        return scaled_product(x8, w)[: x.shape[0]]

    def mixture(self, x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sort tokens by expert, two grouped products, back in order and summed."""
        weights, chosen = torch.topk((x @ w["router"].T).float().softmax(-1), self.active)
        flat = chosen.flatten()
        grouped, order = flat.sort()
        # bincount would ask the host; a search in the sorted list does not.
        ends = torch.searchsorted(grouped, self.expert_ids, right=True).to(torch.int32)
        rows = x[order // self.active]
        rows = torch._grouped_mm(rows, w["up"], offs=ends)
        rows = torch._grouped_mm(gated(rows), w["down"], offs=ends)
        back = torch.empty_like(rows)
        back[order] = rows
        return (back.view(x.shape[0], self.active, -1) * weights[..., None].to(x.dtype)).sum(1)

    def step(
        self, x: torch.Tensor, angle: torch.Tensor, caches: list[tuple[torch.Tensor, torch.Tensor]] | None
    ) -> torch.Tensor:
        residual, tokens = torch.zeros_like(x), x.shape[0]
        width, narrow = self.heads * self.dim, self.kv * self.dim
        for i, w in enumerate(self.layers):
            h, residual = add_norm(x, residual, w["n1"])
            q, k, v = self.linear(h, w["qkv"]).split((width, narrow, narrow), -1)
            q = rotate(q.view(tokens, self.heads, self.dim), angle, angle)
            k = rotate(k.view(tokens, self.kv, self.dim), angle, angle)
            v = v.view(tokens, self.kv, self.dim)
            if caches is None:
                q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
                a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            else:
                keys, values = caches[i]
                keys[:, :, -1], values[:, :, -1] = k, v
                a = functional.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
            x = self.linear(a.reshape(tokens, width), w["o"])
            h, residual = add_norm(x, residual, w["n2"])
            x = self.mixture(h, w) if self.experts else self.linear(gated(self.linear(h, w["up"])), w["down"])
        last = x if caches is not None else x[-1:]
        return (last + residual[-last.shape[0] :]) @ self.head.T

    def prefill(self, backend: str, tokens: int) -> dict[str, Any]:
        x, angle = normal(tokens, self.hidden), torch.randn(tokens, 1, self.dim // 2, device=DEVICE)
        with sdpa_kernel(BACKENDS[backend]):
            return {"ms": median_ms(lambda: self.step(x, angle, None), 0.3, 3), "backend": backend}

    def decode(self, backend: str, batch: int, context: int) -> dict[str, Any]:
        size = (batch, self.kv, context, self.dim)
        caches = [(normal(*size), normal(*size)) for _ in range(self.count)]
        x, angle = normal(batch, self.hidden), torch.randn(batch, 1, self.dim // 2, device=DEVICE)
        with sdpa_kernel(BACKENDS[backend]):
            return {"ms": median_ms(lambda: self.step(x, angle, caches), 0.2), "backend": backend}

    def cache_bytes(self, batch: int, context: int) -> int:
        return batch * context * self.kv * self.dim * 4 * self.count


POINTS = ((1, 512), (1, 4096), (8, 4096), (16, 1024), (32, 4096), (64, 2048), (128, 1024), (128, 4096), (256, 512))
DENSE = {
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256),
    "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936),
    "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128, 128256),
}


def dense() -> None:
    for name, shape in DENSE.items():
        for fmt in ("bf16", "fp8"):
            if (name, fmt) != ("llama-3.1-70b", "bf16"):
                whole_model(name, Decoder(*shape, fmt), fmt, ("cudnn", "flash"))


def moe() -> None:
    """A mixture of experts, and a dense model on which nothing was fitted."""
    whole_model(
        "qwen3-8b",
        Decoder(36, 4096, 12288, 32, 8, 128, 151936, "bf16"),
        "bf16",
        ("cudnn",),
        ((2, 16384), (4, 1024), (24, 8192), (96, 3000), (512, 256)),
    )
    whole_model("qwen3-30b-a3b", Decoder(48, 2048, 768, 32, 4, 128, 151936, "bf16", 128, 8), "bf16", ("cudnn",))


def whole_model(
    name: str, model: Decoder, fmt: str, backends: tuple[str, ...], points: tuple[tuple[int, int], ...] = POINTS
) -> None:
    for backend in backends:
        for tokens in (128, 512, 2048, 8192, 16384):
            attempt(lambda: model.prefill(backend, tokens), kind="prefill", fmt=fmt, model=name, m=tokens)
        for batch, context in points:
            torch.cuda.empty_cache()
            if model.cache_bytes(batch, context) < torch.cuda.mem_get_info()[0] - 6e9:
                attempt(
                    lambda: model.decode(backend, batch, context),
                    kind="decode",
                    fmt=fmt,
                    model=name,
                    m=batch,
                    ctx=context,
                )


PARTS = {"copy": copy, "attention": attention, "dense": dense, "moe": moe, "gemm": gemm}


def main(path: str, parts: list[str]) -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda or torch.version.hip)
    for part in parts or list(PARTS):
        start = time.time()
        with torch.no_grad():
            PARTS[part]()
        print(part, round(time.time() - start), "s", flush=True)
        with open(path, "w", newline="") as out:
            writer = csv.DictWriter(out, sorted({key for row in ROWS for key in row}))
            writer.writeheader()
            writer.writerows(ROWS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
