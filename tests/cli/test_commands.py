"""The command line as a user meets it: answers, JSON, exit status, and one line for every mistake."""

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.library import SHIPPED
from crosstie.core.figures import seconds

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "vocab_size": 1000, "max_position_embeddings": 2048,
}  # fmt: skip


def test_fit_says_what_fits_where(crosstie: Command) -> None:
    got = crosstie("fit", "llama-3.1-70b", "--on", "mi300x,h100-sxm")
    assert got.status == 0
    assert "weights 141.1 GB" in got.out
    assert "320.0 KiB a token" in got.out
    assert re.search(r"mi300x +1 +TP1 +141.1 GB", got.out)
    assert re.search(r"h100-sxm +4 +TP4 +35.3 GB", got.out)


def test_fit_as_json_has_its_keys(crosstie: Command) -> None:
    got = json.loads(crosstie("fit", "deepseek-v3", "--on", "mi355x", "--kv", "fp8", "--json").out)
    assert got["parameters"] == 671_026_419_200
    assert got["sizes"][0]["kv_bytes_per_token"] == 61 * 576
    first = got["placements"][0]
    assert (first["accelerator"], first["fewest"], first["fits"]) == ("mi355x", True, True)
    assert first["weight_bytes_per_gpu"] + first["engine_bytes_per_gpu"] + first[
        "kv_bytes_left_per_gpu"
    ] == pytest.approx(first["memory_bytes"])


def test_a_layout_that_some_cannot_have_does_not_spoil_the_rest(crosstie: Command) -> None:
    got = crosstie("fit", "llama-3.1-8b", "--tp", "8")
    assert got.status == 0
    assert "gh200: 8 GPUs in one stage exceed the 1" in got.out
    card = crosstie("compare", "llama-3.1-8b", "--on", "mi300x,h100-nvl", "--tp", "8")
    assert card.status == 0
    assert "h100-nvl: 8 GPUs in one stage exceed the 2" in card.out
    assert crosstie("compare", "llama-3.1-8b", "--on", "gh200,h100-nvl", "--tp", "8").status == 2


def test_names_given_twice_count_once(crosstie: Command) -> None:
    got = json.loads(crosstie("compare", "llama-3.1-8b", "--on", "h200,H200,h200-sxm", "--json").out)
    assert len(got["entries"]) == 1
    sizes = json.loads(crosstie("fit", "llama-3.1-8b", "--on", "h200", "--precision", "bf16,BF16,native", "--json").out)
    assert len(sizes["sizes"]) == 1


def test_a_folder_does_not_hide_the_catalog(crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").mkdir()
    assert crosstie("fit", "llama-3.1-8b", "--on", "h200").status == 0
    assert "config.json: no such file" in crosstie("fit", "./llama-3.1-8b", "--on", "h200").err


def test_more_stages_where_the_load_needs_them(crosstie: Command) -> None:
    got = json.loads(
        crosstie(
            "compare",
            "llama-3.1-405b",
            "--precision",
            "fp8",
            "--on",
            "h100-sxm",
            "--input",
            "8192",
            "--output",
            "2048",
            "--json",
        ).out
    )
    entry = got["entries"][0]
    assert entry["deployment"]["pp"] > 1
    assert entry["estimate"]["concurrency_that_fits"] >= 64


def test_the_engine_limit_is_not_called_memory(crosstie: Command) -> None:
    got = json.loads(
        crosstie(
            "compare",
            "llama-3.1-8b",
            "--on",
            "mi300x,h200",
            "--input",
            "16",
            "--output",
            "16",
            "--concurrency",
            "5000",
            "--json",
        ).out
    )
    assert {e["estimate"]["decode_bound"] for e in got["entries"]} == {"engine limit"}
    assert not any("has room for" in sentence for sentence in got["verdicts"])


def test_fit_on_everything(crosstie: Command) -> None:
    got = json.loads(crosstie("fit", "llama-3.1-8b", "--json").out)
    assert {p["accelerator"] for p in got["placements"]} == {file.stem for file in SHIPPED.glob("accelerators/*.toml")}
    only = json.loads(crosstie("fit", "llama-3.1-8b", "--stack", "tensorrt-llm", "--json").out)
    assert not any(p["accelerator"].startswith("mi") for p in only["placements"])


def test_status_1_when_nothing_fits(crosstie: Command) -> None:
    assert crosstie("fit", "kimi-k3", "--on", "rtx-4090").status == 1
    got = crosstie("compare", "kimi-k3", "--on", "rtx-4090", "--json")
    assert got.status == 1
    assert json.loads(got.out)["entries"][0]["estimate"] is None


def test_compare_answers(crosstie: Command) -> None:
    got = crosstie(
        "compare", "llama-3.1-70b", "--on", "mi300x,h200", "--input", "4096", "--output", "1024", "--concurrency", "64",
        "-v",
    )  # fmt: skip
    assert got.status == 0
    for word in (
        "TTFT",
        "TPOT",
        "requests that fit",
        "decode bound by",
        "of its roofline",
        "bookkeeping's share",
        "the host's share",
        "its ceiling",
        "80% interval",
        "measured points of this model",
    ):
        assert word in got.out
    assert "h200 gives" in got.out
    assert "\x1b" not in got.out


def test_compare_says_which_ttft_it_means(crosstie: Command) -> None:
    """Steady arrivals in the table, and under it what all clients at once would have; with details, in a row."""
    asked = ("compare", "llama-3.1-8b", "--concurrency", "64", "--on")
    both = [one["estimate"] for one in json.loads(crosstie(*asked, "mi300x,h200", "--json").out)["entries"]]
    bursts = [seconds(one["ttft_burst_s"]) for one in both]
    assert all(one["ttft_burst_s"] > one["ttft_s"] for one in both)
    said = "TTFT: steady arrivals; if all 64 clients begin at once, as most benchmarks do:"
    lines = crosstie(*asked, "mi300x,h200").out
    assert f"{said} mi300x {bursts[0]}, h200 {bursts[1]}" in " ".join(lines.split())
    alone = " ".join(crosstie(*asked, "h200").out.split())
    assert f"TTFT: steady arrivals; {bursts[1]} if all 64 clients begin at once" in alone
    (row,) = [line for line in crosstie(*asked, "h200", "-v").out.splitlines() if "all clients at once" in line]
    assert row.split()[-2:] == bursts[1].split()
    assert "at once" not in crosstie("compare", "llama-3.1-8b", "--concurrency", "1", "--on", "h200").out


@pytest.mark.slow
def test_a_sweep_as_table_json_and_picture(crosstie: Command, tmp_path: Path) -> None:
    picture = tmp_path / "curve.svg"
    arguments = ["compare", "llama-3.1-8b", "--on", "mi300x,h200", "--sweep"]
    got = crosstie(*arguments, "--plot", str(picture))
    assert got.status == 0
    assert "tokens/s per user" in got.out
    assert f"drawn as {picture}" in got.err
    drawn = picture.read_text()
    assert drawn.count("mi300x") >= 1
    assert "predicted, not measured" in drawn
    swept = json.loads(crosstie(*arguments, "--json").out)["sweep"]
    assert [c["accelerator"] for c in swept] == ["mi300x", "h200"]
    assert len(swept[0]["concurrency"]) == len(swept[0]["ttft_s"])


def test_a_picture_that_cannot_be_drawn(crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["compare", "llama-3.1-8b", "--on", "h200", "--plot"]
    assert "must end in .svg, .png, .pdf" in crosstie(*arguments, str(tmp_path / "curve.txt")).err
    assert "cannot be written" in crosstie(*arguments, str(tmp_path / "nowhere" / "curve.svg")).err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert ".[plot]" in crosstie(*arguments, str(tmp_path / "curve.svg")).err
    assert not list(tmp_path.glob("curve*"))


def test_compare_as_json(crosstie: Command) -> None:
    got = json.loads(
        crosstie("compare", "mixtral-8x7b", "--on", "mi300x,h200", "--tp", "2", "--stack", "sglang", "--json").out
    )
    assert got["load"] == {"concurrency": 64, "input_tokens": 4096, "output_tokens": 1024}
    estimate = got["entries"][0]["estimate"]
    assert estimate["output_tokens_per_s"] == pytest.approx(2 * estimate["output_tokens_per_s_per_gpu"])
    assert got["entries"][0]["deployment"]["stack"] == "sglang"
    assert len(got["verdicts"]) == 1


def test_a_number_and_its_source_in_one_command(crosstie: Command) -> None:
    got = crosstie("catalog", "show", "h100-sxm", "dense.fp8")
    assert got.status == 0
    assert "1,979 TFLOP/s" in got.out
    assert "spec" in got.out
    facts = json.loads(crosstie("catalog", "show", "b200", "memory.bandwidth", "--json").out)["facts"]
    assert facts[0]["value"] == 7.7
    assert any("another source says 8 TB/s" in note for note in facts[0]["notes"])


@pytest.mark.parametrize("kind", ["accelerators", "models", "stacks", "formats", "precisions", "prices"])
def test_every_kind_of_the_catalog_is_listed(crosstie: Command, kind: str) -> None:
    assert crosstie("catalog", "list", kind).status == 0
    assert len(json.loads(crosstie("catalog", "list", kind, "--json").out)) >= 4


def test_prices_are_listed_for_chosen_accelerators(crosstie: Command) -> None:
    got = json.loads(crosstie("catalog", "list", "prices", "--on", "mi300x", "--json").out)
    assert got
    assert {row["accelerator"] for row in got} == {"mi300x"}


def test_models_and_stacks_show_their_sources(crosstie: Command) -> None:
    assert "config.json" in crosstie("catalog", "show", "llama-3.1-70b").out
    assert " 0.9 " in crosstie("catalog", "show", "vllm").out


def test_add_a_model_then_use_it(crosstie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert crosstie("fit", str(folder), "--on", "h200", "--context", "100").status == 0
    added = crosstie("catalog", "add", str(folder), "--source", "a test", "--date", "2026-11-01")
    assert added.status == 0
    assert crosstie("fit", "tiny", "--on", "h200", "--context", "100").status == 0
    again = crosstie("catalog", "add", str(folder))
    assert again.status == 2
    assert "--force" in again.err
    assert crosstie("catalog", "add", str(folder), "--force").status == 0
    assert "a test" not in crosstie("catalog", "show", "tiny").out


def test_add_an_accelerator_then_use_it(crosstie: Command, tmp_path: Path) -> None:
    import crosstie.catalog.library as library

    text = (library.SHIPPED / "accelerators" / "h200.toml").read_text().replace('id = "h200"', 'id = "h999"')
    file = tmp_path / "h999.toml"
    file.write_text(re.sub(r"(?m)^aliases = .*$", "aliases = []", text))
    assert crosstie("compare", "llama-3.1-8b", "--on", f"{file},h200").status == 0
    assert crosstie("catalog", "check", str(file)).out == f"{file}: good (accelerators)\n"
    assert crosstie("catalog", "add", str(file)).status == 0
    got = crosstie("compare", "llama-3.1-8b", "--on", "h999,h200")
    assert "within 3%" in got.out
    assert "h999" in crosstie("catalog", "list").out


def test_a_part_of_another_vendor_gets_an_engine_that_runs_on_it(crosstie: Command, tmp_path: Path) -> None:
    import crosstie.catalog.library as library

    text = (library.SHIPPED / "accelerators" / "h200.toml").read_text()
    text = re.sub(
        r"(?m)^aliases = .*$",
        "aliases = []",
        text.replace('id = "h200"', 'id = "zeta-1"').replace('vendor = "NVIDIA"', 'vendor = "other"'),
    )
    file = tmp_path / "zeta-1.toml"
    file.write_text(text)
    got = json.loads(crosstie("fit", "llama-3.1-8b", "--on", str(file), "--json").out)
    assert got["placements"][0]["stack"] == "llama.cpp"
    clash = tmp_path / "other" / "zeta-2.toml"
    clash.parent.mkdir()
    clash.write_text(text.replace('id = "zeta-1"', 'id = "zeta-2"').replace("aliases = []", 'aliases = ["h200"]'))
    assert "'h200' already names h200" in crosstie("catalog", "add", str(clash)).err
    assert crosstie("catalog", "list").status == 0


def test_other_catalog_files_are_checked_too(crosstie: Command, tmp_path: Path) -> None:
    import crosstie.catalog.library as library

    for name, kind in (
        ("stacks/vllm.toml", "stacks"),
        ("efficiency/hopper.toml", "efficiency"),
        ("formats.toml", "formats"),
        ("prices.csv", "prices"),
        ("models/qwen3-8b.toml", "models"),
    ):
        assert crosstie("catalog", "check", str(library.SHIPPED / name)).out.endswith(f": good ({kind})\n")
    (tmp_path / "config.json").write_text("{}")
    assert "catalog add" in crosstie("catalog", "check", str(tmp_path / "config.json")).err
    assert "formats are one file" in crosstie("catalog", "add", str(library.SHIPPED / "formats.toml")).err


def test_a_bad_addition_leaves_nothing(crosstie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 0}))
    assert crosstie("catalog", "add", str(folder)).status == 2
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert crosstie("catalog", "add", str(folder), "--date", "yesterday").status == 2
    assert not (tmp_path / "user-catalog").exists()


def test_names_are_text_and_not_markup(crosstie: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert (
        crosstie("catalog", "add", str(tmp_path / "config.json"), "--id", "odd", "--name", "Foo [red]x[/oops]").status
        == 0
    )
    assert "Foo [red]x[/oops]" in crosstie("fit", "odd", "--on", "h200", "--context", "100").out
    got = crosstie("catalog", "add", str(tmp_path / "config.json"), "--id", "worse", "--name", "a\x1b[31mb")
    assert got.status == 2
    assert "control characters" in got.err


def test_without_a_home_there_is_still_an_answer(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CROSSTIE_CATALOG", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.chdir(tmp_path)
    assert crosstie("fit", "llama-3.1-8b", "--on", "h200").status == 0


def test_a_terminal_without_the_signs_gets_others(tmp_path: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "CROSSTIE_CATALOG": str(tmp_path)}
    command = [sys.executable, "-m", "crosstie", "fit", "mixtral-8x7b", "--on", "h200", "--dp", "2", "--tp", "2"]
    got = subprocess.run(command, capture_output=True, text=True, env=env)
    assert got.returncode == 0
    assert "Traceback" not in got.stderr


def test_the_whole_catalog_checks(crosstie: Command) -> None:
    counts = [f"{len(list(SHIPPED.glob(f'{kind}/*.toml')))} {kind}" for kind in ("accelerators", "models", "stacks")]
    assert crosstie("catalog", "check").out.startswith(f"good: {', '.join(counts)}")


MISTAKES = {
    "unknown accelerator": (["fit", "llama-3.1-8b", "--on", "mi300xx"], "Did you mean mi300x"),
    "unknown model": (["fit", "llama-3.1-80b"], "unknown model 'llama-3.1-80b'"),
    "unknown stack": (["fit", "llama-3.1-8b", "--stack", "vlm"], "Did you mean vllm"),
    "unknown precision": (["fit", "llama-3.1-8b", "--on", "h200", "--precision", "fp9"], "unknown precision 'fp9'"),
    "empty model": (["fit", "", "--on", "h200"], "name of the model is empty"),
    "unknown command": (["fits"], "No such command"),
    "unknown option": (["fit", "llama-3.1-8b", "--onn", "h200"], "--onn"),
    "no accelerators": (["compare", "llama-3.1-8b"], "--on"),
    "empty list": (["compare", "llama-3.1-8b", "--on", ","], "names no accelerator"),
    "not a number": (["fit", "llama-3.1-8b", "--context", "much"], "much"),
    "negative input": (["compare", "llama-3.1-8b", "--on", "h200", "--input", "-1"], "input -1"),
    "zero context": (["fit", "llama-3.1-8b", "--context", "0"], "a context of 0"),
    "context too long": (["fit", "qwen3-8b", "--context", "1000000"], "beyond the 40960"),
    "odd tp": (["compare", "llama-3.1-70b", "--on", "h200", "--tp", "3"], "does not divide the 64 attention heads"),
    "tp zero": (["compare", "llama-3.1-70b", "--on", "h200", "--tp", "0"], "must be at least 1"),
    "missing directory": (["fit", "./nowhere/config.json"], "no such file"),
    "missing accelerator file": (["fit", "llama-3.1-8b", "--on", "nowhere.toml"], "no such accelerator file"),
    "wrong vendor": (
        ["compare", "llama-3.1-8b", "--on", "mi300x", "--stack", "tensorrt-llm"],
        "does not run on mi300x",
    ),
    "no precision": (["fit", "llama-3.1-8b", "--on", "h200", "--precision", ","], "no precision is named"),
    "long name": (["fit", "x" * 5000, "--on", "h200"], "File name too long"),
    "path that is not there": (["fit", "./nowhere", "--on", "h200"], "no such file"),
    "weights the engine cannot read": (
        ["fit", "llama-3.1-8b", "--on", "h200", "--precision", "fp8", "--stack", "llama.cpp"],
        "does not read fp8",
    ),
    "options that a catalog file has itself": (["catalog", "add", "x.toml", "--id", "y"], "go with a config.json"),
    "bad date": (["catalog", "add", "x", "--date", "soon"], "--date soon"),
    "nothing to show": (["catalog", "show", "mi30x"], " or mi300x"),
    "no such key": (["catalog", "show", "mi300x", "dense.fp3"], "no key 'dense.fp3'"),
    "prices only": (["catalog", "list", "models", "--on", "h200"], "list prices"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(crosstie: Command, case: str) -> None:
    arguments, words = MISTAKES[case]
    got = crosstie(*arguments)
    assert got.status == 2
    assert got.out == ""
    assert words in got.err
    assert got.err.startswith("crosstie: ")
    assert got.err.count("\n") == 1
    assert "Traceback" not in got.err


def test_a_broken_user_file_is_named(crosstie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "user-catalog" / "accelerators"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('id = "mine"\nspeed = 3\n')
    got = crosstie("catalog", "list")
    assert got.status == 2
    assert "mine.toml: speed: unknown key" in got.err


def test_help_teaches_and_stays_light() -> None:
    """No numpy and no rich for --help: that is what keeps it quick."""
    code = "import sys; sys.argv=['crosstie','--help']\nfrom crosstie.cli.main import run\ntry: run()\nexcept SystemExit: pass\nprint([m for m in ('numpy','rich','msgspec') if m in sys.modules])"
    got = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "crosstie compare llama-3.1-70b" in got.stdout
    assert "Exit status" in got.stdout
    assert got.stdout.rstrip().endswith("[]")


def test_no_arguments_show_the_help(crosstie: Command) -> None:
    got = crosstie()
    assert got.status == 0
    assert got.out.startswith("Usage: crosstie")


@pytest.mark.parametrize("command", [[], ["fit"], ["compare"], ["catalog"], ["catalog", "show"], ["catalog", "add"]])
def test_every_command_has_help(crosstie: Command, command: list[str]) -> None:
    got = crosstie(*command, "--help")
    assert got.status == 0
    assert "Usage" in got.out


def test_as_a_module_into_a_closed_pipe() -> None:
    """`crosstie ... | head -1` ends without a traceback."""
    script = f"{sys.executable} -m crosstie catalog list prices --json | head -1"
    got = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={**os.environ, "CROSSTIE_CATALOG": "/nonexistent"}
    )
    assert got.stdout == "[\n"
    assert "Traceback" not in got.stderr


@pytest.mark.parametrize("columns", [40, *(pytest.param(wide, marks=pytest.mark.slow) for wide in (80, 200))])
def test_a_narrow_terminal_loses_nothing(columns: int) -> None:
    """On a pseudo terminal of any width every number of the answer is there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {**os.environ, "CROSSTIE_CATALOG": "/nonexistent", "TERM": "xterm"}
    env.pop("COLUMNS", None)
    command = [sys.executable, "-m", "crosstie", "fit", "llama-3.1-8b", "--on", "h200", "-v"]
    running = subprocess.Popen(command, stdout=theirs, stdin=theirs, env=env)
    os.close(theirs)
    printed = b""
    try:
        while part := os.read(ours, 65536):
            printed += part
    except OSError:
        pass  # how Linux says that the other end is closed
    os.close(ours)
    assert running.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.decode())
    for word in ("h200", "TP1 *", "TP8", "16.1 GB", "KV tokens", "8,192"):
        assert word in plain
    assert re.search(r"\b888,0\d\d\b", plain)


def test_no_color_is_respected(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-9]")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    asked = ("preflight", "llama-3.1-8b", "--on", "mi300x")
    assert colour.search(crosstie(*asked).out)
    monkeypatch.setenv("NO_COLOR", "1")
    got = crosstie(*asked)
    assert got.status == 0
    assert colour.search(got.out) is None


def test_compare_says_what_speculation_is_worth(crosstie: Command) -> None:
    asked = ("compare", "deepseek-r1", "--tp", "8", "--speculation", "mtp:3", "--on")
    got = crosstie(*asked, "mi355x,b200")
    assert got.status == 0
    assert "mtp:3 keeps 2.54 tokens a step on chat" in got.out
    assert got.out.count("the tokens/s of none") == 2
    entry = json.loads(crosstie(*asked, "mi355x", "--json").out)["entries"][0]
    assert entry["deployment"]["speculation"]["acceptance_length"] == pytest.approx(2.54)
    assert entry["deployment"]["speculation"]["depth"] == 3
    assert entry["speculation"]["gain"] > 1.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--speculation", "mtp:3"), "llama-3.1-8b has no prediction layer"),
        (("--speculation", "eagle3"), "METHOD:DEPTH"),
        (("--speculation", "magic:3"), "must be one of mtp"),
        (("--speculation", "eagle3:3", "--acceptance", "7"), "3 drafts give 1 to 4"),
        (("--speculation", "eagle3:3", "--acceptance", "0.5"), "3 drafts give 1 to 4"),
        (("--acceptance", "2"), "--speculation, which is not given"),
        (("--speculation", "draft:4:nobody"), "nobody"),
    ],
)
def test_compare_refuses_speculation_that_cannot_be(crosstie: Command, options: tuple[str, ...], says: str) -> None:
    got = crosstie("compare", "llama-3.1-8b", "--on", "h200", *options)
    assert got.status == 2
    assert got.out == ""
    assert got.err.count("\n") == 1
    assert says in got.err
