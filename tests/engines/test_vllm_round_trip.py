"""vLLM spills through the tier, a fresh process loads: tokens and logprobs are those of an engine without it.

An engine without the tier answers every prompt twice, the second time from its own prefix cache on the device: what is
loaded must give exactly that, and every block that comes to the device must be, byte for byte, one that left it. Then
one prompt's frames are flipped, another's cut short, a third's state is missing, and each is computed, exactly; and a
fourth's are forged so that no check can see it, which shows that bytes are used.

For MLA vLLM has no prefix cache on a CPU without AMX, and its kernels there round a short prompt's tokens otherwise
than a long one's: what is loaded is then compared by its bytes, and its logprobs within `NEAR`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of requirements-vllm.txt")

from vllm_models import FAMILIES, make_model
from vllm_runs import (
    BLOCK_TOKENS,
    Answer,
    Outcome,
    answers,
    distance,
    finish,
    flip,
    forge,
    frames_of,
    prompt_of,
    run,
    same,
    start,
    transfer_of,
    truncate,
)

from tiered_cache.check import check_directory
from tiered_cache.identity import FrameKey

REPRESENTATIVE = {"llama", "qwen3_next"}
PROMPTS = ("whole", "flipped", "truncated", "missing", "forged")
MLA = {"glm_moe_dsa"}
NEAR = 0.3
pytestmark = pytest.mark.timeout(1800)  # engines start slowly on a busy machine


@dataclass(frozen=True)
class Case:
    """What three processes said."""

    family: str
    prompts: dict[str, list[int]]
    tokens: int
    """Of each prompt, up to its last block's end."""
    computed: dict[str, Answer]
    """Without the tier."""
    reused: dict[str, Answer]
    """Without the tier, from the device's own cache."""
    spilled: Outcome
    loaded: dict[str, Answer]
    second: Outcome
    disk: Path
    sound: int
    """Frames that passed `tiered-cache verify` after the spill."""


def families() -> Iterator[Any]:
    for family in FAMILIES:
        yield pytest.param(family, marks=() if family in REPRESENTATIVE else pytest.mark.slow)


@pytest.fixture(scope="module", params=list(families()))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family: str = request.param
    place = tmp_path_factory.mktemp(family)
    model, disk, block = make_model(family, place / "model"), place / "disk", BLOCK_TOKENS[family]
    tokens = max(256, 2 * block)
    prompts = {name: prompt_of(seed, tokens + 4) for seed, name in enumerate(PROMPTS)}
    # the prefill is cut at every block, so that there is a state at each, and a prompt's blocks come in several steps
    general = {"family": family, "model": str(model), "settings": {"max_num_batched_tokens": max(256, block)}}
    bare = start(place / "bare", steps=answers(p for p in prompts.values() for _ in range(2)), **general)
    spilling = start(place / "spilling", steps=answers(prompts.values()), transfer=transfer_of(disk), **general)
    without, spilled = finish(place / "bare", bare), finish(place / "spilling", spilling)
    files = list(check_directory(disk))
    assert not [file for file in files if file.error]
    # where a rest of many tokens cannot be computed behind a prefix, nothing of a bad prompt may be left
    spoil(disk, frames_by_prompt(disk), block, block if family in MLA else tokens)
    second = run(place / "loading", steps=answers(prompts.values()), transfer=transfer_of(disk), **general)
    return Case(
        family,
        prompts,
        tokens,
        dict(zip(PROMPTS, without.answers[::2], strict=True)),
        dict(zip(PROMPTS, without.answers[1::2], strict=True)),
        spilled,
        dict(zip(PROMPTS, second.answers, strict=True)),
        second,
        disk,
        len(files),
    )


def frames_by_prompt(disk: Path) -> dict[str, dict[FrameKey, Path]]:
    """Which frames are of which prompt: prompts share nothing, and were answered one after the other."""
    frames = frames_of(disk)
    parents = {key.prefix: key.parent for key in frames}
    roots = {key.parent for key in frames} - {key.prefix for key in frames}

    def first_block(prefix: bytes) -> bytes:
        while parents.get(prefix, next(iter(roots))) not in roots:
            prefix = parents[prefix]
        return prefix

    written: dict[bytes, float] = {}
    for key, file in frames.items():
        first = first_block(key.prefix)
        written[first] = min(written.get(first, float("inf")), file.stat().st_mtime_ns)
    order = sorted(written, key=written.__getitem__)
    assert len(order) == len(PROMPTS)
    return {
        name: {key: file for key, file in frames.items() if first_block(key.prefix) == first}
        for name, first in zip(PROMPTS, order, strict=True)
    }


def spoil(disk: Path, frames: dict[str, dict[FrameKey, Path]], block: int, end: int) -> None:
    """Flip in the rows of the first block, cut those of the block with this end, remove a state or what there is."""
    for key, file in frames["flipped"].items():
        if key.tokens == block and key.group == "rows":
            flip(file)
    for key, file in frames["truncated"].items():
        if key.tokens == end and key.group == "rows":
            truncate(file)
    for key, file in frames["missing"].items():
        if key.group != "rows":
            file.unlink()
    if all(file.exists() for file in frames["missing"].values()):  # nothing but rows
        next(file for key, file in frames["missing"].items() if key.tokens == block).unlink()
    for key, file in frames["forged"].items():
        forge(disk, key, file)


def test_spilling_changes_no_answer(case: Case) -> None:
    for name, answer in zip(PROMPTS, case.spilled.answers, strict=True):
        assert answer.cached_tokens == 0
        assert same(answer, case.computed[name])
    assert case.spilled.counters["spills"] >= len(PROMPTS)
    assert case.sound > 2 * len(PROMPTS)


def test_a_fresh_process_goes_on_from_what_was_spilled(case: Case) -> None:
    assert case.loaded["whole"].cached_tokens == case.tokens
    if case.family in MLA:
        assert distance(case.loaded["whole"], case.computed["whole"]) < NEAR
    else:
        assert case.reused["whole"].cached_tokens == case.tokens
        assert same(case.loaded["whole"], case.reused["whole"])


def test_every_block_that_comes_to_the_device_had_left_it(case: Case) -> None:
    """But for those of the prompt that was forged."""
    foreign = case.second.loaded - case.spilled.stored
    assert len(case.second.loaded - foreign) >= case.tokens // BLOCK_TOKENS[case.family]
    assert 1 <= len(foreign) <= len(case.spilled.stored) // len(PROMPTS)


@pytest.mark.parametrize("what", ["flipped", "truncated", "missing"])
def test_what_is_bad_or_missing_is_computed(case: Case, what: str) -> None:
    answer = case.loaded[what]
    assert answer.cached_tokens < case.tokens
    if case.family in MLA and answer.cached_tokens:
        assert distance(answer, case.computed[what]) < NEAR
    else:
        assert same(answer, case.computed[what])


def test_every_bad_frame_is_counted_and_set_aside(case: Case) -> None:
    assert case.second.counters["quarantined.disk"] == 2
    assert case.second.counters["loads.failed.quarantined"] >= 2
    assert len([file for file in (case.disk / "quarantine").rglob("*") if file.is_file()]) == 2
    assert not [file for file in check_directory(case.disk) if file.error]  # computed, and kept again


def test_the_bytes_that_were_loaded_are_used(case: Case) -> None:
    assert case.loaded["forged"].cached_tokens == case.tokens
    assert distance(case.loaded["forged"], case.computed["forged"]) > 10 * NEAR
