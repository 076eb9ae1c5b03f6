"""Whole-layer blobs: one layer's state as one run of bytes, a little-endian header and then raw arrays.

A blob says nothing about whose state it is; the frame, or the envelope, that carries it must. What can be checked is
checked before anything is written: sizes are Python integers, so no header can make them overflow.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tiered_cache.devices.base import HostArray
from tiered_cache.errors import BlobError, LayerSetError
from tiered_cache.geometry import ArraySpec

Blob: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""Any C-contiguous buffer of bytes."""


def blob_bytes(blob: Blob) -> npt.NDArray[np.uint8]:
    """The blob's bytes as a one-dimensional array, without a copy."""
    return np.frombuffer(blob, dtype=np.uint8)


def unpack_header(title: str, header: struct.Struct, blob: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    """The header's integers. Raises `BlobError` if the blob is shorter than the header."""
    if len(blob) < header.size:
        raise BlobError(f"{title}: a blob of {len(blob)} bytes has no {header.size}-byte header")
    return header.unpack_from(blob.data)


def split_body(title: str, blob: npt.NDArray[np.uint8], offset: int, specs: Sequence[ArraySpec]) -> list[HostArray]:
    """The arrays after `offset`, as views. Raises `BlobError` unless they fill the blob exactly."""
    wanted = offset + sum(spec.bytes for spec in specs)
    if len(blob) != wanted:
        raise BlobError(f"{title}: a blob of {len(blob)} bytes, where its header asks for {wanted}")
    arrays: list[HostArray] = []
    for spec in specs:
        arrays.append(blob[offset : offset + spec.bytes].view(spec.storage).reshape(spec.shape))
        offset += spec.bytes
    return arrays


def join_blob(header: bytes, specs: Sequence[ArraySpec]) -> tuple[npt.NDArray[np.uint8], list[HostArray]]:
    """A new blob that begins with `header`, and the views of its arrays to be filled."""
    blob = np.empty(len(header) + sum(spec.bytes for spec in specs), dtype=np.uint8)
    blob[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    return blob, split_body("new", blob, len(header), specs)


def check_layers(title: str, carriers: Iterable[object], given: Sequence[object]) -> None:
    """Raise `LayerSetError` naming what is missing, given twice or foreign, unless `given` are the carriers."""
    expected = list(carriers)
    missing = [layer for layer in expected if layer not in given]
    twice = sorted({layer for layer in given if given.count(layer) > 1}, key=str)
    foreign = [layer for layer in given if layer not in expected]
    problems = [
        f"{word} {layers}" for word, layers in (("missing", missing), ("twice", twice), ("foreign", foreign)) if layers
    ]
    if problems:
        raise LayerSetError(f"{title}: layers {', '.join(problems)}; the carriers are {expected}")
