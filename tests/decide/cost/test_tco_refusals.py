"""What `crosstie tco` refuses, and how: one line that says what to do, status 2, nothing on stdout."""

import pytest
from tests.conftest import Command
from tests.decide.cost.conftest import Priced

WRONG = {
    "price of a stranger": (["--on", "h200", "--purchase", "mi300x=1"], "not among --on"),
    "price of nothing known": (["--on", "h200", "--purchase", "h2000=1"], "unknown accelerator"),
    "no number": (["--on", "h200", "--purchase", "h200=much"], "'much' is not a number"),
    "not finite": (["--on", "h200", "--purchase", "h200=inf"], "not a finite number"),
    "no assignment": (["--on", "h200", "--purchase", "35000"], "write NAME=VALUE"),
    "twice": (["--on", "h200", "--purchase", "h200=1", "--purchase", "h200=2"], "given twice"),
    "free": (["--on", "h200", "--purchase", "h200=0"], "from 0.01 to"),
    "discount": (["--on", "h200", "--discount", "120%"], "below 100%"),
    "two discounts": (["--on", "h200", "--discount", "1%", "--discount", "2%"], "twice without a name"),
    "word for a discount": (["--on", "h200", "--discount", "some"], "--discount some: 'some' is not a number"),
    "unknown setting": (["--on", "h200", "--set", "puee=1.2"], "did you mean pue"),
    "setting beyond reason": (["--on", "h200", "--set", "usd_per_kwh=9"], "from 0 to 1 USD/kWh"),
    "setting of a stranger": (["--on", "h200", "--set", "mi300x:pue=1.2"], "not among --on"),
    "set twice": (["--on", "h200", "--set", "engineer_usd_per_year=5", "--engineer-usd", "6"], "given twice"),
    "too few GPUs": (["--on", "h200", "--gpus", "4", "--tp", "8"], "one replica on h200 takes 8"),
    "no GPUs": (["--on", "h200", "--gpus", "0"], "takes 1"),
    "no years": (["--on", "h200", "--years", "0"], "horizon"),
    "few samples": (["--on", "h200", "--samples", "5"], "samples"),
    "half an API": (["--on", "h200", "--api-input", "1"], "go together"),
    "free API": (["--on", "h200", "--api-input", "0", "--api-output", "0"], "API prices"),
    "wait for what": (["--on", "h200", "--wait", "months=3"], "--wait months=3: write B,months"),
    "wait how long": (["--on", "h200", "--wait", "b200,speedup=2,usd=1"], "not announced in the catalog: give months"),
    "wait with a typo": (["--on", "h200", "--wait", "b200,months=1,speedup=2,usd=1,slipp=2"], "write B,months"),
    "wait backwards": (["--on", "h200", "--wait", "b200,months=-1,speedup=2,usd=1"], "must be from 0"),
    "vary by a word": (["--on", "h200", "--vary", "much"], "not a number"),
    "vary by more than all": (["--on", "h200", "--vary", "150%"], "from 0% to below 100%"),
    "negative people": (["--on", "h200", "--engineers", "h200=-1"], "from 0 to"),
    "API of no number": (["--on", "h200", "--api-input", "nan", "--api-output", "1"], "API prices"),
    "endless years": (["--on", "h200", "--years", "nan"], "horizon"),
    "too many GPUs": (["--on", "h200", "--gpus", "1" + "0" * 30], "from 1 to"),
    "too dear": (["--on", "h200", "--purchase", "h200=1e308"], "to 10,000,000"),
    "rent below nothing": (["--on", "h200", "--rent", "--rent-usd", "h200=-1"], "from 0.001 to"),
    "bridge for nothing": (
        ["--on", "h200", "--rent-usd", "h200=0", "--wait", "b200,months=1,speedup=2,usd=1"], "from 0.001 to"
    ),
    "no flag": (["--on", "h200", "--apis"], "No such option"),
    "no model beside the accelerator": (["--on", "h200", "llama-3.1-8b"], "extra argument"),
    "no accelerator": (["--on", ","], "names no accelerator"),
    "a part that nobody makes": (["--on", "h2000"], "unknown accelerator 'h2000'"),
    "GPUs in words": (["--on", "h200", "--gpus", "many"], "not a valid integer"),
    "fewer GPUs than none": (["--on", "h200", "--gpus", "-5"], "takes 1"),
    "a price below nothing": (["--on", "h200", "--purchase", "h200=-5"], "from 0.01 to"),
    "next to free": (["--on", "h200", "--purchase", "h200=1e-320"], "from 0.01 to"),
    "a discount below nothing": (["--on", "h200", "--discount", "-5%"], "from 0%"),
    "years backwards": (["--on", "h200", "--years", "-1"], "horizon of -1 years"),
    "years without end": (["--on", "h200", "--years", "1e400"], "at most 20"),
    "hardly a moment": (["--on", "h200", "--years", "1e-300"], "a day or more"),
    "no samples": (["--on", "h200", "--samples", "0"], "0 samples: must be from 100"),
    "samples below none": (["--on", "h200", "--samples", "-1"], "-1 samples"),
    "samples without end": (["--on", "h200", "--samples", "99999999"], "to 1,000,000"),
    "a seed below nothing": (["--on", "h200", "--seed", "-1"], "--seed"),
    "half an API beside others": (["--on", "h200", "--api", "--api-output", "1"], "go together"),
    "API below nothing": (["--on", "h200", "--api", "--api-input", "-1", "--api-output", "1"], "input from 0"),
    "next to a free API": (["--on", "h200", "--api-input", "0", "--api-output", "1e-300"], "output from 0.001"),
    "API of a fortune": (["--on", "h200", "--api-input", "1e308", "--api-output", "1e308"], "at most 10,000"),
    "rent next to free": (["--on", "h200", "--rent", "--rent-usd", "h200=1e-320"], "from 0.001 to"),
    "rent that nobody asked for": (["--on", "h200", "--rent-usd", "h200=2"], "without --rent or --wait"),
    "wait for nothing": (["--on", "h200", "--wait", ""], "write B,months"),
    "wait without a price": (["--on", "h200", "--wait", "b200,months=6,speedup=2"], "not announced in the catalog: give usd"),
    "wait for no speed": (["--on", "h200", "--wait", "b200,months=6,speedup=0,usd=4"], "speed-up of 0x"),
    "wait for a gift": (["--on", "h200", "--wait", "b200,months=6,speedup=2,usd=0"], "a price of 0 USD for b200"),
    "wait twice": (["--on", "h200", "--wait", "b200,months=6,months=7,speedup=2,usd=4"], "given twice"),
    "wait for a stranger": (["--on", "h200", "--wait", "b2000,months=6,speedup=2,usd=4"], "unknown accelerator"),
    "wait for good": (["--on", "h200", "--wait", "b200,months=6,speedup=2,usd=4,quarterly=1"], "below 1"),
    "slip both ways": (["--on", "h200", "--wait", "b200,months=6,speedup=2,usd=4,slip=1,quarterly=0.1"], "write B,months"),
    "a word for months": (["--on", "h200", "--wait", "b200,months=soon,speedup=2,usd=4"], "'soon' is not a number"),
    "a picture in no folder": (["--on", "h200", "--plot", "/nowhere/x.svg"], "cannot be written"),
    "a picture of no kind": (["--on", "h200", "--plot", "x.txt"], "must end in"),
    "no tokens out": (["--on", "h200", "--output", "0"], "output 0"),
    "too many tokens": (["--on", "h200", "--input", "1" + "0" * 30], "beyond the"),
    "nothing in flight": (["--on", "h200", "--concurrency", "0"], "concurrency 0"),
}  # fmt: skip


# A third of them in a quick run: each reads the catalog.
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(*case, id=name, marks=pytest.mark.slow if place % 3 else [])
        for place, (name, case) in enumerate(WRONG.items())
    ],
)
def test_nonsense_is_one_line_and_status_2(crosstie: Command, arguments: list[str], said: str) -> None:
    got = crosstie("tco", "llama-3.1-8b", *arguments)
    assert got.status == 2
    assert said in got.err
    assert got.err.count("\n") == 1
    assert got.out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the catalog has no purchase price of ours: give one with --purchase ours=USD"),
        (["--purchase", "ours=9", "--rent"], "the catalog has no rent of ours: give one with --rent-usd ours=USD"),
        (
            ["--purchase", "ours=9", "--wait", "h200,months=1,speedup=2,usd=9"],
            "the catalog has no rent of ours: give one with --rent-usd ours=USD",
        ),
    ],
)
def test_what_the_catalog_has_no_price_of(crosstie: Command, ours: Priced, arguments: list[str], said: str) -> None:
    ours()
    got = crosstie("tco", "llama-3.1-8b", "--on", "ours", *arguments)
    assert (got.status, got.out, got.err) == (2, "", f"crosstie: {said}\n")


@pytest.mark.parametrize("usd", [pytest.param("0.01", marks=pytest.mark.slow), "10000000"])
def test_the_ends_of_what_is_allowed_are_answered(crosstie: Command, usd: str) -> None:
    """Every number that passes the checks gives finite ones, even with all other bills at nothing."""
    nothing = [part for key in ("server_usd_per_gpu", "network_usd_per_gpu", "hosting_usd_per_kw_month", "usd_per_kwh",
                                "support_per_year", "capital_per_year") for part in ("--set", f"{key}=0")]  # fmt: skip
    got = crosstie(
        "tco", "llama-3.1-8b", "--on", "h200,mi300x", "--purchase", f"h200={usd}", "--purchase", f"mi300x={usd}",
        *nothing, "--rent", "--rent-usd", "h200=0.001", "--rent-usd", "mi300x=10000", "--api-input", "0", "--api-output",
        "0.001", "--wait", f"b200,months=0,speedup=1000,usd={usd}", "--samples", "100", "--years", "0.01", "--json",
    )  # fmt: skip
    assert (got.status, got.err) == (0, "")
