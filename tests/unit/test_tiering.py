"""`TieringService` and all around it in one process: round trips, suspension, bad bytes, failing owners, restarts."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import BLOCK, DEADLINE_S, MODELS, Served, compute, never_moved, serve, some_tokens
from spilling import Clock

from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.engines.base import FrameName, HostArray
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import (
    CapacityError,
    DeadlineError,
    FrameNotFoundError,
    IdentityError,
    MissReason,
    StaleError,
    StateError,
    TieredCacheError,
    TierError,
)
from tiered_cache.identity import CHECKPOINT, FrameKey, Tokens
from tiered_cache.policy.base import Hints
from tiered_cache.service import tiering
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import (
    Bytes,
    Parcel,
    Prompt,
    SequenceRef,
    StateMark,
    Ticket,
    parcel_bytes,
    parcel_views,
)
from tiered_cache.service.owner import SequenceOwner
from tiered_cache.service.router import SETTLE_S
from tiered_cache.tiers.base import Durability, GetRequest
from tiered_cache.tiers.disk import SyncPolicy

NODE = LocalCluster.NODE
MODEL = MODELS[0]
HOST, DISK = Durability.HOST, Durability.DISK


def start(
    model: str = MODEL, *, host_bytes: int = 8 << 20, disk_dir: Path | None = None, disk_bytes: int = 16 << 20
) -> LocalCluster:
    tiers = TierSettings(
        host_bytes=host_bytes,
        disk_dir=disk_dir,
        disk_bytes=disk_bytes if disk_dir else 0,
        disk_sync=SyncPolicy.NEVER,
    )
    return LocalCluster(ClusterSettings(workers=2, worker=WorkerSettings(engine=model), tiers=tiers))


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with start() as cluster:
        yield cluster


def owner_of(cluster: LocalCluster, name: str) -> SequenceOwner:
    owner = cluster.workers[name]
    assert isinstance(owner, SequenceOwner)
    return owner


def reserved(cluster: LocalCluster) -> int:
    return sum(usage.bytes_reserved for usage in cluster.cache.usage().values())


# Out and back


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("durability", [HOST, DISK])
def test_a_prefix_comes_back_on_another_worker_byte_for_byte(
    model: str, durability: Durability, tmp_path: Path
) -> None:
    with start(model, host_bytes=0 if durability is DISK else 8 << 20, disk_dir=tmp_path / "tiers") as cluster:
        first = serve(cluster, some_tokens(100), durability)
        assert first.mark == never_moved(model, some_tokens(100))
        assert [(kept.tokens, kept.durability >= durability) for kept in first.spill.kept] == [(100, True)]
        longer = np.concatenate([some_tokens(100), some_tokens(33, seed=1)])
        second = serve(cluster, longer, durability)
        assert second.placement.restored is not None
        assert second.placement.owner != first.placement.owner
        assert second.placement.restored.mark == first.mark
        assert second.mark == never_moved(model, longer)
        assert reserved(cluster) == 0


def test_what_the_tiers_hold_is_not_moved_again(cluster: LocalCluster) -> None:
    first = serve(cluster, some_tokens(100))
    again = compute(cluster, np.concatenate([some_tokens(100), some_tokens(1, seed=1)]))
    offer = replace(
        again.run.offer, offer=replace(again.run.offer.offer, checkpoints=first.run.offer.offer.checkpoints)
    )
    spilled = cluster.tiering.spill(offer, HOST, Hints(), None, deadline_s=DEADLINE_S)
    assert (spilled.bytes_moved, spilled.receipts) == (0, ())
    assert [kept.tokens for kept in spilled.kept] == [100]


def test_a_branch_is_checkpointed_at_a_block_end_and_then_shared(cluster: LocalCluster) -> None:
    shared = some_tokens(70)
    prompts = [np.concatenate([shared, some_tokens(30, seed=seed)]) for seed in (1, 2, 3)]
    served = [serve(cluster, prompt) for prompt in prompts]
    assert [s.placement.restored_tokens for s in served] == [0, 0, 64]
    assert served[1].placement.reason is MissReason.NO_CHECKPOINT
    assert 64 in served[1].placement.take_at
    for one, prompt in zip(served, prompts, strict=True):
        assert one.mark == never_moved(MODEL, prompt)


# Suspend and resume


def suspend(cluster: LocalCluster, served: Served, durability: Durability = HOST) -> Ticket:
    return cluster.router.suspend(served.run.source, NODE, durability, deadline_s=DEADLINE_S)


def go_on(cluster: LocalCluster, ticket: Ticket, more: Tokens, *, elsewhere_than: str | None = None) -> None:
    """Resume, and check that it goes on as if it had never moved."""
    restored = cluster.router.resume(ticket, len(ticket.prompt.tokens) + len(more), deadline_s=DEADLINE_S)
    assert restored.source.owner != elsewhere_than
    assert restored.mark == never_moved(cluster_model(cluster), ticket.prompt.tokens)
    longer = np.concatenate([ticket.prompt.tokens, more])
    worker = cluster.workers[restored.source.owner]
    run = worker.run(restored.source, Prompt(longer), (), deadline_s=DEADLINE_S)
    assert run.marks[-1] == never_moved(cluster_model(cluster), longer)
    worker.release(run.source, deadline_s=DEADLINE_S)


def cluster_model(cluster: LocalCluster) -> str:
    return next(model for model in MODELS if ReferenceEngine(model).identity == cluster.identity)


@settings(max_examples=12, deadline=None)
@given(model=st.sampled_from(MODELS), count=st.integers(1, 70), more=st.integers(1, 40), seed=st.integers(0, 3))
def test_a_sequence_is_suspended_at_any_token_and_goes_on_elsewhere(
    model: str, count: int, more: int, seed: int
) -> None:
    with start(model) as cluster:
        served = compute(cluster, some_tokens(count, seed))
        before = owner_of(cluster, served.placement.owner).engine.bytes_free()
        ticket = suspend(cluster, served)
        assert owner_of(cluster, served.placement.owner).engine.bytes_free() > before
        with pytest.raises(FrameNotFoundError, match="released"):
            cluster.workers[served.placement.owner].suspend(served.run.source, deadline_s=1)
        go_on(cluster, ticket, some_tokens(more, seed=9))
        with pytest.raises(StaleError, match="used before"):
            cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
        for worker in cluster.workers:
            assert owner_of(cluster, worker).engine.bytes_free() == ReferenceEngine(model).bytes_free()


def test_a_suspended_sequence_is_not_evicted_before_its_ticket_is_used(tmp_path: Path) -> None:
    with start(host_bytes=400_000) as cluster:
        served = compute(cluster, some_tokens(50))
        ticket = suspend(cluster, served)
        declined = [serve(cluster, some_tokens(200, seed=seed)).spill.declined for seed in range(1, 12)]
        assert cluster.counters()["cache.dropped.host.evicted"] > 0, declined
        go_on(cluster, ticket, some_tokens(10, seed=99))


def test_a_suspension_that_the_tiers_cannot_take_leaves_the_sequence_running() -> None:
    with start(host_bytes=4096) as cluster:
        served = compute(cluster, some_tokens(50))
        with pytest.raises(CapacityError):
            suspend(cluster, served)
        longer = np.concatenate([some_tokens(50), some_tokens(5, seed=1)])
        run = cluster.workers[served.placement.owner].run(served.run.source, Prompt(longer), (), deadline_s=5)
        assert run.marks[-1] == never_moved(MODEL, longer)
        assert reserved(cluster) == 0


def suspend_a_second_computation(
    cluster: LocalCluster, prompt: Tokens, durability: Durability
) -> tuple[Ticket, StateMark]:
    """Two computations of one prefix that differ in bytes: shared frames hold the first, the ticket's the second."""
    first = compute(cluster, prompt)
    worker = owner_of(cluster, "worker-1")
    assert first.placement.owner == "worker-0"
    lease = worker.reserve(cluster.namespace, 200, 30.0, deadline_s=1)
    second = worker.run(lease, Prompt(prompt.copy()), (), deadline_s=DEADLINE_S)
    assert isinstance(worker.engine, ReferenceEngine)
    mark = differ_in_last_bits(worker.engine, worker._sequences[second.source.sequence].handle)
    cluster.tiering.spill(first.run.offer, durability, Hints(), None, deadline_s=DEADLINE_S)
    cluster.workers["worker-0"].release(first.run.source, deadline_s=1)
    return cluster.router.suspend(second.source, NODE, durability, deadline_s=DEADLINE_S), mark


@pytest.mark.parametrize("durability", [HOST, DISK])
def test_a_suspended_sequence_gets_its_own_bytes_although_another_was_first(
    durability: Durability, tmp_path: Path
) -> None:
    with start(disk_dir=tmp_path / "tiers") as cluster:
        ticket, mark = suspend_a_second_computation(cluster, some_tokens(40), durability)
        private = [frame for frame in ticket.plan.frames if frame.key.private]
        assert {frame.key.group for frame in private} == {"rows", CHECKPOINT}
        assert len({frame.key.private for frame in private}) == 1
        for frame in ticket.plan.frames:
            assert FrameKey.parse(frame.key.path()) == frame.key
        assert cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S).mark == mark
        assert mark != never_moved(MODEL, some_tokens(40))
        # what others find is still the first one's, and the private frames went with the ticket
        found = compute(cluster, np.concatenate([some_tokens(40), some_tokens(3, seed=1)])).placement.restored
        assert found is not None
        assert found.mark == never_moved(MODEL, some_tokens(40))
        gone = cluster.tiering.fetch(tuple(private), 1 << 30, deadline_s=1)
        assert gone == [MissReason.LOST] * len(private)


def test_private_copies_on_disk_outlive_a_restart(tmp_path: Path) -> None:
    with start(disk_dir=tmp_path / "tiers") as cluster:
        ticket, mark = suspend_a_second_computation(cluster, some_tokens(40), DISK)
    with start(disk_dir=tmp_path / "tiers") as cluster:
        assert cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S).mark == mark


def differ_in_last_bits(engine: ReferenceEngine, handle: int) -> StateMark:
    """Change one byte of every part of a live state; returns its mark now."""
    names = [FrameName("rows", BLOCK), FrameName("rows", 2 * BLOCK), FrameName(CHECKPOINT, 40)]
    body = np.empty(parcel_bytes(engine.geometry, names), dtype=np.uint8)
    views = parcel_views(engine.geometry, names, body)
    engine.export(handle, names, views)
    changed = engine.restoration(engine.reserve(200), 40)
    for name, arrays in zip(names, views, strict=True):
        changed.put(name, {part: with_another_low_bit(part, array) for part, array in arrays.items()})
    twin = changed.commit()
    engine._sequences[handle].state.release()
    engine._sequences[handle] = engine._sequences.pop(twin)
    return StateMark(40, engine.digest(handle), engine.output(handle))


def with_another_low_bit(part: str, array: HostArray) -> HostArray:
    if array.dtype.kind == "u" and array.dtype.itemsize == 4:  # token ids, which have no rounding
        return array
    changed = array.copy()
    changed.reshape(-1).view(np.uint8)[0] ^= 1
    return changed


# Bad bytes


def flip(cluster: LocalCluster, tier: str, key: FrameKey, tmp_path: Path) -> None:
    """Change one bit in the middle of a stored frame, behind the tier's back."""
    if tier == "disk":
        (path,) = [
            p for p in (tmp_path / "tiers").rglob("*") if p.is_file() and p.as_posix().endswith(f"{key.path()}.blob")
        ]
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 4
        path.write_bytes(raw)
        return
    level = next(level for level in cluster.cache._levels if level.name == tier)
    (view,) = level.tier.get([GetRequest(key.path())])
    assert isinstance(view, memoryview)
    middle = np.frombuffer(view, np.uint8).ctypes.data + view.nbytes // 2
    ctypes.c_uint8.from_address(middle).value ^= 4


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("place", ["first rows", "last rows", "checkpoint"])
def test_a_flipped_bit_is_found_set_aside_and_computed_again(tier: str, place: str, tmp_path: Path) -> None:
    with start(host_bytes=8 << 20 if tier == "host" else 0, disk_dir=tmp_path / "tiers") as cluster:
        prompt = some_tokens(40)
        serve(cluster, prompt[: 2 * BLOCK])
        served = serve(cluster, prompt)
        assert [kept.tokens for kept in served.spill.kept] == [40]
        chain = Prompt(prompt).chain(cluster.namespace, BLOCK)
        bad, left = {
            "first rows": (chain.key("rows", BLOCK, 0), 0),
            "last rows": (chain.key("rows", 2 * BLOCK, 0), 0),
            "checkpoint": (chain.key(CHECKPOINT, 40, 0), 2 * BLOCK),
        }[place]
        flip(cluster, tier, bad, tmp_path)
        longer = np.concatenate([prompt, some_tokens(5, seed=1)])
        again = serve(cluster, longer)
        assert again.placement.restored_tokens == left
        assert again.placement.refusals[0][0] == "ChecksumError"
        assert again.mark == never_moved(MODEL, longer)
        if not left:
            assert again.placement.reason is MissReason.QUARANTINED
        assert cluster.counters()[f"cache.frames.{tier}.quarantined"] == 1
        assert cluster.cache.usage()[tier].bytes_quarantined > 0
        third = serve(cluster, np.concatenate([longer, some_tokens(2, seed=2)]))
        assert third.placement.restored_tokens == len(longer)
        assert not third.placement.refusals
        assert third.mark == never_moved(MODEL, np.concatenate([longer, some_tokens(2, seed=2)]))


def test_another_frame_under_a_frames_name_is_set_aside_and_computed_again(tmp_path: Path) -> None:
    with start(host_bytes=0, disk_dir=tmp_path / "tiers") as cluster:
        prompt, other = some_tokens(40), some_tokens(40, seed=1)
        serve(cluster, prompt)
        serve(cluster, other)
        mine, theirs = (file_of(cluster, tokens, BLOCK, tmp_path) for tokens in (prompt, other))
        mine.write_bytes(theirs.read_bytes())
        longer = np.concatenate([prompt, some_tokens(5, seed=2)])
        again = serve(cluster, longer)
        assert again.placement.reason is MissReason.QUARANTINED
        assert again.mark == never_moved(MODEL, longer)
        assert cluster.counters()["cache.frames.disk.quarantined"] == 1
        third = serve(cluster, np.concatenate([longer, some_tokens(2, seed=3)]))
        assert (third.placement.restored_tokens, third.placement.refusals) == (len(longer), ())


def file_of(cluster: LocalCluster, tokens: Tokens, end: int, tmp_path: Path) -> Path:
    """Where the disk tier keeps the rows of the block that ends there."""
    path = Prompt(tokens).chain(cluster.namespace, BLOCK).key("rows", end, 0).path()
    (found,) = (file for file in (tmp_path / "tiers").rglob("*.blob") if file.as_posix().endswith(f"{path}.blob"))
    return found


def test_a_flipped_bit_below_is_no_harm_while_the_copy_above_is_sound(tmp_path: Path) -> None:
    with start(disk_dir=tmp_path / "tiers") as cluster:
        prompt = some_tokens(40)
        serve(cluster, prompt, DISK)
        flip(cluster, "disk", Prompt(prompt).chain(cluster.namespace, BLOCK).key("rows", BLOCK, 0), tmp_path)
        again = serve(cluster, np.concatenate([prompt, some_tokens(5, seed=1)]))
        assert (again.placement.restored_tokens, again.placement.refusals) == (40, ())


def test_a_ticket_whose_bytes_went_bad_is_refused_and_its_tokens_can_be_computed(cluster: LocalCluster) -> None:
    ticket = suspend(cluster, compute(cluster, some_tokens(40)))
    flip(cluster, "host", ticket.plan.frames[-1].key, Path())
    with pytest.raises(TieredCacheError, match="does not hold"):
        cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
    assert compute(cluster, ticket.prompt.tokens).mark == never_moved(MODEL, ticket.prompt.tokens)


# Owners that fail


class Between:
    """An owner whose exports go wrong."""

    def __init__(self, owner: SequenceOwner, export: Callable[..., Parcel]) -> None:
        self._owner = owner
        self.export = export

    def __getattr__(self, name: str) -> object:
        return getattr(self._owner, name)


def with_export(cluster: LocalCluster, name: str, change: Callable[[Parcel], Parcel]) -> None:
    owner = owner_of(cluster, name)

    def export(source: SequenceRef, keys: tuple[FrameKey, ...], *, deadline_s: float) -> Parcel:
        return change(owner.export(source, keys, deadline_s=deadline_s))

    cluster.workers[name] = Between(owner, export)  # type: ignore[assignment]


def dies(parcel: Parcel) -> Parcel:
    raise TierError("worker-0 is dead", retryable=True)


WRONG: dict[str, tuple[Callable[[Parcel], Parcel], type[TieredCacheError]]] = {
    "dead": (dies, TierError),
    "one byte short": (lambda parcel: Parcel(parcel.names, parcel.body[:-1]), StateError),
    "one byte long": (lambda parcel: Parcel(parcel.names, np.append(parcel.body, np.uint8(0))), StateError),
    "another dtype": (lambda parcel: Parcel(parcel.names, parcel.body.view(np.int8)), StateError),  # type: ignore[arg-type]
    "other frames": (lambda parcel: Parcel(parcel.names[::-1], parcel.body), StateError),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_owner_that_fails_before_the_acknowledgement_leaves_nothing(cluster: LocalCluster, case: str) -> None:
    served = compute(cluster, some_tokens(100))
    change, error = WRONG[case]
    with_export(cluster, served.placement.owner, change)
    with pytest.raises(error):
        cluster.tiering.spill(served.run.offer, HOST, Hints(), 60.0, deadline_s=DEADLINE_S)
    usage = cluster.cache.usage()["host"]
    assert (usage.bytes_reserved, usage.entries) == (0, 0)
    assert cluster.cache.kept(served.run.offer.offer) == []
    again = compute(cluster, np.concatenate([some_tokens(100), some_tokens(1, seed=1)]))
    assert (again.placement.restored, again.placement.reason) == (None, MissReason.NOT_STORED)


def test_a_spill_whose_caller_gave_up_is_not_acknowledged_and_holds_no_pin(cluster: LocalCluster) -> None:
    served = compute(cluster, some_tokens(100))
    now_s = 0.0

    def late(parcel: Parcel) -> Parcel:
        nonlocal now_s
        now_s += 6.0
        return parcel

    cluster.tiering._clock = lambda: now_s
    with_export(cluster, served.placement.owner, late)
    with pytest.raises(DeadlineError):
        cluster.tiering.spill(served.run.offer, HOST, Hints(), 60.0, deadline_s=5.0)
    assert reserved(cluster) == 0
    assert cluster.cache.usage()["host"].entries == 0
    spill, cluster.cache.spill = cluster.cache.spill, None  # type: ignore[method-assign,assignment]

    def slow_spill(*args: object) -> object:
        receipts = spill(*args)  # type: ignore[arg-type]
        late(Parcel((), np.empty(0, np.uint8)))
        return receipts

    cluster.cache.spill = slow_spill  # type: ignore[method-assign,assignment]
    cluster.workers[served.placement.owner] = cluster.workers[served.placement.owner]._owner  # type: ignore[attr-defined]
    with pytest.raises(DeadlineError, match="acknowledge"):
        cluster.tiering.spill(served.run.offer, HOST, Hints(), 60.0, deadline_s=5.0)
    assert not cluster.cache._pins


def test_of_a_long_spill_one_call_is_here_at_a_time(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiering, "EXPORT_BYTES_MAX", 1)
    served = compute(cluster, some_tokens(100))
    bodies: list[weakref.ref[Bytes]] = []
    alive: list[int] = []

    def weigh(parcel: Parcel) -> Parcel:
        alive.append(sum(body() is not None for body in bodies))
        bodies.append(weakref.ref(parcel.body))
        return parcel

    with_export(cluster, served.placement.owner, weigh)
    spilled = cluster.tiering.spill(served.run.offer, HOST, Hints(), None, deadline_s=DEADLINE_S)
    assert [kept.tokens for kept in spilled.kept] == [100]
    assert len(bodies) == len(spilled.receipts) > 5
    assert alive == [0] * len(bodies)


def test_an_unknown_namespace_is_learned_from_the_owner_that_offers(cluster: LocalCluster) -> None:
    stranger = SequenceOwner(
        ReferenceEngine(MODELS[1]), name="stranger", node=NODE, tiering=cluster.tierings.__getitem__
    )
    cluster.workers["stranger"] = stranger
    prompt = Prompt(some_tokens(40))
    unknown = cluster.tiering.match(stranger.namespace, prompt, 1.0, deadline_s=1)
    assert (unknown.plan, unknown.reason) == (None, MissReason.NAMESPACE)
    run = stranger.run(stranger.reserve(stranger.namespace, 99, 9.0, deadline_s=1), prompt, (), deadline_s=5)
    kept = cluster.tiering.spill(run.offer, HOST, Hints(), None, deadline_s=5).kept
    assert [checkpoint.tokens for checkpoint in kept] == [40]
    longer = Prompt(np.concatenate([prompt.tokens, some_tokens(1, seed=1)]))
    found = cluster.tiering.match(stranger.namespace, longer, 1.0, deadline_s=1)
    assert found.plan is not None
    assert stranger.inject(found.plan, longer, 99, b"", deadline_s=5).mark == never_moved(MODELS[1], prompt.tokens)


def test_an_offer_under_a_namespace_that_is_not_its_owners_is_refused(cluster: LocalCluster) -> None:
    served = compute(cluster, some_tokens(40))
    forged = replace(served.run.offer, offer=replace(served.run.offer.offer, namespace=b"f" * 32))
    with pytest.raises(IdentityError, match=(b"f" * 8).hex()):
        cluster.tiering.spill(forged, HOST, Hints(), None, deadline_s=5)
    assert cluster.cache.usage()["host"].entries == 0


# Restarts


def test_a_restart_finds_what_is_on_disk_and_a_ticket_outlives_it(tmp_path: Path) -> None:
    prompt = some_tokens(40)
    with start(disk_dir=tmp_path / "tiers") as cluster:
        serve(cluster, prompt, DISK)
        only_in_memory = serve(cluster, some_tokens(60, seed=5), HOST)
        ticket = suspend(cluster, compute(cluster, some_tokens(50, seed=6)), DISK)
    with start(disk_dir=tmp_path / "tiers") as cluster:
        assert cluster.tiering.generation > ticket.plan.generation
        again = serve(cluster, np.concatenate([prompt, some_tokens(4, seed=1)]))
        assert again.placement.restored_tokens == 40
        lost = compute(cluster, np.concatenate([some_tokens(60, seed=5), some_tokens(4, seed=1)]))
        assert only_in_memory.spill.kept
        assert lost.placement.restored is None
        go_on(cluster, ticket, some_tokens(4, seed=2))
        with pytest.raises(StaleError, match="used before"):
            cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)


def test_a_ticket_of_memory_alone_dies_with_it_and_says_so() -> None:
    with start() as cluster:
        ticket = suspend(cluster, compute(cluster, some_tokens(50)))
    with start() as cluster:
        with pytest.raises(FrameNotFoundError, match="was promised"):
            cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
        assert compute(cluster, ticket.prompt.tokens).mark == never_moved(MODEL, ticket.prompt.tokens)


def test_pins_of_earlier_generations_have_ended_with_them(cluster: LocalCluster) -> None:
    generation = cluster.tiering.generation
    serve(cluster, some_tokens(40))
    plan = cluster.tiering.match(cluster.namespace, Prompt(some_tokens(45)), 30.0, deadline_s=1).plan
    assert plan is not None
    assert not cluster.tiering.unpin(plan.pin, generation - 1, deadline_s=1)
    assert not cluster.tiering.unpin(plan.pin, generation + 1, deadline_s=1)
    assert cluster.tiering.unpin(plan.pin, generation, deadline_s=1)
    assert not cluster.tiering.unpin(plan.pin, generation, deadline_s=1)


def test_an_offer_that_was_edited_to_another_prompts_hashes_brings_nothing() -> None:
    """They are as good as its own in every way but whose they are, which its owner alone can tell."""
    tiers = TierSettings(host_bytes=8 << 20)
    with LocalCluster(ClusterSettings(worker=WorkerSettings(engine=MODELS[0]), tiers=tiers)) as cluster:
        served = compute(cluster, some_tokens(40))
        another = Prompt(some_tokens(40, seed=9)).chain(cluster.namespace, BLOCK)
        offer = replace(
            served.run.offer.offer,
            hashes=tuple(another.block_hashes()),
            checkpoints=((40, another.prefix_hash(40)),),
        )
        edited = replace(served.run.offer, offer=offer)
        before = cluster.cache.usage()
        with pytest.raises(IdentityError, match="this sequence has"):
            cluster.tiering.spill(edited, Durability.HOST, Hints(), None, deadline_s=5)
        assert cluster.cache.usage() == before
        assert compute(cluster, some_tokens(45, seed=9)).placement.restored is None


def test_a_spill_that_comes_back_late_overwrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller has given up, and the same prefix was computed and kept from elsewhere."""
    tiers, later_s = TierSettings(host_bytes=8 << 20), 0.0
    settings = ClusterSettings(worker=WorkerSettings(engine=MODELS[0]), tiers=tiers)
    with LocalCluster(settings, clock=lambda: time.monotonic() + later_s) as cluster:
        late = compute(cluster, some_tokens(40))
        owner = cluster.owners[late.placement.owner]
        entered, go_on, export = threading.Event(), threading.Event(), owner.export

        def slow(source: SequenceRef, keys: tuple[FrameKey, ...], *, deadline_s: float) -> Parcel:
            entered.set()
            assert go_on.wait(60)
            return export(source, keys, deadline_s=deadline_s)

        monkeypatch.setattr(owner, "export", slow)
        with ThreadPoolExecutor(1) as thread:
            spilling = thread.submit(
                cluster.tiering.spill, late.run.offer, Durability.HOST, Hints(), None, deadline_s=60.0
            )
            assert entered.wait(60)
            other = next(worker for name, worker in cluster.workers.items() if name != late.placement.owner)
            lease = other.reserve(cluster.namespace, 60, 30.0, deadline_s=5)
            again = other.run(lease, Prompt(some_tokens(40)), (), deadline_s=5)
            assert cluster.tiering.spill(again.offer, Durability.HOST, Hints(), None, deadline_s=5).kept
            later_s = 61.0  # the first one's deadline
            go_on.set()
            with pytest.raises(DeadlineError):
                spilling.result()
        found = cluster.tiering.match(cluster.namespace, Prompt(some_tokens(45)), 1.0, deadline_s=5).plan
        assert found is not None
        assert {planned.lineage for planned in found.frames} == {again.offer.offer.lineage}
        assert cluster.cache.usage()["host"].bytes_reserved == 0


def test_a_used_ticket_is_refused_after_a_restart_too(tmp_path: Path) -> None:
    with start(disk_dir=tmp_path / "tiers") as cluster:
        ticket = suspend(cluster, compute(cluster, some_tokens(50)), DISK)
        other = suspend(cluster, compute(cluster, some_tokens(50, seed=1)), DISK)
        cluster.router.bring_back(ticket, 200, 7, deadline_s=DEADLINE_S)  # and its asker dies
    with start(disk_dir=tmp_path / "tiers") as cluster:
        with pytest.raises(StaleError, match="used before"):
            cluster.router.resume(ticket, 200, deadline_s=DEADLINE_S)
        with pytest.raises(StaleError, match="not there"):
            cluster.router.keep(ticket, deadline_s=DEADLINE_S)
        cluster.router.keep(other, deadline_s=DEADLINE_S)
        go_on(cluster, other, some_tokens(3, seed=2))
    with start(disk_dir=tmp_path / "tiers") as cluster, pytest.raises(StaleError, match="used before"):
        cluster.router.resume(other, 200, deadline_s=DEADLINE_S)


def test_a_suspension_whose_asker_is_gone_is_let_go_soon() -> None:
    clock = Clock()
    settings = ClusterSettings(workers=2, worker=WorkerSettings(engine=MODEL), tiers=TierSettings(host_bytes=8 << 20))
    with LocalCluster(settings, clock=clock) as cluster:
        source = compute(cluster, some_tokens(50)).run.source
        cluster.router.take_off(source, NODE, HOST, deadline_s=5)
        assert cluster.cache.pins() == 1
        clock.now_s += 5 + SETTLE_S + 1
        assert cluster.cache.pins() == 0
        cluster.workers[source.owner].wake(source, deadline_s=5)
        cluster.router.suspend(source, NODE, HOST, deadline_s=5)
        clock.now_s += 3000
        assert cluster.cache.pins() == 1


def test_a_ticket_that_is_none_is_refused(cluster: LocalCluster) -> None:
    ticket = suspend(cluster, compute(cluster, some_tokens(50)))
    good = ticket.plan.tickets[0]
    for tickets in ((), (replace(good, group=CHECKPOINT),), (replace(good, private=0),)):
        with pytest.raises(IdentityError):
            cluster.tiering.use_up(replace(ticket.plan, tickets=tickets), 1, 60.0, deadline_s=5)
    for forged in (replace(good, private=1 << 70), replace(good, tokens=1 << 70), replace(good, rank=1)):
        assert not cluster.tiering.use_up(replace(ticket.plan, tickets=(forged,)), 1, 60.0, deadline_s=5)
        plan = replace(ticket.plan, tickets=(replace(forged, prefix=b"p" * 32),))
        with pytest.raises(IdentityError):
            cluster.router.resume(replace(ticket, plan=plan), 200, deadline_s=5)
    go_on(cluster, ticket, some_tokens(3, seed=1))
