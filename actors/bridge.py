"""`python -m actors.bridge FD`: joins Ray for an engine that must not, and hands its calls on to the catalogue.

`tiered_cache.service.bridge` says why, and is the other end of the socket FD. This process ends with that one; and, so
that it is started anew, when the catalogue can be neither found nor started. A catalogue that nobody has started is
started here, detached: it outlives all engines, is restarted by Ray, and found by its name.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.catalogue import CATALOGUE_OPTIONS, CatalogueActor
from actors.cluster import RAY_NAMESPACE
from actors.names import CATALOGUE, ClusterName
from tiered_cache.config import TierSettings
from tiered_cache.errors import ConfigError, TieredCacheError, TierError
from tiered_cache.service.bridge import Answer, Hello, Serving

START_S = 45.0
"""How long a catalogue may take to start."""
LOOK_S = 5.0
"""How often this process looks whether there is a catalogue."""
FAILURES_MAX = 3
"""After so many failures in a row it is time to join anew."""

_log = logging.getLogger(__name__)


def join(address: str) -> None:
    """Ray, initialised. Raises `TierError` if there is none at the address."""
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise TierError(f"no Ray at {address}: {error}".splitlines()[0], retryable=True) from error


def find_or_start(cluster: ClusterName, tiers: TierSettings, *, start_s: float = START_S) -> None:
    """There is a catalogue of this cluster, and it is of the settings' store.

    Raises `ConfigError` if it is of another, or could never serve this one, and `TierError` if it does not answer.
    """
    try:
        handle = _handle(cluster, tiers)
        url, bytes_ = ray.get(handle.store.remote(deadline_s=start_s), timeout=start_s)
    except GetTimeoutError as error:
        raise TierError(f"the catalogue of {cluster.name!r} is not up after {start_s:g} s", retryable=True) from error
    except RayActorError as error:  # its constructor's error, as text that ends with `module.Class: message`
        last = str(error).splitlines()[-1]
        kind = ConfigError if "ConfigError: " in last else TierError
        raise kind(f"the catalogue of {cluster.name!r}: {last.rpartition('Error: ')[2]}") from error
    except (RayError, ValueError, RuntimeError) as error:
        raise TierError(f"the catalogue of {cluster.name!r}: {error}".splitlines()[0], retryable=True) from error
    if url is None or url.rstrip("/") != str(tiers.object_url).rstrip("/"):
        raise ConfigError(f"the catalogue of {cluster.name!r} is of object_url {url}, not {tiers.object_url}")
    if bytes_ != tiers.object_bytes:
        _log.warning("the catalogue of %r has object_bytes %d, not %d", cluster.name, bytes_, tiers.object_bytes)


def _handle(cluster: ClusterName, tiers: TierSettings) -> Any:
    name = cluster.actor(CATALOGUE)
    try:
        return ray.get_actor(name, namespace=RAY_NAMESPACE)
    except ValueError:  # there is none
        return (
            ray.remote(**CATALOGUE_OPTIONS)(CatalogueActor)
            .options(
                name=name,
                namespace=RAY_NAMESPACE,
                get_if_exists=True,  # somebody else may start it at the same time
                lifetime="detached",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=0,  # a retry would meet another state
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
            )
            .remote(cluster, tiers)
        )


def _keep_there(cluster: ClusterName, tiers: TierSettings) -> None:
    """A catalogue that somebody has ended, or that went with the cluster, is started anew."""
    failures = 0
    while failures < FAILURES_MAX:
        time.sleep(LOOK_S)
        try:
            find_or_start(cluster, tiers)
            failures = 0
        except TieredCacheError as error:  # it may be just being restarted
            failures = FAILURES_MAX if isinstance(error, ConfigError) else failures + 1
            _log.warning("%s", error.message)
    os._exit(1)


def main() -> None:
    """Until the other end is closed."""
    connection = Connection(int(sys.argv[1]))
    hello: Hello = connection.recv()
    cluster = ClusterName(hello.cluster, RAY_NAMESPACE)
    serving = Serving(connection, cluster.catalogue())
    try:
        join(hello.ray_address)
        find_or_start(cluster, hello.tiers)
    except TieredCacheError as error:
        serving.send(Answer(0, None, error))
        return
    serving.send(Answer(0, None, None))
    threading.Thread(target=_keep_there, args=(cluster, hello.tiers), name="keep-there", daemon=True).start()
    try:
        serving.serve()
    except (EOFError, OSError):
        os._exit(0)  # calls that hang are nobody's any more


if __name__ == "__main__":
    main()
