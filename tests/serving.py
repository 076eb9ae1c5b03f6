"""Requests through a cluster, as drivers make them: what the tests of the service and of the actors share."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.identity import Tokens
from tiered_cache.policy.base import Hints
from tiered_cache.service.local import Cluster
from tiered_cache.service.messages import Prompt, RunResult, SpillResult, StateMark
from tiered_cache.service.router import Placement
from tiered_cache.tiers.base import Durability

MODELS = ("qsa-ple-gdn:small", "mla-dsa-kda:small")
"""Paged KV, QSA, PLE, gated delta net; MLA, DSA, KDA. Blocks of 16 tokens."""
BLOCK = 16
DEADLINE_S = 20.0
NO_HINTS = Hints()


class Served(NamedTuple):
    """What became of one request."""

    placement: Placement
    run: RunResult
    spill: SpillResult

    @property
    def mark(self) -> StateMark:
        return self.run.marks[-1]


def some_tokens(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(3, 257, count, dtype=np.uint32)


def never_moved(model: str, tokens: Tokens) -> StateMark:
    """The mark of a sequence that was computed in one place from its first token to its last."""
    return _computed(model, tokens.tobytes())


@functools.lru_cache(maxsize=256)
def _computed(model: str, raw: bytes) -> StateMark:
    engine, tokens = ReferenceEngine(model), np.frombuffer(raw, np.uint32)
    sequence = engine.start(engine.reserve(len(tokens)))
    engine.extend(sequence, tokens)
    return StateMark(len(tokens), engine.digest(sequence), engine.output(sequence))


def compute(
    cluster: Cluster,
    tokens: Tokens,
    *,
    room: int = 64,
    deadline_s: float = DEADLINE_S,
    hints: Hints = NO_HINTS,
) -> Served:
    """Place a request and run it; its sequence stays on the worker, and nothing is spilled."""
    prompt = Prompt(tokens, hints=hints)
    placement = cluster.router.place(cluster.namespace, prompt, len(tokens) + room, deadline_s=deadline_s)
    place = placement.restored.source if placement.restored else placement.lease
    assert place is not None
    run = cluster.workers[placement.owner].run(place, prompt, placement.take_at, deadline_s=deadline_s)
    return Served(placement, run, SpillResult((), (), ()))


def serve(
    cluster: Cluster,
    tokens: Tokens,
    durability: Durability = Durability.HOST,
    *,
    room: int = 64,
    deadline_s: float = DEADLINE_S,
    hints: Hints = NO_HINTS,
) -> Served:
    """Place a request, run it, spill its checkpoints, release it."""
    served = compute(cluster, tokens, room=room, deadline_s=deadline_s, hints=hints)
    owner, node, run = served.placement.owner, served.placement.node, served.run
    spill = cluster.tierings[node].spill(run.offer, durability, hints, None, deadline_s=deadline_s)
    cluster.workers[owner].release(run.source, deadline_s=deadline_s)
    return served._replace(spill=spill)
