"""Chaos: requests through a gateway whose engines, clients and configuration are disturbed at random; zero lost.

    python benchmarks/chaos/run.py [--requests N] [--seed N] [--workers N] [--kill-gateway] [--json FILE]

Exit status 0: every request ended exactly once, in a whole answer, a resumed one or a clear error; usage equals what
was served; nothing leaked. 1: something did not add up, with the requests and the seed. docs/notes/chaos.md says more.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crowd import Crowd, Seen
from ground import ROOT, Ground, crosstie
from trouble import Trouble
from verdict import Told, Verdict, latencies, undisturbed

from crosstie.wire.loops import run_on_loop

# Idle connections to backends are closed after four seconds; then all that is open was open before.
_QUIET_S = 6.0
# Probes come and go: so many descriptors more than at the start are no leak. Per process.
_FILES_MORE = 12
# The middle of the last tenth of the run over that of its third tenth.
_RSS_MORE_MIB, _RSS_MORE = 24.0, 1.15
_SHOWN = 20
# Calm requests have numbers of their own, from here on.
_CALM = 10**8
# What these count must not happen at all.
_NONE_OF = ("log_dropped_total", "record_dropped_total", "record_failed", "ledger_pending", "ledger_failures_total")


class Phase:
    """One stretch of load, calm or not, and the memory of the gateway during it."""

    def __init__(self, ground: Ground, secrets: dict[str, str], references: dict[tuple[bool, str], str]):
        self.ground, self.secrets, self.references = ground, secrets, references
        self.rss_mib: list[float] = []

    async def run(
        self, options: argparse.Namespace, first: int, requests: int, trouble: Trouble | None, title: str
    ) -> tuple[list[Seen], float]:
        crowd = Crowd(
            self.ground.gateway.port, self.secrets, self.references, first=first, requests=requests,
            seed=options.seed,
            local_share=options.local_share if self.references else 0.0, connections=options.connections,
            deadline=time.monotonic() + 60 * options.minutes,
            killed=trouble.gateway_killed if trouble else lambda start, end: False,
        )  # fmt: skip
        began = time.monotonic()
        disturbing = asyncio.create_task(trouble.run()) if trouble else None
        watching = asyncio.create_task(self._watch(crowd, trouble, title))
        try:
            await crowd.run()
        finally:
            took = time.monotonic() - began
            for task in (disturbing, watching):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
        return crowd.seen, took

    async def _watch(self, crowd: Crowd, trouble: Trouble | None, title: str) -> None:
        terminal, began = sys.stderr.isatty(), time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(OSError):
                self.rss_mib.append(self.ground.gateway.rss_mib())
            if terminal:
                done, lost = len(crowd.seen), sum(one.how == "lost" and one.ended > 0 for one in crowd.seen)
                filled = 30 * done // crowd.requests
                troubles = sum(trouble.counts.values()) if trouble else 0
                sys.stderr.write(
                    f"\r{title} [{'#' * filled}{'.' * (30 - filled)}] {done:,} of {crowd.requests:,}, "
                    f"{done / (time.monotonic() - began):.0f}/s, {troubles} troubles, {lost} lost "
                )


async def quiet(ground: Ground) -> dict[str, float]:
    """The gateway's gauges once nothing is left to do, or after a minute."""
    deadline = time.monotonic() + 60
    while True:
        await asyncio.sleep(1.0)
        found = await asyncio.to_thread(ground.gateway.metrics)
        busy = sum(found.get(f"crosstie_{name}", 0.0) for name in ("exchanges", "in_flight", "queued"))
        if not busy or time.monotonic() > deadline:
            await asyncio.sleep(_QUIET_S)
            return await asyncio.to_thread(ground.gateway.metrics)


async def chaos(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    ground = Ground(
        folder, speed=options.speed, command=options.crosstie, workers=options.workers,
        local=options.local_share > 0, replicas=options.replicas,
    )  # fmt: skip
    verdict = Verdict()
    try:
        secrets = await asyncio.to_thread(ground.start)
        # Before the first request: probes of backends are all that is open.
        files = ground.gateway.files()
        references = await asyncio.to_thread(ground.references)
        calm_phase = Phase(ground, secrets, references)
        calm_requests = max(options.requests // 20, 100)
        calm, calm_s = await calm_phase.run(options, _CALM, calm_requests, None, "calm ")
        trouble = Trouble(
            ground, options.seed, gap_s=options.gap, speed=options.speed, kill_gateway=options.kill_gateway
        )
        phase = Phase(ground, secrets, references)
        seen, took = await phase.run(options, 0, options.requests, trouble, "chaos")
        gauges = await quiet(ground)
        files_after = ground.gateway.files()
        status = await asyncio.to_thread(ground.gateway.end)
    finally:
        ground.stop()
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    told = Told(ground.gateway.log)
    _check_leaks(verdict, gauges, files, files_after, phase.rss_mib, options)
    verdict.check(status == 0, f"the gateway ended with status {status}")
    for line in told.complaints:
        verdict.problems.append(f"the gateway's log: {line}")
    verdict.problems += [f"the harness: {failure}" for failure in trouble.failures]
    verdict.each_ended_once([*seen, *calm], told, killed=options.kill_gateway)
    if not options.kill_gateway:
        verdict.innocent_are_served(seen)
    store = folder / "usage.db"
    usage = (
        verdict.store_within_bounds(store, [*seen, *calm], trouble.downs)
        if options.kill_gateway
        else verdict.store_equals_log(store, told)
    )
    lines = [line for found in told.requests.values() for line in found]
    ends = Counter(one.how for one in seen)
    return {
        "requests": len(seen),
        "seed": options.seed,
        "workers": options.workers,
        "seconds": round(took, 1),
        "requests_per_s": round(len(seen) / took, 1),
        "lost": ends["lost"],
        "ends": dict(ends.most_common()),
        "resumed": sum(line["resumed"] > 0 for line in lines),
        "tried again": sum(line["attempts"] > 1 for line in lines),
        "errors": dict(Counter(f"{one.status} {one.code}" for one in seen if one.how == "error").most_common()),
        "troubles": dict(trouble.counts.most_common()),
        "troubles_in_all": sum(trouble.counts.values()),
        "undisturbed": latencies(undisturbed(seen, told, trouble.windows)),
        "calm": latencies(undisturbed(calm, told, {})),
        "calm_requests_per_s": round(len(calm) / calm_s, 1),
        "usage": usage,
        "files": {"before": files, "after": files_after},
        "rss_mib": _rss(phase.rss_mib),
        "recorded": _recorded(ground.gateway.record),
        "log_events": {name: n for name, n in told.events.most_common() if name != "request"},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "problems": verdict.problems,
    }


def _check_leaks(
    verdict: Verdict, gauges: dict[str, float], files: int, files_after: int, rss: list[float],
    options: argparse.Namespace,
) -> None:  # fmt: skip
    for name in ("exchanges", "in_flight", "queued"):
        left = gauges.get(f"crosstie_{name}", 0.0)
        verdict.check(left == 0.0, f"crosstie_{name} is {left:g} after the last request")
    for name in _NONE_OF:
        value = gauges.get(f"crosstie_{name}", 0.0)
        verdict.check(value == 0.0, f"crosstie_{name} is {value:g}")
    more = _FILES_MORE * options.workers
    verdict.check(files_after <= files + more, f"{files_after} open files at the end, {files} before the chaos")
    found = _rss(rss)
    if found and not options.kill_gateway:
        grown = found["last_tenth"] - found["third_tenth"]
        bad = grown > _RSS_MORE_MIB and found["last_tenth"] > _RSS_MORE * found["third_tenth"]
        verdict.check(not bad, f"memory grew from {found['third_tenth']} to {found['last_tenth']} MiB")


def _rss(samples: list[float]) -> dict[str, float]:
    if len(samples) < 20:
        return {}
    tenth = len(samples) // 10
    third, last = sorted(samples[2 * tenth : 3 * tenth]), sorted(samples[-tenth:])
    return {
        "start": round(samples[0], 1), "third_tenth": round(third[len(third) // 2], 1),
        "last_tenth": round(last[len(last) // 2], 1), "most": round(max(samples), 1),
    }  # fmt: skip


def _recorded(record: Path) -> int:
    """Lines of the recording, in all its files; each must be JSON."""
    lines = 0
    for file in record.parent.glob(record.name + "*"):
        if file.suffix not in (".lock", ".salt"):
            for line in file.read_text().splitlines():
                json.loads(line)
                lines += 1
    return lines


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            sys.exit(f"{keep}: is not empty; a run begins with a store and a log of its own")
        yield keep
        return
    made = Path(tempfile.mkdtemp(prefix="crosstie-chaos-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def main() -> int:
    about = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    about.add_argument("--requests", type=int, default=100_000)
    about.add_argument("--seed", type=int, default=1)
    about.add_argument("--minutes", type=float, default=30.0, help="no request is begun after so long")
    about.add_argument("--connections", type=int, default=48)
    about.add_argument("--workers", type=int, default=1, help="processes of the gateway")
    about.add_argument("--replicas", type=int, default=3, help="of each of the two emulated pools")
    about.add_argument("--speed", type=float, default=3.0, help="of the emulated engines")
    about.add_argument("--gap", type=float, default=0.7, help="mean seconds between two troubles")
    about.add_argument("--local-share", type=float, default=0.003, help="of the requests to llama.cpp; 0: none")
    about.add_argument("--kill-gateway", action="store_true", help="kill -9 it too; usage is then held to bounds")
    about.add_argument("--crosstie", type=Path, help="another crosstie command, such as a compiled one, to serve with")
    about.add_argument("--keep", type=Path, help="a folder for logs, store and fleet file, which stays")
    about.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "chaos.json")
    options = about.parse_args()
    options.crosstie = [str(options.crosstie)] if options.crosstie else crosstie()
    with _folder(options.keep) as folder:
        result = run_on_loop(chaos(options, folder))
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    problems = result.pop("problems")
    print(json.dumps(result, indent=2))
    for problem in problems[:_SHOWN]:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{len(problems)} problems with --seed {options.seed}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
