"""The places where frames lie, one like the other: a node over any of them, and a hand in its store.

What a test of corruption needs of a place is the same everywhere: which frames there are, their bytes, and to change,
cut, swap or remove one behind the tier's back.
"""

from __future__ import annotations

import ctypes
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from serving import DEADLINE_S, MODELS

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import IdentityError, TierError
from tiered_cache.identity import FrameKey, Tokens
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.build import build_cache
from tiered_cache.service.local import LocalCluster, reference_worker
from tiered_cache.service.messages import Prompt, RestorePlan
from tiered_cache.service.shared import SharedStore
from tiered_cache.testing.faults import FaultyTier
from tiered_cache.testing.mortal import MortalWorker
from tiered_cache.testing.object_servers import BUCKET, SeaweedServer
from tiered_cache.tiers.base import Durability, GetRequest, Tier, TierUsage
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.object_store import ObjectStoreTier, open_store

HOST_BYTES = 8 << 20
DISK_BYTES = 16 << 20
OBJECT_BYTES = 32 << 20
OBJECT_DEADLINE_S = 20.0


@dataclass(frozen=True)
class Place:
    """A node's tiers, and the one of them that the test looks at: the deepest."""

    name: str
    tier: str
    durability: Durability
    settings: TierSettings = field(repr=False)

    def start(
        self, model: str = MODELS[0], *, workers: int = 2, block_tokens: int | None = None
    ) -> AbstractContextManager[LocalCluster]:
        """A cluster over this place; over what is there already, if that outlives a node."""
        worker = WorkerSettings(engine=model, block_tokens=block_tokens)
        return LocalCluster(ClusterSettings(workers, worker, self.settings), mortal_worker)

    @contextmanager
    def cache(self) -> Iterator[TieredCache]:
        """The tier alone, without a catalogue, under the policy that the books of `spilling` know."""
        with ThreadPoolExecutor(2) as executor:
            settings, tier = replace(self.settings, policy="lru"), None
            if self.tier == "object":
                assert settings.object_url is not None
                store = open_store(settings.object_url, settings.object_options)
                tier = ObjectStoreTier(store, settings.object_bytes, executor, durability=self.durability)
                with ThreadPoolExecutor(2) as coders:
                    cache = TieredCache([TierSlot(tier, LruPolicy(), Mode.FAST)], coders)
                    yield cache
                    return
            own = replace(settings, object_url=None, object_bytes=0)
            cache = build_cache(own, executor, clock=time.monotonic)
            try:
                yield cache
            finally:
                cache.close()

    @property
    def outlives_a_node(self) -> bool:
        return self.durability is not Durability.HOST


PLACES = ("host", "disk", "file", "memory", "s3", "stack")
"""Host memory, disk, an object store in a directory, in memory, on a real server; and host, disk, file together."""
DURABLE = ("disk", "file", "s3", "stack")


def open_place(name: str, directory: Path, seaweed: SeaweedServer | None = None) -> Place:
    """Memory, a disk or an object store alone, or the three of them one above the other."""
    disk = {"disk_dir": directory / "tier", "disk_bytes": DISK_BYTES, "disk_sync": SyncPolicy.NEVER}
    objects = {"object_bytes": OBJECT_BYTES, "object_deadline_s": OBJECT_DEADLINE_S}
    file = {"object_url": f"file://{directory / 'objects'}", **objects}
    durability, tier, settings = {
        "host": (Durability.HOST, "host", {"host_bytes": HOST_BYTES}),
        "disk": (Durability.DISK, "disk", {"host_bytes": 0, **disk}),
        "file": (Durability.DISK, "object", {"host_bytes": 0, **file}),
        "memory": (Durability.HOST, "object", {"host_bytes": 0, "object_url": "memory:///", **objects}),
        "s3": (
            Durability.OBJECT,
            "object",
            {
                "host_bytes": 0,
                "object_url": f"s3://{BUCKET}/{uuid.uuid4().hex}",
                "object_options": seaweed.options if seaweed else {},
                **objects,
            },
        ),
        "stack": (Durability.DISK, "disk", {"host_bytes": HOST_BYTES, **disk, **file}),
    }[name]
    return Place(name, tier, durability, TierSettings(**settings))


def look_up(cluster: LocalCluster, namespace: bytes, tokens: Tokens) -> RestorePlan | None:
    """How to restore the longest prefix, pinned: what the node says, or else the catalogue of the object store."""
    plan = cluster.tiering.match(namespace, Prompt(tokens), 30.0, deadline_s=DEADLINE_S).plan
    if plan is None and cluster.catalogue is not None:
        plan = cluster.catalogue.match(namespace, Prompt(tokens), 30.0, deadline_s=DEADLINE_S).plan
    return plan


def usage_of(cluster: LocalCluster) -> dict[str, TierUsage]:
    """Of the node's tiers and of the object store."""
    return cluster.cache.usage() | (cluster.catalogue.cache.usage() if cluster.catalogue else {})


def tier_of(cluster: LocalCluster, name: str) -> Tier:
    """A tier itself, with nothing around it; of the object store, the catalogue's way to it."""
    caches = [cluster.cache] + ([cluster.catalogue.cache] if cluster.catalogue else [])
    (tier,) = [level.tier for cache in caches for level in cache._levels if level.name == name]
    while hasattr(tier, "inner"):
        tier = tier.inner
    return tier


def make_faulty(cluster: LocalCluster, name: str, seed: int = 0) -> FaultyTier:
    """Put a tier that can fail between a node and one of its tiers."""
    if name == "object":
        shared = cluster.cache._shared
        assert isinstance(shared, SharedStore)
        shared.store = faulty = FaultyTier(shared.store, seed)
        return faulty
    (level,) = [level for level in cluster.cache._levels if level.name == name]
    level.tier = faulty = FaultyTier(level.tier, seed)
    return faulty


class Store:
    """A tier's frames, seen and changed behind its back."""

    def __init__(self, cluster: LocalCluster, name: str) -> None:
        self.tier = tier_of(cluster, name)

    def frames(self) -> dict[str, bytes]:
        """All frames by path, descriptors left out, and what is deleted while they are read."""
        paths = [entry.path for entry in self.tier.list() if is_frame(entry.path)]
        answers = dict(zip(paths, self.tier.get([GetRequest(path) for path in paths]), strict=True))
        assert not any(isinstance(answer, TierError) for answer in answers.values()), answers
        return {path: bytes(answer) for path, answer in answers.items() if isinstance(answer, memoryview)}

    def read(self, path: str) -> bytes:
        (answer,) = self.tier.get([GetRequest(path)])
        assert isinstance(answer, memoryview), answer
        return bytes(answer)

    def write(self, path: str, body: bytes) -> None:
        """Replace a frame's bytes where they lie; in memory, by as many others."""
        tier = self.tier
        if isinstance(tier, DiskTier):
            tier.file_of(path).write_bytes(body)
        elif isinstance(tier, ObjectStoreTier):
            obstore.put(tier._store, f"entries/{path}.blob", body)
        else:
            (answer,) = tier.get([GetRequest(path)])
            assert isinstance(answer, memoryview)
            assert answer.nbytes == len(body)
            ctypes.memmove(np.frombuffer(answer, np.uint8).ctypes.data, body, len(body))

    def remove(self, path: str) -> None:
        tier = self.tier
        if isinstance(tier, DiskTier):
            tier.file_of(path).unlink()
        elif isinstance(tier, ObjectStoreTier):
            obstore.delete(tier._store, f"entries/{path}.blob")
        else:
            tier.delete([path])

    @property
    def can_resize(self) -> bool:
        return isinstance(self.tier, DiskTier | ObjectStoreTier)


def is_frame(path: str) -> bool:
    try:
        FrameKey.parse(path)
    except IdentityError:
        return False
    return True


def mortal_worker(name: str, *rest: Any) -> Any:
    return MortalWorker(name, reference_worker(name, *rest))
