"""Published results at the load of a scorecard, to stand on its curves: this model, these lengths, weights as wide."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.catalog.library import SHIPPED, spellings
from crosstie.catalog.releases import measured_files
from crosstie.core.deployment import Deployment
from crosstie.prove.calibration.columns import SAYS_NO
from crosstie.prove.calibration.results import OperatingPoint, Results, read_results

_FILES = "results*.csv.gz"
_WIDTH = re.compile(r"16|8|4")


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    accelerator: str
    gpus: int
    tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float
    publisher: str
    date: str


def all_results() -> Results:
    """Everything measured that ships, or came with the release of the catalog that is in force."""
    files = measured_files(sorted((SHIPPED / "measured").glob(_FILES)))
    return read_results(*(file for file in files if file.match(_FILES)))


def published_points(
    results: Results, deployments: Sequence[Deployment], input_tokens: int, output_tokens: int
) -> list[PublishedPoint]:
    """Of the deployments' model, on any number of their GPUs; without drafts, prefill and decode together."""
    lengths = str(input_tokens), str(output_tokens)
    points = []
    for point in results.points:
        plain = all(point[name].casefold() in SAYS_NO for name in ("spec_decode", "disagg"))
        if (point["input_len"], point["output_len"]) != lengths or not plain:
            continue
        for deployment in deployments:
            if _same(point, deployment) and (made := _made(point, deployment.accelerator.id)):
                points.append(made)
    return points


def _same(point: OperatingPoint, deployment: Deployment) -> bool:
    width = _WIDTH.search(point["precision"])
    return (
        point["accelerator"].casefold() in spellings(deployment.accelerator)
        and point["model"].casefold() in spellings(deployment.model)
        and width is not None
        and width.group() == deployment.weight_width
    )


def _made(point: OperatingPoint, accelerator: str) -> PublishedPoint | None:
    gpus = int(point["num_accelerators"] or point["tp"] or 1)
    tpot = rate = None
    for row in point.rows:
        metric = row.metric
        if metric.kind == "tpot" and metric.statistic in ("mean", "p50"):
            tpot = row.value
        if metric.kind == "throughput" and not metric.with_input:
            rate = row.value / (1 if metric.per_gpu else gpus)
    if not tpot or not rate:
        return None
    who = point["publisher"] or point["source_id"]
    return PublishedPoint(accelerator, gpus, 1.0 / tpot, rate, who, point["date"])
