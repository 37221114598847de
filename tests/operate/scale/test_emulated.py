"""Part of a day with real processes: a gateway, emulated replicas, `crosstie scale` with a hook, a client."""

from pathlib import Path

import pytest
from benchmarks.autoscale_emulated import COUNT, run

pytestmark = pytest.mark.slow


def test_replicas_follow_the_day_and_no_request_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_ADMIN_KEY", "")
    # The quiet hours after the busy ones of a night, a day's six hours in a minute.
    found = run("servegen-reasoning", minutes=1.0, begin_h=3.0, hours=6.0, folder=tmp_path)
    assert found.replay["failed"] == 0, found.said
    # Something was given back, after the gateway had emptied it.
    assert any(count < COUNT for _, _, count in found.course), found.said
    assert "emptied and given back" in found.said
    assert found.gpu_hours < found.fixed_gpu_hours
