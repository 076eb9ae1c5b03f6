"""`DiskTier`: one file an entry, in a private directory that several processes may share.

    ledger                                      the shared budget (`ledger.py`)
    holders/<id>                                locked by its process for as long as it lives
    tmp/<id>/<number>                           what that process is writing or removing
    entries/<path>.blob
    quarantine/<path>.blob.<time, 16 hex>.<reason>
    spare/<bytes, 16 hex>-<random>              files of deleted entries, to be written again

An entry is written under `tmp`, synced, and then linked to its name, which fails if the name is taken. All that is
counted moves under the ledger's lock: entries are linked in and renamed out there, so that the ledger equals the
directory whenever nobody holds the lock, and a process that is killed leaves at most what is under its own `tmp`.
Bodies are read, written, synced and removed without any lock.

Processes that share a directory share its entries and its budget, and nothing else. Which entries one of them has
acknowledged to somebody, pins or is about to read, the others do not know: to make room, each deletes what its own
policy chooses of the entries that it knows of. To the other that is a verified absence, and so a miss; a suspended
sequence that lost frames so cannot be resumed. Whose pins have to hold, as those of suspended sequences, needs a
directory of its own, as each node of a cluster has.

A full tier deletes as much as it writes, and that is what costs: ext4 needs 0.7 ms to find an inode among recently
deleted ones, 9 ms to give up 16 MiB, and new blocks and page-cache pages make a put twice as slow. So a bounded
number of deleted files is kept and overwritten under a new name, when their old one is gone for good (synced, where
the policy syncs at all) and nobody reads them: a reader holds a shared lock and has seen the name after it got it.
Spare files count as free room, and go whenever the budget would not hold them besides what is about to be written.
"""

from __future__ import annotations

import bisect
import contextlib
import enum
import errno
import itertools
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from pathlib import Path
from typing import NamedTuple

from tiered_cache.errors import CapacityError, ConfigError, FrameNotFoundError, TieredCacheError, TierError
from tiered_cache.tiers.arena import Arena, aligned_empty
from tiered_cache.tiers.base import (
    SEGMENTS_MAX,
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
from tiered_cache.tiers.directory import Directory, Listed
from tiered_cache.tiers.ledger import LEDGER, ORPHANS, Books, Ledger, is_ledger

ENTRY_BYTES = 512
"""Charged for an entry's inode and name, besides its blocks."""
_PARTS = ("entries", "quarantine", "spare", "tmp", "holders")
_FILE_SYSTEMS_OWN = ("lost+found", ".snapshot", ".snapshots", ".zfs")
SUFFIX = ".blob"
_HOLDER = re.compile(r"[0-9a-f]{16}")
_SPARE = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_SPARES_MAX = 4096
_QUARANTINED = re.compile(rf"(?P<path>.+){re.escape(SUFFIX)}\.(?P<time>[0-9a-f]{{16}})\.(?P<reason>[a-z0-9-]{{1,24}})")
_SYNC_TOGETHER = 64  # files that a put keeps open before it syncs them
_COLLECT_TOGETHER = 64  # dead processes whose locks are held at a time
_COLLECT_S = 1.0  # how often `usage` looks for what dead processes left, or every `grace_s` if that is longer
_MOVE_TOGETHER = 64  # names that change under one hold of the ledger's lock
_OPENINGS_MAX = 16
_VIEWS_TOGETHER = 1024  # IOV_MAX of Linux
_READ_BUFFERS_BYTES = 64 << 20
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}  # no entry: nothing, or something else
_FULL = {errno.ENOSPC, errno.EDQUOT}
_LASTING = {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR}

_log = logging.getLogger(__name__)


class SyncPolicy(enum.Enum):
    """What is on stable storage when a put is answered."""

    NEVER = "never"  # nothing: survives the death of every process; after a power cut entries may be gone or torn
    DATA = "data"  # the bytes: after a power cut entries may be gone, none is torn
    FULL = "full"  # the bytes and the names: entries survive a power cut


class _Moved(NamedTuple):
    """A file under `tmp` that was an entry."""

    name: str
    bytes: int


class DiskTier(Tier):
    """Entries as files below `root`, for every process of this user that opens it; `bytes_max` bounds them together.

    Processes should agree on `bytes_max`: each refuses at its own. What a killed process left is collected, and its
    room given back, when it is `grace_s` old: at opening, when room is short, and once in a while. `quarantine_bytes`
    and `spare_bytes` are each a sixteenth of the budget if None; bytes of deleted entries stay readable in spare files
    for a while, unless that is 0. Raises `ConfigError` if the directory is not private, `CapacityError` if the file
    system has no room for even an empty file, and `TierError` if it fails.

    A full file system fails `reserve` and `put` with a `CapacityError`, and like one that takes no writes for another
    reason everything else that writes with a `TierError`. What is there stays readable, and goes as far as the file
    system lets it; `close` always ends. What the ledger could not be told, whoever opens the directory next counts.
    """

    durability = Durability.DISK

    def __init__(
        self,
        root: Path,
        bytes_max: int,
        *,
        name: str = "disk",
        sync: SyncPolicy = SyncPolicy.DATA,
        grace_s: float = 60.0,
        lock_timeout_s: float = 30.0,
        quarantine_entries: int = 64,
        quarantine_bytes: int | None = None,
        spare_bytes: int | None = None,
        open_directory: Callable[[Path], Directory] = Directory,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.sync = sync
        self.grace_s = grace_s
        self._bytes_max = bytes_max
        self._lock_timeout_s = lock_timeout_s
        self._quarantine_entries = quarantine_entries
        self._quarantine_bytes = bytes_max // 16 if quarantine_bytes is None else quarantine_bytes
        self._spare_bytes = bytes_max // 16 if spare_bytes is None else spare_bytes
        self._clock = clock
        self._process = os.getpid()
        self._holder = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._quarantine_time = 0
        self._spares: MutableSequence[str] = []  # names in `spare`, sorted by size; only in a transaction
        self._reserved = 0  # what this process has reserved; every transaction writes it down anew
        self._stuck: deque[tuple[str, int]] = deque()  # files that could not be removed, and what is reserved for them
        self._foreign_files = 0
        self._collect_at_s = 0.0
        self._read_buffers = Arena(_READ_BUFFERS_BYTES)
        self._idle = threading.Condition()
        self._calls = 0
        self._closed = False
        self._lasting_directories: set[str] = set()  # their names are on stable storage
        self._directory = open_directory(root)
        with contextlib.ExitStack() as undo, self._errors():
            undo.callback(self._directory.close)
            if not self._is_ours() and not self._is_ours():  # another process may just be making it: parts, then ledger
                raise ConfigError(f"{root} holds other things than a disk tier's: give it a directory of its own")
            self._directory.close_to_others()
            for part in _PARTS:
                self._directory.make_directory(part)
            self._block_bytes = self._directory.block_bytes()
            self._ledger = Ledger(self._directory, self._count, lock_timeout_s)
            undo.callback(self._ledger.close)
            self._holder_fd = self._register()
            undo.callback(self._directory.close_file, self._holder_fd)
            self.collect_orphans()
            undo.pop_all()

    def _is_ours(self) -> bool:
        """Whether the directory is a tier's, or holds nothing yet but what file systems put there themselves."""
        names = set(self._directory.names(""))
        if names.issuperset(_PARTS) or (names.intersection(_PARTS) and is_ledger(self._directory)):
            return True  # a power cut may have taken some of them
        names -= {*_PARTS, *_FILE_SYSTEMS_OWN}
        return not names or (names == {LEDGER} and is_ledger(self._directory, torn=True))

    @property
    def bytes_max(self) -> int:
        return self._bytes_max

    @property
    def foreign_files(self) -> int:
        """Names that are not ours, as the last complete `list` or count saw them; they are never read or removed."""
        return self._foreign_files

    def file_of(self, path: str) -> Path:
        """Where an entry is kept, for tools that inspect the directory."""
        return self._directory.root / _entry_name(path)

    def footprint(self, bytes_: int) -> int:
        return -(-bytes_ // self._block_bytes) * self._block_bytes + ENTRY_BYTES

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        need = sum(map(self.footprint, sizes))
        with self._call(fills=True):
            self._unlink_stuck()
            if not self._try_reserve(need):
                with contextlib.suppress(TierError):
                    self.collect_orphans()
                if not self._try_reserve(need):
                    free: object = "too few"
                    with contextlib.suppress(TierError):
                        free = min(self.usage().bytes_free, self._directory.bytes_free())
                    raise CapacityError(f"{need} bytes are needed and {free} are free", None, self.name)
        return Reservation(need, self._unreserve)

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        with self._call(fills=True):
            new: dict[str, PutItem] = {}
            for item in items:
                if not is_path(item.path):
                    raise TierError("not a path", item.path, self.name)
                with self._errors(item.path):
                    if item.path not in new and self._size(item.path) is None:
                        new[item.path] = item
            taken = sum(self.footprint(item.bytes) for item in new.values())
            reservation.take(taken)
            written: dict[str, str] = {}
            created: set[str] = set()
            try:
                self._claim_spares(list(new.values()), written)
                self._write(list(new.values()), written)
                self._publish(new, written, created)
                self._make_lasting([item.path for item in items], created)
            finally:
                spent = 0
                for path, item in new.items():
                    bytes_ = self.footprint(item.bytes)
                    spent += bytes_ if path in created else 0
                    if path in written:
                        spent += self._unlink(written[path], 0 if path in created else bytes_)
                reservation.put_back(taken - spent)
        outcomes = []
        for item in items:
            outcomes.append(PutOutcome.CREATED if item.path in created else PutOutcome.EXISTS)
            created.discard(item.path)
        return outcomes

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        with self._call():
            return [self._read(request) for request in requests]

    def stat(self, paths: Sequence[str]) -> Sequence[int | None]:
        with self._call(), self._errors():
            return [self._size(path) if is_path(path) else None for path in paths]

    def list(self, prefix: str = "") -> Iterator[TierEntry]:
        foreign = 0
        for name, listed in self._walk("entries", prefix):
            path = name.removesuffix(SUFFIX)
            if not listed.is_file or path == name or not is_path(path):
                foreign += 1
            elif path.startswith(prefix):
                yield TierEntry(path, listed.bytes)
        if not prefix:
            self._foreign_files = foreign

    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        with self._call():
            self._unlink_stuck()
            there: list[bool] = []
            for first in range(0, len(paths), _MOVE_TOGETHER):
                some = paths[first : first + _MOVE_TOGETHER]
                moved, error = self._move_out(some)
                self._recycle(moved)
                if error is not None:
                    raise self._translated(error) from error
                for path in some:
                    there.append(path in moved)
                    moved.pop(path, None)
            return there

    def quarantine(self, path: str, reason: str) -> bool:
        with self._call():
            if not is_path(path):
                return False
            dropped: dict[str, _Moved | None] = {}
            with self._removed_later(dropped), self._transaction(moves_files=True) as books:
                bytes_ = self._size(path)
                if bytes_ is None:
                    return False
                self._quarantine_time = max(self._quarantine_time + 1, int(self._clock() * 1e9))
                target = f"quarantine/{path}{SUFFIX}.{self._quarantine_time:016x}.{reason_slug(reason)}"
                self._make_directories(target.rpartition("/")[0])
                self._directory.rename(_entry_name(path), target)
                books.entries -= 1
                books.bytes_used -= self.footprint(bytes_)
                books.bytes_quarantined += self.footprint(bytes_)
                self._drop_quarantined(books, dropped)
            self._remove(file for file in dropped.values() if file is not None)
            return True

    def quarantined(self) -> Sequence[QuarantinedEntry]:
        with self._call():
            return [entry for _, _, entry in self._list_quarantine()]

    def usage(self) -> TierUsage:
        if self._clock() >= self._collect_at_s:
            with contextlib.suppress(TierError):  # the next one may be luckier
                self.collect_orphans()
        with self._call(), self._transaction() as books:
            return TierUsage(
                books.bytes_used, books.bytes_reserved, books.bytes_quarantined, books.entries, self._bytes_max
            )

    def is_shared(self) -> bool:
        with self._call(), self._errors():
            return any(self._is_alive(holder) for holder in self._holders() if holder != self._holder)

    def set_limit(self, bytes_max: int) -> int:
        self._bytes_max = bytes_max
        with self._call(), self._transaction(moves_files=True) as books:
            self._drop_spares(books, max(0, bytes_max - books.bytes_promised))
            return max(0, books.bytes_promised - bytes_max)

    def collect_orphans(self) -> int:
        """Remove what dead processes left under `tmp`, if it is `grace_s` old; how many processes that were."""
        with self._call():
            self._collect_at_s = self._clock() + max(self.grace_s, _COLLECT_S)
            collected: set[str] = set()
            while dead := self._lock_dead(collected):
                with self._errors(), contextlib.ExitStack() as closing:
                    for _, fd in dead:
                        closing.callback(self._directory.close_file, fd)
                    for holder, _ in dead:
                        collected.add(holder)
                        self._remove_left_by(holder)
            return len(collected)

    def close(self) -> None:
        with self._idle:
            if self._closed or os.getpid() != self._process:
                return
            self._closed = True
            if not self._idle.wait_for(lambda: not self._calls, self._lock_timeout_s):
                # A call that hangs in the system would find another file under its descriptor: leave them open.
                _log.warning("tier %s: %d calls had not ended when it was closed", self.name, self._calls)
                return
        try:
            with self._transaction(moves_files=True) as books:
                self._reserved = 0
                self._remove_holder(self._holder)
                if not any(self._is_alive(holder) for holder in self._holders()):
                    self._drop_spares(books, 0)
        except TieredCacheError as error:  # a full disk's among them; whoever opens it next finds a dead process's part
            _log.warning("tier %s: closed, but not cleanly: %s", self.name, error)
        finally:
            # An error of these says nothing: what was acknowledged is not written by them.
            with contextlib.suppress(OSError), contextlib.ExitStack() as closing:
                closing.callback(self._directory.close)
                closing.callback(self._ledger.close)
                closing.callback(self._directory.close_file, self._holder_fd)

    # The budget

    def _try_reserve(self, need: int) -> bool:
        charged = 0
        try:
            with self._transaction() as books:
                if books.bytes_promised + need > self._bytes_max:
                    return False
                if need > self._directory.bytes_free() + books.bytes_spare:
                    return False
                charged = need
                self._charge(need)
        except BaseException:  # it could not be written down
            self._charge(-charged)
            raise
        return True

    def _unreserve(self, bytes_: int) -> None:
        """Give reserved bytes back; the ledger says so with the next transaction, if it cannot be had now."""
        if bytes_:
            self._charge(-bytes_)
            with contextlib.suppress(TieredCacheError), self._call(), self._transaction():
                pass

    def _charge(self, bytes_: int) -> None:
        with self._idle:
            self._reserved += bytes_

    def _write_down(self, books: Books) -> None:
        """What this process has reserved is for it to know: whatever has failed before, the ledger has it from here."""
        with self._idle:
            books.reserved.pop(self._holder, None)
            if self._reserved:
                books.reserve(self._holder, self._reserved)

    def _count(self, old: Books | None) -> Books:
        """New books from what is there; living processes know best what they have reserved."""
        books = Books()
        for entry in self.list():
            books.entries += 1
            books.bytes_used += self.footprint(entry.bytes)
        for _, _, quarantined in self._list_quarantine():
            books.bytes_quarantined += self.footprint(quarantined.bytes)
        for listed in self._scan("spare"):
            if _SPARE.fullmatch(listed.name):
                books.bytes_spare += self.footprint(listed.bytes)
                books.spare_files += 1
        for holder in self._holders():
            if holder == self._holder:
                self._write_down(books)
            elif old is not None and self._is_alive(holder):
                books.reserve(holder, old.reserved.get(holder, 0))
            else:
                books.reserve(ORPHANS, sum(map(self.footprint, self._left_by(holder))))
        return books

    @contextlib.contextmanager
    def _transaction(self, *, moves_files: bool = False) -> Iterator[Books]:
        with self._errors(), self._ledger.transaction(moves_files=moves_files) as books:
            self._write_down(books)
            yield books
            self._write_down(books)

    # Processes

    def _register(self) -> int:
        """Become a holder; whoever is the only one counts what is there, since nobody else knows of a power cut."""
        with self._ledger.transaction(moves_files=True) as books:
            if not any(self._is_alive(holder) for holder in self._holders()):
                for listed in self._scan("spare"):  # after a power cut, who knows what they are
                    if _SPARE.fullmatch(listed.name):
                        self._directory.unlink(f"spare/{listed.name}")
                for part in ("entries", "quarantine"):
                    self._prune(part)
                if books.counted:
                    books.bytes_spare = books.spare_files = 0
                else:
                    books.become(self._count(None))
            fd = self._directory.open_shared(f"holders/{self._holder}")
            try:
                locked = self._directory.try_lock(fd)
                assert locked, "a random name is nobody else's"
                self._directory.make_directory(f"tmp/{self._holder}")
            except BaseException:  # else it would be alive for as long as this process is
                self._directory.close_file(fd)
                raise
            self._directory.keep_open("entries/", f"tmp/{self._holder}")
            return fd

    def _holders(self) -> Sequence[str]:
        """Every process that has the directory open or left something in it, dead ones and this one included."""
        names = {name for part in ("holders", "tmp") for name in self._directory.names(part)}
        return sorted(name for name in names if _HOLDER.fullmatch(name))

    def _left_by(self, holder: str) -> Sequence[int]:
        """The sizes of its files that are not the second name of an entry."""
        return [listed.bytes for listed in self._scan(f"tmp/{holder}") if listed.is_file and listed.links == 1]

    def _is_alive(self, holder: str) -> bool:
        try:
            fd = self._directory.open(f"holders/{holder}")
        except FileNotFoundError:
            return False
        try:
            return not self._directory.try_lock(fd)
        finally:
            self._directory.close_file(fd)

    def _lock_dead(self, collected: set[str]) -> Sequence[tuple[str, int]]:
        """Some others that are dead for long enough, with their locks: nobody else collects them meanwhile."""
        with self._transaction():  # holders register under the ledger's lock, so none is seen half made
            others = (holder for holder in self._holders() if holder != self._holder and holder not in collected)
            locks = ((holder, self._lock_if_dead(holder)) for holder in others)
            return [*itertools.islice(((holder, fd) for holder, fd in locks if fd is not None), _COLLECT_TOGETHER)]

    def _lock_if_dead(self, holder: str) -> int | None:
        fd = self._directory.open_shared(f"holders/{holder}")
        if self._directory.try_lock(fd):
            changed_s = 0.0
            for name in (f"holders/{holder}", f"tmp/{holder}"):
                with contextlib.suppress(OSError):
                    changed_s = max(changed_s, self._directory.stat(name).st_mtime)
            if self._clock() - changed_s >= self.grace_s:
                return fd
        self._directory.close_file(fd)
        return None

    def _remove_left_by(self, holder: str) -> None:
        with self._errors():
            left = sum(map(self.footprint, self._left_by(holder)))
            for listed in self._scan(f"tmp/{holder}"):
                if not listed.is_directory:
                    self._directory.unlink(f"tmp/{holder}/{listed.name}")
        with self._transaction() as books:
            if books.reserved.pop(holder, None) is None:
                books.reserve(ORPHANS, -left)
            self._remove_holder(holder)

    def _remove_holder(self, holder: str) -> None:
        with contextlib.suppress(OSError):  # none is there, or somebody has put something into it
            self._directory.remove_directory(f"tmp/{holder}")
        self._directory.unlink(f"holders/{holder}")

    # Writing

    def _write(self, items: Sequence[PutItem], written: dict[str, str]) -> None:
        """Write the items under `tmp` and sync them, many together; `written` gets each file before it is there.

        An error of a file's closing counts: some file systems write no sooner.
        """
        for first in range(0, len(items), _SYNC_TOGETHER):
            fds: list[int] = []
            with self._errors(), contextlib.ExitStack() as closing:
                for item in items[first : first + _SYNC_TOGETHER]:
                    fds.append(self._create(item, written))
                    closing.callback(self._directory.close_file, fds[-1])
                    self._write_file(fds[-1], item.views())
                    if self.sync is not SyncPolicy.NEVER:
                        self._directory.start_writing_back(fds[-1])
                if self.sync is not SyncPolicy.NEVER:
                    for fd in fds:
                        self._directory.sync(fd)

    def _create(self, item: PutItem, written: dict[str, str]) -> int:
        """The file to write an entry to: the spare one that was claimed for it, or a new one."""
        if item.path in written:
            with contextlib.suppress(OSError):
                return self._directory.open_again(written[item.path], item.bytes)
            self._unlink(written[item.path], 0)  # somebody reads it, or has linked it
        written[item.path] = self._temporary()
        try:
            return self._directory.create(written[item.path])
        except FileNotFoundError:
            self._make_temporary_directory()
            return self._directory.create(written[item.path])

    def _write_file(self, fd: int, views: Sequence[memoryview]) -> None:
        offset = 0
        left = deque(views)
        while left:
            written = self._directory.write(fd, [*itertools.islice(left, _VIEWS_TOGETHER)], offset)
            offset += written
            while left and written >= left[0].nbytes:
                written -= left.popleft().nbytes
            if written:
                left[0] = left[0][written:]

    def _publish(self, items: dict[str, PutItem], written: dict[str, str], created: set[str]) -> None:
        """Give the files their names, as far as these are free; `created` gets the paths."""
        paths = list(written)
        with self._errors():
            for parent in {_parent_of(path) for path in paths}:
                self._make_directories(parent)
        for first in range(0, len(paths), _MOVE_TOGETHER):
            failure = None
            with self._transaction(moves_files=True) as books:
                for path in paths[first : first + _MOVE_TOGETHER]:
                    try:
                        if not self._link(written[path], path):
                            continue
                    except OSError as error:  # another put may have acknowledged what is linked: it stays
                        failure = error
                        break
                    created.add(path)
                    books.entries += 1
                    books.bytes_used += self.footprint(items[path].bytes)
                    self._charge(-self.footprint(items[path].bytes))
            if failure is not None:
                raise self._translated(failure) from failure

    def _link(self, temporary: str, path: str) -> bool:
        try:
            self._directory.link(temporary, _entry_name(path))
        except FileExistsError:
            if self._size(path) is not None:
                return False
            self._set_foreign_aside(_entry_name(path))
            self._directory.link(temporary, _entry_name(path))
        except FileNotFoundError:
            self._look_again(_parent_of(path))
            self._make_directories(_parent_of(path))
            self._directory.link(temporary, _entry_name(path))
        return True

    def _make_lasting(self, paths: Sequence[str], created: set[str]) -> None:
        """Bring names, and entries that others wrote, to the durability that a put acknowledges."""
        if self.sync is SyncPolicy.NEVER:
            return
        with self._errors():
            for path in set(paths) - created:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    fd = self._directory.open(_entry_name(path))
                    try:
                        self._directory.sync(fd)
                    finally:
                        self._directory.close_file(fd)
            if self.sync is SyncPolicy.FULL:
                for parent in sorted({_parent_of(path) for path in paths}):
                    self._sync_names(parent)

    def _sync_names(self, name: str) -> None:
        """Sync a directory, and those above it that do not hold its name for certain."""
        if name and name not in self._lasting_directories:
            self._sync_names(name.rpartition("/")[0])
        self._directory.sync_directory(name)
        self._lasting_directories.add(name)

    # Spare files

    def _claim_spares(self, items: Sequence[PutItem], written: dict[str, str]) -> None:
        """Move spare files to where the items are written, and remove spare ones that have no room besides them.

        A claimed file is not larger than its item, so that it is covered by the item's reservation.
        """
        with self._transaction(moves_files=True) as books:
            if not books.spare_files:
                return
            new_bytes = 0
            for item in items:
                bytes_ = item.bytes
                new_bytes += self.footprint(bytes_)
                claimed = self._take_spare(books, bytes_ // 2, bytes_)
                if claimed is not None:
                    written[item.path] = claimed.name
                    new_bytes -= self.footprint(claimed.bytes)
            if new_bytes > self._directory.bytes_free():
                self._drop_spares(books, 0)
            self._drop_spares(books, max(0, self._bytes_max - books.bytes_promised))

    def _take_spare(self, books: Books, bytes_min: int, bytes_max: int) -> _Moved | None:
        """Move the largest spare file within the bounds under `tmp`."""
        if len(self._spares) != books.spare_files:
            self._list_spares(books)
        for _ in range(2):
            index = bisect.bisect_right(self._spares, f"{bytes_max:016x}~") - 1
            if index < 0 or _spare_bytes(self._spares[index]) < bytes_min:
                return None
            name = self._spares.pop(index)
            try:
                claimed = _Moved(self._move(f"spare/{name}"), _spare_bytes(name))
            except FileNotFoundError:  # another process took it
                self._list_spares(books)
                continue
            books.spare_files -= 1
            books.bytes_spare -= min(books.bytes_spare, self.footprint(claimed.bytes))
            return claimed
        return None

    def _keep_spare(self, books: Books, name: str, bytes_: int) -> bool:
        """Make a spare file of one that is not counted, if the bounds allow."""
        if (
            not bytes_
            or books.spare_files >= _SPARES_MAX
            or books.bytes_spare + self.footprint(bytes_) > self._spare_bytes
        ):
            return False
        spare = f"{bytes_:016x}-{secrets.token_hex(8)}"
        try:
            self._directory.rename(name, f"spare/{spare}")
        except OSError as error:
            _log.warning("tier %s: cannot keep %s as a spare file: %s", self.name, name, error)
            return False
        bisect.insort(self._spares, spare)
        books.spare_files += 1
        books.bytes_spare += self.footprint(bytes_)
        return True

    def _drop_spares(self, books: Books, bytes_max: int) -> None:
        if books.bytes_spare > bytes_max:
            self._list_spares(books)
        while books.bytes_spare > bytes_max and self._spares:
            name = self._spares.pop()
            self._directory.unlink(f"spare/{name}")
            books.spare_files -= 1
            books.bytes_spare -= min(books.bytes_spare, self.footprint(_spare_bytes(name)))

    def _list_spares(self, books: Books) -> None:
        self._spares = sorted(filter(_SPARE.fullmatch, self._directory.names("spare")))
        books.spare_files = len(self._spares)
        if not self._spares:
            books.bytes_spare = 0

    # Removing

    def _move_out(self, paths: Iterable[str]) -> tuple[dict[str, _Moved | None], OSError | None]:
        """Move entries under `tmp`, where they are reserved, or to the spare files (None), up to the first error."""
        at_once = self.sync is SyncPolicy.NEVER
        moved: dict[str, _Moved | None] = {}
        with self._removed_later(moved), self._transaction(moves_files=True) as books:
            try:
                for path in paths:
                    bytes_ = self._size(path) if is_path(path) else None
                    if bytes_ is None:
                        continue
                    kept = at_once and self._keep_spare(books, _entry_name(path), bytes_)
                    moved[path] = None if kept else self._move_or_unlink(_entry_name(path), bytes_)
                    books.entries -= 1
                    books.bytes_used -= self.footprint(bytes_)
            except OSError as error:
                return moved, error
        return moved, None

    def _move_or_unlink(self, name: str, bytes_: int) -> _Moved | None:
        """Move an entry under `tmp`, to be removed without a lock; a disk that is too full for a name must lose one."""
        try:
            moved = _Moved(self._move(name), bytes_)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._directory.unlink(name)
            return None
        self._charge(self.footprint(bytes_))
        return moved

    @contextlib.contextmanager
    def _removed_later(self, moved: dict[str, _Moved | None]) -> Iterator[None]:
        """If the block raises, what it has moved under `tmp` is removed with what is stuck there."""
        try:
            yield
        except BaseException:
            self._stuck.extend((file.name, self.footprint(file.bytes)) for file in moved.values() if file is not None)
            raise

    def _drop_quarantined(self, books: Books, dropped: dict[str, _Moved | None]) -> None:
        """Move what the quarantine holds beyond its bounds under `tmp`, where it is reserved."""
        entries = self._list_quarantine()
        for index, (_, name, entry) in enumerate(entries):
            few = len(entries) - index <= self._quarantine_entries
            if few and books.bytes_quarantined <= self._quarantine_bytes:
                break
            try:
                dropped[name] = _Moved(self._move(name), entry.bytes)
            except OSError as error:
                _log.warning("tier %s: cannot remove %s: %s", self.name, name, error)
                break
            books.bytes_quarantined -= self.footprint(entry.bytes)
            self._charge(self.footprint(entry.bytes))

    def _recycle(self, moved: dict[str, _Moved | None]) -> None:
        """Keep moved entries as spare files, or remove them; nothing of them is reserved then."""
        files = deque(file for file in moved.values() if file is not None)
        try:
            # Without this sync a power cut could bring an entry's name back with another's bytes.
            if files and self._spare_bytes and self.sync is not SyncPolicy.NEVER:
                with self._errors():
                    for parent in {_parent_of(path) for path in moved}:
                        self._directory.sync_directory(parent)
                with self._transaction(moves_files=True) as books:
                    while files and self._keep_spare(books, files[0].name, files[0].bytes):
                        self._charge(-self.footprint(files.popleft().bytes))
        finally:
            self._remove(files)

    def _remove(self, files: Iterable[_Moved]) -> None:
        removed = 0
        for file in files:
            bytes_ = self.footprint(file.bytes)
            removed += bytes_ - self._unlink(file.name, bytes_)
        self._unreserve(removed)

    def _move(self, name: str) -> str:
        temporary = self._temporary()
        try:
            self._directory.rename(name, temporary)
        except FileNotFoundError:
            self._directory.stat(name)  # or it is that which is gone
            self._make_temporary_directory()
            self._directory.rename(name, temporary)
        return temporary

    def _make_temporary_directory(self) -> None:
        """Somebody has removed it by hand."""
        self._look_again(f"tmp/{self._holder}")
        self._directory.make_directory("tmp")
        self._directory.make_directory(f"tmp/{self._holder}")

    def _unlink(self, name: str, bytes_: int) -> int:
        """Remove a file under `tmp` and return 0; if it cannot be removed, what stays reserved for it: `bytes_`."""
        try:
            self._directory.unlink(name)
        except FileNotFoundError:
            return 0
        except OSError as error:
            _log.warning("tier %s: cannot remove %s: %s", self.name, name, error)
            self._stuck.append((name, bytes_))
            return bytes_
        return 0

    def _unlink_stuck(self) -> None:
        """Try again what could not be removed before."""
        for _ in range(len(self._stuck)):
            name, bytes_ = self._stuck.popleft()
            self._unreserve(bytes_ - self._unlink(name, bytes_))

    # Reading

    def _read(self, request: GetRequest) -> GetAnswer:
        try:
            fd = self._open(request.path)
            try:
                start, wanted = request.span(self._directory.bytes_of(fd))
                view = self._buffer(wanted) if request.into is None else request.into.cast("B")[:wanted]
                done = 0
                while done < wanted:
                    got = self._directory.read(fd, view[done:], start + done)
                    if not got:  # cut while we read it
                        break
                    done += got
            finally:
                with contextlib.suppress(OSError):
                    self._directory.close_file(fd)
        except OSError as error:
            if error.errno in _ABSENT:
                return FrameNotFoundError("not there", request.path, self.name)
            failure = TierError(error.strerror or str(error), request.path, self.name, error.errno not in _LASTING)
            failure.__cause__ = error
            return failure
        return view[:done].toreadonly() if request.into is None else view[:done]

    def _open(self, path: str) -> int:
        if not is_path(path):
            raise FileNotFoundError(errno.ENOENT, "not a path")
        for _ in range(_OPENINGS_MAX):
            with contextlib.suppress(BlockingIOError):  # deleted while it was opened, and perhaps written again
                return self._directory.open_locked(_entry_name(path))
        raise OSError(errno.EAGAIN, "its file was another one each time it was opened")

    def _buffer(self, bytes_: int) -> memoryview:
        """A warm buffer, which comes back when the last view of it is gone, or a new one if all are lent."""
        runs = self._read_buffers.allocate(bytes_, in_one=True)
        if not runs:
            return aligned_empty(bytes_).data
        return self._read_buffers.lend(runs[0], 0, bytes_, lambda: self._read_buffers.free_later(runs), writable=True)

    def _size(self, path: str) -> int | None:
        """The size of an entry, None if there is none; something else in its place is none. Raises `OSError`."""
        try:
            status = self._directory.stat(_entry_name(path))
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def _list_quarantine(self) -> Sequence[tuple[str, str, QuarantinedEntry]]:
        """(time, name, entry), oldest first."""
        entries = []
        for name, listed in self._walk("quarantine"):
            match = _QUARANTINED.fullmatch(name)
            if listed.is_file and match and is_path(match["path"]):
                entry = QuarantinedEntry(match["path"], match["reason"], listed.bytes)
                entries.append((match["time"], f"quarantine/{name}", entry))
        return sorted(entries, key=lambda found: found[:2])

    # Names

    def _temporary(self) -> str:
        return f"tmp/{self._holder}/{next(self._numbers)}"

    def _set_foreign_aside(self, name: str) -> None:
        """What is no file of ours and takes the place of one goes to the quarantine, where it is nobody's."""
        _log.warning("tier %s: something that is not an entry is in the place of %s: set aside", self.name, name)
        self._directory.rename(name, f"quarantine/foreign-{secrets.token_hex(8)}")

    def _make_directories(self, name: str) -> None:
        """Create a directory and those above it; what is in the place of one is set aside."""
        if self._directory.is_open(name):
            return
        parts = name.split("/")
        above = ["/".join(parts[:depth]) for depth in range(2, len(parts) + 1)]
        try:
            for directory in above:
                self._make_directory(directory)
        except FileNotFoundError:  # one that we have open is gone
            self._look_again(name)
            for directory in (parts[0], *above):
                self._make_directory(directory)

    def _make_directory(self, name: str) -> None:
        self._directory.make_directory(name)
        if not stat.S_ISDIR(self._directory.stat(name).st_mode):
            self._set_foreign_aside(name)
            self._directory.make_directory(name)

    def _look_again(self, name: str) -> None:
        """Somebody removed a directory or one above it by hand: what is known of them is out of date."""
        self._directory.forget(name)
        self._lasting_directories.clear()

    def _walk(self, top: str, prefix: str = "", below: str = "", depth: int = 1) -> Iterator[tuple[str, Listed]]:
        """Everything below `top` that is not a directory in which there can be entries that begin with `prefix`."""
        for listed in self._scan(f"{top}/{below}".rstrip("/")):
            name = below + listed.name
            if not (listed.is_directory and depth < SEGMENTS_MAX and is_path(listed.name)):
                yield name, listed
            elif f"{name}/".startswith(prefix) or prefix.startswith(f"{name}/"):
                yield from self._walk(top, prefix, f"{name}/", depth + 1)

    def _scan(self, name: str) -> Sequence[Listed]:
        with self._call(), self._errors():
            try:
                return self._directory.scan(name)
            except FileNotFoundError:
                return ()

    def _prune(self, name: str) -> None:
        """Remove empty directories; only while nobody else has the directory open."""
        for listed in self._scan(name):
            if listed.is_directory:
                self._prune(f"{name}/{listed.name}")
                with contextlib.suppress(OSError):
                    self._directory.remove_directory(f"{name}/{listed.name}")

    # Calls and errors

    @contextlib.contextmanager
    def _call(self, *, fills: bool = False) -> Iterator[None]:
        """Count a call, so that `close` waits for it; only those that bring something can fail for want of room."""
        if os.getpid() != self._process:
            raise TierError("opened by another process: a fork must open its own", None, self.name)
        with self._idle:
            if self._closed:
                raise TierError("closed", None, self.name)
            self._calls += 1
        try:
            yield
        except CapacityError as error:
            if fills:
                raise
            raise TierError(error.message, error.key, self.name, retryable=True) from error
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def _errors(self, path: str | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._translated(error, path) from error

    def _translated(self, error: OSError, path: str | None = None) -> TieredCacheError:
        if error.errno in _FULL:
            return CapacityError(f"the file system is full: {error.strerror}", path, self.name)
        return TierError(error.strerror or str(error), path, self.name, error.errno not in _LASTING)


def _entry_name(path: str) -> str:
    return f"entries/{path}{SUFFIX}"


def _spare_bytes(name: str) -> int:
    return int(name[:16], 16)


def _parent_of(path: str) -> str:
    return _entry_name(path).rpartition("/")[0]
