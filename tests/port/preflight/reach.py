"""What tests of the rows make cases from: facts of DeepSeek-V3 on eight ranks, and values that meet a condition."""

import re

from crosstie.port.preflight.rules import Value

MOE: dict[str, Value] = {
    "weights": "fp8-block", "activations": "dynamic", "experts": 256, "experts_per_token": 8, "inter": 256,
    "hidden": 7168, "activation": "silu", "bias": False, "tp": 8, "shared_experts": 1, "ep": False,
}  # fmt: skip
ATTENTION: dict[str, Value] = {
    "head_dim": 128, "v_head_dim": 128, "heads": 8, "kv_heads": 1, "gqa_ratio": 8, "kv": "bf16", "window": False,
    "sinks": False, "softcap": False, "chunked": False, "alibi": False, "encoder": False,
}  # fmt: skip
MLA: dict[str, Value] = {"heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv": "bf16"}
SPARSE: dict[str, Value] = {
    "kind": "dsa", "heads": 16, "index_heads": 64, "index_head_dim": 128, "top_k": 2048, "kv": "bf16",
}  # fmt: skip


def meeting(conditions: tuple[Value, ...]) -> list[Value]:
    """At the limit of each condition, and on its right side of it."""
    found: list[Value] = []
    for condition in conditions:
        match = re.match(r"^(<=|>=|<|>|!%|%|!)?(.*)$", str(condition))
        assert match
        sign, number = match.groups()
        if isinstance(condition, bool | int) or not sign:
            found.append(condition)
        elif sign == "!":
            found.append("something else")
        else:
            limit = int(number)
            found += {
                "<=": [limit, limit - 1], ">=": [limit, limit + 1], "<": [limit - 1, limit - 3],
                ">": [limit + 1, limit + 8], "%": [limit, 3 * limit],
                "!%": [limit + 1, limit + 32, 3 * limit // 2, 5],
            }[sign]  # fmt: skip
    return found
