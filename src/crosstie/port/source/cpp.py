"""Everything that is looked for in one C++ file of a project."""

from collections.abc import Sequence

from crosstie.port.source.architecture import architecture_hazards
from crosstie.port.source.assembly import assembly_hazards
from crosstie.port.source.code import Code, streams
from crosstie.port.source.hazard import Hazard
from crosstie.port.source.lanes import lane_hazards, macro_sizes
from crosstie.port.source.launches import launch_hazards
from crosstie.port.source.masks import mask_hazards
from crosstie.port.source.names import name_hazards
from crosstie.port.source.project import Project
from crosstie.port.source.shared import shared_hazards


def cpp_hazards(path: str, project: Project) -> list[Hazard]:
    return hazards_in(path, streams(path, project))


def hazards_in(path: str, codes: Sequence[Code]) -> list[Hazard]:
    """`codes`: the file's own code first, then the bodies of its macros."""
    found = [*macro_sizes(codes[0]), *architecture_hazards(codes[0]), *name_hazards(path, codes)]
    for code in codes:
        for rule in (lane_hazards, mask_hazards, assembly_hazards, shared_hazards, launch_hazards):
            found += rule(code)
    project = codes[0].project
    return [one for one in found if one.on != "wave64" or not project.left_out_on_gfx9(path, one.line or 0)]
