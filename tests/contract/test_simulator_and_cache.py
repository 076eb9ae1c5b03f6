"""The simulator and the real cache decide alike, request by request, at equal sizes and on the trace's own time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tiered_cache import frame
from tiered_cache.cache import Offer, TieredCache, TierSlot
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import Identity, PrefixChain
from tiered_cache.policy.base import Hints
from tiered_cache.policy.names import POLICIES, build_policy
from tiered_cache.replay.simulate import Model, RunChain, Simulation, TierModel
from tiered_cache.replay.traces import SAMPLE_PATH, TokenSource, Trace
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.host import HostTier

BLOCK = 512
GEOMETRY = Geometry((Part("k", PartKind.ROWS, "uint8", (2,)), Part("state", PartKind.CARRY, "uint8", (900,))), BLOCK)
CAPACITY_BYTES = 1_500_000
REQUESTS = 150


SIZES = HostTier(CAPACITY_BYTES)


class SizedSimulation(Simulation):
    """With the sizes that the host tier counts for this geometry."""

    def frame_bytes(self, group: str, tokens: int) -> int:
        del tokens
        return SIZES.footprint(frame.stored_bytes_max(GEOMETRY, group, BLOCK))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "every-block"])
def test_they_decide_alike(policy: str) -> None:
    requests = [request for request in list(Trace(SAMPLE_PATH))[:REQUESTS] if request.runs]
    source = TokenSource(BLOCK, 1 << 20)
    now_s = 0.0
    simulation = SizedSimulation([TierModel("host", CAPACITY_BYTES)], [build_policy(policy, 1)], BLOCK, Model(2, 900))
    with ThreadPoolExecutor(1) as executor:
        slots = [TierSlot(HostTier(CAPACITY_BYTES), build_policy(policy, 1))]
        cache = TieredCache(slots, executor, clock=lambda: now_s)
        namespace = cache.register(Identity(b"w" * 32, "none", "1"), GEOMETRY)
        decisions = []
        for request in requests:
            now_s = request.arrival_s
            run_chain = RunChain(request.runs, BLOCK)
            foretold, *_ = simulation.request(run_chain, run_chain, len(run_chain), 0, now_s, Hints())
            tokens = source.tokens(request)[: len(run_chain)]
            chain = PrefixChain(namespace, BLOCK, tokens)
            found = cache.match(chain, Hints())
            decisions.append((foretold, found.hit.tokens if found.hit else 0))
            stops = sorted({*found.take_at, len(chain)})
            offer = Offer(
                namespace,
                BLOCK,
                0,
                tuple(chain.block_hashes()),
                tuple((n, chain.prefix_hash(n)) for n in stops),
                (1,) * chain.blocks,
                1,
                request=found.request,
            )
            grant = cache.admit(offer, Durability.HOST, Hints())
            arrays = {
                key: {
                    name: np.zeros(spec.shape, np.uint8)
                    for name, spec in GEOMETRY.arrays(key.group, key.tokens).items()
                }
                for key in grant.keys
            }
            cache.spill(grant, [arrays])
        counters = cache.counters()
        cache.close()
    assert [real for _, real in decisions] == [foretold for foretold, _ in decisions]
    assert sum(real for _, real in decisions) > 0
    assert simulation.removals["host.evicted"] == counters.get("dropped.host.evicted", 0) > 0
