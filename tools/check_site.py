"""Follows every link of the built site: pages, files and headings. Those that lead nowhere: a line each, and status 1.

check_site.py site
"""

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.links.append(value)
            elif key in ("id", "name") and value:
                self.names.add(value)


@cache
def _read(file: Path) -> _Page:
    return _Page(file.read_text(encoding="utf-8"))


def broken(site: Path) -> list[str]:
    """Page and link of each that leads nowhere, or out of the site to something that a reader would have to load."""
    found = []
    for file in sorted(site.rglob("*.html")):
        for link in _read(file).links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            # The page of errors is served at any address, so its links begin at the root.
            if parts.path.startswith("/"):
                target = site / unquote(parts.path).lstrip("/")
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{file.relative_to(site)}: {link}")
            elif parts.fragment and target.suffix == ".html":
                name = unquote(parts.fragment)
                if name != "__tabbed" and name not in _read(target).names:
                    found.append(f"{file.relative_to(site)}: {link}")
    return found


if __name__ == "__main__":
    lost = broken(Path(sys.argv[1]).resolve())
    sys.stderr.writelines(f"{line}\n" for line in lost)
    sys.exit(bool(lost))
