"""lm-evaluation-harness through the same endpoints, as a program of its own: its scores of A beside those of B."""

import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.parity.endpoint import Party

PROGRAM = "lm_eval"
GET = "pip install 'lm_eval[api]'"
# Standard errors that B may be below A by before it is worse.
_ERRORS = 2.0
_QUOTED_LINES = 3


class Score(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    metric: str
    a: float
    a_error: float
    b: float
    b_error: float
    # B is below A by more than twice the error of the difference.
    worse: bool


def harness_line() -> str:
    """The program; raises BadInput with what to install."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise BadInput(f"--lm-eval needs {PROGRAM}, which is not installed: {GET}")
    return program


def arguments(party: Party, model: str, tasks: Sequence[str], limit: int | None, into: Path) -> list[str]:
    base = party.url.removesuffix("/v1")
    words = [
        harness_line(), "--model", "local-chat-completions", "--model_args",
        f"model={model},base_url={base}/v1/chat/completions,num_concurrent=8,max_retries=3", "--apply_chat_template",
        "--tasks", ",".join(tasks), "--output_path", str(into), "--gen_kwargs", "temperature=0",
    ]  # fmt: skip
    return [*words, *(["--limit", str(limit)] if limit else [])]


def scored(
    a: tuple[Party, str], b: tuple[Party, str], tasks: Sequence[str], limit: int | None, *,
    on_progress: OnProgress = no_progress,
) -> list[Score]:  # fmt: skip
    results = []
    for done, (party, model) in enumerate((a, b)):
        on_progress(done, 2, f"lm_eval {','.join(tasks)} on {'AB'[done]}")
        results.append(_run(party, model, tasks, limit))
    return compared(*results)


def _run(party: Party, model: str, tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder)
        environment = os.environ | {"OPENAI_API_KEY": party.api_key or "none"}
        done = subprocess.run(
            arguments(party, model, tasks, limit, into), env=environment, capture_output=True, text=True, check=False
        )
        files = sorted(into.rglob("results*.json"))
        if done.returncode or not files:
            said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            raise BadInput(f"{PROGRAM} on {party.url} failed: {'; '.join(said[-_QUOTED_LINES:]) or 'it said nothing'}")
        results: dict[str, Any] = json.loads(files[-1].read_text())["results"]
        return results


def compared(a: dict[str, Any], b: dict[str, Any]) -> list[Score]:
    """Every metric that both have with a standard error; more is better, as of all those that a task scores by."""
    scores = []
    for task in a.keys() & b.keys():
        for key, value in a[task].items():
            error = key.replace(",", "_stderr,", 1) if "," in key else f"{key}_stderr"
            if (
                not isinstance(value, int | float)
                or error not in a[task]
                or not isinstance(b[task].get(key), int | float)
            ):
                continue
            errors = [float(own) if isinstance(own := run[task].get(error), int | float) else 0.0 for run in (a, b)]
            spread = _ERRORS * math.hypot(*errors)
            scores.append(
                Score(
                    task=task, metric=key.split(",none")[0], a=float(value), a_error=errors[0], b=float(b[task][key]),
                    b_error=errors[1], worse=float(value) - float(b[task][key]) > spread,
                )
            )  # fmt: skip
    return sorted(scores, key=lambda score: (score.task, score.metric))
