"""The promises every tier keeps, as a test class to inherit from.

    class TestMyTier(TierTests):
        outlives_close = True                   # whether entries are there when the place is opened again

        def make_tier(self, directory, bytes_max):
            return MyTier(directory, bytes_max)

Needs pytest (the `test` extra).
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tiered_cache.errors import CapacityError, FrameNotFoundError, TierError
from tiered_cache.tiers.base import (
    ALIGNMENT,
    GetAnswer,
    GetRequest,
    PutItem,
    PutOutcome,
    QuarantinedEntry,
    Tier,
    TierEntry,
    reason_slug,
)

BUDGET = 32 << 20
SIZES = (0, 1, 63, 64, 65, 511, 512, 513, 4095, 4096, 20_000, 70_001, 1 << 20, (3 << 20) + 7)
NAMESPACE = "0f" * 32


def name_of(number: int) -> str:
    """A path as frames have it."""
    return f"{NAMESPACE}/{number % 256:02x}/{number:064x}-{number + 1:064x}-w.128-{number + 1}-0"


def seeded(seed: int | str) -> random.Random:
    """Random numbers for tests, the same in every run."""
    return random.Random(seed)  # noqa: S311 - nothing here is a secret


def body_of(path: str, version: int, size: int) -> bytes:
    """What an entry holds: other bytes for every path, version and size."""
    return seeded(f"{path} {version} {size}").randbytes(size)


def put(tier: Tier, *items: tuple[str, bytes]) -> list[PutOutcome]:
    """Reserve, put and release."""
    with tier.reserve([len(body) for _, body in items]) as reservation:
        return list(tier.put([PutItem(path, [body]) for path, body in items], reservation))


def get(tier: Tier, path: str) -> bytes | None:
    """The whole entry; None if it is verified not to be there."""
    (answer,) = tier.get([GetRequest(path)])
    if isinstance(answer, memoryview):
        return bytes(answer)
    if isinstance(answer, TierError):
        raise answer
    return None


def bytes_of(answer: GetAnswer) -> memoryview:
    """An answer that has to be bytes."""
    assert isinstance(answer, memoryview), answer
    return answer


class TierTests(ABC):
    """Subclass, define `make_tier`, and pytest runs every check."""

    outlives_close: ClassVar[bool] = False

    @abstractmethod
    def make_tier(self, directory: Path, bytes_max: int) -> Tier:
        """An open tier on a place that belongs to `directory`; the same directory, the same place."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        with self.make_tier(tmp_path / "tier", BUDGET) as tier:
            yield tier

    def charged(self, tier: Tier) -> int:
        """What the budget should show as used, and `usage` is checked to be whole."""
        entries = list(tier.list())
        usage = tier.usage()
        assert usage.entries == len(entries)
        assert usage.bytes_used + usage.bytes_reserved + usage.bytes_quarantined + usage.bytes_free == usage.bytes_max
        return sum(tier.footprint(entry.bytes) for entry in entries)

    # Bytes

    def test_what_was_put_comes_back(self, tier: Tier) -> None:
        bodies = {name_of(size): body_of("", 0, size) for size in SIZES}
        assert put(tier, *bodies.items()) == [PutOutcome.CREATED] * len(bodies)
        answers = tier.get([GetRequest(path) for path in bodies])
        assert [bytes(bytes_of(answer)) for answer in answers] == list(bodies.values())
        assert list(tier.stat(list(bodies))) == [len(body) for body in bodies.values()]
        assert sorted(tier.list(), key=lambda entry: entry.bytes) == [TierEntry(p, len(b)) for p, b in bodies.items()]

    def test_an_entry_is_its_buffers_joined(self, tier: Tier) -> None:
        head, array, tail = b"head", np.arange(5_000, dtype=np.uint32), bytearray(b"tail")
        item = PutItem(name_of(0), [head, b"", array.data, memoryview(b""), *[b"x"] * 3_000, tail])
        with tier.reserve([item.bytes]) as reservation:
            tier.put([item], reservation)
        assert get(tier, name_of(0)) == head + array.tobytes() + b"x" * 3_000 + tail

    @pytest.mark.parametrize("size", [0, 1, 20_000, (2 << 20) + 3])
    def test_ranges_end_with_the_entry(self, tier: Tier, size: int) -> None:
        body = body_of("", 1, size)
        put(tier, (name_of(0), body))
        for offset in {0, 1, size // 2, max(0, size - 1), size, size + 1, size + (1 << 40)}:
            for length in {None, 0, 1, 64, size // 2, size, size + 1, 1 << 40}:
                (answer,) = tier.get([GetRequest(name_of(0), offset, length)])
                assert bytes_of(answer) == (body[offset:] if length is None else body[offset : offset + length])

    def test_into_is_filled_from_its_beginning_and_no_further(self, tier: Tier) -> None:
        body = body_of("", 2, 10_000)
        put(tier, (name_of(0), body))
        for room, offset, length in (
            (12_000, 0, None),
            (10_000, 0, None),
            (100, 0, None),
            (300, 9_900, None),
            (64, 8, 9),
        ):
            buffer = bytearray(b"\xa5" * (room + 16))
            into = memoryview(buffer)[8 : 8 + room]
            (answer,) = tier.get([GetRequest(name_of(0), offset, length, into)])
            wanted = body[offset:][: room if length is None else min(room, length)]
            assert bytes_of(answer) == wanted
            assert bytes(buffer) == b"\xa5" * 8 + wanted + b"\xa5" * (room + 8 - len(wanted))
            into[:1] = b"\x00"
            assert not wanted or bytes_of(answer)[0] == 0, "the answer is `into` itself"

    def test_views_are_read_only_and_aligned(self, tier: Tier) -> None:
        put(tier, (name_of(0), bytes(5_000)), (name_of(1), bytes(3 << 20)))
        for answer in tier.get([GetRequest(name_of(0)), GetRequest(name_of(1)), GetRequest(name_of(1), 4_096)]):
            assert bytes_of(answer).readonly
            assert np.frombuffer(bytes_of(answer), dtype=np.uint8).ctypes.data % ALIGNMENT == 0

    def test_a_view_outlives_its_entry(self, tier: Tier) -> None:
        body = body_of("", 3, 1 << 20)
        put(tier, (name_of(0), body))
        view = bytes_of(tier.get([GetRequest(name_of(0))])[0])
        part = view[1_000:2_000]
        tier.delete([name_of(0)])
        for number in range(1, 20):
            put(tier, (name_of(number), body_of("", number, 1 << 20)))
        assert view == body
        del view
        tier.delete([name_of(1)])
        put(tier, (name_of(99), bytes(1 << 20)))
        assert part == body[1_000:2_000]
        tier.close()
        assert part == body[1_000:2_000]

    # Names

    def test_a_second_create_changes_nothing(self, tier: Tier) -> None:
        put(tier, (name_of(0), b"first"))
        before = self.charged(tier)
        assert put(tier, (name_of(0), b"second, longer")) == [PutOutcome.EXISTS]
        assert get(tier, name_of(0)) == b"first"
        assert tier.usage().bytes_used == before == self.charged(tier)
        assert tier.usage().bytes_reserved == 0

    def test_a_batch_answers_each_item(self, tier: Tier) -> None:
        put(tier, (name_of(1), b"old"))
        outcomes = put(tier, (name_of(0), b"a"), (name_of(1), b"b"), (name_of(2), b"c"), (name_of(2), b"d"))
        created, exists = PutOutcome.CREATED, PutOutcome.EXISTS
        assert outcomes == [created, exists, created, exists]
        assert [get(tier, name_of(n)) for n in range(3)] == [b"a", b"old", b"c"]
        assert tier.usage().bytes_used == self.charged(tier)
        assert put(tier) == []

    def test_an_absence_is_an_answer(self, tier: Tier) -> None:
        put(tier, (name_of(0), b"here"))
        absent, here, nowhere = tier.get([GetRequest(name_of(1)), GetRequest(name_of(0)), GetRequest("../escape")])
        assert isinstance(absent, FrameNotFoundError)
        assert absent.key == name_of(1)
        assert bytes(bytes_of(here)) == b"here"
        assert isinstance(nowhere, FrameNotFoundError)
        assert list(tier.stat([name_of(1), name_of(0), ""])) == [None, 4, None]
        assert list(tier.delete([name_of(1), name_of(0), name_of(0), "/etc/passwd"])) == [False, True, False, False]
        assert tier.quarantine(name_of(0), "gone") is False

    def test_a_deleted_name_is_free_again(self, tier: Tier) -> None:
        for version in range(5):
            body = body_of("", version, 50_000 + version)
            assert put(tier, (name_of(0), body)) == [PutOutcome.CREATED]
            assert get(tier, name_of(0)) == body
            assert list(tier.delete([name_of(0)])) == [True]
            assert get(tier, name_of(0)) is None
        assert tier.usage().bytes_used == 0

    @pytest.mark.parametrize(
        "path",
        [
            "",
            "/",
            "a/",
            "/a",
            "../a",
            "a/../b",
            "a//b",
            ".",
            "a/.",
            "A",
            "a b",
            "a\n",
            "a\0",
            "ä",
            "a" * 201,
            "/".join("a" * 9),
        ],
    )
    def test_what_cannot_name_an_entry_is_refused(self, tier: Tier, path: str) -> None:
        with pytest.raises(TierError, match="path"):
            put(tier, (name_of(0), b"x"), (path, b"y"))
        assert list(tier.list()) == []
        assert tier.usage().bytes_used == tier.usage().bytes_reserved == 0

    def test_a_name_may_begin_like_another(self, tier: Tier) -> None:
        paths = ["a", "a.b", "a/b", "a/b/c", "a-b", "a" * 200, "0/1/2/3/4/5/6/7"]
        put(tier, *((path, path.encode()) for path in paths))
        assert [get(tier, path) for path in paths] == [path.encode() for path in paths]
        assert sorted(entry.path for entry in tier.list("a")) == sorted(paths[:-1])
        assert sorted(entry.path for entry in tier.list("a/b")) == ["a/b", "a/b/c"]
        assert [entry.path for entry in tier.list("0/1/2/3")] == paths[-1:]
        assert list(tier.list("a/c")) == []

    # The budget

    def test_nothing_is_written_without_room(self, tier: Tier) -> None:
        free = tier.usage().bytes_free
        with pytest.raises(CapacityError):
            tier.reserve([free + 1])
        assert tier.usage().bytes_free == free
        with tier.reserve([100]) as reservation:
            assert tier.usage().bytes_reserved == reservation.bytes == tier.footprint(100) >= 100
            items = [PutItem(name_of(0), [bytes(100)]), PutItem(name_of(1), [bytes(1)])]
            with pytest.raises(CapacityError):
                tier.put(items, reservation)
            assert list(tier.list()) == []
            assert reservation.bytes == tier.footprint(100)
            tier.put(items[:1], reservation)
            assert reservation.bytes == 0
        reservation.release()
        assert tier.usage().bytes_reserved == 0
        with pytest.raises(CapacityError, match="released"):
            tier.put(items[1:], reservation)

    def test_room_depends_on_sums_alone(self, tier: Tier) -> None:
        """However the sizes mix: what `usage` says is free can be reserved, and what was reserved can be put."""
        rng, bodies, number = seeded(5), dict[str, bytes](), 0
        for _ in range(300):
            size = rng.choice((rng.randrange(3_000), rng.randrange(200_000), rng.randrange(3 << 20)))
            if tier.footprint(size) > tier.usage().bytes_free:
                with pytest.raises(CapacityError):
                    tier.reserve([size])
                for path in rng.sample(sorted(bodies), max(1, len(bodies) // 8)):
                    assert get(tier, path) == bodies.pop(path)
                    tier.delete([path])
                continue
            path = name_of(number := number + 1)
            bodies[path] = body_of(path, 0, size)
            put(tier, (path, bodies[path]))
        assert tier.usage().bytes_used == self.charged(tier)
        assert {path: get(tier, path) for path in bodies} == bodies

    def test_a_smaller_limit_refuses_until_it_fits(self, tier: Tier) -> None:
        put(tier, *((name_of(n), bytes(1 << 20)) for n in range(20)))
        each = tier.footprint(1 << 20)
        assert tier.set_limit(15 * each) == 5 * each
        assert tier.bytes_max == tier.usage().bytes_max == 15 * each
        for n in range(5):
            with pytest.raises(CapacityError):
                tier.reserve([1])
            tier.delete([name_of(n)])
        with pytest.raises(CapacityError):
            tier.reserve([1])
        tier.delete([name_of(5)])
        put(tier, (name_of(30), bytes(1 << 20)))
        assert tier.set_limit(BUDGET) == 0
        put(tier, (name_of(31), bytes(1 << 20)))

    # Quarantine

    def test_a_bad_entry_is_set_aside_and_stays_charged(self, tier: Tier) -> None:
        put(tier, (name_of(0), b"bad" * 1_000), (name_of(1), b"good"))
        assert tier.quarantine(name_of(0), "Checksum: 1 != 2!") is True
        assert get(tier, name_of(0)) is None
        assert get(tier, name_of(1)) == b"good"
        assert list(tier.quarantined()) == [QuarantinedEntry(name_of(0), reason_slug("Checksum: 1 != 2!"), 3_000)]
        assert tier.usage().bytes_quarantined == tier.footprint(3_000)
        assert tier.usage().bytes_used == self.charged(tier) == tier.footprint(4)
        assert put(tier, (name_of(0), b"better")) == [PutOutcome.CREATED]
        assert tier.quarantine(name_of(0), "again") is True
        assert [entry.reason for entry in tier.quarantined()] == ["checksum-1-2", "again"]

    def test_quarantine_is_bounded_and_the_oldest_go_first(self, tier: Tier) -> None:
        for n in range(200):
            put(tier, (name_of(n), bytes(1_000)))
            tier.quarantine(name_of(n), "bad")
        kept = [entry.path for entry in tier.quarantined()]
        assert 0 < len(kept) < 200
        assert kept == [name_of(n) for n in range(200 - len(kept), 200)]
        put(tier, (name_of(0), bytes(BUDGET // 2)))
        tier.quarantine(name_of(0), "large")
        assert tier.usage().bytes_quarantined < BUDGET // 4
        assert tier.usage().bytes_used == 0
        assert get(tier, name_of(0)) is None

    # Threads

    def test_of_racing_creates_one_wins(self, tier: Tier) -> None:
        start = threading.Barrier(8)

        def race(version: int) -> list[PutOutcome]:
            start.wait(30)
            return put(tier, *((name_of(n), body_of("", version, 5_000)) for n in range(10)))

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(race, range(8)))
        for n in range(10):
            winners = [version for version in range(8) if outcomes[version][n] is PutOutcome.CREATED]
            assert len(winners) == 1
            assert get(tier, name_of(n)) == body_of("", winners[0], 5_000)
        assert tier.usage().bytes_used == self.charged(tier)
        assert tier.usage().bytes_reserved == 0

    def test_readers_see_whole_entries_whatever_others_do(self, tier: Tier) -> None:
        """Names come and go, and memory and files are used again: no answer mixes two entries."""
        paths = [name_of(n) for n in range(6)]
        sizes = (3_000, 40_000, 300_000)
        deadline = threading.Event()
        began = {seed: threading.Event() for seed in range(6)}

        def write(seed: int) -> int:
            rng, version = seeded(seed), 0
            while not deadline.is_set():
                path, version = rng.choice(paths), version + 1
                tag = (seed * 100_000 + version).to_bytes(4, "little")
                put(tier, (path, tag * rng.choice(sizes)))
                if rng.random() < 0.8:
                    tier.delete([rng.choice(paths)])
                elif rng.random() < 0.2:
                    tier.quarantine(rng.choice(paths), "test")
                began[seed].set()
            return version

        def read(seed: int) -> int:
            rng, whole = seeded(seed), 0
            into = np.empty(4 * max(sizes), dtype=np.uint8)
            while not deadline.is_set():
                room = into.data if rng.random() < 0.5 else None
                (answer,) = tier.get([GetRequest(rng.choice(paths), into=room)])
                if isinstance(answer, memoryview):
                    words = np.frombuffer(answer, dtype=np.uint32)
                    assert words.size in sizes
                    assert (words == words[0]).all(), "an answer mixes entries"
                    whole += 1
                    began[seed].set()
                else:
                    assert isinstance(answer, FrameNotFoundError), answer
            return whole

        with ThreadPoolExecutor(6) as pool:
            written = [pool.submit(write, seed) for seed in range(2)]
            seen = [pool.submit(read, seed) for seed in range(2, 6)]
            deadline.wait(1.5)
            assert all(event.wait(60) for event in began.values()), "each has written, or read something whole"
            deadline.set()
            assert all(future.result(60) for future in (*written, *seen))
        assert tier.usage().bytes_used == self.charged(tier)
        assert tier.usage().bytes_reserved == 0

    def test_threads_never_reserve_more_than_there_is(self, tier: Tier) -> None:
        def reserve(seed: int) -> int:
            rng, granted = seeded(seed), 0
            for _ in range(60):
                try:
                    with tier.reserve([rng.randrange(BUDGET // 3)]):
                        granted += 1
                        assert tier.usage().bytes_free >= 0
                except CapacityError:
                    pass
            return granted

        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(reserve, range(6)))
        assert tier.usage().bytes_reserved == 0

    # The end

    def test_a_closed_tier_refuses(self, tier: Tier) -> None:
        reservation = tier.reserve([10])
        put(tier, (name_of(0), b"x"))
        tier.close()
        tier.close()
        reservation.release()
        calls: Sequence[Callable[[], object]] = (
            lambda: tier.reserve([1]),
            lambda: tier.put([PutItem(name_of(1), [b""])], reservation),
            lambda: tier.get([GetRequest(name_of(0))]),
            lambda: tier.stat([name_of(0)]),
            lambda: list(tier.list()),
            lambda: tier.delete([name_of(0)]),
            lambda: tier.quarantine(name_of(0), "x"),
            tier.quarantined,
            tier.usage,
            lambda: tier.set_limit(1),
        )
        for call in calls:
            with pytest.raises(TierError, match="closed"):
                call()

    def test_what_is_there_when_the_place_is_opened_again(self, tmp_path: Path) -> None:
        bodies = {name_of(n): body_of("", n, 2_000 * n) for n in range(20)}
        with self.make_tier(tmp_path / "tier", BUDGET) as tier:
            put(tier, *bodies.items())
            tier.delete([name_of(0)])
            tier.quarantine(name_of(1), "bad")
            before = tier.usage()
        with self.make_tier(tmp_path / "tier", BUDGET) as tier:
            found = {entry.path: get(tier, entry.path) for entry in tier.list()}
            if self.outlives_close:
                assert found == dict(list(bodies.items())[2:])
                assert [entry.path for entry in tier.quarantined()] == [name_of(1)]
                assert tier.usage() == before
            else:
                assert found == {}
                assert tier.usage().bytes_free == BUDGET
