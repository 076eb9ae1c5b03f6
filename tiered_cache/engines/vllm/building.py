"""What vLLM does not tell a secondary tier: its settings and its cache groups. The connector leaves them here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tiered_cache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Building:
    """The engine that is being built."""

    vllm_config: Any
    kv_cache_config: Any


_building: ContextVar[Building | None] = ContextVar("tiered_cache_building", default=None)


@contextmanager
def build(engine: Building) -> Iterator[None]:
    """Tiers that are made meanwhile are this engine's."""
    token = _building.set(engine)
    try:
        yield
    finally:
        _building.reset(token)


def building() -> Building:
    """Raises `ConfigError` outside of `build`."""
    engine = _building.get()
    if engine is None:
        raise ConfigError(
            'a TieredCacheTier needs kv_connector "TieredCacheConnector" with '
            'kv_connector_module_path "tiered_cache.engines.vllm"'
        )
    return engine
