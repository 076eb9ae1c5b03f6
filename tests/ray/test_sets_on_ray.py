"""Sets of owners as actors: a rank each, a sequence on all or on none, also when one of them dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import ray
from ray_serving import start_cluster
from serving import DEADLINE_S, MODELS, compute, serve, some_tokens

from actors.cluster import RAY_NAMESPACE, RayCluster
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import TieredCacheError
from tiered_cache.identity import Tokens
from tiered_cache.service.messages import StateMark
from tiered_cache.service.owner_set import combined_mark
from tiered_cache.testing.mortal import kill_actor
from tiered_cache.tiers.base import Durability

MODEL = MODELS[0]
SHARDS = 2

Start = Callable[..., RayCluster]


@pytest.fixture
def cluster(local_ray: None) -> Iterator[RayCluster]:
    with start_cluster(MODEL, shards=SHARDS) as cluster:
        yield cluster


def never_moved(tokens: Tokens) -> StateMark | None:
    marks = []
    for rank in range(SHARDS):
        engine = ReferenceEngine(MODEL, shards=SHARDS, rank=rank)
        sequence = engine.start(engine.reserve(len(tokens)))
        engine.extend(sequence, tokens)
        marks.append(StateMark(len(tokens), engine.digest(sequence), engine.output(sequence)))
    return combined_mark(marks)


def free_bytes(cluster: RayCluster) -> set[int]:
    return {worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S).bytes_free for worker in cluster.workers.values()}


def test_out_from_one_set_and_back_into_another(cluster: RayCluster) -> None:
    (node,) = cluster.tierings
    free = free_bytes(cluster)
    first = serve(cluster, some_tokens(100))
    assert first.mark == never_moved(some_tokens(100))
    longer = np.concatenate([some_tokens(100), some_tokens(30, seed=1)])
    second = compute(cluster, longer)
    assert second.placement.restored is not None
    assert second.placement.owner != first.placement.owner
    assert second.placement.restored.mark == first.mark
    ticket = cluster.router.suspend(second.run.source, node, Durability.HOST, deadline_s=DEADLINE_S)
    resumed = cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
    assert resumed.mark == second.mark == never_moved(longer)
    cluster.workers[resumed.source.owner].release(resumed.source, deadline_s=DEADLINE_S)
    assert free_bytes(cluster) == free
    joined = RayCluster.connect(cluster.cluster.name)
    assert serve(joined, longer[:110]).placement.restored_tokens == 100


def test_a_rank_that_dies_takes_its_set_with_it_until_it_is_back(cluster: RayCluster) -> None:
    free = free_bytes(cluster)
    served = serve(cluster, some_tokens(100))
    running = compute(cluster, some_tokens(40, seed=3))
    broken = running.placement.owner
    other = next(name for name in cluster.workers if name != broken)
    rank = cluster.cluster.owners(broken)[1]
    kill_actor(cluster.cluster.actor(rank), RAY_NAMESPACE)
    with pytest.raises(TieredCacheError):
        cluster.workers[broken].suspend(running.run.source, deadline_s=DEADLINE_S)
    longer = np.concatenate([some_tokens(100), some_tokens(30, seed=1)])
    again = compute(cluster, longer)
    assert (again.placement.owner, again.placement.restored_tokens) == (other, 100)
    assert again.placement.restored is not None
    assert again.placement.restored.mark == served.mark
    assert again.mark == never_moved(longer)
    cluster.workers[other].release(again.run.source, deadline_s=DEADLINE_S)
    with pytest.raises(TieredCacheError):  # on the rank that is left it is gone now
        cluster.workers[broken].release(running.run.source, deadline_s=DEADLINE_S)
    assert cluster.heal() == (rank,), "it was killed for good: Ray does not restart it"
    until_s = time.monotonic() + 120
    while serve(cluster, some_tokens(30, seed=time.time_ns())).placement.owner != broken:
        assert time.monotonic() < until_s
    assert free_bytes(cluster) == free
    assert ray.is_initialized()
