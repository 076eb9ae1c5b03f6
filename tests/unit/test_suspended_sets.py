"""A suspended set whose ranks do not all have frames of their own keeps those of every rank until it is resumed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from serving import DEADLINE_S, MODELS, compute, serve, some_tokens

from tiered_cache.cache import PlannedFrame
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import IdentityError
from tiered_cache.index import RemovalReason
from tiered_cache.level import plain_name
from tiered_cache.service.local import LocalCluster
from tiered_cache.tiers.base import Durability


def forge(frames: tuple[PlannedFrame, ...], what: str, rank: int) -> tuple[PlannedFrame, ...]:
    """One rank's checkpoint, or all of its frames as private ones, of another sequence."""

    def forged(planned: PlannedFrame) -> PlannedFrame:
        other = planned.lineage + 1
        return PlannedFrame(replace(planned.key, private=other if what == "private" else planned.key.private), other)

    return tuple(forged(planned) if planned.key.rank == rank else planned for planned in frames)


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_one_rank_has_its_own_frames_and_the_other_shares(lost_rank: int) -> None:
    worker = WorkerSettings(engine=MODELS[0], capacity_bytes=16 << 20, shards=2)
    with LocalCluster(ClusterSettings(2, worker, TierSettings(host_bytes=16 << 20))) as cluster:
        tokens = some_tokens(9)
        first = serve(cluster, tokens)
        keys = [receipt.key for receipt in first.spill.receipts]
        (lost,) = [key for key in keys if key.rank == lost_rank]
        level = cluster.cache._levels[0]
        level.tier.delete([lost.path()])
        level._forget(plain_name(lost), RemovalReason.LOST)
        second = compute(cluster, tokens)
        ticket = cluster.router.suspend(second.run.source, LocalCluster.NODE, Durability.HOST, deadline_s=DEADLINE_S)
        assert {planned.key.rank: planned.key.private != 0 for planned in ticket.plan.frames} == {
            lost_rank: False,
            1 - lost_rank: True,
        }
        for what, where in (("checkpoint", lost_rank), ("private", lost_rank), ("private", 1 - lost_rank)):
            forged = replace(ticket, plan=replace(ticket.plan, frames=forge(ticket.plan.frames, what, where)))
            with pytest.raises(IdentityError, match="several sequences"):
                cluster.workers["worker-0"].inject(forged.plan, forged.prompt, 60, b"", deadline_s=DEADLINE_S)
        assert cluster.router.resume(ticket, 60, deadline_s=DEADLINE_S).mark == second.mark
        assert not [name for name, _ in cluster.cache._index.names("host") if name.private], "used up"
