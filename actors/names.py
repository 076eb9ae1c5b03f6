"""The names under which a cluster's actors find each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import ray

from actors.inline import executor_for_calls
from actors.ports import RemoteCatalogue, RemoteOwner, RemoteRouter, RemoteTiering
from tiered_cache.service.local import Worker
from tiered_cache.service.owner_set import OwnerSet, rank_name

WORKER, TIERING, ROUTER, CATALOGUE = "worker-", "tiering-", "router", "catalogue"
"""What the actors' names begin with."""

CALLS_TO_A_SET = 8
"""How many calls to one set of owners go on at once."""

_Port_co = TypeVar("_Port_co", covariant=True)


class Ports(Mapping[str, _Port_co]):
    """The ports to some members, and to any other by its name."""

    def __init__(self, names: Iterable[str], port: Callable[[str], _Port_co]) -> None:
        self._names = sorted(names)
        self._port = port

    def __getitem__(self, name: str) -> _Port_co:
        return self._port(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, slots=True)
class ClusterName:
    """One set of actors in one Ray namespace; all that a process needs to reach them."""

    name: str
    ray_namespace: str
    shards: int = 1
    """How many owners a worker is."""
    patient: bool = False
    """Whether its ports wait for an actor that is being restarted."""
    _owners: dict[str, RemoteOwner] = field(default_factory=dict, init=False, compare=False, repr=False)
    _sets: dict[str, OwnerSet] = field(default_factory=dict, init=False, compare=False, repr=False)
    _tierings: dict[str, RemoteTiering] = field(default_factory=dict, init=False, compare=False, repr=False)

    def actor(self, who: str) -> str:
        return f"{self.name}/{who}"

    def owners(self, worker: str) -> tuple[str, ...]:
        """The names of a worker's owners, by rank."""
        return tuple(rank_name(worker, rank, self.shards) for rank in range(self.shards))

    def worker(self, name: str) -> Worker:
        """A worker: its one owner, or the set of them."""
        if self.shards == 1:
            return self.owner(name)
        made = self._sets.get(name)
        if made is None:
            threads = executor_for_calls(threads=CALLS_TO_A_SET * self.shards)
            made = self._sets.setdefault(name, OwnerSet(name, [self.owner(own) for own in self.owners(name)], threads))
        return made

    def owner(self, name: str) -> RemoteOwner:
        return self._owners.setdefault(name, RemoteOwner(self.actor(name), self.ray_namespace, patient=self.patient))

    def tiering(self, node: str) -> RemoteTiering:
        return self._tierings.setdefault(
            node, RemoteTiering(self.actor(f"{TIERING}{node}"), self.ray_namespace, patient=self.patient)
        )

    def catalogue(self) -> RemoteCatalogue:
        return RemoteCatalogue(self.actor(CATALOGUE), self.ray_namespace)

    def living(self) -> tuple[set[str], set[str]]:
        """The owners, and the nodes whose tiering actors, that Ray does not hold to be dead: also if they restart."""
        actors: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
        prefix = self.actor("")
        ours = {
            actor["name"].removeprefix(prefix)
            for actor in actors
            if actor["namespace"] == self.ray_namespace and actor["name"].startswith(prefix)
        }
        nodes = {name.removeprefix(TIERING) for name in ours if name.startswith(TIERING)}
        return {name for name in ours if name.startswith(WORKER)}, nodes

    def forget(self, worker: str) -> None:
        """Other actors will have the names of a worker's owners."""
        self._sets.pop(worker, None)
        for owner in self.owners(worker):
            self._owners.pop(owner, None)

    def __reduce__(self) -> tuple[object, ...]:
        return ClusterName, (self.name, self.ray_namespace, self.shards, self.patient)

    def router(self) -> RemoteRouter:
        return RemoteRouter(self.actor(ROUTER), self.ray_namespace, patient=self.patient)
