"""What every `CachePolicy` keeps: subclass `PolicyTests` in a test module and say how yours is made.

    class TestMine(PolicyTests):
        def make(self, seed: int) -> CachePolicy:
            return MyPolicy(seed)

The traffic is synthetic, small and reproducible; the index is the real one, and no bytes are moved.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_cache.index import FrameName, Layout, PrefixId, PrefixIndex, RemovalReason
from tiered_cache.policy.base import CachePolicy, Hints, Request

BLOCK_TOKENS = 16
ROW_BYTES = 1_000
CHECKPOINT_BYTES = 300
CAPACITY_BYTES = 60_000


@dataclass(frozen=True, slots=True)
class PathChain:
    """A chain whose prefix ids are the paths themselves: tuples of block names."""

    path: tuple[int, ...]
    namespace: int = 0
    block_tokens: int = BLOCK_TOKENS

    @property
    def blocks(self) -> int:
        return len(self.path)

    def __len__(self) -> int:
        return len(self.path) * BLOCK_TOKENS

    def block_hash(self, index: int, /) -> tuple[int, ...]:
        return (self.namespace, *self.path[:index])

    def prefix_hash(self, tokens: int, /) -> tuple[int, ...]:
        return self.block_hash(tokens // BLOCK_TOKENS)


class PolicyHarness:
    """One tier without bytes, driven as a cache drives it; every answer of the policy is checked."""

    def __init__(self, policy: CachePolicy, *, carries: bool = True, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self.index = PrefixIndex(["tier"])
        self.index.register(Layout(0, (0,), BLOCK_TOKENS, carries=carries))
        self.view = self.index.view("tier")
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self.log: list[tuple[int, tuple[PrefixId, ...], tuple[PrefixId, ...]]] = []
        """(tokens restored, admitted, dropped) of each request."""

    def request(self, prompt: Sequence[int], whole: Sequence[int], now_s: float, hints: Hints | None = None) -> int:
        """One request from look-up to spill; returns the tokens restored."""
        chain, end = PathChain(tuple(prompt)), PathChain(tuple(whole))
        match = self.index.longest(chain, len(chain))
        request = Request(chain, len(chain))
        hints = hints or Hints()
        take_at = self.policy.start(request, match, hints, now_s, self.view)
        assert all(0 < tokens <= len(chain) for tokens in take_at)
        at_end = self.policy.finish(request, end, len(end) - len(chain), hints, now_s)
        assert all(0 < tokens <= len(end) for tokens in at_end)
        admitted, dropped = self._spill(end, [*take_at, *at_end], now_s)
        self.log.append((match.tokens, admitted, dropped))
        return match.tokens

    def _spill(
        self, chain: PathChain, take_at: Sequence[int], now_s: float
    ) -> tuple[tuple[PrefixId, ...], tuple[PrefixId, ...]]:
        new = self.index.candidates(chain, take_at, "tier", self._frame_bytes)
        if not new:
            return (), ()
        pinned = self.index.pinned(now_s)
        free_bytes = self.capacity_bytes - self.index.stored_bytes("tier")
        proposal = self.policy.propose(new, free_bytes, pinned, now_s, self.view)
        assert set(proposal.admit) <= {candidate.prefix for candidate in new}
        assert len(set(proposal.drop)) == len(proposal.drop)
        assert not set(proposal.drop) & set(pinned)
        assert proposal.admit or not proposal.drop, "nothing is gained by dropping others"
        taken = [candidate for candidate in new if candidate.prefix in set(proposal.admit)]
        claims = [self.index.claim(chain, candidate.tokens, "tier") for candidate in taken]
        self.drop(proposal.drop, RemovalReason.EVICTED, now_s)
        for candidate in taken:
            for name in self.index.missing(chain, candidate.tokens, "tier"):
                self.index.insert(name, "tier", self._frame_bytes(name.group, name.tokens))
        for claim in claims:
            assert not self.index.release(claim)
        assert self.index.stored_bytes("tier") <= self.capacity_bytes
        self.policy.commit([candidate.prefix for candidate in taken], [], now_s, self.view)
        return proposal.admit, proposal.drop

    def drop(self, prefixes: Sequence[PrefixId], reason: RemovalReason, now_s: float) -> list[FrameName]:
        """Drop checkpoints, for whatever reason, and tell the policy."""
        names: list[FrameName] = []
        for prefix in prefixes:
            assert prefix in self.view
            names += self.index.drop(prefix, "tier", reason)
        self.policy.commit([], [(prefix, reason) for prefix in prefixes], now_s, self.view)
        return names

    @staticmethod
    def _frame_bytes(group: str, tokens: int) -> int:
        del tokens
        return ROW_BYTES if group == "rows" else CHECKPOINT_BYTES


def traffic(seed: int, requests: int) -> list[tuple[list[int], list[int], float]]:
    """(prompt, prompt and answer, arrival): sessions of some turns over shared system prompts, one-shots between."""
    rng = random.Random(seed)  # noqa: S311 - reproducible
    names, now_s = iter(range(1000, 1_000_000)), 0.0
    sessions: list[list[int]] = []
    found = []
    for _ in range(requests):
        now_s += rng.expovariate(1.0)
        if sessions and rng.random() < 0.6:
            past = sessions.pop(rng.randrange(len(sessions)))
            if rng.random() < 0.1:
                past = past[: rng.randint(1, len(past))]
        else:
            past = [rng.randint(1, 3)] * rng.randint(1, 3)
        prompt = past + [next(names) for _ in range(rng.randint(0, 4))]
        whole = prompt + [next(names) for _ in range(rng.randint(0, 2))]
        found.append((prompt, whole, now_s))
        if rng.random() < 0.8 and len(whole) < 30:
            sessions.append(whole)
    return found


class PolicyTests(ABC):
    """The contract."""

    @abstractmethod
    def make(self, seed: int) -> CachePolicy:
        """A new policy object."""

    def run(self, seed: int = 0, requests: int = 400, *, carries: bool = True) -> PolicyHarness:
        """Traffic through a new policy."""
        harness = PolicyHarness(self.make(seed), carries=carries)
        for prompt, whole, now_s in traffic(seed, requests):
            harness.request(prompt, whole, now_s)
        return harness

    def test_it_stays_inside_the_budget_and_hits(self) -> None:
        """Checked at every step by the harness; and a tier that holds a third of everything hits something."""
        harness = self.run()
        assert sum(tokens for tokens, _, _ in harness.log) > 0
        assert any(dropped for _, _, dropped in harness.log)

    def test_the_same_seed_decides_alike(self) -> None:
        assert self.run(3).log == self.run(3).log

    def test_nothing_is_dead_weight(self) -> None:
        """Every row that is held leads to a checkpoint."""
        assert not self.run().index.unsupported("tier")

    def test_a_model_without_carries(self) -> None:
        """Every block end is a checkpoint there, and owns nothing."""
        harness = self.run(carries=False)
        assert sum(tokens for tokens, _, _ in harness.log) > 0

    def test_pinned_checkpoints_stay(self) -> None:
        harness = PolicyHarness(self.make(0))
        first, *rest = traffic(0, 200)
        harness.request(*first)
        pinned = list(harness.view)
        for prefix in pinned:
            harness.index.pin(prefix, 1e9)
        for prompt, whole, now_s in rest:
            harness.request(prompt, whole, now_s)
        assert pinned
        assert all(prefix in harness.view for prefix in pinned)

    def test_if_everything_is_pinned_the_new_is_refused(self) -> None:
        harness = PolicyHarness(self.make(0), capacity_bytes=3_000)
        harness.request([1], [1, 2], 0.0)
        for prefix in list(harness.view):
            harness.index.pin(prefix, 1e9)
        before = list(harness.view)
        harness.request([7, 8], [7, 8, 9], 1.0)
        assert list(harness.view) == before

    def test_what_can_never_fit_is_refused(self) -> None:
        harness = PolicyHarness(self.make(0), capacity_bytes=6_000)
        harness.request([1, 2], [1, 2], 0.0)
        harness.request([5] * 10, [5] * 10, 1.0)
        assert (0, *[5] * 10) not in harness.view
        assert len(harness.view) > 0

    def test_it_lives_with_losses_and_recovery(self) -> None:
        """Checkpoints vanish, and others that it never saw are there: it goes on, and can drop them."""
        harness = self.run(1, 100)
        held = list(harness.view)
        harness.drop(held[: len(held) // 2], RemovalReason.LOST, 1000.0)
        policy = self.make(1)
        policy.commit(list(harness.view), [], 1000.0, harness.view)
        recovered = PolicyHarness(policy)
        recovered.index, recovered.view = harness.index, harness.view
        for prompt, whole, now_s in traffic(2, 200):
            recovered.request(prompt, whole, 1000.0 + now_s)

    def test_a_smaller_budget_is_kept_to(self) -> None:
        harness = self.run(4, 100)
        excess = harness.index.stored_bytes("tier") - 5_000
        assert excess > 0
        proposal = harness.policy.propose([], -excess, (), 1000.0, harness.view)
        harness.drop(proposal.drop, RemovalReason.EVICTED, 1000.0)
        assert harness.index.stored_bytes("tier") <= 5_000

    def test_its_memory_is_bounded(self) -> None:
        """Four times the traffic does not need four times the memory."""
        short, long = self.run(5, 500).policy, self.run(5, 2000).policy
        assert 0 < long.state_bytes() < 2.5 * short.state_bytes() + (1 << 20)
