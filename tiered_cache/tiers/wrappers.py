"""Tiers around tiers: a deadline, retries, a breaker, figures. The same interface in and out, so they combine.

From the outside in: `MeteredTier(BreakerTier(RetryTier(DeadlineTier(place))))`. The deadline is innermost, so that it
bounds one attempt; the breaker is outside the retries, so that it counts calls that failed in the end and spares an
unwell place the retries, too; the figures are outermost: they show what callers see. A place that keeps deadlines and
retries itself, such as an object store, needs only the outer two.

A wrapped `get` never raises because the place fails: its answers say so, each for itself.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from tiered_cache.deadline import CLOSE_S, LAST_STEP_S, wait_s
from tiered_cache.errors import CapacityError, DeadlineError, FrameNotFoundError, TierError
from tiered_cache.executors import DaemonExecutor
from tiered_cache.tiers.base import (
    GetAnswer,
    GetRequest,
    LateError,
    PutItem,
    PutOutcome,
    QuarantinedEntry,
    Reservation,
    Tier,
    TierEntry,
    TierUsage,
)

RELEASE_S = 1.0
"""How long the release of a reservation is waited for, which is done in any case."""
_LIST_TOGETHER = 1000
_CHANGING = {"put", "delete", "quarantine"}  # a second such call, besides one that still runs, meets half of it
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class WrappedTier(Tier):
    """`inner`, and nothing else: every call goes through `around`, which a wrapper overrides."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name
        self.durability = inner.durability

    def around(self, call: str, do: Callable[[], _T]) -> _T:
        """Make a call of the inner tier; `call` is its method's name. A listing is one call a page."""
        del call
        return do()

    @property
    def bytes_max(self) -> int:
        return self.inner.bytes_max

    def footprint(self, bytes_: int) -> int:
        return self.inner.footprint(bytes_)

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        return self.around("reserve", lambda: self.inner.reserve(sizes))

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        return self.around("put", lambda: self.inner.put(items, reservation))

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        return self.around("get", lambda: self.inner.get(requests))

    def stat(self, paths: Sequence[str]) -> Sequence[int | None]:
        return self.around("stat", lambda: self.inner.stat(paths))

    def list(self, prefix: str = "") -> Iterator[TierEntry]:
        entries = self.around("list", lambda: self.inner.list(prefix))
        while page := self.around("list", lambda: _page(entries)):
            yield from page

    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        return self.around("delete", lambda: self.inner.delete(paths))

    def quarantine(self, path: str, reason: str) -> bool:
        return self.around("quarantine", lambda: self.inner.quarantine(path, reason))

    def quarantined(self) -> Sequence[QuarantinedEntry]:
        return self.around("quarantined", self.inner.quarantined)

    def usage(self) -> TierUsage:
        return self.around("usage", self.inner.usage)

    def lost(self) -> Sequence[TierEntry]:
        return self.inner.lost()

    def is_shared(self) -> bool:
        return self.around("is_shared", self.inner.is_shared)

    def set_limit(self, bytes_max: int) -> int:
        return self.around("set_limit", lambda: self.inner.set_limit(bytes_max))

    def close(self) -> None:
        self.inner.close()


class DeadlineTier(WrappedTier):
    """Every call ends after `deadline_s`, or by the deadlines of `deadline.until`, with a `DeadlineError`.

    Calls run in `executor`, which nothing that the inner tier waits for may use. A call that ends after its deadline
    has done what it did, but a late reservation is released, and a late read touches no buffer of the caller. The
    buffers of a late put are still read: who changes them may find an entry of both, old bytes and new ones. The error
    for a call that still runs is a `LateError`: what it may still do to its names, nobody else should do meanwhile.

    At most `running_max` calls are under way, hung ones included; one more is refused at once. So a place that hangs
    holds up no more than so many threads, and of those that come later none.
    """

    def __init__(
        self,
        inner: Tier,
        executor: Executor,
        deadline_s: float,
        *,
        running_max: int = 32,
        owns_executor: bool = False,
    ) -> None:
        super().__init__(inner)
        self._executor = executor
        self._deadline_s = deadline_s
        self._running_max = running_max
        self._owns_executor = owns_executor
        self._running = 0
        self._lock = threading.Lock()

    @property
    def running(self) -> int:
        """How many calls have not ended, whether or not somebody still waits for them."""
        return self._running

    def around(self, call: str, do: Callable[[], _T]) -> _T:
        return self._wait_for(call, do, lambda _: None)

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        granted = self._wait_for("reserve", lambda: self.inner.reserve(sizes), Reservation.release)
        bytes_ = granted.bytes
        granted.take(bytes_)  # from here on it is the other's, whose release does not wait for a place that hangs
        granted.release()
        return Reservation(bytes_, partial(self._give_back, granted))

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        own = [_without_into(request) for request in requests]
        try:
            answers = self.around("get", lambda: self.inner.get(own))
        except LateError as error:
            return [_late_answer(error, number) for number in range(len(requests))]
        except DeadlineError as error:
            return [error] * len(requests)
        return [_into(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def close(self) -> None:
        """Like any call, but on a thread of its own, since all others may hang: what is not done in time is left."""
        limit_s = max(LAST_STEP_S, wait_s(min(CLOSE_S, self._deadline_s)))
        closer = DaemonExecutor(1, f"close-{self.name}")
        try:
            closer.submit(self.inner.close).result(limit_s)
        except TimeoutError:
            left = f"{self._running} calls, which had not ended"
            _log.warning("tier %s: was not closed within %.3g s and is left with %s", self.name, limit_s, left)
        finally:
            closer.shutdown(wait=False)
            if self._owns_executor:
                self._executor.shutdown(wait=False)

    def _give_back(self, granted: Reservation, bytes_: int) -> None:
        """Not one of the calls that are counted: it is never refused, but done later if it is not done in time."""
        try:
            given_back = self._executor.submit(granted.put_back, bytes_)
        except RuntimeError:  # it was shut down, and what is closed does not hang
            granted.put_back(bytes_)
            return
        with suppress(TimeoutError):
            given_back.result(wait_s(min(RELEASE_S, self._deadline_s)))

    def _wait_for(self, call: str, do: Callable[[], _T], undo: Callable[[_T], object]) -> _T:
        limit_s = wait_s(self._deadline_s)
        if limit_s <= 0:
            raise DeadlineError(f"{call}: no time is left", None, self.name)
        with self._lock:
            if self._running >= self._running_max:
                raise DeadlineError(f"{call}: {self._running} earlier calls have not ended", None, self.name)
            self._running += 1
        done = late = False

        def job() -> _T:
            nonlocal done
            try:
                result = do()
                with self._lock:
                    done = True
                    too_late = late
                if too_late:
                    undo(result)
            except Exception:
                if late:
                    _log.warning("tier %s: %s failed after its deadline", self.name, call, exc_info=True)
                raise
            else:
                return result
            finally:
                with self._lock:
                    self._running -= 1

        try:
            future: Future[_T] = self._executor.submit(job)
        except RuntimeError as error:  # it was shut down
            with self._lock:
                self._running -= 1
            raise TierError(f"{call}: {error}", None, self.name) from error
        try:
            return future.result(limit_s)
        except TimeoutError:
            what = f"{call} was not done within {limit_s:.3g} s"
            if future.cancel():  # it never began
                with self._lock:
                    self._running -= 1
                raise DeadlineError(what, None, self.name) from None
            with self._lock:
                late = not done
            if not late:
                return future.result()
            by_caller = limit_s < self._deadline_s
            raise LateError(what, self.name, future, retryable=call not in _CHANGING, by_caller=by_caller) from None


class RetryTier(WrappedTier):
    """What failed with a retryable error is tried again: up to `attempts` times in all, and not after `total_s`.

    The pauses double from `pause_s` on, each shortened by up to half, by `seed`. A `get` asks again only for what it
    did not get. After a lost answer, a second `delete` or `quarantine` says that nothing was there.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        attempts: int = 3,
        pause_s: float = 0.05,
        total_s: float = 10.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self._attempts = attempts
        self._pause_s = pause_s
        self._total_s = total_s
        self._random = random.Random(seed)  # noqa: S311 - nothing here is a secret
        self._clock = clock
        self._sleep = sleep

    def around(self, call: str, do: Callable[[], _T]) -> _T:
        del call
        for pause in self._pauses():
            try:
                return do()
            except TierError as error:
                if not (error.retryable and pause()):
                    raise
        raise AssertionError("the last pause is refused")

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        answers: dict[int, GetAnswer] = {}
        asked: Sequence[int] = range(len(requests))
        for pause in self._pauses():
            came = self.around("get", lambda: self.inner.get([requests[number] for number in asked]))  # noqa: B023
            answers.update(zip(asked, came, strict=True))
            asked = [n for n in asked if isinstance(answer := answers[n], TierError) and answer.retryable]
            if not (asked and pause()):
                break
        return [answers[number] for number in range(len(requests))]

    def list(self, prefix: str = "") -> Iterator[TierEntry]:
        """As promised; tried again until the first page is there, since a second listing may have another order."""

        def first_page() -> tuple[Sequence[TierEntry], Iterator[TierEntry]]:
            entries = self.inner.list(prefix)
            return _page(entries), entries

        page, rest = self.around("list", first_page)
        yield from page
        yield from rest

    def _pauses(self) -> Iterator[Callable[[], bool]]:
        """For each attempt, what waits until the next: it returns False, at once, if there is none."""
        until_s = self._clock() + self._total_s
        for attempt in range(self._attempts):
            pause_s = self._pause_s * 2**attempt * self._random.uniform(0.5, 1.0)

            def pause(attempt: int = attempt, pause_s: float = pause_s) -> bool:
                if attempt + 1 == self._attempts or self._clock() + pause_s > until_s:
                    return False
                self._sleep(pause_s)
                return True

            yield pause


class BreakerState(enum.Enum):
    """CLOSED lets calls through, OPEN refuses them, HALF_OPEN lets one through to see."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class BreakerTier(WrappedTier):
    """After `failures` calls in a row that failed, or took longer than `slow_s`, calls are refused for `open_s`.

    Then one call is let through: if it is well, all are. A `get` failed if it brought errors and nothing else. A
    deadline that passed before `slow_s` was its caller's, and says nothing about the place.
    While calls are refused no room is granted, so that nothing is prepared in vain; that counts as no call, since a
    place may well have room and not answer. Refusals are retryable errors.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        failures: int = 5,
        slow_s: float | None = None,
        open_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._failures = failures
        self._slow_s = slow_s
        self._open_s = open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._opened_s: float | None = None
        self._probing = False
        self._times_opened = 0
        self._closed = False

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._opened_s is None:
                return BreakerState.CLOSED
            return BreakerState.OPEN if self._left_s() > 0 else BreakerState.HALF_OPEN

    @property
    def times_opened(self) -> int:
        return self._times_opened

    def around(self, call: str, do: Callable[[], _T]) -> _T:
        if self._closed or call in {"usage", "is_shared", "set_limit"}:
            return do()
        probes = self._admit(call)
        begun_s = self._clock()
        well: bool | None = False
        try:
            result = do()
            well = self._slow_s is None or self._clock() - begun_s <= self._slow_s
        except CapacityError:  # says nothing about the place
            well = None
            raise
        except DeadlineError:
            well = None if self._slow_s is not None and self._clock() - begun_s < self._slow_s else False
            raise
        else:
            return result
        finally:
            self._record(well, probes=probes)

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        with self._lock:
            if not self._closed and self._opened_s is not None and self._left_s() > 0:
                raise CapacityError(f"no room is granted: {self._refusal()}", None, self.name)
        return self.inner.reserve(sizes)

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        answers: Sequence[GetAnswer] = []

        def ask() -> None:
            nonlocal answers
            answers = self.inner.get(requests)
            errors = [answer for answer in answers if isinstance(answer, TierError)]
            if errors and not any(isinstance(answer, memoryview) for answer in answers):
                raise errors[0]

        try:
            self.around("get", ask)
        except _RefusedError as error:
            return [error] * len(requests)
        except TierError:
            if not answers:
                raise
        return answers

    def close(self) -> None:
        self._closed = True
        super().close()

    def _admit(self, call: str) -> bool:
        """Whether this is the one call that tries whether the place is well. Raises if it is left alone."""
        with self._lock:
            if self._opened_s is None:
                return False
            if self._left_s() > 0 or self._probing:
                raise _RefusedError(f"{call} refused: {self._refusal()}", None, self.name, retryable=True)
            self._probing = True
            return True

    def _record(self, well: bool | None, *, probes: bool) -> None:
        """What one admitted call said about the place; None is nothing."""
        with self._lock:
            if probes:
                self._probing = False
            if well:
                self._in_a_row = 0
                if self._opened_s is not None:
                    self._opened_s = None
                    _log.warning("tier %s answers again", self.name)
            elif well is False:
                self._in_a_row += 1
                if probes or (self._opened_s is None and self._in_a_row >= self._failures):
                    if self._opened_s is None:
                        self._times_opened += 1
                        _log.warning("tier %s is left alone: %d calls in a row failed", self.name, self._in_a_row)
                    self._opened_s = self._clock()

    def _left_s(self) -> float:
        assert self._opened_s is not None
        return self._opened_s + self._open_s - self._clock()

    def _refusal(self) -> str:
        return f"{self._in_a_row} calls in a row failed; tried again in {max(0.0, self._left_s()):.1f} s"


class _RefusedError(TierError):
    """The breaker's own."""


BUCKETS_S = tuple(2.0**exponent for exponent in range(-14, 7))
"""Upper bounds of a latency histogram's buckets: 61 us to 64 s, each twice the one before; the last is open."""


@dataclass(frozen=True, slots=True)
class CallFigures:
    """What one kind of call did since the tier was opened; figures only grow."""

    calls: int = 0
    errors: int = 0
    """Calls that raised `TierError`, and answers of a `get` that were one."""
    refusals: int = 0
    """Calls that raised `CapacityError`."""
    entries: int = 0
    """Entries created or read."""
    absences: int = 0
    bytes: int = 0
    """Bytes created or read."""
    seconds: float = 0.0
    buckets: tuple[int, ...] = field(default=(0,) * (len(BUCKETS_S) + 1))
    """How many calls took at most `BUCKETS_S[i]`, each call in one bucket."""

    def quantile_s(self, share: float) -> float:
        """An upper bound of the time that this share of the calls took; infinity if it is beyond the last bound."""
        counts = list(itertools.accumulate(self.buckets))
        index = bisect.bisect_left(counts, share * self.calls)
        return BUCKETS_S[index] if index < len(BUCKETS_S) else float("inf")


class MeteredTier(WrappedTier):
    """Counts what passes, and how long it takes."""

    def __init__(self, inner: Tier, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._figures: dict[str, CallFigures] = {}

    def figures(self) -> dict[str, CallFigures]:
        """By the method's name; what was never called is missing."""
        with self._lock:
            return dict(self._figures)

    def around(self, call: str, do: Callable[[], _T]) -> _T:
        begun_s = self._clock()
        errors = refusals = 0
        try:
            return do()
        except TierError:
            errors = 1
            raise
        except CapacityError:
            refusals = 1
            raise
        finally:
            self._add(call, self._clock() - begun_s, CallFigures(1, errors, refusals))

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        outcomes = super().put(items, reservation)
        created = [i.bytes for i, outcome in zip(items, outcomes, strict=True) if outcome is PutOutcome.CREATED]
        self._add("put", None, CallFigures(entries=len(created), bytes=sum(created)))
        return outcomes

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        answers = super().get(requests)
        read = [answer.nbytes for answer in answers if isinstance(answer, memoryview)]
        absences = sum(isinstance(answer, FrameNotFoundError) for answer in answers)
        errors = len(answers) - len(read) - absences
        self._add("get", None, CallFigures(0, errors, 0, len(read), absences, sum(read)))
        return answers

    def _add(self, call: str, seconds: float | None, more: CallFigures) -> None:
        with self._lock:
            old = self._figures.get(call, CallFigures())
            buckets = list(old.buckets)
            if seconds is not None:
                buckets[bisect.bisect_left(BUCKETS_S, seconds)] += 1
            self._figures[call] = CallFigures(
                old.calls + more.calls,
                old.errors + more.errors,
                old.refusals + more.refusals,
                old.entries + more.entries,
                old.absences + more.absences,
                old.bytes + more.bytes,
                old.seconds + (seconds or 0.0),
                tuple(buckets),
            )


class TierHealth(NamedTuple):
    """What the wrappers around one tier know of it."""

    calls: Mapping[str, CallFigures]
    """As `MeteredTier.figures` gives them; empty if it is not metered."""
    breaker: BreakerState | None
    """None if it has no breaker."""
    times_opened: int


def health_of(tier: Tier) -> TierHealth:
    """What the wrappers around a tier know of it, whichever there are."""
    calls: Mapping[str, CallFigures] = {}
    breaker, times_opened = None, 0
    while isinstance(tier, WrappedTier):
        if isinstance(tier, MeteredTier):
            calls = tier.figures()
        elif isinstance(tier, BreakerTier):
            breaker, times_opened = tier.state, tier.times_opened
        tier = tier.inner
    return TierHealth(calls, breaker, times_opened)


def _page(entries: Iterator[TierEntry]) -> Sequence[TierEntry]:
    return deque(itertools.islice(entries, _LIST_TOGETHER))


def _without_into(request: GetRequest) -> GetRequest:
    """The same range, into nobody's buffer."""
    if request.into is None:
        return request
    room = request.into.nbytes
    return replace(request, into=None, bytes=room if request.bytes is None else min(room, request.bytes))


def _late_answer(error: LateError, number: int) -> LateError:
    """The error for one answer of a `get` that still runs."""
    answer: Future[GetAnswer] = Future()

    def came(call: Future[Sequence[GetAnswer]]) -> None:
        failure = call.exception()
        if failure is not None:
            answer.set_exception(failure)
        else:
            answer.set_result(call.result()[number])

    error.ended.add_done_callback(came)
    assert error.tier is not None
    return LateError(error.message, error.tier, answer, retryable=error.retryable, by_caller=error.by_caller)


def _into(request: GetRequest, answer: GetAnswer) -> GetAnswer:
    if request.into is None or not isinstance(answer, memoryview):
        return answer
    target = request.into.cast("B")[: answer.nbytes]
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(answer, np.uint8))
    return target
