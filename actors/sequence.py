"""`SequenceActor`: a worker that owns sequences on one device; and what an actor of one's own needs to be one.

class MyWorker(OwnerMethods):
    def __init__(self, name, node, tiering, settings):
        self.owner = SequenceOwner(MyEngine(), name=name, node=node, tiering=tiering)

RayCluster.start(settings, worker=MyWorker)
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import ray

from tiered_cache.config import WorkerSettings
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.service.local import reference_worker
from tiered_cache.service.messages import (
    Bid,
    LeaseRef,
    Parcel,
    Prompt,
    Restored,
    RestorePlan,
    RunResult,
    SequenceRef,
    Suspension,
    TieringPort,
)
from tiered_cache.service.owner import SequenceOwner

_Method = TypeVar("_Method", bound=Callable[..., object])

OWNER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"max_concurrency": 4, "concurrency_groups": {"export": 2, "control": 4}}
)
"""For `ray.remote`: exports and small calls never wait behind a prompt that is being computed."""


def _in_group(name: str) -> Callable[[_Method], _Method]:
    """`ray.method`, whose own types know no keyword-only arguments."""
    return cast("Callable[[_Method], _Method]", ray.method(concurrency_group=name))


class OwnerMethods:
    """Forwards `OwnerPort` to `self.owner`. Tasks are never retried: a retry would meet another state."""

    owner: SequenceOwner

    @_in_group("control")
    def bid(self, namespace: bytes, hashes: tuple[bytes, ...], *, deadline_s: float) -> Bid:
        return self.owner.bid(namespace, hashes, deadline_s=deadline_s)

    @_in_group("control")
    def reserve(
        self, namespace: bytes, tokens: int, lease_s: float, *, lineage: int = 0, deadline_s: float
    ) -> LeaseRef:
        return self.owner.reserve(namespace, tokens, lease_s, lineage=lineage, deadline_s=deadline_s)

    @_in_group("control")
    def cancel(self, lease: LeaseRef, *, deadline_s: float) -> None:
        self.owner.cancel(lease, deadline_s=deadline_s)

    def inject(
        self,
        plan: RestorePlan,
        prompt: Prompt,
        capacity_tokens: int,
        sampler_state: bytes,
        *,
        lineage: int = 0,
        deadline_s: float,
    ) -> Restored:
        return self.owner.inject(plan, prompt, capacity_tokens, sampler_state, lineage=lineage, deadline_s=deadline_s)

    def run(
        self, place: SequenceRef | LeaseRef, prompt: Prompt, take_at: tuple[int, ...], *, deadline_s: float
    ) -> RunResult:
        return self.owner.run(place, prompt, take_at, deadline_s=deadline_s)

    @_in_group("export")
    def export(self, source: SequenceRef, keys: tuple[FrameKey, ...], *, deadline_s: float) -> Parcel:
        return self.owner.export(source, keys, deadline_s=deadline_s)

    @_in_group("control")
    def release(self, source: SequenceRef, *, deadline_s: float) -> None:
        self.owner.release(source, deadline_s=deadline_s)

    @_in_group("control")
    def suspend(self, source: SequenceRef, *, deadline_s: float) -> Suspension:
        return self.owner.suspend(source, deadline_s=deadline_s)

    @_in_group("control")
    def wake(self, source: SequenceRef, *, deadline_s: float) -> None:
        self.owner.wake(source, deadline_s=deadline_s)

    @_in_group("control")
    def describe(self, *, deadline_s: float) -> tuple[Identity, Geometry]:
        return self.owner.describe(deadline_s=deadline_s)

    @_in_group("control")
    def peak_rss_bytes(self, *, deadline_s: float) -> int:
        """The most memory that this process has held."""
        del deadline_s
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class SequenceActor(OwnerMethods):
    """A worker with an engine that the settings name. `actors.cluster` makes a Ray actor of it."""

    def __init__(self, name: str, node: str, tiering: Callable[[str], TieringPort], settings: WorkerSettings) -> None:
        self.owner = reference_worker(name, node, tiering, settings)
