"""`OwnerSet`: a sequence that several owners hold together is on all of them or on none, and comes back whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import MODELS, compute, serve, some_tokens

from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.engines.base import ComputingEngine, FrameName
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import (
    CapacityError,
    ChecksumError,
    ConfigError,
    DeadlineError,
    FrameNotFoundError,
    GeometryError,
    IdentityError,
    MissReason,
    StateError,
    TieredCacheError,
    TierError,
)
from tiered_cache.identity import Tokens
from tiered_cache.policy.base import Hints
from tiered_cache.replay.driver import ReplaySettings, replay
from tiered_cache.replay.traces import SAMPLE_PATH, Trace
from tiered_cache.service.local import InlineExecutor, LocalCluster
from tiered_cache.service.messages import Prompt, StateMark
from tiered_cache.service.owner import SequenceOwner
from tiered_cache.service.owner_set import OwnerSet, combined_mark
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import SyncPolicy

HOST, DISK = Durability.HOST, Durability.DISK
SHARDS = 2
MODEL = MODELS[0]
MIB = 1 << 20


def cluster_of(model: str = MODEL, shards: int = SHARDS, workers: int = 2, **tiers: Any) -> LocalCluster:
    worker = WorkerSettings(engine=model, capacity_bytes=16 * MIB, shards=shards)
    return LocalCluster(ClusterSettings(workers, worker, TierSettings(**{"host_bytes": 16 * MIB, **tiers})))


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with cluster_of() as cluster:
        yield cluster


def never_moved(model: str, tokens: Tokens, shards: int = SHARDS) -> StateMark:
    """The mark of a set's sequence that was computed in one place from its first token to its last."""
    marks = []
    for rank in range(shards):
        engine = ReferenceEngine(model, shards=shards, rank=rank)
        sequence = engine.start(engine.reserve(len(tokens)))
        engine.extend(sequence, tokens)
        marks.append(StateMark(len(tokens), engine.digest(sequence), engine.output(sequence)))
    mark = combined_mark(marks)
    assert mark is not None
    return mark


def free_bytes(cluster: LocalCluster) -> list[int]:
    return [owner.engine.bytes_free() for owner in cluster.owners.values()]


def failing(cluster: LocalCluster, owner: str, call: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> object:
        raise error

    monkeypatch.setattr(cluster.owners[owner], call, fail)


# The engine


def rows_of(engine: ComputingEngine, tokens: Tokens) -> dict[str, np.ndarray[Any, Any]]:
    sequence = engine.start(engine.reserve(len(tokens)))
    engine.extend(sequence, tokens)
    specs = engine.geometry.arrays("rows", 32)
    arrays = {name: np.empty(spec.shape, spec.storage) for name, spec in specs.items()}
    engine.export(sequence, [FrameName("rows", 32)], [arrays])
    return arrays


def test_each_rank_has_its_heads_of_what_one_engine_has() -> None:
    whole = rows_of(ReferenceEngine(MODEL), some_tokens(40))
    ranks = [rows_of(ReferenceEngine(MODEL, shards=2, rank=rank), some_tokens(40)) for rank in range(2)]
    for name in ("attn.k", "attn.v"):
        assert np.array_equal(whole[name], np.concatenate([rank[name] for rank in ranks], axis=2))
        assert not np.array_equal(ranks[0][name], ranks[1][name])
    assert np.array_equal(whole["qsa.keys"], ranks[0]["qsa.keys"])
    with pytest.raises(ConfigError, match="2 heads cannot be cut over 3 ranks"):
        ReferenceEngine(MODEL, shards=3)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        ReferenceEngine(MODEL, shards=2, rank=2)


# Out and back


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("durability", [HOST, DISK])
def test_out_from_one_set_and_back_into_another(model: str, durability: Durability, tmp_path: Path) -> None:
    with cluster_of(model, disk_dir=tmp_path / "d", disk_bytes=16 * MIB, disk_sync=SyncPolicy.NEVER) as cluster:
        prompt = some_tokens(100)
        first = serve(cluster, prompt, durability)
        assert first.mark == never_moved(model, prompt)
        assert [(kept.tokens, kept.durability >= durability) for kept in first.spill.kept] == [(100, True)]
        longer = np.concatenate([prompt, some_tokens(30, seed=1)])
        second = serve(cluster, longer, durability)
        assert second.placement.restored is not None
        assert second.placement.owner != first.placement.owner
        assert (second.placement.restored.tokens, second.placement.restored.mark) == (100, first.mark)
        assert second.mark == never_moved(model, longer)
        assert all(usage.bytes_reserved == 0 for usage in cluster.cache.usage().values())
        assert set(free_bytes(cluster)) == {16 * MIB}


@pytest.mark.parametrize("count", [1, 16, 37])
def test_a_suspended_set_goes_on_elsewhere_with_all_its_ranks(cluster: LocalCluster, count: int) -> None:
    served = compute(cluster, some_tokens(count))
    before = cluster.cache.usage()["host"].bytes_used
    ticket = cluster.router.suspend(served.run.source, "local", HOST, deadline_s=5)
    assert {planned.key.rank for planned in ticket.plan.frames} == {0, 1}
    assert set(free_bytes(cluster)) == {16 * MIB}
    resumed = cluster.router.resume(ticket, count + 50, deadline_s=5)
    assert resumed.mark == served.mark == never_moved(MODEL, some_tokens(count))
    longer = np.concatenate([some_tokens(count), some_tokens(9, seed=1)])
    run = cluster.workers[resumed.source.owner].run(resumed.source, Prompt(longer), (), deadline_s=5)
    assert run.marks[-1] == never_moved(MODEL, longer)
    assert cluster.cache.pins() == 0
    assert before == 0


def test_a_suspended_sets_own_frames_go_with_its_ticket(cluster: LocalCluster) -> None:
    """Where another set has stored the prefix, a suspended one insists on its own bytes, of every rank."""
    serve(cluster, some_tokens(40))
    used = cluster.cache.usage()["host"].bytes_used
    lease = cluster.workers["worker-1"].reserve(cluster.namespace, 60, 30.0, deadline_s=5)
    run = cluster.workers["worker-1"].run(lease, Prompt(some_tokens(40)), (), deadline_s=5)
    ticket = cluster.router.suspend(run.source, "local", HOST, deadline_s=5)
    private = {planned.key.private for planned in ticket.plan.frames}
    assert len(private - {0}) == 1, "one computation"
    assert {planned.key.rank for planned in ticket.plan.frames if planned.key.private} == {0, 1}
    assert cluster.cache.usage()["host"].bytes_used > used
    assert cluster.router.resume(ticket, 60, deadline_s=5).mark == run.marks[-1]
    assert cluster.cache.usage()["host"].bytes_used == used


def test_a_replay_through_sets() -> None:
    settings = ReplaySettings(ClusterSettings(2, WorkerSettings(MODEL, block_tokens=512, shards=2)), requests=30)
    with LocalCluster(settings.cluster) as cluster:
        result = replay(Trace(SAMPLE_PATH), cluster, settings)
    assert (result.mismatches, result.failures_by_reason) == (0, {})
    assert result.restores > 10
    assert result.restores_on_other_worker > 0


# All or none


@pytest.mark.parametrize("rank", range(SHARDS))
def test_room_is_held_on_all_ranks_or_on_none(
    cluster: LocalCluster, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(cluster, f"worker-0.{rank}", "reserve", CapacityError("full"), monkeypatch)
    with pytest.raises(CapacityError, match="full"):
        cluster.workers["worker-0"].reserve(cluster.namespace, 50, 30.0, deadline_s=5)
    assert set(free_bytes(cluster)) == {16 * MIB}
    assert compute(cluster, some_tokens(20)).placement.owner == "worker-1"


@pytest.mark.parametrize("rank", range(SHARDS))
@pytest.mark.parametrize("error", [CapacityError("full"), TierError("dead", retryable=True), DeadlineError("late")])
def test_a_restore_that_one_rank_cannot_do_leaves_nothing_on_the_others(
    cluster: LocalCluster, rank: int, error: TieredCacheError, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(cluster, some_tokens(40))
    failing(cluster, f"worker-0.{rank}", "inject", error, monkeypatch)
    longer = np.concatenate([some_tokens(40), some_tokens(9, seed=1)])
    placements = [cluster.router.place(cluster.namespace, Prompt(longer), 60, deadline_s=5) for _ in range(2)]
    assert [(p.owner, p.restored_tokens) for p in placements] == [("worker-1", 40)] * 2
    assert all(owner.engine.bytes_free() == 16 * MIB for name, owner in cluster.owners.items() if "worker-0" in name)


def test_what_says_most_about_the_plan_is_what_the_set_says(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad frame on one rank is reported, whatever the other one met."""
    serve(cluster, some_tokens(40))
    failing(cluster, "worker-0.0", "inject", TierError("dead"), monkeypatch)
    failing(cluster, "worker-0.1", "inject", ChecksumError("a bit"), monkeypatch)
    plan = cluster.tiering.match(cluster.namespace, Prompt(some_tokens(45)), 30.0, deadline_s=5).plan
    assert plan is not None
    with pytest.raises(ChecksumError):
        cluster.workers["worker-0"].inject(plan, Prompt(some_tokens(45)), 60, b"", deadline_s=5)


@pytest.mark.parametrize("rank", range(SHARDS))
def test_a_run_that_fails_on_one_rank_releases_the_sequence_on_all(
    cluster: LocalCluster, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(cluster, some_tokens(40))
    longer = Prompt(np.concatenate([some_tokens(40), some_tokens(9, seed=1)]))
    placement = cluster.router.place(cluster.namespace, longer, 60, deadline_s=5)
    assert placement.restored is not None
    with monkeypatch.context() as patch:
        failing(cluster, f"{placement.owner}.{rank}", "run", TierError("dead"), patch)
        with pytest.raises(TierError, match="dead"):
            cluster.workers[placement.owner].run(placement.restored.source, longer, (), deadline_s=5)
    assert set(free_bytes(cluster)) == {16 * MIB}


@pytest.mark.parametrize("call", ["suspend", "export"])
@pytest.mark.parametrize("rank", range(SHARDS))
def test_a_suspend_that_fails_on_one_rank_leaves_all_running(
    cluster: LocalCluster, rank: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = compute(cluster, some_tokens(40))
    with monkeypatch.context() as patch:
        failing(cluster, f"{served.placement.owner}.{rank}", call, TierError("it failed"), patch)
        with pytest.raises(TierError, match="it failed"):
            cluster.router.suspend(served.run.source, "local", HOST, deadline_s=5)
    longer = Prompt(np.concatenate([some_tokens(40), some_tokens(9, seed=1)]))
    run = cluster.workers[served.placement.owner].run(served.run.source, longer, (), deadline_s=5)
    assert run.marks[-1] == never_moved(MODEL, longer.tokens)
    assert cluster.cache.pins() == 0


# Shards that are missing


def test_a_checkpoint_that_one_rank_did_not_bring_is_none_and_the_next_set_heals_it(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = compute(cluster, some_tokens(40))
    with monkeypatch.context() as patch:
        failing(cluster, f"{served.placement.owner}.1", "export", TierError("dead"), patch)
        with pytest.raises(TierError, match="dead"):
            cluster.tiering.spill(served.run.offer, HOST, Hints(), None, deadline_s=5)
    longer = np.concatenate([some_tokens(40), some_tokens(9, seed=1)])
    miss = compute(cluster, longer)
    assert (miss.placement.restored, miss.placement.reason) == (None, MissReason.SHARD_MISSING)
    again = compute(cluster, some_tokens(40))
    healed = cluster.tiering.spill(again.run.offer, HOST, Hints(), None, deadline_s=5)
    assert [kept.tokens for kept in healed.kept] == [40]
    assert {receipt.key.rank for receipt in healed.receipts if receipt.created} == {1}, "the other rank's are there"
    hit = compute(cluster, longer)
    assert hit.placement.restored_tokens == 40
    assert hit.mark == never_moved(MODEL, longer)


@pytest.mark.parametrize("missing", range(SHARDS))
def test_two_sets_that_race_heal_each_other(cluster: LocalCluster, missing: int) -> None:
    """One has brought the first rank's frames, the other one the second's: they are of one prefix."""
    one, other = (
        cluster.workers[name].run(
            cluster.workers[name].reserve(cluster.namespace, 60, 30.0, deadline_s=5),
            Prompt(some_tokens(40)),
            (),
            deadline_s=5,
        )
        for name in ("worker-0", "worker-1")
    )
    cluster.tiering.spill(one.offer.offers()[missing], HOST, Hints(), None, deadline_s=5)
    assert compute(cluster, some_tokens(45)).placement.restored is None
    kept = cluster.tiering.spill(other.offer, HOST, Hints(), None, deadline_s=5).kept
    assert [checkpoint.tokens for checkpoint in kept] == [40]
    longer = np.concatenate([some_tokens(40), some_tokens(9, seed=1)])
    hit = compute(cluster, longer)
    assert hit.placement.restored_tokens == 40
    assert hit.mark == never_moved(MODEL, longer)


# Card 07: another layout of as many bytes


def test_a_lone_owner_and_a_larger_set_are_refused_by_name(cluster: LocalCluster) -> None:
    serve(cluster, some_tokens(40))
    plan = cluster.tiering.match(cluster.namespace, Prompt(some_tokens(45)), 30.0, deadline_s=5).plan
    assert plan is not None
    alone = ReferenceEngine(MODEL)
    assert alone.identity == cluster.identity
    with pytest.raises(GeometryError, match="shards"):
        alone.geometry.check(cluster.geometry)
    owner = SequenceOwner(alone, name="alone", node="local", tiering=cluster.tierings.__getitem__)
    assert cluster.tiering.match(owner.namespace, Prompt(some_tokens(45)), 30.0, deadline_s=5).reason is (
        MissReason.NAMESPACE
    )
    with pytest.raises(IdentityError):
        owner.inject(plan, Prompt(some_tokens(45)), 60, b"", deadline_s=5)
    four = OwnerSet("four", [*cluster.owners.values()], InlineExecutor())
    with pytest.raises(GeometryError, match="shards is 2, and four has 4 ranks"):
        four.describe(deadline_s=5)
    with pytest.raises(GeometryError, match="shards is 2, and one has 1 ranks"):
        OwnerSet("one", [cluster.owners["worker-0.0"]], InlineExecutor()).describe(deadline_s=5)
    with pytest.raises((StateError, FrameNotFoundError)):
        four.inject(plan, Prompt(some_tokens(45)), 60, b"", deadline_s=5)
    assert set(free_bytes(cluster)) == {16 * MIB}


def test_a_reference_of_other_ranks_is_refused(cluster: LocalCluster) -> None:
    served = compute(cluster, some_tokens(20))
    worker, source = cluster.workers[served.placement.owner], served.run.source
    calls: list[Callable[[], object]] = [
        lambda: worker.release(source._replace(ranks=()), deadline_s=5),
        lambda: worker.wake(source._replace(ranks=source.ranks[:1]), deadline_s=5),
        lambda: worker.run(source.ranks[0], Prompt(some_tokens(30)), (), deadline_s=5),
    ]
    for call in calls:
        with pytest.raises(GeometryError, match=r"a sequence of [01] ranks on worker-\d, which has 2"):
            call()
    ticket = cluster.router.suspend(source, "local", HOST, deadline_s=5)
    with pytest.raises(StateError, match="sampler state"):
        cluster.router.resume(replace(ticket, sampler_state=b"\x91\x01"), 60, deadline_s=5)


def test_an_offer_that_is_not_one_of_every_rank_is_refused_before_a_byte_moves(cluster: LocalCluster) -> None:
    served = compute(cluster, some_tokens(40))
    first, second = served.run.offer.offers()
    other = compute(cluster, some_tokens(40, seed=1)).run.offer.offers()[1]
    for others, why in (
        ((first,), "rank 1 is missing; rank 0 comes 2 times"),
        ((second, second), "rank 1 comes 2 times"),
        ((other,), "rank 1 has other hashes, checkpoints than rank 0"),
        ((replace(second, others=(second,)),), "others of its own"),
    ):
        with pytest.raises(IdentityError, match=why):
            cluster.tiering.spill(replace(first, others=others), HOST, Hints(), 60.0, deadline_s=5)
    assert cluster.cache.usage()["host"].entries == 0
    assert [k.tokens for k in cluster.tiering.spill(served.run.offer, HOST, Hints(), None, deadline_s=5).kept] == [40]
