"""Does the load generator bend what it measures? `crosstie bench` beside AIPerf, on engines whose pace is known.

    python benchmarks/bench_load.py --rate 500 --for 20 [--workers 4] [--aiperf PATH/bin/aiperf] [--emulate]

The engine is benchmarks/gateway/fake_backend.py: 64 pieces of text a stream, one every 20 ms, so that TPOT is 20 ms and
whatever else is seen is the client's (or the engine's: its own lateness grows when it is out of processor). With
--emulate it is one emulated H200 of `crosstie emulate`, whose own /metrics say what TTFT and TPOT were; that engine
needs a processor of its own and stands tens of requests a second. Processor time is that of all processes of the
client, start included, over its requests: so give both enough requests.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
MODEL = "llama-3.1-8b"
FLEET = """format = 1
name = "one"
[[pool]]
name = "one"
model = "llama-3.1-8b"
accelerator = "h200"
precision = "fp8"
stack = "vllm"
replicas = 1
usd_per_gpu_hour = 2.9
max_in_flight = 256
max_context = 32768
"""
WIDE = "{:<16}{:>9}{:>8}{:>16}{:>10}{:>10}{:>10}"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def started(emulate: bool, port: int, folder: Path, tokens: int) -> subprocess.Popen[str]:
    if emulate:
        (folder / "fleet.toml").write_text(FLEET)
        command = [sys.executable, "-m", "crosstie", "emulate", str(folder / "fleet.toml"), "--port", str(port)]
    else:
        command = [sys.executable, str(HERE / "gateway" / "fake_backend.py"), "--ports", str(port)]
        command += ["--chunks", str(tokens), "--interval-ms", "20"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for _ in range(600):
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return engine
        time.sleep(0.1)
    raise SystemExit("the engine did not start")


def metered(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds of processor and of the clock."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    after, ended = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    if done.returncode:
        raise SystemExit(f"{command[:3]} ended with {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, ended - began


def crosstie(url: str, given: argparse.Namespace, folder: Path, count: int) -> dict[str, float]:
    command = [sys.executable, "-m", "crosstie", "bench", url, "--model", MODEL, "--rate", str(given.rate)]
    command += ["--requests", str(count), "--input", str(given.input), "--output", str(given.output)]
    command += ["--vary", "0", "--warmup", "0", "--gpu-metrics", given.gpu_metrics, "-o", "crosstie.json"]
    command += ["--workers", str(given.workers)] if given.workers else []
    cpu, wall = metered(command, folder)
    (point,) = json.loads((folder / "crosstie.json").read_text())["endpoints"][0]["points"]
    metrics, client = point["metrics"], point["client"]
    for gpu in point["gpus"]:
        power, memory = gpu["power_w"], gpu["most_memory_bytes"]
        print(f"GPU {gpu['gpu']}: {power:.1f} W, {gpu['readings']} readings, {memory:.3g} bytes")
    return {
        "requests": point["requests"], "failed": point["failed"], "cpu": cpu, "wall": wall,
        "sending": client["cpu_s_per_request"], "late": client["late_p99_s"], "ttft": metrics["ttft_s_p50"]["value"],
        "ttft99": metrics["ttft_s_p99"]["value"], "tpot": metrics["tpot_s_p50"]["value"],
        "lag": client["lag_p99_s"], "busy": client["busy"], "senders": client["senders"],
        "rate": metrics["requests_per_s"]["value"],
    }  # fmt: skip


def aiperf(url: str, given: argparse.Namespace, folder: Path, count: int) -> dict[str, float]:
    command = [given.aiperf, "profile", "--url", url, "--model", MODEL, "--endpoint-type", "chat", "--streaming"]
    command += ["--request-rate", str(given.rate), "--request-count", str(count), "--isl", str(given.input)]
    command += ["--osl", str(given.output), "--extra-inputs", "ignore_eos:true", "--tokenizer", given.tokenizer]
    command += ["--use-server-token-count", "--ui-type", "none", "--artifact-dir", "aiperf"]
    cpu, wall = metered(command, folder)
    (file,) = folder.glob("aiperf/**/profile_export_aiperf.json")
    told = json.loads(file.read_text())
    tpot = told.get("inter_token_latency") or {}
    return {
        "requests": told["request_count"]["avg"], "cpu": cpu, "wall": wall,
        "ttft": told["time_to_first_token"]["p50"] / 1e3, "ttft99": told["time_to_first_token"]["p99"] / 1e3,
        "tpot": tpot.get("p50", float("nan")) / 1e3, "rate": told["request_throughput"]["avg"],
    }  # fmt: skip


def engine_says(port: int) -> str:
    from urllib.request import urlopen

    page = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    sums = {}
    for line in page.splitlines():
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
            for end in ("sum", "count"):
                if line.startswith(f"vllm:{name}_{end}"):
                    sums[name, end] = float(line.rsplit(" ", 1)[1])
    means = [sums[name, "sum"] / sums[name, "count"] * 1e3 for name, end in sums if end == "sum"]
    return "the engine's own means, ms: " + ", ".join(f"{one:.2f}" for one in means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--for", dest="seconds", type=float, default=20.0)
    parser.add_argument("--input", type=int, default=256)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--aiperf")
    parser.add_argument("--tokenizer", default="builtin", help="of AIPerf; a folder where there is no network")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--gpu-metrics", default="none")
    given = parser.parse_args()
    count = round(given.rate * given.seconds)
    print(f"{given.rate:g} requests/s of {given.output} tokens, {count:,} requests, {os.cpu_count()} processors")
    print(WIDE.format("", "requests", "seen/s", "CPU ms/request", "TTFT p50", "TTFT p99", "TPOT p50"))
    clients = [("crosstie bench", crosstie), *([("AIPerf", aiperf)] if given.aiperf else [])]
    for name, run in clients:
        with tempfile.TemporaryDirectory() as temporary:
            folder, port = Path(temporary), free_port()
            engine = started(given.emulate, port, folder, given.output)
            try:
                found = run(f"http://127.0.0.1:{port}", given, folder, count)
                own = ""
                if "late" in found:
                    own = f"late {found['late'] * 1e3:.1f} ms, loop late {found['lag'] * 1e3:.1f} ms (p99), "
                    own += f"{found['senders']:g} senders {found['busy']:.0%} busy, "
                    own += f"{found['sending'] * 1e3:.2f} ms CPU a request while sending, {found['failed']:g} failed"
                print(
                    WIDE.format(
                        name, f"{found['requests']:,.0f}", f"{found['rate']:.1f}",
                        f"{found['cpu'] / found['requests'] * 1e3:.2f}", f"{found['ttft'] * 1e3:.1f}",
                        f"{found['ttft99'] * 1e3:.1f}", f"{found['tpot'] * 1e3:.2f}",
                    ).rstrip()
                )  # fmt: skip
                print(f"  {own}" if own else "", end="\n" if own else "")
                if given.emulate:
                    print(f"  {engine_says(port)}")
            finally:
                engine.terminate()
                engine.wait()


if __name__ == "__main__":
    main()
