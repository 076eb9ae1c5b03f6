"""What owner, tiering, catalogue and router say to each other: plain frozen data, and the ports they say it through.

A port is the interface that a caller sees, whether the other side is an object in this process or a Ray actor
behind a proxy; nothing else knows which. Bytes cross a port as contiguous uint8 arrays, one for all that is exported
(`Parcel`) and one for each stored frame, so that a faster lane can replace the transport without anyone noticing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tiered_cache.cache import DeclineReason, Kept, Offer, PlannedFrame, Receipt
from tiered_cache.deadline import SECONDS_MAX
from tiered_cache.engines.base import FrameName, HostArray
from tiered_cache.errors import ConfigError, IdentityError, MissReason, TokenError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Identity, PrefixChain
from tiered_cache.index import KnownChain
from tiered_cache.level import Landed
from tiered_cache.policy.base import Hints
from tiered_cache.tiers.base import Durability

ALIGNMENT = 64
CATALOGUE = "object"
"""The catalogue's name among the nodes. What it plans is fetched by the worker's own node, straight from the store."""

Bytes = npt.NDArray[np.uint8]


class SequenceRef(NamedTuple):
    """One sequence at one time: stale as soon as its owner was restarted or its epoch rose."""

    owner: str
    generation: int
    sequence: int
    epoch: int
    ranks: tuple[SequenceRef, ...] = ()
    """Of a sequence that is held by a set of owners: each rank's; the set has no other state."""


class LeaseRef(NamedTuple):
    """Room that an owner holds for a sequence to come: stale as soon as that owner was restarted."""

    owner: str
    generation: int
    lease: int
    ranks: tuple[LeaseRef, ...] = ()
    """Of a set of owners: each rank's."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Raw arrays of several frames in one uint8 array, laid out as `parcel_views` says."""

    names: tuple[FrameName, ...]
    body: Bytes


def parcel_bytes(geometry: Geometry, names: Sequence[FrameName]) -> int:
    """Size of a parcel's body: every array begins at a multiple of 64."""
    return sum(_aligned(spec.bytes) for name in names for spec in geometry.arrays(name.group, name.tokens).values())


def parcel_views(geometry: Geometry, names: Sequence[FrameName], body: Bytes) -> list[dict[str, HostArray]]:
    """Each frame's arrays as views into `body`, in the order of the geometry."""
    views: list[dict[str, HostArray]] = []
    offset = 0
    for name in names:
        arrays: dict[str, HostArray] = {}
        for part, spec in geometry.arrays(name.group, name.tokens).items():
            arrays[part] = np.ndarray(spec.shape, spec.storage, body.data, offset)
            offset += _aligned(spec.bytes)
        views.append(arrays)
    return views


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Bid(NamedTuple):
    """What an owner can offer a new sequence."""

    owner: str
    generation: int
    node: str
    bytes_free: int
    resident_tokens: int
    """How much of the prompt one of its live sequences already holds."""
    tokens_per_s: float | None = None
    """How fast it computes prompts, as measured lately; None if it has not, or cannot know."""


@dataclass(frozen=True, slots=True)
class SpillOffer:
    """Checkpoints of one sequence that are worth keeping, offered by its owner to a tiering service."""

    source: SequenceRef
    offer: Offer
    others: tuple[SpillOffer, ...] = ()
    """Of a sequence that is held by a set of owners: those of rank 1 and up. Only what all bring can be restored."""

    def offers(self) -> tuple[SpillOffer, ...]:
        """One a rank."""
        return (replace(self, others=()), *self.others)

    def up_to(self, tokens: int) -> SpillOffer | None:
        """The same without checkpoints behind `tokens`; None if there is no other."""
        return self.only({n for n, _ in self.offer.checkpoints if n <= tokens})

    def only(self, stops: Collection[int]) -> SpillOffer | None:
        """The same with the checkpoints at these token counts alone; None if there is none."""
        offer, checkpoints = self.offer, tuple((n, prefix) for n, prefix in self.offer.checkpoints if n in stops)
        others = tuple(other.only(stops) for other in self.others)
        if not checkpoints or None in others:
            return None
        blocks = checkpoints[-1][0] // offer.block_tokens
        cut = replace(
            offer, hashes=offer.hashes[: blocks + 1], lineages=offer.lineages[:blocks], checkpoints=checkpoints
        )
        return SpillOffer(self.source, cut, tuple(other for other in others if other is not None))


@dataclass(frozen=True, slots=True)
class SpillResult:
    """What became of an offer."""

    kept: tuple[Kept, ...]
    """The offered checkpoints that can be restored now, and what each would survive: the acknowledgement."""
    declined: tuple[tuple[int, str], ...]
    """(token count, why) of those that were not taken."""
    receipts: tuple[Receipt, ...]
    """One for each frame that had to come."""
    bytes_moved: int = 0
    """Raw bytes that left the owner."""
    plan: RestorePlan | None = None
    """How to restore the last checkpoint; pinned. Only where the caller asked for a pin."""

    @property
    def bytes_stored(self) -> int:
        return sum(receipt.bytes_stored for receipt in self.receipts if receipt.created)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Everything a worker needs to pull a state from one node's tiers. The frames are pinned until `pin` is dropped."""

    node: str
    generation: int
    """Of the tiering service that answered."""
    tokens: int
    frames: tuple[PlannedFrame, ...]
    pin: int
    """0 if it has none: that of a suspended sequence goes by its tickets."""
    tickets: tuple[FrameKey, ...] = ()
    """Of a suspended sequence, one a rank: frames that hold nothing, and are deleted when it has been resumed."""


@dataclass(frozen=True, slots=True)
class MatchReply:
    """A node's answer to a look-up: a plan, or the reason why there is none."""

    plan: RestorePlan | None
    reason: MissReason | None
    take_at: tuple[int, ...]
    """Token counts at which this node's policies would like checkpoints of the prompt, ascending."""
    request: int
    """The node's number for the request, to go with its offer."""
    hashes: tuple[bytes, ...]
    """h(0) .. h(blocks) of the prompt."""
    tier: str = ""
    """The deepest tier that a frame of the plan has to come from."""
    bytes_stored: int = 0
    """What the plan's frames take up."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a request and what the caller knows about it."""

    tokens: npt.NDArray[np.uint32]
    extra_keys: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)
    session: str | None = None
    now_s: float | None = None
    """When the request was made, for the policies, if that is not now: all requests must tell it then."""

    def __post_init__(self) -> None:
        """Raise `TokenError` for tokens in another form, `IdentityError` for extra keys that no block would have.

        `ConfigError` for a time that is none.
        """
        if self.now_s is not None and not -SECONDS_MAX <= self.now_s <= SECONDS_MAX * 100:
            raise ConfigError(f"now_s is {self.now_s}, not a number of seconds")
        tokens = self.tokens
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.uint32 or tokens.ndim != 1:
            form = f"{tokens.dtype} {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens).__name__
            raise TokenError(f"tokens are uint32 [n], not {form}")
        for block, keys in self.extra_keys.items():
            if not isinstance(block, int) or block < 0 or not all(isinstance(key, bytes) for key in keys):
                raise IdentityError(f"extra keys are bytes of a block from 0 on, not {keys!r} of {block!r}")

    def head(self, tokens: int) -> Prompt:
        """The first `tokens` tokens."""
        return replace(self, tokens=self.tokens[:tokens])

    def chain(self, namespace: bytes, block_tokens: int) -> PrefixChain:
        return PrefixChain(namespace, block_tokens, self.tokens, self.extra_keys)


class StateMark(NamedTuple):
    """What tells two states apart: a digest of all bytes, and what the engine would emit next."""

    tokens: int
    digest: str
    output: int


@dataclass(frozen=True, slots=True)
class Restored:
    """A sequence that a worker made from stored frames."""

    source: SequenceRef
    tokens: int
    bytes_read: int
    mark: StateMark | None = None
    """Of engines that can compute it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What an owner did for a prompt: the sequence now stands at its end."""

    source: SequenceRef
    offer: SpillOffer
    marks: tuple[StateMark, ...]
    """One for each checkpoint that this run has taken."""
    skipped: tuple[int, ...] = ()
    """Token counts at which no staging slot was free."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A suspended sequence: all that is needed to resume it on any worker of the same identity and geometry."""

    namespace: bytes
    prompt: Prompt
    plan: RestorePlan
    sampler_state: bytes
    """Opaque bytes of the engine."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A sequence that has stopped where it is, and everything about it but its state."""

    offer: SpillOffer
    prompt: Prompt
    sampler_state: bytes


@dataclass(frozen=True, slots=True)
class Lease:
    """The catalogue's answer to what a node would like to put into the store."""

    number: int
    """Names the lease; 0 if there is none, since there is nothing to bring or to read."""
    generation: int
    """Of the catalogue: a later one knows nothing of this lease."""
    lease_s: float
    """After so long it is over, and the room is another's."""
    keys: tuple[FrameKey, ...]
    """What has to come; the room for it is granted."""
    unread: tuple[FrameKey, ...]
    """What it would rely on and nobody has read since it was found in the store."""
    declined: tuple[tuple[int, DeclineReason], ...]
    kept: tuple[Kept, ...]
    """The checkpoints that are there whole already; only without a lease."""


class OwnerPort(Protocol):
    """A sequence owner as routers and tiering services see it. `deadline_s` counts from the call."""

    def describe(self, *, deadline_s: float) -> tuple[Identity, Geometry]: ...
    def bid(self, namespace: bytes, hashes: tuple[bytes, ...], *, deadline_s: float) -> Bid: ...
    def reserve(
        self, namespace: bytes, tokens: int, lease_s: float, *, lineage: int = 0, deadline_s: float
    ) -> LeaseRef: ...
    def cancel(self, lease: LeaseRef, *, deadline_s: float) -> None: ...
    def inject(
        self,
        plan: RestorePlan,
        prompt: Prompt,
        capacity_tokens: int,
        sampler_state: bytes,
        *,
        lineage: int = 0,
        deadline_s: float,
    ) -> Restored: ...
    def export(self, source: SequenceRef, keys: tuple[FrameKey, ...], *, deadline_s: float) -> Parcel: ...
    def release(self, source: SequenceRef, *, deadline_s: float) -> None: ...
    def suspend(self, source: SequenceRef, *, deadline_s: float) -> Suspension: ...
    def wake(self, source: SequenceRef, *, deadline_s: float) -> None: ...


class TieringPort(Protocol):
    """A node's tiering service as routers and owners see it. `deadline_s` counts from the call."""

    def register(self, identity: Identity, geometry: Geometry, *, deadline_s: float) -> bytes: ...
    def match(self, namespace: bytes, prompt: Prompt, pin_s: float, *, deadline_s: float) -> MatchReply: ...
    def fetch(
        self, frames: tuple[PlannedFrame, ...], bytes_max: int, *, deadline_s: float
    ) -> list[Bytes | MissReason]: ...
    def spill(
        self, offer: SpillOffer, durability: Durability, hints: Hints, pin_s: float | None, *, deadline_s: float
    ) -> SpillResult: ...
    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None: ...
    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool: ...
    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool: ...
    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool: ...
    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None: ...


class CataloguePort(Protocol):
    """The object tier's catalogue as nodes and routers see it. `deadline_s` counts from the call."""

    def match(
        self, namespace: bytes, prompt: Prompt | KnownChain, pin_s: float, *, deadline_s: float
    ) -> MatchReply: ...
    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool: ...
    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None: ...
    def report_absent(self, keys: tuple[FrameKey, ...], *, deadline_s: float) -> None: ...
    def introduce(self, namespace: bytes, descriptor: bytes, *, deadline_s: float) -> None: ...
    def left(self, offer: Offer, hints: Hints, *, deadline_s: float) -> None: ...
    def admit(self, chain: Offer | KnownChain, hints: Hints, lease_s: float, *, deadline_s: float) -> Lease: ...
    def commit(
        self, lease: int, generation: int, landed: tuple[Landed, ...], sound: tuple[Landed, ...], *, deadline_s: float
    ) -> tuple[Kept, ...]: ...
    def abandon(self, lease: int, generation: int, sound: tuple[Landed, ...], *, deadline_s: float) -> None: ...
    def plan_of(self, offer: Offer, pin_s: float, *, deadline_s: float) -> RestorePlan | None: ...
    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool: ...
    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool: ...
    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None: ...
