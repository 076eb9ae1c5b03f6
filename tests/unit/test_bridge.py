"""`Bridge`: a catalogue behind a process that may hang, die, or not be what was meant; callers go on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from paging import HASH_TOKENS, IDENTITY, layout_named
from spilling import NO_HINTS

from tiered_cache.config import TierSettings
from tiered_cache.errors import ConfigError, DeadlineError, IdentityError, MissReason, TierError
from tiered_cache.identity import PrefixChain
from tiered_cache.index import KnownChain
from tiered_cache.namespace import Namespace
from tiered_cache.service.bridge import Bridge, Hello

COMMAND = (sys.executable, str(Path(__file__).parents[1] / "bridge_end.py"))
WAIT_S = 60.0
KNOWN = Namespace.of(IDENTITY, layout_named("rows").geometry)
BLOCK = layout_named("rows").block_tokens
ROOT = PrefixChain(KNOWN.digest, BLOCK).block_hash(0)
CHAIN = KnownChain(KNOWN.digest, BLOCK, (ROOT, b"1" * 32), BLOCK + HASH_TOKENS, b"t" * 32)

Open = Callable[..., Bridge]


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Open]:
    made: list[Bridge] = []
    url = (tmp_path / "store").as_uri()
    (tmp_path / "store").mkdir()

    def make(behaviour: str, retry_s: float = 0.05) -> Bridge:
        tiers = TierSettings(host_bytes=0, object_url=url, object_bytes=1 << 20)
        hello = Hello(str(tmp_path / "been there"), behaviour, tiers)
        made.append(Bridge(hello, command=COMMAND, retry_s=retry_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def match(bridge: Bridge, deadline_s: float = WAIT_S) -> MissReason | None:
    return bridge.match(KNOWN.digest, CHAIN, 1.0, deadline_s=deadline_s).reason


def match_when_back(bridge: Bridge) -> MissReason | None:
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return match(bridge)
        except TierError:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_calls_go_there_and_what_they_raise_comes_back(bridge: Open) -> None:
    there = bridge("serves")
    assert there.wait(WAIT_S)
    assert match(there) is MissReason.NOT_STORED
    there.introduce(KNOWN.digest, KNOWN.descriptor(), deadline_s=WAIT_S)
    lease = there.admit(CHAIN, NO_HINTS, 10.0, deadline_s=WAIT_S)
    assert [key.tokens for key in lease.keys] == [BLOCK, BLOCK + HASH_TOKENS]
    there.abandon(lease.number, lease.generation, (), deadline_s=WAIT_S)
    assert there.unpin(1, lease.generation, deadline_s=WAIT_S) is False
    with pytest.raises(IdentityError, match="not a prefix"):
        there.match(KNOWN.digest, replace(CHAIN, tokens=1), 1.0, deadline_s=WAIT_S)
    assert there.counters() == {"catalogue.joined": 1}


def test_a_process_that_is_killed_comes_back_and_calls_fail_meanwhile(bridge: Open) -> None:
    there = bridge("serves")
    assert there.wait(WAIT_S)
    assert there._process is not None
    os.kill(there._process.pid, signal.SIGKILL)
    assert match_when_back(there) is MissReason.NOT_STORED
    counted = there.counters()
    assert (counted["catalogue.joined"], counted["catalogue.lost"]) == (2, 1)


def test_who_waits_when_the_process_dies_is_told_at_once(bridge: Open) -> None:
    there = bridge("slow", retry_s=WAIT_S)
    assert there.wait(WAIT_S)
    future = there._send(7, "match", (KNOWN.digest, CHAIN, 1.0), WAIT_S)
    assert there._process is not None
    os.kill(there._process.pid, signal.SIGKILL)
    with pytest.raises(TierError, match="out of reach"):
        future.result(WAIT_S)
    with pytest.raises(TierError, match="out of reach"):
        match(there)


def test_an_answer_that_does_not_come_costs_one_deadline_and_the_next_callers_nothing(bridge: Open) -> None:
    there = bridge("slow", retry_s=WAIT_S)
    assert there.wait(WAIT_S)
    there.report_absent((), deadline_s=WAIT_S)
    with pytest.raises(DeadlineError):
        match(there, 0.01)
    with pytest.raises(TierError, match="too slow lately"):
        match(there)
    assert {name: number for name, number in there.counters().items() if name != "catalogue.joined"} == {
        "catalogue.late": 1,
        "catalogue.away": 1,
    }


def test_what_cannot_be_joined_yet_is_joined_later(bridge: Open) -> None:
    there = bridge("away then serves")
    assert not there.wait(WAIT_S)
    assert match_when_back(there) is MissReason.NOT_STORED


def test_another_store_is_a_config_error(bridge: Open) -> None:
    there = bridge("refused", retry_s=WAIT_S)
    with pytest.raises(ConfigError, match="file:///a, not file:///b"):
        there.wait(WAIT_S)
    assert there.counters()["catalogue.refused"] == 1


def test_a_process_that_hangs_delays_nobody(bridge: Open) -> None:
    there = bridge("hangs")
    assert not there.wait(0.01)
    with pytest.raises(TierError, match="being joined"):
        match(there)
    assert there.counters() == {"catalogue.away": 1}


def test_the_process_ends_with_the_bridge(bridge: Open) -> None:
    there = bridge("serves")
    assert there.wait(WAIT_S)
    process = there._process
    assert process is not None
    there.close()
    assert process.wait(WAIT_S) != 0
