"""Who reads for others, and what becomes of them when his own time is over."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.spilling import MIXED, Clock, State, some_tokens
from tiered_cache.deadline import Deadline, until, wait_s
from tiered_cache.errors import DeadlineError, TierError
from tiered_cache.flights import Flights, Waiters
from tiered_cache.identity import FrameKey
from tiered_cache.tiers.base import GetAnswer

KEYS = [State(MIXED, some_tokens(9)).chain.key("rows", n, 0) for n in (4, 8)]
ASKERS = 4


def eventually(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Reads:
    """Reads that wait for `gate` and then need the time of whoever asks for them."""

    def __init__(self) -> None:
        self.gate, self.calls = threading.Event(), 0
        self.raises = False

    def __call__(self, keys: Sequence[FrameKey]) -> Sequence[GetAnswer]:
        self.calls += 1
        assert self.gate.wait(30)
        if self.raises:
            self.raises = False
            raise ZeroDivisionError
        if not wait_s(1.0):
            return [DeadlineError("no time is left")] * len(keys)
        return [memoryview(key.path().encode()) for key in keys]


@pytest.mark.parametrize("patient", list(itertools.product([False, True], repeat=ASKERS)))
def test_who_has_time_left_takes_over_from_who_has_none(patient: tuple[bool, ...]) -> None:
    clock, reads, waiters = Clock(), Reads(), Waiters("disk", None)
    flights = Flights("disk", waiters)

    def ask(deadline: Deadline, *keys: FrameKey) -> Sequence[GetAnswer]:
        with until(deadline):
            return flights.get(keys, reads)

    with ThreadPoolExecutor(ASKERS) as threads:
        askers = []
        for number, has_time in enumerate(patient):
            deadline = Deadline(1e6 if has_time else clock.now_s + 20, clock)
            askers.append(threads.submit(ask, deadline, *KEYS[:: 1 if number % 2 else -1]))
            eventually(lambda: reads.calls == 1)
            eventually(lambda number=number: waiters.waiting == number)  # type: ignore[misc]
        clock.now_s += 30
        reads.gate.set()
        for number, (asker, has_time) in enumerate(zip(askers, patient, strict=True)):
            answers = asker.result(30)
            assert len(answers) == 2
            for key, answer in zip(KEYS[:: 1 if number % 2 else -1], answers, strict=True):
                if has_time:
                    assert isinstance(answer, memoryview)
                if isinstance(answer, memoryview):
                    assert bytes(answer) == key.path().encode()
                else:
                    assert isinstance(answer, DeadlineError)
    assert not len(flights)
    assert not waiters.waiting
    assert reads.calls <= 2 * ASKERS
    if patient[0]:
        assert reads.calls == 1


def test_others_read_what_the_first_one_failed_to() -> None:
    reads, waiters = Reads(), Waiters("disk", None)
    flights = Flights("disk", waiters)
    reads.raises = True
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(flights.get, KEYS, reads)
        eventually(lambda: reads.calls == 1)
        others = [threads.submit(flights.get, KEYS, reads) for _ in range(2)]
        eventually(lambda: waiters.waiting == 2)
        reads.gate.set()
        with pytest.raises(ZeroDivisionError):
            first.result(30)
        for other in others:
            assert [bytes(answer) for answer in other.result(30)] == [key.path().encode() for key in KEYS]  # type: ignore[arg-type]


def test_a_tiers_own_error_is_everybodys() -> None:
    gate, calls, waiters = threading.Event(), [0], Waiters("disk", None)
    flights = Flights("disk", waiters)

    def fails(keys: Sequence[FrameKey]) -> Sequence[GetAnswer]:
        calls[0] += 1
        assert gate.wait(30)
        return [TierError("fails"), DeadlineError("took longer than any may")][: len(keys)]

    def ask() -> Sequence[GetAnswer]:
        return flights.get(KEYS, fails)

    with ThreadPoolExecutor(2) as threads:
        askers = [threads.submit(ask) for _ in range(2)]
        eventually(lambda: waiters.waiting == 1)
        gate.set()
        for asker in askers:
            assert [type(answer) for answer in asker.result(30)] == [TierError, DeadlineError]
    assert calls == [1]
