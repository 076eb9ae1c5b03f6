"""A disk tier's directory in the hands of others: nothing foreign is read, followed, changed or removed."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tiered_cache.errors import ConfigError, TierError
from tiered_cache.testing.tier_suite import NAMESPACE, get, name_of, put
from tiered_cache.tiers.base import GetRequest, PutOutcome
from tiered_cache.tiers.disk import DiskTier, SyncPolicy

BUDGET = 1 << 20


def open_tier(root: Path) -> DiskTier:
    return DiskTier(root, BUDGET, sync=SyncPolicy.NEVER, grace_s=0.0, spare_bytes=BUDGET)


def test_everything_is_for_its_owner_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with open_tier(tmp_path / "new" / "tier") as tier:
            put(tier, (name_of(0), b"secret"), (name_of(1), b"bad"))
            tier.quarantine(name_of(1), "test")
            for path in (tmp_path / "new" / "tier").rglob("*"):
                assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    finally:
        os.umask(umask)
    assert (tmp_path / "new" / "tier").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o720, 0o1777])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "tier"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}"):
        open_tier(root)
    assert list(root.iterdir()) == []


def test_a_directory_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="lies in a directory of mode 0777"):
        open_tier(shared / "tier")
    shared.chmod(0o1777)
    open_tier(shared / "tier").close()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o2755])
def test_a_directory_that_others_can_read_is_closed_to_them(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "tier"
    root.mkdir()
    root.chmod(mode)
    with open_tier(root):
        assert root.stat().st_mode & 0o777 == 0o700
    assert f"mode {mode:04o}" in caplog.text
    caplog.clear()
    with open_tier(root):
        assert not caplog.text


def test_a_directory_that_cannot_be_closed_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "tier"
    root.mkdir(mode=0o755)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)  # as some file systems do
    with pytest.raises(ConfigError, match="others can read it"):
        open_tier(root)


def test_a_symbolic_link_is_refused_as_the_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "tier").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_tier(tmp_path / "tier")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_or_an_unwritable_place_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ConfigError, match="file"):
        open_tier(tmp_path / "file")
    with pytest.raises(ConfigError):
        open_tier(tmp_path / "file" / "below")
    with pytest.raises(ConfigError):
        open_tier(Path("/proc/tier"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    root.mkdir(mode=0o700)
    os.chown(root, 12_345, 12_345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        open_tier(root)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        here = Path.cwd()
        os.chdir(path.parent)  # the name alone: an address is short
        try:
            short = path.parent / "s"
            bound.bind(short.name)
            short.rename(path)
        finally:
            os.chdir(here)


def link_at(path: Path) -> None:
    path.symlink_to("/etc/passwd")


IMPOSTORS: dict[str, Callable[[Path], object]] = {
    "link": link_at,
    "dangling link": lambda path: path.symlink_to("/nowhere/at/all"),
    "loop": lambda path: path.symlink_to(path.name),
    "directory": lambda path: path.mkdir(),
    "fifo": os.mkfifo,
    "socket": socket_at,
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", IMPOSTORS)
def test_what_is_no_file_is_no_entry_and_makes_way_for_one(tmp_path: Path, kind: str) -> None:
    with open_tier(tmp_path / "tier") as tier:
        put(tier, (name_of(0), b"good"), (name_of(1), b"x"))
        file = tier.file_of(name_of(1))
        file.unlink()
        IMPOSTORS[kind](file)
        before = os.lstat(file)
        assert get(tier, name_of(1)) is None
        assert list(tier.stat([name_of(1)])) == [None]
        assert list(tier.delete([name_of(1)])) == [False]
        assert tier.quarantine(name_of(1), "test") is False
        assert [entry.path for entry in tier.list()] == [name_of(0)]
        assert tier.foreign_files == (0 if kind == "directory" else 1)
        assert put(tier, (name_of(1), b"new"), (name_of(2), b"more")) == [PutOutcome.CREATED] * 2
        assert get(tier, name_of(1)) == b"new"
        (aside,) = (tmp_path / "tier/quarantine").iterdir()
        assert os.lstat(aside).st_ino == before.st_ino
        assert list(tier.quarantined()) == []
        assert tier.usage().bytes_reserved == 0


def test_no_link_is_followed_on_the_way(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    with open_tier(tmp_path / "tier") as tier:
        put(tier, (name_of(0), b"good"))
        inside = tier.file_of(name_of(0)).parent
        copy = outside / tier.file_of(name_of(0)).name
        copy.write_bytes(b"evil")
        tier.file_of(name_of(0)).unlink()
        inside.rmdir()
        inside.symlink_to(outside)
        assert get(tier, name_of(0)) is None
        assert list(tier.delete([name_of(0)])) == [False]
        assert list(tier.list()) == []
        assert put(tier, (name_of(0), b"new"), (name_of(256), b"new")) == [PutOutcome.CREATED] * 2
        assert get(tier, name_of(0)) == b"new"
    assert [path.read_bytes() for path in outside.iterdir()] == [b"evil"]
    with open_tier(tmp_path / "tier") as tier:
        assert tier.usage().entries == 2
    assert copy.read_bytes() == b"evil"


def test_foreign_files_are_ignored_and_counted_and_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    with open_tier(root) as tier:
        put(tier, (name_of(0), b"good"))
    entries, fan = root / "entries", root / "entries" / NAMESPACE / "00"
    foreign = [
        entries / "README",
        entries / "x.BLOB",
        entries / ".hidden.blob",
        entries / "UPPER.blob",
        entries / "with space.blob",
        fan / "no-suffix",
        fan / ".blob",
        fan / ("x" * 201 + ".blob"),
        fan / "half.blob.tmp",
        Path(os.fsdecode(os.fsencode(fan) + b"/\xff\xfe.blob")),
        fan / "new\nline.blob",
        fan / ".git" / "config",
        root / "tmp" / "notes",
        root / "holders" / "notes",
        root / "spare" / "notes",
        root / "quarantine" / "notes",
        root / "notes",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"foreign")
    with open_tier(root) as tier:
        assert [entry.path for entry in tier.list()] == [name_of(0)]
        assert tier.foreign_files == 12
        assert tier.usage().entries == 1
        assert tier.usage().bytes_used == tier.footprint(4)
        assert list(tier.quarantined()) == []
        put(tier, (name_of(1), bytes(50_000)))
        tier.delete([name_of(1)])
        put(tier, (name_of(2), bytes(50_000)))
        tier.collect_orphans()
    assert all(path.read_bytes() == b"foreign" for path in foreign)


def test_a_file_that_has_another_name_is_not_written_again(tmp_path: Path) -> None:
    """A snapshot made of hard links keeps its bytes when entries are deleted and others put."""
    with open_tier(tmp_path / "tier") as tier:
        put(tier, (name_of(0), b"a" * 50_000))
        (tmp_path / "snapshot").hardlink_to(tier.file_of(name_of(0)))
        tier.delete([name_of(0)])
        put(tier, (name_of(1), b"b" * 50_000))
        assert (tmp_path / "snapshot").read_bytes() == b"a" * 50_000
        assert get(tier, name_of(1)) == b"b" * 50_000


def test_a_spare_file_that_lies_about_its_size_spoils_no_entry(tmp_path: Path) -> None:
    with open_tier(tmp_path / "tier") as tier:
        put(tier, (name_of(0), b"a" * 50_000))
        tier.delete([name_of(0)])
        (spare,) = (tmp_path / "tier/spare").iterdir()
        with spare.open("ab") as file:
            file.write(b"tail" * 1_000)
        put(tier, (name_of(1), b"b" * 50_000))
        assert get(tier, name_of(1)) == b"b" * 50_000
        assert tier.usage().bytes_free == BUDGET - tier.footprint(50_000)


@pytest.mark.parametrize("how", ["delete", "quarantine"])
def test_an_entry_that_grew_where_it_lies_does_not_spoil_the_books(tmp_path: Path, how: str) -> None:
    with open_tier(tmp_path / "tier") as tier:
        put(tier, (name_of(0), b"a" * 50_000), (name_of(1), b"b" * 50_000))
        with tier.file_of(name_of(0)).open("ab") as file:
            file.write(bytes(500_000))
        assert tier.delete([name_of(0)]) == [True] if how == "delete" else tier.quarantine(name_of(0), "grown")
        usage = tier.usage()
        assert (usage.entries, usage.bytes_used) == (1, tier.footprint(50_000))
        assert usage.bytes_reserved == 0
        assert get(tier, name_of(1)) == b"b" * 50_000


LEDGERS = {
    "empty": b"",
    "short": b"tc-book1",
    "noise": bytes(range(256)) * 16,
    "zeros": bytes(4096),
    "many holders": struct.pack("<8sII6Q", b"tc-book1", 0, 0, 1, 1, 1, 1, 1, 1 << 60),
    "large": b"\xff" * (1 << 20),
}


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_ledger_that_is_none_is_counted_anew(tmp_path: Path, kind: str) -> None:
    with open_tier(tmp_path / "tier") as living:
        put(living, (name_of(0), b"good"), (name_of(1), b"bad"))
        living.quarantine(name_of(1), "test")
        before = living.usage()
        (tmp_path / "tier/ledger").write_bytes(LEDGERS[kind])
        assert living.usage() == before
        (tmp_path / "tier/ledger").write_bytes(LEDGERS[kind])
        with open_tier(tmp_path / "tier") as tier:
            assert tier.usage() == before


def test_a_removed_ledger_is_made_again_and_is_no_second_budget(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    with open_tier(root) as one, open_tier(root) as other:
        put(one, (name_of(0), b"good"))
        mine, theirs = one.reserve([1000]), other.reserve([2000])
        before = one.usage()
        for tiers in ((one, other), (other, one)):
            (root / "ledger").unlink()
            assert [tier.usage() for tier in tiers] == [before, before]
        (root / "ledger").unlink()
        mine.release()
        theirs.release()
        assert one.usage() == other.usage()
        assert one.usage().bytes_reserved == 0
        put(other, (name_of(1), b"more"))
        assert one.usage().entries == 2
    with open_tier(root) as tier:
        assert tier.usage().entries == 2


@pytest.mark.parametrize("sync", SyncPolicy)
def test_removed_directories_are_made_again(sync: SyncPolicy, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    with DiskTier(root, 4 << 20, sync=sync, spare_bytes=0) as tier:
        for number, gone in enumerate(("tmp", "entries", "tmp", "quarantine", "spare")):
            put(tier, (name_of(number), b"before"))
            shutil.rmtree(root / gone)
            assert put(tier, (name_of(100 + number), b"after")) == [PutOutcome.CREATED]
            assert get(tier, name_of(100 + number)) == b"after"
            shutil.rmtree(root / "tmp")
            assert list(tier.delete([name_of(100 + number)])) == [True]
        assert tier.usage().bytes_reserved == 0


def test_another_versions_directory_is_refused(tmp_path: Path) -> None:
    open_tier(tmp_path / "tier").close()
    rest = struct.pack("<6Q", 1, 2, 3, 4, 5, 0)
    (tmp_path / "tier/ledger").write_bytes(b"tc-book9" + struct.pack("<II", 0, zlib.crc32(rest)) + rest)
    with pytest.raises(ConfigError, match="another version"):
        open_tier(tmp_path / "tier")


def test_many_dead_processes_leave_nothing(tmp_path: Path) -> None:
    """Far more holders than the ledger has room for, all dead: they are collected, not counted for ever."""
    root = tmp_path / "tier"
    open_tier(root).close()
    for number in range(300):
        left = root / "tmp" / f"{number:016x}"
        left.mkdir()
        (left / "0").write_bytes(bytes(100))
    with DiskTier(root, 1 << 30, grace_s=3_600.0) as tier:
        assert tier.usage().bytes_reserved == 300 * tier.footprint(100)
    with open_tier(root) as tier:
        assert tier.usage().bytes_reserved == 0
        assert put(tier, (name_of(0), b"x")) == [PutOutcome.CREATED]
    assert list((root / "tmp").iterdir()) == []


@pytest.mark.timeout(30)
def test_something_foreign_among_what_a_dead_process_left_stays(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    open_tier(root).close()
    (root / "tmp" / ("0" * 16) / "foreign").mkdir(parents=True)
    (root / "tmp" / ("0" * 16) / "0").write_bytes(bytes(100))
    with open_tier(root) as tier:
        assert tier.usage().bytes_reserved == 0
        tier.collect_orphans()
    assert [path.name for path in (root / "tmp" / ("0" * 16)).iterdir()] == ["foreign"]


@pytest.mark.timeout(30)
def test_names_swapped_while_they_are_read_are_never_mixed(tmp_path: Path) -> None:
    """Another process of ours renames entries over each other: an answer is one file's bytes."""
    with open_tier(tmp_path / "tier") as tier:
        put(tier, (name_of(0), b"a" * 200_000), (name_of(256), b"b" * 200_000))
        first, second = tier.file_of(name_of(0)), tier.file_of(name_of(256))
        done = threading.Event()

        def swap() -> None:
            while not done.is_set():
                first.rename(tmp_path / "swap")
                second.rename(first)
                (tmp_path / "swap").rename(second)

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            for _ in range(300):
                (answer,) = tier.get([GetRequest(name_of(0))])
                if isinstance(answer, TierError):
                    assert answer.retryable
                elif isinstance(answer, memoryview):
                    assert bytes(answer) in {b"a" * 200_000, b"b" * 200_000}
        finally:
            done.set()
            swapper.join(60)
