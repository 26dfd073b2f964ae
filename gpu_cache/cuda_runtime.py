"""CUDA's runtime library, through ctypes: events, waits and batches of copies without torch in between.

It is the very library that torch has loaded, so streams, contexts and the current device are the same. The
calls release the interpreter's lock, since a full queue can make any of them wait.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from adapterd.gpu_cache.cuda_driver import register_flags
from adapterd.gpu_cache.device import Run
from adapterd.loader.errors import Code, error

if TYPE_CHECKING:
    from adapterd.loader.errors import AdapterdError

BATCHES_SINCE = 12_080
"""The first version of the runtime that has cudaMemcpyBatchAsync; 13.0 took its `failIdx` away."""

FEW = 8
"""Copies: so many cost less one by one than as a batch, which takes tens of µs to put together."""

_NOT_READY = 600
_HOST_TO_DEVICE = 1
_WITHOUT_TIMING = 2
_NON_BLOCKING = 1
_IN_STREAM_ORDER = 1


class _Location(Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(Structure):
    """cudaMemcpyAttributes. The hints are for managed memory, and stay empty."""

    _fields_ = (("access_order", c_int), ("source", _Location), ("target", _Location), ("flags", c_uint))


def loaded_runtime() -> Path | None:
    """The file of the runtime library that torch has loaded, as this process's memory map has it."""
    wanted = (torch.version.cuda or "").partition(".")[0]
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    found = {Path(line[line.index("/") :]) for line in lines if "/libcudart" in line}
    return next((path for path in sorted(found) if _major(path) == wanted), None)


def _major(path: Path) -> str:
    try:
        version = c_int()
        return "" if ctypes.CDLL(str(path)).cudaRuntimeGetVersion(byref(version)) else str(version.value // 1000)
    except (OSError, AttributeError):
        return ""


class CudaRuntime:
    """Driver over the runtime library; see `cuda_driver.Driver`."""

    def __init__(self, path: Path, index: int, *, batched: bool) -> None:
        """OSError or AttributeError if the library cannot be loaded, or lacks a function."""
        self._index, self._name = index, f"cuda:{index}"
        self._several = torch.cuda.device_count() > 1
        self.copy_method = "batch" if batched else "run"
        library = ctypes.CDLL(str(path))
        handle = POINTER(c_void_p)
        self._last_error = _function(library.cudaGetLastError)
        self._error_name = _function(library.cudaGetErrorName, c_int, result=c_char_p)
        self._stream_create = _function(library.cudaStreamCreateWithFlags, handle, c_uint)
        self._stream_destroy = _function(library.cudaStreamDestroy, c_void_p)
        self._stream_synchronize = _function(library.cudaStreamSynchronize, c_void_p)
        self._stream_wait = _function(library.cudaStreamWaitEvent, c_void_p, c_void_p, c_uint)
        self._event_create = _function(library.cudaEventCreateWithFlags, handle, c_uint)
        self._event_destroy = _function(library.cudaEventDestroy, c_void_p)
        self._event_record = _function(library.cudaEventRecord, c_void_p, c_void_p)
        self._event_query = _function(library.cudaEventQuery, c_void_p)
        self._memset = _function(library.cudaMemsetAsync, c_void_p, c_int, c_size_t, c_void_p)
        self._copy = _function(library.cudaMemcpyAsync, c_void_p, c_void_p, c_size_t, c_int, c_void_p)
        self._register = _function(library.cudaHostRegister, c_void_p, c_size_t, c_uint)
        self._unregister = _function(library.cudaHostUnregister, c_void_p)
        version = c_int()
        self._check(library.cudaRuntimeGetVersion(byref(version)), "version")
        if batched and version.value < BATCHES_SINCE:
            raise AttributeError(f"cudaMemcpyBatchAsync in version {version.value}")
        self._fail_index = version.value < 13_000
        if batched:
            failed = (c_void_p,) if self._fail_index else ()
            arrays = (c_void_p, c_void_p, c_void_p, c_size_t)
            rest = (POINTER(_Attributes), POINTER(c_size_t), c_size_t, *failed, c_void_p)
            self._batch = _function(library.cudaMemcpyBatchAsync, *arrays, *rest)
        self._attributes, self._from_the_first = _Attributes(access_order=_IN_STREAM_ORDER), c_size_t(0)
        self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # 0.1 µs against 1.5

    def _on_device(self) -> AbstractContextManager[object]:
        """The calls that go to the current device. Where there is one only, it is that."""
        return torch.cuda.device(self._index) if self._several else nullcontext()

    def current_stream(self) -> int:
        if self._raw_stream is None:
            return torch.cuda.current_stream(self._index).cuda_stream
        return int(self._raw_stream(self._index))

    def new_stream(self) -> int:
        made = c_void_p()
        with torch.cuda.device(self._index):
            self._check(self._stream_create(byref(made), _NON_BLOCKING), "new stream")
        return made.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._check(self._stream_destroy(stream), "stream destroy")

    def synchronize(self, stream: int) -> None:
        self._check(self._stream_synchronize(stream), "synchronize")

    def new_event(self) -> int:
        made = c_void_p()
        with torch.cuda.device(self._index):
            self._check(self._event_create(byref(made), _WITHOUT_TIMING), "new event")
        return made.value or 0

    def destroy_event(self, event: int) -> None:
        if self._event_destroy(event):
            self._last_error()

    def record(self, event: int, stream: int) -> None:
        if self._several and not stream:  # the default stream is that of the current device
            with torch.cuda.device(self._index):
                code = self._event_record(event, stream)
        else:
            code = self._event_record(event, stream)
        if code:
            raise self._failure(code, "event record")

    def wait(self, stream: int, event: int) -> None:
        if self._several and not stream:
            with torch.cuda.device(self._index):
                code = self._stream_wait(stream, event, 0)
        else:
            code = self._stream_wait(stream, event, 0)
        if code:
            raise self._failure(code, "stream wait")

    def done(self, event: int) -> bool:
        code = self._event_query(event)
        if code == _NOT_READY:
            self._last_error()  # else torch would find it behind its next launch, and raise
            return False
        if code:
            raise self._failure(code, "event query")
        return True

    def copy(self, stream: int, dst: torch.Tensor, src: torch.Tensor, runs: Sequence[Run], page_bytes: int) -> None:
        to, origin = dst.data_ptr(), src.data_ptr()
        with self._on_device():
            if self.copy_method == "batch" and len(runs) > FEW:
                self._copy_batch(stream, to, origin, runs, page_bytes)
                return
            for source, target, count in runs:
                begin, there, nbytes = origin + source * page_bytes, to + target * page_bytes, count * page_bytes
                if code := self._copy(there, begin, nbytes, _HOST_TO_DEVICE, stream):
                    raise self._failure(code, "copy")

    def zero(self, stream: int, dst: torch.Tensor) -> None:
        with self._on_device():
            self._check(self._memset(dst.data_ptr(), 0, dst.numel(), stream), "zero")

    def register(self, address: int, nbytes: int, read_only: bool) -> None:
        with torch.cuda.device(self._index):
            self._check(self._register(address, nbytes, register_flags(read_only)), "host memory register")

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._index):
            self._check(self._unregister(address), "host memory unregister")

    def _copy_batch(self, stream: int, to: int, origin: int, runs: Sequence[Run], page_bytes: int) -> None:
        """The library has read the arrays when it returns."""
        targets = array("Q", [to + page * page_bytes for _, page, _ in runs])
        sources = array("Q", [origin + page * page_bytes for page, _, _ in runs])
        sizes = array("Q", [count * page_bytes for _, _, count in runs])
        failed = (byref(c_size_t()),) if self._fail_index else ()
        code = self._batch(
            targets.buffer_info()[0], sources.buffer_info()[0], sizes.buffer_info()[0], len(runs),
            byref(self._attributes), byref(self._from_the_first), 1, *failed, stream,
        )  # fmt: skip
        self._check(code, "copy")

    def _check(self, code: int, doing: str) -> None:
        if code:
            raise self._failure(code, doing)

    def _failure(self, code: int, doing: str) -> AdapterdError:
        """Also takes the error back from the thread's state, where torch would find it."""
        self._last_error()
        known = self._error_name(code)
        return error(Code.DEVICE_ERROR, self._name, f"{doing}: {known.decode() if known else code}")


def _function(found: Any, *arguments: Any, result: Any = c_int) -> Any:
    found.argtypes, found.restype = arguments, result
    return found
