"""`StoreClaim`: one catalogue's claim of an object store, by which two that are alive never harm each other.

    catalogue/<generation, 20 digits>-<8 hex>     who claims it, as JSON; beside the frames, and never one of them

The newest claim, the one whose name is last, owns the store. Nothing is asked of the store but to create, to list and
to delete: a claim is made under a name behind all that are there, and whoever owns the store lists the claims now and
then. A claim before his is of one who died or who has still to find out; one behind his means that he was taken over.
He then stands down for good: deletes nothing, acknowledges nothing.

    t      the catalogue asks for the claims, and none is behind its own: this *look* is good until t + L
    < t+L  it may begin a delete, whose request is over L later; it may acknowledge what was in the store before
    t+3L   what it has begun has happened or never will: the last L is the store's, and of clocks that differ

So a new claim, which every look that begins after it shows, waits 3L: until then it deletes and acknowledges nothing.
What it lists after that misses nothing that was acknowledged by others, and nothing of it is being deleted by others.
It need not wait if every claim before it was *retired*: its owner had no delete under way, and removed its claim.

Assumed of the store: a list shows what was put, and not what was deleted, before it was asked for (so do S3, Google's,
Azure's and a local directory; a network file system must not cache directories); a request is applied no later than L
after its client has given it up. Of the processes: none stands still for L between a look at its clock and the request
that it sends then; for their clocks see `awake_or_not_s`. A look that fails permits nothing.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, Self

from tiered_cache.deadline import Clock, wait_s
from tiered_cache.errors import DeadlineError, TakenOverError, TierError

LOOKS = 3
"""How many times as long as a look is good a new claim waits for one before it."""
GENERATION_MAX = 10**20 - 1
WAITS_S_MAX = 3600.0
_NAME = re.compile(r"(?P<generation>[0-9]{20})-(?P<maker>[0-9a-f]{8})")
_log = logging.getLogger(__name__)


def awake_or_not_s() -> float:
    """Seconds, those for which the machine was suspended, too: other machines went on meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Notes(Protocol):
    """Small objects beside the entries of a store. Each call raises `TierError` if the store does not do it in time."""

    name: str

    def notes(self) -> Sequence[str]:
        """The names of all."""

    def write_note(self, name: str, body: bytes) -> None:
        """Create one; one that is there stays as it is."""

    def read_note(self, name: str) -> bytes | None: ...

    def drop_notes(self, names: Sequence[str]) -> None: ...


class ClaimName(NamedTuple):
    """Where a claim lies, in the order of claims."""

    generation: int
    maker: str

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """None for what is no claim's name."""
        match = _NAME.fullmatch(name)
        return cls(int(match["generation"]), match["maker"]) if match else None

    def __str__(self) -> str:
        return f"{self.generation:020d}-{self.maker}"


class StoreClaim:
    """The claim of one catalogue. Any thread; what asks the store says so."""

    def __init__(
        self,
        notes: Notes,
        who: Mapping[str, str | int],
        *,
        look_s: float,
        now_ns: Callable[[], int] = time.time_ns,
        clock: Clock = awake_or_not_s,
    ) -> None:
        """`who`: what a person would like to know of us. `look_s`: how long a look is good, and a delete may take."""
        self.look_s = look_s
        self.name: ClaimName | None = None
        """None before it is made; later ones are greater."""
        self.settled_s = math.inf
        """From then on nobody else's earlier permission holds."""
        self._notes = notes
        self._who = dict(who)
        self._now_ns = now_ns
        self._clock = clock
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._next: ClaimName | None = None  # what is being made
        self._good_until_s = -math.inf
        self._earlier: tuple[ClaimName, ...] = ()
        self._over: TakenOverError | None = None
        self._lost = self._retired = False
        self._under_way = 0
        self._uncertain: dict[str, float] = {}  # paths whose delete has failed, and until when it may still happen
        self.counters: dict[str, int] = {}

    def make(self) -> None:
        """Claim the store, before it is looked at. Raises `TierError`: it was not claimed, or that is not known."""
        with self._one_at_a_time():
            self.check()
            there = self._list()
            if self._next is None or self._next < max(there, default=self._next):
                newest = there[-1].generation if there else -1
                self._next = ClaimName(min(max(self._now_ns(), newest + 1), GENERATION_MAX), uuid.uuid4().hex[:8])
            body = {**self._who, "waits_s": LOOKS * self.look_s}
            self._notes.write_note(str(self._next), json.dumps(body).encode())
            made_s = self._clock()
            there = self._list()
            earlier = [self._told(name) for name in there if name < self._next]
            with self._lock:
                self.name, self._next, self._lost = self._next, None, False
                waits_s = [_wait_s(told, LOOKS * self.look_s) for told in earlier]
                self.settled_s = max([made_s, *(made_s + each for each in waits_s), *self._uncertain.values()])
            if earlier:
                _log.warning(
                    "%s: the claim of %s was not retired: nothing is acknowledged for %.3g s",
                    *(self._notes.name, _line(earlier[-1]), self.settled_s - made_s),
                )
            self._judge(there, made_s)

    def check(self) -> None:
        """Raises `TakenOverError` if we were taken over, and found that out. The store is not asked."""
        if self._over is not None:
            raise self._over.with_traceback(None)

    @property
    def is_lost(self) -> bool:
        """Whether it has gone, and nobody else's is there: somebody has cleared up the store, say. Make it anew."""
        return self._lost

    def left_s(self) -> float:
        """For how long nothing may be deleted or acknowledged, since others may; infinite before it is made."""
        return max(0.0, self.settled_s - self._clock())

    def look(self) -> None:
        """Make sure that nobody has taken over by now; what a look has shown is good for `look_s`. Asks the store.

        What was in the store when this was called may be acknowledged then, and deletes may begin. Raises
        `TakenOverError`, and `TierError` if the claims cannot be listed, or there is an earlier one to wait for.
        """
        self._check_made()
        if left_s := self.left_s():
            what = f"an earlier catalogue may not have stopped: {left_s:.3g} s are left" if self.name else "not claimed"
            raise TierError(what, None, self._notes.name, retryable=True)
        with self._one_at_a_time():
            self._check_made()
            began_s = self._clock()
            if began_s >= self._good_until_s:
                self._judge(self._list(), began_s)
            self._check_made()

    @contextmanager
    def deleting(self, path: str) -> Iterator[None]:
        """Around the delete of one entry, which is begun at once and takes no longer than `look_s`. Asks nobody.

        Raises `TierError`, before anything is deleted, if the last look is too old. A delete that raises may still
        happen later.
        """
        with self._lock:
            if self._retired or not self.settled_s <= self._clock() < self._good_until_s:
                raise TierError("too long since the last look at the claims", None, self._notes.name, retryable=True)
            self._under_way += 1
        try:
            yield
        except BaseException:
            with self._lock:
                self._uncertain[path] = self._clock() + self.look_s
            raise
        finally:
            with self._lock:
                self._under_way -= 1

    def may_go(self, paths: Iterable[str]) -> str | None:
        """One of these entries that an earlier delete, whose end nobody knows, may still hit; None if there is none."""
        with self._lock:
            now_s = self._clock()
            self._uncertain = {path: until_s for path, until_s in self._uncertain.items() if until_s > now_s}
            return next((path for path in paths if path in self._uncertain), None)

    def collect(self) -> None:
        """Remove the earlier claims, once nobody's permission holds. Asks the store; raises `TierError`."""
        earlier = self._earlier
        if earlier and not self.left_s():
            self.look()
            self._notes.drop_notes([str(name) for name in earlier])
            self._earlier = tuple(name for name in self._earlier if name not in earlier)

    def retire(self) -> None:
        """Nothing is deleted or acknowledged from now on; if no delete is under way, the next claim need not wait."""
        with self._lock:
            clean = not self._retired and self._over is None and not self._under_way
            clean = clean and self._clock() >= max(self._uncertain.values(), default=-math.inf)
            self._retired = True
            self._good_until_s = -math.inf
        made = self.name or self._next
        if made is None or not clean:
            return
        try:
            self._notes.drop_notes([str(made)])
        except TierError as error:
            _log.warning("%s: our claim stays, and the next one waits for it: %s", self._notes.name, error.message)

    def _check_made(self) -> None:
        self.check()
        if self._lost or self._retired:
            raise TierError("our claim of the store has gone", None, self._notes.name, retryable=True)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        if not self._looking.acquire(timeout=wait_s(LOOKS * self.look_s)):
            raise DeadlineError("another look at the claims has not ended", None, self._notes.name)
        try:
            yield
        finally:
            self._looking.release()

    def _list(self) -> list[ClaimName]:
        return sorted(name for name in map(ClaimName.parse, self._notes.notes()) if name is not None)

    def _judge(self, there: Sequence[ClaimName], began_s: float) -> None:
        """What a list of claims means that was asked for at this time."""
        assert self.name is not None
        over = bool(there) and there[-1] > self.name
        with self._lock:
            self._lost = not over and self.name not in there
            self._good_until_s = began_s + self.look_s
            if over or self._lost or self._retired:
                self._good_until_s = -math.inf
        if over:
            who = str(there[-1])
            with suppress(TierError):
                who = _line(self._told(there[-1]))
            self._over = TakenOverError(f"the store was taken over by {who}", str(there[-1]), self._notes.name)
            self._count("taken_over")
            _log.error("%s: another catalogue has claimed it, and this one stands down: %s", self._notes.name, who)
        elif self._lost:
            self._count("lost")
            _log.error("%s: our claim has gone, and nobody else's is there", self._notes.name)
        else:
            self._earlier = tuple(name for name in there if name < self.name)

    def _told(self, name: ClaimName) -> Mapping[str, object]:
        """What a claim says; nothing if it has gone or is no JSON object. Raises `TierError`."""
        try:
            told = json.loads(self._notes.read_note(str(name)) or b"")
        except (ValueError, RecursionError):
            return {}
        return told if isinstance(told, dict) else {}

    def _count(self, what: str) -> None:
        self.counters[f"claims.{what}"] = self.counters.get(f"claims.{what}", 0) + 1


def _wait_s(told: Mapping[str, object], default_s: float) -> float:
    """How long to wait for a claim, at least `default_s`: it may be of other settings, or say nonsense."""
    said = told.get("waits_s")
    return max(float(said), default_s) if isinstance(said, int | float) and 0 < said <= WAITS_S_MAX else default_s


def _line(told: Mapping[str, object]) -> str:
    """Who it is, for people: where others can write, anything may stand there."""
    return ", ".join(f"{key} {told[key]!r:.60}" for key in ("cluster", "host", "pid") if key in told) or "somebody"
