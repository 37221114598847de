"""Prints the section of a version from CHANGELOG.md: the notes of its release.

release_notes.py 0.1.0
"""

import re
import sys
from pathlib import Path


def notes(changelog: str, version: str) -> str:
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, body = section.partition("\n")
        if heading.split(" ")[0] == version:
            return body.strip() + "\n"
    raise SystemExit(f"CHANGELOG.md has no section for {version}")


if __name__ == "__main__":
    sys.stdout.write(notes((Path(__file__).parents[1] / "CHANGELOG.md").read_text(encoding="utf-8"), sys.argv[1]))
