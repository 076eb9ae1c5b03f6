"""Row states: parts that grow by one row a token and whose rows below the cursor never change.

`RowState` is the interface and the cursor; `FixedRows` keeps its rows in one buffer of a fixed capacity. Rows at and
above the cursor are scratch: a caller (or its kernel) writes them first and moves the cursor last, so a call that
fails half way has changed nothing that can be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import Array, Device, Direction, HostArray, Stream
from tiered_cache.errors import (
    BlobError,
    CapacityError,
    LayerSetError,
    LockstepError,
    PositionError,
    ReleasedError,
    StateError,
)
from tiered_cache.geometry import ArraySpec, Part, storage_dtype
from tiered_cache.states.blobs import Blob, blob_bytes, check_layers, join_blob, split_body


class RowState(ABC):
    """The rows of some parts, over all the layers that have them, at one common cursor `tokens`."""

    flags: tuple[str, ...] = ()
    """Parts of which every value is 0 or 1."""

    def __init__(self, title: str, device: Device, parts: tuple[Part, ...]) -> None:
        self.title = title
        self.device = device
        self.parts: Mapping[str, Part] = {part.name: part for part in parts}
        self.layers = parts[0].layers
        self.tokens = 0
        self.released = False

    @property
    @abstractmethod
    def room(self) -> int:
        """How many rows have a place already: the cursor may move up to here."""

    @abstractmethod
    def ensure_room_through(self, end: int) -> None:
        """Give rows [0, end) a place. Raises `CapacityError` before anything is taken or written."""

    @abstractmethod
    def _read(self, name: str, start: int, stop: int, out: Array | None) -> Array: ...

    @abstractmethod
    def _write(self, name: str, start: int, rows: Array) -> None: ...

    @abstractmethod
    def _read_layer(self, name: str, index: int) -> Array:
        """Rows [0, tokens) of the layer at `index`, C-contiguous [tokens, *row]; may be a view."""

    @abstractmethod
    def _write_layer(self, name: str, index: int, rows: Array) -> None:
        """Write rows [T, *row] of the layer at `index` to positions [0, T)."""

    @abstractmethod
    def _pack_header(self, index: int) -> bytes: ...

    @abstractmethod
    def _unpack_header(self, blob: npt.NDArray[np.uint8]) -> tuple[int, int]:
        """The header's size and row count. Raises `BlobError` for a header that is not this state's."""

    def _check_flags(self, rows: Mapping[str, Array]) -> None:
        for name in self.flags:
            if rows[name].size and (highest := int(rows[name].max())) > 1:
                raise BlobError(f"{self.title}: a value of {name} is {highest}, not 0 or 1")

    def read(self, name: str, start: int, stop: int, out: Array | None = None) -> Array:
        """Rows [start, stop) of one part: a C-contiguous copy [layers, stop - start, *row], in `out` where given.

        Raises `PositionError` beyond the cursor.
        """
        self.check_live()
        if not 0 <= start <= stop <= self.tokens:
            raise PositionError(f"{self.title}: rows [{start}, {stop}) of {name} are not within [0, {self.tokens})")
        return self._read(name, start, stop, out)

    def export(self, name: str, start: int, stop: int, out: HostArray, stream: Stream) -> None:
        """Put the copy of rows [start, stop) of one part to `out` in host memory on the stream; one copy on a host."""
        if self.device.host_memory:
            self.read(name, start, stop, out)
        else:
            self.device.to_host(self.read(name, start, stop), out, stream)

    def append(self, position: int, rows: Mapping[str, Array]) -> None:
        """Add T rows to every part, each [layers, T, *row]; `position` must be the cursor.

        Raises `PositionError`, `StateError` for other names, shapes or dtypes, `CapacityError` without room.
        """
        count = self.check_append(position, rows)
        self.ensure_room_through(position + count)
        self.write(position, rows)
        self.advance(count)

    def check_append(self, position: int, rows: Mapping[str, Array]) -> int:
        """Raise unless `rows` may be appended at `position`; the number of rows. Nothing is changed."""
        self.check_live()
        if position != self.tokens:
            raise PositionError(f"{self.title}: append at {position}, but the cursor stands at {self.tokens}")
        return self.check_rows(rows)

    def check_rows(self, rows: Mapping[str, Array]) -> int:
        """Raise `StateError` unless `rows` are this state's parts with equal row counts; the number of rows."""
        if rows.keys() != self.parts.keys():
            raise StateError(f"{self.title}: rows of {sorted(rows)}, not of {sorted(self.parts)}")
        count = -1
        for name, part in self.parts.items():
            array = rows[name]
            if count < 0 and array.ndim > 1:
                count = array.shape[1]
            wanted = (len(part.layers), count, *part.shape)
            if array.shape != wanted or array.dtype != storage_dtype(part.dtype):
                raise StateError(
                    f"{self.title}: {name} is {array.dtype} {array.shape}, not {storage_dtype(part.dtype)} {wanted}"
                )
        self._check_flags(rows)
        return count

    def write(self, start: int, rows: Mapping[str, Array]) -> None:
        """Write rows at and above the cursor, where there is room; the cursor stays.

        Raises `PositionError` below the cursor, `CapacityError` beyond the room.
        """
        self.check_live()
        end = start + self.check_rows(rows)
        if start < self.tokens:
            raise PositionError(f"{self.title}: write at {start}, below the cursor {self.tokens}")
        if end > self.room:
            raise CapacityError(f"{self.title}: rows through {end} written into room for {self.room}")
        for name, array in rows.items():
            self._write(name, start, array)

    def advance(self, count: int) -> None:
        """Move the cursor over `count` rows that were written. Raises `CapacityError` past the room."""
        self.check_live()
        if count < 0:
            raise PositionError(f"{self.title}: advance by {count}")
        if self.tokens + count > self.room:
            raise CapacityError(f"{self.title}: advance by {count} from {self.tokens} is past the room {self.room}")
        self.tokens += count

    def rewind_to(self, tokens: int) -> None:
        """Move the cursor back; it only shrinks. Raises `PositionError` above the cursor."""
        self.check_live()
        if not 0 <= tokens <= self.tokens:
            raise PositionError(f"{self.title}: rewind to {tokens} from {self.tokens}")
        self.tokens = tokens

    def rewind(self, count: int) -> None:
        """Drop the last `count` rows. Raises `PositionError` if there are fewer."""
        if not 0 <= count <= self.tokens:
            raise PositionError(f"{self.title}: rewind by {count} from {self.tokens}")
        self.rewind_to(self.tokens - count)

    def reset(self) -> None:
        """Back to no rows, as a fresh state."""
        self.rewind_to(0)

    def release(self) -> None:
        """Give the memory back; idempotent. Every later call but this one raises `ReleasedError`."""
        self.released = True
        self.tokens = 0

    def encode_layer(self, layer: int) -> npt.NDArray[np.uint8]:
        """The layer's rows [0, tokens) as a whole-layer blob. Raises `LayerSetError` for a layer without this state."""
        self.check_live()
        index = self._index(layer)
        blob, arrays = join_blob(self._pack_header(index), self._specs(self.tokens))
        stream = self.device.stream(Direction.TO_HOST)
        for name, out in zip(self.parts, arrays, strict=True):
            self.device.to_host(self._read_layer(name, index), out, stream)
        self.device.synchronize(stream)
        return blob

    def restore(self, blobs: Mapping[int, Blob]) -> None:
        """Replace everything by what the blobs of all layers hold.

        Raises `LayerSetError` unless the keys are exactly the layers, `BlobError` for another layout, `LockstepError`
        for unequal row counts, `CapacityError` for more rows than there is room for; the state is then as it was.
        """
        self.check_live()
        check_layers(self.title, self.layers, list(blobs))
        rows: dict[int, dict[str, HostArray]] = {}
        counts: dict[int, int] = {}
        for index, layer in enumerate(self.layers):
            blob = blob_bytes(blobs[layer])
            offset, counts[layer] = self._unpack_header(blob)
            arrays = split_body(f"{self.title} layer {layer}", blob, offset, self._specs(counts[layer]))
            rows[index] = dict(zip(self.parts, arrays, strict=True))
            self._check_flags(rows[index])
        if len(set(counts.values())) > 1:
            raise LockstepError(f"{self.title}: row counts differ by layer: {counts}")
        tokens = counts[self.layers[0]]
        self.ensure_room_through(tokens)
        stream = self.device.stream(Direction.TO_DEVICE)
        for index, arrays_of in rows.items():
            for name, array in arrays_of.items():
                self._write_layer(name, index, self.device.upload(array, stream))
        self.device.synchronize(stream)
        self.tokens = tokens

    def check_live(self) -> None:
        if self.released:
            raise ReleasedError(f"{self.title} was released")

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            raise LayerSetError(f"{self.title}: layer {layer} is none of the carriers {list(self.layers)}")
        return self.layers.index(layer)

    def _specs(self, tokens: int) -> list[ArraySpec]:
        """Specs of one layer's arrays of `tokens` rows, in the order of the parts."""
        return [ArraySpec(part.dtype, (tokens, *part.shape)) for part in self.parts.values()]


class FixedRows(RowState):
    """Rows in buffers [layers, capacity, *row] that never move, so that kernels can keep their addresses."""

    def __init__(self, title: str, device: Device, parts: tuple[Part, ...], capacity_tokens: int) -> None:
        super().__init__(title, device, parts)
        self.capacity_tokens = capacity_tokens
        self.buffers: dict[str, Array] = {
            part.name: device.empty(ArraySpec(part.dtype, (len(part.layers), capacity_tokens, *part.shape)))
            for part in parts
        }

    @property
    def room(self) -> int:
        return self.capacity_tokens

    def ensure_room_through(self, end: int) -> None:
        self.check_live()
        if end > self.capacity_tokens:
            raise CapacityError(f"{self.title}: {end} rows in a buffer of {self.capacity_tokens}")

    def _read(self, name: str, start: int, stop: int, out: Array | None) -> Array:
        rows = self.buffers[name][:, start:stop]
        if out is None:
            return rows.copy()
        out[...] = rows
        return out

    def _write(self, name: str, start: int, rows: Array) -> None:
        self.buffers[name][:, start : start + rows.shape[1]] = rows

    def _read_layer(self, name: str, index: int) -> Array:
        return self.buffers[name][index, : self.tokens]

    def _write_layer(self, name: str, index: int, rows: Array) -> None:
        self.buffers[name][index, : len(rows)] = rows

    def release(self) -> None:
        super().release()
        self.buffers.clear()
