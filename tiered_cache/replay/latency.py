"""How long things took: a histogram of bounded size, with quantiles that are off by at most 1.1 %."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Final

_PER_OCTAVE: Final = 32
"""Buckets between a time and twice as long: each is 2.2 % wide, and its middle stands for what is in it."""
_SHOWN_PER_OCTAVE: Final = 4
_SHORTEST_S: Final = 1e-7
_OCTAVES: Final = 40
"""Up to 30 hours; what is longer or shorter counts as the last or first bucket's."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """What a histogram knows, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    histogram: tuple[tuple[float, int], ...]
    """(upper end, count) of each bucket that is not empty; a bucket's lower end is 2**-0.25 of the upper one."""


class LatencyHistogram:
    """Counts times in buckets of equal ratio: at most 1,280 of them, however many times there are."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._sum_s = self._max_s = 0.0

    def add(self, seconds: float) -> None:
        bucket = math.floor(math.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S) * _PER_OCTAVE)
        self._counts[min(bucket, _OCTAVES * _PER_OCTAVE - 1)] += 1
        self._sum_s += seconds
        self._max_s = max(self._max_s, seconds)

    def summary(self) -> Latencies:
        """All zero if nothing was counted."""
        count = self._counts.total()
        shown: Counter[int] = Counter()
        for bucket, number in self._counts.items():
            shown[bucket * _SHOWN_PER_OCTAVE // _PER_OCTAVE] += number
        return Latencies(
            count=count,
            mean=self._sum_s / max(count, 1),
            p50=self._quantile(0.50),
            p90=self._quantile(0.90),
            p99=self._quantile(0.99),
            max=self._max_s,
            histogram=tuple(
                (_SHORTEST_S * 2 ** ((bucket + 1) / _SHOWN_PER_OCTAVE), number)
                for bucket, number in sorted(shown.items())
            ),
        )

    def _quantile(self, fraction: float) -> float:
        """The smallest time that is not exceeded by this fraction of them."""
        left = math.ceil(fraction * self._counts.total())
        for bucket, number in sorted(self._counts.items()):
            left -= number
            if left <= 0:
                return min(self._max_s, _SHORTEST_S * 2 ** ((bucket + 0.5) / _PER_OCTAVE))
        return 0.0
