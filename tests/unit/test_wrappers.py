"""Each wrapper keeps the promises of a tier, and does its own part."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tiered_cache.deadline import Deadline, until
from tiered_cache.errors import CapacityError, DeadlineError, FrameNotFoundError, TierError
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.testing.tier_suite import TierTests, body_of, bytes_of, get, name_of, put
from tiered_cache.tiers.base import GetAnswer, GetRequest, LateError, PutItem, PutOutcome, Reservation, Tier, TierEntry
from tiered_cache.tiers.host import HostTier
from tiered_cache.tiers.wrappers import (
    BUCKETS_S,
    BreakerState,
    BreakerTier,
    CallFigures,
    DeadlineTier,
    MeteredTier,
    RetryTier,
    WrappedTier,
)

BUDGET = 4 << 20


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class TestDeadlineTier(TierTests):
    @pytest.fixture(autouse=True)
    def _executor(self) -> Iterator[None]:
        with ThreadPoolExecutor(8) as self.executor:
            yield

    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return DeadlineTier(HostTier(bytes_max), self.executor, 30.0)


class TestRetryTier(TierTests):
    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return RetryTier(HostTier(bytes_max))


class TestBreakerTier(TierTests):
    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return BreakerTier(HostTier(bytes_max), slow_s=60.0)


class TestMeteredTier(TierTests):
    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return MeteredTier(HostTier(bytes_max))


class TestAllTogether(TestDeadlineTier):
    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        return MeteredTier(BreakerTier(RetryTier(super().make_tier(directory, bytes_max))))


class Gated(WrappedTier):
    """A place that hangs in the next call until `gate` is set."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()
        self.ended = threading.Event()

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        self.gate.wait(60)
        return super().reserve(sizes)

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        self.gate.wait(60)
        return super().put(items, reservation)

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        self.gate.wait(60)
        try:
            return super().get(requests)
        finally:
            self.ended.set()


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


# The deadline


def test_a_late_read_is_an_error_and_touches_no_buffer(executor: ThreadPoolExecutor) -> None:
    place = Gated(HostTier(BUDGET))
    tier = DeadlineTier(place, executor, 0.05)
    body = body_of("", 0, 5_000)
    put(tier, (name_of(0), body))
    place.gate.clear()
    buffer = bytearray(b"\xa5" * 5_000)
    answers = tier.get([GetRequest(name_of(0), into=memoryview(buffer)), GetRequest(name_of(1))])
    assert all(isinstance(answer, DeadlineError) and answer.retryable for answer in answers)
    place.gate.set()
    assert place.ended.wait(60)
    assert buffer == b"\xa5" * 5_000
    (answer,) = tier.get([GetRequest(name_of(0), into=memoryview(buffer))])
    assert bytes_of(answer) == body == bytes(buffer)


def test_a_late_put_is_an_error_and_may_be_there_later(executor: ThreadPoolExecutor) -> None:
    place = Gated(HostTier(BUDGET))
    tier = DeadlineTier(place, executor, 0.05)
    with tier.reserve([100]) as room:
        place.gate.clear()
        with pytest.raises(DeadlineError, match="put"):
            tier.put([PutItem(name_of(0), [bytes(100)])], room)
        assert tier.running == 1
        place.gate.set()
        executor.shutdown(wait=True)
        assert tier.running == 0
    assert [entry.path for entry in place.list()] == [name_of(0)]
    assert place.usage().bytes_reserved == 0


def test_the_callers_deadline_ends_a_call_sooner_and_says_whose_it_was(executor: ThreadPoolExecutor) -> None:
    place = Gated(HostTier(BUDGET))
    tier = DeadlineTier(place, executor, 30.0)
    put(tier, (name_of(0), body_of("", 0, 500)))
    place.gate.clear()
    with until(Deadline.after(0.05)):
        first, second = tier.get([GetRequest(name_of(0)), GetRequest(name_of(1))])
    assert isinstance(first, LateError)
    assert isinstance(second, LateError)
    assert first.by_caller
    there = pickle.loads(pickle.dumps(first))
    assert (type(there), str(there)) == (DeadlineError, str(first))
    with until(Deadline.after(-1.0)), pytest.raises(DeadlineError, match="no time is left"):
        tier.usage()
    place.gate.set()
    assert bytes_of(first.ended.result(10)) == body_of("", 0, 500)
    assert isinstance(second.ended.result(10), FrameNotFoundError)


def test_a_late_change_is_not_to_be_tried_again(executor: ThreadPoolExecutor) -> None:
    place = Gated(HostTier(BUDGET))
    tier = RetryTier(DeadlineTier(place, executor, 0.05), sleep=lambda _: None)
    with tier.reserve([100]) as room:
        place.gate.clear()
        with pytest.raises(LateError) as raised:
            tier.put([PutItem(name_of(0), [bytes(100)])], room)
        assert not raised.value.retryable
        place.gate.set()
        assert raised.value.ended.result(10) == [PutOutcome.CREATED]


def test_a_late_reservation_is_released(executor: ThreadPoolExecutor) -> None:
    place = Gated(HostTier(BUDGET))
    tier = DeadlineTier(place, executor, 0.05)
    place.gate.clear()
    with pytest.raises(DeadlineError):
        tier.reserve([1_000])
    place.gate.set()
    executor.shutdown(wait=True)
    assert place.inner.usage().bytes_reserved == 0


def test_room_is_given_back_without_waiting_for_a_place_that_hangs_and_not_forgotten(
    executor: ThreadPoolExecutor,
) -> None:
    hang, given_back = threading.Event(), threading.Event()

    class Hanging(WrappedTier):
        def reserve(self, sizes: Sequence[int]) -> Reservation:
            def give_back(bytes_: int) -> None:
                hang.wait(30)
                assert bytes_ == sum(sizes) - 30
                given_back.set()

            return Reservation(sum(sizes), give_back)

    tier = DeadlineTier(Hanging(HostTier(BUDGET)), executor, 0.05, running_max=1)
    room = tier.reserve([100, 200])
    room.take(50)
    room.put_back(20)
    with until(Deadline.after(0.0)):
        room.release()
    assert room.bytes == 0
    assert not given_back.is_set()
    hang.set()
    assert given_back.wait(10)


def test_a_place_that_hangs_is_left_when_it_does_not_close_in_time(executor: ThreadPoolExecutor) -> None:
    class Hanging(WrappedTier):
        def close(self) -> None:
            hang.wait(30)
            super().close()
            closed.set()

    hang, closed = threading.Event(), threading.Event()
    tier = DeadlineTier(Hanging(HostTier(BUDGET)), executor, 0.05)
    tier.close()
    assert not closed.is_set()
    hang.set()
    assert closed.wait(10)


def test_hung_calls_are_bounded_in_number() -> None:
    with ThreadPoolExecutor(2) as pool:  # the third hung call never begins
        place = Gated(HostTier(BUDGET))
        tier = DeadlineTier(place, pool, 0.03, running_max=3)
        place.gate.clear()
        for _ in range(5):
            (answer,) = tier.get([GetRequest(name_of(0))])
            assert isinstance(answer, DeadlineError)
        assert tier.running == 2, "what never began is cancelled"
        small = DeadlineTier(place, pool, 0.03, running_max=0)
        with pytest.raises(DeadlineError, match="0 earlier calls"):
            small.usage()
        place.gate.set()
    assert tier.running == 0
    with pytest.raises(TierError, match="shutdown"):
        tier.stat([name_of(0)])


# Retries


def test_what_can_succeed_later_is_tried_again() -> None:
    clock = Clock()
    place = FaultyTier(HostTier(BUDGET))
    tier = RetryTier(place, attempts=3, pause_s=0.1, clock=clock, sleep=clock.sleep)
    for _ in range(2):
        place.inject("put", Fault.ERROR)
    assert put(tier, (name_of(0), b"x")) == [PutOutcome.CREATED]
    assert len(clock.slept_s) == 2
    assert 0.05 <= clock.slept_s[0] <= 0.1 <= 2 * clock.slept_s[1] <= 0.4
    for _ in range(3):
        place.inject("stat", Fault.ERROR)
    with pytest.raises(TierError, match="injected"):
        tier.stat([name_of(0)])
    assert list(tier.stat([name_of(0)])) == [1]


def test_a_read_asks_again_only_for_what_is_missing() -> None:
    clock = Clock()
    place = MeteredTier(FaultyTier(HostTier(BUDGET)))
    assert isinstance(place.inner, FaultyTier)
    tier = RetryTier(place, clock=clock, sleep=clock.sleep)
    put(tier, *((name_of(n), body_of("", n, 100)) for n in range(4)))
    place.inner.inject("get", Fault.ERROR)
    place.inner.inject("get", Fault.ERROR)
    answers = tier.get([GetRequest(name_of(n)) for n in range(5)])
    assert [bytes(bytes_of(answer)) for answer in answers[:4]] == [body_of("", n, 100) for n in range(4)]
    assert isinstance(answers[4], FrameNotFoundError)
    figures = place.figures()["get"]
    assert (figures.calls, figures.entries, figures.absences, figures.errors) == (2, 4, 1, 2)


def test_retries_end_in_time_and_spare_what_is_final() -> None:
    clock = Clock()
    place = FaultyTier(HostTier(BUDGET), rates={Fault.ERROR: 1.0})
    tier = RetryTier(place, attempts=100, pause_s=0.1, total_s=2.0, clock=clock, sleep=clock.sleep)
    with pytest.raises(TierError):
        tier.delete([name_of(0)])
    assert 1.0 <= clock.now_s - 100 <= 2.0
    place.rates.clear()
    before = place.injected.total()
    with pytest.raises(TierError, match="path"):
        put(tier, ("not a path", b"x"))
    place.inject("put", Fault.FULL)
    with pytest.raises(CapacityError):
        put(tier, (name_of(0), b"x"))
    assert place.injected.total() == before + 1


def test_a_listing_is_tried_until_it_has_begun() -> None:
    clock = Clock()
    place = FaultyTier(HostTier(BUDGET))
    tier = RetryTier(place, clock=clock, sleep=clock.sleep)
    put(tier, (name_of(0), b"x"))
    place.inject("list", Fault.ERROR)
    assert list(tier.list()) == [TierEntry(name_of(0), 1)]


# The breaker


def failing(calls: int, **settings: float) -> tuple[BreakerTier, FaultyTier, Clock]:
    clock = Clock()
    place = FaultyTier(HostTier(BUDGET), sleep=clock.sleep)
    tier = BreakerTier(place, failures=3, open_s=10.0, clock=clock, **settings)
    put(tier, (name_of(0), b"here"))
    for _ in range(calls):
        place.inject("stat", Fault.ERROR)
        with pytest.raises(TierError, match="injected"):
            tier.stat([name_of(0)])
    return tier, place, clock


def test_the_breaker_opens_after_failures_in_a_row() -> None:
    tier, place, _ = failing(2)
    assert get(tier, name_of(0)) == b"here", "two are not enough, and a good call forgets them"
    for _ in range(2):
        place.inject("stat", Fault.ERROR)
        with pytest.raises(TierError):
            tier.stat([name_of(0)])
    assert tier.state is BreakerState.CLOSED
    tier, place, _ = failing(3)
    assert tier.state is BreakerState.OPEN
    assert tier.times_opened == 1
    with pytest.raises(TierError, match="refused: 3 calls in a row failed") as refused:
        tier.stat([name_of(0)])
    assert refused.value.retryable
    (answer,) = tier.get([GetRequest(name_of(0))])
    assert isinstance(answer, TierError), "a read is answered, not raised"
    with pytest.raises(CapacityError, match="no room"):
        tier.reserve([1])
    assert tier.usage().entries == 1
    assert place.injected[Fault.ERROR] == 3, "the place saw none of it"


def test_one_call_tries_whether_the_place_is_well() -> None:
    tier, place, clock = failing(3)
    clock.now_s += 9.9
    with pytest.raises(TierError, match="refused"):
        tier.stat([name_of(0)])
    clock.now_s += 0.2
    assert tier.state.value == "half open"
    place.inject("stat", Fault.ERROR)
    with pytest.raises(TierError, match="injected"):
        tier.stat([name_of(0)])
    assert tier.state.value == "open"
    assert tier.times_opened == 1
    clock.now_s += 10.1
    assert put(tier, (name_of(1), b"x")) == [PutOutcome.CREATED]
    assert tier.state is BreakerState.CLOSED


def test_while_one_call_tries_the_others_are_refused() -> None:
    clock = Clock()
    place = Gated(FaultyTier(HostTier(BUDGET), rates={Fault.ERROR: 1.0}))
    tier = BreakerTier(place, failures=1, open_s=10.0, clock=clock)
    with pytest.raises(TierError, match="injected"):
        tier.stat([name_of(0)])
    clock.now_s += 10.1
    assert isinstance(place.inner, FaultyTier)
    place.inner.rates.clear()
    place.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        probe = pool.submit(tier.get, [GetRequest(name_of(0))])
        while not tier._probing:
            threading.Event().wait(0.001)
        with pytest.raises(TierError, match="refused"):
            tier.stat([name_of(0)])
        place.gate.set()
        assert isinstance(probe.result(10)[0], FrameNotFoundError), "an absence is a good answer"
    assert tier.state is BreakerState.CLOSED


def test_slow_calls_are_failures() -> None:
    tier, place, _ = failing(0, slow_s=0.5)
    for _ in range(3):
        place.inject("stat", Fault.DELAY)
        assert list(tier.stat([name_of(0)])) == [4]
    assert tier.state is BreakerState.OPEN


def test_a_deadline_that_was_the_callers_says_nothing_about_the_place() -> None:
    class Late(WrappedTier):
        took_s = 0.0

        def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
            clock.now_s += self.took_s
            return [DeadlineError("late", None, self.name)] * len(requests)

        def stat(self, paths: Sequence[str]) -> Sequence[int | None]:
            clock.now_s += self.took_s
            raise DeadlineError("late", None, self.name)

    clock = Clock()
    place = Late(HostTier(BUDGET))
    tier = BreakerTier(place, failures=2, slow_s=5.0, clock=clock)
    for _ in range(4):
        assert isinstance(tier.get([GetRequest(name_of(0))])[0], DeadlineError)
        with pytest.raises(DeadlineError):
            tier.stat([name_of(0)])
    assert tier.state is BreakerState.CLOSED
    place.took_s = 5.0
    tier.get([GetRequest(name_of(0))])
    with pytest.raises(DeadlineError):
        tier.stat([name_of(0)])
    assert tier.state is BreakerState.OPEN


def test_answers_that_are_all_errors_are_a_failure_and_a_full_place_is_none() -> None:
    tier, place, _ = failing(2)
    place.inject("put", Fault.FULL)
    with pytest.raises(CapacityError):
        put(tier, (name_of(1), b"x"))
    place.inject("get", Fault.ERROR)
    (answer,) = tier.get([GetRequest(name_of(0))])
    assert isinstance(answer, TierError)
    assert tier.state is BreakerState.OPEN


# Figures


def test_figures_say_what_passed() -> None:
    clock = Clock()
    place = FaultyTier(HostTier(BUDGET), delay_s=0.3, sleep=clock.sleep)
    tier = MeteredTier(place, clock=clock)
    put(tier, (name_of(0), bytes(100)), (name_of(1), bytes(50)))
    put(tier, (name_of(0), bytes(100)))
    place.inject("get", Fault.DELAY)
    tier.get([GetRequest(name_of(0)), GetRequest(name_of(1), bytes=10), GetRequest(name_of(2))])
    place.inject("delete", Fault.ERROR)
    with pytest.raises(TierError):
        tier.delete([name_of(0)])
    with pytest.raises(CapacityError):
        tier.reserve([2 * BUDGET])
    figures = tier.figures()
    put_buckets = (2, *[0] * len(BUCKETS_S))
    assert figures["put"] == CallFigures(2, entries=2, bytes=150, buckets=put_buckets)
    read = figures["get"]
    assert (read.calls, read.entries, read.absences, read.bytes) == (1, 2, 1, 110)
    assert read.seconds == pytest.approx(0.3)
    assert read.quantile_s(0.5) == 0.5
    assert figures["delete"].errors == 1
    assert figures["reserve"].refusals == 1
    assert figures["reserve"].calls == 3
    assert "quarantine" not in figures
