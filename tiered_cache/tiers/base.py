"""What every tier is: `Tier`, a bounded place that keeps whole entries of bytes under names.

A tier knows nothing of frames. A name is an opaque path; an entry is written once, whole, and never changed. Small
documents that belong to many entries (a namespace's descriptor) are ordinary entries under a name of their own.

What one call promises on every tier:

- `put` is atomic and create-only, and a batch is one group commit. Whatever happens, an entry is there whole or not
  at all. An outcome is an acknowledgement at the tier's durability, for CREATED and for EXISTS alike.
- An absence is an answer, never an error, and an error is never evidence of absence.
- Nothing moves without room: `reserve` comes first, and all that a tier holds is charged to its budget, with
  temporary, quarantined and reserved bytes.
- Every call may come from any thread, and no lock is held while bodies are copied, written or read.
"""

from __future__ import annotations

import enum
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tiered_cache.errors import CapacityError, DeadlineError, FrameNotFoundError, TierError

ALIGNMENT = 64
"""Every buffer that a tier hands out begins at a multiple of this."""
SEGMENT_CHARACTERS_MAX = 200
SEGMENTS_MAX = 8

_PATH = re.compile(
    rf"(?:[a-z0-9][a-z0-9-]{{0,{SEGMENT_CHARACTERS_MAX - 1}}}/){{0,{SEGMENTS_MAX - 1}}}"
    rf"[a-z0-9][a-z0-9.-]{{0,{SEGMENT_CHARACTERS_MAX - 1}}}"
)

BytesLike = bytes | bytearray | memoryview


class Durability(enum.IntEnum):
    """What an entry outlives: HOST its worker, DISK every process of the node, OBJECT the node."""

    HOST = 1
    DISK = 2
    OBJECT = 3


class PutOutcome(enum.Enum):
    """What became of one item of a put that succeeded."""

    CREATED = "created"
    EXISTS = "exists"  # an entry of this name was there; it is untouched, and as durable as a created one


@dataclass(frozen=True, slots=True)
class PutItem:
    """One entry to write: the concatenation of `buffers`, each C-contiguous, which must not change meanwhile."""

    path: str
    buffers: Sequence[BytesLike]

    def views(self) -> list[memoryview]:
        """The buffers as flat byte views, empty ones left out."""
        return [view.cast("B") for buffer in self.buffers if (view := memoryview(buffer)).nbytes]

    @property
    def bytes(self) -> int:
        return sum(memoryview(buffer).nbytes for buffer in self.buffers)


@dataclass(frozen=True, slots=True)
class GetRequest:
    """A range of one entry: `bytes` from `offset`, None for all up to the end; into `into` if given.

    The answer is as long as asked, except that it ends with the entry and with `into`: past the end it is empty.
    """

    path: str
    offset: int = 0
    bytes: int | None = None
    into: memoryview | None = None
    """Writable and C-contiguous; the answer is its beginning."""

    def span(self, size: int) -> tuple[int, int]:
        """Where the answer begins in an entry of `size` bytes, and how long it is."""
        assert self.offset >= 0
        start = min(self.offset, size)
        wanted = size - start
        if self.bytes is not None:
            wanted = min(wanted, self.bytes)
        if self.into is not None:
            wanted = min(wanted, self.into.nbytes)
        return start, wanted


GetAnswer = memoryview | FrameNotFoundError | TierError
"""Bytes, a verified absence, or an error that says nothing about absence."""


class LateError(DeadlineError):
    """The wait for a call is over, and the call still runs: what it does under its names is not done yet."""

    def __init__(self, message: str, tier: str, ended: Future[Any], *, retryable: bool, by_caller: bool) -> None:
        super().__init__(message, None, tier, retryable)
        self.ended = ended
        """Done when the call has ended, with what it gave; of one answer of a `get`, with that answer."""
        self.by_caller = by_caller
        """Whether the caller had no more time; else the call has taken longer than any may."""

    def __reduce__(self) -> tuple[type[DeadlineError], tuple[Any, ...]]:
        return DeadlineError, self.args  # in another process there is nothing to wait for


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A name and the size of what it names."""

    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class QuarantinedEntry:
    """A bad entry that is kept for inspection: the name that it had, and the slug of the reason."""

    path: str
    reason: str
    bytes: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The state of one budget. An entry is charged `Tier.footprint(its bytes)`."""

    bytes_used: int
    """Charged to entries, and to deleted ones whose bytes a reader still holds."""
    bytes_reserved: int
    """Promised to reservations, with what they have begun to write."""
    bytes_quarantined: int
    entries: int
    bytes_max: int

    @property
    def bytes_free(self) -> int:
        """What `reserve` can still grant; negative while a lowered limit is exceeded."""
        return self.bytes_max - self.bytes_used - self.bytes_reserved - self.bytes_quarantined


class Reservation:
    """Room in a tier's budget for bytes that are about to come. Release it when the puts are done, or use `with`."""

    def __init__(self, bytes_: int, give_back: Callable[[int], None]) -> None:
        self._bytes = bytes_
        self._give_back = give_back
        self._released = False
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """What is left; a put moves the footprint of each entry that it creates from here to the entry."""
        return self._bytes

    def take(self, bytes_: int) -> None:
        """For tiers: move `bytes_` out. Raises `CapacityError`, and moves nothing, if less is left."""
        with self._lock:
            if self._released:
                raise CapacityError(f"{bytes_} bytes are needed and the reservation was released")
            if bytes_ > self._bytes:
                raise CapacityError(f"{bytes_} bytes are needed and {self._bytes} are reserved")
            self._bytes -= bytes_

    def put_back(self, bytes_: int) -> None:
        """For tiers: undo a `take` of bytes that no entry was charged for in the end."""
        with self._lock:
            if not self._released:
                self._bytes += bytes_
                return
        self._give_back(bytes_)

    def release(self) -> None:
        """Give back what is left; a second call does nothing."""
        with self._lock:
            left, self._bytes = self._bytes, 0
            self._released = True
        if left:
            self._give_back(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def reason_slug(reason: str) -> str:
    """A reason as tiers keep it with a quarantined entry: lower-case words joined by `-`, at most 24 characters."""
    return re.sub(r"[^a-z0-9]+", "-", reason.lower()).strip("-")[:24].strip("-") or "unknown"


def is_path(path: str) -> bool:
    """Whether `path` can name an entry: up to 8 segments of a-z, 0-9 and `-`, in the last one also `.`."""
    return _PATH.fullmatch(path) is not None


class Tier(ABC):
    """A bounded place that keeps whole entries under names. See the module for what every tier promises.

    Any method raises `TierError` when the place fails and after `close`; so does `put` for a path that is none.
    """

    name: str
    durability: Durability

    @property
    @abstractmethod
    def bytes_max(self) -> int: ...

    @abstractmethod
    def footprint(self, bytes_: int) -> int:
        """What an entry of so many bytes is charged: what it really takes, padding and name included."""

    @abstractmethod
    def reserve(self, sizes: Sequence[int]) -> Reservation:
        """Room for entries of these sizes, in bytes. Raises `CapacityError` at once if there is not enough.

        Whether it is granted depends only on the sum of the footprints and on `usage().bytes_free`, apart from
        places that can be full for other reasons. Readers of deleted entries hold their room until they are done.
        """

    @abstractmethod
    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        """Write all, make all durable, then publish: one answer an item, in order.

        Of two items with one path the first is written. Raises `CapacityError` if the reservation does not cover
        all of them, or the place turns out to be full, and `TierError` if it fails. After a raise every entry is
        there whole or not at all, and nothing is acknowledged: what was created stays, since another put may have
        acknowledged it by now. The reservation is still the caller's to release.
        """

    @abstractmethod
    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        """One answer a request, in order; a failure of one does not touch the others.

        An answer without `into` is read-only, begins at a multiple of 64 if the offset does, and stays valid
        whatever happens to the entry; drop it soon, since it may hold room.
        """

    @abstractmethod
    def stat(self, paths: Sequence[str]) -> Sequence[int | None]:
        """The size of each entry in bytes, None for those that are verified not to be there."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[TierEntry]:
        """The entries whose path begins with `prefix`, in any order.

        What is there throughout is listed once; what comes or goes meanwhile may be missed.
        """

    @abstractmethod
    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        """Whether each was there; it is not any more. Readers that have begun are not disturbed."""

    @abstractmethod
    def quarantine(self, path: str, reason: str) -> bool:
        """Set a bad entry aside, so that its name is free; False if it was not there.

        It stays charged, and is kept with `reason_slug(reason)`. A bounded number of entries and bytes is kept; the
        oldest go first.
        """

    @abstractmethod
    def quarantined(self) -> Sequence[QuarantinedEntry]:
        """What is set aside, oldest first."""

    @abstractmethod
    def usage(self) -> TierUsage: ...

    def lost(self) -> Sequence[TierEntry]:
        """What was here when an earlier process died, and died with it, as far as that is known; footprints."""
        return ()

    def is_shared(self) -> bool:
        """Whether another process that is alive has the place open: what it is putting may be half there."""
        return False

    @abstractmethod
    def set_limit(self, bytes_max: int) -> int:
        """Change the budget; how many bytes are too many now. Nothing is dropped: `reserve` refuses until it fits."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the place; entries stay where the tier is durable. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
