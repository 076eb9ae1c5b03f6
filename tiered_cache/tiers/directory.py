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
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered_cache.errors import ConfigError

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO in a file's place must not block
_KEPT_MAX = 64
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
    """The private directory at `root`, created if it is not there.

    Raises `ConfigError` if it is a symbolic link, belongs to another user, can be written by others, or lies in a
    directory in which others can replace it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._kept: dict[str, int] = {}  # open upper directories; none is closed before `close`
        self._retired: list[int] = []
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
        with self._at(name) as (directory, leaf):
            fd = os.open(leaf, os.O_RDONLY | _OPEN_FILE, dir_fd=directory)
            with _closed_on_error(fd):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                mine, named = os.fstat(fd), os.stat(leaf, dir_fd=directory, follow_symlinks=False)
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
        with self._at(old) as (old_fd, old_leaf), self._at(new) as (new_fd, new_leaf):
            os.link(old_leaf, new_leaf, src_dir_fd=old_fd, dst_dir_fd=new_fd, follow_symlinks=False)

    def rename(self, old: str, new: str) -> None:
        with self._at(old) as (old_fd, old_leaf), self._at(new) as (new_fd, new_leaf):
            os.rename(old_leaf, new_leaf, src_dir_fd=old_fd, dst_dir_fd=new_fd)

    def unlink(self, name: str) -> None:
        with self._at(name) as (fd, leaf):
            os.unlink(leaf, dir_fd=fd)

    def make_directory(self, name: str) -> None:
        """Create a directory; one that is there is good if `open_directory` would open it."""
        with self._at(name) as (fd, leaf), contextlib.suppress(FileExistsError):
            os.mkdir(leaf, 0o700, dir_fd=fd)

    def remove_directory(self, name: str) -> None:
        with self._at(name) as (fd, leaf):
            os.rmdir(leaf, dir_fd=fd)

    def sync_directory(self, name: str) -> None:
        """The names in the directory are on stable storage afterwards; '' is the root."""
        with self._at(f"{name}/." if name else ".") as (fd, _):
            os.fsync(fd)

    def scan(self, name: str) -> Sequence[Listed]:
        """What is in a directory; names that come or go meanwhile may be missed."""
        listed = []
        with self._at(f"{name}/.") as (fd, _), os.scandir(fd) as entries:
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
        with self._at(f"{name}/.") as (fd, _), os.scandir(fd) as entries:
            return [entry.name for entry in entries]

    def stat(self, name: str) -> os.stat_result:
        with self._at(name) as (fd, leaf):
            return os.stat(leaf, dir_fd=fd, follow_symlinks=False)

    # The whole

    def block_bytes(self) -> int:
        """What the file system allots at least to a file that is not empty."""
        return os.fstatvfs(self._root).f_frsize

    def bytes_free(self) -> int:
        """What the file system still has for us; 0 if it has no file left to give."""
        status = os.fstatvfs(self._root)
        full = status.f_files > 0 and status.f_favail == 0
        return 0 if full else status.f_bavail * status.f_frsize

    def forget_directories(self) -> None:
        """Open directories anew: somebody removed one by hand."""
        with self._lock:
            self._retired += self._kept.values()  # other threads may be using them
            self._kept = {}

    def close(self) -> None:
        """Nobody may be using the directory any more."""
        self.forget_directories()
        for fd in (*self._retired, self._root):
            os.close(fd)

    def _open(self, name: str, flags: int) -> int:
        with self._at(name) as (fd, leaf):
            return os.open(leaf, flags | _OPEN_FILE, 0o600, dir_fd=fd)

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[tuple[int, str]]:
        """The open directory of a name, reached component by component, and the last component."""
        upper, _, leaf = name.rpartition("/")
        kept = self._kept.get(upper) if upper else self._root
        if kept is not None:
            yield kept, leaf
            return
        with self._at(upper) as (above, component):
            fd = os.open(component, _OPEN_DIRECTORY, dir_fd=above)
        if upper.count("/") <= 1 and self._keep(upper, fd):
            yield fd, leaf
            return
        try:
            yield fd, leaf
        finally:
            os.close(fd)

    def _keep(self, name: str, fd: int) -> bool:
        with self._lock:
            if name in self._kept or len(self._kept) >= _KEPT_MAX:
                return False
            self._kept[name] = fd
            return True


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
