"""The fault-injecting tier: what is asked for happens, the rest of the time it is the tier that it wraps."""

from __future__ import annotations

import contextlib

import pytest

from tiered_cache.errors import CapacityError, TierError
from tiered_cache.testing.faults import Fault, FaultyTier, SimulatedCrash
from tiered_cache.testing.tier_suite import body_of, bytes_of, get, name_of, put
from tiered_cache.tiers.base import GetRequest
from tiered_cache.tiers.host import HostTier

BUDGET = 1 << 20


def test_each_fault_happens_where_it_was_asked_for() -> None:
    slept: list[float] = []
    tier = FaultyTier(HostTier(BUDGET), delay_s=60.0, sleep=slept.append)
    body = body_of("", 0, 1_000)
    for fault, error, stored in (
        (Fault.ERROR, TierError, False),
        (Fault.FULL, CapacityError, False),
        (Fault.CRASH_BEFORE, SimulatedCrash, False),
        (Fault.LOST_ANSWER, TierError, True),
        (Fault.CRASH_AFTER, SimulatedCrash, True),
    ):
        tier.inject("put", fault)
        with pytest.raises(error):
            put(tier, (name_of(0), body))
        assert tier.injected[fault] == 1
        assert tier.delete([name_of(0)]) == [stored]
        assert tier.usage().bytes_reserved == 0
    put(tier, (name_of(0), body), (name_of(1), body))
    requests = [GetRequest(name_of(0)), GetRequest(name_of(1))]
    tier.inject("get", Fault.ERROR)
    bad, good = tier.get(requests)
    assert isinstance(bad, TierError)
    assert bytes_of(good) == body
    tier.inject("get", Fault.SHORT)
    short, good = tier.get(requests)
    assert body.startswith(bytes(bytes_of(short)))
    assert bytes_of(short).nbytes < len(body)
    tier.inject("get", Fault.FLIP)
    flipped, good = tier.get(requests)
    assert sum((a ^ b).bit_count() for a, b in zip(bytes_of(flipped), body, strict=True)) == 1
    assert bytes_of(good) == body
    assert get(tier, name_of(0)) == body, "what is stored is as it was"
    into = bytearray(1_000)
    tier.inject("get", Fault.FLIP)
    tier.get([GetRequest(name_of(0), into=memoryview(into))])
    assert sum((a ^ b).bit_count() for a, b in zip(into, body, strict=True)) == 1
    tier.inject("stat", Fault.DELAY)
    assert list(tier.stat([name_of(0)])) == [1_000]
    assert slept == [60.0]


def test_a_seed_decides_all() -> None:
    def run(seed: int) -> list[str]:
        tier = FaultyTier(HostTier(BUDGET), seed, dict.fromkeys(Fault, 0.1))
        seen = []
        for n in range(200):
            try:
                put(tier, (name_of(n), b"x" * 100))
                seen.append(
                    repr([bytes(a) if isinstance(a, memoryview) else a for a in tier.get([GetRequest(name_of(n))])])
                )
            except (TierError, CapacityError, SimulatedCrash) as error:
                seen.append(repr(error))
        assert all(tier.injected[fault] for fault in Fault)
        return seen

    assert run(1) == run(1) != run(2)


def test_no_fault_leaks_room() -> None:
    tier = FaultyTier(HostTier(BUDGET), 3, dict.fromkeys(Fault, 0.2))
    for n in range(500):
        with contextlib.suppress(TierError, CapacityError, SimulatedCrash):
            put(tier, (name_of(n % 20), bytes(1_000)))
            tier.delete([name_of((n + 7) % 20)])
    usage = tier.usage()
    assert usage.bytes_used == sum(tier.inner.footprint(entry.bytes) for entry in tier.inner.list())
    assert usage.bytes_reserved <= sum(tier.injected[fault] for fault in (Fault.CRASH_AFTER,)) * tier.footprint(1_000)
