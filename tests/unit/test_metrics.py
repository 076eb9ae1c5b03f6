"""What monitoring sees: every counter has a name and labels; dashboards and alerts speak of names that there are."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from serving import MODELS, serve, some_tokens

from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings
from tiered_cache.errors import TierError
from tiered_cache.metrics import FAMILIES, Kind, Sample, counter_samples, health_samples, usage_samples
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.shared import SharedStore
from tiered_cache.testing.faults import Fault, FaultyTier
from tiered_cache.tiers.base import Durability, TierUsage
from tiered_cache.tiers.wrappers import BreakerTier

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "tiered-cache.json"


def test_a_counter_becomes_a_labelled_sample() -> None:
    counters = {"hits": 3, "hits.host": 2, "hits.disk": 1, "lookups": 4, "misses.not_stored": 1, "bytes.disk.put": 77}
    assert list(counter_samples("cache", counters)) == [
        Sample("tiered_cache_frame_bytes", ("disk", "put"), 77),
        Sample("tiered_cache_hits", ("disk",), 1),
        Sample("tiered_cache_hits", ("host",), 2),
        Sample("tiered_cache_lookups", (), 4),
        Sample("tiered_cache_misses", ("not_stored",), 1),
    ]


def test_a_counter_that_no_row_knows_is_not_lost() -> None:
    assert list(counter_samples("cache", {"frames.put": 1, "new": 2})) == [
        Sample("tiered_cache_events", ("cache", "frames.put"), 1),
        Sample("tiered_cache_events", ("cache", "new"), 2),
    ]


def test_a_budget_adds_up() -> None:
    samples = list(usage_samples({"disk": TierUsage(10, 20, 5, 3, 100)}))
    assert samples[-1] == Sample("tiered_cache_tier_entries", ("disk",), 3)
    found = {sample.labels[1]: sample.value for sample in samples[:-1]}
    assert found == {"used": 10, "reserved": 20, "quarantined": 5, "free": 65, "limit": 100}


def test_what_a_cluster_counts_has_rows_of_its_own(tmp_path: Path) -> None:
    settings = ClusterSettings(
        worker=WorkerSettings(engine=MODELS[0]),
        tiers=TierSettings(host_bytes=1 << 20, disk_dir=tmp_path / "frames", disk_bytes=4 << 20),
    )
    with LocalCluster(settings) as cluster:
        for seed in range(20):
            serve(cluster, some_tokens(150, seed))
        serve(cluster, np.concatenate([some_tokens(150, 19), some_tokens(20, 99)]))
        counters = cluster.counters()
    by_who = {who: {} for who in ("cache", "router")}  # type: dict[str, dict[str, int]]
    for counter, value in counters.items():
        who, _, what = counter.partition(".")
        by_who[who][what] = value
    samples = [sample for who, found in by_who.items() for sample in counter_samples(who, found)]
    assert {"tiered_cache_hits", "tiered_cache_frames", "tiered_cache_router_restores"} <= {s.name for s in samples}
    for sample in samples:
        assert len(sample.labels) == len(FAMILIES[sample.name].labels)
    assert not [sample for sample in samples if sample.name == "tiered_cache_events"]


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL)."""
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_alerts_and_panels_ask_for_samples_that_there_are(where: str, expression: str) -> None:
    exported = {}  # type: dict[str, tuple[str, ...]]
    for name, family in FAMILIES.items():
        suffix = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}[family.kind]
        exported[f"ray_{name}{suffix}"] = (*family.labels, "cluster", "NodeAddress", "le")
    asked = re.findall(r"\bray_\w+", expression)
    assert asked, where
    assert set(asked) <= exported.keys(), where
    grouped = {word for words in re.findall(r"by \(([^)]*)\)", expression) for word in words.split(", ")}
    for name in asked:
        (matcher,) = re.findall(re.escape(name) + r"\b(?:\{([^}]*)\})?", expression)[:1]
        assert grouped | set(re.findall(r"(\w+)=~?\"", matcher)) <= set(exported[name]), where


def test_dashboard_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_a_tiers_calls_and_its_breaker_are_told(tmp_path: Path) -> None:
    tiers = TierSettings(
        host_bytes=0, disk_dir=tmp_path / "frames", disk_bytes=4 << 20, object_url="memory:///", object_bytes=4 << 20
    )
    with LocalCluster(ClusterSettings(worker=WorkerSettings(engine=MODELS[0]), tiers=tiers)) as cluster:
        serve(cluster, some_tokens(40), Durability.DISK)
        found = {(sample.name, sample.labels): sample.value for sample in health_samples(cluster.cache.health())}
        assert found["tiered_cache_tier_calls", ("disk", "put")] >= 1
        assert found["tiered_cache_tier_busy_seconds", ("disk", "put")] > 0
        assert found["tiered_cache_tier_call_failures", ("disk", "put", "error")] == 0
        assert found["tiered_cache_tier_left_alone", ("object",)] == 0
        assert isinstance(cluster.cache._shared, SharedStore)
        breaker = cluster.cache._shared.store.inner
        assert isinstance(breaker, BreakerTier)
        breaker.inner = FaultyTier(breaker.inner, rates={Fault.ERROR: 1.0})
        for _ in range(10):
            with contextlib.suppress(TierError):
                breaker.stat(["a/b"])
        found = {(sample.name, sample.labels): sample.value for sample in health_samples(cluster.cache.health())}
        assert found["tiered_cache_tier_left_alone", ("object",)] == 1
        assert found["tiered_cache_tier_breaker_opened", ("object",)] == 1
    assert {name for name, _ in found} <= FAMILIES.keys()
