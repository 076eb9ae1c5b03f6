"""Marconi (Pan et al., MLSys 2025, arXiv 2411.19379): recency plus compute saved for the bytes freed.

At most two checkpoints a request, where it branches off and at its end; using one refreshes it alone. The least of
`norm(recency) + alpha * norm(FLOPs saved beyond the parent / bytes freed)` goes first, among those with at most one
child; one with a child loses only its own bytes. Unlike the published artifact, the bytes freed are counted as they
are, and alpha follows the traffic all along: for each alpha a shadow of the tier, metadata alone, counts what it hits.
"""

# ruff: noqa: ARG002
from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tiered_cache.index import Candidate, Chain, Match, PrefixId, TierView
from tiered_cache.policy.base import Hints, Proposal, Request
from tiered_cache.policy.ghost import GhostNode
from tiered_cache.policy.hazard import Floats
from tiered_cache.policy.mirror import MirrorPolicy
from tiered_cache.policy.shadow import Shadow

ALPHAS = (0.0, 0.25, 0.5, 1.0, 2.0)
GHOSTS_MAX = 256
"""Only so that what is on its way is not forgotten before it comes."""
SAMPLE = 256
SHADOW_SAMPLE = 24
SHADOW_MEMORY = 0.998
"""How much of an alpha's hits counts one request later."""
_D, _N = 4096, 128
FLOPS_PER_TOKEN = 24 * (12 * _D**2 + 16 * _D * _N + 10 * _D) + 4 * 8 * _D**2 + 28 * 16 * _D**2
"""Of the paper's model: 24 Mamba, 4 attention and 28 MLP layers; only the ratio to the next one matters."""
FLOPS_PER_TOKEN_SQUARED = 4 * 4 * _D


class MarconiPolicy(MirrorPolicy):
    """As published, but for the two points above."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(GHOSTS_MAX, seed)
        self._used: dict[GhostNode, int] = {}
        self._step = 0
        self._shadows = [Shadow(self.tree) for _ in ALPHAS]
        self._hits = [0.0] * len(ALPHAS)
        self._capacity_bytes = 0
        self._own_bytes_seen = 0
        self._block_tokens = 1
        self.tree.on_forget.append(self._forget)

    def _forget(self, node: GhostNode) -> None:
        self._used.pop(node, None)

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        self._step += 1
        self._block_tokens = request.chain.block_tokens
        node = self.found(request.chain, match, resident)
        if node is not None:
            self._used[node] = self._step
        deepest, _, _ = self.tree.match(request.chain)
        for number, shadow in enumerate(self._shadows):
            at = deepest
            while at.parent is not None and at not in shadow:
                at = at.parent
            self._hits[number] = SHADOW_MEMORY * self._hits[number] + at.blocks
        if match.branch_tokens <= match.tokens:
            return ()
        self._admit(self.expect(request.chain, match.branch_tokens))
        return (match.branch_tokens,)

    def finish(self, request: Request, chain: Chain, output_tokens: int, hints: Hints, now_s: float) -> tuple[int, ...]:
        if not len(chain):
            return ()
        self._admit(self.expect(chain, len(chain)))
        return (len(chain),)

    def propose(
        self,
        new: Sequence[Candidate],
        free_bytes: int,
        pinned: Collection[PrefixId],
        now_s: float,
        resident: TierView,
    ) -> Proposal:
        self._capacity_bytes = free_bytes + resident.stored_bytes
        self._own_bytes_seen = max((c.own_bytes for c in new), default=self._own_bytes_seen)
        return super().propose(new, free_bytes, pinned, now_s, resident)

    def choose(self, now_s: float) -> GhostNode | None:
        best = max(range(len(ALPHAS)), key=lambda number: self._hits[number])
        return self._least(self.held, ALPHAS[best], SAMPLE)

    def _admit(self, node: GhostNode) -> None:
        """A request's checkpoint enters every shadow, which makes room for it in its own way."""
        self._used[node] = self._step
        for shadow, alpha in zip(self._shadows, ALPHAS, strict=True):
            shadow.add(node, self._own_bytes_seen)
            while shadow.row_blocks * self.block_bytes + shadow.checkpoint_bytes > self._capacity_bytes > 0:
                victim = self._least(shadow, alpha, SHADOW_SAMPLE)
                if victim is None:
                    break
                shadow.drop(victim)

    def _least(self, shadow: Shadow, alpha: float, count: int) -> GhostNode | None:
        nodes = [node for node in shadow.sample(count, self.rng) if shadow.supports(node) <= 2]
        if not nodes:
            return next(iter(shadow.own_bytes), None)
        recency = np.array([1.0 / (self._step + 1 - self._used.get(node, 0)) for node in nodes])
        efficiency = np.array([self._flops_per_byte(node, shadow) for node in nodes])
        scores = _scaled(recency) + alpha * _scaled(efficiency)
        return self.least(nodes, list(scores)) if shadow is self.held else nodes[int(np.argmin(scores))]

    def _flops_per_byte(self, node: GhostNode, shadow: Shadow) -> float:
        parent = node.parent
        assert parent is not None
        while parent.parent is not None and parent not in shadow and shadow.supports(parent) < 2:
            parent = parent.parent
        tokens, above = node.blocks * self._block_tokens, parent.blocks * self._block_tokens
        flops = FLOPS_PER_TOKEN * (tokens - above) + FLOPS_PER_TOKEN_SQUARED * (tokens**2 - above**2)
        rows = (node.blocks - parent.blocks) * self.block_bytes if shadow.supports(node) == 1 else 0
        return flops / max(1, rows + shadow.own_bytes[node])


def _scaled(values: Floats) -> Floats:
    """To 0 .. 1; all ones if they are equal."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.ones_like(values)
