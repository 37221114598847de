"""Who runs each operation on each chip, by the rules: operations in, findings out."""

from collections.abc import Mapping

from crosstie.core.accelerator import Accelerator
from crosstie.core.finding import Finding, Location
from crosstie.port.preflight.engine import Engine
from crosstie.port.preflight.operations import Operation, compute_type
from crosstie.port.preflight.rules import Value, decide

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


def settings_facts(environment: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, Value]:
    """What the user sets, as facts that rules may ask for; a type that the engine is told beats the config's."""
    told = {"compute": compute_type(flags["dtype"])} if flags.get("dtype", "auto") != "auto" else {}
    return {**{f"env.{k}": v for k, v in environment.items()}, **{f"flag.{k}": v for k, v in flags.items()}, **told}


def choice(
    engine: Engine, accelerator: Accelerator, operation: Operation, settings: Mapping[str, Value], file: str
) -> Finding:
    """The rule that decides, or an honest "unknown" where no rule speaks of this."""
    isa = accelerator.chip.isa.value
    rule = decide(engine.name, engine.version, isa, operation.kind, {**operation.facts, **settings})
    check, where = CHECKS[operation.kind], Location(file=file, name=operation.key)
    if rule is None:
        return Finding(
            check=check, severity="unknown", where=where, grounds="read", target=accelerator.id,
            what=f"{operation.words}: no rule says what {engine} does with it on {isa}",
            evidence=f"facts: {_facts(operation)}",
            remedy=f"try it on one {accelerator.name} before relying on it"
            + ("" if engine.version <= engine.newest else f"; rules were read up to {engine.name} {engine.newest}"),
        )  # fmt: skip
    # A feature is of the engine, whoever runs it.
    by = f" ({_BY[rule.implementation]})" if rule.implementation in _BY and operation.kind != "feature" else ""
    return Finding(
        check="fp8-dialect" if rule.operation == "load" and _is_fp8(operation) else check,
        severity=rule.severity,
        what=f"{operation.words}{by}: {rule.says}",
        where=where,
        evidence=f"rule {rule.id}: {rule.source}, of {rule.date}, holds for {engine.name} {rule.versions}",
        grounds="read",
        remedy=rule.remedy,
        target=accelerator.id,
    )


def _is_fp8(operation: Operation) -> bool:
    return str(operation.facts.get("scheme", "")).startswith(("fp8", "nvfp4", "mxfp8"))


def _facts(operation: Operation) -> str:
    return ", ".join(f"{name} {value}" for name, value in operation.facts.items())
