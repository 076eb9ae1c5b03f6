"""One store, its catalogue and two nodes against a plain dict of what was acknowledged, through deaths and faults.

Nodes die between put and commit, the catalogue restarts, leases run out, puts arrive late, objects go or change behind
everybody's back, and calls of the store fail or lose their answers. Nothing wrong is ever served, nothing is found
before it was committed, what was acknowledged is there unless the policy dropped it or it was damaged, the budget
holds, and when all is quiet nothing is left in the store that the catalogue does not know of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import obstore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from obstore.exceptions import AlreadyExistsError
from sites import OBJECT, Site
from spilling import GEOMETRIES, NO_HINTS, State

from tiered_cache.cache import Grant, Kept, Receipt, TieredCache
from tiered_cache.errors import FrameError, IdentityError, TieredCacheError, TierError
from tiered_cache.identity import FrameKey, Tokens
from tiered_cache.index import PrefixId, RemovalReason, TierView
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.catalogue import LATE_S, RELIST_S
from tiered_cache.testing.faults import Fault
from tiered_cache.tiers.base import Durability

LEASE_S = 60.0
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(lambda bits: np.array(bits, np.uint32))
LINEAGES = st.integers(1, 3)
NODES = st.integers(0, 1)


class Open(NamedTuple):
    """All that was granted is in the store, and not committed."""

    grant: Grant
    state: State
    bodies: dict[str, bytes]
    """By the objects' names: what the node has put, or would put again, late."""
    until_s: float
    generation: int
    node: TieredCache


class Spy(LruPolicy):
    """Remembers what it has chosen to drop."""

    evicted: set[PrefixId]

    def __init__(self) -> None:
        super().__init__()
        self.evicted = set()

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        self.evicted |= {prefix for prefix, reason in dropped if reason is RemovalReason.EVICTED}
        self.evicted.difference_update(added)
        super().commit(added, dropped, now_s, resident)


class CatalogueMachine(RuleBasedStateMachine):
    opened = Bundle("opened")
    ended = Bundle("ended")

    @initialize(geometry=st.sampled_from(["mixed", "rows", "window"]), object_bytes=st.sampled_from([30_000, 1 << 20]))
    def begin(self, geometry: str, object_bytes: int) -> None:
        self.site = Site(GEOMETRIES[geometry], object_bytes=object_bytes, host_bytes=20_000, policy=Spy)
        self.acknowledged: dict[bytes, State] = {}
        """By tokens: checkpoints that were acknowledged, and are there as far as anyone knows."""
        self.computed: dict[tuple[str, bytes], set[int]] = {}
        """Which computations have put a frame, by group and tokens."""
        self.open: list[Open] = []
        self.strays: set[str] = set()
        """Paths of what was put and not committed, or may come late."""
        self.damaged: set[str] = set()
        """Paths of frames that went or changed behind everybody's back, and have not been put again."""
        self.ever_damaged: set[str] = set()

    # What nodes do

    def note(self, grant: Grant, state: State) -> None:
        for key in grant.keys:
            made = state.tokens[: key.tokens].tobytes()
            self.computed.setdefault((key.group, made), set()).add(state.lineage)

    def acknowledge(self, state: State, kept: Sequence[Kept]) -> None:
        for one in kept:
            if one.durability is OBJECT:
                shorter = state._replace(tokens=state.tokens[: one.tokens])
                self.acknowledged[shorter.tokens.tobytes()] = shorter

    def came(self, receipts: Sequence[Receipt]) -> None:
        """These objects are new, and were read."""
        self.damaged -= {one.key.path() for one in receipts if one.created and one.durability is OBJECT}

    @rule(node=NODES, tokens=TOKENS, lineage=LINEAGES, durability=st.sampled_from([Durability.HOST, OBJECT]))
    def spill(self, node: int, tokens: Tokens, lineage: int, durability: Durability) -> None:
        state, cache = self.site.state(tokens, lineage), self.site.nodes[node]
        with suppress(TieredCacheError):
            grant = cache.admit(state.offer(), durability, NO_HINTS)
            self.note(grant, state)
            self.came(cache.spill(grant, [state.export(state.offer(), grant.keys)]))
            self.acknowledge(state, cache.kept(state.offer(), grant))

    @rule(target=opened, node=NODES, tokens=TOKENS, lineage=LINEAGES)
    def put_without_commit(self, node: int, tokens: Tokens, lineage: int) -> Open | None:
        state, cache = self.site.state(tokens, lineage), self.site.nodes[node]
        offer, asked_s, grant = state.offer(), self.site.clock.now_s, None
        try:
            grant = cache.admit(offer, OBJECT, NO_HINTS)
            self.note(grant, state)
            known = cache._state.namespace(offer.namespace)
            self.came(cache._keep(grant, offer, state.export(offer, grant.keys), known))
        except TieredCacheError:
            if grant is not None:
                cache.abandon(grant)
            return None
        assert grant.loan is not None
        self.strays |= {key.path() for key in grant.loan.keys}
        names = [f"entries/{key.path()}.blob" for key in grant.loan.keys]
        bodies = {name: bytes(obstore.get(self.site.store, name).bytes()) for name in names}
        self.open.append(Open(grant, state, bodies, asked_s + LEASE_S, self.site.generation, cache))
        return self.open[-1]

    def is_open(self, opened: Open | None) -> bool:
        return opened is not None and any(opened is other for other in self.open)

    def close(self, opened: Open) -> None:
        self.open = [other for other in self.open if other is not opened]

    @rule(target=ended, opened=consumes(opened))
    def commit(self, opened: Open | None) -> Open | None:
        if opened is None or not self.is_open(opened):
            return None
        over = self.site.clock.now_s >= opened.until_s or self.site.generation != opened.generation
        assert opened.grant.loan is not None
        try:
            kept = opened.grant.loan.commit()
        except TierError:
            assert over
        else:
            assert not over or not opened.grant.loan.keys
            self.acknowledge(opened.state, kept)
        opened.node.abandon(opened.grant)
        self.close(opened)
        return opened

    @rule(target=ended, opened=consumes(opened))
    def abandon(self, opened: Open | None) -> Open | None:
        if opened is not None and self.is_open(opened):
            opened.node.abandon(opened.grant)
            self.close(opened)
        return opened

    @rule(ended=consumes(ended))
    def put_late(self, ended: Open | None) -> None:
        """A put that was under way when its lease ended: whole, create-only, and of these tokens."""
        for name, body in (ended.bodies if ended else {}).items():
            with suppress(AlreadyExistsError):
                obstore.put(self.site.store, name, body, mode="create")

    @rule(node=NODES, tokens=TOKENS)
    def look_up(self, node: int, tokens: Tokens) -> None:
        try:
            self.site.restored(self.site.nodes[node], tokens, self.was_computed)
        except (AssertionError, FrameError, IdentityError) as error:
            self.excuse(error)

    def excuse(self, error: Exception) -> None:
        """Only damage, or a store that fails just now, keeps a reader from a frame; and no wrong byte comes through."""
        if isinstance(error, AssertionError):
            assert str(error).endswith((" is tier_error", " is lost")), error
        assert self.ever_damaged or self.faulty, error

    def was_computed(self, key: FrameKey, lineage: int, tokens: Tokens) -> bool:
        return lineage in self.computed[key.group, tokens[: key.tokens].tobytes()]

    # What the world does

    @property
    def faulty(self) -> bool:
        return bool(self.site.tier.rates or any(client.rates for client in self.site.clients))

    @rule(which=st.integers(0, 2), rates=st.sampled_from([{}, {Fault.ERROR: 0.2, Fault.LOST_ANSWER: 0.1}]))
    def turn_faults(self, which: int, rates: dict[Fault, float]) -> None:
        tiers = [self.site.tier, *(node._shared.store for node in self.site.nodes)]  # type: ignore[union-attr]
        tiers[which].rates = dict(rates)

    @rule(node=NODES)
    def kill_node(self, node: int) -> None:
        """What it has put stays, and its leases are nobody's."""
        dead = self.site.nodes[node]
        for opened in [each for each in self.open if each.node is dead]:
            self.close(opened)
        self.site.start_node()
        self.site.nodes[node] = self.site.nodes.pop()
        self.site.clients[node] = self.site.clients.pop()

    @rule()
    def restart_catalogue(self) -> None:
        there = self.surviving()
        self.site.start_catalogue()
        self.acknowledged = there

    @rule(seconds=st.sampled_from([2.0, LEASE_S, LATE_S + 1, RELIST_S]))
    def wait(self, seconds: float) -> None:
        self.site.clock.now_s += seconds
        with suppress(TieredCacheError):
            self.site.catalogue.maintain()

    @precondition(lambda self: self.site.objects())
    @rule(data=st.data(), how=st.sampled_from(["lose", "change"]), reported=st.booleans())
    def damage(self, data: st.DataObject, how: str, reported: bool) -> None:
        path = data.draw(st.sampled_from(sorted(self.site.objects())))
        name = f"entries/{path}.blob"
        if how == "change":
            body = bytearray(obstore.get(self.site.store, name).bytes())
            body[12 + int(data.draw(st.floats(0, 1)) * (len(body) - 13))] ^= 16
            obstore.put(self.site.store, name, bytes(body))
        else:
            obstore.delete(self.site.store, name)
        self.damaged.add(path)
        self.ever_damaged.add(path)
        if reported:
            with suppress(TieredCacheError):
                self.site.catalogue.report_bad(FrameKey.parse(path), "damaged", deadline_s=5.0)

    # What must hold

    def support(self, state: State) -> list[FrameKey]:
        index = self.site.catalogue.cache._index
        return [FrameKey(*place.name) for place in index.support(state.chain, len(state.tokens))]  # type: ignore[arg-type]

    def surviving(self) -> dict[bytes, State]:
        """What was acknowledged, and is there, or at least was not dropped or damaged by anyone."""
        policy = self.site.policy
        assert isinstance(policy, Spy)
        found = {}
        for made, state in self.acknowledged.items():
            whole = not self.site.catalogue.cache._index.missing(state.chain, len(state.tokens), "object")
            damaged = {key.path() for key in self.support(state)} & self.damaged
            evicted = state.chain.prefix_hash(len(state.tokens)) in policy.evicted
            assert whole or damaged or evicted, f"{state.tokens} was acknowledged"
            if whole and not damaged:
                found[made] = state
        return found

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        if hasattr(self, "site"):
            self.acknowledged = self.surviving()
            listed = self.site.listed()
            assert listed - self.site.objects() <= self.damaged
            committed = {key.path() for state in self.acknowledged.values() for key in self.support(state)}
            assert committed <= listed

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "site"):
            self.quietly(lambda: self.site.check(stolen=self.ever_damaged, strays=self.strays))

    def quietly(self, do: Callable[[], object]) -> None:
        """Without faults."""
        tiers = [self.site.tier, *self.site.clients]
        rates = [tier.rates for tier in tiers]
        for tier in tiers:
            tier.rates = {}
        do()
        for tier, rate in zip(tiers, rates, strict=True):
            tier.rates = rate

    def teardown(self) -> None:
        if not hasattr(self, "site"):
            return
        self.quietly(self.settle)

    def settle(self) -> None:
        site = self.site
        for seconds in (LEASE_S, LATE_S + 1, RELIST_S):
            site.clock.now_s += seconds
            site.catalogue.maintain()
        site.catalogue.maintain()
        assert site.objects() == site.listed()
        assert site.budget.usage().bytes_reserved == 0
        there = self.surviving()
        for state in there.values():
            assert site.restored(site.nodes[0], state.tokens) == len(state.tokens)
        site.start_catalogue()
        for state in there.values():
            assert site.restored(site.nodes[1], state.tokens) == len(state.tokens)


TestCatalogue = CatalogueMachine.TestCase
TestCatalogue.settings = settings(
    report_multiple_bugs=False,
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
