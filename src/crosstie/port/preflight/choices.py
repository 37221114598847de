"""Which kernels run each operation on each chip, by the rules, and the settings with which more of them would run well.

A setting is a variable or a flag that some rule asks for. What it would change is looked up as everything else is,
so a setting that cures one operation and breaks another does not win.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations

from crosstie.core.deployment import Accelerator
from crosstie.core.finding import Finding, Location, rank
from crosstie.port.preflight.engine import EngineRelease
from crosstie.port.preflight.operations import ModelOperation, compute_type
from crosstie.port.preflight.rules import OF_MODEL, Facts, Value, decide, first_standing, possible, rules

# What a check is called in reports and in SARIF, by the operation that it is about.
CHECKS = {
    "load": "loader",
    "kv_cache": "kv-cache",
    "gemm": "kernel-gemm",
    "moe": "kernel-moe",
    "attention": "kernel-attention",
    "mla": "kernel-mla",
    "sparse_attention": "kernel-sparse-attention",
    "linear_attention": "kernel-linear-attention",
    "feature": "feature",
}
_BY = {
    "aiter": "AITER", "hipblaslt": "hipBLASLt", "ck": "Composable Kernel", "triton": "Triton", "hip": "a HIP kernel",
    "torch": "PyTorch's own kernels", "cuda": "a CUDA kernel", "cutlass": "CUTLASS", "flashinfer": "FlashInfer",
    "deepgemm": "DeepGEMM", "marlin": "Marlin", "emulation": "emulation",
}  # fmt: skip

# More would be a search for a needle, and nobody sets them.
_MOST = 3


def settings_facts(environment: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, Value]:
    """What the user sets, as facts that rules may ask for; a type that the engine is told beats the config's."""
    compute = {"compute": compute_type(flags["dtype"])} if flags.get("dtype", "auto") != "auto" else {}
    return {**{f"env.{k}": v for k, v in environment.items()}, **{f"flag.{k}": v for k, v in flags.items()}, **compute}


def choice(
    engine: EngineRelease, accelerator: Accelerator, operation: ModelOperation, settings: Mapping[str, Value], file: str
) -> Finding:
    """The rule that decides, or an honest "unknown" where no rule speaks of this."""
    isa = accelerator.chip.isa.value
    rule = decide(engine.name, engine.version, isa, operation.kind, {**operation.facts, **settings})
    check, where = CHECKS[operation.kind], Location(file=file, name=operation.key)
    if rule is None:
        return Finding(
            check=check, severity="unknown", where=where, grounds="read", target=accelerator.id,
            what=f"{operation.words}: no rule says what {engine} does with it on {isa}",
            evidence="facts: "
            + ", ".join(f"{key} {value}" for key, value in operation.facts.items() if not key.startswith(OF_MODEL)),
            remedy=f"try it on one {accelerator.name} before relying on it"
            + ("" if engine.version <= engine.newest else f"; rules were read up to {engine.name} {engine.newest}"),
        )  # fmt: skip
    # A feature is of the engine, whoever runs it.
    by = f" ({_BY[rule.implementation]})" if rule.implementation in _BY and operation.kind != "feature" else ""
    return Finding(
        check="fp8-dialect" if rule.operation == "load" and _is_fp8(operation) else check,
        severity=rule.outcome,
        what=f"{operation.words}{by}: {rule.says}",
        where=where,
        evidence=f"rule {rule.id}: {rule.source}, of {rule.date}, holds for {engine.name} {rule.versions}",
        grounds="read",
        remedy=rule.remedy,
        target=accelerator.id,
    )


def _is_fp8(operation: ModelOperation) -> bool:
    return str(operation.facts.get("scheme", "")).startswith(("fp8", "nvfp4", "mxfp8"))


@cache
def candidates(engine: str) -> tuple[tuple[str, Value], ...]:
    """Each setting that a rule asks for; of the spellings of one value the first."""
    found = {
        (key, values[0]): None
        for rule in rules(engine)
        for key, values in rule.asked_settings
        if isinstance(values[0], str) and values[0][:1] not in ("", *"!<>%")
    }
    return tuple(found)


def best_settings(
    engine: EngineRelease, isa: str, needed: Sequence[ModelOperation], given: Facts
) -> tuple[dict[str, Value], list[str], list[str]]:
    """Settings beside the given ones that leave the least grave outcomes, none if none helps; and the outcomes of the
    operations without them and with them."""
    ways = [possible(engine.name, engine.version, isa, one.kind, {**one.facts, **given}) for one in needed]
    # Other settings change nothing.
    asked = {key for way in ways for rule in way for key, _ in rule.asked_settings}

    def outcomes(settings: Facts) -> list[str]:
        stands = (first_standing(way, {**given, **settings}) for way in ways)
        return [rule.outcome if rule else "unknown" for rule in stands]

    as_given = outcomes({})
    best, chosen = as_given, dict[str, Value]()
    while any(_gravity(best)) and len(chosen) < _MOST:
        options = [(k, v) for k, v in candidates(engine.name) if k in asked and k not in given and k not in chosen]
        # Two at once where none helps alone: a switch that turns all kernels on, and one that leaves some of them off.
        for together in range(1, min(2, _MOST - len(chosen)) + 1):
            tried = [
                (dict(some), outcomes({**chosen, **dict(some)}))
                for some in combinations(options, together)
                if len(dict(some)) == together
            ]
            step, left = min(tried, key=lambda one: _gravity(one[1]), default=({}, best))
            if _gravity(left) < _gravity(best):
                break
        else:
            break
        chosen, best = {**chosen, **step}, left
    return chosen, as_given, best


def _gravity(outcomes: Sequence[str]) -> list[int]:
    return sorted(map(rank, outcomes), reverse=True)


def words(settings: Facts) -> list[str]:
    """As they are typed: NAME=VALUE for a variable, --name value for a flag, --name for one that is on or off."""
    return [
        f"{key.removeprefix('env.')}={value}"
        if key.startswith("env.")
        else f"--{key.removeprefix('flag.')}{'' if value == 'true' else f' {value}'}"
        for key, value in settings.items()
    ]
