"""A whole fleet as Kubernetes manifests: its engines, the gateway, the endpoint picker, and who may do what.

Core objects apply anywhere. Of custom resources these versions were read: LeaderWorkerSet v1, InferencePool v1
(inference.networking.k8s.io), HTTPRoute v1 (gateway.networking.k8s.io), ServiceMonitor v1 (monitoring.coreos.com).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

import crosstie
from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.kube import FLEET, KUBE, SERVES
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Pool
from crosstie.port.recipe.forms.kubernetes import (
    Object,
    container_security,
    disruption_budget,
    documents,
    kubernetes,
    pod_security,
    resource,
)
from crosstie.port.recipe.forms.text import comment, yaml_text
from crosstie.port.recipe.names import named
from crosstie.port.recipe.recipe import Recipe, service_name

# Not published: built from deploy/container/Containerfile and named in kustomization.yaml.
IMAGE = "crosstie"
GATEWAY, PICKER = "crosstie-gateway", "crosstie-picker"
# Of the picker also what HTTP asks: health, readiness and metrics.
GATEWAY_PORT, PICKER_PORT, OPS_PORT = 8080, 9002, 9003
# Of the Gateway that the HTTPRoute hangs on, which is the cluster's own.
PARENT = "inference-gateway"
# On namespaces whose pods may reach engines: of the proxies that the picker speaks for, and of Prometheus.
LETS_IN = "crosstie.io/reaches-engines"
_CONFIG = "/etc/crosstie"
_FILES = ("fleet", "gateway", "network", "monitoring", "picker")
_POOLS = ("inference.networking.k8s.io", "v1")


def manifests(fleet: Fleet, recipes: Sequence[Recipe]) -> dict[str, str]:
    """Files by name; `kubectl apply -k` takes the folder."""
    _check_names(recipes)
    found: dict[str, str] = {}
    for recipe in recipes:
        if recipe.shares_gpus:
            raise BadInput(f"pool {recipe.pool}: models share GPUs, which Kubernetes gives to one process")
        found |= kubernetes(recipe, fleet=service_name(fleet.name))
    name = service_name(fleet.name)
    served = found_in_cluster(fleet, recipes)
    parts: dict[str, tuple[str, list[Object]]] = {
        "fleet.yaml": ("What the gateway and the picker serve; both read it again when it changes.", [_config(served)]),
        "gateway.yaml": (
            "The gateway: OpenAI's API at crosstie-gateway. Two of them share load and limits only with "
            "[state] redis in the fleet file.",
            gateway_objects(fleet),
        ),
        "network.yaml": (
            f"Who may reach whom. Label the namespaces of the proxy and of Prometheus: {LETS_IN}=true. Pods with the "
            "host's network are outside of all this.",
            network_objects(name),
        ),
        "monitoring.yaml": ("For the Prometheus operator.", monitor_objects(name)),
    }
    answering = [one for one in recipes if not one.role]
    if answering:
        parts["picker.yaml"] = (
            f"The endpoint picker, for a Gateway named {PARENT} whose implementation supports InferencePool. "
            "Disaggregated pools are the gateway's alone.",
            picker_objects(name, _one_port(answering)),
        )
    for file, (what, made) in parts.items():
        found[file] = "\n".join(comment(what)) + "\n" + documents(made)
    return found | {"kustomization.yaml": _kustomization(sorted(found), recipes)}


def found_in_cluster(fleet: Fleet, recipes: Sequence[Recipe]) -> Fleet:
    """With the engines that the manifests start: pools of equal ones by their Service, others by name."""
    plain = {recipe.pool: recipe.name for recipe in recipes if not recipe.numbered}
    started = {recipe.pool for recipe in recipes}

    def placed(pool: Pool) -> Pool:
        if pool.name in plain:
            return msgspec.structs.replace(pool, backends=(f"{KUBE}/services/{plain[pool.name]}",))
        return named(pool) if pool.name in started else pool

    return msgspec.structs.replace(fleet, pools=tuple(map(placed, fleet.pools)))


def _check_names(recipes: Sequence[Recipe]) -> None:
    """Two things of one name would be one, or neither."""
    taken = dict.fromkeys((*_FILES, "kustomization", GATEWAY, PICKER), "the fleet's own")
    for one in recipes:
        if one.name in taken:
            raise BadInput(
                f"pool {one.pool}: would be called {one.name} in the cluster, which is {taken[one.name]}: rename it"
            )
        taken[one.name] = f"pool {one.pool} already"


def _config(fleet: Fleet) -> Object:
    metadata = {"name": "crosstie-fleet", "labels": {FLEET: service_name(fleet.name)}}
    return resource("v1", "ConfigMap", metadata, data={"fleet.toml": fleet_text(fleet)})


def _account(name: str) -> list[Object]:
    """May see which addresses Services have, in its own namespace, and nothing else."""
    role, group = f"{name}-discovery", "rbac.authorization.k8s.io"
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    who = [{"kind": "ServiceAccount", "name": name}]
    bound = {"apiGroup": group, "kind": "Role", "name": role}
    return [
        resource("v1", "ServiceAccount", _meta(name), automountServiceAccountToken=False),
        resource(f"{group}/v1", "Role", _meta(name, role), rules=[rule]),
        resource(f"{group}/v1", "RoleBinding", _meta(name, role), roleRef=bound, subjects=who),
    ]


def _meta(name: str, called: str = "") -> Object:
    return {"name": called or name, "labels": _labels(name)}


def _labels(name: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": name, "app.kubernetes.io/part-of": "crosstie"}


def gateway_objects(fleet: Fleet) -> list[Object]:
    words = ["serve", f"{_CONFIG}/fleet.toml", "--host", "0.0.0.0", "--port", str(GATEWAY_PORT)]
    # Where clients have keys, /metrics at their port needs one; Prometheus and the kubelet have none.
    words += ["--ops-host", "0.0.0.0", "--ops-port", str(OPS_PORT), "--log-format", "json"]
    leaves_s = int(fleet.serving.lame_duck_s + fleet.serving.drain_s) + 10
    return [
        *_account(GATEWAY),
        _deployment(GATEWAY, words, {"http": GATEWAY_PORT, "ops": OPS_PORT}, leaves_s),
        _service(
            GATEWAY,
            {"name": "http", "port": 80, "targetPort": "http"},
            {"name": "ops", "port": OPS_PORT, "targetPort": "ops"},
        ),
        disruption_budget(_meta(GATEWAY), _labels(GATEWAY)),
    ]


def _probes() -> Object:
    """Health stays 200 while it drains, ready does not."""
    asked: Object = {"timeoutSeconds": 3, "periodSeconds": 5}
    return {
        "startupProbe": asked | {"httpGet": {"path": "/health", "port": "ops"}, "failureThreshold": 24},
        "livenessProbe": asked | {"httpGet": {"path": "/health", "port": "ops"}, "failureThreshold": 6},
        "readinessProbe": asked | {"httpGet": {"path": "/ready", "port": "ops"}, "failureThreshold": 1},
    }


def _deployment(name: str, words: list[str], ports: dict[str, int], leaves_s: int) -> Object:
    container: Object = {
        "name": name.removeprefix("crosstie-"),
        "image": f"{IMAGE}:{crosstie.__version__}",
        "command": ["crosstie", *words],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "env": [{"name": "HOME", "value": "/var/lib/crosstie"}],
        # A guess to start from: `kubectl top` tells what they take.
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "fleet", "mountPath": _CONFIG, "readOnly": True},
            {"name": "state", "mountPath": "/var/lib/crosstie"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        **_probes(),
    }
    spread = {
        "maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": _labels(name)},
    }  # fmt: skip
    pod: Object = {
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "terminationGracePeriodSeconds": leaves_s,
        "enableServiceLinks": False,
        "topologySpreadConstraints": [spread],
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [
            {"name": "fleet", "configMap": {"name": "crosstie-fleet"}},
            {"name": "state", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    spec = {
        "replicas": 2,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "selector": {"matchLabels": _labels(name)},
        "template": {"metadata": {"labels": _labels(name)}, "spec": pod},
    }
    return resource("apps/v1", "Deployment", _meta(name), spec=spec)


def _service(name: str, *ports: Object) -> Object:
    return resource("v1", "Service", _meta(name), spec={"selector": _labels(name), "ports": [*ports]})


def _one_port(recipes: Sequence[Recipe]) -> int:
    ports = sorted({recipe.port for recipe in recipes})
    if len(ports) > 1:
        raise BadInput(
            f"pools answer at ports {', '.join(map(str, ports))}: an InferencePool has one for all of its pods, so "
            "give their backends the same"
        )
    return ports[0]


def picker_objects(fleet: str, port: int) -> list[Object]:
    words = ["pick", f"{_CONFIG}/fleet.toml", "--host", "0.0.0.0", "--port", str(PICKER_PORT)]
    words += ["--ops-host", "0.0.0.0", "--ops-port", str(OPS_PORT), "--log-format", "json"]
    group, version = _POOLS
    metadata = {"name": fleet, "labels": {FLEET: fleet}}
    pool = {
        # Pools of several accelerators in one: which is taken is the picker's to say.
        "selector": {"matchLabels": {FLEET: fleet, SERVES: "true"}},
        "targetPorts": [{"number": port}],
        "endpointPickerRef": {
            "group": "", "kind": "Service", "name": PICKER, "port": {"number": PICKER_PORT},
            # Without the picker nobody knows which pod has the model.
            "failureMode": "FailClose",
        },
    }  # fmt: skip
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "backendRefs": [{"group": group, "kind": "InferencePool", "name": fleet}],
        # Answers are streamed for minutes; engines and clients end them.
        "timeouts": {"request": "0s"},
    }
    parents = [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": PARENT}]
    route = {"parentRefs": parents, "rules": [rule]}
    return [
        *_account(PICKER),
        _deployment(PICKER, words, {"grpc": PICKER_PORT, "ops": OPS_PORT}, 30),
        _service(
            PICKER,
            {"name": "grpc", "port": PICKER_PORT, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"},
            {"name": "ops", "port": OPS_PORT, "targetPort": "ops"},
        ),
        disruption_budget(_meta(PICKER), _labels(PICKER)),
        resource(f"{group}/{version}", "InferencePool", metadata, spec=pool),
        resource("gateway.networking.k8s.io/v1", "HTTPRoute", metadata, spec=route),
    ]


def network_objects(fleet: str) -> list[Object]:
    def policy(name: str, selector: Object, **spec: Any) -> Object:
        kinds = [kind for key, kind in (("ingress", "Ingress"), ("egress", "Egress")) if key in spec]
        whole = {"podSelector": {"matchLabels": selector}, "policyTypes": kinds, **spec}
        meta = {"name": name, "labels": {FLEET: fleet}}
        return resource("networking.k8s.io/v1", "NetworkPolicy", meta, spec=whole)

    engines = {"podSelector": {"matchLabels": {FLEET: fleet}}}
    own = [{"podSelector": {"matchLabels": _labels(name)}} for name in (GATEWAY, PICKER)]
    others = {"namespaceSelector": {"matchLabels": {LETS_IN: "true"}}}
    names = [{"port": 53, "protocol": one} for one in ("UDP", "TCP")]
    return [
        policy(
            "crosstie-engines",
            {FLEET: fleet},
            # Ranks of a replica speak to each other at ports that they choose.
            ingress=[{"from": [*own, engines, others]}],
            # Weights are fetched; engines ask nobody else.
            egress=[{"ports": names}, {"ports": [{"port": 443, "protocol": "TCP"}]}, {"to": [engines]}],
        ),
        policy(
            GATEWAY,
            _labels(GATEWAY),
            ingress=[
                {"ports": [{"port": GATEWAY_PORT, "protocol": "TCP"}]},
                {"from": [others], "ports": [{"port": OPS_PORT, "protocol": "TCP"}]},
            ],
        ),
        policy(
            PICKER,
            _labels(PICKER),
            ingress=[{"from": [others], "ports": [{"port": at, "protocol": "TCP"} for at in (PICKER_PORT, OPS_PORT)]}],
        ),
    ]  # fmt: skip


def monitor_objects(fleet: str) -> list[Object]:
    def monitor(name: str, selector: Object, port: str) -> Object:
        endpoints = [{"port": port, "path": "/metrics", "interval": "15s"}]
        spec = {"selector": {"matchLabels": selector}, "endpoints": endpoints}
        return resource(
            "monitoring.coreos.com/v1", "ServiceMonitor", {"name": name, "labels": {FLEET: fleet}}, spec=spec
        )

    own = [monitor(name, _labels(name), "ops") for name in (GATEWAY, PICKER)]
    return [monitor("crosstie-engines", {FLEET: fleet}, "http"), *own]


def _kustomization(files: list[str], recipes: Sequence[Recipe]) -> str:
    needs = ["Prometheus operator (ServiceMonitor v1): monitoring.yaml"]
    if "picker.yaml" in files:
        needs.append("Gateway API (HTTPRoute v1) and its Inference Extension (InferencePool v1): picker.yaml")
    if groups := [f"{recipe.name}.yaml" for recipe in recipes if recipe.nodes > 1]:
        needs.append(f"LeaderWorkerSet v1: {', '.join(groups)}")
    said = [
        "kubectl create namespace crosstie && kubectl apply -k .",
        "Written by `crosstie`, applied to no cluster. Leave out what your cluster has no resources for:",
        *(f"  {one}" for one in needs),
        "Set the registry of the gateway's image below; add a secret hf-token (key token) if weights are gated.",
    ]
    whole = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "crosstie",
        "resources": files,
        "images": [{"name": IMAGE, "newName": IMAGE, "newTag": crosstie.__version__}],
    }
    return "".join(f"# {line}\n" for line in said) + yaml_text(whole)
