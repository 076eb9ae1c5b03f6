"""Base of the policies that think in a tree: a ghost tree of what was seen, and on it what the tier holds.

A checkpoint inside a block counts at the block end before it. What came into the tier without a request that the policy
saw (recovered, or moved down from another tier) is placed when a request passes it; until then it is dropped first.
"""

# ruff: noqa: ARG002
from __future__ import annotations

import random
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from tiered_cache.index import Candidate, Chain, Match, PrefixId, RemovalReason, TierView
from tiered_cache.policy.base import CachePolicy, Proposal
from tiered_cache.policy.ghost import GhostNode, GhostTree
from tiered_cache.policy.room import fit
from tiered_cache.policy.shadow import Shadow
from tiered_cache.prefix_tree import Trial

NEAR_MAX = 256
"""How many nodes are remembered that were nearly chosen to go."""
NEAR_SHARE = 4
"""Of a sample, one in so many is among them."""
EXPECTED_MAX = 1024
"""How many checkpoints that may come are remembered; the oldest are forgotten."""
_PLACE_BYTES = 300


class MirrorPolicy(CachePolicy):
    """Keeps the mirror; subclasses say which node goes."""

    def __init__(self, ghosts_max: int, seed: int) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - to sample, reproducibly
        self.tree = GhostTree(ghosts_max)
        self.held = Shadow(self.tree)
        self.block_bytes = 1
        self._places: dict[PrefixId, GhostNode] = {}
        """Of what the tier holds."""
        self._prefixes: dict[GhostNode, list[PrefixId]] = {}
        """What the tier holds at each node."""
        self._expected: OrderedDict[PrefixId, GhostNode] = OrderedDict()
        """Of what may come."""
        self._own_bytes: dict[PrefixId, int] = {}
        self._near: OrderedDict[GhostNode, float] = OrderedDict()
        """With the scores that they had then."""

    @abstractmethod
    def choose(self, now_s: float) -> GhostNode | None:
        """The node in `held` whose checkpoints are to go next; what is offered is in it as well."""

    def returned(self, node: GhostNode) -> None:
        """A node that was chosen is in `held` again: it was only a proposal."""

    def least(self, nodes: Sequence[GhostNode], scores: Sequence[float]) -> GhostNode:
        """The node of the least score; those that come next are remembered, as they may go next."""
        order = sorted(range(len(nodes)), key=scores.__getitem__)
        for number in order[1 : 1 + len(nodes) // NEAR_SHARE]:
            self._near[nodes[number]] = scores[number]
            self._near.move_to_end(nodes[number])
        while len(self._near) > NEAR_MAX:
            self._near.popitem(last=False)
        return nodes[order[0]]

    def foresee(self, resident: TierView) -> Iterable[PrefixId]:
        nodes = sorted((node for node in self._near if node in self.held), key=self._near.__getitem__)
        return [prefix for node in nodes for prefix in self.prefixes_at(node)]

    def prefixes_at(self, node: GhostNode) -> Sequence[PrefixId]:
        """The tier's checkpoints at a node."""
        return self._prefixes.get(node, ())

    def node_of(self, prefix: PrefixId) -> GhostNode | None:
        """Where the tier's checkpoint of this name is."""
        return self._places.get(prefix)

    def expect(self, chain: Chain, tokens: int) -> GhostNode:
        """A checkpoint at `tokens` may come; returns the node at the last block end at or before it."""
        prefix = chain.prefix_hash(tokens)
        node = self._expected.pop(prefix, None)
        if node is None:
            node = self.tree.add(chain, tokens // chain.block_tokens)
            self.tree.hold(node)
        self._expected[prefix] = node
        if len(self._expected) > EXPECTED_MAX:
            forgotten, old = self._expected.popitem(last=False)
            self._own_bytes.pop(forgotten, None)
            self.tree.release(old)
        return node

    def propose(
        self,
        new: Sequence[Candidate],
        free_bytes: int,
        pinned: Collection[PrefixId],
        now_s: float,
        resident: TierView,
    ) -> Proposal:
        offered: dict[GhostNode, list[PrefixId]] = {}
        tried: list[GhostNode] = []
        for candidate in new:
            self.block_bytes = candidate.row_block_bytes or self.block_bytes
            node = self._expected.get(candidate.prefix)
            if node is not None:
                self._own_bytes[candidate.prefix] = candidate.own_bytes
                offered.setdefault(node, []).append(candidate.prefix)
                if node not in self.held:
                    self.held.add(node, candidate.own_bytes)
                    tried.append(node)
        gone: list[tuple[GhostNode, int]] = []
        at_hand: list[PrefixId] = []

        def victim(trial: Trial) -> PrefixId | None:
            while True:
                while at_hand:
                    prefix = at_hand.pop()
                    if trial.can_drop(prefix):
                        return prefix
                node = self.choose(now_s)
                if node is None:
                    return None
                gone.append((node, self.held.own_bytes[node]))
                self.held.drop(node)
                at_hand.extend([*self._prefixes.get(node, ()), *offered.get(node, ())])

        proposal = fit(resident, new, free_bytes, pinned, victim, self.rng)
        for node, own_bytes in reversed(gone):  # what really goes and comes is told by `commit`
            self.held.add(node, own_bytes)
            self.returned(node)
        for node in tried:
            self.held.drop(node)
        return proposal

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        for prefix, _ in dropped:
            if prefix in resident or prefix not in self._places:
                continue
            node = self._places.pop(prefix)
            self._prefixes[node].remove(prefix)
            if not self._prefixes[node]:
                del self._prefixes[node]
                self.held.drop(node)
            self.tree.release(node)
        for prefix in added:
            self._place(prefix)

    def _place(self, prefix: PrefixId) -> None:
        node = self._expected.pop(prefix, None)
        if node is None:
            return
        if prefix in self._places:
            self.tree.release(node)
            return
        self._places[prefix] = node
        self._prefixes.setdefault(node, []).append(prefix)
        self.held.add(node, self._own_bytes.pop(prefix, 0))

    def found(self, chain: Chain, match: Match, resident: TierView) -> GhostNode | None:
        """The node of the checkpoint that a request was restored from, None if this tier does not hold it."""
        if match.prefix is None or match.prefix not in resident:
            return None
        if match.prefix not in self._places:
            self.expect(chain, match.tokens)
            self._own_bytes[match.prefix] = resident.sole_support(match.prefix).bytes
            self._place(match.prefix)
        self._near.pop(self._places[match.prefix], None)
        return self._places[match.prefix]

    def state_bytes(self) -> int:
        return self.tree.state_bytes() + _PLACE_BYTES * (len(self._places) + len(self._expected))
