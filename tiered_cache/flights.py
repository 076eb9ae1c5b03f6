"""`Flights`: who asks for a frame that is being read already gets the same bytes, or the same error; it is read once.

Waiters leave when their deadline passes, without disturbing the others, who wait for what the first one has asked for.
If it was the first one's time that was over, before the read began or would end, another one takes over with its own.
How many threads may wait for others' work in one place is bounded (`Waiters`): they are missing elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from tiered_cache.deadline import wait_s
from tiered_cache.errors import DeadlineError, TierError
from tiered_cache.identity import FrameKey
from tiered_cache.tiers.base import GetAnswer, LateError

FLIGHT_S = 60.0
"""How long a read is waited for by anyone; who asks then reads anew."""
YOUNG_S = 0.25
"""Waits for a read are not counted for so long: any number may wait for a tier that answers."""


class Waiters:
    """Counts the threads that wait for others' work in one tier; `waiting_max`: None for any number."""

    def __init__(self, tier: str, waiting_max: int | None) -> None:
        self.waiting = 0
        self._tier = tier
        self._waiting_max = waiting_max
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count a wait. Raises `DeadlineError` if too many wait already."""
        with self._lock:
            if self._waiting_max is not None and self.waiting >= self._waiting_max:
                raise DeadlineError(f"{self.waiting} others wait for the same tier", None, self._tier)
            self.waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self.waiting -= 1


class _Flight(NamedTuple):
    """A read that all wait for who ask for the same frame, until it has an answer or has taken too long."""

    answer: Future[GetAnswer | None]
    """None: who read had no time left, or failed; somebody else has to."""
    began_s: float

    @property
    def until_s(self) -> float:
        return self.began_s + FLIGHT_S


class Flights:
    """The reads of one tier that are under way."""

    def __init__(self, tier: str, waiters: Waiters) -> None:
        self._tier = tier
        self._waiters = waiters
        self._lock = threading.Lock()
        self._flights: dict[str, _Flight] = {}  # by path

    def __len__(self) -> int:
        return len(self._flights)

    def get(
        self, keys: Sequence[FrameKey], read: Callable[[Sequence[FrameKey]], Sequence[GetAnswer]]
    ) -> Sequence[GetAnswer]:
        """One answer a key; `read` is asked for those that nobody is reading."""
        paths = [key.path() for key in keys]
        left = dict(zip(paths, keys, strict=True))
        answers: dict[str, GetAnswer] = {}
        while left:  # what comes back here is read by this call next, or by another one that was as quick
            answers.update(self._get(left, read))
            left = {path: key for path, key in left.items() if path not in answers}
        return [answers[path] for path in paths]

    def _get(
        self, keys: dict[str, FrameKey], read: Callable[[Sequence[FrameKey]], Sequence[GetAnswer]]
    ) -> dict[str, GetAnswer]:
        """The answers, without those that others were to read and did not."""
        mine: dict[str, FrameKey] = {}  # those that this call reads, for all
        now_s = time.monotonic()
        with self._lock:
            for path, key in keys.items():
                if path not in self._flights:
                    self._flights[path], mine[path] = _Flight(Future(), now_s), key
            flights = {path: self._flights[path] for path in keys}
        answers = self._lead(mine, flights, read) if mine else {}
        for path in keys.keys() - mine.keys():
            answer = self._follow(path, flights[path])
            if answer is not None:
                answers[path] = answer
        return answers

    def _lead(
        self,
        keys: dict[str, FrameKey],
        flights: dict[str, _Flight],
        read: Callable[[Sequence[FrameKey]], Sequence[GetAnswer]],
    ) -> dict[str, GetAnswer]:
        """Read for all who ask; what still runs when this thread's time is over is theirs to wait for."""
        answers: dict[str, GetAnswer] = {}
        try:
            answers.update(zip(keys, read(list(keys.values())), strict=True))
        finally:
            for path in keys:
                answer = answers.get(path)
                if isinstance(answer, LateError) and answer.by_caller:
                    answer.ended.add_done_callback(partial(self._landed, path, flights[path]))
                else:
                    own = isinstance(answer, DeadlineError) and not wait_s(FLIGHT_S)
                    self._land(path, flights[path], None if own else answer)
        return answers

    def _landed(self, path: str, flight: _Flight, late: Future[GetAnswer]) -> None:
        failure = late.exception()
        self._land(path, flight, late.result() if failure is None else TierError(str(failure), path, self._tier))

    def _land(self, path: str, flight: _Flight, answer: GetAnswer | None) -> None:
        """The first answer is the flight's, and only its own; one that was given up has had it."""
        with self._lock:
            if self._flights.get(path) is not flight:
                return
            del self._flights[path]
        flight.answer.set_result(answer)

    def _follow(self, path: str, flight: _Flight) -> GetAnswer | None:
        with suppress(TimeoutError):
            return flight.answer.result(wait_s(max(0.0, min(flight.began_s + YOUNG_S - time.monotonic(), YOUNG_S))))
        try:
            with self._waiters.one():
                return flight.answer.result(wait_s(max(0.0, flight.until_s - time.monotonic())))
        except TimeoutError:
            late = DeadlineError("it is being read, and was not here in time", path, self._tier)
            if time.monotonic() >= flight.until_s:
                self._land(path, flight, late)  # the next one tries anew
            return late
        except DeadlineError as error:
            return error
