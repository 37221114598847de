"""Purchase schedules of a small workload: announced parts, growth, what is there already, and users' mistakes."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadData
from crosstie.core.schedule import quarter_name, quarter_number, quarter_of
from crosstie.core.workload import Workload
from crosstie.decide.schedule.schedule import PurchaseSchedule, purchase_schedule

TODAY = "2026-11-18"
ON = ("mi355x", "h200", "mi455x")
WORK = """
name = "chats"
[traffic]
growth_per_year = 0.5
[[class]]
name = "chat"
model = "llama-3.1-8b"
requests_per_s = 400
input = 1024
output = 256
tpot_ms = { p90 = 40 }
"""


def work(tmp_path: Path, more: str = "") -> Path:
    file = tmp_path / "work.toml"
    file.write_text(WORK + more)
    return file


@pytest.fixture(scope="module")
def usual(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory) -> tuple[Workload, PurchaseSchedule]:
    workload = read_workload(catalog, work(tmp_path_factory.mktemp("work")))
    return workload, purchase_schedule(catalog, workload, ON, today=TODAY)


def test_announced_parts_are_in_no_other_answer(catalog: Catalog) -> None:
    assert "mi455x" not in catalog.accelerators
    coming = catalog.with_announced.accelerator("mi455x")
    assert coming.announced is not None
    assert coming.announced.usd_low.value <= coming.announced.usd.value <= coming.announced.usd_high.value
    assert all(one.announced is None for one in catalog.accelerators.values())


def test_every_quarter_carries_its_traffic(usual: tuple[Workload, PurchaseSchedule]) -> None:
    _, found = usual
    assert [one.name for one in found.quarters[:2]] == ["2026Q4", "2027Q1"]
    assert len(found.quarters) == 12
    assert found.usd == pytest.approx(sum(one.usd for one in found.quarters), rel=1e-6)
    for one in found.quarters:
        carried = sum(share for kinds in one.carried.values() for share in kinds.values())
        assert carried >= one.demand[0] * 0.9
    assert found.quarters[0].demand == (1.0, 1.0, 1.0)
    # Half as much again a year.
    assert found.quarters[4].demand[0] == pytest.approx(1.5, rel=0.1)


def test_announced_parts_serve_no_sooner_than_they_are_said_to_come(
    usual: tuple[Workload, PurchaseSchedule],
) -> None:
    _, found = usual
    assert "mi455x" not in found.quarters[0].gpus
    assert 0.0 <= found.announced["mi455x"] <= 1.0
    assert found.waiting_saves >= -1e-6


def test_others_are_never_cheaper(usual: tuple[Workload, PurchaseSchedule]) -> None:
    """But for whole servers, which the others are not held to."""
    _, found = usual
    assert found.beside
    assert all(more > -0.02 * found.usd for more in found.beside.values())


def test_what_is_there_lowers_what_is_decided(catalog: Catalog, usual: tuple[Workload, PurchaseSchedule]) -> None:
    workload, found = usual
    there = msgspec.convert({"contracts": [
        {"accelerator": "mi355x", "gpus": 2, "usd_per_gpu_hour": 2.0, "until": "2027Q4"}
    ]}, type(workload.schedule))  # fmt: skip
    less = purchase_schedule(catalog, msgspec.structs.replace(workload, schedule=there), ON, today=TODAY)
    assert less.usd < found.usd
    # Five quarters of 2,191.5 hours, two GPUs at 2 USD.
    assert less.standing_usd == pytest.approx(5 * 2191.5 * 2 * 2.0, rel=1e-3)
    assert less.quarters[0].gpus["mi355x"]["there"] == 2.0


def test_quarters_are_read_and_written() -> None:
    assert quarter_name(quarter_number("2027Q3") or 0) == "2027Q3"
    assert quarter_number("Q3 2027") is None
    assert quarter_name(quarter_of("2026-12")) == "2026Q4"


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("[schedule]\nquarter = 8", "schedule.quarter", "unknown key"),
        ("[schedule]\ngrowth = [0.01]", "schedule.growth", "from 0.1"),
        ("[schedule.lead_time_months]\nmi999 = 4", "schedule.lead_time_months.mi999", "unknown accelerator"),
        ('[[schedule.deliveries]]\naccelerator = "h200"\ngpus = 8\nquarter = "soon"', "deliveries[0].quarter", "2027Q1"),
        ('[[schedule.contracts]]\naccelerator = "h200"\ngpus = 8\nusd_per_gpu_hour = 2\nuntil = "27Q1"',
         "contracts[0].until", "2027Q1"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_file_and_key(catalog: Catalog, tmp_path: Path, text: str, where: str, why: str) -> None:
    file = work(tmp_path, text)
    with pytest.raises(BadData) as raised:
        read_workload(catalog, file)
    assert str(file) in str(raised.value)
    assert where in str(raised.value)
    assert why in str(raised.value)


def test_the_command(crosstie: Command, tmp_path: Path) -> None:
    picture = tmp_path / "s.svg"
    on = ("--on", "mi355x,mi455x", "--quarters", "4")
    out = crosstie("schedule", str(work(tmp_path)), *on, "--growth", "20%", "--plot", str(picture), "--json")
    made = json.loads(out.out)
    assert len(made["quarters"]) == 4
    assert made["quarters"][1]["demand"][0] == pytest.approx(1.2, rel=0.1)
    assert made["announced"][0]["accelerator"] == "mi455x"
    assert b"<svg" in picture.read_bytes()
    bad = crosstie("schedule", str(work(tmp_path)), "--growth", "much")
    assert bad.status == 2
    assert "--growth much" in bad.err
