"""The default: keep what is likely to be used soon, for how much it saves and how little room it takes.

A ghost tree of metadata remembers prefixes that are long gone, so that a branch is seen when a prompt leaves a path
that is not held any more. Checkpoints are taken there and at the end. A model that learns from every use says what it
is worth to keep a prefix for one more second (`predictor.py`, `hazard.py`); a checkpoint's score is that worth, times
the tokens it saves beyond the nearest checkpoint above it, over the bytes that only it needs. The least of a random
sample goes first, the new one among them.
"""

# ruff: noqa: ARG002
from __future__ import annotations

from collections import OrderedDict

from tiered_cache.index import Chain, Match, TierView
from tiered_cache.policy.base import Hints, Request
from tiered_cache.policy.ghost import GhostNode
from tiered_cache.policy.mirror import MirrorPolicy
from tiered_cache.policy.predictor import Arrival, Kind, Predictor

GHOSTS_MAX = 4096
SAMPLE = 64
ARRIVALS_MAX = 1024


class DefaultPolicy(MirrorPolicy):
    """Scores what it holds by what it has learned."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(GHOSTS_MAX, seed)
        self.predictor = Predictor(self.tree)
        self._arrivals: OrderedDict[Request, Arrival] = OrderedDict()

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        chain = request.chain
        resumed = self.found(chain, match, resident)
        arrival = self.predictor.arrive(chain, request.input_tokens, now_s, resumed)
        self._arrivals[request] = arrival
        if len(self._arrivals) > ARRIVALS_MAX:
            self._arrivals.popitem(last=False)
        branch_tokens = arrival.common * chain.block_tokens
        if not arrival.branch or branch_tokens <= match.tokens:
            return ()
        self.predictor.took_branch(arrival, self.expect(chain, branch_tokens))
        return (branch_tokens,)

    def finish(self, request: Request, chain: Chain, output_tokens: int, now_s: float) -> tuple[int, ...]:
        arrival = self._arrivals.pop(request, None)
        if not len(chain):
            return ()
        node = self.expect(chain, len(chain))
        if arrival is not None:
            self.predictor.end(arrival, node, output_tokens, chain.block_tokens)
        return (len(chain),)

    def choose(self, now_s: float) -> GhostNode | None:
        nodes = self.held.sample(SAMPLE, self.rng)
        if not nodes:
            return None
        worths = self.predictor.worths(nodes, now_s)
        scores = [worth * self._saved_per_byte(node) for worth, node in zip(worths, nodes, strict=True)]
        return nodes[min(range(len(nodes)), key=scores.__getitem__)]

    def _saved_per_byte(self, node: GhostNode) -> float:
        """Blocks saved beyond the next checkpoint above, over the bytes freed without this one.

        An end's superseded ancestors go when it does: they count neither as checkpoints nor as reasons to keep rows.
        """
        held, bytes_ = self.held, self.held.own_bytes[node]
        end = self.predictor.kind(node) is Kind.END
        alone = held.supports(node) == 1
        saved, at = 0, node
        while at.parent is not None:
            saved += len(at.keys)
            if alone:
                bytes_ += len(at.keys) * self.block_bytes
            at = at.parent
            superseded = at in held and end and self.predictor.kind(at) is Kind.SUPERSEDED
            if at in held and not superseded:
                break
            alone = alone and held.supports(at) <= 1 + superseded
        return saved / max(1, bytes_)

    def state_bytes(self) -> int:
        return super().state_bytes() + self.predictor.state_bytes()
