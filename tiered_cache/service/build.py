"""From settings to objects: a node's cache, an engine."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.config import TierSettings, WorkerSettings
from tiered_cache.devices.base import Device
from tiered_cache.devices.numpy import NumpyDevice
from tiered_cache.engines.base import ComputingEngine
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import ConfigError
from tiered_cache.policy.base import CachePolicy
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.deadline import Clock
from tiered_cache.tiers.disk import DiskTier
from tiered_cache.tiers.host import HostTier


def build_cache(settings: TierSettings, executor: Executor, *, clock: Clock) -> TieredCache:
    """A node's tiers, with what the disk holds found again. Raises `ConfigError` for a directory that cannot serve."""
    slots = []
    if settings.host_bytes:
        slots.append(TierSlot(HostTier(settings.host_bytes), build_policy(settings.policy)))
    if settings.disk_dir is not None:
        disk = DiskTier(settings.disk_dir, settings.disk_bytes, sync=settings.disk_sync)
        mode = Mode.FAST if settings.compress_disk else Mode.RAW
        slots.append(TierSlot(disk, build_policy(settings.policy), mode))
    cache = TieredCache(slots, executor, clock=clock)
    cache.recover()
    return cache


def build_policy(name: str) -> CachePolicy:
    """A policy by name."""
    if name != "lru":
        raise ConfigError(f"no policy {name!r}; there is lru")
    return LruPolicy()


def build_engine(settings: WorkerSettings) -> ComputingEngine:
    """A worker's engine on its device. `transformers:DIR` names a model in a local directory."""
    family, _, directory = settings.engine.partition(":")
    if family == "transformers":
        from tiered_cache.engines.transformers import load_engine

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
