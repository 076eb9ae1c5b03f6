"""`ActorMetrics`: an actor's samples as Ray metrics, which every node's Ray exports for Prometheus.

What each sample means is the subject of `tiered_cache.metrics`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from actors.inline import in_local_mode
from tiered_cache.metrics import CALL_SECONDS_BOUNDS, FAMILIES, Kind, Sample

EXPORT_EVERY_S = 5.0
"""Ray itself exports no more often."""

_log = logging.getLogger(__name__)


class ActorMetrics:
    """Exports what `read` gives, every few seconds until the process ends, and how long calls take.

    `cluster` is a label of every sample. Nothing is exported in local mode, where there is no node that would.
    """

    def __init__(self, cluster: str, read: Callable[[], Iterable[Sample]], *, every_s: float = EXPORT_EVERY_S) -> None:
        self._labels = {"cluster": cluster}
        self._read = read
        self._every_s = every_s
        self._metrics: dict[str, Any] = {}
        self._exported: dict[tuple[str, tuple[str, ...]], float] = {}
        self._calls = None if in_local_mode() else self._metric("tiered_cache_call_seconds")
        if self._calls is not None:
            threading.Thread(target=self._run, name="metrics", daemon=True).start()

    @contextlib.contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """How long the block takes, and whether it returned or which error it raised."""
        started_s, outcome = time.perf_counter(), "ok"
        try:
            yield
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            if self._calls is not None:
                labels = self._labels | {"call": call, "outcome": outcome}
                self._calls.observe(time.perf_counter() - started_s, labels)

    def export(self) -> None:
        """Hand the samples to Ray as they are now."""
        for sample in self._read():
            family, metric = FAMILIES[sample.name], self._metric(sample.name)
            labels = self._labels | dict(zip(family.labels, sample.labels, strict=True))
            if family.kind is Kind.GAUGE:
                metric.set(sample.value, labels)
                continue
            place = sample.name, sample.labels
            grown = sample.value - self._exported.get(place, 0)
            if grown > 0:
                metric.inc(grown, labels)
                self._exported[place] = sample.value

    def _metric(self, name: str) -> Any:
        if name not in self._metrics:
            family = FAMILIES[name]
            labels = ("cluster", *family.labels)
            if family.kind is Kind.HISTOGRAM:
                self._metrics[name] = Histogram(name, family.help, list(CALL_SECONDS_BOUNDS), labels)
            else:
                self._metrics[name] = (Gauge if family.kind is Kind.GAUGE else Counter)(name, family.help, labels)
        return self._metrics[name]

    def _run(self) -> None:
        while True:
            try:
                self.export()
            except Exception:  # noqa: BLE001  figures must never be what ends an actor
                _log.exception("metrics were not exported")
            time.sleep(self._every_s)
