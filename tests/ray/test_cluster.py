"""Starting, joining and ending a set of actors; and what a port makes of every kind of answer."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from faulty_workers import FaultyWorker
from serving import DEADLINE_S, serve, some_tokens

from actors.blueprint import Blueprint, place_workers
from actors.cluster import RAY_NAMESPACE, RayCluster
from actors.names import ClusterName
from actors.ports import Port, RemoteOwner
from actors.sequence import SequenceActor
from tiered_cache.config import ClusterSettings, WorkerSettings
from tiered_cache.errors import CapacityError, ConfigError, IdentityError, TierError
from tiered_cache.service.owner_set import OwnerSet
from tiered_cache.service.router import RouterSettings

Start = Callable[..., RayCluster]


def actors_of(name: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in named if actor["name"].startswith(f"{name}/"))


def gone(name: str) -> bool:
    until_s = time.monotonic() + 120
    while actors_of(name) and time.monotonic() < until_s:
        time.sleep(0.1)
    return not actors_of(name)


def test_ray_that_was_there_is_used_and_left(start: Start) -> None:
    cluster = start()
    name = cluster.cluster.name
    (node,) = cluster.tierings
    assert actors_of(name) == [f"{name}/router", f"{name}/tiering-{node}", f"{name}/worker-0", f"{name}/worker-1"]
    assert serve(cluster, some_tokens(20)).spill.kept
    with pytest.raises(ConfigError, match=f"cluster '{name}' is running already"):
        RayCluster.start(ClusterSettings(name=name))
    assert len(actors_of(name)) == 4
    cluster.close()
    cluster.close()
    assert ray.is_initialized()
    assert gone(name)


def test_a_detached_set_is_joined_by_name_and_ended_by_anyone(local_ray: None) -> None:
    settings = ClusterSettings(workers=1, name="detached-set")
    started = RayCluster.start(settings, detached=True)
    started.close()
    joined = RayCluster.connect("detached-set")
    assert joined.namespace == started.namespace
    assert serve(joined, some_tokens(20)).spill.kept
    joined.close()
    assert len(actors_of("detached-set")) == 3
    RayCluster.connect("detached-set").shut_down()
    assert gone("detached-set")
    assert ray.is_initialized()
    with pytest.raises(ConfigError, match="no cluster 'detached-set' to connect to"):
        RayCluster.connect("detached-set")


def test_what_cannot_start_says_why_in_one_line_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    before = ray.util.list_named_actors(all_namespaces=True)
    with pytest.raises(ConfigError, match=str(tmp_path / "file")) as refused:
        start(disk_dir=tmp_path / "file", disk_bytes=1 << 20)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="no reference model 'huge'"):
        start("huge")
    until_s = time.monotonic() + 120
    while ray.util.list_named_actors(all_namespaces=True) != before:
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_errors_cross_whole_and_what_is_not_the_librarys_is_a_tiers(start: Start) -> None:
    cluster = start(worker=FaultyWorker, workers=1)
    worker = cluster.workers["worker-0"]
    with pytest.raises(CapacityError, match="1099511627776 tokens take"):
        worker.reserve(cluster.namespace, 1 << 40, 1.0, deadline_s=DEADLINE_S)
    with pytest.raises(IdentityError, match="was asked for"):
        worker.bid(b"x" * 32, (), deadline_s=DEADLINE_S)
    with pytest.raises(TierError, match="ZeroDivisionError") as failed:
        worker.call(object, "fail", deadline_s=DEADLINE_S)
    assert not failed.value.retryable
    with pytest.raises(TierError, match="answered with int, not str"):
        worker.call(str, "free", deadline_s=DEADLINE_S)
    with pytest.raises(TierError, match="nobody is not there") as unknown:
        Port(f"{cluster.cluster.name}/nobody", RAY_NAMESPACE).call(object, "free", deadline_s=1)
    assert unknown.value.retryable


def test_without_ray_a_port_says_so_and_starts_none(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "get_actor", lambda *args, **options: pytest.fail("Ray would start now"))
    with pytest.raises(TierError, match="Ray is not running"):
        Port("a/b", RAY_NAMESPACE).call(object, "free", deadline_s=1)


def test_names_and_ports_travel() -> None:
    name = ClusterName("a", "b")
    assert name.owner("x") is name.owner("x")
    sent = pickle.loads(pickle.dumps(name))
    assert sent == name
    owner = pickle.loads(pickle.dumps(name.owner("x")))
    assert (type(owner), owner.actor, owner.ray_namespace) == (RemoteOwner, "a/x", "b")


def test_lost_workers_go_where_there_is_room_for_one() -> None:
    """As many on a node as at the start, and never more than it has GPUs for; the others wait."""
    settings = ClusterSettings(workers=4, worker=WorkerSettings("mla-dsa-kda:tiny", num_gpus=0.5, shards=2))
    at_start = Blueprint(settings, SequenceActor, RouterSettings(), detached=False)
    assert (at_start.workers, at_start.gpus_each) == (("worker-0", "worker-1", "worker-2", "worker-3"), 1.0)
    places = place_workers(at_start.workers, {"a": 4.0, "b": 1.5, "c": 0.5}, {}, at_start)
    assert places == {"worker-0": "a", "worker-1": "b", "worker-2": "a", "worker-3": "a"}
    then = replace(at_start, workers_per_node=2)
    alive = {"worker-1": "b", "worker-3": "d"}
    lost = ["worker-0", "worker-2"]
    assert place_workers(lost, {"b": 9.0, "d": 1.0}, alive, then) == {"worker-0": "b"}, "d has no GPU left"
    assert place_workers(lost, {"b": 9.0, "d": 9.0}, alive, then) == {"worker-0": "b", "worker-2": "d"}
    assert place_workers(lost, {"b": 9.0, "d": 9.0, "e": 9.0}, alive, then) == {"worker-0": "e", "worker-2": "b"}
    assert place_workers(lost, {}, alive, then) == {}


def test_sets_have_an_actor_a_rank_and_names_that_travel() -> None:
    name = ClusterName("a", "b", 2, patient=True)
    assert name.owners("worker-3") == ("worker-3.0", "worker-3.1")
    worker = name.worker("worker-3")
    assert isinstance(worker, OwnerSet)
    assert worker is name.worker("worker-3")
    assert [rank.actor for rank in worker.ranks if isinstance(rank, RemoteOwner)] == ["a/worker-3.0", "a/worker-3.1"]
    sent = pickle.loads(pickle.dumps(name))
    assert (sent, sent.patient) == (name, True)
    name.forget("worker-3")
    assert worker is not name.worker("worker-3")
    alone = ClusterName("a", "b")
    assert alone.worker("worker-3") is alone.owner("worker-3")
