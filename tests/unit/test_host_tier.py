"""What the host tier does besides what every tier does: warm memory, exact budgets, readers that hold room."""

from __future__ import annotations

import errno
import itertools
import random
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
from costs import page_faults
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.errors import CapacityError
from tiered_cache.testing.tier_suite import body_of, bytes_of, get, name_of, put
from tiered_cache.tiers import arena as arena_module
from tiered_cache.tiers.arena import GRANULE_BYTES, Arena, granules
from tiered_cache.tiers.base import ALIGNMENT, GetRequest, PutItem
from tiered_cache.tiers.host import ENTRY_BYTES, HostTier

BUDGET = 8 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# The arena


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "SEGMENT_BYTES", 1 << 20)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3_000), st.integers(0, 300_000)), max_size=80), st.integers(0, 2**32))
def test_runs_never_overlap_and_all_that_is_free_can_be_had(sizes: list[int], seed: int) -> None:
    rng, arena, limit = random.Random(seed), Arena(1 << 20), 1 << 20
    held: list[tuple[arena_module.Run, ...]] = []
    for size in sizes:
        free = limit - sum(run[1] for runs in held for run in runs)
        runs = arena.allocate(size)
        assert (runs is not None) is (granules(size) <= free)
        if runs is None:
            for index in sorted(rng.sample(range(len(held)), len(held) // 2), reverse=True):
                arena.free(held.pop(index))
            continue
        assert sum(run[1] for run in runs) == granules(size)
        held.append(runs)
        taken = sorted(run for runs in held for run in runs)
        assert all(start + bytes_ <= following for (start, bytes_), (following, _) in itertools.pairwise(taken))
        assert all(start % GRANULE_BYTES == 0 for start, _ in taken)
        assert all(array.ctypes.data % ALIGNMENT == 0 for array in arena.arrays(taken))
    for runs in held:
        arena.free(runs)
    (whole,) = arena.allocate(limit) or ((0, 0),)
    assert whole[1] == limit, "free neighbours are joined"


@pytest.mark.usefixtures("small_segments")
def test_a_request_larger_than_a_segment_gets_several_runs() -> None:
    arena = Arena(10 << 20)
    first = arena.allocate(700_000)
    assert first is not None
    large = arena.allocate(5 << 20)
    assert large is not None
    assert len(large) >= 5
    assert arena.allocate(5 << 20) is None
    assert arena.allocate(5 << 20, in_one=True) is None
    arena.free(large)
    arena.free(first)
    assert arena.allocate(10 << 20) is not None


def test_one_run_is_preferred_and_warm_memory_before_cold() -> None:
    arena = Arena(1 << 20)
    first, second, third = (arena.allocate(100 << 10) for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    arena.free(first)
    assert arena.allocate(50 << 10) == ((first[0][0], 50 << 10),)
    assert len(arena.allocate(200 << 10) or ()) == 1, "a cold run rather than warm pieces"
    assert arena.allocate(60 << 10, in_one=True, spare=1 << 20) is None, "cold memory is spared"


def test_a_smaller_limit_gives_memory_back_to_the_system() -> None:
    tier = HostTier(64 << 20)
    body = np.ones(1 << 20, dtype=np.uint8).data
    put(tier, *((name_of(n), bytes(body)) for n in range(48)))
    full = resident_bytes()
    tier.delete([name_of(n) for n in range(0, 48, 2)])
    assert resident_bytes() > full - (8 << 20), "idle memory stays warm"
    tier.set_limit(16 << 20)
    assert resident_bytes() < full - (20 << 20)
    tier.delete([name_of(n) for n in range(1, 48, 2)])
    assert resident_bytes() < full - (40 << 20)
    tier.set_limit(64 << 20)
    put(tier, *((name_of(n), bytes(body)) for n in range(48)))
    assert get(tier, name_of(47)) == bytes(body)
    tier.close()
    assert resident_bytes() < full - (40 << 20)


# The tier


def test_a_reader_of_a_deleted_entry_holds_its_room() -> None:
    tier = HostTier(BUDGET)
    body = body_of("", 0, BUDGET // 2)
    put(tier, (name_of(0), body))
    (answer,) = tier.get([GetRequest(name_of(0))])
    part = bytes_of(answer)[10:20]
    tier.delete([name_of(0)])
    assert tier.usage().bytes_used == tier.footprint(len(body))
    assert tier.usage().entries == 0
    with pytest.raises(CapacityError):
        tier.reserve([BUDGET // 2])
    del answer
    assert part == body[10:20]
    with pytest.raises(CapacityError):
        tier.reserve([BUDGET // 2])
    del part
    tier.reserve([BUDGET // 2]).release()
    assert tier.usage().bytes_used == 0


def test_a_view_that_dies_inside_the_tier_does_not_stop_it() -> None:
    """The collector can run a view's finalizer in any allocation, also one under the tier's own lock."""
    tier = HostTier(BUDGET)
    put(tier, (name_of(0), bytes(1_000)))

    (answer,) = tier.get([GetRequest(name_of(0))])
    tier.delete([name_of(0)])
    with tier._lock:
        del answer  # would hang here if the finalizer took the lock
    assert tier.usage().bytes_used == 0


def test_a_budget_that_the_system_cannot_give_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = HostTier(1 << 50)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(arena_module.mmap, "mmap", refuse)
        with pytest.raises(CapacityError, match="does not give"):
            put(tier, (name_of(0), b"x"), (name_of(1), b"y"))
    assert list(tier.list()) == []
    assert tier.usage().bytes_free == 1 << 50
    put(tier, (name_of(0), b"x"))
    assert get(tier, name_of(0)) == b"x"


def test_small_entries_waste_little() -> None:
    rng, tier = random.Random(0), HostTier(1 << 30)
    sizes = [rng.randrange(10_000, 50_000) for _ in range(5_000)]
    body = bytes(50_000)
    tracemalloc.start()
    try:
        before = resident_bytes()
        for n, size in enumerate(sizes):
            with tier.reserve([size]) as reservation:
                tier.put([PutItem(name_of(n), [body[:size]])], reservation)
        python_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    charged = tier.usage().bytes_used
    assert charged <= sum(sizes) * 1.06
    assert python_bytes / len(sizes) < ENTRY_BYTES, "what is charged for an entry's bookkeeping covers it"
    assert resident_bytes() - before < charged * 1.1


def test_memory_stays_inside_the_budget_however_sizes_change() -> None:
    """First large entries, then small ones, then a mix: fragments are used, nothing is mapped beyond the limit."""
    budget = 32 << 20
    tier, rng = HostTier(budget), random.Random(1)
    before = resident_bytes()
    number, bodies = 0, dict[str, int]()
    for sizes in ((3 << 20, 4 << 20), (10_000, 50_000), (1, 3 << 20)):
        for _ in range(1_200 if sizes[0] == 10_000 else 200):
            size = rng.randrange(*sizes)
            while tier.footprint(size) > tier.usage().bytes_free:
                path = rng.choice(list(bodies))
                assert tier.stat([path]) == [bodies.pop(path)]
                tier.delete([path])
            number += 1
            put(tier, (name_of(number), number.to_bytes(4, "little") * (size // 4) + bytes(size % 4)))
            bodies[name_of(number)] = size
    assert {entry.path: entry.bytes for entry in tier.list()} == bodies
    for path, size in bodies.items():
        n = int(path.split("/")[2][:64], 16)
        assert get(tier, path) == n.to_bytes(4, "little") * (size // 4) + bytes(size % 4)
    assert resident_bytes() - before < budget * 1.25


def test_the_finalizer_of_a_view_does_not_keep_the_tier() -> None:
    tier = HostTier(BUDGET)
    put(tier, (name_of(0), b"x" * 1_000))
    (answer,) = tier.get([GetRequest(name_of(0))])
    view, gone = bytes_of(answer), weakref.ref(tier)
    tier.close()
    del tier
    assert view == b"x" * 1_000
    del view, answer
    assert gone() is None


def test_memory_that_is_used_again_is_not_faulted_in_again() -> None:
    """The reason for the arena: the first touch of a page costs many times a copy into it."""
    body, new, again = bytes(4 << 20), [], []
    for _ in range(5):
        tier = HostTier(64 << 20)
        for faults in (new, again):
            before = page_faults()
            for n in range(8):
                put(tier, (name_of(n), body))
            faults.append(page_faults() - before)
            tier.delete([name_of(n) for n in range(8)])
        tier.close()
    # A huge page is one fault for 2 MiB; what Python itself and the kernel's upkeep touch is not in every round.
    assert min(new) >= 8
    assert min(again) < min(new) / 4
