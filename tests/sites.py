"""An object store, its catalogue and nodes in one process, without workers: what the tests of the catalogue share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from obstore.store import MemoryStore, ObjectStore
from spilling import IDENTITY, MIXED, NO_HINTS, Clock, Spilled, State, check_books, restore

from tiered_cache.cache import Grant, Hit, TieredCache, TierSlot
from tiered_cache.codecs import Mode
from tiered_cache.errors import TierError
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Tokens
from tiered_cache.policy.lru import LruPolicy
from tiered_cache.service.catalogue import Catalogue
from tiered_cache.service.claim import LOOKS, StoreClaim
from tiered_cache.service.local import InlineExecutor
from tiered_cache.service.messages import MatchReply, Prompt, RestorePlan
from tiered_cache.service.shared import SharedStore
from tiered_cache.testing.faults import FaultyTier
from tiered_cache.tiers.base import Durability
from tiered_cache.tiers.disk import DiskTier, SyncPolicy
from tiered_cache.tiers.host import HostTier
from tiered_cache.tiers.object_budget import GrantedBudget, LocalBudget
from tiered_cache.tiers.object_store import ObjectStoreTier

OBJECT = Durability.OBJECT
LOOK_S = 0.001
"""How long a look at the claims is good: nothing beside all other times."""


class Current:
    """The catalogue that there is now, as its callers see it; `down` while there is none."""

    def __init__(self) -> None:
        self.catalogue: Catalogue | None = None

    def __getattr__(self, method: str) -> Any:
        if self.catalogue is None:
            raise TierError("the catalogue is dead", retryable=True)
        return getattr(self.catalogue, method)


class Site:
    """All threads are the caller's, and time stands still until the clock is told to step."""

    def __init__(
        self,
        geometry: Geometry = MIXED,
        *,
        object_bytes: int = 1 << 20,
        host_bytes: int = 1 << 20,
        disk: Path | None = None,
        nodes: int = 2,
        policy: Callable[[], LruPolicy] = LruPolicy,
        store: ObjectStore | None = None,
        clock: Clock | None = None,
        look_s: float = LOOK_S,
        name: str = "site",
    ) -> None:
        """`store` and `clock` may be another's, too. With a `look_s` of its own nothing waits for earlier claims."""
        self.geometry = geometry
        self.clock = clock or Clock()
        self.store = store or MemoryStore()
        self.look_s = look_s
        self.name = name
        self.object_bytes = object_bytes
        self.host_bytes = host_bytes
        self.disk = disk
        self.current = Current()
        self._new_policy = policy
        self.generation = 0
        self.start_catalogue()
        self.clients: list[FaultyTier] = []
        """Each node's own way to the store."""
        self.nodes: list[TieredCache] = []
        for _ in range(nodes):
            self.start_node()

    def now_ns(self) -> int:
        return int(self.clock.now_s * 1e9)

    def client(self, budget: Any) -> ObjectStoreTier:
        return ObjectStoreTier(self.store, budget, InlineExecutor())

    def start_catalogue(self) -> Catalogue:
        """A new one, which knows nothing but what the store holds. The one before has died: its claim is waited for."""
        self.generation += 1
        self.budget = LocalBudget(self.object_bytes)
        client = self.client(self.budget)
        self.tier = FaultyTier(client, self.generation)
        self.policy = self._new_policy()
        cache = TieredCache(
            [TierSlot(self.tier, self.policy, Mode.FAST)], InlineExecutor(), lends=True, clock=self.clock
        )
        self.store_client = client
        who = {"cluster": f"{self.name} {self.generation}"}
        self.claim = StoreClaim(client, who, look_s=self.look_s, now_ns=self.now_ns, clock=self.clock)
        client.guard(self.claim)
        self.current.catalogue = Catalogue(
            cache, client, self.claim, InlineExecutor(), lease_s_max=60.0, clock=self.clock
        )
        if self.look_s == LOOK_S:
            self.clock.now_s += LOOKS * LOOK_S
            self.catalogue.maintain()
        return self.current.catalogue

    @property
    def catalogue(self) -> Catalogue:
        assert self.current.catalogue is not None
        return self.current.catalogue

    def start_node(self) -> TieredCache:
        client = FaultyTier(self.client(GrantedBudget()), 100 + len(self.clients))
        shared = SharedStore(client, self.current, clock=self.clock)
        slots = [TierSlot(HostTier(self.host_bytes), LruPolicy())] if self.host_bytes else []
        if self.disk is not None:
            tier = DiskTier(self.disk / str(len(self.nodes)), 4 * self.host_bytes, sync=SyncPolicy.NEVER)
            slots.append(TierSlot(tier, LruPolicy(), Mode.FAST))
        node = TieredCache(slots, InlineExecutor(), shared=shared, clock=self.clock)
        node.register(IDENTITY, self.geometry)
        self.clients.append(client)
        self.nodes.append(node)
        return node

    def state(self, tokens: Tokens, lineage: int = 7) -> State:
        return State(self.geometry, tokens, lineage)

    def spill(
        self, node: TieredCache, state: State, *, durability: Durability = OBJECT, private: bool = False
    ) -> Spilled:
        offer = state.offer(private=private)
        grant = node.admit(offer, durability, NO_HINTS)
        receipts = node.spill(grant, [state.export(offer, grant.keys)])
        return Spilled(grant, receipts, node.kept(offer, grant))

    def match(self, tokens: Tokens, pin_s: float = 30.0) -> MatchReply:
        """What the catalogue says of a prompt that goes on after these tokens."""
        longer = np.append(tokens, np.uint32(2_000)).astype(np.uint32)
        namespace = self.state(tokens).chain.namespace
        reply: MatchReply = self.current.match(namespace, Prompt(longer), pin_s, deadline_s=5.0)
        return reply

    def restored(
        self,
        node: TieredCache,
        tokens: Tokens,
        was_computed: Callable[[FrameKey, int, Tokens], bool] = lambda *_: True,
    ) -> int:
        """How many of these tokens come back through a node from the store; each byte is compared."""
        reply = self.match(tokens)
        if reply.plan is None:
            return 0
        try:
            for decoded in restore(node, self.geometry, as_hit(reply.plan), tokens[: reply.plan.tokens]):
                assert was_computed(decoded.key, decoded.lineage, tokens)
        finally:
            self.current.unpin(reply.plan.pin, reply.plan.generation, deadline_s=5.0)
        return reply.plan.tokens

    def objects(self) -> set[str]:
        """The frames that lie in the store, by path."""
        return {e.path for e in self.client(GrantedBudget()).list() if not e.path.endswith("/descriptor")}

    def listed(self) -> set[str]:
        """Those that the catalogue knows of."""
        return {FrameKey(*name).path() for name, _ in self.catalogue.cache._index.names("object")}  # type: ignore[arg-type]

    def check(self, *, stolen: Collection[str] = (), strays: Collection[str] = ()) -> None:
        """The catalogue's books balance, with the leases that are out and the objects that lie there under them."""
        leases = [lent.grant for lent in self.catalogue._leases.values()]
        strays = {*strays, *(key.path() for grant in leases for key in grant.keys)}
        # what is put and not committed is counted twice once it was listed, and what comes late was granted by nobody
        over = {"object"} if self.objects() - self.listed() else set()
        assert over or self.budget.usage().bytes_free >= 0
        check_books(self.catalogue.cache, open_grants=leases, over=over, stolen=stolen, strays=strays)


def as_hit(plan: RestorePlan) -> Hit:
    """A plan of the catalogue as a cache would have made it."""
    return Hit(plan.tokens, plan.frames, plan.pin, "object", 0)


def open_grants(site: Site) -> list[Grant]:
    return [lent.grant for lent in site.catalogue._leases.values()]
