"""Prefixes that are found again, adapters and pictures: what they do to replicas, plans and bills."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.present import present
from tests.route.fleets import fleet, pool
from tests.small_workload import small

from crosstie.catalog.library import Catalog
from crosstie.catalog.reuse import reuse
from crosstie.catalog.traces import Trace, read_trace, shipped_traces
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.estimate import METRICS
from crosstie.core.workload import HitCurve, PrefixReuse, RequestClass, Slice, Workload
from crosstie.decide.plan.candidates import with_adapters
from crosstie.decide.plan.plan import Plan, plan as make_plan
from crosstie.decide.plan.reuse import encoding_tokens, hit_rate, loaded, room_beside_idle, tokens_at
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.traffic import poisson
from crosstie.decide.plan.trials import Trials
from crosstie.perf.hardware import Hardware
from crosstie.sim.fleet import FleetSimulator, SimulatedRequest

MODEL = "llama-3.3-70b"
LENGTHS = "input = 1000\noutput = 200\n"
CURVE = HitCurve(
    tokens_per_s=1000.0,
    class_tokens_per_s=4000.0,
    cache_tokens=(1000.0, 10_000.0, 100_000.0),
    replicas=(1, 4),
    cached_tokens=((100.0, 500.0, 800.0), (100.0, 200.0, 300.0)),
)


def piece(**changes: object) -> Slice:
    plain = Slice(
        share=1.0, input_tokens=900.0, output_tokens=100.0, longest_input=900, longest_output=100, sample=((900, 100),),
        cached_tokens=800.0, cached_sample=(800.0,), prefix=PrefixReuse(measured=True), hits=CURVE,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def replica(catalog: Catalog, accelerator: str = "h200", tp: int = 2, **more: int) -> Deployment:
    split = Parallelism(tp=tp, **more)
    return catalog.deployment(catalog.model(MODEL), catalog.accelerator(accelerator), split, "fp8", stack="vllm")


def planned(catalog: Catalog, folder: Path, lines: str, lengths: str = LENGTHS) -> Plan:
    file = small(folder, (LENGTHS, f"{lengths}{lines}\n"), ("requests_per_s = 5", "requests_per_s = 200"))
    return make_plan(catalog, read_workload(catalog, file))


def usd(one: Plan) -> float:
    return present(one.fleet).usd_per_hour


def test_the_curve_between_sizes_and_numbers_of_replicas() -> None:
    sizes = np.array([500.0, 1000.0, 5500.0, 1e9])
    assert tokens_at(CURVE, sizes).tolist() == [0.0, 100.0, 300.0, 800.0]
    assert tokens_at(CURVE, sizes, 2.0).tolist() == [0.0, 100.0, 225.0, 550.0]
    assert tokens_at(CURVE, sizes, 64.0).tolist() == [0.0, 100.0, 150.0, 300.0]


def test_fuller_replicas_find_less_and_a_host_helps(catalog: Catalog) -> None:
    machine, clients = Hardware([replica(catalog)]), np.array([1.0, 16.0, 256.0])
    # A replica of 590,000 tokens is to this trace as one of some 100,000 when idle, and of some 1,000 when full.
    sparse = msgspec.structs.replace(CURVE, tokens_per_s=60.0)
    plain = loaded(machine, [piece(hits=sparse)], clients)
    cached = plain.cached_tokens[0]
    assert cached[0] > cached[1] > cached[2] > 0.0
    assert not plain.load_s.any()
    tiers = PrefixReuse(measured=True, host_gib_per_gpu=2000.0)
    hosted = loaded(machine, [piece(hits=sparse, prefix=tiers)], clients)
    assert np.all(hosted.cached_tokens[0] > cached)
    assert np.all(hosted.load_s[0] > 0)
    slow = loaded(machine, [piece(hits=sparse, prefix=msgspec.structs.replace(tiers, host_gb_per_s=5.0))], clients)
    np.testing.assert_allclose(slow.load_s[0, 0], 11.12 * hosted.load_s[0, 0], rtol=0.02)
    # Drives hold what the host has not, and are asked for that alone.
    drives = msgspec.structs.replace(tiers, host_gib_per_gpu=20.0, nvme_gib_per_gpu=2000.0)
    driven = loaded(machine, [piece(hits=sparse, prefix=drives)], clients)
    np.testing.assert_allclose(driven.cached_tokens, hosted.cached_tokens, rtol=0.05)
    assert np.all(driven.load_s[0] > 2 * hosted.load_s[0])
    far = PrefixReuse(measured=True, remote_gib=1e6)
    shared = loaded(machine, [piece(hits=sparse, prefix=far)], clients)
    assert np.all(shared.cached_tokens == 800.0)
    # Half of a prompt over one rail, and for as many of those who ask as find theirs there 25 ms beside.
    quick = msgspec.structs.replace(far, remote_gb_per_s=1e4)
    missed = 1.0 - float(cached[0]) / 800.0
    load_s = loaded(machine, [piece(hits=sparse, prefix=quick)], clients).load_s[0, 0]
    assert load_s == pytest.approx(0.025 * missed, rel=0.02)


def test_spread_requests_find_less(catalog: Catalog) -> None:
    machine, clients = Hardware([replica(catalog)]), np.array([4.0])
    gathered, spread = (
        loaded(machine, [piece(prefix=PrefixReuse(measured=True, routing=routing))], clients).cached_tokens[0, 0]
        for routing in ("gathered", "spread")
    )
    assert spread < gathered


def test_attention_replicas_are_spread_over(catalog: Catalog) -> None:
    model = catalog.model("qwen3-30b-a3b")
    one, four = (
        catalog.deployment(model, catalog.accelerator("h200"), Parallelism(**split), stack="vllm")
        for split in ({"tp": 4}, {"dp": 4, "ep": 4})
    )
    assert hit_rate(four, piece(), 10.0) < hit_rate(one, piece(), 10.0)


def test_idle_conversations_take_room(catalog: Catalog) -> None:
    machine = Hardware([replica(catalog), replica(catalog, tp=4)])
    loads, fits = np.array([1.0, 10.0, 100.0, 1000.0]), np.array([500.0, 1500.0])
    rates = np.array([[0.5, 4.0, 20.0, 40.0], [0.6, 5.0, 30.0, 60.0]])

    def room(idle_s: float) -> list[float]:
        one = piece(hits=None, prefix=PrefixReuse(hit_rate=0.8, idle_s=idle_s))
        return [float(value) for value in room_beside_idle(machine, one, fits, loads, rates)]

    assert room(0.0) == [500.0, 1500.0]
    some, more = room(20.0), room(60.0)
    assert more[0] < some[0] < 500.0
    assert more[1] > more[0], "twice the memory"
    assert room(1e6)[0] == 0.0


@pytest.mark.slow
def test_a_hit_rate_makes_a_plan_cheaper_and_its_memory_dearer(catalog: Catalog, tmp_path: Path) -> None:
    long = "input = 8000\noutput = 100\n"
    whole, cached, idle = (
        planned(catalog, tmp_path, lines, long)
        for lines in ("", "prefix = { hit_rate = 0.9 }", "prefix = { hit_rate = 0.9, idle_s = 30 }")
    )
    assert usd(cached) < 0.7 * usd(whole)
    assert usd(cached) < usd(idle)
    assert present(cached.fleet).pools[0].carried[0].hit_rate == pytest.approx(0.9)


@pytest.mark.slow
def test_the_simulation_of_a_plan_finds_what_the_plan_counts_on(catalog: Catalog, tmp_path: Path) -> None:
    got = planned(catalog, tmp_path, "prefix = { hit_rate = 0.9 }", "input = 8000\noutput = 100\n")
    (one,) = got.workload.classes
    lost = msgspec.structs.replace(one, slices=tuple(msgspec.structs.replace(s, cached_sample=()) for s in one.slices))

    def holds(work: Workload) -> bool:
        return Trials(catalog, work, one.model, scaling_of(work), 1.0).verdict(present(got.fleet).pools).holds

    assert holds(got.workload)
    assert not holds(msgspec.structs.replace(got.workload, classes=(lost,)))


def test_random_traffic_has_the_hits_of_its_class(catalog: Catalog, tmp_path: Path) -> None:
    file = small(tmp_path, (LENGTHS, f"{LENGTHS}prefix = {{ shared_tokens = 600 }}\n"))
    sent = list(poisson(read_workload(catalog, file), 50, None, 1.0, 1).requests())
    assert {one.cached_tokens for one in sent} == {600}
    plain = list(poisson(read_workload(catalog, small(tmp_path)), 50, None, 1.0, 1).requests())
    assert {one.cached_tokens for one in plain} == {0}


@pytest.mark.slow
def test_a_plan_is_confirmed_with_the_hits_of_its_own_memory(catalog: Catalog, tmp_path: Path) -> None:
    """Not with those of endless memory, which would let it do with fewer replicas than it needs."""
    file = tmp_path / "w.toml"
    file.write_text(
        f'[[class]]\nname = "documents"\nmodel = "{MODEL}"\nrequests_per_s = 3\ntrace = "mooncake-conversation"\n'
        'prefix = { measured = true }\n[constraints]\naccelerators = ["h200"]\n'
    )
    got = make_plan(catalog, read_workload(catalog, file))
    assert got.fleet is not None
    trials = Trials(catalog, got.workload, MODEL, scaling_of(got.workload), 1.0)
    found = trials._found(got.fleet.pools, {"documents": 3.0})
    assert all(0.1 < one < 0.9 for one in found)
    sent = list(trials._traffic({"documents": 3.0}, 2000, 1, found, [0] * len(found)))
    rate = sum(one.cached_tokens for one in sent) / sum(one.input_tokens for one in sent)
    (one,) = got.workload.classes
    assert rate < 0.8 * one.cached_tokens / one.input_tokens
    carried = [c for pool in got.fleet.pools for c in pool.carried]
    expected = sum(c.requests_per_s * c.part.slice.input_tokens * c.hit_rate for c in carried)
    asked = sum(c.requests_per_s * c.part.slice.input_tokens for c in carried)
    assert rate == pytest.approx(expected / asked, abs=0.04)


def test_no_room_for_the_cache_is_one_line(catalog: Catalog, tmp_path: Path) -> None:
    got = planned(catalog, tmp_path, "prefix = { hit_rate = 0.9, idle_s = 1000000 }")
    assert got.fleet is None
    (said,) = got.obstacles
    assert said.key == "class 'chat' prefix.idle_s"
    assert "no allowed replica of llama-3.1-8b has room for the cache" in said.why


@pytest.mark.slow
def test_adapters_cost_memory_and_speed(catalog: Catalog, tmp_path: Path) -> None:
    plain, adapted, few = (
        planned(catalog, tmp_path, lines)
        for lines in ("", "lora = { adapters = 20, rank = 16 }", "lora = { adapters = 20, rank = 16, slots = 8 }")
    )
    assert usd(plain) < usd(adapted) < usd(few)
    (held,) = {pool.deployment.decode.adapters for pool in present(adapted.fleet).pools}
    assert held is not None
    assert (held.slots, held.rank) == (20, 16)
    assert any("20 adapters of rank 16, 8 at once" in note for note in few.workload.notes)


def test_an_adapted_replicas_interval_is_wider(tmp_path: Path) -> None:
    catalog = Catalog([])
    file = small(tmp_path, (LENGTHS, f"{LENGTHS}lora = {{ adapters = 4, rank = 8 }}\n"))
    (one,) = read_workload(catalog, file).classes
    plain = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), stack="vllm")
    (adapted,) = with_adapters([plain], [one])
    assert present(adapted.adapters).slowdown == pytest.approx(1 / 0.66)
    before, after = plain.correction.worlds, adapted.correction.worlds
    assert before is not None
    assert after is not None
    assert (after.constants == before.constants).all()
    for plainly, widely in zip(before.metrics.T, after.metrics.T, strict=True):
        (low, high), (lower, higher) = (np.quantile(one, [0.1, 0.9]) for one in (plainly, widely))
        assert lower < low < high < higher
    # What is slow in a world is slow in all metrics.
    longer = after.metrics - before.metrics
    assert np.allclose(longer[:, 0], -longer[:, METRICS.index("throughput")])
    assert with_adapters([plain], [msgspec.structs.replace(one, lora=None)]) == [plain]


@pytest.mark.slow
def test_pictures_are_paid_for(catalog: Catalog, tmp_path: Path) -> None:
    model = ('"llama-3.1-8b"', '"qwen3-vl-32b"')
    bills = []
    for lines in ("", "images = { width = 1024, height = 768, count = 4 }\n"):
        file = small(tmp_path, model, (LENGTHS, f"{LENGTHS}{lines}"), ("requests_per_s = 5", "requests_per_s = 40"))
        workload = read_workload(catalog, file)
        bills.append(usd(make_plan(catalog, workload)))
    assert workload.classes[0].input_tokens == 1000 + 4 * 770
    assert bills[1] > 1.5 * bills[0]


def test_a_plan_is_confirmed_with_its_pictures_encoding(catalog: Catalog, tmp_path: Path) -> None:
    """As the tokens that take as long: four pictures of 3,072 patches take some 25 to 60 ms on an H200."""
    file = small(
        tmp_path,
        ('"llama-3.1-8b"', '"qwen3-vl-32b"'),
        (LENGTHS, f"{LENGTHS}images = {{ width = 1024, height = 768, count = 4 }}\n"),
    )
    (one,) = read_workload(catalog, file).classes
    deployment = catalog.deployment(catalog.model("qwen3-vl-32b"), catalog.accelerator("h200"), stack="vllm")
    found = encoding_tokens(deployment, one.slices[0])
    # Of 16,000 or so that the model computes in a second.
    assert 200 < found < 1500
    assert encoding_tokens(deployment, msgspec.structs.replace(one.slices[0], pictures=None)) == 0.0


def test_the_pictures_of_a_model_that_sees_nothing(catalog: Catalog, tmp_path: Path) -> None:
    file = small(tmp_path, (LENGTHS, f"{LENGTHS}images = {{ width = 10, height = 10 }}\n"))
    with pytest.raises(Exception, match=r"class\[0\].images: nobody says how llama-3.1-8b cuts pictures up"):
        read_workload(catalog, file)


def part_of(trace: Trace, count: int) -> Trace:
    return replace(
        trace, arrival_s=present(trace.arrival_s)[:count], input_tokens=np.minimum(trace.input_tokens[:count], 100_000),
        output_tokens=trace.output_tokens[:count], blocks=present(trace.blocks)[:count],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "accelerator"), [(10, "h200"), (14, "h200"), (22, "mi300x")])
def test_the_planned_hit_rate_is_that_of_a_replay_behind_the_gateways_policy(
    catalog: Catalog, tmp_path: Path, replicas: int, accelerator: str
) -> None:
    """Mooncake's conversations at their own times, through the router to engines with caches of their own."""
    trace = part_of(read_trace(shipped_traces()["mooncake-conversation"]), 3000)
    assert trace.arrival_s is not None
    assert trace.blocks is not None
    assert trace.requests_per_s
    served = pool("a", accelerator, model=MODEL, precision="fp8", parallelism=Parallelism(tp=2), replicas=replicas,
                  backends=tuple(f"http://a{n}" for n in range(replicas)), max_in_flight=256, max_context=131_072)  # fmt: skip
    simulator = FleetSimulator(catalog, fleet(served, classes=()), "cheapest-meeting-target")
    rows = zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.blocks, strict=True)
    simulator.run([SimulatedRequest(float(t), MODEL, int(i), int(o), prefix=blocks) for t, i, o, blocks in rows])
    lines = ["timestamp_ms,input_length,output_length,hash_ids"]
    for t, i, o, blocks in zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.blocks, strict=True):
        lines.append(f"{t * 1e3},{i},{o},{';'.join(map(str, blocks))}")
    (tmp_path / "part.csv").write_text("\n".join(lines))
    (one,) = _read(catalog, tmp_path, trace.requests_per_s).classes
    expected = _planned_hit_rate(replica(catalog, accelerator), one, replicas)
    assert expected == pytest.approx(simulator.hit_rate, abs=0.02)
    assert reuse(trace).cached_tokens(1e12) / float(trace.input_tokens.sum()) > 1.1 * expected, "memory matters"


def _read(catalog: Catalog, folder: Path, rate: float) -> Workload:
    file = folder / "w.toml"
    file.write_text(
        f'[[class]]\nname = "documents"\nmodel = "{MODEL}"\nrequests_per_s = {rate}\ntrace = "part.csv"\n'
        "prefix = { measured = true }\n"
    )
    return read_workload(catalog, file)


def _planned_hit_rate(deployment: Deployment, one: RequestClass, replicas: int) -> float:
    tokens_per_s = one.requests_per_s * (one.input_tokens + one.output_tokens) / replicas
    found = sum(s.share * s.input_tokens * hit_rate(deployment, s, tokens_per_s) for s in one.slices)
    return found / one.input_tokens
