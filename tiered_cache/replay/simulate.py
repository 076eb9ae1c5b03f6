"""What a policy would hit on a trace: the real index and the real policy objects, at true sizes, without moving a byte.

Time is the trace's own: a request is looked up, computed and spilled at its arrival. Everything new goes to the first
tier, and what a tier's policy drops is offered to the next one, as in the cache. No room is set aside for the state of
running requests, and a policy may refuse what is new: the same for every policy, and for the offline bounds.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiered_cache.errors import ConfigError
from tiered_cache.identity import CHECKPOINT
from tiered_cache.index import Candidate, Chain, FrameName, Layout, PrefixId, PrefixIndex, RemovalReason
from tiered_cache.policy.base import CachePolicy, Hints, Request
from tiered_cache.policy.ghost import GhostNode, GhostTree
from tiered_cache.policy.lifetimes import Lifetimes
from tiered_cache.policy.names import build_policy
from tiered_cache.replay.bounds import Access, PathTree, feasible_bound, upper_bound
from tiered_cache.replay.traces import TraceRequest

KV_BYTES_PER_TOKEN = 65_536
CHECKPOINT_BYTES = 26_787_840
"""Both of the hybrid model of the Marconi paper: 4 attention and 24 Mamba layers, d = 4096, n = 128, fp16."""
SAMPLES_MAX = 256
DEAD_SAMPLES_MAX = 16
TOOL_CALL_S = 60.0
_ROOT = -1


class RunChain:
    """A chain over a trace's block ids: every `stride`-th of them ends one of ours. Fits `index.Chain`."""

    __slots__ = ("_firsts", "_starts", "_stride", "block_tokens", "blocks", "namespace")

    def __init__(self, runs: Iterable[tuple[int, int]], block_tokens: int, stride: int = 1) -> None:
        """`block_tokens`: of the trace's blocks."""
        self.namespace = 0
        self.block_tokens = block_tokens * stride
        self._stride = stride
        self._starts: list[int] = []
        self._firsts: list[int] = []
        total = 0
        for first, count in runs:
            self._starts.append(total)
            self._firsts.append(first)
            total += count
        self.blocks = total // stride

    def __len__(self) -> int:
        return self.blocks * self.block_tokens

    def block_hash(self, index: int, /) -> int:
        if not index:
            return _ROOT
        place = index * self._stride - 1
        run = bisect.bisect_right(self._starts, place) - 1
        return self._firsts[run] + place - self._starts[run]

    def prefix_hash(self, tokens: int, /) -> int:
        assert tokens % self.block_tokens == 0
        return self.block_hash(tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Model:
    """What matters of the model and its engine."""

    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN
    checkpoint_bytes: int = CHECKPOINT_BYTES
    """0 for a model without carries: then every block end can be restored."""
    prefill_tokens_per_s: float | None = None

    def frame_bytes(self, block_tokens: int, group: str) -> int:
        return self.checkpoint_bytes if group == CHECKPOINT else self.kv_bytes_per_token * block_tokens


@dataclass(frozen=True, slots=True)
class TierModel:
    """One tier."""

    name: str
    capacity_bytes: int
    read_bytes_per_s: float | None = None
    """None: restoring from it costs no time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stand after some request."""

    requests: int
    now_s: float
    input_tokens: int
    hit_tokens: int
    stored_bytes: Mapping[str, int]
    """By tier, as are the others."""
    written_bytes: Mapping[str, int]
    read_bytes: Mapping[str, int]
    policy_bytes: int


@dataclass(slots=True)
class SimulationResult:
    """One policy at one set of tiers."""

    policy: str
    tiers: tuple[TierModel, ...]
    block_tokens: int
    requests: int = 0
    input_tokens: int = 0
    hit_tokens: int = 0
    hit_tokens_by_tier: Counter[str] = field(default_factory=Counter)
    """By the slowest tier that the restore needed."""
    frames_peak: int = 0
    policy_bytes_peak: int = 0
    dead_bytes_peak: int = 0
    """Of frames that no checkpoint in their tier needs."""
    misses_by_reason: Counter[str] = field(default_factory=Counter)
    lost_tokens_by_reason: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that were not restored."""
    removals_by_reason: Counter[str] = field(default_factory=Counter)
    """`tier.reason` -> checkpoints."""
    refused: Counter[str] = field(default_factory=Counter)
    """Tier -> checkpoints that its policy did not take."""
    saved_s: float = 0.0
    """Estimated time to first token saved, over all requests, by the restores that were worth it."""
    not_worth_restoring: int = 0
    samples: list[Sample] = field(default_factory=list)
    elapsed_s: float = 0.0

    @property
    def capacity_bytes(self) -> int:
        return sum(tier.capacity_bytes for tier in self.tiers)

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    def to_document(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "policy": self.policy,
            "capacity_bytes": self.capacity_bytes,
            "tiers": [{"name": t.name, "capacity_bytes": t.capacity_bytes} for t in self.tiers],
            "block_tokens": self.block_tokens,
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_rate": self.hit_rate,
            "hit_tokens_by_tier": dict(self.hit_tokens_by_tier),
            "frames_peak": self.frames_peak,
            "policy_bytes_peak": self.policy_bytes_peak,
            "dead_bytes_peak": self.dead_bytes_peak,
            "misses_by_reason": dict(self.misses_by_reason),
            "lost_tokens_by_reason": dict(self.lost_tokens_by_reason),
            "removals_by_reason": dict(self.removals_by_reason),
            "refused": dict(self.refused),
            "saved_s": self.saved_s,
            "not_worth_restoring": self.not_worth_restoring,
            "samples": [
                {
                    "requests": s.requests,
                    "now_s": s.now_s,
                    "input_tokens": s.input_tokens,
                    "hit_tokens": s.hit_tokens,
                    "stored_bytes": dict(s.stored_bytes),
                    "written_bytes": dict(s.written_bytes),
                    "read_bytes": dict(s.read_bytes),
                    "policy_bytes": s.policy_bytes,
                }
                for s in self.samples
            ],
            "elapsed_s": self.elapsed_s,
        }


class Simulation:
    """The tiers of one node, without bytes."""

    def __init__(
        self, tiers: Sequence[TierModel], policies: Sequence[CachePolicy], block_tokens: int, model: Model
    ) -> None:
        assert len(tiers) == len(policies) > 0
        self.index = PrefixIndex([tier.name for tier in tiers])
        self.index.register(Layout(0, _ROOT, block_tokens, carries=model.checkpoint_bytes > 0))
        self._lifetimes = Lifetimes(self.index, [tier.name for tier in tiers])
        self.written_bytes: Counter[str] = Counter()
        self.read_bytes: Counter[str] = Counter()
        self.removals: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._tiers = tuple(tiers)
        self._policies = tuple(policies)
        self._views = tuple(self.index.view(tier.name) for tier in tiers)
        self._model = model
        self._block_tokens = block_tokens
        self._now_s = 0.0

    def frame_bytes(self, group: str, tokens: int) -> int:
        """Raw bytes of a frame."""
        del tokens
        return self._model.frame_bytes(self._block_tokens, group)

    def request(
        self, prompt: Chain, whole: Chain, input_tokens: int, output_tokens: int, now_s: float, hints: Hints
    ) -> tuple[int, str, str, float]:
        """One request from look-up to spill.

        Returns tokens restored, why not more (`""` if all), the slowest tier needed (`""` for a miss), seconds saved.
        """
        self._now_s = now_s
        self._drop_expired()
        match = self.index.longest(prompt, input_tokens - 1)
        if match.tokens:
            self._lifetimes.restored(prompt, match, hints, now_s)
        request = Request(prompt, input_tokens)
        take_at: set[int] = set()
        for policy, view in zip(self._policies, self._views, strict=True):
            take_at.update(policy.start(request, match, hints, now_s, view))
        slowest, saved_s = self._restore(prompt, match.tokens)
        for policy in self._policies:
            take_at.update(policy.finish(request, whole, output_tokens, hints, now_s))
        if hints.will_not_return:
            take_at.discard(len(whole))
        self._lifetimes.left(whole, sorted(take_at), hints, now_s)
        self._offer(0, whole, sorted(take_at))
        return match.tokens, str(match.reason or ""), slowest, saved_s

    def _restore(self, prompt: Chain, tokens: int) -> tuple[str, float]:
        if not tokens:
            return "", 0.0
        if len(self._tiers) == 1:
            sizes = {self._tiers[0].name: self._restore_bytes(tokens)}
        else:
            sizes = {}
            for place in self.index.support(prompt, tokens):
                tier, size = place.copies[0]
                sizes[tier] = sizes.get(tier, 0) + size
        load_s = sum(
            size / tier.read_bytes_per_s
            for tier in self._tiers
            if tier.read_bytes_per_s and (size := sizes.get(tier.name, 0))
        )
        rate = self._model.prefill_tokens_per_s
        saved_s = tokens / rate - load_s if rate else 0.0
        if saved_s >= 0:
            self.read_bytes.update(sizes)
        return next(tier.name for tier in reversed(self._tiers) if tier.name in sizes), saved_s

    def _restore_bytes(self, tokens: int) -> int:
        return tokens * self._model.kv_bytes_per_token + self._model.checkpoint_bytes

    def _offer(self, number: int, chain: Chain, stops: Sequence[int]) -> bool:
        """Let a tier's policy choose, make room, and bring what it takes; returns whether it took all."""
        tier, policy, view = self._tiers[number], self._policies[number], self._views[number]
        new = self.index.candidates(chain, stops, tier.name, self.frame_bytes)
        if not new:
            return True
        free_bytes = tier.capacity_bytes - self.index.stored_bytes(tier.name)
        pinned = self.index.pinned(self._now_s)
        proposal = policy.propose(new, free_bytes, pinned, self._now_s, view)
        admitted = set(proposal.admit)
        taken: list[Candidate] = [candidate for candidate in new if candidate.prefix in admitted]
        self.refused[tier.name] += len(new) - len(taken)
        claim = self.index.claim(chain, taken[-1].tokens, tier.name) if taken else None
        self._drop(number, proposal.drop)
        for candidate in taken:
            for name in self.index.missing(chain, candidate.tokens, tier.name):
                self._insert(number, name)
        if claim is not None:
            leftover = self.index.release(claim)
            assert not leftover
        assert self.index.stored_bytes(tier.name) <= tier.capacity_bytes
        if taken:
            policy.commit([candidate.prefix for candidate in taken], [], self._now_s, view)
        return len(taken) == len(new)

    def _insert(self, number: int, name: FrameName) -> None:
        tier, size = self._tiers[number].name, self.frame_bytes(name.group, name.tokens)
        self.index.insert(name, tier, size)
        self.written_bytes[tier] += size

    def _drop(self, number: int, prefixes: Sequence[PrefixId]) -> None:
        """Drop checkpoints, after the tier below had its chance."""
        if not prefixes:
            return
        moved = set()
        if number + 1 < len(self._tiers):
            for prefix in prefixes:
                chain = self.index.chain_to(prefix)
                if chain is not None and self._offer(number + 1, chain, [len(chain)]):
                    moved.add(prefix)
        self._remove(number, [(p, RemovalReason.MOVED if p in moved else RemovalReason.EVICTED) for p in prefixes])

    def _drop_expired(self) -> None:
        expired = [(prefix, RemovalReason.EXPIRED) for prefix in self._lifetimes.expired(self._now_s)]
        for number in range(len(self._tiers)) if expired else ():
            self._remove(number, expired)

    def _remove(self, number: int, chosen: Sequence[tuple[PrefixId, RemovalReason]]) -> None:
        tier, dropped = self._tiers[number].name, []
        for prefix, reason in chosen:
            if self.index.drop(prefix, tier, reason):
                dropped.append((prefix, reason))
                self.removals[f"{tier}.{reason}"] += 1
        self._policies[number].commit([], dropped, self._now_s, self._views[number])


def simulate(
    requests: Sequence[TraceRequest],
    trace_block_tokens: int,
    policy: str,
    tiers: Sequence[TierModel],
    *,
    block_tokens: int | None = None,
    model: Model = Model(),
    hints: Sequence[Hints] | None = None,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> SimulationResult:
    """Run a policy, one object a tier, over a trace.

    `block_tokens`: ours, a multiple of the trace's; `hints`: one for each request; `progress` is told of each request.
    Raises `ConfigError` for an unknown policy and for blocks that do not fit.
    """
    block_tokens = block_tokens or trace_block_tokens
    stride = _stride(block_tokens, trace_block_tokens)
    policies = [build_policy(policy, seed + number) for number in range(len(tiers))]
    simulation = Simulation(tiers, policies, block_tokens, model)
    result = SimulationResult(policy, tuple(tiers), block_tokens)
    every = max(1, -(-len(requests) // SAMPLES_MAX))
    dead_every = max(1, -(-len(requests) // DEAD_SAMPLES_MAX))
    started_s = time.perf_counter()
    for number, request in enumerate(requests):
        prompt = RunChain(request.runs, trace_block_tokens, stride)
        whole = prompt
        if request.output_runs:
            whole = RunChain((*request.runs, *request.output_runs), trace_block_tokens, stride)
        hint = hints[number] if hints is not None else Hints()
        tokens, reason, slowest, saved_s = simulation.request(
            prompt, whole, request.input_tokens, request.output_tokens, request.arrival_s, hint
        )
        _count(result, request.input_tokens, tokens, reason, slowest, saved_s)
        result.frames_peak = max(result.frames_peak, sum(simulation.index.stored_frames(t.name) for t in tiers))
        if number % every == every - 1 or number == len(requests) - 1:
            result.policy_bytes_peak = max(result.policy_bytes_peak, sum(p.state_bytes() for p in policies))
            result.samples.append(_sample(result, simulation, tiers, policies, request.arrival_s))
        if number % dead_every == dead_every - 1:
            result.dead_bytes_peak = max(result.dead_bytes_peak, _dead_bytes(simulation, tiers))
        if progress is not None:
            progress(number + 1)
    result.removals_by_reason = simulation.removals
    result.refused = simulation.refused
    result.elapsed_s = time.perf_counter() - started_s
    return result


def _stride(block_tokens: int, trace_block_tokens: int) -> int:
    stride, rest = divmod(block_tokens, trace_block_tokens)
    if rest or stride < 1:
        raise ConfigError(f"block_tokens {block_tokens} is not a multiple of the trace's {trace_block_tokens}")
    return stride


def _count(result: SimulationResult, input_tokens: int, tokens: int, reason: str, slowest: str, saved_s: float) -> None:
    result.requests += 1
    result.input_tokens += input_tokens
    result.hit_tokens += tokens
    if tokens:
        result.hit_tokens_by_tier[slowest] += tokens
    else:
        result.misses_by_reason[reason] += 1
    if reason:
        result.lost_tokens_by_reason[reason] += input_tokens - tokens
    if saved_s < 0:
        result.not_worth_restoring += 1
    result.saved_s += max(0.0, saved_s)


def _sample(
    result: SimulationResult,
    simulation: Simulation,
    tiers: Sequence[TierModel],
    policies: Sequence[CachePolicy],
    now_s: float,
) -> Sample:
    return Sample(
        result.requests,
        now_s,
        result.input_tokens,
        result.hit_tokens,
        {tier.name: simulation.index.stored_bytes(tier.name) for tier in tiers},
        dict(simulation.written_bytes),
        dict(simulation.read_bytes),
        sum(policy.state_bytes() for policy in policies),
    )


def _dead_bytes(simulation: Simulation, tiers: Sequence[TierModel]) -> int:
    names = (name for tier in tiers for name in simulation.index.unsupported(tier.name))
    return sum(simulation.frame_bytes(name.group, name.tokens) for name in names)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a cache that knows the future could hit, in tokens."""

    capacity_bytes: int
    upper_tokens: int
    """No schedule reaches more; checkpoints are free here."""
    feasible_tokens: int
    """A schedule that fits reaches this."""


def offline_bounds(
    requests: Sequence[TraceRequest],
    trace_block_tokens: int,
    capacities_bytes: Sequence[int],
    *,
    block_tokens: int | None = None,
    model: Model = Model(),
) -> list[Bounds]:
    """The offline bounds of one trace, for each capacity."""
    block_tokens = block_tokens or trace_block_tokens
    stride = _stride(block_tokens, trace_block_tokens)
    accesses = []
    for request in requests:
        prompt = RunChain(request.runs, trace_block_tokens, stride)
        whole = RunChain((*request.runs, *request.output_runs), trace_block_tokens, stride)
        accesses.append(Access(prompt, whole, (request.input_tokens - 1) // block_tokens))
    tree = PathTree(accesses)
    block_bytes = model.kv_bytes_per_token * block_tokens
    return [
        Bounds(
            capacity,
            block_tokens * sum(upper_bound(tree, block_bytes, capacity)),
            block_tokens * sum(feasible_bound(tree, block_bytes, model.checkpoint_bytes, capacity)),
        )
        for capacity in capacities_bytes
    ]


def hints_of(requests: Sequence[TraceRequest], trace_block_tokens: int) -> list[Hints]:
    """What callers who knew their sessions could have said: "done", or "back in about", to the next power of two.

    A request's session goes on with the next request that continues it to its end. The time until then is told where
    it is short enough, a minute, to be a tool call and not a person.
    """
    tree = GhostTree(1 << 40)
    ends: dict[GhostNode, int] = {}
    nexts: list[float | None] = [None] * len(requests)
    for number, request in enumerate(requests):
        node, _, _ = tree.match(RunChain(request.runs, trace_block_tokens))
        earlier = ends.pop(node, None)
        if earlier is not None:
            nexts[earlier] = request.arrival_s - requests[earlier].arrival_s
        whole = RunChain((*request.runs, *request.output_runs), trace_block_tokens)
        ends[tree.add(whole, whole.blocks)] = number
    found = []
    for gap_s in nexts:
        back_s = None
        if gap_s is not None and gap_s <= TOOL_CALL_S:
            back_s = 2.0 ** math.ceil(math.log2(max(gap_s, 0.25)))
        found.append(Hints(returns_in_s=back_s, will_not_return=gap_s is None))
    return found
