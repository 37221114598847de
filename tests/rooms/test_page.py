"""docs/rooms.md and its picture say what the folders, the files and the imports are."""

import re
import runpy
from pathlib import Path

from tests.rooms.test_rooms import MODULES, ROOMS, SOURCE, WINGS, dotted, imports, room_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "rooms.md").read_text()
PICTURE = runpy.run_path(str(ROOT / "tools" / "rooms_picture.py"))
BOXES: dict[str, tuple[float, float, float]] = PICTURE["boxes"]()
# Wings that stand side by side.
BESIDE = {"decide", "run"}


def arrows() -> set[tuple[str, str]]:
    """Each room with each other one that a file of it imports."""
    found = set()
    for module in MODULES:
        if module.parent != SOURCE and module.parent.name not in WINGS:
            room = room_of(dotted(module))
            found |= {(room, room_of(name)) for name in imports(module.read_text()) if name.startswith("crosstie.")}
    return {(one, other) for one, other in found if one != other}


def against_the_picture(arrow: tuple[str, str]) -> bool:
    """Whether an import goes up or sideways, as it is drawn."""
    room, used = arrow
    wings = room.partition(".")[0], used.partition(".")[0]
    sideways = wings[0] != wings[1] and set(wings) <= BESIDE
    return sideways or BOXES[used][1] <= BOXES[room][1]


def named_files(page: str) -> list[str]:
    return re.findall(r"`((?:src|tests|tools|docs)/[\w./-]+)`", page)


def test_the_picture_has_every_room() -> None:
    assert sorted(BOXES) == sorted(ROOMS)


def test_every_import_goes_down_in_the_picture() -> None:
    assert [arrow for arrow in sorted(arrows()) if against_the_picture(arrow)] == []


def test_an_import_against_the_picture_would_be_found() -> None:
    assert against_the_picture(("core", "perf"))
    assert against_the_picture(("run.gateway", "run.emulate"))
    assert against_the_picture(("run.service", "decide.compare"))
    assert against_the_picture(("port.preflight", "decide.plan"))
    assert not against_the_picture(("decide.plan", "port.preflight"))
    assert not against_the_picture(("run.service", "run.gateway"))


def test_the_picture_is_drawn_anew_after_a_change() -> None:
    assert (ROOT / "docs" / "img" / "rooms.svg").read_text() == PICTURE["svg"](), "make docs"


def test_the_page_has_a_line_for_every_room_from_top_to_ground() -> None:
    lines = re.findall(r"^\| `([\w/]+)` \|", PAGE, re.MULTILINE)
    assert sorted(line.replace("/", ".") for line in lines) == sorted(ROOMS)
    heights = [BOXES[line.replace("/", ".")][1] for line in lines if "/" not in line]
    assert heights == sorted(heights)


def test_files_that_the_page_names_are_there() -> None:
    assert len(named_files(PAGE)) > 30
    assert [file for file in named_files(PAGE) if not (ROOT / file).exists()] == []


def test_both_lives_have_eight_steps() -> None:
    for heading in ("The life of a request", "The life of a plan"):
        _, _, rest = PAGE.partition(f"## {heading}\n")
        assert re.findall(r"^(\d)\. ", rest.partition("\n## ")[0], re.MULTILINE) == list("12345678")


def test_nouns_are_where_their_page_says() -> None:
    nouns = (ROOT / "docs" / "nouns.md").read_text()
    for names, place in re.findall(r"^\| (`.*?`) \| .* \| `(.*)` \|$", nouns, re.MULTILINE):
        where = SOURCE / place
        text = "".join(file.read_text() for file in ([where] if where.is_file() else where.glob("*.py")))
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class {name}\b|{name} = )", text, re.MULTILINE), (name, place)
