"""`SharedStore`: a node's way to the object store of its cluster. Bytes go straight there, word to the catalogue.

What is put is read back and checked before the catalogue lists it; what is not found, or is bad, is told to it, and it
looks itself before it believes that. No call outlives the deadline that holds where it is made.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from tiered_cache.cache import DeclineReason, Kept, Loan, Offer, Receipt
from tiered_cache.codecs import Mode
from tiered_cache.deadline import Clock, wait_s
from tiered_cache.errors import (
    DeadlineError,
    FrameNotFoundError,
    IdentityError,
    StaleError,
    TieredCacheError,
    TierError,
)
from tiered_cache.identity import FrameKey
from tiered_cache.index import KnownChain
from tiered_cache.level import Landed, StoredFrame
from tiered_cache.namespace import BAD, Namespace
from tiered_cache.policy.base import Hints
from tiered_cache.prefix_tree import plain_name
from tiered_cache.service.messages import CataloguePort, Lease, MatchReply
from tiered_cache.tiers.base import Durability, GetAnswer, GetRequest, PutItem, PutOutcome, Tier
from tiered_cache.tiers.wrappers import TierHealth, health_of

PUT_ATTEMPTS = 3
"""How often a frame is put whose place is taken by something bad."""
ADMIT_ATTEMPTS = 3
"""How often a lease is asked for, if what it would have relied on turns out to be bad."""
LEASE_S = 300.0
"""How long a lease is asked for where no deadline says how much time there is."""

_log = logging.getLogger(__name__)


class SharedStore:
    """A `SharedTier`: one store that all nodes of a cluster put into and get from, and whose catalogue is elsewhere."""

    def __init__(
        self,
        store: Tier,
        catalogue: CataloguePort,
        *,
        durability: Durability | None = None,
        mode: Mode = Mode.FAST,
        call_s: float = 5.0,
        clock: Clock = time.monotonic,
    ) -> None:
        """`store` is this node's own client, its to close. A call to the catalogue may take `call_s`."""
        self.name = store.name
        self.durability = durability or store.durability
        self.mode = mode
        self.store = store
        self.catalogue = catalogue
        self.call_s = call_s
        self.clock = clock

    def introduce(self, known: Namespace) -> None:
        """Make a namespace known to the catalogue."""
        self.catalogue.introduce(known.digest, known.descriptor(), deadline_s=self.left_s())

    def left(self, offer: Offer, hints: Hints) -> None:
        """A sequence has ended here."""
        try:
            self.catalogue.left(offer, hints, deadline_s=self.call_s)
        except TieredCacheError as error:  # it learns a little less
            _log.info("%s was not told of a sequence: %s", self.name, error.message)

    def admit(self, chain: Offer | KnownChain, hints: Hints, known: Namespace) -> Loan:
        """A lease on what is missing in the store. What it relies on has been read then, and is sound."""
        for _ in range(ADMIT_ATTEMPTS):
            asked_s = self.clock()
            lease = self._admit(chain, hints, known)
            loan = _Lease(self, lease, known, asked_s + lease.lease_s)
            try:
                if loan.read_support() and not (lease.unread and isinstance(chain, Offer) and chain.private):
                    return loan
            except BaseException:
                loan.end()
                raise
            loan.end()  # what was bad, or of an unknown computation, is known now: the answer may be another
        raise TierError("what the store holds turns out to be bad again and again", None, self.name, retryable=True)

    def _admit(self, chain: Offer | KnownChain, hints: Hints, known: Namespace) -> Lease:
        lease_s = wait_s(LEASE_S) + self.call_s  # the last call before a deadline may end after it
        try:
            return self.catalogue.admit(chain, hints, lease_s, deadline_s=self.left_s())
        except IdentityError:  # it may have been restarted, and never have heard of this namespace
            self.introduce(known)
            return self.catalogue.admit(chain, hints, lease_s, deadline_s=self.left_s())

    def match(self, chain: KnownChain, pin_s: float) -> MatchReply:
        """What the catalogue has of a prefix, pinned there for `pin_s` seconds; `get` then brings the frames."""
        assert isinstance(chain.namespace, bytes)
        return self.catalogue.match(chain.namespace, chain, pin_s, deadline_s=self.left_s())

    def unpin(self, pin: int, generation: int) -> None:
        """A plan is not needed any more. Raises nothing: pins end by themselves, too."""
        try:
            self.catalogue.unpin(pin, generation, deadline_s=self.left_s())
        except TieredCacheError as error:
            _log.info("%s: a pin was not given back: %s", self.name, error.message)

    def report_bad(self, key: FrameKey, why: str) -> None:
        """A reader could not use a frame from here: the catalogue looks, and sets it aside. Raises nothing."""
        try:
            self.catalogue.report_bad(key, why, deadline_s=self.left_s())
        except TieredCacheError as error:  # its next reader will find and report it again
            _log.warning("%s: a bad frame could not be reported: %s", self.name, error.message)

    def get(self, keys: Sequence[FrameKey], known: Namespace) -> Sequence[GetAnswer]:
        """Stored bytes; the catalogue is told what is not there."""
        answers = self._get(keys, known)
        absent = tuple(k for k, answer in zip(keys, answers, strict=True) if isinstance(answer, FrameNotFoundError))
        if absent:
            try:
                self.catalogue.report_absent(absent, deadline_s=self.left_s())
            except TieredCacheError as error:
                _log.warning("%s: %d absent frames could not be reported: %s", self.name, len(absent), error.message)
        return answers

    def health(self) -> TierHealth:
        """How this node's calls of the store went."""
        return health_of(self.store)

    def close(self) -> None:
        self.store.close()

    def _get(self, keys: Sequence[FrameKey], known: Namespace) -> Sequence[GetAnswer]:
        requests = [GetRequest(key.path(), bytes=known.frame_bytes(key.group, key.tokens) + 1) for key in keys]
        try:
            return self.store.get(requests)
        except TierError as error:
            return [error.with_traceback(None)] * len(requests)

    def left_s(self) -> float:
        """How long a call to the catalogue may take now. Raises `DeadlineError` if there is no time for any."""
        left_s = wait_s(self.call_s)
        if left_s <= 0:
            raise DeadlineError("no time is left to ask the catalogue", None, self.name)
        return left_s


class _Lease:
    """A `Loan`: one lease of the catalogue, in this node's hands."""

    def __init__(self, shared: SharedStore, lease: Lease, known: Namespace, until_s: float) -> None:
        self.keys: tuple[FrameKey, ...] = lease.keys
        self.declined: tuple[tuple[int, DeclineReason], ...] = lease.declined
        self._shared = shared
        self._lease = lease
        self._known = known
        self._until_s = until_s
        self._landed: dict[FrameKey, Landed] = {}
        self._sound: list[Landed] = []
        self._over = not lease.number

    def read_support(self) -> bool:
        """Read what the lease relies on; False if some of it is bad or gone, which the catalogue knows then.

        Raises `TierError` if the store cannot say.
        """
        known, lease = self._known, self._lease
        for batch in known.batches([plain_name(key) for key in lease.unread]):
            sound, others = self._read([FrameKey(*name) for name in batch])  # type: ignore[arg-type]
            self._sound += sound
            if others:
                return False
        return True

    def put(self, frames: Sequence[StoredFrame]) -> list[Receipt]:
        """Put frames into the store, read them back; those that are there and sound are as good."""
        shared, left = self._shared, {stored.key: stored for stored in frames}
        created: set[FrameKey] = set()
        for _ in range(PUT_ATTEMPTS):
            if self._over or shared.clock() >= self._until_s:
                raise TierError("the lease is over", None, shared.name, retryable=True)
            items = [PutItem(stored.key.path(), stored.buffers) for stored in left.values()]
            with shared.store.reserve([item.bytes for item in items]) as room:
                outcomes = shared.store.put(items, room)
            created |= {k for k, outcome in zip(left, outcomes, strict=True) if outcome is PutOutcome.CREATED}
            sound, _ = self._read(list(left))
            for found in sound:
                del left[found.key]
                self._landed[found.key] = found._replace(created=found.key in created)
            if not left:
                durability = shared.durability
                landed = (self._landed[stored.key] for stored in frames)
                return [Receipt(one.key, one.bytes, durability, one.created) for one in landed]
        raise TierError("a bad frame is in its place again and again", next(iter(left)).path(), shared.name)

    def commit(self) -> tuple[Kept, ...]:
        """Have the catalogue list what has come."""
        if not self._lease.number:
            return self._lease.kept
        lease, landed, sound = self._lease, tuple(self._landed.values()), tuple(self._sound)
        try:
            kept = self._shared.catalogue.commit(
                lease.number, lease.generation, landed, sound, deadline_s=self._shared.left_s()
            )
        except StaleError as error:
            raise TierError(error.message, None, self._shared.name, retryable=True) from error
        self._over = True
        return kept

    def end(self) -> None:
        if self._over:
            return
        self._over = True
        try:
            self._shared.catalogue.abandon(
                self._lease.number, self._lease.generation, tuple(self._sound), deadline_s=self._shared.call_s
            )
        except TieredCacheError as error:  # it ends by itself
            _log.warning("%s: a lease was not given back: %s", self._shared.name, error.message)

    def _read(self, keys: Sequence[FrameKey]) -> tuple[list[Landed], list[FrameKey]]:
        """What of these frames is there and sound, and the others, which the catalogue is told of.

        Raises `TierError` if the store cannot say.
        """
        sound: list[Landed] = []
        others: list[FrameKey] = []
        for key, answer in zip(keys, self._shared.get(keys, self._known), strict=True):
            if isinstance(answer, TierError):
                raise answer
            if isinstance(answer, FrameNotFoundError):
                others.append(key)
                continue
            try:
                header = self._known.check(key, answer)
            except BAD as error:
                others.append(key)
                self._shared.catalogue.report_bad(key, error.message, deadline_s=self._shared.left_s())
            else:
                sound.append(Landed(key, header.total_bytes, header.lineage, created=False))
        return sound, others
