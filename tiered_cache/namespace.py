"""`Namespace`: one identity with one geometry, as a node knows them, and the descriptor that tells them to others.

Every tier that outlives its process holds one descriptor a namespace, under `<namespace, hex>/descriptor`: with it,
names alone rebuild an index, and a refusal can say which field differs. It is written once and holds no secret.

    descriptor = H("descriptor", body) [32] | body
    body       = msgpack [version, identity digest, {field of the identity: value}, geometry document]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgpack

from tiered_cache import frame
from tiered_cache.errors import ChecksumError, FrameError, GeometryError, IdentityError, TierError, VersionError
from tiered_cache.frame import FrameHeader
from tiered_cache.geometry import Geometry
from tiered_cache.identity import DIGEST_BYTES, FrameKey, Identity, PrefixChain, namespace_of, tagged_hash
from tiered_cache.index import FrameName, Layout

DESCRIPTOR_VERSION = 1
DESCRIPTOR_BYTES_MAX = 16 << 20
BATCH_BYTES_MAX = 64 << 20
"""How much is encoded and put, or read and checked, at once, apart from a single larger frame."""
BAD = (FrameError, IdentityError, GeometryError)
"""What can be wrong with stored bytes that were read."""

_DESCRIPTOR_PATH = re.compile(rf"([0-9a-f]{{{2 * DIGEST_BYTES}}})/descriptor")


class Namespace:
    """What a node knows of one identity and geometry."""

    def __init__(
        self, digest: bytes, identity_digest: bytes, document: Mapping[str, object], geometry: Geometry
    ) -> None:
        """`document` holds the fields of the identity as `Identity.to_document` gives them."""
        self.digest = digest
        self.identity_digest = identity_digest
        self.document = document
        self.geometry = geometry
        self.layout = Layout.of(digest, PrefixChain(digest, geometry.block_tokens).block_hash(0), geometry)
        self._sizes: dict[tuple[str, int], int] = {}

    @staticmethod
    def of(identity: Identity, geometry: Geometry) -> Namespace:
        identity_digest = identity.digest()
        digest = namespace_of(identity_digest, geometry.fingerprint())
        return Namespace(digest, identity_digest, identity.to_document(), geometry)

    def differences(self, other: Namespace) -> str:
        """What makes the two different, naming every field; fields of the identity are named, never shown."""
        fields = sorted({*self.document, *other.document})
        differing = [name for name in fields if self.document.get(name) != other.document.get(name)]
        found = [f"identity differs: {', '.join(differing)}"] if differing else []
        try:
            self.geometry.check(other.geometry)
        except GeometryError as error:
            found.append(error.message)
        return "; ".join(found)

    def descriptor(self) -> bytes:
        """What `read_descriptor` reads. Raises `GeometryError` beyond `DESCRIPTOR_BYTES_MAX`."""
        document = dict(sorted(self.document.items()))
        body: bytes = msgpack.packb([DESCRIPTOR_VERSION, self.identity_digest, document, self.geometry.to_document()])
        if DIGEST_BYTES + len(body) > DESCRIPTOR_BYTES_MAX:
            raise GeometryError(f"a descriptor of {len(body)} bytes, more than {DESCRIPTOR_BYTES_MAX}")
        return tagged_hash("descriptor", body) + body

    def frame_bytes(self, group: str, tokens: int) -> int:
        """The most bytes that a stored frame has; the same for all spans of one length."""
        start, stop = self.geometry.span(group, tokens)
        size = self._sizes.get((group, stop - start))
        if size is None:
            size = self._sizes[group, stop - start] = frame.stored_bytes_max(self.geometry, group, tokens)
        return size

    def batches(self, names: Sequence[FrameName]) -> Iterator[list[FrameName]]:
        """The names in turn, each time so many that their frames are within `BATCH_BYTES_MAX`, and at least one."""
        batch: list[FrameName] = []
        size = 0
        for name in names:
            bytes_ = self.frame_bytes(name.group, name.tokens)
            if batch and size + bytes_ > BATCH_BYTES_MAX:
                yield batch
                batch, size = [], 0
            batch.append(name)
            size += bytes_
        if batch:
            yield batch

    def check(self, key: FrameKey, stored: memoryview, *, decoded: bool = False) -> FrameHeader:
        """The header of stored bytes, if these are the whole and sound frame of this key.

        Raises what is wrong, one of `BAD`, and `TierError` for a newer peer's frame, which is nobody's to replace. With
        `decoded` its content is looked at, too.
        """
        try:
            header = frame.verify(stored)
            frame.check_expected(header, key=key, identity_digest=self.identity_digest, geometry=self.geometry)
            if decoded:
                frame.decode(stored, key=key, identity_digest=self.identity_digest, geometry=self.geometry)
        except VersionError as error:
            raise TierError(f"a frame of another version is there: {error.message}", key.path()) from None
        return header


def descriptor_path(namespace: bytes) -> str:
    """Where a tier keeps a namespace's descriptor."""
    return f"{namespace.hex()}/descriptor"


def descriptor_namespace(path: str) -> bytes | None:
    """The namespace whose descriptor a tier keeps under this path; None if it is another entry's."""
    match = _DESCRIPTOR_PATH.fullmatch(path)
    return bytes.fromhex(match[1]) if match else None


def read_descriptor(data: bytes, digest: bytes) -> Namespace:
    """What a stored descriptor describes, checked in full.

    Raises `FrameError`, `GeometryError`, and `IdentityError` unless that makes the namespace of this digest.
    """
    checksum, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if tagged_hash("descriptor", body) != checksum:
        raise ChecksumError("the descriptor's checksum does not hold")
    try:
        version, *content = msgpack.unpackb(body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise FrameError(f"the descriptor cannot be read: {error}") from error
    if version != DESCRIPTOR_VERSION:
        raise VersionError(f"descriptor version {version!r}, not {DESCRIPTOR_VERSION}")
    if list(map(type, content)) != [bytes, dict, dict]:
        raise FrameError("the descriptor's fields are not an identity and a geometry")
    identity_digest, document, geometry_document = content
    if not all(isinstance(name, str) and isinstance(value, str | bytes) for name, value in document.items()):
        raise FrameError("the descriptor's identity is not text and bytes by name")
    geometry = Geometry.from_document(geometry_document)
    if namespace_of(identity_digest, geometry.fingerprint()) != digest:
        raise IdentityError("the descriptor describes another namespace")
    return Namespace(digest, identity_digest, document, geometry)
