"""What a caller in another process says of its sessions is honoured by the tiers."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from serving import compute, serve, some_tokens

from actors.cluster import RayCluster
from tiered_cache.errors import MissReason
from tiered_cache.policy.base import Hints

TTL_S = 0.5


def test_what_is_pinned_outlives_pressure_and_what_has_expired_says_so(start: Callable[..., RayCluster]) -> None:
    cluster = start(workers=1, host_bytes=160_000, policy="lru")  # which drops what is unpinned, and refuses nothing
    pinned, brief = some_tokens(100), some_tokens(100, seed=1)
    serve(cluster, pinned, hints=Hints(pin_s=600.0))
    served = serve(cluster, brief, hints=Hints(ttl_s=TTL_S))
    assert [kept.tokens for kept in served.spill.kept][-1:] == [100]
    time.sleep(TTL_S + 0.1)
    gone = compute(cluster, np.append(brief, brief[:1]))
    assert (gone.placement.restored_tokens, gone.placement.reason) == (0, MissReason.EXPIRED)
    for seed in range(2, 12):
        serve(cluster, some_tokens(100, seed=seed))
    kept = compute(cluster, np.append(pinned, pinned[:1]))
    assert kept.placement.restored_tokens == 100
    counters = cluster.counters()
    assert counters["cache.dropped.host.expired"] == 1
    assert counters["cache.dropped.host.evicted"] > 0
