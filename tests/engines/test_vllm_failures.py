"""What can go wrong around an engine with the tier: each time vLLM computes, exactly, and something was counted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the environment of requirements-vllm.txt")

from vllm_models import make_model
from vllm_runs import Answer, Step, answers, finish, frames_of, grown, prompt_of, run, same, start, transfer_of

from tiered_cache.check import check_directory

pytestmark = pytest.mark.timeout(1800)  # engines start slowly on a busy machine
BLOCK = 128
PROMPTS = [prompt_of(seed, 2 * BLOCK + 4) for seed in range(4)]


@dataclass(frozen=True)
class Spilled:
    """A model, and what one process left of the prompts."""

    model: Path
    disk: Path
    computed: list[Answer]
    """Without the tier."""

    def copy(self, place: Path) -> Path:
        shutil.copytree(self.disk, place)
        return place

    def spec(self, disk: Path | None, steps: list[Step], **settings: object) -> dict[str, object]:
        transfer = transfer_of(disk, **settings)
        return {"family": "llama", "model": str(self.model), "steps": steps, "transfer": transfer}


@pytest.fixture(scope="module")
def spilled(tmp_path_factory: pytest.TempPathFactory) -> Spilled:
    """The first process is killed when it has kept everything: what is on disk is there without an orderly end."""
    place = tmp_path_factory.mktemp("spilled")
    general = {"family": "llama", "model": str(make_model("llama", place / "model"))}
    bare = start(place / "bare", steps=answers(PROMPTS), **general)
    steps = [*answers(PROMPTS), ("settle", None), ("kill", None)]
    run(place / "killed", steps=steps, transfer=transfer_of(place / "disk"), killed=True, **general)
    return Spilled(place / "model", place / "disk", finish(place / "bare", bare).answers)


def test_a_disk_that_hangs_or_is_gone_delays_one_prompt_and_changes_nothing(spilled: Spilled, tmp_path: Path) -> None:
    """The engine that found everything at its start loses its disk: first it hangs, then it has no files."""
    disk = spilled.copy(tmp_path / "disk")
    steps: list[Step] = [
        *answers(PROMPTS[:1]),
        ("remove", str(disk / "entries")),
        *answers(PROMPTS[1:2]),
        ("hang", ["get", "put", "stat"]),
        *answers(PROMPTS[2:]),
    ]
    outcome = run(
        tmp_path / "run", **spilled.spec(disk, steps, load_deadline_s=2, close_deadline_s=1, keep_deadline_s=1)
    )
    assert [answer.cached_tokens for answer in outcome.answers] == [2 * BLOCK, 0, 0, 0]
    assert all(same(a, b) for a, b in zip(outcome.answers, spilled.computed, strict=True))
    assert outcome.counters["loads.failed.lost"] >= 1
    assert outcome.counters["loads.failed.deadline"] >= 1
    assert outcome.counters["refused.tier_rests"] >= 1


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "mounted"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["others have filled it", "files end early"])
def test_a_full_disk_keeps_what_it_can_and_changes_nothing(
    how: str, spilled: Spilled, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Writes fail from the second prompt on: on a filesystem that is full, and at a limit for the size of files."""
    place, full = tmp_path, ("limit_files", 4096)
    if how == "others have filled it":
        place = request.getfixturevalue("small_filesystem")
        full = ("fill", str(place))
    steps: list[Step] = [*answers(PROMPTS[:1]), ("settle", None), full, *answers(PROMPTS[1:])]
    outcome = run(tmp_path / "failing", **spilled.spec(place / "disk", steps))
    assert all(same(a, b) for a, b in zip(outcome.answers, spilled.computed, strict=True))
    counted = outcome.counters
    if how == "others have filled it":  # which is seen before anything is written
        assert counted["declined.no_room"] == len(PROMPTS) - 1
    else:
        assert counted["spills"] == 1
        assert counted["spills.failed.tier"] + counted.get("spills.failed.full", 0) == len(PROMPTS) - 1
    assert {key.tokens for key in frames_of(place / "disk")} == {BLOCK, 2 * BLOCK}
    assert not [file for file in check_directory(place / "disk") if file.error]


@pytest.mark.slow
def test_a_budget_that_is_too_small_declines_and_changes_nothing(spilled: Spilled, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    outcome = run(tmp_path / "small", **spilled.spec(disk, answers(PROMPTS), disk_bytes="96KiB"))
    assert all(same(a, b) for a, b in zip(outcome.answers, spilled.computed, strict=True))
    assert grown(outcome.counters, "declined.") == len(PROMPTS)
    assert not frames_of(disk)


@pytest.mark.slow
def test_other_weights_at_the_same_path_find_nothing(spilled: Spilled, tmp_path: Path) -> None:
    disk, model = spilled.copy(tmp_path / "disk"), tmp_path / "model"
    shutil.copytree(spilled.model, model)
    same_weights = Spilled(model, disk, [])
    assert run(tmp_path / "a", **same_weights.spec(disk, answers(PROMPTS))).answers[0].cached_tokens == 2 * BLOCK
    make_model("llama", model, seed=1)
    bare = run(tmp_path / "bare", family="llama", model=str(model), steps=answers(PROMPTS))
    outcome = run(tmp_path / "b", **same_weights.spec(disk, answers(PROMPTS)))
    assert [answer.cached_tokens for answer in outcome.answers] == [0] * len(PROMPTS)
    assert all(same(a, b) for a, b in zip(outcome.answers, bare.answers, strict=True))
    assert not any(same(a, b) for a, b in zip(outcome.answers, spilled.computed, strict=True))
    assert outcome.counters["misses.not_stored"] == len(PROMPTS)


@pytest.mark.slow
def test_two_workers_keep_and_load_their_shards_together(spilled: Spilled, tmp_path: Path) -> None:
    """TP=2: equal to TP=2 without the tier, and what one worker alone has spilled is not for two."""
    disk = spilled.copy(tmp_path / "disk")
    general = {"family": "llama", "model": str(spilled.model), "settings": {"tensor_parallel_size": 2}}
    twice = [prompt for prompt in PROMPTS for _ in range(2)]
    bare = run(tmp_path / "bare", steps=answers(twice), **general)
    first = run(tmp_path / "first", steps=answers(PROMPTS), transfer=transfer_of(disk), **general)
    assert [answer.cached_tokens for answer in first.answers] == [0] * len(PROMPTS)
    assert all(same(a, b) for a, b in zip(first.answers, bare.answers[::2], strict=True))
    second = run(tmp_path / "second", steps=answers(PROMPTS), transfer=transfer_of(disk), **general)
    assert [answer.cached_tokens for answer in second.answers] == [2 * BLOCK] * len(PROMPTS)
    assert all(same(a, b) for a, b in zip(second.answers, bare.answers[1::2], strict=True))
