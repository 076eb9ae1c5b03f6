"""`Level`: one tier with its policy and its part of the index, kept in step.

The index lists what the tier has, and the policy knows the checkpoints that this makes. Whatever comes, goes or turns
out to be bad passes through here:

- Whoever changes or judges what the tier has under some names has these names to himself meanwhile, and deletes only
  what the index does not list then. So a frame that one thread drops and another puts is listed exactly if it is there.
- The policy is told of a checkpoint in the moment in which the index lists or forgets it.
- Only a verified absence, or bytes that were read and are bad, take a frame out of the index unasked.
- What may be in the tier and is not listed, since a put or a delete has failed, is remembered, and deleted later.
- A tier that `lends` gets its frames from others, who put them there under names that were lent to them: nothing with
  such a name is deleted meanwhile. It is slow and shared, so that nobody waits there while something is deleted, but
  who needs the room.
- Copies of what the level above holds may be put ahead of need: *staged*, they are read back, but not listed, and no
  policy knows of them, until the checkpoint that they belong to really moves; then they only need to be listed.
- A call that nobody waits for any more keeps its names until it has ended.

The lock over index, policies and figures is never held while the tier is asked for anything.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, TypeVar

from tiered_cache.codecs import Mode
from tiered_cache.deadline import wait_s
from tiered_cache.errors import (
    DeadlineError,
    FrameNotFoundError,
    IdentityError,
    TieredCacheError,
    TierError,
    VersionError,
)
from tiered_cache.flights import Flights, Waiters
from tiered_cache.identity import CHECKPOINT, FrameKey
from tiered_cache.index import (
    Chain,
    Claim,
    FrameName,
    PrefixId,
    PrefixIndex,
    RemovalReason,
    TierView,
    private_checkpoint,
)
from tiered_cache.namespace import (
    BAD,
    DESCRIPTOR_BYTES_MAX,
    Namespace,
    descriptor_namespace,
    descriptor_path,
    read_descriptor,
)
from tiered_cache.policy.base import CachePolicy
from tiered_cache.prefix_tree import plain_name
from tiered_cache.tiers.base import (
    Durability,
    GetAnswer,
    GetRequest,
    LateError,
    PutItem,
    PutOutcome,
    Reservation,
    Tier,
)

PUT_ATTEMPTS = 3
"""How often something is put whose place is taken by something bad."""
DOOMED_MAX = 1 << 16
"""How many frames that failed calls may have left behind are remembered."""
TIDY_MAX = 256
"""How many of them are deleted at once."""
AT_ONCE = 1 << 10
"""How many names are looked at before others have the lock again."""
ALONE_S = 60.0
"""How long to wait for another thread's work on the same frames, or for what it reads."""
WAITING_MAX = 16
"""How many threads may wait for others' work in one tier that can be slow: they are missing elsewhere."""

_E = TypeVar("_E", bound=TieredCacheError)
_log = logging.getLogger(__name__)


class StoredFrame(NamedTuple):
    """A frame's stored form."""

    name: FrameName
    key: FrameKey
    lineage: int
    bytes: int
    buffers: Sequence[memoryview]


class Arrival(NamedTuple):
    """A frame that is in the tier now."""

    key: FrameKey
    bytes: int
    created: bool
    """False if it was there already, sound."""


class Landed(NamedTuple):
    """A frame that somebody else has put into a tier, or found there, and has read: it is sound."""

    key: FrameKey
    bytes: int
    lineage: int
    created: bool


class _Found(NamedTuple):
    """A frame that the tier has."""

    name: FrameName
    bytes: int
    lineage: int
    verified: bool


class _Reading(NamedTuple):
    """What frames of the tier turned out to be."""

    sound: list[_Found]
    absent: list[FrameName]
    bad: list[tuple[FrameName, TieredCacheError]]
    errors: list[TierError]
    """The tier could not say."""


class CacheState:
    """What the levels of one cache share, and the lock over it."""

    def __init__(self, tiers: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.freed = threading.Condition(self.lock)
        """Somebody has done with some frames."""
        self.index = PrefixIndex(tiers)
        self.namespaces: dict[bytes, Namespace] = {}
        self.counters: Counter[str] = Counter()
        self.clock = clock
        """Of pins and deadlines."""
        self._told_s: float | None = None

    def tell(self, now_s: float) -> None:
        """From now on policies live in the time of the requests, as in a replay that is faster than its trace."""
        with self.lock:
            self._told_s = now_s if self._told_s is None else max(self._told_s, now_s)

    def policy_s(self) -> float:
        """The time that policies are told: that of the last request, or the clock's if requests tell none."""
        with self.lock:
            return self.clock() if self._told_s is None else self._told_s

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.counters[what] += number

    def add(self, known: Namespace) -> Namespace:
        """Make a namespace known; returns the one that is."""
        with self.lock:
            self.index.register(known.layout)
            return self.namespaces.setdefault(known.digest, known)

    def namespace(self, digest: bytes) -> Namespace:
        """Raises `IdentityError` if it is not known."""
        with self.lock:
            known = self.namespaces.get(digest)
        if known is None:
            raise IdentityError(f"namespace {digest.hex()[:16]} is not registered on this node")
        return known


class Level:
    """One tier, who decides about it, and how frames are encoded for it."""

    def __init__(
        self,
        tier: Tier,
        policy: CachePolicy,
        mode: Mode,
        state: CacheState,
        below: Level | None,
        *,
        lends: bool = False,
    ) -> None:
        self.tier = tier
        self.policy = policy
        self.mode = mode
        self.name = tier.name
        self.below = below
        self.lends = lends
        self.held = False
        """Nothing is deleted until `reconcile` has found what others, who may delete and put until then, have left.

        What was to be deleted is looked at anew then: they may rely on it by now.
        """
        self.leaving: set[PrefixId] = set()
        """Checkpoints that some thread is moving to the tier below: no others need to."""
        self._state = state
        self._index = state.index
        self._busy: set[FrameName] = set()
        self._lent: Counter[FrameName] = Counter()
        self._late: Counter[FrameName] = Counter()  # of calls that nobody waits for any more
        self._waiters = Waiters(tier.name, None if tier.durability is Durability.HOST else WAITING_MAX)
        self._flights = Flights(tier.name, self._waiters)
        self._doomed: dict[FrameName, None] = {}  # may be there and are not listed
        self.staged: dict[FrameName, _Found] = {}
        """Sound copies of frames of the level above that are here and not listed."""
        self.staged_bytes = 0
        """What the tier charges for them."""
        self.staging_bytes = 0
        """What it charges for those that are on their way in or out."""
        self._described: set[bytes] = set()  # namespaces whose descriptor is there
        self._strange: set[bytes] = set()  # namespaces of which there are frames and no sound descriptor
        self.mourned: set[bytes] = set()
        """Namespaces of which there were frames that died with an earlier process."""

    @property
    def view(self) -> TierView:
        return self._index.view(self.name)

    # Names

    @contextmanager
    def _alone(self, names: Collection[FrameName]) -> Iterator[None]:
        """Nobody else puts, deletes or judges these frames meanwhile. Never within another such block."""
        freed = self._state.freed
        with freed:
            self._await(names)
            self._busy.update(names)
        try:
            yield
        finally:
            with freed:
                self._busy.difference_update(names)
                freed.notify_all()

    def _await(self, names: Collection[FrameName]) -> None:
        """Wait, with the lock held, until nobody is at work on these frames."""
        if not self._busy.isdisjoint(names):
            limit_s = wait_s(ALONE_S)
            with self._waiters.one():
                if not self._state.freed.wait_for(lambda: self._busy.isdisjoint(names), limit_s):
                    what = f"others work on the same frames for more than {limit_s:.3g} s"
                    raise DeadlineError(what, None, self.name)
        self._refuse_late(names)

    def _keep_late(self, names: Collection[FrameName], error: TieredCacheError) -> None:
        """If the call that gave this error still runs, nobody else may touch its names until it has ended."""
        if not isinstance(error, LateError):
            return
        with self._state.lock:
            self._late.update(names)

        def ended(_: object) -> None:
            with self._state.lock:
                self._late -= Counter(names)

        error.ended.add_done_callback(ended)

    def _refuse_late(self, names: Collection[FrameName]) -> None:
        with self._state.lock:
            if not self._late.keys().isdisjoint(names):
                raise DeadlineError("an earlier call for the same frames has not ended", None, self.name)

    @contextmanager
    def _counted(self, how: str) -> Iterator[None]:
        """Count the frames that come into the index, or leave it, within the block."""
        index, name = self._index, self.name
        frames, bytes_ = index.stored_frames(name), index.stored_bytes(name)
        yield
        self._book(how, abs(index.stored_frames(name) - frames), abs(index.stored_bytes(name) - bytes_))

    def _book(self, how: str, frames: int, bytes_: int) -> None:
        if frames:
            self._state.counters[f"frames.{self.name}.{how}"] += frames
            self._state.counters[f"bytes.{self.name}.{how}"] += bytes_

    def _list(self, found: Iterable[_Found], how: str) -> list[FrameName]:
        """List frames that are there, and tell the policy of checkpoints that were not before.

        Returns those that cannot be listed, since their names contradict others.
        """
        contradicting: list[FrameName] = []
        with self._state.lock, self._counted(how):
            view, added = self.view, dict[PrefixId, None]()
            for name, bytes_, lineage, verified in found:
                checkpoint = _checkpoint_of(name)
                there = checkpoint in view
                self._take_staged([name])
                try:
                    self._index.insert(name, self.name, self.tier.footprint(bytes_), lineage)
                except IdentityError:
                    contradicting.append(name)
                    continue
                if verified:
                    self._index.set_verified(name, self.name)
                if not there and checkpoint in view:
                    added[checkpoint] = None
            if added:
                self.policy.commit(sorted(added, key=view.tokens), [], self._state.policy_s(), view)
        return contradicting

    def _forget(self, name: FrameName, reason: RemovalReason) -> list[FrameName]:
        """Take a frame out of the index that is not there, or not whole; returns what nothing needs any more.

        With the last of a checkpoint's frames goes what only it needed; a private one is worth nothing in part.
        """
        with self._state.lock:
            if not self._index.holds(name, self.name):
                return []
            view, checkpoint = self.view, _checkpoint_of(name)
            there = checkpoint in view
            frames, bytes_ = self._index.stored_frames(self.name), self._index.stored_bytes(self.name)
            own_bytes = dict(self._index.locate(name).copies)[self.name]
            shards = self._namespace_of(name).geometry.shards
            others = (name._replace(rank=rank) for rank in range(shards) if rank != name.rank)
            last = name.private or not any(self._index.holds(other, self.name) for other in others)
            names: list[FrameName] = []
            if last and (name.group == CHECKPOINT or name.private):
                names = self._index.drop(checkpoint, self.name, reason)
            else:
                self._index.remove(name, self.name, reason)
            frames -= self._index.stored_frames(self.name)
            bytes_ -= self._index.stored_bytes(self.name)
            self._book(reason, 1, own_bytes)
            self._book(RemovalReason.ABANDONED, frames - 1, bytes_ - own_bytes)
            if there and checkpoint not in view:
                self.policy.commit([], [(checkpoint, reason)], self._state.policy_s(), view)
            return [other for other in names if other != name]

    # In

    def put(self, frames: Sequence[StoredFrame], room: Reservation) -> list[Arrival]:
        """Put frames of one namespace, at most a batch, and list them; what is there already must be sound.

        A bad one in their place is set aside, and they are put again. Raises what the tier raises: what had come by
        then is listed, and goes when its claim is released. Raises `IdentityError` if names contradict others.
        """
        arrivals: list[Arrival] = []
        leftover: list[FrameName] = []
        try:
            with self._alone([stored.name for stored in frames]):
                for _ in range(PUT_ATTEMPTS):
                    created, there = self._put_once(frames, room)
                    arrivals += [Arrival(stored.key, stored.bytes, created=True) for stored in created]
                    if not there:
                        return arrivals
                    reading = self._read([stored.name for stored in there])
                    self._list(reading.sound, "found")
                    arrivals += [Arrival(key_of(found.name), found.bytes, created=False) for found in reading.sound]
                    leftover += self._set_aside(reading)
                    if reading.errors:
                        raise reading.errors.pop()
                    sound = {found.name for found in reading.sound}
                    frames = [stored for stored in there if stored.name not in sound]
                    if not frames:
                        return arrivals
        finally:
            self.delete(leftover)
        raise TierError("a bad frame is in its place again and again", frames[0].key.path(), self.name)

    def _put_once(
        self, frames: Sequence[StoredFrame], room: Reservation
    ) -> tuple[list[StoredFrame], list[StoredFrame]]:
        """The frames that were created, and are listed, and those that were there."""
        names = [stored.name for stored in frames]
        self._refuse_late(names)  # the quarantine of one of them, say
        try:
            outcomes = self.tier.put([PutItem(stored.key.path(), stored.buffers) for stored in frames], room)
        except TieredCacheError as error:
            self._state.count(f"errors.{self.name}.put")
            self._keep_late(names, error)
            self._doom(names)  # the tier takes back what it can, we the rest
            raise
        created: list[StoredFrame] = []
        there: list[StoredFrame] = []
        for stored, outcome in zip(frames, outcomes, strict=True):
            (created if outcome is PutOutcome.CREATED else there).append(stored)
        contradicting = self._list((_Found(s.name, s.bytes, s.lineage, verified=False) for s in created), "put")
        if contradicting:
            self._doom(contradicting)
            raise IdentityError("another prefix has this name", key_of(contradicting[0]).path(), self.name)
        return created, there

    # Ahead of need

    def stage(self, sizes: Sequence[int], batches: Iterable[Sequence[StoredFrame]]) -> None:
        """Put copies of frames of the level above and read them back; those that are listed are left alone.

        `sizes`: how large each is at most. Raises what the tier raises.
        """
        with self.tier.reserve(sizes) as room:
            bytes_ = room.bytes
            with self._state.lock:
                self.staging_bytes += bytes_
            try:
                for frames in batches:
                    staged, error = self._stage(frames, room)
                    bytes_ -= staged
                    if error is not None:
                        raise error
            finally:
                room.release()
                with self._state.lock:
                    self.staging_bytes -= bytes_

    def _stage(self, frames: Sequence[StoredFrame], room: Reservation) -> tuple[int, TierError | None]:
        """At most a batch; how many of the bytes on their way are staged now, and why others could not be read."""
        names = [stored.name for stored in frames]
        leftover: list[FrameName] = []
        try:
            with self._alone(names):
                with self._state.lock:
                    held = self._index.holds
                    frames = [f for f in frames if f.name not in self.staged and not held(f.name, self.name)]
                names = [stored.name for stored in frames]
                try:
                    self.tier.put([PutItem(stored.key.path(), stored.buffers) for stored in frames], room)
                except TieredCacheError as error:
                    self._keep_late(names, error)
                    self._doom(names)
                    raise
                reading = self._read(names) if names else _Reading([], [], [], [])
                leftover += self._set_aside(reading)
                with self._state.lock:
                    sound = [found for found in reading.sound if not self._index.holds(found.name, self.name)]
                    for found in sound:
                        self.staged[found.name] = found
                        self._doomed.pop(found.name, None)
                    bytes_ = sum(self.tier.footprint(found.bytes) for found in sound)
                    self.staged_bytes += bytes_
                    self.staging_bytes -= bytes_
                    self._state.counters[f"ahead.{self.name}.copied"] += len(sound)
                if not reading.errors:
                    return bytes_, None
                self._doom([name for name in names if name not in self.staged])
                return bytes_, reading.errors.pop()
        finally:
            self.delete(leftover)

    def list_staged(self, names: Sequence[FrameName]) -> list[FrameName]:
        """List those of the frames of one checkpoint that are staged; returns those that still have to come.

        Its own frame is listed when nothing else of it is missing, as always.
        """
        with self._state.lock:
            left = [name for name in names if name not in self.staged]
            if left:
                left = [name for name in names if name in left or name.group == CHECKPOINT]
            found = self._take_staged([name for name in names if name not in left])
            if found:
                self._state.counters[f"ahead.{self.name}.used"] += len(found)
            contradicting = self._list(found, "put")
            self._doom(contradicting)
            return left + contradicting

    def unstage(self, names: Iterable[FrameName]) -> None:
        """Delete staged copies."""
        with self._state.lock:
            bytes_ = self.staged_bytes
            found = self._take_staged(list(names))
            bytes_ -= self.staged_bytes
            self.staging_bytes += bytes_
            if found:
                self._state.counters[f"ahead.{self.name}.dropped"] += len(found)
        self.delete([each.name for each in found])
        with self._state.lock:
            self.staging_bytes -= bytes_

    def _take_staged(self, names: Sequence[FrameName]) -> list[_Found]:
        found = [self.staged.pop(name) for name in names if name in self.staged]
        self.staged_bytes -= sum(self.tier.footprint(each.bytes) for each in found)
        return found

    # Out

    def drop(self, chosen: Iterable[tuple[PrefixId, RemovalReason]], *, at_leisure: bool = False) -> None:
        """Drop checkpoints and what only they need; pinned ones, and those that are gone, are left alone.

        For a caller who does not need the room, `at_leisure`, a tier that can be slow is not asked: `tidy` does that.
        """
        names: list[FrameName] = []
        dropped: list[tuple[PrefixId, RemovalReason]] = []
        with self._state.lock:
            view, pinned = self.view, self._index.pinned(self._state.clock())
            for prefix, reason in chosen:
                if prefix in pinned or prefix not in view:
                    continue
                with self._counted(reason):
                    names += self._index.drop(prefix, self.name, reason)
                if prefix not in view:
                    dropped.append((prefix, reason))
                    self._state.counters[f"dropped.{self.name}.{reason}"] += 1
            if dropped:
                self.policy.commit([], dropped, self._state.policy_s(), view)
        if at_leisure and self.tier.durability is not Durability.HOST:
            self._doom(names)
        else:
            self.delete(names)

    def take(self, names: Sequence[FrameName]) -> bool:
        """Delete listed frames now; False if they are not all there any more. Of all who ask for them one gets them.

        Raises `TierError`: then it is not known whether they are gone, and who asks next finds out.
        """
        with self._alone(names):
            with self._state.lock:
                if not all(self._index.holds(name, self.name) for name in names):
                    return False
            try:
                self.tier.delete([key_of(name).path() for name in names])
            except TierError as error:
                self._state.count(f"errors.{self.name}.delete")
                self._keep_late(names, error)
                raise
            with self._state.lock:
                view, checkpoints = self.view, dict.fromkeys(map(_checkpoint_of, names))
                with self._counted(RemovalReason.DISCARDED):
                    for name in names:
                        self._index.remove(name, self.name, RemovalReason.DISCARDED)
                gone = [(checkpoint, RemovalReason.DISCARDED) for checkpoint in checkpoints if checkpoint not in view]
                if gone:
                    self.policy.commit([], gone, self._state.policy_s(), view)
            return True

    def release(self, claims: Iterable[Claim]) -> None:
        """End claims, and drop what came under them without its checkpoint."""
        with self._state.lock:
            names = [name for claim in claims for name in self._index.release(claim)]
            self._abandon(names)
        self.delete(names)

    def _abandon(self, names: Iterable[FrameName]) -> None:
        with self._counted(RemovalReason.ABANDONED):
            for name in names:
                self._index.remove(name, self.name, RemovalReason.ABANDONED)

    def delete(self, names: Sequence[FrameName]) -> None:
        """Delete from the tier what is not listed, later if it lends; what cannot be deleted now is tried again."""
        if self.lends:
            with self._state.lock:
                self._doom(name for name in names if not self._index.holds(name, self.name))
        elif names:
            self._delete(names)

    def _delete(self, names: Sequence[FrameName]) -> bool:
        """The same, now; False if it has to be tried again."""
        try:
            with self._alone(names):
                with self._state.lock:
                    held = self._index.holds
                    kept = self.staged.keys() | self._lent.keys() if self._lent else self.staged
                    gone = [n for n in names if n not in kept and not held(n, self.name)]
                try:
                    self.tier.delete([key_of(name).path() for name in gone])
                except TierError as error:
                    self._keep_late(gone, error)
                    raise
        except TierError as error:
            self._state.count(f"errors.{self.name}.delete")
            _log.warning("tier %s: %d frames are to be deleted later: %s", self.name, len(names), error.message)
            self._doom(names)
            return False
        with self._state.lock:
            for name in names:
                if name not in self._lent:
                    self._doomed.pop(name, None)
        return True

    def _doom(self, names: Iterable[FrameName]) -> None:
        with self._state.lock:
            self._doomed.update(dict.fromkeys(names))
            while len(self._doomed) > DOOMED_MAX:  # a restart finds the others
                del self._doomed[next(iter(self._doomed))]

    def tidy(self) -> None:
        """Delete what failed calls have left behind, and what was dropped at leisure, until one call fails."""
        while not self.held:
            with self._state.lock:
                free = (name for name in self._doomed if name not in self._late and name not in self._lent)
                doomed = list(itertools.islice(free, TIDY_MAX))
            if not doomed or not self._delete(doomed):
                return

    # Lending

    def lend(self, names: Sequence[FrameName]) -> None:
        """Let somebody else put these frames: nothing with such a name is deleted until `take_back`.

        Raises `TierError`, and lends none, if it is not known whether an earlier delete of one may still happen.
        """
        with self._state.lock:
            doomed = [name for name in names if name in self._doomed]
        if doomed:
            self._delete(doomed)
        with self._state.freed:
            self._await(names)
            self._refuse_late(names)
            if uncertain := next((name for name in names if name in self._doomed and name not in self._lent), None):
                path = key_of(uncertain).path()
                raise TierError("an earlier frame of this name is still to be deleted", path, self.name, retryable=True)
            self._lent.update(names)

    def take_back(self, names: Sequence[FrameName]) -> None:
        """Nobody puts these frames any more; what has come and is not listed is to be deleted."""
        with self._state.lock:
            self._lent.subtract(names)
            for name in names:
                if not self._lent[name]:
                    del self._lent[name]
        self.delete(names)

    def enlist(self, landed: Sequence[Landed]) -> None:
        """List frames that others have put and read. Raises `IdentityError` if names contradict others."""
        for created, how in ((True, "put"), (False, "found")):
            found = [_found(one) for one in landed if one.created is created]
            contradicting = self._list(found, how)
            if contradicting:
                raise IdentityError("another prefix has this name", key_of(contradicting[0]).path(), self.name)

    def note_sound(self, landed: Sequence[Landed]) -> None:
        """Others have read listed frames, and they are sound."""
        with self._state.lock:
            self._list([f for f in map(_found, landed) if self._index.holds(f.name, self.name)], "found")

    def check_there(self, names: Sequence[FrameName]) -> None:
        """Take out of the index what the tier says is not there. Raises `TierError` if it cannot say."""
        with self._alone(names):
            sizes = self.tier.stat([key_of(name).path() for name in names])
            absent = [name for name, size in zip(names, sizes, strict=True) if size is None]
            leftover = self._set_aside(_Reading([], absent, [], []))
        self.delete(leftover)

    def reconcile(self) -> None:
        """List the tier, and find out what came and went behind our back. Raises `TierError`.

        A frame that is not listed, and that nobody is putting just now, is listed if it supports something, and else
        deleted: late puts, and what others have left. A listed one that is not there leaves the index.
        """
        before = list(self._listed())
        sizes = dict(self._keys_of_listing(""))
        for start in range(0, len(before), TIDY_MAX):
            gone = [name for name in before[start : start + TIDY_MAX] if key_of(name) not in sizes]
            if gone:
                self.check_there(gone)
        found = [plain_name(key) for key in sizes if key.namespace in self._state.namespaces]
        for start in range(0, len(found), AT_ONCE):
            with self._state.lock:
                names = [name for name in found[start : start + AT_ONCE] if not self._is_accounted_for(name)]
            for first in range(0, len(names), TIDY_MAX):
                self._find(names[first : first + TIDY_MAX])
        with self._state.lock:
            leftover = self._index.unsupported(self.name)
            self._abandon(leftover)
        self.delete(leftover)
        self.held = False

    def _listed(self) -> Iterator[FrameName]:
        """All frames that are listed; the lock is held for some at a time."""
        names = self._index.names(self.name)
        while True:
            with self._state.lock:
                some = [name for name, _ in itertools.islice(names, AT_ONCE)]
            if not some:
                return
            yield from some

    def _is_accounted_for(self, name: FrameName) -> bool:
        doomed = name in self._doomed and not self.held
        return self._index.holds(name, self.name) or name in self._lent or doomed

    def _find(self, names: Sequence[FrameName]) -> None:
        """List frames that a listing has shown, if they are there now."""
        with self._alone(names):
            with self._state.lock:
                names = [name for name in names if not self._is_accounted_for(name)]
            sizes = self.tier.stat([key_of(name).path() for name in names])
            there = [(name, size) for name, size in zip(names, sizes, strict=True) if size is not None]
            contradicting = self._list((_Found(n, size, n.private, verified=False) for n, size in there), "found")
            self._state.count(f"recovered.{self.name}.foreign", len(contradicting))

    # What is there

    def get(self, keys: Iterable[FrameKey]) -> Sequence[GetAnswer]:
        """The tier's answers, errors counted; if it cannot be asked at all, that is the error of each.

        No more of an entry is read than one byte beyond the largest frame of its name: enough to see that it is none.
        """
        requests = [GetRequest(key.path(), bytes=self._bytes_max(key) + 1) for key in keys]
        try:
            answers = self.tier.get(requests)
        except TierError as error:
            answers = [_without_frames(error)] * len(requests)
        if failed := sum(isinstance(answer, TierError) for answer in answers):
            self._state.count(f"errors.{self.name}.get", failed)
        return answers

    def share(self, keys: Sequence[FrameKey]) -> Sequence[GetAnswer]:
        """Like `get`, but what another thread is reading is not read again: both have its answer."""
        return self._flights.get(keys, self.get)

    def _bytes_max(self, key: FrameKey) -> int:
        return self._state.namespace(key.namespace).frame_bytes(key.group, key.tokens)

    def judge(self, names: Sequence[FrameName], *, decoded: bool = False) -> None:
        """Read listed frames of one namespace: sound ones are verified then, others leave the index.

        Raises `TierError` if the tier could not say of one: that is no evidence of anything.
        """
        leftover: list[FrameName] = []
        try:
            with self._alone(names):
                reading = self._read(names, decoded=decoded)
                with self._state.lock:
                    self._list((f for f in reading.sound if self._index.holds(f.name, self.name)), "found")
                leftover += self._set_aside(reading)
        finally:
            self.delete(leftover)
        if reading.errors:
            raise reading.errors.pop()

    def judge_if_listed(self, key: FrameKey, *, decoded: bool = False) -> None:
        """The same of one frame that may be listed; if the tier cannot say, that is counted."""
        with self._state.lock:
            listed = self._index.holds(key, self.name)
        if listed:
            with suppress(TierError):  # whoever needs the frame next will find out
                self.judge([plain_name(key)], decoded=decoded)

    def _read(self, names: Sequence[FrameName], *, decoded: bool = False) -> _Reading:
        """Read and check frames of one namespace; what is bad is so when it is read a second time, too."""
        reading = self._read_once(names, decoded=decoded)
        if reading.bad:
            again = self._read_once([name for name, _ in reading.bad], decoded=decoded)
            reading = _Reading(
                reading.sound + again.sound, reading.absent + again.absent, again.bad, reading.errors + again.errors
            )
        return reading

    def _read_once(self, names: Sequence[FrameName], *, decoded: bool) -> _Reading:
        known, keys = self._namespace_of(names[0]), [key_of(name) for name in names]
        reading = _Reading([], [], [], [])
        for name, key, answer in zip(names, keys, self.get(keys), strict=True):
            if isinstance(answer, FrameNotFoundError):
                reading.absent.append(name)
                continue
            if isinstance(answer, TierError):
                reading.errors.append(answer)
                continue
            try:
                header = known.check(key, answer, decoded=decoded)
            except TierError as error:
                reading.errors.append(_without_frames(error))
            except BAD as error:
                reading.bad.append((name, _without_frames(error)))
            else:
                reading.sound.append(_Found(name, header.total_bytes, header.lineage, verified=True))
        return reading

    def _set_aside(self, reading: _Reading) -> list[FrameName]:
        """Take absent and bad frames out of the index, bad ones into quarantine; returns what nothing needs now."""
        leftover = [name for absent in reading.absent for name in self._forget(absent, RemovalReason.LOST)]
        for name, error in reading.bad:
            key = key_of(name)
            _log.warning("tier %s: %s is set aside: %s", self.name, key.short(), error.message)
            try:
                self.tier.quarantine(key.path(), error.message)
            except TierError as failure:
                self._state.count(f"errors.{self.name}.quarantine")
                self._keep_late([name], failure)
                self._doom([name])
            self._state.count(f"quarantined.{self.name}")
            leftover += self._forget(name, RemovalReason.QUARANTINED)
        return leftover

    def _namespace_of(self, name: FrameName) -> Namespace:
        return self._state.namespace(key_of(name).namespace)

    def find(self, chain: Chain, known: Namespace) -> bool:
        """List what others have put here of a chain, if that makes a longer prefix; whether it does."""
        names = {depth: list(_names_of_block(chain, depth, known)) for depth in range(1, chain.blocks + 1)}
        with self._state.lock:
            listed = {name for some in names.values() for name in some if self._index.holds(name, self.name)}
        unknown = [name for some in names.values() for name in some if name not in listed]
        rows = {group.name for group in known.geometry.block_groups if not group.window_tokens}
        first_rows = next((name for name in unknown if name.group in rows), None)
        try:
            if first_rows is not None and self.tier.stat([key_of(first_rows).path()]) == [None]:
                return False
            sizes = self.tier.stat([key_of(name).path() for name in unknown])
        except TierError:
            self._state.count(f"errors.{self.name}.stat")
            return False
        there = {name: size for name, size in zip(unknown, sizes, strict=True) if size is not None}
        best = 0
        for depth, some in names.items():
            if any(name not in listed and name not in there for name in some if name.group in rows):
                break
            others = _needed(names, depth, known, rows)
            if all(name in listed or name in there for name in others):
                best = depth
        found = [name for name in _needed(names, best, known) if name not in listed] if best else []
        self._list((_Found(name, there[name], 0, verified=False) for name in found), "found")
        return bool(found)

    # After a restart

    def is_described(self, known: Namespace) -> bool:
        """Whether the frames of a namespace that the tier holds will be known after a restart, if it outlives us."""
        return self.tier.durability is Durability.HOST or known.digest in self._described

    def describe(self, known: Namespace) -> None:
        """Put a namespace's descriptor; one that is there and bad is set aside.

        Raises `CapacityError` if there is no room even for that, and `TierError`.
        """
        path, body = descriptor_path(known.digest), known.descriptor()
        for _ in range(PUT_ATTEMPTS):
            with self.tier.reserve([len(body)]) as room:
                (outcome,) = self.tier.put([PutItem(path, [body])], room)
            try:
                if outcome is PutOutcome.EXISTS:
                    self._read_descriptor(path, known.digest)
            except FrameNotFoundError:
                continue
            except VersionError as error:  # a newer peer's
                raise TierError(error.message, path, self.name) from error
            except BAD as error:
                what = f"the descriptor of {known.digest.hex()[:16]}"
                _log.warning("tier %s: %s is set aside: %s", self.name, what, error.message)
                self._state.count(f"descriptors.{self.name}.quarantined")
                self.tier.quarantine(path, error.message)
                continue
            with self._state.lock:
                self._described.add(known.digest)
            return
        raise TierError("a bad descriptor is in its place again and again", path, self.name)

    def _read_descriptor(self, path: str, namespace: bytes) -> Namespace:
        """Raises `FrameNotFoundError`, `TierError`, or what is wrong, one of `BAD`."""
        (answer,) = self.tier.get([GetRequest(path, bytes=DESCRIPTOR_BYTES_MAX)])
        if not isinstance(answer, memoryview):
            raise answer
        return read_descriptor(bytes(answer), namespace)

    def mourn(self) -> None:
        """What an earlier process had here and took with it was found, so to speak, and is lost."""
        with self._state.lock:
            for entry in self.tier.lost():
                with suppress(IdentityError):
                    key = FrameKey.parse(entry.path)
                    self._index.mourn(plain_name(key))
                    self.mourned.add(key.namespace)
                    for how in ("found", "lost"):
                        self._book(how, 1, entry.bytes)

    def adopt(self, only: Namespace | None = None) -> int:
        """List what the tier holds and is not listed, of one namespace or of all, by names alone; how many frames.

        Names that are no frames', and frames of namespaces without a sound descriptor, are left alone and counted.
        Rows that no checkpoint needs, the rest of a spill that was cut off, are deleted, unless another process has the
        place open, too: it may be about to put their checkpoint. Who opens it alone finds what is left.
        """
        is_shared = self.tier.is_shared()
        keys = self._keys_of_listing(f"{only.digest.hex()}/" if only else "")
        self.tier.quarantined()  # so that all of it is counted
        counters = self._state.counters
        with self._state.lock:
            held = self._index.holds
            keys = [p for p in keys if plain_name(p[0]) not in self.staged and not held(p[0], self.name)]
            known = [pair for pair in keys if pair[0].namespace in self._state.namespaces]
            found = (_Found(plain_name(key), size, key.private, verified=False) for key, size in known)
            contradicting = self._list(found, "found")
            leftover = self._index.unsupported(self.name)
            self._abandon(leftover)
            self._strange |= {key.namespace for key, _ in keys}
            self._strange -= self._state.namespaces.keys()
            counters[f"recovered.{self.name}.unknown"] += len(keys) - len(known)
            counters[f"recovered.{self.name}.foreign"] += len(contradicting)
        if not is_shared:
            self.delete(leftover)
        return len(known) - len(contradicting) - len(leftover)

    def _keys_of_listing(self, prefix: str) -> list[tuple[FrameKey, int]]:
        """The frames that a listing shows, and their bytes; of descriptors, the namespaces become known."""
        keys: list[tuple[FrameKey, int]] = []
        for entry in self.tier.list(prefix):
            if (namespace := descriptor_namespace(entry.path)) is not None:
                if namespace not in self._described:
                    self._learn(entry.path, namespace)
                continue
            try:
                keys.append((FrameKey.parse(entry.path), entry.bytes))
            except IdentityError:
                self._state.count(f"recovered.{self.name}.foreign")
        return keys

    def _learn(self, path: str, namespace: bytes) -> None:
        """Make known the namespace that a stored descriptor describes."""
        try:
            self._state.add(self._read_descriptor(path, namespace))
        except (TierError, FrameNotFoundError):
            self._state.count(f"errors.{self.name}.get")
        except BAD:
            self._state.count(f"recovered.{self.name}.bad_descriptor")
        else:
            with self._state.lock:
                self._described.add(namespace)

    def is_strange(self, known: Namespace) -> bool:
        """Whether there are frames of a namespace that were found before it was known."""
        return known.digest in self._strange


def _without_frames(error: _E) -> _E:
    """The error without its traceback, which would keep the bytes alive that it is about, and their room."""
    return error.with_traceback(None)


def _names_of_block(chain: Chain, depth: int, known: Namespace) -> Iterator[FrameName]:
    """The frames that there can be of one block, and the checkpoint at its end."""
    geometry, tokens = known.geometry, depth * known.geometry.block_tokens
    groups = [group.name for group in geometry.block_groups] + [CHECKPOINT] * geometry.needs_checkpoint(tokens)
    for group in groups:
        for rank in range(geometry.shards):
            prefix, parent = chain.block_hash(depth), chain.block_hash(depth - 1)
            yield FrameName(known.digest, prefix, parent, group, tokens, rank)


def _needed(
    names: Mapping[int, Sequence[FrameName]], depth: int, known: Namespace, without: Collection[str] = ()
) -> Iterator[FrameName]:
    """Those that a restore to the end of a block needs, `without` some groups."""
    tokens = depth * known.geometry.block_tokens
    for group in known.geometry.block_groups:
        if group.name in without:
            continue
        for block in group.blocks_needed(tokens, known.geometry.block_tokens):
            yield from (name for name in names[block + 1] if name.group == group.name)
    yield from (name for name in names[depth] if name.group == CHECKPOINT)


def key_of(name: FrameName) -> FrameKey:
    """The same name as a key that has a path."""
    return FrameKey(*name)  # type: ignore[arg-type]


def _found(landed: Landed) -> _Found:
    return _Found(plain_name(landed.key), landed.bytes, landed.lineage, verified=True)


def _checkpoint_of(name: FrameName) -> PrefixId:
    """The checkpoint that a frame belongs to, or, where block ends own no frames, that it makes."""
    return private_checkpoint(name.namespace, name.private) if name.private else name.prefix
