"""One blob out and back through real actors: from a worker to a tier to another worker, equal in every byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from ray_serving import start_cluster
from serving import BLOCK, DEADLINE_S, MODELS, compute, never_moved, serve, some_tokens

from actors.cluster import RayCluster
from tiered_cache.errors import FrameNotFoundError, MissReason, StaleError
from tiered_cache.service.messages import Prompt, StateMark
from tiered_cache.tiers.base import Durability, TierUsage

HOST, DISK = Durability.HOST, Durability.DISK


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(local_ray: None, model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    disk_dir = tmp_path_factory.mktemp("tiers") / "tiers"
    with start_cluster(model, disk_dir=disk_dir, disk_bytes=32 << 20) as cluster:
        yield cluster


def node_of(cluster: RayCluster) -> str:
    (node,) = cluster.tierings
    return node


def usage_of(cluster: RayCluster) -> dict[str, TierUsage]:
    usage: dict[str, TierUsage] = cluster.tierings[node_of(cluster)].call(dict, "usage", deadline_s=DEADLINE_S)
    return usage


@pytest.mark.parametrize("durability", [HOST, DISK])
def test_out_from_one_actor_and_back_into_another(cluster: RayCluster, model: str, durability: Durability) -> None:
    prompt = some_tokens(100, seed=durability)
    first = serve(cluster, prompt, durability)
    assert first.placement.restored is None
    assert first.mark == never_moved(model, prompt)
    assert [(kept.tokens, kept.durability >= durability) for kept in first.spill.kept] == [(100, True)]
    longer = np.concatenate([prompt, some_tokens(30, seed=77)])
    second = serve(cluster, longer, durability)
    assert second.placement.restored is not None
    assert second.placement.owner != first.placement.owner
    assert second.placement.restored.mark == first.mark
    assert second.mark == never_moved(model, longer)
    assert all(usage.bytes_reserved == 0 for usage in usage_of(cluster).values())


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 77])
def test_suspended_at_any_token_it_goes_on_elsewhere(cluster: RayCluster, model: str, count: int) -> None:
    prompt = some_tokens(count, seed=1000 + count)
    served = compute(cluster, prompt)
    before = cluster.workers[served.placement.owner]
    ticket = cluster.router.suspend(served.run.source, node_of(cluster), DISK, deadline_s=DEADLINE_S)
    with pytest.raises(FrameNotFoundError, match="released"):
        before.wake(served.run.source, deadline_s=DEADLINE_S)
    lease = before.reserve(cluster.namespace, 1000, 60.0, deadline_s=DEADLINE_S)  # the other has more room now
    restored = cluster.router.resume(ticket, count + 64, deadline_s=DEADLINE_S)
    assert restored.source.owner != served.placement.owner
    assert restored.mark == served.mark == never_moved(model, prompt)
    longer = np.concatenate([prompt, some_tokens(21, seed=3)])
    after = cluster.workers[restored.source.owner]
    run = after.run(restored.source, Prompt(longer), (), deadline_s=DEADLINE_S)
    assert run.marks[-1] == never_moved(model, longer)
    with pytest.raises(StaleError, match="used before"):
        cluster.router.resume(ticket, count + 64, deadline_s=DEADLINE_S)
    before.cancel(lease, deadline_s=DEADLINE_S)
    after.release(run.source, deadline_s=DEADLINE_S)


def test_decisions_and_counters_are_those_of_the_service(cluster: RayCluster) -> None:
    before = cluster.counters()
    shared = some_tokens(70, seed=5000)
    served = [serve(cluster, np.concatenate([shared, some_tokens(20, seed=5001 + n)])) for n in range(3)]
    assert [one.placement.restored_tokens for one in served] == [0, 0, 64]
    assert [one.placement.reason for one in served] == [MissReason.NOT_STORED, MissReason.NO_CHECKPOINT, None]
    after = cluster.counters()
    assert after["router.restores"] == before.get("router.restores", 0) + 1
    assert after["cache.lookups"] == before["cache.lookups"] + 3
    assert cluster.peak_rss_bytes() > 4 * (20 << 20)


@pytest.mark.parametrize("large", ["qsa-ple-gdn:large", "mla-dsa-kda:large"])
def test_frames_of_megabytes_travel_through_the_object_store(local_ray: None, large: str) -> None:
    """What is small travels with the call; these do not."""
    prompt = some_tokens(1100)
    with start_cluster(large, capacity_bytes=256 << 20) as cluster:
        first = serve(cluster, prompt)
        assert first.spill.bytes_moved > 3 << 20
        again = serve(cluster, np.concatenate([prompt, some_tokens(5, seed=1)]))
        assert again.placement.restored is not None
        assert again.placement.restored.mark == first.mark
        assert isinstance(first.mark, StateMark)
        assert again.placement.owner != first.placement.owner
