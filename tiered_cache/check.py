"""Check a disk tier's directory or an object store from outside: every frame in full, whoever is using it meanwhile.

Reads only. A frame must have the name of its key, fit the identity and geometry that its namespace's descriptor
declares, be as long as it says, have sound checksums and zero padding, and decode. Memory is bounded by the largest
frame that a descriptor allows.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tiered_cache import frame
from tiered_cache.errors import (
    ConfigError,
    FrameError,
    FrameNotFoundError,
    IdentityError,
    TieredCacheError,
    TruncatedError,
)
from tiered_cache.executors import DaemonExecutor
from tiered_cache.identity import FrameKey
from tiered_cache.namespace import (
    DESCRIPTOR_BYTES_MAX,
    Namespace,
    descriptor_namespace,
    descriptor_path,
    read_descriptor,
)
from tiered_cache.tiers.base import GetAnswer, GetRequest, Tier, TierEntry
from tiered_cache.tiers.disk import SUFFIX

ENTRIES: Final = "entries"
"""Where a disk tier keeps what it holds; what is beside it are its temporary, spare and quarantined files."""
READ_AT_ONCE_BYTES: Final = 32 << 20
"""Of a longer file the header is checked first, so that nothing is read because of its mere length."""
READ_TOGETHER: Final = 16
"""How many entries of a tier, up to as many bytes."""
DEADLINE_S: Final = 60.0
"""How long an object store may take for them."""
_NO_DESCRIPTOR: Final = "missing: the frames of this namespace cannot be used after a restart"


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One file, and what is wrong with it."""

    path: str
    """Below the directory that was checked; an entry's name in a tier."""
    bytes: int
    error: str | None


def count_files(root: Path) -> int:
    """How many files `check_directory` will look at, if nobody changes them. Raises `ConfigError` as it does."""
    return sum(1 for _ in _files(_entries(root)))


def check_directory(root: Path) -> Iterator[CheckedFile]:
    """Every entry of the disk tier at `root`, checked in full, in the order of their names.

    A file that is deleted meanwhile is left out. Raises `ConfigError` if `root` is not a disk tier's directory.
    """
    entries = _entries(root)
    checker = _Checker(root, entries)
    for path in _files(entries):
        yield from checker.check(path)


def check_url(url: str) -> Iterator[CheckedFile]:
    """Every entry of the object store at s3://, gs://, az:// or file://, as `check_tier`.

    Credentials and endpoint come from the usual environment variables. Raises `ConfigError` for what names no store, or
    one with nothing in it: that is rather a wrong name than a sound tier.
    """
    try:
        from tiered_cache.tiers.object_store import ObjectStoreTier, open_store
    except ModuleNotFoundError as error:
        raise ConfigError(f"{url} needs the package obstore (the s3 extra): {error}") from error

    store = open_store(url, request_timeout_s=DEADLINE_S / 3, retry_timeout_s=2 * DEADLINE_S / 3, creates=False)
    executor = DaemonExecutor(READ_TOGETHER, "verify")
    with ObjectStoreTier(store, 0, executor, owns_executor=True, name=url, deadline_s=DEADLINE_S) as tier:
        is_empty = True
        for file in check_tier(tier):
            is_empty = False
            yield file
        if is_empty:
            raise ConfigError(f"{url} holds no frames")


def check_tier(tier: Tier) -> Iterator[CheckedFile]:
    """Every entry that a tier lists, checked in full, in the order of their names.

    What is deleted meanwhile is left out; what the tier cannot read is bad. Raises `TierError` if it cannot be listed.
    """
    entries = sorted(tier.list(), key=lambda entry: entry.path)
    declared = {
        namespace: _declared_in(tier, entry.path)
        for entry in entries
        if (namespace := descriptor_namespace(entry.path)) is not None
    }
    while entries:
        sizes = itertools.accumulate(entry.bytes for entry in entries[:READ_TOGETHER])
        count = max(1, sum(total <= READ_AT_ONCE_BYTES for total in sizes))
        some, entries = entries[:count], entries[count:]
        for entry in some:
            with suppress(IdentityError):
                namespace = FrameKey.parse(entry.path).namespace
                if namespace not in declared:
                    declared[namespace] = None
                    yield CheckedFile(descriptor_path(namespace), 0, _NO_DESCRIPTOR)
        for entry, answer in zip(some, _read_entries(tier, some, declared), strict=True):
            error = None
            try:
                if isinstance(answer, FrameNotFoundError):
                    continue
                if not isinstance(answer, memoryview):
                    raise answer
                _check_entry(entry.path, np.frombuffer(answer, np.uint8), declared)
            except TieredCacheError as problem:
                error = problem.message
            yield CheckedFile(entry.path, entry.bytes, error)


def _declared_in(tier: Tier, path: str) -> Namespace | None:
    """What a descriptor says, None if it is not sound, which is told when its turn comes."""
    (answer,) = tier.get([GetRequest(path, bytes=DESCRIPTOR_BYTES_MAX + 1)])
    namespace = descriptor_namespace(path)
    assert namespace is not None
    with suppress(TieredCacheError):
        if isinstance(answer, memoryview):
            return read_descriptor(bytes(answer), namespace)
    return None


def _read_entries(
    tier: Tier, entries: Sequence[TierEntry], declared: Mapping[bytes, Namespace | None]
) -> Sequence[GetAnswer | TieredCacheError]:
    """Their bytes; of a large one only if its header is sound and declares this size."""
    if len(entries) == 1 and entries[0].bytes > READ_AT_ONCE_BYTES:
        (entry,) = entries
        try:
            key = FrameKey.parse(entry.path)
            fixed = _bytes_of(tier, entry.path, frame.FIXED_HEADER_BYTES)
            header = frame.read_header(_bytes_of(tier, entry.path, frame.header_bytes(fixed)))
            _check_header(header, entry.bytes, key, declared[key.namespace])
        except TieredCacheError as error:
            return [error]
    return tier.get([GetRequest(entry.path) for entry in entries])


def _bytes_of(tier: Tier, path: str, count: int) -> npt.NDArray[np.uint8]:
    (answer,) = tier.get([GetRequest(path, bytes=count)])
    if not isinstance(answer, memoryview):
        raise answer
    return np.frombuffer(answer, np.uint8)


def _check_entry(name: str, data: npt.NDArray[np.uint8], declared: Mapping[bytes, Namespace | None]) -> None:
    """Raise unless these are a descriptor's or a frame's bytes, whole and under their name."""
    namespace = descriptor_namespace(name)
    if namespace is not None:
        read_descriptor(data.tobytes(), namespace)
        return
    key = FrameKey.parse(name)
    known = declared[key.namespace]
    if known is not None:
        frame.decode(data, key=key, identity_digest=known.identity_digest, geometry=known.geometry)
    elif (found := frame.verify(data).key) != key:
        raise FrameError(f"the file holds the frame {found.path()}")


def _check_header(header: frame.FrameHeader, size: int, key: FrameKey, declared: Namespace | None) -> None:
    """Raise unless a sound header declares this size, and what its namespace allows."""
    if header.total_bytes != size:
        raise TruncatedError(f"the file has {size} bytes, its frame {header.total_bytes}")
    if declared is not None:
        frame.check_expected(header, key=key, identity_digest=declared.identity_digest, geometry=declared.geometry)


def _entries(root: Path) -> Path:
    entries = root / ENTRIES
    try:
        is_directory = stat.S_ISDIR(entries.lstat().st_mode)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{root} is not a disk tier's directory: {ENTRIES}: {reason}") from error
    if not is_directory:
        raise ConfigError(f"{root} is not a disk tier's directory: {ENTRIES} is not a directory")
    return entries


def _files(directory: Path) -> Iterator[Path]:
    """Everything below that is not a directory; symbolic links are not followed."""
    try:
        with os.scandir(directory) as listed:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in listed)
    except FileNotFoundError:
        return
    for name, is_directory in found:
        if is_directory:
            yield from _files(directory / name)
        else:
            yield directory / name


class _Checker:
    """Checks files one after the other, in one buffer."""

    def __init__(self, root: Path, entries: Path) -> None:
        self._root = root
        self._entries = entries
        self._declared: dict[bytes, Namespace | None] = {}
        self._buffer: npt.NDArray[np.uint8] = np.empty(1 << 16, np.uint8)

    def check(self, path: Path) -> Iterator[CheckedFile]:
        """The file, unless it is gone; and its namespace's descriptor, if that is missing and was not told before."""
        name = path.relative_to(self._entries).as_posix().removesuffix(SUFFIX)
        shown = str(path.relative_to(self._root))
        if descriptor_namespace(name) is None:
            yield from self._missing_descriptor(name)
        error, size = None, 0
        try:
            with _opened(path) as fd:
                if fd is None:
                    return
                size = os.fstat(fd).st_size
                self._check(fd, size, name, path.name.endswith(SUFFIX))
        except TieredCacheError as problem:
            error = problem.message
        except OSError as problem:
            error = problem.strerror or str(problem)
        yield CheckedFile(shown, size, error)

    def _missing_descriptor(self, name: str) -> Iterator[CheckedFile]:
        try:
            namespace = FrameKey.parse(name).namespace
        except TieredCacheError:
            return
        if namespace not in self._declared and self._read_descriptor(namespace) is None:
            path = self._descriptor_path(namespace)
            if not path.exists():
                yield CheckedFile(str(path.relative_to(self._root)), 0, _NO_DESCRIPTOR)

    def _check(self, fd: int, size: int, name: str, named_as_entry: bool) -> None:
        if not named_as_entry:
            raise FrameError(f"not an entry of a disk tier: its name does not end in {SUFFIX}")
        if descriptor_namespace(name) is not None:
            size = min(size, DESCRIPTOR_BYTES_MAX + 1)
        elif size > READ_AT_ONCE_BYTES:
            header_bytes = frame.header_bytes(self._read(fd, frame.FIXED_HEADER_BYTES))
            key = FrameKey.parse(name)
            _check_header(frame.read_header(self._read(fd, header_bytes)), size, key, self._declared[key.namespace])
        _check_entry(name, self._read(fd, size), self._declared)

    def _read(self, fd: int, size: int) -> npt.NDArray[np.uint8]:
        """The first `size` bytes, fewer if there are not so many."""
        if size > self._buffer.size:
            self._buffer = np.empty(size, np.uint8)
        view = self._buffer[:size].data
        done = 0
        while done < size and (read := os.preadv(fd, [view[done:]], done)):
            done += read
        return self._buffer[:done]

    def _read_descriptor(self, namespace: bytes) -> Namespace | None:
        declared = None
        # what is wrong with it is told when the walk comes to the file itself
        with suppress(TieredCacheError, OSError), _opened(self._descriptor_path(namespace)) as fd:
            if fd is not None:
                declared = read_descriptor(self._read_document(fd), namespace)
        self._declared[namespace] = declared
        return declared

    def _read_document(self, fd: int) -> bytes:
        return self._read(fd, min(os.fstat(fd).st_size, DESCRIPTOR_BYTES_MAX + 1)).tobytes()

    def _descriptor_path(self, namespace: bytes) -> Path:
        return self._entries / namespace.hex() / f"descriptor{SUFFIX}"


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """The file, under the shared lock that keeps a live tier from reusing it; None if it is gone.

    Raises `FrameError` for what is not a regular file, and `OSError`.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd if _is_current(fd, path) else None
    finally:
        os.close(fd)


def _is_current(fd: int, path: Path) -> bool:
    """Lock the file; False if its name is gone meanwhile, and it may be another one's already."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise FrameError("not a regular file")
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return path.lstat().st_ino == status.st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
