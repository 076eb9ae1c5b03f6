"""Recurrent states: SSM, gated delta net, KDA and short convolutions, as carries; float32 even in bfloat16 models.

Whole-layer blob: `[tokens u64][bytes u64][the layer's arrays, raw, in the order of the layout]`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import Device, Direction, HostArray
from tiered_cache.errors import BlobError, LockstepError
from tiered_cache.geometry import ArraySpec, Part, PartKind
from tiered_cache.states.blobs import Blob, blob_bytes, check_layers, join_blob, split_body, unpack_header
from tiered_cache.states.carries import CarryState

_HEADER = struct.Struct("<QQ")


@dataclass(frozen=True, slots=True)
class RecurrentLayout:
    """One recurrent array: its name, the layers that carry it, and one rank's shape in one layer."""

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"
    shard_axis: int | None = None
    """The axis of `shape` that ranks share out, such as the heads'."""

    def part(self, *, sharded: bool = False) -> Part:
        """The carry `recurrent.<name>`."""
        axis = self.shard_axis if sharded else None
        return Part(f"recurrent.{self.name}", PartKind.CARRY, self.dtype, self.shape, self.layers, shard_axis=axis)


class RecurrentState(CarryState):
    """One sequence's recurrent carries. Each array may live on layers of its own."""

    def __init__(self, layouts: tuple[RecurrentLayout, ...], device: Device) -> None:
        super().__init__("recurrent", device, tuple(layout.part() for layout in layouts), frozenset())
        self.layers = tuple(sorted({layer for layout in layouts for layer in layout.layers}))

    def encode_layer(self, layer: int) -> npt.NDArray[np.uint8]:
        """The layer's carries as a whole-layer blob. Raises `LayerSetError` for a layer without any."""
        self.check_settled()
        check_layers(self.title, [layer] if layer in self.layers else self.layers, [layer])
        parts = self._parts_of(layer)
        specs = [ArraySpec(part.dtype, part.shape) for part in parts]
        blob, arrays = join_blob(_HEADER.pack(self.tokens, sum(spec.bytes for spec in specs)), specs)
        stream = self.device.stream(Direction.TO_HOST)
        for part, out in zip(parts, arrays, strict=True):
            self.device.to_host(self.arrays[part.name][part.layers.index(layer), ...], out, stream)
        self.device.synchronize(stream)
        return blob

    def restore(self, blobs: Mapping[int, Blob]) -> None:
        """Replace everything by what the blobs of all layers hold.

        Raises `LayerSetError` unless the keys are exactly the layers, `BlobError` for another layout and
        `LockstepError` for unequal token counts; the state is then as it was.
        """
        self.check_live()
        check_layers(self.title, self.layers, list(blobs))
        counts: dict[int, int] = {}
        values: dict[str, HostArray] = {
            name: np.empty(array.shape, dtype=array.dtype) for name, array in self.arrays.items()
        }
        for layer in self.layers:
            blob = blob_bytes(blobs[layer])
            counts[layer], nbytes = unpack_header(self.title, _HEADER, blob)
            parts = self._parts_of(layer)
            specs = [ArraySpec(part.dtype, part.shape) for part in parts]
            if nbytes != (wanted := sum(spec.bytes for spec in specs)):
                raise BlobError(f"{self.title} layer {layer}: arrays of {nbytes} bytes in the blob, of {wanted} here")
            arrays = split_body(f"{self.title} layer {layer}", blob, _HEADER.size, specs)
            for part, array in zip(parts, arrays, strict=True):
                values[part.name][part.layers.index(layer)] = array
        if len(set(counts.values())) > 1:
            raise LockstepError(f"{self.title}: token counts differ by layer: {counts}")
        stream = self.device.stream(Direction.TO_DEVICE)
        on_device = self.upload(values, stream)
        self.device.synchronize(stream)
        self.write(counts[self.layers[0]], on_device)

    def _parts_of(self, layer: int) -> list[Part]:
        return [part for part in self.parts.values() if layer in part.layers]
