"""`crosstie tco` as a user runs it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.decide.cost.conftest import NO_ALIASES, ROUND, Priced

from crosstie.catalog.library import SHIPPED
from crosstie.catalog.prices import API_COLUMNS
from crosstie.decide.cost.assessment import assess
from crosstie.decide.cost.ownership import Costs, Option
from crosstie.decide.cost.ranges import exactly
from crosstie.web.tco_chart import tornado

ASK = ["tco", "llama-3.1-70b", "--precision", "fp8", "--samples", "500"]
BOTH = [*ASK, "--on", "mi325x,h200", "--gpus", "800", "--purchase", "mi325x=22000", "--purchase", "h200=35000"]


def asked(crosstie: Command, *arguments: str) -> dict[str, Any]:
    got = crosstie(*arguments, "--json")
    assert got.status == 0, got.err
    found: dict[str, Any] = json.loads(got.out)
    return found


def test_the_bill_adds_up(crosstie: Command) -> None:
    got = asked(crosstie, *BOTH, "--discount", "14%", "--engineers", "mi325x=2", "--engineer-usd", "280000")
    amd, nvidia = got["options"]
    assert amd["usd"]["engineers"] == 2 * 280_000 * 3
    assert nvidia["usd"]["engineers"] == 0
    assert amd["total_usd"] == pytest.approx(sum(amd["usd"].values()))
    seconds = 3 * 8760 * 3600
    tokens = 800 * amd["estimate"]["output_tokens_per_s_per_gpu"] * 0.6 * seconds
    assert amd["usd_per_mtok"] == pytest.approx(amd["total_usd"] / tokens * 1e6)
    assert sum(option["cheapest_in"] for option in got["options"]) == pytest.approx(1.0)
    low, high = amd["usd_per_mtok_80"]
    assert low < amd["usd_per_mtok"] < high


def test_discounts_of_all_and_of_one(crosstie: Command) -> None:
    got = asked(crosstie, *BOTH, "--discount", "14%", "--discount", "mi325x=0.18")
    assert [option["discount"] for option in got["options"]] == [pytest.approx(0.18), pytest.approx(0.14)]


def test_settings_of_all_and_of_one(crosstie: Command) -> None:
    got = asked(crosstie, *BOTH, "--set", "pue=1.2", "--set", "mi325x:pue=1.1", "--set", "utilisation=50%")
    assert [option["overrides"]["pue"] for option in got["options"]] == [1.1, 1.2]
    assert got["options"][0]["overrides"]["utilisation"] == 0.5
    assert not any(bar["key"] == "pue" for bar in got["tornado"])


def test_a_table_and_sentences_for_a_meeting(crosstie: Command) -> None:
    got = crosstie(*BOTH, "--discount", "14%", "-v")
    assert got.status == 0
    for said in (
        "800 GPUs of each, owned for 3 years", "accelerators: value lost", "per million output tokens",
        "mi325x costs", "less than h200", "draws level with mi325x at", "engineers", "What moves it most",
        "price given", "has run nothing on AMD",
    ):  # fmt: skip
        assert said in got.out, said


def test_a_lone_price_of_the_catalog_gets_a_fifth_either_way(crosstie: Command, ours: Priced) -> None:
    ours(("shop", 30_000, "2026-08"))
    got = crosstie(*ASK, "--on", "ours", "-v")
    assert (
        "ours: purchase price $30,000, $24,000 to $36,000 (one source, so a fifth either way is assumed): "
        "shop $30,000 (claimed, 2026-08)"
    ) in got.out
    ours(("shop", 30_000, "2026-08"), ("street", 30_000, "2026-09"))
    assert "$24,000 to $36,000 (2 prices that agree, so a fifth" in crosstie(*ASK, "--on", "ours", "-v").out


def test_prices_of_the_catalog_are_a_range_with_sources(crosstie: Command, ours: Priced) -> None:
    ours(
        ("shop", 30_000, "2026-08"),
        ("street", 20_000, "2025-03"),
        ("street", 26_000, "2025-03"),
        ("list", 40_000, "2026-11"),
    )
    got = crosstie(*ASK, "--on", "ours", "-v")
    assert (
        "ours: purchase price $30,000, $20,000 to $40,000 (that of shop, the middle of 3 sources, 4 prices): shop "
        "$30,000 (claimed, 2026-08); street $20,000 (claimed, 2025-03); street $26,000 (claimed, 2025-03); list $40,000 "
        "(claimed, 2026-11)"
    ) in got.out
    assert re.search(r"price of one +\$30,000 *\n +from what to what +\$20,000 to \$40,000 *\n", got.out)
    assert "from what to what" not in crosstie(*ASK, "--on", "ours", "--purchase", "ours=30000", "-v").out


def test_the_samples_use_the_range_of_prices(crosstie: Command, ours: Priced) -> None:
    ours(("low", 20_000, "2026-08"), ("middle", 30_000, "2026-08"), ("high", 40_000, "2026-08"))
    exact = [part for key, (value, _) in ROUND.items() for part in ("--set", f"{key}={value}")]
    got = asked(crosstie, *ASK, "--on", "ours", *exact)
    bars = {bar["key"]: bar for bar in got["tornado"]}
    assert (bars["purchase_usd"]["low"], bars["purchase_usd"]["high"]) == (20_000, 40_000)
    option = got["options"][0]
    assert [option["price"][key] for key in ("low", "usd", "high", "prices")] == [20_000, 30_000, 40_000, 3]
    assert len(option["price_sources"]) == 3
    # Without the price's range only the throughput's interval is left.
    given = asked(crosstie, *ASK, "--on", "ours", *exact, "--purchase", "ours=30000")["options"][0]
    assert given["usd_per_mtok"] == option["usd_per_mtok"]
    (low, high), (near_low, near_high) = option["usd_per_mtok_80"], given["usd_per_mtok_80"]
    assert high / low > near_high / near_low


def test_shipped_prices_are_ranges(crosstie: Command) -> None:
    option = asked(crosstie, *ASK, "--on", "h200")["options"][0]
    price = option["price"]
    assert price["low"] < price["usd"] < price["high"]
    assert price["prices"] == len(option["price_sources"]) > 1
    assert (price["provider"], price["date"]) in [(p["provider"], p["amount"]["date"]) for p in option["price_sources"]]


@pytest.mark.slow
def test_three_accelerators_and_one(crosstie: Command) -> None:
    assert len(asked(crosstie, *ASK, "--on", "mi300x,h200,h100-sxm")["ranking"]) == 3
    alone = asked(crosstie, *ASK, "--on", "h200")
    assert alone["saving_interval"] is None
    assert alone["break_evens"] == []
    assert alone["tornado"][0]["key"] == "utilisation"
    assert "cheapest in" not in crosstie(*ASK, "--on", "h200").out


def test_rent_api_and_waiting(crosstie: Command) -> None:
    extra = ["--rent", "--rent-usd", "mi325x=2.5", "--api-input", "0.5", "--api-output", "1.5"]
    wait = ["--wait", "mi355x,months=9,speedup=2.4,usd=35000,slip=3"]
    got = asked(crosstie, *BOTH, *extra, *wait)
    kinds = [(r["accelerator"], r["rent"]["kind"]) for r in got["rent_or_buy"]]
    assert kinds == [
        ("mi325x", "given"), ("mi325x", "modelled-3-years"),
        ("h200", "on-demand"), ("h200", "reserved"), ("h200", "modelled-3-years"),
    ]  # fmt: skip
    assert got["rent_or_buy"][0]["rent"]["usd"] == 2.5
    # 4,096 in for 1,024 out: four times 0.50 and 1.50.
    against = {each["accelerator"]: each["at"] for each in got["api"]["host_or_api"]}
    assert [choice["api_usd_per_mtok"] for choice in against["h200"]] == pytest.approx([3.5, 3.5, 3.5])
    assert got["api"]["price"]["is_given"]
    assert got["api"]["price_sources"] == []
    assert got["buy_or_wait"]["gpus_later"] == pytest.approx(800 / 2.4)
    told = " ".join(got["verdicts"])
    for said in (
        "Rent mi325x at $2.50 an hour (given)",
        "than the contract",
        "of all hours",
        "beats the API",
        "Waiting for mi355x wins",
    ):
        assert said in told, said
    quarterly = asked(crosstie, *BOTH, "--wait", "mi355x,months=9,speedup=2.4,usd=35000,quarterly=0.5")
    assert quarterly["buy_or_wait"] != got["buy_or_wait"]


def test_what_providers_charge(crosstie: Command, tmp_path: Path) -> None:
    """Nobody sells the user's own model; then three do.

    Four tokens in for one out: 1.00 + 4 x 0.25 = 2.00, 4.00 + 4 x 1.00 = 8.00 and 20 + 4 x 5 = 40.
    """
    folder = tmp_path / "user-catalog"
    (folder / "models").mkdir(parents=True)
    shipped = (SHIPPED / "models" / "llama-3.1-8b.toml").read_text().replace('id = "llama-3.1-8b"', 'id = "our-tune"')
    (folder / "models" / "our-tune.toml").write_text(NO_ALIASES.sub("aliases = []", shipped))
    ask = ["tco", "our-tune", "--on", "h200", "--gpus", "64", "--purchase", "h200=50000", "--samples", "500"]
    refused = crosstie(*ask, "--api")
    assert (refused.status, refused.out) == (2, "")
    assert refused.err == (
        "crosstie: --api: the catalog has no API price of our-tune: give one with --api-input USD --api-output USD\n"
    )
    rows = ["our-tune,ann,0.25,1,claimed,2026-08,a test,", "our-tune,bob,1,4,claimed,2026-09,a test,"]
    rows.append("our-tune,cas,5,20,claimed,2026-10,another test,")
    (folder / "api_prices.csv").write_text("\n".join([",".join(API_COLUMNS), *rows, ""]))
    got = asked(crosstie, *ask, "--api")
    price, at = got["api"]["price"], got["api"]["host_or_api"][0]["at"]
    assert [price[key] for key in ("low", "usd", "high", "prices")] == [2.0, 8.0, 40.0, 3]
    assert price["providers"] == {"ann": 2.0, "bob": 8.0, "cas": 40.0}
    assert [row["provider"] for row in got["api"]["price_sources"]] == ["ann", "bob", "cas"]
    option = got["options"][0]
    day = option["total_usd"] / (3 * 365)
    can = 64 * option["estimate"]["output_tokens_per_s_per_gpu"] * 86_400
    for choice, usd in zip(at, (2.0, 8.0, 40.0), strict=True):
        assert choice["break_even_tokens_per_day"] == pytest.approx(day / usd * 1e6)
        assert choice["break_even_utilisation"] == pytest.approx(day / usd * 1e6 / can)
    told = " ".join(got["verdicts"])
    for said in (
        "APIs sell our-tune at $2.00 (ann) to $40.00 (cas) per million output tokens, prompts included, median $8.00 "
        "(3 providers, 3 prices, 2026-08 to 2026-10).",
        "level with the median at", "of what the fleet can do", "with the cheapest at", "with the dearest at",
    ):  # fmt: skip
        assert said in told, said
    assert "API prices: a test; another test" in crosstie(*ask, "--api", "-v").out
    own = asked(crosstie, *ask, "--api", "--api-input", "0.5", "--api-output", "1.5")
    assert own["api"]["price"]["usd"] == 3.5
    assert "APIs sell" not in " ".join(own["verdicts"])


def test_shipped_api_prices(crosstie: Command) -> None:
    got = asked(crosstie, *ASK, "--on", "h200", "--api")
    price = got["api"]["price"]
    assert 0 < price["low"] < price["usd"] < price["high"]
    assert len(price["providers"]) > 5
    assert {row["model"] for row in got["api"]["price_sources"]} == {"llama-3.1-70b"}
    assert asked(crosstie, *ASK, "--on", "h200")["api"] is None


def test_what_never_pays_is_said_so(crosstie: Command) -> None:
    cheap = ["--rent", "--rent-usd", "h200=0.3", "--api-input", "0", "--api-output", "0.01"]
    told = " ".join(asked(crosstie, *ASK, "--on", "h200", *cheap)["verdicts"])
    assert "renting wins even around the clock" in told
    assert "The API beats h200" in told
    late = "h200,months=30,speedup=1,usd=90000"
    told = " ".join(asked(crosstie, *ASK, "--on", "h200", "--rent-usd", "h200=9", "--wait", late)["verdicts"])
    assert "Buying h200 now wins" in told
    assert "at no speed-up would waiting win" in told


@pytest.mark.slow
def test_vary_moves_everything_alike(crosstie: Command) -> None:
    got = asked(crosstie, *BOTH, "--vary", "20%")
    bars = {bar["key"]: bar for bar in got["tornado"]}
    assert bars["usd_per_kwh"]["high"] / bars["usd_per_kwh"]["low"] == pytest.approx(1.2 / 0.8)
    assert "purchase_usd" not in bars
    # What is not chosen stays as unsure as it is, and with it the saving.
    assert "output_tokens_per_s_per_gpu" in bars
    still = asked(crosstie, *BOTH, "--vary", "0%")
    assert {bar["key"] for bar in still["tornado"]} == {"output_tokens_per_s_per_gpu", "gpu_busy_watts"}
    low, high = still["saving_interval"]
    assert high - low > 0.1


@pytest.mark.slow
def test_a_seed_is_the_same_answer(crosstie: Command) -> None:
    first, again, other = (crosstie(*BOTH, "--seed", seed).out for seed in ("3", "3", "4"))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("arguments", "word"), [(BOTH, "saving"), pytest.param([*ASK, "--on", "h200"], "USD", marks=pytest.mark.slow)]
)
def test_tco_draws_a_picture(crosstie: Command, tmp_path: Path, arguments: list[str], word: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "x.svg"
    got = crosstie(*arguments, "--plot", str(file))
    assert got.status == 0
    assert f"drawn as {file}" in got.err
    assert word in file.read_text()
    assert crosstie(*BOTH, "--plot", str(tmp_path / "x.txt")).status == 2


def test_exact_inputs_leave_no_picture(h200_fleet: Option, exact_costs: Costs) -> None:
    exact = replace(h200_fleet, output_tokens_per_s_per_gpu=exactly(100.0))
    assert tornado(assess([exact], exact_costs, 3.0, samples=100)) is None


def test_a_user_s_own_assumptions(crosstie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "user-catalog"
    folder.mkdir()
    (folder / "costs.toml").write_text(
        '[sources]\nours = { ref = "our contract", date = "2026-11" }\n'
        '[costs.usd_per_kwh]\nlikely = { value = 0.0, unit = "USD/kWh", basis = "claimed", source = "ours" }\n'
    )
    got = asked(crosstie, *BOTH)
    assert got["options"][0]["usd"]["power"] == 0.0
    refused = crosstie("catalog", "add", str(folder / "costs.toml"))
    assert (refused.status, "costs are one file" in refused.err) == (2, True)


def test_status_1_when_nothing_runs(crosstie: Command) -> None:
    got = crosstie("tco", "kimi-k3", "--on", "rtx-4090", "--purchase", "rtx-4090=2000")
    assert (got.status, "none can run it" in got.err) == (1, True)


def test_what_cannot_run_is_named_beside_what_can(crosstie: Command) -> None:
    got = crosstie("tco", "llama-3.1-405b", "--on", "rtx-4090,h200", "--purchase", "h200=30000", "--tp", "8")
    assert got.status == 0
    assert "rtx-4090: " in got.out


def test_an_accelerator_from_a_file(crosstie: Command, tmp_path: Path) -> None:
    shipped = (SHIPPED / "accelerators" / "h200.toml").read_text()
    file = tmp_path / "ours.toml"
    file.write_text(shipped.replace('id = "h200"', 'id = "ours"'))
    got = asked(crosstie, *ASK, "--on", f"{file},mi300x", "--purchase", "ours=20000", "--set", "ours:pue=1.1")
    assert got["options"][0]["price"]["usd"] == 20_000


def test_the_shape_of_the_json(crosstie: Command) -> None:
    wait = "b200,months=6,speedup=2,usd=40000,slip=3"
    got = asked(crosstie, *ASK, "--on", "mi300x,h200", "--rent", "--api", "--wait", wait)
    assert set(got) == {
        "model", "load", "years", "options", "problems", "ranking", "saving_interval", "samples", "seed", "tornado",
        "break_evens", "rent_or_buy", "api", "buy_or_wait", "verdicts", "assumptions", "reckoned",
    }  # fmt: skip
    assert set(got["api"]) == {"price", "price_sources", "host_or_api"}
    assert [each["accelerator"] for each in got["api"]["host_or_api"]] == ["mi300x", "h200"]
    assert all(len(each["at"]) == 3 for each in [*got["api"]["host_or_api"], *got["rent_or_buy"]])
    plain = asked(crosstie, *ASK, "--on", "mi300x,h200")
    assert set(plain) == set(got)
    assert (plain["api"], plain["buy_or_wait"], plain["rent_or_buy"]) == (None, None, [])


def test_gpus_beside_whole_replicas_are_named(crosstie: Command) -> None:
    said = "h200: a replica takes 2, so 1 of 7 GPUs is paid for and without work."
    assert said in crosstie(*ASK, "--on", "h200", "--gpus", "7", "--tp", "2").out
    assert "without work" not in crosstie(*ASK, "--on", "h200", "--gpus", "8", "--tp", "2").out


def test_the_help_of_tco_shows_an_example(crosstie: Command) -> None:
    got = crosstie("tco", "--help")
    assert "--purchase mi325x=22000" in " ".join(got.out.split())
