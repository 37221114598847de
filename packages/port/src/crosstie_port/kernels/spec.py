"""A spec says with which types and constants a kernel is launched: a TOML file, or CROSSTIE_KERNELS in the module.

    [[kernel]]
    name = "matmul_kernel"
    signature = { a = "*fp16", b = "*fp16", c = "*fp32", M = "i32", stride_am = "i32" }
    constexprs = { BLOCK_M = 128, BLOCK_N = 128, BLOCK_K = 64 }
    num_warps = 8

Only the standard library, as `machine_code`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstie.core.errors import BadData

_TYPE = re.compile(
    r"\*{0,2}k?(?:i1|u1|[iu](?:8|16|32|64)|bf16|fp(?:16|32|64)|fp8e(?:4nv|5|4b8|5b16|4b15))|nvTmaDesc|tensordesc<.+>"
)
_COUNTS = ("num_warps", "num_stages", "num_ctas", "max_configs")
_KEYS = {"name", "signature", "constexprs", "options", "divisibility", "large", "only", "grid", *_COUNTS}
# As CUDA tensors are: what torch allocates is aligned to more, and lengths are mostly multiples.
_USUAL_DIVISIBILITY = 16


@dataclass(frozen=True)
class KernelSpec:
    """One way of launching one kernel."""

    kernel: str
    # By argument: a type such as "*fp16", or "none" for an argument that is not passed.
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any]
    # Arguments whose value is not a multiple of 16, and what it is a multiple of.
    divisibility: dict[str, int]
    # Pointers to more than 2 GiB: AMD's buffer instructions do not reach further.
    large: frozenset[str]
    # Instruction sets, or hip and cuda; empty for all.
    only: tuple[str, ...]
    max_configs: int | None
    grid: tuple[int, ...]
    where: str
    file: str = ""

    def for_target(self, backend: str, isa: str) -> bool:
        return not self.only or backend in self.only or isa in self.only

    def divides(self, argument: str) -> int:
        return self.divisibility.get(argument, _USUAL_DIVISIBILITY)


def read_spec_file(file: Path) -> list[KernelSpec]:
    try:
        raw = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BadData(file, "", f"is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(file, "", f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    unknown = sorted(set(raw) - {"kernel"})
    if unknown:
        raise BadData(file, unknown[0], "unknown key: a spec has tables [[kernel]] and nothing else")
    return entries(str(file), raw.get("kernel"))


def entries(file: str, raw: object) -> list[KernelSpec]:
    """`raw`: a list of tables, as TOML gives it or as the module has it."""
    if not isinstance(raw, list) or not raw:
        raise BadData(file, "kernel", "must be a list of tables, one for each way of launching a kernel")
    return [_entry(file, f"kernel {number + 1}", one) for number, one in enumerate(raw)]


def _entry(file: str, where: str, raw: object) -> KernelSpec:
    if not isinstance(raw, Mapping):
        raise BadData(file, where, "must be a table")
    name = raw.get("name")
    if not isinstance(name, str) or not name:
        raise BadData(file, f"{where}.name", "must be the name of a kernel")
    where = f"{where} ({name})"
    unknown = sorted(str(key) for key in set(raw) - _KEYS)
    if unknown:
        raise BadData(file, f"{where}.{unknown[0]}", f"unknown key; known: {', '.join(sorted(_KEYS))}")
    types, divisibility = _signature(file, where, raw.get("signature", {}))
    for argument, value in _table(file, where, "divisibility", raw.get("divisibility", {})).items():
        divisibility[argument] = _count(file, f"{where}.divisibility.{argument}", value)
    constants = _table(file, where, "constexprs", raw.get("constexprs", {}))
    twice = sorted(set(types) & set(constants))
    if twice:
        raise BadData(file, f"{where}.constexprs.{twice[0]}", "stands in the signature as well")
    options = _table(file, where, "options", raw.get("options", {}))
    options |= {key: _count(file, f"{where}.{key}", raw[key]) for key in _COUNTS[:3] if key in raw}
    limit = raw.get("max_configs")
    return KernelSpec(
        kernel=name,
        types=types,
        constants=constants,
        options=options,
        divisibility=divisibility,
        large=frozenset(_names(file, f"{where}.large", raw.get("large", []))),
        only=_names(file, f"{where}.only", raw.get("only", [])),
        max_configs=None if limit is None else _count(file, f"{where}.max_configs", limit),
        grid=_grid(file, f"{where}.grid", raw.get("grid", [])),
        where=where,
        file=file,
    )


def _signature(file: str, where: str, raw: object) -> tuple[dict[str, str], dict[str, int]]:
    """Types by argument; "*fp16:1" says that the pointer is aligned to one byte."""
    types: dict[str, str] = {}
    divisibility: dict[str, int] = {}
    for argument, said in _table(file, where, "signature", raw).items():
        key = f"{where}.signature.{argument}"
        if not isinstance(said, str):
            raise BadData(file, key, f"{said!r} must be a type such as *fp16 or i32; constants go into constexprs")
        kind, _, multiple = said.strip().partition(":")
        if kind != "none" and not _TYPE.fullmatch(kind):
            raise BadData(file, key, f"'{said}' is no type: *fp16, *bf16, *fp8e4nv, fp32, i32, i64, ... or none")
        types[argument] = kind
        if multiple:
            if not multiple.isdigit() or not int(multiple):
                raise BadData(file, key, f"'{multiple}' after the colon is no whole number above 0")
            divisibility[argument] = int(multiple)
    return types, divisibility


def _table(file: str, where: str, key: str, raw: object) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise BadData(file, f"{where}.{key}", "must be a table by name")
    return {str(name): value for name, value in raw.items()}


def _names(file: str, where: str, raw: object) -> tuple[str, ...]:
    if not isinstance(raw, list | tuple) or not all(isinstance(name, str) for name in raw):
        raise BadData(file, where, "must be a list of names")
    return tuple(raw)


def _grid(file: str, where: str, raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list | tuple) or len(raw) > 3:
        raise BadData(file, where, "must be a list of up to three whole numbers")
    return tuple(_count(file, where, size) for size in raw)


def _count(file: str, where: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadData(file, where, f"{value!r} must be a whole number above 0")
    return value
