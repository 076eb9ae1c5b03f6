"""From settings to objects: a node's cache, an engine."""

from __future__ import annotations

import logging
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.config import TierSettings, WorkerSettings
from tiered_cache.deadline import Clock
from tiered_cache.devices.base import Device
from tiered_cache.devices.numpy import NumpyDevice
from tiered_cache.engines.base import ComputingEngine
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import ConfigError, TierError
from tiered_cache.policy.names import build_policy
from tiered_cache.tiers.base import Tier
from tiered_cache.tiers.disk import DiskTier
from tiered_cache.tiers.host import HostTier
from tiered_cache.tiers.wrappers import BreakerTier, DeadlineTier, MeteredTier

CALLS_MAX = 8
"""How many calls of one slow tier are under way at once, and so how many threads it can hold up; see `_in_time`."""
DISK_DEADLINE_S = 30.0
"""After so long a call of a disk has hung: it may be a network's."""

_log = logging.getLogger(__name__)


def build_cache(settings: TierSettings, executor: Executor, *, clock: Clock) -> TieredCache:
    """A node's tiers, with what they hold found again. Raises `ConfigError` for a place that can never serve.

    An object store that does not answer now is left out until the next start: the node serves without it.
    """
    slots = []
    if settings.host_bytes:
        slots.append(TierSlot(HostTier(settings.host_bytes), build_policy(settings.policy, settings.seed)))
    if settings.disk_dir is not None:
        disk = _in_time(DiskTier(settings.disk_dir, settings.disk_bytes, sync=settings.disk_sync), DISK_DEADLINE_S)
        mode = Mode.FAST if settings.compress_disk else Mode.RAW
        slots.append(TierSlot(disk, build_policy(settings.policy, settings.seed), mode))
    if settings.object_url is not None:
        tier = _object_tier(settings, settings.object_url, clock)
        if tier is not None:
            slots.append(TierSlot(tier, build_policy(settings.policy, settings.seed), Mode.FAST))
    cache = TieredCache(slots, executor, clock=clock)
    cache.recover()
    return cache


def _object_tier(settings: TierSettings, url: str, clock: Clock) -> Tier | None:
    """The object store, with figures and a breaker around it; None if it does not answer."""
    try:
        from tiered_cache.tiers.object_store import ObjectStoreTier, durability_of, open_store
    except ModuleNotFoundError as error:
        raise ConfigError(f"object_url needs the package obstore (the s3 extra): {error}") from error

    deadline_s = settings.object_deadline_s
    place = open_store(
        url,
        settings.object_options,
        request_timeout_s=deadline_s / 3,
        retry_timeout_s=2 * deadline_s / 3,
    )
    store = ObjectStoreTier(
        place,
        settings.object_bytes,
        ThreadPoolExecutor(settings.object_requests, thread_name_prefix="object-store"),
        durability=durability_of(url),
        owns_executor=True,
        deadline_s=deadline_s,
    )
    tier = MeteredTier(BreakerTier(_in_time(store, 2 * deadline_s), slow_s=deadline_s, clock=clock))
    try:
        next(iter(tier.list()), None)
    except TierError as error:
        if not error.retryable:
            raise ConfigError(f"object_url {url}: {error.message}") from error
        _log.warning("object_url %s: %s; this node works without it until it is started again", url, error.message)
        tier.close()
        return None
    return tier


def _in_time(tier: Tier, deadline_s: float) -> Tier:
    """A tier that can be slow, on threads of its own: who needs it waits until his own deadline and no longer.

    The cache knows whose deadline that is, and needs to know of no tier whether it keeps deadlines itself.
    """
    threads = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix=f"tier-{tier.name}")
    return DeadlineTier(tier, threads, deadline_s, running_max=CALLS_MAX, owns_executor=True)


def build_engine(settings: WorkerSettings) -> ComputingEngine:
    """A worker's engine on its device. `transformers:DIR` names a model in a local directory."""
    family, _, directory = settings.engine.partition(":")
    if family == "transformers":
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
    )


def build_device(name: str) -> Device:
    """`numpy`, or `cupy` where there is a GPU."""
    if name == "numpy":
        return NumpyDevice()
    if name == "cupy":
        from tiered_cache.devices.cupy import CupyDevice

        return CupyDevice()
    raise ConfigError(f"no device {name!r}; there are numpy and cupy")
