"""`HostTier`: entries in this process's memory, copied once on the way in and, if the reader wants, not at all out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tiered_cache.errors import CapacityError, FrameNotFoundError, TierError
from tiered_cache.tiers.arena import Arena, Array, Run, aligned_empty, granules
from tiered_cache.tiers.base import (
    Durability,
    GetAnswer,
    GetRequest,
    PutItem,
    PutOutcome,
    QuarantinedEntry,
    Reservation,
    Tier,
    TierEntry,
    TierUsage,
    is_path,
    reason_slug,
)

ENTRY_BYTES = 1024
"""Charged for an entry's name and bookkeeping; measured at 0.7 KiB with the names of frames."""


@dataclass(slots=True, eq=False)
class _Entry:
    bytes: int
    runs: tuple[Run, ...]
    readers: int = 0
    gone: bool = False  # deleted; its runs are freed when the last reader is done

    @property
    def footprint(self) -> int:
        return granules(self.bytes) + ENTRY_BYTES


class HostTier(Tier):
    """Entries in memory that is used again and again; at most `bytes_max`, idle memory included.

    `quarantine_entries` and `quarantine_bytes` bound what is kept of bad entries (a sixteenth of the budget if None).
    """

    durability = Durability.HOST

    def __init__(
        self,
        bytes_max: int,
        *,
        name: str = "host",
        quarantine_entries: int = 64,
        quarantine_bytes: int | None = None,
    ) -> None:
        self.name = name
        self._bytes_max = bytes_max
        self._quarantine_entries = quarantine_entries
        self._quarantine_bytes = bytes_max // 16 if quarantine_bytes is None else quarantine_bytes
        self._arena = Arena(bytes_max)
        self._lock = threading.Lock()  # guards all below; never held while bodies are copied
        self._entries: dict[str, _Entry] = {}
        self._quarantined: deque[tuple[QuarantinedEntry, _Entry]] = deque()
        self._returned: deque[_Entry] = deque()  # read to the end, by finalizers, which must not take a lock
        self._bytes_used = 0
        self._bytes_reserved = 0
        self._bytes_quarantined = 0
        self._closed = False

    @property
    def bytes_max(self) -> int:
        return self._bytes_max

    def footprint(self, bytes_: int) -> int:
        return granules(bytes_) + ENTRY_BYTES

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        need = sum(map(self.footprint, sizes))
        with self._lock:
            self._check_open()
            self._collect_returned()
            free = self._usage().bytes_free
            if need > free:
                raise CapacityError(f"{need} bytes are needed and {free} are free", None, self.name)
            self._bytes_reserved += need
        return Reservation(need, self._unreserve)

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        with self._lock:
            self._check_open()
            new: dict[str, PutItem] = {}
            for item in items:
                if not is_path(item.path):
                    raise TierError("not a path", item.path, self.name)
                if item.path not in self._entries:
                    new.setdefault(item.path, item)
        unused = sum(self.footprint(item.bytes) for item in new.values())
        reservation.take(unused)
        entries: dict[str, _Entry] = {}
        outcomes: list[PutOutcome] = []
        try:
            for path, item in new.items():
                entries[path] = self._write(item)
            with self._lock:
                self._check_open()
                for item in items:
                    if item.path in self._entries or item.path not in entries:
                        outcomes.append(PutOutcome.EXISTS)
                        continue
                    entry = self._entries[item.path] = entries.pop(item.path)
                    self._bytes_used += entry.footprint
                    self._bytes_reserved -= entry.footprint
                    unused -= entry.footprint
                    outcomes.append(PutOutcome.CREATED)
        finally:
            for entry in entries.values():  # another put was faster, or this one failed
                self._arena.free(entry.runs)
            reservation.put_back(unused)
        return outcomes

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        with self._lock:
            self._check_open()
            found = [self._entries.get(request.path) for request in requests]
            for entry in found:
                if entry is not None:
                    entry.readers += 1
        return [
            FrameNotFoundError("not there", request.path, self.name) if entry is None else self._read(request, entry)
            for request, entry in zip(requests, found, strict=True)
        ]

    def stat(self, paths: Sequence[str]) -> Sequence[int | None]:
        with self._lock:
            self._check_open()
            return [entry.bytes if (entry := self._entries.get(path)) else None for path in paths]

    def list(self, prefix: str = "") -> Iterator[TierEntry]:
        with self._lock:
            self._check_open()
            entries = [(path, entry.bytes) for path, entry in self._entries.items() if path.startswith(prefix)]
        return (TierEntry(path, bytes_) for path, bytes_ in entries)

    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        with self._lock:
            self._check_open()
            entries = [self._entries.pop(path, None) for path in paths]
            for entry in entries:
                if entry is not None:
                    entry.gone = True
                    self._free_if_unread(entry)
            return [entry is not None for entry in entries]

    def quarantine(self, path: str, reason: str) -> bool:
        with self._lock:
            self._check_open()
            entry = self._entries.pop(path, None)
            if entry is None:
                return False
            self._quarantined.append((QuarantinedEntry(path, reason_slug(reason), entry.bytes), entry))
            self._bytes_used -= entry.footprint
            self._bytes_quarantined += entry.footprint
            while len(self._quarantined) > self._quarantine_entries or self._bytes_quarantined > self._quarantine_bytes:
                oldest = self._quarantined.popleft()[1]
                self._bytes_quarantined -= oldest.footprint
                self._bytes_used += oldest.footprint
                oldest.gone = True
                self._free_if_unread(oldest)
            return True

    def quarantined(self) -> Sequence[QuarantinedEntry]:
        with self._lock:
            self._check_open()
            return [entry for entry, _ in self._quarantined]

    def usage(self) -> TierUsage:
        with self._lock:
            self._check_open()
            self._collect_returned()
            return self._usage()

    def set_limit(self, bytes_max: int) -> int:
        with self._lock:
            self._check_open()
            self._collect_returned()
            self._bytes_max = bytes_max
            over = max(0, -self._usage().bytes_free)
        self._arena.set_limit(bytes_max)
        return over

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for entry in (*self._entries.values(), *(entry for _, entry in self._quarantined)):
                entry.gone = True
                self._free_if_unread(entry)
            self._entries.clear()
            self._quarantined.clear()
        self._arena.set_limit(0)

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("closed", None, self.name)

    def _usage(self) -> TierUsage:
        return TierUsage(
            self._bytes_used, self._bytes_reserved, self._bytes_quarantined, len(self._entries), self._bytes_max
        )

    def _unreserve(self, bytes_: int) -> None:
        with self._lock:
            self._bytes_reserved -= bytes_

    def _write(self, item: PutItem) -> _Entry:
        views = item.views()
        bytes_ = sum(view.nbytes for view in views)
        runs = self._arena.allocate(bytes_, spare=len(self._entries) * ENTRY_BYTES)
        if runs is None:
            with self._lock:
                self._check_open()
            raise CapacityError(f"the system does not give {bytes_} bytes that are in the budget", item.path, self.name)
        _copy([np.frombuffer(view, dtype=np.uint8) for view in views], self._arena.arrays(runs))
        return _Entry(bytes_, runs)

    def _read(self, request: GetRequest, entry: _Entry) -> memoryview:
        """Answer from an entry that has this reader counted; the count goes when the answer does not need it."""
        start, wanted = request.span(entry.bytes)
        if request.into is None and len(entry.runs) == 1:
            return self._arena.lend(entry.runs[0], start, wanted, lambda: self._returned.append(entry))
        try:
            answer = (aligned_empty(wanted).data if request.into is None else request.into.cast("B"))[:wanted]
            _copy(_part(self._arena.arrays(entry.runs), start), [np.frombuffer(answer, dtype=np.uint8)])
            return answer.toreadonly() if request.into is None else answer
        finally:
            with self._lock:
                self._done_reading(entry)

    def _collect_returned(self) -> None:
        while self._returned:
            self._done_reading(self._returned.popleft())

    def _done_reading(self, entry: _Entry) -> None:
        entry.readers -= 1
        self._free_if_unread(entry)

    def _free_if_unread(self, entry: _Entry) -> None:
        if entry.gone and not entry.readers:
            self._bytes_used -= entry.footprint
            self._arena.free(entry.runs)


def _part(arrays: Sequence[Array], start: int) -> list[Array]:
    """What follows the first `start` bytes."""
    parts = []
    for array in arrays:
        if start < array.nbytes:
            parts.append(array[start:])
        start = max(0, start - array.nbytes)
    return parts


def _copy(sources: Sequence[Array], targets: Sequence[Array]) -> None:
    """Fill the targets from the sources, in order, until one side ends; the lock of the interpreter is not held."""
    left = deque(sources)
    for target in targets:
        filled = 0
        while filled < target.nbytes and left:
            source = left.popleft()
            size = min(source.nbytes, target.nbytes - filled)
            np.copyto(target[filled : filled + size], source[:size])
            filled += size
            if size < source.nbytes:
                left.appendleft(source[size:])
