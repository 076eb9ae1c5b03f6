"""`TieredCacheConnector`: vLLM's `OffloadingConnector` with our tier below its host buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tiered_cache.engines.vllm.building import Building, build
from tiered_cache.engines.vllm.identity import check
from tiered_cache.engines.vllm.settings import CONNECTOR, MODULE, SETTINGS, TIER, VllmSettings
from tiered_cache.engines.vllm.tier import TieredCacheTier
from tiered_cache.errors import ConfigError


class TieredCacheConnector(OffloadingConnector):
    """Tells our tier what it needs to know of the engine and of its requests; all else is vLLM's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises `ConfigError` for settings that are none, and for an engine whose states we could not tell apart."""
        check(vllm_config)
        transfer = vllm_config.kv_transfer_config
        _complete(transfer.kv_connector_extra_config)
        # Ours fail before vLLM has given them blocks, so that this is never asked; if it were, then recompute.
        transfer.kv_load_failure_policy = "recompute"
        with build(Building(vllm_config, kv_cache_config)):
            super().__init__(vllm_config, role, kv_cache_config)
        self.tier: TieredCacheTier | None = None
        if role == KVConnectorRole.SCHEDULER:
            tiers = self.scheduler.manager.secondary_tiers
            (self.tier,) = [tier for tier in tiers if isinstance(tier, TieredCacheTier)]

    def on_new_request(self, request: Any) -> None:
        assert self.tier is not None
        self.tier.begin(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        assert self.tier is not None
        self.tier.plan(request)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        _complete(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return super().build_prom_metrics(vllm_config, *args, **kwargs)


def _complete(extra_config: dict[str, Any]) -> None:
    """Put our tier among vLLM's, once."""
    settings = extra_config.get(SETTINGS)
    if not isinstance(settings, Mapping):
        raise ConfigError(f"kv_connector_extra_config has no {SETTINGS!r}: where should blocks be kept?")
    VllmSettings.from_document(settings)
    extra_config.setdefault("spec_name", "TieringOffloadingSpec")
    tiers = extra_config.setdefault("secondary_tiers", [])
    if not any(tier.get("type") == TIER for tier in tiers):
        tiers.append({"type": TIER, "module_path": MODULE, **settings})


assert (TieredCacheConnector.__name__, TieredCacheTier.__name__) == (CONNECTOR, TIER)
