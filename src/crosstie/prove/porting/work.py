"""A checkpoint, sources and a folder of results in; the work of a port in its order, ticked off, out.

What needs no GPU and runs none of the port's own code is worked out here, unless a saved document spares the time; all
else waits for the file that its command writes.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.progress import OnProgress, no_progress
from crosstie.port.preflight.effort import effort_of
from crosstie.port.preflight.engine import engine_from
from crosstie.port.preflight.model import ModelOptions, check_model
from crosstie.port.preflight.stored import read_stored
from crosstie.port.recipe.asked import asked_pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions
from crosstie.port.recipe.recipe import Recipe
from crosstie.port.source.check import preflight_source
from crosstie.port.source.effort import by_file
from crosstie.port.source.files import source_paths
from crosstie.prove.porting.evidence import (
    NotTaken,
    capture_evidence,
    covers,
    diff_evidence,
    kernel_evidence,
    machine_evidence,
    model_evidence,
    model_says,
    parity_evidence,
    recording_evidence,
    remedies,
    source_evidence,
    source_says,
)
from crosstie.prove.porting.steps import (
    Changed,
    Phase,
    PortEvidence,
    PortQuestion,
    PortStep,
    PortWork,
    Status,
    crosstie,
)

_KERNEL = re.compile(rb"^\s*@(?:triton\.)?(?:jit|autotune)\b", re.MULTILINE)
_TRITON = re.compile(rb"^\s*(?:import|from)\s+triton\b", re.MULTILINE)
_TORCH = re.compile(rb"^\s*(?:import|from)\s+torch\b", re.MULTILINE)
_WORSE: tuple[Status, ...] = ("done", "open", "failed")
_DESK = ("model", "source", "kernels", "capture", "recipe")


def port_work(
    checkpoint: str, *, origin: str, target: str, source: str | Path | None = None, engine: str = "vllm",
    results: str | Path | None = None, catalog: Catalog | None = None, on_progress: OnProgress = no_progress,
) -> PortWork:  # fmt: skip
    """What is to be done to move a model from one accelerator to another, and what of it is done.

    `checkpoint`: whatever `preflight` takes. `source`: the CUDA C++ and Python that move with it. `results`: a folder
    with what the steps' commands have written.
    """
    catalog = catalog or Catalog()
    on_progress(0, 0, f"reading {checkpoint}")
    question = _question(catalog, checkpoint, origin, target, source, engine, results)
    return _Work(question, catalog, on_progress).work()


def _question(
    catalog: Catalog, checkpoint: str, origin: str, target: str, source: str | Path | None, engine: str,
    results: str | Path | None,
) -> PortQuestion:  # fmt: skip
    before, after = catalog.accelerator(origin), catalog.accelerator(target)
    if before.id == after.id:
        raise BadInput(f"--from and --to are both {after.id}: nothing to port")
    folder, tree = Path(results) if results else None, Path(source) if source else None
    if folder is not None and not folder.is_dir():
        raise BadInput(f"--results {folder}: no such folder; `mkdir {folder}` makes it")
    if tree is not None and not tree.exists():
        raise BadInput(f"--source {tree}: does not exist")
    stored, path = read_stored(catalog, checkpoint), Path(checkpoint).expanduser()
    files = path.iterdir() if path.is_dir() else [path] if path.exists() else []
    return PortQuestion(
        stored=stored, source=tree, origin=before, target=after, engine=engine_from(engine), results=folder,
        checkpoint_changed=_last_changed(one for one in files if one.suffix in (".json", ".safetensors", ".gguf")),
        source_changed=_last_changed(source_paths(tree)) if tree else None,
    )  # fmt: skip


def _last_changed(files: Iterable[Path]) -> Changed | None:
    found = [(file.stat().st_mtime, str(file)) for file in files if file.is_file()]
    return Changed(path=max(found)[1], at_s=max(found)[0]) if found else None


class _Work:
    """The steps one by one; later ones ask what earlier ones found."""

    def __init__(self, question: PortQuestion, catalog: Catalog, on_progress: OnProgress):
        self.question, self.catalog, self.on_progress = question, catalog, on_progress
        self.target, self.origin = question.target.id, question.origin.id
        self.steps: dict[str, PortStep] = {}
        self.left_out: dict[str, str] = {}
        self.found: dict[str, PortEvidence] = {}
        self.recipes: tuple[Recipe, ...] = ()
        self.names = [question.stored.name, question.stored.asked]

    def work(self) -> PortWork:
        self._model()
        self._sources()
        self._recipe()
        self._record(self.question.origin, "from")
        self._machine()
        self._record(self.question.target, "to")
        self._diff()
        self._parity()
        return PortWork(
            model=self.question.stored.name, origin=self.origin, target=self.target, engine=str(self.question.engine),
            steps=tuple(self.steps.values()), left_out=self.left_out,
        )  # fmt: skip

    # At the desk

    def _model(self) -> None:
        question = self.question
        words = ("preflight", question.stored.asked, "--on", self.target, "--engine", self._engine)
        self._add(
            "model", f"does {question.engine} load and run the checkpoint on {self.target}?", "desk", crosstie(*words),
            "model.json", lambda file: model_evidence(question, file), otherwise=self._checked_model,
        )  # fmt: skip

    def _checked_model(self) -> PortEvidence:
        options, stored = ModelOptions(engine=self.question.engine), self.question.stored
        found = check_model(self.catalog, stored, [self.question.target], options, self.on_progress)
        return model_says(found.verdict_with_settings(self.target), found.findings)

    def _sources(self) -> None:
        question, tree = self.question, self.question.source
        if tree is None:
            self.left_out = dict.fromkeys(("source", "kernels", "capture"), "--source names no sources")
            return
        self._add(
            "source", f"what in {tree} breaks on {self.target}?", "desk",
            crosstie("preflight", "source", tree, "--on", self.target), "source.json",
            lambda file: source_evidence(question, file), otherwise=self._checked_source,
        )  # fmt: skip
        base = tree if tree.is_dir() else tree.parent
        texts = {one.relative_to(base).as_posix(): _bytes(one) for one in source_paths(tree) if one.suffix == ".py"}
        kernels = [name for name, text in texts.items() if _TRITON.search(text) and _KERNEL.search(text)]
        if kernels:
            self._kernels(base, kernels)
        else:
            self.left_out["kernels"] = f"no Triton kernel in {tree}"
        if any(map(_TORCH.search, texts.values())):
            self._capture(list(texts))
        else:
            self.left_out["capture"] = f"no PyTorch code in {tree}"

    def _checked_source(self) -> PortEvidence:
        assert self.question.source is not None
        found = preflight_source(
            self.question.source, on=[self.target], catalog=self.catalog, on_progress=self.on_progress
        )
        return source_says(found.verdicts[self.target], found.findings, by_file(found.findings))

    def _kernels(self, base: Path, files: Sequence[str]) -> None:
        left = list(files)

        def look(file: Path) -> PortEvidence:
            made, named = kernel_evidence(self.question, file)
            mine = [name for name in files if any(covers(one, name) for one in named)]
            if not mine:
                raise NotTaken(f"has no kernel of {self.question.source}")
            left[:] = [name for name in left if name not in mine]
            return made

        found, not_taken = self._looked("kernels*.json", look)
        evidence = _together(found)
        if evidence and left:
            missing = f"{len(left)} of {len(files)} files are not compiled yet"
            evidence = replace(evidence, missing=missing, status=_worst("open", evidence.status))
        first = Path(left[0] if left else files[0])
        into = "kernels.json" if len(files) == 1 else f"kernels-{first.stem}.json"
        more = f"; {len(left) - 1} more files with kernels after it" if len(left) > 1 else ""
        command = self.question.saved(
            "preflight", "kernels", base / first, "--on", f"{self.target},{self.origin}", into=into
        )
        self._keep(
            "kernels", f"do the Triton kernels compile for {self.target}?", "desk", command, into, evidence,
            not_taken, waits=f"waits for {into}{more}",
        )  # fmt: skip

    def _capture(self, sources: Sequence[str]) -> None:
        found, not_taken = self._looked("capture*.json", lambda file: capture_evidence(self.question, file, sources))
        words = ("preflight", "capture", "MODULE:STEP", "--inputs", "MODULE:INPUTS", "--on", self.target)
        self._keep(
            "capture", "can the decode step be captured as a graph?", "desk",
            self.question.saved(*words, into="capture.json"), "capture.json", _together(found), not_taken,
        )  # fmt: skip

    def _recipe(self) -> None:
        question = self.question
        command = crosstie("recipe", question.stored.asked, "--on", self.target, "--engine", self._engine)
        self._keep(
            "recipe", f"how is {question.engine} started on {self.target}?", "desk", command, "",
            self._made_recipe() if self.steps["model"].status != "failed" else None, (), waits="comes after model",
            needs=("model",),
        )  # fmt: skip

    def _made_recipe(self) -> PortEvidence:
        question = self.question
        if question.stored.remote:
            return PortEvidence(
                status="open", says="recipe reads no repository: download config.json, or name a folder"
            )
        try:
            model = question.stored.model(self.catalog)
            self.names += [model.id, model.name, *model.aliases]
            pool, chosen = asked_pool(self.catalog, model, question.target, engine=self._engine)
            self.recipes = RecipeBook(self.catalog, RecipeOptions(chosen=chosen)).recipes(pool)
        except CrosstieError as error:
            return PortEvidence(status="failed", says=str(error))
        first = self.recipes[0]
        says = f"{first.gpus} x {self.target} {first.layout}, {first.engine} {first.release}, {first.precision}"
        return PortEvidence(status="done" if all(one.runs for one in self.recipes) else "failed", says=says)

    # On GPUs

    def _machine(self) -> None:
        gpus = max((one.gpus_on_node for one in self.recipes), default=1)
        command = self.question.saved("doctor", "--engine", self._engine, into="machine.json")
        self._add(
            "machine", f"has the machine with {self.target} what {self.question.engine} needs?", "to", command,
            "machine.json", lambda file: machine_evidence(self.question, file, gpus), needs=_DESK,
        )  # fmt: skip

    def _record(self, accelerator: Accelerator, phase: Phase) -> None:
        question, file = self.question, f"{accelerator.id}.npz"
        name = f"record-{accelerator.id}"
        if question.stored.gguf is not None or question.engine.name == "llama.cpp":
            self.left_out |= dict.fromkeys(
                (name, "diff"), "`crosstie diff` records PyTorch modules; llama.cpp has none"
            )
            return
        folder = question.stored.asked if Path(question.stored.asked).is_dir() else f"./{question.stored.name}"
        self._add(
            name, f"one forward pass, recorded on {accelerator.id}", phase,
            crosstie("diff", "--record", question.file(file), "--model", folder, "--dtype", "float32"), file,
            lambda path: recording_evidence(question, path, accelerator, self.catalog),
            needs=("machine",) if phase == "to" else (),
        )  # fmt: skip

    def _diff(self) -> None:
        if "diff" in self.left_out:
            return
        names = (f"record-{self.origin}", f"record-{self.target}")
        before, after = (self.question.file(f"{one}.npz") for one in (self.origin, self.target))
        missing = [f"{name.removeprefix('record-')}.npz" for name in names if name not in self.found]
        evidence, not_taken = None, []
        if not missing:
            try:
                evidence = diff_evidence(before, after)
            except NotTaken as why:
                not_taken.append(f"{before.name} and {after.name} {why}")
        self._keep(
            "diff", f"which module computes otherwise on {self.target}?", "to", crosstie("diff", before, after),
            f"{before.name} and {after.name}", evidence, not_taken, needs=names,
            waits=f"waits for {' and '.join(missing)}" if missing else "",
        )  # fmt: skip

    def _parity(self) -> None:
        question = self.question
        words = ("parity", f"http://{self.origin}:8000", f"http://{self.target}:8000")
        self._add(
            "parity", f"do {self.origin} and {self.target} serve the same model?", "to",
            question.saved(*words, into="parity.json"), "parity.json",
            lambda file: parity_evidence(question, file, self.names, self.found.get("machine")),
            needs=("machine", "diff"),
        )  # fmt: skip
        parity = self.steps["parity"]
        self.steps["parity"] = replace(parity, effort=effort_of(()))
        if parity.status == "done":
            # What no rule could tell, both endpoints have answered.
            self.steps = {name: _answered(one, self.found.get(name)) for name, one in self.steps.items()}

    # One step

    @property
    def _engine(self) -> str:
        engine = self.question.engine
        return f"{engine.name}=={engine.version}" if engine.named else engine.name

    def _looked(self, pattern: str, look: Callable[[Path], PortEvidence]) -> tuple[list[PortEvidence], list[str]]:
        """What the files of that name say, and why some are not taken."""
        found, not_taken = [], []
        for file in sorted(self.question.results.glob(pattern)) if self.question.results else ():
            try:
                found.append(look(file))
            except NotTaken as why:
                not_taken.append(f"{file.name} {why}")
        return found, not_taken

    def _add(
        self, name: str, what: str, phase: Phase, command: str, file: str, look: Callable[[Path], PortEvidence], *,
        otherwise: Callable[[], PortEvidence] | None = None, needs: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """A step with one file. `otherwise`: how it is worked out here where the file is missing or not taken."""
        found, not_taken = self._looked(file, look)
        evidence = found[0] if found else otherwise() if otherwise else None
        self._keep(name, what, phase, command, file, evidence, not_taken, needs=needs)

    def _keep(
        self, name: str, what: str, phase: Phase, command: str, file: str, evidence: PortEvidence | None,
        not_taken: Sequence[str], *, waits: str = "", needs: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if evidence is not None:
            self.found[name] = evidence
        status: Status = evidence.status if evidence else "open"
        says = "; ".join(filter(None, (evidence.says, evidence.missing))) if evidence else waits or f"waits for {file}"
        before = [one for one in needs if one in self.steps and self.steps[one].status in ("failed", "blocked")]
        if evidence is None and before:
            status, says = "blocked", f"first: {', '.join(before)}"
        findings = evidence.findings if evidence else ()
        self.steps[name] = PortStep(
            name=name, what=what, phase=phase, status=status, says=says, command=command, file=file,
            waiting=evidence is None or bool(evidence.missing), needs=tuple(needs),
            evidence=evidence.files if evidence else (), not_taken=tuple(not_taken),
            remedies=remedies(findings), effort=evidence.effort if evidence else None,
        )  # fmt: skip


def _together(found: Sequence[PortEvidence]) -> PortEvidence | None:
    """Several files of one step."""
    if len(found) < 2:
        return found[0] if found else None
    findings = tuple(dict.fromkeys(finding for one in found for finding in one.findings))
    return PortEvidence(
        status=_worst(*(one.status for one in found)), says="; ".join(one.says for one in found),
        files=tuple(file for one in found for file in one.files), findings=findings,
        effort=effort_of(findings, move=False),
    )  # fmt: skip


def _worst(*statuses: Status) -> Status:
    return max(statuses, key=_WORSE.index)


def _answered(step: PortStep, evidence: PortEvidence | None) -> PortStep:
    if step.status != "open" or evidence is None or evidence.missing:
        return step
    return replace(step, status="done", says=f"{step.says}; answered by parity")


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
