"""`TieredCache`: one node's tiers as one cache of frames. The module that knows frames, index, policies and tiers.

A spill is `admit` (what is wanted, and room for it), then `spill` (keep it, acknowledge it), or `abandon`. A restore is
`match` (the longest restorable prefix, pinned) and `fetch`. Under pressure the policy of a tier names checkpoints to
drop; they are written to the tier below, verified there, and only then dropped above: a frame is never in neither
place. What a policy is asked about is the checkpoint; which frames that means is the index's arithmetic.

Threads: any. One lock guards index and policies; it is never held while bytes are read, written, encoded or hashed.
What is on its way into a tier is claimed in the index, so that no one drops the prefix under it.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from tiered_cache import frame
from tiered_cache.codecs import Mode
from tiered_cache.errors import (
    CapacityError,
    ChecksumError,
    FrameError,
    FrameNotFoundError,
    GeometryError,
    IdentityError,
    MissReason,
    TieredCacheError,
    TierError,
    VersionError,
)
from tiered_cache.frame import Frame, FrameHeader
from tiered_cache.geometry import Geometry
from tiered_cache.identity import CHECKPOINT, DIGEST_BYTES, FrameKey, Identity, PrefixChain, namespace_of, tagged_hash
from tiered_cache.index import Claim, Explanation, KnownChain, Located, PrefixIndex
from tiered_cache.policy.base import CachePolicy, Hints, Request
from tiered_cache.prefix_tree import (
    Candidate,
    FrameName,
    Layout,
    PrefixId,
    RemovalReason,
    key_of,
    private_checkpoint,
)
from tiered_cache.tiers.base import Durability, GetRequest, PutItem, PutOutcome, Reservation, Tier, TierUsage

Bytes = npt.NDArray[np.uint8]
HostArray = npt.NDArray[np.generic]
Clock = Callable[[], float]

_DESCRIPTOR_PATH = re.compile(rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})/descriptor")
DESCRIPTOR_VERSION = 1
DESCRIPTOR_BYTES_MAX = 16 << 20
RUNNING_MAX = 1 << 14
"""How many requests are remembered between look-up and spill; the oldest go first."""
BATCH_BYTES_MAX = 64 << 20
"""How much is encoded and put at once, apart from a single larger frame."""
ROOM_ATTEMPTS = 3
"""How often room is made for one spill, if others take what was freed."""


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
    """For each full block, which computation its rows come from."""
    lineage: int
    """Which computation the checkpoints come from."""
    private: bool = False
    """Insist on this sequence's own bytes, for its last checkpoint: it is suspended."""
    request: int | None = None
    """The look-up that the sequence began with, if it was on this node."""
    output_tokens: int = 0
    """How many of the tokens were generated."""

    @property
    def blocks(self) -> int:
        return len(self.hashes) - 1

    def __len__(self) -> int:
        return self.checkpoints[-1][0]

    def block_hash(self, index: int, /) -> bytes:
        return self.hashes[index]

    def prefix_hash(self, tokens: int, /) -> bytes:
        block, tail = divmod(tokens, self.block_tokens)
        return dict(self.checkpoints)[tokens] if tail else self.hashes[block]

    def lineage_of(self, group: str, tokens: int) -> int:
        """Which computation a frame of this sequence comes from."""
        return self.lineage if group == CHECKPOINT else self.lineages[tokens // self.block_tokens - 1]


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
    """One frame of a restore, and which computation it comes from."""

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


@dataclass(frozen=True, slots=True)
class _Target:
    """One tier's part in a grant: what it still needs, the room for that, and the checkpoints it then has."""

    slot: TierSlot
    names: tuple[FrameName, ...]
    room: Reservation
    claim: Claim
    checkpoints: tuple[PrefixId, ...]


@dataclass(slots=True)
class Grant:
    """Room for what an offer still has to bring: send the frames of `keys`, then `spill`; or `abandon`."""

    offer: Offer
    keys: tuple[FrameKey, ...]
    declined: tuple[tuple[int, str], ...]
    """(token count, why) of the offer's checkpoints that are not wanted."""
    targets: list[_Target] = field(default_factory=list, repr=False)
    """The cache's own."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A request between its look-up and its spill, and where each tier's policy wants checkpoints."""

    request: Request
    take_at: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Pin:
    """Pins in the index: the prefix, and the sequence's private checkpoint if it has one."""

    pins: tuple[int, ...]
    private: PrefixId | None
    until_s: float


class _Stored(NamedTuple):
    """A frame's stored form."""

    name: FrameName
    lineage: int
    buffers: Sequence[memoryview]


class _Namespace:
    """What the cache knows of one identity and geometry."""

    def __init__(self, identity_digest: bytes, document: Mapping[str, object], geometry: Geometry, layout: Layout):
        self.identity_digest = identity_digest
        self.document = document
        self.geometry = geometry
        self.layout = layout
        self._sizes: dict[tuple[str, int], int] = {}

    def frame_bytes(self, group: str, tokens: int) -> int:
        """The most bytes that a stored frame has; the same for all spans of one length."""
        start, stop = self.geometry.span(group, tokens)
        size = self._sizes.get((group, stop - start))
        if size is None:
            size = self._sizes[group, stop - start] = frame.stored_bytes_max(self.geometry, group, tokens)
        return size


class TieredCache:
    """All frames of one node, over its tiers from the fastest to the slowest."""

    def __init__(self, slots: Sequence[TierSlot], executor: Executor, *, clock: Clock = time.monotonic) -> None:
        """`executor` runs the encoding for slow tiers; it stays the caller's. Tiers become the cache's to close."""
        assert slots
        self._slots = tuple(slots)
        self._by_name = {slot.tier.name: slot for slot in slots}
        self._executor = executor
        self._clock = clock
        self._lock = threading.RLock()  # index, policies, namespaces, pins, counters
        self._index = PrefixIndex([slot.tier.name for slot in slots])
        self._namespaces: dict[bytes, _Namespace] = {}
        self._running: OrderedDict[int, _Running] = OrderedDict()
        self._pins: dict[int, _Pin] = {}
        self._numbers = itertools.count(1)
        self._counters: Counter[str] = Counter()

    # Namespaces

    def register(self, identity: Identity, geometry: Geometry) -> bytes:
        """Make an identity and geometry known, and write their descriptor to every tier; returns the namespace."""
        namespace = namespace_of(identity.digest(), geometry.fingerprint())
        with self._lock:
            if namespace in self._namespaces:
                return namespace
        document = identity.to_document()
        self._add_namespace(namespace, identity.digest(), geometry, document)
        body = _descriptor(identity.digest(), document, geometry)
        for slot in self._slots:
            if slot.tier.durability is Durability.HOST:  # forgets it together with us
                continue
            path = _descriptor_path(namespace)
            with slot.tier.reserve([len(body)]) as room:
                slot.tier.put([PutItem(path, [body])], room)
        return namespace

    def geometry_of(self, namespace: bytes) -> Geometry | None:
        """The geometry of a namespace, None if it is not known here."""
        with self._lock:
            known = self._namespaces.get(namespace)
        return known.geometry if known else None

    def differences(self, identity: Identity, geometry: Geometry) -> list[str]:
        """For each namespace there is, what makes it another than that of this identity and geometry."""
        wanted, found = identity.to_document(), []
        with self._lock:
            namespaces = list(self._namespaces.items())
        for namespace, known in namespaces:
            differing = [
                name for name in sorted({*wanted, *known.document}) if wanted.get(name) != known.document.get(name)
            ]
            what = [f"identity: {', '.join(differing)}"] if differing else []
            try:
                geometry.check(known.geometry)
            except GeometryError as error:
                what.append(error.message)
            found.append(f"{namespace.hex()[:16]}: {'; '.join(what) or 'nothing'}")
        return found

    def _add_namespace(
        self, namespace: bytes, identity_digest: bytes, geometry: Geometry, document: Mapping[str, object]
    ) -> None:
        layout = Layout.of(namespace, PrefixChain(namespace, geometry.block_tokens).block_hash(0), geometry)
        with self._lock:
            self._index.register(layout)
            self._namespaces[namespace] = _Namespace(identity_digest, document, geometry, layout)

    def _namespace(self, namespace: bytes) -> _Namespace:
        with self._lock:
            known = self._namespaces.get(namespace)
        if known is None:
            raise IdentityError(f"namespace {namespace.hex()[:16]} is not registered on this node")
        return known

    # Look-ups

    def match(
        self, chain: PrefixChain, hints: Hints, *, session: str | None = None, pin_s: float | None = None
    ) -> LookUp:
        """The longest restorable proper prefix of the chain's tokens, over all tiers.

        With `pin_s` its checkpoint is kept from being dropped for so many seconds. The policies learn of the request.
        """
        with self._lock:
            self._counters["lookups"] += 1
            number = next(self._numbers)
            found = self._index.longest(chain, len(chain) - 1)
            if found.reason is MissReason.NAMESPACE:
                self._counters[f"misses.{found.reason}"] += 1
                return LookUp(None, found.reason, (), number)
            now_s = self._clock()
            request = Request(chain, len(chain), session)
            take_at = tuple(
                slot.policy.start(request, found, hints, now_s, self._index.view(slot.tier.name))
                for slot in self._slots
            )
            self._running[number] = _Running(request, take_at)
            if len(self._running) > RUNNING_MAX:
                self._running.popitem(last=False)
            hit = None
            if found.tokens:
                pin = None if pin_s is None else self._pin([found.prefix], None, now_s + pin_s)
                hit = self._hit(self._index.support(chain, found.tokens), found.tokens, pin)
            self._counters["hits" if hit else f"misses.{found.reason}"] += 1
            if hit:
                self._counters[f"hits.{hit.tier}"] += 1
            return LookUp(hit, found.reason, tuple(sorted(set().union(*take_at))), number)

    def _hit(self, located: Sequence[Located], tokens: int, pin: int | None) -> Hit:
        """Of frames that are all in some tier."""
        slowest = max((self._slots.index(self._by_name[place.copies[0][0]]) for place in located), default=0)
        frames = tuple(PlannedFrame(_key(place.name), place.lineages[0]) for place in located)
        return Hit(tokens, frames, pin, self._slots[slowest].tier.name)

    def _pin(self, prefixes: Iterable[PrefixId], private: PrefixId | None, until_s: float) -> int:
        pins = tuple(self._index.pin(prefix, until_s) for prefix in prefixes)
        number = next(self._numbers)
        self._pins[number] = _Pin(pins, private, until_s)
        return number

    def unpin(self, pin: int) -> bool:
        """End a pin; False if it had ended before. A suspended sequence's own frames go with it."""
        with self._lock:
            ended = self._pins.pop(pin, None)
            if ended is None:
                return False
            for part in ended.pins:
                self._index.unpin(part)
        if ended.private is not None:
            for slot in self._slots:
                self._drop(slot, [ended.private], RemovalReason.DISCARDED)
        return ended.until_s > self._clock()

    def fetch(self, keys: Sequence[FrameKey], bytes_max: int) -> list[Bytes | MissReason]:
        """The stored bytes of these frames, read-only, or why one is not there.

        Ends before the frame that would take it over `bytes_max`, but one always comes. A frame is read once, from the
        fastest tier that has it; checking it is the reader's, who also knows what it must be. Drop the bytes soon:
        they hold room in their tier.
        """
        with self._lock:
            located = [self._index.locate(key) for key in keys]
        total = itertools.accumulate(place.copies[0][1] if place.copies else 0 for place in located)
        count = max(1, sum(size <= bytes_max for size in total))
        bodies: list[Bytes | MissReason] = [MissReason.LOST] * len(located[:count])
        for slot in self._slots:
            name = slot.tier.name
            asked = [
                i
                for i, place in enumerate(located[:count])
                if isinstance(bodies[i], MissReason) and any(tier == name for tier, _ in place.copies)
            ]
            answers = slot.tier.get([GetRequest(keys[i].path()) for i in asked]) if asked else []
            for i, answer in zip(asked, answers, strict=True):
                if isinstance(answer, memoryview):
                    bodies[i] = np.frombuffer(answer, np.uint8)
                elif isinstance(answer, FrameNotFoundError):
                    self._forget(slot, keys[i], RemovalReason.LOST)
                else:
                    bodies[i] = MissReason.TIER_ERROR
                    self._count(f"errors.{name}.get")
        return bodies

    def explain(self, chain: PrefixChain) -> Explanation:
        """Why the chain's tokens are restorable as far as they are."""
        with self._lock:
            return self._index.explain(chain, len(chain) - 1)

    # Spills

    def admit(self, offer: Offer, durability: Durability, hints: Hints) -> Grant:
        """Settle which of the offered checkpoints are wanted and make room for them, before any byte moves.

        They will be in the fastest tier of at least `durability`, and in the faster ones as far as their policies
        like. The grant must be used by `spill` or ended by `abandon`. Raises `IdentityError` for an unknown
        namespace; what is not wanted or has no room is declined with a reason, which is not an error.
        """
        known = self._namespace(offer.namespace)
        required = next((slot for slot in self._slots if slot.tier.durability >= durability), None)
        if required is None:
            why = f"no tier of this node has durability {durability.name}"
            return Grant(offer, (), tuple((tokens, why) for tokens, _ in offer.checkpoints))
        stops, declined = self._wanted(offer, hints)
        self._verify_incumbents(offer, required, known)
        targets = []
        for slot in (required, *(s for s in self._slots if s.tier.durability < required.tier.durability)):
            target, refused = self._admit_to(slot, offer, stops, known)
            if slot is required:
                declined += refused
            if target is not None:
                targets.append(target)
        names = dict.fromkeys(name for target in targets for name in target.names)
        return Grant(offer, tuple(map(_key, names)), tuple(declined), targets)

    def spill(self, grant: Grant, arrays: Mapping[FrameKey, Mapping[str, HostArray]]) -> list[Receipt]:
        """Keep the frames of a grant: encode, put, index, acknowledge; the grant is used up.

        `arrays` holds what the geometry declares for each key, and may change afterwards. Raises what a tier raised
        if the one that the durability needs could not keep them; then nothing is acknowledged.
        """
        offer, known = grant.offer, self._namespace(grant.offer.namespace)

        def encoded(mode: Mode, name: FrameName) -> _Stored:
            key = _key(name)
            lineage = offer.lineage_of(name.group, name.tokens)
            content = Frame(key, known.identity_digest, lineage, arrays[key])
            return _Stored(name, lineage, frame.encode(content, known.geometry, mode).buffers())

        receipts: list[Receipt] = []
        try:
            for number, target in enumerate(grant.targets):
                try:
                    receipts += self._fill(target, partial(encoded, target.slot.mode), known)
                except (CapacityError, TierError):
                    if not number:
                        raise
        finally:
            self.abandon(grant)
        return receipts

    def abandon(self, grant: Grant) -> None:
        """End a grant: room that was not used is free again, and what came without its checkpoint goes. Idempotent."""
        targets, grant.targets = grant.targets, []
        for target in targets:
            target.room.release()
            self._release(target.slot, target.claim)

    def kept(self, offer: Offer) -> list[Kept]:
        """Which of the offered checkpoints can be restored now, and what they would survive."""
        found = []
        with self._lock:
            for tokens, _ in offer.checkpoints:
                places = [place for place in self._support(offer, tokens) if place.name.rank == offer.rank]
                if all(place.copies for place in places):
                    survives = min(max(self._by_name[t].tier.durability for t, _ in p.copies) for p in places)
                    found.append(Kept(tokens, survives))
        return found

    def plan_of(self, offer: Offer, *, pin_s: float) -> Hit | None:
        """How to restore the offer's last checkpoint, pinned; None if it is not there whole.

        For a private offer, every frame is one that this very sequence exported or was restored from.
        """
        tokens, prefix = offer.checkpoints[-1]
        with self._lock:
            located = [place for place in self._support(offer, tokens) if place.name.rank == offer.rank]
            if not located or not all(place.copies and self._is_own(offer, place) for place in located):
                return None
            private = None
            if any(place.name.private for place in located):
                private = private_checkpoint(offer.namespace, offer.lineage)
            prefixes = [prefix] if private is None else [prefix, private]
            return self._hit(located, tokens, self._pin(prefixes, private, self._clock() + pin_s))

    def _support(self, offer: Offer, tokens: int) -> list[Located]:
        return self._index.support(offer, tokens, offer.lineage if offer.private else 0)

    def _is_own(self, offer: Offer, place: Located) -> bool:
        return not offer.private or place.lineages[:1] == (offer.lineage_of(place.name.group, place.name.tokens),)

    def _wanted(self, offer: Offer, hints: Hints) -> tuple[list[int], list[tuple[int, str]]]:
        """Where the policies want checkpoints: what they said when the request began, and now that it has ended."""
        stops = [tokens for tokens, _ in offer.checkpoints]
        if offer.private:
            return stops[-1:], []
        now_s = self._clock()
        with self._lock:
            running = self._running.pop(offer.request, None) if offer.request is not None else None
            request = running.request if running else Request(offer, len(offer) - offer.output_tokens)
            wanted: set[int] = set() if running else set(stops)
            for number, slot in enumerate(self._slots):
                wanted.update(slot.policy.finish(request, offer, offer.output_tokens, now_s))
                wanted.update(running.take_at[number] if running else ())
        del hints
        return [n for n in stops if n in wanted], [(n, "not asked for") for n in stops if n not in wanted]

    # Room

    def _admit_to(
        self, slot: TierSlot, chain: Offer | KnownChain, stops: Sequence[int], known: _Namespace
    ) -> tuple[_Target | None, list[tuple[int, str]]]:
        """Let a tier's policy choose among checkpoints, and make room for those it takes.

        Returns what the tier then needs, None if that is nothing, and why it does not take the others.
        """
        tier = slot.tier
        for _ in range(ROOM_ATTEMPTS):
            with self._lock:
                now_s = self._clock()
                new, own = self._candidates(slot, chain, stops, known)
                if not new:
                    return None, []
                pinned = {*self._index.pinned(now_s)} | ({new[-1].prefix} if own is not None else set())
                free_bytes = tier.usage().bytes_free
                proposal = slot.policy.propose(new, free_bytes, pinned, now_s, self._index.view(tier.name))
                admitted = set(proposal.admit)
                taken = [candidate for candidate in new if candidate.prefix in admitted]
                refused = [(c.tokens, "not worth its room") for c in new if c.prefix not in admitted]
                if not taken:
                    return None, refused
                names = self._missing(slot, chain, [c.tokens for c in taken], own or ())
                claim = self._index.claim(chain, taken[-1].tokens, tier.name)
            self._drop(slot, proposal.drop, RemovalReason.EVICTED)
            self._drop(slot, [c.crowds_out for c in taken if c.crowds_out is not None], RemovalReason.CROWDED)
            try:
                room = tier.reserve([known.frame_bytes(name.group, name.tokens) for name in names])
            except CapacityError:  # somebody else was faster, or a reader still holds what was dropped
                self._release(slot, claim)
                continue
            return _Target(slot, tuple(names), room, claim, tuple(c.prefix for c in taken)), refused
        return None, [(tokens, "others took the room") for tokens in stops]

    def _candidates(
        self, slot: TierSlot, chain: Offer | KnownChain, stops: Sequence[int], known: _Namespace
    ) -> tuple[list[Candidate], list[FrameName] | None]:
        """What the policy is asked about; and for a private offer the names of the frames only it may use."""

        def footprint(group: str, tokens: int) -> int:
            return slot.tier.footprint(known.frame_bytes(group, tokens))

        new = self._index.candidates(chain, stops, slot.tier.name, footprint)
        if not isinstance(chain, Offer) or not chain.private:
            return new, None
        own = self._own_names(chain, slot)
        size = sum(footprint(name.group, name.tokens) for name in own)
        if own:
            key = private_checkpoint(chain.namespace, chain.lineage)
            groups = len(known.layout.groups)
            tokens = stops[-1]
            blank = Candidate(key, tokens, 0, 0, (), 0, frozenset(), (0,) * groups, self._index.anchor(chain, tokens))
            new = [replace(new[-1] if new else blank, prefix=key, own_bytes=size, marginal_bytes=size)]
        return new, own

    def _own_names(self, offer: Offer, slot: TierSlot) -> list[FrameName]:
        """The private names under which a suspended sequence must keep what others stored first, in other bytes."""
        tokens = offer.checkpoints[-1][0]
        places = [place for place in self._support(offer, tokens) if place.name.rank == offer.rank]
        foreign = [place for place in places if place.copies and not self._is_own(offer, place)]
        if not foreign:
            return []
        names = {place.name for place in foreign} | {place.name for place in places if place.name.group == CHECKPOINT}
        return [
            place.name if place.name.private else place.name._replace(private=offer.lineage)
            for place in places
            if (place.name in names or place.name.private)
            and not (place.name.private and slot.tier.name in dict(place.copies))
        ]

    def _missing(
        self, slot: TierSlot, chain: Offer | KnownChain, stops: Sequence[int], own: Sequence[FrameName]
    ) -> list[FrameName]:
        """The frames that a tier still needs for these checkpoints: rows from the root down, one rank's."""
        replaced = {name._replace(private=0) for name in own}
        shared = dict.fromkeys(
            name
            for tokens in stops
            for name in self._index.missing(chain, tokens, slot.tier.name)
            if (isinstance(chain, KnownChain) or name.rank == chain.rank) and name not in replaced
        )
        return [*shared, *own]

    def _release(self, slot: TierSlot, claim: Claim) -> None:
        """End a claim, and drop what came under it without its checkpoint."""
        with self._lock:
            names = self._index.release(claim)
            for name in names:
                self._index.remove(name, slot.tier.name, RemovalReason.ABANDONED)
        self._delete(slot, names, RemovalReason.ABANDONED)

    def _drop(self, slot: TierSlot, prefixes: Sequence[PrefixId], reason: RemovalReason) -> None:
        """Drop checkpoints and what only they need, after the tier below had its chance; pinned ones stay."""
        below = self._below(slot)
        moved = set()
        if below is not None and reason is RemovalReason.EVICTED:
            moved = {prefix for prefix in prefixes if self._demote(prefix, slot, below)}
        with self._lock:
            now_s = self._clock()
            pinned = self._index.pinned(now_s)
            names: list[FrameName] = []
            dropped: list[tuple[PrefixId, RemovalReason]] = []
            for prefix in prefixes:
                why = RemovalReason.MOVED if prefix in moved else reason
                if prefix not in pinned and (gone := self._index.drop(prefix, slot.tier.name, why)):
                    names += gone
                    dropped.append((prefix, why))
                    self._counters[f"dropped.{slot.tier.name}.{why}"] += 1
            slot.policy.commit([], dropped, now_s, self._index.view(slot.tier.name))
        self._delete(slot, names, reason)

    def _delete(self, slot: TierSlot, names: Sequence[FrameName], reason: RemovalReason) -> None:
        if not names:
            return
        self._count(f"frames.{slot.tier.name}.{reason}", len(names))
        try:
            slot.tier.delete([_key(name).path() for name in names])
        except TierError:
            self._count(f"errors.{slot.tier.name}.delete")

    def _below(self, slot: TierSlot) -> TierSlot | None:
        place = self._slots.index(slot) + 1
        return self._slots[place] if place < len(self._slots) else None

    def trim(self, tier: str, bytes_max: int) -> None:
        """Change a tier's budget; what no longer fits is dropped now, as its policy chooses, before anything is put."""
        slot = self._by_name[tier]
        slot.tier.set_limit(bytes_max)
        with self._lock:
            now_s = self._clock()
            free_bytes, pinned = slot.tier.usage().bytes_free, self._index.pinned(now_s)
            proposal = slot.policy.propose([], free_bytes, pinned, now_s, self._index.view(tier))
        self._drop(slot, proposal.drop, RemovalReason.EVICTED)

    # Bytes into a tier

    def _fill(self, target: _Target, stored: Callable[[FrameName], _Stored], known: _Namespace) -> list[Receipt]:
        """Put all frames of a target, in batches, and tell its policy. Raises what the tier raises."""
        receipts: list[Receipt] = []
        for names in self._batches(target.names, known):
            frames = list(self._map(target.slot, stored, names))
            receipts += self._put(target, frames, known)
        with self._lock:
            view = self._index.view(target.slot.tier.name)
            added = [prefix for prefix in target.checkpoints if prefix in view]
            target.slot.policy.commit(added, [], self._clock(), view)
        return receipts

    def _batches(self, names: Sequence[FrameName], known: _Namespace) -> Iterator[list[FrameName]]:
        batch: list[FrameName] = []
        size = 0
        for name in names:
            size += known.frame_bytes(name.group, name.tokens)
            if batch and size > BATCH_BYTES_MAX:
                yield batch
                batch, size = [], known.frame_bytes(name.group, name.tokens)
            batch.append(name)
        if batch:
            yield batch

    def _map(
        self, slot: TierSlot, make: Callable[[FrameName], _Stored], names: Sequence[FrameName]
    ) -> Iterable[_Stored]:
        """In the executor where encoding is work, else here."""
        return map(make, names) if slot.mode is Mode.RAW else self._executor.map(make, names)

    def _put(self, target: _Target, frames: Sequence[_Stored], known: _Namespace) -> list[Receipt]:
        """Put one batch; what is there already must be sound, or it is set aside and put again."""
        slot, tier = target.slot, target.slot.tier
        receipts: list[Receipt] = []
        again: list[_Stored] = []
        try:
            outcomes = tier.put([PutItem(_key(f.name).path(), f.buffers) for f in frames], target.room)
        except TieredCacheError:
            self._count(f"errors.{tier.name}.put")
            raise
        for stored, outcome in zip(frames, outcomes, strict=True):
            key = _key(stored.name)
            header = None
            if outcome is PutOutcome.EXISTS:
                header = self._verified(slot, key, known)
                if header is None:
                    again.append(stored)
                    continue
            size = header.total_bytes if header else sum(memoryview(b).nbytes for b in stored.buffers)
            lineage = header.lineage if header else stored.lineage
            with self._lock:
                self._index.insert(key, tier.name, tier.footprint(size), lineage)
                if header:
                    self._index.set_verified(key, tier.name)
            receipts.append(Receipt(key, size, tier.durability, created=header is None))
        self._count(f"frames.{tier.name}.put", sum(r.created for r in receipts))
        self._count(f"bytes.{tier.name}.put", sum(r.bytes_stored for r in receipts if r.created))
        if again:
            receipts += self._put(target, again, known)
        return receipts

    def _verified(self, slot: TierSlot, key: FrameKey, known: _Namespace) -> FrameHeader | None:
        """The header of a tier's copy if it is sound and the frame of this key; else None, and it was set aside.

        Raises `TierError` if the tier cannot say, and for a newer peer's frame, which is nobody's to replace.
        """
        answer = slot.tier.get([GetRequest(key.path())])[0]
        if isinstance(answer, FrameNotFoundError):
            self._forget(slot, key, RemovalReason.LOST)
            return None
        if isinstance(answer, TierError):
            raise answer
        try:
            header = frame.verify(answer)
            frame.check_expected(header, key=key, identity_digest=known.identity_digest, geometry=known.geometry)
        except VersionError as error:
            raise TierError(
                f"a frame of another version is there: {error.message}", key.path(), slot.tier.name
            ) from error
        except TieredCacheError as error:
            slot.tier.quarantine(key.path(), error.message)
            if not self._forget(slot, key, RemovalReason.QUARANTINED):  # nobody knew that it was there
                self._count(f"frames.{slot.tier.name}.{RemovalReason.QUARANTINED}")
            return None
        return header

    def _verify_incumbents(self, offer: Offer, slot: TierSlot, known: _Namespace) -> None:
        """Read what the offer would rely on and nobody has read since it was put: an acknowledgement covers it, too."""
        name = slot.tier.name
        with self._lock:
            places = [
                place
                for place in self._support(offer, offer.checkpoints[-1][0])
                if place.name.rank == offer.rank and name in dict(place.copies) and name not in place.verified
            ]
        for place in places:
            key = _key(place.name)
            try:
                sound = self._verified(slot, key, known) is not None
            except TierError:
                self._count(f"errors.{name}.get")
                continue
            if sound:
                with self._lock:
                    self._index.set_verified(key, name)

    def _demote(self, prefix: PrefixId, slot: TierSlot, below: TierSlot) -> bool:
        """Write a checkpoint, and what it needs, to the tier below, and read it back; whether it is there now.

        Nothing has left `slot` yet, so that a reader finds it at any moment.
        """
        with self._lock:
            chain = self._index.chain_to(prefix)
            known = self._namespaces.get(chain.namespace) if chain else None  # type: ignore[call-overload]
        if chain is None or known is None:  # a private one, or one whose rows are gone
            return False
        target, refused = self._admit_to(below, chain, [len(chain)], known)
        if target is None:
            return not refused
        try:
            self._fill(target, lambda name: self._recoded(name, slot, below.mode, known), known)
            for name in target.names:
                if self._verified(below, _key(name), known) is None:
                    return False
                with self._lock:
                    self._index.set_verified(_key(name), below.tier.name)
        except TieredCacheError:
            self._count(f"errors.{below.tier.name}.demote")
            return False
        finally:
            target.room.release()
            self._release(below, target.claim)
        return True

    def _recoded(self, name: FrameName, source: TierSlot, mode: Mode, known: _Namespace) -> _Stored:
        """A frame as it lies in one tier, checked and encoded for another."""
        key = _key(name)
        answer = source.tier.get([GetRequest(key.path())])[0]
        if not isinstance(answer, memoryview):
            if isinstance(answer, FrameNotFoundError):
                self._forget(source, key, RemovalReason.LOST)
            raise answer
        try:
            content = frame.decode(answer, key=key, identity_digest=known.identity_digest, geometry=known.geometry)
        except FrameError as error:
            self.report_bad(key, error.message)
            raise
        buffers = [answer] if mode is source.mode else frame.encode(content, known.geometry, mode).buffers()
        return _Stored(name, content.lineage, buffers)

    # What goes wrong, and what is found

    def report_bad(self, key: FrameKey, why: str) -> None:
        """A reader could not use a frame: every copy is read, and one that is not sound is quarantined."""
        self._count("reported")
        try:
            known = self._namespace(key.namespace)
        except IdentityError:
            return
        for slot in self._slots:
            with self._lock:
                there = slot.tier.name in dict(self._index.locate(key).copies)
            if there:
                try:
                    self._verified(slot, key, known)
                except TierError:
                    self._count(f"errors.{slot.tier.name}.get")
        del why

    def _forget(self, slot: TierSlot, key: FrameKey, reason: RemovalReason) -> bool:
        """A verified "not there": only this removes an entry without the cache having dropped it; whether one was."""
        with self._lock:
            if not self._index.remove(key, slot.tier.name, reason):
                return False
            self._counters[f"frames.{slot.tier.name}.{reason}"] += 1
            view = self._index.view(slot.tier.name)
            if key.group == CHECKPOINT and key_of(key) not in view:
                slot.policy.commit([], [(key_of(key), reason)], self._clock(), view)
            return True

    def recover(self) -> int:
        """Rebuild the index from what the durable tiers hold, by their names alone; returns how many frames there are.

        Files that are no frames, and frames of namespaces without a sound descriptor, are left alone and counted.
        Rows that no checkpoint needs, the rest of a spill that was cut off, are deleted.
        """
        found = 0
        for slot in self._slots:
            tier = slot.tier
            if tier.durability is Durability.HOST:
                continue
            keys: list[tuple[FrameKey, int]] = []
            for entry in tier.list():
                namespace = descriptor_namespace(entry.path)
                if namespace is not None:
                    self._recover_descriptor(slot, entry.path, namespace)
                    continue
                try:
                    keys.append((FrameKey.parse(entry.path), entry.bytes))
                except IdentityError:
                    self._count(f"recovered.{tier.name}.foreign")
            with self._lock:
                for key, size in keys:
                    try:
                        self._index.insert(key, tier.name, tier.footprint(size))
                        found += 1
                    except IdentityError:
                        self._counters[f"recovered.{tier.name}.unknown"] += 1
                leftover = self._index.unsupported(tier.name)
                for name in leftover:
                    self._index.remove(name, tier.name, RemovalReason.ABANDONED)
                view = self._index.view(tier.name)
                slot.policy.commit(list(view), [], self._clock(), view)
            self._delete(slot, leftover, RemovalReason.ABANDONED)
        return found

    def _recover_descriptor(self, slot: TierSlot, path: str, namespace: bytes) -> None:
        answer = slot.tier.get([GetRequest(path, bytes=DESCRIPTOR_BYTES_MAX)])[0]
        try:
            if not isinstance(answer, memoryview):
                raise answer
            identity_digest, document, geometry = read_descriptor(bytes(answer), namespace)
            self._add_namespace(namespace, identity_digest, geometry, document)
        except TieredCacheError:
            self._count(f"recovered.{slot.tier.name}.bad_descriptor")

    # Figures

    def counters(self) -> dict[str, int]:
        """How often what happened since the start: never goes down."""
        with self._lock:
            return dict(self._counters)

    def usage(self) -> dict[str, TierUsage]:
        """Each tier's budget and what it holds."""
        return {slot.tier.name: slot.tier.usage() for slot in self._slots}

    def close(self) -> None:
        """Let go of the tiers; what they hold stays where it is durable."""
        for slot in self._slots:
            slot.tier.close()

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counters[what] += number


def _key(name: FrameName) -> FrameKey:
    return FrameKey(*name)  # type: ignore[arg-type]


def _descriptor_path(namespace: bytes) -> str:
    return f"{namespace.hex()}/descriptor"


def descriptor_namespace(path: str) -> bytes | None:
    """The namespace whose descriptor a tier keeps under this path; None if it is another entry's."""
    match = _DESCRIPTOR_PATH.fullmatch(path)
    return bytes.fromhex(match[1]) if match else None


def _descriptor(identity_digest: bytes, document: Mapping[str, object], geometry: Geometry) -> bytes:
    """The document that says what a namespace is: with it, names alone rebuild the index after a restart."""
    content = [DESCRIPTOR_VERSION, identity_digest, dict(sorted(document.items())), geometry.to_document()]
    packed: bytes = msgpack.packb(content)
    return tagged_hash("descriptor", packed) + packed


def read_descriptor(body: bytes, namespace: bytes) -> tuple[bytes, dict[str, object], Geometry]:
    """Identity digest, identity fields and geometry of a stored descriptor, checked in full.

    Raises `FrameError`, `GeometryError`, and `IdentityError` unless they make this namespace.
    """
    if tagged_hash("descriptor", body[DIGEST_BYTES:]) != body[:DIGEST_BYTES]:
        raise ChecksumError("the descriptor's checksum does not hold")
    try:
        version, identity_digest, document, geometry_document = msgpack.unpackb(body[DIGEST_BYTES:])
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"the descriptor cannot be read: {error}") from error
    if version != DESCRIPTOR_VERSION:
        raise VersionError(f"descriptor version {version!r}, not {DESCRIPTOR_VERSION}")
    geometry = Geometry.from_document(geometry_document)
    if not isinstance(identity_digest, bytes) or not isinstance(document, dict):
        raise FrameError("the descriptor's identity is not one")
    if namespace_of(identity_digest, geometry.fingerprint()) != namespace:
        raise IdentityError("the descriptor describes another namespace")
    return identity_digest, document, geometry
