"""What is on its way through a node is bounded: others wait, and are refused in the end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from serving import DEADLINE_S, compute, serve
from spilling import MIXED, State, match, node, open_disk, open_host, some_tokens, spill

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.deadline import Deadline, until
from tiered_cache.errors import CapacityError, ConfigError, MissReason
from tiered_cache.identity import FrameKey
from tiered_cache.in_flight import BytesInFlight
from tiered_cache.policy.base import Hints
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.local import LocalCluster
from tiered_cache.tiers.base import Durability


def test_room_is_given_in_parts_and_comes_back() -> None:
    flow = BytesInFlight(100)
    assert flow.take([40, 40, 40]) == 2
    with flow.hold(20):
        assert flow.bytes == 100
        with until(Deadline.after(0.05)), pytest.raises(CapacityError, match="0 of 100"):
            flow.take([1])
    assert flow.bytes == 80
    flow.give_back(80)
    assert flow.take([1000, 1]) == 1  # what is larger passes alone
    with until(Deadline.after(0.05)), pytest.raises(CapacityError):
        flow.take([1])
    flow.give_back(1000)
    assert flow.bytes == 0


def test_who_waits_gets_the_room_that_others_give_back() -> None:
    flow, array = BytesInFlight(100), np.zeros(100, np.uint8)
    flow.take([100])
    flow.give_back_with(array, 100)
    part = array[10:20]
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(flow.take, [60])
        del array
        time.sleep(0.05)
        assert not waiting.done()  # a part of it is in use
        del part
        assert waiting.result(10) == 1
    assert flow.bytes == 60


def keys_on(cache: TieredCache) -> list[FrameKey]:
    tokens = some_tokens(9)
    spill(cache, State(MIXED, tokens), durability=Durability.DISK)
    hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
    assert hit is not None
    return [planned.key for planned in hit.frames]


def test_what_is_fetched_is_in_flight_until_it_is_dropped(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor:
        slots = [TierSlot(open_disk(tmp_path), LruPolicy())]
        cache = TieredCache(slots, executor, in_flight_bytes=10_000)
        cache.register(State(MIXED, some_tokens(1)).identity, MIXED)
        keys = keys_on(cache)
        assert len(keys) == 3
        bodies = cache.fetch(keys, 1 << 20)
        assert len(bodies) == 2  # the third has no room
        assert 9_000 < cache.in_flight.bytes <= 10_000
        with until(Deadline.after(0.1)), pytest.raises(CapacityError, match="in flight"):
            cache.fetch(keys[2:], 1 << 20)
        del bodies
        assert cache.fetch([keys[0].__class__(**{**_fields(keys[0]), "tokens": 8})], 100) == [MissReason.LOST]
        assert cache.in_flight.bytes == 0
        assert len(cache.fetch(keys[2:], 1 << 20)) == 1
        assert cache.fetch([], 100) == []
        cache.close()


def _fields(key: FrameKey) -> dict[str, object]:
    return {name: getattr(key, name) for name in key.__dataclass_fields__}


def test_spills_of_a_cluster_are_in_flight_while_they_are_stored() -> None:
    tiers = TierSettings(in_flight_bytes=200_000)
    with LocalCluster(ClusterSettings(1, WorkerSettings(engine="qsa-ple-gdn:small"), tiers)) as cluster:
        flow, worker = cluster.cache.in_flight, cluster.workers["worker-0"]
        seen: list[int] = []
        export = worker.export

        def watched(*args: object, **named: object) -> object:
            seen.append(flow.bytes)
            return export(*args, **named)  # type: ignore[arg-type]

        worker.export = watched  # type: ignore[method-assign, assignment]
        prompt = some_tokens(60) % 250 + 3
        served = serve(cluster, prompt)
        assert served.spill.kept
        assert seen == [served.spill.bytes_moved] != [0]
        assert flow.bytes == 0
        again = serve(cluster, np.concatenate([prompt, prompt[:20]]))
        assert again.placement.restored_tokens == 60
        assert flow.bytes == 0
        other = compute(cluster, some_tokens(60, 1) % 250 + 3)
        flow.take([200_000])
        with pytest.raises(CapacityError, match="in flight"):
            cluster.tiering.spill(other.run.offer, Durability.HOST, Hints(), None, deadline_s=2.0)
        assert cluster.cache.usage()["host"].bytes_reserved == 0
        timer = threading.Timer(0.1, flow.give_back, [200_000])
        timer.start()
        assert cluster.tiering.spill(other.run.offer, Durability.HOST, Hints(), None, deadline_s=DEADLINE_S).kept
        timer.join()


def test_a_bound_must_let_something_pass() -> None:
    with pytest.raises(ConfigError, match="in_flight_bytes"):
        TierSettings(in_flight_bytes=0)
    with node(open_host()) as cache:
        assert cache.in_flight.bytes_max == 1 << 30
