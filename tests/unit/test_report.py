"""Reports: what is shown comes from the result, the page needs nothing else, and people can read it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tiered_cache.config import ClusterSettings, TierSettings
from tiered_cache.errors import ConfigError
from tiered_cache.replay.driver import SAMPLES_MAX, Mismatch, ReplayResult, ReplaySettings, replay
from tiered_cache.replay.simulate import Bounds, SimulationResult, TierModel, offline_bounds, simulate
from tiered_cache.replay.traces import SAMPLE_PATH, Trace
from tiered_cache.report import words
from tiered_cache.report.document import Bars, Colour, Curves, Report, Table, Unit
from tiered_cache.report.drawing import charts, page, svg
from tiered_cache.report.drawing.picture import picture, picture_format
from tiered_cache.report.replay import of_replay
from tiered_cache.report.simulation import WINDOWS, _Course, of_simulation
from tiered_cache.service.local import LocalCluster
from tiered_cache.service.messages import StateMark
from tiered_cache.tiers.disk import SyncPolicy

MIB = 1 << 20
POLICIES = ("default", "lru", "s3fifo")
CAPACITIES = (30 * 10**9, 115 * 10**9)
HOSTILE = "<img src=https://example.org/x onerror=alert(1)>&amp;\"'$\\frac{1}$\n_b512.jsonl"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


html = cache(page.html)  # drawing takes a second


@pytest.fixture(scope="module")
def simulated() -> tuple[list[SimulationResult], list[Bounds]]:
    trace = Trace(SAMPLE_PATH)
    requests = list(trace)[:250]
    results = [
        simulate(requests, trace.block_tokens, policy, [TierModel("host", capacity)])
        for policy in POLICIES
        for capacity in CAPACITIES
    ]
    return results, offline_bounds(requests, trace.block_tokens, CAPACITIES)


@pytest.fixture(scope="module")
def simulation(simulated: tuple[list[SimulationResult], list[Bounds]]) -> Report:
    return of_simulation(HOSTILE, *simulated, {"trace": HOSTILE, "seed": 7})


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> ReplayResult:
    """Sixty requests of twelve sessions; the host tier holds less than half of what they leave, the disk all."""
    directory = tmp_path_factory.mktemp("replayed")
    path = directory / "t_b512.jsonl"
    with path.open("w") as file:
        for turn in range(5):
            for session in range(12):
                ids = [1 + 100 * session + block for block in range(2 * turn + 2)]
                line = {"timestamp": turn, "input_length": 512 * len(ids) + 9, "output_length": 0, "hash_ids": ids}
                print(json.dumps(line), file=file)
    tiers = TierSettings(MIB, directory / "disk", 64 * MIB, SyncPolicy.NEVER)
    run = ReplaySettings(ClusterSettings(tiers=tiers))
    with LocalCluster(run.cluster) as cluster:
        return replay(Trace(path), cluster, run)


class Page(HTMLParser):
    """A page as a browser would read it: elements, attributes, text, tables."""

    VOID = ("meta", "input", "br", "wbr", "link", "img", "hr")

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs)
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
        if self._open[-1:] in (["td"], ["th"]):
            self.tables[-1][-1][-1] += data


@pytest.fixture(params=["simulation", "replay"])
def report(request: pytest.FixtureRequest) -> Report:
    if request.param == "simulation":
        found: Report = request.getfixturevalue("simulation")
        return found
    return of_replay(request.getfixturevalue("replayed"))


# ---- the page


def test_a_page_loads_nothing_and_runs_nothing(report: Report) -> None:
    source = html(report)
    seen = Page(source)
    assert {tag for tag, _ in seen.elements}.isdisjoint(
        {"script", "link", "img", "iframe", "object", "embed", "image", "base", "form", "video", "audio"}
    )
    for _, attributes in seen.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), name
            assert name not in {"src", "srcset", "action", "xlink:href"}
            assert name != "href" or str(value).startswith("#"), value
            if not name.startswith("xmlns") and name != "aria-label":
                assert not re.search(r"https?:|//|url\((?!#)", str(value)), (name, value)
    assert not re.search(r"@import|@font-face|url\(|https?:", source[: source.index("</style>")].split("<style>")[1])
    policies = [a["content"] for tag, a in seen.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert len(source) < 1_000_000


def test_ids_are_unique_and_whatever_points_to_one_finds_it(report: Report) -> None:
    source = html(report)
    seen = Page(source)
    ids = Counter(str(attributes["id"]) for _, attributes in seen.elements if "id" in attributes)
    assert ids.total() == len(ids)
    wanted = {*re.findall(r"url\(#([^)]*)\)", source), *re.findall(r'href="#([^"]*)"', source)}
    wanted |= {str(attributes["for"]) for tag, attributes in seen.elements if tag == "label"}
    assert wanted <= ids.keys()


def test_a_page_is_the_same_each_time(simulation: Report) -> None:
    assert page.html(simulation) == html(simulation)


def test_a_hostile_name_is_text_and_nothing_else(simulation: Report) -> None:
    source = html(simulation)
    assert "<img" not in source
    assert "onerror" not in re.sub(r"&lt;img src=https://<wbr>.*?&gt;|&lt;img src=.*?&gt;", "", source)
    shown = words.shown(HOSTILE)
    assert "\n" not in shown
    assert shown in Page(source).text
    assert picture(simulation, "png").startswith(b"\x89PNG")


def test_a_long_name_is_cut_in_its_middle() -> None:
    shown = words.shown("a" * 5_000 + ".jsonl")
    assert len(shown) == words.SUBJECT_CHARACTERS_MAX + 1
    assert shown.endswith(".jsonl")


def test_every_chart_says_what_it_is_and_has_its_numbers_behind_it(report: Report) -> None:
    seen = Page(html(report))
    views = sum(len(figure.views) for figure in report.figures)
    images = [attributes for tag, attributes in seen.elements if tag == "svg"]
    assert len(images) == 2 * views
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in images)
    assert len(seen.tables) == views + 1, "and one of settings"
    for figure in report.figures:
        for view in figure.views:
            assert view.table.rows
            assert all(len(row) == len(view.table.columns) for row in view.table.rows)


def test_no_colour_is_left_that_the_dark_page_could_not_change(report: Report) -> None:
    source = html(report)
    css, body = source.split("</style>")
    used = set(re.findall(r"var\(--([a-z-]+)\)", body))
    light, dark = (dict(re.findall(r"--([a-z-]+): (#\w+);", part)) for part in css.split("prefers-color-scheme: dark"))
    assert used - {"font"} <= light.keys() == dark.keys()
    assert set(re.findall(r"#[0-9a-f]{6}\b", body)) <= {"#000000"}, "black is of lines without width"
    assert {name: light[name] for name in svg.COLOURS.values()} == {n: c for c, n in svg.COLOURS.items()}


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_words_and_lines_stand_out_on_light_and_on_dark_ground(simulation: Report) -> None:
    css = html(simulation).split("</style>")[0]
    for part in css.split("prefers-color-scheme: dark"):
        colours = dict(re.findall(r"--([a-z-]+): (#\w+);", part))
        for name in ("text", "quiet", "first", "second", "third", "fourth", "fifth", "alarm"):
            assert contrast(colours[name], colours["surface"]) >= 4.5, name
        for name in ("text", "quiet"):
            assert contrast(colours[name], colours["ground"]) >= 4.5, name
        for name in ("pale", "first-soft"):  # numbers in a bar
            assert contrast(colours[name], colours["text"]) >= 4.5, name


# ---- its numbers


def test_the_hit_rates_of_the_page_are_the_result_s(
    simulated: tuple[list[SimulationResult], list[Bounds]], simulation: Report
) -> None:
    results, bounds = simulated
    table = Page(html(simulation)).tables[0]
    found = {(row[0], row[1]): row[2:4] for row in table[1:]}
    assert len(found) == len(results) + 2 * len(bounds)
    for result in results:
        cells = found[f"{result.capacity_bytes // 10**9}\N{NO-BREAK SPACE}GB", result.policy]
        assert float(cells[0].removesuffix("\N{NO-BREAK SPACE}%")) == pytest.approx(100 * result.hit_rate, abs=0.051)
        assert int(cells[1].replace(",", "")) == result.hit_tokens
    for bound in bounds:
        size = f"{bound.capacity_bytes // 10**9}\N{NO-BREAK SPACE}GB"
        assert int(found[size, "offline, feasible"][1].replace(",", "")) == bound.feasible_tokens
        assert int(found[size, "offline, upper"][1].replace(",", "")) == bound.upper_tokens


def test_the_headline_is_of_the_default_policy_where_it_is_furthest_above_lru(
    simulated: tuple[list[SimulationResult], list[Bounds]], simulation: Report
) -> None:
    rate = {(result.policy, result.capacity_bytes): result.hit_rate for result in simulated[0]}
    focus = max(CAPACITIES, key=lambda capacity: rate["default", capacity] - rate["lru", capacity])
    assert simulation.headline.value == words.percent(rate["default", focus])
    assert f"default, {focus // 10**9}\N{NO-BREAK SPACE}GB" in simulation.headline.label
    assert simulation.tiles[0].value == words.points(rate["default", focus] - rate["lru", focus])


def test_every_prompt_token_is_accounted_for(
    simulated: tuple[list[SimulationResult], list[Bounds]], simulation: Report
) -> None:
    figure = next(figure for figure in simulation.figures if "came from" in figure.title)
    assert len(figure.views) == len(CAPACITIES)
    for view in figure.views:
        tokens: Counter[str] = Counter()
        for policy, _, number, _ in view.table.rows:
            tokens[policy] += int(number.replace(",", ""))
        assert set(tokens.values()) == {simulated[0][0].input_tokens}
        assert isinstance(view.chart, Bars)
        for bar in view.chart.bars:
            assert sum(segment.value for segment in bar.segments) == pytest.approx(1)


def test_what_was_dropped_is_counted_by_reason(
    simulated: tuple[list[SimulationResult], list[Bounds]], simulation: Report
) -> None:
    figure = next(figure for figure in simulation.figures if "dropped" in figure.title)
    for capacity, view in zip(CAPACITIES, figure.views, strict=True):
        rows = {(policy, what): int(number.replace(",", "")) for policy, _, what, number in view.table.rows}
        for result in simulated[0]:
            if result.capacity_bytes == capacity:
                assert rows.get((result.policy, "evicted"), 0) == result.removals_by_reason["host.evicted"]
                assert rows[result.policy, "not admitted"] == result.refused["host"]


def test_windows_of_time_add_up_to_the_whole(simulated: tuple[list[SimulationResult], list[Bounds]]) -> None:
    for result in simulated[0]:
        course = _Course(result)
        assert len(course.middles) == WINDOWS
        assert sum(course.growth(lambda s: s.hit_tokens)) == pytest.approx(result.hit_tokens)
        assert sum(course.growth(lambda s: s.input_tokens)) == pytest.approx(result.input_tokens)
        assert course.ends(lambda s: s.stored_bytes["host"])[-1][1] == result.samples[-1].stored_bytes["host"]


def test_a_trace_without_times_is_shown_by_requests(simulated: tuple[list[SimulationResult], list[Bounds]]) -> None:
    still = [
        replace(result, samples=[replace(sample, now_s=5.0) for sample in result.samples]) for result in simulated[0]
    ]
    figure = next(f for f in of_simulation("t", still, [], {}).figures if "over" in f.title)
    chart = figure.views[0].chart
    assert isinstance(chart, Curves)
    assert (chart.panels[0].x.label, chart.panels[0].x.unit) == ("requests", Unit.COUNT)


def test_one_policy_at_one_capacity_without_bounds_is_a_report_too(
    simulated: tuple[list[SimulationResult], list[Bounds]],
) -> None:
    report = of_simulation("t", simulated[0][:1], [], {})
    assert "offline" not in Page(html(report)).text.lower()
    assert words.percent(simulated[0][0].hit_rate) in html(report)


def test_two_tiers_are_shown_side_by_side() -> None:
    trace = Trace(SAMPLE_PATH)
    tiers = [TierModel("host", 20 * 10**9, 20e9), TierModel("disk", 40 * 10**9, 2e9)]
    result = simulate(list(trace)[:120], trace.block_tokens, "lru", tiers)
    report = of_simulation("t", [result], [], {})
    chart = next(figure for figure in report.figures if "hold" in figure.title).views[0].chart
    assert isinstance(chart, Curves)
    assert [panel.limit[1] for panel in chart.panels if panel.limit] == [20 * 10**9, 40 * 10**9]
    assert "host and disk" in report.headline.label


def test_a_replay_keeps_times_and_samples_within_bounds(replayed: ReplayResult) -> None:
    assert replayed.latencies_s.keys() == {"place", "run", "spill"}
    for latencies in replayed.latencies_s.values():
        assert 0 < latencies.p50 <= latencies.p90 <= latencies.p99 <= latencies.max < replayed.elapsed_s
        assert sum(number for _, number in latencies.histogram) == latencies.count
    assert replayed.latencies_s["place"].count == replayed.latencies_s["run"].count == replayed.requests
    assert 0 < len(replayed.samples) <= SAMPLES_MAX
    assert [s.requests for s in replayed.samples] == sorted({s.requests for s in replayed.samples})
    last = replayed.samples[-1]
    assert (last.requests, last.hit_tokens, last.read_bytes) == (60, replayed.hit_tokens, replayed.bytes_restored)
    assert last.written_bytes == {t: replayed.counters[f"cache.bytes.{t}.put"] for t in ("host", "disk")}
    moved = sum(n for what, n in replayed.counters.items() if re.fullmatch(r"cache\.bytes\.host\.(?!put).*", what))
    assert last.stored_bytes["host"] == last.written_bytes["host"] - moved
    assert all(0 < sample.stored_bytes["host"] <= MIB for sample in replayed.samples)


def test_the_numbers_of_a_replay_are_on_its_page(replayed: ReplayResult) -> None:
    seen = Page(html(of_replay(replayed)))
    assert words.percent(replayed.hit_rate) in seen.text
    assert f"0 of {replayed.restores} restores were wrong" in " ".join(seen.text.split())
    times = next(table for table in seen.tables if table[0][0] == "Phase")
    for phase, number, mean, p50, _, p99, longest in times[1:]:
        known = replayed.latencies_s[phase]
        assert int(number) == known.count
        assert (mean, p50, p99, longest) == tuple(
            words.text(Unit.SECONDS, seconds) for seconds in (known.mean, known.p50, known.p99, known.max)
        )


def test_a_wrong_restore_is_the_first_thing_on_the_page(replayed: ReplayResult) -> None:
    mark = StateMark(512, "00", 1)
    wrong = Mismatch(5, 512, "worker<b>", mark, None, ("frames/x.blob",))
    report = of_replay(replace(replayed, mismatches=1, mismatched=(wrong,)))
    assert report.figures[0].title == "Restores that were wrong"
    source = html(report)
    assert '<li class="alarm"><b>1 of ' in source
    assert "worker&lt;b&gt;" in source


def test_what_could_hold_a_secret_is_not_on_the_page(replayed: ReplayResult) -> None:
    cluster = dict(replayed.settings["cluster"])  # type: ignore[call-overload]
    cluster["tiers"] = {**cluster["tiers"], "object_options": {"secret_access_key": "hush"}}
    assert "hush" not in html(of_replay(replace(replayed, settings={**replayed.settings, "cluster": cluster})))


# ---- its charts


def all_charts(report: Report) -> Iterator[charts.Canvas]:
    for figure in report.figures:
        for view in figure.views:
            for width in (charts.NARROW, charts.WIDE):
                yield charts.draw(view.chart, width)


def test_axes_begin_at_zero(report: Report) -> None:
    for canvas in all_charts(report):
        for axes in canvas.figure.axes:
            assert 0 in axes.get_ylim()
            assert axes.get_xlim()[0] == 0 or axes.get_xscale() == "log"


def shape(values: Iterable[float]) -> tuple[float, ...]:
    """Values whatever their unit."""
    found = np.array(list(values))
    return tuple(np.round(found / max(found.max(), 1e-12), 9))


def test_curves_are_where_their_data_are(report: Report) -> None:
    for figure in report.figures:
        for view in figure.views:
            if isinstance(view.chart, Curves):
                for panel, axes in zip(view.chart.panels, charts.draw(view.chart, 500).figure.axes, strict=True):
                    drawn = {shape(np.asarray(line.get_ydata(), float)) for line in axes.lines}
                    for series in panel.series:
                        assert shape(y for _, y in series.points) in drawn


def test_what_is_pointed_at_says_its_number(simulation: Report) -> None:
    figure = simulation.figures[0]
    drawn = svg.inline(charts.draw(figure.views[0].chart, charts.WIDE), "x-", "label", "wide")
    titles = [title.text for title in ET.fromstring(drawn).iter("title")]
    assert len(titles) == len(POLICIES) * len(CAPACITIES)
    assert any(re.fullmatch(r"default: [\d.]+\s% at 115\sGB", str(title)) for title in titles)


@settings(max_examples=100)
@given(st.lists(st.floats(0, 300), max_size=8).map(sorted))
def test_names_beside_curves_do_not_touch_and_keep_their_order(places: list[float]) -> None:
    apart = charts._apart(places)
    assert all(after - before >= charts._LINE - 1e-6 for before, after in pairwise(apart))
    assert sum(apart) == pytest.approx(sum(places), abs=1e-6), "none is pushed further than the others"


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        (Unit.PERCENT, 0.1234, "12.3 %"),
        (Unit.COUNT, 1234567, "1,234,567"),
        (Unit.BYTES, 0, "0 B"),
        (Unit.BYTES, 57e9, "57 GB"),
        (Unit.BYTES, 12_345, "12.3 kB"),
        (Unit.BINARY_BYTES, 1536, "1.5 KiB"),
        (Unit.BINARY_BYTES, 1 << 60, "1,024 PiB"),
        (Unit.SECONDS, 0.0012345, "1.23 ms"),
        (Unit.SECONDS, 3e-6, "3 µs"),
        (Unit.SECONDS, 100, "100 s"),
        (Unit.SECONDS, 5400, "90 min"),
        (Unit.SECONDS, 10 * 3600, "10 h"),
    ],
)
def test_numbers_have_units_and_three_digits(unit: Unit, value: float, text: str) -> None:
    assert words.text(unit, value).replace("\N{NO-BREAK SPACE}", " ") == text


def test_every_colour_has_a_value() -> None:
    assert charts.INK.keys() == set(Colour)
    assert len(svg.COLOURS) == len(Colour) + 5


def test_settings_are_shown_as_they_are(simulation: Report) -> None:
    assert simulation.settings == Table(("Setting", "Value"), (("trace", HOSTILE), ("seed", "7")), 2)


# ---- pictures


def test_a_picture_is_png_or_svg(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    path.write_bytes(picture(report, picture_format(path)))
    with Image.open(path) as image:
        assert image.width == 2 * (charts.WIDE + 56)
        assert len(image.convert("RGB").resize((200, 400)).getcolors(80_000) or ()) > 50
    root = ET.fromstring(picture(report, "svg"))
    assert {report.headline.value, report.figures[0].title} <= {"".join(t.itertext()) for t in root.iter()}
    with pytest.raises(ConfigError, match=r"x\.gif: the name of a picture ends in \.png or \.svg"):
        picture_format(Path("x.gif"))


# ---- in a browser


def screenshot(page: Path, width: int, *options: str) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    target = page.with_suffix(".png")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.with_suffix('.profile')}", f"--window-size={width},2400", *options]
    subprocess.run(
        [*command, f"--screenshot={target}", page.as_uri()], check=True, timeout=240, capture_output=True, text=True
    )
    with Image.open(target) as image:
        return np.asarray(image.convert("RGB"))


def pixels_of(image: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]], colour: str) -> int:
    wanted = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
    return int((np.abs(image.astype(int) - wanted).max(axis=2) <= 2).sum())


@pytest.mark.parametrize(
    ("width", "dark"), [(390, False), (390, True), (1000, False)], ids=["phone", "phone-dark", "desktop"]
)
def test_a_browser_shows_it(simulation: Report, tmp_path: Path, width: int, dark: bool) -> None:
    source = html(simulation)
    path = tmp_path / "page.html"
    path.write_text(source)
    scheme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    image = screenshot(path, width, *scheme)
    css = source.split("</style>")[0].split("prefers-color-scheme: dark")[dark]
    colours = dict(re.findall(r"--([a-z-]+): (#\w+);", css))
    assert image.shape[1] == width
    assert pixels_of(image[:, -3:], colours["ground"]) == 3 * len(image), "nothing sticks out on the right"
    assert pixels_of(image, colours["surface"]) > image[..., 0].size / 3
    for name in ("first", "second", "pale", "text"):
        assert pixels_of(image, colours[name]) > 50, name
