"""What a difference looks like, as the causes that leave such traces. Guesses, each with what it rests on."""

from collections.abc import Mapping, Sequence
from statistics import median

from crosstie.core.figures import plural
from crosstie.prove.parity.groups import Group
from crosstie.prove.parity.samples import Pair

# Late places must be so many times as far apart as early ones before positions are blamed.
_TIMES_WORSE = 4.0
_LEAST_PLACES = 4


def causes_of(
    pairs: Sequence[Pair], says: Mapping[str, str], by_position: Sequence[Group], limit_kl: float
) -> tuple[str, ...]:
    if "differs" not in says.values():
        return ()
    causes = []
    more = [one.b.prompt_tokens - one.a.prompt_tokens for one in pairs if one.a.prompt_tokens and one.b.prompt_tokens]
    lengths = _other_lengths(pairs)
    if lengths:
        causes.append(f"the tokenizer: {plural(lengths, 'text')} cut into other tokens")
    elif more and sum(map(bool, more)) > len(more) / 2:
        causes.append(
            f"the chat template: B counts {median(more):+g} tokens for the same messages, and as many for the same text"
        )
    if says.get("forced KL") == "same" and says.get("chat KL") == "differs":
        causes.append("the chat template or a system prompt: plain texts are alike, and chats are not")
    told = [group for group in by_position if group.places >= _LEAST_PLACES]
    if says.get("forced KL") != "differs" or lengths:
        return tuple(causes)
    if len(told) > 1 and told[-1].kl > _TIMES_WORSE * max(told[0].kl, limit_kl / _TIMES_WORSE):
        causes.append(
            f"positions: KL is {told[0].kl:.2g} at tokens {told[0].name} and {told[-1].kl:.2g} at {told[-1].name}; "
            "look at RoPE scaling, a sliding window, the KV cache and its scales"
        )
    else:
        causes.append(
            "the weights: texts differ from their first tokens on; look at scales, the FP8 dialect (a factor of two), "
            "a quantised layout, RoPE's base and scaling; `crosstie diff` finds the module"
        )
    return tuple(causes)


def _other_lengths(pairs: Sequence[Pair]) -> int:
    """Texts that the two do not cut alike: before the same place they count other tokens."""
    count = 0
    for pair in pairs:
        a = {step.at: step.position for step in pair.a.forced}
        b = {step.at: step.position for step in pair.b.forced}
        count += any(a[at] != b[at] for at in a.keys() & b.keys())
    return count
