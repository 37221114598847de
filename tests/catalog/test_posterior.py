"""The posterior's draws: those of the exact posterior, the same everywhere, and in pairs that cancel."""

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from crosstie.catalog.calibration import CalibrationSubject, leveled_scopes
from crosstie.catalog.posterior import NEW_LAYOUT, PAIRS, Cells, Posterior, covariance, pack, solve_lower
from crosstie.core.estimate import CONSTANTS
from crosstie.core.worlds import WORLDS
from crosstie.perf.hardware import Array

USED = 2
SCOPES = ("machine", "one", "other")
WIDTHS = {"all": 0.3, "each": 0.2}
LEVELS = ("all", "each", "each")
# What cell 0 tells of both constants apart and of cell 1 of their sum, with noise of one.
OWNERS = (0, 0, 1)
ENTRIES = ((4.0, 0.0), (0.0, 2.0), (5.0, 5.0))
SUBJECT = CalibrationSubject("NVIDIA", "hopper", "h200", "vllm", "16-bit", "dense", "32 x 4096, 8B", "plain layout")


def small(names: tuple[str, ...] = SCOPES) -> Posterior:
    """Two machines that share a scope, each with one of its own."""
    wide = np.zeros((len(ENTRIES), len(CONSTANTS)), np.float32)
    wide[:, :USED] = ENTRIES
    cells = Cells(
        names, LEVELS, (np.array([0, 1], np.int16), np.array([0, 2], np.int16)), np.array(OWNERS, np.int16), wide
    )
    widths = {level: (width,) * USED + (0.0,) * (len(CONSTANTS) - USED) for level, width in WIDTHS.items()}
    variances = cells.variances(widths)
    together = covariance(cells.entries, cells.owners, cells.shared(variances)).astype(np.float64)
    pulls: Array = np.asarray(np.linalg.solve(together, cells.drawn(variances)), np.float64)
    return pack(widths, {"": {"tpot": 0.1}}, cells, pulls)


def exact() -> Array:
    """V - V X' C^-1 X V over (scope, constant), by hand."""
    prior = np.diag(np.repeat([WIDTHS[level] ** 2 for level in LEVELS], USED))
    told = np.zeros((len(OWNERS), len(SCOPES) * USED))
    for row, (owner, entry) in enumerate(zip(OWNERS, ENTRIES, strict=True)):
        told[row, :USED] = told[row, USED * (1 + owner) : USED * (2 + owner)] = entry
    together = np.eye(len(OWNERS)) + told @ prior @ told.T
    return np.asarray(prior - prior @ told.T @ np.linalg.solve(together, told @ prior))


def test_draws_vary_as_the_exact_posterior_does() -> None:
    """Over many names of the scopes, since those seed the draws; the noise is one for all."""
    found = []
    for time in range(20):
        names = tuple(f"{scope} {time}" for scope in SCOPES)
        posterior = small(names)
        parts = [posterior.scope_draws(name, level)[:USED] for name, level in zip(names, LEVELS, strict=True)]
        drawn = np.concatenate(parts)
        found.append(drawn @ drawn.T / PAIRS)
    wanted = exact()
    sizes = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    assert float(np.abs((np.mean(found, axis=0) - wanted) / sizes).max()) < 0.15
    # Of what nobody told of, that is far from the prior.
    assert wanted[0, 0] < 0.6 * WIDTHS["all"] ** 2


def test_a_layout_that_nobody_measured_is_off_by_more() -> None:
    posterior = msgspec.structs.replace(small(), scales={"": {"tpot": 0.1}, NEW_LAYOUT: {"tpot": 1.2}})
    scales = posterior.scales_of("", "vllm", "h200")
    seen, new = (posterior.metrics("h200 / vllm", scales, seen=seen) for seen in (True, False))
    assert new == pytest.approx(1.2 * seen)


@pytest.mark.parametrize("count", [5, 128, 300])
def test_triangular_systems_are_solved_block_by_block(count: int) -> None:
    draw = np.random.default_rng(count)
    lower = np.tril(draw.normal(size=(count, count)) / count) + np.eye(count)
    right = draw.normal(size=(count, 3))
    assert lower @ solve_lower(lower, right) == pytest.approx(right)
    assert lower.T @ solve_lower(lower, right, transposed=True) == pytest.approx(right)


def test_a_scope_that_nobody_measured_keeps_the_priors_width() -> None:
    posterior = small()
    drawn = np.concatenate([posterior.scope_draws(f"new {i}", "each")[:USED] for i in range(20)])
    assert float(drawn.std()) == pytest.approx(WIDTHS["each"], rel=0.06)
    assert float(posterior.scope_draws("new", "each")[USED:].max()) == 0.0


def test_worlds_come_in_pairs_that_cancel() -> None:
    posterior = small()
    scopes = list(zip(SCOPES, LEVELS, strict=True))
    for drawn in (
        posterior.constants(scopes),
        posterior.metrics("h200 / vllm", posterior.scales_of("", "vllm", "h200")),
        posterior.acceptance("eagle"),
    ):
        assert len(drawn) == WORLDS
        assert np.abs(drawn).max() > 0.0
        assert (drawn[:PAIRS] == -drawn[PAIRS:]).all()


def test_no_two_scopes_of_an_estimate_have_one_name() -> None:
    """One name would be one draw: what is apart would vary together, and intervals be too wide."""
    for mode in ("", "speculative", "apart", "speculative and apart"):
        names = [scope for scope, _ in leveled_scopes(SUBJECT._replace(mode=mode))]
        assert len(names) == len(set(names))


_ASK = """
import hashlib, sys
from crosstie.catalog.calibration import CalibrationSubject
from crosstie.catalog.library import Catalog
known = Catalog([]).calibration
subjects = [CalibrationSubject("NVIDIA", "hopper", name, "vllm", "16-bit", "dense", "32 x 4096, 8B", "plain layout")
            for name in ("h200", "h100-sxm")]
for one in subjects[:: int(sys.argv[1])]:
    known.worlds(one).constants
told = [known.worlds(one) for one in subjects]
raw = b"".join(part.tobytes() for one in told for part in (one.constants, one.metrics, one.acceptance))
print(hashlib.sha256(raw).hexdigest())
"""


def test_worlds_are_the_same_in_every_process_whatever_is_asked_first() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", _ASK, order], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for order, seed in (("1", "1"), ("-1", "2"))
    }  # fmt: skip
    assert len(told) == 1
