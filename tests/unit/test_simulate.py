"""The simulator on the bundled sample, against the offline bounds and against what is known of small traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiered_cache.errors import ConfigError
from tiered_cache.policy.base import Hints
from tiered_cache.policy.names import POLICIES
from tiered_cache.replay.simulate import SAMPLES_MAX, Model, RunChain, TierModel, hints_of, offline_bounds, simulate
from tiered_cache.replay.traces import SAMPLE_PATH, Trace, TraceRequest

TRACES = Path(__file__).parents[3] / "shared" / "traces"
SAMPLE = list(Trace(SAMPLE_PATH))[:300]
GB = 10**9


def turns(*ends: int, gap_s: float = 10.0) -> list[TraceRequest]:
    """One session whose prompts are the first `end` blocks of 16 tokens."""
    return [TraceRequest(i, i * gap_s, end * 16 + 1, 5, ((0, end),)) for i, end in enumerate(ends)]


def test_a_chain_of_runs_is_the_chain_of_its_ids() -> None:
    chain = RunChain([(5, 3), (100, 2), (7, 4)], 16)
    assert [chain.block_hash(i) for i in range(10)] == [-1, 5, 6, 7, 100, 101, 7, 8, 9, 10]
    assert len(chain) == 9 * 16
    halves = RunChain([(5, 3), (100, 2), (7, 4)], 16, 2)
    assert [halves.block_hash(i) for i in range(5)] == [-1, 6, 100, 7, 9]
    assert (halves.blocks, halves.block_tokens, len(halves)) == (4, 32, 128)


def test_a_session_hits_all_that_it_had() -> None:
    result = simulate(turns(2, 5, 9), 16, "lru", [TierModel("host", GB)])
    assert result.hit_tokens == (2 + 5) * 16
    assert result.input_tokens == (2 + 5 + 9) * 16 + 3
    assert result.misses_by_reason == {"not_stored": 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_lies_below_the_bound_and_ends_with_live_weight_only(policy: str) -> None:
    capacity = 20 * GB
    result = simulate(SAMPLE, 512, policy, [TierModel("host", capacity)])
    bounds = offline_bounds(SAMPLE, 512, [capacity])[0]
    assert 0 < result.hit_tokens <= bounds.upper_tokens
    assert bounds.feasible_tokens <= bounds.upper_tokens
    assert result.dead_bytes_peak == 0
    assert all(sample.stored_bytes["host"] <= capacity for sample in result.samples)
    assert result.samples[-1].hit_tokens == result.hit_tokens
    assert len(result.samples) <= SAMPLES_MAX
    json.dumps(result.to_document())


def test_two_runs_decide_alike() -> None:
    first, second = (simulate(SAMPLE, 512, "default", [TierModel("host", 20 * GB)], seed=3) for _ in range(2))
    assert first.samples == second.samples


def test_with_room_for_everything_all_policies_but_one_hit_what_the_bound_says() -> None:
    bounds = offline_bounds(SAMPLE, 512, [10_000 * GB])[0]
    for policy in ("default", "lru", "marconi", "s3fifo"):
        result = simulate(SAMPLE, 512, policy, [TierModel("host", 10_000 * GB)])
        assert result.hit_tokens == bounds.feasible_tokens


def test_a_tier_below_takes_what_the_one_above_drops() -> None:
    model = Model(prefill_tokens_per_s=5_000.0)
    host, disk = TierModel("host", 20 * GB, 50 * GB), TierModel("disk", 200 * GB, 2 * GB)
    alone = simulate(SAMPLE, 512, "lru", [host], model=model)
    both = simulate(SAMPLE, 512, "lru", [host, disk], model=model)
    assert both.hit_tokens > alone.hit_tokens
    assert both.hit_tokens_by_tier["disk"] > 0
    assert both.removals_by_reason["host.moved"] > 0
    assert both.saved_s > alone.saved_s > 0
    assert sum(both.hit_tokens_by_tier.values()) == both.hit_tokens


def test_a_restore_that_takes_longer_than_computing_saves_nothing() -> None:
    slow = TierModel("host", GB, 1e6)
    result = simulate(turns(2, 5, 9), 16, "lru", [slow], model=Model(prefill_tokens_per_s=1e6))
    assert result.not_worth_restoring == 2
    assert result.saved_s == 0.0
    assert result.samples[-1].read_bytes == {}


def test_models_without_carries_restore_every_block_end() -> None:
    model = Model(checkpoint_bytes=0)
    result = simulate(turns(9, 5), 16, "lru", [TierModel("host", GB)], model=model)
    assert result.hit_tokens == 5 * 16


def test_hints_say_who_is_done_and_who_is_back_soon() -> None:
    requests = turns(2, 5, 9, gap_s=30.0)
    assert hints_of(requests, 16) == [Hints(returns_in_s=32.0)] * 2 + [Hints(will_not_return=True)]
    assert hints_of(turns(2, 5, gap_s=100.0), 16)[0] == Hints()


def test_hints_help() -> None:
    tiers = [TierModel("host", 20 * GB)]
    blind = simulate(SAMPLE, 512, "default", tiers)
    told = simulate(SAMPLE, 512, "default", tiers, hints=hints_of(SAMPLE, 512))
    assert told.hit_tokens > blind.hit_tokens


def test_blocks_must_fit_the_trace() -> None:
    with pytest.raises(ConfigError, match="not a multiple"):
        simulate(SAMPLE, 512, "lru", [TierModel("host", GB)], block_tokens=768)
    with pytest.raises(ConfigError, match="no policy"):
        simulate(SAMPLE, 512, "best", [TierModel("host", GB)])


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize(
    ("policy", "block_tokens", "capacity_gb", "low", "high"),
    [
        ("lru", 1, 1, 14.9, 16.9),
        ("lru", 1, 10, 85.3, 87.3),
        ("every-block", 32, 1, 2.2, 4.2),
        ("every-block", 32, 10, 17.2, 19.2),
        ("marconi", 1, 1, 15.4, 100),
        ("marconi", 1, 10, 88.4, 100),
        ("default", 1, 1, 26.0, 100),
        ("default", 1, 10, 91.5, 100),
    ],
)
def test_parity_with_the_published_figures(
    policy: str, block_tokens: int, capacity_gb: int, low: float, high: float
) -> None:
    """Of the Marconi artifact's classes on ShareGPT: SGLang+, vLLM+ and Marconi; ours is above all of them."""
    requests = list(Trace(TRACES / "sharegpt100_sps1_tok.jsonl.gz"))
    result = simulate(requests, 1, policy, [TierModel("host", capacity_gb * GB)], block_tokens=block_tokens)
    assert low <= 100 * result.hit_rate <= high


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize(
    ("trace", "capacity_gb", "share"),
    [
        ("sharegpt100_sps1_tok", 1, 0.40),
        ("sharegpt100_sps1_tok", 3, 0.59),
        ("sharegpt100_sps1_tok", 5, 0.75),
        ("mooncake_conversation_b512", 57, 0.25),
        ("mooncake_conversation_b512", 115, 0.29),
        ("mooncake_conversation_b512", 286, 0.18),
        ("agentic_A_b64", 33, 0.57),
        ("agentic_A_b64", 67, 0.55),
        ("agentic_A_b64", 166, 0.30),
        ("agentic_A_b64", 333, 0.17),
    ],
)
def test_how_far_the_default_goes_from_lru_to_what_is_feasible(trace: str, capacity_gb: int, share: float) -> None:
    """The README's table, less two hundredths: `share` of the way that only who knows the future goes to its end."""
    requests = list(Trace(TRACES / f"{trace}.jsonl.gz"))
    trace_block_tokens = int(trace.rpartition("_b")[2]) if "_b" in trace else 1
    block_tokens = 512 if trace_block_tokens > 1 else 1
    tiers = [TierModel("host", capacity_gb * GB)]
    lru, default = (
        simulate(requests, trace_block_tokens, policy, tiers, block_tokens=block_tokens).hit_tokens
        for policy in ("lru", "default")
    )
    (bounds,) = offline_bounds(requests, trace_block_tokens, [capacity_gb * GB], block_tokens=block_tokens)
    assert default - lru >= share * (bounds.feasible_tokens - lru)


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize(("capacity_gb", "percent"), [(57, 15.2), (115, 22.0), (286, 33.1)])
def test_what_callers_know_of_their_sessions_is_worth_much(capacity_gb: int, percent: float) -> None:
    requests = list(Trace(TRACES / "mooncake_conversation_b512.jsonl.gz"))
    result = simulate(requests, 512, "default", [TierModel("host", capacity_gb * GB)], hints=hints_of(requests, 512))
    assert 100 * result.hit_rate >= percent


@pytest.mark.skipif(not TRACES.is_dir(), reason="the shared traces are not here")
def test_bounds_are_those_of_the_reference() -> None:
    requests = list(Trace(TRACES / "sharegpt100_sps1_tok.jsonl.gz"))
    tokens = sum(request.input_tokens for request in requests)
    for bounds, (feasible, upper) in zip(
        offline_bounds(requests, 1, [GB, 3 * GB, 10 * GB]), [(53.9, 63.3), (86.1, 90.7), (93.5, 93.5)], strict=True
    ):
        assert abs(100 * bounds.feasible_tokens / tokens - feasible) < 1
        assert abs(100 * bounds.upper_tokens / tokens - upper) < 1
