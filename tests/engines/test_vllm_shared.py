"""Engines on two nodes share what they keep through a cluster's object store: exactly, or they compute.

A node is a process with a disk directory of its own; the store is a directory that both reach, its catalogue an actor
of a local Ray that this test starts. The engines join it as beside any cluster: through a process of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs the environment of requirements-vllm.txt")

import ray
from ray_serving import QUIET, SMALL, come_up
from vllm_models import make_model
from vllm_runs import Answer, Outcome, Step, answers, finish, flip, frames_of, prompt_of, run, same, start, transfer_of

pytestmark = pytest.mark.timeout(1800)  # engines start slowly on a busy machine
BLOCK = 128
PROMPTS = [prompt_of(seed, 2 * BLOCK + 4) for seed in range(3)]
KILL = "import sys, ray; ray.init(sys.argv[1]); ray.kill(ray.get_actor('vllm/catalogue', namespace='tiered-cache'))"


@dataclass(frozen=True)
class Site:
    """A model, a cluster, and what one node has left in the store."""

    model: Path
    store: Path
    ray_address: str
    computed: list[Answer]
    """Without the tier."""
    first: Outcome

    def run(self, node: Path, steps: list[Step], **settings: object) -> Outcome:
        """A node that has nothing yet."""
        transfer = sharing(node, self.store, self.ray_address, **settings)
        return run(node, family="llama", model=str(self.model), steps=steps, transfer=transfer)


def sharing(node: Path, store: Path, ray_address: str, **settings: object) -> dict[str, Any]:
    shared = {"object_url": store.as_uri(), "object_bytes": "256MiB", "ray_address": ray_address}
    patient = {"search_deadline_s": 20.0, "load_deadline_s": 60.0, "object_deadline_s": 20.0}  # on a busy machine
    return transfer_of(node / "disk", **{**shared, **patient, **settings})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = tmp_path_factory.mktemp("site")
    (place / "store").mkdir()
    general = {"family": "llama", "model": str(make_model("llama", place / "model"))}
    come_up(lambda: ray.init("local", **{**SMALL, **QUIET, "num_cpus": 0}))
    bare = start(place / "bare", steps=answers(PROMPTS), **general)
    try:
        address: str = ray.get_runtime_context().gcs_address
        transfer = sharing(place / "first", place / "store", address)
        first = run(place / "first", steps=[*answers(PROMPTS), ("settle", None)], transfer=transfer, **general)
        computed = finish(place / "bare", bare).answers
        yield Site(place / "model", place / "store", address, computed, first)
    finally:
        bare.kill()
        ray.shutdown()


def all_same(found: list[Answer], computed: list[Answer]) -> bool:
    return all(same(a, b) for a, b in zip(found, computed, strict=True))


def test_a_second_node_goes_on_from_what_the_first_has_left_in_the_store(site: Site, tmp_path: Path) -> None:
    assert all_same(site.first.answers, site.computed)
    assert site.first.counters["spills.object"] == len(PROMPTS)
    second = site.run(tmp_path / "second", answers(PROMPTS))
    assert all_same(second.answers, site.computed)
    assert [answer.cached_tokens for answer in second.answers] == [2 * BLOCK] * len(PROMPTS)
    assert second.counters["catalogue.found"] == len(PROMPTS)
    assert second.counters["fetched.object"] == 2 * len(PROMPTS)
    assert second.counters["misses.not_stored"] == len(PROMPTS)  # in its own tiers
    assert second.loaded <= site.first.stored


@pytest.mark.slow
def test_a_catalogue_that_dies_changes_nothing_and_is_found_again(site: Site, tmp_path: Path) -> None:
    kill = [sys.executable, "-c", KILL, site.ray_address]
    steps: list[Step] = [*answers(PROMPTS[:1]), ("command", kill), *answers(PROMPTS[1:2]), ("reach", None)]
    outcome = site.run(tmp_path / "node", [*steps, *answers(PROMPTS[2:])])
    assert all_same(outcome.answers, site.computed)
    assert outcome.answers[0].cached_tokens == outcome.answers[2].cached_tokens == 2 * BLOCK


@pytest.mark.slow
def test_without_a_cluster_an_engine_goes_on_with_its_own_tiers(site: Site, tmp_path: Path) -> None:
    outcome = site.run(
        tmp_path / "node", [*answers(PROMPTS), ("settle", None)], ray_address="127.0.0.1:1", start_deadline_s=30.0
    )
    assert all_same(outcome.answers, site.computed)
    assert [answer.cached_tokens for answer in outcome.answers] == [0] * len(PROMPTS)
    assert outcome.counters["spills.failed.object"] == len(PROMPTS)
    assert outcome.counters["catalogue.away"] >= len(PROMPTS)
    assert len(frames_of(tmp_path / "node" / "disk")) == 2 * len(PROMPTS)


@pytest.mark.slow
def test_a_flipped_byte_in_the_store_is_set_aside_and_computed(site: Site, tmp_path: Path) -> None:
    """The last of these tests: it spoils the store."""
    frames = frames_of(site.store)
    assert len(frames) == 2 * len(PROMPTS)
    for file in frames.values():
        flip(file)
    outcome = site.run(tmp_path / "node", [*answers(PROMPTS), ("settle", None)])
    assert all_same(outcome.answers, site.computed)
    assert [answer.cached_tokens for answer in outcome.answers] == [0] * len(PROMPTS)
    assert outcome.counters["loads.failed.quarantined"] >= len(PROMPTS)
    again = site.run(tmp_path / "again", answers(PROMPTS))  # they were computed, and kept again
    assert all_same(again.answers, site.computed)
    assert [answer.cached_tokens for answer in again.answers] == [2 * BLOCK] * len(PROMPTS)
