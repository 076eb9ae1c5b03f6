"""`Blueprint`: all that it takes to start any actor of a set anew; and which node a worker goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from actors.names import WORKER
from actors.sequence import OwnerMethods
from tiered_cache.config import ClusterSettings
from tiered_cache.service.router import RouterSettings


@dataclass(frozen=True, slots=True)
class Blueprint:
    """How a set of actors was started."""

    settings: ClusterSettings
    worker: type[OwnerMethods]
    router: RouterSettings
    detached: bool
    workers_per_node: int = 4096
    """A node gets no more of them: as many as the fullest one had at the start."""

    @property
    def has_catalogue(self) -> bool:
        return self.settings.tiers.object_url is not None

    @property
    def gpus_each(self) -> float:
        """Of a worker, all its owners together."""
        return self.settings.worker.num_gpus * self.settings.worker.shards

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers."""
        return tuple(f"{WORKER}{number}" for number in range(self.settings.workers))


def place_workers(
    names: Iterable[str], gpus: Mapping[str, float], taken: Mapping[str, str], blueprint: Blueprint
) -> dict[str, str]:
    """A node for each of these workers, in turn, as far as there is room.

    `gpus`: what each node has that is there. `taken`: the nodes of the workers that have one.
    """
    each, per_node = blueprint.gpus_each, blueprint.workers_per_node
    held = Counter(taken.values())
    places: dict[str, str] = {}
    for name in names:
        room = [node for node in gpus if held[node] < per_node and gpus[node] - held[node] * each >= each]
        if not room:
            break
        places[name] = node = min(room, key=lambda node: (held[node], node))
        held[node] += 1
    return places
