"""One local instance of Ray for all these tests, and clusters on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray_serving import QUIET, SMALL, come_up, helpers_for_workers, start_cluster

from actors.cluster import RayCluster


@pytest.fixture(scope="module")
def local_ray() -> None:
    """Ray on this machine; it stays up for the next module, until one needs another kind."""
    if not ray.is_initialized():
        with helpers_for_workers():
            come_up(lambda: ray.init("local", **SMALL, **QUIET))


@pytest.fixture
def start(local_ray: None) -> Iterator[Callable[..., RayCluster]]:
    """`start_cluster`, whose clusters are closed with the test."""
    started: list[RayCluster] = []

    def starting(*args: Any, **options: Any) -> RayCluster:
        started.append(start_cluster(*args, **options))
        return started[-1]

    yield starting
    for cluster in started:
        cluster.close()
