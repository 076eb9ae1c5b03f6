"""Seeded trouble for tests: a tier that fails, and directories that fail, die, or lose what was not synced.

`FaultyTier` wraps any tier, so that what is built on tiers can be tried against every fault that a tier may show.
`FaultyDirectory` goes under `DiskTier(open_directory=...)`: system calls fail, or the process dies at any of them.
`Storage` and its `VolatileDirectory` remember what was synced; `Storage.power_cut` makes what may be left of it.
"""

from __future__ import annotations

import enum
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tiered_cache.errors import CapacityError, TierError
from tiered_cache.tiers.base import (
    GetAnswer,
    GetRequest,
    PutItem,
    PutOutcome,
    QuarantinedEntry,
    Reservation,
    Tier,
    TierEntry,
    TierUsage,
)
from tiered_cache.tiers.directory import Directory


class SimulatedCrash(BaseException):
    """The process is dead: no handler may act on it, and nothing that it does afterwards has an effect."""


class Fault(enum.Enum):
    """What can be wrong with one call, or with one answer of a `get`."""

    ERROR = "error"  # `TierError`, and nothing was done
    LOST_ANSWER = "lost answer"  # `TierError`, and all was done
    FULL = "full"  # `CapacityError` from `reserve` or `put`
    SHORT = "short"  # an answer that ends too early
    FLIP = "flip"  # an answer with one bit changed
    DELAY = "delay"  # the call takes `delay_s` longer
    CRASH_BEFORE = "crash before"  # `SimulatedCrash`, and nothing was done
    CRASH_AFTER = "crash after"  # `SimulatedCrash`, and all was done


_WRITE_BACK_RATE = 0.05


class FaultyTier(Tier):
    """`inner` with faults: each of `rates` (fault -> probability) is drawn for every call, or answer, by `seed`.

    `inject` makes one certain. `sleep` is called for a delay; tests hand in their own clock's. What was injected is
    counted in `injected`.
    """

    def __init__(
        self,
        inner: Tier,
        seed: int = 0,
        rates: Mapping[Fault, float] | None = None,
        *,
        delay_s: float = 1.0,
        sleep: Callable[[float], None] = lambda _: None,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.durability = inner.durability
        self.rates = dict(rates or {})
        self.delay_s = delay_s
        self.injected: Counter[Fault] = Counter()
        self._sleep = sleep
        self._random = random.Random(seed)  # noqa: S311 - nothing here is a secret
        self._lock = threading.Lock()
        self._next: dict[str, list[Fault]] = {}

    def inject(self, call: str, fault: Fault) -> None:
        """Let the next `call` (a method's name) that can show this fault show it; more than one queue up."""
        with self._lock:
            self._next.setdefault(call, []).append(fault)

    @property
    def bytes_max(self) -> int:
        return self.inner.bytes_max

    def footprint(self, bytes_: int) -> int:
        return self.inner.footprint(bytes_)

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        self._before("reserve", can_be_full=True)
        reservation = self.inner.reserve(sizes)
        try:
            self._after("reserve")
        except TierError:
            reservation.release()
            raise
        return reservation

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        self._before("put", can_be_full=True)
        outcomes = self.inner.put(items, reservation)
        self._after("put")
        return outcomes

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        for fault in (Fault.DELAY, Fault.CRASH_BEFORE):
            self._maybe("get", fault)
        answers = [self._answer(answer) for answer in self.inner.get(requests)]
        self._maybe("get", Fault.CRASH_AFTER)
        return answers

    def stat(self, paths: Sequence[str]) -> Sequence[int | None]:
        self._before("stat")
        return self.inner.stat(paths)

    def list(self, prefix: str = "") -> Iterator[TierEntry]:
        self._before("list")
        return self.inner.list(prefix)

    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        self._before("delete")
        there = self.inner.delete(paths)
        self._after("delete")
        return there

    def quarantine(self, path: str, reason: str) -> bool:
        self._before("quarantine")
        there = self.inner.quarantine(path, reason)
        self._after("quarantine")
        return there

    def quarantined(self) -> Sequence[QuarantinedEntry]:
        self._before("quarantined")
        return self.inner.quarantined()

    def usage(self) -> TierUsage:
        return self.inner.usage()

    def set_limit(self, bytes_max: int) -> int:
        return self.inner.set_limit(bytes_max)

    def close(self) -> None:
        self.inner.close()

    def _before(self, call: str, *, can_be_full: bool = False) -> None:
        for fault in (Fault.DELAY, Fault.CRASH_BEFORE, Fault.ERROR):
            self._maybe(call, fault)
        if can_be_full and self._drawn(call, Fault.FULL):
            raise CapacityError("injected: there is no room", None, self.name)

    def _after(self, call: str) -> None:
        for fault in (Fault.LOST_ANSWER, Fault.CRASH_AFTER):
            self._maybe(call, fault)

    def _maybe(self, call: str, fault: Fault) -> None:
        if not self._drawn(call, fault):
            return
        if fault is Fault.DELAY:
            self._sleep(self.delay_s)
        elif fault in {Fault.CRASH_BEFORE, Fault.CRASH_AFTER}:
            raise SimulatedCrash(f"{fault.value} {call}")
        else:
            raise TierError(f"injected: {fault.value} in {call}", None, self.name, retryable=True)

    def _answer(self, answer: GetAnswer) -> GetAnswer:
        if not isinstance(answer, memoryview):
            return answer
        if self._drawn("get", Fault.ERROR):
            return TierError("injected: error in get", None, self.name, retryable=True)
        if answer.nbytes and self._drawn("get", Fault.SHORT):
            answer = answer[: self._random.randrange(answer.nbytes)]
        if answer.nbytes and self._drawn("get", Fault.FLIP):
            target = memoryview(bytearray(answer)) if answer.readonly else answer
            target[self._random.randrange(answer.nbytes)] ^= 1 << self._random.randrange(8)
            answer = target.toreadonly() if answer.readonly else answer
        return answer

    def _drawn(self, call: str, fault: Fault) -> bool:
        with self._lock:
            queued = self._next.get(call, [])
            drawn = fault in queued
            if drawn:
                queued.remove(fault)
            elif rate := self.rates.get(fault, 0.0):
                drawn = self._random.random() < rate
            self.injected[fault] += drawn
            return drawn


class FaultyDirectory(Directory):
    """A directory whose calls are numbered from 1 and can fail; after a crash none has an effect.

    `on_step` is called with the number and the name of each call before it is made; it may raise. `die(step)` lets
    the process die at a step: before the call, or half-way through a write and after any other call.
    """

    def __init__(self, root: Path, on_step: Callable[[int, str], None] | None = None) -> None:
        self.steps: list[str] = []
        self.on_step = on_step
        self._die_at = 0
        self._half_done = False
        self.dead = False
        self._open_fds: set[int] = set()
        super().__init__(root)

    def die(self, step: int, *, half_done: bool) -> None:
        self._die_at, self._half_done = step, half_done

    def fail(self, call: str, error: int, times: int = 1) -> None:
        """Let the next `times` calls of this name fail with an `errno`, at once and without effect."""
        left = times

        def on_step(_: int, name: str) -> None:
            nonlocal left
            if name == call and left:
                left -= 1
                raise OSError(error, os.strerror(error))

        self.on_step = on_step

    def bury(self) -> None:
        """Close what a dead process had open, as the system does: its locks go."""
        for fd in self._open_fds:
            os.close(fd)
        self._open_fds.clear()
        super().close()

    def step(self, call: str, act: Callable[[], object], half: Callable[[], object]) -> object:
        """One call: `act`, unless it fails or the process dies."""
        if self.dead:
            raise SimulatedCrash(call)
        self.steps.append(call)
        if self.on_step is not None:
            self.on_step(len(self.steps), call)
        if len(self.steps) == self._die_at:
            self.dead = True
            if self._half_done:
                half()
            raise SimulatedCrash(call)
        result = act()
        if call in _OPENING:
            assert isinstance(result, int)
            self._open_fds.add(result)
        return result

    def close_file(self, fd: int) -> None:
        """A step like the others, but the file is closed also if it fails, as the system does it."""
        if not self.dead:
            super().close_file(fd)
            self._open_fds.discard(fd)
            self.step("close_file", lambda: None, lambda: None)

    def write(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        def half() -> int:
            return Directory.write(self, fd, [views[0][: views[0].nbytes // 2]], offset)

        written = self.step("write", lambda: Directory.write(self, fd, views, offset), half)
        assert isinstance(written, int)
        return written

    def close(self) -> None:
        if not self.dead:
            super().close()


_OPENING = ("create", "open", "open_locked", "open_again", "open_shared")
_STEPS = (
    *_OPENING,
    *("read", "sync", "link", "rename", "unlink", "make_directory", "remove_directory", "sync_directory"),
    *("scan", "names", "stat", "try_lock", "unlock"),
)


# The methods below differ in their names alone; a subclass overrides them, and calls them, as any others.
def _numbered(call: str) -> Callable[..., object]:
    real = getattr(Directory, call)

    def method(self: FaultyDirectory, *args: object) -> object:
        def act() -> object:
            return real(self, *args)

        return self.step(call, act, act)

    return method


for _call in _STEPS:
    setattr(FaultyDirectory, _call, _numbered(_call))


class Storage:
    """What of one directory is on stable storage: names once their directory was synced, bytes once their file was.

    Nothing else survives for certain, and nothing else is lost for certain: not a name that came or went since, not
    the order of two changes, not the new bytes of a file, of which any beginning may have been written. Now and then,
    by `seed`, the system writes back a directory or a file of its own accord.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root = root
        self._random = random.Random(seed)  # noqa: S311 - nothing here is a secret
        self._names: dict[str, dict[str, tuple[int, bool]]] = {}  # directory -> name -> inode, whether a directory
        self._bytes: dict[int, bytes] = {}
        self._pins: dict[int, int] = {}  # every file stays open, so that no inode is used for a second file

    def open_directory(self, root: Path) -> VolatileDirectory:
        """For `DiskTier(open_directory=...)`."""
        assert root == self.root
        return VolatileDirectory(root, self)

    def created(self, fd: int) -> None:
        self._pins.setdefault(os.fstat(fd).st_ino, os.dup(fd))

    def file_synced(self, fd: int) -> None:
        self._bytes[os.fstat(fd).st_ino] = _bytes_now(fd)

    def directory_synced(self, name: str) -> None:
        self._names[name] = _names_now(self.root / name)

    def write_back_at_will(self) -> None:
        if self._random.random() < _WRITE_BACK_RATE and self._pins:
            inode = self._random.choice(sorted(self._pins))
            self._bytes[inode] = _bytes_now(self._pins[inode])
        if self._random.random() < _WRITE_BACK_RATE:
            self.directory_synced(self._random.choice(_directories(self.root)))

    def power_cut(self, target: Path, seed: int) -> None:
        """Make at `target` what the directory may be after a power cut now; another `seed`, other luck."""
        self._rebuild("", target, random.Random(seed))  # noqa: S311 - nothing here is a secret

    def close(self) -> None:
        for fd in self._pins.values():
            os.close(fd)
        self._pins.clear()

    def _rebuild(self, name: str, target: Path, rng: random.Random) -> None:
        target.mkdir(mode=0o700)
        synced, now = self._names.get(name, {}), _names_now(self.root / name)
        for entry in sorted(synced.keys() | now.keys()):
            chosen = rng.choice((synced.get(entry), now.get(entry)))
            if chosen is None:
                continue
            inode, is_directory = chosen
            if is_directory:
                self._rebuild(f"{name}/{entry}".lstrip("/"), target / entry, rng)
            else:
                (target / entry).write_bytes(self._survives(inode, rng))

    def _survives(self, inode: int, rng: random.Random) -> bytes:
        if inode not in self._pins:  # the process died while it created it
            return b""
        synced, now = self._bytes.get(inode, b""), _bytes_now(self._pins[inode])
        if synced == now:
            return synced
        written = rng.randrange(len(now) + 1)
        return rng.choice((synced, now, now[:written], now[:written] + synced[written:], bytes(len(now))))


class VolatileDirectory(FaultyDirectory):
    """A directory on a `Storage`."""

    def __init__(self, root: Path, storage: Storage) -> None:
        self._storage = storage
        super().__init__(root, lambda *_: storage.write_back_at_will())

    def create(self, name: str) -> int:
        fd = super().create(name)
        self._storage.created(fd)
        return fd

    def open_shared(self, name: str) -> int:
        fd = super().open_shared(name)
        self._storage.created(fd)
        return fd

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._storage.file_synced(fd)

    def sync_directory(self, name: str) -> None:
        super().sync_directory(name)
        self._storage.directory_synced(name)


def _directories(root: Path) -> list[str]:
    found = [str(Path(folder).relative_to(root)) for folder, _, _ in os.walk(root)]
    return sorted("" if name == "." else name for name in found)


def _bytes_now(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _names_now(directory: Path) -> dict[str, tuple[int, bool]]:
    entries = directory.iterdir() if directory.is_dir() else ()
    return {entry.name: (entry.stat().st_ino, entry.is_dir()) for entry in entries}
