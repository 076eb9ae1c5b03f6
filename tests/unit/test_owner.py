"""`SequenceOwner`: leases, epochs and generations, refused plans, deadlines, and what a failure leaves behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from serving import BLOCK, MODELS, never_moved, some_tokens

from tiered_cache.cache import PlannedFrame
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import (
    CapacityError,
    DeadlineError,
    FrameError,
    FrameNotFoundError,
    GeometryError,
    IdentityError,
    MissReason,
    PositionError,
    StaleError,
    StateError,
    TieredCacheError,
    TruncatedError,
)
from tiered_cache.identity import FrameKey
from tiered_cache.policy.base import Hints
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import Bytes, Prompt, RestorePlan, SequenceRef
from tiered_cache.service.owner import UNCLAIMED_S, SequenceOwner
from tiered_cache.service.tiering import TieringService
from tiered_cache.tiers.base import Durability

MODEL = MODELS[0]


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Home:
    """An owner whose frames come from a real tiering service, unless a test stands in between."""

    owner: SequenceOwner
    tiering: TieringService
    clock: Clock
    fetched: int = 0
    fetch: Callable[[tuple[PlannedFrame, ...]], list[Bytes | MissReason]] | None = None
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.free = self.owner.engine.bytes_free()

    def untouched(self) -> bool:
        return self.owner.engine.bytes_free() == self.free


@pytest.fixture
def home() -> Iterator[Home]:
    clock = Clock()
    settings = ClusterSettings(workers=1, worker=WorkerSettings(engine=MODEL), tiers=TierSettings(host_bytes=8 << 20))
    with LocalCluster(settings, clock=clock) as cluster:
        owner = SequenceOwner(
            ReferenceEngine(MODEL), name="other", node="local", tiering=lambda _: Between(), clock=clock
        )
        cluster.workers["other"] = owner
        found = Home(owner, cluster.tiering, clock)

        class Between:
            def fetch(self, frames: tuple[PlannedFrame, ...], bytes_max: int, *, deadline_s: float) -> object:
                found.fetched += 1
                if found.fetch is not None:
                    return found.fetch(frames)
                return cluster.tiering.fetch(frames, bytes_max, deadline_s=deadline_s)

        yield found


def begin(owner: SequenceOwner, count: int = 40, room: int = 200) -> tuple[SequenceRef, Prompt]:
    prompt = Prompt(some_tokens(count))
    lease = owner.reserve(owner.namespace, room, 30.0, deadline_s=1)
    return owner.run(lease, prompt, (BLOCK, 2 * BLOCK), deadline_s=5).source, prompt


def rows(owner: SequenceOwner, prompt: Prompt) -> tuple[FrameKey, ...]:
    """The key of the first block's rows."""
    return (prompt.chain(owner.namespace, BLOCK).key("rows", BLOCK, owner.engine.rank),)


def stored(home: Home, count: int = 40) -> tuple[RestorePlan, Prompt]:
    """A plan for a prefix that the tiers hold."""
    source, prompt = begin(home.owner, count)
    spilled = home.tiering.spill(home.owner.offer(source), Durability.HOST, Hints(), 60.0, deadline_s=5)
    home.owner.release(source, deadline_s=1)
    assert spilled.plan is not None
    assert home.untouched()
    return spilled.plan, prompt


def inject(home: Home, plan: RestorePlan, prompt: Prompt, *, room: int = 200, deadline_s: float = 5.0) -> SequenceRef:
    return home.owner.inject(plan, prompt, room, b"", deadline_s=deadline_s).source


# Leases


def test_a_lease_that_ran_out_is_refused_and_its_room_is_free(home: Home) -> None:
    lease = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    assert not home.untouched()
    home.clock.now_s += 30.0
    with pytest.raises(StaleError, match=f"lease {lease.lease} has run out"):
        home.owner.start(lease)
    assert home.untouched()


def test_a_lease_is_used_or_given_back_once(home: Home) -> None:
    lease = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    source = home.owner.start(lease)
    home.owner.cancel(lease, deadline_s=1)
    home.owner.extend(source, some_tokens(8))
    with pytest.raises(StaleError):
        home.owner.start(lease)
    home.owner.release(source, deadline_s=1)
    given_back = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    home.owner.cancel(given_back, deadline_s=1)
    home.owner.cancel(given_back, deadline_s=1)
    assert home.untouched()


def test_a_lease_of_an_earlier_life_is_nobodys_room_now(home: Home) -> None:
    """The next generation counts from one again."""
    lease = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    home.owner.generation += 1
    again = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    before = lease._replace(lease=again.lease)
    prompt = Prompt(some_tokens(20))
    for refused in (
        lambda: home.owner.cancel(before, deadline_s=1),
        lambda: home.owner.run(before, prompt, (), deadline_s=1),
        lambda: home.owner.run(before._replace(owner="x", generation=again.generation), prompt, (), deadline_s=1),
    ):
        with pytest.raises(StaleError, match="of generation"):
            refused()
    assert home.owner.run(again, prompt, (), deadline_s=5).marks


def test_bids_see_the_room_of_leases_that_ran_out(home: Home) -> None:
    home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    before = home.owner.bid(home.owner.namespace, (), deadline_s=1)
    home.clock.now_s += 31.0
    after = home.owner.bid(home.owner.namespace, (), deadline_s=1)
    assert before.bytes_free < after.bytes_free == home.free


def test_a_restored_sequence_that_nobody_comes_for_is_freed(home: Home) -> None:
    """Its router, or who asked that, has died with the answer."""
    plan, prompt = stored(home)
    lost, used = inject(home, plan, prompt), inject(home, plan, prompt)
    home.owner.extend(used, some_tokens(3))
    home.clock.now_s += UNCLAIMED_S
    home.owner.bid(home.owner.namespace, (), deadline_s=1)
    with pytest.raises(FrameNotFoundError, match="released"):
        home.owner.extend(lost, some_tokens(3))
    home.owner.extend(used, some_tokens(3))
    home.owner.release(used, deadline_s=1)
    assert home.untouched()


def test_an_engine_that_cannot_start_loses_no_room(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reservation: int) -> int:
        raise StateError(f"reservation {reservation} cannot be started")

    monkeypatch.setattr(home.owner.engine, "start", fail)
    lease = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    with pytest.raises(StateError):
        home.owner.start(lease)
    assert home.untouched()


def test_another_namespace_is_refused_before_room_is_taken(home: Home) -> None:
    other = ReferenceEngine(MODEL, seed=1)
    with pytest.raises(IdentityError, match=home.owner.namespace.hex()[:16]):
        home.owner.bid(other.identity.digest(), (), deadline_s=1)
    with pytest.raises(IdentityError, match="was asked for"):
        home.owner.reserve(other.identity.digest(), 100, 30.0, deadline_s=1)
    assert home.untouched()


def test_a_bid_tells_what_is_resident(home: Home) -> None:
    source, prompt = begin(home.owner)
    longer = Prompt(np.concatenate([prompt.tokens, some_tokens(40, seed=1)]))
    asked = tuple(longer.chain(home.owner.namespace, BLOCK).block_hashes())
    assert home.owner.bid(home.owner.namespace, asked, deadline_s=1).resident_tokens == 2 * BLOCK
    home.owner.release(source, deadline_s=1)
    assert home.owner.bid(home.owner.namespace, asked, deadline_s=1).resident_tokens == 0


# Epochs and generations


def every_call(owner: SequenceOwner, prompt: Prompt) -> dict[str, Callable[[SequenceRef], object]]:
    more = Prompt(np.concatenate([prompt.tokens, some_tokens(4)]))
    return {
        "export": lambda s: owner.export(s, rows(owner, prompt), deadline_s=1),
        "release": lambda s: owner.release(s, deadline_s=1),
        "suspend": lambda s: owner.suspend(s, deadline_s=1),
        "wake": lambda s: owner.wake(s, deadline_s=1),
        "run": lambda s: owner.run(s, more, (), deadline_s=1),
        "extend": lambda s: owner.extend(s, some_tokens(4)),
        "advance": lambda s: owner.advance(s, some_tokens(4)),
        "rewind": lambda s: owner.rewind(s, BLOCK),
        "stage": owner.stage,
        "offer": owner.offer,
    }


@pytest.mark.parametrize("change", ["owner", "generation", "epoch"])
def test_no_call_reaches_another_ones_past(home: Home, change: str) -> None:
    source, prompt = begin(home.owner)
    value = "elsewhere" if change == "owner" else getattr(source, change) - 1
    past = source._replace(**{change: value})
    for name, call in every_call(home.owner, prompt).items():
        with pytest.raises(StaleError, match=str(value)):
            call(past)
        assert home.owner.offer(source).offer.checkpoints[-1][0] == len(prompt.tokens), name


def test_only_the_frames_of_its_own_prefix_are_exported(home: Home) -> None:
    """An offer could name another prompt's, whose hashes are as good as any."""
    source, prompt = begin(home.owner, 40)
    chain, owner = prompt.chain(home.owner.namespace, BLOCK), home.owner
    another = Prompt(some_tokens(40, seed=9)).chain(owner.namespace, BLOCK)
    assert owner.export(source, (chain.key("rows", 32, 0), chain.key("checkpoint", 40, 0)), deadline_s=1)
    refused: dict[str, tuple[FrameKey, type[Exception]]] = {
        "another prompt's rows": (another.key("rows", 32, 0), IdentityError),
        "another prompt's checkpoint": (another.key("checkpoint", 40, 0), IdentityError),
        "another parent": (replace(chain.key("rows", 32, 0), parent=another.block_hash(1)), IdentityError),
        "another namespace": (replace(chain.key("rows", 32, 0), namespace=b"x" * 32), IdentityError),
        "another rank": (chain.key("rows", 32, 1), IdentityError),
        "another's private copy": (chain.key("rows", 32, 0, private=7), IdentityError),
        "too far": (replace(chain.key("rows", 32, 0), tokens=48), PositionError),
        "no block's end": (replace(chain.key("rows", 32, 0), tokens=31), GeometryError),
        "no group": (replace(chain.key("rows", 32, 0), group="x"), GeometryError),
        "no tokens": (replace(chain.key("rows", 32, 0), tokens="32"), StateError),  # type: ignore[arg-type]
    }
    for key, error in refused.values():
        with pytest.raises(error):
            owner.export(source, (key,), deadline_s=1)


def test_a_suspend_whose_caller_gave_up_leaves_the_sequence_running(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, prompt = begin(home.owner)
    state = home.owner.engine.sampler_state

    def slow(handle: int) -> bytes:
        home.clock.now_s += 2.0
        return state(handle)

    monkeypatch.setattr(home.owner.engine, "sampler_state", slow)
    with pytest.raises(DeadlineError, match="suspend"):
        home.owner.suspend(source, deadline_s=1)
    assert home.owner.run(source, prompt, (), deadline_s=5).source == source


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf"), float("-inf"), "5", None])
def test_a_deadline_that_is_none_is_refused_at_once(home: Home, deadline_s: Any) -> None:
    plan, stored_prompt = stored(home)
    source, prompt = begin(home.owner)
    calls: list[Callable[[], object]] = [
        lambda: home.owner.export(source, rows(home.owner, prompt), deadline_s=deadline_s),
        lambda: home.owner.release(source, deadline_s=deadline_s),
        lambda: home.owner.suspend(source, deadline_s=deadline_s),
        lambda: home.owner.run(source, prompt, (), deadline_s=deadline_s),
        lambda: home.owner.inject(plan, stored_prompt, 200, b"", deadline_s=deadline_s),
        lambda: home.tiering.spill(home.owner.offer(source), Durability.HOST, Hints(), 60.0, deadline_s=deadline_s),
    ]
    for call in calls:
        with pytest.raises(DeadlineError, match="not a finite number"):
            call()


def test_without_marks_no_state_is_read_for_them(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, prompt = stored(home)
    monkeypatch.setattr(home.owner, "_marks", False)
    monkeypatch.setattr(home.owner.engine, "digest", lambda _: pytest.fail("it was read"))
    restored = home.owner.inject(plan, prompt, 200, b"", deadline_s=5)
    run = home.owner.run(restored.source, prompt, (), deadline_s=5)
    assert (restored.mark, run.marks) == (None, ())
    assert run.offer.offer.checkpoints


def test_a_released_sequence_is_gone_for_all_but_release(home: Home) -> None:
    source, prompt = begin(home.owner)
    home.owner.release(source, deadline_s=1)
    for name, call in every_call(home.owner, prompt).items():
        if name == "release":
            call(source)
            continue
        with pytest.raises(FrameNotFoundError, match="was released"):
            call(source)
    assert home.untouched()


def cut(engine: ReferenceEngine, handle: int, tokens: np.ndarray) -> None:
    """What an engine does that goes back below accepted tokens."""
    fresh = engine.start(engine.reserve(200))
    engine.extend(fresh, tokens)
    engine._sequences[handle].state.release()
    engine._sequences[handle] = engine._sequences.pop(fresh)


def test_a_rewind_raises_the_epoch_and_makes_a_new_lineage(home: Home) -> None:
    source, prompt = begin(home.owner)
    before = home.owner.offer(source)
    handle = home.owner._sequences[source.sequence].handle
    with pytest.raises(PositionError, match="covers 40"):
        home.owner.rewind(source, 20)
    assert isinstance(home.owner.engine, ReferenceEngine)
    cut(home.owner.engine, handle, prompt.tokens[:20])
    rewound = home.owner.rewind(source, 20)
    assert rewound.epoch == source.epoch + 1
    with pytest.raises(StaleError, match=f"epoch {rewound.epoch}, not {source.epoch}"):
        home.tiering.spill(before, Durability.HOST, Hints(), None, deadline_s=1)
    assert home.tiering.cache.usage()["host"].bytes_reserved == 0
    after = home.owner.offer(rewound)
    assert after.offer.checkpoints[-1][0] == 20
    assert after.offer.lineages == before.offer.lineages[:1]
    assert after.offer.lineage != before.offer.lineage


def test_an_engine_that_runs_by_itself_tells_its_owner(home: Home) -> None:
    source, prompt = begin(home.owner)
    handle = home.owner._sequences[source.sequence].handle
    engine = home.owner.engine
    assert isinstance(engine, ReferenceEngine)
    more = some_tokens(12, seed=7)
    with pytest.raises(PositionError, match="12 more tokens make 52, and the state covers 40"):
        home.owner.advance(source, more)
    engine.extend(handle, more)
    home.owner.advance(source, more)
    offer = home.owner.offer(source).offer
    expected = Prompt(np.concatenate([prompt.tokens, more])).chain(home.owner.namespace, BLOCK)
    assert list(offer.hashes) == list(expected.block_hashes())


# Plans


def other_prefix(plan: RestorePlan, prompt: Prompt, owner: SequenceOwner) -> RestorePlan:
    """The same plan with the last frame of a prompt of equal length, and so of equal size."""
    twin = Prompt(some_tokens(len(prompt.tokens), seed=99)).chain(owner.namespace, BLOCK)
    *rest, last = plan.frames
    key = twin.key(last.key.group, last.key.tokens, last.key.rank)
    return replace(plan, frames=(*rest, PlannedFrame(key, last.lineage)))


def with_key(plan: RestorePlan, **changes: object) -> RestorePlan:
    *rest, last = plan.frames
    return replace(plan, frames=(*rest, replace(last, key=replace(last.key, **changes))))


REFUSED: dict[str, tuple[Callable[[RestorePlan, Prompt, SequenceOwner], RestorePlan], type[TieredCacheError]]] = {
    "another prefix's frame of the same size": (other_prefix, IdentityError),
    "another rank": (lambda plan, prompt, owner: with_key(plan, rank=1), IdentityError),
    "another namespace": (lambda plan, prompt, owner: with_key(plan, namespace=b"n" * 32), IdentityError),
    "another parent": (lambda plan, prompt, owner: with_key(plan, parent=b"p" * 32), IdentityError),
    "someone's private copy": (lambda plan, prompt, owner: with_key(plan, private=7), IdentityError),
    "a frame past the plan": (lambda plan, prompt, owner: with_key(plan, tokens=plan.tokens + 1), PositionError),
    "more tokens than the prompt": (
        lambda plan, prompt, owner: replace(plan, tokens=len(prompt.tokens) + 1),
        PositionError,
    ),
    "no tokens": (lambda plan, prompt, owner: replace(plan, tokens=0), PositionError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_is_not_of_this_prompt_is_refused_before_a_byte_moves(home: Home, case: str) -> None:
    plan, prompt = stored(home)
    change, error = REFUSED[case]
    with pytest.raises(error):
        inject(home, change(plan, prompt, home.owner), prompt)
    assert home.fetched == 0
    assert home.untouched()


def test_the_prompt_decides_not_the_plan(home: Home) -> None:
    plan, prompt = stored(home)
    with pytest.raises(IdentityError, match="these tokens have"):
        inject(home, plan, Prompt(some_tokens(40, seed=5)))
    assert home.fetched == 0
    source = inject(home, plan, prompt)
    home.owner.release(source, deadline_s=1)
    assert home.untouched()


@pytest.mark.parametrize("missing", [0, -1])
def test_a_plan_with_a_frame_left_out_is_refused_whole(home: Home, missing: int) -> None:
    plan, prompt = stored(home)
    frames = list(plan.frames)
    del frames[missing]
    with pytest.raises(StateError):
        inject(home, replace(plan, frames=tuple(frames)), prompt)
    assert home.untouched()


def test_room_is_settled_before_a_body_moves(home: Home) -> None:
    plan, prompt = stored(home)
    with pytest.raises(CapacityError):
        inject(home, plan, prompt, room=1 << 40)
    assert home.fetched == 0
    assert home.untouched()


# Bodies


def test_bodies_that_are_not_what_was_planned_are_refused(home: Home) -> None:
    plan, prompt = stored(home)
    keys = tuple(planned.key for planned in plan.frames)
    bodies = home.tiering.fetch(plan.frames, 1 << 30, deadline_s=1)
    assert all(not isinstance(body, MissReason) for body in bodies)
    whole = [np.asarray(body) for body in bodies]

    def refused(answer: list[Bytes | MissReason], error: type[TieredCacheError]) -> TieredCacheError:
        home.fetch = lambda frames: answer
        with pytest.raises(error) as caught:
            inject(home, plan, prompt)
        assert home.untouched()
        return caught.value

    swapped = [whole[1], whole[0], *whole[2:]]
    assert refused(swapped, FrameError).key == keys[0].path()
    assert refused([whole[0], whole[1][:-1], *whole[2:]], TruncatedError).key == keys[1].path()
    flipped = whole[-1].copy()
    flipped[-1] ^= 1
    assert refused([*whole[:-1], flipped], TieredCacheError).key == keys[-1].path()
    assert refused([whole[0], MissReason.LOST], FrameNotFoundError).key == keys[1].path()
    refused([], FrameNotFoundError)


def test_a_frame_of_another_computation_is_not_what_was_planned(home: Home) -> None:
    """For a ticket it would be somebody else's bytes; for a prefix hit, the next look-up plans with it."""
    plan, prompt = stored(home)
    others = tuple(replace(planned, lineage=planned.lineage ^ 1) for planned in plan.frames)
    bodies = home.tiering.fetch(plan.frames, 1 << 30, deadline_s=1)
    home.fetch = lambda frames: bodies
    with pytest.raises(FrameNotFoundError, match=f"{plan.frames[0].lineage} came, and {others[0].lineage} was planned"):
        inject(home, replace(plan, frames=others), prompt)
    assert home.untouched()
    unknown = tuple(replace(planned, lineage=0) for planned in plan.frames)  # found after a restart, not read yet
    source = inject(home, replace(plan, frames=unknown), prompt)
    assert home.owner.offer(source).offer.lineages == tuple(f.lineage for f in plan.frames if f.key.group == "rows")


def test_frames_may_come_in_as_many_answers_as_the_tier_likes(home: Home) -> None:
    plan, prompt = stored(home)
    home.fetch = lambda frames: home.tiering.fetch(frames[:1], 1, deadline_s=1)
    restored = home.owner.inject(plan, prompt, 200, b"", deadline_s=5)
    assert restored.mark == never_moved(MODEL, prompt.tokens)
    assert home.fetched == len(plan.frames)


def test_a_restore_ends_by_its_deadline_and_leaves_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, prompt = stored(home)

    def slow(frames: tuple[PlannedFrame, ...]) -> list[Bytes | MissReason]:
        home.clock.now_s += 6.0
        return home.tiering.fetch(frames, 1 << 30, deadline_s=1)

    home.fetch = slow
    with pytest.raises(DeadlineError):
        inject(home, plan, prompt)
    assert home.untouched()
    home.fetch, digest = None, home.owner.engine.digest

    def slow_digest(handle: int) -> str:
        home.clock.now_s += 6.0
        return digest(handle)

    monkeypatch.setattr(home.owner.engine, "digest", slow_digest)
    with pytest.raises(DeadlineError):  # the state is there, and whoever asked for it is not
        inject(home, plan, prompt)
    assert home.untouched()


def test_a_sampler_state_that_is_refused_leaves_nothing(home: Home) -> None:
    plan, prompt = stored(home)
    with pytest.raises(StateError, match="no sampler state"):
        home.owner.inject(plan, prompt, 200, b"seed 7", deadline_s=5)
    assert home.untouched()


def test_no_lock_is_held_while_frames_are_fetched(home: Home) -> None:
    """So that the tiering service may export from this very owner meanwhile, from this very thread."""
    plan, prompt = stored(home)
    source, _ = begin(home.owner)

    def fetch_and_export(frames: tuple[PlannedFrame, ...]) -> list[Bytes | MissReason]:
        assert home.owner.export(source, rows(home.owner, prompt), deadline_s=1).body.nbytes
        home.owner.release(source, deadline_s=1)
        return home.tiering.fetch(frames, 1 << 30, deadline_s=1)

    home.fetch = fetch_and_export
    restored = home.owner.inject(plan, prompt, 200, b"", deadline_s=5)
    assert restored.mark == never_moved(MODEL, prompt.tokens)


# Running


def test_a_run_marks_its_checkpoints(home: Home) -> None:
    prompt = Prompt(some_tokens(40))
    lease = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    run = home.owner.run(lease, prompt, (BLOCK, 20, 40, 99), deadline_s=5)
    assert [mark.tokens for mark in run.marks] == [BLOCK, 20, 40]
    assert [tokens for tokens, _ in run.offer.offer.checkpoints] == [BLOCK, 20, 40]
    for mark in run.marks:
        assert mark == never_moved(MODEL, prompt.tokens[: mark.tokens])


def test_without_a_staging_slot_a_checkpoint_is_skipped_and_said_so() -> None:
    owner = SequenceOwner(
        ReferenceEngine(MODEL, staging_slots=1), name="w", node="n", tiering=lambda _: pytest.fail("not asked")
    )
    lease = owner.reserve(owner.namespace, 100, 30.0, deadline_s=1)
    run = owner.run(lease, Prompt(some_tokens(60)), (BLOCK, 2 * BLOCK, 3 * BLOCK), deadline_s=5)
    assert run.skipped == (2 * BLOCK, 3 * BLOCK)
    assert [tokens for tokens, _ in run.offer.offer.checkpoints] == [BLOCK, 60]


@pytest.mark.parametrize(
    ("count", "seed", "deadline_s", "error"),
    [
        (60, 1, 5.0, PositionError),
        (20, 0, 5.0, PositionError),
        (1000, 0, 5.0, CapacityError),
        (60, 0, 0.0, DeadlineError),
    ],
    ids=["another prompt", "a shorter prompt", "too long", "too late"],
)
def test_a_run_that_fails_releases_its_sequence(
    home: Home, count: int, seed: int, deadline_s: float, error: type[TieredCacheError]
) -> None:
    source, _ = begin(home.owner)
    with pytest.raises(error):
        home.owner.run(source, Prompt(some_tokens(count, seed)), (), deadline_s=deadline_s)
    if error is not DeadlineError:
        assert home.untouched()


def test_a_run_whose_caller_gave_up_releases_its_sequence(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    extend = home.owner.engine.extend

    def slow(handle: int, tokens: np.ndarray) -> None:
        home.clock.now_s += 10.0
        extend(handle, tokens)

    monkeypatch.setattr(home.owner.engine, "extend", slow)
    lease = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    with pytest.raises(DeadlineError):
        home.owner.run(lease, Prompt(some_tokens(40)), (), deadline_s=5)
    assert home.untouched()


def test_a_sequence_of_no_tokens_has_nothing_to_give(home: Home) -> None:
    lease = home.owner.reserve(home.owner.namespace, 100, 30.0, deadline_s=1)
    with pytest.raises(PositionError, match="no tokens"):
        home.owner.run(lease, Prompt(some_tokens(0)), (), deadline_s=1)
    source = home.owner.start(lease)
    for call in (home.owner.offer, lambda source: home.owner.suspend(source, deadline_s=1)):
        with pytest.raises(PositionError, match="no tokens"):
            call(source)
    home.owner.extend(source, some_tokens(4))  # and is not suspended now


# Media


def test_media_decide_what_is_shared(home: Home) -> None:
    plain, cat, dog = (Prompt(some_tokens(40), media) for media in ({}, {1: (b"cat",)}, {1: (b"dog",)}))
    lease = home.owner.reserve(home.owner.namespace, 200, 30.0, deadline_s=1)
    run = home.owner.run(lease, cat, (), deadline_s=5)
    plan = home.tiering.spill(run.offer, Durability.HOST, Hints(), 60.0, deadline_s=5).plan
    assert plan is not None
    for other in (plain, dog):
        with pytest.raises(IdentityError, match="these tokens have"):
            inject(home, plan, other)
        with pytest.raises(PositionError, match="other media in block 1"):
            home.owner.run(run.source, other, (), deadline_s=5)
        lease = home.owner.reserve(home.owner.namespace, 200, 30.0, deadline_s=1)
        run = home.owner.run(lease, cat, (), deadline_s=5)


def test_media_that_come_later_are_part_of_what_comes_later(home: Home) -> None:
    lease = home.owner.reserve(home.owner.namespace, 200, 30.0, deadline_s=1)
    first = home.owner.run(lease, Prompt(some_tokens(20), {0: (b"cat",), 1: (b"dog",)}), (), deadline_s=5)
    longer = np.concatenate([some_tokens(20), some_tokens(30, seed=1)])
    media = {0: (b"cat",), 1: (b"dog", b"cow"), 2: (b"hen",)}
    offer = home.owner.run(first.source, Prompt(longer, media), (), deadline_s=5).offer.offer
    assert list(offer.hashes) == list(Prompt(longer, media).chain(home.owner.namespace, BLOCK).block_hashes())


# Suspension


def test_a_suspended_sequence_stands_still_until_it_is_woken(home: Home) -> None:
    source, prompt = begin(home.owner)
    suspension = home.owner.suspend(source, deadline_s=1)
    assert [tokens for tokens, _ in suspension.offer.offer.checkpoints] == [len(prompt.tokens)]
    assert np.array_equal(suspension.prompt.tokens, prompt.tokens)
    calls = every_call(home.owner, prompt)
    for name in ("suspend", "run", "extend", "advance", "rewind"):
        with pytest.raises(StaleError, match="suspended"):
            calls[name](source)
    calls["export"](source)
    home.owner.wake(source, deadline_s=1)
    longer = np.concatenate([prompt.tokens, some_tokens(9, seed=3)])
    assert home.owner.run(source, Prompt(longer), (), deadline_s=5).marks[-1] == never_moved(MODEL, longer)


# Waiting


def test_calls_wait_for_a_busy_sequence_until_their_deadline(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.owner._clock = time.monotonic
    source, prompt = begin(home.owner)
    entered, go_on, extend = threading.Event(), threading.Event(), home.owner.engine.extend

    def stuck(handle: int, tokens: np.ndarray) -> None:
        entered.set()
        assert go_on.wait(60)
        extend(handle, tokens)

    monkeypatch.setattr(home.owner.engine, "extend", stuck)
    running = threading.Thread(target=home.owner.extend, args=(source, some_tokens(8)))
    running.start()
    assert entered.wait(60)
    calls: list[Callable[[], object]] = [
        lambda: home.owner.export(source, rows(home.owner, prompt), deadline_s=0.1),
        lambda: home.owner.release(source, deadline_s=0.1),
        lambda: home.owner.suspend(source, deadline_s=0.1),
        lambda: home.owner.wake(source, deadline_s=0.1),
        lambda: home.owner.run(source, prompt, (), deadline_s=0.1),
    ]
    for call in calls:
        started_s = time.monotonic()
        with pytest.raises(DeadlineError, match="in use"):
            call()
        assert time.monotonic() - started_s < 1.0
    assert home.owner.bid(home.owner.namespace, (), deadline_s=0.1).owner == "other"  # bids never wait
    go_on.set()
    running.join(60)
    longer = np.concatenate([prompt.tokens, some_tokens(8)])
    assert home.owner.run(source, Prompt(longer), (), deadline_s=5).marks[-1] == never_moved(MODEL, longer)


def test_exports_of_what_is_settled_are_right_while_the_sequence_runs_on(home: Home) -> None:
    home.owner._clock = time.monotonic
    source, prompt = begin(home.owner, room=2000)
    first = rows(home.owner, prompt)
    expected = home.owner.export(source, first, deadline_s=5).body
    failures: list[BaseException] = []

    def export() -> None:
        try:
            for _ in range(20):
                assert np.array_equal(home.owner.export(source, first, deadline_s=5).body, expected)
        except BaseException as error:  # noqa: BLE001 - the main thread shall see it
            failures.append(error)

    threads = [threading.Thread(target=export) for _ in range(3)]
    for thread in threads:
        thread.start()
    tokens = prompt.tokens
    for step in range(20):
        more = some_tokens(17, seed=step)
        home.owner.extend(source, more)
        tokens = np.concatenate([tokens, more])
    for thread in threads:
        thread.join(60)
    assert not failures
    assert home.owner.run(source, Prompt(tokens), (), deadline_s=5).marks[-1] == never_moved(MODEL, tokens)
