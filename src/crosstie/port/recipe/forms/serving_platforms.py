"""Serving platforms on Kubernetes that start engines themselves: KServe, and Ray Serve under KubeRay.

KServe's InferenceService v1beta1 and KubeRay's RayService v1, as their repositories have them. Both put a balancer
of their own before replicas, so that the gateway sees one address a pool.
"""

from typing import Any

from crosstie.core.errors import BadInput
from crosstie.port.recipe.forms.kubernetes import Object, objects
from crosstie.port.recipe.forms.schedulers import ray_application
from crosstie.port.recipe.forms.text import comments, yaml_text
from crosstie.port.recipe.recipe import Recipe

# Ray's own images; the engine's has no Ray's entry point.
_RAY = "2.60.0"


def kserve(recipe: Recipe, _bare: bool = False) -> dict[str, str]:
    """A predictor with the recipe's own container: no runtime of KServe's has all of these settings."""
    workload, claims = _parts(recipe, "KServe")
    pod = workload["spec"]["template"]
    container = pod["spec"]["containers"][0]
    # KServe looks for its container by this name.
    container["name"] = "kserve-container"
    container["ports"] = [{"name": "http1", "containerPort": recipe.port, "protocol": "TCP"}]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[probe]["httpGet"]["port"] = recipe.port
    made = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            "name": recipe.name,
            "labels": workload["metadata"]["labels"],
            "annotations": {
                # Without Knative, as KServe itself advises for language models (0.16 and later).
                "serving.kserve.io/deploymentMode": "Standard",
                # `crosstie scale` and people change replicas, not KServe's own autoscaler.
                "serving.kserve.io/autoscalerClass": "none",
            },
        },
        "spec": {
            "predictor": {
                "minReplicas": recipe.replicas,
                "maxReplicas": recipe.replicas,
                "deploymentStrategy": workload["spec"]["strategy"],
                "labels": pod["metadata"]["labels"],
                **pod["spec"],
            }
        },
    }
    return {f"{recipe.name}.kserve.yaml": _text(recipe, [*claims, made])}


def rayservice(recipe: Recipe, _bare: bool = False) -> dict[str, str]:
    """Ray Serve's application on a Ray cluster of its own: a head without GPUs, and a worker a node."""
    application, warnings = ray_application(recipe)
    workload, claims = _parts(recipe, "RayService")
    pod: Object = workload["spec"]["template"]["spec"]
    engine = pod["containers"][0]
    # Ray starts its own processes in these; readiness is Ray's to tell.
    for key in ("command", "startupProbe", "readinessProbe", "livenessProbe", "ports", "lifecycle"):
        engine.pop(key, None)
    image = f"rayproject/ray-llm:{_RAY}"
    engine |= {"name": "ray-worker", "image": image}
    head: Object = {
        "name": "ray-head", "image": image,
        "resources": {"requests": {"cpu": "2", "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    made = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": recipe.name, "labels": workload["metadata"]["labels"]},
        "spec": {
            "serveConfigV2": yaml_text(application),
            "rayClusterConfig": {
                "rayVersion": _RAY,
                "headGroupSpec": {
                    "rayStartParams": {"num-gpus": "0"},
                    "template": {"spec": {"securityContext": pod["securityContext"], "containers": [head]}},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "engines",
                        "replicas": recipe.replicas, "minReplicas": recipe.replicas, "maxReplicas": recipe.replicas,
                        "rayStartParams": {},
                        "template": {"metadata": workload["spec"]["template"]["metadata"], "spec": pod},
                    }
                ],
            },
        },
    }  # fmt: skip
    # Ray's own image writes below its root.
    engine["securityContext"].pop("readOnlyRootFilesystem")
    given = f"image {image}: its tag is a guess, and Ray's vLLM may be another release than {recipe.release}"
    given += "; one with ROCm is yours to build" if recipe.vendor == "AMD" else ""
    notes = [line.removeprefix("# ") for line in warnings]
    return {f"{recipe.name}.rayservice.yaml": _text(recipe, [*claims, made], given, *notes)}


def _parts(recipe: Recipe, platform: str) -> tuple[dict[str, Any], list[Object]]:
    if recipe.nodes > 1 or recipe.numbered:
        why = "takes several nodes" if recipe.nodes > 1 else "is reached one by one"
        raise BadInput(f"{recipe.name}: a replica {why}, which this {platform} cannot say: --as kubernetes can")
    made = objects(recipe)
    claims = [one for one in made if one["kind"] == "PersistentVolumeClaim"]
    return next(one for one in made if one["kind"] == "Deployment"), claims


def _text(recipe: Recipe, made: list[Object], *more: str) -> str:
    said = comments(recipe, *more, "The platform balances replicas behind one address.", by="kubernetes")
    return "\n".join(said) + "\n" + "---\n".join(map(yaml_text, made))
