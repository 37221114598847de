"""Disaggregated prefill and decode: limits that can be worked out by hand, and what each engine's habits change."""

import msgspec
import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.disaggregated import Disaggregated, Link
from crosstie.core.errors import BadInput
from crosstie.perf.disaggregated import (
    Sides,
    descriptors,
    disaggregated_state,
    transfer,
)
from crosstie.perf.hardware import Hardware
from crosstie.perf.step import shape, step_s


def side(
    catalog: Catalog,
    model: str = "llama-3.1-8b",
    on: str = "h200",
    stack: str = "sglang",
    kv: str = "bf16",
    **split: int,
) -> Deployment:
    return catalog.deployment(
        catalog.model(model), catalog.accelerator(on), Parallelism(**split), kv_format=kv, stack=stack
    )


def service(
    catalog: Catalog,
    replicas: tuple[int, int] = (1, 1),
    connector: str = "sglang-mooncake",
    prefill: Deployment | None = None,
    decode: Deployment | None = None,
    link: Link = "network",
) -> Disaggregated:
    joined = catalog.connector(connector)
    prefill = prefill or side(catalog, stack=joined.stacks[0])
    return Disaggregated(
        prefill=prefill,
        prefill_replicas=replicas[0],
        decode=decode or prefill,
        decode_replicas=replicas[1],
        connector=joined,
        link=link,
    )


def test_one_client_waits_for_nobody(catalog: Catalog) -> None:
    one = service(catalog)
    alone = disaggregated_state(Sides([one]), 1, 2000, 500)
    hardware = Hardware([one.decode])
    prefill = float(step_s(hardware, shape(prefill_tokens=2000))[0, 0])
    decode = float(step_s(hardware, shape(1, 2250))[0, 0])
    sent = one.connector.start.si + float(transfer(Sides([one]), 2000.0).wire_s[0, 0])
    assert float(alone.tpot_s[0, 0]) == pytest.approx(decode, rel=1e-3)
    assert float(alone.ttft_s[0, 0]) == pytest.approx(0.140 + prefill + sent + 0.5 * decode, rel=1e-2)
    assert float(alone.requests_per_s[0, 0]) == pytest.approx(
        1 / float(alone.ttft_s[0, 0] + 499 * alone.tpot_s[0, 0]), rel=1e-2
    )


def test_a_transfer_by_hand(catalog: Catalog) -> None:
    """Llama-3.1-70B keeps 327,680 bytes a token in 16 bits: a quarter of it on each GPU of TP4, through its own port
    of 50 GB/s, of which NIXL reaches 87%. 80 layers x 512 blocks x keys and values are 81,920 descriptors."""
    tp4 = side(catalog, "llama-3.1-70b", stack="vllm", tp=4)
    one = service(catalog, connector="vllm-nixl", prefill=tp4)
    assert float(descriptors(one, 8192)) == 81_920
    got = transfer(Sides([one]), 8192.0)
    wire = 8192 * 327_680 / 4 / (50e9 * 0.87)
    assert float(got.received_s[0, 0]) == pytest.approx(wire, rel=1e-6)
    assert float(got.wire_s[0, 0]) == pytest.approx(81_920 * 4.2e-6 + wire, rel=1e-6)


def test_a_latent_cache_is_fetched_whole_by_every_rank_and_few_senders_are_shared(catalog: Catalog) -> None:
    """DeepSeek-R1: 70,272 bytes a token; eight ranks fetch it from four."""
    four, eight = (side(catalog, "deepseek-r1", "b200", "tensorrt-llm", tp=n) for n in (4, 8))
    one = service(catalog, connector="tensorrt-llm", prefill=four, decode=eight)
    got = transfer(Sides([one]), 8192.0)
    alone = 8192 * 70_272 / (50e9 * 0.87)
    assert float(got.received_s[0, 0]) == pytest.approx(alone, rel=1e-3)
    assert float(got.sent_s[0, 0]) == pytest.approx(2 * alone, rel=1e-3)
    assert float(descriptors(one, 8192)) == 61 * 256


def test_the_scale_up_fabric_is_faster_than_the_network(catalog: Catalog) -> None:
    one = side(catalog, "deepseek-r1", "gb200", "tensorrt-llm", tp=8)
    slow, fast = (service(catalog, connector="tensorrt-llm", prefill=one, link=link) for link in ("network", "fabric"))
    times = transfer(Sides([slow, fast]), 8192.0).received_s[:, 0]
    assert times[0] / times[1] == pytest.approx(900 / 50, rel=1e-6)


def test_many_clients_get_what_the_slower_side_gives(catalog: Catalog) -> None:
    """One decode replica behind many prefill replicas decodes as much as its memory holds, and the other way round."""
    prompts = disaggregated_state(Sides([service(catalog, (1, 20))]), 2000, 8000, 200)
    hardware = Hardware([side(catalog)])
    full = float(step_s(hardware, shape(prefill_tokens=8192, prefill_span=8000))[0, 0])
    assert float(prompts.requests_per_s[0, 0]) == pytest.approx(8192 / 8000 / full, rel=0.02)
    assert float(prompts.prefill_busy[0, 0]) == pytest.approx(1, rel=0.02)
    assert not prompts.capacity_binds[0, 0]
    answers = disaggregated_state(Sides([service(catalog, (20, 1))]), 5000, 1000, 1000)
    fits = float(answers.concurrency_that_fits[0, 0])
    assert float(answers.decoding[0, 0]) == pytest.approx(fits, rel=0.05)
    assert answers.capacity_binds[0, 0] or answers.engine_binds[0, 0]
    assert float(answers.prefill_busy[0, 0]) < 0.9
    assert float(answers.ttft_s[0, 0]) > 1


def test_clients_are_where_littles_law_has_them(catalog: Catalog) -> None:
    clients = np.array([1, 4, 30, 200, 900, 4000.0])
    for joined in ("sglang-mooncake", "vllm-nixl"):
        got = disaggregated_state(Sides([service(catalog, (1, 2), joined)]), clients, 3000, 300)
        inside = got.requests_per_s * (got.ttft_s + 299 * got.tpot_s)
        assert inside[0] == pytest.approx(clients, rel=0.01)
        assert (np.diff(got.output_tokens_per_s[0]) > -1e-2 * got.output_tokens_per_s[0, :-1]).all()
        assert (np.diff(got.ttft_s[0]) > -1e-6).all()


def test_who_gives_the_first_token_decides_where_the_transfer_is_seen(catalog: Catalog) -> None:
    base = service(catalog, connector="vllm-nixl")
    plain = msgspec.structs.replace(base.connector, recomputes=False)
    prefill, sent, decode = (
        disaggregated_state(
            Sides(
                [msgspec.structs.replace(base, connector=msgspec.structs.replace(plain, first_token=who))]
            ),
            1, 4000, 11,
        )
        for who in ("prefill", "transfer", "decode")
    )  # fmt: skip
    moved, step = float(sent.transfer_s[0, 0]), float(sent.tpot_s[0, 0])
    assert float(sent.ttft_s[0, 0] - prefill.ttft_s[0, 0]) == pytest.approx(moved + step / 2, rel=2e-2)
    assert float(decode.ttft_s[0, 0] - sent.ttft_s[0, 0]) == pytest.approx(step, rel=2e-2)
    assert float(prefill.tpot_s[0, 0] - sent.tpot_s[0, 0]) == pytest.approx((moved + step / 2) / 10, rel=2e-2)


def test_layers_that_leave_early_hide_their_transfer(catalog: Catalog) -> None:
    one = service(catalog, connector="vllm-moriio", prefill=side(catalog, on="mi300x", stack="vllm"))
    late = msgspec.structs.replace(one, connector=msgspec.structs.replace(one.connector, by_layer=False))
    early, end = disaggregated_state(Sides([one, late]), 1, 16_000, 100).transfer_s[:, 0]
    assert early - 0.005 == pytest.approx((end - 0.005) / 32, rel=1e-3)


def test_a_token_computed_again_makes_decode_steps_longer(catalog: Catalog) -> None:
    one = service(catalog, connector="vllm-nixl")
    never = msgspec.structs.replace(one, connector=msgspec.structs.replace(one.connector, recomputes=False))
    again, plain = disaggregated_state(Sides([one, never]), 64, 500, 100).tpot_s[:, 0]
    assert again > 1.01 * plain


@pytest.mark.parametrize(
    ("replicas", "changed", "message"),
    [
        ((0, 1), {}, "0 prefill replicas: a decode pool alone answers nobody"),
        ((1, 0), {}, "0 decode replicas: a prefill pool alone answers nobody"),
        ((1, 1), {"on": "mi300x"}, "no engine is known to hand a cache from one vendor to the other"),
        ((1, 1), {"kv": "fp8"}, "prefill keeps its cache in bf16 and decode in fp8"),
        ((1, 1), {"stack": "vllm"}, "both sides run one engine"),
        ((1, 1), {"pp": 2}, "pipeline stages are not modelled"),
        ((1, 1), {"model": "qwen3-8b"}, "both sides serve one model"),
    ],
)
def test_sides_that_cannot_be_joined_are_refused(
    catalog: Catalog, replicas: tuple[int, int], changed: dict[str, object], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        service(catalog, replicas, prefill=side(catalog), decode=side(catalog, **changed))  # type: ignore[arg-type]


def test_recurrent_states_are_handed_over_between_equal_widths_only(catalog: Catalog) -> None:
    four, eight = (side(catalog, "qwen3.5-397b-a17b", "b200", "vllm", tp=n) for n in (4, 8))
    with pytest.raises(BadInput, match="only between equal TP: prefill has 4, decode 8"):
        service(catalog, connector="vllm-nixl", prefill=four, decode=eight)


def test_a_fabric_does_not_reach_beyond_its_domain(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="16 GPUs are not in one scale-up domain of 8"):
        service(catalog, prefill=side(catalog, tp=8), link="fabric")


def test_bad_loads_are_refused(catalog: Catalog) -> None:
    sides = Sides([service(catalog)])
    with pytest.raises(BadInput, match="concurrency must be at least 1"):
        disaggregated_state(sides, 0, 100, 100)
    with pytest.raises(BadInput, match="cached tokens must be 0 to the input"):
        disaggregated_state(sides, 1, 100, 100, cached_tokens=200)
