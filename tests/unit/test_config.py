"""Sizes as people write them, and settings that cannot work: one error that names what is wrong."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.config import BYTES_MAX, ClusterSettings, TierSettings, format_size, parse_size
from tiered_cache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("64MB", 64_000_000),
        ("64MiB", 64 << 20),
        (" 64 mib ", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("1.5g", 1_500_000_000),
        ("0.5k", 500),
        ("2Ti", 2 << 40),
        ("1023.9999B", 1023),
        ("9007199254740993", 9_007_199_254_740_993),  # not a float
        ("1048576TiB", BYTES_MAX),
    ],
)
def test_sizes_are_read_as_written(text: str, bytes_: int) -> None:
    assert parse_size(text) == bytes_


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MB",
        "-1",
        "1e6",
        "1,5GB",
        "1.GB",
        ".5GB",
        "0x10",
        "1iB",
        "1 i",
        "1PB",
        "1 M B",
        "\u0661MB",
        "nan",
        "inf",
        "1MB\x00",
    ],
)
def test_what_is_no_size_is_refused_with_the_settings_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--host-bytes"):
        parse_size(text, "--host-bytes")


@pytest.mark.parametrize("text", ["1048577TiB", "9" * 500, "9" * 500 + "TiB", f"{BYTES_MAX + 1}"])
def test_a_size_beyond_all_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="larger than 1152921504606846976 bytes"):
        parse_size(text)


@given(st.text(alphabet="0123456789.kKmMgGtTiIbB eE-+\n", max_size=12))
def test_no_text_breaks_the_reader(text: str) -> None:
    with suppress(ConfigError):  # and nothing else
        assert 0 <= parse_size(text) <= BYTES_MAX


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023 << 10, "1023 KiB"),
        (99_900, "97.6 KiB"),
        (64 << 20, "64 MiB"),
        ((1 << 30) + 1, "1 GiB"),
        (5 << 39, "2.5 TiB"),
        (BYTES_MAX, "1048576 TiB"),
        (-1536, "-1.5 KiB"),
        (0.25, "0 B"),
    ],
)
def test_sizes_for_people(bytes_: float, text: str) -> None:
    assert format_size(bytes_) == text


@given(st.integers(0, BYTES_MAX // 2))
def test_a_size_for_people_is_close_and_can_be_read_again(bytes_: int) -> None:
    again = parse_size(format_size(bytes_))
    assert abs(again - bytes_) <= bytes_ / 190


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host_bytes": -1}, "host_bytes -1"),
        ({"disk_dir": Path("d"), "disk_bytes": -1}, "disk_bytes -1"),
        ({"host_bytes": 0}, "neither host memory .host_bytes. nor a disk directory .disk_dir."),
        ({"disk_bytes": 5}, "disk_dir None and disk_bytes 5 go together"),
        ({"disk_dir": Path("d")}, "disk_dir d and disk_bytes 0 go together"),
        ({"object_bytes": 5}, "object_url None and object_bytes 5 go together"),
        ({"object_url": "memory://"}, "object_url memory:// and object_bytes 0 go together"),
        ({"object_requests": 0}, "object_requests 0"),
        ({"object_deadline_s": float("nan")}, "object_deadline_s nan"),
        ({"executor_threads": 0}, "executor_threads 0"),
    ],
)
def test_tiers_that_cannot_work_are_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        TierSettings(**settings)  # type: ignore[arg-type]


def test_secrets_of_the_object_store_are_not_shown() -> None:
    settings = TierSettings(object_url="s3://bucket", object_bytes=1, object_options={"secret_access_key": "hush"})
    assert "hush" not in repr(settings)


@pytest.mark.parametrize("workers", [0, 4097])
def test_a_number_of_workers_out_of_bounds_is_refused(workers: int) -> None:
    with pytest.raises(ConfigError, match=f"workers {workers}"):
        ClusterSettings(workers)
