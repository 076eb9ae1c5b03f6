"""Sequences against an oracle of plain lists: grow, draft, stage, export, restore, rewind, reset, release."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tiered_cache.devices import NumpyDevice
from tiered_cache.errors import CapacityError, DraftError, PositionError
from tiered_cache.identity import CHECKPOINT
from tiered_cache.states.dsa import DsaLayout
from tiered_cache.states.paged_kv import KvLayout
from tiered_cache.states.ple import PleLayout
from tiered_cache.states.qsa import QsaLayout, pool_blocks
from tiered_cache.states.recurrent import RecurrentLayout
from tiered_cache.states.sequence import SequenceLayout, SequenceState, StagedCheckpoint, StatePool, StateSet
from tiered_cache.testing.device_suite import random_step

LAYOUTS = (
    SequenceLayout(
        kv=KvLayout((0, 2), heads=1, key_dim=2, value_dim=1),
        qsa=QsaLayout((0, 2), head_dim=4, ratio=2, rotary_dim=2),
        ple=PleLayout((1,), vocab=9, eos=0, channels=2, kernel=2, heads_per_ngram=1, size_base=5),
        recurrent=(RecurrentLayout("gdn", (1,), (3,)),),
    ),
    SequenceLayout(kv=KvLayout((0,), heads=1, key_dim=2, value_dim=0), dsa=DsaLayout((0,), head_dim=2)),
)
CAPACITY, BLOCK, PAGES = 26, 4, 20


@dataclass
class Moment:
    """One state: per part and layer a list of rows, or one value."""

    rows: dict[str, list[bytes]] = field(default_factory=dict)
    carries: dict[str, bytes] = field(default_factory=dict)
    history: list[int] = field(default_factory=list)

    def copy(self) -> Moment:
        return Moment({name: list(rows) for name, rows in self.rows.items()}, dict(self.carries), list(self.history))

    @property
    def tokens(self) -> int:
        return len(next(iter(self.rows.values())))


@dataclass
class Model:
    """What the oracle knows of one sequence."""

    now: Moment
    draft: Moment | None = None
    drafted: list[int] = field(default_factory=list)
    epoch: int = 0


class SequencesAgainstLists(RuleBasedStateMachine):
    staged = Bundle("staged")

    @initialize(layout=st.sampled_from(LAYOUTS), page_tokens=st.sampled_from([1, 3, 4]))
    def build(self, layout: SequenceLayout, page_tokens: int) -> None:
        self.layout = layout
        sizes = {"kv_tokens": PAGES * page_tokens, "page_tokens": page_tokens, "staging_slots": 2}
        self.pool = StatePool(layout, NumpyDevice(), block_tokens=BLOCK, buffer_bytes=1 << 20, **sizes)
        self.carries = bool(self.pool.geometry.carries)
        self.sequences = [SequenceState(StateSet(self.pool, CAPACITY)) for _ in range(2)]
        self.models = [Model(self.fresh()) for _ in range(2)]
        self.slots = 0

    def fresh(self) -> Moment:
        moment = Moment({part.name: [] for group in self.pool.geometry.block_groups for part in group.parts})
        moment.carries = {
            p.name: bytes(p.array(0).bytes) for p in self.pool.geometry.carries if p.name != "ple.history"
        }
        moment.history = [0] * 2 if self.layout.ple else []
        return moment

    def frame(self, moment: Moment, group: str, tokens: int) -> dict[str, bytes]:
        """The bytes of a frame's arrays, [layers, T, ...], from the lists."""
        start, stop = self.pool.geometry.span(group, tokens)
        result = {}
        for name in self.pool.geometry.arrays(group, tokens):
            if name in moment.rows:
                layers = len(next(p for p in self.pool.geometry.parts if p.name == name).layers)
                rows = moment.rows[name][start:stop]
                sizes = [len(row) // layers for row in rows]
                result[name] = b"".join(
                    row[layer * size : (layer + 1) * size]
                    for layer in range(layers)
                    for row, size in zip(rows, sizes, strict=True)
                )
            elif name == "ple.history":
                result[name] = np.array(moment.history, np.uint32).tobytes()
            else:
                result[name] = moment.carries[name]
        return result

    @rule(which=st.integers(0, 1), count=st.integers(1, 9), seed=st.integers(0, 1 << 30))
    def append(self, which: int, count: int, seed: int) -> None:
        sequence, model = self.sequences[which], self.models[which]
        step = random_step(np.random.default_rng(seed), self.pool, count)
        try:
            step.append_to(sequence)
        except CapacityError:
            pages = self.pool.kv.free_pages * self.pool.kv.page_tokens  # type: ignore[union-attr]
            assert sequence.tokens + count > CAPACITY or count > pages
            return
        for name, array in step.rows.items():
            model.now.rows[name] += [array[:, row].tobytes() for row in range(count)]
        model.now.carries = {name: array.tobytes() for name, array in step.carries.items()}
        if self.layout.ple:
            model.now.history = (model.now.history + step.token_ids.tolist())[-2:]

    @rule(which=st.integers(0, 1))
    def begin_draft(self, which: int) -> None:
        sequence, model = self.sequences[which], self.models[which]
        if model.draft is not None:
            try:
                sequence.begin_draft()
            except DraftError:
                return
            raise AssertionError
        sequence.begin_draft()
        model.draft = model.now.copy()

    @rule(which=st.integers(0, 1), share=st.floats(0, 1))
    def end_draft(self, which: int, share: float) -> None:
        sequence, model = self.sequences[which], self.models[which]
        if model.draft is None:
            return
        drafted = model.now.tokens - model.draft.tokens
        count = round(share * drafted)
        replay = sequence.accept(count)
        if count < drafted or not drafted:
            kept = model.draft.tokens + (0 if self.carries else count)
            if self.carries:
                model.now = model.draft
            model.now.rows = {name: rows[:kept] for name, rows in model.now.rows.items()}
            assert replay == (count if self.carries else 0)
        else:
            assert replay == 0
        model.draft = None

    @rule(which=st.integers(0, 1), block=st.integers(1, CAPACITY // BLOCK))
    def export_block(self, which: int, block: int) -> None:
        sequence, model = self.sequences[which], self.models[which]
        end = block * BLOCK
        accepted = (model.draft or model.now).tokens
        try:
            arrays = sequence.export("rows", end)
        except PositionError:
            assert end > model.now.tokens
        except DraftError:
            assert accepted < end <= model.now.tokens
        else:
            assert end <= accepted
            assert {n: a.tobytes() for n, a in arrays.items()} == self.frame(model.now, "rows", end)

    @rule(target=staged, which=st.integers(0, 1))
    def stage(self, which: int) -> tuple[StagedCheckpoint, dict[str, bytes]] | None:
        sequence, model = self.sequences[which], self.models[which]
        try:
            checkpoint = sequence.stage()
        except CapacityError:
            assert self.slots == 2
            return None
        except PositionError:
            assert model.now.tokens == 0
            return None
        except DraftError:
            assert model.draft is not None
            return None
        self.slots += 1
        return checkpoint, self.frame(model.now, CHECKPOINT, model.now.tokens)

    @rule(staged=consumes(staged))
    def export_staged(self, staged: tuple[StagedCheckpoint, dict[str, bytes]] | None) -> None:
        if staged is not None:
            checkpoint, expected = staged
            assert {n: a.tobytes() for n, a in checkpoint.export().items()} == expected
            checkpoint.release()
            self.slots -= 1

    @rule(source=st.integers(0, 1), order=st.randoms(use_true_random=False), last=st.booleans())
    def restore_onto_the_other(self, source: int, order: object, last: bool) -> None:
        """All frames, in any order, or all but one: then nothing changes."""
        sequence, model = self.sequences[source], self.models[source]
        target, target_model = self.sequences[1 - source], self.models[1 - source]
        if model.draft is not None or not model.now.tokens:
            return
        try:
            restoration = target.restoration(model.now.tokens)
        except CapacityError:
            return
        with restoration:
            frames = list(restoration.needed)
            order.shuffle(frames)  # type: ignore[attr-defined]
            for group, tokens in frames if last else frames[:-1]:
                restoration.put(group, tokens, sequence.export(group, tokens))
            if last:
                assert restoration.commit() is target
                target_model.now, target_model.draft = model.now.copy(), None
                target_model.epoch += 1
                assert target.digest() == sequence.digest()

    @rule(source=st.integers(0, 1))
    def restore_layers_onto_the_other(self, source: int) -> None:
        sequence, model = self.sequences[source], self.models[source]
        if model.draft is not None:
            return
        try:
            self.sequences[1 - source].restore_layers(sequence.layer_snapshots())
        except CapacityError:
            return
        other = self.models[1 - source]
        other.now, other.draft = model.now.copy(), None
        other.epoch += 1

    @rule(which=st.integers(0, 1), tokens=st.integers(0, CAPACITY))
    def rewind(self, which: int, tokens: int) -> None:
        sequence, model = self.sequences[which], self.models[which]
        try:
            sequence.rewind_to(tokens)
        except DraftError:
            assert model.draft is not None
        except PositionError:
            assert tokens > model.now.tokens or self.carries
        else:
            model.epoch += tokens < model.now.tokens
            model.now.rows = {name: rows[:tokens] for name, rows in model.now.rows.items()}

    @rule(which=st.integers(0, 1), release=st.booleans())
    def reset_or_replace(self, which: int, release: bool) -> None:
        model = self.models[which]
        if release:
            self.sequences[which].release()
            self.sequences[which] = SequenceState(StateSet(self.pool, CAPACITY))
        else:
            self.sequences[which].reset()
        self.models[which] = Model(self.fresh(), epoch=0 if release else model.epoch + 1)

    @precondition(lambda self: hasattr(self, "sequences"))
    @invariant()
    def everything_is_as_the_lists_say(self) -> None:
        for sequence, model in zip(self.sequences, self.models, strict=True):
            tokens = model.now.tokens
            assert (sequence.tokens, sequence.epoch) == (tokens, model.epoch)
            assert sequence.accepted_tokens == (model.draft or model.now).tokens
            for name, rows in model.now.rows.items():
                array = sequence.rows(name, 0, tokens)
                assert [array[:, row].tobytes() for row in range(tokens)] == rows
            for name, value in model.now.carries.items():
                assert sequence.carry(name).tobytes() == value
            if self.layout.ple:
                assert sequence.carry("ple.history").tolist() == [model.now.history]
            self.block_keys_are_pooled_afresh(sequence)
        assert self.pool.staging_slots_free == 2 - self.slots
        used = sum(len(s.states.kv.page_table) for s in self.sequences)  # type: ignore[union-attr]
        assert self.pool.kv.free_pages == PAGES - used  # type: ignore[union-attr]
        assert self.pool.buffer_bytes_free == self.pool.buffer_bytes - 2 * self.pool.sequence_bytes(CAPACITY)

    def block_keys_are_pooled_afresh(self, sequence: SequenceState) -> None:
        qsa = sequence.states.qsa
        if qsa is not None:
            blocks = sequence.tokens // qsa.layout.ratio
            raw = sequence.rows("qsa.keys", 0, blocks * qsa.layout.ratio)
            with np.errstate(all="ignore"):
                expected = pool_blocks(np, qsa.layout, raw, qsa.weight, 0)  # type: ignore[arg-type]
            assert qsa.block_keys(0, blocks).tobytes() == expected.tobytes()


SequencesAgainstLists.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSequencesAgainstLists = SequencesAgainstLists.TestCase
