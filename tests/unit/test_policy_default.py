"""The default policy's parts: the ghost tree, the shadow on it, the hazard model, the floor, and hints."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.policy.base import Hints
from tiered_cache.policy.default import DefaultPolicy
from tiered_cache.policy.floor import TRIAL_REQUESTS, LruFloor, Recency
from tiered_cache.policy.ghost import GhostNode, GhostTree
from tiered_cache.policy.hazard import BUCKETS, HazardModel, bucket_of, worth
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.policy.shadow import Shadow
from tiered_cache.testing.policy_suite import BLOCK_TOKENS, PathChain, PolicyHarness, traffic

PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=12)


class NumberedChain(PathChain):
    """Prefix ids as numbers, one for each path."""

    numbers: dict[tuple[int, ...], int] = {}  # noqa: RUF012

    def block_hash(self, index: int, /) -> int:  # type: ignore[override]
        return self.numbers.setdefault(self.path[:index], len(self.numbers) + 1)


@given(PATHS)
@settings(max_examples=200, deadline=None)
def test_a_ghost_tree_knows_exactly_the_prefixes_that_it_saw(paths: list[tuple[int, ...]]) -> None:
    tree, seen = GhostTree(1000), set()
    for path in paths:
        chain = NumberedChain(path)
        node, child, common = tree.match(chain)
        assert common == max(n for n in range(len(path) + 1) if n == 0 or path[:n] in seen)
        assert node.blocks <= common
        assert (child is None) == (node.blocks == common)
        end = tree.add(chain, len(path))
        assert end.blocks == len(path)
        seen |= {path[:n] for n in range(1, len(path) + 1)}
        assert tree.blocks == len(seen)
        assert tree.match(chain)[0] is end


@given(PATHS, st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_a_ghost_tree_forgets_what_no_one_holds(paths: list[tuple[int, ...]], nodes_max: int) -> None:
    tree, held = GhostTree(nodes_max), []
    for number, path in enumerate(paths):
        node = tree.add(NumberedChain(path), len(path))
        if number % 3 == 0 and node.parent is not None:
            tree.hold(node)
            held.append((node, path))
    assert all(tree.match(NumberedChain(path))[0] is node for node, path in held)
    assert tree.nodes <= nodes_max + 3 * len(held) + 1


@given(PATHS, st.data())
@settings(max_examples=100, deadline=None)
def test_a_shadow_counts_the_rows_that_lead_to_checkpoints(paths: list[tuple[int, ...]], data: st.DataObject) -> None:
    tree = GhostTree(1000)
    shadow = Shadow(tree)
    held: dict[tuple[int, ...], GhostNode] = {}
    for path in paths:
        held[path] = tree.add(NumberedChain(path), len(path))
        shadow.add(held[path], 7)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            shadow.drop(held.pop(gone))
        rows = {path[:n] for path in held for n in range(1, len(path) + 1)}
        assert (shadow.row_blocks, shadow.checkpoint_bytes) == (len(rows), 7 * len(held))
        assert set(shadow.own_bytes) == set(held.values())
    for path, node in held.items():
        above = [p for p in held if path[: len(p)] == p and p != path]
        ancestor = shadow.ancestor(node)
        assert ancestor.blocks == max((len(p) for p in above), default=0)


def test_buckets_are_two_an_octave() -> None:
    ages = np.array([0.0, 0.25, 0.26, 0.36, 0.5, 1.0, 1e9])
    assert bucket_of(ages).tolist() == [0, 0, 1, 2, 3, 5, BUCKETS - 1]


def test_the_model_learns_a_hazard_and_who_has_it() -> None:
    """Half of those with feature 1 are used in bucket 4, none of those with feature 0."""
    model, rng = HazardModel(1, (2,)), random.Random(0)
    for _ in range(400):
        feature = rng.randint(0, 1)
        used = float(feature and rng.random() < 0.5)
        one = np.array([0])
        model.learn(one, np.array([[feature]]), np.array([4]), np.array([used]))
    chances = model.hazards(np.array([0, 0]), np.array([[0], [1]]))[:, 4]
    assert chances[0] < 0.05
    assert 0.4 < chances[1] < 0.6


def test_worth_prefers_soon_and_sure_and_sees_over_a_gap() -> None:
    never, soon, late = np.zeros(BUCKETS), np.zeros(BUCKETS), np.zeros(BUCKETS)
    soon[3], late[12] = 0.9, 0.9
    values = worth(np.array([never, soon, late]), np.zeros(3))
    assert values[0] == 0
    assert values[1] > values[2] > 0
    later = worth(np.array([late]), np.array([11.0]))
    assert later[0] > values[2], "the nearer the use, the more it is worth to wait for it"
    assert worth(np.array([soon]), np.array([0.8]))[0] == 0, "its time has passed"


def test_worth_grows_all_the_way_to_a_use_and_does_not_jump_between_buckets() -> None:
    hazards = np.full(BUCKETS, 0.01)
    hazards[12] = 0.9  # 11.3 to 16 s
    ages_s = np.geomspace(3.0, 11.3, 200)
    values = worth(np.broadcast_to(hazards, (200, BUCKETS)), ages_s)
    assert np.all(np.diff(values) > 0), "the nearer the use, the more it is worth to wait for it"
    assert np.all(values[1:] / values[:-1] < 1.1)


def test_the_floor_follows_lru_only_while_that_is_better() -> None:
    tree = GhostTree(100)
    floor = LruFloor(tree)
    chain = PathChain((1, 2, 3))
    floor.end(tree.add(chain, 3), 1, 1, 100)
    followed = []
    for own_tokens in [0] * TRIAL_REQUESTS + [3 * BLOCK_TOKENS] * (3 * TRIAL_REQUESTS):
        floor.arrive(chain, own_tokens)
        followed.append(floor.follows_lru)
    assert not any(followed[: TRIAL_REQUESTS - 1])
    assert followed[TRIAL_REQUESTS]
    assert not followed[-1]


def test_recency_forgets_what_is_not_held() -> None:
    tree = GhostTree(10)
    shadow = Shadow(tree)
    recency = Recency(shadow)
    for number in range(1, 1000):
        node = tree.add(PathChain((number,)), 1)
        shadow.add(node, 1)
        recency.use(node)
        shadow.drop(node)
    assert len(recency) < 100
    assert recency.pop() is None


def test_it_beats_lru_on_sessions_among_one_shots() -> None:
    hits = {}
    for name, policy in (("default", DefaultPolicy(0)), ("lru", LruPolicy())):
        harness = PolicyHarness(policy)
        for prompt, whole, now_s in traffic(7, 1500):
            harness.request(prompt, whole, now_s)
        hits[name] = sum(tokens for tokens, _, _ in harness.log)
    assert hits["default"] > 1.05 * hits["lru"]


def ends(harness: PolicyHarness) -> set[int]:
    """The first block of every path that is held."""
    return {prefix[1] for prefix in harness.view if isinstance(prefix, tuple)}


@pytest.mark.parametrize(
    ("favoured", "others"),
    [
        (Hints(priority=1), Hints()),
        (Hints(), Hints(priority=-1)),
        (Hints(returns_in_s=4.0), Hints()),
    ],
)
def test_hints_decide_who_stays(favoured: Hints, others: Hints) -> None:
    """Without them the oldest would go: four of eight fit, and nothing has been learned yet."""
    harness = PolicyHarness(DefaultPolicy(0), capacity_bytes=40_000)
    harness.request([1] * 8, [1] * 9, 0.0, favoured)
    for number in range(2, 9):
        harness.request([number] * 8, [number] * 9, float(number), others)
    assert 1 in ends(harness)
    assert len(ends(harness)) < 8


def test_proposals_change_nothing_until_they_are_committed() -> None:
    harness = PolicyHarness(DefaultPolicy(0))
    for prompt, whole, now_s in itertools.islice(traffic(3, 200), 200):
        harness.request(prompt, whole, now_s)
    policy = harness.policy
    assert isinstance(policy, DefaultPolicy)
    before = (dict(policy.held.own_bytes), policy.held.row_blocks)
    policy.propose([], -20_000, (), 1e4, harness.view)
    assert (dict(policy.held.own_bytes), policy.held.row_blocks) == before
    held_bytes = policy.held.row_blocks * policy.block_bytes + policy.held.checkpoint_bytes
    assert held_bytes == harness.index.stored_bytes("tier"), "the mirror is what the tier holds"
