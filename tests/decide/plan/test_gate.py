"""A plan obeys preflight."""

from functools import cache
from pathlib import Path

import pytest

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadData
from crosstie.core.workload import ModelChoice
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import Plan, plan

from .workloads import one_class, workload

CATALOG = Catalog()
FLASH = one_class("chat", 20.0, 1500, 300, ttft=(2.0, 0.9), tpot=(0.05, 0.9), model="deepseek-v4-flash")
# Kernels of AITER, and graphs of whole decode steps only: what its rules ask for on CDNA3.
SETTINGS = ("--compilation-config.cudagraph_mode FULL_DECODE_ONLY", "VLLM_ROCM_USE_AITER=1")


@cache
def in_vllm_on_mi300x() -> Plan:
    return made(on=("mi300x",), stacks=("vllm",))


def made(*, on: tuple[str, ...], stacks: tuple[str, ...] = (), releases: dict[str, str] | None = None, **more) -> Plan:  # type: ignore[no-untyped-def]
    models = {FLASH.model: ModelChoice(precisions=("native",), stacks=stacks, releases=releases or {})}
    return plan(CATALOG, workload(FLASH, accelerators=on, models=models, **more))


def test_what_will_not_run_is_not_offered_and_is_named() -> None:
    alone = made(on=("mi300x",), stacks=("sglang",))
    assert alone.fleet is None
    (out,) = alone.will_not_run
    assert (out.model, out.accelerators, out.engine) == ("deepseek-v4-flash", ("mi300x",), "sglang 0.5.18")
    assert out.verdict == "will not run"
    assert "no FP4 experts on gfx942" in out.why
    both = made(on=("mi300x", "b200"), stacks=("sglang",))
    assert both.fleet is not None
    assert set(both.gpus) == {"b200"}
    assert [one.accelerators for one in both.will_not_run] == [("mi300x",)]


@pytest.mark.slow
def test_what_is_not_known_is_marked_and_can_be_excluded() -> None:
    plain = in_vllm_on_mi300x()
    assert {one.verdict for one in plain.readiness.values()} == {"not known"}
    assert {one.settings for one in plain.readiness.values()} == {SETTINGS}
    strict = made(on=("mi300x",), stacks=("vllm",), only_known=True)
    # What is not known is multi-token prediction over these experts: without it a rule says how they run.
    assert {one.verdict for one in strict.readiness.values()} == {"slow path"}
    assert {(one.verdict, one.why.partition(":")[0]) for one in strict.will_not_run} == {
        ("not known", "speculative-mtp")
    }


@pytest.mark.slow
def test_the_fleet_file_names_engine_release_and_settings(tmp_path: Path) -> None:
    fleet = fleet_of(in_vllm_on_mi300x())
    assert {(one.stack, one.release, one.settings) for one in fleet.pools} == {("vllm", "0.32.0", SETTINGS)}
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet))
    assert fleet_text(read_fleet(CATALOG, file)) == fleet_text(fleet)


def test_a_release_of_the_workload_is_the_one_that_is_judged(tmp_path: Path) -> None:
    old = made(on=("b200",), stacks=("vllm",), releases={"vllm": "0.10.0"})
    assert old.fleet is None
    assert {one.engine for one in old.will_not_run} == {"vllm 0.10.0"}
    text = """
name = "w"
[[class]]
name = "c"
model = "llama-3.1-8b"
requests_per_s = 1
input = 100
output = 100
[models."llama-3.1-8b"]
stacks = ["vllm==%s", "sglang"]
"""
    file = tmp_path / "w.toml"
    file.write_text(text % "0.31.0")
    choice = read_workload(CATALOG, file).models["llama-3.1-8b"]
    assert (choice.stacks, choice.releases) == (("vllm", "sglang"), {"vllm": "0.31.0"})
    file.write_text(text % "newest")
    with pytest.raises(BadData, match="is no release of an engine"):
        read_workload(CATALOG, file)
