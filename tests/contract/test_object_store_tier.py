"""Object stores keep the promises of a tier: in memory, in a directory, and on a real S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from obstore.store import MemoryStore, ObjectStore

from tiered_cache.testing.object_servers import BUCKET, SeaweedServer
from tiered_cache.testing.tier_suite import TierTests
from tiered_cache.tiers.base import Tier
from tiered_cache.tiers.object_store import ObjectStoreTier, open_store

THREADS = 8


class ObjectStoreTierTests(TierTests):
    outlives_close = True

    @pytest.fixture(autouse=True)
    def _executor(self) -> Iterator[None]:
        with ThreadPoolExecutor(THREADS) as self.executor:
            yield

    def open(self, directory: Path) -> ObjectStore:
        raise NotImplementedError

    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return ObjectStoreTier(self.open(directory), bytes_max, self.executor)


class TestMemory(ObjectStoreTierTests):
    @pytest.fixture(autouse=True)
    def _store(self) -> None:
        self.store = MemoryStore()

    def open(self, directory: Path) -> ObjectStore:
        return self.store


class TestDirectory(ObjectStoreTierTests):
    def open(self, directory: Path) -> ObjectStore:
        return open_store(f"file://{directory}")


class TestS3(ObjectStoreTierTests):
    @pytest.fixture(autouse=True)
    def _bucket(self, seaweed: SeaweedServer) -> None:
        self.server = seaweed
        self.prefix = uuid.uuid4().hex

    def open(self, directory: Path) -> ObjectStore:
        return open_store(f"s3://{BUCKET}/{self.prefix}", self.server.options)
