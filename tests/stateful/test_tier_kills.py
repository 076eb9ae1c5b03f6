"""The disk tier survives kill -9 at any moment: nothing acknowledged is lost or torn, and the books balance.

`python test_tier_kills.py DIRECTORY LOG BUDGET` starts what is killed: for each seed on its standard input a child
works on the disk tier at DIRECTORY until it is dead, and writes to LOG before and after each step.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes that this file is the program of

from killing import fork_for_seeds

from tiered_cache.errors import CapacityError
from tiered_cache.testing.tier_suite import get, name_of
from tiered_cache.tiers.base import PutItem, PutOutcome
from tiered_cache.tiers.directory import Directory
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.ledger import Ledger

BUDGET = 2_000_000
NAMES = 40


def body_of(version: int) -> bytes:
    """Bytes that say which version they are; every eighth version is empty but for that."""
    rng = random.Random(version)
    return version.to_bytes(8, "little") + (rng.randbytes(rng.randrange(150_000)) if version % 8 else b"")


def open_tier(directory: Path, budget: int) -> DiskTier:
    return DiskTier(directory, budget, sync=SyncPolicy.NEVER, grace_s=0.0, quarantine_entries=4)


def work(directory: Path, log: Path, budget: int, seed: int) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(*words: object) -> None:
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())

    rng, version = random.Random(seed), seed * 1_000_000
    tier = open_tier(directory, budget)
    say("ready")
    while True:
        numbers = rng.sample(range(NAMES), rng.randrange(1, 7))
        action = rng.random()
        if action < 0.55:
            versions = range(version, version := version + len(numbers))
            items = [PutItem(name_of(n), [body_of(v)]) for n, v in zip(numbers, versions, strict=True)]
            try:
                with tier.reserve([item.bytes for item in items]) as reservation:
                    for n, v in zip(numbers, versions, strict=True):
                        say("putting", n, v)
                    outcomes = tier.put(items, reservation)
                    for n, v, outcome in zip(numbers, versions, outcomes, strict=True):
                        say("put" if outcome is PutOutcome.CREATED else "exists", n, v)
            except CapacityError:
                action = 0.7
        if 0.55 <= action < 0.85:
            for n in numbers:
                say("removing", n, 0)
            tier.delete([name_of(n) for n in numbers])
            for n in numbers:
                say("removed", n, 0)
        elif 0.85 <= action < 0.95:
            say("removing", numbers[0], 0)
            tier.quarantine(name_of(numbers[0]), "test")
            say("removed", numbers[0], 0)
        elif action >= 0.95:
            tier.close()
            tier = open_tier(directory, budget)


class Victims:
    """Children that work on one directory, one at a time, and what each entry may be after its death."""

    def __init__(self, directory: Path, log: Path) -> None:
        self.log = log
        self.possible: dict[int, set[int]] = {n: {0} for n in range(NAMES)}  # 0: not there
        command = [sys.executable, __file__, str(directory), str(log), str(BUDGET)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, seed: int) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self.log.unlink(missing_ok=True)
        print(seed, file=self._process.stdin, flush=True)
        child = int(self._process.stdout.readline())
        self.wait_for(1)
        return child

    def wait_for(self, lines: int) -> None:
        """Until the child has said so many."""
        deadline_s = time.monotonic() + 240
        while not (self.log.exists() and self.log.read_text().count("\n") >= lines):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)

    def kill(self, child: int) -> int:
        """Kill it and read what it had said; how many steps it had ended."""
        assert self._process.stdout
        os.kill(child, signal.SIGKILL)
        assert self._process.stdout.readline() == "dead\n", "the child ended by itself"
        ended = 0
        for line in self.log.read_text().splitlines()[1:]:
            said, n, version = line.split()
            states = self.possible[int(n)]
            if said in {"putting", "removing"}:
                states.add(int(version))
            elif said == "exists":
                states.discard(int(version))
                states.discard(0)
            else:
                states.clear()
                states.add(int(version))
            ended += said in {"put", "removed", "exists"}
        return ended

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


@pytest.fixture
def kills(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--kills"))


@pytest.fixture
def victims(tmp_path: Path) -> Iterator[Victims]:
    victims = Victims(tmp_path / "tier", tmp_path / "log")
    yield victims
    victims.close()


def held_bytes(tier: DiskTier, directory: Path) -> int:
    """What all files take, while nobody can be granted room that another gives up."""
    seen = {}
    with contextlib.closing(Directory(directory)) as opened:
        ledger = Ledger(opened, lambda _: pytest.fail("the ledger is torn"), 30.0)
        with ledger.transaction():
            for folder, _, files in os.walk(directory):
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(os.path.join(folder, file))  # noqa: PTH116, PTH118
                        if file != "ledger" and not folder.endswith("holders"):
                            seen[status.st_ino] = tier.footprint(status.st_size)
        ledger.close()
    return sum(seen.values())


def check(tier: DiskTier, victims: Victims, directory: Path) -> None:
    for n, states in victims.possible.items():
        body = get(tier, name_of(n))
        version = 0 if body is None else int.from_bytes(body[:8], "little")
        assert version in states, f"entry {n} is version {version}, which is none of {states}"
        assert body is None or body == body_of(version), f"entry {n} is torn"
        states.clear()
        states.add(version)
    usage = tier.usage()
    assert usage.bytes_used == sum(tier.footprint(entry.bytes) for entry in tier.list())
    assert usage.bytes_quarantined == sum(tier.footprint(entry.bytes) for entry in tier.quarantined())
    assert usage.bytes_reserved == 0
    assert held_bytes(tier, directory) <= BUDGET
    assert tier.foreign_files == 0
    assert len(list((directory / "holders").iterdir())) == len(list((directory / "tmp").iterdir())) == 1


@pytest.mark.timeout(900)
@pytest.mark.parametrize("witness", [False, True], ids=["alone", "beside a living process"])
def test_kills(victims: Victims, tmp_path: Path, kills: int, witness: bool) -> None:
    directory = tmp_path / "tier"
    rng = random.Random(7)
    with contextlib.ExitStack() as stack:
        living = stack.enter_context(open_tier(directory, BUDGET)) if witness else None
        ended = 0
        for seed in range(1, kills // 2 + 1):
            child = victims.start(seed)
            victims.wait_for(rng.choice((1, 5, 40)))
            time.sleep(rng.random() * rng.choice((0.002, 0.02, 0.1)))
            ended += victims.kill(child)
            if living is not None:
                living.collect_orphans()
                check(living, victims, directory)
            else:
                with open_tier(directory, BUDGET) as tier:
                    check(tier, victims, directory)
        assert ended > kills


def test_two_processes_stay_inside_one_budget_whoever_dies(tmp_path: Path, kills: int) -> None:
    directory = tmp_path / "tier"
    with contextlib.ExitStack() as stack:
        tier = stack.enter_context(open_tier(directory, BUDGET))
        both = [stack.enter_context(contextlib.closing(Victims(directory, tmp_path / f"log{n}"))) for n in range(2)]
        children = [victims.start(1_000 * n + 1) for n, victims in enumerate(both)]
        most = 0
        for turn in range(2, max(4, kills // 5)):
            for _ in range(10):
                most = max(most, held := held_bytes(tier, directory))
                assert held <= BUDGET
                usage = tier.usage()
                assert usage.bytes_used + usage.bytes_reserved + usage.bytes_quarantined <= BUDGET
                time.sleep(0.003)
            both[turn % 2].kill(children[turn % 2])
            children[turn % 2] = both[turn % 2].start(1_000 * (turn % 2) + turn)
        for victims, child in zip(both, children, strict=True):
            victims.kill(child)
        assert most > BUDGET // 2, "the writers were short of room"
        tier.collect_orphans()
        assert tier.usage().bytes_used == sum(tier.footprint(entry.bytes) for entry in tier.list())
        assert tier.usage().bytes_reserved == 0
        for entry in tier.list():
            body = get(tier, entry.path)
            assert body is not None
            assert body == body_of(int.from_bytes(body[:8], "little"))


if __name__ == "__main__":
    fork_for_seeds(partial(work, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
