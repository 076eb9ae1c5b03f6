"""vLLM keeps its blocks in our tiers: KV and recurrent state, exactly, across restarts, or it computes them.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "TieredCacheConnector",
        "kv_connector_module_path": "tiered_cache.engines.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 10737418240,
            "tiered_cache": {"disk_dir": "/var/lib/tiered-cache/frames", "disk_bytes": "1TiB"}}}'

`connector` is vLLM's own offloading connector with `tier` below its host buffer; `pages` maps its blocks to frames of a
`TieredCache` and knows nothing of vLLM; `layout` and `layout_of` say what a block's bytes are, `identity` whose state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_cache.engines.vllm.settings import kv_transfer_config

if TYPE_CHECKING:
    from tiered_cache.engines.vllm.connector import TieredCacheConnector
    from tiered_cache.engines.vllm.tier import TieredCacheTier

__all__ = ["TieredCacheConnector", "TieredCacheTier", "kv_transfer_config"]


def __getattr__(name: str) -> object:
    """The two that vLLM asks for by name: to configure it, and to test the rest, takes no vLLM."""
    if name == "TieredCacheConnector":
        from tiered_cache.engines.vllm.connector import TieredCacheConnector

        return TieredCacheConnector
    if name == "TieredCacheTier":
        from tiered_cache.engines.vllm.tier import TieredCacheTier

        return TieredCacheTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
