"""A plan as a document: what `--json` prints, `--save` keeps and `--watch` reads again."""

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import to_builtins

from crosstie.catalog.calibration import Calibration
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import is_date
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadData, CrosstieError
from crosstie.core.question import assumptions
from crosstie.core.units import HOURS_PER_MONTH, HOURS_PER_YEAR
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import Alternative, Carried, FleetPlan, PoolPlan
from crosstie.decide.plan.assumed import plan_question, plan_reckoned
from crosstie.decide.plan.drafts import DraftingPool
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.flips import sure_of_prices
from crosstie.decide.plan.mixture import MIXTURE_COSTS, Mixture
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.shared import SharedPlan, SharedPoolPlan
from crosstie.host.expected import Expectation
from crosstie.port.preflight.readiness import Readiness

FORMAT = "crosstie plan 1"
DIGEST = "digest"


def document(plan: Plan, calibrated: dict[str, str]) -> dict[str, Any]:
    """`calibrated`: which calibration it rests on, as `mark_of` says."""
    runner = plan.runner_up
    return {
        "format": FORMAT,
        "made": plan.made,
        "calibration": calibrated,
        "feasible": plan.answered,
        **assumptions(plan_question(plan), plan_reckoned(plan)),
        "workload": to_builtins(plan.workload),
        "prices": {item.id: {**to_builtins(item.quote), "discount": item.discount} for item in plan.market.items},
        "price_kinds": plan.market.kinds,
        "left_out": {
            name: {"why": f"no price of kind {' or '.join(plan.market.kinds)}", "other": to_builtins(other)}
            for name, other in plan.market.left_out.items()
        },
        "will_not_run": to_builtins(plan.will_not_run),
        "passed_over_unmeasured": to_builtins(plan.passed_over),
        "replicas_considered": plan.replicas_considered,
        "obstacles": to_builtins(plan.obstacles),
        "fleet": _fleet(plan, plan.fleet) if plan.fleet else None,
        # As `serve` takes it and `simulate` reads it again.
        "fleet_file": to_builtins(fleet_of(plan)) if plan.answered else None,
        "shared": _shared(plan.shared) if plan.shared else None,
        "lighter_formats": to_builtins(plan.lighter),
        "memory": to_builtins(plan.memory),
        "together": to_builtins(plan.together),
        "apart": to_builtins(plan.apart),
        "apart_looked_at": to_builtins(plan.outlooks),
        "guide": to_builtins(plan.guide),
        "mixture": _mixture(plan.mixture) if plan.mixture else None,
        "closed_form_usd_per_hour": plan.closed_form_usd_per_hour,
        "single_vendor": to_builtins(plan.single_vendor),
        "with_unmeasured_stacks": to_builtins(plan.unmeasured),
        "runner_up": runner and {"without": runner.without, **to_builtins(runner.fleet)},
        "cheaper_but_less_simple": to_builtins(plan.cheaper),
        "flips": [
            {
                "kind": flip.kind,
                "accelerator": flip.accelerator,
                "usd_per_gpu_hour": flip.usd_per_gpu_hour,
                "at_usd_per_gpu_hour": flip.at_usd_per_gpu_hour,
                "change": flip.change,
                "software_efficiency_change": flip.software,
                "becomes": to_builtins(flip.becomes),
                "sources_usd_per_gpu_hour": [flip.low_usd, flip.high_usd],
                "within_sources": flip.within_sources,
            }
            for flip in plan.flips
        ],
        "sure_of_prices": sure_of_prices(plan.flips, plan.market),
        "prompt_lengths": to_builtins(plan.lengths),
        "years": to_builtins(plan.years),
        "simulated": [
            {
                "class": simulated_class.name,
                "requests": simulated_class.requests,
                "ttft_s": _finite(simulated_class.ttft_s),
                "tpot_s": _finite(simulated_class.tpot_s),
                # Pipelines are not simulated; that is no proof that they hold.
                "targets_hold": simulated_class.holds if simulated_class.requests else None,
                "within_ttft": simulated_class.keeps_ttft,
                "within_tpot": simulated_class.keeps_tpot,
                "predicted_within_ttft": simulated_class.predicted_ttft,
                "predicted_within_tpot": simulated_class.predicted_tpot,
                "turned_away": simulated_class.refused,
                "parked": simulated_class.parked,
            }
            for simulated_class in plan.simulated
        ],
        "confirmed": to_builtins(plan.confirmed),
        # Null where nothing was simulated.
        "targets_hold": plan.holds if plan.simulated or plan.search_failed else None,
        "target_prices": [{**to_builtins(target), "at_floor": target.at_floor} for target in plan.targets],
        "by_estimates": to_builtins(plan.by_estimates),
        "too_dear_to_be_sure": _too_dear(plan.too_dear),
        "sureness": to_builtins(plan.sureness),
        "worth_measuring": _worth(plan),
        "binding_limits": to_builtins(plan.binding),
    }


def _too_dear(alternative: Alternative | None) -> dict[str, Any] | None:
    """The fleet that would be as sure as asked; its price is null where there is none."""
    if alternative is None:
        return None
    found: dict[str, Any] = to_builtins(alternative)
    return found if alternative.gpus else {**found, "usd_per_hour": None, "dearer": None}


def _mixture(day: Mixture) -> dict[str, Any]:
    return {**to_builtins(day), **{key: day.total(key) for key in MIXTURE_COSTS}, "saves": day.saves}


def _worth(plan: Plan) -> dict[str, Any] | None:
    worth = plan.worth_measuring
    if worth is None:
        return None
    return {
        "model": worth.deployment.model.id,
        "accelerator": worth.deployment.accelerator.id,
        "parallelism": to_builtins(worth.deployment.parallelism),
        "precision": worth.deployment.precision.id,
        "stack": worth.deployment.stack.id,
        "input_tokens": worth.input_tokens,
        "output_tokens": worth.output_tokens,
        "in_flight": worth.in_flight,
        "basis": worth.deployment.correction.basis,
        "saves_usd_per_hour": worth.saves_usd_per_hour,
        "expected_usd_per_hour": worth.expected_usd_per_hour,
        "gpus": worth.gpus,
        "commands": plan.measure_commands,
    }


def _finite(value: float | None) -> float | None:
    """What was turned away has no latency, and JSON no word for that."""
    return value if value is not None and math.isfinite(value) else None


def mark_of(calibration: Calibration) -> dict[str, str]:
    """By what and when a calibration was made, and a digest that changes with what it does to estimates."""
    effect = msgspec.json.encode((calibration.constants, calibration.scopes, calibration.posterior), order="sorted")
    return {**calibration.made, DIGEST: hashlib.sha256(effect).hexdigest()[:16]}


def horizon_usd(plan: Plan) -> float | None:
    """Over all years of the horizon; None where the fleet cannot grow as far."""
    fleets = [year.fleet for year in plan.years]
    if any(fleet is None for fleet in fleets):
        return None
    return sum(fleet.usd_per_hour for fleet in fleets if fleet) * HOURS_PER_YEAR


def _fleet(plan: Plan, fleet: FleetPlan) -> dict[str, Any]:
    return {
        "usd_per_hour": fleet.usd_per_hour,
        "uncertainty": to_builtins(plan.uncertainty),
        "speculation": [_drafts(draft) for draft in plan.drafts],
        "usd_per_month": fleet.usd_per_hour * HOURS_PER_MONTH,
        "usd_over_horizon": horizon_usd(plan),
        "watts": fleet.watts,
        "power": to_builtins(plan.power),
        "gpus": fleet.gpus,
        "on_hand": fleet.on_hand,
        "to_be_had": fleet.bought,
        "optimality_gap": fleet.gap,
        "usd_per_million_tokens": to_builtins(fleet.cost),
        "by_class": to_builtins(fleet.by_class),
        "pools": [
            {**_pool(pool, plan.readiness[pool.name]), "measured": plan.measured[pool.name]} for pool in fleet.pools
        ],
    }


def _apart(service: Disaggregated) -> dict[str, Any]:
    """Both sides of one replica of the pool."""

    def side(replicas: int, one: Deployment) -> dict[str, Any]:
        return {"replicas": replicas, "parallelism": to_builtins(one.parallelism), "gpus": replicas * one.gpus}

    return {
        "prefill": side(service.prefill_replicas, service.prefill),
        "decode": side(service.decode_replicas, service.decode),
        "connector": service.connector.id,
        "link": service.link,
    }


def _pool(pool: PoolPlan, judged: Readiness) -> dict[str, Any]:
    deployment = pool.deployment
    return {
        "name": pool.name,
        "model": deployment.model.id,
        "accelerator": deployment.accelerator.id,
        "vendor": deployment.accelerator.vendor,
        "parallelism": to_builtins(deployment.parallelism),
        "apart": _apart(deployment) if isinstance(deployment, Disaggregated) else None,
        "precision": deployment.precision.id,
        "kv_format": deployment.kv_format,
        "stack": deployment.stack.id,
        "release": judged.release,
        "preflight": to_builtins(judged),
        "replicas": pool.replicas,
        "gpus": pool.gpus,
        "usd_per_gpu_hour": pool.usd_per_gpu_hour,
        "usd_per_hour": pool.usd_per_hour,
        "utilisation": pool.utilisation,
        "usd_per_gb_month_of_memory": pool.usd_per_gb_month,
        "usd_per_gb_month_of_cache": pool.usd_per_cache_gb_month,
        "limited_by": pool.limit,
        "in_flight_a_replica": pool.in_flight,
        "most_in_flight_a_replica": pool.most_in_flight,
        "estimate": to_builtins(pool.estimate),
        "carries": [_carried(one) for one in pool.carried],
    }


def _carried(one: Carried) -> dict[str, Any]:
    return {
        "class": one.part.request_class.name,
        "up_to_input": one.part.slice.longest_input,
        "may_miss_ttft": one.part.slice.exempt,
        "share": one.share,
        "requests_per_s": one.requests_per_s,
        "replicas_busy": one.load,
        "usd_per_hour": one.usd_per_hour,
        "limited_by": one.limit,
        "why": one.why,
        "hit_rate": one.hit_rate,
    }


def _shared(shared: SharedPlan) -> dict[str, Any]:
    answer = shared.answer
    return {
        "gpus": {answer.accelerator: answer.gpus} if answer else {},
        "usd_per_hour": answer.usd_per_hour if answer else None,
        "pools": [_shared_pool(pool) for pool in shared.pools],
        "left_out": shared.left_out,
        "simulated": to_builtins(shared.simulated),
    }


def _shared_pool(pool: SharedPoolPlan) -> dict[str, Any]:
    layout = pool.layout
    return {
        "accelerator": pool.accelerator,
        "parallelism": to_builtins(layout.parallelism),
        "replicas": pool.replicas,
        "gpus": pool.gpus,
        "usd_per_hour": pool.usd_per_hour,
        "watts": pool.watts,
        "utilisation": pool.utilisation,
        "limited_by": pool.limit,
        "room_bytes_a_replica": layout.room_bytes,
        "host_bytes_a_replica": layout.host_bytes,
        "expected": _expected(pool.expected),
        "with_the_answers_gpus": _expected(pool.beside),
        "models": [
            {
                "model": one.model,
                "precision": layout.deployments[one.model].precision.id,
                "bytes": one.bytes,
                "least_cache_bytes": one.min_kv_bytes,
                "load_s": one.load_s,
                "pinned": one.pinned,
            }
            for one in layout.hosted
        ],
    }


def _expected(expectation: Expectation) -> dict[str, Any]:
    """By model with the answer's own numbers only: copies have names of their own there."""
    return {
        "requests_per_s": expectation.requests_per_s,
        "cold_share": expectation.cold_share,
        "evictions_per_hour": expectation.evictions_per_hour,
        "cold_wait_s": expectation.wait_s,
        "loading_share": expectation.loading_share,
        "resident_share": expectation.resident,
        "holds": expectation.holds,
    }


class SavedPrice(msgspec.Struct, frozen=True):
    usd: Annotated[float, msgspec.Meta(gt=0)]


class SavedEngine(msgspec.Struct, frozen=True):
    """Of a pool; those that models share say neither."""

    stack: str = ""
    release: str = ""


class SavedFleet(msgspec.Struct, frozen=True):
    gpus: dict[str, int]
    # None where no accelerator can be shared.
    usd_per_hour: float | None
    pools: list[SavedEngine] = []


class SavedConfirmation(msgspec.Struct, frozen=True):
    # By model: what its replicas take in simulation over what closed forms say.
    correction: dict[str, float] = {}


class Saved(msgspec.Struct, frozen=True):
    """What a saved plan must have to be made again and compared."""

    format: str
    made: str
    workload: Workload
    prices: dict[str, SavedPrice]
    calibration: dict[str, str]
    fleet: SavedFleet | None
    # Plans from before models could share replicas have none.
    shared: SavedFleet | None = None
    # How it was confirmed by simulation; None where it was not.
    confirmed: SavedConfirmation | None = None
    # What `simulate` takes: none where no fleet will do, and of plans of earlier versions.
    fleet_file: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def gpus(self) -> dict[str, int]:
        return dict(sum((Counter(one.gpus) for one in (self.fleet, self.shared) if one), Counter[str]()))

    @property
    def pools(self) -> list[SavedEngine]:
        return self.fleet.pools if self.fleet else []

    @property
    def usd_per_hour(self) -> float | None:
        costs = [one.usd_per_hour for one in (self.fleet, self.shared) if one and one.usd_per_hour is not None]
        return sum(costs) if costs else None


class _Format(msgspec.Struct, frozen=True):
    """Read first: of another format nothing else is known."""

    format: str


def read_saved(file: Path) -> Saved:
    try:
        content = file.read_bytes()
        found = msgspec.json.decode(content, type=_Format).format
        if found != FORMAT:
            raise BadData(file, "format", f"is '{found}'; this version reads '{FORMAT}'")
        saved = msgspec.json.decode(content, type=Saved)
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise BadData(file, "", f"is no saved plan: {error}") from None
    if not is_date(saved.made):
        raise BadData(file, "made", f"'{saved.made}' is not a date")
    return saved


def meet_folders(catalog: Catalog, file: Path, workload: Workload) -> None:
    """The catalog knows the models that a saved plan found in folders."""
    for id, folder in workload.folders.items():
        try:
            catalog.model(folder)
        except CrosstieError as error:
            raise BadData(file, f"workload.folders.{id}", str(error)) from None


def _drafts(pool: DraftingPool) -> dict[str, object]:
    kept = pool.speculation
    return {
        "pool": pool.pool,
        "speculation": str(kept),
        "text": kept.text,
        "acceptance_length": kept.acceptance_length,
        "acceptance_range": list(kept.range),
        "basis": kept.basis,
        "source": kept.source,
        **to_builtins(pool.payoff),
        "replicas_if_fewer_kept": pool.replicas_if_fewer,
        "usd_per_hour_more_if_fewer_kept": pool.more_usd_per_hour,
    }
