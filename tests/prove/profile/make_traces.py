"""Takes the traces of the fixtures on a machine with a GPU: `python make_traces.py OUT`. It needs torch alone.

`dense`: decode steps of Llama-3.1-8B's shapes, 32 sequences with 2,048 tokens each, launched one by one and as a graph.
`sparse`: eight layers with an index over 32,768 tokens of which 2,048 are attended to, and routed experts, in plain
PyTorch: what a step looks like when sparse attention is brought up without kernels of its own. `index`: its attention
alone, as a graph.
"""

import gzip
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

DEVICE, TYPE = "cuda", torch.bfloat16


def weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=TYPE) / shape[-1] ** 0.5


class Dense:
    batch, context, hidden, heads, kv_heads, width, inner, layers, vocabulary = (
        32,
        2048,
        4096,
        32,
        8,
        128,
        14336,
        32,
        128256,
    )

    def __init__(self) -> None:
        cache = (self.batch, self.kv_heads, self.context, self.width)
        self.parts = [
            {
                "qkv": weight((self.heads + 2 * self.kv_heads) * self.width, self.hidden),
                "o": weight(self.hidden, self.heads * self.width),
                "up": weight(2 * self.inner, self.hidden),
                "down": weight(self.hidden, self.inner),
                "norm": torch.ones(self.hidden, device=DEVICE, dtype=TYPE),
                "k": torch.randn(*cache, device=DEVICE, dtype=TYPE),
                "v": torch.randn(*cache, device=DEVICE, dtype=TYPE),
            }
            for _ in range(self.layers)
        ]
        self.embed, self.head = weight(self.vocabulary, self.hidden), weight(self.vocabulary, self.hidden)
        self.tokens = torch.zeros(self.batch, dtype=torch.long, device=DEVICE)

    def __call__(self) -> None:
        x = functional.embedding(self.tokens, self.embed)
        for part in self.parts:
            y = functional.rms_norm(x, (self.hidden,), part["norm"])
            q, k, v = (y @ part["qkv"].t()).split([self.heads * self.width, *[self.kv_heads * self.width] * 2], -1)
            part["k"][:, :, -1] = k.view(self.batch, self.kv_heads, self.width)
            part["v"][:, :, -1] = v.view(self.batch, self.kv_heads, self.width)
            queries = q.view(self.batch, self.heads, 1, self.width)
            seen = functional.scaled_dot_product_attention(queries, part["k"], part["v"], enable_gqa=True)
            x = x + seen.reshape(self.batch, -1) @ part["o"].t()
            gate, up = (functional.rms_norm(x, (self.hidden,), part["norm"]) @ part["up"].t()).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ part["down"].t()
        self.tokens.copy_((x @ self.head.t()).argmax(-1))


class Sparse:
    batch, context, kept, hidden, heads, width, latent, layers = 16, 32768, 2048, 2048, 16, 128, 512, 8
    index_heads, index_width, experts, chosen, inner = 16, 128, 64, 8, 1024
    routes = True

    def __init__(self) -> None:
        self.parts = [
            {
                "index_q": weight(self.index_heads * self.index_width, self.hidden),
                "index_k": torch.randn(self.batch, self.context, self.index_width, device=DEVICE, dtype=TYPE),
                "q": weight(self.heads * self.latent, self.hidden),
                "kv": torch.randn(self.batch, self.context, self.latent, device=DEVICE, dtype=TYPE),
                "o": weight(self.hidden, self.heads * self.latent),
                "router": weight(self.experts, self.hidden),
                "up": weight(self.experts, self.inner, self.hidden),
                "down": weight(self.experts, self.hidden, self.inner),
            }
            for _ in range(self.layers)
        ]
        self.x = torch.randn(self.batch, self.hidden, device=DEVICE, dtype=TYPE)

    def __call__(self) -> None:
        x = self.x
        for part in self.parts:
            q = (x @ part["index_q"].t()).view(self.batch, self.index_heads, self.index_width)
            scores = torch.einsum("bhd,btd->bht", q, part["index_k"]).relu().float().sum(1)
            rows = scores.topk(self.kept, -1).indices.sort(-1).values
            chosen = part["kv"].gather(1, rows[..., None].expand(-1, -1, self.latent))
            queries = (x @ part["q"].t()).view(self.batch, self.heads, self.latent)
            weights = (queries @ chosen.transpose(1, 2)).float().softmax(-1).to(TYPE)
            x = x + (weights @ chosen).reshape(self.batch, -1) @ part["o"].t()
            if self.routes:
                x = x + self.routed(x, part)

    def routed(self, x: torch.Tensor, part: dict[str, torch.Tensor]) -> torch.Tensor:
        scores = (x @ part["router"].t()).float().sigmoid()
        top, experts = scores.topk(self.chosen, -1)
        order = experts.flatten().sort(stable=True).indices
        counts = torch.bincount(experts.flatten(), minlength=self.experts).tolist()
        tokens = x[order // self.chosen]
        found, at = torch.empty_like(tokens), 0
        for expert, count in enumerate(counts):
            if count:
                y = functional.silu(tokens[at : at + count] @ part["up"][expert].t())
                found[at : at + count] = y @ part["down"][expert].t()
                at += count
        found = found * (top / top.sum(-1, keepdim=True)).flatten()[order][:, None].to(TYPE)
        return torch.zeros_like(x).index_add_(0, order // self.chosen, found)


def timed(step: Any, times: int = 20) -> float:
    """Without the profiler."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times


def trace(step: Any, file: Path, steps: int) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    schedule = torch.profiler.schedule(wait=1, warmup=2, active=steps, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for _ in range(steps + 3):
            step()
            torch.cuda.synchronize()
            profiler.step()
    plain = file.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as read, gzip.open(file, "wb") as written:
        shutil.copyfileobj(read, written)
    plain.unlink()


def main(out: Path) -> None:
    said: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    dense = Dense()
    for _ in range(3):
        dense()
    said["dense_s"] = timed(dense)
    trace(dense, out / "dense.json.gz", 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dense()
    said["graph_s"] = timed(graph.replay)
    trace(graph.replay, out / "graph.json.gz", 2)
    del graph, dense
    torch.cuda.empty_cache()
    sparse = Sparse()
    for _ in range(3):
        sparse()
    said["sparse_s"] = timed(sparse)
    trace(sparse, out / "sparse.json.gz", 1)
    sparse.routes = False
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse()
    said["index_s"] = timed(graph.replay)
    trace(graph.replay, out / "index.json.gz", 1)
    (out / "times.json").write_text(json.dumps(said, indent=2) + "\n")
    print(json.dumps(said, indent=2))


if __name__ == "__main__":
    with torch.inference_mode():
        main(Path(sys.argv[1]))
