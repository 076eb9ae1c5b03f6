"""Jobs that end in time whatever their threads do."""

from __future__ import annotations

import threading


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
