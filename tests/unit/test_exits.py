"""A process whose disk hangs for good ends within seconds when it is told to, with the status that it would have."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXIT_S = 30.0
"""At most, on a busy machine; what waits for a hung disk waits longer, or for good."""
HANGS = """
import sys, threading
from functools import partial
from tiered_cache import cli
from tiered_cache.service import build
from tiered_cache.testing.faults import FaultyDirectory
from tiered_cache.tiers.disk import DiskTier

hung = threading.Event()

class HungDirectory(FaultyDirectory):
    '''From the first time that `call` is made after `ready` on, no call ends.'''

    def __init__(self, root):
        super().__init__(root, self.hang)

    def hang(self, _, call):
        if hung.is_set() or (ready() and call == sys.argv[1]):
            if not hung.is_set():
                print("hung", flush=True)
                hung.set()
            threading.Event().wait()

build.DiskTier = partial(DiskTier, open_directory=HungDirectory)
"""
SERVES = """
import time
from pathlib import Path
from tiered_cache.config import ClusterSettings, TierSettings
from tiered_cache.service.local import LocalCluster

opened = threading.Event()
ready = opened.is_set
cluster = LocalCluster(ClusterSettings(tiers=TierSettings(0, Path(sys.argv[2]), 1 << 26)))
opened.set()
threading.Thread(target=cluster.cache.usage, daemon=True).start()
hung.wait()
begun_s = time.monotonic()
cluster.close()
print(time.monotonic() - begun_s, flush=True)
sys.exit(3)
"""
REPLAYS = """
ready = lambda: threading.current_thread().name.startswith("tier-disk")
arguments = ["--ray", "none", "--host-bytes", "1MiB", "--disk-bytes", "64MiB", "--disk-dir", sys.argv[2], "--quiet"]
sys.exit(cli.main(["replay", *arguments]))
"""


@contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HANGS + program, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hung\n"
            yield process
        finally:
            process.kill()


def test_a_cluster_is_closed_and_its_process_ends(tmp_path: Path) -> None:
    with child(SERVES, "try_lock", str(tmp_path / "tier")) as process:
        out, _ = process.communicate(timeout=EXIT_S)
        assert process.returncode == 3
        assert float(out) < 15  # not 30 for a call, or for good


@pytest.mark.parametrize(
    ("call", "number"),
    [("write", signal.SIGINT), ("link", signal.SIGTERM), ("try_lock", signal.SIGINT), ("unlock", signal.SIGTERM)],
)
def test_a_replay_ends(tmp_path: Path, call: str, number: signal.Signals) -> None:
    with child(REPLAYS, call, str(tmp_path)) as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=EXIT_S)
        assert process.returncode == 128 + number
        assert "interrupted" in errors
