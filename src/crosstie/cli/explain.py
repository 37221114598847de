"""`crosstie explain`: the whole decision for a request, asked of a running gateway, without sending it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from crosstie.catalog.writing import in_words
from crosstie.cli.answer import Wanted, answer_options
from crosstie.cli.options import text_option, whole_option
from crosstie.core.errors import BadInput
from crosstie.core.figures import dollars, number, plural, seconds
from crosstie.web.parts import Parts, Table
from crosstie.wire.address import Address
from crosstie.wire.fetch import Answer, fetch_once
from crosstie.wire.loops import run_on_loop

_HINTS = {
    "name": b"class", "ttft_ms": b"ttft-ms", "tpot_ms": b"tpot-ms", "priority": b"priority", "pool": b"pool",
    "session": b"session",
}  # fmt: skip


@click.command("explain")
@click.argument("request_file", required=False, metavar="[REQUEST.json]", type=click.Path(path_type=Path))
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The gateway.")
@text_option("--model", "M", "Instead of a file: a model,")
@whole_option("--input input_tokens", 1, 10**7, "a prompt of N tokens,")
@whole_option("--output output_tokens", 1, 10**7, "and at most N to answer.")
@text_option("--class name", "C", "As the header x-crosstie-class would say.")
@click.option("--ttft-ms", type=float, metavar="MS", help="As x-crosstie-ttft-ms.")
@click.option("--tpot-ms", type=float, metavar="MS", help="As x-crosstie-tpot-ms.")
@click.option("--priority", type=click.Choice(["low", "normal", "high"]), help="As x-crosstie-priority.")
@text_option("--pool", "P", "As x-crosstie-pool: only this pool.")
@text_option("--session", "S", "As x-crosstie-session: a turn of this session.")
@answer_options()
def command(
    request_file: Path | None, url: str, model: str | None, input_tokens: int | None, output_tokens: int | None,
    wanted: Wanted, **hints: object,
) -> int:  # fmt: skip
    """Where a running gateway would send a request now, and why: every pool with its prediction or what dropped it.

    \b
    crosstie explain --model llama-3.3-70b --input 3000 --output 200
    crosstie explain request.json --class chat --url http://gateway:8080

    The prediction is for one more request with the present load; it is not a median. Below stands what each pool's
    last requests took, beside their predictions.

    REQUEST.json is the body of an API call. No backend is asked. $OPENAI_API_KEY is sent to the gateway if set.
    Exit status 1 if the request would have to wait or be refused.
    """
    said = asked_of(url, _body(request_file, model, input_tokens, output_tokens), hints)
    wanted.give(lambda: said, lambda _: parts(said))
    return 0 if said["outcome"] == "send" else 1


def asked_of(url: str, body: bytes, hints: Mapping[str, object]) -> dict[str, Any]:
    """What the gateway there says it would do with such a request."""
    for name, value in hints.items():
        if isinstance(value, str) and not value.isprintable():
            raise BadInput(f"--{'class' if name == 'name' else name}: must be one line of text")
    headers = [(b"x-crosstie-" + _HINTS[key], str(value).encode()) for key, value in hints.items() if value is not None]
    if key := os.environ.get("OPENAI_API_KEY", "").strip():
        headers.append((b"authorization", f"Bearer {key}".encode()))
    at = Address(url)
    question = fetch_once(at, "POST", f"{at.root}/crosstie/explain", headers=headers, body=body, timeout_s=10)
    with in_words(f"{at.url}: no gateway answers there"):
        answer = run_on_loop(question)
    said = answer.said
    if answer.status != 200 or not isinstance(said, dict) or "considered" not in said:
        raise BadInput(f"{url}: {_why_not(answer, said)}")
    return said


def _body(file: Path | None, model: str | None, inputs: int | None, outputs: int | None) -> bytes:
    if file is not None:
        if model or inputs or outputs:
            raise BadInput("a request file says model and lengths itself: leave --model, --input and --output out")
        with in_words(f"{file}: cannot be read"):
            return file.read_bytes()
    if not model:
        raise BadInput("name a request file, or --model and --input")
    # Ids in the place of text have a known length.
    asked: dict[str, object] = {"model": model, "prompt": [1] * (inputs or 1000)}
    if outputs:
        asked["max_tokens"] = outputs
    return json.dumps(asked).encode()


def _why_not(answer: Answer, said: Any) -> str:
    if isinstance(said, dict) and isinstance(said.get("error"), dict):
        return str(said["error"].get("message"))
    return f"answered {answer.status}; is it a Crosstie gateway?"


def parts(said: dict[str, Any]) -> Parts:
    asked = said["request"]
    verdict = f"to {said['replica']}" if said["pool"] else said["outcome"]
    yield f"{said['policy']}: {verdict}: {said['reason']}"
    yield (
        f"{asked['model']}, class {asked['class'] or 'none'}: {asked['input_tokens']:,.0f} tokens in, "
        f"{asked['expected_output_tokens']:,.0f} expected out; {_targets(asked)}"
    )
    prefill = said.get("prefill")
    if prefill:
        yield f"its prompt by {prefill['replica']}, which holds {number(prefill['cached_tokens'])} tokens of it"
    if session := said.get("session"):
        yield _of_session(session)
    written = {"ttft_s": seconds, "tpot_s": seconds, "usd": dollars, "cached_tokens": number, "joules": number}
    rows = []
    for pool in said["considered"]:
        seen = pool["predicted"]
        numbers = [write(seen[key]) if seen else "-" for key, write in written.items()]
        chosen = "chosen" if pool["replica"] and pool["replica"] == said["replica"] else pool["dropped"] or ""
        if pool.get("planned"):
            chosen = f"{chosen}, as planned" if chosen == "chosen" else f"planned; {chosen or _dearer(pool, said)}"
        rows.append([pool["replica"] or pool["pool"], *numbers, chosen])
    columns = ["replica", ">TTFT", ">TPOT", ">cost", ">cached tokens", ">joules", "~why"]
    yield Table(columns, rows)
    for pool in said["considered"]:
        if late := pool.get("of_late"):
            yield (
                f"- {pool['pool']}, its last {late['requests']:,} requests, each as predicted when it was sent: "
                f"{_both('TTFT', late, 'ttft')}; {_both('TPOT', late, 'tpot')}"
            )


def _both(name: str, late: dict[str, Any], key: str) -> str:
    return f"{name} p50 {seconds(late[f'{key}_seen_p50_s'])} for {seconds(late[f'{key}_predicted_p50_s'])} predicted"


def _of_session(session: dict[str, Any]) -> str:
    home = f"at {session['home']}" if session["home"] else "lost with its replica"
    if session["in_flight"]:
        now = f"{plural(session['in_flight'], 'turn')} of it in flight"
    elif session["waited_for_s"]:
        now = f"waited for {seconds(session['waited_for_s'])} more"
    else:
        now = "no more waited for"
    return (
        f"its session: {plural(session['turns'], 'turn')} so far, {number(session['tokens'])} tokens {home}, "
        f"{dollars(session['usd'])}; {now}"
    )


def _dearer(pool: dict[str, Any], said: dict[str, Any]) -> str:
    """Why a pool of the plan is not the one: it counts with the waits of a full fleet, this decision with those now."""
    taken = next((other for other in said["considered"] if other["replica"] == said["replica"]), None)
    if not (taken and taken["predicted"] and pool["predicted"] and taken["predicted"]["usd"]):
        return "not chosen"
    times = pool["predicted"]["usd"] / taken["predicted"]["usd"]
    return f"{times - 1.0:.0%} dearer at this load" if times > 1.0 else "later at the same price"


def _targets(asked: dict[str, Any]) -> str:
    said = [f"{name} within {seconds(asked[key])}" for name, key in
            (("TTFT", "ttft_target_s"), ("TPOT", "tpot_target_s")) if asked[key] is not None]  # fmt: skip
    return " and ".join(said) or "no target"
