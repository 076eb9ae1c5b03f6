"""One deadline for a call and everything it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tiered_cache.errors import DeadlineError

Clock = Callable[[], float]
"""Seconds, never going backwards."""


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
