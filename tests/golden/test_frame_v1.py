"""Frames that an earlier build wrote, byte for byte: what is on disks and in buckets must stay readable.

`python tests/golden/test_frame_v1.py` writes those files in `frame_v1/` that are not there yet.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path

import msgpack
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
import zstandard

from tiered_cache import codecs, frame
from tiered_cache.codecs import Codec, Mode
from tiered_cache.frame import Frame
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import CHECKPOINT, FrameKey, namespace_of

Array = npt.NDArray[np.generic]

FOLDER = Path(__file__).parent / "frame_v1"
IDENTITY = bytes(range(32))
BLOCK = 8


def noise(count: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 of 0 .. count - 1: the same on every machine and with every library."""
    x = (np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def skewed(count: int) -> npt.NDArray[np.uint32]:
    """Bytes that Huffman codes well: 0x3C plus how many of six random bits are set."""
    bits = noise(count)
    ones = np.full(count, 0x3C, np.uint32)
    for k in range(6):
        ones += ((bits >> np.uint64(k)) & np.uint64(1)).astype(np.uint32)
    return ones


def low(count: int, bits: int) -> npt.NDArray[np.uint32]:
    return (noise(count) >> np.uint64(32)).astype(np.uint32) & np.uint32((1 << bits) - 1)


CONTENT: Mapping[str, tuple[Part, npt.NDArray[np.generic], Codec]] = {
    "raw": (Part("raw", PartKind.ROWS, "bfloat16", (20,)), low(160, 16).astype("<u2"), codecs.RAW),
    "const": (Part("const", PartKind.ROWS, "float32", (40,)), np.full(320, 0x3F800001, "<u4"), codecs.CONST),
    "bf16_split": (
        Part("bf16_split", PartKind.ROWS, "bfloat16", (3, 40)),
        (skewed(960) << 8 | low(960, 8)).astype("<u2"),
        codecs.BF16_SPLIT,
    ),
    "f32_planes": (
        Part("f32_planes", PartKind.ROWS, "float32", (100,)),
        (skewed(800) << 24 | low(800, 24)).astype("<u4"),
        codecs.F32_PLANES,
    ),
    "f32_of_bf16": (
        Part("f32_of_bf16", PartKind.ROWS, "float32", (100,)),
        (skewed(800) << 24 | low(800, 8) << 16).astype("<u4"),
        codecs.F32_PLANES,
    ),
    "bytes_huf": (
        Part("bytes_huf", PartKind.ROWS, "float8_e4m3fn", (200,)),
        skewed(1600).astype(np.uint8),
        codecs.BYTES_HUF,
    ),
    "packbits": (
        Part("packbits", PartKind.ROWS, "bool", (67,)),
        (low(536, 3) // 7).astype(np.uint8),
        codecs.PACKBITS,
    ),
    "zstd": (
        Part("zstd", PartKind.ROWS, "int32", (40,)),
        (np.arange(320) * 11 % 37 - 9).astype("<i4"),
        codecs.ZSTD,
    ),
    "zstd_u16": (
        Part("zstd_u16", PartKind.ROWS, "uint32", (40,)),
        (low(320, 5) * 1999).astype("<u4"),
        codecs.ZSTD_U16,
    ),
}
CARRY = Part("carry", PartKind.CARRY, "float32", (3,), layers=(0, 2))
MIXED = "mixed"
PINNED = ("raw", "const", "packbits")
"""Whose encoding is ours alone; another zstd may pack the others in other bytes."""


def golden(name: str) -> tuple[Geometry, Frame]:
    """What is in the file of this name: one part in a block frame, or all of them in a checkpoint inside a block."""
    if name == MIXED:
        geometry = Geometry((*(part for part, _, _ in CONTENT.values()), CARRY), block_tokens=2 * BLOCK)
        group, tokens = CHECKPOINT, 2 * BLOCK + BLOCK
        arrays = {n: values.reshape(1, BLOCK, *part.shape) for n, (part, values, _) in CONTENT.items()}
        arrays["carry"] = low(6, 32).view("<f4").reshape(2, 3)
    else:
        part, values, _ = CONTENT[name]
        geometry, group, tokens = Geometry((part,), block_tokens=BLOCK), "rows", BLOCK
        arrays = {name: values.reshape(1, BLOCK, *part.shape)}
    arrays = {name: arrays[name].view(spec.storage) for name, spec in geometry.arrays(group, tokens).items()}
    namespace = namespace_of(IDENTITY, geometry.fingerprint())
    key = FrameKey(namespace, bytes(range(64, 96)), bytes(range(96, 128)), group, tokens, 0, 0x1234)
    return geometry, Frame(key, IDENTITY, 0xFEDCBA9876543210, arrays)


def encoded(name: str, mode: Mode) -> bytes:
    geometry, made = golden(name)
    return b"".join(frame.encode(made, geometry, mode).buffers())


NAMES = (*CONTENT, MIXED)


@pytest.mark.parametrize("name", NAMES)
def test_a_frame_of_an_earlier_build_is_read(name: str) -> None:
    geometry, made = golden(name)
    data = (FOLDER / f"{name}.frame").read_bytes()
    found = frame.decode(data, key=made.key, identity_digest=IDENTITY, geometry=geometry)
    assert found.lineage == made.lineage
    for part, array in made.arrays.items():
        assert found.arrays[part].dtype == array.dtype
        assert found.arrays[part].tobytes() == array.tobytes()
    stored_by = {section.name: section.codec for section in frame.read_header(data).sections}
    wanted = {n: codec for n, (_, _, codec) in CONTENT.items() if name in (n, MIXED)}
    assert {n: codec for n, codec in stored_by.items() if n != "carry"} == wanted


@pytest.mark.parametrize("name", PINNED)
def test_what_zstd_does_not_touch_is_written_the_same(name: str) -> None:
    assert encoded(name, Mode.FAST) == (FOLDER / f"{name}.frame").read_bytes()


def test_what_is_written_raw_is_written_the_same() -> None:
    assert encoded(MIXED, Mode.RAW) == (FOLDER / "mixed_raw.frame").read_bytes()


@pytest.mark.parametrize("name", [*NAMES, "mixed_raw"])
def test_the_specification_is_enough_to_read_a_frame(name: str) -> None:
    _, made = golden(MIXED if name == "mixed_raw" else name)
    arrays = read_by_the_specification((FOLDER / f"{name}.frame").read_bytes())
    assert {n: (a.shape, a.tobytes()) for n, a in arrays.items()} == {
        n: (a.shape, a.tobytes()) for n, a in made.arrays.items()
    }


def read_by_the_specification(data: bytes) -> dict[str, Array]:
    """A second reader, written from the text of `tiered_cache.frame` and `tiered_cache.codecs` alone."""
    magic, version, size, start, total, meta_sum, reserved, header_sum = struct.unpack("<8sIIQQQ16sQ", data[:64])
    assert (magic, version, total, reserved) == (b"\x89TCF\r\n\x1a\n", 1, len(data), bytes(16))
    assert header_sum == xxhash.xxh3_64_intdigest(data[:56])
    meta = data[64:size]
    assert meta_sum == xxhash.xxh3_64_intdigest(meta)
    *_, rows, sums = msgpack.unpackb(meta)
    large = sum(row[4] for row in rows) >= 65_536
    assert start == math.ceil(size / (4096 if large else 64)) * (4096 if large else 64)
    arrays: dict[str, Array] = {}
    stop = start
    assert not any(data[size:start])
    for (name, dtype, shape, codec, stored_bytes, sizes), (checksum,) in zip(
        rows, struct.iter_unpack("<Q", sums), strict=True
    ):
        alignment = 4096 if stored_bytes >= 65_536 else 64
        offset = math.ceil(stop / alignment) * alignment
        assert not any(data[stop:offset])
        stop = offset + stored_bytes
        stored = data[offset:stop]
        assert checksum == xxhash.xxh3_64_intdigest(stored)
        held = {"bfloat16": "<u2", "bool": "u1", "float8_e4m3fn": "u1"}.get(dtype, dtype)
        elements = math.prod(shape)
        raw = decoded(
            codec, stored, [s for (s,) in struct.iter_unpack("<I", sizes)], elements * np.dtype(held).itemsize
        )
        arrays[name] = np.frombuffer(raw, held).reshape(shape)
    assert stop == total
    return arrays


def decoded(codec: int, stored: bytes, chunk_bytes: list[int], raw_bytes: int) -> bytes:
    """One section of less than a chunk's size."""
    if codec == 0:
        return stored
    if codec == 1:
        return stored * (raw_bytes // len(stored))
    if codec == 5:
        return bytes(stored[i // 8] >> (i % 8) & 1 for i in range(raw_bytes))
    width, planes = {2: (2, 2), 3: (4, 4), 4: (1, 1), 6: (1, 1), 7: (4, 1)}[codec]
    item = 2 if codec == 7 else 1
    parts, position = [], 0
    for size in chunk_bytes:
        chunk, plane_bytes = stored[position : position + size], raw_bytes // width * item
        position += size
        if size == 1 and plane_bytes > 1:
            chunk *= plane_bytes
        elif size < plane_bytes:
            chunk = zstandard.ZstdDecompressor().decompress(chunk)
        parts.append(chunk)
    assert len(parts) == planes
    if codec == 7:
        return np.frombuffer(parts[0], "<u2").astype("<u4").tobytes()
    return bytes(byte for element in zip(*parts, strict=True) for byte in element)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, content in (
        *((FOLDER / f"{name}.frame", encoded(name, Mode.FAST)) for name in NAMES),
        (FOLDER / "mixed_raw.frame", encoded(MIXED, Mode.RAW)),
    ):
        if not file.exists():
            file.write_bytes(content)
