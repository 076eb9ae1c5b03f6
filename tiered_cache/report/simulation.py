"""What a report on simulations shows: policies against each other and against what the future would have allowed.

All charts but the first are of one capacity. The one to see first is that at which the policy in question, the
default one or else the best, is furthest above the baseline.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from tiered_cache.replay.simulate import Bounds, Sample, SimulationResult
from tiered_cache.report import words
from tiered_cache.report.document import (
    SERIES,
    Axis,
    Band,
    Bar,
    Bars,
    Chart,
    Colour,
    Curves,
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

BASELINE: Final = "lru"
OURS: Final = "default"
WINDOWS: Final = 40
"""How many points a curve over time has."""

_LOST: Final = {
    "evicted": Colour.SECOND,
    "no_checkpoint": Colour.FIFTH,
    "not_stored": Colour.PALE,
}
_NOTES: Final = (
    (
        "Hit rate",
        (
            "Prompt tokens that were restored, over all prompt tokens. The last token of a prompt and a last, partial "
            "block are never restored, and count as missed."
        ),
    ),
    ("Dead weight", "Rows without a checkpoint that needs them, and checkpoints without their rows, in the same tier."),
    (
        "Room and refusal",
        (
            "The state of running requests takes no room in the tiers, and whoever decides may refuse what is new: the "
            "same for every policy and for what is compared with them."
        ),
    ),
    ("Several tiers", "What is new goes to the first one, and what a tier drops is offered to the next."),
    ("Time", "The trace's own: a request is looked up, computed and spilled when it arrives. Nothing was moved."),
)
_BOUND_NOTES: Final = (
    (
        "Offline, upper",
        (
            "Belady's rule on rows alone, with the deepest first among equals, and checkpoints that cost nothing. No "
            "cache of this size hits more. Several tiers count as one as large as all of them."
        ),
    ),
    (
        "Offline, feasible",
        (
            "A schedule made with the whole trace in sight, rows and checkpoints at their true sizes. It fits, so that "
            "this much can be hit; more might be."
        ),
    ),
)


def of_simulation(
    subject: str, results: Sequence[SimulationResult], bounds: Sequence[Bounds], settings: Mapping[str, object]
) -> Report:
    """A report on at least one result; `bounds`: of each capacity, or none."""
    assert results
    return _Simulation(results, bounds).report(subject, settings)


class _Simulation:
    def __init__(self, results: Sequence[SimulationResult], bounds: Sequence[Bounds]) -> None:
        self._policies = list(dict.fromkeys(result.policy for result in results))
        self._capacities = sorted({result.capacity_bytes for result in results})
        self._results = {(result.policy, result.capacity_bytes): result for result in results}
        self._bounds = {bound.capacity_bytes: bound for bound in bounds}
        self._tiers = [tier.name for tier in results[0].tiers]
        self._input_tokens = results[0].input_tokens
        self._bytes = words.byte_unit(self._capacities)
        mean = {policy: self._mean_rate(policy) for policy in self._policies}
        best = OURS if OURS in mean else max(mean, key=mean.__getitem__)
        self._best = best
        self._colours = dict(
            zip(sorted(mean, key=lambda policy: policy != best), itertools.cycle(SERIES), strict=False)
        )
        self._other = BASELINE if BASELINE in mean and best != BASELINE else min(mean, key=mean.__getitem__)
        self._focus = max(
            self._capacities, key=lambda capacity: self._rate(best, capacity) - self._rate(self._other, capacity)
        )

    def report(self, subject: str, settings: Mapping[str, object]) -> Report:
        figures = [
            self._hit_rates(),
            self._tokens(),
            self._over_time(),
            self._occupancy(),
            self._removals(),
        ]
        if any(result.saved_s for result in self._results.values()):
            figures.append(self._time_saved())
        return Report(
            kind="Simulation",
            subject=subject,
            headline=self._headline(),
            tiles=self._tiles(),
            figures=tuple(figures),
            notes=_NOTES + _BOUND_NOTES if self._bounds else _NOTES,
            settings=Table(("Setting", "Value"), tuple((name, str(value)) for name, value in settings.items()), 2),
        )

    # Figures of speech

    def _at(self, policy: str, capacity: int) -> SimulationResult | None:
        return self._results.get((policy, capacity))

    def _rate(self, policy: str, capacity: int) -> float:
        result = self._at(policy, capacity)
        return result.hit_rate if result else 0.0

    def _mean_rate(self, policy: str) -> float:
        return sum(self._rate(policy, capacity) for capacity in self._capacities) / len(self._capacities)

    def _size(self, capacity: int) -> str:
        return words.text(self._bytes, capacity)

    def _fraction(self, tokens: int) -> float:
        return tokens / self._input_tokens if self._input_tokens else 0.0

    def _headline(self) -> Tile:
        rate = self._rate(self._best, self._focus)
        where = f" in {' and '.join(self._tiers)}" if len(self._tiers) > 1 else ""
        what = f"of all prompt tokens come from the cache: {self._best}, {self._size(self._focus)}{where}"
        return Tile(words.percent(rate), what)

    def _tiles(self) -> tuple[Tile, ...]:
        best = self._results[self._best, self._focus]
        tiles = []
        baseline = self._at(BASELINE, self._focus)
        bound = self._bounds.get(self._focus)
        if baseline and self._best != BASELINE:
            tiles.append(Tile(words.points(best.hit_rate - baseline.hit_rate), f"against {BASELINE}"))
        if bound:
            low, high = self._fraction(bound.feasible_tokens), self._fraction(bound.upper_tokens)
            tiles.append(Tile(f"{100 * low:.1f}\N{EN DASH}{words.percent(high)}", "would be hit with the future known"))
            closed = self._closed(self._best, self._focus)
            if closed is not None and self._best != BASELINE:
                tiles.append(Tile(words.share(closed), f"of the way from {BASELINE} to feasible"))
        tiles.append(Tile(words.count(best.requests), f"requests, {words.count(best.input_tokens)} prompt tokens"))
        tiles.append(Tile(words.percent(best.dead_bytes_peak / best.capacity_bytes), "dead weight at the most"))
        if best.saved_s:
            tiles.append(Tile(words.text(Unit.SECONDS, best.saved_s), "of waiting for first tokens saved"))
        return tuple(tiles)

    def _closed(self, policy: str, capacity: int) -> float | None:
        """How much of the gap from the baseline to the feasible bound; None if there is none."""
        bound, baseline, result = self._bounds.get(capacity), self._at(BASELINE, capacity), self._at(policy, capacity)
        if bound is None or baseline is None or result is None or bound.feasible_tokens <= baseline.hit_tokens:
            return None
        return (result.hit_tokens - baseline.hit_tokens) / (bound.feasible_tokens - baseline.hit_tokens)

    def _by_capacity(
        self, title: str, lead: str, draw: Callable[[int], tuple[Chart, Table]], *, key: bool = False
    ) -> Figure:
        """A figure with a view of each capacity."""
        views = tuple(View(self._size(capacity), *draw(capacity)) for capacity in self._capacities)
        return Figure(title, lead, views, self._capacities.index(self._focus), key_of(views) if key else ())

    def _of(self, capacity: int) -> Iterator[SimulationResult]:
        """The results at a capacity, the best policy's first and then from high to low."""
        found = [result for result in self._results.values() if result.capacity_bytes == capacity]
        yield from sorted(found, key=lambda result: (result.policy != self._best, -result.hit_tokens))

    # Figures

    def _hit_rates(self) -> Figure:
        several = len(self._capacities) > 1
        if not several:
            lead = f"At {self._size(self._focus)}."
        elif len(self._policies) == 1:
            lead = f"{self._best} by capacity."
        else:
            lead = f"By capacity; {self._best} is furthest above {self._other} at {self._size(self._focus)}, see below."
        if self._bounds:
            lead += " The band is what a cache that knows the future could reach, from feasible to upper bound."
        chart: Chart = self._hit_rate_curves() if several else self._hit_rate_bars()
        return Figure("How much is hit", lead, (View("", chart, self._hit_rate_table()),))

    def _hit_rate_curves(self) -> Curves:
        series = tuple(
            Series(
                policy,
                self._colours[policy],
                tuple((c, self._rate(policy, c)) for c in self._capacities if self._at(policy, c)),
                marked=True,
            )
            for policy in self._policies
        )
        band = tuple(
            (c, self._fraction(bound.feasible_tokens), self._fraction(bound.upper_tokens))
            for c, bound in sorted(self._bounds.items())
        )
        return Curves(
            (
                Panel(
                    "",
                    Axis("capacity", self._bytes),
                    Axis("prompt tokens hit", Unit.PERCENT),
                    series,
                    Band("offline bounds", band) if band else None,
                    height=1.6,
                ),
            )
        )

    def _hit_rate_bars(self) -> Bars:
        bars = []
        for result in self._of(self._focus):
            colour = Colour.FIRST if result.policy == self._best else Colour.MUTED
            rate = words.percent(result.hit_rate)
            bars.append(Bar(result.policy, (Segment("hit", colour, result.hit_rate, rate),), rate))
        bound = self._bounds.get(self._focus)
        band = None
        if bound is not None:
            band = ("offline", self._fraction(bound.feasible_tokens), self._fraction(bound.upper_tokens))
        return Bars(tuple(bars), Axis("prompt tokens hit", Unit.PERCENT), band)

    def _hit_rate_table(self) -> Table:
        rows: list[tuple[str, ...]] = []
        for capacity in self._capacities:
            for result in self._of(capacity):
                closed = self._closed(result.policy, capacity)
                rows.append(
                    (
                        self._size(capacity),
                        result.policy,
                        words.percent(result.hit_rate),
                        words.count(result.hit_tokens),
                        "" if closed is None else words.share(closed),
                        words.count(result.frames_peak),
                        words.text(self._bytes, result.policy_bytes_peak),
                        words.text(self._bytes, result.dead_bytes_peak),
                        words.text(Unit.SECONDS, result.elapsed_s),
                    )
                )
            if bound := self._bounds.get(capacity):
                for name, tokens in (
                    ("offline, feasible", bound.feasible_tokens),
                    ("offline, upper", bound.upper_tokens),
                ):
                    rate = words.percent(self._fraction(tokens))
                    rows.append((self._size(capacity), name, rate, words.count(tokens), *[""] * 5))
        columns = (
            *("Capacity", "Policy", "Hit rate", "Tokens hit", "Of the gap to feasible", "Frames, peak"),
            *("Policy's memory, peak", "Dead weight, peak", "Took"),
        )
        return Table(columns, tuple(rows), 2)

    def _tokens(self) -> Figure:
        return self._by_capacity(
            "Where the prompt tokens came from",
            "Hits by the slowest tier that was needed, and misses by the reason why nothing longer could be restored. "
            "What was not stored before is mostly text that nobody had sent yet.",
            self._token_bars,
            key=True,
        )

    def _token_bars(self, capacity: int) -> tuple[Bars, Table]:
        bars, rows = [], []
        for result in self._of(capacity):
            parts: list[tuple[str, Colour, int]] = [
                (f"hit in {tier}", _tier_colour(number), result.hit_tokens_by_tier[tier])
                for number, tier in enumerate(self._tiers)
            ]
            reasons = sorted(result.lost_tokens_by_reason, key=lambda why: (why == "not_stored", why))
            parts += [
                (words.reason(why), _LOST.get(why, Colour.FOURTH), result.lost_tokens_by_reason[why]) for why in reasons
            ]
            rest = result.input_tokens - sum(tokens for _, _, tokens in parts)
            parts.append((words.reason("rest"), Colour.MUTED, rest))
            bars.append(
                Bar(
                    result.policy,
                    tuple(
                        Segment(name, colour, self._fraction(tokens), words.share(self._fraction(tokens)))
                        for name, colour, tokens in parts
                    ),
                )
            )
            rows += [
                (result.policy, name, words.count(tokens), words.percent(self._fraction(tokens)))
                for name, _, tokens in parts
            ]
        table = Table(("Policy", "What", "Tokens", "Of all"), tuple(rows), 2)
        return Bars(tuple(bars), Axis("prompt tokens", Unit.PERCENT, 1.0)), table

    def _over_time(self) -> Figure:
        return self._by_capacity(
            "Hit rate over the trace's time", f"Each point is one of {WINDOWS} stretches of time.", self._rate_curves
        )

    def _rate_curves(self, capacity: int) -> tuple[Curves, Table]:
        results = list(self._of(capacity))
        series, columns = [], []
        course = _Course(results[0])
        for result in results:
            course = _Course(result)
            hits, tokens = course.growth(lambda s: s.hit_tokens), course.growth(lambda s: s.input_tokens)
            rates = [hit / all_ if all_ else None for hit, all_ in zip(hits, tokens, strict=True)]
            points = ((at, rate) for at, rate in zip(course.middles, rates, strict=True) if rate is not None)
            series.append(Series(result.policy, self._colours[result.policy], tuple(points)))
            columns.append(["" if rate is None else words.percent(rate) for rate in rates])
        times = [words.text(course.axis.unit, middle) for middle in course.middles]
        table = Table((_title(course.axis), *(r.policy for r in results)), tuple(zip(times, *columns, strict=True)))
        panel = Panel("", course.axis, Axis("prompt tokens hit", Unit.PERCENT), tuple(series), height=1.2)
        return Curves((panel,)), table

    def _occupancy(self) -> Figure:
        views = tuple(View(result.policy, *self._tier_curves(result)) for result in self._of(self._focus))
        return Figure(
            "What the tiers hold, and what moves",
            f"At {self._size(self._focus)}: bytes in each tier, and how many are written to it and restored from it.",
            views,
        )

    def _tier_curves(self, result: SimulationResult) -> tuple[Curves, Table]:
        course = _Course(result)
        panels = []
        columns = {_title(course.axis): [words.text(course.axis.unit, middle) for middle in course.middles]}
        for number, tier in enumerate(result.tiers):
            name = tier.name
            held = course.ends(lambda s, name=name: s.stored_bytes.get(name, 0))  # type: ignore[misc]
            written = course.growth(lambda s, name=name: s.written_bytes.get(name, 0))  # type: ignore[misc]
            read = course.growth(lambda s, name=name: s.read_bytes.get(name, 0))  # type: ignore[misc]
            panels.append(
                Panel(
                    f"{name}: held",
                    course.axis,
                    Axis("", self._bytes, tier.capacity_bytes),
                    (Series("", _tier_colour(number), tuple(held), filled=True),),
                    limit=(f"budget {self._size(tier.capacity_bytes)}", tier.capacity_bytes),
                )
            )
            moved = {"written": (Colour.SECOND, written), "restored": (Colour.THIRD, read)}
            panels.append(
                Panel(
                    f"{name}: moved {course.each}",
                    course.axis,
                    Axis("", self._bytes),
                    tuple(
                        Series(what, colour, tuple(zip(course.middles, (v / course.length for v in more), strict=True)))
                        for what, (colour, more) in moved.items()
                    ),
                )
            )
            columns[f"{name} holds"] = [words.text(self._bytes, bytes_) for _, bytes_ in held]
            columns[f"{name}: written"] = [words.text(self._bytes, bytes_) for bytes_ in written]
            columns[f"{name}: restored"] = [words.text(self._bytes, bytes_) for bytes_ in read]
        return Curves(tuple(panels)), Table(tuple(columns), tuple(zip(*columns.values(), strict=True)))

    def _removals(self) -> Figure:
        return self._by_capacity(
            "What was dropped, and why",
            "Checkpoints that left a tier, with the rows that only they needed, and those that a policy did not take.",
            self._removal_bars,
            key=True,
        )

    def _removal_bars(self, capacity: int) -> tuple[Bars, Table]:
        bars, rows = [], []
        for result in self._of(capacity):
            for tier in self._tiers:
                counts = {
                    what.removeprefix(f"{tier}."): number
                    for what, number in sorted(result.removals_by_reason.items())
                    if what.startswith(f"{tier}.")
                }
                counts["refused"] = result.refused[tier]
                label = result.policy if len(self._tiers) == 1 else f"{result.policy}, {tier}"
                colours = {"evicted": Colour.SECOND, "moved": Colour.FIRST_SOFT, "refused": Colour.MUTED}
                bars.append(
                    Bar(
                        label,
                        tuple(
                            Segment(words.reason(why), colours.get(why, Colour.FIFTH), number, words.count(number))
                            for why, number in counts.items()
                        ),
                        words.count(sum(counts.values())),
                    )
                )
                rows += [
                    (result.policy, tier, words.reason(why), words.count(number)) for why, number in counts.items()
                ]
        table = Table(("Policy", "Tier", "What", "Checkpoints"), tuple(rows), 3)
        return Bars(tuple(bars), Axis("checkpoints", Unit.COUNT)), table

    def _time_saved(self) -> Figure:
        return self._by_capacity(
            "Time to first token saved",
            "Estimated over all requests: what computing the restored tokens would have taken, less reading them. A "
            "restore that would be slower than computing is not made.",
            self._saved_bars,
        )

    def _saved_bars(self, capacity: int) -> tuple[Bars, Table]:
        bars, rows = [], []
        for result in self._of(capacity):
            saved = words.text(Unit.SECONDS, result.saved_s)
            colour = Colour.FIRST if result.policy == self._best else Colour.MUTED
            bars.append(Bar(result.policy, (Segment("saved", colour, result.saved_s, saved),), saved))
            each = words.text(Unit.SECONDS, result.saved_s / max(result.requests, 1))
            rows.append((result.policy, saved, each, words.count(result.not_worth_restoring)))
        table = Table(("Policy", "Saved", "A request", "Not worth restoring"), tuple(rows))
        return Bars(tuple(bars), Axis("time saved", Unit.SECONDS)), table


def _title(axis: Axis) -> str:
    return axis.label.capitalize()


def _tier_colour(number: int) -> Colour:
    return (Colour.FIRST, Colour.FIRST_SOFT, Colour.THIRD)[min(number, 2)]


class _Course:
    """Samples against time, cut into windows of equal length; against requests if the trace knows no time."""

    def __init__(self, result: SimulationResult) -> None:
        samples = result.samples
        start_s = samples[0].now_s
        timed = samples[-1].now_s > start_s
        self.axis = Axis("time in the trace", Unit.SECONDS) if timed else Axis("requests", Unit.COUNT)
        self.each = "a second" if timed else "a request"
        self._samples = samples
        self._at = np.array([sample.now_s - start_s if timed else sample.requests for sample in samples], float)
        self._edges = np.linspace(0.0, self._at[-1], WINDOWS + 1)
        self.length = self._at[-1] / WINDOWS
        self.middles = [float(edge + self.length / 2) for edge in self._edges[:-1]]

    def ends(self, value: Callable[[Sample], int]) -> list[tuple[float, float]]:
        """A value of the samples at the end of each window."""
        places = np.searchsorted(self._at, self._edges[1:], side="right") - 1
        return [
            (float(edge), float(value(self._samples[place])))
            for edge, place in zip(self._edges[1:], places, strict=True)
        ]

    def growth(self, total: Callable[[Sample], int]) -> list[float]:
        """How much a running total grew within each window, even between two samples."""
        totals = np.interp(self._edges, self._at, [total(sample) for sample in self._samples])
        totals[0] = 0
        return [float(more) for more in np.diff(totals)]
