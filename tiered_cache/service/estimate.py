"""Load or compute: which of the two would be faster, by what both have taken lately.

A rate is the median of its last measurements, each of which weighs less than the next, so that neither one slow call
nor what was true an hour ago decides.
"""

from __future__ import annotations

from collections import OrderedDict, deque

MEASUREMENTS_MAX = 32
"""Of one rate."""
MEMORY = 0.9
"""How much a measurement weighs, against the next one."""
RATES_MAX = 4096
"""How many rates of loading are remembered; those that were asked for longest ago go first."""
PROBE_EVERY = 16
"""One in so many times, what should be slower to load is loaded: else nobody would learn that it no longer is."""


class RecentMedian:
    """The weighted median of the last measurements of one figure."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=MEASUREMENTS_MAX)

    def add(self, value: float) -> None:
        self._measured.append(value)

    def value(self) -> float | None:
        """The lowest measurement that half of all weight does not exceed; None if there is none."""
        newest_first = reversed(self._measured)
        weighted = sorted((value, MEMORY**age) for age, value in enumerate(newest_first))
        half = sum(weight for _, weight in weighted) / 2
        for value, weight in weighted:
            half -= weight
            if half <= 0:
                return value
        return None


class LoadEstimate:
    """How fast states are loaded from each node's tiers.

    Like is compared with like: restores of about the same size, to a factor of 4, share a rate, since a small one is
    mostly latency. Until something was measured the answer is to load.
    """

    def __init__(self) -> None:
        self._rates: OrderedDict[tuple[str, str, int], RecentMedian] = OrderedDict()
        self._refused: dict[tuple[str, str, int], int] = {}

    def loaded(self, node: str, tier: str, size_bytes: int, elapsed_s: float) -> None:
        """A restore of so many bytes has taken so long."""
        if size_bytes <= 0 or elapsed_s <= 0:
            return
        key = _key(node, tier, size_bytes)
        self._rates.setdefault(key, RecentMedian()).add(size_bytes / elapsed_s)
        self._rates.move_to_end(key)
        if len(self._rates) > RATES_MAX:
            oldest, _ = self._rates.popitem(last=False)
            self._refused.pop(oldest, None)

    def is_slower(self, node: str, tier: str, size_bytes: int, tokens: int, tokens_per_s: float | None) -> bool:
        """Whether to compute `tokens` tokens at that speed rather than to load them; a few times False all the same."""
        key = _key(node, tier, size_bytes)
        rate = self._rates.get(key)
        bytes_per_s = rate.value() if rate is not None else None
        if not bytes_per_s or not tokens_per_s:
            return False
        self._rates.move_to_end(key)
        if size_bytes / bytes_per_s <= tokens / tokens_per_s:
            return False
        self._refused[key] = self._refused.get(key, 0) + 1
        return self._refused[key] % PROBE_EVERY != 0


def _key(node: str, tier: str, size_bytes: int) -> tuple[str, str, int]:
    return node, tier, size_bytes.bit_length() // 2
