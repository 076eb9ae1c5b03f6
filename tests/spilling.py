"""Sequences without an engine, whose state is a pure function of their tokens: what the tests of the cache share.

What a frame must hold follows from the namespace, the tokens up to its end, the part, the rank and the computation,
so that any wrong byte that is served is seen.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from tiered_cache import frame
from tiered_cache.cache import Grant, Hit, Kept, LookUp, Offer, Receipt, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.errors import IdentityError, MissReason
from tiered_cache.geometry import Geometry, Part, PartKind
from tiered_cache.identity import CHECKPOINT, FrameKey, Identity, PrefixChain, Tokens, namespace_of
from tiered_cache.index import FrameName, RemovalReason
from tiered_cache.level import key_of
from tiered_cache.policy.base import Hints
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.testing.faults import FaultyTier
from tiered_cache.tiers.base import (
    Durability,
    GetAnswer,
    GetRequest,
    PutItem,
    PutOutcome,
    Reservation,
    Tier,
)
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.host import HostTier

_P = ParamSpec("_P")
_T = TypeVar("_T")
Arrays = Mapping[str, npt.NDArray[np.generic]]

BLOCK = 4
IDENTITY = Identity(b"w" * 32, "none", "1")
NO_HINTS = Hints()
LINEAGE = 7

_K = Part("k", PartKind.ROWS, "bfloat16", (24,), layers=(0, 1))
_VALID = Part("valid", PartKind.ROWS, "bool", (3,))
_STATE = Part("state", PartKind.CARRY, "float32", (5, 30))
_HISTORY = Part("history", PartKind.CARRY, "uint32", (3,))
_NEAR = Part("near", PartKind.WINDOW, "float16", (40,), window_tokens=6)

MIXED = Geometry((_K, _VALID, _STATE, _HISTORY), BLOCK)
ROWS = Geometry((_K, _VALID), BLOCK)
WINDOW = Geometry((_K, _NEAR, _STATE), BLOCK)
WINDOW_ROWS = Geometry((_K, _NEAR), BLOCK)
SHARDED = Geometry((_K, _STATE), BLOCK, shards=2)
GEOMETRIES = {"mixed": MIXED, "rows": ROWS, "window": WINDOW, "window-rows": WINDOW_ROWS, "sharded": SHARDED}


class Clock:
    """Stands still until it is told to step."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class SteppedExecutor(Executor):
    """Does what was submitted when a test says so, on the test's thread."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], object]] = []

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()

        def job() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))

        self._jobs.append(job)
        return future

    def step(self) -> int:
        """How many jobs that were."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()
        return len(jobs)


def some_tokens(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.uint32)


def chain_of(geometry: Geometry, tokens: Tokens, identity: Identity = IDENTITY) -> PrefixChain:
    return PrefixChain(namespace_of(identity.digest(), geometry.fingerprint()), geometry.block_tokens, tokens)


def state_of(geometry: Geometry, namespace: bytes, tokens: Tokens, group: str, rank: int, lineage: int) -> Arrays:
    """What the frame of `group` that ends with these tokens holds, if computation `lineage` has made it."""
    return _state(geometry, namespace, tokens.tobytes(), group, rank, lineage)


@functools.lru_cache(maxsize=4096)
def _state(geometry: Geometry, namespace: bytes, tokens: bytes, group: str, rank: int, lineage: int) -> Arrays:
    arrays = {}
    for name, spec in geometry.arrays(group, len(tokens) // 4).items():
        seed = hashlib.sha256(b"%b %b %b %d %d" % (namespace, tokens, name.encode(), rank, lineage)).digest()
        words = np.random.default_rng(list(seed)).integers(0, 2, spec.bytes, dtype=np.uint8)
        words = words if spec.dtype == "bool" else words * np.uint8(seed[0] | 1)
        arrays[name] = words.view(spec.storage).reshape(spec.shape)
        arrays[name].flags.writeable = False
    return arrays


class State(NamedTuple):
    """Tokens, and which computation each block, and what comes after the last one, is of."""

    geometry: Geometry
    tokens: Tokens
    lineage: int = LINEAGE
    lineages: tuple[int, ...] | None = None
    rank: int = 0
    identity: Identity = IDENTITY

    @property
    def chain(self) -> PrefixChain:
        return chain_of(self.geometry, self.tokens, self.identity)

    def offer(self, *stops: int, private: bool = False, request: int | None = None) -> Offer:
        """Checkpoints at these lengths, at the end if none is given."""
        chain = self.chain
        return Offer(
            chain.namespace,
            chain.block_tokens,
            self.rank,
            tuple(chain.block_hashes()),
            tuple((n, chain.prefix_hash(n)) for n in stops or (len(chain),)),
            self.lineages or (self.lineage,) * chain.blocks,
            self.lineage,
            private,
            request,
        )

    def export(self, offer: Offer, keys: Sequence[FrameKey]) -> dict[FrameKey, Arrays]:
        return {
            key: state_of(
                self.geometry,
                key.namespace,
                self.tokens[: key.tokens],
                key.group,
                key.rank,
                offer.lineage_of(key.group, key.tokens),
            )
            for key in keys
        }


class Spilled(NamedTuple):
    """What became of an offer."""

    grant: Grant
    receipts: list[Receipt]
    kept: list[Kept]


def spill(
    cache: TieredCache,
    state: State,
    *stops: int,
    durability: Durability = Durability.HOST,
    hints: Hints = NO_HINTS,
    private: bool = False,
    request: int | None = None,
) -> Spilled:
    """Offer checkpoints at these lengths (the end if none is given), bring what is asked for, and ask what is kept."""
    offer = state.offer(*stops, private=private, request=request)
    grant = cache.admit(offer, durability, hints)
    receipts = cache.spill(grant, [state.export(offer, grant.keys)])
    return Spilled(grant, receipts, cache.kept(offer, grant))


def match(cache: TieredCache, geometry: Geometry, tokens: Tokens, pin_s: float | None = None) -> LookUp:
    return cache.match(chain_of(geometry, tokens), NO_HINTS, pin_s=pin_s)


def expected_frames(geometry: Geometry, tokens: int) -> set[tuple[str, int, int]]:
    """(group, tokens, rank) of all that a restore to so many tokens needs."""
    size = geometry.block_tokens
    needed = {
        (group.name, (block + 1) * size)
        for group in geometry.block_groups
        for block in group.blocks_needed(tokens, size)
    }
    if geometry.needs_checkpoint(tokens):
        needed.add((CHECKPOINT, tokens))
    return {(group, end, rank) for group, end in needed for rank in range(geometry.shards)}


class Decoded(NamedTuple):
    """One frame of a restore."""

    key: FrameKey
    lineage: int


def restore(
    cache: TieredCache,
    geometry: Geometry,
    hit: Hit,
    tokens: Tokens,
    *,
    own: Offer | None = None,
    bytes_max: int = 5000,
    identity: Identity = IDENTITY,
) -> list[Decoded]:
    """Fetch and decode all frames of a hit, and compare them; raises what `frame.decode` raises.

    Of a suspended sequence (`own`), each must hold what that very sequence had; else, what some computation of these
    tokens has made.
    """
    ranks = range(geometry.shards) if own is None else [own.rank]
    found = sorted((f.key.group, f.key.tokens, f.key.rank) for f in hit.frames)
    assert found == sorted(name for name in expected_frames(geometry, hit.tokens) if name[2] in ranks)
    keys = [planned.key for planned in hit.frames]
    lineages = [planned.lineage for planned in hit.frames]
    decoded: list[Decoded] = []
    while len(decoded) < len(keys):
        done = len(decoded)
        bodies = cache.fetch(keys[done:], bytes_max, lineages[done:])
        assert bodies
        for key, body in zip(keys[done:], bodies, strict=False):
            assert not isinstance(body, MissReason), f"{key.path()} is {body}"
            computation = own.lineage_of(key.group, key.tokens) if own else None
            decoded.append(decode(geometry, key, body, tokens, computation, identity, lineages[len(decoded)]))
    return decoded


def decode(
    geometry: Geometry,
    key: FrameKey,
    body: frame.Buffer,
    tokens: Tokens,
    computation: int | None = None,
    identity: Identity = IDENTITY,
    lineage: int = 0,
) -> Decoded:
    """One frame, compared with what this computation of these tokens makes, by default the one that it says itself.

    Raises `IdentityError`, as a reader must, for the frame of another lineage than the plan has said; 0: any.
    """
    assert key == chain_of(geometry, tokens, identity).key(key.group, key.tokens, key.rank, key.private)
    found = frame.decode(body, key=key, identity_digest=identity.digest(), geometry=geometry)
    if lineage not in {0, found.lineage}:
        raise IdentityError(f"a frame of lineage {found.lineage}, not {lineage}", key.path())
    made_by = found.lineage if computation is None else computation
    wanted = state_of(geometry, key.namespace, tokens[: key.tokens], key.group, key.rank, made_by)
    for name, array in wanted.items():
        assert found.arrays[name].tobytes() == array.tobytes(), f"{name} of {key.path()}"
    return Decoded(key, found.lineage)


def open_host(bytes_max: int = 1 << 20) -> HostTier:
    return HostTier(bytes_max)


def open_disk(directory: Path, bytes_max: int = 8 << 20, sync: SyncPolicy = SyncPolicy.NEVER) -> DiskTier:
    return DiskTier(directory, bytes_max, sync=sync, grace_s=0.0)


@contextmanager
def node(
    *tiers: Tier,
    clock: Clock | None = None,
    geometries: Iterable[Geometry] = (MIXED,),
    checked: bool = True,
    ahead: Executor | None = None,
) -> Iterator[TieredCache]:
    """A cache over these tiers, as a node starts it; its books are checked at the end."""
    with ThreadPoolExecutor(2) as executor:
        slots = [
            TierSlot(tier, LruPolicy(), Mode.RAW if tier.durability is Durability.HOST else Mode.FAST) for tier in tiers
        ]
        cache = TieredCache(slots, executor, ahead=ahead, clock=clock or Clock())
        try:
            cache.recover()
            for geometry in geometries:
                cache.register(IDENTITY, geometry)
            yield cache
            if checked:
                check_books(cache)
                forget_everything(cache)
                check_books(cache)
        finally:
            cache.close()


def held(cache: TieredCache, tier: str) -> dict[FrameName, int]:
    """What the index lists in a tier."""
    return dict(cache._index.names(tier))


def check_books(
    cache: TieredCache,
    *,
    open_grants: Sequence[Grant] = (),
    over: Collection[str] = (),
    stolen: Collection[str] = (),
    strays: Collection[str] = (),
) -> None:
    """Between calls: index, policy, counters and tier agree; nothing is reserved but for open grants, or left behind.

    `over`: the tiers whose limit was lowered, and may be exceeded. `stolen`: paths of frames that went behind the
    cache's back; `strays`: of those that may have come so.
    """
    counters = cache.counters()
    assert counters.get("lookups", 0) == counters.get("hits", 0) + total(counters, "misses.")
    assert counters.get("hits", 0) == total(counters, "hits.")
    for level in cache._levels:
        name, usage = level.name, level.tier.usage()
        listed = held(cache, name)
        assert cache._index.unsupported(name) == []
        came = counters.get(f"frames.{name}.put", 0) + counters.get(f"frames.{name}.found", 0)
        assert came * 2 - total(counters, f"frames.{name}.") == len(listed)
        came = counters.get(f"bytes.{name}.put", 0) + counters.get(f"bytes.{name}.found", 0)
        assert came * 2 - total(counters, f"bytes.{name}.") == sum(listed.values())
        assert isinstance(level.policy, LruPolicy)
        assert set(level.policy._used) == set(level.view)
        targets = [target for grant in open_grants for target in grant.targets if target.level is level]
        assert usage.bytes_reserved == sum(target.room.bytes for target in targets)
        assert name in over or usage.bytes_free >= 0
        assert not level._busy
        frames = {entry.path: entry.bytes for entry in level.tier.list() if is_known(cache, entry.path)}
        doomed = {key_of(name).path() for name in level._doomed}
        listed_paths = {key_of(name).path(): size for name, size in listed.items()}
        staged = {key_of(name).path() for name in level.staged}
        assert level.staging_bytes == 0
        assert level.staged_bytes == sum(level.tier.footprint(found.bytes) for found in level.staged.values())
        assert not staged & (doomed | listed_paths.keys())
        assert staged <= frames.keys() | set(stolen)
        there = frames.keys() - doomed - staged
        assert there - set(strays) <= listed_paths.keys()
        assert listed_paths.keys() - frames.keys() <= set(stolen)
        unchanged = (there & listed_paths.keys()) - set(stolen)
        assert all(level.tier.footprint(frames[path]) == listed_paths[path] for path in unchanged)


def is_known(cache: TieredCache, path: str) -> bool:
    """Whether this is the name of a frame of a namespace that the cache knows."""
    try:
        return cache.geometry_of(FrameKey.parse(path).namespace) is not None
    except IdentityError:
        return False


def total(counters: Mapping[str, int], prefix: str) -> int:
    return sum(count for name, count in counters.items() if name.startswith(prefix))


class LyingTier(FaultyTier):
    """Says that it has written what it was given, and writes one bit of rows otherwise."""

    lies = True

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        bodies = [bytearray(b"".join(item.views())) for item in items]
        for item, body in zip(items, bodies, strict=True):
            body[-1] ^= self.lies and "-rows-4-" in item.path
        return super().put([PutItem(item.path, [b]) for item, b in zip(items, bodies, strict=True)], reservation)


class HookedTier(HostTier):
    """Host memory that calls `before[call]` and `after[call]`, once each, around a call."""

    def __init__(self, bytes_max: int = 1 << 20) -> None:
        super().__init__(bytes_max)
        self.before: dict[str, Callable[[], object]] = {}
        self.after: dict[str, Callable[[], object]] = {}
        self.asked: list[str] = []
        """The paths that `get` was asked for."""

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        self.asked += [request.path for request in requests]
        self.before.pop("get", _nothing)()
        answers = super().get(requests)
        self.after.pop("get", _nothing)()
        return answers

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        self.before.pop("put", _nothing)()
        outcomes = super().put(items, reservation)
        self.after.pop("put", _nothing)()
        return outcomes

    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        self.before.pop("delete", _nothing)()
        there = super().delete(paths)
        self.after.pop("delete", _nothing)()
        return there


def _nothing() -> None:
    pass


def forget_everything(cache: TieredCache) -> None:
    """Drop all that there is; whatever is still known then has leaked."""
    for pin in list(cache._pins):
        cache.unpin(pin)
    for pin in list(cache._index._pins):  # those of hints
        cache._index.unpin(pin)
    for level in reversed(cache._levels):
        others = [entry.bytes for entry in level.tier.list() if not is_known(cache, entry.path)]
        others += [entry.bytes for entry in level.tier.quarantined()]
        cache.trim(level.name, sum(map(level.tier.footprint, others)))
        level.drop((prefix, RemovalReason.DISCARDED) for prefix in reversed(list(level.view)))
        level.unstage(list(level.staged))
        level.tidy()
    tree = cache._index._tree
    assert {node.depth for node in tree.nodes.values()} <= {0}
    assert not tree.checkpoints
    assert not cache._left
    assert not any(is_known(cache, entry.path) for level in cache._levels for entry in level.tier.list())
