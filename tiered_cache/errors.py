"""Every exception of the library.

A miss is not an error: it is a value with a `MissReason`. What follows from an error is decided in one
place, `tiered_cache.service.router`. Every class takes positional arguments only, because exceptions cross Ray
actors by their `args`, and every message says what differed.
"""

from __future__ import annotations

import enum


class MissReason(enum.StrEnum):
    """Why a look-up or a restore gave less than was asked for; a closed list, each one a counter."""

    NOT_STORED = "not_stored"  # no frame of this prefix was ever offered, or none reached a tier
    EVICTED = "evicted"  # was stored; the policy dropped it
    EXPIRED = "expired"  # was stored; the time to live that its caller gave it was over
    NO_CHECKPOINT = "no_checkpoint"  # rows are there, the carries at a usable length are not
    WINDOW_GONE = "window_gone"  # rows and carries are there, the window's last blocks are not
    SHARD_MISSING = "shard_missing"  # not every rank's frame is there
    TOO_SHORT = "too_short"  # the prompt has no checkpoint position before its last token
    NAMESPACE = "namespace"  # other identity or geometry
    QUARANTINED = "quarantined"  # a frame failed its checks and was set aside
    LOST = "lost"  # its only copy died with its owner
    VERSION = "version"  # a newer peer's frame
    TIER_ERROR = "tier_error"  # the tier could not answer
    DEADLINE = "deadline"  # the tier did not answer in time
    CAPACITY = "capacity"  # no worker had room
    FASTER_TO_COMPUTE = "faster_to_compute"  # is there; loading it was expected to take longer than computing it
    REFUSED = "refused"  # a worker refused the state


class TieredCacheError(Exception):
    """Base of all. `key` is the frame's path or the sequence's name, `tier` the tier's name, where known."""

    def __init__(self, message: str, key: str | None = None, tier: str | None = None) -> None:
        super().__init__(message, key, tier)
        self.message = message
        self.key = key
        self.tier = tier

    def __str__(self) -> str:
        where = ", ".join(f"{n} {v}" for n, v in (("tier", self.tier), ("key", self.key)) if v)
        return f"{self.message} ({where})" if where else self.message


class ConfigError(TieredCacheError, ValueError):
    """A setting is wrong; the process refuses to start."""


class TraceError(TieredCacheError, ValueError):
    """A request trace cannot be read; the message names file, line and field."""


class GeometryError(TieredCacheError, ValueError):
    """Names, dtypes, shapes or shard layout differ; the message lists every field that does."""


class IdentityError(TieredCacheError, ValueError):
    """Weights, adapter, number format, tokenizer, tenant or engine differ; the message lists every field."""


class CapacityError(TieredCacheError):
    """There is no room; raised before any byte moves, so another worker can be tried."""


class FrameError(TieredCacheError, ValueError):
    """Stored bytes are not a sound frame: quarantine them and recompute."""


class ChecksumError(FrameError):
    """A checksum over header, meta, section or padding does not hold."""


class TruncatedError(FrameError):
    """A frame is shorter or longer than it declares."""


class VersionError(FrameError):
    """A frame of another format version: a miss, and never quarantined, since a newer peer may have written it."""


class FrameNotFoundError(TieredCacheError, KeyError):
    """A frame that was promised is gone."""

    __str__ = TieredCacheError.__str__  # KeyError would show the repr of the arguments


class TierError(TieredCacheError):
    """A tier failed; `retryable` says whether the same call can succeed later. `__cause__` is the tier's own."""

    def __init__(self, message: str, key: str | None = None, tier: str | None = None, retryable: bool = False) -> None:
        super().__init__(message, key, tier)
        self.args = (message, key, tier, retryable)
        self.retryable = retryable


class DeadlineError(TierError):
    """A call did not end by its deadline."""

    def __init__(self, message: str, key: str | None = None, tier: str | None = None, retryable: bool = True) -> None:
        super().__init__(message, key, tier, retryable)


class TakenOverError(TierError):
    """Another catalogue has claimed the object store: this one refuses everything from now on. Names who it was."""

    def __init__(self, message: str, key: str | None = None, tier: str | None = None, retryable: bool = True) -> None:
        super().__init__(message, key, tier, retryable)


class UnknownOutcomeError(TierError):
    """The other side died or was restarted under a call that is not safe to repeat: it may have happened or not.

    Of a `resume`: asking again within a minute, through the same port, ends it, with the sequence or with `StaleError`;
    what was restored for the lost answer is run by nobody. Of a `suspend` without a `ticket`: nothing has come of it,
    `wake` lets the sequence run on, and what was stored is let go by itself. With a `ticket`, all is stored, and
    `settle`, which may be asked again, ends it either way: kept, or with `StaleError` and the sequence running on.
    """

    def __init__(
        self,
        message: str,
        key: str | None = None,
        tier: str | None = None,
        retryable: bool = False,
        ticket: object = None,
    ) -> None:
        super().__init__(message, key, tier, retryable)
        self.args = (message, key, tier, retryable, ticket)
        self.ticket = ticket


class StaleError(TieredCacheError):
    """An epoch, generation or token count is not the expected one: the caller speaks of a past that is fenced off."""


class StateError(TieredCacheError, ValueError):
    """A sequence state refused a call or a blob; it is as it was before."""


class PositionError(StateError):
    """An append, advance or rewind does not start or end where the cursor allows."""


class BlobError(StateError):
    """A whole-layer blob does not have the declared layout: size, head dimension, length or flag values."""


class LayerSetError(StateError):
    """The layers in a snapshot are not exactly the layers that carry state: missing, duplicate or foreign."""


class LockstepError(StateError):
    """Two parts of one sequence stand at different token counts."""


class DraftError(StateError):
    """A snapshot, export or prestage was asked for at a moment when the state is not a settled one."""


class TokenError(StateError):
    """A token id lies outside the vocabulary."""


class ReleasedError(StateError):
    """The state was released; its memory is gone."""
