import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.plan.compare import Load, Scorecard, compare


def card(catalog: Catalog, model: str, names: str, load: Load, **choices: object) -> Scorecard:
    return compare(catalog, catalog.model(model), [catalog.accelerator(n) for n in names.split()], load, **choices)  # type: ignore[arg-type]


def test_each_pair_gets_a_sentence_that_names_the_winner(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h200 h100-sxm", Load(64, 4096, 1024))
    assert len(got.verdicts) == 3
    rates = {e.accelerator.id: e.estimate.output_tokens_per_s_per_gpu for e in got.entries if e.estimate}
    for sentence in got.verdicts:
        names = [name for name in rates if name in sentence.split(":")[0]]
        best = max(names, key=lambda n: rates[n])
        assert sentence.startswith(best)
        ratio = rates[best] / min(rates[n] for n in names)
        assert f"{ratio:.2f}x" in sentence


def test_without_a_layout_the_fewest_gpus_that_hold_the_load_are_taken(catalog: Catalog) -> None:
    few, many = (card(catalog, "llama-3.1-70b", "mi300x", Load(c, 4096, 1024)).entries[0] for c in (8, 64))
    assert few.deployment
    assert many.deployment
    assert few.deployment.parallelism == Parallelism(tp=1)
    assert many.deployment.parallelism == Parallelism(tp=2)


def test_memory_is_named_where_it_decides(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h100-sxm", Load(27, 4096, 1024), parallelism=None)
    assert "hold model and load on" in got.verdicts[0]
    full = card(catalog, "llama-3.1-70b", "h200 h100-sxm", Load(64, 4096, 1024), parallelism=Parallelism(tp=2))
    assert "h100-sxm has room for 4 of the 64 requests" in full.verdicts[0]
    assert full.entries[1].estimate
    assert full.entries[1].estimate.decode_bound == "memory capacity"


def test_links_are_named_where_they_decide(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h200", Load(64, 4096, 128), parallelism=Parallelism(tp=2))
    assert "prefill communication" in got.verdicts[0]
    assert "64 GB/s each way over the mesh" in got.verdicts[0]


def test_what_cannot_run_is_kept_with_its_reason(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x h100-sxm", Load(1, 128, 128), parallelism=Parallelism(tp=1))
    assert [bool(e.estimate) for e in got.entries] == [True, False]
    assert got.entries[1].problem == "1 GPU cannot hold it"
    assert got.verdicts == []


def test_emulation_is_said(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-70b", "mi300x mi355x h200", Load(8, 128, 128), precision="mxfp4")
    assert got.entries[0].emulated == ("mxfp4 runs as bf16, written out first",)
    assert got.entries[1].emulated == ()
    assert got.entries[2].emulated == ("mxfp4 runs as bf16, unpacked in the kernel",)


def test_equals_are_called_equal(catalog: Catalog) -> None:
    got = card(catalog, "llama-3.1-8b", "mi350x mi355x", Load(1, 128, 512))
    assert "within 3%" in got.verdicts[0]


def test_estimates_say_what_they_rest_on(catalog: Catalog) -> None:
    for entry in card(catalog, "llama-3.1-8b", "mi300x h200", Load(1, 128, 128)).entries:
        assert entry.estimate
        assert "uncalibrated" in entry.estimate.basis


@pytest.mark.parametrize(
    ("load", "reason"), [((0, 1, 1), "--concurrency 0"), ((1, -5, 1), "--input -5"), ((1, 1, 0), "--output 0")]
)
def test_loads_are_checked(load: tuple[int, int, int], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        Load(*load)


def test_context_is_checked(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match="beyond the 40960"):
        card(catalog, "qwen3-8b", "h200", Load(1, 40000, 1000))
