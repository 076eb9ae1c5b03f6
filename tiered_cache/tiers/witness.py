"""`WitnessedTier`: of a tier that dies with its process, a file remembers the names, so that its loss is known.

What was written into the file outlives the process, however it dies. It need not outlive the node, so nothing is ever
synced, and it is removed when the tier is closed. What it names is gone: nothing is ever taken from there. A death is
told once, to the process that comes next. The file may be on a disk that hangs: nobody waits for it.

    file = slot ...        slot = length of path u16 | footprint u64 | path [246]          little-endian, 0: free
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from tiered_cache.deadline import CLOSE_S
from tiered_cache.errors import TierError
from tiered_cache.executors import DaemonExecutor
from tiered_cache.tiers.base import PutItem, PutOutcome, Reservation, Tier, TierEntry, is_path
from tiered_cache.tiers.wrappers import WrappedTier

SLOTS_MAX = 1 << 16
"""How many names are remembered, at most; of what is more, a loss is not known."""
UNWRITTEN_MAX = 1 << 12
"""A file that lags so many writes behind is given up."""
_HEAD = struct.Struct("<HQ")
_SLOT_BYTES = 256  # within one page of the system: a process that dies does not tear it
_PATH_BYTES_MAX = _SLOT_BYTES - _HEAD.size
_FREE = bytes(_HEAD.size)


class Witness:
    """Writes down the names that are in a tier now, and tells those that were in it when an earlier process died."""

    def __init__(self, path: Path, slots_max: int = SLOTS_MAX) -> None:
        """Raises `TierError` if the file cannot be had, or a process that is alive keeps it."""
        self._path = path
        self._slots_max = slots_max
        try:
            self._file = _open_alone(path)
            content = os.pread(self._file, slots_max * _SLOT_BYTES, 0)
            os.ftruncate(self._file, 0)
        except OSError as error:
            raise TierError(f"no file of names: {error}", str(path)) from error
        entries = (_parse(content[start : start + _SLOT_BYTES]) for start in range(0, len(content), _SLOT_BYTES))
        self.lost: Sequence[TierEntry] = [entry for entry in entries if entry is not None]
        """What died with the process before, with its footprint."""
        self._lock = threading.Lock()
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._unwritten = 0
        self._is_over = False
        self._writer = DaemonExecutor(1, "witness")

    def note(self, path: str, footprint: int) -> None:
        """It is there now, or will be in a moment."""
        name = path.encode()
        with self._lock:
            if path in self._slots or len(name) > _PATH_BYTES_MAX:
                return
            if not self._free:
                if len(self._slots) == self._slots_max:
                    return
                self._free.append(len(self._slots))
            slot = self._slots[path] = self._free.pop()
            self._write_later(slot, _HEAD.pack(len(name), footprint) + name)

    def strike(self, paths: Iterable[str]) -> None:
        """They are not there any more, and this is known."""
        with self._lock:
            for path in paths:
                slot = self._slots.pop(path, None)
                if slot is not None:
                    self._free.append(slot)
                    self._write_later(slot, _FREE)

    def flush(self, timeout_s: float) -> None:
        """Wait until what was said is written down. Raises `TimeoutError`."""
        self._writer.submit(lambda: None).result(timeout_s)

    def close(self) -> None:
        """Nothing is lost that was closed: the file goes. A second call does nothing."""
        with self._lock:
            self._end_later()
        with suppress(TimeoutError):
            self.flush(CLOSE_S)

    def _write_later(self, slot: int, content: bytes) -> None:
        if self._unwritten == UNWRITTEN_MAX:
            self._end_later()
        elif not self._is_over:
            self._unwritten += 1
            self._writer.submit(self._write, slot, content)

    def _end_later(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._writer.submit(self._end)

    def _write(self, slot: int, content: bytes) -> None:
        """A witness that cannot write ends: it would say what is wrong."""
        try:
            written = os.pwrite(self._file, content, slot * _SLOT_BYTES)
        except OSError:
            written = 0
        with self._lock:
            self._unwritten -= 1
            if written != len(content):
                self._end_later()

    def _end(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._file)


def _open_alone(path: Path) -> int:
    """The file of this name, created if it is not there, and locked. Raises `OSError`."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.lstat()):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # who had it before has removed it meanwhile


def _parse(slot: bytes) -> TierEntry | None:
    if len(slot) < _HEAD.size:
        return None
    length, footprint = _HEAD.unpack_from(slot)
    name = slot[_HEAD.size :][:length].decode("ascii", "replace")
    return TierEntry(name, footprint) if len(name) == length and is_path(name) else None


class WitnessedTier(WrappedTier):
    """`inner`, whose entries die with its process, and a witness to what they were."""

    def __init__(self, inner: Tier, witness: Witness) -> None:
        super().__init__(inner)
        self._witness = witness

    def lost(self) -> Sequence[TierEntry]:
        return self._witness.lost

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        for item in items:  # before it is there: somebody may delete it as soon as it is
            self._witness.note(item.path, self.footprint(item.bytes))
        try:
            return super().put(items, reservation)
        except BaseException:
            with suppress(TierError):
                paths = [item.path for item in items]
                self._witness.strike(path for path, size in zip(paths, self.stat(paths), strict=True) if size is None)
            raise

    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        there = super().delete(paths)
        self._witness.strike(paths)
        return there

    def quarantine(self, path: str, reason: str) -> bool:
        was_there = super().quarantine(path, reason)
        self._witness.strike([path])
        return was_there

    def close(self) -> None:
        super().close()
        self._witness.close()
