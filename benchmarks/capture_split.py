"""One decode step with block-sparse attention: eager against `crosstie.port.split`, same inputs, same outputs.

    python benchmarks/capture_split.py                 # on a CUDA or ROCm GPU, under two minutes
    python benchmarks/capture_split.py --tiny          # on the CPU: graphs are a stand-in there, times mean nothing

A step of each layer: QKV projection, rotary embedding, write to a paged key-value cache, scores of its pages by their
mean keys, the pages that hold `--mass` of the score (how many is known on the device only: one `.item()` a layer),
attention over these pages, output projection, MLP. Random weights. Each step has new inputs and new positions, and
both ways run each step, taking turns. As a line of reference, the same step with a fixed number of pages, which is
captured as one graph.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from crosstie.port.split import Split, split


@dataclass(frozen=True)
class Shape:
    layers: int = 16
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 14336
    context: int = 32768
    page: int = 64


TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, mlp=96, context=512, page=16)


class Layer(nn.Module):
    def __init__(self, shape: Shape, batch: int, mass: float, fixed_pages: int):
        super().__init__()
        self.shape, self.mass, self.fixed_pages = shape, mass, fixed_pages
        wide = shape.heads * shape.head_dim
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = nn.Linear(shape.hidden, wide + 2 * shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(wide, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=False)
        pages = batch * shape.context // shape.page
        # Keys that differ by page, so that some pages matter much more than others.
        keys = 4 * torch.randn(pages, shape.kv_heads, 1, shape.head_dim)
        self.register_buffer("keys", keys + torch.randn(pages, shape.kv_heads, shape.page, shape.head_dim))
        self.register_buffer("values", torch.randn(pages, shape.kv_heads, shape.page, shape.head_dim))
        self.register_buffer("mean_keys", self.keys.mean(2))

    def forward(
        self, x: torch.Tensor, position: torch.Tensor, pages: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        shape, batch = self.shape, x.shape[0]
        q, k, v = self._project(x, turn)
        now = pages.gather(1, (position // shape.page)[:, None])[:, 0]
        self.keys[now, :, position % shape.page] = k
        self.values[now, :, position % shape.page] = v
        self.mean_keys[now] = self.keys[now].mean(2)
        score = torch.einsum("bhgd,bphd->bhgp", q, self.mean_keys[pages]).amax(2).float() * shape.head_dim**-0.5
        beyond = torch.arange(pages.shape[1], device=x.device) > (position // shape.page)[:, None]
        weight = score.masked_fill(beyond[:, None], -torch.inf).softmax(-1)
        ordered, order = weight.sort(-1, descending=True)
        enough = ((ordered.cumsum(-1) < self.mass).sum(-1) + 1).clamp(max=pages.shape[1])
        # The dynamic part: how many pages the neediest head of the batch wants.
        count = self.fixed_pages or int(enough.max().item())
        chosen = order[..., :count]
        taken = pages[:, None, :].expand(-1, shape.kv_heads, -1).gather(2, chosen)
        head = torch.arange(shape.kv_heads, device=x.device)[None, :, None]
        near = self.keys[taken, head].reshape(batch, shape.kv_heads, count * shape.page, shape.head_dim)
        far = self.values[taken, head].reshape(batch, shape.kv_heads, count * shape.page, shape.head_dim)
        at = chosen[..., None] * shape.page + torch.arange(shape.page, device=x.device)
        wanted = torch.arange(count, device=x.device) < enough[..., None]
        seen = (at <= position[:, None, None, None]) & wanted[..., None]
        logits = (q @ near.transpose(2, 3)).float() * shape.head_dim**-0.5
        hidden = ~seen.reshape(batch, shape.kv_heads, 1, count * shape.page)
        attended = logits.masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype) @ far
        x = x + self.out(attended.reshape(batch, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)

    def _project(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        shape, batch = self.shape, x.shape[0]
        sizes = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.kv_heads * shape.head_dim]
        q, k, v = self.qkv(self.norm(x)).split(sizes, -1)
        q = rotated(q.view(batch, shape.heads, shape.head_dim), turn)
        k = rotated(k.view(batch, shape.kv_heads, shape.head_dim), turn)
        grouped = q.view(batch, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
        return grouped, k, v.view(batch, shape.kv_heads, shape.head_dim)


def rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = turn
    one, other = x.chunk(2, -1)
    return torch.cat([one * cosine - other * sine, other * cosine + one * sine], -1)


class SegmentCode(nn.Module):
    """`fixed_pages`: 0 chooses by score."""

    def __init__(self, shape: Shape, batch: int, mass: float, fixed_pages: int = 0):
        super().__init__()
        self.layers = nn.ModuleList([Layer(shape, batch, mass, fixed_pages) for _ in range(shape.layers)])
        half = shape.head_dim // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = torch.arange(shape.context, dtype=torch.float32)[:, None] * frequency
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())
        pages = torch.randperm(batch * shape.context // shape.page).view(batch, -1)
        self.register_buffer("pages", pages)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        turn = self.cosine[position][:, None].to(x.dtype), self.sine[position][:, None].to(x.dtype)
        for layer in self.layers:
            x = layer(x, position, self.pages, turn)
        return x


class Clock:
    """Milliseconds of a call, on the device where there is one."""

    def __init__(self, device: torch.device):
        self.device = device

    def time(self, function: Callable[[], Any]) -> tuple[float, Any]:
        if self.device.type != "cuda":
            start = time.perf_counter()
            out = function()
            return 1e3 * (time.perf_counter() - start), out
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        out = function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end), out


def inputs(shape: Shape, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch, shape.hidden, device=device)
    return x, torch.randint(shape.context // 2, shape.context, (batch,), device=device)


def in_graphs_ms(made: Split, clock: Clock) -> float:
    """All graphs of a step, one after the other, without what runs between them."""
    ((plan, _),) = made.region.plans.values()
    (graphs,) = plan.graphs.values()
    replays = [captured.graph.replay for captured in graphs.captured if captured is not None]

    def run() -> None:
        for replay in replays:
            replay()

    return statistics.median(clock.time(run)[0] for _ in range(10))


class Items(TorchDispatchMode):
    """Every number that is read from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(out)
        return out


def chosen_pages(module: nn.Module, shape: Shape, batch: int, device: torch.device) -> dict[str, int] | None:
    with Items() as items:
        for _ in range(5):
            module(*inputs(shape, batch, device))
    found = items.found
    return {"least": min(found), "median": int(statistics.median(found)), "most": max(found)} if found else None


@torch.no_grad()
def measure(
    shape: Shape, batch: int, mass: float, fixed_pages: int, steps: int, device: torch.device
) -> dict[str, Any]:
    module = SegmentCode(shape, batch, mass, fixed_pages).eval()
    clock = Clock(device)
    begin = time.perf_counter()
    # Each step writes the same to the cache both times, so the two ways can share it.
    made = split(module, inputs(shape, batch, device), keep_state=False)
    preparation_s = time.perf_counter() - begin
    for _ in range(5):
        module(*(given := inputs(shape, batch, device)))
        made(*given)
    eager: list[float] = []
    piecewise: list[float] = []
    apart = 0.0
    for step in range(steps):
        given = inputs(shape, batch, device)
        ways = [(eager, module), (piecewise, made)]
        outs = []
        for times, way in ways if step % 2 else reversed(ways):
            took, out = clock.time(lambda way=way, given=given: way(*given))
            times.append(took)
            outs.append(out)
        apart = max(apart, float((outs[0] - outs[1]).abs().max()))
    eager_ms, split_ms = statistics.median(eager), statistics.median(piecewise)
    pieces = made.pieces
    return {
        "batch": batch,
        "pages": f"fixed {fixed_pages}" if fixed_pages else f"mass {mass}",
        "eager_ms": round(eager_ms, 4),
        "split_ms": round(split_ms, 4),
        "speed_up": round(eager_ms / split_ms, 3),
        "quartiles_eager_ms": [round(q, 4) for q in statistics.quantiles(eager, n=4)],
        "quartiles_split_ms": [round(q, 4) for q in statistics.quantiles(piecewise, n=4)],
        "graphs": sum(piece.static for piece in pieces),
        "eager_pieces": sum(not piece.static for piece in pieces),
        "time_in_graphs_fraction": round(in_graphs_ms(made, clock) / split_ms, 3),
        "flops_in_graphs_fraction": round(made.flops_in_graphs_fraction or 0.0, 4),
        "largest_difference": apart,
        "preparation_s": round(preparation_s, 2),
        "steps": steps,
        "pages_chosen": chosen_pages(module, shape, batch, device),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"batch {row['batch']:>3}  {row['pages']:<9} eager {row['eager_ms']:>8.3f} ms  split {row['split_ms']:>8.3f} ms"
        f"  x{row['speed_up']:<6} {row['graphs']} graphs with {row['time_in_graphs_fraction']:.0%} of the time and "
        f"{row['flops_in_graphs_fraction']:.0%} of FLOPs; largest difference {row['largest_difference']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU, to see that it runs")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--context", type=int, default=Shape.context)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--mass", type=float, default=0.8)
    parser.add_argument("--fixed-pages", type=int, default=64, help="of the line of reference")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON as well")
    asked = parser.parse_args()
    if not asked.tiny and not torch.cuda.is_available():
        sys.exit("no CUDA or ROCm device is at hand; --tiny runs a toy on the CPU")
    device = torch.device("cpu" if asked.tiny else "cuda:0")
    shape = TINY if asked.tiny else Shape(layers=asked.layers, context=asked.context)
    torch.manual_seed(0)
    torch.set_default_device(device)
    torch.set_default_dtype(torch.float32 if asked.tiny else torch.bfloat16)
    rows = []
    for batch in asked.batches:
        for fixed in (0, min(asked.fixed_pages, shape.context // shape.page)):
            rows.append(measure(shape, batch, asked.mass, fixed, asked.steps, device))
            row = rows[-1]
            print(_line(row), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu (graphs are a stand-in)"
    document = {"device": name, "torch": torch.__version__, "shape": vars(shape), "rows": rows}
    text = json.dumps(document, indent=1)
    print(text)
    if asked.json:
        with open(asked.json, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
