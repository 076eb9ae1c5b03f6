"""Two clusters on one store against a plain dict of what any of them has acknowledged.

Each stands for a catalogue and a node that reaches it; the other one is a second cluster, or the old one that is cut
off and goes on. Catalogues die, close, start again and find out late that they were taken over; deletes that were sent
happen later than their sender thinks, as late as it is assumed that they can; the store does not answer one of the two.
Whatever was acknowledged by either is there, whole, unless a catalogue has evicted it since that owned the store then;
nothing wrong is ever served; and in the end the last one to claim the store has and knows all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from obstore.store import MemoryStore
from sites import OBJECT, Site
from spilling import GEOMETRIES, NO_HINTS, Clock, State

from tiered_cache.cache import Grant, Kept, TieredCache
from tiered_cache.errors import DeadlineError, TieredCacheError, TierError
from tiered_cache.identity import FrameKey, Tokens
from tiered_cache.index import PrefixId, RemovalReason, TierView
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.catalogue import LATE_S, RELIST_S
from tiered_cache.service.claim import LOOKS
from tiered_cache.tiers.object_store import ObjectStoreTier

LOOK_S = 2.0
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(lambda bits: np.array(bits, np.uint32))
SITES = st.integers(0, 1)


class Open(NamedTuple):
    """A lease whose frames are in the store, or are only brought when it is committed."""

    grant: Grant
    state: State
    site: Site
    node: TieredCache
    brought: bool

    def bring(self) -> None:
        offer = self.state.offer()
        known = self.node._state.namespace(offer.namespace)
        self.node._keep(self.grant, offer, self.state.export(offer, self.grant.keys), known)


class Late(NamedTuple):
    """A delete that has been sent, and has not happened."""

    client: ObjectStoreTier
    names: tuple[str, str]
    until_s: float


class Spy(LruPolicy):
    """Remembers what it has chosen to drop, if it had a say in that then."""

    def __init__(self, machine: TwoCatalogues, number: int) -> None:
        super().__init__()
        self.machine, self.number = machine, number

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        if self.machine.has_a_say(self.number):
            self.machine.evicted |= {prefix for prefix, reason in dropped if reason is RemovalReason.EVICTED}
        super().commit(added, dropped, now_s, resident)


class TwoCatalogues(RuleBasedStateMachine):
    opened = Bundle("opened")

    @initialize(geometry=st.sampled_from(["mixed", "rows", "window"]), object_bytes=st.sampled_from([20_000, 1 << 20]))
    def begin(self, geometry: str, object_bytes: int) -> None:
        self.clock, self.store = Clock(), MemoryStore()
        self.acknowledged: dict[bytes, State] = {}
        self.evicted: set[PrefixId] = set()
        self.late: list[Late] = []
        self.sending_late = [False, False]
        self.away = [False, False]
        self.sites: list[Site] = []
        for number in range(2):
            self.sites.append(
                Site(
                    GEOMETRIES[geometry],
                    object_bytes=object_bytes,
                    host_bytes=0,
                    nodes=0,
                    policy=lambda number=number: Spy(self, number),  # type: ignore[misc]
                    store=self.store,
                    clock=self.clock,
                    look_s=LOOK_S,
                    name=f"site {number}",
                )
            )
            self.wire(number)
            self.sites[number].start_node()

    def wire(self, number: int) -> None:
        """Let a catalogue's requests be late or fail."""
        client = self.sites[number].store_client
        delete, notes = client._delete_now, client.notes

        def delete_now(name: str, path: str) -> None:
            if not self.sending_late[number]:
                delete(name, path)
                return
            self.late.append(Late(client, (name, path), self.clock.now_s + 2 * LOOK_S))
            raise DeadlineError("the answer did not come", path)

        def notes_or_not() -> Any:
            if self.away[number]:
                raise TierError("the store is away", retryable=True)
            return notes()

        client._delete_now = delete_now  # type: ignore[method-assign]
        client.notes = notes_or_not  # type: ignore[method-assign]
        client.really_delete = delete  # type: ignore[attr-defined]

    def newest(self) -> int | None:
        """Whose claim owns the store."""
        names = [(site.claim.name, number) for number, site in enumerate(self.sites) if site.claim.name is not None]
        return max(names)[1] if names else None

    def has_a_say(self, number: int) -> bool:
        """Whether a catalogue owns the store, or has looked so lately that it does not have to know of another."""
        if number >= len(self.sites) or not hasattr(self.sites[number], "claim"):
            return True
        claim = self.sites[number].claim
        return self.newest() == number or self.clock.now_s < claim._good_until_s

    def acknowledge(self, state: State, kept: Sequence[Kept]) -> None:
        for one in kept:
            if one.durability is OBJECT:
                shorter = state._replace(tokens=state.tokens[: one.tokens])
                self.acknowledged[shorter.tokens.tobytes()] = shorter
                self.evicted.discard(shorter.chain.prefix_hash(one.tokens))

    # What clusters do

    @rule(number=SITES, tokens=TOKENS, lineage=st.integers(1, 2))
    def spill(self, number: int, tokens: Tokens, lineage: int) -> None:
        site = self.sites[number]
        state = site.state(tokens, lineage)
        with suppress(TieredCacheError):
            self.acknowledge(state, site.spill(site.nodes[0], state).kept)

    @rule(target=opened, number=SITES, tokens=TOKENS, brings=st.booleans())
    def take_a_lease(self, number: int, tokens: Tokens, brings: bool) -> Open | None:
        site = self.sites[number]
        state, node = site.state(tokens, 3), site.nodes[0]
        try:
            grant = node.admit(state.offer(), OBJECT, NO_HINTS)
        except TieredCacheError:
            return None
        opened = Open(grant, state, site, node, brings)
        try:
            if brings:
                opened.bring()
        except TieredCacheError:
            node.abandon(grant)
            return None
        return opened

    @rule(opened=consumes(opened))
    def commit(self, opened: Open | None) -> None:
        if opened is None:
            return
        assert opened.grant.loan is not None
        with suppress(TieredCacheError):
            if not opened.brought:
                opened.bring()
            self.acknowledge(opened.state, opened.grant.loan.commit())
        opened.node.abandon(opened.grant)

    @rule(number=SITES, tokens=TOKENS)
    def look_up(self, number: int, tokens: Tokens) -> None:
        site = self.sites[number]
        try:
            site.restored(site.nodes[0], tokens)
        except TieredCacheError:
            pass
        except AssertionError as error:  # it went behind this one's back: a miss, and never another's bytes
            assert str(error).endswith((" is tier_error", " is lost")), error  # noqa: PT017

    # What the world does

    @rule(number=SITES, clean=st.booleans())
    def restart(self, number: int, clean: bool) -> None:
        site = self.sites[number]
        if clean:
            site.catalogue.close()
        site.start_catalogue()
        self.wire(number)
        self.away[number] = False

    @rule(number=SITES, late=st.booleans())
    def send_late(self, number: int, late: bool) -> None:
        self.sending_late[number] = late

    @rule(number=SITES, away=st.booleans())
    def be_away(self, number: int, away: bool) -> None:
        self.away[number] = away

    @rule(number=SITES)
    def upkeep(self, number: int) -> None:
        with suppress(TieredCacheError):
            self.sites[number].catalogue.maintain()

    @rule(data=st.data())
    def a_delete_happens(self, data: st.DataObject) -> None:
        if self.late:
            late = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
            late.client.really_delete(*late.names)  # type: ignore[attr-defined]

    @rule(seconds=st.sampled_from([0.3, LOOK_S / 2, LOOK_S, LOOKS * LOOK_S, LATE_S + 1, RELIST_S]))
    def wait(self, seconds: float) -> None:
        end_s = self.clock.now_s + seconds
        for late in sorted(self.late, key=lambda late: late.until_s):
            if late.until_s <= end_s:
                self.late.remove(late)
                late.client.really_delete(*late.names)  # type: ignore[attr-defined]
        self.clock.now_s = end_s

    # What must hold

    def keys(self, state: State) -> set[str]:
        index = self.sites[0].catalogue.cache._index  # any one will do: it is the geometry's arithmetic
        index.register(self.sites[0].nodes[0]._state.namespace(state.chain.namespace).layout)
        return {FrameKey(*place.name).path() for place in index.support(state.chain, len(state.tokens))}  # type: ignore[arg-type]

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        if not hasattr(self, "sites") or len(self.sites) < 2:
            return
        there = self.sites[0].objects()
        for made, state in list(self.acknowledged.items()):
            prefix = state.chain.prefix_hash(len(state.tokens))
            if self.keys(state) <= there:
                continue
            assert prefix in self.evicted, f"{state.tokens} was acknowledged"
            del self.acknowledged[made]
        owner = self.newest()
        if owner is None or not self.sites[owner].catalogue._settled or self.sites[owner].claim.is_lost:
            return
        index = self.sites[owner].catalogue.cache._index
        for state in self.acknowledged.values():
            prefix = state.chain.prefix_hash(len(state.tokens))
            if not index.missing(state.chain, len(state.tokens), "object"):
                self.evicted.discard(prefix)
            else:
                assert prefix in self.evicted, f"the owner does not know of {state.tokens}"

    def teardown(self) -> None:
        if not hasattr(self, "sites") or len(self.sites) < 2:
            return
        self.sending_late, self.away = [False, False], [False, False]
        self.wait(LOOKS * LOOK_S)
        self.restart(1, clean=False)
        site = self.sites[1]
        for seconds in (LOOKS * LOOK_S, 60.0, LATE_S + 1, RELIST_S, 60.0):
            self.wait(seconds)
            site.catalogue.maintain()
            self.nothing_acknowledged_is_lost()
        assert site.objects() == site.listed()
        site.check()
        for state in self.acknowledged.values():
            if state.chain.prefix_hash(len(state.tokens)) not in self.evicted:
                assert site.restored(site.nodes[0], state.tokens) == len(state.tokens)


TestTwoCatalogues = TwoCatalogues.TestCase
TestTwoCatalogues.settings = settings(
    report_multiple_bugs=False,
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
