"""Copies ahead of need: what leaves memory is on disk already, and nothing is decided otherwise than without them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from spilling import (
    IDENTITY,
    MIXED,
    NO_HINTS,
    ROWS,
    WINDOW,
    Clock,
    LyingTier,
    State,
    SteppedExecutor,
    chain_of,
    check_books,
    held,
    match,
    node,
    open_disk,
    open_host,
    restore,
    some_tokens,
    spill,
)

from tiered_cache.cache import Kept, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.errors import MissReason
from tiered_cache.geometry import Geometry
from tiered_cache.identity import Tokens
from tiered_cache.policy.names import POLICIES, build_policy
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.tiers.base import Durability, PutItem, PutOutcome, Reservation
from tiered_cache.tiers.wrappers import WrappedTier

HOST, DISK, _ = Durability
HOST_BYTES, DISK_BYTES = 90_000, 360_000


class CountingTier(WrappedTier):
    """Counts what is put."""

    puts = 0

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        self.puts += len(items)
        return super().put(items, reservation)


def restored(cache: TieredCache, tokens: Tokens) -> str | MissReason | None:
    """The slowest tier that a prompt comes from, every byte compared; or why it does not."""
    found = match(cache, MIXED, np.append(tokens, tokens[:1]))
    if found.hit is None:
        return found.reason
    restore(cache, MIXED, found.hit, tokens)
    return found.hit.tier


def test_what_is_copied_ahead_needs_no_writing_when_it_has_to_go(tmp_path: Path) -> None:
    disk, ahead = CountingTier(open_disk(tmp_path)), SteppedExecutor()
    prompts = [some_tokens(9, seed) for seed in range(40)]
    with node(open_host(HOST_BYTES), disk, ahead=ahead) as cache:
        written = []
        for prompt in prompts:
            before = disk.puts
            assert spill(cache, State(MIXED, prompt)).kept == [Kept(9, HOST)]
            written.append(disk.puts - before)
            ahead.step()
            check_books(cache)
        counters = cache.counters()
        assert counters["dropped.host.moved"] > 8
        assert counters["ahead.disk.used"] == counters["frames.disk.put"] == counters["frames.host.moved"]
        assert not any(written[1:])  # the first one wrote the descriptor
        assert {restored(cache, prompt) for prompt in prompts} == {"host", "disk"}


@pytest.mark.parametrize(
    ("policy", "geometry"),
    [*((policy, MIXED) for policy in POLICIES), *((p, g) for p in ("lru", "default") for g in (ROWS, WINDOW))],
)
def test_decisions_are_the_same_with_copies_and_without(policy: str, geometry: Geometry, tmp_path: Path) -> None:
    ahead, rng = SteppedExecutor(), np.random.default_rng(3)
    clock = Clock()
    with ThreadPoolExecutor(1) as executor:
        caches = []
        for name, copier in (("with", ahead), ("without", None)):
            slots = [
                TierSlot(open_host(HOST_BYTES), build_policy(policy, 1)),
                TierSlot(open_disk(tmp_path / name, DISK_BYTES), build_policy(policy, 2), Mode.FAST),
            ]
            caches.append(TieredCache(slots, executor, ahead=copier, clock=clock))
            caches[-1].register(IDENTITY, geometry)
        for _ in range(80):
            clock.now_s += 1
            tokens = np.concatenate([some_tokens(8, int(rng.integers(8))), some_tokens(5, int(rng.integers(40)))])
            seen = []
            for cache in caches:
                looked_up = cache.match(chain_of(geometry, tokens), NO_HINTS)
                stops = sorted({*looked_up.take_at, len(tokens)})
                spill(cache, State(geometry, tokens), *stops, request=looked_up.request)
                hit = looked_up.hit and (looked_up.hit.tokens, looked_up.hit.tier)
                seen.append((hit, looked_up.reason, looked_up.take_at, held(cache, "host"), held(cache, "disk")))
            assert seen[0] == seen[1]
            ahead.step()
        figures = [cache.counters() for cache in caches]
        dropped = [{name: n for name, n in each.items() if name.startswith("dropped")} for each in figures]
        assert dropped[0] == dropped[1]
        assert figures[0]["dropped.host.moved"]
        if geometry is MIXED:
            assert figures[0]["dropped.disk.evicted"]
            assert figures[0]["ahead.disk.used"] or policy == "s3fifo"
        for cache in caches:
            cache.close()


def test_a_copy_that_is_not_sound_is_set_aside_and_written_again(tmp_path: Path) -> None:
    disk, ahead = LyingTier(open_disk(tmp_path)), SteppedExecutor()
    prompts = [some_tokens(9, seed) for seed in range(50)]
    with node(open_host(HOST_BYTES), disk, ahead=ahead) as cache:
        for prompt in prompts[:25]:
            spill(cache, State(MIXED, prompt))
            ahead.step()
        assert cache.counters()["quarantined.disk"] > 0
        assert not any(name.tokens == 4 for name in cache._levels[1].staged)
        disk.lies = False
        for prompt in prompts[25:]:
            spill(cache, State(MIXED, prompt))
            ahead.step()
        assert {restored(cache, prompt) for prompt in prompts[25:]} == {"host", "disk"}


@pytest.mark.parametrize("call", ["reserve", "put", "delete", "usage"])
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LOST_ANSWER, Fault.FULL])
def test_after_a_fault_while_copying_the_books_balance(call: str, fault: Fault, tmp_path: Path) -> None:
    disk, ahead = FaultyTier(open_disk(tmp_path, DISK_BYTES)), SteppedExecutor()
    with node(open_host(HOST_BYTES), disk, ahead=ahead) as cache:
        for seed in range(40):
            spill(cache, State(MIXED, some_tokens(9, seed)))
            if seed % 3 == 0:
                disk.inject(call, fault)
            ahead.step()
            disk._next.clear()
            cache._levels[1].tidy()
            check_books(cache)


def test_a_suspended_sequence_gets_its_own_bytes_where_anothers_are_copied(tmp_path: Path) -> None:
    ahead = SteppedExecutor()
    with node(open_host(HOST_BYTES), open_disk(tmp_path), ahead=ahead) as cache:
        prompts = [some_tokens(9, seed) for seed in range(20)]
        for prompt in prompts:
            spill(cache, State(MIXED, prompt))
            ahead.step()
        staged = {name.prefix for name in cache._levels[1].staged}
        prompt = next(p for p in prompts if chain_of(MIXED, p).prefix_hash(9) in staged)
        own = State(MIXED, prompt, lineage=99)
        spill(cache, own, private=True, durability=DISK)
        hit = cache.plan_of(own.offer(private=True), pin_s=10.0)
        assert hit is not None
        restore(cache, MIXED, hit, prompt, own=own.offer(private=True))


def test_copies_of_what_has_gone_go_when_room_for_others_is_needed(tmp_path: Path) -> None:
    ahead = SteppedExecutor()
    with node(open_host(HOST_BYTES), open_disk(tmp_path), ahead=ahead) as cache:
        for seed in range(20):
            spill(cache, State(MIXED, some_tokens(9, seed)))
            ahead.step()
        host, disk = cache._levels
        first = set(disk.staged)
        assert first
        host.drop([(prefix, "expired") for prefix in list(host.view)])  # type: ignore[misc]
        for seed in range(30, 60):
            spill(cache, State(MIXED, some_tokens(9, seed)))
            ahead.step()
            ahead.step()
        assert disk.staged
        assert not first & disk.staged.keys()


def test_copies_are_made_on_a_thread_of_their_own_and_end_with_the_cache(tmp_path: Path) -> None:
    prompts = [some_tokens(9, seed) for seed in range(60)]
    with (
        ThreadPoolExecutor(1) as ahead,
        node(open_host(HOST_BYTES), open_disk(tmp_path), ahead=ahead, checked=False) as cache,
    ):
        for prompt in prompts:
            spill(cache, State(MIXED, prompt))
        cache.close()
        assert not cache._ahead_runs
    with node(open_host(HOST_BYTES), open_disk(tmp_path)) as again:
        assert {restored(again, prompt) for prompt in prompts} <= {"disk", MissReason.NOT_STORED}
