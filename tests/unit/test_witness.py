"""What is known of a tier that died with its process: what was in it, no more, whatever the moment of its death."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from spilling import IDENTITY, MIXED, State, match, node, open_disk, open_host, some_tokens, spill

from tiered_cache.errors import CapacityError, MissReason, TierError
from tiered_cache.testing.tier_suite import name_of, put
from tiered_cache.tiers import witness as witness_module
from tiered_cache.tiers.base import Durability, PutItem
from tiered_cache.tiers.witness import Witness, WitnessedTier

SLOTS = 5
PROMPT, OTHER = State(MIXED, some_tokens(15)), State(MIXED, some_tokens(15, seed=1))


def die(witness: Witness) -> None:
    """Leave the file as the death of its process does: as it is, and unlocked."""
    witness.flush(10)
    witness._is_over = True
    os.close(witness._file)


class WitnessMachine(RuleBasedStateMachine):
    """Beside a dict of what is there."""

    @initialize()
    def begin(self) -> None:
        self.path = Path(tempfile.mkdtemp()) / "names"
        self.witness = Witness(self.path, SLOTS)
        self.there: dict[str, int] = {}

    @rule(number=st.integers(0, 8), size=st.integers(0, 2**64 - 1))
    def note(self, number: int, size: int) -> None:
        self.witness.note(name_of(number), size)
        if len(self.there) < SLOTS:
            self.there.setdefault(name_of(number), size)

    @rule(numbers=st.lists(st.integers(0, 8)))
    def strike(self, numbers: list[int]) -> None:
        self.witness.strike(map(name_of, numbers))
        for number in numbers:
            self.there.pop(name_of(number), None)

    @rule()
    def die(self) -> None:
        die(self.witness)
        self.witness = Witness(self.path, SLOTS)
        assert {entry.path: entry.bytes for entry in self.witness.lost} == self.there
        self.there = {}

    @rule()
    def close(self) -> None:
        self.witness.close()
        self.witness.close()
        assert not self.path.exists()
        self.witness = Witness(self.path, SLOTS)
        assert not self.witness.lost
        self.there = {}

    def teardown(self) -> None:
        self.witness.close()
        self.path.parent.rmdir()


WitnessMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestWitness = WitnessMachine.TestCase


def test_one_file_has_one_witness(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "names")
    with pytest.raises(TierError, match="names"):
        Witness(tmp_path / "names")
    with pytest.raises(TierError, match="nowhere"):
        Witness(tmp_path / "nowhere" / "names")
    (tmp_path / "elsewhere").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError, match="link"):
        Witness(tmp_path / "link")
    witness.close()
    Witness(tmp_path / "names").close()


@pytest.mark.parametrize("content", [b"\xff" * 1000, b"\x05\x00" + bytes(300), b"\x03\x00" + bytes(8) + b"../", b"x"])
def test_what_is_no_name_is_a_free_place(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "names").write_bytes(content)
    witness = Witness(tmp_path / "names")
    assert witness.lost == []
    witness.note("a/b", 7)
    die(witness)
    assert [(entry.path, entry.bytes) for entry in Witness(tmp_path / "names").lost] == [("a/b", 7)]


def test_a_name_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "names")
    witness.note("a/" + "b" * 180 + "/" + "c" * 180, 7)
    witness.strike(["a/" + "b" * 180 + "/" + "c" * 180])
    die(witness)
    assert Witness(tmp_path / "names").lost == []


def test_a_witness_that_cannot_write_says_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier does not notice; the next process is told nothing that may be wrong."""
    witness = Witness(tmp_path / "names")
    tier = WitnessedTier(open_host(), witness)
    put(tier, ("a/b", b"1"))
    witness.flush(10)
    write = os.pwrite

    def full(fd: int, content: bytes, offset: int, /) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "pwrite", full)
    put(tier, ("a/c", b"2"))
    witness.flush(10)
    monkeypatch.setattr(os, "pwrite", write)
    put(tier, ("a/d", b"3"))
    witness.flush(10)
    assert tier.delete(["a/b", "a/c"]) == [True, True]
    assert not (tmp_path / "names").exists()
    tier.close()


def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, write = threading.Event(), os.pwrite

    def hang(fd: int, content: bytes, offset: int, /) -> int:
        hangs.wait()
        return write(fd, content, offset)

    monkeypatch.setattr(os, "pwrite", hang)
    monkeypatch.setattr(witness_module, "CLOSE_S", 0.1)
    witness = Witness(tmp_path / "names")
    tier = WitnessedTier(open_host(), witness)
    for number in range(witness_module.UNWRITTEN_MAX + 5):
        witness.note(name_of(number), 1)
    put(tier, ("a/b", b"1"))
    assert tier.delete(["a/b"]) == [True]
    tier.close()
    hangs.set()
    witness.flush(10)
    assert not (tmp_path / "names").exists()


def test_who_opens_while_another_closes_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Witness(tmp_path / "names")
    first.note("a/b", 1)
    lock = fcntl.flock

    def late(fd: int, how: int, /) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        first.close()  # between the open and the lock of the second
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = Witness(tmp_path / "names")
    assert not second.lost
    second.note("a/c", 1)
    die(second)
    assert [entry.path for entry in Witness(tmp_path / "names").lost] == ["a/c"]


def test_only_what_the_tier_holds_is_noted(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "names")
    tier = WitnessedTier(open_host(), witness)
    put(tier, ("a/kept", b"1"), ("a/deleted", b"22"), ("a/bad", b"333"))
    put(tier, ("a/kept", b"again"))
    tier.delete(["a/deleted"])
    tier.quarantine("a/bad", "flipped")
    with pytest.raises(CapacityError), tier.reserve([1]) as reservation:
        tier.put([PutItem("a/large", [bytes(100_000)])], reservation)
    with pytest.raises(TierError, match="not a path"), tier.reserve([1]) as reservation:
        tier.put([PutItem("a/kept", [b"1"]), PutItem("../a", [b"1"])], reservation)
    die(witness)
    assert [(entry.path, entry.bytes) for entry in Witness(tmp_path / "names").lost] == [("a/kept", tier.footprint(1))]


def lives(directory: Path, *spills: tuple[State, Durability]) -> list[MissReason | int | None]:
    """A process over the directory's disk tier and memory: what it says of both prompts before it spills these."""
    witness = Witness(directory / "names")
    with node(WitnessedTier(open_host(), witness), open_disk(directory / "disk"), checked=False) as cache:
        answers: list[MissReason | int | None] = []
        for state in (PROMPT, OTHER):
            found = match(cache, MIXED, np.append(state.tokens, state.tokens[:1]))
            answers.append(found.hit.tokens if found.hit else found.reason)
        for state, durability in spills:
            assert spill(cache, state, durability=durability).kept
        counters = cache.counters()
        assert counters.get("frames.host.lost", 0) <= counters.get("frames.host.found", 0)
        die(witness)  # so that its close is none
    return answers


def test_what_died_with_memory_is_missed_as_lost_and_what_the_disk_has_is_not(tmp_path: Path) -> None:
    not_there = MissReason.NOT_STORED
    assert lives(tmp_path, (PROMPT, Durability.HOST), (OTHER, Durability.DISK)) == [not_there, not_there]
    assert lives(tmp_path) == [MissReason.LOST, 15]
    assert lives(tmp_path, (PROMPT, Durability.DISK)) == [not_there, 15]  # a death is told once
    assert lives(tmp_path) == [15, 15]


def test_what_is_left_of_it_on_disk_does_not_hide_that_it_was_lost(tmp_path: Path) -> None:
    """Rows that no checkpoint there needs, or that a longer one does."""
    longer = State(MIXED, np.concatenate([PROMPT.tokens[:8], some_tokens(10, seed=3)]))
    witness = Witness(tmp_path / "names")
    with node(WitnessedTier(open_host(), witness), open_disk(tmp_path / "disk"), checked=False) as cache:
        spill(cache, longer, durability=Durability.DISK)
        spill(cache, PROMPT, 8, 15)
        die(witness)
    with node(WitnessedTier(open_host(), Witness(tmp_path / "names")), open_disk(tmp_path / "disk")) as cache:
        assert match(cache, MIXED, PROMPT.tokens[:9]).reason is MissReason.LOST


def test_a_namespace_whose_frames_died_is_missed_as_lost(tmp_path: Path) -> None:
    namespace = PROMPT.chain.namespace
    lives(tmp_path, (PROMPT, Durability.HOST))
    tier = WitnessedTier(open_host(), Witness(tmp_path / "names"))
    with node(tier, geometries=()) as cache:
        assert cache.why_unknown(namespace) is MissReason.LOST
        assert cache.why_unknown(bytes(32)) is MissReason.NAMESPACE
        cache.register(IDENTITY, MIXED)
        assert match(cache, MIXED, PROMPT.tokens).reason is MissReason.LOST
        assert match(cache, MIXED, some_tokens(15, seed=2)).reason is MissReason.NOT_STORED


def test_lost_frames_are_counted(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "names")
    with node(WitnessedTier(open_host(), witness), checked=False) as cache:
        spill(cache, PROMPT)
        usage = cache.usage()["host"]
        die(witness)
    with node(WitnessedTier(open_host(), Witness(tmp_path / "names"))) as cache:  # its books are checked
        counters = cache.counters()
        assert counters["frames.host.lost"] == counters["frames.host.found"] == usage.entries > 3
        assert counters["bytes.host.lost"] == usage.bytes_used
    assert not (tmp_path / "names").exists()
