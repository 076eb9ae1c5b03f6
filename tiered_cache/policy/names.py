"""Policies by the names that users give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tiered_cache.errors import ConfigError
from tiered_cache.policy.base import CachePolicy
from tiered_cache.policy.default import DefaultPolicy
from tiered_cache.policy.every_block import EveryBlockPolicy
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.policy.marconi import MarconiPolicy
from tiered_cache.policy.s3fifo import S3FifoPolicy

POLICIES: Mapping[str, Callable[[int], CachePolicy]] = MappingProxyType(
    {
        "default": DefaultPolicy,
        "lru": lambda _: LruPolicy(),
        "every-block": lambda _: EveryBlockPolicy(),
        "marconi": MarconiPolicy,
        "s3fifo": S3FifoPolicy,
    }
)
"""Name -> how to make one, from a seed."""


def build_policy(name: str, seed: int = 0) -> CachePolicy:
    """A new policy object, for one tier. Raises `ConfigError` for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name](seed)
