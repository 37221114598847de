"""Console blocks of the README and the docs as the commands print them now.

    python tools/refresh_blocks.py [PAGE...]        without pages: all but the tutorials

A block shows some lines of an output, `...` for those left out. Each shown line is looked for in the new output, its
figures aside; the block then shows the same lines as they are now. What is not found again is told and left as it
was. Read the difference before you commit it.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from difflib import SequenceMatcher
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "library").glob("*.md"))]


def printed(command: str, folder: str) -> list[str]:
    env = {**os.environ, "CROSSTIE_CATALOG": folder, "COLUMNS": "80"}
    words = [sys.executable, "-m", *shlex.split(command)]
    got = subprocess.run(words, capture_output=True, text=True, env=env, cwd=ROOT)
    return [line.rstrip() for line in (got.stdout + got.stderr).splitlines()]


def alike(line: str, other: str) -> float:
    """How much two lines say the same, whatever their figures and widths."""
    one, two = (" ".join(re.sub(r"[\d.,]+", "#", text).split()) for text in (line, other))
    return SequenceMatcher(None, one, two, autojunk=False).ratio()


def refreshed(shown: list[str], now: list[str]) -> list[str] | None:
    """The shown lines as they are now; None where one of them is not found again, in order."""
    found: list[str] = []
    at = 0
    for line in shown:
        if not line.strip() or line == "...":
            found.append(line)
            continue
        # The next line as it is comes first; otherwise the most alike of those to come.
        rest = now[at:]
        if not rest:
            return None
        best = rest.index(line) if line in rest else max(range(len(rest)), key=lambda i: (alike(line, rest[i]), -i))
        if alike(line, rest[best]) < 0.6:
            return None
        skipped = [text for text in rest[:best] if text.strip()]
        if skipped and found and found[-1] != "..." and found[-1].strip():
            # Lines that have come in between are shown: the block said that nothing was left out here.
            found += rest[:best]
        found.append(rest[best])
        at += best + 1
    return found


def main(pages: list[Path]) -> int:
    lost = 0
    for page in pages:
        text = page.read_text()
        for body in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
            new = ""
            for part in re.split(r"^(?=\$ )", body, flags=re.MULTILINE):
                if not part.startswith("$ "):
                    new += part
                    continue
                command, _, shown = part[2:].partition("\n")
                with tempfile.TemporaryDirectory() as folder:
                    now = printed(command, folder)
                lines = refreshed([line.rstrip() for line in shown.splitlines()], now)
                if lines is None:
                    lost += 1
                    print(f"{page.relative_to(ROOT)}: `{command}` does not print all that is shown; now:")
                    print("\n".join("    " + line for line in now))
                    new += part
                else:
                    new += f"$ {command}\n" + "".join(line + "\n" for line in lines)
            text = text.replace(body, new)
        if text != page.read_text():
            page.write_text(text)
            print(f"{page.relative_to(ROOT)}: refreshed")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]] or PAGES))
