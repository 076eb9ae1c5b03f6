"""Identities, hash chains and frame keys: equal exactly when everything is, and what cannot be one is refused."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_cache.errors import IdentityError
from tiered_cache.identity import (
    CHECKPOINT,
    FrameKey,
    Identity,
    PrefixChain,
    Tokens,
    namespace_of,
    tagged_hash,
    tail_hash,
    weights_digest,
)

WEIGHTS = b"w" * 32
NAMESPACE = b"n" * 32
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(lambda tokens: np.array(tokens, np.uint32))
DIGESTS = st.binary(min_size=32, max_size=32)
GROUPS = st.from_regex(r"[a-z][a-z0-9]{0,31}(\.[0-9]{1,10})?", fullmatch=True)
KEYS = st.builds(
    FrameKey,
    DIGESTS,
    DIGESTS,
    DIGESTS,
    GROUPS,
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**64 - 1),
)

# Identity


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"weights_digest": b""}, "weights_digest is empty"),
        ({"weights_digest": b"short"}, "weights_digest has 5 bytes, not 32"),
        ({"weights_digest": "w" * 32}, "weights_digest is str, not bytes"),
        ({"engine": ""}, "engine is empty"),
        ({"engine": b"e"}, "engine is bytes, not str"),
        ({"scales_digest": b"x" * 31}, "scales_digest has 31 bytes"),
        ({"tenant_salt": "salt"}, "tenant_salt is str"),
        ({"engine_revision": None}, "engine_revision is NoneType"),
    ],
)
def test_what_cannot_be_an_identity_is_refused_by_name(change: dict[str, object], complaint: str) -> None:
    fields: dict[str, object] = {"weights_digest": WEIGHTS, "engine": "e", "engine_revision": "1", **change}
    with pytest.raises(IdentityError, match=complaint):
        Identity(**fields)  # type: ignore[arg-type]


def test_a_difference_is_told_field_by_field_and_the_salt_is_never_shown() -> None:
    mine = Identity(WEIGHTS, "e", "1", adapter_digest=b"a" * 32, tenant_salt=b"secret")
    mine.check(mine)
    theirs = Identity(b"x" * 32, "e", "2", tenant_salt=b"other")
    with pytest.raises(IdentityError) as refusal:
        mine.check(theirs)
    message = refusal.value.message
    assert "weights_digest is '7777777777777777' here and '7878787878787878' there" in message
    assert "engine_revision is '1' here and '2' there" in message
    assert "adapter_digest" in message
    assert "tenant_salt" in message
    assert "rounding" not in message
    assert not any(text in message for text in ("secret", "other", b"secret".hex(), b"other".hex()))


def test_the_salt_does_not_reach_a_descriptor() -> None:
    document = Identity(WEIGHTS, "e", "1", tenant_salt=b"secret").to_document()
    assert b"secret" not in document.values()
    assert document["tenant_salt"] == tagged_hash("salt", b"secret")
    assert Identity(WEIGHTS, "e", "1").to_document()["tenant_salt"] == b""


def test_every_field_changes_the_digest_and_the_namespace() -> None:
    plain = Identity(WEIGHTS, "e", "1")
    values: dict[str, Any] = {"bytes": b"v" * 32, "str": "v"}
    changed = [dataclasses.replace(plain, **{f.name: values[str(f.type)]}) for f in dataclasses.fields(Identity)]
    digests = {identity.digest() for identity in (plain, *changed)}
    assert len(digests) == 1 + len(changed)
    assert len({namespace_of(digest, b"g" * 32) for digest in digests}) == len(digests)
    assert namespace_of(plain.digest(), b"g" * 32) != namespace_of(plain.digest(), b"h" * 32)


def test_weights_are_told_apart_by_every_byte_and_name_in_any_order(tmp_path: Path) -> None:
    def written(**files: bytes) -> list[Path]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, body in files.items():
            (folder / name).write_bytes(body)
        return [folder / name for name in files]

    big = bytes(range(256)) * 8192  # more than is read at once
    files = written(a=big, b=b"tail")
    digest = weights_digest(files)
    assert digest == weights_digest(files[::-1]) == weights_digest(written(b=b"tail", a=big))
    others = [
        {"a": big[:-1] + b"x", "b": b"tail"},
        {"a": big + b"t", "b": b"ail"},
        {"a": big, "c": b"tail"},
        {"a": big},
    ]
    assert len({digest, *(weights_digest(written(**other)) for other in others)}) == 5


# Hash chains


@given(TOKENS, st.lists(st.integers(0, 40), max_size=5), st.integers(1, 9))
def test_a_chain_that_grew_equals_one_that_was_made_at_once(tokens: Tokens, cuts: list[int], block: int) -> None:
    media = {0: (b"m",), 2: (b"n", b"o")}
    whole, grown = PrefixChain(NAMESPACE, block, tokens, media), PrefixChain(NAMESPACE, block, extra_keys=media)
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 41], strict=True):
        grown.extend(tokens[start:stop])
    assert len(grown) == len(whole) == len(tokens)
    assert grown.blocks == whole.blocks == len(tokens) // block
    assert list(grown.block_hashes()) == list(whole.block_hashes())
    for length in range(len(tokens) + 1):
        assert grown.prefix_hash(length) == whole.prefix_hash(length)
        assert PrefixChain(NAMESPACE, block, tokens[:length], media).prefix_hash(length) == whole.prefix_hash(length)


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_two_prefixes_have_one_hash_exactly_if_they_are_one(a: Tokens, b: Tokens, block: int) -> None:
    one, two = PrefixChain(NAMESPACE, block, a), PrefixChain(NAMESPACE, block, b)
    for n in range(len(a) + 1):
        for m in range(len(b) + 1):
            assert (one.prefix_hash(n) == two.prefix_hash(m)) == np.array_equal(a[:n], b[:m])


def test_media_in_a_block_change_it_and_all_that_follows_and_nothing_before() -> None:
    tokens = np.arange(14, dtype=np.uint32)
    plain = PrefixChain(NAMESPACE, 4, tokens)
    seen = {tuple(plain.block_hashes())}
    for media in ({1: (b"a",)}, {1: (b"b",)}, {1: (b"a", b"b")}, {1: (b"ab",)}, {1: (b"b", b"a")}, {1: (b"a", b"")}):
        chain = PrefixChain(NAMESPACE, 4, tokens, media)
        assert chain.block_hashes()[:2] == plain.block_hashes()[:2]
        assert chain.prefix_hash(6) != plain.prefix_hash(6)
        assert chain.block_hash(3) != plain.block_hash(3)
        seen.add(tuple(chain.block_hashes()))
    assert len(seen) == 7


def test_a_key_names_the_block_end_before_it() -> None:
    chain = PrefixChain(NAMESPACE, 4, np.arange(11, dtype=np.uint32))
    key = chain.key("rows", 8, 3)
    assert (key.prefix, key.parent, key.rank, key.private) == (chain.block_hash(2), chain.block_hash(1), 3, 0)
    for tokens, parent in ((8, 1), (9, 2), (11, 2)):
        key = chain.key(CHECKPOINT, tokens, 0, private=5)
        assert (key.prefix, key.parent) == (chain.prefix_hash(tokens), chain.block_hash(parent))
        assert key.private == 5
    assert chain.prefix_hash(9) == tail_hash(chain.block_hash(2), chain.tokens[8:9])


# Frame keys


@given(KEYS)
def test_a_path_names_its_key_and_is_made_of_harmless_letters(key: FrameKey) -> None:
    key.check()
    path = key.path()
    assert FrameKey.parse(path) == key
    assert set(path) <= set("0123456789abcdefghijklmnopqrstuvwxyz-./")
    assert ".." not in path
    assert max(map(len, path.split("/"))) <= 255
    assert len(path.split("/")) == 3


@given(KEYS, KEYS)
def test_two_keys_have_two_paths(a: FrameKey, b: FrameKey) -> None:
    assert (a.path() == b.path()) == (a == b)


PATH = FrameKey(NAMESPACE, b"p" * 32, b"q" * 32, "rows", 12, 1, 10).path()


@pytest.mark.parametrize(
    "path",
    [
        "",
        PATH[:-1],
        PATH + "0",
        PATH + "\n",
        " " + PATH,
        PATH.upper(),
        PATH.replace("-12-", "-012-"),
        PATH.replace("-12-", "-0-"),
        PATH.replace("-12-", "-4294967296-"),
        PATH.replace("-12-", "-١٢-"),  # digits, but not these
        PATH.replace("-1-", "-01-"),
        PATH.replace("-1-", "-65536-"),
        PATH.replace("-rows-", "-ro.ws-"),
        PATH.replace("-rows-", "-Rows-"),
        PATH.replace("-rows-", "--"),
        PATH.replace("/70/", "/71/"),
        PATH.replace("/70/", "/"),
        PATH.replace("-000000000000000a", "-0000000000000000"),
        PATH.replace("-000000000000000a", "-a"),
        "../" + PATH,
        PATH + "/..",
    ],
)
def test_every_other_string_is_no_path(path: str) -> None:
    with pytest.raises(IdentityError):
        FrameKey.parse(path)


@given(st.text(alphabet="0123456789abcdef/-.rows", max_size=300))
def test_no_string_breaks_the_parser(path: str) -> None:
    with suppress(IdentityError):  # and nothing else
        assert FrameKey.parse(path).path() == path


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"namespace": b"n"}, "namespace has 1 bytes"),
        ({"prefix": b"p" * 33}, "prefix has 33 bytes"),
        ({"parent": b""}, "parent has 0 bytes"),
        ({"group": "../x"}, "group '../x'"),
        ({"group": "g" * 33}, "group"),
        ({"tokens": 0}, "tokens 0"),
        ({"tokens": 1 << 32}, "tokens 4294967296"),
        ({"rank": -1}, "rank -1"),
        ({"rank": 1 << 16}, "rank 65536"),
        ({"private": -1}, "private -1"),
        ({"private": 1 << 64}, "private 18446744073709551616"),
    ],
)
def test_what_cannot_be_a_key_is_refused_by_name(change: dict[str, object], complaint: str) -> None:
    key = dataclasses.replace(FrameKey.parse(PATH), **change)  # type: ignore[arg-type]
    with pytest.raises(IdentityError, match=complaint):
        key.check()
