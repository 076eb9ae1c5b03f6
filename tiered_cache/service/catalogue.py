"""`Catalogue`: what the one object store of a cluster holds. It stands beside the router, which asks it like a node.

    node       admit(checkpoints) ──> lease: what is missing, with the room for it, until a deadline
               encode, put into the store, read back and check ──> commit(lease, what has come): listed, acknowledged
    reader     plan of the catalogue ──> its own node gets the frames from the store, so that many read at once

It owns the index, the budget, the policy and the quarantine; bodies pass it by. What is put under a lease is found by
nobody before the commit, so a holder that dies leaves nothing but room that is another's after the lease's deadline,
and objects that are deleted then. One that a late put leaves behind even later is found when the store is listed anew,
every `RELIST_S`. A catalogue that is restarted knows no leases: it takes a new generation, refuses the old one's, and
finds what there is by its names. Nothing but it deletes, and it deletes nothing whose name is lent. What is being put
has the room of its lease, whether or not a listing shows it.

Two that are alive at once (the old one is cut off, and Ray has started another; two clusters were given one prefix)
never lose what either has acknowledged. The newest claim of the store owns it (`service.claim`, which says how long
what is good). The older one looks at the claims before it deletes and before it acknowledges, finds itself taken over,
and refuses everything. The newer one serves look-ups at once: a frame that goes is a miss. If there was a claim that
nobody has retired, it begins to delete and to grant leases only when whatever that one had begun is over, and it has
listed the store once more. So

- what the older one acknowledged lay in the store, whole, before the newer one has deleted anything, and is in that
  listing: it is the newer one's to keep or to evict;
- what the older one was still deleting is not in that listing, and nobody builds on it: leases are granted, and what
  they rely on is chosen, by what the listing has shown.

A lease is not granted earlier, and its commit made to wait, since what its holder puts meanwhile may be deleted by the
older one and be missing at the commit. Names of frames cannot tell generations apart, as they could be made to: they
are what lets any catalogue, and any node, find what others have computed.

What needs the store and is waited for by nobody (deletes, the first listing of a store that was away, relisting) is
done by `maintain`, which every call sees to in the executor when it is due. Look-ups never wait for the store.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from tiered_cache.cache import Grant, Kept, Offer, TieredCache
from tiered_cache.deadline import Clock, Deadline, until
from tiered_cache.errors import MissReason, StaleError, StateError, TakenOverError, TieredCacheError, TierError
from tiered_cache.identity import FrameKey
from tiered_cache.index import KnownChain
from tiered_cache.level import Landed
from tiered_cache.namespace import read_descriptor
from tiered_cache.policy.base import Hints
from tiered_cache.service.claim import StoreClaim
from tiered_cache.service.messages import (
    CATALOGUE,
    Lease,
    MatchReply,
    OwnerPort,
    Prompt,
    RestorePlan,
)
from tiered_cache.service.tiering import TieringService
from tiered_cache.tiers.base import Reservation, TierUsage

LEASE_S_MAX = 600.0
"""How long at most a node has for what it was granted; it asks for what its own caller leaves it."""
LATE_S = 60.0
"""How long after a lease's end its last put may still happen: what it leaves is deleted then."""
LEASES_MAX = 4096
MAINTAIN_S = 1.0
"""How often, at most, calls see to the store's upkeep."""
RELIST_S = 600.0
"""How often the store is listed."""
RETRY_S = 10.0
"""How soon that is tried again if the store does not answer."""
LOOK_S = 30.0
"""How often one that neither deletes nor acknowledges looks whether it was taken over."""

_log = logging.getLogger(__name__)


class LentStore(Protocol):
    """The books of a store whose entries others put, in room that was reserved here; as `ObjectStoreTier` has them."""

    def expect(self, paths: Iterable[str]) -> None: ...
    def expect_no_more(self, paths: Iterable[str]) -> None: ...
    def charge(self, path: str, bytes_: int, reservation: Reservation) -> None: ...


@dataclass(slots=True)
class _Lent:
    """A lease that is out."""

    grant: Grant
    until_s: float

    @property
    def paths(self) -> list[str]:
        return [key.path() for key in self.grant.keys]


class Catalogue:
    """The index of one object store and the leases on its room. A `CataloguePort`."""

    def __init__(
        self,
        cache: TieredCache,
        store: LentStore,
        claim: StoreClaim,
        executor: Executor,
        *,
        lease_s_max: float = LEASE_S_MAX,
        clock: Clock = time.monotonic,
    ) -> None:
        """`cache` has the store as its one tier, and lends; `store` is that tier, which deletes under `claim`.

        The store is claimed, and what it holds is found, now if it answers, and else as soon as it does. Raises
        `TierError` if it never will: it refuses our credentials, say.
        """
        self.cache = cache
        self._front = TieringService(cache, node=CATALOGUE, owners=_nobody, clock=clock)
        self._store = store
        self._claim = claim
        self._executor = executor
        self._lease_s_max = lease_s_max
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._leases: dict[int, _Lent] = {}
        self._late: list[tuple[float, Grant]] = []  # ended leases, the first to look after once more first
        self._listed = self._settled = False
        self._list_at_s = self._maintain_at_s = self._look_at_s = clock()
        self._maintaining = False
        self._list_the_store()

    @property
    def generation(self) -> int:
        """Leases and plans of an earlier one are over."""
        return self._front.generation

    # Look-ups

    def match(self, namespace: bytes, prompt: Prompt | KnownChain, pin_s: float, *, deadline_s: float) -> MatchReply:
        """The longest proper prefix of the prompt that the store holds, pinned for `pin_s` seconds."""
        self._see_to_it()
        if self.cache.geometry_of(namespace) is None:  # which namespaces there are is the nodes' to say
            return MatchReply(None, MissReason.NOT_STORED if self._listed else MissReason.TIER_ERROR, (), 0, ())
        reply = self._front.match(namespace, prompt, pin_s, deadline_s=deadline_s)
        return reply if self._listed else replace(reply, reason=MissReason.TIER_ERROR)

    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        """As that of a tiering service."""
        self._claim.check()
        return self._front.unpin(pin, generation, deadline_s=deadline_s)

    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        """As that of a tiering service."""
        deadline = Deadline.after(deadline_s, self._clock)
        with until(deadline):
            self._claim.look()
        return self._listing().keep(plan, pin_s, deadline_s=deadline.left_s("keep"))

    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        """As that of a tiering service."""
        deadline = Deadline.after(deadline_s, self._clock)
        with until(deadline):
            self._claim.look()
        return self._listing().use_up(plan, by, again_s, deadline_s=deadline.left_s("use up"))

    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        """As that of a tiering service."""
        self._claim.check()
        self._front.let_go(tickets, kept=kept, deadline_s=deadline_s)
        self._see_to_it()

    def _listing(self) -> TieringService:
        """Who knows what the store holds. Raises `TierError` if nobody does yet."""
        if not self._listed:
            raise TierError("what the store holds is not known yet", None, CATALOGUE, retryable=True)
        return self._front

    def plan_of(self, offer: Offer, pin_s: float, *, deadline_s: float) -> RestorePlan | None:
        """How to restore an offer's last checkpoint from the store, pinned; None if it is not there whole."""
        self._claim.check()
        return self._front.plan_of(offer, pin_s, deadline_s=deadline_s)

    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        """Somebody could not use a frame: it is read here, and set aside if it is bad."""
        _log.warning("a reader could not use %s: %s", key.short(), why)
        with self._until(deadline_s):
            self._claim.look()
            self.cache.judge(key)

    def report_absent(self, keys: tuple[FrameKey, ...], *, deadline_s: float) -> None:
        """Somebody did not find these frames: what the store confirms not to have is offered no more."""
        self._claim.check()
        with self._until(deadline_s):
            self.cache.check_there(keys)

    # Spills

    def introduce(self, namespace: bytes, descriptor: bytes, *, deadline_s: float) -> None:
        """Make a namespace known. Raises what `read_descriptor` raises."""
        self._claim.check()
        with self._until(deadline_s):
            self.cache.learn(read_descriptor(descriptor, namespace))

    def left(self, offer: Offer, hints: Hints, *, deadline_s: float) -> None:
        """A sequence has ended on some node, which keeps what it keeps: the policy and times to live learn of it."""
        del deadline_s
        if self.cache.geometry_of(offer.namespace) is not None:
            self.cache.left(replace(offer, request=offer.store_request), hints)
        self._see_to_it()

    def admit(self, chain: Offer | KnownChain, hints: Hints, lease_s: float, *, deadline_s: float) -> Lease:
        """Settle which checkpoints are wanted in the store, and make room for what is missing, for so many seconds.

        Raises `IdentityError` if their namespace is not known here, `TierError` if the store has not been listed yet
        or fails, or an earlier claim has to be waited for, and `TakenOverError`; no room is held then.
        """
        self._see_to_it()
        with self._until(deadline_s):
            return self._admit(chain, hints, min(lease_s, self._lease_s_max))

    def _admit(self, chain: Offer | KnownChain, hints: Hints, lease_s: float) -> Lease:
        self._listing()
        self._claim.look()  # what is there whole is acknowledged here
        if not self._settled:
            raise TierError("the store is listed once more", None, CATALOGUE, retryable=True)
        self._end_expired()
        if len(self._leases) >= LEASES_MAX:
            raise TierError(f"{LEASES_MAX} leases are out", None, CATALOGUE, retryable=True)
        if isinstance(chain, Offer):
            chain = replace(chain, request=chain.store_request)
        grant = self.cache.lend(chain, hints)
        if (path := self._claim.may_go(key.path() for key in grant.keys)) is not None:
            self.cache.take_back(grant)
            raise TierError("an earlier delete of this name may still happen", path, CATALOGUE, retryable=True)
        unread = self.cache.unread(grant)
        if not grant.keys and not unread:
            return Lease(0, self.generation, 0.0, (), (), grant.declined, self.cache.settle(grant, ()))
        with self._lock:
            number = next(self._numbers)
            self._leases[number] = lent = _Lent(grant, self._clock() + lease_s)
        self._store.expect(lent.paths)
        return Lease(number, self.generation, lease_s, grant.keys, unread, grant.declined, ())

    def commit(
        self, lease: int, generation: int, landed: tuple[Landed, ...], sound: tuple[Landed, ...], *, deadline_s: float
    ) -> tuple[Kept, ...]:
        """All that was missing is in the store and was read back: list it. Returns what is acknowledged.

        Raises `StaleError` if the lease is over, `StateError` if not all has come or other things than were asked
        for: nothing is listed or acknowledged then, and the lease has ended. Raises `TakenOverError`, and `TierError`
        if nobody can say whether somebody has taken over: nothing is acknowledged then.
        """
        with self._until(deadline_s):
            self._claim.look()
        lent = self._take(lease, generation)
        if lent is None:
            raise StaleError("the lease is over: it ran out, was used, or is of an earlier generation", None, CATALOGUE)
        try:
            self.cache.note_sound(sound)
            for target in lent.grant.targets:
                _check_granted(lent.grant, landed)
                for one in landed:
                    self._store.charge(one.key.path(), one.bytes, target.room)
            kept = self.cache.settle(lent.grant, landed)
        except BaseException:
            self._give_up(lent)
            raise
        else:
            self._store.expect_no_more(lent.paths)
            return kept
        finally:
            self._see_to_it()

    def abandon(self, lease: int, generation: int, sound: tuple[Landed, ...], *, deadline_s: float) -> None:
        """End a lease: its room is free. Idempotent."""
        del deadline_s
        self._claim.check()
        lent = self._take(lease, generation)
        if generation == self.generation:
            self.cache.note_sound(sound)
        if lent is not None:
            self._give_up(lent)
        self._see_to_it()

    # Upkeep

    def maintain(self) -> None:
        """Do what is due: end leases, delete, list the store. What the store fails to do now is tried again.

        Raises `TakenOverError`; nothing is done then.
        """
        self._claim.check()
        self._end_expired()
        now_s = self._clock()
        if self._claim.is_lost and self._settled:
            self._start_over()
        if now_s >= self._list_at_s:
            try:
                self._list_the_store()
            except TierError as error:
                self._list_at_s = now_s + RETRY_S
                _log.warning("the store could not be listed: %s", error.message)
        if not self._settled:
            return
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._claim.look()
            self._claim.collect()
        with self._lock:
            due = [grant for until_s, grant in self._late if until_s <= now_s]
            self._late = [(until_s, grant) for until_s, grant in self._late if until_s > now_s]
        for grant in due:
            self.cache.delete_unlisted(grant.keys)
        self.cache.sweep()

    def counters(self) -> dict[str, int]:
        """How often what happened since this generation began."""
        return self.cache.counters() | self._claim.counters

    def usage(self) -> dict[str, TierUsage]:
        """The budget, and what the store holds."""
        return self.cache.usage()

    def close(self) -> None:
        """Let go of the store; what it holds stays. The next catalogue need not wait, unless deletes are under way."""
        self._claim.retire()
        self.cache.close()

    # Within

    def _until(self, deadline_s: float) -> AbstractContextManager[None]:
        return until(Deadline.after(deadline_s, self._clock))

    def _see_to_it(self) -> None:
        """Have upkeep done in the executor, if it is due and nobody is at it. Raises `TakenOverError`."""
        self._claim.check()
        with self._lock:
            now_s = self._clock()
            if self._maintaining or now_s < self._maintain_at_s:
                return
            self._maintaining, self._maintain_at_s = True, now_s + MAINTAIN_S
            if now_s < self._list_at_s < self._maintain_at_s:  # many wait for that
                self._maintain_at_s = self._list_at_s
        try:
            self._executor.submit(self._maintain_once)
        except RuntimeError:  # it was shut down, and so are we
            self._maintaining = False

    def _maintain_once(self) -> None:
        try:
            self.maintain()
        except TieredCacheError as error:
            _log.warning("upkeep of the store: %s", error.message)
        except Exception:  # noqa: BLE001  nobody waits for it, who could tell
            _log.exception("upkeep of the store")
        finally:
            self._maintaining = False

    def _list_the_store(self) -> None:
        """Find what there is: all of it at first, and then what came and went behind our back."""
        claim = self._claim
        try:
            if claim.name is None or claim.is_lost:
                claim.make()
                claim.check()
                assert claim.name is not None
                self._front.generation = claim.name.generation
            settles = not claim.left_s()
            if not self._listed:
                self.cache.hold(held=not settles)
                self.cache.recover()
                self._listed = True
            elif settles:
                self.cache.reconcile()
            self._settled = self._settled or settles
        except TakenOverError:
            pass  # all that asks is told so
        except TierError as error:
            if not self._listed and not error.retryable:
                raise
            self._list_at_s = self._clock() + RETRY_S
            _log.warning("the store could not be listed, and is left alone until then: %s", error.message)
        else:
            self._list_at_s = self._clock() + (RELIST_S if self._settled else claim.left_s())

    def _start_over(self) -> None:
        """Our claim has gone, and whoever removed it, too: all that we know may be out of date, as after a restart."""
        with self._lock:
            ended, self._leases = list(self._leases.values()), {}
        self.cache.hold()
        self._settled = False
        for lent in ended:
            self._give_up(lent)
        self._list_at_s = -math.inf

    def _take(self, lease: int, generation: int) -> _Lent | None:
        """A lease that is not over, which it then is."""
        if generation != self.generation:
            return None
        with self._lock:
            lent = self._leases.pop(lease, None)
        if lent is not None and lent.until_s <= self._clock():
            self._give_up(lent)
            return None
        return lent

    def _end_expired(self) -> None:
        now_s = self._clock()
        with self._lock:
            expired = [number for number, lent in self._leases.items() if lent.until_s <= now_s]
            ended = [self._leases.pop(number) for number in expired]
        for lent in ended:
            self._give_up(lent)

    def _give_up(self, lent: _Lent) -> None:
        """Free a lease's room; what its holder has put goes now, and once more when nothing of it is under way."""
        self.cache.take_back(lent.grant)
        self._store.expect_no_more(lent.paths)
        with self._lock:
            self._late.append((self._clock() + LATE_S, lent.grant))


def _check_granted(grant: Grant, landed: tuple[Landed, ...]) -> None:
    foreign = {one.key for one in landed} - set(grant.keys)
    if foreign:
        raise StateError(f"{len(foreign)} frames came that were not granted", next(iter(foreign)).path(), CATALOGUE)


def _nobody(name: str) -> OwnerPort:
    raise StateError(f"the catalogue takes nothing from {name}: nodes do")
