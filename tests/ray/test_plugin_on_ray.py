"""The example of a user's own actor, whose test is the same in process and on every kind of Ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray_serving import HAS_LOCAL_MODE

EXAMPLE = Path(__file__).parents[1] / "examples" / "test_own_actor.py"


def run_example(*options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(EXAMPLE), *options]
    ran = subprocess.run(command, cwd=EXAMPLE.parent, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_example_needs_no_more_than_thirty_lines() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    (actor,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert actor.end_lineno is not None
    assert actor.end_lineno - actor.lineno + 1 + len(imports) <= 30


def test_the_example_on_a_local_instance() -> None:
    assert "1 passed" in run_example("--tiered-cache-ray", "shared")


def test_local_mode_is_skipped_where_ray_has_none() -> None:
    if HAS_LOCAL_MODE:
        pytest.skip(f"Ray {ray.__version__} has a local mode")
    assert f"Ray {ray.__version__} has no local mode" in run_example("--tiered-cache-ray", "local-mode")


@pytest.mark.local_mode
@pytest.mark.skipif(not HAS_LOCAL_MODE, reason=f"Ray {ray.__version__} has no local mode")
@pytest.mark.parametrize("mode", ["local-mode", "auto", "shared", "none"])
def test_the_example_where_ray_has_a_local_mode(mode: str) -> None:
    assert "1 passed" in run_example("--tiered-cache-ray", mode)


def test_an_instance_that_is_up_already_is_used_and_not_shut_down(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "import ray\n"
        "def pytest_sessionstart(session):\n"
        "    ray.init('local', num_cpus=1, include_dashboard=False, log_to_driver=False, resources={'mine': 1})\n"
        "def pytest_sessionfinish(session):\n"
        "    assert ray.is_initialized() and ray.cluster_resources()['mine'] == 1\n"
        "    print('STILL UP')\n"
    )
    (tmp_path / EXAMPLE.name).write_text(EXAMPLE.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--tiered-cache-ray", "auto"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
    assert "STILL UP" in ran.stdout
