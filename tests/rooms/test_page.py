"""docs/rooms.md and its picture say what the folders, the files and the imports are."""

import re
import runpy
from pathlib import Path

from tests.packages import ROOT, SOURCES
from tests.rooms.test_rooms import LISTS, MODULES, ROOMS, dotted, inside, named_rooms, room_of

PAGE = (ROOT / "docs" / "rooms.md").read_text()
PICTURE = runpy.run_path(str(ROOT / "tools" / "rooms_picture.py"))
# Of all three pictures, by the names that rooms have in the tests.
BOXES: dict[str, tuple[float, float, float]] = {
    room if package == "crosstie" else f"{package}.{room}": box
    for package in LISTS
    for room, box in PICTURE["boxes"](package).items()
}


def arrows() -> set[tuple[str, str]]:
    """Each room with each other one that a file of it imports."""
    found = set()
    for module in inside():
        room = room_of(dotted(module))
        found |= {(room, used) for used in named_rooms(module.read_text()) if used != room}
    return found


def package_of(room: str) -> str:
    first = room.partition(".")[0]
    return first if first in LISTS else "crosstie"


def against_the_picture(arrow: tuple[str, str]) -> bool:
    """Whether an import goes up or sideways, as it is drawn, or to a package that this one does not stand on."""
    room, used = arrow
    if package_of(room) != package_of(used):
        return package_of(used) != "crosstie"
    return BOXES[used][1] <= BOXES[room][1]


def named_files(page: str) -> list[str]:
    return re.findall(r"`((?:src|packages|tests|tools|docs)/[\w./-]+)`", page)


def test_the_picture_has_every_room() -> None:
    assert sorted(BOXES) == sorted(ROOMS)


def test_every_import_goes_down_in_the_picture() -> None:
    assert [arrow for arrow in sorted(arrows()) if against_the_picture(arrow)] == []


def test_an_import_against_the_picture_would_be_found() -> None:
    assert against_the_picture(("core", "perf"))
    assert against_the_picture(("port.preflight", "decide.plan"))
    assert against_the_picture(("crosstie_gateway.gateway", "crosstie_gateway.emulate"))
    assert against_the_picture(("crosstie_gateway.service", "crosstie_port.kernels"))
    assert against_the_picture(("cli", "crosstie_gateway.wire"))
    assert not against_the_picture(("decide.plan", "port.preflight"))
    assert not against_the_picture(("crosstie_gateway.service", "crosstie_gateway.gateway"))
    assert not against_the_picture(("crosstie_gateway.wire", "cli"))


def test_the_pictures_are_drawn_anew_after_a_change() -> None:
    for package in LISTS:
        file = ROOT / "docs" / "img" / PICTURE["file_name"](package)
        assert file.read_text() == PICTURE["svg"](package), "make docs"
        assert f"](img/{file.name})" in PAGE


def test_the_page_says_how_large_each_package_is() -> None:
    said = dict(re.findall(r"^\| .* \| `([\w/]+)` \| ([\d,]+) \| `make test PKG=\w+` \|$", PAGE, re.MULTILINE))
    lines = dict.fromkeys(SOURCES, 0)
    for module in MODULES:
        lines[dotted(module).partition(".")[0]] += module.read_text().count("\n")
    assert list(said) == [str(folder.relative_to(ROOT)) for folder in SOURCES.values()]
    for (folder, number), true in zip(said.items(), lines.values(), strict=True):
        # Said in hundreds; a change that matters is said anew.
        assert abs(int(number.replace(",", "")) - true) < 0.03 * true, f"{folder}: {true:,} lines"


def test_the_page_has_a_line_for_every_room_from_top_to_ground() -> None:
    lines = re.findall(r"^\| `([\w/]+)` \|", PAGE, re.MULTILINE)
    assert sorted(line.replace("/", ".") for line in lines) == sorted(ROOMS)
    for package in LISTS:
        heights = [BOXES[room][1] for line in lines if package_of(room := line.replace("/", ".")) == package]
        assert heights == sorted(heights), package


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
        package, _, inner = place.partition("/")
        where = SOURCES[package] / inner if package in SOURCES else SOURCES["crosstie"] / place
        text = "".join(file.read_text() for file in ([where] if where.is_file() else where.glob("*.py")))
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class {name}\b|{name} = )", text, re.MULTILINE), (name, place)


def test_the_page_of_what_is_written_by_hand_counts_its_lines() -> None:
    """Within a tenth, of files that are there."""
    rows = re.findall(
        r"^\| [^|]+ \| (`[^|]+`) \| ([\d,]+) \|", (ROOT / "docs" / "by-hand.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    for named, counted in rows:
        files: list[Path] = []
        for name in re.findall(r"`([^`]+)`", named):
            # The second file of a row stands beside the first.
            places = (
                ROOT,
                *SOURCES.values(),
                *(folder.parent for folder in SOURCES.values()),
                *(one.parent for one in files[:1]),
            )
            files.append(next(place / name for place in places if (place / name).is_file()))
        lines = sum(len(file.read_text().splitlines()) for file in files)
        assert abs(int(counted.replace(",", "")) - lines) < 0.1 * lines, f"{named}: {lines:,} lines"
