"""What the stand-in device computes, what user code sees of it, and what it cannot follow."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import copy
import dataclasses
import threading

import pytest
import torch

from crosstie.core.errors import BadInput
from crosstie_port.capture.check import check
from crosstie_port.capture.device import Device
from crosstie_port.capture.modes import stand_in_device


def inputs(device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(device)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16)
        self.last = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.nn.functional.gelu(self.norm(self.first(x))))


def test_numbers_are_those_of_the_host() -> None:
    torch.manual_seed(0)
    layers = Layers()
    x = inputs("cpu")
    device = Device()
    with stand_in_device(device):
        there = copy.deepcopy(layers).to("cuda")
        out = there(x.to("cuda"))
        assert out.is_cuda
        assert str(out.device) == "cuda:0"
        came_back = out.cpu()
    assert torch.equal(came_back, layers(x))
    assert type(layers.first.weight) is torch.nn.Parameter


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "float", "scale": 0.3}])
def test_attention_is_that_of_the_host(how) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    masks = {"bool": torch.ones(6, 6, dtype=torch.bool).tril(), "float": torch.randn(6, 6)}

    def attend(device: str):
        mask = masks[how["attn_mask"]].to(device) if "attn_mask" in how else None
        q, k = query.to(device), key.to(device)
        function = torch.nn.functional.scaled_dot_product_attention
        return function(q, k, k, **{**how, "attn_mask": mask}, enable_gqa=True).cpu()

    with stand_in_device(Device()):
        found = attend("cuda")
    torch.testing.assert_close(found, attend("cpu"))


def test_gradients_are_those_of_the_host() -> None:
    """Broadcasting, accumulation over two uses, hooks, and a function with a backward of its own."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    def gradients(layers, x):
        leaf = x.clone().requires_grad_()
        doubled = leaf * 2
        doubled.register_hook(lambda gradient: gradient * 3)
        out = layers(doubled + leaf[:1]) + Square.apply(leaf).sum()
        out.sum().backward()
        again = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)[0]
        second = torch.autograd.grad(again.sum(), leaf)[0]
        return [leaf.grad, second, *(parameter.grad for parameter in layers.parameters())]

    torch.manual_seed(0)
    layers, there = Layers(), Layers()
    there.load_state_dict(layers.state_dict())
    expected = gradients(layers, inputs("cpu"))
    with stand_in_device(Device()):
        found = [gradient.cpu() for gradient in gradients(there.to("cuda"), inputs("cuda"))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_hosts_generator_does_not_notice_the_devices() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with stand_in_device(Device()):
        torch.nn.functional.dropout(torch.rand(5, device="cuda"), 0.5)
        found = torch.rand(3)
    assert torch.equal(found, expected)


def test_nothing_is_left_behind() -> None:
    available, synchronize = torch.cuda.is_available(), torch.cuda.synchronize
    run, generator, threads = threading.Thread.run, torch.Generator, torch.get_num_threads()
    check(lambda x: x * 2, inputs)
    assert torch.cuda.is_available() == available
    assert torch.cuda.synchronize is synchronize
    assert (threading.Thread.run, torch.Generator, torch.get_num_threads()) == (run, generator, threads)


def test_a_module_is_copied_and_not_changed() -> None:
    layers = Layers()
    assert check(layers, inputs).verdict == "ok"
    assert layers.first.weight.device.type == "cpu"


def test_a_class_and_a_factory_of_a_module() -> None:
    assert check(Layers, inputs).verdict == "ok"
    assert check(lambda: Layers(), inputs).verdict == "ok"


@pytest.mark.parametrize(
    "made",
    [
        lambda device, seed: (inputs(device, seed),),
        pytest.param(lambda device, seed: [inputs(device, seed)], marks=pytest.mark.slow),
        pytest.param(lambda device, seed: {"x": inputs(device, seed)}, marks=pytest.mark.slow),
        lambda device, seed: ((), {"x": inputs(device, seed)}),
        pytest.param(lambda device: inputs(device), marks=pytest.mark.slow),
        lambda: torch.randn(4, 8, device="cuda"),
        pytest.param(lambda seed: inputs("cuda", seed), marks=pytest.mark.slow),
    ],
)
def test_inputs_in_every_form(made) -> None:
    def counts(x, calls=[0]):  # noqa: B006 - state under test
        calls[0] += 1
        return x + calls[0]

    assert check(lambda x: x * 2, made).verdict == "ok"
    assert check(counts, made).verdict == "stale"


def test_inputs_that_never_vary_are_reordered_and_noted() -> None:
    fixed = check(lambda x: x * 2, lambda device: torch.arange(8.0).to(device))
    assert fixed.verdict == "ok"
    assert "reordered" in fixed.notes[0]

    def ordered(x):
        torch._assert_async((x.diff() > 0).all())
        return x * 2

    kept = check(ordered, lambda device: torch.arange(8.0).to(device))
    assert kept.verdict == "ok"
    assert "made the function fail" in kept.notes[0]


def test_threads_of_the_function_reach_the_device() -> None:
    def threaded(x):
        made = []
        thread = threading.Thread(target=lambda: made.append(torch.ones(8, device="cuda")))
        thread.start()
        thread.join()
        return x + made[0]

    # A thread has a current stream of its own, which is not the captured one.
    result = check(threaded, inputs)
    assert result.verdict == "stale"
    assert "not part of the capture" in result.hazards[0].what


@torch.library.custom_op("crosstie_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("crosstie_tests::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


@torch.library.custom_op("crosstie_tests::of_the_host", mutates_args=(), device_types="cpu")
def of_the_host(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_operators_in_python_are_followed_and_others_unknown() -> None:
    assert check(lambda x: doubled(x), inputs).verdict == "ok"
    assert check(lambda x: summed(x), inputs).verdict == "error"
    result = check(lambda x: of_the_host(x), inputs)
    assert result.verdict == "unknown"
    assert "of_the_host" in result.hazards[0].evidence


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_triton_kernels_compiled_functions_and_inner_graphs_are_unknown() -> None:
    triton = pytest.importorskip("triton")
    kernel = triton.jit(doubled_in_triton)

    def launches(x):
        kernel[(1,)](x, 8)
        return x

    assert "Triton" in check(launches, inputs).hazards[0].evidence
    assert check(launches, inputs).verdict == "unknown"
    assert check(torch.compile(lambda x: x * 2), inputs).verdict == "unknown"
    assert check(lambda x: torch.compile(torch.sin)(x), inputs).verdict == "unknown"
    assert check(lambda x: torch.cuda.CUDAGraph() and x, inputs).verdict == "unknown"


def doubled_in_triton(x, n):
    raise AssertionError("only launched")


def test_an_unknown_that_is_caught_stays_unknown() -> None:
    def hides(x):
        try:
            return torch.cuda.CUDAGraph()
        except RuntimeError:
            return x * 2

    assert check(hides, inputs).verdict == "unknown"


def test_an_error_beside_an_unknown_is_an_error() -> None:
    assert check(lambda x: of_the_host(x) * float(x.sum()), inputs).verdict == "error"


def test_a_function_that_fails_in_a_plain_call_is_bad_input() -> None:
    def fails(x):
        raise KeyError("weights")

    with pytest.raises(BadInput, match=r"plain call.*KeyError: 'weights'"):
        check(fails, inputs)
    with pytest.raises(BadInput, match="same device"):
        check(lambda x: x + torch.ones(8), inputs)


def test_inputs_of_changing_shape_are_bad_input() -> None:
    with pytest.raises(BadInput, match=r"other shapes \(\[2\] and \[3\]\)"):
        check(lambda x: x * 2, lambda device, seed: torch.ones(2 + seed).to(device))


def test_a_failure_that_only_a_replay_meets_is_stale() -> None:
    """A window that is full after the warm-up: the graph goes on writing behind its end."""

    class Window:
        def __init__(self, device: str):
            self.rows, self.end, self.used = torch.zeros(5, 8, device=device), torch.zeros(1, device=device).long(), 0

    def append(window, x):
        if window.used < 5:
            window.rows.index_copy_(0, window.end, x[:1])
            window.end.add_(1)
        window.used += 1
        return window.rows.sum()

    result = check(append, inputs, state=Window)
    assert result.verdict == "stale"
    assert "out of bounds" in result.hazards[0].evidence or "out of range" in result.hazards[0].evidence


def test_a_refused_copy_that_is_caught_leaves_the_capture_good() -> None:
    def caught(x):
        try:
            return x * torch.tensor([2.0], device=x.device)
        except RuntimeError:
            return x * 2

    def caught_and_other(x):
        try:
            return x * torch.tensor([2.0], device=x.device)
        except RuntimeError:
            return x * 3

    def spoilt(x):
        try:
            return x * x.max().item()
        except RuntimeError:
            return x * 2

    assert check(caught, inputs).verdict == "ok"
    assert check(caught_and_other, inputs).verdict == "stale"
    assert check(spoilt, inputs).verdict == "error"


def test_hazards_after_a_refused_copy_are_found_too() -> None:
    def two(x):
        y = x * torch.tensor([2.0], device=x.device)
        return y * y.max().item()

    assert [hazard.kind for hazard in check(two, inputs).hazards] == ["pageable-copy", "host-sync"]


def test_inputs_of_the_host_are_moved_where_they_lead_nowhere() -> None:
    def on_host():
        return torch.randn(4, 8)

    moved = check(lambda x: x * 2, on_host)
    assert moved.verdict == "ok"
    assert any("moved to the device" in note for note in moved.notes)
    assert check(Layers(), on_host).verdict == "ok"
    # It copies them itself: that is what a graph would refuse.
    assert check(lambda x: x.cuda() * 2, on_host).verdict == "error"


def test_what_never_reaches_the_device_is_unknown() -> None:
    result = check(lambda n: n * 2, lambda: (3,))
    assert result.verdict == "unknown"
    assert result.hazards[0].evidence == "nothing ran on the device"


def test_a_generator_is_unknown() -> None:
    def steps(x):
        yield x * x.max().item()

    assert check(steps, inputs).verdict == "unknown"


def test_what_only_the_stand_in_refuses_is_unknown() -> None:
    def exact(x):
        if type(x) is not torch.Tensor:
            raise TypeError("a plain tensor")
        return x * 2

    assert check(exact, inputs).verdict == "unknown"


def test_records_among_the_inputs_are_loaded_and_objects_are_kept() -> None:
    @dataclasses.dataclass(frozen=True)
    class Batch:
        x: torch.Tensor
        scale: int

    class Counter:
        calls = 0

    def batches(device: str, seed: int):
        return (Batch(inputs(device, seed), 2), Counter())

    def scaled(batch, counter):
        return batch.x * batch.scale

    def counted(batch, counter):
        counter.calls += 1
        return batch.x * counter.calls

    def by_seed(device: str, seed: int):
        return (Batch(inputs(device, seed), seed), Counter())

    assert check(scaled, batches).verdict == "ok"
    assert check(counted, batches).verdict == "stale"
    assert check(scaled, by_seed).verdict == "stale"
