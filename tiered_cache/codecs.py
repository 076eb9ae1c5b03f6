"""Lossless codecs for the sections of a frame: bytes in, bytes out, the size known before anything is decoded.

A codec sees one section as a flat array of bytes and never its shape. `encode` cuts it into chunks of 1 MiB so that
encoder, decoder and merge stay in the core's cache; `chunk_bytes`, the stored size of every chunk, travels in the
frame's header, so the whole layout of the stored bytes is checked by arithmetic alone (`check_layout`) before a
decoder sees them. A decoder writes into memory of exactly the declared size and never beyond.

    id  codec        stored bytes                                                  chunk_bytes
    0   RAW          the bytes                                                     none
    1   CONST        one element of 1, 2, 4 or 8 bytes; the section repeats it     none
    2   BF16_SPLIT   plane 0 (low bytes) of every element, then plane 1            planes x chunks
    3   F32_PLANES   planes 0 .. 3 of 4-byte elements                              planes x chunks
    4   BYTES_HUF    one plane: the bytes                                          chunks
    5   PACKBITS     bytes that are 0 or 1, eight to a byte, first in bit 0        none
    6   ZSTD         one plane: the bytes                                          chunks
    7   ZSTD_U16     u32 elements below 2**16 as u16                               chunks

Plane k of a section holds byte k of every little-endian element. A chunk of a plane covers 1 MiB of the section
(the last one the rest), and its stored size says what it is: equal to the chunk's own size, the bytes as they are;
1, one byte that the chunk repeats; anything between, a zstd frame (RFC 8878) with its content size in the header and
a window of 1 MiB at most.

Codecs 2 to 4 write Huffman-only zstd: sign and exponent of KV values are far from uniform, but hardly ever repeat as
strings, so the match search costs time and gains nothing. A probe of 4 runs of 4,096 elements decides which planes
are worth coding.
"""

from __future__ import annotations

import abc
import enum
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import zstandard

from tiered_cache.errors import FrameError, VersionError

Bytes = npt.NDArray[np.uint8]
_Elements = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

CHUNK_BYTES = 1 << 20
"""How much of a section one chunk covers."""
RATIO_MIN = 1.15
"""Below this a plane, a chunk or a section is stored as it is: the link is faster than the decoder."""

_STEP_ELEMENTS = 1 << 16  # casts work on this many elements at a time, so that they stay in the L2 cache
_CODED_BYTES_MIN = 512  # below this a frame's alignment eats what a codec saves
_PROBE_RUNS, _PROBE_RUN_ELEMENTS = 4, 4096
_CONST_WIDTHS = (1, 2, 4, 8)
_REPEAT_STORED_BYTES_MAX = 64  # a repeated byte is never larger than this after zstd: worth a look at all bytes


class Mode(enum.StrEnum):
    """How much work an encoder may spend."""

    RAW = "raw"  # none: for a tier as fast as memory
    FAST = "fast"  # about 1 GB/s and core: for disks and networks


@dataclass(frozen=True, slots=True)
class EncodedSection:
    """The stored form of one section: the concatenation of `buffers`."""

    codec: Codec
    buffers: tuple[memoryview, ...]
    chunk_bytes: tuple[int, ...] = ()

    @property
    def stored_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class Codec(abc.ABC):
    """One way to store a section. Instances hold no state and may be used from any number of threads."""

    number: int
    name: str

    @abc.abstractmethod
    def encode(self, raw: Bytes) -> EncodedSection | None:
        """Store `raw` (1-D, contiguous), or None if it cannot be stored so or would not pay.

        The buffers may be views of `raw`; it must not change while they are in use.
        """

    @abc.abstractmethod
    def check_layout(self, stored_bytes: int, chunk_bytes: Sequence[int], raw_bytes: int) -> None:
        """Raise `FrameError` unless a section of `raw_bytes` bytes can have this stored layout. Arithmetic only."""

    @abc.abstractmethod
    def decode(self, stored: Bytes, chunk_bytes: Sequence[int], out: Bytes) -> None:
        """Write exactly `out.size` bytes (1-D, contiguous) into `out`.

        `stored` may be anything: raises `FrameError` if it is not the stored form of `out.size` bytes, and allocates
        no more than a few chunks' room. `out` is undefined after an error.
        """

    def stored_bytes_max(self, raw_bytes: int) -> int:
        """The largest stored size of a section of `raw_bytes` bytes: no codec makes a section larger."""
        return raw_bytes

    def __repr__(self) -> str:
        return self.name


class _Raw(Codec):
    number = 0
    name = "RAW"

    def encode(self, raw: Bytes) -> EncodedSection:
        return EncodedSection(self, (raw.data,))

    def check_layout(self, stored_bytes: int, chunk_bytes: Sequence[int], raw_bytes: int) -> None:
        _require_sizes(self, stored_bytes, chunk_bytes, raw_bytes, raw_bytes)

    def decode(self, stored: Bytes, chunk_bytes: Sequence[int], out: Bytes) -> None:
        self.check_layout(stored.size, chunk_bytes, out.size)
        np.copyto(out, stored)


class _Const(Codec):
    number = 1
    name = "CONST"

    def encode(self, raw: Bytes) -> EncodedSection | None:
        for width in _CONST_WIDTHS:
            if width < raw.size and raw.size % width == 0 and _repeats(raw, width):
                return EncodedSection(self, (raw[:width].copy().data,))
        return None

    def check_layout(self, stored_bytes: int, chunk_bytes: Sequence[int], raw_bytes: int) -> None:
        width = next((w for w in _CONST_WIDTHS if w == stored_bytes and w < raw_bytes and raw_bytes % w == 0), -1)
        _require_sizes(self, stored_bytes, chunk_bytes, raw_bytes, width)

    def decode(self, stored: Bytes, chunk_bytes: Sequence[int], out: Bytes) -> None:
        self.check_layout(stored.size, chunk_bytes, out.size)
        element = np.dtype(f"<u{stored.size}")
        out.view(element)[:] = np.ascontiguousarray(stored).view(element)


class _PackBits(Codec):
    number = 5
    name = "PACKBITS"

    def encode(self, raw: Bytes) -> EncodedSection | None:
        if raw.size < 2 or not all(int(step.max()) <= 1 for step in _steps(raw)):
            return None
        return EncodedSection(self, (np.packbits(raw, bitorder="little").data,))

    def check_layout(self, stored_bytes: int, chunk_bytes: Sequence[int], raw_bytes: int) -> None:
        _require_sizes(self, stored_bytes, chunk_bytes, raw_bytes, (raw_bytes + 7) // 8)

    def decode(self, stored: Bytes, chunk_bytes: Sequence[int], out: Bytes) -> None:
        self.check_layout(stored.size, chunk_bytes, out.size)
        if out.size % 8 and int(stored[-1]) >> (out.size % 8):
            raise FrameError(f"{self}: bits are set after the last of {out.size} flags")
        for start in range(0, out.size, _STEP_ELEMENTS):
            step = out[start : start + _STEP_ELEMENTS]
            flags = stored[start // 8 : (start + step.size + 7) // 8]
            np.copyto(step, np.unpackbits(flags, count=step.size, bitorder="little"))


def _steps(array: _Elements) -> Iterator[_Elements]:
    return (array[start : start + _STEP_ELEMENTS] for start in range(0, array.size, _STEP_ELEMENTS))


def _repeats(raw: Bytes, width: int) -> bool:
    """Whether every byte equals the one `width` before it; soon false where it is false."""
    bounds = [width, *range(64, raw.size, _STEP_ELEMENTS), raw.size]
    return all(np.array_equal(raw[a:b], raw[a - width : b - width]) for a, b in itertools.pairwise(bounds) if a < b)


def _require_sizes(
    codec: Codec, stored_bytes: int, chunk_bytes: Sequence[int], raw_bytes: int, expected_bytes: int
) -> None:
    if stored_bytes != expected_bytes or len(chunk_bytes):
        raise FrameError(
            f"{codec}: {stored_bytes} bytes in {len(chunk_bytes)} chunks cannot hold a section of {raw_bytes}"
        )


class _Chunked(Codec):
    """A section as planes of chunks: what the codecs that compress have in common.

    A section's elements have `width` bytes; each gives `item` bytes to each of `planes` planes.
    """

    def __init__(self, number: int, name: str, width: int, planes: int, item: int) -> None:
        self.number = number
        self.name = name
        self._width = width
        self._planes = planes
        self._item = item

    @abc.abstractmethod
    def _planes_to_code(self, elements: _Elements) -> Sequence[bool] | None:
        """Which planes are worth compressing; None if the section should be stored another way."""

    @abc.abstractmethod
    def _split(self, elements: _Elements, plane: int, out: Bytes) -> None:
        """Write one plane of `elements` to `out`."""

    @abc.abstractmethod
    def _merge(self, planes: Sequence[Bytes], out: _Elements) -> None:
        """Put the elements together from all their planes."""

    @abc.abstractmethod
    def _compress(self, plane: Bytes) -> bytes:
        """A zstd frame."""

    def encode(self, raw: Bytes) -> EncodedSection | None:
        if raw.size == 0 or raw.size % self._width:
            return None
        elements: _Elements = raw.view(f"<u{self._width}")
        coded = self._planes_to_code(elements)
        if coded is None:
            return None
        buffers: list[memoryview] = []
        chunk_bytes: list[int] = []
        per_chunk = CHUNK_BYTES // self._width
        for plane in range(self._planes):
            if not coded[plane]:
                whole = np.empty(elements.size * self._item, np.uint8)
                self._split(elements, plane, whole)
                buffers.append(whole.data)
                chunk_bytes += self._plane_chunk_bytes(raw.size)
                continue
            for start in range(0, elements.size, per_chunk):
                chunk = elements[start : start + per_chunk]
                scratch = _local.plane[: chunk.size * self._item]
                self._split(chunk, plane, scratch)
                buffers.append(self._pack(scratch))
                chunk_bytes.append(buffers[-1].nbytes)
        if sum(chunk_bytes) * RATIO_MIN > raw.size:
            return None
        return EncodedSection(self, tuple(buffers), tuple(chunk_bytes))

    def check_layout(self, stored_bytes: int, chunk_bytes: Sequence[int], raw_bytes: int) -> None:
        if raw_bytes == 0 or raw_bytes % self._width:
            raise FrameError(f"{self}: {raw_bytes} bytes are not whole elements of {self._width}")
        chunks = self._planes * -(-raw_bytes // CHUNK_BYTES)
        if len(chunk_bytes) != chunks:
            raise FrameError(f"{self}: {len(chunk_bytes)} chunks, not {chunks}, for {raw_bytes} bytes")
        sizes = self._plane_chunk_bytes(raw_bytes) * self._planes
        for stored, size in zip(chunk_bytes, sizes, strict=True):
            if not 0 < stored <= size:
                raise FrameError(f"{self}: a chunk of {stored} bytes for {size} bytes")
        if sum(chunk_bytes) != stored_bytes:
            raise FrameError(f"{self}: chunks of {sum(chunk_bytes)} bytes in a section of {stored_bytes}")

    def decode(self, stored: Bytes, chunk_bytes: Sequence[int], out: Bytes) -> None:
        self.check_layout(stored.size, chunk_bytes, out.size)
        elements: _Elements = out.view(f"<u{self._width}")
        sizes = self._plane_chunk_bytes(out.size)
        stops = list(itertools.accumulate(chunk_bytes))
        for index, size in enumerate(sizes):
            planes = []
            for chunk in range(index, len(stops), len(sizes)):
                stop = stops[chunk]
                planes.append(self._unpack(stored[stop - chunk_bytes[chunk] : stop], size))
            start = index * (CHUNK_BYTES // self._width)
            self._merge(planes, elements[start : start + size // self._item])

    def _plane_chunk_bytes(self, raw_bytes: int) -> list[int]:
        """The sizes of one plane's chunks before compression."""
        full, rest = divmod(raw_bytes, CHUNK_BYTES)
        covered = [CHUNK_BYTES] * full + ([rest] if rest else [])
        return [size // self._width * self._item for size in covered]

    def _pack(self, plane: Bytes) -> memoryview:
        packed = self._compress(plane)
        if len(packed) <= _REPEAT_STORED_BYTES_MAX and plane.size > 1 and _repeats(plane, 1):
            return memoryview(plane[:1].tobytes())
        if len(packed) * RATIO_MIN > plane.size:
            return memoryview(plane.tobytes())
        return memoryview(packed)

    def _unpack(self, stored: Bytes, size: int) -> Bytes:
        """One chunk of one plane: a view of `stored`, or `size` new bytes."""
        if stored.size == size:
            return stored
        if stored.size == 1:
            return np.broadcast_to(stored, size)
        try:
            declared = zstandard.frame_content_size(stored.data)
            if declared != size:
                raise FrameError(f"{self}: a chunk says {declared} bytes, not {size}")
            plane = _local.decompressor.decompress(stored.data, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise FrameError(f"{self}: {error}") from error
        if len(plane) != size:
            raise FrameError(f"{self}: a chunk has {len(plane)} bytes, not {size}")
        return np.frombuffer(plane, np.uint8)


class _BytePlanes(_Chunked):
    """Plane k holds byte k of every element."""

    def __init__(self, number: int, name: str, width: int, huffman_only: bool = True) -> None:
        super().__init__(number, name, width, planes=width, item=1)
        self._huffman_only = huffman_only

    def _planes_to_code(self, elements: _Elements) -> Sequence[bool] | None:
        if elements.size <= _PROBE_RUNS * _PROBE_RUN_ELEMENTS:
            return [True] * self._width  # a probe would be the whole work
        runs = np.linspace(0, elements.size - _PROBE_RUN_ELEMENTS, _PROBE_RUNS, dtype=np.int64)
        sample = np.concatenate([elements[start : start + _PROBE_RUN_ELEMENTS] for start in runs])
        plane = np.empty(sample.size, np.uint8)
        ratios = []
        for k in range(self._width):
            self._split(sample, k, plane)
            ratios.append(plane.size / len(self._compress(plane)))
        coded = [ratio >= RATIO_MIN for ratio in ratios]
        stored = sum(1 / ratio if code else 1.0 for ratio, code in zip(ratios, coded, strict=True))
        return coded if self._width / stored >= RATIO_MIN else None

    def _split(self, elements: _Elements, plane: int, out: Bytes) -> None:
        # A narrowing cast keeps the low byte; twice as fast as a strided copy of bytes.
        for start in range(0, elements.size, _STEP_ELEMENTS):
            step = slice(start, start + _STEP_ELEMENTS)
            if plane:
                np.right_shift(elements[step], 8 * plane, out=out[step], casting="unsafe")
            else:
                np.copyto(out[step], elements[step], casting="unsafe")

    def _merge(self, planes: Sequence[Bytes], out: _Elements) -> None:
        for start in range(0, out.size, _STEP_ELEMENTS):
            step = slice(start, start + _STEP_ELEMENTS)
            target = out[step]
            np.copyto(target, planes[-1][step])
            shift = 0
            for plane in planes[-2::-1]:
                shift += 8
                if plane.strides == (0,) and plane[0] == 0:
                    continue
                np.left_shift(target, shift, out=target)
                np.bitwise_or(target, plane[step], out=target)
                shift = 0
            if shift:
                np.left_shift(target, shift, out=target)

    def _compress(self, plane: Bytes) -> bytes:
        return (_local.huffman if self._huffman_only else _local.level_3).compress(plane.data)


class _NarrowIntegers(_Chunked):
    """u32 elements below 2**16, such as token ids, as u16."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name, width=4, planes=1, item=2)

    def _planes_to_code(self, elements: _Elements) -> Sequence[bool] | None:
        return [True] if all(int(step.max()) < 1 << 16 for step in _steps(elements)) else None

    def _split(self, elements: _Elements, plane: int, out: Bytes) -> None:
        assert plane == 0
        np.copyto(out.view("<u2"), elements, casting="unsafe")

    def _merge(self, planes: Sequence[Bytes], out: _Elements) -> None:
        np.copyto(out, np.ascontiguousarray(planes[0]).view("<u2"))

    def _compress(self, plane: Bytes) -> bytes:
        return _local.level_3.compress(plane.data)


class _Local(threading.local):
    """One thread's contexts and scratch memory: a zstd context that two threads use at once crashes the process."""

    def __init__(self) -> None:
        entropy_only = zstandard.ZstdCompressionParameters.from_level(
            1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, target_length=0
        )
        self.huffman = zstandard.ZstdCompressor(compression_params=entropy_only)
        self.level_3 = zstandard.ZstdCompressor(level=3)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES)
        self.plane: Bytes = np.empty(CHUNK_BYTES, np.uint8)


_local = _Local()

RAW = _Raw()
CONST = _Const()
BF16_SPLIT = _BytePlanes(2, "BF16_SPLIT", width=2)
F32_PLANES = _BytePlanes(3, "F32_PLANES", width=4)
BYTES_HUF = _BytePlanes(4, "BYTES_HUF", width=1)
PACKBITS = _PackBits()
ZSTD = _BytePlanes(6, "ZSTD", width=1, huffman_only=False)
ZSTD_U16 = _NarrowIntegers(7, "ZSTD_U16")

CODECS: tuple[Codec, ...] = (RAW, CONST, BF16_SPLIT, F32_PLANES, BYTES_HUF, PACKBITS, ZSTD, ZSTD_U16)
"""All codecs; the index is the number that the format stores."""


def codec_of(number: int) -> Codec:
    """The codec with this number. Raises `VersionError` for an unknown one."""
    if not 0 <= number < len(CODECS):
        raise VersionError(f"codec {number} is not one of 0 .. {len(CODECS) - 1}")
    return CODECS[number]


_BY_DTYPE: Mapping[str, tuple[Codec, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("bool", "uint8", "int8"), (CONST, PACKBITS, BYTES_HUF)),
        **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), (CONST, BYTES_HUF)),
        **dict.fromkeys(("bfloat16", "float16"), (CONST, BF16_SPLIT)),
        **dict.fromkeys(("float32", "complex64"), (CONST, F32_PLANES)),
        **dict.fromkeys(("uint16", "int16", "float64"), (CONST, ZSTD)),
        **dict.fromkeys(("uint32", "int32", "uint64", "int64"), (CONST, ZSTD_U16, ZSTD)),
    }
)


def encode_section(raw: Bytes, dtype: str, mode: Mode) -> EncodedSection:
    """Store `raw` (1-D, contiguous), the bytes of values of `dtype`, with the first codec that takes it."""
    if mode is Mode.FAST and raw.size >= _CODED_BYTES_MIN:
        for candidate in _BY_DTYPE.get(dtype, ()):
            encoded = candidate.encode(raw)
            if encoded is not None:
                return encoded
    return RAW.encode(raw)
