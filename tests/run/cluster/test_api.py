"""Which cluster is asked, and what is said where there is none."""

import sys
from pathlib import Path

import pytest
import yaml
from tests.run.cluster.api_server import api_server, pod

from crosstie.core.errors import BadInput
from crosstie_gateway.cluster.api import ApiFault, Asked, ClusterApi


def kubeconfig(folder: Path, port: int) -> Path:
    file = folder / "config"
    context = {"cluster": "c", "user": "u", "namespace": "default"}
    file.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "x",
                "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "x", "context": context}],
            }
        )
    )
    return file


def test_the_cluster_of_a_kubeconfig_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api_server() as server:
        pod(server, "a", "10.0.0.1")
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, server.port)))
        api = ClusterApi()
        assert api.namespace == "default"
        found = api.list(Asked(resource="pods", namespace=api.namespace, labels="app=vllm"))
        assert [one.metadata.name for one in found.items or ()] == ["a"]


def test_where_no_cluster_is_known_it_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(BadInput, match="no cluster is known here") as told:
        ClusterApi()
    assert "\n" not in str(told.value)


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(BadInput, match=r"pip install '\./packages/gateway\[kubernetes\]'"):
        ClusterApi()


def test_an_answer_that_is_not_kubernetes_is_a_fault() -> None:
    with api_server() as server:
        server.objects["Pod", "a"] = {"metadata": {"name": ["a"], "labels": {}}}
        with pytest.raises(ApiFault, match="not Kubernetes'"):
            server.api().list(Asked(resource="pods", namespace="default"))
