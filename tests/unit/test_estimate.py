"""The estimate of loading: what the median of the last measurements says, and what nothing measured says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from serving import DEADLINE_S, MODELS, serve, some_tokens
from spilling import Clock

from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import MissReason
from tiered_cache.service import estimate
from tiered_cache.service.estimate import MEASUREMENTS_MAX, PROBE_EVERY, LoadEstimate, RecentMedian
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.owner import MEASURED_TOKENS_MIN
from tiered_cache.service.router import RouterSettings

MIB = 1 << 20


def median(measured: Sequence[float]) -> float | None:
    recent = RecentMedian()
    for value in measured:
        recent.add(value)
    return recent.value()


@pytest.mark.parametrize(
    ("measured", "value"),
    [
        ((), None),
        ((5.0,), 5.0),
        ((1.0, 2.0, 1000.0), 2.0),
        ((100.0,) * 20 + (0.001,) * 3, 100.0),
        ((100.0,) * 20 + (1.0,) * 7, 1.0),  # a third of all measurements, and more than half of the weight
        ((1.0,) * 100 + (2.0,) * MEASUREMENTS_MAX, 2.0),
    ],
)
def test_the_median_follows_what_lasts_and_not_what_is_odd(measured: Sequence[float], value: float | None) -> None:
    assert median(measured) == value


def test_until_both_are_measured_the_answer_is_to_load() -> None:
    known = LoadEstimate()
    assert not known.is_slower("a", "host", MIB, 1, 1e9)
    known.loaded("a", "host", MIB, 1.0)
    assert known.is_slower("a", "host", MIB, 10, 1000.0)
    assert not known.is_slower("a", "host", MIB, 10, None)
    assert not known.is_slower("a", "disk", MIB, 10, 1000.0)
    assert not known.is_slower("b", "host", MIB, 10, 1000.0)
    assert not known.is_slower("a", "host", 100 * MIB, 10, 1000.0), "of this size none was loaded"


def test_the_faster_one_wins_and_a_tie_is_loaded() -> None:
    known = LoadEstimate()
    known.loaded("a", "host", MIB, 0.5)
    for tokens, slower in ((499, True), (500, False), (501, False)):
        assert known.is_slower("a", "host", MIB, tokens, 1000.0) is slower
    for _ in range(5):
        known.loaded("a", "host", MIB, 0.1)
    assert not known.is_slower("a", "host", MIB, 499, 1000.0)


def test_now_and_then_it_is_loaded_all_the_same() -> None:
    known = LoadEstimate()
    known.loaded("a", "host", MIB, 10.0)
    answers = [known.is_slower("a", "host", MIB, 1, 1000.0) for _ in range(3 * PROBE_EVERY)]
    assert answers == ([True] * (PROBE_EVERY - 1) + [False]) * 3


def test_measurements_of_nothing_are_none_and_rates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "RATES_MAX", 2)
    known = LoadEstimate()
    for node, size, elapsed_s in (("a", 0, 1.0), ("a", MIB, 0.0), ("b", MIB, 9.0), ("c", MIB, 9.0), ("d", MIB, 9.0)):
        known.loaded(node, "host", size, elapsed_s)
    assert [known.is_slower(node, "host", MIB, 1, 1000.0) for node in "abcd"] == [False, False, True, True]


class Stepping(Clock):
    """Time passes with every look at it."""

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def test_workers_tell_what_they_have_measured_and_the_router_believes_them() -> None:
    settings = ClusterSettings(
        workers=1, worker=WorkerSettings(engine=MODELS[0]), tiers=TierSettings(host_bytes=8 * MIB)
    )
    router = RouterSettings(load_or_recompute=True, pin_s=1e6, lease_s=1e6, ask_s=1e6)
    with LocalCluster(settings, router=router, clock=Stepping()) as cluster:
        short, first = some_tokens(MEASURED_TOKENS_MIN - 1, seed=1), some_tokens(100)
        worker = cluster.workers["worker-0"]
        serve(cluster, short, deadline_s=1e6)
        assert worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S).tokens_per_s is None
        serve(cluster, first, deadline_s=1e6)
        bid = worker.bid(cluster.namespace, (), deadline_s=DEADLINE_S)
        assert bid.tokens_per_s == pytest.approx(100 / 0.001)
        longer = np.append(first, first[:1])
        assert serve(cluster, longer, deadline_s=1e6).placement.restored_tokens == 100
        again = serve(cluster, longer, deadline_s=1e6).placement  # loading looks at the clock more often
        assert (again.restored_tokens, again.reason) == (0, MissReason.FASTER_TO_COMPUTE)
