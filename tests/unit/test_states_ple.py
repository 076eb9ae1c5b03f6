"""PLE layers: the hash's check vector, n-gram ids against a scalar model, table look-ups, prestage, blob, refusals."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.devices import NumpyDevice
from tiered_cache.errors import (
    BlobError,
    ConfigError,
    DraftError,
    LayerSetError,
    LockstepError,
    PositionError,
    ReleasedError,
    StateError,
    TokenError,
)
from tiered_cache.states.ngrams import NgramHash, NgramTable
from tiered_cache.states.ple import PleLayout, PleState

LAYOUT = PleLayout(
    (2, 5), vocab=40, eos=3, channels=2, kernel=3, ngram_size=3, heads_per_ngram=2, head_dim=4, size_base=11
)


def tables(layout: PleLayout = LAYOUT) -> tuple[NgramTable, ...]:
    rng = np.random.default_rng(7)
    shapes = [(ngram_hash.rows, layout.head_dim) for ngram_hash in layout.hashes()]
    return tuple(NgramTable(rng.integers(0, 1 << 16, shape, dtype=np.uint16)) for shape in shapes)


def ids_of(*tokens: int) -> npt.NDArray[np.uint32]:
    return np.array(tokens, dtype=np.uint32)


def make_conv(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((2, 6, 2)).astype(np.float32)


def make_blob(history: list[int], conv: npt.NDArray[np.float32]) -> bytes:
    """The declared layout, written by other means than the library's."""
    blob = struct.pack(f"<I{len(history)}I", len(history), *history)
    return blob + struct.pack(f"<{conv.size}f", *conv.reshape(-1).tolist())


def content(ple: PleState) -> dict[int, bytes]:
    return {layer: bytes(ple.encode_layer(layer)) for layer in ple.layers}


def model_ids(layout: PleLayout, index: int, text: list[int], position: int) -> list[int]:
    """The ids of one token by Python integers, looking back over the whole text."""
    ngram_hash = layout.hashes()[index]
    ends = [p for p in range(position) if text[p] == layout.eos]
    last_end = ends[-1] if ends else -1
    back = [text[position - s] if position - s > last_end or s == 0 else layout.eos for s in range(layout.ngram_size)]
    result = []
    for order in range(2, layout.ngram_size + 1):
        mixed = 0
        for s in range(order):
            mixed ^= back[s] * ngram_hash.multipliers[s] % (1 << 64)
        for head in range((order - 2) * layout.heads_per_ngram, (order - 1) * layout.heads_per_ngram):
            result.append(mixed % ngram_hash.sizes[head] + sum(ngram_hash.sizes[:head]))
    return result


def test_the_check_vector() -> None:
    ngram_hash = PleLayout((0,), vocab=248320, eos=0, channels=1).hashes()[0]
    assert ngram_hash.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert len(ngram_hash.sizes) == 16
    assert (ngram_hash.sizes[0], ngram_hash.sizes[1], ngram_hash.sizes[-1]) == (20000003, 20000023, 20000171)
    assert ngram_hash.rows == 320001446
    assert ngram_hash.offsets[:3] == (0, 20000003, 40000026)


def test_sizes_are_primes_consecutive_over_the_layers() -> None:
    first, second = LAYOUT.hashes()
    assert first.sizes + second.sizes == (11, 13, 17, 19, 23, 29, 31, 37)
    assert first.multipliers != second.multipliers
    only = NgramHash.of_layer(1, vocab=40, ngram_size=3, heads_per_ngram=2, size_base=11, seed=1234)
    assert only == second


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from([3, 3, 0, 1, 17, 39]), min_size=1, max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=4),
)
def test_ids_are_the_scalar_model_however_the_text_is_cut(text: list[int], cuts: list[int]) -> None:
    ple = PleState(LAYOUT, NumpyDevice())
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, stop in itertools.pairwise(edges):
        chunk = ids_of(*text[start:stop])
        ids = ple.ngram_ids(chunk)
        assert ids.shape == (2, stop - start, 4)
        for index in range(2):
            expected = [model_ids(LAYOUT, index, text, position) for position in range(start, stop)]
            assert ids[index].tolist() == expected
        ple.advance(chunk)
        ple.write_conv(make_conv(0))
    assert ple.history.tolist() == ([3, 3, *text])[-2:]
    assert ple.tokens == len(text)


def test_ids_of_large_vocabularies_do_not_overflow() -> None:
    layout = PleLayout((0,), vocab=(1 << 32) - 1, eos=2, channels=1, ngram_size=4, heads_per_ngram=1, size_base=1009)
    ple = PleState(layout, NumpyDevice())
    text = [(1 << 32) - 2, 5, (1 << 32) - 3, 2, 4_000_000_000, 1]
    ids = ple.ngram_ids(ids_of(*text))
    assert ids[0].tolist() == [model_ids(layout, 0, text, position) for position in range(6)]


def test_rows_come_from_host_memory_and_from_a_file_alike(tmp_path: Path) -> None:
    in_memory = tables()
    mapped = []
    for index, table in enumerate(in_memory):
        path = tmp_path / f"table{index}"
        path.write_bytes(table.rows.tobytes())
        mapped.append(NgramTable.map_file(path, *table.rows.shape))
    text = ids_of(1, 39, 3, 3, 8)
    here = PleState(LAYOUT, NumpyDevice(), in_memory)
    there = PleState(LAYOUT, NumpyDevice(), tuple(mapped))
    ids = here.ngram_ids(text)
    rows = here.forward(text)
    assert rows.shape == (2, 5, 4, 4)
    for index, table in enumerate(in_memory):
        assert (rows[index] == table.rows[ids[index].astype(np.int64)]).all()
    assert there.forward(text).tobytes() == rows.tobytes()
    assert here.history.tolist() == [3, 8]
    with pytest.raises(ConfigError, match=r"bytes, not the \d+ of 12 x 4 bfloat16"):
        NgramTable.map_file(tmp_path / "table0", 12, 4)
    with pytest.raises(ConfigError, match="No such file"):
        NgramTable.map_file(tmp_path / "absent", 12, 4)


def test_tables_that_do_not_fit_the_layout_are_refused() -> None:
    good = tables()
    for bad in (good[:1], (good[0], NgramTable(good[1].rows[:-1])), (good[0], NgramTable(good[1].rows.view(np.int16)))):
        with pytest.raises(ConfigError):
            PleState(LAYOUT, NumpyDevice(), bad)
    with pytest.raises(ConfigError, match="shape"):
        NgramTable(np.zeros(4, np.uint16))
    without = PleState(LAYOUT, NumpyDevice())
    for call in (lambda: without.forward(ids_of(1)), lambda: without.prestage(1)):
        with pytest.raises(ConfigError, match="no tables"):
            call()
    assert without.history_at == 0


def test_a_staged_row_is_consumed_once_and_the_history_advances_once() -> None:
    staged, plain = (PleState(LAYOUT, NumpyDevice(), tables()) for _ in range(2))
    addresses = set()
    for step, token in enumerate((7, 3, 12, 12, 0)):
        staged.prestage(token)
        assert staged.staged
        assert staged.history_at == step + 1
        history = staged.history.tolist()
        rows = staged.forward(ids_of(token))
        addresses.add(rows.ctypes.data)
        assert rows.tobytes() == plain.forward(ids_of(token)).tobytes()
        assert staged.history.tolist() == history == plain.history.tolist()
        assert not staged.staged
        for ple in (staged, plain):
            ple.write_conv(make_conv(step))
    assert content(staged) == content(plain)
    assert len(addresses) == 1  # a captured graph reads the same buffer at every step


def test_between_prestage_and_forward_nothing_is_settled() -> None:
    ple = PleState(LAYOUT, NumpyDevice(), tables())
    ple.prestage(7)
    for call in (
        ple.snapshot,
        lambda: ple.encode_layer(2),
        lambda: ple.prestage(8),
        lambda: ple.advance(ids_of(8)),
        lambda: ple.write_conv(make_conv(0)),
        lambda: ple.forward(ids_of(8)),
        lambda: ple.forward(ids_of(7, 8)),
    ):
        with pytest.raises(DraftError, match="token 7 is staged"):
            call()
    assert ple.staged
    ple.forward(ids_of(7))
    with pytest.raises(DraftError, match="the history stands at 1, the convolution at 0"):
        ple.snapshot()
    ple.write_conv(make_conv(0))
    assert ple.snapshot().tokens == 1


@pytest.mark.parametrize("clear", ["reset", "restore", "rollback"])
def test_restore_and_reset_clear_a_staged_row(clear: str) -> None:
    ple = PleState(LAYOUT, NumpyDevice(), tables())
    snapshot = ple.snapshot()
    before = content(ple)
    ple.prestage(7)
    if clear == "reset":
        ple.reset()
    elif clear == "restore":
        ple.restore(0, before)
    else:
        ple.rollback(snapshot)
    assert not ple.staged
    assert content(ple) == before
    ple.prestage(8)  # nothing of the dropped token is left
    assert ple.history.tolist() == [3, 8]


def test_a_fresh_state_is_all_eos_and_zero() -> None:
    ple = PleState(LAYOUT, NumpyDevice())
    assert content(ple) == dict.fromkeys((2, 5), make_blob([3, 3], np.zeros((6, 2), np.float32)))
    assert (LAYOUT.state_len, LAYOUT.history_tokens) == (6, 2)
    ple.advance(ids_of(1, 2, 4))
    ple.write_conv(make_conv(1))
    ple.reset()
    assert content(ple) == dict.fromkeys((2, 5), make_blob([3, 3], np.zeros((6, 2), np.float32)))
    assert (ple.tokens, ple.history_at) == (0, 0)


def test_the_convolution_keeps_the_last_inputs_oldest_first() -> None:
    ple = PleState(LAYOUT, NumpyDevice())
    inputs = np.random.default_rng(1).standard_normal((2, 20, 2)).astype(np.float32)
    done = 0
    for count in (1, 2, 9, 6, 2):
        conv = ple.conv_after(inputs[:, done : done + count])
        ple.advance(ids_of(*range(count)))
        ple.write_conv(conv)
        done += count
        padded = np.concatenate((np.zeros((2, 6, 2), np.float32), inputs[:, :done]), axis=1)
        assert (ple.arrays["ple.conv"] == padded[:, -6:]).all()


def test_a_rejected_draft_is_rolled_back() -> None:
    ple = PleState(LAYOUT, NumpyDevice())
    ple.advance(ids_of(5, 6))
    ple.write_conv(make_conv(1))
    before, snapshot = content(ple), ple.snapshot()
    for _ in range(2):  # a snapshot may be used again
        ple.advance(ids_of(7))
        ple.write_conv(make_conv(2))
        assert content(ple) != before
        ple.rollback(snapshot)
        assert (ple.tokens, ple.history_at) == (2, 2)
        assert content(ple) == before
    ple.reset()
    with pytest.raises(PositionError, match="roll-back to 2 from 0"):
        ple.rollback(snapshot)


def test_blobs_of_another_program_restore() -> None:
    conv = make_conv(3)
    blobs = {2: make_blob([9, 3], conv[0]), 5: make_blob([9, 3], conv[1])}
    ple = PleState(LAYOUT, NumpyDevice())
    ple.restore(17, blobs)
    assert (ple.tokens, ple.history_at, ple.history.tolist()) == (17, 17, [9, 3])
    assert (ple.arrays["ple.conv"] == conv).all()
    assert content(ple) == blobs


def test_refusals_change_nothing() -> None:
    ple = PleState(LAYOUT, NumpyDevice())
    ple.advance(ids_of(5, 6))
    ple.write_conv(make_conv(1))
    before = content(ple)
    conv = make_conv(3)
    good = {2: make_blob([9, 3], conv[0]), 5: make_blob([9, 3], conv[1])}
    outside = dict.fromkeys((2, 5), make_blob([9, 40], conv[1]))
    for error, message, call in (
        (BlobError, "a history of 1 tokens, not 2", lambda: ple.restore(9, {**good, 5: make_blob([9], conv[1])})),
        (BlobError, "a history of 3 tokens, not 2", lambda: ple.restore(9, {**good, 5: make_blob([9, 3, 4], conv[1])})),
        (BlobError, "59 bytes, where its header asks for 60", lambda: ple.restore(9, {**good, 5: good[5][:-1]})),
        (BlobError, "64 bytes, where its header asks for 60", lambda: ple.restore(9, {**good, 5: good[5] + bytes(4)})),
        (BlobError, "3 bytes has no 4-byte header", lambda: ple.restore(9, {**good, 5: good[5][:3]})),
        (LockstepError, "histories differ by layer", lambda: ple.restore(9, {**good, 5: make_blob([9, 4], conv[1])})),
        (TokenError, r"token id 40 is outside \[0, 40\)", lambda: ple.restore(9, outside)),
        (LayerSetError, r"missing \[5\]", lambda: ple.restore(9, {2: good[2]})),
        (LayerSetError, "layer 3", lambda: ple.encode_layer(3)),
        (TokenError, r"token id 40 is outside \[0, 40\)", lambda: ple.advance(ids_of(1, 40))),
        (TokenError, "token id -1", lambda: ple.ngram_ids(np.array([-1]))),  # type: ignore[arg-type]
        (TokenError, "not a list of integers", lambda: ple.ngram_ids(np.array([1.0]))),  # type: ignore[arg-type]
        (TokenError, "token id 40", lambda: ple.prestage(40)),
        (StateError, "ple.conv is float32", lambda: ple.write_conv(conv[:, :5])),
        (StateError, "ple.conv is float64", lambda: ple.write_conv(conv.astype(np.float64))),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
        assert content(ple) == before
        assert (ple.tokens, ple.history_at) == (2, 2)


def test_release_frees_everything_and_is_final() -> None:
    ple = PleState(LAYOUT, NumpyDevice(), tables())
    ple.prestage(1)
    ple.release()
    ple.release()
    assert not ple.arrays
    assert not ple.tables
    assert not ple.staged
    for call in (
        lambda: ple.prestage(1),
        lambda: ple.forward(ids_of(1)),
        lambda: ple.history,
        lambda: ple.write_conv(make_conv(0)),
        lambda: ple.restore(0, {}),
        ple.snapshot,
        ple.reset,
    ):
        with pytest.raises(ReleasedError):
            call()


@pytest.mark.parametrize(
    "changed", [{"ngram_size": 1}, {"kernel": 0}, {"heads_per_ngram": 0}, {"eos": 40}, {"eos": -1}]
)
def test_layouts_that_cannot_hash_are_refused(changed: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        PleLayout((0,), **{"vocab": 40, "eos": 3, "channels": 2, **changed})
