"""Which prefixes can be restored, from where, what a spill must still bring, and why a match is no longer.

The index is a cache of what the tiers hold; frames are the truth, and their names alone rebuild it, in any order.
A look-up may mix tiers, frame by frame. What a call costs depends on the length of the prefix that it is about, and
not on how many frames there are. Nothing here reads a clock, does I/O or starts a thread; the caller holds the lock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tiered_cache.errors import IdentityError, MissReason
from tiered_cache.identity import CHECKPOINT, DIGEST_BYTES, TICKET, PrefixChain
from tiered_cache.prefix_tree import (
    Candidate,
    Checkpoint,
    Copies,
    FrameName,
    Holdings,
    Layout,
    Name,
    Node,
    PrefixId,
    PrefixTree,
    RemovalReason,
    TierView,
    Trial,
    plain_name,
    private_checkpoint,
)

__all__ = [
    "Candidate",
    "Chain",
    "Claim",
    "Explanation",
    "FrameName",
    "Layout",
    "Located",
    "Match",
    "Name",
    "PrefixId",
    "PrefixIndex",
    "RemovalReason",
    "Stretch",
    "TierView",
    "private_checkpoint",
]

REMOVALS_MAX = 1 << 16
"""How many of the last removals are remembered, to say why something is not there."""
TAILS_MAX = 64
"""How many checkpoints there may be inside the block after one block end: each look-up may have to hash them all."""

_NO_PLACE = object()


_MISS_AFTER = {
    RemovalReason.ABANDONED: MissReason.NOT_STORED,
    RemovalReason.QUARANTINED: MissReason.QUARANTINED,
    RemovalReason.LOST: MissReason.LOST,
    RemovalReason.EXPIRED: MissReason.EXPIRED,
    RemovalReason.EVICTED: MissReason.EVICTED,
    RemovalReason.MOVED: MissReason.EVICTED,  # and what it moved to has dropped it since
    RemovalReason.CROWDED: MissReason.EVICTED,
    RemovalReason.DISCARDED: MissReason.EVICTED,
}
"""Why a look-up misses what was removed: of every reason there is."""


class Chain(Protocol):
    """The block hashes of one token list; `identity.PrefixChain` is one."""

    @property
    def namespace(self) -> Hashable: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    def __len__(self) -> int: ...
    def block_hash(self, index: int, /) -> Hashable: ...
    def prefix_hash(self, tokens: int, /) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class Match:
    """The longest restorable prefix of a prompt."""

    tokens: int
    """0 for a miss."""
    branch_tokens: int
    """The deepest block end at which the prompt still follows a known prefix: where a checkpoint would serve both."""
    prefix: PrefixId | None
    """The checkpoint to restore from."""
    reason: MissReason | None
    """Why it is not longer; None if it is as long as was asked for."""


@dataclass(frozen=True, slots=True)
class Located:
    """A frame that a restore needs, and the tiers that hold it, from the top: empty if none does."""

    name: FrameName
    copies: tuple[tuple[str, int], ...]
    """Tier and stored bytes."""
    lineages: tuple[int, ...]
    """Of each copy, the computation it comes from; 0 where that is not known."""
    verified: tuple[str, ...]
    """The tiers whose copy has been read and found sound since it was put or recovered."""


@dataclass(frozen=True, slots=True)
class KnownChain:
    """A prefix as far as names tell it: a `Chain` of which, inside blocks, only its own end has a known name."""

    namespace: Hashable
    block_tokens: int
    hashes: tuple[PrefixId, ...]
    """h(0) .. h(blocks)."""
    tokens: int
    prefix: PrefixId
    ranks: frozenset[int] | None = None
    """Whose frames are meant; all if None."""

    @property
    def blocks(self) -> int:
        return len(self.hashes) - 1

    def __len__(self) -> int:
        return self.tokens

    def block_hash(self, index: int, /) -> PrefixId:
        return self.hashes[index]

    def prefix_hash(self, tokens: int, /) -> PrefixId:
        block, tail = divmod(tokens, self.block_tokens)
        if not tail:
            return self.hashes[block]
        return self.prefix if tokens == self.tokens else (self.hashes[block], tokens)  # what no frame is named

    def check(self, namespace: bytes, block_tokens: int) -> None:
        """Raise `IdentityError` listing what cannot be a prefix of this namespace: it comes from another process."""
        problems = []
        if self.namespace != namespace:
            problems.append("it is of another namespace")
        if self.block_tokens != block_tokens:
            problems.append(f"block_tokens is {self.block_tokens}, not {block_tokens}")
        elif not self.blocks * block_tokens <= self.tokens < (self.blocks + 1) * block_tokens:
            problems.append(f"{self.tokens} tokens in {self.blocks} blocks of {block_tokens}")
        if any(not isinstance(name, bytes) or len(name) != DIGEST_BYTES for name in (*self.hashes, self.prefix)):
            problems.append(f"a hash is not {DIGEST_BYTES} bytes")
        if not self.hashes or self.hashes[0] != PrefixChain(namespace, block_tokens).block_hash(0):
            problems.append("h(0) is not the namespace's root")
        if problems:
            raise IdentityError("not a prefix: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive blocks of a prompt that are in the same situation."""

    start: int
    stop: int
    what: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a match is as long as it is."""

    match: Match
    stretches: tuple[Stretch, ...]
    checkpoints: tuple[Stretch, ...]

    def __str__(self) -> str:
        why = f"; not longer: {self.match.reason}" if self.match.reason else ""
        lines = [f"restorable to {self.match.tokens} tokens{why}"]
        lines += [f"blocks [{s.start}, {s.stop}): {s.what}" for s in self.stretches]
        lines += [f"checkpoint at {s.stop}: {s.what}" for s in self.checkpoints]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Claim:
    """Holds a prefix in a tier while a checkpoint behind it is being written."""

    prefix: PrefixId
    tokens: int
    tier: str

    def checkpoint(self, node: Node) -> Checkpoint:
        """What will be there, for counting."""
        return Checkpoint(self, node, self.tokens, 0)


class PrefixIndex:
    """All namespaces' prefixes, over all tiers of one node."""

    def __init__(self, tiers: Sequence[str]) -> None:
        """`tiers`: their names, the fastest first."""
        self._tree = PrefixTree(tiers)
        self._removals: dict[PrefixId, RemovalReason] = {}
        self._pins: dict[int, tuple[PrefixId, float]] = {}
        self._pin_counts: dict[PrefixId, int] = {}
        self._pin_deadlines: list[tuple[float, int]] = []
        self._pin_ids = itertools.count()

    def register(self, layout: Layout) -> None:
        """Make a namespace known. Again with the same layout is allowed, with another it raises `IdentityError`."""
        self._tree.register(layout)

    def stored_bytes(self, tier: str) -> int:
        return self._tree.by_name[tier].bytes

    def stored_frames(self, tier: str) -> int:
        return self._tree.by_name[tier].frames

    def view(self, tier: str) -> TierView:
        """What the policy of one tier may see."""
        return TierView(self._tree, self._tree.by_name[tier])

    def locate(self, name: Name) -> Located:
        """Where one frame is; `copies` is empty if no tier holds it."""
        frame = self._tree.find(name)
        return self._located(plain_name(name), frame)

    def tickets(self, namespace: Hashable, lineage: int, tier: str) -> list[FrameName]:
        """The tickets of a suspended sequence that a tier holds: one a rank."""
        checkpoint = self._tree.checkpoints.get((namespace, lineage))
        return self._tickets_of([checkpoint] if checkpoint else [], tier)

    def all_tickets(self, tier: str) -> list[FrameName]:
        """Every suspended sequence's tickets that a tier holds."""
        return self._tickets_of((c for c in self._tree.checkpoints.values() if c.private), tier)

    def _tickets_of(self, checkpoints: Iterable[Checkpoint], tier: str) -> list[FrameName]:
        index = self._tree.by_name[tier].index
        frames = (pair for checkpoint in checkpoints for pair in checkpoint.frames.items())
        return [name for name, frame in frames if name.group == TICKET and frame.stored[index] >= 0]

    def is_elsewhere(self, checkpoint: PrefixId, chain: Chain) -> bool:
        """Whether there is such a checkpoint, and in no block that this chain leads to."""
        there = self._tree.checkpoints.get(checkpoint)
        if there is None:
            return False
        depth = there.node.depth
        return depth > chain.blocks or chain.block_hash(depth) != there.node.prefix

    def holds(self, name: Name, tier: str) -> bool:
        """Whether a tier has this frame."""
        frame = self._tree.find(name)
        return frame is not None and frame.stored[self._tree.by_name[tier].index] >= 0

    def names(self, tier: str) -> Iterator[tuple[FrameName, int]]:
        """Every frame of a tier, with its stored bytes, parents before children for the shared block frames.

        What comes and goes while somebody takes them one by one may be missed, or told all the same.
        """
        index = self._tree.by_name[tier].index
        for node in sorted(self._tree.nodes.values(), key=lambda n: n.depth):
            for slot, frame in enumerate(node.frames):
                if frame is not None and frame.stored[index] >= 0:
                    yield self._tree.block_name(node, slot), frame.stored[index]
        for checkpoint in list(self._tree.checkpoints.values()):
            for name, frame in list(checkpoint.frames.items()):
                if frame.stored[index] >= 0:
                    yield name, frame.stored[index]

    def insert(self, name: Name, tier: str, stored_bytes: int, lineage: int = 0) -> None:
        """A tier holds a frame. Any order will do, and a second time only changes the bytes and the lineage.

        Raises `IdentityError` if the name contradicts the names that are known, or its namespace is not registered;
        then nothing has changed.
        """
        self._tree.insert(name, self._tree.by_name[tier], stored_bytes, lineage)
        if name.group != TICKET:  # which tells nothing about the prefix
            self._removals.pop(name.prefix, None)

    def remove(self, name: Name, tier: str, reason: RemovalReason) -> bool:
        """A tier does not hold a frame any more; returns whether the index thought that it did."""
        home, frame = self._tree.by_name[tier], self._tree.find(name)
        if frame is None or frame.stored[home.index] < 0:
            return False
        self._tree.remove(plain_name(name), frame, home)
        if not frame.held and name.group != TICKET:
            self._remember(name.prefix, reason)
        return True

    def mourn(self, name: Name) -> None:
        """A frame was lost that was held before this index was: if no tier has it, that is why."""
        frame = self._tree.find(name)
        if (frame is None or not frame.held) and name.group != TICKET:
            self._remember(name.prefix, RemovalReason.LOST)

    def drop(self, prefix: PrefixId, tier: str, reason: RemovalReason) -> list[FrameName]:
        """Remove a checkpoint from a tier, with all that only it needs there; returns the frames to delete, in order.

        A block end that owns no frames and has other checkpoints of the tier behind it frees nothing, and stays.
        """
        home = self._tree.by_name[tier]
        names: list[FrameName] = []
        gone: list[PrefixId] = []
        for holder, place, copies in list(Trial(self._tree, home).sole(prefix)):
            if isinstance(holder, Node):
                assert isinstance(place, int)
                name = self._tree.block_name(holder, place)
                self._tree.remove_block(holder, place, home)
            else:
                assert isinstance(place, FrameName)
                name = place
                self._tree.remove(name, copies, home)
            names.append(name)
            if not copies.held and name.group != TICKET:
                gone.append(name.prefix)
        for forgotten in gone[:1] + gone[-1:]:
            self._remember(forgotten, reason)
        return names

    def claim(self, chain: Chain, tokens: int, tier: str) -> Claim:
        """Keep a prefix, what a tier holds of it and will hold, while a checkpoint at `tokens` is on its way there."""
        node = self._deepest(chain, tokens // chain.block_tokens)
        if not node.layout.row_slots:  # the path may be known in parts only
            node = self._tree.nodes[node.layout.root]
        for depth in range(node.depth + 1, tokens // chain.block_tokens + 1):
            node = self._tree.node(node.layout, chain.block_hash(depth), depth, node.prefix)
        claim = Claim(node.prefix, tokens, tier)
        self._tree.hold(claim.checkpoint(node), self._tree.by_name[tier], 1)
        return claim

    def release(self, claim: Claim) -> list[FrameName]:
        """End a claim; if its checkpoint did not come, returns the frames that nothing supports: remove them."""
        home, node = self._tree.by_name[claim.tier], self._tree.nodes[claim.prefix]
        self._tree.hold(claim.checkpoint(node), home, -1)
        names: list[FrameName] = []
        at: Node | None = node
        while at is not None and (not at.supports[home.index] or at.layout.windows):
            names += self._tree.idle_names(at, home)
            at = at.parent
        self._tree.prune(node)
        return names

    def unsupported(self, tier: str) -> list[FrameName]:
        """Every frame of a tier that supports no checkpoint there, deepest first: left by spills that were cut off."""
        home = self._tree.by_name[tier]
        nodes = sorted(self._tree.nodes.values(), key=lambda n: -n.depth)
        return [name for node in nodes for name in self._tree.idle_names(node, home)]

    def set_verified(self, name: Name, tier: str) -> None:
        """A tier's copy has been read and is sound."""
        frame = self._tree.find(name)
        if frame is not None:
            frame.verified |= 1 << self._tree.by_name[tier].index

    def longest(self, chain: Chain, tokens_max: int) -> Match:
        """The longest restorable prefix of at most `tokens_max` tokens, over all tiers; a miss says why."""
        layout = self._tree.layouts.get(chain.namespace)
        if layout is None:
            return Match(0, 0, None, MissReason.NAMESPACE)
        tokens_max = min(tokens_max, len(chain))
        known = self._deepest(chain, chain.blocks)
        branch_tokens = min(known.depth, tokens_max // layout.block_tokens) * layout.block_tokens
        found = MissReason.NO_CHECKPOINT
        node: Node | None = self._deepest_complete(chain, known)
        top = node.depth if node else 0
        while node is not None:
            for tokens, prefix, why in self._restorable(node, chain, tokens_max):
                if why is None:
                    reason = None if tokens == tokens_max else self._reason(chain, tokens, top, tokens_max, found)
                    return Match(tokens, branch_tokens, prefix, reason)
                found = why
            node = self._up(node, chain)
        short = tokens_max < 1 or (not layout.carries and tokens_max < layout.block_tokens)
        reason = MissReason.TOO_SHORT if short else self._reason(chain, 0, top, tokens_max, found)
        return Match(0, branch_tokens, None, reason)

    def support(self, chain: Chain, tokens: int, private: int = 0) -> list[Located]:
        """Every frame that a restore to `tokens` needs and where it is; a suspended sequence's own come first."""
        return [self._located(name, frame) for name, frame in self._needed(chain, tokens, private, 0)]

    def unverified(self, chain: Chain, tokens: int, tier: str, private: int = 0) -> list[FrameName]:
        """The frames of a tier that a restore to `tokens` needs, and nobody has read since they came or were found."""
        home = self._tree.by_name[tier]
        return [
            name
            for name, frame in self._needed(chain, tokens, private, 0)
            if frame is not None and frame.stored[home.index] >= 0 and not frame.verified >> home.index & 1
        ]

    def missing(self, chain: Chain, tokens: int, tier: str) -> list[FrameName]:
        """The shared frames that must still come into `tier` for a restore to `tokens`: rows from the root down."""
        home = self._tree.by_name[tier]
        first = 0 if home.holes else self._held_depth(chain, tokens // chain.block_tokens, home)
        return [
            name
            for name, frame in self._needed(chain, tokens, 0, first)
            if frame is None or frame.stored[home.index] < 0
        ]

    def candidates(
        self, chain: Chain, take_at: Iterable[int], tier: str, frame_bytes: Callable[[str, int], int]
    ) -> list[Candidate]:
        """The checkpoints at `take_at` that a tier lacks, with what each would add, for the policy to choose from.

        `frame_bytes(group, tokens)` says how large one rank's frame will be. A length with no place for one more
        checkpoint, since all others inside its block are pinned, is left out.
        """
        layout, home = self._tree.layouts[chain.namespace], self._tree.by_name[tier]
        found: list[Candidate] = []
        rows_before: int = 0
        windows_before: set[tuple[int, int]] = set()
        sizes = tuple(frame_bytes(name, layout.block_tokens) * layout.shards for name, _ in layout.groups)
        row_bytes = sum(size for size, (_, window) in zip(sizes, layout.groups, strict=True) if not window)
        for tokens in sorted(set(take_at)):
            depth, tail = divmod(tokens, layout.block_tokens)
            owned = layout.carries or tail > 0
            prefix = chain.prefix_hash(tokens)
            checkpoint = self._tree.checkpoints.get(prefix)
            ranks = self._ranks(checkpoint, home) if checkpoint else 0
            own_bytes = frame_bytes(CHECKPOINT, tokens) * (layout.shards - ranks) if owned else 0
            rows, windows = self._missing_blocks(chain, tokens, home)
            if not (rows or windows or (owned and ranks < layout.shards)):
                continue
            crowded = self._crowds_out(chain, depth, tail) if checkpoint is None else None
            if crowded is _NO_PLACE:
                continue
            added = sum(sizes[group] for group, block in windows - windows_before)
            marginal = own_bytes + (len(rows) - rows_before) * row_bytes + added
            anchor = self._deepest(chain, depth).prefix
            found.append(
                Candidate(prefix, tokens, own_bytes, marginal, rows, row_bytes, windows, sizes, anchor, crowded)
            )
            rows_before = len(rows)
            windows_before |= windows
        return found

    def anchor(self, chain: Chain, tokens: int) -> PrefixId:
        """The deepest known block end at or before `tokens`."""
        return self._deepest(chain, tokens // chain.block_tokens).prefix

    def ends(self, chain: Chain, tokens: int, prefix: PrefixId) -> list[PrefixId]:
        """The checkpoint at `tokens`; where block ends own no frames, with those before it, the longer ones first."""
        if self._tree.layouts[chain.namespace].carries:
            return [prefix]
        blocks = map(chain.block_hash, range(tokens // chain.block_tokens, 0, -1))
        return list(dict.fromkeys([prefix, *blocks]))

    def chain_to(self, prefix: PrefixId) -> KnownChain | None:
        """The path to a shared checkpoint, from the names of its frames; None if part of it is not known."""
        checkpoint = self._tree.checkpoints.get(prefix)
        node = checkpoint.node if checkpoint else self._tree.nodes.get(prefix)
        if node is None or (checkpoint and checkpoint.private):
            return None
        layout, tokens = node.layout, checkpoint.tokens if checkpoint else node.depth * node.layout.block_tokens
        hashes = [node.prefix]
        while node.depth:
            if node.parent is None:
                return None
            node = node.parent
            hashes.append(node.prefix)
        return KnownChain(layout.namespace, layout.block_tokens, tuple(reversed(hashes)), tokens, prefix)

    def explain(self, chain: Chain, tokens: int) -> Explanation:
        """Why a match of the first `tokens` tokens is as long as it is, block by block, in a few lines."""
        match = self.longest(chain, tokens)
        if match.reason is MissReason.NAMESPACE:
            return Explanation(match, (), ())
        stretches: list[Stretch] = []
        checkpoints: list[Stretch] = []
        for depth in range(1, min(tokens // chain.block_tokens, chain.blocks) + 1):
            what = self._what(chain.block_hash(depth))
            if stretches and stretches[-1].what == what:
                stretches[-1] = Stretch(stretches[-1].start, depth, what)
            else:
                stretches.append(Stretch(depth - 1, depth, what))
        for depth in range(chain.blocks + 1):
            node = self._tree.nodes.get(chain.block_hash(depth))
            for checkpoint in (node.checkpoints or ()) if node else ():
                if self._follows(checkpoint, chain, tokens):
                    held = ", ".join(tier.name for tier in self._tree.tiers if checkpoint.holds(tier.index))
                    ranks = f"{len(checkpoint.frames)} of {node.layout.shards} ranks in {held}" if node else ""
                    checkpoints.append(Stretch(depth, checkpoint.tokens, ranks))
        return Explanation(match, tuple(stretches), tuple(checkpoints))

    def pin(self, prefix: PrefixId, deadline_s: float) -> int:
        """Keep policies from dropping a checkpoint until `unpin`, or until the clock passes the deadline."""
        pin = next(self._pin_ids)
        self._pins[pin] = (prefix, deadline_s)
        self._pin_counts[prefix] = self._pin_counts.get(prefix, 0) + 1
        heapq.heappush(self._pin_deadlines, (deadline_s, pin))
        return pin

    def unpin(self, pin: int) -> None:
        """End a pin; one that has ended already is left alone."""
        prefix, _ = self._pins.pop(pin, (None, 0.0))
        if prefix is not None:
            self._pin_counts[prefix] -= 1
            if not self._pin_counts[prefix]:
                del self._pin_counts[prefix]

    def pinned(self, now_s: float) -> Collection[PrefixId]:
        """The checkpoints that are pinned now."""
        while self._pin_deadlines and self._pin_deadlines[0][0] < now_s:
            self.unpin(heapq.heappop(self._pin_deadlines)[1])
        return self._pin_counts.keys()

    def _remember(self, prefix: PrefixId, reason: RemovalReason) -> None:
        self._removals.pop(prefix, None)
        self._removals[prefix] = reason
        if len(self._removals) > REMOVALS_MAX:
            del self._removals[next(iter(self._removals))]

    @staticmethod
    def _ranks(checkpoint: Checkpoint, home: Holdings) -> int:
        return sum(frame.stored[home.index] >= 0 for frame in checkpoint.frames.values())

    def _located(self, name: FrameName, frame: Copies | None) -> Located:
        if frame is None:
            return Located(name, (), (), ())
        held = [tier for tier in self._tree.tiers if frame.stored[tier.index] >= 0]
        return Located(
            name,
            tuple((tier.name, frame.stored[tier.index]) for tier in held),
            tuple(frame.lineages[tier.index] for tier in held),
            tuple(tier.name for tier in held if frame.verified >> tier.index & 1),
        )

    def _deepest(self, chain: Chain, blocks: int) -> Node:
        """The deepest known block end among the first `blocks` of a chain."""
        nodes, layout = self._tree.nodes, self._tree.layouts[chain.namespace]
        if not layout.row_slots:
            return next(node for depth in range(blocks, -1, -1) if (node := nodes.get(chain.block_hash(depth))))
        node = nodes[layout.root]
        if self._tree.incomplete[layout.namespace]:
            for depth in range(1, blocks + 1):
                child = nodes.get(chain.block_hash(depth))
                if child is None or child.parent is not node:
                    break
                node = child
            return node
        low, high = 0, blocks  # every known block end has all its ancestors
        while low < high:
            middle = (low + high + 1) // 2
            if chain.block_hash(middle) in nodes:
                low = middle
            else:
                high = middle - 1
        return nodes[chain.block_hash(low)]

    def _deepest_complete(self, chain: Chain, known: Node) -> Node:
        """The deepest block end up to `known` whose rows, and those of all before it, are in some tier."""
        if not self._tree.incomplete[known.layout.namespace] or not known.layout.row_slots:
            return known
        node = self._tree.nodes[known.layout.root]
        for depth in range(1, known.depth + 1):
            child = self._tree.nodes[chain.block_hash(depth)]
            if self._tree.lacks_rows(child):
                break
            node = child
        return node

    def _up(self, node: Node, chain: Chain) -> Node | None:
        """The next known block end of the chain above a node."""
        if node.parent is not None or not node.depth:
            return node.parent
        above = (self._tree.nodes.get(chain.block_hash(depth)) for depth in range(node.depth - 1, -1, -1))
        return next(found for found in above if found is not None)

    @staticmethod
    def _follows(checkpoint: Checkpoint, chain: Chain, tokens_max: int) -> bool:
        """Whether the chain's first `checkpoint.tokens` tokens are the checkpoint's, its node being on the chain."""
        tokens = checkpoint.tokens
        if checkpoint.private or tokens > tokens_max or tokens > len(chain):
            return False
        return tokens % chain.block_tokens == 0 or chain.prefix_hash(tokens) == checkpoint.key

    def _restorable(
        self, node: Node, chain: Chain, tokens_max: int
    ) -> Iterator[tuple[int, PrefixId, MissReason | None]]:
        """(tokens, prefix, what is missing) of the checkpoints under a node that the chain follows, deepest first."""
        layout = node.layout
        for checkpoint in sorted(node.checkpoints or (), key=lambda c: -c.tokens):
            if self._follows(checkpoint, chain, tokens_max):
                why = None if self._windows_there(node, checkpoint.tokens) else MissReason.WINDOW_GONE
                if len(checkpoint.frames) < layout.shards:
                    why = MissReason.SHARD_MISSING
                yield checkpoint.tokens, checkpoint.key, why
        tokens = node.depth * layout.block_tokens
        if not layout.carries and 0 < tokens <= tokens_max:
            yield tokens, node.prefix, None if self._windows_there(node, tokens) else MissReason.WINDOW_GONE

    def _windows_there(self, node: Node, tokens: int) -> bool:
        layout = node.layout
        for group, window in layout.windows:
            first, at = layout.first_block(window, tokens), node
            while at.depth > first:
                if any(f is None for f in at.frames[group * layout.shards : (group + 1) * layout.shards]):
                    return False
                if at.parent is None:
                    return at.depth - 1 == first
                at = at.parent
        return True

    def _reason(self, chain: Chain, tokens: int, top: int, tokens_max: int, found: MissReason) -> MissReason:
        """Why a match ends at `tokens` although rows reach to block `top` and `tokens_max` was asked for."""
        start = tokens // chain.block_tokens + 1
        if start <= min(top, tokens_max // chain.block_tokens):
            removed = (self._removals.get(chain.block_hash(depth)) for depth in range(top, start - 1, -1))
            reason = next((r for r in removed if r is not None), None)
            if reason is None and top < chain.blocks:  # or why no rows reach to a checkpoint further on
                reason = self._removals.get(chain.block_hash(top + 1))
            return found if reason is None or found is not MissReason.NO_CHECKPOINT else _miss(reason)
        if top >= chain.blocks:
            return MissReason.NOT_STORED
        node, reason = self._tree.nodes.get(chain.block_hash(top + 1)), self._removals.get(chain.block_hash(top + 1))
        if reason is not None:
            return _miss(reason)
        partial = node is not None and any(frame is not None for frame in node.frames)
        return MissReason.SHARD_MISSING if partial else MissReason.NOT_STORED

    def _what(self, prefix: PrefixId) -> str:
        """One block's situation, in words."""
        node, reason = self._tree.nodes.get(prefix), self._removals.get(prefix)
        if node is None:
            return f"not there: {reason}" if reason else "not known"
        groups = []
        for group, (name, _) in enumerate(node.layout.groups):
            held = [tier.name for tier in self._tree.tiers if self._tree.block_in(node, group, tier)]
            groups.append(f"{name} in {', '.join(held) or 'no tier'}")
        return "; ".join(groups) + (f" ({reason})" if reason and self._tree.lacks_rows(node) else "")

    def _needed(self, chain: Chain, tokens: int, private: int, first: int) -> Iterator[tuple[FrameName, Copies | None]]:
        """Every frame that a restore to `tokens` needs, without the rows of the first `first` blocks."""
        layout = self._tree.layouts[chain.namespace]
        suspended = self._tree.checkpoints.get((layout.namespace, private)) if private else None
        own = suspended.frames if suspended else {}
        for group, (name, window) in enumerate(layout.groups):
            start = layout.first_block(window, tokens) if window else first
            for depth in range(start + 1, tokens // layout.block_tokens + 1):
                prefix, parent = chain.block_hash(depth), chain.block_hash(depth - 1)
                node = self._tree.nodes.get(prefix)
                for rank in range(layout.shards):
                    shared = FrameName(layout.namespace, prefix, parent, name, depth * layout.block_tokens, rank)
                    frame = node.frames[group * layout.shards + rank] if node else None
                    mine = shared._replace(private=private) if private else shared
                    yield (mine, own[mine]) if mine in own else (shared, frame)
        if layout.carries or tokens % layout.block_tokens:
            prefix, parent = chain.prefix_hash(tokens), chain.block_hash((tokens - 1) // layout.block_tokens)
            for rank in range(layout.shards):
                shared = FrameName(layout.namespace, prefix, parent, CHECKPOINT, tokens, rank)
                mine = shared._replace(private=private) if private else shared
                yield (mine, own[mine]) if mine in own else (shared, self._tree.find(shared))

    def _held_depth(self, chain: Chain, blocks: int, home: Holdings) -> int:
        """How many of the first `blocks` blocks a tier without holes holds for its checkpoints."""
        node: Node | None = self._deepest(chain, blocks)
        while node is not None and node.depth and not node.supports[home.index]:
            node = node.parent
        return node.depth if node else 0

    def _missing_blocks(
        self, chain: Chain, tokens: int, home: Holdings
    ) -> tuple[Sequence[int], frozenset[tuple[int, int]]]:
        """Depths of the row blocks, and (group, depth) of the window blocks, that a tier lacks for `tokens`."""
        layout, depth = self._tree.layouts[chain.namespace], tokens // chain.block_tokens
        rows: Sequence[int] = ()
        if layout.row_slots:
            held = 0 if home.holes else self._held_depth(chain, depth, home)
            known = self._deepest(chain, depth).depth
            rows = range(held + 1, depth + 1)
            if known > held:  # blocks of another tier, or that support nothing in this one
                there = ((d, self._tree.nodes.get(chain.block_hash(d))) for d in range(held + 1, known + 1))
                rows = [d for d, node in there if not self._tree.rows_in(node, home)] + [*range(known + 1, depth + 1)]
        windows = frozenset(
            (group, d)
            for group, window in layout.windows
            for d in range(layout.first_block(window, tokens) + 1, depth + 1)
            if not self._tree.block_in(self._tree.nodes.get(chain.block_hash(d)), group, home)
        )
        return rows, windows

    def _crowds_out(self, chain: Chain, depth: int, tail: int) -> PrefixId | None:
        """Which checkpoint inside a block must go before another one comes; `_NO_PLACE` if all are pinned."""
        node = self._tree.nodes.get(chain.block_hash(depth)) if tail else None
        inside = [c for c in (node.checkpoints or ()) if c.tokens % chain.block_tokens] if node else []
        if len(inside) < TAILS_MAX:
            return None
        return next((c.key for c in inside if c.key not in self._pin_counts), _NO_PLACE)


def _miss(reason: RemovalReason) -> MissReason:
    return _MISS_AFTER[reason]
