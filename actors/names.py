"""The names under which a cluster's actors find each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.ports import RemoteCatalogue, RemoteOwner, RemoteRouter, RemoteTiering


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
            node, RemoteTiering(self.actor(f"tiering-{node}"), self.ray_namespace, patient=self.patient)
        )

    def catalogue(self) -> RemoteCatalogue:
        return RemoteCatalogue(self.actor("catalogue"), self.ray_namespace)

    def router(self) -> RemoteRouter:
        return RemoteRouter(self.actor("router"), self.ray_namespace, patient=self.patient)
