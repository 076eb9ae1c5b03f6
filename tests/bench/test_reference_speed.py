"""How fast the reference engine is: a replay of many million tokens must not wait for it.

The floors are several times what one core of a current machine needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tiered_cache.engines.base import FrameName
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.testing.engine_suite import empty_frame, export, frames_needed, random_prompt, restore

PROMPT_TOKENS = 12_000


def best_ms(work: Callable[[], object], rounds: int = 15) -> float:
    """The shortest of several runs, in milliseconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


@pytest.mark.bench
@pytest.mark.parametrize("name", ["qsa-ple-gdn:tiny", "mla-dsa-kda:tiny"])
def test_a_prompt_of_twelve_thousand_tokens(name: str) -> None:
    engine = ReferenceEngine(name)
    prompt = random_prompt(engine, PROMPT_TOKENS)
    room = PROMPT_TOKENS + 100

    def compute() -> int:
        sequence = engine.start(engine.reserve(room))
        engine.extend(sequence, prompt)
        return sequence

    sequence = compute()
    frames = export(engine, sequence, frames_needed(engine.geometry, PROMPT_TOKENS))
    block = FrameName("rows", 512)
    place = empty_frame(engine.geometry, block)
    taken_ms = {
        "reserve, compute, release": (best_ms(lambda: engine.release(compute())), 15.0),
        "output": (best_ms(lambda: engine.output(sequence)), 1.0),
        "digest": (best_ms(lambda: engine.digest(sequence)), 1.0),
        "export of one block": (best_ms(lambda: engine.export(sequence, [block], [place])), 0.15),
        "restore": (best_ms(lambda: engine.release(restore(engine, frames, PROMPT_TOKENS, room))), 8.0),
        "decode of one token": (best_ms(lambda: engine.generate(sequence, 1)), 3.0),
    }
    for what, (ms, _) in taken_ms.items():
        print(f"{name} {what}: {ms:.3f} ms")
    assert {what: ms for what, (ms, floor_ms) in taken_ms.items() if ms > floor_ms} == {}
