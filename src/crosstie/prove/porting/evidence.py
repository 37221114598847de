"""A folder of results in; what each file says of this port, or why it is not taken, out.

Evidence is of this model, this engine and these accelerators, younger than the checkpoint and the sources, and of a GPU
where the step asks for one. What cannot be told from a file is asked of it in vain, so the file is not taken.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData, BadInput
from crosstie.core.figures import plural
from crosstie.core.finding import Finding, rank, worst
from crosstie.port.capture.parts import part
from crosstie.port.divergence.comparison import compare
from crosstie.port.divergence.records import Recording, read
from crosstie.port.doctor.machine import Machine
from crosstie.port.preflight.effort import Effort, effort_of, effort_of_files
from crosstie.port.preflight.stored import Stored
from crosstie.port.source.effort import FileEffort
from crosstie.prove.porting.steps import Changed, PortEvidence, PortQuestion, Status

T = TypeVar("T")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
# The part of an accelerator's name that devices have in theirs: mi300x, h100, 4090.
_MARK = re.compile(r"[a-z]*\d+[a-z]*")


_PARITY: dict[str, tuple[Status, str]] = {
    "same": ("done", "the same model"),
    "unsure": ("open", "not sure"),
    "differs": ("failed", "not the same model"),
}


class NotTaken(Exception):
    """Why a file is no evidence for a step."""


class ComparedEndpoints(msgspec.Struct, frozen=True, kw_only=True):
    """What of a comparison by `crosstie parity` counts here."""

    a: str
    b: str
    a_model: str
    b_model: str
    verdict: Literal["same", "unsure", "differs"]
    prompts: int
    positions: int
    emulated: bool


def document(file: Path, command: str, *keys: str) -> dict[str, Any]:
    try:
        text = file.read_bytes()
        found = json.loads(text) if text.strip() else None
    except OSError as error:
        raise NotTaken(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise NotTaken(f"is no JSON: save what `crosstie {command} --json` prints") from None
    if found is None:
        raise NotTaken(f"is empty: `crosstie {command}` has not ended, or could not run")
    for key in keys:
        if not isinstance(found, dict) or key not in found:
            raise NotTaken(f"has no '{key}': save what `crosstie {command} --json` prints with this Crosstie")
    return dict(found)


def part_of(found: dict[str, Any], key: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(found[key], kind)
    except msgspec.ValidationError as error:
        raise NotTaken(f"has '{key}' that cannot be read: {error}") from None


def must_be(what: str, said: object, wanted: object) -> None:
    if said != wanted:
        raise NotTaken(f"is of the {what} {said}, not of {wanted}")


def must_be_younger(file: Path, *than: Changed | None) -> None:
    for changed in than:
        if changed and file.stat().st_mtime < changed.at_s:
            raise NotTaken(f"is older than {changed.path}: run its command again")


def judged(findings: Sequence[Finding]) -> Status:
    said = worst(findings)
    return "failed" if said == "error" else "open" if said == "unknown" else "done"


def findings_on(found: dict[str, Any], target: str, *others: str) -> tuple[Finding, ...]:
    if target not in found["verdicts"] and not set(others) & set(found["verdicts"]):
        raise NotTaken(f"is of {', '.join(found['verdicts']) or 'nothing'}, not of {target}")
    every = part_of(found, "findings", tuple[Finding, ...])
    return tuple(one for one in every if not one.target or {target, *others} & set(one.target.split(",")))


def remedies(findings: Sequence[Finding]) -> tuple[str, ...]:
    """Each once, gravest first."""
    grave = [one for one in findings if rank(one.severity) >= rank("setting")]
    ordered = sorted(grave, key=lambda one: -rank(one.severity))
    return tuple(dict.fromkeys(f"{one.what.rstrip('.')}: {one.remedy}" if one.remedy else one.what for one in ordered))


def model_evidence(question: PortQuestion, file: Path) -> PortEvidence:
    found = document(file, "preflight", "model", "engine", "settings", "verdicts", "findings")
    must_be("model", found["model"], question.stored.name)
    must_be("engine", found["engine"], str(question.engine))
    findings = findings_on(found, question.target.id)
    must_be_younger(file, question.checkpoint_changed)
    settings = part_of(found, "settings", dict[str, list[str]]).get(question.target.id, [])
    verdict = f"{found['verdicts'][question.target.id]}{': ' if settings else ''}{' '.join(settings)}"
    return model_says(verdict, findings, file.name)


def model_says(verdict: str, findings: Sequence[Finding], *files: str) -> PortEvidence:
    return PortEvidence(
        status=judged(findings), says=verdict, files=files, findings=tuple(findings),
        effort=effort_of(findings, move=False),
    )  # fmt: skip


def source_evidence(question: PortQuestion, file: Path) -> PortEvidence:
    found = document(file, "preflight source", "source", "verdicts", "findings", "effort", "files", "known", "hipify")
    assert question.source is not None
    if Path(str(found["source"])).resolve() != question.source.resolve():
        raise NotTaken(f"is of {found['source']}, not of {question.source}")
    findings = findings_on(found, question.target.id)
    if found["known"]:
        raise NotTaken("leaves findings out: run its command without --baseline")
    missing = any(one.check == "hipify-missing" for one in findings)
    if part_of(found, "files", dict[str, int]).get("cpp") and found["hipify"] is None and not missing:
        raise NotTaken("does without HIPIFY: run its command without --no-hipify")
    must_be_younger(file, question.source_changed)
    efforts = part_of(found, "effort", tuple[FileEffort, ...])
    return source_says(str(found["verdicts"][question.target.id]), findings, efforts, file.name)


def source_says(verdict: str, findings: Sequence[Finding], efforts: Sequence[FileEffort], *files: str) -> PortEvidence:
    kinds = ["rewrite" if one.rewrite else "local" if one.local else "mechanical" for one in efforts]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    number = sum(one.rewrite + one.local + one.mechanical for one in efforts)
    said = f"{verdict}: {plural(number, 'finding')} in {plural(len(efforts), 'file')}" if number else verdict
    return PortEvidence(
        status=judged(findings), says=said, files=files, findings=tuple(findings), effort=effort_of_files(counts),
    )  # fmt: skip


def kernel_evidence(question: PortQuestion, file: Path) -> tuple[PortEvidence, frozenset[str]]:
    """Also the files whose kernels were compiled, as the document names them."""
    found = document(file, "preflight kernels", "kernels", "verdicts", "findings")
    target = question.target
    findings = findings_on(found, target.id, target.chip.isa.value)
    must_be_younger(file, question.source_changed)
    every = part_of(found, "kernels", list[dict[str, Any]])
    compiled = [str(one.get("file")) for one in every if one.get("target") in (target.id, target.chip.isa.value)]
    named = {*compiled, *(one.where.file for one in findings)}
    worded = {"done": "compiled", "failed": "would fail", "open": "not known"}[judged(findings)]
    effort = effort_of(findings, move=False)
    says = f"{worded}, {plural(len(compiled), 'configuration')}"
    made = PortEvidence(status=judged(findings), says=says, files=(file.name,), findings=findings, effort=effort)
    return made, frozenset(named)


def capture_evidence(question: PortQuestion, file: Path, sources: Sequence[str]) -> PortEvidence:
    """`sources`: Python files of the port, relative to its folder."""
    found = document(file, "preflight capture", "target", "stand_in", "verdicts", "findings")
    must_be("part", found["stand_in"], str(part(question.target.id)))
    module = str(found["target"]).rpartition(":")[0]
    path = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    if not any(covers(path, one) or covers(one, path) for one in sources):
        raise NotTaken(f"is of {found['target']}, which is not in {question.source}")
    must_be_younger(file, question.source_changed)
    findings = part_of(found, "findings", tuple[Finding, ...])
    says = ", ".join(f"{name} {verdict}" for name, verdict in found["verdicts"].items())
    effort: Effort = effort_of(findings, move=False)
    return PortEvidence(status=judged(findings), says=says, files=(file.name,), findings=findings, effort=effort)


def covers(named: str, path: str) -> bool:
    """Whether a file that a document names is that of a tree: documents name files from wherever they were made."""
    whole, inner = Path(named).as_posix().removeprefix("./"), Path(path).as_posix()
    return whole == inner or whole.endswith(f"/{inner}")


def machine_evidence(question: PortQuestion, file: Path, gpus: int) -> PortEvidence:
    """`gpus`: as many as a replica takes."""
    found = document(file, "doctor", "machine", "verdicts", "findings")
    machine = part_of(found, "machine", Machine)
    target = question.target.id
    there = [gpu for gpu in machine.usable if gpu.accelerator == target]
    if not there:
        seen = ", ".join(dict.fromkeys(gpu.label for gpu in machine.usable)) or "no GPU"
        raise NotTaken(f"is of a machine with {seen}, and no {target}")
    findings = findings_on(found, target)
    says = f"{len(there)} x {target}, {machine.taken}: {found['verdicts'].get(target, 'not known')}"
    status = judged(findings)
    if len(there) < gpus:
        status, says = "failed", f"{len(there)} x {target}, and the recipe's replica takes {gpus}"
    return PortEvidence(status=status, says=says, files=(file.name,), findings=findings)


def recording_evidence(question: PortQuestion, file: Path, accelerator: Accelerator, catalog: Catalog) -> PortEvidence:
    """Of the model's forward pass on this accelerator, and not on the CPU."""
    try:
        found = read(file)
    except BadData as error:
        raise NotTaken(error.reason) from None
    device, isa = found.machine.get("device", ""), found.machine.get("architecture", "").partition(":")[0]
    if device == "cpu" or not isa:
        raise NotTaken(f"was recorded on the CPU: it says nothing of {accelerator.id}")
    if isa != accelerator.chip.isa.value or accelerator.id not in _alike(device, isa, accelerator, catalog):
        raise NotTaken(f"was recorded on {device} ({isa}), not on {accelerator.id}")
    if why := _other_model(found, question.stored):
        raise NotTaken(why)
    changed = (question.source_changed,) if accelerator is question.target else ()
    must_be_younger(file, question.checkpoint_changed, *changed)
    return PortEvidence(
        status="done", says=f"{plural(len(found.entries), 'tensor')} on {device}", files=(file.name,)
    )  # fmt: skip


def _alike(device: str, isa: str, accelerator: Accelerator, catalog: Catalog) -> set[str]:
    """Accelerators that a device may be: several have one instruction set, and drivers may give no more than that."""
    same = [one.id for one in catalog.accelerators.values() if one.chip.isa.value == isa]
    named = {name for name in same if (mark := _MARK.search(name)) and mark[0] in re.findall(r"\w+", device.lower())}
    return named or {accelerator.id}


def _other_model(recording: Recording, stored: Stored) -> str:
    """Why the recorded model is another one by its class, width or depth; "" where nothing speaks against it."""
    of = f"is of another model than {stored.name}"
    kind, known = recording.machine.get("model", ""), stored.config.get("architectures") or []
    if known and kind not in known:
        return f"{of}: a {kind}, not a {' or '.join(map(str, known))}"
    width, depth = (stored.config.get(name) for name in ("hidden_size", "num_hidden_layers"))
    layers = {int(number[1]) for name in recording.weights if (number := _LAYER.search(name))}
    if isinstance(depth, int) and layers and len(layers) != depth:
        return f"{of}: {len(layers)} layers, not {depth}"
    if isinstance(width, int) and not any(width in shape for shape in recording.weights.values()):
        return f"{of}: no weight is {width} wide"
    return ""


def diff_evidence(before: Path, after: Path) -> PortEvidence:
    try:
        found = compare(before, after)
    except (BadInput, BadData) as error:
        raise NotTaken(f"cannot be compared: {error}") from None
    files = (before.name, after.name)
    if found.verdict == "same":
        return PortEvidence(status="done", says=f"the same up to rounding: {found.compared:,} modules", files=files)
    return PortEvidence(status="failed", says=str(found), files=files)


def parity_evidence(
    question: PortQuestion, file: Path, names: Sequence[str], machine: PortEvidence | None
) -> PortEvidence:
    """`names`: of the model. Endpoints do not tell their GPUs: that there is one must be known from `machine`."""
    found = document(file, "parity", "comparisons", "lm_eval")
    comparisons = part_of(found, "comparisons", tuple[ComparedEndpoints, ...])
    if not comparisons:
        raise NotTaken("compares nothing")
    for one in comparisons:
        if one.emulated:
            raise NotTaken(f"is of an emulated endpoint: it says nothing of {question.target.id}")
        if one.a == one.b:
            raise NotTaken(f"compares {one.a} with itself")
        for served in (one.a_model, one.b_model):
            if plain(served) not in {plain(name) for name in names}:
                raise NotTaken(f"is of the model {served}, not of {question.stored.name}")
    must_be_younger(file, question.checkpoint_changed, question.source_changed)
    if machine is None:
        raise NotTaken(f"names endpoints, not GPUs: only machine.json can say that there is a {question.target.id}")
    first = next((one for one in comparisons if one.verdict != "same"), comparisons[0])
    worse = any(isinstance(score, dict) and score.get("worse") for score in found["lm_eval"])
    status, said = _PARITY[first.verdict]
    says = f"{said}: {first.b}, {plural(first.prompts, 'prompt')}, {plural(first.positions, 'position')}"
    if worse:
        status, says = "failed", "lm-eval: worse than before"
    return PortEvidence(status=status, says=says, files=(file.name,))


def plain(name: str) -> str:
    """The last part of a model's name, however it is written."""
    return re.sub(r"[^a-z0-9]+", "-", name.rstrip("/").rpartition("/")[2].lower())
