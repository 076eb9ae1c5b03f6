"""vLLM's chunks without vLLM, for tests: layouts, prompts as block hashes, and stores that keep their pages."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tiered_cache.cache import TieredCache
from tiered_cache.config import TierSettings
from tiered_cache.engines.vllm.layout import Bytes, PageGroup, PageLayout
from tiered_cache.engines.vllm.pages import PageStore, Plan, Progress
from tiered_cache.errors import MissReason
from tiered_cache.geometry import PartKind
from tiered_cache.identity import Identity
from tiered_cache.service.build import build_cache
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import SyncPolicy

IDENTITY = Identity(weights_digest=bytes(32), engine="vllm", engine_revision="test")
ROWS = PageGroup(0, PartKind.ROWS, 16, ((0, 1000),))
ROWS_TOO = PageGroup(3, PartKind.ROWS, 16, ((1000, 1800),))
WINDOW = PageGroup(1, PartKind.WINDOW, 16, ((0, 700),), window_tokens=16)
CARRY = PageGroup(2, PartKind.CARRY, 16, ((100, 612), (900, 1000)))
SMALL_CHUNKS = PageGroup(4, PartKind.ROWS, 4, ((0, 100),))

LAYOUTS = {
    "rows": (ROWS,),
    "two row groups": (ROWS, ROWS_TOO),
    "window": (ROWS, WINDOW),
    "window alone": (WINDOW,),
    "carry": (ROWS, CARRY),
    "carry alone": (CARRY,),
    "all": (ROWS, WINDOW, CARRY, ROWS_TOO),
    "chunks of several sizes": (SMALL_CHUNKS, ROWS),
}
HASH_TOKENS = 4


def layout_named(name: str) -> PageLayout:
    return PageLayout(LAYOUTS[name], HASH_TOKENS, 2048)


@contextmanager
def opened(
    layout: PageLayout, directory: Path | None, identity: Identity = IDENTITY, host_bytes: int = 0
) -> Iterator[PageStore]:
    disk = {"disk_dir": directory, "disk_bytes": 8 << 20, "disk_sync": SyncPolicy.NEVER} if directory else {}
    with ThreadPoolExecutor(1) as executor:
        tiers = TierSettings(host_bytes=host_bytes, **disk)  # type: ignore[arg-type]
        cache: TieredCache = build_cache(tiers, executor, clock=time.monotonic)
        durability = Durability.DISK if directory else Durability.HOST
        yield PageStore(cache, identity, layout, durability=durability, held_bytes_max=1 << 20)
        cache.close()


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    """As vLLM makes them: each covers all tokens before its end."""
    found, above = [], b""
    for end in range(HASH_TOKENS, len(tokens) + 1, HASH_TOKENS):
        above = hashlib.sha256(above + str(tokens[end - HASH_TOKENS : end]).encode()).digest()
        found.append(above)
    return found


def page_of(group: PageGroup, block_hash: bytes) -> Bytes:
    """A chunk's bytes: a function of its prefix, as in a model."""
    seed = int.from_bytes(hashlib.sha256(block_hash + bytes([group.index])).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, group.page_bytes, np.uint8)


def chunks(layout: PageLayout, tokens: int) -> list[tuple[PageGroup, int]]:
    return [(g, end) for g in layout.groups for end in range(g.chunk_tokens, tokens + 1, g.chunk_tokens)]


def bring(
    store: PageStore,
    hashes: Sequence[bytes],
    wanted: Sequence[tuple[PageGroup, int]],
    jobs: int = 1,
    known_tokens: int = 0,
) -> None:
    """One request's chunks, in so many jobs; those up to `known_tokens` are in the store's own tiers."""
    progress = Progress(known_tokens)
    for first in range(jobs):
        brought = {}
        for group, end in wanted[first::jobs]:
            if store.wants(progress, (group.index, end)) and store.reserve(progress, group.page_bytes):
                brought[group.index, end] = page_of(group, hashes[end // HASH_TOKENS - 1])
        store.keep(progress, hashes, brought)
    store.finish(progress)


def loaded_tokens(store: PageStore, hashes: Sequence[bytes], tokens: int) -> int:
    """How much of a prefix can be loaded; every byte of it is checked."""
    plan = store.match(hashes, tokens, 60.0)
    check_pages(store, hashes, plan)
    assert plan.pin is None or store.cache.unpin(plan.pin)
    return plan.tokens


def check_pages(store: PageStore, hashes: Sequence[bytes], plan: Plan) -> None:
    places = list(plan.places.values())
    found = dict(store.load(places))
    assert sorted(found) == list(range(len(places)))
    for number, place in enumerate(places):
        page, (index, end) = found[number], place.chunk
        assert not isinstance(page, MissReason)
        assert np.array_equal(page, page_of(store.layout.by_index[index], hashes[end // HASH_TOKENS - 1]))
