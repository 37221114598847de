"""Services with prefill and decode apart as candidates of a plan: which pairs of replicas, in which numbers, and what
they take of each slice, in the terms that replicas with both together have.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Connector, Disaggregated
from crosstie.core.errors import BadInput
from crosstie.core.workload import Slice
from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.capacity import GRID, LoadCurve, extra_prefill_s
from crosstie.decide.plan.reuse import reused_apart
from crosstie.perf.disaggregated import Sides, WithoutQueues, without_queues
from crosstie.perf.hardware import Array
from crosstie.perf.memory import cache_sequences
from crosstie.perf.service_layouts import matched

# Of each kind of replica so many splits are tried, the narrowest that hold the longest request.
_SPLITS = 3
# A service is one thing to run and to lose: eight nodes of eight GPUs, or most of a rack.
_MOST_GPUS = 64


def services(catalog: Catalog, deployments: Sequence[Deployment], slices: Sequence[Slice]) -> list[Disaggregated]:
    """Pairs of the replicas that a plan has anyway, of one accelerator and one engine, in numbers that match."""
    if any(one.pictures for one in slices):
        # Where a service apart encodes pictures is not modelled, so that none is offered cheaper than it is.
        return []
    return [
        in_number
        for sides, connector in able(catalog, deployments, slices)
        for in_number in in_numbers([(prefill, decode) for prefill in sides for decode in sides], connector, slices)
    ]


def in_numbers(
    pairs: Sequence[tuple[Deployment, Deployment]], connector: Connector, slices: Sequence[Slice]
) -> list[Disaggregated]:
    """Services of these sides, in the numbers that requests of these slices ask for."""
    weight = np.array([one.share for one in slices])
    inputs, outputs, cached = (
        float(np.average([getattr(one, name) for one in slices], weights=weight))
        for name in ("input_tokens", "output_tokens", "cached_tokens")
    )
    # Prefill may find all that it could in its cache, or nothing: what stays there depends on the numbers.
    found = [
        one
        for hits in dict.fromkeys((0.0, cached))
        for one in matched(
            pairs, connector, input_tokens=inputs, output_tokens=outputs, cached_tokens=hits, most_gpus=_MOST_GPUS
        )
    ]
    return list({key_of(one): one for one in found}.values())


def able(
    catalog: Catalog, deployments: Sequence[Deployment], slices: Sequence[Slice]
) -> list[tuple[list[Deployment], Connector]]:
    """Replicas that could be a side of one service, group by group, and what joins them."""

    def kind(one: Deployment) -> tuple[str, ...]:
        return one.accelerator.id, one.stack.id, one.precision.id, one.kv_format, str(one.speculation or "")

    longest = float(max(one.context for one in slices))
    found = []
    for _, group in groupby(sorted((d for d in deployments if d.parallelism.pp == 1), key=kind), key=kind):
        held = [one for one in group if cache_sequences(one, longest) / one.parallelism.dp >= 1.0]
        narrow = sorted(held, key=lambda deployment: (deployment.parallelism.gpus, deployment.parallelism.dp))[:_SPLITS]
        try:
            found += [(narrow, catalog.connector_for(narrow[0].stack, narrow[0].accelerator))] if narrow else []
        except BadInput:
            continue
    return found


def service_curves(services: Sequence[Disaggregated], slices: Sequence[Slice]) -> list[LoadCurve]:
    """All slices on services of one precision. A level of load is sequences that decode; prompts wait elsewhere."""
    sides, many = Sides(services), np.concatenate(([1.0], GRID))
    contexts = np.array([float(one.context) for one in slices])
    held = np.stack(
        [
            np.minimum(*(cache_sequences(side, contexts) / side.parallelism.dp for side in (one.prefill, one.decode)))
            for one in services
        ]
    )
    under = [_under_load(sides, one, many) for one in slices]
    # As with replicas that do both, what is cached at a middling load stands for all.
    cached = np.stack([found[:, len(many) // 2] for _, found, _ in under], axis=1)
    extra = extra_prefill_s(sides.prefill, slices, cached)
    budget = sides.prefill.chunk_tokens * sides.prefill.dp
    fresh = np.maximum(np.array([one.input_tokens for one in slices]) - cached, 1.0)
    return [
        LoadCurve(
            tpot_s=got.tpot_s[:, 1:],
            found_room_s=(got.ttft_s + load_s)[:, 1:],
            service_s=got.service_s[:, 1:],
            requests_per_s=np.minimum(
                got.requests_per_s, sides.prefill.dp * sides.prefill_replicas / np.maximum(load_s, 1e-12)
            )[:, 1:],
            # With one sequence on the whole service, a step carries no other.
            alone_tpot_s=got.tpot_s[:, 0] * (1.0 - 1e-6),
            alone_ttft_s=(got.ttft_s + load_s)[:, 0],
            extra_s=extra[:, k],
            prompts_a_step=np.maximum(budget[:, 0] / fresh[:, k], 1.0),
            room=np.where(held[:, k] >= 1.0, got.room[:, 0], 0.0),
            engine_limit=(sides.decode.max_sequences * sides.decode_replicas)[:, 0],
            stalls=np.zeros(len(services)),
        )
        for k, (got, _, load_s) in enumerate(under)
    ]


def _under_load(sides: Sides, one: Slice, many: Array) -> tuple[WithoutQueues, Array, Array]:
    """With so many sequences that decode; tokens that prefill finds in its cache, and seconds to load them."""
    got = without_queues(sides, many, one.input_tokens, one.output_tokens)
    if not one.cached_tokens:
        return got, np.zeros_like(got.ttft_s), np.zeros_like(got.ttft_s)
    # Rates are the decode side's, so that what prefill has at each of them follows at once. All of a prompt's cache is
    # sent, as SGLang does, whose decode replicas keep no prefixes; vLLM's fetch what they lack, which takes less.
    cached, load_s = reused_apart(sides.services, one, got.requests_per_s)
    return without_queues(sides, many, one.input_tokens, one.output_tokens, cached_tokens=cached), cached, load_s
