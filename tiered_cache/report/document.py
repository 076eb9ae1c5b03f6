"""What a report consists of, as plain data: figures with a table behind each, and the charts that they show.

Colours are roles, not values: a page has a light and a dark value for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Colour(StrEnum):
    """Roles; the series' colours can be told apart by people with any kind of colour vision."""

    FIRST = "first"  # what the report is about: blue
    SECOND = "second"
    THIRD = "third"
    FOURTH = "fourth"
    FIFTH = "fifth"
    FIRST_SOFT = "first-soft"
    MUTED = "muted"
    PALE = "pale"


SERIES = (Colour.FIRST, Colour.SECOND, Colour.THIRD, Colour.FOURTH, Colour.FIFTH)


class Unit(StrEnum):
    """What an axis' numbers are."""

    PERCENT = "percent"  # of 0 .. 1
    BYTES = "bytes"  # in powers of 1000
    BINARY_BYTES = "binary bytes"  # in powers of 1024
    SECONDS = "seconds"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Axis:
    """From 0; to `end`, or as far as the data goes."""

    label: str
    unit: Unit
    end: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """A curve; `filled`: down to 0."""

    name: str
    colour: Colour
    points: tuple[tuple[float, float], ...]
    filled: bool = False
    marked: bool = False
    """Each point is a measurement of its own, and is drawn as one."""


@dataclass(frozen=True, slots=True)
class Band:
    """An area between two curves: (x, low, high)."""

    name: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over one pair of axes."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    band: Band | None = None
    limit: tuple[str, float] | None = None
    """A line across: its name and y."""
    height: float = 1.0
    """Against other panels."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Panels below each other."""

    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a bar; `text` is shown in it if there is room."""

    name: str
    colour: Colour
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Bar:
    """Segments from left to right."""

    label: str
    segments: tuple[Segment, ...]
    end: str = ""
    """Shown where it ends."""


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars of segments, the first on top; `band`: what lies between two values of the axis, and its name."""

    bars: tuple[Bar, ...]
    axis: Axis
    band: tuple[str, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts over times; `marks`: (name, seconds)."""

    name: str
    colour: Colour
    buckets: tuple[tuple[float, float, int], ...]
    """(from, to, count), of equal ratio."""
    marks: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Distributions:
    """Histograms below each other over one logarithmic axis of seconds."""

    rows: tuple[Distribution, ...]


Chart = Curves | Bars | Distributions


@dataclass(frozen=True, slots=True)
class Table:
    """Text; columns after the first `text_columns` are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1


@dataclass(frozen=True, slots=True)
class View:
    """One chart and the numbers in it; `name` tells it from the other views of its figure."""

    name: str
    chart: Chart
    table: Table


@dataclass(frozen=True, slots=True)
class Figure:
    """A question, the answer in a sentence, and one view or several to choose from."""

    title: str
    lead: str
    views: tuple[View, ...]
    first: int = 0
    """Which of the views is shown at first."""
    key: tuple[tuple[str, Colour], ...] = ()
    """What colours mean, where the chart has no room to say so."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number worth a glance."""

    value: str
    label: str
    alarming: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report, from what matters most to how it was counted."""

    kind: str
    subject: str
    """What was simulated or replayed: a file's name, as it is."""
    headline: Tile
    tiles: tuple[Tile, ...]
    figures: tuple[Figure, ...]
    notes: tuple[tuple[str, str], ...]
    """How it was counted: (what, words)."""
    settings: Table


def key_of(views: Sequence[View]) -> tuple[tuple[str, Colour], ...]:
    """What the colours of bars mean, in order of appearance."""
    bars = [bar for view in views if isinstance(view.chart, Bars) for bar in view.chart.bars]
    return tuple({segment.name: segment.colour for bar in bars for segment in bar.segments if segment.value}.items())
