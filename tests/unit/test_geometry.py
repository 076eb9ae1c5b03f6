"""Geometries: arithmetic that agrees with the definition, documents that come back, and every difference named."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.errors import GeometryError
from tiered_cache.geometry import _STORAGE, ArraySpec, Geometry, Part, PartKind, storage_dtype
from tiered_cache.identity import CHECKPOINT, TOKENS_MAX

K = Part("k", PartKind.ROWS, "bfloat16", (2, 8), layers=(0, 1, 5), shard_axis=0)
NEAR = Part("near", PartKind.WINDOW, "uint8", (3,), window_tokens=6)
FAR = Part("far", PartKind.WINDOW, "float16", (), window_tokens=40)
STATE = Part("state", PartKind.CARRY, "float32", (4, 4), layers=(2,))
MIXED = Geometry((K, NEAR, STATE, FAR), block_tokens=4)


@st.composite
def parts(draw: st.DrawFn, name: str) -> Part:
    kind = draw(st.sampled_from(PartKind))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    return Part(
        name,
        kind,
        draw(st.sampled_from(sorted(_STORAGE))),
        shape,
        layers=tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=3)))),
        window_tokens=draw(st.integers(1, 20)) if kind is PartKind.WINDOW else 0,
        shard_axis=draw(st.sampled_from([None, *range(len(shape))])),
        content_dtype=draw(st.sampled_from(["", "bfloat16"])),
    )


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    count = draw(st.integers(1, 4))
    return Geometry(
        tuple(draw(parts(f"p{n}")) for n in range(count)), draw(st.integers(1, 7)), shards=draw(st.integers(1, 3))
    )


# Arithmetic


@given(geometries(), st.integers(1, 30))
def test_the_frames_of_a_restore_hold_each_needed_row_once_and_each_carry_once(geometry: Geometry, tokens: int) -> None:
    size = geometry.block_tokens
    ends = [(g.name, (block + 1) * size) for g in geometry.block_groups for block in g.blocks_needed(tokens, size)]
    if geometry.needs_checkpoint(tokens):
        ends.append((CHECKPOINT, tokens))
    rows: dict[str, list[int]] = {part.name: [] for part in geometry.parts}
    carries: list[str] = []
    raw = 0
    for group, end in ends:
        start, stop = geometry.span(group, end)
        assert stop == end
        raw += geometry.frame_bytes(group, end)
        for name, spec in geometry.arrays(group, end).items():
            part = next(part for part in geometry.parts if part.name == name)
            if part.kind is PartKind.CARRY:
                carries.append(name)
                assert spec == ArraySpec(part.dtype, (len(part.layers), *part.shape))
            else:
                rows[name] += range(start, stop)
                assert spec == ArraySpec(part.dtype, (len(part.layers), stop - start, *part.shape))
    assert carries == [part.name for part in geometry.parts if part.kind is PartKind.CARRY]
    for part in geometry.parts:
        if part.kind is PartKind.ROWS:
            assert rows[part.name] == list(range(tokens))
        elif part.kind is PartKind.WINDOW:
            assert rows[part.name] == sorted(set(rows[part.name]))
            assert rows[part.name][0] <= max(0, tokens - part.window_tokens)
            assert rows[part.name][-1] == tokens - 1
            assert len(rows[part.name]) < part.window_tokens + 2 * size
    assert raw == geometry.restore_bytes(tokens)
    assert geometry.checkpoint_bytes(tokens) == sum(geometry.frame_bytes(g, n) for g, n in ends if g == CHECKPOINT)
    assert geometry.block_bytes == sum(geometry.frame_bytes(group.name, size) for group in geometry.block_groups)


def test_groups_are_the_rows_and_each_window_by_size() -> None:
    assert [(group.name, group.window_tokens) for group in MIXED.block_groups] == [
        ("rows", 0),
        ("window.6", 6),
        ("window.40", 40),
    ]
    assert MIXED.carries == (STATE,)
    assert list(MIXED.arrays("rows", 8)) == ["k"]
    assert list(MIXED.arrays(CHECKPOINT, 8)) == ["state"]
    assert list(MIXED.arrays(CHECKPOINT, 9)) == ["k", "near", "state", "far"]
    assert MIXED.arrays(CHECKPOINT, 9)["k"].shape == (3, 1, 2, 8)


def test_without_carries_a_block_end_needs_no_checkpoint() -> None:
    rows = Geometry((K,), 4)
    assert [n for n in range(1, 13) if not rows.needs_checkpoint(n)] == [4, 8, 12]
    assert rows.checkpoint_bytes(8) == 0
    assert rows.checkpoint_bytes(9) == K.row_bytes * 3
    assert all(MIXED.needs_checkpoint(n) for n in range(1, 13))


@pytest.mark.parametrize(
    ("group", "tokens", "complaint"),
    [
        ("rows", 0, "tokens 0"),
        (CHECKPOINT, -1, "tokens -1"),
        (CHECKPOINT, TOKENS_MAX, "tokens 4294967296"),
        ("rows", 9, "ends at 9, not a multiple of 4"),
        ("window.7", 8, r"no group 'window.7'; there are \['rows', 'window.6', 'window.40'\]"),
    ],
)
def test_a_frame_that_cannot_be_is_refused(group: str, tokens: int, complaint: str) -> None:
    with pytest.raises(GeometryError, match=complaint):
        MIXED.arrays(group, tokens)


def test_bits_are_held_in_arrays_of_their_size() -> None:
    sizes = {"bfloat16": 2, "float8_e4m3fn": 1, "bool": 1, "float32": 4, "int64": 8, "complex64": 8}
    for name, size in sizes.items():
        assert storage_dtype(name).itemsize == size
        assert ArraySpec(name, (3, 5)).bytes == 15 * size
    assert storage_dtype("bfloat16") == np.uint16
    with pytest.raises(GeometryError, match="dtype 'bf16' is not one of bfloat16, bool"):
        storage_dtype("bf16")


# What cannot be


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"name": "a b"}, "name is not"),
        ({"name": ""}, "name is not"),
        ({"name": "é"}, "name is not"),
        ({"layers": ()}, "not ascending"),
        ({"layers": (1, 0)}, "not ascending"),
        ({"layers": (1, 1)}, "not ascending"),
        ({"layers": (-1,)}, "not ascending"),
        ({"layers": tuple(range(4097))}, "more than 4096 layers"),
        ({"shape": (1,) * 9}, "8 dimensions"),
        ({"shape": (-1, 8)}, "is negative"),
        ({"shape": (2, 1 << 60)}, "larger than"),
        ({"window_tokens": 5}, "window_tokens 5 does not fit kind rows"),
        ({"kind": PartKind.WINDOW}, "window_tokens 0 does not fit kind window"),
        ({"kind": PartKind.WINDOW, "window_tokens": -1}, "window_tokens -1"),
        ({"shard_axis": 2}, "shard_axis 2"),
        ({"shard_axis": -1}, "shard_axis -1"),
        ({"dtype": "f4"}, "dtype 'f4'"),
        ({"content_dtype": "bf16"}, "dtype 'bf16'"),
    ],
)
def test_what_cannot_be_a_part_is_refused_by_name(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(GeometryError, match=complaint):
        dataclasses.replace(K, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"parts": ()}, "0 parts"),
        ({"parts": (K, K)}, "two parts have one name"),
        ({"block_tokens": 0}, "block_tokens 0"),
        ({"block_tokens": (1 << 20) + 1}, "block_tokens 1048577"),
        ({"shards": 0}, "shards 0"),
        ({"shards": 65537}, "shards 65537"),
    ],
)
def test_what_cannot_be_a_geometry_is_refused_by_name(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(GeometryError, match=complaint):
        dataclasses.replace(MIXED, **change)  # type: ignore[arg-type]


# Telling apart

CHANGES: Mapping[str, dict[str, Any]] = {
    "name": {"name": "kk"},
    "dtype": {"dtype": "float16"},
    "shape": {"shape": (2, 4)},
    "shape of the same size": {"shape": (8, 2)},
    "layers": {"layers": (0, 1, 4)},
    "fewer layers": {"layers": (0, 1)},
    "shard axis": {"shard_axis": 1},
    "no shard axis": {"shard_axis": None},
    "content": {"content_dtype": "float8_e5m2"},
    "kind": {"kind": PartKind.CARRY},
    "window": {"kind": PartKind.WINDOW, "window_tokens": 8},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_another_part_is_another_geometry_and_the_field_is_named(change: dict[str, Any]) -> None:
    other = dataclasses.replace(MIXED, parts=(dataclasses.replace(K, **change), *MIXED.parts[1:]))
    assert other.fingerprint() != MIXED.fingerprint()
    with pytest.raises(GeometryError) as refusal:
        MIXED.check(other)
    for field, value in change.items():
        expected = "only there" if field == "name" else f"{field} is {getattr(K, field)!r} here and {value!r} there"
        assert expected in refusal.value.message


def test_every_difference_is_listed() -> None:
    other = Geometry((dataclasses.replace(STATE, dtype="float16"), NEAR, dataclasses.replace(K, name="x")), 8, shards=2)
    with pytest.raises(GeometryError) as refusal:
        MIXED.check(other)
    assert refusal.value.message.removeprefix("geometry differs: ").split("; ") == [
        "block_tokens is 4 here and 8 there",
        "shards is 1 here and 2 there",
        "part 'k' is only here",
        "part 'far' is only here",
        "part 'x' is only there",
        "part 'state': dtype is 'float32' here and 'float16' there",
    ]
    swapped = dataclasses.replace(MIXED, parts=(NEAR, K, STATE, FAR))
    assert swapped.fingerprint() != MIXED.fingerprint()
    with pytest.raises(GeometryError, match="parts are ordered"):
        MIXED.check(swapped)


@given(geometries(), geometries())
def test_a_fingerprint_is_equal_exactly_if_the_geometry_is(a: Geometry, b: Geometry) -> None:
    assert (a.fingerprint() == b.fingerprint()) == (a == b)


# Documents


@given(geometries())
def test_a_document_comes_back_through_msgpack(geometry: Geometry) -> None:
    document = msgpack.unpackb(msgpack.packb(geometry.to_document()))
    found = Geometry.from_document(document)
    assert found == geometry
    assert found.fingerprint() == geometry.fingerprint()


def document(**changes: object) -> dict[str, object]:
    return {**MIXED.to_document(), **changes}


def with_part(**changes: object) -> dict[str, object]:
    first = MIXED.to_document()["parts"][0]  # type: ignore[index]
    return document(parts=[{**first, **changes}])


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (None, "NoneType"),
        ([], "list"),
        ({}, r"fields \[\], not"),
        (document(extra=1), "'extra'"),
        (document(block_tokens="4"), "block_tokens is str"),
        (document(block_tokens=True), "block_tokens is bool"),
        (document(parts={}), "parts is dict"),
        (document(parts=["k"]), "part has fields str"),
        (with_part(kind="row"), "part kind 'row' is unknown"),
        (with_part(kind=["rows"]), "kind is list"),
        (with_part(shape=[1.5]), "shape"),
        (with_part(shape=[True]), "shape"),
        (with_part(shape="22"), "shape is str"),
        (with_part(layers=["0"]), "layers"),
        (with_part(shard_axis="0"), "shard_axis is str"),
        (with_part(dtype=7), "dtype is int"),
        (with_part(name="../x"), "name is not"),
        (with_part(more=1), "'more'"),
        (document(shards=1 << 40), "shards"),
    ],
)
def test_another_document_is_refused(bad: object, complaint: str) -> None:
    with pytest.raises(GeometryError, match=complaint):
        Geometry.from_document(bad)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(["block_tokens", "shards", "parts", *MIXED.to_document()["parts"][0]]), JUNK)  # type: ignore[index]
def test_no_document_breaks_the_reader(field: str, junk: object) -> None:
    for bad in (junk, document(**{field: junk}), with_part(**{field: junk})):
        with suppress(GeometryError):  # and nothing else
            assert Geometry.from_document(bad).to_document()
