"""The catalogue that vLLM's engines share: found by its name, started if there is none, and back after every death.

Each `Bridge` is a process of its own that joins this test's Ray, as beside an engine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from paging import IDENTITY, layout_named
from ray.exceptions import RayError

from actors.cluster import RAY_NAMESPACE
from tiered_cache.config import TierSettings
from tiered_cache.errors import ConfigError, MissReason, TieredCacheError
from tiered_cache.identity import PrefixChain
from tiered_cache.index import KnownChain
from tiered_cache.namespace import Namespace
from tiered_cache.policy.base import Hints
from tiered_cache.service.bridge import Bridge, Hello

pytestmark = pytest.mark.timeout(300)
WAIT_S = 120.0
KNOWN = Namespace.of(IDENTITY, layout_named("rows").geometry)
BLOCK = layout_named("rows").block_tokens
CHAIN = KnownChain(
    KNOWN.digest, BLOCK, (PrefixChain(KNOWN.digest, BLOCK).block_hash(0), b"1" * 32), BLOCK + 1, b"t" * 32
)

Open = Callable[..., Bridge]


@pytest.fixture
def bridge(local_ray: None, tmp_path: Path) -> Iterator[Open]:
    made: list[Bridge] = []
    name = f"test-{secrets.token_hex(4)}"
    address = ray.get_runtime_context().gcs_address

    def make(store: str = "store") -> Bridge:
        (tmp_path / store).mkdir(exist_ok=True)
        tiers = TierSettings(host_bytes=0, object_url=(tmp_path / store).as_uri(), object_bytes=1 << 20)
        made.append(Bridge(Hello(address, name, tiers), retry_s=0.5))
        return made[-1]

    make.actor = f"{name}/catalogue"  # type: ignore[attr-defined]
    yield make
    for one in made:
        one.close()
    with contextlib.suppress(ValueError):  # it did not come to that
        ray.kill(ray.get_actor(f"{name}/catalogue", namespace=RAY_NAMESPACE))


def ask(bridge: Bridge) -> MissReason | None:
    """When it can answer."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return bridge.match(KNOWN.digest, CHAIN, 1.0, deadline_s=10.0).reason
        except TieredCacheError:
            assert time.monotonic() < until_s
            time.sleep(0.1)


def test_engines_find_one_catalogue_whatever_dies(bridge: Open) -> None:
    first, second = bridge(), bridge()
    assert first.wait(WAIT_S)
    assert second.wait(WAIT_S)
    first.introduce(KNOWN.digest, KNOWN.descriptor(), deadline_s=10.0)
    lease = second.admit(CHAIN, Hints(), 10.0, deadline_s=10.0)
    assert lease.keys
    second.abandon(lease.number, lease.generation, (), deadline_s=10.0)

    other = bridge("another")
    with pytest.raises(ConfigError, match=r"is of object_url file://\S+/store, not file://\S+/another"):
        other.wait(WAIT_S)
    other.close()  # else it would be the one to start the next

    assert first._process is not None
    os.kill(first._process.pid, signal.SIGKILL)
    assert ask(first) is MissReason.NOT_STORED

    for restarts in (True, False):  # by Ray, and by whoever finds out that there is none
        handle = ray.get_actor(bridge.actor, namespace=RAY_NAMESPACE)  # type: ignore[attr-defined]
        before = ray.get(handle.generation.remote(deadline_s=10.0))
        ray.kill(handle, no_restart=not restarts)
        wait_for_another(bridge.actor, before)  # type: ignore[attr-defined]
        assert ask(second) is MissReason.NOT_STORED


def wait_for_another(actor: str, generation: int) -> None:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        with contextlib.suppress(ValueError, RayError):
            handle = ray.get_actor(actor, namespace=RAY_NAMESPACE)
            if ray.get(handle.generation.remote(deadline_s=10.0)) != generation:
                return
        time.sleep(0.1)
    raise AssertionError("it does not come back")
