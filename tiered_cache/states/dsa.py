"""DSA indexer rows: what pooled sparse attention keeps of every token to score it later.

A row is the normed indexer key, the gate of its pool's weighted mean, and whether the token is valid (not padding);
fixed buffers and a host cursor. Model: `glm5_next` in transformers 5.23, which packs the three as
[B, S, 2 head_dim + 1].

Whole-layer blob: `[len u64][head_dim u64][keys bf16 len x head_dim][gate bf16 len x head_dim][valid u8 len]`, that is
16 + len * (4 * head_dim + 1) bytes: the rows written, never the capacity.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import Device
from tiered_cache.errors import BlobError
from tiered_cache.geometry import Part, PartKind
from tiered_cache.states.blobs import unpack_header
from tiered_cache.states.rows import FixedRows

_HEADER = struct.Struct("<QQ")
KEYS, GATE, VALID = "dsa.keys", "dsa.gate", "dsa.valid"


@dataclass(frozen=True, slots=True)
class DsaLayout:
    """Which layers have an indexer, and its head dimension; the same on every rank."""

    layers: tuple[int, ...]
    head_dim: int = 128

    def parts(self) -> tuple[Part, ...]:
        """Rows `dsa.keys` and `dsa.gate` [head_dim] in bfloat16 and `dsa.valid` [] in uint8, 0 or 1."""
        return (
            Part(KEYS, PartKind.ROWS, "bfloat16", (self.head_dim,), self.layers),
            Part(GATE, PartKind.ROWS, "bfloat16", (self.head_dim,), self.layers),
            Part(VALID, PartKind.ROWS, "uint8", (), self.layers),
        )


class DsaIndexer(FixedRows):
    """One sequence's indexer rows over all layers."""

    flags = (VALID,)

    def __init__(self, layout: DsaLayout, device: Device, capacity_tokens: int) -> None:
        super().__init__("DSA", device, layout.parts(), capacity_tokens)
        self.layout = layout

    def _pack_header(self, index: int) -> bytes:  # noqa: ARG002
        return _HEADER.pack(self.tokens, self.layout.head_dim)

    def _unpack_header(self, blob: npt.NDArray[np.uint8]) -> tuple[int, int]:
        tokens, head_dim = unpack_header(self.title, _HEADER, blob)
        if head_dim != self.layout.head_dim:
            raise BlobError(f"{self.title}: head dim {head_dim} in the blob, {self.layout.head_dim} here")
        return _HEADER.size, tokens
