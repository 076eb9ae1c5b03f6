"""A soak: one node under spills, restores, suspensions, evictions, faults and restarts, watched for what only grows.

    python tests/soak/soak.py [--minutes 30] [--seed 0] [--json FILE]

Two workers of the reference engine over host memory, a disk directory and an object store in another directory, all
three far too small for what comes. Calls fail, stored bytes change and objects vanish now and then, and the node is
closed and opened again once a minute or more often. Every answer is compared with a sequence that never moved.
Resident memory, file descriptors and threads are sampled; the exit status is 1 if one of them grows, or an answer was
wrong. What grows is told from minutes, not from seconds: pools of threads fill up at first.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from places import make_faulty
from serving import MODELS, NO_HINTS, compute, never_moved, some_tokens

from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import TieredCacheError
from tiered_cache.identity import Tokens
from tiered_cache.service.local import LocalCluster
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import SyncPolicy

MODEL = MODELS[0]
DEADLINE_S = 30.0
SESSIONS = 24
TURNS_MAX = 8
"""A session then ends, and one with other tokens begins: there is always something new."""
RATES = {Fault.ERROR: 0.002, Fault.FULL: 0.002, Fault.FLIP: 0.001, Fault.SHORT: 0.001, Fault.LOST_ANSWER: 0.001}
CHANGED = 0.02
"""How often a step begins with a stored file that somebody has changed or removed."""
RESTARTS_MIN, RESTARTS_PER_MINUTE = 10, 1
"""How often the node is closed and opened again."""
SAMPLES, SAMPLE_S_MIN, SAMPLE_S_MAX = 200, 0.25, 5.0
WARM_UP = 0.25
"""Of a run: caches fill, and memory for the metadata of what came and went grows to its bounds."""
RSS_GROWTH_BYTES, RSS_GROWTH = 16 << 20, 0.05
COUNT_GROWTH = {"descriptors": 8, "threads": 8, "store_threads": 32}
"""The store client's own pool grows with how many requests once met, and shrinks again: it has a bound of its own."""
STORE_THREADS = "tokio-rt-worker"


_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc's


class Sample(NamedTuple):
    """What the process has now; of memory, without what its allocator has freed and keeps for later."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int
    store_threads: int
    """Those of the object store's client."""

    @staticmethod
    def now(started_s: float) -> Sample:
        gc.collect()
        _trim(0)
        names = _threads_by_name()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return Sample(
            time.monotonic() - started_s,
            int(status["VmRSS"].split()[0]) * 1024,
            len(list(Path("/proc/self/fd").iterdir())),
            names.total() - names[STORE_THREADS],
            names[STORE_THREADS],
        )


@dataclass
class Report:
    """What a run has done and seen."""

    minutes: float
    seed: int
    steps: int = 0
    wrong: int = 0
    events: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    threads: Counter[str] = field(default_factory=Counter)
    """By name, at the end of each node's life, the most there were."""

    def trends(self) -> dict[str, tuple[float, float, float]]:
        """As `trends` says, of this run's samples."""
        return trends(self.samples)

    def failures(self) -> list[str]:
        told = [f"{self.wrong} wrong answers"] if self.wrong else []
        for name, (early, late, most) in self.trends().items():
            if late > most:
                told.append(f"{name} grew from {early:,.0f} to {late:,.0f}, and {most:,.0f} is the bound")
        return told


def _threads_by_name() -> Counter[str]:
    names: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names[task.joinpath("comm").read_text().strip().rstrip("0123456789_")] += 1
    return names


def trends(samples: Sequence[Sample]) -> dict[str, tuple[float, float, float]]:
    """Name -> what it was in the third after the warm-up, what in the last third, and the bound for the latter.

    Of memory these are medians; of what is opened and closed again all the time, the most that there was.
    """
    warm = samples[int(len(samples) * WARM_UP) :]
    third = max(1, len(warm) // 3)

    def of(name: str, some: Sequence[Sample]) -> float:
        values = [float(getattr(sample, name)) for sample in some]
        return median(values) if name == "rss_bytes" else max(values)

    found = {}
    for name in ("rss_bytes", *COUNT_GROWTH):
        early, late = of(name, warm[:third]), of(name, warm[-third:])
        grown = max(RSS_GROWTH_BYTES, RSS_GROWTH * early) if name == "rss_bytes" else COUNT_GROWTH[name]
        found[name] = (early, late, early + grown)
    return found


class Soak:
    """Sessions that take turns on a node until the time is over."""

    def __init__(self, directory: Path, report: Report) -> None:
        self.directory, self.report = directory, report
        self.rng = random.Random(report.seed)
        self.fresh = report.seed * 1_000_000
        self.faulty: list[FaultyTier] = []
        self.sessions = [self.new_tokens(30) for _ in range(SESSIONS)]

    def new_tokens(self, most: int) -> Tokens:
        self.fresh += 1
        return some_tokens(self.rng.randrange(5, most), seed=self.fresh)

    def open(self) -> LocalCluster:
        tiers = TierSettings(
            host_bytes=256 << 10,
            disk_dir=self.directory / "tier",
            disk_bytes=1 << 20,
            disk_sync=SyncPolicy.NEVER,
            object_url=f"file://{self.directory / 'objects'}",
            object_bytes=4 << 20,
        )
        worker = WorkerSettings(engine=MODEL, capacity_bytes=16 << 20)
        cluster = LocalCluster(ClusterSettings(2, worker, tiers))
        self.faulty = [make_faulty(cluster, name, self.rng.randrange(1 << 30)) for name in ("host", "disk", "object")]
        for tier in self.faulty:
            tier.rates = dict(RATES)
        return cluster

    def run(self, cluster: LocalCluster, until_s: float, steps_min: float, every_s: float, started_s: float) -> None:
        """Serve until then, and until so much was done, and close the node."""
        report = self.report
        try:
            while time.monotonic() < until_s or report.steps < steps_min:
                self.step(cluster)
                report.steps += 1
                if not report.samples or time.monotonic() - started_s - report.samples[-1].at_s >= every_s:
                    report.samples.append(Sample.now(started_s))
            report.counters.update(cluster.counters())
            for tier in self.faulty:
                report.injected.update({fault.value: count for fault, count in tier.injected.items()})
            report.threads |= _threads_by_name()
        finally:
            cluster.close()

    def step(self, cluster: LocalCluster) -> None:
        if self.rng.random() < CHANGED:
            self.change_a_file()
        session = self.rng.randrange(SESSIONS)
        if self.rng.random() < 1 / TURNS_MAX:
            self.sessions[session] = self.new_tokens(30)
        tokens = self.sessions[session] = np.concatenate([self.sessions[session], self.new_tokens(24)])
        try:
            self.turn(cluster, tokens)
        except TieredCacheError as error:
            self.report.events[f"refused: {type(error).__name__}"] += 1

    def turn(self, cluster: LocalCluster, tokens: Tokens) -> None:
        """A request that is served, and whose state then is spilled, or suspended and resumed, or dropped."""
        report, node = self.report, LocalCluster.NODE
        served = compute(cluster, tokens, deadline_s=DEADLINE_S)
        report.events["restored" if served.placement.restored else f"missed: {served.placement.reason}"] += 1
        source, owner = served.run.source, served.placement.owner
        try:
            report.wrong += served.mark != never_moved(MODEL, tokens)
            durability = self.rng.choice([Durability.HOST, Durability.HOST, Durability.DISK])
            doing = self.rng.random()
            if doing < 0.75:
                cluster.tierings[node].spill(served.run.offer, durability, NO_HINTS, None, deadline_s=DEADLINE_S)
                report.events["spilled"] += 1
            elif doing < 0.9:
                ticket = cluster.router.suspend(source, node, durability, deadline_s=DEADLINE_S)
                report.events["suspended"] += 1
                resumed = cluster.router.resume(ticket, len(tokens) + 8, deadline_s=DEADLINE_S)
                report.events["resumed"] += 1
                source, owner = resumed.source, resumed.source.owner
                report.wrong += resumed.mark != served.mark
        finally:
            with suppress(TieredCacheError):
                cluster.workers[owner].release(source, deadline_s=DEADLINE_S)

    def change_a_file(self) -> None:
        """A stored frame loses a bit or its end, or goes; on disk or in the object store."""
        files = sorted(self.directory.glob(f"{self.rng.choice(['tier', 'objects'])}/entries/*/*/*.blob"))
        if not files:
            return
        file = self.rng.choice(files)
        how = self.rng.choice(["flipped", "cut", "removed"])
        with suppress(OSError):
            body = bytearray(file.read_bytes())
            if how == "removed":
                file.unlink()
            elif how == "cut":
                file.write_bytes(body[: len(body) // 2])
            else:
                body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
                file.write_bytes(body)
            self.report.events[f"a file was {how}"] += 1


def soak(minutes: float, seed: int, restarts: int | None = None, steps_min: int = 0) -> Report:
    """Run for so long, and for so many steps at least, and say what was seen."""
    if restarts is None:
        restarts = max(RESTARTS_MIN, round(minutes * RESTARTS_PER_MINUTE))
    report = Report(minutes, seed)
    started_s = time.monotonic()
    every_s = min(max(SAMPLE_S_MIN, 60 * minutes / SAMPLES), SAMPLE_S_MAX)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiered-cache-soak-")))
        run = Soak(directory, report)
        for part in range(restarts + 1):
            share = (part + 1) / (restarts + 1)
            run.run(run.open(), started_s + 60 * minutes * share, steps_min * share, every_s, started_s)
    return report


def tell(report: Report) -> None:
    print(f"{report.minutes:g} min, seed {report.seed}: {report.steps:,} steps, {report.wrong} wrong answers")
    for title, counts in (
        ("events", report.events),
        ("faults injected", report.injected),
        ("threads", report.threads),
    ):
        print(f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count))
    moved = {name: count for name, count in report.counters.items() if name.startswith("cache.frames.")}
    print("frames: " + ", ".join(f"{name[13:]} {count:,}" for name, count in sorted(moved.items())))
    for name, (early, late, most) in report.trends().items():
        peak = max(getattr(sample, name) for sample in report.samples)
        print(f"{name}: {early:,.0f} after the warm-up, {late:,.0f} at the end (bound {most:,.0f}), {peak:,} at most")
    print(f"most memory at any moment: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024:,} bytes")
    print("; ".join(report.failures()) or "nothing grew")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything there, samples included")
    arguments = parser.parse_args()
    report = soak(arguments.minutes, arguments.seed)
    tell(report)
    if arguments.json is not None:
        document = {**vars(report), "samples": [sample._asdict() for sample in report.samples]}
        arguments.json.write_text(json.dumps({**document, "trends": report.trends(), "failures": report.failures()}))
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
