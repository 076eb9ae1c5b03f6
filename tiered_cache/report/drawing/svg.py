"""A drawn chart as SVG that fits into a page: the page's colours and font, ids of its own, and words to point at."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET  # of what matplotlib wrote, never of anything from elsewhere
from collections.abc import Mapping
from typing import Final

from tiered_cache.report.drawing.charts import BAND, GRID, INK, QUIET, SURFACE, TEXT, Canvas, style

COLOURS: Final[Mapping[str, str]] = {
    TEXT: "text",
    QUIET: "quiet",
    GRID: "grid",
    SURFACE: "surface",
    BAND: "band",
    **{ink: colour.value for colour, ink in INK.items()},
}
"""Value on light ground -> name of the page's variable."""

_SVG: Final = "http://www.w3.org/2000/svg"
_LINK: Final = "{http://www.w3.org/1999/xlink}href"
_NUMBER: Final = re.compile(r"(\.\d\d)\d+")
_COLOUR: Final = re.compile(r"#[0-9a-f]{6}")
_FONT: Final = re.compile(r"(font: [^;']*?[0-9.]+px) [^;]*")
_ID: Final = re.compile(r"#([\w-]+)")


def inline(canvas: Canvas, prefix: str, label: str, css_class: str) -> str:
    """The SVG element; `prefix` keeps its ids apart from others' on the page, `label` says what it shows."""
    buffer = io.BytesIO()
    with style():
        canvas.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ET.fromstring(buffer.getvalue())  # noqa: S314
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        _adopt(element, prefix, canvas.tips)
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.attrib.update({"class": css_class, "role": "img", "aria-label": label})
    return ET.tostring(root, encoding="unicode", short_empty_elements=True)


def _adopt(element: ET.Element, prefix: str, tips: Mapping[str, str]) -> None:
    for name, value in list(element.attrib.items()):
        if name == "id":
            if value in tips:
                title = ET.Element(f"{{{_SVG}}}title")
                title.text = tips[value]
                element.insert(0, title)
            element.set(name, prefix + value)
        elif name == _LINK:
            element.set("href", _ID.sub(rf"#{prefix}\1", value))
            del element.attrib[name]
        elif name == "clip-path":
            element.set(name, _ID.sub(rf"#{prefix}\1", value))
        elif name == "style":
            element.set(name, _FONT.sub(r"\1 var(--font)", _COLOUR.sub(_variable, value)))
        elif name in {"d", "transform", "x", "y", "width", "height"}:
            element.set(name, _NUMBER.sub(r"\1", value))


def _variable(colour: re.Match[str]) -> str:
    """Black is matplotlib's own, of lines that are not seen."""
    return f"var(--{COLOURS[colour[0]]})" if colour[0] in COLOURS else colour[0]
