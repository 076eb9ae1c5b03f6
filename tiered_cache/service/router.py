"""`RestoreRouter`: finds the longest restorable prefix, chooses the worker, drives the restore, and decides on errors.

Owners and nodes come and go (`set_members`); one that lets questions run out is left alone for a while.

The router keeps no copy of what the tiers hold: it asks every node, and the node that will serve the frames answers
and pins them in the same call. A view that is not kept can be neither stale nor lost with the router; it costs one
parallel round of calls a request. What follows from an error is decided here, in `CONSEQUENCES`; whatever happens, no
call outlives its deadline, and the answer is a sequence or a miss with its reason.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from tiered_cache.deadline import Clock, Deadline
from tiered_cache.errors import (
    CapacityError,
    DeadlineError,
    FrameError,
    FrameNotFoundError,
    GeometryError,
    IdentityError,
    MissReason,
    StaleError,
    StateError,
    TieredCacheError,
    TierError,
    VersionError,
)
from tiered_cache.identity import FrameKey
from tiered_cache.service.estimate import LoadEstimate
from tiered_cache.service.messages import (
    CATALOGUE,
    Bid,
    CataloguePort,
    LeaseRef,
    MatchReply,
    OwnerPort,
    Prompt,
    Restored,
    RestorePlan,
    SequenceRef,
    SpillOffer,
    SpillResult,
    Ticket,
    TieringPort,
)
from tiered_cache.service.tickets import TicketHolder
from tiered_cache.service.wire import checked
from tiered_cache.tiers.base import Durability

_T = TypeVar("_T")
_Port = TypeVar("_Port")

SILENT_S_MAX = 30.0
"""How long at most a member that does not answer is left alone before it is asked again."""
SETTLE_S = 60.0
"""How long, after its deadline, a suspension waits for its caller to say that the ticket has come."""
AGAIN_S = 60.0
"""How long a sequence that was resumed can be asked for again by its asker, whom the answer may not have reached."""
LOOKUPS_MAX = 3
"""How often one request looks again after a plan turned out to be out of date or a frame to be bad."""


class Then(enum.Enum):
    """What to do after a worker could not restore a plan."""

    NEXT_WORKER = enum.auto()
    LOOK_AGAIN = enum.auto()
    COMPUTE = enum.auto()


CONSEQUENCES: tuple[tuple[type[TieredCacheError], Then, MissReason], ...] = (
    (VersionError, Then.COMPUTE, MissReason.VERSION),  # a newer peer's frame: sound, and not for us
    (FrameError, Then.LOOK_AGAIN, MissReason.QUARANTINED),  # reported to its tier first
    (FrameNotFoundError, Then.LOOK_AGAIN, MissReason.LOST),
    (StaleError, Then.LOOK_AGAIN, MissReason.LOST),
    (CapacityError, Then.NEXT_WORKER, MissReason.CAPACITY),
    (IdentityError, Then.NEXT_WORKER, MissReason.NAMESPACE),
    (GeometryError, Then.NEXT_WORKER, MissReason.NAMESPACE),
    (StateError, Then.NEXT_WORKER, MissReason.REFUSED),
    (DeadlineError, Then.NEXT_WORKER, MissReason.DEADLINE),
    (TierError, Then.NEXT_WORKER, MissReason.TIER_ERROR),
)
"""The first row whose class fits decides."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Limits of one router; seconds."""

    pin_s: float = 30.0
    lease_s: float = 30.0
    ask_s: float = 2.0
    """How long a node or a worker may take to answer what it has; one that does not is left out."""
    suspend_pin_s: float = 3600.0
    """How long a suspended sequence's frames are kept for it."""
    load_or_recompute: bool = False
    """Restore only what is expected to be there sooner than it would be computed, by what both took lately."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs: a restored sequence, or a lease for an empty one, and why it is not more."""

    owner: str
    node: str
    restored: Restored | None
    lease: LeaseRef | None
    reason: MissReason | None
    """Why nothing was restored; None if something was."""
    refusals: tuple[tuple[str, str], ...]
    """(kind of error, message) of every attempt that was refused on the way."""
    take_at: tuple[int, ...]
    """Where the policies of the chosen worker's node, and of the object store, would like checkpoints."""
    request: int | None
    """That node's number for the request, to go with the offer of its checkpoints."""
    store_request: int | None = None
    """That of the catalogue of the object store."""

    def named(self, offer: SpillOffer, output_tokens: int = 0) -> SpillOffer:
        """An offer of the sequence's that names the look-ups it began with, so that policies learn from how it ended.

        `output_tokens`: how many of its tokens were generated.
        """
        return replace(
            offer,
            offer=replace(
                offer.offer, request=self.request, store_request=self.store_request, output_tokens=output_tokens
            ),
        )

    @property
    def restored_tokens(self) -> int:
        return self.restored.tokens if self.restored else 0


@dataclass(frozen=True, slots=True)
class _Silent:
    """A member that did not answer in time: if again, it is not asked until then, so that not all wait for it."""

    until_s: float
    pause_s: float


@dataclass(slots=True)
class _Attempt:
    """Whom one request asks, and what it has met so far."""

    deadline: Deadline
    owners: Mapping[str, OwnerPort]
    tierings: Mapping[str, TieringPort]
    pinning: Mapping[str, TieringPort | CataloguePort]
    """Who answers look-ups with a pinned plan: every node, and the catalogue of the object store like one."""
    reason: MissReason | None = None
    error: TieredCacheError | None = None
    refusals: list[tuple[str, str]] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)
    """Nodes that could not give what they offered: others may have less, and can."""
    away: bool = False
    """Whether some owner was dead or did not answer."""


class RestoreRouter:
    """Routes over the owners and the tiering services it was given; holds nothing that a restart would lose."""

    def __init__(
        self,
        owners: Mapping[str, OwnerPort],
        tierings: Mapping[str, TieringPort],
        executor: Executor,
        *,
        catalogue: CataloguePort | None = None,
        settings: RouterSettings | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._owners: Mapping[str, OwnerPort] = dict(owners)
        self._tierings: Mapping[str, TieringPort] = dict(tierings)
        self._catalogue = catalogue
        self._executor = executor
        self._settings = settings or RouterSettings()
        self._clock = clock
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._estimate = LoadEstimate()
        self._holder = TicketHolder(self, clock=clock)
        self._chosen: dict[str, int] = {}  # owner -> number of the last request it was given
        self._silent: dict[tuple[str, str], _Silent] = {}

    def set_members(self, owners: Mapping[str, OwnerPort], tierings: Mapping[str, TieringPort]) -> None:
        """From now on these are the owners and the nodes; a request that is under way goes on with those it knows."""
        with self._lock:
            self._owners, self._tierings = dict(owners), dict(tierings)
            for gone in self._chosen.keys() - owners.keys():
                del self._chosen[gone]
            for member in [m for m in self._silent if m[1] not in {*owners, *tierings, CATALOGUE}]:
                del self._silent[member]

    def place(self, namespace: bytes, prompt: Prompt, capacity_tokens: int, *, deadline_s: float) -> Placement:
        """A worker for this prompt, with the longest prefix restored that tiers, workers and deadline allow.

        At most `len(prompt.tokens) - 1` tokens are restored: the state at n tokens cannot give the output that
        follows token n - 1 a second time. Raises `CapacityError` if no worker has room for `capacity_tokens` tokens
        with nothing restored, a retryable `TierError` if none could be asked, such as a `DeadlineError`.
        """
        attempt = self._attempt(deadline_s)
        checked(prompt, Prompt)
        bids: list[Bid] = []
        replies: Mapping[str, MatchReply] = {}
        for _ in range(LOOKUPS_MAX):
            replies = self._match(namespace, prompt, attempt)
            bids = bids or self._bids(namespace, _hashes(replies), attempt)
            plan, why = _longest(replies)
            if plan is None:
                attempt.reason = attempt.reason or why
                break
            try:
                if self._is_faster_to_compute(replies[plan.node], plan, bids):
                    attempt.reason = MissReason.FASTER_TO_COMPUTE
                    break
                outcome = self._restore(plan, prompt, b"", capacity_tokens, bids, attempt, replies[plan.node])
            finally:
                self._unpin_all(replies, attempt)
            if isinstance(outcome, Restored):
                self._count("restores")
                bid = self._choose(bids, outcome.source.owner)
                return _placement(bid, replies, attempt, restored=outcome)
            if outcome is not Then.LOOK_AGAIN:
                break
        bid, lease = self._lease(namespace, capacity_tokens, bids, attempt)
        attempt.reason = attempt.reason or MissReason.NOT_STORED
        self._count(f"misses.{attempt.reason}")
        return _placement(bid, replies, attempt, lease=lease)

    def suspend(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket:
        """Take a running sequence off its worker, at any token, into the tiers of `node`.

        It has left the worker when this returns, and its frames stay until the ticket is resumed, or for
        `suspend_pin_s`, or for as long again when `keep` is asked. Raises what went wrong, `CapacityError` if the tiers
        declined; the sequence then runs on. Only after an `UnknownOutcomeError` it may be either way.
        """
        return self._holder.suspend(source, node, durability, deadline_s=deadline_s)

    def resume(self, ticket: Ticket, capacity_tokens: int, *, deadline_s: float) -> Restored:
        """Continue a suspended sequence on any worker; the ticket is used up.

        Raises `StaleError` if it was used before, whoever was restarted since, `CapacityError` if no worker has room,
        `FrameNotFoundError` or `FrameError` if its frames are gone or bad: its tokens can then be computed again as a
        new request. A `TierError` says nothing about the ticket: who asks again, within a minute, may have it.
        """
        return self._holder.resume(ticket, capacity_tokens, deadline_s=deadline_s)

    def take_off(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket:
        """The first step of `suspend`: it is stored, and stays on its worker, stopped, until `settle` or `wake`."""
        attempt = self._attempt(deadline_s)
        deadline = attempt.deadline
        checked(source, SequenceRef)
        owner, tiering = _known(attempt.owners, source.owner), _known(attempt.tierings, node)
        try:
            suspension = owner.suspend(source, deadline_s=deadline.left_s("suspend"))
        except TierError:  # it may have stopped all the same
            with suppress(TieredCacheError):
                owner.wake(source, deadline_s=deadline.last_step_s(self._settings.ask_s))
            raise
        try:
            result = tiering.spill(
                suspension.offer,
                durability,
                suspension.prompt.hints,
                deadline.left_s("suspend") + SETTLE_S,
                deadline_s=deadline.left_s("suspend"),
            )
            plan = _taken(result)
            deadline.left_s("suspend")  # who asked has given up, and would never settle it
        except BaseException:
            with suppress(TieredCacheError):  # it is dead, then
                owner.wake(source, deadline_s=deadline.last_step_s(self._settings.ask_s))
            raise
        return Ticket(suspension.offer.offer.namespace, suspension.prompt, plan, suspension.sampler_state)

    def settle(self, source: SequenceRef, ticket: Ticket, *, deadline_s: float) -> None:
        """The second step: whoever has the ticket of a sequence that was taken off says so. Idempotent.

        Raises `StaleError` if it is not kept, and lets it run on then, unless it was resumed; on any other error it can
        be asked again.
        """
        attempt = self._attempt(deadline_s)
        owner = _known(attempt.owners, checked(source, SequenceRef).owner)
        last_step_s = attempt.deadline.last_step_s(self._settings.ask_s)
        try:
            is_kept = self._is_kept(ticket, attempt)
        except StaleError:  # it was resumed: it lives elsewhere
            with suppress(TieredCacheError):
                owner.release(source, deadline_s=last_step_s)
            raise
        if not is_kept:
            with suppress(TieredCacheError):
                owner.wake(source, deadline_s=last_step_s)
            raise _not_kept(ticket)
        self._count("suspends")
        try:
            owner.release(source, deadline_s=last_step_s)
        except TieredCacheError:  # its state is safe; there it stays suspended, if it still is there
            self._count("suspends.not_released")

    def keep(self, ticket: Ticket, *, deadline_s: float) -> None:
        """Keep a suspended sequence for `suspend_pin_s` seconds from now.

        Raises `StaleError` if it is not there, or was resumed.
        """
        if not self._is_kept(ticket, self._attempt(deadline_s)):
            raise _not_kept(ticket)

    def let_go(self, ticket: Ticket, *, deadline_s: float) -> None:
        """A suspended sequence's own frames are not needed any more: it was resumed, or never will be."""
        attempt = self._attempt(deadline_s)
        plan = checked(ticket, Ticket).plan
        _known(attempt.pinning, plan.node).let_go(plan.tickets, deadline_s=attempt.deadline.left_s("let go"))

    def bring_back(self, ticket: Ticket, capacity_tokens: int, by: int, *, deadline_s: float) -> Restored:
        """The first step of `resume`, for the asker of this number, who may ask again."""
        attempt = self._attempt(deadline_s)
        checked(ticket, Ticket)
        tiering = attempt.pinning.get(ticket.plan.node)
        if tiering is None:
            raise FrameNotFoundError("its node is not there, nor what it held", None, ticket.plan.node)
        bids = self._bids(ticket.namespace, (), attempt)
        outcome = self._restore(ticket.plan, ticket.prompt, ticket.sampler_state, capacity_tokens, bids, attempt)
        if not isinstance(outcome, Restored):
            assert attempt.error is not None
            raise attempt.error
        try:
            _use_up(ticket, tiering, by, attempt.deadline)
        except BaseException:
            last_step_s = attempt.deadline.last_step_s(self._settings.ask_s)
            with suppress(TieredCacheError):
                attempt.owners[outcome.source.owner].release(outcome.source, deadline_s=last_step_s)
            raise
        self._count("resumes")
        return outcome

    def counters(self) -> dict[str, int]:
        """How often what happened: restores, misses and refusals by reason."""
        with self._lock:
            return dict(self._counters)

    # Within

    def _is_kept(self, ticket: Ticket, attempt: _Attempt) -> bool:
        """Keep a suspended sequence for `suspend_pin_s` seconds from now; False if it is not there."""
        plan = checked(ticket, Ticket).plan
        port = attempt.pinning.get(plan.node)
        if port is None:  # which says nothing about what it holds
            raise TierError("the ticket's node is not there", None, plan.node, retryable=True)
        return port.keep(plan, self._settings.suspend_pin_s, deadline_s=attempt.deadline.left_s("keep"))

    def _attempt(self, deadline_s: float) -> _Attempt:
        with self._lock:
            owners, tierings = self._owners, self._tierings
        pinning: dict[str, TieringPort | CataloguePort] = {**tierings}
        if self._catalogue is not None:
            pinning[CATALOGUE] = self._catalogue
        return _Attempt(Deadline.after(deadline_s, self._clock), owners, tierings, pinning)

    def _restore(
        self,
        plan: RestorePlan,
        prompt: Prompt,
        sampler_state: bytes,
        capacity_tokens: int,
        bids: Sequence[Bid],
        attempt: _Attempt,
        reply: MatchReply | None = None,
    ) -> Restored | Then:
        """Try the workers, best first, until one has restored the plan or an error says to stop.

        Each may take half of the time that is left, so that one which hangs leaves some for the others. How long it
        took is noted for the tier of the reply that the plan came in.
        """
        attempt.error = CapacityError("no worker answered")
        attempt.reason = MissReason.CAPACITY
        for bid in self._ranked(bids, plan.node):
            started_s = self._clock()
            try:
                restored = attempt.owners[bid.owner].inject(
                    plan, prompt, capacity_tokens, sampler_state, deadline_s=attempt.deadline.left_s("restore") / 2
                )
            except TieredCacheError as error:
                attempt.error = error
                attempt.refusals.append((type(error).__name__, str(error)))
                then, attempt.reason = _consequence(error)
                self._count(f"refusals.{type(error).__name__}")
                if isinstance(error, TierError) and error.tier == plan.node:
                    attempt.left_out.add(plan.node)
                    then = Then.LOOK_AGAIN
                self._report((plan.node, bid.node), error, attempt)
                if then is not Then.NEXT_WORKER:
                    return then
            else:
                if reply is not None:
                    with self._lock:
                        self._estimate.loaded(plan.node, reply.tier, reply.bytes_stored, self._clock() - started_s)
                return restored
        return Then.COMPUTE

    def _is_faster_to_compute(self, reply: MatchReply, plan: RestorePlan, bids: Sequence[Bid]) -> bool:
        """By the speed of the worker that would compute it."""
        if not self._settings.load_or_recompute or not bids:
            return False
        tokens_per_s = self._ranked(bids, None)[0].tokens_per_s
        with self._lock:
            return self._estimate.is_slower(plan.node, reply.tier, reply.bytes_stored, plan.tokens, tokens_per_s)

    def _report(self, nodes: tuple[str, str], error: TieredCacheError, attempt: _Attempt) -> None:
        """Tell who planned a bad frame, and, of the object store's, the worker's own node, which may have served it."""
        if not isinstance(error, FrameError) or isinstance(error, VersionError) or error.key is None:
            return
        for node in dict.fromkeys(nodes if nodes[0] == CATALOGUE else nodes[:1]):
            with suppress(TieredCacheError):  # its next reader will find and report it again
                key = FrameKey.parse(error.key)
                last_step_s = attempt.deadline.last_step_s(self._settings.ask_s)
                _known(attempt.pinning, node).report_bad(key, error.message, deadline_s=last_step_s)

    def _lease(
        self, namespace: bytes, capacity_tokens: int, bids: Sequence[Bid], attempt: _Attempt
    ) -> tuple[Bid, LeaseRef]:
        """Room for an empty sequence on the first worker that grants it."""
        error: TieredCacheError = CapacityError("no worker of this identity and geometry answered")
        if attempt.away:
            error = TierError(f"no worker answered: {attempt.refusals[-1][1]}", retryable=True)
        for bid in self._ranked(bids, None):
            try:
                lease = attempt.owners[bid.owner].reserve(
                    namespace,
                    capacity_tokens,
                    self._settings.lease_s,
                    deadline_s=attempt.deadline.left_s("reserve"),
                )
            except TieredCacheError as refusal:
                error = refusal
                attempt.refusals.append((type(refusal).__name__, str(refusal)))
                self._count(f"refusals.{type(refusal).__name__}")
            else:
                return self._choose(bids, bid.owner), lease
        raise error

    def _bids(self, namespace: bytes, hashes: tuple[bytes, ...], attempt: _Attempt) -> list[Bid]:
        answers = self._ask(
            attempt.owners, "owner", lambda port, left_s: port.bid(namespace, hashes, deadline_s=left_s), attempt
        )
        return list(answers.values())

    def _match(self, namespace: bytes, prompt: Prompt, attempt: _Attempt) -> dict[str, MatchReply]:
        pin_s = self._settings.pin_s
        asked = {name: port for name, port in attempt.pinning.items() if name not in attempt.left_out}
        return self._ask(
            asked, "node", lambda port, left_s: port.match(namespace, prompt, pin_s, deadline_s=left_s), attempt
        )

    def _ask(
        self, ports: Mapping[str, _Port], kind: str, question: Callable[[_Port, float], _T], attempt: _Attempt
    ) -> dict[str, _T]:
        """Ask all at once; who does not answer in time, or cannot, is left out and counted.

        One that let two questions in a row run out is not asked for a while, longer each time, unless nobody else is
        there.
        """
        left_s = min(self._settings.ask_s, attempt.deadline.left_s("ask"))
        deadline = Deadline.after(left_s, self._clock)
        asked = self._expected(ports, kind)
        if len(asked) == 1:  # no need for a thread
            calls = {name: partial(question, port, left_s) for name, port in asked.items()}
        else:
            futures = {name: self._executor.submit(question, port, left_s) for name, port in asked.items()}
            calls = {name: partial(_result, future, deadline) for name, future in futures.items()}
        answers = {}
        for name, call in calls.items():
            try:
                answers[name] = call()
            except TieredCacheError as error:
                attempt.refusals.append((type(error).__name__, str(error)))
                self._count(f"refusals.{type(error).__name__}")
                attempt.away |= kind == "owner" and isinstance(error, TierError)
                self._heard(kind, name, late=isinstance(error, DeadlineError) and left_s == self._settings.ask_s)
            else:
                self._heard(kind, name, late=False)
        return answers

    def _expected(self, ports: Mapping[str, _Port], kind: str) -> Mapping[str, _Port]:
        """Those that are likely to answer."""
        now_s = self._clock()
        with self._lock:
            silent = {name for (of, name), its in self._silent.items() if of == kind and now_s < its.until_s}
        if not silent & ports.keys() or silent >= ports.keys():
            return ports
        self._count("members.left_alone")
        return {name: port for name, port in ports.items() if name not in silent}

    def _heard(self, kind: str, name: str, *, late: bool) -> None:
        with self._lock:
            before = self._silent.pop((kind, name), None)
            if late:
                pause_s = 0.0  # once can happen to anyone
                if before is not None:
                    pause_s = min(SILENT_S_MAX, 2 * before.pause_s or self._settings.ask_s)
                self._silent[kind, name] = _Silent(self._clock() + pause_s, pause_s)

    def _ranked(self, bids: Sequence[Bid], node: str | None) -> list[Bid]:
        """Workers near the bytes first, then with the prefix resident, then with the most room, then longest unused."""
        with self._lock:
            chosen = dict(self._chosen)

        def rank(bid: Bid) -> tuple[bool, int, int, int, str]:
            return bid.node != node, -bid.resident_tokens, -bid.bytes_free, chosen.get(bid.owner, 0), bid.owner

        return sorted(bids, key=rank)

    def _choose(self, bids: Sequence[Bid], owner: str) -> Bid:
        with self._lock:
            self._chosen[owner] = 1 + max(self._chosen.values(), default=0)
        return next(bid for bid in bids if bid.owner == owner)

    def _unpin_all(self, replies: Mapping[str, MatchReply], attempt: _Attempt) -> None:
        for reply in replies.values():
            if reply.plan is not None:
                with suppress(TieredCacheError):  # the pin has a deadline of its own
                    attempt.pinning[reply.plan.node].unpin(
                        reply.plan.pin,
                        reply.plan.generation,
                        deadline_s=attempt.deadline.last_step_s(self._settings.ask_s),
                    )

    def _count(self, what: str) -> None:
        with self._lock:
            self._counters[what] += 1


def _not_kept(ticket: Ticket) -> StaleError:
    return StaleError("the suspended sequence is not there: lost, or its time ran out", None, ticket.plan.node)


def _consequence(error: TieredCacheError) -> tuple[Then, MissReason]:
    for kind, then, reason in CONSEQUENCES:
        if isinstance(error, kind):
            return then, reason
    return Then.NEXT_WORKER, MissReason.REFUSED


def _taken(result: SpillResult) -> RestorePlan:
    """How to restore a suspended sequence from where it was spilled."""
    if result.plan is None:
        why = "; ".join(why for _, why in result.declined) or "nothing was stored"
        raise CapacityError(f"the sequence was not taken: {why}")
    return result.plan


def _use_up(ticket: Ticket, pinning: TieringPort | CataloguePort, by: int, deadline: Deadline) -> None:
    plan = ticket.plan
    if not pinning.use_up(plan, by, AGAIN_S, deadline_s=deadline.left_s("resume")):
        raise StaleError("the ticket was used before, or its time ran out", None, plan.node)


def _known(ports: Mapping[str, _Port], name: str) -> _Port:
    port = ports.get(name)
    if port is None:
        raise StaleError(f"this router knows {', '.join(sorted(ports))}, not {name}")
    return port


def _result(future: Future[_T], deadline: Deadline) -> _T:
    try:
        return future.result(max(0.0, deadline.at_s - deadline.clock()))  # all were asked at once
    except FutureTimeoutError as error:
        future.cancel()
        raise DeadlineError("no answer in time") from error


def _hashes(replies: Mapping[str, MatchReply]) -> tuple[bytes, ...]:
    return next((reply.hashes for reply in replies.values() if reply.hashes), ())


def _longest(replies: Mapping[str, MatchReply]) -> tuple[RestorePlan | None, MissReason | None]:
    """The longest plan, from a node rather than the catalogue, and the smallest name; or why there is none."""
    ordered = sorted(replies.items(), key=lambda item: (item[0] == CATALOGUE, item[0]))
    plans = [reply.plan for _, reply in ordered if reply.plan is not None]
    if plans:
        return max(plans, key=lambda plan: plan.tokens), None
    reasons = [reply.reason for reply in replies.values() if reply.reason is not None]
    known = [reason for reason in reasons if reason is not MissReason.NOT_STORED]
    return None, (known or reasons or [MissReason.TIER_ERROR])[0]


def _placement(
    bid: Bid,
    replies: Mapping[str, MatchReply],
    attempt: _Attempt,
    *,
    restored: Restored | None = None,
    lease: LeaseRef | None = None,
) -> Placement:
    reply, below = replies.get(bid.node), replies.get(CATALOGUE)
    return Placement(
        owner=bid.owner,
        node=bid.node,
        restored=restored,
        lease=lease,
        reason=None if restored else attempt.reason,
        refusals=tuple(attempt.refusals),
        take_at=tuple(sorted({n for each in (reply, below) if each for n in each.take_at})),
        request=reply.request if reply else None,
        store_request=below.request if below else None,
    )
