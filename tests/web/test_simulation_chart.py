"""The picture of sessions at several loads."""

from pathlib import Path

import msgspec
import pytest
from tests.sim.test_sessions import run

from crosstie.web.simulation_chart import has_knee, knee_picture


@pytest.mark.slow
def test_sessions_at_several_loads_are_drawn(tmp_path: Path) -> None:
    runs = [run(live, turns=100) for live in (10, 20)]
    assert not has_knee(runs)
    runs[1] = msgspec.structs.replace(runs[1], load=2.0)
    assert has_knee(runs)
    knee_picture(runs).draw(tmp_path / "knee.svg")
    assert (tmp_path / "knee.svg").stat().st_size > 5000
