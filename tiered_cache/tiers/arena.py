"""Warm memory that is used again and again: `Arena`, an allocator of runs of bytes in large private mappings.

The first touch of a page costs many times a copy into it, so freed memory stays mapped and is handed out first. A
request gets one run if there is one that holds it; a fragmented arena answers with several, so that a request
succeeds whenever its bytes are free, and the sum of what was granted is all that counts. What has been touched
never exceeds the limit.

    arena = [segment of 256 MiB]*      mapped when first needed
    run   = (start, bytes)             start is an address over all segments; no run crosses a segment's end
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tiered_cache.tiers.base import ALIGNMENT

GRANULE_BYTES = 512
"""Runs begin at multiples of this and fill whole multiples: a multiple of `ALIGNMENT`, small against a frame."""
SEGMENT_BYTES = 256 << 20

Run = tuple[int, int]
Array = npt.NDArray[np.uint8]


def granules(bytes_: int) -> int:
    """`bytes_` rounded up to whole granules."""
    return -(-bytes_ // GRANULE_BYTES) * GRANULE_BYTES


class Arena:
    """At most `bytes_max` of memory, in runs. Safe from every thread; copies happen outside its lock."""

    def __init__(self, bytes_max: int) -> None:
        self._lock = threading.Lock()
        self._bytes_max = bytes_max
        self._segments: list[Array] = []
        self._maps: list[mmap.mmap] = []
        self._top = 0  # everything below was handed out at least once, or is the cold rest of a segment
        self._sizes: list[Run] = []  # free runs as (bytes, start), sorted: the first that holds a request fits best
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._freed_later: deque[Sequence[Run]] = deque()  # filled by finalizers, which must not take a lock

    def allocate(self, bytes_: int, *, in_one: bool = False, spare: int = 0) -> tuple[Run, ...] | None:
        """Runs of together `granules(bytes_)`, or None if there are none; with `in_one` at most one run.

        None, too, if the system does not give what the limit would allow.

        `spare` are bytes of the limit that the owner uses for something else: so much memory stays untouched.
        """
        need = granules(bytes_)
        if not need:
            return ()
        with self._lock:
            self._free_late()
            run = self._take_one(need) or self._extend(need, self._bytes_max - spare)
            if run:
                return (run,)
            return None if in_one else self._take_many(need, self._bytes_max - spare)

    def free(self, runs: Sequence[Run]) -> None:
        with self._lock:
            for start, bytes_ in runs:
                self._free(start, bytes_)

    def free_later(self, runs: Sequence[Run]) -> None:
        """For finalizers, which can run inside any other call: the runs are free at the next `allocate`."""
        self._freed_later.append(runs)

    def arrays(self, runs: Sequence[Run]) -> list[Array]:
        """The memory of the runs, in order; writable."""
        return [self._array(start, bytes_) for start, bytes_ in runs]

    def lend(
        self, run: Run, offset: int, bytes_: int, returned: Callable[[], None], *, writable: bool = False
    ) -> memoryview:
        """A view of a part of one run; `returned` is called once no view of it is left, from any thread."""
        array = self._array(run[0] + offset, bytes_)
        array.flags.writeable = writable
        # The finalizer is on the array, not on the view: every slice of a view keeps the array alive, not the view.
        weakref.finalize(array, returned).atexit = False
        return array.data

    def set_limit(self, bytes_max: int) -> None:
        """Change the limit; a smaller one gives idle memory back to the system now and as more is freed."""
        with self._lock:
            self._free_late()
            self._bytes_max = bytes_max
            if self._top > bytes_max:
                for start, bytes_ in list(self._by_start.items()):
                    self._release_pages(start, bytes_)

    def _array(self, start: int, bytes_: int) -> Array:
        segment, offset = divmod(start, SEGMENT_BYTES)
        return self._segments[segment][offset : offset + bytes_]

    def _take_one(self, need: int) -> Run | None:
        index = bisect.bisect_left(self._sizes, (need, -1))
        if index == len(self._sizes):
            return None
        bytes_, start = self._sizes[index]
        self._forget(start, bytes_)
        if bytes_ > need:
            self._remember(start + need, bytes_ - need)
        return start, need

    def _extend(self, need: int, limit: int) -> Run | None:
        """A run that ends in memory that was never used, and begins with what is free just below."""
        warm, room = self._warm_end(), -self._top % SEGMENT_BYTES
        skipped = 0
        if warm + room < need:  # the rest of the segment is left to smaller requests
            warm, skipped = 0, room
        if need > SEGMENT_BYTES or self._top + skipped + need - warm > limit:
            return None
        if skipped:
            self._top += skipped
            self._free(self._top - skipped, skipped)
        if self._top == len(self._maps) * SEGMENT_BYTES and not self._map():
            return None
        if warm:
            self._forget(self._top - warm, warm)
        self._top += need - warm
        return self._top - need, need

    def _warm_end(self) -> int:
        """How many bytes are free just below the memory that was never used, in the same segment."""
        return self._by_end.get(self._top, 0) if self._top % SEGMENT_BYTES else 0

    def _map(self) -> bool:
        """Whether the system gave another segment."""
        try:
            memory = mmap.mmap(-1, SEGMENT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:
            return False
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(memory)
        self._segments.append(np.frombuffer(memory, dtype=np.uint8))
        return True

    def _take_many(self, need: int, limit: int) -> tuple[Run, ...] | None:
        """Cold memory up to a segment's end first, then the largest runs there are."""
        runs: list[Run] = []
        while need:
            run = self._take_one(need)
            if run is None:
                warm = self._warm_end()
                cold = min(need - warm, -self._top % SEGMENT_BYTES or SEGMENT_BYTES, limit - self._top)
                cold -= cold % GRANULE_BYTES
                run = self._extend(warm + cold, limit) if cold > 0 else None
            if run is None and self._sizes:
                run = self._take_one(self._sizes[-1][0])
            if run is None:
                for start, bytes_ in runs:
                    self._free(start, bytes_)
                return None
            runs.append(run)
            need -= run[1]
        return tuple(runs)

    def _free_late(self) -> None:
        while self._freed_later:
            for start, bytes_ in self._freed_later.popleft():
                self._free(start, bytes_)

    def _free(self, start: int, bytes_: int) -> None:
        """Join the run with its free neighbours in the segment."""
        if start % SEGMENT_BYTES and start in self._by_end:
            before = self._by_end[start]
            self._forget(start - before, before)
            start, bytes_ = start - before, bytes_ + before
        if (start + bytes_) % SEGMENT_BYTES and start + bytes_ in self._by_start:
            after = self._by_start[start + bytes_]
            self._forget(start + bytes_, after)
            bytes_ += after
        self._remember(start, bytes_)
        if self._top > self._bytes_max:
            self._release_pages(start, bytes_)

    def _remember(self, start: int, bytes_: int) -> None:
        bisect.insort(self._sizes, (bytes_, start))
        self._by_start[start] = bytes_
        self._by_end[start + bytes_] = bytes_

    def _forget(self, start: int, bytes_: int) -> None:
        del self._sizes[bisect.bisect_left(self._sizes, (bytes_, start))]
        del self._by_start[start]
        del self._by_end[start + bytes_]

    def _release_pages(self, start: int, bytes_: int) -> None:
        segment, offset = divmod(start, SEGMENT_BYTES)
        first = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (offset + bytes_) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._maps[segment].madvise(mmap.MADV_DONTNEED, first, end - first)


def aligned_empty(bytes_: int) -> Array:
    """A new buffer that begins at a multiple of `ALIGNMENT`; its pages are cold."""
    whole = np.empty(bytes_ + ALIGNMENT, dtype=np.uint8)
    offset = -whole.ctypes.data % ALIGNMENT
    return whole[offset : offset + bytes_]
