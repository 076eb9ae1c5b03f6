"""How long checkpoints stay by their callers' word, the same whatever the policy: pins and times to live.

Both are known for as long as the process lives, and are checked when something is looked up or offered.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tiered_cache.index import Chain, Match, PrefixId, PrefixIndex
from tiered_cache.policy.base import Hints

LIFETIMES_MAX = 1 << 16
"""How many pins, and how many times to live, are remembered; the oldest are forgotten."""
PINNED_RETRY_S = 1.0
"""How much longer what somebody is reading may live."""


@dataclass(slots=True)
class _Life:
    """A checkpoint's time to live. `queued_s` is when it is looked at next, no later than `expires_s`."""

    ttl_s: float
    expires_s: float
    queued_s: float


class Lifetimes:
    """The hints of callers about the checkpoints of one index; all times are on the clock of `now_s`."""

    def __init__(self, index: PrefixIndex, tiers: Sequence[str]) -> None:
        self._index = index
        self._views = tuple(index.view(tier) for tier in tiers)
        self._pins: OrderedDict[PrefixId, tuple[float, int]] = OrderedDict()
        self._lives: OrderedDict[PrefixId, _Life] = OrderedDict()
        self._queue: list[tuple[float, int, PrefixId]] = []
        self._numbers = itertools.count()

    def restored(self, chain: Chain, match: Match, hints: Hints, now_s: float) -> None:
        """A checkpoint was found and is used: its time to live begins again."""
        self._pin(match.prefix, hints, now_s)
        for prefix in self._index.ends(chain, match.tokens, match.prefix) if self._lives else ():
            self._use(prefix, hints.ttl_s, now_s)

    def left(self, chain: Chain, stops: Sequence[int], hints: Hints, now_s: float) -> None:
        """Checkpoints are offered at these lengths. What was there before, for longer or for good, stays so."""
        ends: dict[PrefixId, None] = {}
        for tokens in reversed(stops):
            prefix = chain.prefix_hash(tokens)
            self._pin(prefix, hints, now_s)
            if self._lives or hints.ttl_s is not None:
                ends.update(dict.fromkeys(self._index.ends(chain, tokens, prefix)))
        for prefix in ends:
            if hints.ttl_s is None:
                self._lives.pop(prefix, None)
            elif any(prefix in view for view in self._views):
                self._use(prefix, hints.ttl_s, now_s)
            else:
                self._lives.pop(prefix, None)
                self._live(prefix, hints.ttl_s, now_s)

    def expired(self, now_s: float) -> list[PrefixId]:
        """What has outlived its time and is not pinned, longer ones first; it is forgotten here, and to be dropped."""
        found = []
        while self._queue and self._queue[0][0] < now_s:
            queued_s, _, prefix = heapq.heappop(self._queue)
            life = self._lives.get(prefix)
            if life is None or life.queued_s != queued_s:
                continue
            if prefix in self._index.pinned(now_s):
                life.expires_s = max(life.expires_s, now_s + PINNED_RETRY_S)
            if life.expires_s < now_s:
                del self._lives[prefix]
                found.append(prefix)
            else:
                self._look_at(prefix, life)
        return found

    def _use(self, prefix: PrefixId, ttl_s: float | None, now_s: float) -> None:
        life = self._lives.get(prefix)
        if life is not None:
            self._live(prefix, life.ttl_s if ttl_s is None else ttl_s, now_s)

    def _live(self, prefix: PrefixId, ttl_s: float, now_s: float) -> None:
        """So long from now, if that is not sooner than it would be anyway."""
        expires_s = now_s + ttl_s
        life = self._lives.pop(prefix, None)
        if life is None:
            life = _Life(ttl_s, expires_s, expires_s)
            self._look_at(prefix, life)
        life.ttl_s, life.expires_s = ttl_s, max(life.expires_s, expires_s)
        self._lives[prefix] = life
        if len(self._lives) > LIFETIMES_MAX:
            self._lives.popitem(last=False)

    def _look_at(self, prefix: PrefixId, life: _Life) -> None:
        life.queued_s = life.expires_s
        heapq.heappush(self._queue, (life.queued_s, next(self._numbers), prefix))

    def _pin(self, prefix: PrefixId, hints: Hints, now_s: float) -> None:
        """Pin in the index, once a checkpoint; a pin that ends later stays."""
        if hints.pin_s is None:
            return
        until_s, old = self._pins.get(prefix, (0.0, None))
        if old is not None and until_s >= now_s + hints.pin_s:
            return
        self._pins[prefix] = now_s + hints.pin_s, self._index.pin(prefix, now_s + hints.pin_s)
        self._pins.move_to_end(prefix)
        if old is not None:
            self._index.unpin(old)
        if len(self._pins) > LIFETIMES_MAX:
            _, (_, oldest) = self._pins.popitem(last=False)
            self._index.unpin(oldest)
