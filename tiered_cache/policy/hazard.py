"""How soon will a prefix be used again: a discrete hazard model, learned online, and what it is worth to keep one.

Age is cut into buckets, two an octave. The chance that a prefix whose age is in bucket b is used within b is `sigmoid`
of a sum of weights: one for its kind and b, one for its kind and each feature, and one for its kind, each feature and
three buckets at a time (Cox's hazards in discrete time, with interactions). Every weight has a mean and a variance,
and each bucket that is survived, and each use, is one observation of a Kalman filter with a diagonal covariance: what
has been seen often moves little, what is new moves fast. A little noise on the variances forgets old traffic.

The worth of keeping is the best ratio, over all times to stop at, of the expected uses to the expected time held: the
Gittins index of a job whose size is the time to its next use. Of the bucket that an age is in, only what is left of it
counts: the worths of all that are in one bucket would be the same otherwise, and which of them goes would be chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BUCKETS = 52
FIRST_BUCKET_S = 0.25
OBSERVATIONS_MAX = 64
"""How many observations may share one step of the filter."""
LEFT_MIN = 0.02
"""At least so much of a bucket counts as still to come, lest a worth be 0 / 0."""
_GROUP_OF: Ints = np.arange(BUCKETS) // 3
_LOGIT = -3.0
_VARIANCES = (1.0, 0.3, 0.2)
"""At the start: by bucket, by feature, by feature and three buckets."""
_NOISE = 1e-4

_ENDS_S: Floats = FIRST_BUCKET_S * 2.0 ** (np.arange(BUCKETS) / 2)
_WIDTHS_S: Floats = np.diff(_ENDS_S, prepend=0.0)


def bucket_of(age_s: Floats) -> Ints:
    """The bucket of each age: `[0, 0.25]`, then two an octave. Shape [n]."""
    octaves = np.log2(np.maximum(age_s, FIRST_BUCKET_S) / FIRST_BUCKET_S)
    buckets = np.where(age_s > FIRST_BUCKET_S, 1 + np.floor(2 * octaves), 0)
    return np.asarray(np.minimum(BUCKETS - 1, buckets).astype(np.int64))


class HazardModel:
    """Weights for so many kinds of prefixes, and one feature of each of the given sizes."""

    def __init__(self, kinds: int, feature_sizes: Sequence[int]) -> None:
        values = sum(feature_sizes)
        self.offsets: Ints = np.cumsum([0, *feature_sizes[:-1]])
        """What to add to each feature's value: `features` below are indices over all values of all features."""
        shapes = ((kinds, BUCKETS), (kinds, values), (kinds, values, int(_GROUP_OF[-1]) + 1))
        self._weights = [np.zeros(shape) for shape in shapes]
        self._weights[0] += _LOGIT
        self._variances = [np.full(shape, start) for shape, start in zip(shapes, _VARIANCES, strict=True)]

    def hazards(self, kinds: Ints, features: Ints) -> Floats:
        """The hazard of each bucket, shape [n, BUCKETS], for kinds of shape [n] and features [n, features]."""
        base, main, cross = self._weights
        logits = base[kinds] + main[kinds[:, None], features].sum(axis=1)[:, None]
        logits += cross[kinds[:, None], features].sum(axis=1)[:, _GROUP_OF]
        return np.asarray(1.0 / (1.0 + np.exp(-logits)))

    def learn(self, kinds: Ints, features: Ints, buckets: Ints, used: Floats) -> None:
        """What happened in these buckets to prefixes of these kinds and features: 1.0 used, 0.0 survived."""
        for start in range(0, len(kinds), OBSERVATIONS_MAX):
            part = slice(start, start + OBSERVATIONS_MAX)
            self._step(kinds[part], features[part], buckets[part], used[part])

    def _step(self, kinds: Ints, features: Ints, buckets: Ints, used: Floats) -> None:
        wide = np.broadcast_to(kinds[:, None], features.shape)
        groups = np.broadcast_to(_GROUP_OF[buckets][:, None], features.shape)
        places: tuple[tuple[Ints, ...], ...] = ((kinds[:, None], buckets[:, None]), (wide, features))
        places = (*places, (wide, features, groups))
        logits = sum((w[at].sum(axis=1) for w, at in zip(self._weights, places, strict=True)), np.zeros(len(kinds)))
        spread = sum((v[at].sum(axis=1) for v, at in zip(self._variances, places, strict=True)), np.zeros(len(kinds)))
        chance = 1.0 / (1.0 + np.exp(-logits))
        gain = 1.0 / (1.0 + chance * (1.0 - chance) * spread)
        pull, weight = gain * (chance - used), gain * chance * (1.0 - chance)
        for weights, variances, at in zip(self._weights, self._variances, places, strict=True):
            flat = np.ravel_multi_index(at, weights.shape)
            touched, inverse = np.unique(flat, return_inverse=True)
            inverse = inverse.reshape(-1)
            pulls = np.bincount(inverse, np.repeat(pull, flat.shape[1]))
            seen = np.bincount(inverse, np.repeat(weight, flat.shape[1]))
            mean, variance = weights.reshape(-1), variances.reshape(-1)
            narrowed = 1.0 / (1.0 / variance[touched] + seen)
            mean[touched] -= narrowed * pulls
            variance[touched] = narrowed + _NOISE * seen

    def state_bytes(self) -> int:
        return sum(a.nbytes for a in (*self._weights, *self._variances))


def worth(hazards: Floats, ages_s: Floats) -> Floats:
    """The Gittins index in uses a second, shape [n], for hazards [n, BUCKETS] and ages [n]; continuous in the age."""
    now, rows = bucket_of(ages_s), np.arange(len(ages_s))
    left = np.clip((_ENDS_S[now] - ages_s) / _WIDTHS_S[now], LEFT_MIN, 1.0)
    ahead = np.arange(BUCKETS) >= now[:, None]
    hazards = np.where(ahead, hazards, 0.0)
    hazards[rows, now] = 1.0 - (1.0 - hazards[rows, now]) ** left
    widths_s = np.where(ahead, _WIDTHS_S, 0.0)
    widths_s[rows, now] *= left
    alive = np.ones_like(hazards)
    np.cumprod(1.0 - hazards[:, :-1], axis=1, out=alive[:, 1:])
    uses = np.cumsum(alive * hazards, axis=1)
    time_s = np.cumsum(alive * widths_s * (1.0 - hazards / 2), axis=1)
    return np.asarray((uses / np.maximum(time_s, 1e-12)).max(axis=1))
