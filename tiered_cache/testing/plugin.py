"""pytest plugin: a ready set of workers, tiers and a router, for tests of code that spills and restores.

    @pytest.mark.tiered_cache(workers=2, host_bytes="64MiB", worker=MyWorker)
    def test_mine(tiered_cluster, kill_worker): ...

`tiered_cluster` is a `tiered_cache.service.local.Cluster`, made anew for each test. It runs where the option
`--tiered-cache-ray` says:

    none        in this process, without Ray: ready in milliseconds (the default)
    local-mode  as actors in Ray's own local mode, where the installed Ray has one (2.54)
    shared      as actors on one local instance of Ray, which comes up once a session
    auto        local-mode where there is one, else shared

An instance of Ray that is already initialised is used, and never shut down. The marker takes the fields of
`ClusterSettings`, `TierSettings` and `WorkerSettings`, sizes also as text; `disk_bytes` gives the tiers a directory of
the test's own; `worker` is a class of one's own actors. `tiered_cluster.workers[name].call(kind, method, *args,
deadline_s=...)` calls any of their methods in every mode, and `kill_worker(name)` loses one with all it holds.

Nothing heavy is imported before a fixture is used.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from tiered_cache.config import ClusterSettings
    from tiered_cache.service.local import Cluster

MODES = ("none", "local-mode", "shared", "auto")
OBJECT_STORE_BYTES = 100 << 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--tiered-cache-ray`."""
    parser.getgroup("tiered-cache").addoption(
        "--tiered-cache-ray", choices=MODES, default="none", help="where the fixture tiered_cluster runs its workers"
    )


def pytest_configure(config: pytest.Config) -> None:
    """The marker `tiered_cache`."""
    config.addinivalue_line("markers", "tiered_cache(**settings): settings of the fixture tiered_cluster")


@pytest.fixture(scope="session")
def tiered_cache_ray(request: pytest.FixtureRequest) -> Iterator[str]:
    """The mode in which clusters run, one of `MODES` but `auto`, with Ray initialised for it."""
    mode: str = request.config.getoption("--tiered-cache-ray")
    if mode == "none":
        yield mode
        return
    import ray

    from actors.inline import in_local_mode

    if ray.is_initialized():
        yield "local-mode" if in_local_mode() else "shared"
        return
    has_local_mode = tuple(map(int, ray.__version__.split(".")[:2])) < (2, 55)
    if mode == "auto":
        mode = "local-mode" if has_local_mode else "shared"
    if mode == "local-mode" and not has_local_mode:
        pytest.skip(f"Ray {ray.__version__} has no local mode")
    options = {"local_mode": True} if mode == "local-mode" else {"object_store_memory": OBJECT_STORE_BYTES}
    with warnings.catch_warnings(action="ignore"):  # what a mode on its way out has to say
        ray.init(
            "local", include_dashboard=False, num_cpus=2, log_to_driver=False, logging_level=logging.ERROR, **options
        )
    yield mode
    ray.shutdown()


@pytest.fixture
def tiered_cluster(request: pytest.FixtureRequest, tiered_cache_ray: str, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own, as its marker `tiered_cache` says."""
    asked: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("tiered_cache"))):
        asked |= marker.kwargs
    worker = asked.pop("worker", None)
    settings = _checked_settings(asked, tmp_path / "tiers")
    if tiered_cache_ray == "none":
        yield from _in_process(settings, worker)
    else:
        if worker is not None and worker.__module__ == request.module.__name__:
            _send_by_value(request.module)
        yield from _on_ray(settings, worker)


@pytest.fixture
def kill_worker(tiered_cluster: Cluster) -> Callable[[str], None]:
    """`kill_worker(name)`: from now on whoever calls the worker is told that it is dead, and all it held is lost."""

    def kill(name: str) -> None:
        worker: Any = tiered_cluster.workers[name]
        if hasattr(worker, "kill"):
            worker.kill()
        else:
            from tiered_cache.testing.mortal import kill_actor

            kill_actor(worker.actor, worker.ray_namespace)

    return kill


def _send_by_value(module: ModuleType) -> None:
    """Have Ray send what is defined in a test module whole: its processes could not import it."""
    import ray

    ray.cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]


def _checked_settings(asked: dict[str, Any], disk_dir: Path) -> ClusterSettings:
    """`_settings`; what is wrong with the marker is told in one line."""
    from tiered_cache.errors import ConfigError

    try:
        return _settings(asked, disk_dir)
    except ConfigError as error:
        pytest.fail(f"@pytest.mark.tiered_cache: {error.message}", pytrace=False)


def _settings(asked: dict[str, Any], disk_dir: Path) -> ClusterSettings:
    """Settings from the marker's keywords, under a name that is nobody else's."""
    import secrets
    from dataclasses import fields

    from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings, parse_size
    from tiered_cache.errors import ConfigError

    values = {k: parse_size(v, k) if k.endswith("_bytes") and isinstance(v, str) else v for k, v in asked.items()}
    if values.get("disk_bytes"):
        values.setdefault("disk_dir", disk_dir)

    def of(kind: Any) -> dict[str, Any]:
        return {field.name: values[field.name] for field in fields(kind) if field.name in values}

    parts = {"worker": WorkerSettings(**of(WorkerSettings)), "tiers": TierSettings(**of(TierSettings))}
    known = {**of(WorkerSettings), **of(TierSettings), **of(ClusterSettings)}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"the marker tiered_cache knows no {', '.join(unknown)}")
    return ClusterSettings(**{"name": f"test-{secrets.token_hex(4)}", **of(ClusterSettings), **parts})


def _in_process(settings: ClusterSettings, worker: Any) -> Iterator[Cluster]:
    from tiered_cache.service.local import LocalCluster, reference_worker
    from tiered_cache.testing.mortal import MortalWorker

    def mortal(name: str, *args: Any) -> Any:
        return MortalWorker(name, (worker or reference_worker)(name, *args))

    with LocalCluster(settings, mortal) as cluster:
        yield cluster


def _on_ray(settings: ClusterSettings, worker: Any) -> Iterator[Cluster]:
    from ray._private.worker import global_worker

    from actors.cluster import RayCluster
    from actors.sequence import SequenceActor

    before = set(global_worker.actors)
    with RayCluster.start(settings, worker=worker or SequenceActor) as cluster:
        yield cluster
    for actor in global_worker.actors.keys() - before:  # local mode would keep them, and all that they hold
        del global_worker.actors[actor]
