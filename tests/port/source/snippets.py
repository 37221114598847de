"""What is found in a piece of CUDA or Python, for tests that give it as text."""

from crosstie.catalog.library import Catalog
from crosstie.core.finding import Finding
from crosstie_port.source.cpp import cpp_hazards
from crosstie_port.source.hazard import findings_of, target_of
from crosstie_port.source.project import Project
from crosstie_port.source.python import python_hazards


def findings(text: str, on: str = "mi300x", name: str = "kernel.cu", **others: str) -> list[Finding]:
    """`others`: further files of the tree, by name with an underscore for the dot."""
    texts = {name: text} | {other.replace("_", "."): body for other, body in others.items()}
    hazards = cpp_hazards(name, Project(texts))
    return findings_of(hazards, [target_of(Catalog().accelerator(one)) for one in on.split(",")])


def checks(text: str, on: str = "mi300x", name: str = "kernel.cu", **others: str) -> list[tuple[str, int | None]]:
    return sorted((finding.check, finding.where.line) for finding in findings(text, on, name, **others))


def names(text: str, on: str = "mi300x", name: str = "kernel.cu", **others: str) -> set[str]:
    return {finding.check for finding in findings(text, on, name, **others)}


def python_findings(text: str, on: str = "mi300x") -> list[Finding]:
    return findings_of(python_hazards("code.py", text), [target_of(Catalog().accelerator(on))])


def kernel(body: str) -> str:
    return "__global__ void k(float* out, int n) {\n" + body + "\n}\n"
