"""`Bridge`: a `CataloguePort` whose other end is a process that has joined Ray in our place.

Whoever joins Ray is ended by it a minute after the cluster's head has gone, and joining takes as long as it takes. An
engine that has other work to do must outlive both. So it does not join: a process of `actors.bridge` does, which is
started anew when it ends. As long as there is none, or it has not reached the catalogue, every call is a `TierError` at
once; one that is not answered in time is a `DeadlineError`, and those that follow for a while are not even made.

The two speak over a socket of their own that nobody else can open.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, TypeVar

from tiered_cache.cache import Kept, Offer
from tiered_cache.config import TierSettings
from tiered_cache.deadline import Clock
from tiered_cache.errors import ConfigError, DeadlineError, TieredCacheError, TierError
from tiered_cache.identity import FrameKey
from tiered_cache.index import KnownChain
from tiered_cache.level import Landed
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import CataloguePort, Lease, MatchReply, Prompt, RestorePlan

COMMAND = (sys.executable, "-m", "actors.bridge")
JOIN_S = 60.0
"""How long joining Ray and finding the catalogue may take."""
RETRY_S = 5.0
"""How soon it is tried again, and for how long nobody asks after an answer that did not come in time."""
CALLS_MAX = 16
"""How many calls the process has under way at once."""
METHODS = frozenset(name for name in vars(CataloguePort) if not name.startswith("_"))
GRACE_S = 1.0
"""How much longer than its deadline a call is waited for, so that the other side's own error can arrive."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Hello(NamedTuple):
    """The first message to the process: which catalogue it is to reach, or to start if there is none."""

    ray_address: str
    cluster: str
    tiers: TierSettings


class Call(NamedTuple):
    """All others. Nobody waits for the answer to number 0."""

    number: int
    method: str
    args: tuple[Any, ...]
    options: dict[str, Any]


class Answer(NamedTuple):
    """What the process says; number 0 is about joining."""

    number: int
    value: Any
    error: TieredCacheError | None


class Bridge:
    """Starts the process, and starts it again. A `CataloguePort`."""

    def __init__(
        self,
        hello: Hello,
        *,
        command: Sequence[str] = COMMAND,
        retry_s: float = RETRY_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """Returns at once; see `wait`."""
        self._hello = hello
        self._command = tuple(command)
        self._retry_s = retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._outbox: queue.SimpleQueue[Call | None] | None = None
        """None while the catalogue is out of reach."""
        self._why = "it is being joined"
        self._first: Future[bool] = Future()
        self._rests_until_s = -float("inf")
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        self._counters: Counter[str] = Counter()
        threading.Thread(target=self._run, name="catalogue-bridge", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the catalogue is in reach, as soon as that is known; False if it is not after so long.

        Raises `ConfigError` if it is not the one that was meant.
        """
        try:
            return self._first.result(seconds)
        except TimeoutError:
            return False

    def counters(self) -> dict[str, int]:
        """How often it was `joined`, `lost`, `refused`; and calls that were `late`, or not made, it being `away`."""
        with self._lock:
            return {f"catalogue.{what}": number for what, number in self._counters.items()}

    def close(self) -> None:
        """End the process. The catalogue stays: others may use it."""
        with self._lock:
            self._closed.set()
            if self._process is not None:
                self._process.kill()

    # The port

    def match(self, namespace: bytes, prompt: Prompt | KnownChain, pin_s: float, *, deadline_s: float) -> MatchReply:
        return self._call(MatchReply, "match", namespace, prompt, pin_s, deadline_s=deadline_s)

    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        return self._call(bool, "unpin", pin, generation, deadline_s=deadline_s)

    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        self._call(object, "report_bad", key, why, deadline_s=deadline_s)

    def report_absent(self, keys: tuple[FrameKey, ...], *, deadline_s: float) -> None:
        self._call(object, "report_absent", keys, deadline_s=deadline_s)

    def introduce(self, namespace: bytes, descriptor: bytes, *, deadline_s: float) -> None:
        self._call(object, "introduce", namespace, descriptor, deadline_s=deadline_s)

    def left(self, offer: Offer, hints: Hints, *, deadline_s: float) -> None:
        """Told, and not waited for."""
        self._send(0, "left", (offer, hints), deadline_s)

    def admit(self, chain: Offer | KnownChain, hints: Hints, lease_s: float, *, deadline_s: float) -> Lease:
        return self._call(Lease, "admit", chain, hints, lease_s, deadline_s=deadline_s)

    def commit(
        self, lease: int, generation: int, landed: tuple[Landed, ...], sound: tuple[Landed, ...], *, deadline_s: float
    ) -> tuple[Kept, ...]:
        kept: tuple[Kept, ...] = self._call(tuple, "commit", lease, generation, landed, sound, deadline_s=deadline_s)
        return kept

    def abandon(self, lease: int, generation: int, sound: tuple[Landed, ...], *, deadline_s: float) -> None:
        """Told, and not waited for."""
        self._send(0, "abandon", (lease, generation, sound), deadline_s)

    def plan_of(self, offer: Offer, pin_s: float, *, deadline_s: float) -> RestorePlan | None:
        plan: RestorePlan | None = self._call(object, "plan_of", offer, pin_s, deadline_s=deadline_s)  # type: ignore[assignment]
        return plan

    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        return self._call(bool, "keep", plan, pin_s, deadline_s=deadline_s)

    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        return self._call(bool, "use_up", plan, by, again_s, deadline_s=deadline_s)

    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        self._call(object, "let_go", tickets, deadline_s=deadline_s, kept=kept)

    # Calls

    def _call(self, kind: type[_T], method: str, *args: Any, deadline_s: float, **options: Any) -> _T:
        number = next(self._numbers)
        future = self._send(number, method, args, deadline_s, **options)
        try:
            answer = future.result(deadline_s + GRACE_S)
        except (TimeoutError, DeadlineError) as error:
            with self._lock:
                self._pending.pop(number, None)
                self._counters["late"] += 1
                self._rests_until_s = self._clock() + self._retry_s
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"the catalogue's {method} did not answer within {deadline_s:.3g} s") from None
        if not isinstance(answer, kind):
            raise TierError(f"the catalogue's {method} answered with {type(answer).__name__}, not {kind.__name__}")
        return answer

    def _send(self, number: int, method: str, args: tuple[Any, ...], deadline_s: float, **options: Any) -> Future[Any]:
        """Raises `TierError` if the catalogue is out of reach."""
        future: Future[Any] = Future()
        with self._lock:
            if self._outbox is None or self._clock() < self._rests_until_s:
                why = "it was too slow lately" if self._outbox is not None else self._why
                self._counters["away"] += 1
                raise TierError(f"the catalogue is out of reach: {why}", retryable=True)
            if number:
                self._pending[number] = future
            self._outbox.put(Call(number, method, args, {"deadline_s": deadline_s, **options}))
        return future

    # The process

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._serve()
            except ConfigError as error:
                self._let_go(error.message, error)
                _log.error("%s", error.message)
            except (OSError, EOFError, TieredCacheError) as error:
                self._let_go(str(error) or "its process has ended")
                _log.warning("the catalogue is out of reach: %s", self._why)
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                self._let_go(repr(error))
                _log.exception("the way to the catalogue")
            self._closed.wait(self._retry_s)

    def _serve(self) -> None:
        """One process, to its end. Raises `EOFError` then, or what it says about why it could not join."""
        ours, theirs = Pipe()
        with ours, theirs:
            with self._lock:
                if self._closed.is_set():
                    return
                process = self._process = subprocess.Popen(  # noqa: S603 - the settings' own, and no input's
                    [*self._command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the same code as here
                    start_new_session=True,  # what ends us from a terminal is not meant for it: there is more to keep
                )
            try:
                theirs.close()
                ours.send(self._hello)
                if not ours.poll(JOIN_S):
                    raise TierError(f"Ray was not joined within {JOIN_S:g} s", retryable=True)
                joined: Answer = ours.recv()
                if joined.error is not None:
                    raise joined.error
                self._hear(ours)
            finally:
                process.kill()
                process.wait()

    def _hear(self, connection: Connection) -> None:
        """Calls go out, answers come in, until the process has ended."""
        outbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        with self._lock:
            self._outbox = outbox
            self._counters["joined"] += 1
        if not self._first.done():
            self._first.set_result(True)
        writer = threading.Thread(target=_write, args=(connection, outbox), name="catalogue-calls", daemon=True)
        writer.start()
        try:
            while True:
                answer: Answer = connection.recv()
                with self._lock:
                    future = self._pending.pop(answer.number, None)
                if future is not None and answer.error is None:
                    future.set_result(answer.value)
                elif future is not None:
                    future.set_exception(answer.error)
        finally:
            outbox.put(None)

    def _let_go(self, why: str, refused: ConfigError | None = None) -> None:
        """Whoever waits for an answer has none."""
        with self._lock:
            if self._outbox is not None and not self._closed.is_set():
                self._counters["lost"] += 1
            if refused is not None:
                self._counters["refused"] += 1
            self._outbox, self._why = None, why
            pending, self._pending = self._pending, {}
        if not self._first.done():
            self._first.set_result(False) if refused is None else self._first.set_exception(refused)
        for future in pending.values():
            future.set_exception(TierError(f"the catalogue is out of reach: {why}", retryable=True))


def _write(connection: Connection, outbox: queue.SimpleQueue[Call | None]) -> None:
    """Here a process that reads nothing holds up nobody else."""
    with suppress(OSError, ValueError):  # it has ended, as whoever reads finds out, too
        while (call := outbox.get()) is not None:
            connection.send(call)


class Serving:
    """The other end: hands calls on, many at a time."""

    def __init__(self, connection: Connection, catalogue: CataloguePort) -> None:
        self._connection = connection
        self._catalogue = catalogue
        self._sending = threading.Lock()

    def send(self, answer: Answer) -> None:
        with self._sending:
            self._connection.send(answer)

    def serve(self) -> None:
        """Until the other end is closed; raises `EOFError` then."""
        executor = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="calls")
        while True:
            executor.submit(self._answer, self._connection.recv())

    def _answer(self, call: Call) -> None:
        value, error = None, None
        try:
            assert call.method in METHODS, call.method
            value = getattr(self._catalogue, call.method)(*call.args, **call.options)
        except TieredCacheError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - the caller's to know
            error = TierError(f"{call.method} failed: {failure!r}")
        if call.number:
            self.send(Answer(call.number, value, error))
