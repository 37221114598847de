"""Deployments of one model as columns: every rate that a step needs, one row a deployment.

Rows are deployments and columns are operating points, so a thousand of each is one array operation.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS
from crosstie.core.model import Format
from crosstie.perf.work import Work, work_of

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Shares of a peak that calibration may not exceed, however well that would fit: bandwidths end at the datasheet's,
# and nobody has been seen above 0.82 of a dense peak (docs/notes/measurements.md). Attention's peak is the 16-bit one,
# and engines may compute it in 8 bits.
CEILINGS = {"compute": 0.85, "weights": 1.0, "cache": 1.0, "attention": 1.5, "link": 1.0}


def attainable(
    constant: str, share: Array, factor: Array, ceiling: Array | None = None, off: Array | None = None
) -> Array:
    """A share of a peak as corrected. A better one bends towards the ceiling rather than stopping at it, so that
    a fit is never without a slope; the catalog's own share may be above the ceiling, and then stays there.

    `off`: the logarithm by which the factor is off in each world. Measurements say how sure the share is that was
    attained, not the factor behind it, so the share moves as the factor would move it here, up to the ceiling.
    """
    most = CEILINGS[constant] if ceiling is None else ceiling
    room = np.maximum(most - share, 1e-9)
    beyond = np.maximum(factor - 1.0, 0.0)
    better = share + room * -np.expm1(-share * beyond / room)
    found = np.asarray(np.where(factor > 1.0, better, share * factor))
    if off is None:
        return found
    slope = np.where(factor > 1.0, factor * share * np.exp(-share * beyond / room) / found, 1.0)
    return np.asarray(np.minimum(found * np.exp(slope * off), np.maximum(most, found)))


class Hardware:
    """Column vectors of shape (deployments, 1)."""

    def __init__(self, deployments: Sequence[Deployment]):
        if not deployments:
            raise BadInput("no deployment to evaluate")
        first = deployments[0]
        for other in deployments[1:]:
            if (other.model, other.precision, other.kv_format) != (first.model, first.precision, first.kv_format):
                raise BadInput("deployments evaluated together must share model, precision and KV format")
        self.deployments = tuple(deployments)
        self.model, self.precision = first.model, first.precision
        self.work = work_of(first.model)
        self.kv_bytes_per_element = first.kv_bytes_per_element

        def split(part: str) -> Array:
            return self.column(lambda d: float(getattr(d.parallelism, part)))

        self.tp, self.pp, self.ep, self.dp = split("tp"), split("pp"), split("ep"), split("dp")
        self.stage_gpus = self.tp * self.dp
        self.memory_bytes_per_s = self.column(lambda d: d.accelerator.memory_bytes_per_s)
        self.elementwise_bytes_per_s = self.memory_bytes_per_s * self.column(lambda d: d.efficiency.elementwise.value)
        self._cache = self.column(lambda d: d.efficiency.cache.value)
        self._kernel = self.column(lambda d: d.efficiency.kernel.si)
        self._host_step = self.column(lambda d: d.stack.host.step.si)
        self._host_prompt = self.column(lambda d: d.stack.host.prompt.si)
        self._host_sequence = self.column(lambda d: d.stack.host.sequence.si)
        self._host_request = self.column(lambda d: d.stack.host.request.si)
        self._host_draft = self.column(lambda d: d.stack.host.draft.si)
        self.host_overlapped = self.column(lambda d: float(d.stack.host.overlapped)) > 0
        self.prefill_first = self.column(lambda d: float(d.stack.scheduling == "prefill-first")) > 0
        self.held_share = self.column(lambda d: d.stack.held_share)
        self.chunk_tokens = self.column(lambda d: d.stack.chunk_tokens_on(d.accelerator.memory_bytes))
        self.max_sequences = self.column(lambda d: d.max_sequences)
        # What adapters make of a step's work.
        self.slowdown = self.column(lambda d: d.adapters.slowdown if d.adapters else 1.0)
        self._experts = self.column(lambda d: d.efficiency.experts.value)
        self._attention = self.column(lambda d: d.efficiency.attention.value)
        self._rates: dict[str, tuple[Array, Array, Array]] = {}
        self._columns: dict[str, Array] = {}
        # What follows from columns, by what it is of; and from corrections too, until these are others.
        self.fixed: dict[Hashable, tuple[Array, ...]] = {}
        self.kept: dict[Hashable, tuple[Array, ...]] = {}
        # Sequences that memory holds at the contexts that were last asked for.
        self.held: dict[tuple[tuple[int, ...], bytes, bytes], Array] = {}
        self._links()
        self._speculation()
        self._own = {name: self.column(_factor(name)) for name in CONSTANTS}
        self._off: dict[str, Array] = {}
        self.correct(self._own)

    @property
    def sides(self) -> "tuple[Hardware, ...]":
        """Itself: a disaggregated service has two."""
        return (self,)

    def put_off(self, logs: Mapping[str, Array]) -> None:
        """Moves the constants of the deployments' own corrections, a column a world."""
        self._off = {name: logs[name] for name in CEILINGS}
        plain = {name: own * np.exp(logs[name]) for name, own in self._own.items() if name not in CEILINGS}
        self.correct(self._own | plain)
        self.varies = True

    def correct_more(self, factors: Mapping[str, Array]) -> None:
        """Multiplies the constants as the deployments' own corrections have them."""
        self.correct({name: own * factors[name] for name, own in self._own.items()})

    def correct(self, factors: Mapping[str, Array]) -> None:
        """Multiplies the constants of the catalog; columns as everything here."""
        self.factors = dict(factors)
        # With a factor for each operating point, points can be neither split nor joined.
        self.varies = any(np.shape(factor)[-1] > 1 for factor in factors.values())
        self.kept.clear()
        self.cache_bytes_per_s = self.memory_bytes_per_s * self._attainable("cache", self._cache)
        self.kernel_s = self._kernel * factors["kernel"]
        self.host_step_s = self._host_step * factors["host_step"]
        self.host_prompt_s = self._host_prompt * factors["host_prompt"]
        self.host_sequence_s = self._host_sequence * factors["host_sequence"]
        self.host_request_s = self._host_request * factors["host_request"]
        self.host_draft_s = self._host_draft * factors["host_draft"]
        self.host_verify_s = self._host_verify * factors["host_verify"]
        self.collective_s = self._collective * factors["collective"]
        self.exchange_s = self._exchange * factors["collective"]
        self.experts_share = self._experts * factors["experts"]
        self._attention_share = self._attainable("attention", self._attention)
        self._link_share = self._attainable("link", self._link)
        self.stage_bytes_per_s = self._stage * self._link_share

    def _attainable(self, constant: str, share: Array, ceiling: Array | None = None) -> Array:
        return attainable(constant, share, self.factors[constant], ceiling, self._off.get(constant))

    def column(self, of: Callable[[Deployment], float]) -> Array:
        return np.array([[of(d)] for d in self.deployments], dtype=np.float64)

    def rates(self, format: Format) -> tuple[Array, Array]:
        """Achievable and peak FLOP/s for weights stored in a format."""
        if format.id not in self._rates:
            names = [compute_format(d, format) for d in self.deployments]
            peak = np.array([[d.accelerator.dense[n].si] for d, n in zip(self.deployments, names, strict=True)])
            share = np.array([[d.efficiency.compute[n].value] for d, n in zip(self.deployments, names, strict=True)])
            ceiling = np.array([[d.efficiency.reached(n)] for d, n in zip(self.deployments, names, strict=True)])
            ceiling = np.minimum(ceiling, CEILINGS["compute"])
            self._rates[format.id] = (np.minimum(share, ceiling), peak, ceiling)
        share, peak, ceiling = self._rates[format.id]
        key = "rates", format.id
        if key not in self.kept:
            self.kept[key] = (peak * self._attainable("compute", share, ceiling),)
        return self.kept[key][0], peak

    def expert_rate(self, format: Format) -> Array:
        """Achievable FLOP/s of the grouped products of experts: no more than a plain one was measured to reach."""
        rate, peak = self.rates(format)
        _, _, ceiling = self._rates[format.id]
        return np.minimum(rate * self.experts_share, np.maximum(peak * ceiling, rate))

    def stream_bytes_per_s(self, format: Format) -> Array:
        """How fast weights of a format come out of memory."""
        width = format.width
        key = "stream", width
        if key not in self.kept:
            share = self._once(f"stream {width}", lambda: self.column(lambda d: d.efficiency.weights[width].value))
            self.kept[key] = (self.memory_bytes_per_s * self._attainable("weights", share),)
        return self.kept[key][0]

    def attention_rates(self, compute: str) -> tuple[Array, Array]:
        """Achievable and peak FLOP/s of attention arithmetic; 16-bit where the format is missing."""

        def peak_of(d: Deployment) -> float:
            return d.accelerator.flop_per_s(compute) or half_precision_flop_per_s(d)

        peak = self._once(f"attention {compute}", lambda: self.column(peak_of))
        return peak * self._attention_share, peak

    def unpacked_bytes_per_weight(self, format: Format) -> Array:
        """Bytes moved to write weights out in 16 bits and read them back, where an engine must."""

        def extra(d: Deployment) -> float:
            return 4.0 if lacks(d, format) and d.stack.materialises(format.id, d.accelerator.vendor) else 0.0

        return self._once(f"unpacked {format.id}", lambda: self.column(extra))

    def _once(self, key: str, make: Callable[[], Array]) -> Array:
        """A column that many steps ask for is made once."""
        if key not in self._columns:
            self._columns[key] = make()
        return self._columns[key]

    def _speculation(self) -> None:
        """Tokens that a step computes and gives of a sequence; who drafts them, in how many passes of which rows."""
        self.queries = self.column(lambda d: float(d.speculation.queries) if d.speculation else 1.0)
        self.tokens_per_step = self.column(lambda d: d.speculation.acceptance_length if d.speculation else 1.0)
        self.speculates = bool((self.queries > 1.0).any())
        # Bookkeeping of a sequence that nothing hides, as long as what it does in every step anyway.
        self._host_verify = self._host_sequence * (self.queries > 1.0)
        self.draft_rounds = self.column(lambda d: float(max(d.speculation.passes, 1)) if d.speculation else 0.0)
        drafters = {d.speculation.drafter.id: d.speculation.drafter
                    for d in self.deployments if d.speculation and d.speculation.drafter}  # fmt: skip
        self.drafters: list[tuple[Work, Array]] = [
            (work_of(drafter), self.column(_passes_of(name))) for name, drafter in drafters.items()
        ]

    def _links(self) -> None:
        def between_stages(d: Deployment) -> float:
            if d.parallelism.gpus > d.accelerator.domain:
                return d.accelerator.scale_out.bandwidth.si
            return peer_bytes_per_s(d)

        self._collective = self.column(lambda d: d.efficiency.collective.si)
        self._link = self.column(lambda d: d.efficiency.link.value)
        self._gpu_link = self.column(lambda d: d.accelerator.scale_up.bandwidth.si)
        self._peer_link = self.column(peer_bytes_per_s)
        self._stage = self.column(between_stages)
        # Stages that reach beyond the domain: only experts do, over each GPU's network port.
        self.domain = self.column(lambda d: float(d.accelerator.domain))
        self.crosses = self.stage_gpus > self.domain
        self.is_wide = self.column(lambda d: float(d.parallelism.is_wide)) > 0
        self._exchange = self.column(lambda d: d.efficiency.exchange.si)
        self.port_bytes_per_s = self.column(lambda d: d.accelerator.scale_out.bandwidth.si * d.efficiency.network.value)

    def link_peak_bytes_per_s(self, ranks: Array) -> Array:
        """What each GPU of a group of `ranks` has of its links.

        A switch gives the GPU's whole bandwidth to any group. A mesh has one link a pair, so a group of
        n uses n-1 of them: two GPUs of an eight-way mesh have a seventh of what eight have.
        """
        return np.minimum(self._peer_link * np.maximum(ranks - 1.0, 1.0), self._gpu_link)

    def link_bytes_per_s(self, ranks: Array) -> Array:
        """What a collective gets out of them."""
        return self.link_peak_bytes_per_s(ranks) * self._link_share


def peer_bytes_per_s(deployment: Deployment) -> float:
    """Peak between two GPUs of one domain, one direction."""
    up, domain = deployment.accelerator.scale_up, deployment.accelerator.domain
    if up.topology.value == "mesh" and domain > 1:
        return up.bandwidth.si / (domain - 1)
    return up.bandwidth.si


def _factor(constant: str) -> Callable[[Deployment], float]:
    return lambda deployment: deployment.correction.factors.get(constant, 1.0)


def _passes_of(drafter: str) -> Callable[[Deployment], float]:
    def passes(deployment: Deployment) -> float:
        found = deployment.speculation
        return float(found.passes) if found and found.drafter and found.drafter.id == drafter else 0.0

    return passes


def compute_format(deployment: Deployment, format: Format) -> str:
    """The compute format that weights of this storage format are multiplied in: the fastest there is."""
    accelerator, constants = deployment.accelerator, deployment.efficiency.compute
    able = [name for name in format.runs_as if has_format(accelerator, format, name)]
    # Engines round 32-bit weights where the units lack them; every accelerator of the catalog has a 16-bit rate.
    able = able or [name for name in ("bf16", "fp16") if name in accelerator.dense]
    return max(able, key=lambda name: accelerator.dense[name].si * constants[name].value)


def has_format(accelerator: Accelerator, format: Format, name: str) -> bool:
    """Whether the matrix units take `name`, in this format's dialect where it is the first choice."""
    if name == format.runs_as[0] and format.dialect:
        return name in accelerator.dense and format.dialect in accelerator.chip.fp4_dialect.value.split("+")
    return name in accelerator.dense


def lacks(deployment: Deployment, format: Format) -> bool:
    """Whether the silicon lacks the format, so that an engine has to unpack it."""
    return not has_format(deployment.accelerator, format, format.runs_as[0])


def half_precision_flop_per_s(deployment: Deployment) -> float:
    rate = deployment.accelerator.flop_per_s("bf16") or deployment.accelerator.flop_per_s("fp16")
    assert rate is not None, "the catalog refuses accelerators without a 16-bit rate"
    return rate
