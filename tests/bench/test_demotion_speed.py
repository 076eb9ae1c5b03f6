"""How long a spill takes when memory is full, with and without copies ahead of need, in interleaved runs.

`pytest -m bench -s --slow tests/bench/test_demotion_speed.py` prints the table; without `--slow` blocks are small.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from spilling import IDENTITY, NO_HINTS

from tiered_cache.cache import Offer, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import PrefixChain
from tiered_cache.policy.names import build_policy
from tiered_cache.replay.traces import SAMPLE_PATH, TokenSource, Trace
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.host import HostTier

pytestmark = [pytest.mark.bench, pytest.mark.timeout(900)]

BLOCK = 512
BLOCK_BYTES, CHECKPOINT_BYTES = 64 << 10, 512 << 10
HOST_BYTES, DISK_BYTES = 96 << 20, 768 << 20
REQUESTS = 220


def geometry(scale: int) -> Geometry:
    """Blocks of rows and checkpoints of 1/`scale` of their bytes."""
    rows = Part("k", PartKind.ROWS, "uint8", (BLOCK_BYTES // BLOCK // scale,))
    return Geometry((rows, Part("state", PartKind.CARRY, "uint8", (CHECKPOINT_BYTES // scale,))), BLOCK)


def one_spill(cache: TieredCache, shape: Geometry, chain: PrefixChain, now_s: float) -> float | None:
    """Look one request of a trace up and spill it; the seconds of the spill, None if nothing was wanted."""
    found = cache.match(chain, NO_HINTS, now_s=now_s)
    stops = sorted({*found.take_at, len(chain)})
    hashes, checkpoints = tuple(chain.block_hashes()), tuple((n, chain.prefix_hash(n)) for n in stops)
    offer = Offer(chain.namespace, BLOCK, 0, hashes, checkpoints, (1,) * chain.blocks, 1, request=found.request)
    started_s = time.perf_counter()
    grant = cache.admit(offer, Durability.HOST, NO_HINTS)
    spent_s = time.perf_counter() - started_s
    arrays = {key: _arrays(shape, key.group, key.tokens, key.prefix[0]) for key in grant.keys}
    started_s = time.perf_counter()
    cache.spill(grant, [arrays])
    return spent_s + time.perf_counter() - started_s if grant.keys else None


def _arrays(shape: Geometry, group: str, tokens: int, seed: int) -> dict[str, npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 64, spec.shape, np.uint8) for name, spec in shape.arrays(group, tokens).items()}


@pytest.mark.parametrize("policy", ["lru", "default"])
@pytest.mark.parametrize("pauses", [True, False], ids=["pauses", "no pauses"])
@pytest.mark.parametrize(("number", "scale"), [(50, 16), pytest.param(REQUESTS, 1, marks=pytest.mark.slow)])
def test_spills_of_a_trace_that_fills_memory(
    policy: str, pauses: bool, number: int, scale: int, tmp_path: Path
) -> None:
    """With pauses there is time to copy ahead all that may soon have to go."""
    took_s: dict[str, list[float]] = {"in the spill": [], "ahead": []}
    caches: dict[str, TieredCache] = {}
    source = TokenSource(BLOCK, 1 << 20)
    shape, share = geometry(scale), number / REQUESTS / scale
    requests = [request for request in list(Trace(SAMPLE_PATH))[:number] if request.runs]
    with ThreadPoolExecutor(2) as executor, ThreadPoolExecutor(1) as ahead:
        for name in took_s:
            disk = DiskTier(tmp_path / name, int(DISK_BYTES * share), sync=SyncPolicy.DATA)
            slots = [
                TierSlot(HostTier(int(HOST_BYTES * share)), build_policy(policy, 1)),
                TierSlot(disk, build_policy(policy, 1), Mode.FAST),
            ]
            caches[name] = TieredCache(slots, executor, ahead=ahead if name == "ahead" else None)
            namespace = caches[name].register(IDENTITY, shape)
        for turn, request in enumerate(requests):
            tokens = source.tokens(request)
            turns = list(caches.items())
            for name, cache in turns if turn % 2 else reversed(turns):
                spent_s = one_spill(cache, shape, PrefixChain(namespace, BLOCK, tokens), request.arrival_s)
                if spent_s is not None:
                    took_s[name].append(spent_s)
            if pauses:
                ahead.submit(lambda: None).result()  # what was begun is done
        for name, cache in caches.items():
            counters = cache.counters()
            copied, used = (counters.get(f"ahead.disk.{what}", 0) for what in ("copied", "used"))
            full = sorted(took_s[name][len(took_s[name]) // 3 :])
            p50, p99 = (full[int(part * len(full))] * 1e3 for part in (0.5, 0.99))
            print(
                f"\n{policy:8} {'with' if pauses else 'no'} pauses, {name:13} {len(full)} spills: p50 {p50:6.1f} ms  "
                f"p99 {p99:6.1f} ms; {counters['frames.host.moved']} frames moved, "
                f"{copied} copied ahead, {used} of them used",
                end="",
            )
            cache.close()
    decisions = [
        {name: count for name, count in cache.counters().items() if name.startswith(("hits", "misses", "dropped"))}
        for cache in caches.values()
    ]
    assert decisions[0] == decisions[1]
