"""All states of one sequence side by side: lockstep, frames in and out, whole-layer blobs, digest.

It knows no policy: what may be exported when, drafts and epochs are `sequence.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from tiered_cache.devices.base import Array, Device, Direction, HostArray, Stream
from tiered_cache.errors import CapacityError, GeometryError, LockstepError, PositionError
from tiered_cache.geometry import ArraySpec
from tiered_cache.states.blobs import Blob, check_layers
from tiered_cache.states.carries import CarryState
from tiered_cache.states.dsa import DsaIndexer
from tiered_cache.states.paged_kv import PagedKv
from tiered_cache.states.ple import PleState
from tiered_cache.states.pool import StatePool
from tiered_cache.states.qsa import QsaIndexer
from tiered_cache.states.recurrent import RecurrentState
from tiered_cache.states.rows import RowState

_ALIGNMENT_BYTES = 64
_DIGEST_STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LayerBlob:
    """One layer's whole state of one kind: `state` is `kv`, `qsa`, `dsa`, `ple` or `recurrent`."""

    state: str
    layer: int
    blob: Blob


@dataclass(frozen=True, slots=True, eq=False)
class LayerSnapshots:
    """The whole-layer blobs of all carriers at one token count. It says nothing about whose state it is."""

    tokens: int
    blobs: tuple[LayerBlob, ...]


class StateSet:
    """The states that a layout has, over one booking of the pool's buffers: a reservation, then a sequence.

    With `ensure_room_through` the pages are reserved too, so that nothing can run out between check and use.
    """

    def __init__(self, pool: StatePool, capacity_tokens: int) -> None:
        """Room for `capacity_tokens` in the fixed buffers; KV pages are taken later. Raises `CapacityError`."""
        self.pool = pool
        self.capacity_tokens = capacity_tokens
        self._bytes = pool.sequence_bytes(capacity_tokens)
        self._released = False
        layout, device = pool.layout, pool.device
        pool.take_buffers(self._bytes)
        try:
            self.kv = PagedKv(pool.kv) if pool.kv else None
            self.qsa = QsaIndexer(layout.qsa, device, capacity_tokens, pool.qsa_weight) if layout.qsa else None
            self.dsa = DsaIndexer(layout.dsa, device, capacity_tokens) if layout.dsa else None
            self.ple = PleState(layout.ple, device, pool.ple_tables) if layout.ple else None
            self.recurrent = RecurrentState(layout.recurrent, device) if layout.recurrent else None
        except BaseException:
            pool.give_back_buffers(self._bytes)
            raise
        self.rows: tuple[RowState, ...] = tuple(s for s in (self.kv, self.qsa, self.dsa) if s)
        self.carries: tuple[CarryState, ...] = tuple(s for s in (self.ple, self.recurrent) if s)
        self.row_state_of = {name: state for state in self.rows for name in state.parts}
        self.carry_state_of = {name: state for state in self.carries for name in state.parts}

    @property
    def all(self) -> tuple[RowState | CarryState, ...]:
        return (*self.rows, *self.carries)

    def ensure_room_through(self, end: int) -> None:
        """Give tokens [0, end) a place in every state. Raises `CapacityError` before anything is written."""
        if end > self.capacity_tokens:
            raise CapacityError(f"{end} tokens in a sequence with room for {self.capacity_tokens}")
        for state in self.rows:
            state.ensure_room_through(end)

    def check_lockstep(self, tokens: int) -> None:
        """Raise `LockstepError` naming every state that does not stand at `tokens`, `DraftError` within a step."""
        for carry in self.carries:
            carry.check_settled()
        elsewhere = {state.title: state.tokens for state in self.all if state.tokens != tokens}
        if elsewhere:
            raise LockstepError(f"the sequence stands at {tokens}, but {elsewhere}")

    def export(self, name: str, start: int, stop: int, out: HostArray, stream: Stream) -> None:
        """Put the copy of a part to `out` on the stream: rows [start, stop), or the whole carry."""
        if name in self.row_state_of:
            self.row_state_of[name].export(name, start, stop, out, stream)
        else:
            self.carry_state_of[name].export(name, out, stream)

    def copy(self, name: str, start: int, stop: int) -> Array:
        """A copy of a part where it lives: rows [start, stop), or the whole carry."""
        if name in self.row_state_of:
            return self.row_state_of[name].read(name, start, stop)
        return self.carry_state_of[name].arrays[name].copy()

    def load(self, start: int, tokens: int, arrays: Mapping[str, HostArray]) -> None:
        """Write a frame's rows at `start`, above the cursors, and its carries as those at `tokens`.

        Everything is checked before anything is written. Raises `StateError` and its kinds.
        """
        device = self.pool.device
        stream = device.stream(Direction.TO_DEVICE)
        rows = [s for s in self.rows if s.parts.keys() <= arrays.keys()]
        carries = [s for s in self.carries if s.parts.keys() <= arrays.keys()]
        of_rows = [{name: device.upload(arrays[name], stream) for name in s.parts} for s in rows]
        of_carries = [s.upload({name: arrays[name] for name in s.parts}, stream) for s in carries]
        device.synchronize(stream)
        for state, values in zip(rows, of_rows, strict=True):
            state.check_rows(values)
        for carry, values in zip(carries, of_carries, strict=True):
            carry.check_values(values)
        for state, values in zip(rows, of_rows, strict=True):
            state.write(start, values)
        for carry, values in zip(carries, of_carries, strict=True):
            carry.write(tokens, values)

    def settle(self, tokens: int) -> None:
        """Move the cursors of freshly loaded rows to `tokens`, pool the indexer's keys and check lockstep."""
        for state in self.rows:
            state.advance(tokens)
        if self.qsa is not None:
            self.qsa.pool()
        self.check_lockstep(tokens)

    def carriers(self) -> Iterator[tuple[str, int]]:
        """Every (state, layer) that carries state."""
        return ((name, layer) for name, state in self._named() for layer in state.layers)

    def encode_layers(self, tokens: int, carriers: Sequence[tuple[str, int]] | None) -> LayerSnapshots:
        """The whole-layer blobs of `carriers`, all by default. Raises `LayerSetError` unless they are all."""
        wanted = list(self.carriers()) if carriers is None else list(carriers)
        check_layers("snapshot", self.carriers(), wanted)
        states = dict(self._named())
        return LayerSnapshots(
            tokens, tuple(LayerBlob(name, layer, states[name].encode_layer(layer)) for name, layer in wanted)
        )

    def restore_layers(self, snapshots: LayerSnapshots) -> None:
        """Replace everything by what the blobs hold; what is half restored after an error is to be released.

        Raises `LayerSetError`, `BlobError`, `LockstepError`, `CapacityError`, `TokenError`, `PositionError`.
        """
        check_layers("snapshot", self.carriers(), [(b.state, b.layer) for b in snapshots.blobs])
        if snapshots.tokens < 0:
            raise PositionError(f"a snapshot at {snapshots.tokens} tokens")
        blobs = {name: {b.layer: b.blob for b in snapshots.blobs if b.state == name} for name, _ in self._named()}
        for name, state in self._named():
            if isinstance(state, PleState):
                state.restore(snapshots.tokens, blobs[name])
            else:
                state.restore(blobs[name])
        self.check_lockstep(snapshots.tokens)

    def digest(self, tokens: int) -> str:
        """xxh3_128, in hex, over the parts' names, rows [0, tokens) and carries; independent of paging."""
        digest = xxhash.xxh3_128(tokens.to_bytes(8, "little"))
        stream = self.pool.device.stream(Direction.TO_HOST)
        for part in self.pool.geometry.parts:
            digest.update(part.name.encode() + b"\0")
            step = max(1, _DIGEST_STEP_BYTES // max(1, part.row_bytes * len(part.layers)))
            is_carry = part.name in self.carry_state_of
            for start in (0,) if is_carry else range(0, tokens, step):
                stop = min(start + step, tokens)
                spec = part.array(stop - start)
                out: HostArray = np.empty(spec.shape, dtype=spec.storage)
                self.export(part.name, start, stop, out, stream)
                self.pool.device.synchronize(stream)
                digest.update(out.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()

    def reset(self) -> None:
        """Every state back to no tokens."""
        for state in self.all:
            state.reset()

    def release(self) -> None:
        """Give all memory back; idempotent."""
        if not self._released:
            self._released = True
            for state in self.all:
                state.release()
            self.pool.give_back_buffers(self._bytes)

    def _named(self) -> Iterator[tuple[str, PagedKv | QsaIndexer | DsaIndexer | PleState | RecurrentState]]:
        for name, state in (
            ("kv", self.kv),
            ("qsa", self.qsa),
            ("dsa", self.dsa),
            ("ple", self.ple),
            ("recurrent", self.recurrent),
        ):
            if state is not None:
                yield name, state


def host_arrays(device: Device, specs: Mapping[str, ArraySpec]) -> dict[str, HostArray]:
    """Host arrays for a frame, 64-byte aligned, in one buffer."""
    offsets: list[int] = []
    total = 0
    for spec in specs.values():
        offsets.append(total)
        total += -(-spec.bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    buffer = device.host_buffer(total)
    return {
        name: buffer[offset : offset + spec.bytes].view(spec.storage).reshape(spec.shape)
        for (name, spec), offset in zip(specs.items(), offsets, strict=True)
    }


def check_arrays(
    specs: Mapping[str, ArraySpec], arrays: Mapping[str, HostArray], *, as_destination: bool = False
) -> None:
    """Raise `GeometryError` listing every array that is missing, foreign, or of another shape or dtype."""
    problems = [f"{name} is missing" for name in specs if name not in arrays]
    problems += [f"{name} is not part of the frame" for name in arrays if name not in specs]
    for name, array in arrays.items():
        if (spec := specs.get(name)) is None:
            continue
        dtype = spec.storage
        if array.shape != spec.shape or array.dtype != dtype:
            problems.append(f"{name} is {array.dtype} {array.shape}, not {dtype} {spec.shape}")
        elif as_destination and not (array.flags.c_contiguous and array.flags.writeable):
            problems.append(f"{name} is not a writeable C-contiguous array")
    if problems:
        raise GeometryError("; ".join(problems))
