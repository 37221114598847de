"""Holds manifests to the definitions of custom resources, as an API server would that has them.

    crd_check.py MANIFESTS... -- CRD.yaml...

Manifests are files or folders. Types, required and unknown fields, enumerations, patterns and limits are checked;
rules in CEL (x-kubernetes-validations) are not run. Objects of other kinds are passed over. Exit status 1 where one is
refused, 2 where a file cannot be read.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

# C's reader, where it is there: definitions with pods in them have a megabyte.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def schemas(file: Path) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """By version and kind."""
    for crd in yaml.load_all(file.read_text(encoding="utf-8"), Loader):
        if crd and crd.get("kind") == "CustomResourceDefinition":
            spec = crd["spec"]
            for version in spec["versions"]:
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                yield key, _strict(version["schema"]["openAPIV3Schema"], top=True)


def _strict(schema: Any, *, top: bool = False) -> Any:
    """As JSON Schema, with fields refused that are not listed: kubectl's strict validation, not silent pruning."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items() if key not in ("default", "description", "format")}
    for key in ("properties", "patternProperties"):
        if key in schema:
            found[key] = {name: _strict(one) for name, one in schema[key].items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if "properties" in schema and "additionalProperties" not in schema:
        found["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    if top:
        found["properties"]["metadata"] = {"type": "object"}
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        found["type"] = [schema["type"], "null"]
    return found


def faults(manifests: list[Path], definitions: list[Path]) -> Iterator[str]:
    known = {key: schema for file in definitions for key, schema in schemas(file)}
    for one in manifests:
        for file in sorted(one.glob("*.yaml")) if one.is_dir() else [one]:
            for made in yaml.load_all(file.read_text(encoding="utf-8"), Loader):
                schema = known.get((made.get("apiVersion"), made.get("kind"))) if made else None
                if schema is not None:
                    name = f"{file}: {made['kind']} {made['metadata']['name']}"
                    print(name)
                    for error in jsonschema.Draft7Validator(schema).iter_errors(made):
                        yield f"{name}: {'.'.join(map(str, error.path))}: {error.message[:200]}"


def main(words: list[str]) -> int:
    if "--" not in words:
        print(__doc__, file=sys.stderr)
        return 2
    at = words.index("--")
    try:
        found = [*faults([Path(one) for one in words[:at]], [Path(one) for one in words[at + 1 :]])]
    except (OSError, yaml.YAMLError, KeyError) as error:
        print(f"cannot be read: {error}", file=sys.stderr)
        return 2
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
