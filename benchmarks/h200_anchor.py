"""Times the kernels of an LLM step on the CUDA GPU at hand and writes them as CSV.

The rows are the measured anchor of the efficiencies that Crosstie ships: copy bandwidth, GEMM by
shape and format, attention, and whole decode and prefill steps of real model shapes with random
weights. Needs PyTorch with CUDA; run as `python benchmarks/h200_anchor.py OUT.csv`.
"""

import csv
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"
ROWS: list[dict] = []


def note(**row):
    ROWS.append(row)
    print(row, flush=True)


def median_ms(run, budget_s=0.12, least=5):
    """Median of CUDA-event times; a graph where capture works, so that launch gaps stay out."""
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
    times, start = [], time.time()
    while len(times) < least or (time.time() - start < budget_s and len(times) < 50):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        call()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times) // 2]


def copy_bandwidth():
    for mib in (64, 256, 1024, 4096):
        a = torch.empty(mib << 20, dtype=torch.uint8, device=DEVICE).random_(0, 255)
        b = torch.empty_like(a)
        ms = median_ms(lambda: b.copy_(a))
        note(kind="copy", fmt="u8", m=mib, ms=ms, tb_s=2 * a.numel() / ms / 1e9)


def gemm(m, n, k, fmt):
    weight_bytes = n * k * (2 if fmt == "bf16" else 1)
    copies = max(1, min(24, int(400e6 // weight_bytes) + 1))
    if fmt == "bf16":
        x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
        ws = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]

        def run():
            for w in ws:
                x @ w.T
    else:
        f8 = torch.float8_e4m3fn
        x = torch.randn(m, k, device=DEVICE).to(f8)
        ws = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16).to(f8) for _ in range(copies)]
        sa = torch.ones(m, 1, device=DEVICE)
        sb = torch.ones(1, n, device=DEVICE)

        def run():
            for w in ws:
                torch._scaled_mm(x, w.T, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16)

    ms = median_ms(run, budget_s=0.04) / copies
    note(kind="gemm", fmt=fmt, m=m, n=n, k=k, ms=ms, tflop_s=2 * m * n * k / ms / 1e9)


def gemms():
    shapes = [
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096),
        (10240, 8192), (57344, 8192), (8192, 28672), (28672, 8192),
        (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (1536, 2048), (2048, 768),
    ]  # fmt: skip
    for n, k in shapes:
        for m in (1, 4, 16, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384):
            if m * n > 16384 * 57344 // 2:
                continue
            for fmt in ("bf16", "fp8"):
                if fmt == "fp8" and m == 1:
                    continue
                try:
                    gemm(m, n, k, fmt)
                except RuntimeError as error:
                    note(kind="gemm-failed", fmt=fmt, m=m, n=n, k=k, error=str(error)[:120])


def attentions():
    for heads, kv, dim in ((32, 8, 128), (64, 8, 128), (8, 1, 128), (64, 64, 128), (64, 8, 64)):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            q = torch.randn(1, heads, length, dim, device=DEVICE, dtype=torch.bfloat16)
            k = torch.randn(1, kv, length, dim, device=DEVICE, dtype=torch.bfloat16)
            v = torch.randn_like(k)
            for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                try:
                    with sdpa_kernel(backend):
                        ms = median_ms(
                            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 0.05
                        )
                    flop = 4 * length * length / 2 * heads * dim
                    note(kind="attn-prefill", fmt=name, m=length, n=heads, k=dim, kv=kv, ms=ms, tflop_s=flop / ms / 1e9)
                except RuntimeError as error:
                    note(kind="attn-failed", fmt=name, m=length, n=heads, error=str(error)[:120])
        for batch in (1, 8, 32, 128):
            for length in (512, 2048, 4096, 16384):
                if batch * length * kv * dim * 4 > 30e9:
                    continue
                copies = max(1, int(200e6 // (batch * length * kv * dim * 4)))
                copies = min(copies, 16)
                q = torch.randn(batch, heads, 1, dim, device=DEVICE, dtype=torch.bfloat16)
                ks = [torch.randn(batch, kv, length, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
                vs = [torch.randn_like(k) for k in ks]

                def run():
                    for k, v in zip(ks, vs):
                        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

                for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
                    try:
                        with sdpa_kernel(backend):
                            ms = median_ms(run, 0.04) / copies
                        read = batch * length * kv * dim * 4
                        note(
                            kind="attn-decode",
                            fmt=name,
                            m=batch,
                            n=heads,
                            k=dim,
                            kv=kv,
                            ctx=length,
                            ms=ms,
                            tb_s=read / ms / 1e9,
                        )
                    except RuntimeError as error:
                        note(kind="attn-failed", fmt=name, m=batch, n=heads, error=str(error)[:120])
                del ks, vs


@torch.compile(dynamic=True)
def add_norm(x, residual, weight):
    residual = residual + x
    scaled = residual.float()
    scaled = scaled * torch.rsqrt(scaled.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (scaled * weight).to(x.dtype), residual


@torch.compile(dynamic=True)
def gate(x):
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


@torch.compile(dynamic=True)
def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Decoder:
    """A Llama-shaped decoder with random weights: real kernels, meaningless tokens."""

    def __init__(self, layers, hidden, inner, heads, kv, dim, vocab, fmt):
        self.shape = (layers, hidden, inner, heads, kv, dim, vocab)
        self.fmt = fmt
        make = self._weight
        self.layers = [
            dict(
                qkv=make((heads + 2 * kv) * dim, hidden), o=make(hidden, heads * dim),
                up=make(2 * inner, hidden), down=make(hidden, inner),
                n1=torch.ones(hidden, device=DEVICE), n2=torch.ones(hidden, device=DEVICE),
            )
            for _ in range(layers)
        ]  # fmt: skip
        self.head = torch.randn(vocab, hidden, device=DEVICE, dtype=torch.bfloat16) * 0.02

    def _weight(self, n, k):
        w = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) * 0.02
        return w if self.fmt == "bf16" else w.to(torch.float8_e4m3fn)

    def linear(self, x, w):
        if self.fmt == "bf16":
            return x @ w.T
        x8 = x.to(torch.float8_e4m3fn)
        if x.shape[0] < 16:
            x8 = F.pad(x8.view(torch.uint8), (0, 0, 0, 16 - x.shape[0])).view(torch.float8_e4m3fn)
        sa = torch.ones(x8.shape[0], 1, device=DEVICE)
        sb = torch.ones(1, w.shape[0], device=DEVICE)
        return torch._scaled_mm(x8, w.T, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16)[: x.shape[0]]

    def step(self, x, cos, sin, caches):
        layers, hidden, inner, heads, kv, dim, vocab = self.shape
        residual = torch.zeros_like(x)
        tokens = x.shape[0]
        for i, w in enumerate(self.layers):
            h, residual = add_norm(x, residual, w["n1"])
            q, k, v = self.linear(h, w["qkv"]).split((heads * dim, kv * dim, kv * dim), -1)
            q = rotate(q.view(tokens, heads, dim), cos, sin)
            k = rotate(k.view(tokens, kv, dim), cos, sin)
            v = v.view(tokens, kv, dim)
            if caches is None:
                a = F.scaled_dot_product_attention(
                    q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                    is_causal=True, enable_gqa=True,
                )[0].transpose(0, 1)  # fmt: skip
            else:
                kc, vc = caches[i]
                kc[:, :, -1] = k
                vc[:, :, -1] = v
                a = F.scaled_dot_product_attention(q[:, :, None], kc, vc, enable_gqa=True)[:, :, 0]
            x = self.linear(a.reshape(tokens, heads * dim), w["o"])
            h, residual = add_norm(x, residual, w["n2"])
            x = self.linear(gate(self.linear(h, w["up"])), w["down"])
        last = x if caches is not None else x[-1:]
        return (last + residual[-last.shape[0] :]) @ self.head.T


def whole_models():
    shapes = {
        "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256),
        "qwen3-32b": (64, 5120, 25600, 64, 8, 128, 151936),
        "llama-3.1-70b": (80, 8192, 28672, 64, 8, 128, 128256),
    }
    for name, shape in shapes.items():
        for fmt in ("bf16", "fp8"):
            if name == "llama-3.1-70b" and fmt == "bf16":
                continue
            model = Decoder(*shape, fmt)
            layers, hidden, inner, heads, kv, dim, vocab = shape
            for backend_name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
                for tokens in (128, 512, 2048, 8192, 16384):
                    x = torch.randn(tokens, hidden, device=DEVICE, dtype=torch.bfloat16)
                    angle = torch.randn(tokens, 1, dim // 2, device=DEVICE)
                    try:
                        with sdpa_kernel(backend):
                            ms = median_ms(lambda: model.step(x, angle, angle, None), 0.3, 3)
                        note(kind="prefill", fmt=fmt, model=name, m=tokens, ms=ms, backend=backend_name)
                    except RuntimeError as error:
                        note(kind="prefill-failed", fmt=fmt, model=name, m=tokens, error=str(error)[:160])
                for batch, ctx in (
                    (1, 512),
                    (1, 4096),
                    (8, 4096),
                    (16, 1024),
                    (32, 4096),
                    (64, 2048),
                    (128, 1024),
                    (128, 4096),
                    (256, 512),
                ):
                    free = torch.cuda.mem_get_info()[0]
                    size = batch * ctx * kv * dim * 4 * layers
                    if size > free - 6e9:
                        continue
                    caches = [
                        tuple(torch.randn(batch, kv, ctx, dim, device=DEVICE, dtype=torch.bfloat16) for _ in "kv")
                        for _ in range(layers)
                    ]
                    x = torch.randn(batch, hidden, device=DEVICE, dtype=torch.bfloat16)
                    angle = torch.randn(batch, 1, dim // 2, device=DEVICE)
                    try:
                        with sdpa_kernel(backend):
                            ms = median_ms(lambda: model.step(x, angle, angle, caches), 0.2, 5)
                        note(kind="decode", fmt=fmt, model=name, m=batch, ctx=ctx, ms=ms, backend=backend_name)
                    except RuntimeError as error:
                        note(kind="decode-failed", fmt=fmt, model=name, m=batch, ctx=ctx, error=str(error)[:160])
                    del caches
                    torch.cuda.empty_cache()
            del model
            torch.cuda.empty_cache()


def main(path):
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda)
    print(torch.cuda.mem_get_info(), torch.cuda.get_device_properties(0))
    for part in (copy_bandwidth, attentions, whole_models, gemms):
        start = time.time()
        with torch.no_grad():
            part()
        print(part.__name__, round(time.time() - start), "s", flush=True)
        keys = sorted({key for row in ROWS for key in row})
        with open(path, "w", newline="") as out:
            writer = csv.DictWriter(out, keys)
            writer.writeheader()
            writer.writerows(ROWS)


if __name__ == "__main__":
    main(sys.argv[1])
