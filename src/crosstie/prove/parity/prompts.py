"""What two endpoints are asked: the bundled prompts, or a user's own, and longer ones made of them on request."""

from pathlib import Path
from typing import Any, Literal

import msgspec

from crosstie.catalog.reading import check_unique, only_keys, read_record, read_toml, table, texts
from crosstie.core.errors import BadData

BUNDLED = Path(__file__).parent / "data" / "prompts.toml"
Kind = Literal["chat", "code", "json", "tool", "long"]
# Of prose in one of the languages here; only how long `--long` prompts become depends on it.
_CHARACTERS_A_TOKEN = 4
_LONG_QUESTION = "Which number from 1 to {last} stands before the part that says most about water? Only the number."


class OfferedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function that is offered to the model; `properties` are JSON Schema."""

    name: str
    description: str
    properties: dict[str, dict[str, Any]]
    required: tuple[str, ...] = ()

    @property
    def offered(self) -> dict[str, Any]:
        schema = {"type": "object", "properties": self.properties, "required": list(self.required)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    language: str
    kind: Kind
    text: str
    tools: tuple[OfferedTool, ...] = ()
    # Keys that a JSON answer must have.
    wants: tuple[str, ...] = ()


class PromptSet(msgspec.Struct, frozen=True):
    prompts: tuple[Prompt, ...]
    documents: tuple[str, ...]

    def taken(self, limit: int | None, long_tokens: int | None) -> tuple[Prompt, ...]:
        """The first `limit` of them, and four of about `long_tokens` tokens where asked for."""
        return (*self.prompts[:limit], *(_long(self.documents, long_tokens) if long_tokens else ()))


def read_prompts(file: Path = BUNDLED) -> PromptSet:
    raw = read_toml(file)
    only_keys(file, "", raw, {"prompt", "document", "tool"})
    documents = {name: _prose(file, f"document.{name}", said) for name, said in (raw.get("document") or {}).items()}
    tools = {
        name: read_record(file, f"tool.{name}", table(file, f"tool.{name}", said) | {"name": name}, OfferedTool)
        for name, said in (raw.get("tool") or {}).items()
    }
    listed = raw.get("prompt")
    if not isinstance(listed, list) or not listed:
        raise BadData(file, "prompt", "there must be one [[prompt]] or more")
    made = []
    for index, said in enumerate(listed):
        where = f"prompt[{index}]"
        entry = dict(table(file, where, said))
        before, offered = (
            [_named(file, f"{where}.{key}", name, known) for name in texts(file, f"{where}.{key}", entry.pop(key, []))]
            for key, known in (("documents", documents), ("tools", tools))
        )
        text = "\n\n".join([*before, _prose(file, f"{where}.text", entry.get("text"))])
        made.append(read_record(file, where, entry, Prompt, text=text, tools=tuple(offered)))
    check_unique(file, "prompt", "id", [prompt.id for prompt in made])
    return PromptSet(tuple(made), tuple(documents.values()))


def _prose(file: Path, where: str, raw: object) -> str:
    if not isinstance(raw, str) or not raw.strip():
        raise BadData(file, where, "missing" if raw is None else "must be a non-empty string")
    return raw.strip()


def _named(file: Path, where: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise BadData(file, where, f"'{name}' is not in the file; there are {', '.join(known) or 'none'}")
    return known[name]


def _long(documents: tuple[str, ...], tokens: int) -> list[Prompt]:
    """Numbered parts in another order each, so that no two share a beginning that a cache would keep."""
    documents = documents or tuple(prompt.text for prompt in read_prompts().prompts)
    made = []
    for turn in range(4):
        parts: list[str] = []
        size = 0
        while size < tokens * _CHARACTERS_A_TOKEN:
            part = f"{len(parts) + 1}. {documents[(turn + len(parts) * (turn + 1)) % len(documents)]}"
            parts.append(part)
            size += len(part)
        text = "\n\n".join([*parts, _LONG_QUESTION.format(last=len(parts))])
        made.append(Prompt(id=f"long-{tokens}-{turn + 1}", language="en", kind="long", text=text))
    return made
