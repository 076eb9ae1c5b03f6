"""DSA indexer rows: the blob's layout, absolute capacity checks, and every refusal."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tiered_cache.devices import NumpyDevice
from tiered_cache.errors import BlobError, CapacityError, LayerSetError, LockstepError, PositionError, ReleasedError
from tiered_cache.states.dsa import DsaIndexer, DsaLayout

LAYOUT = DsaLayout((1, 4), head_dim=3)


def make_rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "dsa.keys": rng.integers(0, 1 << 16, (2, count, 3), dtype=np.uint16),
        "dsa.gate": rng.integers(0, 1 << 16, (2, count, 3), dtype=np.uint16),
        "dsa.valid": rng.integers(0, 2, (2, count), dtype=np.uint8),
    }


def make_blob(rows: dict[str, np.ndarray], index: int, head_dim: int = 3) -> bytes:
    """The declared layout, written by other means than the library's."""
    count = rows["dsa.keys"].shape[1]
    blob = struct.pack("<QQ", count, head_dim)
    for name in ("dsa.keys", "dsa.gate"):
        blob += struct.pack(f"<{count * 3}H", *rows[name][index].reshape(-1).tolist())
    return blob + bytes(rows["dsa.valid"][index].tolist())


def content(dsa: DsaIndexer) -> dict[int, bytes]:
    return {layer: bytes(dsa.encode_layer(layer)) for layer in dsa.layers}


def test_blobs_hold_the_rows_written_and_never_the_capacity() -> None:
    dsa = DsaIndexer(LAYOUT, NumpyDevice(), 100)
    rows = make_rows(7)
    dsa.append(0, rows)
    assert content(dsa) == {1: make_blob(rows, 0), 4: make_blob(rows, 1)}
    assert len(dsa.encode_layer(1)) == 16 + 7 * (4 * 3 + 1)
    wide = DsaIndexer(DsaLayout((0,)), NumpyDevice(), 4)
    assert len(wide.encode_layer(0)) == 16
    wide.append(0, {n: np.zeros((1, 2, *p.shape), np.uint16 if p.shape else np.uint8) for n, p in wide.parts.items()})
    assert len(wide.encode_layer(0)) == 16 + 2 * 513
    assert sum(part.row_bytes * 11 for part in DsaLayout(tuple(range(11))).parts()) == 5643


def test_blobs_of_another_program_restore() -> None:
    dsa = DsaIndexer(LAYOUT, NumpyDevice(), 10)
    dsa.append(0, make_rows(9, 1))
    rows = make_rows(5, 2)
    dsa.restore({1: make_blob(rows, 0), 4: bytearray(make_blob(rows, 1))})
    assert dsa.tokens == 5
    for name, array in rows.items():
        assert (dsa.read(name, 0, 5) == array).all()


def test_room_is_checked_before_any_write() -> None:
    dsa = DsaIndexer(LAYOUT, NumpyDevice(), 10)
    dsa.append(0, make_rows(8))
    before = content(dsa)
    buffers = {name: buffer.copy() for name, buffer in dsa.buffers.items()}
    dsa.ensure_room_through(10)
    with pytest.raises(CapacityError, match="11 rows in a buffer of 10"):
        dsa.ensure_room_through(11)
    with pytest.raises(CapacityError, match="11 rows in a buffer of 10"):
        dsa.append(8, make_rows(3))
    with pytest.raises(CapacityError, match="advance by 3 from 8 is past the room 10"):
        dsa.advance(3)
    with pytest.raises(PositionError, match="advance by -1"):
        dsa.advance(-1)
    assert content(dsa) == before
    for name, buffer in dsa.buffers.items():
        assert (buffer == buffers[name]).all()


def test_rewinding_only_shrinks() -> None:
    dsa = DsaIndexer(LAYOUT, NumpyDevice(), 10)
    rows = make_rows(8)
    dsa.append(0, rows)
    with pytest.raises(PositionError, match="rewind to 9 from 8"):
        dsa.rewind_to(9)
    with pytest.raises(PositionError, match="rewind to -1 from 8"):
        dsa.rewind_to(-1)
    dsa.rewind_to(3)
    assert content(dsa)[1] == make_blob({n: a[:, :3] for n, a in rows.items()}, 0)
    dsa.append(3, {n: a[:, 3:] for n, a in rows.items()})
    assert content(dsa)[4] == make_blob(rows, 1)


def test_bad_blobs_change_nothing() -> None:
    dsa = DsaIndexer(LAYOUT, NumpyDevice(), 10)
    dsa.append(0, make_rows(4))
    before = content(dsa)
    rows = make_rows(6, 1)
    good = {1: make_blob(rows, 0), 4: make_blob(rows, 1)}
    other_dim = struct.pack("<QQ", 6, 4) + good[4][16:]
    many = make_rows(11, 2)
    for error, message, bad in (
        (BlobError, "head dim 4 in the blob, 3 here", {**good, 4: other_dim}),
        (BlobError, "93 bytes, where its header asks for 94", {**good, 4: good[4][:-1]}),
        (BlobError, "95 bytes, where its header asks for 94", {**good, 4: good[4] + b"\1"}),
        (BlobError, "where its header asks for", {**good, 4: struct.pack("<QQ", 1 << 63, 3) + good[4][16:]}),
        (BlobError, "15 bytes has no 16-byte header", {**good, 4: good[4][:15]}),
        (BlobError, "dsa.valid is 2, not 0 or 1", {**good, 4: good[4][:-1] + b"\2"}),
        (CapacityError, "11 rows in a buffer of 10", {1: make_blob(many, 0), 4: make_blob(many, 1)}),
        (LockstepError, r"\{1: 6, 4: 5\}", {**good, 4: make_blob({n: a[:, :5] for n, a in rows.items()}, 1)}),
        (LayerSetError, r"missing \[4\]", {1: good[1]}),
        (LayerSetError, r"foreign \[7\]", {**good, 7: good[4]}),
    ):
        with pytest.raises(error, match=message):
            dsa.restore(bad)
        assert content(dsa) == before
    with pytest.raises(BlobError, match=r"dsa\.valid is 255"):
        dsa.append(4, {**make_rows(1), "dsa.valid": np.full((2, 1), 255, np.uint8)})
    with pytest.raises(LayerSetError, match="layer 2"):
        dsa.encode_layer(2)
    assert content(dsa) == before


def test_release_is_idempotent_and_final() -> None:
    dsa = DsaIndexer(LAYOUT, NumpyDevice(), 10)
    dsa.append(0, make_rows(4))
    dsa.release()
    dsa.release()
    assert not dsa.buffers
    for call in (lambda: dsa.append(0, make_rows(1)), lambda: dsa.encode_layer(1), lambda: dsa.advance(0)):
        with pytest.raises(ReleasedError):
            call()
