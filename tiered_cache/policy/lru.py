"""Least recently used, with checkpoints where a prompt branches off and at the end: what SGLang does for hybrid models.

Using a checkpoint uses all those before it on its path, so that a checkpoint always goes before its ancestors.
Everything new is admitted if there is any way to make room for it.
"""

# ruff: noqa: ARG002
from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

from tiered_cache.index import Candidate, Chain, Match, PrefixId, RemovalReason, TierView
from tiered_cache.policy.base import CachePolicy, Hints, Proposal, Request
from tiered_cache.policy.room import fit
from tiered_cache.prefix_tree import Trial

_ENTRY_BYTES = 160
"""An `OrderedDict` entry with its link and a boxed float."""


class LruPolicy(CachePolicy):
    """Drops what was used longest ago."""

    def __init__(self) -> None:
        self._used: OrderedDict[PrefixId, None] = OrderedDict()
        """From the least to the most recently used; descendants come before their ancestors."""

    def start(self, request: Request, match: Match, hints: Hints, now_s: float, resident: TierView) -> tuple[int, ...]:
        if match.prefix is not None and match.prefix in resident:
            self._use([match.prefix], resident)
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
        victims = iter(self._used)

        def victim(_: Trial) -> PrefixId | None:
            return next((v for v in victims if v not in pinned and v in resident), None)

        return fit(resident, new, free_bytes, pinned, victim)

    def commit(
        self,
        added: Sequence[PrefixId],
        dropped: Sequence[tuple[PrefixId, RemovalReason]],
        now_s: float,
        resident: TierView,
    ) -> None:
        for prefix, _ in dropped:
            self._used.pop(prefix, None)
        self._use([prefix for prefix in reversed(added) if prefix in resident], resident)

    def foresee(self, resident: TierView) -> Iterable[PrefixId]:
        return iter(self._used)

    def state_bytes(self) -> int:
        return sys.getsizeof(self._used) + len(self._used) * _ENTRY_BYTES

    def _use(self, deepest_first: Sequence[PrefixId], resident: TierView) -> None:
        """These, and then all before the last of them, are the most recently used now."""
        for prefix in deepest_first:
            self._used[prefix] = None
            self._used.move_to_end(prefix)
        for prefix in _ancestors(deepest_first[-1], resident) if deepest_first else ():
            self._used[prefix] = None
            self._used.move_to_end(prefix)


def _ancestors(prefix: PrefixId, resident: TierView) -> Iterator[PrefixId]:
    above = resident.ancestor(prefix)
    while above is not None:
        yield above
        above = resident.ancestor(above)
