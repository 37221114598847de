"""Where a module's Python cannot be traced, the report names the statement and what would mend it; it does mend it."""

from pathlib import Path

import pytest
import torch
from torch import nn

from crosstie.port.split import dynamic, split
from crosstie.port.split.cures import obstacle

WIDTH, EXPERTS = 16, 4


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH))


class Inline(nn.Module):
    """Experts that were hit, in a loop among the rest of the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.gate = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)).square())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dense(x)
        chosen = self.gate(h).argmax(-1)
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            out[chosen == expert] = h[chosen == expert] @ self.experts[expert]
        return self.dense(out)


@dynamic
def routed(h: torch.Tensor, chosen: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(h)
    for expert in chosen.unique().tolist():
        out[chosen == expert] = h[chosen == expert] @ experts[expert]
    return out


class Marked(Inline):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dense(x)
        return self.dense(routed(h, self.gate(h).argmax(-1), self.experts))


class Masked(Inline):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.dense(x)
        weight = nn.functional.one_hot(self.gate(h).argmax(-1), EXPERTS).to(h.dtype)
        return self.dense(sum(weight[:, e, None] * (h @ self.experts[e]) for e in range(EXPERTS)))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.step = mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return torch.relu(x) * self.step


def test_an_inline_loop_over_values_has_its_cure_beside_the_line() -> None:
    inline = split(Inline().eval(), (torch.randn(8, WIDTH),))
    assert not any(piece.static and piece.kernels > 4 for piece in inline.pieces)
    (found,) = inline.obstacles
    assert found.name == "module"
    assert found.statement == "for expert in chosen.unique().tolist():"
    line = Path(__file__).read_text().splitlines().index(" " * 8 + found.statement) + 1
    assert found.place == f"{__file__}:{line}"
    assert "@crosstie.port.split.dynamic" in found.cure
    assert "for e in range(n)" in found.cure
    said = inline.report()
    assert f"{found.place}: {found.statement}\n    cure: {found.cure}" in said


@pytest.mark.parametrize("kind", [Marked, Masked])
def test_the_cure_puts_the_rest_into_graphs(kind: type[Inline]) -> None:
    plain, cured = Inline().eval(), kind().eval()
    made = split(cured, (torch.randn(8, WIDTH),))
    x = torch.randn(8, WIDTH)
    with torch.no_grad():
        assert torch.allclose(made(x), plain(x), atol=1e-5)
    assert made.obstacles == []
    assert sum(piece.kernels for piece in made.pieces if piece.static) >= 8
    assert "cure:" not in made.report()


def test_state_kept_in_python_has_another() -> None:
    (found,) = split(Counting().eval(), (torch.randn(8, WIDTH),)).obstacles
    assert "register_buffer" in found.cure


@pytest.mark.parametrize(
    ("why", "cure"),
    [
        ("Layer has hooks, which run as Python", "take the hooks off"),
        ("it returns a Cache, neither tensor nor plain value", "take and return tensors"),
        ("aten.mul works on a tensor that is no attribute of a module", "register_buffer"),
        ("aten.mul gets a number of Python's that is another one in each call (/no/such.py:3)", "as a tensor"),
        ("something new", "@crosstie.port.split.dynamic"),
    ],
)
def test_every_reason_has_a_cure(why: str, cure: str) -> None:
    assert cure in obstacle("module", why).cure
