"""What all tests share: the long parts run with `--slow` only, and one S3 server for all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tiered_cache.testing.object_servers import SeaweedServer

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests

# How long an example takes says more of the machine than of what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A real S3 server on loopback, started for the first test that asks for it."""
    from tiered_cache.testing.object_servers import SeaweedServer, find_seaweed

    binary = find_seaweed()
    if binary is None:
        pytest.skip("SeaweedFS is not here: it comes with the test extra")
    with SeaweedServer(binary, tmp_path_factory.mktemp("seaweed")) as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what is marked slow")
    parser.addoption("--flips", type=int, default=60, help="how many changes to stored frames a durable place sees")
    parser.addoption("--examples", type=int, default=150, help="how many inputs each reader is fuzzed with")
    parser.addoption("--kills", type=int, default=30, help="how many processes each test of kill -9 kills")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
