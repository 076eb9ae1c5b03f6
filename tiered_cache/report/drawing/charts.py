"""Charts, drawn with matplotlib at a given width in pixels: axes from zero, names beside what they name.

At 72 dots an inch a point is a pixel, so that all sizes here are pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from tiered_cache.report import words
from tiered_cache.report.document import Axis, Bar, Bars, Chart, Colour, Curves, Distributions, Panel, Series, Unit

NARROW: Final = 350
WIDE: Final = 700
TEXT: Final = "#1c2126"
QUIET: Final = "#5b6570"
GRID: Final = "#e4e8ec"
SURFACE: Final = "#fefefe"
BAND: Final = "#dfe7ee"
INK: Final = MappingProxyType(
    {
        Colour.FIRST: "#0068a8",
        Colour.SECOND: "#c44c00",
        Colour.THIRD: "#00815f",
        Colour.FOURTH: "#a3437f",
        Colour.FIFTH: "#8c6a00",
        Colour.FIRST_SOFT: "#6aa9d4",
        Colour.MUTED: "#87919b",
        Colour.PALE: "#d3dae0",
    }
)
"""On light ground. The series' colours are Okabe and Ito's, darkened until each has a contrast of 4.5 with it."""

_CHARACTER: Final = 6.6
"""About how wide a character is."""
_LINE: Final = 15
_TITLE: Final = 28
_TICKS: Final = 42
"""Room for ticks and name of a horizontal axis."""
_PANEL: Final = 120
_GAP: Final = 14
_BAR: Final = 20
_SPIKE: Final = 56


@dataclass(frozen=True, slots=True)
class Canvas:
    """A figure that is filled from the top, and what its parts are called when pointed at."""

    figure: Figure
    width: float
    height: float
    margin: float
    """Left and right of the width, above and below the height."""
    tips: dict[str, str]

    @staticmethod
    def blank(width: float, height: float, margin: float = 0.0) -> Canvas:
        size = (width + 2 * margin) / 72, (height + 2 * margin) / 72
        return Canvas(Figure(figsize=size, dpi=72), width, height, margin, {})

    def _place(self, left: float, top: float) -> tuple[float, float]:
        """As fractions of the figure, from its lower left corner."""
        return (
            (self.margin + left) / (self.width + 2 * self.margin),
            1 - (self.margin + top) / (self.height + 2 * self.margin),
        )

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        x, y = self._place(left, top + height)
        x_end, y_end = self._place(left + width, top)
        axes = self.figure.add_axes((x, y, x_end - x, y_end - y), facecolor="none")
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(QUIET)
        axes.tick_params(length=0, colors=QUIET, labelsize=12, pad=5)
        axes.set_axisbelow(True)
        return axes

    def text(
        self, left: float, top: float, text: str, *, colour: str = TEXT, size: float = 12, bold: bool = False
    ) -> None:
        weight = "bold" if bold else "normal"
        self.figure.text(*self._place(left, top), text, color=colour, fontsize=size, fontweight=weight, va="top")

    def tip(self, text: str) -> str:
        """An id for what says this when pointed at."""
        name = f"tip{len(self.tips)}"
        self.tips[name] = text
        return name


def style() -> AbstractContextManager[None]:
    """All drawing and writing of canvases takes place in this context."""
    return mpl.rc_context(
        {
            "font.family": "sans-serif",
            "font.size": 12.0,
            "text.parse_math": False,  # a dollar sign is a dollar sign
            "svg.fonttype": "none",
            "svg.hashsalt": "tiered-cache",
            "path.simplify": False,
        }
    )


def draw(chart: Chart, width: float) -> Canvas:
    """One chart alone."""
    with style():
        canvas = Canvas.blank(width, height(chart, width))
        draw_at(canvas, chart, 0)
        return canvas


def text_width(texts: Iterable[str]) -> float:
    """About how wide the longest of some words is."""
    return _CHARACTER * max(map(len, texts), default=0)


def height(chart: Chart, width: float) -> float:
    """How high a chart is that is so wide."""
    if isinstance(chart, Curves):
        return sum(_TITLE + _panel_height(panel) + _GAP for panel in chart.panels) - _GAP + _TICKS
    if isinstance(chart, Bars):
        return _bars_top(chart) + len(chart.bars) * _bar_pitch(chart, width) + _TICKS
    return len(chart.rows) * (_TITLE + _LINE + _SPIKE + _GAP) - _GAP + _TICKS


def draw_at(canvas: Canvas, chart: Chart, top: float) -> None:
    """Draw a chart so that it begins at this height; within `style()`."""
    if isinstance(chart, Curves):
        _curves(canvas, chart, top)
    elif isinstance(chart, Bars):
        _bars(canvas, chart, top)
    else:
        _distributions(canvas, chart, top)


# Curves


def _panel_height(panel: Panel) -> float:
    return panel.height * _PANEL


def _curves(canvas: Canvas, chart: Curves, top: float) -> None:
    names = [series.name for panel in chart.panels for series in panel.series]
    names += [panel.band.name for panel in chart.panels if panel.band]
    right = max(text_width(names) + 12, 14)
    left = 56
    for panel in chart.panels:
        canvas.text(0, top + 2, panel.title or panel.y.label, colour=QUIET, bold=bool(panel.title))
        top += _TITLE
        axes = canvas.axes(left, top, canvas.width - left - right, _panel_height(panel))
        _panel(canvas, axes, panel, last=panel is chart.panels[-1])
        top += _panel_height(panel) + _GAP


def _panel(canvas: Canvas, axes: Axes, panel: Panel, *, last: bool) -> None:
    points = [point for series in panel.series for point in series.points]
    if panel.band:
        points += [(x, high) for x, _, high in panel.band.points]
    x_end = max((x for x, _ in points), default=0.0) or 1.0
    y_end = max(panel.y.end or 0.0, max((y for _, y in points), default=0.0))
    room = 1.25 if panel.limit else 1.06
    if panel.y.unit is Unit.PERCENT and 0.75 < y_end <= 1:
        room = 1 / y_end  # all of it
    x_factor = _axis(axes, "x", panel.x, x_end, ticks=4 if canvas.width < 500 else 8)
    y_factor = _axis(axes, "y", panel.y, y_end, ticks=4, room=room)
    axes.grid(visible=True, axis="y", color=GRID, linewidth=1)
    if not last:
        axes.tick_params(labelbottom=False)
    else:
        axes.set_xlabel(panel.x.label, color=QUIET, fontsize=12, loc="right", labelpad=4)
    labels: list[tuple[float, str, str]] = []
    if panel.band:
        xs = [x / x_factor for x, _, _ in panel.band.points]
        lows = [low / y_factor for _, low, _ in panel.band.points]
        highs = [high / y_factor for _, _, high in panel.band.points]
        axes.fill_between(xs, lows, highs, color=BAND, linewidth=0)
        for edge in (lows, highs):
            axes.plot(xs, edge, color=INK[Colour.MUTED], linewidth=1)
        labels.append(((lows[-1] + highs[-1]) / 2, panel.band.name, QUIET))
    if panel.limit:
        name, value = panel.limit
        axes.axhline(value / y_factor, color=TEXT, linewidth=1, linestyle=(0, (4, 3)))
        place = (1.0, value / y_factor)
        axes.annotate(
            name,
            place,
            (0, 5),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            color=QUIET,
            bbox={"facecolor": SURFACE, "edgecolor": "none", "pad": 1},
        )
    for series in reversed(panel.series):  # the first on top
        _curve(canvas, axes, series, panel, (x_factor, y_factor))
        if series.name and series.points:
            labels.append((series.points[-1][1] / y_factor, series.name, INK[series.colour]))
    _beside(axes, labels)


def _curve(canvas: Canvas, axes: Axes, series: Series, panel: Panel, factors: tuple[float, float]) -> None:
    ink = INK[series.colour]
    xs = [x / factors[0] for x, _ in series.points]
    ys = [y / factors[1] for _, y in series.points]
    if series.filled:
        axes.fill_between(xs, ys, color=ink, alpha=0.25, linewidth=0)
    axes.plot(xs, ys, color=ink, linewidth=2, clip_on=False, solid_joinstyle="round", solid_capstyle="round")
    if series.marked:
        for x, y, point in zip(xs, ys, series.points, strict=True):
            values = f"{words.text(panel.y.unit, point[1])} at {words.text(panel.x.unit, point[0])}"
            axes.plot(
                [x],
                [y],
                marker="o",
                markersize=7,
                color=ink,
                markeredgecolor=SURFACE,
                markeredgewidth=1.5,
                clip_on=False,
                gid=canvas.tip(f"{series.name}: {values}"),
            )


def _beside(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Names at the right end, as near to their values as they can be without touching."""
    low, high = axes.get_ylim()
    pixels = axes.get_window_extent().height / (high - low)
    ordered = sorted(labels)
    for (_, name, colour), middle in zip(ordered, _apart([value * pixels for value, _, _ in ordered]), strict=True):
        axes.annotate(
            name,
            (1.0, middle / pixels),
            (8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            color=colour,
            annotation_clip=False,
        )


def _apart(places: Sequence[float]) -> list[float]:
    """Ascending places moved until neighbours are a line apart; those that touch stay around their own middle."""
    groups: list[list[float]] = []
    for place in places:
        groups.append([place])
        while len(groups) > 1 and _middle(groups[-1]) - _middle(groups[-2]) < _LINE * len(groups[-1] + groups[-2]) / 2:
            last = groups.pop()
            groups[-1] += last
    return [
        _middle(group) + _LINE * (number - (len(group) - 1) / 2) for group in groups for number in range(len(group))
    ]


def _middle(group: Sequence[float]) -> float:
    return sum(group) / len(group)


def _axis(axes: Axes, which: str, axis: Axis, largest: float, *, ticks: int, room: float = 1.0) -> float:
    """Set up an axis from 0, with round numbers in a unit that suits them; returns what to divide values by."""
    factor, suffix = words.scale(axis.unit, largest)
    if suffix == "%":
        suffix = "\N{NO-BREAK SPACE}%"
    elif suffix:
        suffix = f"\N{NO-BREAK SPACE}{suffix}"
    found = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xlim if which == "x" else axes.set_ylim)(0, (largest or 1.0) * room / factor)
    steps = [1, 2, 5, 10] if axis.unit in {Unit.SECONDS, Unit.COUNT} else [1, 2, 2.5, 5, 10]
    found.set_major_locator(MaxNLocator(ticks, steps=steps, integer=axis.unit is Unit.COUNT))
    found.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}{suffix if value else ''}"))
    return factor


# Bars


def _label_width(chart: Bars, width: float) -> float:
    """Of the names left of the bars; 0 if they are above them."""
    return 0.0 if width < 500 else text_width(bar.label for bar in chart.bars) + 12


def _bar_pitch(chart: Bars, width: float) -> float:
    return _BAR + (10 if _label_width(chart, width) else 24)


def _bars_top(chart: Bars) -> float:
    return 20 if chart.band else 4


def _bars(canvas: Canvas, chart: Bars, top: float) -> None:
    left, pitch = _label_width(chart, canvas.width), _bar_pitch(chart, canvas.width)
    lengths = [sum(segment.value for segment in bar.segments) for bar in chart.bars]
    end = chart.axis.end or max(*lengths, chart.band[2] if chart.band else 0.0, 0.0) or 1.0
    width = canvas.width - left - 22 - text_width(bar.end for bar in chart.bars)
    top += _bars_top(chart)
    axes = canvas.axes(left, top, width, len(chart.bars) * pitch)
    factor = _axis(axes, "x", chart.axis, end, ticks=4 if canvas.width < 500 else 8)
    axes.set_ylim(len(chart.bars) * pitch, 0)
    axes.set_yticks([])
    axes.grid(visible=True, axis="x", color=GRID, linewidth=1)
    axes.set_xlabel(chart.axis.label, color=QUIET, fontsize=12, loc="right", labelpad=4)
    if chart.band:
        name, low, high = chart.band
        axes.axvspan(low / factor, high / factor, color=BAND, linewidth=0)
        axes.annotate(
            name,
            ((low + high) / 2 / factor, 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            color=QUIET,
        )
    for number, bar in enumerate(chart.bars):
        middle = number * pitch + pitch / 2 + (0 if left else 9)
        if left:
            axes.annotate(
                bar.label, (0, middle), (-8, 0), textcoords="offset points", ha="right", va="center", color=TEXT
            )
        else:
            axes.annotate(
                bar.label,
                (0, middle - _BAR / 2),
                (0, 3),
                textcoords="offset points",
                ha="left",
                va="bottom",
                color=TEXT,
            )
        _segments(canvas, axes, bar, middle, (factor, width / (end / factor)))


def _segments(canvas: Canvas, axes: Axes, bar: Bar, middle: float, scales: tuple[float, float]) -> None:
    """`scales`: what to divide values by, and pixels a unit of the axis."""
    factor, pixels = scales
    start = 0.0
    for segment in bar.segments:
        length = segment.value / factor
        if not length:
            continue
        tip = canvas.tip(f"{bar.label}, {segment.name}: {segment.text}")
        axes.barh(
            middle, length, _BAR, start, color=INK[segment.colour], edgecolor=SURFACE, linewidth=1, gid=tip, zorder=2
        )
        if segment.text != bar.end and length * pixels > text_width([segment.text]) + 8:
            colour = TEXT if segment.colour in {Colour.PALE, Colour.FIRST_SOFT} else SURFACE
            axes.annotate(segment.text, (start + length / 2, middle), ha="center", va="center", color=colour, zorder=3)
        start += length
    axes.annotate(bar.end, (start, middle), (5, 0), textcoords="offset points", va="center", color=TEXT, zorder=3)


# Distributions


def _distributions(canvas: Canvas, chart: Distributions, top: float) -> None:
    buckets = [bucket for row in chart.rows for bucket in row.buckets]
    low, high = min((b[0] for b in buckets), default=1e-3), max((b[1] for b in buckets), default=1.0)
    decades = [10.0**power for power in range(-7, 7) if low * 0.999 <= 10.0**power <= high * 1.001]
    for row in chart.rows:
        canvas.text(0, top + 2, row.name, colour=INK[row.colour], bold=True)
        top += _TITLE + _LINE
        axes = canvas.axes(14, top, canvas.width - 28, _SPIKE)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(0, max(count for _, _, count in row.buckets))
        axes.set_yticks([])
        axes.xaxis.set_major_locator(FixedLocator(decades))
        axes.xaxis.set_minor_locator(FixedLocator([]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.text(Unit.SECONDS, value)))
        axes.grid(visible=True, axis="x", color=GRID, linewidth=1)
        for start, end, count in row.buckets:
            tip = canvas.tip(
                f"{words.text(Unit.SECONDS, start)} to {words.text(Unit.SECONDS, end)}: {words.count(count)}"
            )
            axes.bar(
                start,
                count,
                end - start,
                align="edge",
                color=INK[row.colour],
                edgecolor=SURFACE,
                linewidth=0.5,
                gid=tip,
            )
        _marks(axes, row.marks)
        last = row is chart.rows[-1]
        axes.tick_params(labelbottom=last)
        if last:
            axes.set_xlabel("time of one request, logarithmic", color=QUIET, fontsize=12, loc="right", labelpad=4)
        top += _SPIKE + _GAP


def _marks(axes: Axes, marks: Sequence[tuple[str, float]]) -> None:
    """Lines at some times, their names left of the first one and right of the others."""
    low, high = axes.get_xlim()
    for number, (name, seconds) in enumerate(marks):
        axes.axvline(seconds, ymax=1.12, color=TEXT, linewidth=1.5, clip_on=False)
        left = number == 0 and seconds > low * (high / low) ** 0.25
        left |= seconds > low * (high / low) ** 0.75
        axes.annotate(
            f"{name} {words.text(Unit.SECONDS, seconds)}",
            (seconds, 1.0),
            (-4 if left else 4, 2),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="right" if left else "left",
            color=TEXT,
        )
