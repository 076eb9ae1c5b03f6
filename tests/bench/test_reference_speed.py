"""How fast the reference engine is: a replay of many million tokens must not wait for it.

The times are printed (`pytest -m bench -s`). What is asserted is that nothing is done token by token in Python, and
that nothing takes more than its share longer for a longer prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from costs import instructions, shortest_s

from tiered_cache.engines.base import FrameName
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.testing.engine_suite import empty_frame, export, frames_needed, random_prompt, restore

SHORT_TOKENS, PROMPT_TOKENS = 1_500, 12_000
INSTRUCTIONS_MAX = {  # about twice what was counted; one loop over the tokens would be 100,000
    "reserve, compute, release": 60_000,
    "output": 3_000,
    "digest": 6_000,
    "export of one block": 2_500,
    "restore": 90_000,
    "decode of one token": 17_000,
}


def calls_on(engine: ReferenceEngine, tokens: int) -> dict[str, Callable[[], object]]:
    prompt, room = random_prompt(engine, tokens), tokens + 100

    def compute() -> int:
        sequence = engine.start(engine.reserve(room))
        engine.extend(sequence, prompt)
        return sequence

    sequence = compute()
    frames = export(engine, sequence, frames_needed(engine.geometry, tokens))
    block = FrameName("rows", 512)
    place = empty_frame(engine.geometry, block)
    return {
        "reserve, compute, release": lambda: engine.release(compute()),
        "output": lambda: engine.output(sequence),
        "digest": lambda: engine.digest(sequence),
        "export of one block": lambda: engine.export(sequence, [block], [place]),
        "restore": lambda: engine.release(restore(engine, frames, tokens, room)),
        "decode of one token": lambda: engine.generate(sequence, 1),
    }


@pytest.mark.bench
@pytest.mark.parametrize("name", ["qsa-ple-gdn:tiny", "mla-dsa-kda:tiny"])
def test_a_prompt_of_twelve_thousand_tokens(name: str) -> None:
    engine = ReferenceEngine(name)
    short, long = calls_on(engine, SHORT_TOKENS), calls_on(engine, PROMPT_TOKENS)
    assert long.keys() == INSTRUCTIONS_MAX.keys()
    for what, call in long.items():
        taken_s = shortest_s({"short": short[what], "long": call}, rounds=15)
        executed = instructions(call)
        print(f"{name} {what}: {taken_s['long'] * 1e3:.3f} ms, {executed} instructions")
        assert executed < INSTRUCTIONS_MAX[what], what
        assert taken_s["long"] < 3 * PROMPT_TOKENS / SHORT_TOKENS * taken_s["short"], what
