"""Knows which locks of the library each thread holds, so that a test can see that none is when a call leaves."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest


class LockWatch:
    """Watches the locks that the library makes while it is on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.locks = 0
        self.calls: Counter[str] = Counter()
        self._held = threading.local()
        for kind in ("Lock", "RLock"):
            patch.setattr(threading, kind, self._factory(getattr(threading, kind)))

    def held(self) -> list[str]:
        """Where the locks were made that this thread holds."""
        return list(getattr(self._held, "made_at", []))

    def leaving(self, call: str) -> None:
        """A call to another process, or to what stands for one."""
        self.calls[call] += 1
        assert not self.held(), f"{call} while holding the locks made at {self.held()}"

    def _factory(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            frame = sys._getframe(1)
            if frame.f_globals["__name__"] == "threading" and frame.f_back is not None:  # a condition's
                frame = frame.f_back
            module = frame.f_globals["__name__"]
            if not module.startswith(("tiered_cache.", "actors.")):
                return make()
            self.locks += 1
            return _Watched(make(), f"{module}:{frame.f_lineno}", self._held)

        return made


class _Watched:
    def __init__(self, lock: Any, made_at: str, held: threading.local) -> None:
        self._lock, self._made_at, self._held = lock, made_at, held

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got: bool = self._lock.acquire(blocking, timeout)
        if got:
            self._held.made_at = [*getattr(self._held, "made_at", []), self._made_at]
        return got

    def release(self) -> None:
        self._held.made_at.remove(self._made_at)
        self._lock.release()

    def locked(self) -> bool:
        locked: bool = self._lock.locked()
        return locked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)  # what conditions want of an RLock

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
