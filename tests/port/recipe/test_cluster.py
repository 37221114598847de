"""A whole fleet as manifests: what Kubernetes takes, who may do what, and what is refused."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests.conftest import Command
from tests.port.recipe.samples import asked, pool
from tests.small_workload import small

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput, CrosstieError
from crosstie.core.fleet import Fleet, Pool
from crosstie.port.recipe.build import RecipeBook, RecipeOptions, fleet_recipes
from crosstie.port.recipe.forms import render
from crosstie.port.recipe.forms.cluster import manifests
from crosstie.port.recipe.nodes import Node, check_room, node_labels, read_nodes

VERSION = "1.37"
KUBECTL = shutil.which("kubectl")
# Of custom resources, what their definitions require and allow, of that which is used here: read from
# gateway-api-inference-extension@84436a96 (InferencePool v1), gateway-api (HTTPRoute v1), lws (LeaderWorkerSet v1),
# prometheus-operator (ServiceMonitor v1), kserve (InferenceService v1beta1) and kuberay (RayService v1). No rule that
# is written in CEL is run.
CUSTOM: dict[str, tuple[str, set[str], set[str]]] = {
    "InferencePool": (
        "inference.networking.k8s.io/v1",
        {"selector", "targetPorts", "endpointPickerRef"},
        {"selector", "targetPorts", "endpointPickerRef", "appProtocol"},
    ),
    "HTTPRoute": ("gateway.networking.k8s.io/v1", set(), {"parentRefs", "hostnames", "rules", "useDefaultGateways"}),
    "ServiceMonitor": (
        "monitoring.coreos.com/v1",
        {"endpoints", "selector"},
        {"endpoints", "selector", "namespaceSelector", "jobLabel"},
    ),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        {"leaderWorkerTemplate"},
        {"leaderWorkerTemplate", "replicas", "rolloutStrategy", "startupPolicy", "networkConfig"},
    ),
}


def fleet(*pools: Pool, name: str = "two vendors") -> Fleet:
    return Fleet(name=name, planned="2026-11-16", policy="cheapest-meeting-target", pools=pools, classes=())


def both() -> Fleet:
    return fleet(
        pool(name="amd", accelerator="mi300x", replicas=2),
        pool(name="nvidia", accelerator="h200"),
        pool(name="wide", model="deepseek-v3", accelerator="h200", parallelism=Parallelism(dp=16, ep=16), replicas=2),
    )


def files_of(catalog: Catalog, served: Fleet) -> dict[str, str]:
    return manifests(served, fleet_recipes(RecipeBook(catalog), served)[0])


def documents(texts: dict[str, str]) -> list[dict[str, Any]]:
    return [made for name, text in texts.items() if name != "kustomization.yaml" for made in yaml.safe_load_all(text)]


def of_kind(made: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    (found,) = (one for one in made if one["kind"] == kind and name in ("", one["metadata"]["name"]))
    return found


def pods(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for one in made:
        spec = one.get("spec") or {}
        group = spec.get("leaderWorkerTemplate", {})
        found += [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
    return [one for one in found if one]


def check(made: dict[str, Any]) -> None:
    """As an API server would, as far as that is known here."""
    if made["kind"] not in CUSTOM:
        kubernetes_validate.validate(made, VERSION, strict=True)
        return
    version, required, known = CUSTOM[made["kind"]]
    assert made["apiVersion"] == version
    assert required <= made["spec"].keys() <= known
    for pod in pods([made]):
        held = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod["spec"]}
        kubernetes_validate.validate(held, VERSION, strict=True)


@pytest.fixture(scope="module")
def texts(catalog: Catalog) -> dict[str, str]:
    return files_of(catalog, both())


@pytest.fixture(scope="module")
def made(texts: dict[str, str]) -> list[dict[str, Any]]:
    return documents(texts)


def test_kubernetes_takes_all_of_it(made: list[dict[str, Any]]) -> None:
    for one in made:
        check(one)
    assert {one["kind"] for one in made} == {
        "ConfigMap", "Deployment", "HTTPRoute", "InferencePool", "LeaderWorkerSet", "NetworkPolicy",
        "PersistentVolumeClaim", "PodDisruptionBudget", "Role", "RoleBinding", "Service", "ServiceAccount",
        "ServiceMonitor",
    }  # fmt: skip


def test_a_wrong_field_would_be_caught(made: list[dict[str, Any]]) -> None:
    wrong = json.loads(json.dumps(of_kind(made, "InferencePool")))
    del wrong["spec"]["endpointPickerRef"]
    with pytest.raises(AssertionError):
        check(wrong)
    wrong = json.loads(json.dumps(of_kind(made, "Deployment", "amd")))
    wrong["spec"]["template"]["spec"]["nodeSelecter"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(wrong)


def test_nobody_is_root_and_nobodys_root_can_be_written(made: list[dict[str, Any]]) -> None:
    found = pods(made)
    assert len(found) == 6
    for pod in found:
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert security["runAsUser"] > 0
        for container in pod["spec"]["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]
        assert not any("hostPath" in one for one in pod["spec"]["volumes"])


def test_engines_ask_no_api_server_and_the_others_only_for_addresses(made: list[dict[str, Any]]) -> None:
    trusted = {
        pod["spec"].get("serviceAccountName") for pod in pods(made) if pod["spec"]["automountServiceAccountToken"]
    }
    assert trusted == {"crosstie-gateway", "crosstie-picker"}
    rules = [rule for one in made if one["kind"] == "Role" for rule in one["rules"]]
    assert all(rule["resources"] == ["endpointslices"] and rule["verbs"] == ["list", "watch"] for rule in rules)
    assert not any(one["kind"].startswith("Cluster") for one in made)


def test_pods_go_to_nodes_of_their_accelerator(made: list[dict[str, Any]]) -> None:
    amd = of_kind(made, "Deployment", "amd")["spec"]["template"]["spec"]
    ((term,),) = (
        one["matchExpressions"]
        for one in amd["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
    )
    # A physical function and virtual ones, which have no product's name.
    assert term["key"] == "amd.com/gpu.device-id"
    assert {"74a1", "74b5"} <= {*term["values"]}
    assert amd["tolerations"][0]["key"] == "amd.com/gpu"
    nvidia = of_kind(made, "Deployment", "nvidia")["spec"]["template"]["spec"]
    assert nvidia["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H200"}
    assert nvidia["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    # Whoever asks for no memory is the first to be ended where it is short.
    assert {"cpu", "memory"} <= nvidia["containers"][0]["resources"]["requests"].keys()


def test_one_inference_pool_has_the_pods_of_both_vendors_that_answer(made: list[dict[str, Any]]) -> None:
    chosen = of_kind(made, "InferencePool")["spec"]["selector"]["matchLabels"].items()
    having = [pod["metadata"]["labels"] for pod in pods(made) if chosen <= pod["metadata"]["labels"].items()]
    assert sorted(one["crosstie.io/accelerator"] for one in having) == ["h200", "h200", "mi300x"]
    # Of a group the first pod alone.
    assert sorted(one["crosstie.io/pool"] for one in having) == ["amd", "nvidia", "wide"]
    route = of_kind(made, "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]
    assert (route["kind"], route["name"]) == ("InferencePool", of_kind(made, "InferencePool")["metadata"]["name"])
    reference = of_kind(made, "InferencePool")["spec"]["endpointPickerRef"]
    service = of_kind(made, "Service", reference["name"])
    assert service["spec"]["ports"][0]["port"] == reference["port"]["number"]


def test_an_engine_goes_on_until_the_gateway_has_heard_that_it_leaves(made: list[dict[str, Any]]) -> None:
    pod = of_kind(made, "Deployment", "amd")["spec"]["template"]["spec"]
    slept = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 2 < slept < pod["terminationGracePeriodSeconds"]


def test_the_gateway_finds_the_engines_of_the_manifests(
    catalog: Catalog, made: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(of_kind(made, "ConfigMap")["data"]["fleet.toml"])
    served = read_fleet(catalog, file)
    services = {one["metadata"]["name"] for one in made if one["kind"] == "Service"}
    for one in served.pools:
        (backend,) = one.backends
        assert backend.removeprefix("kube:///services/") in services


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed")
def test_kustomize_takes_the_folder(texts: dict[str, str], made: list[dict[str, Any]], tmp_path: Path) -> None:
    assert KUBECTL
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [KUBECTL, "kustomize", str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    built = [*yaml.safe_load_all(done.stdout)]
    assert len(built) == len(made)
    assert {one["metadata"]["namespace"] for one in built} == {"crosstie"}


def test_weights_come_from_a_claim_or_an_image(catalog: Catalog) -> None:
    for where, name, kind in (
        ("oci://registry.example/llama:1", "/models/llama", "image"),
        ("pvc://weights/llama", "/models/llama", "persistentVolumeClaim"),
    ):
        options = RecipeOptions(weights={"": where})
        (recipe,) = RecipeBook(catalog, options).recipes(pool())
        (text,) = render(recipe, "kubernetes").values()
        deployment = of_kind([*yaml.safe_load_all(text)], "Deployment")
        check(deployment)
        spec = deployment["spec"]["template"]["spec"]
        assert kind in spec["volumes"][0]
        assert spec["containers"][0]["volumeMounts"][0]["mountPath"] == name
        assert name in spec["containers"][0]["command"]
        with pytest.raises(BadInput, match="are a cluster's: --as kubernetes or kserve"):
            render(recipe, "compose")
    with pytest.raises(BadInput, match="names nothing"):
        RecipeBook(catalog, RecipeOptions(weights={"": "oci://"})).recipes(pool())


@pytest.mark.parametrize(("form", "kind"), [("kserve", "InferenceService"), ("rayservice", "RayService")])
def test_other_platforms_get_pods_that_kubernetes_would_take(catalog: Catalog, form: str, kind: str) -> None:
    (text,) = render(asked(catalog, "plain", "vllm")[0], form).values()
    found = of_kind([*yaml.safe_load_all(text)], kind)
    if form == "kserve":
        spec = {**found["spec"]["predictor"]}
        assert spec["containers"][0]["name"] == "kserve-container"
        assert (spec.pop("minReplicas"), spec.pop("maxReplicas")) == (10, 10)
        assert spec.pop("labels")["crosstie.io/accelerator"] == "mi300x"
        spec.pop("deploymentStrategy")
    else:
        config = yaml.safe_load(found["spec"]["serveConfigV2"])
        assert config["applications"][0]["import_path"] == "ray.serve.llm:build_openai_app"
        cluster = found["spec"]["rayClusterConfig"]
        spec = cluster["workerGroupSpecs"][0]["template"]["spec"]
        check(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "p"},
                "spec": cluster["headGroupSpec"]["template"]["spec"],
            }
        )
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    with pytest.raises(BadInput, match="several nodes"):
        render(asked(catalog, "wide", "vllm")[0], form)


# Nodes


def node(name: str, gpus: int | str, **labels: str) -> dict[str, Any]:
    amd = any(key.startswith("amd") for key in labels)
    told = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
    resource = "amd.com/gpu" if amd else "nvidia.com/gpu"
    return {"metadata": {"name": name, "labels": told}, "status": {"allocatable": {"cpu": "64", resource: str(gpus)}}}


MI300X = {"amd.com__gpu.device_id": "74b5"}
H200 = {"nvidia.com__gpu.product": "NVIDIA-H200"}


def written(folder: Path, *nodes: Any) -> Path:
    file = folder / "nodes.json"
    file.write_text(json.dumps({"kind": "List", "items": nodes}))
    return file


def test_nodes_are_known_by_the_labels_of_both_vendors(catalog: Catalog, tmp_path: Path) -> None:
    cpu = {"metadata": {"name": "c"}, "status": {"allocatable": {"cpu": "64"}}}
    away = {**node("gone", 8, **H200), "spec": {"unschedulable": True}}
    ours = node("d", 4, **{"crosstie.io__accelerator": "MI325X", "amd.com__x": ""})
    file = written(tmp_path, node("a", 8, **MI300X), node("b", 8, **H200), cpu, away, ours)
    assert read_nodes(catalog, file) == [
        Node(name="a", accelerator="mi300x", gpus=8),
        Node(name="b", accelerator="h200", gpus=8),
        Node(name="d", accelerator="mi325x", gpus=4),
    ]
    assert node_labels("rx-7900-xt") == (("amd.com/gpu.device-id", ("744c",)), ("amd.com/gpu.cu-count", ("84",)))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (node("x", 8, **{"nvidia.com__gpu.product": "Tesla-K80"}), "node x: nvidia.com/gpu.product=Tesla-K80 names no accelerator of the catalog; say which it has: kubectl label node x"),
        (node("x", 8, **{"crosstie.io__accelerator": "mi999x"}), "node x: label crosstie.io/accelerator: .*mi999x"),
        (node("x", "many", **H200), "'many' of nvidia.com/gpu is no count"),
        ("x", "items.0..metadata: missing: this is not what"),
    ],
)  # fmt: skip
def test_a_label_that_names_no_accelerator_is_refused(catalog: Catalog, tmp_path: Path, made: Any, said: str) -> None:
    with pytest.raises(CrosstieError, match=said):
        read_nodes(catalog, written(tmp_path, made))


def test_a_pool_that_no_node_can_hold_is_refused(catalog: Catalog, tmp_path: Path) -> None:
    recipes, _ = fleet_recipes(RecipeBook(catalog), both())
    file = tmp_path / "nodes.json"

    def there(amd: int, nvidia: int, of: int = 8) -> list[Node]:
        return [
            *(Node(name=f"a{i}", accelerator="mi300x", gpus=8) for i in range(amd)),
            *(Node(name=f"n{i}", accelerator="h200", gpus=of) for i in range(nvidia)),
        ]

    check_room(recipes, there(1, 5), file)
    with pytest.raises(
        BadInput, match=r"pool wide: no node of .* holds a pod with 8 x h200; nodes have 4 x h200, 8 x mi300x"
    ):
        check_room(recipes, there(1, 9, of=4), file)
    with pytest.raises(
        BadInput, match=r"pool nvidia: 2 pods of 1 x h200 do not fit beside the others on the 4 nodes .* room for 0"
    ):
        check_room(recipes, there(1, 4), file)
    with pytest.raises(BadInput, match=r"pool amd: no node of .* holds a pod with 1 x mi300x"):
        check_room(recipes, there(0, 5), file)


def test_pools_at_several_ports_have_no_inference_pool(catalog: Catalog) -> None:
    served = fleet(pool(name="a", backends=("http://a:8000/v1",)), pool(name="b", backends=("http://b:9000/v1",)))
    with pytest.raises(BadInput, match="pools answer at ports 8000, 9000"):
        files_of(catalog, served)


def test_engines_that_are_reached_one_by_one_have_names(catalog: Catalog, tmp_path: Path) -> None:
    served = read_fleet_text(catalog, tmp_path, APART)
    found = documents(files_of(catalog, served))
    again = read_fleet_text(catalog, tmp_path, of_kind(found, "ConfigMap")["data"]["fleet.toml"])
    apart = again.pools[0].apart
    assert apart is not None
    assert apart.decode.backends == tuple(f"http://long-decode-{i}.long-decode:8000/v1" for i in range(2))
    # They are led by the gateway: no picker may send them anything.
    assert not any(one["kind"] in ("InferencePool", "HTTPRoute") for one in found)


def read_fleet_text(catalog: Catalog, folder: Path, text: str) -> Fleet:
    (folder / "fleet.toml").write_text(text)
    return read_fleet(catalog, folder / "fleet.toml")


APART = """\
format = 1
name = "apart"
[[pool]]
name = "long"
model = "deepseek-r1"
accelerator = "mi355x"
stack = "vllm"
connector = "vllm-nixl"
precision = "native"
usd_per_gpu_hour = 3.0
replicas = 1
max_in_flight = 64
max_context = 32768
prefill = { replicas = 1, tp = 8 }
decode = { replicas = 2, tp = 8 }
"""


def test_names_that_would_be_taken_are_refused(catalog: Catalog) -> None:
    with pytest.raises(
        BadInput, match=r"pool gateway: would be called gateway in the cluster, which is the fleet's own"
    ):
        files_of(catalog, fleet(pool(name="gateway")))
    with pytest.raises(BadInput, match=r"pool a-b: would be called a-b in the cluster, which is pool a.b already"):
        files_of(catalog, fleet(pool(name="a.b"), pool(name="a-b")))


def test_the_command_writes_the_folder_and_refuses_in_one_line(crosstie: Command, tmp_path: Path) -> None:
    asked = ["recipe", "--fleet", "examples/fleets/two_vendors.toml", "--as", "kubernetes", "-o", str(tmp_path / "m")]
    done = crosstie(*asked)
    assert done.status == 0
    assert {"kustomization.yaml", "gateway.yaml", "picker.yaml", "mi300x.yaml", "h200.yaml"} <= {
        one.name for one in (tmp_path / "m").iterdir()
    }
    done = crosstie(*asked, "--nodes", str(written(tmp_path, node("b", 8, **H200))))
    assert done.status == 2
    assert "pool mi300x: no node of" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.usefixtures("planned_once")
def test_a_plan_is_written_as_manifests(crosstie: Command, tmp_path: Path) -> None:
    workload, folder = str(small(tmp_path)), tmp_path / "new" / "m"
    done = crosstie("plan", workload, "--quick", "--manifests", str(folder), "--fleet", str(tmp_path / "fleet.toml"))
    assert (done.status, done.err.splitlines()[-1]) == (0, f"manifests written to {folder}")
    found = documents({file.name: file.read_text() for file in folder.iterdir()})
    for one in found:
        check(one)
    (planned,) = read_fleet(Catalog(), tmp_path / "fleet.toml").pools
    engines = of_kind(found, "Deployment", planned.name)
    assert engines["spec"]["replicas"] == planned.replicas
    assert engines["spec"]["template"]["metadata"]["labels"]["crosstie.io/accelerator"] == planned.accelerator
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(one.name for one in folder.iterdir() if one.name != "kustomization.yaml")


@pytest.mark.slow
def test_a_plan_that_the_nodes_have_no_room_for_writes_nothing(crosstie: Command, tmp_path: Path) -> None:
    workload, folder = str(small(tmp_path)), tmp_path / "m"
    asked = ["plan", workload, "--quick", "--manifests", str(folder), "--nodes"]
    assert crosstie(*asked, str(written(tmp_path, node("a", 8, **MI300X)))).status == 0
    before = {file.name: file.read_text() for file in folder.iterdir()}
    for held, said in (
        (node("b", 8, **H200), "holds a pod with 1 x mi300x; nodes have 8 x h200; add nodes, or plan for those"),
        (node("b", 8, **{"crosstie.io__accelerator": "mi999x"}), "node b: label crosstie.io/accelerator: "),
    ):
        done = crosstie(*asked, str(written(tmp_path, held)))
        assert (done.status, done.out, len(done.err.splitlines())) == (2, "", 1)
        assert said in done.err
        assert {file.name: file.read_text() for file in folder.iterdir()} == before
    done = crosstie("plan", workload, "--nodes", str(tmp_path / "nodes.json"))
    assert (done.status, done.err) == (2, "crosstie: --nodes is about --manifests, which is not given\n")
    done = crosstie("plan", workload, "--manifests", workload)
    assert (done.status, done.err) == (
        2,
        f"crosstie: --manifests {workload}: is a file, and manifests are a folder of them\n",
    )
