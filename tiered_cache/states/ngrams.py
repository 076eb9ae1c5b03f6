"""N-gram ids: which rows of a hashed n-gram table the tokens of a text select, vectorised over the tokens.

For the token at a position let t[s] be the token s positions back, replaced by EOS where an EOS lies among the s tokens
before the position: a text ends there. With multipliers M, order g = 2 .. N mixes

    m = t[0] * M[0] xor .. xor t[g - 1] * M[g - 1]        in wrapping uint64

and head h of that order selects row `m mod size[h] + offset[h]`. Multipliers come from SplitMix64 (Steele, Lea and
Flood, OOPSLA 2014), sizes are consecutive primes over all layers, offsets their running sums per layer. Model:
`qwen4_exp` in transformers 5.23.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import HostArray
from tiered_cache.errors import ConfigError, TokenError
from tiered_cache.geometry import ArraySpec, storage_dtype

TokenIds = npt.NDArray[np.uint32]
NgramIds = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STRIDE = 10007


@dataclass(frozen=True, slots=True)
class NgramHash:
    """The hash of one layer: plain numbers, fixed by the model's configuration."""

    multipliers: tuple[int, ...]
    """One for each position back, `ngram_size` of them."""
    sizes: tuple[int, ...]
    """Table sizes: `heads_per_ngram` for order 2, then for order 3, and so on."""

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(sum(self.sizes[:head]) for head in range(len(self.sizes)))

    @property
    def rows(self) -> int:
        """Rows of the whole table."""
        return sum(self.sizes)

    @staticmethod
    def of_layer(
        index: int, *, vocab: int, ngram_size: int, heads_per_ngram: int, size_base: int, seed: int
    ) -> NgramHash:
        """The hash of the n-gram layer with this number among the n-gram layers."""
        heads = (ngram_size - 1) * heads_per_ngram
        primes = _primes_from(size_base, heads * (index + 1))
        return NgramHash(_multipliers(index, vocab, ngram_size, seed), primes[heads * index :])


def splitmix64(value: int) -> int:
    """The output of SplitMix64 for the state `value`: adds gamma, then mixes."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _multipliers(index: int, vocab: int, ngram_size: int, seed: int) -> tuple[int, ...]:
    """Odd numbers small enough that the product with any token id stays below 2**63."""
    half = max(1, ((1 << 63) - 1) // vocab // 2)
    base = seed + _LAYER_STRIDE * index
    return tuple(2 * (splitmix64((base + _GAMMA * (back + 1)) & _MASK) % half) + 1 for back in range(ngram_size))


@lru_cache(maxsize=64)
def _primes_from(base: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are `base` or more."""
    primes: list[int] = []
    candidate = max(base, 2)
    while len(primes) < count:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)


def check_token_ids(token_ids: npt.NDArray[np.integer], vocab: int) -> TokenIds:
    """The ids as uint32 [T]. Raises `TokenError` for an id outside [0, vocab)."""
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "ui":
        raise TokenError(f"token ids are {token_ids.dtype} {token_ids.shape}, not a list of integers")
    if len(token_ids):
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= vocab:
            raise TokenError(f"token id {lowest if lowest < 0 else highest} is outside [0, {vocab})")
    return token_ids.astype(np.uint32, copy=False)


def ngram_ids(hashes: tuple[NgramHash, ...], history: TokenIds, token_ids: TokenIds, eos: int) -> NgramIds:
    """Table rows [layers, T, heads] of the tokens [T] that follow `history`, the ngram_size - 1 tokens before them."""
    count, backs = len(token_ids), len(history)
    text = np.concatenate((history, token_ids)).astype(np.uint64)
    shifted = [text[backs:]]
    ended = np.zeros(count, dtype=np.bool_)
    for back in range(1, backs + 1):
        earlier = text[backs - back : backs - back + count]
        ended |= earlier == eos
        shifted.append(np.where(ended, np.uint64(eos), earlier))
    heads = len(hashes[0].sizes)
    per_order = heads // backs
    ids = np.empty((len(hashes), count, heads), dtype=np.uint64)
    for layer, ngram_hash in enumerate(hashes):
        multipliers = np.array(ngram_hash.multipliers, dtype=np.uint64)
        sizes = np.array(ngram_hash.sizes, dtype=np.uint64)
        offsets = np.array(ngram_hash.offsets, dtype=np.uint64)
        mixed = shifted[0] * multipliers[0]
        for back in range(1, backs + 1):
            mixed = mixed ^ (shifted[back] * multipliers[back])
            of_order = slice((back - 1) * per_order, back * per_order)
            ids[layer, :, of_order] = mixed[:, None] % sizes[of_order] + offsets[of_order]
    return ids


class NgramTable:
    """The rows of one layer's table, [rows, head_dim], in host memory or in a memory-mapped file."""

    def __init__(self, rows: HostArray) -> None:
        """Raises `ConfigError` unless `rows` has two dimensions."""
        if rows.ndim != 2:
            raise ConfigError(f"an n-gram table of shape {rows.shape}, not of rows and elements")
        self.rows = rows

    @staticmethod
    def map_file(path: Path, rows: int, head_dim: int, dtype: str = "bfloat16") -> NgramTable:
        """A raw row-major file, mapped read-only. Raises `ConfigError` unless it has exactly that size."""
        spec = ArraySpec(dtype, (rows, head_dim))
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise ConfigError(f"n-gram table {path}: {error.strerror}") from error
        if nbytes != spec.bytes:
            raise ConfigError(
                f"n-gram table {path} has {nbytes} bytes, not the {spec.bytes} of {rows} x {head_dim} {dtype}"
            )
        return NgramTable(np.memmap(path, dtype=storage_dtype(dtype), mode="r", shape=spec.shape))

    def gather(self, ids: NgramIds, out: HostArray) -> None:
        """Copy the rows of `ids` [T, heads] to `out` [T, heads, head_dim]."""
        np.take(self.rows, ids.astype(np.int64), axis=0, out=out, mode="clip")
