"""vLLM's chunks as frames, without vLLM: what can be loaded is what was brought, whole and of one length, or less."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paging import CARRY, LAYOUTS, ROWS, bring, check_pages, chunks, hashes_of, layout_named, loaded_tokens, opened

from tiered_cache.check import check_directory
from tiered_cache.engines.vllm import pages
from tiered_cache.engines.vllm.layout import PageGroup, PageLayout
from tiered_cache.engines.vllm.pages import PageStore
from tiered_cache.engines.vllm.settings import VllmSettings, kv_transfer_config
from tiered_cache.engines.vllm.workers import TimedJob
from tiered_cache.errors import ConfigError, GeometryError, MissReason
from tiered_cache.geometry import PartKind
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.tiers.base import Durability


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
        assert not here.search(hashes, 70, 0, 1.0)
        bring(there, hashes, [chunk for chunk in wanted if chunk[1] <= 32])
        assert loaded_tokens(here, hashes, 70) == 0
        assert searched_tokens(here, hashes, 0) == 32
        assert loaded_tokens(here, hashes, 70) == 32
        assert not here.search(hashes, 70, 32, 1.0)
        bring(there, hashes, wanted)
        assert searched_tokens(here, hashes, 32) == 64
        assert loaded_tokens(here, hashes, 70) == 64
        for file in (tmp_path / "d" / "entries").rglob("*.blob"):  # and what another process has dropped is a miss
            file.unlink()
        while (plan := here.match(hashes, 70, 60.0)).tokens:
            assert {page for _, page in here.load(list(plan.places.values()))} == {MissReason.LOST}


def searched_tokens(store: PageStore, hashes: Sequence[bytes], known_tokens: int) -> int:
    """How far a search takes a prefix of which so much was known."""
    plan = store.search(hashes, 70, known_tokens, 1.0)
    if plan is None:
        return known_tokens
    check_pages(store, hashes, plan)
    store.end(plan)
    return plan.tokens


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
    sharing = VllmSettings.from_document({**document, "object_url": "s3://bucket/x", "object_bytes": "1GiB"})
    assert (sharing.durability, sharing.ray_address, sharing.cluster) == (Durability.OBJECT, "auto", "vllm")
    for wrong, match in (
        ({"disk": "/tmp/x"}, "disk is not one of"),
        ({"disk_dir": "/tmp/x"}, "go together"),
        ({}, "neither"),
        ({**document, "durability": "paper"}, "PAPER"),
        ({**document, "durability": "object"}, "durability object: there is no such tier"),
        ({**document, "load_deadline_s": 0}, "load_deadline_s"),
        ({**document, "disk_bytes": "many"}, "disk_bytes"),
        ({**document, "disk_sync": "perhaps"}, "perhaps"),
        ({"object_url": "s3://bucket/x"}, "go together"),
        ({"object_url": "memory:///", "object_bytes": "1GiB"}, "another store in each process"),
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
