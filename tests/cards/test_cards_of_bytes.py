"""Cards 01, 02, 10, 12 and 14: what comes back is what was kept, whole, or it does not come back."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
from forging import without_section
from obstore.store import LocalStore, MemoryStore
from places import PLACES, Place, Store, look_up, make_faulty
from serving import BLOCK, DEADLINE_S, MODELS, Served, compute, never_moved, serve, some_tokens
from sites import Site
from spilling import MIXED, Clock, State, match, node, open_disk, restore, spill
from spilling import some_tokens as some_prompt

from tiered_cache import frame
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import MissReason
from tiered_cache.identity import CHECKPOINT, FrameKey, Tokens
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import Prompt, StateMark
from tiered_cache.testing.faults import Fault, FaultyDirectory, SimulatedCrash
from tiered_cache.tiers.base import Durability, Tier
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.object_store import ObjectStoreTier

NODE = LocalCluster.NODE
MODEL = MODELS[0]
PROMPT, OTHER = some_tokens(45), some_tokens(45, seed=1)
LONGER = np.concatenate([PROMPT, some_tokens(5, seed=2)])
OTHER_LONGER = np.concatenate([OTHER, some_tokens(5, seed=3)])
ONE_TIER = pytest.mark.parametrize("place", [name for name in PLACES if name != "stack"], indirect=True)
"""Where no sound copy in another tier can be served instead."""


def release(cluster: LocalCluster, served: Served) -> None:
    cluster.workers[served.placement.owner].release(served.run.source, deadline_s=DEADLINE_S)


# Card 01


@pytest.mark.parametrize("model", MODELS)
def test_card_01_a_mixed_sequence_comes_back_byte_for_byte_on_another_worker(place: Place, model: str) -> None:
    with place.start(model, workers=3) as cluster:
        first = compute(cluster, PROMPT)
        for durability in Durability:
            if durability > place.durability:
                continue
            spilled = cluster.tierings[NODE].spill(
                first.run.offer, durability, Prompt(PROMPT).hints, None, deadline_s=DEADLINE_S
            )
            assert [(kept.tokens, kept.durability >= durability) for kept in spilled.kept] == [(45, True)]
        for name in sorted(set(cluster.workers) - {first.placement.owner}):
            plan = look_up(cluster, cluster.namespace, LONGER)
            assert plan is not None
            worker = cluster.workers[name]
            restored = worker.inject(plan, Prompt(LONGER), 100, b"", deadline_s=DEADLINE_S)
            assert restored.mark == first.mark == never_moved(model, PROMPT)
            run = worker.run(restored.source, Prompt(LONGER), (), deadline_s=DEADLINE_S)
            assert run.marks[-1] == never_moved(model, LONGER), "and what it computes next is the same"
            worker.release(run.source, deadline_s=DEADLINE_S)
        for path, body in Store(cluster, place.tier).frames().items():
            key = FrameKey.parse(path)
            shapes = {name: spec.shape for name, spec in cluster.geometry.arrays(key.group, key.tokens).items()}
            assert {s.name: s.array.shape for s in frame.read_header(body).sections} == shapes, "no row past its end"


# Card 02


def in_the_header(header: frame.FrameHeader) -> int:
    return 9


def in_a_compressed_body(header: frame.FrameHeader) -> int:
    section = max(header.sections, key=lambda section: section.stored_bytes)
    return section.offset + section.stored_bytes // 2


def in_the_last_byte(header: frame.FrameHeader) -> int:
    return header.total_bytes - 1


@pytest.mark.parametrize("where", [in_the_header, in_a_compressed_body, in_the_last_byte])
def test_card_02_one_flipped_bit_is_refused_and_touches_no_other_record(
    place: Place, where: Callable[[frame.FrameHeader], int]
) -> None:
    with place.start() as cluster:
        store = Store(cluster, place.tier)
        serve(cluster, OTHER, place.durability)
        theirs = store.frames()
        serve(cluster, PROMPT, place.durability)
        before = store.frames()
        bad = Prompt(PROMPT).chain(cluster.namespace, BLOCK).key(CHECKPOINT, 45, 0).path()
        body = bytearray(before[bad])
        body[where(frame.read_header(before[bad]))] ^= 1
        store.write(bad, bytes(body))
        above = place.name == "stack"  # a sound copy in memory: it is served
        served = serve(cluster, LONGER, place.durability)
        assert served.mark == never_moved(MODEL, LONGER)
        assert served.placement.restored_tokens == (45 if above else 0)
        after = store.frames()
        if not above:
            assert served.placement.refusals, "the caller is told"
            assert served.placement.reason in {MissReason.QUARANTINED, MissReason.VERSION, MissReason.NO_CHECKPOINT}
            assert cluster.counters()[f"cache.frames.{place.tier}.quarantined"] == 1
            assert after.get(bad) != bytes(body), "it is set aside"
        assert all(after[path] == body for path, body in theirs.items())
        again = compute(cluster, OTHER_LONGER)
        assert (again.placement.restored_tokens, again.placement.refusals) == (45, ())
        assert again.mark == never_moved(MODEL, OTHER_LONGER)


# Card 10


@ONE_TIER
@pytest.mark.parametrize("model", MODELS)
def test_card_10_without_one_part_nothing_is_restored_and_no_slot_shows_its_past(place: Place, model: str) -> None:
    """Every part is required here: of a state there is all, or none. Slots were used by others before."""
    with place.start(model) as cluster:
        for seed in range(3):
            release(cluster, compute(cluster, some_tokens(60, seed=50 + seed)))
        kept = compute(cluster, PROMPT)

        def spill_again() -> None:
            result = cluster.tierings[NODE].spill(
                kept.run.offer, place.durability, Prompt(PROMPT).hints, None, deadline_s=DEADLINE_S
            )
            assert [k.tokens for k in result.kept] == [45]

        spill_again()
        store = Store(cluster, place.tier)
        chain = Prompt(PROMPT).chain(cluster.namespace, BLOCK)
        path = chain.key(CHECKPOINT, 45, 0).path()
        names = [section.name for section in frame.read_header(store.read(path)).sections]
        assert len(names) > 3
        for name in [*(names if store.can_resize else ()), None]:
            if name is None:
                store.remove(path)
            else:
                store.write(path, without_section(store.read(path), name))
            served = compute(cluster, LONGER)
            assert served.placement.restored is None
            assert served.placement.refusals
            assert served.mark == never_moved(model, LONGER), name
            release(cluster, served)
            spill_again()
        counters = cluster.counters()
        assert counters.get(f"cache.frames.{place.tier}.quarantined", 0) == (len(names) if store.can_resize else 0)
        assert counters[f"cache.frames.{place.tier}.lost"] == 1
        served = compute(cluster, LONGER)
        assert served.placement.restored_tokens == 45


# Card 12

STATE = State(MIXED, some_prompt(30))  # seven blocks and a tail
FRAMES = 8
LEASE_S = 60.0


def offered(tier: Tier) -> int:
    """What a new node offers of the sequence, checked byte for byte."""
    with node(tier, clock=Clock()) as cache:
        hit = match(cache, MIXED, np.append(STATE.tokens, STATE.tokens[:1])).hit
        if hit is None:
            return 0
        restore(cache, MIXED, hit, STATE.tokens)
        return hit.tokens


def test_card_12_a_crash_between_parts_on_disk(tmp_path: Path) -> None:
    """At every system call, before it or half-way: nothing is offered before the commit, and all of it after."""
    steps, after_commit = None, 0
    for half_done in (False, True):
        step = 0
        while steps is None or step < steps:
            step += 1
            root = tmp_path / f"{half_done}-{step}"
            directories: list[FaultyDirectory] = []

            def open_directory(root: Path, into: list[FaultyDirectory] = directories) -> FaultyDirectory:
                into.append(FaultyDirectory(root))
                return into[-1]

            tier = DiskTier(root, 8 << 20, sync=SyncPolicy.NEVER, open_directory=open_directory)
            acknowledged = False
            try:
                with node(tier, checked=False) as cache:
                    (directory,) = directories
                    directory.die(len(directory.steps) + step, half_done=half_done)
                    acknowledged = bool(spill(cache, STATE, durability=Durability.DISK).kept)
                    directory.die(0, half_done=False)
                    steps = steps or step - 1
            except SimulatedCrash:
                directories[0].bury()
            found = offered(open_disk(root))
            assert found in {0, 30}, (half_done, step)
            assert found == 30 or not acknowledged
            after_commit += found == 30
            assert list((root / "tmp").glob("*/*")) == [], "what it left behind is gone"
    assert steps is not None
    assert steps > 20
    assert after_commit >= 2


@contextmanager
def dying_at_object(monkeypatch: pytest.MonkeyPatch, number: int, *, done: bool) -> Iterator[None]:
    """The process dies at the put of so many objects: before it, or when the store has done it."""
    real, count = obstore.put, 0

    def put(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count > number or (count == number and not done):
            raise SimulatedCrash("put")
        answer = real(*args, **options)
        if count == number:
            raise SimulatedCrash("put")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "put", put)
        yield


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_card_12_a_crash_between_parts_in_an_object_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, done: bool
) -> None:
    with ThreadPoolExecutor(1) as executor:  # one after the other
        for number in range(1, 12):
            directory = tmp_path / f"{number}"
            directory.mkdir()
            store = LocalStore(directory) if kind == "file" else MemoryStore()

            def open_tier(store: Any = store) -> ObjectStoreTier:
                return ObjectStoreTier(store, 8 << 20, executor, durability=Durability.DISK)

            kept: list[Any] = []
            with (
                dying_at_object(monkeypatch, number, done=done),
                pytest.raises(SimulatedCrash) if number <= 9 else contextmanager(lambda: iter([None]))(),
                node(open_tier(), checked=False) as cache,
            ):
                kept += spill(cache, STATE, durability=Durability.DISK).kept
            found = offered(open_tier())
            assert found in {0, 30}
            assert found == 30 or not kept
            assert bool(kept) == (number > 9)


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_card_12_a_crash_between_parts_in_a_clusters_object_store(monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
    """The node that puts dies, and so does the catalogue; a new one offers all or nothing, and tidies up."""
    for number in range(1, 12):
        site = Site(nodes=1)
        kept: list[Any] = []
        with (
            dying_at_object(monkeypatch, number, done=done),
            pytest.raises(SimulatedCrash) if number <= FRAMES else contextlib.nullcontext(),
        ):
            kept += site.spill(site.nodes[0], STATE).kept
        site.start_catalogue()
        node = site.start_node()
        found = site.restored(node, STATE.tokens)
        assert found in {0, 30}
        assert found == 30 or not kept
        site.clock.now_s += 2 * LEASE_S
        site.catalogue.maintain()
        assert site.objects() == site.listed(), "what nobody can use is gone"
        assert bool(site.objects()) == (found == 30)


# Card 14

PAGES = 64
TINY = "qsa-ple-gdn:tiny"


def pages(cluster: LocalCluster) -> Tokens:
    return some_tokens(PAGES * cluster.geometry.block_tokens + 3, seed=7)


@ONE_TIER
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.SHORT, Fault.FLIP])
def test_card_14_a_copy_that_failed_is_never_reported_as_done(
    place: Place, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    with place.start(TINY, block_tokens=4) as cluster:
        prompt = pages(cluster)
        first = serve(cluster, prompt, place.durability)
        assert [kept.tokens for kept in first.spill.kept] == [len(prompt)]
        faulty = make_faulty(cluster, place.tier, seed=14)
        faulty.inject("get", fault)
        longer = np.concatenate([prompt, some_tokens(2, seed=8)])
        with caplog.at_level(logging.WARNING):
            served = compute(cluster, longer)
        assert faulty.injected[fault] == 1
        assert served.mark == never_moved_in_blocks(cluster, longer)
        assert served.placement.restored_tokens in {0, len(prompt)}
        assert served.placement.refusals, "the failed page was told"
        counters = cluster.counters()
        told = [name for name, count in counters.items() if count and ("refus" in name or "errors" in name)]
        assert told, counters
        if fault is not Fault.ERROR:
            assert "could not use" in caplog.text
        release(cluster, served)
        again = compute(cluster, longer)
        assert (again.placement.restored_tokens, again.placement.refusals) == (len(prompt), ())
        assert again.mark == served.mark


def never_moved_in_blocks(cluster: LocalCluster, tokens: Tokens) -> StateMark:
    engine = ReferenceEngine(TINY, block_tokens=cluster.geometry.block_tokens)
    sequence = engine.start(engine.reserve(len(tokens)))
    engine.extend(sequence, tokens)
    return StateMark(len(tokens), engine.digest(sequence), engine.output(sequence))
