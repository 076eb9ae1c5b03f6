"""How vLLM's cache groups become a geometry: opaque pages, one for each chunk of tokens and group.

vLLM hands over a *chunk*: what all workers hold of one group's layers over `chunk_tokens` tokens, as one row of bytes
in its host buffer. A group of full attention is rows, one of sliding-window attention a window, one of recurrent layers
a carry: their pages are the parts of our frames. A frame holds one block, the least number of tokens that is a whole
number of chunks of every group. What of a row a group does not use is left over from the row's last owner: such bytes
are not taken along, where vLLM's arithmetic is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tiered_cache.errors import GeometryError
from tiered_cache.geometry import Geometry, Part, PartKind

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageGroup:
    """One of vLLM's cache groups."""

    index: int
    """vLLM's own number for it."""
    kind: PartKind
    chunk_tokens: int
    ranges: tuple[tuple[int, int], ...]
    """What of a row the group uses: ascending [start, stop), in bytes."""
    window_tokens: int = 0
    content_dtype: str = ""
    """What the bytes mostly are: a hint for the codec."""

    @property
    def name(self) -> str:
        """Of the part that holds its pages."""
        return f"group{self.index}"

    @property
    def page_bytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def read(self, row: Bytes, page: Bytes) -> None:
        """Copy what the group uses of a row into `page`, uint8 [page_bytes]."""
        at = 0
        for start, stop in self.ranges:
            page[at : at + stop - start] = row[start:stop]
            at += stop - start

    def write(self, page: Bytes, row: Bytes) -> None:
        """The way back; what the group does not use of the row stays as it is."""
        at = 0
        for start, stop in self.ranges:
            row[start:stop] = page[at : at + stop - start]
            at += stop - start


@dataclass(frozen=True)
class PageLayout:
    """All groups of one engine. Raises `GeometryError` for what no frame can hold."""

    groups: tuple[PageGroup, ...]
    hash_tokens: int
    """How many tokens one of vLLM's block hashes covers."""
    row_bytes: int

    def __post_init__(self) -> None:
        problems = []
        if not self.groups:
            problems.append("there is no cache group")
        for group in self.groups:
            if group.chunk_tokens % self.hash_tokens:
                problems.append(f"{group.name}: chunks of {group.chunk_tokens} tokens, hashes of {self.hash_tokens}")
            if not group.ranges or group.ranges[-1][1] > self.row_bytes:
                problems.append(f"{group.name}: bytes {group.ranges} of a row of {self.row_bytes}")
        if problems:
            raise GeometryError("; ".join(problems))

    @cached_property
    def block_tokens(self) -> int:
        return math.lcm(*(group.chunk_tokens for group in self.groups))

    @cached_property
    def by_index(self) -> dict[int, PageGroup]:
        return {group.index: group for group in self.groups}

    @cached_property
    def geometry(self) -> Geometry:
        return Geometry(tuple(map(self._part, self.groups)), self.block_tokens)

    @cached_property
    def has_carries(self) -> bool:
        return any(group.kind is PartKind.CARRY for group in self.groups)

    @cached_property
    def only_rows(self) -> bool:
        return all(group.kind is PartKind.ROWS for group in self.groups)

    def _part(self, group: PageGroup) -> Part:
        if group.kind is PartKind.CARRY:
            return Part(group.name, group.kind, "uint8", (group.page_bytes,), content_dtype=group.content_dtype)
        bytes_ = group.page_bytes * (self.block_tokens // group.chunk_tokens)
        width = -(-bytes_ // self.block_tokens)  # a row of a part is a token's: pages are padded to whole ones
        window = -(-group.window_tokens // group.chunk_tokens) * group.chunk_tokens
        return Part(group.name, group.kind, "uint8", (width,), window_tokens=window, content_dtype=group.content_dtype)

    def chunk_ends(self, group: PageGroup, block_end: int) -> Sequence[int]:
        """The ends of the group's chunks that the frame of the block with this end holds."""
        if group.kind is PartKind.CARRY:
            return [block_end]
        return range(block_end - self.block_tokens + group.chunk_tokens, block_end + 1, group.chunk_tokens)

    def groups_of(self, frame_group: str) -> Iterator[PageGroup]:
        """Whose pages the frames of one of the geometry's groups hold."""
        for part, group in zip(self.geometry.parts, self.groups, strict=True):
            if part.group == frame_group:
                yield group

    def join(self, group: PageGroup, pages: Sequence[Bytes]) -> Bytes:
        """The array of a group's part from its chunks' pages, in order."""
        (part,) = (part for part in self.geometry.parts if part.name == group.name)
        spec = part.array(self.block_tokens)
        if len(pages) == 1 and pages[0].size == spec.bytes:
            return pages[0].reshape(spec.shape)
        array = np.zeros(spec.shape, np.uint8)
        np.concatenate(pages, out=array.reshape(-1)[: group.page_bytes * len(pages)])
        return array

    def split(self, group: PageGroup, array: Bytes, chunk_end: int) -> Bytes:
        """The page of one chunk, as a view of the array of the frame that holds it."""
        number = 0
        if group.kind is not PartKind.CARRY:
            number = (chunk_end - 1) % self.block_tokens // group.chunk_tokens
        return array.reshape(-1)[number * group.page_bytes : (number + 1) * group.page_bytes]

    def block_end(self, chunk_end: int) -> int:
        """The end of the block that a chunk lies in."""
        return -(-chunk_end // self.block_tokens) * self.block_tokens
