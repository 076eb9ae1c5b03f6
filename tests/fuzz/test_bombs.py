"""Small inputs that unfold into large ones, read by a process that can have little more memory than it has.

`python test_bombs.py` reads each of `BOMBS` in a child of its own, which bounds its memory before, and prints how
each ended.
"""

from __future__ import annotations

import gzip
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgpack
import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the processes that this file is the program of

from forging import signed, sums

from tiered_cache import codecs, frame
from tiered_cache.codecs import CHUNK_BYTES
from tiered_cache.errors import TieredCacheError
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import FrameKey, namespace_of, tagged_hash
from tiered_cache.namespace import read_descriptor
from tiered_cache.replay.traces import Trace

ROOM_BYTES = 48 << 20
"""How much more than at its start the reader can have: less than any bomb asks for."""
BOMB_BYTES = 256 << 20
IDENTITY = bytes(range(32))
CHUNKED = (codecs.BF16_SPLIT, codecs.F32_PLANES, codecs.BYTES_HUF, codecs.ZSTD, codecs.ZSTD_U16)
DTYPES = {codecs.BF16_SPLIT: "bfloat16", codecs.F32_PLANES: "float32", codecs.ZSTD_U16: "uint32"}
WIDTHS = {"bfloat16": 2, "float32": 4, "uint32": 4, "uint8": 1}


def _planes(codec: codecs.Codec) -> int:
    return {codecs.BF16_SPLIT: 2, codecs.F32_PLANES: 4}.get(codec, 1)


def _frame(codec: codecs.Codec, chunk: bytes) -> Callable[[], object]:
    """Decode a frame of one section of 1 MiB whose first chunk is this; all checksums hold."""
    dtype = DTYPES.get(codec, "uint8")
    width = WIDTHS[dtype]
    geometry = Geometry((Part("k", PartKind.ROWS, dtype, (CHUNK_BYTES // 16 // width,)),), block_tokens=16)
    key = FrameKey(namespace_of(IDENTITY, geometry.fingerprint()), b"p" * 32, b"q" * 32, "rows", 16)
    rest = [b"\0"] * (_planes(codec) - 1)
    body = b"".join([chunk, *rest])
    sizes = struct.pack(f"<{1 + len(rest)}I", len(chunk), *map(len, rest))
    row = ["k", dtype, [1, 16, CHUNK_BYTES // 16 // width], codec.number, len(body), sizes]
    of_key = [key.namespace, key.prefix, key.parent, key.group, key.tokens, key.rank, key.private]
    values = [*of_key, IDENTITY, geometry.fingerprint(), 0, 16, 5, [row], sums([body])]
    data = signed(msgpack.packb(values), [body])
    frame.verify(data)
    return lambda: frame.decode(data, key=key, identity_digest=IDENTITY, geometry=geometry)


def _plane_bytes(codec: codecs.Codec) -> int:
    return CHUNK_BYTES // 2 if codec is codecs.ZSTD_U16 else CHUNK_BYTES // _planes(codec)


def _honest(codec: codecs.Codec) -> Callable[[], object]:
    """Says how much it unfolds into: far more than the geometry allows."""
    return _frame(codec, zstandard.compress(bytes(BOMB_BYTES)))


def _lying(codec: codecs.Codec) -> Callable[[], object]:
    """Says that it is of the right size, and is not."""
    packed = bytearray(zstandard.compress(bytes(BOMB_BYTES)))
    assert zstandard.frame_content_size(bytes(packed)) == BOMB_BYTES
    at = bytes(packed).index(struct.pack("<I", BOMB_BYTES), 4)
    packed[at : at + 4] = struct.pack("<I", _plane_bytes(codec))
    assert zstandard.frame_content_size(bytes(packed)) == _plane_bytes(codec)
    return _frame(codec, bytes(packed))


def _wide(codec: codecs.Codec) -> Callable[[], object]:
    """Is of the right size, and asks for a window of 128 MiB or more to unfold in."""
    size = _plane_bytes(codec)
    descriptor = (27 - 10) << 3  # of 2**27 bytes
    block = np.random.default_rng(0).bytes(100)
    header = struct.pack("<IBBI", 0xFD2FB528, 0x80, descriptor, size)
    return _frame(codec, header + struct.pack("<I", len(block) << 3)[:3] + block + b"\x01\0\0")


def _nested(depth: int, count: int) -> bytes:
    """Arrays in arrays, each of which says that it has very many items."""
    return struct.pack(">BI", 0xDD, count) * depth


def _meta() -> Callable[[], object]:
    data = signed(_nested(400, 1 << 19) + bytes(1 << 19))
    return lambda: frame.read_header(data)


def _descriptor(opening: bytes) -> Callable[[], object]:
    body = opening + bytes((1 << 20) - len(opening))
    data = tagged_hash("descriptor", body) + body
    return lambda: read_descriptor(data, bytes(32))


def _trace() -> Callable[[], object]:
    """One line of 256 MiB, gzipped."""
    file = tempfile.NamedTemporaryFile(suffix="_b64.jsonl.gz")  # noqa: SIM115 - lives as long as the process
    file.write(gzip.compress(b'{"x": "' + b"a" * BOMB_BYTES, 1))
    file.flush()
    return lambda: (list(Trace(file.name, 64)), file)


BOMBS: Mapping[str, Callable[[], Callable[[], object]]] = {
    **{f"honest {codec}": lambda codec=codec: _honest(codec) for codec in CHUNKED},  # type: ignore[misc]
    **{f"lying {codec}": lambda codec=codec: _lying(codec) for codec in CHUNKED},  # type: ignore[misc]
    **{f"wide {codec}": lambda codec=codec: _wide(codec) for codec in CHUNKED},  # type: ignore[misc]
    "nested arrays in a frame's meta": _meta,
    "nested arrays in a descriptor": lambda: _descriptor(_nested(400, 1 << 20)),
    "nested maps in a descriptor": lambda: _descriptor((struct.pack(">BI", 0xDF, 1 << 19) + b"\0") * 400),
    "a line of a trace": _trace,
}


def explode(name: str) -> str:
    """Read a bomb with bounded memory; the class of the error that it ends with."""
    read = BOMBS[name]()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM_BYTES,) * 2)
    try:
        read()
    except TieredCacheError as error:
        return type(error).__name__
    return "it was taken"


def test_no_small_input_takes_much_memory() -> None:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    ended = json.loads(done.stdout)
    assert ended.keys() == BOMBS.keys()
    assert set(ended.values()) <= {"FrameError", "TraceError"}, ended


if __name__ == "__main__":
    results = {}
    for bomb in BOMBS:
        reading, writing = os.pipe()
        if not os.fork():
            os.write(writing, explode(bomb).encode())
            os._exit(0)
        os.close(writing)
        os.wait()
        results[bomb] = os.read(reading, 100).decode() or "died"
        os.close(reading)
    json.dump(results, sys.stdout)
