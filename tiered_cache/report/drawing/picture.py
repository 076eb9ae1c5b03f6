"""A report's charts as one picture, PNG or SVG, on light ground."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from tiered_cache.errors import ConfigError
from tiered_cache.report import words
from tiered_cache.report.document import Figure, Report
from tiered_cache.report.drawing import charts

FORMATS: Final = ("png", "svg")
_DPI: Final = 144
_MARGIN: Final = 28
_HEAD: Final = 92
_TITLE: Final = 32
_KEY: Final = 22
_GAP: Final = 26


def picture_format(path: Path) -> str:
    """By the name's ending. Raises `ConfigError` if it is none of `FORMATS`."""
    ending = path.suffix.lower().removeprefix(".")
    if ending not in FORMATS:
        raise ConfigError(f"--plot {path}: the name of a picture ends in .png or .svg")
    return ending


def picture(report: Report, format_: str) -> bytes:
    """The first view of each of the report's figures, below each other, in one of `FORMATS`."""
    out = io.BytesIO()
    height = _HEAD + sum(_height(figure) for figure in report.figures)
    with charts.style():
        canvas = charts.Canvas.blank(charts.WIDE, height, _MARGIN)
        subject = words.shown(report.subject).encode("ascii", "backslashreplace").decode()  # the font has no more
        canvas.text(0, 0, f"{report.kind}: {subject}", colour=charts.QUIET)
        canvas.text(0, 22, report.headline.value, size=30, bold=True)
        canvas.text(0, 60, report.headline.label)
        top: float = _HEAD
        for figure in report.figures:
            _draw(canvas, figure, top)
            top += _height(figure)
        metadata = {"Date": None} if format_ == "svg" else None
        canvas.figure.savefig(out, format=format_, dpi=_DPI, facecolor=charts.SURFACE, metadata=metadata)
    return out.getvalue()


def _height(figure: Figure) -> float:
    return _TITLE + bool(figure.key) * _KEY + charts.height(figure.views[figure.first].chart, charts.WIDE) + _GAP


def _draw(canvas: charts.Canvas, figure: Figure, top: float) -> None:
    view = figure.views[figure.first]
    canvas.text(0, top, f"{figure.title}, {view.name}" if view.name else figure.title, size=15, bold=True)
    top += _TITLE
    left = 0.0
    for name, colour in figure.key:
        canvas.text(left, top, "\N{BLACK SQUARE}", colour=charts.INK[colour])
        canvas.text(left + 14, top, name)
        left += charts.text_width([name]) + 36
    charts.draw_at(canvas, view.chart, top + bool(figure.key) * _KEY)
