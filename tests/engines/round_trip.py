"""One case of the two-process proof: what is computed, what is spilled, and what must come out bit for bit.

Run as a program this is the first process: for every case it saves a model, computes a prompt on a worker, spills its
checkpoints through the disk tier, goes on, and writes down the logits. The second process has nothing but the files.

    python round_trip.py DIRECTORY CASE ...
"""

from __future__ import annotations

import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tiny_models import FAMILIES, VOCABULARY, tiny_model

from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.policy.base import Hints
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import Prompt, SequenceRef
from tiered_cache.tiers.base import Durability

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_TOKENS = 16
CHECKPOINTS = (20, 32, 45)
"""Inside the second block, at its end, and inside the third: the prompt is computed in these pieces."""
AHEAD = 9
WAYS = {"chunk": (AHEAD,), "steps": (1,) * AHEAD, "mixed": (4, 1, 1, 3)}
"""How the tokens after a checkpoint are cut."""
DEADLINE_S = 60.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES = tuple(f"{family}-{dtype}" for family in FAMILIES for dtype in DTYPES)


@dataclass(frozen=True)
class Case:
    """One family in one dtype, and its files below a directory."""

    name: str
    directory: Path

    @property
    def family(self) -> str:
        return self.name.split("-")[0]

    @property
    def dtype(self) -> Any:
        return DTYPES[self.name.split("-")[1]]

    @property
    def home(self) -> Path:
        return self.directory / self.name

    def model(self, seed: int = 0) -> Any:
        return tiny_model(self.family, self.dtype, seed)

    @contextmanager
    def cluster(self) -> Iterator[LocalCluster]:
        """One worker with the saved model, above a disk tier alone."""
        self.home.mkdir(parents=True, exist_ok=True)
        settings = ClusterSettings(
            workers=1,
            worker=WorkerSettings(engine=f"transformers:{self.home / 'model'}", block_tokens=BLOCK_TOKENS),
            tiers=TierSettings(host_bytes=0, disk_dir=self.home / "disk", disk_bytes=1 << 28),
        )
        with LocalCluster(settings) as cluster:
            yield cluster


def tokens(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, count).astype(np.uint32)


def prompt_and_ahead(stop: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The prompt up to a checkpoint, and tokens that follow it there."""
    return np.concatenate((tokens(CHECKPOINTS[-1], 1)[:stop], tokens(AHEAD, 100 + stop)))


def handle_of(cluster: LocalCluster, source: SequenceRef) -> int:
    """The engine's own number of a sequence."""
    return cluster.workers["worker-0"]._sequences[source.sequence].handle


def go_on(engine: Any, handle: int, ahead: np.ndarray[Any, Any], way: tuple[int, ...]) -> list[Any]:
    """Compute further tokens, cut this way; the logits after each cut."""
    logits = []
    start = 0
    for count in way:
        engine.extend(handle, ahead[start : start + count])
        start += count
        logits.append(engine.logits(handle).clone())
    return logits


def spill(case: Case) -> None:
    """The first process' part. The logits go to `logits.npz`, as bits."""
    case.model().save_pretrained(case.home / "model")
    with case.cluster() as cluster:
        engine = cluster.workers["worker-0"].engine
        prompt = Prompt(tokens(CHECKPOINTS[-1], 1))
        placed = cluster.router.place(cluster.namespace, prompt, 64, deadline_s=DEADLINE_S)
        assert placed.lease is not None
        ran = cluster.workers["worker-0"].run(placed.lease, prompt, CHECKPOINTS[:-1], deadline_s=DEADLINE_S)
        result = cluster.tiering.spill(ran.offer, Durability.DISK, Hints(), None, deadline_s=DEADLINE_S)
        assert tuple(kept.tokens for kept in result.kept) == CHECKPOINTS, result
        logits = {}
        for stop in CHECKPOINTS:
            for name, way in WAYS.items():
                handle = engine.start(engine.reserve(stop + AHEAD))
                whole = prompt_and_ahead(stop)
                done = 0
                for cut in (n for n in CHECKPOINTS if n <= stop):
                    engine.extend(handle, whole[done:cut])
                    done = cut
                for index, row in enumerate(go_on(engine, handle, whole[stop:], way)):
                    logits[f"{stop}-{name}-{index}"] = row.contiguous().view(torch.uint8).numpy()
                engine.release(handle)
        np.savez(case.home / "logits.npz", **logits)


def main() -> None:
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    for name in sys.argv[2:]:
        try:
            spill(Case(name, directory))
        except Exception:  # noqa: BLE001 - the other process shows it
            (directory / name).mkdir(parents=True, exist_ok=True)
            (directory / name / "error.txt").write_text(traceback.format_exc())


if __name__ == "__main__":
    main()
