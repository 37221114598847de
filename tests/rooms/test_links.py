"""Links inside the repository lead somewhere, down to the heading, and every page of the docs can be reached."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("", ".github/**/", "benchmarks/**/", "docs/**/", "examples/**/", "packages/**/")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def prose(text: str) -> str:
    """Without blocks of code, whose lines may look like headings and links."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", prose(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = again = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        number = 0
        while again in found:
            number += 1
            again = f"{name}-{number}"
        found.add(again)
    return found


def targets(page: Path) -> list[tuple[str, Path, str]]:
    """Each link of a page to this repository: as written, the file and the heading."""
    found = []
    for link in _LINK.findall(prose(page.read_text())):
        if not _ELSEWHERE.match(link):
            file, _, heading = link.partition("#")
            found.append((link, (page.parent / file).resolve() if file else page, heading))
    return found


def broken(page: Path) -> list[str]:
    return [
        link
        for link, file, heading in targets(page)
        if not file.exists() or (heading and heading not in anchors(file.read_text()))
    ]


def test_links_lead_somewhere() -> None:
    assert {str(page.relative_to(ROOT)): found for page in PAGES if (found := broken(page))} == {}


def test_every_page_of_the_docs_can_be_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            waiting += [file for _, file, _ in targets(page)]
    assert not [str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md") if page not in reached]


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# One `thing`, twice\n\n## Twice\n\n## Twice\n\n```\n## no heading\n```\n")
    page.write_text(
        "[a](other.md#one-thing-twice) [b](other.md#twice-1) [c](https://x/y#z) [d](other.md)\n"
        "[e](missing.md) [f](other.md#twice-2) [g](#here) [h](other.md#no-heading)\n```\n[i](nowhere.md)\n```\n"
    )
    assert broken(page) == ["missing.md", "other.md#twice-2", "#here", "other.md#no-heading"]
