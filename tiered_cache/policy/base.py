"""What a policy is asked and what it answers.

There is one policy object for each tier. A cache and a simulator drive the same object, in this order for a request:

    take_at = policy.start(request, match, hints, now_s, view)          # before the prompt is computed
    take_at += policy.finish(request, chain, output_tokens, hints, now_s)      # after the last token
    new = index.candidates(chain, take_at, tier, frame_bytes)
    proposal = policy.propose(new, free_bytes, pinned, now_s, view)     # drop these, in this order, then take those
    policy.commit(added, dropped, now_s, view)                          # what really happened, losses and recovery too

A policy is deterministic: the same calls and the same seed give the same answers. What it remembers is bounded.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from tiered_cache.errors import ConfigError
from tiered_cache.index import Candidate, Chain, Match, PrefixId, RemovalReason, TierView


@dataclass(frozen=True, slots=True)
class Hints:
    """What a caller knows about one sequence's future; every field may be left out, and none is trusted for safety.

    Times are durations, finite and not negative, from when the cache hears of them and on its clock: a caller in
    another process needs to know nothing of that. Pins, times to live and `will_not_return` are honoured outside the
    policies (`lifetimes.py`), so whichever there is; `priority` and `returns_in_s` by the policies that say so:
    `default` does. Raises `ConfigError` for what is no duration.
    """

    priority: int = 0
    """Lower ones are dropped first, whatever the policy thinks of them."""
    pin_s: float | None = None
    """Not to be dropped for so long: what is restored and what is left, if a tier has taken it."""
    ttl_s: float | None = None
    """Worthless this long after its last use. What others have left before, for longer or for good, stays so."""
    returns_in_s: float | None = None
    """The session is expected back about then: the length of a tool call, say."""
    will_not_return: bool = False
    """The session is over: its last state is not worth keeping."""

    def __post_init__(self) -> None:
        for name in ("pin_s", "ttl_s", "returns_in_s"):
            value: float | None = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"hint {name} is {value}, not a duration")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request as a policy sees it; compared by identity."""

    chain: Chain
    """The prompt's block hashes."""
    input_tokens: int
    session: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drop these checkpoints, in this order, and take those candidates."""

    admit: tuple[PrefixId, ...]
    drop: tuple[PrefixId, ...]


class CachePolicy(ABC):
    """One tier's admission and eviction."""

    @abstractmethod
    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        """A request begins, with `match.tokens` restored; returns the lengths within the prompt to checkpoint."""

    @abstractmethod
    def finish(self, request: Request, chain: Chain, output_tokens: int, hints: Hints, now_s: float) -> tuple[int, ...]:
        """A request has ended; `chain` holds all its tokens. Returns the lengths at its end to checkpoint.

        `hints` may say more than those at its start: that it ended in a tool call, or for good.
        """

    @abstractmethod
    def propose(
        self,
        new: Sequence[Candidate],
        free_bytes: int,
        pinned: Collection[PrefixId],
        now_s: float,
        resident: TierView,
    ) -> Proposal:
        """Which of one request's new checkpoints to take, and which others must go for that.

        `free_bytes` is what is left of the tier's budget; below 0 if the budget has shrunk. With `new` empty it makes
        room alone. None of `pinned` may be dropped; if room cannot be made without, less is admitted.
        """

    @abstractmethod
    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        """Checkpoints came into the tier, shorter ones first, or left it: proposed, lost or recovered."""

    def foresee(self, resident: TierView) -> Iterable[PrefixId]:  # noqa: ARG002
        """What may go next, the likeliest first, to be copied ahead of need: a guess that changes no later decision."""
        return ()

    @abstractmethod
    def state_bytes(self) -> int:
        """About how much memory the policy's own state takes."""
