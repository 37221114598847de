"""Faults of a port in a real model on a real engine: SmolLM2-135M in llama.cpp, whose weights and settings are damaged
as ports damage them. All is asked once; each test looks at one fault."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.prove.parity.gguf_damage import damaged
from tests.prove.parity.llama_server import llama
from tests.run.start.test_local import installed

from crosstie.prove.parity.endpoint import Asking, Party, ask_all
from crosstie.prove.parity.prompts import Prompt
from crosstie.prove.parity.verdict import Parity, judged
from crosstie_gateway.start.local import shipped_weights

pytestmark = [pytest.mark.engines, installed]

PROMPTS = (
    Prompt(id="en", language="en", kind="chat", text="Name the capital of France and the river it lies on."),
    Prompt(id="code", language="en", kind="code", text="Write a Python function that adds two numbers."),
    Prompt(id="fr", language="fr", kind="chat", text="Bonjour, pouvez-vous me dire quelle heure il est?"),
    Prompt(id="list", language="en", kind="chat", text="List three fruits that are red, one on each line."),
)
MATRICES = r"blk\.\d+\.(attn_[qkv]|attn_output|ffn_(up|gate|down))\.weight"
# The model as it is meant to be served reads positions at half their size, as linear RoPE scaling by two has it.
SCALED: dict[str, Any] = {"rope_freq_scale": 0.5}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parity]:
    folder: Path = tmp_path_factory.mktemp("damaged")
    whole = shipped_weights()
    assert damaged(whole, folder / "scale.gguf", r"blk\.12\.ffn_down\.weight", 3.0) == 1
    # Bytes of e4m3fn that are read as e4m3fnuz are half of what they should be, in every quantised matrix.
    assert damaged(whole, folder / "dialect.gguf", MATRICES, 0.5) == 7 * 30
    served = {
        "same": (whole, SCALED),
        "a damaged scale": (folder / "scale.gguf", SCALED),
        "the other FP8 dialect": (folder / "dialect.gguf", SCALED),
        "RoPE scaling dropped": (whole, {}),
        "another chat template": (whole, SCALED | {"chat_template": "llama2"}),
    }
    with ExitStack() as stack:
        a = stack.enter_context(llama(whole, **SCALED))
        others = [stack.enter_context(llama(file, **settings)) for file, settings in served.values()]
        passes = asyncio.run(
            ask_all(Party(url=a), [Party(url=one) for one in others], PROMPTS, Asking(tokens=4, positions=3))
        )
    return {name: judged(a, url, one) for name, url, one in zip(served, others, passes, strict=True)}


def test_the_same_model_is_the_same(found: dict[str, Parity]) -> None:
    one = found["same"]
    assert (one.verdict, one.way, one.top) == ("same", "steps", 20)
    assert one.positions == 3 * len(PROMPTS)
    assert one.first_divergence.equal == len(PROMPTS)


@pytest.mark.parametrize("fault", ["a damaged scale", "the other FP8 dialect", "RoPE scaling dropped"])
def test_a_fault_of_the_weights_or_of_positions_is_found(found: dict[str, Parity], fault: str) -> None:
    one = found[fault]
    assert one.verdict == "differs"
    (kl,) = [gauge for gauge in one.gauges if gauge.name == "forced KL"]
    assert kl.says == "differs"
    assert kl.floor < 0.001
    assert "the weights" in one.causes[0]


def test_a_wrong_chat_template_is_found_and_told_from_wrong_weights(found: dict[str, Parity]) -> None:
    one = found["another chat template"]
    says = {gauge.name: gauge.says for gauge in one.gauges}
    assert one.verdict == "differs"
    assert (says["forced KL"], says["chat KL"]) == ("same", "differs")
    assert all("the chat template" in cause for cause in one.causes)
