"""What survives when a worker, a tiering actor or the router dies or hangs, and how soon its callers know."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray
from faulty_workers import FaultyWorker
from serving import DEADLINE_S, MODELS, compute, never_moved, serve, some_tokens

from actors.cluster import RAY_NAMESPACE, RayCluster
from actors.ports import GRACE_S, Port
from tiered_cache.errors import DeadlineError, MissReason, StaleError, TieredCacheError, TierError, UnknownOutcomeError
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import Prompt, Ticket
from tiered_cache.service.router import RouterSettings
from tiered_cache.testing.mortal import kill_actor
from tiered_cache.tiers.base import Durability, TierUsage

HOST, DISK = Durability.HOST, Durability.DISK
MODEL = MODELS[0]
NOISE_S = 2.0
"""How late a busy machine may make an answer."""

Start = Callable[..., RayCluster]


def node_of(cluster: RayCluster) -> str:
    (node,) = cluster.tierings
    return node


def host_usage(cluster: RayCluster) -> TierUsage:
    usage: dict[str, TierUsage] = cluster.tierings[node_of(cluster)].call(dict, "usage", deadline_s=DEADLINE_S)
    return usage["host"]


def restart(port: Port) -> None:
    """Kill an actor's process, and wait until that is noticed and the next one answers."""
    ray.kill(ray.get_actor(port.actor, namespace=RAY_NAMESPACE), no_restart=False)
    wait_for(port)


def wait_for(port: Port, *, died: bool = False) -> None:
    """Wait until an actor that was killed is noticed to have `died`, and the next one answers."""
    until_s = time.monotonic() + 120
    while True:
        assert time.monotonic() < until_s
        try:
            port.call(object, "peak_rss_bytes", deadline_s=5)
        except TieredCacheError:
            died = True
        else:
            if died:
                return
        time.sleep(0.02)


# Workers


def test_a_worker_that_dies_between_export_and_acknowledgement(start: Start) -> None:
    """Nothing of its spill is acknowledged or held, and what was acknowledged before is restored elsewhere."""
    cluster = start(worker=FaultyWorker)
    prompt, longer = some_tokens(100), np.concatenate([some_tokens(100), some_tokens(60, seed=1)])
    serve(cluster, prompt)
    before = host_usage(cluster)
    served = compute(cluster, longer)
    worker = cluster.workers[served.placement.owner]
    worker.call(object, "die_in", "export", deadline_s=DEADLINE_S)
    started_s = time.monotonic()
    with pytest.raises(TierError, match=r"worker-. is restarting"):
        cluster.tierings[node_of(cluster)].spill(served.run.offer, HOST, Hints(), 60.0, deadline_s=DEADLINE_S)
    assert time.monotonic() - started_s < DEADLINE_S
    after = host_usage(cluster)
    assert (after.entries, after.bytes_used, after.bytes_reserved) == (before.entries, before.bytes_used, 0)
    kill_actor(worker.actor, RAY_NAMESPACE)
    again = serve(cluster, longer)
    assert again.placement.restored_tokens == 100
    assert again.placement.owner != served.placement.owner
    assert again.mark == served.mark == never_moved(MODEL, longer)


def test_a_worker_that_dies_after_the_acknowledgement(start: Start) -> None:
    """Its sequences restore elsewhere: the one that was spilled, and the one that was suspended."""
    cluster = start()
    served = compute(cluster, some_tokens(100))
    owner, node = served.placement.owner, served.placement.node
    spilled = cluster.tierings[node].spill(served.run.offer, HOST, Hints(), None, deadline_s=DEADLINE_S)
    assert [kept.tokens for kept in spilled.kept] == [100]
    other = next(name for name in cluster.workers if name != owner)
    lease = cluster.workers[owner].reserve(cluster.namespace, 100, 60.0, deadline_s=DEADLINE_S)
    running = cluster.workers[owner].run(lease, Prompt(some_tokens(77, seed=1)), (), deadline_s=DEADLINE_S)
    ticket = cluster.router.suspend(running.source, node, HOST, deadline_s=DEADLINE_S)
    kill_actor(cluster.workers[owner].actor, RAY_NAMESPACE)
    longer = np.concatenate([some_tokens(100), some_tokens(9, seed=2)])
    again = compute(cluster, longer)
    assert (again.placement.owner, again.placement.restored_tokens) == (other, 100)
    assert again.placement.restored is not None
    assert again.placement.restored.mark == served.mark
    assert again.mark == never_moved(MODEL, longer)
    resumed = cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
    assert resumed.source.owner == other
    assert resumed.mark == running.marks[-1] == never_moved(MODEL, some_tokens(77, seed=1))


def test_a_worker_that_came_back_knows_nothing_of_its_past(start: Start) -> None:
    cluster = start(workers=1)
    served = compute(cluster, some_tokens(40))
    worker = cluster.workers["worker-0"]
    restart(worker)
    assert worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S).generation > served.run.source.generation
    with pytest.raises(StaleError, match=str(served.run.source.generation)):
        worker.release(served.run.source, deadline_s=DEADLINE_S)
    with pytest.raises(StaleError, match=str(served.run.source.generation)):
        cluster.tierings[node_of(cluster)].spill(served.run.offer, HOST, Hints(), None, deadline_s=DEADLINE_S)
    assert host_usage(cluster).bytes_reserved == 0
    with pytest.raises(StaleError):
        cluster.router.suspend(served.run.source, node_of(cluster), HOST, deadline_s=DEADLINE_S)
    assert serve(cluster, some_tokens(40)).mark == never_moved(MODEL, some_tokens(40))


def test_a_worker_that_hangs_delays_nobody_past_the_deadline(start: Start) -> None:
    cluster = start(worker=FaultyWorker, router=RouterSettings(ask_s=0.5))
    serve(cluster, some_tokens(100))
    stuck, other = cluster.workers["worker-0"], cluster.workers["worker-1"]
    served = compute(cluster, some_tokens(100, seed=2))
    holder = cluster.workers[served.placement.owner]
    holder.call(object, "sleep_in", "export", 30.0, deadline_s=DEADLINE_S)
    started_s = time.monotonic()
    with pytest.raises(DeadlineError):
        cluster.tierings[node_of(cluster)].spill(served.run.offer, HOST, Hints(), 60.0, deadline_s=0.5)
    assert time.monotonic() - started_s < 0.5 + GRACE_S + NOISE_S
    # a worker that hangs where it answers bids is left out, and one that hangs while it restores is given up
    stuck.call(object, "sleep_in", "bytes_free", 30.0, deadline_s=DEADLINE_S)
    started_s = time.monotonic()
    placed = cluster.router.place(cluster.namespace, Prompt(some_tokens(101)), 200, deadline_s=5.0)
    assert time.monotonic() - started_s < 0.5 + GRACE_S + NOISE_S
    assert placed.owner == "worker-1"
    assert ("DeadlineError", "no answer in time") in placed.refusals
    other.call(object, "sleep_in", "digest", 30.0, deadline_s=DEADLINE_S)
    started_s = time.monotonic()
    longer = Prompt(np.concatenate([some_tokens(100), some_tokens(5, seed=1)]))
    placed = cluster.router.place(cluster.namespace, longer, 200, deadline_s=2.0)
    assert time.monotonic() - started_s < 2.0 + GRACE_S + NOISE_S
    assert (placed.owner, placed.restored, placed.reason) == ("worker-1", None, MissReason.DEADLINE)


def test_what_its_callers_have_given_up_leaves_no_sequence_behind(start: Start) -> None:
    """Neither a run that was too slow, nor one that waited behind four of those and has not begun."""
    cluster = start(workers=1, worker=FaultyWorker)
    worker = cluster.workers["worker-0"]
    free: int = worker.call(int, "free", deadline_s=DEADLINE_S)
    worker.call(object, "sleep_in", "extend", 3.5, deadline_s=DEADLINE_S)
    handle = ray.get_actor(worker.actor, namespace=RAY_NAMESPACE)
    prompt = Prompt(some_tokens(40))
    leases = [worker.reserve(cluster.namespace, 40, 60.0, deadline_s=DEADLINE_S) for _ in range(5)]
    running = [handle.run.remote(lease, prompt, (), deadline_s=0.5) for lease in leases[:4]]
    started_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"worker-0\.run did not answer within 0\.5 s"):
        worker.run(leases[4], prompt, (), deadline_s=0.5)
    assert time.monotonic() - started_s < 0.5 + GRACE_S + NOISE_S
    for reference in running:
        with pytest.raises(DeadlineError):
            ray.get(reference, timeout=DEADLINE_S)
    worker.call(object, "sleep_in", "extend", 0.0, deadline_s=DEADLINE_S)
    worker.cancel(leases[4], deadline_s=DEADLINE_S)  # its room was never used
    assert worker.call(int, "free", deadline_s=DEADLINE_S) == free


# Tiering actors


def test_a_tiering_actor_that_dies_takes_what_was_in_memory_alone(start: Start, tmp_path: Path) -> None:
    cluster = start(disk_dir=tmp_path / "tiers", disk_bytes=32 << 20)
    node = node_of(cluster)
    on_disk, in_memory = some_tokens(100), some_tokens(100, seed=1)
    serve(cluster, on_disk, DISK)
    served = compute(cluster, some_tokens(50, seed=2))
    ticket = cluster.router.suspend(served.run.source, node, DISK, deadline_s=DEADLINE_S)
    serve(cluster, in_memory, HOST)
    longer = np.concatenate([on_disk, some_tokens(5, seed=3)])
    ray.kill(ray.get_actor(cluster.tierings[node].actor, namespace=RAY_NAMESPACE), no_restart=False)
    started_s = time.monotonic()
    while_away = compute(cluster, longer, deadline_s=10)
    assert time.monotonic() - started_s < 10 + GRACE_S + NOISE_S
    assert while_away.mark == never_moved(MODEL, longer)
    wait_for(cluster.tierings[node], died=True)
    found = compute(cluster, longer)
    assert found.placement.restored_tokens == 100
    assert found.mark == never_moved(MODEL, longer)
    lost = compute(cluster, np.concatenate([in_memory, some_tokens(5, seed=3)]))
    assert (lost.placement.restored, lost.placement.reason) == (None, MissReason.LOST)
    never = compute(cluster, some_tokens(60, seed=9))
    assert (never.placement.restored, never.placement.reason) == (None, MissReason.NOT_STORED)
    counters: dict[str, int] = cluster.tierings[node].call(dict, "counters", deadline_s=DEADLINE_S)
    assert counters["frames.host.lost"] == counters["frames.host.found"] > 0
    assert cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S).mark == served.mark
    for _ in range(2):
        with pytest.raises(StaleError, match="used before"):
            cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S)
        restart(cluster.tierings[node])  # nor does the next one know it as good


def test_without_a_disk_it_comes_back_empty_and_learns_what_it_serves(start: Start) -> None:
    cluster = start()
    node = node_of(cluster)
    serve(cluster, some_tokens(100))
    held = compute(cluster, some_tokens(60, seed=1))
    restart(cluster.tierings[node])
    longer = np.concatenate([some_tokens(100), some_tokens(5, seed=3)])
    miss = compute(cluster, longer)
    assert (miss.placement.restored, miss.placement.reason) == (None, MissReason.LOST)
    kept = cluster.tierings[node].spill(held.run.offer, HOST, Hints(), None, deadline_s=DEADLINE_S).kept
    assert [checkpoint.tokens for checkpoint in kept] == [60]
    again = serve(cluster, np.concatenate([some_tokens(60, seed=1), some_tokens(5, seed=3)]))
    assert again.placement.restored_tokens == 60


# The router


def test_a_router_that_dies_loses_nothing(start: Start) -> None:
    cluster = start()
    served = compute(cluster, some_tokens(50))
    serve(cluster, some_tokens(100, seed=1))
    ticket = cluster.router.suspend(served.run.source, node_of(cluster), HOST, deadline_s=DEADLINE_S)
    restart(cluster.router)
    again = serve(cluster, np.concatenate([some_tokens(100, seed=1), some_tokens(3, seed=2)]))
    assert again.placement.restored_tokens == 100
    assert cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S).mark == served.mark


def test_who_asks_while_the_router_restarts_waits_for_it(start: Start) -> None:
    cluster = start()
    serve(cluster, some_tokens(100))
    longer = np.concatenate([some_tokens(100), some_tokens(3, seed=2)])
    for _ in range(3):
        ray.kill(ray.get_actor(cluster.router.actor, namespace=RAY_NAMESPACE), no_restart=False)
        assert compute(cluster, longer).placement.restored_tokens == 100
    ray.kill(ray.get_actor(cluster.router.actor, namespace=RAY_NAMESPACE), no_restart=True)
    started_s = time.monotonic()
    with pytest.raises(TierError, match="router is"):
        compute(cluster, longer)
    assert time.monotonic() - started_s < NOISE_S, "it will never come back"


def test_what_must_not_be_done_twice_is_not_and_its_caller_knows(start: Start) -> None:
    """The router dies in the middle of a suspend and of a resume."""
    cluster = start(worker=FaultyWorker, workers=1)
    worker = cluster.workers["worker-0"]
    served = compute(cluster, some_tokens(50))

    def in_the_middle(call: str, asked: Callable[[], object]) -> None:
        worker.call(object, "sleep_in", call, 60.0, deadline_s=DEADLINE_S)
        calls: int = worker.call(int, "calls_of", call, deadline_s=DEADLINE_S)
        with ThreadPoolExecutor(1) as thread:
            asking = thread.submit(asked)
            while worker.call(int, "calls_of", call, deadline_s=DEADLINE_S) == calls:
                time.sleep(0.01)
            ray.kill(ray.get_actor(cluster.router.actor, namespace=RAY_NAMESPACE), no_restart=False)
            with pytest.raises(UnknownOutcomeError, match="may have happened or not"):
                asking.result()
        worker.call(object, "sleep_in", call, 0.0, deadline_s=DEADLINE_S)
        cluster.router.members(deadline_s=DEADLINE_S)  # it is back

    def suspended() -> Ticket:
        return cluster.router.suspend(served.run.source, node_of(cluster), HOST, deadline_s=DEADLINE_S)

    in_the_middle("export", suspended)
    with pytest.raises(StaleError, match="suspended"):
        worker.run(served.run.source, Prompt(some_tokens(60)), (), deadline_s=DEADLINE_S)
    worker.wake(served.run.source, deadline_s=DEADLINE_S)
    ticket = suspended()
    in_the_middle("digest", lambda: cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S))
    assert cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S).mark == served.mark
