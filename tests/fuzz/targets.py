"""What is fuzzed: everything that reads bytes or text from elsewhere, as functions of bytes that must not raise.

A target catches the errors that its reader declares, and nothing else; what the reader takes as good is held against
what is known to be good. `corpus` is what mutations begin with.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType

import msgpack
import obstore
from forging import resealed
from obstore.store import MemoryStore

from tiered_cache import frame
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings, format_size, parse_size
from tiered_cache.errors import ConfigError, IdentityError, TieredCacheError, TraceError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Identity, tagged_hash
from tiered_cache.namespace import Namespace, descriptor_namespace, read_descriptor
from tiered_cache.replay.traces import SAMPLE_PATH, Trace, block_ids
from tiered_cache.service.local import InlineExecutor
from tiered_cache.tiers.base import PutItem, is_path
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.object_store import ObjectStoreTier, open_store

REQUESTS_READ = 64
IDENTITY = Identity(b"w" * 32, "reference", "1", rounding="qsa f32", adapter_digest=b"a" * 32)


@dataclass(frozen=True)
class Target:
    """A reader under attack."""

    run: Callable[[bytes], None]
    corpus: tuple[bytes, ...]


def _golden() -> ModuleType:
    path = Path(__file__).parents[1] / "golden" / "test_frame_v1.py"
    spec = importlib.util.spec_from_file_location("golden_frames", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = _golden()
FILES = {path.stem: path.read_bytes() for path in sorted(golden.FOLDER.glob("*.frame"))}
FRAMES: Mapping[str, tuple[Geometry, frame.Frame]] = {
    name: golden.golden("mixed" if name == "mixed_raw" else name) for name in FILES
}
GEOMETRIES: Mapping[bytes, str] = {geometry.fingerprint(): name for name, (geometry, _) in FRAMES.items()}
SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


# Frames


def _decoded(data: bytes) -> frame.Frame | None:
    """All that reads a frame, in the order in which a node does."""
    found = None
    with contextlib.suppress(TieredCacheError):
        frame.header_bytes(data)
    with contextlib.suppress(TieredCacheError):
        frame.verify(data)
    name = "mixed"
    with contextlib.suppress(TieredCacheError):
        name = GEOMETRIES.get(frame.read_header(data).geometry_fingerprint, name)
    geometry, made = FRAMES[name]
    with contextlib.suppress(TieredCacheError):
        found = frame.decode(data, key=made.key, identity_digest=golden.IDENTITY, geometry=geometry)
    if found is not None:
        for part, spec in geometry.arrays(made.key.group, made.key.tokens).items():
            assert (found.arrays[part].shape, found.arrays[part].dtype) == (spec.shape, spec.storage)
    return found


def read_frame(data: bytes) -> None:
    """Only what was written is taken for a frame."""
    if _decoded(data) is not None:
        assert data in FILES.values(), "another string of bytes is taken for a frame"


def read_sealed_frame(data: bytes) -> None:
    """Checksums hold, so that the content is what is looked at."""
    _decoded(resealed(data))


# Descriptors


def _descriptors() -> Iterator[bytes]:
    for geometry in {geometry.fingerprint(): geometry for geometry, _ in FRAMES.values()}.values():
        yield Namespace.of(IDENTITY, geometry).descriptor()


def read_sealed_descriptor(data: bytes) -> None:
    """Behind a checksum that holds; what is taken can be compared and written again."""
    body = data[32:]
    with contextlib.suppress(TieredCacheError):
        read_descriptor(data, KNOWN.digest)
    with contextlib.suppress(TieredCacheError):
        found = read_descriptor(tagged_hash("descriptor", body) + body, KNOWN.digest)
        assert found.geometry.fingerprint() == KNOWN.geometry.fingerprint()
        assert isinstance(KNOWN.differences(found), str)
        found.descriptor()


KNOWN = Namespace.of(IDENTITY, FRAMES["mixed"][0])


def _with_a_field_that_no_text_names() -> bytes:
    content = msgpack.unpackb(KNOWN.descriptor()[32:])
    content[2][b"engine"] = 1
    body: bytes = msgpack.packb(content)
    return tagged_hash("descriptor", body) + body


# Traces


def _trace(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=SCRATCH, suffix="_b64.jsonl") as file:
        file.write(data)
        file.flush()
        with contextlib.suppress(TraceError):
            for request in islice(Trace(file.name, 64), REQUESTS_READ):
                assert request.input_tokens > 0
                assert sum(count for _, count in request.runs) == request.input_tokens // 64
                if request.input_tokens < 1 << 16:
                    assert len(block_ids(request.runs)) == request.input_tokens // 64


def read_compressed_trace(data: bytes) -> None:
    _trace(data)
    with contextlib.suppress(OSError, EOFError, ValueError):
        _trace(gzip.compress(data[:4096], 1))


_LINES = gzip.decompress(SAMPLE_PATH.read_bytes()).splitlines(keepends=True)[:4]
_RUNS = {"timestamp": 0, "input_length": 130, "output_length": 4, "runs": [[0, 2]], "session": 1, "turn": 0}


# Settings


def read_size(data: bytes) -> None:
    """A size as people write it is taken, or refused by name."""
    text = data.decode("utf-8", "surrogateescape")
    size = None
    with contextlib.suppress(ConfigError):
        size = parse_size(text, "--size")
    if size is not None:
        assert 0 <= size <= 1 << 60
        assert format_size(size)


def read_store(data: bytes) -> None:
    """A URL, and options one a line, name a store or are refused; nothing is asked of it."""
    url, _, rest = data.decode("utf-8", "surrogateescape").partition("\n")
    options = dict(line.partition("=")[::2] for line in rest.splitlines())
    if "file" not in url.lower():  # which would make directories
        with contextlib.suppress(ConfigError):
            open_store(url, options)


def read_settings(data: bytes) -> None:
    """Fields of any value are taken or refused."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError):
        return
    for kind in (TierSettings, WorkerSettings, ClusterSettings):
        if isinstance(fields, dict):
            known = {name: value for name, value in fields.items() if name in kind.__dataclass_fields__}
            with contextlib.suppress(ConfigError, TypeError):
                kind(**known)


# Names


def read_name(data: bytes) -> None:
    """A path is a frame's in one spelling, a descriptor's, or nobody's; a store that lists it does not fall over."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(IdentityError):
        key = FrameKey.parse(text)
        assert key.path() == text
        assert is_path(text)
        assert descriptor_namespace(text) is None
    descriptor_namespace(text)
    store = MemoryStore()
    try:
        obstore.put(store, f"entries/{text}.blob", b"x")
        obstore.put(store, f"quarantine/{text}", b"x")
    except Exception:  # noqa: BLE001 - no store has such a name
        return
    with ObjectStoreTier(store, 1 << 20, InlineExecutor()) as tier:
        assert all(is_path(entry.path) for entry in tier.list())
        tier.quarantined()


_KEY = FRAMES["mixed"][1].key
_NAMES = (
    _KEY.path(),
    _KEY.path() + ".blob.0123456789abcdef.checksum",
    f"{'ab' * 32}/descriptor",
    FrameKey(b"n" * 32, b"p" * 32, b"q" * 32, "window.8", 4).path(),
)


# A disk tier's ledger


def _tier_with_an_entry(root: Path) -> None:
    with DiskTier(root, 1 << 20, sync=SyncPolicy.NEVER) as tier, tier.reserve([3]) as room:
        tier.put([PutItem("a/b", [b"abc"])], room)


def read_ledger(data: bytes) -> None:
    """Whatever the ledger says, what is there is counted, or the directory is refused as another version's."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        root = Path(folder) / "tier"
        shutil.copytree(TIER, root)
        (root / "ledger").write_bytes(data)
        with contextlib.suppress(ConfigError), DiskTier(root, 1 << 20, sync=SyncPolicy.NEVER) as tier:
            usage = tier.usage()
            assert (usage.entries, usage.bytes_used) == (1, tier.footprint(3)), usage
            assert usage.bytes_reserved >= 0
            with tier.reserve([1]):
                pass


_SCRATCH_TIER = tempfile.TemporaryDirectory(dir=SCRATCH)
TIER = Path(_SCRATCH_TIER.name) / "tier"
_tier_with_an_entry(TIER)


TARGETS: Mapping[str, Target] = {
    "frame": Target(read_frame, tuple(FILES.values())),
    "sealed-frame": Target(read_sealed_frame, tuple(FILES.values())),
    "descriptor": Target(read_sealed_descriptor, (*_descriptors(), _with_a_field_that_no_text_names())),
    "trace": Target(_trace, (b"".join(_LINES), json.dumps(_RUNS).encode() + b"\n", json.dumps(_RUNS).encode())),
    "compressed-trace": Target(read_compressed_trace, (gzip.compress(b"".join(_LINES), mtime=0),)),
    "size": Target(read_size, (b"1.5GiB", b"64 MB", b"4096", b" 512kib ")),
    "store": Target(
        read_store,
        (
            b"s3://bucket/prefix\nendpoint=http://127.0.0.1:1\nregion=x\naccess_key_id=a",
            b"az://container/x\naccount_name=a",
            b"gs://bucket\nservice_account_key={}",
            b"s3://[bucket\nregion=x",
        ),
    ),
    "settings": Target(
        read_settings,
        (
            json.dumps({"host_bytes": 1, "object_url": "s3://b", "object_bytes": 2, "object_requests": 16}).encode(),
            json.dumps({"workers": 2, "disk_dir": "/tmp/x", "disk_bytes": 5, "capacity_bytes": 7}).encode(),
        ),
    ),
    "name": Target(read_name, tuple(name.encode() for name in _NAMES)),
    "ledger": Target(read_ledger, ((TIER / "ledger").read_bytes(), struct.pack("<8sII6Q", b"tc-book1", 0, *range(7)))),
}
