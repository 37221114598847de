"""The Helm chart: written from the same objects as manifests, and taken by what reads them."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "crosstie"
# Custom resources are held to what is read of their definitions in tests/port/recipe/test_cluster.py.
CUSTOM = {"InferencePool", "HTTPRoute", "ServiceMonitor"}


def values(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found | {"fleet": 'name = "x"\n# "quoted" \\ and\ttabbed\n', "fleetName": "two-vendors"} | changes


def rendered(template: str, given: dict[str, Any]) -> str:
    """What Go's text/template would make of it, as far as the chart goes: values, `if`, and `printf`."""
    if opened := re.match(r"\{\{- if \.([\w.]+) \}\}\n(.*)\{\{- end \}\}\n", template, re.DOTALL):
        template = opened[2] if _at(given, opened[1]) else ""

    def filled(found: re.Match[str]) -> str:
        if found[1].startswith('printf "%q" '):
            return json.dumps(_at(given, found[1].split(" .")[1]))
        if found[1].startswith('printf "%s:%s" '):
            return ":".join(_at(given, one) for one in found[1].split(" .")[1:])
        return str(_at(given, found[1][1:]))

    return re.sub(r"\{\{ (.*?) \}\}", filled, template)


def _at(given: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        given = given[part]
    return given


def objects(**changes: Any) -> list[dict[str, Any]]:
    given = {"Values": values(**changes), "Release": {"Name": "crosstie"}}
    texts = [rendered(file.read_text(), given) for file in sorted((CHART / "templates").iterdir())]
    return [made for text in texts for made in yaml.safe_load_all(text) if made]


def test_templates_are_what_the_tool_writes() -> None:
    spec = importlib.util.spec_from_file_location("helm_chart", ROOT / "tools" / "helm_chart.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert {file.name: file.read_text() for file in (CHART / "templates").iterdir()} == tool.templates()


@pytest.mark.slow
def test_kubernetes_takes_what_it_renders() -> None:
    found = objects(serviceMonitor={"enabled": True})
    assert {one["kind"] for one in found} >= CUSTOM | {"Deployment", "Role", "NetworkPolicy", "PodDisruptionBudget"}
    for made in found:
        if made["kind"] not in CUSTOM:
            kubernetes_validate.validate(made, "1.37", strict=True)
    (config,) = (one for one in found if one["kind"] == "ConfigMap")
    assert config["data"]["fleet.toml"] == values()["fleet"]
    (gateway,) = (one for one in found if one["kind"] == "Deployment" and one["metadata"]["name"] == "crosstie-gateway")
    assert gateway["spec"]["replicas"] == 2
    assert gateway["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]


def test_parts_can_be_left_out() -> None:
    off = {**values()["picker"], "enabled": False}
    found = objects(picker=off, inferencePool={"enabled": False, "port": 8000, "gateway": "g"})
    assert not any(one["metadata"]["name"] == "crosstie-picker" and one["kind"] == "Deployment" for one in found)
    assert not {one["kind"] for one in found} & {"InferencePool", "HTTPRoute", "ServiceMonitor"}


def test_values_that_cannot_be_meant_are_refused_by_helm() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values(), schema)
    for wrong in ({"fleet": ""}, {"fleetName": "Two Vendors"}, {"fleets": "x"}, {"networkPolicy": {"enabled": "yes"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(values(**wrong), schema)
