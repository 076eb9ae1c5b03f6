"""Frames made to mislead: every checksum holds, the content lies. Nothing crashes, hangs or takes memory."""

from __future__ import annotations

import resource
import struct
import tracemalloc
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
import zstandard
from forging import signed, sums
from hypothesis import given, settings

from tiered_cache import codecs, frame
from tiered_cache.codecs import Mode
from tiered_cache.errors import (
    ChecksumError,
    FrameError,
    GeometryError,
    IdentityError,
    TieredCacheError,
    TruncatedError,
    VersionError,
)
from tiered_cache.frame import Frame
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import FrameKey, namespace_of

IDENTITY = bytes(range(32))
GEOMETRY = Geometry(
    (Part("k", PartKind.ROWS, "bfloat16", (64,)), Part("flags", PartKind.ROWS, "bool", (4,))), block_tokens=16
)
KEY = FrameKey(namespace_of(IDENTITY, GEOMETRY.fingerprint()), b"p" * 32, b"q" * 32, "rows", 16)
K_BYTES, FLAGS_BYTES = 2048, 64
K_ROW = ["k", "bfloat16", [1, 16, 64], codecs.RAW.number, K_BYTES, b""]
FLAGS_ROW = ["flags", "bool", [1, 16, 4], codecs.RAW.number, FLAGS_BYTES, b""]
BODIES = (bytes(range(256)) * 8, bytes([0, 1]) * 32)
Row = list[object]


def sizes(*chunk_bytes: int) -> bytes:
    return struct.pack(f"<{len(chunk_bytes)}I", *chunk_bytes)


def values(rows: Sequence[object], bodies: Sequence[bytes]) -> list[object]:
    """The meta of a frame of `KEY`."""
    key = [KEY.namespace, KEY.prefix, KEY.parent, KEY.group, KEY.tokens, KEY.rank, KEY.private]
    return [*key, IDENTITY, GEOMETRY.fingerprint(), 0, 16, 5, list(rows), sums(bodies)]


def forged(rows: Sequence[object], bodies: Sequence[bytes] = BODIES) -> bytes:
    return signed(msgpack.packb(values(rows, bodies)), bodies)


def decode(data: frame.Buffer) -> Frame:
    return frame.decode(data, key=KEY, identity_digest=IDENTITY, geometry=GEOMETRY)


def test_the_forger_makes_what_the_writer_makes() -> None:
    arrays = {
        "k": np.frombuffer(BODIES[0], "<u2").reshape(1, 16, 64),
        "flags": np.frombuffer(BODIES[1], np.uint8).reshape(1, 16, 4),
    }
    written = b"".join(frame.encode(Frame(KEY, IDENTITY, 5, arrays), GEOMETRY, Mode.RAW).buffers())
    assert forged([K_ROW, FLAGS_ROW]) == written
    assert decode(written).arrays["flags"].tobytes() == BODIES[1]


@pytest.mark.parametrize(
    ("lies", "error", "message"),
    [
        ({"version": 0}, VersionError, "frame format 0"),
        ({"version": 1 << 31}, VersionError, "frame format 2147483648"),
        ({"size": 64}, FrameError, "header of 64 bytes"),
        ({"size": 0}, FrameError, "header of 0 bytes"),
        ({"size": (1 << 20) + 1}, FrameError, "header of 1048577 bytes"),
        ({"size": 1 << 20}, TruncatedError, "of a header of 1048576"),
        ({"total": 1 << 63}, TruncatedError, "declares 9223372036854775808"),
        ({"offset": 1 << 63}, FrameError, "data at 9223372036854775808"),
        ({"offset": 0}, FrameError, "data at 0 "),
        ({"reserved": 1}, FrameError, "reserved"),
    ],
)
def test_a_lying_header_is_refused(lies: dict[str, int], error: type[FrameError], message: str) -> None:
    data = signed(msgpack.packb(values([K_ROW, FLAGS_ROW], BODIES)), BODIES, **lies)
    with pytest.raises(error, match=message) as caught:
        decode(data)
    assert type(caught.value) is error


def replaced(index: int, value: object) -> list[object]:
    fields = values([K_ROW, FLAGS_ROW], BODIES)
    fields[index] = value
    return fields


@pytest.mark.parametrize(
    "fields",
    [
        {},
        [],
        None,
        "text",
        3.5,
        values([K_ROW, FLAGS_ROW], BODIES)[:-1],
        [*values([K_ROW, FLAGS_ROW], BODIES), 0],
        replaced(0, b"short"),
        replaced(0, "p" * 32),
        replaced(1, b""),
        replaced(3, "../../etc/passwd"),
        replaced(3, "ROWS"),
        replaced(4, 0),
        replaced(4, -16),
        replaced(4, 1 << 40),
        replaced(4, True),
        replaced(4, 16.0),
        replaced(5, 1 << 16),
        replaced(6, -1),
        replaced(7, b"other identity of the wrong size"[:31]),
        replaced(8, b"g" * 32),  # the namespace is not the one of this geometry
        replaced(9, 17),
        replaced(10, 15),
        replaced(11, -1),
        replaced(12, {}),
        replaced(12, [1, 2]),
        replaced(12, [K_ROW]),  # two checksums
        replaced(12, [K_ROW, K_ROW]),
        replaced(12, [K_ROW, FLAGS_ROW[:-1]]),
        replaced(12, [K_ROW, [*FLAGS_ROW[:-1], [64]]]),
        replaced(12, [K_ROW, [*FLAGS_ROW[:2], [True, 16, 4], *FLAGS_ROW[3:]]]),
        replaced(13, b""),
        replaced(13, bytes(17)),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: object) -> None:
    data = signed(msgpack.packb(fields), BODIES)
    for read in (frame.read_header, frame.verify, decode):
        with pytest.raises(FrameError):
            read(data)


@pytest.mark.parametrize(
    "row",
    [
        ["k", "bfloat16", [1, 16, 64], -1, K_BYTES, b""],
        ["k", "bfloat16", [1, 16, 64], 8, K_BYTES, b""],
        ["k", "bfloat16", [1, 16, 64], 1 << 63, K_BYTES, b""],
        ["k", "object", [1, 16, 64], 0, K_BYTES, b""],
        ["k", "bfloat16", [1, 16, 65], 0, K_BYTES, b""],
        ["k", "bfloat16", [1, 16, -64], 0, K_BYTES, b""],
        ["k", "bfloat16", [-1, 16, -64], 0, K_BYTES, b""],
        ["k", "bfloat16", [1] * 11, 1, 2, b""],
        ["k", "bfloat16", [1 << 63, 1 << 63], 1, 2, b""],
        ["k", "bfloat16", [1, 16, 64], 0, -1, b""],
        ["k", "bfloat16", [1, 16, 64], 0, K_BYTES, sizes(K_BYTES)],
        ["k", "bfloat16", [1, 16, 64], 1, K_BYTES, b""],
        ["k", "bfloat16", [1, 16, 64], 2, K_BYTES, sizes(1024)],
        ["k", "bfloat16", [1, 16, 64], 2, K_BYTES, sizes(2048, 0)],
        ["k", "bfloat16", [1, 16, 64], 2, K_BYTES, sizes(1024, 1025)],
        ["k", "bfloat16", [1, 16, 64], 2, K_BYTES, sizes(1024, 1024)[:-1]],
        ["k", "bfloat16", [1, 16, 64], 5, K_BYTES, b""],
        ["", "bfloat16", [1, 16, 64], 0, K_BYTES, b""],
        ["k" * 300, "bfloat16", [1, 16, 64], 0, K_BYTES, b""],
    ],
)
def test_a_row_that_makes_no_sense_is_refused(row: Row) -> None:
    data = forged([row, FLAGS_ROW])
    for read in (frame.read_header, frame.verify, decode):
        with pytest.raises(FrameError):
            read(data)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["v", *K_ROW[1:]], FLAGS_ROW], r"section names is \['v', 'flags'\]"),
        ([["k", "uint16", *K_ROW[2:]], FLAGS_ROW], "section 'k' is .*uint16.* not .*bfloat16"),
        ([["k", "bfloat16", [1, 64, 16], *K_ROW[3:]], FLAGS_ROW], r"\(1, 64, 16\).* not .*\(1, 16, 64\)"),
        ([["k", "bfloat16", [1, 16, 1 << 30], 1, 2, b""], FLAGS_ROW], "1073741824"),
    ],
)
def test_sections_that_the_geometry_does_not_declare_are_refused(rows: list[Row], message: str) -> None:
    bodies = (BODIES[0][: int(str(rows[0][4]))], BODIES[1])
    data = forged(rows, bodies)
    frame.verify(data)  # whole by itself
    with pytest.raises(GeometryError, match=message):
        decode(data)


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of 2**32 - 1
        b"\xdc\xff\xff" * 1000,  # arrays of 65,535 in arrays
        b"\xdc\x10\x00" * 100_000,
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xc7\x05\xffhello",  # a timestamp of the wrong size
        b"\xd9\xffabc",
        b"\xa1\xff",  # not UTF-8
        msgpack.packb([1, 2]) + b"\0",
        msgpack.packb(msgpack.ExtType(1, b"x")),
    ],
)
def test_a_meta_that_is_no_msgpack_takes_no_memory(meta: bytes) -> None:
    data = signed(meta or b"\xc0", BODIES)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FrameError):
        decode(data)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_another_spelling_of_the_same_meta_is_refused() -> None:
    meta = msgpack.packb(values([K_ROW, FLAGS_ROW], BODIES))
    tokens = meta.index(b"\xa4rows") + 5
    assert meta[tokens] == 16
    longer = meta[:tokens] + b"\xcc\x10" + meta[tokens + 1 :]  # 16 in two bytes
    assert msgpack.unpackb(longer) == msgpack.unpackb(meta)
    with pytest.raises(FrameError, match="canonical"):
        decode(signed(longer, BODIES))


def test_padding_that_carries_something_is_refused() -> None:
    data = bytearray(forged([K_ROW, FLAGS_ROW]))
    header = frame.read_header(data)
    for position in range(header.header_bytes, header.data_offset):
        data[position] = 1
        for read in (frame.verify, decode):
            with pytest.raises(ChecksumError, match="padding"):
                read(data)
        data[position] = 0


def test_a_section_cannot_expand_beyond_what_the_geometry_declares() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    assert len(bomb) > K_BYTES  # so it has to pose as something larger, or to be cut
    bombs = {
        "cut": bomb[:1000],
        "small": zstandard.compress(bytes(1 << 20)),
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1024)),
        "empty": zstandard.compress(b""),
        "noise": np.random.default_rng(0).bytes(500),
    }
    tracemalloc.start()
    try:
        for body in bombs.values():
            row = ["k", "bfloat16", [1, 16, 64], 2, 1024 + len(body), sizes(1024, len(body))]
            data = forged([row, FLAGS_ROW], (bytes(1024) + body, BODIES[1]))
            frame.verify(data)
            with pytest.raises(FrameError, match="BF16_SPLIT"):
                decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20  # a thread's scratch memory, and nothing of what the bombs declare


def test_a_section_of_the_largest_size_costs_nothing_to_refuse() -> None:
    row = ["k", "uint8", [1 << 40], codecs.CONST.number, 1, b""]
    data = forged([row, FLAGS_ROW], (b"\0", BODIES[1]))
    tracemalloc.start()
    try:
        frame.verify(data)
        with pytest.raises(GeometryError):
            decode(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_many_tiny_chunks_are_counted_before_they_are_believed() -> None:
    row = ["k", "uint8", [1 << 40], codecs.BYTES_HUF.number, 60_000, sizes(*[1] * 60_000)]
    with pytest.raises(FrameError, match="60000 chunks, not 1048576"):
        decode(forged([row, FLAGS_ROW], (bytes(60_000), BODIES[1])))


def _cut(data: bytes, draw: Callable[[int], int]) -> bytes:
    start = draw(len(data))
    return data[:start] + data[start + 1 + draw(64) :]


def _repeat(data: bytes, draw: Callable[[int], int]) -> bytes:
    start = draw(len(data))
    return data[: start + 64] + data[start:]


def _overwrite(data: bytes, draw: Callable[[int], int]) -> bytes:
    start = draw(len(data))
    changed = bytearray(data)
    changed[start : start + 8] = struct.pack("<Q", draw(1 << 63))
    return bytes(changed)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_mutation_is_taken_for_the_frame(data: st.DataObject) -> None:
    whole = forged([K_ROW, FLAGS_ROW])
    changed = whole
    for change in data.draw(st.lists(st.sampled_from([_cut, _repeat, _overwrite]), min_size=1, max_size=3)):
        changed = change(changed, lambda limit: data.draw(st.integers(0, max(limit - 1, 0))))
    if changed != whole:
        with pytest.raises(FrameError):
            decode(changed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400) | st.binary(max_size=300).map(lambda tail: b"\x89TCF\r\n\x1a\n\1\0\0\0" + tail))
def test_random_bytes_are_no_frame(data: bytes) -> None:
    for read in (frame.read_header, frame.verify, decode, frame.header_bytes):
        with pytest.raises(FrameError):
            read(data)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


LINEAGE = 11  # the one field that may be anything: 64 bits


@settings(max_examples=300, deadline=None)
@given(index=st.integers(0, 13), value=_json)
def test_any_value_in_any_field_is_refused_or_the_same(index: int, value: object) -> None:
    meta = msgpack.packb(replaced(index, value))
    data = signed(meta, BODIES)
    if meta == msgpack.packb(values([K_ROW, FLAGS_ROW], BODIES)):
        return
    if index == LINEAGE and type(value) is int and 0 <= value < 1 << 64:
        assert decode(data).lineage == value
        return
    with pytest.raises(TieredCacheError) as caught:
        decode(data)
    assert isinstance(caught.value, FrameError | IdentityError | GeometryError)


@settings(max_examples=200, deadline=None)
@given(index=st.integers(0, 5), value=_json)
def test_any_value_in_any_row_is_refused(index: int, value: object) -> None:
    row: Row = list(K_ROW)
    row[index] = value
    if msgpack.packb(row) == msgpack.packb(K_ROW):
        return
    with pytest.raises(TieredCacheError):
        decode(forged([row, FLAGS_ROW]))
