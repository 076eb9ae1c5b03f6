"""kill -9 amid spills, demotions and recoveries: nothing acknowledged on disk is lost, and nothing torn is offered.

`python test_cache_kills.py DIRECTORY LOG` starts what is killed: for each seed on its standard input a child works on
a cache over the disk tier at DIRECTORY until it is dead, and writes to LOG what was acknowledged and what dropped.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes that this file is the program of

from spilling import IDENTITY, MIXED, State, match, open_disk, open_host, restore, some_tokens, spill

from tiered_cache.cache import TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.index import PrefixId, RemovalReason, TierView
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.tiers.base import Durability

HOST, DISK, _ = Durability
HOST_BYTES, DISK_BYTES = 40_000, 600_000
PROMPTS = 60


def state_of(prompt: int) -> State:
    """Prompts of 3 to 22 tokens, of which each four begin alike."""
    shared = some_tokens(9, seed=prompt // 4)
    return State(MIXED, np.concatenate([shared, some_tokens(14, seed=1000 + prompt)])[: 3 + prompt * 7 % 20])


class Telling(LruPolicy):
    """Tells what is dropped, before it goes."""

    def __init__(self, say: Callable[..., None]) -> None:
        super().__init__()
        self._say = say

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        for prefix, reason in dropped:
            assert isinstance(prefix, bytes)
            self._say("dropped", prefix.hex(), reason)
        super().commit(added, dropped, now_s, resident)


@contextmanager
def start(directory: Path, say: Callable[..., None] = lambda *_: None) -> Iterator[TieredCache]:
    with ThreadPoolExecutor(1) as executor:
        slots = [
            TierSlot(open_host(HOST_BYTES), LruPolicy()),
            TierSlot(open_disk(directory, DISK_BYTES), Telling(say), Mode.FAST),
        ]
        with contextlib.closing(TieredCache(slots, executor)) as cache:
            cache.recover()
            cache.register(IDENTITY, MIXED)
            yield cache


def work(directory: Path, log: Path, seed: int) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(*words: object) -> None:
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())

    rng = random.Random(seed)
    say("started")
    with start(directory, say) as cache:
        say("recovered")
        while True:
            prompt = rng.randrange(PROMPTS)
            state = state_of(prompt)
            end = len(state.tokens)
            stops = sorted({rng.randrange(1, end + 1), end})
            for kept in spill(cache, state, *stops, durability=rng.choice([HOST, DISK])).kept:
                if kept.durability is DISK:
                    say("kept", prompt, kept.tokens)
            hit = match(cache, MIXED, np.append(state.tokens, state.tokens[:1])).hit
            if hit is not None and rng.random() < 0.3:
                restore(cache, MIXED, hit, state.tokens)
                say("restored", prompt)


def answer_seeds() -> None:
    """For each seed print the child's id, and `dead` when it is."""
    directory, log = Path(sys.argv[1]), Path(sys.argv[2])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                work(directory, log, int(line))
            except BaseException:  # noqa: BLE001 - shown, and told to the parent below
                traceback.print_exc()
            finally:
                os._exit(1)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print("dead" if os.WIFSIGNALED(status) else "failed", flush=True)


class Victims:
    """Children that work on one directory, one after the other, and what was acknowledged and not dropped."""

    def __init__(self, directory: Path, log: Path) -> None:
        self.log = log
        self.acknowledged: dict[bytes, State] = {}
        """By prefix hash."""
        self.told = 0
        command = [sys.executable, __file__, str(directory), str(log)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def live_and_die(self, seed: int, wait_for: str, seconds: float) -> None:
        """Let a child work, until so long after it has said something, and kill it."""
        assert self._process.stdin
        assert self._process.stdout
        self.log.unlink(missing_ok=True)
        print(seed, file=self._process.stdin, flush=True)
        child = int(self._process.stdout.readline())
        deadline_s = time.monotonic() + 60
        while not (self.log.exists() and wait_for in self.log.read_text()):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        assert self._process.stdout.readline() == "dead\n", "the child ended by itself"
        for line in self.log.read_text().splitlines():
            what, *words = line.split()
            if what == "kept":
                state = state_of(int(words[0]))
                state = state._replace(tokens=state.tokens[: int(words[1])])
                self.acknowledged[state.chain.prefix_hash(len(state.tokens))] = state
                self.told += 1
            elif what == "dropped":
                assert words[1] == RemovalReason.EVICTED, line
                self.acknowledged.pop(bytes.fromhex(words[0]), None)

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


@pytest.mark.timeout(900)
def test_kills(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    directory, rng = tmp_path / "tier", random.Random(5)
    with contextlib.closing(Victims(directory, tmp_path / "log")) as victims:
        for seed in range(int(pytestconfig.getoption("--kills"))):
            wait_for = rng.choice(["started", "recovered", "recovered", "kept"])  # in recovery, or in spills
            victims.live_and_die(seed, wait_for, rng.random() * rng.choice((0.002, 0.02, 0.2)))
            with start(directory) as cache:
                for state in victims.acknowledged.values():
                    (kept,) = cache.kept(state.offer())
                    assert kept.durability is DISK
                for prompt in range(PROMPTS):
                    tokens = state_of(prompt).tokens
                    hit = match(cache, MIXED, np.append(tokens, tokens[:1])).hit
                    if hit is not None:
                        restore(cache, MIXED, hit, tokens)
                counters = cache.counters()
                assert not counters.get("quarantined.disk", 0)
                assert not counters.get("frames.disk.lost", 0)
                assert not counters.get("dropped.disk.evicted", 0)
                assert cache._index.unsupported("disk") == []
                assert cache.usage()["disk"].bytes_free >= 0
        assert victims.told > 50
        assert victims.acknowledged


if __name__ == "__main__":
    answer_seeds()
