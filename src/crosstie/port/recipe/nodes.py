"""Nodes of a Kubernetes cluster: which labels an accelerator's have, and whether a fleet has room on those there are.

AMD's node labeller writes PCI ids (product names are missing on virtual functions, ROCm/k8s-device-plugin#112);
NVIDIA's feature discovery writes the product. A node of any other may carry our own label.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.kube import ACCELERATOR
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_table
from crosstie.core.errors import BadData, BadInput, CrosstieError
from crosstie.port.doctor.host import known_devices
from crosstie.port.recipe.recipe import Recipe

# As the device plug-ins of both vendors name their GPUs.
RESOURCES = {"AMD": "amd.com/gpu", "NVIDIA": "nvidia.com/gpu"}
_DEVICE, _UNITS, _PRODUCT = "amd.com/gpu.device-id", "amd.com/gpu.cu-count", "nvidia.com/gpu.product"
_FILE = Path(__file__).parent / "data" / "node_labels.csv"
_AMD = "1002:"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    accelerator: str
    gpus: int


@cache
def _products() -> dict[str, tuple[str, str]]:
    return {row["accelerator"]: (row["product"], row["source"])
            for _, row in read_table(_FILE, ("accelerator", "product", "source"))}  # fmt: skip


@cache
def node_labels(accelerator: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Labels that nodes of an accelerator have, each with the values that it may have."""
    own = [row for row in known_devices() if row["accelerator"] == accelerator]
    if own and own[0]["pci"].startswith(_AMD):
        found = [(_DEVICE, tuple(sorted({row["pci"].removeprefix(_AMD) for row in own})))]
        # Cards of one chip have one id, and differ by their compute units.
        units = {row["compute_units"] for row in own} - {""}
        return (*found, (_UNITS, tuple(sorted(units)))) if units else tuple(found)
    if accelerator in _products():
        return ((_PRODUCT, (_products()[accelerator][0],)),)
    return ((ACCELERATOR, (accelerator,)),)


def label_note(accelerator: str) -> str:
    """What somebody should look at before nodes are chosen by these labels."""
    key = node_labels(accelerator)[0][0]
    if key == ACCELERATOR:
        return f"no label of nodes with {accelerator} is known: kubectl label node NODE {ACCELERATOR}={accelerator}"
    if key == _PRODUCT and _products()[accelerator][1].startswith("guess"):
        return f"{key} of {accelerator} was seen nowhere and is a guess: compare it with `kubectl get nodes -L {key}`"
    return ""


def read_nodes(catalog: Catalog, file: Path) -> list[Node]:
    """Those with GPUs, of what `kubectl get nodes -o json` prints."""
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"--nodes {file}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadInput(f"--nodes {file}: is no JSON; `kubectl get nodes -o json > {file}` makes one") from None
    items = raw.get("items") if isinstance(raw, Mapping) else None
    if not isinstance(items, list):
        raise BadData(file, "items", "missing: this is not what `kubectl get nodes -o json` prints")
    return [node for i, item in enumerate(items) for node in _node(catalog, file, f"items[{i}]", item)]


def _node(catalog: Catalog, file: Path, where: str, item: Any) -> Iterable[Node]:
    meta, status = _table(file, where, item, "metadata"), _table(file, where, item, "status")
    labels, given = meta.get("labels") or {}, status.get("allocatable") or status.get("capacity") or {}
    name = str(meta.get("name") or where)
    spec = item.get("spec") or {}
    gpus = {vendor: given[key] for vendor, key in RESOURCES.items() if str(given.get(key) or 0) != "0"}
    if not gpus or spec.get("unschedulable"):
        return
    (vendor, count), *_ = gpus.items()
    if not str(count).isdigit():
        raise BadData(file, f"{where}.status.allocatable", f"'{count}' of {RESOURCES[vendor]} is no count")
    yield Node(name=name, accelerator=_accelerator(catalog, file, name, vendor, labels), gpus=int(count))


def _table(file: Path, where: str, item: Any, key: str) -> Mapping[str, Any]:
    found = item.get(key) if isinstance(item, Mapping) else None
    if not isinstance(found, Mapping):
        raise BadData(file, f"{where}.{key}", "missing: this is not what `kubectl get nodes -o json` prints")
    return found


def _accelerator(catalog: Catalog, file: Path, node: str, vendor: str, labels: Mapping[str, str]) -> str:
    given = labels.get(ACCELERATOR)
    if given is not None:
        try:
            return catalog.accelerator(given).id
        except CrosstieError as error:
            raise BadInput(f"{file}: node {node}: label {ACCELERATOR}: {error}") from None
    for accelerator in catalog.accelerators.values():
        terms = node_labels(accelerator.id)
        if accelerator.vendor == vendor and all(labels.get(key) in values for key, values in terms):
            return accelerator.id
    told = {key: labels[key] for key in (_DEVICE, _UNITS, _PRODUCT) if key in labels}
    said = ", ".join(f"{key}={value}" for key, value in told.items()) or "no label of a labeller"
    raise BadInput(
        f"{file}: node {node}: {said} names no accelerator of the catalog; say which it has: "
        f"kubectl label node {node} {ACCELERATOR}=..."
    )


def check_room(recipes: Sequence[Recipe], nodes: Sequence[Node], file: Path) -> None:
    """Raises BadInput where a pool cannot be placed: no node is large enough, or too few are there."""
    left: dict[str, list[int]] = {}
    for node in nodes:
        left.setdefault(node.accelerator, []).append(node.gpus)
    remedy = "add nodes, or plan for those there are (--on, constraints.inventory)"
    had = Counter(one.accelerator for one in nodes)
    # The largest pieces first, as a scheduler that wastes nothing would have them.
    for recipe in sorted(recipes, key=lambda one: -one.gpus_on_node):
        free = left.get(recipe.accelerator, [])
        size, wanted = recipe.gpus_on_node, recipe.replicas * recipe.nodes
        if not any(one.gpus >= size for one in nodes if one.accelerator == recipe.accelerator):
            there = ", ".join(sorted({f"{one.gpus} x {one.accelerator}" for one in nodes})) or "none has a GPU"
            raise BadInput(
                f"pool {recipe.pool}: no node of {file} holds a pod with {size} x {recipe.accelerator}; nodes have "
                f"{there}; {remedy}"
            )
        for placed in range(wanted):
            fitting = [i for i, gpus in enumerate(free) if gpus >= size]
            if not fitting:
                raise BadInput(
                    f"pool {recipe.pool}: {wanted} pods of {size} x {recipe.accelerator} do not fit beside the others "
                    f"on the {had[recipe.accelerator]} nodes of {file}: there is room for {placed}; {remedy}"
                )
            free[min(fitting, key=lambda i: free[i])] -= size
