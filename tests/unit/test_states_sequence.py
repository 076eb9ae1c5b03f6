"""The sequence: all states in lockstep, drafts, frames out and back, whole-layer snapshots, and every refusal."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from tiered_cache.devices import NumpyDevice
from tiered_cache.errors import (
    BlobError,
    CapacityError,
    ConfigError,
    DraftError,
    GeometryError,
    LayerSetError,
    LockstepError,
    PositionError,
    ReleasedError,
    StateError,
    TokenError,
)
from tiered_cache.states.dsa import DsaLayout
from tiered_cache.states.ngrams import NgramTable
from tiered_cache.states.paged_kv import KvLayout
from tiered_cache.states.ple import PleLayout
from tiered_cache.states.recurrent import RecurrentLayout
from tiered_cache.states.sequence import (
    LayerBlob,
    LayerSnapshots,
    Restoration,
    SequenceLayout,
    SequenceState,
    StatePool,
    StateSet,
)
from tiered_cache.testing.device_suite import LAYOUT, Step, random_step

BLOCK = 8
ROWS_ONLY = SequenceLayout(kv=KvLayout((0, 1), heads=1, key_dim=4, value_dim=0), dsa=DsaLayout((1,), head_dim=2))


def make_pool(layout: SequenceLayout = LAYOUT, **changed: int) -> StatePool:
    sizes = {"block_tokens": BLOCK, "kv_tokens": 160, "page_tokens": 4, "buffer_bytes": 1 << 20} | changed
    return StatePool(layout, NumpyDevice(), **sizes)  # type: ignore[arg-type]


def make_sequence(pool: StatePool | None = None, tokens: int = 0, seed: int = 0, capacity: int = 64) -> SequenceState:
    sequence = SequenceState(StateSet(pool or make_pool(), capacity))
    if tokens:
        random_step(np.random.default_rng(seed), sequence.pool, tokens).append_to(sequence)
    return sequence


def step_of(sequence: SequenceState, tokens: int, seed: int = 1) -> Step:
    return random_step(np.random.default_rng(seed), sequence.pool, tokens)


def frames_of(sequence: SequenceState, tokens: int) -> dict[tuple[str, int], dict[str, np.ndarray]]:
    """Every frame that a restore to `tokens` needs."""
    with sequence.restoration(tokens) as restoration:
        needed = restoration.needed
    return dict(zip(needed, sequence.export_frames(needed), strict=True))


def assert_unchanged_by(
    sequence: SequenceState, error: type[Exception], message: str, call: Callable[[], object]
) -> None:
    """The call raises, and the state, its epoch and all free room are as before."""

    def seen() -> tuple[object, ...]:
        pool = sequence.pool
        pages = pool.kv.free_pages if pool.kv else 0
        free = (pages, pool.buffer_bytes_free, pool.staging_slots_free)
        return sequence.digest(), sequence.tokens, sequence.epoch, free

    before = seen()
    with pytest.raises(error, match=message):
        call()
    assert seen() == before


def test_the_geometry_names_every_state() -> None:
    geometry = LAYOUT.geometry(BLOCK)
    assert [(p.name, str(p.kind), p.layers) for p in geometry.parts] == [
        ("attn.k", "rows", (1, 3)),
        ("attn.v", "rows", (1, 3)),
        ("qsa.keys", "rows", (1, 3)),
        ("dsa.keys", "rows", (2,)),
        ("dsa.gate", "rows", (2,)),
        ("dsa.valid", "rows", (2,)),
        ("ple.history", "carry", (0, 2)),
        ("ple.conv", "carry", (0, 2)),
        ("recurrent.ssm", "carry", (0, 2)),
        ("recurrent.shift", "carry", (0,)),
    ]
    assert all(part.shard_axis is None for part in geometry.parts)
    sharded = {part.name: part.shard_axis for part in LAYOUT.geometry(BLOCK, shards=4).parts}
    assert sharded["attn.k"] == sharded["attn.v"] == 0
    assert sharded["qsa.keys"] is None
    latent = ROWS_ONLY.geometry(BLOCK, shards=2).parts[0]
    assert (latent.name, latent.shard_axis) == ("attn.k", None)
    with pytest.raises(GeometryError):
        SequenceLayout().geometry(BLOCK)


def test_frames_are_exactly_what_the_geometry_declares() -> None:
    sequence = make_sequence(tokens=21)
    geometry = sequence.geometry
    for (group, tokens), arrays in frames_of(sequence, 21).items():
        specs = geometry.arrays(group, tokens)
        assert list(arrays) == list(specs)
        for name, array in arrays.items():
            assert array.shape == specs[name].shape
            assert array.nbytes == specs[name].bytes
            assert array.flags.c_contiguous
            assert not array.nbytes or array.ctypes.data % 64 == 0


@pytest.mark.parametrize("tokens", [1, 7, 8, 16, 21])
@pytest.mark.parametrize("layout", [LAYOUT, ROWS_ONLY])
def test_a_restored_sequence_is_the_sequence(layout: SequenceLayout, tokens: int) -> None:
    sequence = make_sequence(make_pool(layout), tokens)
    frames = frames_of(sequence, tokens)
    other = make_pool(layout, page_tokens=3)
    restoration = Restoration(StateSet(other, 48), tokens)
    for (group, count), arrays in reversed(frames.items()):  # in any order
        restoration.put(group, count, arrays)
    restored = restoration.commit()
    assert (restored.tokens, restored.digest()) == (tokens, sequence.digest())
    for _ in range(3):  # and goes on as if it had never moved
        step = step_of(sequence, 5)
        step.append_to(sequence)
        step.append_to(restored)
        assert restored.digest() == sequence.digest()
    if sequence.states.qsa is not None and restored.states.qsa is not None:
        blocks = sequence.states.qsa.full_blocks
        here, there = (one.states.qsa.block_keys(0, blocks) for one in (sequence, restored))  # type: ignore[union-attr]
        assert here.tobytes() == there.tobytes()


def test_rows_of_a_longer_sequence_restore_the_shorter() -> None:
    sequence = make_sequence(tokens=13)
    checkpoint = sequence.stage()
    digest = sequence.digest()
    step_of(sequence, 20).append_to(sequence)
    restored = make_sequence()
    with restored.restoration(13) as restoration:
        restoration.put("rows", 8, sequence.export("rows", 8))
        restoration.put("checkpoint", 13, checkpoint.export())
        assert restoration.commit() is restored
    assert restored.digest() == digest


def test_a_staged_checkpoint_outlives_its_sequence() -> None:
    pool = make_pool(staging_slots=2)
    sequence = make_sequence(pool, tokens=13)
    expected = sequence.export("checkpoint", 13)
    one, two = sequence.stage(), sequence.stage()
    assert_unchanged_by(sequence, CapacityError, "all 2 staging slots are taken", sequence.stage)
    step_of(sequence, 3).append_to(sequence)
    sequence.release()
    make_sequence(pool, tokens=40, seed=5)  # pages and buffers have new owners
    out = {name: np.empty_like(array) for name, array in expected.items()}
    one.export(out)
    for name, array in expected.items():
        assert two.export()[name].tobytes() == out[name].tobytes() == array.tobytes()
    for staged in (one, two):
        staged.release()
        staged.release()
    assert pool.staging_slots_free == 2
    with pytest.raises(ReleasedError, match="checkpoint at 13"):
        one.export()


def test_the_digest_depends_on_every_byte_and_not_on_pages() -> None:
    sequence = make_sequence(tokens=11)
    frames = frames_of(sequence, 11)
    seen = {sequence.digest()}
    for frame, arrays in frames.items():
        for name, array in arrays.items():
            for position in {0, array.nbytes - 1} if array.nbytes else ():
                changed = array.copy()
                if name == "ple.history":  # must stay token ids, alike on every layer
                    token = min(position, 1)
                    changed[:, token] = (changed[:, token] + 1) % 97
                else:
                    changed.reshape(-1).view(np.uint8)[position] ^= 1
                other = make_sequence()
                with other.restoration(11) as restoration:
                    for key, given in frames.items():
                        restoration.put(*key, {**given, name: changed} if key == frame else given)
                    restoration.commit()
                seen.add(other.digest())
    bytes_changed = sum(len({0, a.nbytes - 1}) for arrays in frames.values() for a in arrays.values() if a.nbytes)
    assert len(seen) == 1 + bytes_changed


def test_steps_are_all_or_nothing() -> None:
    sequence = make_sequence(tokens=20, capacity=24)
    rows, carries, ids = step_of(sequence, 3)
    float64 = {**carries, "recurrent.ssm": carries["recurrent.ssm"].astype(np.float64)}
    five = step_of(sequence, 5)
    uneven = {**rows, "qsa.keys": rows["qsa.keys"][:, :2]}
    flags = {**rows, "dsa.valid": np.full((1, 3), 2, np.uint8)}
    for error, message, call in (
        (PositionError, "append at 19, but the sequence stands at 20", lambda: sequence.append(19, rows, carries, ids)),
        (StateError, "lengths", lambda: sequence.append(20, rows, carries, ids[:2])),
        (StateError, "lengths", lambda: sequence.append(20, {n: a[:, :0] for n, a in rows.items()}, carries, ids[:0])),
        (StateError, "lengths", lambda: sequence.append(20, uneven, carries, ids)),
        (StateError, "rows of", lambda: sequence.append(20, {"attn.k": rows["attn.k"]}, carries, ids)),
        (StateError, r"carries \[\]", lambda: sequence.append(20, rows, None, ids)),
        (StateError, "ssm is float64", lambda: sequence.append(20, rows, float64, ids)),
        (StateError, "needs its token ids", lambda: sequence.append(20, rows, carries)),
        (TokenError, "token id 97", lambda: sequence.append(20, rows, carries, np.full(3, 97, np.uint32))),
        (BlobError, "valid is 2", lambda: sequence.append(20, flags, carries, ids)),
        (CapacityError, "25 tokens in a sequence with room for 24", lambda: five.append_to(sequence)),
    ):  # fmt: skip
        assert_unchanged_by(sequence, error, message, call)
    sequence.append(20, rows, carries, ids)
    assert sequence.tokens == 23


def test_an_exhausted_page_pool_refuses_the_whole_step() -> None:
    pool = make_pool(kv_tokens=24)
    sequence = make_sequence(pool, tokens=14)
    other = make_sequence(pool, tokens=8)
    step = step_of(sequence, 3)
    assert_unchanged_by(sequence, CapacityError, "1 pages wanted, 0 of 6 free", lambda: step.append_to(sequence))
    other.release()
    step.append_to(sequence)


def test_a_device_that_fails_within_a_step_leaves_the_step_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = make_sequence(tokens=10)
    step = step_of(sequence, 6)

    def fail() -> None:
        raise CapacityError("no device memory for the float32 temporaries")

    assert sequence.states.qsa is not None
    with monkeypatch.context() as patched:
        patched.setattr(sequence.states.qsa, "pool", fail)
        assert_rows = sequence.digest()
        with pytest.raises(CapacityError, match="temporaries"):
            step.append_to(sequence)
        assert sequence.digest() == assert_rows
    step.append_to(sequence)
    assert sequence.tokens == 16


def test_states_that_were_driven_apart_are_refused_by_name() -> None:
    sequence = make_sequence(tokens=12)
    rows, carries, ids = step_of(sequence, 2)
    states = sequence.states
    assert states.kv is not None
    assert states.qsa is not None
    states.kv.append(12, {name: rows[name] for name in states.kv.parts})
    for call in (
        sequence.digest,
        sequence.stage,
        sequence.layer_snapshots,
        sequence.begin_draft,
        lambda: sequence.advance(2),
        lambda: sequence.export("checkpoint", 12),
        lambda: sequence.append(12, rows, carries, ids),
    ):
        with pytest.raises(LockstepError, match=r"KV attn|QSA"):
            call()
    assert sequence.tokens == 12


def test_an_engine_may_drive_the_states_itself() -> None:
    whole, parted = (make_sequence(tokens=9) for _ in range(2))
    step = step_of(whole, 4)
    step.append_to(whole)
    states = parted.states
    for state in states.rows:
        state.append(9, {name: step.rows[name] for name in state.parts})
    assert states.ple is not None
    assert states.recurrent is not None
    states.ple.advance(step.token_ids)
    with pytest.raises(DraftError, match="the history stands at 13, the convolution at 9"):
        parted.advance(4)
    states.ple.write_conv(step.carries["ple.conv"])
    states.recurrent.write(13, {name: step.carries[name] for name in states.recurrent.parts})
    parted.advance(4)
    assert parted.digest() == whole.digest()


def test_prestaged_tokens_advance_the_history_once() -> None:
    ple = PleLayout((0,), vocab=20, eos=1, channels=2, heads_per_ngram=1, head_dim=3, size_base=5)
    layout = SequenceLayout(kv=ROWS_ONLY.kv, ple=ple)
    table = NgramTable(np.arange(ple.hashes()[0].rows * 3, dtype=np.uint16).reshape(-1, 3))
    pool = StatePool(layout, NumpyDevice(), block_tokens=8, kv_tokens=64, buffer_bytes=1 << 16, ple_tables=(table,))
    plain, staged = (make_sequence(pool, tokens=5) for _ in range(2))
    step = step_of(plain, 1)
    step.append_to(plain)
    assert staged.states.ple is not None
    staged.states.ple.prestage(int(step.token_ids[0]))
    for call in (staged.digest, staged.stage, staged.begin_draft, lambda: step.append_to(staged)):
        with pytest.raises(DraftError, match="staged"):
            call()
    rows = staged.states.ple.forward(step.token_ids)
    assert rows.shape == (1, 1, 2, 3)
    step.append_to(staged)  # the history has advanced already
    assert staged.digest() == plain.digest()
    assert pool.sequence_bytes(64) == 2 * (2 * 4 + 9 * 2 * 4) + rows.nbytes
    full = pool.buffer_bytes_free
    staged.release()
    assert pool.buffer_bytes_free == full + pool.sequence_bytes(64)


@pytest.mark.parametrize("kept", [0, 1, 4, 5])
def test_drafts_keep_what_is_accepted(kept: int) -> None:
    sequence, plain = (make_sequence(tokens=14) for _ in range(2))
    drafted = [step_of(sequence, 1, seed) for seed in range(5)]
    sequence.begin_draft()
    for step in drafted:
        step.append_to(sequence)
    assert (sequence.tokens, sequence.accepted_tokens) == (19, 14)
    epoch = sequence.epoch
    replay = sequence.accept(kept)
    assert replay == (0 if kept == 5 else kept)
    assert sequence.tokens == 14 + kept - replay
    for step in drafted[kept - replay : kept]:
        step.append_to(sequence)
    for step in drafted[:kept]:
        step.append_to(plain)
    assert sequence.epoch == epoch  # nothing that was accepted was taken back
    assert (sequence.tokens, sequence.digest()) == (plain.tokens, plain.digest())


def test_drafts_without_carries_are_cropped() -> None:
    sequence = make_sequence(make_pool(ROWS_ONLY), tokens=14)
    sequence.begin_draft()
    step_of(sequence, 5).append_to(sequence)
    assert sequence.accept(3) == 0
    assert (sequence.tokens, sequence.accepted_tokens) == (17, 17)


def test_an_open_draft_is_not_exported() -> None:
    sequence = make_sequence(tokens=14)
    with pytest.raises(DraftError, match="no draft is open"):
        sequence.reject()
    sequence.begin_draft()
    step_of(sequence, 4).append_to(sequence)
    expected = sequence.digest()
    for message, call in (
        ("rows frame at 16, where a draft is open from 14", lambda: sequence.export("rows", 16)),
        ("checkpoint frame at 18", lambda: sequence.export("checkpoint", 18)),
        ("a draft is open from 14 to 18", lambda: sequence.export("checkpoint", 14)),
        ("draft is open", sequence.stage),
        ("a draft is open from 14 to 18", sequence.layer_snapshots),
        ("a draft is open already, from 14", sequence.begin_draft),
        ("rewind to 14 while a draft is open", lambda: sequence.rewind_to(14)),
    ):
        assert_unchanged_by(sequence, DraftError, message, call)
    with pytest.raises(PositionError, match="5 tokens accepted of a draft of 4"):
        sequence.accept(5)
    assert sequence.digest() == expected
    before = sequence.export("rows", 8)
    sequence.reject()
    for name, array in sequence.export("rows", 8).items():
        assert array.tobytes() == before[name].tobytes()
    assert sequence.digest() == make_sequence(tokens=14).digest()


def test_exports_of_what_is_not_there_are_refused() -> None:
    sequence = make_sequence(tokens=21)
    good = sequence.export("rows", 16)
    readonly = {name: array.copy() for name, array in good.items()}
    readonly["attn.k"].flags.writeable = False
    signed = {**good, "attn.k": good["attn.k"].view(np.int16)}
    strided = {**good, "attn.k": np.empty((2, 16, 2, 6), np.uint16)[:, ::2]}
    for error, message, call in (
        (PositionError, "rows frame at 24, where the sequence stands at 21", lambda: sequence.export("rows", 24)),
        (PositionError, "rows frame at 0", lambda: sequence.export("rows", 0)),
        (PositionError, "carries are valid at 21 alone", lambda: sequence.export("checkpoint", 20)),
        (GeometryError, "17, not a multiple of 8", lambda: sequence.export("rows", 17)),
        (GeometryError, "no group 'window.4'", lambda: sequence.export("window.4", 16)),
        (GeometryError, "attn.v is missing", lambda: sequence.export("rows", 16, {"attn.k": good["attn.k"]})),
        (GeometryError, "x is not part", lambda: sequence.export("rows", 16, {**good, "x": good["attn.k"]})),
        (GeometryError, "attn.k is int16", lambda: sequence.export("rows", 16, signed)),
        (GeometryError, "attn.k is not a writeable", lambda: sequence.export("rows", 16, readonly)),
        (GeometryError, "attn.k is not a writeable", lambda: sequence.export("rows", 16, strided)),
    ):  # fmt: skip
        assert_unchanged_by(sequence, error, message, call)
    rows_only = make_sequence(make_pool(ROWS_ONLY), tokens=21)
    assert rows_only.export("checkpoint", 19)["attn.k"].shape == (2, 3, 1, 4)  # no carries: any count so far


def test_a_failed_restore_leaves_a_live_sequence_alone() -> None:
    source = make_sequence(tokens=21, seed=3)
    frames = frames_of(source, 21)
    rows, checkpoint = frames["rows", 8], frames["checkpoint", 21]
    live = make_sequence(tokens=10)
    histories = checkpoint["ple.history"].copy()
    histories[1, 0] += 1
    short = {**rows, "attn.k": rows["attn.k"][:, :7]}
    flags = {**rows, "dsa.valid": np.full((1, 8), 9, np.uint8)}
    torn = {**checkpoint, "ple.history": histories}
    foreign = {**checkpoint, "ple.history": np.full_like(histories, 97)}

    def restore_with(changed: dict[tuple[str, int], dict[str, np.ndarray]]) -> None:
        with live.restoration(21) as restoration:
            for (group, tokens), arrays in (frames | changed).items():
                restoration.put(group, tokens, arrays)
            restoration.commit()

    def put_twice() -> None:
        with live.restoration(21) as restoration:
            restoration.put("rows", 8, rows)
            restoration.put("rows", 8, rows)

    def commit_early() -> None:
        with live.restoration(21) as restoration:
            restoration.put("rows", 8, rows)
            restoration.commit()

    def restore_in_a_released_one() -> None:
        other = make_sequence(live.pool)
        try:
            with other.restoration(21) as restoration:
                for (group, tokens), arrays in frames.items():
                    restoration.put(group, tokens, arrays)
                other.release()
                restoration.commit()
        finally:
            other.release()

    for error, message, call in (
        (GeometryError, "attn.k is uint16", lambda: restore_with({("rows", 8): short})),
        (GeometryError, "attn.v is missing", lambda: restore_with({("rows", 8): {"attn.k": rows["attn.k"]}})),
        (BlobError, "valid is 9", lambda: restore_with({("rows", 8): flags})),
        (LockstepError, "histories differ", lambda: restore_with({("checkpoint", 21): torn})),
        (TokenError, "token id 97", lambda: restore_with({("checkpoint", 21): foreign})),
        (StateError, "rows frame at 24 is not needed", lambda: restore_with({("rows", 24): rows})),
        (StateError, "rows frame at 8 came twice", put_twice),
        (StateError, "restore to 21 lacks rows at 16, checkpoint at 21", commit_early),
        (ReleasedError, "released", restore_in_a_released_one),
        (PositionError, "restore to 0", lambda: live.restoration(0)),
        (CapacityError, "65 tokens in a sequence with room for 64", lambda: live.restoration(65)),
    ):  # fmt: skip
        assert_unchanged_by(live, error, message, call)
    epoch = live.epoch
    restore_with({})
    assert live.digest() == source.digest()
    assert live.epoch == epoch + 1


def test_room_for_a_restore_is_taken_first_and_freed() -> None:
    pool = make_pool(kv_tokens=40, buffer_bytes=1 << 14)
    live = make_sequence(pool, tokens=21)
    assert_unchanged_by(live, CapacityError, "pages wanted", lambda: live.restoration(21))
    reserved = [StateSet(pool, 16)]
    while pool.buffer_bytes_free >= pool.sequence_bytes(64):
        reserved.append(StateSet(pool, 64))
    assert_unchanged_by(live, CapacityError, "bytes", lambda: live.restoration(8))
    for states in reserved:
        states.release()
        states.release()
    restoration = live.restoration(8)
    restoration.abort()
    restoration.abort()
    with pytest.raises(StateError, match="is over"):
        restoration.put("rows", 8, {})
    with pytest.raises(StateError, match="is over"):
        restoration.commit()
    live.release()
    assert (pool.kv.free_pages, pool.buffer_bytes_free) == (10, 1 << 14)  # type: ignore[union-attr]
    with pytest.raises(LockstepError):
        Restoration(make_sequence(pool, tokens=3).states, 8)


def test_a_reservation_becomes_a_sequence_without_asking_again() -> None:
    pool = make_pool(kv_tokens=32)
    reservation = StateSet(pool, 32)
    reservation.ensure_room_through(32)
    greedy = SequenceState(StateSet(pool, 32))
    with pytest.raises(CapacityError):
        step_of(greedy, 1).append_to(greedy)
    sequence = SequenceState(reservation)
    step_of(sequence, 32).append_to(sequence)
    assert sequence.tokens == 32


def test_states_that_stand_elsewhere_are_not_swapped_in() -> None:
    sequence, other = make_sequence(tokens=9), make_sequence(tokens=12, seed=2)
    message = "the sequence stands at 11, but .*'KV attn': 12"
    assert_unchanged_by(sequence, LockstepError, message, lambda: sequence.replace(other.states, 11))
    with pytest.raises(LockstepError, match=message):
        SequenceState(other.states, 11)
    digest = other.digest()
    sequence.replace(other.states, 12)
    assert sequence.digest() == digest


def test_rewinding_needs_rows_alone() -> None:
    rows_only = make_sequence(make_pool(ROWS_ONLY), tokens=21)
    rows_only.rewind_to(21)
    assert rows_only.epoch == 0
    rows_only.rewind_to(9)
    assert (rows_only.tokens, rows_only.epoch) == (9, 1)
    assert_unchanged_by(rows_only, PositionError, "rewind to 10 from 9", lambda: rows_only.rewind_to(10))
    with_carries = make_sequence(tokens=21)
    with_carries.rewind_to(21)
    message = "the carries ple.conv, ple.history, recurrent.shift, recurrent.ssm are valid at 21 alone"
    assert_unchanged_by(with_carries, PositionError, message, lambda: with_carries.rewind_to(20))


def test_reset_is_a_new_sequence() -> None:
    pool = make_pool()
    sequence, fresh = make_sequence(pool, tokens=30), make_sequence(pool)
    sequence.begin_draft()
    sequence.reset()
    assert (sequence.tokens, sequence.epoch) == (0, 1)
    assert sequence.digest() == fresh.digest()
    step = step_of(sequence, 11)
    step.append_to(sequence)
    step.append_to(fresh)
    assert sequence.digest() == fresh.digest()


def test_release_is_idempotent_and_final() -> None:
    pool = make_pool()
    free = pool.buffer_bytes_free, pool.kv.free_pages  # type: ignore[union-attr]
    sequence = make_sequence(pool, tokens=30)
    step = step_of(sequence, 1)
    sequence.begin_draft()
    sequence.release()
    sequence.release()
    assert (pool.buffer_bytes_free, pool.kv.free_pages) == free  # type: ignore[union-attr]
    assert sequence.released
    for call in (
        lambda: step.append_to(sequence),
        lambda: sequence.export("rows", 8),
        lambda: sequence.rows("attn.k", 0, 1),
        lambda: sequence.carry("ple.conv"),
        lambda: sequence.advance(1),
        lambda: sequence.restoration(8),
        lambda: sequence.ensure_room_through(1),
        lambda: sequence.restore_layers(LayerSnapshots(0, ())),
        sequence.digest,
        sequence.stage,
        sequence.begin_draft,
        sequence.reset,
        sequence.layer_snapshots,
    ):
        with pytest.raises(ReleasedError):
            call()


def test_whole_layer_snapshots_restore_on_another_pool() -> None:
    sequence = make_sequence(tokens=21)
    snapshots = sequence.layer_snapshots()
    assert [(b.state, b.layer) for b in snapshots.blobs] == [
        *(("kv", 1), ("kv", 3), ("qsa", 1), ("qsa", 3), ("dsa", 2)),
        *(("ple", 0), ("ple", 2), ("recurrent", 0), ("recurrent", 2)),
    ]
    other = make_sequence(make_pool(page_tokens=5), tokens=9, seed=4)
    other.begin_draft()
    other.restore_layers(snapshots)
    assert (other.tokens, other.epoch, other.digest()) == (21, 1, sequence.digest())
    for one in (sequence, other):
        step_of(one, 7).append_to(one)
    assert other.digest() == sequence.digest()


def test_the_layers_of_a_snapshot_are_exactly_the_carriers() -> None:
    sequence = make_sequence(tokens=9)
    carriers = [(b.state, b.layer) for b in sequence.layer_snapshots().blobs]
    snapshots = make_sequence(tokens=21).layer_snapshots()
    blobs = snapshots.blobs
    foreign = dataclasses.replace(blobs[0], layer=2)
    outside = dataclasses.replace(blobs[0], layer=-1)
    unknown = dataclasses.replace(blobs[0], state="mamba")
    for message, given in (
        (r"missing \[\('recurrent', 2\)\]", blobs[:-1]),
        (r"twice \[\('kv', 1\)\]", (*blobs, blobs[0])),
        (r"foreign \[\('kv', 2\)\]", (*blobs, foreign)),
        (r"missing \[\('kv', 1\)\], foreign \[\('kv', -1\)\]", (outside, *blobs[1:])),
        (r"foreign \[\('mamba', 1\)\]", (*blobs, unknown)),
        ("missing", ()),
    ):
        pairs = [(b.state, b.layer) for b in given]
        assert_unchanged_by(sequence, LayerSetError, message, partial(sequence.layer_snapshots, pairs))
        assert_unchanged_by(
            sequence, LayerSetError, message, partial(sequence.restore_layers, LayerSnapshots(21, given))
        )
    backwards = sequence.layer_snapshots(carriers[::-1])
    assert [(b.state, b.layer) for b in backwards.blobs] == carriers[::-1]
    digest = sequence.digest()
    sequence.restore_layers(backwards)  # the order says nothing
    assert sequence.digest() == digest


def test_bad_snapshots_change_nothing() -> None:
    sequence = make_sequence(tokens=9)
    good = make_sequence(tokens=21, seed=5).layer_snapshots()
    short = make_sequence(tokens=20, seed=5).layer_snapshots()
    blobs = {(b.state, b.layer): b.blob for b in good.blobs}
    cuts = {(b.state, b.layer): b.blob for b in short.blobs}
    other_dim = struct.pack("<QQ", 21, 4) + bytes(blobs["dsa", 2])[16:]
    many = make_sequence(make_pool(), tokens=65, capacity=80).layer_snapshots()

    def replaced(tokens: int = 21, **changed: object) -> LayerSnapshots:
        return LayerSnapshots(
            tokens, tuple(LayerBlob(s, layer, changed.get(f"{s}{layer}", blob)) for (s, layer), blob in blobs.items())
        )

    for error, message, bad in (
        (LockstepError, r"row counts differ by layer: \{1: 21, 3: 20\}", replaced(qsa3=cuts["qsa", 3])),
        (LockstepError, "'DSA': 20", replaced(dsa2=cuts["dsa", 2])),
        (LockstepError, "'KV attn': 20", replaced(kv1=cuts["kv", 1], kv3=cuts["kv", 3])),
        (LockstepError, r"\{0: 20, 2: 21\}", replaced(recurrent0=cuts["recurrent", 0])),
        (LockstepError, "stands at 22, but", replaced(tokens=22)),
        (PositionError, "-1 tokens", replaced(tokens=-1)),
        (BlobError, "KV attn", replaced(kv3=bytes(blobs["kv", 3])[:-1])),
        (BlobError, "head dim 4 in the blob, 3 here", replaced(dsa2=other_dim)),
        (BlobError, "history of 1 tokens", replaced(ple2=struct.pack("<I", 1) + bytes(blobs["ple", 2])[4:])),
        (BlobError, "no 16-byte header", replaced(recurrent2=b"")),
        (CapacityError, "65", many),
    ):  # fmt: skip
        assert_unchanged_by(sequence, error, message, partial(sequence.restore_layers, bad))
    sequence.restore_layers(good)
    assert sequence.tokens == 21


def test_recurrent_layouts_without_rows_run_and_restore() -> None:
    layout = SequenceLayout(recurrent=(RecurrentLayout("ssm", (0,), (3,)),))
    sequence = make_sequence(make_pool(layout), tokens=13)
    assert list(frames_of(sequence, 13)) == [("checkpoint", 13)]
    other = make_sequence(make_pool(layout))
    with other.restoration(13) as restoration:
        restoration.put("checkpoint", 13, sequence.export("checkpoint", 13))
        restoration.commit()
    assert other.digest() == sequence.digest()
    with pytest.raises(StateError, match=r"lengths \{\}"):
        other.append(13, {}, {"recurrent.ssm": np.zeros((1, 3), np.float32)})


def test_accessors_show_the_current_state() -> None:
    sequence = make_sequence(tokens=5)
    step = step_of(sequence, 3)
    step.append_to(sequence)
    assert (sequence.rows("attn.v", 5, 8) == step.rows["attn.v"]).all()
    assert (sequence.carry("recurrent.ssm") == step.carries["recurrent.ssm"]).all()
    assert sequence.carry("ple.history")[0].tolist() == step.token_ids[-2:].tolist()
    with pytest.raises(PositionError):
        sequence.rows("attn.v", 5, 9)


@pytest.mark.parametrize(
    "changed", [{"page_tokens": 0}, {"kv_tokens": -1}, {"buffer_bytes": -1}, {"staging_slots": -1}]
)
def test_pools_of_impossible_sizes_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        make_pool(**changed)


def test_parts_that_are_not_there_are_named() -> None:
    sequence = make_sequence(tokens=9)
    for call in (lambda: sequence.rows("ple.conv", 0, 1), lambda: sequence.carry("attn.k")):
        with pytest.raises(StateError, match=r"no (rows|carry) '(ple.conv|attn.k)'; there are"):
            call()
