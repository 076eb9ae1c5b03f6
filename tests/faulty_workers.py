"""Workers with faults that a test can switch on from outside. Ray's processes import them from here."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import ray

from actors.sequence import OwnerMethods
from tiered_cache.config import WorkerSettings
from tiered_cache.engines.base import FrameName
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.identity import Tokens
from tiered_cache.service.build import build_engine
from tiered_cache.service.messages import TieringPort
from tiered_cache.service.owner import SequenceOwner

UNCLAIMED_S = 3.0
"""How long a `CountingWorker` keeps a restored sequence that nobody comes for."""


class FaultyEngine(ReferenceEngine):
    """Sleeps, or takes its process with it, in the calls it was told to."""

    def __init__(self, model: str) -> None:
        self.sleeps_s: dict[str, float] = {}
        self.woken = threading.Event()
        self.dies_in = ""
        self.calls: Counter[str] = Counter()
        super().__init__(model)

    def _fault(self, call: str) -> None:
        self.calls[call] += 1
        if call == self.dies_in:
            os._exit(1)
        self.woken.wait(self.sleeps_s.get(call, 0.0))

    def bytes_free(self) -> int:
        self._fault("bytes_free")
        return super().bytes_free()

    def extend(self, sequence: int, tokens: Tokens) -> None:
        self._fault("extend")
        super().extend(sequence, tokens)

    def export(self, sequence: int, names: Sequence[FrameName], out: Sequence[object]) -> None:
        super().export(sequence, names, out)  # type: ignore[arg-type]
        self._fault("export")

    def digest(self, sequence: int) -> str:
        self._fault("digest")
        return super().digest(sequence)


class FaultyWorker(OwnerMethods):
    """A worker around a `FaultyEngine`."""

    def __init__(self, name: str, node: str, tiering: Callable[[str], TieringPort], settings: WorkerSettings) -> None:
        self.engine = FaultyEngine(settings.engine)
        self.owner = SequenceOwner(self.engine, name=name, node=node, tiering=tiering)

    @ray.method(concurrency_group="control")
    def sleep_in(self, call: str, seconds: float, *, deadline_s: float) -> None:
        """From now on the engine's calls of this name take so long; those that sleep now wake up."""
        self.engine.sleeps_s[call] = seconds
        woken, self.engine.woken = self.engine.woken, threading.Event()
        woken.set()

    @ray.method(concurrency_group="control")
    def die_in(self, call: str, *, deadline_s: float) -> None:
        """The process ends in the engine's next call of this name."""
        self.engine.dies_in = call

    @ray.method(concurrency_group="control")
    def calls_of(self, call: str, *, deadline_s: float) -> int:
        """How many calls of this name the engine has had."""
        return self.engine.calls[call]

    @ray.method(concurrency_group="control")
    def free(self, *, deadline_s: float) -> int:
        """How many bytes of state can still be reserved."""
        return ReferenceEngine.bytes_free(self.engine)

    @ray.method(concurrency_group="control")
    def fail(self, *, deadline_s: float) -> None:
        """An error that is not the library's."""
        raise ZeroDivisionError("by zero")


class CountingWorker(OwnerMethods):
    """A worker that tells what it holds."""

    def __init__(self, name: str, node: str, tiering: Callable[[str], TieringPort], settings: WorkerSettings) -> None:
        self.engine = build_engine(settings)
        self.capacity_bytes = settings.capacity_bytes
        self.owner = SequenceOwner(self.engine, name=name, node=node, tiering=tiering, unclaimed_s=UNCLAIMED_S)

    @ray.method(concurrency_group="control")
    def held_bytes(self, *, deadline_s: float) -> int:
        """State of sequences, and room that is reserved for some."""
        return self.capacity_bytes - self.engine.bytes_free()
