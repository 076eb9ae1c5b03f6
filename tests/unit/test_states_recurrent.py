"""Recurrent carries: overwritten in place, rolled back from a snapshot, their blob and every refusal."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tiered_cache.devices import NumpyDevice
from tiered_cache.errors import BlobError, LayerSetError, LockstepError, PositionError, ReleasedError, StateError
from tiered_cache.states.recurrent import RecurrentLayout, RecurrentState

LAYOUTS = (
    RecurrentLayout("ssm", (0, 2), (2, 3), shard_axis=0),
    RecurrentLayout("conv", (2, 4), (4,), dtype="bfloat16"),
    RecurrentLayout("count", (0,), (), dtype="uint32"),
)


def make_values(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "recurrent.ssm": rng.standard_normal((2, 2, 3)).astype(np.float32),
        "recurrent.conv": rng.integers(0, 1 << 16, (2, 4), dtype=np.uint16),
        "recurrent.count": rng.integers(0, 1 << 32, 1, dtype=np.uint32),
    }


def make_blobs(tokens: int, values: dict[str, np.ndarray]) -> dict[int, bytes]:
    """The declared layout, written by other means than the library's."""
    ssm, conv = values["recurrent.ssm"], values["recurrent.conv"]
    bodies = {
        0: struct.pack("<6fI", *ssm[0].reshape(-1).tolist(), int(values["recurrent.count"][0])),
        2: struct.pack("<6f4H", *ssm[1].reshape(-1).tolist(), *conv[0].tolist()),
        4: struct.pack("<4H", *conv[1].tolist()),
    }
    return {layer: struct.pack("<QQ", tokens, len(body)) + body for layer, body in bodies.items()}


def content(state: RecurrentState) -> dict[int, bytes]:
    return {layer: bytes(state.encode_layer(layer)) for layer in state.layers}


def test_carries_are_float32_unless_said_otherwise_and_sharded_by_their_axis() -> None:
    part = LAYOUTS[0].part(sharded=True)
    assert (part.name, part.dtype, part.shard_axis) == ("recurrent.ssm", "float32", 0)
    assert LAYOUTS[0].part().shard_axis is None


def test_buffers_never_move() -> None:
    state = RecurrentState(LAYOUTS, NumpyDevice())
    addresses = {name: array.ctypes.data for name, array in state.arrays.items()}
    snapshot = state.snapshot()
    state.write(3, make_values(1))
    state.restore(make_blobs(9, make_values(2)))
    state.reset()
    state.rollback(snapshot)
    assert {name: array.ctypes.data for name, array in state.arrays.items()} == addresses


def test_blobs_of_another_program_restore() -> None:
    blobs = make_blobs(12, make_values(1))
    state = RecurrentState(LAYOUTS, NumpyDevice())
    state.restore(blobs)
    assert state.tokens == 12
    for name, array in make_values(1).items():
        assert (state.arrays[name] == array).all()
    assert content(state) == blobs


def test_a_snapshot_undoes_what_came_after_it() -> None:
    state = RecurrentState(LAYOUTS, NumpyDevice())
    state.write(4, make_values(1))
    before, snapshot = content(state), state.snapshot()
    state.write(6, make_values(2))
    assert content(state) != before
    state.rollback(snapshot)
    assert content(state) == before
    state.reset()
    assert content(state) == make_blobs(0, {name: np.zeros_like(a) for name, a in make_values(0).items()})
    with pytest.raises(PositionError, match="roll-back to 4 from 0"):
        state.rollback(snapshot)


def test_refusals_change_nothing() -> None:
    state = RecurrentState(LAYOUTS, NumpyDevice())
    state.write(4, make_values(1))
    before = content(state)
    values, good = make_values(2), make_blobs(7, make_values(2))
    one_layer = {**values, "recurrent.ssm": values["recurrent.ssm"][:1]}
    signed = {**values, "recurrent.conv": values["recurrent.conv"].view(np.int16)}
    nine = {**good, 4: struct.pack("<QQ9x", 7, 9)}
    later = {**good, 4: struct.pack("<QQ", 8, 8) + good[4][16:]}
    for error, message, call in (
        (StateError, "not of", lambda: state.write(5, {"recurrent.ssm": values["recurrent.ssm"]})),
        (StateError, r"ssm is float32 \(1, 2, 3\)", lambda: state.write(5, one_layer)),
        (StateError, "conv is int16", lambda: state.write(5, signed)),
        (BlobError, "arrays of 9 bytes in the blob, of 8 here", lambda: state.restore(nine)),
        (BlobError, "23 bytes, where its header asks for 24", lambda: state.restore({**good, 4: good[4][:-1]})),
        (BlobError, "15 bytes has no 16-byte header", lambda: state.restore({**good, 4: good[4][:15]})),
        (LockstepError, r"\{0: 7, 2: 7, 4: 8\}", lambda: state.restore(later)),
        (LayerSetError, r"missing \[2\]", lambda: state.restore({0: good[0], 4: good[4]})),
        (LayerSetError, r"foreign \[1\]", lambda: state.restore({**good, 1: good[4]})),
        (LayerSetError, r"foreign \[3\]", lambda: state.encode_layer(3)),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
        assert content(state) == before


def test_release_is_idempotent_and_final() -> None:
    state = RecurrentState(LAYOUTS, NumpyDevice())
    state.release()
    state.release()
    assert not state.arrays
    for call in (state.snapshot, state.reset, lambda: state.write(1, make_values(0)), lambda: state.encode_layer(0)):
        with pytest.raises(ReleasedError):
            call()
