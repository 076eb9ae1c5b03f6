"""Threads that a hung disk cannot keep a process alive by, and jobs that end in time whatever their threads do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any


class DaemonExecutor(Executor):
    """A few threads that do what comes, in order; whoever waits for a result waits with a deadline."""

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("the executor is closed")
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more. With `cancel_futures` what has not begun is cancelled; hung threads are left behind."""
        self._closed = True
        if cancel_futures:
            with suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        for _ in self._threads:
            self._jobs.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def join(self, timeout_s: float) -> bool:
        """After a shutdown: whether all threads have ended within so long, each."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, do = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(do())
            except BaseException as error:  # noqa: BLE001 - it is the future's
                future.set_exception(error)
            del job, future, do


class TimedJob:
    """One transfer between vLLM's buffer and us, which has the buffer only while nobody has given it up.

    The worker touches the buffer inside `with job.buffer() as mine: if mine: ...`; whoever gives the job up waits for
    that block, which copies memory and nothing else, and so never for a disk.
    """

    def __init__(self, number: int, until_s: float) -> None:
        self.number = number
        self.until_s = until_s
        self._lock = threading.Lock()
        self._given_up = False
        self._reported = False

    def buffer(self) -> _Buffer:
        return _Buffer(self)

    @property
    def given_up(self) -> bool:
        return self._given_up

    def give_up(self, *, wait: bool) -> bool:
        """From now on the buffer is vLLM's alone; False if the job was reported, or, without `wait`, is copying now."""
        if not self._lock.acquire(blocking=wait):
            return False
        try:
            if self._reported or self._given_up:
                return False
            self._given_up = True
            return True
        finally:
            self._lock.release()

    def report(self) -> bool:
        """The worker is done with the buffer: whether it may say so, since nobody has given the job up."""
        with self._lock:
            if self._given_up or self._reported:
                return False
            self._reported = True
            return True


class _Buffer:
    """Holds a job's lock; says whether the buffer is still the job's."""

    def __init__(self, job: TimedJob) -> None:
        self._job = job

    def __enter__(self) -> bool:
        self._job._lock.acquire()  # noqa: SLF001 - a part of it
        return not self._job._given_up  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        self._job._lock.release()  # noqa: SLF001
