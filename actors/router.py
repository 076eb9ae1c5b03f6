"""`RouterActor`: the cluster's view of its workers and nodes. `actors.cluster` makes a Ray actor of it."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Mapping

from ray.exceptions import RayError

from actors.blueprint import Blueprint
from actors.inline import executor_for_calls, in_local_mode
from actors.metrics import ActorMetrics
from actors.names import ClusterName
from actors.ports import Port
from tiered_cache.errors import TieredCacheError
from tiered_cache.metrics import counter_samples
from tiered_cache.service.messages import Prompt, Restored, SequenceRef, Ticket
from tiered_cache.service.router import Placement, RestoreRouter
from tiered_cache.tiers.base import Durability

MEMBERS_S = 1.0
"""How old the list of members may be."""
WELCOME_S = 60.0
"""How long an actor that is being started may take to answer for the first time."""

_log = logging.getLogger(__name__)


class RouterActor:
    """Forwards `RouterPort`. It holds nothing that a restart would lose: Ray knows which actors there are."""

    def __init__(self, cluster: ClusterName, blueprint: Blueprint, places: Mapping[str, str]) -> None:
        """`places`: the workers and their nodes at the start."""
        self._generation = time.time_ns()
        self._cluster = cluster
        self._blueprint = blueprint
        self._calls = executor_for_calls(threads=64)
        self._fixed = in_local_mode()
        self._workers, self._nodes = (set(places), set(places.values())) if self._fixed else self._living()
        self._lock = threading.Lock()
        self._coming: set[str] = set()
        self._look_at_s = 0.0
        catalogue = cluster.catalogue() if blueprint.has_catalogue else None
        self.router = RestoreRouter({}, {}, self._calls, catalogue=catalogue, settings=blueprint.router)
        self._tell()
        self._metrics = ActorMetrics(cluster.name, lambda: counter_samples("router", self.router.counters()))

    def _living(self) -> tuple[set[str], set[str]]:
        """The workers that are there with all their owners, and the nodes."""
        owners, nodes = self._cluster.living()
        return {name for name in self._blueprint.workers if owners.issuperset(self._cluster.owners(name))}, nodes

    def _look_around(self) -> None:
        """See, now and then and without waiting for it, who is gone and who has come."""
        with self._lock:
            if self._fixed or time.monotonic() < self._look_at_s:
                return
            self._look_at_s = time.monotonic() + MEMBERS_S
        self._calls.submit(self._look)

    def _look(self) -> None:
        try:
            workers, nodes = self._living()
        except (RayError, OSError, RuntimeError, ValueError):  # Ray cannot tell now; the next look may see more
            _log.warning("the actors of %s cannot be listed", self._cluster.name, exc_info=True)
            return
        with self._lock:
            new = (workers - self._workers) | (nodes - self._nodes)
            newcomers, self._coming = new - self._coming, new
            self._workers &= workers
            self._nodes &= nodes
        self._tell()
        for name in newcomers:
            self._calls.submit(self._welcome, name, name in workers)

    def _welcome(self, name: str, is_worker: bool) -> None:
        """Take in a new member, when it answers: until then it would only hold requests up."""
        cluster = self._cluster
        ports: list[Port] = [*map(cluster.owner, cluster.owners(name))] if is_worker else [cluster.tiering(name)]
        try:
            for port in ports:
                port.call(int, "peak_rss_bytes", deadline_s=WELCOME_S)
        except TieredCacheError:
            with self._lock:
                self._coming.discard(name)  # the next look finds it again, if it is there
            return
        with self._lock:
            (self._workers if is_worker else self._nodes).add(name)
            self._coming.discard(name)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            workers, nodes = sorted(self._workers), sorted(self._nodes)
            self.router.set_members(
                {name: self._cluster.worker(name) for name in workers},
                {node: self._cluster.tiering(node) for node in nodes},
            )

    def place(self, namespace: bytes, prompt: Prompt, capacity_tokens: int, *, deadline_s: float) -> Placement:
        self._look_around()
        with self._metrics.timed("place"):
            return self.router.place(namespace, prompt, capacity_tokens, deadline_s=deadline_s)

    def take_off(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket:
        self._look_around()
        with self._metrics.timed("suspend"):
            return self.router.take_off(source, node, durability, deadline_s=deadline_s)

    def settle(self, source: SequenceRef, ticket: Ticket, *, deadline_s: float) -> None:
        self.router.settle(source, ticket, deadline_s=deadline_s)

    def keep(self, ticket: Ticket, *, deadline_s: float) -> None:
        self.router.keep(ticket, deadline_s=deadline_s)

    def bring_back(self, ticket: Ticket, capacity_tokens: int, by: int, *, deadline_s: float) -> Restored:
        self._look_around()
        with self._metrics.timed("resume"):
            return self.router.bring_back(ticket, capacity_tokens, by, deadline_s=deadline_s)

    def let_go(self, ticket: Ticket, *, deadline_s: float) -> None:
        self.router.let_go(ticket, deadline_s=deadline_s)

    def members(self, *, deadline_s: float) -> tuple[Blueprint, tuple[str, ...], tuple[str, ...]]:
        """How the set was started; the names of the workers, and the nodes, that there are now."""
        del deadline_s
        workers, nodes = (self._workers, self._nodes) if self._fixed else self._living()
        return self._blueprint, tuple(sorted(workers)), tuple(sorted(nodes))

    def generation(self, *, deadline_s: float) -> int:
        """Another one than before: it was restarted."""
        del deadline_s
        return self._generation

    def counters(self, *, deadline_s: float) -> dict[str, int]:
        """How often what happened since this router began."""
        del deadline_s
        return self.router.counters()

    def peak_rss_bytes(self, *, deadline_s: float) -> int:
        """The most memory that this process has held."""
        del deadline_s
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
