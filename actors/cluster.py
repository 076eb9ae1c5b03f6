"""`RayCluster`: start, connect to and shut down a set of workers, one tiering actor a node, and a router.

An instance of Ray that is already initialised is used, and never shut down; one that was started here is shut down
with the cluster. All actors are named, take `num_cpus=0`, and are placed with a node affinity.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.names import ClusterName
from actors.ports import RemoteOwner, RemoteTiering
from actors.router import RouterActor
from actors.sequence import OWNER_OPTIONS, SequenceActor
from actors.tiering import TieringActor
from tiered_cache.config import ClusterSettings
from tiered_cache.errors import ConfigError, TieredCacheError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import Identity
from tiered_cache.service.router import RouterSettings

RAY_NAMESPACE = "tiered-cache"
OBJECT_STORE_BYTES = 512 << 20
"""Of an embedded instance: frames only pass through it."""
START_S = 60.0
"""How long the actors of a cluster may take to come up."""


class RayCluster:
    """A running set of actors. A `Cluster` for drivers; close it, or leave its `with` block."""

    def __init__(
        self,
        cluster: ClusterName,
        workers: dict[str, str],
        nodes: tuple[str, ...],
        handles: list[Any],
        *,
        owns_ray: bool,
    ) -> None:
        """`workers`: name -> node. Use `start`."""
        self.cluster = cluster
        self.workers: dict[str, RemoteOwner] = {name: cluster.owner(name) for name in workers}
        self.tierings: dict[str, RemoteTiering] = {node: cluster.tiering(node) for node in nodes}
        self.router = cluster.router()
        self._handles = handles  # an actor lives as long as a handle of its creator
        self._owns_ray = owns_ray
        first = next(iter(self.workers.values()))
        described: tuple[Identity, Geometry] = first.call(tuple, "describe", deadline_s=START_S)
        self.identity, self.geometry = described
        self.namespace = b""
        for tiering in self.tierings.values():
            self.namespace = tiering.register(self.identity, self.geometry, deadline_s=START_S)

    @classmethod
    def start(
        cls, settings: ClusterSettings, address: str | None = None, *, router: RouterSettings | None = None
    ) -> RayCluster:
        """Start the actors. `address`: None for an embedded local instance, `auto`, or a Ray address.

        Workers are spread over the nodes in turn. Raises `ConfigError` if there is no Ray at the address or the
        cluster's name is taken, and what the actors raised; then nothing of it is left running.
        """
        owns_ray = _connect(address)
        handles: list[Any] = []
        try:
            cluster = ClusterName(settings.name, RAY_NAMESPACE)
            nodes = _nodes()
            for node in nodes:
                tiering = ray.remote(TieringActor).options(
                    name=cluster.actor(f"tiering-{node}"), max_restarts=-1, max_concurrency=8, **_placed(node)
                )
                handles.append(tiering.remote(node, cluster, settings.tiers))
            workers = {f"worker-{number}": nodes[number % len(nodes)] for number in range(settings.workers)}
            for name, node in workers.items():
                worker = ray.remote(**OWNER_OPTIONS)(SequenceActor).options(
                    name=cluster.actor(name), num_gpus=settings.worker.num_gpus, **_placed(node)
                )
                handles.append(worker.remote(name, node, cluster, settings.worker))
            routing = ray.remote(RouterActor).options(
                name=cluster.actor("router"), max_restarts=-1, max_concurrency=8, **_placed(nodes[0])
            )
            handles.append(routing.remote(cluster, tuple(workers), nodes, router or RouterSettings()))
            ray.get([handle.__ray_ready__.remote() for handle in handles], timeout=START_S)
            return cls(cluster, workers, nodes, handles, owns_ray=owns_ray)
        except BaseException:
            _end(handles, owns_ray=owns_ray)
            raise

    def counters(self) -> dict[str, int]:
        """Sums of all counters, by who counted."""
        found = {f"router.{k}": n for k, n in self.router.call(dict, "counters", deadline_s=START_S).items()}
        for tiering in self.tierings.values():
            for what, number in tiering.call(dict, "counters", deadline_s=START_S).items():
                found[f"cache.{what}"] = found.get(f"cache.{what}", 0) + number
        return dict(sorted(found.items()))

    def peak_rss_bytes(self) -> int:
        """The most memory that this process and the actors have held, added up."""
        ports = [*self.workers.values(), *self.tierings.values()]
        held = sum(port.call(int, "peak_rss_bytes", deadline_s=START_S) for port in ports)
        return held + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """Close the tiers and end the actors, and Ray if it was started here. Idempotent."""
        handles, self._handles = self._handles, []
        if not handles:
            return
        for tiering in self.tierings.values():
            with contextlib.suppress(TieredCacheError):  # a dead one has nothing to close
                tiering.call(object, "close", deadline_s=START_S)
        _end(handles, owns_ray=self._owns_ray)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _connect(address: str | None) -> bool:
    """Make sure that Ray is initialised; whether that was done here, for us alone."""
    if ray.is_initialized():
        return False
    try:
        if address is None:
            ray.init(
                include_dashboard=False,
                num_cpus=2,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=RAY_NAMESPACE,
            )
        else:
            ray.init(address=address, namespace=RAY_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray at {address or 'this machine'}: {error}".splitlines()[0]) from error
    return True


def _nodes() -> tuple[str, ...]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return tuple(sorted(node["NodeID"] for node in nodes if node["Alive"]))


def _placed(node: str) -> dict[str, Any]:
    return {
        "num_cpus": 0,
        "max_task_retries": 0,
        "namespace": RAY_NAMESPACE,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {},
    }


def _end(handles: list[Any], *, owns_ray: bool) -> None:
    for handle in handles:
        with contextlib.suppress(Exception):  # whatever Ray says: it is gone then
            ray.kill(handle)
    if owns_ray:
        ray.shutdown()
