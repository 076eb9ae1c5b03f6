"""One deadline for a call and everything it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tiered_cache.errors import DeadlineError

Clock = Callable[[], float]
"""Seconds, never going backwards."""
LAST_STEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on this process's clock. What crosses processes is the number of seconds that are left."""

    at_s: float
    clock: Clock = time.monotonic

    @staticmethod
    def after(seconds: float, clock: Clock = time.monotonic) -> Deadline:
        return Deadline(clock() + seconds, clock)

    def left_s(self, what: str) -> float:
        """Seconds that are left for `what`. Raises `DeadlineError` if there are none."""
        left = self.at_s - self.clock()
        if left <= 0:
            raise DeadlineError(f"{what}: the deadline passed {-left:.3f} s ago")
        return left

    def last_step_s(self, limit_s: float) -> float:
        """Seconds for a step that tidies up, and is tried even when no time is left for anything else."""
        return min(limit_s, max(LAST_STEP_S, self.at_s - self.clock()))
