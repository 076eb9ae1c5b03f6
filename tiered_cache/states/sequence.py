"""One sequence's state on a device, in lockstep: steps, drafts, export to frames, restore from frames.

`SequenceState` is one sequence over a `StatePool`; `Restoration` builds a state from frames beside it and swaps it in,
all or nothing; `StagedCheckpoint` keeps the carries of one moment for a later export while the sequence runs on.

A sequence is its owner's: one thread appends, and another may export block rows meanwhile, since they never change.
What pulls a sequence from under an export (rewind, restore, reset, release) raises `epoch`: whoever exported compares
it before and after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from tiered_cache.devices.base import Array, Direction, HostArray
from tiered_cache.errors import (
    DraftError,
    LockstepError,
    PositionError,
    ReleasedError,
    StateError,
    TieredCacheError,
)
from tiered_cache.geometry import ArraySpec
from tiered_cache.identity import CHECKPOINT
from tiered_cache.states.carries import CarrySnapshot
from tiered_cache.states.ngrams import TokenIds, check_token_ids
from tiered_cache.states.ple import CONV, HISTORY, PleState
from tiered_cache.states.pool import SequenceLayout, StatePool
from tiered_cache.states.state_set import LayerBlob, LayerSnapshots, StateSet, check_arrays, host_arrays

__all__ = [
    "LayerBlob",
    "LayerSnapshots",
    "Restoration",
    "SequenceLayout",
    "SequenceState",
    "StagedCheckpoint",
    "StatePool",
    "StateSet",
]

FrameName = tuple[str, int]
"""Group and token count of one frame of a sequence."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """Where an open draft began, and the carries there."""

    base: int
    snapshots: tuple[CarrySnapshot, ...]


class SequenceState:
    """One sequence on one device: every state at the same `tokens`.

    An engine either hands whole steps to `append`, or works on the `states` and ends each step with `advance`, which
    holds them to lockstep and moves the cursor last.
    """

    def __init__(self, states: StateSet, tokens: int = 0) -> None:
        """A sequence over `states`, which it owns from now on: new ones, or what a restoration built at `tokens`.

        Raises `LockstepError` if they stand elsewhere.
        """
        states.check_lockstep(tokens)
        self.pool = states.pool
        self.geometry = states.pool.geometry
        self._states = states
        self._tokens = tokens
        self._epoch = 0
        self._draft: _Draft | None = None
        self._released = False

    @property
    def tokens(self) -> int:
        """How many tokens the state covers, drafted ones included."""
        return self._tokens

    @property
    def accepted_tokens(self) -> int:
        """How many of them are settled: no open draft can take them back."""
        return self._draft.base if self._draft else self._tokens

    @property
    def epoch(self) -> int:
        """Goes up whenever the state stops being a continuation: rewind, restore, reset, release."""
        return self._epoch

    @property
    def released(self) -> bool:
        return self._released

    @property
    def states(self) -> StateSet:
        """The state objects, for engines that work on them directly; a restore replaces them all."""
        return self._states

    def rows(self, part: str, start: int, stop: int) -> Array:
        """Rows [start, stop) of a part, a C-contiguous device copy [layers, stop - start, *row].

        Raises `PositionError` beyond the cursor, `StateError` for a name that is no row part.
        """
        self.check_live()
        if part not in self._states.row_state_of:
            raise StateError(f"no rows {part!r}; there are {sorted(self._states.row_state_of)}")
        return self._states.row_state_of[part].read(part, start, stop)

    def carry(self, part: str) -> Array:
        """The live buffer of a carry, [layers, *shape]; `ple.history` is host memory.

        Raises `StateError` for a name that is no carry.
        """
        self.check_live()
        if part not in self._states.carry_state_of:
            raise StateError(f"no carry {part!r}; there are {sorted(self._states.carry_state_of)}")
        return self._states.carry_state_of[part].arrays[part]

    def ensure_room_through(self, end: int) -> None:
        """Give tokens [0, end) a place in every state. Raises `CapacityError` before anything is written."""
        self.check_live()
        self._states.ensure_room_through(end)

    def append(
        self,
        position: int,
        rows: Mapping[str, Array],
        carries: Mapping[str, Array] | None = None,
        token_ids: TokenIds | None = None,
    ) -> None:
        """One step of T tokens: new rows, and the carries as they are after it. All or nothing.

        `position`: the cursor. `rows`: every row part, [layers, T, *row]. `carries`: every carry part but
        `ple.history`, [layers, *shape]. `token_ids`: the T ids, uint32; needed for PLE layers, whose history they
        advance unless `ple.forward` has done so in this step, and where there are no rows to tell T. Arrays are device
        memory and are copied.

        Raises `PositionError`, `StateError` (names, shapes, dtypes), `CapacityError`, `TokenError`, `LockstepError`;
        the state is then as it was.
        """
        self.check_live()
        if position != self._tokens:
            raise PositionError(f"append at {position}, but the sequence stands at {self._tokens}")
        states = self._states
        values = dict(carries) if carries else {}
        counts = self._check_rows(position, rows)
        self._check_carries(values)
        if token_ids is not None:
            counts["token ids"] = len(token_ids)
        if len(set(counts.values())) != 1 or 0 in counts.values():
            raise StateError(f"a step of lengths {counts}: they must be equal, and above 0")
        count = next(iter(counts.values()))
        history_waits = states.ple is not None and self._check_history(states.ple, position, count, token_ids)
        self.ensure_room_through(position + count)
        try:
            for state in states.rows:
                state.append(position, {name: rows[name] for name in state.parts})
            if states.qsa is not None:
                states.qsa.pool()
        except BaseException:  # the device ran out of memory for temporaries
            for state in states.rows:
                state.rewind_to(position)
            raise
        if states.ple is not None:
            if history_waits and token_ids is not None:
                states.ple.advance(token_ids)
            states.ple.write_conv(values[CONV])
        if states.recurrent is not None:
            states.recurrent.write(position + count, {name: values[name] for name in states.recurrent.parts})
        self._tokens = position + count

    def advance(self, count: int) -> None:
        """End a step whose T tokens the states have taken by themselves: check lockstep, move the cursor.

        Raises `LockstepError` naming the states that do not stand at `tokens + count`, `DraftError` if one is in the
        middle of a step; the cursor then stays.
        """
        self.check_live()
        self._states.check_lockstep(self._tokens + count)
        self._tokens += count

    def rewind_to(self, tokens: int) -> None:
        """Drop the rows from `tokens` on. Carries cannot be cropped: with any, only 0 and the cursor are legal.

        Raises `PositionError`, and `DraftError` while a draft is open.
        """
        self.check_live()
        if self._draft:
            raise DraftError(f"rewind to {tokens} while a draft is open at {self._draft.base}")
        if not 0 <= tokens <= self._tokens:
            raise PositionError(f"rewind to {tokens} from {self._tokens}")
        if tokens == self._tokens:
            return
        if self._states.carries:
            names = sorted(self._states.carry_state_of)
            raise PositionError(f"rewind to {tokens}: the carries {', '.join(names)} are valid at {self._tokens} alone")
        for state in self._states.rows:
            state.rewind_to(tokens)
        self._tokens = tokens
        self._epoch += 1

    def begin_draft(self) -> None:
        """What is appended from here on can be taken back. Raises `DraftError`, `LockstepError`."""
        self.check_live()
        if self._draft:
            raise DraftError(f"a draft is open already, from {self._draft.base}")
        self._states.check_lockstep(self._tokens)
        self._draft = _Draft(self._tokens, tuple(state.snapshot() for state in self._states.carries))

    def accept(self, count: int) -> int:
        """Close the draft, keeping its first `count` tokens; returns how many tokens must be appended again.

        If all are kept, or there are no carries, that is 0. Else the whole sequence is back where the draft began, and
        the `count` accepted tokens are to be replayed, since carries cannot be cropped. Raises `DraftError` without a
        draft, `PositionError` for more tokens than were drafted.
        """
        self.check_live()
        if not self._draft:
            raise DraftError("no draft is open")
        base, snapshots = self._draft.base, self._draft.snapshots
        drafted = self._tokens - base
        if not 0 <= count <= drafted:
            raise PositionError(f"{count} tokens accepted of a draft of {drafted}")
        if drafted and count == drafted:
            self._draft = None
            return 0
        kept = 0 if snapshots else count
        for state in self._states.rows:
            state.rewind_to(base + kept)
        for carry, snapshot in zip(self._states.carries, snapshots, strict=True):
            carry.rollback(snapshot)
        self._tokens = base + kept
        self._draft = None
        return count - kept

    def reject(self) -> None:
        """Close the draft and take all of it back."""
        self.accept(0)

    def export(self, group: str, tokens: int, out: Mapping[str, HostArray] | None = None) -> dict[str, HostArray]:
        """The arrays of one frame, exactly `geometry.arrays(group, tokens)`, in host memory; in `out` where given.

        A block frame may be exported at any time after its block is full and accepted; the checkpoint frame at the
        current count alone (without carries, at any count so far). Raises `PositionError`, `DraftError` for what an
        open draft may take back, `GeometryError` for an unknown group, a count inside a block, or another `out`.
        """
        return self.export_frames([(group, tokens)], None if out is None else [out])[0]

    def export_frames(
        self, frames: Sequence[FrameName], out: Sequence[Mapping[str, HostArray]] | None = None
    ) -> list[dict[str, HostArray]]:
        """`export` of many frames in one synchronised batch."""
        specs = [self._exportable(group, tokens) for group, tokens in frames]
        device = self.pool.device
        arrays = [host_arrays(device, spec) for spec in specs] if out is None else [dict(o) for o in out]
        if out is not None:
            for spec, given in zip(specs, arrays, strict=True):
                check_arrays(spec, given, as_destination=True)
        stream = device.stream(Direction.TO_HOST)
        for (group, tokens), given in zip(frames, arrays, strict=True):
            start, stop = self.geometry.span(group, tokens)
            for name, array in given.items():
                self._states.export(name, start, stop, array, stream)
        device.synchronize(stream)
        return arrays

    def stage(self) -> StagedCheckpoint:
        """Copy what the checkpoint frame at this count holds into a staging slot, to be exported later.

        Raises `CapacityError` when no slot is free (the sequence runs on without this checkpoint), `DraftError`,
        `LockstepError`, `PositionError` at 0 tokens.
        """
        specs = self._exportable(CHECKPOINT, self._tokens)
        self.pool.take_slot()
        try:
            start, stop = self.geometry.span(CHECKPOINT, self._tokens)
            copies = {name: self._states.copy(name, start, stop) for name in specs}
        except BaseException:
            self.pool.give_back_slot()
            raise
        return StagedCheckpoint(self.pool, self._tokens, copies)

    def digest(self) -> str:
        """xxh3_128, in hex, over all parts at this count: rows [0, tokens) and carries; independent of paging."""
        self.check_live()
        self._states.check_lockstep(self._tokens)
        return self._states.digest(self._tokens)

    def restoration(self, tokens: int) -> Restoration:
        """Begin to replace this state by one at `tokens` from frames; this one stays as it is until the commit.

        Raises `CapacityError`, `PositionError`.
        """
        self.check_live()
        return Restoration(StateSet(self.pool, self._states.capacity_tokens), tokens, self)

    def layer_snapshots(self, carriers: Sequence[tuple[str, int]] | None = None) -> LayerSnapshots:
        """The whole-layer blobs of all carriers. `carriers`: the (state, layer) pairs to save, all by default.

        Raises `LayerSetError` unless they are exactly the carriers, `LockstepError`, `DraftError`.
        """
        self.check_live()
        self._check_accepted()
        return self._states.encode_layers(self._tokens, carriers)

    def restore_layers(self, snapshots: LayerSnapshots) -> None:
        """Replace this state by what the blobs hold, all or nothing.

        Raises `LayerSetError` unless the blobs' (state, layer) pairs are exactly the carriers, `BlobError` for another
        layout, `LockstepError` unless every state stands at `snapshots.tokens`, `CapacityError`, `TokenError`.
        """
        self.check_live()
        fresh = StateSet(self.pool, self._states.capacity_tokens)
        try:
            fresh.restore_layers(snapshots)
        except BaseException:
            fresh.release()
            raise
        self.replace(fresh, snapshots.tokens)

    def replace(self, states: StateSet, tokens: int) -> None:
        """Swap in states that stand at `tokens` and release the old ones; an open draft is dropped, the cursor is last.

        Raises `LockstepError` if they stand elsewhere, `ReleasedError`; nothing has changed then.
        """
        self.check_live()
        states.check_lockstep(tokens)
        old, self._states = self._states, states
        self._draft = None
        self._epoch += 1
        self._tokens = tokens
        old.release()

    def reset(self) -> None:
        """Back to no tokens, as a new sequence; KV pages return to the pool, an open draft is dropped."""
        self.check_live()
        self._states.reset()
        self._tokens = 0
        self._draft = None
        self._epoch += 1

    def release(self) -> None:
        """Give all memory back; idempotent. Every other call then raises `ReleasedError`."""
        if self._released:
            return
        self._released = True
        self._states.release()
        self._tokens = 0
        self._draft = None
        self._epoch += 1

    def check_live(self) -> None:
        if self._released:
            raise ReleasedError("the sequence was released")

    def _check_rows(self, position: int, rows: Mapping[str, Array]) -> dict[str, int]:
        """Raise unless `rows` are all row parts and can be appended; the rows of each state."""
        if rows.keys() != self._states.row_state_of.keys():
            raise StateError(f"rows of {sorted(rows)}, not of {sorted(self._states.row_state_of)}")
        behind = {state.title: state.tokens for state in self._states.rows if state.tokens != position}
        if behind:
            raise LockstepError(f"the sequence stands at {position}, but {behind}")
        return {
            state.title: state.check_append(position, {name: rows[name] for name in state.parts})
            for state in self._states.rows
        }

    def _check_carries(self, values: Mapping[str, Array]) -> None:
        wanted = self._states.carry_state_of.keys() - {HISTORY}
        if values.keys() != wanted:
            raise StateError(f"carries {sorted(values)}, not {sorted(wanted)}")
        if self._states.ple is not None:
            self._states.ple.check_conv(values[CONV])
        if self._states.recurrent is not None:
            self._states.recurrent.check_values({name: values[name] for name in self._states.recurrent.parts})

    def _check_history(self, ple: PleState, position: int, count: int, token_ids: TokenIds | None) -> bool:
        """Whether the PLE history has still to advance over this step. Raises where it can do neither."""
        if ple.history_at == position + count and not ple.staged:
            return False
        ple.check_settled()
        if ple.tokens != position:
            raise LockstepError(f"the sequence stands at {position}, PLE at {ple.tokens}")
        if token_ids is None:
            raise StateError("a step of a layout with PLE layers needs its token ids")
        check_token_ids(token_ids, ple.layout.vocab)
        return True

    def _check_accepted(self) -> None:
        if self._draft:
            raise DraftError(f"a draft is open from {self._draft.base} to {self._tokens}")
        self._states.check_lockstep(self._tokens)

    def _exportable(self, group: str, tokens: int) -> Mapping[str, ArraySpec]:
        """The specs of a frame that may be exported now; raises otherwise."""
        self.check_live()
        if tokens < 1 or tokens > self._tokens:
            raise PositionError(f"{group} frame at {tokens}, where the sequence stands at {self._tokens}")
        if tokens > self.accepted_tokens:
            raise DraftError(f"{group} frame at {tokens}, where a draft is open from {self.accepted_tokens}")
        if group == CHECKPOINT and self._states.carries:
            self._check_accepted()
            if tokens != self._tokens:
                raise PositionError(f"checkpoint at {tokens}, where the carries are valid at {self._tokens} alone")
        return self.geometry.arrays(group, tokens)


class StagedCheckpoint:
    """What the checkpoint frame at `tokens` holds, copied at that moment; it outlives the sequence."""

    def __init__(self, pool: StatePool, tokens: int, copies: dict[str, Array]) -> None:
        self.tokens = tokens
        self._pool = pool
        self._copies = copies
        self._released = False

    def export(self, out: Mapping[str, HostArray] | None = None) -> dict[str, HostArray]:
        """The arrays of the frame, `geometry.arrays("checkpoint", tokens)`, in host memory; in `out` where given.

        Raises `ReleasedError` after `release`, `GeometryError` for another `out`.
        """
        if self._released:
            raise ReleasedError(f"the staged checkpoint at {self.tokens} was released")
        device = self._pool.device
        specs = self._pool.geometry.arrays(CHECKPOINT, self.tokens)
        arrays = host_arrays(device, specs) if out is None else dict(out)
        check_arrays(specs, arrays, as_destination=True)
        stream = device.stream(Direction.TO_HOST)
        for name, array in arrays.items():
            copy = self._copies[name]
            if isinstance(copy, np.ndarray):  # `ple.history` is host memory on every device
                np.copyto(array, copy)
            else:
                device.to_host(copy, array, stream)
        device.synchronize(stream)
        return arrays

    def release(self) -> None:
        """Free the slot; idempotent."""
        if not self._released:
            self._released = True
            self._copies.clear()
            self._pool.give_back_slot()


class Restoration:
    """A state at `tokens` that grows from frames, in any order, beside a live sequence or as a new one.

    A failed `put` writes nothing and leaves the restoration open; `abort` frees what it took. As a context manager it
    aborts at its end unless it was committed.
    """

    def __init__(self, states: StateSet, tokens: int, target: SequenceState | None = None) -> None:
        """Build in `states`, empty ones that this owns from now on; take room for `tokens`.

        On commit they are swapped into `target`, or become a new sequence. Raises `CapacityError`, `PositionError`
        (`tokens` below 1), `LockstepError` (`states` not empty); `states` are released then.
        """
        self.tokens = tokens
        self._target = target
        self._states = states
        self._open = True
        self._geometry = states.pool.geometry
        try:
            if tokens < 1:
                raise PositionError(f"restore to {tokens} tokens")
            states.check_lockstep(0)
            states.ensure_room_through(tokens)
        except TieredCacheError:
            self.abort()
            raise
        size = self._geometry.block_tokens
        frames = [
            (group.name, (block + 1) * size)
            for group in self._geometry.block_groups
            for block in group.blocks_needed(tokens, size)
        ]
        if self._geometry.needs_checkpoint(tokens):
            frames.append((CHECKPOINT, tokens))
        self._came: dict[FrameName, bool] = dict.fromkeys(frames, False)

    @property
    def needed(self) -> tuple[FrameName, ...]:
        """Every frame that the state is made of."""
        return tuple(self._came)

    @property
    def missing(self) -> tuple[FrameName, ...]:
        """The frames that have not come yet."""
        return tuple(frame for frame, came in self._came.items() if not came)

    def put(self, group: str, tokens: int, arrays: Mapping[str, HostArray]) -> None:
        """Copy one frame's arrays in; they may be freed afterwards.

        Raises `StateError` for a frame that is not needed or came before, `GeometryError` for arrays other than
        `geometry.arrays(group, tokens)`, and what the states refuse: `BlobError` for a flag, `TokenError`,
        `LockstepError` for histories that differ by layer. Nothing is written then.
        """
        self._check_open()
        came = self._came.get((group, tokens))
        if came is not False:
            why = "is not needed" if came is None else "came twice"
            raise StateError(f"{group} frame at {tokens} {why} in a restore to {self.tokens}")
        check_arrays(self._geometry.arrays(group, tokens), arrays)
        start, _ = self._geometry.span(group, tokens)
        self._states.load(start, tokens, arrays)
        self._came[group, tokens] = True

    def commit(self) -> SequenceState:
        """Check that every frame came, pool the indexer's keys, check lockstep, and swap all in, the cursor last.

        Raises `StateError` naming the frames that lack, `ReleasedError` if the target was released meanwhile; the
        target is as it was then.
        """
        self._check_open()
        if self.missing:
            lacking = ", ".join(f"{group} at {tokens}" for group, tokens in self.missing)
            raise StateError(f"restore to {self.tokens} lacks {lacking}")
        if self._target is not None:
            self._target.check_live()
        self._states.settle(self.tokens)
        self._open = False
        if self._target is None:
            return SequenceState(self._states, self.tokens)
        self._target.replace(self._states, self.tokens)
        return self._target

    def abort(self) -> None:
        """Free what the restoration took; idempotent, and nothing after a commit."""
        if self._open:
            self._open = False
            self._states.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise StateError(f"the restoration to {self.tokens} is over")
