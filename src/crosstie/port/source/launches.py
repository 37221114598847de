"""Launches: what the second launch bound means, kernels that launch kernels, capabilities compared as numbers."""

from collections.abc import Iterator

from crosstie.port.source.code import Code
from crosstie.port.source.hazard import Hazard

_COMPARES = (">=", "<=", ">", "<", "==", "!=")


def launch_hazards(code: Code) -> Iterator[Hazard]:
    yield from _bounds(code)
    yield from _nested(code)
    yield from _capabilities(code)
    yield from _warp_synchronous(code)


def _bounds(code: Code) -> Iterator[Hazard]:
    for at, given in code.calls("__launch_bounds__"):
        if len(given) < 2 or code.value(given[1], at) == 1:
            continue
        # Where the file has a side for AMD, somebody has chosen the number with HIP in view, or could have.
        severity = "note" if code.has_side_for_amd else "slow"
        what = "the second launch bound is blocks a multiprocessor in CUDA and wavefronts a SIMD unit in HIP"
        remedy = (
            "on ROCm give blocks x threads / (wavefront x 4) there, or leave it out: too high a number spills registers"
        )
        yield code.hazard("launch-bounds", severity, what, at, remedy)
        if len(given) > 2:
            what = "HIP's __launch_bounds__ has no third argument (blocks a cluster)"
            yield code.hazard("launch-bounds", "error", what, at, "leave it out on ROCm")


def _nested(code: Code) -> Iterator[Hazard]:
    for at, token in enumerate(code.tokens):
        if token.text != "<<<":
            continue
        function = code.function(at)
        if function is not None and {"__global__", "__device__"} & set(function.returns):
            what = f"{function.name} runs on the device and launches a kernel, which HIP does not support"
            yield code.hazard("nested-launch", "error", what, at, "launch it from the host, or loop inside one kernel")


def _capabilities(code: Code) -> Iterator[Hazard]:
    """`prop.major >= 9`: ROCm answers with the instruction set's version, 9 for gfx942 and gfx950."""
    tokens = code.tokens
    for at in code.names.get("major", ()):
        if at == 0 or tokens[at - 1].text not in (".", "->") or at + 2 >= len(tokens) or code.is_for_amd(at):
            continue
        if tokens[at + 1].text in (*_COMPARES, "*"):
            what = "a compute capability is compared as a number: ROCm answers 9.4 for gfx942 and 9.5 for gfx950"
            remedy = "ask for gcnArchName on ROCm; a test for Hopper (major >= 9) holds on gfx942 by accident"
            yield code.hazard("compute-capability", "error", what, at, remedy, "gfx9")


def _warp_synchronous(code: Code) -> Iterator[Hazard]:
    """`s[t] += s[t + 32]; s[t] += s[t + 16];` with no barrier between them."""
    tokens = code.tokens
    for at, token in enumerate(tokens):
        if token.kind != "number" or token.text != "16" or tokens[at - 1].text != "+" or at + 1 >= len(tokens):
            continue
        if tokens[at + 1].text != "]":
            continue
        window = tokens[max(0, at - 80) : at]
        steps = [
            index
            for index in range(1, len(window) - 1)
            if window[index].text == "32" and window[index - 1].text == "+" and window[index + 1].text == "]"
        ]
        if steps and not any(one.text.startswith("__sync") for one in window[steps[-1] :]):
            what = "a reduction goes on below 64 threads without a barrier, trusting that 32 threads run in step"
            remedy = "put __syncthreads() between the steps, or use shuffles; a wavefront has 64 lanes here"
            yield code.hazard("warp-synchronous", "unknown", what, at, remedy, "wave64")
