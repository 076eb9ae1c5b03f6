"""Tiers against a plain dict: any sequence of calls leaves what the dict has, and books that are right to the byte."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiered_cache.errors import CapacityError, FrameNotFoundError
from tiered_cache.testing.tier_suite import body_of, name_of
from tiered_cache.tiers.base import GetRequest, PutItem, PutOutcome, Reservation, Tier
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.host import HostTier

BUDGET = 300_000
QUARANTINE_ENTRIES = 3
QUARANTINE_BYTES = 60_000
names = st.integers(0, 9).map(name_of)
sizes = st.one_of(st.integers(0, 100), st.integers(0, 5_000), st.sampled_from([4_096, 20_000, 90_000]))


class TierMachine(RuleBasedStateMachine):
    """The oracle: entries, what is in quarantine, what is reserved, views that must stay as they were."""

    tier: Tier

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="tier"))
        self.tier = self.make_tier()
        self.entries: dict[str, bytes] = {}
        self.quarantine: list[tuple[str, int]] = []
        self.reservations: list[Reservation] = []
        self.views: list[tuple[memoryview, bytes]] = []
        self.limit = BUDGET
        self.version = 0

    def make_tier(self) -> Tier:
        raise NotImplementedError

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.directory)

    def free(self) -> int:
        held = [len(body) for body in self.entries.values()] + [size for _, size in self.quarantine]
        return self.limit - sum(map(self.tier.footprint, held)) - sum(each.bytes for each in self.reservations)

    @rule(wanted=st.lists(st.tuples(names, sizes), max_size=4))
    def put(self, wanted: Sequence[tuple[str, int]]) -> None:
        self.views.clear()  # views of deleted entries hold room, which the oracle does not count
        items = []
        for path, size in wanted:
            self.version += 1
            body = body_of(path, self.version, size)
            items.append(PutItem(path, [body[: size // 3], body[size // 3 :]]))
        need = sum(self.tier.footprint(size) for _, size in wanted)
        try:
            reservation = self.tier.reserve([size for _, size in wanted])
        except CapacityError:
            assert need > self.free()
            return
        assert need <= self.free()
        with reservation:
            outcomes = self.tier.put(items, reservation)
        for item, outcome in zip(items, outcomes, strict=True):
            assert (outcome is PutOutcome.EXISTS) is (item.path in self.entries)
            self.entries.setdefault(item.path, b"".join(item.buffers))

    @rule(size=sizes)
    def reserve(self, size: int) -> None:
        self.views.clear()
        if self.tier.footprint(size) <= self.free():
            self.reservations.append(self.tier.reserve([size]))
        else:
            with pytest.raises(CapacityError):
                self.tier.reserve([size])

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reservation = self.reservations.pop(data.draw(st.integers(0, len(self.reservations) - 1)))
        reservation.release()
        reservation.release()

    @rule(wanted=st.lists(st.tuples(names, st.integers(0, 100_000), st.none() | st.integers(0, 100_000)), max_size=3))
    def get(self, wanted: Sequence[tuple[str, int, int | None]]) -> None:
        answers = self.tier.get([GetRequest(*each) for each in wanted])
        for (path, offset, length), answer in zip(wanted, answers, strict=True):
            if path not in self.entries:
                assert isinstance(answer, FrameNotFoundError)
                continue
            assert isinstance(answer, memoryview)
            body = self.entries[path][offset:]
            assert answer == (body if length is None else body[:length])
            self.views.append((answer, bytes(answer)))

    @rule(paths=st.lists(names, max_size=4))
    def delete(self, paths: Sequence[str]) -> None:
        there = [self.entries.pop(path, None) is not None for path in paths]
        assert list(self.tier.delete(paths)) == there

    @rule(path=names)
    def set_aside(self, path: str) -> None:
        body = self.entries.pop(path, None)
        assert self.tier.quarantine(path, "test") is (body is not None)
        if body is not None:
            self.quarantine.append((path, len(body)))
            while (
                len(self.quarantine) > QUARANTINE_ENTRIES
                or sum(self.tier.footprint(size) for _, size in self.quarantine) > QUARANTINE_BYTES
            ):
                self.quarantine.pop(0)

    @rule(limit=st.integers(0, BUDGET))
    def change_limit(self, limit: int) -> None:
        self.views.clear()
        self.limit = limit
        assert self.tier.set_limit(limit) == max(0, -self.free())

    @invariant()
    def the_tier_holds_what_the_oracle_holds(self) -> None:
        assert {entry.path: entry.bytes for entry in self.tier.list()} == {p: len(b) for p, b in self.entries.items()}
        assert [(entry.path, entry.bytes) for entry in self.tier.quarantined()] == self.quarantine
        for view, body in self.views:
            assert view == body
        usage = self.tier.usage()
        assert usage.entries == len(self.entries)
        assert usage.bytes_quarantined == sum(self.tier.footprint(size) for _, size in self.quarantine)
        assert usage.bytes_reserved == sum(each.bytes for each in self.reservations)
        if not self.views:
            assert usage.bytes_free == self.free()


class HostMachine(TierMachine):
    def make_tier(self) -> Tier:
        return HostTier(BUDGET, quarantine_entries=QUARANTINE_ENTRIES, quarantine_bytes=QUARANTINE_BYTES)


class DiskMachine(TierMachine):
    def make_tier(self) -> Tier:
        return DiskTier(
            self.directory / "tier",
            BUDGET,
            sync=SyncPolicy.NEVER,
            spare_bytes=BUDGET,
            quarantine_entries=QUARANTINE_ENTRIES,
            quarantine_bytes=QUARANTINE_BYTES,
        )

    @rule(clean=st.booleans())
    def open_again(self, clean: bool) -> None:
        """`clean`: as the ledger was left; otherwise as after a power cut, when it is counted anew."""
        self.tier.close()
        self.reservations.clear()
        if not clean:
            (self.directory / "tier/ledger").write_bytes(b"\0" * 100)
        self.tier = self.make_tier()
        assert self.tier.set_limit(self.limit) == max(0, -self.free())


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
