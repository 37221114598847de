"""What stands in a Kubernetes cluster for pools of a fleet: the labels of their pods, and `kube://` backends."""

import re
from pathlib import Path
from typing import Literal, get_args

import msgspec

from crosstie.core.errors import BadData

# On pods, so that whoever finds them knows what they are; the accelerator's also on nodes that nobody else labels.
FLEET, POOL = "crosstie.io/fleet", "crosstie.io/pool"
MODEL, ACCELERATOR = "crosstie.io/model", "crosstie.io/accelerator"
# On those that answer requests: the first pod of a group, and not the engines of a side.
SERVES = "crosstie.io/serves"
KUBE = "kube://"
Kind = Literal["pods", "services", "inferencepools"]

_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_WORD = r"[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?"
_KEY = rf"([a-z0-9]([-.a-z0-9]{{0,251}}[a-z0-9])?/)?{_WORD}"
_SELECTOR = re.compile(rf"({_KEY}!?=({_WORD})?|{_KEY})(,({_KEY}!?=({_WORD})?|{_KEY}))*")
_EXAMPLES = "kube://default/pods/app=vllm:8000, kube://default/services/vllm, kube://default/inferencepools/chat"


class KubeSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where replicas are looked for. Namespace "": the gateway's own; port 0: what the service or pool says."""

    url: str
    namespace: str
    kind: Kind
    # A name; of pods, the labels that they must have.
    name: str
    port: int = 0


def label_value(text: str) -> str:
    """As labels may have it: a model can be a folder's path."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[-63:].strip("-._")


def kube_source(url: str) -> KubeSource | None:
    """None where it says nothing that could be looked for."""
    namespace, _, rest = url[len(KUBE) :].partition("/")
    kind, _, name = rest.partition("/")
    name, colon, number = name.partition(":")
    pattern = _SELECTOR if kind == "pods" else _NAME
    if kind not in get_args(Kind) or not pattern.fullmatch(name) or (namespace and not _NAME.fullmatch(namespace)):
        return None
    if colon and not (number.isascii() and number.isdigit() and 0 < int(number) < 65536):
        return None
    if kind == "pods" and not colon:
        return None
    known_kind: Kind = kind  # type: ignore[assignment]
    return KubeSource(url=url, namespace=namespace, kind=known_kind, name=name, port=int(number or 0))


def read_source(file: Path, where: str, given: str) -> str:
    """Refuses what names nothing."""
    source = kube_source(KUBE + given[len(KUBE) :].rstrip("/"))
    if source is None:
        raise BadData(file, where, f"'{given}' names nothing of a cluster; such as {_EXAMPLES}")
    return source.url
