"""Two nodes on one machine: a state spilled on one is restored on the other, and a node may go away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_serving import QUICK_TO_SEE_A_DEATH, QUIET, SMALL, come_up, helpers_for_workers, start_cluster
from serving import DEADLINE_S, MODELS, NO_HINTS, compute, never_moved, serve, some_tokens

from actors.cluster import RayCluster
from actors.names import ClusterName
from actors.ports import Port, RemoteOwner
from actors.router import RouterActor
from tiered_cache.errors import CapacityError, ConfigError, FrameNotFoundError, StaleError, TierError
from tiered_cache.identity import Tokens
from tiered_cache.service.messages import Prompt
from tiered_cache.service.router import RouterSettings
from tiered_cache.testing.mortal import kill_actor
from tiered_cache.testing.object_servers import FaultyS3Server
from tiered_cache.tiers.base import Durability

MODEL = MODELS[0]


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """A Ray cluster of two nodes, as `ray.cluster_utils` makes it."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    with helpers_for_workers():
        head = {**SMALL, "_system_config": QUICK_TO_SEE_A_DEATH}
        machines = come_up(lambda: Cluster(initialize_head=True, head_node_args=head))
        come_up(lambda: machines.add_node(num_cpus=2, num_gpus=2, object_store_memory=SMALL["object_store_memory"]))
        ray.init(machines.address, **QUIET)
    yield machines
    ray.shutdown()
    machines.shutdown()


@pytest.fixture
def cluster(machines: Any) -> Iterator[RayCluster]:
    with start_cluster(MODEL, router=RouterSettings(ask_s=1.0)) as cluster:
        yield cluster


def fill(cluster: RayCluster, worker: RemoteOwner) -> None:
    """Lease all the room that a worker has."""
    tokens = 1 << 20
    while tokens > 64:
        try:
            worker.reserve(cluster.namespace, tokens, 60.0, deadline_s=DEADLINE_S)
        except CapacityError:
            tokens //= 2


def test_a_state_spilled_on_one_node_is_restored_on_the_other(cluster: RayCluster) -> None:
    here, there = cluster.tierings
    on = {worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S).node: worker for worker in cluster.workers.values()}
    assert set(on) == {here, there}
    first = serve(cluster, some_tokens(100))
    home = first.placement.node
    away = there if home == here else here
    longer = Prompt(np.concatenate([some_tokens(100), some_tokens(30, seed=1)]))
    near = compute(cluster, longer.tokens)
    assert near.placement.node == home  # near the bytes
    found = cluster.tierings[home].match(cluster.namespace, longer, 30.0, deadline_s=DEADLINE_S)
    assert found.plan is not None
    assert cluster.tierings[away].match(cluster.namespace, longer, 30.0, deadline_s=DEADLINE_S).plan is None
    restored = on[away].inject(found.plan, longer, 200, b"", deadline_s=DEADLINE_S)
    assert restored.mark == first.mark
    run = on[away].run(restored.source, longer, (), deadline_s=DEADLINE_S)
    assert run.marks[-1] == never_moved(MODEL, longer.tokens)
    # and through the router, when the node near the bytes has no room
    fill(cluster, on[home])
    elsewhere = compute(cluster, longer.tokens)
    assert (elsewhere.placement.node, elsewhere.placement.restored_tokens) == (away, 100)
    assert elsewhere.mark == never_moved(MODEL, longer.tokens)
    assert elsewhere.placement.refusals[0][0] == "CapacityError"


def test_workers_are_placed_where_their_gpus_are(machines: Any) -> None:
    """So Ray believes; the workers do not use any."""
    with start_cluster(MODEL, num_gpus=1) as cluster:
        bids = [worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S) for worker in cluster.workers.values()]
        (node,) = {bid.node for bid in bids}
        assert list(cluster.tierings) == [node]
        assert next(n for n in ray.nodes() if n["NodeID"] == node)["Resources"]["GPU"] == 2
        assert serve(cluster, some_tokens(20)).spill.kept
    with pytest.raises(ConfigError, match="3 workers with 1 GPUs each, room for 2"):
        start_cluster(MODEL, workers=3, num_gpus=1)


def test_a_suspended_sequence_is_resumed_on_another_node(cluster: RayCluster) -> None:
    served = compute(cluster, some_tokens(50))
    away = next(node for node in cluster.tierings if node != served.placement.node)
    ticket = cluster.router.suspend(served.run.source, away, Durability.HOST, deadline_s=DEADLINE_S)
    resumed = cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S)
    assert resumed.source.owner != served.placement.owner
    assert resumed.mark == served.mark


def is_dead(port: Port) -> bool:
    try:
        port.call(object, "peak_rss_bytes", deadline_s=5)
    except TierError:
        return True
    return False


def node_of(actor: Any) -> str:
    node: str = ray.get(
        actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()), timeout=DEADLINE_S
    )
    return node


def router_on(cluster: RayCluster, node: str) -> Any:
    """Make sure that the router is on this node: Ray takes a soft affinity for a hint. Its handle keeps it alive."""
    port = cluster.router
    blueprint, workers, nodes = port.members(deadline_s=DEADLINE_S)
    handle = ray.get_actor(port.actor, namespace=port.ray_namespace)
    until_s = time.monotonic() + 240
    while node_of(handle) != node:
        assert time.monotonic() < until_s
        kill_actor(port.actor, port.ray_namespace)
        options = {
            "name": port.actor,
            "namespace": port.ray_namespace,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 8,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True),
        }
        names = ClusterName(cluster.cluster.name, port.ray_namespace)
        handle = ray.remote(RouterActor).options(**options).remote(names, blueprint, {})
        assert port.members(deadline_s=DEADLINE_S) == (blueprint, workers, nodes)
    return handle


@pytest.mark.parametrize("with_router", [False, True])
def test_a_node_that_goes_away_takes_only_what_it_held(machines: Any, with_router: bool) -> None:
    """Also if the router was on it, which is a while in coming back."""
    doomed = come_up(lambda: machines.add_node(num_cpus=1, object_store_memory=SMALL["object_store_memory"]))
    home = doomed.node_id if with_router else machines.head_node.node_id
    with start_cluster(MODEL, workers=3, router=RouterSettings(ask_s=1.0)) as cluster:
        router = router_on(cluster, home)
        nodes = {
            name: worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S).node
            for name, worker in cluster.workers.items()
        }
        lost_worker = next(name for name, node in nodes.items() if node == doomed.node_id)
        kept_worker = next(name for name, node in nodes.items() if node != doomed.node_id)
        plans = {}
        for seed, name in enumerate((lost_worker, kept_worker)):
            worker = cluster.workers[name]
            lease = worker.reserve(cluster.namespace, 200, 60.0, deadline_s=DEADLINE_S)
            run = worker.run(lease, Prompt(some_tokens(60, seed)), (), deadline_s=DEADLINE_S)
            plans[name] = cluster.router.suspend(run.source, nodes[name], Durability.HOST, deadline_s=DEADLINE_S)
        machines.remove_node(doomed, allow_graceful=False)
        while not is_dead(cluster.tierings[doomed.node_id]):  # its processes live on for a moment
            time.sleep(0.1)
        started_s = time.monotonic()
        longer = np.concatenate([some_tokens(60, 1), some_tokens(9, 5)])
        again = compute(cluster, longer, deadline_s=10)
        assert time.monotonic() - started_s < 11
        assert again.placement.restored_tokens == 60
        assert again.mark == never_moved(MODEL, longer)
        started_s = time.monotonic()
        with pytest.raises((TierError, FrameNotFoundError)):
            cluster.router.resume(plans[lost_worker], 200, deadline_s=5)
        assert time.monotonic() - started_s < 6
        assert cluster.router.resume(plans[kept_worker], 200, deadline_s=10).mark == never_moved(
            MODEL, some_tokens(60, 1)
        )
        assert not with_router or node_of(router) != home
        recomputed = compute(cluster, plans[lost_worker].prompt.tokens, deadline_s=10)
        assert recomputed.mark == never_moved(MODEL, some_tokens(60, 0))
        assert not cluster.heal(), "the nodes that are left have their workers"
        assert (len(cluster.workers), len(cluster.tierings)) == (2, 2)
        joined = come_up(lambda: machines.add_node(num_cpus=1, object_store_memory=SMALL["object_store_memory"]))
        assert set(cluster.heal()) == {lost_worker, f"tiering-{joined.node_id}"}
        assert not cluster.heal(), "it has begun"
        until_s = time.monotonic() + 120
        while (placed := serve(cluster, some_tokens(40, time.time_ns())).placement).owner != lost_worker:
            assert time.monotonic() < until_s
        assert placed.node == joined.node_id
    machines.remove_node(joined)


# One object store for all nodes


@pytest.fixture
def store() -> Iterator[FaultyS3Server]:
    with FaultyS3Server() as store:
        yield store


def through(store: FaultyS3Server) -> dict[str, Any]:
    """Settings of a tier whose objects are in this store."""
    return {"object_url": "s3://bucket/p", "object_bytes": 64 << 20, "object_options": store.options}


def test_what_a_node_left_in_the_store_is_restored_on_another_after_the_first_is_gone(
    machines: Any, store: FaultyS3Server
) -> None:
    doomed = come_up(lambda: machines.add_node(num_cpus=1, object_store_memory=SMALL["object_store_memory"]))
    with start_cluster(MODEL, workers=3, router=RouterSettings(ask_s=5.0), **through(store)) as cluster:
        nodes = {
            name: worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S).node
            for name, worker in cluster.workers.items()
        }
        name = next(name for name, node in nodes.items() if node == doomed.node_id)
        worker, home = cluster.workers[name], cluster.tierings[doomed.node_id]
        prompt = Prompt(some_tokens(60))
        run = worker.run(worker.reserve(cluster.namespace, 200, 60.0, deadline_s=DEADLINE_S), prompt, (), deadline_s=20)
        spilled = home.spill(run.offer, Durability.OBJECT, NO_HINTS, None, deadline_s=DEADLINE_S)
        assert [(kept.tokens, kept.durability) for kept in spilled.kept] == [(60, Durability.OBJECT)]
        ticket = cluster.router.suspend(run.source, doomed.node_id, Durability.OBJECT, deadline_s=DEADLINE_S)
        machines.remove_node(doomed, allow_graceful=False)
        while not is_dead(home):
            time.sleep(0.1)
        longer = np.concatenate([prompt.tokens, some_tokens(9, 5)])
        again = compute(cluster, longer, deadline_s=DEADLINE_S)
        assert (again.placement.restored_tokens, again.mark) == (60, never_moved(MODEL, longer))
        assert again.placement.node != doomed.node_id
        resumed = cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
        assert resumed.mark == never_moved(MODEL, prompt.tokens)
        with pytest.raises(StaleError):
            cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)


def test_a_catalogue_that_is_restarted_finds_what_the_store_holds(machines: Any, store: FaultyS3Server) -> None:
    with start_cluster(MODEL, router=RouterSettings(ask_s=5.0), host_bytes=0, **through(store)) as cluster:
        assert serve(cluster, some_tokens(60), Durability.OBJECT).spill.kept
        before = cluster.catalogue.call(dict, "usage", deadline_s=DEADLINE_S)["object"]
        ray.kill(ray.get_actor(cluster.catalogue.actor, namespace=cluster.catalogue.ray_namespace), no_restart=False)
        longer = np.concatenate([some_tokens(60), some_tokens(9, 5)])
        served = compute(cluster, longer, deadline_s=DEADLINE_S)  # to spill it has to wait
        assert served.mark == never_moved(MODEL, longer)
        while is_dead(cluster.catalogue):
            time.sleep(0.1)
        served = compute(cluster, np.concatenate([longer, some_tokens(9, 6)]), deadline_s=DEADLINE_S)
        assert served.placement.restored_tokens >= 60
        assert served.mark == never_moved(MODEL, np.concatenate([longer, some_tokens(9, 6)]))
        after = cluster.catalogue.call(dict, "usage", deadline_s=DEADLINE_S)["object"]
        assert after.bytes_used >= before.bytes_used
        until_s = time.monotonic() + 60
        while not acknowledged(cluster, some_tokens(40, seed=9)):  # the claim of the one that was killed is waited for
            assert time.monotonic() < until_s
            time.sleep(0.1)


def acknowledged(cluster: RayCluster, tokens: Tokens) -> bool:
    """Whether the store takes something new; if it does not, it may soon."""
    try:
        return bool(serve(cluster, tokens, Durability.OBJECT).spill.kept)
    except TierError as error:
        if not error.retryable:
            raise
        return False


def test_a_store_that_is_another_in_each_process_is_refused(machines: Any) -> None:
    with pytest.raises(ConfigError, match="not one for all"):
        start_cluster(MODEL, object_url="memory:///", object_bytes=1 << 20)
