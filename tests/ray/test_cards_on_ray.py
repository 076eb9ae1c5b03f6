"""Cards 01 and 20 where they speak of actors: through real ones, over every kind of tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from serving import DEADLINE_S, MODELS, compute, never_moved, some_tokens

from actors.cluster import RAY_NAMESPACE, RayCluster
from actors.ports import GRACE_S
from tiered_cache.errors import TierError
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import Prompt
from tiered_cache.testing.mortal import kill_actor
from tiered_cache.tiers.base import Durability

HOST, DISK = Durability.HOST, Durability.DISK
MODEL = MODELS[0]
NOISE_S = 2.0
"""How late a busy machine may make an answer."""
PROMPT = some_tokens(45)
LONGER = np.concatenate([PROMPT, some_tokens(5, seed=2)])

Start = Callable[..., RayCluster]


def tiers_of(place: str, directory: Path) -> dict[str, object]:
    """A node's only tier, and what it survives."""
    return {
        "host": {},
        "disk": {"host_bytes": 0, "disk_dir": directory / "tier", "disk_bytes": 32 << 20},
        "file": {"host_bytes": 0, "object_url": f"file://{directory / 'objects'}", "object_bytes": 32 << 20},
    }[place]


@pytest.mark.parametrize("place", ["host", "disk", "file"])
def test_cards_01_and_20_from_one_actor_to_another_which_outlives_it(start: Start, tmp_path: Path, place: str) -> None:
    """Byte for byte; and what a killed worker had put and handed over by reference is there, or a miss in time."""
    cluster = start(workers=3, **tiers_of(place, tmp_path))
    (node,) = cluster.tierings
    durability = HOST if place == "host" else DISK
    first, unkept = compute(cluster, PROMPT), compute(cluster, some_tokens(45, seed=1))
    spilled = cluster.tierings[node].spill(first.run.offer, durability, Hints(), 60.0, deadline_s=DEADLINE_S)
    assert spilled.plan is not None
    assert [(kept.tokens, kept.durability >= durability) for kept in spilled.kept] == [(45, True)]
    for name in sorted(set(cluster.workers) - {first.placement.owner}):
        restored = cluster.workers[name].inject(spilled.plan, Prompt(LONGER), 100, b"", deadline_s=DEADLINE_S)
        assert restored.mark == first.mark == never_moved(MODEL, PROMPT)
        run = cluster.workers[name].run(restored.source, Prompt(LONGER), (), deadline_s=DEADLINE_S)
        assert run.marks[-1] == never_moved(MODEL, LONGER)
        cluster.workers[name].release(run.source, deadline_s=DEADLINE_S)
    doomed = {first.placement.owner, unkept.placement.owner}
    for name in doomed:
        kill_actor(cluster.workers[name].actor, RAY_NAMESPACE)
    left = sorted(set(cluster.workers) - doomed)
    restored = cluster.workers[left[0]].inject(spilled.plan, Prompt(LONGER), 100, b"", deadline_s=DEADLINE_S)
    assert restored.mark == first.mark
    begun_s = time.monotonic()
    with pytest.raises(TierError, match=r"is (dead|not there)"):
        cluster.tierings[node].spill(unkept.run.offer, durability, Hints(), None, deadline_s=5.0)
    again = compute(cluster, some_tokens(50, seed=1), deadline_s=5.0)
    assert time.monotonic() - begun_s < 2 * (5.0 + GRACE_S + NOISE_S)
    assert (again.placement.restored, again.mark) == (None, never_moved(MODEL, some_tokens(50, seed=1)))
    assert again.placement.owner in left, "the router has forgotten it"
