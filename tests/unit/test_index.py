"""`PrefixIndex`: names, tails, private copies, reasons, pins, and what it costs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from costs import instructions, shortest_s

from tiered_cache.errors import IdentityError, MissReason
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import CHECKPOINT, FrameKey, PrefixChain
from tiered_cache.index import FrameName, Layout, PrefixIndex, RemovalReason, private_checkpoint
from tiered_cache.prefix_tree import PrefixId
from tiered_cache.replay.simulate import RunChain

NAMESPACE = bytes(32)
PARTS = (Part("k", PartKind.ROWS, "uint8", (4,)), Part("s", PartKind.CARRY, "uint8", (8,)))


def chain_of(*tokens: int, block_tokens: int = 4) -> PrefixChain:
    return PrefixChain(NAMESPACE, block_tokens, np.array(tokens, dtype=np.uint32))


def index_of(parts: tuple[Part, ...] = PARTS, tiers: tuple[str, ...] = ("host",), shards: int = 1) -> PrefixIndex:
    index = PrefixIndex(tiers)
    index.register(Layout.of(NAMESPACE, chain_of().block_hash(0), Geometry(parts, 4, shards)))
    return index


def spill(index: PrefixIndex, chain: PrefixChain, tokens: int, tier: str = "host") -> None:
    for name in index.missing(chain, tokens, tier):
        index.insert(name, tier, 100)


def test_a_tail_of_an_earlier_turn_is_found_inside_a_block_that_the_prompt_has_filled() -> None:
    index, first, second = index_of(), chain_of(*range(6)), chain_of(*range(12))
    spill(index, first, 6)
    match = index.longest(second, 11)
    assert (match.tokens, match.prefix) == (6, first.prefix_hash(6))
    assert index.longest(chain_of(0, 1, 2, 3, 4, 9), 6).tokens == 0
    assert index.longest(second, 5).reason is MissReason.NO_CHECKPOINT


def test_frame_keys_are_names_and_names_are_frame_keys() -> None:
    index, chain = index_of(), chain_of(*range(6))
    missing = index.missing(chain, 6, "host")
    assert [(name.group, name.tokens) for name in missing] == [("rows", 4), (CHECKPOINT, 6)]
    for name in missing:
        key = FrameKey(*name)  # type: ignore[arg-type]
        key.check()
        index.insert(key, "host", 10)
    assert index.longest(chain, 6).tokens == 6
    assert [place.copies for place in index.support(chain, 6)] == [(("host", 10),), (("host", 10),)]


def test_contradicting_names_are_refused_and_change_nothing() -> None:
    index, chain = index_of(), chain_of(*range(8))
    spill(index, chain, 8)
    before = list(index.names("host"))
    good = before[1][0]
    for bad in (
        good._replace(parent=b"x" * 32),
        good._replace(tokens=4),
        good._replace(tokens=6),
        good._replace(rank=1),
        good._replace(group="window.9"),
        good._replace(namespace=b"n" * 32),
        good._replace(prefix=b"y" * 32, parent=b"z" * 32, tokens=4),
        good._replace(group=CHECKPOINT, tokens=0),
    ):
        with pytest.raises(IdentityError):
            index.insert(bad, "host", 1)
    assert list(index.names("host")) == before


def test_tails_inside_one_block_are_bounded_and_pinned_ones_stay() -> None:
    parts = (Part("k", PartKind.ROWS, "uint8", (4,)), Part("s", PartKind.CARRY, "uint8", (8,)))
    index = PrefixIndex(["host"])
    geometry = Geometry(parts, 512)
    index.register(Layout.of(NAMESPACE, chain_of(block_tokens=512).block_hash(0), geometry))
    chains = [chain_of(i, block_tokens=512) for i in range(65)]
    for chain in chains[:64]:
        spill(index, chain, 1)
    first, second = chains[0].prefix_hash(1), chains[1].prefix_hash(1)
    (candidate,) = index.candidates(chains[64], [1], "host", geometry.frame_bytes)
    assert candidate.crowds_out == first
    pin = index.pin(first, 10.0)
    assert index.candidates(chains[64], [1], "host", geometry.frame_bytes)[0].crowds_out == second
    for chain in chains[1:64]:
        index.pin(chain.prefix_hash(1), 10.0)
    assert index.candidates(chains[64], [1], "host", geometry.frame_bytes) == []
    index.unpin(pin)
    assert index.candidates(chains[64], [1], "host", geometry.frame_bytes)[0].crowds_out == first


def test_a_private_copy_is_found_by_its_lineage_alone_and_goes_as_one() -> None:
    index, chain = index_of(), chain_of(*range(10))
    spill(index, chain, 4)
    for key in (chain.key("rows", 8, 0, 7), chain.key(CHECKPOINT, 10, 0, 7)):
        index.insert(key, "host", 50)
    assert index.longest(chain, 10).tokens == 4
    places = index.support(chain, 10, private=7)
    assert [(p.name.group, p.name.tokens, p.name.private, bool(p.copies)) for p in places] == [
        ("rows", 4, 0, True),
        ("rows", 8, 7, True),
        (CHECKPOINT, 10, 7, True),
    ]
    assert index.drop(chain.prefix_hash(4), "host", RemovalReason.EVICTED)[0].group == CHECKPOINT
    assert index.support(chain, 10, private=7)[0].copies, "a shared block that it needs stays"
    dropped = index.drop(private_checkpoint(NAMESPACE, 7), "host", RemovalReason.DISCARDED)
    assert {(n.tokens, n.private) for n in dropped} == {(8, 7), (10, 7), (4, 0)}
    assert index.stored_bytes("host") == 0


@pytest.mark.parametrize(
    ("removal", "miss"),
    [
        (RemovalReason.EVICTED, MissReason.EVICTED),
        (RemovalReason.EXPIRED, MissReason.EXPIRED),
        (RemovalReason.QUARANTINED, MissReason.QUARANTINED),
        (RemovalReason.LOST, MissReason.LOST),
        (RemovalReason.ABANDONED, MissReason.NOT_STORED),
    ],
)
def test_a_miss_says_why_what_was_there_is_gone(removal: RemovalReason, miss: MissReason) -> None:
    index, chain = index_of(), chain_of(*range(8))
    spill(index, chain, 8)
    index.drop(chain.prefix_hash(8), "host", removal)
    assert index.longest(chain, 8).reason is miss
    assert removal in str(index.explain(chain, 8))
    spill(index, chain, 8)
    assert index.longest(chain, 8).reason is None


def test_misses_of_other_kinds() -> None:
    index, chain = index_of(shards=2), chain_of(*range(8))
    assert index.longest(chain, 8).reason is MissReason.NOT_STORED
    assert index.longest(chain, 0).reason is MissReason.TOO_SHORT
    assert index.longest(PrefixChain(b"n" * 32, 4), 0).reason is MissReason.NAMESPACE
    spill(index, chain, 8)
    index.remove(index.missing(chain_of(*range(8), 9), 9, "host")[-1], "host", RemovalReason.LOST)
    index.remove(chain.key(CHECKPOINT, 8, 1), "host", RemovalReason.LOST)
    assert index.longest(chain, 8).reason is MissReason.SHARD_MISSING
    windowed = index_of((*PARTS, Part("w", PartKind.WINDOW, "uint8", (1,), window_tokens=4)))
    spill(windowed, chain, 8)
    windowed.remove(chain.key("window.4", 8, 0), "host", RemovalReason.LOST)
    assert windowed.longest(chain, 8).reason is MissReason.WINDOW_GONE


def test_pins_end_with_their_deadline_or_their_end() -> None:
    index = index_of()
    first, second = index.pin(b"p", 5.0), index.pin(b"p", 9.0)
    assert set(index.pinned(5.0)) == {b"p"}
    index.unpin(second)
    index.unpin(second)
    assert set(index.pinned(5.0)) == {b"p"}
    assert not index.pinned(5.1)
    index.unpin(first)


def test_a_claim_keeps_the_prefix_while_a_spill_is_under_way() -> None:
    index, chain = index_of(), chain_of(*range(12))
    spill(index, chain, 8)
    claim = index.claim(chain, 12, "host")
    assert [n.group for n in index.drop(chain.prefix_hash(8), "host", RemovalReason.EVICTED)] == [CHECKPOINT]
    missing = index.missing(chain, 12, "host")
    index.insert(missing[0], "host", 100)
    assert {n.tokens for n in index.release(claim)} == {12, 8, 4}, "the spill was cut off: all of it is dead weight"
    again = index.claim(chain, 12, "host")
    spill(index, chain, 12)
    assert index.release(again) == []


def test_the_path_to_a_checkpoint_is_told_by_names_alone() -> None:
    index, chain = index_of(), chain_of(*range(10))
    spill(index, chain, 10)
    known = index.chain_to(chain.prefix_hash(10))
    assert known is not None
    assert [known.block_hash(i) for i in range(3)] == list(chain.block_hashes())
    assert index.longest(known, len(known)).tokens == 10


def grown(frames: int) -> tuple[PrefixIndex, RunChain]:
    """An index of so many frames: sessions of 50 blocks, a checkpoint at each end."""
    index = PrefixIndex(["host"])
    index.register(Layout(0, -1, 64))
    prefix: PrefixId
    for session in range(frames // 51):
        parent: PrefixId = -1
        for block in range(50):
            prefix = session * 1000 + block
            index.insert(FrameName(0, prefix, parent, "rows", (block + 1) * 64), "host", 1 << 20)
            parent = prefix
        index.insert(FrameName(0, parent, session * 1000 + 48, CHECKPOINT, 3200), "host", 1 << 20)
    return index, RunChain([(1000, 50), (10**9, 5)], 64)


def test_a_request_costs_as_much_among_many_frames_as_among_few() -> None:
    def request(frames: int) -> Callable[[], None]:
        index, chain = grown(frames)

        def asked() -> None:
            assert index.longest(chain, len(chain)).tokens == 3200
            index.candidates(chain, [len(chain)], "host", lambda _group, _tokens: 1)

        return asked

    requests = {"few": request(5_000), "many": request(100_000)}
    assert instructions(requests["many"]) == instructions(requests["few"])
    taken_s = shortest_s(requests, rounds=200)
    assert taken_s["many"] < 6 * taken_s["few"], "nor is it 20 times as much inside of a built-in"


def test_memory_for_each_frame_is_small() -> None:
    tracemalloc.start()
    index, _ = grown(20_000)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / index.stored_frames("host") < 700


def test_a_trial_frees_a_window_block_once() -> None:
    """It goes with the only checkpoint that needs it, and its rows later with another."""
    index = index_of((*PARTS, Part("w", PartKind.WINDOW, "uint8", (1,), window_tokens=4)))
    chain = chain_of(*range(12))
    for tokens in (4, 12):
        spill(index, chain, tokens)
    held = index.stored_bytes("host")
    trial = index.view("host").trial((), frozenset())
    assert trial.drop(chain.prefix_hash(4)) == 200, "its carries, and the window before it"
    assert trial.drop(chain.prefix_hash(12)) == held - 200
    assert trial.needed_bytes == -held
