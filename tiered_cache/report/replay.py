"""What a report on a replay shows: that every restore was right, what was hit, what the tiers did, how long it took."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tiered_cache.replay.driver import ReplayResult, Sample
from tiered_cache.report import words
from tiered_cache.report.document import (
    Axis,
    Bar,
    Bars,
    Colour,
    Curves,
    Distribution,
    Distributions,
    Figure,
    Panel,
    Report,
    Segment,
    Series,
    Table,
    Tile,
    Unit,
    View,
    key_of,
)

WINDOWS: Final = 40
"""How many points a noisy curve has."""
_TIME: Final = Axis("time since the start", Unit.SECONDS)
_PHASES: Final = {
    "place": ("place: find and restore", Colour.FIRST),
    "run": ("run: compute the rest", Colour.THIRD),
    "spill": ("spill: hand over", Colour.SECOND),
}
_TIER_COLOURS: Final = {"host": Colour.FIRST, "disk": Colour.FIRST_SOFT}
_LEFT_COLOURS: Final = {"moved": Colour.FIRST_SOFT, "evicted": Colour.SECOND}
_NOTES: Final = (
    ("Hit rate", "Prompt tokens that were restored from a tier, over all prompt tokens."),
    (
        "Right",
        (
            "The digest of every restored state, and its next output, were compared with those of a sequence that was "
            "never spilled."
        ),
    ),
    ("Order", "One request after the other, in the trace's order, as fast as it goes: load is not what this measures."),
    (
        "Times",
        "Wall clock of the caller, as a histogram in buckets of equal ratio: quantiles are off by at most 1.1 %.",
    ),
)


def of_replay(result: ReplayResult) -> Report:
    """A report on a replay."""
    return _Replay(result).report()


class _Replay:
    def __init__(self, result: ReplayResult) -> None:
        self._result = result
        self._tiers = sorted(
            {tier for sample in result.samples for tier in sample.stored_bytes}, key=lambda tier: (tier != "host", tier)
        )
        self._budgets = _budgets(result.settings)
        self._bytes = words.byte_unit(self._budgets.values())

    def report(self) -> Report:
        result = self._result
        figures = [self._outcome(), self._tokens(), self._occupancy(), self._latencies()]
        if any(what.startswith("cache.bytes.") for what in result.counters):
            figures.insert(3, self._removals())
        if result.mismatched:
            figures.insert(0, self._mismatches())
        return Report(
            kind="Replay",
            subject=Path(str(result.settings["trace"])).name,
            headline=Tile(words.percent(result.hit_rate), "of all prompt tokens were restored from the cache"),
            tiles=self._tiles(),
            figures=tuple(figures),
            notes=_NOTES,
            settings=Table(("Setting", "Value"), tuple(_flat({**result.settings, **result.versions})), 2),
        )

    def _tiles(self) -> tuple[Tile, ...]:
        result = self._result
        failures = sum(result.failures_by_reason.values())
        tiles = [
            Tile(
                f"{result.mismatches} of {words.count(result.restores)}",
                "restores were wrong",
                alarming=result.mismatches > 0,
            ),
            Tile(words.count(result.restores_on_other_worker), "restores on another worker than spilled them"),
            Tile(words.text(Unit.SECONDS, result.elapsed_s), f"for {words.count(result.requests)} requests"),
            Tile(words.text(self._bytes, result.bytes_spilled), "spilled by workers"),
            Tile(words.text(self._bytes, result.peak_rss_bytes), "memory at the most"),
        ]
        if failures:
            tiles.insert(1, Tile(words.count(failures), "requests failed", alarming=True))
        return tuple(tiles)

    # Figures

    def _mismatches(self) -> Figure:
        rows = tuple(
            (
                str(wrong.request),
                words.count(wrong.tokens),
                words.shown(wrong.worker),
                wrong.frames[-1] if wrong.frames else "",
            )
            for wrong in self._result.mismatched
        )
        bars = Bars(
            (
                Bar(
                    "restores",
                    (
                        Segment("wrong", Colour.SECOND, self._result.mismatches, words.count(self._result.mismatches)),
                        Segment("right", Colour.PALE, self._result.restores - self._result.mismatches, ""),
                    ),
                ),
            ),
            Axis("restores", Unit.COUNT),
        )
        table = Table(("Request", "Tokens", "Worker", "Last frame"), rows)
        return Figure("Restores that were wrong", "The first of them are in the table.", (View("", bars, table),))

    def _outcome(self) -> Figure:
        """Hits and misses by request."""
        result = self._result
        parts = [
            (f"restored from {tier}", _tier_colour(tier), result.counters.get(f"cache.hits.{tier}", 0))
            for tier in self._tiers
        ]
        parts += [(f"miss: {words.reason(why)}", _miss_colour(why), n) for why, n in result.misses_by_reason.items()]
        parts += [(f"failed: {why}", Colour.SECOND, n) for why, n in result.failures_by_reason.items()]
        bars = tuple(
            Bar(name, (Segment(name, colour, number, words.count(number)),), words.count(number))
            for name, colour, number in parts
            if number
        )
        rows = tuple((name, words.count(number), words.percent(number / result.requests)) for name, _, number in parts)
        more = [
            *((f"begun again: {why}", n) for why, n in result.retries_by_reason.items()),
            *((f"refused: {why}", n) for why, n in result.refusals_by_reason.items()),
            *((f"not kept: {words.reason(why)}", n) for why, n in result.declined_by_reason.items()),
        ]
        rows += tuple((name, words.count(number), "") for name, number in more)
        return Figure(
            "How the requests began",
            "Look-ups by the slowest tier that they were answered from, or by why there was nothing to restore.",
            (View("", Bars(bars, Axis("requests", Unit.COUNT)), Table(("What", "Number", "Of all requests"), rows)),),
        )

    def _tokens(self) -> Figure:
        points, rows = [], []
        for before, after in itertools.pairwise((_NOTHING, *_some(self._result.samples))):
            rate = (after.hit_tokens - before.hit_tokens) / max(after.input_tokens - before.input_tokens, 1)
            points.append((float(after.requests), rate))
            so_far = after.hit_tokens / max(after.input_tokens, 1)
            rows.append((words.count(after.requests), words.percent(rate), words.percent(so_far)))
        total = tuple(
            (float(sample.requests), sample.hit_tokens / max(sample.input_tokens, 1)) for sample in self._result.samples
        )
        panel = Panel(
            "",
            Axis("requests", Unit.COUNT),
            Axis("prompt tokens hit", Unit.PERCENT),
            (Series("lately", Colour.MUTED, tuple(points)), Series("so far", Colour.FIRST, total)),
            height=1.2,
        )
        return Figure(
            "Hit rate as it went",
            f"Of the requests between two of up to {WINDOWS} points, and of all up to there.",
            (View("", Curves((panel,)), Table(("Request", "Lately", "So far"), tuple(rows))),),
        )

    def _occupancy(self) -> Figure:
        samples = self._result.samples
        panels = []
        for tier in self._tiers:
            budget = self._budgets.get(tier)
            panels.append(
                Panel(
                    f"{tier}: held",
                    _TIME,
                    Axis("", self._bytes, float(budget) if budget else None),
                    (
                        Series(
                            "",
                            _tier_colour(tier),
                            tuple((s.elapsed_s, float(max(0, s.stored_bytes.get(tier, 0)))) for s in samples),
                            filled=True,
                        ),
                    ),
                    limit=(f"{words.text(self._bytes, budget)} a node", budget) if budget else None,
                )
            )
        moved = [
            *(
                Series(
                    f"to {tier}",
                    colour,
                    tuple((s.elapsed_s, float(s.written_bytes.get(tier, 0))) for s in samples),
                )
                for tier, colour in zip(self._tiers, (Colour.SECOND, Colour.FIFTH, Colour.FOURTH), strict=False)
            ),
            Series("restored", Colour.THIRD, tuple((s.elapsed_s, float(s.read_bytes)) for s in samples)),
        ]
        panels.append(Panel("moved so far", _TIME, Axis("", self._bytes), tuple(moved), height=1.2))
        columns = ("Time", *(f"{t} holds" for t in self._tiers), *(f"written to {t}" for t in self._tiers), "restored")
        rows = tuple(
            (
                words.text(Unit.SECONDS, sample.elapsed_s),
                *(words.text(self._bytes, sample.stored_bytes.get(tier, 0)) for tier in self._tiers),
                *(words.text(self._bytes, sample.written_bytes.get(tier, 0)) for tier in self._tiers),
                words.text(self._bytes, sample.read_bytes),
            )
            for sample in samples
        )
        return Figure(
            "What the tiers hold, and what moved",
            "Stored bytes, as they lie in the tier. A tier is full when the next frame does not fit.",
            (View("", Curves(tuple(panels)), Table(columns, rows)),),
        )

    def _removals(self) -> Figure:
        left: dict[str, Counter[str]] = {tier: Counter() for tier in self._tiers}
        for what, bytes_ in self._result.counters.items():
            if what.startswith("cache.bytes."):
                tier, why = what.removeprefix("cache.bytes.").rsplit(".", 1)
                if why not in {"put", "found"}:
                    left[tier][why] += bytes_
        bars = tuple(
            Bar(
                tier,
                tuple(
                    Segment(words.reason(why), _LEFT_COLOURS.get(why, Colour.FIFTH), n, words.text(self._bytes, n))
                    for why, n in sorted(reasons.items())
                ),
                words.text(self._bytes, reasons.total()),
            )
            for tier, reasons in left.items()
        )
        rows = tuple(
            (
                tier,
                words.reason(why),
                words.text(self._bytes, bytes_),
                words.count(self._result.counters.get(f"cache.frames.{tier}.{why}", 0)),
            )
            for tier, reasons in left.items()
            for why, bytes_ in sorted(reasons.items())
        )
        table = Table(("Tier", "Why", "Bytes", "Frames"), rows, 2)
        views = (View("", Bars(bars, Axis("stored bytes", self._bytes)), table),)
        return Figure(
            "What left a tier, and why",
            "Stored bytes of frames that a tier does not have any more.",
            views,
            key=key_of(views),
        )

    def _latencies(self) -> Figure:
        found = [(phase, latencies) for phase, latencies in self._result.latencies_s.items() if latencies.count]
        chart = Distributions(
            tuple(
                Distribution(
                    *_PHASES.get(phase, (phase, Colour.FOURTH)),
                    tuple((end * 2**-0.25, end, number) for end, number in latencies.histogram),
                    (("p50", latencies.p50), ("p99", latencies.p99)),
                )
                for phase, latencies in found
            )
        )
        rows = tuple(
            (
                phase,
                words.count(latencies.count),
                *(
                    words.text(Unit.SECONDS, seconds)
                    for seconds in (latencies.mean, latencies.p50, latencies.p90, latencies.p99, latencies.max)
                ),
            )
            for phase, latencies in found
        )
        table = Table(("Phase", "Requests", "Mean", "p50", "p90", "p99", "Longest"), rows)
        return Figure(
            "How long a request's steps took",
            "Times on a logarithmic axis; each row counts requests from zero, on its own scale.",
            (View("", chart, table),),
        )


_NOTHING: Final = Sample(0, 0.0, 0, 0, 0, {}, {})


def _some(samples: Sequence[Sample]) -> list[Sample]:
    """At most `WINDOWS` of them, evenly, the last among them."""
    count = min(WINDOWS, len(samples))
    return [samples[len(samples) * number // count - 1] for number in range(1, count + 1)]


def _tier_colour(tier: str) -> Colour:
    return _TIER_COLOURS.get(tier, Colour.THIRD)


def _miss_colour(why: str) -> Colour:
    return {"not_stored": Colour.MUTED, "evicted": Colour.SECOND}.get(why, Colour.FIFTH)


def _budgets(settings: Mapping[str, object]) -> dict[str, int]:
    """Each tier's budget, of a node."""
    cluster = settings.get("cluster")
    tiers = cluster.get("tiers") if isinstance(cluster, dict) else None
    assert isinstance(tiers, dict), settings
    return {tier: tiers[f"{tier}_bytes"] for tier in ("host", "disk", "object") if tiers[f"{tier}_bytes"]}


def _flat(values: Mapping[str, object], before: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        if name == "object_options":  # may hold credentials
            continue
        if isinstance(value, Mapping):
            rows += _flat(value, f"{before}{name}.")
        elif value is not None:
            rows.append((f"{before}{name}", str(value)))
    return rows
