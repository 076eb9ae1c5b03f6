"""A checkpoint at every block end, least recently used: what vLLM does for hybrid models."""

# ruff: noqa: ARG002
from __future__ import annotations

from tiered_cache.index import Chain, Match, TierView
from tiered_cache.policy.base import Hints, Request
from tiered_cache.policy.lru import LruPolicy


class EveryBlockPolicy(LruPolicy):
    """LRU with as many checkpoints as there can be."""

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        super().start(request, match, hints, now_s, resident)
        step = request.chain.block_tokens
        return tuple(range((match.tokens // step + 1) * step, request.chain.blocks * step + 1, step))

    def finish(self, request: Request, chain: Chain, output_tokens: int, hints: Hints, now_s: float) -> tuple[int, ...]:
        step = chain.block_tokens
        return tuple(range((request.chain.blocks + 1) * step, chain.blocks * step + 1, step))
