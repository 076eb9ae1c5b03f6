"""The pytest plugin as a user's tests meet it: light to load, three ways to run, settings by marker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import DEADLINE_S, never_moved, serve, some_tokens

from tiered_cache.errors import TierError
from tiered_cache.service.local import LocalCluster

HEAVY = {"ray", "actors", "numpy", "tiered_cache.service", "tiered_cache.cache"}


def run_pytest(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=240)


def test_the_plugin_loads_nothing_heavy_until_a_fixture_is_used(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        f"import sys\ndef test_light():\n    assert not {HEAVY!r} & set(sys.modules)\n"
        "def test_used(tiered_cluster):\n    assert 'tiered_cache.cache' in sys.modules and 'ray' not in sys.modules\n"
    )
    ran = run_pytest(tmp_path, "-p", "no:hypothesispytest")
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout


@pytest.mark.tiered_cache(workers=3, engine="mla-dsa-kda:small", host_bytes="4MiB", disk_bytes="8 MiB", seed=3)
def test_the_marker_says_what_the_cluster_is(tiered_cluster: LocalCluster, tmp_path: Path) -> None:
    assert sorted(tiered_cluster.workers) == ["worker-0", "worker-1", "worker-2"]
    usage = tiered_cluster.cache.usage()
    assert {name: tier.bytes_max for name, tier in usage.items()} == {"host": 4 << 20, "disk": 8 << 20}
    assert (tmp_path / "tiers").is_dir()


@pytest.mark.tiered_cache(engine="qsa-ple-gdn:small")
def test_a_killed_worker_is_dead_for_everyone(tiered_cluster: Any, kill_worker: Any) -> None:
    served = serve(tiered_cluster, some_tokens(60))
    kill_worker(served.placement.owner)
    dead = tiered_cluster.workers[served.placement.owner]
    with pytest.raises(TierError, match=f"{served.placement.owner} is dead"):
        dead.describe(deadline_s=DEADLINE_S)
    with pytest.raises(TierError, match="is dead"):
        dead.call(int, "free", deadline_s=DEADLINE_S)
    longer = np.concatenate([some_tokens(60), some_tokens(4, seed=1)])
    again = serve(tiered_cluster, longer)
    assert again.placement.owner != served.placement.owner
    assert again.placement.restored_tokens == 60
    assert again.mark == never_moved("qsa-ple-gdn:small", longer)


def test_a_setting_that_it_does_not_know_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text(
        "import pytest\n@pytest.mark.tiered_cache(wokers=2)\ndef test_it(tiered_cluster):\n    pass\n"
    )
    ran = run_pytest(tmp_path)
    assert ran.returncode == 1
    assert "the marker tiered_cache knows no wokers" in ran.stdout
