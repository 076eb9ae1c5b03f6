"""`SequenceOwner`: what any process that owns sequences needs, to have them spilled and to get them back.

It knows, for each sequence, the tokens behind the state, its epoch and where its rows come from; the engine knows
the state. An actor of one's own becomes an owner by holding one of these and forwarding the calls of `OwnerPort`.

Locks: one for the table of sequences, one for each sequence, so that an export never meets a rewind or a release.
None is held while another process is asked for something.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tiered_cache import frame
from tiered_cache.cache import Offer
from tiered_cache.deadline import Clock, Deadline, duration_s
from tiered_cache.engines.base import ComputingEngine, Engine, FrameName
from tiered_cache.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    FrameError,
    FrameNotFoundError,
    GeometryError,
    IdentityError,
    MissReason,
    PositionError,
    StaleError,
    TierError,
)
from tiered_cache.geometry import Geometry
from tiered_cache.identity import (
    CHECKPOINT,
    TICKET,
    FrameKey,
    Identity,
    PrefixChain,
    Tokens,
    namespace_of,
    tagged_hash,
)
from tiered_cache.service.estimate import RecentMedian
from tiered_cache.service.messages import (
    CATALOGUE,
    Bid,
    LeaseRef,
    Parcel,
    Prompt,
    Restored,
    RestorePlan,
    RunResult,
    SequenceRef,
    SpillOffer,
    StateMark,
    Suspension,
    TieringPort,
    parcel_bytes,
    parcel_views,
)
from tiered_cache.service.wire import checked

FETCH_BYTES_MAX = 256 << 20
"""How much one call for stored frames may bring; a longer state comes in several."""
MEASURED_TOKENS_MIN = 64
"""Of how many tokens a computation must be to say how fast prompts are computed: a step of decoding does not."""
UNCLAIMED_S = 60.0
WAIT_S = 30.0
"""How long a call without a deadline of its own waits for a sequence that is in use."""


@dataclass(slots=True)
class _Tracked:
    """One sequence of the engine. `lock` is held while the engine works on it."""

    handle: int
    chain: PrefixChain
    epoch: int
    lineage: int
    lineages: list[int]
    lock: threading.RLock
    staged: set[int] = field(default_factory=set)
    suspended: bool = False
    unclaimed_until_s: float | None = None
    """Of a restored sequence that nobody has used yet: when it is released."""


@dataclass(frozen=True, slots=True)
class _Lease:
    reservation: int
    expires_s: float
    lineage: int


class SequenceOwner:
    """The sequences of one engine, under names, epochs and leases."""

    def __init__(
        self,
        engine: Engine,
        *,
        name: str,
        node: str,
        tiering: Callable[[str], TieringPort],
        generation: int | None = None,
        unclaimed_s: float = UNCLAIMED_S,
        marks: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        """`unclaimed_s`: how long a restored sequence waits for its first use; its asker may have died.

        `marks`: whether states are told apart for whoever asks, which takes reading every byte of them, at the end of
        each restore and at every checkpoint. Replays and tests need it.
        """
        self.engine = engine
        self.name = name
        self.node = node
        self.generation = time.time_ns() if generation is None else generation
        self.namespace = namespace_of(engine.identity.digest(), engine.geometry.fingerprint())
        self._identity_digest = engine.identity.digest()
        self._tiering = tiering
        self._unclaimed_s = unclaimed_s
        self._marks = marks
        self._clock = clock
        self._lock = threading.Lock()
        self._sequences: dict[int, _Tracked] = {}
        self._leases: dict[int, _Lease] = {}
        self._counter = 0
        self._tokens_per_s = RecentMedian()

    def describe(self, *, deadline_s: float) -> tuple[Identity, Geometry]:
        """What the sequences here are of."""
        del deadline_s
        return self.engine.identity, self.engine.geometry

    # Room

    def bid(self, namespace: bytes, hashes: tuple[bytes, ...], *, deadline_s: float) -> Bid:
        """What it could offer a prompt with these block hashes. Raises `IdentityError` for another namespace."""
        del deadline_s
        self._check_namespace(namespace)
        self._drop_expired()
        with self._lock:
            chains = [tracked.chain for tracked in self._sequences.values()]
            tokens_per_s = self._tokens_per_s.value()
        shared = max((_common_blocks(chain.block_hashes(), hashes) for chain in chains), default=0)
        resident_tokens = shared * self.engine.geometry.block_tokens
        return Bid(self.name, self.generation, self.node, self.engine.bytes_free(), resident_tokens, tokens_per_s)

    def reserve(
        self, namespace: bytes, tokens: int, lease_s: float, *, lineage: int = 0, deadline_s: float
    ) -> LeaseRef:
        """Room for a sequence that may grow to `tokens` tokens, held for `lease_s` seconds.

        `lineage` names the computation, if it is one with those of the other owners of a set. Raises `IdentityError`
        for another namespace, `CapacityError` if there is no room; nothing is held then.
        """
        del deadline_s
        until_s = self._clock() + duration_s(lease_s, "lease_s")
        self._check_namespace(namespace)
        self._drop_expired()
        reservation = self.engine.reserve(tokens)
        with self._lock:
            self._counter += 1
            self._leases[self._counter] = _Lease(reservation, until_s, lineage)
            return LeaseRef(self.name, self.generation, self._counter)

    def cancel(self, lease: LeaseRef, *, deadline_s: float) -> None:
        """Give a lease back. Idempotent; raises `StaleError` for one of another generation."""
        del deadline_s
        self._check_generation(checked(lease, LeaseRef))
        with self._lock:
            held = self._leases.pop(lease.lease, None)
        if held is not None:
            self.engine.cancel(held.reservation)

    # A sequence comes in

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
        """Make a sequence of the plan's first `plan.tokens` tokens of the prompt from stored frames, all or nothing.

        Capacity is settled before a body moves. Every frame is checked against the key that these tokens have
        here, this engine's identity and its geometry, and the computation it comes from against the plan's, whoever
        made that. Raises `CapacityError`, `FrameError` (with the frame's key), `FrameNotFoundError`, `StateError`,
        `TierError` (of the plan's node, if that could not read a frame), `DeadlineError`; nothing has changed then.
        """
        deadline = Deadline.after(deadline_s, self._clock)
        checked(plan, RestorePlan)
        checked(prompt, Prompt)
        if not 0 < plan.tokens <= len(prompt.tokens):
            raise PositionError(f"a plan for {plan.tokens} tokens of a prompt of {len(prompt.tokens)}")
        chain = prompt.head(plan.tokens).chain(self.namespace, self.engine.geometry.block_tokens)
        self._check_plan(plan, chain)
        self._drop_expired()
        reservation = self.engine.reserve(max(capacity_tokens, plan.tokens))
        restoration = None
        try:
            restoration = self.engine.restoration(reservation, plan.tokens)
            bytes_read = 0
            lineages: dict[int, int] = {}
            for stored, stored_bytes in self._frames(plan, deadline):
                restoration.put(FrameName(stored.key.group, stored.key.tokens), stored.arrays)
                bytes_read += stored_bytes
                if stored.key.group != CHECKPOINT:
                    lineages[stored.key.tokens] = stored.lineage
            deadline.left_s("restore")
            handle = restoration.commit()
        except BaseException:
            if restoration is not None:
                restoration.abort()
            self.engine.cancel(reservation)
            raise
        try:
            if sampler_state:
                self.engine.load_sampler_state(handle, sampler_state)
            mark = self._mark(handle)
            deadline.left_s("restore")  # who asked has given up, and would never release it
        except BaseException:
            self.engine.release(handle)
            raise
        by_block = [lineages.get((block + 1) * chain.block_tokens, 0) for block in range(chain.blocks)]
        source = self._track(handle, chain, by_block, lineage, self._clock() + self._unclaimed_s)
        return Restored(source, plan.tokens, bytes_read, mark)

    def _check_plan(self, plan: RestorePlan, chain: PrefixChain) -> None:
        """A plan names frames of exactly this prefix, this namespace and this rank, or it is refused."""
        check_one_sequence(plan)
        for planned in plan.frames:
            key = planned.key
            if not 0 < key.tokens <= plan.tokens:
                raise PositionError(f"a frame at {key.tokens} in a plan for {plan.tokens} tokens", key.path())
            if key.private not in {0, planned.lineage}:
                raise IdentityError(f"a private copy of {key.private} planned as of {planned.lineage}", key.path())
            expected = chain.key(key.group, key.tokens, self.engine.rank, key.private)
            if key != expected:
                raise IdentityError(f"these tokens have {expected.path()} there, not this frame", key.path())
        for ticket in plan.tickets:
            if ticket != chain.key(TICKET, plan.tokens, self.engine.rank, ticket.private) or not ticket.private:
                raise IdentityError("a ticket of another sequence", ticket.path())

    def _frames(self, plan: RestorePlan, deadline: Deadline) -> Iterator[tuple[frame.Frame, int]]:
        """The plan's frames in order, checked, with their stored bytes; pulled in calls of bounded size."""
        port = self._tiering(self.node if plan.node == CATALOGUE else plan.node)
        wanted = plan.frames
        while wanted:
            bodies = port.fetch(wanted, FETCH_BYTES_MAX, deadline_s=deadline.left_s("restore"))
            if not bodies:
                raise FrameNotFoundError("the tier answered with no frame", wanted[0].key.path(), plan.node)
            for planned, body in zip(wanted, bodies, strict=False):
                if body is MissReason.TIER_ERROR or body is MissReason.DEADLINE:
                    kind = DeadlineError if body is MissReason.DEADLINE else TierError
                    raise kind("the tier did not give it", planned.key.path(), plan.node, retryable=True)
                if isinstance(body, MissReason):
                    raise FrameNotFoundError(f"was promised, and now is {body}", planned.key.path(), plan.node)
                try:
                    stored = frame.decode(
                        body, key=planned.key, identity_digest=self._identity_digest, geometry=self.engine.geometry
                    )
                except (GeometryError, IdentityError) as error:  # the name is ours, and what lies under it is not
                    raise FrameError(error.message, planned.key.path(), plan.node) from error
                if planned.lineage not in {0, stored.lineage}:  # 0: not known before it was read
                    what = f"of computation {stored.lineage} came, and {planned.lineage} was planned"
                    raise FrameNotFoundError(f"a frame {what}", planned.key.path(), plan.node)
                yield stored, len(body)
            wanted = wanted[len(bodies) :]
            del bodies, body, stored  # they hold room that the next ones need

    def track(self, handle: int, prompt: Prompt, lineage: int = 0) -> SequenceRef:
        """Take a sequence of the engine under management; its state must cover exactly the prompt's tokens.

        `lineage`: the same random number from 1 to 2**63 - 1 on all owners of a set; a lone owner takes its own.
        """
        if self.engine.tokens(handle) != len(prompt.tokens):
            raise PositionError(f"the state covers {self.engine.tokens(handle)} tokens, not {len(prompt.tokens)}")
        return self._track(handle, prompt.chain(self.namespace, self.engine.geometry.block_tokens), [], lineage)

    def _track(
        self,
        handle: int,
        chain: PrefixChain,
        lineages: list[int],
        lineage: int,
        unclaimed_until_s: float | None = None,
    ) -> SequenceRef:
        lineage = lineage or new_lineage()
        lineages += [lineage] * (chain.blocks - len(lineages))
        with self._lock:
            self._counter += 1
            self._sequences[self._counter] = _Tracked(
                handle, chain, 1, lineage, lineages, threading.RLock(), unclaimed_until_s=unclaimed_until_s
            )
            return SequenceRef(self.name, self.generation, self._counter, 1)

    # A sequence runs

    def start(self, lease: LeaseRef, extra_keys: Mapping[int, tuple[bytes, ...]] | None = None) -> SequenceRef:
        """Make an empty sequence in leased room. Raises `StaleError` if the lease has run out, or its owner died."""
        engine = self._computing()
        self._check_generation(lease)
        self._drop_expired()
        with self._lock:
            held = self._leases.pop(lease.lease, None)
        if held is None:
            raise StaleError(f"lease {lease.lease} has run out or was given back")
        try:
            handle = engine.start(held.reservation)
        except BaseException:
            engine.cancel(held.reservation)
            raise
        chain = PrefixChain(self.namespace, self.engine.geometry.block_tokens, extra_keys=extra_keys or {})
        return self._track(handle, chain, [], held.lineage)

    @contextmanager
    def using(self, source: SequenceRef) -> Iterator[int]:
        """The engine's handle of a running sequence; nobody exports, suspends or releases it meanwhile."""
        with self._held(source) as tracked:
            self._running(tracked)
            yield tracked.handle

    def extend(self, source: SequenceRef, tokens: Tokens) -> None:
        """Compute further tokens: uint32, shape [k]."""
        with self._held(source) as tracked:
            self._running(tracked)
            started_s = self._clock()
            self._computing().extend(tracked.handle, tokens)
            elapsed_s = self._clock() - started_s
            if len(tokens) >= MEASURED_TOKENS_MIN and elapsed_s > 0:
                with self._lock:
                    self._tokens_per_s.add(len(tokens) / elapsed_s)
            self._append(tracked, tokens)

    def advance(self, source: SequenceRef, tokens: Tokens) -> None:
        """Note that the engine, which runs by itself, has accepted further tokens: uint32, shape [k].

        Raises `PositionError`, and notes nothing, if its state does not end with them.
        """
        with self._held(source) as tracked:
            self._running(tracked)
            end, covered = len(tracked.chain) + len(tokens), self.engine.tokens(tracked.handle)
            if covered != end:
                raise PositionError(f"{len(tokens)} more tokens make {end}, and the state covers {covered}")
            self._append(tracked, tokens)

    def rewind(self, source: SequenceRef, tokens: int) -> SequenceRef:
        """Note that the engine has cut the sequence back to `tokens` accepted tokens.

        The epoch rises: offers and exports of before are refused. Returns the new reference. Raises `PositionError`
        if that is not what the engine has done.
        """
        with self._held(source) as tracked:
            self._running(tracked)
            chain = tracked.chain
            if not 0 <= tokens <= len(chain) or self.engine.tokens(tracked.handle) != tokens:
                covered = self.engine.tokens(tracked.handle)
                raise PositionError(f"a rewind from {len(chain)} to {tokens} tokens of a state that covers {covered}")
            tracked.chain = PrefixChain(chain.namespace, chain.block_tokens, chain.tokens[:tokens], chain.extra_keys)
            tracked.lineage = next_lineage(tracked.lineage, tokens)
            del tracked.lineages[tracked.chain.blocks :]
            tracked.staged = {n for n in tracked.staged if n <= tokens}
            tracked.epoch += 1
            return source._replace(epoch=tracked.epoch)

    def stage(self, source: SequenceRef) -> bool:
        """Keep what a checkpoint at the current token count needs; False if no staging slot was free."""
        with self._held(source) as tracked:
            try:
                self.engine.stage(tracked.handle)
            except CapacityError:
                return False
            tracked.staged.add(len(tracked.chain))
            return True

    def offer(self, source: SequenceRef) -> SpillOffer:
        """All staged checkpoints and the current token count, for a tiering service to pull."""
        with self._held(source) as tracked:
            if not len(tracked.chain):
                raise PositionError("a sequence of no tokens has nothing to offer")
            return self._offer(source, tracked, private=False)

    def run(
        self, place: SequenceRef | LeaseRef, prompt: Prompt, take_at: Sequence[int], *, deadline_s: float
    ) -> RunResult:
        """Compute what is left of a prompt, staging checkpoints on the way.

        `place` is a restored sequence, or a lease for an empty one. Raises `PositionError` if the sequence's tokens
        are not a prefix of the prompt, `DeadlineError`, and what the engine raises; the sequence is released then.
        Raises `StaleError`, and leaves it alone, if it is suspended or not what the caller believes it to be.
        """
        deadline = Deadline.after(deadline_s, self._clock)
        checked(place, LeaseRef if isinstance(place, LeaseRef) else SequenceRef)
        if not len(checked(prompt, Prompt).tokens):
            raise PositionError("a prompt of no tokens")
        source = self.start(place, prompt.extra_keys) if isinstance(place, LeaseRef) else place
        with self._held(source, deadline) as tracked:
            self._running(tracked)
            try:
                return self._run(source, tracked, prompt, take_at, deadline)
            except BaseException:
                self.release(source, deadline_s=WAIT_S)
                raise

    def _run(
        self, source: SequenceRef, tracked: _Tracked, prompt: Prompt, take_at: Sequence[int], deadline: Deadline
    ) -> RunResult:
        marks, skipped = [], []
        done, end = len(tracked.chain), len(prompt.tokens)
        _check_is_prefix(tracked.chain, prompt)
        tracked.chain.extra_keys = prompt.extra_keys
        for stop in [*sorted({n for n in take_at if done < n < end}), end]:
            deadline.left_s("run")
            if stop > len(tracked.chain):
                self.extend(source, prompt.tokens[len(tracked.chain) : stop])
            if stop != end and not self.stage(source):
                skipped.append(stop)
            elif mark := self._mark(tracked.handle):
                marks.append(mark)
        deadline.left_s("run")  # who asked has given up, and would never release it
        return RunResult(source, self._offer(source, tracked, private=False), tuple(marks), tuple(skipped))

    # A sequence goes out

    def export(self, source: SequenceRef, keys: tuple[FrameKey, ...], *, deadline_s: float) -> Parcel:
        """The raw arrays of these frames, in one array that then belongs to the caller.

        Raises `StaleError` if the sequence is not what the caller believes it to be, `IdentityError` if a key is not
        its own, whoever made it up, `GeometryError` and `StateError` for frames that the engine cannot give. The
        sequence is as it was.
        """
        deadline = Deadline.after(deadline_s, self._clock)
        for key in keys:
            checked(key, FrameKey)
        names = tuple(FrameName(key.group, key.tokens) for key in keys)
        size = parcel_bytes(self.engine.geometry, names)
        with self._held(source, deadline) as tracked:
            for key in keys:
                self._check_key(tracked, key)
            body = np.empty(size, dtype=np.uint8)
            self.engine.export(tracked.handle, names, parcel_views(self.engine.geometry, names, body))
        return Parcel(names, body)

    def release(self, source: SequenceRef, *, deadline_s: float) -> None:
        """Free the sequence's device memory. Idempotent: what is gone is gone; a stale epoch is refused."""
        try:
            with self._held(source, Deadline.after(deadline_s, self._clock)) as tracked:
                tracked.epoch += 1
                with self._lock:
                    self._sequences.pop(source.sequence, None)
                self.engine.release(tracked.handle)
        except FrameNotFoundError:
            return

    def suspend(self, source: SequenceRef, *, deadline_s: float) -> Suspension:
        """Stop the sequence where it stands: until `wake` or `release` it can be exported, and nothing else."""
        deadline = Deadline.after(deadline_s, self._clock)
        with self._held(source, deadline) as tracked:
            self._running(tracked)
            if not len(tracked.chain):
                raise PositionError("a sequence of no tokens has no state")
            offer = self._offer(source, tracked, private=True)
            state = self.engine.sampler_state(tracked.handle)
            deadline.left_s("suspend")  # who asked has given up, and would never wake it
            tracked.suspended = True
            prompt = Prompt(tracked.chain.tokens, {k: tuple(v) for k, v in tracked.chain.extra_keys.items()})
            return Suspension(offer, prompt, state)

    def wake(self, source: SequenceRef, *, deadline_s: float) -> None:
        """Let a suspended sequence run on: it could not be taken off this worker."""
        with self._held(source, Deadline.after(deadline_s, self._clock)) as tracked:
            tracked.suspended = False

    # Within

    def _check_key(self, tracked: _Tracked, key: FrameKey) -> None:
        chain = tracked.chain
        if not 0 < key.tokens <= len(chain):
            raise PositionError(f"a frame at {key.tokens} of a sequence of {len(chain)} tokens", key.path())
        if key.private not in {0, tracked.lineage}:
            raise IdentityError(f"a private copy of {key.private} of a sequence of {tracked.lineage}", key.path())
        expected = chain.key(key.group, key.tokens, self.engine.rank, key.private)
        if key != expected:
            raise IdentityError(f"this sequence has {expected.path()} there, not this frame", key.path())

    def _offer(self, source: SequenceRef, tracked: _Tracked, *, private: bool) -> SpillOffer:
        chain = tracked.chain
        stops = [len(chain)] if private else sorted({*tracked.staged, len(chain)} - {0})
        offer = Offer(
            namespace=self.namespace,
            block_tokens=chain.block_tokens,
            rank=self.engine.rank,
            hashes=tuple(chain.block_hashes()),
            checkpoints=tuple((n, chain.prefix_hash(n)) for n in stops),
            lineages=tuple(tracked.lineages),
            lineage=tracked.lineage,
            private=private,
        )
        return SpillOffer(source, offer)

    def _append(self, tracked: _Tracked, tokens: Tokens) -> None:
        tracked.chain.extend(tokens)
        tracked.lineages += [tracked.lineage] * (tracked.chain.blocks - len(tracked.lineages))

    def _mark(self, handle: int) -> StateMark | None:
        engine = self.engine
        if not self._marks or not isinstance(engine, ComputingEngine):
            return None
        return StateMark(engine.tokens(handle), engine.digest(handle), engine.output(handle))

    @contextmanager
    def _held(self, source: SequenceRef, deadline: Deadline | None = None) -> Iterator[_Tracked]:
        """The sequence, locked, if it still is what `source` says. Raises `DeadlineError` if it is in use till then."""
        self._check_generation(checked(source, SequenceRef))
        with self._lock:
            tracked = self._sequences.get(source.sequence)
        if tracked is None:
            raise FrameNotFoundError(f"sequence {source.sequence} was released", self.name)
        if not tracked.lock.acquire(timeout=WAIT_S if deadline is None else deadline.left_s("sequence")):
            raise DeadlineError(f"sequence {source.sequence} was in use until the deadline", self.name)
        try:
            if tracked.epoch != source.epoch:
                raise StaleError(f"sequence {source.sequence} is in epoch {tracked.epoch}, not {source.epoch}")
            tracked.unclaimed_until_s = None
            yield tracked
        finally:
            tracked.lock.release()

    def _check_generation(self, place: SequenceRef | LeaseRef) -> None:
        if (place.owner, place.generation) != (self.name, self.generation):
            raise StaleError(
                f"asked as {place.owner} of generation {place.generation}, this is {self.name} of {self.generation}"
            )

    def _running(self, tracked: _Tracked) -> None:
        if tracked.suspended:
            raise StaleError("the sequence is suspended")

    def _computing(self) -> ComputingEngine:
        if not isinstance(self.engine, ComputingEngine):
            raise ConfigError(f"{type(self.engine).__name__} is not an engine that this owner can run")
        return self.engine

    def _check_namespace(self, namespace: bytes) -> None:
        if namespace != self.namespace:
            raise IdentityError(f"namespace is {self.namespace.hex()[:16]} here, {namespace.hex()[:16]} was asked for")

    def _drop_expired(self) -> None:
        """Free what nobody has come for: leases that ran out, and restored sequences that were never used."""
        now_s = self._clock()

        def unclaimed(tracked: _Tracked) -> bool:
            return tracked.unclaimed_until_s is not None and tracked.unclaimed_until_s <= now_s

        with self._lock:
            expired = [lease for lease, held in self._leases.items() if held.expires_s <= now_s]
            gone = [self._leases.pop(lease) for lease in expired]
            abandoned = [(number, tracked) for number, tracked in self._sequences.items() if unclaimed(tracked)]
        for held in gone:
            self.engine.cancel(held.reservation)
        for number, tracked in abandoned:
            if tracked.lock.acquire(blocking=False):  # else somebody has come for it just now
                try:
                    if unclaimed(tracked):
                        tracked.epoch += 1
                        with self._lock:
                            self._sequences.pop(number, None)
                        self.engine.release(tracked.handle)
                finally:
                    tracked.lock.release()


def check_one_sequence(plan: RestorePlan) -> None:
    """A suspended sequence's own frames, and on all ranks its checkpoint, are of one computation: `IdentityError`.

    What is nobody's own may be of several: any engine of this identity has the same there.
    """
    private = {planned.key.private for planned in plan.frames} - {0}
    if private:
        private |= {planned.lineage for planned in plan.frames if planned.key.group == CHECKPOINT}
    if len(private) > 1:
        raise IdentityError(f"the plan is of several sequences: {sorted(private)}")


def new_lineage() -> int:
    """The number of a computation that has begun."""
    return secrets.randbits(63) | 1


def next_lineage(lineage: int, tokens: int) -> int:
    """The number of the computation that goes on from `tokens` tokens of another: the same on all owners of a set."""
    return (
        int.from_bytes(tagged_hash("rewind", lineage.to_bytes(8, "little"), tokens.to_bytes(8, "little"))[:8]) >> 1 | 1
    )


def _common_blocks(mine: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """How many blocks two chains share: equal hashes mean equal everything before."""
    low, high = 0, min(len(mine), len(theirs)) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if mine[middle] == theirs[middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _check_is_prefix(chain: PrefixChain, prompt: Prompt) -> None:
    """Tokens and media: those of the block that the sequence ends in may have more to come."""
    if not np.array_equal(chain.tokens, prompt.tokens[: len(chain)]):
        raise PositionError(f"the sequence's {len(chain)} tokens are not the first of this prompt")
    for block in {*chain.extra_keys, *prompt.extra_keys}:
        mine, theirs = tuple(chain.extra_keys.get(block, ())), tuple(prompt.extra_keys.get(block, ()))
        if block <= chain.blocks and mine != (theirs if block < chain.blocks else theirs[: len(mine)]):
            raise PositionError(f"the sequence and this prompt have other media in block {block}")
