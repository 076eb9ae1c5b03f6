"""What a sequence's state looks like: parts, groups and shapes, as plain data and arithmetic.

A `Geometry` is the same for every rank of a sharded layout and never holds the rank. Arrays are bit patterns: the
tier moves bits and does not compute, so bfloat16 is held as uint16 and fp8 as uint8 (`storage_dtype`), and the
real dtype's name travels along.

Shapes, with L = len(part.layers) and T tokens in the span:

    rows, window   [L, T, *part.shape]     one row per layer and token
    carry          [L, *part.shape]        valid at exactly one token count
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType

import numpy as np

from tiered_cache.errors import GeometryError
from tiered_cache.identity import CHECKPOINT, RANKS_MAX, TICKET, TOKENS_MAX, tagged_hash

PARTS_MAX = 4096
LAYERS_MAX = 4096
DIMENSIONS_MAX = 8
ARRAY_BYTES_MAX = 1 << 40
BLOCK_TOKENS_MAX = 1 << 20
ROWS = "rows"

_STORAGE: Mapping[str, np.dtype[np.generic]] = MappingProxyType(
    {
        **{n: np.dtype(n) for n in ("float16", "float32", "float64", "complex64")},
        **{f"{kind}{bits}": np.dtype(f"{kind}{bits}") for kind in ("uint", "int") for bits in (8, 16, 32, 64)},
        "bool": np.dtype(np.uint8),
        "bfloat16": np.dtype(np.uint16),
        "float8_e4m3fn": np.dtype(np.uint8),
        "float8_e5m2": np.dtype(np.uint8),
    }
)
_PART_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]{0,127}")


def storage_dtype(dtype: str) -> np.dtype[np.generic]:
    """The NumPy dtype whose bit patterns hold values of `dtype`. Raises `GeometryError` for an unknown name."""
    try:
        return _STORAGE[dtype]
    except KeyError:
        raise GeometryError(f"dtype {dtype!r} is not one of {', '.join(sorted(_STORAGE))}") from None


class PartKind(enum.StrEnum):
    """How a part changes while its sequence grows."""

    ROWS = "rows"  # one row a token, never changed: rows [0, n) of a longer snapshot are the snapshot at n
    WINDOW = "window"  # rows of which only the last `window_tokens` are needed
    CARRY = "carry"  # overwritten in place, valid at one token count


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Dtype name and shape of one array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The NumPy dtype that holds the bit patterns."""
        return storage_dtype(self.dtype)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * storage_dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """One named array of a sequence's state, over all the layers that have it; shapes are one shard's."""

    name: str
    kind: PartKind
    dtype: str
    shape: tuple[int, ...]
    """Shape of one row (rows, window) or of one layer's whole carry."""
    layers: tuple[int, ...] = (0,)
    window_tokens: int = 0
    """For windows: how many of the last tokens' rows a restore needs."""
    shard_axis: int | None = None
    """The axis of `shape` that is cut over the ranks; None if every rank holds the same."""
    content_dtype: str = ""
    """For opaque uint8 pages: what their bytes really are, a hint for the codec."""

    def __post_init__(self) -> None:
        problems = []
        if not _PART_NAME.fullmatch(self.name):
            problems.append("name is not letters, digits, '_' and '.'")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            problems.append(f"layers {self.layers} are not ascending and distinct")
        if len(self.layers) > LAYERS_MAX or len(self.shape) > DIMENSIONS_MAX:
            problems.append(f"more than {LAYERS_MAX} layers or {DIMENSIONS_MAX} dimensions")
        if any(size < 0 for size in self.shape) or self.row_bytes * len(self.layers) > ARRAY_BYTES_MAX:
            problems.append(f"shape {self.shape} is negative or larger than {ARRAY_BYTES_MAX} bytes")
        if (self.window_tokens > 0) != (self.kind is PartKind.WINDOW) or self.window_tokens < 0:
            problems.append(f"window_tokens {self.window_tokens} does not fit kind {self.kind}")
        if self.shard_axis is not None and not 0 <= self.shard_axis < len(self.shape):
            problems.append(f"shard_axis {self.shard_axis} is not an axis of {self.shape}")
        if self.content_dtype:
            storage_dtype(self.content_dtype)
        if problems:
            raise GeometryError(f"part {self.name!r}: " + "; ".join(problems))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, or of the whole carry, of one layer."""
        return ArraySpec(self.dtype, self.shape).bytes

    @property
    def group(self) -> str:
        """The group whose frames hold this part: `rows`, `window.W` or `checkpoint`."""
        if self.kind is PartKind.ROWS:
            return ROWS
        return f"window.{self.window_tokens}" if self.kind is PartKind.WINDOW else CHECKPOINT

    def array(self, tokens: int) -> ArraySpec:
        """The array over `tokens` tokens; a carry's does not depend on them."""
        span = () if self.kind is PartKind.CARRY else (tokens,)
        return ArraySpec(self.dtype, (len(self.layers), *span, *self.shape))


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Parts that are spilled and needed together, one frame a block."""

    name: str
    window_tokens: int
    """0: every block below n is needed; else those that cover the last `window_tokens` tokens before n."""
    parts: tuple[Part, ...]

    def blocks_needed(self, tokens: int, block_tokens: int) -> range:
        """Indices of the full blocks that a restore to `tokens` tokens needs from this group."""
        first = max(0, tokens - self.window_tokens) // block_tokens if self.window_tokens else 0
        return range(first, tokens // block_tokens)


@dataclass(frozen=True)
class Geometry:
    """All parts of a sequence's state, the block size and the shard layout. Plain data, equal on every rank."""

    parts: tuple[Part, ...]
    block_tokens: int
    shards: int = 1

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        problems = []
        if not 0 < len(self.parts) <= PARTS_MAX:
            problems.append(f"{len(self.parts)} parts, not 1 .. {PARTS_MAX}")
        if len(set(names)) != len(names):
            problems.append("two parts have one name")
        if not 0 < self.block_tokens <= BLOCK_TOKENS_MAX:
            problems.append(f"block_tokens {self.block_tokens} is outside 1 .. {BLOCK_TOKENS_MAX}")
        if not 0 < self.shards <= RANKS_MAX:
            problems.append(f"shards {self.shards} is outside 1 .. {RANKS_MAX}")
        if problems:
            raise GeometryError("; ".join(problems))

    @cached_property
    def block_groups(self) -> tuple[BlockGroup, ...]:
        """The groups that have one frame a block: `rows`, then the windows by size."""
        groups: dict[tuple[int, str], list[Part]] = {}
        for part in self.parts:
            if part.kind is not PartKind.CARRY:
                groups.setdefault((part.window_tokens, part.group), []).append(part)
        return tuple(BlockGroup(name, window, tuple(groups[window, name])) for window, name in sorted(groups))

    @cached_property
    def carries(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.kind is PartKind.CARRY)

    def needs_checkpoint(self, tokens: int) -> bool:
        """Whether a restore to `tokens` needs a checkpoint frame: there are carries, or it is inside a block."""
        return bool(self.carries) or tokens % self.block_tokens != 0

    def checkpoint_bytes(self, tokens: int) -> int:
        """Raw bytes of the checkpoint frame at `tokens`, 0 where none is needed."""
        return self.frame_bytes(CHECKPOINT, tokens) if self.needs_checkpoint(tokens) else 0

    @cached_property
    def block_bytes(self) -> int:
        """Raw bytes of all groups' frames of one block."""
        return sum(self.frame_bytes(group.name, self.block_tokens) for group in self.block_groups)

    def span(self, group: str, tokens: int) -> tuple[int, int]:
        """The span [start, stop) whose rows a frame at `tokens` holds. Raises `GeometryError` if there is none."""
        if not 0 < tokens < TOKENS_MAX:
            raise GeometryError(f"tokens {tokens} is outside 1 .. 2**32 - 1")
        if group in {CHECKPOINT, TICKET}:
            return tokens - tokens % self.block_tokens, tokens
        if tokens % self.block_tokens:
            raise GeometryError(f"a block frame ends at {tokens}, not a multiple of {self.block_tokens}")
        return tokens - self.block_tokens, tokens

    @cached_property
    def _contents(self) -> dict[tuple[str, int], tuple[dict[str, ArraySpec], int]]:
        """(group, span length) -> arrays of such a frame, and their bytes: few shapes, asked for very often."""
        return {}

    def arrays(self, group: str, tokens: int) -> Mapping[str, ArraySpec]:
        """Name -> spec of the arrays in the frame of `group` that ends at `tokens`.

        A checkpoint frame holds all carries, and every other part's rows of the partial block before it; a ticket's
        none.
        """
        return self._content(group, tokens)[0]

    def frame_bytes(self, group: str, tokens: int) -> int:
        """Raw bytes of all arrays in one frame."""
        return self._content(group, tokens)[1]

    def _content(self, group: str, tokens: int) -> tuple[dict[str, ArraySpec], int]:
        start, stop = self.span(group, tokens)
        content = self._contents.get((group, stop - start))
        if content is None:
            arrays = self._arrays(group, start, stop)
            content = self._contents[group, stop - start] = arrays, sum(spec.bytes for spec in arrays.values())
        return content

    def _arrays(self, group: str, start: int, stop: int) -> dict[str, ArraySpec]:
        if group == TICKET:
            return {}
        if group == CHECKPOINT:
            parts = self.carries if start == stop else self.parts
        else:
            found = [g for g in self.block_groups if g.name == group]
            if not found:
                raise GeometryError(f"no group {group!r}; there are {[g.name for g in self.block_groups]}")
            parts = found[0].parts
        return {part.name: part.array(stop - start) for part in parts}

    def restore_bytes(self, tokens: int) -> int:
        """Raw bytes that a restore to `tokens` tokens brings to the device: what capacity is checked against."""
        blocks = sum(
            len(group.blocks_needed(tokens, self.block_tokens)) * self.frame_bytes(group.name, self.block_tokens)
            for group in self.block_groups
        )
        return blocks + self.checkpoint_bytes(tokens)

    @cached_property
    def _fingerprint(self) -> bytes:
        fields_of_parts = [part for p in self.parts for part in _encode_part(p)]
        head = (self.block_tokens.to_bytes(8, "little"), self.shards.to_bytes(8, "little"))
        return tagged_hash("geometry", *head, *fields_of_parts)

    def fingerprint(self) -> bytes:
        """32 bytes that are equal exactly when every field is equal."""
        return self._fingerprint

    def check(self, other: Geometry) -> None:
        """Raise `GeometryError` listing every field in which `other` differs."""
        differing = [
            f"{name} is {getattr(self, name)} here and {getattr(other, name)} there"
            for name in ("block_tokens", "shards")
            if getattr(self, name) != getattr(other, name)
        ]
        mine, theirs = ({p.name: p for p in g.parts} for g in (self, other))
        differing += [f"part {name!r} is only here" for name in mine if name not in theirs]
        differing += [f"part {name!r} is only there" for name in theirs if name not in mine]
        for name in mine.keys() & theirs.keys():
            differing += [
                f"part {name!r}: {f.name} is {a!r} here and {b!r} there"
                for f in fields(Part)
                if (a := getattr(mine[name], f.name)) != (b := getattr(theirs[name], f.name))
            ]
        if not differing and list(mine) != list(theirs):
            differing.append(f"parts are ordered {list(mine)} here and {list(theirs)} there")
        if differing:
            raise GeometryError("geometry differs: " + "; ".join(differing))

    def to_document(self) -> dict[str, object]:
        """Plain data (msgpack types) for a namespace's descriptor."""
        parts = [{f.name: _plain(getattr(part, f.name)) for f in fields(Part)} for part in self.parts]
        return {"block_tokens": self.block_tokens, "shards": self.shards, "parts": parts}

    @staticmethod
    def from_document(document: object) -> Geometry:
        """What `to_document` described. Raises `GeometryError` for unknown, missing or ill-typed fields."""
        top = _typed_fields(document, {"block_tokens": int, "shards": int, "parts": list}, "geometry")
        wanted: dict[str, type | tuple[type, ...]] = {
            "name": str,
            "kind": str,
            "dtype": str,
            "shape": list,
            "layers": list,
            "window_tokens": int,
            "shard_axis": (int, type(None)),
            "content_dtype": str,
        }
        parts = []
        for item in top["parts"]:  # type: ignore[attr-defined]
            values = _typed_fields(item, wanted, "part")
            if values["kind"] not in set(PartKind):
                raise GeometryError(f"part kind {values['kind']!r} is unknown")
            for name in ("shape", "layers"):
                if any(type(size) is not int for size in values[name]):  # type: ignore[attr-defined]
                    raise GeometryError(f"part {name} {values[name]!r} is not a list of integers")
                values[name] = tuple(values[name])  # type: ignore[arg-type]
            values["kind"] = PartKind(str(values["kind"]))
            parts.append(Part(**values))  # type: ignore[arg-type]
        return Geometry(tuple(parts), top["block_tokens"], top["shards"])  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, PartKind) else value


def _encode_part(part: Part) -> list[bytes]:
    """The part's fields as bytes, tagged by name; sequences are prefixed by their length in `tagged_hash`."""
    encoded: list[bytes] = []
    for f in fields(Part):
        value = getattr(part, f.name)
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        encoded += [f.name.encode(), str(value).encode()]
    return encoded


def _typed_fields(document: object, wanted: Mapping[str, type | tuple[type, ...]], what: str) -> dict[str, object]:
    if not isinstance(document, dict) or set(document) != set(wanted):
        have = sorted(map(str, document)) if isinstance(document, dict) else type(document).__name__
        raise GeometryError(f"{what} has fields {have}, not {sorted(wanted)}")
    for name, kind in wanted.items():
        if not isinstance(document[name], kind) or isinstance(document[name], bool):
            raise GeometryError(f"{what} field {name} is {type(document[name]).__name__}")
    return dict(document)
