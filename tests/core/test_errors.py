from crosstie.core.errors import BadData, UnknownName, near_names


def test_near_names_find_typos_and_parts() -> None:
    known = ["mi300x", "mi325x", "h100-sxm", "h200"]
    assert near_names("mi300", known)[0] == "mi300x"
    assert near_names("H20O", known) == ["h200"]
    assert near_names("sxm", known) == ["h100-sxm"]
    assert near_names("tpu", known) == []


def test_unknown_name_offers_and_picks_none() -> None:
    error = UnknownName("accelerator", "mi30x", ["mi300x"])
    assert "Did you mean mi300x?" in str(error)
    assert "crosstie catalog list accelerators" in str(error)


def test_bad_data_names_file_and_key() -> None:
    assert str(BadData("a.toml", "memory.capacity", "missing")) == "a.toml: memory.capacity: missing"
    assert str(BadData("a.toml", "", "not valid TOML")) == "a.toml: not valid TOML"
