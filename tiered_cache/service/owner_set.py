"""`OwnerSet`: one worker that is several owners, one a rank, each with its shard of every sequence.

Tensor-parallel workers hold a sequence together: all of them have it, or none. A set is an `OwnerPort` like a lone
owner's, and whoever places, restores, suspends or runs sequences need not know the difference:

    reserve, inject, run     on all ranks at once; if one fails, the others let go of what they had got
    a restore                each rank gets a plan of its own frames
    a spill                  an offer a rank, as of one computation; the tiering service pulls from each rank and
                             acknowledges what all have brought

A set keeps nothing: a reference to a set's sequence is the ranks' references, so that any process can make one of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import replace
from typing import Protocol, TypeVar

import msgpack
import xxhash

from tiered_cache.deadline import Clock, Deadline
from tiered_cache.errors import GeometryError, StateError, TieredCacheError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.service.messages import (
    Bid,
    LeaseRef,
    OwnerPort,
    Parcel,
    Prompt,
    Restored,
    RestorePlan,
    RunResult,
    SequenceRef,
    SpillOffer,
    StateMark,
    Suspension,
)
from tiered_cache.service.owner import check_one_sequence, new_lineage
from tiered_cache.service.router import CONSEQUENCES
from tiered_cache.service.wire import checked

_T = TypeVar("_T")
_P = TypeVar("_P")

TIDY_S = 2.0
"""How long to let go of what some ranks have, after another one has failed."""


class Rank(OwnerPort, Protocol):
    """An owner that computes, as one of a set."""

    def run(
        self, place: SequenceRef | LeaseRef, prompt: Prompt, take_at: tuple[int, ...], *, deadline_s: float
    ) -> RunResult: ...


def rank_name(worker: str, rank: int, shards: int) -> str:
    """What an owner is called that is one rank of a worker; a lone one has the worker's name."""
    return worker if shards == 1 else f"{worker}.{rank}"


class OwnerSet:
    """The owners of all ranks of one worker."""

    def __init__(self, name: str, ranks: Sequence[Rank], executor: Executor, *, clock: Clock = time.monotonic) -> None:
        """`executor` makes calls to all ranks at once: as many threads as ranks, for each call to the set."""
        self.name = name
        self.ranks = tuple(ranks)
        self._numbers = range(len(self.ranks))
        self._executor = executor
        self._clock = clock

    def describe(self, *, deadline_s: float) -> tuple[Identity, Geometry]:
        """What all ranks are of. Raises `GeometryError` or `IdentityError` if they are not of one."""
        described = self._all(lambda rank, _: rank.describe(deadline_s=deadline_s), self._numbers)
        identity, geometry = described[0]
        if geometry.shards != len(self.ranks):
            raise GeometryError(f"shards is {geometry.shards}, and {self.name} has {len(self.ranks)} ranks")
        for other_identity, other_geometry in described[1:]:
            identity.check(other_identity)
            geometry.check(other_geometry)
        return identity, geometry

    def bid(self, namespace: bytes, hashes: tuple[bytes, ...], *, deadline_s: float) -> Bid:
        """What the rank with the least could offer."""
        bids = self._all(lambda rank, _: rank.bid(namespace, hashes, deadline_s=deadline_s), self._numbers)
        speeds = [bid.tokens_per_s for bid in bids if bid.tokens_per_s is not None]
        return Bid(
            self.name,
            max(bid.generation for bid in bids),
            bids[0].node,
            min(bid.bytes_free for bid in bids),
            min(bid.resident_tokens for bid in bids),
            min(speeds, default=None),
        )

    def reserve(
        self, namespace: bytes, tokens: int, lease_s: float, *, lineage: int = 0, deadline_s: float
    ) -> LeaseRef:
        """Room on all ranks, or on none."""
        lineage, deadline = lineage or new_lineage(), Deadline.after(deadline_s, self._clock)
        leases = self._all(
            lambda rank, _: rank.reserve(
                namespace, tokens, lease_s, lineage=lineage, deadline_s=deadline.left_s("reserve")
            ),
            self._numbers,
            lambda rank, lease: rank.cancel(lease, deadline_s=deadline.last_step_s(TIDY_S)),
        )
        return LeaseRef(self.name, 0, 0, tuple(leases))

    def cancel(self, lease: LeaseRef, *, deadline_s: float) -> None:
        """Give the room back that all ranks hold."""
        parts = self._parts(checked(lease, LeaseRef).ranks)
        self._all(lambda rank, part: rank.cancel(part, deadline_s=deadline_s), parts)

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
        """Restore each rank's frames of the plan, on all ranks or on none.

        Raises `IdentityError` for a plan that would give them several sequences' frames.
        """
        lineage, deadline = lineage or new_lineage(), Deadline.after(deadline_s, self._clock)
        checked(plan, RestorePlan)
        if strangers := {f.key.rank for f in plan.frames} - set(range(len(self.ranks))):
            raise GeometryError(f"the plan is of rank {max(strangers)}, and {self.name} has {len(self.ranks)} ranks")
        check_one_sequence(plan)  # each rank sees its own frames alone
        states = _split(sampler_state, len(self.ranks)) if sampler_state else [b""] * len(self.ranks)

        def injected(rank: Rank, number: int) -> Restored:
            frames = tuple(planned for planned in plan.frames if planned.key.rank == number)
            tickets = tuple(ticket for ticket in plan.tickets if ticket.rank == number)
            return rank.inject(
                replace(plan, frames=frames, tickets=tickets),
                prompt,
                capacity_tokens,
                states[number],
                lineage=lineage,
                deadline_s=deadline.left_s("restore"),
            )

        all_restored = self._all(
            injected,
            self._numbers,
            lambda rank, restored: rank.release(restored.source, deadline_s=deadline.last_step_s(TIDY_S)),
        )
        return Restored(
            SequenceRef(self.name, 0, 0, 0, tuple(restored.source for restored in all_restored)),
            plan.tokens,
            sum(restored.bytes_read for restored in all_restored),
            combined_mark([restored.mark for restored in all_restored]),
        )

    def run(
        self, place: SequenceRef | LeaseRef, prompt: Prompt, take_at: tuple[int, ...], *, deadline_s: float
    ) -> RunResult:
        """Compute what is left of a prompt on all ranks; if one fails, the sequence is released on all."""
        deadline = Deadline.after(deadline_s, self._clock)
        checked(place, LeaseRef if isinstance(place, LeaseRef) else SequenceRef)
        parts: Sequence[SequenceRef | LeaseRef] = self._parts(place.ranks)
        try:
            done = self._all(
                lambda rank, part: rank.run(part, prompt, take_at, deadline_s=deadline.left_s("run")),
                parts,
                lambda rank, result: rank.release(result.source, deadline_s=deadline.last_step_s(TIDY_S)),
            )
        except TieredCacheError:
            if isinstance(place, SequenceRef):  # a rank that has not begun still holds it
                self._try(lambda rank, part: rank.release(part, deadline_s=deadline.last_step_s(TIDY_S)), place.ranks)
            raise
        skipped = tuple(sorted({tokens for result in done for tokens in result.skipped}))
        offer = SpillOffer(done[0].offer.source, done[0].offer.offer, tuple(result.offer for result in done[1:]))
        shared = set.intersection(*({n for n, _ in result.offer.offer.checkpoints} for result in done))
        common = offer.only(shared)
        assert common is not None  # all stand at the end of the prompt
        marks = (
            combined_mark([next((m for m in result.marks if m.tokens == mark.tokens), None) for result in done])
            for mark in done[0].marks
        )
        source = SequenceRef(self.name, 0, 0, 0, tuple(result.source for result in done))
        return RunResult(source, common, tuple(mark for mark in marks if mark is not None), skipped)

    def export(self, source: SequenceRef, keys: tuple[FrameKey, ...], *, deadline_s: float) -> Parcel:
        """The frames of one rank."""
        ranks = {key.rank for key in keys}
        parts = self._parts(checked(source, SequenceRef).ranks)
        if len(ranks) != 1 or not ranks <= set(range(len(parts))):
            raise StateError(f"an export of ranks {sorted(ranks)}, not of one of {len(parts)}")
        (rank,) = ranks
        return self.ranks[rank].export(parts[rank], keys, deadline_s=deadline_s)

    def release(self, source: SequenceRef, *, deadline_s: float) -> None:
        """Free the sequence on all ranks; raises the first error, when all have been asked."""
        parts = self._parts(checked(source, SequenceRef).ranks)
        self._all(lambda rank, part: rank.release(part, deadline_s=deadline_s), parts)

    def suspend(self, source: SequenceRef, *, deadline_s: float) -> Suspension:
        """Stop the sequence on all ranks, or on none."""
        deadline = Deadline.after(deadline_s, self._clock)
        parts = self._parts(checked(source, SequenceRef).ranks)
        suspended = self._all(
            lambda rank, part: rank.suspend(part, deadline_s=deadline.left_s("suspend")),
            parts,
            lambda rank, found: rank.wake(found.offer.source, deadline_s=deadline.last_step_s(TIDY_S)),
        )
        first = suspended[0]
        offer = SpillOffer(first.offer.source, first.offer.offer, tuple(found.offer for found in suspended[1:]))
        return Suspension(offer, first.prompt, _joined([found.sampler_state for found in suspended]))

    def wake(self, source: SequenceRef, *, deadline_s: float) -> None:
        """Let a suspended sequence run on, on all ranks."""
        parts = self._parts(checked(source, SequenceRef).ranks)
        self._all(lambda rank, part: rank.wake(part, deadline_s=deadline_s), parts)

    # Within

    def _parts(self, parts: Sequence[_P]) -> Sequence[_P]:
        if len(parts) != len(self.ranks):
            raise GeometryError(f"a sequence of {len(parts)} ranks on {self.name}, which has {len(self.ranks)}")
        return parts

    def _all(
        self,
        call: Callable[[Rank, _P], _T],
        of: Sequence[_P],
        undo: Callable[[Rank, _T], object] | None = None,
    ) -> list[_T]:
        """Every rank's answer, asked at once. If some fail, the others' are undone; raises what matters most."""
        answers, errors = self._try(call, of)
        if not errors:
            return [answer for _, answer in answers]
        if undo is not None and answers:
            wait([self._executor.submit(_quietly, undo, self.ranks[number], answer) for number, answer in answers])
        raise min(errors, key=_weight)

    def _try(
        self, call: Callable[[Rank, _P], _T], of: Sequence[_P]
    ) -> tuple[list[tuple[int, _T]], list[TieredCacheError]]:
        futures = [self._executor.submit(call, rank, part) for rank, part in zip(self.ranks, of, strict=True)]
        wait(futures)  # each call has a deadline of its own
        answers: list[tuple[int, _T]] = []
        errors: list[TieredCacheError] = []
        for number, future in enumerate(futures):
            try:
                answers.append((number, future.result()))
            except TieredCacheError as error:
                errors.append(error)
        return answers, errors


def combined_mark(marks: Sequence[StateMark | None]) -> StateMark | None:
    """What tells two states of a set apart: all ranks' digests, and the sum of their outputs modulo 2**64."""
    found = [mark for mark in marks if mark is not None]
    if len(found) < len(marks):
        return None
    if len(found) == 1:
        return found[0]
    digest = xxhash.xxh3_128_hexdigest("".join(mark.digest for mark in found).encode())
    return StateMark(found[0].tokens, digest, sum(mark.output for mark in found) % (1 << 64))


def _quietly(undo: Callable[[Rank, _T], object], rank: Rank, answer: _T) -> None:
    try:
        undo(rank, answer)
    except TieredCacheError:  # it is dead, or what it holds runs out by itself
        return


def _weight(error: TieredCacheError) -> int:
    """The row of the router's table: what says most about the plan comes first."""
    return next((row for row, (kind, _, _) in enumerate(CONSEQUENCES) if isinstance(error, kind)), len(CONSEQUENCES))


def _joined(states: Sequence[bytes]) -> bytes:
    """All ranks' sampler states as one, as opaque as each."""
    packed: bytes = msgpack.packb(list(states)) if any(states) else b""
    return packed


def _split(state: bytes, ranks: int) -> list[bytes]:
    try:
        states = msgpack.unpackb(state, max_array_len=ranks)
    except (ValueError, msgpack.UnpackException) as error:
        raise StateError("the sampler state is not that of a set") from error
    if not isinstance(states, list) or len(states) != ranks or not all(isinstance(each, bytes) for each in states):
        raise StateError(f"the sampler state is not that of {ranks} ranks")
    return states
