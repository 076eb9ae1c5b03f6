"""What a tier holds, or would hold under another policy, on a ghost tree: checkpoints, what supports what, and bytes.

Rows stay exactly as long as they lie on the path to a checkpoint. All row blocks of a namespace have one size.
"""

from __future__ import annotations

import random

from tiered_cache.policy.ghost import GhostNode, GhostTree


class Shadow:
    """Occupancy of one cache, real or imagined: at most one checkpoint a node counts."""

    def __init__(self, tree: GhostTree) -> None:
        self._tree = tree
        self._supports: dict[GhostNode, int] = {}
        """Node -> how many of its children lead to checkpoints, and one for its own."""
        self.own_bytes: dict[GhostNode, int] = {}
        """The checkpoints, and the bytes that they alone need."""
        self._order: list[GhostNode] = []
        self._places: dict[GhostNode, int] = {}
        self.row_blocks = 0
        self.checkpoint_bytes = 0
        tree.on_split.append(self._split)

    def __contains__(self, node: GhostNode) -> bool:
        return node in self.own_bytes

    def __len__(self) -> int:
        return len(self._order)

    def add(self, node: GhostNode, own_bytes: int) -> None:
        if node in self.own_bytes or node.parent is None:
            return
        self.own_bytes[node] = own_bytes
        self.checkpoint_bytes += own_bytes
        self._places[node] = len(self._order)
        self._order.append(node)
        self._tree.hold(node)
        at: GhostNode | None = node
        while at is not None:
            count = self._supports.get(at, 0)
            self._supports[at] = count + 1
            if count:
                return
            self.row_blocks += len(at.keys)
            self._tree.hold(at)
            at = at.parent

    def drop(self, node: GhostNode) -> None:
        own_bytes = self.own_bytes.pop(node, None)
        if own_bytes is None:
            return
        self.checkpoint_bytes -= own_bytes
        place, last = self._places.pop(node), self._order.pop()
        if last is not node:
            self._order[place] = last
            self._places[last] = place
        freed = []
        at: GhostNode | None = node
        while at is not None:
            self._supports[at] -= 1
            if self._supports[at]:
                break
            del self._supports[at]
            self.row_blocks -= len(at.keys)
            freed.append(at)
            at = at.parent
        self._tree.release(node)
        for at in freed:
            self._tree.release(at)

    def _split(self, node: GhostNode) -> None:
        """A node was put into the edge of its only child: it supports what the child does."""
        (child,) = node.children.values()
        if child in self._supports:
            self._supports[node] = 1
            self._tree.hold(node)

    def sample(self, count: int, rng: random.Random) -> list[GhostNode]:
        return rng.sample(self._order, count) if len(self._order) > count else self._order.copy()

    def supports(self, node: GhostNode) -> int:
        """How many children of a node lead to checkpoints, and one more if it is one."""
        return self._supports.get(node, 0)

    def ancestor(self, node: GhostNode) -> GhostNode:
        """The nearest checkpoint above, or the root."""
        at = node.parent
        assert at is not None
        while at.parent is not None and at not in self.own_bytes:
            at = at.parent
        return at
