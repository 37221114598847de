"""Converts as the command does, and kills itself with the n-th call that touches a file: `killed.py MODEL OUT N JOBS`.

With N of 0 it lives, and prints how many such calls there were.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crosstie.port.checkpoint.index import open_checkpoint
from crosstie_port.checkpoint import convert as converting
from crosstie_port.checkpoint.conversion import plan_conversion

source, out, last, jobs = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
calls = 0


def counted(real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        global calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given, **named)

    return call


for owner, name in (
    (os, "open"), (os, "pwrite"), (os, "preadv"), (os, "replace"), (os, "mkdir"), (shutil, "copyfile"),
    (Path, "unlink"), (Path, "write_bytes"), (Path, "mkdir"),
):  # fmt: skip
    setattr(owner, name, counted(getattr(owner, name)))
# However small it is: several processes if they are asked for.
converting._WORTH_PROCESSES = 1
plan = plan_conversion(open_checkpoint(source), "e4m3fnuz")
converting.run_conversion(plan, out, jobs=jobs)
print(calls)
