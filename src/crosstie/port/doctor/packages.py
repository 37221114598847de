"""Run by the interpreter that engines run in: which releases of what matters it has, as JSON. Nothing is imported."""

import json
import re
import sys
from importlib import metadata
from pathlib import Path

NAMES = (
    "torch", "triton", "pytorch-triton-rocm", "amd-aiter", "aiter", "vllm", "sglang", "sgl-kernel", "flash-attn",
    "flashinfer-python", "transformers", "ray", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "amdsmi", "rocm",
)  # fmt: skip


def releases() -> dict[str, str]:
    found = {}
    for name in NAMES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


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
    print(json.dumps({"python": sys.version.split()[0], "packages": releases(), "torch_build": torch_build()}))
