"""The promises every engine keeps, as a test class to inherit from.

    class TestMyEngine(EngineTests):
        staging_slots = 4

        def make_engine(self):
            return MyEngine(...)

Needs pytest (the `test` extra).
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest

from tiered_cache.engines.base import ComputingEngine, FrameName, HostArray
from tiered_cache.errors import CapacityError, GeometryError, StateError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import CHECKPOINT, Tokens

Frame = dict[str, HostArray]
Frames = dict[FrameName, Frame]

LENGTHS = ((0, 1), (1, -1), (1, 0), (1, 1), (2, 0), (3, -2))
"""Token counts as (blocks, tokens more): at a block's end, just before and behind it, and inside a block."""


def empty_frame(geometry: Geometry, name: FrameName) -> Frame:
    """Arrays to export a frame into, full of a pattern that is no state's."""
    return {
        part: np.full(spec.bytes, 0xA5, np.uint8).view(spec.storage).reshape(spec.shape)
        for part, spec in geometry.arrays(name.group, name.tokens).items()
    }


def frames_needed(geometry: Geometry, tokens: int) -> list[FrameName]:
    """The frames that a restore to `tokens` tokens takes."""
    names = [
        FrameName(group.name, (block + 1) * geometry.block_tokens)
        for group in geometry.block_groups
        for block in group.blocks_needed(tokens, geometry.block_tokens)
    ]
    return names + ([FrameName(CHECKPOINT, tokens)] if geometry.needs_checkpoint(tokens) else [])


def export(engine: ComputingEngine, sequence: int, names: Iterable[FrameName]) -> Frames:
    """The frames of these names, in one batch."""
    frames = {name: empty_frame(engine.geometry, name) for name in names}
    engine.export(sequence, list(frames), list(frames.values()))
    return frames


def restore(engine: ComputingEngine, frames: Mapping[FrameName, Frame], tokens: int, room: int) -> int:
    """A sequence made from the frames, with room to grow to `room` tokens; nothing is left behind if it is refused."""
    reservation = engine.reserve(room)
    restoration = None
    try:
        restoration = engine.restoration(reservation, tokens)
        for name, arrays in frames.items():
            restoration.put(name, arrays)
        return restoration.commit()
    except BaseException:
        if restoration is not None:
            restoration.abort()
        engine.cancel(reservation)
        raise


def random_prompt(engine: ComputingEngine, tokens: int, seed: int = 0) -> Tokens:
    """Token ids of the engine's vocabulary, shape [tokens]; the same for the same seed."""
    return np.random.default_rng(seed).integers(0, engine.vocabulary, tokens, dtype=np.uint32)


def same_bits(one: Frames, other: Frames) -> bool:
    """Whether two sets of frames are equal, bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(one[name][part].tobytes() == other[name][part].tobytes() for part in one[name])
        for name in one
    )


class EngineTests(ABC):
    """Subclass, give `make_engine`, and pytest runs every check."""

    staging_slots: ClassVar[int] = 8
    """How many checkpoints the engine can hold staged; 3 or more."""
    chunking_is_exact: ClassVar[bool] = True
    """Whether a prompt gives the same bits however it is cut; False if the engine's kernels round differently then."""

    @abstractmethod
    def make_engine(self) -> ComputingEngine:
        """A new worker, with room for a dozen sequences of six blocks; all have one identity and geometry."""

    def run(self, engine: ComputingEngine, tokens: Tokens, room: int = 0, cuts: Sequence[int] = ()) -> int:
        """A sequence that has computed `tokens`, in pieces where `cuts` are given."""
        sequence = engine.start(engine.reserve(max(room, len(tokens))))
        for piece in np.split(tokens, cuts):
            engine.extend(sequence, piece)
        return sequence

    def mark(self, engine: ComputingEngine, sequence: int) -> tuple[int, str, int, int]:
        """All that an engine tells of a state."""
        assert engine.next_token(sequence) < engine.vocabulary
        return (
            engine.tokens(sequence),
            engine.digest(sequence),
            engine.output(sequence),
            engine.next_token(sequence),
        )

    # -- computing

    def test_two_workers_are_of_one_kind_and_agree(self) -> None:
        one, other = self.make_engine(), self.make_engine()
        one.identity.check(other.identity)
        one.geometry.check(other.geometry)
        prompt = random_prompt(one, 2 * one.geometry.block_tokens + 1)
        assert self.mark(one, self.run(one, prompt)) == self.mark(other, self.run(other, prompt))

    def test_looking_changes_nothing(self) -> None:
        engine = self.make_engine()
        sequence = self.run(engine, random_prompt(engine, engine.geometry.block_tokens + 1))
        assert self.mark(engine, sequence) == self.mark(engine, sequence)

    def test_every_token_of_the_prefix_counts(self) -> None:
        engine = self.make_engine()
        prompt = random_prompt(engine, 2 * engine.geometry.block_tokens + 2)
        outputs = {engine.output(self.run(engine, prompt))}
        positions = {0, 1, engine.geometry.block_tokens, len(prompt) - 1}
        for position in positions:
            changed = prompt.copy()
            changed[position] = (changed[position] + 1) % engine.vocabulary
            outputs.add(engine.output(self.run(engine, changed)))
        assert len(outputs) == 1 + len(positions)

    def test_how_a_prompt_is_cut_changes_nothing(self) -> None:
        if not self.chunking_is_exact:
            pytest.skip("this engine's kernels round differently for other chunks")
        engine = self.make_engine()
        rng = np.random.default_rng(1)
        size = engine.geometry.block_tokens
        prompt = random_prompt(engine, 3 * size + 2)
        whole = self.mark(engine, self.run(engine, prompt))
        for pieces in (2, 5, len(prompt)):
            cuts = np.sort(rng.integers(0, len(prompt) + 1, pieces - 1))
            assert self.mark(engine, self.run(engine, prompt, cuts=cuts.tolist())) == whole

    # -- out and back

    @pytest.mark.parametrize(("blocks", "more"), LENGTHS)
    def test_a_restored_sequence_goes_on_as_if_it_had_never_moved(self, blocks: int, more: int) -> None:
        here, there = self.make_engine(), self.make_engine()
        size = here.geometry.block_tokens
        tokens = max(1, blocks * size + more)
        room = tokens + 2 * size + 1
        sequence = self.run(here, random_prompt(here, tokens), room)
        frames = export(here, sequence, frames_needed(here.geometry, tokens))
        restored = restore(there, frames, tokens, room)
        there.load_sampler_state(restored, here.sampler_state(sequence))
        assert self.mark(there, restored) == self.mark(here, sequence)
        for count in (1, size, 1, size - 1):
            further = random_prompt(here, count, seed=count)
            here.extend(sequence, further)
            there.extend(restored, further)
            assert self.mark(there, restored) == self.mark(here, sequence)
        names = frames_needed(here.geometry, here.tokens(sequence))
        assert same_bits(export(there, restored, names), export(here, sequence, names))

    def test_frames_come_in_any_order_and_their_arrays_are_free_at_once(self) -> None:
        engine = self.make_engine()
        tokens = 3 * engine.geometry.block_tokens + 1
        sequence = self.run(engine, random_prompt(engine, tokens))
        names = frames_needed(engine.geometry, tokens)
        restoration = engine.restoration(engine.reserve(tokens), tokens)
        for name in np.random.default_rng(2).permutation(len(names)):
            frame = export(engine, sequence, [names[name]])[names[name]]
            restoration.put(names[name], frame)
            for array in frame.values():
                array.reshape(-1).view(np.uint8)[:] = 0xA5
        assert self.mark(engine, restoration.commit()) == self.mark(engine, sequence)

    def test_exporting_changes_nothing_and_rows_stay_what_they_were(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        prompt = random_prompt(engine, 3 * size + 1)
        sequence = self.run(engine, prompt[:size], len(prompt))
        before = self.mark(engine, sequence)
        blocks = [name for name in frames_needed(engine.geometry, size) if name.group != CHECKPOINT]
        early = export(engine, sequence, blocks)
        assert self.mark(engine, sequence) == before
        engine.extend(sequence, prompt[size:])
        assert same_bits(export(engine, sequence, blocks), early)
        assert self.mark(engine, sequence) == self.mark(engine, self.run(engine, prompt, cuts=[size]))

    def test_what_cannot_be_exported_is_refused(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        tokens = 2 * size + 1
        sequence = self.run(engine, random_prompt(engine, tokens))
        before = self.mark(engine, sequence)
        group = engine.geometry.block_groups[0].name
        impossible = [FrameName(group, 3 * size), FrameName("nowhere", size), FrameName(CHECKPOINT, tokens + 1)]
        if size > 1:
            impossible.append(FrameName(group, size + 1))
        if engine.geometry.carries:
            impossible.append(FrameName(CHECKPOINT, size))
        for name in impossible:
            with pytest.raises((StateError, GeometryError)):
                engine.export(sequence, [name], [{}])
        assert self.mark(engine, sequence) == before

    def test_places_of_another_form_are_refused(self) -> None:
        engine = self.make_engine()
        tokens = engine.geometry.block_tokens + 1
        sequence = self.run(engine, random_prompt(engine, tokens))
        before = self.mark(engine, sequence)
        for name in frames_needed(engine.geometry, tokens):
            for frame in _deformed(empty_frame(engine.geometry, name)):
                with pytest.raises((StateError, GeometryError)):
                    engine.export(sequence, [name], [frame])
        assert self.mark(engine, sequence) == before

    # -- staging

    def test_a_staged_checkpoint_stays_what_it_was(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        prompt = random_prompt(engine, 4 * size)
        sequence = engine.start(engine.reserve(len(prompt)))
        taken: dict[int, Frames] = {}
        marks = {}
        for stop in (1, size, 2 * size + 1):
            engine.extend(sequence, prompt[engine.tokens(sequence) : stop])
            engine.stage(sequence)
            marks[stop] = self.mark(engine, sequence)
            taken[stop] = export(engine, sequence, frames_needed(engine.geometry, stop))
        engine.extend(sequence, prompt[engine.tokens(sequence) :])
        for stop, frames in taken.items():
            later = export(engine, sequence, frames)
            assert same_bits(later, frames)
            assert self.mark(engine, restore(engine, later, stop, stop)) == marks[stop]

    def test_staging_slots_are_bounded_and_come_back(self) -> None:
        engine = self.make_engine()
        prompt = random_prompt(engine, self.staging_slots + 1)
        one = engine.start(engine.reserve(len(prompt)))
        for index in range(self.staging_slots):
            engine.extend(one, prompt[index : index + 1])
            engine.stage(one)
        engine.extend(one, prompt[-1:])
        before = self.mark(engine, one)
        with pytest.raises(CapacityError):
            engine.stage(one)
        assert self.mark(engine, one) == before
        other = self.run(engine, prompt[:1])
        with pytest.raises(CapacityError):
            engine.stage(other)
        engine.release(one)
        engine.stage(other)

    # -- restorations that are refused

    def test_a_missing_frame_is_refused_at_the_commit(self) -> None:
        engine = self.make_engine()
        tokens = 2 * engine.geometry.block_tokens + 1
        sequence = self.run(engine, random_prompt(engine, tokens))
        frames = export(engine, sequence, frames_needed(engine.geometry, tokens))
        for missing in frames:
            self.refuses(engine, {n: f for n, f in frames.items() if n != missing}, tokens)

    def test_arrays_of_another_form_are_refused(self) -> None:
        engine = self.make_engine()
        tokens = engine.geometry.block_tokens + 1
        frames = export(engine, self.run(engine, random_prompt(engine, tokens)), frames_needed(engine.geometry, tokens))
        for name, frame in frames.items():
            for deformed in _deformed(frame):
                self.refuses(engine, {**frames, name: deformed}, tokens)

    def test_frames_that_are_not_needed_are_refused(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        tokens = size + 1
        sequence = self.run(engine, random_prompt(engine, tokens), 3 * size)
        frames = export(engine, sequence, frames_needed(engine.geometry, tokens))
        engine.extend(sequence, random_prompt(engine, 3 * size - tokens))
        self.refuses(engine, frames | export(engine, sequence, frames_needed(engine.geometry, 3 * size)), tokens)

    def test_a_frame_that_comes_twice_is_refused(self) -> None:
        engine = self.make_engine()
        tokens = engine.geometry.block_tokens
        frames = export(engine, self.run(engine, random_prompt(engine, tokens)), frames_needed(engine.geometry, tokens))
        name, frame = next(iter(frames.items()))
        reservation = engine.reserve(tokens)
        restoration = engine.restoration(reservation, tokens)
        restoration.put(name, frame)
        with pytest.raises(StateError):
            restoration.put(name, frame)
        restoration.abort()
        engine.cancel(reservation)

    def refuses(self, engine: ComputingEngine, frames: Frames, tokens: int) -> None:
        """The frames are refused, and afterwards room and other sequences are as they were."""
        bystander = self.run(engine, random_prompt(engine, engine.geometry.block_tokens + 1, seed=9))
        mark, free = self.mark(engine, bystander), engine.bytes_free()
        with pytest.raises((StateError, GeometryError)):
            restore(engine, frames, tokens, tokens)
        assert engine.bytes_free() == free
        assert self.mark(engine, bystander) == mark
        engine.release(bystander)

    def test_an_aborted_restoration_leaves_nothing(self) -> None:
        engine = self.make_engine()
        tokens = engine.geometry.block_tokens + 1
        frames = export(engine, self.run(engine, random_prompt(engine, tokens)), frames_needed(engine.geometry, tokens))
        name, frame = next(iter(frames.items()))
        free = engine.bytes_free()
        for puts in (0, 1):
            reservation = engine.reserve(tokens)
            restoration = engine.restoration(reservation, tokens)
            for _ in range(puts):
                restoration.put(name, frame)
            restoration.abort()
            restoration.abort()
            engine.cancel(reservation)
            assert engine.bytes_free() == free
            with pytest.raises(StateError):
                restoration.put(name, frame)
            with pytest.raises(StateError):
                restoration.commit()
            assert engine.bytes_free() == free

    def test_an_abort_after_the_commit_does_nothing(self) -> None:
        engine = self.make_engine()
        tokens = engine.geometry.block_tokens
        sequence = self.run(engine, random_prompt(engine, tokens))
        frames = export(engine, sequence, frames_needed(engine.geometry, tokens))
        reservation = engine.reserve(tokens)
        restoration = engine.restoration(reservation, tokens)
        for name, frame in frames.items():
            restoration.put(name, frame)
        restored = restoration.commit()
        free = engine.bytes_free()
        restoration.abort()
        engine.cancel(reservation)
        assert engine.bytes_free() == free
        assert self.mark(engine, restored) == self.mark(engine, sequence)

    # -- state that is not the right one

    @pytest.mark.parametrize(("blocks", "more"), [(2, 0), (2, 1)])
    def test_frames_of_another_prefix_show(self, blocks: int, more: int) -> None:
        """Frames of equal size from elsewhere: a stale checkpoint, another prompt's rows."""
        engine = self.make_engine()
        tokens = blocks * engine.geometry.block_tokens + more
        names = frames_needed(engine.geometry, tokens)
        sequence = self.run(engine, random_prompt(engine, tokens))
        right, foreign = (
            export(engine, s, names) for s in (sequence, self.run(engine, random_prompt(engine, tokens, seed=1)))
        )
        _, digest, output, _ = self.mark(engine, sequence)
        for name in names:
            wrong = restore(engine, right | {name: foreign[name]}, tokens, tokens)
            assert engine.output(wrong) != output
            assert engine.digest(wrong) != digest
            engine.release(wrong)

    def test_blocks_in_each_others_place_show(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        sequence = self.run(engine, random_prompt(engine, 2 * size))
        frames = export(engine, sequence, frames_needed(engine.geometry, 2 * size))
        first, second = (FrameName(engine.geometry.block_groups[0].name, n) for n in (size, 2 * size))
        if first not in frames:
            pytest.skip("a window of one block has no second one")
        swapped = frames | {first: frames[second], second: frames[first]}
        wrong = restore(engine, swapped, 2 * size, 2 * size)
        assert engine.output(wrong) != engine.output(sequence)
        assert engine.digest(wrong) != engine.digest(sequence)

    def test_any_flipped_byte_shows_or_is_refused(self) -> None:
        engine = self.make_engine()
        tokens = engine.geometry.block_tokens + 1
        sequence = self.run(engine, random_prompt(engine, tokens))
        frames = export(engine, sequence, frames_needed(engine.geometry, tokens))
        arrays = [array.reshape(-1).view(np.uint8) for frame in frames.values() for array in frame.values()]
        rng = np.random.default_rng(3)
        for array, _ in itertools.product(arrays, range(8)):
            if not array.size:
                continue
            position, flip = rng.integers(array.size), rng.integers(1, 256)
            array[position] ^= flip
            free = engine.bytes_free()
            try:
                wrong = restore(engine, frames, tokens, tokens)
            except StateError:
                assert engine.bytes_free() == free
            else:
                assert engine.output(wrong) != engine.output(sequence)
                assert engine.digest(wrong) != engine.digest(sequence)
                engine.release(wrong)
            array[position] ^= flip
        assert self.mark(engine, restore(engine, frames, tokens, tokens)) == self.mark(engine, sequence)

    # -- room

    def test_room_is_counted_exactly(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        free = engine.bytes_free()
        reservation = engine.reserve(size)
        taken = free - engine.bytes_free()
        assert taken >= engine.geometry.restore_bytes(size)
        sequence = engine.start(reservation)
        engine.extend(sequence, random_prompt(engine, size))
        engine.stage(sequence)
        assert engine.bytes_free() == free - taken
        second = engine.reserve(size)
        assert engine.bytes_free() == free - 2 * taken
        engine.cancel(second)
        engine.release(sequence)
        assert engine.bytes_free() == free

    def test_nothing_is_reserved_that_does_not_fit(self) -> None:
        engine = self.make_engine()
        empty = engine.bytes_free()
        reservations = []
        tokens = 1 << 40
        while tokens:
            free = engine.bytes_free()
            try:
                reservations.append(engine.reserve(tokens))
            except CapacityError:
                assert engine.bytes_free() == free
                tokens //= 2
            else:
                assert 0 <= engine.bytes_free() < free
        assert reservations
        for reservation in reservations:
            engine.cancel(reservation)
        assert engine.bytes_free() == empty

    def test_a_sequence_does_not_outgrow_its_room(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        sequence = self.run(engine, random_prompt(engine, size + 1))
        before, free = self.mark(engine, sequence), engine.bytes_free()
        with pytest.raises(CapacityError):
            engine.extend(sequence, random_prompt(engine, 16 * size + 1024))
        assert self.mark(engine, sequence) == before
        assert engine.bytes_free() == free

    def test_a_restoration_does_not_outgrow_its_room(self) -> None:
        engine = self.make_engine()
        free = engine.bytes_free()
        reservation = engine.reserve(1)
        with pytest.raises(CapacityError):
            engine.restoration(reservation, 16 * engine.geometry.block_tokens + 1024)
        engine.cancel(reservation)
        assert engine.bytes_free() == free

    def test_giving_back_is_idempotent(self) -> None:
        engine = self.make_engine()
        free = engine.bytes_free()
        reservation = engine.reserve(4)
        engine.cancel(reservation)
        engine.cancel(reservation)
        assert engine.bytes_free() == free
        reservation = engine.reserve(4)
        sequence = engine.start(reservation)
        engine.extend(sequence, random_prompt(engine, 4))
        before = self.mark(engine, sequence)
        engine.cancel(reservation)
        assert self.mark(engine, sequence) == before
        engine.stage(sequence)
        engine.release(sequence)
        engine.release(sequence)
        assert engine.bytes_free() == free

    def test_what_is_gone_stays_gone(self) -> None:
        engine = self.make_engine()
        reservation = engine.reserve(4)
        sequence = engine.start(reservation)
        engine.release(sequence)
        for call in self.calls_on(engine, sequence):
            with pytest.raises(StateError):
                call()
        for use in (engine.start, lambda number: engine.restoration(number, 1)):
            with pytest.raises(StateError):
                use(reservation)
        survivor = self.run(engine, random_prompt(engine, 4))
        assert survivor != sequence

    def calls_on(self, engine: ComputingEngine, sequence: int) -> list[Callable[[], object]]:
        """Everything that needs a live sequence."""
        return [
            lambda: engine.tokens(sequence),
            lambda: engine.extend(sequence, random_prompt(engine, 1)),
            lambda: engine.stage(sequence),
            lambda: engine.export(sequence, [], []),
            lambda: engine.output(sequence),
            lambda: engine.next_token(sequence),
            lambda: engine.digest(sequence),
        ]

    def test_threads_take_and_give_back_exactly(self) -> None:
        engine = self.make_engine()
        size = engine.geometry.block_tokens
        free = engine.bytes_free()
        expected = self.mark(engine, self.run(engine, random_prompt(engine, 2 * size)))

        def work(_: int) -> None:
            for _ in range(5):
                sequence = self.run(engine, random_prompt(engine, 2 * size))
                frames = export(engine, sequence, frames_needed(engine.geometry, 2 * size))
                engine.release(sequence)
                restored = restore(engine, frames, 2 * size, 2 * size)
                assert self.mark(engine, restored) == expected
                engine.release(restored)
                engine.cancel(engine.reserve(1))

        taken = free - engine.bytes_free()
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(work, range(4)))
        assert engine.bytes_free() == free - taken


def _deformed(frame: Frame) -> list[Frame]:
    """The frame with one thing wrong: an array missing, one too many, one of another dtype, shape or rank."""
    name, array = max(frame.items(), key=lambda item: item[1].nbytes)
    others = {n: a for n, a in frame.items() if n != name}
    other_dtype = np.zeros(array.shape, np.int16 if array.dtype != np.int16 else np.uint16)
    return [
        others,
        {**frame, "foreign": np.zeros(4, np.uint8)},
        {**others, name: other_dtype},
        {**others, name: np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)},
        {**others, name: array.reshape(-1).copy()},
    ]
