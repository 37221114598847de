"""Writes the templates of charts/crosstie from the objects that `crosstie recipe --as kubernetes` writes.

    helm_chart.py charts/crosstie

The chart has the gateway and the picker; engines are a fleet's own, and come from `recipe` or `plan --manifests`. Only
what Go's text/template has by itself is used, so that no version of Helm matters.
"""

import sys
from pathlib import Path
from typing import Any

from crosstie.core.fleet import Fleet
from crosstie.port.recipe.forms.cluster import (
    GATEWAY,
    PARENT,
    PICKER,
    gateway_objects,
    monitor_objects,
    network_objects,
    picker_objects,
)
from crosstie.port.recipe.forms.kubernetes import Object
from crosstie.port.recipe.forms.text import yaml_text

# What stands in an object until it is text.
_FLEET, _PORT = "thefleet", 8000


def templates() -> dict[str, str]:
    fleet = Fleet(name=_FLEET, planned="", policy="cheapest-meeting-target", pools=(), classes=())
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "crosstie-fleet"},
        "data": {"fleet.toml": "THEFLEETFILE"},
    }
    gateway, picker = gateway_objects(fleet), picker_objects(_FLEET, _PORT)
    own = [one for one in picker if one["kind"] not in ("InferencePool", "HTTPRoute")]
    route = [one for one in picker if one not in own]
    network = network_objects(_FLEET)
    monitors = monitor_objects(_FLEET)
    return {
        "fleet.yaml": _text([config]),
        "gateway.yaml": _when("gateway", [_sized(one, "gateway") for one in gateway]),
        "picker.yaml": _when("picker", [_sized(one, "picker") for one in own]),
        "inferencepool.yaml": _when("inferencePool", route),
        "networkpolicy.yaml": _when("networkPolicy", network),
        "servicemonitor.yaml": _when("serviceMonitor", monitors),
    }


def _sized(made: Object, part: str) -> Object:
    if made["kind"] != "Deployment":
        return made
    made["spec"]["replicas"] = f"VALUE.{part}.replicas"
    container: dict[str, Any] = made["spec"]["template"]["spec"]["containers"][0]
    container["image"] = "THEIMAGE"
    container["resources"] = {
        "requests": {"cpu": f"VALUE.{part}.cpu", "memory": f"VALUE.{part}.memory"},
        "limits": {"memory": f"VALUE.{part}.memoryLimit"},
    }
    return made


def _when(part: str, made: list[Object]) -> str:
    return f"{{{{- if .Values.{part}.enabled }}}}\n{_text(made)}{{{{- end }}}}\n"


def _text(made: list[Object]) -> str:
    text = "---\n".join(yaml_text(one) for one in made)
    for name in (GATEWAY, PICKER, "crosstie-fleet", "crosstie-engines"):
        # Not of labels' keys and not of the folder; names alone.
        text = text.replace(name, "{{ .Release.Name }}-" + name.removeprefix("crosstie-"))
    found = []
    for line in text.splitlines():
        key, _, value = line.partition("VALUE.")
        found.append(f"{key}{{{{ .Values.{value} }}}}" if value else line)
    return (
        "\n".join(found)
        .replace("THEFLEETFILE", '{{ printf "%q" .Values.fleet }}')
        .replace("THEIMAGE", '{{ printf "%s:%s" .Values.image.repository .Values.image.tag }}')
        .replace(_FLEET, "{{ .Values.fleetName }}")
        .replace(f"number: {_PORT}", "number: {{ .Values.inferencePool.port }}")
        .replace(PARENT, "{{ .Values.inferencePool.gateway }}")
        + "\n"
    )


def main(folder: Path) -> None:
    for name, text in templates().items():
        (folder / "templates" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
