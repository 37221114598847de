"""TTFT and TPOT of one more request on a replica, from its view."""

from crosstie.route.view import Speed, View


def estimate(
    view: View, speed: Speed, new_tokens: float, cached_tokens: float, context: float, output_tokens: float
) -> tuple[float, float]:
    """Raw seconds: the factors of the view, and by how much its queue is late, are still to be applied.

    Prompts are computed in order, so the first token comes when all tokens ahead and one's own have gone through
    steps with `room` for so many; a step's time is straight between none, an eighth and all of these.
    """
    tokens = view.ahead_tokens + new_tokens
    room = view.room
    last_s = 0.0
    ttft_s = view.before_s
    if tokens > room:
        whole = tokens // room
        last_s = view.full_s
        ttft_s += whole * last_s
        tokens -= whole * room
    if tokens > view.eighth:
        part_s = view.eighth_s + (tokens - view.eighth) * view.slope_high
    elif tokens > 0.0:
        part_s = view.none_s + tokens * view.slope_low
    else:
        part_s = 0.0
    ttft_s += part_s
    if speed.stages > 1.0:
        # A chunk comes out of a pipeline in a part of the time that it takes to go through.
        ttft_s += (speed.stages - 1.0) * max(last_s, part_s)
    beyond = new_tokens - speed.chunk
    if cached_tokens or beyond > 0.0:
        attended = cached_tokens + (0.5 * beyond if beyond > 0.0 else 0.0)
        ttft_s += speed.per_attended * new_tokens * attended
    needs = new_tokens + cached_tokens + speed.held_share * output_tokens
    if needs > view.free_tokens:
        # A request longer than the whole cache waits until it is alone, and no longer.
        ttft_s += max(min(needs, speed.cache_tokens) - view.free_tokens, 0.0) * view.per_free_s
    return ttft_s, (view.step_s + context * speed.per_cached) * view.stretch
