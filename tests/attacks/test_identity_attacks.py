"""State of another model, adapter, tenant, number format or layout: a clean miss, and nothing of it gets through.

Each case is also tried with forged names: the other's stored bytes are laid under the name that is asked for.
"""

from __future__ import annotations

import gc
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spilling import (
    NO_HINTS,
    State,
    chain_of,
    forget_everything,
    node,
    open_disk,
    open_host,
    restore,
    some_tokens,
    spill,
)

from tiered_cache import frame
from tiered_cache.cache import TieredCache
from tiered_cache.errors import FrameError, GeometryError, IdentityError, MissReason, TruncatedError
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import CHECKPOINT, Identity, PrefixChain, Tokens, namespace_of
from tiered_cache.tiers.base import Durability, GetRequest, PutItem

TOKENS = some_tokens(22)


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


MODEL = Identity(digest_of("weights"), "engine", "1", tokenizer_digest=digest_of("tokenizer"))
KV = Part("k", PartKind.ROWS, "bfloat16", (4, 8), layers=(0, 1), shard_axis=0)
STATE = Part("state", PartKind.CARRY, "float32", (4, 6), shard_axis=0)
LAYOUT = Geometry((KV, STATE), block_tokens=4)


class Owner(NamedTuple):
    """Who asks: an identity and a layout."""

    identity: Identity
    geometry: Geometry = LAYOUT

    def state(self, rank: int = 0) -> State:
        return State(self.geometry, TOKENS, rank=rank, identity=self.identity)

    def chain(self, tokens: Tokens = TOKENS) -> PrefixChain:
        return chain_of(self.geometry, tokens, self.identity)

    def serve(self, cache: TieredCache) -> None:
        """Look up, restore if there is something, and keep what was computed."""
        hit = cache.match(self.chain(np.append(TOKENS, TOKENS[:1])), NO_HINTS).hit
        if hit is not None:
            assert hit.tokens == len(TOKENS)
            restore(cache, self.geometry, hit, TOKENS, identity=self.identity)
        cache.register(self.identity, self.geometry)
        for rank in range(self.geometry.shards):
            spill(cache, self.state(rank), durability=Durability.DISK)

    def hits(self, cache: TieredCache) -> bool:
        found = cache.match(self.chain(np.append(TOKENS, TOKENS[:1])), NO_HINTS)
        assert found.hit or found.reason in {MissReason.NAMESPACE, MissReason.NOT_STORED}
        return found.hit is not None


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[TieredCache]:
    with node(open_host(), open_disk(tmp_path), geometries=()) as cache:
        yield cache
        gc.collect()  # the errors that tests have caught hold on to bytes


# Card 05: the same name, other weights


def test_other_weights_share_nothing_and_going_back_is_a_hit_again(cache: TieredCache) -> None:
    first, second = Owner(MODEL), Owner(replace(MODEL, weights_digest=digest_of("fine-tuned")))
    first.serve(cache)
    assert first.hits(cache)
    assert not second.hits(cache)
    second.serve(cache)
    updated = Owner(replace(MODEL, weights_digest=digest_of("updated in place")))
    assert not updated.hits(cache)
    for owner in (first, second):
        assert owner.hits(cache)
        owner.serve(cache)
    told = cache.differences(updated.identity, LAYOUT)
    assert [line.partition(": ")[2] for line in told] == ["identity differs: weights_digest"] * 2


# Card 06: the same everything but the number format


OTHERS = {
    "8-bit values": (
        Owner(MODEL, replace(LAYOUT, parts=(replace(KV, dtype="float8_e4m3fn"), STATE))),
        "part 'k': dtype is 'float8_e4m3fn' here and 'bfloat16' there",
    ),
    "16-bit values of another kind": (
        Owner(MODEL, replace(LAYOUT, parts=(replace(KV, dtype="float16"), STATE))),
        "part 'k': dtype is 'float16' here and 'bfloat16' there",
    ),
    "quantised per head": (Owner(replace(MODEL, number_format="fp8_e4m3 per head")), "number_format"),
    "other scales": (Owner(replace(MODEL, scales_digest=digest_of("scales"))), "scales_digest"),
    "another page size": (Owner(MODEL, replace(LAYOUT, block_tokens=2)), "block_tokens is 2 here and 4 there"),
    "another rounding": (Owner(replace(MODEL, rounding="at the store")), "rounding"),
    "another kernel": (Owner(replace(MODEL, engine_revision="2")), "engine_revision"),
    "another tokenizer": (Owner(replace(MODEL, tokenizer_digest=digest_of("other"))), "tokenizer_digest"),
    "another layer": (
        Owner(MODEL, replace(LAYOUT, parts=(replace(KV, layers=(0, 2)), STATE))),
        "part 'k': layers is (0, 2) here and (0, 1) there",
    ),
    "parts in another order": (Owner(MODEL, replace(LAYOUT, parts=(STATE, KV))), "parts are ordered"),
    "time-major instead of channel-major": (
        Owner(MODEL, replace(LAYOUT, parts=(KV, replace(STATE, shape=(6, 4))))),
        "part 'state': shape is (6, 4) here and (4, 6) there",
    ),
}


def check(mine: Owner, theirs: Owner) -> None:
    """As two sides do when they meet."""
    mine.identity.check(theirs.identity)
    mine.geometry.check(theirs.geometry)


@pytest.mark.parametrize(("other", "field"), OTHERS.values(), ids=OTHERS.keys())
def test_another_format_is_a_miss_before_a_byte_moves_and_the_field_is_named(
    cache: TieredCache, other: Owner, field: str
) -> None:
    first = Owner(MODEL)
    first.serve(cache)
    (told,) = cache.differences(other.identity, other.geometry)
    assert field in told
    with pytest.raises((IdentityError, GeometryError), match=f"differs: .*{re.escape(field)}"):
        check(other, first)
    assert not other.hits(cache)  # unknown here
    cache.register(other.identity, other.geometry)
    assert not other.hits(cache)  # known, and has nothing
    key = first.chain().key("rows", 4, 0)
    with pytest.raises(IdentityError, match="not registered"):
        cache.admit(replace(first.state().offer(), namespace=bytes(32)), Durability.HOST, NO_HINTS)
    (body,) = cache.fetch([key], 1 << 20)
    assert not isinstance(body, MissReason)
    with pytest.raises((IdentityError, GeometryError)):
        frame.decode(body, key=key, identity_digest=other.identity.digest(), geometry=other.geometry)
    other.serve(cache)
    assert first.hits(cache)
    assert other.hits(cache)
    first.serve(cache)


@pytest.mark.parametrize("other", [other for other, _ in OTHERS.values()], ids=OTHERS.keys())
@pytest.mark.parametrize(("group", "tokens"), [("rows", 4), (CHECKPOINT, 22)])
def test_bytes_of_another_format_under_the_asked_for_name_are_refused_and_set_aside(
    cache: TieredCache, other: Owner, group: str, tokens: int
) -> None:
    first = Owner(MODEL)
    first.serve(cache)
    other.serve(cache)
    disk = cache._levels[1].tier
    wanted, foreign = other.chain().key(group, tokens, 0), first.chain().key(group, tokens, 0)
    lay_under(cache, foreign.path(), wanted.path())
    hit = cache.match(other.chain(np.append(TOKENS, TOKENS[:1])), NO_HINTS).hit
    assert hit is not None
    with pytest.raises((IdentityError, GeometryError, TruncatedError)) as refusal:
        restore(cache, other.geometry, hit, TOKENS, identity=other.identity)
    too_long = isinstance(refusal.value, TruncatedError)  # then no more was read than this format can need
    assert too_long or "namespace is" in refusal.value.message
    cache.report_bad(wanted, refusal.value.message)
    assert [entry.path for entry in disk.quarantined()] == [wanted.path()]
    found = cache.match(other.chain(np.append(TOKENS, TOKENS[:1])), NO_HINTS)
    assert (found.hit, found.reason) == (None, MissReason.QUARANTINED)
    first.serve(cache)
    other.serve(cache)
    assert other.hits(cache)


def lay_under(cache: TieredCache, source: str, target: str) -> None:
    """On disk another entry's bytes take the place of an entry, whose copy in memory goes."""
    host, disk = (level.tier for level in cache._levels)
    (body,) = disk.get([GetRequest(source)])
    assert isinstance(body, memoryview)
    forged = bytes(body)
    host.delete([target])
    disk.delete([target])
    with disk.reserve([len(forged)]) as room:
        disk.put([PutItem(target, [forged])], room)


# Card 07: split over two workers, asked by one


def sharded(shards: int) -> Owner:
    """The same model over so many workers: each has its share of the heads."""
    parts = (replace(KV, shape=(4 // shards, 8)), replace(STATE, shape=(4 // shards, 6)))
    return Owner(MODEL, Geometry(parts, block_tokens=4, shards=shards))


@pytest.mark.parametrize("asking", [1, 4])
def test_another_number_of_workers_is_a_miss_although_all_bytes_count_the_same(cache: TieredCache, asking: int) -> None:
    two, other = sharded(2), sharded(asking)
    assert two.geometry.restore_bytes(22) * 2 == other.geometry.restore_bytes(22) * asking
    two.serve(cache)
    assert two.hits(cache)
    assert not other.hits(cache)
    (told,) = cache.differences(other.identity, other.geometry)
    assert f"shards is {asking} here and 2 there" in told
    other.serve(cache)
    assert two.hits(cache)
    two.serve(cache)


def test_shares_cut_along_another_axis_are_refused_although_shapes_and_sizes_are_equal(cache: TieredCache) -> None:
    square = replace(KV, shape=(4, 4))
    by_head = Owner(MODEL, Geometry((square,), 4, shards=2))
    by_width = Owner(MODEL, Geometry((replace(square, shard_axis=1),), 4, shards=2))
    whole = Owner(MODEL, Geometry((replace(square, shard_axis=None),), 4, shards=2))
    by_head.serve(cache)
    for other, axis in ((by_width, 1), (whole, None)):
        assert not other.hits(cache)
        assert f"shard_axis is {axis} here and 0 there" in "; ".join(cache.differences(other.identity, other.geometry))
        other.serve(cache)
        lay_under(cache, by_head.chain().key("rows", 8, 1).path(), other.chain().key("rows", 8, 1).path())
        hit = cache.match(other.chain(np.append(TOKENS, TOKENS[:1])), NO_HINTS).hit
        assert hit is not None
        with pytest.raises((IdentityError, GeometryError, FrameError)):
            restore(cache, other.geometry, hit, TOKENS, identity=other.identity)


def test_one_workers_share_is_not_anothers(cache: TieredCache) -> None:
    two = sharded(2)
    two.serve(cache)
    keys = [two.chain().key("rows", 8, rank) for rank in (0, 1)]
    lay_under(cache, keys[1].path(), keys[0].path())
    hit = cache.match(two.chain(np.append(TOKENS, TOKENS[:1])), NO_HINTS).hit
    assert hit is not None
    with pytest.raises(IdentityError, match="rank is 1, not 0"):
        restore(cache, two.geometry, hit, TOKENS, identity=two.identity)


# Card 08: adapter, salt and name mix-up


def test_a_salt_an_adapter_and_neither_of_one_name_each_get_their_own(cache: TieredCache) -> None:
    owners = [
        Owner(replace(MODEL, tenant_salt=b"x")),
        Owner(replace(MODEL, adapter_digest=digest_of("x"))),
        Owner(replace(MODEL, tenant_salt=digest_of("x"))),
        Owner(MODEL),
    ]
    for owner in owners:
        assert not owner.hits(cache)
        owner.serve(cache)
    for owner in owners:
        owner.serve(cache)  # restores, and compares every byte with its own
        assert owner.hits(cache)
    assert len({owner.chain().namespace for owner in owners}) == 4
    told = cache.differences(owners[0].identity, LAYOUT)
    assert [line.partition(": ")[2] for line in told] == [
        "nothing",
        "identity differs: adapter_digest, tenant_salt",
        "identity differs: tenant_salt",
        "identity differs: tenant_salt",
    ]
    assert not any("78" in line.partition(": ")[2] for line in told)  # the salt, in hex
    forget_everything(cache)


SHORT = st.text(alphabet="ab\x00|=,: ", max_size=3)
FIELDS = st.fixed_dictionaries(
    {
        "weights_digest": st.just(digest_of("weights")),
        "engine": SHORT.map(lambda text: "e" + text),
        "engine_revision": SHORT,
        "rounding": SHORT,
        "number_format": SHORT,
        "scales_digest": st.sampled_from([b"", bytes(32), b"rounding" * 4]),
        "tokenizer_digest": st.sampled_from([b"", bytes(32)]),
        "adapter_digest": st.sampled_from([b"", bytes(32)]),
        "tenant_salt": st.binary(max_size=2) | st.sampled_from([bytes(32), b"text", b"\x04\0\0\0\0\0\0\0text"]),
    }
)


@given(FIELDS, FIELDS)
def test_no_joining_of_fields_makes_two_identities_equal(a: dict[str, str], b: dict[str, str]) -> None:
    one, two = Identity(**a), Identity(**b)  # type: ignore[arg-type]
    assert (one.digest() == two.digest()) == (one == two)
    assert (one.to_document() == two.to_document()) == (one == two)
    assert (namespace_of(one.digest(), bytes(32)) == namespace_of(two.digest(), bytes(32))) == (one == two)


@given(st.text(alphabet="ab\x00|=,: ", max_size=6))
def test_moving_a_letter_from_one_field_to_the_next_makes_another_identity(whole: str) -> None:
    moved = [replace(MODEL, rounding=whole[:n], number_format=whole[n:]) for n in range(len(whole) + 1)]
    assert len({identity.digest() for identity in moved}) == len(moved)


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
def test_no_joining_of_media_makes_two_blocks_equal(a: list[bytes], b: list[bytes]) -> None:
    tokens = np.arange(6, dtype=np.uint32)
    one, two = (PrefixChain(bytes(32), 4, tokens, {0: media, 1: media}) for media in (a, b))
    assert (one.block_hash(1) == two.block_hash(1)) == (a == b)
    assert (one.prefix_hash(6) == two.prefix_hash(6)) == (a == b)


def test_tokens_cannot_be_moved_between_a_block_and_its_media() -> None:
    tokens = np.arange(5, dtype=np.uint32)
    last = tokens[4:].tobytes()
    whole = PrefixChain(bytes(32), 5, tokens)
    moved = PrefixChain(bytes(32), 4, tokens[:4], {0: (last,)})
    assert whole.block_hash(1) != moved.block_hash(1)
    tail = PrefixChain(bytes(32), 8, tokens)
    assert tail.prefix_hash(5) not in {whole.block_hash(1), moved.block_hash(1)}
