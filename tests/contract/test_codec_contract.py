"""Every codec of the format keeps the promises of the conformance suite."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tiered_cache import codecs
from tiered_cache.codecs import CHUNK_BYTES
from tiered_cache.testing.codec_suite import CodecTests

Bytes = npt.NDArray[np.uint8]

_generator = np.random.default_rng(3)
_normal = _generator.standard_normal(CHUNK_BYTES // 2 + 12_345).astype(np.float32)
_random = _generator.integers(0, 256, CHUNK_BYTES + 4097, dtype=np.uint8)
_bfloat16 = (_normal.view("<u4") >> 16).astype("<u2")
_tokens = _generator.zipf(1.3, 300_001).clip(max=65_535).astype("<u4")


def _bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return array.reshape(-1).view(np.uint8).copy()


class TestRaw(CodecTests):
    codec = codecs.RAW
    payloads = (_random, _random[:1].copy(), _random[:513].copy())


class TestConst(CodecTests):
    codec = codecs.CONST
    payloads = (
        np.zeros(CHUNK_BYTES + 1, np.uint8),
        _bytes(np.full(5, 0x3F80, "<u2")),
        _bytes(np.full(70_001, 0x3F800001, "<u4")),
        _bytes(np.full(9, 1.1)),
    )


class TestBf16Split(CodecTests):
    codec = codecs.BF16_SPLIT
    payloads = (
        _bytes(_bfloat16),
        _bytes(_bfloat16[:200]),
        _bytes(_bfloat16[:16_385]),
        _bytes(np.full(CHUNK_BYTES, 7, "<u2")),  # planes of one repeated byte
        _bytes(_generator.normal(size=CHUNK_BYTES).astype(np.float16)),
    )


class TestF32Planes(CodecTests):
    codec = codecs.F32_PLANES
    payloads = (
        _bytes(_normal),
        _bytes(_normal[:3001]),
        _bytes(_bfloat16.astype("<u4") << 16),
        _bytes(_bfloat16.astype("<u4")),  # the top planes repeat one byte
        _bytes(np.concatenate((np.zeros(CHUNK_BYTES, np.float32), _normal))),
    )


class TestBytesHuf(CodecTests):
    codec = codecs.BYTES_HUF
    payloads = (
        _bytes((_bfloat16 >> 8).astype(np.uint8)),
        _bytes((_bfloat16[:1000] >> 8).astype(np.uint8)),
        _generator.binomial(255, 0.5, 3 * CHUNK_BYTES + 1).astype(np.uint8),
    )


class TestPackBits(CodecTests):
    codec = codecs.PACKBITS
    payloads = (
        _generator.integers(0, 2, CHUNK_BYTES + 5, dtype=np.uint8),
        _generator.integers(0, 2, 9, dtype=np.uint8),
        np.ones(64, np.uint8),
    )


class TestZstd(CodecTests):
    codec = codecs.ZSTD
    payloads = (_bytes(_tokens), _bytes(_tokens[:300]), np.tile(_random[:5000], 400))


class TestZstdU16(CodecTests):
    codec = codecs.ZSTD_U16
    payloads = (_bytes(_tokens), _bytes(_tokens[:20]), _bytes(_random[:-1].view("<u2").astype("<u4")))
