"""What an operator's monitoring sees: counters and budgets as named, labelled samples.

A dotted counter such as `frames.disk.put` becomes the sample `tiered_cache_frames{tier="disk", event="put"}`. Names and
labels are closed lists, so that dashboards and alerts can be held against them; a counter that no row knows is not
lost, but a sample of `tiered_cache_events`. `actors.metrics` hands the samples to Ray, which exports a name as
`ray_NAME`, and a counter as `ray_NAME_total`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tiered_cache.tiers.base import TierUsage
from tiered_cache.tiers.wrappers import BreakerState, TierHealth

CALL_SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Kind(enum.StrEnum):
    """How a sample is to be read."""

    COUNTER = "counter"  # only grows, from 0 when its process began
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Family(NamedTuple):
    """All samples of one name."""

    kind: Kind
    labels: tuple[str, ...]
    help: str


class Sample(NamedTuple):
    """One number: `labels` in the order of the family's."""

    name: str
    labels: tuple[str, ...]
    value: float


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "tiered_cache_lookups": Family(Kind.COUNTER, (), "Look-ups in a node's tiers."),
        "tiered_cache_hits": Family(Kind.COUNTER, ("tier",), "Look-ups that found a prefix; its slowest tier."),
        "tiered_cache_misses": Family(Kind.COUNTER, ("reason",), "Look-ups that found none."),
        "tiered_cache_unserved": Family(Kind.COUNTER, ("reason",), "Frames that were asked for and did not come."),
        "tiered_cache_declined": Family(Kind.COUNTER, ("reason",), "Offered checkpoints that were not kept."),
        "tiered_cache_frames": Family(Kind.COUNTER, ("tier", "event"), "Frames that came into a tier or left it."),
        "tiered_cache_frame_bytes": Family(Kind.COUNTER, ("tier", "event"), "The same in bytes."),
        "tiered_cache_ahead": Family(Kind.COUNTER, ("tier", "event"), "Frames copied to a tier before they had to be."),
        "tiered_cache_checkpoints_dropped": Family(Kind.COUNTER, ("tier", "reason"), "Checkpoints that left a tier."),
        "tiered_cache_quarantined": Family(Kind.COUNTER, ("tier",), "Frames that failed their checks."),
        "tiered_cache_tier_errors": Family(Kind.COUNTER, ("tier", "call"), "Calls that a tier failed."),
        "tiered_cache_recovered": Family(Kind.COUNTER, ("tier", "kind"), "What a start found and could not use."),
        "tiered_cache_router_restores": Family(Kind.COUNTER, (), "Requests that began with a restored prefix."),
        "tiered_cache_router_misses": Family(Kind.COUNTER, ("reason",), "Requests that began empty."),
        "tiered_cache_router_refusals": Family(Kind.COUNTER, ("error",), "Errors that nodes and workers answered."),
        "tiered_cache_events": Family(Kind.COUNTER, ("who", "what"), "All other counters."),
        "tiered_cache_tier_bytes": Family(
            Kind.GAUGE, ("tier", "kind"), "Of a tier's budget: used, reserved, quarantined, free, limit."
        ),
        "tiered_cache_tier_calls": Family(Kind.COUNTER, ("tier", "call"), "Calls of a tier below host memory."),
        "tiered_cache_tier_call_failures": Family(
            Kind.COUNTER, ("tier", "call", "kind"), "Of these, answers that were an error, or a refusal for room."
        ),
        "tiered_cache_tier_busy_seconds": Family(Kind.COUNTER, ("tier", "call"), "How long its calls took together."),
        "tiered_cache_tier_left_alone": Family(Kind.GAUGE, ("tier",), "1 while a tier's breaker is not closed."),
        "tiered_cache_tier_breaker_opened": Family(Kind.COUNTER, ("tier",), "How often a tier's breaker has opened."),
        "tiered_cache_tier_entries": Family(Kind.GAUGE, ("tier",), "Frames and descriptors in a tier."),
        "tiered_cache_call_seconds": Family(Kind.HISTOGRAM, ("call", "outcome"), "How long a call took, and its end."),
    }
)
"""Every name that is ever exported."""

_ROWS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("cache", "lookups"): "tiered_cache_lookups",
        ("cache", "hits"): "tiered_cache_hits",
        ("cache", "misses"): "tiered_cache_misses",
        ("cache", "unserved"): "tiered_cache_unserved",
        ("cache", "declined"): "tiered_cache_declined",
        ("cache", "frames"): "tiered_cache_frames",
        ("cache", "bytes"): "tiered_cache_frame_bytes",
        ("cache", "ahead"): "tiered_cache_ahead",
        ("cache", "dropped"): "tiered_cache_checkpoints_dropped",
        ("cache", "quarantined"): "tiered_cache_quarantined",
        ("cache", "errors"): "tiered_cache_tier_errors",
        ("cache", "recovered"): "tiered_cache_recovered",
        ("router", "restores"): "tiered_cache_router_restores",
        ("router", "misses"): "tiered_cache_router_misses",
        ("router", "refusals"): "tiered_cache_router_refusals",
    }
)
"""(who counts, a counter's first word) -> the name; its other words are the labels."""
_SUMS = frozenset({"hits"})
"""Counters that are the sum of others."""


def counter_samples(who: str, counters: Mapping[str, int]) -> Iterator[Sample]:
    """The counters of a `cache` or a `router`."""
    for counter, value in sorted(counters.items()):
        first, *words = counter.split(".")
        name = _ROWS.get((who, first))
        if name is not None and len(words) == len(FAMILIES[name].labels):
            yield Sample(name, tuple(words), value)
        elif counter not in _SUMS:
            yield Sample("tiered_cache_events", (who, counter), value)


def usage_samples(usage: Mapping[str, TierUsage]) -> Iterator[Sample]:
    """The budgets of a node's tiers."""
    for tier, used in sorted(usage.items()):
        for kind, bytes_ in (
            ("used", used.bytes_used),
            ("reserved", used.bytes_reserved),
            ("quarantined", used.bytes_quarantined),
            ("free", used.bytes_free),
            ("limit", used.bytes_max),
        ):
            yield Sample("tiered_cache_tier_bytes", (tier, kind), bytes_)
        yield Sample("tiered_cache_tier_entries", (tier,), used.entries)


def health_samples(health: Mapping[str, TierHealth]) -> Iterator[Sample]:
    """How the calls of a node's tiers went, and which tiers are left alone."""
    for tier, known in sorted(health.items()):
        for call, figures in sorted(known.calls.items()):
            yield Sample("tiered_cache_tier_calls", (tier, call), figures.calls)
            yield Sample("tiered_cache_tier_call_failures", (tier, call, "error"), figures.errors)
            yield Sample("tiered_cache_tier_call_failures", (tier, call, "refusal"), figures.refusals)
            yield Sample("tiered_cache_tier_busy_seconds", (tier, call), figures.seconds)
        if known.breaker is not None:
            yield Sample("tiered_cache_tier_left_alone", (tier,), float(known.breaker is not BreakerState.CLOSED))
            yield Sample("tiered_cache_tier_breaker_opened", (tier,), known.times_opened)
