"""`Catalogue` and `SharedStore`: leases, one budget for all, restarts, lost and bad objects, and who waits for what."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import obstore
import pytest
from serving import DEADLINE_S, MODELS, compute, never_moved, serve
from serving import some_tokens as prompt_tokens
from sites import OBJECT, Site, as_hit, open_grants
from spilling import GEOMETRIES, LINEAGE, NO_HINTS, Clock, restore, some_tokens

from tiered_cache.cache import Kept, Offer, TieredCache
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.deadline import Deadline, until
from tiered_cache.errors import IdentityError, MissReason, StaleError, StateError, TieredCacheError, TierError
from tiered_cache.identity import Tokens
from tiered_cache.index import Chain, Match, RemovalReason, TierView
from tiered_cache.level import Landed
from tiered_cache.policy.base import Hints, Request
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service import catalogue as catalogue_module
from tiered_cache.service.catalogue import LATE_S, RELIST_S
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import CATALOGUE, Prompt, RestorePlan
from tiered_cache.testing.faults import Fault
from tiered_cache.testing.object_servers import FaultyS3Server, HttpFault
from tiered_cache.testing.tier_suite import seeded
from tiered_cache.tiers.base import Durability

TOKENS = some_tokens(11)


@pytest.fixture
def site() -> Site:
    return Site()


def cut_off(site: Site, node: TieredCache, tokens: Tokens = TOKENS) -> Callable[[], tuple[Kept, ...]]:
    """A node puts all it has been granted, and stops before the commit; returns the commit."""
    state = site.state(tokens)
    offer = state.offer()
    grant = node.admit(offer, OBJECT, NO_HINTS)
    assert grant.loan is not None
    node._keep(grant, offer, state.export(offer, grant.keys), node._state.namespace(offer.namespace))
    return grant.loan.commit


# One for all


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_what_one_node_has_put_another_restores_after_the_first_has_died(geometry: str) -> None:
    site = Site(GEOMETRIES[geometry])
    first, second = site.nodes
    state = site.state(TOKENS)
    ranks = range(site.geometry.shards)
    spilled = [site.spill(first, state._replace(rank=rank)) for rank in ranks]
    assert all(kept.durability is OBJECT for one in spilled for kept in one.kept)
    end = spilled[-1].kept[-1].tokens
    first.close()
    assert site.restored(second, TOKENS) == end
    site.start_catalogue()
    assert site.restored(second, TOKENS) == end
    site.check()


def test_what_is_there_is_not_put_again(site: Site) -> None:
    first, second = site.nodes
    assert site.spill(first, site.state(TOKENS)).receipts
    again = site.spill(second, site.state(TOKENS, lineage=8))
    assert [r.durability for r in again.receipts] == [Durability.HOST] * len(again.receipts)
    assert [kept.durability for kept in again.kept] == [OBJECT]
    assert site.restored(second, TOKENS) == len(TOKENS)


def test_two_nodes_that_put_the_same_at_once_both_succeed(site: Site) -> None:
    first, second = site.nodes
    commits = [cut_off(site, first), cut_off(site, second)]
    for commit in commits:
        assert [kept.durability for kept in commit()] == [OBJECT]
    assert site.restored(second, TOKENS) == len(TOKENS)
    site.check()


def test_all_nodes_share_one_budget() -> None:
    site = Site(object_bytes=24_000)
    for seed in range(12):
        site.spill(site.nodes[seed % 2], site.state(some_tokens(11, seed)))
        assert site.budget.usage().bytes_free >= 0
        site.check()
    found = [site.restored(site.nodes[0], some_tokens(11, seed)) for seed in range(12)]
    assert 0 < sum(tokens == 11 for tokens in found) < 12
    assert site.objects() == site.listed()
    assert site.match(some_tokens(11, 0)).reason is MissReason.EVICTED


def test_a_host_under_pressure_hands_over_to_the_store_and_then_drops() -> None:
    site = Site(host_bytes=24_000)
    node, other = site.nodes
    for seed in range(8):
        assert site.spill(node, site.state(some_tokens(11, seed)), durability=Durability.HOST).kept
    counters = node.counters()
    assert counters["dropped.host.moved"] > 0
    assert counters.get("dropped.host.evicted", 0) == 0
    longer = [site.state(np.append(some_tokens(11, seed), TOKENS)) for seed in range(8)]
    here = {seed for seed, state in enumerate(longer) if node.match(state.chain, NO_HINTS).hit}
    there = {seed for seed in range(8) if site.restored(other, some_tokens(11, seed)) == 11}
    assert here | there == set(range(8))
    site.check()


@pytest.mark.parametrize("has_disk", [False, True])
def test_the_ranks_of_a_set_come_together_from_the_nodes_that_hold_one_each(tmp_path: Path, has_disk: bool) -> None:
    site = Site(GEOMETRIES["sharded"], host_bytes=16_000, disk=tmp_path if has_disk else None)
    for seed in range(24 if has_disk else 8):
        for rank, node in enumerate(site.nodes):
            state = site.state(some_tokens(8, seed))._replace(rank=rank)
            site.spill(node, state, durability=Durability.HOST)
    assert all(node.counters()["dropped.host.moved"] > 0 for node in site.nodes)
    if has_disk:
        assert all(node.counters()["dropped.disk.moved"] > 0 for node in site.nodes)
    assert site.restored(site.nodes[0], some_tokens(8, 0)) == 8
    site.check()
    for node in site.nodes:
        assert not node.counters().get("dropped.host.evicted")
        node.close()


def test_pins_hold_and_when_all_is_pinned_the_new_spill_is_declined() -> None:
    site = Site(object_bytes=24_000, host_bytes=0)
    for seed in range(12):
        site.spill(site.nodes[0], site.state(some_tokens(11, seed)))
    plans = {seed: plan for seed in range(12) if (plan := site.match(some_tokens(11, seed)).plan)}
    assert 3 < len(plans) < 12
    for seed in range(20, 30):
        spilled = site.spill(site.nodes[1], site.state(some_tokens(11, seed)))
        assert (spilled.kept, len(spilled.grant.declined)) == ([], 1)
    for seed, plan in plans.items():
        assert restore(site.nodes[1], site.geometry, as_hit(plan), some_tokens(11, seed))
    site.clock.now_s += 31.0
    assert site.spill(site.nodes[1], site.state(some_tokens(11, 30))).kept


def test_hints_of_what_is_left_on_a_node_hold_in_the_store() -> None:
    site = Site()
    offer = site.state(TOKENS).offer()
    site.spill(site.nodes[0], site.state(TOKENS))
    site.current.left(offer, Hints(ttl_s=5.0), deadline_s=1.0)
    assert site.match(TOKENS).plan is not None, "what was there for good stays so"
    other = site.state(some_tokens(9, 5))
    grant = site.nodes[0].admit(other.offer(), OBJECT, Hints(ttl_s=5.0))
    site.nodes[0].spill(grant, [other.export(other.offer(), grant.keys)])
    assert site.match(other.tokens, pin_s=1.0).plan is not None
    site.clock.now_s += 6.5
    assert site.match(other.tokens).reason is MissReason.EXPIRED
    site.catalogue.maintain()
    assert site.objects() == site.listed()


class Learner(LruPolicy):
    """Remembers which look-ups began, and which of them it was told the end of."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[Request] = []
        self.ended: list[Request] = []

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        self.began.append(request)
        return super().start(request, match, hints, now_s, resident)

    def finish(self, request: Request, chain: Chain, output_tokens: int, hints: Hints, now_s: float) -> tuple[int, ...]:
        self.ended.append(request)
        return super().finish(request, chain, output_tokens, hints, now_s)


@pytest.mark.parametrize("spilled", [False, True])
def test_the_stores_policy_learns_how_a_look_up_of_its_own_has_ended(spilled: bool) -> None:
    site = Site(policy=Learner)
    assert isinstance(site.policy, Learner)
    replies = [site.match(tokens) for tokens in (TOKENS, some_tokens(11, 1))]
    first, second = site.policy.began
    end = site.state(np.append(TOKENS, np.uint32(2_000)).astype(np.uint32))
    offer = replace(end.offer(), request=77, store_request=replies[0].request)
    if spilled:
        assert site.catalogue.admit(offer, NO_HINTS, 9.0, deadline_s=5).keys
    else:
        site.catalogue.left(offer, NO_HINTS, deadline_s=5)
    assert site.policy.ended == [first]
    site.catalogue.left(replace(offer, store_request=replies[1].request), NO_HINTS, deadline_s=5)
    assert first not in site.policy.ended[1:], "an end is told once"
    assert second not in site.policy.ended, "that was another prompt's: of another catalogue's numbers, say"


def test_a_placement_names_both_look_ups(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.catalogue is not None
    told: list[Offer] = []
    monkeypatch.setattr(cluster.catalogue.cache, "lend", lambda offer, _: told.append(offer) or pytest.fail("enough"))
    served = compute(cluster, prompt_tokens(50))
    offer = served.placement.named(served.run.offer, output_tokens=3)
    with pytest.raises(pytest.fail.Exception):
        cluster.tiering.spill(offer, Durability.DISK, NO_HINTS, None, deadline_s=DEADLINE_S)
    assert served.placement.store_request is not None
    assert [(one.request, one.output_tokens) for one in told] == [(served.placement.store_request, 3)]


# Leases


def test_nothing_is_found_or_acknowledged_before_the_commit(site: Site) -> None:
    commit = cut_off(site, site.nodes[0])
    assert site.objects()
    assert site.listed() == set()
    assert site.match(TOKENS).reason is MissReason.NOT_STORED
    commit()
    assert site.listed() == site.objects()
    assert site.restored(site.nodes[1], TOKENS) == 11
    with pytest.raises(TierError, match="lease is over"):
        commit()


def test_a_holder_that_dies_costs_nothing_but_its_time(site: Site) -> None:
    commit = cut_off(site, site.nodes[0])
    assert site.budget.usage().bytes_reserved > 0
    site.clock.now_s += 60.0
    site.catalogue.maintain()
    usage = site.budget.usage()
    assert (usage.bytes_reserved, usage.entries, site.objects()) == (0, 1, set())  # the descriptor
    with pytest.raises(TierError, match="lease is over"):
        commit()
    assert site.spill(site.nodes[1], site.state(TOKENS)).kept
    site.clock.now_s += LATE_S
    site.catalogue.maintain()
    assert site.restored(site.nodes[0], TOKENS) == 11
    site.check()


def test_a_lease_is_no_longer_than_its_holder_has_time(site: Site) -> None:
    with until(Deadline.after(9.0, site.clock)):
        cut_off(site, site.nodes[0])
    (lent,) = site.catalogue._leases.values()
    assert lent.until_s == site.clock.now_s + 9.0 + 5.0
    site.clock.now_s += 14.0
    site.catalogue.maintain()
    assert site.budget.usage().bytes_reserved == 0


def test_a_lease_that_is_over_is_refused_before_anybody_has_swept(site: Site) -> None:
    commit = cut_off(site, site.nodes[0])
    site.clock.now_s += 60.0
    with pytest.raises(TierError, match="lease is over"):
        commit()
    assert site.listed() == set()


def test_a_holder_stops_writing_when_its_time_is_over(site: Site) -> None:
    state = site.state(TOKENS)
    offer = state.offer()
    grant = site.nodes[0].admit(offer, OBJECT, NO_HINTS)
    site.clock.now_s += 60.0
    with pytest.raises(TierError, match="lease is over"):
        site.nodes[0].spill(grant, [state.export(offer, grant.keys)])
    assert site.objects() == set()


def test_an_abandoned_lease_leaves_nothing(site: Site) -> None:
    node, state = site.nodes[0], site.state(TOKENS)
    grant = node.admit(state.offer(), OBJECT, NO_HINTS)
    node.abandon(grant)
    node.abandon(grant)
    assert open_grants(site) == []
    assert site.budget.usage().bytes_reserved == 0
    with pytest.raises(StateError, match="did not come"):
        node.spill(node.admit(state.offer(), OBJECT, NO_HINTS), [])
    assert open_grants(site) == []
    site.check()


@pytest.mark.parametrize("late", ["before its objects are looked after again", "after that"])
def test_a_put_that_comes_after_the_lease_is_over_leaves_nothing_in_the_end(site: Site, late: str) -> None:
    state = site.state(TOKENS)
    offer = state.offer()
    grant = site.nodes[0].admit(offer, OBJECT, NO_HINTS)
    key = grant.keys[0]
    site.nodes[0].abandon(grant)
    site.catalogue.maintain()
    if late == "after that":
        site.clock.now_s += LATE_S + 1
        site.catalogue.maintain()
    obstore.put(site.store, f"entries/{key.path()}.blob", b"late")
    assert site.objects() == {key.path()}
    site.clock.now_s += LATE_S if late != "after that" else RELIST_S
    site.catalogue.maintain()
    site.catalogue.maintain()
    assert site.objects() == set()
    assert site.budget.usage().entries == 1


def test_a_late_put_does_not_undo_what_another_has_put_since(site: Site) -> None:
    first, second = site.nodes
    cut_off(site, first)
    site.clock.now_s += 60.0
    assert site.spill(second, site.state(TOKENS)).kept
    site.clock.now_s += LATE_S + 1
    site.catalogue.maintain()
    assert site.restored(first, TOKENS) == 11


def test_a_lease_of_an_earlier_catalogue_is_refused(site: Site) -> None:
    commit = cut_off(site, site.nodes[0])
    site.start_catalogue()
    with pytest.raises(TierError, match="lease is over"):
        commit()
    assert site.spill(site.nodes[1], site.state(TOKENS)).kept
    assert site.restored(site.nodes[0], TOKENS) == 11
    site.check()


def test_what_was_not_granted_is_refused_and_the_lease_is_over(site: Site) -> None:
    offer = site.state(TOKENS).offer()
    lease = site.catalogue.admit(offer, NO_HINTS, 60.0, deadline_s=1)
    landed = tuple(Landed(key, 100, LINEAGE, created=True) for key in lease.keys)
    foreign = (*landed, Landed(replace(lease.keys[0], prefix=b"x" * 32), 100, LINEAGE, created=True))
    with pytest.raises(StateError, match="not granted"):
        site.catalogue.commit(lease.number, lease.generation, foreign, (), deadline_s=1)
    with pytest.raises(StaleError):
        site.catalogue.commit(lease.number, lease.generation, landed, (), deadline_s=1)
    lease = site.catalogue.admit(offer, NO_HINTS, 60.0, deadline_s=1)
    with pytest.raises(StateError, match="did not come"):
        site.catalogue.commit(lease.number, lease.generation, landed[1:], (), deadline_s=1)
    assert site.listed() == set()
    assert site.budget.usage().bytes_reserved == 0


def test_nothing_is_deleted_whose_name_is_lent(site: Site) -> None:
    """An eviction whose delete has not been done yet must not hit the object that replaces it."""
    first, second = site.nodes
    site.spill(first, site.state(TOKENS))
    level = site.catalogue.cache._levels[0]
    names = [name for name, _ in site.catalogue.cache._index.names("object")]
    level.drop((prefix, RemovalReason.EVICTED) for prefix in list(level.view))
    assert site.listed() == set()
    assert site.objects(), "deletes are done later"
    for _ in range(3):  # upkeep tries, admission does, and lending
        site.tier.inject("delete", Fault.ERROR)
    with pytest.raises(TierError, match="still to be deleted"):
        second.admit(site.state(TOKENS).offer(), OBJECT, NO_HINTS)
    commit = cut_off(site, second)
    level.delete(names)
    site.catalogue.maintain()
    commit()
    assert site.restored(first, TOKENS) == 11
    site.check()


# Objects that are lost or bad


def test_lost_objects_are_forgotten_when_a_reader_misses_them(site: Site) -> None:
    site.spill(site.nodes[0], site.state(TOKENS))
    other = some_tokens(11, 3)
    site.spill(site.nodes[0], site.state(other))
    reply = site.match(TOKENS)
    assert reply.plan is not None
    for planned in reply.plan.frames:
        obstore.delete(site.store, f"entries/{planned.key.path()}.blob")
    keys = [planned.key for planned in reply.plan.frames]
    assert set(site.nodes[1].fetch(keys, 1 << 20)) == {MissReason.LOST}
    again = site.match(TOKENS)
    assert (again.plan, again.reason) == (None, MissReason.LOST)
    assert site.restored(site.nodes[1], other) == 11
    assert site.catalogue.counters()["frames.object.lost"] > 0
    assert site.spill(site.nodes[1], site.state(TOKENS)).kept, "and can be put again"
    site.check()


def test_lost_and_foreign_objects_are_found_by_listing_anew(site: Site) -> None:
    for seed in range(3):
        site.spill(site.nodes[0], site.state(some_tokens(11, seed)))
    before, count = site.objects(), site.budget.usage().entries
    plan = site.match(some_tokens(11, 0)).plan
    assert plan is not None
    for planned in plan.frames:
        obstore.delete(site.store, f"entries/{planned.key.path()}.blob")
    other = Site()
    other.spill(other.nodes[0], other.state(some_tokens(11, 9)))
    for path in other.objects():  # as somebody copies it who asks nobody
        name = f"entries/{path}.blob"
        obstore.put(site.store, name, obstore.get(other.store, name).bytes())
    site.clock.now_s += RELIST_S
    site.catalogue.maintain()
    assert site.match(some_tokens(11, 0)).reason is MissReason.LOST
    assert site.restored(site.nodes[1], some_tokens(11, 9)) == 11
    assert site.restored(site.nodes[1], some_tokens(11, 1)) == 11
    assert site.objects() == site.listed()
    assert site.budget.usage().entries == count
    assert before - site.objects()
    site.check()


def change(site: Site, path: str, at: int = -1) -> None:
    name = f"entries/{path}.blob"
    raw = bytearray(memoryview(obstore.get(site.store, name).bytes()))
    raw[at] ^= 1
    obstore.put(site.store, name, bytes(raw))


def test_a_bad_object_is_set_aside_when_a_reader_reports_it(site: Site) -> None:
    site.spill(site.nodes[0], site.state(TOKENS))
    plan = site.match(TOKENS).plan
    assert plan is not None
    key = plan.frames[0].key
    site.catalogue.report_bad(key, "says somebody", deadline_s=1)
    assert site.match(TOKENS).plan is not None, "it is sound, whatever somebody says"
    change(site, key.path())
    site.catalogue.report_bad(key, "says somebody", deadline_s=1)
    assert site.match(TOKENS).reason is MissReason.QUARANTINED
    assert site.spill(site.nodes[1], site.state(TOKENS)).kept
    assert site.restored(site.nodes[1], TOKENS) == 11
    assert len(site.tier.quarantined()) == 1
    site.check()


def test_what_is_bad_after_a_restart_is_not_relied_on(site: Site) -> None:
    """The node reads what it would build on, once for all, and the catalogue nothing but what is bad."""
    longer = np.concatenate([TOKENS[:8], some_tokens(7, 5)])
    site.spill(site.nodes[0], site.state(TOKENS))
    plan = site.match(TOKENS).plan
    assert plan is not None
    bad = next(p.key for p in plan.frames if p.key.tokens == 4)
    change(site, bad.path())
    site.start_catalogue()
    spilled = site.spill(site.nodes[1], site.state(longer))
    assert [(kept.tokens, kept.durability) for kept in spilled.kept] == [(15, OBJECT)]
    assert bad in {receipt.key for receipt in spilled.receipts if receipt.durability is OBJECT}
    assert site.restored(site.nodes[0], longer) == 15
    further = site.state(np.concatenate([longer, some_tokens(3, 6)]))
    lease = site.catalogue.admit(further.offer(), NO_HINTS, 60.0, deadline_s=1)
    assert (len(lease.keys) > 0, lease.unread) == (True, ())
    site.check()


def test_a_bad_object_in_the_place_of_a_new_one_is_set_aside(site: Site) -> None:
    state = site.state(TOKENS)
    grant = site.nodes[0].admit(state.offer(), OBJECT, NO_HINTS)
    obstore.put(site.store, f"entries/{grant.keys[0].path()}.blob", b"not a frame")
    site.nodes[0].spill(grant, [state.export(state.offer(), grant.keys)])
    assert site.restored(site.nodes[1], TOKENS) == 11
    assert len(site.tier.quarantined()) == 1
    site.check()


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.LOST_ANSWER])
@pytest.mark.parametrize("call", ["put", "get"])
def test_a_store_that_fails_a_node_acknowledges_nothing(site: Site, call: str, fault: Fault) -> None:
    if call == "get" and fault is Fault.LOST_ANSWER:
        fault = Fault.SHORT
    site.clients[0].inject(call, fault)
    if fault is Fault.SHORT:  # read again, it is sound: nothing is replaced
        assert site.spill(site.nodes[0], site.state(TOKENS)).kept
    else:
        with pytest.raises(TierError):
            site.spill(site.nodes[0], site.state(TOKENS))
        assert site.listed() == set()
        assert open_grants(site) == []
    assert site.spill(site.nodes[1], site.state(TOKENS)).kept
    site.catalogue.maintain()
    site.clock.now_s += LATE_S + 1
    site.catalogue.maintain()
    assert site.restored(site.nodes[0], TOKENS) == 11
    assert site.objects() == site.listed()
    site.check()


# Who waits for what


def test_look_ups_never_ask_the_store(site: Site) -> None:
    site.spill(site.nodes[0], site.state(TOKENS))
    site.spill(site.nodes[0], site.state(some_tokens(9, 2)), private=True)
    site.catalogue._maintaining = True  # as if another thread were at it
    site.tier.rates = {Fault.ERROR: 1.0}
    before = site.tier.injected[Fault.ERROR]
    reply = site.match(TOKENS)
    assert reply.plan is not None
    assert site.catalogue.unpin(reply.plan.pin, reply.plan.generation, deadline_s=1)
    site.catalogue.left(site.state(TOKENS).offer(), NO_HINTS, deadline_s=1)
    assert site.tier.injected[Fault.ERROR] == before


def test_nodes_and_upkeep_at_once_leave_nothing_listed_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions, late deletes and new puts of the same names, by four nodes on threads of their own."""
    monkeypatch.setattr(catalogue_module, "MAINTAIN_S", 0.0)
    monkeypatch.setattr(catalogue_module, "RELIST_S", 0.05)
    site = Site(object_bytes=24_000, host_bytes=8_000, nodes=4, look_s=1.0)
    steps = itertools.count()
    monkeypatch.setattr(Clock, "__call__", lambda _: 100.0 + next(steps) * 1e-3)

    def run(number: int) -> int:
        rng, restored = seeded(number), 0
        for _ in range(40):
            tokens = some_tokens(11, rng.randrange(12))
            with suppress(TierError):  # the name is still to be deleted, say
                site.spill(site.nodes[number], site.state(tokens), durability=rng.choice([OBJECT, Durability.HOST]))
            try:
                restored += site.restored(site.nodes[number], tokens) == 11
            except AssertionError as error:  # taken out before it was pinned
                assert str(error).endswith(" is lost"), error  # noqa: PT017
        return restored

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(run, range(4))) > 20
    site.catalogue.maintain()
    assert open_grants(site) == []
    assert site.listed() <= site.objects()
    assert "frames.object.lost" not in site.catalogue.counters()
    site.check(strays=site.objects())
    late = next(until_s for until_s, _ in site.catalogue._late) if site.catalogue._late else 0.0
    monkeypatch.setattr(Clock, "__call__", lambda _: max(1e6, late))
    site.catalogue.maintain()
    site.catalogue.maintain()
    assert site.listed() == site.objects()


def test_a_store_that_hangs_holds_up_only_who_needs_it(tmp_path: Path) -> None:
    with FaultyS3Server() as server:
        tiers = TierSettings(
            host_bytes=64 << 20,
            object_url="s3://bucket/p",
            object_bytes=64 << 20,
            object_options=server.options,
            object_deadline_s=30.0,
        )
        with (
            LocalCluster(ClusterSettings(workers=2, worker=WorkerSettings(engine=MODELS[0]), tiers=tiers)) as cluster,
            ThreadPoolExecutor(1) as pool,
        ):
            here, there = prompt_tokens(60, seed=1), prompt_tokens(60, seed=2)
            assert serve(cluster, here).spill.kept
            server.fail_always(HttpFault(delay_s=30.0))
            hanging = pool.submit(serve, cluster, there, OBJECT, deadline_s=6.0)
            while not server.requests["PUT"] > 1:  # the descriptor was the first
                time.sleep(0.01)
            longer = np.concatenate([here, prompt_tokens(9, seed=3)])
            assert serve(cluster, longer).placement.restored_tokens == 60
            assert not hanging.done()
            with pytest.raises(TierError):
                hanging.result()
            server.recover()


def test_a_dead_catalogue_is_an_error_in_time_and_hosts_serve_on(site: Site) -> None:
    site.current.catalogue = None
    node = site.nodes[0]
    with pytest.raises(TierError, match="dead"):
        site.spill(node, site.state(TOKENS))
    assert site.spill(node, site.state(TOKENS), durability=Durability.HOST).kept
    assert node.match(site.state(np.append(TOKENS, TOKENS)).chain, NO_HINTS).hit is not None
    site.start_catalogue()
    assert site.spill(node, site.state(TOKENS)).kept, "which has never heard of the namespace"


def test_a_namespace_that_is_not_registered_is_refused_not_guessed(site: Site) -> None:
    lease_of = site.catalogue.admit
    offer = site.state(TOKENS).offer()
    foreign = replace(offer, namespace=b"n" * 32)
    with pytest.raises(IdentityError):
        lease_of(foreign, NO_HINTS, 60.0, deadline_s=1)
    with pytest.raises(TieredCacheError):
        site.catalogue.introduce(offer.namespace, b"no descriptor", deadline_s=1)


# In a cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    tiers = TierSettings(host_bytes=0, object_url=f"file://{tmp_path}/objects", object_bytes=64 << 20)
    with LocalCluster(ClusterSettings(workers=2, worker=WorkerSettings(engine=MODELS[0]), tiers=tiers)) as cluster:
        yield cluster


def test_a_node_without_tiers_of_its_own_keeps_all_in_the_store(cluster: LocalCluster) -> None:
    first = serve(cluster, prompt_tokens(100))
    assert [(kept.tokens, kept.durability) for kept in first.spill.kept] == [(100, Durability.DISK)]
    longer = np.concatenate([prompt_tokens(100), prompt_tokens(33, seed=1)])
    second = serve(cluster, longer)
    assert second.placement.restored_tokens == 100
    assert second.placement.owner != first.placement.owner
    assert second.mark == never_moved(MODELS[0], longer)
    shared = [np.concatenate([prompt_tokens(70, 5), prompt_tokens(30, seed=seed)]) for seed in (1, 2, 3)]
    assert [serve(cluster, prompt).placement.restored_tokens for prompt in shared] == [0, 0, 64]


def test_a_suspended_sequence_is_kept_in_the_store_for_one_resumption(cluster: LocalCluster) -> None:
    served = compute(cluster, prompt_tokens(50))
    ticket = cluster.router.suspend(served.run.source, LocalCluster.NODE, Durability.DISK, deadline_s=DEADLINE_S)
    assert ticket.plan.node == CATALOGUE
    resumed = cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S)
    assert resumed.mark == served.mark
    with pytest.raises(StaleError):
        cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S)


def test_a_suspension_that_fails_leaves_nothing_of_its_own_in_the_store(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cluster.catalogue is not None
    served, plan_of = compute(cluster, prompt_tokens(50)), cluster.catalogue.plan_of
    serve(cluster, prompt_tokens(50))  # whose computation is another: the suspended one needs its own
    failing = [TierError("the catalogue is away")]

    def failing_once(offer: Offer, pin_s: float, *, deadline_s: float) -> RestorePlan | None:
        if failing:
            raise failing.pop()
        return plan_of(offer, pin_s, deadline_s=deadline_s)

    monkeypatch.setattr(cluster.catalogue, "plan_of", failing_once)
    with pytest.raises(TierError, match="away"):
        cluster.router.suspend(served.run.source, LocalCluster.NODE, Durability.DISK, deadline_s=DEADLINE_S)
    cluster.catalogue.cache.sweep()
    assert not [name for name, _ in cluster.catalogue.cache._index.names("object") if name.private]
    ticket = cluster.router.suspend(served.run.source, LocalCluster.NODE, Durability.DISK, deadline_s=DEADLINE_S)
    assert [name for name, _ in cluster.catalogue.cache._index.names("object") if name.private]
    assert cluster.router.resume(ticket, 100, deadline_s=DEADLINE_S).mark == served.mark


def test_upkeep_is_done_in_the_background(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.catalogue is not None
    done: list[float] = []
    monkeypatch.setattr(cluster.catalogue.cache, "sweep", lambda: done.append(1.0))
    monkeypatch.setattr(catalogue_module, "MAINTAIN_S", 0.0)
    while not done:
        cluster.catalogue.match(cluster.namespace, Prompt(prompt_tokens(9)), 1.0, deadline_s=1)
