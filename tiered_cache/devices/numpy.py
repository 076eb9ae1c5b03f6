"""The device that is host memory itself: NumPy arrays, truly synchronous copies."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import (
    Array,
    Device,
    Direction,
    DlpackTensor,
    HostArray,
    PageTable,
    Stream,
    aligned_bytes,
    check_copy,
)
from tiered_cache.errors import CapacityError
from tiered_cache.geometry import ArraySpec


class NumpyDevice(Device):
    """Host memory. Every copy is complete when its call returns."""

    name = "numpy"
    xp = np
    host_memory = True
    _dlpack_kinds = frozenset({1, 3})  # kDLCPU, kDLCUDAHost: page-locked

    def empty(self, spec: ArraySpec) -> Array:
        try:
            return np.empty(spec.shape, dtype=spec.storage)
        except MemoryError as error:
            raise CapacityError(f"no host memory for {spec.bytes} bytes") from error

    def zeros(self, spec: ArraySpec) -> Array:
        try:
            return np.zeros(spec.shape, dtype=spec.storage)
        except MemoryError as error:
            raise CapacityError(f"no host memory for {spec.bytes} bytes") from error

    def host_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return aligned_bytes(nbytes)

    def stream(self, direction: Direction) -> Stream:
        return direction

    def to_host(self, array: Array, out: HostArray, stream: Stream) -> None:  # noqa: ARG002
        check_copy(array, out)
        np.copyto(out, array)

    def to_device(self, host: HostArray, out: Array, stream: Stream) -> None:  # noqa: ARG002
        check_copy(host, out)
        np.copyto(out, host)

    def upload(self, host: HostArray, stream: Stream) -> Array:  # noqa: ARG002
        return host

    def synchronize(self, stream: Stream) -> None:
        """Nothing to wait for."""

    def gather_rows(self, pool: Array, pages: PageTable, start: int, stop: int, out: Array | None = None) -> Array:
        layers, _, page_tokens, *row = pool.shape
        if out is None:
            out = np.empty((layers, stop - start, *row), dtype=pool.dtype)
        first, end = start // page_tokens, -(-stop // page_tokens)
        whole = (layers, end - first, page_tokens, *row)
        if start % page_tokens == 0 and stop % page_tokens == 0:
            # mode: with "raise", take() would copy through a buffer of its own; the table's pages are the pool's
            np.take(pool, pages[first:end], axis=1, out=out.reshape(whole), mode="clip")
        else:
            taken = np.take(pool, pages[first:end], axis=1, mode="clip")
            skipped = start - first * page_tokens
            np.copyto(out, taken.reshape(layers, -1, *row)[:, skipped : skipped + stop - start])
        return out

    def scatter_rows(self, pool: Array, pages: PageTable, start: int, rows: Array) -> None:
        layers, _, page_tokens, *row = pool.shape
        count = rows.shape[1]
        page, slot = divmod(start, page_tokens)
        done = 0
        if slot:  # the rest of a page that is begun
            done = min(page_tokens - slot, count)
            pool[:, pages[page], slot : slot + done] = rows[:, :done]
            page += 1
        whole = (count - done) // page_tokens
        if whole:
            body = rows[:, done : done + whole * page_tokens]
            pool[:, pages[page : page + whole]] = body.reshape(layers, whole, page_tokens, *row)
            done += whole * page_tokens
            page += whole
        if done < count:
            pool[:, pages[page], : count - done] = rows[:, done:]

    def _from_dlpack(self, tensor: DlpackTensor) -> Array:
        return np.from_dlpack(tensor)
