"""How fast frames are made and read, beside a memcpy of the same bytes: the shortest of interleaved runs, on one core.

The figures are printed (`pytest -m bench -s`). The floors asserted are counts, and ratios to other work on the same
bytes in the same run, several times what was measured: they find a mistake, not a slow machine or a busy one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from costs import instructions, shortest_s

from tiered_cache import frame
from tiered_cache.codecs import Mode
from tiered_cache.frame import Frame
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import FrameKey, namespace_of

pytestmark = pytest.mark.bench

Array = npt.NDArray[np.generic]
IDENTITY = bytes(range(32))
KV_SAMPLE = Path(__file__).parents[3] / "shared/kv_sample/kv_sample.safetensors"


class Sample:
    """Frames of one geometry, enough of them that none is in the cache when its turn comes again."""

    def __init__(self, parts: int, part_bytes: int, frames: int, fill: Callable[[int], npt.NDArray[np.uint16]]) -> None:
        block = 64
        self.geometry = Geometry(
            tuple(Part(f"p{i}", PartKind.ROWS, "bfloat16", (part_bytes // 2 // block,)) for i in range(parts)),
            block_tokens=block,
        )
        namespace = namespace_of(IDENTITY, self.geometry.fingerprint())
        self.frames = []
        for index in range(frames):
            key = FrameKey(namespace, index.to_bytes(32, "little"), bytes(32), "rows", block)
            body = fill(parts * part_bytes // 2).reshape(parts, 1, block, -1)
            self.frames.append(Frame(key, IDENTITY, index, {f"p{i}": body[i] for i in range(parts)}))
        self.raw_bytes = parts * part_bytes
        self.turns = itertools.cycle(range(frames))

    def prepare(self, mode: Mode) -> None:
        self.mode = mode
        self.stored = []
        self.packed = zstandard.ZstdCompressor(level=1).compress(self.joined(0))
        for made in self.frames:
            encoded = frame.encode(made, self.geometry, mode)
            self.stored.append(np.zeros(encoded.total_bytes, np.uint8))
            encoded.write_into(self.stored[-1])
        self.targets = [{n: np.full_like(a, 1) for n, a in made.arrays.items()} for made in self.frames]

    def joined(self, turn: int) -> bytes:
        return b"".join(array.tobytes() for array in self.frames[turn].arrays.values())

    def copy(self) -> None:
        turn = next(self.turns)
        for name, target in self.targets[turn].items():
            np.copyto(target, self.frames[turn].arrays[name])

    def write(self) -> None:
        turn = next(self.turns)
        encoded = frame.encode(self.frames[turn], self.geometry, self.mode)
        room = self.stored[turn]
        encoded.write_into(room[: encoded.total_bytes])

    def encode(self) -> None:
        frame.encode(self.frames[next(self.turns)], self.geometry, self.mode).buffers()

    def verify(self) -> None:
        frame.verify(self.stored[next(self.turns)])

    def decode(self) -> None:
        turn = next(self.turns)
        made = self.frames[turn]
        frame.decode(self.stored[turn], key=made.key, identity_digest=IDENTITY, geometry=self.geometry)

    def decode_into(self) -> None:
        turn = next(self.turns)
        frame.decode(
            self.stored[turn],
            key=self.frames[turn].key,
            identity_digest=IDENTITY,
            geometry=self.geometry,
            into=self.targets[turn],
        )

    def zstd(self) -> None:
        zstandard.ZstdCompressor(level=1).compress(self.joined(next(self.turns)))

    def unzstd(self) -> None:
        zstandard.ZstdDecompressor().decompress(self.packed)

    def measure(self, rounds: int, *yardsticks: str) -> dict[str, float]:
        calls = ("copy", "encode", "write", "verify", "decode", "decode_into", *yardsticks)
        return shortest_s({name: getattr(self, name) for name in calls}, rounds)


def show(title: str, raw_bytes: int, seconds: Mapping[str, float]) -> None:
    print(f"\n{title}")
    for name, value in seconds.items():
        rate, share = raw_bytes / value / 1e9, seconds["copy"] / value
        print(f"  {name:12} {value * 1e6:9.1f} us {rate:7.2f} GB/s {share:6.2f} of a memcpy")


def random_bits(count: int) -> npt.NDArray[np.uint16]:
    return np.random.default_rng(0).integers(0, 1 << 16, count, dtype=np.uint16)


def test_a_small_raw_frame() -> None:
    sample = Sample(parts=8, part_bytes=4096, frames=64, fill=random_bits)
    sample.prepare(Mode.RAW)
    seconds = sample.measure(400)
    show("raw frame of 8 sections, 32 KiB", sample.raw_bytes, seconds)
    assert seconds["write"] < 30 * seconds["copy"]
    assert seconds["decode_into"] < 30 * seconds["copy"]
    assert instructions(sample.write) < 10_000
    assert instructions(sample.decode_into) < 12_000


@pytest.mark.parametrize("mebibytes", [1, 4, 16])
def test_a_large_raw_frame(mebibytes: int) -> None:
    sample = Sample(parts=2, part_bytes=mebibytes << 19, frames=max(4, 64 // mebibytes), fill=random_bits)
    sample.prepare(Mode.RAW)
    seconds = sample.measure(20)
    show(f"raw frame of {mebibytes} MiB", sample.raw_bytes, seconds)
    assert seconds["write"] < 4 * seconds["copy"]
    assert seconds["decode_into"] < 4 * seconds["copy"]


@pytest.mark.skipif(not KV_SAMPLE.exists(), reason=f"{KV_SAMPLE} is not here")
@pytest.mark.parametrize("mebibytes", [1, 4, 16])
def test_real_kv_through_the_frame(mebibytes: int) -> None:
    real = real_kv()
    sample = Sample(2, mebibytes << 19, frames=2, fill=lambda count: np.resize(real, count))
    sample.prepare(Mode.FAST)
    ratio = sample.raw_bytes * len(sample.stored) / sum(stored.size for stored in sample.stored)
    seconds = sample.measure(8, "zstd", "unzstd")
    show(f"real bf16 keys and values, {mebibytes} MiB, ratio {ratio:.3f}", sample.raw_bytes, seconds)
    assert ratio >= 1.46
    assert seconds["encode"] < 3 * seconds["zstd"]
    assert seconds["decode_into"] < 3 * seconds["unzstd"]


def real_kv() -> npt.NDArray[np.uint16]:
    """All bf16 keys and values of the sample, one after another."""
    data = KV_SAMPLE.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = {n: e for n, e in json.loads(data[8:start]).items() if n.split(".")[-1] in {"k", "v", "kpre"}}
    offsets = [entry["data_offsets"] for _, entry in sorted(entries.items())]
    return np.concatenate([np.frombuffer(data[start + a : start + b], "<u2") for a, b in offsets])
