"""What a machine says of itself, as texts by name: outputs of its tools, files of /proc and /sys, facts of its own.

Python's library alone, so that a machine without Crosstie can be recorded from the source tree:

    PYTHONPATH=src python3 -m crosstie.port.doctor.record FOLDER

Serial numbers, UUIDs, process lists and the boot line's names of disks and hosts are left out: a record can be shared.
"""

import glob
import grp
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from crosstie.core.errors import BadData, BadInput

Record = dict[str, str]

FACTS = "facts.json"
_COMMANDS = "commands/"
_FILES = "files/"
COMMANDS: dict[str, tuple[str, ...]] = {
    "amd-smi-static.json": ("amd-smi", "static", "--json"),
    "amd-smi-topology.json": ("amd-smi", "topology", "--json"),
    "amd-smi-version.json": ("amd-smi", "version", "--json"),
    "rocminfo.txt": ("rocminfo",),
    "nvidia-smi.xml": ("nvidia-smi", "-q", "-x"),
    "nvidia-smi-isa.csv": ("nvidia-smi", "--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"),
    "nvidia-smi-topo.txt": ("nvidia-smi", "topo", "-m"),
    "llama-server.txt": ("llama-server", "--version"),
}
# Where vendors put their tools without putting them on the path.
_MORE_PATH = ("/opt/rocm/bin", "/usr/local/nvidia/bin", "/usr/lib/wsl/lib")
_PATIENCE_S = 60.0
# An engine with PyTorch and its kernels, from a cold disk.
_IMPORT_S = 120.0
NO_ANSWER = "no answer within"
_KFD = "sys/class/kfd/kfd/topology/nodes/*"
_CGROUP = "sys/fs/cgroup"
FILES = (
    "proc/cmdline", "proc/meminfo", "proc/modules", "proc/self/status",
    "proc/sys/kernel/numa_balancing", "proc/driver/nvidia/version", "etc/os-release", "opt/rocm/.info/version",
    "usr/local/cuda/version.json", "sys/module/amdgpu/version", "sys/kernel/mm/transparent_hugepage/enabled",
    "sys/devices/system/node/online", f"{_KFD}/properties", f"{_KFD}/io_links/*/properties",
    f"{_KFD}/p2p_links/*/properties", f"{_KFD}/mem_banks/*/properties", "sys/class/infiniband/*/ports/*/state",
    "sys/class/infiniband/*/ports/*/rate", "sys/class/infiniband/*/ports/*/link_layer",
    "sys/class/net/*/operstate", "sys/class/net/*/speed",
    f"{_CGROUP}/memory.max", f"{_CGROUP}/cpu.max", f"{_CGROUP}/pids.max",
    f"{_CGROUP}/memory/memory.limit_in_bytes", f"{_CGROUP}/cpu/cpu.cfs_quota_us", f"{_CGROUP}/cpu/cpu.cfs_period_us",
    f"{_CGROUP}/pids/pids.max",
)  # fmt: skip
_PCI = "sys/bus/pci/devices"
# Display controllers, and accelerators that drive no display.
_GPU_CLASSES = ("0x03", "0x12")
_OF_GPU = (
    "vendor", "device", "revision", "class", "numa_node", "current_link_width", "max_link_width",
    "current_compute_partition", "current_memory_partition", "mem_info_vram_total", "mem_info_vram_used",
    "iommu_group/type",
)  # fmt: skip
_DEVICES = ("/dev/dxg", "/dev/kfd", "/dev/dri/renderD*", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia[0-9]*",
            "/dev/infiniband/uverbs*")  # fmt: skip
_LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "stack": resource.RLIMIT_STACK}
# What images say of themselves is no setting.
_VARIABLES = re.compile(
    r"(?!NVIDIA_(REQUIRE|PRODUCT)|(CUDA|NCCL|ROCM)_VERSION)(HIP|HSA|ROCR|ROCM|ROC|AMD|GPU|CUDA|NVIDIA|NCCL|RCCL|UCX|VLLM|SGLANG|AITER|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|"
    r"MIOPEN|GGML|LLAMA|OMP|RAY)_\w+|KUBERNETES_SERVICE_HOST"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD|CREDENTIAL|KUBERNETES|_HOST|_ADDR|_IP$|URL|ENDPOINT")
_HIDDEN = "hidden"
_COLON = "%3A"
_BOOT = re.compile(r"^(\w*iommu|pci|amdgpu|nvidia|\w*hugepage|numa_balancing|isolcpus|module_blacklist)")
# What tells one machine from another, in each format.
_IDENTITY: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(<(\w*(?:serial|uuid|guid|part_number|pdi|board_id|host_id|module_id)\w*)>)[^<]*", re.I),
     rf"\1{_HIDDEN}"),
    (re.compile(r"<(processes|supported_clocks|accounted_processes)>.*?</\1>", re.S), r"<\1></\1>"),
    (re.compile(r'("(?:\w*serial\w*|uuid|unique_id|fru_id|\w*hostname)": *)"[^"]*"'), rf'\1"{_HIDDEN}"'),
    (re.compile(r"^(\s*Uuid:\s+[A-Z]+-)\w+", re.M), r"\1XX"),
    (re.compile(r"^((?:unique_id|hive_id) )\d+", re.M), r"\g<1>0"),
)  # fmt: skip


def capture(python: str | None = None, tries_engines: bool = False) -> Record:
    """This machine, now. `python`: the interpreter whose packages count; this one by default. `tries_engines`: whether
    those that are installed are imported, which takes a while."""
    python = python or sys.executable
    facts = _facts(python)
    if tries_engines:
        facts["imports"] = {name: _imported(python, name) for name in facts.get("requires", {})}
    record = {FACTS: json.dumps(facts, indent=1) + "\n"}
    for name, argv in COMMANDS.items():
        record |= {f"{_COMMANDS}{key}": text for key, text in _run(name, argv).items()}
    of_gpus = (f"{_PCI}/{folder.name}/{name}" for folder in _gpu_folders() for name in _OF_GPU)
    for name in (*_files(), *of_gpus):
        if text := _text(Path("/") / name):
            record[f"{_FILES}{name}"] = text
    record |= {f"{_FILES}{name}": text for name, text in _own_cgroup().items()}
    record |= {f"{_FILES}{name}/driver": driver for name, driver in _drivers().items()}
    iommus = sorted(path.name for path in Path("/sys/class/iommu").glob("*"))
    record[f"{_FILES}sys/class/iommu"] = "\n".join(iommus)
    for key, less in _LESS.items():
        record[f"{_FILES}{key}"] = less(record.get(f"{_FILES}{key}", ""))
    return {name: anonymous(text) for name, text in record.items()}


def anonymous(text: str) -> str:
    for pattern, instead in _IDENTITY:
        text = pattern.sub(instead, text)
    return text


# What is kept of a file that says more than doctor asks.
_LESS: dict[str, Callable[[str], str]] = {
    "proc/cmdline": lambda text: " ".join(filter(_BOOT.match, text.split())),
    "proc/self/status": lambda text: "\n".join(
        line for line in text.splitlines() if line.startswith(("Seccomp", "Cap"))
    ),
    # Names, without the addresses that the kernel has modules at.
    "proc/modules": lambda text: "\n".join(line.split()[0] for line in text.splitlines() if line.strip()),
}


def write_record(record: Mapping[str, str], folder: Path) -> None:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadInput(f"{folder}: is there already; a record goes into a new folder")
        for name, text in record.items():
            # A colon, as in the name of a PCI device, is no part of a name everywhere.
            file = folder / name.replace(":", _COLON)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    except OSError as error:
        raise BadInput(f"{folder}: cannot be written: {error.strerror}") from None


def read_record(folder: Path) -> Record:
    if not (folder / FACTS).is_file():
        raise BadInput(f"{folder}: no record of a machine: it has no {FACTS}; `crosstie doctor --record` writes one")
    found: Record = {}
    for part in (FACTS, "commands", "files"):
        start = folder / part
        for file in [start] if start.is_file() else sorted(path for path in start.rglob("*") if path.is_file()):
            try:
                found[file.relative_to(folder).as_posix().replace(_COLON, ":")] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise BadData(file, "", f"cannot be read: {error}") from None
    return found


def _run(name: str, argv: tuple[str, ...]) -> Record:
    """What a tool printed, or why it printed nothing; nothing where there is no such tool."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_MORE_PATH))
    program = shutil.which(argv[0], path=path)
    if program is None:
        return {}
    try:
        done = subprocess.run([program, *argv[1:]], capture_output=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return {f"{name}.error": f"no answer in {_PATIENCE_S:.0f} s"}
    except OSError as error:
        return {f"{name}.error": str(error.strerror)}
    out, said = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    if done.returncode:
        last = (said.strip() or out.strip()).splitlines()[-1:]
        return {f"{name}.error": f"exit status {done.returncode}: {' '.join(last)[:300]}"}
    # llama-server tells its version on stderr.
    return {name: out if out.strip() else said}


def _files() -> Iterable[str]:
    for pattern in FILES:
        for path in sorted(glob.glob(f"/{pattern}")):
            if "/class/net/" not in path or Path(path).parent.joinpath("device").exists():
                yield path[1:]


def _gpu_folders() -> list[Path]:
    folders = sorted(Path(f"/{_PCI}").glob("*"))
    return [folder for folder in folders if _text(folder / "class").startswith(_GPU_CLASSES)]


def _drivers() -> dict[str, str]:
    paths = {folder.name: folder / "driver" for folder in _gpu_folders()}
    return {f"{_PCI}/{name}": link.resolve().name for name, link in paths.items() if link.exists()}


def _own_cgroup() -> Record:
    """The limits of a service or a job stand in its own group and in those above it, which are numbered: their names
    would tell whose they are."""
    found: Record = {}
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        number, _, path = line.partition("::")
        if number == "0" and path not in ("", "/"):
            for level, above in enumerate((Path(path), *Path(path).parents[:-1])):
                for name in ("memory.max", "cpu.max", "pids.max"):
                    if text := _text(Path(f"/{_CGROUP}{above}/{name}")):
                        found[f"{_CGROUP}/{level}/{name}"] = text
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _facts(python: str) -> dict[str, Any]:
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    marks = [mark for mark in ("/.dockerenv", "/run/.containerenv", "/.singularity.d") if os.path.exists(mark)]
    variables = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}
    return {
        "taken": f"{datetime.now(UTC):%Y-%m-%d}",
        "system": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "uid": os.getuid(),
        "groups": sorted({os.getgid(), *os.getgroups()}),
        "shm_bytes": shm.f_frsize * shm.f_blocks if shm else None,
        "limits": {name: resource.getrlimit(which)[0] for name, which in _LIMITS.items()},
        "devices": {path: _device(path) for pattern in _DEVICES for path in sorted(glob.glob(pattern))},
        "container": marks,
        "environment": {name: _HIDDEN if _SECRET.search(name) else value for name, value in variables.items()},
        **_packages(python),
    }


def _device(path: str) -> dict[str, Any]:
    held = os.stat(path)
    try:
        group = grp.getgrgid(held.st_gid).gr_name
    except KeyError:
        group = ""
    return {
        "mode": f"{held.st_mode & 0o777:o}", "gid": held.st_gid, "group": group,
        "open": os.access(path, os.R_OK | os.W_OK),
    }  # fmt: skip


def _packages(python: str) -> dict[str, Any]:
    """By a process of its own: the interpreter may be that of another environment."""
    script = Path(__file__).with_name("packages.py")
    try:
        done = subprocess.run([python, str(script)], capture_output=True, timeout=_PATIENCE_S, check=True, text=True)
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise BadInput(f"{python}: is no Python that tells its packages: {str(error)[:200]}") from None
    return found


def _imported(python: str, name: str) -> str:
    """What is wrong with an engine that cannot be imported, its last line; "" where it can."""
    script = Path(__file__).with_name("packages.py")
    try:
        done = subprocess.run([python, str(script), name], capture_output=True, timeout=_IMPORT_S, text=True)
    except subprocess.TimeoutExpired:
        return f"{NO_ANSWER} {_IMPORT_S:.0f} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines or [f"status {done.returncode}"])[-1][:300]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder that the record goes into")
    write_record(capture(tries_engines=True), Path(sys.argv[1]))
