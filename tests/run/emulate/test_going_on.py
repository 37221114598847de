"""An emulated answer that is to be gone on with goes on as it would have."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.run.emulate.running import CATALOG, CHAT, SMALL, fleet, pool

from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.fleet import start
from crosstie_gateway.emulate.tokens import begun, filler

COMPLETION = "/v1/completions"


@given(st.binary(max_size=40), st.integers(0, 400))
def test_what_stands_at_the_end_of_a_prompt_is_found(prompt: bytes, tokens: int) -> None:
    # A prompt that looks like the sentence's own end would itself be a beginning.
    text = prompt + b"." + filler(0, tokens).encode()
    assert begun(text) == tokens


def test_other_text_is_no_beginning() -> None:
    assert begun(b"") == begun(b"This is something else.") == begun(b"an accelerator and no model wrote it. ") == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("after", [1, 24, 25, 39])
def test_the_rest_of_an_answer_is_what_was_missing(path: str, after: int) -> None:
    async def main() -> None:
        emulated = await start(CATALOG, fleet(pool()), speed=100.0)
        try:
            origin = Origin(emulated.replica("one", 0).loop, Address(emulated.fleet.pools[0].backends[0]))

            async def ask(**body: Any) -> dict[str, Any]:
                said = json.dumps({"model": SMALL, **body}).encode()
                found: dict[str, Any] = json.loads((await fetch(origin, "POST", path, body=said, timeout_s=30)).body)
                return found

            def text(answer: dict[str, Any]) -> str:
                [choice] = answer["choices"]
                return str(choice["message"]["content"] if path == CHAT else choice["text"])

            user = {"role": "user", "content": "tell me"}
            whole = await ask(max_tokens=40, **({"messages": [user]} if path == CHAT else {"prompt": "tell me"}))
            made = whole["usage"]["completion_tokens"]
            cut = min(after, made - 1)
            before = text(whole)[: 4 * cut]
            if path == CHAT:
                messages = [user, {"role": "assistant", "content": before}]
                flags = {"continue_final_message": True, "add_generation_prompt": False}
                rest = await ask(max_tokens=40 - cut, messages=messages, **flags)
            else:
                rest = await ask(max_tokens=40 - cut, prompt=f"tell me{before}")
            assert before + text(rest) == text(whole)
            assert rest["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
            assert rest["usage"]["completion_tokens"] == made - cut
            origin.close()
        finally:
            await emulated.close()

    run_on_loop(main())
