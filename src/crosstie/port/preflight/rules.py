"""What engines do with a model's operations on each instruction set, as rows of data read from their sources.

A row says for which releases its source was read, on which instruction sets and for which facts it holds. The
first row that matches decides; where none does, the answer is "unknown", never "fine".
"""

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from crosstie.catalog.reading import Sources, one_of, only_keys, read_record, read_toml, table, text
from crosstie.catalog.releases import in_force
from crosstie.core.errors import BadData
from crosstie.core.finding import Severity

FOLDER = Path(__file__).parent / "data" / "rules"
_STORED = {"method", "activations", "compute", "group", "act_order"}
# What a row may ask of each operation; docs/preflight.md says what they mean.
FACTS: dict[str, set[str]] = {
    "load": {*_STORED, "scheme", "part", "scales", "dialect", "converted"},
    "gemm": {*_STORED, "weights", "tp", "aligned16", "aligned128", "whole_groups"},
    "moe": {
        "weights", "activations", "method", "experts", "experts_per_token", "shared_experts", "inter", "hidden", "tp",
        "ep", "activation", "bias",
    },
    "attention": {
        "heads", "kv_heads", "gqa_ratio", "head_dim", "v_head_dim", "kv", "window", "chunked", "sinks", "softcap",
        "alibi", "encoder", "scale",
    },
    "mla": {"heads", "kv", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"},
    "sparse_attention": {"kind", "heads", "kv", "index_heads", "index_head_dim", "top_k", "tp"},
    "linear_attention": {"kind"},
    "kv_cache": {"dtype", "scales", "method", "kind", "dialect", "converted"},
    "feature": {"name", "architecture"},
}  # fmt: skip
OPERATIONS = tuple(FACTS)
# What a row on any operation may ask of the whole model, as model.NAME: `operations.model_facts` gives them.
MODEL_FACTS = {
    "architecture",
    "attention",
    "compressed",
    "indexer",
    "recurrent",
    "chunked",
    "routing",
    "hyper_connections",
    "expert_dtype",
}
OF_MODEL = "model."
SETTINGS = ("env.", "flag.")
# What runs an operation, or what a loader does to the numbers.
IMPLEMENTATIONS = (
    "aiter", "hipblaslt", "ck", "triton", "hip", "torch", "cuda", "cutlass", "flashinfer", "deepgemm", "marlin",
    "emulation", "normalised", "native", "unnormalised", "dequantised", "none", "unknown",
)  # fmt: skip
TARGETS = ("any", "rocm", "cuda")
_ISA = re.compile(r"^(gfx[0-9a-f]{3,5}|sm_[0-9]{2,3}[a-z]?)$")
# Where a row was read: path:line or path:first-last, several with "; " between them; of a commit or a package.
_PLACE = re.compile(r"(?P<path>[\w.+-]+(?:/[\w.+-]+)*):(?P<line>[1-9]\d*)(?:-(?P<last>[1-9]\d*))?")
_READ_IN = re.compile(r"PyPI [\w.-]+ \d[\w.]*\b|[\w.-]+/[\w.-]+(?:@| | \S+ \()[0-9a-f]{8,40}\b")
_CONDITION = re.compile(r"^(<=|>=|<|>|%|!%|!)?(.+)$")
_KEYS = {
    "id", "versions", "operation", "on", "when", "unless", "outcome", "implementation", "says", "remedy", "source",
    "at",
}  # fmt: skip

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "%": lambda value, divisor: value % divisor == 0,
    "!%": lambda value, divisor: value % divisor != 0,
}

Value = str | int | bool
Facts = Mapping[str, Value]
Conditions = Mapping[str, tuple[Value, ...]]


class EngineRule(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    engine: str
    versions: str
    operation: str
    on: tuple[str, ...]
    when: dict[str, tuple[Value, ...]]
    # Settings and facts under which it does not hold after all; one that is not known keeps no row from holding.
    unless: dict[str, tuple[Value, ...]]
    # What becomes of the operation as things are set. A finding may be less severe: settings are tried that cure it.
    outcome: Severity
    implementation: str
    says: str
    remedy: str = ""
    # Repository at commit, file and line: where whoever doubts it can look.
    source: str
    at: str
    date: str

    def holds(self, version: Version, isa: str, facts: Facts) -> bool:
        return self.speaks_of(version, isa) and self.may_hold(facts) and self.holds_with(facts)

    def speaks_of(self, version: Version, isa: str) -> bool:
        releases = SpecifierSet(self.versions)
        return releases.contains(version, prereleases=True) and any(covers(target, isa) for target in self.on)

    def may_hold(self, facts: Facts) -> bool:
        """Whether this row speaks of that operation; settings may still decide it."""
        return hold(self.when, self.unless, facts, lambda key: not is_setting(key))

    def holds_with(self, settings: Facts) -> bool:
        """Whether these settings leave a row standing that may hold."""
        return hold(self.when, self.unless, settings, is_setting)

    @property
    def asked_settings(self) -> list[tuple[str, tuple[Value, ...]]]:
        return [(key, wanted) for key, wanted in (*self.when.items(), *self.unless.items()) if is_setting(key)]


def is_setting(key: str) -> bool:
    return key.startswith(SETTINGS)


def hold(when: Conditions, unless: Conditions, facts: Facts, asked: Callable[[str], bool] = bool) -> bool:
    """Whether every one of the first is met and none of the second, of those that are asked about."""
    return all(met(key, wanted, facts) for key, wanted in when.items() if asked(key)) and not any(
        met(key, wanted, facts) for key, wanted in unless.items() if asked(key)
    )


def met(key: str, wanted: tuple[Value, ...], facts: Facts) -> bool:
    return key in facts and any(_one(facts[key], condition) for condition in wanted)


def covers(target: str, isa: str) -> bool:
    return target in ("any", isa) or target == ("rocm" if isa.startswith("gfx") else "cuda")


def _one(value: Value, condition: Value) -> bool:
    """A plain value is equality; a string may begin with <=, >=, <, >, % (divisible by), !% or ! (is not)."""
    if not isinstance(condition, str) or isinstance(value, bool):
        return value == condition
    match = _CONDITION.match(condition)
    assert match
    sign, operand = match.groups()
    if sign is None:
        return str(value) == operand
    if sign == "!":
        return str(value) != operand
    return isinstance(value, int) and _COMPARE[sign](value, int(operand))


@cache
def rules(engine: str) -> tuple[EngineRule, ...]:
    """All rows on an engine, in the order of its files' names and their lines."""
    release = in_force()
    folders = [FOLDER, *([release / "preflight" / "rules"] if release else [])]
    files = {file.name: file for folder in folders for file in folder.glob(f"{engine}-*.toml")}
    return tuple(rule for name in sorted(files) for rule in read_rules(files[name]))


@cache
def _rules_of(engine: str, version: Version, isa: str, operation: str) -> tuple[EngineRule, ...]:
    return tuple(rule for rule in rules(engine) if rule.operation == operation and rule.speaks_of(version, isa))


def possible(engine: str, version: Version, isa: str, operation: str, facts: Facts) -> tuple[EngineRule, ...]:
    """Rows that may decide an operation, in their order: up to the first that no setting can unseat."""
    engine_rules = []
    for rule in _rules_of(engine, version, isa, operation):
        if rule.may_hold(facts):
            engine_rules.append(rule)
            if not rule.asked_settings:
                break
    return tuple(engine_rules)


def decide(engine: str, version: Version, isa: str, operation: str, facts: Facts) -> EngineRule | None:
    return first_standing(possible(engine, version, isa, operation, facts), facts)


def first_standing(engine_rules: Iterable[EngineRule], settings: Facts) -> EngineRule | None:
    return next((rule for rule in engine_rules if rule.holds_with(settings)), None)


def read_rules(file: Path) -> list[EngineRule]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"engine", "sources", "rule"})
    engine = text(file, "engine", raw.get("engine"))
    sources = Sources(file, raw.get("sources"))
    engine_rules: list[EngineRule] = []
    for number, entry in enumerate(raw.get("rule") or [], 1):
        rule = _rule(file, f"rule {number}", table(file, f"rule {number}", entry), engine, sources)
        if any(rule.id == other.id for other in engine_rules):
            raise BadData(file, rule.id, "this id stands here twice")
        engine_rules.append(rule)
    return engine_rules


def _rule(file: Path, where: str, entry: dict[str, Any], engine: str, sources: Sources) -> EngineRule:
    name = text(file, f"{where}.id", entry.get("id"))
    only_keys(file, name, entry, _KEYS)
    reference, day = sources.cite(name, entry.get("source"))
    at = _citation(file, name, reference, entry.get("at"))
    operation = one_of(file, f"{name}.operation", entry.get("operation"), OPERATIONS)
    rule = read_record(
        file, name, entry, EngineRule,
        engine=engine, operation=operation, on=targets(file, f"{name}.on", entry.get("on")),
        when=conditions(file, f"{name}.when", entry.get("when") or {}, FACTS[operation]),
        unless=conditions(file, f"{name}.unless", entry.get("unless") or {}, FACTS[operation]),
        implementation=one_of(file, f"{name}.implementation", entry.get("implementation"), IMPLEMENTATIONS),
        source=f"{reference} {at}", at=at, date=day,
    )  # fmt: skip
    try:
        SpecifierSet(rule.versions)
    except InvalidSpecifier:
        reason = f"'{rule.versions}' is no set of versions, such as >=0.9,<=0.28"
        raise BadData(file, f"{name}.versions", reason) from None
    if rule.outcome != "note" and not rule.remedy:
        raise BadData(file, f"{name}.remedy", "missing: only a note may do without")
    return rule


def _citation(file: Path, name: str, reference: str, raw: object) -> str:
    """A place that can be looked up: which commit or package, which file of it, which line."""
    if not _READ_IN.match(reference):
        raise BadData(
            file, f"{name}.source", f"'{reference}' names no commit (owner/name@a014e35f) or package (PyPI name 1.0)"
        )
    at = text(file, f"{name}.at", raw)
    for place in at.split("; "):
        if not _PLACE.fullmatch(place):
            raise BadData(file, f"{name}.at", f"'{place}' must be a path and a line: folder/file.py:12, or :12-20")
    return at


def false_citations(engine_rules: Iterable[EngineRule], tree: Path) -> list[str]:
    """Places that a copy of the source at `tree` does not have: there is no such file, or it has fewer lines."""
    false = []
    for rule in engine_rules:
        for place in map(_PLACE.fullmatch, rule.at.split("; ")):
            assert place
            file = tree / place["path"]
            lines = file.read_bytes().count(b"\n") + 1 if file.is_file() else 0
            if int(place["last"] or place["line"]) > lines:
                why = f"the file has {lines:,} lines" if lines else "no such file"
                false.append(f"{rule.id}: {place[0]}: {why}")
    return false


def targets(file: Path, where: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise BadData(file, where, "must be a list of instruction sets, or of any, rocm, cuda")
    for one in value:
        if one not in TARGETS and not (isinstance(one, str) and _ISA.match(one)):
            raise BadData(file, where, f"{one!r} is no instruction set (gfx942, sm_90), nor any, rocm or cuda")
    return tuple(value)


def conditions(file: Path, where: str, value: object, known: set[str]) -> dict[str, tuple[Value, ...]]:
    found: dict[str, tuple[Value, ...]] = {}
    for key, wanted in table(file, where, value).items():
        of_model = key.startswith(OF_MODEL) and key.removeprefix(OF_MODEL) in MODEL_FACTS
        if key not in known and not key.startswith(SETTINGS) and not of_model:
            facts = ", ".join((*sorted(known), *(f"{OF_MODEL}{name}" for name in sorted(MODEL_FACTS))))
            raise BadData(file, f"{where}.{key}", f"no such fact: {facts}, env.NAME or flag.NAME")
        choices = wanted if isinstance(wanted, list) else [wanted]
        for choice in choices:
            if not isinstance(choice, str | int):
                raise BadData(file, f"{where}.{key}", f"{choice!r} must be a word, a whole number or true or false")
            if isinstance(choice, str) and not _is_condition(choice):
                raise BadData(file, f"{where}.{key}", f"'{choice}' compares with no whole number")
        found[key] = tuple(choices)
    return found


def _is_condition(text: str) -> bool:
    if not (match := _CONDITION.match(text)):
        return False
    sign, operand = match.groups()
    return sign not in _COMPARE or (operand.isdigit() and (int(operand) > 0 or "%" not in sign))
