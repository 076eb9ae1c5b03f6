"""kill -9 of a node together with the catalogue: what was acknowledged in the store is found by the next ones.

The same children as in `test_cache_kills.py`, over host memory and an object store in a directory.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes that this file is the program of

from killing import PROMPTS, Telling, Victims, answer_seeds, state_of
from sites import as_hit
from spilling import IDENTITY, MIXED, open_host, restore, spill

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.catalogue import Catalogue
from tiered_cache.service.claim import StoreClaim
from tiered_cache.service.local import InlineExecutor
from tiered_cache.service.messages import Prompt
from tiered_cache.service.shared import SharedStore
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.object_budget import GrantedBudget
from tiered_cache.tiers.object_store import ObjectStoreTier, open_store

HOST, DISK, _ = Durability
HOST_BYTES, STORE_BYTES = 30_000, 200_000
LOOK_S = 0.2


class Running(NamedTuple):
    """A node and the catalogue."""

    node: TieredCache
    catalogue: Catalogue


@contextmanager
def start(directory: Path, say: Callable[..., None] = lambda *_: None) -> Iterator[Running]:
    store = open_store(f"file://{directory}")
    with ThreadPoolExecutor(4) as requests:
        client = ObjectStoreTier(store, STORE_BYTES, requests, durability=DISK)
        cache = TieredCache([TierSlot(client, Telling(say), Mode.FAST)], InlineExecutor(), lends=True)
        claim = StoreClaim(client, {"pid": os.getpid()}, look_s=LOOK_S)
        client.guard(claim)
        catalogue = Catalogue(cache, client, claim, InlineExecutor())
        shared = SharedStore(ObjectStoreTier(store, GrantedBudget(), requests, durability=DISK), catalogue)
        node = TieredCache([TierSlot(open_host(HOST_BYTES), LruPolicy())], InlineExecutor(), shared=shared)
        with contextlib.closing(node), contextlib.closing(catalogue):
            node.register(IDENTITY, MIXED)
            yield Running(node, catalogue)


def work(directory: Path, say: Callable[..., None], rng: random.Random) -> None:
    with start(directory, say) as running:
        while not running.catalogue._settled:  # the one before has died, and may have deletes under way
            running.catalogue.maintain()
        say("recovered")
        while True:
            prompt = rng.randrange(PROMPTS)
            state = state_of(prompt)
            end = len(state.tokens)
            stops = sorted({rng.randrange(1, end + 1), end})
            for kept in spill(running.node, state, *stops, durability=rng.choice([HOST, DISK])).kept:
                if kept.durability is DISK:
                    say("kept", prompt, kept.tokens)
            if rng.random() < 0.3 and restored(running, prompt):
                say("restored", prompt)


def restored(running: Running, prompt: int) -> bool:
    """Whether something of a prompt is in the store; each byte of it is compared."""
    tokens = state_of(prompt).tokens
    chain = state_of(prompt).chain
    longer = Prompt(np.append(tokens, tokens[:1]))
    plan = running.catalogue.match(chain.namespace, longer, 30.0, deadline_s=5.0).plan
    if plan is None:
        return False
    restore(running.node, MIXED, as_hit(plan), tokens[: plan.tokens])
    return running.catalogue.unpin(plan.pin, plan.generation, deadline_s=5.0)


@pytest.mark.timeout(900)
def test_kills(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    directory, rng = tmp_path / "store", random.Random(6)
    with contextlib.closing(Victims(directory, tmp_path / "log", __file__)) as victims:
        for seed in range(int(pytestconfig.getoption("--kills"))):
            wait_for = rng.choice(["started", "recovered", "recovered", "kept"])
            times = rng.randrange(4, 12) if wait_for == "kept" else 1
            victims.live_and_die(seed, wait_for, times, rng.random() * rng.choice((0.002, 0.02, 0.2)))
            with start(directory) as running:
                index = running.catalogue.cache._index
                for state in victims.acknowledged.values():
                    assert index.missing(state.chain, len(state.tokens), "object") == [], state.tokens
                found = [restored(running, prompt) for prompt in range(PROMPTS)]
                assert any(found) or not victims.acknowledged
                counters = running.catalogue.counters()
                assert not counters.get("quarantined.object", 0)
                assert not counters.get("frames.object.lost", 0)
                assert not counters.get("dropped.object.evicted", 0)
                assert index.unsupported("object") == []
                assert running.catalogue.usage()["object"].bytes_free >= 0
        assert victims.told > 20
        assert victims.acknowledged


if __name__ == "__main__":
    answer_seeds(work)
