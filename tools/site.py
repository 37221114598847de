"""What the site has beyond docs/: tables rendered from the code, and the repository's files that pages link to.

A hook of mkdocs (mkdocs.yml). `<!-- rendered: NAME -->` on a page becomes what RENDERED[NAME] returns.
"""

import html
import inspect
import re
from collections.abc import Callable, Iterator
from os.path import relpath
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import msgspec
from mkdocs.structure.files import File, Files, InclusionLevel

import crosstie
from crosstie.catalog.describe import overview
from crosstie.catalog.library import Catalog
from crosstie.catalog.vision import Images
from crosstie.cli.main import crosstie as cli
from crosstie.core.fact import FileKey
from crosstie.core.fleet import Adapter, HostedModel, JwtIdentity, Route, Serving, TokenPrice
from crosstie.core.workload import Constraints, Lora, PrefixReuse

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages of the repository that the navigation names; others come in because a page links to them.
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"\]\((?![a-z][a-z0-9+.-]*:|#)([^()\s#]+)(#[^()\s]*)?\)", re.IGNORECASE)
_RENDERED = re.compile(r"<!-- rendered: (\w+) -->")
# A command on the front page.
_COMMAND = re.compile(r"\| `(crosstie [a-z ]+)` \|")


def on_files(files: Files, config: Any) -> Files:
    for file in sorted(_linked_files()):
        files.append(File.generated(config, _uri(file), abs_src_path=str(file), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = Path(page.file.abs_src_path)
    markdown = _LINK.sub(lambda link: _relinked(link, source), markdown)
    if page.file.src_uri == "index.md":
        markdown = _COMMAND.sub(lambda row: f"| [`{row[1]}`]({_in_reference(row[1])}) |", markdown)
    return _RENDERED.sub(lambda name: RENDERED[name[1]](), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """A corner of a table that names nothing heads nothing, and what scrolls can be reached by the keyboard."""
    return content.replace("<th></th>", "<td></td>").replace("</span><code>", '</span><code tabindex="0">')


def _uri(file: Path) -> str:
    """Where a file of the repository stands on the site."""
    inside = file.is_relative_to(DOCS)
    return str(file.relative_to(DOCS)) if inside else f"repository/{file.relative_to(ROOT)}"


def _target(page: Path, link: str) -> Path:
    file = (page.parent / link).resolve()
    return file / "README.md" if file.is_dir() else file


def _linked_files() -> set[Path]:
    """Files outside docs/ that can be reached from its pages, and from the pages among them."""
    found: set[Path] = set()
    waiting = [*DOCS.rglob("*.md"), *(ROOT / name for name in ROOT_PAGES)]
    while waiting:
        page = waiting.pop()
        if not page.is_relative_to(DOCS):
            found.add(page)
        if page.suffix == ".md":
            reached = {_target(page, link) for link, _ in _LINK.findall(page.read_text())}
            outside = {file for file in reached if file.is_file() and not file.is_relative_to(DOCS)}
            waiting += outside - found
    return found


def _relinked(link: re.Match[str], page: Path) -> str:
    file = _target(page, link[1])
    # What is not there stays as it is, for mkdocs to complain of.
    known = file.is_file() and file.is_relative_to(ROOT)
    return f"]({relpath(_uri(file), Path(_uri(page)).parent)}{link[2] or ''})" if known else link[0]


def _in_reference(command: str) -> str:
    return "reference/commands.md#" + command.replace(" ", "-")


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [" | ".join(rows[0]), " | ".join("---" if isinstance(v, str) else "--:" for v in rows[0].values())]
    lines += [" | ".join(map(_cell, row.values())) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "–"
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _catalog(kind: str) -> Callable[[], str]:
    # The shipped data alone, whatever whoever builds the site has in a catalog of his own.
    return lambda: _table(overview(Catalog([]), kind))


def _library() -> str:
    """Every public name by its home: what the commands do first, then the nouns and the model."""
    homes: dict[str, list[str]] = {}
    for name in dir(crosstie):
        homes.setdefault(getattr(crosstie, name).__module__, []).append(name)
    parts = []
    wings = ("decide", "port", "run", "prove")
    for home, names in sorted(homes.items(), key=lambda one: (one[0].split(".")[1] not in wings, one[0])):
        parts += [f"## {home}", *(f"::: {home}.{name}" for name in names)]
    return "\n\n".join(parts)


# Words for the types of a file's values.
_KINDS = {float: "number", int: "whole number", bool: "true or false", str: "text", tuple: "list", dict: "table"}


def _keys(*tables: tuple[str, type[msgspec.Struct]]) -> Callable[[], str]:
    """Keys of tables that are read as the structs that have them: what each may be, and the comment over it."""

    def rendered() -> str:
        parts = []
        for name, struct in tables:
            rows = list(_rows(struct))
            parts += [f"### `{name}`", inspect.cleandoc(vars(struct).get("__doc__") or ""), _table(rows)]
        return "\n\n".join(parts)

    return rendered


def _rows(struct: type[msgspec.Struct]) -> Iterator[dict[str, str]]:
    said = _comments_over_fields(struct)
    for field in msgspec.structs.fields(struct):
        marks = get_args(field.type)[1:] if get_origin(field.type) is Annotated else ()
        called = next((mark.name for mark in marks if isinstance(mark, FileKey)), field.name)
        yield {
            "key": f"`{called}`",
            "value": _kind(field.type),
            "default": "must be given" if field.required else _default(field.default),
            "means": said.get(field.name, ""),
        }


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        kind, *marks = get_args(annotation)
        ends = [
            f"{word} {int(end) if end == int(end) else end:,}"
            for mark in marks
            if isinstance(mark, msgspec.Meta)
            for word, end in (("from", mark.ge), ("to", mark.le))
            if end is not None
        ]
        return " ".join([_kind(kind), *ends])
    options = [one for one in get_args(annotation) if one is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{one}`" for one in options)
    if type(None) in get_args(annotation):
        return " or ".join(map(_kind, options))
    return _KINDS.get(get_origin(annotation) or annotation, getattr(annotation, "__name__", str(annotation)))


def _default(value: Any) -> str:
    if value is msgspec.NODEFAULT or value is None or value == ():
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _comments_over_fields(struct: type[msgspec.Struct]) -> dict[str, str]:
    """A comment belongs to the field under it."""
    found, above = {}, list[str]()
    for line in inspect.getsource(struct).splitlines():
        field = re.match(r"    (\w+): ", line)
        if comment := re.match(r"    # (.*)", line):
            above.append(comment[1])
        elif field:
            found[field[1]], above = " ".join(above), []
    return found


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command and group with what it is called by, groups before what they hold."""
    waiting: list[tuple[str, click.Command]] = [("crosstie", cli)]
    while waiting:
        path, command = waiting.pop(0)
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            held = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
            waiting[:0] = [(f"{path} {name}", one) for name, one in held if one is not None and not one.hidden]


def _commands() -> str:
    """What `--help` prints, as a page: a heading for each command, its options as a table."""
    parts: list[str] = []
    for path, command in commands():
        context = click.Context(command, info_name=path)
        parts += [f"{'###' if path.count(' ') > 1 else '##'} {path}", _help(command.help or "")]
        if not isinstance(command, click.Group):
            usage = " ".join(command.collect_usage_pieces(context))
            rows = [_option(option, context) for option in command.params if isinstance(option, click.Option)]
            parts += [f"```text\n{path} {usage}\n```", _table([row for row in rows if row])]
    return "\n\n".join(parts)


def _help(text: str) -> str:
    """click's help: a paragraph after \\b keeps its lines."""
    text = inspect.cleandoc(text)
    return re.sub(r"\x08\n(.*?)(?=\n\n|\Z)", r"```text\n\1\n```", text, flags=re.DOTALL)


def _option(option: click.Option, context: click.Context) -> dict[str, Any]:
    record = option.get_help_record(context)
    if record is None:
        return {}
    names, said = record
    return {"option": f"<code>{html.escape(names).replace('|', '&#124;')}</code>", "means": html.escape(said)}


RENDERED: dict[str, Callable[[], str]] = {
    "accelerators": _catalog("accelerators"),
    "models": _catalog("models"),
    "stacks": _catalog("stacks"),
    "formats": _catalog("formats"),
    "libraries": _catalog("libraries"),
    "commands": _commands,
    "library": _library,
    "workload": _keys(
        ("prefix of a [[class]]", PrefixReuse),
        ("images of a [[class]]", Images),
        ("lora of a [[class]]", Lora),
        ("[constraints]", Constraints),
    ),
    "fleet": _keys(
        ("[serve]", Serving),
        ("[jwt]", JwtIdentity),
        ("routes of a [[class]]", Route),
        ("hosts of a [[pool]]", HostedModel),
        ("adapters of a [[pool]]", Adapter),
        ("a [[pool]] that is paid by the token", TokenPrice),
    ),
}
