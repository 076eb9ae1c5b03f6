"""Carry states: arrays that every step overwrites in place and that are valid at exactly one token count.

They cannot be cropped, so a rejected draft is undone from a snapshot taken before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiered_cache.devices.base import Array, Device, HostArray, Stream
from tiered_cache.devices.numpy import NumpyDevice
from tiered_cache.errors import PositionError, ReleasedError, StateError
from tiered_cache.geometry import Part


@dataclass(frozen=True, slots=True)
class CarrySnapshot:
    """Copies of all carries of one state, [layers, *shape] each, and the token count that they are valid at."""

    tokens: int
    arrays: Mapping[str, Array]


class CarryState:
    """The carries of some parts over their layers, at the token count `tokens`.

    `arrays` are the live buffers, [layers, *part.shape]; they never move, so that kernels can keep their addresses.
    """

    def __init__(self, title: str, device: Device, parts: tuple[Part, ...], in_host_memory: frozenset[str]) -> None:
        """`in_host_memory`: parts that the host computes and reads, whatever the device."""
        self.title = title
        self.device = device
        self.parts: Mapping[str, Part] = {part.name: part for part in parts}
        self.tokens = 0
        self.released = False
        host = NumpyDevice()
        self.arrays: dict[str, Array] = {
            part.name: (host if part.name in in_host_memory else device).zeros(part.array(0)) for part in parts
        }
        self._in_host_memory = in_host_memory

    def write(self, tokens: int, values: Mapping[str, Array]) -> None:
        """Overwrite all carries by their values at `tokens`. Raises `StateError` for other names, shapes or dtypes."""
        self.check_live()
        self.check_values(values)
        for name, value in values.items():
            self.arrays[name][...] = value
        self.tokens = tokens

    def check_values(self, values: Mapping[str, Array]) -> None:
        """Raise `StateError` unless `values` are exactly this state's carries."""
        if values.keys() != self.parts.keys():
            raise StateError(f"{self.title}: values of {sorted(values)}, not of {sorted(self.parts)}")
        for name, value in values.items():
            self._check_value(name, value)

    def _check_value(self, name: str, value: Array) -> None:
        spec = self.parts[name].array(0)
        dtype = spec.storage
        if value.shape != spec.shape or value.dtype != dtype:
            raise StateError(f"{self.title}: {name} is {value.dtype} {value.shape}, not {dtype} {spec.shape}")

    def export(self, name: str, out: HostArray, stream: Stream) -> None:
        """Put the copy of one carry to `out`, [layers, *part.shape] in host memory, on the stream."""
        self.check_settled()
        if name in self._in_host_memory:
            out[...] = self.arrays[name]
        else:
            self.device.to_host(self.arrays[name], out, stream)

    def upload(self, values: Mapping[str, HostArray], stream: Stream) -> dict[str, Array]:
        """Host values where `write` wants them."""
        return {
            name: value if name in self._in_host_memory else self.device.upload(value, stream)
            for name, value in values.items()
        }

    def snapshot(self) -> CarrySnapshot:
        """Copies of everything, to go back to. Raises `DraftError` while the state is not a settled one."""
        self.check_settled()
        return CarrySnapshot(self.tokens, {name: array.copy() for name, array in self.arrays.items()})

    def rollback(self, snapshot: CarrySnapshot) -> None:
        """Back to the snapshot; it may be used again. Raises `PositionError` for one from ahead of here."""
        self.check_live()
        if snapshot.tokens > self.tokens:
            raise PositionError(f"{self.title}: roll-back to {snapshot.tokens} from {self.tokens}")
        self.write(snapshot.tokens, snapshot.arrays)

    def reset(self) -> None:
        """Back to the state before the first token."""
        self.check_live()
        for array in self.arrays.values():
            array[...] = 0
        self.tokens = 0

    def release(self) -> None:
        """Free the memory and clear the handles; idempotent. Every other call then raises `ReleasedError`."""
        self.released = True
        self.arrays.clear()
        self.tokens = 0

    def check_live(self) -> None:
        if self.released:
            raise ReleasedError(f"{self.title} was released")

    def check_settled(self) -> None:
        """Raise unless all carries are valid at `tokens`."""
        self.check_live()
