"""kill -9 amid spills, demotions and recoveries: nothing acknowledged on disk is lost, and nothing torn is offered.

`python test_cache_kills.py DIRECTORY LOG` starts what is killed: for each seed on its standard input a child works on
a cache over the disk tier at DIRECTORY until it is dead, and writes to LOG what was acknowledged and what dropped.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes that this file is the program of

from killing import PROMPTS, Telling, Victims, answer_seeds, state_of
from spilling import IDENTITY, MIXED, match, open_disk, open_host, restore, spill

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.tiers.base import Durability

HOST, DISK, _ = Durability
HOST_BYTES, DISK_BYTES = 40_000, 600_000


@contextmanager
def start(directory: Path, say: Callable[..., None] = lambda *_: None) -> Iterator[TieredCache]:
    with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as ahead:
        slots = [
            TierSlot(open_host(HOST_BYTES), LruPolicy()),
            TierSlot(open_disk(directory, DISK_BYTES), Telling(say), Mode.FAST),
        ]
        with contextlib.closing(TieredCache(slots, executor, ahead=ahead)) as cache:
            cache.recover()
            cache.register(IDENTITY, MIXED)
            yield cache


def work(directory: Path, say: Callable[..., None], rng: random.Random) -> None:
    with start(directory, say) as cache:
        say("recovered")
        while True:
            prompt = rng.randrange(PROMPTS)
            state = state_of(prompt)
            end = len(state.tokens)
            stops = sorted({rng.randrange(1, end + 1), end})
            for kept in spill(cache, state, *stops, durability=rng.choice([HOST, DISK])).kept:
                if kept.durability is DISK:
                    say("kept", prompt, kept.tokens)
            hit = match(cache, MIXED, np.append(state.tokens, state.tokens[:1])).hit
            if hit is not None and rng.random() < 0.3:
                restore(cache, MIXED, hit, state.tokens)
                say("restored", prompt)


@pytest.mark.timeout(900)
def test_kills(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    directory, rng = tmp_path / "tier", random.Random(5)
    with contextlib.closing(Victims(directory, tmp_path / "log", __file__)) as victims:
        for seed in range(int(pytestconfig.getoption("--kills"))):
            wait_for = rng.choice(["started", "recovered", "recovered", "kept"])  # in recovery, or in spills
            times = rng.randrange(4, 12) if wait_for == "kept" else 1
            victims.live_and_die(seed, wait_for, times, rng.random() * rng.choice((0.002, 0.02, 0.2)))
            with start(directory) as cache:
                for state in victims.acknowledged.values():
                    (kept,) = cache.kept(state.offer())
                    assert kept.durability is DISK
                for prompt in range(PROMPTS):
                    tokens = state_of(prompt).tokens
                    hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
                    if hit is not None:
                        restore(cache, MIXED, hit, tokens)
                counters = cache.counters()
                assert not counters.get("quarantined.disk", 0)
                assert not counters.get("frames.disk.lost", 0)
                assert not counters.get("dropped.disk.evicted", 0)
                assert cache._index.unsupported("disk") == []
                assert cache.usage()["disk"].bytes_free >= 0
        assert victims.told > 20
        assert victims.acknowledged


if __name__ == "__main__":
    answer_seeds(work)
