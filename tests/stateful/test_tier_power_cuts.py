"""What the disk tier's sync policies promise after a power cut, and what holds after a crash at every single step."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tiered_cache.errors import CapacityError
from tiered_cache.testing.faults import FaultyDirectory, SimulatedCrash, Storage, VolatileDirectory
from tiered_cache.testing.tier_suite import get, name_of
from tiered_cache.tiers.base import PutItem, PutOutcome
from tiered_cache.tiers.directory import Directory
from tiered_cache.tiers.disk import DiskTier, SyncPolicy

BUDGET = 200_000
NAMES = 8


def body_of(version: int) -> bytes:
    """At most three sizes, so that files are used again."""
    return version.to_bytes(8, "little") * (1, 700, 3_000)[version % 3]


class Script:
    """A seeded run of calls on one tier, and what each entry may be at any moment (0: not there)."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.possible: dict[int, set[int]] = {n: {0} for n in range(NAMES)}
        self.ever: dict[int, set[int]] = {n: set() for n in range(NAMES)}
        self._version = 0

    def run(self, tier: DiskTier, calls: int) -> None:
        for _ in range(calls):
            numbers = self._rng.sample(range(NAMES), self._rng.randrange(1, 4))
            if self._rng.random() < 0.6:
                self._put(tier, numbers)
                continue
            for n in numbers:
                self.possible[n].add(0)
            if self._rng.random() < 0.8:
                tier.delete([name_of(n) for n in numbers])
            else:
                numbers = numbers[:1]
                tier.quarantine(name_of(numbers[0]), "test")
            for n in numbers:
                self.possible[n] = {0}

    def _put(self, tier: DiskTier, numbers: list[int]) -> None:
        versions = [self._version + index + 1 for index in range(len(numbers))]
        self._version += len(numbers)
        items = [PutItem(name_of(n), [body_of(v)]) for n, v in zip(numbers, versions, strict=True)]
        with contextlib.suppress(CapacityError), tier.reserve([item.bytes for item in items]) as reservation:
            for n, version in zip(numbers, versions, strict=True):
                self.ever[n].add(version)
                self.possible[n].add(version)
            for n, version, outcome in zip(numbers, versions, tier.put(items, reservation), strict=True):
                created = outcome is PutOutcome.CREATED
                self.possible[n] = {version} if created else self.possible[n] - {0, version}

    def seen(self, tier: DiskTier) -> tuple[list[str], list[str]]:
        """Entries that are not whole or another's, and those that are not what they may be."""
        torn, wrong = [], []
        for n, states in self.possible.items():
            body = get(tier, name_of(n))
            version = 0 if body is None else int.from_bytes(body[:8], "little")
            if body is not None and (version not in self.ever[n] or body != body_of(version)):
                torn.append(f"entry {n}")
            elif version not in states:
                wrong.append(f"entry {n} is version {version}, none of {states}")
        return torn, wrong


def open_tier(root: Path, sync: SyncPolicy, storage: Storage | None = None) -> DiskTier:
    opener = Directory if storage is None else storage.open_directory
    return DiskTier(
        root, BUDGET, sync=sync, grace_s=0.0, quarantine_entries=2, spare_bytes=BUDGET, open_directory=opener
    )


def cut_power(tmp_path: Path, sync: SyncPolicy, seed: int) -> tuple[list[str], list[str]]:
    """Work, crash at some step, cut the power, start again on what is left; what `Script.seen` sees."""
    rng = random.Random(seed)
    root, after = tmp_path / f"before{seed}", tmp_path / f"after{seed}"
    script, storage = Script(seed), Storage(root, seed)
    with contextlib.closing(storage):
        tier = open_tier(root, sync, storage)
        directory = tier._directory
        assert isinstance(directory, VolatileDirectory)
        directory.die(len(directory.steps) + rng.randrange(1, 700), half_done=rng.random() < 0.5)
        with contextlib.suppress(SimulatedCrash):
            script.run(tier, 40)
        storage.power_cut(after, seed)
        if directory.dead:
            directory.bury()
        else:
            tier.close()
    with open_tier(after, sync) as tier:
        torn, wrong = script.seen(tier)
        usage = tier.usage()
        assert usage.bytes_used == sum(tier.footprint(entry.bytes) for entry in tier.list())
        assert usage.bytes_reserved == 0
    return torn, wrong


SEEDS = range(40)


@pytest.mark.parametrize("sync", [SyncPolicy.FULL, SyncPolicy.DATA])
def test_a_power_cut_tears_nothing_and_loses_only_what_the_policy_says(tmp_path: Path, sync: SyncPolicy) -> None:
    lost: list[str] = []
    for seed in SEEDS:
        torn, wrong = cut_power(tmp_path, sync, seed)
        assert not torn, (seed, torn)
        lost += [text for text in wrong if "version 0," in text]  # a removed one may come back, whole
    assert (not lost) is (sync is SyncPolicy.FULL), "DATA does not sync names, so some must have gone"


def test_without_syncs_a_power_cut_tears_entries(tmp_path: Path) -> None:
    """The test above can fail: it does for the policy that promises nothing."""
    assert any(cut_power(tmp_path, SyncPolicy.NEVER, seed)[0] for seed in SEEDS)


@pytest.mark.parametrize("call", ["sync", "sync_directory"])
def test_each_sync_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """With either kind of sync taken out, the policy that promises most breaks its promise."""
    monkeypatch.setattr(VolatileDirectory, call, lambda *_: None)
    outcomes = [cut_power(tmp_path, SyncPolicy.FULL, seed) for seed in SEEDS]
    assert any(torn or any("version 0," in text for text in wrong) for torn, wrong in outcomes)


def test_a_file_is_used_again_only_when_its_old_name_is_gone_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The DATA policy syncs names for that alone: without, a power cut shows another's bytes under a deleted name."""
    monkeypatch.setattr(VolatileDirectory, "sync_directory", lambda *_: None)
    assert any(cut_power(tmp_path, SyncPolicy.DATA, seed)[0] for seed in SEEDS)


def open_faulty(root: Path) -> tuple[DiskTier, FaultyDirectory]:
    tier = DiskTier(root, BUDGET, sync=SyncPolicy.FULL, grace_s=0.0, spare_bytes=BUDGET, open_directory=FaultyDirectory)
    assert isinstance(tier._directory, FaultyDirectory)
    return tier, tier._directory


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_a_crash_at_any_step_loses_nothing(tmp_path: Path, every: int) -> None:
    """The process dies before, in the midst of or after each system call of a run; its files stay as they are."""
    tier, directory = open_faulty(tmp_path / "whole")
    opening = len(directory.steps)
    with tier:
        Script(3).run(tier, 14)
        steps = len(directory.steps)
    for step in range(opening + 1, steps + 1, every):
        for half_done in (False, True):
            root, script = tmp_path / f"{step}{half_done}", Script(3)
            tier, directory = open_faulty(root)
            directory.die(step, half_done=half_done)
            with pytest.raises(SimulatedCrash):
                script.run(tier, 14)
            directory.bury()
            with open_tier(root, SyncPolicy.FULL) as tier:
                assert script.seen(tier) == ([], []), (step, half_done, directory.steps[-3:])
                usage = tier.usage()
                assert usage.bytes_used == sum(tier.footprint(entry.bytes) for entry in tier.list())
                assert usage.bytes_reserved == 0
