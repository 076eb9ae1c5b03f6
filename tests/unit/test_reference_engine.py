"""The reference engine's own promises: its arithmetic, its drafts, its capacity, and what to expect of a state."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.engines.base import FrameName
from tiered_cache.engines.expected import ExpectedState, ExpectedStates
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.engines.reference_model import MODELS, STEP_TOKENS_MAX, ReferenceModel, ReferenceNetwork
from tiered_cache.errors import CapacityError, ConfigError, DraftError, PositionError, StateError, TokenError
from tiered_cache.geometry import PartKind
from tiered_cache.identity import CHECKPOINT, Tokens, namespace_of
from tiered_cache.states import bfloat16
from tiered_cache.testing.engine_suite import Frames, export, frames_needed, random_prompt, restore, same_bits

SMALL = ("qsa-ple-gdn:small", "mla-dsa-kda:small")
EOS = 2


def make_engine(name: str = SMALL[0], **options: int) -> ReferenceEngine:
    return ReferenceEngine(name, **({"capacity_bytes": 4 << 20} | options))  # type: ignore[arg-type]


def run(engine: ReferenceEngine, *pieces: Tokens, room: int = 0) -> int:
    sequence = engine.start(engine.reserve(max(room, sum(map(len, pieces)))))
    for piece in pieces:
        engine.extend(sequence, piece)
    return sequence


class Mark(NamedTuple):
    tokens: int
    digest: str
    output: int


def mark(engine: ReferenceEngine, sequence: int) -> Mark:
    return Mark(engine.tokens(sequence), engine.digest(sequence), engine.output(sequence))


def all_frames(engine: ReferenceEngine, sequence: int) -> Frames:
    return export(engine, sequence, frames_needed(engine.geometry, engine.tokens(sequence)))


# -- arithmetic


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("qsa-ple-gdn:small", 3175840108474877556),
        ("mla-dsa-kda:small", 7256216316766500824),
        ("qsa-ple-gdn:tiny", 8918756365315997705),
        ("mla-dsa-kda:tiny", 17484054132989982657),
    ],
)
def test_the_arithmetic_of_this_revision(name: str, output: int) -> None:
    """Whoever changes these numbers raises `REVISION`: frames of another arithmetic must not be found."""
    engine = make_engine(name)
    tokens = np.arange(100, dtype=np.uint32) * 7919 % engine.vocabulary
    tokens[40] = EOS
    assert engine.output(run(engine, tokens)) == output


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_cut_of_a_prompt_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    engine = make_engine(name)
    token = st.one_of(st.just(EOS), st.integers(0, engine.vocabulary - 1))
    tokens = np.array(data.draw(st.lists(token, min_size=1, max_size=60)), dtype=np.uint32)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=12)))
    assert mark(engine, run(engine, *np.split(tokens, cuts))) == mark(engine, run(engine, tokens))


@pytest.mark.parametrize("name", ["qsa-ple-gdn:tiny", "mla-dsa-kda:tiny"])
def test_steps_longer_than_the_longest_are_cut_exactly(name: str) -> None:
    engine = make_engine(name)
    tokens = random_prompt(engine, 2 * STEP_TOKENS_MAX + 5)
    expected = mark(engine, run(engine, tokens))
    for cut in (1, STEP_TOKENS_MAX - 1, STEP_TOKENS_MAX, STEP_TOKENS_MAX + 1):
        sequence = run(engine, tokens[:cut], tokens[cut:])
        assert mark(engine, sequence) == expected
        engine.release(sequence)


@pytest.mark.parametrize("name", SMALL)
def test_every_row_depends_on_the_first_token(name: str) -> None:
    engine = make_engine(name)
    tokens = random_prompt(engine, 32)
    changed = tokens.copy()
    changed[0] ^= 1
    one, other = (all_frames(engine, run(engine, prompt)) for prompt in (tokens, changed))
    for frame in (FrameName("rows", 16), FrameName("rows", 32)):
        for part in ("attn.k", "attn.v", "qsa.keys", "mla.k", "dsa.keys"):
            if part in one[frame]:
                differs = (one[frame][part] != other[frame][part]).reshape(*one[frame][part].shape[:2], -1).any(axis=2)
                assert differs.all(), part
    for part, array in one[FrameName(CHECKPOINT, 32)].items():
        if part in {"recurrent.gdn", "recurrent.kda"}:
            assert (array != other[FrameName(CHECKPOINT, 32)][part]).mean() > 0.9


@pytest.mark.parametrize("name", SMALL)
def test_what_looks_like_floats_is_finite(name: str) -> None:
    engine = make_engine(name)
    for frame in all_frames(engine, run(engine, random_prompt(engine, 48))).values():
        for part, array in frame.items():
            values = array
            if array.dtype == np.uint16:
                values = bfloat16.to_float32(array.view(np.uint16))
            assert np.isfinite(values).all(), part


def test_another_seed_is_another_model_and_another_tenant_is_not() -> None:
    engine, reseeded = make_engine(), make_engine(seed=1)
    salted = ReferenceEngine(SMALL[0], tenant_salt=b"tenant", capacity_bytes=4 << 20)
    tokens = random_prompt(engine, 20)
    outputs = [mark(e, run(e, tokens)) for e in (engine, reseeded, salted)]
    assert outputs[0].output != outputs[1].output
    assert outputs[0] == outputs[2]
    namespaces = {
        namespace_of(e.identity.digest(), e.geometry.fingerprint())
        for e in (engine, reseeded, salted, make_engine(SMALL[1]), make_engine(block_tokens=32))
    }
    assert len(namespaces) == 5


def test_sizes() -> None:
    for name, model in MODELS.items():
        engine = make_engine(name)
        token_bytes = engine.geometry.block_bytes / model.block_tokens
        if name.endswith("tiny"):
            assert 32 <= token_bytes <= 64
            assert model.block_tokens == 512
        if name.endswith("large"):
            assert 1 << 20 <= engine.geometry.frame_bytes("rows", model.block_tokens) <= 16 << 20
        assert any(part.kind is PartKind.CARRY for part in engine.geometry.parts)


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="qsa-ple-gdn:tiny"):
        ReferenceEngine("qsa-ple-gdn:gigantic")
    for change in ({"recurrent_layers": (1,)}, {"attention_layers": ()}, {"ple_layers": ()}, {"conv_channels": 3}):
        sizes = {"recurrent_layers": (0,), "attention_layers": (1,), "ple_layers": (0,), "conv_channels": 4} | change
        with pytest.raises(ConfigError):
            ReferenceModel(shape="qsa-ple-gdn", row_dim=4, indexer_dim=4, state_shape=(1, 2, 2), **sizes)  # type: ignore[arg-type]


# -- the output sees everything


@pytest.mark.parametrize("name", SMALL)
def test_any_flipped_byte_of_any_frame_shows_or_is_refused(name: str) -> None:
    """Every byte of two blocks and the checkpoint behind them, one after the other."""
    engine = make_engine(name, block_tokens=4)
    tokens = 9
    sequence = run(engine, random_prompt(engine, tokens))
    right = mark(engine, sequence)
    frames = all_frames(engine, sequence)
    outputs = {right.output}
    tried = refused = 0
    for frame in frames.values():
        for part, array in frame.items():
            flat = array.reshape(-1).view(np.uint8)
            for position in range(len(flat)):
                flat[position] ^= 0x10
                tried += 1
                try:
                    wrong = restore(engine, frames, tokens, tokens)
                except StateError:
                    refused += 1
                    assert part in {"dsa.valid", "ple.history"}  # flags above 1, ids beyond the vocabulary
                else:
                    found = mark(engine, wrong)
                    assert found.digest != right.digest
                    outputs.add(found.output)
                    engine.release(wrong)
                flat[position] ^= 0x10
    assert len(outputs) == 1 + tried - refused
    assert tried == sum(engine.geometry.frame_bytes(*frame) for frame in frames)


def test_block_keys_that_were_not_pooled_right_show() -> None:
    engine = make_engine()
    sequence = run(engine, random_prompt(engine, 20))
    before = engine.output(sequence)
    qsa = engine._held(sequence).state.states.qsa
    assert qsa is not None
    qsa.block_keys(0, 5).view(np.uint16)[1, 4, 0] ^= 1
    assert engine.output(sequence) != before


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_carry_of_any_layer_spoils_the_rows_after_it(name: str) -> None:
    engine = make_engine(name)
    sequence = run(engine, random_prompt(engine, 16), room=32)
    frames = all_frames(engine, sequence)
    further = random_prompt(engine, 16, seed=1)
    engine.extend(sequence, further)
    rows = FrameName("rows", 32)
    right = export(engine, sequence, [rows])[rows]
    for part, array in frames[FrameName(CHECKPOINT, 16)].items():
        values = array.reshape(len(array), -1).view(np.uint32)
        # histories are one and the same on every layer, and refused if they differ
        for layer in [slice(None)] if part == "ple.history" else range(len(values)):
            values[layer, -1] ^= 8
            wrong = restore(engine, frames, 16, 32)
            values[layer, -1] ^= 8
            engine.extend(wrong, further)
            assert any((a != right[n]).any() for n, a in export(engine, wrong, [rows])[rows].items()), (part, layer)
            engine.release(wrong)


def test_block_frames_can_be_exported_while_the_sequence_runs_on() -> None:
    engine = make_engine()
    sequence = run(engine, random_prompt(engine, 64), room=8000)
    names = frames_needed(engine.geometry, 64)[:-1]
    before = export(engine, sequence, names)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(engine.generate, sequence, 100)
        exports = 0
        while not running.done():
            assert same_bits(export(engine, sequence, names), before)
            exports += 1
        running.result()
    assert exports > 0
    assert engine.tokens(sequence) == 164


# -- decoding and drafts


@pytest.mark.parametrize("name", SMALL)
def test_another_worker_goes_on_generating_the_same_tokens(name: str) -> None:
    here, there = make_engine(name), make_engine(name)
    sequence = run(here, random_prompt(here, 21), room=80)
    begun = here.generate(sequence, 5)
    restored = restore(there, all_frames(here, sequence), 26, 80)
    rest = here.generate(sequence, 40)
    assert there.generate(restored, 40).tolist() == rest.tolist()
    assert len(set(rest.tolist())) > 20
    whole = run(here, np.concatenate((random_prompt(here, 21), begun, rest)))
    assert mark(here, whole) == mark(there, restored)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("wrong_at", [0, 2, 6])
def test_a_draft_leaves_what_decoding_would_have(name: str, wrong_at: int) -> None:
    engine = make_engine(name)
    prompt = random_prompt(engine, 30)
    plain = run(engine, prompt, room=60)
    proposal = engine.generate(plain, 6)
    if wrong_at < 6:
        proposal[wrong_at] = (proposal[wrong_at] + 1) % engine.vocabulary
    sequence = run(engine, prompt, room=60)
    engine.stage(sequence)
    staged = export(engine, sequence, [FrameName(CHECKPOINT, 30)])
    assert engine.draft(sequence, proposal) == wrong_at
    assert engine.tokens(sequence) == 30
    engine.accept(sequence, wrong_at)
    assert engine.tokens(sequence) == 30 + wrong_at
    expected = run(engine, prompt, proposal[:wrong_at], room=60)
    assert mark(engine, sequence) == mark(engine, expected)
    assert engine.generate(sequence, 9).tolist() == engine.generate(expected, 9).tolist()
    later = export(engine, sequence, list(staged))
    assert all((a == later[n][p]).all() for n, frame in staged.items() for p, a in frame.items())


def test_an_open_draft_is_not_exported_staged_or_built_upon() -> None:
    engine = make_engine()
    sequence = run(engine, random_prompt(engine, 30), room=60)
    before = mark(engine, sequence)
    engine.draft(sequence, random_prompt(engine, 4, seed=1))
    drafted = mark(engine, sequence)
    for refused in (
        lambda: engine.stage(sequence),
        lambda: export(engine, sequence, [FrameName(CHECKPOINT, 30)]),
        lambda: export(engine, sequence, [FrameName("rows", 32)]),
        lambda: engine.extend(sequence, random_prompt(engine, 1)),
        lambda: engine.draft(sequence, random_prompt(engine, 1)),
        lambda: engine.generate(sequence, 1),
    ):
        with pytest.raises(DraftError):
            refused()
    with pytest.raises(PositionError):
        engine.accept(sequence, 5)
    assert mark(engine, sequence) == drafted
    export(engine, sequence, [FrameName("rows", 16)])
    engine.accept(sequence, 0)
    assert mark(engine, sequence) == before
    with pytest.raises(DraftError):
        engine.accept(sequence, 0)


def test_foreign_tokens_are_refused_before_anything_is_computed() -> None:
    engine = make_engine()
    sequence = run(engine, random_prompt(engine, 5), room=20)
    before = mark(engine, sequence)
    with pytest.raises(TokenError, match="257"):
        engine.extend(sequence, np.array([1, 2, 257], dtype=np.uint32))
    with pytest.raises(TokenError):
        engine.draft(sequence, np.array([[1]], dtype=np.uint32))
    assert mark(engine, sequence) == before


def test_a_step_that_dies_half_way_is_never_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    free = engine.bytes_free()
    sequence = run(engine, random_prompt(engine, 20), room=40)

    def die(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tiered_cache.engines.reference_model._AttentionLayer.step", die)
    with pytest.raises(MemoryError):
        engine.extend(sequence, random_prompt(engine, 4))
    for refused in (lambda: engine.stage(sequence), lambda: export(engine, sequence, [FrameName(CHECKPOINT, 20)])):
        with pytest.raises(DraftError):
            refused()
    engine.release(sequence)
    assert engine.bytes_free() == free


# -- room


@pytest.mark.parametrize(("name", "tokens"), list(itertools.product(SMALL, (1, 16, 63, 64, 65, 700))))
def test_room_is_charged_as_announced(name: str, tokens: int) -> None:
    engine = make_engine(name)
    assert engine.bytes_free() == engine.capacity_bytes
    engine.reserve(tokens)
    assert engine.capacity_bytes - engine.bytes_free() == engine.sequence_bytes(tokens)


@pytest.mark.parametrize(("name", "tokens"), list(itertools.product(SMALL, (1, 64, 1000))))
def test_room_that_is_free_can_be_reserved(name: str, tokens: int) -> None:
    """No page and no buffer runs out before the bytes do, whatever the sequences' lengths."""
    engine = make_engine(name, capacity_bytes=1 << 20)
    fits = engine.bytes_free() // engine.sequence_bytes(tokens)
    sequences = [engine.start(engine.reserve(tokens)) for _ in range(fits)]
    with pytest.raises(CapacityError, match=str(engine.sequence_bytes(tokens))):
        engine.reserve(tokens)
    for sequence in sequences:
        engine.extend(sequence, random_prompt(engine, tokens))
    assert engine.bytes_free() == engine.capacity_bytes - fits * engine.sequence_bytes(tokens)


def test_a_refused_restoration_leaves_the_reservation() -> None:
    engine = make_engine()
    reservation = engine.reserve(16)
    for tokens, error in ((0, PositionError), (1000, CapacityError)):
        with pytest.raises(error):
            engine.restoration(reservation, tokens)
    engine.start(reservation)


# -- what to expect of a state


def test_expected_states_are_remembered_and_computed_where_they_are_not() -> None:
    engine = make_engine()
    expected = ExpectedStates(make_engine(), entries_max=2)
    prompts = [random_prompt(engine, 20, seed) for seed in range(3)]
    states = [ExpectedState(*mark(engine, run(engine, prompt))[1:]) for prompt in prompts]
    assert expected.remember(b"0", states[0])
    assert expected.remember(b"0", states[0])
    assert not expected.remember(b"0", states[1])
    assert expected.expect(b"0", prompts[0]) == states[0]
    assert expected.recomputations == 0
    assert expected.expect(b"1", prompts[1]) == states[1]
    assert expected.expect(b"0", prompts[0]) == states[0]
    assert expected.recomputations == 1
    assert expected.expect(b"2", prompts[2]) == states[2]  # pushes out prompt 1, the longest unused
    assert len(expected) == 2
    assert expected.expect(b"0", prompts[0]) == states[0]
    assert expected.recomputations == 2
    assert expected.expect(b"1", prompts[1]) == states[1]
    assert expected.recomputations == 3


def test_computing_an_expected_state_leaves_no_room_taken() -> None:
    engine = make_engine(capacity_bytes=1 << 16)
    expected = ExpectedStates(engine)
    free = engine.bytes_free()
    expected.recompute(random_prompt(engine, 20))
    with pytest.raises(CapacityError):
        expected.expect(b"long", random_prompt(engine, 20_000))
    with pytest.raises(TokenError):
        expected.expect(b"foreign", np.array([999], dtype=np.uint32))
    assert engine.bytes_free() == free
    assert len(expected) == 0


def test_a_network_is_fixed_by_model_and_seed() -> None:
    engine = make_engine()
    for seed, same in ((b"a", True), (b"b", False)):
        one = ReferenceNetwork(engine.model, engine.device, b"a").tables[0].rows
        other = ReferenceNetwork(engine.model, engine.device, seed).tables[0].rows
        assert np.array_equal(one, other) == same
