"""`CatalogueActor`: what a cluster's object store holds; one, beside the router. `actors.cluster` starts it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import ray

from actors.metrics import ActorMetrics
from actors.names import ClusterName
from tiered_cache.cache import Kept, Offer
from tiered_cache.config import TierSettings
from tiered_cache.executors import DaemonExecutor
from tiered_cache.identity import FrameKey
from tiered_cache.index import KnownChain
from tiered_cache.level import Landed
from tiered_cache.metrics import Sample, counter_samples, usage_samples
from tiered_cache.policy.base import Hints
from tiered_cache.service.build import ObjectPlace
from tiered_cache.service.messages import Lease, MatchReply, Prompt, RestorePlan
from tiered_cache.tiers.base import TierUsage

_Method = TypeVar("_Method", bound=Callable[..., object])

CATALOGUE_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"max_concurrency": 8, "concurrency_groups": {"index": 8, "reports": 4}}
)
"""For `ray.remote`: look-ups, which need the index alone, never wait behind what needs the store."""


def _in_group(name: str) -> Callable[[_Method], _Method]:
    """`ray.method`, whose own types know no keyword-only arguments."""
    return cast("Callable[[_Method], _Method]", ray.method(concurrency_group=name))


class CatalogueActor:
    """Forwards `CataloguePort`. A restart makes a new generation, which finds again what the store holds."""

    def __init__(self, cluster: ClusterName, settings: TierSettings) -> None:
        executor = DaemonExecutor(settings.executor_threads, "catalogue")
        self.catalogue = ObjectPlace(settings).catalogue(executor, cluster=cluster.name)
        self._store = settings.object_url, settings.object_bytes
        self._metrics = ActorMetrics(cluster.name, self._samples)

    @_in_group("index")
    def match(self, namespace: bytes, prompt: Prompt | KnownChain, pin_s: float, *, deadline_s: float) -> MatchReply:
        with self._metrics.timed("match"):
            return self.catalogue.match(namespace, prompt, pin_s, deadline_s=deadline_s)

    @_in_group("index")
    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        return self.catalogue.unpin(pin, generation, deadline_s=deadline_s)

    @_in_group("index")
    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        return self.catalogue.keep(plan, pin_s, deadline_s=deadline_s)

    @_in_group("reports")
    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        return self.catalogue.use_up(plan, by, again_s, deadline_s=deadline_s)

    @_in_group("index")
    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        self.catalogue.let_go(tickets, kept=kept, deadline_s=deadline_s)

    @_in_group("index")
    def plan_of(self, offer: Offer, pin_s: float, *, deadline_s: float) -> RestorePlan | None:
        return self.catalogue.plan_of(offer, pin_s, deadline_s=deadline_s)

    @_in_group("index")
    def left(self, offer: Offer, hints: Hints, *, deadline_s: float) -> None:
        self.catalogue.left(offer, hints, deadline_s=deadline_s)

    @_in_group("reports")
    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        self.catalogue.report_bad(key, why, deadline_s=deadline_s)

    @_in_group("reports")
    def report_absent(self, keys: tuple[FrameKey, ...], *, deadline_s: float) -> None:
        self.catalogue.report_absent(keys, deadline_s=deadline_s)

    def introduce(self, namespace: bytes, descriptor: bytes, *, deadline_s: float) -> None:
        self.catalogue.introduce(namespace, descriptor, deadline_s=deadline_s)

    def admit(self, chain: Offer | KnownChain, hints: Hints, lease_s: float, *, deadline_s: float) -> Lease:
        with self._metrics.timed("admit"):
            return self.catalogue.admit(chain, hints, lease_s, deadline_s=deadline_s)

    def commit(
        self, lease: int, generation: int, landed: tuple[Landed, ...], sound: tuple[Landed, ...], *, deadline_s: float
    ) -> tuple[Kept, ...]:
        with self._metrics.timed("commit"):
            return self.catalogue.commit(lease, generation, landed, sound, deadline_s=deadline_s)

    def abandon(self, lease: int, generation: int, sound: tuple[Landed, ...], *, deadline_s: float) -> None:
        self.catalogue.abandon(lease, generation, sound, deadline_s=deadline_s)

    @_in_group("index")
    def generation(self, *, deadline_s: float) -> int:
        """Another one than before: it was restarted."""
        del deadline_s
        return self.catalogue.generation

    @_in_group("index")
    def store(self, *, deadline_s: float) -> tuple[str | None, int]:
        """Its store's URL and budget."""
        del deadline_s
        return self._store

    @_in_group("index")
    def counters(self, *, deadline_s: float) -> dict[str, int]:
        """The counters since this generation began."""
        del deadline_s
        return self.catalogue.counters()

    @_in_group("index")
    def usage(self, *, deadline_s: float) -> dict[str, TierUsage]:
        """The store's budget and what it holds."""
        del deadline_s
        return self.catalogue.usage()

    def _samples(self) -> Iterator[Sample]:
        yield from counter_samples("cache", self.catalogue.counters())
        yield from usage_samples(self.catalogue.usage())

    @_in_group("index")
    def peak_rss_bytes(self, *, deadline_s: float) -> int:
        """The most memory that this process has held."""
        del deadline_s
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self, *, deadline_s: float) -> None:
        """Let go of the store."""
        del deadline_s
        self.catalogue.close()
