"""`RouterActor`: the cluster's view of its workers and nodes. `actors.cluster` makes a Ray actor of it."""

from __future__ import annotations

import resource

from actors.inline import executor_for_calls
from actors.metrics import ActorMetrics
from actors.names import ClusterName
from tiered_cache.metrics import counter_samples
from tiered_cache.service.messages import Prompt, Restored, SequenceRef, Ticket
from tiered_cache.service.router import Placement, RestoreRouter, RouterSettings
from tiered_cache.tiers.base import Durability


class RouterActor:
    """Forwards `RouterPort`. It holds nothing that a restart would lose."""

    def __init__(
        self,
        cluster: ClusterName,
        owners: tuple[str, ...],
        nodes: tuple[str, ...],
        has_catalogue: bool,
        settings: RouterSettings,
    ) -> None:
        self._members = owners, nodes, has_catalogue
        self.router = RestoreRouter(
            {name: cluster.owner(name) for name in owners},
            {node: cluster.tiering(node) for node in nodes},
            executor_for_calls(threads=min(64, 4 * (len(owners) + len(nodes)))),
            catalogue=cluster.catalogue() if has_catalogue else None,
            settings=settings,
        )
        self._metrics = ActorMetrics(cluster.name, lambda: counter_samples("router", self.router.counters()))

    def place(self, namespace: bytes, prompt: Prompt, capacity_tokens: int, *, deadline_s: float) -> Placement:
        with self._metrics.timed("place"):
            return self.router.place(namespace, prompt, capacity_tokens, deadline_s=deadline_s)

    def suspend(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket:
        with self._metrics.timed("suspend"):
            return self.router.suspend(source, node, durability, deadline_s=deadline_s)

    def resume(self, ticket: Ticket, capacity_tokens: int, *, deadline_s: float) -> Restored:
        with self._metrics.timed("resume"):
            return self.router.resume(ticket, capacity_tokens, deadline_s=deadline_s)

    def members(self, *, deadline_s: float) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
        """The names of the workers, the nodes, and whether there is an object store with its catalogue."""
        del deadline_s
        return self._members

    def counters(self, *, deadline_s: float) -> dict[str, int]:
        """How often what happened since this router began."""
        del deadline_s
        return self.router.counters()

    def peak_rss_bytes(self, *, deadline_s: float) -> int:
        """The most memory that this process has held."""
        del deadline_s
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
