"""Engines in processes of their own, for tests: what to ask, what to spoil on disk, how to compare answers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm_models import VOCABULARY

from tiered_cache import frame
from tiered_cache.codecs import Mode
from tiered_cache.engines.vllm import kv_transfer_config
from tiered_cache.identity import FrameKey
from tiered_cache.namespace import read_descriptor

HERE = Path(__file__).parent
BLOCK_TOKENS = {"llama": 128, "gemma3": 128, "qwen3_next": 256, "granitemoehybrid": 256, "glm_moe_dsa": 16}
DEADLINE_S = 1200
Step = tuple[str, object]


@dataclass(frozen=True)
class Answer:
    """What the engine said to one prompt."""

    tokens: list[int]
    logprobs: list[dict[str, float]]
    cached_tokens: int
    seconds: float
    first_token_s: float | None


@dataclass(frozen=True)
class Outcome:
    answers: list[Answer]
    counters: dict[str, int]
    stored: frozenset[str]
    """Digests of the blocks that left the device, if the worker was in the scheduler's process."""
    loaded: frozenset[str]


def prompt_of(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]


def transfer_of(disk: Path | None, **settings: object) -> dict[str, Any]:
    """The tier at a directory, on the CPU platform."""
    where: dict[str, object] = {} if disk is None else {"disk_dir": str(disk), "disk_bytes": "256MiB"}
    config: dict[str, Any] = kv_transfer_config(32 << 20, **{**where, "disk_sync": "never", **settings})
    config["kv_connector_extra_config"] |= {"spec_name": "CpuTieringSpec", "spec_module_path": "vllm_cpu_shim"}
    return config


def start(place: Path, **spec: object) -> subprocess.Popen[bytes]:
    place.mkdir(parents=True, exist_ok=True)
    (place / "spec.json").write_text(json.dumps(spec))
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "OMP_NUM_THREADS": "1"}
    with (place / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, HERE / "vllm_engine.py", place / "spec.json", place / "result.json"],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def finish(place: Path, process: subprocess.Popen[bytes], *, killed: bool = False) -> Outcome:
    try:
        status = process.wait(DEADLINE_S)
    finally:
        process.kill()
    if killed:
        assert status < 0
        return Outcome([], {}, frozenset(), frozenset())
    assert status == 0, (place / "log.txt").read_text()[-6000:]
    result = json.loads((place / "result.json").read_text())
    return Outcome(
        [Answer(**answer) for answer in result["answers"]],
        result["counters"],
        frozenset(result["stored"]),
        frozenset(result["loaded"]),
    )


def run(place: Path, *, killed: bool = False, **spec: object) -> Outcome:
    return finish(place, start(place, **spec), killed=killed)


def answers(prompts: Iterable[Sequence[int]]) -> list[Step]:
    return [("answer", prompt) for prompt in prompts]


def same(a: Answer, b: Answer) -> bool:
    """Equal tokens, and equal logprobs to the last bit."""
    return a.tokens == b.tokens and a.logprobs == b.logprobs


def distance(a: Answer, b: Answer) -> float:
    """The largest difference of a logprob, over the tokens that both name; infinity if the tokens differ."""
    if a.tokens != b.tokens:
        return float("inf")
    pairs = [(x[t], y[t]) for x, y in zip(a.logprobs, b.logprobs, strict=True) for t in x.keys() & y.keys()]
    return max((abs(x - y) for x, y in pairs), default=float("inf"))


def frames_of(disk: Path) -> dict[FrameKey, Path]:
    found = {}
    for file in (disk / "entries").rglob("*.blob"):
        name = file.relative_to(disk / "entries").as_posix().removesuffix(".blob")
        if not name.endswith("/descriptor"):
            found[FrameKey.parse(name)] = file
    return found


def flip(file: Path) -> None:
    """One byte: in a page of bfloat16 as it is, a sign and most of an exponent."""
    content = bytearray(file.read_bytes())
    content[len(content) // 4 * 2 + 1] ^= 0xFF
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def forge(disk: Path, key: FrameKey, file: Path) -> None:
    """Other bytes in a frame that is sound in every other way: what nobody can tell, to see that they are used."""
    described = disk / "entries" / key.namespace.hex() / "descriptor.blob"
    known = read_descriptor(described.read_bytes(), key.namespace)
    content = frame.decode(file.read_bytes(), key=key, identity_digest=known.identity_digest, geometry=known.geometry)
    arrays = {name: np.roll(array.reshape(-1), 2).reshape(array.shape) for name, array in content.arrays.items()}
    forged = frame.Frame(key, known.identity_digest, content.lineage, arrays)
    file.write_bytes(b"".join(frame.encode(forged, known.geometry, Mode.FAST).buffers()))


def grown(counters: Mapping[str, int], prefix: str) -> int:
    return sum(number for name, number in counters.items() if name.startswith(prefix))
