"""`PageStore`: vLLM's chunks as frames of a `TieredCache`, under vLLM's block hashes and our namespace.

    h(0) = the namespace's root        h(i) = H("vllm block", namespace, vLLM's hash of everything up to block i's end)

vLLM names a chunk by a hash that covers every token before its end, so a hash of ours stands for that prefix, in this
namespace, as well as one made of the tokens. Everything else is as for any engine: what is restorable to n tokens
needs every row block below n, the windows before n, and the carries at exactly n, so that a state without its rows, or
rows without their state, are a shorter prefix and never a stale one.

Below the engine's own tiers there may be the object store of a cluster. Its catalogue is asked for a longer prefix
(`search`), whose frames are then loaded like any others; what it is wanted to keep goes there first, and into the own
tiers as their policies like, or into these alone while catalogue or store are away.

A request's chunks come in any order and in several jobs. They are copied and held back (`Progress`) until a checkpoint
is complete, then offered; what the policies do not want, or has no room, goes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from tiered_cache import frame
from tiered_cache.cache import Grant, Offer, PlannedFrame, TieredCache
from tiered_cache.deadline import Deadline, until, wait_s
from tiered_cache.engines.vllm.layout import Bytes, PageGroup, PageLayout
from tiered_cache.errors import (
    CapacityError,
    FrameError,
    FrameNotFoundError,
    GeometryError,
    IdentityError,
    MissReason,
    TieredCacheError,
    TierError,
)
from tiered_cache.geometry import PartKind
from tiered_cache.identity import FrameKey, Identity, PrefixChain, tagged_hash
from tiered_cache.index import KnownChain
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import RestorePlan
from tiered_cache.service.shared import SharedStore
from tiered_cache.tiers.base import Durability

FETCH_BYTES_MAX = 64 << 20
"""How much of a load is held besides vLLM's buffer at once, apart from a single larger frame."""

PUT_BYTES_MAX = 64 << 20
"""How much is handed to the cache at once, and one frame more."""
SPILL_S = 3600.0
"""How long one offer may take where no deadline says so; the object store has half of it if there are own tiers."""
COPIES_MAX = 4
"""How many copies of a frame are tried that turn out to be bad: one in each tier, and one put meanwhile."""

_log = logging.getLogger(__name__)

ChunkName = tuple[int, int]
"""A group's index, and the token count at which the chunk ends."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's page is: in which frame."""

    frame: PlannedFrame
    chunk: ChunkName


@dataclass(frozen=True, slots=True)
class Plan:
    """What can be loaded of a request's prefix."""

    tokens: int
    places: Mapping[bytes, Place]
    """By vLLM's name of the chunk."""
    reason: MissReason | None
    request: int | None
    """The cache's number for the request; None if the object store's catalogue has made the plan."""
    pin: int | None = None
    generation: int = 0
    """Of the catalogue that holds the pin."""

    @property
    def is_shared(self) -> bool:
        """Whether its frames are in the object store, and not all of them here."""
        return self.request is None


@dataclass(slots=True)
class Progress:
    """What of one request is in the cache already, and the pages that are held back."""

    known_tokens: int = 0
    over: bool = False
    """Something was declined or failed, so that what builds upon it is not wanted either."""
    request: int | None = None
    pages: dict[ChunkName, Bytes] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(page.nbytes for page in self.pages.values())


class PageStore:
    """Any thread may match and load; the pages of one request are kept by one thread at a time."""

    def __init__(
        self,
        cache: TieredCache,
        identity: Identity,
        layout: PageLayout,
        *,
        durability: Durability,
        held_bytes_max: int,
        shared: SharedStore | None = None,
        otherwise: Durability | None = None,
    ) -> None:
        """`shared` is the cache's own, too. What does not reach `durability` is kept at `otherwise`, if that is any."""
        self.cache = cache
        self.shared = shared
        self.identity = identity
        self.layout = layout
        self.namespace = cache.register(identity, layout.geometry)
        self._identity_digest = identity.digest()
        self._root = PrefixChain(self.namespace, layout.block_tokens).block_hash(0)
        self._durabilities = (durability,) if otherwise is None else (durability, otherwise)
        self._held_bytes_max = held_bytes_max
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()

    # Names

    def blocks(self, block_hashes: Sequence[bytes], tokens: int) -> KnownChain:
        """The prefix of `tokens` tokens; `block_hashes` are vLLM's, one for each `hash_tokens` tokens."""
        layout = self.layout
        per_block = layout.block_tokens // layout.hash_tokens
        count = min(tokens // layout.block_tokens, len(block_hashes) // per_block)
        ends = (block_hashes[(i + 1) * per_block - 1] for i in range(count))
        hashes = (self._root, *(tagged_hash("vllm block", self.namespace, bytes(end)) for end in ends))
        tokens = min(tokens, (count + 1) * layout.block_tokens - 1)
        tail = tokens % layout.block_tokens
        end = tagged_hash("vllm tail", hashes[-1], tail.to_bytes(8, "little")) if tail else hashes[-1]
        return KnownChain(self.namespace, layout.block_tokens, hashes, tokens, end)  # no frame ends inside a block

    # Out of the cache

    def match(self, block_hashes: Sequence[bytes], tokens: int, pin_s: float) -> Plan:
        """The longest prefix of fewer than `tokens` tokens that can be loaded whole, pinned for `pin_s` seconds."""
        chain = self.blocks(block_hashes, tokens)
        found = self.cache.match(chain, Hints(), pin_s=pin_s)
        if found.hit is None:
            return Plan(0, {}, found.reason, found.request)
        places = self._places(block_hashes, found.hit.frames)
        return Plan(found.hit.tokens, places, found.reason, found.request, found.hit.pin)

    def search(self, block_hashes: Sequence[bytes], tokens: int, known_tokens: int, pin_s: float) -> Plan | None:
        """As `match`, if others have left more than `known_tokens` of the prefix in a shared directory or in the store.

        None if they have not, or nobody can say. Waits for both, as long as the caller has time.
        """
        found = self.cache.find(self.blocks(block_hashes, tokens - 1))
        plan = self.match(block_hashes, tokens, pin_s) if found else None
        if plan is not None:
            known_tokens = max(known_tokens, plan.tokens)
        if self.shared is None or (tokens - 1) // self.layout.block_tokens * self.layout.block_tokens <= known_tokens:
            return plan
        longer = self._ask(self.shared, block_hashes, tokens, known_tokens, pin_s)
        if longer is not None and plan is not None:
            self.end(plan)
        return longer or plan

    def _ask(
        self, shared: SharedStore, block_hashes: Sequence[bytes], tokens: int, known_tokens: int, pin_s: float
    ) -> Plan | None:
        """What the catalogue has, if that is more."""
        chain = self.blocks(block_hashes, tokens)
        try:
            reply = shared.match(chain, pin_s)
        except TieredCacheError as error:
            self._count("catalogue.failed")
            _log.info("the catalogue does not say what the store has: %s", error.message)
            return None
        found = reply.plan
        if found is None or found.tokens <= known_tokens or not self._is_of(chain, found):
            self._count("catalogue.refused" if found and found.tokens > known_tokens else "catalogue.empty")
            if found is not None:
                shared.unpin(found.pin, found.generation)
            return None
        self._count("catalogue.found")
        places = self._places(block_hashes, found.frames)
        return Plan(found.tokens, places, reply.reason, None, found.pin, found.generation)

    def _is_of(self, chain: KnownChain, found: RestorePlan) -> bool:
        """Whether a plan names frames of this prefix alone: it comes from another process, like the frames."""
        size = chain.block_tokens

        def expected(key: FrameKey) -> FrameKey | None:
            if not 0 < key.tokens <= min(found.tokens, len(chain)) or key.tokens % size:
                return None
            parent, prefix = (chain.hashes[key.tokens // size - back] for back in (1, 0))
            return FrameKey(self.namespace, prefix, parent, key.group, key.tokens)  # type: ignore[arg-type]

        return all(planned.key == expected(planned.key) for planned in found.frames)

    def _places(self, block_hashes: Sequence[bytes], frames: Iterable[PlannedFrame]) -> dict[bytes, Place]:
        """By vLLM's names, where each chunk is that these frames hold."""
        places: dict[bytes, Place] = {}
        for planned in frames:
            for group in self.layout.groups_of(planned.key.group):
                for end in self.layout.chunk_ends(group, planned.key.tokens):
                    name = bytes(block_hashes[end // self.layout.hash_tokens - 1]) + group.index.to_bytes(4, "big")
                    places[name] = Place(planned, (group.index, end))
        return places

    def end(self, plan: Plan) -> None:
        """A plan is not needed any more. Waits for the catalogue if that has made it."""
        if plan.pin is not None and plan.is_shared and self.shared is not None:
            self.shared.unpin(plan.pin, plan.generation)
        elif plan.pin is not None:
            self.cache.unpin(plan.pin)

    def load(self, places: Sequence[Place]) -> Iterator[tuple[int, Bytes | MissReason]]:
        """The page of each place, by its number, in any order; verified, read-only, or why it is not there.

        A frame that fails its checks is reported, which sets it aside, and looked for in the next tier.
        """
        wanted: dict[FrameKey, list[int]] = {}
        for number, place in enumerate(places):
            wanted.setdefault(place.frame.key, []).append(number)
        for key, arrays in self._frames(wanted):
            for number in wanted[key]:
                group = self.layout.by_index[places[number].chunk[0]]
                if isinstance(arrays, MissReason):
                    yield number, arrays
                else:
                    yield number, self.layout.split(group, arrays[group.name], places[number].chunk[1])

    def _frames(self, wanted: Iterable[FrameKey]) -> Iterator[tuple[FrameKey, Mapping[str, Bytes] | MissReason]]:
        """The arrays of each frame, verified, from wherever it is."""
        keys = list(wanted)
        while keys:
            bodies = self.cache.fetch(keys, FETCH_BYTES_MAX)
            for key in keys[: len(bodies)]:
                yield key, self._decoded(key, bodies.pop(0))
                keys.remove(key)

    def _decoded(self, key: FrameKey, body: Bytes | MissReason) -> Mapping[str, Bytes] | MissReason:
        why = MissReason.QUARANTINED
        for _ in range(COPIES_MAX):
            if isinstance(body, MissReason):
                return body
            try:
                content = frame.decode(
                    body.data, key=key, identity_digest=self._identity_digest, geometry=self.layout.geometry
                )
            except (FrameError, IdentityError, GeometryError) as error:
                del body
                self.cache.report_bad(key, error.message)
                if self.shared is not None:
                    self.shared.report_bad(key, error.message)
                (body,) = self.cache.fetch([key], FETCH_BYTES_MAX)
                if body is MissReason.LOST:
                    return why
            else:
                return {name: array.view(np.uint8) for name, array in content.arrays.items()}
        return why

    # Into the cache

    def wants(self, progress: Progress, chunk: ChunkName) -> bool:
        """Whether the page of this chunk is still to be brought."""
        return not progress.over and chunk[1] > progress.known_tokens and chunk not in progress.pages

    def reserve(self, progress: Progress, bytes_: int) -> bool:
        """Room for a page to be held back; False, and counted, if too much is held back already."""
        with self._lock:
            if self._held_bytes + bytes_ > self._held_bytes_max:
                self._counters["pages.dropped.held_bytes"] += 1
                progress.over = True
                return False
            self._held_bytes += bytes_
        return True

    def drop(self, pages: Mapping[ChunkName, Bytes]) -> None:
        """Give back the room of pages."""
        with self._lock:
            self._held_bytes -= sum(page.nbytes for page in pages.values())

    def keep(self, progress: Progress, block_hashes: Sequence[bytes], pages: Mapping[ChunkName, Bytes]) -> None:
        """Take over pages that room was reserved for, offer the checkpoints that are complete now, and let go of those.

        What the cache declines is counted there; a failing tier is counted and logged, and nobody's trouble.
        """
        twice = {chunk: page for chunk, page in pages.items() if not self.wants(progress, chunk)}
        self.drop(twice)
        progress.pages.update({chunk: page for chunk, page in pages.items() if chunk not in twice})
        if progress.over:
            self._release(progress, None)
            return
        stops = self._complete(progress, len(block_hashes) * self.layout.hash_tokens)
        if not stops:
            return
        chain = self.blocks(block_hashes, stops[-1])
        hashes = cast("tuple[bytes, ...]", chain.hashes)
        offer = Offer(
            self.namespace,
            chain.block_tokens,
            0,
            hashes,
            tuple((n, hashes[n // chain.block_tokens]) for n in stops),
            (0,) * chain.blocks,
            0,
            request=progress.request,
        )
        progress.request = None
        kept = False
        for durability in self._durabilities:
            share = 1 if durability is self._durabilities[-1] else 2
            try:
                with until(Deadline.after(wait_s(SPILL_S) / share)):
                    kept = self._spill(offer, progress, durability)
                break
            except (CapacityError, TierError) as error:
                tier = "object" if durability is Durability.OBJECT else "tier"
                self._count(f"spills.failed.{'full' if isinstance(error, CapacityError) else tier}")
                _log.warning("the state of %d tokens was not kept (%s): %s", stops[-1], durability.name, error)
        if kept:
            progress.known_tokens = stops[-1]
            self._release(progress, stops[-1])
        else:
            progress.over = True
            self._release(progress, None)

    def _spill(self, offer: Offer, progress: Progress, durability: Durability) -> bool:
        """Whether all of the offer can be restored now, so that nothing up to its end has to be brought again."""
        grant: Grant = self.cache.admit(offer, durability, Hints())
        try:
            self.cache.spill(grant, self._batches(grant, progress))
        except FrameNotFoundError:  # what it builds upon has been dropped meanwhile, or never came to us
            self._count("spills.incomplete")
            return False
        finally:
            self.cache.abandon(grant)
        self._count("spills")
        if grant.kept_below:
            self._count("spills.object")
        return any(kept.tokens == len(offer) for kept in self.cache.kept(offer, grant))

    def _batches(self, grant: Grant, progress: Progress) -> Iterator[dict[FrameKey, Mapping[str, Bytes]]]:
        """The granted frames' arrays, so many at once that encoders and disks have something to do together.

        What is known in some tier, and so was not held back, is read there for the tiers that lack it. Raises
        `FrameNotFoundError` if it is not there any more.
        """
        batch: dict[FrameKey, Mapping[str, Bytes]] = {}
        size = 0
        for key in grant.keys:
            pages: dict[PageGroup, list[Bytes]] = {}
            for group, chunk in self._chunks(key):
                if chunk not in progress.pages:
                    batch[key] = self._known(key)
                    break
                pages.setdefault(group, []).append(progress.pages[chunk])
            else:
                batch[key] = {group.name: self.layout.join(group, found) for group, found in pages.items()}
            size += self.layout.geometry.frame_bytes(key.group, key.tokens)
            if size > PUT_BYTES_MAX:
                yield batch
                batch, size = {}, 0
        yield batch

    def _known(self, key: FrameKey) -> Mapping[str, Bytes]:
        ((_, arrays),) = self._frames([key])
        if isinstance(arrays, MissReason):
            raise FrameNotFoundError(f"it is not held, and not to be had: {arrays}", key.path())
        return arrays

    def _chunks(self, key: FrameKey) -> Iterator[tuple[PageGroup, ChunkName]]:
        for group in self.layout.groups_of(key.group):
            for end in self.layout.chunk_ends(group, key.tokens):
                yield group, (group.index, end)

    def _complete(self, progress: Progress, tokens: int) -> list[int]:
        """The lengths, ascending, of which everything is held back or known; the longest only, without carries."""
        layout = self.layout
        longest = max((end for _, end in progress.pages), default=0)
        ends = range(progress.known_tokens + layout.block_tokens, min(longest, tokens) + 1, layout.block_tokens)
        found = []
        for block_end in ends:
            if not all(self._reaches(progress, group, block_end) for group in layout.groups if not _bounded(group)):
                break
            if all(self._reaches(progress, group, block_end) for group in layout.groups if _bounded(group)):
                found.append(block_end)
        return found if layout.has_carries else found[-1:]

    def _reaches(self, progress: Progress, group: PageGroup, tokens: int) -> bool:
        """Whether what a restore to `tokens` needs of a group, and is not known to be there, is held back."""
        start = progress.known_tokens
        if group.kind is PartKind.CARRY:
            start = tokens - group.chunk_tokens
        elif group.kind is PartKind.WINDOW:
            window = -(-group.window_tokens // group.chunk_tokens) * group.chunk_tokens
            block = self.layout.block_tokens
            start = max(start, max(0, tokens - window) // block * block)
        else:  # those before the last block have been looked at
            start = max(start, tokens - self.layout.block_tokens)
        ends = range(start + group.chunk_tokens, tokens + 1, group.chunk_tokens)
        return all((group.index, end) in progress.pages for end in ends)

    def finish(self, progress: Progress) -> None:
        """No more pages of this request will come."""
        if progress.pages:
            self._count("pages.dropped.incomplete", len(progress.pages))
        self._release(progress, None)

    def _release(self, progress: Progress, tokens: int | None) -> None:
        """Let go of the pages up to `tokens`, or of all."""
        gone = [chunk for chunk in progress.pages if tokens is None or chunk[1] <= tokens]
        freed = sum(progress.pages.pop(chunk).nbytes for chunk in gone)
        with self._lock:
            self._held_bytes -= freed

    # Figures

    def counters(self) -> dict[str, int]:
        """The cache's, and `spills`, of which `spills.object` have reached the store, `spills.incomplete`,
        `spills.failed.*` (`object`: kept in the own tiers then), `pages.dropped.*`, and `catalogue.*`: what that has
        said to look-ups. They never go down.
        """
        with self._lock:
            own = dict(self._counters)
        return {**self.cache.counters(), **own}

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counters[what] += number


def _bounded(group: PageGroup) -> bool:
    """Whether a restore does not need all that is before it."""
    return group.kind is not PartKind.ROWS
