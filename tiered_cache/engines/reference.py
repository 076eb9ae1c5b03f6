"""The reference engine: sequences of a `ReferenceModel`, on the state classes that a real engine would use.

It is what replays and tests run: deterministic, exact however a prompt is cut into steps, small and fast, and its
`output` is another one whenever any byte of any part of the state is.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from tiered_cache.devices.base import Array, Device, Direction
from tiered_cache.devices.numpy import NumpyDevice
from tiered_cache.engines.base import ComputingEngine, FrameName, HostArray, Restoration
from tiered_cache.engines.reference_model import STEP_TOKENS_MAX, ReferenceModel, ReferenceNetwork, reference_model
from tiered_cache.errors import CapacityError, ConfigError, DraftError, PositionError, ReleasedError, StateError
from tiered_cache.geometry import PartKind
from tiered_cache.identity import CHECKPOINT, Identity, Tokens, tagged_hash
from tiered_cache.states.ngrams import check_token_ids
from tiered_cache.states.sequence import Restoration as StateRestoration
from tiered_cache.states.sequence import SequenceState, StagedCheckpoint, StatePool, StateSet

REVISION = "1"
"""Goes up whenever the arithmetic changes: states of another revision are other states."""

_READ_BYTES = 1 << 20  # of rows that are hashed at a time


@dataclass(slots=True)
class _Sequence:
    state: SequenceState
    staged: dict[int, StagedCheckpoint] = field(default_factory=dict)
    drafted: Tokens | None = None


class ReferenceEngine(ComputingEngine):
    """Sequences of one model on one device.

    Safe to call from several threads for different sequences, and for block frames of one that runs on.
    """

    def __init__(
        self,
        model: ReferenceModel | str,
        *,
        seed: int = 0,
        block_tokens: int | None = None,
        capacity_bytes: int = 256 << 20,
        staging_slots: int = 8,
        page_tokens: int = 64,
        tenant_salt: bytes = b"",
        device: Device | None = None,
        shards: int = 1,
        rank: int = 0,
    ) -> None:
        """`model`: the name of one of `MODELS`, or sizes of one's own; another `seed` makes other weights of it.

        With `shards` it is one rank of so many that hold a sequence together: each its heads' keys and values.

        `capacity_bytes` bounds what all sequences hold together; at most `staging_slots` checkpoints lie beside it.
        Raises `ConfigError`, `GeometryError`, `CapacityError`.
        """
        self.model = reference_model(model) if isinstance(model, str) else model
        self.device = device or NumpyDevice()
        if not 0 <= rank < shards:
            raise ConfigError(f"rank {rank} of {shards} shards")
        self.rank = rank
        layout = self.model.layout(shards)
        self.geometry = layout.geometry(self.model.block_tokens if block_tokens is None else block_tokens, shards)
        self.identity = Identity(
            weights_digest=tagged_hash("reference model", repr(self.model).encode(), str(seed).encode()),
            engine="reference",
            engine_revision=REVISION,
            rounding=f"qsa {layout.qsa.rounding}" if layout.qsa else "",
            tenant_salt=tenant_salt,
        )
        self.capacity_bytes = capacity_bytes
        self._network = ReferenceNetwork(
            self.model, self.device, self.identity.weights_digest, shards=shards, rank=rank
        )
        self._pool = StatePool(
            layout,
            self.device,
            block_tokens=self.geometry.block_tokens,
            # each page is charged together with its tokens' other rows, so no more than these can be in use
            kv_tokens=capacity_bytes * self.geometry.block_tokens // self.geometry.block_bytes,
            buffer_bytes=capacity_bytes,
            page_tokens=page_tokens,
            shards=shards,
            staging_slots=staging_slots,
            ple_tables=tuple(self._network.tables),
        )
        assert self._pool.kv is not None
        self._pages = self._pool.kv
        self._page_bytes = page_tokens * sum(p.row_bytes * len(p.layers) for p in self._pages.layout.parts())
        self._output_seed = int.from_bytes(self.identity.weights_digest[:8], "little")
        self._reservations: dict[int, StateSet] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> int:
        """Token ids lie below this."""
        return self.model.vocabulary

    # -- room

    def bytes_free(self) -> int:
        pages = self._pages
        taken = (pages.pages - pages.free_pages) * self._page_bytes
        return self.capacity_bytes - taken - (self._pool.buffer_bytes - self._pool.buffer_bytes_free)

    def sequence_bytes(self, tokens: int) -> int:
        """What room for `tokens` tokens takes of the capacity: whole pages, and the carries twice, for drafts."""
        pages = -(-tokens // self._pages.page_tokens)
        return pages * self._page_bytes + self._pool.sequence_bytes(pages * self._pages.page_tokens)

    def reserve(self, tokens: int) -> int:
        wanted = self.sequence_bytes(tokens)
        with self._lock:
            free = self.bytes_free()
            if wanted > free:
                raise CapacityError(f"{tokens} tokens take {wanted} bytes, {free} of {self.capacity_bytes} are free")
            room = -(-tokens // self._pages.page_tokens) * self._pages.page_tokens
            states = StateSet(self._pool, room)
            states.ensure_room_through(room)
            number = next(self._numbers)
            self._reservations[number] = states
            return number

    def cancel(self, reservation: int) -> None:
        """As `Engine.cancel`; also a no-op once a restoration has begun, whose `abort` gives the room back."""
        with self._lock:
            states = self._reservations.pop(reservation, None)
        if states is not None:
            states.release()

    def start(self, reservation: int) -> int:
        """As `ComputingEngine.start`. Raises `ReleasedError` for a reservation that is gone."""
        return self.own(SequenceState(self._take(reservation, 0)))

    def restoration(self, reservation: int, tokens: int) -> Restoration:
        """As `Engine.restoration`; the reservation is used up by it.

        Raises `ReleasedError` for a reservation that is gone, `CapacityError` for more tokens than were reserved,
        `PositionError` for none; the reservation stays then.
        """
        if tokens < 1:
            raise PositionError(f"a restore to {tokens} tokens")
        return _ReferenceRestoration(self, StateRestoration(self._take(reservation, tokens), tokens))

    def release(self, sequence: int) -> None:
        with self._lock:
            held = self._sequences.pop(sequence, None)
        if held is None:
            return
        for checkpoint in held.staged.values():
            checkpoint.release()
        held.state.release()

    def own(self, state: SequenceState) -> int:
        """Take over a state over the engine's own pool; returns its handle."""
        with self._lock:
            number = next(self._numbers)
            self._sequences[number] = _Sequence(state)
            return number

    def _take(self, reservation: int, tokens: int) -> StateSet:
        """The reserved states, for a sequence of at least `tokens` tokens."""
        with self._lock:
            states = self._reservations.get(reservation)
            if states is None:
                raise ReleasedError(f"reservation {reservation} was given back or used")
            if tokens > states.capacity_tokens:
                raise CapacityError(f"{tokens} tokens in a reservation for {states.capacity_tokens}")
            del self._reservations[reservation]
            return states

    def _held(self, sequence: int) -> _Sequence:
        held = self._sequences.get(sequence)
        if held is None:
            raise ReleasedError(f"sequence {sequence} was released")
        return held

    # -- state out

    def tokens(self, sequence: int) -> int:
        return self._held(sequence).state.accepted_tokens

    def stage(self, sequence: int) -> None:
        """As `Engine.stage`; to stage one count twice takes one slot."""
        held = self._held(sequence)
        count = held.state.tokens
        if count not in held.staged:
            held.staged[count] = held.state.stage()

    def export(self, sequence: int, names: Sequence[FrameName], out: Sequence[Mapping[str, HostArray]]) -> None:
        if len(names) != len(out):
            raise StateError(f"{len(names)} frames to export into {len(out)} places")
        held = self._held(sequence)
        live: list[FrameName] = []
        live_out: list[Mapping[str, HostArray]] = []
        for name, arrays in zip(names, out, strict=True):
            staged = held.staged.get(name.tokens) if name.group == CHECKPOINT else None
            if staged is not None:
                staged.export(arrays)
            else:
                live.append(name)
                live_out.append(arrays)
        held.state.export_frames(live, live_out)

    # -- computing

    def extend(self, sequence: int, tokens: Tokens) -> None:
        """As `ComputingEngine.extend`; also raises `TokenError`, and `DraftError` while a draft is open."""
        held = self._held(sequence)
        self._compute(held.state, self._admitted(held, tokens))

    def output(self, sequence: int) -> int:
        """xxh3_64 over all parts and over the block keys that the QSA indexer has pooled, seeded by the weights."""
        state = self._held(sequence).state
        value = xxhash.xxh3_64_intdigest(state.tokens.to_bytes(8, "little"), self._output_seed)
        for part in self.geometry.parts:
            if part.kind is PartKind.CARRY:
                value = self._hash(state.carry(part.name), value)
                continue
            step = max(1, _READ_BYTES // (part.row_bytes * len(part.layers)))
            for start in range(0, state.tokens, step):
                value = self._hash(state.rows(part.name, start, min(start + step, state.tokens)), value)
        if (qsa := state.states.qsa) is not None:
            value = self._hash(qsa.block_keys(0, qsa.full_blocks).copy(), value)
        return value

    def next_token(self, sequence: int) -> int:
        return self.output(sequence) % self.vocabulary

    def digest(self, sequence: int) -> str:
        return self._held(sequence).state.digest()

    def generate(self, sequence: int, count: int) -> Tokens:
        """Decode `count` tokens, one step each; returns them. Raises as `extend`, before any is computed."""
        generated = np.zeros(count, dtype=np.uint32)
        self._admitted(self._held(sequence), generated)
        for index in range(count):
            generated[index] = self.next_token(sequence)
            self.extend(sequence, generated[index : index + 1])
        return generated

    def draft(self, sequence: int, proposal: Tokens) -> int:
        """Compute a proposal as a draft, which `accept` must end; returns how many of its first tokens are right.

        A token is right if the model emits it after those before it. Raises as `extend`; nothing has changed then.
        """
        held = self._held(sequence)
        proposal = self._admitted(held, proposal)
        held.state.begin_draft()
        held.drafted = proposal
        right = 0
        while right < len(proposal) and self.next_token(sequence) == proposal[right]:
            self._compute(held.state, proposal[right : right + 1])
            right += 1
        self._compute(held.state, proposal[right:])
        return right

    def accept(self, sequence: int, count: int) -> None:
        """End the draft: keep its first `count` tokens, take back the rest. Raises `DraftError`, `PositionError`."""
        held = self._held(sequence)
        if held.drafted is None:
            raise DraftError(f"sequence {sequence}: no draft is open")
        replayed = held.state.accept(count)
        drafted, held.drafted = held.drafted, None
        self._compute(held.state, drafted[:replayed])

    def _admitted(self, held: _Sequence, tokens: Tokens) -> Tokens:
        """The tokens, if they can be computed now."""
        tokens = check_token_ids(tokens, self.vocabulary)
        if held.drafted is not None:
            raise DraftError(f"a draft of {len(held.drafted)} tokens is open")
        end, room = held.state.tokens + len(tokens), held.state.states.capacity_tokens
        if end > room:
            raise CapacityError(f"{len(tokens)} more tokens make {end}, and there is room for {room}")
        return tokens

    def _compute(self, state: SequenceState, tokens: Tokens) -> None:
        for start in range(0, len(tokens), STEP_TOKENS_MAX):
            self._network.step(state, tokens[start : start + STEP_TOKENS_MAX])

    def _hash(self, array: Array, seed: int) -> int:
        if not isinstance(array, np.ndarray):
            out: HostArray = np.empty(array.shape, dtype=array.dtype)
            stream = self.device.stream(Direction.TO_HOST)
            self.device.to_host(array, out, stream)
            self.device.synchronize(stream)
            array = out
        return xxhash.xxh3_64_intdigest(array.data, seed)


class _ReferenceRestoration(Restoration):
    """A state's own restoration, whose result becomes a sequence of the engine."""

    def __init__(self, engine: ReferenceEngine, restoration: StateRestoration) -> None:
        self._engine = engine
        self._restoration = restoration

    def put(self, name: FrameName, arrays: Mapping[str, HostArray]) -> None:
        self._restoration.put(name.group, name.tokens, arrays)

    def commit(self) -> int:
        return self._engine.own(self._restoration.commit())

    def abort(self) -> None:
        self._restoration.abort()
