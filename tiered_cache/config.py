"""Settings of a node's tiers and of a cluster's workers: plain checked data, and sizes as people write them.

A setting that cannot work is a `ConfigError` that names it, before anything is started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from tiered_cache.errors import ConfigError
from tiered_cache.tiers.disk import SyncPolicy

_SIZE = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[kKmMgGtT]?)(?P<binary>i?)[bB]?\s*")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
BYTES_MAX = 1 << 60


def parse_size(text: str, setting: str = "size") -> int:
    """Bytes of `64 MiB`, `64MB`, `1.5GiB` or `4096`; k, M, G, T are powers of 1000, with `i` of 1024."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{setting} {text!r} is not a size such as 512MiB or 4GB (k, M, G or T)")
    power = _POWERS[match["unit"].lower()]
    if match["binary"] and not power:
        raise ConfigError(f"{setting} {text!r}: 'i' needs a unit before it")
    bytes_ = int(Decimal(match["number"]) * (1024 if match["binary"] else 1000) ** power)
    if bytes_ > BYTES_MAX:
        raise ConfigError(f"{setting} {text!r} is larger than {BYTES_MAX} bytes")
    return bytes_


def format_size(bytes_: float) -> str:
    """Bytes for people, in powers of 1024 and three digits."""
    unit = 0
    while abs(bytes_) >= 1024 and unit < len(_UNITS) - 1:
        bytes_ /= 1024
        unit += 1
    places = 0 if not unit or abs(bytes_) >= 100 else 1 if abs(bytes_) >= 10 else 2
    number = f"{bytes_:.{places}f}"
    return f"{number.rstrip('0').rstrip('.') if places else number} {_UNITS[unit]}"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The tiers of one node: host memory, a directory on its disk, an object store, as far as there are."""

    host_bytes: int = 1 << 30
    disk_dir: Path | None = None
    disk_bytes: int = 0
    """Of it, up to a sixteenth, and no more than a quarter of `host_bytes`, is kept for copies ahead of need."""
    disk_sync: SyncPolicy = SyncPolicy.DATA
    compress_disk: bool = True
    object_url: str | None = None
    """s3://BUCKET/PREFIX, gs://, az://, file:// or memory://."""
    object_bytes: int = 0
    object_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Endpoint, region, credentials and so on, as obstore names them; besides the usual environment variables."""
    object_requests: int = 16
    """How many requests are under way at once."""
    object_deadline_s: float = 5.0
    """After so long a call ends; one request of it ends after a third."""
    policy: str = "default"
    seed: int = 0
    executor_threads: int = 2
    in_flight_bytes: int = 1 << 30
    """How much may be on its way at once, into a node's tiers and out of them, besides `host_bytes`."""

    def __post_init__(self) -> None:
        if self.host_bytes < 0 or self.disk_bytes < 0:
            raise ConfigError(f"host_bytes {self.host_bytes} and disk_bytes {self.disk_bytes} must not be negative")
        if not self.host_bytes and self.disk_dir is None and self.object_url is None:
            raise ConfigError(
                "there is neither host memory (host_bytes) nor a disk directory (disk_dir) to keep frames, "
                "nor an object store (object_url)"
            )
        if (self.disk_dir is None) != (self.disk_bytes == 0):
            raise ConfigError(f"disk_dir {self.disk_dir} and disk_bytes {self.disk_bytes} go together")
        if (self.object_url is None) != (self.object_bytes == 0) or self.object_bytes < 0:
            raise ConfigError(f"object_url {self.object_url} and object_bytes {self.object_bytes} go together")
        if not 1 <= self.object_requests <= 1024:
            raise ConfigError(f"object_requests {self.object_requests} is outside 1 .. 1024")
        if not 0 < self.object_deadline_s <= 3600:
            raise ConfigError(f"object_deadline_s {self.object_deadline_s} is not within 0 .. 3600 s")
        if self.in_flight_bytes < 1:
            raise ConfigError(f"in_flight_bytes {self.in_flight_bytes} must be positive")
        if self.executor_threads < 1:
            raise ConfigError(f"executor_threads {self.executor_threads} must be at least 1")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One kind of worker: its engine and how much state it can hold."""

    engine: str = "qsa-ple-gdn:tiny"
    """A reference engine's shape and size, or `transformers:DIR` for a model in a local directory."""
    block_tokens: int | None = None
    """The engine's own if None."""
    capacity_bytes: int = 256 << 20
    staging_slots: int = 8
    seed: int = 0
    num_gpus: float = 0.0
    device: str = "numpy"
    shards: int = 1
    """How many ranks hold a sequence together: a worker is then a set of so many owners, all on one node."""
    rank: int = 0
    """Which of them an owner is; set where it is made."""
    marks: bool = True
    """Tell states apart for replays and tests, which reads every byte at each restore and checkpoint."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.shards:
            raise ConfigError(f"rank {self.rank} of {self.shards} shards")


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A set of workers and their nodes' tiers."""

    workers: int = 2
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    tiers: TierSettings = field(default_factory=TierSettings)
    name: str = "tiered-cache"

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 4096:
            raise ConfigError(f"workers {self.workers} is outside 1 .. 4096")
