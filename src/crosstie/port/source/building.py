"""Build files (CMake, make), and device binaries that no AMD GPU loads."""

import re
from collections.abc import Iterator, Mapping, Sequence

from crosstie.port.source.code import also, shorten
from crosstie.port.source.hazard import Hazard
from crosstie.port.source.phrases import phrases

_BUILDS_HIP = re.compile(
    r"(?i)enable_language\s*\(\s*HIP|LANGUAGES[^)]*\bHIP\b|find_package\s*\(\s*hip\b|check_language\s*\(\s*HIP|\bhipcc\b"
)
_OF_OTHERS = re.compile(r"(?i)(?:^|/)(?:third_?party|3rd_?party|external|extern|vendor|deps|submodules|_deps)/")
_KNOWS_ROCM = re.compile(r"(?<![A-Za-z])(?:HIP|ROCM|hipcc|rocm|hip)(?![a-z])")


def hip_builds(builds: Mapping[str, str]) -> list[str]:
    """The project's own build files that ask for HIP."""
    return [
        path for path, text in builds.items() if _BUILDS_HIP.search(_uncommented(text)) and not _OF_OTHERS.search(path)
    ]


def _uncommented(text: str) -> str:
    return "\n".join(line.split("#", 1)[0] for line in text.split("\n"))


def build_hazards(path: str, text: str, hip_builds: Sequence[str] = ()) -> Iterator[Hazard]:
    """One finding a row and file; a note where the file has a side for ROCm as well, or another file is that side."""
    knows = _KNOWS_ROCM.search(_uncommented(text)) is not None
    beside = next((other for other in hip_builds if other != path), "")
    lines = _uncommented(text).split("\n")
    for phrase in phrases("build"):
        assert phrase.pattern is not None
        places = [number for number, line in enumerate(lines, 1) if phrase.pattern.search(line)]
        if not places:
            continue
        aside = "; the file speaks of ROCm too, so this may be one side of two" if knows else ""
        if beside and not knows:
            aside = f"; {beside} builds for HIP, so this may be one side of two"
        yield Hazard(
            check=phrase.id,
            severity="note" if knows or beside else phrase.severity,
            what=phrase.says + aside,
            file=path,
            line=places[0],
            evidence=shorten(text.split("\n")[places[0] - 1]) + also(places[1:]),
            remedy=phrase.remedy,
            on=phrase.on,
        )


def binary_hazard(path: str, size: int) -> Hazard:
    return Hazard(
        check="device-binary",
        severity="error",
        what="device code of NVIDIA, which no AMD GPU loads",
        file=path,
        line=None,
        evidence=f"{size:,} bytes of {path.rsplit('.', 1)[-1]}",
        remedy="build it from source with hipcc --genco --offload-arch=gfx942, or leave it out",
    )
