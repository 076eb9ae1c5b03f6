"""Cards 16, 18, 20 and 24: full disks, stores in trouble, owners that die; serving goes on and the books balance."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from places import PLACES, Place, Store, make_faulty, open_place, usage_of
from serving import DEADLINE_S, MODELS, compute, never_moved, serve, some_tokens
from spilling import (
    IDENTITY,
    MIXED,
    NO_HINTS,
    State,
    chain_of,
    check_books,
    node,
    open_disk,
    open_host,
    restore,
    spill,
    total,
)
from spilling import some_tokens as some_prompt

from tiered_cache.cache import DeclineReason, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import CapacityError, FrameError, MissReason, TierError
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.local import InlineExecutor, LocalCluster
from tiered_cache.service.messages import Prompt
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.testing.mortal import MortalWorker
from tiered_cache.testing.object_servers import FaultyS3Server, HttpFault
from tiered_cache.tiers.base import Durability, Tier
from tiered_cache.tiers.disk import SyncPolicy

NODE = LocalCluster.NODE
MODEL = MODELS[0]
LATE_S = 1.0
"""How late a busy machine may make an answer."""


# Card 16


def bytes_on_disk(root: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in root.rglob("*") if path.is_file() and path.name != "ledger")


def test_card_16_two_writers_share_one_small_quota(tmp_path: Path) -> None:
    quota = 100_000
    with ExitStack() as stack:
        caches = [
            stack.enter_context(node(open_disk(tmp_path / "tier", quota, SyncPolicy.NEVER), checked=False))
            for _ in range(2)
        ]
        most = 0
        for number in range(60):
            cache = caches[number % 2]
            spill(cache, State(MIXED, some_prompt(18, seed=number)), durability=Durability.DISK)
            most = max(most, bytes_on_disk(tmp_path / "tier"))
            assert most <= quota, "temporary ones included"
            usage = cache.usage()["disk"]
            assert usage.bytes_used + usage.bytes_reserved + usage.bytes_quarantined <= quota
        assert most > quota // 2
        for cache in caches:
            assert cache.counters()["frames.disk.evicted"] + cache.counters().get("frames.disk.lost", 0) > 0


@pytest.mark.parametrize("call", ["reserve", "put"])
def test_card_16_no_free_bytes_is_a_spill_less_and_passes_without_a_restart(place: Place, call: str) -> None:
    """The place says so when room is asked for, or when the bytes come."""
    with place.start() as cluster:
        prompt = some_tokens(45)
        assert serve(cluster, prompt, place.durability).spill.kept
        full = make_faulty(cluster, place.tier)
        for seed in range(4):
            for _ in range(3):  # as often as room is made for one spill
                full.inject(call, Fault.FULL)
            served = compute(cluster, some_tokens(45, seed=50 + seed))
            with contextlib.suppress(CapacityError):
                spilled = cluster.tierings[NODE].spill(
                    served.run.offer, place.durability, Prompt(prompt).hints, None, deadline_s=DEADLINE_S
                )
                assert [reason for _, reason in spilled.declined] == [DeclineReason.NO_ROOM]
            full._next.clear()
            longer = np.concatenate([prompt, some_tokens(3 + seed, seed=1)])
            again = compute(cluster, longer)
            assert (again.placement.restored_tokens, again.mark) == (45, never_moved(MODEL, longer)), "serving goes on"
        assert full.injected[Fault.FULL] >= 4
        counters = cluster.counters()
        told = counters.get("cache.declined.no_room", 0) + counters.get(f"cache.errors.{place.tier}.put", 0)
        assert told == 4, "each is counted once"
        assert serve(cluster, some_tokens(45, seed=60), place.durability).spill.kept


# Card 18

DEADLINE_OF_A_CALL_S = 1.5
CALLS_BEFORE_THE_BREAKER_OPENS, FRAMES_OF_A_PROMPT, TRIES = 5, 4, 4
TROUBLE: dict[str, HttpFault] = {
    "60 s of delay": HttpFault(delay_s=60.0),
    "403": HttpFault(status=403),
    "404": HttpFault(status=404),
    "500": HttpFault(status=500),
    "503": HttpFault(status=503),
    "closed in the middle of a body": HttpFault(body_bytes=100),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_card_18_a_store_in_trouble_delays_nobody_and_changes_no_answer(tmp_path: Path, trouble: str) -> None:
    later_s = 0.0
    with FaultyS3Server() as server:
        tiers = TierSettings(
            host_bytes=0,
            object_url="s3://bucket/p",
            object_bytes=32 << 20,
            object_options=server.options,
            object_deadline_s=DEADLINE_OF_A_CALL_S,
        )
        settings = ClusterSettings(2, WorkerSettings(engine=MODEL), tiers)
        with LocalCluster(settings, clock=lambda: time.monotonic() + later_s) as cluster:
            prompts = [some_tokens(40, seed=seed) for seed in range(4)]
            for prompt in prompts:
                assert serve(cluster, prompt, Durability.OBJECT).spill.kept
            server.requests.clear()
            server.fail_always(TROUBLE[trouble])
            slowest_s = 0.0
            for turn in range(3):
                for prompt in prompts:
                    longer = np.concatenate([prompt, some_tokens(3 + turn, seed=9)])
                    begun_s = time.monotonic()
                    served = compute(cluster, longer)
                    slowest_s = max(slowest_s, time.monotonic() - begun_s)
                    assert (served.placement.restored, served.mark) == (None, never_moved(MODEL, longer))
                    cluster.workers[served.placement.owner].release(served.run.source, deadline_s=DEADLINE_S)
            assert slowest_s < 6 * DEADLINE_OF_A_CALL_S + LATE_S, "each of its few calls ended by its deadline"
            most = CALLS_BEFORE_THE_BREAKER_OPENS * FRAMES_OF_A_PROMPT * TRIES * 2  # GET, and HEAD
            assert server.requests.total() <= most, "retries are bounded, and the breaker spares the store"
            server.recover()
            later_s = 11.0
            found = [compute(cluster, np.concatenate([prompt, some_tokens(9)])).placement for prompt in prompts]
            restored = [placement.restored_tokens for placement in found]
            if trouble == "404":  # a verified absence: every memory of what was there is gone
                assert restored == [0] * len(prompts)
                assert {placement.reason for placement in found} <= {MissReason.LOST, MissReason.NOT_STORED}
            else:
                assert restored.count(40) >= len(prompts) - 1, "one may have been the probe"


def test_card_18_what_is_lost_behind_our_back_is_a_miss_at_the_next_look_up(place: Place) -> None:
    with place.start() as cluster:
        prompt = some_tokens(40)
        serve(cluster, prompt, place.durability)
        for name in usage_of(cluster):
            store = Store(cluster, name)
            for path in store.frames():
                store.remove(path)
        longer = np.concatenate([prompt, some_tokens(3, seed=1)])
        for _ in range(2):
            served = compute(cluster, longer)
            assert (served.placement.restored, served.mark) == (None, never_moved(MODEL, longer))
        assert served.placement.refusals == (), "the second look-up knows"
        assert serve(cluster, longer, place.durability).spill.kept, "and it is stored again"


# Card 20


def kill(cluster: LocalCluster, name: str) -> None:
    worker = cluster.workers[name]
    assert isinstance(worker, MortalWorker)
    worker.kill()


def test_card_20_a_killed_owner_takes_nothing_that_was_acknowledged_and_hangs_nobody(place: Place) -> None:
    with place.start(workers=3) as cluster:
        prompt = some_tokens(45)
        served = compute(cluster, prompt)
        spilled = cluster.tierings[NODE].spill(
            served.run.offer, place.durability, Prompt(prompt).hints, 30.0, deadline_s=DEADLINE_S
        )
        assert spilled.plan is not None
        only_offered = compute(cluster, some_tokens(45, seed=1))
        doomed = {served.placement.owner, only_offered.placement.owner}
        for name in doomed:
            kill(cluster, name)
        (left,) = sorted(set(cluster.workers) - doomed)[:1]
        longer = np.concatenate([prompt, some_tokens(5, seed=2)])
        restored = cluster.workers[left].inject(spilled.plan, Prompt(longer), 100, b"", deadline_s=DEADLINE_S)
        assert restored.mark == served.mark
        cluster.workers[left].release(restored.source, deadline_s=DEADLINE_S)
        begun_s = time.monotonic()
        with pytest.raises(TierError, match="dead"):
            cluster.tierings[NODE].spill(
                only_offered.run.offer, place.durability, Prompt(prompt).hints, None, deadline_s=2.0
            )
        again = compute(cluster, some_tokens(50, seed=1), deadline_s=2.0)
        assert time.monotonic() - begun_s < 2.0 + 2.0
        assert (again.placement.restored, again.placement.owner) == (None, left)
        assert again.mark == never_moved(MODEL, some_tokens(50, seed=1))
        assert all(usage.bytes_reserved == 0 for usage in usage_of(cluster).values())


@pytest.mark.parametrize("name", PLACES)
def test_card_20_a_node_that_is_gone_leaves_what_outlives_it(tmp_path: Path, name: str, seaweed: object) -> None:
    place = open_place(name, tmp_path, seaweed)  # type: ignore[arg-type]
    prompt = some_tokens(45)
    longer = np.concatenate([prompt, some_tokens(5, seed=2)])
    with place.start() as cluster:
        assert serve(cluster, prompt, place.durability).spill.kept
    with place.start() as cluster:
        served = compute(cluster, longer)
        assert served.placement.restored_tokens == (45 if place.outlives_a_node else 0)
        assert served.mark == never_moved(MODEL, longer)


# Card 24

STEPS = 1000
PROMPTS = [
    np.concatenate([some_prompt(9, seed=n // 4), some_prompt(14, seed=1000 + n)])[: 5 + n * 7 % 18] for n in range(60)
]


class Trace:
    """A recorded run: stores, look-ups, cancels, faults and a restart; and what came of each, as a digest."""

    def __init__(self, directory: Path, order: Sequence[str], seed: int) -> None:
        self.directory, self.order = directory, order
        self.rng, self.digest = random.Random(seed), hashlib.sha256()
        self.events: Counter[str] = Counter()

    def tiers(self) -> list[Tier]:
        makers: Mapping[str, Callable[[], Tier]] = {
            "host": lambda: open_host(60_000),
            "disk": lambda: open_disk(self.directory, 120_000),
        }
        return [
            FaultyTier(makers[name](), seed=number, rates={Fault.FLIP: 0.002, Fault.ERROR: 0.005})
            for number, name in enumerate(self.order)
        ]

    def say(self, *what: object) -> None:
        self.digest.update(repr(what).encode())
        self.events[str(what[0])] += 1

    def run(self) -> str:
        for _ in range(2):  # and a restart between
            slots = [TierSlot(tier, LruPolicy(), Mode.FAST) for tier in self.tiers()]
            with closing(TieredCache(slots, InlineExecutor())) as cache:
                cache.recover()
                cache.register(IDENTITY, MIXED)
                before: dict[str, int] = {}
                for step in range(STEPS // 2):
                    self.step(cache)
                    if step % 50 == 0:
                        counters = cache.counters()
                        assert all(counters[name] >= count for name, count in before.items()), "never down"
                        before = counters
                for level in cache._levels:
                    assert isinstance(level.tier, FaultyTier)
                    level.tier.rates.clear()
                check_books(cache)
                counters = cache.counters()
                assert counters["lookups"] == counters["hits"] + total(counters, "misses.")
        return self.digest.hexdigest()

    def step(self, cache: TieredCache) -> None:
        state = State(MIXED, PROMPTS[self.rng.randrange(len(PROMPTS))])
        doing = self.rng.random()
        try:
            if doing < 0.5:
                self.look_up(cache, state)
            elif doing < 0.9:
                kept = spill(cache, state, durability=self.rng.choice([Durability.HOST, Durability.DISK])).kept
                self.say("stored", kept)
            else:
                grant = cache.admit(state.offer(), Durability.HOST, NO_HINTS)
                cache.abandon(grant)
                self.say("cancelled", len(grant.keys), grant.declined)
        except (TierError, FrameError, AssertionError) as error:
            if isinstance(error, AssertionError) and "is tier_error" not in str(error):
                raise
            self.say("failed", type(error).__name__)
        gc.collect()  # what an error's traceback still reads holds room

    def look_up(self, cache: TieredCache, state: State) -> None:
        used = cache.counters().get("hits", 0)
        found = cache.match(chain_of(MIXED, np.append(state.tokens, state.tokens[:1])), NO_HINTS)
        assert cache.counters().get("hits", 0) - used == (found.hit is not None)
        if found.hit is None:
            self.say("missed", found.reason)
            return
        decoded = restore(cache, MIXED, found.hit, state.tokens)
        self.say("hit", found.hit.tokens, found.hit.tier, [one.key.path() for one in decoded])


def test_card_24_the_books_balance_and_equal_runs_decide_alike(tmp_path: Path) -> None:
    runs = [
        Trace(tmp_path / "one", ("host", "disk"), 24),
        Trace(tmp_path / "two", ("host", "disk"), 24),
        Trace(tmp_path / "other order", ("disk", "host"), 24),
    ]
    gc.freeze()  # what was there before is nothing to look through
    digests = [run.run() for run in runs]
    gc.unfreeze()
    assert digests[0] == digests[1] != digests[2]
    assert runs[0].events == runs[1].events
    for run in runs:
        assert {"hit", "missed", "stored", "cancelled", "failed"} <= run.events.keys()
