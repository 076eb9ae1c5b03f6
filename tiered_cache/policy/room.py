"""How every policy makes room: drop one victim after another until what is taken fits, and give up in one way."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from tiered_cache.index import Candidate, PrefixId, TierView
from tiered_cache.policy.base import Proposal
from tiered_cache.prefix_tree import Trial

UNKNOWN_SAMPLE = 64
"""Among so many is a victim looked for that the policy does not know."""


def fit(
    resident: TierView,
    new: Sequence[Candidate],
    free_bytes: int,
    pinned: Collection[PrefixId],
    victim: Callable[[Trial], PrefixId | None],
    rng: random.Random | None = None,
) -> Proposal:
    """Take the candidates and drop `victim(trial)` until they fit; the victim may be a candidate.

    If the policy knows no victim any more, with `rng` any checkpoint goes, such as a block end that its own victim has
    bared; then candidates go, the deepest first; and if none is left, nothing is dropped for them.
    """
    trial = resident.trial(new, pinned)
    while trial.candidates and trial.needed_bytes > free_bytes + resident.stored_bytes:
        trial.drop(next(reversed(trial.candidates)))  # can never fit
    while trial.needed_bytes > free_bytes:
        chosen = trial.bared() if rng is not None else None
        if chosen is None:
            chosen = victim(trial)
        if chosen is None and rng is not None:
            chosen = next((p for p in trial.sample(UNKNOWN_SAMPLE, rng) if p not in trial.candidates), None)
        if chosen is None:
            break
        trial.drop(chosen)
    while trial.needed_bytes > free_bytes and trial.candidates:
        trial.drop(next(reversed(trial.candidates)))
    if new and not trial.candidates and free_bytes >= 0:
        return Proposal((), ())  # nothing is gained by dropping others
    return Proposal(tuple(trial.candidates), tuple(trial.dropped))
