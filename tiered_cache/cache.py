"""`TieredCache`: one node's tiers as one cache of frames. The module that knows frames, index, policies and tiers.

A spill is `admit` (what is wanted, and room for it), then `spill` (keep it, acknowledge it), or `abandon`. A restore is
`match` (the longest restorable prefix, pinned) and `fetch`. Under pressure the policy of a tier names checkpoints to
drop; they are written to the tier below, read back there, and only then dropped above: a frame is never in neither
place. If there is an executor for that, it writes copies below ahead of need (`_copy_ahead`), so that little is left to
do when the policy has chosen; what it chooses does not depend on that. What a policy is asked about is the checkpoint;
which frames that means is the index's arithmetic.

Below a node's own tiers there may be one that all nodes share (`SharedTier`). Its index is not here, so that look-ups
do not find what it holds; spills and what the last own tier drops go there, and `fetch` reads what is not here there.

Time: every wait ends by the deadlines of `deadline.until`. What a call needs of a tier that does not answer is then a
`DeadlineError`, or a miss; what it does not need does not delay it.

Threads: any. One lock guards index, policies and figures; no tier is asked for anything, and no byte is encoded or
hashed, while it is held. What is on its way into a tier is claimed in the index, so that no one drops the prefix
under it; how a tier and the index stay in step is the subject of `tiered_cache.level`.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tiered_cache import frame
from tiered_cache.codecs import Mode
from tiered_cache.deadline import CLOSE_S, Deadline, deadlines, until, wait_s
from tiered_cache.errors import (
    CapacityError,
    DeadlineError,
    IdentityError,
    MissReason,
    StaleError,
    StateError,
    TieredCacheError,
    TierError,
)
from tiered_cache.flights import Flights, Waiters
from tiered_cache.frame import EncodedFrame, Frame
from tiered_cache.geometry import Geometry
from tiered_cache.identity import CHECKPOINT, DIGEST_BYTES, TICKET, TOKENS_MAX, FrameKey, Identity, PrefixChain
from tiered_cache.in_flight import IN_FLIGHT_BYTES, BytesInFlight
from tiered_cache.index import (
    Candidate,
    Chain,
    Claim,
    Explanation,
    FrameName,
    KnownChain,
    Located,
    PrefixId,
    RemovalReason,
    private_checkpoint,
)
from tiered_cache.level import WAITING_MAX, CacheState, Landed, Level, StoredFrame, key_of
from tiered_cache.namespace import BAD, Namespace
from tiered_cache.policy.base import CachePolicy, Hints, Proposal, Request
from tiered_cache.policy.lifetimes import Lifetimes
from tiered_cache.prefix_tree import plain_name
from tiered_cache.tiers.base import Durability, GetAnswer, Reservation, Tier, TierUsage
from tiered_cache.tiers.wrappers import TierHealth, health_of

Bytes = npt.NDArray[np.uint8]
HostArray = npt.NDArray[np.generic]
Clock = Callable[[], float]

RUNNING_TOKENS_MAX = 1 << 24
"""How many tokens of requests between look-up and spill are remembered; the oldest requests go first."""
ROOM_ATTEMPTS = 3
"""How often room is made for one spill, if others take what was freed."""
AHEAD_SHARE = 1 / 4
"""Of a tier's budget, how much the tier below may hold of copies ahead of need, if that is no more than `AHEAD_MAX`."""
AHEAD_MAX = 1 / 16
"""Of its own budget."""
LIKELY_MAX = 1 << 12
"""How many checkpoints are looked at when copies are made ahead of need."""
PART_S = 30.0
"""The longest that one tier is waited for in what another could do without."""
FIND_AGAIN_S = 10.0
"""How long until a tier that could not be listed is asked again."""
USAGE_S = 1.0
"""How long a tier may take to say what it holds, to who only wants to know."""
ENCODE_S = 60.0
"""How long to wait for the executor to encode a batch."""
FOUND_PIN_S = 3600.0
"""How long a suspended sequence that a restart has found is kept."""
USED_MAX = 1 << 16
"""How many tickets that were used are remembered."""
_REQUEST_TOKENS_MIN = 1 << 10  # a short request is charged as much: what it takes besides its tokens

_log = logging.getLogger(__name__)


class DeclineReason(StrEnum):
    """Why an offered checkpoint was not taken; a closed list, each one a counter."""

    NOT_ASKED_FOR = "not asked for"  # no policy wants one there
    SESSION_OVER = "the session is over"
    NOT_WORTH_ITS_ROOM = "not worth its room"  # the policy rather keeps what is there, or may not drop it
    NO_ROOM = "others took the room"
    CROWDED = "all checkpoints inside its block are pinned"
    NO_TIER = "no tier is as durable"
    TOO_LARGE = "larger than any such tier"


@dataclass(frozen=True, slots=True)
class TierSlot:
    """A tier, who decides about it, and how frames are encoded for it."""

    tier: Tier
    policy: CachePolicy
    mode: Mode = Mode.RAW


@dataclass(frozen=True, slots=True)
class Offer:
    """Checkpoints of one sequence that could be kept, and where its rows come from. To the index it is a `Chain`."""

    namespace: bytes
    block_tokens: int
    rank: int
    hashes: tuple[bytes, ...]
    """h(0) .. h(blocks)."""
    checkpoints: tuple[tuple[int, bytes], ...]
    """(token count, prefix hash), ascending."""
    lineages: tuple[int, ...]
    """For each full block, which computation its rows come from; 0 if that is not known."""
    lineage: int
    """Which computation the checkpoints come from."""
    private: bool = False
    """Insist on this sequence's own bytes, for its last checkpoint: it is suspended."""
    request: int | None = None
    """The look-up that the sequence began with, if it was on this node."""
    store_request: int | None = None
    """The same of the catalogue of the object store."""
    output_tokens: int = 0
    """How many of the tokens were generated."""

    @property
    def blocks(self) -> int:
        return len(self.hashes) - 1

    def __len__(self) -> int:
        return self.checkpoints[-1][0] if self.checkpoints else 0

    def block_hash(self, index: int, /) -> bytes:
        return self.hashes[index]

    def prefix_hash(self, tokens: int, /) -> bytes:
        block, tail = divmod(tokens, self.block_tokens)
        return dict(self.checkpoints)[tokens] if tail else self.hashes[block]

    @property
    def ticket(self) -> FrameName:
        """The frame that says that this suspended sequence can be resumed."""
        tokens, prefix = self.checkpoints[-1]
        parent = self.hashes[(tokens - 1) // self.block_tokens]
        return FrameName(self.namespace, prefix, parent, TICKET, tokens, self.rank, self.lineage)

    def lineage_of(self, group: str, tokens: int) -> int:
        """Which computation a frame of this sequence comes from."""
        return self.lineage if group in {CHECKPOINT, TICKET} else self.lineages[tokens // self.block_tokens - 1]

    def check(self, geometry: Geometry) -> None:
        """Raise `IdentityError` listing what cannot be: an offer comes from another process."""
        problems = []
        if self.block_tokens != geometry.block_tokens:
            raise IdentityError(f"not an offer: block_tokens is {self.block_tokens}, not {geometry.block_tokens}")
        if not 0 <= self.rank < geometry.shards:
            problems.append(f"rank {self.rank} of {geometry.shards} shards")
        if not self.hashes or self.hashes[0] != PrefixChain(self.namespace, self.block_tokens).block_hash(0):
            problems.append("h(0) is not the namespace's root")
        if len(self.lineages) != self.blocks:
            problems.append(f"{len(self.lineages)} lineages of {self.blocks} blocks")
        if any(len(digest) != DIGEST_BYTES for digest in (*self.hashes, *(digest for _, digest in self.checkpoints))):
            problems.append(f"a hash is not {DIGEST_BYTES} bytes")
        if self.private and not self.lineage:
            problems.append("a suspended sequence of no known lineage")
        stops = [tokens for tokens, _ in self.checkpoints]
        if stops != sorted(set(stops)) or any(not 1 <= tokens < TOKENS_MAX for tokens in stops):
            problems.append(f"checkpoints at {stops} are not ascending token counts")
        elif len(self) // self.block_tokens > self.blocks:
            problems.append(f"a checkpoint at {len(self)} tokens and only {self.blocks} blocks")
        elif any(not n % self.block_tokens and h != self.hashes[n // self.block_tokens] for n, h in self.checkpoints):
            problems.append("a checkpoint at a block's end has another hash than the block")
        if problems:
            raise IdentityError("not an offer: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Receipt:
    """A frame is in a tier of this durability."""

    key: FrameKey
    bytes_stored: int
    durability: Durability
    created: bool
    """False if it was there already: some engine of this identity had exported it for this prefix."""


@dataclass(frozen=True, slots=True)
class PlannedFrame:
    """One frame of a restore, and which computation it comes from; 0 if that is not known."""

    key: FrameKey
    lineage: int


@dataclass(frozen=True, slots=True)
class Hit:
    """A restorable prefix: pinned, if the look-up asked for that, until `unpin(pin)` or the pin's deadline."""

    tokens: int
    frames: tuple[PlannedFrame, ...]
    pin: int | None
    tier: str
    """The slowest tier that one of the frames has to come from."""
    bytes_stored: int
    """What the frames take up."""
    tickets: tuple[FrameKey, ...] = ()
    """Of a suspended sequence: what says that it can be resumed."""


@dataclass(frozen=True, slots=True)
class LookUp:
    """The answer to a look-up: a hit, or why there is none; and where the policy would like checkpoints."""

    hit: Hit | None
    reason: MissReason | None
    """Why it is not as long as the prompt allows; None if it is."""
    take_at: tuple[int, ...]
    """Lengths within the prompt at which a policy would like a checkpoint, ascending."""
    request: int
    """Names the request when its checkpoints are offered."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint can be restored, with everything it needs at this durability or a higher one."""

    tokens: int
    durability: Durability


class Loan(Protocol):
    """Room in a shared tier for what an offer, or a checkpoint that leaves a node, still has to bring there."""

    @property
    def keys(self) -> tuple[FrameKey, ...]:
        """What has to come."""

    @property
    def declined(self) -> tuple[tuple[int, DeclineReason], ...]: ...

    def put(self, frames: Sequence[StoredFrame]) -> list[Receipt]:
        """Write frames and read them back. They are found by nobody, and nothing is acknowledged, before `commit`."""

    def commit(self) -> tuple[Kept, ...]:
        """All has come: which checkpoints the tier now has whole. Raises `TierError` if the time is over, say."""

    def end(self) -> None:
        """Give back what was not committed. Idempotent; raises nothing."""


class SharedTier(Protocol):
    """A tier below those of this node that other nodes use, too, and whose index is elsewhere."""

    name: str
    durability: Durability
    mode: Mode

    def introduce(self, known: Namespace) -> None:
        """Make a namespace known there."""

    def left(self, offer: Offer, hints: Hints) -> None:
        """A sequence has ended here, whether or not something of it is spilled. Raises nothing, and does not wait."""

    def admit(self, chain: Offer | KnownChain, hints: Hints, known: Namespace) -> Loan:
        """Ask for room for an offer's checkpoints, or for one that leaves this node. Raises `TierError`."""

    def get(self, keys: Sequence[FrameKey], known: Namespace) -> Sequence[GetAnswer]:
        """Stored bytes, one answer a key. What turns out to be gone is offered to nobody any more."""

    def health(self) -> TierHealth:
        """How this node's calls went."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Target:
    """One tier's part in a grant: what it still needs, the room for that, and the prefixes it then has."""

    level: Level
    names: tuple[FrameName, ...]
    room: Reservation
    claims: tuple[Claim, ...]
    private: PrefixId | None
    """The suspended sequence's own checkpoint, which is worth nothing in part."""
    optional: bool = False
    """Nice to have: the durability does not need it."""
    receipts: list[Receipt] = field(default_factory=list)
    """For what has come."""


@dataclass(slots=True)
class Grant:
    """Room for what an offer still has to bring: send the frames of `keys`, then `spill`; or `abandon`."""

    offer: Offer | KnownChain
    keys: tuple[FrameKey, ...] = ()
    tickets: tuple[FrameKey, ...] = ()
    """What comes with them and is made here: a suspended sequence's ticket."""
    declined: tuple[tuple[int, DeclineReason], ...] = ()
    """(token count, why) of the offer's checkpoints that are not wanted."""
    targets: list[_Target] = field(default_factory=list, repr=False)
    """The cache's own, and so is `loan`."""
    loan: Loan | None = field(default=None, repr=False)
    """The shared tier's part, if the durability needs it."""
    kept_below: tuple[Kept, ...] = ()
    """What the shared tier has acknowledged."""


class _Running(NamedTuple):
    """A request between its look-up and its spill, and where each tier's policy wants checkpoints."""

    request: Request
    take_at: tuple[tuple[int, ...], ...]

    @property
    def charge(self) -> int:
        return max(_REQUEST_TOKENS_MIN, self.request.input_tokens)


class _Suspended(NamedTuple):
    """Names one suspension: of this computation, at this prefix."""

    namespace: bytes
    lineage: int
    prefix: bytes

    @property
    def private(self) -> PrefixId:
        return private_checkpoint(self.namespace, self.lineage)


class _Pin(NamedTuple):
    """Pins in the index: the prefix, and, if it is a suspended sequence's, its private checkpoint."""

    pins: tuple[int, ...]
    of: _Suspended | None
    until_s: float
    kept: bool = False
    """Somebody has the ticket: it is nobody else's to let go."""


class TieredCache:
    """All frames of one node, over its tiers from the fastest to the slowest."""

    def __init__(
        self,
        slots: Sequence[TierSlot],
        executor: Executor,
        *,
        ahead: Executor | None = None,
        shared: SharedTier | None = None,
        lends: bool = False,
        in_flight_bytes: int = IN_FLIGHT_BYTES,
        clock: Clock = time.monotonic,
    ) -> None:
        """`executor` runs the encoding for slow tiers, `ahead` the copying ahead of need, which is not done without.

        Both stay the caller's. Tiers become the cache's to close. With `lends` there is one tier, which others fill:
        see `lend`. `in_flight_bytes` bounds what is fetched and not yet dropped, and whatever else holds room in
        `in_flight`.
        """
        assert slots or shared
        assert len(slots) == 1 or not lends
        self._state = CacheState([slot.tier.name for slot in slots], clock)
        self._lock, self._index, self._counters = self._state.lock, self._state.index, self._state.counters
        levels: list[Level] = []
        for slot in reversed(slots):
            below = levels[0] if levels else None
            levels.insert(0, Level(slot.tier, slot.policy, slot.mode, self._state, below, lends=lends))
        self._levels = tuple(levels)
        self._by_name = {level.name: level for level in levels}
        self._order = {level.name: number for number, level in enumerate(levels)}
        self._shared = shared
        self._flights = Flights(shared.name, Waiters(shared.name, WAITING_MAX)) if shared is not None else None
        self.in_flight = BytesInFlight(in_flight_bytes)
        self._executor = executor
        self._ahead = ahead
        self._ahead_runs = self._ahead_again = self._closed = False
        self._ahead_job: Future[None] | None = None
        self._unread: dict[str, float] = {}  # tiers that could not be listed, and when to try again
        self._clock = clock
        self._running: OrderedDict[int, _Running] = OrderedDict()
        self._running_tokens = 0
        self._pins: dict[int, _Pin] = {}
        self._pin_ends: list[tuple[float, int]] = []
        self._suspended: dict[_Suspended, int] = {}  # the pins of suspended sequences
        self._using: set[_Suspended] = set()
        self._used: OrderedDict[_Suspended, int] = OrderedDict()  # by whom they were resumed, the oldest first
        self._left: list[PrefixId] = []  # private checkpoints whose pin has ended; to be dropped
        self._numbers = itertools.count(1)
        self._lifetimes = Lifetimes(self._index, [level.name for level in levels])

    # Namespaces

    def register(self, identity: Identity, geometry: Geometry) -> bytes:
        """Make an identity and geometry known, here and, by their descriptor, in every tier; returns the namespace.

        A tier that cannot take the descriptor now is asked again before it gets a frame.
        """
        return self.learn(Namespace.of(identity, geometry)).digest

    def learn(self, namespace: Namespace) -> Namespace:
        """The same of a namespace that somebody else has described; returns the one that is known."""
        known = self._state.add(namespace)
        for level in self._levels:
            try:
                with _some_time():
                    self._describe(level, known)
                    if level.is_strange(known):
                        level.adopt(known)
                        self._pin_found(level)
            except TieredCacheError as error:
                self._count(f"errors.{level.name}.register")
                _log.warning("tier %s has no descriptor of %s: %s", level.name, known.digest.hex()[:16], error.message)
        if self._shared is not None:
            try:
                with _some_time():
                    self._shared.introduce(known)
            except TieredCacheError as error:
                self._count(f"errors.{self._shared.name}.register")
                _log.warning("%s does not know %s: %s", self._shared.name, known.digest.hex()[:16], error.message)
        return known

    def geometry_of(self, namespace: bytes) -> Geometry | None:
        """The geometry of a namespace, None if it is not known here."""
        with self._lock:
            known = self._state.namespaces.get(namespace)
        return known.geometry if known else None

    def why_unknown(self, namespace: bytes) -> MissReason:
        """Why nothing is served of a namespace that is not known here: it never was, or what there was has died.

        Until it is made known again nobody can tell of a prompt whether it was among what was lost.
        """
        with self._lock:
            mourned = any(namespace in level.mourned for level in self._levels)
        return MissReason.LOST if mourned else MissReason.NAMESPACE

    def differences(self, identity: Identity, geometry: Geometry) -> list[str]:
        """For each namespace there is, what makes it another than that of this identity and geometry."""
        wanted = Namespace.of(identity, geometry)
        with self._lock:
            namespaces = list(self._state.namespaces.values())
        return [f"{known.digest.hex()[:16]}: {wanted.differences(known) or 'nothing'}" for known in namespaces]

    def _describe(self, level: Level, known: Namespace) -> None:
        """Make the frames of a namespace known to whoever opens the tier after us."""
        if not level.is_described(known):
            self._make_room(level, level.tier.footprint(len(known.descriptor())))
            level.describe(known)

    # Look-ups

    def match(
        self,
        chain: Chain,
        hints: Hints,
        *,
        session: str | None = None,
        pin_s: float | None = None,
        now_s: float | None = None,
    ) -> LookUp:
        """The longest restorable proper prefix of the chain's tokens, over all tiers.

        With `pin_s` its checkpoint is kept from being dropped for so many seconds. The policies learn of the request,
        and that it was made at `now_s`, if that is given, on a clock that all requests then must be told by.
        """
        if now_s is not None:
            self._state.tell(now_s)
        self._drop_expired()
        with self._lock:
            self._counters["lookups"] += 1
            number, clock_s, policy_s = next(self._numbers), self._clock(), self._state.policy_s()
            self._end_pins(clock_s)
            found = self._index.longest(chain, len(chain) - 1)
            if found.reason is MissReason.NAMESPACE:
                self._counters[f"misses.{found.reason}"] += 1
                return LookUp(None, found.reason, (), number)
            request = Request(chain, len(chain), session)
            take_at = tuple(level.policy.start(request, found, hints, policy_s, level.view) for level in self._levels)
            self._remember(number, _Running(request, take_at))
            hit = None
            if found.tokens:
                self._lifetimes.restored(chain, found, hints, clock_s)
                pin = None if pin_s is None else self._pin([found.prefix], clock_s + pin_s)
                hit = self._hit(found.tokens, self._index.support(chain, found.tokens), pin)
                self._counters["hits"] += 1
                self._counters[f"hits.{hit.tier}"] += 1
            else:
                self._counters[f"misses.{found.reason}"] += 1
            return LookUp(hit, found.reason, tuple(sorted(set().union(*take_at))), number)

    def find(self, chain: Chain) -> bool:
        """Look for frames of this chain that other processes have put into a shared directory since it was listed.

        Whether a restore can go further now than before. What is listed then is all that the longest prefix there
        needs. Asks the disk tier alone, whose answers cost microseconds; of a tier that cannot say nothing is found.
        """
        with self._lock:
            known = self._state.namespaces.get(chain.namespace)  # type: ignore[call-overload]
        levels = [level for level in self._levels if level.tier.durability is Durability.DISK]
        if known is None or not chain.blocks:
            return False
        found = [level.find(chain, known) for level in levels]
        return any(found)

    def _remember(self, number: int, running: _Running) -> None:
        self._running[number] = running
        self._running_tokens += running.charge
        while self._running_tokens > RUNNING_TOKENS_MAX:
            _, oldest = self._running.popitem(last=False)
            self._running_tokens -= oldest.charge

    def _hit(self, tokens: int, places: Sequence[Located], pin: int | None, own: Offer | None = None) -> Hit:
        """Of frames that are all in some tier, for anyone or for the suspended sequence of an offer."""
        frames = tuple(
            PlannedFrame(key_of(place.name), _own_lineage(own, place.name) if own else place.lineages[0])
            for place in places
        )
        slowest = max((self._order[place.copies[0][0]] for place in places), default=0)
        size = sum(place.copies[0][1] for place in places)
        tickets = (key_of(own.ticket),) if own else ()
        return Hit(tokens, frames, pin, self._levels[slowest].name, size, tickets)

    def _pin(
        self, prefixes: Iterable[PrefixId], until_s: float, of: _Suspended | None = None, *, kept: bool = False
    ) -> int:
        pins = tuple(self._index.pin(prefix, until_s) for prefix in prefixes)
        number = next(self._numbers)
        self._pins[number] = _Pin(pins, of, until_s, kept)
        heapq.heappush(self._pin_ends, (until_s, number))
        return number

    def _pin_suspended(self, of: _Suspended, until_s: float, *, kept: bool = False) -> int:
        """Keep a suspended sequence's frames until then, and no longer: whatever pin it has had is replaced."""
        before = self._pins.pop(self._suspended.pop(of, 0), None)
        # whether this rank has frames of its own or not: another of the set may
        number = self._suspended[of] = self._pin([of.prefix, of.private], until_s, of, kept=kept)
        for part in before.pins if before else ():
            self._index.unpin(part)
        return number

    def _end_pins(self, now_s: float) -> None:
        """Forget the pins whose deadline has passed."""
        while self._pin_ends and self._pin_ends[0][0] < now_s:
            self._end_pin(heapq.heappop(self._pin_ends)[1])

    def _end_pin(self, pin: int) -> _Pin | None:
        """Let go of what a pin holds; None if it had ended."""
        ended = self._pins.pop(pin, None)
        if ended is not None:
            for part in ended.pins:
                self._index.unpin(part)
            if ended.of is not None:
                self._left.append(ended.of.private)
                del self._suspended[ended.of]
        return ended

    def unpin(self, pin: int) -> bool:
        """End a pin; False if it had ended before. A suspended sequence's own frames go with it."""
        with self._lock:
            self._end_pins(self._clock())
            ended = self._end_pin(pin)
        self._drop_left()
        return ended is not None

    # Suspended sequences

    def keep(self, tickets: Sequence[FrameKey], frames: Sequence[FrameKey], pin_s: float) -> bool:
        """Keep a suspended sequence for `pin_s` seconds from now, whatever was said before; False if it is not here.

        Somebody who holds its tickets says so: what fails elsewhere does not let go of it any more. `frames`: all that
        it is restored from. Raises `IdentityError` for tickets that are none, `StaleError` for used ones, and
        `TierError` if it cannot be known.
        """
        of = _suspended_of(tickets)
        with self._lock:
            self._end_pins(self._clock())
            if of in self._used:
                raise StaleError("the suspended sequence was resumed", tickets[0].path())
            if not self._has_tickets(of, tickets):
                return False
            if not all(self._index.locate(key).copies for key in frames):
                return False
            self._pin_suspended(of, self._clock() + pin_s, kept=True)
        return True

    def use_up(self, tickets: Sequence[FrameKey], by: int, again_s: float) -> bool:
        """Use the tickets of a suspended sequence, which was restored; False if somebody else has, or they ran out.

        They are gone for good when this returns, also for who comes after a restart. Whoever asks with the same number
        `by` gets the same answer, and may restore the sequence for `again_s` seconds: an answer may have been lost.
        Raises as `keep` does; if a tier failed, who asks again finds out.
        """
        of = _suspended_of(tickets)
        with self._lock:
            self._end_pins(self._clock())
            if of in self._used:
                return self._used[of] == by
            if not self._has_tickets(of, tickets):
                return False
            if of in self._using:
                raise TierError("somebody else uses the same ticket just now", retryable=True)
            self._using.add(of)
        try:
            return self._take_tickets(of, by, again_s)
        finally:
            with self._lock:
                self._using.remove(of)

    def _take_tickets(self, of: _Suspended, by: int, again_s: float) -> bool:
        """Delete them wherever they are."""
        there = True
        for level in self._levels:
            with self._lock:
                names = [n for n in self._index.tickets(of.namespace, of.lineage, level.name) if n.prefix == of.prefix]
            there = level.take(names) and there if names else there
        with self._lock:
            if not there:  # they were dropped meanwhile
                return False
            self._used[of] = by
            if len(self._used) > USED_MAX:
                self._used.popitem(last=False)
            self._pin_suspended(of, self._clock() + again_s)
        return True

    def let_go(self, tickets: Sequence[FrameKey], *, kept: bool = True) -> None:
        """A suspended sequence's own frames are not needed any more; with `kept` also if somebody has its tickets."""
        of = _suspended_of(tickets)
        with self._lock:
            pin = self._pins.get(self._suspended.get(of, 0))
            if pin is not None and pin.kept and not kept:
                return
            if pin is not None:
                self._end_pin(self._suspended[of])
            else:
                self._left.append(of.private)
        self._drop_left()

    def _has_tickets(self, of: _Suspended, tickets: Sequence[FrameKey]) -> bool:
        """Whether these are all that there are of one suspension. Raises `TierError` if that is not known yet."""
        names = {plain_name(key) for key in tickets}
        for level in self._levels:
            found = self._index.tickets(of.namespace, of.lineage, level.name)
            if names == {name for name in found if name.prefix == of.prefix}:
                return True
        if self._unread:
            raise TierError("what it holds is not known yet", None, next(iter(self._unread)), retryable=True)
        return False

    def _refuse_used(self, offer: Offer | KnownChain) -> None:
        """Raise `StaleError` for what an earlier call of a spill still brings, after the sequence was resumed."""
        if isinstance(offer, Offer) and offer.private and offer.checkpoints:
            with self._lock:
                if _Suspended(offer.namespace, offer.lineage, offer.checkpoints[-1][1]) in self._used:
                    raise StaleError("the suspended sequence was resumed", key_of(offer.ticket).path())

    def pins(self) -> int:
        """How many pins have not ended."""
        with self._lock:
            self._end_pins(self._clock())
            return len(self._pins)

    def _leave_elsewhere(self, offer: Offer) -> None:
        """A computation is suspended in one place: what it has left where this offer's path does not lead is dropped.

        It ran on from there, went back, and took another way.
        """
        private = private_checkpoint(offer.namespace, offer.lineage)
        with self._lock:
            if not offer.private or not self._index.is_elsewhere(private, offer):
                return
            if not any(of.private == private for of in self._suspended):  # else somebody may have its ticket
                self._left.append(private)

    def _drop_left(self) -> None:
        with self._lock:
            if self._is_held():
                return
            left, self._left = self._left, []
        for level in self._levels if left else ():
            level.drop(((prefix, RemovalReason.DISCARDED) for prefix in left), at_leisure=True)

    def _drop_expired(self) -> None:
        with self._lock:
            if self._is_held():
                return
            expired = self._lifetimes.expired(self._clock())
        for level in self._levels if expired else ():
            level.drop(((prefix, RemovalReason.EXPIRED) for prefix in expired), at_leisure=True)

    def sweep(self) -> None:
        """Drop what has expired or was left, and delete what could not be deleted before."""
        self._drop_left()
        self._drop_expired()
        for level in self._levels:
            level.tidy()

    def fetch(
        self, keys: Sequence[FrameKey], bytes_max: int, lineages: Sequence[int] | None = None
    ) -> list[Bytes | MissReason]:
        """The stored bytes of these frames, read-only, or why one is not there.

        Ends before the frame that would take it over `bytes_max`, or over what may be in flight, but one always comes.
        Raises `CapacityError` if others are on their way too long for even that. A frame is read once, from the
        fastest tier that has it, for all who ask for it at once; checking it is the reader's, who also knows what it
        must be. Drop the bytes soon: they hold room in their tier. What did not come by the caller's deadline is a
        `MissReason.DEADLINE`.

        With `lineages`, one a key, a copy that is known to come from another computation is not taken (0: any will
        do). Of a copy that was found after a restart nothing is known before it was read: the reader checks again.
        """
        wanted = lineages or [0] * len(keys)
        with self._lock:
            sizes = [self._size_of(place) for place in map(self._index.locate, keys)]
        count = max(1, sum(total <= bytes_max for total in itertools.accumulate(sizes)))
        if not keys:
            return []
        try:
            count = self.in_flight.take(sizes[:count])
        except CapacityError:
            self._count(f"unserved.{MissReason.CAPACITY}")
            raise
        bodies: list[Bytes | MissReason] = [MissReason.LOST] * count
        try:
            self._fetch(keys[:count], wanted, bodies)
            self._fetch_below(keys, bodies)
        finally:
            for body, size in zip(bodies, sizes, strict=False):
                if isinstance(body, MissReason):
                    self._count(f"unserved.{body}")
                    self.in_flight.give_back(size)
                else:
                    self.in_flight.give_back_with(body, size)
        return bodies

    def _fetch(self, keys: Sequence[FrameKey], wanted: Sequence[int], bodies: list[Bytes | MissReason]) -> None:
        tried: list[set[str]] = [set() for _ in bodies]
        pending = list(range(len(bodies)))
        while pending:  # a frame can move while it is asked for; each round, it is looked for in one tier more
            asked: dict[str, list[int]] = {}
            with self._lock:
                for i in pending:
                    tier = _first_copy(self._index.locate(keys[i]), wanted[i], tried[i])
                    if tier is not None:
                        asked.setdefault(tier, []).append(i)
            pending = []
            for tier, indices in asked.items():
                level = self._by_name[tier]
                last = level is self._levels[-1] and self._shared is None
                with nullcontext() if last else _some_time():  # there may be another copy below
                    answers = level.share([keys[i] for i in indices])
                for i, answer in zip(indices, answers, strict=True):
                    if isinstance(answer, memoryview):
                        bodies[i] = np.frombuffer(answer, np.uint8)
                        continue
                    tried[i].add(tier)
                    pending.append(i)
                    if isinstance(answer, TierError):
                        bodies[i] = _why(answer)
                    else:
                        level.judge_if_listed(keys[i])

    def _fetch_below(self, keys: Sequence[FrameKey], bodies: list[Bytes | MissReason]) -> None:
        """Get from the shared tier what is not here."""
        left = [i for i, body in enumerate(bodies) if isinstance(body, MissReason)]
        known = self._state.namespaces.get(keys[left[0]].namespace) if left else None
        if self._shared is None or known is None:
            return
        assert self._flights is not None
        answers = self._flights.get([keys[i] for i in left], partial(self._shared.get, known=known))
        for i, answer in zip(left, answers, strict=True):
            if isinstance(answer, memoryview):
                bodies[i] = np.frombuffer(answer, np.uint8)
            elif isinstance(answer, TierError):
                bodies[i] = _why(answer)
        if came := sum(isinstance(answer, memoryview) for answer in answers):
            self._state.count(f"fetched.{self._shared.name}", came)
        if failed := sum(isinstance(answer, TierError) for answer in answers):
            self._state.count(f"errors.{self._shared.name}.get", failed)

    def _size_of(self, place: Located) -> int:
        """How many bytes a fetch of this frame brings; of one that is not here, at most."""
        if place.copies or self._shared is None:
            return place.copies[0][1] if place.copies else 0
        known = self._state.namespaces.get(key_of(place.name).namespace)
        return known.frame_bytes(place.name.group, place.name.tokens) if known else 0

    def explain(self, chain: PrefixChain) -> Explanation:
        """Why the chain's tokens are restorable as far as they are."""
        with self._lock:
            return self._index.explain(chain, len(chain) - 1)

    # Spills

    def admit(self, offer: Offer, durability: Durability, hints: Hints) -> Grant:
        """Settle which of the offered checkpoints are wanted and make room for them, before any byte moves.

        Each will be in the fastest tier of at least `durability` that is large enough to ever hold it, the shared one
        last, and in the faster ones as far as their policies like; a suspended sequence's only in the one. What they
        would rely on there is read, unless that was done before, and a bad frame is asked for again.

        The grant must be used by `spill` or ended by `abandon`. What is not wanted or has no room is declined with a
        reason, which is not an error. Raises `IdentityError` for an unknown namespace or what cannot be an offer, and
        `TierError` if the tier fails; then no room is held.
        """
        known = self._state.namespace(offer.namespace)
        offer.check(known.geometry)
        self._refuse_used(offer)
        grant = Grant(offer)
        stops, declined = self._wanted(offer, hints)
        places, homeless = self._places(stops, durability, known)
        below = self._shared if self._shared is not None and self._shared.durability >= durability else None
        if below is None:
            declined += homeless
        elif not any(level.tier.durability >= durability for level in self._levels):
            homeless, declined = [(n, DeclineReason.NO_TIER) for n, _ in offer.checkpoints], []  # its policy decides
        try:
            if below is not None and homeless:
                part = {tokens for tokens, _ in homeless}
                lent = replace(offer, checkpoints=tuple(c for c in offer.checkpoints if c[0] in part))
                grant.loan = below.admit(lent, hints, known)
                declined += grant.loan.declined
            elif self._shared is not None and not offer.private:
                self._shared.left(offer, hints)
            if places or grant.loan is not None:
                self._find_late()
                self._leave_elsewhere(offer)
                self._drop_left()
                self._drop_expired()
                if not offer.private:
                    with self._lock:
                        self._lifetimes.left(offer, stops, hints, self._clock())
            if grant.loan is not None and not offer.private:
                self._admit_above(self._levels, offer, stops, known, grant.targets)
            for level, some in places:
                declined += self._admit_to(level, offer, some, known, grant.targets)
                if not offer.private:
                    self._admit_above(self._levels[: self._order[level.name]], offer, some, known, grant.targets)
        except BaseException:
            self.abandon(grant)
            raise
        keys = dict.fromkeys(key_of(name) for target in grant.targets for name in target.names)
        keys.update(dict.fromkeys(grant.loan.keys if grant.loan else ()))
        ordered = sorted(keys, key=lambda key: (key.tokens, key.group == CHECKPOINT))
        grant.keys = tuple(key for key in ordered if key.group != TICKET)
        grant.tickets = tuple(key for key in ordered if key.group == TICKET)
        grant.declined = tuple(declined)
        for _, reason in declined:
            self._count(f"declined.{reason.name.lower()}")
        return grant

    def _places(
        self, stops: Sequence[int], durability: Durability, known: Namespace
    ) -> tuple[list[tuple[Level, list[int]]], list[tuple[int, DeclineReason]]]:
        """For each checkpoint, the fastest tier of this durability that can ever hold it; and those with none."""
        levels = [level for level in self._levels if level.tier.durability >= durability]
        places: dict[str, list[int]] = {}
        homeless: list[tuple[int, DeclineReason]] = []
        for tokens in stops:
            level = next((level for level in levels if _can_hold(level, tokens, known)), None)
            if level is not None:
                places.setdefault(level.name, []).append(tokens)
            else:
                homeless.append((tokens, DeclineReason.TOO_LARGE if levels else DeclineReason.NO_TIER))
        return [(self._by_name[name], some) for name, some in places.items()], homeless

    def _admit_above(
        self, faster: Sequence[Level], offer: Offer, stops: Sequence[int], known: Namespace, targets: list[_Target]
    ) -> None:
        """Let the faster tiers take what they like."""
        there = len(targets)
        for level in faster:
            fitting = [tokens for tokens in stops if _can_hold(level, tokens, known)]
            try:
                if fitting:
                    self._admit_to(level, offer, fitting, known, targets)
            except TieredCacheError:
                self._count(f"errors.{level.name}.admit")
        for target in targets[there:]:
            target.optional = True

    def spill(self, grant: Grant, batches: Iterable[Mapping[FrameKey, Mapping[str, HostArray]]]) -> list[Receipt]:
        """Keep the frames of a grant: encode, put, index, acknowledge; the grant is used up.

        The batches hold together, in the order of `grant.keys`, what the geometry declares for each key. When the next
        one is asked for, nothing of the last is held or needed any more. Raises `StateError` if a frame did not come,
        and what a tier raised if the one that the durability needs could not keep them; then nothing is acknowledged.
        """
        assert isinstance(grant.offer, Offer)
        known, awaited = self._state.namespace(grant.offer.namespace), set(grant.keys)
        receipts: list[Receipt] = []
        try:
            for arrays in batches:
                receipts += self._keep(grant, grant.offer, arrays, known)
                awaited -= arrays.keys()
                del arrays
            if awaited and (grant.targets or grant.loan):  # else it had ended before
                raise StateError(f"{len(awaited)} of {len(grant.keys)} granted frames did not come")
            if grant.tickets:
                receipts += self._keep(grant, grant.offer, {key: {} for key in grant.tickets}, known)
                self._refuse_used(grant.offer)
            if grant.loan is not None:
                grant.kept_below = grant.loan.commit()
            for target in grant.targets:
                target.private = None
            return [receipt for target in grant.targets for receipt in target.receipts] + receipts
        finally:
            self.abandon(grant)
            self._run_ahead()

    def _keep(
        self, grant: Grant, offer: Offer, arrays: Mapping[FrameKey, Mapping[str, HostArray]], known: Namespace
    ) -> list[Receipt]:
        """Put some frames into the tiers that need them; one that is optional and fails has no further part in it.

        Returns what has come to the shared tier.
        """

        def encoded(mode: Mode, name: FrameName) -> StoredFrame:
            key = key_of(name)
            lineage = name.private or offer.lineage_of(name.group, name.tokens)
            content = Frame(key, known.identity_digest, lineage, arrays[key])
            return _stored(name, lineage, frame.encode(content, known.geometry, mode))

        for target in list(grant.targets):
            names = [name for name in target.names if key_of(name) in arrays]
            try:
                target.receipts += self._fill(target, names, partial(encoded, target.level.mode), known)
            except (CapacityError, TierError):
                if not target.optional:
                    raise
                grant.targets.remove(target)
                self._end(target)
        if grant.loan is None:
            return []
        lent = [plain_name(key) for key in grant.loan.keys if key in arrays]
        return self._fill_below(grant.loan, lent, encoded, known)

    def _fill_below(
        self,
        loan: Loan,
        names: Sequence[FrameName],
        stored: Callable[[Mode, FrameName], StoredFrame],
        known: Namespace,
    ) -> list[Receipt]:
        """Put frames of a loan into the shared tier, in batches; raises what that raises."""
        assert self._shared is not None
        mode = self._shared.mode
        try:
            return [r for b in known.batches(names) for r in loan.put(self._encoded(mode, partial(stored, mode), b))]
        except (CapacityError, TierError):
            self._count(f"errors.{self._shared.name}.put")
            raise

    def abandon(self, grant: Grant) -> None:
        """End a grant: room that was not used is free again, and what came without its checkpoint goes. Idempotent."""
        targets, grant.targets = grant.targets, []
        for target in targets:
            self._end(target)
        if grant.loan is not None:
            grant.loan.end()

    def _end(self, target: _Target) -> None:
        target.room.release()
        target.level.release(target.claims)
        if target.private is not None:
            target.level.drop([(target.private, RemovalReason.ABANDONED)])

    def kept(self, offer: Offer, grant: Grant | None = None) -> list[Kept]:
        """Which of the offered checkpoints can be restored now, and what they would survive.

        With the grant that they came under, those that the shared tier has acknowledged are among them. Raises
        `IdentityError` for an unknown namespace; so does `plan_of`.
        """
        self._state.namespace(offer.namespace)
        found = list(grant.kept_below if grant else ())
        with self._lock:
            for tokens, _ in offer.checkpoints:
                usable = [_usable(offer, place) for place in self._support(offer, tokens)]
                if all(usable):
                    found.append(Kept(tokens, min(max(self._by_name[t].tier.durability for t in u) for u in usable)))
        best = {kept.tokens: kept for kept in sorted(found, key=lambda kept: kept.durability)}
        return [best[tokens] for tokens in sorted(best)]

    def plan_of(self, offer: Offer, *, pin_s: float) -> Hit | None:
        """How to restore the offer's last checkpoint, pinned; None if it is not there whole.

        For a private offer, every frame is one that this very sequence exported or was restored from.
        """
        offer.check(self._state.namespace(offer.namespace).geometry)
        if not offer.checkpoints:
            return None
        tokens, prefix = offer.checkpoints[-1]
        self._refuse_used(offer)
        with self._lock:
            places, until_s = self._support(offer, tokens), self._clock() + pin_s
            if not all(_usable(offer, place) for place in places):
                return None
            if not offer.private:
                return self._hit(tokens, places, self._pin([prefix], until_s))
            if not self._index.locate(offer.ticket).copies:
                return None
            of = _Suspended(offer.namespace, offer.lineage, prefix)
            before = self._pins.get(self._suspended.get(of, 0))
            if before is not None and before.kept:  # an earlier call of the same spill comes late
                return self._hit(tokens, places, self._suspended[of], offer)
            return self._hit(tokens, places, self._pin_suspended(of, until_s), offer)

    def _support(self, offer: Offer, tokens: int) -> list[Located]:
        """The frames of the offer's rank that a restore to `tokens` needs; a suspended sequence's own come first."""
        places = self._index.support(offer, tokens, offer.lineage if offer.private else 0)
        return [place for place in places if place.name.rank == offer.rank]

    def _wanted(self, offer: Offer, hints: Hints) -> tuple[list[int], list[tuple[int, DeclineReason]]]:
        """Where the policies want checkpoints: what they said when the request began, and now that it has ended."""
        stops = [tokens for tokens, _ in offer.checkpoints]
        with self._lock:
            running = self._began_with(offer)
            if offer.private or not stops:
                return stops[-1:], []
            if offer.rank:  # what rank 0 was asked for, and what it brings is worth nothing alone
                return stops, []
            request = running.request if running else Request(offer, len(offer) - offer.output_tokens)
            wanted = set() if running and self._levels else set(stops)
            for number, level in enumerate(self._levels):
                wanted.update(level.policy.finish(request, offer, offer.output_tokens, hints, self._state.policy_s()))
                wanted.update(running.take_at[number] if running else ())
        declined = [(n, DeclineReason.NOT_ASKED_FOR) for n in stops if n not in wanted]
        if hints.will_not_return and len(offer) in wanted:
            wanted.remove(len(offer))
            declined.append((len(offer), DeclineReason.SESSION_OVER))
        return [n for n in stops if n in wanted], declined

    def _began_with(self, offer: Offer) -> _Running | None:
        """The look-up that an offer names, which is forgotten; None if it is another's, from before a restart, say."""
        running = self._running.get(offer.request) if offer.request is not None else None
        if running is None:
            return None
        chain, blocks = running.request.chain, min(running.request.chain.blocks, offer.blocks)
        if chain.namespace != offer.namespace or chain.block_hash(blocks) != offer.block_hash(blocks):
            return None
        assert offer.request is not None
        del self._running[offer.request]
        self._running_tokens -= running.charge
        return running

    # Lending: frames come from others, who put them into the tier themselves

    def left(self, offer: Offer, hints: Hints) -> None:
        """A sequence has ended that is spilled elsewhere, if at all: policies and times to live learn of it."""
        offer.check(self._state.namespace(offer.namespace).geometry)
        stops = [tokens for tokens, _ in offer.checkpoints]
        with self._lock:
            self._wanted(offer, hints)
            self._lifetimes.left(offer, stops, hints, self._clock())

    def lend(self, chain: Offer | KnownChain, hints: Hints) -> Grant:
        """As `admit`, into a cache of one tier, for somebody who puts the frames there and then has them listed.

        Nothing is read: what the checkpoints would rely on and nobody has read is told by `unread`. Until `settle`
        or `abandon` nothing deletes the granted frames. Raises `IdentityError` and `TierError` as `admit` does.
        """
        (level,) = self._levels
        known = self._state.namespace(_digest_of(chain))
        if isinstance(chain, Offer):
            grant = self.admit(chain, Durability.HOST, hints)
        else:
            chain.check(known.digest, known.geometry.block_tokens)
            grant = Grant(chain)
            self._drop_left()
            self._drop_expired()
            grant.declined = tuple(self._admit_to(level, chain, [len(chain)], known, grant.targets))
            grant.keys = tuple(key_of(name) for target in grant.targets for name in target.names)
        grant.keys, grant.tickets = grant.keys + grant.tickets, ()  # all come from elsewhere
        try:
            level.lend([plain_name(key) for key in grant.keys])
        except BaseException:
            for target in grant.targets:
                self._end(target)
            raise
        return grant

    def unread(self, grant: Grant) -> tuple[FrameKey, ...]:
        """What the checkpoints that were not declined would rely on and nobody has read since it came or was found."""
        (level,), chain = self._levels, grant.offer
        declined = {tokens for tokens, _ in grant.declined}
        private, stops = 0, [len(chain)]
        if isinstance(chain, Offer):
            private, stops = chain.lineage if chain.private else 0, [n for n, _ in chain.checkpoints]
        longest = max((n for n in stops if n not in declined), default=0)
        with self._lock:
            names = self._index.unverified(chain, longest, level.name, private) if longest else []
        return tuple(key_of(name) for name in names if _means(chain, name))

    def settle(self, grant: Grant, landed: Sequence[Landed]) -> tuple[Kept, ...]:
        """List what has come under a grant of `lend`, which ends; which of its checkpoints are there whole now.

        Raises `StateError` if not all has come, `IdentityError` if names contradict others; nothing is kept then.
        """
        (level,) = self._levels
        try:
            self._refuse_used(grant.offer)
            if missing := set(grant.keys) - {found.key for found in landed}:
                raise StateError(f"{len(missing)} of {len(grant.keys)} granted frames did not come")
            level.enlist(landed)
            for target in grant.targets:
                target.private = None
            if isinstance(grant.offer, Offer):
                return tuple(self.kept(grant.offer))
            with self._lock:
                whole = not self._missing(level, grant.offer, [len(grant.offer)])
            return (Kept(len(grant.offer), level.tier.durability),) if whole else ()
        finally:
            self.take_back(grant)

    def take_back(self, grant: Grant) -> None:
        """End a grant of `lend`: its room is free, and what came and is not listed is to be deleted. Idempotent."""
        targets, grant.targets = grant.targets, []
        for target in targets:
            target.level.take_back(target.names)
            self._end(target)

    def delete_unlisted(self, keys: Sequence[FrameKey]) -> None:
        """What an ended grant may have left: delete it, unless it is listed or lent by now."""
        (level,) = self._levels
        level.delete([plain_name(key) for key in keys])

    def check_there(self, keys: Sequence[FrameKey]) -> None:
        """Somebody did not find these frames: those that are not there are listed no more. Raises `TierError`."""
        (level,) = self._levels
        level.check_there([plain_name(key) for key in keys])

    def note_sound(self, found: Sequence[Landed]) -> None:
        """Somebody has read these frames, and they are sound."""
        (level,) = self._levels
        level.note_sound(found)

    def judge(self, key: FrameKey) -> None:
        """Read and decode a frame, listed or not; one that is not sound is quarantined. Raises `TierError`."""
        (level,) = self._levels
        level.judge([plain_name(key)], decoded=True)

    def hold(self, *, held: bool = True) -> None:
        """Drop and delete nothing until `reconcile`: who may have done so before has still to stop."""
        for level in self._levels:
            level.held = held

    def _is_held(self) -> bool:
        return any(level.held for level in self._levels)

    def reconcile(self) -> None:
        """Compare the index with a listing of the tier: what others have put or lost since is found out."""
        for level in self._levels:
            level.reconcile()
            self._make_room(level, 0)

    # Room

    def _admit_to(
        self,
        level: Level,
        chain: Offer | KnownChain,
        stops: Sequence[int],
        known: Namespace,
        targets: list[_Target],
    ) -> list[tuple[int, DeclineReason]]:
        """Let a tier's policy choose among checkpoints, and make room for those it takes.

        Adds to `targets` what the tier then needs, unless that is nothing; returns why it does not take the others.
        Raises `TierError`; no room is held then.
        """
        level.tidy()
        try:
            self._describe(level, known)
        except CapacityError:
            return [(tokens, DeclineReason.NO_ROOM) for tokens in stops]
        if not level.lends:
            self._verify_support(level, chain, known)
        new: list[Candidate] = []
        for _ in range(ROOM_ATTEMPTS):
            free_bytes = self._bytes_free(level)
            with self._lock:
                new, own, refused = self._candidates(level, chain, stops, known)
                if not new:
                    return refused
                proposal = self._propose(level, new, free_bytes)
                admitted = set(proposal.admit)
                taken = [candidate for candidate in new if candidate.prefix in admitted]
                refused += [(c.tokens, DeclineReason.NOT_WORTH_ITS_ROOM) for c in new if c.prefix not in admitted]
                names = own or self._missing(level, chain, [c.tokens for c in taken])
                claims = tuple(self._index.claim(chain, candidate.tokens, level.name) for candidate in taken)
            try:
                self._evict(level, proposal.drop)
                level.drop((c.crowds_out, RemovalReason.CROWDED) for c in taken if c.crowds_out is not None)
                if level.lends:
                    level.tidy()
                if not taken:
                    return refused
                # what is staged may be another computation's, or have been dropped by another process
                if (isinstance(chain, Offer) and chain.private) or (level.staged and level.tier.is_shared()):
                    level.unstage(names)
                else:
                    names = level.list_staged(names)
                room = level.tier.reserve([known.frame_bytes(name.group, name.tokens) for name in names])
            except CapacityError:  # somebody else was faster, or a reader still holds what was dropped
                level.release(claims)
            except BaseException:
                level.release(claims)
                raise
            else:
                targets.append(_Target(level, tuple(names), room, claims, taken[-1].prefix if own else None))
                return refused
        return [(candidate.tokens, DeclineReason.NO_ROOM) for candidate in new]

    def _candidates(
        self, level: Level, chain: Offer | KnownChain, stops: Sequence[int], known: Namespace
    ) -> tuple[list[Candidate], list[FrameName], list[tuple[int, DeclineReason]]]:
        """What the policy is asked about; the frames of a suspended sequence that needs its own; what has no place."""

        def footprint(group: str, tokens: int) -> int:
            return level.tier.footprint(known.frame_bytes(group, tokens))

        new = self._index.candidates(chain, stops, level.name, footprint)
        if isinstance(chain, Offer) and chain.private:
            own = self._own_names(chain, level, crowded=not new)
            if not own:
                return [], [], []
            size = sum(footprint(n.group, n.tokens) for n in own if n.private or n.group == CHECKPOINT)
            candidate = new[-1] if new else self._nothing_shared(chain, known)
            marginal = candidate.marginal_bytes - candidate.own_bytes + size
            key = private_checkpoint(known.digest, chain.lineage)
            shares = any(name.group == CHECKPOINT and not name.private for name in own)
            crowds_out = candidate.crowds_out if shares else None
            return (
                [replace(candidate, prefix=key, own_bytes=size, marginal_bytes=marginal, crowds_out=crowds_out)],
                own,
                [],
            )
        placed = {candidate.tokens for candidate in new}
        crowded = [n for n in stops if n not in placed and self._index.missing(chain, n, level.name)]
        return new, [], [(tokens, DeclineReason.CROWDED) for tokens in crowded]

    def _nothing_shared(self, chain: Offer | KnownChain, known: Namespace) -> Candidate:
        """A candidate that needs no shared frame that is not there."""
        tokens, sizes = len(chain), (0,) * len(known.geometry.block_groups)
        anchor = self._index.anchor(chain, tokens)
        return Candidate(chain.prefix_hash(tokens), tokens, 0, 0, (), 0, frozenset(), sizes, anchor)

    def _own_names(self, offer: Offer, level: Level, *, crowded: bool) -> list[FrameName]:
        """What a tier still needs for a suspended sequence to get its very own bytes back; last of all its ticket.

        They are shared where the tier has this computation's or none. Where it has another's, or it is not known of
        which computation the sequence's are, the sequence has a copy of its own; so, too, if its checkpoint is missing
        and there is no place for one more.
        """
        names = []
        for place in self._support(offer, len(offer)):
            own = _own_lineage(offer, place.name)
            held = dict(zip((tier for tier, _ in place.copies), place.lineages, strict=True)).get(level.name)
            if held is None and own and not (crowded and place.name.group == CHECKPOINT):
                names.append(place.name)
            elif not own or held != own:
                names.append(place.name._replace(private=offer.lineage))
        return names if self._index.holds(offer.ticket, level.name) else [*names, offer.ticket]

    def _propose(self, level: Level, new: Sequence[Candidate], free_bytes: int) -> Proposal:
        staying = {*self._index.pinned(self._clock()), *level.leaving}
        return level.policy.propose(new, free_bytes, staying, self._state.policy_s(), level.view)

    def _missing(self, level: Level, chain: Offer | KnownChain, stops: Iterable[int]) -> list[FrameName]:
        """The shared frames that a tier still needs for these checkpoints: rows from the root down, one rank's."""
        names = (name for tokens in stops for name in self._index.missing(chain, tokens, level.name))
        return list(dict.fromkeys(name for name in names if _means(chain, name)))

    def _verify_support(self, level: Level, chain: Offer | KnownChain, known: Namespace) -> None:
        """Read what a checkpoint would rely on and nobody has read since it came: an acknowledgement covers it, too.

        Bad frames are set aside, and so asked for again. Raises `TierError` if the tier cannot say.
        """
        private = chain.lineage if isinstance(chain, Offer) and chain.private else 0
        with self._lock:
            names = self._index.unverified(chain, len(chain), level.name, private)
        for batch in known.batches([name for name in names if _means(chain, name)]):
            level.judge(batch)

    def _make_room(self, level: Level, bytes_: int) -> None:
        """Drop what the policy chooses until so much is free, as far as that is possible."""
        if level.held:
            return
        level.tidy()
        free_bytes = self._bytes_free(level) - bytes_
        if free_bytes < 0:
            with self._lock:
                proposal = self._propose(level, [], free_bytes)
            self._evict(level, proposal.drop)
            if level.lends:
                level.tidy()

    def _bytes_free(self, level: Level) -> int:
        """What a policy may use: without the room for copies ahead, whether there are any or not."""
        ahead = self._bytes_ahead(level)
        if level.staged_bytes > ahead:
            level.unstage(list(level.staged))
        return level.tier.usage().bytes_free + level.staged_bytes + level.staging_bytes - ahead

    def _bytes_ahead(self, level: Level) -> int:
        """How much a tier may hold of copies ahead of need of what is in the tier above."""
        number = self._order[level.name]
        if not number:
            return 0
        above = self._levels[number - 1]
        return min(int(above.tier.bytes_max * AHEAD_SHARE), int(level.tier.bytes_max * AHEAD_MAX))

    def trim(self, tier: str, bytes_max: int) -> None:
        """Change a tier's budget; what no longer fits is dropped now, as its policy chooses, before anything is put."""
        level = self._by_name[tier]
        level.tier.set_limit(bytes_max)
        self._make_room(level, 0)

    def _evict(self, level: Level, prefixes: Sequence[PrefixId]) -> None:
        """Drop checkpoints and what only they need, after the tier below had its chance; pinned ones stay.

        A tier below that is slow gets half of the time that is left; what it has not taken by then is gone.
        """
        below = level.below
        if below is None and self._shared is None:
            level.drop((prefix, RemovalReason.EVICTED) for prefix in prefixes)
            return
        with self._lock:
            mine = [prefix for prefix in prefixes if prefix not in level.leaving]
            level.leaving.update(mine)
        try:
            with _some_time():
                moved = {p for p in mine if (self._demote(p, level, below) if below else self._hand_over(p, level))}
            level.drop((prefix, RemovalReason.MOVED if prefix in moved else RemovalReason.EVICTED) for prefix in mine)
        finally:
            with self._lock:
                level.leaving.difference_update(mine)

    def _demote(self, prefix: PrefixId, level: Level, below: Level) -> bool:
        """Write a checkpoint, and what it needs, to the tier below, and read it back; whether it is there now.

        Nothing has left `level` yet, so that a reader finds it at any moment. If there is a shared tier further down,
        where the ranks of a set come together, those that are here go that way although another is not.
        """
        with self._lock:
            chain = None if prefix in self._index.pinned(self._clock()) else self._index.chain_to(prefix)
            if chain is None:  # a suspended sequence's own, or one whose path is not known
                return False
            assert isinstance(chain.namespace, bytes)
            known = self._state.namespace(chain.namespace)
            missing = self._index.missing(chain, len(chain), below.name)
            lacking = {name.rank for name in missing if not self._index.holds(name, level.name)}
            if lacking:
                chain = replace(chain, ranks=frozenset(range(known.geometry.shards)) - lacking)
                if self._shared is None or not chain.ranks:
                    return False  # it cannot be restored
        targets: list[_Target] = []
        try:
            refused = self._admit_to(below, chain, [len(chain)], known, targets)
            for target in targets:
                self._fill(target, target.names, partial(self._recoded, level, below.mode, known=known), known)
            self._verify_support(below, chain, known)
            with self._lock:
                return not refused and not self._missing(below, chain, [len(chain)])
        except TieredCacheError as error:
            self._count(f"errors.{below.name}.demote")
            _log.warning("tier %s: a checkpoint did not move to %s: %s", level.name, below.name, error.message)
            return False
        finally:
            for target in targets:
                target.room.release()
                below.release(target.claims)

    def _hand_over(self, prefix: PrefixId, level: Level) -> bool:
        """The same to the shared tier, from the last one here: there the ranks of a set come together."""
        assert self._shared is not None
        with self._lock:
            chain = None if prefix in self._index.pinned(self._clock()) else self._index.chain_to(prefix)
            if chain is None:
                return False
            known = self._state.namespace(_digest_of(chain))
            if known.geometry.shards > 1:
                lacking = {name.rank for name in self._index.missing(chain, len(chain), level.name)}
                chain = replace(chain, ranks=frozenset(range(known.geometry.shards)) - lacking)
                if not chain.ranks:
                    return False
        loan: Loan | None = None
        try:
            loan = self._shared.admit(chain, Hints(), known)
            with self._lock:
                if loan.declined or not all(self._index.holds(key, level.name) for key in loan.keys):
                    return False
            recoded = partial(self._recoded, level, known=known)
            self._fill_below(loan, [plain_name(key) for key in loan.keys], recoded, known)
            return any(kept.tokens == len(chain) for kept in loan.commit())
        except TieredCacheError as error:
            self._count(f"errors.{self._shared.name}.demote")
            _log.warning("tier %s: a checkpoint did not move to %s: %s", level.name, self._shared.name, error.message)
            return False
        finally:
            if loan is not None:
                loan.end()

    # Ahead of need

    def _run_ahead(self) -> None:
        """Copy ahead on the executor for that, which runs at most once at a time."""
        if self._ahead is None:
            return
        with self._lock:
            self._ahead_again = self._ahead_runs
            if self._ahead_runs or self._closed:
                return
            self._ahead_runs = True
        self._ahead_job = self._ahead.submit(self._keep_ahead)

    def _keep_ahead(self) -> None:
        while True:
            self._find_late()
            for level in self._levels:
                if level.below is None:
                    continue
                try:
                    self._copy_ahead(level, level.below)
                except Exception as error:  # noqa: BLE001 - one of ours would be seen by nobody
                    self._count(f"errors.{level.below.name}.ahead")
                    ours = not isinstance(error, TieredCacheError)
                    _log.warning("copying ahead to %s: %s", level.below.name, str(error), exc_info=ours)
            with self._lock:
                self._ahead_runs = self._ahead_again and not self._closed
                self._ahead_again = False
                if not self._ahead_runs:
                    self._state.freed.notify_all()
                    return

    def _copy_ahead(self, level: Level, below: Level) -> None:
        """Write what is likely to be dropped next to the tier below and read it back, while a tier is nearly full.

        What policies decide is not touched: the copies are staged, and the tier below has room set apart for them. They
        go when what they are copies of has gone, or is far from being dropped.
        """
        below.tidy()
        if below.tier.is_shared():  # others drop there what they do not know
            return
        bytes_ahead = self._bytes_ahead(below)
        if self._bytes_free(level) >= bytes_ahead:
            return
        with self._lock:
            likely = list(itertools.islice(level.policy.foresee(level.view), LIKELY_MAX))
        needed: dict[FrameName, None] = {}
        size = 0
        for prefix in likely:
            names, known = self._to_copy(prefix, level, below)
            if known is None:
                continue
            needed.update(dict.fromkeys(names))
            new = [name for name in names if name not in below.staged]
            sizes = [known.frame_bytes(name.group, name.tokens) for name in new]
            size = below.staged_bytes + sum(map(below.tier.footprint, sizes))
            if size > bytes_ahead:
                break
            if new:
                self._stage(new, level, below, known)
            if self._closed:
                return
        if size > bytes_ahead:
            unlikely = [name for name in below.staged if name not in needed]
            below.unstage(unlikely)

    def _to_copy(self, prefix: PrefixId, level: Level, below: Level) -> tuple[list[FrameName], Namespace | None]:
        """What the tier below lacks of a checkpoint that could move there; no namespace if it could not."""
        with self._lock:
            chain = self._index.chain_to(prefix) if prefix in level.view else None
            if chain is None:
                return [], None
            assert isinstance(chain.namespace, bytes)
            missing = self._index.missing(chain, len(chain), below.name)
            if not all(self._index.holds(name, level.name) for name in missing):
                return [], None
            return missing, self._state.namespace(chain.namespace)

    def _stage(self, names: Sequence[FrameName], level: Level, below: Level, known: Namespace) -> None:
        recoded = partial(self._recoded, level, below.mode, known=known)
        sizes = [known.frame_bytes(name.group, name.tokens) for name in names]
        with until(Deadline.after(PART_S)):
            self._describe(below, known)
            below.stage(sizes, (self._encoded(below.mode, recoded, batch) for batch in known.batches(names)))

    def _recoded(self, source: Level, mode: Mode, name: FrameName, *, known: Namespace) -> StoredFrame:
        """A frame as it lies in one tier, checked and encoded for another."""
        key = key_of(name)
        (answer,) = source.get([key])
        if not isinstance(answer, memoryview):
            source.judge_if_listed(key)
            raise TierError(answer.message, key.path(), source.name)
        try:
            header = known.check(key, answer)
            if mode is source.mode:
                return StoredFrame(name, key, header.lineage, answer.nbytes, [answer])
            content = frame.decode(answer, key=key, identity_digest=known.identity_digest, geometry=known.geometry)
        except BAD:
            source.judge_if_listed(key, decoded=True)
            raise
        return _stored(name, header.lineage, frame.encode(content, known.geometry, mode))

    def _fill(
        self,
        target: _Target,
        names: Sequence[FrameName],
        stored: Callable[[FrameName], StoredFrame],
        known: Namespace,
    ) -> list[Receipt]:
        """Put frames of a target, in batches; raises what the tier raises."""
        durability = target.level.tier.durability
        receipts: list[Receipt] = []
        for batch in known.batches(names):
            arrivals = target.level.put(self._encoded(target.level.mode, stored, batch), target.room)
            receipts += [Receipt(arrived.key, arrived.bytes, durability, arrived.created) for arrived in arrivals]
        return receipts

    def _encoded(
        self, mode: Mode, stored: Callable[[FrameName], StoredFrame], batch: Sequence[FrameName]
    ) -> list[StoredFrame]:
        """The stored forms of a batch, made by the executor if that is more than a copy."""
        if mode is Mode.RAW:
            return [stored(name) for name in batch]
        held, limit_s = deadlines(), wait_s(ENCODE_S)

        def in_time(name: FrameName) -> StoredFrame:
            with until(*held):
                return stored(name)

        try:
            return list(self._executor.map(in_time, batch, timeout=limit_s))
        except TimeoutError:
            raise DeadlineError(f"{len(batch)} frames were not encoded within {limit_s:.3g} s") from None

    # What is there

    def report_bad(self, key: FrameKey, why: str) -> None:
        """A reader could not use a frame: every copy is read and decoded, and one that is not sound is quarantined."""
        self._count("reported")
        for level in self._levels:
            level.judge_if_listed(key, decoded=True)
            with self._lock:
                listed = self._index.holds(key, level.name)
            if listed:  # else what was wrong with it is told
                _log.warning("tier %s: a reader could not use %s: %s", level.name, key.short(), why)

    def recover(self, *, later: bool = False) -> int:
        """Rebuild the index from what the durable tiers hold, by their names alone; returns how many frames there are.

        To be called once, before anything else. Files that are no frames, and frames of namespaces without a sound
        descriptor, are left alone and counted. Rows that no checkpoint needs, the rest of a spill that was cut off,
        are deleted; so is what a smaller budget than before has no room for, as the policy chooses. What died with an
        earlier process's memory, and is in no tier, is missed as lost from now on, as far as it is known. Raises
        `TierError` if a tier cannot be listed; with `later`, what it holds is found as soon as it can be, by a spill
        or while copies are made ahead, and is used no sooner.
        """
        found = 0
        for level in self._levels:
            if level.tier.durability is Durability.HOST:
                continue
            try:
                found += self._find(level)
            except TierError as error:
                if not later:
                    raise
                self._unread[level.name] = self._clock() + FIND_AGAIN_S
                _log.warning("tier %s: what it holds is not known yet: %s", level.name, error.message)
        for level in self._levels:  # when it is known what other tiers have
            level.mourn()
        return found

    def _find(self, level: Level) -> int:
        try:
            found = level.adopt()
        except TierError:
            self._count(f"errors.{level.name}.list")
            raise
        self._pin_found(level)
        if level.tier.usage().bytes_free < 0:
            self._make_room(level, 0)
        return found

    def _pin_found(self, level: Level) -> None:
        """Keep the suspended sequences that were found in a tier: somebody may have their tickets."""
        with self._lock:
            for key in map(key_of, self._index.all_tickets(level.name)):
                of = _suspended_of([key])
                if of not in self._suspended and of not in self._used and of.private not in self._left:
                    self._pin_suspended(of, self._clock() + FOUND_PIN_S, kept=True)

    def _find_late(self) -> None:
        """Look again at the tiers that could not be listed."""
        if not self._unread:
            return
        with self._lock:
            now_s = self._clock()
            due = [level for level in self._levels if self._unread.get(level.name, math.inf) <= now_s]
            self._unread.update((level.name, now_s + FIND_AGAIN_S) for level in due)
        for level in due:
            try:
                with _some_time():
                    found = self._find(level)
            except TierError:
                continue
            with self._lock:
                self._unread.pop(level.name, None)
            _log.warning("tier %s: %d frames are found", level.name, found)

    # Figures

    def counters(self) -> dict[str, int]:
        """How often what happened since the start: never goes down.

        Reasons are of closed lists: `misses` and `unserved` (frames that were asked for, and did not come) of
        `MissReason`, `declined` of `DeclineReason`, `dropped.TIER` of `RemovalReason`. `frames.TIER.lost` are those
        that were there and are not any more, by nobody's decision. `frames.TIER.put` + `frames.TIER.found` - all other
        `frames.TIER.REASON` = frames in the tier; `bytes` likewise. `fetched` are frames that the shared tier gave.
        """
        with self._lock:
            return dict(self._counters)

    def usage(self) -> dict[str, TierUsage]:
        """The budget, and what they hold, of the tiers that answer at once, or nearly so: figures wait for no disk."""
        found: dict[str, TierUsage] = {}
        for level in self._levels:
            with suppress(TierError), until(Deadline.after(USAGE_S)):
                found[level.name] = level.tier.usage()
        return found

    def health(self) -> dict[str, TierHealth]:
        """How each tier's calls went, the shared one's among them, and which tier is left alone for a while."""
        found = {level.name: health_of(level.tier) for level in self._levels}
        return found if self._shared is None else found | {self._shared.name: self._shared.health()}

    def close(self) -> None:
        """Let go of the tiers; what they hold stays where it is durable.

        What is under way is waited for, for `CLOSE_S` at most: copies ahead, then each tier's calls. What a tier that
        hangs has not done by then is not there, and nobody was told that it is.
        """
        with self._lock:
            self._closed = True
            self._ahead_runs = self._ahead_runs and not (self._ahead_job is not None and self._ahead_job.cancel())
        with until(Deadline.after(CLOSE_S)):
            with self._lock:
                self._state.freed.wait_for(lambda: not self._ahead_runs, wait_s(CLOSE_S / 2))
            closers = [(level.name, level.tier.close) for level in self._levels]
            if self._shared is not None:
                closers.append((self._shared.name, self._shared.close))
            for name, close in closers:
                try:
                    close()
                except TieredCacheError as error:
                    _log.warning("tier %s: closed, but not cleanly: %s", name, error)

    def _count(self, what: str) -> None:
        self._state.count(what)


def _some_time() -> AbstractContextManager[None]:
    """Half of the time that is left, for what helps and must not cost the rest."""
    return until(Deadline.after(wait_s(2 * PART_S) / 2))


def _stored(name: FrameName, lineage: int, encoded: EncodedFrame) -> StoredFrame:
    return StoredFrame(name, encoded.key, lineage, encoded.total_bytes, encoded.buffers())


def _can_hold(level: Level, tokens: int, known: Namespace) -> bool:
    """Whether a tier's budget is enough for one rank's checkpoint and all that it needs."""
    geometry, footprint = known.geometry, level.tier.footprint
    size = geometry.block_tokens
    need = sum(
        len(group.blocks_needed(tokens, size)) * footprint(known.frame_bytes(group.name, size))
        for group in geometry.block_groups
    )
    if geometry.needs_checkpoint(tokens):
        need += footprint(known.frame_bytes(CHECKPOINT, tokens))
    return need <= level.tier.bytes_max


def _digest_of(chain: Offer | KnownChain) -> bytes:
    assert isinstance(chain.namespace, bytes)
    return chain.namespace


def _means(chain: Offer | KnownChain, name: FrameName) -> bool:
    """Whether a frame is of a rank that the chain is about."""
    return name.rank == chain.rank if isinstance(chain, Offer) else chain.ranks is None or name.rank in chain.ranks


def _why(error: TierError) -> MissReason:
    """What a tier's error means to who has asked for a frame."""
    return MissReason.DEADLINE if isinstance(error, DeadlineError) else MissReason.TIER_ERROR


def _suspended_of(tickets: Sequence[FrameKey]) -> _Suspended:
    """Which suspension these are the tickets of. Raises `IdentityError` if they are not one's."""
    of = {_Suspended(key.namespace, key.private, key.prefix) for key in tickets}
    if len(of) != 1 or any(key.group != TICKET or not key.private for key in tickets):
        what = ", ".join(f"{key.group} of {key.private}" for key in tickets[:3])
        raise IdentityError(f"not one suspended sequence's tickets: {what or 'none'}")
    return of.pop()


def _own_lineage(offer: Offer, name: FrameName) -> int:
    """Which computation a frame is of that a suspended sequence may use; 0 if that is not known."""
    return name.private or offer.lineage_of(name.group, name.tokens)


def _usable(offer: Offer, place: Located) -> list[str]:
    """The tiers whose copy the offer's sequence may rely on."""
    own = _own_lineage(offer, place.name) if offer.private else 0
    pairs = zip(place.copies, place.lineages, strict=True)
    return [tier for (tier, _), lineage in pairs if not offer.private or (own and lineage == own)]


def _first_copy(place: Located, lineage: int, tried: Collection[str]) -> str | None:
    """The fastest tier, not tried, with a copy from this computation, or else with one of unknown origin; 0: any."""
    left = [(t, found) for (t, _), found in zip(place.copies, place.lineages, strict=True) if t not in tried]
    sure = [tier for tier, found in left if lineage in {0, found}]
    return next(iter(sure or [tier for tier, found in left if not found]), None)
