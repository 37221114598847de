"""Whether a replica would run, without its files: what preflight says of a model in a precision, for many at once.

Only what layouts and formats decide is asked here. Memory is not: whoever has a layout has counted it already.
"""

from collections.abc import Mapping

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.catalog.precision import GGUF
from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadData
from crosstie.core.finding import VERDICTS, Finding, Location, rank, verdict, worst
from crosstie.core.model import Model, Precision
from crosstie.port.preflight.choices import best_settings
from crosstie.port.preflight.engine import EngineRelease, architecture_findings, engine_from, engines
from crosstie.port.preflight.model import ModelOptions, kernel_findings, needed_operations
from crosstie.port.preflight.operations import Layout, ModelOperation
from crosstie.port.preflight.phrases import told
from crosstie.port.preflight.stored import Stored, read_stored, stored_in

# Engines whose tools write checkpoints of a format, and whose loaders read them; the first that runs is taken.
_WRITERS = {
    "fp8": ("fp8", "compressed-tensors", "quark", "modelopt"),
    "mxfp4": ("quark", "compressed-tensors"),
    "nvfp4": ("modelopt", "compressed-tensors"),
    "int4": ("awq", "gptq", "compressed-tensors"),
    "int8": ("compressed-tensors", "gptq"),
}
_PLAIN = ("bf16", "fp16")
_GGUF = "gguf"
NOT_KNOWN = VERDICTS["unknown"]
WILL_NOT_RUN = VERDICTS["error"]
# Where preflight does not know, but somebody has measured this model in this width there: it has run.
MEASURED = "not known, but measured"


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """What preflight says of a deployment under one release of its engine."""

    # The stack of the catalog, and the release; "" where none is named and preflight has read none.
    engine: str
    release: str
    verdict: str
    # Variables and flags to start it with.
    settings: tuple[str, ...] = ()
    # Whose quantisation the checkpoint is taken to have, where it is not the model's own.
    checkpoint: str = ""
    # All that is no mere note, the gravest first.
    findings: tuple[Finding, ...] = ()

    @property
    def runs(self) -> bool:
        return self.verdict != WILL_NOT_RUN

    @property
    def is_known(self) -> bool:
        return self.verdict != NOT_KNOWN

    @property
    def label(self) -> str:
        return f"{self.engine} {self.release}".strip()

    @property
    def why(self) -> str:
        """The gravest finding, or nothing."""
        return self.findings[0].what if self.findings else ""


class ReadinessCheck:
    """Verdicts of deployments, each question answered once.

    `releases`: by model and stack, where another release than the newest that was read is meant.
    """

    def __init__(self, catalog: Catalog, releases: Mapping[str, Mapping[str, str]] | None = None):
        self._catalog = catalog
        self._releases = releases or {}
        self._engines = {known.stack: known for known in engines().values()}
        self._stored: dict[str, Stored] = {}
        self._forms: dict[tuple[str, str], list[Stored]] = {}
        self._needed: dict[tuple[object, ...], tuple[list[ModelOperation], BadData | None]] = {}
        self._outcomes: dict[tuple[object, ...], tuple[int, Stored]] = {}

    def _engine(self, deployment: Deployment) -> EngineRelease | None:
        """None where no source of that engine was read."""
        known = self._engines.get(deployment.stack.id)
        named = self._named(deployment)
        return engine_from(f"{known.name}=={named}") if known and named else known

    def _named(self, deployment: Deployment) -> str:
        return self._releases.get(deployment.model.id, {}).get(deployment.stack.id, "")

    def runs(self, deployment: Deployment) -> bool:
        """Quickly: whether any checkpoint of that precision would run there at all."""
        engine = self._engine(deployment)
        return engine is None or self._best(deployment, engine)[0] < rank("error")

    def is_known(self, deployment: Deployment) -> bool:
        """Quickly: whether preflight knows, or somebody has measured it."""
        engine = self._engine(deployment)
        return _has_run(deployment) or (engine is not None and self._best(deployment, engine)[0] != rank("unknown"))

    def readiness(self, deployment: Deployment) -> Readiness:
        """The same with settings and findings."""
        engine = self._engine(deployment)
        if engine is None:
            return _unread(deployment, self._named(deployment))
        _, stored = self._best(deployment, engine)
        options = ModelOptions(engine=engine, features=_features(deployment))
        kernels, settings = kernel_findings(
            stored, deployment.model, deployment.accelerator, options, _layout(deployment)
        )
        findings = [*architecture_findings(stored.config, engine), *kernels]
        telling = sorted((one for one in findings if one.severity != "note"), key=lambda one: -rank(one.severity))
        is_own = stored is self._of(deployment.model)
        found = verdict(findings)
        return Readiness(
            engine=deployment.stack.id,
            release=str(engine.version),
            verdict=MEASURED if found == NOT_KNOWN and _has_run(deployment) else found,
            settings=tuple(settings),
            checkpoint="" if is_own else stored.method,
            findings=tuple(telling),
        )

    def caveat(self, deployment: Deployment) -> str:
        """What a figure of it should be read with: that its engine's project calls it unsupported there, or that nobody
        knows whether it runs; nothing otherwise."""
        found = self.readiness(deployment)
        if against := next((finding.what for finding in found.findings if finding.check == "recipe"), ""):
            return against
        return "" if found.is_known else f"{found.verdict} whether it runs with {found.label}: {found.why}"

    def _best(self, deployment: Deployment, engine: EngineRelease) -> tuple[int, Stored]:
        """The rank of the gravest finding, of the checkpoint that fares best."""
        isa, layout, features = deployment.accelerator.chip.isa.value, _layout(deployment), _features(deployment)
        key = (deployment.model.id, engine.name, isa, deployment.precision.id, layout, *features)
        if key not in self._outcomes:
            best: tuple[int, Stored] | None = None
            for stored in self._checkpoints(deployment.model, deployment.precision):
                found = self._rank(stored, deployment.model, isa, engine, layout, features)
                if best is None or found < best[0]:
                    best = found, stored
                if found <= rank("setting"):
                    break
            assert best is not None
            self._outcomes[key] = best
        return self._outcomes[key]

    def _rank(
        self, stored: Stored, model: Model, isa: str, engine: EngineRelease, layout: Layout, features: tuple[str, ...]
    ) -> int:
        key = (id(stored), layout, *features)
        if key not in self._needed:
            self._needed[key] = needed_operations(stored, model, layout, features)
        needed, error = self._needed[key]
        _, before, after = best_settings(engine, isa, needed, {})
        least = [min(rank(one), rank(other)) for one, other in zip(before, after, strict=True)]
        known = worst(architecture_findings(stored.config, engine))
        return max(rank(known), rank("unknown" if error else "note"), *least)

    def _checkpoints(self, model: Model, precision: Precision) -> list[Stored]:
        """The model's own if it has that precision, or whatever people publish or make of it."""
        key = (model.id, precision.id)
        if key not in self._forms:
            own = self._of(model)
            if precision.id == self._catalog.precision(model).id:
                self._forms[key] = [own]
            else:
                self._forms[key] = [stored_in(own, model, precision, writer) for writer in _writers(precision.id)]
        return self._forms[key]

    def _of(self, model: Model) -> Stored:
        if model.id not in self._stored:
            # The catalog's own models are found by name, a user's by its file.
            self._stored[model.id] = read_stored(self._catalog, model.file or model.id)
        return self._stored[model.id]


# What preflight calls the ways to draft; a head of DeepSeek's is loaded as EAGLE's are.
_DRAFTING = {"mtp": "mtp", "eagle3": "eagle", "dspark": "eagle", "draft": "draft", "ngram": "ngram"}


def _features(deployment: Deployment) -> tuple[str, ...]:
    drafts = deployment.speculation
    return (f"speculative-{_DRAFTING[drafts.method]}",) if drafts else ()


def _writers(precision: str) -> tuple[str, ...]:
    if precision in GGUF:
        return (_GGUF,)
    return ("none",) if precision in _PLAIN else _WRITERS.get(precision.split("-")[0], ("other",))


def _has_run(deployment: Deployment) -> bool:
    return not deployment.correction.extrapolated


def _layout(deployment: Deployment) -> Layout:
    split = deployment.parallelism
    return Layout(tp=split.tp, ep=split.ep > 1, kv=deployment.kv_format)


def _unread(deployment: Deployment, release: str) -> Readiness:
    name = deployment.stack.name
    where = Location(file=deployment.stack.file, name="engine")
    finding = told(
        "engine", where, deployment.accelerator.id, engine=name, model=deployment.model.id, known=", ".join(engines())
    )
    said = MEASURED if _has_run(deployment) else NOT_KNOWN
    return Readiness(engine=deployment.stack.id, release=release, verdict=said, findings=(finding,))
