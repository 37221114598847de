"""What integers of a checkpoint are: they are packed alike whatever their width, so the quantisation config decides."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from crosstie.port.preflight.operations import Weights


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    bits: int | None
    group: int | None
    act_order: bool
    # "" where the config does not speak of activations.
    activations: str


def as_declared(weights: Weights, quantisation: Mapping[str, Any]) -> Weights:
    """Width, groups, order and activations as the config says; "unknown" where integers of several kinds are mixed."""
    if not weights.scheme.startswith("int"):
        return weights
    said = set(_said(quantisation))
    if not said:
        return weights
    if len(said) > 1:
        return msgspec.structs.replace(weights, scheme="unknown")
    (one,) = said
    return msgspec.structs.replace(
        weights,
        scheme=weights.scheme if one.bits is None else f"int{one.bits}",
        group=one.group,
        act_order=one.act_order,
        activations=one.activations or weights.activations,
    )


def _said(quantisation: Mapping[str, Any]) -> Iterator[_Said]:
    groups = quantisation.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and weights.get("type") == "int":
                yield _compressed(weights, group.get("input_activations"))
    elif "bits" in quantisation or "w_bit" in quantisation:
        size = _number(quantisation.get("group_size", quantisation.get("q_group_size")))
        yield _Said(
            bits=_number(quantisation.get("bits", quantisation.get("w_bit"))),
            group=size,
            # One group a row leaves nothing to reorder.
            act_order=quantisation.get("desc_act") is True and size != -1,
            activations="none",
        )


def _compressed(weights: Mapping[str, Any], inputs: object) -> _Said:
    rounded = "none" if not isinstance(inputs, Mapping) else "static" if inputs.get("dynamic") is False else "dynamic"
    return _Said(
        bits=_number(weights.get("num_bits")),
        group=_number(weights.get("group_size")) or -1,
        # "weight" and "static" reorder at quantisation and leave nothing to do at run time.
        act_order=weights.get("actorder") in (True, "group", "dynamic"),
        activations=rounded,
    )


def _number(value: object) -> int | None:
    if isinstance(value, str) and value.isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
