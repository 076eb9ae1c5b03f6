"""The object store as a node's last tier: opening it, its budget, and the way of frames down to it and back."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore
from serving import MODELS, Served, compute, never_moved, serve, some_tokens

from tiered_cache.check import check_tier
from tiered_cache.cli import main
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import CapacityError, ConfigError, TierError
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.shared import SharedStore
from tiered_cache.testing.object_servers import BUCKET, FaultyS3Server, HttpFault, SeaweedServer
from tiered_cache.testing.tier_suite import get, name_of, put, seeded
from tiered_cache.tiers.base import Durability, PutOutcome, TierUsage
from tiered_cache.tiers.object_budget import LocalBudget
from tiered_cache.tiers.object_store import STAGED_GRACE_S, ObjectStoreTier, durability_of, open_store
from tiered_cache.tiers.wrappers import BreakerState, BreakerTier, MeteredTier

MODEL = MODELS[0]
PROMPTS = [some_tokens(40, seed=seed) for seed in range(8)]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


# Opening


@pytest.mark.parametrize("url", ["", "nowhere", "ftp://a/b", "http://a/b", "s3://", "relative/path", "s3://[b"])
def test_what_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="object store"):
        open_store(url)


def test_an_option_that_is_none_is_refused_and_its_value_not_told() -> None:
    with pytest.raises(ConfigError) as raised:
        open_store("s3://bucket", {"endpiont": "hush"})
    assert "hush" not in str(raised.value)


def test_endpoint_and_credentials_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, executor: ThreadPoolExecutor
) -> None:
    with FaultyS3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.options["endpoint"])
        monkeypatch.setenv("AWS_REGION", server.options["region"])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.options["access_key_id"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.options["secret_access_key"])
        tier = ObjectStoreTier(open_store("s3://bucket/a/b"), 1 << 20, executor)
        put(tier, (name_of(0), b"body"))
        assert server.objects == {f"a/b/entries/{name_of(0)}.blob": b"body"}


def test_what_a_url_promises() -> None:
    assert durability_of("memory:///") is Durability.HOST
    assert durability_of("file:///mnt/shared") is Durability.DISK
    assert [durability_of(f"{scheme}://b/p") for scheme in ("s3", "gs", "az")] == [Durability.OBJECT] * 3


# The budget


def test_what_changes_while_somebody_counts_is_not_counted_wrongly() -> None:
    budget = LocalBudget(1_000)
    for name in ("stays", "deleted", "lost"):
        budget.charge(name, 10, reserved=False)
    since = budget.begin_count()
    budget.reserve(20)
    budget.charge("new", 20, reserved=True)
    budget.uncharge("deleted")
    budget.end_count({"stays": 10, "deleted": 10, "foreign": 30}, since)
    assert [budget.is_charged(name) for name in ("stays", "new", "foreign")] == [True] * 3
    assert [budget.is_charged(name) for name in ("deleted", "lost")] == [False] * 2
    usage = budget.usage()
    assert (usage.bytes_used, usage.bytes_reserved, usage.entries) == (60, 0, 3)


def test_an_old_absence_does_not_undo_a_new_charge() -> None:
    budget = LocalBudget(100)
    asked = budget.moment()
    budget.charge("a", 10, reserved=False)
    budget.uncharge("a", before=asked)
    assert budget.is_charged("a")
    budget.uncharge("a", before=budget.moment())
    assert not budget.is_charged("a")


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["charge", "uncharge", "aside", "count"])), max_size=40)
)
@settings(max_examples=60, deadline=None)
def test_a_budget_is_the_sum_of_what_is_there(steps: list[tuple[str, str]]) -> None:
    budget, there, aside = LocalBudget(1_000), dict[str, int](), dict[str, int]()
    for number, (name, step) in enumerate(steps):
        if step == "charge":
            size = there.setdefault(name, number + 1)
            budget.charge(name, size, reserved=False)
        elif step == "uncharge":
            there.pop(name, None)
            budget.uncharge(name)
        elif step == "aside":
            aside[name] = number
            budget.set_aside(name, number)
        else:
            budget.end_count(dict(there), budget.begin_count())
        usage = budget.usage()
        assert (usage.bytes_used, usage.entries) == (sum(there.values()), len(there))
        assert usage.bytes_quarantined == sum(aside.values())


def test_two_processes_count_each_others_objects_when_they_list(executor: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    one, other = (ObjectStoreTier(store, 1 << 20, executor) for _ in range(2))
    put(one, (name_of(0), bytes(1_000)))
    put(other, (name_of(1), bytes(1_000)))
    assert one.usage().entries == 1
    assert len(list(one.list())) == 2
    assert one.usage() == other.usage()
    other.delete([name_of(0)])
    assert put(one, (name_of(0), b"new")) == [PutOutcome.CREATED], "it believed that the old one was there"


def test_an_existing_object_is_charged_with_its_own_size(executor: ThreadPoolExecutor) -> None:
    store = MemoryStore()
    one, other = (ObjectStoreTier(store, 1 << 20, executor) for _ in range(2))
    one.reserve([1]).release()
    put(other, (name_of(0), bytes(5_000)))
    assert put(one, (name_of(0), b"x")) == [PutOutcome.EXISTS]
    assert one.usage().bytes_used == one.footprint(5_000)
    assert get(one, name_of(0)) == bytes(5_000)


def test_what_a_killed_process_was_writing_into_a_directory_is_removed_and_no_live_writers(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    now_s = time.time()
    store = open_store(f"file://{tmp_path}")
    tier = ObjectStoreTier(store, 1 << 20, executor, clock=lambda: now_s)
    put(tier, (name_of(0), b"x"))
    (entry,) = tmp_path.rglob("*.blob")
    dead, living, foreign = (entry.with_name(f"{entry.name}#{suffix}") for suffix in ("1", "2", "x"))
    for file in (dead, living, foreign):
        file.write_bytes(b"half")
    for file in (entry, dead, foreign):
        os.utime(file, (now_s - 2 * STAGED_GRACE_S,) * 2)
    assert [found.path for found in tier.list()] == [name_of(0)]
    assert sorted(tmp_path.rglob("*.blob*")) == sorted([entry, living, foreign])
    assert get(tier, name_of(0)) == b"x"
    now_s += 2 * STAGED_GRACE_S
    assert [found.path for found in tier.list()] == [name_of(0)]
    assert sorted(tmp_path.rglob("*.blob*")) == sorted([entry, foreign])


# In a node


def start(
    directory: Path,
    url: str,
    options: dict[str, str],
    *,
    object_bytes: int = 64 << 20,
    deadline_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
) -> LocalCluster:
    """A node whose memory and disk hold about two of the prompts each."""
    tiers = TierSettings(
        host_bytes=26 << 10,
        disk_dir=directory,
        disk_bytes=36 << 10,
        object_url=url,
        object_bytes=object_bytes,
        object_options=options,
        object_deadline_s=deadline_s,
        policy="lru",  # which decides the same however fast the machine is
    )
    return LocalCluster(ClusterSettings(workers=2, worker=WorkerSettings(engine=MODEL), tiers=tiers), clock=clock)


def ask_all(cluster: LocalCluster) -> list[Served]:
    """Go on with every prompt; each answer is that of a sequence that never moved."""
    served = []
    for prompt in PROMPTS:
        longer = np.concatenate([prompt, some_tokens(3, seed=99)])
        begun_s = time.monotonic()
        served.append(compute(cluster, longer))
        assert time.monotonic() - begun_s < 20
        assert served[-1].mark == never_moved(MODEL, longer)
        cluster.workers[served[-1].placement.owner].release(served[-1].run.source, deadline_s=5)
    return served


def test_frames_move_down_to_memory_and_come_back(tmp_path: Path) -> None:
    with start(tmp_path / "tiers", "memory:///", {}) as cluster:
        for prompt in PROMPTS:
            serve(cluster, prompt)
        usage = {**cluster.cache.usage(), "object": usage_of(cluster)}
        assert usage["object"].entries > 0
        assert all(level.bytes_used <= level.bytes_max for level in usage.values())
        assert [served.placement.restored_tokens for served in ask_all(cluster)] == [40] * len(PROMPTS)
        counters = cluster.counters()
        assert counters["cache.hits.object"] > 0
        assert counters["cache.frames.object.put"] == usage["object"].entries
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("object-store")]
        assert threads
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "its threads end with the node's tiers"


def test_frames_move_down_to_s3_and_outlive_the_node(tmp_path: Path, seaweed: SeaweedServer) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    with start(tmp_path / "one", url, seaweed.options) as cluster:
        for prompt in PROMPTS:
            serve(cluster, prompt)
        kept = serve(cluster, some_tokens(50, seed=77), Durability.OBJECT).spill.kept
        assert [(k.tokens, k.durability) for k in kept] == [(50, Durability.OBJECT)]
        assert [served.placement.restored_tokens for served in ask_all(cluster)] == [40] * len(PROMPTS)
        before = usage_of(cluster)
    with start(tmp_path / "another", url, seaweed.options) as cluster:
        assert usage_of(cluster) == before
        restored = [served.placement.restored_tokens for served in ask_all(cluster)]
        assert sum(tokens == 40 for tokens in restored) >= len(PROMPTS) // 2, "what had moved down is there"
        again = serve(cluster, np.concatenate([some_tokens(50, seed=77), some_tokens(3)]))
        assert again.placement.restored_tokens == 50


def test_a_smaller_budget_shrinks_the_store(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'objects'}"
    with start(tmp_path / "one", url, {}) as cluster:
        for prompt in PROMPTS:
            serve(cluster, prompt)
        before = usage_of(cluster).bytes_used
    with start(tmp_path / "two", url, {}, object_bytes=before // 2) as cluster:
        assert 0 < usage_of(cluster).bytes_used <= before // 2
        ask_all(cluster)


@pytest.mark.parametrize(
    "trouble",
    [
        HttpFault(status=403),
        HttpFault(status=404),
        HttpFault(status=500),
        HttpFault(status=503),
        HttpFault(delay_s=60.0),
        HttpFault(body_bytes=100),
        HttpFault(hang_up=True),
    ],
    ids=["403", "404", "500", "503", "hanging", "cut bodies", "silent"],
)
def test_answers_stay_right_while_the_store_is_in_trouble(tmp_path: Path, trouble: HttpFault) -> None:
    later_s = 0.0
    with (
        FaultyS3Server() as server,
        start(
            tmp_path / "tiers",
            "s3://bucket/p",
            server.options,
            deadline_s=1.5,
            clock=lambda: time.monotonic() + later_s,
        ) as cluster,
    ):
        for prompt in PROMPTS:
            serve(cluster, prompt)
        before = [served.placement.restored_tokens for served in ask_all(cluster)]
        assert before == [40] * len(PROMPTS)
        server.fail_always(trouble)
        assert any(served.placement.restored_tokens == 0 for served in ask_all(cluster))
        for _ in range(2):
            ask_all(cluster)
        breaker = breaker_of(cluster)
        if trouble.status == 404:  # an absence is no trouble: it is believed, and what is gone is forgotten
            assert breaker.times_opened == 0
            assert cluster.counters()["cache.frames.object.lost"] > 0
            return
        assert breaker.state is BreakerState.OPEN
        served = serve(cluster, some_tokens(40, seed=50))
        assert served.mark == never_moved(MODEL, some_tokens(40, seed=50))
        server.recover()
        later_s = 11.0
        assert [served.placement.restored_tokens for served in ask_all(cluster)].count(40) >= len(PROMPTS) - 1
        assert breaker.state.value == "closed"


def usage_of(cluster: LocalCluster) -> TierUsage:
    assert cluster.catalogue is not None
    return cluster.catalogue.usage()["object"]


def breaker_of(cluster: LocalCluster) -> BreakerTier:
    """The node's own: the catalogue has another."""
    assert isinstance(cluster.cache._shared, SharedStore)
    metered = cluster.cache._shared.store
    assert isinstance(metered, MeteredTier)
    assert isinstance(metered.inner, BreakerTier)
    return metered.inner


def test_objects_lost_behind_our_back_are_misses_and_are_forgotten(tmp_path: Path) -> None:
    with FaultyS3Server() as server, start(tmp_path / "tiers", "s3://bucket/p", server.options) as cluster:
        for prompt in PROMPTS:
            serve(cluster, prompt)
        there = usage_of(cluster).entries
        with server.lock:
            server.objects.clear()
        restored = [served.placement.restored_tokens for served in ask_all(cluster)]
        assert 0 < sum(tokens == 40 for tokens in restored) < len(PROMPTS)
        again = [served.placement.restored_tokens for served in ask_all(cluster)]
        assert again == restored
        assert cluster.counters()["cache.frames.object.lost"] > 0
        assert usage_of(cluster).entries < there


def test_a_flipped_bit_in_the_store_is_never_served(tmp_path: Path) -> None:
    rng = seeded(8)
    with FaultyS3Server() as server, start(tmp_path / "tiers", "s3://bucket/p", server.options) as cluster:
        for prompt in PROMPTS:
            serve(cluster, prompt)
        entries = [key for key in server.objects if "/entries/" in key and not key.endswith("descriptor.blob")]
        for key in entries:
            raw = bytearray(server.objects[key])
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            server.objects[key] = bytes(raw)
        served = ask_all(cluster)
        refused = [s.placement.refusals[0][0] for s in served if s.placement.refusals]
        assert refused
        assert set(refused) <= {"ChecksumError", "FrameError", "TruncatedError", "VersionError", "FrameNotFoundError"}
        assert any("/quarantine/" in key for key in server.objects)


# Checking it from outside


def test_verify_reads_every_frame_of_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objects = tmp_path / "objects"
    with start(tmp_path / "tiers", f"file://{objects}", {}) as cluster:
        for prompt in PROMPTS:
            serve(cluster, prompt)
        entries = usage_of(cluster).entries
    assert main(["verify", f"file://{objects}", "--json", "-", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["checked"], result["bad"]) == (entries, [])
    (descriptor,) = objects.rglob("descriptor.blob")
    body = descriptor.read_bytes()
    descriptor.unlink()
    assert main(["verify", f"file://{objects}", "--quiet", "--json", "-"]) == 1
    (bad,) = json.loads(capsys.readouterr().out)["bad"]
    assert "missing" in bad["error"]
    descriptor.write_bytes(body[:-1])
    assert main(["verify", f"file://{objects}"]) == 1
    assert "1 bad" in capsys.readouterr().out
    assert main(["verify", "ftp://host/place"]) == 2
    assert "ftp" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [400, pytest.param(15_000, marks=pytest.mark.slow)])
def test_every_changed_cut_longer_or_swapped_object_is_found(
    tmp_path: Path, executor: ThreadPoolExecutor, changes: int
) -> None:
    """Five flips of a single bit for each cut and each addition."""
    rng = seeded(5)
    with FaultyS3Server() as server:
        with start(tmp_path / "tiers", "s3://bucket/p", server.options) as cluster:
            for prompt in PROMPTS:
                serve(cluster, prompt)
        good = dict(server.objects)
        frames = sorted(key for key in good if "/entries/" in key and not key.endswith("descriptor.blob"))
        tier = ObjectStoreTier(open_store("s3://bucket/p", server.options), 0, executor)
        assert [file.error for file in check_tier(tier)] == [None] * (len(frames) + 1)
        for _ in range(changes // len(frames) + 1):
            for key in frames:
                raw = bytearray(good[key])
                change = rng.choice(["flip"] * 5 + ["cut", "longer"])
                if change == "flip":
                    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
                elif change == "cut":
                    del raw[rng.randrange(len(raw)) :]
                else:
                    raw += bytes(rng.randrange(1, 100))
                server.objects[key] = bytes(raw)
            errors = {file.path: file.error for file in check_tier(tier)}
            assert all(errors[key.removeprefix("p/entries/").removesuffix(".blob")] for key in frames)
        for key, other in zip(frames, [*frames[1:], frames[0]], strict=True):
            server.objects[key] = good[other]
        assert sum(file.error is not None for file in check_tier(tier)) == len(frames)
        server.objects.update(good)
        server.fail("GET", HttpFault(), HttpFault(), HttpFault(status=400))  # listing, descriptor, a frame
        assert [file.error for file in check_tier(tier)].count("the store answered HTTP 400 Injected400") == 1


# Starting


def test_a_store_that_is_away_at_the_start_is_used_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later_s = 0.0
    with FaultyS3Server() as server:
        with start(tmp_path / "one", "s3://bucket/p", server.options) as cluster:
            assert serve(cluster, PROMPTS[0], Durability.OBJECT).spill.kept
        server.fail_always(HttpFault(status=503))
        with (
            caplog.at_level(logging.WARNING),
            start(
                tmp_path / "two",
                "s3://bucket/p",
                server.options,
                deadline_s=1.5,
                clock=lambda: time.monotonic() + later_s,
            ) as cluster,
        ):
            assert "could not be listed" in caplog.text
            assert serve(cluster, PROMPTS[1]).spill.kept
            with pytest.raises(TierError, match="not known yet"):
                serve(cluster, PROMPTS[2], Durability.OBJECT)
            server.recover()
            later_s = 11.0
            assert cluster.catalogue is not None
            cluster.catalogue.maintain()
            longer = np.concatenate([PROMPTS[0], some_tokens(3)])
            assert compute(cluster, longer).placement.restored_tokens == 40
            assert serve(cluster, PROMPTS[2], Durability.OBJECT).spill.kept


@pytest.mark.parametrize("status", [403, 404])
def test_a_store_that_can_never_serve_is_a_setting_that_is_wrong(tmp_path: Path, status: int) -> None:
    with FaultyS3Server() as server:
        server.fail_always(HttpFault(status=status))
        with pytest.raises(ConfigError, match=f"object_url.*{status}"):
            start(tmp_path / "tiers", "s3://bucket/p", server.options)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"object_url": "s3://b"}, "object_bytes"),
        ({"object_bytes": 5}, "object_url"),
        ({"object_url": "s3://b", "object_bytes": -1}, "object_bytes"),
        ({"object_requests": 0}, "object_requests"),
        ({"object_deadline_s": 0.0}, "object_deadline_s"),
        ({"object_deadline_s": float("nan")}, "object_deadline_s"),
    ],
)
def test_settings_that_cannot_work_are_named(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TierSettings(**wrong)  # type: ignore[arg-type]


def test_settings_do_not_show_secrets() -> None:
    assert "hush" not in repr(TierSettings(object_options={"secret_access_key": "hush"}))


def test_a_store_that_cannot_be_counted_grants_no_room(executor: ThreadPoolExecutor) -> None:
    with FaultyS3Server() as server:
        store = open_store("s3://bucket/p", server.options, retries=0)
        tier = ObjectStoreTier(store, 1 << 20, executor)
        server.fail_always(HttpFault(status=503))
        with pytest.raises(CapacityError, match="cannot be counted"):
            tier.reserve([1])
        server.recover()
        tier.reserve([1]).release()


def test_an_executor_that_ended_ends_the_tier() -> None:
    pool = ThreadPoolExecutor(1)
    tier = ObjectStoreTier(MemoryStore(), 1 << 20, pool)
    put(tier, (name_of(0), b"x"))
    pool.shutdown()
    with pytest.raises(TierError, match="closed"):
        tier.stat([name_of(0)])
