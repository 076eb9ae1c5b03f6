"""A report as one HTML file: nothing is loaded from anywhere, and no script runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib.metadata import version
from importlib.resources import files

from tiered_cache.report import words
from tiered_cache.report.document import Colour, Figure, Report, Table, Tile, View
from tiered_cache.report.drawing import charts, svg

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
"""


def html(report: Report) -> str:
    """The whole page."""
    css = files(__package__).joinpath("page.css").read_text("utf-8")
    subject = words.shown(report.subject)
    title = escape(f"{report.headline.value} hit: {subject}")
    return "".join((_HEAD.format(title=title, css=css), *_body(report, subject), "</body>\n</html>\n"))


def _body(report: Report, subject: str) -> Iterator[str]:
    yield '<main>\n<header>\n<p class="kind">'
    yield f"{escape(report.kind)} <b>{_breakable(subject)}</b></p>\n"
    yield f'<h1><span class="number">{escape(report.headline.value)}</span> {escape(report.headline.label)}</h1>\n'
    yield '<ul class="tiles">\n'
    for tile in report.tiles:
        yield _tile(tile)
    yield "</ul>\n</header>\n"
    for number, figure in enumerate(report.figures):
        yield from _figure(figure, f"f{number}")
    yield '<section class="notes">\n<h2>How it was counted</h2>\n<dl>\n'
    for what, how in report.notes:
        yield f"<dt>{escape(what)}</dt><dd>{escape(how)}</dd>\n"
    yield "</dl>\n"
    yield from _details(report.settings, "Settings")
    yield f"</section>\n<footer>tiered-cache {escape(version('tiered-cache'))}</footer>\n</main>\n"


def _breakable(name: str) -> str:
    """A file's name that may go on in the next line where its parts meet."""
    return re.sub(r"([_.-])", r"\1<wbr>", escape(name))


def _tile(tile: Tile) -> str:
    alarm = ' class="alarm"' if tile.alarming else ""
    return f"<li{alarm}><b>{escape(tile.value)}</b> {escape(tile.label)}</li>\n"


def _figure(figure: Figure, prefix: str) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(figure.title)}</h2>\n<p>{escape(figure.lead)}</p>\n"
    if figure.key:
        yield f'<ul class="key">{"".join(_key(name, colour) for name, colour in figure.key)}</ul>\n'
    if len(figure.views) == 1:
        yield from _view(figure.views[0], figure.title, prefix)
    else:
        yield '<div class="tabs">\n'
        for number, view in enumerate(figure.views):
            tab, checked = f"{prefix}v{number}", " checked" if number == figure.first else ""
            yield f'<input type="radio" name="{prefix}" id="{tab}"{checked}>'
            yield f'<label for="{tab}">{escape(view.name)}</label>\n'
            yield "<div>\n"
            yield from _view(view, figure.title, tab)
            yield "</div>\n"
        yield "</div>\n"
    yield "</section>\n"


def _key(name: str, colour: Colour) -> str:
    return f'<li><i style="background: var(--{colour.value})"></i>{escape(name)}</li>'


def _view(view: View, title: str, prefix: str) -> Iterator[str]:
    label = f"{title}: {view.name}" if view.name else title
    for css_class, width in (("wide", charts.WIDE), ("narrow", charts.NARROW)):
        yield svg.inline(charts.draw(view.chart, width), f"{prefix}{css_class}-", label, css_class) + "\n"
    yield from _details(view.table, "The numbers")


def _details(table: Table, summary: str) -> Iterator[str]:
    yield f'<details class="numbers"><summary>{escape(summary)}</summary>\n<div class="scroll" tabindex="0">'
    yield "<table>\n<thead><tr>"
    for place, column in enumerate(table.columns):
        number = "" if place < table.text_columns else ' class="n"'
        yield f'<th scope="col"{number}>{escape(column)}</th>'
    yield "</tr></thead>\n<tbody>\n"
    for row in table.rows:
        cells = (
            f"<td>{escape(cell)}</td>" if place < table.text_columns else f'<td class="n">{escape(cell)}</td>'
            for place, cell in enumerate(row)
        )
        yield f"<tr>{''.join(cells)}</tr>\n"
    yield "</tbody>\n</table></div></details>\n"
