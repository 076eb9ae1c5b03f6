"""Paged KV: a sequence's key and value rows in pages from a pool that all the sequences of a device share.

Each sequence has a page table. Key and value dims may differ, and a value dim of 0 is legal: then one latent row a
token is all there is (multi-head latent attention, DeepSeek-V2, arXiv 2405.04434). The scheme is PagedAttention's
(arXiv 2309.06180).

Whole-layer blob: `[len u64][key row bytes u64][value row bytes u64][keys, len rows][values, len rows]`.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import Array, Device, PageTable
from tiered_cache.errors import BlobError, CapacityError, ConfigError
from tiered_cache.geometry import ArraySpec, Part, PartKind
from tiered_cache.states.blobs import unpack_header
from tiered_cache.states.rows import RowState

_HEADER = struct.Struct("<QQQ")


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Which layers have KV rows and what one rank's row is: keys [heads, key_dim], values [heads, value_dim]."""

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    name: str = "attn"

    def __post_init__(self) -> None:
        if self.heads < 1 or self.key_dim < 1 or self.value_dim < 0:
            raise ConfigError(
                f"KV heads {self.heads}, key_dim {self.key_dim}, value_dim {self.value_dim}: only the last may be 0"
            )

    def parts(self, *, sharded: bool = False) -> tuple[Part, ...]:
        """`<name>.k` and, unless its dim is 0, `<name>.v`. Latent rows are the same on every rank."""
        axis = 0 if sharded and self.value_dim else None
        dims = {"k": self.key_dim, "v": self.value_dim}
        return tuple(
            Part(f"{self.name}.{suffix}", PartKind.ROWS, self.dtype, (self.heads, dim), self.layers, shard_axis=axis)
            for suffix, dim in dims.items()
            if dim
        )


class PagePool:
    """A bounded number of pages [layers, pages, page_tokens, heads, dim]; thread-safe taking and giving back."""

    def __init__(self, layout: KvLayout, device: Device, pages: int, page_tokens: int) -> None:
        self.layout = layout
        self.device = device
        self.pages = pages
        self.page_tokens = page_tokens
        self.arrays: dict[str, Array] = {
            part.name: device.empty(ArraySpec(part.dtype, (len(part.layers), pages, page_tokens, *part.shape)))
            for part in layout.parts()
        }
        self._free: PageTable = np.arange(pages, dtype=np.int64)[::-1].copy()  # a stack; the lowest page on top
        self._free_count = pages
        self._lock = threading.Lock()

    @property
    def free_pages(self) -> int:
        return self._free_count

    def take(self, count: int) -> PageTable:
        """`count` pages, in ascending runs where possible. Raises `CapacityError` if there are fewer."""
        with self._lock:
            if count > self._free_count:
                raise CapacityError(
                    f"{self.layout.name}: {count} pages wanted, {self._free_count} of {self.pages} free"
                )
            self._free_count -= count
            return self._free[self._free_count : self._free_count + count][::-1].copy()

    def give_back(self, pages: PageTable) -> None:
        with self._lock:
            end = self._free_count + len(pages)
            assert end <= self.pages, "a page was given back twice"
            self._free[self._free_count : end] = pages[::-1]
            self._free_count = end


class PagedKv(RowState):
    """One sequence's key and value rows: parts `<name>.k` and `<name>.v`, appended at the cursor."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(f"KV {pool.layout.name}", pool.device, pool.layout.parts())
        self.pool = pool
        self._table: PageTable = np.empty(0, dtype=np.int64)

    @property
    def page_table(self) -> PageTable:
        """The pages in order of position, shape [pages]; not to be written."""
        return self._table

    @property
    def room(self) -> int:
        return len(self._table) * self.pool.page_tokens

    def ensure_room_through(self, end: int) -> None:
        self.check_live()
        missing = -(-end // self.pool.page_tokens) - len(self._table)
        if missing > 0:
            self._table = np.concatenate((self._table, self.pool.take(missing)))

    def _read(self, name: str, start: int, stop: int, out: Array | None) -> Array:
        return self.device.gather_rows(self.pool.arrays[name], self._table, start, stop, out)

    def _write(self, name: str, start: int, rows: Array) -> None:
        self.device.scatter_rows(self.pool.arrays[name], self._table, start, rows)

    def _read_layer(self, name: str, index: int) -> Array:
        pool = self.pool.arrays[name][index : index + 1]
        rows: Array = self.device.gather_rows(pool, self._table, 0, self.tokens)[0]
        return rows

    def _write_layer(self, name: str, index: int, rows: Array) -> None:
        self.device.scatter_rows(self.pool.arrays[name][index : index + 1], self._table, 0, rows[None])

    def _row_bytes(self) -> tuple[int, int]:
        sizes = [part.row_bytes for part in self.parts.values()]
        return (sizes[0], sizes[1]) if len(sizes) == 2 else (sizes[0], 0)

    def _pack_header(self, index: int) -> bytes:  # noqa: ARG002
        return _HEADER.pack(self.tokens, *self._row_bytes())

    def _unpack_header(self, blob: npt.NDArray[np.uint8]) -> tuple[int, int]:
        tokens, *row_bytes = unpack_header(self.title, _HEADER, blob)
        if tuple(row_bytes) != self._row_bytes():
            raise BlobError(f"{self.title}: rows of {row_bytes} bytes in the blob, of {list(self._row_bytes())} here")
        return _HEADER.size, tokens

    def reset(self) -> None:
        """Back to no rows; the pages return to the pool."""
        super().reset()
        self._give_back()

    def release(self) -> None:
        super().release()
        self._give_back()

    def _give_back(self) -> None:
        table, self._table = self._table, self._table[:0]
        self.pool.give_back(table)
