"""What the disk tier does besides what every tier does: sync, spare files, shared budgets, faults, orphans."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import random
import shutil
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from costs import instructions

from tiered_cache.errors import CapacityError, ConfigError, DeadlineError, TierError
from tiered_cache.testing.faults import FaultyDirectory, SimulatedCrash
from tiered_cache.testing.tier_suite import body_of, bytes_of, get, name_of, put
from tiered_cache.tiers.base import GetRequest, PutItem, PutOutcome, TierUsage
from tiered_cache.tiers.directory import Directory
from tiered_cache.tiers.disk import ENTRY_BYTES, DiskTier, SyncPolicy

BUDGET = 4 << 20


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., tuple[DiskTier, FaultyDirectory]]]:
    """Tiers on one directory, with the system calls that each makes."""
    with contextlib.ExitStack() as stack:

        def open_tier(bytes_max: int = BUDGET, **options: object) -> tuple[DiskTier, FaultyDirectory]:
            settings = {"sync": SyncPolicy.NEVER, "grace_s": 0.0, **options}
            tier = DiskTier(tmp_path / "tier", bytes_max, open_directory=FaultyDirectory, **settings)  # type: ignore[arg-type]
            stack.enter_context(tier)
            assert isinstance(tier._directory, FaultyDirectory)
            return tier, tier._directory

        yield open_tier


def files_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def held_bytes(tier: DiskTier, directory: Path) -> int:
    """What all files with bytes take, each counted once."""
    held = {}
    for part in ("entries", "tmp", "spare", "quarantine"):
        for path in files_in(directory / part):
            held[path.stat().st_ino] = tier.footprint(path.stat().st_size)
    return sum(held.values())


# Files


def test_one_file_holds_exactly_one_entry(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    tier, _ = opened()
    put(tier, (name_of(0), b"body"))
    assert files_in(tmp_path / "tier" / "entries") == [tier.file_of(name_of(0))]
    assert tier.file_of(name_of(0)).read_bytes() == b"body"
    assert tier.footprint(0) == ENTRY_BYTES
    assert tier.footprint(1) == tier.footprint(4096) == 4096 + ENTRY_BYTES
    tier.close()
    assert files_in(tmp_path / "tier") == [tier.file_of(name_of(0)), tmp_path / "tier" / "ledger"]


def test_a_batch_is_one_group_commit(opened: Callable[..., tuple[DiskTier, FaultyDirectory]]) -> None:
    tier, directory = opened(sync=SyncPolicy.FULL)
    del directory.steps[:]
    put(tier, *((name_of(n), bytes(100)) for n in range(20)))
    steps = directory.steps
    assert steps.count("sync") == steps.count("link") == 20
    bodies = [
        index for index, step in enumerate(steps) if step == "write" and "create" in steps[max(0, index - 1) : index]
    ]
    syncs = [index for index, step in enumerate(steps) if step == "sync"]
    links = [index for index, step in enumerate(steps) if step == "link"]
    names = [index for index, step in enumerate(steps) if step == "sync_directory"]
    assert len(bodies) == 20
    assert max(bodies) < min(syncs) <= max(syncs) < min(links) <= max(links) < min(names)


@pytest.mark.parametrize(
    ("sync", "files", "directories"),
    [(SyncPolicy.NEVER, 0, 0), (SyncPolicy.DATA, 2, 0), (SyncPolicy.FULL, 2, 2)],
)
def test_a_policy_syncs_what_it_says(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], sync: SyncPolicy, files: int, directories: int
) -> None:
    tier, directory = opened(sync=sync)
    put(tier, (name_of(0), b"x"), (name_of(256), b"y"))  # one directory
    del directory.steps[:]
    put(tier, (name_of(0), b"exists"), (name_of(512), b"new"))
    assert directory.steps.count("sync") == files, "the one that exists is acknowledged as well"
    assert directory.steps.count("sync_directory") == directories // 2
    del directory.steps[:]
    put(tier, (name_of(1), b"in a new directory"))
    assert directory.steps.count("sync_directory") == directories, "its own name, and that of its directory"


def test_directories_removed_by_hand_are_made_again(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    tier, _ = opened()
    put(tier, *((name_of(n), b"x") for n in range(3)))
    subprocess.run(["rm", "-rf", str(tmp_path / "tier/entries"), str(tmp_path / "tier/quarantine")], check=True)
    assert [get(tier, name_of(n)) for n in range(3)] == [None] * 3
    (tmp_path / "tier/entries").mkdir()
    (tmp_path / "tier/quarantine").mkdir()
    assert put(tier, (name_of(0), b"y")) == [PutOutcome.CREATED]
    assert get(tier, name_of(0)) == b"y"
    assert tier.quarantine(name_of(0), "test")


# Spare files


def test_a_deleted_entrys_file_is_written_again(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    tier, directory = opened()
    put(tier, (name_of(0), body_of("", 0, 100_000)))
    inode = tier.file_of(name_of(0)).stat().st_ino
    tier.delete([name_of(0)])
    assert tier.usage().bytes_free == BUDGET
    del directory.steps[:]
    put(tier, (name_of(1), body_of("", 1, 100_500)))
    assert "create" not in directory.steps
    assert tier.file_of(name_of(1)).stat().st_ino == inode
    assert get(tier, name_of(1)) == body_of("", 1, 100_500)
    tier.delete([name_of(1)])
    put(tier, (name_of(2), body_of("", 2, 100_499)))  # smaller than the file: it would have to be cut
    assert tier.file_of(name_of(2)).stat().st_ino != inode
    assert get(tier, name_of(2)) == body_of("", 2, 100_499)
    assert len(files_in(tmp_path / "tier/spare")) == 1


def test_a_reader_keeps_its_file(opened: Callable[..., tuple[DiskTier, FaultyDirectory]]) -> None:
    """The entry is deleted, and as large a one put, in the midst of a read."""
    tier, directory = opened()
    old, new = body_of("", 0, 50_000), body_of("", 1, 50_000)
    put(tier, (name_of(0), old))

    def meddle(_: int, call: str) -> None:
        if call == "read" and "open_locked" in directory.steps:
            directory.on_step = None
            tier.delete([name_of(0)])
            put(tier, (name_of(1), new))

    directory.on_step = meddle
    (answer,) = tier.get([GetRequest(name_of(0))])
    assert directory.on_step is None
    assert bytes(bytes_of(answer)) == old
    assert get(tier, name_of(1)) == new


@pytest.mark.parametrize("put_again", [False, True])
def test_a_reader_that_comes_too_late_reads_no_other_entry(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], monkeypatch: pytest.MonkeyPatch, put_again: bool
) -> None:
    """The same between the opening of the file and its lock: what it has open is another entry by then."""
    tier, _ = opened()
    old, new, again = (body_of("", n, 50_000) for n in range(3))
    put(tier, (name_of(0), old))
    real = fcntl.flock

    def meddle(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", real)
            tier.delete([name_of(0)])
            put(tier, (name_of(1), new))
            if put_again:
                put(tier, (name_of(0), again))
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", meddle)
    assert get(tier, name_of(0)) == (again if put_again else None)
    assert fcntl.flock is real
    assert get(tier, name_of(1)) == new


@pytest.mark.parametrize("seed", range(4))
def test_no_system_call_leaves_more_than_the_budget(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path, seed: int
) -> None:
    """Looked at before each call: entries, temporary and spare files, and the quarantine, all together."""
    budget = 400_000
    tier, directory = opened(budget, spare_bytes=budget, quarantine_entries=3)
    rng, most = random.Random(seed), 0

    def look(_: int, call: str) -> None:
        nonlocal most
        most = max(most, held := held_bytes(tier, tmp_path / "tier"))
        assert held <= budget, call

    directory.on_step = look
    for turn in range(60):
        names = [name_of(n) for n in rng.sample(range(30), 4)]
        if rng.random() < 0.6:
            with contextlib.suppress(CapacityError):
                put(tier, *((name, bytes(rng.choice((20_000, rng.randrange(60_000))))) for name in names))
        elif turn % 9:
            tier.delete(names)
        else:
            tier.quarantine(names[0], "test")
    assert most > budget * 0.9


def test_spare_files_go_when_the_limit_does(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    tier, _ = opened(spare_bytes=BUDGET)
    put(tier, *((name_of(n), bytes(100_000)) for n in range(20)))
    tier.delete([name_of(n) for n in range(20)])
    assert held_bytes(tier, tmp_path / "tier") == 20 * tier.footprint(100_000)
    tier.set_limit(300_000)
    assert held_bytes(tier, tmp_path / "tier") <= 300_000


# Faults


@pytest.mark.parametrize("times", [1, 2, 5])
def test_no_fault_at_any_step_leaks_room(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path, times: int
) -> None:
    """So many calls in a row fail, from each step on; whatever was reserved then, nothing is in the end."""
    tier, directory = opened(quarantine_entries=1)

    def use() -> None:
        with tier.reserve([9_000, 9_000, 20_000]) as room:
            tier.put([PutItem(name_of(n), [bytes(9_000)]) for n in range(2)], room)
        tier.quarantine(name_of(0), "test")
        tier.delete([name_of(1)])
        with tier.reserve([20_000]) as room:
            tier.put([PutItem(name_of(2), [bytes(20_000)])], room)
        tier.quarantine(name_of(2), "test")

    first, done = 0, False
    while not done:
        first += 1
        begun = len(directory.steps)

        def fail(step: int, name: str, first: int = first, begun: int = begun) -> None:
            if name != "unlock" and first <= step - begun < first + times:
                raise OSError(errno.EIO, "injected")

        directory.on_step = fail
        with contextlib.suppress(TierError):
            use()
        done = len(directory.steps) - begun < first
        directory.on_step = None
        tier.delete([name_of(n) for n in range(3)])
        tier.reserve([1]).release()
        assert tier.usage().bytes_reserved == 0, f"step {first}, {directory.steps[begun + first - 1]}"
        assert not files_in(tmp_path / "tier/tmp"), f"step {first}, {directory.steps[begun + first - 1]}"
    assert first > 50


CALLS = ("create", "write", "sync", "link", "rename", "sync_directory", "stat", "unlink", "scan", "names", "read")


@pytest.mark.parametrize("call", CALLS)
def test_after_a_failed_call_everything_is_whole_and_the_next_try_works(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path, call: str
) -> None:
    tier, directory = opened(sync=SyncPolicy.FULL)
    put(tier, (name_of(0), b"old"), (name_of(1), b"gone"))
    tier.delete([name_of(1)])

    def use() -> None:
        put(tier, *((name_of(n), body_of("", n, 30_000)) for n in range(2, 6)))
        tier.get([GetRequest(name_of(2))])
        tier.delete([name_of(2), name_of(3)])
        tier.quarantine(name_of(4), "test")

    for nth in range(1, 5):
        seen = 0

        def fail(_: int, name: str, nth: int = nth) -> None:
            nonlocal seen
            seen += name == call
            if name == call and seen == nth:
                raise OSError(errno.EIO, "injected")

        directory.on_step = fail
        with contextlib.suppress(TierError):
            use()
        directory.on_step = None
        for entry in tier.list():
            n = int(entry.path.rpartition("-w")[0].split("/")[2].split("-")[0])
            assert get(tier, entry.path) == (b"old" if n == 0 else body_of("", n, 30_000))
        assert get(tier, name_of(0)) == b"old"
        tier.delete([name_of(n) for n in range(2, 6)])
        use()
        assert get(tier, name_of(5)) == body_of("", 5, 30_000)
        tier.delete([name_of(n) for n in range(2, 6)])
    usage = tier.usage()
    assert usage.entries == 1
    assert usage.bytes_used == tier.footprint(3)
    left = [path for path in files_in(tmp_path / "tier/tmp") if path.stat().st_nlink == 1]
    assert usage.bytes_reserved == sum(tier.footprint(path.stat().st_size) for path in left)
    assert held_bytes(tier, tmp_path / "tier") <= BUDGET


@pytest.mark.parametrize("call", ["open_locked", "read"])
def test_one_bad_answer_of_many_spoils_no_other(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], call: str
) -> None:
    tier, directory = opened()
    put(tier, *((name_of(n), body_of("", n, 5_000)) for n in range(64)))
    requests = [GetRequest(name_of(n)) for n in range(64)]
    seen = 0

    def fail(_: int, name: str) -> None:
        nonlocal seen
        seen += name == call
        if seen == 38:
            seen += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    directory.on_step = fail
    answers = tier.get(requests)
    directory.on_step = None
    (bad,) = (n for n, answer in enumerate(answers) if not isinstance(answer, memoryview))
    assert bad == 37
    error = answers[bad]
    assert isinstance(error, TierError)
    assert error.retryable
    assert error.key == name_of(37)
    assert isinstance(error.__cause__, OSError)
    assert all(bytes_of(answer) == body_of("", n, 5_000) for n, answer in enumerate(answers) if n != bad)
    assert bytes_of(tier.get(requests)[bad]) == body_of("", bad, 5_000), "a second try works"


@pytest.mark.parametrize("call", ["create", "write", "sync", "link"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_capacity_error_until_there_is_room(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path, call: str, error: int
) -> None:
    tier, directory = opened(sync=SyncPolicy.FULL)
    put(tier, (name_of(0), b"old"))
    directory.fail(call, error, times=3)
    for _ in range(3):
        with pytest.raises(CapacityError, match="full"):
            put(tier, (name_of(1), bytes(50_000)), (name_of(2), bytes(50_000)))
        assert get(tier, name_of(0)) == b"old"
        assert [entry.path for entry in tier.list()] == [name_of(0)]
        assert files_in(tmp_path / "tier/tmp") == []
        assert tier.usage().bytes_reserved == 0
    assert put(tier, (name_of(1), bytes(50_000))) == [PutOutcome.CREATED]


def test_a_small_file_system_fills_and_recovers(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(mounted)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here; the test above injects the same errors")
    try:
        with DiskTier(mounted / "tier", 1 << 30, sync=SyncPolicy.FULL, spare_bytes=0) as tier:
            stored = 0
            for n in range(100):
                with contextlib.suppress(CapacityError):
                    put(tier, (name_of(n), body_of("", n, 20_000)))
                    stored += 1
            assert 30 < stored < 55
            kept = sorted(entry.path for entry in tier.list())
            assert len(kept) == stored
            assert all(tier.delete([kept.pop() for _ in range(8)])), "a full disk can be emptied"
            with tier.reserve([100_000]) as reservation:  # granted, and then somebody else takes the room
                (mounted / "foreign").write_bytes(bytes(os.statvfs(mounted).f_bavail * 4096))
                with pytest.raises(CapacityError, match="full"):
                    tier.put([PutItem(name_of(200), [bytes(100_000)])], reservation)
            assert sorted(entry.path for entry in tier.list()) == kept
            assert all(get(tier, name_of(n)) == body_of("", n, 20_000) for n in range(100) if name_of(n) in kept)
            with pytest.raises(CapacityError):
                put(tier, (name_of(201), bytes(100_000)))
            (mounted / "foreign").unlink()
            assert put(tier, (name_of(201), bytes(100_000))) == [PutOutcome.CREATED]
            (mounted / "foreign").write_bytes(bytes(os.statvfs(mounted).f_bavail * 4096))
        with DiskTier(mounted / "tier", 1 << 30, sync=SyncPolicy.FULL) as tier:  # closed, and opened, while it is full
            assert os.statvfs(mounted).f_bavail == 0
            assert sorted(entry.path for entry in tier.list()) == sorted([*kept, name_of(201)])
            assert get(tier, name_of(201)) == bytes(100_000)
            (mounted / "foreign").unlink()
        with DiskTier(mounted / "tier", 1 << 30, sync=SyncPolicy.FULL) as tier:
            (mounted / "foreign").write_bytes(bytes(os.statvfs(mounted).f_bavail * 4096))
            tier.delete([name_of(201), *kept[:4]])
            assert os.statvfs(mounted).f_bavail == 0, "their files are spare ones"
            put(tier, (name_of(202), bytes(150_000)))
            assert tier.usage().bytes_used == sum(tier.footprint(entry.bytes) for entry in tier.list())
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_writes_and_reads_that_stop_short_go_on(tmp_path: Path) -> None:
    class Short(Directory):
        def write(self, fd: int, views: object, offset: int) -> int:
            assert isinstance(views, list)
            return super().write(fd, [views[0][:777]], offset)

        def read(self, fd: int, view: memoryview, offset: int) -> int:
            return super().read(fd, view[:500], offset)

    with DiskTier(tmp_path / "tier", BUDGET, sync=SyncPolicy.NEVER, open_directory=Short) as tier:
        item = PutItem(name_of(0), [body_of("", n, size) for n, size in enumerate((3_000, 1, 777, 0, 5))])
        with tier.reserve([item.bytes]) as reservation:
            tier.put([item], reservation)
        assert get(tier, name_of(0)) == b"".join(item.buffers)


# Processes


def test_two_tiers_on_one_directory_are_one_place(opened: Callable[..., tuple[DiskTier, FaultyDirectory]]) -> None:
    (one, _), (two, _) = opened(), opened()
    put(one, (name_of(0), b"ones"))
    assert get(two, name_of(0)) == b"ones"
    assert put(two, (name_of(0), b"twos")) == [PutOutcome.EXISTS]
    with one.reserve([BUDGET // 2]):
        assert one.usage() == two.usage()
        with pytest.raises(CapacityError):
            two.reserve([BUDGET // 2])
    with two.reserve([BUDGET // 2]):
        pass
    two.delete([name_of(0)])
    assert get(one, name_of(0)) is None
    assert one.usage().bytes_used == 0


def test_opening_beside_a_living_process_takes_nothing_from_it(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    one, _ = opened()
    put(one, (name_of(0), bytes(10_000)), (name_of(1), bytes(10_000)))
    one.delete([name_of(0)])
    with one.reserve([50_000]) as reservation:
        two, _ = opened()
        assert two.usage().bytes_reserved == one.footprint(50_000)
        assert len(files_in(tmp_path / "tier/spare")) == 1
        one.put([PutItem(name_of(256), [bytes(50_000)])], reservation)
    two.close()
    assert put(one, (name_of(2), bytes(10_000))) == [PutOutcome.CREATED]
    assert one.usage().bytes_used == sum(one.footprint(entry.bytes) for entry in one.list())


def dead_holder(directory: Path, holder: str, age_s: float) -> list[Path]:
    """What a process that was killed while it wrote two files leaves."""
    left = directory / "tmp" / holder
    left.mkdir()
    files = [left / "0", left / "1", directory / "holders" / holder]
    for file in files:
        file.write_bytes(bytes(10_000))
    for path in (left, *files):
        os.utime(path, (time.time() - age_s,) * 2)
    return files


def test_orphans_are_collected_after_a_grace_time_and_never_a_living_writers(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    directory = tmp_path / "tier"
    opened()[0].close()
    old, young = dead_holder(directory, "0" * 16, 120), dead_holder(directory, "1" * 16, 20)
    tier, _ = opened(grace_s=60.0)
    assert not any(file.exists() for file in old)
    assert all(file.exists() for file in young)
    assert tier.usage().bytes_reserved == 2 * tier.footprint(10_000), "what is there is charged"
    other, _ = opened(grace_s=0.0)
    assert not any(file.exists() for file in young)
    assert tier.usage().bytes_reserved == 0
    with tier.reserve([1_000]):
        assert other.collect_orphans() == 0, "both are alive"
        assert other.usage().bytes_reserved == other.footprint(1_000)


def test_room_that_a_dead_process_held_is_found_when_it_is_needed(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    tier, _ = opened()
    dying = DiskTier(tmp_path / "tier", BUDGET, open_directory=FaultyDirectory)
    directory = dying._directory
    assert isinstance(directory, FaultyDirectory)
    dying.reserve([BUDGET - 10_000])
    with pytest.raises(CapacityError):
        tier.reserve([BUDGET // 2])
    directory.die(len(directory.steps) + 1, half_done=False)
    with pytest.raises(SimulatedCrash):
        dying.usage()
    directory.bury()
    tier.reserve([BUDGET // 2]).release()


def test_who_looks_at_the_budget_finds_room_that_a_dead_process_held(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    now_s = time.time()
    tier, _ = opened(grace_s=60.0, clock=lambda: now_s)
    opened()[0].close()
    dead_holder(tmp_path / "tier", "0" * 16, 0)
    (tmp_path / "tier/ledger").write_bytes(b"")  # counted anew
    assert tier.usage().bytes_reserved == 2 * tier.footprint(10_000)
    now_s += 59
    assert tier.usage().bytes_reserved == 2 * tier.footprint(10_000)
    now_s += 2
    assert tier.usage().bytes_reserved == 0


def test_a_lock_that_is_not_given_up_is_a_deadline_error(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    tier, _ = opened(lock_timeout_s=0.05)
    put(tier, (name_of(0), b"x"))
    reservation = tier.reserve([10_000])
    with (tmp_path / "tier/ledger").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError):
            tier.reserve([1])
        assert get(tier, name_of(0)) == b"x", "reading needs no ledger"
        reservation.release()
    with tier.reserve([1]):
        assert tier.usage().bytes_reserved == tier.footprint(1), "what could not be given back then is back now"


def test_a_fork_has_to_open_its_own(opened: Callable[..., tuple[DiskTier, FaultyDirectory]]) -> None:
    tier, _ = opened()
    put(tier, (name_of(0), b"x"))
    child = os.fork()
    if not child:
        refused = False
        with contextlib.suppress(TierError):
            refused = True
            tier.get([GetRequest(name_of(0))])
            refused = False
        tier.close()
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert get(tier, name_of(0)) == b"x", "the child's end changes nothing here"
    assert put(tier, (name_of(1), b"y")) == [PutOutcome.CREATED]


def test_close_waits_for_calls(opened: Callable[..., tuple[DiskTier, FaultyDirectory]]) -> None:
    tier, directory = opened()
    put(tier, (name_of(0), bytes(1000)))
    reading, go_on = threading.Event(), threading.Event()

    def wait(_: int, call: str) -> None:
        if call == "read":
            reading.set()
            assert go_on.wait(60)

    directory.on_step = wait
    answers: list[memoryview] = []
    reader = threading.Thread(target=lambda: answers.extend(map(bytes_of, tier.get([GetRequest(name_of(0))]))))
    reader.start()
    assert reading.wait(60)
    directory.on_step = None
    closer = threading.Thread(target=tier.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    go_on.set()
    reader.join(60)
    closer.join(60)
    assert not closer.is_alive()
    assert [bytes(answer) for answer in answers] == [bytes(1000)]


# Recovery


def filled(directory: Path, entries: int) -> TierUsage:
    """A closed tier of so many entries, whose ledger is lost, as after a power cut; what it had said that it holds."""
    with DiskTier(directory, 1 << 32, sync=SyncPolicy.NEVER) as tier:
        for first in range(0, entries, 500):
            put(tier, *((name_of(n), b"%d" % n) for n in range(first, min(first + 500, entries))))
        usage = tier.usage()
        (directory / "ledger").write_bytes(b"")
    return usage


@pytest.mark.parametrize("entries", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_restart_counts_and_lists_what_is_there(tmp_path: Path, entries: int) -> None:
    usage = filled(tmp_path / "tier", entries)
    started_s = time.perf_counter()
    with DiskTier(tmp_path / "tier", 1 << 32, sync=SyncPolicy.NEVER) as tier:
        opened_s = time.perf_counter()
        found = {entry.path: entry.bytes for entry in tier.list()}
        listed_s = time.perf_counter()
        assert tier.usage() == usage
    assert found == {name_of(n): len(b"%d" % n) for n in range(entries)}
    print(f"{entries} entries: opened in {opened_s - started_s:.2f} s, listed in {listed_s - opened_s:.2f} s")


def test_a_restart_costs_as_much_for_each_entry_among_many_as_among_few(tmp_path: Path) -> None:
    def restart(directory: Path) -> int:
        """System calls, and instructions."""
        with DiskTier(directory, 1 << 32, sync=SyncPolicy.NEVER, open_directory=FaultyDirectory) as tier:
            assert isinstance(tier._directory, FaultyDirectory)
            deque(tier.list(), maxlen=0)
            return len(tier._directory.steps)

    few, many = tmp_path / "few", tmp_path / "many"
    filled(few, 100)
    filled(many, 800)
    costs = {place: instructions(lambda place=place: restart(place)) for place in (few, many)}  # type: ignore[misc]
    assert costs[many] < 8 * costs[few]
    assert restart(many) < 8 * restart(few)


def test_a_directory_is_shared_while_another_that_lives_has_it_open(
    opened: Callable[..., tuple[DiskTier, FaultyDirectory]], tmp_path: Path
) -> None:
    tier, _ = opened()
    dead_holder(tmp_path / "tier", "0" * 16, 0)
    assert not tier.is_shared()
    other, _ = opened()
    assert tier.is_shared()
    other.close()
    assert not tier.is_shared()


# A disk that takes no writes any more

WRITES = {
    *("create", "open_again", "open_shared", "write", "sync", "link", "rename", "make_directory", "sync_directory"),
    "close_file",
}
QUICK = {
    *((errno.ENOSPC, False, SyncPolicy.FULL), (errno.ENOSPC, True, SyncPolicy.NEVER)),
    *((errno.EIO, False, SyncPolicy.NEVER), (errno.EROFS, True, SyncPolicy.FULL)),
}
CASES = [
    pytest.param(
        *case,
        id="-".join((errno.errorcode[case[0]], "lasting" if case[1] else "once", case[2].value)),
        marks=[] if case in QUICK else [pytest.mark.slow],
    )
    for case in itertools.product(
        (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS), (False, True), (SyncPolicy.NEVER, SyncPolicy.FULL)
    )
]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(("error", "lasting", "sync"), CASES)
def test_no_failed_write_loses_what_was_acknowledged_or_keeps_the_tier_from_closing(
    tmp_path: Path, error: int, lasting: bool, sync: SyncPolicy
) -> None:
    """At each write in turn, once or from there on; then the tier is closed, and opened again when all is well."""
    acknowledged: dict[str, bytes] = {}

    def fill(tier: DiskTier, *numbers: int) -> None:
        bodies = {name_of(n): body_of("", n, 9_000 + n) for n in numbers}
        try:
            put(tier, *bodies.items())
        except (TierError, CapacityError):
            return
        acknowledged.update(bodies)

    def do(call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(TierError):  # and no other
            call(*arguments)

    def use(tier: DiskTier) -> None:
        fill(tier, 0, 1, 2)
        acknowledged.pop(name_of(1), None)
        do(tier.delete, [name_of(1)])
        fill(tier, 3)  # into the spare file
        acknowledged.pop(name_of(2), None)
        do(tier.quarantine, name_of(2), "test")
        fill(tier, 4, 0)
        do(tier.usage)
        do(tier.set_limit, BUDGET - 1)
        do(tier.collect_orphans)
        do(tier.delete, [name_of(5)])

    step, done = 0, False
    while not done:
        step += 1
        seen = 0
        root = tmp_path / str(step)
        files = open_files()
        tier = DiskTier(root, BUDGET, sync=sync, grace_s=0.0, quarantine_entries=1, open_directory=FaultyDirectory)
        directory = tier._directory
        assert isinstance(directory, FaultyDirectory)

        def fail(_: int, name: str, step: int = step) -> None:
            nonlocal seen
            seen += name in WRITES
            if name in WRITES and (seen >= step if lasting else seen == step):
                raise OSError(error, os.strerror(error))

        directory.on_step = fail
        acknowledged.clear()
        use(tier)
        for path, body in acknowledged.items():
            assert get(tier, path) == body, "reading needs no write"
        tier.close()
        done = seen < step
        assert open_files() == files, f"step {step} leaves files open"
        with DiskTier(root, BUDGET, sync=sync, grace_s=0.0) as tier:
            found = {entry.path: get(tier, entry.path) for entry in tier.list()}
            assert acknowledged.items() <= found.items(), f"step {step}"
            usage = tier.usage()
            assert usage.bytes_reserved == 0
            assert usage.bytes_used == sum(tier.footprint(len(body or b"")) for body in found.values())
            assert usage.entries == len(found)
            assert held_bytes(tier, root) == usage.bytes_used + usage.bytes_quarantined
            assert not files_in(root / "tmp")
            assert len(files_in(root / "holders")) == 1
        shutil.rmtree(root)
    assert step > 30


@pytest.mark.parametrize("ledger", [bytes(300), None])
def test_a_tier_of_which_a_power_cut_has_taken_parts_is_a_tier(tmp_path: Path, ledger: bytes | None) -> None:
    """Also if something else has been put beside them meanwhile; what is somebody else's `ledger` is not taken."""
    root = tmp_path / "tier"
    with DiskTier(root, BUDGET) as tier:
        put(tier, ("a/b", b"kept"))
    for part in ("tmp", "spare", "quarantine", "holders"):
        shutil.rmtree(root / part)
    if ledger is not None:
        (root / "ledger").write_bytes(ledger)
    (root / "notes.txt").write_text("mine")
    with DiskTier(root, BUDGET) as tier:
        assert get(tier, "a/b") == b"kept"
    shutil.rmtree(root / "tmp")
    (root / "ledger").write_text("precious")
    with pytest.raises(ConfigError, match="other things"):
        DiskTier(root, BUDGET)
    assert (root / "ledger").read_text() == "precious"


@pytest.mark.parametrize("ledger", [b"", b"tc-b", bytes(20), b"tc-book1", None])
@pytest.mark.parametrize("left", [[], ["tmp", "spare"]])
def test_what_a_power_cut_may_have_left_is_a_tier_if_nothing_else_is_there(
    tmp_path: Path, left: list[str], ledger: bytes | None
) -> None:
    root = tmp_path / "tier"
    DiskTier(root, BUDGET).close()
    for part in {"entries", "tmp", "spare", "quarantine", "holders"}.difference(left):
        shutil.rmtree(root / part)
    if ledger is not None:
        (root / "ledger").write_bytes(ledger)
    DiskTier(root, BUDGET).close()


@pytest.mark.parametrize("what", ["empty", "short", "directory", "link", "pipe", "dotfiles"])
def test_a_directory_of_somebody_elses_stays_as_it_is(tmp_path: Path, what: str) -> None:
    root = tmp_path / "home"
    (root / "tmp" / "0123456789abcdef").mkdir(parents=True)
    (root / "tmp" / "0123456789abcdef" / "0").write_text("precious")
    (root / "README").write_text("mine")
    match what:
        case "empty":
            (root / "ledger").touch()
        case "short":
            (root / "ledger").write_bytes(bytes(20))
        case "directory":
            (root / "ledger").mkdir()
        case "link":
            (root / "ledger").symlink_to(root / "README")
        case "pipe":
            os.mkfifo(root / "ledger")
        case _:
            shutil.rmtree(root / "tmp")
            (root / "README").rename(root / ".bashrc")
    root.chmod(0o755)
    before = sorted(root.rglob("*"))
    with pytest.raises(ConfigError, match="other things"):
        DiskTier(root, BUDGET)
    assert sorted(root.rglob("*")) == before
    assert root.stat().st_mode & 0o777 == 0o755
