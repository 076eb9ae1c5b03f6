"""`RestoreRouter`: what follows from every kind of error, whom it asks, and that no call outlives its deadline."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from serving import some_tokens
from spilling import Clock

from tiered_cache.cache import Offer, PlannedFrame
from tiered_cache.errors import (
    CapacityError,
    ChecksumError,
    DeadlineError,
    FrameNotFoundError,
    IdentityError,
    MissReason,
    StaleError,
    TieredCacheError,
    TierError,
    UnknownOutcomeError,
    VersionError,
)
from tiered_cache.identity import FrameKey
from tiered_cache.service.estimate import PROBE_EVERY
from tiered_cache.service.local import InlineExecutor
from tiered_cache.service.messages import (
    Bid,
    LeaseRef,
    MatchReply,
    Prompt,
    Restored,
    RestorePlan,
    SequenceRef,
    SpillOffer,
    SpillResult,
    Suspension,
    Ticket,
)
from tiered_cache.service.router import (
    CONSEQUENCES,
    LOOKUPS_MAX,
    SETTLE_S,
    Placement,
    RestoreRouter,
    RouterSettings,
    Then,
)
from tiered_cache.tiers.base import Durability

NAMESPACE = b"n" * 32
KEY = FrameKey(NAMESPACE, b"p" * 32, b"q" * 32, "rows", 16)
PROMPT = Prompt(some_tokens(40))


@dataclass
class FakeOwner:
    """An owner that restores whatever it is given, unless told otherwise."""

    name: str
    node: str = "a"
    bytes_free: int = 1000
    resident_tokens: int = 0
    tokens_per_s: float | None = None
    clock: Clock | None = None
    inject_s: float = 0.0
    errors: dict[str, BaseException] = field(default_factory=dict)
    stuck: Clock | None = None
    """It hangs in `inject`, until its deadline on this clock."""
    calls: list[str] = field(default_factory=list)

    def _called(self, call: str, deadline_s: float) -> None:
        assert deadline_s > 0
        self.calls.append(call)
        if self.stuck is not None and call == "inject":
            self.stuck.now_s += deadline_s
            raise DeadlineError(f"{self.name}.{call}")
        if call in self.errors:
            raise self.errors[call]

    def bid(self, namespace: bytes, hashes: tuple[bytes, ...], *, deadline_s: float) -> Bid:
        self._called("bid", deadline_s)
        return Bid(self.name, 1, self.node, self.bytes_free, self.resident_tokens, self.tokens_per_s)

    def reserve(
        self, namespace: bytes, tokens: int, lease_s: float, *, lineage: int = 0, deadline_s: float
    ) -> LeaseRef:
        self._called("reserve", deadline_s)
        return LeaseRef(self.name, 1, 7)

    def inject(
        self,
        plan: RestorePlan,
        prompt: Prompt,
        capacity_tokens: int,
        sampler_state: bytes,
        *,
        lineage: int = 0,
        deadline_s: float,
    ) -> Restored:
        self._called("inject", deadline_s)
        if self.clock is not None:
            self.clock.now_s += self.inject_s
        return Restored(SequenceRef(self.name, 1, 1, 1), plan.tokens, 100)

    def suspend(self, source: SequenceRef, *, deadline_s: float) -> Suspension:
        self._called("suspend", deadline_s)
        offer = Offer(NAMESPACE, 16, 0, (b"0" * 32,), ((10, b"1" * 32),), (), 5, private=True)
        return Suspension(SpillOffer(source, offer), PROMPT, b"state")

    def wake(self, source: SequenceRef, *, deadline_s: float) -> None:
        self._called("wake", deadline_s)

    def release(self, source: SequenceRef, *, deadline_s: float) -> None:
        self._called("release", deadline_s)


@dataclass
class FakeTiering:
    """A node that has one plan, again and again, or a reason for none."""

    node: str = "a"
    tokens: int = 32
    bytes_stored: int = 1000
    reason: MissReason = MissReason.NOT_STORED
    errors: dict[str, BaseException] = field(default_factory=dict)
    pins: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    declines: str = ""
    kept_s: list[float] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)
    answers_lost: dict[str, BaseException] = field(default_factory=dict)
    """What is done, and then fails."""

    def _called(self, call: str, deadline_s: float) -> None:
        assert deadline_s > 0
        self.calls.append(call)
        if call in self.errors:
            raise self.errors[call]

    def _answered(self, call: str) -> None:
        if call in self.answers_lost:
            raise self.answers_lost[call]

    def plan(self) -> RestorePlan:
        pin = len(self.calls)
        self.pins.add(pin)
        return RestorePlan(self.node, 1, self.tokens, (PlannedFrame(KEY, 3),), pin)

    def match(self, namespace: bytes, prompt: Prompt, pin_s: float, *, deadline_s: float) -> MatchReply:
        self._called("match", deadline_s)
        if not self.tokens:
            return MatchReply(None, self.reason, (16,), 1, (b"0" * 32,))
        return MatchReply(self.plan(), None, (16,), 1, (b"0" * 32,), "host", self.bytes_stored)

    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        self._called("unpin", deadline_s)
        try:
            self.pins.remove(pin)
        except KeyError:
            return False
        return True

    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        self._called("keep", deadline_s)
        self.kept_s.append(pin_s)
        return plan.pin in self.pins

    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        self._called("use_up", deadline_s)
        if plan.pin not in self.pins and self.used.get(plan.pin) != by:
            return False
        self.pins.discard(plan.pin)
        self.used[plan.pin] = by
        self._answered("use_up")
        return True

    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        self._called("let_go", deadline_s)

    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        self._called("report_bad", deadline_s)

    def spill(
        self, offer: SpillOffer, durability: Durability, hints: object, pin_s: float | None, *, deadline_s: float
    ) -> SpillResult:
        self._called("spill", deadline_s)
        assert pin_s is not None
        self.kept_s.append(pin_s)
        if self.declines:
            return SpillResult((), ((10, self.declines),), ())
        return SpillResult((), (), (), plan=self.plan())


def router_of(
    owners: list[FakeOwner],
    tierings: list[FakeTiering],
    executor: Executor | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    load_or_recompute: bool = False,
    **settings: float,
) -> RestoreRouter:
    return RestoreRouter(
        {owner.name: owner for owner in owners},
        {tiering.node: tiering for tiering in tierings},
        executor or InlineExecutor(),
        settings=RouterSettings(load_or_recompute=load_or_recompute, **settings),
        clock=clock,
    )


def leased(placement: Placement) -> int | None:
    return placement.lease.lease if placement.lease else None


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


# What follows from an error

UNLISTED = (TieredCacheError, Then.NEXT_WORKER, MissReason.REFUSED)


@pytest.mark.parametrize(
    ("error", "then", "reason"), [*CONSEQUENCES, UNLISTED], ids=lambda v: getattr(v, "__name__", str(v))
)
def test_every_consequence(error: type[TieredCacheError], then: Then, reason: MissReason) -> None:
    failing, sound = FakeOwner("first", bytes_free=2000), FakeOwner("second")
    failing.errors["inject"] = error("it went wrong", KEY.path())
    tiering = FakeTiering()
    router = router_of([failing, sound], [tiering])
    placement = router.place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert placement.refusals[0] == (error.__name__, str(failing.errors["inject"]))
    assert not tiering.pins
    counters = router.counters()
    if then is Then.NEXT_WORKER:
        assert (placement.owner, placement.restored_tokens, placement.reason) == ("second", 32, None)
        assert failing.calls.count("inject") == sound.calls.count("inject") == 1
        assert counters == {"restores": 1, f"refusals.{error.__name__}": 1}
        return
    assert (placement.owner, placement.restored, placement.lease) == ("first", None, LeaseRef("first", 1, 7))
    assert placement.reason is reason
    assert placement.take_at == (16,)
    asked = LOOKUPS_MAX if then is Then.LOOK_AGAIN else 1
    assert failing.calls.count("inject") == tiering.calls.count("match") == tiering.calls.count("unpin") == asked
    assert "inject" not in sound.calls
    assert counters == {f"misses.{reason}": 1, f"refusals.{error.__name__}": asked}


@pytest.mark.parametrize("then", [Then.NEXT_WORKER, Then.COMPUTE])
def test_when_nobody_can_restore_it_is_computed_and_the_last_reason_is_given(then: Then) -> None:
    kind, _, reason = next(row for row in CONSEQUENCES if row[1] is then)
    owners = [FakeOwner(name, errors={"inject": kind("no")}) for name in ("x", "y")]
    placement = router_of(owners, [FakeTiering()]).place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert (leased(placement), placement.reason) == (7, reason)


def test_a_bad_frame_is_reported_and_one_of_another_version_is_not() -> None:
    for error, reported in ((ChecksumError("bad", KEY.path()), True), (VersionError("new", KEY.path()), False)):
        tiering = FakeTiering()
        router_of([FakeOwner("x", errors={"inject": error})], [tiering]).place(NAMESPACE, PROMPT, 100, deadline_s=5)
        assert ("report_bad" in tiering.calls) is reported
    tiering = FakeTiering(errors={"report_bad": TierError("gone")})  # its next reader will find it
    owner = FakeOwner("x", errors={"inject": ChecksumError("bad", KEY.path())})
    assert router_of([owner], [tiering]).place(NAMESPACE, PROMPT, 100, deadline_s=5).lease == LeaseRef(owner.name, 1, 7)


def test_a_plan_that_is_out_of_date_is_made_again() -> None:
    owner = FakeOwner("x", errors={"inject": FrameNotFoundError("gone", KEY.path())})
    tiering = FakeTiering()
    unpin = tiering.unpin

    def heal(pin: int, generation: int, *, deadline_s: float) -> bool:
        owner.errors.clear()
        return unpin(pin, generation, deadline_s=deadline_s)

    tiering.unpin = heal  # type: ignore[method-assign]
    placement = router_of([owner], [tiering]).place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert (placement.restored_tokens, placement.reason) == (32, None)
    assert tiering.calls.count("match") == 2


# Whom it asks


def test_the_longest_prefix_wins_and_its_node_comes_first() -> None:
    owners = [FakeOwner("x", node="a", bytes_free=9000), FakeOwner("y", node="b")]
    nodes = [FakeTiering("a", tokens=16), FakeTiering("b", tokens=32)]
    placement = router_of(owners, nodes).place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert (placement.owner, placement.node, placement.restored_tokens) == ("y", "b", 32)
    assert not nodes[0].pins
    assert not nodes[1].pins


def test_without_bytes_to_be_near_residency_comes_first_then_room_then_who_waited() -> None:
    owners = [FakeOwner("x", bytes_free=10), FakeOwner("y", bytes_free=20), FakeOwner("z", bytes_free=20)]
    router = router_of(owners, [FakeTiering(tokens=0)])
    chosen = [router.place(NAMESPACE, PROMPT, 100, deadline_s=5).owner for _ in range(3)]
    assert chosen == ["y", "z", "y"]
    owners[0].resident_tokens = 16
    assert router.place(NAMESPACE, PROMPT, 100, deadline_s=5).owner == "x"


def test_who_cannot_answer_is_left_out_and_counted() -> None:
    owners = [FakeOwner("x", errors={"bid": TierError("x is dead")}), FakeOwner("y")]
    nodes = [FakeTiering("a", errors={"match": DeadlineError("a hangs")}), FakeTiering("b", tokens=16)]
    router = router_of(owners, nodes)
    placement = router.place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert (placement.owner, placement.restored_tokens) == ("y", 16)
    assert router.counters() == {"refusals.DeadlineError": 1, "refusals.TierError": 1, "restores": 1}


def test_who_lets_a_question_run_out_is_left_alone_for_longer_each_time() -> None:
    clock = Clock()
    owners = [FakeOwner("x", errors={"bid": DeadlineError("x hangs")}), FakeOwner("y")]
    router = router_of(owners, [FakeTiering(tokens=0)], clock=clock, ask_s=2.0)
    asked = []
    for now_s in range(100):
        clock.now_s = float(now_s)
        owners[0].calls.clear()
        router.place(NAMESPACE, PROMPT, 100, deadline_s=5)
        if "bid" in owners[0].calls:
            asked.append(now_s)
    assert asked == [0, 1, 3, 7, 15, 31, 61, 91], "once is nothing; then 2, 4, 8, 16 and never more than 30 s"
    assert router.counters()["members.left_alone"] == 92
    owners[0].errors.clear()
    clock.now_s = 121.0
    for _ in range(2):
        router.place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert owners[0].calls.count("bid") == 2, "it has answered, and is asked as ever"


def test_who_has_had_too_little_time_and_who_is_the_only_one_is_asked_again() -> None:
    owners = [FakeOwner("x", errors={"bid": DeadlineError("x hangs")}), FakeOwner("y")]
    router = router_of(owners, [FakeTiering(tokens=0)], clock=Clock(), ask_s=2.0)
    for _ in range(2):
        router.place(NAMESPACE, PROMPT, 100, deadline_s=1.9)
    assert owners[0].calls.count("bid") == 2
    router = router_of(owners[:1], [FakeTiering(tokens=0)], clock=Clock())
    for _ in range(2):
        with pytest.raises(TierError):
            router.place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert owners[0].calls.count("bid") == 4


def test_members_come_and_go() -> None:
    x, y, a, b = FakeOwner("x"), FakeOwner("y", node="b"), FakeTiering("a", tokens=16), FakeTiering("b", tokens=32)
    router = router_of([x], [a])
    assert router.place(NAMESPACE, PROMPT, 100, deadline_s=5).restored_tokens == 16
    router.set_members({"x": x, "y": y}, {"a": a, "b": b})
    placement = router.place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert (placement.owner, placement.restored_tokens) == ("y", 32)
    ticket = router.suspend(SequenceRef("y", 1, 1, 1), "b", Durability.HOST, deadline_s=5)
    x.calls.clear()
    router.set_members({"y": y}, {"a": a})
    assert router.place(NAMESPACE, PROMPT, 100, deadline_s=5).owner == "y"
    assert not x.calls
    with pytest.raises(FrameNotFoundError, match="its node is not there"):
        router.resume(ticket, 100, deadline_s=5)
    with pytest.raises(StaleError, match="this router knows y, not x"):
        router.suspend(SequenceRef("x", 1, 1, 1), "a", Durability.HOST, deadline_s=5)


def test_if_no_node_answers_it_is_computed() -> None:
    nodes = [FakeTiering("a", errors={"match": TierError("dead")})]
    placement = router_of([FakeOwner("x")], nodes).place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert (leased(placement), placement.reason, placement.take_at) == (7, MissReason.TIER_ERROR, ())


def test_a_miss_gives_the_most_telling_reason() -> None:
    nodes = [FakeTiering("a", tokens=0), FakeTiering("b", tokens=0, reason=MissReason.EVICTED)]
    placement = router_of([FakeOwner("x")], nodes).place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert placement.reason is MissReason.EVICTED


def test_no_room_anywhere_is_the_one_error_that_is_left() -> None:
    full = {"inject": CapacityError("full"), "reserve": CapacityError("still full")}
    owners = [FakeOwner(name, errors=dict(full)) for name in ("x", "y")]
    tiering = FakeTiering()
    with pytest.raises(CapacityError, match="still full"):
        router_of(owners, [tiering]).place(NAMESPACE, PROMPT, 100, deadline_s=5)
    assert not tiering.pins
    with pytest.raises(CapacityError, match="no worker of this identity"):
        router_of([FakeOwner("x", errors={"bid": IdentityError("another")})], [tiering]).place(
            NAMESPACE, PROMPT, 100, deadline_s=5
        )
    with pytest.raises(TierError, match="no worker answered: dead") as away:
        router_of([FakeOwner("x", errors={"bid": TierError("dead")})], [tiering]).place(
            NAMESPACE, PROMPT, 100, deadline_s=5
        )
    assert away.value.retryable


# Load or compute


def test_what_is_sooner_computed_than_loaded_is_computed_until_it_no_longer_is() -> None:
    clock = Clock()
    owner, tiering = FakeOwner("x", tokens_per_s=100.0, clock=clock, inject_s=0.5), FakeTiering()  # 0.32 s to compute
    router = router_of([owner], [tiering], clock=clock, load_or_recompute=True)

    def place() -> MissReason | None:
        placement = router.place(NAMESPACE, PROMPT, 100, deadline_s=5)
        assert not tiering.pins
        assert (leased(placement) == 7) is (placement.restored is None)
        return placement.reason

    assert place() is None, "nothing is known yet"
    owner.inject_s = 0.01
    assert [place() for _ in range(PROBE_EVERY - 1)] == [MissReason.FASTER_TO_COMPUTE] * (PROBE_EVERY - 1)
    assert [place() for _ in range(PROBE_EVERY + 3)].count(None) > 3, "one was loaded all the same, and was fast"
    owner.tokens_per_s = None
    assert place() is None
    counters = router.counters()
    assert counters["misses.faster_to_compute"] + counters["restores"] == 2 * PROBE_EVERY + 4


def test_estimates_are_not_asked_unless_they_are_wanted() -> None:
    clock = Clock()
    owner = FakeOwner("x", tokens_per_s=100.0, clock=clock, inject_s=0.5)
    router = router_of([owner], [FakeTiering()], clock=clock)
    assert [router.place(NAMESPACE, PROMPT, 100, deadline_s=5).restored_tokens for _ in range(3)] == [32] * 3


# Deadlines


def test_a_worker_that_hangs_leaves_time_for_the_others(threads: ThreadPoolExecutor) -> None:
    clock = Clock()
    owners = [FakeOwner("x", bytes_free=9000, stuck=clock), FakeOwner("y")]
    placement = router_of(owners, [FakeTiering()], threads, clock=clock).place(NAMESPACE, PROMPT, 100, deadline_s=60.0)
    assert (placement.owner, placement.restored_tokens) == ("y", 32)
    assert clock.now_s == pytest.approx(100 + 30.0)


def test_if_all_hang_the_prompt_is_computed_before_the_deadline(threads: ThreadPoolExecutor) -> None:
    clock = Clock()
    owners = [FakeOwner(name, stuck=clock) for name in ("x", "y", "z")]
    placement = router_of(owners, [FakeTiering()], threads, clock=clock).place(NAMESPACE, PROMPT, 100, deadline_s=60.0)
    assert (leased(placement), placement.reason) == (7, MissReason.DEADLINE)
    assert clock.now_s == pytest.approx(100 + 30.0 + 15.0 + 7.5)


@pytest.mark.parametrize("who", ["node", "worker"])
def test_one_that_does_not_answer_costs_no_more_than_the_question_may_take(
    threads: ThreadPoolExecutor, who: str
) -> None:
    owners, nodes = [FakeOwner("x"), FakeOwner("y")], [FakeTiering("a"), FakeTiering("b")]
    never = threading.Event()

    def hang(*args: object, deadline_s: float) -> object:
        never.wait(60)
        raise AssertionError(args)

    if who == "node":
        nodes[0].match = hang  # type: ignore[assignment, method-assign]
    else:
        owners[0].bid = hang  # type: ignore[assignment, method-assign]
    started_s = time.monotonic()
    placement = router_of(owners, nodes, threads, ask_s=0.2).place(NAMESPACE, PROMPT, 100, deadline_s=10)
    assert time.monotonic() - started_s < 1.0
    assert placement.restored_tokens == 32
    assert placement.refusals == (("DeadlineError", "no answer in time"),)
    never.set()


def test_a_deadline_that_has_passed_is_an_error() -> None:
    tiering = FakeTiering()
    with pytest.raises(DeadlineError):
        router_of([FakeOwner("x")], [tiering]).place(NAMESPACE, PROMPT, 100, deadline_s=0.0)
    assert not tiering.calls


# Suspend and resume

SOURCE = SequenceRef("x", 1, 1, 1)


def test_a_suspended_sequence_leaves_its_worker() -> None:
    owner, tiering = FakeOwner("x"), FakeTiering()
    router = router_of([owner], [tiering])
    ticket = router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    assert owner.calls == ["suspend", "release"]
    assert (ticket.sampler_state, ticket.plan.tokens) == (b"state", 32)
    assert np.array_equal(ticket.prompt.tokens, PROMPT.tokens)
    assert tiering.pins == {ticket.plan.pin}
    restored = router.resume(ticket, 100, deadline_s=5)
    assert restored.tokens == 32
    assert not tiering.pins
    assert router.counters() == {"suspends": 1, "resumes": 1}


@pytest.mark.parametrize("why", [TierError("disk full"), DeadlineError("slow"), KeyboardInterrupt(), None])
def test_what_could_not_be_suspended_runs_on(why: BaseException | None) -> None:
    owner, tiering = FakeOwner("x"), FakeTiering(declines="not worth its room")
    if why is not None:
        tiering.errors["spill"] = why
    router = router_of([owner], [tiering])
    with pytest.raises(type(why) if why else CapacityError, match=None if why else "not worth its room"):
        router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    assert owner.calls == ["suspend", "wake"]
    assert router.counters() == {}


def test_the_first_error_is_told_even_if_the_worker_is_dead_too() -> None:
    owner = FakeOwner("x", errors={"wake": TierError("x is dead")})
    tiering = FakeTiering(errors={"spill": TierError("the export failed")})
    with pytest.raises(TierError, match="the export failed"):
        router_of([owner], [tiering]).suspend(SOURCE, "a", Durability.HOST, deadline_s=5)


def test_a_worker_that_dies_after_the_acknowledgement_takes_nothing_with_it() -> None:
    owner = FakeOwner("x", errors={"release": TierError("x is dead")})
    other = FakeOwner("y")
    router = router_of([owner, other], [FakeTiering()])
    ticket = router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    owner.errors["bid"] = TierError("x is dead")
    assert router.resume(ticket, 100, deadline_s=5).source.owner == "y"
    assert router.counters()["suspends.not_released"] == 1


def test_a_ticket_is_used_once() -> None:
    owner, tiering = FakeOwner("x"), FakeTiering()
    router = router_of([owner], [tiering])
    ticket = router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    router.resume(ticket, 100, deadline_s=5)
    owner.calls.clear()
    with pytest.raises(StaleError, match="used before"):
        router.resume(ticket, 100, deadline_s=5)
    assert owner.calls == ["bid", "inject", "release"]


def test_a_ticket_that_cannot_be_used_up_now_leaves_no_second_sequence() -> None:
    owner, tiering = FakeOwner("x"), FakeTiering()
    router = router_of([owner], [tiering])
    ticket = router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    tiering.errors["use_up"] = TierError("the node is away", retryable=True)
    owner.calls.clear()
    with pytest.raises(TierError, match="away"):
        router.resume(ticket, 100, deadline_s=5)
    assert owner.calls == ["bid", "inject", "release"]
    tiering.errors.clear()
    assert router.resume(ticket, 100, deadline_s=5).tokens == 32


def test_a_ticket_whose_frames_are_gone_or_bad_says_so() -> None:
    owner, tiering = FakeOwner("x"), FakeTiering()
    router = router_of([owner], [tiering])
    ticket = router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    for error in (FrameNotFoundError("gone", KEY.path()), ChecksumError("bad", KEY.path())):
        owner.errors["inject"] = error
        with pytest.raises(type(error)):
            router.resume(ticket, 100, deadline_s=5)
    assert tiering.calls.count("report_bad") == 1
    owner.errors["bid"] = TierError("dead")
    with pytest.raises(CapacityError, match="no worker"):
        router.resume(ticket, 100, deadline_s=5)


def test_names_that_it_does_not_know_are_refused() -> None:
    router = router_of([FakeOwner("x")], [FakeTiering("a")])
    with pytest.raises(StaleError, match="knows x, not y"):
        router.suspend(SOURCE._replace(owner="y"), "a", Durability.HOST, deadline_s=1)
    with pytest.raises(StaleError, match="knows a, not b"):
        router.suspend(SOURCE, "b", Durability.HOST, deadline_s=1)
    plan = RestorePlan("b", 1, 32, (PlannedFrame(KEY, 3),), 1)
    with pytest.raises(FrameNotFoundError, match="its node is not there"):
        router.resume(Ticket(NAMESPACE, PROMPT, plan, b""), 100, deadline_s=1)


def test_a_suspension_is_kept_for_long_only_when_its_ticket_has_come() -> None:
    tiering = FakeTiering()
    router = router_of([FakeOwner("x")], [tiering], clock=Clock(), suspend_pin_s=3600.0)
    ticket = router.take_off(SOURCE, "a", Durability.HOST, deadline_s=5)
    assert tiering.kept_s == [5 + SETTLE_S]
    router.settle(SOURCE, ticket, deadline_s=5)
    assert tiering.kept_s == [5 + SETTLE_S, 3600.0]


def test_what_is_not_kept_after_all_runs_on_and_what_may_be_is_asked_again() -> None:
    owner, tiering = FakeOwner("x"), FakeTiering(errors={"keep": DeadlineError("slow")})
    router = router_of([owner], [tiering])
    with pytest.raises(UnknownOutcomeError, match="slow") as unknown:
        router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    assert owner.calls == ["suspend"]
    tiering.errors.clear()
    ticket = pickle.loads(pickle.dumps(unknown.value)).ticket
    router.settle(SOURCE, ticket, deadline_s=5)
    assert owner.calls == ["suspend", "release"]
    tiering.pins.clear()
    with pytest.raises(StaleError, match="not there"):
        router.settle(SOURCE, ticket, deadline_s=5)
    assert owner.calls[-1] == "wake"


def test_a_node_that_is_away_says_nothing_about_its_tickets() -> None:
    owner, tiering = FakeOwner("x", errors={"release": TierError("x is busy")}), FakeTiering()
    router = router_of([owner], [tiering])
    ticket = router.take_off(SOURCE, "a", Durability.HOST, deadline_s=5)
    router.settle(SOURCE, ticket, deadline_s=5)
    router.set_members({"x": owner}, {})
    for ask in (lambda: router.settle(SOURCE, ticket, deadline_s=5), lambda: router.keep(ticket, deadline_s=5)):
        with pytest.raises(TierError, match="not there") as error:
            ask()
        assert error.value.retryable
    assert "wake" not in owner.calls


def test_who_settles_late_does_not_wake_what_was_resumed_elsewhere() -> None:
    owner, tiering = FakeOwner("x"), FakeTiering()
    router = router_of([owner], [tiering])
    ticket = router.take_off(SOURCE, "a", Durability.HOST, deadline_s=5)
    tiering.errors["keep"] = StaleError("resumed")
    with pytest.raises(StaleError, match="resumed"):
        router.settle(SOURCE, ticket, deadline_s=5)
    assert owner.calls == ["suspend", "release"]


def test_a_worker_whose_answer_is_late_is_told_that_the_sequence_runs_on() -> None:
    owner = FakeOwner("x", errors={"suspend": DeadlineError("slow")})
    with pytest.raises(DeadlineError, match="slow"):
        router_of([owner], [FakeTiering()]).suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    assert owner.calls == ["suspend", "wake"]
    refuses = FakeOwner("x", errors={"suspend": StaleError("it is suspended")})
    with pytest.raises(StaleError):
        router_of([refuses], [FakeTiering()]).suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    assert refuses.calls == ["suspend"]  # that is somebody else's


def test_a_resumption_whose_answer_is_lost_can_be_asked_for_again_by_its_asker_alone() -> None:
    tiering = FakeTiering(answers_lost={"use_up": DeadlineError("slow")})
    router, other = (router_of([FakeOwner("x")], [tiering]) for _ in range(2))
    ticket = router.suspend(SOURCE, "a", Durability.HOST, deadline_s=5)
    with pytest.raises(DeadlineError):
        router.resume(ticket, 100, deadline_s=5)
    with pytest.raises(StaleError, match="used before"):
        other.resume(ticket, 100, deadline_s=5)
    tiering.answers_lost.clear()
    assert router.resume(ticket, 100, deadline_s=5).tokens == 32
    with pytest.raises(StaleError, match="used before"):
        router.resume(ticket, 100, deadline_s=5)
