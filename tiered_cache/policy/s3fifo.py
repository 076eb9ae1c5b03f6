"""S3-FIFO (Yang et al., SOSP 2023) over checkpoints: three queues keep what is used once out of the way.

New checkpoints enter a small queue of a tenth of the room; what is used again before it leaves moves to the main queue,
else only its name is remembered, and if it comes back it enters the main queue at once. The main queue gives what was
used since another turn. Checkpoints are taken where LRU takes them.
"""

# ruff: noqa: ARG002
from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from tiered_cache.index import Candidate, Chain, Match, PrefixId, RemovalReason, TierView
from tiered_cache.policy.base import CachePolicy, Hints, Proposal, Request
from tiered_cache.policy.room import fit
from tiered_cache.prefix_tree import Trial

SMALL_SHARE = 0.1
USES_MAX = 3
GHOSTS_MAX = 4096
_ENTRY_BYTES = 240


class S3FifoPolicy(CachePolicy):
    """Three FIFO queues; sizes are the bytes that a checkpoint brought when it came."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - to sample, reproducibly
        self._small: OrderedDict[PrefixId, int] = OrderedDict()
        self._main: OrderedDict[PrefixId, int] = OrderedDict()
        self._small_bytes = 0
        self._uses: dict[PrefixId, int] = {}
        self._ghosts: OrderedDict[PrefixId, None] = OrderedDict()
        self._offered: dict[PrefixId, int] = {}

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        if match.prefix in self._uses:
            self._uses[match.prefix] = min(USES_MAX, self._uses[match.prefix] + 1)
        return (match.branch_tokens,) if match.branch_tokens > match.tokens else ()

    def finish(self, request: Request, chain: Chain, output_tokens: int, hints: Hints, now_s: float) -> tuple[int, ...]:
        return (len(chain),) if len(chain) else ()

    def propose(
        self,
        new: Sequence[Candidate],
        free_bytes: int,
        pinned: Collection[PrefixId],
        now_s: float,
        resident: TierView,
    ) -> Proposal:
        self._offered = {candidate.prefix: candidate.marginal_bytes for candidate in new}
        room = free_bytes + resident.stored_bytes

        leaving: list[tuple[OrderedDict[PrefixId, int], PrefixId, int]] = []
        turns = 2 * len(self._uses) * (USES_MAX + 1)

        def victim(trial: Trial) -> PrefixId | None:
            nonlocal turns
            while turns:
                turns -= 1
                small = self._small_bytes > SMALL_SHARE * room or not self._main
                queue = self._small if small and self._small else self._main
                if not queue:
                    return None
                prefix, size = queue.popitem(last=False)
                uses = self._uses[prefix]
                if queue is self._small:
                    self._small_bytes -= size
                if trial.can_drop(prefix) and uses <= (queue is self._small):
                    leaving.append((queue, prefix, size))
                    return prefix
                self._uses[prefix] = max(0, uses - 1) if queue is self._main else 0
                self._main[prefix] = size
            return None

        proposal = fit(resident, new, free_bytes, pinned, victim, self._rng)
        for queue, prefix, size in reversed(leaving):  # `commit` tells which of them really go
            queue[prefix] = size
            queue.move_to_end(prefix, last=False)
            self._small_bytes += size if queue is self._small else 0
        return proposal

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        for prefix, _ in dropped:
            self._forget(prefix)
        for prefix in added:
            if prefix in self._uses:
                continue
            size = self._offered.get(prefix, 0)
            self._uses[prefix] = 0
            if prefix in self._ghosts:
                del self._ghosts[prefix]
                self._main[prefix] = size
            else:
                self._small[prefix] = size
                self._small_bytes += size

    def _forget(self, prefix: PrefixId) -> None:
        self._uses.pop(prefix, None)
        self._main.pop(prefix, None)
        size = self._small.pop(prefix, None)
        if size is not None:
            self._small_bytes -= size
            self._ghosts[prefix] = None
            if len(self._ghosts) > GHOSTS_MAX:
                self._ghosts.popitem(last=False)

    def foresee(self, resident: TierView) -> Iterable[PrefixId]:
        return itertools.chain(self._small, self._main)

    def state_bytes(self) -> int:
        return _ENTRY_BYTES * (len(self._uses) + len(self._ghosts))
