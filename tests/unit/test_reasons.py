"""Every miss, refusal, removal and lost frame has a reason from a closed list, and is counted under it."""

from __future__ import annotations

import gc
import random
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from spilling import (
    IDENTITY,
    MIXED,
    SHARDED,
    WINDOW,
    Clock,
    State,
    SteppedExecutor,
    check_books,
    expected_frames,
    held,
    match,
    node,
    open_disk,
    open_host,
    restore,
    some_tokens,
    spill,
    total,
)

from tiered_cache.cache import DeclineReason, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.errors import MissReason, TieredCacheError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import CHECKPOINT, Tokens
from tiered_cache.index import _MISS_AFTER, RemovalReason
from tiered_cache.metrics import FAMILIES, counter_samples
from tiered_cache.policy.base import Hints
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.tiers.base import Durability

TIERS = "host|disk"
MISSES = "|".join(MissReason)
REMOVALS = "|".join(RemovalReason)
DECLINES = "|".join(reason.name.lower() for reason in DeclineReason)
CALLS = "register|admit|put|get|delete|demote|ahead|list|quarantine"
COUNTERS = [
    "lookups|hits|reported",
    f"hits\\.({TIERS})",
    f"(misses|unserved)\\.({MISSES})",
    f"declined\\.({DECLINES})",
    f"dropped\\.({TIERS})\\.({REMOVALS})",
    f"(frames|bytes)\\.({TIERS})\\.(put|found|{REMOVALS})",
    f"errors\\.({TIERS})\\.({CALLS})",
    f"ahead\\.({TIERS})\\.(copied|used|dropped)",
    f"recovered\\.({TIERS})\\.(unknown|foreign|bad_descriptor)",
    f"(quarantined\\.({TIERS}))|(descriptors\\.({TIERS})\\.quarantined)",
]


def test_every_removal_is_a_miss_of_its_kind() -> None:
    assert set(_MISS_AFTER) == set(RemovalReason)


def test_every_counter_is_of_a_closed_list(tmp_path: Path) -> None:
    """A few hundred steps with faults, cancels, expiries, reports and a restart, over tiers that are too small."""
    rng, clock, ahead = random.Random(6), Clock(), SteppedExecutor()
    prompts = [some_tokens(5 + n % 14, seed=n // 3) for n in range(45)]
    seen: dict[str, int] = {}
    with ThreadPoolExecutor(1) as executor:
        for _ in range(2):
            rates = {Fault.ERROR: 0.02, Fault.FULL: 0.02, Fault.FLIP: 0.01, Fault.LOST_ANSWER: 0.01}
            tiers = [FaultyTier(open_host(60_000), 1, rates), FaultyTier(open_disk(tmp_path, 150_000), 2, rates)]
            slots = [TierSlot(tiers[0], LruPolicy()), TierSlot(tiers[1], LruPolicy(), Mode.FAST)]
            cache = TieredCache(slots, executor, ahead=ahead, clock=clock)
            with suppress(TieredCacheError):
                cache.recover(later=True)
            cache.register(IDENTITY, MIXED)
            for _ in range(250):
                step(cache, rng, prompts)
                clock.now_s += rng.random()
                ahead.step()
                gc.collect(0)
            for tier in tiers:
                tier.rates.clear()
            cache.unpin(-1)
            for level in cache._levels:
                level.tidy()
            counters = cache.counters()
            gc.collect()
            check_books(cache)
            cache.close()
            for name in counters:
                assert any(re.fullmatch(pattern, name) for pattern in COUNTERS), f"{name} is of no list"
            assert counters["lookups"] == counters["hits"] + total(counters, "misses.")
            for name, count in counters.items():
                seen[name] = seen.get(name, 0) + count
    assert {"declined.too_large", "declined.session_over", "declined.no_tier"} <= set(seen)
    assert {"dropped.host.moved", "dropped.host.expired", "dropped.disk.evicted"} <= set(seen)
    assert {"misses.evicted", "misses.not_stored", "unserved.lost", "frames.disk.found", "reported"} <= set(seen)
    known = {sample.name for sample in counter_samples("cache", seen)}
    assert known <= FAMILIES.keys()


def step(cache: TieredCache, rng: random.Random, prompts: list[Tokens]) -> None:
    prompt = rng.choice(prompts)
    state, doing = State(MIXED, prompt), rng.random()
    with suppress(TieredCacheError, AssertionError):
        if doing < 0.4:
            hints = Hints(ttl_s=rng.choice([None, 5.0]), will_not_return=rng.random() < 0.1)
            spill(cache, state, durability=rng.choice(list(Durability)), hints=hints)
        elif doing < 0.5:
            cache.abandon(cache.admit(state.offer(), Durability.HOST, Hints()))
        elif doing < 0.53:
            spill(cache, State(MIXED, some_tokens(400)))
        elif doing < 0.56:
            spill(cache, state, private=True)
        elif doing < 0.6:
            key = replace(state.chain.key("rows", 4, 0), tokens=8)
            cache.fetch([key], 1 << 20)
            cache.report_bad(state.chain.key("rows", 4, 0), "looks odd")
        else:
            hit = match(cache, MIXED, np.append(prompt, prompt[:1])).hit
            if hit is not None:
                restore(cache, MIXED, hit, prompt)


def test_what_went_with_a_failed_disk_is_lost_and_counted_and_never_offered_again(tmp_path: Path) -> None:
    prompts = [some_tokens(9, seed) for seed in range(4)]
    with node(open_disk(tmp_path), checked=False) as cache:
        for prompt in prompts:
            spill(cache, State(MIXED, prompt))
        shutil.rmtree(tmp_path / "entries")
        for prompt in prompts:
            hit = match(cache, MIXED, np.append(prompt, prompt[:1])).hit
            assert hit is not None  # until somebody looks, nobody knows
            assert set(cache.fetch([f.key for f in hit.frames], 1 << 20)) == {MissReason.LOST}
            again = match(cache, MIXED, np.append(prompt, prompt[:1]))
            assert (again.hit, again.reason) == (None, MissReason.LOST)
        counters = cache.counters()
        assert counters["frames.disk.lost"] + counters.get("frames.disk.abandoned", 0) == counters["frames.disk.put"]
        assert counters["unserved.lost"] == 12
        assert held(cache, "disk") == {}


@pytest.mark.parametrize("geometry", [MIXED, WINDOW, SHARDED], ids=["mixed", "window", "sharded"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_rows_go_when_the_last_checkpoint_frame_that_needs_them_is_lost(
    geometry: Geometry, tier: str, tmp_path: Path
) -> None:
    tokens, place = some_tokens(18), open_host() if tier == "host" else open_disk(tmp_path)
    with node(place, geometries=[geometry]) as cache:
        for rank in range(geometry.shards):
            spill(cache, State(geometry, tokens, rank=rank), 9, 18)
        assert {(n.group, n.tokens, n.rank) for n in held(cache, tier)} == expected_frames(
            geometry, 9
        ) | expected_frames(geometry, 18)
        for stop in (18, 9):
            for rank in range(geometry.shards):
                key = State(geometry, tokens, rank=rank).chain.key(CHECKPOINT, stop, rank)
                assert list(place.delete([key.path()])) == [True]
                assert cache.fetch([key], 1 << 20) == [MissReason.LOST]
                assert cache._index.unsupported(tier) == []
            left = expected_frames(geometry, 9) if stop == 18 else set()
            assert {(n.group, n.tokens, n.rank) for n in held(cache, tier)} == left
        assert not [entry for entry in place.list() if "descriptor" not in entry.path]
