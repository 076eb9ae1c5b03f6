"""How fast the object store tier is on a real S3 server on loopback, beside a memcpy and plain calls of its client.

The server takes most of the time, on the same cores; what is asserted is that the tier adds little work of this
process, and that a call does not wait for anything else.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import obstore
import pytest
from costs import shortest_s
from obstore.store import MemoryStore, ObjectStore

from tiered_cache.testing.object_servers import BUCKET, SeaweedServer
from tiered_cache.testing.tier_suite import name_of
from tiered_cache.tiers.base import GetRequest, PutItem
from tiered_cache.tiers.object_store import ObjectStoreTier, open_store

pytestmark = pytest.mark.bench

BATCH = 8


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


class Sample:
    """Calls that move `bytes_`, by the tier and by its client alone, into the same store."""

    def __init__(self, store: ObjectStore, executor: ThreadPoolExecutor, bytes_: int) -> None:
        self.store = store
        self.tier = ObjectStoreTier(store, 4 << 30, executor)
        self.bodies = np.random.default_rng(0).integers(0, 256, (BATCH, bytes_), dtype=np.uint8)
        self.into = np.zeros_like(self.bodies)
        self.numbers = itertools.count()
        self.put_tier()
        self.put_plain()

    def memcpy(self) -> None:
        np.copyto(self.into[0], self.bodies[next(self.numbers) % BATCH])

    def put_plain(self) -> None:
        self.plain = f"plain/{next(self.numbers)}"
        obstore.put(self.store, self.plain, self.bodies[0], mode="create", use_multipart=False)

    def get_plain(self) -> None:
        np.copyto(self.into[0], np.frombuffer(memoryview(obstore.get(self.store, self.plain).bytes()), np.uint8))

    def put_tier(self) -> None:
        self.path = name_of(next(self.numbers))
        with self.tier.reserve([self.bodies.shape[1]]) as room:
            self.tier.put([PutItem(self.path, [self.bodies[0].data])], room)

    def get_tier(self) -> None:
        (answer,) = self.tier.get([GetRequest(self.path, into=self.into[0].data)])
        assert isinstance(answer, memoryview)

    def put_batch(self) -> None:
        self.paths = [name_of(next(self.numbers)) for _ in range(BATCH)]
        with self.tier.reserve([self.bodies.shape[1]] * BATCH) as room:
            self.tier.put([PutItem(p, [b.data]) for p, b in zip(self.paths, self.bodies, strict=True)], room)

    def get_batch(self) -> None:
        pairs = zip(self.paths, self.into, strict=True)
        answers = self.tier.get([GetRequest(path, into=into.data) for path, into in pairs])
        assert all(isinstance(answer, memoryview) for answer in answers)


@pytest.mark.parametrize("mebibytes", [1, 4, pytest.param(16, marks=pytest.mark.slow)])
def test_bodies_to_s3_and_back(seaweed: SeaweedServer, executor: ThreadPoolExecutor, mebibytes: int) -> None:
    store = open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", seaweed.options, request_timeout_s=120.0)
    sample = Sample(store, executor, mebibytes << 20)
    single = ("memcpy", "put_plain", "put_tier", "get_plain", "get_tier")
    calls = {name: getattr(sample, name) for name in single}
    seconds = shortest_s(calls, 24 // mebibytes + 4, time.perf_counter)
    busy = shortest_s(calls, 6, time.process_time)
    batches = shortest_s({name: getattr(sample, name) for name in ("put_batch", "get_batch")}, 2, time.perf_counter)
    seconds |= {name: taken / BATCH for name, taken in batches.items()}
    assert (sample.into == sample.bodies).all()
    print(f"\nobjects of {mebibytes} MiB on SeaweedFS")
    for name, taken in seconds.items():
        print(f"  {name:10} {mebibytes / taken:9.0f} MiB/s {seconds['memcpy'] / taken:6.3f} of a memcpy")
    assert busy["put_tier"] < 3 * busy["put_plain"] + 0.005
    assert busy["get_tier"] < 3 * busy["get_plain"] + 0.005


def test_what_the_tier_adds_to_a_call(executor: ThreadPoolExecutor) -> None:
    """On a store that costs next to nothing: a hand-over to a thread and back, and its books."""
    sample = Sample(MemoryStore(), executor, 4 << 10)
    calls = {name: getattr(sample, name) for name in ("put_plain", "put_tier", "get_plain", "get_tier")}
    seconds = shortest_s(calls, 300, time.perf_counter)
    print("\nobjects of 4 KiB in memory")
    for name, taken in seconds.items():
        print(f"  {name:10} {taken * 1e6:9.1f} us")
    # Of 300 turns one at least is not put off by whatever else the machine does.
    assert seconds["put_tier"] < seconds["put_plain"] + 0.001
    assert seconds["get_tier"] < seconds["get_plain"] + 0.001
