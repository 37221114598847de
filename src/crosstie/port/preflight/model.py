"""The whole check of one model: its files against each accelerator and one engine, findings and verdicts out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.errors import BadData, BadInput, BadParameter, CrosstieError
from crosstie.core.finding import Finding, Location, rank, verdict
from crosstie.core.model import Model
from crosstie.core.progress import OnProgress, no_progress
from crosstie.perf.fit import Placement
from crosstie.port.checkpoint.formats import quantisation_config
from crosstie.port.preflight.choices import best_settings, choice, settings_facts, words
from crosstie.port.preflight.engine import (
    FEATURES,
    EngineRelease,
    architecture_findings,
    draft_findings,
    engine_from,
    feature_operations,
    quantisation_findings,
    recipe_findings,
)
from crosstie.port.preflight.memory import memory_finding, placement_on, ranks_finding, uncounted
from crosstie.port.preflight.numbers import stored_findings
from crosstie.port.preflight.operations import Layout, ModelOperation, model_facts, operations
from crosstie.port.preflight.phrases import told
from crosstie.port.preflight.rules import Facts
from crosstie.port.preflight.settings import setting_findings
from crosstie.port.preflight.stored import Stored, load_operations, read_stored
from crosstie.port.preflight.whole import whole_findings

ScanDepth = Literal["none", "sample", "all"]


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is meant to run; what is None follows from the checkpoint or the accelerator."""

    engine: EngineRelease
    tp: int | None = None
    ep: bool = False
    kv: str | None = None
    context: int | None = None
    features: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    flags: dict[str, str] = {}
    # How much of the FP8 weights is read: none, sample or all.
    scan: ScanDepth = "sample"


class ModelReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and how each accelerator stands with the settings that are best there."""

    name: str
    engine: EngineRelease
    findings: tuple[Finding, ...]
    # By accelerator: the verdict, and the layout that it is about.
    verdicts: dict[str, str]
    layouts: dict[str, str]
    # By accelerator: variables and flags that the engine should be started with.
    settings: dict[str, list[str]]
    # In a few words: the method, the formats, how many tensors and bytes.
    stored: str

    def verdict_with_settings(self, accelerator: str) -> str:
        """The verdict with the settings that it rests on; what does not run is helped by none."""
        plain, settings = self.verdicts[accelerator], " ".join(self.settings[accelerator])
        needed = any(finding.severity == "setting" and finding.target in ("", accelerator) for finding in self.findings)
        if plain == "will not run" or not (settings or needed):
            return plain
        return f"{plain}{':' if plain == 'ready with settings' else ', with'} {settings or 'the remedies below'}"


def preflight(
    model: str, *, on: str | Sequence[str], engine: str = "vllm", tp: int | None = None, ep: bool = False,
    kv: str | None = None, context: int | None = None, features: Sequence[str] = (),
    environment: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None, scan: ScanDepth = "sample",
    catalog: Catalog | None = None, on_progress: OnProgress = no_progress,
) -> ModelReport:  # fmt: skip
    """What breaks when a checkpoint moves to these accelerators.

    `model`: a folder, a GGUF file, a config.json, a name of the catalog or a repository of the hub. `engine`: vllm,
    sglang or llama.cpp, with a release or without ("vllm==0.28.0"). `tp`, `kv` and `context` follow from the model
    where they are None. `features` must work as well (`FEATURES` lists them); `environment` and `flags` are the
    engine's settings; `scan`: how much of the FP8 weights is read.
    """
    catalog = catalog or Catalog()
    options = ModelOptions(
        engine=engine_from(engine), tp=tp, ep=ep, kv=kv, context=context, features=checked_features(features),
        environment=dict(environment or {}), flags=dict(flags or {}), scan=scan,
    )  # fmt: skip
    accelerators = catalog.accelerators_named(on)
    on_progress(0, 0, f"reading {model}")
    return check_model(catalog, read_stored(catalog, model), accelerators, options, on_progress)


def checked_features(asked: Sequence[str]) -> tuple[str, ...]:
    for name in asked:
        if name not in FEATURES:
            raise BadParameter("features", f"{name}: not one of {', '.join(FEATURES)}")
    return tuple(asked)


def check_model(
    catalog: Catalog,
    stored: Stored,
    accelerators: Sequence[Accelerator],
    options: ModelOptions,
    on_progress: OnProgress = no_progress,
) -> ModelReport:
    model, unread = _model(catalog, stored)
    if model and options.context:
        model.check_context(options.context, "the context")
    findings = [
        *stored_findings(stored, accelerators, options.scan, on_progress),
        *whole_findings(stored, model),
        *setting_findings(stored.config),
        *architecture_findings(stored.config, options.engine, options.tp),
        *quantisation_findings(_foreign_method(stored), stored.config, options.engine),
        *draft_findings(stored.config, stored.checkpoint.tensors if stored.checkpoint else None, options.features),
        *unread,
    ]
    layouts: dict[str, str] = {}
    settings: dict[str, list[str]] = {}
    for number, accelerator in enumerate(accelerators, 1):
        on_progress(number, len(accelerators), f"{accelerator.name}: memory and kernels")
        placement, about_memory = _memory(catalog, model, accelerator, options, stored)
        tp = options.tp or (placement.deployment.parallelism.tp if placement else 1)
        layouts[accelerator.id] = str(placement.deployment.parallelism) if placement else f"TP{tp}"
        layout = Layout(tp=tp, ep=options.ep, kv=options.kv or stored.kv)
        about_kernels, settings[accelerator.id] = kernel_findings(stored, model, accelerator, options, layout)
        findings += [*about_memory, *about_kernels]
    verdicts = {
        accelerator.id: verdict(f for f in findings if f.target in ("", accelerator.id)) for accelerator in accelerators
    }
    return ModelReport(
        name=stored.name, engine=options.engine, findings=tuple(findings), verdicts=verdicts, layouts=layouts,
        settings=settings, stored=stored.words,
    )  # fmt: skip


def _foreign_method(stored: Stored) -> str:
    """The name of a method of quantisation that no rule knows; nothing for those that rules decide."""
    if stored.method != "other":
        return ""
    named = quantisation_config(stored.config.outer, Path(stored.config.file)).get("quant_method")
    return str(named or "").lower()


def _model(catalog: Catalog, stored: Stored) -> tuple[Model | None, list[Finding]]:
    """The model as the catalog reads it; where it cannot, operations may be missing, and that is said."""
    try:
        return msgspec.structs.replace(stored.model(catalog), file=str(stored.config.file)), []
    except BadData as error:
        return None, [_not_understood(error)]


def _not_understood(error: BadData) -> Finding:
    return told("config-not-understood", Location(file=error.file, name=error.key), reason=error.reason)


def _memory(
    catalog: Catalog, model: Model | None, accelerator: Accelerator, options: ModelOptions, stored: Stored
) -> tuple[Placement | None, list[Finding]]:
    if model is None:
        return None, []
    context = options.context or min(8192, model.max_context or 8192)
    kv = "fp8" if (options.kv or stored.kv).startswith("fp8") else "bf16"
    if options.tp is not None:
        try:
            Parallelism(tp=options.tp).check(model, accelerator)
        except BadInput as error:
            return None, [ranks_finding(error, model, accelerator)]
    # llama.cpp's converter widens what GGUF has no type for.
    widened = options.engine.name == "llama.cpp" and stored.gguf is None
    for precision in (stored.precision, "bf16") if widened else (stored.precision,):
        try:
            placement = placement_on(
                catalog, model, accelerator, context=context, precision=precision, kv=kv, stack=options.engine.stack,
                tp=options.tp,
            )  # fmt: skip
        except CrosstieError as error:
            reason = error
        else:
            return placement, [memory_finding(placement, model, accelerator, context)]
    return None, [uncounted(reason, model, accelerator)]


def needed_operations(
    stored: Stored, model: Model | None, layout: Layout, features: Sequence[str]
) -> tuple[list[ModelOperation], BadData | None]:
    """All that an engine must do for a model, as far as its config is understood; and what is not."""
    needed = [*load_operations(stored, layout), *feature_operations(stored.config, features)]
    unread = None
    try:
        needed += operations(stored.config, model, layout, stored.linear, stored.experts, stored.sinks)
    except BadData as error:
        unread = error
    of_model = model_facts(stored.config, needed)
    return [msgspec.structs.replace(operation, facts={**operation.facts, **of_model}) for operation in needed], unread


def kernel_findings(
    stored: Stored, model: Model | None, accelerator: Accelerator, options: ModelOptions, layout: Layout
) -> tuple[list[Finding], list[str]]:
    """What runs each operation as things are set, and the settings with which more of them would run well."""
    needed, error = needed_operations(stored, model, layout, options.features)
    # Where the catalog could not read the config either, that has been said.
    unread = [_not_understood(error)] if error and model else []

    def choose(settings: Facts) -> list[Finding]:
        return [choice(options.engine, accelerator, one, settings, str(stored.config.file)) for one in needed]

    given = settings_facts(options.environment, options.flags)
    chosen, _, _ = best_settings(options.engine, accelerator.chip.isa.value, needed, given)
    said, cured = words(chosen), choose({**given, **chosen})
    findings = [_cured(before, after, said) for before, after in zip(choose(given), cured, strict=True)]
    against = recipe_findings(stored.name, stored.config, accelerator.id, options.engine)
    return findings + unread + against, said


def _cured(before: Finding, after: Finding, settings: list[str]) -> Finding:
    """A finding that the settings cure is a matter of settings."""
    if rank(before.severity) <= rank("setting") or rank(after.severity) >= rank(before.severity):
        return before
    asked = " ".join(settings)
    return msgspec.structs.replace(
        before,
        severity="setting" if after.severity == "note" else after.severity,
        what=f"{before.what} With {asked}: {after.what.partition(': ')[2]}",
        evidence=f"{before.evidence}; {after.evidence}",
        remedy=f"set {asked}" if after.severity == "note" else f"set {asked}; {after.remedy}",
    )
