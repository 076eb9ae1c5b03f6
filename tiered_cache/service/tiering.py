"""`TieringService`: one node's tiers as the other parts see them. It pulls, keeps, acknowledges, and answers look-ups.

Bytes move at its pace and into its hands: it calls the owner's `export`, so what comes back belongs to it, and copies
it into its own frames before it acknowledges. Only then may the owner free device memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from tiered_cache.cache import Hit, Kept, Offer, PlannedFrame, TieredCache
from tiered_cache.deadline import Clock, Deadline, duration_s, until
from tiered_cache.engines.base import FrameName, HostArray
from tiered_cache.errors import IdentityError, MissReason, StateError, TieredCacheError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.index import Chain, KnownChain
from tiered_cache.level import key_of
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import (
    Bytes,
    CataloguePort,
    MatchReply,
    OwnerPort,
    Parcel,
    Prompt,
    RestorePlan,
    SequenceRef,
    SpillOffer,
    SpillResult,
    parcel_bytes,
    parcel_views,
)
from tiered_cache.service.wire import checked
from tiered_cache.tiers.base import Durability

EXPORT_BYTES_MAX = 256 << 20
"""How many raw bytes of a spill are here at once, and one call to an owner brings; a larger one comes in several."""
DISCARD_S = 2.0
"""How long the catalogue may take to let go of what a failed suspension has left in the store."""

_NO_TOKENS = Prompt(np.empty(0, np.uint32))


class TieringService:
    """Look-ups, spills and stored bytes of one node."""

    def __init__(
        self,
        cache: TieredCache,
        *,
        node: str,
        owners: Callable[[str], OwnerPort],
        catalogue: CataloguePort | None = None,
        generation: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.cache = cache
        self.node = node
        self.generation = time.time_ns() if generation is None else generation
        self._owners = owners
        self._catalogue = catalogue
        self._clock = clock

    def register(self, identity: Identity, geometry: Geometry, *, deadline_s: float) -> bytes:
        """Make an identity and geometry known on this node; returns their namespace."""
        with self._until(deadline_s):
            return self.cache.register(identity, geometry)

    def match(self, namespace: bytes, prompt: Prompt | KnownChain, pin_s: float, *, deadline_s: float) -> MatchReply:
        """The longest proper prefix of the prompt that this node can restore, pinned for `pin_s` seconds.

        An engine that names its prefixes by hashes of its own gives these instead of tokens. Raises `IdentityError`
        for hashes that cannot be a prefix of this namespace.
        """
        checked(prompt, KnownChain if isinstance(prompt, KnownChain) else Prompt)
        pin_s, geometry = duration_s(pin_s, "pin_s"), self.cache.geometry_of(namespace)
        if geometry is None:
            return MatchReply(None, self.cache.why_unknown(namespace), (), 0, ())
        chain: Chain
        if isinstance(prompt, KnownChain):
            prompt.check(namespace, geometry.block_tokens)
            chain, asked = prompt, _NO_TOKENS
        else:
            chain, asked = prompt.chain(namespace, geometry.block_tokens), prompt
        with self._until(deadline_s):
            found = self.cache.match(chain, asked.hints, session=asked.session, pin_s=pin_s, now_s=asked.now_s)
        plan = None if found.hit is None else self._plan(found.hit)
        tier, size = (found.hit.tier, found.hit.bytes_stored) if found.hit else ("", 0)
        hashes: Any = tuple(chain.block_hash(number) for number in range(chain.blocks + 1))
        return MatchReply(plan, found.reason, found.take_at, found.request, hashes, tier, size)

    def fetch(self, frames: tuple[PlannedFrame, ...], bytes_max: int, *, deadline_s: float) -> list[Bytes | MissReason]:
        """The stored bytes of the first of these frames, up to `bytes_max`, or why one is not there."""
        for frame in frames:
            checked(frame, PlannedFrame)
        with self._until(deadline_s):
            return self.cache.fetch([frame.key for frame in frames], bytes_max, [frame.lineage for frame in frames])

    def spill(
        self, offer: SpillOffer, durability: Durability, hints: Hints, pin_s: float | None, *, deadline_s: float
    ) -> SpillResult:
        """Pull from the owner what is wanted of an offer and not here yet, and keep it.

        What `kept` lists is acknowledged. A suspended sequence's pin goes by its tickets, so that to ask again, for an
        answer that was lost, does no harm. Raises what the owner or a tier raised, `StateError` for a parcel that is
        not what was asked for, `IdentityError` for what is not one offer of every rank of a set, `CapacityError` if
        too much is in flight, and `DeadlineError`; then nothing is acknowledged, and neither room nor pin is held.
        """
        deadline = Deadline.after(deadline_s, self._clock)
        checked(offer, SpillOffer)
        with until(deadline):
            return self._spill(offer, durability, hints, pin_s, deadline)

    def _spill(
        self, spill: SpillOffer, durability: Durability, hints: Hints, pin_s: float | None, deadline: Deadline
    ) -> SpillResult:
        """What each rank offers, the first one's choice deciding for all: only what all bring is kept."""
        if spill.others:
            owner = self._owners(spill.source.owner)
            _check_set(spill, self._known(spill.source, spill.offer, owner, deadline).shards)
        results: list[SpillResult] = []
        offers: list[Offer] = []
        loans: list[bool] = []
        wanted: SpillOffer | None = spill
        try:
            for rank in range(1 + len(spill.others)):
                if wanted is None:
                    break
                part = wanted.offers()[rank]
                source, offer = part.source, part.offer
                result, lent = self._spill_rank(source, offer, durability, hints, deadline)
                results.append(result)
                offers.append(offer)
                loans.append(lent)
                wanted = wanted.only({kept.tokens for kept in result.kept})
            plan = None
            if pin_s is not None and wanted is not None:
                plan = self._pinned(offers, pin_s, deadline, in_store=all(loans))
        except BaseException:
            self._discard(offers, deadline)
            raise
        if pin_s is not None and plan is None:
            self._discard(offers, deadline)
        return _of_all(results, plan, 1 + len(spill.others))

    def _spill_rank(
        self, source: SequenceRef, offer: Offer, durability: Durability, hints: Hints, deadline: Deadline
    ) -> tuple[SpillResult, bool]:
        """One rank's part; and whether it went into the object store."""
        owner = self._owners(source.owner)
        geometry = self._known(source, offer, owner, deadline)
        grant = self.cache.admit(offer, durability, hints)
        moved = 0

        def pulled() -> Generator[dict[FrameKey, dict[str, HostArray]], None, None]:
            nonlocal moved
            if offer.private and not grant.keys:  # it may have left, and this be the echo of an earlier call
                owner.export(source, (), deadline_s=deadline.left_s("export"))
            for keys in _batches(grant.keys, geometry):
                names = tuple(FrameName(key.group, key.tokens) for key in keys)
                with self.cache.in_flight.hold(parcel_bytes(geometry, names)):
                    parcel = owner.export(source, tuple(keys), deadline_s=deadline.left_s("export"))
                    moved += parcel.body.nbytes
                    deadline.left_s("spill")
                    views = dict(zip(keys, _views(parcel, names, geometry), strict=True))
                    del parcel
                    yield views
                    del views

        with closing(pulled()) as batches:
            receipts = self.cache.spill(grant, batches)
        deadline.left_s("acknowledge")
        kept = tuple(self.cache.kept(offer, grant))
        return SpillResult(kept, grant.declined, tuple(receipts), moved), grant.loan is not None

    def _pinned(
        self, offers: Sequence[Offer], pin_s: float, deadline: Deadline, *, in_store: bool
    ) -> RestorePlan | None:
        """How to restore all ranks' last checkpoint, from the store if all went there, under one pin."""
        if in_store and self._catalogue is not None:
            plan = _joint_plan(self._catalogue, offers, pin_s, deadline)
            if plan is not None:
                return plan
        return _joint_plan(self, offers, pin_s, deadline)

    def _discard(self, offers: Sequence[Offer], deadline: Deadline) -> None:
        """Let go of a suspended sequence's own frames, here and in the store: it goes on where it was."""
        tickets = tuple(key_of(offer.ticket) for offer in offers if offer.private)
        for place in (self, self._catalogue) if tickets else ():
            with suppress(TieredCacheError):  # then they are the policy's to drop
                if place is not None:
                    place.let_go(tickets, kept=False, deadline_s=deadline.last_step_s(DISCARD_S))

    def plan_of(self, offer: Offer, pin_s: float, *, deadline_s: float) -> RestorePlan | None:
        """How to restore an offer's last checkpoint, pinned; None if it is not here whole.

        The pin of a suspended sequence replaces what pin it had, unless somebody has its tickets.
        """
        del deadline_s
        hit = self.cache.plan_of(offer, pin_s=duration_s(pin_s, "pin_s"))
        return None if hit is None else self._plan(hit)

    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        """A reader could not use this frame: its copies are checked, and set aside if they are bad."""
        with self._until(deadline_s):
            self.cache.report_bad(key, why)

    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        """End a pin; False if it had ended before, with its generation at the latest."""
        with self._until(deadline_s):
            return generation == self.generation and self.cache.unpin(pin)

    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        """Keep a suspended sequence for `pin_s` seconds from now; False if it is not here whole. Idempotent.

        Also what has survived a restart. Raises `IdentityError` for a plan without tickets, `TierError` if what the
        tiers hold is not known yet.
        """
        checked(plan, RestorePlan)
        with self._until(deadline_s):
            frames = [planned.key for planned in plan.frames]
            return self.cache.keep(plan.tickets, frames, duration_s(pin_s, "pin_s"))

    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        """Use up a suspended sequence's tickets: `TieredCache.use_up`. They are good once, also across restarts."""
        checked(plan, RestorePlan)
        with self._until(deadline_s):
            return self.cache.use_up(plan.tickets, checked(by, int), duration_s(again_s, "again_s"))

    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        """A suspended sequence's own frames are not needed any more; with `kept` also if somebody has its tickets."""
        for key in tickets:
            checked(key, FrameKey)
        with self._until(deadline_s):
            self.cache.let_go(tickets, kept=kept)

    def _until(self, deadline_s: float) -> AbstractContextManager[None]:
        return until(Deadline.after(deadline_s, self._clock))

    def _known(self, source: SequenceRef, offer: Offer, owner: OwnerPort, deadline: Deadline) -> Geometry:
        """The geometry of the offer's namespace; after a restart, or for a new kind of owner, from the owner itself."""
        namespace = offer.namespace
        geometry = self.cache.geometry_of(namespace)
        if geometry is None:
            identity, geometry = owner.describe(deadline_s=deadline.left_s("describe"))
            found = self.cache.register(identity, geometry)
            if found != namespace:
                raise IdentityError(f"{source.owner} is of {found.hex()[:16]}, its offer of {namespace.hex()[:16]}")
        return geometry

    def _plan(self, hit: Hit) -> RestorePlan:
        pin = 0 if hit.tickets else hit.pin or 0
        return RestorePlan(self.node, self.generation, hit.tokens, hit.frames, pin, hit.tickets)


def _joint_plan(
    place: TieringService | CataloguePort, offers: Sequence[Offer], pin_s: float, deadline: Deadline
) -> RestorePlan | None:
    """The ranks' plans as one; one pin holds what all have in common, which is all."""
    plans: list[RestorePlan] = []
    for offer in offers:
        plan = place.plan_of(offer, pin_s, deadline_s=deadline.left_s("pin"))
        if plan is None:
            break
        plans.append(plan)
    whole = len(plans) == len(offers)
    for plan in plans[1:] if whole else plans:
        if not plan.tickets:
            place.unpin(plan.pin, plan.generation, deadline_s=deadline.left_s("pin"))
    if not whole:
        return None
    return replace(
        plans[0],
        frames=tuple(planned for plan in plans for planned in plan.frames),
        tickets=tuple(ticket for plan in plans for ticket in plan.tickets),
    )


def _check_set(spill: SpillOffer, shards: int) -> None:
    """Raise `IdentityError` that lists why these are not the offers of all ranks for one sequence."""
    first, offers = spill.offer, [spill.offer, *(other.offer for other in spill.others)]
    ranks = Counter(offer.rank for offer in offers)
    problems = [f"rank {rank} is missing" for rank in range(shards) if not ranks[rank]]
    problems += [f"rank {rank} comes {count} times" for rank, count in sorted(ranks.items()) if count > 1]
    problems += [f"there is no rank {rank} of {shards}" for rank in sorted(ranks) if not 0 <= rank < shards]
    for offer in offers[1:]:
        same = ["namespace", "block_tokens", "hashes", "checkpoints", "private"] + ["lineage"] * first.private
        differing = [name for name in same if getattr(offer, name) != getattr(first, name)]
        if differing:
            problems.append(f"rank {offer.rank} has other {', '.join(differing)} than rank {first.rank}")
    if any(other.others for other in spill.others):
        problems.append("an offer within it has others of its own")
    if problems:
        raise IdentityError("not an offer of a set: " + "; ".join(problems))


def _of_all(results: Sequence[SpillResult], plan: RestorePlan | None, ranks: int) -> SpillResult:
    """What a set's spill has come to: kept is what every rank has, at the least of what each would survive."""
    levels = [{kept.tokens: kept.durability for kept in result.kept} for result in results]
    common = set.intersection(*(set(level) for level in levels)) if len(results) == ranks else set()
    return SpillResult(
        kept=tuple(Kept(tokens, min(level[tokens] for level in levels)) for tokens in sorted(common)),
        declined=tuple(dict.fromkeys(declined for result in results for declined in result.declined)),
        receipts=tuple(receipt for result in results for receipt in result.receipts),
        bytes_moved=sum(result.bytes_moved for result in results),
        plan=plan,
    )


def _views(parcel: Parcel, names: tuple[FrameName, ...], geometry: Geometry) -> list[dict[str, HostArray]]:
    size = parcel_bytes(geometry, names)
    if parcel.names != names or parcel.body.dtype != np.uint8 or parcel.body.shape != (size,):
        raise StateError(
            f"{len(names)} frames in uint8 ({size},) were asked for, and {len(parcel.names)} came in "
            f"{parcel.body.dtype} {parcel.body.shape}"
        )
    return parcel_views(geometry, names, parcel.body)


def _batches(keys: tuple[FrameKey, ...], geometry: Geometry) -> list[list[FrameKey]]:
    if not keys:
        return []
    batches: list[list[FrameKey]] = [[]]
    size = 0
    for key in keys:
        frame_bytes = geometry.frame_bytes(key.group, key.tokens)
        if batches[-1] and size + frame_bytes > EXPORT_BYTES_MAX:
            batches.append([])
            size = 0
        batches[-1].append(key)
        size += frame_bytes
    return batches
