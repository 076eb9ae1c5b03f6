"""`BytesInFlight`: a bound on the bytes that are on their way through a node, besides what its tiers hold."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from tiered_cache.deadline import wait_s
from tiered_cache.errors import CapacityError

IN_FLIGHT_BYTES = 1 << 30
WAIT_S = 30.0
_POLL_S = 0.005  # finalizers may not wake anyone


class BytesInFlight:
    """Exports that are being stored, and stored bytes that are being served, are together at most `bytes_max`.

    Who finds no room waits half of the time that he has left, and gets a `CapacityError` then. What alone is larger
    may pass when nothing else is on its way.
    """

    def __init__(self, bytes_max: int = IN_FLIGHT_BYTES) -> None:
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._bytes = 0
        self._returned: deque[int] = deque()  # by finalizers, which must not take a lock

    @property
    def bytes(self) -> int:
        """On their way now."""
        with self._lock:
            self._collect()
            return self._bytes

    @contextmanager
    def hold(self, bytes_: int) -> Iterator[None]:
        """So many bytes are on their way within the block."""
        self.take([bytes_])
        try:
            yield
        finally:
            self.give_back(bytes_)

    def take(self, sizes: Sequence[int]) -> int:
        """Room for as many of the first of these as there is, and at least one; returns how many."""
        until_s = time.monotonic() + wait_s(WAIT_S) / 2
        while True:
            with self._lock:
                self._collect()
                free = self.bytes_max - self._bytes
                count = sum(total <= free for total in itertools.accumulate(sizes))
                if count or not self._bytes:
                    count = max(1, count)
                    self._bytes += sum(sizes[:count])
                    return count
            if time.monotonic() >= until_s:
                raise CapacityError(f"{sizes[0]} bytes are wanted, and {free} of {self.bytes_max} in flight are free")
            time.sleep(_POLL_S)

    def give_back(self, bytes_: int) -> None:
        self._returned.append(bytes_)

    def give_back_with(self, array: npt.NDArray[np.uint8], bytes_: int) -> None:
        """When the array, and all that is made of it without a copy, is gone."""
        weakref.finalize(array, self._returned.append, bytes_).atexit = False

    def _collect(self) -> None:
        while self._returned:
            self._bytes -= self._returned.popleft()
