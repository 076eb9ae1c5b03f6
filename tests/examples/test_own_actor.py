"""An actor of one's own that owns sequences, and a test of it: all that is needed, in 30 lines.

Run it in process, or with `--tiered-cache-ray local-mode` or `shared` as Ray actors: the test is the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from actors.sequence import OwnerMethods
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.service.messages import Prompt
from tiered_cache.service.owner import SequenceOwner
from tiered_cache.tiers.base import Durability


class Chat(OwnerMethods):
    """Answers prompts. Its sequences can be spilled, suspended, and restored into another worker."""

    def __init__(self, name, node, tiering, settings):
        self.engine = ReferenceEngine("qsa-ple-gdn:tiny")
        self.owner = SequenceOwner(self.engine, name=name, node=node, tiering=tiering)

    def answer(self, place, prompt, count, *, deadline_s):
        """The sequence after `count` more tokens, and these."""
        source = self.owner.run(place, prompt, (), deadline_s=deadline_s).source
        with self.owner.using(source) as handle:
            tokens = self.engine.generate(handle, count)
            self.owner.advance(source, tokens)
        return source, tokens


@pytest.mark.tiered_cache(worker=Chat, workers=2, host_bytes="64MiB")
def test_an_answer_goes_on_although_its_worker_dies(tiered_cluster, kill_worker):
    prompt = Prompt(np.arange(3, 90, dtype=np.uint32))

    def answer(owner, place, prompt, count):
        return tiered_cluster.workers[owner].call(tuple, "answer", place, prompt, count, deadline_s=30)

    placed = tiered_cluster.router.place(tiered_cluster.namespace, prompt, 200, deadline_s=30)
    _, whole = answer(placed.owner, placed.lease, prompt, 20)
    placed = tiered_cluster.router.place(tiered_cluster.namespace, prompt, 200, deadline_s=30)
    source, first = answer(placed.owner, placed.lease, prompt, 8)
    ticket = tiered_cluster.router.suspend(source, placed.node, Durability.HOST, deadline_s=30)
    kill_worker(placed.owner)
    resumed = tiered_cluster.router.resume(ticket, 200, deadline_s=30)
    assert resumed.source.owner != placed.owner
    _, rest = answer(resumed.source.owner, resumed.source, ticket.prompt, 12)
    assert [*first, *rest] == [*whole]
