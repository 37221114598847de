"""The calibration's words: scopes, nearness, worlds, its file and everything that can be wrong with that."""

import json
import math
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import crosstie
from crosstie.catalog.calibration import (
    ALL_LEVELS,
    FORMAT,
    LEVELS,
    MODE_LEVELS,
    SINCE,
    Calibration,
    CalibrationSubject,
    Level,
    architecture_of,
    calibration_text,
    empty,
    kind_of,
    leveled_scopes,
    points_key,
    read_calibration,
    scopes,
    scopes_of,
    subject_of,
)
from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.catalog.posterior import PAIRS, Cells, Posterior, pack
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadData, BadInput
from crosstie.core.estimate import CONSTANTS, METRICS, NEARNESS
from crosstie.perf.hardware import CEILINGS, Hardware
from crosstie.perf.step import gpu_s, shape

HERE = CalibrationSubject("NVIDIA", "hopper", "h200", "vllm", "8-bit", "dense", "32 x 4096, 8B", "plain layout")


NOTHING_TOLD = Cells((), (), (), np.zeros(0, np.int16), np.zeros((0, len(CONSTANTS)), np.float32))
POSTERIOR: Posterior = pack({"all": (0.1,) * len(CONSTANTS)}, {"": {"tpot": 0.05}}, NOTHING_TOLD, np.zeros((0, PAIRS)))


def one(**parts: float) -> tuple[float, ...]:
    return tuple(parts.get(name, 0.0) for name in CONSTANTS)


def made(**changes: Any) -> Calibration:
    return msgspec.structs.replace(empty(), **changes)


def test_scopes_of_an_estimate_and_of_a_measurement() -> None:
    found = scopes(HERE)
    assert found[0] == "all"
    assert "hopper" in found
    assert "vllm / h200" in found
    assert "vllm / 32 x 4096, 8B / 8-bit / h200" in found
    assert len(found) == len(set(found))
    assert not [scope for scope in found if scope.endswith(" / ") or " /  / " in scope]
    # An estimate knows no release, no source and no campaign, and has all that was gained since.
    gains = 2 * (len(SINCE) - 1)
    assert len(found) == len(LEVELS) - 6 + gains
    measured = HERE._replace(release="0.9", campaign="MLPerf offline", source="bench")
    assert len(scopes(measured)) == len(LEVELS) + gains
    assert set(found) < set(scopes(measured))
    # A kernel speaks for its silicon and its stack only.
    assert all("dense" not in scope for scope in scopes(HERE._replace(kind="", model="", layout="")))


def test_a_scope_needs_all_its_words() -> None:
    level = next(level for level in LEVELS if level.words == ("stack", "bits", "accelerator"))
    assert scopes_of(level, HERE) == ["vllm / 8-bit / h200"]
    assert scopes_of(level, HERE._replace(bits="")) == []


def test_what_software_gained_counts_for_everything_later() -> None:
    gains = Level(("stack", "since"), 0.1)
    today = [f"vllm / since {mark}" for mark in SINCE]
    assert scopes_of(gains, HERE) == today
    assert scopes_of(gains, HERE._replace(month=SINCE[1])) == today[:2]
    assert scopes_of(gains, HERE._replace(month="2019-01")) == []


def test_parts_add_up_as_logarithms() -> None:
    calibration = made(
        scopes={"all": one(compute=0.1), "h200": one(compute=0.2, kernel=-0.3), "mi300x": one(compute=9.0)}
    )
    factors = calibration.factors(HERE)
    assert factors["compute"] == pytest.approx(math.exp(0.3))
    assert factors["kernel"] == pytest.approx(math.exp(-0.3))
    assert factors["link"] == 1.0
    assert calibration.factors(HERE._replace(accelerator="h100-sxm"))["compute"] == pytest.approx(math.exp(0.1))


def test_scopes_of_speculation_move_what_only_speculation_has() -> None:
    """Whatever a file says, drafts make no step faster."""
    calibration = made(scopes={"speculative": one(compute=0.5, verify=0.2), "all": one(kernel=0.1, draft=0.3)})
    found = calibration.factors(HERE._replace(mode="speculative"))
    assert found["compute"] == found["draft"] == 1.0
    assert found["verify"] == pytest.approx(math.exp(0.2))
    assert calibration.factors(HERE)["verify"] == 1.0
    assert calibration.factors(HERE._replace(mode="speculative and apart"))["verify"] == found["verify"]


def test_constants_by_name_not_by_place() -> None:
    calibration = made(constants=("kernel", "compute"), scopes={"all": (0.5, -0.5)})
    assert calibration.factors(HERE) == {
        "kernel": pytest.approx(math.exp(0.5)),
        "compute": pytest.approx(math.exp(-0.5)),
    }


def test_nearness_from_near_to_far() -> None:
    calibration = made(
        points={
            points_key(HERE): 5,
            points_key(HERE._replace(bits="16-bit")): 2,
            points_key(HERE._replace(model="other")): 4,
            points_key(HERE._replace(stack="sglang", model="other")): 3,
            points_key(HERE._replace(accelerator="h100-sxm", stack="sglang")): 10,
        }
    )
    asked = {
        "model": (HERE, 5, f"5 measured points of this model in {HERE.bits} weights on h200 with vllm, of 11 there"),
        "layout": (
            HERE._replace(gpus="64"),
            5,
            f"extrapolated to {HERE.layout} on 64 GPUs from 5 measured points of this",
        ),
        "stack": (HERE._replace(model="third"), 11, "from 11 measured points of others on h200 with vllm"),
        "accelerator": (HERE._replace(stack="trt"), 14, "extrapolated to trt from 14 measured points of h200"),
        "family": (
            HERE._replace(accelerator="gh200"),
            24,
            "extrapolated to gh200 from 24 measured points of the hopper",
        ),
        "nothing": (
            HERE._replace(accelerator="b200", family="blackwell"),
            0,
            "no measured point of b200 or its family",
        ),
    }
    assert list(asked) == list(NEARNESS)
    nearness, points, basis = calibration.evidence(HERE._replace(bits="4-bit"))
    assert (nearness, points) == ("stack", 7)
    assert "extrapolated to 4-bit weights from 7 measured points of this model" in basis
    for wanted, (subject, count, words) in asked.items():
        nearness, points, basis = calibration.evidence(subject)
        assert (nearness, points) == (wanted, count)
        assert words in basis
        correction = calibration.correction(subject)
        assert (correction.nearness, correction.points, correction.basis) == (nearness, points, basis)
        assert correction.extrapolated is (wanted != "model")


def test_every_scope_of_an_estimate_has_its_level_and_what_is_not_said_is_the_user_s_own() -> None:
    found = leveled_scopes(HERE)
    assert {level for _, level in found} <= {level.name for level in ALL_LEVELS}
    assert set(scopes(HERE)) < {scope for scope, _ in found}
    assert {"stack / release", "stack / source", "stack / campaign"} <= {level for _, level in found}
    assert ("vllm / bench", "stack / source") in leveled_scopes(HERE._replace(source="bench"))


def test_loads_are_those_of_the_points_nearest() -> None:
    calibration = made(
        points={points_key(HERE): 5, points_key(HERE._replace(gpus="8")): 5},
        loads={points_key(HERE): (2.0, 64.0), points_key(HERE._replace(gpus="8")): (0.125, 16.0)},
    )
    found = calibration.correction(HERE)
    assert found.loads == (2.0, 64.0)
    assert [found.doublings(load) for load in (0.0, 2.0, 17.0, 64.0, 0.5, 256.0)] == [0.0, 0.0, 0.0, 0.0, 2.0, 2.0]
    # Another layout has what all that were measured have.
    assert calibration.correction(HERE._replace(gpus="4")).loads == (0.125, 64.0)
    assert made().correction(HERE).loads is None
    assert made().correction(HERE).worlds is None


def test_the_words_of_models(catalog: Catalog) -> None:
    kinds = {name: kind_of(catalog.model(name)) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3")}
    assert kinds == {"llama-3.1-8b": "dense", "qwen3-30b-a3b": "mixture", "deepseek-v3": "latent mixture"}
    assert architecture_of(catalog.model("llama-3.1-70b")) == architecture_of(catalog.model("llama-3.3-70b"))
    assert architecture_of(catalog.model("llama-3.1-8b")) != architecture_of(catalog.model("qwen3-8b"))
    model, h200 = catalog.model("qwen3-30b-a3b"), catalog.accelerator("h200")
    plain = subject_of(catalog.deployment(model, h200, Parallelism(tp=2)))
    spread = subject_of(catalog.deployment(model, h200, Parallelism(dp=2, ep=2)))
    assert plain.layout == "plain layout"
    assert spread.layout == "experts spread and attention replicas"
    assert plain._replace(layout="") == spread._replace(layout="")
    for name in catalog.models:
        # Words with the separator in them would fall apart when points are counted.
        assert " / " not in architecture_of(catalog.model(name))


def test_a_catalog_applies_it_and_again_after_a_change_of_layout() -> None:
    made_up = made(scopes={"h200": one(kernel=0.5), "vllm / experts spread and attention replicas": one(kernel=0.25)})
    catalog = Catalog([], calibration=made_up)
    model, h200 = catalog.model("qwen3-30b-a3b"), catalog.accelerator("h200")
    plain = catalog.deployment(model, h200)
    assert plain.correction.factors["kernel"] == pytest.approx(math.exp(0.5))
    spread = catalog.deployment(model, h200, Parallelism(dp=2, ep=2))
    assert spread.correction.factors["kernel"] == pytest.approx(math.exp(0.75))
    moved = catalog.calibrated(msgspec.structs.replace(plain, parallelism=Parallelism(dp=2, ep=2)))
    assert moved.correction == spread.correction
    bare = Catalog([], calibration=empty()).deployment(model, h200)
    assert float(Hardware([plain]).kernel_s[0, 0]) == pytest.approx(
        math.exp(0.5) * float(Hardware([bare]).kernel_s[0, 0])
    )


def test_no_correction_beats_the_ceilings() -> None:
    endless = Catalog([], calibration=made(scopes={"all": one(**dict.fromkeys(CEILINGS, 10.0))}))
    model = endless.model("llama-3.1-8b")
    for name in endless.accelerators:
        one_gpu = endless.deployment(model, endless.accelerator(name), None, "bf16")
        hardware = Hardware([one_gpu])
        written = one_gpu.efficiency.cache.value
        share = float((hardware.cache_bytes_per_s / hardware.memory_bytes_per_s)[0, 0])
        assert share == pytest.approx(max(CEILINGS["cache"], written))
        rate, peak = hardware.rates(one_gpu.precision["mlp"].main)
        assert float((rate / peak)[0, 0]) <= CEILINGS["compute"] + 1e-12


def test_no_estimate_implies_more_than_matrix_products_were_measured_to_reach(catalog: Catalog) -> None:
    """A dense prompt at full length, under the shipped calibration, and one that would have everything ten times faster."""
    endless = Catalog([], calibration=made(scopes={"all": one(**dict.fromkeys(CEILINGS, 10.0))}))
    tokens = 8192.0
    for known in (catalog, endless):
        model = known.model("llama-3.1-70b")
        for accelerator in known.accelerators.values():
            best = {
                name.removeprefix("matmul_"): max(
                    [fact.value, *(float(other.value) for other in fact.alternatives if other.unit == fact.unit)]
                )
                * 1e12
                for name, fact in accelerator.measured.items()
                if name.startswith("matmul_")
            }
            for precision in ("bf16", "fp8"):
                if precision not in best:
                    continue
                replica = known.deployment(model, accelerator, None, precision)
                seconds = float(gpu_s(Hardware([replica]), shape(prefill_tokens=tokens))[0, 0])
                weights = sum(
                    tensor.active_parameters * layers for tensor, layers in model.tensors() if tensor.is_multiplied
                )
                # The head is multiplied once a prompt.
                head = model.hidden * model.vocabulary
                assert 2.0 * (weights - head) * tokens / seconds <= best[precision], (accelerator.id, precision)


# Its file.


def test_the_file_says_what_was_made(tmp_path: Path) -> None:
    whole = Calibration(
        format=FORMAT,
        made={"by": "me", "date": "2026-11-15"},
        results=[{"file": 'a "quoted" name.csv', "points": 3}],
        constants=CONSTANTS,
        scopes={"all": one(kernel=0.125), 'odd "name" / \u00e9': one(link=-1e-5)},
        points={points_key(HERE): 3},
        posterior=POSTERIOR,
        errors={"points left out": {"tpot": {"n": 3, "median_ape": 0.04}}},
        coverage={"points left out": {"tpot": {"n": 3, "inside": 0.8, "width": 1.5}}},
    )
    for calibration in (whole, empty()):
        file = tmp_path / "calibration.json"
        file.write_text(calibration_text(calibration))
        assert read_calibration(file) == calibration
        assert json.loads(file.read_text())["constants"] == list(CONSTANTS)
    assert calibration_text(whole).count("\n") > 12


def test_the_shipped_one_is_sound(catalog: Catalog) -> None:
    shipped = read_calibration(SHIPPED / "calibration.json")
    # What came after the last fit stands at the end, uncorrected until the next.
    assert shipped.constants == CONSTANTS[: len(shipped.constants)]
    assert shipped.posterior is not None
    assert set(shipped.posterior.widths) == {level.name for level in ALL_LEVELS}
    scales = shipped.posterior.scales
    # Modes have all metrics, stacks of a mode those that enough was measured of, and arrivals by the clock latencies.
    assert all(set(scales[mode]) == set(METRICS) for mode in ("", *MODE_LEVELS))
    assert all(scales[name] and set(scales[name]) <= set(METRICS) for name in scales)
    known = {(a.family, a.id) for a in catalog.accelerators.values()}
    for key in shipped.points:
        family, accelerator, stack, bits, _, _, gpus = key.split(" / ")
        assert (family, accelerator) in known
        assert stack in catalog.stacks
        assert bits in ("16-bit", "8-bit", "4-bit")
        assert int(gpus) > 0
    assert max(abs(part) for parts in shipped.scopes.values() for part in parts) < 2


def test_what_is_shipped_is_packaged() -> None:
    """A data file that the build leaves out is missing only where nobody tests: in the wheel."""
    package = Path(crosstie.__file__).parent
    build = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())
    patterns = build["tool"]["setuptools"]["package-data"]["crosstie"]
    for file in (package / "catalog" / "data").rglob("*"):
        if file.is_file():
            name = file.relative_to(package).as_posix()
            assert any(fnmatch(name, p.replace("**/", "*")) for p in patterns), name


GOOD: dict[str, Any] = {
    "format": FORMAT, "made": {}, "results": [], "constants": ["compute", "kernel"], "scopes": {"all": [0.1, 0.2]},
    "points": {"f / a / s / b / m / l / 1": 2}, "posterior": msgspec.to_builtins(POSTERIOR),
}  # fmt: skip


def test_the_good_file_is_good(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(GOOD))
    assert read_calibration(file).scopes == {"all": (0.1, 0.2)}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"format": 2}, "format: is 2"),
        ({"format": "one"}, "format"),
        ({"constants": ["compute", "luck"]}, "constants: 'luck'"),
        ({"scopes": {"all": [0.1]}}, "scopes.all"),
        ({"scopes": {"all": [0.1, 0.2, 0.3]}}, "scopes.all"),
        ({"scopes": {"all": [0.1, 1e6]}}, "scopes.all"),
        ({"scopes": {"all": [0.1, "x"]}}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"points": {"a / b": 3}}, "points.a / b"),
        ({"points": {"f / a / s / b / m / l / 1": -2}}, "points.f / a / s / b / m / l / 1"),
        ({"points": {"f / a / s / b / m / l / 1": 1.5}}, "points"),
        ({"loads": {"f / a / s / b / m / l / 1": [4.0, 2.0]}}, "loads.f / a / s / b / m / l / 1"),
        ({"loads": {"f / a / s / b / m / l / 1": [0.0, 2.0]}}, "loads.f / a / s / b / m / l / 1"),
        ({"loads": {"f / a / s / b / m / l / 8": [1.0, 2.0]}}, "loads.f / a / s / b / m / l / 8"),
        ({"posterior": {"widths": {"all": [0.1]}, "scales": {}, "packed": ""}}, "posterior.widths.all"),
        ({"posterior": {"widths": {"all": [-0.1] * 17}, "scales": {}, "packed": ""}}, "posterior.widths.all"),
        ({"posterior": {"widths": {}, "scales": {}}}, "packed"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_fault_is_named_by_file_and_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**GOOD, **changes}))
    with pytest.raises(BadData) as refused:
        read_calibration(file)
    assert str(file) in str(refused.value)
    assert key in str(refused.value)


@pytest.mark.parametrize("gone", ["format", "constants", "scopes", "points", "made", "results"])
def test_a_missing_key_is_named(tmp_path: Path, gone: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({key: value for key, value in GOOD.items() if key != gone}))
    with pytest.raises(BadData, match=f"`{gone}`"):
        read_calibration(file)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": NaN}', b"\x1f\x8b"])
def test_what_is_no_calibration(tmp_path: Path, raw: bytes) -> None:
    file = tmp_path / "calibration.json"
    file.write_bytes(raw)
    with pytest.raises(BadData, match=r"calibration\.json: is no calibration"):
        read_calibration(file)


def test_a_folder_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").mkdir()
    with pytest.raises(BadData, match="cannot be read"):
        Catalog([tmp_path]).deployment(Catalog([]).model("llama-3.1-8b"), Catalog([]).accelerator("h200"))


def test_a_constant_named_twice(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**GOOD, "constants": ["kernel", "kernel"]}))
    with pytest.raises(BadData, match="constants"):
        read_calibration(file)


def test_a_posterior_that_cannot_be_unpacked_says_what_to_do() -> None:
    broken = made(posterior=Posterior(widths=POSTERIOR.widths, scales={}, packed="no base64"))
    worlds = broken.worlds(HERE)
    assert worlds is not None
    with pytest.raises(BadInput, match="make the calibration again"):
        _ = worlds.constants
