"""The soak itself, for seconds: it does all that it says, and sees what grows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from soak import Sample, soak, tell, trends

MIB = 1 << 20


def test_a_short_soak_does_everything_and_answers_right(capsys: pytest.CaptureFixture[str]) -> None:
    report = soak(minutes=0.02, seed=1, restarts=1, steps_min=150)
    assert report.wrong == 0
    assert report.steps >= 150
    assert {"spilled", "restored"} <= report.events.keys()
    assert report.injected.total() > 0
    assert report.counters["cache.frames.disk.put"] > 0
    assert report.counters["cache.frames.object.put"] > 0
    assert report.samples
    tell(report)
    assert "0 wrong answers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("leak", "grown"),
    [
        ({}, set()),
        ({"rss_bytes": MIB}, {"rss_bytes"}),
        ({"descriptors": 1}, {"descriptors"}),
        ({"threads": 1}, {"threads"}),
        ({"store_threads": 1}, {"store_threads"}),
    ],
)
def test_what_grows_is_named(leak: dict[str, int], grown: set[str]) -> None:
    steady = {"rss_bytes": 200 * MIB, "descriptors": 20, "threads": 9, "store_threads": 30}
    samples = [
        Sample(float(n), **{name: value + n * leak.get(name, 0) for name, value in steady.items()}) for n in range(100)
    ]
    assert {name for name, (_, late, most) in trends(samples).items() if late > most} == grown


def test_what_grows_in_the_warm_up_alone_is_no_trend() -> None:
    samples = [Sample(float(n), min(n, 20) * 10 * MIB, 20 + min(n, 20), 9, 30) for n in range(100)]
    assert all(late <= most for _, late, most in trends(samples).values())
