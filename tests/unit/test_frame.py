"""Frames: what goes in comes out, what is another is refused with all that differs, no flipped bit gets through."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings

from tiered_cache import codecs, frame
from tiered_cache.codecs import Mode
from tiered_cache.errors import (
    CapacityError,
    ChecksumError,
    FrameError,
    GeometryError,
    IdentityError,
    TruncatedError,
    VersionError,
)
from tiered_cache.frame import Frame
from tiered_cache.geometry import _STORAGE, Geometry, Part, PartKind
from tiered_cache.identity import CHECKPOINT, FrameKey, namespace_of

Array = npt.NDArray[np.generic]

IDENTITY = bytes(range(32))
BLOCK = 16


def geometry_of(*parts: Part, shards: int = 1) -> Geometry:
    return Geometry(parts, block_tokens=BLOCK, shards=shards)


MIXED = geometry_of(
    Part("k", PartKind.ROWS, "bfloat16", (8,), layers=(0, 1)),
    Part("valid", PartKind.ROWS, "bool", (33,)),
    Part("page", PartKind.ROWS, "uint8", (3,), content_dtype="bfloat16"),
    Part("state", PartKind.CARRY, "float32", (4, 40)),
    Part("history", PartKind.CARRY, "uint32", (160,)),
    Part("scalar", PartKind.CARRY, "int64", ()),
    Part("nothing", PartKind.CARRY, "float16", (0, 4)),
)


def key_of(geometry: Geometry, group: str = "rows", tokens: int = BLOCK, rank: int = 0, private: int = 0) -> FrameKey:
    namespace = namespace_of(IDENTITY, geometry.fingerprint())
    return FrameKey(namespace, b"p" * 32, b"q" * 32, group, tokens, rank, private)


def values(geometry: Geometry, group: str, tokens: int, seed: int = 0) -> dict[str, Array]:
    """Arrays as they are in life: floats normal, flags 0 and 1, tokens small, some constant."""
    generator = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, spec in geometry.arrays(group, tokens).items():
        if spec.dtype == "bool":
            array = generator.integers(0, 2, spec.elements).astype(np.uint8)
        elif spec.dtype == "bfloat16" or name == "page":
            array = (generator.standard_normal(spec.bytes).astype("<f4").view("<u4") >> 16).astype("<u2")
        elif spec.dtype == "float32":
            array = generator.standard_normal(spec.elements).astype("<f4")
        else:
            array = np.full(spec.elements, 7)
        flat = array.view(np.uint8)[: spec.bytes] if spec.dtype != "uint32" else array.astype("<u4").view(np.uint8)
        arrays[name] = np.resize(flat, spec.bytes).view(spec.storage).reshape(spec.shape)
    return arrays


def frame_of(geometry: Geometry, group: str = "rows", tokens: int = BLOCK, seed: int = 0) -> Frame:
    return Frame(key_of(geometry, group, tokens), IDENTITY, 2**64 - 1 - seed, values(geometry, group, tokens, seed))


def encoded_bytes(made: Frame, geometry: Geometry, mode: Mode = Mode.FAST) -> bytes:
    return b"".join(frame.encode(made, geometry, mode).buffers())


def decode(data: frame.Buffer, made: Frame, geometry: Geometry, into: Mapping[str, Array] | None = None) -> Frame:
    return frame.decode(data, key=made.key, identity_digest=made.identity_digest, geometry=geometry, into=into)


def assert_same(got: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes(), name


@st.composite
def frames(draw: st.DrawFn) -> tuple[Geometry, Frame]:
    """A geometry of up to five parts and a frame of it whose arrays need not be contiguous."""
    kinds = st.sampled_from([PartKind.ROWS, PartKind.CARRY])
    parts = [
        Part(
            f"part{index}",
            draw(kinds),
            draw(st.sampled_from(sorted(_STORAGE))),
            tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
            layers=tuple(range(draw(st.integers(1, 3)))),
        )
        for index in range(draw(st.integers(1, 5)))
    ]
    parts.append(Part("rows", PartKind.ROWS, "bfloat16", (draw(st.sampled_from([1, 40])),)))
    geometry = Geometry(tuple(parts), block_tokens=draw(st.sampled_from([1, 4, 32])))
    group, tokens = draw(
        st.sampled_from([("rows", geometry.block_tokens), (CHECKPOINT, 2 * geometry.block_tokens + 1)])
    )
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    highest = draw(st.sampled_from([1, 2, 30, 256]))
    arrays: dict[str, Array] = {}
    for name, spec in geometry.arrays(group, tokens).items():
        raw = generator.integers(0, highest, spec.bytes, dtype=np.uint8)
        arrays[name] = raw.view(spec.storage).reshape(spec.shape)
        if draw(st.booleans()):
            spaced = np.zeros((*spec.shape, 2), spec.storage)[..., 0]
            spaced[...] = arrays[name]
            arrays[name] = spaced
    key = dataclasses.replace(key_of(geometry, group, tokens), private=draw(st.integers(0, 2**64 - 1)))
    return geometry, Frame(key, IDENTITY, draw(st.integers(0, 2**64 - 1)), arrays)


@settings(max_examples=150, deadline=None)
@given(frames(), st.sampled_from(Mode))
def test_what_goes_in_comes_out(made: tuple[Geometry, Frame], mode: Mode) -> None:
    geometry, original = made
    encoded = frame.encode(original, geometry, mode)
    room = np.full(encoded.total_bytes, 0xA5, np.uint8)
    encoded.write_into(room)
    assert room.tobytes() == b"".join(encoded.buffers())

    header = frame.verify(room)
    assert (header.key, header.identity_digest, header.lineage) == (original.key, IDENTITY, original.lineage)
    assert header.span == geometry.span(original.key.group, original.key.tokens)
    assert header.total_bytes == encoded.total_bytes
    assert {s.name: s.array for s in header.sections} == geometry.arrays(original.key.group, original.key.tokens)

    found = decode(room, original, geometry)
    assert (found.key, found.lineage) == (original.key, original.lineage)
    assert_same(found.arrays, original.arrays)

    into = {name: np.full(a.shape, 0x5A, a.dtype) for name, a in original.arrays.items()}
    again = decode(room.tobytes(), original, geometry, into)
    assert all(again.arrays[name] is into[name] for name in into)
    assert_same(into, original.arrays)


def test_sections_lie_where_the_format_says() -> None:
    geometry = geometry_of(
        Part("small", PartKind.ROWS, "uint8", (5,)),
        Part("large", PartKind.ROWS, "uint8", (4096,)),
        Part("empty", PartKind.ROWS, "uint8", (0,)),
        Part("last", PartKind.ROWS, "uint8", (1,)),
    )
    made = frame_of(geometry)
    header = frame.read_header(encoded_bytes(made, geometry, Mode.RAW))
    assert header.header_bytes < 4096
    assert header.data_offset == 4096  # 65,536 stored bytes and more
    assert [s.offset for s in header.sections] == [4096, 8192, 8192 + 65_536, 8192 + 65_536]
    assert header.total_bytes == 8192 + 65_536 + 16

    small_geometry = geometry_of(*(Part(name, PartKind.ROWS, "uint8", (n,)) for name, n in (("small", 5), ("b", 1))))
    small = frame_of(small_geometry)
    header = frame.read_header(encoded_bytes(small, small_geometry))
    assert header.data_offset == -(-header.header_bytes // 64) * 64
    assert [s.offset - header.data_offset for s in header.sections] == [0, 128]


def test_a_header_is_read_from_the_first_bytes_alone() -> None:
    made = frame_of(MIXED, CHECKPOINT, BLOCK + 3)
    data = encoded_bytes(made, MIXED)
    size = frame.header_bytes(data[:64])
    header = frame.read_header(data[:size])
    assert header == frame.read_header(data)
    assert header.span == (BLOCK, BLOCK + 3)
    for shorter in (b"", data[:63], data[: size - 1]):
        with pytest.raises(TruncatedError):
            frame.read_header(shorter)


def test_raw_sections_are_views_that_cannot_be_written() -> None:
    made = frame_of(MIXED)
    encoded = frame.encode(made, MIXED, Mode.RAW)
    assert any(np.shares_memory(np.frombuffer(b, np.uint8), made.arrays["k"]) for b in encoded.buffers())
    room = np.empty(encoded.total_bytes, np.uint8)
    encoded.write_into(room)
    found = decode(room, made, MIXED)
    assert np.shares_memory(found.arrays["k"], room)
    assert not any(array.flags.writeable for array in found.arrays.values())
    assert room.flags.writeable


def test_every_codec_passes_through_one_frame() -> None:
    made = frame_of(MIXED, CHECKPOINT, BLOCK + 15)
    header = frame.read_header(encoded_bytes(made, MIXED))
    assert {s.name: s.codec for s in header.sections} == {
        "k": codecs.RAW,  # 480 bytes: not worth a try
        "valid": codecs.RAW,
        "page": codecs.RAW,
        "state": codecs.RAW,
        "history": codecs.CONST,
        "scalar": codecs.RAW,
        "nothing": codecs.RAW,
    }
    wide = geometry_of(
        Part("k", PartKind.ROWS, "bfloat16", (600,)),
        Part("flags", PartKind.ROWS, "bool", (600,)),
        Part("page", PartKind.ROWS, "uint8", (600,), content_dtype="bfloat16"),
        Part("state", PartKind.ROWS, "float32", (900,)),
    )
    made = frame_of(wide)
    arrays = dict(made.arrays, flags=(np.arange(600 * BLOCK) % 3 == 0).astype(np.uint8).reshape(1, BLOCK, 600))
    made = dataclasses.replace(made, arrays=arrays)
    data = encoded_bytes(made, wide)
    assert [s.codec for s in frame.read_header(data).sections] == [
        codecs.BF16_SPLIT,
        codecs.PACKBITS,
        codecs.BF16_SPLIT,
        codecs.F32_PLANES,
    ]
    assert_same(decode(data, made, wide).arrays, made.arrays)


def test_every_flipped_bit_is_seen() -> None:
    geometry = geometry_of(
        Part("k", PartKind.ROWS, "bfloat16", (20,)),  # 640 bytes: coded
        Part("valid", PartKind.ROWS, "bool", (32,)),
        Part("gap", PartKind.ROWS, "uint8", (3,)),
        Part("end", PartKind.ROWS, "uint8", (1,)),
    )
    made = frame_of(geometry)
    data = bytearray(encoded_bytes(made, geometry))
    assert len({s.codec for s in frame.read_header(data).sections}) >= 3
    into = {name: np.empty_like(a) for name, a in made.arrays.items()}
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(FrameError):
                frame.verify(data)
            with pytest.raises(FrameError):
                decode(data, made, geometry)
            with pytest.raises(FrameError):
                decode(data, made, geometry, into)
            data[position] ^= 1 << bit
    assert_same(decode(data, made, geometry, into).arrays, made.arrays)


def test_every_truncation_and_extension_is_seen() -> None:
    made = frame_of(MIXED)
    data = encoded_bytes(made, MIXED)
    for size in range(len(data)):
        with pytest.raises(TruncatedError):
            frame.verify(data[:size])
    for tail in (b"\0", bytes(64), bytes(4096), data):
        with pytest.raises(TruncatedError, match=f"{len(data) + len(tail)} bytes, the frame declares {len(data)}"):
            decode(data + tail, made, MIXED)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prefix": b"x" * 32}, "prefix is 70"),
        ({"parent": b"x" * 32}, "parent"),
        ({"private": 9}, "private is 0, not 9"),
        ({"tokens": 2 * BLOCK, "prefix": b"x" * 32}, "prefix .*; tokens is 16, not 32"),
    ],
)
def test_a_frame_of_another_key_is_refused(change: dict[str, bytes | int], named: str) -> None:
    made = frame_of(MIXED)
    wanted = dataclasses.replace(made, key=dataclasses.replace(made.key, **change))  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match=named) as caught:
        decode(encoded_bytes(made, MIXED), wanted, MIXED)
    assert caught.value.key == wanted.key.path()


def test_a_frame_of_another_identity_is_refused() -> None:
    made = frame_of(MIXED)
    with pytest.raises(IdentityError, match=f"identity is {IDENTITY.hex()[:16]}, not {(b'y' * 32).hex()[:16]}"):
        decode(encoded_bytes(made, MIXED), dataclasses.replace(made, identity_digest=b"y" * 32), MIXED)


def test_a_frame_of_another_geometry_is_refused() -> None:
    made = frame_of(MIXED)
    k, valid, *rest = MIXED.parts
    other = geometry_of(dataclasses.replace(k, shape=(9,)), dataclasses.replace(valid, dtype="uint8"), *rest)
    with pytest.raises(GeometryError, match=r"geometry is .*section 'k' is .*8\).* not .*9\).*; section 'valid'"):
        decode(encoded_bytes(made, MIXED), made, other)


def test_arrays_that_do_not_fit_are_all_named() -> None:
    made = frame_of(MIXED)
    arrays = dict(made.arrays)
    arrays["k"] = arrays["k"].astype(np.float32)
    arrays["valid"] = arrays["valid"][:, :-1]
    del arrays["page"]
    arrays["other"] = arrays["valid"]
    wanted = r"'k' is float32 \(2, 16, 8\), not uint16 .*'valid' is uint8 .*'page' is missing; 'other' is no part"
    with pytest.raises(GeometryError, match=wanted):
        frame.encode(dataclasses.replace(made, arrays=arrays), MIXED, Mode.RAW)
    with pytest.raises(GeometryError, match=wanted):
        decode(encoded_bytes(made, MIXED), made, MIXED, arrays)


def test_a_target_that_cannot_take_the_bytes_is_refused_untouched() -> None:
    made = frame_of(MIXED)
    data = encoded_bytes(made, MIXED)
    into = {name: np.zeros_like(a) for name, a in made.arrays.items()}
    into["k"].flags.writeable = False
    into["valid"] = np.zeros((*into["valid"].shape, 2), np.uint8)[..., 0]
    with pytest.raises(GeometryError, match="'k' is not a writable C-contiguous array; 'valid' is not a writable"):
        decode(data, made, MIXED, into)
    assert not any(array.any() for array in into.values())


def test_what_cannot_be_a_frame_is_not_written() -> None:
    made = frame_of(MIXED)
    with pytest.raises(FrameError, match="namespace"):
        frame.encode(dataclasses.replace(made, identity_digest=b"z" * 32), MIXED, Mode.RAW)
    with pytest.raises(IdentityError, match="prefix has 3 bytes"):
        frame.encode(dataclasses.replace(made, key=dataclasses.replace(made.key, prefix=b"abc")), MIXED, Mode.RAW)
    with pytest.raises(GeometryError, match="rank 1 of a layout of 1"):
        frame.encode(dataclasses.replace(made, key=dataclasses.replace(made.key, rank=1)), MIXED, Mode.RAW)
    for lineage in (-1, 1 << 64):
        with pytest.raises(FrameError, match=f"lineage {lineage}"):
            frame.encode(dataclasses.replace(made, lineage=lineage), MIXED, Mode.RAW)
    with pytest.raises(CapacityError, match="1 bytes of room"):
        frame.encode(made, MIXED, Mode.RAW).write_into(np.empty(1, np.uint8))


def test_another_version_is_no_corruption() -> None:
    data = bytearray(encoded_bytes(frame_of(MIXED), MIXED))
    data[8] = 2
    with pytest.raises(ChecksumError, match="header"):  # a flipped bit, and no newer writer
        frame.read_header(data)
    data[56:64] = xxhash.xxh3_64_intdigest(bytes(data[:56])).to_bytes(8, "little")
    with pytest.raises(VersionError, match="frame format 2; this reader knows 1"):
        frame.read_header(data)


def test_large_sections_are_hashed_in_steps_and_a_flip_in_any_is_seen() -> None:
    geometry = geometry_of(Part("k", PartKind.ROWS, "bfloat16", (80_000,)))
    made = frame_of(geometry)
    for mode in Mode:
        data = np.frombuffer(encoded_bytes(made, geometry, mode), np.uint8).copy()
        into = {"k": np.empty_like(made.arrays["k"])}
        assert_same(decode(data, made, geometry, into).arrays, made.arrays)
        offset = frame.read_header(data).sections[0].offset
        for position in (offset, offset + (1 << 20) - 1, offset + (1 << 20), data.size - 1):
            data[position] ^= 0x10
            for target in (None, into):
                with pytest.raises(ChecksumError, match="section 'k'"):
                    decode(data, made, geometry, target)
            data[position] ^= 0x10


def test_threads_encode_and_decode_side_by_side() -> None:
    geometry = geometry_of(Part("k", PartKind.ROWS, "bfloat16", (9000,)), Part("s", PartKind.ROWS, "float32", (900,)))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            made = frame_of(geometry, seed=seed)
            for _ in range(5):
                assert_same(decode(encoded_bytes(made, geometry), made, geometry).arrays, made.arrays)
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
