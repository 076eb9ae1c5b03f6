"""The `tiered-cache` command line: one small function a command.

What an operator can get wrong is one line on standard error that names file, line or option, and exit status 2. Status
1 means that a command ran to its end and found something bad, 128 + n that signal n ended it.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from tiered_cache import frame
from tiered_cache.check import CheckedFile, check_directory, check_url, count_files
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings, format_size, parse_size
from tiered_cache.deadline import CLOSE_S
from tiered_cache.errors import ConfigError, FrameError, TieredCacheError
from tiered_cache.executors import DaemonExecutor
from tiered_cache.frame import FrameHeader
from tiered_cache.policy.names import build_policy
from tiered_cache.replay.driver import Progress as ReplayProgress
from tiered_cache.replay.driver import ReplayResult, ReplaySettings, package_versions
from tiered_cache.replay.driver import replay as run_replay
from tiered_cache.replay.simulate import (
    CHECKPOINT_BYTES,
    KV_BYTES_PER_TOKEN,
    Bounds,
    Model,
    SimulationResult,
    TierModel,
    offline_bounds,
)
from tiered_cache.replay.simulate import simulate as run_simulation
from tiered_cache.replay.traces import REQUESTS_MAX, SAMPLE_PATH, Trace
from tiered_cache.report import words
from tiered_cache.report.document import Report
from tiered_cache.report.replay import of_replay
from tiered_cache.report.simulation import of_simulation
from tiered_cache.service.local import Cluster, LocalCluster
from tiered_cache.tiers.disk import SyncPolicy

FOUND_BAD: Final = 1
BAD_INPUT: Final = 2
PLAIN_PROGRESS_S: Final = 5.0
"""How often progress is told where there is no terminal."""
SIMULATION_TOLD_EVERY: Final = 256
"""How many requests lie between two looks at how far a simulation is."""
BAD_SHOWN_MAX: Final = 20
TIDY_S: Final = 20.0
"""How long a command that was told to end may close and remove what it has opened."""
REACHABLE_S: Final = 5.0
"""How long the address of a running Ray may take to answer."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Of whichever click this typer brings."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        with _signals_raised():
            status = app(None if arguments is None else list(arguments), standalone_mode=False)
    except _UsageError as error:
        return _tell(error.format_message(), BAD_INPUT)  # type: ignore[attr-defined]
    except (TieredCacheError, OSError, MemoryError) as error:
        return _tell(_what(error), BAD_INPUT)
    except (_Stopped, SystemError) as error:
        stopped = error if isinstance(error, _Stopped) else error.__cause__
        if not isinstance(stopped, _Stopped):
            raise
        return _tell("interrupted", 128 + stopped.signal)
    return status if isinstance(status, int) else 0


JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result there; `-` for standard output.")
]
ReportOption = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", help="Write a page to look at there.")
]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Write the page's charts there.")]


# Commands


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    *,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Spill LLM sequence state to host memory and disk; restore it exactly on any worker, or refuse."""
    if show_version:
        typer.echo(version("tiered-cache"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def replay(
    *,
    trace: Annotated[
        Path | None,
        typer.Argument(help="Request trace, JSON lines, plain or gzip; the bundled sample if left out."),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, max=REQUESTS_MAX, help="Stop after so many requests.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="How many workers own sequences.")] = 2,
    ray: Annotated[
        str, typer.Option(help="`local`: an embedded Ray; `auto` or an address: a running one; `none`: this process.")
    ] = "local",
    geometry: Annotated[
        str, typer.Option(help="Reference model whose state is spilled: shape and size.")
    ] = "qsa-ple-gdn:tiny",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one block of state; the model's own if left out.")
    ] = None,
    trace_block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one block of the trace, if neither name nor format tell.")
    ] = None,
    worker_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Room for sequences on each worker.")] = "256MiB",
    host_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Budget of a node's host memory tier.")] = "128MiB",
    disk_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Budget of a node's disk tier; 0 for none.")
    ] = "256MiB",
    disk_dir: Annotated[
        Path | None,
        typer.Option(help="A directory, in which the disk tier makes one of its own that is removed afterwards."),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the disk tier, made if need be and left as it is; what an earlier replay left is used."
        ),
    ] = None,
    disk_sync: Annotated[SyncPolicy, typer.Option(help="What is on stable storage when a spill is answered.")] = (
        SyncPolicy.NEVER
    ),
    object_url: Annotated[
        str | None, typer.Option(metavar="URL", help="An object store below all nodes, such as s3://BUCKET/PREFIX.")
    ] = None,
    object_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Its budget.")] = "0",
    policy: Annotated[str, typer.Option(help="Who decides what is kept.")] = "default",
    seed: Annotated[int, typer.Option(min=0, help="Of tokens, weights and policy.")] = 0,
    json_path: JsonOption = None,
    report: ReportOption = None,
    plot: PlotOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Neither progress nor table.")] = False,
) -> int:
    """Run a request trace through real workers and tiers, and check every restore.

    Exit status 0 if every restored state was the one that was spilled, 1 if not, 2 for bad input.
    """
    source = Trace(trace or SAMPLE_PATH, trace_block_tokens)
    disk = _size("--disk-bytes", disk_bytes)
    worker = WorkerSettings(
        engine=geometry, block_tokens=block_tokens, capacity_bytes=_size("--worker-bytes", worker_bytes), seed=seed
    )
    host = _size("--host-bytes", host_bytes)
    store_bytes = _size("--object-bytes", object_bytes)
    with (
        _json_target(json_path) as write_json,
        _report_targets(report, plot) as write_report,
        _disk_directory(disk, disk_dir, keep) as directory,
    ):
        tiers = TierSettings(
            host, directory, disk, disk_sync, object_url=object_url, object_bytes=store_bytes, policy=policy, seed=seed
        )
        settings = ReplaySettings(ClusterSettings(workers, worker, tiers), requests, seed)
        with _cluster(settings.cluster, ray, quiet=quiet) as cluster, _meter(quiet=quiet) as meter:
            result = run_replay(source, cluster, settings, lambda progress: _show_replay(meter, progress))
        write_json(result.to_json())
        write_report(lambda: of_replay(result))
        if not quiet:
            _console(json_path).print(_replay_table(result))
    return FOUND_BAD if result.mismatches or result.failures_by_reason else 0


@app.command()
def simulate(
    *,
    trace: Annotated[
        Path | None,
        typer.Argument(help="Request trace, JSON lines, plain or gzip; the bundled sample if left out."),
    ] = None,
    policy: Annotated[str, typer.Option(metavar="P[,P...]", help="Who decides what is kept.")] = "default,lru",
    capacity: Annotated[str, typer.Option(metavar="SIZE[,SIZE...]", help="Budget of the host memory tier.")],
    disk_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Budget of a disk tier below it; 0 for none.")] = "0",
    requests: Annotated[int | None, typer.Option(min=1, max=REQUESTS_MAX, help="Stop after so many requests.")] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one block of state; as in the trace if left out.")
    ] = None,
    trace_block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one block of the trace, if neither name nor format tell.")
    ] = None,
    kv_bytes_per_token: Annotated[int, typer.Option(min=1, help="Of all layers.")] = KV_BYTES_PER_TOKEN,
    checkpoint_bytes: Annotated[
        int, typer.Option(min=0, help="Of one checkpoint of recurrent state; 0 if there is none.")
    ] = CHECKPOINT_BYTES,
    host_rate: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes a second that are restored from host memory; 0: no time.")
    ] = "0",
    disk_rate: Annotated[str, typer.Option(metavar="SIZE", help="Likewise from disk.")] = "0",
    prefill_rate: Annotated[
        float, typer.Option(min=0, help="Tokens a second that a worker computes: then the time saved is estimated.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the policies.")] = 0,
    json_path: JsonOption = None,
    report: ReportOption = None,
    plot: PlotOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Neither progress nor table.")] = False,
) -> int:
    """Drive the cache's policies with a trace, without moving a byte; compare them with what could be hit at most."""
    source = Trace(trace or SAMPLE_PATH, trace_block_tokens)
    policies = list(dict.fromkeys(policy.split(",")))
    for name in policies:
        build_policy(name)
    capacities = sorted({_positive_size("--capacity", size) for size in capacity.split(",")})
    if not math.isfinite(prefill_rate):
        raise ConfigError(f"--prefill-rate {prefill_rate} is not a rate")
    disk = _size("--disk-bytes", disk_bytes)
    rates = _size("--host-rate", host_rate) or None, _size("--disk-rate", disk_rate) or None
    model = Model(kv_bytes_per_token, checkpoint_bytes, prefill_rate or None)
    block_tokens = block_tokens or source.block_tokens
    results: list[SimulationResult] = []
    with _json_target(json_path) as write_json, _report_targets(report, plot) as write_report:
        whole = list(islice(source, requests))
        runs = list(itertools.product(capacities, policies))
        with _meter(quiet=quiet) as meter:
            bounds = offline_bounds(
                whole, source.block_tokens, [size + disk for size in capacities], block_tokens=block_tokens, model=model
            )
            for size, name in runs:
                tiers = [TierModel("host", size, rates[0]), TierModel("disk", disk, rates[1])][: 2 if disk else 1]
                what = f"{name}, {words.text(words.byte_unit(capacities), size)}"
                told = partial(_show_simulation, meter, what, len(results), len(runs), len(whole))
                results.append(
                    run_simulation(
                        *(whole, source.block_tokens, name, tiers),
                        block_tokens=block_tokens,
                        model=model,
                        seed=seed,
                        progress=told,
                    )
                )
        settings: dict[str, object] = {
            "trace": str(source.path),
            "trace_block_tokens": source.block_tokens,
            "block_tokens": block_tokens,
            **asdict(model),
            "host_rate": rates[0],
            "disk_rate": rates[1],
            "seed": seed,
        }
        document = {
            "results": [result.to_document() for result in results],
            "bounds": [asdict(bound) for bound in bounds],
            "settings": settings,
            "versions": package_versions(),
        }
        write_json(json.dumps(document))
        write_report(lambda: of_simulation(source.path.name, results, bounds, settings))
        if not quiet:
            _console(json_path).print(_simulation_table(results, bounds))
    return 0


@app.command()
def verify(
    *,
    place: Annotated[
        str,
        typer.Argument(
            metavar="DIR|URL",
            help="A disk tier's directory, such as `replay --keep` leaves, or an object store, such as s3://BUCKET/PREFIX.",
        ),
    ],
    json_path: JsonOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, and only the JSON.")] = False,
) -> int:
    """Read every frame of a disk tier or an object store in full and list the bad ones.

    Exit status 0 if all are sound, 1 if one is not, 2 for bad input.
    """
    files, total = (check_url(place), 0) if "://" in place else (check_directory(Path(place)), count_files(Path(place)))
    bytes_read = checked = 0
    bad: list[CheckedFile] = []
    with _json_target(json_path) as write_json:
        start_s = time.perf_counter()
        with _meter(quiet=quiet) as meter:
            for file in files:
                checked += 1
                bytes_read += file.bytes
                if file.error is not None:
                    bad.append(file)
                meter(checked, max(total, checked), f"{checked:,} files  {format_size(bytes_read)}  {len(bad)} bad")
        elapsed_s = time.perf_counter() - start_s
        if not quiet:
            console = _console(json_path)
            for file in bad[:BAD_SHOWN_MAX]:
                console.print(Text(f"{file.path}: {file.error}"), soft_wrap=True)
            if len(bad) > BAD_SHOWN_MAX:
                console.print(f"... and {len(bad) - BAD_SHOWN_MAX:,} more")
            console.print(f"{checked:,} files, {format_size(bytes_read)}, {elapsed_s:.1f} s: {len(bad):,} bad")
        result = {
            "checked": checked,
            "bytes": bytes_read,
            "elapsed_s": elapsed_s,
            "bad": [{"path": file.path, "error": file.error} for file in bad],
        }
        write_json(json.dumps(result, indent=2))
    return FOUND_BAD if bad else 0


@app.command()
def inspect(path: Annotated[Path, typer.Argument(metavar="FRAME", help="A frame's file.")]) -> int:
    """Print what a frame's header says: key, span, lineage, and each section's codec and sizes; check all its bytes.

    Exit status 0 if every byte is as it was written, 1 if only the header is, 2 for bad input.
    """
    with _naming(str(path)):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise ConfigError("not a regular file")
        with path.open("rb") as file:
            header = frame.read_header(file.read(frame.HEADER_BYTES_MAX))
            file.seek(0)
            content = file.read(header.total_bytes + 1)
    console = Console()
    console.print(_header_table(header))
    console.print(_sections_table(header))
    try:
        frame.verify(content)
    except FrameError as error:
        return _tell(f"{path}: {error.message}", FOUND_BAD)
    return 0


# Where results go


@contextmanager
def _json_target(path: str | None) -> Iterator[Callable[[str], object]]:
    """A function that writes the result to a file or to standard output. Raises at once if it cannot."""
    if path is None:
        yield lambda _: None
    elif path == "-":
        if sys.stdout is None:
            raise ConfigError("--json -: standard output is closed")
        yield _echo
    else:
        with _file_target("--json", Path(path)) as write:
            yield lambda text: write(f"{text}\n".encode())


def _echo(text: str) -> None:
    """Write the result to standard output. Raises `ConfigError` if nobody reads it any more."""
    try:
        typer.echo(text)
    except BrokenPipeError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered would fail again at exit
        raise ConfigError("--json -: nobody reads standard output") from error


@contextmanager
def _report_targets(page_path: Path | None, plot_path: Path | None) -> Iterator[Callable[[Callable[[], Report]], None]]:
    """A function that writes a report, if one is asked for. Raises at once if it cannot."""
    if page_path is None and plot_path is None:
        yield lambda _: None
        return
    try:
        from tiered_cache.report.drawing import page, picture
    except ImportError as error:
        raise ConfigError(
            f"--report and --plot need matplotlib ({error}): pip install 'tiered-cache[report]'"
        ) from error
    if page_path is not None and page_path.suffix.lower() not in {".html", ".htm"} and not page_path.is_char_device():
        raise ConfigError(f"--report {page_path}: a page is a .html file (--plot makes .png and .svg)")
    plot_format = picture.picture_format(plot_path) if plot_path is not None else ""
    with _file_target("--report", page_path) as write_page, _file_target("--plot", plot_path) as write_plot:

        def write(make: Callable[[], Report]) -> None:
            report = make()
            if page_path is not None:
                write_page(page.html(report).encode())
            if plot_path is not None:
                write_plot(picture.picture(report, plot_format))

        yield write


@contextmanager
def _file_target(option: str, path: Path | None) -> Iterator[Callable[[bytes], object]]:
    """A function that writes a file, which appears whole or not at all. Raises at once if it cannot."""
    if path is None:
        yield lambda _: None
        return
    with _naming(f"{option} {path}"):
        target = path.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
        special = None
        if target.exists() and not target.is_file():  # a device or a pipe must not be replaced
            special = target.open("wb")
        else:  # it can be written, that was all: who is killed before the end leaves nothing behind
            temporary.touch(exist_ok=False)
            temporary.unlink()
    if special is not None:
        with special:
            yield special.write
        return

    def write(content: bytes) -> None:
        try:
            temporary.write_bytes(content)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    yield write


@contextmanager
def _disk_directory(disk_bytes: int, parent: Path | None, keep: Path | None) -> Iterator[Path | None]:
    """The disk tier's directory: `keep` for good, or a new one that is removed with all its frames."""
    if parent is not None and keep is not None:
        raise ConfigError("--disk-dir and --keep: give one, --keep is the disk tier's directory itself")
    if not disk_bytes:
        if keep is not None:
            raise ConfigError("--keep needs a disk tier, and --disk-bytes is 0")
        yield None
        return
    where = keep or parent
    with _naming(f"--disk-dir {parent}" if keep is None else f"--keep {keep}"):
        if keep is not None:
            keep.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="tiered-cache-replay-", dir=where))
    if keep is not None:  # it can be written to: that was all
        made.rmdir()
        yield keep
        return
    try:
        yield made
    finally:
        _remove(made)


def _remove(directory: Path) -> None:
    """Remove a directory, which may take long; what hangs is left, and that is told."""
    removed = 0

    def work() -> None:
        nonlocal removed
        for folder, _, names in os.walk(directory):
            for name in names:
                with suppress(OSError):
                    Path(folder, name).unlink()
                removed += 1
        shutil.rmtree(directory, ignore_errors=True)

    job, before = DaemonExecutor(1, "remove").submit(work), -1
    while removed != before:
        before = removed
        with suppress(TimeoutError):
            job.result(CLOSE_S)
            return
    _tell(f"{directory} could not be removed: its disk hangs", 0)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say which option or file it is that cannot be used: a name with a NUL, a port above 65,535, a bad frame."""
    try:
        yield
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{what}: {getattr(error, 'strerror', None) or error}") from error


def _size(option: str, text: str) -> int:
    return parse_size(text, option)


def _positive_size(option: str, text: str) -> int:
    size = _size(option, text)
    if not size:
        raise ConfigError(f"{option} {text!r}: nothing fits in there")
    return size


@contextmanager
def _cluster(settings: ClusterSettings, ray: str, *, quiet: bool) -> Iterator[Cluster]:
    """A cluster in this process, or on an embedded or running Ray; closed at the end."""
    if ray == "none":
        with LocalCluster(settings) as local:
            yield local
        return
    with _naming(f"--ray {ray}"):
        _check_reachable(ray)
    if not quiet:
        typer.echo("starting Ray ..." if ray == "local" else f"connecting to Ray at {ray} ...", err=True)
    from actors.cluster import RayCluster

    with RayCluster.start(settings, None if ray == "local" else ray) as remote:
        yield remote


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nobody listens at `host:port`: Ray itself would try for minutes, deaf to signals."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHABLE_S).close()


# What people see


Meter = Callable[[int, int, str], None]
"""Told how much is done, of how much, and in words."""


@contextmanager
def _meter(*, quiet: bool) -> Iterator[Meter]:
    """Progress on standard error, with the time left: a bar on a terminal, else a line now and then."""
    console = Console(stderr=True)
    if quiet:
        with _no_warnings():
            yield lambda *_: None
    elif console.is_terminal:
        columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)
    else:
        yield _PlainMeter()


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What went wrong and was made good is in the result; the log tells errors alone."""
    log = logging.getLogger("tiered_cache")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class _PlainMeter:
    """A line every few seconds."""

    def __init__(self) -> None:
        self._start_s = self._told_s = time.perf_counter()

    def __call__(self, done: int, total: int, text: str) -> None:
        now_s = time.perf_counter()
        if now_s - self._told_s < PLAIN_PROGRESS_S:
            return
        self._told_s = now_s
        left_s = (now_s - self._start_s) * (total - done) / max(done, 1)
        typer.echo(f"{done / total:.0%}  {_duration(left_s)} left  {text}", err=True)


def _show_replay(meter: Meter, progress: ReplayProgress) -> None:
    rate = progress.requests / max(progress.elapsed_s, 1e-9)
    hit_rate = progress.hit_tokens / max(progress.input_tokens, 1)
    text = (
        f"{progress.requests:,}/{progress.requests_total:,} requests  {rate:,.0f}/s  hit rate {hit_rate:.1%}  "
        f"{progress.restores:,} restores  {progress.mismatches} mismatches"
    )
    meter(progress.input_tokens, progress.input_tokens_total, text)


def _show_simulation(meter: Meter, what: str, runs_done: int, runs: int, requests: int, done: int) -> None:
    if done % SIMULATION_TOLD_EVERY == 0 or done == requests:
        meter(runs_done * requests + done, runs * requests, f"{what}: {done:,}/{requests:,} requests")


def _simulation_table(results: Sequence[SimulationResult], bounds: Sequence[Bounds]) -> Table:
    unit = words.byte_unit(bound.capacity_bytes for bound in bounds)
    table = Table("capacity", "policy", Column("hit rate", justify="right"), Column("took", justify="right"), box=None)
    for bound in bounds:
        of_size = [result for result in results if result.capacity_bytes == bound.capacity_bytes]
        for result in sorted(of_size, key=lambda result: -result.hit_tokens):
            size = words.text(unit, result.capacity_bytes)
            table.add_row(size, result.policy, f"[bold]{result.hit_rate:.2%}[/]", _duration(result.elapsed_s))
        for name, tokens in (("offline, feasible", bound.feasible_tokens), ("offline, upper", bound.upper_tokens)):
            table.add_row("", f"[dim]{name}[/]", f"[dim]{tokens / of_size[0].input_tokens:.2%}[/]", "")
    return table


def _replay_table(result: ReplayResult) -> Table:
    from_disk = result.counters.get("cache.hits.disk", 0)
    demoted = result.counters.get("cache.bytes.disk.put", 0)
    wrong = result.mismatches
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("requests", f"{result.requests:,} in {_duration(result.elapsed_s)}, {result.requests_per_s:,.1f}/s"),
        ("prompt tokens", f"{result.input_tokens:,}, {result.input_tokens_per_s:,.0f}/s"),
        ("hit rate", f"[bold]{result.hit_rate:.2%}[/], {result.hit_tokens:,} tokens"),
        ("restores", f"{result.restores:,}, {result.restores_on_other_worker:,} on another worker than spilled them"),
        ("", f"{from_disk:,} of them from disk; {format_size(result.bytes_restored)} read from all tiers"),
        ("misses", f"{result.misses:,}{_reasons(result.misses_by_reason)}"),
        ("refusals", f"{sum(result.refusals_by_reason.values()):,}{_reasons(result.refusals_by_reason)}"),
        ("not kept", f"{sum(result.declined_by_reason.values()):,}{_reasons(result.declined_by_reason)}"),
        ("begun again", f"{sum(result.retries_by_reason.values()):,}{_reasons(result.retries_by_reason)}"),
        ("failed", f"{sum(result.failures_by_reason.values()):,}{_reasons(result.failures_by_reason)}"),
        ("spilled", f"{format_size(result.bytes_spilled)}, stored as {format_size(result.bytes_stored)}"),
        ("demoted to disk", f"stored as {format_size(demoted)}"),
        ("peak memory", format_size(result.peak_rss_bytes)),
        ("mismatches", f"[bold red]{wrong:,}[/]" if wrong else f"[bold green]0[/] of {result.restores:,} restores"),
    ):
        if name not in {"refusals", "not kept", "failed"} or not value.startswith("0"):
            table.add_row(name, value)
    for mismatch in result.mismatched[:BAD_SHOWN_MAX]:
        table.add_row("", f"request {mismatch.request}, {mismatch.tokens:,} tokens on {mismatch.worker}")
    return table


def _reasons(counts: Mapping[str, int]) -> str:
    return ": " + ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) if counts else ""


def _header_table(header: FrameHeader) -> Table:
    key = header.key
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("group", key.group),
        ("span", f"tokens {header.span[0]:,} to {header.span[1]:,}"),
        ("rank", str(key.rank)),
        ("prefix", key.prefix.hex()),
        ("parent", key.parent.hex()),
        ("namespace", key.namespace.hex()),
        ("private", f"{key.private:016x}" if key.private else "no: any sequence with this prefix may use it"),
        ("identity", header.identity_digest.hex()),
        ("geometry", header.geometry_fingerprint.hex()),
        ("lineage", f"{header.lineage:016x}"),
        ("bytes", f"{header.total_bytes:,}, {header.header_bytes:,} of them header, data at {header.data_offset:,}"),
    ):
        table.add_row(name, Text(value))
    return table


def _sections_table(header: FrameHeader) -> Table:
    names = ("section", "dtype", "shape", "codec", "raw bytes", "stored bytes", "ratio")
    table = Table(*(Column(name, no_wrap=True) for name in names), box=None, pad_edge=False)
    for section in header.sections:
        raw, stored = section.array.bytes, section.stored_bytes
        shape = " x ".join(map(str, section.array.shape))
        ratio = f"{raw / stored:.2f}" if stored else "-"
        cells = (section.name, section.array.dtype, shape, section.codec.name, f"{raw:,}", f"{stored:,}", ratio)
        table.add_row(*map(Text, cells))
    return table


def _console(json_path: str | None) -> Console:
    """Where the summary goes: not between the lines of a result on standard output."""
    return Console(stderr=json_path == "-", highlight=False)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# What goes wrong


def _tell(message: str, status: int) -> int:
    """One line, whatever is in the message."""
    line = " ".join(message.split())
    typer.echo(
        "tiered-cache: " + "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line), err=True
    )
    return status


def _what(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


class _Stopped(BaseException):
    """A signal asked the process to end. Not a `KeyboardInterrupt`, which typer would turn into silence.

    Compiled code that ignores an exception it has met, such as Ray's, makes the cause of a `SystemError` of it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@contextmanager
def _signals_raised() -> Iterator[None]:
    """SIGINT and SIGTERM unwind the stack, so that what was opened is closed and temporary files are removed.

    An exception from nowhere can be lost, or leave a lock taken: what has not ended by `TIDY_S` later is told again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first: int | None = None

    def stop(number: int, where: FrameType | None) -> None:
        nonlocal first
        del where
        first = number if first is None else first
        signal.setitimer(signal.ITIMER_REAL, TIDY_S)
        raise _Stopped(first)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
