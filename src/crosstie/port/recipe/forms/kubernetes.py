"""A pool's engines as Kubernetes objects: a Deployment behind a headless Service, a StatefulSet where engines are
reached one by one, a LeaderWorkerSet where a replica takes several nodes."""

from typing import Any

from crosstie.port.recipe.forms.text import comments, filled, yaml_text
from crosstie.port.recipe.recipe import Recipe, service_name

Object = dict[str, Any]
# As the device plug-ins of both vendors name their GPUs.
_RESOURCES = {"AMD": "amd.com/gpu", "NVIDIA": "nvidia.com/gpu"}
_SHARED_MEMORY = "64Gi"
_LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}


def kubernetes(recipe: Recipe, _bare: bool = False) -> dict[str, str]:
    documents = "---\n".join(yaml_text(one) for one in objects(recipe))
    given = "GPUs, with their devices and groups, come from the vendor's device plug-in"
    given += "; RDMA from one of its own" if recipe.container.memlock else ""
    return {f"{recipe.name}.yaml": "\n".join(comments(recipe, given, by="kubernetes")) + "\n" + documents}


def objects(recipe: Recipe) -> list[Object]:
    """The workload, the name that the gateway looks up, and the claim that keeps what was fetched."""
    found = [_claim(recipe)] if any(one.is_volume for one in recipe.mounts) else []
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
    found.append({"apiVersion": "apps/v1", "kind": kind, "metadata": _metadata(recipe, recipe.name), "spec": spec})
    return [*found, _service(recipe, _labels(recipe))]


def _labels(recipe: Recipe) -> dict[str, str]:
    return {"app.kubernetes.io/name": recipe.name, "app.kubernetes.io/component": "engine"}


def _metadata(recipe: Recipe, name: str) -> Object:
    more = {"crosstie.io/pool": service_name(recipe.pool), "crosstie.io/accelerator": recipe.accelerator}
    return {"name": name, "labels": _labels(recipe) | more}


def _service(recipe: Recipe, selector: dict[str, str]) -> Object:
    """Headless: its name has the address of every pod, which `dns+http://NAME` finds."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(recipe, recipe.name),
        "spec": {
            "clusterIP": "None",
            "selector": selector,
            "ports": [{"name": "http", "port": recipe.port, "targetPort": recipe.port}],
        },
    }


def _claim(recipe: Recipe) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(recipe, f"{recipe.name}-cache"),
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "2Ti"}}},
    }


def _group(recipe: Recipe, name: str) -> Object:
    leader = recipe.command(rank="0", head="$(LWS_LEADER_ADDRESS)")
    worker = recipe.command(rank="$(LWS_WORKER_INDEX)", head="$(LWS_LEADER_ADDRESS)")
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": _metadata(recipe, name),
        "spec": {
            "replicas": recipe.replicas,
            "leaderWorkerTemplate": {
                "size": recipe.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _pod(recipe, _container(recipe, leader)),
                "workerTemplate": _pod(recipe, _container(recipe, worker, probed=False)),
            },
        },
    }


def _pod(recipe: Recipe, container: Object) -> Object:
    claim = {"name": "cache", "persistentVolumeClaim": {"claimName": f"{recipe.name}-cache"}}
    volumes = [claim if one.is_volume else {"name": f"volume-{i}", "hostPath": {"path": one.source}}
               for i, one in enumerate(recipe.mounts)]  # fmt: skip
    spec: Object = {
        "terminationGracePeriodSeconds": 90,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}}],
    }
    if any(name == "network" for name, _ in recipe.container.host):
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return {"metadata": {"labels": _labels(recipe)}, "spec": spec}


def _container(recipe: Recipe, command: tuple[str, ...], *, probed: bool = True) -> Object:
    gpus = {_RESOURCES[recipe.vendor]: str(recipe.gpus_on_node)}
    variables: list[Object] = [
        # Before those that speak of it.
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": name, "value": filled(value, "$(POD_IP)")} for name, value in recipe.variables.items()),
    ]
    if "HF_HOME" in recipe.variables:
        secret = {"name": "hf-token", "key": "token", "optional": True}
        variables.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    mounts: list[Object] = [
        {"name": "cache" if one.is_volume else f"volume-{i}", "mountPath": one.target,
         **({"readOnly": True} if one.read_only else {})}
        for i, one in enumerate(recipe.mounts)
    ]  # fmt: skip
    found: Object = {
        "name": "engine",
        "image": recipe.image,
        "command": [*command],
        "env": variables,
        "resources": {"requests": gpus, "limits": gpus},
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    box = recipe.container
    context: Object = {"capabilities": {"add": [one for one, _ in box.capabilities]}} if box.capabilities else {}
    context |= {"seccompProfile": {"type": "Unconfined"}} if box.unconfined else {}
    found |= {"securityContext": context} if context else {}
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
