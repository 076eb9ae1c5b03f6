"""The default: keep what is likely to be used soon, for how much it saves and how little room it takes.

A ghost tree of metadata remembers prefixes that are long gone, so that a branch is seen when a prompt leaves a path
that is not held any more. Checkpoints are taken there and at the end. A model that learns from every use says what it
is worth to keep a prefix for one more second (`predictor.py`, `hazard.py`); a checkpoint's score is that worth, times
the tokens it saves beyond the nearest checkpoint above it, over the bytes that only it needs. The least of a random
sample goes first, the new one among them. Of the hints, `returns_in_s` is believed by the model, and what has a lower
`priority` goes before all others.
"""

# ruff: noqa: ARG002
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from tiered_cache.index import Candidate, Chain, Match, PrefixId, RemovalReason, TierView
from tiered_cache.policy.base import Hints, Proposal, Request
from tiered_cache.policy.floor import LruFloor, Recency
from tiered_cache.policy.ghost import GhostNode
from tiered_cache.policy.mirror import MirrorPolicy
from tiered_cache.policy.predictor import Arrival, Kind, Predictor

GHOSTS_MAX = 4096
SAMPLE = 32
ARRIVALS_MAX = 1024
"""How many requests between start and end are remembered."""


class DefaultPolicy(MirrorPolicy):
    """Scores what it holds by what it has learned, and follows LRU while that is better."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(GHOSTS_MAX, seed)
        self.predictor = Predictor(self.tree)
        self.floor = LruFloor(self.tree)
        self._recency = Recency(self.held)
        self._running: OrderedDict[Request, Arrival] = OrderedDict()
        """Requests between their start and their end."""
        self._largest_own_bytes = 0
        self._capacity_bytes = 0
        self._priorities: dict[GhostNode, int] = {}
        """Of the nodes with another priority than 0."""
        self.tree.on_forget.append(self._forget)

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        chain = request.chain
        resumed = self.found(chain, match, resident)
        if resumed is not None:
            self._recency.use(resumed)
        self.floor.arrive(chain, match.tokens)
        arrival = self.predictor.arrive(chain, request.input_tokens, now_s, resumed)
        self._running[request] = arrival
        if len(self._running) > ARRIVALS_MAX:
            self._running.popitem(last=False)
        branch_tokens = arrival.common * chain.block_tokens
        if not arrival.branch or branch_tokens <= match.tokens:
            return ()
        node = self.expect(chain, branch_tokens)
        self.predictor.took_branch(arrival, node)
        self._heed(node, hints)
        return (branch_tokens,)

    def finish(self, request: Request, chain: Chain, output_tokens: int, hints: Hints, now_s: float) -> tuple[int, ...]:
        arrival = self._running.pop(request, None)
        if not len(chain):
            return ()
        node = self.expect(chain, len(chain))
        if arrival is not None:
            self.predictor.end(arrival, node, output_tokens, chain.block_tokens, hints.returns_in_s)
        self._heed(node, hints)
        self.floor.end(node, self._largest_own_bytes, self.block_bytes, self._capacity_bytes)
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
        self._largest_own_bytes = max([self._largest_own_bytes, *(c.own_bytes for c in new)])
        return super().propose(new, free_bytes, pinned, now_s, resident)

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        super().commit(added, dropped, now_s, resident)
        for node in [self.node_of(prefix) for prefix in added]:
            if node is not None:
                self._recency.use(node)

    def choose(self, now_s: float) -> GhostNode | None:
        nodes = self._of_least_priority() if self._priorities else None
        if nodes is None and self.floor.follows_lru:
            return self._recency.pop()
        if nodes is None or len(nodes) > SAMPLE:
            nodes = self.held.sample(SAMPLE, self.rng) if nodes is None else self.rng.sample(nodes, SAMPLE)
        if not nodes:
            return None
        worths = self.predictor.worths(nodes, now_s)
        scores = [worth * self._saved_per_byte(node) for worth, node in zip(worths, nodes, strict=True)]
        return self.least(nodes, scores)

    def foresee(self, resident: TierView) -> Iterable[PrefixId]:
        if not self.floor.follows_lru:
            return super().foresee(resident)
        return [prefix for node in self._recency for prefix in self.prefixes_at(node)]

    def returned(self, node: GhostNode) -> None:
        self._recency.put_back(node)

    def _of_least_priority(self) -> list[GhostNode]:
        least = min((self._priorities.get(node, 0) for node in self.held.own_bytes), default=0)
        return [node for node in self.held.own_bytes if self._priorities.get(node, 0) == least]

    def _heed(self, node: GhostNode, hints: Hints) -> None:
        if hints.priority:
            self._priorities[node] = hints.priority
        else:
            self._priorities.pop(node, None)

    def _forget(self, node: GhostNode) -> None:
        self._priorities.pop(node, None)

    def _saved_per_byte(self, node: GhostNode) -> float:
        """Blocks saved beyond the next checkpoint above, over the bytes freed without this one.

        An end's superseded ancestors go when it does: they count neither as checkpoints nor as reasons to keep rows.
        """
        held, bytes_ = self.held, self.held.own_bytes[node]
        end = self.predictor.kind(node) == Kind.END
        alone = held.supports(node) == 1
        saved, at = 0, node
        while at.parent is not None:
            saved += len(at.keys)
            if alone:
                bytes_ += len(at.keys) * self.block_bytes
            at = at.parent
            superseded = 0
            if at in held.own_bytes:
                if not end or self.predictor.kind(at) != Kind.SUPERSEDED:
                    break
                superseded = 1
            alone = alone and held.supports(at) <= 1 + superseded
        return saved / max(1, bytes_)

    def state_bytes(self) -> int:
        own = 100 * (len(self._recency) + len(self._priorities)) + 500 * len(self._running)
        return super().state_bytes() + self.predictor.state_bytes() + self.floor.state_bytes() + own
