"""Real models of every family: one process spills through the disk tier, this one restores and goes on, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the environment of requirements-transformers.txt")
pytest.importorskip("transformers", reason="needs the environment of requirements-transformers.txt")

from round_trip import AHEAD, CASES, CHECKPOINTS, DEADLINE_S, WAYS, Case, go_on, handle_of, prompt_and_ahead  # noqa: E402

from tiered_cache.service.messages import Prompt  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

REPRESENTATIVE = {
    "llama-float32",
    "gemma3-bfloat16",
    "qwen4_exp-bfloat16",
    "glm5_next-bfloat16",
    "deepseek_v4-bfloat16",
    "mamba2-bfloat16",
    "falcon_h1-bfloat16",
    "minimax-bfloat16",
}
"""One for each kind of state; the others need `--slow`."""


def cases() -> Iterator[Any]:
    for case in CASES:
        yield pytest.param(case, marks=() if case in REPRESENTATIVE else pytest.mark.slow)


@pytest.fixture(scope="session")
def spilled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the first process left behind, of all cases that this session will ask for."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("spilled")
    wanted = {
        item.callspec.params["case"]
        for item in request.session.items
        if hasattr(item, "callspec") and "case" in item.callspec.params and not item.get_closest_marker("skip")
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("round_trip.py")), str(directory), *sorted(wanted)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", list(cases()))
def test_another_process_goes_on_bit_for_bit(spilled: Path, case: str) -> None:
    here = Case(case, spilled)
    failed = here.home / "error.txt"
    assert not failed.exists(), failed.read_text()
    expected = np.load(here.home / "logits.npz", allow_pickle=False)
    with here.cluster() as cluster:
        worker = cluster.workers["worker-0"]
        for stop in CHECKPOINTS:
            whole = prompt_and_ahead(stop)
            for name, way in WAYS.items():
                placed = cluster.router.place(cluster.namespace, Prompt(whole), stop + AHEAD, deadline_s=DEADLINE_S)
                assert placed.restored is not None, placed
                assert placed.restored.tokens == stop
                handle = handle_of(cluster, placed.restored.source)
                for index, row in enumerate(go_on(worker.engine, handle, whole[stop:], way)):
                    wanted = torch.from_numpy(expected[f"{stop}-{name}-{index}"]).view(row.dtype)
                    assert torch.equal(row, wanted), f"{stop} tokens, {name}, {index}"
                worker.release(placed.restored.source, deadline_s=DEADLINE_S)
        assert cluster.counters()["router.restores"] == len(CHECKPOINTS) * len(WAYS)
