"""QSA indexer: raw keys of all tokens, and pooled block keys that a query is scored against.

Block b over `ratio` tokens, in float32: the mean of raw keys `b * ratio .. b * ratio + ratio - 1`; times
`rsqrt(mean square + epsilon) * (1 + weight)`; rotate-half RoPE on the first `rotary_dim` dims, pairs
(j, j + rotary_dim / 2), at position `b * ratio`. Model: `qwen4_exp` in transformers 5.23. Two roundings:

- `once`: one bfloat16 rounding, at the store; frequencies are `theta ** (-2 j / rotary_dim)`.
- `each`: as that model computes in bfloat16: a rounding after mean and norm, of cosine and sine, of both products and
  of their sum; frequencies are `1 / theta ** (2 j / rotary_dim)` in float32.

The choice belongs in the owner's identity. Sums are taken in one fixed order, by elementwise operations alone, so that
pooling bit for bit does not depend on how the rows arrived, nor on the array module.

Block keys are a function of the raw keys. They are therefore in no frame and no blob: a restore pools them again.
Likewise `pooled`, how many blocks have been pooled, is no part of a sequence's state: frames do not carry it, and a
restore from frames pools every full block. Whole-layer blobs carry it, and one that lags is restored as it is.

Whole-layer blob: `[ingested u64][pooled u64][raw keys bf16, ingested x head_dim]`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import Array, Device
from tiered_cache.errors import BlobError, ConfigError, PositionError
from tiered_cache.geometry import ArraySpec, Part, PartKind
from tiered_cache.states import bfloat16
from tiered_cache.states.blobs import Blob, blob_bytes, unpack_header
from tiered_cache.states.rows import FixedRows

_HEADER = struct.Struct("<QQ")
KEYS = "qsa.keys"
_HOST_STEP_ELEMENTS = 1 << 17  # raw keys pooled in one step: the temporaries stay in the processor's cache
_DEVICE_STEP_ELEMENTS = 1 << 24  # few launches, and temporaries of 64 MiB at most

Rounding = Literal["once", "each"]
Float32s = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class QsaLayout:
    """Which layers have an indexer, and how it pools; the same on every rank."""

    layers: tuple[int, ...]
    head_dim: int = 128
    ratio: int = 4
    rotary_dim: int = 64
    theta: float = 1e7
    epsilon: float = 1e-6
    rounding: Rounding = "once"

    def __post_init__(self) -> None:
        if self.ratio < 1 or self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"QSA ratio {self.ratio}, rotary_dim {self.rotary_dim}, head_dim {self.head_dim}: the ratio must be 1 "
                "or more, the rotary dim even and no larger than the head dim"
            )
        if self.rounding not in ("once", "each"):
            raise ConfigError(f"QSA rounding {self.rounding!r} is neither 'once' nor 'each'")

    def parts(self) -> tuple[Part, ...]:
        """Rows `qsa.keys` [head_dim] in bfloat16."""
        return (Part(KEYS, PartKind.ROWS, "bfloat16", (self.head_dim,), self.layers),)


def pool_blocks(xp: ModuleType, layout: QsaLayout, keys: Bits, weight: Float32s, first_block: int) -> Bits:
    """Block keys [L, n, head_dim] of raw keys [L, n * ratio, head_dim]; `first_block` is the number of the first one.

    `weight`, [L, head_dim], is the norm's offset from one.
    """
    layers, rows, head_dim = keys.shape
    blocks = rows // layout.ratio
    each = layout.rounding == "each"
    groups = bfloat16.to_float32(keys).reshape(layers, blocks, layout.ratio, head_dim)
    mean = groups[:, :, 0]
    for row in range(1, layout.ratio):
        mean = mean + groups[:, :, row]
    mean = mean / np.float32(layout.ratio)
    if each:
        mean = bfloat16.rounded(xp, mean)
    mean_square = _sum_last(xp, mean * mean) / np.float32(head_dim)
    scale = xp.reciprocal(xp.sqrt(mean_square + np.float32(layout.epsilon)))
    normed = mean * scale * (weight[:, None, :] + np.float32(1))
    if each:
        normed = bfloat16.rounded(xp, normed)
    half = layout.rotary_dim // 2
    cosine, sine = (xp.asarray(table) for table in _rotation(layout, first_block, blocks))
    low, high = normed[..., :half], normed[..., half : 2 * half]
    products = low * cosine, high * sine, high * cosine, low * sine
    if each:
        products = cast(
            "tuple[Float32s, Float32s, Float32s, Float32s]", tuple(bfloat16.rounded(xp, p) for p in products)
        )
    low_cosine, high_sine, high_cosine, low_sine = products
    rotated = xp.concatenate((low_cosine - high_sine, high_cosine + low_sine, normed[..., 2 * half :]), axis=-1)
    return bfloat16.from_float32(xp, rotated)


def _sum_last(xp: ModuleType, values: Float32s) -> Float32s:
    """The sum over the last axis, kept as an axis of 1: by halves, so that the order is fixed."""
    while (width := values.shape[-1]) > 1:
        half = width // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = folded if width % 2 == 0 else xp.concatenate((folded, values[..., 2 * half :]), axis=-1)
    return values


def _rotation(layout: QsaLayout, first_block: int, blocks: int) -> tuple[Float32s, Float32s]:
    """Cosine and sine [blocks, rotary_dim / 2] of the blocks' positions.

    The angle is a float32 product; its cosine is taken in float64 and rounded, which no vector library changes.
    """
    exponents = np.arange(0, layout.rotary_dim, 2, dtype=np.float64) / max(layout.rotary_dim, 1)
    if layout.rounding == "each":
        powers = layout.theta ** exponents.astype(np.float32).astype(np.float64)
        frequencies = np.float32(1) / powers.astype(np.float32)
    else:
        frequencies = (layout.theta**-exponents).astype(np.float32)
    positions = (np.arange(first_block, first_block + blocks, dtype=np.int64) * layout.ratio).astype(np.float32)
    angles = (positions[:, None] * frequencies).astype(np.float64)
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if layout.rounding == "each":
        return bfloat16.rounded(np, cosine), bfloat16.rounded(np, sine)
    return cosine, sine


class QsaIndexer(FixedRows):
    """One sequence's raw keys and block keys over all layers. The cursor `tokens` is the blob's `ingested`."""

    def __init__(self, layout: QsaLayout, device: Device, capacity_tokens: int, weight: Array | None = None) -> None:
        """`weight`: float32 [layers, head_dim] in device memory, the norm's offset from one; zeros by default."""
        super().__init__("QSA", device, layout.parts(), capacity_tokens)
        self.layout = layout
        count = len(layout.layers)
        if weight is None:
            weight = device.zeros(ArraySpec("float32", (count, layout.head_dim)))
        if weight.shape != (count, layout.head_dim) or weight.dtype != np.float32:
            raise ConfigError(
                f"QSA norm weight is {weight.dtype} {weight.shape}, not float32 {(count, layout.head_dim)}"
            )
        self.weight = cast("Float32s", weight)
        self.pooled: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        """How many blocks of each layer have been pooled, shape [layers], in host memory; at most tokens // ratio."""
        self._block_keys = device.empty(
            ArraySpec("bfloat16", (count, capacity_tokens // layout.ratio, layout.head_dim))
        )

    @property
    def full_blocks(self) -> int:
        return self.tokens // self.layout.ratio

    def block_keys(self, start: int, stop: int) -> Array:
        """Block keys [layers, stop - start, head_dim], a view. Raises `PositionError` for blocks not yet pooled."""
        self.check_live()
        if not 0 <= start <= stop <= int(self.pooled.min()):
            raise PositionError(f"QSA: block keys [{start}, {stop}), but {int(self.pooled.min())} blocks are pooled")
        return self._block_keys[:, start:stop]

    def pool(self) -> None:
        """Pool every full block that has not been pooled yet."""
        self.check_live()
        first, last = int(self.pooled.min()), self.full_blocks
        if first < last:
            self._pool(first, last)
            self.pooled[:] = last

    def _pool(self, first: int, last: int) -> None:
        count, ratio = len(self.layers), self.layout.ratio
        elements = _HOST_STEP_ELEMENTS if self.device.host_memory else _DEVICE_STEP_ELEMENTS
        step = max(1, elements // (count * ratio * self.layout.head_dim))
        for start in range(first, last, step):
            stop = min(start + step, last)
            keys = cast("Bits", self.buffers[KEYS][:, start * ratio : stop * ratio])
            with np.errstate(
                over="ignore", invalid="ignore"
            ):  # keys are any bits: infinities and NaNs are carried along
                self._block_keys[:, start:stop] = pool_blocks(self.device.xp, self.layout, keys, self.weight, start)

    def rewind_to(self, tokens: int) -> None:
        """Move the cursor back; a block that is cut is pooled again once it is full again."""
        super().rewind_to(tokens)
        np.minimum(self.pooled, self.full_blocks, out=self.pooled)

    def restore(self, blobs: Mapping[int, Blob]) -> None:
        """As `RowState.restore`; also raises `BlobError` where more blocks are pooled than are full."""
        self.check_live()
        super().restore(blobs)
        headers = [unpack_header(self.title, _HEADER, blob_bytes(blobs[layer])) for layer in self.layers]
        self.pooled[:] = [pooled for _, pooled in headers]
        self._pool(0, int(self.pooled.max()))

    def release(self) -> None:
        super().release()
        self._block_keys = self._block_keys[:, :0].copy()
        self.pooled[:] = 0

    def _pack_header(self, index: int) -> bytes:
        return _HEADER.pack(self.tokens, int(self.pooled[index]))

    def _unpack_header(self, blob: npt.NDArray[np.uint8]) -> tuple[int, int]:
        ingested, pooled = unpack_header(self.title, _HEADER, blob)
        if pooled > ingested // self.layout.ratio:
            raise BlobError(
                f"QSA: {pooled} blocks are pooled of {ingested} keys, which fill {ingested // self.layout.ratio}"
            )
        return _HEADER.size, ingested
