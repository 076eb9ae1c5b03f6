"""A cluster within this process: the same classes as behind the actors, called directly.

For tests, for tools, and for replays without Ray.
"""

from __future__ import annotations

import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from tiered_cache.config import ClusterSettings, WorkerSettings
from tiered_cache.deadline import CLOSE_S, Clock
from tiered_cache.executors import DaemonExecutor
from tiered_cache.geometry import Geometry
from tiered_cache.identity import Identity
from tiered_cache.policy.base import Hints
from tiered_cache.service.build import ObjectPlace, build_cache, build_engine
from tiered_cache.service.catalogue import Catalogue
from tiered_cache.service.messages import (
    LeaseRef,
    OwnerPort,
    Prompt,
    Restored,
    RunResult,
    SequenceRef,
    SpillOffer,
    SpillResult,
    Ticket,
    TieringPort,
)
from tiered_cache.service.owner import SequenceOwner
from tiered_cache.service.owner_set import OwnerSet, rank_name
from tiered_cache.service.router import Placement, RestoreRouter, RouterSettings
from tiered_cache.service.tiering import TieringService
from tiered_cache.tiers.base import Durability

_P = ParamSpec("_P")
_T = TypeVar("_T")

DESCRIBE_S = 60.0
"""How long a worker may take to say what it is: a real engine loads its model first."""


class InlineExecutor(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        return future


class WorkerPort(Protocol):
    """What a driver asks of a worker whose engine computes."""

    def run(
        self, place: SequenceRef | LeaseRef, prompt: Prompt, take_at: tuple[int, ...], *, deadline_s: float
    ) -> RunResult: ...
    def release(self, source: SequenceRef, *, deadline_s: float) -> None: ...


class Worker(OwnerPort, WorkerPort, Protocol):
    """An owner that computes: a `SequenceOwner`, or what forwards to one."""


class WorkerFactory(Protocol):
    """Makes a worker. A class will do, such as that of an actor of one's own.

    `tiering` finds a node's tiering service; the worker must be called `name`, and be on `node`.
    """

    def __call__(
        self, name: str, node: str, tiering: Callable[[str], TieringPort], settings: WorkerSettings, /
    ) -> Worker: ...


def reference_worker(
    name: str,
    node: str,
    tiering: Callable[[str], TieringPort],
    settings: WorkerSettings,
    *,
    clock: Clock = time.monotonic,
) -> SequenceOwner:
    """A worker with the engine that the settings name."""
    engine = build_engine(settings)
    return SequenceOwner(engine, name=name, node=node, tiering=tiering, marks=settings.marks, clock=clock)


class RouterPort(Protocol):
    """What a driver asks of a router."""

    def place(self, namespace: bytes, prompt: Prompt, capacity_tokens: int, *, deadline_s: float) -> Placement: ...
    def suspend(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket: ...
    def resume(self, ticket: Ticket, capacity_tokens: int, *, deadline_s: float) -> Restored: ...
    def settle(self, source: SequenceRef, ticket: Ticket, *, deadline_s: float) -> None: ...
    def keep(self, ticket: Ticket, *, deadline_s: float) -> None: ...
    def let_go(self, ticket: Ticket, *, deadline_s: float) -> None: ...


class SpillPort(Protocol):
    """What a driver asks of a node's tiering service."""

    def spill(
        self, offer: SpillOffer, durability: Durability, hints: Hints, pin_s: float | None, *, deadline_s: float
    ) -> SpillResult: ...


class Cluster(Protocol):
    """A running set of workers, tiering services and a router, wherever they run."""

    @property
    def namespace(self) -> bytes: ...
    @property
    def identity(self) -> Identity: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def router(self) -> RouterPort: ...
    @property
    def workers(self) -> Mapping[str, WorkerPort]: ...
    @property
    def tierings(self) -> Mapping[str, SpillPort]: ...
    def counters(self) -> dict[str, int]:
        """Sums of all counters, by who counted: `router.misses.evicted`, `cache.frames.host.put`."""

    def generations(self) -> tuple[int, ...]:
        """Of the router and the nodes' tiering services: where one is another, what it had counted is lost."""

    def heal(self) -> tuple[str, ...]:
        """Start again what is lost and comes back by no other means; the names of what was started."""

    def peak_rss_bytes(self) -> int:
        """The most resident memory that its processes have had, the caller's among them, added up."""

    def close(self) -> None: ...


class LocalCluster:
    """Workers, one node's tiers, the object store's catalogue and a router in this process."""

    NODE = "local"

    def __init__(
        self,
        settings: ClusterSettings,
        worker: WorkerFactory | None = None,
        *,
        router: RouterSettings | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.tierings: dict[str, TieringService] = {}
        make = worker or partial(reference_worker, clock=clock)
        shards = settings.worker.shards
        self.workers: dict[str, Any] = {}
        self.owners: dict[str, Any] = self.workers if shards == 1 else {}
        for name in (f"worker-{number}" for number in range(settings.workers)):
            ranks = {rank_name(name, rank, shards): replace(settings.worker, rank=rank) for rank in range(shards)}
            made = {owner: make(owner, self.NODE, self.tierings.__getitem__, its) for owner, its in ranks.items()}
            self.owners |= made
            self.workers[name] = (
                made[name] if shards == 1 else OwnerSet(name, [*made.values()], InlineExecutor(), clock=clock)
            )
        self.identity, self.geometry = self.workers["worker-0"].describe(deadline_s=DESCRIBE_S)
        self._executor = DaemonExecutor(settings.tiers.executor_threads, "tiered-cache")
        self.catalogue: Catalogue | None = None
        shared = None
        if settings.tiers.object_url is not None:
            place = ObjectPlace(settings.tiers, clock=clock)
            self.catalogue = place.catalogue(self._executor, cluster=settings.name)
            shared = place.shared(self.catalogue)
        self.cache = build_cache(settings.tiers, self._executor, shared=shared, clock=clock)
        self.tiering = TieringService(
            self.cache, node=self.NODE, owners=self.owners.__getitem__, catalogue=self.catalogue, clock=clock
        )
        self.tierings[self.NODE] = self.tiering
        self.namespace = self.cache.register(self.identity, self.geometry)
        self.router = RestoreRouter(
            self.workers, self.tierings, InlineExecutor(), catalogue=self.catalogue, settings=router, clock=clock
        )

    def counters(self) -> dict[str, int]:
        """Sums of all counters, by who counted."""
        found = Counter({f"router.{what}": count for what, count in self.router.counters().items()})
        for counts in (self.cache, self.catalogue):
            if counts is not None:
                found.update({f"cache.{what}": count for what, count in counts.counters().items()})
        return dict(sorted(found.items()))

    def generations(self) -> tuple[int, ...]:
        """They live as long as this does."""
        return ()

    def heal(self) -> tuple[str, ...]:
        """Nothing here dies alone."""
        return ()

    def peak_rss_bytes(self) -> int:
        """Of this process, which holds everything."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """Let go of the tiers; what they hold stays where it is durable."""
        self.cache.close()
        if self.catalogue is not None:
            self.catalogue.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor.join(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
