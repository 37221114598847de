"""Each hazard by a function that has it, named at its line, and a safe twin that is left alone."""
# mypy: allow-untyped-defs

import inspect
import random
import time
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from tests.needs import one_in

from crosstie_port.capture.check import check
from crosstie_port.capture.hazards import CaptureResult, Kind

Function = Callable[..., Any]


class State:
    def __init__(self, device: str):
        self.row = torch.zeros(8, device=device)
        self.pinned = torch.ones(8).pin_memory()
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.calls = 0
        self.kept: Any = None


def inputs(device: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 8, generator=generator)
    return x.to(device), torch.tensor([3, 1 + seed]).to(device)


def checked(function: Function) -> CaptureResult:
    return check(function, inputs, state=State)


def reads_a_value(s, x, lens):
    return x * lens.max().item()


def keeps_the_value_on_the_device(s, x, lens):
    return x * lens.max()


def branches_on_data(s, x, lens):
    return x if x.sum() > 0 else -x


def chooses_on_the_device(s, x, lens):
    return torch.where(x.sum() > 0, x, -x)


def formats(s, x, lens):
    return x, f"{x.mean()}"


def formats_the_shape(s, x, lens):
    return x, f"{x.shape} {x.device} {x.dtype}"


def waits_for_the_device(s, x, lens):
    torch.cuda.synchronize()
    return x * 2


def orders_streams_on_the_device(s, x, lens):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        doubled = x * 2
    main.wait_stream(side)
    return doubled


def makes_a_tensor_from_a_list(s, x, lens):
    return x * torch.tensor([2.0], device=x.device)


def makes_a_tensor_on_the_device(s, x, lens):
    return x * torch.full((1,), 2.0, device=x.device)


def writes_a_number_at_an_index(s, x, lens):
    s.row[0] = 5.0
    return x + s.row


def fills_at_an_index(s, x, lens):
    s.row[0].fill_(5.0)
    return x + s.row


def copies_to_the_host(s, x, lens):
    return x.cpu()


def copies_into_pinned_memory(s, x, lens):
    s.pinned.copy_(x[0], non_blocking=True)
    return x * 2


def waits_for_a_pinned_copy(s, x, lens):
    s.row.copy_(s.pinned)
    return x + s.row


def does_not_wait_for_a_pinned_copy(s, x, lens):
    s.row.copy_(s.pinned, non_blocking=True)
    return x + s.row


def indexes_with_a_mask(s, x, lens):
    return x[x > 0].sum()


def sums_under_a_mask(s, x, lens):
    return torch.where(x > 0, x, 0.0).sum()


def repeats_by_data(s, x, lens):
    return torch.repeat_interleave(x[:2], lens, dim=0).sum()


def repeats_to_a_fixed_size(s, x, lens):
    return torch.repeat_interleave(x[:2], lens * 0 + 2, dim=0, output_size=4).sum()


def counts_calls_in_python(s, x, lens):
    s.calls += 1
    return x * s.calls


def counts_calls_on_the_device(s, x, lens):
    s.step.add_(1)
    return x * s.step


def alternates_in_python(s, x, lens):
    s.kept = not s.kept
    return x.sin() if s.kept else x.cos()


def never_alternates(s, x, lens):
    s.kept = True
    return x.sin() if s.kept else x.cos()


def draws_on_the_host(s, x, lens):
    return x * random.random()


def draws_on_the_device(s, x, lens):
    return x * torch.rand(8, device=x.device)


def bakes_the_time(s, x, lens):
    return x * time.perf_counter_ns()


def notes_the_time(s, x, lens):
    s.kept = time.perf_counter_ns()
    return x * 2


def rebinds_state(s, x, lens):
    before = x if s.kept is None else s.kept
    s.kept = x * 1
    return before + x


def overwrites_state(s, x, lens):
    if s.kept is None:
        s.kept = torch.zeros_like(x)
    before = s.kept + x
    s.kept.copy_(x)
    return before


def grows(s, x, lens):
    s.kept = x if s.kept is None else torch.cat([s.kept, x])
    return s.kept.sum(0)


def writes_at_a_device_index(s, x, lens):
    s.row.index_copy_(0, s.step % 8, x[0, :1])
    s.step.add_(1)
    return s.row.sum()


def fills_pinned_memory_in_python(s, x, lens):
    s.calls += 1
    s.pinned.fill_(s.calls)
    s.row.copy_(s.pinned, non_blocking=True)
    return x + s.row


def leaves_a_stream_unjoined(s, x, lens):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul(2)
    return x * 2


def waits_for_a_stream_outside(s, x, lens):
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    return x * 2


def allocates_on_a_stream_outside(s, x, lens):
    with torch.cuda.stream(torch.cuda.Stream()):
        x.mul(2)
    return x * 2


def draws_from_its_own_generator(s, x, lens):
    if s.kept is None:
        s.kept = torch.Generator(device=x.device)
    return x * torch.rand(8, device=x.device, generator=s.kept)


def seeds_anew(s, x, lens):
    s.calls += 1
    torch.manual_seed(s.calls)
    return x * 2


def seeds_the_same(s, x, lens):
    torch.manual_seed(0)
    return x * 2


def raises_when_captured(s, x, lens):
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("not here")
    return x * 2


# Function, kind, and what its line holds; the line is found by that text.
HAZARDS: list[tuple[Function, str, str]] = [
    (reads_a_value, "host-sync", "item()"),
    (branches_on_data, "host-sync", "if x.sum()"),
    (formats, "host-sync", "x.mean()"),
    (waits_for_the_device, "host-sync", "synchronize"),
    (makes_a_tensor_from_a_list, "pageable-copy", "torch.tensor"),
    (writes_a_number_at_an_index, "pageable-copy", "= 5.0"),
    (copies_to_the_host, "pageable-copy", ".cpu()"),
    (waits_for_a_pinned_copy, "blocking-pinned-copy", "copy_"),
    (indexes_with_a_mask, "data-dependent-shape", "x[x > 0]"),
    (repeats_by_data, "data-dependent-shape", "repeat_interleave"),
    (counts_calls_in_python, "stale-host-value", "x * s.calls"),
    (alternates_in_python, "stale-host-value", "x.sin()"),
    (draws_on_the_host, "stale-host-value", "random.random"),
    (bakes_the_time, "stale-host-value", "perf_counter_ns"),
    (rebinds_state, "stale-host-value", "return before + x"),
    (grows, "growing-allocation", "torch.cat"),
    (fills_pinned_memory_in_python, "stale-host-value", "copy_"),
    (leaves_a_stream_unjoined, "refused-call", "x.mul(2)"),
    (waits_for_a_stream_outside, "refused-call", "wait_stream"),
    (allocates_on_a_stream_outside, "refused-call", "x.mul(2)"),
    (draws_from_its_own_generator, "refused-call", "torch.rand"),
    (seeds_anew, "refused-call", "manual_seed"),
    (raises_when_captured, "refused-call", "raise ValueError"),
]
SAFE: list[Function] = [
    keeps_the_value_on_the_device,
    chooses_on_the_device,
    formats_the_shape,
    orders_streams_on_the_device,
    makes_a_tensor_on_the_device,
    fills_at_an_index,
    copies_into_pinned_memory,
    does_not_wait_for_a_pinned_copy,
    sums_under_a_mask,
    repeats_to_a_fixed_size,
    counts_calls_on_the_device,
    never_alternates,
    draws_on_the_device,
    notes_the_time,
    overwrites_state,
    writes_at_a_device_index,
    seeds_the_same,
]


HAZARDOUS = {function.__name__: (function, kind, text) for function, kind, text in HAZARDS}
HARMLESS = {function.__name__: function for function in SAFE}


@pytest.mark.parametrize("name", one_in(2, HAZARDOUS))
def test_hazard_is_found_at_its_line(name: str) -> None:
    function, kind, text = HAZARDOUS[name]
    result = checked(function)
    stale = kind in ("stale-host-value", "growing-allocation")
    assert result.verdict == ("stale" if stale else "error")
    source, first = inspect.getsourcelines(function)
    at = [(hazard.kind, source[hazard.line - first].strip()) for hazard in result.hazards if hazard.line]
    assert any(found == kind and text in line for found, line in at), at
    assert all(hazard.evidence and hazard.remedy for hazard in result.hazards)


@pytest.mark.parametrize("name", one_in(3, HARMLESS))
def test_safe_twin_is_left_alone(name: str) -> None:
    result = checked(HARMLESS[name])
    assert (result.verdict, result.hazards) == ("ok", ())


def test_every_kind_has_its_test() -> None:
    assert {kind for _, kind, _ in HAZARDS} == {*get_args(Kind)} - {"not-followed"}


def test_all_hazards_of_a_function_are_found_at_once() -> None:
    def two(s, x, lens):
        n = int(lens[0])
        return x[x > 0].sum() * n

    assert [hazard.kind for hazard in checked(two).hazards] == ["host-sync", "data-dependent-shape"]


def test_a_hazard_that_is_caught_is_one_still() -> None:
    def caught(s, x, lens):
        try:
            return x * float(x.sum())
        except RuntimeError:
            return x

    assert checked(caught).verdict == "error"


def test_what_warm_up_made_is_no_hazard() -> None:
    def cached(s, x, lens):
        if s.kept is None:
            s.kept = torch.tensor([2.0], device=x.device)
        return x * s.kept

    assert checked(cached).verdict == "ok"


def test_state_that_no_output_shows_is_stale_too() -> None:
    def writes(s, x, lens):
        s.calls += 1
        s.row.fill_(s.calls)
        return x * 2

    result = checked(writes)
    assert result.verdict == "stale"
    assert "row" in result.hazards[0].evidence


def test_state_in_globals_closures_and_defaults_is_seen() -> None:
    counted = iter(range(100))

    def by_closure(s, x, lens):
        return x * next(counted)

    def by_default(s, x, lens, count=[0]):  # noqa: B006 - the mistake under test
        count[0] += 1
        return x + count[0]

    assert checked(by_closure).verdict == "stale"
    assert checked(by_default).verdict == "stale"


def test_a_host_argument_that_changes_is_baked_in() -> None:
    def scaled(x, factor):
        return x * factor

    def arguments(device: str, seed: int) -> tuple[torch.Tensor, float]:
        return torch.ones(4).to(device), 1.0 + seed

    result = check(scaled, arguments)
    assert result.verdict == "stale"
    assert check(scaled, lambda device, seed: (torch.ones(4).to(device) * seed, 2.0)).verdict == "ok"
