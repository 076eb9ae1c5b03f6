"""The tier as vLLM's scheduler calls it, without an engine: nothing waits for a disk, and no late thread does harm."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs the environment of requirements-vllm.txt")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import TransferJob

from tiered_cache.engines.vllm import tier as module
from tiered_cache.engines.vllm.building import Building, build
from tiered_cache.engines.vllm.layout import PageGroup, PageLayout
from tiered_cache.engines.vllm.tier import TieredCacheTier
from tiered_cache.errors import ConfigError
from tiered_cache.executors import DaemonExecutor
from tiered_cache.geometry import PartKind
from tiered_cache.identity import Identity
from tiered_cache.service.bridge import Hello
from tiered_cache.service.build import ObjectPlace
from tiered_cache.service.catalogue import Catalogue

BLOCK, ROW_BYTES, ROWS = 16, 4096, 8
AT_ONCE_S = 5.0
"""On a busy machine; a call that waits for a hung disk takes half a minute and more."""
LAYOUT = PageLayout((PageGroup(0, PartKind.ROWS, BLOCK, ((0, 1000),)),), BLOCK, ROW_BYTES)


@dataclass
class Request:
    """What the tier reads of one of vLLM's."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    lora_request: object = None
    skip_reading_prefix_cache: bool = False


@dataclass
class Scheduler:
    """vLLM's side: a buffer, and requests of one group."""

    tier: TieredCacheTier
    buffer: Any
    contexts: dict[str, ReqContext] = field(default_factory=dict)
    jobs: int = 0

    def request(self, name: str, seed: int, blocks: int = 4, **more: Any) -> Request:
        hashes = [hashlib.sha256(f"{seed} {number}".encode()).digest() for number in range(blocks)]
        request = Request(name, blocks * BLOCK + 3, hashes, **more)
        self.contexts[name] = context = ReqContext(name)
        for number, key in enumerate(keys(request)):
            context.set_offload_key_position(key, (number + 1) * BLOCK)
        self.tier.begin(request)
        self.tier.on_new_request(context)
        return request

    def look_up(self, request: Request) -> list[LookupResult]:
        """Until the tier has an answer."""
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            begun_s = time.monotonic()
            self.tier.plan(request)
            found = [self.tier.lookup(key, self.contexts[request.request_id]) for key in keys(request)]
            assert time.monotonic() - begun_s < AT_ONCE_S
            if LookupResult.RETRY not in found:
                return found
        raise AssertionError("no answer")

    def submit(self, request: Request, rows: list[int], *, load: bool) -> int:
        self.jobs += 1
        job = TransferJob(
            self.jobs, keys(request)[: len(rows)], np.array(rows), load, self.contexts[request.request_id]
        )
        begun_s = time.monotonic()
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        assert time.monotonic() - begun_s < AT_ONCE_S
        return self.jobs

    def result(self, number: int) -> Any:
        until_s = time.monotonic() + 30
        while time.monotonic() < until_s:
            begun_s = time.monotonic()
            results = {result.job_id: result for result in self.tier.get_finished_jobs()}
            assert time.monotonic() - begun_s < AT_ONCE_S
            if number in results:
                return results[number]
            time.sleep(0.01)
        raise AssertionError("no result")

    def kept(self, request: Request, rows: list[int]) -> None:
        assert self.result(self.submit(request, rows, load=False)).success
        for executor in (self.tier._copies, self.tier._keeps):
            executor.submit(int).result(30)

    def disk(self) -> Any:
        assert self.tier.store is not None
        tier: Any = self.tier.store.cache._levels[0].tier
        while hasattr(tier, "inner"):  # what keeps its deadlines and counts its calls
            tier = tier.inner
        return tier


def keys(request: Request) -> list[Any]:
    return [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]


Open = Callable[..., Scheduler]


class Near:
    """In place of a `Bridge`: the catalogue of each store, in this process."""

    catalogues: ClassVar[dict[str | None, Catalogue]] = {}

    def __init__(self, hello: Hello) -> None:
        url = hello.tiers.object_url
        if url not in self.catalogues:
            self.catalogues[url] = ObjectPlace(hello.tiers).catalogue(DaemonExecutor(2, "catalogue"), cluster="test")
        self.catalogue = self.catalogues[url]

    def __getattr__(self, method: str) -> Any:
        return getattr(self.catalogue, method)

    def wait(self, seconds: float) -> bool:
        return True

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings of engines that share a store."""
    monkeypatch.setattr(module, "Bridge", Near)
    (tmp_path / "store").mkdir()
    return {
        "object_url": (tmp_path / "store").as_uri(),
        "object_bytes": "64MiB",
        "search_deadline_s": 20.0,
        "load_deadline_s": 30.0,
    }


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    identity = Identity(weights_digest=bytes(32), engine="vllm", engine_revision="test")
    monkeypatch.setattr(module, "identity_of", lambda *_: identity)
    monkeypatch.setattr(module, "layout_of", lambda *_: LAYOUT)
    made: list[Scheduler] = []

    def make(**settings: object) -> Scheduler:
        buffer = np.random.default_rng(len(made)).integers(-128, 128, (ROWS, ROW_BYTES), np.int8)
        where = {"disk_dir": str(tmp_path / "disk"), "disk_bytes": "64MiB", "disk_sync": "never"}
        with build(Building(None, None)):
            tier = TieredCacheTier(SimpleNamespace(), memoryview(buffer), "TieredCacheTier", **{**where, **settings})
        made.append(Scheduler(tier, buffer))
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.tier.shutdown()


def test_what_was_stored_is_loaded_into_other_rows(opened: Open) -> None:
    scheduler = opened()
    first = scheduler.request("first", 1)
    assert scheduler.look_up(first) == [LookupResult.MISS] * 4
    scheduler.kept(first, [0, 1, 2, 3])
    second = scheduler.request("second", 1)
    assert scheduler.look_up(second) == [LookupResult.HIT] * 4
    before = scheduler.buffer.copy()
    assert scheduler.result(scheduler.submit(second, [4, 5, 6, 7], load=True)).success
    assert np.array_equal(scheduler.buffer[4:, :1000], before[:4, :1000])
    assert np.array_equal(scheduler.buffer[4:, 1000:], before[4:, 1000:])  # what the group does not use


def test_two_engines_share_a_directory_while_both_run(opened: Open) -> None:
    here, there = opened(), opened()
    assert here.look_up(here.request("before", 1)) == [LookupResult.MISS] * 4
    there.kept(there.request("there", 1), [0, 1, 2, 3])
    request = here.request("after", 1)
    assert here.look_up(request) == [LookupResult.HIT] * 4
    assert here.result(here.submit(request, [0, 1, 2, 3], load=True)).success
    assert np.array_equal(here.buffer[:4, :1000], there.buffer[:4, :1000])
    assert here.tier.counters()["searches.found"] == 1


def test_two_nodes_share_a_store_while_both_run(opened: Open, shared: dict[str, object], tmp_path: Path) -> None:
    here = opened(**shared, disk_dir=str(tmp_path / "here"))
    there = opened(**shared, disk_dir=str(tmp_path / "there"))
    there.kept(there.request("there", 1), [0, 1, 2, 3])
    request = here.request("here", 1)
    assert here.look_up(request) == [LookupResult.HIT] * 4
    (catalogue,) = [here.tier._bridge.catalogue]  # type: ignore[union-attr]
    assert catalogue.cache.pins() == 1
    assert here.result(here.submit(request, [0, 1, 2, 3], load=True)).success
    assert np.array_equal(here.buffer[:4, :1000], there.buffer[:4, :1000])
    counted = here.tier.counters()
    assert (counted["searches.found"], counted["catalogue.found"], counted["fetched.object"]) == (1, 1, 4)
    here.tier.on_request_finished(here.contexts["here"])
    here.tier._searches.submit(int).result(30)
    assert catalogue.cache.pins() == 0


def test_a_catalogue_that_hangs_delays_one_prompt_and_its_late_plan_is_let_go(
    opened: Open, shared: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = opened(**shared, disk_dir=str(tmp_path / "there"))
    there.kept(there.request("there", 1), [0, 1, 2, 3])
    here = opened(**{**shared, "search_deadline_s": 0.3, "rest_s": 60.0}, disk_dir=str(tmp_path / "here"))
    catalogue: Any = here.tier._bridge.catalogue  # type: ignore[union-attr]
    hang, match = threading.Event(), catalogue.match

    def late(*args: Any, deadline_s: float) -> Any:
        hang.wait(60)
        return match(*args, deadline_s=30.0)

    monkeypatch.setattr(catalogue, "match", late)
    assert here.look_up(here.request("first", 1)) == [LookupResult.MISS] * 4
    assert here.look_up(here.request("second", 1)) == [LookupResult.MISS] * 4  # nobody else waits
    assert here.tier.counters()["searches.deadline"] == 1
    hang.set()
    for _ in range(2):  # the search, and the end of what it has found
        here.tier._searches.submit(int).result(30)
    assert here.tier.counters()["catalogue.found"] == 1
    assert catalogue.cache.pins() == 0


def test_a_store_that_hangs_is_left_alone_and_the_own_tiers_serve(
    opened: Open, shared: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = opened(**shared, disk_dir=str(tmp_path / "there"))
    there.kept(there.request("there", 1), [0, 1, 2, 3])
    limits = {"load_deadline_s": 0.5, "rest_s": 60.0, "close_deadline_s": 1.0}
    here = opened(**{**shared, **limits}, disk_dir=str(tmp_path / "here"))
    here.kept(here.request("own", 2), [4, 5, 6, 7])
    request = here.request("here", 1)
    assert here.look_up(request) == [LookupResult.HIT] * 4
    hang, store = threading.Event(), here.tier.store
    assert store is not None
    assert store.shared is not None
    monkeypatch.setattr(store.shared, "get", lambda *_, **__: hang.wait(60))
    assert not here.result(here.submit(request, [0, 1, 2, 3], load=True)).success
    assert here.look_up(request) == [LookupResult.MISS] * 4
    assert here.look_up(here.request("again", 2)) == [LookupResult.HIT] * 4
    counted = here.tier.counters()
    assert counted["loads.failed.deadline"] >= 1
    assert "refused.tier_rests" not in counted
    hang.set()


def test_a_load_that_hangs_fails_in_time_and_never_touches_the_buffer_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = opened(load_deadline_s=0.5, rest_s=60.0, close_deadline_s=1.0)
    scheduler.kept(scheduler.request("first", 1), [0, 1, 2, 3])
    request = scheduler.request("second", 1)
    assert scheduler.look_up(request) == [LookupResult.HIT] * 4
    hang, get = threading.Event(), scheduler.disk().get

    def late(requests: Any) -> Any:
        hang.wait(60)
        return get(requests)

    monkeypatch.setattr(scheduler.disk(), "get", late)
    begun_s = time.monotonic()
    number = scheduler.submit(request, [4, 5, 6, 7], load=True)
    assert not scheduler.result(number).success
    assert 0.3 < time.monotonic() - begun_s < 30
    before = scheduler.buffer.copy()
    hang.set()
    scheduler.tier._loads.submit(int).result(30)
    assert np.array_equal(scheduler.buffer, before)
    assert scheduler.look_up(request) == [LookupResult.MISS] * 4
    assert scheduler.look_up(scheduler.request("third", 1)) == [LookupResult.MISS] * 4  # nobody else waits
    counters = scheduler.tier.counters()
    assert counters["loads.failed.deadline"] >= 1
    assert counters["refused.tier_rests"] >= 1


def test_a_disk_that_takes_nothing_gives_the_buffer_back_at_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = opened(keep_deadline_s=0.5, close_deadline_s=1.0)
    hang = threading.Event()
    monkeypatch.setattr(scheduler.disk(), "put", lambda *_: hang.wait(60))
    for number in range(3):
        request = scheduler.request(f"request {number}", number)
        assert scheduler.result(scheduler.submit(request, [0, 1, 2, 3], load=False)).success
        scheduler.tier.on_request_finished(scheduler.contexts[request.request_id])
    for executor in (scheduler.tier._copies, scheduler.tier._keeps):
        executor.submit(int).result(30)
    assert scheduler.tier.counters()["spills.failed.tier"] == 3
    assert scheduler.tier.store is not None
    assert scheduler.tier.store._held_bytes == 0
    hang.set()


def test_a_reset_gives_transfers_up_and_ends_the_service(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM resets its caches when weights are updated in place: what is kept may be of others."""
    scheduler = opened(load_deadline_s=30.0, close_deadline_s=1.0)
    scheduler.kept(scheduler.request("first", 1), [0, 1, 2, 3])
    request = scheduler.request("second", 1)
    scheduler.look_up(request)
    hang = threading.Event()
    monkeypatch.setattr(scheduler.disk(), "get", lambda *_: hang.wait(60))
    number = scheduler.submit(request, [4, 5, 6, 7], load=True)
    begun_s = time.monotonic()
    scheduler.tier.drain_jobs()
    assert time.monotonic() - begun_s < AT_ONCE_S
    assert not scheduler.result(number).success
    assert scheduler.look_up(request) == [LookupResult.MISS] * 4
    assert scheduler.look_up(scheduler.request("third", 1)) == [LookupResult.MISS] * 4
    assert not scheduler.result(scheduler.submit(scheduler.request("fourth", 4), [0], load=False)).success
    assert scheduler.tier.counters()["refused.weights_may_have_changed"] >= 2
    hang.set()


def test_weights_that_are_said_to_be_fixed_survive_a_reset(opened: Open) -> None:
    scheduler = opened(weights_are_fixed=True)
    scheduler.kept(scheduler.request("first", 1), [0, 1, 2, 3])
    scheduler.tier.drain_jobs()
    assert scheduler.look_up(scheduler.request("second", 1)) == [LookupResult.HIT] * 4


def test_requests_with_an_adapter_are_neither_kept_nor_looked_up(opened: Open) -> None:
    scheduler = opened()
    adapted = scheduler.request("adapted", 1, lora_request=object())
    assert scheduler.look_up(adapted) == [LookupResult.MISS] * 4
    assert scheduler.result(scheduler.submit(adapted, [0, 1, 2, 3], load=False)).success
    scheduler.kept(scheduler.request("plain", 2), [0, 1, 2, 3])
    assert scheduler.look_up(scheduler.request("again", 1)) == [LookupResult.MISS] * 4
    assert scheduler.look_up(scheduler.request("adapted too", 2, lora_request=object())) == [LookupResult.MISS] * 4
    assert scheduler.tier.counters()["refused.adapter"] == 2


def test_a_tier_is_made_by_its_connector_or_not_at_all() -> None:
    with pytest.raises(ConfigError, match="TieredCacheConnector"):
        TieredCacheTier(SimpleNamespace(), memoryview(np.zeros((1, 64), np.int8)), "x", host_bytes=1 << 20)
