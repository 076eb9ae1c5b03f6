"""How the tests of the actors start Ray, and clusters on it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray

from actors.cluster import RayCluster
from actors.sequence import OwnerMethods, SequenceActor
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.service.router import RouterSettings

_T = TypeVar("_T")
HAS_LOCAL_MODE = tuple(map(int, ray.__version__.split(".")[:2])) < (2, 55)
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
SMALL: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}

QUICK_TO_SEE_A_DEATH: dict[str, Any] = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Of nodes: a second, not a quarter of a minute."""


def come_up(start: Callable[[], _T]) -> _T:
    """Start Ray, or a node: they give up on themselves after a quarter of a minute, little on a busy machine."""
    for _ in range(7):
        before = children()
        with contextlib.suppress(Exception):
            return start()
        for process in children() - before:  # what has come up of it
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    return start()


def children() -> set[int]:
    """The processes that this one has started."""
    return {int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()}


@contextlib.contextmanager
def helpers_for_workers() -> Iterator[None]:
    """Ray that comes up now has workers that can import what lies beside this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


def start_cluster(
    model: str = "qsa-ple-gdn:small",
    *,
    worker: type[OwnerMethods] = SequenceActor,
    workers: int = 2,
    router: RouterSettings | None = None,
    capacity_bytes: int = 64 << 20,
    num_gpus: float = 0.0,
    shards: int = 1,
    **tiers: Any,
) -> RayCluster:
    """Actors under a name of their own, on the Ray that is there."""
    settings = ClusterSettings(
        workers=workers,
        worker=WorkerSettings(engine=model, capacity_bytes=capacity_bytes, num_gpus=num_gpus, shards=shards),
        tiers=TierSettings(**{"host_bytes": 32 << 20, **tiers}),
        name=f"test-{secrets.token_hex(4)}",
    )
    return RayCluster.start(settings, worker=worker, router=router)
