"""The room that one process has in a store that many share: `ObjectBudget`.

`LocalBudget` decides alone. `GrantedBudget` is of a process that writes only what another one has granted it, and keeps
no books of its own.

A budget charges names, not calls, so that an object is counted once whatever was retried, and a name that turns out
not to be there costs nothing any more. It knows what this process put and what the last complete listing showed.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping

from tiered_cache.errors import CapacityError
from tiered_cache.tiers.base import TierUsage


class ObjectBudget(ABC):
    """Who grants the bytes of a store. Any thread; no call waits for the store. All bytes are footprints."""

    @property
    @abstractmethod
    def bytes_max(self) -> int: ...

    @abstractmethod
    def reserve(self, bytes_: int) -> None:
        """Raises `CapacityError` if there is not so much."""

    @abstractmethod
    def unreserve(self, bytes_: int) -> None: ...

    @abstractmethod
    def charge(self, name: str, bytes_: int, *, reserved: bool) -> None:
        """An object is there; `reserved` says that its room was. One that is charged already stays as it is."""

    @abstractmethod
    def is_charged(self, name: str) -> bool: ...

    @abstractmethod
    def moment(self) -> int:
        """Now, in the order of charges."""

    @abstractmethod
    def uncharge(self, name: str, *, before: int | None = None) -> None:
        """An object is not there; unless it was charged at or after the moment `before`."""

    @abstractmethod
    def set_aside(self, aside: str, bytes_: int) -> None:
        """An object is in the quarantine, under this name."""

    @abstractmethod
    def drop_aside(self, aside: str) -> None:
        """A quarantined object is not there any more."""

    @abstractmethod
    def begin_count(self) -> int:
        """A listing begins: remember what goes from now on. Returns the moment."""

    @abstractmethod
    def end_count(self, found: Mapping[str, int] | None, since: int) -> None:
        """The listing that began at `since` ended: this is what is there. None if it was broken off."""

    @abstractmethod
    def expect(self, names: Iterable[str]) -> None:
        """What a listing shows under these names has its room in a reservation: see `ObjectStoreTier.expect`."""

    @abstractmethod
    def expect_no_more(self, names: Iterable[str]) -> None: ...

    @abstractmethod
    def count_aside(self, found: Mapping[str, int]) -> None:
        """What the quarantine holds."""

    @property
    @abstractmethod
    def is_counted(self) -> bool:
        """Whether a complete listing of entries, and one of the quarantine, came in."""

    @abstractmethod
    def usage(self) -> TierUsage: ...

    @abstractmethod
    def set_limit(self, bytes_max: int) -> int:
        """As `Tier.set_limit`."""


class LocalBudget(ObjectBudget):
    """`bytes_max` for all that the store holds, as far as this process knows of it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._charges: dict[str, tuple[int, int]] = {}  # name -> bytes, moment
        self._aside: dict[str, int] = {}
        self._bytes_used = 0
        self._bytes_reserved = 0
        self._moment = 0
        self._counts = 0
        self._gone: dict[str, int] = {}  # name -> the last moment it was uncharged, while somebody counts
        self._expected: Counter[str] = Counter()
        self._entries_counted = self._aside_counted = False

    @property
    def bytes_max(self) -> int:
        return self._bytes_max

    def reserve(self, bytes_: int) -> None:
        with self._lock:
            free = self._usage().bytes_free
            if bytes_ > free:
                raise CapacityError(f"{bytes_} bytes are needed and {free} are free")
            self._bytes_reserved += bytes_

    def unreserve(self, bytes_: int) -> None:
        with self._lock:
            self._bytes_reserved -= bytes_

    def charge(self, name: str, bytes_: int, *, reserved: bool) -> None:
        with self._lock:
            if reserved:
                self._bytes_reserved -= bytes_
            self._charge(name, bytes_)

    def is_charged(self, name: str) -> bool:
        with self._lock:
            return name in self._charges

    def moment(self) -> int:
        with self._lock:
            return self._next_moment()

    def uncharge(self, name: str, *, before: int | None = None) -> None:
        with self._lock:
            bytes_, charged_at = self._charges.get(name, (0, 0))
            if before is not None and charged_at >= before:
                return
            self._charges.pop(name, None)
            self._bytes_used -= bytes_
            if self._counts:
                self._gone[name] = self._next_moment()

    def set_aside(self, aside: str, bytes_: int) -> None:
        with self._lock:
            self._aside[aside] = bytes_

    def drop_aside(self, aside: str) -> None:
        with self._lock:
            self._aside.pop(aside, None)

    def begin_count(self) -> int:
        with self._lock:
            self._counts += 1
            return self._next_moment()

    def end_count(self, found: Mapping[str, int] | None, since: int) -> None:
        with self._lock:
            if found is not None:
                for name in [n for n, (_, at) in self._charges.items() if at < since and n not in found]:
                    self._bytes_used -= self._charges.pop(name)[0]
                for name, bytes_ in found.items():
                    if self._gone.get(name, 0) < since and name not in self._expected:
                        self._charge(name, bytes_)
                self._entries_counted = True
            self._counts -= 1
            if not self._counts:
                self._gone.clear()

    def expect(self, names: Iterable[str]) -> None:
        with self._lock:
            self._expected.update(names)

    def expect_no_more(self, names: Iterable[str]) -> None:
        with self._lock:
            self._expected -= Counter(names)

    def count_aside(self, found: Mapping[str, int]) -> None:
        with self._lock:
            self._aside = dict(found)
            self._aside_counted = True

    @property
    def is_counted(self) -> bool:
        return self._entries_counted and self._aside_counted

    def usage(self) -> TierUsage:
        with self._lock:
            return self._usage()

    def set_limit(self, bytes_max: int) -> int:
        with self._lock:
            self._bytes_max = bytes_max
            return max(0, -self._usage().bytes_free)

    def _next_moment(self) -> int:
        self._moment += 1
        return self._moment

    def _charge(self, name: str, bytes_: int) -> None:
        if name not in self._charges:
            self._charges[name] = bytes_, self._next_moment()
            self._bytes_used += bytes_

    def _usage(self) -> TierUsage:
        aside = sum(self._aside.values())
        return TierUsage(self._bytes_used, self._bytes_reserved, aside, len(self._charges), self._bytes_max)


class GrantedBudget(ObjectBudget):
    """All that is asked for has been granted elsewhere, and is charged there."""

    @property
    def bytes_max(self) -> int:
        return 0

    def reserve(self, bytes_: int) -> None:
        pass

    def unreserve(self, bytes_: int) -> None:
        pass

    def charge(self, name: str, bytes_: int, *, reserved: bool) -> None:
        pass

    def is_charged(self, name: str) -> bool:
        del name
        return False

    def moment(self) -> int:
        return 0

    def uncharge(self, name: str, *, before: int | None = None) -> None:
        pass

    def set_aside(self, aside: str, bytes_: int) -> None:
        pass

    def drop_aside(self, aside: str) -> None:
        pass

    def begin_count(self) -> int:
        return 0

    def end_count(self, found: Mapping[str, int] | None, since: int) -> None:
        pass

    def expect(self, names: Iterable[str]) -> None:
        pass

    def expect_no_more(self, names: Iterable[str]) -> None:
        pass

    def count_aside(self, found: Mapping[str, int]) -> None:
        pass

    @property
    def is_counted(self) -> bool:
        return True

    def usage(self) -> TierUsage:
        return TierUsage(0, 0, 0, 0, 0)

    def set_limit(self, bytes_max: int) -> int:
        del bytes_max
        return 0
