"""What the cache asks of an engine: room, the state of a sequence as arrays, and a sequence made from arrays.

`Engine` is all that spilling and restoring need. `ComputingEngine` adds what replays and tests need: to run a
sequence. Both are per process and per rank; handles of sequences are the engine's own small integers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tiered_cache.errors import StateError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import Identity, Tokens

HostArray = npt.NDArray[np.generic]
"""A C-contiguous array in host memory, in the storage dtype of its part."""


class FrameName(NamedTuple):
    """One frame of a sequence: the group, and the token count at which its span ends."""

    group: str
    tokens: int


class Restoration(ABC):
    """A sequence in the making: fresh state that no one sees until `commit`."""

    @abstractmethod
    def put(self, name: FrameName, arrays: Mapping[str, HostArray]) -> None:
        """Copy one frame's arrays into the fresh state; the arrays may be reused once this returns.

        Raises `GeometryError` or `StateError` if they are not what the geometry declares; `abort` is then due.
        """

    @abstractmethod
    def commit(self) -> int:
        """Check that exactly the needed frames came, synchronise, swap the state in; returns the sequence's handle.

        Raises `StateError` if a frame is missing or parts do not agree; nothing was swapped in then.
        """

    @abstractmethod
    def abort(self) -> None:
        """Free everything the restoration took. Idempotent; a no-op after `commit`."""


class Engine(ABC):
    """The owner of sequences' state on one device, as one rank of one geometry."""

    identity: Identity
    geometry: Geometry
    rank: int = 0

    @abstractmethod
    def bytes_free(self) -> int:
        """How many bytes of state can still be reserved."""

    @abstractmethod
    def reserve(self, tokens: int) -> int:
        """Set room aside for a sequence that may grow to `tokens` tokens; returns the reservation's number.

        Raises `CapacityError` and reserves nothing if there is no room.
        """

    @abstractmethod
    def cancel(self, reservation: int) -> None:
        """Give a reservation back; idempotent, and a no-op once it became a sequence."""

    @abstractmethod
    def restoration(self, reservation: int, tokens: int) -> Restoration:
        """Begin to make a sequence of `tokens` tokens in reserved room."""

    @abstractmethod
    def tokens(self, sequence: int) -> int:
        """How many accepted tokens the sequence's state covers."""

    @abstractmethod
    def stage(self, sequence: int) -> None:
        """Copy what is overwritten in place, so that the checkpoint at the current token count can be exported later.

        Raises `CapacityError` if no staging slot is free, `DraftError` while a draft is open.
        """

    @abstractmethod
    def export(self, sequence: int, names: Sequence[FrameName], out: Sequence[Mapping[str, HostArray]]) -> None:
        """Fill `out[i]`, arrays as the geometry declares for `names[i]`, in one synchronised batch.

        Blocks may be exported at any time, checkpoints at staged token counts and at the current one. Raises
        `StateError` for any other; `out` is then undefined and the sequence as it was.
        """

    def sampler_state(self, sequence: int) -> bytes:
        """What a resumed sequence needs besides its state to go on as if it had never moved; opaque to the cache."""
        del sequence
        return b""

    def load_sampler_state(self, sequence: int, state: bytes) -> None:
        """Take over what `sampler_state` gave on another worker. Raises `StateError` if it cannot."""
        if state:
            raise StateError(f"sequence {sequence}: this engine keeps no sampler state, and got {len(state)} bytes")

    @abstractmethod
    def release(self, sequence: int) -> None:
        """Free the sequence's device memory and its staged checkpoints. Idempotent."""


class ComputingEngine(Engine):
    """An engine that this process can run: for replays, tests and examples."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Token ids lie below this."""

    @abstractmethod
    def start(self, reservation: int) -> int:
        """An empty sequence in reserved room; returns its handle."""

    @abstractmethod
    def extend(self, sequence: int, tokens: Tokens) -> None:
        """Compute the state of further tokens: shape [k], uint32. Raises `CapacityError` before any is computed."""

    @abstractmethod
    def output(self, sequence: int) -> int:
        """64 bits of what the model would emit now, a function of every byte of the state. Changes nothing."""

    @abstractmethod
    def next_token(self, sequence: int) -> int:
        """The token that the model would emit now: `output` reduced to the vocabulary. Changes nothing."""

    @abstractmethod
    def digest(self, sequence: int) -> str:
        """A digest of every byte of the state at the current token count, however it came to be."""
