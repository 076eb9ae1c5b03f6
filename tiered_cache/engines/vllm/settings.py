"""What can be set under `tiered_cache` in vLLM's `kv_connector_extra_config`: plain data from JSON, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from tiered_cache.config import TierSettings, parse_size
from tiered_cache.errors import ConfigError
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import SyncPolicy

MODULE = "tiered_cache.engines.vllm"
CONNECTOR, TIER = "TieredCacheConnector", "TieredCacheTier"
SETTINGS = "tiered_cache"
"""Where our settings are, in `kv_connector_extra_config`."""

_SIZES = frozenset({"host_bytes", "disk_bytes", "object_bytes", "held_bytes"})
_TIERS = frozenset(field.name for field in fields(TierSettings))


def kv_transfer_config(cpu_bytes: int, **settings: object) -> dict[str, object]:
    """The `kv_transfer_config` of vLLM: `cpu_bytes` for its own host buffer, and our settings (`VllmSettings`)."""
    VllmSettings.from_document(settings)
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": cpu_bytes, SETTINGS: settings},
    }


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """One engine's part of the tiers, and how long it waits for them."""

    tiers: TierSettings
    durability: Durability
    """What a block has reached before it counts as kept: the object store if there is one, else the disk.

    With a store and `disk` here, the store gets what the disk has no room for.
    """
    salt: bytes = b""
    """The server's secret for one tenant: engines with other salts share nothing."""
    load_deadline_s: float = 10.0
    """After so long a load has failed, and vLLM computes."""
    search_deadline_s: float = 1.0
    """How long a prompt may wait for whether other engines have left more of it in a shared directory or the store."""
    store_deadline_s: float = 10.0
    """After so long vLLM's buffer is given back, whether or not a block was taken from it."""
    keep_deadline_s: float = 60.0
    """How long the tiers may take for what one step of vLLM has computed."""
    rest_s: float = 30.0
    """How long nothing is looked up after a deadline was missed."""
    start_deadline_s: float = 60.0
    """How long the engine's start waits for the weights' digest and the tiers; then it goes on without, until then."""
    close_deadline_s: float = 30.0
    """How long its end waits for what is still to be kept."""
    held_bytes: int = 4 << 30
    """How much may be held back of blocks that are not yet in a tier."""
    weights_are_fixed: bool = False
    """Go on after vLLM's caches were reset, as they are when weights are updated in place."""
    digest_cache: Path | None = None
    ray_address: str = "auto"
    """Where the cluster is whose engines share `object_url`."""
    cluster: str = "vllm"
    """The name of its catalogue there: one for all engines with the same `object_url`, and for these alone."""

    @staticmethod
    def from_document(document: Mapping[str, object]) -> VllmSettings:
        """Sizes may be written as `64GiB`. Raises `ConfigError` naming every unknown or ill-typed setting."""
        tiers: dict[str, object] = {"host_bytes": 0}
        own: dict[str, object] = {"digest_cache": _default_digest_cache()}
        known = {field.name: field for field in fields(VllmSettings) if field.name != "tiers"}
        problems = []
        for name, value in document.items():
            if name in _SIZES and isinstance(value, str):
                value = parse_size(value, name)  # noqa: PLW2901
            if name in _TIERS:
                tiers[name] = value
            elif name in known:
                own[name] = value
            else:
                problems.append(f"{name} is not one of {', '.join(sorted({*_TIERS, *known}))}")
        if problems:
            raise ConfigError("tiered_cache: " + "; ".join(problems))
        try:
            if isinstance(tiers.get("disk_dir"), str):
                tiers["disk_dir"] = Path(str(tiers["disk_dir"]))
            if "disk_sync" in tiers:
                tiers["disk_sync"] = SyncPolicy(tiers["disk_sync"])
            checked = TierSettings(**tiers)  # type: ignore[arg-type]
            own.setdefault("durability", _default_durability(checked).name.lower())
            own["durability"] = Durability[str(own["durability"]).upper()]
            own["salt"] = str(own.get("salt", "")).encode()
            if isinstance(own["digest_cache"], str):
                own["digest_cache"] = Path(own["digest_cache"])
            settings = VllmSettings(checked, **own)  # type: ignore[arg-type]
            settings.check()
        except (TypeError, ValueError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"tiered_cache: {error}") from error
        return settings

    def check(self) -> None:
        """Raise `ConfigError` for a duration that is none, and for a place where nothing can be kept, or shared."""
        if (self.tiers.object_url or "").startswith("memory:"):
            raise ConfigError(f"object_url {self.tiers.object_url} is another store in each process, not one for all")
        if self.durability > _default_durability(self.tiers):
            raise ConfigError(f"tiered_cache: durability {self.durability.name.lower()}: there is no such tier")
        for name in ("load", "search", "store", "keep", "start", "close"):
            name += "_deadline_s"  # noqa: PLW2901
            if not 0 < getattr(self, name) <= 3600:
                raise ConfigError(f"tiered_cache: {name} {getattr(self, name)} is not within 0 .. 3600 s")


def _default_durability(tiers: TierSettings) -> Durability:
    if tiers.object_url is not None:
        return Durability.OBJECT
    return Durability.HOST if tiers.disk_dir is None else Durability.DISK


def _default_digest_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tiered-cache" / "weights.json"
