"""An object store in trouble: no call outlives its deadline, nothing short is ever an answer, and it passes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tiered_cache.errors import CapacityError, DeadlineError, FrameNotFoundError, TierError
from tiered_cache.testing.object_servers import FaultyS3Server, HttpFault
from tiered_cache.testing.tier_suite import body_of, bytes_of, get, name_of, put
from tiered_cache.tiers.base import GetRequest, PutItem, PutOutcome, Tier
from tiered_cache.tiers.object_store import ObjectStoreTier, open_store
from tiered_cache.tiers.wrappers import BreakerState, BreakerTier

BUDGET = 64 << 20
_T = TypeVar("_T")
THREADS = 8
DEADLINE_S = 1.2
RETRIES = 2
LATE_S = 0.6  # for this machine to notice
PATIENT_S = 60.0  # for what has to succeed, or to be refused, however slow the machine is

TROUBLE = {
    "hanging": HttpFault(delay_s=60.0),
    "silent": HttpFault(hang_up=True),
    "forbidden": HttpFault(status=403),
    "busy": HttpFault(status=429),
    "broken": HttpFault(status=500),
    "away": HttpFault(status=503),
}
BAD_BODIES = {
    "closed in the middle": HttpFault(body_bytes=20_000),
    "closed at the start": HttpFault(body_bytes=0),
    "a drip": HttpFault(drip_s=0.2),
}


@pytest.fixture
def server() -> Iterator[FaultyS3Server]:
    with FaultyS3Server() as server:
        yield server


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(THREADS)
    yield pool
    pool.shutdown(wait=False)


def open_tier(server: FaultyS3Server, executor: ThreadPoolExecutor, deadline_s: float = PATIENT_S) -> ObjectStoreTier:
    store = open_store(
        "s3://bucket/below",
        server.options,
        request_timeout_s=deadline_s / 3,
        retries=RETRIES,
        retry_timeout_s=2 * deadline_s / 3,
    )
    return ObjectStoreTier(store, BUDGET, executor, deadline_s=deadline_s)


@pytest.fixture
def tier(server: FaultyS3Server, executor: ThreadPoolExecutor) -> ObjectStoreTier:
    tier = open_tier(server, executor)
    put(tier, (name_of(0), body_of("", 0, 100_000)), (name_of(1), body_of("", 1, 100)))
    server.requests.clear()
    return tier


@pytest.fixture
def hasty(server: FaultyS3Server, executor: ThreadPoolExecutor, tier: ObjectStoreTier) -> ObjectStoreTier:
    """The same with a short deadline."""
    hasty = open_tier(server, executor, DEADLINE_S)
    eventually(lambda: hasty.reserve([1]).release())  # it counts what is there
    assert hasty.usage().entries == 2
    server.requests.clear()
    return hasty


def eventually(call: Callable[[], _T]) -> _T:
    """What a call answers, as soon as it is not too slow."""
    until_s = time.monotonic() + 240
    while True:
        try:
            return call()
        except (TierError, CapacityError):
            assert time.monotonic() < until_s


def key(number: int) -> str:
    return f"below/entries/{name_of(number)}.blob"


def in_time(call: Callable[[], object]) -> None:
    begun_s = time.monotonic()
    try:
        call()
    finally:
        assert time.monotonic() - begun_s < DEADLINE_S + LATE_S


def put_one(tier: Tier, number: int) -> None:
    with tier.reserve([1_000]) as room:
        tier.put([PutItem(name_of(number), [body_of("", number, 1_000)])], room)


# Trouble that lasts


@pytest.mark.parametrize("trouble", TROUBLE)
def test_every_call_ends_by_its_deadline_and_works_again_afterwards(
    server: FaultyS3Server, hasty: ObjectStoreTier, trouble: str
) -> None:
    tier = hasty
    server.fail_always(TROUBLE[trouble])
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: put_one(tier, 2),
        "stat": lambda: tier.stat([name_of(0)]),
        "list": lambda: list(tier.list()),
        "delete": lambda: tier.delete([name_of(1)]),
        "quarantine": lambda: tier.quarantine(name_of(1), "bad"),
    }
    for call in calls.values():
        with pytest.raises(TierError) as raised:
            in_time(call)
        assert raised.value.retryable == (trouble != "forbidden")
    answers = tier.get([GetRequest(name_of(n)) for n in range(3)])
    assert all(isinstance(answer, TierError) for answer in answers), "an error is no absence"
    assert tier.usage().entries == 2
    server.recover()
    if trouble == "hanging":  # its calls hold their names until their requests have ended
        tier = open_tier(server, ThreadPoolExecutor(THREADS))
    bodies = [eventually(lambda n=n: get(tier, name_of(n))) for n in range(2)]  # type: ignore[misc]
    assert bodies == [body_of("", 0, 100_000), body_of("", 1, 100)]
    eventually(lambda: put_one(tier, 3))
    assert tier.usage().entries == len(eventually(lambda: list(tier.list())))
    assert eventually(lambda: list(tier.delete([name_of(1)]))) == [True]


@pytest.mark.parametrize("body", BAD_BODIES)
def test_a_bad_body_is_an_error_never_a_short_success(
    server: FaultyS3Server, hasty: ObjectStoreTier, body: str
) -> None:
    tier = hasty
    server.fail_always(BAD_BODIES[body], "GET")
    buffer = bytearray(100_000)
    begun_s = time.monotonic()
    for request in (
        GetRequest(name_of(0)),
        GetRequest(name_of(0), into=memoryview(buffer)),
        GetRequest(name_of(0), 10, 90_000),
        GetRequest(name_of(0), 5),
    ):
        (answer,) = tier.get([request])
        assert isinstance(answer, TierError), bytes(bytes_of(answer))[:9]
        assert answer.retryable
    assert time.monotonic() - begun_s < 4 * (DEADLINE_S + LATE_S)
    server.recover()
    assert eventually(lambda: get(tier, name_of(0))) == body_of("", 0, 100_000)


def test_a_range_that_is_shorter_than_declared_is_an_error(server: FaultyS3Server, tier: ObjectStoreTier) -> None:
    server.fail_always(HttpFault(short_bytes=100), "GET")
    (answer,) = tier.get([GetRequest(name_of(0), 10, 90_000)])
    assert isinstance(answer, TierError)
    assert answer.retryable


def test_a_failed_page_of_64_is_an_honest_error_and_the_others_come(
    server: FaultyS3Server, executor: ThreadPoolExecutor
) -> None:
    tier = open_tier(server, executor)
    pages = [(name_of(n), body_of("", n, 2_000)) for n in range(10, 74)]
    put(tier, *pages)
    server.fail("GET", *[HttpFault(body_bytes=100)] * 8)
    server.fail("GET", HttpFault(status=400))
    answers = tier.get([GetRequest(path) for path, _ in pages])
    assert sum(isinstance(answer, TierError) for answer in answers) >= 1
    for (_, body), answer in zip(pages, answers, strict=True):
        assert isinstance(answer, TierError) or bytes_of(answer) == body
    assert [get(tier, path) for path, _ in pages] == [body for _, body in pages], "the second try works"


# Retries


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_passes_is_retried(server: FaultyS3Server, tier: ObjectStoreTier, status: int) -> None:
    if status != 408:  # which this client takes as final: the caller is told that it can try again
        server.fail("GET", *[HttpFault(status=status)] * RETRIES)
        assert get(tier, name_of(1)) == body_of("", 1, 100)
        assert server.requests["GET"] == RETRIES + 1
    server.fail_always(HttpFault(status=status), "GET")
    with pytest.raises(TierError, match=str(status)) as raised:
        get(tier, name_of(1))
    assert raised.value.retryable
    assert server.requests["GET"] <= 2 * (RETRIES + 1), "and not for ever"


@pytest.mark.parametrize("status", [400, 401, 403, 405])
def test_what_is_final_is_asked_once(server: FaultyS3Server, tier: ObjectStoreTier, status: int) -> None:
    server.fail_always(HttpFault(status=status), "GET", "HEAD")
    with pytest.raises(TierError, match=str(status)):
        get(tier, name_of(1))
    assert server.requests["GET"] == 1


def test_a_put_whose_answer_was_lost_is_there_once(server: FaultyS3Server, tier: ObjectStoreTier) -> None:
    server.fail("PUT", HttpFault(then_status=500))
    body = body_of("", 9, 5_000)
    assert put(tier, (name_of(9), body)) == [PutOutcome.EXISTS]
    assert get(tier, name_of(9)) == body
    usage = tier.usage()
    assert usage.entries == len(list(tier.list())) == 3
    assert usage.bytes_reserved == 0
    assert usage.bytes_used == tier.usage().bytes_used


def test_a_body_that_changes_on_its_way_is_refused_by_the_store(server: FaultyS3Server, tier: ObjectStoreTier) -> None:
    server.fail_always(HttpFault(corrupt=True), "PUT")
    with pytest.raises(TierError, match="BadDigest"):
        put(tier, (name_of(9), body_of("", 9, 5_000)))
    assert key(9) not in server.objects
    assert tier.usage().bytes_reserved == 0


def test_a_full_store_is_no_room(server: FaultyS3Server, tier: ObjectStoreTier) -> None:
    server.fail_always(HttpFault(status=507), "PUT")
    with pytest.raises(CapacityError, match="full"):
        put(tier, (name_of(9), b"x"))
    assert get(tier, name_of(1)) == body_of("", 1, 100), "reading goes on"
    server.recover()
    assert put(tier, (name_of(9), b"x")) == [PutOutcome.CREATED]


# Credentials


def test_refused_credentials_are_one_clear_error_and_not_a_flood(
    server: FaultyS3Server, tier: ObjectStoreTier, caplog: pytest.LogCaptureFixture
) -> None:
    server.fail_always(HttpFault(status=403))
    with caplog.at_level(logging.WARNING):
        answers = tier.get([GetRequest(name_of(n)) for n in range(500)])
        for _ in range(5):
            with pytest.raises(TierError, match="credentials: HTTP 403"):
                tier.stat([name_of(0)])
    assert all(isinstance(answer, TierError) and not answer.retryable for answer in answers)
    assert server.requests["GET"] <= 2 * THREADS
    assert len(caplog.records) == 1
    server.recover()
    assert get(tier, name_of(1)) == body_of("", 1, 100)


def test_no_secret_is_in_an_error(server: FaultyS3Server, executor: ThreadPoolExecutor) -> None:
    options = {**server.options, "secret_access_key": "hush-hush", "session_token": "very-hush"}
    tier = ObjectStoreTier(open_store("s3://bucket/x", options, retries=0), BUDGET, executor)
    server.fail_always(HttpFault(status=403))
    with pytest.raises(TierError) as raised:
        tier.stat([name_of(0)])
    told = f"{raised.value} {raised.value.__cause__!r}"
    assert "403" in told
    assert "hush" not in told
    assert server.options["access_key_id"] not in told


# What happens behind our back


def test_a_lost_object_is_a_verified_absence_and_its_room_is_free(
    server: FaultyS3Server, tier: ObjectStoreTier
) -> None:
    del server.objects[key(0)]
    (answer,) = tier.get([GetRequest(name_of(0))])
    assert isinstance(answer, FrameNotFoundError)
    assert tier.usage().bytes_used == tier.footprint(100)
    assert put(tier, (name_of(0), b"again")) == [PutOutcome.CREATED]
    del server.objects[key(1)]
    assert put(tier, (name_of(1), b"also")) == [PutOutcome.CREATED], "what it believed to be there was not"
    del server.objects[key(1)]
    assert list(tier.delete([name_of(1)])) == [False]
    del server.objects[key(0)]
    assert list(tier.list()) == []
    assert tier.usage().bytes_used == 0


def test_what_others_put_is_found_and_what_is_no_entry_is_left_alone(
    server: FaultyS3Server, tier: ObjectStoreTier, executor: ThreadPoolExecutor
) -> None:
    others = open_tier(server, executor)
    put(others, (name_of(5), b"theirs"))
    foreign = (
        "below/entries/UPPER.blob",
        "below/entries/no-suffix",
        "below/x",
        "other/entries/a.blob",
        "below/quarantine/x",
    )
    server.objects.update(dict.fromkeys(foreign, b"?"))
    assert put(tier, (name_of(5), b"mine, longer")) == [PutOutcome.EXISTS]
    assert get(tier, name_of(5)) == b"theirs"
    assert {entry.path for entry in tier.list()} == {name_of(0), name_of(1), name_of(5)}
    assert tier.usage().bytes_used == sum(map(tier.footprint, (100_000, 100, 6)))
    assert list(tier.quarantined()) == []
    assert set(foreign) <= set(server.objects)


def test_a_listing_that_breaks_off_is_an_error(server: FaultyS3Server, executor: ThreadPoolExecutor) -> None:
    tier = open_tier(server, executor)
    server.objects.update({key(n): b"x" for n in range(2_500)})
    assert len(list(tier.list())) == 2_500
    assert tier.usage().entries == 2_500
    listing = tier.list()
    first = [next(listing) for _ in range(10)]
    assert len({entry.path for entry in first}) == 10
    server.fail_always(HttpFault(status=503), "GET")
    with pytest.raises(TierError):
        list(listing)
    assert tier.usage().entries == 2_500, "half a listing is no evidence of absence"


# After the deadline


def test_a_late_answer_touches_no_buffer_of_the_caller(server: FaultyS3Server, executor: ThreadPoolExecutor) -> None:
    store = open_store("s3://bucket/below", server.options, request_timeout_s=60.0)
    put(ObjectStoreTier(store, BUDGET, executor), (name_of(0), body_of("", 0, 100_000)))
    tier = ObjectStoreTier(store, BUDGET, executor, deadline_s=0.5)
    server.fail("GET", HttpFault(delay_s=1.5))
    buffer = bytearray(b"\xa5" * 100_000)
    (answer,) = tier.get([GetRequest(name_of(0), into=memoryview(buffer))])
    assert isinstance(answer, DeadlineError)
    executor.shutdown(wait=True)
    assert buffer == b"\xa5" * 100_000


def test_a_late_put_has_the_bytes_of_its_call_and_is_charged(
    server: FaultyS3Server, executor: ThreadPoolExecutor
) -> None:
    store = open_store("s3://bucket/below", server.options, request_timeout_s=60.0)
    tier = ObjectStoreTier(store, BUDGET, executor, deadline_s=1.0)
    body = bytearray(body_of("", 0, 50_000))
    with tier.reserve([50_000]) as room:
        server.fail("PUT", HttpFault(delay_s=5.0))
        with pytest.raises(DeadlineError):
            tier.put([PutItem(name_of(0), [body])], room)
        body[:] = bytes(50_000)
        with pytest.raises(DeadlineError, match="an earlier change"):
            tier.delete([name_of(0)])
    assert tier.usage().bytes_reserved == tier.footprint(50_000), "it is still under way"
    executor.shutdown(wait=True)
    assert server.objects[key(0)] == body_of("", 0, 50_000)
    usage = tier.usage()
    assert (usage.entries, usage.bytes_used, usage.bytes_reserved) == (1, tier.footprint(50_000), 0)


def test_what_waits_in_the_queue_is_not_begun_after_the_deadline(
    server: FaultyS3Server, hasty: ObjectStoreTier
) -> None:
    server.fail_always(HttpFault(delay_s=60.0), "GET")
    in_time(lambda: hasty.get([GetRequest(name_of(0))] * 200))
    assert server.requests["GET"] <= THREADS * (RETRIES + 1)


# The breaker


def test_the_breaker_spares_a_store_that_is_away_and_finds_out_when_it_is_back(
    server: FaultyS3Server, tier: ObjectStoreTier
) -> None:
    now_s = 0.0
    guarded = BreakerTier(tier, failures=3, open_s=10.0, clock=lambda: now_s)
    server.fail_always(HttpFault(status=503))
    for _ in range(3):
        assert isinstance(guarded.get([GetRequest(name_of(0))])[0], TierError)
    assert guarded.state is BreakerState.OPEN
    before = server.requests.total()
    for _ in range(100):
        assert isinstance(guarded.get([GetRequest(name_of(0))])[0], TierError)
    with pytest.raises(CapacityError):
        put_one(guarded, 7)
    assert server.requests.total() == before
    server.recover()
    now_s = 10.5
    assert get(guarded, name_of(1)) == body_of("", 1, 100)
    put_one(guarded, 7)
