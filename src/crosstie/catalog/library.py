"""The catalog as one object: every file read once, every name looked up exactly.

Directories are layered: the shipped data first, then the release in force, then each user directory, whose files
replace earlier ones of the same id. Only what is asked for is read.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from crosstie.catalog.acceptance import (
    NO_SPECULATION,
    USUAL_DEPTHS,
    AcceptanceCurve,
    parse_speculation,
    read_acceptance,
    speculation_of,
)
from crosstie.catalog.calibration import Calibration, CalibrationSubject, empty, read_calibration, subject_of
from crosstie.catalog.costs import Ranged, read_costs
from crosstie.catalog.counterparts import Counterpart, read_counterparts
from crosstie.catalog.deployments import (
    merge_efficiency,
    read_accelerator,
    read_connectors,
    read_efficiency,
    read_formats,
    read_stack,
    resolve_efficiency,
)
from crosstie.catalog.models import read_model_file, read_model_path, shorter_names
from crosstie.catalog.power import PowerModel, read_power
from crosstie.catalog.precision import resolve as resolve_precision
from crosstie.catalog.prices import ApiPrice, Price, read_api_prices, read_prices
from crosstie.catalog.reading import read_toml, text_of
from crosstie.catalog.releases import in_force
from crosstie.catalog.signals import Signal, read_signals
from crosstie.catalog.writing import in_words
from crosstie.core.deployment import Accelerator, Deployment, Efficiency, Parallelism, Stack
from crosstie.core.disaggregated import Connector
from crosstie.core.errors import BadData, BadInput, BadParameter, UnknownName, near_names
from crosstie.core.estimate import Correction
from crosstie.core.model import Format, Model, Precision
from crosstie.core.speculation import Speculation

SHIPPED = Path(__file__).parent / "data"
# Accelerators that were announced: a folder of the catalog like a user's, and in no answer but those about waiting.
ANNOUNCED = SHIPPED / "announced"
# What was read of its files, for every catalog of this process: they stay as they are while it runs.
_OF_SHIPPED: dict[Path, Any] = {}


class _Named(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


Noun = TypeVar("Noun", bound=_Named)
Entry = TypeVar("Entry")


def names_in(text: str | None) -> list[str]:
    """Those of a comma-separated text."""
    return [name for part in (text or "").split(",") if (name := part.strip())]


def user_directories() -> list[Path]:
    """Folders of the user's own files: CROSSTIE_CATALOG, or one under the home directory if there is one."""
    given = os.environ.get("CROSSTIE_CATALOG")
    if given:
        return [Path(part).expanduser() for part in given.split(os.pathsep) if part]
    base = os.environ.get("XDG_CONFIG_HOME")
    try:
        return [(Path(base) if base else Path.home() / ".config") / "crosstie" / "catalog"]
    except RuntimeError:
        # No home directory, as in some containers: then there are no files of the user's either.
        return []


def update_and_user_directories() -> list[Path]:
    """What stands over the shipped data: the release in force, then the user's own."""
    release = in_force()
    return [*([release] if release else []), *user_directories()]


def user_directory() -> Path:
    """Where `crosstie catalog add` writes unless told otherwise."""
    paths = user_directories()
    if not paths:
        raise BadInput("there is no home directory: set CROSSTIE_CATALOG to a folder")
    return paths[0]


class Catalog:
    """Accelerators, models, stacks, formats and prices by name."""

    def __init__(self, directories: Iterable[Path] | None = None, calibration: Calibration | None = None):
        """`calibration`: in place of the nearest file's; `empty()` leaves the constants as they are written."""
        extra = update_and_user_directories() if directories is None else list(directories)
        for directory in extra:
            if _exists(directory) and not directory.is_dir():
                raise BadInput(f"{directory}: the catalog must be a folder")
        self.directories = [SHIPPED, *extra]
        # What was read of the other folders, as they were when this catalog first read them.
        self._asked: dict[Path, Any] = {}
        self._efficiencies: dict[str, tuple[Accelerator, Efficiency]] = {}
        self._corrections: dict[CalibrationSubject, Correction] = {}
        self._given = calibration
        # Models of files and folders by id, as workloads and fleets name them from then on; None: of several.
        self._by_path: dict[str, Model | None] = {}

    @cached_property
    def accelerators(self) -> dict[str, Accelerator]:
        return _by_id(self._once(file, read_accelerator) for file in self._files("accelerators"))

    @property
    def with_announced(self) -> "Catalog":
        """This one with accelerators that nobody can buy yet, which no plan of today may have."""
        other = Catalog([ANNOUNCED, *self.directories[1:]], self._given)
        other._by_path = self._by_path
        return other

    @cached_property
    def models(self) -> dict[str, Model]:
        return _by_id(self._once(file, read_model_file) for file in self._files("models"))

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        return _by_id(self._once(file, read_stack) for file in self._files("stacks"))

    @cached_property
    def formats(self) -> dict[str, Format]:
        return self._merged("formats.toml", read_formats)

    @cached_property
    def connectors(self) -> dict[str, Connector]:
        """How engines move a cache between replicas; a user's entries replace those of the same name."""
        return _by_id(self._merged("connectors.toml", read_connectors).values())

    @cached_property
    def libraries(self) -> dict[str, Counterpart]:
        """CUDA's libraries and tools by name, each with what stands for it on ROCm."""
        return self._merged("libraries.toml", read_counterparts)

    @cached_property
    def signals(self) -> dict[str, Signal]:
        """What to watch; a user's rows of the same id take the place of the shipped ones."""
        return self._merged("signals.toml", read_signals)

    @cached_property
    def prices(self) -> tuple[Price, ...]:
        """A later folder's prices of an accelerator and a kind take the place of the earlier ones'."""
        by_kind: dict[tuple[str, str], list[Price]] = {}
        for file in self._tables("prices.csv"):
            own: dict[tuple[str, str], list[Price]] = {}
            for price in read_prices(file, self.accelerators):
                own.setdefault((price.accelerator, price.kind), []).append(price)
            by_kind.update(own)
        return tuple(price for prices in by_kind.values() for price in prices)

    @cached_property
    def api_prices(self) -> tuple[ApiPrice, ...]:
        """A user's rows stand beside the shipped ones."""
        return tuple(price for file in self._tables("api_prices.csv") for price in read_api_prices(file, self.models))

    @cached_property
    def acceptance_curves(self) -> tuple[AcceptanceCurve, ...]:
        """How many drafts are kept; a user's rows come before the shipped ones."""
        files = reversed(self._tables("acceptance.csv"))
        return tuple(curve for file in files for curve in read_acceptance(file, self.models))

    @cached_property
    def costs(self) -> dict[str, Ranged]:
        """What ownership assumes; a user's file replaces only the assumptions that it has."""
        return self._merged("costs.toml", lambda file: read_costs(file, whole=file.parent == SHIPPED))

    @cached_property
    def calibration(self) -> Calibration:
        """The nearest file: a user's own takes the place of the shipped one."""
        if self._given is not None:
            return self._given
        files = self._tables("calibration.json")
        return self._once(files[-1], read_calibration) if files else empty()

    @cached_property
    def _efficiency_layers(self) -> dict[str, dict[str, Any]]:
        """Constants by what they are for; a user's file overrides only the constants that it has."""
        layers: dict[str, dict[str, Any]] = {}
        for directory in self.directories:
            for file in _toml_files(directory / "efficiency"):
                merge_efficiency(layers.setdefault(file.stem, {}), self._once(file, read_efficiency))
        return layers

    @cached_property
    def power(self) -> PowerModel:
        """What accelerators draw while they serve; the nearest file of a user replaces the shipped one."""
        return read_power(self._tables("power.toml")[-1], self.accelerators)

    def calibrated_by(self, calibration: Calibration) -> "Catalog":
        """The same catalog under another calibration."""
        other = Catalog(self.directories[1:], calibration)
        other._by_path = self._by_path
        return other

    def accelerator(self, name: str) -> Accelerator:
        """By id, alias, or the path of an accelerator file."""
        if name.endswith(".toml"):
            return read_accelerator(_existing(name, "accelerator file"))
        quick = self._quick("accelerators", name)
        return self._once(quick, read_accelerator) if quick else _find("accelerator", name, self.accelerators)

    def accelerators_named(
        self, names: str | Iterable[str | Accelerator] | None, stack: str | None = None
    ) -> list[Accelerator]:
        """Several of them, "mi300x,h200" or one by one, each once; None: all that the stack runs on."""
        if names is None:
            known = self.accelerators.values()
            return [part for part in known if stack is None or self.stack(stack).runs_on(part.vendor)]
        if isinstance(names, str):
            names = names_in(names)
        nouns = [name if isinstance(name, Accelerator) else self.accelerator(name) for name in names]
        if not nouns:
            raise BadParameter("on", "names no accelerator")
        return list({noun.id: noun for noun in nouns}.values())

    def model(self, name: str | Path | Model) -> Model:
        """By id, alias, or the path of a model directory, config.json or catalog file; a model is itself.

        A folder of the same name does not hide a model of the catalog; write ./NAME for the folder. One that was read
        by its path is known by its id from then on, unless another of that id was read too. Ends of a name that leave
        the shape alone may be there (data/names.toml), but none that stores the weights otherwise.
        """
        if isinstance(name, Model):
            return name
        if isinstance(name, Path):
            name = str(name if name.is_absolute() else Path.cwd() / name)
        if not name.strip():
            raise BadInput("the name of the model is empty")
        if name.endswith(".toml"):
            return self._met(read_model_file(_existing(name, "model file")))
        if name.endswith(".json") or name.startswith((".", "/", "~")):
            return self._met(read_model_path(Path(name).expanduser()))
        quick = self._quick("models", name)
        if quick:
            return self._once(quick, read_model_file)
        try:
            return _find("model", name, self.models)
        except UnknownName:
            if known := self._by_path.get(name):
                return known
            if _exists(Path(name)):
                return self._met(read_model_path(Path(name)))
            model, precision = self.checkpoint(name)
            if precision and precision not in model.native_name:
                raise
            return model

    def folders(self, ids: Iterable[str]) -> dict[str, str]:
        """Of those that were read by their paths, and that no catalog has: where each lies."""
        known = {id: self._by_path.get(id) for id in ids if id not in self.models}
        return {id: str(Path(model.source).absolute()) for id, model in known.items() if model}

    def _met(self, model: Model) -> Model:
        same = self._by_path.get(model.id, model) == model
        self._by_path[model.id] = model if same else None
        return model

    def checkpoint(self, name: str) -> tuple[Model, str]:
        """The model that a checkpoint's name means, and the precision that the name says, if any."""
        for shorter, precision in ((name.casefold(), ""), *shorter_names(name)):
            if file := self._quick("models", shorter):
                return self._once(file, read_model_file), precision
            if shorter in self._named_models:
                return self._named_models[shorter], precision
        return _find("model", name, self.models), ""

    @cached_property
    def _named_models(self) -> dict[str, Model]:
        return {spelling: model for model in self.models.values() for spelling in spellings(model)}

    def stack(self, name: str) -> Stack:
        return _find("stack", name, self.stacks)

    def stack_for(self, accelerator: Accelerator, name: str | None, model: Model, precision: Precision) -> Stack:
        """The named stack, if it runs on this vendor and reads the weights; else the first that does."""
        needed = precision.formats_of(model.roles)
        if name is None:
            usual = [self.stack(choice) for choice in ("vllm", "llama.cpp")]
            able = [s for s in usual if s.runs_on(accelerator.vendor)]
            stack = next((s for s in able if all(map(s.reads, needed))), (able or usual)[0])
        else:
            stack = self.stack(name)
        if not stack.runs_on(accelerator.vendor):
            fitting = [s.id for s in self.stacks.values() if s.serves and s.runs_on(accelerator.vendor)]
            raise BadInput(
                f"{stack.name} does not run on {accelerator.id} ({accelerator.vendor}); these do: {', '.join(fitting)}"
            )
        missing = sorted(format for format in needed if not stack.reads(format))
        if missing:
            fitting = [s.id for s in self.stacks.values() if s.serves and all(map(s.reads, needed))]
            raise BadInput(
                f"{stack.name} does not read {', '.join(missing)} weights; {', '.join(fitting) or 'no stack'} would"
            )
        return stack

    def connector(self, name: str) -> Connector:
        return _find("connector", name, self.connectors)

    def connector_for(self, stack: Stack, accelerator: Accelerator) -> Connector:
        """The stack's own connector on this vendor: one that is made for it alone, else the first that runs there."""
        able = [c for c in self.connectors.values() if stack.id in c.stacks and accelerator.vendor in c.vendors]
        if not able:
            having = sorted(
                {name for c in self.connectors.values() if accelerator.vendor in c.vendors for name in c.stacks}
            )
            raise BadInput(
                f"{stack.name} has no known way to hand a cache over on {accelerator.id} ({accelerator.vendor}); "
                f"{', '.join(having)} have"
            )
        return min(able, key=lambda c: len(c.vendors))

    def precision(self, model: Model, name: str | None = None) -> Precision:
        return resolve_precision(model, name or "native", self.formats)

    def efficiency(self, accelerator: Accelerator) -> Efficiency:
        if accelerator.id not in self._efficiencies or self._efficiencies[accelerator.id][0] is not accelerator:
            relatives: list[Accelerator] = []
            if any(
                f"matmul_{name}" not in accelerator.measured for name in ("bf16", "fp8") if name in accelerator.dense
            ):
                relatives = [other for other in self.accelerators.values() if other.family == accelerator.family]
            resolved = resolve_efficiency(self._efficiency_layers, accelerator, relatives)
            self._efficiencies[accelerator.id] = (accelerator, resolved)
        return self._efficiencies[accelerator.id][1]

    def deployment(
        self,
        model: Model,
        accelerator: Accelerator,
        parallelism: Parallelism | None = None,
        precision: str | None = None,
        kv_format: str = "bf16",
        stack: str | None = None,
        speculation: Speculation | None = None,
    ) -> Deployment:
        stored = self.precision(model, precision)
        plain = Deployment(
            model=model,
            accelerator=accelerator,
            parallelism=parallelism or Parallelism(),
            precision=stored,
            kv_format=kv_format,
            stack=self.stack_for(accelerator, stack, model, stored),
            efficiency=self.efficiency(accelerator),
            speculation=speculation,
        )
        return self.calibrated(plain)

    def speculation(self, model: Model, asked: str, *, text: str = "chat", length: float | None = None) -> Speculation:
        """`mtp:3`, `eagle3:5`, `ngram:4`, `draft:4:MODEL`; `length`: the acceptance length, where one knows it."""
        method, depth, draft = parse_speculation(asked)
        drafts = self.model(draft) if draft else None
        return speculation_of(self.acceptance_curves, model, method, depth, text=text, length=length, draft=drafts)

    def speculations(
        self, model: Model, ways: Iterable[str] | None, *, text: str = "chat", length: float | None = None
    ) -> list[Speculation | None]:
        """How a replica may draft; None: the model's own prediction layer, at the usual depths, where somebody has
        measured how much of it is kept, and none."""
        if ways is None:
            own = model.draft_tensors and any(c.model == model.id and c.method == "mtp" for c in self.acceptance_curves)
            ways = [NO_SPECULATION, *(f"mtp:{depth}" for depth in USUAL_DEPTHS if own)]
        return [
            None if way == NO_SPECULATION else self.speculation(model, way, text=text, length=length) for way in ways
        ]

    def calibrated(self, deployment: Deployment) -> Deployment:
        """The same with what measurements say about its scopes; again after a change of its layout."""
        return msgspec.structs.replace(deployment, correction=self.correction(subject_of(deployment)))

    def knows_kind(self, deployment: Deployment) -> bool:
        """Whether models of this kind were measured with the deployment's stack on its accelerator."""
        return self.calibration.knows_kind(subject_of(deployment))

    def correction(self, subject: CalibrationSubject) -> Correction:
        if subject not in self._corrections:
            self._corrections[subject] = self.calibration.correction(subject)
        return self._corrections[subject]

    def ids(self, kind: str) -> list[str]:
        """Of "models" or "accelerators", by the names of their files, none of which is read."""
        return [file.stem for file in self._files(kind)]

    def _files(self, kind: str) -> list[Path]:
        """Files of one kind; a later directory's file replaces an earlier one of the same name."""
        by_name: dict[str, Path] = {}
        for directory in self.directories:
            for file in _toml_files(directory / kind):
                by_name[file.stem] = file
        return list(by_name.values())

    def _tables(self, name: str) -> list[Path]:
        """The file of that name in each directory that has one; the nearest is the last."""
        return [file for directory in self.directories if _exists(file := directory / name)]

    def _merged(self, name: str, read: Callable[[Path], dict[str, Entry]]) -> dict[str, Entry]:
        """The entries of all files of that name; those of a later directory replace earlier ones."""
        return {key: entry for file in self._tables(name) for key, entry in self._once(file, read).items()}

    def _once(self, file: Path, read: Callable[[Path], Entry]) -> Entry:
        known = _OF_SHIPPED if file.is_relative_to(SHIPPED) else self._asked
        if file not in known:
            known[file] = read(file)
        entry: Entry = known[file]
        return entry

    def _quick(self, kind: str, name: str) -> Path | None:
        """The one file that an id names, so that a command need not read the whole catalog."""
        wanted = f"{name.casefold()}.toml"
        if "/" in wanted or "\\" in wanted or len(wanted) > 200:
            return None
        files = self._tables(f"{kind}/{wanted}")
        return files[-1] if files else None


def check_everything(catalog: Catalog) -> dict[str, int]:
    """Reads every file and resolves every constant; what was found, or the first fault."""
    known = {"default"}
    for accelerator in catalog.accelerators.values():
        catalog.efficiency(accelerator)
        known |= {accelerator.id, accelerator.family, accelerator.scale_up.topology.value}
    for name in catalog._efficiency_layers:
        if name not in known:
            raise BadData(f"efficiency/{name}.toml", "", "names no accelerator, family or topology of the catalog")
    _ = catalog.power
    kinds = (
        "accelerators", "models", "stacks", "connectors", "formats", "prices", "api_prices", "costs",
        "acceptance_curves", "libraries", "signals",
    )  # fmt: skip
    return {kind: len(getattr(catalog, kind)) for kind in kinds}


def check_file(file: Path) -> str:
    """Validates one catalog file of whatever kind it is, and says which folder it belongs to."""
    return _read_any(file)[0]


def check_names(catalog: Catalog, file: Path) -> None:
    """Validates a new file, and refuses one whose names already belong to another."""
    kind, new = _read_any(file)
    if new is None:
        return
    others = {
        name: noun.id for noun in getattr(catalog, kind).values() if noun.id != new.id for name in spellings(noun)
    }
    for name in sorted(spellings(new) & set(others)):
        raise BadData(file, "aliases", f"'{name}' already names {others[name]}")


# Keys that tell what a file is, with its folder and its reader.
_TOLD_BY: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": ("models", read_model_file),
    "engine": ("stacks", read_stack),
    **dict.fromkeys(("chip", "memory", "dense"), ("accelerators", read_accelerator)),
    "signal": ("signals", read_signals),
    "costs": ("costs", lambda file: read_costs(file, whole=False)),
    **dict.fromkeys(("compute", "weights", "kernel", "link"), ("efficiency", read_efficiency)),
}


def _read_any(file: Path) -> tuple[str, Accelerator | Model | Stack | None]:
    """The folder that a file belongs to by what it holds, and its noun where it has a name."""
    if file.suffix == ".csv":
        columns = text_of(_existing(str(file), "file")).partition("\n")[0]
        if "usd_per_million" in columns:
            read_api_prices(file, Catalog().models)
            return "api_prices", None
        if "lengths" in columns:
            read_acceptance(file, Catalog().models)
            return "acceptance", None
        read_prices(file, Catalog().accelerators)
        return "prices", None
    if file.suffix == ".json":
        raise BadInput(f"{file}: a config.json is no catalog file; `crosstie catalog add {file}` makes one of it")
    raw = read_toml(_existing(str(file), "file"))
    if any("element_bits" in entry for entry in raw.values() if isinstance(entry, dict)):
        read_formats(file)
        return "formats", None
    for key, (kind, read) in _TOLD_BY.items():
        if key in raw:
            noun = read(file)
            return kind, noun if isinstance(noun, Accelerator | Model | Stack) else None
    kinds = (
        "model ([config]), accelerator ([chip]), stack ([engine]), costs ([costs]), signals ([[signal]]), format or "
        "efficiency file"
    )
    raise BadData(file, "", f"is no {kinds}")


def _by_id(nouns: Iterable[Noun]) -> dict[str, Noun]:
    by_id: dict[str, Noun] = {}
    owners: dict[str, str] = {}
    for noun in nouns:
        by_id[noun.id] = noun
        for name in sorted(spellings(noun)):
            owner = owners.setdefault(name, noun.id)
            if owner != noun.id:
                raise BadData(getattr(noun, "file", "") or noun.id, "aliases", f"'{name}' already names {owner}")
    return dict(sorted(by_id.items()))


def _find(kind: str, name: str, known: Mapping[str, Noun]) -> Noun:
    wanted = name.casefold()
    for noun in known.values():
        if wanted in spellings(noun):
            return noun
    # Aliases are long and many: offer one only where no id looks like the name.
    aliases = [alias for noun in known.values() for alias in noun.aliases]
    raise UnknownName(kind, name, known if near_names(name, known) else aliases)


def spellings(noun: _Named) -> set[str]:
    """Every name of a noun, folded: its id, its aliases, and these without the owner before the slash."""
    names = {noun.id, *noun.aliases}
    return {name.casefold() for name in names | {name.rpartition("/")[2] for name in names}}


def _exists(path: Path) -> bool:
    with in_words(f"{str(path)[:200]}: cannot be read"):
        return path.exists()


def _toml_files(folder: Path) -> list[Path]:
    with in_words(f"{folder}: cannot be read"):
        return sorted(folder.glob("*.toml"))


def _existing(name: str, what: str) -> Path:
    path = Path(name).expanduser()
    if not _exists(path) or not path.is_file():
        raise BadInput(f"{name}: no such {what}")
    return path
