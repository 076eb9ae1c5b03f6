"""Paged KV rows: where they land, what is refused, what returns to the pool, and the whole-layer blob."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.devices import NumpyDevice
from tiered_cache.errors import (
    BlobError,
    CapacityError,
    ConfigError,
    LayerSetError,
    LockstepError,
    PositionError,
    ReleasedError,
    StateError,
)
from tiered_cache.states.paged_kv import KvLayout, PagedKv, PagePool

LAYOUT = KvLayout((2, 5), heads=2, key_dim=3, value_dim=1)
LATENT = KvLayout((0,), heads=1, key_dim=4, value_dim=0)


def make_pool(pages: int = 8, page_tokens: int = 4, layout: KvLayout = LAYOUT) -> PagePool:
    return PagePool(layout, NumpyDevice(), pages, page_tokens)


def make_rows(count: int, seed: int = 0, layout: KvLayout = LAYOUT) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {part.name: rng.integers(0, 1 << 16, part.array(count).shape, dtype=np.uint16) for part in layout.parts()}


def content(kv: PagedKv) -> dict[str, bytes]:
    return {name: kv.read(name, 0, kv.tokens).tobytes() for name in kv.parts}


def test_rows_come_back_whatever_the_pages_are() -> None:
    pool = make_pool(pages=12, page_tokens=4)
    one, two = PagedKv(pool), PagedKv(pool)
    expected: dict[str, list[np.ndarray]] = {name: [] for name in one.parts}
    for step, count in enumerate((1, 2, 6, 3, 5)):  # the two take turns, so neither table is one run
        rows = make_rows(count, step)
        one.append(one.tokens, rows)
        two.append(two.tokens, make_rows(count, 100 + step))
        for name, array in rows.items():
            expected[name].append(array)
    assert one.tokens == 17
    assert sorted([*one.page_table, *two.page_table]) == sorted(set(one.page_table) | set(two.page_table))
    for name, arrays in expected.items():
        whole = np.concatenate(arrays, axis=1)
        for start, stop in ((0, 17), (0, 4), (4, 12), (3, 14), (16, 17), (5, 5)):
            assert (one.read(name, start, stop) == whole[:, start:stop]).all()
            out = np.empty_like(whole[:, start:stop])
            assert one.read(name, start, stop, out) is out
            assert (out == whole[:, start:stop]).all()


def test_a_value_dim_of_zero_has_keys_alone() -> None:
    assert [part.name for part in LATENT.parts()] == ["attn.k"]
    kv = PagedKv(make_pool(layout=LATENT))
    kv.append(0, make_rows(5, layout=LATENT))
    assert kv.read("attn.k", 0, 5).shape == (1, 5, 1, 4)
    assert [part.shape for part in LAYOUT.parts()] == [(2, 3), (2, 1)]


@pytest.mark.parametrize(("heads", "key_dim", "value_dim"), [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_layouts_without_keys_are_refused(heads: int, key_dim: int, value_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"heads {heads}, key_dim {key_dim}, value_dim {value_dim}"):
        KvLayout((0,), heads, key_dim, value_dim)


def test_an_exhausted_pool_refuses_before_any_write() -> None:
    pool = make_pool(pages=3, page_tokens=4)
    one, two = PagedKv(pool), PagedKv(pool)
    one.append(0, make_rows(6))
    before, memory = content(one), {name: array.copy() for name, array in pool.arrays.items()}
    with pytest.raises(CapacityError, match="2 pages wanted, 1 of 3 free"):
        two.append(0, make_rows(5))
    with pytest.raises(CapacityError):
        one.append(6, make_rows(7))
    assert (two.tokens, pool.free_pages) == (0, 1)
    assert content(one) == before
    for name, array in pool.arrays.items():
        assert (array == memory[name]).all()
    one.append(6, make_rows(6, 1))  # what does fit still does


def test_appends_and_rewinds_hold_to_the_cursor() -> None:
    kv = PagedKv(make_pool())
    kv.append(0, make_rows(10))
    before = content(kv)
    for position in (9, 11):
        with pytest.raises(PositionError, match=f"append at {position}, but the cursor stands at 10"):
            kv.append(position, make_rows(1))
    with pytest.raises(PositionError, match="rewind by 11 from 10"):
        kv.rewind(11)
    with pytest.raises(PositionError, match="rewind to 11 from 10"):
        kv.rewind_to(11)
    with pytest.raises(PositionError, match=r"rows \[0, 11\)"):
        kv.read("attn.k", 0, 11)
    with pytest.raises(PositionError, match="write at 9, below the cursor 10"):
        kv.write(9, make_rows(1))
    assert content(kv) == before
    kv.rewind(3)
    assert kv.tokens == 7
    again = make_rows(2, 9)
    kv.append(7, again)
    assert (kv.read("attn.v", 7, 9) == again["attn.v"]).all()


def test_rows_of_other_names_shapes_or_dtypes_are_refused() -> None:
    kv = PagedKv(make_pool())
    good = make_rows(2)
    for bad in (
        {"attn.k": good["attn.k"]},
        {**good, "attn.x": good["attn.k"]},
        {**good, "attn.v": good["attn.v"][:, :1]},
        {**good, "attn.k": good["attn.k"].astype(np.int16)},
        {**good, "attn.k": good["attn.k"][:1]},
    ):
        with pytest.raises(StateError):
            kv.append(0, bad)
        assert kv.tokens == 0


def test_reserved_room_is_the_limit_of_written_rows() -> None:
    pool = make_pool(pages=4, page_tokens=4)
    kv = PagedKv(pool)
    kv.ensure_room_through(5)
    assert (kv.room, pool.free_pages) == (8, 2)
    kv.write(4, make_rows(4))
    with pytest.raises(CapacityError, match="rows through 9 written into room for 8"):
        kv.write(5, make_rows(4))
    with pytest.raises(CapacityError, match="advance by 9 from 0 is past the room 8"):
        kv.advance(9)
    kv.advance(8)
    assert (kv.read("attn.k", 4, 8) == make_rows(4)["attn.k"]).all()


def test_pages_return_once() -> None:
    pool = make_pool(pages=8, page_tokens=4)
    kv = PagedKv(pool)
    kv.append(0, make_rows(20))
    kv.reset()
    assert (kv.tokens, pool.free_pages) == (0, 8)
    kv.append(0, make_rows(20))
    kv.release()
    kv.release()
    assert (kv.released, pool.free_pages) == (True, 8)
    for call in (lambda: kv.append(0, make_rows(1)), lambda: kv.read("attn.k", 0, 0), kv.reset, lambda: kv.restore({})):
        with pytest.raises(ReleasedError):
            call()
    assert sorted(pool.take(8)) == list(range(8))


def make_blob(layer_rows: dict[str, np.ndarray], sizes: tuple[int, int] = (12, 4)) -> bytes:
    """The declared layout, written by other means than the library's."""
    keys, values = layer_rows["attn.k"], layer_rows["attn.v"]
    blob = struct.pack("<QQQ", len(keys), *sizes)
    for array in (keys, values):
        blob += struct.pack(f"<{array.size}H", *array.reshape(-1).tolist())
    return blob


def test_blobs_in_the_declared_layout_restore_and_are_written() -> None:
    rows = make_rows(7, 3)
    blobs = {layer: make_blob({n: a[index] for n, a in rows.items()}) for index, layer in enumerate((2, 5))}
    kv = PagedKv(make_pool())
    kv.append(0, make_rows(11, 4))
    kv.restore(blobs)
    assert kv.tokens == 7
    for name, array in rows.items():
        assert (kv.read(name, 0, 7) == array).all()
    assert {layer: bytes(kv.encode_layer(layer)) for layer in (2, 5)} == blobs


def test_bad_blobs_change_nothing() -> None:
    pool = make_pool(pages=4, page_tokens=4)
    kv = PagedKv(pool)
    kv.append(0, make_rows(3))
    before = content(kv)
    rows = make_rows(7, 3)
    good = {layer: make_blob({n: a[index] for n, a in rows.items()}) for index, layer in enumerate((2, 5))}
    short = make_blob({n: a[1, :6] for n, a in rows.items()})
    long = {layer: make_blob({n: a[0] for n, a in make_rows(17).items()}) for layer in (2, 5)}
    for error, bad in (
        (LayerSetError, {2: good[2]}),
        (LayerSetError, {**good, 3: good[2]}),
        (BlobError, {**good, 5: good[5][:-1]}),
        (BlobError, {**good, 5: good[5] + b"\0"}),
        (BlobError, {**good, 5: good[5][:23]}),
        (BlobError, {**good, 5: struct.pack("<QQQ", 7, 12, 5) + good[5][24:]}),
        (BlobError, {**good, 5: struct.pack("<QQQ", (1 << 64) - 1, 12, 4) + good[5][24:]}),
        (LockstepError, {**good, 5: short}),
        (CapacityError, long),
    ):
        with pytest.raises(error):
            kv.restore(bad)
        assert content(kv) == before
        assert pool.free_pages == 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), max_size=20))
def test_sequences_never_share_a_page(steps: list[tuple[int, int]]) -> None:
    """Growing, shrinking and leaving: every page is in one table or free, and every row is its writer's."""
    pool = make_pool(pages=9, page_tokens=4, layout=LATENT)
    states = [PagedKv(pool) for _ in range(3)]
    expected = [np.zeros((1, 0, 1, 4), np.uint16) for _ in states]
    for step, (which, count) in enumerate(steps):
        kv = states[which]
        if count == 9:
            kv.reset()
            expected[which] = expected[which][:, :0]
        elif count == 8:
            kv.rewind(kv.tokens // 2)
            expected[which] = expected[which][:, : kv.tokens]
        else:
            rows = make_rows(count, step, LATENT)
            try:
                kv.append(kv.tokens, rows)
            except CapacityError:
                continue
            expected[which] = np.concatenate((expected[which], rows["attn.k"]), axis=1)
    tables = np.concatenate([kv.page_table for kv in states])
    assert len(set(tables.tolist())) == len(tables) == pool.pages - pool.free_pages
    for kv, rows_of in zip(states, expected, strict=True):
        assert (kv.read("attn.k", 0, kv.tokens) == rows_of).all()
