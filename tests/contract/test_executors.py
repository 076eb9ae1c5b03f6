"""What `DaemonExecutor` does is what `ThreadPoolExecutor` does, apart from the end of the process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.executors import DaemonExecutor

WAIT_S = 20.0
MAKERS: dict[str, Callable[[int], Executor]] = {
    "threads": lambda threads: ThreadPoolExecutor(threads, thread_name_prefix="named"),
    "daemons": lambda threads: DaemonExecutor(threads, "named"),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Executor]:
    return MAKERS[request.param]


class Gated(NamedTuple):
    """A job that runs until the test lets it end, and what became of it."""

    future: Future[int]
    begun: threading.Event
    gate: threading.Event
    fails: bool


OPERATIONS = st.one_of(
    st.tuples(st.sampled_from(["submit", "submit failing"])),
    st.tuples(st.sampled_from(["end", "cancel"]), st.integers(0, 7)),
    st.tuples(st.just("shut down"), st.booleans()),
)


@pytest.mark.parametrize("kind", MAKERS)
@given(threads=st.integers(1, 3), operations=st.lists(OPERATIONS, max_size=30))
def test_jobs_begin_in_order_on_so_many_threads_and_each_future_has_an_end(
    kind: str, threads: int, operations: list[tuple[str, int]]
) -> None:
    executor, jobs, closed = MAKERS[kind](threads), list[Gated](), False
    waiting, running, cancelled = list[int](), list[int](), set[int]()

    def settle() -> None:
        """What has to have begun by now has; what has not, waits for a thread."""
        while waiting and len(running) < threads:
            running.append(waiting.pop(0))
        for number in running:
            assert jobs[number].begun.wait(WAIT_S)
        assert not any(jobs[number].begun.is_set() for number in waiting)

    def end(number: int) -> None:
        jobs[number].gate.set()
        running.remove(number)
        if jobs[number].fails:
            with pytest.raises(ZeroDivisionError, match=f"^{number}$"):
                jobs[number].future.result(WAIT_S)
        else:
            assert jobs[number].future.result(WAIT_S) == number

    for what, *value in operations:
        number = value[0] if value else len(jobs)
        if what.startswith("submit"):
            begun, gate, fails = threading.Event(), threading.Event(), what.endswith("failing")

            def job(begun: threading.Event, gate: threading.Event, *, number: int, fails: bool) -> int:
                begun.set()
                assert gate.wait(WAIT_S)
                if fails:
                    raise ZeroDivisionError(number)
                return number

            if closed:
                with pytest.raises(RuntimeError, match="after shutdown"):
                    executor.submit(job, begun, gate, number=number, fails=fails)
                continue
            jobs.append(Gated(executor.submit(job, begun, gate, number=number, fails=fails), begun, gate, fails))
            waiting.append(number)
        elif what == "end" and number in running:
            end(number)
        elif what == "cancel" and number < len(jobs):
            assert jobs[number].future.cancel() == (number in waiting or number in cancelled)
            if number in waiting:
                waiting.remove(number)
                cancelled.add(number)
        elif what == "shut down":
            executor.shutdown(wait=False, cancel_futures=bool(number))
            closed = True
            if number:
                cancelled |= set(waiting)
                waiting.clear()
        settle()
    while running:
        end(running[0])
        settle()
    executor.shutdown()
    for number, job in enumerate(jobs):
        assert job.future.done()
        assert job.future.cancelled() == (number in cancelled)
        if number in cancelled:
            assert not job.begun.is_set()
            with pytest.raises(CancelledError):
                job.future.result(0)


def test_threads_come_as_they_are_needed(make: Callable[[int], Executor]) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("named")}

    with make(8) as executor:
        assert not names()
        executor.submit(int).result(WAIT_S)
        assert names() == {"named_0"}
        barrier = threading.Barrier(8)
        assert len({future.result(WAIT_S) for future in [executor.submit(barrier.wait) for _ in range(8)]}) == 8
        assert names() == {f"named_{number}" for number in range(8)}
    assert not names()


def test_a_map_is_in_order_and_ends_in_time(make: Callable[[int], Executor]) -> None:
    gate = threading.Event()
    with make(2) as executor:
        assert list(executor.map(divmod, range(9), [4] * 9)) == [divmod(n, 4) for n in range(9)]
        with pytest.raises(TimeoutError):
            list(executor.map(lambda _: gate.wait(WAIT_S), range(4), timeout=0.01))
        gate.set()


def test_an_executor_that_nobody_holds_ends_its_threads_and_keeps_no_result(make: Callable[[int], Executor]) -> None:
    class Big: ...

    executor = make(1)
    result = weakref.ref(executor.submit(Big).result(WAIT_S))
    failed = executor.submit(lambda _: 1 / 0, big := Big())
    argument = weakref.ref(big)
    del big
    with pytest.raises(ZeroDivisionError):
        failed.result(WAIT_S)
    del failed
    executor.submit(int).result(WAIT_S)
    gc.collect()
    assert result() is argument() is None
    (thread,) = (thread for thread in threading.enumerate() if thread.name.startswith("named"))
    del executor
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive()


# What is its own


def test_threads_that_have_nothing_to_do_are_used_again() -> None:
    executor = DaemonExecutor(8, "named")
    threads = set()
    for _ in range(50):
        threads.add(executor.submit(threading.get_ident).result(WAIT_S))
        while not executor._work._idle:  # its future is done a moment before a thread is idle
            os.sched_yield()
    assert len(threads) == 1
    executor.shutdown()


def test_who_waits_for_several_is_told_of_those_that_a_shutdown_cancels() -> None:
    begun, gate = threading.Event(), threading.Event()
    executor = DaemonExecutor(1, "named")
    hung = executor.submit(lambda: (begun.set(), gate.wait(WAIT_S)))
    others = [executor.submit(int) for _ in range(3)]
    assert begun.wait(WAIT_S)
    executor.shutdown(wait=False, cancel_futures=True)
    assert wait(others, WAIT_S, ALL_COMPLETED).not_done == set()
    assert not executor.join(0.01)
    gate.set()
    assert executor.join(WAIT_S)
    assert hung.result(0) == (None, True)


def test_a_thread_that_cannot_be_started_loses_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    executor = DaemonExecutor(2, "named")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            executor.submit(int)
    gate = threading.Event()
    first = executor.submit(gate.wait, WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        second = executor.submit(int)
    gate.set()
    assert first.result(WAIT_S)
    assert second.result(WAIT_S) == 0
    executor.shutdown()


@pytest.mark.parametrize("kind", ["daemons", "threads"])
def test_only_a_daemons_hung_thread_lets_a_process_end(kind: str) -> None:
    """And so this is no test of nothing: the other kind does not."""
    made = "DaemonExecutor(1, 'hung')" if kind == "daemons" else "ThreadPoolExecutor(1)"
    program = (
        "import sys, threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from tiered_cache.executors import DaemonExecutor\n"
        f"executor, begun = {made}, threading.Event()\n"
        "executor.submit(lambda: (begun.set(), threading.Event().wait()))\n"
        "begun.wait()\nprint('begun', flush=True)\nsys.exit(7)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        if kind == "daemons":
            assert child.wait(WAIT_S) == 7
        else:
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(1)
            child.kill()
