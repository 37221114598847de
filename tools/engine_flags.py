"""Flags of an engine's server as its own parser has them, and whether that parser takes a line.

    /path/to/vllm/python tools/engine_flags.py vllm > src/crosstie/port/recipe/data/flags/vllm.csv
    /path/to/torch/python tools/engine_flags.py sglang /path/to/sglang/python > .../sglang.csv
    python tools/engine_flags.py llama.cpp /path/to/llama.cpp/tools/server/README.md > .../llama.cpp.csv
    /path/to/vllm/python tools/engine_flags.py vllm --keys > .../vllm-keys.csv    # of flags that take JSON
    ... --parse < lines.json      # a JSON list of argument lists in, a list of complaints ("" for none) out

Runs in the engine's own environment, so it imports nothing of Crosstie's. SGLang's parser is imported from its source;
what it needs only to serve stands in as an empty module. llama.cpp's flags are those that its README lists, which its
build writes from the parser; the parser itself is in the wheel of xllamacpp, which carries llama.cpp's own library:
`/path/to/python-with-xllamacpp tools/engine_flags.py llama.cpp --parse`.
"""

import argparse
import contextlib
import csv
import ctypes
import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

# What SGLang imports on the way to its parser and an environment with PyTorch may lack.
STOOD_IN = {"orjson", "torchvision", "IPython", "transformers"}


class _Base:
    def __init_subclass__(cls, **_given: Any) -> None:
        pass

    def __init__(self, *_given: Any, **_named: Any) -> None:
        pass


class _Anything:
    """Whatever is asked of it: a class to inherit from, a decorator, a table, a version."""

    def __init__(self, *_given: Any, **_named: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (_Base,) if bases[0] is self and not any(isinstance(one, type) for one in bases) else ()

    def __getitem__(self, _key: Any) -> Any:
        return _Anything()

    def __setitem__(self, _key: Any, _value: Any) -> None:
        pass

    def __contains__(self, _key: Any) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __or__(self, _other: Any) -> Any:
        return _Anything()

    def __lt__(self, _other: Any) -> bool:
        return False

    __ror__ = __or__
    __gt__ = __le__ = __ge__ = __lt__


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, _path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in STOOD_IN else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None:
        pass


def vllm_parser() -> argparse.ArgumentParser:
    own = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    parser: argparse.ArgumentParser = importlib.import_module("vllm.entrypoints.launchers.cli_args").make_arg_parser(
        own
    )
    return parser


def sglang_parser(source: str) -> argparse.ArgumentParser:
    sys.path.insert(0, source)
    sys.meta_path.insert(0, _StandIns())
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


def _takes_json(action: argparse.Action) -> bool:
    """Whether it reads an object, and refuses a word that is none."""
    if not callable(action.type):
        return False
    try:
        read = action.type("{}")
    except Exception:  # noqa: BLE001
        return False
    if isinstance(read, str):
        return False
    try:
        action.type("no json")
    except Exception:  # noqa: BLE001
        return True
    return False


def rows_of(parser: argparse.ArgumentParser) -> list[tuple[str, str, str, str]]:
    """flag, other spellings, what follows it (nothing, one, maybe, many), and what that may be."""
    found = []
    for action in parser._actions:
        longs = [one for one in action.option_strings if one.startswith("--")]
        if not longs or longs[0] == "--help":
            continue
        after: dict[object, str] = {0: "nothing", "?": "maybe", "*": "many", "+": "many"}
        follows = after.get(action.nargs, "one")
        kind = "int" if action.type is int else "float" if action.type is float else "json" * _takes_json(action)
        choices = "|".join(map(str, action.choices)) if action.choices else kind
        others = " ".join(one for one in action.option_strings if one != longs[0])
        found.append((longs[0], others, follows, choices))
    return found


def vllm_keys() -> list[tuple[str, str]]:
    """Flags that take JSON, and the keys that it may have: --attention-config is vllm.config's AttentionConfig."""
    config = importlib.import_module("vllm.config")
    found = []
    for flag, _, _, kind in rows_of(vllm_parser()):
        named = "".join(part.capitalize() for part in flag.removeprefix("--").split("-"))
        kept = getattr(config, named, None)
        if kind == "json" and dataclasses.is_dataclass(kept):
            found.append((flag, "|".join(sorted(field.name for field in dataclasses.fields(kept)))))
    return found


def rows_of_readme(file: Path) -> list[tuple[str, str, str, str]]:
    found: dict[str, tuple[str, str, str, str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `(-[^`]+)` \| (.*)", line)
        if not row or "argument has been removed" in row[2]:
            continue
        # Spellings end where the value's own name begins.
        said = row[1].replace("\\|", "|")
        spelt = re.match(r"(?:-[\w.-]+(?:, |$| ))+", said)
        assert spelt, line
        names, value = spelt[0].replace(",", "").split(), said[spelt.end() :].strip()
        longs = [one for one in names if one.startswith("--")] or names[:1]
        choices = value.strip("{}[]").replace(",", "|") if re.match(r"[\[{][\w|,]+[\]}]$|none,", value) else ""
        choices = "|".join(re.findall(r"allowed values: ([^<]+)", row[2])).replace(", ", "|") or choices
        others = " ".join(one for one in names if one != longs[0])
        found.setdefault(longs[0], (longs[0], others, "one" if value else "nothing", choices))
    return [*found.values()]


class LlamaParser:
    """common_params_parse of llama.cpp, called where xllamacpp's extension has it.

    A CommonParams of xllamacpp holds llama.cpp's own right behind the head of a Python object. Which number its server
    has among llama.cpp's programs changes with the release, so that is tried: only the server takes --port.
    """

    _NAME = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"
    _MOST_PROGRAMS = 40

    def __init__(self) -> None:
        self._module = importlib.import_module("xllamacpp")
        self._parse = getattr(ctypes.CDLL(importlib.import_module("xllamacpp.xllamacpp").__file__), self._NAME)
        self._parse.restype = ctypes.c_bool
        self._server = next(one for one in range(self._MOST_PROGRAMS) if self._takes_port(one))

    def _takes_port(self, program: int) -> bool:
        _, read = self._read(["--ctx-size", "1234", "--port", "8123"], program)
        return bool(read.n_ctx == 1234 and read.port == 8123)

    def _read(self, line: list[str], program: int) -> tuple[str, Any]:
        read = self._module.CommonParams()
        words = [b"llama-server", *(one.encode() for one in line)]
        given = (ctypes.c_char_p * (len(words) + 1))(*words, None)
        place = ctypes.c_void_p(id(read) + object.__basicsize__)
        # It writes to the descriptor, past Python's stderr.
        with tempfile.TemporaryFile() as said:
            kept = os.dup(2)
            os.dup2(said.fileno(), 2)
            try:
                taken = self._parse(len(words), given, place, program, None)
            finally:
                os.dup2(kept, 2)
                os.close(kept)
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
        return ("" if taken else next((one for one in lines if one), "refused without a word")), read

    def complaint(self, line: list[str]) -> str:
        return self._read(line, self._server)[0]


def complaint(parser: argparse.ArgumentParser, line: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            parser.parse_args(line)
        except SystemExit:
            return said.getvalue().strip().splitlines()[-1]
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("engine", choices=["vllm", "sglang", "llama.cpp"])
    given.add_argument("source", nargs="?", help="of sglang its folder python/, of llama.cpp its server's README.md")
    given.add_argument("--parse", action="store_true")
    given.add_argument("--keys", action="store_true")
    asked = given.parse_args()
    out = sys.stdout
    # Engines greet on standard output.
    sys.stdout = sys.stderr
    if asked.keys:
        _written(out, ("flag", "keys"), vllm_keys())
        return
    if asked.engine == "llama.cpp" and asked.parse:
        llama = LlamaParser()
        json.dump([llama.complaint(line) for line in json.load(sys.stdin)], out)
        return
    if asked.engine == "llama.cpp":
        rows = rows_of_readme(Path(asked.source))
    else:
        parser = vllm_parser() if asked.engine == "vllm" else sglang_parser(asked.source)
        if asked.parse:
            json.dump([complaint(parser, line) for line in json.load(sys.stdin)], out)
            return
        rows = rows_of(parser)
    _written(out, ("flag", "also", "follows", "choices"), rows)


def _written(out: TextIO, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    table = csv.writer(out, lineterminator="\n")
    table.writerow(columns)
    table.writerows(sorted(rows))


if __name__ == "__main__":
    main()
