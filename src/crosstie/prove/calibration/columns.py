"""What the columns of a row say, each read alone: numbers, layouts, precisions."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from crosstie.catalog.acceptance import default_depth, parse_speculation
from crosstie.catalog.benchmarks import BenchmarkSettings
from crosstie.catalog.library import Catalog
from crosstie.catalog.models import TextConfig, model_of_text
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.errors import BadData, BadInput, CrosstieError, DoesNotFit, UnknownName
from crosstie.core.model import Model
from crosstie.core.speculation import Speculation
from crosstie.prove.calibration.results import OperatingPoint

DECIMAL = r"\d+(?:\.\d+)?"
_LAYOUT = re.compile(r"(attention_dp|dep|tep|tp|dp|pp|ep)\s*=?(\d{1,9})", re.IGNORECASE)
_REPLICAS = re.compile(r"(\d{1,9})x\S+ (\d{1,9})FP8", re.IGNORECASE)
_SIDES = re.compile(
    r"P:(?:(?P<p>\d{1,6})x)?TP(?P<p_tp>\d{1,6})(?:EP(?P<p_ep>\d{1,6}))? "
    r"D:(?:(?P<d>\d{1,6})x)?TP(?P<d_tp>\d{1,6})(?:EP(?P<d_ep>\d{1,6}))?(?P<dpa> DPA)?"
)
_PAIRS = re.compile(r"(?P<p>\d{1,6})P(?P<d>\d{1,6})D, TP(?P<tp>\d{1,6}) each")
# "P:4 GPUs D:8 GPUs (decode TP8)", "prefill 4 GPUs decode 4 GPUs (label 4p_4d)": only how many GPUs each side has.
_COUNTED_SIDES = re.compile(r"(?:P:|prefill )(?P<p>\d{1,6}) GPUs (?:D:|decode )(?P<d>\d{1,6}) GPUs\b.*")
_SIDE_GPUS = re.compile(
    r"prefill (\d{1,6}) GPUs(?: dp_attention=(\w+))?, decode (\d{1,6}) GPUs[^;]*?(?:dp_attention=(\w+))?(?:;|$)"
)
_SMALL_WORKER = 4
# Clients for each decode GPU from which on experts that are spread come with attention replicas, in the rows that say.
_REPLICATED_FROM = 8.0
_SHORTEST = re.compile(r"random lengths (\d+)-100%")
_MEAN = re.compile(rf"(\S+) mean ({DECIMAL})")


class NotPredicted(CrosstieError):
    """The reason why a point has no prediction."""


# What a row itself may be at fault for; a broken catalog file is not among it.
UNPREDICTABLE = (NotPredicted, UnknownName, BadInput, DoesNotFit)


def reason_of(error: Exception) -> str:
    """Suggestions of the catalog are kept out of reasons, so that equal faults count together."""
    if isinstance(error, UnknownName):
        return f"{error.kind} '{error.name}' is not in the catalog"
    return str(error)


def checkpoint_of(catalog: Catalog, point: OperatingPoint) -> tuple[Model, str]:
    """By its name, or by the structure that stands beside a name that the catalog does not have; and the precision that
    the name says, if any."""
    try:
        return catalog.checkpoint(point["model"])
    except UnknownName:
        if not point["model_config"]:
            raise
    try:
        return model_of_text(TextConfig(point["model"], point["model_config"])), ""
    except BadData as error:
        raise NotPredicted(str(error)) from None


_DRAFTS = re.compile(r"(mtp|nextn|eagle-?3|eagle|dspark|n-?gram)[-:]?(\d*)\??")
# How rows say that they do without drafts, or that prefill and decode are together.
SAYS_NO = ("", "none", "false", "no", "off")


def speculation_of(
    catalog: Catalog, point: OperatingPoint, model: Model, engine: str, settings: BenchmarkSettings
) -> tuple[Speculation | None, tuple[str, ...]]:
    """How a row speculates, and what of that it does not say: its own words first, then what is known of the
    benchmark, then the engine's default. None where it does not. `engine`: the stack's id."""
    said = point["spec_decode"].casefold()
    if said in SAYS_NO:
        return None, ()
    match = _DRAFTS.fullmatch(said)
    if not match:
        hint = "; --speculation says how it drafted" if said.startswith("drafts of") else ""
        raise NotPredicted(f"speculative decoding '{point['spec_decode'][:40]}' is not known{hint}")
    method, depth, assumed = match[1].replace("-", ""), match[2], []
    if settings.speculation and method == "mtp":
        # InferenceX calls every kind of drafting MTP.
        method, usual, _ = parse_speculation(settings.speculation)
        depth = depth or str(usual)
    method, reason = _drafting(method, model)
    default = default_depth(engine, method)
    if not depth and default:
        depth = str(default.depth)
        whose = "the engine's default" if default.basis == "spec" else "assumed"
        assumed.append(f"{method}:{depth}, {whose} ({default.source}, {default.date})")
    measured = positive(point, "spec_accept_len")
    speculation = catalog.speculation(model, f"{method}:{depth}", text=settings.text or "chat", length=measured)
    if speculation.source != "given":
        assumed.append(f"{speculation} that keeps {speculation.acceptance_length:.2f} tokens a step")
    return speculation, (*reason, *assumed)


def _drafting(said: str, model: Model) -> tuple[str, tuple[str, ...]]:
    """What drafts, by the word that an engine has for it, and the reason where that is another word.

    SGLang's EAGLE and NEXTN run the model's own prediction layer where it has one; a model without one needs a head,
    whatever a benchmark calls it.
    """
    if said in ("eagle", "nextn", "mtp"):
        method = "mtp" if model.draft_tensors else "eagle3"
        why = "has a prediction layer" if model.draft_tensors else "has no prediction layer"
        return method, () if said == method else (f"{said} is {method}: {model.id} {why}",)
    return said, ()


def row_settings(point: OperatingPoint) -> BenchmarkSettings:
    """Optional columns of the row: kv_format, chunk_tokens, max_sequences; lengths' spread from its notes."""
    spread = _SHORTEST.search(point["notes"])
    return BenchmarkSettings(
        kv_format=point["kv_format"] or None,
        chunk_tokens=positive(point, "chunk_tokens"),
        max_sequences=positive(point, "max_sequences"),
        shortest=int(spread[1]) / 100 if spread else None,
    )


def number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def positive(point: OperatingPoint, column: str) -> float | None:
    """An optional column: nothing where it is empty, never what it does not say."""
    if not point[column]:
        return None
    value = number(point[column])
    if value is None or value < 1:
        raise NotPredicted(f"{column} '{point[column][:40]}' is no number of at least 1")
    return value


def whole(point: OperatingPoint, column: str, default: int) -> int:
    value = number(point[column]) if point[column] else float(default)
    if value is None or value < 1 or value != int(value):
        raise NotPredicted(f"{column} '{point[column]}' is no positive whole number")
    return int(value)


def length(point: OperatingPoint, column: str) -> float | None:
    """Tokens; a data set's mean where the row names one."""
    mean = _MEAN.fullmatch(point[column])
    value = float(mean[2]) if mean else number(point[column])
    if value is not None and value < 1:
        raise NotPredicted(f"{column} {point[column]} is less than one token")
    return value


def precision_of(name: str, model: Model, accelerator: Accelerator) -> str:
    """Rows name a width; which of its formats that was follows from the model and the vendor."""
    name = name.casefold()
    native = set(model.native_name.split("+"))
    if name in ("fp4", "mxfp4", "nvfp4") and "mxfp4" in model.native_name:
        return "native"
    if name == "fp8" and ("fp8" in model.native_name or "mxfp4" in native):
        return "native"
    if name == "int4" and "int4" in model.native_name:
        return "native"
    if name == "fp4":
        return "mxfp4" if accelerator.vendor == "AMD" else "nvfp4"
    if name in ("bfloat16", "float16"):
        return {"bfloat16": "bf16", "float16": "fp16"}[name]
    return name or "native"


def engine_of(catalog: Catalog, point: OperatingPoint, alone: bool) -> str | None:
    """GPU work alone needs no engine: PyTorch's kernels stand for one that the catalog does not know."""
    name = point["engine"]
    if not alone:
        # MLPerf's summaries name one engine and its version another where a submission brings several.
        mislabelled = "TensorRT-LLM" in point["engine_version"] and name.casefold() == "vllm"
        return "tensorrt-llm" if mislabelled else name or None
    try:
        return catalog.stack(name or "pytorch").id
    except UnknownName:
        return "pytorch"


def layout_of(point: OperatingPoint, published: Mapping[str, str], model: Model, gpus: int) -> Parallelism | None:
    """The row's own layout, else a published one, else None."""
    parts = {name.casefold(): int(n) for name, n in _LAYOUT.findall(point["parallelism"])}
    if "dep" in parts:
        return Parallelism(dp=parts["dep"], ep=parts["dep"], pp=parts.get("pp", 1))
    if "tep" in parts:
        return Parallelism(tp=parts["tep"], ep=parts["tep"], pp=parts.get("pp", 1))
    if "DPA" in point["parallelism"] and model.is_moe:
        # Attention in replicas: the ranks that would share a head each serve requests of their own.
        ranks = parts.get("tp", 1)
        return Parallelism(dp=ranks, ep=parts.get("ep", 1), pp=parts.get("pp", 1))
    if not parts and point["tp"]:
        parts = {"tp": whole(point, "tp", 1)}
    copies = _REPLICAS.match(point["accelerator_raw"])
    if not parts and copies:
        parts = {"tp": int(copies[1]) // max(int(copies[2]), 1)}
    if not parts and published:
        width = int(published["tp"])
        parts = {"tp": width, "pp": int(published["pp"] or 1), "ep": int(published["ep"] or 1)}
        if published["attention_dp"] == "1" and width > 1:
            parts |= {"tp": 1, "dp": width}
    if not parts:
        return Parallelism() if gpus == 1 else None
    width = parts.get("tp", 1)
    if not model.is_moe:
        return Parallelism(tp=width, pp=parts.get("pp", 1))
    spread = parts.get("ep", 1)
    replicas = parts.get("attention_dp", parts.get("dp", 1))
    if replicas > 1 and width == gpus and width % replicas == 0:
        # SGLang counts all ranks as TP: TP8DP8 on eight GPUs is eight attention replicas.
        width //= replicas
    if width > 0 and spread > width * replicas and spread % width == 0:
        # Experts over eight GPUs are eight GPUs: TP1EP8 has attention in replicas on them.
        replicas = spread // width
    return Parallelism(tp=width, pp=parts.get("pp", 1), ep=spread, dp=replicas)


@dataclass(frozen=True, slots=True)
class Side:
    """Replicas of one kind, and how each is laid out."""

    replicas: int
    split: Parallelism


def sides_of(point: OperatingPoint, model: Model, gpus: int, domain: int) -> tuple[Side, Side, bool]:
    """Prefill and decode of a row, and whether the row says all of their layouts. `domain`: GPUs of one node."""
    pairs = _PAIRS.fullmatch(point["parallelism"])
    if pairs:
        split = Parallelism(tp=int(pairs["tp"]))
        return Side(int(pairs["p"]), split), Side(int(pairs["d"]), split), True
    match = _SIDES.fullmatch(point["parallelism"])
    counted = _COUNTED_SIDES.fullmatch(point["parallelism"])
    if counted:
        clients = (number(point["concurrency"]) or 1.0) / int(counted["d"])
        sides = [_counted_side(int(counted[side]), model, domain, clients) for side in ("p", "d")]
        return sides[0], sides[1], False
    if not match:
        raise NotPredicted("the row does not say which of its GPUs prefill and which decode")
    workers = [int(match[side] or 0) for side in ("p", "d")]
    if not all(workers):
        raise NotPredicted("the row does not say how many workers prefill and how many decode")
    widths = [(int(match[f"{side}_tp"]), int(match[f"{side}_ep"] or 1)) for side in ("p", "d")]
    noted = _SIDE_GPUS.search(point["notes"])
    counts = _side_gpus(workers, widths, [int(noted[1]), int(noted[3])] if noted else None, gpus)
    said = [match["dpa"] is not None] * 2 if match["dpa"] else [None, None]
    if noted and noted[2]:
        said = [noted[2] == "True", noted[4] == "True"]
    clients = (number(point["concurrency"]) or 1.0) / counts[1]
    whole_said = said[0] is not None
    sides = []
    for replicas, count, (tp, ep), replicated in zip(workers, counts, widths, said, strict=True):
        if count % replicas:
            raise NotPredicted(f"{count} GPUs do not divide over {replicas} workers")
        ranks = count // replicas
        if tp == ep == 1 and ranks > 1:
            # Widths that a source does not know are written as ones. Wide workers spread experts and replicate
            # attention; the few GPUs of a small one share heads.
            replicated, ep = ranks > _SMALL_WORKER, ranks
        elif replicated is None:
            replicated = ep > 1 and clients > _REPLICATED_FROM
        width = 1 if replicated and model.is_moe else (tp if tp > 1 and ranks % tp == 0 else ranks)
        spread = _dividing(min(ep, ranks), model.experts) if model.is_moe and ranks > 1 else 1
        asked = Parallelism(tp=width, dp=ranks // width, ep=spread)
        split = in_nodes(asked, model, domain)
        whole_said &= split == asked
        sides.append(Side(replicas, split))
    return sides[0], sides[1], whole_said


def _counted_side(gpus: int, model: Model, domain: int, clients: float) -> Side:
    """All GPUs of a side as one worker, as wide as recipes make it: attention in replicas where clients are many."""
    if gpus == 1:
        return Side(1, Parallelism())
    spread = model.is_moe and (gpus > domain or clients > _REPLICATED_FROM)
    wide = Parallelism(dp=gpus, ep=_dividing(gpus, model.experts)) if spread else Parallelism(tp=gpus)
    return Side(1, in_nodes(wide, model, domain))


def in_nodes(split: Parallelism, model: Model, domain: int) -> Parallelism:
    """Attention in one piece over several nodes is not modelled: a piece in each, and the experts over all."""
    if not model.is_moe or split.tp <= domain or split.tp % domain:
        return split
    spread = _dividing(split.stage_gpus, model.experts)
    return Parallelism(tp=domain, dp=split.stage_gpus // domain, ep=spread, pp=split.pp)


def _side_gpus(workers: list[int], widths: list[tuple[int, int]], noted: list[int] | None, gpus: int) -> list[int]:
    """GPUs of prefill and of decode: as noted, else as the layout has them; they must be those of the row."""
    # Experts that a worker spreads over eight GPUs are eight GPUs: TP1EP8 has attention replicas of one each.
    least = [n * max(pair) for n, pair in zip(workers, widths, strict=True)]
    narrow = [n * tp for n, (tp, _) in zip(workers, widths, strict=True)]
    # Widths that a source does not know are written as ones, and a count made of them counts workers.
    unknown = all(pair == (1, 1) for pair in widths)
    if noted and sum(noted) == gpus and not (unknown and noted[0] > least[0] and noted[1] == workers[1]):
        # A count that somebody made of the tensor-parallel widths alone falls short of the experts' width.
        return [max(pair) for pair in zip(noted, least, strict=True)]
    fitting = [counts for counts in (narrow, least) if sum(counts) == gpus]
    if fitting:
        return fitting[0]
    share = gpus // sum(workers)
    if unknown and not noted and gpus == share * sum(workers) and share.bit_count() == 1:
        return [n * share for n in workers]
    if unknown:
        raise NotPredicted("the row does not say how wide its workers of prefill and of decode are")
    raise NotPredicted(f"prefill {least[0]} and decode {least[1]} GPUs are not the {gpus} of the row")


def _dividing(groups: int, experts: int) -> int:
    """Groups that share the experts evenly: engines fill others up with copies of some."""
    return next(n for n in range(groups, 0, -1) if experts % n == 0 and groups % n == 0)
