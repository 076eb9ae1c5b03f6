"""What the sequences of one device share: `SequenceLayout`, plain data, and `StatePool`, their memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from tiered_cache.devices.base import Array, Device
from tiered_cache.errors import CapacityError, ConfigError
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.states.dsa import DsaLayout
from tiered_cache.states.ngrams import NgramTable
from tiered_cache.states.paged_kv import KvLayout, PagePool
from tiered_cache.states.ple import PleLayout
from tiered_cache.states.qsa import QsaLayout
from tiered_cache.states.recurrent import RecurrentLayout


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Which layers carry which state, and one rank's sizes. Plain data."""

    kv: KvLayout | None = None
    qsa: QsaLayout | None = None
    dsa: DsaLayout | None = None
    ple: PleLayout | None = None
    recurrent: tuple[RecurrentLayout, ...] = ()

    def parts(self, *, sharded: bool = False) -> tuple[Part, ...]:
        """`attn.k`, `attn.v`, `qsa.keys`, `dsa.keys`, `dsa.gate`, `dsa.valid` (rows), `ple.history`, `ple.conv`,
        `recurrent.<name>` (carries), as far as the layout has them, in this order.
        """
        parts = self.kv.parts(sharded=sharded) if self.kv else ()
        for layout in (self.qsa, self.dsa, self.ple):
            parts += layout.parts() if layout else ()
        return parts + tuple(layout.part(sharded=sharded) for layout in self.recurrent)

    def geometry(self, block_tokens: int, shards: int = 1) -> Geometry:
        """The geometry of these states. Raises `GeometryError` for an empty layout or one with a name twice."""
        return Geometry(self.parts(sharded=shards > 1), block_tokens, shards)


class StatePool:
    """What all the sequences of one device share; thread-safe.

    KV pages, a byte budget for the sequences' fixed buffers, staging slots, the indexers' norm weight, n-gram tables.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        device: Device,
        *,
        block_tokens: int,
        kv_tokens: int,
        buffer_bytes: int,
        page_tokens: int = 16,
        shards: int = 1,
        staging_slots: int = 4,
        qsa_weight: Array | None = None,
        ple_tables: tuple[NgramTable, ...] = (),
    ) -> None:
        """`kv_tokens` rows of KV in pages of `page_tokens`; `buffer_bytes` for indexers and carries of all sequences.

        `qsa_weight`: float32 [qsa layers, head_dim] in device memory, the norm's offset from one, zeros by default.
        `ple_tables`: one a PLE layer, or none. Raises `ConfigError`, `GeometryError`, `CapacityError`.
        """
        if page_tokens < 1 or kv_tokens < 0 or buffer_bytes < 0 or staging_slots < 0:
            raise ConfigError(
                f"page_tokens {page_tokens} is below 1, or kv_tokens {kv_tokens}, buffer_bytes {buffer_bytes} or "
                f"staging_slots {staging_slots} below 0"
            )
        self.layout = layout
        self.device = device
        self.geometry = layout.geometry(block_tokens, shards)
        self.kv = PagePool(layout.kv, device, -(-kv_tokens // page_tokens), page_tokens) if layout.kv else None
        self.qsa_weight = qsa_weight
        self.ple_tables = ple_tables
        self.buffer_bytes = buffer_bytes
        self.staging_slots = staging_slots
        self._buffer_bytes_free = buffer_bytes
        self._staging_slots_free = staging_slots
        self._lock = threading.Lock()

    @property
    def buffer_bytes_free(self) -> int:
        return self._buffer_bytes_free

    @property
    def staging_slots_free(self) -> int:
        return self._staging_slots_free

    def sequence_bytes(self, capacity_tokens: int) -> int:
        """What one sequence of this capacity takes of `buffer_bytes`; KV pages are apart.

        Indexer rows, block keys, the staged n-gram row, and twice the carries, since a draft keeps a snapshot of them.
        """
        kv = {part.name for part in self.layout.kv.parts()} if self.layout.kv else set()
        a_token = sum(
            part.row_bytes * len(part.layers)
            for part in self.geometry.parts
            if part.kind is PartKind.ROWS and part.name not in kv
        )
        carries = sum(part.row_bytes * len(part.layers) for part in self.geometry.carries)
        qsa = self.layout.qsa
        block_keys = capacity_tokens // qsa.ratio * len(qsa.layers) * qsa.head_dim * 2 if qsa else 0
        staged = self.layout.ple.staged_spec.bytes if self.layout.ple and self.ple_tables else 0
        return a_token * capacity_tokens + block_keys + 2 * carries + staged

    def take_buffers(self, nbytes: int) -> None:
        """Book fixed buffers. Raises `CapacityError`."""
        with self._lock:
            if nbytes > self._buffer_bytes_free:
                free = f"{self._buffer_bytes_free} of {self.buffer_bytes}"
                raise CapacityError(f"a sequence's buffers take {nbytes} bytes, {free} are free")
            self._buffer_bytes_free -= nbytes

    def give_back_buffers(self, nbytes: int) -> None:
        with self._lock:
            self._buffer_bytes_free += nbytes

    def take_slot(self) -> None:
        """Book a staging slot. Raises `CapacityError`."""
        with self._lock:
            if not self._staging_slots_free:
                raise CapacityError(f"all {self.staging_slots} staging slots are taken")
            self._staging_slots_free -= 1

    def give_back_slot(self) -> None:
        with self._lock:
            self._staging_slots_free += 1
