"""Frame format v1: the stored form of one group's state over one block, or of one checkpoint.

A frame is one string of bytes that says whose state it is and proves that it is whole. Integers are little-endian.

    bytes          content
    0  .. 8        magic 89 54 43 46 0D 0A 1A 0A
    8  .. 12       version, u32: 1
    12 .. 16       H, u32: bytes of this header and the meta together; 64 < H <= 2**20
    16 .. 24       data offset, u64
    24 .. 32       total bytes of the frame, u64
    32 .. 40       xxh3_64 of the meta, u64
    40 .. 56       zero
    56 .. 64       xxh3_64 of bytes 0 .. 56, u64
    64 .. H        meta
    H  .. D        zero padding
    D  .. total    sections, with zero padding between them

The meta is one msgpack array in canonical form: packing what was unpacked gives the same bytes.

    [namespace bin 32, prefix bin 32, parent bin 32, group str, tokens, rank, private,     the frame's key
     identity digest bin 32, geometry fingerprint bin 32, start, stop,                     whose rows, of which span
     lineage,                                                                              the computation they are of
     [[name str, dtype str, [size of every axis], codec, stored bytes, bin 4 c], ...],      u32 sizes of c chunks
     bin 8 n]                                                  u64 xxh3_64 of the stored bytes of each of n sections

The namespace is the digest of identity and geometry, `stop` equals the key's `tokens`. A section holds one array in C
order, of the storage dtype of its dtype name, stored by its codec (`tiered_cache.codecs`). Sections lie in the order
of the table. D is H rounded up to a multiple of 4096 if the stored bytes of all sections are 65,536 or more, else of
64; a section begins at the next multiple of 4096 if it has 65,536 stored bytes or more, else of 64; the last ends the
frame. Positions are not stored, so that there can be no overlap and no hole but the padding, and readers check that
the padding is zero. A frame therefore has no byte that is not covered by a check.

The first 64 bytes mean the same in every version, so that a flipped bit in the version is not taken for a newer writer.
Readers check in this order: magic, header checksum, version, length, limits, meta checksum, canonical form, the table's
own sense, key, identity, geometry, room; then padding; then for each section its checksum and, into memory of exactly
the declared size, its decoding. Nothing is allocated from a number that has not been checked. Checksums find
accidents, not attackers.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from tiered_cache.codecs import RAW, Bytes, Codec, EncodedSection, Mode, codec_of, encode_section
from tiered_cache.errors import (
    CapacityError,
    ChecksumError,
    FrameError,
    GeometryError,
    IdentityError,
    TieredCacheError,
    TruncatedError,
    VersionError,
)
from tiered_cache.geometry import ARRAY_BYTES_MAX, DIMENSIONS_MAX, PARTS_MAX, ArraySpec, Geometry
from tiered_cache.identity import DIGEST_BYTES, TOKENS_MAX, FrameKey, namespace_of

VERSION = 1
FIXED_HEADER_BYTES = 64
HEADER_BYTES_MAX = 1 << 20
ALIGNMENT = 64
ALIGNMENT_LARGE = 4096
LARGE_BYTES = 1 << 16

Array = npt.NDArray[np.generic]
Buffer = bytes | bytearray | memoryview | Bytes

_MAGIC = b"\x89TCF\r\n\x1a\n"
_HEADER = struct.Struct("<8sIIQQQ16s")
_U64 = struct.Struct("<Q")
_U64_MAX = (1 << 64) - 1
_DIGEST = bytes(DIGEST_BYTES)  # any digest, where only its size counts
_ZEROS = bytes(ALIGNMENT_LARGE)
_META_TYPES = (bytes, bytes, bytes, str, int, int, int, bytes, bytes, int, int, int, tuple, bytes)
_ROW_TYPES = (str, str, tuple, int, int, bytes)
_NAME_CHARACTERS_MAX = 256
_AXES_MAX = DIMENSIONS_MAX + 2  # layers, tokens
_STEP_BYTES = 1 << 20  # copies are hashed in steps of this size, while they are in the cache
_CONTENTS_MAX = 4096


class Section(NamedTuple):
    """One row of a frame's section table, and where its bytes lie."""

    name: str
    array: ArraySpec
    codec: Codec
    stored_bytes: int
    chunk_bytes: tuple[int, ...]
    offset: int
    """From the start of the frame."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """All that a frame says about itself."""

    key: FrameKey
    identity_digest: bytes
    geometry_fingerprint: bytes
    span: tuple[int, int]
    """The tokens [start, stop) whose rows are inside."""
    lineage: int
    """Which computation the state comes from; 64 bits."""
    sections: tuple[Section, ...]
    checksums: tuple[int, ...]
    """xxh3_64 of each section's stored bytes."""
    header_bytes: int
    data_offset: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame's content: an array for every part that the geometry puts into it, in the storage dtypes."""

    key: FrameKey
    identity_digest: bytes
    lineage: int
    arrays: Mapping[str, Array]


class EncodedFrame:
    """A frame ready to be written, by `buffers` or by `write_into`.

    Raw sections are still views of the arrays that were encoded: those must stay as they are until it is written.
    """

    __slots__ = ("_encoded", "_header", "_meta", "key", "total_bytes")

    def __init__(self, header: FrameHeader, meta: bytes, encoded: Sequence[EncodedSection]) -> None:
        self.key = header.key
        self.total_bytes = header.total_bytes
        self._header = header  # its checksums are not known yet
        self._meta = meta
        self._encoded = encoded

    def buffers(self) -> list[memoryview]:
        """The frame as buffers for one `writev`: no copy of large sections."""
        header = self._header
        buffers = [memoryview(b"")]
        checksums = []
        stop = header.data_offset
        for section, encoded in zip(header.sections, self._encoded, strict=True):
            if section.offset > stop:
                buffers.append(memoryview(_ZEROS)[: section.offset - stop])
            checksums.append(_checksum(*encoded.buffers))
            buffers += encoded.buffers
            stop = section.offset + section.stored_bytes
        buffers[0] = memoryview(self._head(checksums))
        return buffers

    def write_into(self, out: memoryview | Bytes) -> None:
        """Write the frame into `out`, writable, of exactly `total_bytes` bytes: one copy, hashed on the way.

        The source is what is hashed: had it changed between copy and hash, every reader would see it. Raises
        `CapacityError` if `out` has another size.
        """
        header = self._header
        whole: Bytes = np.frombuffer(out, np.uint8)
        if whole.size != header.total_bytes:
            raise CapacityError(f"{whole.size} bytes of room for a frame of {header.total_bytes}", self.key.path())
        checksums = []
        stop = header.data_offset
        for section, encoded in zip(header.sections, self._encoded, strict=True):
            if section.offset > stop:
                whole[stop : section.offset] = 0
            hasher = xxhash.xxh3_64()
            stop = section.offset
            for buffer in encoded.buffers:
                source: Bytes = np.frombuffer(buffer, np.uint8)
                for a in range(0, source.size, _STEP_BYTES):
                    step = source[a : a + _STEP_BYTES]
                    np.copyto(whole[stop + a : stop + a + step.size], step)
                    hasher.update(step.data)
                stop += source.size
            checksums.append(hasher.intdigest())
        whole[: header.data_offset] = np.frombuffer(self._head(checksums), np.uint8)

    def _head(self, checksums: Sequence[int]) -> bytes:
        """Everything before the first section."""
        header = self._header
        sums = struct.pack(f"<{len(checksums)}Q", *checksums)
        meta = self._meta[: len(self._meta) - len(sums)] + sums
        fixed = _HEADER.pack(
            _MAGIC,
            VERSION,
            header.header_bytes,
            header.data_offset,
            header.total_bytes,
            xxhash.xxh3_64_intdigest(meta),
            bytes(16),
        )
        fixed += _U64.pack(xxhash.xxh3_64_intdigest(fixed))
        return b"".join((fixed, meta, bytes(header.data_offset - header.header_bytes)))


def encode(frame: Frame, geometry: Geometry, mode: Mode) -> EncodedFrame:
    """Make the stored form of `frame`, one array for every part that `geometry` puts into a frame of its key.

    Raises `GeometryError` listing every array that is missing, foreign, or of another dtype or shape, `IdentityError`
    for a malformed key, and `FrameError` for a namespace that is not the one of this identity and geometry, or a
    header beyond its limits. Copies only what is not contiguous.
    """
    key = frame.key
    key.check()
    contents = _contents(geometry, key)
    _check_arrays(frame.arrays, contents, key)
    encoded = []
    for content in contents:
        flat = np.ascontiguousarray(frame.arrays[content.name]).reshape(-1).view(np.uint8)
        encoded.append(encode_section(flat, content.codec_dtype, mode))
    start, stop = geometry.span(key.group, key.tokens)
    fingerprint = geometry.fingerprint()
    rows = [
        (c.name, c.array.dtype, c.array.shape, e.codec.number, e.stored_bytes, _pack_sizes(e.chunk_bytes))
        for c, e in zip(contents, encoded, strict=True)
    ]
    values = (
        *(key.namespace, key.prefix, key.parent, key.group, key.tokens, key.rank, key.private),
        *(frame.identity_digest, fingerprint, start, stop, frame.lineage, rows),
        bytes(_U64.size * len(rows)),
    )
    try:
        meta: bytes = msgpack.packb(values)
    except OverflowError as error:
        raise FrameError(f"lineage {frame.lineage} is outside 0 .. 2**64 - 1", key.path()) from error
    stored = [row[4] for row in rows]
    size = FIXED_HEADER_BYTES + len(meta)
    data_offset, offsets, total_bytes = _positions(size, stored)
    sections = tuple(
        Section(c.name, c.array, e.codec, stored_bytes, e.chunk_bytes, offset)
        for c, e, stored_bytes, offset in zip(contents, encoded, stored, offsets, strict=True)
    )
    header = FrameHeader(
        key,
        frame.identity_digest,
        fingerprint,
        (start, stop),
        frame.lineage,
        sections,
        (0,) * len(sections),
        size,
        data_offset,
        total_bytes,
    )
    _validate(header)
    return EncodedFrame(header, meta, encoded)


def header_bytes(prefix: Buffer) -> int:
    """How many bytes `read_header` needs, told from a frame's first 64. Raises as `read_header` does."""
    return _read_fixed(_view(prefix), None)[0]


def read_header(prefix: Buffer) -> FrameHeader:
    """Read and check a frame's header; `prefix` is the frame or its first `header_bytes()` bytes.

    Raises `TruncatedError` if `prefix` is too short, `VersionError` for another version, `ChecksumError`, and
    `FrameError` for what does not make sense. The sections and their padding are not looked at.
    """
    return _read_header(_view(prefix), None)


def verify(data: Buffer) -> FrameHeader:
    """Check that `data` is one whole frame as it was written, padding included, without decoding it.

    Raises as `read_header` does, `TruncatedError` if there are fewer or more bytes than the frame declares, and
    `ChecksumError`. What the sections decode to is checked by `decode`, which knows how large they may be.
    """
    view = _view(data)
    header = _read_header(view, view.nbytes)
    _check_padding(view, header)
    whole: Bytes = np.frombuffer(view, np.uint8)
    for section, checksum in zip(header.sections, header.checksums, strict=True):
        _check_section(section, checksum, _checksum(_stored(whole, section).data))
    return header


def check_expected(header: FrameHeader, *, key: FrameKey, identity_digest: bytes, geometry: Geometry) -> None:
    """Raise `IdentityError` or `GeometryError` listing everything in which the frame is not the expected one."""
    contents = _contents(geometry, key)
    if header.key != key or header.identity_digest != identity_digest:
        pairs = [(f.name, getattr(header.key, f.name), getattr(key, f.name)) for f in fields(FrameKey)]
        pairs.append(("identity", header.identity_digest, identity_digest))
        raise IdentityError("the frame is another one: " + _differences(pairs))
    wanted: list[tuple[str, object, object]] = [
        ("geometry", header.geometry_fingerprint, geometry.fingerprint()),
        ("span", header.span, geometry.span(key.group, key.tokens)),
        ("section names", [s.name for s in header.sections], [c.name for c in contents]),
    ]
    wanted += [(f"section {s.name!r}", s.array, c.array) for s, c in zip(header.sections, contents, strict=False)]
    if any(there != here for _, there, here in wanted):
        raise GeometryError("the frame does not fit: " + _differences(wanted))


def stored_bytes_max(geometry: Geometry, group: str, tokens: int) -> int:
    """The most bytes that the frame of `group` over a span as long as the one that ends at `tokens` can have.

    A frame that is stored raw has as many, but for a few bytes of small numbers in the header, which alignment mostly
    swallows; no codec makes it larger. Raises `GeometryError` as `Geometry.span` does.
    """
    largest = TOKENS_MAX - 1
    contents = _contents(geometry, FrameKey(_DIGEST, _DIGEST, _DIGEST, group, tokens))
    rows = [(c.name, c.array.dtype, c.array.shape, RAW.number, c.array.bytes, b"") for c in contents]
    values = (
        *(_DIGEST, _DIGEST, _DIGEST, group, largest, geometry.shards - 1, _U64_MAX),
        *(_DIGEST, _DIGEST, largest, largest, _U64_MAX, rows),
        bytes(_U64.size * len(rows)),
    )
    return _positions(FIXED_HEADER_BYTES + len(msgpack.packb(values)), [c.array.bytes for c in contents])[2]


def decode(
    data: Buffer,
    *,
    key: FrameKey,
    identity_digest: bytes,
    geometry: Geometry,
    into: Mapping[str, Array] | None = None,
) -> Frame:
    """Read the frame that must be the one of `key`, this identity and this geometry.

    `into`: name -> writable C-contiguous array for every part, which then holds the result: raw sections are copied
    once, and what is hashed is the copy. Without it raw sections come back as read-only views of `data`, which must
    then not change.

    Raises, with the key's path: `TruncatedError`, `VersionError`, `ChecksumError`, `FrameError`; `IdentityError` and
    `GeometryError` listing everything that differs. `into` is undefined after an error; all else is as it was.
    """
    try:
        view = _view(data)
        header = _read_header(view, view.nbytes)
        check_expected(header, key=key, identity_digest=identity_digest, geometry=geometry)
        if into is not None:
            _check_arrays(into, _contents(geometry, key), key, writable=True)
        _check_padding(view, header)
        whole: Bytes = np.frombuffer(view, np.uint8)
        whole.flags.writeable = False
        arrays = {
            section.name: _deliver(section, checksum, whole, None if into is None else into[section.name])
            for section, checksum in zip(header.sections, header.checksums, strict=True)
        }
    except TieredCacheError as error:
        error.key = key.path()
        error.args = (error.message, error.key, error.tier)
        raise
    return Frame(header.key, header.identity_digest, header.lineage, arrays)


def _view(data: Buffer) -> memoryview:
    return (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")


class _Content(NamedTuple):
    """One array that the geometry puts into a frame."""

    name: str
    array: ArraySpec
    storage: np.dtype[np.generic]
    codec_dtype: str


_contents_by_span: dict[tuple[bytes, str, int], tuple[_Content, ...]] = {}


def _contents(geometry: Geometry, key: FrameKey) -> tuple[_Content, ...]:
    """What a frame of this key holds, in the order of the geometry. Remembered: frames are many, shapes few."""
    if key.rank >= geometry.shards:
        raise GeometryError(f"rank {key.rank} of a layout of {geometry.shards} shards", key.path())
    start, stop = geometry.span(key.group, key.tokens)
    which = (geometry.fingerprint(), key.group, stop - start)
    contents = _contents_by_span.get(which)
    if contents is None:
        hints = {part.name: part.content_dtype for part in geometry.parts}
        contents = tuple(
            _Content(name, array, array.storage, hints[name] or array.dtype)
            for name, array in geometry.arrays(key.group, key.tokens).items()
        )
        if len(_contents_by_span) >= _CONTENTS_MAX:
            _contents_by_span.clear()
        _contents_by_span[which] = contents
    return contents


def _check_arrays(
    arrays: Mapping[str, Array], contents: Sequence[_Content], key: FrameKey, writable: bool = False
) -> None:
    """Raise `GeometryError` unless `arrays` are exactly what a frame holds, and can be written to if they must be."""
    problems = []
    for content in contents:
        array = arrays.get(content.name)
        if array is None:
            problems.append(f"{content.name!r} is missing")
        elif array.dtype != content.storage or array.shape != content.array.shape:
            problems.append(
                f"{content.name!r} is {array.dtype} {array.shape}, not {content.storage} {content.array.shape}"
            )
        elif writable and not (array.flags.c_contiguous and array.flags.writeable):
            problems.append(f"{content.name!r} is not a writable C-contiguous array")
    if problems or len(arrays) != len(contents):
        names = {content.name for content in contents}
        problems += [f"{name!r} is no part of this frame" for name in arrays if name not in names]
    if problems:
        raise GeometryError("arrays differ from the geometry: " + "; ".join(problems), key.path())


def _positions(header_bytes: int, stored_bytes: Sequence[int]) -> tuple[int, list[int], int]:
    """Data offset, each section's offset, total bytes."""
    data_offset = stop = _align(header_bytes, sum(stored_bytes))
    offsets = []
    for size in stored_bytes:
        offset = _align(stop, size)
        offsets.append(offset)
        stop = offset + size
    return data_offset, offsets, stop


def _align(position: int, stored_bytes: int) -> int:
    alignment = ALIGNMENT_LARGE if stored_bytes >= LARGE_BYTES else ALIGNMENT
    return -(-position // alignment) * alignment


def _validate(header: FrameHeader) -> None:
    """Raise `FrameError` unless the header makes sense by itself; what is written passes the check of what is read."""
    key, (start, stop) = header.key, header.span
    try:
        key.check()
    except IdentityError as error:
        raise FrameError(f"the key is none: {error.message}") from error
    if not (len(header.identity_digest) == len(header.geometry_fingerprint) == DIGEST_BYTES):
        raise FrameError(f"identity or geometry digest is not {DIGEST_BYTES} bytes")
    if key.namespace != namespace_of(header.identity_digest, header.geometry_fingerprint):
        raise FrameError("the namespace is not that of identity and geometry")
    if not 0 <= start <= stop == key.tokens or not 0 <= header.lineage < 1 << 64:
        raise FrameError(f"span [{start}, {stop}) or lineage {header.lineage} of a frame at {key.tokens} tokens")
    if header.header_bytes > HEADER_BYTES_MAX or len(header.sections) > PARTS_MAX:
        raise FrameError(f"a header of {header.header_bytes} bytes with {len(header.sections)} sections")
    if len({section.name for section in header.sections}) != len(header.sections):
        raise FrameError("two sections have one name")
    for name, array, codec, stored_bytes, chunk_bytes, _ in header.sections:
        if not 0 < len(name) <= _NAME_CHARACTERS_MAX or len(array.shape) > _AXES_MAX or min(array.shape, default=0) < 0:
            raise FrameError(f"section {name[:_NAME_CHARACTERS_MAX]!r} of shape {array.shape}")
        try:
            raw_bytes = array.bytes
        except GeometryError as error:
            raise FrameError(f"section {name!r}: {error.message}") from error
        if raw_bytes > ARRAY_BYTES_MAX:
            raise FrameError(f"section {name!r} of {raw_bytes} bytes, more than {ARRAY_BYTES_MAX}")
        codec.check_layout(stored_bytes, chunk_bytes, raw_bytes)


def _read_fixed(view: memoryview, actual_bytes: int | None) -> tuple[int, int, int, int]:
    """Header bytes, data offset, total bytes, meta checksum: the fixed part, checked."""
    if view.nbytes < FIXED_HEADER_BYTES:
        raise TruncatedError(f"{view.nbytes} bytes, less than a frame's header of {FIXED_HEADER_BYTES}")
    fixed = view[:FIXED_HEADER_BYTES]
    magic, version, size, data_offset, total_bytes, meta_checksum, reserved = _HEADER.unpack_from(fixed)
    if magic != _MAGIC:
        raise FrameError(f"not a frame: the magic is {magic.hex()}, not {_MAGIC.hex()}")
    if _U64.unpack_from(fixed, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(fixed[: _HEADER.size]):
        raise ChecksumError("the header's checksum does not hold")
    if version != VERSION:
        raise VersionError(f"frame format {version}; this reader knows {VERSION}")
    if actual_bytes is not None and actual_bytes != total_bytes:
        raise TruncatedError(f"{actual_bytes} bytes, the frame declares {total_bytes}")
    if not FIXED_HEADER_BYTES < size <= HEADER_BYTES_MAX or any(reserved):
        raise FrameError(f"a header of {size} bytes, reserved {reserved.hex()}")
    return size, data_offset, total_bytes, meta_checksum


def _read_header(view: memoryview, actual_bytes: int | None) -> FrameHeader:
    size, data_offset, total_bytes, meta_checksum = _read_fixed(view, actual_bytes)
    if view.nbytes < size:
        raise TruncatedError(f"{view.nbytes} bytes of a header of {size}")
    meta = view[FIXED_HEADER_BYTES:size]
    if xxhash.xxh3_64_intdigest(meta) != meta_checksum:
        raise ChecksumError("the meta's checksum does not hold")
    values = _unpack_canonical(meta)
    if not isinstance(values, tuple) or tuple(map(type, values)) != _META_TYPES:
        raise FrameError("the meta's fields are not those of a frame")
    *of_key, identity_digest, fingerprint, start, stop, lineage, rows, checksums = values
    if len(checksums) != _U64.size * len(rows):
        raise FrameError(f"{len(checksums)} bytes of checksums for {len(rows)} sections")
    for row in rows:
        if (
            type(row) is not tuple
            or tuple(map(type, row)) != _ROW_TYPES
            or {*map(type, row[2])} - {int}
            or len(row[5]) % 4
        ):
            raise FrameError("a row of the section table is not one")
    due_offset, offsets, due_bytes = _positions(size, [row[4] for row in rows])
    if (data_offset, total_bytes) != (due_offset, due_bytes):
        raise FrameError(f"data at {data_offset} of {total_bytes} bytes; the table says {due_offset} and {due_bytes}")
    header = FrameHeader(
        FrameKey(*of_key),
        identity_digest,
        fingerprint,
        (start, stop),
        lineage,
        tuple(
            Section(name, ArraySpec(dtype, shape), codec_of(number), stored_bytes, _unpack_sizes(sizes), offset)
            for (name, dtype, shape, number, stored_bytes, sizes), offset in zip(rows, offsets, strict=True)
        ),
        struct.unpack(f"<{len(rows)}Q", checksums),
        size,
        data_offset,
        total_bytes,
    )
    _validate(header)
    return header


def _pack_sizes(chunk_bytes: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(chunk_bytes)}I", *chunk_bytes)


def _unpack_sizes(sizes: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(sizes) // 4}I", sizes)


def _unpack_canonical(meta: memoryview) -> object:
    try:
        values = msgpack.unpackb(
            meta,
            use_list=False,
            max_array_len=PARTS_MAX,  # an unpacker allocates an array before it has seen its items
            max_map_len=0,
            max_ext_len=0,
            max_str_len=_NAME_CHARACTERS_MAX * 4,
        )
        canonical = msgpack.packb(values) == meta
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise FrameError(f"the meta is not msgpack: {error}") from error
    if not canonical:
        raise FrameError("the meta is not in canonical form")
    return values


def _differences(pairs: Sequence[tuple[str, object, object]]) -> str:
    def shown(value: object) -> str:
        return value.hex()[:16] if isinstance(value, bytes) else str(value)

    return "; ".join(f"{name} is {shown(a)}, not {shown(b)}" for name, a, b in pairs if a != b)


def _check_padding(view: memoryview, header: FrameHeader) -> None:
    stop = header.header_bytes
    for start, size in (
        (header.data_offset, 0),
        *((section.offset, section.stored_bytes) for section in header.sections),
    ):
        if view[stop:start].tobytes() != _ZEROS[: start - stop]:
            raise ChecksumError(f"the padding at {stop} is not zero")
        stop = start + size


def _stored(whole: Bytes, section: Section) -> Bytes:
    return whole[section.offset : section.offset + section.stored_bytes]


def _deliver(section: Section, checksum: int, whole: Bytes, target: Array | None) -> Array:
    """Check one section and decode it: into `target`, into new memory, or, if it is raw, as a view."""
    stored = _stored(whole, section)
    if section.codec is RAW and target is not None:
        flat = target.reshape(-1).view(np.uint8)
        hasher = xxhash.xxh3_64()
        for start in range(0, stored.size, _STEP_BYTES):
            step = flat[start : start + _STEP_BYTES]
            np.copyto(step, stored[start : start + _STEP_BYTES])
            hasher.update(step.data)
        _check_section(section, checksum, hasher.intdigest())
        return target
    _check_section(section, checksum, _checksum(stored.data))
    if section.codec is RAW:
        return stored.view(section.array.storage).reshape(section.array.shape)
    array = np.empty(section.array.shape, section.array.storage) if target is None else target
    section.codec.decode(stored, section.chunk_bytes, array.reshape(-1).view(np.uint8))
    return array


def _check_section(section: Section, checksum: int, actual: int) -> None:
    if checksum != actual:
        raise ChecksumError(f"the checksum of section {section.name!r} does not hold")


def _checksum(*buffers: memoryview) -> int:
    """Of their concatenation; large ones are hashed in steps, between which other threads may run."""
    if len(buffers) == 1 and buffers[0].nbytes <= _STEP_BYTES:
        return xxhash.xxh3_64_intdigest(buffers[0])
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        for start in range(0, buffer.nbytes, _STEP_BYTES):
            hasher.update(buffer[start : start + _STEP_BYTES])
    return hasher.intdigest()
