"""`Device`: memory that holds sequence state, its array module, and the copies in and out of it.

Arrays are bit patterns (`geometry.storage_dtype`): bfloat16 is uint16 here, fp8 uint8. Copies on a stream are complete
only after `synchronize(stream)`; the device keeps both ends of a copy alive until then. Threads may share a device and
its streams.
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tiered_cache.errors import GeometryError
from tiered_cache.geometry import ArraySpec

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

Array: TypeAlias = npt.NDArray[np.generic]
"""An array in a device's memory: NumPy's own, or CuPy's, which has the same interface."""
HostArray: TypeAlias = npt.NDArray[np.generic]
"""An array in host memory."""
PageTable: TypeAlias = npt.NDArray[np.int64]
"""Page numbers in order of position, shape [pages], in host memory."""
Stream: TypeAlias = object
"""A device's queue of copies; made by `Device.stream` and opaque to everyone else."""

ALIGNMENT_BYTES = 64

_BITS_OF_TORCH_DTYPE = {
    "torch.bfloat16": "int16",
    "torch.float8_e4m3fn": "uint8",
    "torch.float8_e5m2": "uint8",
    "torch.bool": "uint8",
}


class Direction(enum.StrEnum):
    """Which way a stream copies."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


class DlpackTensor(Protocol):
    """What any framework's tensor offers for a hand-over without a copy."""

    def __dlpack__(self, *, stream: None = ...) -> CapsuleType: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class Device(ABC):
    """Memory for sequence state.

    `xp` is the array module of that memory, `numpy` or `cupy`. `host_memory` says that `to_host` and `to_device` are
    plain copies within host memory, so that a caller may write into the destination at once instead.
    """

    name: str
    xp: ModuleType
    host_memory: bool
    _dlpack_kinds: frozenset[int]

    @abstractmethod
    def empty(self, spec: ArraySpec) -> Array:
        """A new C-contiguous array of the storage dtype; its content is undefined. Raises `CapacityError`."""

    @abstractmethod
    def zeros(self, spec: ArraySpec) -> Array:
        """A new C-contiguous array of zeros. Raises `CapacityError`."""

    @abstractmethod
    def host_buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory for copies, shape [nbytes], 64-byte aligned; page-locked where that makes copies faster."""

    @abstractmethod
    def stream(self, direction: Direction) -> Stream:
        """The one stream of this direction."""

    @abstractmethod
    def to_host(self, array: Array, out: HostArray, stream: Stream) -> None:
        """Copy a device array into `out`: equal shape and dtype, both C-contiguous, else `GeometryError`."""

    @abstractmethod
    def to_device(self, host: HostArray, out: Array, stream: Stream) -> None:
        """Copy a host array into `out`: equal shape and dtype, both C-contiguous, else `GeometryError`."""

    @abstractmethod
    def upload(self, host: HostArray, stream: Stream) -> Array:
        """`host` as a device array that the caller only reads; host memory itself where that is the device's."""

    @abstractmethod
    def synchronize(self, stream: Stream) -> None:
        """Return when every copy that was put on `stream` is complete."""

    @abstractmethod
    def gather_rows(self, pool: Array, pages: PageTable, start: int, stop: int, out: Array | None = None) -> Array:
        """Rows [start, stop) of a paged sequence as one C-contiguous array [layers, stop - start, *row].

        `pool` has the shape [layers, pool pages, page tokens, *row]; row r lies in page `pages[r // page tokens]`.
        """

    @abstractmethod
    def scatter_rows(self, pool: Array, pages: PageTable, start: int, rows: Array) -> None:
        """Write `rows` [layers, T, *row] to positions [start, start + T) of a paged sequence."""

    @abstractmethod
    def _from_dlpack(self, tensor: DlpackTensor) -> Array: ...

    def adopt(self, tensor: DlpackTensor) -> Array:
        """The tensor's memory as a device array of bit patterns, without a copy.

        A torch tensor whose dtype NumPy does not have (bfloat16, fp8) is viewed as integers of the same size first.
        Raises `GeometryError` for a tensor in other memory, or one that is not C-contiguous.
        """
        kind, _ = tensor.__dlpack_device__()
        if kind not in self._dlpack_kinds:
            kinds = sorted(self._dlpack_kinds)
            raise GeometryError(f"a tensor in memory of DLPack kind {kind}; the {self.name} device's kinds are {kinds}")
        bits = None
        if type(tensor).__module__.partition(".")[0] == "torch":
            torch = sys.modules["torch"]
            tensor = tensor.detach()  # type: ignore[attr-defined]
            bits = _BITS_OF_TORCH_DTYPE.get(str(tensor.dtype))  # type: ignore[attr-defined]
            if bits is not None:
                tensor = tensor.view(getattr(torch, bits))  # type: ignore[attr-defined]
        array = self._from_dlpack(tensor)
        if not array.flags.c_contiguous:
            raise GeometryError(f"a tensor {array.dtype} {array.shape} that is not C-contiguous")
        return array.view(np.uint16) if bits == "int16" else array


def check_copy(source: Array, destination: Array) -> None:
    """Raise `GeometryError` unless the two have one dtype and shape and are both C-contiguous."""
    if source.dtype != destination.dtype or source.shape != destination.shape:
        raise GeometryError(
            f"copy of {source.dtype} {source.shape} into {destination.dtype} {destination.shape}: they must be equal"
        )
    if not (source.flags.c_contiguous and destination.flags.c_contiguous):
        raise GeometryError(f"copy of {source.dtype} {source.shape}: source or destination is not C-contiguous")


def aligned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Fresh host memory, shape [nbytes], that starts at a multiple of 64 bytes."""
    raw = np.empty(nbytes + ALIGNMENT_BYTES, dtype=np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[offset : offset + nbytes]
