"""Ports through Ray: a caller's view of an owner, a tiering service, the catalogue or a router that is an actor.

The only place where calls and bytes cross processes. Actors are found by name, so that a restarted one is found again
and any of them may start first. A call raises what the other side raised, `DeadlineError` if there was no answer in
time, and `TierError` if the actor is dead or unknown.

An actor that is being restarted answers nobody for a second or so. Callers from outside (a `patient` port) wait for it
within their deadline, as far as the call is safe to repeat. The actors themselves do not: one that is away is left out
of what they do, so that a dead node holds nobody up. Any other call that it got in the way of may have happened or
not, and raises `UnknownOutcomeError`.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import (
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from tiered_cache.cache import Kept, Offer, PlannedFrame
from tiered_cache.deadline import Deadline
from tiered_cache.errors import DeadlineError, MissReason, TieredCacheError, TierError, UnknownOutcomeError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.index import KnownChain
from tiered_cache.level import Landed
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import (
    Bid,
    Bytes,
    Lease,
    LeaseRef,
    MatchReply,
    Parcel,
    Prompt,
    Restored,
    RestorePlan,
    RunResult,
    SequenceRef,
    SpillOffer,
    SpillResult,
    Suspension,
    Ticket,
)
from tiered_cache.service.router import Placement
from tiered_cache.service.tickets import TicketHolder
from tiered_cache.tiers.base import Durability

_T = TypeVar("_T")

GRACE_S = 0.5
"""How much longer than its deadline a caller waits, so that the other side's own `DeadlineError` can arrive."""
RESTART_POLL_S = 0.05
"""How often a patient caller asks whether an actor is back."""


class Port:
    """One actor, by its name in the cluster's Ray namespace. Cheap to make, and to send to another process."""

    def __init__(self, actor: str, ray_namespace: str, *, patient: bool = False) -> None:
        self.actor = actor
        self.ray_namespace = ray_namespace
        self.patient = patient
        self._handle: Any = None

    def call(
        self,
        kind: type[_T],
        method: str,
        *args: object,
        deadline_s: float,
        repeatable: bool = False,
        **options: object,
    ) -> _T:
        """Call `method(*args, deadline_s=deadline_s, **options)` there and wait for the answer, a `kind`.

        `repeatable`: to have it done twice, or done and not known, does no harm.
        """
        deadline = Deadline.after(deadline_s)
        while True:
            fresh = self._handle is None
            try:
                answer = self._ask(method, args, options, deadline.left_s(f"{self.actor}.{method}"))
                break
            except (RayActorError, ActorUnschedulableError) as error:
                away = isinstance(error, ActorUnavailableError)
                what = f"{self.actor} is {'restarting' if away else 'dead'}: {_first_line(error)}"
                if not repeatable:
                    raise UnknownOutcomeError(f"{what}: {method} may have happened or not") from error
                if fresh and not (away and self.patient):  # else another actor may have the name by now
                    raise TierError(what, retryable=True) from error
                time.sleep(min(RESTART_POLL_S, deadline.left_s(what)))
        if not isinstance(answer, kind):
            raise TierError(f"{self.actor}.{method} answered with {type(answer).__name__}, not {kind.__name__}")
        return answer

    def tell(self, method: str, *args: object, deadline_s: float) -> None:
        """The same without waiting for anything: it happens if the actor is there. Raises `TierError` if it is not."""
        if not ray.is_initialized():
            raise TierError(f"{self.actor} cannot be reached: Ray is not running in this process")
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self.actor, namespace=self.ray_namespace)
            getattr(self._handle, method).remote(*args, deadline_s=deadline_s)
        except (ValueError, RayError) as error:
            self._handle = None
            raise TierError(f"{self.actor} was not told: {_first_line(error)}", retryable=True) from error

    def _ask(self, method: str, args: tuple[object, ...], options: dict[str, object], deadline_s: float) -> object:
        """The answer to one call. Raises Ray's own error if the actor is away or dead."""
        if not ray.is_initialized():  # else Ray would start a cluster of its own now
            raise TierError(f"{self.actor} cannot be reached: Ray is not running in this process")
        reference = None
        try:
            if self._handle is None:
                self._handle = ray.get_actor(self.actor, namespace=self.ray_namespace)
            reference = getattr(self._handle, method).remote(*args, deadline_s=deadline_s, **options)
            return ray.get(reference, timeout=deadline_s + GRACE_S)
        except GetTimeoutError as error:
            ray.cancel(reference)  # it must not begin now, if it has not begun yet
            raise DeadlineError(f"{self.actor}.{method} did not answer within {deadline_s:.3g} s") from error
        except RayTaskError as error:
            if isinstance(error.cause, TieredCacheError):
                raise error.cause from None
            raise TierError(f"{self.actor}.{method} failed: {error.cause!r}") from error
        except (RayActorError, ActorUnschedulableError):
            self._handle = None
            raise
        except ValueError as error:  # what `get_actor` raises for an unknown name
            raise TierError(f"{self.actor} is not there: {_first_line(error)}", retryable=True) from error
        except RayError as error:
            raise TierError(f"{self.actor}.{method} failed: {_first_line(error)}", retryable=True) from error

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), patient=self.patient), (self.actor, self.ray_namespace)


class RemoteOwner(Port):
    """`OwnerPort` through Ray, and `WorkerPort` where the engine computes."""

    def describe(self, *, deadline_s: float) -> tuple[Identity, Geometry]:
        described: tuple[Identity, Geometry] = self.call(tuple, "describe", deadline_s=deadline_s, repeatable=True)
        return described

    def bid(self, namespace: bytes, hashes: tuple[bytes, ...], *, deadline_s: float) -> Bid:
        return self.call(Bid, "bid", namespace, hashes, deadline_s=deadline_s, repeatable=True)

    def reserve(
        self, namespace: bytes, tokens: int, lease_s: float, *, lineage: int = 0, deadline_s: float
    ) -> LeaseRef:
        args = (namespace, tokens, lease_s)
        return self.call(LeaseRef, "reserve", *args, lineage=lineage, deadline_s=deadline_s, repeatable=True)

    def cancel(self, lease: LeaseRef, *, deadline_s: float) -> None:
        self.call(object, "cancel", lease, deadline_s=deadline_s, repeatable=True)

    def inject(
        self,
        plan: RestorePlan,
        prompt: Prompt,
        capacity_tokens: int,
        sampler_state: bytes,
        *,
        lineage: int = 0,
        deadline_s: float,
    ) -> Restored:
        args = (plan, prompt, capacity_tokens, sampler_state)
        return self.call(Restored, "inject", *args, lineage=lineage, deadline_s=deadline_s)

    def run(
        self, place: SequenceRef | LeaseRef, prompt: Prompt, take_at: tuple[int, ...], *, deadline_s: float
    ) -> RunResult:
        return self.call(RunResult, "run", place, prompt, take_at, deadline_s=deadline_s)

    def export(self, source: SequenceRef, keys: tuple[FrameKey, ...], *, deadline_s: float) -> Parcel:
        return self.call(Parcel, "export", source, keys, deadline_s=deadline_s, repeatable=True)

    def release(self, source: SequenceRef, *, deadline_s: float) -> None:
        self.call(object, "release", source, deadline_s=deadline_s, repeatable=True)

    def suspend(self, source: SequenceRef, *, deadline_s: float) -> Suspension:
        return self.call(Suspension, "suspend", source, deadline_s=deadline_s)

    def wake(self, source: SequenceRef, *, deadline_s: float) -> None:
        self.call(object, "wake", source, deadline_s=deadline_s)


class RemoteTiering(Port):
    """`TieringPort` through Ray."""

    def register(self, identity: Identity, geometry: Geometry, *, deadline_s: float) -> bytes:
        return self.call(bytes, "register", identity, geometry, deadline_s=deadline_s, repeatable=True)

    def match(self, namespace: bytes, prompt: Prompt, pin_s: float, *, deadline_s: float) -> MatchReply:
        return self.call(MatchReply, "match", namespace, prompt, pin_s, deadline_s=deadline_s, repeatable=True)

    def fetch(self, frames: tuple[PlannedFrame, ...], bytes_max: int, *, deadline_s: float) -> list[Bytes | MissReason]:
        return self.call(list, "fetch", frames, bytes_max, deadline_s=deadline_s, repeatable=True)

    def spill(
        self, offer: SpillOffer, durability: Durability, hints: Hints, pin_s: float | None, *, deadline_s: float
    ) -> SpillResult:
        return self.call(SpillResult, "spill", offer, durability, hints, pin_s, deadline_s=deadline_s, repeatable=True)

    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        self.call(object, "report_bad", key, why, deadline_s=deadline_s, repeatable=True)

    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        return self.call(bool, "unpin", pin, generation, deadline_s=deadline_s)

    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        return self.call(bool, "keep", plan, pin_s, deadline_s=deadline_s, repeatable=True)

    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        return self.call(bool, "use_up", plan, by, again_s, deadline_s=deadline_s)

    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        self.call(object, "let_go", tickets, deadline_s=deadline_s, kept=kept, repeatable=True)


class RemoteCatalogue(Port):
    """`CataloguePort` through Ray."""

    def match(self, namespace: bytes, prompt: Prompt | KnownChain, pin_s: float, *, deadline_s: float) -> MatchReply:
        return self.call(MatchReply, "match", namespace, prompt, pin_s, deadline_s=deadline_s, repeatable=True)

    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        return self.call(bool, "unpin", pin, generation, deadline_s=deadline_s)

    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        return self.call(bool, "keep", plan, pin_s, deadline_s=deadline_s, repeatable=True)

    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        return self.call(bool, "use_up", plan, by, again_s, deadline_s=deadline_s)

    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        self.call(object, "let_go", tickets, deadline_s=deadline_s, kept=kept, repeatable=True)

    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        self.call(object, "report_bad", key, why, deadline_s=deadline_s, repeatable=True)

    def report_absent(self, keys: tuple[FrameKey, ...], *, deadline_s: float) -> None:
        self.call(object, "report_absent", keys, deadline_s=deadline_s, repeatable=True)

    def introduce(self, namespace: bytes, descriptor: bytes, *, deadline_s: float) -> None:
        self.call(object, "introduce", namespace, descriptor, deadline_s=deadline_s, repeatable=True)

    def left(self, offer: Offer, hints: Hints, *, deadline_s: float) -> None:
        """Told, and not waited for."""
        self.tell("left", offer, hints, deadline_s=deadline_s)

    def admit(self, chain: Offer | KnownChain, hints: Hints, lease_s: float, *, deadline_s: float) -> Lease:
        return self.call(Lease, "admit", chain, hints, lease_s, deadline_s=deadline_s, repeatable=True)

    def commit(
        self, lease: int, generation: int, landed: tuple[Landed, ...], sound: tuple[Landed, ...], *, deadline_s: float
    ) -> tuple[Kept, ...]:
        kept: tuple[Kept, ...] = self.call(tuple, "commit", lease, generation, landed, sound, deadline_s=deadline_s)
        return kept

    def abandon(self, lease: int, generation: int, sound: tuple[Landed, ...], *, deadline_s: float) -> None:
        self.tell("abandon", lease, generation, sound, deadline_s=deadline_s)

    def plan_of(self, offer: Offer, pin_s: float, *, deadline_s: float) -> RestorePlan | None:
        plan: RestorePlan | None = self.call(object, "plan_of", offer, pin_s, deadline_s=deadline_s, repeatable=True)  # type: ignore[assignment]
        return plan


class RemoteRouter(Port):
    """`RouterPort` through Ray."""

    def __init__(self, actor: str, ray_namespace: str, *, patient: bool = False) -> None:
        super().__init__(actor, ray_namespace, patient=patient)
        self._holder = TicketHolder(self)

    def place(self, namespace: bytes, prompt: Prompt, capacity_tokens: int, *, deadline_s: float) -> Placement:
        return self.call(Placement, "place", namespace, prompt, capacity_tokens, deadline_s=deadline_s, repeatable=True)

    def suspend(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket:
        return self._holder.suspend(source, node, durability, deadline_s=deadline_s)

    def resume(self, ticket: Ticket, capacity_tokens: int, *, deadline_s: float) -> Restored:
        return self._holder.resume(ticket, capacity_tokens, deadline_s=deadline_s)

    def take_off(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket:
        return self.call(Ticket, "take_off", source, node, durability, deadline_s=deadline_s)

    def settle(self, source: SequenceRef, ticket: Ticket, *, deadline_s: float) -> None:
        self.call(object, "settle", source, ticket, deadline_s=deadline_s, repeatable=True)

    def keep(self, ticket: Ticket, *, deadline_s: float) -> None:
        self.call(object, "keep", ticket, deadline_s=deadline_s, repeatable=True)

    def bring_back(self, ticket: Ticket, capacity_tokens: int, by: int, *, deadline_s: float) -> Restored:
        return self.call(Restored, "bring_back", ticket, capacity_tokens, by, deadline_s=deadline_s)

    def let_go(self, ticket: Ticket, *, deadline_s: float) -> None:
        self.call(object, "let_go", ticket, deadline_s=deadline_s, repeatable=True)

    def members(self, *, deadline_s: float) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        """The set's `Blueprint`, its workers, and its nodes."""
        members: tuple[Any, tuple[str, ...], tuple[str, ...]] = self.call(
            tuple, "members", deadline_s=deadline_s, repeatable=True
        )
        return members


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
