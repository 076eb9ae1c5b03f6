"""`TieredCacheTier`: a secondary tier of vLLM's own tiering; vLLM moves bytes between device and its host buffer.

Everything here is called from vLLM's scheduler and returns at once: look-ups read a plan that was made from the index
in memory, transfers run in threads of our own. A transfer ends in time, whatever the disk does: past its deadline it is
reported as failed, and its thread does not touch vLLM's buffer any more. After a missed deadline nothing is looked up
for a while; if it was the object store's, that alone is left alone. A load that failed ends in a shorter hit, or in
none, and vLLM computes the rest.

The catalogue of the object store is an actor. This process does not join Ray, which would end it with the cluster's
head: it has a `Bridge`, and goes on with its own tiers while that is down.
"""

from __future__ import annotations

import logging
import math
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from tiered_cache.deadline import Deadline, until
from tiered_cache.engines.vllm.building import Building, building
from tiered_cache.engines.vllm.identity import identity_of
from tiered_cache.engines.vllm.layout import Bytes, PageLayout
from tiered_cache.engines.vllm.layout_of import layout_of
from tiered_cache.engines.vllm.pages import ChunkName, PageStore, Place, Plan, Progress
from tiered_cache.engines.vllm.settings import VllmSettings
from tiered_cache.engines.vllm.workers import TimedJob
from tiered_cache.errors import DeadlineError, MissReason
from tiered_cache.executors import DaemonExecutor
from tiered_cache.service.bridge import Bridge, Hello
from tiered_cache.service.build import ObjectPlace, build_cache
from tiered_cache.tiers.base import Durability

METRIC = "vllm:tiered_cache_events"
"""A Prometheus counter; its label `event` is the name of one of our counters."""
LOAD_THREADS = 2
_OF_START = 0.5  # of the start's time may be waited for the catalogue
_IN_TIME = 0.9  # of a job's time is the tiers', so that it can say itself that it has failed
_log = logging.getLogger(__name__)


class _Request:
    """One of vLLM's requests."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self.progress = Progress()
        self.plan: Plan | None = None
        self.planned_tokens = 0
        self.searched = False
        self.search: Future[Plan | None] | None = None
        """For what others have put into a shared directory or the object store."""
        self.search_until_s = 0.0
        self.tokens_max: int | None = None
        """What a failed load has shown not to be there."""
        self.excluded = request.lora_request is not None


class TieredCacheTier(SecondaryTierManager):
    """vLLM's blocks in a `TieredCache`. Made by vLLM, inside `TieredCacheConnector`."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: object,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        engine = building()
        self.settings = VllmSettings.from_document(settings)
        self._rows: Bytes | None = np.asarray(primary_kv_view).view(np.uint8)
        self._requests: dict[str, _Request] = {}
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._jobs: dict[int, TimedJob] = {}
        self._rests_until_s = 0.0
        self._loading: dict[int, tuple[str, int, bool]] = {}
        """Load -> the request, the least end of a chunk, and whether the plan is the catalogue's."""
        self._failed_ends: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._shown: Counter[str] = Counter()
        self._was_reset = False
        self._loads = DaemonExecutor(LOAD_THREADS, "tiered-cache-load")
        self._searches = DaemonExecutor(1, "tiered-cache-search")
        tiers = self.settings.tiers
        self._no_search_until_s = math.inf if tiers.disk_dir is None and tiers.object_url is None else 0.0
        self._bridge: Bridge | None = None
        self._copies = DaemonExecutor(1, "tiered-cache-copy")
        self._keeps = DaemonExecutor(1, "tiered-cache-keep")
        self._encoders = DaemonExecutor(self.settings.tiers.executor_threads, "tiered-cache-encode")
        layout = layout_of(engine.kv_cache_config, offloading_spec, self._rows.shape[1])
        self._opening: Future[PageStore] = self._keeps.submit(self._open, engine, layout)
        try:
            self._opening.result(self.settings.start_deadline_s)
        except TimeoutError:
            _log.warning(
                "tiered-cache: not open after %s s; vLLM goes on without it until it is", self.settings.start_deadline_s
            )
        except BaseException:
            self._close_threads()
            self._rows = None
            raise

    def _open(self, engine: Building, layout: PageLayout) -> PageStore:
        settings, tiers, shared = self.settings, self.settings.tiers, None
        place = ObjectPlace(tiers) if tiers.object_url is not None else None
        if place is not None:  # it is joined while the weights are read
            self._bridge = Bridge(Hello(_ray_address(settings.ray_address), settings.cluster, tiers))
            # a directory is a store of several nodes only if it is none of theirs: blocks go there as into any
            shared = place.shared(self._bridge, durability=Durability.OBJECT)
        try:
            identity = identity_of(engine.vllm_config, settings.salt, settings.digest_cache)
            if self._bridge is not None and not self._bridge.wait(settings.start_deadline_s * _OF_START):
                _log.warning("tiered-cache: the object store's catalogue is not in reach; vLLM goes on until it is")
            cache = build_cache(tiers, self._encoders, shared=shared, clock=time.monotonic)
            try:
                return PageStore(
                    cache,
                    identity,
                    layout,
                    durability=settings.durability,
                    held_bytes_max=settings.held_bytes,
                    shared=shared,
                    otherwise=_own_durability(settings),
                )
            except BaseException:
                cache.close()
                raise
        except BaseException:
            if self._bridge is not None:
                self._bridge.close()
            raise

    @property
    def store(self) -> PageStore | None:
        """None as long as it is not open, or if it could not be opened."""
        if not self._opening.done() or self._opening.exception() is not None:
            return None
        return self._opening.result()

    def _serving(self) -> PageStore | None:
        """The store, unless something stands against using it now."""
        store = self.store
        if store is None:
            self._count("refused.not_open")
        elif self._was_reset:
            self._count("refused.weights_may_have_changed")
        elif time.monotonic() < self._rests_until_s:
            self._count("refused.tier_rests")
        else:
            return store
        return None

    def _missed_deadline(self, *, of_store: bool = False) -> None:
        """Whoever asks next would wait as long: nobody does, for a while."""
        until_s = time.monotonic() + self.settings.rest_s
        if of_store:
            self._no_search_until_s = until_s
        else:
            self._rests_until_s = until_s

    # Requests

    def begin(self, request: Any) -> None:
        """For the connector: a request of vLLM's, which is asked for its block hashes and its length later."""
        self._requests[request.request_id] = _Request(request)

    def plan(self, request: Any) -> None:
        """For the connector: a request's blocks are about to be looked up."""
        known = self._requests.get(request.request_id)
        if known is None:
            return
        tokens: int = request.num_tokens
        if known.search is not None and not self._searched(known):
            return
        if known.plan is not None and known.planned_tokens == tokens:
            return
        self._end_plan(known)
        known.planned_tokens = tokens
        store = None if known.excluded or request.skip_reading_prefix_cache else self._serving()
        if known.excluded:
            self._count("refused.adapter")
        if store is None:
            known.plan = Plan(0, {}, MissReason.TIER_ERROR, 0)
            return
        # vLLM asks for all of a prompt where it can then compute the last token alone
        limit = tokens + 1 if store.layout.only_rows else tokens
        if known.tokens_max is not None:
            limit = min(limit, known.tokens_max)
        known.plan = store.match(request.block_hashes, limit, self.settings.load_deadline_s)
        known.progress.request = known.plan.request
        known.progress.known_tokens = max(known.progress.known_tokens, known.plan.tokens)
        if not known.searched and time.monotonic() >= self._no_search_until_s:
            known.searched = True
            if (limit - 1) // store.layout.block_tokens * store.layout.block_tokens > known.plan.tokens:
                known.search_until_s = time.monotonic() + self.settings.search_deadline_s
                known.search = self._searches.submit(
                    self._search, store, list(request.block_hashes), limit, known.plan.tokens
                )

    def _search(self, store: PageStore, block_hashes: Sequence[bytes], tokens: int, known_tokens: int) -> Plan | None:
        with until(Deadline.after(self.settings.search_deadline_s)):
            pin_s = self.settings.search_deadline_s + self.settings.load_deadline_s
            return store.search(block_hashes, tokens, known_tokens, pin_s)

    def _searched(self, known: _Request) -> bool:
        """Whether a request's search is over; if it has found more than was known, that is the request's plan now."""
        search = known.search
        assert search is not None
        if not search.done():
            if time.monotonic() < known.search_until_s:
                return False
            self._count("searches.deadline")
            self._no_search_until_s = time.monotonic() + self.settings.rest_s
            self._end_search(known)
            return True
        known.search = None
        error = search.exception()
        plan = search.result() if error is None else None
        self._count("searches.failed" if error is not None else "searches.found" if plan else "searches.empty")
        if plan is not None:
            self._end_plan(known)
            known.plan = plan
            if not plan.is_shared:
                known.progress.request = plan.request
                known.progress.known_tokens = max(known.progress.known_tokens, plan.tokens)
        return True

    def _end_search(self, known: _Request) -> None:
        """Nobody waits for a search any more: what it still finds is let go of."""
        search, known.search = known.search, None
        if search is not None and not search.cancel():
            search.add_done_callback(self._drop)

    def _drop(self, search: Future[Plan | None]) -> None:
        if not search.cancelled() and search.exception() is None:
            self._end(search.result())

    def _end_plan(self, known: _Request) -> None:
        self._end_search(known)
        plan, known.plan = known.plan, None
        self._end(plan)

    def _end(self, plan: Plan | None) -> None:
        store = self.store
        if plan is None or plan.pin is None or store is None:
            return
        if plan.is_shared:
            with suppress(RuntimeError):  # closed; the pin ends by itself
                self._searches.submit(self._end_shared, store, plan)
        else:
            store.end(plan)

    def _end_shared(self, store: PageStore, plan: Plan) -> None:
        with until(Deadline.after(self.settings.search_deadline_s)):
            store.end(plan)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """All of a request's blocks are offered, those that vLLM has at hand, too: what is kept has no gaps."""
        del req_context
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        known = self._requests.get(req_context.req_id)
        if known is None or known.plan is None or self._was_reset:
            return LookupResult.MISS
        if known.search is not None:
            return LookupResult.RETRY
        return LookupResult.HIT if key in known.plan.places else LookupResult.MISS

    def on_request_finished(self, req_context: Any) -> None:
        known = self._requests.pop(req_context.req_id, None)
        if known is None:
            return
        self._end_plan(known)
        with suppress(RuntimeError):  # closed
            self._copies.submit(self._finish, known)

    def _finish(self, known: _Request) -> None:
        """In the wake of the request's last copies."""
        store = self.store
        if store is not None:
            with suppress(RuntimeError):
                self._keeps.submit(store.finish, known.progress)

    # Out of the tiers

    def submit_load(self, job_metadata: Any) -> None:
        job, keys = self._new_job(job_metadata, self.settings.load_deadline_s), list(job_metadata.keys)
        known = self._requests.get(job_metadata.req_context.req_id)
        plan, store = known.plan if known is not None else None, self.store
        if plan is None or store is None or not all(key in plan.places for key in keys):
            self._report(job, JobResult(job.number, success=False))
            return
        places = [plan.places[key] for key in keys]
        rows = [int(chunk) for chunk in job_metadata.chunk_ids]
        self._count("loads")
        req_id = job_metadata.req_context.req_id
        self._loading[job.number] = (req_id, min(place.chunk[1] for place in places), plan.is_shared)
        self._loads.submit(self._load, job, store, keys, places, rows, req_id, plan.is_shared)

    def _load(
        self, job: TimedJob, store: PageStore, keys: Sequence[bytes], places: Sequence[Place], rows: Sequence[int],
        req_id: str, is_shared: bool,
    ) -> None:  # fmt: skip
        begun_s, loaded, bytes_ = time.monotonic(), [], 0
        failed_end: int | None = None
        try:
            with until(Deadline.after((job.until_s - begun_s) * _IN_TIME)):
                for number, page in store.load(places):
                    if isinstance(page, MissReason):
                        if job.given_up:  # and counted
                            return
                        self._count(f"loads.failed.{page}")
                        if page is MissReason.DEADLINE:
                            self._missed_deadline(of_store=is_shared)
                        end = places[number].chunk[1]
                        failed_end = end if failed_end is None else min(failed_end, end)
                        continue
                    with job.buffer() as mine:
                        if not mine or self._rows is None:
                            return
                        store.layout.by_index[places[number].chunk[0]].write(page, self._rows[rows[number]])
                    loaded.append(keys[number])
                    bytes_ += page.nbytes
        except Exception as error:  # noqa: BLE001 - whatever it was, vLLM computes
            late = isinstance(error, DeadlineError)
            if job.given_up:
                return
            if late:
                self._missed_deadline(of_store=is_shared)
            else:
                _log.exception("tiered-cache: a load failed")
            self._count(f"loads.failed.{MissReason.DEADLINE if late else 'error'}")
            failed_end = min(place.chunk[1] for place in places)
        if failed_end is not None:
            self._failed_ends.put((req_id, failed_end))
        elapsed_s = time.monotonic() - begun_s
        self._count("bytes.loaded", bytes_)
        whole = len(loaded) == len(keys)
        self._report(job, JobResult(job.number, whole, None if whole else tuple(loaded), elapsed_s, bytes_))

    # Into the tiers

    def submit_store(self, job_metadata: Any) -> None:
        job, keys = self._new_job(job_metadata, self.settings.store_deadline_s), list(job_metadata.keys)
        known = self._requests.get(job_metadata.req_context.req_id)
        store = None if known is None or known.excluded else self._serving()
        if known is None or store is None:
            self._report(job, JobResult(job.number, success=known is None or known.excluded))
            return
        chunks = []
        for key, row in zip(keys, job_metadata.chunk_ids, strict=True):
            end = job_metadata.req_context.get_offload_key_position(key)
            group = store.layout.by_index.get(int.from_bytes(key[-4:], "big"))
            if group is None or end is None or end % group.chunk_tokens:  # the tail of a block
                self._count("stores.skipped.tail")
                continue
            chunks.append(((group.index, int(end)), int(row)))
        self._copies.submit(self._copy, job, store, known, chunks)

    def _copy(self, job: TimedJob, store: PageStore, known: _Request, chunks: Sequence[tuple[ChunkName, int]]) -> None:
        """Take from vLLM's buffer what is wanted, so that it has it back, and leave it to the keeping thread."""
        begun_s, copied = time.monotonic(), dict[ChunkName, Bytes]()
        for chunk, row in chunks:
            group = store.layout.by_index[chunk[0]]
            if not store.wants(known.progress, chunk) or not store.reserve(known.progress, group.page_bytes):
                continue
            page = copied[chunk] = np.empty(group.page_bytes, np.uint8)
            with job.buffer() as mine:
                if not mine or self._rows is None:
                    store.drop(copied)
                    return
                group.read(self._rows[row], page)
        elapsed_s, bytes_ = time.monotonic() - begun_s, sum(page.nbytes for page in copied.values())
        self._report(job, JobResult(job.number, success=True, transfer_time=elapsed_s, transfer_bytes=bytes_))
        if copied:
            self._keeps.submit(self._keep, store, known, copied)

    def _keep(self, store: PageStore, known: _Request, pages: dict[ChunkName, Bytes]) -> None:
        with until(Deadline.after(self.settings.keep_deadline_s)):
            try:
                store.keep(known.progress, known.request.block_hashes, pages)
            except Exception:  # noqa: BLE001 - what was not kept is computed again some day
                _log.exception("tiered-cache: blocks were not kept")
                self._count("spills.failed.error")

    # Jobs

    def _new_job(self, job_metadata: Any, deadline_s: float) -> TimedJob:
        job = TimedJob(job_metadata.job_id, time.monotonic() + deadline_s)
        self._jobs[job.number] = job
        return job

    def _report(self, job: TimedJob, result: Any) -> None:
        """From any thread: the job is done with vLLM's buffer, unless it was given up."""
        if job.report():
            self._results.put(result)

    def get_finished_jobs(self) -> Iterable[Any]:
        now_s = time.monotonic()
        for job in [job for job in self._jobs.values() if job.until_s < now_s]:
            if job.give_up(wait=False):
                req_id, end, is_shared = self._loading.get(job.number, ("", 0, False))
                self._count(f"{'loads' if req_id else 'stores'}.failed.{MissReason.DEADLINE}")
                self._missed_deadline(of_store=is_shared)
                self._results.put(JobResult(job.number, success=False))
                if req_id:
                    self._shorten(req_id, end)
        with suppress(queue.Empty):
            while True:
                req_id, end = self._failed_ends.get_nowait()
                self._shorten(req_id, end)
        results = []
        with suppress(queue.Empty):
            while True:
                results.append(self._results.get_nowait())
                self._jobs.pop(results[-1].job_id, None)
                self._loading.pop(results[-1].job_id, None)
        return results

    def _shorten(self, req_id: str, end: int) -> None:
        """A chunk that ends there is not to be had: look for less."""
        known = self._requests.get(req_id)
        if known is not None:
            known.tokens_max = end if known.tokens_max is None else min(known.tokens_max, end)
            known.progress.known_tokens = 0
            known.searched = known.plan is None or not known.plan.is_shared
            self._end_plan(known)

    def drain_jobs(self) -> None:
        """Give all transfers up, without waiting for any disk, since vLLM resets its caches.

        That is what happens when weights are updated in place, so what is kept may be of other weights from now on.
        """
        for job in self._jobs.values():
            if job.give_up(wait=True):
                self._results.put(JobResult(job.number, success=False))
        if not self.settings.weights_are_fixed and not self._was_reset:
            self._was_reset = True
            _log.warning("tiered-cache: vLLM's caches were reset; nothing is served or kept until the next start")

    def shutdown(self) -> None:
        """Keep what has been taken, as far as that is done in time, and let go of vLLM's buffer."""
        until_s = time.monotonic() + self.settings.close_deadline_s
        self._copies.shutdown(wait=False)
        kept = self._copies.join(self.settings.close_deadline_s)
        self._keeps.shutdown(wait=False)
        kept = self._keeps.join(max(0.0, until_s - time.monotonic())) and kept
        for job in self._jobs.values():
            job.give_up(wait=True)
        self._rows = None
        self._close_threads()
        if not kept:
            _log.warning("tiered-cache: closed with blocks that were not kept yet")
        elif self.store is not None:
            _log.info("tiered-cache: %s", self.counters())
            self.store.cache.close()
        if self._bridge is not None:
            self._bridge.close()

    def _close_threads(self) -> None:
        for executor in (self._loads, self._searches, self._copies, self._keeps, self._encoders):
            executor.shutdown(wait=False, cancel_futures=True)

    # Figures

    def counters(self) -> dict[str, int]:
        """The cache's, the store's, the bridge's, and our own.

        These are `loads`, `loads.failed.*`, `stores.*`, `searches.*`, `refused.*`.
        """
        store, bridge = self.store, self._bridge
        with self._lock:
            own = dict(self._counters)
        return {
            **(store.counters() if store is not None else {}),
            **(bridge.counters() if bridge is not None else {}),
            **own,
        }

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self._counters[what] += number

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        del extra_config
        text = "What happened in tiered-cache, by the name of its counter."
        return {METRIC: OffloadingCounterMetadata(documentation=text, labelnames=("event",))}

    def get_stats(self) -> Any:
        """What has been counted since the last call."""
        stats = OffloadingConnectorStats()
        now = Counter(self.counters())
        for event, number in (now - self._shown).items():
            stats.increase_counter(METRIC, number, (event,))
        self._shown = now
        return stats


def _own_durability(settings: VllmSettings) -> Durability | None:
    """Where blocks are kept that cannot reach the object store now."""
    if settings.durability is not Durability.OBJECT:
        return None
    if settings.tiers.disk_dir is not None:
        return Durability.DISK
    return Durability.HOST if settings.tiers.host_bytes else None


def _ray_address(address: str) -> str:
    """Where Ray is, if this process, for its workers, has joined it already: `auto` is for those that have not."""
    ray: Any = sys.modules.get("ray")
    if address == "auto" and ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return address
