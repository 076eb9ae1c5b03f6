"""Deaths under load: a replay goes on while workers, tiering actors, the router and whole nodes are killed under it.

Kills are spread over the requests at random, each at a random moment. The short run is part of the default one; the
full one is the whole bundled trace with 34 kills of actors and 11 of nodes, and a part of it through workers of two
ranks; both print their figures:

    pytest tests/ray/test_kills.py --slow -s
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from faulty_workers import UNCLAIMED_S, CountingWorker
from ray_serving import QUICK_TO_SEE_A_DEATH, QUIET, SMALL, come_up, helpers_for_workers

from actors.cluster import RAY_NAMESPACE, RayCluster
from actors.names import ROUTER, TIERING
from actors.ports import GRACE_S, Port
from tiered_cache.check import check_directory
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import TieredCacheError
from tiered_cache.replay.driver import Progress, ReplayResult, ReplaySettings, replay
from tiered_cache.replay.traces import SAMPLE_PATH, Trace
from tiered_cache.service.router import RouterSettings
from tiered_cache.tiers.disk import DiskTier, SyncPolicy

WORKERS = 3
DEADLINE_S = 10.0
NOISE_S = 2.0
"""How late a busy machine may make an answer."""
HELD_S = UNCLAIMED_S
"""How long pins, leases and restored sequences that nobody comes for are kept."""
SETTLED_S = 60.0
DISK_BYTES = 128 << 20
NODE = {"num_cpus": 1, "object_store_memory": SMALL["object_store_memory"]}


class Measured:
    """A cluster whose calls are measured: how much longer than its deadline the worst one took."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self.calls: Counter[str] = Counter()
        self.late_s = -DEADLINE_S
        self.slowest_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    @property
    def router(self) -> Any:
        return _MeasuredPort(self, self._cluster.router)

    @property
    def workers(self) -> Any:
        return _MeasuredPorts(self, self._cluster.workers)

    @property
    def tierings(self) -> Any:
        return _MeasuredPorts(self, self._cluster.tierings)

    def note(self, call: str, took_s: float, deadline_s: float) -> None:
        self.calls[call] += 1
        self.slowest_s = max(self.slowest_s, took_s)
        self.late_s = max(self.late_s, took_s - deadline_s)


class _MeasuredPorts:
    def __init__(self, measured: Measured, ports: Any) -> None:
        self._measured = measured
        self._ports = ports

    def __getitem__(self, name: str) -> _MeasuredPort:
        return _MeasuredPort(self._measured, self._ports[name])


class _MeasuredPort:
    def __init__(self, measured: Measured, port: Port) -> None:
        self._measured = measured
        self._port = port

    def __getattr__(self, method: str) -> Callable[..., object]:
        def call(*args: object, deadline_s: float) -> object:
            started_s = time.monotonic()
            try:
                return getattr(self._port, method)(*args, deadline_s=deadline_s)
            finally:
                self._measured.note(method, time.monotonic() - started_s, deadline_s)

        return call


class Killer(threading.Thread):
    """Kills what it is told to, when it is due; a node that was killed comes back as another one."""

    def __init__(self, machines: Any, cluster: RayCluster, requests: int, actors: int, nodes: int, seed: int) -> None:
        super().__init__(name="killer")
        self.kills: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._comes_back_at_s = math.inf
        self._machines = machines
        self._cluster = cluster
        self._random = random.Random(seed)
        whom = [*("worker", "tiering", "router") * actors][:actors] + ["node"] * nodes
        self._random.shuffle(whom)
        at = sorted(self._random.sample(range(1, requests), len(whom)))
        self._due = dict(zip(at, whom, strict=True))
        self._queue: queue.Queue[str | None] = queue.Queue(1)  # who asks for the next one waits, so that all come

    def tell(self, progress: Progress) -> None:
        """So far the replay is. On the main thread, where alone Ray can start a node."""
        if time.monotonic() >= self._comes_back_at_s:
            self._comes_back_at_s = math.inf
            come_up(lambda: self._machines.add_node(**NODE))
        whom = self._due.get(progress.requests)
        if whom is not None:
            self._queue.put(whom)

    def stop(self) -> None:
        self._queue.put(None)
        self.join()
        if self._comes_back_at_s < math.inf:
            come_up(lambda: self._machines.add_node(**NODE))
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        while (whom := self._queue.get()) is not None:
            try:
                time.sleep(self._random.uniform(0.0, 0.3))  # any moment of the requests that are under way
                if whom == "node":
                    self._kill_node()
                else:
                    self._kill_actor(whom)
            except BaseException as error:  # noqa: BLE001 - told to the test at its end
                self.error = self.error or error

    def _kill_actor(self, kind: str) -> None:
        until_s = time.monotonic() + SETTLED_S
        while time.monotonic() < until_s:
            workers, nodes = self._cluster.cluster.living()
            names = {"worker": workers, "tiering": {f"{TIERING}{node}" for node in nodes}, "router": {ROUTER}}[kind]
            if names and self._kill(self._cluster.cluster.actor(self._random.choice(sorted(names)))):
                self.kills[kind] += 1
                return
            time.sleep(0.05)  # it is being started just now
        raise AssertionError(f"no {kind} to kill")

    def _kill(self, name: str) -> bool:
        """End the actor's process, if it has one; Ray starts another."""
        try:
            handle = ray.get_actor(name, namespace=RAY_NAMESPACE)
            pid = ray.get(handle.__ray_call__.remote(lambda _: os.getpid()), timeout=2.0)
        except Exception:  # noqa: BLE001 - Ray has many ways to say that it is not there
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def _kill_node(self) -> None:
        until_s = time.monotonic() + SETTLED_S
        while len(self._machines.worker_nodes) < WORKERS - 1:  # the last one is coming back
            assert time.monotonic() < until_s
            time.sleep(0.05)
        doomed = self._random.choice(sorted(self._machines.worker_nodes, key=lambda node: str(node.node_id)))
        self._machines.remove_node(doomed, allow_graceful=False)
        self.kills["node"] += 1
        self._comes_back_at_s = time.monotonic() + self._random.uniform(0.0, 2.0)


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    """Three nodes on one machine, of which the head stays."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        ray.shutdown()
    with helpers_for_workers():
        head = {**SMALL, "_system_config": QUICK_TO_SEE_A_DEATH}
        machines = come_up(lambda: Cluster(initialize_head=True, head_node_args=head))
        for _ in range(WORKERS - 1):
            come_up(lambda: machines.add_node(**NODE))
        ray.init(machines.address, **QUIET)
        yield machines  # nodes that are added need the helpers, too
        ray.shutdown()
        machines.shutdown()


@pytest.mark.parametrize(
    ("requests", "actors", "nodes", "shards"),
    [
        pytest.param(24, 3, 1, 1, id="short"),
        pytest.param(400, 34, 11, 1, id="full", marks=pytest.mark.slow),
        pytest.param(120, 12, 3, 2, id="sets", marks=pytest.mark.slow),
    ],
)
def test_a_replay_survives_deaths_at_random_moments(
    machines: Any, tmp_path: Path, requests: int, actors: int, nodes: int, shards: int
) -> None:
    shared_memory = set(Path("/dev/shm").iterdir())
    disk_dir = tmp_path / "tiers"
    settings = ClusterSettings(
        WORKERS,
        WorkerSettings("qsa-ple-gdn:tiny" if shards == 1 else "mla-dsa-kda:tiny", shards=shards),
        TierSettings(16 << 20, disk_dir, DISK_BYTES, SyncPolicy.NEVER),
        name=f"kills-{requests}",
    )
    router = RouterSettings(ask_s=1.0, pin_s=HELD_S, lease_s=HELD_S)
    with RayCluster.start(settings, worker=CountingWorker, router=router) as cluster:
        measured = Measured(cluster)
        killer = Killer(machines, cluster, requests, actors, nodes, seed=requests)
        killer.start()
        try:
            result = replay(
                Trace(SAMPLE_PATH),
                measured,  # type: ignore[arg-type]
                ReplaySettings(settings, requests=requests, deadline_s=DEADLINE_S),
                killer.tell,
            )
        finally:
            killer.stop()
        show(result, killer, measured)
        assert (killer.kills["node"], killer.kills.total()) == (nodes, actors + nodes)
        assert (result.requests, result.mismatches, result.failures_by_reason) == (requests, 0, {})
        assert result.restores > 0
        assert result.lookups == result.restores + result.misses
        assert measured.late_s < GRACE_S + NOISE_S
        check_that_nothing_is_held(cluster, disk_dir)
    check_what_is_on_disk(disk_dir)
    assert not abandoned(set(Path("/dev/shm").iterdir()) - shared_memory)


def check_that_nothing_is_held(cluster: RayCluster, disk_dir: Path) -> None:
    """Once all are back and what waits for nobody has run out, no state, room or pin is held."""

    def held() -> object:
        cluster.heal()
        if (len(cluster.workers), len(cluster.tierings)) != (WORKERS, WORKERS):
            return "not all are back"
        sums: Counter[str] = Counter()
        owners = [name for worker in cluster.workers for name in cluster.cluster.owners(worker)]
        for worker in map(cluster.cluster.owner, owners):
            worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S)  # it lets go of what has run out
            sums["state"] += worker.call(int, "held_bytes", deadline_s=DEADLINE_S)
        for tiering in cluster.tierings.values():
            usage = tiering.call(dict, "usage", deadline_s=DEADLINE_S)
            sums["room"] += usage["host"].bytes_reserved
            sums["pins"] += tiering.call(int, "pins", deadline_s=DEADLINE_S)
        with watcher._transaction() as books:  # what dead ones left has its time of grace
            sums["room on disk"] = sum(room for holder, room in books.reserved.items() if watcher._is_alive(holder))
        return +sums

    until_s = time.monotonic() + SETTLED_S
    found: object = None
    with DiskTier(disk_dir, DISK_BYTES, sync=SyncPolicy.NEVER) as watcher:
        while time.monotonic() < until_s:
            try:
                if not (found := held()):
                    return
            except TieredCacheError as error:
                found = error
            time.sleep(0.1)
    pytest.fail(f"still held: {found}")


def abandoned(files: set[Path]) -> set[Path]:
    """Those that no living process has mapped: other programs may use shared memory meanwhile."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has just ended
            mapped |= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return {file for file in files if file.exists() and str(file) not in mapped}


def check_what_is_on_disk(disk_dir: Path) -> None:
    """Every frame is sound, and nothing but frames is left, nor room held, when the next one has tidied up there."""
    checked = list(check_directory(disk_dir))
    assert checked
    assert not [file for file in checked if file.error]
    with_no_grace = DiskTier(disk_dir, DISK_BYTES, sync=SyncPolicy.NEVER, grace_s=0.0)
    assert with_no_grace.usage().bytes_reserved == 0
    with_no_grace.close()
    left = [path for path in disk_dir.rglob("*") if path.is_file() and path.relative_to(disk_dir).parts[0] == "tmp"]
    assert not left


def show(result: ReplayResult, killer: Killer, measured: Measured) -> None:
    """The figures, for `-s`."""
    print(
        f"\n{result.requests} requests in {result.elapsed_s:.0f} s; killed: {dict(killer.kills)}; "
        f"{result.mismatches} mismatches, {result.failures_by_reason} failed, {result.retries_by_reason} begun again, "
        f"{result.refusals_by_reason} refused, {result.restores} restores, misses {result.misses_by_reason}; "
        f"{measured.calls.total()} calls with a deadline of {DEADLINE_S:g} s, the slowest {measured.slowest_s:.2f} s"
    )
