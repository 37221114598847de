"""From a pool of a fleet to recipes: the checkpoint, the machine, preflight's settings and the engine's own, joined."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from crosstie.catalog.addresses import BY_NAME
from crosstie.catalog.kube import KUBE
from crosstie.catalog.library import Catalog
from crosstie.catalog.precision import GGUF
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Pool
from crosstie.core.model import Model
from crosstie.perf.fit import place
from crosstie.perf.memory import memory_plan, weight_bytes
from crosstie.port.preflight.readiness import Readiness, ReadinessCheck
from crosstie.port.recipe.asked import limits_of
from crosstie.port.recipe.engines import engine_command
from crosstie.port.recipe.flags import flag_table, nested, parse_settings
from crosstie.port.recipe.images import container_for, image_of
from crosstie.port.recipe.published import PARSING, PublishedLimits, parsers, public_recipe, published_settings
from crosstie.port.recipe.recipe import (
    CACHE,
    CLAIM,
    IMAGE,
    MODELS,
    SHELF,
    Mount,
    Recipe,
    Role,
    Setting,
    Started,
    hosted_port,
    hosted_service,
    nodes_of,
    service_name,
    side_service,
)
from crosstie.route.build import deployment_of

# A start beyond its weights (processes, graphs, warm-up), and how fast they are fetched and read at worst: a guess on
# the safe side, since a probe that gives up too early starts everything anew.
_START_S, _FETCHED_BYTES_PER_S = 900, 100e6
# Of a request, where only the room for all of them matters.
_LENGTH = 8192
_INSTRUCT = re.compile(r"instruct|[-_](it|chat)\b", re.IGNORECASE)
_METHODS_WITH_WEIGHTS = ("eagle3", "dspark", "draft")


class RecipeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only a person knows; by pool, with "" for all of them."""

    weights: Mapping[str, str] = {}
    drafter: Mapping[str, str] = {}
    image: Mapping[str, str] = {}
    # Where the layout comes from, in the reasons.
    chosen: str = "the fleet file"


class RecipeBook:
    """Recipes of pools; what preflight is asked for several of them it is asked once."""

    def __init__(self, catalog: Catalog, options: RecipeOptions | None = None):
        self._catalog, self._options = catalog, options or RecipeOptions()
        self._checks: dict[str, ReadinessCheck] = {}

    def recipes(self, pool: Pool) -> tuple[Recipe, ...]:
        """One for each kind of process that the pool has. Raises BadInput where there is none."""
        if pool.token_price is not None:
            raise BadInput(f"pool {pool.name}: is bought by the token, so there is nothing to start")
        if pool.accelerator is None or (pool.precision is None and not pool.hosts):
            raise BadInput(f"pool {pool.name}: names no accelerator, so nothing says how to start it")
        if pool.apart is not None:
            sides: tuple[tuple[Role, Parallelism, int], ...] = (
                ("prefill", pool.apart.prefill.parallelism, pool.apart.prefill.replicas),
                ("decode", pool.apart.decode.parallelism, pool.apart.decode.replicas),
            )
            return tuple(
                self._recipe(msgspec.structs.replace(pool, parallelism=split), role, each * pool.replicas)
                for role, split, each in sides
            )
        if not pool.hosts:
            return (self._recipe(pool, "", pool.replicas),)
        if pool.loading == "hook":
            raise BadInput(f"pool {pool.name}: its models are started by {pool.load_hook}, as its load_hook says")
        if pool.loading == "llamacpp-router":
            return (self._recipe(pool.by_model()[0], "", pool.replicas, hosting=pool),)
        return tuple(
            self._recipe(one, "", pool.replicas, hosting=pool, number=number)
            for number, one in enumerate(pool.by_model())
        )

    def _recipe(
        self, pool: Pool, role: Role, replicas: int, *, hosting: Pool | None = None, number: int = 0
    ) -> Recipe:  # fmt: skip
        deployment = deployment_of(self._catalog, pool)
        assert deployment is not None
        engine = deployment.stack.id
        routed = hosting is not None and hosting.loading == "llamacpp-router"
        judged = self._check(pool, deployment).readiness(deployment)
        checkpoint = self._checkpoint(pool, deployment, routed)
        share = None
        if hosting is not None and (taken := hosting.hosts[number].memory_gib) is not None and not routed:
            share = min(taken * 2**30 / (deployment.accelerator.memory_bytes * deployment.gpus), 0.95)
        started = Started(
            pool=msgspec.structs.replace(pool, hosts=hosting.hosts) if hosting else pool,
            deployment=deployment,
            role=role,
            weights=checkpoint.weights,
            drafter=checkpoint.drafter,
            at_load=checkpoint.at_load,
            port=_port(pool, role) or hosted_port(number),
            chosen=self._options.chosen,
            share=share,
            cache_tokens=max(int(place(deployment, _LENGTH).cache_tokens) // 256 * 256, 256),
            published=_published_limits(pool, limits_of(deployment, judged.release)),
        )
        program, own, notes = engine_command(started)
        published, told = _published(deployment, judged.release, checkpoint.weights)
        given = parse_settings(f"pool {pool.name}: settings", pool.settings, "the fleet file's settings")
        settings = _joined(engine, [*own, *published], _of_preflight(judged, given), given, checkpoint.variables)
        notes = [*notes, *checkpoint.notes, *_checked(engine, judged.release, settings), *told]
        fits = memory_plan(deployment).fits
        if not fits:
            notes.insert(0, f"{deployment.model.id} does not fit on {deployment.label}: `crosstie fit` says where")
        nodes, node_gpus = nodes_of(deployment.gpus, deployment.accelerator)
        if nodes > 1 and engine == "llama.cpp":
            raise BadInput(f"pool {pool.name}: {deployment.gpus} GPUs are {nodes} machines, and llama.cpp runs on one")
        image, image_why = self._image(pool, engine, judged.release, deployment)
        name = side_service(pool.name, role) if role else service_name(pool.name)
        if hosting is not None and not routed:
            name = hosted_service(pool.name, number)
        return Recipe(
            name=name,
            pool=pool.name,
            role=role,
            engine=engine,
            release=judged.release,
            model=pool.model,
            accelerator=deployment.accelerator.id,
            vendor=deployment.accelerator.vendor,
            layout=deployment.layout,
            precision=deployment.precision.id,
            gpus=deployment.gpus,
            nodes=nodes,
            node_gpus=node_gpus,
            replicas=replicas,
            numbered=bool(role or hosting),
            shares_gpus=hosting is not None and not routed,
            image=image,
            image_why=image_why,
            program=program,
            settings=settings,
            container=container_for(
                deployment.accelerator.vendor, deployment.gpus, between_machines=bool(role) or nodes > 1
            ),
            mounts=checkpoint.mounts,
            port=started.port,
            start_s=_START_S + int(weight_bytes(deployment.model, deployment.precision) / _FETCHED_BYTES_PER_S),
            fits=fits,
            verdict=judged.verdict,
            findings=judged.findings,
            notes=tuple(notes),
        )

    def _check(self, pool: Pool, deployment: Deployment) -> ReadinessCheck:
        engine = deployment.stack.id
        known = f"{pool.model} {engine} {pool.release}" if pool.release else ""
        if known not in self._checks:
            # A pool may name its model by a folder.
            releases = {deployment.model.id: {engine: pool.release}} if pool.release else {}
            self._checks[known] = ReadinessCheck(self._catalog, releases)
        return self._checks[known]

    def _image(self, pool: Pool, engine: str, release: str, deployment: Deployment) -> tuple[str, str]:
        named = _given(self._options.image, pool.name)
        return (named, "as asked") if named else image_of(engine, release, deployment.accelerator)

    def _checkpoint(self, pool: Pool, deployment: Deployment, routed: bool) -> "_Checkpoint":
        model, drafts = deployment.model, deployment.speculation
        checkpoint = _Checkpoint()
        asked = _given(self._options.weights, pool.name) or (model.file if _is_own(model) else "")
        if asked:
            checkpoint.weights = checkpoint.at(asked, "the checkpoint")
            if asked == model.file and deployment.precision.id == "fp8" and self._is_16_bit(model):
                checkpoint.at_load = "fp8"
        elif routed:
            checkpoint.weights = checkpoint.at(SHELF, "GGUF files of the models that share the replicas", whole=True)
        else:
            self._find(checkpoint, deployment)
        if drafts and drafts.method in _METHODS_WITH_WEIGHTS:
            named = _given(self._options.drafter, pool.name)
            if named:
                checkpoint.drafter = checkpoint.at(named, "weights of the drafter")
            elif drafts.method == "draft" and drafts.drafter and _repository(drafts.drafter):
                checkpoint.drafter = checkpoint.fetched(_repository(drafts.drafter))
            else:
                checkpoint.drafter = checkpoint.shelved(f"{model.id}-{drafts.method}", "a drafter", "--drafter")
        for adapter in pool.adapters:
            if adapter.path.startswith("/"):
                folder = str(Path(adapter.path).parent)
                checkpoint.mount(Mount(source=folder, target=folder, read_only=True, why="the pool's LoRA adapters"))
        return checkpoint

    def _is_16_bit(self, model: Model) -> bool:
        """As its checkpoint is, so that an engine may quantise it while it is loaded."""
        return self._catalog.precision(model).id in ("bf16", "fp16")

    def _find(self, found: "_Checkpoint", deployment: Deployment) -> None:
        """The model's own repository if it has that precision, or what must be put on the shelf."""
        model, precision = deployment.model, deployment.precision.id
        own = precision == self._catalog.precision(model).id
        if precision in GGUF or deployment.stack.id == "llama.cpp":
            found.weights = found.shelved(f"{model.id}-{precision}.gguf", "a GGUF file", "--weights")
            return
        by_name = [aliase for aliase in model.aliases if "/" in aliase and precision.split("-")[0] in aliase.lower()]
        repository = by_name[0] if by_name and not own else _repository(model)
        if repository and (own or by_name):
            found.weights = found.fetched(repository)
        elif repository and precision == "fp8" and self._is_16_bit(model):
            found.weights, found.at_load = found.fetched(repository), "fp8"
            found.notes.append("a published FP8 checkpoint with scales of its own loads faster: --weights REPOSITORY")
        else:
            found.weights = found.shelved(f"{model.id}-{precision}", f"a checkpoint in {precision}", "--weights")


def fleet_recipes(book: RecipeBook, fleet: Fleet, only: str | None = None) -> tuple[list[Recipe], list[dict[str, str]]]:
    """Recipes of a fleet's pools; those that have none are named with the reason, unless they were asked for."""
    recipes: list[Recipe] = []
    left_out: list[dict[str, str]] = []
    for pool in fleet.pools:
        if only in (None, pool.name):
            try:
                recipes += book.recipes(pool)
            except BadInput as error:
                if only:
                    raise
                left_out.append({"pool": pool.name, "why": str(error)})
    if not recipes:
        raise BadInput(f"fleet {fleet.name}: no pool has a recipe: {left_out[0]['why']}")
    return recipes, left_out


class _Checkpoint:
    """Where weights come from, and what the container needs for that."""

    def __init__(self) -> None:
        self.weights = self.drafter = self.at_load = ""
        self.mounts: tuple[Mount, ...] = ()
        self.variables: list[Setting] = []
        self.notes: list[str] = []

    def mount(self, one: Mount) -> None:
        if one not in self.mounts:
            self.mounts += (one,)

    def fetched(self, repository: str) -> str:
        self.mount(Mount(source="hf-cache", target=CACHE, read_only=False, why="what was fetched outlives a container"))
        if not self.variables:
            self.variables.append(Setting(name="HF_HOME", value=CACHE, why="where Hugging Face's files are kept"))
        return repository

    def at(self, place: str, why: str, *, whole: bool = False) -> str:
        """A repository's name, a folder or file of the machine, or an image or a claim of a cluster."""
        if place.startswith((IMAGE, CLAIM)):
            return self._in_cluster(place, why)
        if not place.startswith(("/", ".", "~")) and not Path(place).exists():
            return self.fetched(place)
        path = Path(place).expanduser().absolute()
        if whole:
            self.mount(Mount(source=str(path), target=MODELS, read_only=True, why=why))
            return MODELS
        if path.name == "config.json":
            path = path.parent
        inside = f"{MODELS}/{path.name}"
        self.mount(Mount(source=str(path), target=inside, read_only=True, why=why))
        return inside

    def _in_cluster(self, place: str, why: str) -> str:
        scheme = IMAGE if place.startswith(IMAGE) else CLAIM
        bare = place.removeprefix(scheme)
        if not bare.strip("/") or bare.startswith("/"):
            raise BadInput(f"{place}: names nothing; such as {IMAGE}registry/weights:1 or {CLAIM}models/llama-3.1-8b")
        name = re.split(r"[:@]", bare.rstrip("/").rpartition("/")[2])[0]
        self.mount(Mount(source=place.rstrip("/"), target=f"{MODELS}/{name}", read_only=True, why=why))
        return f"{MODELS}/{name}"

    def shelved(self, name: str, what: str, option: str) -> str:
        self.mount(Mount(source=SHELF, target=MODELS, read_only=True, why="weights that were put there by hand"))
        self.notes.append(f"put {what} at {SHELF}/{name}, or name one with {option}: the catalog knows none")
        return f"{MODELS}/{name}"


def _port(pool: Pool, role: Role) -> int:
    """Where the fleet file says that its engines answer, if it says one port for all; 0 where not."""
    side = getattr(pool.apart, role) if role else pool
    ports = {urlsplit(one.removeprefix(BY_NAME)).port or 0 for one in side.backends if not one.startswith(KUBE)}
    return ports.pop() if len(ports) == 1 else 0


def _given(of: Mapping[str, str], pool: str) -> str:
    return of.get(pool) or of.get("", "")


def _is_own(model: Model) -> bool:
    """Whether a model was read from the user's folder, which then has its weights."""
    return bool(model.file) and not model.file.endswith(".toml")


def _repository(model: Model) -> str:
    """Its address at Hugging Face; that of the model that follows instructions, which has a chat template."""
    named = [aliase for aliase in model.aliases if "/" in aliase]
    return next((one for one in named if _INSTRUCT.search(one)), named[0] if named else "")


def _published(deployment: Deployment, release: str, weights: str) -> tuple[list[Setting], list[str]]:
    """Parsers of the model's family, and what its engine's own recipe sets on this chip; and what to know of them."""
    engine, model = deployment.stack.id, deployment.model
    if engine not in PARSING or not release:
        return [], []
    family = parsers(engine, release, (weights, model.id))
    notes = [f"no parser of tool calls is listed for it by {engine}'s documents: calls come back as text"] * (
        not family
    )
    notes += [family.note] if family and family.note else []
    recipe = public_recipe(engine, release, (weights, model.id, *model.aliases))
    isa = deployment.accelerator.chip.isa.value
    settings = published_settings(recipe, isa, release) if recipe else []
    return [*(family.settings if family else []), *settings], notes


def _published_limits(pool: Pool, limits: PublishedLimits) -> dict[str, str]:
    """Which of the pool's limits are those of the engine's own recipe, and whose words say so."""
    same = {"context": pool.max_context == limits.context, "sequences": pool.max_in_flight == limits.sequences}
    return {name: limits.why for name, holds in same.items() if holds}


def _of_preflight(judged: Readiness, given: Sequence[Setting]) -> list[Setting]:
    """Preflight's settings, each with the finding that asks for it; also the reasons of those that the file has."""
    asked = parse_settings("preflight", judged.settings, "preflight: more of its operations run well with it")
    wanted = [*asked, *(one for one in given if one.name not in {own.name for own in asked})]
    found = []
    for one in wanted:
        why = next((f"preflight, {f.check}: {f.what}" for f in judged.findings if one.name in f.remedy), "")
        if why or one in asked:
            found.append(msgspec.structs.replace(one, why=why or one.why))
    return found


def _joined(
    engine: str, own: Sequence[Setting], preflight: Sequence[Setting], given: Sequence[Setting],
    variables: Sequence[Setting],
) -> tuple[Setting, ...]:  # fmt: skip
    """One of each name: the file's value before preflight's, that before the recipe's own; variables first."""
    names = flag_table(engine)
    found: dict[str, Setting] = {}
    reasons = {one.name: one.why for one in preflight}
    for one in (*variables, *own, *preflight, *given):
        kept = msgspec.structs.replace(one, why=reasons[one.name]) if one in given and one.name in reasons else one
        found[one.name if one.is_variable else names.canonical(one.name)] = kept
    return tuple(sorted(nested(found).values(), key=lambda one: not one.is_variable))


def _checked(engine: str, release: str, settings: Sequence[Setting]) -> list[str]:
    """Refuses what the engine's parser would; of another release than that whose flags were read, only says so."""
    known = flag_table(engine)
    faults = [fault for setting in settings if not setting.is_variable and (fault := known.fault(setting))]
    if release != str(known.release):
        said = f"flags were checked against {engine} {known.release}, the release whose own list was read"
        return [said, *faults]
    if faults:
        raise BadInput(f"{faults[0]} ({known.source})")
    return []
