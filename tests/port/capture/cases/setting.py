"""What every case file shares: the sizes, the state a module would keep between calls, and the inputs."""
# mypy: allow-untyped-defs, allow-untyped-calls

import ast
import csv
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch

B, S, H, D = 2, 64, 4, 32
VOCAB, EXPERTS, BLOCK = 100, 4, 16
LENS = ([40, 40], [24, 56], [10, 33], [17, 50])


@cache
def truth_rows() -> tuple[dict[str, str], ...]:
    """Every case whose verdict a real GPU gave: its module, name and verdict, and its code where a line holds that."""
    with (Path(__file__).parent.parent / "truth" / "h200.csv").open() as table:
        return tuple(csv.DictReader(table))


def registry(module):
    """The cases of a module that are rows of the table, and a decorator for its functions, or `case(name, lambda)`.

    `module`: its globals, which the rows' code sees. A name given twice is refused.
    """
    here = "/".join(Path(module["__file__"]).with_suffix("").parts[-2:])
    cases = {row["case"]: case_of(row, module) for row in truth_rows() if row["file"] == here and row["code"]}

    def case(function, expression=None):
        name = function if expression else function.__name__
        if name in cases:
            raise ValueError(f"two cases are called {name}")
        cases[name] = expression or function
        return function

    return cases, case


def case_of(row, module):
    """A function from a row's code: simple statements, of which the last is what it gives."""
    name, file = row["case"], "truth/h200.csv"
    tree = ast.parse(f"def {name}(s, q, k, v, lens, score): {row['code']}", file)
    body: list[Any] = tree.body[0].body  # type: ignore[attr-defined]
    body[-1] = ast.copy_location(ast.Return(body[-1].value), body[-1])
    made: dict[str, object] = {}
    exec(compile(tree, file, "exec"), module, made)
    return made[name]


def collected(names):
    """The functions of a module that take what every case takes."""
    return {
        name: one
        for name, one in names.items()
        if inspect.isfunction(one) and ",".join(inspect.signature(one).parameters) == "s,q,k,v,lens,score"
    }


def seeded(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class State:
    """What a module would keep between calls."""

    def __init__(self, dev):
        def pinned(tensor):
            return tensor.pin_memory() if dev == "cuda" else tensor

        self.dev = dev
        self.buf = torch.zeros(8, device=dev)
        self.calls = 0
        self.cache = None
        self.pinned = pinned(torch.ones(8))
        self.w = seeded(1, D, D).to(dev)
        self.emb = seeded(2, VOCAB, D).to(dev)
        self.experts = (seeded(3, EXPERTS, D, D) * 0.1).to(dev)
        self.kv = torch.zeros(S, H, D, device=dev)
        self.blocks = torch.arange(B * S // BLOCK, dtype=torch.int32).view(B, -1).flip(0).to(dev)
        self.pages = seeded(4, B * S // BLOCK, BLOCK, D).to(dev)
        self.step = torch.zeros(1, dtype=torch.long, device=dev)
        self.out = torch.zeros(B, H, 1, D, device=dev)
        self.host = torch.tensor(0.5)
        self.host_row = torch.arange(8.0)
        self.host_lens = torch.tensor([3, 5])
        self.pinned_out = pinned(torch.zeros(8))
        self.table = {}
        self.history = []


def inputs(dev, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dev)

    lens = torch.tensor(LENS[seed % len(LENS)]).to(dev)
    return normal(B, H, 1, D), normal(B, H, S, D), normal(B, H, S, D), lens, normal(B, S)
