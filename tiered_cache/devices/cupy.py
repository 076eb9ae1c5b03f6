"""CUDA memory through CuPy: a stream per direction, bounded pinned staging, kernels that copy pages.

CuPy is imported when a `CupyDevice` is made, not before. Work on state runs on the calling thread's current stream; a
copy waits for what that stream holds at the time of the call, and `synchronize` makes its result visible everywhere.

Page-locked host memory (`host_buffer`) is copied to and from directly. Any other passes through two staging buffers
that are kept and reused, one being filled while the other is drained.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import (
    ALIGNMENT_BYTES,
    Array,
    Device,
    Direction,
    DlpackTensor,
    HostArray,
    PageTable,
    Stream,
    check_copy,
)
from tiered_cache.errors import CapacityError, ConfigError
from tiered_cache.geometry import ArraySpec

_PINNED = 1  # cudaMemoryTypeHost
_THREADS = 256
_BLOCKS_MAX = 4096

_UNITS = {16: "uint4", 8: "uint2", 4: "unsigned int", 2: "unsigned short", 1: "unsigned char"}
_KERNEL = r"""
// Rows [start, start + count) of a paged sequence, in units of UNIT: pool [layers, pool_pages, page_tokens, row_units],
// rows [layers, count, row_units]; position p lies in page pages[p / page_tokens].
extern "C" __global__ void gather_rows_BYTES(
    const UNIT* pool, const long long* pages, UNIT* rows,
    long long layers, long long pool_pages, long long page_tokens, long long row_units,
    long long start, long long count)
{
    const long long total = layers * count * row_units;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < total;
         i += (long long)gridDim.x * blockDim.x) {
        const long long unit = i % row_units, row = i / row_units % count, layer = i / row_units / count;
        const long long position = start + row;
        const long long page = layer * pool_pages + pages[position / page_tokens];
        rows[i] = pool[(page * page_tokens + position % page_tokens) * row_units + unit];
    }
}

extern "C" __global__ void scatter_rows_BYTES(
    UNIT* pool, const long long* pages, const UNIT* rows,
    long long layers, long long pool_pages, long long page_tokens, long long row_units,
    long long start, long long count)
{
    const long long total = layers * count * row_units;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < total;
         i += (long long)gridDim.x * blockDim.x) {
        const long long unit = i % row_units, row = i / row_units % count, layer = i / row_units / count;
        const long long position = start + row;
        const long long page = layer * pool_pages + pages[position / page_tokens];
        pool[(page * page_tokens + position % page_tokens) * row_units + unit] = rows[i];
    }
}
"""
KERNEL_SOURCE = "".join(_KERNEL.replace("UNIT", unit).replace("_BYTES", f"_{size}") for size, unit in _UNITS.items())
"""CUDA C++ without headers: `gather_rows_N` and `scatter_rows_N` for N = 16, 8, 4, 2, 1 bytes a unit."""
KERNEL_NAMES = tuple(f"{verb}_rows_{size}" for verb in ("gather", "scatter") for size in _UNITS)
KERNEL_OPTIONS = ("--std=c++14",)


class _Staging:
    """Two pinned buffers of one direction and the events of their last use. One thread's at a time, by its lock."""

    def __init__(self, cupy: ModuleType, nbytes: int) -> None:
        self.lock = threading.Lock()
        self.buffers = [_pinned(cupy, nbytes) for _ in range(2)]
        self.events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]


class CupyDevice(Device):
    """One CUDA device. Raises `ConfigError` where CuPy or the device is missing."""

    name = "cupy"
    host_memory = False
    _dlpack_kinds = frozenset({2, 13})  # kDLCUDA, kDLCUDAManaged

    def __init__(self, ordinal: int = 0, staging_bytes: int = 32 << 20) -> None:
        """`staging_bytes`: pinned host memory for copies from and to other host memory, over both directions."""
        try:
            import cupy
        except ImportError as error:
            raise ConfigError("the cupy device needs CuPy: install tiered-cache[cuda12] or [cuda13]") from error
        self.xp = cupy
        self._cuda: Any = cupy.cuda
        try:
            found = self._cuda.runtime.getDeviceCount()
        except self._cuda.runtime.CUDARuntimeError as error:
            raise ConfigError(f"no CUDA device: {error}") from error
        if not 0 <= ordinal < found:
            raise ConfigError(f"CUDA device {ordinal}, where there are {found}")
        if staging_bytes < 4 * ALIGNMENT_BYTES:
            raise ConfigError(f"staging_bytes {staging_bytes} is below {4 * ALIGNMENT_BYTES}")
        self._device = self._cuda.Device(ordinal)
        with self._device:
            self._streams = {direction: self._cuda.Stream(non_blocking=True) for direction in Direction}
            self._staging = {direction: _Staging(cupy, staging_bytes // 4) for direction in Direction}
            self._kernels = cupy.RawModule(code=KERNEL_SOURCE, options=KERNEL_OPTIONS)
        self._in_flight: dict[int, list[object]] = {stream.ptr: [] for stream in self._streams.values()}

    def empty(self, spec: ArraySpec) -> Array:
        return self._allocate(self.xp.empty, spec.shape, spec.storage)

    def zeros(self, spec: ArraySpec) -> Array:
        return self._allocate(self.xp.zeros, spec.shape, spec.storage)

    def host_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        with self._device:
            return _pinned(self.xp, nbytes)

    def stream(self, direction: Direction) -> Stream:
        return self._streams[direction]

    def to_host(self, array: Array, out: HostArray, stream: Stream) -> None:
        check_copy(array, out)
        if not array.nbytes:
            return
        with self._device:
            cuda_stream = self._follow_current(stream)
            if self._is_pinned(out):
                self._copy(out.ctypes.data, _address(array), array.nbytes, cuda_stream)
                self._in_flight[cuda_stream.ptr] += [array, out]
            else:
                self._to_host_staged(array, _flat_bytes(out), cuda_stream)

    def to_device(self, host: HostArray, out: Array, stream: Stream) -> None:
        check_copy(host, out)
        if not host.nbytes:
            return
        with self._device:
            cuda_stream = self._follow_current(stream)
            self._in_flight[cuda_stream.ptr].append(out)
            if self._is_pinned(host):
                self._copy(_address(out), host.ctypes.data, host.nbytes, cuda_stream)
                self._in_flight[cuda_stream.ptr].append(host)
            else:
                self._to_device_staged(_flat_bytes(host), out, cuda_stream)

    def upload(self, host: HostArray, stream: Stream) -> Array:
        contiguous = np.ascontiguousarray(host)
        array = self._allocate(self.xp.empty, contiguous.shape, contiguous.dtype)
        self.to_device(contiguous, array, stream)
        return array

    def synchronize(self, stream: Stream) -> None:
        cuda_stream: Any = stream
        # Taken off before the wait: what another thread adds from now on is not known to be complete.
        complete, self._in_flight[cuda_stream.ptr] = self._in_flight[cuda_stream.ptr], []
        cuda_stream.synchronize()
        complete.clear()

    def gather_rows(self, pool: Array, pages: PageTable, start: int, stop: int, out: Array | None = None) -> Array:
        shape = (pool.shape[0], stop - start, *pool.shape[3:])
        if out is None:
            out = self._allocate(self.xp.empty, shape, pool.dtype)
        assert out.shape == shape
        assert out.flags.c_contiguous
        self._run_kernel("gather", pool, pages, out, start)
        return out

    def scatter_rows(self, pool: Array, pages: PageTable, start: int, rows: Array) -> None:
        self._run_kernel("scatter", pool, pages, self.xp.ascontiguousarray(rows), start)

    def _from_dlpack(self, tensor: DlpackTensor) -> Array:
        with self._device:
            array: Array = self.xp.from_dlpack(tensor)
            return array

    def _allocate(self, make: Any, shape: Sequence[int], dtype: np.dtype[np.generic]) -> Array:
        try:
            with self._device:
                array: Array = make(tuple(shape), dtype=dtype)
        except self._cuda.memory.OutOfMemoryError as error:
            raise CapacityError(f"no device memory for {dtype} {tuple(shape)}: {error}") from error
        return array

    def _run_kernel(self, verb: str, pool: Array, pages: PageTable, rows: Array, start: int) -> None:
        """Copy rows and pages in the largest units that divide a row and both addresses."""
        if not rows.nbytes:
            return
        layers, pool_pages, page_tokens = pool.shape[:3]
        count = rows.shape[1]
        row_bytes = rows.nbytes // (layers * count)
        first, end = start // page_tokens, -(-(start + count) // page_tokens)
        addresses = row_bytes | _address(pool) | _address(rows)
        unit_bytes = next(size for size in _UNITS if addresses % size == 0)
        units = layers * count * (row_bytes // unit_bytes)
        sizes = (layers, pool_pages, page_tokens, row_bytes // unit_bytes, start - first * page_tokens, count)
        with self._device:
            table = self.xp.asarray(pages[first:end])
            kernel = self._kernels.get_function(f"{verb}_rows_{unit_bytes}")
            blocks = min(-(-units // _THREADS), _BLOCKS_MAX)
            kernel((blocks,), (_THREADS,), (pool, table, rows, *(np.int64(size) for size in sizes)))

    def _follow_current(self, stream: Stream) -> Any:
        """Let `stream` wait for what the thread's current stream holds now."""
        cuda_stream: Any = stream
        cuda_stream.wait_event(self._cuda.get_current_stream().record())
        return cuda_stream

    def _is_pinned(self, host: HostArray) -> bool:
        return bool(self._cuda.runtime.pointerGetAttributes(host.ctypes.data).type == _PINNED)

    def _copy(self, destination: int, source: int, nbytes: int, cuda_stream: Any) -> None:
        runtime = self._cuda.runtime
        runtime.memcpyAsync(destination, source, nbytes, runtime.memcpyDefault, cuda_stream.ptr)

    def _to_host_staged(self, array: Array, out: npt.NDArray[np.uint8], cuda_stream: Any) -> None:
        """Through the staging buffers; complete on return. Each piece is drained while the next one arrives."""
        staging = self._staging[Direction.TO_HOST]
        with staging.lock:
            size = len(staging.buffers[0])
            arriving: tuple[int, int, int] | None = None
            for index, begin in enumerate(range(0, len(out), size)):
                end, slot = min(begin + size, len(out)), index % 2
                buffer = staging.buffers[slot]
                self._copy(buffer.ctypes.data, _address(array) + begin, end - begin, cuda_stream)
                staging.events[slot].record(cuda_stream)
                if arriving is not None:
                    self._drain(staging, out, arriving)
                arriving = (slot, begin, end)
            if arriving is not None:
                self._drain(staging, out, arriving)

    @staticmethod
    def _drain(staging: _Staging, out: npt.NDArray[np.uint8], piece: tuple[int, int, int]) -> None:
        slot, begin, end = piece
        staging.events[slot].synchronize()
        out[begin:end] = staging.buffers[slot][: end - begin]

    def _to_device_staged(self, host: npt.NDArray[np.uint8], out: Array, cuda_stream: Any) -> None:
        """Through the staging buffers; `host` is free on return, the copy complete once the stream is synchronised."""
        staging = self._staging[Direction.TO_DEVICE]
        with staging.lock:
            size = len(staging.buffers[0])
            for index, begin in enumerate(range(0, len(host), size)):
                end, slot = min(begin + size, len(host)), index % 2
                staging.events[slot].synchronize()  # its last copy, of this call or of an earlier one, has left
                staging.buffers[slot][: end - begin] = host[begin:end]
                self._copy(_address(out) + begin, staging.buffers[slot].ctypes.data, end - begin, cuda_stream)
                staging.events[slot].record(cuda_stream)


def _pinned(cupy: ModuleType, nbytes: int) -> npt.NDArray[np.uint8]:
    """Page-locked host memory, shape [nbytes], that starts at a multiple of 64 bytes."""
    raw = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes + ALIGNMENT_BYTES), dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[offset : offset + nbytes]


def _address(array: Array) -> int:
    """Where a device array starts."""
    cupy_array: Any = array
    return int(cupy_array.data.ptr)


def _flat_bytes(array: HostArray) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
