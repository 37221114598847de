"""A file of results in; what it says of this port, or why it is not taken, out.

Evidence is of this model, this engine and these accelerators, younger than the checkpoint and the sources, and of a GPU
where the step asks for one. A file that does not tell is not taken.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData, BadInput
from crosstie.core.figures import plural
from crosstie.core.finding import Finding, rank, worst
from crosstie.port.doctor.machine import Machine
from crosstie.port.preflight.effort import effort_of, effort_of_files
from crosstie.port.preflight.stored import Stored
from crosstie_port.capture.parts import part
from crosstie_port.divergence.comparison import compare
from crosstie_port.divergence.records import Recording, read
from crosstie_port.porting.steps import PortEvidence, PortQuestion, Status
from crosstie_port.source.effort import FileEffort

T = TypeVar("T")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# The part of an accelerator's name that devices have in theirs: mi300x, h100, 4090.
_MARK = re.compile(r"[a-z]*\d+[a-z]*")
_PARITY: dict[str, tuple[Status, str]] = {
    "same": ("done", "the same model"), "unsure": ("open", "not sure"), "differs": ("failed", "not the same model"),
}  # fmt: skip


class NotTaken(Exception):
    """Why a file is no evidence for a step."""


class _Checked(msgspec.Struct, frozen=True, kw_only=True):
    """What the documents of `preflight` and `doctor` have in common; others have more."""

    verdicts: dict[str, str]
    findings: tuple[Finding, ...]

    def on(self, *targets: str) -> tuple[Finding, ...]:
        """Findings on an accelerator; `targets` are its names."""
        if not set(targets) & self.verdicts.keys():
            raise NotTaken(f"is of {', '.join(self.verdicts) or 'nothing'}, not of {targets[0]}")
        return tuple(one for one in self.findings if not one.target or set(targets) & set(one.target.split(",")))


class _ModelDocument(_Checked, frozen=True, kw_only=True):
    checkpoint: str
    engine: str
    settings: dict[str, tuple[str, ...]]


class _SourceDocument(_Checked, frozen=True, kw_only=True):
    source: str
    effort: tuple[FileEffort, ...]
    files: dict[str, int]
    known: int
    hipify: dict[str, Any] | None


class _Compiled(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    target: str


class _KernelDocument(_Checked, frozen=True, kw_only=True):
    kernels: tuple[_Compiled, ...]


class _CaptureDocument(_Checked, frozen=True, kw_only=True):
    target: str
    stand_in: str


class _DoctorDocument(_Checked, frozen=True, kw_only=True):
    machine: Machine


class _ComparedEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    a: str
    b: str
    a_model: str
    b_model: str
    verdict: Literal["same", "unsure", "differs"]
    prompts: int
    positions: int
    emulated: bool


class _ComparedScore(msgspec.Struct, frozen=True, kw_only=True):
    worse: bool


class _ParityDocument(msgspec.Struct, frozen=True, kw_only=True):
    comparisons: tuple[_ComparedEndpoints, ...]
    lm_eval: tuple[_ComparedScore, ...]
    # Of A and B, where a record of their machines was given: accelerators, and how many.
    gpus: dict[str, dict[str, int]] = {}


def _document(file: Path, command: str, kind: type[T]) -> T:
    try:
        text = file.read_bytes()
        if not text.strip():
            raise NotTaken(f"is empty: `crosstie {command}` has not ended, or could not run")
        return msgspec.json.decode(text, type=kind)
    except OSError as error:
        raise NotTaken(f"cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotTaken(f"is not what this `crosstie {command} --json` prints: {error}") from None


def _must_be(what: str, said: object, wanted: object) -> None:
    if said != wanted:
        raise NotTaken(f"is of the {what} {said}, not of {wanted}")


def _must_be_younger(file: Path, *than: Path | None) -> None:
    for other in than:
        if other and file.stat().st_mtime < other.stat().st_mtime:
            raise NotTaken(f"is older than {other}: run its command again")


def checked(says: str, findings: Iterable[Finding]) -> PortEvidence:
    """Done, failed or open by the gravest finding."""
    listed = tuple(findings)
    status: Status = {"error": "failed", "unknown": "open"}.get(worst(listed), "done")  # type: ignore[assignment]
    return PortEvidence(status=status, says=says, findings=listed, effort=effort_of(listed, move=False))


def checked_source(verdict: str, findings: Sequence[Finding], efforts: Sequence[FileEffort]) -> PortEvidence:
    kinds = ["rewrite" if one.rewrite else "local" if one.local else "mechanical" for one in efforts]
    number = sum(file_effort.rewrite + file_effort.local + file_effort.mechanical for file_effort in efforts)
    said = f"{verdict}: {plural(number, 'finding')} in {plural(len(efforts), 'file')}" if number else verdict
    effort = effort_of_files({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)})
    return msgspec.structs.replace(checked(said, findings), effort=effort)


def remedies(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Each once, gravest first."""
    ordered = sorted((one for one in findings if one.severity != "note"), key=lambda finding: -rank(finding.severity))
    return tuple(dict.fromkeys(f"{one.what.rstrip('.')}: {one.remedy}" for one in ordered))


def model_evidence(question: PortQuestion, file: Path) -> PortEvidence:
    document, target = _document(file, "preflight", _ModelDocument), question.target.id
    if Path(document.checkpoint).resolve() != Path(question.stored.asked).resolve():
        raise NotTaken(f"is of {document.checkpoint}, not of {question.stored.asked}")
    _must_be("engine", document.engine, str(question.engine))
    findings = document.on(target)
    _must_be_younger(file, question.newest_weights)
    return checked(
        ": ".join(filter(None, (document.verdicts[target], " ".join(document.settings.get(target, ()))))), findings
    )


def source_evidence(question: PortQuestion, file: Path) -> PortEvidence:
    document, target = _document(file, "preflight source", _SourceDocument), question.target.id
    if question.source and Path(document.source).resolve() != question.source.resolve():
        raise NotTaken(f"is of {document.source}, not of {question.source}")
    findings = document.on(target)
    if document.known:
        raise NotTaken("leaves findings out: run its command without --baseline")
    if document.files.get("cpp") and not document.hipify and not any(one.check == "hipify-missing" for one in findings):
        raise NotTaken("does without HIPIFY: run its command without --no-hipify")
    _must_be_younger(file, question.newest_source)
    return checked_source(document.verdicts[target], findings, document.effort)


def kernel_evidence(question: PortQuestion, file: Path) -> PortEvidence:
    document, names = (
        _document(file, "preflight kernels", _KernelDocument),
        (question.target.id, question.target.chip.isa.value),
    )
    findings = document.on(*names)
    _must_be_younger(file, question.newest_source)
    compiled = [kernel.file for kernel in document.kernels if kernel.target in names]
    made = checked("", findings)
    said = {"done": "compiled", "failed": "would fail"}.get(made.status, "not known")
    says = f"{said}, {plural(len(compiled), 'configuration')}"
    return msgspec.structs.replace(made, says=says, kernels=frozenset([*compiled, *(f.where.file for f in findings)]))


def capture_evidence(question: PortQuestion, file: Path, base: Path, sources: Iterable[str]) -> PortEvidence:
    """`sources`: Python files of the port, relative to its folder."""
    document = _document(file, "preflight capture", _CaptureDocument)
    _must_be("part", document.stand_in, str(part(question.target.id)))
    module = document.target.rpartition(":")[0] or document.target
    dotted = f"/{module.replace('.', '/')}.py"
    if not any(is_file(module, base, source) or f"/{source}".endswith(dotted) for source in sources):
        raise NotTaken(f"is of {document.target}, which is not in {question.source}")
    _must_be_younger(file, question.newest_source)
    return checked(", ".join(f"{name} {verdict}" for name, verdict in document.verdicts.items()), document.findings)


def is_file(named: str, base: Path, name: str) -> bool:
    """Whether a file that a document names is this one of a tree; of a path that is not here (the document was made in
    a container, say) the folder's name must be in it."""
    if Path(named).exists():
        return Path(named).resolve() == (base / name).resolve()
    return f"/{Path(named).as_posix()}".endswith(f"/{base.resolve().name}/{name}")


def machine_evidence(question: PortQuestion, file: Path, gpus: int) -> PortEvidence:
    """`gpus`: as many as a replica takes."""
    document, target = _document(file, "doctor", _DoctorDocument), question.target.id
    there = [gpu for gpu in document.machine.usable if gpu.accelerator == target]
    if not there:
        seen = ", ".join(dict.fromkeys(gpu.label for gpu in document.machine.usable)) or "no GPU"
        raise NotTaken(f"is of a machine with {seen}, and no {target}")
    findings, has = document.on(target), f"{len(there)} x {target}"
    if len(there) < gpus:
        return PortEvidence(status="failed", says=f"{has}, and the recipe's replica takes {gpus}", findings=findings)
    return msgspec.structs.replace(checked(f"{has}: {document.verdicts[target]}", findings), effort=None)


def recording_evidence(
    question: PortQuestion, file: Path, accelerator: Accelerator, others: Iterable[Accelerator]
) -> PortEvidence:
    """Of a forward pass on this accelerator, and not on the CPU. `others`: all that there are."""
    try:
        found = read(file)
    except BadData as error:
        raise NotTaken(error.reason) from None
    device, isa = found.machine.get("device", ""), found.machine.get("architecture", "").partition(":")[0]
    if device == "cpu" or not isa:
        raise NotTaken(f"was recorded on the CPU: it says nothing of {accelerator.id}")
    # Several have one instruction set, and drivers may give no more than that.
    alike = [other.id for other in others if other.chip.isa.value == isa]
    named = [one for one in alike if (mark := _MARK.search(one)) and mark[0] in re.findall(r"\w+", device.lower())]
    if accelerator.id not in (named or alike):
        raise NotTaken(f"was recorded on {device} ({isa}), not on {accelerator.id}")
    if why := _other_model(found, question.stored):
        raise NotTaken(f"is of another model than {question.stored.name}: {why}")
    _must_be_younger(file, question.newest_weights, question.newest_source if accelerator == question.target else None)
    return PortEvidence(status="done", says=f"{plural(len(found.entries), 'tensor')} on {device}")


def _other_model(recording: Recording, stored: Stored) -> str:
    """What of the recorded model is another's: class, depth or width; "" where nothing speaks against it."""
    config, machine = stored.config, recording.machine
    listed = [*(config.get("architectures") or ()), *(config.outer.get("architectures") or ())]
    known, kind = [str(name) for name in listed], machine.get("model", "")
    # Engines have classes of their own.
    if known and kind not in known and "engine" not in machine:
        return f"a {kind}, not a {known[0]}"
    width, depth = (config.get(name) for name in ("hidden_size", "num_hidden_layers"))
    # A vision tower has layers too, and a rank of a pipeline only some.
    towers: dict[str, set[str]] = {}
    for match in map(_LAYER.search, recording.weights):
        if match:
            towers.setdefault(match.string[: match.start(1)], set()).add(match[1])
    counts = sorted(map(len, towers.values()))
    if isinstance(depth, int) and counts and depth not in counts and machine.get("ranks", "1") == "1":
        return f"{counts[-1]} layers, not {depth}"
    if isinstance(width, int) and not any(width in shape for shape in recording.weights.values()):
        return f"no weight is {width} wide"
    return ""


def diff_evidence(before: Path, after: Path) -> PortEvidence:
    try:
        comparison = compare(before, after)
    except (BadInput, BadData) as error:
        raise NotTaken(f"cannot be compared: {error}") from None
    if comparison.verdict == "same":
        return PortEvidence(status="done", says=f"the same up to rounding: {comparison.compared:,} modules")
    return PortEvidence(status="failed", says=str(comparison))


def parity_evidence(question: PortQuestion, file: Path, names: Iterable[str], has_gpu: bool) -> PortEvidence:
    """`names`: of the model. Endpoints do not tell their GPUs: the records of their machines that the comparison was
    given say so; without one, machine.json must say that there is such a GPU at all."""
    document, target = _document(file, "parity", _ParityDocument), question.target.id
    known = {_plain(name) for name in names}
    for comparison in document.comparisons:
        if comparison.emulated:
            raise NotTaken(f"is of an emulated endpoint: it says nothing of {target}")
        if comparison.a == comparison.b:
            raise NotTaken(f"compares {comparison.a} with itself")
        for served in (comparison.a_model, comparison.b_model):
            if _plain(served) not in known:
                raise NotTaken(f"is of the model {served}, not of {question.stored.name}")
    if not document.comparisons:
        raise NotTaken("compares nothing")
    _must_be_younger(file, question.newest_weights, question.newest_source)
    for end, wanted in (("a", question.origin.id), ("b", target)):
        if end in document.gpus and wanted not in document.gpus[end]:
            there = ", ".join(document.gpus[end]) or "no GPU"
            raise NotTaken(f"asked {end.upper()} on a machine with {there}, and no {wanted}")
    if not has_gpu and "b" not in document.gpus:
        raise NotTaken(f"names endpoints, not GPUs: give parity --machine-b, or machine.json must show a {target}")
    if any(score.worse for score in document.lm_eval):
        return PortEvidence(status="failed", says="lm-eval: worse than before")
    gravest = max(document.comparisons, key=lambda endpoints: list(_PARITY).index(endpoints.verdict))
    status, said = _PARITY[gravest.verdict]
    counts = f"{plural(gravest.prompts, 'prompt')}, {plural(gravest.positions, 'position')}"
    missing = "more prompts make it surer" if status == "open" else ""
    shown = {"a": question.origin.id, "b": target}
    on = " and ".join(f"{end.upper()} on {shown[end]}" for end in document.gpus if end in shown)
    place = f" ({on}, by doctor's records)" if on else " (on which GPUs is your word)"
    return PortEvidence(status=status, says=f"{said}: {gravest.b}, {counts}{place}", missing=missing)


def _plain(name: str) -> str:
    """The last part of a model's name, however it is written."""
    return re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rpartition("/")[2].lower())
