"""The replay: every request of a trace through a running cluster, in time order, with every restore checked.

For each request: match and restore on the chosen worker, check what was restored, compute the rest, spill the
checkpoints worth keeping, release. Each step waits for the one before it, so that two replays with one seed decide
alike; `ReplayResult.decisions_digest` tells. A hit is a match in the tiers; what a worker happens to hold is none.

What is computed. Where a trace tells the decoded tokens (`out_runs`), the sequence goes on with them, and ends after
the last of them. Elsewhere the prompt alone is processed, and the tokens after its last full block are nobody else's:
no later request can continue from within them, so that the last full block's end counts as the sequence's end, and no
checkpoint behind it is offered to the tiers. Block size of trace and state are independent.

What is checked. The digest of a restored state and its next output must equal those of a sequence that was never
spilled. Such marks are remembered, in bounded memory, from sequences that were computed from nothing or whose own
restore has been checked; what is not remembered is computed again from nothing, by an engine of the driver's own.
A sequence whose restore differs is counted, logged and not spilled.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Final

import numpy as np
import xxhash

from tiered_cache.config import ClusterSettings
from tiered_cache.engines.base import ComputingEngine
from tiered_cache.errors import (
    CapacityError,
    ConfigError,
    FrameNotFoundError,
    StaleError,
    TieredCacheError,
    TierError,
    UnknownOutcomeError,
)
from tiered_cache.geometry import Geometry
from tiered_cache.identity import CHECKPOINT, PrefixChain, Tokens, namespace_of
from tiered_cache.policy.base import Hints
from tiered_cache.replay.latency import Latencies, LatencyHistogram
from tiered_cache.replay.traces import TokenSource, Trace, TraceRequest
from tiered_cache.service.build import build_engine
from tiered_cache.service.local import Cluster, WorkerPort
from tiered_cache.service.messages import (
    Prompt,
    Restored,
    RunResult,
    SequenceRef,
    SpillResult,
    StateMark,
)
from tiered_cache.service.owner_set import combined_mark
from tiered_cache.service.router import Placement
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import SyncPolicy

RETRY_PAUSE_S: Final = 0.1
RETRY_PAUSE_S_MAX: Final = 2.0
HEAL_S: Final = 2.0
"""How often what went with a node is started again."""
FAILURES_IN_A_ROW_MAX: Final = 3
"""A replay ends with the error if so many requests, one after the other, could not be computed at all."""
MISMATCHES_SHOWN_MAX: Final = 100
SAMPLES_MAX: Final = 128
PHASES: Final = ("place", "run", "spill")
"""Of a request: find, restore and reserve; compute the rest; hand over what is worth keeping."""
PACKAGES: Final = ("tiered-cache", "ray", "numpy", "msgpack", "zstandard", "xxhash")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """What decides about a replay besides the trace."""

    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    """Of the cluster that is handed to `replay`; its worker's engine is also the one that checks."""
    requests: int | None = None
    """How many of the trace's requests, from its start; None for all."""
    seed: int = 0
    """Of the tokens that the trace's block ids stand for."""
    durability: Durability = Durability.HOST
    """What each spill must reach before the worker may free the sequence."""
    deadline_s: float = 120.0
    """Of each call."""
    recover_s: float = 60.0
    """How long a request whose actors die or are away is tried again, on others or when they are back."""
    marks_max: int = 1 << 16
    """How many prefixes' marks are remembered; about 400 bytes each."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replay is."""

    requests: int
    requests_total: int
    input_tokens: int
    input_tokens_total: int
    hit_tokens: int
    restores: int
    mismatches: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A restore whose state was not the one that a sequence had that was never spilled."""

    request: int
    """Its line in the trace, from 0."""
    tokens: int
    worker: str
    expected: StateMark
    found: StateMark | None
    frames: tuple[str, ...]
    """The names of the frames that it was restored from."""


@dataclass(frozen=True, slots=True)
class Sample:
    """How things stand after some request: sums since the replay began, and what the tiers hold."""

    requests: int
    elapsed_s: float
    input_tokens: int
    hit_tokens: int
    read_bytes: int
    """Stored bytes that workers read, of all tiers."""
    written_bytes: dict[str, int]
    """By tier."""
    stored_bytes: dict[str, int]
    """By tier; what was there before the replay included."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What happened. `lookups == restores + misses`, and every miss has one reason."""

    requests: int
    input_tokens: int
    output_tokens: int
    """Decoded tokens that the trace tells, and that were processed too."""
    hit_tokens: int
    hit_rate: float
    """`hit_tokens` over the sum of all prompts' lengths."""
    lookups: int
    restores: int
    restores_on_other_worker: int
    """Of checkpoints that are known to have come from another worker than the one they were restored on."""
    misses: int
    misses_by_reason: dict[str, int]
    refusals_by_reason: dict[str, int]
    """Attempts to restore, to find room or to spill that an error ended, by the error's class."""
    declined_by_reason: dict[str, int]
    """Offered checkpoints that no tier took."""
    retries_by_reason: dict[str, int]
    """How often a request was begun again, because an actor that had to do with it died or was away."""
    failures_by_reason: dict[str, int]
    """Requests that no worker could compute."""
    checkpoints_skipped: int
    """Because no staging slot was free."""
    verified_from_memory: int
    verified_by_recomputing: int
    mismatches: int
    mismatched: tuple[Mismatch, ...]
    """The first of them."""
    bytes_restored: int
    """Stored bytes that workers read."""
    bytes_spilled: int
    """Raw bytes that left workers."""
    bytes_stored: int
    """What they take in the tier that acknowledged them."""
    elapsed_s: float
    requests_per_s: float
    input_tokens_per_s: float
    latencies_s: dict[str, Latencies]
    """By phase, of the requests that got through it."""
    samples: tuple[Sample, ...]
    """At most `SAMPLES_MAX`, evenly over the requests."""
    peak_rss_bytes: int
    decisions_digest: str
    """Equal for two replays exactly when every request was placed, restored and spilled alike."""
    counters: dict[str, int]
    settings: dict[str, object]
    versions: dict[str, str]

    def to_json(self) -> str:
        """All fields, as one JSON object."""
        return json.dumps(asdict(self), indent=2, default=str)


@dataclass(frozen=True, slots=True)
class _Survey:
    """A look at all requests before the first one runs, so that what is wrong with them shows at once."""

    requests: int
    input_tokens: int
    longest: TraceRequest
    highest: TraceRequest
    """The one with the highest block id."""

    @staticmethod
    def of(requests: Iterator[TraceRequest]) -> _Survey:
        count = input_tokens = 0
        longest = highest = None
        length_max = id_max = -1
        for request in requests:
            count += 1
            input_tokens += request.input_tokens
            length = request.input_tokens + _decoded(request)
            if length > length_max:
                length_max, longest = length, request
            last_id = max((first + ids for first, ids in (*request.runs, *request.output_runs)), default=0)
            if last_id > id_max:
                id_max, highest = last_id, request
        if longest is None or highest is None:
            raise ConfigError("requests: nothing to replay")
        return _Survey(count, input_tokens, longest, highest)


def replay(
    trace: Trace,
    cluster: Cluster,
    settings: ReplaySettings,
    on_progress: Callable[[Progress], None] | None = None,
) -> ReplayResult:
    """Run the trace's requests through the cluster; `on_progress` is told after each.

    Raises `TraceError` for a bad line and `ConfigError` for a trace that the engine cannot run (too long a request,
    more block ids than its vocabulary tells apart), and `IdentityError` or `GeometryError` if the cluster's engine is
    not the one of the settings, all before the first request. What goes wrong with one request is counted in the
    result: a request whose actors die is computed again elsewhere, and what a node took with it is started again; only
    several in a row that cannot be computed at all raise the last one's error.
    """
    worker = replace(settings.cluster.worker, device="numpy")
    engines = [build_engine(replace(worker, rank=rank)) for rank in range(worker.shards)]
    engine = engines[0]
    if namespace_of(engine.identity.digest(), engine.geometry.fingerprint()) != cluster.namespace:
        engine.identity.check(cluster.identity)
        engine.geometry.check(cluster.geometry)
    source = TokenSource(trace.block_tokens, engine.vocabulary, settings.seed)
    survey = _Survey.of(islice(trace, settings.requests))
    _check_room(engine, survey.longest)
    source.tokens(survey.highest)
    source.output_token_array(survey.highest)
    return _Replay(cluster, settings, source, _Truth(engines, settings.marks_max), survey).run(trace, on_progress)


def _can_pass(error: TieredCacheError) -> bool:
    """Whether it says that somebody is dead or away, or has come back without what there was."""
    if isinstance(error, TierError):
        return error.retryable or isinstance(error, UnknownOutcomeError)
    return isinstance(error, StaleError | FrameNotFoundError)


def _check_room(engine: ComputingEngine, request: TraceRequest) -> None:
    tokens = request.input_tokens + _decoded(request)
    try:
        engine.cancel(engine.reserve(tokens))
    except CapacityError as error:
        raise ConfigError(f"request {request.index} does not fit a worker: {error.message}") from error


def _decoded(request: TraceRequest) -> int:
    """How many decoded tokens the trace tells."""
    return request.output_tokens if request.output_runs else 0


@dataclass(slots=True)
class _Known:
    """What is remembered about one prefix."""

    mark: StateMark | None = None
    spilled_by: str | None = None


class _Truth:
    """The marks of sequences that were never spilled, by prefix; and which worker spilled a checkpoint there."""

    def __init__(self, engines: Sequence[ComputingEngine], prefixes_max: int) -> None:
        """`engines`: one a rank."""
        self._engines = engines
        self._prefixes_max = prefixes_max
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    def recall(self, tokens: Tokens) -> _Known:
        """What is known about the prefix of these tokens, to read and to add to; the least recently used are forgotten.

        Prefixes are told apart by a hash of their tokens that has nothing to do with the keys of frames.
        """
        prefix = xxhash.xxh3_128_digest(tokens.data)
        known = self._known.setdefault(prefix, _Known())
        self._known.move_to_end(prefix)
        if len(self._known) > self._prefixes_max:
            self._known.popitem(last=False)
        return known

    def recompute(self, tokens: Tokens) -> StateMark:
        """The mark of the state behind these tokens, computed from nothing."""
        mark = combined_mark([self._computed(engine, tokens) for engine in self._engines])
        assert mark is not None
        return mark

    @staticmethod
    def _computed(engine: ComputingEngine, tokens: Tokens) -> StateMark:
        sequence = engine.start(engine.reserve(len(tokens)))
        try:
            engine.extend(sequence, tokens)
            return StateMark(len(tokens), engine.digest(sequence), engine.output(sequence))
        finally:
            engine.release(sequence)


class _Replay:
    """One run over a trace, and its sums."""

    def __init__(
        self, cluster: Cluster, settings: ReplaySettings, source: TokenSource, truth: _Truth, survey: _Survey
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._source = source
        self._truth = truth
        self._survey = survey
        self._sums: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._mismatched: list[Mismatch] = []
        self._latencies = {phase: LatencyHistogram() for phase in PHASES}
        self._samples: list[Sample] = []
        self._decisions = xxhash.xxh3_128()

    def run(self, trace: Trace, on_progress: Callable[[Progress], None] | None) -> ReplayResult:
        before, generations = Counter(self._cluster.counters()), self._cluster.generations()
        start_s = time.perf_counter()
        failures_in_a_row, heal_at_s = 0, start_s + HEAL_S
        sample_every = -(-self._survey.requests // SAMPLES_MAX)
        for request in islice(trace, self._settings.requests):
            if time.perf_counter() >= heal_at_s:
                self._heal()
                heal_at_s = time.perf_counter() + HEAL_S
            try:
                self._serve(request)
                failures_in_a_row = 0
            except TieredCacheError as error:
                _log.warning("request %d: %s: %s", request.index, type(error).__name__, error)
                self._failures[type(error).__name__] += 1
                self._decide(request.index, type(error).__name__)
                failures_in_a_row += 1
                if failures_in_a_row == FAILURES_IN_A_ROW_MAX:
                    raise
            self._sums["requests"] += 1
            self._sums["input_tokens"] += request.input_tokens
            if not self._sums["requests"] % sample_every or self._sums["requests"] == self._survey.requests:
                self._samples.append(self._sample(time.perf_counter() - start_s, before))
            if on_progress is not None:
                on_progress(self._progress(time.perf_counter() - start_s))
        elapsed_s = time.perf_counter() - start_s
        counters = Counter(self._cluster.counters())
        counters.subtract(before)
        self._check_books(counters, complete=self._cluster.generations() == generations)
        return self._result(elapsed_s, counters, trace)

    # One request

    def _serve(self, request: TraceRequest) -> None:
        """Compute a request, again from the look-up on if an actor dies under it."""
        until_s, pause_s = time.perf_counter() + self._settings.recover_s, RETRY_PAUSE_S
        while True:
            try:
                return self._try(request)
            except TieredCacheError as error:
                if not _can_pass(error) or time.perf_counter() + pause_s > until_s:
                    raise
                _log.warning("request %d: again, after %s: %s", request.index, type(error).__name__, error)
                self._retries[type(error).__name__] += 1
                self._decide(request.index, "again", type(error).__name__)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_PAUSE_S_MAX)
            self._heal()

    def _heal(self) -> None:
        try:
            started = self._cluster.heal()
        except ConfigError:  # whoever has started it will
            return
        if started:
            _log.warning("started again: %s", ", ".join(started))

    def _try(self, request: TraceRequest) -> None:
        cluster, deadline_s = self._cluster, self._settings.deadline_s
        tokens = self._source.tokens(request)
        session = None if request.session is None else str(request.session)
        asked = Prompt(tokens, session=session, now_s=request.arrival_s)
        end = request.input_tokens
        if request.output_runs:
            tokens = np.concatenate((tokens, self._source.output_token_array(request)))
            end = len(tokens)
        elif self._source.block_tokens > 1:
            end -= end % self._source.block_tokens
        with self._timed("place"):
            placement = cluster.router.place(cluster.namespace, asked, len(tokens), deadline_s=deadline_s)
        sound = self._note_placement(request, tokens, placement)
        worker = cluster.workers[placement.owner]
        place = placement.restored.source if placement.restored else placement.lease
        assert place is not None
        take_at = tuple(sorted({*placement.take_at, end} - {0}))
        with self._timed("run"):
            done = worker.run(place, Prompt(tokens, session=session), take_at, deadline_s=deadline_s)
        self._sums["hit_tokens"] += placement.restored_tokens
        try:
            if sound and self._learn(request, tokens, end, placement.owner, done.marks):
                self._spill(request, tokens, end, placement, done)
        finally:
            self._release(request, worker, done.source)
        self._sums["output_tokens"] += len(tokens) - request.input_tokens
        self._sums["checkpoints_skipped"] += len(done.skipped)

    def _note_placement(self, request: TraceRequest, tokens: Tokens, placement: Placement) -> bool:
        """Count it, and check what was restored; False if that is not what it should be."""
        restored = placement.restored
        self._sums["lookups"] += 1
        self._refusals.update(kind for kind, _ in placement.refusals)
        self._decide(
            request.index, placement.owner, placement.restored_tokens, str(placement.reason), *placement.take_at
        )
        if restored is None:
            self._misses[str(placement.reason)] += 1
            return True
        self._sums["restores"] += 1
        self._sums["bytes_restored"] += restored.bytes_read
        return self._check(request, tokens[: restored.tokens], placement.owner, restored)

    def _check(self, request: TraceRequest, prefix: Tokens, worker: str, restored: Restored) -> bool:
        """Compare a restored state with what a sequence has that was never spilled."""
        known = self._truth.recall(prefix)
        if known.mark is None:
            known.mark = self._truth.recompute(prefix)
            self._sums["verified_by_recomputing"] += 1
        else:
            self._sums["verified_from_memory"] += 1
        self._sums["restores_on_other_worker"] += known.spilled_by not in {None, worker}
        return self._same(request, prefix, worker, known.mark, restored.mark)

    def _learn(self, request: TraceRequest, tokens: Tokens, end: int, worker: str, marks: Sequence[StateMark]) -> bool:
        """Remember the marks of a sound sequence; False if one contradicts what is known of its prefix."""
        sound = True
        for mark in marks:
            if mark.tokens <= end:
                prefix = tokens[: mark.tokens]
                known = self._truth.recall(prefix)
                if known.mark is None:
                    known.mark = mark
                sound &= self._same(request, prefix, worker, known.mark, mark)
        return sound

    def _same(
        self, request: TraceRequest, prefix: Tokens, worker: str, expected: StateMark, found: StateMark | None
    ) -> bool:
        if found == expected:
            return True
        self._sums["mismatches"] += 1
        frames = _frames_of(self._cluster.geometry, self._cluster.namespace, prefix)
        mismatch = Mismatch(request.index, len(prefix), worker, expected, found, frames)
        _log.error(
            "request %d: %s restored %d tokens to another state than the one that was spilled, from %d frames up to %s",
            *(request.index, worker, len(prefix), len(frames), frames[-1]),
        )
        if len(self._mismatched) < MISMATCHES_SHOWN_MAX:
            self._mismatched.append(mismatch)
        return False

    def _spill(self, request: TraceRequest, tokens: Tokens, end: int, placement: Placement, done: RunResult) -> None:
        offer = done.offer.up_to(end)
        if offer is None:
            return
        offer = placement.named(offer, len(tokens) - request.input_tokens)
        settings = self._settings
        try:
            with self._timed("spill"):
                result = self._cluster.tierings[placement.node].spill(
                    offer, settings.durability, Hints(), None, deadline_s=settings.deadline_s
                )
        except TieredCacheError as error:
            self._note_refusal(request, "not spilled", error)
            return
        self._note_spill(request, tokens, placement.owner, result)

    def _release(self, request: TraceRequest, worker: WorkerPort, source: SequenceRef) -> None:
        try:
            worker.release(source, deadline_s=self._settings.deadline_s)
        except TieredCacheError as error:
            self._note_refusal(request, "not released", error)

    def _note_refusal(self, request: TraceRequest, what: str, error: TieredCacheError) -> None:
        """Something went wrong with a request that was served all the same."""
        _log.warning("request %d: %s: %s: %s", request.index, what, type(error).__name__, error)
        self._refusals[type(error).__name__] += 1
        self._decide(request.index, what, type(error).__name__)

    def _note_spill(self, request: TraceRequest, tokens: Tokens, worker: str, result: SpillResult) -> None:
        kept = [(kept.tokens, kept.durability.name) for kept in result.kept]
        self._decide(request.index, kept, result.declined, result.bytes_moved, result.bytes_stored)
        self._declined.update(why for _, why in result.declined)
        self._sums["bytes_spilled"] += result.bytes_moved
        self._sums["bytes_stored"] += result.bytes_stored
        created = {receipt.key.tokens for receipt in result.receipts if receipt.created}
        for length, _ in kept:
            if length in created:
                self._truth.recall(tokens[:length]).spilled_by = worker

    # Sums

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Note how long the block took, if it raised nothing."""
        start_s = time.perf_counter()
        yield
        self._latencies[phase].add(time.perf_counter() - start_s)

    def _sample(self, elapsed_s: float, before: Mapping[str, int]) -> Sample:
        sums, counters = self._sums, self._cluster.counters()
        stored: Counter[str] = Counter()
        written: Counter[str] = Counter()
        for what, bytes_ in counters.items():
            if what.startswith("cache.bytes."):
                tier, how = what.removeprefix("cache.bytes.").rsplit(".", 1)
                stored[tier] += bytes_ if how in {"put", "found"} else -bytes_
                if how == "put":
                    written[tier] += bytes_ - before.get(what, 0)
        return Sample(
            requests=sums["requests"],
            elapsed_s=elapsed_s,
            input_tokens=sums["input_tokens"],
            hit_tokens=sums["hit_tokens"],
            read_bytes=sums["bytes_restored"],
            written_bytes=dict(written),
            stored_bytes=dict(stored),
        )

    def _decide(self, *what: object) -> None:
        self._decisions.update(repr(what).encode())

    def _progress(self, elapsed_s: float) -> Progress:
        sums, survey = self._sums, self._survey
        return Progress(
            requests=sums["requests"],
            requests_total=survey.requests,
            input_tokens=sums["input_tokens"],
            input_tokens_total=survey.input_tokens,
            hit_tokens=sums["hit_tokens"],
            restores=sums["restores"],
            mismatches=sums["mismatches"],
            elapsed_s=elapsed_s,
        )

    def _check_books(self, counters: Counter[str], *, complete: bool) -> None:
        """Every look-up is a restore or a miss with one reason, here and with those who did the work, if all lived."""
        sums, misses = self._sums, self._misses.total()
        assert sums["lookups"] == sums["restores"] + misses, (sums, self._misses)
        assert sums["restores"] == sums["verified_from_memory"] + sums["verified_by_recomputing"], sums
        if self._failures or self._retries or not complete:
            return
        assert sums["lookups"] == sums["requests"], sums
        assert counters["router.restores"] == sums["restores"], (counters, sums)
        told = {reason: counters[f"router.misses.{reason}"] for reason in self._misses}
        assert told == self._misses, (told, self._misses)
        assert counters["cache.lookups"] == counters["cache.hits"] + _total(counters, "cache.misses."), counters

    def _result(self, elapsed_s: float, counters: Counter[str], trace: Trace) -> ReplayResult:
        sums = self._sums
        return ReplayResult(
            requests=sums["requests"],
            input_tokens=sums["input_tokens"],
            output_tokens=sums["output_tokens"],
            hit_tokens=sums["hit_tokens"],
            hit_rate=sums["hit_tokens"] / sums["input_tokens"],
            lookups=sums["lookups"],
            restores=sums["restores"],
            restores_on_other_worker=sums["restores_on_other_worker"],
            misses=self._misses.total(),
            misses_by_reason=dict(self._misses.most_common()),
            refusals_by_reason=dict(self._refusals.most_common()),
            declined_by_reason=dict(self._declined.most_common()),
            retries_by_reason=dict(self._retries.most_common()),
            failures_by_reason=dict(self._failures.most_common()),
            checkpoints_skipped=sums["checkpoints_skipped"],
            verified_from_memory=sums["verified_from_memory"],
            verified_by_recomputing=sums["verified_by_recomputing"],
            mismatches=sums["mismatches"],
            mismatched=tuple(self._mismatched),
            bytes_restored=sums["bytes_restored"],
            bytes_spilled=sums["bytes_spilled"],
            bytes_stored=sums["bytes_stored"],
            elapsed_s=elapsed_s,
            requests_per_s=sums["requests"] / elapsed_s,
            input_tokens_per_s=sums["input_tokens"] / elapsed_s,
            latencies_s={phase: histogram.summary() for phase, histogram in self._latencies.items()},
            samples=tuple(self._samples),
            peak_rss_bytes=self._cluster.peak_rss_bytes(),
            decisions_digest=self._decisions.hexdigest(),
            counters={what: count for what, count in sorted(counters.items()) if count},
            settings={"trace": str(trace.path), "trace_block_tokens": trace.block_tokens, **_plain(self._settings)},
            versions=package_versions(),
        )


def _frames_of(geometry: Geometry, namespace: bytes, prefix: Tokens) -> tuple[str, ...]:
    """The names of the frames that a restore of this prefix needs, of all ranks."""
    tokens, size = len(prefix), geometry.block_tokens
    chain = PrefixChain(namespace, size, prefix)
    keys = [
        chain.key(group.name, (block + 1) * size, rank)
        for group in geometry.block_groups
        for block in group.blocks_needed(tokens, size)
        for rank in range(geometry.shards)
    ]
    if geometry.needs_checkpoint(tokens):
        keys += [chain.key(CHECKPOINT, tokens, rank) for rank in range(geometry.shards)]
    return tuple(key.path() for key in keys)


def _total(counters: Counter[str], prefix: str) -> int:
    return sum(count for what, count in counters.items() if what.startswith(prefix))


def _plain(settings: ReplaySettings) -> dict[str, object]:
    """Settings as JSON has them."""

    def plain(items: list[tuple[str, object]]) -> dict[str, object]:
        return {
            name: value.value
            if isinstance(value, SyncPolicy)
            else value.name
            if isinstance(value, Durability)
            else value
            for name, value in items
        }

    return asdict(settings, dict_factory=plain)


def package_versions() -> dict[str, str]:
    """Python's and those of the packages that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
