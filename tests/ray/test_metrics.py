"""The figures of actors, as Prometheus reads them from a node of Ray."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

import numpy as np
import ray
from serving import serve, some_tokens

from actors.cluster import RayCluster

PATIENCE_S = 120.0
OURS = ("call", "event", "kind", "outcome", "reason", "tier")


def exported(cluster: RayCluster) -> dict[str, float]:
    """`NAME{our labels}` -> value, of this cluster's samples on the one node."""
    (node,) = ray.nodes()  # type: ignore[no-untyped-call]
    page = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(page, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    samples = {}
    for line in lines:
        found = re.fullmatch(r"(ray_tiered_cache_\w+)\{(.*)\} (\S+)", line)
        if found and f'cluster="{cluster.cluster.name}"' in found[2]:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2]))
            kept = [
                f"{n}={v}" for n, v in labels.items() if n in {"tier", "event", "kind", "reason", "call", "outcome"}
            ]
            if "le" not in labels:
                samples[f"{found[1]}{{{','.join(sorted(kept))}}}"] = float(found[3])
    return samples


def test_a_node_exports_what_its_actors_count(start: Callable[..., RayCluster]) -> None:
    cluster = start()
    serve(cluster, some_tokens(100))
    serve(cluster, np.concatenate([some_tokens(100), some_tokens(20, seed=1)]))
    wanted = {
        "ray_tiered_cache_router_restores_total{}": 1.0,
        "ray_tiered_cache_router_misses_total{reason=not_stored}": 1.0,
        "ray_tiered_cache_hits_total{tier=host}": 1.0,
        "ray_tiered_cache_lookups_total{}": 2.0,
        "ray_tiered_cache_call_seconds_count{call=place,outcome=ok}": 2.0,
        "ray_tiered_cache_call_seconds_count{call=spill,outcome=ok}": 2.0,
    }
    until_s = time.monotonic() + PATIENCE_S
    while True:
        found = exported(cluster)
        if wanted.items() <= found.items() or time.monotonic() > until_s:
            break
        time.sleep(0.5)
    assert {name: found.get(name) for name in wanted} == wanted
    assert found["ray_tiered_cache_tier_bytes{kind=limit,tier=host}"] == 32 << 20
    used = next(iter(cluster.tierings.values())).call(dict, "usage", deadline_s=10)["host"]
    assert found["ray_tiered_cache_tier_entries{tier=host}"] == used.entries
