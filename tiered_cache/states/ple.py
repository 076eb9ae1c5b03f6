"""PLE layers: per-layer n-gram embeddings, with the token history that hashes them and a short dilated convolution.

Carries: the last ngram_size - 1 token ids, the same on every layer, and per layer the last (kernel - 1) * ngram_size
inputs of the convolution, oldest first and time-major (transformers keeps them channel-major). Fresh: a history of EOS
and zeros. The history is host memory, since the host hashes it and gathers the rows.

Graph replay wants its inputs at one address before it starts: `prestage` hashes one token, gathers its rows from the
tables (host memory or a memory-mapped file) and stages them in a device buffer that never moves; the history advances
there, once. The next `forward` of that one token hands the staged rows over and does not advance again.

Whole-layer blob: `[history length u32][history u32s][conv f32, state_len x channels]`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import Array, Device, Direction, HostArray
from tiered_cache.errors import BlobError, ConfigError, DraftError, LayerSetError, LockstepError, TokenError
from tiered_cache.geometry import ArraySpec, Part, PartKind, storage_dtype
from tiered_cache.states.blobs import Blob, blob_bytes, check_layers, join_blob, split_body, unpack_header
from tiered_cache.states.carries import CarryState
from tiered_cache.states.ngrams import NgramHash, NgramIds, NgramTable, TokenIds, check_token_ids, ngram_ids

_HEADER = struct.Struct("<I")
HISTORY, CONV = "ple.history", "ple.conv"


@dataclass(frozen=True, slots=True)
class PleLayout:
    """Which layers are PLE layers and how they hash, embed and convolve; the same on every rank."""

    layers: tuple[int, ...]
    vocab: int
    eos: int
    channels: int
    """Channels of the convolution: residual streams x hidden size."""
    kernel: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    head_dim: int = 0
    """Elements of one table row; 0 where the engine embeds by itself and there are no tables."""
    table_dtype: str = "bfloat16"
    size_base: int = 20_000_000
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.ngram_size < 2 or self.kernel < 1 or self.heads_per_ngram < 1 or not 0 <= self.eos < self.vocab:
            raise ConfigError(
                f"PLE ngram_size {self.ngram_size}, kernel {self.kernel}, heads_per_ngram {self.heads_per_ngram}, "
                f"eos {self.eos} of {self.vocab}: orders start at 2, sizes at 1, and EOS is a token id"
            )

    @property
    def history_tokens(self) -> int:
        return self.ngram_size - 1

    @property
    def state_len(self) -> int:
        """Rows of the convolution's state."""
        return (self.kernel - 1) * self.ngram_size

    @property
    def heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def staged_spec(self) -> ArraySpec:
        """One token's table rows, [layers, 1, heads, head_dim]."""
        return ArraySpec(self.table_dtype, (len(self.layers), 1, self.heads, self.head_dim))

    def hashes(self) -> tuple[NgramHash, ...]:
        """The hash of every layer, in order."""
        return _hashes(self)

    def parts(self) -> tuple[Part, ...]:
        """Carries `ple.history` [ngram_size - 1] in uint32 and `ple.conv` [state_len, channels] in float32."""
        return (
            Part(HISTORY, PartKind.CARRY, "uint32", (self.history_tokens,), self.layers),
            Part(CONV, PartKind.CARRY, "float32", (self.state_len, self.channels), self.layers),
        )


@lru_cache(maxsize=16)
def _hashes(layout: PleLayout) -> tuple[NgramHash, ...]:
    return tuple(
        NgramHash.of_layer(
            index,
            vocab=layout.vocab,
            ngram_size=layout.ngram_size,
            heads_per_ngram=layout.heads_per_ngram,
            size_base=layout.size_base,
            seed=layout.seed,
        )
        for index in range(len(layout.layers))
    )


class PleState(CarryState):
    """One sequence's PLE carries over all layers, its table look-ups and the staged row.

    `tokens` is the count that the convolution stands at, `history_at` the one of the history: a step moves the history
    first (`prestage`, `forward` or `advance`) and the convolution at its end.
    """

    def __init__(self, layout: PleLayout, device: Device, tables: tuple[NgramTable, ...] = ()) -> None:
        """`tables`: one a layer, or none. Raises `ConfigError` for tables that do not fit the layout."""
        super().__init__("PLE", device, layout.parts(), frozenset((HISTORY,)))
        self.layout = layout
        self.layers = layout.layers
        self.tables = tables
        self.history_at = 0
        self._staged_token: int | None = None
        self._staged_host: HostArray | None = None
        self._staged: Array | None = None
        if tables:
            self._check_tables()
            spec = layout.staged_spec
            self._staged = device.empty(spec)
            self._staged_host = device.host_buffer(spec.bytes).view(spec.storage).reshape(spec.shape)
        self.arrays[HISTORY][...] = layout.eos

    @property
    def history(self) -> TokenIds:
        """The last ngram_size - 1 token ids, oldest first."""
        self.check_live()
        history: TokenIds = self.arrays[HISTORY][0].astype(np.uint32)
        return history

    @property
    def staged(self) -> bool:
        """Whether a token is staged that `forward` has not consumed."""
        return self._staged_token is not None

    def ngram_ids(self, token_ids: TokenIds) -> NgramIds:
        """Table rows [layers, T, heads] of the next T tokens; nothing advances. Raises `TokenError`."""
        ids = check_token_ids(token_ids, self.layout.vocab)
        return ngram_ids(self.layout.hashes(), self.history, ids, self.layout.eos)

    def prestage(self, token_id: int) -> None:
        """Stage the next token's rows and advance the history over it.

        Raises `TokenError`, `DraftError` if a token is staged already, `ConfigError` without tables.
        """
        self.check_settled()
        token = self._token_array(token_id)
        ids = self.ngram_ids(token)
        if self._staged is None or self._staged_host is None:
            raise ConfigError("PLE: there are no tables to stage rows from")
        self._gather(ids, self._staged_host)
        stream = self.device.stream(Direction.TO_DEVICE)
        self.device.to_device(self._staged_host, self._staged, stream)
        self.device.synchronize(stream)
        self._push_history(token)
        self._staged_token = token_id

    def forward(self, token_ids: TokenIds) -> Array:
        """The table rows of the next T tokens, [layers, T, heads, head_dim] in device memory; the history advances.

        A staged token's rows are handed over instead, in their buffer, and the history stays. Raises `DraftError` if
        the tokens are not the one that is staged, `TokenError`, `ConfigError` without tables.
        """
        self.check_live()
        token_ids = check_token_ids(token_ids, self.layout.vocab)
        if self.staged:
            if token_ids.tolist() != [self._staged_token]:
                raise DraftError(f"PLE: token {self._staged_token} is staged, forward of {len(token_ids)} tokens")
            self._staged_token = None
            assert self._staged is not None
            return self._staged
        self.check_settled()
        if not self.tables:
            raise ConfigError("PLE: there are no tables to look rows up in")
        shape = (len(self.layers), len(token_ids), self.layout.heads, self.layout.head_dim)
        rows: HostArray = np.empty(shape, dtype=storage_dtype(self.layout.table_dtype))
        self._gather(self.ngram_ids(token_ids), rows)
        stream = self.device.stream(Direction.TO_DEVICE)
        on_device = self.device.upload(rows, stream)
        self.device.synchronize(stream)
        self._push_history(token_ids)
        return on_device

    def advance(self, token_ids: TokenIds) -> None:
        """Advance the history over T tokens without a look-up. Raises `TokenError`, `DraftError` if one is staged."""
        self.check_settled()
        self._push_history(check_token_ids(token_ids, self.layout.vocab))

    def write_conv(self, conv: Array) -> None:
        """End a step: the convolution's state [layers, state_len, channels] at the history's count."""
        self.check_live()
        if self.staged:
            raise DraftError(f"PLE: token {self._staged_token} is staged and was not consumed")
        self.check_conv(conv)
        self.arrays[CONV][...] = conv
        self.tokens = self.history_at

    def check_conv(self, conv: Array) -> None:
        """Raise `StateError` for another shape or dtype."""
        self._check_value(CONV, conv)

    def conv_after(self, inputs: Array) -> Array:
        """The convolution's state after T more inputs [layers, T, channels]; nothing changes."""
        self.check_live()
        state_len = self.layout.state_len
        if inputs.shape[1] >= state_len:
            return inputs[:, inputs.shape[1] - state_len :]
        joined: Array = self.device.xp.concatenate((self.arrays[CONV][:, inputs.shape[1] :], inputs), axis=1)
        return joined

    def check_values(self, values: Mapping[str, Array]) -> None:
        super().check_values(values)
        history = values[HISTORY]
        if bool((history != history[0]).any()):
            raise LockstepError(f"PLE: histories differ by layer: {history.tolist()}")
        check_token_ids(history[0], self.layout.vocab)

    def write(self, tokens: int, values: Mapping[str, Array]) -> None:
        """As `CarryState.write`; drops a staged row. Also raises `LockstepError` (unequal histories), `TokenError`."""
        super().write(tokens, values)
        self.history_at = tokens
        self._staged_token = None

    def reset(self) -> None:
        super().reset()
        self.arrays[HISTORY][...] = self.layout.eos
        self.history_at = 0
        self._staged_token = None

    def release(self) -> None:
        super().release()
        self.history_at = 0
        self._staged_token = None
        self._staged = None
        self._staged_host = None
        self.tables = ()

    def check_settled(self) -> None:
        """Raise `DraftError` between `prestage` and `forward`, and between a step's history and its convolution."""
        self.check_live()
        if self.staged:
            raise DraftError(f"PLE: token {self._staged_token} is staged and was not consumed")
        if self.history_at != self.tokens:
            raise DraftError(f"PLE: the history stands at {self.history_at}, the convolution at {self.tokens}")

    def encode_layer(self, layer: int) -> npt.NDArray[np.uint8]:
        """The layer's carries as a whole-layer blob. Raises `LayerSetError` for a layer without PLE, `DraftError`."""
        self.check_settled()
        if layer not in self.layers:
            raise LayerSetError(f"PLE: layer {layer} is none of the carriers {list(self.layers)}")
        index = self.layers.index(layer)
        blob, (history, conv) = join_blob(_HEADER.pack(self.layout.history_tokens), self._specs())
        history[...] = self.arrays[HISTORY][index]
        stream = self.device.stream(Direction.TO_HOST)
        self.device.to_host(self.arrays[CONV][index], conv, stream)
        self.device.synchronize(stream)
        return blob

    def restore(self, tokens: int, blobs: Mapping[int, Blob]) -> None:
        """Replace everything by what the blobs of all layers hold at `tokens`; drops a staged row.

        Raises `LayerSetError` unless the keys are exactly the layers, `BlobError` for another layout, `LockstepError`
        for unequal histories, `TokenError`; the state is then as it was.
        """
        self.check_live()
        check_layers(self.title, self.layers, list(blobs))
        values: dict[str, HostArray] = {
            name: np.empty(array.shape, dtype=array.dtype) for name, array in self.arrays.items()
        }
        for index, layer in enumerate(self.layers):
            blob = blob_bytes(blobs[layer])
            (length,) = unpack_header(self.title, _HEADER, blob)
            if length != self.layout.history_tokens:
                raise BlobError(f"PLE layer {layer}: a history of {length} tokens, not {self.layout.history_tokens}")
            history, conv = split_body(f"PLE layer {layer}", blob, _HEADER.size, self._specs())
            values[HISTORY][index] = history
            values[CONV][index] = conv
        stream = self.device.stream(Direction.TO_DEVICE)
        on_device = self.upload(values, stream)
        self.device.synchronize(stream)
        self.write(tokens, on_device)

    def _specs(self) -> tuple[ArraySpec, ArraySpec]:
        history, conv = (ArraySpec(part.dtype, part.shape) for part in self.parts.values())
        return history, conv

    def _token_array(self, token_id: int) -> TokenIds:
        if not 0 <= token_id < self.layout.vocab:
            raise TokenError(f"token id {token_id} is outside [0, {self.layout.vocab})")
        return np.array([token_id], dtype=np.uint32)

    def _push_history(self, token_ids: TokenIds) -> None:
        kept = self.layout.history_tokens
        self.arrays[HISTORY][...] = np.concatenate((self.history, token_ids[-kept:]))[-kept:]
        self.history_at += len(token_ids)

    def _gather(self, ids: NgramIds, out: HostArray) -> None:
        for index, table in enumerate(self.tables):
            table.gather(ids[index], out[index])

    def _check_tables(self) -> None:
        layout = self.layout
        if len(self.tables) != len(layout.layers):
            raise ConfigError(f"PLE: {len(self.tables)} tables for {len(layout.layers)} layers")
        for layer, table, ngram_hash in zip(layout.layers, self.tables, layout.hashes(), strict=True):
            rows, head_dim = table.rows.shape
            dtype = storage_dtype(layout.table_dtype)
            if rows < ngram_hash.rows or head_dim != layout.head_dim or table.rows.dtype != dtype:
                raise ConfigError(
                    f"PLE layer {layer}: a table {table.rows.dtype} {(rows, head_dim)}, "
                    f"not {dtype} {(ngram_hash.rows, layout.head_dim)}"
                )
