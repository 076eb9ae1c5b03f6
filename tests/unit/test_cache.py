"""`TieredCache` without an engine: what goes in comes out, what is acknowledged stays, and the books balance."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from spilling import (
    BLOCK,
    GEOMETRIES,
    IDENTITY,
    MIXED,
    NO_HINTS,
    ROWS,
    SHARDED,
    WINDOW,
    Clock,
    HookedTier,
    LyingTier,
    State,
    chain_of,
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

from tiered_cache.cache import Bytes, DeclineReason, Hit, Kept, TieredCache, TierSlot
from tiered_cache.errors import (
    FrameError,
    GeometryError,
    IdentityError,
    MissReason,
    StaleError,
    StateError,
    TieredCacheError,
    TierError,
)
from tiered_cache.geometry import Geometry
from tiered_cache.identity import CHECKPOINT, FrameKey, PrefixChain, Tokens
from tiered_cache.index import FrameName, RemovalReason
from tiered_cache.namespace import Namespace, descriptor_path
from tiered_cache.policy.base import Hints
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.prefix_tree import plain_name
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.tiers.base import Durability, GetRequest, PutItem, Tier
from tiered_cache.tiers.disk import DiskTier

HOST, DISK, OBJECT = Durability

# Round trips


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES.keys())
@pytest.mark.parametrize("durability", [HOST, DISK])
def test_what_was_spilled_is_restored_at_block_ends_and_inside_blocks(
    geometry: Geometry, durability: Durability, tmp_path: Path
) -> None:
    tokens = some_tokens(5 * BLOCK + 2)
    with node(open_host(), open_disk(tmp_path), geometries=[geometry]) as cache:
        for rank in range(geometry.shards):
            done = spill(cache, State(geometry, tokens, rank=rank), 2, 8, 13, 22, durability=durability)
            assert [kept.tokens for kept in done.kept] == [2, 8, 13, 22]
            assert {kept.durability for kept in done.kept} == {durability}
        stored = set().union(*(expected_frames(geometry, n) for n in (2, 8, 13, 22)))
        reachable = {n for n in range(1, 23) if expected_frames(geometry, n) <= stored}
        for length in range(1, len(tokens) + 2):
            longer = np.concatenate([tokens, some_tokens(9, seed=1)])[: length + 1]
            found = match(cache, geometry, longer)
            wanted = max((n for n in reachable if n <= length), default=0)
            assert (found.hit.tokens if found.hit else 0) == wanted
            if found.hit:
                assert found.hit.tier == "host"
                restore(cache, geometry, found.hit, longer)


def test_a_prefix_is_stored_once_and_only_what_is_new_is_asked_for() -> None:
    tokens, other = some_tokens(20), np.concatenate([some_tokens(12), some_tokens(8, seed=2)])
    with node(open_host()) as cache:
        first = spill(cache, State(MIXED, tokens))
        assert sorted((k.group, k.tokens) for k in first.grant.keys) == [
            (CHECKPOINT, 20),
            *[("rows", n) for n in (4, 8, 12, 16, 20)],
        ]
        second = spill(cache, State(MIXED, other, lineage=9), 12, 20)
        assert [(k.group, k.tokens) for k in second.grant.keys] == [
            (CHECKPOINT, 12),
            ("rows", 16),
            ("rows", 20),
            (CHECKPOINT, 20),
        ]
        assert all(receipt.created and receipt.durability is HOST for receipt in second.receipts)
        assert spill(cache, State(MIXED, other, lineage=9), 12, 20).grant.keys == ()
        for prompt in (tokens, other):
            found = match(cache, MIXED, np.append(prompt, prompt[:1]))
            assert found.hit is not None
            assert found.hit.tokens == 20
            lineages = {
                d.key.tokens: d.lineage for d in restore(cache, MIXED, found.hit, prompt) if d.key.group == "rows"
            }
            assert set(lineages.values()) == ({7} if prompt is tokens else {7, 9})


def test_the_deepest_tail_wins_under_whichever_block_it_hangs() -> None:
    tokens = some_tokens(20)
    with node(open_host()) as cache:
        spill(cache, State(MIXED, tokens), 5, 6, 7, 11)
        for length, wanted in ((20, 11), (11, 7), (8, 7), (7, 6), (6, 5), (5, 0)):
            hit = match(cache, MIXED, tokens[:length]).hit
            assert (hit.tokens if hit else 0) == wanted
        turned = np.concatenate([tokens[:10], some_tokens(10, seed=3)])  # the block of the tail at 11 is another one
        found = match(cache, MIXED, turned)
        assert found.hit is not None
        assert found.hit.tokens == 7


def test_a_window_is_restored_from_its_last_blocks_alone() -> None:
    tokens = some_tokens(40)
    with node(open_host(), geometries=[WINDOW]) as cache:
        done = spill(cache, State(WINDOW, tokens), 38)
        windows = [key.tokens for key in done.grant.keys if key.group.startswith("window")]
        assert windows == [36]  # the window of 6 before 38 begins in the block that ends at 36
        hit = match(cache, WINDOW, tokens).hit
        assert hit is not None
        restore(cache, WINDOW, hit, tokens)


def test_a_set_is_complete_when_every_shard_is_there() -> None:
    tokens = some_tokens(12)
    longer = np.append(tokens, tokens[:1])
    with node(open_host(), geometries=[SHARDED]) as cache:
        spill(cache, State(SHARDED, tokens, rank=1))
        assert match(cache, SHARDED, longer).reason is MissReason.SHARD_MISSING
        spill(cache, State(SHARDED, tokens, rank=0, lineage=8))  # another group has raced: each heals the other
        hit = match(cache, SHARDED, longer).hit
        assert hit is not None
        assert {d.key.rank: d.lineage for d in restore(cache, SHARDED, hit, tokens)} == {0: 8, 1: 7}
        cache._levels[0].tier.delete([hit.frames[0].key.path()])
        cache.fetch([hit.frames[0].key], 1 << 20)
        assert match(cache, SHARDED, longer).reason is MissReason.LOST


def test_an_unknown_namespace_is_a_miss_and_a_spill_into_it_is_refused() -> None:
    state = State(ROWS, some_tokens(8))
    with node(open_host()) as cache:
        assert match(cache, ROWS, some_tokens(8)).reason is MissReason.NAMESPACE
        with pytest.raises(IdentityError, match="not registered"):
            spill(cache, state)
        with pytest.raises(IdentityError, match="not registered"):
            cache.kept(state.offer())
        assert cache.geometry_of(state.chain.namespace) is None
        assert cache.fetch([state.chain.key("rows", 4, 0)], 100) == [MissReason.LOST]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"block_tokens": 8}, "block_tokens"),
        ({"rank": 1}, "rank 1"),
        ({"hashes": (b"x" * 32,) * 6}, "root"),
        ({"lineages": (1, 2)}, "2 lineages of 5 blocks"),
        ({"checkpoints": ((20, b"a" * 32), (12, b"b" * 32))}, "not ascending"),
        ({"checkpoints": ((24, b"a" * 32),)}, "24 tokens and only 5 blocks"),
        ({"checkpoints": ((20, b"a" * 32),)}, "another hash"),
        ({"checkpoints": ((19, b"a" * 31),)}, "not 32 bytes"),
        ({"private": True, "lineage": 0}, "no known lineage"),
    ],
)
def test_what_cannot_be_an_offer_is_refused(change: dict[str, object], named: str) -> None:
    with node(open_host()) as cache:
        offer = replace(State(MIXED, some_tokens(20)).offer(), **change)  # type: ignore[arg-type]
        with pytest.raises(IdentityError, match=named):
            cache.admit(offer, HOST, NO_HINTS)
        empty = replace(State(MIXED, some_tokens(20)).offer(), checkpoints=())
        assert cache.admit(empty, HOST, NO_HINTS).keys == ()
        assert cache.kept(empty) == []
        assert cache.plan_of(empty, pin_s=1.0) is None


def test_a_key_that_no_frame_has_takes_nothing_from_those_that_are_there() -> None:
    tokens = some_tokens(12)
    with node(open_host(), geometries=[MIXED]) as cache:
        spill(cache, State(MIXED, tokens))
        before = held(cache, "host")
        key = chain_of(MIXED, tokens).key("rows", 8, 0)
        wrong = [replace(key, **change) for change in ({"rank": 1}, {"parent": b"x" * 32}, {"tokens": 4})]
        assert cache.fetch(wrong, 1 << 20) == [MissReason.LOST] * 3
        assert held(cache, "host") == before


# Durability, and what is acknowledged


def test_kept_tells_what_each_checkpoint_would_survive(tmp_path: Path) -> None:
    tokens = some_tokens(20)
    with node(open_host(), open_disk(tmp_path)) as cache:
        assert spill(cache, State(MIXED, tokens), 12).kept == [Kept(12, HOST)]
        done = spill(cache, State(MIXED, tokens), 16, durability=DISK)
        assert done.kept == [Kept(16, DISK)]
        assert {receipt.durability for receipt in done.receipts} == {HOST, DISK}
        assert cache.kept(State(MIXED, tokens).offer(12, 16, 20)) == [Kept(12, HOST), Kept(16, DISK)]
        assert match(cache, MIXED, tokens).hit.tier == "host"  # type: ignore[union-attr]


def test_a_disk_alone_serves_host_durability_and_nothing_serves_more(tmp_path: Path) -> None:
    with node(open_disk(tmp_path)) as cache:
        assert spill(cache, State(MIXED, some_tokens(9))).kept == [Kept(9, DISK)]
        done = spill(cache, State(MIXED, some_tokens(9, seed=1)), durability=OBJECT)
        assert done.grant.declined == ((9, DeclineReason.NO_TIER),)
        assert done.kept == []
        assert cache.counters()["declined.no_tier"] == 1


def test_what_no_policy_wants_is_declined_with_a_reason() -> None:
    tokens = some_tokens(20)
    with node(open_host()) as cache:
        looked_up = match(cache, MIXED, tokens)
        done = spill(cache, State(MIXED, tokens), 9, 20, request=looked_up.request)
        assert done.grant.declined == ((9, DeclineReason.NOT_ASKED_FOR),)
        assert done.kept == [Kept(20, HOST)]
        branch = match(cache, MIXED, np.concatenate([tokens[:13], tokens[:5]]))
        assert branch.take_at == (12,)
        state = State(MIXED, np.concatenate([tokens[:13], tokens[:5]]))
        over = Hints(will_not_return=True)
        done = spill(cache, state, 5, 12, 18, request=branch.request, hints=over)
        assert done.grant.declined == ((5, DeclineReason.NOT_ASKED_FOR), (18, DeclineReason.SESSION_OVER))
        assert done.kept == [Kept(12, HOST)]


def test_what_has_no_room_is_declined_and_nothing_is_dropped_for_it() -> None:
    with node(open_host(12_000)) as cache:
        assert spill(cache, State(MIXED, some_tokens(5))).kept
        before = held(cache, "host")
        done = spill(cache, State(MIXED, some_tokens(80, seed=1)))
        assert done.grant.declined == ((80, DeclineReason.TOO_LARGE),)
        assert (done.grant.keys, done.kept, held(cache, "host")) == ((), [], before)


def test_what_is_too_large_for_a_tier_goes_to_the_first_that_can_hold_it(tmp_path: Path) -> None:
    tokens = some_tokens(80)
    with node(open_host(16_000), open_disk(tmp_path)) as cache:
        assert spill(cache, State(MIXED, some_tokens(9, seed=1))).kept == [Kept(9, HOST)]
        before = held(cache, "host")
        done = spill(cache, State(MIXED, tokens), 9, 80)
        assert (done.grant.declined, done.kept) == ((), [Kept(9, HOST), Kept(80, DISK)])
        assert held(cache, "host").keys() > before.keys()
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        assert (hit.tokens, hit.tier) == (80, "disk")
        restore(cache, MIXED, hit, tokens)
        assert spill(cache, State(MIXED, some_tokens(80, seed=2)), private=True).kept == [Kept(80, DISK)]


# Pressure


def fill(cache: TieredCache, count: int, *, durability: Durability = HOST, tokens: int = 9) -> list[Tokens]:
    prompts = [some_tokens(tokens, seed=100 + n) for n in range(count)]
    for prompt in prompts:
        spill(cache, State(MIXED, prompt), durability=durability)
    return prompts


def test_what_leaves_host_memory_is_on_disk_before(tmp_path: Path) -> None:
    with node(open_host(20_000), open_disk(tmp_path)) as cache:
        prompts = fill(cache, 12)
        tiers = set()
        for prompt in prompts:
            hit = match(cache, MIXED, np.append(prompt, prompt[:1])).hit
            assert hit is not None
            tiers.add(hit.tier)
            restore(cache, MIXED, hit, prompt)
        assert tiers == {"host", "disk"}
        counters = cache.counters()
        assert counters["dropped.host.moved"] == counters["frames.disk.put"] // 3
        assert "dropped.host.evicted" not in counters


def test_what_was_moved_is_read_before_anyone_relies_on_it(tmp_path: Path) -> None:
    tokens, disk = some_tokens(9), LyingTier(open_disk(tmp_path))
    with node(open_host(), disk) as cache:
        spill(cache, State(MIXED, tokens))
        cache.trim("host", 1)
        found = match(cache, MIXED, np.append(tokens, tokens[:1]))
        assert (found.hit, found.reason) == (None, MissReason.EVICTED)
        assert cache.counters()["dropped.host.evicted"] == 1
        cache.trim("host", 1 << 20)
        disk.lies = False
        spill(cache, State(MIXED, tokens))
        cache.trim("host", 1)
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        restore(cache, MIXED, hit, tokens)


def test_what_cannot_be_restored_is_not_moved(tmp_path: Path) -> None:
    with node(open_host(), open_disk(tmp_path), geometries=[SHARDED]) as cache:
        spill(cache, State(SHARDED, some_tokens(9), rank=1))
        cache.trim("host", 1)
        assert (held(cache, "host"), held(cache, "disk")) == ({}, {})
        assert not cache.counters().keys() & {"frames.disk.put", "errors.disk.demote"}


def test_without_a_tier_below_what_leaves_is_gone_and_the_miss_says_so() -> None:
    with node(open_host(20_000)) as cache:
        prompts = fill(cache, 12)
        reasons = {match(cache, MIXED, np.append(prompt, prompt[:1])).reason for prompt in prompts}
        assert reasons == {None, MissReason.EVICTED}
        check_books(cache)


class Watch:
    """Looks at every tier's usage whenever one is called, from any thread."""

    def __init__(self, *tiers: Tier) -> None:
        self.tiers = tiers
        self.peaks = {tier.name: 0 for tier in tiers}
        self.over: list[object] = []

    def look(self) -> None:
        for tier in self.tiers:
            usage = tier.usage()
            bytes_ = usage.bytes_used + usage.bytes_reserved + usage.bytes_quarantined
            self.peaks[tier.name] = max(self.peaks[tier.name], bytes_)
            if bytes_ > usage.bytes_max:
                self.over.append(usage)


def test_no_budget_is_exceeded_at_any_moment_and_no_frame_is_in_neither_place(tmp_path: Path) -> None:
    host, disk = open_host(30_000), open_disk(tmp_path, 4 << 20)
    watch, stop = Watch(host, disk), threading.Event()
    seen: list[BaseException] = []
    acknowledged: list[Tokens] = []
    with node(host, disk) as cache:

        def watching() -> None:
            while not stop.is_set():
                watch.look()

        def reading() -> None:
            rng = np.random.default_rng(threading.get_ident() % 1000)
            try:
                while not stop.is_set():
                    if acknowledged:
                        prompt = acknowledged[rng.integers(len(acknowledged))]
                        hit = match(cache, MIXED, np.append(prompt, prompt[:1])).hit
                        assert hit is not None
                        restore(cache, MIXED, hit, prompt)
            except BaseException as error:  # noqa: BLE001 - for the main thread
                seen.append(error)

        def writing(first: int) -> None:
            try:
                for n in range(first, first + 15):
                    prompt = some_tokens(6 + n % 9, seed=n)
                    done = spill(cache, State(MIXED, prompt))
                    if done.kept:
                        acknowledged.append(prompt)
                    assert done.kept or done.grant.declined  # both others had the room reserved
            except BaseException as error:  # noqa: BLE001
                seen.append(error)

        others = [threading.Thread(target=target) for target in (watching, reading, reading)]
        writers = [threading.Thread(target=writing, args=(first,)) for first in (0, 1000, 2000)]
        for thread in (*others, *writers):
            thread.start()
        for thread in writers:
            thread.join(60)
        stop.set()
        for thread in others:
            thread.join(60)
        assert not seen
        assert not watch.over
        assert watch.peaks["host"] > 20_000
        assert len(acknowledged) > 30
        assert cache.counters()["dropped.host.moved"] > 10


def test_pinned_checkpoints_stay_and_a_spill_without_room_is_declined(tmp_path: Path) -> None:
    clock = Clock()
    with node(open_host(16_000), clock=clock) as cache:
        prompts = [some_tokens(9, seed=n) for n in range(2)]
        for prompt in prompts:
            assert spill(cache, State(MIXED, prompt)).kept
        hits = [match(cache, MIXED, np.append(prompt, prompt[:1]), pin_s=10.0).hit for prompt in prompts]
        for n in range(5, 8):
            done = spill(cache, State(MIXED, some_tokens(9, seed=n)))
            assert done.grant.declined == ((9, DeclineReason.NOT_WORTH_ITS_ROOM),)
        for prompt, hit in zip(prompts, hits, strict=True):
            assert hit is not None
            restore(cache, MIXED, hit, prompt)
        assert hits[0] is not None
        assert hits[0].pin is not None
        assert cache.unpin(hits[0].pin)
        assert not cache.unpin(hits[0].pin)
        assert spill(cache, State(MIXED, some_tokens(9, seed=9))).kept
        assert match(cache, MIXED, np.append(prompts[1], prompts[1][:1])).hit
        clock.now_s += 11  # the pin's holder has died
        assert spill(cache, State(MIXED, some_tokens(9, seed=10))).kept
        assert spill(cache, State(MIXED, some_tokens(9, seed=11))).kept
        assert match(cache, MIXED, np.append(prompts[1], prompts[1][:1])).reason is MissReason.EVICTED
        assert hits[1] is not None
        assert hits[1].pin is not None
        assert not cache.unpin(hits[1].pin)
        assert not cache._pins


def test_pins_that_nobody_ends_are_forgotten() -> None:
    clock, tokens = Clock(), some_tokens(9)
    with node(open_host(), clock=clock) as cache:
        spill(cache, State(MIXED, tokens))
        for _ in range(50):
            assert match(cache, MIXED, np.append(tokens, tokens[:1]), pin_s=5.0).hit
            clock.now_s += 1
        assert len(cache._pins) <= 6
        assert len(cache._pin_ends) <= 6


@pytest.mark.parametrize("bytes_max", [40_000, 0])
def test_a_smaller_limit_shrinks_first(bytes_max: int, tmp_path: Path) -> None:
    with node(open_host(80_000), open_disk(tmp_path)) as cache:
        prompts = fill(cache, 10)
        cache.trim("host", bytes_max)
        assert cache.usage()["host"].bytes_free >= 0
        assert cache.usage()["host"].bytes_max == bytes_max
        for prompt in prompts:
            hit = match(cache, MIXED, np.append(prompt, prompt[:1])).hit
            assert hit is not None
            restore(cache, MIXED, hit, prompt)
        assert spill(cache, State(MIXED, some_tokens(9, seed=1))).kept == [Kept(9, HOST if bytes_max else DISK)]


def test_requests_between_look_up_and_spill_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_cache.cache.RUNNING_TOKENS_MAX", 10 << 10)
    tokens = some_tokens(20)
    with node(open_host()) as cache:
        first = match(cache, MIXED, tokens)
        for n in range(20):
            match(cache, MIXED, some_tokens(20, seed=n))
        assert len(cache._running) == 10
        assert spill(cache, State(MIXED, tokens), 9, 20, request=first.request).grant.declined == ()


# After a restart


def start_again(
    directory: Path, spilling: Callable[[TieredCache], None], bytes_max: int = 8 << 20, *, checked: bool = True
) -> AbstractContextManager[TieredCache]:
    """A second life on the same disk, which knows of no namespace but what the disk tells."""
    with node(open_host(), open_disk(directory), geometries=GEOMETRIES.values(), checked=False) as cache:
        spilling(cache)
    return node(open_host(), open_disk(directory, bytes_max), geometries=(), checked=checked)


def test_a_restart_finds_everything_that_was_acknowledged_on_disk(tmp_path: Path) -> None:
    prompts = [some_tokens(length, seed=length) for length in (3, 8, 9, 22)]
    listed = {}

    def spilling(cache: TieredCache) -> None:
        for geometry in GEOMETRIES.values():
            for prompt in prompts:
                for rank in range(geometry.shards):
                    assert spill(cache, State(geometry, prompt, rank=rank), durability=DISK).kept
        spill(cache, State(MIXED, some_tokens(9, seed=1)))
        listed.update(held(cache, "disk"))

    with start_again(tmp_path, spilling) as cache:
        assert held(cache, "disk") == listed
        assert cache.counters()["frames.disk.found"] == len(listed)
        for geometry in GEOMETRIES.values():
            assert cache.geometry_of(chain_of(geometry, prompts[0]).namespace) == geometry
            for prompt in prompts:
                hit = match(cache, geometry, np.append(prompt, prompt[:1])).hit
                assert hit is not None
                assert (hit.tokens, hit.tier) == (len(prompt), "disk")
                restore(cache, geometry, hit, prompt)
        assert match(cache, MIXED, some_tokens(10, seed=1)).hit is None  # it was in memory


def test_a_restart_leaves_alone_what_it_does_not_know_and_counts_it(tmp_path: Path) -> None:
    tokens = some_tokens(9)
    chain = chain_of(MIXED, tokens)
    elsewhere = PrefixChain(b"e" * 32, BLOCK, tokens).key("rows", 4, 0).path()
    contradicting = replace(chain.key("rows", 8, 0), parent=b"p" * 32, tokens=4).path()
    foreign = ["something/else", elsewhere, contradicting]

    def spilling(cache: TieredCache) -> None:
        spill(cache, State(MIXED, tokens), durability=DISK)
        disk = cache._levels[1].tier
        with disk.reserve([5] * 3) as room:
            disk.put([PutItem(path, [b"bytes"]) for path in foreign], room)
        orphan = chain_of(ROWS, tokens).namespace  # its descriptor is torn
        path = disk.file_of(descriptor_path(orphan))  # type: ignore[attr-defined]
        path.write_bytes(path.read_bytes()[:-1])
        spill(cache, State(ROWS, tokens), 4, durability=DISK)

    with start_again(tmp_path, spilling, checked=False) as cache:
        counters = cache.counters()
        assert counters["recovered.disk.foreign"] == 2
        assert counters["recovered.disk.unknown"] == 2
        assert counters["recovered.disk.bad_descriptor"] == 1
        assert match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert match(cache, ROWS, tokens).reason is MissReason.NAMESPACE
        assert cache._levels[1].tier.stat(foreign) == [5, 5, 5]
        cache.register(IDENTITY, ROWS)  # writes the descriptor again, and finds the frames
        hit = match(cache, ROWS, tokens).hit
        assert hit is not None
        restore(cache, ROWS, hit, tokens)
        assert cache.counters()["descriptors.disk.quarantined"] == 1


def test_what_a_tier_holds_that_did_not_answer_at_the_start_is_found_later(tmp_path: Path) -> None:
    clock, tokens = Clock(), some_tokens(9)
    with node(open_host(), open_disk(tmp_path), checked=False) as before:
        spill(before, State(MIXED, tokens), durability=DISK)
    disk = FaultyTier(open_disk(tmp_path))
    with ThreadPoolExecutor(1) as executor:
        cache = TieredCache([TierSlot(open_host(), LruPolicy()), TierSlot(disk, LruPolicy())], executor, clock=clock)
        disk.inject("list", Fault.ERROR)
        with pytest.raises(TierError):
            cache.recover()
        disk.inject("list", Fault.ERROR)
        assert cache.recover(later=True) == 0
        cache.register(State(MIXED, tokens).identity, MIXED)
        own = State(MIXED, some_tokens(13, seed=1), lineage=9)
        assert spill(cache, own, durability=DISK, private=True).kept  # what is there meanwhile stays as it is
        assert match(cache, MIXED, np.append(tokens, tokens[:1])).hit is None
        hit = cache.plan_of(own.offer(private=True), pin_s=60.0)
        disk.inject("list", Fault.ERROR)
        for _ in range(2):
            clock.now_s += 11
            spill(cache, State(MIXED, some_tokens(5, seed=2)))
        assert cache.counters()["errors.disk.list"] == 3
        found = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert found is not None
        restore(cache, MIXED, found, tokens)
        assert hit is not None
        restore(cache, MIXED, hit, own.tokens, own=own.offer(private=True))
        check_books(cache)
        cache.close()


def test_the_rest_of_a_spill_that_was_cut_off_is_deleted(tmp_path: Path) -> None:
    tokens = some_tokens(22)

    def spilling(cache: TieredCache) -> None:
        spill(cache, State(MIXED, tokens), 9, 22, durability=DISK)
        cache._levels[1].tier.delete([chain_of(MIXED, tokens).key(CHECKPOINT, 22, 0).path()])

    with start_again(tmp_path, spilling) as cache:
        assert sorted((name.group, name.tokens) for name in held(cache, "disk")) == [
            (CHECKPOINT, 9),
            ("rows", 4),
            ("rows", 8),
        ]
        assert cache.counters()["frames.disk.abandoned"] == 3


def test_a_restart_with_half_the_budget_shrinks_first(tmp_path: Path) -> None:
    prompts = [some_tokens(9, seed=n) for n in range(20)]

    def spilling(cache: TieredCache) -> None:
        for prompt in prompts:
            spill(cache, State(MIXED, prompt), durability=DISK)
        spilled.append(cache.usage()["disk"].bytes_used)

    spilled: list[int] = []
    with start_again(tmp_path, spilling, 160_000) as cache:
        assert spilled[0] > 200_000
        assert cache.usage()["disk"].bytes_free >= 0
        hits = [match(cache, MIXED, np.append(prompt, prompt[:1])).hit for prompt in prompts]
        assert 5 < sum(hit is not None for hit in hits) < 15
        for prompt, hit in zip(prompts, hits, strict=True):
            if hit:
                restore(cache, MIXED, hit, prompt)


# Bad bytes


def flip(tier: Tier, path: str, at: float = 0.5) -> None:
    """Change one bit of an entry where it lies."""
    if isinstance(tier, DiskTier):
        body = bytearray(tier.file_of(path).read_bytes())
        body[int(at * (len(body) - 1))] ^= 4
        tier.file_of(path).write_bytes(body)
        return
    (view,) = tier.get([GetRequest(path)])
    assert isinstance(view, memoryview)
    address = np.frombuffer(view, np.uint8).ctypes.data + int(at * (view.nbytes - 1))
    ctypes.c_uint8.from_address(address).value ^= 4


def cut(tier: Tier, path: str) -> None:
    assert isinstance(tier, DiskTier)
    body = tier.file_of(path).read_bytes()
    tier.file_of(path).write_bytes(body[:-64])


def swap(tier: Tier, path: str) -> None:
    """Another sound frame lies under this name."""
    assert isinstance(tier, DiskTier)
    other = next(entry.path for entry in tier.list() if "-rows-4-" in entry.path and entry.path != path)
    tier.file_of(path).write_bytes(tier.file_of(other).read_bytes())


DAMAGE = {
    "header": ("disk", lambda tier, path: flip(tier, path, 0.0)),
    "body": ("disk", flip),
    "last byte": ("disk", lambda tier, path: flip(tier, path, 1.0)),
    "cut": ("disk", cut),
    "swapped": ("disk", swap),
    "memory": ("host", flip),
}


@pytest.mark.parametrize(("tier", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize(("bad", "left"), [(("rows", 8), 0), (("rows", 20), 9), ((CHECKPOINT, 22), 9)])
def test_bad_bytes_are_refused_set_aside_and_nothing_else_suffers(
    tier: str, damage: Callable[[Tier, str], None], bad: tuple[str, int], left: int, tmp_path: Path
) -> None:
    tokens, other = some_tokens(22), some_tokens(13, seed=1)
    with node(open_host() if tier == "host" else open_disk(tmp_path)) as cache:
        place = cache._levels[0].tier
        spill(cache, State(MIXED, tokens), 9, 22)
        spill(cache, State(MIXED, other))
        key = chain_of(MIXED, tokens).key(*bad, 0)
        damage(place, key.path())
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        with pytest.raises((FrameError, IdentityError)):
            restore(cache, MIXED, hit, tokens)
        cache.report_bad(key, "as the test says")
        found = match(cache, MIXED, np.append(tokens, tokens[:1]))
        assert (found.hit.tokens if found.hit else 0) == left
        assert found.reason is MissReason.QUARANTINED
        counters = cache.counters()
        assert counters[f"frames.{tier}.quarantined"] == counters[f"quarantined.{tier}"] == 1
        assert [entry.path for entry in place.quarantined()] == [key.path()]
        if found.hit:
            restore(cache, MIXED, found.hit, tokens)
        hit = match(cache, MIXED, np.append(other, other[:1])).hit
        assert hit is not None
        restore(cache, MIXED, hit, other)
        assert spill(cache, State(MIXED, tokens)).kept
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        restore(cache, MIXED, hit, tokens)


def test_a_file_that_has_grown_beyond_all_memory_is_a_bad_frame(tmp_path: Path) -> None:
    tokens = some_tokens(9)
    with node(open_disk(tmp_path)) as cache:
        place = cache._levels[0].tier
        assert isinstance(place, DiskTier)
        spill(cache, State(MIXED, tokens))
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        key = hit.frames[0].key
        os.truncate(place.file_of(key.path()), 1 << 42)
        with pytest.raises(FrameError):
            restore(cache, MIXED, hit, tokens)
        cache.report_bad(key, "as the test says")
        assert cache.counters()["quarantined.disk"] == 1
        assert place.usage().bytes_quarantined == 0, "no quarantine has room for it"
        assert spill(cache, State(MIXED, tokens)).kept
        assert place.usage().bytes_used == sum(place.footprint(entry.bytes) for entry in place.list())


def test_a_report_about_a_sound_frame_changes_nothing(tmp_path: Path) -> None:
    tokens = some_tokens(9)
    with node(open_host(), open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, tokens), durability=DISK)
        before = held(cache, "host"), held(cache, "disk")
        cache.report_bad(chain_of(MIXED, tokens).key("rows", 4, 0), "the transport flipped a bit")
        assert (held(cache, "host"), held(cache, "disk")) == before
        assert cache.counters()["reported"] == 1


def test_the_copy_in_the_next_tier_is_served_when_one_is_bad(tmp_path: Path) -> None:
    tokens = some_tokens(9)
    key = chain_of(MIXED, tokens).key("rows", 4, 0)
    with node(open_host(), open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, tokens), durability=DISK)
        flip(cache._levels[0].tier, key.path())
        cache.report_bad(key, "checksum")
        found = match(cache, MIXED, np.append(tokens, tokens[:1]))
        assert found.hit is not None
        assert (found.hit.tier, found.reason) == ("disk", None)
        restore(cache, MIXED, found.hit, tokens)


@pytest.mark.parametrize("damaged", [("rows", 4), (CHECKPOINT, 9)])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_bad_frame_is_found_before_an_acknowledgement_relies_on_it(
    tier: str, damaged: tuple[str, int], tmp_path: Path
) -> None:
    tokens = some_tokens(20)
    key = chain_of(MIXED, tokens).key(*damaged, 0)
    with node(open_host() if tier == "host" else open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, tokens), 9)
        flip(cache._levels[0].tier, key.path())
        done = spill(cache, State(MIXED, tokens, lineage=8), 9, 20)
        assert key in done.grant.keys or key.group == CHECKPOINT
        assert Kept(20, done.kept[-1].durability) in done.kept
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        restored = {d.key: d.lineage for d in restore(cache, MIXED, hit, tokens)}
        assert key not in restored or restored[key] == 8


def test_each_frame_is_verified_once_and_not_at_each_spill() -> None:
    tier, tokens = HookedTier(), some_tokens(40)
    with node(tier) as cache:
        for length in (9, 20, 21, 33, 40):
            spill(cache, State(MIXED, tokens[:length]))
        asked = [path for path in tier.asked if "-rows-" in path]
        assert sorted(asked) == sorted(set(asked))
        assert len(asked) == 8  # of the ten blocks, the last two were not relied on


def test_a_newer_peers_frame_is_neither_replaced_nor_set_aside() -> None:
    tier, tokens = open_host(), some_tokens(9)
    path = chain_of(MIXED, tokens).key("rows", 4, 0).path()
    with node(tier) as cache:
        spill(cache, State(MIXED, tokens), 5)
        (view,) = tier.get([GetRequest(path)])
        assert isinstance(view, memoryview)
        newer = bytearray(view[:64])
        newer[8] = 2
        newer[56:] = xxhash.xxh3_64_intdigest(bytes(newer[:56])).to_bytes(8, "little")
        ctypes.memmove(np.frombuffer(view, np.uint8).ctypes.data, bytes(newer), 64)
        del view
        with pytest.raises(TierError, match="version"):
            spill(cache, State(MIXED, tokens), 9)
        cache.report_bad(FrameKey.parse(path), "version 2")
        assert tier.stat([path]) != [None]
        assert "quarantined.host" not in cache.counters()


def test_frames_are_put_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Namespace.of(IDENTITY, MIXED)
    names = [plain_name(chain_of(MIXED, some_tokens(40)).key("rows", n, 0)) for n in range(4, 44, 4)]
    size = known.frame_bytes("rows", 4)
    for limit, wanted in ((3 * size, [3, 3, 3, 1]), (size, [1] * 10), (1, [1] * 10), (1 << 40, [10])):
        monkeypatch.setattr("tiered_cache.namespace.BATCH_BYTES_MAX", limit)
        batches = list(known.batches(names))
        assert list(map(len, batches)) == wanted
        assert [name for batch in batches for name in batch] == names
    assert list(known.batches([])) == []


# A tier that fails


def kinds(bodies: list[Bytes | MissReason]) -> list[MissReason | None]:
    """Why each is not there; None if it is."""
    return [body if isinstance(body, MissReason) else None for body in bodies]


CALLS = [
    ("reserve", Fault.ERROR),
    ("reserve", Fault.LOST_ANSWER),
    ("reserve", Fault.FULL),
    ("put", Fault.ERROR),
    ("put", Fault.LOST_ANSWER),
    ("put", Fault.FULL),
    ("get", Fault.ERROR),
    ("get", Fault.SHORT),
    ("get", Fault.FLIP),
    ("delete", Fault.ERROR),
    ("delete", Fault.LOST_ANSWER),
    ("quarantine", Fault.ERROR),
    ("quarantine", Fault.LOST_ANSWER),
]


@pytest.mark.parametrize(("call", "fault"), CALLS)
@pytest.mark.parametrize("which", ["host", "disk"])
@pytest.mark.parametrize("durability", [HOST, DISK])
def test_after_one_fault_the_books_balance_and_serving_goes_on(
    call: str, fault: Fault, which: str, durability: Durability, tmp_path: Path
) -> None:
    tiers = {"host": FaultyTier(open_host(24_000)), "disk": FaultyTier(open_disk(tmp_path, 207_000))}
    prompts = [some_tokens(9 + n, seed=n) for n in range(10)]
    with node(*tiers.values()) as cache:
        kept: list[Tokens] = []
        for number, prompt in enumerate(prompts):
            if number in {1, 5, 8}:
                tiers[which].inject(call, fault)
            with suppress(TieredCacheError):
                if spill(cache, State(MIXED, prompt), 5, len(prompt), durability=durability).kept[1:]:
                    kept.append(prompt)
            check_books(cache)
            for known in kept:
                hit = match(cache, MIXED, np.append(known, known[:1])).hit
                assert hit is not None
                with suppress(AssertionError, FrameError):
                    restore(cache, MIXED, hit, known)
            check_books(cache)
        for tier in tiers.values():
            tier._next.clear()
        for known in kept:
            hit = match(cache, MIXED, np.append(known, known[:1])).hit
            assert hit is not None
            restore(cache, MIXED, hit, known)
        assert len(kept) >= 7


def test_an_error_is_no_evidence_of_absence() -> None:
    tier, tokens = FaultyTier(open_host()), some_tokens(9)
    with node(tier) as cache:
        spill(cache, State(MIXED, tokens))
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        before = held(cache, "host")
        tier.inject("get", Fault.ERROR)
        keys = [planned.key for planned in hit.frames]
        assert kinds(cache.fetch(keys, 1 << 20)) == [MissReason.TIER_ERROR, None, None]
        assert held(cache, "host") == before
        assert cache.counters()["errors.host.get"] == 1
        restore(cache, MIXED, hit, tokens)
        tier.inner.delete([keys[0].path()])
        assert kinds(cache.fetch(keys, 1 << 20)) == [MissReason.LOST, None, None]
        assert len(held(cache, "host")) == len(before) - 1
        assert match(cache, MIXED, np.append(tokens, tokens[:1])).reason is MissReason.LOST


def test_the_next_tier_answers_for_one_that_fails(tmp_path: Path) -> None:
    host, tokens = FaultyTier(open_host()), some_tokens(9)
    with node(host, open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, tokens), durability=DISK)
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        host.rates = {Fault.ERROR: 1.0}
        restore(cache, MIXED, hit, tokens)
        assert cache.counters()["errors.host.get"] == 3
        host.rates = {}


def test_a_faster_tier_that_fails_does_not_cost_the_acknowledgement(tmp_path: Path) -> None:
    host = FaultyTier(open_host(), rates={Fault.ERROR: 1.0})
    with node(host, open_disk(tmp_path)) as cache:
        assert spill(cache, State(MIXED, some_tokens(9)), durability=DISK).kept == [Kept(9, DISK)]
        host.rates = {}
        host.inject("put", Fault.ERROR)
        assert spill(cache, State(MIXED, some_tokens(9, seed=1)), durability=DISK).kept == [Kept(9, DISK)]
        assert cache.counters()["errors.host.put"] == 1


def test_a_disk_that_was_full_takes_frames_again_without_a_restart(tmp_path: Path) -> None:
    disk = FaultyTier(open_disk(tmp_path), rates={Fault.FULL: 1.0})
    with node(open_host(), disk) as cache:
        assert spill(cache, State(MIXED, some_tokens(9)), durability=DISK).grant.declined == (
            (9, DeclineReason.NO_ROOM),
        )
        disk.rates = {}
        assert spill(cache, State(MIXED, some_tokens(9)), durability=DISK).kept == [Kept(9, DISK)]


# A suspended sequence gets its very own bytes back


def suspend(cache: TieredCache, state: State, durability: Durability = HOST) -> Hit:
    done = spill(cache, state, durability=durability, private=True)
    assert done.kept == [Kept(len(state.tokens), durability)]
    hit = cache.plan_of(state.offer(private=True), pin_s=60.0)
    assert hit is not None
    return hit


def private_frames(hit: Hit) -> set[tuple[str, int]]:
    return {(planned.key.group, planned.key.tokens) for planned in hit.frames if planned.key.private}


@pytest.mark.parametrize("geometry", [MIXED, ROWS, WINDOW], ids=["mixed", "rows", "window"])
@pytest.mark.parametrize("tokens", [some_tokens(22), some_tokens(20)], ids=["inside a block", "at a block's end"])
def test_where_others_were_first_a_suspended_sequence_has_copies_of_its_own(geometry: Geometry, tokens: Tokens) -> None:
    with node(open_host(), geometries=[geometry]) as cache:
        spill(cache, State(geometry, tokens, lineage=7), 9, len(tokens))
        before = held(cache, "host")
        own = State(geometry, tokens, lineage=9, lineages=(7, 7, 9, 9, 9))  # restored to 8, computed from there
        hit = suspend(cache, own)
        blocks = {("rows", 12), ("rows", 16), ("rows", 20)}
        windows = {(f"window.{6}", 16), (f"window.{6}", 20)} if geometry is WINDOW else set()
        end = {(CHECKPOINT, len(tokens))} if geometry.needs_checkpoint(len(tokens)) else set()
        assert private_frames(hit) == blocks | end | {w for w in windows if w[1] > len(tokens) - 6}
        restore(cache, geometry, hit, tokens, own=own.offer(private=True))
        shared = match(cache, geometry, np.append(tokens, tokens[:1])).hit
        assert shared is not None
        assert {d.lineage for d in restore(cache, geometry, shared, tokens)} == {7}
        assert hit.pin is not None
        assert cache.unpin(hit.pin)
        assert held(cache, "host") == before


def test_where_nobody_was_first_a_suspended_sequence_shares_what_it_stores() -> None:
    tokens = some_tokens(22)
    with node(open_host()) as cache:
        own = State(MIXED, tokens)
        hit = suspend(cache, own)
        assert private_frames(hit) == set()
        restore(cache, MIXED, hit, tokens, own=own.offer(private=True))
        found = match(cache, MIXED, np.append(tokens, tokens[:1]))
        assert found.hit is not None
        assert found.hit.tokens == 22


def test_rows_of_unknown_origin_are_never_taken_for_ones_own() -> None:
    tokens = some_tokens(22)
    with node(open_host()) as cache:
        spill(cache, State(MIXED, tokens, lineage=0, lineages=(0,) * 5), 9)
        own = State(MIXED, tokens, lineage=9, lineages=(0, 0, 0, 9, 9))
        hit = suspend(cache, own)
        assert private_frames(hit) == {("rows", 4), ("rows", 8), ("rows", 12)}
        restore(cache, MIXED, hit, tokens, own=own.offer(private=True))


@pytest.mark.parametrize("back_to", [0, 6, 10, 17])
@pytest.mark.parametrize("geometry", [MIXED, ROWS, WINDOW], ids=["mixed", "rows", "window"])
def test_a_sequence_that_ran_on_and_went_another_way_leaves_no_dead_rows(geometry: Geometry, back_to: int) -> None:
    """Its suspension's outcome was not known, so it ran on, went back, and was suspended elsewhere."""
    tokens = some_tokens(19)
    with node(open_host(), geometries=[geometry]) as cache:
        state = State(geometry, tokens)
        spill(cache, state, private=True)
        shared = state.chain.prefix_hash(19)
        cache._levels[0].drop([(shared, RemovalReason.EVICTED)])  # what it has to itself stays
        assert held(cache, "host")
        other = State(geometry, np.concatenate([tokens[:back_to], some_tokens(22, seed=1)]))
        hit = suspend(cache, other)
        check_books(cache)
        restore(cache, geometry, hit, other.tokens, own=other.offer(private=True))


def test_a_ticket_that_somebody_has_survives_a_late_offer_of_an_earlier_suspension() -> None:
    tokens = some_tokens(26)
    with node(open_host()) as cache:
        hit = suspend(cache, State(MIXED, tokens))
        keys = [planned.key for planned in hit.frames]
        assert cache.keep(hit.tickets, keys, 60.0)
        spill(cache, State(MIXED, tokens[:14]), private=True)
        assert cache.keep(hit.tickets, keys, 60.0)
        assert cache.use_up(hit.tickets, 1, 60.0)


def test_a_ticket_survives_a_restart_and_pressure_after_it(tmp_path: Path) -> None:
    own = State(MIXED, some_tokens(26))
    with node(open_disk(tmp_path, 100_000), checked=False) as cache:
        hit = suspend(cache, own, DISK)
        assert cache.keep(hit.tickets, [planned.key for planned in hit.frames], 60.0)
    clock = Clock()
    with node(open_disk(tmp_path, 100_000), clock=clock) as cache:
        for seed in range(1, 20):
            spill(cache, State(MIXED, some_tokens(26, seed)), durability=DISK)
        assert cache.counters()["dropped.disk.evicted"] > 0
        assert cache.keep(hit.tickets, [planned.key for planned in hit.frames], 60.0)
        restore(cache, MIXED, hit, own.tokens, own=own.offer(private=True))
        clock.now_s += 61.0
        cache.unpin(-1)
        assert not cache.keep(hit.tickets, [], 60.0)  # it has had its time


def test_of_two_who_use_a_ticket_at_once_one_is_told_to_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in both tiers: neither may take one half and find the other gone."""
    own = State(MIXED, some_tokens(26))
    with node(open_host(), open_disk(tmp_path)) as cache:
        suspend(cache, own)
        hit = suspend(cache, own, DISK)
        level = cache._levels[0]
        take = level.take

        def meanwhile(names: Sequence[FrameName]) -> bool:
            with pytest.raises(TierError, match="somebody else") as error:
                cache.use_up(hit.tickets, 2, 60.0)
            assert error.value.retryable
            return take(names)

        monkeypatch.setattr(level, "take", meanwhile)
        assert cache.use_up(hit.tickets, 1, 60.0)
        assert not cache.use_up(hit.tickets, 2, 60.0)
        with pytest.raises(StaleError, match="resumed"):
            cache.keep(hit.tickets, [], 60.0)


def test_a_sequence_that_is_suspended_twice_keeps_what_it_was_restored_with() -> None:
    tokens = some_tokens(22)
    with node(open_host()) as cache:
        spill(cache, State(MIXED, tokens, lineage=7))
        first = State(MIXED, tokens, lineage=9)
        hit = suspend(cache, first)
        decoded = restore(cache, MIXED, hit, tokens, own=first.offer(private=True))
        assert {d.lineage for d in decoded} == {9}
        second = State(MIXED, tokens, lineage=11, lineages=(9,) * 5)  # resumed: a computation of its own from here
        again = suspend(cache, second)
        assert hit.pin is not None
        assert cache.unpin(hit.pin)
        restore(cache, MIXED, again, tokens, own=second.offer(private=True))


def test_two_tiers_may_hold_two_computations_and_each_asker_gets_its_own(tmp_path: Path) -> None:
    tokens = some_tokens(22)
    with node(open_host(), open_disk(tmp_path)) as cache:
        own = State(MIXED, tokens, lineage=9)
        hit = suspend(cache, own, DISK)
        assert private_frames(hit) == set()
        assert held(cache, "host") == {}
        spill(cache, State(MIXED, tokens, lineage=7))  # others compute the same, and keep it in memory
        shared = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert shared is not None
        assert {d.lineage for d in restore(cache, MIXED, shared, tokens)} == {7}
        restore(cache, MIXED, hit, tokens, own=own.offer(private=True))


def test_a_ticket_outlives_a_restart_on_disk(tmp_path: Path) -> None:
    tokens = some_tokens(22)
    own = State(MIXED, tokens, lineage=9)
    hits: list[Hit] = []

    def spilling(cache: TieredCache) -> None:
        spill(cache, State(MIXED, tokens, lineage=7), 9, 22, durability=DISK)
        hits.append(suspend(cache, own, DISK))

    with start_again(tmp_path, spilling) as cache:
        restore(cache, MIXED, hits[0], tokens, own=own.offer(private=True))
        hit = suspend(cache, own, DISK)  # nothing has to come again
        assert private_frames(hit) == private_frames(hits[0])
        assert cache.counters()["frames.disk.found"] == len(held(cache, "disk"))


def test_there_is_no_plan_if_one_frame_is_missing_or_anothers() -> None:
    tokens = some_tokens(22)
    with node(open_host()) as cache:
        own = State(MIXED, tokens, lineage=9)
        assert cache.plan_of(own.offer(private=True), pin_s=1.0) is None
        spill(cache, State(MIXED, tokens, lineage=7))
        assert cache.plan_of(own.offer(private=True), pin_s=1.0) is None
        assert cache.plan_of(own.offer(), pin_s=1.0) is not None
        hit = suspend(cache, own)
        lost = next(planned.key for planned in hit.frames if planned.key.private)
        cache._levels[0].tier.delete([lost.path()])
        assert cache.fetch([lost], 1 << 20) == [MissReason.LOST]
        assert cache.plan_of(own.offer(private=True), pin_s=1.0) is None
        assert not any(name.private for name in held(cache, "host"))  # the others are worth nothing


def test_a_suspended_sequences_frames_stay_while_pinned_and_go_with_the_pin() -> None:
    clock = Clock()
    with node(open_host(24_000), clock=clock) as cache:
        tokens = some_tokens(9)
        spill(cache, State(MIXED, tokens, lineage=7))
        own = State(MIXED, tokens, lineage=9)
        hit = suspend(cache, own)
        for n in range(8):
            spill(cache, State(MIXED, some_tokens(9, seed=n + 1)))
        restore(cache, MIXED, hit, tokens, own=own.offer(private=True))
        clock.now_s += 61
        spill(cache, State(MIXED, some_tokens(9, seed=20)))
        assert not any(name.private for name in held(cache, "host"))


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LOST_ANSWER])
def test_half_of_a_suspended_sequence_is_not_kept(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_cache.namespace.BATCH_BYTES_MAX", 1)
    inner, tokens = HookedTier(), some_tokens(22)
    tier = FaultyTier(inner)
    with node(tier) as cache:
        spill(cache, State(MIXED, tokens, lineage=7))
        before = held(cache, "host")
        offer = State(MIXED, tokens, lineage=9).offer(private=True)
        grant = cache.admit(offer, HOST, NO_HINTS)
        assert {key.private for key in grant.keys} == {9}
        inner.after["put"] = lambda: tier.inject("put", fault)  # the answer to the first frame goes, or the second
        with pytest.raises(TierError):
            cache.spill(grant, [State(MIXED, tokens, lineage=9).export(offer, grant.keys)])
        assert cache.kept(offer) == []
        assert held(cache, "host") == before
        assert cache.counters().get("frames.host.abandoned", 0) == (fault is Fault.ERROR)
        tier._next.clear()
        suspend(cache, State(MIXED, tokens, lineage=9))


def test_a_suspended_sequence_is_kept_whatever_the_policy_wants() -> None:
    tokens = some_tokens(22)
    with node(open_host()) as cache:
        request = match(cache, MIXED, tokens).request
        over = Hints(will_not_return=True)
        done = spill(cache, State(MIXED, tokens), 9, 22, private=True, hints=over, request=request)
        assert (done.grant.declined, done.kept[-1:]) == ((), [Kept(22, HOST)])
        assert not cache._running
        assert cache._running_tokens == 0


# Threads that meet


def test_a_frame_that_is_deleted_while_it_is_put_again_is_there_in_the_end() -> None:
    tier, tokens = HookedTier(), some_tokens(9)
    with node(tier) as cache, ThreadPoolExecutor(1) as other:
        spill(cache, State(MIXED, tokens))
        again: list[Future[object]] = []

        def meanwhile() -> None:  # the index lists nothing now, and the tier still has it all
            again.append(other.submit(spill, cache, State(MIXED, tokens, lineage=8)))
            time.sleep(0.05)

        tier.before["delete"] = meanwhile
        cache.trim("host", 0)
        tier.set_limit(1 << 20)
        with suppress(IndexError):
            again[0].result(10)
        spill(cache, State(MIXED, tokens, lineage=8))
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        assert {d.lineage for d in restore(cache, MIXED, hit, tokens)} == {8}


def test_a_frame_that_is_dropped_while_its_put_finds_it_there_stays() -> None:
    tier, tokens = HookedTier(), some_tokens(9)
    with node(tier) as cache, ThreadPoolExecutor(1) as other:
        state = State(MIXED, tokens, lineage=8)
        offer = state.offer()
        late = cache.admit(offer, HOST, NO_HINTS)
        spill(cache, State(MIXED, tokens))
        dropping: list[Future[None]] = []

        def meanwhile() -> None:
            dropping.append(other.submit(cache.trim, "host", 0))
            time.sleep(0.05)

        tier.after["put"] = meanwhile
        receipts = cache.spill(late, [state.export(offer, late.keys)])
        assert not any(receipt.created for receipt in receipts)
        dropping[0].result(10)
        cache.trim("host", 1 << 20)
        check_books(cache)


def test_a_frame_that_moves_while_it_is_fetched_is_found_where_it_went(tmp_path: Path) -> None:
    tier, tokens = HookedTier(), some_tokens(9)
    with node(tier, open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, tokens))
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        tier.before["get"] = lambda: cache.trim("host", 0)
        restore(cache, MIXED, hit, tokens)
        assert held(cache, "host") == {}
        assert "frames.host.lost" not in cache.counters()


def test_what_is_pinned_while_it_is_moved_stays_above_too(tmp_path: Path) -> None:
    tier, tokens = HookedTier(), some_tokens(9)
    with node(tier, open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, tokens))
        tier.before["get"] = lambda: match(cache, MIXED, np.append(tokens, tokens[:1]), pin_s=10.0)
        cache.trim("host", 1000)
        assert len(held(cache, "host")) == len(held(cache, "disk")) == 3
        cache.trim("host", 1 << 20)


def test_a_checkpoint_moves_while_a_longer_one_is_on_its_way(tmp_path: Path) -> None:
    tokens = some_tokens(22)
    with node(open_host(), open_disk(tmp_path)) as cache:
        spill(cache, State(MIXED, tokens), 9)
        state = State(MIXED, tokens)
        offer = state.offer()
        grant = cache.admit(offer, HOST, NO_HINTS)
        assert ("rows", 4) not in {(key.group, key.tokens) for key in grant.keys}
        cache.trim("host", 1)
        assert (CHECKPOINT, 9) not in {(name.group, name.tokens) for name in held(cache, "host")}
        cache.trim("host", 1 << 20)
        cache.spill(grant, [state.export(offer, grant.keys)])
        assert cache.kept(offer) == [Kept(22, HOST)]
        hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
        assert hit is not None
        assert hit.tier == "host"
        restore(cache, MIXED, hit, tokens)


def test_what_comes_for_a_shorter_checkpoint_is_not_swept_away_before_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiered_cache.namespace.BATCH_BYTES_MAX", 1)
    tier, tokens, puts = HookedTier(), some_tokens(22), itertools.count(1)
    with node(tier, geometries=[WINDOW]) as cache:
        other = cache.admit(State(WINDOW, tokens).offer(13), HOST, NO_HINTS)

        def after_each_put() -> None:
            tier.after["put"] = after_each_put
            if next(puts) == 4:  # the rows and windows of the first two blocks are there, their checkpoint is not
                cache.abandon(other)

        tier.after["put"] = after_each_put
        assert spill(cache, State(WINDOW, tokens), 9, 22).kept == [Kept(9, HOST), Kept(22, HOST)]
        tier.after.clear()


def test_an_abandoned_grant_leaves_no_trace() -> None:
    with node(open_host(), geometries=[MIXED, ROWS, WINDOW]) as cache:
        for geometry in (MIXED, ROWS, WINDOW):
            spill(cache, State(geometry, some_tokens(22)), 9)
            before = held(cache, "host")
            offer = State(geometry, some_tokens(22)).offer(13, 22)
            grant = cache.admit(offer, HOST, NO_HINTS)
            assert grant.keys
            cache.abandon(grant)
            cache.abandon(grant)
            assert cache.spill(grant, [{}]) == []
            assert held(cache, "host") == before


def test_arrays_of_another_shape_are_refused_and_nothing_is_kept() -> None:
    with node(open_host()) as cache:
        state = State(MIXED, some_tokens(22))
        offer = state.offer()
        grant = cache.admit(offer, HOST, NO_HINTS)
        arrays = state.export(offer, grant.keys)
        last = grant.keys[-1]
        arrays[last] = {**arrays[last], "state": np.zeros((5, 30), np.float32)}
        with pytest.raises(GeometryError, match="'state' is float32"):
            cache.spill(grant, [arrays])
        assert held(cache, "host") == {}


@pytest.mark.parametrize("missing", [0, 2, -1])
def test_a_spill_in_batches_needs_all_of_them(missing: int, tmp_path: Path) -> None:
    with node(open_host(), open_disk(tmp_path)) as cache:
        state = State(MIXED, some_tokens(22))
        offer = state.offer(13, 22)
        grant = cache.admit(offer, DISK, NO_HINTS)
        batches = [state.export(offer, [key]) for key in grant.keys]
        del batches[missing]
        with pytest.raises(StateError, match=f"1 of {len(grant.keys)}"):
            cache.spill(grant, batches)
        assert [kept.tokens for kept in cache.kept(offer)] == ([13] if missing == -1 else [])
        grant = cache.admit(offer, DISK, NO_HINTS)
        receipts = cache.spill(grant, iter([state.export(offer, [key]) for key in grant.keys]))
        assert {receipt.key for receipt in receipts} == set(grant.keys)
        assert cache.kept(offer) == [Kept(13, DISK), Kept(22, DISK)]


# Figures


def test_counters_never_go_down_and_misses_have_one_reason_each(tmp_path: Path) -> None:
    tiers = [FaultyTier(tier, seed=n) for n, tier in enumerate((open_host(24_000), open_disk(tmp_path, 150_000)))]
    rng, seen = np.random.default_rng(0), dict[str, int]()
    with node(*tiers) as cache:
        for tier in tiers:
            tier.rates = {Fault.ERROR: 0.02, Fault.FULL: 0.02, Fault.FLIP: 0.02, Fault.LOST_ANSWER: 0.01}
        for _ in range(150):
            tokens = some_tokens(int(rng.integers(1, 14)), seed=int(rng.integers(6)))
            found = match(cache, MIXED, tokens)
            assert (found.hit is None) <= (found.reason is not None)
            if found.hit:
                with suppress(AssertionError, TieredCacheError):
                    restore(cache, MIXED, found.hit, tokens)
            with suppress(TieredCacheError):
                spill(cache, State(MIXED, tokens), durability=DISK if rng.random() < 0.3 else HOST)
            now = cache.counters()
            assert all(now[name] >= count for name, count in seen.items())
            seen = now
        for tier in tiers:
            tier.rates = {}
        spill(cache, State(MIXED, some_tokens(3)))
        assert total(seen, "errors.") > 10
        assert seen["lookups"] == 150


def test_who_opens_a_shared_directory_leaves_what_others_are_putting(tmp_path: Path) -> None:
    """Rows whose checkpoint is still on its way look as if nobody needed them."""

    def opened() -> tuple[set[str], int]:
        with node(open_disk(tmp_path), checked=False) as cache:
            tokens = len(match(cache, MIXED, np.append(some_tokens(9), np.uint32(1))).hit or ())
            return {entry.path for entry in cache._levels[0].tier.list()}, tokens

    disk = open_disk(tmp_path)
    with node(disk, checked=False) as cache:
        spill(cache, State(MIXED, some_tokens(9)), durability=Durability.DISK)
        (checkpoint,) = [entry.path for entry in disk.list() if f"-{CHECKPOINT}-" in entry.path]
        disk.delete([checkpoint])
        there = {entry.path for entry in disk.list()}
        assert opened() == (there, 0)
    assert opened()[0] < there, "who has it alone tidies up"
