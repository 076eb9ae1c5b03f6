"""What each codec takes, how it stores it, and which one is chosen."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from tiered_cache import codecs, geometry
from tiered_cache.codecs import CHUNK_BYTES, CODECS, Codec, Mode, codec_of, encode_section
from tiered_cache.errors import FrameError, VersionError
from tiered_cache.testing.codec_suite import stored_form

Bytes = npt.NDArray[np.uint8]
KV_SAMPLE = Path(__file__).parents[3] / "shared/kv_sample/kv_sample.safetensors"


def as_bytes(array: npt.NDArray[np.generic]) -> Bytes:
    return array.reshape(-1).view(np.uint8).copy()


def normal(elements: int, dtype: npt.DTypeLike) -> Bytes:
    return as_bytes(np.random.default_rng(5).standard_normal(elements).astype(dtype))


def chosen(raw: Bytes, dtype: str) -> Codec:
    return encode_section(raw, dtype, Mode.FAST).codec


def test_numbers_are_the_formats() -> None:
    names = ["RAW", "CONST", "BF16_SPLIT", "F32_PLANES", "BYTES_HUF", "PACKBITS", "ZSTD", "ZSTD_U16"]
    assert [codec.name for codec in CODECS] == names
    assert [codec_of(n) for n in range(len(CODECS))] == list(CODECS)
    assert [codec.number for codec in CODECS] == list(range(len(CODECS)))


@pytest.mark.parametrize("number", [-1, 8, 255, 1 << 40])
def test_an_unknown_number_is_a_newer_writers(number: int) -> None:
    with pytest.raises(VersionError, match=str(number)):
        codec_of(number)


@pytest.mark.parametrize(
    ("raw", "dtype", "codec"),
    [
        (normal(40_000, ml_dtypes.bfloat16), "bfloat16", codecs.BF16_SPLIT),
        (normal(40_000, np.float16), "float16", codecs.BF16_SPLIT),
        (normal(40_000, np.float32), "float32", codecs.F32_PLANES),
        (normal(40_000, np.complex64), "complex64", codecs.F32_PLANES),
        (normal(40_000, ml_dtypes.float8_e4m3fn), "float8_e4m3fn", codecs.BYTES_HUF),
        (normal(40_000, ml_dtypes.float8_e5m2), "float8_e5m2", codecs.BYTES_HUF),
        (as_bytes(np.arange(40_000) % 3 == 0), "bool", codecs.PACKBITS),
        (as_bytes(np.arange(40_000) % 3 == 0), "uint8", codecs.PACKBITS),
        (as_bytes(np.random.default_rng(1).poisson(3, 4000).astype(np.uint8)), "uint8", codecs.BYTES_HUF),
        (as_bytes(np.arange(40_000, dtype="<u4") % 65_536), "uint32", codecs.ZSTD_U16),
        (as_bytes(np.arange(80_000, dtype="<i4") % 70_000), "int32", codecs.ZSTD),
        (as_bytes(np.arange(-9, 4_000, dtype="<i8")), "int64", codecs.ZSTD),
        (as_bytes(np.arange(4_000, dtype="<u2") // 16), "uint16", codecs.ZSTD),
        (as_bytes(np.full(4_000, 2.5)), "float64", codecs.CONST),
        *[(np.zeros(4096, np.uint8), dtype, codecs.CONST) for dtype in ("bfloat16", "float32", "bool", "int64")],
        *[
            (as_bytes(np.random.default_rng(2).integers(0, 1 << 63, 9000)), dtype, codecs.RAW)
            for dtype in ("bfloat16", "float32", "uint8", "int32", "float64", "float8_e5m2")
        ],
        (np.zeros(0, np.uint8), "bfloat16", codecs.RAW),
        (np.zeros(256, np.uint8), "bfloat16", codecs.RAW),  # alignment would eat the gain
    ],
)
def test_the_codec_follows_dtype_and_content(raw: Bytes, dtype: str, codec: Codec) -> None:
    encoded = encode_section(raw, dtype, Mode.FAST)
    assert encoded.codec is codec
    out = np.empty_like(raw)
    codec.decode(stored_form(encoded), encoded.chunk_bytes, out)
    assert np.array_equal(out, raw)
    assert encode_section(raw, dtype, Mode.RAW).codec is codecs.RAW


def test_raw_stores_a_view() -> None:
    raw = normal(1000, np.float32)
    (buffer,) = encode_section(raw, "float32", Mode.RAW).buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), raw)
    assert buffer.nbytes == raw.size


def test_every_dtype_of_a_geometry_has_its_codecs() -> None:
    assert codecs._BY_DTYPE.keys() == geometry._STORAGE.keys()


def test_a_quiet_start_does_not_hide_what_follows() -> None:
    """The probe looks at four places; a section that only looks compressible there is stored without growing."""
    raw = as_bytes(np.random.default_rng(3).integers(0, 65_536, 1 << 20).astype("<u2"))
    elements = raw.view("<u2")
    for start in np.linspace(0, elements.size - 4096, 4, dtype=np.int64):
        elements[start : start + 4096] = 0
    assert chosen(raw, "bfloat16") is codecs.RAW


def test_a_plane_of_one_byte_takes_one_byte_a_chunk() -> None:
    raw = as_bytes(normal(CHUNK_BYTES // 2, ml_dtypes.bfloat16).view("<u2").astype("<u4") << 16)
    encoded = codecs.F32_PLANES.encode(raw)
    assert encoded is not None
    assert encoded.chunk_bytes[:4] == (1, 1, 1, 1)  # planes 0 and 1, two chunks each
    assert encoded.chunk_bytes[4:6] == (CHUNK_BYTES // 4, CHUNK_BYTES // 4)  # plane 2: stored as it is


def test_zstd_frames_are_plain_and_carry_their_size() -> None:
    raw = normal(300_000, ml_dtypes.bfloat16)
    encoded = codecs.BF16_SPLIT.encode(raw)
    assert encoded is not None
    assert len(encoded.chunk_bytes) == 2
    high = zstandard.ZstdDecompressor().decompress(stored_form(encoded)[encoded.chunk_bytes[0] :].tobytes())
    assert high == raw[1::2].tobytes()
    assert zstandard.get_frame_parameters(encoded.buffers[-1]).window_size <= CHUNK_BYTES


def test_flags_after_the_last_are_refused() -> None:
    with pytest.raises(FrameError, match="after the last of 3 flags"):
        codecs.PACKBITS.decode(np.array([0b1000], np.uint8), (), np.empty(3, np.uint8))


@pytest.mark.parametrize(
    "chunk",
    [
        b"\x28\xb5\x2f\xfd" + bytes(6),
        zstandard.compress(bytes(99)),
        zstandard.compress(bytes(100))[:-1],
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100)),
        zstandard.compress(bytes(50)) + zstandard.compress(bytes(50)),
        zstandard.compress(bytes(100)) + b"\0",
        b"\x28\xb5\x2f\xfd\x80\x88" + (100).to_bytes(4, "little"),  # wants a window of 128 MiB, has no blocks
        b"\x50\x2a\x4d\x18" + (8).to_bytes(4, "little") + bytes(8),  # a skippable frame
    ],
)
def test_a_chunk_that_is_not_one_whole_frame_of_its_size_is_refused(chunk: bytes) -> None:
    with pytest.raises(FrameError, match="BYTES_HUF"):
        codecs.BYTES_HUF.decode(np.frombuffer(chunk, np.uint8), [len(chunk)], np.empty(100, np.uint8))


@pytest.mark.skipif(not KV_SAMPLE.exists(), reason=f"{KV_SAMPLE} is not here")
def test_ratios_on_real_state() -> None:
    sample = load_safetensors(KV_SAMPLE)
    kv = [as_bytes(a) for name, a in sample.items() if name.split(".")[-1] in {"k", "v", "kpre"}]

    def ratio(raw: Bytes, dtype: str) -> float:
        return raw.size / encode_section(raw, dtype, Mode.FAST).stored_bytes

    assert sum(map(len, kv)) / sum(encode_section(a, "bfloat16", Mode.FAST).stored_bytes for a in kv) >= 1.46
    eights = kv[0].view(ml_dtypes.bfloat16).astype(ml_dtypes.float8_e4m3fn)
    assert ratio(as_bytes(eights), "float8_e4m3fn") >= 1.18
    assert ratio(as_bytes(sample["synth.ssm_state_f32"]), "float32") >= 1.18
    assert ratio(as_bytes(sample["synth.conv_f32_upcast_bf16"]), "float32") >= 2.9
    assert ratio(as_bytes(sample["smollm2_135m.tokens_u32"]), "uint32") >= 3.0


def load_safetensors(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    """The arrays of a safetensors file: u64 header length, JSON header, bytes."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    dtypes = {"U16": "<u2", "U32": "<u4", "F32": "<f4"}
    return {
        name: np.frombuffer(data[start + a : start + b], dtypes[entry["dtype"]])
        for name, entry in json.loads(data[8:start]).items()
        if name != "__metadata__"
        for a, b in [entry["data_offsets"]]
    }
