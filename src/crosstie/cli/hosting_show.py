"""How replicas that models share look on a terminal: the answer, every accelerator beside it, and what it rests on."""

from rich.text import Text

from crosstie.core.figures import dollars, gigabytes, seconds, share, significant
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.shared import SharedPlan, SharedPoolPlan
from crosstie.web.parts import Heading, Parts, Table, note

_FROM = {
    "host": "the host's memory, where engines sleep (vLLM's sleep, level 1)",
    "disk": "a disk, into engines that sleep (vLLM's sleep, level 2)",
    "start": "a disk, into engines that are started for them",
}


def shared_parts(plan: Plan, shared: SharedPlan, verbose: bool) -> Parts:
    sharing = plan.workload.sharing
    assert sharing is not None, "a plan has shared replicas because its workload asks for them"
    pool = shared.answer
    many = f"{len(sharing.models)} models"
    if pool is None:
        yield Heading(f"No accelerator can be shared by the {many} of [hosting].")
    else:
        month = dollars(pool.usd_per_hour * HOURS_PER_MONTH)
        what = f"{pool.gpus} {pool.accelerator}"
        price = f"{dollars(pool.usd_per_hour)} an hour ({month} a month)"
        yield Text.assemble(f"Shared by {many}: ", (what, "bold"), f", {price}")
        yield f"  expected at mean traffic: {_expected(pool)}"
        yield from _simulated(shared)
        yield from _pools(shared, pool, verbose)
        if verbose:
            yield from _grounds(pool, sharing.load_from)
    for name, reason in shared.left_out.items() if verbose or pool is None else ():
        yield note(f"  not {name}: {reason}")


def _expected(pool: SharedPoolPlan) -> str:
    expected = pool.expected
    if not expected.loads_per_s:
        return "every model stays resident, nobody waits for a load"
    return (
        f"{significant(expected.evictions_per_hour)} evictions an hour; {share(expected.cold_share)} of requests find "
        f"their model absent and wait {seconds(expected.wait_s)} on average"
    )


def _simulated(shared: SharedPlan) -> Parts:
    seen = shared.simulated
    if seen:
        yield (
            f"  simulated, {seen.requests:,} requests: {significant(seen.evictions_per_hour)} evictions an hour; "
            f"{share(seen.cold_share)} cold, waiting {seconds(seen.wait_p50_s)} at p50 and {seconds(seen.wait_p99_s)} "
            "at p99"
        )


def _pools(shared: SharedPlan, answer: SharedPoolPlan, verbose: bool) -> Parts:
    columns = ["accelerator", ">replicas", "replica", ">$/h", ">util", ">evictions/h", ">cold", ">wait"]
    if verbose:
        columns += [">for models", f">evictions/h with {answer.gpus} GPUs", "limited by"]
    yield Table(columns, [_row(pool)[: len(columns)] for pool in shared.pools])


def _row(pool: SharedPoolPlan) -> list[str]:
    expectation, beside = pool.expected, pool.beside
    return [
        pool.accelerator, f"{pool.replicas:,}", str(pool.layout.parallelism), f"{pool.usd_per_hour:,.2f}",
        share(pool.utilisation), significant(expectation.evictions_per_hour), share(expectation.cold_share),
        seconds(expectation.wait_s) if expectation.loads_per_s else "-", gigabytes(pool.layout.room_bytes),
        significant(beside.evictions_per_hour) if beside.holds else "thrashes", pool.limit,
    ]  # fmt: skip


def _grounds(pool: SharedPoolPlan, load_from: str) -> Parts:
    longest = max(pool.layout.hosted, key=lambda hosted: hosted.load_s)
    yield note(f"  models come from {_FROM[load_from]}; the slowest, {longest.model}, in {seconds(longest.load_s)}")
    if pool.layout.host_bytes:
        size = gigabytes(pool.layout.host_bytes)
        yield note(f"  each replica needs {size} of its host's memory for the weights of all its models")
