"""Every tier keeps the promises of a tier."""

from __future__ import annotations

from pathlib import Path

from tiered_cache.testing.faults import FaultyTier
from tiered_cache.testing.tier_suite import TierTests
from tiered_cache.tiers.base import Tier
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.host import HostTier
from tiered_cache.tiers.witness import Witness, WitnessedTier


class TestHostTier(TierTests):
    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return HostTier(bytes_max)


class TestWitnessedHostTier(TierTests):
    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        directory.mkdir(exist_ok=True)
        return WitnessedTier(HostTier(bytes_max), Witness(directory / "names"))


class TestDiskTier(TierTests):
    outlives_close = True

    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return DiskTier(directory, bytes_max, sync=SyncPolicy.NEVER)


class TestSyncedDiskTier(TierTests):
    outlives_close = True

    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return DiskTier(directory, bytes_max, sync=SyncPolicy.FULL)


class TestDiskTierWithoutSpareFiles(TierTests):
    outlives_close = True

    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return DiskTier(directory, bytes_max, sync=SyncPolicy.NEVER, spare_bytes=0)


class TestWrappedTier(TierTests):
    """A wrapper that injects nothing changes nothing."""

    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return FaultyTier(HostTier(bytes_max))
