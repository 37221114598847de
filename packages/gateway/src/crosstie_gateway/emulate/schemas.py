"""A value that a JSON schema allows, the same for the same schema: what an engine that is held to it might answer."""

from typing import Any

from crosstie.core.errors import BadInput

# Depths of a recursive schema: from the first on only required properties, beyond the second an error.
_DEEP, _TOO_DEEP = 4, 32
_TEXT = "emulated"
_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "PT1S",
    "email": "emulated@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_KINDS = {"properties": "object", "required": "object", "items": "array", "prefixItems": "array", "minimum": "number"}


def example(schema: Any) -> Any:
    """Raises BadInput where no value is found."""
    return _Reader(schema).value(schema, 0, 0)


class _Reader:
    def __init__(self, root: Any):
        self._root = root

    def value(self, schema: Any, depth: int, nth: int) -> Any:
        """`nth`: its number among values that must differ."""
        if schema is True or schema == {}:
            return {}
        if not isinstance(schema, dict):
            raise BadInput(f"a schema is an object, not {schema!r}")
        if depth > _TOO_DEEP:
            raise BadInput("the schema requires values within each other without end")
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"]) | _without(schema, "$ref"), depth + 1, nth)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][nth % len(schema["enum"])]
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                return self._one_of(schema, key, depth, nth)
        if schema.get("allOf"):
            return self.value(self._all_of(schema), depth + 1, nth)
        kind = self._kind(schema)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return _string(schema, nth)
        if kind in ("integer", "number"):
            return _number(schema, kind, nth)
        if kind in ("boolean", "null"):
            return nth % 2 == 0 if kind == "boolean" else None
        raise BadInput(f"there is no type {kind!r}")

    def _referred(self, reference: Any) -> dict[str, Any]:
        """Within the schema: nothing is fetched."""
        schema = self._root
        for part in str(reference).removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
        if not isinstance(schema, dict) or not str(reference).startswith("#"):
            raise BadInput(f"$ref {reference!r} names nothing in the schema")
        return schema

    def _one_of(self, schema: dict[str, Any], key: str, depth: int, nth: int) -> Any:
        """A value of the first branch that gives one; deep down branches without inner values come first."""
        branches = [branch for branch in schema[key] if isinstance(branch, dict)]
        if depth >= _DEEP:
            branches.sort(key=lambda branch: "$ref" in branch or self._kind(branch) in ("object", "array"))
        why = BadInput(f"{key} has no schema that a value is found for")
        for branch in branches:
            try:
                return self.value(_joined(_without(schema, key), branch), depth + 1, nth)
            except BadInput as error:
                why = error
        raise why

    def _all_of(self, schema: dict[str, Any]) -> dict[str, Any]:
        whole = _without(schema, "allOf")
        for part in schema["allOf"]:
            while "$ref" in part:
                part = self._referred(part["$ref"]) | _without(part, "$ref")
            whole = _joined(whole, part)
        return whole

    def _kind(self, schema: dict[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((name for name in kind if name != "null"), "null")
        return kind or next((kind for key, kind in _KINDS.items() if key in schema), "string")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        names = [name for name in properties if depth < _DEEP or name in required]
        names += [name for name in required if name not in properties]
        return {name: self.value(properties.get(name, {"type": "string"}), depth + 1, 0) for name in names}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems") or []
        least = int(schema.get("minItems", 0 if depth >= _DEEP else 1))
        count = max(min(least, int(schema.get("maxItems", least))), len(first))
        items = schema.get("items", {"type": "string"})
        return [self.value(first[nth] if nth < len(first) else items, depth + 1, nth) for nth in range(count)]


def _without(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What both ask for; where both say something, the second."""
    whole = {**first, **second}
    if "properties" in first and "properties" in second:
        whole["properties"] = {**first["properties"], **second["properties"]}
    if "required" in first and "required" in second:
        whole["required"] = list(dict.fromkeys([*first["required"], *second["required"]]))
    return whole


def _string(schema: dict[str, Any], nth: int) -> str:
    if "pattern" in schema:
        raise BadInput("pattern: emulated answers follow no regular expressions")
    text = _FORMATS.get(schema.get("format", "")) or (f"{_TEXT} {nth + 1}" if nth else _TEXT)
    text = text.ljust(int(schema.get("minLength", 0)), ".")
    return text[: int(schema["maxLength"])] if "maxLength" in schema else text


def _number(schema: dict[str, Any], kind: str, nth: int) -> float | int:
    step = schema.get("multipleOf") or 1
    least = schema.get("minimum", schema.get("exclusiveMinimum", min(0, schema.get("maximum", 0))))
    value = -(-least // step) * step
    if value == schema.get("exclusiveMinimum"):
        value += step
    value += nth * step
    highest, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if (highest is not None and value > highest) or (below is not None and value >= below):
        # Between two bounds that are nearer to each other than a whole step.
        value = (least + min(bound for bound in (highest, below) if bound is not None)) / 2
        if kind == "integer" or "multipleOf" in schema:
            raise BadInput(f"no {kind} is found within the bounds of the schema")
    return int(value) if kind == "integer" else value
