"""What is killed with -9 at random moments, and what it has acknowledged: what tests of a node and of a store share.

A test's file is also the program that forks the children (`answer_seeds`): for each seed on its standard input a child
works until it is dead, and writes to a log what was acknowledged and what dropped.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from spilling import MIXED, State, some_tokens

from tiered_cache.index import PrefixId, RemovalReason, TierView
from tiered_cache.policy.lru import LruPolicy

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


def answer_seeds(work: Callable[[Path, Callable[..., None], random.Random], None]) -> None:
    """Have children work on the directory and write to the log that the command line names."""
    directory, log = Path(sys.argv[1]), Path(sys.argv[2])

    def begin(seed: int) -> None:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        def say(*words: object) -> None:
            os.write(fd, (" ".join(map(str, words)) + "\n").encode())

        say("started")
        work(directory, say, random.Random(seed))

    fork_for_seeds(begin)


def fork_for_seeds(begin: Callable[[int], None]) -> None:
    """For each seed on the standard input print the id of a child that begins with it, and `dead` when it is."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                begin(int(line))
            except BaseException:  # noqa: BLE001 - shown, and told to the parent below
                traceback.print_exc()
            finally:
                os._exit(1)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print("dead" if os.WIFSIGNALED(status) else "failed", flush=True)


class Victims:
    """Children that work on one directory, one after the other, and what was acknowledged and not dropped."""

    def __init__(self, directory: Path, log: Path, program: str) -> None:
        self.log = log
        self.acknowledged: dict[bytes, State] = {}
        """By prefix hash."""
        self.told = 0
        command = [sys.executable, program, str(directory), str(log)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def live_and_die(self, seed: int, wait_for: str, times: int, seconds: float) -> None:
        """Let a child work, until so long after it has said something so many times, and kill it."""
        assert self._process.stdin
        assert self._process.stdout
        self.log.unlink(missing_ok=True)
        print(seed, file=self._process.stdin, flush=True)
        child = int(self._process.stdout.readline())
        deadline_s = time.monotonic() + 240
        while not (self.log.exists() and self.log.read_text().count(wait_for) >= times):
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
        self._process.wait(60)
