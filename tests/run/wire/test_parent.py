"""Children that end with their parent, and in order if they end before it."""

import subprocess
import sys

import pytest

_CHILD = """
import asyncio
from crosstie_gateway.wire.child import when_orphaned

async def main(ends_by_itself):
    ended = asyncio.Event()
    when_orphaned(asyncio.get_running_loop(), ended.set)
    print("ready", flush=True)
    if ends_by_itself:
        await asyncio.sleep(0.2)
    else:
        await ended.wait()

asyncio.run(main({ends_by_itself}))
print("done")
"""


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_a_child_ends_in_order_whoever_ends_first(ends_by_itself: bool) -> None:
    script = _CHILD.format(ends_by_itself=ends_by_itself)
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    assert child.stdout.readline() == b"ready\n"
    if not ends_by_itself:
        child.stdin.write(b"not a reason to end")
        child.stdin.close()
    # Its parent's end stays open otherwise.
    said, complaints = child.stdout.read(), child.stderr.read()
    assert (child.wait(60), said, complaints) == (0, b"done\n", b"")
    for pipe in (child.stdin, child.stdout, child.stderr):
        pipe.close()
