"""Recipes as files: each is taken by what reads it, as far as that is at hand."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, strategies as st
from tests.port.recipe.samples import asked, every, pool, sleeping

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.port.recipe.build import RecipeBook
from crosstie.port.recipe.forms import BARE, FORMS, render
from crosstie.port.recipe.forms.kubernetes import objects
from crosstie.port.recipe.forms.schedulers import engine_arguments
from crosstie.port.recipe.forms.text import yaml_text
from crosstie.port.recipe.recipe import Recipe

ANALYZE = shutil.which("systemd-analyze")
with_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
VERSION = "1.37"
WORDS = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp")))
# What the Compose Specification lists for a service, of that which is used here.
SERVICE = {
    "image", "entrypoint", "command", "restart", "stop_grace_period", "healthcheck", "environment", "devices",
    "group_add", "cap_add", "security_opt", "ulimits", "volumes", "ipc", "network_mode", "ports", "networks",
    "runtime", "deploy",
}  # fmt: skip


def files(recipe: Recipe, form: str, *, bare: bool = False) -> dict[str, str]:
    """Nothing where the form has no way to say it."""
    try:
        return render(recipe, form, bare=bare)
    except BadInput:
        return {}


def texts(catalog: Catalog, form: str) -> list[str]:
    both = (False, True) if form in BARE else (False,)
    return [text for one in every(catalog) for bare in both for text in files(one, form, bare=bare).values()]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | WORDS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_is_written_as_yaml_is_read_back(value: Any) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


@pytest.mark.parametrize("word", ["yes", "1.5", "0x1f", "a: b", "#", "- a", "-1", "--", "a #b", "{}", "1e3", "~", "é"])
def test_words_that_yaml_would_take_for_something_else_are_quoted(word: str) -> None:
    assert yaml.safe_load(yaml_text({"a": [word, {"b": word}]})) == {"a": [word, {"b": word}]}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_why_and_that_it_ran_nowhere(catalog: Catalog, form: str) -> None:
    (text,) = render(asked(catalog, "adapters", "vllm")[0], form).values()
    assert "# --enable-lora: the pool has LoRA adapters" in text
    assert "run on no GPU" in " ".join(text.replace("#", "").split())


def test_reasons_are_those_of_what_is_in_the_file(catalog: Catalog) -> None:
    recipe = asked(catalog, "apart-mori", "sglang")[0]
    found = {form: next(iter(render(recipe, form).values())) for form in ("shell", "kubernetes", "slurm")}
    assert {form for form, text in found.items() if "# device /dev/kfd" in text} == {"shell"}
    assert {form for form, text in found.items() if "# network of the host" in text} == {"shell", "kubernetes"}
    assert "RDMA from one of its own" in found["kubernetes"]
    assert "# image" not in next(iter(render(recipe, "shell", bare=True).values()))


@pytest.mark.parametrize(("form", "shell"), [("shell", "sh"), ("slurm", "bash")])
def test_shells_take_the_scripts(catalog: Catalog, form: str, shell: str, tmp_path: Path) -> None:
    found = texts(catalog, form)
    assert len(found) > 50
    whole = tmp_path / "all.sh"
    # Each in a function, so that one call reads them all.
    whole.write_text("".join(f"f{i}() {{\n{text}}}\n" for i, text in enumerate(found)))
    checked = subprocess.run([shell, "-n", whole], capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    whole.write_text(found[0] + "if true\n")
    assert subprocess.run([shell, "-n", whole], capture_output=True, timeout=60, check=False).returncode != 0


def run_with(line: str, program: str, tmp_path: Path, **variables: str) -> list[str]:
    """The words that a program of this name would have got from a script."""
    fake = tmp_path / program
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    script = tmp_path / "script.sh"
    script.write_text(line)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", **variables}
    return subprocess.run(
        ["sh", script], capture_output=True, text=True, timeout=60, check=True, env=path
    ).stdout.splitlines()


def test_the_shell_gives_the_engine_its_words(catalog: Catalog, tmp_path: Path) -> None:
    recipe = asked(catalog, "eagle3", "vllm")[0]
    (boxed,) = render(recipe, "shell").values()
    assert run_with(boxed, "docker", tmp_path)[-len(recipe.arguments) :] == [*recipe.arguments]
    (bare,) = render(recipe, "shell", bare=True).values()
    words = run_with(bare, "vllm", tmp_path)
    # The drafter where the machine has it, not where the container would.
    assert words[:2] == ["serve", "meta-llama/Llama-3.3-70B-Instruct"]
    assert '"model":"/srv/models/' in " ".join(words)


def test_a_machine_among_several_is_told_which_it_is(catalog: Catalog, tmp_path: Path) -> None:
    (text,) = render(asked(catalog, "wide", "vllm")[0], "shell", bare=True).values()
    first = run_with(text, "vllm", tmp_path, RANK="0", HEAD="10.0.0.1")
    other = run_with(text, "vllm", tmp_path, RANK="1", HEAD="10.0.0.1")
    assert first[first.index("--node-rank") + 1] == "0"
    assert other[other.index("--node-rank") + 1] == "1"
    assert other[-1] == "--headless"
    assert other[:-1].count("10.0.0.1") == first.count("10.0.0.1") == 1
    assert "--headless" not in first


@with_systemd
def test_systemd_takes_the_units(catalog: Catalog, tmp_path: Path) -> None:
    assert ANALYZE
    for index, text in enumerate(texts(catalog, "systemd")):
        # The installed command is not there.
        (tmp_path / f"u{index}.service").write_text(text.replace("/usr/bin/docker", "/bin/true"))
    units = sorted(tmp_path.glob("*.service"))
    assert len(units) > 50
    found = subprocess.run([ANALYZE, "verify", "--man=no", *units], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
    units[0].write_text(units[0].read_text().replace("Restart=", "Rerun="))
    found = subprocess.run([ANALYZE, "verify", "--man=no", units[0]], capture_output=True, text=True, check=False)
    assert "Rerun" in found.stderr


@pytest.mark.slow
def test_kubernetes_takes_the_objects(catalog: Catalog) -> None:
    kinds = set()
    for text in texts(catalog, "kubernetes"):
        for made in yaml.safe_load_all(text):
            kinds.add(made["kind"])
            if made["kind"] == "LeaderWorkerSet":
                # No schema of it is shipped: its pods are pods.
                spec = made["spec"]["leaderWorkerTemplate"]
                assert spec.keys() == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
                for side in ("leaderTemplate", "workerTemplate"):
                    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec[side]["spec"]})
            else:
                validate(made)
    assert kinds == {
        "Deployment",
        "StatefulSet",
        "LeaderWorkerSet",
        "Service",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
    }


def validate(made: dict[str, Any]) -> None:
    kubernetes_validate.validate(made, VERSION, strict=True)


def test_a_wrong_object_would_be_caught(catalog: Catalog) -> None:
    _, deployment, _, _ = objects(asked(catalog, "plain", "vllm")[0])
    deployment["spec"]["replicas"] = "two"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(deployment)


def test_kubernetes_finds_engines_by_the_names_of_the_fleet(catalog: Catalog) -> None:
    _, deployment, service, _ = objects(asked(catalog, "plain", "vllm")[0])
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == ("llama-3-1-70b-mi300x", "None")
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    box = deployment["spec"]["template"]["spec"]["containers"][0]
    assert box["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert box["startupProbe"]["failureThreshold"] * box["startupProbe"]["periodSeconds"] >= 900
    # One by one: pods of a set have names of their own.
    _, pods, named, _ = objects(asked(catalog, "apart-mori", "sglang")[1])
    assert (pods["kind"], pods["spec"]["serviceName"], named["metadata"]["name"]) == (
        "StatefulSet", "deepseek-r1-mi355x-decode", "deepseek-r1-mi355x-decode",
    )  # fmt: skip
    # Of a group only the first answers.
    _, group, first, _ = objects(asked(catalog, "wide", "vllm")[0])
    assert group["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert first["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"
    assert group["metadata"]["name"] != first["metadata"]["name"]


def test_compose_has_what_its_specification_lists(catalog: Catalog) -> None:
    for text in texts(catalog, "compose"):
        whole = yaml.safe_load(text)
        assert whole.keys() <= {"services", "volumes"}
        for service in whole["services"].values():
            assert service.keys() <= SERVICE
            assert all(isinstance(word, str) for word in service["command"])
            named = {one.partition(":")[0] for one in service.get("volumes", []) if not one.startswith("/")}
            assert named <= whole.get("volumes", {}).keys()
            assert ("network_mode" in service) != ("ports" in service)


def test_compose_spreads_replicas_over_a_machine(catalog: Catalog) -> None:
    (text,) = render(asked(catalog, "plain", "vllm")[0], "compose").values()
    services = yaml.safe_load(text)["services"]
    assert len(services) == 8
    assert [one["environment"]["HIP_VISIBLE_DEVICES"] for one in services.values()] == list("01234567")
    assert [one["ports"] for one in services.values()] == [[f"{8000 + i}:8000"] for i in range(8)]
    assert all(one["networks"]["default"]["aliases"] == ["llama-3-1-70b-mi300x"] for one in services.values())
    first = services["llama-3-1-70b-mi300x-0"]
    assert first["devices"] == ["/dev/kfd:/dev/kfd", "/dev/dri:/dev/dri"]
    assert first["security_opt"] == ["seccomp=unconfined"]
    assert first["group_add"][0] == "video"
    (text,) = render(asked(catalog, "adapters", "vllm")[0], "compose").values()
    (one,) = yaml.safe_load(text)["services"].values()
    (device,) = one["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}


def test_schedulers_are_told_gpus_nodes_and_names(catalog: Catalog) -> None:
    wide = asked(catalog, "wide", "vllm")[0]
    (text,) = render(wide, "skypilot").values()
    task = yaml.safe_load(text)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H200:8")
    assert task["service"]["replicas"] == 2
    assert "$SKYPILOT_NODE_RANK" in task["run"]
    (text,) = render(wide, "slurm").values()
    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --gpus-per-node=8\n#SBATCH --array=0-1\n" in text
    (text,) = render(asked(catalog, "plain", "vllm")[0], "ray").values()
    (application,) = yaml.safe_load(text)["applications"]
    (config,) = application["args"]["llm_configs"]
    assert config["accelerator_type"] == "AMD-Instinct-MI300X-OAM"
    assert config["engine_kwargs"]["tensor_parallel_size"] == 1
    (text,) = render(asked(catalog, "gguf", "llama.cpp")[0], "skypilot").values()
    assert "RX-7900-XTX is a guess" in text


def test_rays_arguments_are_typed(catalog: Catalog) -> None:
    found = engine_arguments(asked(catalog, "eagle3", "vllm")[0])
    assert found["speculative_config"]["num_speculative_tokens"] == 3
    assert found["gpu_memory_utilization"] == 0.9
    assert "port" not in found


@pytest.mark.parametrize(
    ("recipe", "form", "bare", "why"),
    [
        ("plain", "ray", False, "runs vLLM alone, not sglang"),
        ("plain", "compose", True, "--bare is for shell, systemd, slurm; compose runs containers"),
        ("apart-mori", "ray", False, "runs vLLM alone"),
    ],
)
def test_what_a_form_cannot_say_is_refused(catalog: Catalog, recipe: str, form: str, bare: bool, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        render(asked(catalog, recipe, "sglang")[0], form, bare=bare)


def test_models_on_the_same_gpus_are_refused_where_gpus_are_given_to_one(catalog: Catalog) -> None:
    first = RecipeBook(catalog).recipes(sleeping())[0]
    with pytest.raises(BadInput, match="models share GPUs, which kubernetes gives to one process"):
        render(first, "kubernetes")
    (text,) = render(first, "compose").values()
    assert "shared-m0-0.shared-m0" in text


def test_a_pools_name_that_kubernetes_would_refuse_is_made_one(catalog: Catalog) -> None:
    (recipe,) = RecipeBook(catalog).recipes(pool(name="1.5_chat"))
    for made in objects(recipe):
        validate(made)
    assert recipe.name == "pool-1-5-chat"
