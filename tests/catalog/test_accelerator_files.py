"""An accelerator is one file; a file that cannot be trusted fails with its name and the key."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from crosstie.catalog.deployments import read_accelerator
from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.core.errors import BadData, UnknownName
from crosstie.perf.estimate import estimate
from crosstie.perf.hardware import compute_format

GOOD = (SHIPPED / "accelerators" / "mi300x.toml").read_text(encoding="utf-8").replace('id = "mi300x"', 'id = "made-up"')
GOOD = re.sub(r"aliases = .*", "aliases = []", GOOD, count=1)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def to_file(text: str) -> Path:
        file = tmp_path / "accelerators" / "made-up.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    return to_file


def line(key: str) -> str:
    found = re.search(rf"^{key} = .*$", GOOD, re.MULTILINE)
    assert found, key
    return found[0]


def swap(key: str, old: str, new: str) -> str:
    assert old in line(key), f"{old} is not in {line(key)}"
    return GOOD.replace(line(key), line(key).replace(old, new))


BROKEN = {
    "unknown key": (GOOD.replace("[memory]", "[memory]\nspeed = 3"), "memory.speed", "unknown key"),
    "unknown key in a fact": (swap("tdp", "basis", "colour = 1, basis"), "chip.tdp.colour", "unknown key"),
    "missing key": (GOOD.replace(line("tdp"), ""), "chip.tdp", "missing"),
    "missing source": (re.sub(r'(tdp = \{.*?), source = "[^"]*"', r"\1", GOOD), "chip.tdp.source", "needs a source"),
    "source not listed": (re.sub(r'(tdp = .*source = )"[^"]*"', r'\1"nowhere"', GOOD), "chip.tdp.source", "not in \\[sources\\]"),
    "source not cited": (GOOD.replace("[sources]", '[sources]\nidle = { ref = "x", date = "2026-01" }'), "sources.idle", "no number cites"),
    "bad date": (GOOD.replace("[sources]", '[sources]\nidle = { ref = "x", date = "soon" }'), "sources.idle.date", "not a date"),
    "no commit": (GOOD.replace("ROCm@e396b4898f docs/reference", "ROCm@main docs/reference"), "sources.arch-specs.ref", "no commit"),
    "unit of another dimension": (swap("tdp", '"W"', '"GB"'), "chip.tdp.unit", "not a unit of watts"),
    "slip of unit": (re.sub(r'^bandwidth = \{ value = 5\.3, unit = "TB/s"', 'bandwidth = { value = 5.3, unit = "GB/s"', GOOD, flags=re.M), "memory.bandwidth", "slip of unit"),
    "negative": (swap("tdp", "value = 750", "value = -750"), "chip.tdp", "outside"),
    "text for a number": (swap("tdp", "value = 750", 'value = "750"'), "chip.tdp.value", "must be a number"),
    "wrong basis": (re.sub(r'(copy_bandwidth = .*basis = )"measured"', r'\1"spec"', GOOD), "measured.copy_bandwidth.basis", "not allowed here"),
    "measured where a spec belongs": (swap("tdp", '"spec"', '"measured"'), "chip.tdp.basis", "not allowed here"),
    "a guess without a word": (swap("tdp", '"spec"', '"assumed"'), "chip.tdp.note", "say how"),
    "dialect not known": (swap("fp8_dialect", "e4m3fnuz", "e5m3"), "chip.fp8_dialect.value", "not one of"),
    "dialect without a rate": (swap("fp8_dialect", "e4m3fnuz", "none"), "dense.fp8", "does not agree"),
    "vendor not known": (swap("vendor", "AMD", "Acme"), "vendor", "not one of"),
    "id and file differ": (swap("id", "made-up", "other"), "id", "match the file name"),
    "not TOML": (GOOD + "\n[[[", "", "not valid TOML"),
    "sparse not above dense": (re.sub(r"(?s)\[sparse\].*?\n\n", '[sparse]\nbf16 = { value = 10, unit = "TFLOP/s", basis = "spec", source = "arch-specs" }\n\n', GOOD), "sparse.bf16", "must exceed"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_names_file_and_key(case: str, write: Callable[[str], Path]) -> None:
    text, key, reason = BROKEN[case]
    assert text != GOOD, "the case must differ from the good file"
    file = write(text)
    with pytest.raises(BadData, match=reason) as error:
        read_accelerator(file)
    assert error.value.file == str(file)
    assert error.value.key == key


def test_the_good_file_is_good(write: Callable[[str], Path]) -> None:
    assert read_accelerator(write(GOOD)).memory_bytes > 200e9


def test_a_made_up_accelerator_works_everywhere(write: Callable[[str], Path]) -> None:
    text = re.sub(r"(?m)^bandwidth = \{ value = 5\.3,", "bandwidth = { value = 10.6,", GOOD)
    # Facts of MI300X that its double bandwidth leaves alone.
    file = write(text)
    catalog = Catalog([file.parent.parent])
    made_up, model = catalog.accelerator("made-up"), catalog.model("llama-3.1-8b")
    assert "made-up" in catalog.accelerators

    def step(name: str) -> float:
        one = catalog.deployment(model, catalog.accelerator(name))
        return estimate(one, concurrency=1, input_tokens=512, output_tokens=128).tpot_s

    assert step("made-up") < 0.8 * step("mi300x")
    assert catalog.accelerator(str(file)) == made_up


def test_an_alias_may_not_name_two(write: Callable[[str], Path]) -> None:
    file = write(GOOD.replace("aliases = []", 'aliases = ["H200"]'))
    with pytest.raises(BadData, match="already names"):
        _ = Catalog([file.parent.parent]).accelerators


def test_names_are_exact_and_misses_offer_near_ones(catalog: Catalog) -> None:
    assert catalog.accelerator("MI300X").id == "mi300x"
    assert catalog.accelerator("H100").id == "h100-sxm"
    with pytest.raises(UnknownName) as miss:
        catalog.accelerator("mi300xx")
    assert miss.value.near[0] == "mi300x"


def test_the_shipped_accelerators(catalog: Catalog) -> None:
    assert set(catalog.accelerators) == {file.stem for file in (SHIPPED / "accelerators").glob("*.toml")}
    dialects = {name: a.chip.fp8_dialect.value for name, a in catalog.accelerators.items()}
    assert dialects["mi300x"] == dialects["mi325x"] == "e4m3fnuz"
    assert dialects["mi355x"] == dialects["h200"] == "e4m3fn"
    assert dialects["a100-80gb"] == dialects["rx-7900-xtx"] == "none"
    assert catalog.accelerator("mi300x").chip.lds.si == 65536
    assert catalog.accelerator("mi355x").chip.lds.si == 163840
    assert catalog.accelerator("mi300x").scale_up.topology.value == "mesh"
    assert catalog.accelerator("gb200").domain == 72


def test_a_part_with_16_bit_rates_alone_runs_32_bit_weights_rounded(write: Callable[[str], Path]) -> None:
    catalog = Catalog([write(re.sub(r"^fp32 = .*\n", "", GOOD, flags=re.MULTILINE)).parents[1]])
    part = catalog.accelerator("made-up")
    assert part.flop_per_s("fp32") is None
    replica = catalog.deployment(catalog.model("llama-3.1-8b"), part)
    assert compute_format(replica, catalog.formats["fp32"]) in ("bf16", "fp16")
