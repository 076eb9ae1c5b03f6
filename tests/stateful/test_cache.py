"""`TieredCache` over memory and a disk against a plain dict of what was acknowledged, through faults and restarts.

Nothing wrong is ever served; what was acknowledged on disk is there after a restart, unless the policy dropped it or
its bytes were found to be bad; and at any moment the books balance.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from spilling import (
    GEOMETRIES,
    IDENTITY,
    NO_HINTS,
    Clock,
    State,
    SteppedExecutor,
    check_books,
    forget_everything,
    held,
    match,
    open_disk,
    restore,
)

from tiered_cache.cache import Grant, Hit, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.errors import FrameError, IdentityError, MissReason, StaleError, TieredCacheError
from tiered_cache.identity import FrameKey, Tokens
from tiered_cache.index import PrefixId, RemovalReason, TierView
from tiered_cache.level import key_of
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.tiers.base import Durability, GetRequest, Tier
from tiered_cache.tiers.disk import DiskTier
from tiered_cache.tiers.host import HostTier

HOST, DISK, _ = Durability
HOST_BYTES, DISK_BYTES = 36_000, 160_000
FAULTS = {Fault.ERROR: 0.05, Fault.FULL: 0.05, Fault.LOST_ANSWER: 0.03, Fault.SHORT: 0.03, Fault.FLIP: 0.03}

Tickets = tuple[FrameKey, ...]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=11).map(lambda bits: np.array(bits, np.uint32))
LINEAGES = st.integers(1, 3)


class UnlockedTier(FaultyTier):
    """Refuses to be called while the cache's lock is held."""

    holds_lock: Callable[[], bool] = staticmethod(lambda: False)

    def __getattribute__(self, name: str) -> object:
        if name in {"reserve", "put", "get", "stat", "list", "delete", "quarantine", "usage", "set_limit"}:
            assert not object.__getattribute__(self, "holds_lock")(), f"{name} under the lock"
        return object.__getattribute__(self, name)


class Open(NamedTuple):
    """A grant that waits for its frames."""

    grant: Grant
    state: State


class Suspended(NamedTuple):
    """A sequence that was taken off its worker, and how to get it back."""

    state: State
    hit: Hit


class Spy(LruPolicy):
    """Remembers what it has chosen to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: set[PrefixId] = set()
        self.moved: set[PrefixId] = set()

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        assert not any(prefix in resident for prefix, _ in dropped)
        assert all(prefix in resident for prefix in added)
        assert not any(prefix in self._used for prefix in added)
        self.evicted |= {prefix for prefix, reason in dropped if reason is RemovalReason.EVICTED}
        self.moved |= {prefix for prefix, reason in dropped if reason is RemovalReason.MOVED}
        self.evicted.difference_update(added)
        self.moved.difference_update(added)
        super().commit(added, dropped, now_s, resident)


class CacheMachine(RuleBasedStateMachine):
    grants = Bundle("grants")
    tickets = Bundle("tickets")
    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.executor = ThreadPoolExecutor(1)
        self.clock = Clock()
        self.open: list[Open] = []
        self.computed: dict[tuple[str, bytes], set[int]] = {}
        """Which computations have exported a frame, by group and tokens."""
        self.acknowledged: dict[bytes, tuple[State, Durability]] = {}
        """By tokens: checkpoints that were acknowledged, and are there as far as anyone knows."""
        self.winners: dict[Tickets, int] = {}
        """As whom each suspended sequence was resumed, in whatever life."""
        self.life = 0
        self.stolen: set[str] = set()

    @initialize(geometry=st.sampled_from(["mixed", "rows", "window"]))
    def begin(self, geometry: str) -> None:
        self.geometry = GEOMETRIES[geometry]
        self.start()

    def start(self) -> None:
        self.life += 1
        self.pinned: dict[Tickets, tuple[float, bool]] = {}
        self.used: dict[Tickets, int] = {}
        self.host_tier = HostTier(HOST_BYTES)
        self.disk_tier = open_disk(Path(self.directory.name) / "disk", DISK_BYTES)
        self.tiers = [UnlockedTier(tier, self.life) for tier in (self.host_tier, self.disk_tier)]
        self.spies = [Spy(), Spy()]
        slots = [TierSlot(self.tiers[0], self.spies[0]), TierSlot(self.tiers[1], self.spies[1], Mode.FAST)]
        self.ahead = SteppedExecutor()
        self.cache = TieredCache(slots, self.executor, ahead=self.ahead, clock=self.clock)
        for tier in self.tiers:
            tier.holds_lock = self.cache._lock._is_owned  # type: ignore[attr-defined]
        self.cache.recover()
        self.cache.register(IDENTITY, self.geometry)
        self.over: set[str] = set()

    # What sequences do

    def state(self, tokens: Tokens, lineage: int) -> State:
        return State(self.geometry, tokens, lineage)

    def note_computed(self, grant: Grant, state: State) -> None:
        for key in grant.keys:
            made = state.tokens[: key.tokens].tobytes()
            self.computed.setdefault((key.group, made), set()).add(state.lineage)

    def acknowledge(self, state: State, stops: tuple[int, ...]) -> None:
        for kept in self.cache.kept(state.offer(*stops)):
            shorter = state._replace(tokens=state.tokens[: kept.tokens])
            self.acknowledged[shorter.tokens.tobytes()] = shorter, kept.durability

    @rule(tokens=TOKENS, lineage=LINEAGES, cut=st.floats(0, 1), durability=st.sampled_from([HOST, DISK]))
    def spill(self, tokens: Tokens, lineage: int, cut: float, durability: Durability) -> None:
        state, stops = self.state(tokens, lineage), self.stops(tokens, cut)
        grant = self.cache.admit(state.offer(*stops), durability, NO_HINTS) if not self.faulty else None
        with suppress(TieredCacheError):
            grant = grant or self.cache.admit(state.offer(*stops), durability, NO_HINTS)
            self.note_computed(grant, state)
            self.cache.spill(grant, [state.export(grant.offer, grant.keys)])
        self.acknowledge(state, stops)

    @staticmethod
    def stops(tokens: Tokens, cut: float) -> tuple[int, ...]:
        return tuple(sorted({max(1, int(cut * len(tokens))), len(tokens)}))

    @rule(target=grants, tokens=TOKENS, lineage=LINEAGES, cut=st.floats(0, 1), durability=st.sampled_from([HOST, DISK]))
    def open_grant(self, tokens: Tokens, lineage: int, cut: float, durability: Durability) -> Open | None:
        state = self.state(tokens, lineage)
        try:
            grant = self.cache.admit(state.offer(*self.stops(tokens, cut)), durability, NO_HINTS)
        except TieredCacheError:
            assert self.faulty
            return None
        self.note_computed(grant, state)
        self.open.append(Open(grant, state))
        return self.open[-1]

    @rule(opened=consumes(grants), keep=st.booleans())
    def close_grant(self, opened: Open | None, keep: bool) -> None:
        if opened is None or not any(opened is other for other in self.open):
            return
        grant, state = opened
        if keep:
            with suppress(TieredCacheError):
                self.cache.spill(grant, [state.export(grant.offer, grant.keys)])
            self.acknowledge(state, tuple(tokens for tokens, _ in grant.offer.checkpoints))
        self.cache.abandon(grant)
        self.open = [other for other in self.open if other is not opened]

    @rule(target=pins, tokens=TOKENS, more=st.integers(0, 2), pin_s=st.sampled_from([None, 5.0, 500.0]))
    def look_up(self, tokens: Tokens, more: int, pin_s: float | None) -> tuple[int, int] | None:
        prompt = np.concatenate([tokens, np.zeros(more, np.uint32)])
        found = match(self.cache, self.geometry, prompt, pin_s)
        if found.hit is None:
            assert found.reason is not None
            return None
        assert found.hit.tokens < len(prompt)
        try:
            for decoded in restore(self.cache, self.geometry, found.hit, prompt):
                made = prompt[: decoded.key.tokens].tobytes()
                assert decoded.lineage in self.computed[decoded.key.group, made]
        except (AssertionError, FrameError, IdentityError) as error:
            self.excuse(error)
        return None if found.hit.pin is None else (self.life, found.hit.pin)

    def excuse(self, error: Exception) -> None:
        """Only damage, or a tier that fails just now, keeps a reader from a frame; and no wrong byte comes through."""
        if isinstance(error, AssertionError):
            assert str(error).endswith((f"is {MissReason.TIER_ERROR}", f"is {MissReason.LOST}")), error
        assert self.faulty or self.damaged

    @rule(pin=consumes(pins))
    def unpin(self, pin: tuple[int, int] | None) -> None:
        if pin is not None and pin[0] == self.life:
            self.cache.unpin(pin[1])

    @rule(target=tickets, tokens=TOKENS, lineage=LINEAGES, durability=st.sampled_from([HOST, DISK]))
    def suspend(self, tokens: Tokens, lineage: int, durability: Durability) -> Suspended | None:
        state = self.state(tokens, lineage)
        offer = state.offer(private=True)
        tickets = (key_of(offer.ticket),)
        if tickets in self.used:  # an echo of what was suspended and resumed
            for call in (
                lambda: self.cache.admit(offer, durability, NO_HINTS),
                lambda: self.cache.plan_of(offer, pin_s=1),
            ):
                with pytest.raises(StaleError):
                    call()
            return None
        try:
            grant = self.cache.admit(offer, durability, NO_HINTS)
            self.note_computed(grant, state)
            self.cache.spill(grant, [state.export(offer, grant.keys)])
        except TieredCacheError:
            assert self.faulty or self.damaged
        hit = self.cache.plan_of(offer, pin_s=300.0)
        if hit is None:
            return None
        assert hit.tickets == tickets
        assert [kept.tokens for kept in self.cache.kept(offer)] == [len(tokens)]
        until_s, kept = self.pinned.get(tickets, (0.0, False))
        if not kept or until_s < self.clock.now_s:
            self.pinned[tickets] = self.clock.now_s + 300, False
        self.winners.pop(tickets, None)
        return Suspended(state, hit)

    def in_time(self, tickets: Tickets) -> bool:
        return self.clock.now_s <= self.pinned.get(tickets, (0.0, False))[0]

    @rule(ticket=tickets, by=st.integers(1, 2))
    def resume(self, ticket: Suspended | None, by: int) -> None:
        if ticket is None:
            return
        state, hit = ticket
        offer, whole = state.offer(private=True), True
        in_time = self.in_time(hit.tickets)
        try:
            restore(self.cache, self.geometry, hit, state.tokens, own=offer)
        except (AssertionError, FrameError, IdentityError) as error:
            whole = False
            if in_time:
                self.excuse(error)
            elif isinstance(error, AssertionError) and " is " not in str(error):
                raise
        try:
            given = whole and self.cache.use_up(hit.tickets, by, 60.0)
        except TieredCacheError:
            assert self.faulty
            return
        if given:
            assert self.winners.setdefault(hit.tickets, by) == by, "resumed twice"
            if hit.tickets not in self.used:
                self.used[hit.tickets] = by
                self.pinned[hit.tickets] = self.clock.now_s + 60, True
        elif whole and in_time and not (self.faulty or self.damaged):
            assert self.winners.get(hit.tickets, by) != by, "nobody else has it"

    @rule(ticket=tickets, pin_s=st.sampled_from([5.0, 500.0]))
    def keep(self, ticket: Suspended | None, pin_s: float) -> None:
        if ticket is None:
            return
        tickets, in_time = ticket.hit.tickets, self.in_time(ticket.hit.tickets)
        try:
            kept = self.cache.keep(tickets, [planned.key for planned in ticket.hit.frames], pin_s)
        except StaleError:
            assert tickets in self.used
            return
        if kept:
            assert tickets not in self.used
            self.pinned[tickets] = self.clock.now_s + pin_s, True
        else:
            assert tickets in self.used or not in_time or self.faulty or self.damaged

    @rule(ticket=tickets, kept=st.booleans())
    def let_go(self, ticket: Suspended | None, kept: bool) -> None:
        if ticket is None:
            return
        tickets = ticket.hit.tickets
        self.cache.let_go(tickets, kept=kept)
        if kept or not (self.in_time(tickets) and self.pinned[tickets][1]):
            self.pinned.pop(tickets, None)

    # What the world does

    @property
    def faulty(self) -> bool:
        return any(tier.rates for tier in self.tiers)

    damaged = False
    """For good: what lies unread may still be bad after a restart."""

    @rule(which=st.sampled_from([0, 1]), on=st.booleans())
    def turn_faults(self, which: int, on: bool) -> None:
        self.tiers[which].rates = dict(FAULTS) if on else {}

    @precondition(lambda self: any(held(self.cache, tier) for tier in ("host", "disk")))
    @rule(data=st.data(), report=st.booleans())
    def damage(self, data: st.DataObject, report: bool) -> None:
        """One bit of a stored frame changes, or the frame goes, behind the cache's back."""
        tier = data.draw(st.sampled_from([t for t in ("host", "disk") if held(self.cache, t)]))
        name = data.draw(st.sampled_from(sorted(held(self.cache, tier), key=lambda n: (n.tokens, *map(str, n)))))
        key = key_of(name)
        inner = self.host_tier if tier == "host" else self.disk_tier
        if inner.stat([key.path()]) == [None]:
            return
        if data.draw(st.booleans()):
            flip(inner, key.path(), data.draw(st.floats(0, 1)))
        else:
            inner.delete([key.path()])
            self.stolen.add(key.path())
        self.damaged = True
        if report:
            self.cache.report_bad(key, "damaged")

    @rule(share=st.sampled_from([0.3, 0.6, 1.0]), tier=st.sampled_from(["host", "disk"]))
    def trim(self, share: float, tier: str) -> None:
        self.cache.trim(tier, int(share * (HOST_BYTES if tier == "host" else DISK_BYTES)))
        self.over = self.over | {tier} if share < 1 else self.over - {tier}

    @rule(seconds=st.sampled_from([1.0, 10.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def copy_ahead(self) -> None:
        """What was asked for since the last time."""
        self.ahead.step()

    @rule()
    def restart(self) -> None:
        """A new process on the same disk; who had something from the old one has lost it."""
        disk = self.cache._levels[1]
        on_disk = held(self.cache, "disk").keys() | disk._doomed.keys() | disk.staged.keys()
        self.ahead.step()
        on_disk |= disk.staged.keys()
        promised = {made: state for made, (state, durability) in self.surviving().items() if durability is DISK}
        for tier in self.tiers:
            tier.rates = {}
        for opened in self.open:
            self.cache.abandon(opened.grant)
        self.open.clear()
        self.cache.close()
        self.start()
        assert held(self.cache, "disk").keys() <= on_disk
        for state in promised.values() if not self.damaged else ():
            (kept,) = self.cache.kept(state.offer())
            assert kept.durability is DISK
        self.acknowledged = {made: (state, DISK) for made, state in promised.items() if not self.damaged}

    def surviving(self) -> dict[bytes, tuple[State, Durability]]:
        """What was acknowledged and is there now; by itself the cache takes nothing away but what its policies drop."""
        found = {}
        for made, (state, _) in self.acknowledged.items():
            for kept in self.cache.kept(state.offer()):
                found[made] = state, kept.durability
        return found

    @invariant()
    def nothing_acknowledged_is_lost(self) -> None:
        if not hasattr(self, "cache"):
            return
        there, counters = self.surviving(), self.cache.counters()
        bad = any(counters.get(f"frames.{tier}.{why}") for tier in ("host", "disk") for why in ("lost", "quarantined"))
        for made, (state, durability) in self.acknowledged.items():
            _, now = there.get(made, (state, 0))
            prefix, (memory, disk) = state.chain.prefix_hash(len(state.tokens)), self.spies
            evicted = prefix in disk.evicted
            if durability is HOST:  # it may have moved to the disk, and been dropped there, all in one step
                evicted = prefix in memory.evicted or (prefix in memory.moved and evicted)
            assert now >= durability or bad or evicted, f"{state.tokens} was acknowledged at {durability.name}"
        self.acknowledged = there

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "cache"):
            rates = [dict(tier.rates) for tier in self.tiers]
            for tier in self.tiers:
                tier.rates = {}
            grants = [opened.grant for opened in self.open]
            check_books(self.cache, open_grants=grants, over=self.over, stolen=self.stolen)
            for tier, rate in zip(self.tiers, rates, strict=True):
                tier.rates = rate

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for tier in self.tiers:
                tier.rates = {}
            for opened in self.open:
                self.cache.abandon(opened.grant)
            self.ahead.step()
            forget_everything(self.cache)
            check_books(self.cache, over=("host", "disk"), stolen=self.stolen)
            self.cache.close()
        self.executor.shutdown()
        self.directory.cleanup()


def flip(tier: Tier, path: str, share: float) -> None:
    """Change a bit of a stored entry, where it lies; not in the version, which would make it a newer peer's."""
    (view,) = tier.get([GetRequest(path)])
    assert isinstance(view, memoryview)
    at = 12 + int(share * (view.nbytes - 13))
    if isinstance(tier, DiskTier):
        body = bytearray(view)
        body[at] ^= 16
        tier.file_of(path).write_bytes(body)
    else:
        ctypes.c_uint8.from_address(np.frombuffer(view, np.uint8).ctypes.data + at).value ^= 16


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    report_multiple_bugs=False,
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
