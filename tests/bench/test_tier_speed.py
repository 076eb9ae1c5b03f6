"""How fast tiers put and get, as fractions of a copy of the same bytes in the same run, and how many files a second.

`pytest -m bench -s --slow tests/bench/test_tier_speed.py` prints the tables; without `--slow` they are of a few rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tiered_cache.testing.tier_suite import body_of, name_of, put
from tiered_cache.tiers.arena import aligned_empty
from tiered_cache.tiers.base import GetRequest, PutItem, Tier
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.host import HostTier

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

SIZES = (16 << 10, 1 << 20, 4 << 20, 16 << 20)
KEPT = 4  # entries that are there at a time: the tier is full, and deletes as much as it puts


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(tier: Tier, size: int, rounds: int) -> dict[str, float]:
    """Medians of interleaved rounds, in seconds."""
    source, target = np.frombuffer(body_of("", 0, size), dtype=np.uint8), aligned_empty(size)
    target[:] = 0
    times: dict[str, list[float]] = {"copy": [], "put": [], "get": [], "view": [], "delete": []}
    for n in range(rounds + KEPT):
        path = name_of(n)

        def store(path: str = path) -> None:
            with tier.reserve([size]) as reservation:
                tier.put([PutItem(path, [source.data])], reservation)

        taken = {"copy": seconds(lambda: np.copyto(target, source)), "put": seconds(store)}
        taken["get"] = seconds(lambda path=path: tier.get([GetRequest(path, into=target.data)]))  # type: ignore[misc]
        assert (target[:: 1 << 10] == source[:: 1 << 10]).all()
        taken["view"] = seconds(lambda path=path: tier.get([GetRequest(path)]))  # type: ignore[misc]
        if n >= KEPT:
            taken["delete"] = seconds(lambda n=n: tier.delete([name_of(n - KEPT)]))  # type: ignore[misc]
            for name, time_s in taken.items():
                times[name].append(time_s)
    tier.delete([entry.path for entry in tier.list()])
    return {name: statistics.median(each) for name, each in times.items()}


@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_put_and_get_against_a_copy(tmp_path: Path, rounds: int) -> None:
    print("\ntier, size: copy; put, get into, get a view as fractions of it; put and delete")
    tiers: dict[str, Callable[[], Tier]] = {
        "host": lambda: HostTier(256 << 20),
        "disk, never synced": lambda: DiskTier(
            tmp_path / "never", 256 << 20, sync=SyncPolicy.NEVER, spare_bytes=64 << 20
        ),
        "disk, data synced": lambda: DiskTier(tmp_path / "data", 256 << 20, sync=SyncPolicy.DATA, spare_bytes=64 << 20),
        "disk, all synced": lambda: DiskTier(tmp_path / "full", 256 << 20, sync=SyncPolicy.FULL, spare_bytes=64 << 20),
        "disk, no spare files": lambda: DiskTier(tmp_path / "new", 256 << 20, sync=SyncPolicy.NEVER, spare_bytes=0),
    }
    for name, make in tiers.items():
        for size in SIZES:
            with make() as tier:
                took = measure(tier, size, rounds)
            shares = " ".join(f"{took['copy'] / took[each]:5.2f}" for each in ("put", "get", "view"))
            both_us = (took["put"] + took["delete"]) * 1e6
            print(f"{name:22}{size >> 10:6} KiB  {size / took['copy'] / 1e9:5.1f} GB/s  {shares}  {both_us:8.0f} us")


def rates_of(tier: Tier, batch: int, count: int) -> list[float]:
    """Entries a second: put, get, delete, put where others were deleted."""
    body, into = body_of("", 0, 20 << 10), aligned_empty(20 << 10).data

    def in_batches(call: Callable[[list[str]], object], first: int = 0) -> float:
        batches = [[name_of(m) for m in range(n, n + batch)] for n in range(first, first + count, batch)]
        return count / seconds(lambda: [call(paths) for paths in batches])

    def put_all(paths: list[str]) -> None:
        put(tier, *((path, body) for path in paths))

    rates = [in_batches(put_all)]
    rates.append(in_batches(lambda paths: tier.get([GetRequest(path, into=into) for path in paths])))
    rates.append(in_batches(tier.delete))
    rates.append(in_batches(put_all, count))
    tier.delete([entry.path for entry in tier.list()])
    return rates


@pytest.mark.parametrize("count", [100, pytest.param(2_000, marks=pytest.mark.slow)])
def test_small_entries_a_second(tmp_path: Path, count: int) -> None:
    print("\ntier, batch: entries of 20 KiB a second: put; get; delete; put where others were deleted")
    tiers: dict[str, Callable[[], Tier]] = {"host": lambda: HostTier(1 << 30)}
    for sync in SyncPolicy:
        tiers[f"disk {sync.value}"] = partial(DiskTier, tmp_path / sync.value, 1 << 30, sync=sync)
    for name, make in tiers.items():
        for batch in (1, 10, 100):
            with make() as tier:
                rates = rates_of(tier, batch, count)
            print(f"{name:12}{batch:4}  " + " ".join(f"{rate:8.0f}" for rate in rates))
