"""How the engines of a pool are started: an image, variables, flags, devices and volumes, each with its reason."""

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.finding import VERDICTS, Finding
from crosstie.core.fleet import Pool

# Where every engine answers, whatever its own habit: a pool's name and this are its address.
PORT = 8000
# Where ranks of one replica on several machines meet.
MEETING_PORT = 29500
# Inside containers: what was downloaded, and what was put on the disk by hand.
CACHE, MODELS = "/cache", "/models"
# Where people put weights that are fetched from nowhere, unless they say otherwise.
SHELF = "/srv/models"
# Weights in an image or on a claim of a cluster: the reference, or the claim and a folder on it, follows.
IMAGE, CLAIM = "oci://", "pvc://"
# In a value: the address of the machine that it is started on, which each form finds in its own way.
OWN_ADDRESS = "{address}"
Role = Literal["", "prefill", "decode"]
# What gives a container its GPUs: Docker what it is told to, device plug-ins and schedulers on their own.
Runner = Literal["docker", "kubernetes", "scheduler", "nobody"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A flag (`--name`) or a variable (`NAME`). Value None: a switch; several values follow one flag."""

    name: str
    value: str | tuple[str, ...] | None = None
    why: str

    @property
    def is_variable(self) -> bool:
        return not self.name.startswith("-")

    @property
    def words(self) -> tuple[str, ...]:
        """As a program gets a flag."""
        if self.value is None:
            return (self.name,)
        return (self.name, self.value) if isinstance(self.value, str) else (self.name, *self.value)

    @property
    def shown(self) -> str:
        return f"{self.name}={self.value}" if self.is_variable else " ".join(self.words)


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of the machine, or a volume by its name, inside the container."""

    source: str
    target: str
    read_only: bool
    why: str

    @property
    def is_volume(self) -> bool:
        return "/" not in self.source


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """What a container must be let have, each with its reason; the GPUs themselves are the runtime's way to give."""

    devices: tuple[tuple[str, str], ...] = ()
    groups: tuple[tuple[str, str], ...] = ()
    capabilities: tuple[tuple[str, str], ...] = ()
    # Of the machine's namespaces: ipc, network.
    host: tuple[tuple[str, str], ...] = ()
    unconfined: str = ""
    nvidia: str = ""
    memlock: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of engine process of a pool; `replicas` of them are started alike."""

    # Of the service, as a resolver knows it: the pool's, or the pool's and a side's or a model's.
    name: str
    pool: str
    role: Role = ""
    engine: str
    release: str
    model: str
    accelerator: str
    vendor: str
    layout: str
    precision: str
    gpus: int
    # Machines that one replica takes, and GPUs that a machine has.
    nodes: int
    node_gpus: int
    replicas: int
    # Each replica has a name of its own: engines of a side are led one by one, and so are machines that share models.
    numbered: bool = False
    # Other servers are on the same GPUs, one for each model that a replica hosts.
    shares_gpus: bool = False
    image: str
    image_why: str
    # What is run, up to its flags; the weights are its last word where the engine takes them so.
    program: tuple[str, ...]
    settings: tuple[Setting, ...]
    container: Container
    mounts: tuple[Mount, ...]
    port: int = PORT
    health: str = "/health"
    # How long a start may take: weights fetched, loaded, graphs captured.
    start_s: int
    # Whether weights and one request have room.
    fits: bool = True
    # From preflight: its verdict and what it found, and what else somebody should know.
    verdict: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """As far as preflight and memory say."""
        return self.fits and self.verdict != VERDICTS["error"]

    @property
    def flags(self) -> tuple[Setting, ...]:
        return tuple(setting for setting in self.settings if not setting.is_variable)

    @property
    def variables(self) -> dict[str, str]:
        return {setting.name: str(setting.value) for setting in self.settings if setting.is_variable}

    @property
    def arguments(self) -> tuple[str, ...]:
        """After the program's own name and, of vLLM, its subcommand; what the engine's parser is given."""
        at = {"vllm": 2, "sglang": 3}.get(self.engine, 1)
        return (*self.program[at:], *(word for flag in self.flags for word in flag.words))

    def command(self, *, port: int | None = None, rank: str = "", head: str = "") -> tuple[str, ...]:
        """The whole command line. `rank` and `head`: of replicas on several machines, which one this is and where the
        first is found; a worker's line is that of any rank but "0"."""
        flags = [
            word
            for flag in self.flags
            for word in (flag.words if flag.name != "--port" or port is None else (flag.name, str(port)))
        ]
        return (*self.program, *flags, *(self._among(rank, head) if self.nodes > 1 else ()))

    def _among(self, rank: str, head: str) -> tuple[str, ...]:
        own = ("--nnodes", str(self.nodes), "--node-rank", rank)
        if self.engine == "sglang":
            return (*own, "--dist-init-addr", f"{head}:{MEETING_PORT}")
        worker = () if rank == "0" else ("--headless",)
        return (*own, "--master-addr", head, "--master-port", str(MEETING_PORT), *worker)

    @property
    def slots(self) -> int:
        """Replicas that one machine has room for, as far as they are needed."""
        return max(min(self.replicas, self.node_gpus // self.gpus), 1)

    @property
    def ports_note(self) -> str:
        """Of replicas that share a machine's address, as they do without a network of their own."""
        if self.slots == 1:
            return ""
        last = self.port + self.slots - 1
        return (
            f"{self.slots} replicas share a machine, at ports {self.port} to {last}: a name stands for one port, so "
            "write their addresses into the fleet file"
        )

    @property
    def machines(self) -> int:
        return self.nodes * self.replicas if self.nodes > 1 else -(-self.replicas // self.slots)

    @property
    def gpus_on_node(self) -> int:
        return min(self.gpus, self.node_gpus)

    def seen(self, slot: int) -> str:
        """Which GPUs of its machine a replica takes; "" where it takes all."""
        if self.gpus_on_node == self.node_gpus:
            return ""
        first = slot * self.gpus
        return ",".join(map(str, range(first, first + self.gpus)))

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What preflight found and no setting here cures."""
        names = [setting.name for setting in self.settings]
        return tuple(
            one for one in self.findings if one.severity != "setting" or not any(name in one.remedy for name in names)
        )

    def reasons(self, by: Runner = "docker") -> list[tuple[str, str]]:
        """Everything that was set, beside why; of the container what is told to whoever starts it."""
        told = [(setting.shown, setting.why) for setting in self.settings]
        if by == "nobody":
            # Whose own process it is has a cache already, and its command sets none.
            return [(setting.shown, setting.why) for setting in self.settings if setting.name != "HF_HOME"]
        box = self.container
        found = [("image " + self.image, self.image_why), *told]
        if by == "docker":
            found += [(f"device {name}", why) for name, why in box.devices]
            found += [(f"group {name}", why) for name, why in box.groups]
            found += [(name, why) for name, why in (("runtime nvidia", box.nvidia), ("memlock", box.memlock)) if why]
        if by != "scheduler":
            found += [(f"capability {name}", why) for name, why in box.capabilities]
            found += [(f"{name} of the host", why) for name, why in box.host if by == "docker" or name == "network"]
            found += [("seccomp unconfined", box.unconfined)] if box.unconfined else []
        return [*found, *((f"volume {mount.source}:{mount.target}", mount.why) for mount in self.mounts)]


# Words of each engine's program that say how it is run; vLLM's subcommand comes after them.
_RUN_BY = {"sglang": 3}


def started_by(recipe: Recipe, prefix: Sequence[str]) -> Recipe:
    """The same recipe where the engine is run otherwise, such as `python3 -m vllm.entrypoints.cli.main`."""
    rest = recipe.program[_RUN_BY.get(recipe.engine, 1) :]
    return msgspec.structs.replace(recipe, program=(*prefix, *rest))


def service_name(pool: str) -> str:
    """A pool's name as host names and Kubernetes have it: letters, digits and dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", pool.lower()).strip("-")[:50].rstrip("-")
    return plain if plain[:1].isalpha() else f"pool-{plain}".rstrip("-")


def side_service(pool: str, role: str) -> str:
    return f"{service_name(pool)}-{role}"


def hosted_service(pool: str, number: int) -> str:
    """Of the servers of one of the models that share a pool's replicas."""
    return f"{service_name(pool)}-m{number}"


def hosted_port(number: int) -> int:
    """Servers of several models are on one machine, and so may be several replicas."""
    return PORT + 100 * number


def numbered_host(service: str, index: int) -> str:
    """Of one replica: as StatefulSets and LeaderWorkerSets name their pods under a headless service."""
    return f"{service}-{index}.{service}"


def nodes_of(gpus: int, accelerator: Accelerator) -> tuple[int, int]:
    """Machines for so many GPUs, and GPUs of one machine. Cards sit in one machine up to eight of them."""
    node = accelerator.node
    if node == 1:
        node = min(gpus, 8)
    return -(-gpus // node), node


def model_name(pool: Pool) -> str:
    """What clients and the gateway call the model."""
    return pool.served_as or pool.model


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's own flags are made from: one kind of process of a pool."""

    pool: Pool
    deployment: Deployment
    role: Role
    # Where the weights are, as the engine is told; and those of a drafter with weights of its own.
    weights: str
    drafter: str
    # Quantised while it is loaded, since no checkpoint of this precision is known.
    at_load: str
    port: int
    # Where the layout comes from: the fleet file, the user, or what fits.
    chosen: str
    # Of several models on one replica: how much of its memory this one may take.
    share: float | None = None
    # Tokens of cache that a replica has room for.
    cache_tokens: int = 0
    # Of settings whose value somebody published, who; by what is set: context, sequences.
    published: Mapping[str, str] = {}
