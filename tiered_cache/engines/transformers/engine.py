"""`TransformersEngine`: sequences of one transformers model, each in a cache of its own.

The model computes one sequence at a time, without padding, in eager or compiled form, on whatever device it is. Its
caches grow as it computes; what a sequence may take at most is booked when it is reserved.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash

from tiered_cache.engines.base import ComputingEngine, FrameName, HostArray, Restoration
from tiered_cache.engines.transformers.identity import identity_of
from tiered_cache.engines.transformers.layout import Cache, Place, Tensor
from tiered_cache.engines.transformers.probe import Stepper, probe
from tiered_cache.errors import CapacityError, ConfigError, PositionError, ReleasedError, StateError
from tiered_cache.geometry import ArraySpec, PartKind
from tiered_cache.identity import CHECKPOINT, Tokens
from tiered_cache.states.ngrams import check_token_ids
from tiered_cache.states.state_set import check_arrays

STEP_TOKENS_MAX = 512
"""How many tokens one call of the model computes; other cuts of a prompt may round differently."""

DRIFT_EXPECTED = 0.05
"""What rounding alone may change between a prompt at once and token by token; above it the log says so."""

logger = logging.getLogger(__name__)

_READ_TOKENS = 1024  # of rows that are hashed at a time


@dataclass(slots=True)
class _Sequence:
    """A sequence: its cache, None before the first token, and the logits of its last token if they were computed."""

    room: int
    cache: Cache | None = None
    tokens: int = 0
    logits: Tensor | None = None
    staged: dict[int, Mapping[Place, Tensor]] = field(default_factory=dict)


class TransformersEngine(ComputingEngine):
    """Sequences of a causal language model.

    Safe to call from several threads for different sequences. `next_token` is the greedy one. A sequence restored from
    frames has no next token until one more token was computed, or `load_sampler_state` gave it the logits: they are no
    part of a prefix's state.
    """

    def __init__(
        self,
        model: Any,
        *,
        block_tokens: int | None = None,
        capacity_bytes: int = 1 << 30,
        staging_slots: int = 8,
        step_tokens_max: int = STEP_TOKENS_MAX,
        static_tokens: int | None = None,
        tenant_salt: bytes = b"",
        tokenizer_digest: bytes = b"",
    ) -> None:
        """`model`: a transformers model with a language model's head, in evaluation mode.

        `block_tokens`: by default what makes frames of about 2 MiB. `capacity_bytes` bounds what all sequences hold
        together; at most `staging_slots` checkpoints lie beside it. With `static_tokens` every sequence gets a static
        cache of that capacity. The model is tried on a few tokens. Raises `ConfigError`, `GeometryError`, and
        `StateError` naming what of its state cannot be carried.
        """
        if step_tokens_max < 1 or staging_slots < 0 or capacity_bytes < 0:
            raise ConfigError(
                f"step_tokens_max {step_tokens_max} is below 1, or staging_slots {staging_slots} or capacity_bytes "
                f"{capacity_bytes} below 0"
            )
        self.model = model
        self.capacity_bytes = capacity_bytes
        self.step_tokens_max = step_tokens_max
        self.static_tokens = static_tokens
        self._stepper = Stepper(model, static_tokens)
        probed = probe(self._stepper, block_tokens)
        self._layout = probed.layout
        self.step_drift = probed.step_drift
        self.goes_on_in_chunks = probed.goes_on_in_chunks
        if not self.goes_on_in_chunks:
            logger.warning(
                "%s forgets its state when several tokens follow it: after the first call it gets them one by one",
                type(model).__name__,
            )
        if self.step_drift > DRIFT_EXPECTED:
            logger.warning(
                "%s goes on from its cache otherwise than it computes at once, by %.0f %% of the largest logit: so it "
                "does after a restore",
                type(model).__name__,
                100 * self.step_drift,
            )
        self.geometry = self._layout.geometry
        self.identity = identity_of(
            model, static_tokens=static_tokens, tenant_salt=tenant_salt, tokenizer_digest=tokenizer_digest
        )
        self._row_bytes = sum(p.row_bytes * len(p.layers) for p in self.geometry.parts if p.kind is PartKind.ROWS)
        self._carry_bytes = sum(part.array(0).bytes for part in self.geometry.carries)
        self._output_seed = int.from_bytes(self.identity.weights_digest[:8], "little")
        self._taken_bytes = 0
        self._staging_slots = staging_slots
        self._slots_free = staging_slots
        self._reservations: dict[int, int] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def vocabulary(self) -> int:
        """Token ids lie below this."""
        return self._stepper.vocabulary

    # -- room

    def bytes_free(self) -> int:
        return self.capacity_bytes - self._taken_bytes

    def sequence_bytes(self, tokens: int) -> int:
        """What room for `tokens` tokens takes of the capacity."""
        return self._row_bytes * (self.static_tokens or tokens) + self._carry_bytes

    def reserve(self, tokens: int) -> int:
        if self.static_tokens is not None and tokens > self.static_tokens:
            raise CapacityError(f"{tokens} tokens in static caches of {self.static_tokens}")
        wanted = self.sequence_bytes(tokens)
        with self._lock:
            if wanted > (free := self.bytes_free()):
                raise CapacityError(f"{tokens} tokens take {wanted} bytes, {free} of {self.capacity_bytes} are free")
            self._taken_bytes += wanted
            number = next(self._numbers)
            self._reservations[number] = tokens
            return number

    def cancel(self, reservation: int) -> None:
        """As `Engine.cancel`; also a no-op once a restoration has begun, whose `abort` gives the room back."""
        with self._lock:
            room = self._reservations.pop(reservation, None)
            if room is not None:
                self._taken_bytes -= self.sequence_bytes(room)

    def start(self, reservation: int) -> int:
        """As `ComputingEngine.start`. Raises `ReleasedError` for a reservation that is gone."""
        return self._own(_Sequence(self._use(reservation, 0)))

    def restoration(self, reservation: int, tokens: int) -> Restoration:
        """As `Engine.restoration`; the reservation is used up by it.

        Raises `ReleasedError` for a reservation that is gone, `CapacityError` for more tokens than were reserved,
        `PositionError` for none; the reservation stays then.
        """
        if tokens < 1:
            raise PositionError(f"a restore to {tokens} tokens")
        return _Restoration(self, self._use(reservation, tokens), tokens)

    def release(self, sequence: int) -> None:
        with self._lock:
            held = self._sequences.pop(sequence, None)
            if held is not None:
                self._taken_bytes -= self.sequence_bytes(held.room)
                self._slots_free += len(held.staged)

    def _use(self, reservation: int, tokens: int) -> int:
        """The tokens that were reserved, at least `tokens`; the reservation is used up."""
        with self._lock:
            room = self._reservations.get(reservation)
            if room is None:
                raise ReleasedError(f"reservation {reservation} was given back or used")
            if tokens > room:
                raise CapacityError(f"{tokens} tokens in a reservation for {room}")
            del self._reservations[reservation]
            return room

    def _own(self, held: _Sequence) -> int:
        with self._lock:
            number = next(self._numbers)
            self._sequences[number] = held
            return number

    def _give_back(self, room: int) -> None:
        with self._lock:
            self._taken_bytes -= self.sequence_bytes(room)

    def _held(self, sequence: int) -> _Sequence:
        held = self._sequences.get(sequence)
        if held is None:
            raise ReleasedError(f"sequence {sequence} was released")
        return held

    # -- a cache of one's own

    def adopt(self, cache: Cache, tokens: int, room: int, attention_mask: Tensor | None = None) -> int:
        """Take over a cache that this model filled elsewhere, in `generate` say; returns the sequence's handle.

        It must stand at `tokens` tokens. `attention_mask`, [1, tokens], is that of the prompt, if there was one. Raises
        `StateError` naming what cannot be carried: padding, several sequences, a foreign layer or setting, a layer
        that stands elsewhere; `CapacityError` without room for `room` tokens.
        """
        if attention_mask is not None and not bool(attention_mask.bool().all()):
            raise StateError("the prompt was padded: its rows are not those of its tokens alone")
        if not 0 < tokens <= room:
            raise PositionError(f"a cache of {tokens} tokens, in room for {room}")
        self._layout.check(cache, tokens)
        return self._own(_Sequence(self._use(self.reserve(room), tokens), cache, tokens))

    def hand_over(self, sequence: int) -> Cache:
        """The sequence's cache, for the caller to go on with; the sequence is released here."""
        held = self._held(sequence)
        if held.cache is None:
            raise StateError(f"sequence {sequence} is empty")
        self.release(sequence)
        return held.cache

    # -- state out

    def tokens(self, sequence: int) -> int:
        return self._held(sequence).tokens

    def stage(self, sequence: int) -> None:
        """As `Engine.stage`; to stage one count twice takes one slot."""
        held = self._held(sequence)
        if held.tokens < 1:
            raise PositionError(f"sequence {sequence} is empty")
        if held.tokens in held.staged:
            return
        self._layout.check(held.cache, held.tokens)
        with self._lock:
            if not self._slots_free:
                raise CapacityError(f"all {self._staging_slots} staging slots are taken")
            self._slots_free -= 1
        try:
            held.staged[held.tokens] = self._layout.take(held.cache)
        except BaseException:
            with self._lock:
                self._slots_free += 1
            raise

    def export(self, sequence: int, names: Sequence[FrameName], out: Sequence[Mapping[str, HostArray]]) -> None:
        if len(names) != len(out):
            raise StateError(f"{len(names)} frames to export into {len(out)} places")
        held = self._held(sequence)
        for name, arrays in zip(names, out, strict=True):
            check_arrays(self._exportable(held, name), arrays, as_destination=True)
        if names:
            self._layout.check(held.cache, held.tokens)
        carries = {part.name for part in self.geometry.carries}
        for name, arrays in zip(names, out, strict=True):
            start, stop = self.geometry.span(name.group, name.tokens)
            for part, array in arrays.items():
                if part in carries:
                    taken = held.staged.get(name.tokens) or self._layout.carries_of(held.cache)
                    self._layout.read_carry(taken, part, array)
                else:
                    self._layout.read(held.cache, start, stop, part, array)

    def _exportable(self, held: _Sequence, name: FrameName) -> Mapping[str, ArraySpec]:
        if not 0 < name.tokens <= held.tokens:
            raise PositionError(f"{name.group} frame at {name.tokens}, where the sequence stands at {held.tokens}")
        at = {held.tokens, *held.staged}
        if name.group == CHECKPOINT and self.geometry.carries and name.tokens not in at:
            raise PositionError(f"checkpoint at {name.tokens}, where the carries are known at {sorted(at)} alone")
        return self.geometry.arrays(name.group, name.tokens)

    def sampler_state(self, sequence: int) -> bytes:
        """The logits of the last token, in the model's dtype; empty if they were not computed here."""
        logits = self._held(sequence).logits
        return b"" if logits is None else logits.contiguous().view(torch.uint8).cpu().numpy().tobytes()

    def load_sampler_state(self, sequence: int, state: bytes) -> None:
        held = self._held(sequence)
        dtype = self._stepper.logits_dtype
        if len(state) not in {0, self.vocabulary * dtype.itemsize}:
            raise StateError(f"{len(state)} bytes are not the logits of {self.vocabulary} tokens in {dtype}")
        raw = np.frombuffer(bytearray(state), dtype=np.uint8)
        held.logits = torch.from_numpy(raw).view(dtype).to(self.model.device) if state else None

    # -- computing

    def extend(self, sequence: int, tokens: Tokens) -> None:
        """As `ComputingEngine.extend`; also raises `TokenError`."""
        held = self._held(sequence)
        tokens = check_token_ids(tokens, self.vocabulary)
        if (end := held.tokens + len(tokens)) > held.room:
            raise CapacityError(f"{len(tokens)} more tokens make {end}, and there is room for {held.room}")
        width = self.step_tokens_max
        if not self.goes_on_in_chunks:
            width = 1 if held.tokens else max(1, len(tokens))
        for start in range(0, len(tokens), width):
            piece = tokens[start : start + width]
            held.cache, held.logits = self._stepper.step(held.cache, held.tokens, piece)
            held.tokens += len(piece)

    def logits(self, sequence: int) -> Tensor:
        """Of the last token, [vocabulary]. Raises `StateError` if no token was computed since the restore."""
        held = self._held(sequence)
        if held.logits is None:
            raise StateError(f"sequence {sequence}: no token was computed here, and the state holds no logits")
        return held.logits

    def generate(self, sequence: int, count: int, stop_tokens: Collection[int] = ()) -> Tokens:
        """Decode up to `count` tokens greedily, one step each, to the first of `stop_tokens`; returns them, and it.

        Raises as `extend` and as `logits`, before any is computed.
        """
        held = self._held(sequence)
        if held.tokens + count > held.room:
            raise CapacityError(f"{count} tokens after {held.tokens}, and there is room for {held.room}")
        generated: list[int] = []
        while len(generated) < count and not (generated and generated[-1] in stop_tokens):
            generated.append(self.next_token(sequence))
            self.extend(sequence, np.array(generated[-1:], dtype=np.uint32))
        return np.array(generated, dtype=np.uint32)

    def output(self, sequence: int) -> int:
        """xxh3_64 over all parts, seeded by the weights: what the model emits next is a function of exactly these."""
        return xxhash.xxh3_64_intdigest(self._bits(self._held(sequence)), self._output_seed)

    def next_token(self, sequence: int) -> int:
        """The token of the highest logit. Raises as `logits`."""
        return int(self.logits(sequence).argmax())

    def digest(self, sequence: int) -> str:
        """xxh3_128, in hex, over names, rows [0, tokens) and carries."""
        return self._bits(self._held(sequence)).hex()

    def _bits(self, held: _Sequence) -> bytes:
        digest = xxhash.xxh3_128(held.tokens.to_bytes(8, "little"))
        if not held.tokens:
            return digest.digest()
        self._layout.check(held.cache, held.tokens)
        carries = self._layout.carries_of(held.cache)
        group = self._layout.group_tokens
        for part in self.geometry.parts:
            digest.update(part.name.encode() + b"\0")
            if part.kind is PartKind.CARRY:
                out = _empty(part.array(0))
                self._layout.read_carry(carries, part.name, out)
                digest.update(out.reshape(-1).view(np.uint8).data)
                continue
            step = -(-_READ_TOKENS // group) * group
            for start in range(0, held.tokens, step):
                stop = min(start + step, held.tokens)
                out = _empty(part.array(stop - start))
                self._layout.read(held.cache, start, stop, part.name, out)
                digest.update(out.reshape(-1).view(np.uint8).data)
        return bytes(digest.digest())


class _Restoration(Restoration):
    """A cache in the making, in reserved room."""

    def __init__(self, engine: TransformersEngine, room: int, tokens: int) -> None:
        self._engine = engine
        self._layout = engine._layout  # noqa: SLF001 - one class in two parts
        self._room = room
        self._tokens = tokens
        self._open = True
        try:
            self._cache = self._layout.make(tokens)
        except BaseException:
            self.abort()
            raise
        geometry = engine.geometry
        size = geometry.block_tokens
        names = [
            FrameName(group.name, (block + 1) * size)
            for group in geometry.block_groups
            for block in group.blocks_needed(tokens, size)
        ]
        if geometry.needs_checkpoint(tokens):
            names.append(FrameName(CHECKPOINT, tokens))
        self._missing = dict.fromkeys(names)
        self._came: set[FrameName] = set()

    def put(self, name: FrameName, arrays: Mapping[str, HostArray]) -> None:
        self._check_open()
        if name not in self._missing:
            why = "came twice" if name in self._came else "is not needed"
            raise StateError(f"{name.group} frame at {name.tokens} {why} in a restore to {self._tokens}")
        geometry = self._engine.geometry
        check_arrays(geometry.arrays(name.group, name.tokens), arrays)
        self._layout.load(self._cache, *geometry.span(name.group, name.tokens), arrays)
        del self._missing[name]
        self._came.add(name)

    def commit(self) -> int:
        self._check_open()
        if self._missing:
            lacking = ", ".join(f"{group} at {tokens}" for group, tokens in self._missing)
            raise StateError(f"restore to {self._tokens} lacks {lacking}")
        self._layout.check(self._cache, self._tokens)
        self._open = False
        return self._engine._own(_Sequence(self._room, self._cache, self._tokens))  # noqa: SLF001

    def abort(self) -> None:
        if self._open:
            self._open = False
            self._cache = None
            self._engine._give_back(self._room)  # noqa: SLF001

    def _check_open(self) -> None:
        if not self._open:
            raise StateError(f"the restoration to {self._tokens} is over")


def load_engine(path: Path, *, device: str = "cpu", **options: Any) -> TransformersEngine:
    """The engine of a model in a local directory, of the class and in the dtype that its configuration names.

    Never looks elsewhere, and runs no code but transformers' own. Raises `ConfigError` if there is no such model.
    """
    if not path.is_dir():
        raise ConfigError(f"there is no model directory {path}")
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None) if name.endswith(("ForCausalLM", "ForConditionalGeneration")) else None
    if kind is None:
        raise ConfigError(f"{path}: transformers has no language model class {name!r}")
    model = kind.from_pretrained(path, dtype="auto", local_files_only=True)
    return TransformersEngine(model.to(device).eval(), **options)


def _empty(spec: ArraySpec) -> HostArray:
    return np.empty(spec.shape, dtype=spec.storage)
