"""One deadline for a call and everything it waits for.

What crosses processes is the number of seconds that are left. Within a process `until` makes a deadline that of
everything in its block, on this thread, and `wait_s` bounds a wait by it: so each wait, however deep in the cache or in
a tier, ends by the time of the call that needs it, and no signature in between has to hand it on or can forget to. Work
that goes on for others than its first asker runs on a thread of an executor, where no caller's deadline holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tiered_cache.errors import ConfigError, DeadlineError

Clock = Callable[[], float]
"""Seconds, never going backwards."""
LAST_STEP_S = 0.1
CLOSE_S = 5.0
"""How long a tier's owner waits for it at the end. A process that goes on then leaves what a killed one does."""
SECONDS_MAX = 1e9
"""No deadline, pin or lease is longer: about thirty years."""


def duration_s(seconds: float, what: str) -> float:
    """A duration from another process. Raises `ConfigError` for one that never ends, or ended before it began."""
    if not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
        raise ConfigError(f"{what} is {seconds!r:.40}, not a number of seconds from 0 to {SECONDS_MAX:g}")
    return seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on this process's clock."""

    at_s: float
    clock: Clock = time.monotonic

    @staticmethod
    def after(seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """Raises `DeadlineError` for what is no number, or beyond `SECONDS_MAX`: a call that never ends is no call."""
        if not isinstance(seconds, int | float) or not -SECONDS_MAX <= seconds <= SECONDS_MAX:
            raise DeadlineError(f"deadline_s is {seconds!r:.40}, not a finite number of seconds", retryable=False)
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


_deadlines: ContextVar[tuple[Deadline, ...]] = ContextVar("deadlines", default=())


@contextmanager
def until(*deadlines: Deadline) -> Iterator[None]:
    """Waits within the block end by these deadlines, and by those that hold already."""
    token = _deadlines.set((*_deadlines.get(), *deadlines))
    try:
        yield
    finally:
        _deadlines.reset(token)


def deadlines() -> tuple[Deadline, ...]:
    """Those that hold here, for work that another thread does for this call alone."""
    return _deadlines.get()


def wait_s(limit_s: float) -> float:
    """How long a wait may take here: `limit_s`, or what is left if that is less; 0 if nothing is."""
    return max(0.0, min([limit_s, *(each.at_s - each.clock() for each in _deadlines.get())]))
