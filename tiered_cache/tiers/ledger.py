"""`Ledger`: the numbers that all processes on one directory share, kept at the start of a file under its lock.

A transaction takes the lock, reads the page, changes the numbers and writes them back in one piece. A process that is
killed lets go of the lock; if it was in the middle of moving files, the page says so, and the next transaction counts
anew. The page is a cache of what the directory holds and is never synced.

    page = magic [8] | moving u32 | crc32 of what follows u32 | used u64 | quarantined u64 | spare u64 | entries u64
           | spare files u64 | holders u64 | holders x (id [16], reserved u64)          all little-endian
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields

from tiered_cache.errors import CapacityError, ConfigError, DeadlineError, TieredCacheError, TierError
from tiered_cache.tiers.directory import Directory

LEDGER = "ledger"
"""The file's name."""
HOLDERS_MAX = 128
ORPHANS = "-" * 16
"""The holder of what dead processes left, when it was counted and not handed down in their names."""
_MAGIC = b"tc-book1"
_HEAD = struct.Struct("<8sII6Q")
_MOVING = (8, (1).to_bytes(4, "little"))
_CHECKED_FROM = 16
_HOLDER = struct.Struct("<16sQ")
_PAGE_BYTES_MAX = _HEAD.size + HOLDERS_MAX * _HOLDER.size  # one page of the system: a killed process does not tear it
_POLL_FIRST_S = 0.0002
_POLL_LAST_S = 0.005


@dataclass(slots=True)
class Books:
    """All bytes are footprints. Only a transaction may change them."""

    bytes_used: int = 0
    bytes_quarantined: int = 0
    bytes_spare: int = 0
    """In files that wait for their next use. Free, as far as `reserve` goes; gone before others are written."""
    entries: int = 0
    spare_files: int = 0
    reserved: dict[str, int] = field(default_factory=dict)
    """Per holder (16 hex digits): its reservations, with its temporary files."""
    counted: bool = False
    """Not written: they were just counted from the directory."""

    @property
    def bytes_reserved(self) -> int:
        return sum(self.reserved.values())

    @property
    def bytes_promised(self) -> int:
        return self.bytes_used + self.bytes_quarantined + self.bytes_reserved

    def are_possible(self) -> bool:
        return min(self.bytes_used, self.bytes_quarantined, self.bytes_spare, self.entries, self.spare_files) >= 0

    def become(self, other: Books) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def reserve(self, holder: str, bytes_: int) -> None:
        """Add to what a holder has reserved, or take away from it; a holder with nothing is left out."""
        if bytes_ > 0 and holder not in self.reserved and len(self.reserved) >= HOLDERS_MAX:
            raise CapacityError(f"{HOLDERS_MAX} processes have this directory open or left it unclean")
        left = self.reserved.get(holder, 0) + bytes_
        if left > 0:
            self.reserved[holder] = left
        else:
            self.reserved.pop(holder, None)


def is_ledger(directory: Directory, *, torn: bool = False) -> bool:
    """Whether the directory has the file of a `Ledger`, or, with `torn`, what a power cut may have left of one.

    It is never synced: what is left may be shorter, or zeros.
    """
    if LEDGER not in directory.names(""):
        return False
    try:
        fd = directory.open(LEDGER)
    except (OSError, TieredCacheError):
        return False
    try:
        head = bytearray(_HEAD.size)
        head = head[: directory.read(fd, memoryview(head), 0)]
    finally:
        directory.close_file(fd)
    if torn:
        return not any(head) or head[: len(_MAGIC)] == _MAGIC[: len(head)]
    return len(head) == _HEAD.size and (not any(head) or head.startswith(_MAGIC))


class Ledger:
    """The shared books of `directory`; `count` makes new ones from what is there, under the ledger's lock.

    `count` is given the old books, or None if they cannot be read.
    """

    def __init__(self, directory: Directory, count: Callable[[Books | None], Books], timeout_s: float) -> None:
        self._directory = directory
        self._count = count
        self._timeout_s = timeout_s
        self._thread_lock = threading.Lock()  # threads of one process share the file's lock
        self._fd = directory.open_shared(LEDGER)

    @contextlib.contextmanager
    def transaction(self, *, moves_files: bool = False) -> Iterator[Books]:
        """The books, for one change. Whatever moves files in or out of what is counted says so.

        If the block raises, nothing is written; if it moves files, the next transaction counts anew.
        Raises `DeadlineError` if the lock is not free in time.
        """
        deadline_s = time.monotonic() + self._timeout_s
        if not self._thread_lock.acquire(timeout=self._timeout_s):
            raise DeadlineError(f"the ledger's lock was not free within {self._timeout_s} s")
        try:
            self._lock_file(self._fd, deadline_s)
            try:
                while not self._directory.links_of(self._fd):
                    self._go_on_in_another(deadline_s)
                books = self._read()
                before = b"" if moves_files or books.counted else _encode(books)
                if moves_files:
                    self._write(_MOVING[1], _MOVING[0])
                yield books
                if not books.are_possible():  # files have changed under somebody's hands: what was counted is not there
                    books.become(self._count(books))
                after = _encode(books)
                if after != before:
                    self._write(after, 0)
            finally:
                self._directory.unlock(self._fd)
        finally:
            self._thread_lock.release()

    def close(self) -> None:
        self._directory.close_file(self._fd)

    def _lock_file(self, fd: int, deadline_s: float) -> None:
        pause_s = _POLL_FIRST_S
        while not self._directory.try_lock(fd):
            if time.monotonic() >= deadline_s:
                raise DeadlineError(f"another process held the ledger's lock for {self._timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_LAST_S)

    def _go_on_in_another(self, deadline_s: float) -> None:
        """Somebody has removed the ledger; whoever has it open goes on in one new ledger that begins with what it says.

        The lock of the removed one is held meanwhile, so that nobody goes on in that.
        """
        page = bytearray(_PAGE_BYTES_MAX)
        got = self._directory.read(self._fd, memoryview(page), 0)
        fd = self._directory.open_shared(LEDGER)
        try:
            self._lock_file(fd, deadline_s)
            if got and not self._directory.bytes_of(fd):
                self._directory.write(fd, [memoryview(page)[:got]], 0)
                self._directory.write(fd, [memoryview(_MOVING[1])], _MOVING[0])  # and is to be counted anew
        except BaseException:
            self._directory.close_file(fd)
            raise
        removed, self._fd = self._fd, fd
        self._directory.unlock(removed)
        self._directory.close_file(removed)

    def _read(self) -> Books:
        page = bytearray(_PAGE_BYTES_MAX)
        got = self._directory.read(self._fd, memoryview(page), 0)
        books, moving = _decode(bytes(page[:got]))
        if books is None or moving:
            books = self._count(books)
            books.counted = True
        return books

    def _write(self, page: bytes, offset: int) -> None:
        written = self._directory.write(self._fd, [memoryview(page)], offset)
        if written != len(page):
            raise TierError(f"{written} of the ledger's {len(page)} bytes were written")


def _encode(books: Books) -> bytes:
    numbers = (books.bytes_used, books.bytes_quarantined, books.bytes_spare, books.entries, books.spare_files)
    page = bytearray(_HEAD.pack(_MAGIC, 0, 0, *numbers, len(books.reserved)))
    for holder, bytes_ in books.reserved.items():
        page += _HOLDER.pack(holder.encode(), bytes_)
    struct.pack_into("<I", page, _CHECKED_FROM - 4, zlib.crc32(memoryview(page)[_CHECKED_FROM:]))
    return bytes(page)


def _decode(page: bytes) -> tuple[Books | None, bool]:
    """The books, None if the page is torn or empty, and whether a process stopped while it was moving files."""
    if len(page) < _HEAD.size:
        return None, False
    magic, moving, checksum, used, quarantined, spare, entries, spare_files, holders = _HEAD.unpack_from(page)
    end = _HEAD.size + holders * _HOLDER.size
    if end > len(page) or checksum != zlib.crc32(page[_CHECKED_FROM:end]) or not magic.startswith(_MAGIC[:-1]):
        return None, False
    if magic != _MAGIC:
        raise ConfigError(f"the directory was written by another version: {magic!r} there, {_MAGIC!r} here")
    reserved = {}
    for index in range(holders):
        holder, bytes_ = _HOLDER.unpack_from(page, _HEAD.size + index * _HOLDER.size)
        reserved[holder.decode("ascii", "replace")] = bytes_
    return Books(used, quarantined, spare, entries, spare_files, reserved), bool(moving)
