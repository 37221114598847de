"""Readiness of deployments: what preflight says of a model without its files, in any precision, many at once."""

import pytest
from tests.needs import one_in

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.port.preflight.model import preflight
from crosstie.port.preflight.readiness import MEASURED, NOT_KNOWN, WILL_NOT_RUN, ReadinessCheck

CATALOG = Catalog()


def replica(model: str, accelerator: str, stack: str, precision: str = "native", tp: int = 8) -> Deployment:
    one, on = CATALOG.model(model), CATALOG.accelerator(accelerator)
    return CATALOG.deployment(one, on, Parallelism(tp=tp), precision, "bf16", stack)


def test_a_model_that_preflight_refuses_does_not_run() -> None:
    found = ReadinessCheck(CATALOG).readiness(replica("deepseek-v4-flash", "mi300x", "sglang"))
    assert not found.runs
    assert found.verdict == WILL_NOT_RUN
    assert found.label == "sglang 0.5.18"
    assert "no FP4 experts on gfx942" in found.why
    assert found.findings[0].severity == "error"


@pytest.mark.parametrize(
    "model", one_in(2, ["deepseek-v4-flash", "llama-3.3-70b", "gpt-oss-120b", "deepseek-r1", "kimi-k2.5"])
)
@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_verdicts_are_those_of_preflight(model: str, stack: str) -> None:
    check = ReadinessCheck(CATALOG)
    names = ("mi300x", "mi355x", "h200", "b200", "a100-80gb", "l40s")
    report = preflight(model, on=names, engine=stack, tp=8, context=1, scan="none", catalog=CATALOG)
    for name in names:
        found = check.readiness(replica(model, name, stack))
        # Memory is the planner's to count.
        kernels = [one for one in report.findings if one.target in ("", name) and one.check != "memory"]
        assert {one.what for one in found.findings} == {one.what for one in kernels if one.severity != "note"}
        assert list(found.settings) == report.settings[name]
        assert check.runs(replica(model, name, stack)) == found.runs


def test_the_release_that_is_named_is_the_one_that_is_judged() -> None:
    old = ReadinessCheck(CATALOG, {"deepseek-v4-flash": {"vllm": "0.10.0"}})
    found = old.readiness(replica("deepseek-v4-flash", "b200", "vllm"))
    assert (found.release, found.runs) == ("0.10.0", False)
    assert "has no DeepseekV4" in found.why
    other = old.readiness(replica("llama-3.3-70b", "b200", "vllm"))
    assert (other.release, other.verdict) == ("0.32.0", "ready")


def test_an_engine_without_rules_is_known_by_what_was_measured() -> None:
    check = ReadinessCheck(CATALOG)
    measured, other = (
        replica(model, "b200", "tensorrt-llm", "fp8", 2) for model in ("llama-3.3-70b", "qwen3-235b-a22b")
    )
    assert (check.readiness(measured).verdict, check.is_known(measured)) == (MEASURED, True)
    assert (check.readiness(other).verdict, check.is_known(other)) == (NOT_KNOWN, False)
    assert check.runs(other)


def test_a_precision_that_is_not_the_models_own_names_whose_checkpoint_it_takes() -> None:
    check = ReadinessCheck(CATALOG)
    assert check.readiness(replica("llama-3.3-70b", "mi300x", "vllm", "bf16")).checkpoint == ""
    assert check.readiness(replica("llama-3.3-70b", "mi300x", "vllm", "fp8")).checkpoint == "fp8"
    # FP8 has no matrix instructions there, whoever has written it.
    assert not check.runs(replica("llama-3.3-70b", "rx-7900-xtx", "vllm", "fp8", 4))


@pytest.mark.parametrize("release", [f"0.{minor}.0" for minor in range(24, 33)])
def test_deepseek_v4_is_known_on_mi300x_and_capture_is_a_matter_of_the_model(release: str) -> None:
    """Its attention compresses, its indexer chooses and its first layers route by hash: rules must ask for that."""
    found = preflight("deepseek-v4-flash", on="mi300x", engine=f"vllm=={release}", scan="none", catalog=CATALOG)
    assert found.verdicts["mi300x"] == "slow path"
    (capture,) = [one for one in found.findings if one.what.startswith("graph-capture")]
    assert "as on NVIDIA" not in capture.what
    assert capture.severity != "note"
    assert capture.remedy
    (plain,) = [
        one
        for one in preflight("qwen3-32b", on="mi300x", engine=f"vllm=={release}", catalog=CATALOG).findings
        if one.what.startswith("graph-capture")
    ]
    assert plain.severity == "note"


def test_capture_that_the_default_breaks_is_a_matter_of_settings() -> None:
    report = preflight("deepseek-v4-flash", on="mi355x", engine="vllm==0.32.0", catalog=CATALOG)
    assert report.verdicts["mi355x"] == "ready with settings"
    assert "--compilation-config.cudagraph_mode FULL_DECODE_ONLY" in report.settings["mi355x"]
    eager = preflight(
        "deepseek-v4-flash", on="mi355x", engine="vllm==0.32.0", flags={"enforce-eager": "true"}, catalog=CATALOG
    )
    assert eager.verdicts["mi355x"] == "slow path"
