"""A pool's engines as Kubernetes objects: a Deployment behind a headless Service, a StatefulSet where engines are
reached one by one, a LeaderWorkerSet where a replica takes several nodes."""

from typing import Any

from crosstie.catalog.kube import ACCELERATOR, FLEET, MODEL, POOL, SERVES, label_value
from crosstie.port.recipe.forms.text import comments, filled, yaml_text
from crosstie.port.recipe.nodes import RESOURCES, label_note, node_labels
from crosstie.port.recipe.recipe import CLAIM, IMAGE, SHELF, Recipe, service_name

Object = dict[str, Any]
_SHARED_MEMORY = "64Gi"
_SCRATCH = "/tmp"
# Whom containers run as: nobody of an image's, so that what they may write is what is mounted for them.
USER = 10001
# Between the word that a pod leaves and its engine's end, so that whoever sends it requests has heard of it.
LEAVES_S = 10
# What is being answered then has so long.
DRAINS_S = 90
# Cores that vLLM asks for at least, two threads each: one a GPU, its API server and its scheduler
# (vllm-project/vllm docs/configuration/optimization.md).
_THREADS, _BESIDE_GPUS = 2, 2
# A guess: with none asked for, a node short of memory would end these pods first.
_MEMORY_GIB = 16
_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}


def kubernetes(recipe: Recipe, _bare: bool = False, *, fleet: str = "") -> dict[str, str]:
    given = "GPUs, with their devices, come from the vendor's device plug-in"
    given += "; RDMA from one of its own" if recipe.container.memlock else ""
    said = comments(recipe, given, *_notes(recipe), label_note(recipe.accelerator), by="kubernetes")
    return {f"{recipe.name}.yaml": "\n".join(said) + "\n" + documents(objects(recipe, fleet))}


def resource(api: str, kind: str, metadata: Object, **rest: Any) -> Object:
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **rest}


def documents(made: list[Object]) -> str:
    return "---\n".join(yaml_text(one) for one in made)


def _notes(recipe: Recipe) -> list[str]:
    """What a container that is not root's needs of its node."""
    found = []
    if recipe.vendor == "AMD":
        found.append(
            f"/dev/kfd and /dev/dri must be open to user {USER}: nodes with ROCm's udev rule (MODE 0666, "
            "ROCm/ROCm-docker#90), or add the number of their group render as supplementalGroups"
        )
    if recipe.container.memlock:
        found.append(
            "capabilities have no effect for a user who is not root: RDMA needs nodes whose container runtime sets no "
            "limit on locked memory"
        )
    return found


def objects(recipe: Recipe, fleet: str = "") -> list[Object]:
    """The workload, the name that the gateway looks up, the claim that keeps what was fetched, and what evictions must
    leave. With `fleet`, pods say whose they are."""
    # Of a group the loss of one pod is that of all, which are then not ready: the next eviction waits.
    budget = disruption_budget(_metadata(recipe, recipe.name), _labels(recipe))
    return [_marked(made, fleet) for made in [*_objects(recipe), budget]]


def _objects(recipe: Recipe) -> list[Object]:
    found = _claims(recipe)
    if recipe.nodes > 1:
        # It makes a headless service of its own name, for all of its pods: the pool's is for the first of each group.
        name = recipe.name if recipe.numbered else f"{recipe.name}-nodes"
        found.append(_group(recipe, name))
        return found if recipe.numbered else [*found, _service(recipe, _labels(recipe) | _LEADER)]
    kind = "StatefulSet" if recipe.numbered else "Deployment"
    spec: Object = {
        "replicas": recipe.replicas,
        "selector": {"matchLabels": _labels(recipe)},
        "template": _pod(recipe, _container(recipe, recipe.command())),
    }
    spec |= {"serviceName": recipe.name, "podManagementPolicy": "Parallel"} if recipe.numbered else {
        # GPUs are scarce: a new pod would wait for those that the old one has.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    }  # fmt: skip
    found.append(resource("apps/v1", kind, _metadata(recipe, recipe.name), spec=spec))
    return [*found, _service(recipe, _labels(recipe))]


def _labels(recipe: Recipe) -> dict[str, str]:
    return {"app.kubernetes.io/name": recipe.name, "app.kubernetes.io/component": "engine"}


def _metadata(recipe: Recipe, name: str) -> Object:
    return {"name": name, "labels": _labels(recipe) | _said(recipe)}


def _said(recipe: Recipe) -> dict[str, str]:
    """What is not chosen by, but read: a label that Deployments select by may never change."""
    return {POOL: service_name(recipe.pool), ACCELERATOR: recipe.accelerator, MODEL: label_value(recipe.model)}


def _marked(made: Object, fleet: str) -> Object:
    """Its pods, and itself, with the fleet's name."""
    if not fleet:
        return made
    made["metadata"]["labels"][FLEET] = fleet
    spec = made.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
        if template:
            template["metadata"]["labels"][FLEET] = fleet
    return made


def disruption_budget(metadata: Object, labels: dict[str, str]) -> Object:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    return resource("policy/v1", "PodDisruptionBudget", metadata, spec=spec)


def _service(recipe: Recipe, selector: dict[str, str]) -> Object:
    """Headless: its name has the address of every pod, which `dns+http://NAME` finds."""
    ports = [{"name": "http", "port": recipe.port, "targetPort": recipe.port}]
    spec = {"clusterIP": "None", "selector": selector, "ports": ports}
    return resource("v1", "Service", _metadata(recipe, recipe.name), spec=spec)


def _claims(recipe: Recipe) -> list[Object]:
    """What was fetched, and what was put there by hand: every pod of the pool reads it, so it is on shared storage."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "2Ti"}}}
    return [
        resource("v1", "PersistentVolumeClaim", _metadata(recipe, f"{recipe.name}-{name}"), spec=spec)
        for name in dict.fromkeys(_volume(recipe, i)[0] for i in range(len(recipe.mounts)))
        if name in ("cache", "models")
    ]


def _volume(recipe: Recipe, index: int) -> tuple[str, Object, Object]:
    """Its name in the pod, what it is, and what is said where it is mounted."""
    source, own = recipe.mounts[index].source, recipe.name
    if recipe.mounts[index].is_volume:
        return "cache", {"persistentVolumeClaim": {"claimName": f"{own}-cache"}}, {}
    if source == SHELF:
        return "models", {"persistentVolumeClaim": {"claimName": f"{own}-models"}}, {}
    if source.startswith(IMAGE):
        return f"volume-{index}", {"image": {"reference": source.removeprefix(IMAGE), "pullPolicy": "IfNotPresent"}}, {}
    if source.startswith(CLAIM):
        claim, _, folder = source.removeprefix(CLAIM).partition("/")
        inner = {"subPath": folder} if folder else {}
        return f"volume-{index}", {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, inner
    return f"volume-{index}", {"hostPath": {"path": source}}, {}


def _group(recipe: Recipe, name: str) -> Object:
    leader = recipe.command(rank="0", head="$(LWS_LEADER_ADDRESS)")
    worker = recipe.command(rank="$(LWS_WORKER_INDEX)", head="$(LWS_LEADER_ADDRESS)")
    template = {
        "size": recipe.nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": _pod(recipe, _container(recipe, leader)),
        "workerTemplate": _pod(recipe, _container(recipe, worker, probed=False), serves=False),
    }
    spec = {"replicas": recipe.replicas, "leaderWorkerTemplate": template}
    return resource("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _metadata(recipe, name), spec=spec)


def _pod(recipe: Recipe, container: Object, *, serves: bool = True) -> Object:
    volumes: dict[str, Object] = {}
    for index in range(len(recipe.mounts)):
        name, given, _ = _volume(recipe, index)
        volumes[name] = given
    volumes["scratch"] = {"emptyDir": {}}
    volumes["shm"] = {"emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}}
    terms = [{"key": key, "operator": "In", "values": [*values]} for key, values in node_labels(recipe.accelerator)]
    chosen = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
    spec: Object = {
        # It asks the API server for nothing.
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": LEAVES_S + DRAINS_S,
        "enableServiceLinks": False,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": chosen}},
        # As GPU nodes are kept free of everything else.
        "tolerations": [{"key": RESOURCES[recipe.vendor], "operator": "Exists", "effect": "NoSchedule"}],
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [{"name": name, **given} for name, given in volumes.items()],
    }
    if len(terms) == 1 and len(terms[0]["values"]) == 1:
        del spec["affinity"]
        spec["nodeSelector"] = {terms[0]["key"]: terms[0]["values"][0]}
    if any(name == "network" for name, _ in recipe.container.host):
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    more = {SERVES: "true"} if serves and not recipe.role else {}
    return {"metadata": {"labels": _labels(recipe) | _said(recipe) | more}, "spec": spec}


def pod_security() -> Object:
    return {
        "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip


def container_security(*capabilities: str) -> Object:
    drops: Object = {"drop": ["ALL"]}
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": drops | ({"add": [*capabilities]} if capabilities else {}),
    }


def _container(recipe: Recipe, command: tuple[str, ...], *, probed: bool = True) -> Object:
    count = recipe.gpus_on_node
    gpus = {RESOURCES[recipe.vendor]: str(count)}
    asked = {"cpu": str(_THREADS * (count + _BESIDE_GPUS)), "memory": f"{_MEMORY_GIB * count}Gi"}
    variables: list[Object] = [
        # Before those that speak of it.
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        # Where engines compile and keep things; without a user's name PyTorch asks a list that has none.
        {"name": "HOME", "value": _SCRATCH},
        {"name": "USER", "value": "engine"},
        *({"name": name, "value": filled(value, "$(POD_IP)")} for name, value in recipe.variables.items()),
    ]
    if "HF_HOME" in recipe.variables:
        secret = {"name": "hf-token", "key": "token", "optional": True}
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    mounts: list[Object] = [
        {"name": _volume(recipe, i)[0], "mountPath": mount.target, **_volume(recipe, i)[2],
         **({"readOnly": True} if mount.read_only else {})}
        for i, mount in enumerate(recipe.mounts)
    ]  # fmt: skip
    mounts += [{"name": "scratch", "mountPath": _SCRATCH}, {"name": "shm", "mountPath": "/dev/shm"}]
    found: Object = {
        "name": "engine",
        "image": recipe.image,
        "command": [*command],
        "env": variables,
        "resources": {"requests": asked | gpus, "limits": gpus},
        "volumeMounts": mounts,
        "lifecycle": {"preStop": {"sleep": {"seconds": LEAVES_S}}},
    }
    box = recipe.container
    context = container_security(*(one for one, _ in box.capabilities))
    context |= {"seccompProfile": {"type": "Unconfined"}} if box.unconfined else {}
    found["securityContext"] = context
    return found | (_probes(recipe) if probed else {})


def _probes(recipe: Recipe) -> Object:
    asked = {"httpGet": {"path": recipe.health, "port": "http"}, "timeoutSeconds": 5}
    return {
        "ports": [{"name": "http", "containerPort": recipe.port}],
        "startupProbe": asked | {"periodSeconds": 10, "failureThreshold": -(-recipe.start_s // 10)},
        "readinessProbe": asked | {"periodSeconds": 5, "failureThreshold": 3},
        # An engine that computes a long prompt answers late, and must not be started anew for that.
        "livenessProbe": asked | {"periodSeconds": 15, "failureThreshold": 8},
    }
