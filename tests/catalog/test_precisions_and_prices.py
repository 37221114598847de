from pathlib import Path

import pytest

from crosstie.catalog.library import SHIPPED, Catalog, check_everything
from crosstie.catalog.precision import PRECISIONS, more_bits_layers
from crosstie.catalog.prices import COLUMNS, read_prices
from crosstie.core.errors import BadData, BadInput, UnknownName
from crosstie.perf.memory import weight_bytes


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_resolves_for_every_model(catalog: Catalog, name: str) -> None:
    for model in catalog.models.values():
        assert weight_bytes(model, catalog.precision(model, name)) > 0


def test_more_bits_is_never_smaller(catalog: Catalog) -> None:
    model = catalog.model("llama-3.1-70b")
    sizes = [
        weight_bytes(model, catalog.precision(model, p)) for p in ("q4_k_m", "q5_k_m", "q6_k", "fp8", "q8_0", "bf16")
    ]
    assert sizes == sorted(sizes)
    assert weight_bytes(model, catalog.precision(model, "mxfp4")) < weight_bytes(
        model, catalog.precision(model, "nvfp4")
    )


def test_scales_are_counted(catalog: Catalog) -> None:
    formats = catalog.formats
    assert formats["mxfp4"].bits == 4.25
    assert formats["nvfp4"].bits == 4.5
    assert formats["q4_k"].bytes * 256 == 144
    assert formats["q6_k"].bytes * 256 == 210
    assert formats["q8_0"].bytes * 32 == 34
    assert formats["fp8-block"].bits == 8 + 32 / 128**2


def test_llama_cpp_gives_half_of_the_layers_more_bits() -> None:
    assert more_bits_layers(32) == 16
    assert more_bits_layers(80) == 40


def test_rows_that_blocks_do_not_divide_fall_back(catalog: Catalog) -> None:
    gemma = catalog.model("gemma-4-26b-a4b")
    stored = catalog.precision(gemma, "q4_k_m")
    # 704 inner columns: no super-blocks of 256.
    assert {f.id for f in stored["experts_down"].formats} == {"q8_0", "q5_0"}
    assert stored["experts"].main.id == "q4_k"


def test_unknown_precision(catalog: Catalog) -> None:
    with pytest.raises(UnknownName, match="fp8"):
        catalog.precision(catalog.model("llama-3.1-8b"), "fp9")


def test_a_stack_must_run_on_the_vendor_and_read_the_weights(catalog: Catalog) -> None:
    model, mi300x, card = (
        catalog.model("llama-3.1-8b"),
        catalog.accelerator("mi300x"),
        catalog.accelerator("rx-7900-xtx"),
    )
    with pytest.raises(BadInput, match="TensorRT-LLM does not run on mi300x"):
        catalog.deployment(model, mi300x, stack="tensorrt-llm")
    with pytest.raises(
        BadInput,
        match=r"llama\.cpp does not read fp8 weights; atom, sglang, sglang-atom, tensorrt-llm, vllm, vllm-atom would",
    ):
        catalog.deployment(model, card, precision="fp8", stack="llama.cpp")
    # Without a name, the first engine that reads them.
    assert catalog.deployment(model, card, precision="q4_k_m").stack.id == "llama.cpp"
    assert catalog.deployment(model, card).stack.id == "vllm"


def test_a_partial_file_of_constants_overrides_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "efficiency").mkdir()
    own = '[sources]\nus = { ref = "our bench", date = "2026-10" }\n[compute]\nbf16 = { value = 0.9, unit = "fraction", basis = "measured", source = "us" }\n'
    (tmp_path / "efficiency" / "cdna3.toml").write_text(own)
    catalog = Catalog([tmp_path])
    constants = catalog.efficiency(catalog.accelerator("mi300x"))
    assert constants.compute["bf16"].value == 0.9
    assert constants.compute["fp8"].value == pytest.approx(0.42)
    assert constants.kernel.value == 4.0
    (tmp_path / "efficiency" / "hoper.toml").write_text(own)
    with pytest.raises(BadData, match="names no accelerator, family or topology"):
        check_everything(Catalog([tmp_path]))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("group = 0", "mine.group: 0 must be a whole number from 1 to 1,000,000"),
        ("element_bits = nan", "mine.element_bits: nan must be a number from 1 to 64"),
        ('runs_as = ["fp3"]', r"mine.runs_as\[0\]: 'fp3' is not one of fp32, bf16"),
        ("runs_as = []", "mine.runs_as: must be one or more"),
        ('date = "2026-99"', "not a date"),
        ("colour = 1", "mine.colour: unknown key"),
    ],
)
def test_a_bad_format_is_refused(line: str, reason: str, tmp_path: Path) -> None:
    good = {"title": '"t"', "element_bits": "4", "runs_as": '["bf16"]', "source": '"a source"', "date": '"2026-01"'}
    key, _, value = line.partition(" = ")
    body = "\n".join(f"{k} = {v}" for k, v in {**good, key: value}.items())
    (tmp_path / "formats.toml").write_text(f"[mine]\n{body}\n")
    with pytest.raises(BadData, match=reason):
        _ = Catalog([tmp_path]).formats


def test_a_catalog_that_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(BadInput, match="must be a folder"):
        Catalog([file])


ROW = "mi300x,acme,on-demand,2.0,USD/h,claimed,2026-01,somebody,"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (ROW.replace("mi300x", "mi999"), "not in the catalog"),
        (ROW.replace("on-demand", "gift"), "kind 'gift'"),
        (ROW.replace("2.0", "two"), "not a number"),
        (ROW.replace("2.0", "20000"), "slip of unit"),
        (ROW.replace("USD/h", "USD"), "slip of unit"),
        (ROW.replace("claimed", "hoped"), "basis 'hoped'"),
        (ROW.replace("somebody", ""), "source is empty"),
        (ROW.replace("2026-01", "now"), "not a date"),
        (ROW + "extra,", "must have 9 fields"),
        ("mi300x,acme", "must have 9 fields"),
    ],
)
def test_a_bad_price_names_its_line(row: str, reason: str, tmp_path: Path, catalog: Catalog) -> None:
    file = tmp_path / "prices.csv"
    file.write_text(f"{','.join(COLUMNS)}\n{row}\n")
    with pytest.raises(BadData, match=reason) as error:
        read_prices(file, catalog.accelerators)
    assert error.value.key == "line 2"


def test_a_price_file_that_is_no_text(tmp_path: Path, catalog: Catalog) -> None:
    file = tmp_path / "prices.csv"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadData, match="not UTF-8"):
        read_prices(file, catalog.accelerators)
    with pytest.raises(BadData, match="cannot be read"):
        read_prices(tmp_path, catalog.accelerators)


def test_price_columns_are_checked(tmp_path: Path, catalog: Catalog) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("accelerator,price\n")
    with pytest.raises(BadData, match="columns must be"):
        read_prices(file, catalog.accelerators)


def test_a_user_catalog_replaces_shipped_files(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    text = (SHIPPED / "stacks" / "vllm.toml").read_text().replace("value = 0.9,", "value = 0.8,")
    (tmp_path / "stacks" / "vllm.toml").write_text(text)
    assert Catalog([tmp_path]).stack("vllm").memory_fraction.value == 0.8


def test_nearer_constants_win(catalog: Catalog) -> None:
    mi325x, h200 = (catalog.efficiency(catalog.accelerator(name)) for name in ("mi325x", "h200"))
    assert mi325x.scope["compute.bf16"] == "mi325x"
    assert mi325x.scope["compute.fp8"] == "cdna3"
    assert mi325x.scope["link"] == "mesh"
    assert h200.scope["kernel"] == "hopper"
    assert h200.scope["compute.fp4"] == "default"


def test_a_users_prices_of_a_kind_take_the_place_of_the_shipped_ones(tmp_path: Path) -> None:
    row = "mi300x,us,on-demand,1.99,USD/h,claimed,2026-11-01,our contract,\n"
    (tmp_path / "prices.csv").write_text(",".join(COLUMNS) + "\n" + row)
    shipped, own = Catalog([]).prices, Catalog([tmp_path]).prices
    replaced = [price for price in own if (price.accelerator, price.kind) == ("mi300x", "on-demand")]
    assert [price.amount.value for price in replaced] == [1.99]
    assert set(shipped) - set(own) == {p for p in shipped if (p.accelerator, p.kind) == ("mi300x", "on-demand")}
