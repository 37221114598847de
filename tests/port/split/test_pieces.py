"""`crosstie.port.split` answers as the module does, whatever the module does."""

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crosstie.core.errors import BadInput, CrosstieError
from crosstie.port.split import Split, dynamic, split

pytestmark = pytest.mark.slow

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
WIDTH = 16


@pytest.fixture(params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest) -> Any:
    """Everything in this file is made on it."""
    torch.manual_seed(0)
    with torch.device(request.param):
        yield request.param


def x(rows: int = 4, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(rows, WIDTH)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Sparse(nn.Module):
    """Routing by value between two static parts; the count may be anything from none to all."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after, self.score = Mlp(), Mlp(), nn.Linear(WIDTH, 64)
        self.register_buffer("cache", torch.randn(64, WIDTH))

    def forward(self, x: torch.Tensor, position: torch.Tensor, threshold: float = 0.5) -> torch.Tensor:
        x = self.before(x)
        self.cache[position] = x
        kept = (self.score(x).amax(0) > threshold).nonzero()[:, 0]
        keys = self.cache[kept]
        return self.after(x + torch.softmax(x @ keys.T, -1) @ keys)


Call = tuple[Any, ...]


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def agree(module: nn.Module, calls: Sequence[Call], examples: Call | None = None, **options: Any) -> Split:
    """Eager on a copy against split, call by call, and the states that they leave."""
    module.eval()
    eager = copy.deepcopy(module)
    made = split(module, examples, **options)
    with torch.no_grad():
        for call in calls:
            expected = eager(*copy.deepcopy(call))
            same(made(*call), expected)
    same(dict(module.state_dict()), dict(eager.state_dict()))
    return made


def replayed(made: Split) -> int:
    return made.region.counts["replayed"]


def test_counts_that_change_with_every_call() -> None:
    calls = [
        (x(scale=s), torch.randint(0, 64, (1,)).expand(4) + torch.arange(4) - 4) for s in (0.1, 1, 3, 10, 0.0, 1, 2)
    ]
    made = agree(Sparse(), calls)
    assert replayed(made) == 4
    assert [piece.static for piece in made.pieces] == [True, False, True]


@pytest.mark.parametrize("threshold", [-1e9, 1e9], ids=["all", "none"])
def test_a_mask_may_take_all_or_none(threshold: float) -> None:
    agree(Sparse(), [(x(), torch.arange(4), threshold) for _ in range(5)])


def test_none_one_and_all_in_graphs_made_for_some() -> None:
    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = Mlp(), Mlp()

        def forward(self, x: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
            h = self.before(x)
            kept = (x[:, 0] > limit).nonzero()[:, 0]
            return self.after(h + h[kept].sum(0) / max_one(kept))

    def max_one(kept: torch.Tensor) -> int:
        return kept.numel() + 1

    given = x()
    ordered = given[:, 0].sort().values
    limits = [ordered[1] + 1e-4, ordered[0], ordered[-1], ordered[-2] + 1e-4, ordered[0] - 1, ordered[1]]
    made = agree(Above(), [(given, limit.clone()) for limit in [*limits, *limits]])
    assert replayed(made) == 9


def test_a_piece_says_why_it_is_dynamic_and_where() -> None:
    made = split(Sparse(), (x(), torch.arange(4)))
    first, second, third = made.pieces
    assert (first.why, third.why) == ((), ())
    (why,) = second.why
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if ".amax(0)" in text)
    assert "aten.nonzero.default waits for the device" in why
    assert f"test_pieces.py:{line}" in why
    assert first.flops == 2 * 4 * (2 * WIDTH * 32 + WIDTH * 64)
    assert made.flops_in_graphs_fraction is not None
    assert 0.5 < made.flops_in_graphs_fraction < 1
    assert "FLOPs in graphs: " in made.report()


def test_a_static_module_is_one_graph() -> None:
    made = agree(nn.Sequential(Mlp(), Mlp()), [(x(scale=s),) for s in range(6)])
    assert [piece.static for piece in made.pieces] == [True]
    assert made.flops_in_graphs_fraction == 1


def test_examples_leave_no_trace() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp()
            self.register_buffer("calls", torch.zeros(()))
            self.python_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            self.python_calls += 1
            return self.body(x) * self.calls

    module = Counting()
    made = split(module, (x(),))
    assert (module.calls.item(), module.python_calls) == (0, 0)
    for count in range(1, 5):
        given = x()
        with torch.no_grad():
            same(made(given), module.body(given) * count)
    assert (module.calls.item(), module.python_calls) == (4, 4)


class Stepping(nn.Module):
    """A counter in Python: built into a graph, it would be stale."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.step = Mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.body(x) * self.step


def test_a_counter_in_python_is_never_stale() -> None:
    module = Stepping()
    made = agree(nn.Sequential(Mlp(), module, Mlp()), [(x(),) for _ in range(7)])
    assert module.step == 7
    assert "`step` of Stepping changes during the call" in made.report()
    assert sum(piece.static for piece in made.pieces) == 3, "what is around it, and in it, is captured"


def test_a_counter_that_another_module_reads() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.body = Stepping(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(self.inner(x)) * self.inner.step

    agree(Reads(), [(x(),) for _ in range(7)])


def test_random_numbers_of_python_are_not_built_in() -> None:
    class Jitter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * random.random()

    module = Jitter().eval()
    made = split(module)
    for seed in range(6):
        given = x()
        with torch.no_grad():
            random.seed(seed)
            expected = module(given)
            random.seed(seed)
            same(made(given), expected)


def test_numbers_read_with_int_and_float() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = Mlp(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x)
            count = int((x > 0).sum())
            scale = float(x.abs().max())
            return self.after(x / scale + torch.zeros(count).sum() + isinstance(count, int) * 0)

    made = agree(Reads(), [(x(scale=s),) for s in (1, 2, 3, 4, 5)])
    assert [piece.static for piece in made.pieces] == [True, False, True]


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.body(x)
        return x * 2


def test_a_child_that_decides_by_value_runs_as_python() -> None:
    made = agree(nn.Sequential(Mlp(), Deciding(), Mlp()), [(x(scale=s),) for s in (1, -1, 2, -2, 3, -3, 4, -4, 5)])
    assert [(piece.name, piece.static) for piece in made.pieces] == [
        ("module#0", True), ("module#1", False), ("module#2", True), ("1.body#0", True),
    ]  # fmt: skip


def test_a_root_that_decides_by_value_leaves_its_children_in_graphs() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Mlp(), Mlp(), Mlp()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                if x.abs().max() > 3:
                    break
            return x

    made = agree(Early(), [(x(scale=s),) for s in (0.1, 5, 0.1, 5, 0.1, 0.2, 0.3)])
    assert {piece.name for piece in made.pieces} == {"layers.0#0", "layers.1#0", "layers.2#0"}


def test_experts_with_as_many_tokens_as_are_routed_to_them() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList([Mlp() for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows, slots = torch.where(chosen == number)
                if rows.numel():
                    out.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
            return out

    made = agree(nn.Sequential(Mlp(), Experts(), Mlp()), [(x(9),) for _ in range(12)])
    assert replayed(made) >= 9


def test_what_a_caller_holds_is_not_overwritten() -> None:
    module = nn.Sequential(Mlp(), Mlp())
    made = split(module, (x(),))
    with torch.no_grad():
        givens = [x(scale=s) for s in range(4)]
        outs = [made(given) for given in givens]
        for given, out in zip(givens, outs, strict=True):
            same(out, module(given))
            out.fill_(7)
        same(made(givens[1]), module(givens[1]))


def test_results_of_any_structure() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp()

        def forward(self, x: torch.Tensor, *, scale: float, extra: dict[str, torch.Tensor]) -> Any:
            h = self.body(x) * scale
            return {"h": h, "view": h[:1], "twice": (h, h), "given": x, "weight": self.body.up.weight, "n": 3}, [
                extra["bias"] + 1,
                None,
                (h > 0).sum().item(),
            ]

    module = Many().eval()
    made = split(module)
    for s in range(6):
        given, extra = x(scale=s), {"bias": x()}
        with torch.no_grad():
            expected, ours = module(given, scale=2.0, extra=extra), made(given, scale=2.0, extra=extra)
        same(ours, expected)
        assert ours[0]["given"] is given
        assert ours[0]["twice"][0] is ours[0]["twice"][1]
        assert ours[0]["weight"] is module.body.up.weight


def test_shapes_take_turns_and_too_many_run_eagerly() -> None:
    made = agree(Mlp(), [(x(rows),) for _ in range(6) for rows in (1, 2, 3, 5, 8, 13)], most_signatures=3)
    assert len(made.region.plans) <= 3
    assert split(Mlp(), (x(),)).region.counts["eager"] == 1


def test_arguments_that_are_no_tensors_are_part_of_the_signature() -> None:
    agree(Sparse(), [(x(), torch.arange(4), t) for t in (0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0)])


class Caching(nn.Module):
    """Writes to a cache that the caller brings."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.after = Mlp(), Mlp()

    def forward(self, x: torch.Tensor, cache: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        cache.index_copy_(0, position, h)
        return self.after(h + cache.mean(0))


def test_a_cache_that_is_given_is_written_to_where_it_is() -> None:
    module = Caching().eval()
    made = split(module)
    caches = [torch.zeros(8, WIDTH) for _ in range(3)]
    twins = [cache.clone() for cache in caches]
    for step in range(18):
        given, position = x(), (torch.arange(4) + step) % 8
        with torch.no_grad():
            same(made(given, caches[step % 3], position), module(given, twins[step % 3], position))
        same(caches, twins)
    assert replayed(made) > 0


def test_arguments_that_share_memory() -> None:
    module = Caching().eval()
    made = split(module)
    for _ in range(6):
        ours, position = torch.randn(8, WIDTH), torch.arange(4)
        theirs = ours.clone()
        with torch.no_grad():
            same(made(ours[2:6], ours, position), module(theirs[2:6], theirs, position))
        same(ours, theirs)
    apart = Caching().eval()
    both = split(apart)
    for step in range(8):
        ours = torch.randn(4, WIDTH)
        cache = ours if step % 2 else ours.clone()
        mine, its = ours.clone(), cache.clone()
        with torch.no_grad():
            expected = apart(mine, mine if step % 2 else its, torch.arange(4))
            same(both(ours, cache, torch.arange(4)), expected)


def test_one_tensor_as_two_arguments_and_then_two() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.a(a) - self.b(b)

    twice = x()
    agree(Two(), [(twice, twice), (twice, twice), (twice, twice), (x(), x()), (x(), x())])


def changes() -> dict[str, Callable[[Sparse], Any]]:
    def in_place(module: Sparse) -> None:
        module.before.up.weight.data.mul_(2)

    def data(module: Sparse) -> None:
        module.before.up.weight.data = module.before.up.weight.data * 2

    def parameter(module: Sparse) -> None:
        module.after.down.weight = nn.Parameter(module.after.down.weight.detach() * 3)

    def buffer(module: Sparse) -> None:
        module.cache = module.cache * 2

    def attribute(module: Sparse) -> None:
        module.before.norm.eps = 0.5

    def child(module: Sparse) -> None:
        module.after = copy.deepcopy(module.before)

    def training(module: Sparse) -> None:
        module.train()

    def hook(module: Sparse) -> None:
        module.before.register_forward_hook(lambda _m, _i, out: out * 2)

    return {change.__name__: change for change in (in_place, data, parameter, buffer, attribute, child, training, hook)}


@pytest.mark.parametrize("change", changes().values(), ids=changes())
def test_a_module_that_is_changed_between_calls(change: Callable[[Sparse], Any]) -> None:
    module = Sparse().eval()
    eager = copy.deepcopy(module)
    made = split(module)
    for step in range(12):
        if step == 6:
            change(module)
            change(eager)
        given, position = x(), torch.randperm(64)[:4]
        with torch.no_grad():
            same(made(given, position), eager(given, position))
    assert replayed(made) > 3 or change.__name__ == "hook"


def test_hooks_run_in_every_call() -> None:
    for where in (0, 1):
        module = nn.Sequential(Mlp(), nn.Sequential(Mlp(), Mlp())).eval()
        seen: list[float] = []
        target = module if where == 0 else module[1][0]
        target.register_forward_hook(lambda _m, _i, out: seen.append(float(out.sum())))  # noqa: B023
        made = split(module)
        for count in range(1, 7):
            made(x())
            assert len(seen) == count


def test_gradients_are_refused() -> None:
    made = split(Mlp(), (x(),))
    with pytest.raises(BadInput, match="without gradients"):
        made(x().requires_grad_())
    assert not made(x()).requires_grad


def test_random_numbers_are_those_of_eager(device: str) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x) + torch.rand_like(x))

    module = Noisy()
    made = split(module)
    for seed in range(6):
        given = x()
        with torch.no_grad():
            torch.manual_seed(seed)
            expected = module(given)
            torch.manual_seed(seed)
            same(made(given), expected)
    assert any("draws random numbers" in why for piece in made.pieces for why in piece.why)


def test_masks_and_writes_through_them() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            h[h > 1] = 0.5
            rows = h[:, 0] > 0
            h[rows] = h[rows] * 2
            return self.b(h)

    made = agree(Masked(), [(x(scale=s),) for s in (1, 2, 3, 0.1, 0, 5)])
    assert [piece.static for piece in made.pieces] == [True, False, True]


class Tangled(nn.Module):
    """Views made at a place that is read from the device, and writes on either side of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Mlp(), Mlp()
        self.register_buffer("kept", torch.zeros(4, WIDTH))

    def forward(self, x: torch.Tensor, row: torch.Tensor, owner: str) -> torch.Tensor:
        if owner == "graph":
            memory = self.a(x)
        elif owner == "module":
            memory = self.kept
            memory.add_(self.a(x))
        else:
            memory = x[(x[:, 0] > 0).nonzero()[:, 0]].sum(0).expand(4, -1) * 1
        view = memory.select(0, row.item())
        other = self.b(x) + self.a(memory)
        memory.mul_(2)
        other = other + view
        view.add_(1)
        total = self.a(other + memory)
        view.mul_(total[0])
        return self.b(total + memory)


@pytest.mark.parametrize("owner", ["graph", "module", "dynamic part"])
def test_memory_shared_between_static_and_dynamic_parts(owner: str) -> None:
    made = agree(Tangled(), [(x(), torch.tensor(n % 4), owner) for n in range(7)])
    assert replayed(made) == 4


def test_numbers_and_counters_that_are_kept_in_tensors() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Mlp(), Mlp()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("limit", torch.ones(()))
            self.history = [torch.zeros(WIDTH), torch.zeros(WIDTH)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            h = self.a(x) * self.limit.item() + self.calls
            self.history[0].add_(h[0])
            self.history[1].mul_(0.5)
            self.limit.mul_(1.5)
            return self.b(h) + self.history[0] + self.history[1]

    made = agree(Keeps(), [(x(),) for _ in range(7)])
    assert replayed(made) == 4


def test_tensors_that_no_module_holds(device: str) -> None:
    outside = torch.zeros(WIDTH)

    class Closes(nn.Module):
        def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
            super().__init__()
            self.body, self.write = Mlp(), write

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.body(x)
            self.write(h)
            return h + outside

    for write in (lambda _: outside.add_(1), lambda h: outside.add_(h[0]), lambda h: h.mul_(outside.sum().item() + 1)):
        module = Closes(write).eval()
        made = split(module)
        for _ in range(6):
            given = x()
            before = outside.clone()
            with torch.no_grad():
                expected = module(given)
                outside.copy_(before)
                same(made(given), expected)


def test_an_expanded_argument() -> None:
    agree(Mlp(), [(torch.randn(1, WIDTH).expand(4, WIDTH),) for _ in range(5)])
    agree(Mlp(), [(torch.randn(4, 1).expand(4, WIDTH),) for _ in range(5)])
    agree(Mlp(), [(torch.randn(WIDTH, 4).t(),) for _ in range(5)])


@pytest.mark.parametrize("mode", ["inference", "autocast"])
def test_modes_of_the_caller(mode: str, device: str) -> None:
    module, made = Sparse().eval(), split(Sparse().eval())
    eager = copy.deepcopy(made.module)
    del module
    for step in range(10):
        given, position = x(), torch.randperm(64)[:4]
        context = torch.inference_mode() if mode == "inference" else torch.autocast(device, torch.bfloat16)
        with torch.no_grad(), context if step % 2 else torch.no_grad():
            same(made(given, position).clone(), eager(given, position))
    assert replayed(made) == 4


@dynamic
def halve_large(h: torch.Tensor, limit: float) -> torch.Tensor:
    return h / 2 if h.abs().max() > limit else h + 0


class Marked(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = Mlp(), Mlp()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.function(self.a(x), limit=2.0))


def test_a_marked_function_runs_between_graphs() -> None:
    made = agree(Marked(halve_large), [(x(scale=s),) for s in (1, 5, 0.1, 3, 0.2, 7)])
    assert [(piece.static, piece.kernels) for piece in made.pieces] == [(True, 5), (False, 1), (True, 5)]
    assert "halve_large runs as Python" in made.report()


def test_a_marked_function_whose_shape_changes_is_refused() -> None:
    @dynamic
    def some(h: torch.Tensor, limit: float) -> torch.Tensor:
        return h[: 2 if h[0, 0] > 0 else 4]

    module = Marked(some)
    made = split(module)
    high = torch.full((4, WIDTH), 10.0)
    low = -high
    assert (len(module(high)), len(module(low))) == (2, 4), "otherwise there is nothing to refuse"
    for _ in range(4):
        made(high)
    with pytest.raises(CrosstieError, match="must not depend on values"):
        made(low)


def test_what_python_keeps_is_its_own() -> None:
    kept: list[torch.Tensor] = []

    @dynamic
    def keep(h: torch.Tensor, limit: float) -> torch.Tensor:
        kept.append(h)
        return h * limit

    module = Marked(keep)
    made = split(module)
    givens = [x() for _ in range(6)]
    with torch.no_grad():
        for given in givens:
            made(given)
        for given, seen in zip(givens, kept, strict=True):
            same(seen, module.a(given))


def test_python_that_writes_to_what_it_is_given() -> None:
    @dynamic
    def clamp(h: torch.Tensor, limit: float) -> torch.Tensor:
        if h.abs().max() > limit:
            h.clamp_(-limit, limit)
        else:
            h.mul_(2)
        return h

    agree(Marked(clamp), [(x(scale=s),) for s in (1, 5, 0.1, 3, 0.2, 7)])


def test_objects_are_passed_on() -> None:
    class Box:
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Mlp()

        def forward(self, x: torch.Tensor, box: Box) -> torch.Tensor:
            h = self.body(x)
            box.seen.append(h)
            return h + len(box.seen)

    module, box, twin = Boxed().eval(), Box(), Box()
    made = split(module)
    for _ in range(5):
        given = x()
        with torch.no_grad():
            same(made(given, box), module(given, twin))
    same(box.seen, twin.seen)
    assert [piece.name for piece in made.pieces] == ["body#0"]


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(BadInput, match=r"takes a torch.nn.Module, not a function"):
        split(lambda x: x)


def test_an_error_of_the_module_is_its_own() -> None:
    made = split(Mlp())
    with pytest.raises(RuntimeError, match=r"shape|size"):
        made(torch.randn(4, WIDTH + 1))
