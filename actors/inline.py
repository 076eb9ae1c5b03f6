"""Threads that may call actors: real ones, or none in local mode, where calls from two threads at once abort Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from ray._private import worker

P = ParamSpec("P")
T = TypeVar("T")


class InlineExecutor(Executor):
    """Runs what is submitted at once, in the caller's thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        return future


def executor_for_calls(threads: int) -> Executor:
    """An executor for calls to actors, in the mode in which this process's Ray is."""
    if in_local_mode():
        return InlineExecutor()
    return ThreadPoolExecutor(threads, thread_name_prefix="calls")


def in_local_mode() -> bool:
    """Whether Ray runs actors in the caller's thread. Ray has no public way to ask, and later releases no such mode."""
    return worker.global_worker.mode == getattr(worker, "LOCAL_MODE", object())
