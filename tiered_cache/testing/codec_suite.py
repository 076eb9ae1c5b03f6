"""The promises every codec keeps, as a test class to inherit from.

    class TestMyCodec(CodecTests):
        codec = MyCodec()
        payloads = (numpy arrays of bytes that it must take, ...)

Needs pytest (the `test` extra).
"""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import pytest
import zstandard

from tiered_cache.codecs import CHUNK_BYTES, Bytes, Codec, EncodedSection
from tiered_cache.errors import FrameError

_GUARD_BYTES = 64


def stored_form(encoded: EncodedSection) -> Bytes:
    """The stored bytes in one array."""
    return np.frombuffer(b"".join(encoded.buffers), np.uint8)


def decode_guarded(codec: Codec, stored: Bytes, chunk_bytes: Sequence[int], raw_bytes: int) -> Bytes:
    """Decode into the middle of a larger array and check that nothing around it is written, error or not."""
    room = np.full(raw_bytes + 2 * _GUARD_BYTES, 0xA5, np.uint8)
    out = room[_GUARD_BYTES : _GUARD_BYTES + raw_bytes]
    try:
        codec.decode(stored, chunk_bytes, out)
    finally:
        assert (room[:_GUARD_BYTES] == 0xA5).all()
        assert (room[_GUARD_BYTES + raw_bytes :] == 0xA5).all()
    return out


class CodecTests:
    """Subclass, set `codec` and `payloads`, and pytest runs every check."""

    codec: ClassVar[Codec]
    payloads: ClassVar[Sequence[Bytes]]
    """Contents that the codec must take; one at least should be larger than a chunk."""

    def encode(self, raw: Bytes) -> EncodedSection:
        encoded = self.codec.encode(raw)
        assert encoded is not None, f"{self.codec} refuses a payload of {raw.size} bytes"
        return encoded

    def test_payloads_come_back(self) -> None:
        for raw in self.payloads:
            before = raw.copy()
            raw.flags.writeable = False
            encoded = self.encode(raw)
            stored = stored_form(encoded)
            assert encoded.codec is self.codec
            assert encoded.stored_bytes == stored.size <= self.codec.stored_bytes_max(raw.size)
            self.codec.check_layout(stored.size, encoded.chunk_bytes, raw.size)
            assert np.array_equal(decode_guarded(self.codec, stored, encoded.chunk_bytes, raw.size), before)
            assert np.array_equal(raw, before)

    def test_encoding_is_deterministic(self) -> None:
        for raw in self.payloads:
            first, second = self.encode(raw), self.encode(raw.copy())
            assert first.chunk_bytes == second.chunk_bytes
            assert np.array_equal(stored_form(first), stored_form(second))

    def test_any_bytes_are_refused_or_exact(self) -> None:
        generator = np.random.default_rng(11)
        for distinct in (1, 2, 17, 256):
            for size in (0, 1, 2, 7, 64, 1000, 4096, 100_002):
                raw = generator.integers(0, distinct, size, dtype=np.uint8)
                encoded = self.codec.encode(raw)
                if encoded is not None:
                    assert encoded.stored_bytes <= self.codec.stored_bytes_max(raw.size)
                    out = decode_guarded(self.codec, stored_form(encoded), encoded.chunk_bytes, raw.size)
                    assert np.array_equal(out, raw)

    def test_other_sizes_are_refused_or_stay_inside_their_bounds(self) -> None:
        for raw in self.payloads:
            encoded = self.encode(raw)
            stored = stored_form(encoded)
            longer = np.concatenate((stored, stored[:1]))
            for piece in (stored, stored[:0], stored[:-1], stored[: stored.size // 3], longer):
                for size in (0, 1, raw.size // 2, raw.size - 1, raw.size, raw.size + 1, 2 * raw.size + 3):
                    self._decode_as_laid_out(piece, encoded.chunk_bytes, size)

    def test_other_chunk_sizes_are_refused(self) -> None:
        for raw in self.payloads:
            encoded = self.encode(raw)
            stored, sizes = stored_form(encoded), list(encoded.chunk_bytes)
            lies = [[*sizes, 0], [*sizes, 1], [-1, *sizes], sizes[:-1] if sizes else [stored.size], [1 << 62]]
            if sizes:
                lies += [[0, *sizes[1:]], [-sizes[0], *sizes[1:]], [sizes[0] + 1, *sizes[1:]]]
            for lie in lies:
                with pytest.raises(FrameError):
                    self.codec.check_layout(stored.size, lie, raw.size)
                with pytest.raises(FrameError):
                    decode_guarded(self.codec, stored, lie, raw.size)

    def test_any_stored_bytes_are_refused_or_stay_inside_their_bounds(self) -> None:
        generator = np.random.default_rng(7)
        for raw in self.payloads:
            encoded = self.encode(raw)
            stored = stored_form(encoded)
            for share in (0.001, 0.1, 1.0):
                noise = generator.integers(0, 256, stored.size, dtype=np.uint8)
                mixed = np.where(generator.random(stored.size) < share, noise, stored)
                self._decode_as_laid_out(mixed, encoded.chunk_bytes, raw.size)
            for position in generator.integers(0, stored.size, 50):
                flipped = stored.copy()
                flipped[position] ^= 1 << int(generator.integers(8))
                self._decode_as_laid_out(flipped, encoded.chunk_bytes, raw.size)

    def test_a_chunk_that_expands_beyond_its_size_is_refused(self) -> None:
        bomb = np.frombuffer(zstandard.compress(bytes(256 << 20)), np.uint8)
        raw_bytes = bomb.size * 8  # the bomb fits where a chunk of this section is
        tracemalloc.start()
        try:
            for planes in (1, 2, 4, 8):
                fill = raw_bytes // planes
                others = np.zeros(fill * (planes - 1), np.uint8)
                stored = np.concatenate((bomb, others))
                self._decode_as_laid_out(stored, [bomb.size, *[fill] * (planes - 1)], raw_bytes)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 * raw_bytes + 4 * CHUNK_BYTES

    def test_threads_do_not_disturb_each_other(self) -> None:
        def round_trip(raw: Bytes) -> bool:
            encoded = self.encode(raw)
            out = np.empty_like(raw)
            self.codec.decode(stored_form(encoded), encoded.chunk_bytes, out)
            return np.array_equal(out, raw)

        work = list(itertools.islice(itertools.cycle(self.payloads), 32))
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(round_trip, work))

    def _decode_as_laid_out(self, stored: Bytes, chunk_bytes: Sequence[int], raw_bytes: int) -> None:
        """Decoding refuses what `check_layout` refuses, and any refusal is a `FrameError`."""
        try:
            self.codec.check_layout(stored.size, chunk_bytes, raw_bytes)
        except FrameError:
            with pytest.raises(FrameError):
                decode_guarded(self.codec, stored, chunk_bytes, raw_bytes)
        else:
            with contextlib.suppress(FrameError):
                decode_guarded(self.codec, stored, chunk_bytes, raw_bytes)
