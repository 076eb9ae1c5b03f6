"""`WitnessedTier`: of a tier that dies with its process, a file remembers the names, so that its loss is known.

What was written into the file outlives the process, however it dies. It need not outlive the node, so nothing is ever
synced, and it is removed when the tier is closed. Nothing that is there is taken from it: what it names is gone.

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

from tiered_cache.errors import TierError
from tiered_cache.tiers.base import PutItem, PutOutcome, Reservation, Tier, TierEntry, is_path
from tiered_cache.tiers.wrappers import WrappedTier

SLOTS_MAX = 1 << 16
"""How many names are remembered, at most; of what is more, a loss is not known."""
_HEAD = struct.Struct("<HQ")
_SLOT_BYTES = 256  # within one page of the system: a process that dies does not tear it
_PATH_BYTES_MAX = _SLOT_BYTES - _HEAD.size
_FREE = bytes(_HEAD.size)


class Witness:
    """The names that are in a tier now, and those that were in it when an earlier process died."""

    def __init__(self, path: Path, slots_max: int = SLOTS_MAX) -> None:
        """Raises `TierError` if the file cannot be had, or a process that is alive keeps it."""
        self._path = path
        self._slots_max = slots_max
        self._lock = threading.Lock()
        self._noted: dict[str, int] = {}
        self._lost: dict[str, tuple[int, int]] = {}  # slot and footprint; the oldest first, as far as slots tell
        self._free: list[int] = []
        file = -1
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = os.pread(file, slots_max * _SLOT_BYTES, 0)
        except OSError as error:
            if file >= 0:
                os.close(file)
            raise TierError(f"no file of names: {error}", str(path)) from error
        self._file: int | None = file
        self._slots = -(-len(content) // _SLOT_BYTES)
        for slot in range(self._slots):
            entry = _parse(content[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES])
            if entry is None or entry.path in self._lost:
                self._free.append(slot)
            else:
                self._lost[entry.path] = slot, entry.bytes

    def lost(self) -> list[TierEntry]:
        """What died with earlier processes and has not come again since, with its footprint."""
        with self._lock:
            return [TierEntry(path, bytes_) for path, (_, bytes_) in self._lost.items()]

    def note(self, path: str, footprint: int) -> None:
        """It is there now, or will be in a moment."""
        name = path.encode()
        with self._lock:
            slot = self._slot_for(path) if len(name) <= _PATH_BYTES_MAX else None
            if slot is not None and self._write(slot, _HEAD.pack(len(name), footprint) + name):
                self._noted[path] = slot

    def strike(self, paths: Iterable[str]) -> None:
        """They are not there any more, and this is known."""
        with self._lock:
            for path in paths:
                slot = self._noted.pop(path, None)
                if slot is not None and self._write(slot, _FREE):
                    self._free.append(slot)

    def close(self) -> None:
        """Nothing is lost that was closed: the file goes. A second call does nothing."""
        with self._lock:
            self._end()

    def _slot_for(self, path: str) -> int | None:
        """A place for one more name: the one of what was lost, of this name or else the oldest, if no other is free."""
        if self._file is None or path in self._noted:
            return None
        if path in self._lost:
            return self._lost.pop(path)[0]
        if self._free:
            return self._free.pop()
        if self._slots < self._slots_max:
            self._slots += 1
            return self._slots - 1
        return self._lost.pop(next(iter(self._lost)))[0] if self._lost else None

    def _write(self, slot: int, content: bytes) -> bool:
        """A witness that cannot write says nothing any more: it would say what is wrong."""
        try:
            if self._file is not None and os.pwrite(self._file, content, slot * _SLOT_BYTES) == len(content):
                return True
        except OSError:
            pass
        self._end()
        return False

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(file)


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
        return self._witness.lost()

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
