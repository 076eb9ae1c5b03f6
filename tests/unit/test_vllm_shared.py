"""Engines on several nodes share what they keep through one object store, without vLLM and without Ray.

Whatever happens to store, objects and catalogue: what is loaded is what was brought, and the rest is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import obstore
import pytest
from paging import IDENTITY, LAYOUTS, bring, check_pages, chunks, hashes_of, layout_named, loaded_tokens
from sites import Site

from tiered_cache.cache import PlannedFrame, TieredCache, TierSlot
from tiered_cache.engines.vllm.layout import PageLayout
from tiered_cache.engines.vllm.pages import PageStore, Plan
from tiered_cache.errors import IdentityError, MissReason
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.local import InlineExecutor
from tiered_cache.service.shared import SharedStore
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.host import HostTier
from tiered_cache.tiers.object_budget import GrantedBudget

HASHES = hashes_of(range(102))
TOKENS = 70


@pytest.fixture
def site() -> Site:
    return Site(nodes=0)


def node(site: Site, layout: PageLayout, identity: Identity = IDENTITY, host_bytes: int = 1 << 20) -> PageStore:
    """One engine's store, above nothing but the cluster's; without `host_bytes` it has nothing of its own."""
    site.clients.append(FaultyTier(site.client(GrantedBudget()), len(site.clients)))
    shared = SharedStore(site.clients[-1], site.current, clock=site.clock)
    slots = [TierSlot(HostTier(host_bytes), LruPolicy())] if host_bytes else []
    cache = TieredCache(slots, InlineExecutor(), shared=shared, clock=site.clock)
    own = Durability.HOST if host_bytes else None
    return PageStore(
        cache, identity, layout, durability=Durability.OBJECT, held_bytes_max=1 << 20, shared=shared, otherwise=own
    )


def search(store: PageStore, tokens: int = TOKENS, known_tokens: int = 0) -> int:
    """How far the store takes a prefix; every byte is checked."""
    plan = store.search(HASHES, tokens, known_tokens, 30.0)
    if plan is None:
        return known_tokens
    assert plan.is_shared
    check_pages(store, HASHES, plan)
    store.end(plan)
    return plan.tokens


def plan_of(store: PageStore) -> Plan:
    plan = store.search(HASHES, TOKENS, 0, 30.0)
    assert plan is not None
    return plan


def key_at(plan: Plan, tokens: int) -> FrameKey:
    return next(p.frame.key for p in plan.places.values() if p.frame.key.tokens == tokens and p.frame.key.group)


def failed_ends(store: PageStore, plan: Plan) -> dict[int, MissReason]:
    places = list(plan.places.values())
    return {places[n].chunk[1]: page for n, page in store.load(places) if isinstance(page, MissReason)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_one_node_has_kept_another_loads_from_the_store(name: str, site: Site) -> None:
    layout = layout_named(name)
    here, there = node(site, layout), node(site, layout)
    bring(here, HASHES, chunks(layout, 64))
    assert here.counters()["spills.object"] >= 1
    assert loaded_tokens(there, HASHES, TOKENS) == 0
    assert search(there) == 64
    counted = there.counters()
    assert counted["catalogue.found"] == 1
    assert counted["fetched.object"] >= 1
    assert site.catalogue.cache.pins() == 0
    bring(there, HASHES, chunks(layout, 64))  # vLLM offers what it has loaded, too: the own tiers take what they like
    assert loaded_tokens(there, HASHES, TOKENS) == 64
    assert search(there, known_tokens=64) == 64
    site.check()


def test_a_prefix_that_is_known_as_far_is_not_asked_for(site: Site) -> None:
    layout = layout_named("rows")
    here = node(site, layout)
    bring(here, HASHES, chunks(layout, 64))
    assert here.search(HASHES, TOKENS, 64, 30.0) is None
    assert here.search(HASHES, 100, 64, 30.0) is None
    assert here.counters()["catalogue.empty"] == 1
    assert site.catalogue.cache.pins() == 0


def test_another_identity_finds_nothing(site: Site) -> None:
    layout = layout_named("rows")
    bring(node(site, layout), HASHES, chunks(layout, 64))
    other = node(site, layout, Identity(weights_digest=bytes([1] * 32), engine="vllm", engine_revision="test"))
    assert other.search(HASHES, TOKENS, 0, 30.0) is None
    assert search(node(site, layout)) == 64


def test_a_catalogue_that_was_restarted_finds_what_there_is(site: Site) -> None:
    layout = layout_named("all")
    here, there = node(site, layout), node(site, layout)
    bring(here, HASHES, chunks(layout, 64))
    site.start_catalogue()
    assert search(there) == 64
    bring(there, HASHES, chunks(layout, 96))
    assert search(node(site, layout), 102) == 96


@pytest.mark.parametrize("what", ["catalogue", "store"])
def test_while_catalogue_or_store_is_away_the_own_tiers_go_on(what: str, site: Site) -> None:
    """What was kept meanwhile goes to the store with what builds upon it, read where it is."""
    layout = layout_named("rows")
    here = node(site, layout)
    catalogue = site.current.catalogue
    if what == "catalogue":
        site.current.catalogue = None
    else:
        site.clients[0].inject("put", Fault.ERROR)
    bring(here, HASHES, chunks(layout, 64))
    site.current.catalogue = catalogue
    counted = here.counters()
    assert counted["spills.failed.object"] == 1
    assert counted["spills"] == 1
    assert "spills.object" not in counted
    assert loaded_tokens(here, HASHES, TOKENS) == 64
    assert node(site, layout).search(HASHES, TOKENS, 0, 30.0) is None
    bring(here, HASHES, chunks(layout, 96), known_tokens=64)
    assert here.counters()["spills.object"] == 1
    assert search(node(site, layout), 102) == 96
    site.check()


def test_a_catalogue_that_is_away_is_counted_and_nothing_is_found(site: Site) -> None:
    layout = layout_named("rows")
    bring(node(site, layout), HASHES, chunks(layout, 64))
    catalogue, site.current.catalogue = site.current.catalogue, None
    there = node(site, layout)
    assert there.search(HASHES, TOKENS, 0, 30.0) is None
    assert there.counters()["catalogue.failed"] == 1
    site.current.catalogue = catalogue
    assert search(there) == 64


def test_without_tiers_of_its_own_a_node_keeps_nothing_while_the_catalogue_is_away(site: Site) -> None:
    layout = layout_named("rows")
    here = node(site, layout, host_bytes=0)
    catalogue, site.current.catalogue = site.current.catalogue, None
    bring(here, HASHES, chunks(layout, 64))
    assert here.counters()["spills.failed.object"] == 1
    assert here._held_bytes == 0
    site.current.catalogue = catalogue
    bring(here, HASHES, chunks(layout, 64))
    assert search(here) == 64


@pytest.mark.parametrize("what", ["flipped", "deleted"])
def test_a_bad_or_absent_object_is_told_to_the_catalogue_and_a_shorter_prefix_is_left(what: str, site: Site) -> None:
    layout = layout_named("rows")
    bring(node(site, layout), HASHES, chunks(layout, 64))
    there = node(site, layout)
    plan = plan_of(there)
    path = f"entries/{key_at(plan, 48).path()}.blob"
    if what == "flipped":
        content = bytearray(bytes(obstore.get(site.store, path).bytes()))
        content[len(content) // 2] ^= 1
        obstore.put(site.store, path, bytes(content))
    else:
        obstore.delete(site.store, path)
    why = MissReason.QUARANTINED if what == "flipped" else MissReason.LOST
    assert failed_ends(there, plan) == {48: why}
    there.end(plan)
    site.catalogue.maintain()
    assert search(there, 48) == 32
    assert search(node(site, layout)) == 32
    counted = site.catalogue.counters()
    assert counted["quarantined.object" if what == "flipped" else "frames.object.lost"] == 1
    bring(there, HASHES, chunks(layout, 64))  # it is computed again, and kept again
    assert search(node(site, layout)) == 64


@pytest.mark.parametrize("what", ["prefix", "tokens", "too long"])
def test_a_plan_for_other_frames_is_refused(what: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a catalogue whose memory is not what it was: what lies under another name is another state."""
    layout = layout_named("rows")
    bring(node(site, layout), HASHES, chunks(layout, 64))
    match = site.catalogue.match

    def wrong(*args: Any, **options: Any) -> Any:
        reply = match(*args, **options)
        assert reply.plan is not None
        first, *others = reply.plan.frames
        key = {
            "prefix": replace(first.key, prefix=b"x" * 32),
            "tokens": replace(first.key, tokens=first.key.tokens + 1),
            "too long": replace(first.key, tokens=160),
        }[what]
        return replace(reply, plan=replace(reply.plan, frames=(PlannedFrame(key, first.lineage), *others)))

    monkeypatch.setattr(site.catalogue, "match", wrong)
    there = node(site, layout)
    assert there.search(HASHES, TOKENS, 0, 30.0) is None
    assert there.counters()["catalogue.refused"] == 1
    assert site.catalogue.cache.pins() == 0


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"namespace": b"n" * 32}, "another namespace"),
        ({"block_tokens": 8}, "block_tokens is 8, not 16"),
        ({"tokens": 200}, "200 tokens in 4 blocks"),
        ({"prefix": b"short"}, "not 32 bytes"),
        ({"hashes": ()}, "blocks"),
    ],
)
def test_hashes_that_are_no_prefix_are_refused(changed: dict[str, Any], match: str, site: Site) -> None:
    store = node(site, layout_named("rows"))
    bring(store, HASHES, chunks(store.layout, 64))
    chain = replace(store.blocks(HASHES, TOKENS), **changed)
    with pytest.raises(IdentityError, match=match):
        site.catalogue.match(store.namespace, chain, 1.0, deadline_s=1.0)
    root = replace(store.blocks(HASHES, TOKENS), hashes=(b"r" * 32, *store.blocks(HASHES, TOKENS).hashes[1:]))
    with pytest.raises(IdentityError, match="root"):
        site.catalogue.match(store.namespace, root, 1.0, deadline_s=1.0)


def test_a_name_inside_a_block_is_no_reason_to_stop(site: Site) -> None:
    """A checkpoint inside a block, which vLLM never has, is none of the chain's: it has no name for it."""
    store = node(site, layout_named("rows"))
    chain = store.blocks(HASHES, TOKENS)
    names: Sequence[object] = [chain.prefix_hash(tokens) for tokens in range(1, TOKENS + 1)]
    assert len(set(names)) == len(names)
    assert chain.prefix_hash(chain.tokens) == chain.prefix
