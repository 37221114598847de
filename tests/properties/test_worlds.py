"""Worlds over the catalog: less known is never narrower, and the figures of a world belong together."""

import pickle

import msgspec
import numpy as np
import pytest

from crosstie.catalog.calibration import CalibrationSubject, subject_of
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.worlds import WORLDS
from crosstie.perf.estimate import estimate
from crosstie.perf.hardware import Array
from crosstie.perf.worlds import in_worlds, world_logs

CATALOG = Catalog([])
LOAD = {"concurrency": 16.0, "input_tokens": 1024.0, "output_tokens": 256.0}
SEEN = {
    name: (model, accelerator, Parallelism(tp=tp), precision, stack)
    for model, accelerator, tp, precision, stack in (
        ("llama-3.1-8b", "h200", 1, "bf16", "vllm"),
        ("llama-3.1-8b", "mi300x", 1, "bf16", "vllm"),
        ("llama-3.3-70b", "b200", 4, "fp8", "tensorrt-llm"),
        ("llama-3.3-70b", "h100-sxm", 4, "fp8", "vllm"),
        ("gpt-oss-120b", "mi355x", 1, "native", "vllm"),
        ("gpt-oss-120b", "b200", 1, "native", "tensorrt-llm"),
        ("deepseek-r1", "mi355x", 8, "native", "sglang"),
        ("deepseek-r1", "h200", 8, "native", "sglang"),
    )
    for name in [f"{model} on {accelerator}, {stack}"]
}
UNSEEN: dict[str, dict[str, str]] = {
    "model": {"model": "33 x 4097, 9B"},
    "family": {"family": "new", "accelerator": "new-1"},
    "stack": {"stack": "new-engine"},
    "layout": {"layout": "experts spread in a new way"},
}


def made(name: str) -> Deployment:
    model, accelerator, split, precision, stack = SEEN[name]
    return CATALOG.deployment(
        CATALOG.model(model), CATALOG.accelerator(accelerator), split, precision, "bf16", stack
    )  # fmt: skip


def as_known_as(one: Deployment, subject: CalibrationSubject) -> Deployment:
    """The same replica with the same estimate, as sure as one is of that subject."""
    worlds = CATALOG.calibration.worlds(subject)
    return msgspec.structs.replace(one, correction=msgspec.structs.replace(one.correction, worlds=worlds))


def log_width(several: list[Deployment]) -> Array:
    """Of the 80% intervals of TPOT."""
    found = in_worlds(several, **LOAD)
    assert found is not None
    low, high = np.quantile(found.tpot_s, [0.1, 0.9], axis=1)
    return np.asarray(np.log(high / low))


@pytest.mark.parametrize("name", SEEN)
def test_less_known_is_never_narrower(name: str) -> None:
    """0.9: the width of 256 draws is known to about 6%."""
    one = made(name)
    subject = subject_of(one)
    assert CATALOG.calibration.evidence(subject)[1] > 0
    changed = {key: as_known_as(one, subject._replace(**words)) for key, words in UNSEEN.items()}
    alien = subject._replace(**{word: value for words in UNSEEN.values() for word, value in words.items()})
    seen, *wide, widest = log_width([one, *changed.values(), as_known_as(one, alien)])
    for key, width in zip(changed, wide, strict=True):
        assert width >= 0.9 * seen, key
    # Of what is like nothing it knows, one is less sure.
    assert widest > seen


def test_a_source_that_was_learnt_from_is_known_no_worse() -> None:
    one = made("deepseek-r1 on h200, sglang")
    names = [as_known_as(one, subject_of(one, source=name)) for name in ("inferencex_dump_2026-07-20", "nobody-yet")]
    known, unknown = log_width(names)
    assert known < 1.1 * unknown


@pytest.mark.parametrize("name", SEEN)
def test_the_figures_of_a_world_keep_littles_law(name: str) -> None:
    found = in_worlds([made(name)], **LOAD)
    assert found is not None
    request = found.ttft_s + found.tpot_s * (LOAD["output_tokens"] - 1.0)
    assert found.output_tokens_per_s.shape == (1, WORLDS)
    assert LOAD["concurrency"] * LOAD["output_tokens"] / request == pytest.approx(found.output_tokens_per_s)


def test_what_shares_scopes_varies_together() -> None:
    one = made("llama-3.1-8b on h200, vllm")
    other = CATALOG.calibrated(msgspec.structs.replace(one, parallelism=Parallelism(tp=2)))
    drawn = []
    for deployment in (one, other, made("gpt-oss-120b on b200, tensorrt-llm")):
        found = in_worlds([deployment], **LOAD)
        assert found is not None
        drawn.append(np.log(found.tpot_s[0]))
    beside, apart = np.corrcoef(drawn)[0, 1:]
    assert beside > 0.4
    assert beside > apart + 0.2


@pytest.mark.parametrize("name", SEEN)
def test_many_at_once_are_about_as_sure_as_each_is_alone(name: str) -> None:
    """Plans look at one move of each constant, estimates at every world: of equal load, 32 requests in flight."""
    one = made(name)
    tokens = LOAD["input_tokens"], LOAD["output_tokens"]
    exact = in_worlds([one], 32.0, *tokens)
    assert exact is not None
    alone, among = (
        np.subtract(*np.quantile(logs, [0.9, 0.1]))
        for logs in (np.log(exact.tpot_s[0]), world_logs([one], *tokens)[0, :, 1])
    )
    assert among == pytest.approx(alone, rel=0.25)


@pytest.mark.parametrize("name", SEEN)
def test_an_estimate_lies_within_its_interval_and_says_so_in_json(name: str) -> None:
    found = estimate(made(name), concurrency=16, input_tokens=1024, output_tokens=256)
    said = msgspec.to_builtins(found)["interval"]
    assert list(said) == ["level", "ttft_s", "tpot_s", "output_tokens_per_s"]
    assert said["level"] == 0.8
    for metric in ("ttft_s", "tpot_s", "output_tokens_per_s"):
        low, high = said[metric]
        assert 0.0 < low < getattr(found, metric) < high


def test_worlds_are_the_same_in_another_process() -> None:
    """Simulations run in processes of their own, and deployments go there with all they have."""
    one = made("llama-3.1-8b on h200, vllm")
    there = pickle.loads(pickle.dumps(one))
    assert one.correction.worlds is not None
    assert (there.correction.worlds.constants == one.correction.worlds.constants).all()
    assert (there.correction.worlds.metrics == one.correction.worlds.metrics).all()
