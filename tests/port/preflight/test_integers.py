"""Integers of several widths are packed alike: what the config says of them decides."""

from typing import Any

import pytest

from crosstie.port.preflight.operations import Weights
from crosstie.port.preflight.stored import as_declared

PACKED = Weights(scheme="int4")


def compressed(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {f"group_{n}": one for n, one in enumerate(groups)}}


def weights(**more: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "group_size": 128, **more}


EIGHT = {"num_bits": 8, "type": "float", "dynamic": True}


@pytest.mark.parametrize(
    ("said", "scheme", "group", "act_order", "activations"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "int4", 128, True, "none"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}, "int4", -1, False, "none"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": False}, "int8", 128, False, "none"),
        ({"quant_method": "gptq", "bits": "3", "group_size": 128}, "int3", 128, False, "none"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4", 64, False, "none"),
        (compressed({"weights": weights()}), "int4", 128, False, "none"),
        (compressed({"weights": weights(actorder="group")}), "int4", 128, True, "none"),
        (compressed({"weights": weights(actorder="weight")}), "int4", 128, False, "none"),
        (compressed({"weights": weights(num_bits=8, group_size=None)}), "int8", -1, False, "none"),
        (compressed({"weights": weights(), "input_activations": EIGHT}), "int4", 128, False, "dynamic"),
        (compressed({"weights": weights(), "input_activations": {**EIGHT, "dynamic": False}}), "int4", 128, False,
         "static"),
        # Other groups may hold FP8; those of integers count.
        (compressed({"weights": {"num_bits": 8, "type": "float"}}, {"weights": weights()}), "int4", 128, False, "none"),
    ],
)  # fmt: skip
def test_a_declared_quantisation_is_understood(
    said: dict[str, Any], scheme: str, group: int, act_order: bool, activations: str
) -> None:  # fmt: skip
    found = as_declared(PACKED, said)
    assert (found.scheme, found.group, found.act_order, found.activations) == (scheme, group, act_order, activations)


def test_integers_of_two_kinds_are_not_guessed_at() -> None:
    mixed = compressed({"weights": weights()}, {"weights": weights(num_bits=8)})
    assert as_declared(PACKED, mixed).scheme == "unknown"


@pytest.mark.parametrize("said", [{}, {"config_groups": {"a": None}}, {"config_groups": 3}])
def test_what_the_config_does_not_say_stays_as_it_was_seen(said: dict[str, Any]) -> None:
    assert as_declared(PACKED, said) == PACKED


def test_floats_are_left_alone() -> None:
    stored = Weights(scheme="fp8-tensor", activations="static")
    assert as_declared(stored, {"bits": 4, "desc_act": True}) == stored
