"""The histogram of times: quantiles, sums and bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.replay.latency import LatencyHistogram


def histogram(*seconds: float) -> LatencyHistogram:
    found = LatencyHistogram()
    for each in seconds:
        found.add(each)
    return found


@settings(max_examples=100)
@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200))
def test_quantiles_are_off_by_at_most_what_is_said(seconds: list[float]) -> None:
    found = histogram(*seconds).summary()
    ordered = sorted(seconds)
    for fraction, quantile in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert quantile == pytest.approx(ordered[math.ceil(fraction * len(ordered)) - 1], rel=0.0111)
    assert (found.count, found.max) == (len(seconds), ordered[-1])
    assert found.mean == pytest.approx(sum(seconds) / len(seconds))


def test_the_shown_histogram_holds_every_time_between_its_bucket_s_ends() -> None:
    seconds = [1e-6, 3e-5, 3.1e-5, 0.25, 7.0]
    found = histogram(*seconds).summary().histogram
    assert sum(count for _, count in found) == len(seconds)
    for each in seconds:
        assert any(end * 2**-0.25 <= each * (1 + 1e-9) and each <= end * (1 + 1e-9) for end, _ in found)


def test_however_many_times_there_are_it_stays_small() -> None:
    found = histogram(*(1.001**number * 1e-9 for number in range(50_000)))
    assert len(found._counts) <= 1_280
    assert histogram(0.0, 1e-12, 1e300).summary().count == 3


def test_of_nothing_all_is_zero() -> None:
    assert histogram().summary().p99 == 0.0 == histogram().summary().mean
