"""Run by the interpreter that engines run in: which releases of what matters it has, as JSON. Nothing is imported, but
for an engine that is named as an argument."""

import json
import os
import platform
import re
import sys
from importlib import import_module, metadata
from pathlib import Path

NAMES = (
    "torch", "triton", "pytorch-triton-rocm", "amd-aiter", "aiter", "vllm", "sglang", "sgl-kernel", "flash-attn",
    "flashinfer-python", "transformers", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "amdsmi", "rocm",
)  # fmt: skip


ENGINES = ("vllm", "sglang")


def releases() -> dict[str, str]:
    found = {}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def requirements() -> dict[str, dict[str, str]]:
    """What each engine declares that it needs, as it writes it, and the release that is here, "" where there is none;
    extras left out."""
    found = {}
    for engine in ENGINES:
        try:
            said = metadata.requires(engine) or []
        except metadata.PackageNotFoundError:
            continue
        found[engine] = {text: _release(text) for text in said if "extra ==" not in text}
    return found


def _release(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    try:
        return metadata.version(name[0]) if name else ""
    except metadata.PackageNotFoundError:
        return ""


def markers() -> dict[str, str]:
    """What requirements may depend on, of this interpreter."""
    return {
        "os_name": os.name, "sys_platform": sys.platform, "platform_machine": platform.machine(),
        "platform_system": platform.system(), "platform_python_implementation": platform.python_implementation(),
        "implementation_name": sys.implementation.name, "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
    }  # fmt: skip


def torch_build() -> dict[str, str]:
    """What PyTorch was built for, from the file in which it says so: importing it takes seconds."""
    for folder in map(Path, sys.path):
        file = folder / "torch" / "version.py"
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            return dict(re.findall(r"^(cuda|hip|rocm)\b[^=]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return {}


if __name__ == "__main__":
    # The folder of this script, which has no packages.
    sys.path.pop(0)
    if sys.argv[1:]:
        import_module(sys.argv[1])
    else:
        told = {"packages": releases(), "torch_build": torch_build(), "requires": requirements(), "markers": markers()}
        print(json.dumps({"python": sys.version.split()[0], **told}))
