"""`PrefixIndex` against an oracle that keeps a plain dict of frames and works everything out from their names."""

from __future__ import annotations

import copy
import itertools
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiered_cache.identity import CHECKPOINT
from tiered_cache.index import FrameName, Layout, PrefixIndex, RemovalReason

BLOCK = 2
TIERS = ("host", "disk")
LAYOUTS = (
    Layout(0, (), BLOCK),
    Layout(0, (), BLOCK, shards=2),
    Layout(0, (), BLOCK, carries=False),
    Layout(0, (), BLOCK, (("rows", 0), ("window.3", 3)), carries=False),
    Layout(0, (), BLOCK, (("rows", 0), ("window.3", 3), ("window.5", 5)), carries=True),
)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)


class TupleChain:
    """A chain whose prefix ids are the prefixes themselves."""

    namespace = 0
    block_tokens = BLOCK

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens = tokens

    @property
    def blocks(self) -> int:
        return len(self.tokens) // BLOCK

    def __len__(self) -> int:
        return len(self.tokens)

    def block_hash(self, index: int, /) -> tuple[int, ...]:
        return self.tokens[: index * BLOCK]

    def prefix_hash(self, tokens: int, /) -> tuple[int, ...]:
        return self.tokens[:tokens]


def frame_bytes(group: str, tokens: int) -> int:
    return {"rows": 100, "window.3": 10, "window.5": 20, CHECKPOINT: 1000 + tokens}[group]


class Oracle:
    """Frames by tier, and nothing else."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.held: dict[str, dict[FrameName, int]] = {tier: {} for tier in TIERS}

    def needed(self, prefix: tuple[int, ...]) -> set[FrameName]:
        names, end = set(), len(prefix) // BLOCK
        for group, window in self.layout.groups:
            for depth in range((max(0, len(prefix) - window) // BLOCK if window else 0) + 1, end + 1):
                at, parent = prefix[: depth * BLOCK], prefix[: (depth - 1) * BLOCK]
                names |= {FrameName(0, at, parent, group, depth * BLOCK, r) for r in range(self.layout.shards)}
        if self.layout.carries or len(prefix) % BLOCK:
            parent = prefix[: (len(prefix) - 1) // BLOCK * BLOCK]
            names |= {FrameName(0, prefix, parent, CHECKPOINT, len(prefix), r) for r in range(self.layout.shards)}
        return names

    def restorable(self, prefix: tuple[int, ...]) -> bool:
        needed = self.needed(prefix)
        return bool(needed) and all(any(name in self.held[tier] for tier in TIERS) for name in needed)

    def longest(self, tokens: tuple[int, ...]) -> int:
        return max((n for n in range(1, len(tokens) + 1) if self.restorable(tokens[:n])), default=0)

    def checkpoints(self, tier: str) -> set[tuple[int, ...]]:
        if self.layout.carries:
            return {name.prefix for name in self.held[tier] if name.group == CHECKPOINT}  # type: ignore[misc]
        return {name.prefix for name in self.held[tier]}  # type: ignore[misc]

    def supported(self, tier: str, without: tuple[int, ...] | None = None) -> set[FrameName]:
        """The frames of a tier that some checkpoint there needs."""
        names: set[FrameName] = set()
        for checkpoint in self.checkpoints(tier) - {without}:
            names |= self.needed(checkpoint) & self.held[tier].keys()
            if not self.layout.carries:  # every block end on the way is a checkpoint of its own
                names |= {n for n in self.held[tier] if n.group != CHECKPOINT and n.prefix == checkpoint[: n.tokens]}
        return names

    def freed(self, tier: str, prefix: tuple[int, ...]) -> set[FrameName]:
        """What a drop takes away: all that it needs and others do not; of blocks whose rows go, every frame."""
        lost = (self.needed(prefix) & self.held[tier].keys()) - self.supported(tier, prefix)
        others = self.checkpoints(tier) - {prefix}
        unused = {
            n
            for n in self.held[tier]
            if n.group != CHECKPOINT and n.prefix == prefix[: n.tokens] and not _behind(others, n.prefix)
        }
        return lost | unused if prefix in self.checkpoints(tier) else set()


def _behind(checkpoints: set[tuple[int, ...]], prefix: object) -> bool:
    assert isinstance(prefix, tuple)
    return any(checkpoint[: len(prefix)] == prefix for checkpoint in checkpoints)


class IndexMachine(RuleBasedStateMachine):
    @initialize(layout=st.sampled_from(LAYOUTS))
    def begin(self, layout: Layout) -> None:
        self.index = PrefixIndex(TIERS)
        self.index.register(layout)
        self.oracle = Oracle(layout)
        self.layout = layout

    @rule(tokens=TOKENS, tier=st.sampled_from(TIERS), part=st.floats(0, 1), whole=st.booleans())
    def spill(self, tokens: tuple[int, ...], tier: str, part: float, whole: bool) -> None:
        """Bring a checkpoint, or begin to, and clean up if it was cut off."""
        chain = TupleChain(tokens)
        claim = self.index.claim(chain, len(tokens), tier)
        missing = self.index.missing(chain, len(tokens), tier)
        assert set(missing) == self.oracle.needed(tokens) - self.oracle.held[tier].keys()
        for name in missing if whole else missing[: int(part * len(missing))]:
            self.index.insert(name, tier, frame_bytes(name.group, name.tokens))
            self.oracle.held[tier][name] = frame_bytes(name.group, name.tokens)
        for name in self.index.release(claim):
            assert name not in self.oracle.supported(tier)
            assert self.index.remove(name, tier, RemovalReason.ABANDONED)
            del self.oracle.held[tier][name]

    @precondition(lambda self: any(self.oracle.held.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A frame turns out to be gone."""
        tier = data.draw(st.sampled_from([t for t in TIERS if self.oracle.held[t]]))
        name = data.draw(st.sampled_from(sorted(self.oracle.held[tier], key=repr)))
        assert self.index.remove(name, tier, RemovalReason.LOST)
        assert not self.index.remove(name, tier, RemovalReason.LOST)
        del self.oracle.held[tier][name]

    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def drop(self, data: st.DataObject, tier: str) -> None:
        """A policy drops a checkpoint."""
        checkpoints = sorted(self.oracle.checkpoints(tier))
        if not checkpoints:
            return
        prefix = data.draw(st.sampled_from(checkpoints))
        expected = self.oracle.freed(tier, prefix)
        support = self.index.view(tier).sole_support(prefix)
        assert support == (len(expected), sum(self.oracle.held[tier][name] for name in expected))
        names = self.index.drop(prefix, tier, RemovalReason.EVICTED)
        assert set(names) == expected
        assert len(names) == len(expected)
        rows = [name.tokens for name in names if name.group == "rows"]
        assert rows == sorted(rows, reverse=True)
        for name in names:
            del self.oracle.held[tier][name]

    @rule(tokens=TOKENS, data=st.data(), tier=st.sampled_from(TIERS))
    def trial(self, tokens: tuple[int, ...], data: st.DataObject, tier: str) -> None:
        """What a trial foretells is what happens."""
        index, chain = copy.deepcopy(self.index), TupleChain(tokens)
        take_at = data.draw(st.lists(st.integers(1, len(tokens)), min_size=1, max_size=3))
        new = index.candidates(chain, take_at, tier, frame_bytes)
        brought: set[FrameName] = set()
        for candidate in new:
            more = self.oracle.needed(candidate.prefix) - self.oracle.held[tier].keys() - brought  # type: ignore[arg-type]
            exact = sum(frame_bytes(n.group, n.tokens) for n in more)  # a block counts whole until all ranks are there
            assert candidate.marginal_bytes == exact or (candidate.marginal_bytes > exact and self.layout.shards > 1)
            brought |= more
        trial = index.view(tier).trial(new, frozenset())
        before = index.stored_bytes(tier)
        assert trial.needed_bytes == sum(candidate.marginal_bytes for candidate in new)
        for _ in range(data.draw(st.integers(0, 4))):
            choice = sorted(trial.sample(10, random.Random(0)), key=repr)
            if choice:
                trial.drop(data.draw(st.sampled_from(choice)))
        claims = [index.claim(chain, candidate.tokens, tier) for candidate in trial.candidates.values()]
        for prefix in trial.dropped:
            index.drop(prefix, tier, RemovalReason.EVICTED)
        for candidate in trial.candidates.values():
            for name in index.missing(chain, candidate.tokens, tier):
                index.insert(name, tier, frame_bytes(name.group, name.tokens))
        for claim in claims:
            index.release(claim)
        assert index.stored_bytes(tier) - before <= trial.needed_bytes
        if (
            self.layout.shards == 1
            and not self.layout.windows
            and not self.oracle.supported(tier) ^ self.oracle.held[tier].keys()
        ):
            assert index.stored_bytes(tier) - before == trial.needed_bytes

    @rule(tokens=TOKENS)
    def look_up(self, tokens: tuple[int, ...]) -> None:
        chain = TupleChain(tokens)
        match = self.index.longest(chain, len(tokens))
        assert match.tokens == self.oracle.longest(tokens)
        assert match.tokens <= match.branch_tokens + BLOCK
        assert (match.reason is None) == (match.tokens == len(tokens))
        assert str(match.tokens) in str(self.index.explain(chain, len(tokens)))
        if match.tokens:
            assert match.prefix == tokens[: match.tokens]
            located = self.index.support(chain, match.tokens)
            assert {place.name for place in located} == self.oracle.needed(tokens[: match.tokens])
            for place in located:
                holding = [(t, self.oracle.held[t][place.name]) for t in TIERS if place.name in self.oracle.held[t]]
                assert list(place.copies) == holding

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        for tier in TIERS:
            held, view = self.oracle.held[tier], self.index.view(tier)
            assert dict(self.index.names(tier)) == held
            assert self.index.stored_bytes(tier) == sum(held.values())
            assert self.index.stored_frames(tier) == len(held)
            checkpoints = self.oracle.checkpoints(tier)
            assert set(view) == checkpoints
            for prefix in checkpoints:
                assert view.tokens(prefix) == len(prefix)
                above = [c for c in checkpoints if prefix[: len(c)] == c and c != prefix and not len(c) % BLOCK]
                assert view.ancestor(prefix) == max(above, key=len, default=None)
            useful = {c for c in checkpoints if self.oracle.freed(tier, c)}
            assert set(view.sample(1000, random.Random(0))) == useful
            assert len(view) == len(useful)

    def teardown(self) -> None:
        """Names alone, in any order, rebuild an index that answers alike; and an empty one remembers nothing."""
        if not hasattr(self, "index"):
            return
        rebuilt = PrefixIndex(TIERS)
        rebuilt.register(self.layout)
        everything = [(tier, name, size) for tier in TIERS for name, size in self.oracle.held[tier].items()]
        random.Random(len(everything)).shuffle(everything)
        for tier, name, size in everything:
            rebuilt.insert(name, tier, size)
        for length in range(1, 7):
            for tokens in itertools.product((0, 1), repeat=length):
                chain = TupleChain(tokens)
                assert rebuilt.longest(chain, length).tokens == self.oracle.longest(tokens)
        for tier, name, _ in everything:
            rebuilt.remove(name, tier, RemovalReason.LOST)
        assert rebuilt._tree.nodes.keys() == {()}
        assert not rebuilt._tree.checkpoints
        assert set(rebuilt._tree.incomplete.values()) == {0}
        assert all(tier.holes == 0 and not tier.droppable for tier in rebuilt._tree.tiers)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=200, stateful_step_count=25, deadline=None)
