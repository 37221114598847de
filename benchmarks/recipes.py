"""What preflight says of the pairs of model and hardware in vLLM's own recipes: verified, or unsupported.

    git clone https://github.com/vllm-project/recipes
    python benchmarks/recipes.py recipes [--engine vllm==0.32.0] [--configs FOLDER] [--all]

A recipe speaks of a model in several precisions, and calls hardware verified without saying in which: the one that
fares best stands for the pair. Models are those that the catalog knows under the recipe's id, or whose config.json lies
in FOLDER as owner--name.json; one that is there and is not understood counts as "not known". Asked: at most 5% of the
verified pairs "not known", none of them "will not run", and no unsupported pair "ready". Status 1 otherwise.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import yaml

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import CrosstieError
from crosstie.core.finding import SEVERITIES, VERDICTS
from crosstie.core.model import Model
from crosstie.perf.fit import candidate_layouts, place_each
from crosstie.port.preflight.engine import EngineRelease, engine_from
from crosstie.port.preflight.readiness import Readiness, ReadinessCheck

# Their names of hardware -> the catalog's, and how many GPUs one has.
HARDWARE = {
    "a100": "a100-80gb", "h100": "h100-sxm", "h200": "h200", "b200": "b200", "gb200": "gb200", "b300": "b300",
    "gb300": "gb300", "dgx_station_gb300": "gb300", "mi300x": "mi300x", "mi325x": "mi325x", "mi350x": "mi350x",
    "mi355x": "mi355x", "rtx_pro_6000": "rtx-pro-6000", "rtx_pro_6000_2x": "rtx-pro-6000",
    "rtx_pro_6000_8x": "rtx-pro-6000", "rtx_4090_2x": "rtx-4090",
}  # fmt: skip
PRECISIONS = {
    "bf16": "bf16", "fp8": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "fp4": "nvfp4", "mxfp4": "mxfp4", "int4": "int4",
    "int8": "int8",
}  # fmt: skip
ORDER = [VERDICTS[severity] for severity in SEVERITIES]


READY = (VERDICTS["note"], VERDICTS["setting"])
UNKNOWN, WILL_NOT_RUN = VERDICTS["unknown"], VERDICTS["error"]


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    recipe: str
    model_id: str
    hardware: str
    state: str
    precisions: tuple[str, ...]


def pairs(clone: Path) -> Iterator[Pair]:
    for file in sorted(clone.glob("models/*/*.yaml")):
        raw = yaml.safe_load(file.read_text())
        if "omni" in (raw["meta"].get("tasks") or []):
            # Pictures, speech and video, of which vLLM-Omni is another engine.
            continue
        said = dict.fromkeys(str(one.get("precision")) for one in (raw.get("variants") or {}).values())
        for hardware, state in (raw["meta"].get("hardware") or {}).items():
            yield Pair(
                recipe=str(file.relative_to(clone)), model_id=raw["model"]["model_id"], hardware=hardware, state=state,
                precisions=tuple(said),
            )  # fmt: skip


def found_model(catalog: Catalog, pair: Pair, configs: Path | None) -> Model | str | None:
    """The model, nothing where neither the catalog nor the folder has it, or why its config was not understood."""
    if any(pair.model_id in one.aliases for one in catalog.models.values()):
        return catalog.model(pair.model_id)
    file = configs / f"{pair.model_id.replace('/', '--')}.json" if configs else None
    if file is None or not file.is_file():
        return None
    try:
        return catalog.model(str(file))
    except CrosstieError as error:
        return str(error)


def best(catalog: Catalog, check: ReadinessCheck, model: Model, pair: Pair, stack: str) -> tuple[str, str]:
    """The verdict of the precision that fares best, on the fewest GPUs that hold it; and its gravest finding."""
    accelerator, found = catalog.accelerator(HARDWARE[pair.hardware]), list[Readiness]()
    wanted = ["native", *(PRECISIONS[one] for one in pair.precisions if one in PRECISIONS)]
    for precision in dict.fromkeys(wanted):
        try:
            splits = [one for one in candidate_layouts(model, accelerator) if one.dp == 1 and one.ep == 1]
            first = catalog.deployment(model, accelerator, splits[0], precision, "bf16", stack)
            held = [one for one in place_each(catalog, first, splits, 8192) if one.fits]
        except CrosstieError:
            # A precision that the arithmetic does not know.
            continue
        # A recipe may take several servers; whether it fits in one is no question of porting.
        split = min(held, key=lambda one: one.preference).deployment.parallelism if held else Parallelism(tp=8)
        found.append(check.readiness(catalog.deployment(model, accelerator, split, precision, "bf16", stack)))
    # "not known, but measured" is of another source than the rules.
    said = {one.verdict.partition(",")[0]: one.why for one in found} or {UNKNOWN: "no precision was counted"}
    verdict = min(said, key=ORDER.index)
    return verdict, said[verdict]


def disagrees(state: str, verdict: str) -> bool:
    return verdict in (UNKNOWN, WILL_NOT_RUN) if state == "verified" else verdict in READY


def compared(
    pairs: Iterable[Pair], engine: EngineRelease, configs: Path | None = None
) -> Iterator[tuple[Pair, str, str]]:
    """Each pair whose model and hardware are known here, with our verdict and why."""
    catalog = Catalog()
    for pair in pairs:
        model = found_model(catalog, pair, configs) if pair.hardware in HARDWARE else None
        if isinstance(model, str):
            yield pair, UNKNOWN, model
        elif model is not None:
            check = ReadinessCheck(catalog, {model.id: {engine.stack: str(engine.version)}})
            yield pair, *best(catalog, check, model, pair, engine.stack)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("clone", type=Path)
    asked.add_argument("--engine", default="vllm")
    asked.add_argument("--configs", type=Path)
    asked.add_argument("--all", action="store_true", help="every pair, not only those that disagree")
    given = asked.parse_args()
    commit = subprocess.run(
        ["git", "-C", given.clone, "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=True
    ).stdout.strip()
    engine = engine_from(given.engine)
    found = list(compared(pairs(given.clone), engine, given.configs))
    count = Counter((pair.state, verdict) for pair, verdict, _ in found)
    print(f"{engine}, recipes at {commit}: {len({pair.model_id for pair, *_ in found})} models, {len(found)} pairs")
    for (state, verdict), number in sorted(count.items()):
        print(f"  {state:<12}{verdict:<22}{number}")
    for pair, verdict, why in found:
        if given.all or disagrees(pair.state, verdict):
            print(f"{pair.model_id} on {pair.hardware}: {pair.state} in {pair.recipe}, here {verdict}. {why}")
    verified = sum(number for (state, _), number in count.items() if state == "verified")
    unknown = count["verified", UNKNOWN]
    print(f"verified and not known: {unknown} of {verified}")
    worse = [pair for pair, verdict, _ in found if verdict != UNKNOWN and disagrees(pair.state, verdict)]
    return int(unknown > 0.05 * verified or bool(worse))


if __name__ == "__main__":
    sys.exit(main())
