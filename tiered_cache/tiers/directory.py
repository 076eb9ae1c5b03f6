"""`Directory`: every system call that the disk tier makes, on names below one private directory.

This is the seam for tests: a subclass can fail, drop what was not synced, or die at any step. Names are relative and
made of components that were checked before; no symbolic link is ever followed below the root, and everything that is
created is for its owner alone (directories 0700, files 0600). Methods raise `OSError` as the system does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import resource
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tiered_cache.errors import ConfigError

_log = logging.getLogger(__name__)

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in a file's place must not block
_SYNC_FILE_RANGE_WRITE = 2


@dataclass(frozen=True, slots=True)
class Listed:
    """One name in a directory. `bytes` and `links` are of a regular file, 0 of anything else."""

    name: str
    is_directory: bool
    is_file: bool
    bytes: int
    links: int


class Directory:
    """The directory at `root`, created if it is not there.

    Raises `ConfigError` if it is a symbolic link, belongs to another user, can be written by others, or lies in a
    directory in which others can replace it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._kept: dict[str, int] = {}  # open upper directories; none is closed before `close`
        self._kept_max = min(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._retired: list[int] = []
        self._lasting: tuple[str, ...] = ()
        try:
            _make_lasting_directory(root)
            self._root = os.open(root, _OPEN_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"{root} cannot be opened as a directory: {error.strerror}") from error
        try:
            self._check(os.fstat(self._root), root.resolve().parent.stat())
        except ConfigError:
            os.close(self._root)
            raise

    def _check(self, status: os.stat_result, parent: os.stat_result) -> None:
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{self.root} belongs to user {status.st_uid}, not to {os.geteuid()}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"{self.root} has mode {status.st_mode & 0o7777:04o}: others can write into it")
        if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
            raise ConfigError(f"{self.root} lies in a directory of mode {parent.st_mode & 0o7777:04o}")

    def close_to_others(self) -> None:
        """Who may read it, as `mkdir` or a volume's maker lets them, may not from now on.

        Raises `ConfigError` if the file system cannot do that.
        """
        mode = stat.S_IMODE(os.fstat(self._root).st_mode)
        if not mode & 0o077:
            return
        problem: object = "the file system keeps the mode"
        try:
            os.fchmod(self._root, mode & ~0o077)
        except OSError as error:
            problem = error.strerror
        if os.fstat(self._root).st_mode & 0o077:
            raise ConfigError(f"{self.root} has mode {mode:04o}: others can read it, and {problem}")
        _log.warning("%s had mode %04o, and is closed to others now", self.root, mode)

    # Files

    def create(self, name: str) -> int:
        """A new file, open for reading and writing."""
        return self._open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR)

    def open(self, name: str) -> int:
        """A file that is there, open for reading; what is not a regular file is not there."""
        fd = self._open(name, os.O_RDONLY)
        with _closed_on_error(fd):
            _check_regular(os.fstat(fd), name)
        return fd

    def open_locked(self, name: str) -> int:
        """Like `open`, with a shared lock, under which nobody writes into the file although its name may go.

        Raises `BlockingIOError` if the name went while it was opened.
        """
        with self._at(name) as at:
            fd = os.open(at.leaf, os.O_RDONLY | _OPEN_FILE, dir_fd=at.fd)
            with _closed_on_error(fd):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                mine, named = os.fstat(fd), os.stat(at.leaf, dir_fd=at.fd, follow_symlinks=False)
                _check_regular(mine, name)
                if mine.st_ino != named.st_ino:
                    raise BlockingIOError(errno.EAGAIN, "the name went to another file", name)
            return fd

    def open_again(self, name: str, bytes_max: int) -> int:
        """A file to write anew, with its exclusive lock. Raises `BlockingIOError` while somebody reads it.

        Raises `FileExistsError` if it has another name, under which it must not change, or more than `bytes_max`.
        """
        fd = self._open(name, os.O_RDWR)
        with _closed_on_error(fd):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(fd)
            _check_regular(status, name)
            if status.st_nlink != 1 or status.st_size > bytes_max:
                raise FileExistsError(errno.EEXIST, "the file has another name, or is too large", name)
        return fd

    def open_shared(self, name: str) -> int:
        """A file to lock or to update in place, created if it is not there."""
        return self._open(name, os.O_CREAT | os.O_RDWR)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        """How many bytes of the views, at most IOV_MAX of them, were written at `offset`; can be fewer than all."""
        return os.pwritev(fd, views, offset)

    def read(self, fd: int, view: memoryview, offset: int) -> int:
        """How many bytes were read from `offset` into `view`; 0 at the end."""
        return os.preadv(fd, [view], offset)

    def bytes_of(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def links_of(self, fd: int) -> int:
        return os.fstat(fd).st_nlink

    def start_writing_back(self, fd: int) -> None:
        """A hint, before many `sync`: the device gets the writes of all files at once, not file by file."""
        if _sync_file_range is not None:
            _sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)

    def sync(self, fd: int) -> None:
        """The file's bytes are on stable storage afterwards; its name need not be."""
        os.fdatasync(fd)

    def close_file(self, fd: int) -> None:
        os.close(fd)

    def try_lock(self, fd: int) -> bool:
        """Take the file's exclusive lock, which goes with the last descriptor of this opening; False if taken."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_UN)

    # Names

    def link(self, old: str, new: str) -> None:
        """A second name for a file; raises `FileExistsError`, and changes nothing, if `new` is there."""
        with self._at(old) as source, self._at(new) as target:
            os.link(source.leaf, target.leaf, src_dir_fd=source.fd, dst_dir_fd=target.fd, follow_symlinks=False)

    def rename(self, old: str, new: str) -> None:
        with self._at(old) as source, self._at(new) as target:
            os.rename(source.leaf, target.leaf, src_dir_fd=source.fd, dst_dir_fd=target.fd)

    def unlink(self, name: str) -> None:
        with self._at(name) as at:
            os.unlink(at.leaf, dir_fd=at.fd)

    def make_directory(self, name: str) -> None:
        """Create a directory; one that is there is good if `open_directory` would open it."""
        with self._at(name) as at, contextlib.suppress(FileExistsError):
            os.mkdir(at.leaf, 0o700, dir_fd=at.fd)

    def is_open(self, name: str) -> bool:
        """Whether the directory is kept open, so that it was there and is, unless somebody removes it by hand."""
        return name in self._kept

    def remove_directory(self, name: str) -> None:
        with self._at(name) as at:
            os.rmdir(at.leaf, dir_fd=at.fd)

    def sync_directory(self, name: str) -> None:
        """The names in the directory are on stable storage afterwards; '' is the root."""
        with self._at(f"{name}/." if name else ".") as at:
            os.fsync(at.fd)

    def scan(self, name: str) -> Sequence[Listed]:
        """What is in a directory; names that come or go meanwhile may be missed."""
        listed = []
        with self._at(f"{name}/.") as at, os.scandir(at.fd) as entries:
            for entry in entries:
                bytes_ = links = 0
                if is_file := entry.is_file(follow_symlinks=False):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    bytes_, links = status.st_size, status.st_nlink
                listed.append(Listed(entry.name, entry.is_dir(follow_symlinks=False), is_file, bytes_, links))
        return listed

    def names(self, name: str) -> Sequence[str]:
        with self._at(f"{name}/.") as at, os.scandir(at.fd) as entries:
            return [entry.name for entry in entries]

    def stat(self, name: str) -> os.stat_result:
        with self._at(name) as at:
            return os.stat(at.leaf, dir_fd=at.fd, follow_symlinks=False)

    # The whole

    def block_bytes(self) -> int:
        """What the file system allots at least to a file that is not empty."""
        return os.fstatvfs(self._root).f_frsize

    def bytes_free(self) -> int:
        """What the file system still has for us; 0 if it has no file left to give."""
        status = os.fstatvfs(self._root)
        full = status.f_files > 0 and status.f_favail == 0
        return 0 if full else status.f_bavail * status.f_frsize

    def keep_open(self, *prefixes: str) -> None:
        """Keep directories open whose names begin so: they do not go, unless somebody removes them by hand."""
        self._lasting += prefixes

    def forget(self, name: str) -> None:
        """Open a directory and those above it anew: somebody may have removed one by hand."""
        with self._lock:
            parts = name.split("/")
            for depth in range(1, len(parts) + 1):
                fd = self._kept.pop("/".join(parts[:depth]), None)
                if fd is not None:
                    self._retired.append(fd)  # other threads may be using it

    def close(self) -> None:
        """Nobody may be using the directory any more."""
        for fd in (*self._kept.values(), *self._retired, self._root):
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        with self._at(name) as at:
            return os.open(at.leaf, flags | _OPEN_FILE, 0o600, dir_fd=at.fd)

    def _at(self, name: str) -> _Place:
        """The open directory of a name, reached component by component, and the last component."""
        upper, _, leaf = name.rpartition("/")
        kept = self._kept.get(upper) if upper else self._root
        if kept is not None:
            return _Place(kept, leaf, owned=False)
        with self._at(upper) as above:
            fd = os.open(above.leaf, _OPEN_DIRECTORY, dir_fd=above.fd)
        lasts = "/" not in upper or upper.startswith(self._lasting)
        return _Place(fd, leaf, owned=not (lasts and self._keep(upper, fd)))

    def _keep(self, name: str, fd: int) -> bool:
        with self._lock:
            if name in self._kept or len(self._kept) + len(self._retired) >= self._kept_max:
                return False
            self._kept[name] = fd
            return True


class _Place:
    """An open directory, and a name in it."""

    __slots__ = ("_owned", "fd", "leaf")

    def __init__(self, fd: int, leaf: str, *, owned: bool) -> None:
        self.fd = fd
        self.leaf = leaf
        self._owned = owned

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            os.close(self.fd)


def _make_lasting_directory(path: Path) -> None:
    if path.is_dir():
        return
    _make_lasting_directory(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


def _check_regular(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)


def _find_sync_file_range() -> ctypes._NamedFuncPointer | None:
    function: ctypes._NamedFuncPointer | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _find_sync_file_range()
