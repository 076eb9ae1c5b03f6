"""Workers that tests can kill wherever they run: in this process, in Ray's local mode, in a process of their own."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from tiered_cache.errors import TierError

_T = TypeVar("_T")

DEATH_S = 60.0
"""How long a killed process may take to be gone for its callers."""


class Dead:
    """What is left of a killed worker: whatever is asked of it, it is dead."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise TierError(f"{self._name} is dead", retryable=True)


class MortalWorker:
    """A worker in this process, called as one behind a port is, until it is killed."""

    def __init__(self, name: str, worker: object) -> None:
        self._name = name
        self._worker = worker

    def call(self, kind: type[_T], method: str, *args: object, deadline_s: float) -> _T:
        """As a port's: any method of the worker, whose answer must be a `kind`."""
        answer: object = getattr(self._worker, method)(*args, deadline_s=deadline_s)
        if not isinstance(answer, kind):
            raise TierError(f"{self._name}.{method} answered with {type(answer).__name__}, not {kind.__name__}")
        return answer

    def kill(self) -> None:
        """Lose everything that the worker held."""
        self._worker = Dead(self._name)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._worker, attribute)


def kill_actor(name: str, ray_namespace: str) -> None:
    """Kill a named actor for good, and return when its callers notice; Ray's local mode itself cannot kill any."""
    import ray
    from ray._private.worker import global_worker

    from actors.inline import in_local_mode

    handle = ray.get_actor(name, namespace=ray_namespace)
    if in_local_mode():
        global_worker.actors[handle._actor_id] = Dead(name)  # noqa: SLF001 - there is no other way to it
        return
    ray.kill(handle)
    until_s = time.monotonic() + DEATH_S
    while time.monotonic() < until_s:
        try:
            ray.get(handle.__ray_ready__.remote(), timeout=1.0)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayActorError:
            return
    raise TierError(f"{name} still answers {DEATH_S:g} s after it was killed")
