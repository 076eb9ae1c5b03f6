"""The reference model: sizes, weights and arithmetic of a small hybrid model that computes on integers alone.

It has the state of two families of hybrid models:

    qsa-ple-gdn    paged K and V, QSA indexer, PLE layers, gated delta net with its short convolution
    mla-dsa-kda    MLA latent rows, DSA indexer, KDA (a decay of its own for every key channel) with its convolution

Every sum and product wraps modulo 2**64 or 2**32, so a prompt gives the same state however it is cut into steps, bit
for bit, on any machine. What the model writes looks like values of its parts' dtypes (finite, with a narrow range of
exponents, as real states have), but only bits are computed with. One token passes the layers as one uint64 h:

    embedding    h = mix(token * c + position * c')
    PLE          h ^= table rows of the n-grams;   h += convolution, dilated by ngram_size, over the last inputs
    recurrent    h += convolution over the last inputs;   S = decay * S + x(h) * r;   h ^= <q, S>
    attention    the layer's row of every row part is an expansion of h

So a row depends on the whole prefix, through every carry of the layers below it.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import Array, Device, HostArray
from tiered_cache.errors import ConfigError
from tiered_cache.geometry import PartKind
from tiered_cache.identity import Tokens, tagged_hash
from tiered_cache.states.dsa import VALID, DsaLayout
from tiered_cache.states.ngrams import NgramTable
from tiered_cache.states.paged_kv import KvLayout
from tiered_cache.states.ple import CONV, HISTORY, PleLayout
from tiered_cache.states.qsa import QsaLayout
from tiered_cache.states.recurrent import RecurrentLayout
from tiered_cache.states.sequence import SequenceLayout, SequenceState

STEP_TOKENS_MAX = 4096
"""Tokens of one vectorised step: bounds the temporaries, and keeps them in a core's cache."""

Shape = Literal["qsa-ple-gdn", "mla-dsa-kda"]
Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.uint32]
Bits = tuple[np.uint64, np.uint64]

_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
_BFLOAT16: Bits = np.uint64(0x83FF_83FF_83FF_83FF), np.uint64(0x3C00_3C00_3C00_3C00)  # kept, added: 2**-7 <= |x| < 2
_FLOAT32: Bits = np.uint64(0x83FF_FFFF_83FF_FFFF), np.uint64(0x3C00_0000_3C00_0000)
_SIGN, _MANTISSA, _HALF = np.uint32(0x8000_0000), np.uint32(0x007F_FFFF), np.uint32(0x3F00_0000)  # 0.5 <= |x| < 1
_TOP_24 = np.uint32(0xFFFF_FF00)

_STATE_NAMES: Mapping[str, str] = {"qsa-ple-gdn": "gdn", "mla-dsa-kda": "kda"}
_CONV_NAME = "conv"
_CONV_KERNEL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """Layers and sizes of one model; these numbers and a seed fix all weights."""

    shape: Shape
    recurrent_layers: tuple[int, ...]
    attention_layers: tuple[int, ...]
    row_dim: int
    """Elements of a key and of a value of one head, or of a latent row."""
    indexer_dim: int
    state_shape: tuple[int, int, int]
    """Heads, key channels and value channels of the recurrent state."""
    conv_channels: int
    kv_heads: int = 1
    ple_layers: tuple[int, ...] = ()
    ple_channels: int = 4
    ple_row_dim: int = 4
    """Elements of one row of the n-gram tables."""
    ple_heads: int = 1
    """Rows that an n-gram selects."""
    vocabulary: int = 262_144
    eos: int = 2
    block_tokens: int = 512

    def __post_init__(self) -> None:
        if self.shape not in _STATE_NAMES:
            raise ConfigError(f"reference model shape {self.shape!r} is not one of {', '.join(_STATE_NAMES)}")
        if bool(self.ple_layers) != (self.shape == "qsa-ple-gdn"):
            raise ConfigError(f"PLE layers {self.ple_layers} do not fit the shape {self.shape}")
        if 0 not in self.recurrent_layers or not self.attention_layers:
            raise ConfigError("layer 0 must be recurrent, so that rows depend on the prefix, and one have attention")
        if self.conv_channels % 2 or self.ple_channels % 2 or self.ple_row_dim % 4:
            raise ConfigError("channels must come in pairs and table rows in fours: they are computed in 64 bits")

    @property
    def layers(self) -> int:
        return 1 + max(*self.recurrent_layers, *self.attention_layers, *self.ple_layers)

    @property
    def decays(self) -> int:
        """How many decays a layer's recurrent state has: one a head in GDN, one a head and key channel in KDA."""
        heads, key_channels, _ = self.state_shape
        return heads * key_channels if self.shape == "mla-dsa-kda" else heads

    def layout(self, shards: int = 1) -> SequenceLayout:
        """What one of `shards` ranks holds: its heads' keys and values, and all of the rest, which each computes.

        Raises `ConfigError` for heads that cannot be shared out evenly.
        """
        if self.shape == "qsa-ple-gdn" and self.kv_heads % shards:
            raise ConfigError(f"{self.kv_heads} heads cannot be cut over {shards} ranks")
        recurrent = (
            RecurrentLayout(_STATE_NAMES[self.shape], self.recurrent_layers, self.state_shape),
            RecurrentLayout(_CONV_NAME, self.recurrent_layers, (_CONV_KERNEL - 1, self.conv_channels)),
        )
        if self.shape == "mla-dsa-kda":
            return SequenceLayout(
                kv=KvLayout(self.attention_layers, self.kv_heads, self.row_dim, 0, name="mla"),
                dsa=DsaLayout(self.attention_layers, self.indexer_dim),
                recurrent=recurrent,
            )
        return SequenceLayout(
            kv=KvLayout(self.attention_layers, self.kv_heads // shards, self.row_dim, self.row_dim),
            qsa=QsaLayout(self.attention_layers, self.indexer_dim, rotary_dim=self.indexer_dim // 4 * 2),
            ple=PleLayout(
                self.ple_layers,
                self.vocabulary,
                self.eos,
                self.ple_channels,
                heads_per_ngram=self.ple_heads,
                head_dim=self.ple_row_dim,
                size_base=251,
            ),
            recurrent=recurrent,
        )


MODELS: Mapping[str, ReferenceModel] = {
    # 48 and 42 bytes a token: traces of many million tokens fit into memory and minutes
    "qsa-ple-gdn:tiny": ReferenceModel(
        shape="qsa-ple-gdn",
        recurrent_layers=(0, 2),
        attention_layers=(1, 3),
        ple_layers=(0,),
        row_dim=4,
        indexer_dim=4,
        state_shape=(2, 8, 8),
        conv_channels=4,
    ),
    "mla-dsa-kda:tiny": ReferenceModel(
        shape="mla-dsa-kda",
        recurrent_layers=(0, 2),
        attention_layers=(1, 3),
        row_dim=6,
        indexer_dim=2,
        state_shape=(2, 4, 16),
        conv_channels=4,
    ),
    # short blocks, odd sizes, an EOS now and then: tests
    "qsa-ple-gdn:small": ReferenceModel(
        shape="qsa-ple-gdn",
        recurrent_layers=(0, 1, 3),
        attention_layers=(2, 4),
        ple_layers=(0, 3),
        row_dim=6,
        kv_heads=2,
        indexer_dim=8,
        state_shape=(2, 4, 6),
        conv_channels=6,
        ple_heads=2,
        vocabulary=257,
        block_tokens=16,
    ),
    "mla-dsa-kda:small": ReferenceModel(
        shape="mla-dsa-kda",
        recurrent_layers=(0, 1, 3),
        attention_layers=(2, 4),
        row_dim=10,
        indexer_dim=3,
        state_shape=(3, 4, 2),
        conv_channels=6,
        vocabulary=257,
        block_tokens=16,
    ),
    # 4,608 and 3,330 bytes a token: block frames of 2.3 and 1.6 MiB, as real models have
    "qsa-ple-gdn:large": ReferenceModel(
        shape="qsa-ple-gdn",
        recurrent_layers=(0, 1, 2, 4, 5, 6),
        attention_layers=(3, 7),
        ple_layers=(0, 4),
        row_dim=256,
        kv_heads=2,
        indexer_dim=128,
        state_shape=(8, 64, 64),
        conv_channels=256,
        ple_channels=256,
        ple_heads=8,
        ple_row_dim=64,
        vocabulary=248_320,
    ),
    "mla-dsa-kda:large": ReferenceModel(
        shape="mla-dsa-kda",
        recurrent_layers=(0, 1, 2, 4, 5, 6),
        attention_layers=(3, 7),
        row_dim=576,
        indexer_dim=128,
        state_shape=(4, 32, 256),
        conv_channels=256,
        vocabulary=154_880,
    ),
}
"""Models by name: shape and size."""


def reference_model(name: str) -> ReferenceModel:
    """The model of this name, such as `qsa-ple-gdn:tiny`. Raises `ConfigError` for any other."""
    try:
        return MODELS[name]
    except KeyError:
        raise ConfigError(f"no reference model {name!r}; there are {', '.join(MODELS)}") from None


class ReferenceNetwork:
    """A model with its weights, on one device."""

    def __init__(self, model: ReferenceModel, device: Device, seed: bytes, *, shards: int = 1, rank: int = 0) -> None:
        self.model = model
        self._device = device
        weights = _Weights(device, seed)
        self._token_weight, self._position_weight = weights.host("embedding", 2)
        parts = model.layout(shards).parts(sharded=shards > 1)
        parts = tuple(part for part in parts if part.name != HISTORY)  # which the PLE state keeps by itself
        self._row_parts = [part for part in parts if part.kind is PartKind.ROWS]
        self._carry_parts = [part for part in parts if part.kind is PartKind.CARRY]
        sharded = {part.name for part in parts if part.shard_axis is not None}
        decays = _Decays(weights, model.decays)
        self._layers: list[_Layer] = []
        self.tables: list[NgramTable] = []
        """The n-gram tables of the PLE layers, in host memory."""
        for layer in range(model.layers):
            if layer in model.ple_layers:
                ple_layer = _PleLayer(weights, model, layer)
                self.tables.append(ple_layer.table)
                self._layers.append(ple_layer)
            if layer in model.recurrent_layers:
                self._layers.append(_RecurrentLayer(weights, model, layer, decays))
            if layer in model.attention_layers:
                self._layers.append(_AttentionLayer(weights, model, layer, sharded, rank))

    def step(self, state: SequenceState, tokens: Tokens) -> None:
        """Compute the state behind further tokens: up to `STEP_TOKENS_MAX` ids below the vocabulary, with room."""
        xp, count = self._device.xp, len(tokens)
        rows, carries = (
            {part.name: self._device.empty(part.array(count)) for part in parts}
            for parts in (self._row_parts, self._carry_parts)
        )
        step = _Step(xp, state, rows, carries, self._table_rows(state, tokens))
        hidden: Words = xp.asarray(tokens).astype(np.uint64)
        hidden *= self._token_weight
        hidden += xp.arange(state.tokens, state.tokens + count, dtype=np.uint64) * self._position_weight
        _mix(hidden)
        for layer in self._layers:
            layer.step(hidden, step)
        state.append(state.tokens, step.rows, step.carries, tokens if self.tables else None)

    def _table_rows(self, state: SequenceState, tokens: Tokens) -> Words | None:
        """What the n-grams of the tokens select, as words [PLE layers, T, words]; the history advances."""
        ple = state.states.ple
        if ple is None:
            return None
        if len(tokens) == 1:  # as ahead of the replay of a captured graph
            ple.prestage(int(tokens[0]))
        rows = ple.forward(tokens)
        return rows.reshape(len(rows), len(tokens), -1).view(np.uint64)


@dataclass(frozen=True, slots=True)
class _Step:
    """What the layers read and write while they compute T tokens."""

    xp: ModuleType
    before: SequenceState
    rows: dict[str, Array]
    """Every row part, [layers, T, *row], to be filled."""
    carries: dict[str, Array]
    """Every carry but the history, [layers, *shape], to be filled."""
    table_rows: Words | None


class _Layer(ABC):
    @abstractmethod
    def step(self, hidden: Words, step: _Step) -> None:
        """Write the layer's state for T tokens; `hidden` [T] becomes the layer's output."""


class _PleLayer(_Layer):
    def __init__(self, weights: _Weights, model: ReferenceModel, layer: int) -> None:
        layout = model.layout().ple
        assert layout is not None
        self._index = model.ple_layers.index(layer)
        rows = layout.hashes()[self._index].rows
        words = (weights.host(f"{layer} table", rows * layout.head_dim // 4) & _BFLOAT16[0]) | _BFLOAT16[1]
        self.table = NgramTable(words.view(np.uint16).reshape(rows, layout.head_dim))
        self._projection = weights.words(f"{layer} table projection", layout.heads * layout.head_dim // 4)
        self._convolution = _Convolution(weights, f"{layer} PLE", layout.channels, layout.kernel, layout.ngram_size)

    def step(self, hidden: Words, step: _Step) -> None:
        assert step.table_rows is not None
        hidden ^= step.table_rows[self._index] @ self._projection
        self._convolution.step(hidden, step, CONV, self._index)
        _mix(hidden)


class _RecurrentLayer(_Layer):
    """S = decay * S + x * r and the read-out <q, S>, over 24-bit integers in the sign and mantissa of float32s.

    All tokens of a step at once: with C the running sum of decay**-i * x[i], the state after token j is
    decay**(j + 1) * S + decay**j * C[j] * r. Integers stand in the top bits of a uint32, so that products wrap to them.
    """

    def __init__(self, weights: _Weights, model: ReferenceModel, layer: int, decays: _Decays) -> None:
        self._index = model.recurrent_layers.index(layer)
        self._name = f"recurrent.{_STATE_NAMES[model.shape]}"
        self._conv_name = f"recurrent.{_CONV_NAME}"
        self._convolution = _Convolution(weights, f"{layer}", model.conv_channels, _CONV_KERNEL)
        self._decays = decays
        elements = math.prod(model.state_shape)
        self._write, self._read = (
            weights.words(f"{layer} {name}", elements).astype(np.uint32).reshape(model.decays, -1)
            for name in ("write", "read")
        )
        self._read_write = (self._write * self._read).sum(axis=1, dtype=np.uint32)
        (self._read_out,) = weights.host(f"{layer} read-out", 1)

    def step(self, hidden: Words, step: _Step) -> None:
        self._convolution.step(hidden, step, self._conv_name, self._index)
        _mix(hidden)
        decay = self._decays.decay
        powers, inverses = self._decays.powers[:, : len(hidden)], self._decays.inverses[:, : len(hidden)]
        bits = step.before.carry(self._name)[self._index].view(np.uint32).reshape(self._write.shape)
        before = (bits & _SIGN) | ((bits & _MANTISSA) << np.uint32(8))

        inputs = (hidden >> np.uint64(32)).astype(np.uint32) & _TOP_24
        sums = inputs * inverses
        sums.cumsum(axis=1, dtype=np.uint32, out=sums)
        last = powers[:, -1:]
        after = decay * last * before + last * sums[:, -1:] * self._write
        out = step.carries[self._name][self._index].view(np.uint32).reshape(self._write.shape)
        out[...] = (after & _SIGN) | ((after >> np.uint32(8)) & _MANTISSA) | _HALF

        sums *= self._read_write[:, None]
        sums += decay * (before * self._read).sum(axis=1, dtype=np.uint32)[:, None]
        sums *= powers
        hidden ^= sums.sum(axis=0, dtype=np.uint32).astype(np.uint64) * self._read_out
        _mix(hidden)


class _AttentionLayer(_Layer):
    def __init__(
        self, weights: _Weights, model: ReferenceModel, layer: int, sharded: Collection[str], rank: int
    ) -> None:
        """`sharded`: the row parts of which this rank holds its heads' elements alone."""
        self._index = model.attention_layers.index(layer)
        self._ranks = dict.fromkeys(sharded, rank)
        self._expansions = {
            part.name: weights.words(f"{layer} {part.name}", -(-math.prod(part.shape) // 4))
            for part in model.layout().parts()
            if part.kind is PartKind.ROWS and part.dtype == "bfloat16"
        }

    def step(self, hidden: Words, step: _Step) -> None:
        for name, array in step.rows.items():
            rows = array[self._index].reshape(len(hidden), -1)
            if name == VALID:
                rows[:, 0] = hidden & np.uint64(7) != 0
            else:
                first = self._ranks.get(name, 0) * rows.shape[1]
                whole = _expand(step.xp, hidden, self._expansions[name], _BFLOAT16).view(np.uint16)
                rows[...] = whole[:, first : first + rows.shape[1]]


class _Convolution:
    """A causal convolution over time; its inputs are an expansion of h, its state the last inputs, oldest first."""

    def __init__(self, weights: _Weights, label: str, channels: int, kernel: int, dilation: int = 1) -> None:
        self._inputs = weights.words(f"{label} convolution inputs", channels // 2)
        self._projection = weights.words(f"{label} convolution projection", channels // 2)
        self._taps = weights.host(f"{label} convolution taps", kernel)
        self._dilation = dilation

    def step(self, hidden: Words, step: _Step, name: str, index: int) -> None:
        """Add the outputs to `hidden`; `name` and `index` say which carry holds the state [rows, channels]."""
        before = step.before.carry(name)[index].view(np.uint64)
        inputs = step.xp.concatenate((before, _expand(step.xp, hidden, self._inputs, _FLOAT32)))
        step.carries[name][index].view(np.uint64)[...] = inputs[len(hidden) :]
        projected = inputs @ self._projection
        for age, tap in enumerate(self._taps):
            first = len(before) - age * self._dilation
            hidden += projected[first : first + len(hidden)] * tap


class _Decays:
    """Odd decays [scans, 1] and the powers 0, 1, .. of them and of their inverses [scans, STEP_TOKENS_MAX], uint32."""

    def __init__(self, weights: _Weights, scans: int) -> None:
        decay = weights.host("decay", scans).astype(np.uint32)[:, None]
        decay += np.uint32(5) - decay % np.uint32(8)  # 5 modulo 8: the longest cycles
        inverse = np.array([[pow(int(d), -1, 1 << 32)] for d in decay[:, 0]], dtype=np.uint32)
        self.decay, self.powers, self.inverses = (
            cast("Integers", weights.on_device(table)) for table in (decay, _powers(decay), _powers(inverse))
        )


def _powers(bases: Integers) -> Integers:
    table = np.repeat(bases, STEP_TOKENS_MAX, axis=1)
    table[:, 0] = 1
    return np.multiply.accumulate(table, axis=1, dtype=np.uint32)


class _Weights:
    """Odd numbers without end: SHAKE-256 of a seed and a label."""

    def __init__(self, device: Device, seed: bytes) -> None:
        self._device = device
        self._seed = seed

    def host(self, label: str, count: int) -> Words:
        raw = hashlib.shake_256(tagged_hash("reference weights", self._seed, label.encode())).digest(8 * count)
        return np.frombuffer(raw, dtype="<u8") | np.uint64(1)

    def words(self, label: str, count: int) -> Words:
        """The same in device memory."""
        return cast("Words", self.on_device(self.host(label, count)))

    def on_device(self, array: HostArray) -> Array:
        return cast("Array", self._device.xp.asarray(array))


def _mix(words: Words) -> None:
    """Spread every bit of a word over the whole word, in place; a bijection."""
    words ^= words >> np.uint64(32)
    words *= _MULTIPLIER
    words ^= words >> np.uint64(32)


def _expand(xp: ModuleType, hidden: Words, weights: Words, bits: Bits) -> Words:
    """Words [T, len(weights)] full of finite values of one dtype, each another function of the token's h."""
    words: Words = xp.einsum("t,w->tw", hidden, weights)  # faster than broadcasting where there are few weights
    words ^= words >> np.uint64(29)
    words *= _MULTIPLIER
    kept, added = bits
    words &= kept
    words |= added
    return words
