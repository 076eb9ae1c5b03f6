"""What callers say of their sessions is honoured by the cache, and by every policy's simulation alike."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from serving import DEADLINE_S, MODELS, serve
from serving import some_tokens as some_prompt
from spilling import (
    IDENTITY,
    MIXED,
    NO_HINTS,
    ROWS,
    Clock,
    State,
    chain_of,
    held,
    match,
    node,
    open_disk,
    open_host,
    restore,
    some_tokens,
    spill,
)

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import ConfigError, MissReason
from tiered_cache.geometry import Geometry
from tiered_cache.identity import Tokens
from tiered_cache.index import Chain, Match, TierView
from tiered_cache.policy import lifetimes
from tiered_cache.policy.base import Hints, Request
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.policy.names import POLICIES
from tiered_cache.replay.simulate import TierModel, simulate
from tiered_cache.replay.traces import TraceRequest
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import Prompt
from tiered_cache.tiers.base import Durability

PROMPT = some_tokens(18)
HOST_BYTES = 50_000
"""Room for four of the ten sequences that `press` brings."""


def press(cache: TieredCache) -> None:
    for seed in range(10):
        spill(cache, State(MIXED, some_tokens(18, seed=50 + seed)))


def found_tokens(cache: TieredCache, prompt: Tokens = PROMPT, geometry: Geometry = MIXED) -> int:
    hit = match(cache, geometry, np.append(prompt, prompt[:1])).hit
    return hit.tokens if hit else 0


def miss_of(cache: TieredCache, prompt: Tokens = PROMPT, geometry: Geometry = MIXED) -> MissReason | None:
    found = match(cache, geometry, np.append(prompt, prompt[:1]))
    assert found.hit is None
    return found.reason


# Pins


def test_what_is_pinned_outlives_pressure_until_its_time_is_over() -> None:
    clock = Clock()
    with node(open_host(HOST_BYTES), clock=clock) as cache:
        spill(cache, State(MIXED, PROMPT), hints=Hints(pin_s=50.0))
        spill(cache, State(MIXED, PROMPT), hints=Hints(pin_s=5.0))  # a shorter one takes nothing back
        for step_s in (1.0, 48.0):
            clock.now_s += step_s
            press(cache)
            assert chain_of(MIXED, PROMPT).prefix_hash(18) in cache._index.view("host")
        clock.now_s += 2.0
        press(cache)
        assert miss_of(cache) is MissReason.EVICTED


def test_who_restores_may_pin_what_others_have_left() -> None:
    clock = Clock()
    with node(open_host(HOST_BYTES), clock=clock) as cache:
        spill(cache, State(MIXED, PROMPT))
        cache.match(chain_of(MIXED, np.append(PROMPT, PROMPT[:1])), Hints(pin_s=50.0))
        press(cache)
        assert found_tokens(cache) == 18


def test_what_is_pinned_stays_in_its_tier(tmp_path: Path) -> None:
    with node(open_host(HOST_BYTES), open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, PROMPT), hints=Hints(pin_s=50.0))
        press(cache)
        found = match(cache, MIXED, np.append(PROMPT, PROMPT[:1])).hit
        assert found is not None
        assert (found.tokens, found.tier) == (18, "host")
        assert held(cache, "disk")


def test_a_tier_full_of_pins_declines_and_drops_nothing() -> None:
    with node(open_host(HOST_BYTES)) as cache:
        for seed in range(10):
            spill(cache, State(MIXED, some_tokens(18, seed=50 + seed)), hints=Hints(pin_s=50.0))
        before = held(cache, "host")
        done = spill(cache, State(MIXED, PROMPT), hints=Hints(pin_s=50.0))
        assert (done.kept, done.receipts, held(cache, "host")) == ([], [], before)


def test_pins_are_bounded_and_one_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetimes, "LIFETIMES_MAX", 2)
    with node(open_host()) as cache:
        for seed in (1, 1, 2, 3):
            spill(cache, State(MIXED, some_tokens(9, seed=seed)), hints=Hints(pin_s=50.0 + seed, ttl_s=9.0))
        wanted = {chain_of(MIXED, some_tokens(9, seed=seed)).prefix_hash(9) for seed in (2, 3)}
        assert set(cache._index.pinned(100.0)) == wanted == cache._lifetimes._lives.keys()


# Times to live


@pytest.mark.parametrize("geometry", [MIXED, ROWS], ids=["mixed", "rows"])
def test_what_is_not_used_for_its_time_to_live_is_gone_with_its_reason(geometry: Geometry, tmp_path: Path) -> None:
    clock, prompt = Clock(), some_tokens(20)
    with node(open_host(), open_disk(tmp_path), clock=clock, geometries=[geometry]) as cache:
        spill(cache, State(geometry, prompt), durability=Durability.DISK, hints=Hints(ttl_s=10.0))
        for _ in range(2):
            clock.now_s += 9.0
            assert found_tokens(cache, prompt, geometry) == 20
        clock.now_s += 10.1
        assert miss_of(cache, prompt, geometry) is MissReason.EXPIRED
        counters = cache.counters()
        assert held(cache, "host") == held(cache, "disk") == {}
        for tier in ("host", "disk"):
            assert counters[f"frames.{tier}.expired"] == counters[f"frames.{tier}.put"] > 0
            assert f"frames.{tier}.evicted" not in counters


def test_what_has_expired_makes_room_before_anything_is_evicted() -> None:
    clock = Clock()
    with node(open_host(HOST_BYTES), clock=clock) as cache:
        spill(cache, State(MIXED, PROMPT))
        for seed in range(3):
            spill(cache, State(MIXED, some_tokens(18, seed=seed + 1)), hints=Hints(ttl_s=10.0))
        clock.now_s += 11.0
        spill(cache, State(MIXED, some_tokens(18, seed=9)))
        assert cache.counters()["dropped.host.expired"] == 3
        assert found_tokens(cache) == 18


@pytest.mark.parametrize("geometry", [MIXED, ROWS], ids=["mixed", "rows"])
def test_a_caller_cannot_shorten_the_life_of_what_others_have_left(geometry: Geometry) -> None:
    clock, prompt, longer = Clock(), some_tokens(20), some_tokens(40)
    with node(open_host(), clock=clock, geometries=[geometry]) as cache:
        spill(cache, State(geometry, prompt))
        spill(cache, State(geometry, longer), 20, 40, hints=Hints(ttl_s=10.0))
        clock.now_s += 11.0
        assert found_tokens(cache, longer, geometry) == 20
        spill(cache, State(geometry, longer), hints=Hints(ttl_s=10.0))
        spill(cache, State(geometry, longer))  # by now somebody wants it for good
        clock.now_s += 11.0
        assert found_tokens(cache, longer, geometry) == 40


def test_nothing_expires_while_it_is_read() -> None:
    clock = Clock()
    with node(open_host(), clock=clock) as cache:
        spill(cache, State(MIXED, PROMPT), hints=Hints(ttl_s=10.0))
        longer = np.append(PROMPT, PROMPT[:1])
        hit = match(cache, MIXED, longer, pin_s=20.0).hit
        assert hit is not None
        clock.now_s += 15.0
        match(cache, MIXED, some_tokens(5, seed=3))
        restore(cache, MIXED, hit, longer)
        assert hit.pin is not None
        cache.unpin(hit.pin)
        clock.now_s += lifetimes.PINNED_RETRY_S + 0.1
        assert miss_of(cache) is MissReason.EXPIRED


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_what_is_no_duration_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="pin_s"):
        Hints(pin_s=value)
    with pytest.raises(ConfigError, match="ttl_s"):
        Hints(ttl_s=value)
    with pytest.raises(ConfigError, match="returns_in_s"):
        Hints(returns_in_s=value)


# Policies


class Listening(LruPolicy):
    """Notes the hints that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Hints] = []

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        self.told.append(hints)
        return super().start(request, match, hints, now_s, resident)

    def finish(self, request: Request, chain: Chain, output_tokens: int, hints: Hints, now_s: float) -> tuple[int, ...]:
        self.told.append(hints)
        return super().finish(request, chain, output_tokens, hints, now_s)


def test_policies_are_told_at_the_look_up_and_at_the_spill() -> None:
    policy, asked, done = Listening(), Hints(priority=2), Hints(priority=2, returns_in_s=4.0)
    with ThreadPoolExecutor(1) as executor:
        cache = TieredCache([TierSlot(open_host(), policy)], executor, clock=Clock())
        cache.register(IDENTITY, MIXED)
        request = cache.match(chain_of(MIXED, PROMPT), asked).request
        spill(cache, State(MIXED, PROMPT), hints=done, request=request)
        spill(cache, State(MIXED, PROMPT[:9]))  # whose look-up was elsewhere
        cache.close()
    assert policy.told == [asked, done, NO_HINTS]


def one_shots(count: int) -> list[TraceRequest]:
    return [TraceRequest(i, i * 1.0, 4 * 16 + 1, 5, ((10 * i, 4),)) for i in range(count)]


@pytest.mark.parametrize("policy", POLICIES)
def test_whatever_the_policy_pins_times_to_live_and_ends_are_heeded(policy: str) -> None:
    requests = [*one_shots(30), TraceRequest(30, 30.0, 4 * 16 + 1, 5, ((0, 4),))]
    small, pinned = [TierModel("host", 200_000_000)], Hints(pin_s=60.0)
    assert simulate(requests, 16, policy, small, hints=[pinned] + [NO_HINTS] * 30).hit_tokens == 64
    large = [TierModel("host", 10**11)]
    assert simulate(requests, 16, policy, large).hit_tokens == 64
    over = [Hints(will_not_return=True)] * 31
    assert simulate(requests, 16, policy, large, hints=over).hit_tokens < 64
    result = simulate(requests, 16, policy, large, hints=[Hints(ttl_s=1.5)] * 31)
    assert result.removals_by_reason["host.expired"] >= 28
    assert result.hit_tokens == 0


def test_the_default_policy_keeps_what_has_priority_through_the_whole_service() -> None:
    settings = ClusterSettings(
        workers=1, worker=WorkerSettings(engine=MODELS[0]), tiers=TierSettings(host_bytes=120_000, policy="default")
    )
    with LocalCluster(settings) as cluster:
        first = some_prompt(100)
        serve(cluster, first, hints=Hints(priority=1))
        for seed in range(1, 8):
            serve(cluster, some_prompt(100, seed=seed))
        longer = np.concatenate([first, some_prompt(9, seed=99)])
        place = cluster.router.place(cluster.namespace, Prompt(longer), 200, deadline_s=DEADLINE_S)
        assert place.restored_tokens == 100
