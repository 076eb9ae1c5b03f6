"""The tree of prefixes: which frames are held where, what supports what, and what dropping something would free.

Every block end of every known prefix is a node; its parent is the block end before it. A node knows its block's
frames, one a group and rank, and which tiers hold each. A *checkpoint* is a length to which a sequence can be
restored, and the unit in which policies speak: if the geometry has carries, or the length lies inside a block, it owns
frames; else every block end is one that owns none. A checkpoint is named by the prefix hash at its length, or by
`(namespace, lineage)` if it is a suspended sequence's own.

Each tier is closed in itself: dropping a checkpoint from a tier drops, with its own frames, every block frame of that
tier which supports no other checkpoint there, deepest first. Policies see one tier through `TierView`, and find out
with a `Trial` what room there would be.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tiered_cache.errors import IdentityError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import CHECKPOINT, TICKET

PrefixId = Hashable
"""A prefix hash of 32 bytes in a cache; a trace's own block id in a simulation."""

NOT_HELD = -1


class RemovalReason(enum.StrEnum):
    """Why a frame left a tier; a closed list, each one a counter."""

    EVICTED = "evicted"  # the policy chose it
    EXPIRED = "expired"  # its time to live was over
    DISCARDED = "discarded"  # the caller will not need it again
    CROWDED = "crowded"  # too many checkpoints inside one block
    ABANDONED = "abandoned"  # its spill did not get to the end
    MOVED = "moved"  # another tier has it now
    QUARANTINED = "quarantined"  # it failed its checks
    LOST = "lost"  # the tier does not have it any more


class Name(Protocol):
    """What the index reads of a frame's name; `identity.FrameKey` and `FrameName` are such."""

    @property
    def namespace(self) -> Hashable: ...
    @property
    def prefix(self) -> Hashable: ...
    @property
    def parent(self) -> Hashable: ...
    @property
    def group(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def private(self) -> int: ...


class FrameName(NamedTuple):
    """A frame's name, with the fields of `identity.FrameKey` in its order: `FrameKey(*name)`."""

    namespace: Hashable
    prefix: Hashable
    parent: Hashable
    group: str
    tokens: int
    rank: int = 0
    private: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """What the index must know of one namespace's geometry."""

    namespace: Hashable
    root: PrefixId
    """The prefix id of the empty prefix, h(0)."""
    block_tokens: int
    groups: tuple[tuple[str, int], ...] = (("rows", 0),)
    """Name and window, in tokens, of each group that has a frame a block; a window of 0 means all blocks."""
    carries: bool = True
    """Whether a restore to a block end needs a checkpoint frame."""
    shards: int = 1
    first_slots: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Group -> the place of its rank 0 among a node's frames; the other ranks follow."""
    row_slots: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The places of the frames that every restore behind a node needs."""
    windows: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)
    """Index in `groups`, and window in tokens, of each window group."""

    def __post_init__(self) -> None:
        first_slots = {name: group * self.shards for group, (name, _) in enumerate(self.groups)}
        rows = [first_slots[name] for name, window in self.groups if not window]
        object.__setattr__(self, "first_slots", first_slots)
        object.__setattr__(self, "row_slots", tuple(first + rank for first in rows for rank in range(self.shards)))
        object.__setattr__(self, "windows", tuple((g, w) for g, (_, w) in enumerate(self.groups) if w))

    @staticmethod
    def of(namespace: bytes, root: bytes, geometry: Geometry) -> Layout:
        return Layout(
            namespace,
            root,
            geometry.block_tokens,
            tuple((group.name, group.window_tokens) for group in geometry.block_groups),
            bool(geometry.carries),
            geometry.shards,
        )

    def first_block(self, window_tokens: int, tokens: int) -> int:
        """Index of the first block that a restore to `tokens` tokens needs from a group with this window."""
        return max(0, tokens - window_tokens) // self.block_tokens if window_tokens else 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that a request could add to one tier. Candidates of one request lie on one path, in order."""

    prefix: PrefixId
    tokens: int
    own_bytes: int
    """Of the frames that it alone needs, all ranks."""
    marginal_bytes: int
    """What it adds if every earlier candidate of the request is added too."""
    rows: Sequence[int]
    """The depths of the row blocks below it that the tier does not hold."""
    row_block_bytes: int
    windows: frozenset[tuple[int, int]]
    """(group, depth) of the window blocks that it needs and the tier does not hold."""
    window_block_bytes: tuple[int, ...]
    """Bytes of one window block, by group, all ranks."""
    anchor: PrefixId
    """The deepest known block end at or before it."""
    crowds_out: PrefixId | None = None
    """The checkpoint inside the same block that must go to make place for this one."""


class SoleSupport(NamedTuple):
    """What a tier would free by dropping one checkpoint: frames, its own among them, and their stored bytes."""

    frames: int
    bytes: int


class Copies:
    """One frame's copies."""

    __slots__ = ("lineages", "stored", "verified")

    def __init__(self, tiers: int) -> None:
        self.stored: tuple[int, ...] = (NOT_HELD,) * tiers
        self.lineages: tuple[int, ...] = (0,) * tiers
        self.verified = 0

    @property
    def held(self) -> bool:
        return max(self.stored) >= 0

    def put(self, tier: int, stored_bytes: int, lineage: int) -> None:
        stored, lineages = self.stored, self.lineages
        if len(stored) > 1:
            self.stored = (*stored[:tier], stored_bytes, *stored[tier + 1 :])
            self.lineages = (*lineages[:tier], lineage, *lineages[tier + 1 :])
        else:
            self.stored, self.lineages = (stored_bytes,), (lineage,)
        self.verified &= ~(1 << tier)


class Node:
    """A block end. `supports[t]` counts the children that lead to checkpoints in tier t, and the checkpoints here."""

    __slots__ = ("checkpoints", "children", "depth", "frames", "layout", "parent", "prefix", "supports", "users")

    def __init__(self, layout: Layout, prefix: PrefixId, depth: int, tiers: int) -> None:
        self.layout = layout
        self.prefix = prefix
        self.depth = depth
        self.parent: Node | None = None
        self.children = 0
        self.frames: list[Copies | None] = [None] * (len(layout.groups) * layout.shards if depth else 0)
        self.supports = [0] * tiers
        self.checkpoints: list[Checkpoint] | None = None
        self.users: dict[tuple[int, int], int] | None = None
        """(tier, group) -> how many checkpoints of that tier need this block of that window group."""

    def holds(self, tier: int) -> bool:
        for frame in self.frames:  # noqa: SIM110 - for each block of each request: no generator
            if frame is not None and frame.stored[tier] >= 0:
                return True
        return False


class Checkpoint:
    """A checkpoint that owns frames: one a rank, or, if private, every frame of its lineage."""

    __slots__ = ("frames", "key", "node", "private", "tokens")

    def __init__(self, key: PrefixId, node: Node, tokens: int, private: int) -> None:
        self.key = key
        self.node = node
        self.tokens = tokens
        self.private = private
        self.frames: dict[FrameName, Copies] = {}

    def holds(self, tier: int) -> bool:
        return any(frame.stored[tier] >= 0 for frame in self.frames.values())


class Holdings:
    """One tier's sums, and the checkpoints that would free something if they were dropped."""

    __slots__ = ("bytes", "droppable", "frames", "holes", "index", "name", "positions")

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.bytes = 0
        self.frames = 0
        self.holes = 0
        """Nodes that support a checkpoint of this tier and whose rows are not all in it."""
        self.droppable: list[PrefixId] = []
        self.positions: dict[PrefixId, int] = {}

    def set_droppable(self, key: PrefixId, wanted: bool) -> None:
        position = self.positions.get(key)
        if wanted and position is None:
            self.positions[key] = len(self.droppable)
            self.droppable.append(key)
        elif not wanted and position is not None:
            del self.positions[key]
            last = self.droppable.pop()
            if last != key:
                self.droppable[position] = last
                self.positions[last] = position


class PrefixTree:
    """All namespaces' trees, over all tiers; `PrefixIndex` is its public face."""

    def __init__(self, tiers: Sequence[str]) -> None:
        """`tiers`: their names, the fastest first."""
        self.tiers = tuple(Holdings(name, index) for index, name in enumerate(tiers))
        self.by_name = {tier.name: tier for tier in self.tiers}
        self.layouts: dict[Hashable, Layout] = {}
        self.nodes: dict[PrefixId, Node] = {}
        self.checkpoints: dict[PrefixId, Checkpoint] = {}
        self.incomplete: dict[Hashable, int] = {}
        """Namespace -> how many of its nodes lack rows in every tier; 0 nearly always, and then look-ups bisect."""
        self._unlinked: dict[Node, dict[tuple[Checkpoint, int], None]] = {}
        """Node without a known parent -> (checkpoint, tier) pairs whose windows reach above it."""

    def register(self, layout: Layout) -> None:
        """Make a namespace known. Again with the same layout is allowed, with another it raises `IdentityError`."""
        known = self.layouts.setdefault(layout.namespace, layout)
        if known != layout:
            raise IdentityError(f"the namespace has layout {known}, not {layout}")
        if layout.root not in self.nodes:
            self.nodes[layout.root] = Node(layout, layout.root, 0, len(self.tiers))
            self.incomplete[layout.namespace] = 0

    def insert(self, name: Name, home: Holdings, stored_bytes: int, lineage: int) -> None:
        """A tier holds a frame. Raises `IdentityError`, and changes nothing, if the name contradicts another."""
        layout = self.layout_of(name)
        self._check(name, layout)
        if name.group == CHECKPOINT or name.private:
            self._insert_checkpoint(name, layout, home, stored_bytes, lineage)
            return
        node = self.node(layout, name.prefix, name.tokens // layout.block_tokens, name.parent)
        held = node.holds(home.index)
        self._set_block(node, layout.first_slots[name.group] + name.rank, home, stored_bytes, lineage)
        if not layout.carries and not held:
            self.support(node, home)

    def layout_of(self, name: Name) -> Layout:
        try:
            return self.layouts[name.namespace]
        except KeyError:
            raise IdentityError("the frame's namespace is not registered") from None

    @staticmethod
    def _check(name: Name, layout: Layout) -> None:
        """Raise `IdentityError` if no frame of this layout can have this name."""
        problem = ""
        if not 0 <= name.rank < layout.shards:
            problem = f"rank {name.rank} is outside 0 .. {layout.shards - 1}"
        elif name.group == TICKET:
            if name.tokens <= 0 or not name.private:
                problem = f"no ticket can be at {name.tokens} tokens of computation {name.private}"
        elif name.group != CHECKPOINT:
            if name.group not in layout.first_slots:
                problem = f"there is no group {name.group!r}"
            elif name.tokens <= 0 or name.tokens % layout.block_tokens:
                problem = f"a block frame ends at {name.tokens}, not a multiple of {layout.block_tokens}"
        elif name.tokens <= 0 or not (layout.carries or name.tokens % layout.block_tokens):
            problem = f"no checkpoint frame can be at {name.tokens} tokens"
        if problem:
            raise IdentityError(problem)

    def node(self, layout: Layout, prefix: PrefixId, depth: int, parent_id: PrefixId) -> Node:
        """The node of a block end, made and linked if it is new. Raises `IdentityError` before anything changes."""
        node = self.nodes.get(prefix)
        if node is not None and node.parent is not None and node.parent.prefix == parent_id and node.depth == depth:
            return node
        parent = self.nodes.get(parent_id)
        if node is not None and (node.depth != depth or node.parent is not None or node.layout is not layout):
            raise IdentityError(f"a prefix of {node.depth} blocks has another depth or parent in this name")
        if parent is not None and (parent.depth != depth - 1 or parent.layout is not layout):
            raise IdentityError(f"the parent has {parent.depth} blocks, not {depth - 1}")
        if parent is None and depth == 1:
            raise IdentityError("the first block's parent is not the namespace's root")
        parent = parent or self._new_node(layout, parent_id, depth - 1)
        node = node or self._new_node(layout, prefix, depth)
        node.parent = parent
        parent.children += 1
        for tier in self.tiers:
            if node.supports[tier.index]:
                self.support(parent, tier)
        for checkpoint, index in self._unlinked.pop(node, ()):
            self._use_windows(checkpoint, self.tiers[index], 1, parent)
        return node

    def _new_node(self, layout: Layout, prefix: PrefixId, depth: int) -> Node:
        node = self.nodes[prefix] = Node(layout, prefix, depth, len(self.tiers))
        if self.lacks_rows(node):
            self.incomplete[layout.namespace] += 1
        return node

    def prune(self, node: Node | None) -> None:
        """Forget a node, and then its ancestors, that hold and support nothing."""
        while node is not None and node.depth and not node.children and not node.checkpoints:
            if any(node.supports) or node.frames.count(None) < len(node.frames):
                return
            del self.nodes[node.prefix]
            if self.lacks_rows(node):
                self.incomplete[node.layout.namespace] -= 1
            self._unlinked.pop(node, None)
            parent, node.parent = node.parent, None
            if parent is not None:
                parent.children -= 1
            node = parent

    def _count(self, home: Holdings, frame: Copies, stored_bytes: int, lineage: int = 0) -> None:
        """Set one copy's bytes, or `NOT_HELD`, and the tier's sums with it."""
        before = frame.stored[home.index]
        frame.put(home.index, stored_bytes, lineage)
        if stored_bytes >= 0:
            home.bytes += stored_bytes
            home.frames += 1
        if before >= 0:
            home.bytes -= before
            home.frames -= 1

    def _set_block(self, node: Node, slot: int, home: Holdings, stored_bytes: int, lineage: int = 0) -> None:
        """Set one copy of a block frame, and all that follows from it but the supports."""
        copies, layout = node.frames[slot], node.layout
        lacked, hole = self.lacks_rows(node), self._is_hole(node, home)
        if copies is None:
            copies = node.frames[slot] = Copies(len(self.tiers))
        self._count(home, copies, stored_bytes, lineage)
        if not copies.held:
            node.frames[slot] = None
        self.incomplete[layout.namespace] += self.lacks_rows(node) - lacked
        home.holes += self._is_hole(node, home) - hole

    @staticmethod
    def lacks_rows(node: Node) -> bool:
        """Whether some rank's rows of this block are in no tier."""
        if node.depth:
            for slot in node.layout.row_slots:
                if node.frames[slot] is None:
                    return True
        return False

    @staticmethod
    def block_in(node: Node | None, group: int, home: Holdings) -> bool:
        """Whether a tier holds one group's block, all ranks."""
        if node is None:
            return False
        shards = node.layout.shards
        frames = node.frames[group * shards : (group + 1) * shards]
        return all(frame is not None and frame.stored[home.index] >= 0 for frame in frames)

    @staticmethod
    def rows_in(node: Node | None, home: Holdings) -> bool:
        """Whether a tier holds the rows of this block, all ranks."""
        if node is None:
            return False
        if node.depth:
            for slot in node.layout.row_slots:
                copies = node.frames[slot]
                if copies is None or copies.stored[home.index] < 0:
                    return False
        return True

    def _is_hole(self, node: Node, home: Holdings) -> bool:
        return node.supports[home.index] > 0 and not self.rows_in(node, home)

    def support(self, node: Node | None, home: Holdings) -> None:
        """One more checkpoint, or child that leads to some, at a node."""
        tier = home.index
        while node is not None:
            node.supports[tier] += 1
            self._set_leaf(node, home)
            if node.supports[tier] > 1:
                return
            home.holes += self._is_hole(node, home)
            node = node.parent

    def unsupport(self, node: Node | None, home: Holdings) -> None:
        tier = home.index
        while node is not None:
            hole = self._is_hole(node, home)
            node.supports[tier] -= 1
            self._set_leaf(node, home)
            if node.supports[tier]:
                return
            home.holes -= hole
            node = node.parent

    def hold(self, checkpoint: Checkpoint, home: Holdings, change: int) -> None:
        """Count a checkpoint in (1) or out (-1) at all that it needs in a tier."""
        if change > 0:
            self.support(checkpoint.node, home)
        else:
            self.unsupport(checkpoint.node, home)
        self._use_windows(checkpoint, home, change, checkpoint.node)

    def idle_names(self, node: Node, home: Holdings) -> list[FrameName]:
        """The block frames at a node that a tier holds for no checkpoint."""
        names = self.held_names(node, home)
        if not node.supports[home.index] or not node.layout.carries:
            return [] if node.supports[home.index] else names
        used = {group for (tier, group), count in (node.users or {}).items() if tier == home.index and count}
        idle = {node.layout.groups[group][0] for group, _ in node.layout.windows if group not in used}
        return [name for name in names if name.group in idle]

    @staticmethod
    def _set_leaf(node: Node, home: Holdings) -> None:
        """Where block ends own no frames, those that nothing lies behind are the ones to drop."""
        if not node.layout.carries and node.depth:
            home.set_droppable(node.prefix, wanted=node.supports[home.index] == 1 and node.holds(home.index))

    def _use_windows(self, checkpoint: Checkpoint, home: Holdings, change: int, start: Node) -> None:
        """Count a checkpoint in or out at the window blocks that it needs, from `start` upwards."""
        for group, window in checkpoint.node.layout.windows:
            first = checkpoint.node.layout.first_block(window, checkpoint.tokens)
            node: Node | None = start
            while node is not None and node.depth > first:
                node.users = node.users or {}
                node.users[home.index, group] = node.users.get((home.index, group), 0) + change
                if node.parent is None and node.depth - 1 > first:
                    waiting = self._unlinked.setdefault(node, {})
                    if change > 0:
                        waiting[checkpoint, home.index] = None
                    else:
                        waiting.pop((checkpoint, home.index), None)
                node = node.parent

    def find(self, name: Name) -> Copies | None:
        if name.group == CHECKPOINT or name.private:
            checkpoint = self.checkpoints.get(key_of(name))
            return checkpoint.frames.get(plain_name(name)) if checkpoint else None
        node = self.nodes.get(name.prefix)
        if node is None or node.parent is None or node.parent.prefix != name.parent:
            return None
        layout = node.layout
        slot = layout.first_slots.get(name.group)
        if slot is None or not 0 <= name.rank < layout.shards or name.tokens != node.depth * layout.block_tokens:
            return None
        return node.frames[slot + name.rank]

    def _insert_checkpoint(self, name: Name, layout: Layout, home: Holdings, stored_bytes: int, lineage: int) -> None:
        depth, tail = divmod(name.tokens, layout.block_tokens)
        if name.group in {CHECKPOINT, TICKET} and tail:
            node = self._placeholder(layout, name.parent, depth)
        else:  # of a private block, too, so that its path is known
            node = self.node(layout, name.prefix, depth, name.parent)
        key = key_of(name)
        checkpoint = self.checkpoints.get(key)
        if checkpoint is None:
            checkpoint = self.checkpoints[key] = Checkpoint(key, node, name.tokens, name.private)
            node.checkpoints = [*(node.checkpoints or ()), checkpoint]
        elif not name.private and (checkpoint.node is not node or checkpoint.tokens != name.tokens):
            raise IdentityError(f"a checkpoint at {checkpoint.tokens} tokens has another place in this name")
        elif name.private and name.tokens > checkpoint.tokens:
            self._move(checkpoint, node, name.tokens)
        held = checkpoint.holds(home.index)
        frame = checkpoint.frames.get(plain_name(name))
        if frame is None:
            frame = checkpoint.frames[plain_name(name)] = Copies(len(self.tiers))
        self._count(home, frame, stored_bytes, lineage)
        if not held:
            self.hold(checkpoint, home, 1)
            home.set_droppable(key, wanted=True)

    def _placeholder(self, layout: Layout, prefix: PrefixId, depth: int) -> Node:
        """The node of a block end that a name speaks of as its parent."""
        node = self.nodes.get(prefix)
        if node is None and not depth:
            raise IdentityError("the first block's parent is not the namespace's root")
        if node is None:
            return self._new_node(layout, prefix, depth)
        if node.depth != depth or node.layout is not layout:
            raise IdentityError(f"the parent has {node.depth} blocks, not {depth}")
        return node

    def _move(self, checkpoint: Checkpoint, node: Node, tokens: int) -> None:
        """A private checkpoint turns out to be deeper."""
        held = [tier for tier in self.tiers if checkpoint.holds(tier.index)]
        before = checkpoint.node
        for home in held:
            self.hold(checkpoint, home, -1)
        assert before.checkpoints is not None
        before.checkpoints.remove(checkpoint)
        node.checkpoints = [*(node.checkpoints or ()), checkpoint]
        checkpoint.node, checkpoint.tokens = node, tokens
        for home in held:
            self.hold(checkpoint, home, 1)
        self.prune(before)

    def remove(self, name: FrameName, frame: Copies, home: Holdings) -> None:
        """Take one copy away, and forget what holds and supports nothing any more."""
        if name.group == CHECKPOINT or name.private:
            checkpoint = self.checkpoints[key_of(name)]
            self._count(home, frame, NOT_HELD)
            if not frame.held:
                del checkpoint.frames[name]
            if not checkpoint.holds(home.index):
                home.set_droppable(checkpoint.key, wanted=False)
                self.hold(checkpoint, home, -1)
            if not checkpoint.frames:
                del self.checkpoints[checkpoint.key]
                assert checkpoint.node.checkpoints is not None
                checkpoint.node.checkpoints.remove(checkpoint)
                self.prune(checkpoint.node)
            return
        node = self.nodes[name.prefix]
        self.remove_block(node, node.layout.first_slots[name.group] + name.rank, home)

    def remove_block(self, node: Node, slot: int, home: Holdings) -> None:
        """Take one copy of a block frame away."""
        self._set_block(node, slot, home, NOT_HELD)
        if not node.layout.carries and not node.holds(home.index):
            self.unsupport(node, home)
        self.prune(node)

    @staticmethod
    def block_name(node: Node, slot: int) -> FrameName:
        """The name of the frame in one slot of a node: slots go by group, then rank."""
        assert node.parent is not None
        layout = node.layout
        group, rank = divmod(slot, layout.shards)
        tokens = node.depth * layout.block_tokens
        return FrameName(layout.namespace, node.prefix, node.parent.prefix, layout.groups[group][0], tokens, rank)

    def held_names(self, node: Node, home: Holdings) -> list[FrameName]:
        """The block frames at a node that a tier holds."""
        return [
            self.block_name(node, slot)
            for slot, frame in enumerate(node.frames)
            if frame is not None and frame.stored[home.index] >= 0
        ]


Place = tuple[Node, int, Copies] | tuple[Checkpoint, FrameName, Copies]
"""A frame's node and slot, or its checkpoint and name; and its copies."""


class Trial:
    """What would be free if a tier took these candidates and dropped those checkpoints; changes nothing.

    It starts with every candidate taken. `drop` takes a candidate back, or a checkpoint out, until `needed_bytes` fits.
    """

    def __init__(
        self,
        tree: PrefixTree,
        home: Holdings,
        candidates: Iterable[Candidate] = (),
        pinned: Collection[PrefixId] = frozenset(),
    ) -> None:
        self._tree = tree
        self._home = home
        self._pinned = pinned
        self._view = TierView(tree, home)
        self._supports: dict[Node, int] = {}
        self._users: dict[tuple[Node, int], int] = {}
        self._freed: set[tuple[Node, int]] = set()
        """Window frames, by block and place, that went with their last user while the block stays."""
        self._exposed: list[PrefixId] = []
        self._freed_bytes = 0
        self.candidates = {candidate.prefix: candidate for candidate in candidates}
        """Those that are still taken, by prefix, shallowest first."""
        self.dropped: list[PrefixId] = []
        """The tier's checkpoints to drop, in order."""
        self._dropped: set[PrefixId] = set()
        self._inner: set[PrefixId] = set()
        for candidate in self.candidates.values():
            self._take(candidate)

    @property
    def needed_bytes(self) -> int:
        """How many bytes more the tier would hold."""
        kept = list(self.candidates.values())
        windows: set[tuple[int, int]] = set().union(*(c.windows for c in kept))
        rows = len(kept[-1].rows) * kept[-1].row_block_bytes if kept else 0
        sizes = kept[0].window_block_bytes if kept else ()
        return sum(c.own_bytes for c in kept) + rows + sum(sizes[group] for group, _ in windows) - self._freed_bytes

    def can_drop(self, prefix: PrefixId) -> bool:
        """Whether this is a candidate, or a checkpoint of the tier, that is neither pinned nor dropped already.

        Nor may it be a block end of which `drop` has found that others lie behind it.
        """
        held = prefix in self.candidates or (prefix not in self._dropped and prefix in self._view)
        return held and prefix not in self._pinned and prefix not in self._inner

    def sole_support(self, prefix: PrefixId) -> SoleSupport:
        """What dropping a checkpoint, or taking back a candidate, would free now."""
        if prefix in self.candidates:
            return SoleSupport(0, self._candidate_bytes(self.candidates[prefix]))
        sizes = [frame.stored[self._home.index] for _, _, frame in self.sole(prefix)]
        return SoleSupport(len(sizes), sum(sizes))

    def drop(self, prefix: PrefixId) -> int:
        """Take back a candidate or drop a checkpoint; returns the bytes that this frees."""
        before = self.needed_bytes
        if prefix in self.candidates:
            self._drop_candidate(self.candidates[prefix])
            return before - self.needed_bytes
        assert prefix not in self._pinned
        places = list(self.sole(prefix))
        freed = sum(frame.stored[self._home.index] for _, _, frame in places)
        checkpoint = self._tree.checkpoints.get(prefix)
        node = checkpoint.node if checkpoint else self._tree.nodes[prefix]
        if checkpoint is None and self._support_of(node) != 1:
            self._inner.add(prefix)
            return 0
        if checkpoint is not None:
            self._use_windows(checkpoint.node, checkpoint.tokens, -1)
            if checkpoint.node.layout.windows:
                self._freed.update(
                    (at, slot) for at, slot, _ in places if isinstance(at, Node) and isinstance(slot, int)
                )
        self.dropped.append(prefix)
        self._dropped.add(prefix)
        self._loosen(node)
        self._freed_bytes += freed
        return freed

    def sample(self, count: int, rng: random.Random) -> list[PrefixId]:
        """At most `count` of the checkpoints, candidates among them, whose drop would free something."""
        pool = self._home.droppable
        many = len(pool) > count + len(self._dropped)
        pool = rng.sample(pool, count) if many else pool + self._exposed
        picked = [p for p in pool if p not in self._dropped and p not in self._pinned and p not in self._inner]
        return picked + [p for p in self.candidates if p not in self._pinned]

    def bared(self) -> PrefixId | None:
        """A block end that owns no frames and behind which this trial has dropped everything, if there is one left."""
        while self._exposed:
            prefix = self._exposed.pop()
            if self.can_drop(prefix):
                return prefix
        return None

    def _support_of(self, node: Node) -> int:
        supports = node.supports[self._home.index]
        return supports + self._supports.get(node, 0) if self._supports else supports

    def _take(self, candidate: Candidate) -> None:
        node: Node | None = self._tree.nodes[candidate.anchor]
        self._use_windows(self._tree.nodes[candidate.anchor], candidate.tokens, 1)
        while node is not None:
            before = self._support_of(node)
            self._supports[node] = self._supports.get(node, 0) + 1
            node = node.parent if not before else None

    def _loosen(self, node: Node | None) -> None:
        while node is not None:
            self._supports[node] = self._supports.get(node, 0) - 1
            left = self._support_of(node)
            if left == 1 and not node.layout.carries and node.depth and node.holds(self._home.index):
                self._exposed.append(node.prefix)
            node = node.parent if not left else None

    def _drop_candidate(self, candidate: Candidate) -> None:
        del self.candidates[candidate.prefix]
        node: Node | None = self._tree.nodes[candidate.anchor]
        self._use_windows(self._tree.nodes[candidate.anchor], candidate.tokens, -1)
        while node is not None and self._support_of(node) == 1:
            left = node.frames if node.supports[self._home.index] else ()  # a drop has left them to this one
            for slot, frame in enumerate(left):
                if frame is not None and frame.stored[self._home.index] >= 0 and (node, slot) not in self._freed:
                    self._freed_bytes += frame.stored[self._home.index]
            self._supports[node] = self._supports.get(node, 0) - 1
            node = node.parent
        if node is not None:
            self._supports[node] = self._supports.get(node, 0) - 1

    def _candidate_bytes(self, candidate: Candidate) -> int:
        kept = list(self.candidates.values())
        others = [c for c in kept if c is not candidate]
        rows = 0
        if kept[-1] is candidate:
            rows = (len(candidate.rows) - (len(others[-1].rows) if others else 0)) * candidate.row_block_bytes
        windows = candidate.windows.difference(*(c.windows for c in others))
        return candidate.own_bytes + rows + sum(candidate.window_block_bytes[group] for group, _ in windows)

    def _use_windows(self, node: Node, tokens: int, change: int) -> None:
        for at, group in self._window_blocks(node, tokens):
            self._users[at, group] = self._users.get((at, group), 0) + change

    @staticmethod
    def _window_blocks(node: Node, tokens: int) -> Iterator[tuple[Node, int]]:
        for group, window in node.layout.windows:
            first = node.layout.first_block(window, tokens)
            at: Node | None = node
            while at is not None and at.depth > first:
                yield at, group
                at = at.parent

    def sole(self, prefix: PrefixId) -> Iterator[Place]:
        """Where the frames are that the tier holds for this checkpoint alone: its own, then blocks, deepest first."""
        tree, tier = self._tree, self._home.index
        checkpoint = tree.checkpoints.get(prefix)
        if checkpoint is not None:
            yield from ((checkpoint, n, f) for n, f in checkpoint.frames.items() if f.stored[tier] >= 0)
        node: Node | None = checkpoint.node if checkpoint else tree.nodes.get(prefix)
        kept = node.depth + 1 if node else 0
        while node is not None and node.depth and self._support_of(node) == 1:
            for slot, frame in enumerate(node.frames):
                if frame is not None and frame.stored[tier] >= 0 and (node, slot) not in self._freed:
                    yield node, slot, frame
            kept, node = node.depth, node.parent
        if checkpoint is None or not checkpoint.node.layout.carries:
            return
        for at, group in self._window_blocks(checkpoint.node, checkpoint.tokens):
            users = (at.users or {}).get((tier, group), 0) + self._users.get((at, group), 0)
            if at.depth < kept and users == 1:
                shards = at.layout.shards
                for slot in range(group * shards, (group + 1) * shards):
                    block = at.frames[slot]
                    if block is not None and block.stored[tier] >= 0:
                        yield at, slot, block


class TierView:
    """What a policy sees of its tier: checkpoints, how they hang together, and what dropping one would free."""

    def __init__(self, tree: PrefixTree, home: Holdings) -> None:
        self._tree = tree
        self._home = home

    def __len__(self) -> int:
        """How many checkpoints there are whose drop would free something."""
        return len(self._home.droppable)

    def __contains__(self, prefix: object) -> bool:
        checkpoint = self._tree.checkpoints.get(prefix)
        if checkpoint is not None:
            return checkpoint.holds(self._home.index)
        node = self._tree.nodes.get(prefix)
        return node is not None and not node.layout.carries and node.holds(self._home.index)

    def __iter__(self) -> Iterator[PrefixId]:
        """Every checkpoint of the tier, the shorter ones first."""
        held = [(c.tokens, c.key) for c in self._tree.checkpoints.values() if c.holds(self._home.index)]
        held += [
            (node.depth * node.layout.block_tokens, node.prefix)
            for node in self._tree.nodes.values()
            if not node.layout.carries and node.holds(self._home.index)
        ]
        held.sort(key=lambda pair: pair[0])
        return (prefix for _, prefix in held)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all the tier's frames."""
        return self._home.bytes

    def tokens(self, prefix: PrefixId) -> int:
        """The length of a checkpoint that some tier holds."""
        checkpoint = self._tree.checkpoints.get(prefix)
        if checkpoint is not None:
            return checkpoint.tokens
        node = self._tree.nodes[prefix]
        return node.depth * node.layout.block_tokens

    def ancestor(self, prefix: PrefixId) -> PrefixId | None:
        """The deepest other checkpoint of the tier on this one's path."""
        checkpoint = self._tree.checkpoints.get(prefix)
        node: Node | None = checkpoint.node if checkpoint else self._tree.nodes[prefix].parent
        tokens = self.tokens(prefix)
        while node is not None:
            for above in node.checkpoints or ():
                at_end = not above.tokens % node.layout.block_tokens and not above.private
                if at_end and above.tokens < tokens and above.holds(self._home.index):
                    return above.key
            if not node.layout.carries and node.depth and node.holds(self._home.index):
                return node.prefix
            node = node.parent
        return None

    def sole_support(self, prefix: PrefixId) -> SoleSupport:
        """What dropping a checkpoint would free."""
        return Trial(self._tree, self._home).sole_support(prefix)

    def sample(self, count: int, rng: random.Random) -> list[PrefixId]:
        """At most `count` checkpoints whose drop would free something."""
        return Trial(self._tree, self._home).sample(count, rng)

    def trial(self, candidates: Iterable[Candidate], pinned: Collection[PrefixId]) -> Trial:
        """Try what taking these candidates needs, and what dropping others frees."""
        return Trial(self._tree, self._home, candidates, pinned)


def private_checkpoint(namespace: Hashable, lineage: int) -> PrefixId:
    """The name of the checkpoint that a suspended sequence of this lineage alone may use."""
    return namespace, lineage


def key_of(name: Name) -> PrefixId:
    """The name of the checkpoint that a frame belongs to, if it is not a shared block's."""
    return private_checkpoint(name.namespace, name.private) if name.private else name.prefix


def plain_name(name: Name) -> FrameName:
    """The same name as a plain tuple."""
    if isinstance(name, FrameName):
        return name
    return FrameName(name.namespace, name.prefix, name.parent, name.group, name.tokens, name.rank, name.private)
