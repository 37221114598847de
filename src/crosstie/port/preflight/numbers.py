"""What the stored numbers show: faults of the checkpoint, bytes on which the FP8 dialects differ, and scales."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from crosstie.core.deployment import Accelerator
from crosstie.core.figures import plural
from crosstie.core.finding import Finding, Location
from crosstie.core.progress import OnProgress
from crosstie.port.checkpoint.fp8 import Codes, Dialect, Recoder, scale_values
from crosstie.port.checkpoint.index import Checkpoint
from crosstie.port.preflight.phrases import told
from crosstie.port.preflight.stored import Stored

# A sample reads this much of a checkpoint's FP8 weights at most, a piece of each tensor.
_SAMPLE_BYTES = 256 << 20
_LEAST_PIECE = 1 << 12
# Plain types of safetensors: how their bits are read, and infinity, beyond which everything is NaN.
_FLOATS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}


def stored_findings(
    stored: Stored, accelerators: Sequence[Accelerator], scan: str, on_progress: OnProgress
) -> list[Finding]:
    """Faults that concern every accelerator, and counts that explain what a dialect would do to these weights."""
    if stored.unseen:
        return [told("tensors-unseen", Location(file=str(stored.config.file)), why=stored.unseen)]
    if stored.checkpoint is None or stored.scheme is None:
        return []
    found = [
        told("checkpoint", Location(file=_path(stored, problem.file), name=problem.key), reason=problem.reason)
        for problem in stored.scheme.problems
    ]
    if stored.checkpoint.is_remote:
        return [*found, told("tensors-remote", Location(file=str(stored.config.file)))]
    scales = dict.fromkeys(_scales(stored))
    found += _scale_findings(stored.checkpoint, list(scales), on_progress)
    if scan != "none":
        found += _float_findings(stored.checkpoint, scales, scan, on_progress)
        if any(True for _ in stored.scheme.fp8_weights):
            found += _code_findings(stored, accelerators, scan, on_progress)
    return found


def _path(stored: Stored, name: str) -> str:
    """A file of the checkpoint as the user would open it; what concerns the whole folder stands in its config."""
    assert stored.checkpoint
    file = stored.checkpoint.folder / name
    return str(file if file.is_file() else stored.config.file)


def _scales(stored: Stored) -> Iterator[str]:
    assert stored.scheme
    for weight in stored.scheme.weights:
        if weight.is_fp8:
            yield from (*weight.scales, *weight.inputs)
    yield from stored.scheme.kv_scales


def _scale_findings(
    checkpoint: Checkpoint, names: Sequence[str], on_progress: OnProgress
) -> Iterator[Finding]:  # fmt: skip
    """Scales are read whole: one that is zero, negative or no number spoils everything it multiplies."""
    wrong: list[tuple[str, str]] = []
    for number, name in enumerate(names, 1):
        if number % 1024 == 1:
            on_progress(number, len(names), "scales")
        values = scale_values(np.frombuffer(checkpoint.read(name), np.uint8), checkpoint[name].dtype)
        bad = ~np.isfinite(values) | (values <= 0)
        if bad.any():
            wrong.append((name, f"{int(bad.sum()):,} of {values.size:,} are {values[bad][0]:g} or the like"))
    if wrong:
        name, evidence = wrong[0]
        where = Location(file=str(checkpoint[name].file), name=name)
        yield told("fp8-scale", where, count=f"{len(wrong):,}", evidence=evidence)


def _float_findings(
    checkpoint: Checkpoint, scales: Collection[str], scan: str, on_progress: OnProgress
) -> Iterator[Finding]:
    """Plain weights that are no numbers, by a training that diverged or a damaged file: then no answer is one."""
    names = [
        name
        for name, tensor in checkpoint.tensors.items()
        if tensor.dtype in _FLOATS and tensor.nbytes and name not in scales
    ]
    # Whole words.
    piece = max(_LEAST_PIECE, _SAMPLE_BYTES // max(len(names), 1)) // 4 * 4
    wrong, read = dict[str, int](), 0
    for number, name in enumerate(names, 1):
        if number % 64 == 1:
            on_progress(number, len(names), "plain tensors")
        for chunk in checkpoint.chunks(name) if scan == "all" else iter([checkpoint.read(name, piece)]):
            read += len(chunk)
            if count := _not_numbers(chunk, checkpoint[name].dtype):
                wrong[name] = wrong.get(name, 0) + count
    if wrong:
        name, total = next(iter(wrong)), sum(checkpoint[one].nbytes for one in names)
        yield told(
            "nan", Location(file=str(checkpoint[name].file), name=name), dtype=checkpoint[name].dtype,
            tensors=plural(len(wrong), "tensor"), count=f"{sum(wrong.values()):,}",
            extent=_read_of(read, total, "bytes"),
        )  # fmt: skip


def _not_numbers(chunk: bytes | memoryview, dtype: str) -> int:
    """How many are NaN, by their bits: all of the exponent's are set, and some of the fraction's."""
    word, infinity = _FLOATS[dtype]
    bits = np.frombuffer(chunk, word)
    without_sign = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    return int((without_sign > infinity).sum())


def _code_findings(
    stored: Stored, accelerators: Sequence[Accelerator], scan: str, on_progress: OnProgress
) -> Iterator[Finding]:
    assert stored.checkpoint
    assert stored.scheme
    dialect: Dialect = "e4m3fnuz" if stored.dialect == "fnuz" else "e4m3fn"
    names = [weight.name for weight in stored.scheme.fp8_weights]
    counted, first_nan = _count(stored.checkpoint, names, dialect, scan, on_progress)
    file, total = str(stored.config.file), sum(stored.checkpoint[name].nbytes for name in names)
    extent = _read_of(counted.total, total, "FP8 bytes")
    if first_nan:
        where = Location(file=str(stored.checkpoint[first_nan].file), name=first_nan)
        yield told("fp8-nan", where, dialect=dialect, count=f"{counted.nans(dialect):,}", extent=extent)
    for accelerator in accelerators:
        spoken = accelerator.chip.fp8_dialect.value
        if spoken not in ("e4m3fn", "e4m3fnuz") or spoken == dialect:
            continue
        beyond = f", {counted.beyond_240:,} beyond 240 (a cast of values makes NaN)" if dialect == "e4m3fn" else ""
        yield told(
            "fp8-bytes", Location(file=file, name="quantization_config"), accelerator.id, stored=dialect,
            spoken=spoken, factor="half" if dialect == "e4m3fn" else "twice", extent=extent,
            sign_only=f"{counted.sign_only:,}", beyond=beyond,
        )  # fmt: skip


def _count(
    checkpoint: Checkpoint, names: Sequence[str], dialect: Dialect, scan: str, on_progress: OnProgress
) -> tuple[Codes, str]:
    """What the bytes are, and the first tensor with a NaN."""
    recoder, total, first_nan = Recoder(dialect), Codes(), ""
    piece = max(_LEAST_PIECE, _SAMPLE_BYTES // len(names))
    for number, name in enumerate(names, 1):
        if number % 64 == 1:
            on_progress(number, len(names), "FP8 tensors")
        chunks = checkpoint.chunks(name) if scan == "all" else iter([checkpoint.read(name, piece)])
        for chunk in chunks:
            codes = recoder.count(np.frombuffer(chunk, np.uint8))
            total += codes
            if codes.nans(dialect) and not first_nan:
                first_nan = name
    return total, first_nan


def _read_of(read: int, stored: int, what: str) -> str:
    if read == stored:
        return f"all {stored:,} {what}"
    return f"a sample of {read:,} of {stored:,} {what} (--scan all reads every one)"
