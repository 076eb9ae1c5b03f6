"""What callers of a cache wait for: one read for all who ask, no wait beyond a deadline, none for a tier not needed."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pytest
from spilling import (
    IDENTITY,
    MIXED,
    NO_HINTS,
    State,
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

from tiered_cache.cache import Bytes, Hit, Kept, Offer, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.deadline import Deadline, until, wait_s
from tiered_cache.errors import DeadlineError, MissReason, TierError
from tiered_cache.identity import FrameKey, Tokens
from tiered_cache.level import WAITING_MAX
from tiered_cache.namespace import Namespace
from tiered_cache.policy.base import Hints
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.tiers.base import Durability, GetAnswer, GetRequest, Tier
from tiered_cache.tiers.wrappers import DeadlineTier, WrappedTier

HOST, DISK, _ = Durability
RUNNING_MAX = 4
TOKENS = some_tokens(9)
_T = TypeVar("_T")


class GatedTier(WrappedTier):
    """A place whose calls hang while `gate` is closed; counts what is read."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.failing = False

    def around(self, call: str, do: Callable[[], _T]) -> _T:
        self.calls[call] += 1
        assert self.gate.wait(60)
        if self.failing:
            raise TierError("fails", None, self.name)
        return do()

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        self.reads.update(request.path for request in requests)
        return super().get(requests)


class Slow(NamedTuple):
    """A node whose disk can hang."""

    cache: TieredCache
    disk: GatedTier
    threads: ThreadPoolExecutor

    def ask(self, call: Callable[[], _T], deadline_s: float = 30.0) -> Future[_T]:
        """Make a call on a thread of its own, by its own deadline."""

        def asked() -> _T:
            with until(Deadline.after(deadline_s)):
                return call()

        return self.threads.submit(asked)

    def fetch(self, keys: Sequence[FrameKey], deadline_s: float = 30.0) -> Future[list[Bytes | MissReason]]:
        return self.ask(lambda: self.cache.fetch(keys, 1 << 20), deadline_s)


@contextmanager
def slow_node(directory: Path, host_bytes: int = 1 << 20, deadline_s: float = 30.0) -> Iterator[Slow]:
    disk = GatedTier(open_disk(directory))
    with ThreadPoolExecutor(RUNNING_MAX) as calls, ThreadPoolExecutor(64) as threads:
        tier = DeadlineTier(disk, calls, deadline_s, running_max=RUNNING_MAX)
        try:
            with node(open_host(host_bytes), tier) as cache:
                yield Slow(cache, disk, threads)
                disk.gate.set()
                eventually(lambda: tier.running == 0)
        finally:
            disk.gate.set()


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def on_disk_alone(cache: TieredCache, tokens: Tokens = TOKENS) -> Hit:
    """A checkpoint that is on disk, and not in memory."""
    assert spill(cache, State(MIXED, tokens), durability=DISK).kept
    cache._levels[0].drop([(prefix, "evicted") for prefix in list(cache._levels[0].view)])  # type: ignore[misc]
    hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
    assert hit is not None
    assert hit.tier == "disk"
    return hit


def keys_of(hit: Hit) -> list[FrameKey]:
    return [planned.key for planned in hit.frames]


# One read for all


def test_a_frame_is_read_once_for_all_who_ask_at_once(tmp_path: Path) -> None:
    with slow_node(tmp_path) as (cache, disk, threads):
        slow = Slow(cache, disk, threads)
        keys = keys_of(on_disk_alone(cache))
        disk.reads.clear()
        disk.gate.clear()
        askers = [slow.fetch(keys) for _ in range(8)]
        eventually(lambda: cache._levels[1]._waiters.waiting == 7)
        disk.gate.set()
        answers = [asker.result() for asker in askers]
        assert set(disk.reads.values()) == {1}
        for bodies in answers:
            for body, other in zip(bodies, answers[0], strict=True):
                assert isinstance(body, np.ndarray)
                assert isinstance(other, np.ndarray)
                assert np.shares_memory(body, other)
                assert not body.flags.writeable
        slow.fetch(keys).result()
        assert set(disk.reads.values()) == {2}  # nothing is kept


def test_askers_of_different_frames_share_what_they_have_in_common(tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        first, second, third = keys_of(on_disk_alone(slow.cache))
        slow.disk.reads.clear()
        slow.disk.gate.clear()
        one = slow.fetch([first, second])
        eventually(lambda: len(slow.disk.reads) == 2)
        two = slow.fetch([second, third, second])
        eventually(lambda: len(slow.disk.reads) == 3)
        slow.disk.gate.set()
        assert set(slow.disk.reads.values()) == {1}
        assert bytes(two.result()[0]) == bytes(one.result()[1]) == bytes(two.result()[2])  # type: ignore[arg-type]


def test_an_error_reaches_all_and_the_next_one_tries_anew(tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        keys = keys_of(on_disk_alone(slow.cache))
        slow.disk.gate.clear()
        slow.disk.failing = True
        slow.disk.reads.clear()
        askers = [slow.fetch(keys) for _ in range(5)]
        eventually(lambda: slow.cache._levels[1]._waiters.waiting == 4)
        slow.disk.gate.set()
        for asker in askers:
            assert asker.result() == [MissReason.TIER_ERROR] * len(keys)
        assert set(slow.disk.reads.values()) == {1}
        slow.disk.failing = False
        assert all(isinstance(body, np.ndarray) for body in slow.fetch(keys).result())


@pytest.mark.parametrize("who", ["the first", "another"])
def test_whose_deadline_passes_leaves_and_the_others_get_their_answer(who: str, tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        keys = keys_of(on_disk_alone(slow.cache))
        slow.disk.gate.clear()
        slow.disk.reads.clear()
        first = slow.fetch(keys, 1.0 if who == "the first" else 30.0)
        eventually(lambda: len(slow.disk.reads) == len(keys))
        other = slow.fetch(keys, 1.0 if who == "another" else 30.0)
        eventually(lambda: slow.cache._levels[1]._waiters.waiting == 1)
        impatient, patient = (first, other) if who == "the first" else (other, first)
        assert impatient.result() == [MissReason.DEADLINE] * len(keys)
        assert not patient.done()
        slow.disk.gate.set()
        assert all(isinstance(body, np.ndarray) for body in patient.result())
        assert set(slow.disk.reads.values()) == {1}
        assert not slow.cache._levels[1]._flights


def test_a_read_that_never_ends_is_not_waited_for_by_those_who_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_node(tmp_path, deadline_s=0.2) as slow:
        keys = keys_of(on_disk_alone(slow.cache))
        slow.disk.gate.clear()
        assert slow.fetch(keys).result() == [MissReason.DEADLINE] * len(keys)
        assert not slow.cache._levels[1]._flights  # it has taken longer than any call may
        monkeypatch.setattr("tiered_cache.flights.FLIGHT_S", 0.1)
        assert slow.fetch(keys, 0.1).result() == [MissReason.DEADLINE] * len(keys)  # here its caller had no more time
        assert slow.fetch(keys).result() == [MissReason.DEADLINE] * len(keys)
        assert not slow.cache._levels[1]._flights


class GatedStore:
    """What nodes share, as far as a fetch needs it."""

    name, durability, mode = "object", Durability.OBJECT, Mode.FAST

    def __init__(self) -> None:
        self.gate, self.reads = threading.Event(), 0

    def get(self, keys: Sequence[FrameKey], known: Namespace) -> Sequence[GetAnswer]:
        self.reads += len(keys)
        assert self.gate.wait(60)
        return [memoryview(key.path().encode()) for key in keys]

    def introduce(self, known: Namespace) -> None: ...

    def left(self, offer: Offer, hints: Hints) -> None: ...

    def close(self) -> None: ...


def test_what_nodes_share_is_read_once_for_all_who_ask_a_node_for_it() -> None:
    store = GatedStore()
    with ThreadPoolExecutor(8) as threads:
        cache = TieredCache([TierSlot(open_host(), LruPolicy())], threads, shared=store)  # type: ignore[arg-type]
        cache.register(IDENTITY, MIXED)
        keys = [State(MIXED, TOKENS).chain.key("rows", n, 0) for n in (4, 8)]
        askers = [threads.submit(cache.fetch, keys, 1 << 20) for _ in range(5)]
        assert cache._flights is not None
        eventually(lambda: cache._flights is not None and cache._flights._waiters.waiting == 4)
        store.gate.set()
        for asker in askers:
            assert [bytes(body) for body in asker.result()] == [key.path().encode() for key in keys]  # type: ignore[arg-type]
        assert store.reads == 2
        cache.close()


def test_the_copy_below_is_fetched_in_time_if_the_disk_hangs(tmp_path: Path) -> None:
    disk, store = GatedTier(open_disk(tmp_path)), GatedStore()
    store.gate.set()
    with ThreadPoolExecutor(4) as threads:
        slots = [TierSlot(open_host(), LruPolicy()), TierSlot(DeadlineTier(disk, threads, 30.0), LruPolicy())]
        cache = TieredCache(slots, threads, shared=store)  # type: ignore[arg-type]
        cache.register(IDENTITY, MIXED)
        keys = keys_of(on_disk_alone(cache))
        disk.gate.clear()
        with until(Deadline.after(0.6)):
            bodies = cache.fetch(keys, 1 << 20)
        assert [bytes(body) for body in bodies] == [key.path().encode() for key in keys]  # type: ignore[arg-type]
        disk.gate.set()
        cache.close()


# No wait beyond a deadline


DEADLINE_S = 0.2
NEEDS_DISK: dict[str, Callable[[TieredCache, Hit], object]] = {
    "fetch": lambda cache, hit: cache.fetch(keys_of(hit), 1 << 20),
    "spill": lambda cache, _: spill(cache, State(MIXED, some_tokens(9, seed=5)), durability=DISK),
    "suspend": lambda cache, _: spill(cache, State(MIXED, some_tokens(9, seed=6)), durability=DISK, private=True),
    "report": lambda cache, hit: cache.report_bad(keys_of(hit)[0], "looks odd"),
    "trim": lambda cache, _: cache.trim("disk", 1 << 20),
}


@pytest.mark.parametrize("call", NEEDS_DISK)
def test_what_needs_a_tier_that_hangs_ends_by_its_deadline(call: str, tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        hit = on_disk_alone(slow.cache)
        slow.disk.gate.clear()
        started_s = time.monotonic()
        asked = slow.ask(lambda: NEEDS_DISK[call](slow.cache, hit), DEADLINE_S)
        if call in {"fetch", "report"}:  # a miss; and a report changes nothing then
            assert asked.result() in ([MissReason.DEADLINE] * 3, None)
        else:
            with pytest.raises(DeadlineError):
                asked.result()
        assert time.monotonic() - started_s < DEADLINE_S + 2
        check_idle(slow.cache)
        assert slow.ask(slow.cache.usage, DEADLINE_S).result().keys() == {"host"}


def test_figures_wait_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_cache.cache.USAGE_S", 0.05)
    with slow_node(tmp_path, deadline_s=3600.0) as slow:
        assert slow.cache.usage().keys() == {"host", "disk"}
        slow.disk.gate.clear()
        for _ in range(RUNNING_MAX + 1):
            assert slow.cache.usage().keys() == {"host"}
        assert slow.cache.health().keys() == {"host", "disk"}


def check_idle(cache: TieredCache) -> None:
    for level in cache._levels:
        assert not level._busy
        assert not level._waiters.waiting


def test_what_needs_no_disk_does_not_wait_for_one_that_hangs(tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        cache, disk = slow.cache, slow.disk
        assert spill(cache, State(MIXED, TOKENS)).kept
        disk.gate.clear()
        before = disk.calls.copy()
        hit = match(cache, MIXED, np.append(TOKENS, TOKENS[:1]), 10.0).hit
        assert hit is not None
        restore(cache, MIXED, hit, TOKENS)
        assert hit.pin is not None
        cache.unpin(hit.pin)
        assert spill(cache, State(MIXED, some_tokens(9, seed=1))).kept == [Kept(9, HOST)]
        assert spill(cache, State(MIXED, some_tokens(9, seed=2)), private=True).kept == [Kept(9, HOST)]
        assert disk.calls == before


def test_expired_files_are_deleted_when_their_tier_is_next_asked(tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        on_disk_alone(slow.cache)
        slow.disk.gate.clear()
        with slow.cache._lock:
            level = slow.cache._levels[1]
        level.drop([(prefix, "expired") for prefix in list(level.view)], at_leisure=True)  # type: ignore[misc]
        assert (held(slow.cache, "disk"), len(level._doomed)) == ({}, 3)
        slow.disk.gate.set()
        spill(slow.cache, State(MIXED, some_tokens(9, seed=1)), durability=DISK)
        assert not level._doomed


def test_a_disk_that_hangs_takes_half_of_a_spills_time_and_what_has_to_go_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_node(tmp_path, host_bytes=16_000) as slow:
        for seed in range(3):
            spill(slow.cache, State(MIXED, some_tokens(9, seed)))
        slow.disk.gate.clear()
        left_s: list[float] = []
        waiting = DeadlineTier._wait_for

        def watched(self: DeadlineTier, call: str, do: Callable[[], _T], undo: Callable[[_T], object]) -> _T:
            left_s.append(wait_s(1e9))
            return waiting(self, call, do, undo)

        monkeypatch.setattr(DeadlineTier, "_wait_for", watched)
        done = slow.ask(lambda: spill(slow.cache, State(MIXED, some_tokens(9, seed=9))), 4.0).result()
        assert done.kept == [Kept(9, HOST)]
        assert 0.5 < max(left_s) <= 2.0, "of the spill's four seconds"
        assert slow.cache.counters()["dropped.host.evicted"] >= 1


def test_those_who_wait_for_a_slow_tier_are_bounded_and_memory_answers_meanwhile(tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        keys = [key for seed in range(1, 13) for key in keys_of(on_disk_alone(slow.cache, some_tokens(9, seed)))]
        spill(slow.cache, State(MIXED, TOKENS))
        slow.disk.gate.clear()
        askers = [slow.fetch([key]) for key in keys] + [slow.fetch([keys[0]]) for _ in range(WAITING_MAX + 4)]
        eventually(lambda: sum(asker.done() for asker in askers) == len(askers) - RUNNING_MAX - WAITING_MAX)
        refused = [asker for asker in askers if asker.done()]
        assert all(asker.result() == [MissReason.DEADLINE] for asker in refused)
        hit = match(slow.cache, MIXED, np.append(TOKENS, TOKENS[:1])).hit
        assert hit is not None
        assert hit.tier == "host"
        restore(slow.cache, MIXED, hit, TOKENS)
        slow.disk.gate.set()
        served = [asker.result() for asker in askers if asker not in refused]
        assert all(isinstance(body, np.ndarray) for (body,) in served)


def test_any_number_may_ask_for_one_frame_of_a_tier_that_answers(tmp_path: Path) -> None:
    with slow_node(tmp_path) as slow:
        (key, *_) = keys_of(on_disk_alone(slow.cache))
        slow.disk.gate.clear()
        askers = [slow.fetch([key]) for _ in range(WAITING_MAX + 8)]
        eventually(lambda: slow.disk.calls["get"] > 0)
        slow.disk.gate.set()
        assert all(isinstance(asker.result()[0], np.ndarray) for asker in askers)


# What nobody waits for any more


def test_a_late_put_keeps_its_names_until_it_has_ended_and_leaves_nothing(tmp_path: Path) -> None:
    state = State(MIXED, TOKENS)
    with slow_node(tmp_path) as slow:
        level = slow.cache._levels[1]
        offer = state.offer()
        grant = slow.cache.admit(offer, DISK, NO_HINTS)
        slow.disk.gate.clear()
        late = slow.ask(lambda: slow.cache.spill(grant, [state.export(offer, grant.keys)]), 1.0)
        with pytest.raises(DeadlineError):
            late.result()
        assert len(level._late) == 3
        again = slow.cache.admit(offer, HOST, NO_HINTS)
        slow.cache.abandon(again)
        level.tidy()
        assert len(level._doomed) == 3
        slow.disk.gate.set()
        eventually(lambda: not level._late)
        level.tidy()
        check_books(slow.cache)
        assert not [entry for entry in level.tier.list() if "descriptor" not in entry.path]
        assert spill(slow.cache, state, durability=DISK).kept == [Kept(9, DISK)]


def test_a_late_delete_does_not_take_what_comes_after_it(tmp_path: Path) -> None:
    state = State(MIXED, TOKENS)
    with slow_node(tmp_path) as slow:
        level = slow.cache._levels[1]
        on_disk_alone(slow.cache)
        slow.disk.gate.clear()
        victims = [(prefix, "evicted") for prefix in list(level.view)]
        slow.ask(lambda: level.drop(victims), 1.0).result()  # type: ignore[arg-type]
        with pytest.raises(DeadlineError):
            slow.ask(lambda: spill(slow.cache, state, durability=DISK), 0.3).result()
        slow.disk.gate.set()
        eventually(lambda: not level._late)
        assert spill(slow.cache, state, durability=DISK).kept == [Kept(9, DISK)]
        check_books(slow.cache)
        restore(slow.cache, MIXED, match(slow.cache, MIXED, np.append(TOKENS, TOKENS[:1])).hit, TOKENS)  # type: ignore[arg-type]
