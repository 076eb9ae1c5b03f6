"""QSA indexer: pooling against a scalar model, incremental against one-shot, the blob's layout, every refusal."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import numpy.typing as npt
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
)
from tiered_cache.states import bfloat16, qsa
from tiered_cache.states.qsa import QsaIndexer, QsaLayout, Rounding, pool_blocks

F32 = np.float32
ROUNDINGS: tuple[Rounding, Rounding] = ("once", "each")


def layout_of(rounding: Rounding = "once") -> QsaLayout:
    return QsaLayout((3, 6), head_dim=10, ratio=4, rotary_dim=6, theta=1e4, rounding=rounding)


def make_keys(count: int, seed: int = 0, head_dim: int = 10) -> npt.NDArray[np.uint16]:
    values = np.random.default_rng(seed).standard_normal((2, count, head_dim)).astype(ml_dtypes.bfloat16)
    return values.view(np.uint16)


def make_blob(keys: npt.NDArray[np.uint16], pooled: int) -> bytes:
    """The declared layout, written by other means than the library's."""
    return struct.pack("<QQ", len(keys), pooled) + struct.pack(f"<{keys.size}H", *keys.reshape(-1).tolist())


def content(indexer: QsaIndexer) -> dict[int, bytes]:
    return {layer: bytes(indexer.encode_layer(layer)) for layer in indexer.layers}


def block_keys(indexer: QsaIndexer) -> bytes:
    return indexer.block_keys(0, int(indexer.pooled.min())).tobytes()


def bf16(value: np.float32) -> np.float32:
    return F32(ml_dtypes.bfloat16(value))


def model_block(
    layout: QsaLayout, rows: npt.NDArray[np.float32], weight: npt.NDArray[np.float32], block: int
) -> list[int]:
    """One block by scalar float32 arithmetic: the bits of its key."""
    each = bf16 if layout.rounding == "each" else F32
    mean = []
    for dim in range(layout.head_dim):
        total = F32(rows[0, dim])
        for row in rows[1:]:
            total = total + row[dim]
        mean.append(each(total / F32(layout.ratio)))
    squares = [value * value for value in mean]
    while len(squares) > 1:  # by halves; an odd one out is kept for later
        half = len(squares) // 2
        squares = [squares[i] + squares[half + i] for i in range(half)] + squares[2 * half :]
    scale = F32(1) / np.sqrt(squares[0] / F32(layout.head_dim) + F32(layout.epsilon))
    normed = [each(value * scale * (F32(1) + weight[dim])) for dim, value in enumerate(mean)]
    half = layout.rotary_dim // 2
    result = list(normed)
    for j in range(half):
        exponent = 2 * j / layout.rotary_dim
        if layout.rounding == "each":
            frequency = F32(1) / F32(layout.theta ** float(F32(exponent)))
        else:
            frequency = F32(layout.theta**-exponent)
        angle = float(F32(block * layout.ratio) * frequency)
        cosine, sine = each(F32(math.cos(angle))), each(F32(math.sin(angle)))
        low, high = normed[j], normed[j + half]
        result[j] = each(low * cosine) - each(high * sine)
        result[j + half] = each(high * cosine) + each(low * sine)
    return [int(ml_dtypes.bfloat16(value).view(np.uint16)) for value in result]


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    rng = np.random.default_rng(0)
    bits = np.concatenate((rng.integers(0, 1 << 32, 200_000), np.arange(1 << 17) << 15)).astype(np.uint32)
    values = bits.view(F32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    rounded = bfloat16.from_float32(np, values)
    nan = np.isnan(values)
    assert (rounded[~nan] == expected.view(np.uint16)[~nan]).all()
    assert nan.any()
    assert (rounded[nan] == bfloat16.QUIET_NAN).all()
    everything = np.arange(1 << 16, dtype=np.uint16)
    assert (bfloat16.to_float32(everything).view(np.uint32) == everything.astype(np.uint32) << 16).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("first_block", [0, 1, 30_000])
def test_pooling_is_the_scalar_model_bit_for_bit(rounding: Rounding, first_block: int) -> None:
    layout = layout_of(rounding)
    keys = make_keys(40)
    weight = np.random.default_rng(1).standard_normal((2, 10)).astype(F32)
    pooled = pool_blocks(np, layout, keys, weight, first_block)
    raw = bfloat16.to_float32(keys)
    for layer in range(2):
        for block in range(10):
            rows = raw[layer, 4 * block : 4 * block + 4]
            assert pooled[layer, block].tolist() == model_block(layout, rows, weight[layer], first_block + block)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_pooling_is_what_the_formula_says(rounding: Rounding) -> None:
    """Against float64 at the real model's sizes: within the roundings that either mode makes."""
    layout = QsaLayout((3, 6), rounding=rounding)
    assert (layout.head_dim, layout.ratio, layout.rotary_dim, layout.theta, layout.epsilon) == (128, 4, 64, 1e7, 1e-6)
    keys = make_keys(400, 2, 128)
    weight = np.random.default_rng(3).standard_normal((2, 128)).astype(F32) / 8
    pooled = bfloat16.to_float32(pool_blocks(np, layout, keys, weight, 0)).astype(np.float64)
    mean = bfloat16.to_float32(keys).astype(np.float64).reshape(2, 100, 4, 128).mean(axis=2)
    exact = mean / np.sqrt((mean**2).mean(axis=-1, keepdims=True) + 1e-6) * (1 + weight[:, None, :].astype(np.float64))
    angles = np.arange(0, 400, 4)[:, None] * 1e7 ** (-np.arange(0, 64, 2) / 64)
    rotation = np.exp(1j * angles)
    rotated = (exact[..., :32] + 1j * exact[..., 32:64]) * rotation
    expected = np.concatenate((rotated.real, rotated.imag, exact[..., 64:]), axis=-1)
    ulp = 2.0**-8 if rounding == "once" else 2.0**-5
    assert (abs(pooled - expected) <= ulp * np.maximum(abs(expected), 1 if rounding == "each" else 2.0**-6)).all()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@settings(max_examples=30, deadline=None)
@given(counts=st.lists(st.integers(1, 11), min_size=1, max_size=8))
def test_incremental_pooling_is_one_shot_pooling(rounding: Rounding, counts: list[int]) -> None:
    total = sum(counts)
    keys = make_keys(total, 4)
    weight = np.random.default_rng(5).standard_normal((2, 10)).astype(F32)
    one, many = (QsaIndexer(layout_of(rounding), NumpyDevice(), 96, weight) for _ in range(2))
    one.append(0, {"qsa.keys": keys})
    one.pool()
    for count in counts:
        many.append(many.tokens, {"qsa.keys": keys[:, many.tokens : many.tokens + count]})
        many.pool()
    assert one.pooled.tolist() == many.pooled.tolist() == [total // 4] * 2
    assert block_keys(one) == block_keys(many)


def test_pooling_in_steps_is_pooling_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys(80, 6)
    one, many = (QsaIndexer(layout_of(), NumpyDevice(), 80) for _ in range(2))
    one.append(0, {"qsa.keys": keys})
    one.pool()
    monkeypatch.setattr(qsa, "_HOST_STEP_ELEMENTS", 3 * 2 * 4 * 10)
    many.append(0, {"qsa.keys": keys})
    many.pool()
    assert block_keys(one) == block_keys(many)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("special", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F])
def test_infinities_and_nans_pool_without_a_warning(special: int) -> None:
    keys = make_keys(8)
    keys[:, 2, 5] = special
    indexer = QsaIndexer(layout_of(), NumpyDevice(), 8)
    indexer.append(0, {"qsa.keys": keys})
    indexer.pool()
    clean = QsaIndexer(layout_of(), NumpyDevice(), 8)
    clean.append(0, {"qsa.keys": make_keys(8)})
    clean.pool()
    assert (indexer.block_keys(1, 2) == clean.block_keys(1, 2)).all()


def test_a_rewound_block_is_pooled_again() -> None:
    keys, other = make_keys(12), make_keys(12, 1)
    indexer = QsaIndexer(layout_of(), NumpyDevice(), 16)
    indexer.append(0, {"qsa.keys": keys})
    indexer.pool()
    indexer.rewind(5)
    assert (indexer.tokens, indexer.pooled.tolist()) == (7, [1, 1])
    with pytest.raises(PositionError, match=r"block keys \[0, 2\), but 1 blocks are pooled"):
        indexer.block_keys(0, 2)
    indexer.append(7, {"qsa.keys": other[:, 7:]})
    indexer.pool()
    fresh = QsaIndexer(layout_of(), NumpyDevice(), 16)
    fresh.append(0, {"qsa.keys": np.concatenate((keys[:, :7], other[:, 7:]), axis=1)})
    fresh.pool()
    assert block_keys(indexer) == block_keys(fresh)
    assert content(indexer) == content(fresh)


def test_blobs_of_another_program_restore_and_are_pooled_again() -> None:
    keys = make_keys(11)
    fresh = QsaIndexer(layout_of(), NumpyDevice(), 16)
    fresh.append(0, {"qsa.keys": keys})
    fresh.pool()
    indexer = QsaIndexer(layout_of(), NumpyDevice(), 16)
    indexer.append(0, {"qsa.keys": make_keys(16, 9)})
    indexer.pool()
    blobs = {3: make_blob(keys[0], 2), 6: make_blob(keys[1], 2)}
    indexer.restore(blobs)
    assert indexer.tokens == 11
    assert block_keys(indexer) == block_keys(fresh)
    assert content(indexer) == blobs


def test_pooling_that_lags_is_restored_as_it_is() -> None:
    keys = make_keys(13)
    blobs = {3: make_blob(keys[0], 1), 6: make_blob(keys[1], 3)}
    indexer = QsaIndexer(layout_of(), NumpyDevice(), 16)
    indexer.restore(blobs)
    assert indexer.pooled.tolist() == [1, 3]
    assert content(indexer) == blobs
    indexer.pool()
    fresh = QsaIndexer(layout_of(), NumpyDevice(), 16)
    fresh.append(0, {"qsa.keys": keys})
    assert fresh.pooled.tolist() == [0, 0]  # append alone stores raw keys
    fresh.pool()
    assert block_keys(indexer) == block_keys(fresh)


def test_refusals_change_nothing() -> None:
    indexer = QsaIndexer(layout_of(), NumpyDevice(), 12)
    indexer.append(0, {"qsa.keys": make_keys(9)})
    indexer.pool()
    before, pooled = content(indexer), block_keys(indexer)
    keys = make_keys(10, 1)
    good = {3: make_blob(keys[0], 2), 6: make_blob(keys[1], 2)}
    many = {layer: make_blob(make_keys(13, 2)[0], 0) for layer in (3, 6)}
    huge = struct.pack("<QQ", 1 << 60, 0) + good[6][16:]
    ahead = {**good, 6: make_blob(keys[1], 3)}
    for error, message, call in (
        (PositionError, "append at 8, but the cursor stands at 9", lambda: indexer.append(8, {"qsa.keys": keys})),
        (CapacityError, "13 rows in a buffer of 12", lambda: indexer.append(9, {"qsa.keys": keys[:, :4]})),
        (PositionError, "rewind by 10 from 9", lambda: indexer.rewind(10)),
        (PositionError, "rewind by -1 from 9", lambda: indexer.rewind(-1)),
        (BlobError, "3 blocks are pooled of 10 keys, which fill 2", lambda: indexer.restore(ahead)),
        (BlobError, "215 bytes, where its header asks for 216", lambda: indexer.restore({**good, 6: good[6][:-1]})),
        (BlobError, "header asks for", lambda: indexer.restore({**good, 6: huge})),
        (LockstepError, r"\{3: 10, 6: 9\}", lambda: indexer.restore({**good, 6: make_blob(keys[1, :9], 2)})),
        (CapacityError, "13 rows in a buffer of 12", lambda: indexer.restore(many)),
        (LayerSetError, r"missing \[6\], foreign \[7\]", lambda: indexer.restore({3: good[3], 7: good[6]})),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
        assert content(indexer) == before
        assert block_keys(indexer) == pooled


def test_reset_forgets_and_release_is_final() -> None:
    indexer = QsaIndexer(layout_of(), NumpyDevice(), 12)
    indexer.append(0, {"qsa.keys": make_keys(9)})
    indexer.pool()
    indexer.reset()
    assert (indexer.tokens, indexer.pooled.tolist()) == (0, [0, 0])
    assert content(indexer) == {3: make_blob(make_keys(0)[0], 0), 6: make_blob(make_keys(0)[1], 0)}
    indexer.release()
    indexer.release()
    for call in (indexer.pool, lambda: indexer.block_keys(0, 0), lambda: indexer.encode_layer(3)):
        with pytest.raises(ReleasedError):
            call()


@pytest.mark.parametrize("changed", [{"ratio": 0}, {"rotary_dim": 3}, {"rotary_dim": 12}, {"rounding": "never"}])
def test_layouts_that_cannot_pool_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        QsaLayout((0,), **{"head_dim": 10, "rotary_dim": 6, **changed})


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"float64 \(2, 10\), not float32 \(2, 10\)"):
        QsaIndexer(layout_of(), NumpyDevice(), 12, np.zeros((2, 10)))
