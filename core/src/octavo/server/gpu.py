"""GPUs as NVML sees them: how busy they are and how much of their memory is held.

Owns the connection to the driver's library, which is there only with an NVIDIA driver and the package
nvidia-ml-py (octavo[nvml]). Without either there are no GPUs to report. Reports those that
CUDA_VISIBLE_DEVICES leaves to this process, where it is set. Never raises while serving.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("octavo.server")

FRESH_SECONDS = 1.0
"""Several readers within this time share one look: the driver itself averages over longer."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """utilization: part of the driver's last sampling period in which a kernel ran, 0 to 1. Memory in bytes."""

    index: int
    utilization: float
    memory: int
    memory_used: int


class Gpus:
    """`read()` at any time; empty where nothing can be asked. A look may take milliseconds: not on an event loop.

    nvml: the module pynvml, or a test's. visible: CUDA_VISIBLE_DEVICES, indices or UUIDs; None is every GPU.
    """

    def __init__(self, nvml: Any = None, visible: str | None = None) -> None:
        self._visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
        self._seen: list[Gpu] = []
        self._then = float("-inf")
        self._nvml = nvml if nvml is not None else _load()
        if self._nvml is not None:
            try:
                self._nvml.nvmlInit()
            except Exception as error:  # no driver, or one of another version
                log.debug("no GPU metrics: NVML says %s", error)
                self._nvml = None

    def read(self) -> list[Gpu]:
        if self._nvml is None:
            return []
        now = time.monotonic()
        if now - self._then >= FRESH_SECONDS:
            self._then = now
            try:
                self._seen = [self._one(handle) for handle in self._handles()]
            except Exception as error:
                log.warning("GPU metrics end here: NVML says %s", error)
                self._nvml, self._seen = None, []
        return self._seen

    def _handles(self) -> list[Any]:
        if self._visible is None:
            return [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
        found = []
        for name in filter(None, map(str.strip, self._visible.split(","))):
            if name == "-1":  # CUDA stops reading here too
                break
            by_index = name.isdecimal()
            found.append(
                self._nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else self._nvml.nvmlDeviceGetHandleByUUID(name)
            )
        return found

    def _one(self, handle: Any) -> Gpu:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        try:
            busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except self._nvml.NVMLError_NotSupported:  # a slice of a GPU (MIG) has none
            busy = float("nan")
        return Gpu(int(self._nvml.nvmlDeviceGetIndex(handle)), busy, int(memory.total), int(memory.used))


def _load() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None
