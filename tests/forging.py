"""Frames taken apart and put together again so that every checksum holds, whatever the content says."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgpack
import xxhash

from tiered_cache import frame

ROWS = 12
"""Where the section table lies in the meta."""


def taken_apart(data: bytes) -> tuple[list[object], list[bytes]]:
    """The meta's values and the sections' stored bytes of a sound frame."""
    header = frame.read_header(data)
    values = msgpack.unpackb(data[frame.FIXED_HEADER_BYTES : header.header_bytes])
    return values, [data[s.offset : s.offset + s.stored_bytes] for s in header.sections]


def sums(bodies: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(body)) for body in bodies)


def sealed(values: Sequence[object], bodies: Sequence[bytes]) -> bytes:
    """A frame of these values, with the checksums of these sections."""
    return signed(msgpack.packb([*values[:-1], sums(bodies)]), bodies)


def signed(meta: bytes, bodies: Sequence[bytes] = (), **lies: int) -> bytes:
    """A frame of this meta and these sections in which every checksum holds; `lies` replace numbers of the header."""
    size = 64 + len(meta)
    offset, offsets, total = frame._positions(size, [len(body) for body in bodies])
    fixed = struct.pack(
        "<8sIIQQQQQ",
        b"\x89TCF\r\n\x1a\n",
        lies.get("version", 1),
        lies.get("size", size),
        lies.get("offset", offset),
        lies.get("total", total),
        xxhash.xxh3_64_intdigest(meta),
        lies.get("reserved", 0),
        0,
    )
    data = bytearray(max(total, offset))
    data[:size] = fixed + struct.pack("<Q", xxhash.xxh3_64_intdigest(fixed)) + meta
    for start, body in zip(offsets, bodies, strict=True):
        data[start : start + len(body)] = body
    return bytes(data)


def without_section(data: bytes, name: str) -> bytes:
    """A sound frame in which one section was never written."""
    values, bodies = taken_apart(data)
    rows = values[ROWS]
    assert isinstance(rows, list)
    kept = [i for i, row in enumerate(rows) if row[0] != name]
    assert len(kept) == len(rows) - 1
    values[ROWS] = [rows[i] for i in kept]
    return sealed(values, [bodies[i] for i in kept])


def resealed(data: bytes) -> bytes:
    """Whatever was changed in a frame, with checksums that hold again, as far as it is still one."""
    changed = bytearray(data)
    if len(changed) < frame.FIXED_HEADER_BYTES:
        return data
    size = int.from_bytes(changed[12:16], "little")
    if not frame.FIXED_HEADER_BYTES < size <= len(changed):
        size = len(changed)
        changed[12:16] = struct.pack("<I", size)
    _reseal_sections(changed, size)
    changed[32:40] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(changed[frame.FIXED_HEADER_BYTES : size])))
    changed[56:64] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(changed[:56])))
    return bytes(changed)


def _reseal_sections(changed: bytearray, size: int) -> None:
    """The sums at the end of the meta, and the header's numbers, if there is a table to follow."""
    try:
        values = msgpack.unpackb(bytes(changed[frame.FIXED_HEADER_BYTES : size]), max_array_len=1 << 10)
        stored = [row[4] for row in values[ROWS]]
        if not all(isinstance(count, int) and 0 <= count < 1 << 40 for count in stored):
            return
    except (ValueError, TypeError, LookupError, msgpack.UnpackException):
        return
    offset, offsets, total = frame._positions(size, stored)
    changed[16:32] = struct.pack("<QQ", offset, total)
    checked = [bytes(changed[start : start + count]) for start, count in zip(offsets, stored, strict=True)]
    if len(checked) * 8 < size - frame.FIXED_HEADER_BYTES:
        changed[size - 8 * len(checked) : size] = sums(checked)
