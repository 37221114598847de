"""`crosstie parity` on the command line: exit status, words, JSON, and one line for every slip."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.test_widths import fits
from tests.conftest import Command
from tests.prove.parity.fake_engine import Engine, served

from crosstie.prove.parity.harness import compared

QUICKLY = ("--limit", "5", "--tokens", "6")
# Where it is not about what the engines answer.
AT_ONCE = ("--limit", "1", "--tokens", "2")


@pytest.fixture
def a() -> Iterator[Engine]:
    with served(Engine()) as engine:
        yield engine


@pytest.fixture
def b() -> Iterator[Engine]:
    with served(Engine()) as engine:
        yield engine


def test_the_same_is_status_0_and_says_how_it_knows(a: Engine, b: Engine, crosstie: Command) -> None:
    said = crosstie("parity", a.url, f"{b.url}/v1", *QUICKLY)
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith(f"{a.url} (A) and {b.url}/v1 (B): the same model (toy)\n")
    assert "places forced by prompt_logprobs, top 20; A was asked twice" in said.out
    assert "-v for by position" in said.out
    details = crosstie("parity", a.url, b.url, *QUICKLY, "-v").out
    assert "by language" in details
    assert "answers that end in a loop" in details


def test_a_difference_is_status_1_and_names_what_is_likely(a: Engine, b: Engine, crosstie: Command) -> None:
    b.sharp = 2.0
    said = crosstie("parity", a.url, b.url, *QUICKLY)
    assert said.status == 1
    assert "NOT the same model" in said.out
    assert "- likely: the weights" in said.out
    # Limits are the user's; where every logit is doubled, the likeliest token stays the likeliest.
    assert crosstie("parity", a.url, b.url, *QUICKLY, "--max-kl", "50", "--min-top1", "0").status == 0
    b.sharp = 1.02
    assert crosstie("parity", a.url, b.url, *QUICKLY, "--max-kl", "0.00001").status == 1


def test_json_has_every_gauge_and_no_number_that_json_has_not(a: Engine, b: Engine, crosstie: Command) -> None:
    said = json.loads(crosstie("parity", a.url, b.url, *QUICKLY, "--json").out)
    (one,) = said["comparisons"]
    assert one["verdict"] == "same"
    names = {gauge["name"] for gauge in one["gauges"]}
    assert {"forced KL", "forced disagreement", "chat KL", "early divergence", "invalid JSON", "repetition"} <= names
    assert one["first_divergence"]["median_token"] is None
    assert one["power"]["prompts"] == 5
    assert [needed["nats"] for needed in one["power"]["needed"]] == [0.0003, 0.003, 0.03]
    assert said["admitted"] is False


def test_it_says_which_fault_it_can_see_and_how_many_prompts_one_needs(a: Engine, b: Engine, crosstie: Command) -> None:
    said = " ".join(crosstie("parity", a.url, b.url, *QUICKLY, "--fault", "0.03").out.split())
    assert "5 prompts see, in 80% of runs: no fault for sure" in said
    assert "Prompts that a fault needs: 0.03 nats: 6 to be noticed, 48 to be called a difference" in said


def test_several_are_held_against_one(a: Engine, b: Engine, crosstie: Command) -> None:
    with served(Engine(sharp=2.0)) as other:
        said = crosstie("parity", a.url, b.url, other.url, *QUICKLY, "--json")
    assert said.status == 1
    assert [one["verdict"] for one in json.loads(said.out)["comparisons"]] == ["same", "differs"]


def test_more_keys_go_into_every_request(a: Engine, b: Engine, crosstie: Command) -> None:
    body = '{"chat_template_kwargs": {"enable_thinking": false}}'
    assert crosstie("parity", a.url, b.url, "--limit", "1", "--tokens", "2", "--body", body).status == 0
    assert all(asked["chat_template_kwargs"] == {"enable_thinking": False} for _, asked in (*a.asked, *b.asked))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give B, an endpoint, or --pool NAME"),
        (("B", "--admit"), "--admit goes with --pool"),
        (("B", "--body", "[1]"), "--body: must be a JSON object"),
        (("ftp://b",), "is no http or https address"),
        (("B", "--prompts", "none.toml"), "none.toml: cannot be read"),
        (("B", "--way", "echo"), "--way echo: "),
        (("B", "--model", "toy", "--lm-eval", "gsm8k"), "pip install 'lm_eval[api]'"),
        (("B", "--pool", "x"), "no key: set CROSSTIE_ADMIN_KEY"),
    ],
)
def test_slips_are_one_line_and_status_2(
    arguments: tuple[str, ...], says: str, a: Engine, b: Engine, crosstie: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CROSSTIE_ADMIN_KEY", raising=False)
    b.ways = ("steps",)
    said = crosstie("parity", a.url, *(b.url if one == "B" else one for one in arguments))
    assert said.status == 2
    assert said.err.startswith("crosstie: ")
    assert said.err.count("\n") == 1
    assert says in said.err


# What lm_eval 0.4 writes: results by task, each metric with its filter, and its standard error beside it.
LM_EVAL = """#!{python}
import json, pathlib, sys
words = dict(zip(sys.argv[1::1], sys.argv[2::1]))
if words["--tasks"] == "bad":
    sys.exit("no such task: bad")
assert words["--model"] == "local-chat-completions" and "--apply_chat_template" in sys.argv
good = "{a}" in words["--model_args"]
into = pathlib.Path(words["--output_path"]) / "toy"
into.mkdir(parents=True)
scores = {{"alias": "sums", "exact_match,strict": 0.8 if good else {score}, "exact_match_stderr,strict": 0.02}}
(into / "results_2026.json").write_text(json.dumps({{"results": {{"sums": scores}}}}))
"""


@pytest.mark.parametrize(
    ("score", "status", "word"), [pytest.param("0.79", 0, "no worse", marks=pytest.mark.slow), ("0.3", 1, "worse")]
)
def test_scores_of_lm_eval_stand_beside_each_other(
    score: str, status: int, word: str, a: Engine, b: Engine, crosstie: Command, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    program = tmp_path / "lm_eval"
    program.write_text(LM_EVAL.format(python=os.path.realpath("/proc/self/exe"), a=a.url, score=score))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said = crosstie("parity", a.url, b.url, *AT_ONCE, "--lm-eval", "sums", "--lm-eval-limit", "5")
    assert said.status == status, said.err
    assert f"0.8000 ± 0.0200  {float(score):.4f} ± 0.0200  {word}" in said.out
    failed = crosstie("parity", a.url, b.url, *AT_ONCE, "--lm-eval", "bad")
    assert (failed.status, "no such task: bad" in failed.err) == (2, True)


def test_a_score_is_worse_by_twice_the_error_of_the_difference() -> None:
    def results(value: float) -> dict[str, dict[str, object]]:
        return {"t": {"acc,none": value, "acc_stderr,none": 0.03, "alias": "t", "other,none": 1.0}}

    (near,) = compared(results(0.5), results(0.43))
    (far,) = compared(results(0.5), results(0.41))
    assert (near.worse, far.worse, near.metric) == (False, True, "acc")


@pytest.mark.slow
def test_the_answer_prints_the_same_at_every_width(
    a: Engine, b: Engine, crosstie: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    b.sharp = 2.0
    fits(lambda: crosstie("parity", a.url, b.url, "--limit", "3", "--tokens", "4", "-v").out, monkeypatch)
