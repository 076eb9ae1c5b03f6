"""vLLM's chunks as frames, without vLLM: what can be loaded is what was brought, whole and of one length, or less."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.cache import TieredCache
from tiered_cache.check import check_directory
from tiered_cache.config import TierSettings
from tiered_cache.engines.vllm import pages
from tiered_cache.engines.vllm.layout import Bytes, PageGroup, PageLayout
from tiered_cache.engines.vllm.pages import PageStore, Plan, Progress
from tiered_cache.engines.vllm.settings import VllmSettings, kv_transfer_config
from tiered_cache.engines.vllm.workers import TimedJob
from tiered_cache.errors import ConfigError, GeometryError, MissReason
from tiered_cache.geometry import PartKind
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.service.build import build_cache
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import SyncPolicy

IDENTITY = Identity(weights_digest=bytes(32), engine="vllm", engine_revision="test")
ROWS = PageGroup(0, PartKind.ROWS, 16, ((0, 1000),))
ROWS_TOO = PageGroup(3, PartKind.ROWS, 16, ((1000, 1800),))
WINDOW = PageGroup(1, PartKind.WINDOW, 16, ((0, 700),), window_tokens=16)
CARRY = PageGroup(2, PartKind.CARRY, 16, ((100, 612), (900, 1000)))
SMALL_CHUNKS = PageGroup(4, PartKind.ROWS, 4, ((0, 100),))

LAYOUTS = {
    "rows": (ROWS,),
    "two row groups": (ROWS, ROWS_TOO),
    "window": (ROWS, WINDOW),
    "window alone": (WINDOW,),
    "carry": (ROWS, CARRY),
    "carry alone": (CARRY,),
    "all": (ROWS, WINDOW, CARRY, ROWS_TOO),
    "chunks of several sizes": (SMALL_CHUNKS, ROWS),
}
HASH_TOKENS = 4


def layout_named(name: str) -> PageLayout:
    return PageLayout(LAYOUTS[name], HASH_TOKENS, 2048)


@contextmanager
def opened(
    layout: PageLayout, directory: Path | None, identity: Identity = IDENTITY, host_bytes: int = 0
) -> Iterator[PageStore]:
    disk = {"disk_dir": directory, "disk_bytes": 8 << 20, "disk_sync": SyncPolicy.NEVER} if directory else {}
    with ThreadPoolExecutor(1) as executor:
        tiers = TierSettings(host_bytes=host_bytes, **disk)  # type: ignore[arg-type]
        cache: TieredCache = build_cache(tiers, executor, clock=time.monotonic)
        durability = Durability.DISK if directory else Durability.HOST
        yield PageStore(cache, identity, layout, durability=durability, held_bytes_max=1 << 20)
        cache.close()


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    """As vLLM makes them: each covers all tokens before its end."""
    found, above = [], b""
    for end in range(HASH_TOKENS, len(tokens) + 1, HASH_TOKENS):
        above = hashlib.sha256(above + str(tokens[end - HASH_TOKENS : end]).encode()).digest()
        found.append(above)
    return found


def page_of(group: PageGroup, block_hash: bytes) -> Bytes:
    """A chunk's bytes: a function of its prefix, as in a model."""
    seed = int.from_bytes(hashlib.sha256(block_hash + bytes([group.index])).digest()[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, group.page_bytes, np.uint8)


def chunks(layout: PageLayout, tokens: int) -> list[tuple[PageGroup, int]]:
    return [(g, end) for g in layout.groups for end in range(g.chunk_tokens, tokens + 1, g.chunk_tokens)]


def bring(store: PageStore, hashes: Sequence[bytes], wanted: Sequence[tuple[PageGroup, int]], jobs: int = 1) -> None:
    """One request's chunks, in so many jobs."""
    progress = Progress()
    for first in range(jobs):
        brought = {}
        for group, end in wanted[first::jobs]:
            if store.wants(progress, (group.index, end)) and store.reserve(progress, group.page_bytes):
                brought[group.index, end] = page_of(group, hashes[end // HASH_TOKENS - 1])
        store.keep(progress, hashes, brought)
    store.finish(progress)


def loaded_tokens(store: PageStore, hashes: Sequence[bytes], tokens: int) -> int:
    """How much of a prefix can be loaded; every byte of it is checked."""
    plan = store.match(hashes, tokens, 60.0)
    check_pages(store, hashes, plan)
    assert plan.pin is None or store.cache.unpin(plan.pin)
    return plan.tokens


def check_pages(store: PageStore, hashes: Sequence[bytes], plan: Plan) -> None:
    places = list(plan.places.values())
    found = dict(store.load(places))
    assert sorted(found) == list(range(len(places)))
    for number, place in enumerate(places):
        page, (index, end) = found[number], place.chunk
        assert not isinstance(page, MissReason)
        assert np.array_equal(page, page_of(store.layout.by_index[index], hashes[end // HASH_TOKENS - 1]))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_brought_is_loaded_in_another_process(name: str, tmp_path: Path) -> None:
    layout, hashes = layout_named(name), hashes_of(range(70))
    with opened(layout, tmp_path / "d") as store:
        bring(store, hashes, chunks(layout, 64))
        assert loaded_tokens(store, hashes, 70) == 64
    with opened(layout, tmp_path / "d") as store:
        assert loaded_tokens(store, hashes, 70) == 64
        assert loaded_tokens(store, hashes, 64) in {0, 48}  # a proper prefix; none where only the end has its state
        other = hashes_of([*range(40), 1, *range(41, 70)])
        assert loaded_tokens(store, other, 70) in {0, 32}
    assert [file.error for file in check_directory(tmp_path / "d")] == [None] * sum(
        1 for _ in check_directory(tmp_path / "d")
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_identity_finds_nothing(name: str, tmp_path: Path) -> None:
    layout, hashes = layout_named(name), hashes_of(range(70))
    with opened(layout, tmp_path / "d") as store:
        bring(store, hashes, chunks(layout, 64))
    other = Identity(weights_digest=bytes([1] * 32), engine="vllm", engine_revision="test")
    with opened(layout, tmp_path / "d", other) as store:
        assert loaded_tokens(store, hashes, 70) == 0


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_another_process_has_put_since_is_found(name: str, tmp_path: Path) -> None:
    layout, hashes = layout_named(name), hashes_of(range(70))
    wanted = chunks(layout, 64)
    with opened(layout, tmp_path / "d") as here, opened(layout, tmp_path / "d") as there:
        assert not here.find(hashes, 69)
        bring(there, hashes, [chunk for chunk in wanted if chunk[1] <= 32])
        assert loaded_tokens(here, hashes, 70) == 0
        assert here.find(hashes, 69)
        assert loaded_tokens(here, hashes, 70) == 32
        assert not here.find(hashes, 69)
        bring(there, hashes, wanted)
        assert here.find(hashes, 69)
        assert loaded_tokens(here, hashes, 70) == 64
        for file in (tmp_path / "d" / "entries").rglob("*.blob"):  # and what another process has dropped is a miss
            file.unlink()
        while (plan := here.match(hashes, 70, 60.0)).tokens:
            assert {page for _, page in here.load(list(plan.places.values()))} == {MissReason.LOST}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_missing_chunks_make_a_shorter_prefix_and_never_another(data: st.DataObject) -> None:
    """Any part of a prompt's chunks, in any order, in several jobs and by two requests: sound, whole, not too long."""
    layout = layout_named(data.draw(st.sampled_from(sorted(LAYOUTS))))
    hashes = hashes_of(range(70))
    with opened(layout, None, host_bytes=4 << 20) as store:
        brought: set[tuple[int, int]] = set()
        for _ in range(data.draw(st.integers(1, 2))):
            some = data.draw(st.lists(st.sampled_from(chunks(layout, 64)), unique=True))
            bring(store, hashes, some, data.draw(st.integers(1, 3)))
            brought |= {(group.index, end) for group, end in some}
        tokens = loaded_tokens(store, hashes, 70)
        needed = {(group.index, end) for group, end in chunks(layout, tokens) if needs(layout, group, end, tokens)}
        assert needed <= brought
        assert store._held_bytes == 0


def needs(layout: PageLayout, group: PageGroup, end: int, tokens: int) -> bool:
    if group.kind is PartKind.CARRY:
        return end == tokens
    return group.kind is PartKind.ROWS or end > tokens - layout.block_tokens


@pytest.mark.parametrize("jobs", [1, 3, 7])
def test_states_and_rows_of_one_prompt_may_come_in_any_number_of_jobs(jobs: int, tmp_path: Path) -> None:
    layout, hashes = layout_named("all"), hashes_of(range(70))
    wanted = [c for c in chunks(layout, 64) if c[0].kind is not PartKind.CARRY or c[1] == 64]
    random.Random(jobs).shuffle(wanted)
    with opened(layout, tmp_path / "d") as store:
        bring(store, hashes, wanted, jobs)
        assert loaded_tokens(store, hashes, 70) == 64


def test_a_long_prompt_is_put_in_several_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PUT_BYTES_MAX", 2500)
    layout, hashes = layout_named("carry"), hashes_of(range(70))
    with opened(layout, tmp_path / "d") as store:
        bring(store, hashes, chunks(layout, 64))
        assert loaded_tokens(store, hashes, 70) == 64


@pytest.mark.parametrize("flip", [True, False], ids=["flipped byte", "truncated"])
def test_a_bad_frame_is_set_aside_and_a_shorter_prefix_is_left(flip: bool, tmp_path: Path) -> None:
    layout, hashes = layout_named("two row groups"), hashes_of(range(70))
    with opened(layout, tmp_path / "d") as store:
        bring(store, hashes, chunks(layout, 64))
        plan = store.match(hashes, 70, 60.0)
        key = next(p.frame.key for p in plan.places.values() if p.frame.key.tokens == 48)
        spoil(tmp_path / "d", key, flip)
        places = list(plan.places.values())
        failed = {places[n].chunk[1] for n, page in store.load(places) if isinstance(page, MissReason)}
        assert failed == {48}
        assert store.counters()["quarantined.disk"] == 1
        assert loaded_tokens(store, hashes, 48) == 32
        bring(store, hashes, chunks(layout, 64))  # it is computed again, and kept again
        assert loaded_tokens(store, hashes, 70) == 64


def test_a_sound_copy_in_another_tier_is_taken(tmp_path: Path) -> None:
    layout, hashes = layout_named("rows"), hashes_of(range(70))
    with opened(layout, tmp_path / "d", host_bytes=1 << 20) as store:
        bring(store, hashes, chunks(layout, 64))
        plan = store.match(hashes, 70, 60.0)
        host = store.cache._levels[0].tier
        for place in plan.places.values():
            entry = host._entries[place.frame.key.path()]  # type: ignore[attr-defined]
            host._arena.arrays(entry.runs)[0][entry.bytes - 1] ^= 1  # type: ignore[attr-defined]
        check_pages(store, hashes, plan)
        assert store.counters()["quarantined.host"] == 4


def spoil(root: Path, key: FrameKey, flip: bool) -> None:
    (file,) = (root / "entries").glob(f"{key.path()}*")
    content = bytearray(file.read_bytes())
    if flip:
        content[len(content) // 2] ^= 1
    else:
        del content[-100:]
    file.write_bytes(content)


def test_too_much_held_back_is_dropped_and_counted(tmp_path: Path) -> None:
    layout, hashes = layout_named("carry"), hashes_of(range(70))
    with opened(layout, tmp_path / "d") as store:
        store._held_bytes_max = 3000
        bring(store, hashes, chunks(layout, 64))
        assert loaded_tokens(store, hashes, 70) == 0
        assert store.counters()["pages.dropped.held_bytes"] >= 1
        assert store._held_bytes == 0


def test_rows_are_copied_in_and_out_of_their_ranges_alone() -> None:
    row = np.arange(2048, dtype=np.uint32).astype(np.uint8)
    page = np.empty(CARRY.page_bytes, np.uint8)
    CARRY.read(row, page)
    assert np.array_equal(page, np.concatenate([row[100:612], row[900:1000]]))
    back = np.zeros(2048, np.uint8)
    CARRY.write(page, back)
    assert np.array_equal(back[100:612], row[100:612])
    assert np.array_equal(back[900:1000], row[900:1000])
    assert not back[:100].any()
    assert not back[612:900].any()
    assert not back[1000:].any()


def test_layouts_that_no_frame_can_hold_are_refused() -> None:
    with pytest.raises(GeometryError, match="chunks of 16 tokens, hashes of 5"):
        PageLayout((ROWS,), 5, 2048)
    with pytest.raises(GeometryError, match="of a row of 512"):
        PageLayout((ROWS,), 4, 512)
    with pytest.raises(GeometryError, match="no cache group"):
        PageLayout((), 4, 512)


def test_settings_are_checked_by_name() -> None:
    document = {"disk_dir": "/tmp/x", "disk_bytes": "1GiB", "disk_sync": "never", "salt": "tenant"}
    checked = VllmSettings.from_document(document)
    assert checked.tiers.disk_bytes == 1 << 30
    assert checked.tiers.host_bytes == 0
    assert checked.durability is Durability.DISK
    assert checked.salt == b"tenant"
    for wrong, match in (
        ({"disk": "/tmp/x"}, "disk is not one of"),
        ({"disk_dir": "/tmp/x"}, "go together"),
        ({}, "neither"),
        ({**document, "durability": "paper"}, "PAPER"),
        ({**document, "load_deadline_s": 0}, "load_deadline_s"),
        ({**document, "disk_bytes": "many"}, "disk_bytes"),
        ({**document, "disk_sync": "perhaps"}, "perhaps"),
        ({"object_url": "s3://bucket/x", "object_bytes": "1GiB"}, "catalogue"),
    ):
        with pytest.raises(ConfigError, match=match):
            VllmSettings.from_document(wrong)


def test_the_transfer_config_is_plain_and_refuses_what_the_engine_would() -> None:
    config = kv_transfer_config(1 << 30, disk_dir="/tmp/x", disk_bytes="1GiB")
    assert config["kv_connector"] == "TieredCacheConnector"
    with pytest.raises(ConfigError, match="disk is not one of"):
        kv_transfer_config(1 << 30, disk="/tmp/x")


def test_a_job_that_was_given_up_touches_no_buffer_and_is_reported_once() -> None:
    job = TimedJob(1, 0.0)
    with job.buffer() as mine:
        assert mine
        assert not job.give_up(wait=False)  # it is copying
    assert job.give_up(wait=False)
    assert not job.give_up(wait=True)
    with job.buffer() as mine:
        assert not mine
    assert not job.report()
    done = TimedJob(2, 0.0)
    assert done.report()
    assert not done.give_up(wait=True)
