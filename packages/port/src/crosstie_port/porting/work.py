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
from crosstie.core.figures import plural
from crosstie.core.progress import OnProgress, no_progress
from crosstie.port.preflight.effort import effort_of
from crosstie.port.preflight.engine import engine_from
from crosstie.port.preflight.model import ModelOptions, check_model
from crosstie.port.preflight.stored import read_stored
from crosstie.port.recipe.asked import asked_pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions
from crosstie_port.porting import evidence as of
from crosstie_port.porting.steps import Phase, PortEvidence, PortQuestion, PortStep, PortWork, Status, crosstie
from crosstie_port.source.check import preflight_source
from crosstie_port.source.effort import by_file
from crosstie_port.source.files import source_paths

# Where commands put their files if nobody says where.
RESULTS = Path("results")
_KERNEL = re.compile(rb"^\s*@(?:triton\.)?(?:jit|autotune)\b", re.MULTILINE)
_IMPORTS = {name: re.compile(rb"^\s*(?:import|from)\s+%b\b" % name, re.MULTILINE) for name in (b"triton", b"torch")}
# Bytes a parameter; float32 sees most.
_RECORDED = {"float32": 4, "bfloat16": 2}
_BY_HOOK = (
    "vllm serve MODEL --enforce-eager --no-enable-prefix-caching --worker-extension-cls "
    "crosstie_port.divergence.engines.RecordOutputs"
)
_RANK: tuple[Status, ...] = ("done", "open", "failed")
Seen = tuple[PortEvidence | None, list[str]]


def port_work(
    checkpoint: str, *, origin: str, target: str, source: str | Path | None = None, engine: str = "vllm",
    results: str | Path | None = None, catalog: Catalog | None = None, on_progress: OnProgress = no_progress,
) -> PortWork:  # fmt: skip
    """What is to be done to move a model from one accelerator to another, and what of it is done.

    `checkpoint`: whatever `preflight` takes. `source`: the CUDA C++ and Python that move with it. `results`: a folder
    with what the steps' commands have written.
    """
    catalog = catalog or Catalog()
    before, after = catalog.accelerator(origin), catalog.accelerator(target)
    if before.id == after.id:
        raise BadInput(f"--from and --to are both {after.id}: nothing to port")
    if results and not Path(results).is_dir():
        raise BadInput(f"--results {results}: no such folder; `mkdir {results}` makes it")
    if source and not Path(source).exists():
        raise BadInput(f"--source {source}: does not exist")
    on_progress(0, 0, f"reading {checkpoint}")
    stored, path = read_stored(catalog, checkpoint), Path(checkpoint).expanduser()
    files = path.iterdir() if path.is_dir() else [path] if path.exists() else []
    question = PortQuestion(
        stored=stored, source=Path(source) if source else None, origin=before, target=after,
        engine=engine_from(engine), results=Path(results or RESULTS),
        newest_weights=_newest(file for file in files if file.suffix in (".json", ".safetensors", ".gguf")),
        newest_source=_newest(source_paths(Path(source))) if source else None,
    )  # fmt: skip
    return _Work(question, catalog, bool(results), on_progress).work()


def _newest(files: Iterable[Path]) -> Path | None:
    return max((one for one in files if one.is_file()), key=lambda one: (one.stat().st_mtime, str(one)), default=None)


class _Work:
    """The steps one by one; later ones ask what earlier ones found."""

    def __init__(self, question: PortQuestion, catalog: Catalog, reads: bool, on_progress: OnProgress):
        self.question, self.catalog, self.reads, self.on_progress = question, catalog, reads, on_progress
        self.to, self.origin, named = question.target.id, question.origin.id, question.engine
        self.engine = f"{named.name}=={named.version}" if named.named else named.name
        self.steps: dict[str, PortStep] = {}
        self.left_out: dict[str, str] = {}
        # As the model may be called where it is served, and GPUs of one machine that a replica takes.
        self.names, self.gpus = [question.stored.name, question.stored.asked], 1
        # Of the whole model, once the recipe has read it.
        self.parameters = 0.0

    def work(self) -> PortWork:
        self._model()
        if self.question.source:
            self._sources(self.question.source)
        else:
            self.left_out = dict.fromkeys(("source", "kernels", "capture"), "--source names no sources")
        self._recipe()
        desk = tuple(self.steps)
        records = self.question.stored.gguf is None and self.question.engine.name != "llama.cpp"
        if records:
            self._record(self.question.origin, "from")
        self._machine(desk)
        if records:
            self._record(self.question.target, "to", "machine")
            self._diff()
        else:
            names = (f"record-{self.origin}", f"record-{self.to}", "diff")
            self.left_out |= dict.fromkeys(names, "`crosstie diff` records PyTorch modules; llama.cpp has none")
        self._parity()
        return PortWork(
            model=self.question.stored.name, origin=self.origin, target=self.to, engine=str(self.question.engine),
            steps=tuple(self.steps.values()), left_out=self.left_out,
        )  # fmt: skip

    # At the desk

    def _model(self) -> None:
        asked, engine = self.question.stored.asked, self.question.engine
        evidence, not_taken = self._seen("model.json", lambda file: of.model_evidence(self.question, file))
        if evidence is None:
            options = ModelOptions(engine=engine)
            made = check_model(self.catalog, self.question.stored, [self.question.target], options, self.on_progress)
            evidence = of.checked(made.verdict_with_settings(self.to), made.findings)
        command = crosstie("preflight", asked, "--on", self.to, "--engine", self.engine)
        self._add("model", f"does {engine} run the checkpoint on {self.to}?", "desk", command, "model.json",
                  (evidence, not_taken))  # fmt: skip

    def _sources(self, tree: Path) -> None:
        found, not_taken = self._seen("source.json", lambda file: of.source_evidence(self.question, file))
        if found is None:
            made = preflight_source(tree, on=[self.to], catalog=self.catalog, on_progress=self.on_progress)
            found = of.checked_source(made.verdicts[self.to], made.findings, by_file(made.findings))
        command = crosstie("preflight", "source", tree, "--on", self.to)
        self._add("source", f"what in {tree} breaks on {self.to}?", "desk", command, "source.json", (found, not_taken))
        base = tree if tree.is_dir() else tree.parent
        # A link to nowhere is among the paths.
        files = [one for one in source_paths(tree) if one.suffix == ".py" and one.is_file()]
        texts = {path.relative_to(base).as_posix(): path.read_bytes() for path in files}
        kernels = [name for name, text in texts.items() if _IMPORTS[b"triton"].search(text) and _KERNEL.search(text)]
        if kernels:
            self._kernels(base, kernels)
        else:
            self.left_out["kernels"] = f"no Triton kernel in {tree}"
        if any(map(_IMPORTS[b"torch"].search, texts.values())):
            words = ("preflight", "capture", "MODULE:STEP", "--inputs", "MODULE:INPUTS", "--on", self.to)
            command = self.question.saved(*words, into="capture.json")
            seen = self._seen("capture*.json", lambda file: of.capture_evidence(self.question, file, base, texts))
            self._add("capture", "can the decode step be captured as a graph?", "desk", command, "capture.json", seen)
        else:
            self.left_out["capture"] = f"no PyTorch code in {tree}"

    def _kernels(self, base: Path, files: Sequence[str]) -> None:
        def look(file: Path) -> PortEvidence:
            found = of.kernel_evidence(self.question, file)
            mine = frozenset(name for name in files if any(of.is_file(kernel, base, name) for kernel in found.kernels))
            if not mine:
                raise of.NotTaken(f"has no kernel of {self.question.source}")
            return replace(found, kernels=mine)

        evidence, not_taken = self._seen("kernels*.json", look)
        left = [name for name in files if evidence is None or name not in evidence.kernels]
        if evidence and left:
            missing = f"{len(left)} of {len(files)} files are not compiled yet"
            evidence = replace(evidence, missing=missing, status="failed" if evidence.status == "failed" else "open")
        first = Path((left or files)[0])
        into = "kernels.json" if len(files) == 1 else f"kernels-{'-'.join(first.with_suffix('').parts)}.json"
        words = ("preflight", "kernels", base / first, "--on", f"{self.to},{self.origin}")
        others = f" and {plural(len(left) - 1, 'other file')}" if len(left) > 1 else ""
        question = f"do the Triton kernels of {first}{others} compile for {self.to}?"
        self._add("kernels", question, "desk", self.question.saved(*words, into=into), into, (evidence, not_taken))

    def _recipe(self) -> None:
        stored = self.question.stored
        # The recipe's own readers know the catalog, folders and config.json.
        unread = stored.remote or stored.gguf is not None
        asked = ["MODEL", "--weights", stored.asked] if unread else [stored.asked]
        words = ("recipe", *asked, "--on", self.to, "--engine", self.engine)
        evidence = None
        if unread:
            evidence = PortEvidence(status="open", says="recipe wants the catalog's name of this MODEL, or its folder")
        elif self.steps["model"].status != "failed":
            evidence = self._made_recipe()
        question = f"how is {self.question.engine} started on {self.to}?"
        self._add("recipe", question, "desk", crosstie(*words), "", (evidence, []), needs=("model",))

    def _made_recipe(self) -> PortEvidence:
        try:
            model = self.question.stored.model(self.catalog)
            pool, chosen = asked_pool(self.catalog, model, self.question.target, engine=self.engine)
            recipes = RecipeBook(self.catalog, RecipeOptions(chosen=chosen)).recipes(pool)
        except CrosstieError as error:
            return PortEvidence(status="failed", says=str(error))
        self.parameters = model.parameters
        self.names += [model.id, model.name, *model.aliases]
        self.gpus, recipe = max(each.gpus_on_node for each in recipes), recipes[0]
        says = f"{recipe.gpus} x {self.to} {recipe.layout}, {recipe.engine} {recipe.release}, {recipe.precision}"
        return PortEvidence(status="done" if all(each.runs for each in recipes) else "failed", says=says)

    # On GPUs

    def _machine(self, desk: Sequence[str]) -> None:
        seen = self._seen("machine.json", lambda file: of.machine_evidence(self.question, file, self.gpus))
        command = self.question.saved("doctor", "--engine", self.engine, into="machine.json")
        question = f"has the machine with {self.to} what {self.question.engine} needs?"
        self._add("machine", question, "to", command, "machine.json", seen, needs=desk)

    def _record(self, accelerator: Accelerator, phase: Phase, *needs: str) -> None:
        file, stored = f"{accelerator.id}.npz", self.question.stored
        everything = self.catalog.accelerators.values()
        seen = self._seen(file, lambda path: of.recording_evidence(self.question, path, accelerator, everything))
        folder = stored.asked if Path(stored.asked).is_dir() else f"./{stored.name}"
        # `diff --model` loads it onto one GPU; both sides are recorded in the same type.
        room = min(self.question.origin.memory_bytes, self.question.target.memory_bytes)
        kinds = (kind for kind, size in _RECORDED.items() if self.parameters * size < room)
        command, what = _BY_HOOK, f"one forward pass, recorded on {accelerator.id}"
        if (kind := next(kinds, None)) is not None:
            words = ("diff", "--record", self.question.results / file, "--model", folder, "--dtype", kind)
            command = crosstie(*words)
        else:
            what += f" by the engine's hook, since the smaller GPU does not hold it (docs/diff.md; it writes {file})"
        self._add(f"record-{accelerator.id}", what, phase, command, file, seen, needs=needs)

    def _diff(self) -> None:
        before, after = (self.question.results / f"{name}.npz" for name in (self.origin, self.to))
        needs = (f"record-{self.origin}", f"record-{self.to}")
        missing = [file.name for file, name in zip((before, after), needs, strict=True) if self.steps[name].waiting]
        seen = (None, []) if missing else self._seen(after.name, lambda file: of.diff_evidence(before, file))
        what = f"which module computes otherwise on {self.to}?"
        file = " and ".join(missing or (before.name, after.name))
        self._add("diff", what, "to", crosstie("diff", before, after), file, seen, needs=needs)

    def _parity(self) -> None:
        has_gpu = not self.steps["machine"].waiting
        seen = self._seen("parity.json", lambda file: of.parity_evidence(self.question, file, self.names, has_gpu))
        words = (
            "parity", f"http://{self.origin}:8000", f"http://{self.to}:8000", "--machine-b",
            self.question.results / "machine.json",
        )  # fmt: skip
        command, needs = self.question.saved(*words, into="parity.json"), ("machine", "diff")
        what = f"do {self.origin} and {self.to} serve the same model?"
        self._add("parity", what, "to", command, "parity.json", seen, needs=needs)
        self.steps["parity"] = replace(self.steps["parity"], effort=effort_of(()))
        if self.steps["parity"].status == "done":
            # What no rule could tell, both endpoints have answered.
            for name, step in self.steps.items():
                if step.status == "open" and not step.waiting:
                    self.steps[name] = replace(step, status="done", says=f"{step.says}; answered by parity")

    # One step

    def _seen(self, pattern: str, look: Callable[[Path], PortEvidence]) -> Seen:
        """What the files of that name say together, and why some are not taken."""
        found: list[PortEvidence] = []
        not_taken = []
        for file in sorted(self.question.results.glob(pattern)) if self.reads else ():
            try:
                found.append(replace(look(file), files=(file.name,)))
            except of.NotTaken as why:
                not_taken.append(f"{file.name} {why}")
        if len(found) < 2:
            return (found[0] if found else None), not_taken
        findings = tuple(dict.fromkeys(finding for evidence in found for finding in evidence.findings))
        return PortEvidence(
            status=max((one.status for one in found), key=_RANK.index), says="; ".join(one.says for one in found),
            findings=findings, effort=effort_of(findings, move=False), files=tuple(one.files[0] for one in found),
            kernels=frozenset().union(*(evidence.kernels for evidence in found)),
        ), not_taken  # fmt: skip

    def _add(
        self, name: str, what: str, phase: Phase, command: str, file: str, seen: Seen, *, needs: Sequence[str] = ()
    ) -> None:
        evidence, not_taken = seen
        stuck = [one for one in needs if one in self.steps and self.steps[one].status in ("failed", "blocked")]
        if evidence is None:
            there = ": what is there is not taken" if not_taken else ""
            says = f"first: {', '.join(stuck)}" if stuck else f"waits for {file}{there}"
            evidence = PortEvidence(status="blocked" if stuck else "open", says=says, missing=says)
        elif evidence.missing:
            evidence = replace(evidence, says=f"{evidence.says}; {evidence.missing}")
        self.steps[name] = PortStep(
            name=name, what=what, phase=phase, status=evidence.status, says=evidence.says, command=command, file=file,
            waiting=bool(evidence.missing), needs=tuple(needs), evidence=evidence.files, not_taken=tuple(not_taken),
            remedies=of.remedies(evidence.findings), effort=evidence.effort,
        )  # fmt: skip
