"""Fits to evidence that the model made itself under factors that are known, and the command around them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import Command
from tests.prove.calibration.rows import point, row, written

from crosstie.catalog.benchmarks import Protocols
from crosstie.catalog.calibration import FORMAT, Calibration, calibration_text, empty, read_calibration, subject_of
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS
from crosstie.core.progress import OnProgress
from crosstie.perf.hardware import Array
from crosstie.prove.calibration import calibrate as learning
from crosstie.prove.calibration.calibrate import Inputs, learn, read_inputs
from crosstie.prove.calibration.cases import Cases, MeasuredCase, measured_subject
from crosstie.prove.calibration.groups import left_out_groups
from crosstie.prove.calibration.predict import Predictor, quantity_of
from crosstie.prove.calibration.regression import Regression, gather
from crosstie.prove.calibration.results import MeasuredRow, Metric

METRICS = (Metric("tpot"), Metric("ttft"), Metric("throughput"))
# Slower in everything that most loads feel.
SLOW = {"compute": 0.75, "weights": 0.8, "cache": 0.8, "kernel": 1.3, "host_step": 1.3}
# Read once: files of layouts and rules.
PROTOCOLS = Protocols()
LOADS = [(n, i, o) for n in (1, 4, 16, 64) for i, o in ((128, 128), (1024, 128), (4096, 64))]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog([], calibration=empty())


def cases_at(catalog: Catalog, loads: Iterable[tuple[int, int, int]], **of: str) -> list[MeasuredCase]:
    resolve = Cases(catalog, PROTOCOLS)
    return [
        resolve.of(
            point(
                concurrency=str(clients),
                input_len=str(inputs),
                output_len=str(outputs),
                num_prompts=str(3 * clients),
                **of,
            )
        )
        for clients, inputs, outputs in loads
    ]


def measure(
    cases: Sequence[MeasuredCase], truth: dict[str, float] | None = None, metrics: Sequence[Metric] = METRICS
) -> list[MeasuredCase]:
    """Gives the cases the rows that would be measured if the constants were off by these factors."""
    predictor = Predictor(cases)
    factors = {name: np.full(len(cases), (truth or {}).get(name, 1.0)) for name in CONSTANTS}
    predictor.correct(factors)
    columns = predictor.predict()
    for index, case in enumerate(cases):
        case.point.rows = []
        for metric in metrics:
            name, scale = quantity_of(case, metric)
            case.point.rows.append(MeasuredRow("made.csv", index, metric, float(columns[name][index]) * scale))
    return list(cases)


def miss(fit: Regression, parts: Array) -> Array:
    """Predicted over measured, as logarithms."""
    return np.asarray(fit.predict(fit.corrections(parts)) - fit.evidence.logs)


def all_rows(fit: Regression) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.ones(len(fit.evidence.logs), dtype=bool)


def test_what_was_put_in_comes_out(catalog: Catalog) -> None:
    cases = measure(cases_at(catalog, LOADS), SLOW)
    fit = Regression(catalog, gather(catalog, cases))
    before = miss(fit, np.zeros((len(fit.scopes), len(CONSTANTS))))
    after = miss(fit, fit.solve(all_rows(fit)))
    assert float(np.median(np.abs(before))) > 0.15
    assert float(np.median(np.abs(after))) < 0.02
    assert float(np.abs(after).max()) < 0.06


def test_the_calibration_predicts_as_the_fit_does(catalog: Catalog) -> None:
    """Through the file's words: scopes, rounding, and a catalog that applies them."""
    cases = measure(cases_at(catalog, LOADS), SLOW)
    made = learn(catalog, Inputs(cases=cases))
    again = cases_at(Catalog([], calibration=made), LOADS)
    columns = Predictor(again).predict()
    for case, one, index in zip(cases, again, range(len(again)), strict=True):
        assert one.deployment.correction.nearness == "model"
        assert one.deployment.correction.points == len(cases)
        for measured in case.point.rows:
            name, scale = quantity_of(one, measured.metric)
            assert float(columns[name][index]) * scale == pytest.approx(measured.value, rel=0.08)


def test_nothing_wrong_moves_nothing(catalog: Catalog) -> None:
    """Evidence that agrees to the last digit is no division by zero."""
    made = learn(catalog, Inputs(cases=measure(cases_at(catalog, LOADS[:4]))))
    assert made.scopes == {}
    assert made.errors["points left out"]["tpot"]["median_ape"] == 0


def shift(catalog: Catalog, count: int) -> float:
    """How far h200's TPOT moves when so many of its points are slow among many of h100 that are not."""
    loads = [(n, i, 128) for n in range(1, 41) for i in (200, 2000)]
    anchor = measure(cases_at(catalog, loads[:24], accelerator="h100-sxm"))
    slow = measure(cases_at(catalog, loads[-count:], accelerator="h200"), {"weights": 0.6, "cache": 0.6}, METRICS[:1])
    asked = measure(cases_at(catalog, [(8, 1000, 100)], accelerator="h200"))
    fit = Regression(catalog, gather(catalog, [*anchor, *slow, *asked]))
    used = all_rows(fit)
    used[fit.evidence.origin == len(anchor) + len(slow)] = False
    error = miss(fit, fit.solve(used))
    return float(error[(fit.evidence.origin == len(anchor) + len(slow)) & (fit.evidence.kind == "tpot")][0])


def test_few_points_move_less_than_many(catalog: Catalog) -> None:
    one, few, many = (shift(catalog, count) for count in (1, 3, 36))
    assert 0.02 < one < few < many
    assert one < 0.9 * many


def test_what_was_not_measured_inherits_from_its_family(catalog: Catalog) -> None:
    loads = LOADS[:8]
    cases = measure(cases_at(catalog, loads, accelerator="h100-sxm"), SLOW)
    cases += measure(cases_at(catalog, loads, accelerator="mi300x"))
    made = learn(catalog, Inputs(cases=cases))

    def slower(accelerator: str) -> float:
        plain = cases_at(catalog, [(16, 1024, 128)], accelerator=accelerator)
        corrected = cases_at(Catalog([], calibration=made), [(16, 1024, 128)], accelerator=accelerator)
        return float(Predictor(corrected).predict()["tpot"][0] / Predictor(plain).predict()["tpot"][0])

    measured, relative, other, opposite = (slower(name) for name in ("h100-sxm", "h200", "b200", "mi300x"))
    assert measured > relative > other > 1.0
    assert opposite == pytest.approx(1.0, abs=0.04)
    subject = subject_of(catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200")))
    assert made.evidence(subject)[:2] == ("family", 8)
    stranger = subject_of(catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("b200")))
    assert made.evidence(stranger)[:2] == ("nothing", 0)


def test_one_wild_row_hardly_moves_anything(catalog: Catalog) -> None:
    def solved(wild: float) -> Array:
        cases = measure(cases_at(catalog, LOADS), SLOW)
        bad = cases[5].point.rows[0]
        cases[5].point.rows[0] = replace(bad, value=bad.value * wild)
        fit = Regression(catalog, gather(catalog, cases))
        return np.asarray(fit.predict(fit.corrections(fit.solve(all_rows(fit)))))

    tame, high, low = solved(1.0), solved(10.0), solved(0.1)
    assert float(np.abs(high - tame).max()) < 0.03
    assert float(np.abs(low - tame).max()) < 0.03


def mixed_evidence(catalog: Catalog) -> list[MeasuredCase]:
    """Two models on two accelerators, each a little off in its own way, and some noise."""
    cases = measure(cases_at(catalog, LOADS[:6], accelerator="h200"), {"weights": 0.9, "kernel": 1.1})
    cases += measure(cases_at(catalog, LOADS[:6], accelerator="h100-sxm"), {"weights": 0.85, "compute": 0.9})
    cases += measure(cases_at(catalog, LOADS[:6], accelerator="h200", model="qwen3-8b"), {"cache": 0.9, "kernel": 1.2})
    draw = np.random.default_rng(3)
    for case in cases:
        case.point.rows = [replace(r, value=r.value * float(np.exp(draw.normal(0, 0.03)))) for r in case.point.rows]
    return cases


@pytest.mark.slow
def test_leaving_out_is_what_a_fit_without_would_say(catalog: Catalog) -> None:
    fit = Regression(catalog, gather(catalog, mixed_evidence(catalog)))
    parts = fit.solve(all_rows(fit))
    subjects = [fit.evidence.subjects[i] for i in fit.evidence.origin]
    groups = {
        "accelerator": np.array([s.accelerator for s in subjects]),
        "model": np.array([s.model for s in subjects]),
        "point": np.array([str(i) if i in (0, 7, 15) else "" for i in fit.evidence.origin]),
    }
    found = fit.left_out(parts, *groups.values())
    for (name, grouping), error in zip(groups.items(), found, strict=True):
        assert np.isnan(error[grouping == ""]).all()
        for group in sorted(set(grouping.tolist()) - {""}):
            out = grouping == group
            really = miss(fit, fit.solve(~out))[out]
            # Linear around the whole fit: near enough to tell how wrong one would have been.
            np.testing.assert_allclose(error[out], really, atol=0.035, err_msg=f"{name} {group}")
            assert float(np.abs(error[out] - miss(fit, parts)[out]).max()) > 1e-4


@pytest.mark.slow
def test_no_row_is_left_out_of_its_own_error_twice(catalog: Catalog) -> None:
    """What was left out is predicted worse than what was fitted."""
    evidence = gather(catalog, mixed_evidence(catalog))
    fit = Regression(catalog, evidence)
    parts = fit.solve(all_rows(fit))
    own = np.sqrt(np.mean(miss(fit, parts) ** 2))
    groupings = left_out_groups(evidence)
    for name, error in zip(groupings, fit.left_out(parts, *groupings.values()), strict=True):
        if name in ("release", "source", "layout"):
            assert np.isnan(error).all()
        else:
            assert np.sqrt(np.nanmean(error**2)) > own


@pytest.mark.slow
def test_the_order_of_rows_does_not_matter(catalog: Catalog) -> None:
    cases = mixed_evidence(catalog)
    forward, backward = (learn(catalog, Inputs(cases=one)) for one in (cases, cases[::-1]))
    assert set(forward.scopes) == set(backward.scopes)
    for scope, parts in forward.scopes.items():
        assert backward.scopes[scope] == pytest.approx(parts, abs=2e-4)
    assert forward.points == backward.points
    one, other = (made.errors["points left out"]["tpot"]["median_ape"] for made in (forward, backward))
    assert one == pytest.approx(other, rel=0.02)
    for made in (forward, backward):
        assert made.posterior is not None
        assert forward.posterior is not None
        for level, widths in forward.posterior.widths.items():
            assert made.posterior.widths[level] == pytest.approx(widths, abs=2e-3)


@pytest.mark.slow
def test_the_same_evidence_gives_the_same_calibration_whatever_was_believed(catalog: Catalog) -> None:
    first, again = (learn(catalog, Inputs(cases=mixed_evidence(catalog))) for _ in range(2))
    assert calibration_text(first) == calibration_text(again)
    believing = Catalog([], calibration=first)
    cases = [Cases(believing).of(plain.point) for plain in mixed_evidence(catalog)]
    assert cases[0].deployment.correction.factors != {}
    assert learn(believing, Inputs(cases=cases)).scopes == first.scopes


def test_totals_and_the_same_per_gpu_count_once(catalog: Catalog) -> None:
    (case,) = cases_at(catalog, [(16, 1024, 128)], num_accelerators="2", tp="2")
    once, twice = Metric("throughput"), Metric("throughput", per_gpu=True)
    evidence = gather(catalog, measure([case], SLOW, [once, twice, Metric("ttft", "p99")]))
    assert len(evidence.logs) == 1
    both = gather(catalog, measure([case], SLOW, [twice]))
    # Measured and predicted agree about the GPUs.
    assert evidence.logs[0] - evidence.factor[0] == pytest.approx(both.logs[0] - both.factor[0])


# The command.


def results(path: Path, catalog: Catalog, truth: dict[str, float] = SLOW, count: int = 4) -> Path:
    cases = measure(cases_at(catalog, LOADS[:count]), truth)
    names = {
        "tpot": ("tpot_ms_mean", "s"),
        "ttft": ("ttft_ms_mean", "s"),
        "throughput": ("output_tokens_per_s_total", "tok/s"),
    }
    rows = []
    for case in cases:
        for one in case.point.rows:
            metric, unit = names[one.metric.kind]
            conditions = {k: v for k, v in case.point.conditions.items() if k not in ("metric", "unit", "value")}
            rows.append({**conditions, "metric": metric, "unit": unit, "value": repr(one.value)})
    return written(path, *rows)


def test_your_own_calibration_takes_the_place_of_the_shipped(
    crosstie: Command, tmp_path: Path, catalog: Catalog
) -> None:
    file = results(tmp_path / "mine.csv", catalog)
    got = crosstie("calibrate", str(file), "--alone", "--json")
    assert got.status == 0, got.err
    own = tmp_path / "user-catalog" / "calibration.json"
    said = json.loads(got.out)
    assert said["file"] == str(own)
    assert said["results"] == [{"file": "mine.csv", "sha256": said["results"][0]["sha256"], "points": 4, "kernels": 0}]
    assert set(said["errors"]["points left out"]) == {"tpot", "ttft", "throughput"}
    made = read_calibration(own)
    assert made.made["by"].startswith("crosstie ")
    assert sum(made.points.values()) == 4
    found = json.loads(crosstie("validate", str(file), "--json").out)
    assert found["metrics"]["tpot"]["median_ape"] < 0.05
    assert found["by_nearness"].keys() == {"model"}
    # Without it, the shipped one is back.
    own.unlink()
    shipped = json.loads(crosstie("validate", str(file), "--json").out)
    assert shipped["metrics"]["tpot"]["median_ape"] != pytest.approx(found["metrics"]["tpot"]["median_ape"], rel=0.01)


def test_the_last_folder_wins(tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kernel in (("a", 0.1), ("b", 0.2)):
        (tmp_path / name).mkdir()
        parts = tuple(kernel if constant == "kernel" else 0.0 for constant in CONSTANTS)
        made = Calibration(format=FORMAT, made={}, results=[], constants=CONSTANTS, scopes={"all": parts}, points={})
        (tmp_path / name / "calibration.json").write_text(calibration_text(made))
    monkeypatch.setenv("CROSSTIE_CATALOG", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    assert Catalog().calibration.scopes["all"][CONSTANTS.index("kernel")] == 0.2


def test_results_are_learnt_beside_what_is_shipped(
    crosstie: Command, tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = results(tmp_path / "shipped.csv", catalog, {}, 3)
    monkeypatch.setattr(learning, "SHIPPED_RESULTS", (shipped,))
    mine, target = results(tmp_path / "mine.csv", catalog), tmp_path / "deep" / "er" / "out.json"
    got = crosstie("calibrate", str(mine), "--full", "-o", str(target))
    assert got.status == 0, got.err
    assert "shipped.csv: 3 operating points" in got.out
    assert "mine.csv: 4 operating points" in got.out
    assert "cross-validated median error" in got.out
    assert f"written to {target}" in got.err
    assert [entry["file"] for entry in read_calibration(target).results] == ["shipped.csv", "mine.csv"]
    assert not (tmp_path / "user-catalog").exists()
    alone = crosstie("calibrate", "--shipped", "-o", str(target))
    assert alone.status == 0
    assert "mine.csv" not in alone.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--shipped", "mine.csv"), "give no RESULTS with it"),
        (("--shipped", "--alone"), "give no RESULTS with it"),
        ((), "no RESULTS are named"),
        (("--alone",), "no RESULTS are named"),
        (("--alone", "none.csv"), "none.csv: cannot be read: No such file"),
        (("--alone", "none.json"), "none.json"),
        (("--alone", "list.json"), "list.json"),
        (("--alone", "empty.csv"), "lacks the columns"),
        (("--alone", "bad.csv"), "no row of bad.csv can be learnt from: model 'nobody'"),
        (("--alone", "tails.csv"), "no row says anything about the constants"),
        (("--alone", "cut.csv"), "cannot be read"),
        (("--alone", "kernels.csv"), "kernels.csv: line 2: has an unknown kind or no time"),
        (("--alone", "formats.csv"), "unknown format 'fp7'"),
        (("--alone", "."), "cannot be read"),
    ],
)
def test_bad_questions_are_refused_with_a_reason(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "mine.csv", row())
    written(tmp_path / "bad.csv", row(model="nobody"))
    written(tmp_path / "tails.csv", row(metric="ttft_ms_p99", unit="ms"), row(concurrency="rate 2 req/s"))
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "cut.csv").write_bytes(b"\x1f\x8b\x08\x00\x00")
    (tmp_path / "kernels.csv").write_text("accelerator,stack,kind,format,seconds\nh200,vllm,gemm,bf16,inf\n")
    (tmp_path / "formats.csv").write_text("accelerator,stack,kind,format,seconds,m,n,k\nh200,vllm,gemm,fp7,1,1,1,1\n")
    got = crosstie("calibrate", *arguments)
    assert got.status == 2
    assert got.out == ""
    assert got.err.count("\n") == 1
    assert reason.replace("model 'nobody'", "unknown model 'nobody'") in got.err
    assert not (tmp_path / "user-catalog").exists()


@pytest.mark.parametrize("old", ['{"format": 99}', "{}", "not json", '{"format": 1'])
def test_a_calibration_that_cannot_be_read_can_be_made_again(
    crosstie: Command, tmp_path: Path, catalog: Catalog, old: str
) -> None:
    """Its own message says to make it again with calibrate."""
    own = tmp_path / "user-catalog" / "calibration.json"
    own.parent.mkdir()
    own.write_text(old)
    file = results(tmp_path / "mine.csv", catalog, count=2)
    refused = crosstie("validate", str(file))
    assert refused.status == 2
    assert "calibration.json" in refused.err
    got = crosstie("calibrate", str(file), "--alone")
    assert got.status == 0, got.err
    assert crosstie("validate", str(file)).status == 0


def test_a_calibration_that_cannot_be_written_leaves_the_old_one(
    crosstie: Command, tmp_path: Path, catalog: Catalog
) -> None:
    file = results(tmp_path / "mine.csv", catalog, count=2)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    for target in ("folder", "file/out.json"):
        got = crosstie("calibrate", str(file), "--alone", "-o", str(tmp_path / target))
        assert got.status == 2
        assert got.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "mine.csv"]


def test_a_target_that_cannot_be_is_refused_before_the_work(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worked = []

    def spy(catalog: Catalog, inputs: Inputs, on_progress: OnProgress) -> Calibration:
        worked.append(True)
        return empty()

    monkeypatch.setattr(learning, "learn", spy)
    (tmp_path / "folder").mkdir()
    assert (
        crosstie("calibrate", str(written(tmp_path / "a.csv", row())), "--alone", "-o", str(tmp_path / "folder")).status
        == 2
    )
    assert worked == []


def test_refused_rows_are_counted(catalog: Catalog, tmp_path: Path) -> None:
    file = written(
        tmp_path / "a.csv", row(), row(model="nobody"), row(value="0", source_ref="b"),
        row(accelerator="8xH200+8xMI350X", concurrency="", scenario="Offline", tp="1"),
    )  # fmt: skip
    found = read_inputs(catalog, [file])
    assert len(found.cases) == 1
    assert sum(found.unused.values()) == 3
    with pytest.raises(BadInput, match="can be learnt from"):
        read_inputs(catalog, [written(tmp_path / "b.csv", row(model="nobody"))])


def test_a_source_keeps_its_own_part_and_repeats_count_once(catalog: Catalog) -> None:
    """Two publishers disagree: each is met, and what is nobody's lies between them."""
    loads = LOADS[:6]
    cases = measure(cases_at(catalog, loads, source_id="quick"), {"weights": 1.1, "kernel": 0.8})
    cases += measure(cases_at(catalog, loads, source_id="slow"), {"weights": 0.9, "kernel": 1.25})
    made = Catalog([], calibration=learn(catalog, Inputs(cases=cases)))

    def tpot(**of: str) -> float:
        return float(Predictor(cases_at(made, [(16, 1024, 128)], **of)).predict()["tpot"][0])

    assert tpot(source_id="quick") < 0.97 * tpot() < tpot() < 0.97 * tpot(source_id="slow")
    again = [
        replace(case, point=replace(case.point, conditions={**case.point.conditions, "date": "x"})) for case in cases
    ]
    assert len(learning.once([*cases, *again])) == len(cases)


def test_first_waves_that_were_read_off_the_rows_left_out_go_with_them(catalog: Catalog) -> None:
    loads = LOADS[:4]
    waves = [replace(case, first_wave_s=3.0) for case in cases_at(catalog, loads, source_id="told")]
    cases = measure([*waves, *cases_at(catalog, loads, source_id="other")])
    fit = Regression(catalog, gather(catalog, cases))
    parts = fit.solve(all_rows(fit), rounds=1)
    sources = np.array([cases[i].point["source_id"] for i in fit.evidence.origin])
    first = np.where(fit.evidence.origin == 0, "one", "")
    untold: list[Array] = []
    told, _ = fit.left_out(parts, sources, first, untold=untold)
    whole, alone = untold
    waiting = (fit.evidence.kind == "ttft") & (sources == "told")
    assert (whole[waiting] < -0.3).all()
    assert float(np.abs(told[waiting]).max()) < 0.05
    # The others still tell of the one, and nobody's are forgotten afterwards.
    assert float(np.nanmax(np.abs(alone))) < 0.05
    assert float(np.abs(miss(fit, parts)).max()) < 0.05


def test_steps_with_several_queries_say_what_verifying_costs(catalog: Catalog) -> None:
    """129 of an H200: they move what speculation has, and are no served request's error."""
    steps = read_inputs(catalog, [learning.SHIPPED_RESULTS[-1]])
    assert [found["points"] for found in steps.files] == [129]
    assert {measured_subject(case).mode for case in steps.cases} == {"speculative"}
    slow = [replace(case, point=replace(case.point, rows=[replace(case.point.rows[0], value=2 * row.value)
            for row in case.point.rows])) for case in steps.cases]  # fmt: skip
    made, _ = learning.learn_mode(catalog, "speculative", [case.point for case in slow])
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), stack="pytorch")
    drafting = subject_of(one.drafting(catalog.speculation(one.model, "ngram:3")))
    assert made.factors(drafting)["verify"] > 1.3
    assert made.factors(drafting)["compute"] == 1.0
    assert made.factors(subject_of(one)) == dict.fromkeys(CONSTANTS, 1.0)
    assert made.errors["a curve left out, speculative"] == {}
