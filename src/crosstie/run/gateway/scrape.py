"""What an engine says of its own load: three numbers out of its metrics page.

A page of vLLM has hundreds of lines and comes from every replica every second, so only the wanted ones are looked at.
"""

import re
from typing import NamedTuple

_RUNNING = (b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing",
            b"tgi_batch_current_size")  # fmt: skip
_WAITING = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred",
            b"tgi_queue_size")  # fmt: skip
# No engine has more requests; what is not below it, infinity above all, is no load to reckon with.
_MOST = 1e6
_CACHE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc", b"sglang:token_usage")


class EngineLoad(NamedTuple):
    running: float
    waiting: float
    # None where the engine does not say.
    kv_used_fraction: float | None


def _pattern(names: tuple[bytes, ...]) -> re.Pattern[bytes]:
    return re.compile(rb"^(?:" + b"|".join(map(re.escape, names)) + rb")(?:\{[^\n]*\})? ([0-9.eE+-]+)", re.MULTILINE)


_RUNNING_LINES, _WAITING_LINES, _CACHE_LINES = map(_pattern, (_RUNNING, _WAITING, _CACHE))


def engine_load(page: bytes) -> EngineLoad | None:
    """Over all of a server's engines (DP ranks have a line each); None where no known engine wrote the page."""
    running, waiting, cache = (_values(lines, page) for lines in (_RUNNING_LINES, _WAITING_LINES, _CACHE_LINES))
    if not running and not waiting:
        return None
    return EngineLoad(sum(running), sum(waiting), sum(cache) / len(cache) if cache else None)


def _values(lines: re.Pattern[bytes], page: bytes) -> list[float]:
    found = []
    for match in lines.finditer(page):
        try:
            value = float(match[1])
        except ValueError:
            continue
        if 0.0 <= value <= _MOST:
            found.append(value)
    return found
