from __future__ import annotations

from adapterd.gpu_cache.cpu_device import CpuDevice
from adapterd.gpu_cache.device import Device
from contracts.cache import CacheContract


class TestCpu(CacheContract):
    def make(self) -> Device:
        return CpuDevice()
