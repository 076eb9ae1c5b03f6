"""Threads that may call actors: real ones, or none in local mode, where calls from two threads at once abort Ray."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

from ray._private import worker

from tiered_cache.service.local import InlineExecutor


def executor_for_calls(threads: int) -> Executor:
    """An executor for calls to actors, in the mode in which this process's Ray is."""
    if in_local_mode():
        return InlineExecutor()
    return ThreadPoolExecutor(threads, thread_name_prefix="calls")


def in_local_mode() -> bool:
    """Whether Ray runs actors in the caller's thread. Ray has no public way to ask, and later releases no such mode."""
    return worker.global_worker.mode == getattr(worker, "LOCAL_MODE", object())
