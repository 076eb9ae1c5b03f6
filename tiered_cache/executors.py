"""`DaemonExecutor`: threads for work that a tier may hold up, which no hung disk can keep a process alive by.

The interpreter joins the threads of a `ThreadPoolExecutor` when a process ends, and those of a hung disk never end.
These threads it does not wait for: what has to be finished before the end is waited for by whoever closes, with a
deadline (`join`, or a future's `result`). A process that ends meanwhile leaves what a killed one does.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DaemonExecutor(Executor):
    """Up to `threads_max` threads, each started when it is needed first, that do what comes, in order.

    All else is as with a `ThreadPoolExecutor`: an executor that nobody holds any more shuts down by itself.
    """

    def __init__(self, threads_max: int, name: str) -> None:
        assert threads_max > 0
        self._work = _Work(threads_max, name)
        weakref.finalize(self, self._work.close).atexit = False

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Raises `RuntimeError` after a shutdown, or if there is no thread and none can be started."""
        future: Future[_T] = Future()
        self._work.add(_Job(future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; what was submitted is still done, or with `cancel_futures` cancelled if it has not begun.

        With `wait`, wait for it, and so for what hangs: `join` has a deadline.
        """
        for job in self._work.close(cancel=cancel_futures):
            job.future.cancel()
            job.future.set_running_or_notify_cancel()  # who waits for several is told, too
        if wait:
            self._work.join(None)

    def join(self, timeout_s: float) -> bool:
        """After a shutdown: whether all that was begun has ended within so long."""
        return self._work.join(timeout_s)


class _Job(NamedTuple):
    future: Future[Any]
    do: Callable[[], Any]


class _Work:
    """What waits to be done, and the threads that do it. It knows no executor, so that one can go while they wait."""

    def __init__(self, threads_max: int, name: str) -> None:
        self._threads_max = threads_max
        self._name = name
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        """Threads that wait for a job, or are about to look for one."""
        self._closed = False

    def add(self, job: _Job) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._idle <= len(self._jobs) and len(self._threads) < self._threads_max:
                self._start()
            self._jobs.append(job)
            self._changed.notify()

    def close(self, *, cancel: bool = False) -> list[_Job]:
        """No more jobs come; returns those that nobody will do."""
        with self._changed:
            self._closed = True
            cancelled = list(self._jobs) if cancel else []
            if cancel:
                self._jobs.clear()
            self._changed.notify_all()
            return cancelled

    def join(self, timeout_s: float | None) -> bool:
        with self._changed:
            threads = list(self._threads)
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}_{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:  # else those that there are do it later
                raise
            return
        self._threads.append(thread)
        self._idle += 1

    def _run(self) -> None:
        while (job := self._next()) is not None:
            _do(job)
            del job  # what it has to do with is not kept alive until the next one comes
            with self._changed:
                self._idle += 1

    def _next(self) -> _Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            self._idle -= 1
            return self._jobs.popleft() if self._jobs else None


def _do(job: _Job) -> None:
    if not job.future.set_running_or_notify_cancel():
        return
    try:
        result = job.do()
    except BaseException as error:  # noqa: BLE001 - it is the future's
        job.future.set_exception(error)
        del job  # the error's traceback would keep it, and it the error
    else:
        job.future.set_result(result)
