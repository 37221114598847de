"""Services with prefill and decode apart as candidates of a plan: which pairs of replicas, in which numbers, and what
they take of each slice, in the terms that replicas with both together have.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadInput
from crosstie.core.workload import Slice
from crosstie.decide.plan.capacity import GRID, LoadCurve, extra_prefill_s
from crosstie.perf.disaggregated import Sides, without_queues
from crosstie.perf.estimate_apart import matched
from crosstie.perf.memory import cache_sequences

# Of each kind of replica so many splits are tried, the narrowest that hold the longest request.
_SPLITS = 3
# A service is one thing to run and to lose: eight nodes of eight GPUs, or most of a rack.
_MOST_GPUS = 64


def services(catalog: Catalog, deployments: Sequence[Deployment], slices: Sequence[Slice]) -> list[Disaggregated]:
    """Pairs of the replicas that a plan has anyway, of one accelerator and one engine, in numbers that match."""
    if any(one.pictures for one in slices):
        # Where a service apart encodes pictures is not modelled, so that none is offered cheaper than it is.
        return []
    able = [one for one in deployments if one.parallelism.pp == 1]

    def kind(one: Deployment) -> tuple[str, ...]:
        return one.accelerator.id, one.stack.id, one.precision.id, one.kv_format, str(one.speculation or "")

    weight = np.array([one.share for one in slices])
    inputs, outputs = (
        float(np.average([getattr(one, name) for one in slices], weights=weight))
        for name in ("input_tokens", "output_tokens")
    )
    longest = max(one.context for one in slices)
    found: list[Disaggregated] = []
    for _, group in groupby(sorted(able, key=kind), key=kind):
        held = [one for one in group if cache_sequences(one, float(longest)) / one.parallelism.dp >= 1.0]
        narrow = sorted(held, key=lambda one: (one.parallelism.gpus, one.parallelism.dp))
        if not narrow:
            continue
        try:
            connector = catalog.connector_for(narrow[0].stack, narrow[0].accelerator)
        except BadInput:
            continue
        pairs = [(prefill, decode) for prefill in narrow[:_SPLITS] for decode in narrow[:_SPLITS]]
        found += matched(pairs, connector, input_tokens=inputs, output_tokens=outputs, most_gpus=_MOST_GPUS)
    return found


def service_curves(services: Sequence[Disaggregated], slices: Sequence[Slice]) -> list[LoadCurve]:
    """All slices on services of one precision. A level of load is sequences that decode; prompts wait elsewhere."""
    sides = Sides(services)
    found = []
    contexts = np.array([float(one.context) for one in slices])
    held = np.stack(
        [
            np.minimum(*(cache_sequences(side, contexts) / side.parallelism.dp for side in (one.prefill, one.decode)))
            for one in services
        ]
    )
    # Prefix caches of the prefill side are not reckoned with.
    extra = extra_prefill_s(sides.prefill, slices, np.zeros((len(services), len(slices))))
    for k, one in enumerate(slices):
        got = without_queues(sides, np.concatenate(([1.0], GRID)), one.input_tokens, one.output_tokens)
        found.append(
            LoadCurve(
                tpot_s=got.tpot_s[:, 1:],
                found_room_s=got.ttft_s[:, 1:],
                service_s=got.service_s[:, 1:],
                requests_per_s=got.requests_per_s[:, 1:],
                # With one sequence on the whole service, a step carries no other.
                alone_tpot_s=got.tpot_s[:, 0] * (1.0 - 1e-6),
                alone_ttft_s=got.ttft_s[:, 0],
                extra_s=extra[:, k],
                prompts_a_step=np.maximum(sides.prefill.chunk_tokens * sides.prefill.dp / one.input_tokens, 1.0)[:, 0],
                room=np.where(held[:, k] >= 1.0, got.room[:, 0], 0.0),
                engine_limit=(sides.decode.max_sequences * sides.decode_replicas)[:, 0],
                stalls=np.zeros(len(services)),
            )
        )
    return found
