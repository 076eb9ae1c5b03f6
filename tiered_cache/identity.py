"""Whose state this is and under which names it is kept: `Identity`, the block-hash chain and `FrameKey`.

Every hash is SHA-256 over tagged, length-prefixed fields, so that no joining of two fields can equal another, and
never the interpreter's `hash()`: processes with other hash seeds, and other Python versions, compute equal keys.

    namespace  = H("namespace", identity digest, geometry fingerprint)
    h(0)       = H("root", namespace)
    h(i + 1)   = H("block", h(i), tokens of block i as u32 little-endian, extra keys of block i)
    tail(n)    = H("tail", h(n // B), tokens of the partial block, its extra keys)    for n not a multiple of B

`extra keys` are what decides a block's state besides its token ids: the digests of the media that fall into it.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_cache.errors import IdentityError

DIGEST_BYTES = 32
TOKENS_MAX = 1 << 32
RANKS_MAX = 1 << 16
CHECKPOINT = "checkpoint"
"""The group of the frames that hold all carries at one token count, and the rows of its partial block."""
TICKET = "ticket"
"""The group of the frames that hold nothing: while a suspended sequence's is there, it can be resumed, once."""

Tokens = npt.NDArray[np.uint32]
ExtraKeys = Mapping[int, Sequence[bytes]]
"""Block index -> digests of the media in that block, in order of position."""

_U64 = struct.Struct("<Q")
_GROUP = re.compile(r"[a-z][a-z0-9]{0,31}(?:\.[0-9]{1,10})?")
_PATH = re.compile(
    r"(?P<namespace>[0-9a-f]{64})/(?P<fan>[0-9a-f]{2})/(?P<prefix>[0-9a-f]{64})-(?P<parent>[0-9a-f]{64})"
    r"-(?P<group>[a-z][a-z0-9.]{0,42})-(?P<tokens>[0-9]{1,10})-(?P<rank>[0-9]{1,5})"
    r"(?:-(?P<private>[0-9a-f]{16}))?"
)


def tagged_hash(tag: str, *parts: bytes | memoryview) -> bytes:
    """SHA-256 over `tag` and `parts`, each with its length before it."""
    digest = hashlib.sha256(b"tiered-cache 1 ")
    for part in (tag.encode(), *parts):
        digest.update(_U64.pack(len(part)))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything but the tokens and the geometry that decides what a sequence's state is.

    Two owners share frames only if every field is equal. An absent field and an empty one are the same.
    """

    weights_digest: bytes
    """SHA-256 over the bytes of all weights (`weights_digest()`), never a model's name: fine-tunes share names."""
    engine: str
    """The engine that computes the state, such as `reference` or `transformers`."""
    engine_revision: str
    """Its version: a state made by another kernel is another state."""
    rounding: str = ""
    """Where intermediate results are rounded, if the engine leaves a choice."""
    number_format: str = ""
    """How stored values are quantised, such as `fp8_e4m3 per head`; the bare dtype is part of the geometry."""
    scales_digest: bytes = b""
    """SHA-256 over the quantisation scales."""
    tokenizer_digest: bytes = b""
    adapter_digest: bytes = b""
    """SHA-256 over a LoRA adapter's weights; empty for the base model."""
    tenant_salt: bytes = b""
    """The server's secret for one tenant; tenants with other salts share nothing."""

    def __post_init__(self) -> None:
        problems = []
        for f in fields(self):
            value: str | bytes = getattr(self, f.name)
            wanted = bytes if f.name.endswith(("_digest", "_salt")) else str
            if not isinstance(value, wanted):
                problems.append(f"{f.name} is {type(value).__name__}, not {wanted.__name__}")
            elif f.name.endswith("_digest") and len(value) not in {0, DIGEST_BYTES}:
                problems.append(f"{f.name} has {len(value)} bytes, not {DIGEST_BYTES}")
        if not problems:
            problems += [f"{n} is empty" for n in ("weights_digest", "engine") if not getattr(self, n)]
        if problems:
            raise IdentityError("; ".join(problems))

    def digest(self) -> bytes:
        """32 bytes that are equal exactly when every field is equal."""
        parts: list[bytes] = []
        for f in fields(self):
            value = getattr(self, f.name)
            parts += [f.name.encode(), b"bytes" if isinstance(value, bytes) else b"text"]
            parts.append(value if isinstance(value, bytes) else value.encode())
        return tagged_hash("identity", *parts)

    def check(self, other: Identity) -> None:
        """Raise `IdentityError` naming every field in which `other` differs; salts are named, never shown."""
        differing = []
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine == theirs:
                continue
            if f.name == "tenant_salt":
                differing.append(f.name)
            else:
                shown = [v.hex()[:16] if isinstance(v, bytes) else v for v in (mine, theirs)]
                differing.append(f"{f.name} is {shown[0]!r} here and {shown[1]!r} there")
        if differing:
            raise IdentityError("identity differs: " + "; ".join(differing))

    def to_document(self) -> dict[str, object]:
        """Plain data for a namespace's descriptor; the salt is replaced by its hash, so it does not leak to disk."""
        document: dict[str, object] = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.tenant_salt:
            document["tenant_salt"] = tagged_hash("salt", self.tenant_salt)
        return document


def weights_digest(paths: Sequence[Path]) -> bytes:
    """SHA-256 over the names and bytes of all weight files, in the order of their names.

    Reads every byte: fine-tunes have identical headers, and in-place updates identical paths.
    """
    digest = hashlib.sha256(b"tiered-cache weights 1")
    for path in sorted(paths, key=lambda p: p.name):
        name = path.name.encode()
        digest.update(_U64.pack(len(name)) + name + _U64.pack(path.stat().st_size))
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.digest()


def namespace_of(identity_digest: bytes, geometry_fingerprint: bytes) -> bytes:
    """The 32-byte namespace: part of every key, shared by all ranks of one layout."""
    return tagged_hash("namespace", identity_digest, geometry_fingerprint)


@dataclass(slots=True)
class PrefixChain:
    """The block hashes of one token list; grows with it, and costs nothing per token between block ends.

    `tokens` is a uint32 array of shape [n]; it is not copied, and must not be changed afterwards.
    """

    namespace: bytes
    block_tokens: int
    tokens: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    extra_keys: ExtraKeys = field(default_factory=dict)
    _hashes: list[bytes] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._hashes.append(tagged_hash("root", self.namespace))
        self._hash_full_blocks()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def blocks(self) -> int:
        """How many full blocks there are."""
        return len(self._hashes) - 1

    def block_hash(self, index: int) -> bytes:
        """h(index): the hash of the first `index` full blocks; h(0) is the namespace's root."""
        return self._hashes[index]

    def block_hashes(self) -> Sequence[bytes]:
        """h(0) .. h(blocks)."""
        return self._hashes

    def prefix_hash(self, tokens: int) -> bytes:
        """The hash of the first `tokens` tokens, at a block's end or inside a block."""
        assert 0 <= tokens <= len(self.tokens)
        block, tail = divmod(tokens, self.block_tokens)
        if not tail:
            return self._hashes[block]
        return tail_hash(self._hashes[block], self.tokens[tokens - tail : tokens], self.extra_keys.get(block, ()))

    def key(self, group: str, tokens: int, rank: int, private: int = 0) -> FrameKey:
        """The key of the frame of `group` that ends at `tokens`."""
        parent = self._hashes[(tokens - 1) // self.block_tokens]
        return FrameKey(self.namespace, self.prefix_hash(tokens), parent, group, tokens, rank, private)

    def extend(self, tokens: Tokens) -> None:
        """Append tokens: shape [k], uint32."""
        self.tokens = np.concatenate((self.tokens, tokens))
        self._hash_full_blocks()

    def _hash_full_blocks(self) -> None:
        assert self.tokens.dtype == np.uint32
        assert self.tokens.ndim == 1
        hashes, size = self._hashes, self.block_tokens * 4
        raw = memoryview(np.ascontiguousarray(self.tokens).view(np.uint8).data)
        for index in range(len(hashes) - 1, len(self.tokens) // self.block_tokens):
            body = raw[index * size : (index + 1) * size]
            hashes.append(tagged_hash("block", hashes[index], body, *self.extra_keys.get(index, ())))


def tail_hash(block_hash: bytes, tail: Tokens, extra_keys: Sequence[bytes] = ()) -> bytes:
    """The hash of a prefix that ends inside a block: `tail` are the tokens after the last full block's end."""
    return tagged_hash("tail", block_hash, np.ascontiguousarray(tail).view(np.uint8).data, *extra_keys)


@dataclass(frozen=True, slots=True)
class FrameKey:
    """The name of one frame: one group's state over one block, or one checkpoint, of one shard.

    `prefix` is the hash of everything up to `tokens`; `parent` the hash of the block end before it, so that names
    alone rebuild the tree of prefixes. `private` is 0 for a frame that every sequence with this prefix may use, and
    else the lineage of the one suspended sequence that must get back its very own bytes.
    """

    namespace: bytes
    prefix: bytes
    parent: bytes
    group: str
    tokens: int
    rank: int = 0
    private: int = 0

    def path(self) -> str:
        """The name under which every tier keeps the frame: lower-case hex, digits, `-`, `.` and `/` alone."""
        prefix = self.prefix.hex()
        name = f"{prefix}-{self.parent.hex()}-{self.group}-{self.tokens}-{self.rank}"
        private = f"-{self.private:016x}" if self.private else ""
        return f"{self.namespace.hex()}/{prefix[:2]}/{name}{private}"

    def short(self) -> str:
        """Enough of the name for a line of a log to find the frame by."""
        rank, private = f" of rank {self.rank}" if self.rank else "", " (private)" if self.private else ""
        return f"{self.group} at {self.tokens:,} tokens{rank}, {self.prefix.hex()[:16]}{private}"

    @staticmethod
    def parse(path: str) -> FrameKey:
        """The key that has this path. Raises `IdentityError` for any other string."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise IdentityError("not a frame's path", path)
        key = FrameKey(
            bytes.fromhex(match["namespace"]),
            bytes.fromhex(match["prefix"]),
            bytes.fromhex(match["parent"]),
            match["group"],
            int(match["tokens"]),
            int(match["rank"]),
            int(match["private"] or "0", 16),
        )
        if key.path() != path:  # leading zeros, another fan-out directory
            raise IdentityError("not the canonical form of a frame's path", path)
        key.check()
        return key

    def check(self) -> None:
        """Raise `IdentityError` if a field cannot be a key's: the limits hold for names that others wrote, too."""
        problems = [
            f"{name} has {len(value)} bytes, not {DIGEST_BYTES}"
            for name, value in (
                ("namespace", self.namespace),
                ("prefix", self.prefix),
                ("parent", self.parent),
            )
            if len(value) != DIGEST_BYTES
        ]
        if not _GROUP.fullmatch(self.group):
            problems.append(f"group {self.group!r} is not a group's name")
        if not 0 < self.tokens < TOKENS_MAX:
            problems.append(f"tokens {self.tokens} is outside 1 .. 2**32 - 1")
        if not 0 <= self.rank < RANKS_MAX:
            problems.append(f"rank {self.rank} is outside 0 .. {RANKS_MAX - 1}")
        if not 0 <= self.private < 1 << 64:
            problems.append(f"private {self.private} is outside 0 .. 2**64 - 1")
        if problems:
            raise IdentityError("; ".join(problems))
