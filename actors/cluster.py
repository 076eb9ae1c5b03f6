"""`RayCluster`: start, connect to and shut down a set of workers, a tiering actor on each of their nodes, and a router.

Beside the router there is the catalogue of the object store, if the settings name one.

An instance of Ray that is already initialised is used, and never shut down; one that was started or connected to here
is left when the cluster is closed. All actors are named, take `num_cpus=0`, are placed with a node affinity, and come
back after a crash as a new generation, the router on another node if need be; a call is never repeated by Ray.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.blueprint import Blueprint, place_workers
from actors.catalogue import CATALOGUE_OPTIONS, CatalogueActor
from actors.inline import in_local_mode
from actors.names import CATALOGUE, ROUTER, TIERING, ClusterName, Ports
from actors.ports import Port, RemoteCatalogue, RemoteOwner
from actors.router import RouterActor
from actors.sequence import OWNER_OPTIONS, OwnerMethods, SequenceActor
from actors.tiering import TieringActor
from tiered_cache.config import ClusterSettings
from tiered_cache.errors import ConfigError, TieredCacheError
from tiered_cache.service.local import DESCRIBE_S, LocalCluster
from tiered_cache.service.router import RouterSettings

RAY_NAMESPACE = "tiered-cache"
OBJECT_STORE_BYTES = 512 << 20
"""Of an embedded instance: frames only pass through it."""
TIERING_THREADS = 64
"""More than slow tiers can hold up (`CALLS_MAX` and `WAITING_MAX` each), so that memory answers whatever they do."""
ASK_S = 10.0
"""How long an actor may take for a call that only reads or closes."""


class RayCluster:
    """A running set of actors. A `Cluster` for drivers; close it, or leave its `with` block."""

    def __init__(
        self,
        cluster: ClusterName,
        blueprint: Blueprint,
        workers: Iterable[str],
        nodes: Iterable[str],
        *,
        owns_ray: bool,
    ) -> None:
        """Use `start` or `connect`."""
        self.cluster = cluster
        self._blueprint = blueprint
        self.workers = Ports(workers, cluster.worker)
        self.tierings = Ports(nodes, cluster.tiering)
        self.catalogue: RemoteCatalogue | None = cluster.catalogue() if blueprint.has_catalogue else None
        self.router = cluster.router()
        self.identity, self.geometry = next(iter(self.workers.values())).describe(deadline_s=DESCRIBE_S)
        self.namespace = b""
        for tiering in self.tierings.values():
            self.namespace = tiering.register(self.identity, self.geometry, deadline_s=ASK_S)
        self._places: dict[str, str] = {}
        self._handles: list[Any] = []  # an actor that is not detached lives as long as its creator's handle
        self._owns_ray = owns_ray

    @classmethod
    def start(
        cls,
        settings: ClusterSettings,
        address: str | None = None,
        *,
        worker: type[OwnerMethods] = SequenceActor,
        router: RouterSettings | None = None,
        detached: bool = False,
        start_s: float = DESCRIBE_S,
    ) -> RayCluster:
        """Start the actors, the workers spread over the nodes that have what they need, in turn.

        `address`: None for an embedded local instance, `auto`, or a Ray address. `worker` is the class of the workers,
        made as `worker(name, node, tiering, settings.worker)`. A detached set outlives this process; `connect` finds
        it. Within `start_s` the workers must have loaded their models. Raises `ConfigError` if there is no Ray at the
        address, the cluster's name is taken, or an actor cannot start; then nothing of it is left running.
        """
        if (settings.tiers.object_url or "").startswith("memory:"):
            raise ConfigError(
                f"object_url {settings.tiers.object_url} is another store in each process, not one for all"
            )
        with _connected(address) as owns_ray:
            if in_local_mode():  # where a constructor that raises would end this process
                LocalCluster(settings).close()
            blueprint, places = _plan(Blueprint(settings, worker, router or RouterSettings(), detached))
            handles: list[Any] = []
            try:
                _start(handles, blueprint, places, start_s=start_s)
                cluster = cls(_callers(settings), blueprint, places, set(places.values()), owns_ray=owns_ray)
            except BaseException:
                _kill(handles)
                raise
            cluster._places = places
            cluster._handles = [] if detached else handles
            return cluster

    @classmethod
    def connect(cls, name: str, address: str | None = "auto") -> RayCluster:
        """Join a set that another process has started. Raises `ConfigError` if there is none of this name."""
        router = ClusterName(name, RAY_NAMESPACE, patient=True).router()
        with _connected(address) as owns_ray:
            try:
                blueprint, workers, nodes = router.members(deadline_s=ASK_S)
                return cls(_callers(blueprint.settings), blueprint, workers, nodes, owns_ray=owns_ray)
            except TieredCacheError as error:
                raise ConfigError(f"no cluster {name!r} to connect to: {error.message}") from error

    def heal(self) -> tuple[str, ...]:
        """Start again what went with a node, on nodes that have room, without waiting for it; returns the names.

        A node gets no more workers than the fullest one had at the start: those that were lost with a node wait until
        another one joins. The router finds the new actors when they answer, and forgets those of a node that is gone.
        Actors that die alone are restarted by Ray. Raises `ConfigError` if the set is another process's to heal: one
        that is not detached lives no longer than the process that starts its actors.
        """
        if in_local_mode():
            return ()
        blueprint = self._blueprint
        if not (blueprint.detached or self._handles):
            raise ConfigError(f"{self.cluster.name!r} was started by another process, which has to heal it")
        living, nodes = self.cluster.living()
        there = {name for name in blueprint.workers if living.issuperset(self.cluster.owners(name))}
        lost = [name for name in blueprint.workers if name not in there]
        places: Mapping[str, str] = {}
        if lost:
            known = {name: node for name in blueprint.workers if (node := self._place(name, living)) is not None}
            places = place_workers([name for name in lost if name not in known], _gpus(), known, blueprint)
            self._places = {**known, **places}
            places = {**places, **{name: known[name] for name in lost if name in known}}
        started = _Starter(blueprint, [] if blueprint.detached else self._handles)
        for node in sorted(set(places.values()) - nodes):
            with contextlib.suppress(ValueError):  # this process has not heard yet that the last of its name is dead
                started.tiering(node)
        for name, node in places.items():
            for rank, owner in enumerate(self.cluster.owners(name)):
                if owner not in living:
                    with contextlib.suppress(ValueError):
                        started.owner(owner, rank, node)
                        self.cluster.forget(name)
        self.workers = Ports(there.union(places), self.cluster.worker)
        self.tierings = Ports(nodes.union(places.values()), self.cluster.tiering)
        return tuple(started.names)

    def counters(self) -> dict[str, int]:
        """Sums of all counters of the actors that answer, by who counted."""
        found: Counter[str] = Counter()
        for who, port in (("router", self.router), *(("cache", port) for port in self._tiers())):
            with contextlib.suppress(TieredCacheError):
                counted: dict[str, int] = port.call(dict, "counters", deadline_s=ASK_S)
                found.update({f"{who}.{what}": number for what, number in counted.items()})
        return dict(sorted(found.items()))

    def generations(self) -> tuple[int, ...]:
        """Of the router, the tiering actors and the catalogue; 0 for one that does not answer."""
        found = []
        for port in (self.router, *self._tiers()):
            try:
                found.append(port.call(int, "generation", deadline_s=ASK_S))
            except TieredCacheError:
                found.append(0)
        return tuple(found)

    def peak_rss_bytes(self) -> int:
        """The most resident memory that this process and the actors that answer have had, added up."""
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if in_local_mode():
            return held
        for port in (*self._owners(), *self._tiers(), self.router):
            with contextlib.suppress(TieredCacheError):
                held += port.call(int, "peak_rss_bytes", deadline_s=ASK_S)
        return held

    def close(self) -> None:
        """Leave: end the actors, unless they are detached or another's, and Ray if it came up for them. Idempotent."""
        handles, self._handles = self._handles, []
        if handles:
            self._close_tiers()
            _kill(handles)
        if self._owns_ray:
            self._owns_ray = False
            ray.shutdown()

    def shut_down(self) -> None:
        """End the actors, whoever started them, and leave."""
        self._close_tiers()
        for port in (*self._owners(), *self._tiers(), self.router):
            with contextlib.suppress(ValueError):  # it is gone already
                _kill([ray.get_actor(port.actor, namespace=RAY_NAMESPACE)])
        self._handles = []
        self.close()

    def _tiers(self) -> list[Port]:
        """Who holds frames, or knows of them."""
        return [*self.tierings.values(), *([self.catalogue] if self.catalogue else [])]

    def _place(self, name: str, living: Collection[str]) -> str | None:
        """The node of a worker of which some owner is there; None if none is, or it does not say."""
        alive = [owner for owner in self.cluster.owners(name) if owner in living]
        if not alive:
            return None
        if name not in self._places:
            with contextlib.suppress(TieredCacheError):
                self._places[name] = self.cluster.owner(alive[0]).bid(self.namespace, (), deadline_s=ASK_S).node
        return self._places.get(name)

    def _owners(self) -> list[RemoteOwner]:
        """The ports to all owners, one a rank of each worker."""
        return [self.cluster.owner(owner) for worker in self.workers for owner in self.cluster.owners(worker)]

    def _close_tiers(self) -> None:
        for port in self._tiers():
            with contextlib.suppress(TieredCacheError):  # a dead one has nothing to close
                port.call(object, "close", deadline_s=ASK_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _callers(settings: ClusterSettings) -> ClusterName:
    """The names as callers from outside have them."""
    return ClusterName(settings.name, RAY_NAMESPACE, settings.worker.shards, patient=True)


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[bool]:
    """Ray, initialised; whether that was done here, for us alone. It is undone if what follows raises."""
    if ray.is_initialized():
        yield False
        return
    try:
        if address is None:
            ray.init(
                "local",  # whatever RAY_ADDRESS says
                include_dashboard=False,
                num_cpus=2,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of many kinds: a node that is slow to start raises `Exception` itself
        raise ConfigError(f"no Ray at {address or 'this machine'}: {error}".splitlines()[0]) from error
    try:
        yield True
    except BaseException:
        ray.shutdown()
        raise


class _Starter:
    """Starts actors of a set; `handles` takes their handles."""

    def __init__(self, blueprint: Blueprint, handles: list[Any]) -> None:
        self.names: list[str] = []
        self._blueprint = blueprint
        self._handles = handles
        self._cluster = ClusterName(blueprint.settings.name, RAY_NAMESPACE, blueprint.settings.worker.shards)

    def tiering(self, node: str) -> None:
        args = (node, self._cluster, self._blueprint.settings.tiers)
        self._start(ray.remote(TieringActor), f"{TIERING}{node}", node, *args, max_concurrency=TIERING_THREADS)

    def worker(self, name: str, node: str) -> None:
        """All owners of a worker, on one node."""
        for rank, owner in enumerate(self._cluster.owners(name)):
            self.owner(owner, rank, node)

    def owner(self, name: str, rank: int, node: str) -> None:
        settings = replace(self._blueprint.settings.worker, rank=rank)
        made = ray.remote(**OWNER_OPTIONS)(self._blueprint.worker)
        self._start(made, name, node, name, node, self._cluster.tiering, settings, num_gpus=settings.num_gpus)

    def catalogue(self) -> None:
        args = (self._cluster, self._blueprint.settings.tiers)
        made = ray.remote(**CATALOGUE_OPTIONS)(CatalogueActor)
        self._start(made, CATALOGUE, ray.get_runtime_context().get_node_id(), *args, movable=True)

    def router(self, places: Mapping[str, str]) -> None:
        here = ray.get_runtime_context().get_node_id()
        args = (self._cluster, self._blueprint, places)
        self._start(ray.remote(RouterActor), ROUTER, here, *args, movable=True, max_concurrency=8)

    def _start(self, actor: Any, name: str, node: str, *args: object, movable: bool = False, **options: object) -> None:
        placed = actor.options(
            name=self._cluster.actor(name),
            namespace=RAY_NAMESPACE,
            lifetime="detached" if self._blueprint.detached else None,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,  # a retry would meet another state
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=movable),
            **options,
        )
        self._handles.append(placed.remote(*args))
        self.names.append(name)


def _start(handles: list[Any], blueprint: Blueprint, places: Mapping[str, str], *, start_s: float) -> None:
    """Start all actors and wait until they are up; `handles` holds those that there are, also if this raises."""
    name, starter = blueprint.settings.name, _Starter(blueprint, handles)
    try:
        for node in sorted(set(places.values())):
            starter.tiering(node)
        for worker, node in places.items():
            starter.worker(worker, node)
        if blueprint.has_catalogue:
            starter.catalogue()
        starter.router(places)
        ray.get([handle.__ray_ready__.remote() for handle in handles], timeout=start_s)
    except GetTimeoutError as error:
        wanted = f"{len(places)} workers with {blueprint.gpus_each:g} GPUs each"
        raise ConfigError(f"the actors are not up after {start_s:g} s; is there room for {wanted}?") from error
    except RayActorError as error:  # its constructor's error, as text that ends with `module.Class: message`
        raise ConfigError(str(error).splitlines()[-1].rpartition("Error: ")[2]) from error
    except ValueError as error:
        raise ConfigError(f"a cluster {name!r} is running already: {error}".splitlines()[0]) from error


def _gpus() -> dict[str, float]:
    """The GPUs of each node that is there."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"]}


def _plan(blueprint: Blueprint) -> tuple[Blueprint, dict[str, str]]:
    """A node for every worker, and how many one has. Raises `ConfigError` if there are not GPUs enough."""
    places = place_workers(blueprint.workers, _gpus(), {}, blueprint)
    if len(places) < len(blueprint.workers):
        each = blueprint.gpus_each
        raise ConfigError(f"{len(blueprint.workers)} workers with {each:g} GPUs each, room for {len(places)}")
    return replace(blueprint, workers_per_node=max(Counter(places.values()).values())), places


def _kill(handles: list[Any]) -> None:
    for handle in handles:
        with contextlib.suppress(Exception):  # whatever Ray says: it is gone then
            ray.kill(handle)
