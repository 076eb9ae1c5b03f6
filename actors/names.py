"""The names under which a cluster's actors find each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import ray

from actors.ports import Port, RemoteCatalogue, RemoteOwner, RemoteRouter, RemoteTiering

WORKER, TIERING, ROUTER, CATALOGUE = "worker-", "tiering-", "router", "catalogue"
"""What the actors' names begin with."""

_Port = TypeVar("_Port", bound=Port)


class Ports(Mapping[str, _Port]):
    """The ports to some members, and to any other by its name."""

    def __init__(self, names: Iterable[str], port: Callable[[str], _Port]) -> None:
        self._names = sorted(names)
        self._port = port

    def __getitem__(self, name: str) -> _Port:
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
    patient: bool = False
    """Whether its ports wait for an actor that is being restarted."""
    _owners: dict[str, RemoteOwner] = field(default_factory=dict, init=False, compare=False, repr=False)
    _tierings: dict[str, RemoteTiering] = field(default_factory=dict, init=False, compare=False, repr=False)

    def actor(self, who: str) -> str:
        return f"{self.name}/{who}"

    def owner(self, name: str) -> RemoteOwner:
        return self._owners.setdefault(name, RemoteOwner(self.actor(name), self.ray_namespace, patient=self.patient))

    def tiering(self, node: str) -> RemoteTiering:
        return self._tierings.setdefault(
            node, RemoteTiering(self.actor(f"{TIERING}{node}"), self.ray_namespace, patient=self.patient)
        )

    def catalogue(self) -> RemoteCatalogue:
        return RemoteCatalogue(self.actor(CATALOGUE), self.ray_namespace)

    def living(self) -> tuple[set[str], set[str]]:
        """The workers, and the nodes whose tiering actors, that Ray does not hold to be dead: also if they restart."""
        actors: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
        prefix = self.actor("")
        ours = {
            actor["name"].removeprefix(prefix)
            for actor in actors
            if actor["namespace"] == self.ray_namespace and actor["name"].startswith(prefix)
        }
        nodes = {name.removeprefix(TIERING) for name in ours if name.startswith(TIERING)}
        return {name for name in ours if name.startswith(WORKER)}, nodes

    def forget(self, owner: str) -> None:
        """Another actor will have an owner's name."""
        self._owners.pop(owner, None)

    def router(self) -> RemoteRouter:
        return RemoteRouter(self.actor(ROUTER), self.ray_namespace, patient=self.patient)
