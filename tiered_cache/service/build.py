"""From settings to objects: a node's cache, the object store and its catalogue, an engine."""

from __future__ import annotations

import logging
import os
import socket
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.config import TierSettings, WorkerSettings
from tiered_cache.deadline import Clock
from tiered_cache.devices.base import Device
from tiered_cache.devices.numpy import NumpyDevice
from tiered_cache.engines.base import ComputingEngine
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import ConfigError, TierError
from tiered_cache.executors import DaemonExecutor
from tiered_cache.policy.names import build_policy
from tiered_cache.service.catalogue import Catalogue
from tiered_cache.service.claim import LOOKS, StoreClaim, awake_or_not_s
from tiered_cache.service.messages import CataloguePort
from tiered_cache.service.shared import SharedStore
from tiered_cache.tiers.base import Durability, Tier
from tiered_cache.tiers.disk import DiskTier
from tiered_cache.tiers.host import HostTier
from tiered_cache.tiers.object_budget import GrantedBudget, LocalBudget, ObjectBudget
from tiered_cache.tiers.witness import Witness, WitnessedTier
from tiered_cache.tiers.wrappers import BreakerTier, DeadlineTier, MeteredTier

_log = logging.getLogger(__name__)

CALLS_MAX = 8
"""How many calls of one slow tier are under way at once, and so how many threads it can hold up; see `_in_time`."""
DISK_DEADLINE_S = 30.0
"""After so long a call of a disk has hung: it may be a network's."""

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    from tiered_cache.tiers.object_store import ObjectStoreTier


def build_cache(
    settings: TierSettings,
    executor: Executor,
    *,
    ahead: Executor | None = None,
    shared: SharedStore | None = None,
    witness: Path | None = None,
    clock: Clock,
) -> TieredCache:
    """A node's own tiers, with what they hold found again, and the cluster's object store below them, if there is one.

    `executor` encodes, `ahead` copies to the tier below ahead of need; without it, that is done when it is needed.
    `witness` is a file that tells the next process on this node what was in memory, should this one die.
    Raises `ConfigError` for a place that can never serve.
    """
    if settings.object_url is not None and shared is None:
        raise ConfigError(f"object_url {settings.object_url}: a store is used through its catalogue, and there is none")
    slots = []
    if settings.host_bytes:
        host = HostTier(settings.host_bytes)
        slots.append(TierSlot(_witnessed(host, witness), build_policy(settings.policy, settings.seed)))
    if settings.disk_dir is not None:
        place = DiskTier(settings.disk_dir, settings.disk_bytes, sync=settings.disk_sync)
        disk = MeteredTier(_in_time(place, DISK_DEADLINE_S))
        mode = Mode.FAST if settings.compress_disk else Mode.RAW
        slots.append(TierSlot(disk, build_policy(settings.policy, settings.seed), mode))
    bytes_max = settings.in_flight_bytes
    cache = TieredCache(slots, executor, ahead=ahead, shared=shared, in_flight_bytes=bytes_max, clock=clock)
    cache.recover(later=True)
    return cache


def _witnessed(tier: Tier, witness: Path | None) -> Tier:
    """Without its witness a tier is as good, only its loss is not known."""
    if witness is None:
        return tier
    try:
        return WitnessedTier(tier, Witness(witness))
    except TierError as error:
        _log.warning("tier %s: should it be lost, that will not be known: %s", tier.name, error.message)
        return tier


class ObjectPlace:
    """The object store that the settings name: how its catalogue and its nodes come to it.

    Within one process all of them have to come from one place, since memory:// is another store for each.
    """

    def __init__(self, settings: TierSettings, *, clock: Clock = time.monotonic) -> None:
        """Raises `ConfigError` for a URL or an option that is none. Nothing is asked of the store."""
        assert settings.object_url is not None
        try:
            from tiered_cache.tiers import object_store
        except ModuleNotFoundError as error:
            raise ConfigError(f"object_url needs the package obstore (the s3 extra): {error}") from error

        self._settings = settings
        self._url = settings.object_url
        self._clock = clock
        self._module = object_store
        self._request_s = settings.object_deadline_s / LOOKS
        self._store = object_store.open_store(
            settings.object_url,
            settings.object_options,
            request_timeout_s=self._request_s,
            retry_timeout_s=2 * self._request_s,
        )

    def catalogue(self, executor: Executor, *, cluster: str) -> Catalogue:
        """What the store holds, and who may put what into it; its upkeep is done in `executor`.

        A store that does not answer now is found out about as soon as it does. Whoever claims it later is told that it
        was `cluster`'s. Raises `ConfigError` if it never will answer.
        """
        deletes = self._store
        if self._url.partition(":")[0] != "memory":  # a delete is one request, which is over in time, or was none
            options = self._settings.object_options
            deletes = self._module.open_store(self._url, options, request_timeout_s=self._request_s, retries=0)
        store = self._client(LocalBudget(self._settings.object_bytes), deletes)
        who: dict[str, str | int] = {"cluster": cluster, "host": socket.gethostname(), "pid": os.getpid()}
        clock = awake_or_not_s if self._clock is time.monotonic else self._clock
        claim = StoreClaim(store, who, look_s=self._request_s, clock=clock)
        store.guard(claim)
        tier = self._guarded(store)
        slot = TierSlot(tier, build_policy(self._settings.policy, self._settings.seed), Mode.FAST)
        cache = TieredCache([slot], executor, lends=True, clock=self._clock)
        try:
            return Catalogue(cache, store, claim, executor, clock=self._clock)
        except TierError as error:
            cache.close()
            raise ConfigError(f"object_url {self._url}: {error.message}") from error

    def shared(self, catalogue: CataloguePort, *, durability: Durability | None = None) -> SharedStore:
        """A node's way to the store; `durability` if more is known of what that survives than its URL tells."""
        tier = self._guarded(self._client(GrantedBudget()))
        call_s = 3 * self._settings.object_deadline_s
        return SharedStore(tier, catalogue, durability=durability, call_s=call_s, clock=self._clock)

    def _guarded(self, store: ObjectStoreTier) -> Tier:
        deadline_s = self._settings.object_deadline_s
        return MeteredTier(BreakerTier(_in_time(store, 2 * deadline_s), slow_s=deadline_s, clock=self._clock))

    def _client(self, budget: ObjectBudget, deletes: ObjectStore | None = None) -> ObjectStoreTier:
        """With threads of its own, which end when it is closed."""
        return self._module.ObjectStoreTier(
            self._store,
            budget,
            DaemonExecutor(self._settings.object_requests, "object-store"),
            durability=self._module.durability_of(self._url),
            owns_executor=True,
            deadline_s=self._settings.object_deadline_s,
            deletes=deletes,
        )


def _in_time(tier: Tier, deadline_s: float) -> Tier:
    """A tier that can be slow, on threads of its own: who needs it waits until his own deadline and no longer.

    The cache knows whose deadline that is, and needs to know of no tier whether it keeps deadlines itself.
    """
    threads = DaemonExecutor(CALLS_MAX, f"tier-{tier.name}")
    return DeadlineTier(tier, threads, deadline_s, running_max=CALLS_MAX, owns_executor=True)


def build_engine(settings: WorkerSettings) -> ComputingEngine:
    """A worker's engine on its device. `transformers:DIR` names a model in a local directory."""
    family, _, directory = settings.engine.partition(":")
    if family == "transformers":
        if settings.shards > 1:
            raise ConfigError(f"engine {settings.engine!r} has one rank, not {settings.shards}")
        try:
            from tiered_cache.engines.transformers import load_engine
        except ModuleNotFoundError as error:
            raise ConfigError(f"engine {settings.engine!r} needs the transformers extra: {error}") from error

        return load_engine(
            Path(directory),
            device="cuda" if settings.device == "cupy" else "cpu",
            block_tokens=settings.block_tokens,
            capacity_bytes=settings.capacity_bytes,
            staging_slots=settings.staging_slots,
        )
    return ReferenceEngine(
        settings.engine,
        seed=settings.seed,
        block_tokens=settings.block_tokens,
        capacity_bytes=settings.capacity_bytes,
        staging_slots=settings.staging_slots,
        device=build_device(settings.device),
        shards=settings.shards,
        rank=settings.rank,
    )


def build_device(name: str) -> Device:
    """`numpy`, or `cupy` where there is a GPU."""
    if name == "numpy":
        return NumpyDevice()
    if name == "cupy":
        from tiered_cache.devices.cupy import CupyDevice

        return CupyDevice()
    raise ConfigError(f"no device {name!r}; there are numpy and cupy")
