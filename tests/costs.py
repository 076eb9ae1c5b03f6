"""What a piece of work costs, told so that a verdict on it is the same on any machine, loaded or not.

First choice is to count: instructions of Python, page faults, system calls, requests. Where only time tells, it is the
thread's own, the shortest of several turns, beside that of a yardstick of the same kind which takes turns with it: a
slow core and busy neighbours stretch both.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any


def instructions(call: Callable[[], object]) -> int:
    """How many instructions the interpreter executes for a call, on this thread; a call of C counts as one."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def page_faults() -> int:
    """How often this thread has touched memory that the system had yet to give, so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def shortest_s(
    calls: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Seconds of each call, the shortest of so many rounds in which they take turns, after one to warm up."""
    for call in calls.values():
        call()
    taken: dict[str, float] = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begun_s = clock()
            call()
            taken[name] = min(taken[name], clock() - begun_s)
    return taken
