"""Two catalogues on one store, in memory, in a directory and on an S3 server: neither loses what either acknowledged.

An old one that goes on after a new one was started elsewhere, or two clusters that were given one prefix. The claims'
clock is a fake one; the store is real.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import MemoryStore, ObjectStore
from sites import OBJECT, Site
from spilling import LINEAGE, NO_HINTS, Clock, some_tokens

from tiered_cache.cache import Kept
from tiered_cache.check import check_tier
from tiered_cache.config import TierSettings
from tiered_cache.deadline import wait_s
from tiered_cache.errors import DeadlineError, MissReason, StaleError, TakenOverError, TierError
from tiered_cache.identity import Tokens
from tiered_cache.index import RemovalReason
from tiered_cache.level import Landed
from tiered_cache.service import catalogue as catalogue_module
from tiered_cache.service.build import ObjectPlace
from tiered_cache.service.claim import LOOKS, ClaimName, StoreClaim
from tiered_cache.service.local import InlineExecutor
from tiered_cache.service.messages import Prompt, RestorePlan
from tiered_cache.testing.object_servers import BUCKET, FaultyS3Server, HttpFault
from tiered_cache.tiers.base import PutItem
from tiered_cache.tiers.object_budget import GrantedBudget
from tiered_cache.tiers.object_store import ObjectStoreTier, open_store

TOKENS = some_tokens(11)
OTHERS = some_tokens(11, 1)
LOOK_S = 2.0
WAIT_S = LOOKS * LOOK_S


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "file":
        return open_store(f"file://{tmp_path}/objects")
    seaweed = request.getfixturevalue("seaweed")
    return open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", seaweed.options)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(store: ObjectStore, clock: Clock) -> Callable[..., Site]:
    """Starts a catalogue with nodes of its own on the one store."""

    def started(name: str, **options: Any) -> Site:
        return Site(store=store, clock=clock, name=name, **{"look_s": LOOK_S, "nodes": 1, **options})

    return started


Start = Callable[..., Site]


def claims(store: ObjectStore) -> list[str]:
    return sorted(meta["path"].removeprefix("catalogue/") for page in obstore.list(store, "catalogue") for meta in page)


def settle(site: Site) -> None:
    site.clock.now_s += WAIT_S
    site.catalogue.maintain()


def forget_all(site: Site) -> None:
    """Everything is evicted; the deletes are still to be done."""
    (level,) = site.catalogue.cache._levels
    level.drop((prefix, RemovalReason.EVICTED) for prefix in list(level.view))
    assert site.listed() == set()
    assert level._doomed


def put_all(site: Site, tokens: Tokens = TOKENS) -> Callable[[], tuple[Kept, ...]]:
    """A node puts what it was granted, and stops before the commit, which is returned."""
    node, state = site.nodes[0], site.state(tokens)
    offer = state.offer()
    grant = node.admit(offer, OBJECT, NO_HINTS)
    assert grant.loan is not None
    node._keep(grant, offer, state.export(offer, grant.keys), node._state.namespace(offer.namespace))
    return grant.loan.commit


def test_the_first_acknowledges_at_once_and_a_second_waits_and_keeps_all(start: Start, store: ObjectStore) -> None:
    old = start("old")
    assert old.spill(old.nodes[0], old.state(TOKENS)).kept
    new = start("new")
    assert new.restored(new.nodes[0], TOKENS) == 11, "look-ups wait for nothing"
    with pytest.raises(TierError, match=f"{WAIT_S:.3g} s are left") as refusal:
        new.spill(new.nodes[0], new.state(OTHERS))
    assert refusal.value.retryable
    new.clock.now_s += WAIT_S - 0.5
    with pytest.raises(TierError, match=r"0\.5 s are left"):
        new.spill(new.nodes[0], new.state(OTHERS))
    new.clock.now_s += 0.5
    assert new.spill(new.nodes[0], new.state(OTHERS)).kept
    assert [new.restored(new.nodes[0], tokens) for tokens in (TOKENS, OTHERS)] == [11, 11]
    new.check()
    assert claims(store) == [str(new.claim.name)], "the old one is collected"


def test_the_old_one_deletes_nothing_after_it_was_taken_over(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    old = start("old")
    assert old.spill(old.nodes[0], old.state(TOKENS)).kept
    new = start("new")
    settle(new)
    assert new.spill(new.nodes[0], new.state(OTHERS)).kept
    before = new.objects()
    forget_all(old)
    old.catalogue.maintain()  # which finds it out
    for _ in range(2):
        with pytest.raises(TakenOverError, match="taken over by cluster 'new 1'"):
            old.catalogue.maintain()
    assert new.objects() == before
    assert [new.restored(new.nodes[0], tokens) for tokens in (TOKENS, OTHERS)] == [11, 11]
    assert old.catalogue.counters()["claims.taken_over"] == 1
    assert len([record for record in caplog.records if "stands down" in record.message]) == 1
    new.check()


def test_who_was_taken_over_refuses_everything(start: Start) -> None:
    old = start("old")
    spilled = old.spill(old.nodes[0], old.state(TOKENS))
    key, offer = spilled.receipts[0].key, old.state(TOKENS).offer()
    new = start("new")
    old.clock.now_s += LOOK_S
    port, namespace = old.catalogue, offer.namespace
    known = old.nodes[0]._state.namespace(namespace)
    calls: list[Callable[[], object]] = [
        lambda: port.admit(offer, NO_HINTS, 9.0, deadline_s=5),  # which finds it out
        lambda: port.match(namespace, Prompt(TOKENS), 1.0, deadline_s=5),
        lambda: port.unpin(1, port.generation, deadline_s=5),
        lambda: port.plan_of(offer, 1.0, deadline_s=5),
        lambda: port.report_bad(key, "says somebody", deadline_s=5),
        lambda: port.report_absent((key,), deadline_s=5),
        lambda: port.introduce(namespace, known.descriptor(), deadline_s=5),
        lambda: port.left(offer, NO_HINTS, deadline_s=5),
        lambda: port.commit(1, port.generation, (), (), deadline_s=5),
        lambda: port.abandon(1, port.generation, (), deadline_s=5),
        port.maintain,
    ]
    for call in calls:
        with pytest.raises(TakenOverError, match="new 1"):
            call()
    with pytest.raises(TierError, match="new 1"):
        old.spill(old.nodes[0], old.state(OTHERS))
    port.close()
    assert len(claims(new.store)) == 2, "an owner that was taken over retires nothing"
    old.start_catalogue()
    new.clock.now_s += WAIT_S
    with pytest.raises(TakenOverError, match="old 2"):
        new.catalogue.admit(offer, NO_HINTS, 9.0, deadline_s=5)
    settle(old)
    assert old.spill(old.nodes[0], old.state(OTHERS)).kept, "one that was restarted claims anew"
    assert old.restored(old.nodes[0], TOKENS) == 11


def test_a_delete_that_was_under_way_hits_nothing_that_is_acknowledged(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = start("old")
    assert old.spill(old.nodes[0], old.state(TOKENS)).kept
    old.clock.now_s += LOOK_S
    forget_all(old)
    delete, under_way = old.store_client._delete_now, list[tuple[str, str]]()
    monkeypatch.setattr(old.store_client, "_delete_now", lambda *names: under_way.append(names))
    old.catalogue.maintain()
    assert under_way, "the old one has looked, and its deletes are on their way"
    new = start("new")
    assert new.match(TOKENS).plan is not None
    new.clock.now_s += WAIT_S - 0.1
    with pytest.raises(TierError, match="may not have stopped"):
        new.spill(new.nodes[0], new.state(TOKENS))
    for names in under_way:
        delete(*names)
    with pytest.raises(AssertionError, match="lost"):
        new.restored(new.nodes[0], TOKENS)
    new.clock.now_s += 0.1
    assert new.spill(new.nodes[0], new.state(TOKENS)).kept
    assert new.restored(new.nodes[0], TOKENS) == 11
    new.check()


def test_a_delete_does_not_begin_when_the_look_is_too_old(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    old = start("old")
    assert old.spill(old.nodes[0], old.state(TOKENS)).kept
    before, stat = old.objects(), old.store_client._stat
    forget_all(old)
    old.clock.now_s += LOOK_S

    def slow(call: Any, path: str) -> int | None:
        old.clock.now_s += LOOK_S
        return stat(call, path)

    monkeypatch.setattr(old.store_client, "_stat", slow)
    old.catalogue.maintain()
    assert old.objects() == before
    monkeypatch.undo()
    old.clock.now_s += LOOK_S
    old.catalogue.maintain()
    assert old.objects() == set()


def test_the_old_one_acknowledges_nothing_after_it_was_taken_over(start: Start) -> None:
    old = start("old")
    commit = put_all(old)
    new = start("new")
    old.clock.now_s += LOOK_S
    with pytest.raises(TierError, match="taken over"):
        commit()
    settle(new)
    assert new.objects() == new.listed(), "it is whole, and found"


def test_what_the_old_one_acknowledges_while_its_look_is_good_is_kept(start: Start) -> None:
    """The new one lists the store before this is put, and after the wait again."""
    old = start("old")
    old.spill(old.nodes[0], old.state(OTHERS))
    new = start("new")
    assert old.spill(old.nodes[0], old.state(TOKENS)).kept
    assert new.restored(new.nodes[0], TOKENS) == 0
    settle(new)
    assert new.restored(new.nodes[0], TOKENS) == 11
    new.check()


def test_what_the_new_one_would_have_deleted_is_looked_at_anew(start: Start) -> None:
    """Rows without their checkpoint, which the old one's node still brings, and the old one acknowledges in time."""
    old = start("old")
    old.spill(old.nodes[0], old.state(OTHERS))
    node, state = old.nodes[0], old.state(TOKENS)
    offer = state.offer()
    grant = node.admit(offer, OBJECT, NO_HINTS)
    known, arrays = node._state.namespace(offer.namespace), state.export(offer, grant.keys)
    node._keep(grant, offer, {key: arrays[key] for key in grant.keys[:-1]}, known)
    new = start("new")
    (level,) = new.catalogue.cache._levels
    assert level._doomed, "worth nothing as far as it knows"
    for call in range(3):
        new.catalogue.maintain()
        new.catalogue.match(offer.namespace, Prompt(TOKENS), 0.0, deadline_s=5 + call)
    node._keep(grant, offer, {grant.keys[-1]: arrays[grant.keys[-1]]}, known)
    assert grant.loan is not None
    assert grant.loan.commit()
    settle(new)
    assert new.restored(new.nodes[0], TOKENS) == 11
    new.clock.now_s += 1000.0
    new.catalogue.maintain()
    assert new.restored(new.nodes[0], TOKENS) == 11


def test_after_a_clean_close_the_next_acknowledges_at_once(start: Start, store: ObjectStore) -> None:
    old = start("old")
    assert old.spill(old.nodes[0], old.state(TOKENS)).kept
    old.catalogue.close()
    assert claims(store) == []
    new = start("new")
    assert new.spill(new.nodes[0], new.state(OTHERS)).kept
    assert new.restored(new.nodes[0], TOKENS) == 11
    with pytest.raises(TierError):
        old.spill(old.nodes[0], old.state(some_tokens(11, 2)))


def test_a_close_while_the_end_of_a_delete_is_not_known_is_not_clean(
    start: Start, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = start("old")
    assert old.spill(old.nodes[0], old.state(TOKENS)).kept
    forget_all(old)

    def fails(*_: str) -> None:
        raise TierError("injected", retryable=True)

    monkeypatch.setattr(old.store_client, "_delete_now", fails)
    old.catalogue.maintain()
    monkeypatch.undo()
    old.catalogue.maintain()
    with pytest.raises(TierError, match="may still happen"):
        old.spill(old.nodes[0], old.state(TOKENS))
    old.catalogue.close()
    assert len(claims(store)) == 1
    new = start("new")
    with pytest.raises(TierError, match="are left"):
        new.spill(new.nodes[0], new.state(TOKENS))


def test_no_answer_is_no_permission(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    site = start("one")
    assert site.spill(site.nodes[0], site.state(OTHERS)).kept
    commit, before = put_all(site), site.objects()
    forget_all(site)
    site.clock.now_s += LOOK_S

    def away() -> list[str]:
        raise TierError("injected: away", None, "object", retryable=True)

    monkeypatch.setattr(site.store_client, "notes", away)
    with pytest.raises(TierError, match="away") as refusal:
        commit()
    assert refusal.value.retryable
    with pytest.raises(TierError, match="away"):
        site.spill(site.nodes[0], site.state(TOKENS))
    site.catalogue.maintain()
    assert site.objects() == before
    monkeypatch.undo()
    assert commit(), "the lease is still good"
    site.catalogue.maintain()
    assert site.objects() == site.listed() != set()
    assert site.restored(site.nodes[0], TOKENS) == 11


def test_a_store_that_is_away_at_the_start_is_claimed_when_it_answers(
    start: Start, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: ObjectStoreTier) -> list[str]:
        raise TierError("injected: away", None, self.name, retryable=True)

    monkeypatch.setattr(ObjectStoreTier, "notes", away)
    site = start("one")
    with pytest.raises(TierError, match="not known yet"):
        site.spill(site.nodes[0], site.state(TOKENS))
    assert claims(store) == []
    monkeypatch.undo()
    site.clock.now_s += catalogue_module.RETRY_S
    site.catalogue.maintain()
    assert site.spill(site.nodes[0], site.state(TOKENS)).kept


def test_a_claim_whose_answer_was_lost_is_our_own(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ObjectStoreTier.write_note

    def lost(self: ObjectStoreTier, name: str, body: bytes) -> None:
        write(self, name, body)
        raise TierError("injected: lost answer", None, self.name, retryable=True)

    monkeypatch.setattr(ObjectStoreTier, "write_note", lost)
    site = start("one")
    monkeypatch.undo()
    site.clock.now_s += catalogue_module.RETRY_S
    site.catalogue.maintain()
    assert claims(site.store) == [str(site.claim.name)]
    assert site.spill(site.nodes[0], site.state(TOKENS)).kept, "and nobody else's is waited for"


def test_two_clusters_of_one_prefix_lose_nothing_that_was_acknowledged(start: Start) -> None:
    one, two = start("one", object_bytes=24_000), start("two", object_bytes=24_000)
    kept: list[Tokens] = []
    for seed in range(24):
        for site in (one, two):
            tokens = some_tokens(11, seed)
            try:
                if site.spill(site.nodes[0], site.state(tokens)).kept:
                    kept.append(tokens)
            except TierError:
                continue
            assert site.restored(site.nodes[0], tokens) == 11
        one.clock.now_s += 0.5
    with pytest.raises(TakenOverError, match="two 1"):
        one.catalogue.maintain()
    assert len(kept) > 12
    assert two.restored(two.nodes[0], kept[-1]) == 11
    assert two.objects() == two.listed()
    assert two.match(kept[0]).reason is MissReason.EVICTED
    two.check()


def test_a_claim_that_somebody_has_removed_is_made_anew(start: Start, store: ObjectStore) -> None:
    site = start("one")
    assert site.spill(site.nodes[0], site.state(OTHERS)).kept
    commit, (claim,) = put_all(site), claims(store)
    obstore.delete(store, f"catalogue/{claim}")
    before = site.catalogue.generation
    site.clock.now_s += LOOK_S
    with pytest.raises(TierError, match="has gone"):
        commit()
    site.catalogue.maintain()
    assert site.catalogue.generation > before
    assert claims(store) == [str(site.claim.name)]
    with pytest.raises(TierError, match="lease is over"):
        commit()
    assert site.spill(site.nodes[0], site.state(TOKENS)).kept
    assert [site.restored(site.nodes[0], tokens) for tokens in (TOKENS, OTHERS)] == [11, 11]
    assert site.catalogue.counters()["claims.lost"] == 1
    site.check()


def test_what_else_lies_beside_the_claims_is_nobodys(start: Start, store: ObjectStore) -> None:
    names = ["README", f"{9**20:020d}-nobody01", "9" * 20, f"{'9' * 20}-{'0' * 8}/x", f"{'9' * 20}-{'0' * 8}.json"]
    for name in names:
        obstore.put(store, f"catalogue/{name}", b"?")
    site = start("one")
    assert site.spill(site.nodes[0], site.state(TOKENS)).kept, "nothing to wait for"
    site.clock.now_s += 1000.0
    site.catalogue.maintain()
    assert set(names) < set(claims(store))
    assert not [checked for checked in check_tier(site.client(GrantedBudget())) if checked.error]
    site.check()


@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", b"[" * 4000, b'{"waits_s": "x"}', b'{"waits_s": 1e99}'])
def test_a_claim_that_says_nothing_is_waited_for_as_long_as_ones_own(body: bytes) -> None:
    store, clock = MemoryStore(), Clock()
    obstore.put(store, f"catalogue/{7:020d}-{'a' * 8}", body)
    site = Site(store=store, clock=clock, look_s=LOOK_S)
    assert site.claim.settled_s == clock.now_s + WAIT_S
    settle(site)
    assert site.spill(site.nodes[0], site.state(TOKENS)).kept


def test_a_claim_of_other_settings_is_waited_for_as_long_as_it_says() -> None:
    slow = Site(look_s=20.0)
    quick = Site(store=slow.store, clock=slow.clock, look_s=LOOK_S)
    assert quick.claim.settled_s == quick.clock.now_s + LOOKS * 20.0
    again = Site(store=slow.store, clock=slow.clock, look_s=20.0)
    assert again.claim.settled_s == quick.clock.now_s + LOOKS * 20.0


def claim_of(store: ObjectStore, clock: Clock, now_ns: Callable[[], int]) -> StoreClaim:
    tier = ObjectStoreTier(store, GrantedBudget(), InlineExecutor())
    return StoreClaim(tier, {"cluster": "x", "host": "h\n", "pid": 1}, look_s=LOOK_S, now_ns=now_ns, clock=clock)


def test_the_newer_claim_is_the_later_one_whatever_its_hosts_clock_says() -> None:
    store, clock = MemoryStore(), Clock()
    first, second = claim_of(store, clock, lambda: 10**18), claim_of(store, clock, lambda: 0)
    first.make()
    first.look()
    second.make()
    assert first.name is not None
    assert second.name is not None
    assert first.name < second.name == ClaimName(10**18 + 1, second.name.maker)
    clock.now_s += LOOK_S
    with pytest.raises(TakenOverError, match=r"cluster 'x', host 'h\\n', pid 1"):
        first.look()
    assert json.loads(bytes(obstore.get(store, f"catalogue/{second.name}").bytes()))["waits_s"] == WAIT_S


def test_of_two_that_claim_at_once_one_owns_the_store() -> None:
    """Both list before either has put; the one whose name is behind has it, and the other knows before it begins."""
    store, clock = MemoryStore(), Clock()
    two = [claim_of(store, clock, lambda: 5) for _ in range(2)]
    write = two[0]._notes.write_note

    def interrupted(name: str, body: bytes) -> None:
        two[0]._notes.write_note = write  # type: ignore[method-assign]
        two[1].make()
        write(name, body)

    two[0]._notes.write_note = interrupted  # type: ignore[method-assign]
    two[0].make()
    clock.now_s += WAIT_S
    owners = []
    for claim in two:
        try:
            claim.look()
        except TakenOverError:
            continue
        owners.append(claim)
    assert [claim.name for claim in owners] == [max(claim.name for claim in two if claim.name)]


def test_what_is_being_put_is_counted_once_whatever_a_listing_shows(start: Start) -> None:
    site = start("one")
    commit = put_all(site)
    before = site.budget.usage()
    assert before.bytes_reserved > 0
    site.clock.now_s += catalogue_module.RELIST_S / 100
    for _ in site.tier.list():
        pass
    assert site.budget.usage() == before
    assert commit()
    after = site.budget.usage()
    assert after.bytes_reserved == 0
    assert before.bytes_used < after.bytes_used <= before.bytes_used + before.bytes_reserved
    lease = site.catalogue.admit(site.state(OTHERS).offer(), NO_HINTS, 9.0, deadline_s=5)
    site.catalogue.abandon(lease.number, lease.generation, (), deadline_s=5)
    assert not site.budget._expected
    landed = tuple(Landed(key, 1, LINEAGE, created=True) for key in lease.keys)
    with pytest.raises(StaleError):
        site.catalogue.commit(lease.number, lease.generation, landed, (), deadline_s=5)


# As the settings make it


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def test_a_delete_of_the_catalogue_is_one_request(threads: ThreadPoolExecutor) -> None:
    """A client that tries again for a while may delete when its look is long over."""
    with FaultyS3Server() as server:
        url, options = "s3://bucket/p", server.options
        settings = TierSettings(object_url=url, object_bytes=1 << 20, object_options=options, object_deadline_s=6.0)
        catalogue = ObjectPlace(settings).catalogue(threads, cluster="c")
        claim, (level,) = catalogue._claim, catalogue.cache._levels
        assert claim.look_s == 2.0
        assert not claim.left_s(), "nobody is waited for"
        with level.tier.reserve([1]) as room:
            level.tier.put([PutItem("ab/x", [b"x"])], room)
        before = server.requests["POST"]  # of S3, a delete
        server.fail("POST", HttpFault(status=503))
        with pytest.raises(TierError, match="503"):
            level.tier.delete(["ab/x"])
        assert server.requests["POST"] == before + 1
        assert level.tier.delete(["ab/x"]) == [True]
        catalogue.close()


@pytest.mark.parametrize("call", ["keep", "use_up"])
def test_who_owns_the_store_is_looked_up_within_the_callers_deadline(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Site().catalogue
    left: list[float] = []

    def look() -> None:
        left.append(wait_s(20.0))
        raise DeadlineError("the store hangs")

    monkeypatch.setattr(catalogue._claim, "look", look)
    plan = RestorePlan("catalogue", catalogue.generation, 4, (), 0, ())
    with pytest.raises(DeadlineError):
        getattr(catalogue, call)(plan, *([1.0] if call == "keep" else [1, 1.0]), deadline_s=0.5)
    assert 0 < left[0] <= 0.5
