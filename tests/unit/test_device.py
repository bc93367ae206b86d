"""Facts of the machine are read from /proc, /sys and cgroups, without torch, and a busy or fenced machine is respected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from octavo.engine import device
from octavo.errors import ConfigError

INTEL = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8481C\nflags\t\t: fpu avx2 fma avx512f avx512_bf16 amx_bf16 amx_tile sse2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm sve\n"


def test_features_are_the_flags_of_the_first_processor_that_a_kernel_may_ask_for() -> None:
    assert device.cpu_features(INTEL) == {"avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}
    assert device.cpu_features(ARM) == {"asimd", "bf16", "i8mm", "sve"}
    assert device.cpu_features("") == frozenset()
    assert device.cpu_name(INTEL) == "Intel(R) Xeon(R) Platinum 8481C"


def test_a_cpu_is_described_without_torch() -> None:
    code = (
        "import sys; from octavo.engine.device import choose_device, spare_threads; "
        "print(choose_device('cpu').device.type, spare_threads(sample=0.01).count > 0, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["cpu", "True", "False"]


def test_auto_is_the_cpu_where_there_is_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "NVIDIA_DRIVER", (Path("/nonexistent"),))
    choice = device.choose_device("auto")
    assert choice.device.type == "cpu" and "no NVIDIA driver" in choice.reason


def test_cuda_that_is_asked_for_and_absent_is_an_error_that_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "NVIDIA_DRIVER", (Path("/nonexistent"),))
    with pytest.raises(ConfigError, match=r"--device cuda: .*(without CUDA|no NVIDIA driver)"):
        device.choose_device("cuda")


def v2(root: Path, path: str, **files: str) -> None:
    folder = root / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_cgroup_bounds_memory_and_page_cache_counts_as_free(tmp_path: Path) -> None:
    v2(tmp_path, "/", memory__max="max\n", memory__current="0\n")
    v2(tmp_path, "/pod", memory__max="4000\n", memory__current="3000\n", memory__stat="anon 500\ninactive_file 2500\n")
    v2(tmp_path, "/pod/box", memory__max="9000\n", memory__current="100\n", memory__stat="inactive_file 0\n")
    assert sorted(device.cgroup_memory(tmp_path, "0::/pod/box\n")) == [(4000, 500), (9000, 100)]


def test_version_1_cgroups_are_read_and_their_huge_number_means_no_limit(tmp_path: Path) -> None:
    v2(
        tmp_path / "memory",
        "/box",
        memory__limit_in_bytes="5000",
        memory__usage_in_bytes="700",
        memory__stat="total_inactive_file 200\n",
    )
    v2(tmp_path / "memory", "/", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="1")
    assert device.cgroup_memory(tmp_path, "4:memory:/box\n0::/\n") == [(5000, 500)]


def test_a_path_that_the_container_does_not_see_falls_to_its_root(tmp_path: Path) -> None:
    v2(tmp_path, "/", memory__max="8000\n", memory__current="1000\n")
    assert device.cgroup_memory(tmp_path, "0::/system.slice/docker-1234.scope\n") == [(8000, 1000)]


def test_a_cpu_quota_is_counted_in_cores(tmp_path: Path) -> None:
    v2(tmp_path, "/", cpu__max="max 100000\n")
    v2(tmp_path, "/box", cpu__max="150000 100000\n")
    assert device.cgroup_cores(tmp_path, "0::/box\n") == 1.5
    assert device.cgroup_cores(tmp_path, "0::/\n") is None
    v2(tmp_path / "cpu", "/box", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert device.cgroup_cores(tmp_path, "1:cpu,cpuacct:/box\n") is None


def test_free_memory_is_never_more_than_the_machine_has() -> None:
    total, free = device.cpu_memory()
    assert 0 < free <= total <= psutil.virtual_memory().total


def test_threads_leave_busy_neighbours_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "physical_cores", lambda allowed=None: 4)
    monkeypatch.setattr(device, "cgroup_cores", lambda: None)

    def threads(now: float, minute: float) -> int:
        monkeypatch.setattr(device, "others_busy", lambda seconds: now)
        monkeypatch.setattr(os, "getloadavg", lambda: (minute, 0.0, 0.0))
        return device.spare_threads().count

    assert threads(0.0, 0.0) == 4
    assert threads(1.1, 1.0) == 3
    assert threads(2.0, 0.1) == 4  # busy this instant only: our own start, or a passing job
    assert threads(0.1, 3.0) == 4  # was busy, is not any more
    assert threads(9.0, 9.0) == 1  # never none


def test_threads_that_are_asked_for_are_at_most_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_processors", lambda: range(8))
    assert device.spare_threads(7).count == 7
    with pytest.raises(ConfigError, match=r"--num-threads 9: .* 8 processors.*give at most 8"):
        device.spare_threads(9)


def test_a_quota_below_the_cores_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "physical_cores", lambda allowed=None: 8)
    monkeypatch.setattr(device, "cgroup_cores", lambda: 2.5)
    monkeypatch.setattr(device, "others_busy", lambda seconds: 0.0)
    threads = device.spare_threads()
    assert threads.count == 2 and "quota" in threads.reason


def test_hyper_threads_of_one_core_count_once() -> None:
    logical = len(os.sched_getaffinity(0))
    assert 1 <= device.physical_cores() <= logical
    assert device.physical_cores([0]) == 1
