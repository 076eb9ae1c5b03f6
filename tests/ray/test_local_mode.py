"""The same actors in Ray's own local mode, where every call runs in the caller's thread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from faulty_workers import FaultyWorker
from lock_watch import LockWatch
from ray_serving import HAS_LOCAL_MODE, QUIET, start_cluster
from serving import BLOCK, DEADLINE_S, MODELS, compute, never_moved, serve, some_tokens

from actors.cluster import RAY_NAMESPACE, RayCluster
from actors.inline import in_local_mode
from actors.ports import Port
from tiered_cache.errors import ConfigError, DeadlineError, StaleError, TierError
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import Prompt
from tiered_cache.testing.mortal import kill_actor
from tiered_cache.tiers.base import Durability

pytestmark = [
    pytest.mark.local_mode,
    pytest.mark.skipif(not HAS_LOCAL_MODE, reason=f"Ray {ray.__version__} has no local mode"),
]
MODEL = MODELS[0]


@pytest.fixture(scope="module")
def local_mode() -> Iterator[None]:
    if ray.is_initialized():
        ray.shutdown()
    with warnings.catch_warnings(action="ignore"):
        ray.init("local", local_mode=True, include_dashboard=False, num_cpus=2, **QUIET)
    assert in_local_mode()
    yield
    ray.shutdown()


@pytest.fixture(params=MODELS)
def cluster(request: pytest.FixtureRequest, local_mode: None, tmp_path: Path) -> Iterator[RayCluster]:
    with start_cluster(request.param, disk_dir=tmp_path / "tiers", disk_bytes=8 << 20) as cluster:
        yield cluster


def model_of(cluster: RayCluster) -> str:
    return MODELS[0] if any(part.name.startswith("qsa") for part in cluster.geometry.parts) else MODELS[1]


@pytest.mark.parametrize("durability", [Durability.HOST, Durability.DISK])
def test_out_from_one_actor_and_back_into_another(cluster: RayCluster, durability: Durability) -> None:
    first = serve(cluster, some_tokens(100), durability)
    longer = np.concatenate([some_tokens(100), some_tokens(30, seed=1)])
    second = serve(cluster, longer, durability)
    assert second.placement.restored is not None
    assert second.placement.owner != first.placement.owner
    assert second.placement.restored.mark == first.mark
    assert second.mark == never_moved(model_of(cluster), longer)
    assert cluster.counters()["router.restores"] == 1
    assert cluster.peak_rss_bytes() > 0


@pytest.mark.parametrize("count", [1, BLOCK, 2 * BLOCK + 5])
def test_suspended_at_any_token_it_goes_on_elsewhere(cluster: RayCluster, count: int) -> None:
    served = compute(cluster, some_tokens(count))
    ticket = cluster.router.suspend(served.run.source, served.placement.node, Durability.DISK, deadline_s=DEADLINE_S)
    cluster.workers[served.placement.owner].reserve(cluster.namespace, 1000, 60.0, deadline_s=1)
    restored = cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
    assert restored.source.owner != served.placement.owner
    assert restored.mark == served.mark == never_moved(model_of(cluster), some_tokens(count))
    with pytest.raises(StaleError, match="used before"):
        cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)


def test_a_death_can_be_simulated(cluster: RayCluster) -> None:
    served = serve(cluster, some_tokens(60))
    kill_actor(cluster.workers[served.placement.owner].actor, RAY_NAMESPACE)
    with pytest.raises(TierError, match="is dead"):
        cluster.workers[served.placement.owner].describe(deadline_s=1)
    longer = np.concatenate([some_tokens(60), some_tokens(4, seed=1)])
    again = serve(cluster, longer)
    assert (again.placement.restored_tokens, again.mark) == (60, never_moved(model_of(cluster), longer))
    held = compute(cluster, some_tokens(33, seed=2))
    node = held.placement.node
    kill_actor(cluster.workers[held.placement.owner].actor, RAY_NAMESPACE)
    with pytest.raises(TierError, match="is dead"):
        cluster.tierings[node].spill(held.run.offer, Durability.HOST, Hints(), 9.0, deadline_s=DEADLINE_S)


def test_a_deadline_is_seen_between_steps(local_mode: None) -> None:
    """`get(timeout=)` never fires here."""
    with start_cluster(MODEL, worker=FaultyWorker, workers=1) as cluster:
        worker = cluster.workers["worker-0"]
        free: int = worker.call(int, "free", deadline_s=1)
        worker.call(object, "sleep_in", "extend", 0.2, deadline_s=1)
        lease = worker.reserve(cluster.namespace, 100, 60.0, deadline_s=1)
        with pytest.raises(DeadlineError):
            worker.run(lease, Prompt(some_tokens(100)), (), deadline_s=0.1)
        assert worker.call(int, "free", deadline_s=1) == free


def test_what_cannot_start_is_refused_before_a_constructor_could_end_the_process(
    local_mode: None, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="file"):
        start_cluster(disk_dir=tmp_path / "file", disk_bytes=1 << 20)
    with pytest.raises(ConfigError, match="no reference model 'huge'"):
        start_cluster("huge")


def test_no_lock_is_held_when_a_call_leaves(local_mode: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watch = LockWatch(monkeypatch)
    call = Port.call

    def watched(self: Port, kind: type, method: str, *args: object, deadline_s: float, **options: object) -> object:
        watch.leaving(method)
        return call(self, kind, method, *args, deadline_s=deadline_s, **options)

    monkeypatch.setattr(Port, "call", watched)
    with start_cluster(MODEL, host_bytes=100_000, disk_dir=tmp_path / "tiers", disk_bytes=8 << 20) as cluster:
        for seed in range(5):
            serve(cluster, some_tokens(120, seed), Durability.DISK)
        serve(cluster, some_tokens(150, 0), Durability.DISK)  # a prefix that is kept
        served = compute(cluster, some_tokens(50, 7))
        node = served.placement.node
        ticket = cluster.router.suspend(served.run.source, node, Durability.DISK, deadline_s=DEADLINE_S)
        assert cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S).mark == served.mark
    assert watch.locks > 5
    offered = {"bid", "match", "inject", "fetch", "unpin", "spill", "export"}
    moved = {"suspend", "take_off", "settle", "bring_back", "let_go", "release"}
    assert offered | moved <= set(watch.calls)
