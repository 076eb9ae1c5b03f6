"""The replay: what it counts, what it checks, and that its hits are those that index and policy alone predict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiered_cache import frame
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import CapacityError, ConfigError, DeadlineError, IdentityError, TierError, UnknownOutcomeError
from tiered_cache.identity import PrefixChain
from tiered_cache.index import Layout, PrefixIndex, RemovalReason
from tiered_cache.policy.base import Hints, Request
from tiered_cache.policy.names import build_policy
from tiered_cache.replay.driver import Progress, ReplayResult, ReplaySettings, replay
from tiered_cache.replay.traces import SAMPLE_PATH, TokenSource, Trace
from tiered_cache.service.build import build_engine
from tiered_cache.service.local import LocalCluster
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import SyncPolicy
from tiered_cache.tiers.host import HostTier

MIB = 1 << 20
SMALL = WorkerSettings(engine="qsa-ple-gdn:small", capacity_bytes=8 * MIB)


def host_only(host_bytes: int, worker: WorkerSettings | None = None, workers: int = 2) -> ClusterSettings:
    return ClusterSettings(workers, worker or WorkerSettings(), TierSettings(host_bytes=host_bytes))


def with_disk(directory: Path, host_bytes: int = 8 * MIB) -> ClusterSettings:
    tiers = TierSettings(host_bytes, directory, 256 * MIB, SyncPolicy.NEVER, policy="lru")
    return ClusterSettings(tiers=tiers)


def run(
    settings: ReplaySettings, trace: Path = SAMPLE_PATH, told: list[Progress] | None = None, **options: int
) -> ReplayResult:
    with LocalCluster(settings.cluster) as cluster:
        return replay(Trace(trace, **options), cluster, settings, None if told is None else told.append)


def write(path: Path, *requests: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps({"timestamp": 0, "output_length": 0, **r}) + "\n" for r in requests))
    return path


def conversations(path: Path, sessions: int = 12, turns: int = 5) -> Path:
    """Sessions that take turns, each one two blocks of 512 tokens longer than its last."""
    lines = []
    for turn in range(turns):
        for session in range(sessions):
            ids = [1 + 100 * session + block for block in range(2 * turn + 2)]
            lines.append({"input_length": 512 * len(ids) + 17 * session + 1, "hash_ids": ids, "session": session})
    return write(path, *lines)


# ---- what is counted


@pytest.mark.parametrize("host_bytes", [0, MIB])
def test_states_come_back_from_an_object_store_without_a_mismatch(tmp_path: Path, host_bytes: int) -> None:
    tiers = TierSettings(host_bytes, object_url=f"file://{tmp_path}/objects", object_bytes=64 * MIB, policy="lru")
    cluster = ClusterSettings(tiers=tiers)
    result = run(ReplaySettings(cluster), conversations(tmp_path / "t.jsonl", 11))
    assert (result.mismatches, result.requests, result.restores) == (0, 55, 44)
    assert result.counters["cache.bytes.object.put"] > 0
    assert result.counters["cache.hits.object"] > 0
    assert not result.refusals_by_reason | result.failures_by_reason


def test_states_come_back_from_every_tier_on_any_worker_without_a_mismatch(tmp_path: Path) -> None:
    told: list[Progress] = []
    result = run(ReplaySettings(with_disk(tmp_path / "disk", MIB)), conversations(tmp_path / "t.jsonl", 11), told)
    assert (result.mismatches, result.requests) == (0, 55)
    assert result.lookups == 55 == result.restores + result.misses
    assert (result.restores, result.misses_by_reason) == (44, {"not_stored": 11})
    assert sum(result.misses_by_reason.values()) == result.misses
    assert result.restores_on_other_worker == 44, "workers take turns, and there is an odd number of sessions"
    assert result.verified_from_memory == result.restores
    assert result.counters["cache.bytes.disk.put"] > 0
    assert result.counters["cache.hits.disk"] > 0
    assert result.hit_tokens == 512 * 11 * (2 + 4 + 6 + 8)
    assert result.hit_rate == result.hit_tokens / result.input_tokens
    assert result.bytes_spilled > 0.9 * result.bytes_stored > 0
    assert not result.refusals_by_reason | result.failures_by_reason
    assert [p.requests for p in told] == list(range(1, 56))
    assert (told[-1].hit_tokens, told[-1].input_tokens) == (result.hit_tokens, told[-1].input_tokens_total)


def test_the_result_is_one_json_object_with_settings_and_versions(tmp_path: Path) -> None:
    document = json.loads(run(ReplaySettings(with_disk(tmp_path / "disk"), requests=3, seed=7)).to_json())
    names = "requests input_tokens hit_tokens restores restores_on_other_worker bytes_spilled bytes_stored mismatches"
    names += " misses_by_reason refusals_by_reason elapsed_s hit_rate requests_per_s peak_rss_bytes decisions_digest"
    assert set(names.split()) <= document.keys()
    assert document["requests"] == 3
    assert document["settings"]["seed"] == 7
    assert document["settings"]["cluster"]["tiers"]["disk_sync"] == "never"
    assert document["settings"]["durability"] == "HOST"
    assert document["versions"]["numpy"] == np.__version__
    assert document["peak_rss_bytes"] > 10 * MIB


def test_two_replays_with_one_seed_decide_alike_and_another_cache_does_not(tmp_path: Path) -> None:
    trace = conversations(tmp_path / "t.jsonl")
    digests = [
        run(ReplaySettings(host_only(host_bytes)), trace).decisions_digest for host_bytes in (2 * MIB, 2 * MIB, MIB)
    ]
    assert digests[0] == digests[1] != digests[2]


# ---- what is hit


def predicted_hit_tokens(settings: ReplaySettings, trace: Trace) -> Iterator[int]:
    """Per request, by index and policy alone: no bytes, no engine, no cache."""
    with LocalCluster(settings.cluster) as cluster:
        namespace, geometry = cluster.namespace, cluster.geometry
    tier, index = HostTier(settings.cluster.tiers.host_bytes), PrefixIndex(["host"])
    policy = build_policy(settings.cluster.tiers.policy, settings.cluster.tiers.seed)
    index.register(Layout.of(namespace, PrefixChain(namespace, geometry.block_tokens).block_hash(0), geometry))
    view = index.view("host")
    vocabulary = build_engine(settings.cluster.worker).vocabulary
    source = TokenSource(trace.block_tokens, vocabulary, settings.seed)

    def footprint(group: str, tokens: int) -> int:
        return tier.footprint(frame.stored_bytes_max(geometry, group, tokens))

    for request in list(trace)[: settings.requests]:
        now_s, tokens = request.arrival_s, source.tokens(request)
        chain = PrefixChain(namespace, geometry.block_tokens, tokens)
        found = index.longest(chain, len(chain) - 1)
        yield found.tokens
        asked = Request(chain, len(chain))
        take_at = set(policy.start(asked, found, Hints(), now_s, view))
        known = PrefixChain(
            namespace, geometry.block_tokens, tokens[: len(tokens) // trace.block_tokens * trace.block_tokens]
        )
        if not len(known):
            continue
        take_at |= set(policy.finish(asked, known, 0, Hints(), now_s))
        new = index.candidates(known, take_at, "host", footprint)
        if not new:
            continue
        free_bytes = settings.cluster.tiers.host_bytes - index.stored_bytes("host")
        proposal = policy.propose(new, free_bytes, [], now_s, view)
        claims = [index.claim(known, c.tokens, "host") for c in new if c.prefix in proposal.admit]
        for prefix in proposal.drop:
            index.drop(prefix, "host", RemovalReason.EVICTED)
            policy.commit([], [(prefix, RemovalReason.EVICTED)], now_s, view)
        for candidate in new:
            if candidate.prefix in proposal.admit:
                for name in index.missing(known, candidate.tokens, "host"):
                    index.insert(name, "host", footprint(name.group, name.tokens))
        policy.commit([c.prefix for c in new if c.prefix in proposal.admit], [], now_s, view)
        for claim in claims:
            index.release(claim)


@pytest.mark.parametrize("policy", ["lru", "default"])
@pytest.mark.parametrize("host_bytes", [12 * MIB, 40 * MIB])
def test_hits_are_those_that_index_and_policy_alone_predict(host_bytes: int, policy: str) -> None:
    told: list[Progress] = []
    settings = ReplaySettings(ClusterSettings(tiers=TierSettings(host_bytes, policy=policy)), requests=200)
    result = run(settings, told=told)
    predicted = list(predicted_hit_tokens(settings, Trace(SAMPLE_PATH)))
    assert np.diff([0, *(p.hit_tokens for p in told)]).tolist() == predicted
    assert result.hit_rate == sum(predicted) / result.input_tokens
    assert result.counters["cache.frames.host.evicted"] > 500, "the capacity was meant to be tight"


def test_the_next_turn_continues_after_the_decoded_tokens(tmp_path: Path) -> None:
    """Where the trace tells the answer, the state behind it is spilled, and the next turn begins there."""
    first = {"input_length": 40, "output_length": 30, "runs": [[100, 40]], "out_runs": [[150, 30]], "session": 1}
    again = {"input_length": 75, "output_length": 0, "runs": [[100, 40], [150, 30], [200, 5]], "session": 1}
    result = run(ReplaySettings(host_only(8 * MIB, SMALL)), write(tmp_path / "t_tok.jsonl", first, again))
    assert (result.restores, result.hit_tokens, result.output_tokens, result.mismatches) == (1, 70, 30, 0)


@pytest.mark.parametrize("block_tokens", [16, 24, 4096])
def test_blocks_of_the_state_need_not_be_those_of_the_trace(tmp_path: Path, block_tokens: int) -> None:
    first = {"input_length": 2 * 512 + 9, "hash_ids": [1, 2, 3]}
    again = {"input_length": 3 * 512, "hash_ids": [1, 2, 4]}
    worker = replace(SMALL, block_tokens=block_tokens)
    result = run(ReplaySettings(host_only(8 * MIB, worker)), write(tmp_path / "t.jsonl", first, again))
    assert (result.hit_tokens, result.mismatches) == (1024, 0)


def test_what_no_later_request_can_share_is_not_spilled(tmp_path: Path) -> None:
    """A prompt without one full block of the trace is computed, and nothing of it is kept."""
    result = run(
        ReplaySettings(host_only(8 * MIB, SMALL)), write(tmp_path / "t.jsonl", {"input_length": 400, "hash_ids": [1]})
    )
    assert (result.requests, result.bytes_spilled, result.misses_by_reason) == (1, 0, {"not_stored": 1})


# ---- what is checked


def test_what_an_earlier_run_left_on_disk_is_verified_by_recomputing(tmp_path: Path) -> None:
    settings = ReplaySettings(with_disk(tmp_path / "disk", MIB), durability=Durability.DISK)
    trace = conversations(tmp_path / "t.jsonl", turns=3)
    cold, warm = run(settings, trace), run(settings, trace)
    assert (cold.restores, cold.restores_on_other_worker, cold.verified_by_recomputing) == (24, 0, 0)
    assert (warm.restores, warm.verified_by_recomputing, warm.mismatches) == (36, 36, 0)
    assert warm.hit_tokens == 512 * 12 * (2 + 4 + 6)


def test_forgotten_marks_are_computed_again(tmp_path: Path) -> None:
    result = run(ReplaySettings(host_only(64 * MIB), marks_max=9), conversations(tmp_path / "t.jsonl", turns=2))
    assert (result.restores, result.verified_by_recomputing, result.mismatches) == (12, 12, 0)


def test_a_restored_state_that_differs_is_counted_and_its_frames_are_named(tmp_path: Path) -> None:
    """One worker's engine gives another output after every restore."""
    settings = ReplaySettings(host_only(64 * MIB))
    with LocalCluster(settings.cluster) as cluster:
        engine = cluster.workers["worker-1"].engine
        output, restoration, restored = engine.output, engine.restoration, set()

        def remember(reservation: int, tokens: int) -> object:
            made = restoration(reservation, tokens)
            commit = made.commit
            made.commit = lambda: restored.add(handle := commit()) or handle
            return made

        engine.restoration = remember
        engine.output = lambda handle: output(handle) ^ (handle in restored)
        result = replay(Trace(conversations(tmp_path / "t.jsonl")), cluster, settings)
    assert 0 < result.mismatches < result.restores
    assert result.mismatches == len(result.mismatched)
    for mismatch in result.mismatched:
        assert mismatch.worker == "worker-1"
        assert mismatch.found.digest == mismatch.expected.digest
        assert mismatch.found.output == mismatch.expected.output ^ 1
        assert len(mismatch.frames) == mismatch.tokens // 512 + 1
        assert f"-checkpoint-{mismatch.tokens}-0" in mismatch.frames[-1]


def test_a_cluster_with_another_engine_than_the_settings_name_is_refused() -> None:
    with LocalCluster(host_only(MIB)) as cluster, pytest.raises(IdentityError, match="weights_digest"):
        replay(Trace(SAMPLE_PATH), cluster, ReplaySettings(host_only(MIB, WorkerSettings(seed=1))))


# ---- what goes wrong


def failing(method: object, error: Exception, at: set[int]) -> object:
    calls = iter(range(1 << 20))

    def call(*arguments: object, **options: object) -> object:
        if next(calls) in at:
            raise error
        return method(*arguments, **options)

    return call


def test_a_spill_or_release_that_fails_fails_no_request() -> None:
    settings = ReplaySettings(host_only(64 * MIB), requests=10)
    with LocalCluster(settings.cluster) as cluster:
        cluster.tiering.spill = failing(cluster.tiering.spill, TierError("the disk is gone"), {2, 3, 4, 5})
        worker = cluster.workers["worker-0"]
        worker.release = failing(worker.release, DeadlineError("no answer"), {0})
        result = replay(Trace(SAMPLE_PATH), cluster, settings)
        assert cluster.workers["worker-1"].engine.bytes_free() == 256 * MIB
    assert result.refusals_by_reason == {"TierError": 4, "DeadlineError": 1}
    assert (result.requests, result.lookups, result.mismatches, result.failures_by_reason) == (10, 10, 0, {})


def test_a_request_that_cannot_be_computed_is_counted_and_several_in_a_row_end_the_replay() -> None:
    settings = ReplaySettings(host_only(64 * MIB), requests=10)
    with LocalCluster(settings.cluster) as cluster:
        place = cluster.router.place
        cluster.router.place = failing(place, CapacityError("no room"), {1, 2, 4})
        result = replay(Trace(SAMPLE_PATH), cluster, settings)
        assert result.failures_by_reason == {"CapacityError": 3}
        assert (result.requests, result.lookups) == (10, 7)
        cluster.router.place = failing(place, CapacityError("no room"), {1, 2, 3})
        with pytest.raises(CapacityError, match="no room"):
            replay(Trace(SAMPLE_PATH), cluster, settings)


def test_a_request_whose_actors_die_is_computed_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ReplaySettings(host_only(64 * MIB), requests=10)
    with LocalCluster(settings.cluster) as cluster:
        healed: list[int] = []
        monkeypatch.setattr(LocalCluster, "heal", lambda _: healed.append(1) or ("worker-0",))
        away, died = TierError("away", retryable=True), UnknownOutcomeError("it died")
        cluster.router.place = failing(cluster.router.place, away, {2, 3})
        for worker in cluster.workers.values():
            worker.run = failing(worker.run, died, {0})
        result = replay(Trace(SAMPLE_PATH), cluster, settings)
        assert result.retries_by_reason == {"TierError": 2, "UnknownOutcomeError": 2}
        assert (result.requests, result.lookups, result.mismatches, result.failures_by_reason) == (10, 12, 0, {})
        assert len(healed) >= 4
        lasting = TierError("broken")
        cluster.router.place = failing(cluster.router.place, lasting, {1})
        result = replay(Trace(SAMPLE_PATH), cluster, settings)
        assert (result.retries_by_reason, result.failures_by_reason) == ({}, {"TierError": 1})
        cluster.router.place = failing(cluster.router.place, away, set(range(1 << 20)))
        with pytest.raises(TierError, match="away"):
            replay(Trace(SAMPLE_PATH), cluster, replace(settings, recover_s=0.25))


def test_a_request_that_fits_no_worker_is_named_before_the_first_one_runs() -> None:
    settings = ReplaySettings(host_only(MIB, WorkerSettings(capacity_bytes=MIB)), requests=50)
    with LocalCluster(settings.cluster) as cluster:
        with pytest.raises(ConfigError, match=r"request \d+ does not fit a worker: \d+ tokens"):
            replay(Trace(SAMPLE_PATH), cluster, settings)
        assert cluster.counters() == {}


def test_more_block_ids_than_the_vocabulary_tells_apart_are_refused_at_once(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "t_tok.jsonl", {"input_length": 2, "runs": [[1, 2]]}, {"input_length": 1, "runs": [[999, 1]]}
    )
    with pytest.raises(ConfigError, match="block id 999"):
        run(ReplaySettings(host_only(MIB, SMALL)), trace)


def test_a_miss_has_the_routers_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that no worker can restore is a miss, although the tiers had a match."""
    settings = ReplaySettings(host_only(64 * MIB), requests=6)
    with LocalCluster(settings.cluster) as cluster:
        for worker in cluster.workers.values():
            monkeypatch.setattr(worker, "inject", failing(worker.inject, CapacityError("no room"), set(range(99))))
        result = replay(Trace(SAMPLE_PATH), cluster, settings)
    assert (result.restores, result.hit_tokens) == (0, 0)
    assert result.misses_by_reason["capacity"] == 4
    assert result.refusals_by_reason == {"CapacityError": 8}
