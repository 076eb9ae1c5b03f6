"""No lock is held while another part of the cluster is asked for something, so that it may ask back."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from lock_watch import LockWatch
from serving import DEADLINE_S, MODELS, compute, never_moved, serve, some_tokens

from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.service.local import InlineExecutor, LocalCluster
from tiered_cache.service.messages import Prompt
from tiered_cache.service.router import RestoreRouter
from tiered_cache.tiers.base import Durability


class Leaving:
    """What a port's caller sees: every call is one that leaves."""

    def __init__(self, behind: object, name: str, watch: LockWatch) -> None:
        self._behind, self._name, self._watch = behind, name, watch

    def __getattr__(self, method: str) -> object:
        def call(*args: object, deadline_s: float) -> object:
            self._watch.leaving(f"{self._name}.{method}")
            return getattr(self._behind, method)(*args, deadline_s=deadline_s)

        return call


def test_the_watch_sees_a_lock_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LockWatch(monkeypatch)
    namespace = {"__name__": "tiered_cache.test", "threading": threading}
    exec("lock, condition = threading.Lock(), threading.Condition()", namespace)
    for lock in (namespace["lock"], namespace["condition"]):
        with lock, pytest.raises(AssertionError, match=r"somewhere while holding .*tiered_cache\.test:1"):  # type: ignore[attr-defined]
            watch.leaving("somewhere")
    watch.leaving("somewhere")
    assert watch.locks == 2


@pytest.mark.parametrize("model", MODELS)
def test_no_lock_is_held_when_a_call_leaves(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watch = LockWatch(monkeypatch)
    tiers = TierSettings(host_bytes=100_000, disk_dir=tmp_path / "tiers", disk_bytes=4 << 20)
    with LocalCluster(ClusterSettings(2, WorkerSettings(engine=model), tiers)) as cluster:
        for name, worker in list(cluster.workers.items()):
            cluster.workers[name] = Leaving(worker, "owner", watch)  # type: ignore[assignment]
        cluster.tierings["local"] = Leaving(cluster.tiering, "tiering", watch)  # type: ignore[assignment]
        cluster.router = RestoreRouter(cluster.workers, cluster.tierings, InlineExecutor())
        for seed in range(6):  # past what the host tier holds
            serve(cluster, some_tokens(120, seed))
        longer = np.concatenate([some_tokens(120, 0), some_tokens(30, 9)])
        assert serve(cluster, longer, Durability.DISK).placement.restored_tokens == 120
        ticket = cluster.router.suspend(
            compute(cluster, some_tokens(50, 7)).run.source, "local", Durability.DISK, deadline_s=DEADLINE_S
        )
        assert cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S).mark == never_moved(model, some_tokens(50, 7))
        assert cluster.tiering.match(cluster.namespace, Prompt(some_tokens(9)), 1.0, deadline_s=1).plan is None
    assert watch.locks > 5
    wanted = {"owner.bid", "owner.reserve", "owner.inject", "owner.export", "owner.release", "owner.suspend"}
    assert wanted | {"tiering.match", "tiering.fetch", "tiering.spill", "tiering.unpin"} <= set(watch.calls)
