"""A floor under a policy: what would LRU have hit? If more than we did, follow it for a while.

A shadow of the tier under LRU lives on the same ghost tree, metadata alone. Both hit counts fade, so that what counts
is the traffic of the last thousand requests or so. After a turn with LRU the policy gets another chance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from tiered_cache.index import Chain
from tiered_cache.policy.ghost import GhostNode, GhostTree
from tiered_cache.policy.shadow import Shadow

MEMORY = 0.998
"""How much of a hit counts one request later."""
MARGIN = 1.02
"""LRU must be better by so much."""
TRIAL_REQUESTS = 500
"""How long either of them is followed before the next decision."""


class Recency:
    """Nodes from the least to the most recently used; descendants come before their ancestors."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._order: OrderedDict[GhostNode, None] = OrderedDict()

    def use(self, node: GhostNode) -> None:
        """A node, and then those above it, are used."""
        at = node
        while at.parent is not None:
            if at in self._shadow:
                self._order[at] = None
                self._order.move_to_end(at)
            at = at.parent
        if len(self._order) > 2 * len(self._shadow) + 64:
            self._order = OrderedDict.fromkeys(held for held in self._order if held in self._shadow)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[GhostNode]:
        return iter(self._order)

    def pop(self) -> GhostNode | None:
        """The least recently used one that is still held, taken out of the order."""
        while self._order:
            node, _ = self._order.popitem(last=False)
            if node in self._shadow:
                return node
        return None

    def put_back(self, node: GhostNode) -> None:
        self._order[node] = None
        self._order.move_to_end(node, last=False)


class LruFloor:
    """Decides, a few hundred requests at a time, whether the policy or LRU is followed."""

    def __init__(self, tree: GhostTree) -> None:
        self._tree = tree
        self._shadow = Shadow(tree)
        self._recency = Recency(self._shadow)
        self._lru_hits = 0.0
        self._own_hits = 0.0
        self._until_decision = TRIAL_REQUESTS
        self.follows_lru = False

    def arrive(self, chain: Chain, own_tokens: int) -> None:
        """A request of which the tier itself restored `own_tokens` tokens."""
        node, child, common = self._tree.match(chain)
        at = node
        while at.parent is not None and at not in self._shadow:
            at = at.parent
        self._lru_hits = MEMORY * self._lru_hits + at.blocks * chain.block_tokens
        self._own_hits = MEMORY * self._own_hits + own_tokens
        self._recency.use(at)
        parts = child is not None and self._shadow.supports(child) > 0
        if parts and common > at.blocks:
            self._shadow.add(self._tree.add(chain, common), 0)
        self._until_decision -= 1
        if not self._until_decision:
            self._until_decision = TRIAL_REQUESTS
            self.follows_lru = not self.follows_lru and self._lru_hits > MARGIN * self._own_hits

    def end(self, node: GhostNode, own_bytes: int, block_bytes: int, capacity_bytes: int) -> None:
        """A request ended at a node; the shadow keeps it, and makes room."""
        self._shadow.add(node, own_bytes)
        self._recency.use(node)
        while self._shadow.row_blocks * block_bytes + self._shadow.checkpoint_bytes > capacity_bytes:
            victim = self._recency.pop()
            if victim is None:
                return
            self._shadow.drop(victim)

    def state_bytes(self) -> int:
        return 400 * len(self._shadow) + 100 * len(self._recency)
