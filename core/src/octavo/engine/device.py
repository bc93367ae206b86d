"""Facts of the machine: which device, what it can do, what memory and cores others leave to us.

Owns the reading of /proc, /sys, cgroups and the CUDA driver. Decides nothing about models, allocates
nothing, and never imports torch for a CPU.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from octavo.catalog import Device
from octavo.engine.threads import CpuMeter
from octavo.errors import ConfigError

CPU_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
    "sve",
)
"""CPU flags that a kernel may ask for, spelt as Linux spells them (`bf16` and `i8mm` are Arm's)."""

BF16_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Any of these multiplies bfloat16 in hardware."""

NVIDIA_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of the machine's, and why it is that."""

    device: Device
    reason: str


def choose_device(asked: str) -> Choice:
    """The device for `asked` ("auto", "cpu" or "cuda"). ConfigError if CUDA is asked for and absent."""
    if asked == "cpu":
        return Choice(cpu_device(), "named in the configuration")
    if asked == "auto" and not has_nvidia_driver():
        return Choice(cpu_device(), "no NVIDIA driver on this machine")
    missing = missing_cuda()
    if not missing:
        return Choice(cuda_device(), "named in the configuration" if asked == "cuda" else "torch sees a CUDA device")
    if asked == "cuda":
        raise ConfigError(f"--device cuda: {missing}. Use --device cpu, or `octavo doctor` to see what this machine has.")
    return Choice(cpu_device(), f"there is an NVIDIA driver, but {missing}")


# ---------------------------------------------------------------- CPU


def cpu_device() -> Device:
    """Facts of the CPU; free_memory is what this process could still take, cgroup limit respected."""
    total, free = cpu_memory()
    return Device(type="cpu", name=cpu_name(), memory=total, free_memory=free, features=cpu_features())


def cpu_features(cpuinfo: str | None = None) -> frozenset[str]:
    """Those of CPU_FEATURES that the first processor of /proc/cpuinfo lists; empty where there is no such file."""
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split()) & frozenset(CPU_FEATURES)
    return frozenset()


def cpu_name(cpuinfo: str | None = None) -> str:
    text = _read("/proc/cpuinfo") if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def cpu_memory() -> tuple[int, int]:
    """(total, free) bytes: the machine's, or the tightest cgroup's where that is less. free is what
    neither this process nor any other holds, page cache counted as free."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    for limit, used in cgroup_memory():
        total = min(total, limit)
        free = min(free, max(limit - used, 0))
    return total, free


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> list[tuple[int, int]]:
    """(limit, used without reclaimable file pages) in bytes of every cgroup, v1 or v2, that bounds this process."""
    found = []
    for folder, v2 in _cgroups(root, "memory", membership):
        limit = _number(folder / ("memory.max" if v2 else "memory.limit_in_bytes"))
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes"))
        if limit is None or used is None or limit >= 1 << 60:  # v1 writes "no limit" as a huge number
            continue
        stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
        reclaimable = int(stat.get("inactive_file" if v2 else "total_inactive_file", 0))
        found.append((limit, max(used - reclaimable, 0)))
    return found


def cgroup_cores(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> float | None:
    """CPU quota in cores of the tightest cgroup, None without one."""
    quotas = []
    for folder, v2 in _cgroups(root, "cpu", membership):
        if v2:
            quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        else:
            quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota not in ("max", "", "-1"):
            quotas.append(int(quota) / int(period or "100000"))
    return min(quotas, default=None)


def _cgroups(root: Path, controller: str, membership: str | None) -> list[tuple[Path, bool]]:
    """This process's cgroup folders for a controller and their ancestors, with whether they are v2. Inside a
    container the path in /proc/self/cgroup may not exist: the root then stands for the container's own."""
    text = _read("/proc/self/cgroup") if membership is None else membership
    folders: dict[Path, bool] = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        v2 = number == "0" and controllers == ""
        if not v2 and controller not in controllers.split(","):
            continue
        base = root if v2 else root / controller
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder.is_dir():
                folders[folder] = v2
            if folder == base:
                break
    return list(folders.items())


# ---------------------------------------------------------------- threads


@dataclass(frozen=True, slots=True)
class Threads:
    """How many CPU threads to compute with, and why; cores is the most that this process may use."""

    count: int
    reason: str
    cores: int = 1


def spare_threads(asked: int | None = None, *, sample: float = 0.1) -> Threads:
    """Threads that this machine can spare: physical cores that we may use, less those that others keep busy.

    Two threads on two cores, one of them a neighbour's, run slower than one: every parallel region
    waits for the slower thread. A neighbour counts if it is busy now (over `sample` seconds) and was
    over the last minute, so that the start of this server's own processes does not. While the engine
    serves, `octavo.engine.threads` keeps looking.
    """
    if asked is not None:
        processors = len(_processors())
        if asked > processors:
            raise ConfigError(
                f"--num-threads {asked}: this process may run on {processors} processors, and more threads than that wait for each "
                f"other; give at most {processors}, or leave the flag out"
            )
        return Threads(asked, "named in the configuration", asked)
    cores = physical_cores()
    reason = f"{cores} physical core{'s' * (cores != 1)}"
    quota = cgroup_cores()
    if quota is not None and quota < cores:
        cores = max(1, int(quota))
        reason += f", of which the cgroup's quota leaves {quota:g}"
    busy = min(others_busy(sample), os.getloadavg()[0]) if hasattr(os, "getloadavg") else others_busy(sample)
    taken = min(round(busy), cores - 1)
    if taken > 0:
        reason += f", of which other processes keep {busy:.1f} busy"
    return Threads(cores - max(taken, 0), reason, cores)


def physical_cores(allowed: Iterable[int] | None = None) -> int:
    """Physical cores among the processors that this process may run on: two hyper-threads count once."""
    cores = set()
    for cpu in _processors() if allowed is None else allowed:
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip()
        cores.add(siblings or str(cpu))
    return max(len(cores), 1)


def _processors() -> Collection[int]:
    """Those that this process may run on, hyper-threads counted one by one."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def others_busy(seconds: float) -> float:
    """Cores that processes other than this one kept busy, on average over `seconds` (it waits that long)."""
    meter = CpuMeter()
    time.sleep(seconds)
    return meter.read()[0]


# ---------------------------------------------------------------- CUDA


def has_nvidia_driver() -> bool:
    """Whether the kernel has an NVIDIA driver: a look at files, so that machines without one never load torch for it."""
    return any(path.exists() for path in NVIDIA_DRIVER)


def missing_cuda() -> str:
    """Why torch cannot use CUDA here, or "" if it can. Imports torch."""
    import torch

    if torch.version.cuda is None:
        return f"the installed torch {torch.__version__} is built without CUDA"
    if not has_nvidia_driver():
        return "no NVIDIA driver on this machine"
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        return f"torch {torch.__version__} (CUDA {torch.version.cuda}) finds no usable CUDA device"
    return ""


def cuda_device(index: int = 0) -> Device:
    """Facts of a CUDA device. free_memory is the driver's figure: what any process holds is subtracted."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = (int(properties.major), int(properties.minor))
    features = set()
    if capability >= (8, 0):
        features.add("bf16")
    if capability >= (8, 9):
        features.add("fp8")
    return Device(
        type="cuda",
        index=index,
        name=properties.name,
        capability=capability,
        memory=int(total),
        free_memory=int(free),
        driver=driver_version(),
        features=frozenset(features),
    )


def driver_version() -> str:
    """The NVIDIA driver's version, "" where it cannot be read."""
    words = _read("/proc/driver/nvidia/version").split()
    return next((w for w in words if w[:1].isdigit() and "." in w), "")


# ---------------------------------------------------------------- files


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None
