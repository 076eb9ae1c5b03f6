"""`TieringActor`: one a node; owns that node's tiers. `actors.cluster` makes a Ray actor of it."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator

from actors.inline import in_local_mode
from actors.metrics import ActorMetrics
from actors.names import ClusterName
from actors.session import session_file
from tiered_cache.cache import PlannedFrame
from tiered_cache.config import TierSettings
from tiered_cache.deadline import Deadline, until
from tiered_cache.errors import MissReason
from tiered_cache.executors import DaemonExecutor
from tiered_cache.geometry import Geometry
from tiered_cache.identity import FrameKey, Identity
from tiered_cache.metrics import Sample, counter_samples, health_samples, usage_samples
from tiered_cache.policy.base import Hints
from tiered_cache.service.build import ObjectPlace, build_cache
from tiered_cache.service.messages import Bytes, MatchReply, Prompt, RestorePlan, SpillOffer, SpillResult
from tiered_cache.service.tiering import TieringService
from tiered_cache.tiers.base import Durability, TierUsage


class TieringActor:
    """Forwards `TieringPort`. A restart makes a new generation, which finds again what its disk tier holds."""

    def __init__(self, node: str, cluster: ClusterName, settings: TierSettings) -> None:
        executor = DaemonExecutor(settings.executor_threads, "tiering")
        catalogue = cluster.catalogue() if settings.object_url is not None else None
        shared = ObjectPlace(settings).shared(catalogue) if catalogue else None
        ahead = None if in_local_mode() else DaemonExecutor(1, "ahead")
        witness = session_file(f"{cluster.name}-{node}.names")
        self.cache = build_cache(settings, executor, ahead=ahead, shared=shared, witness=witness, clock=time.monotonic)
        self.tiering = TieringService(self.cache, node=node, owners=cluster.owner, catalogue=catalogue)
        self._metrics = ActorMetrics(cluster.name, self._samples)

    def register(self, identity: Identity, geometry: Geometry, *, deadline_s: float) -> bytes:
        return self.tiering.register(identity, geometry, deadline_s=deadline_s)

    def match(self, namespace: bytes, prompt: Prompt, pin_s: float, *, deadline_s: float) -> MatchReply:
        with self._metrics.timed("match"):
            return self.tiering.match(namespace, prompt, pin_s, deadline_s=deadline_s)

    def fetch(self, frames: tuple[PlannedFrame, ...], bytes_max: int, *, deadline_s: float) -> list[Bytes | MissReason]:
        with self._metrics.timed("fetch"):
            return self.tiering.fetch(frames, bytes_max, deadline_s=deadline_s)

    def spill(
        self, offer: SpillOffer, durability: Durability, hints: Hints, pin_s: float | None, *, deadline_s: float
    ) -> SpillResult:
        with self._metrics.timed("spill"):
            return self.tiering.spill(offer, durability, hints, pin_s, deadline_s=deadline_s)

    def report_bad(self, key: FrameKey, why: str, *, deadline_s: float) -> None:
        self.tiering.report_bad(key, why, deadline_s=deadline_s)

    def unpin(self, pin: int, generation: int, *, deadline_s: float) -> bool:
        return self.tiering.unpin(pin, generation, deadline_s=deadline_s)

    def keep(self, plan: RestorePlan, pin_s: float, *, deadline_s: float) -> bool:
        return self.tiering.keep(plan, pin_s, deadline_s=deadline_s)

    def use_up(self, plan: RestorePlan, by: int, again_s: float, *, deadline_s: float) -> bool:
        return self.tiering.use_up(plan, by, again_s, deadline_s=deadline_s)

    def let_go(self, tickets: tuple[FrameKey, ...], *, kept: bool = True, deadline_s: float) -> None:
        self.tiering.let_go(tickets, kept=kept, deadline_s=deadline_s)

    def generation(self, *, deadline_s: float) -> int:
        """Another one than before: it was restarted."""
        del deadline_s
        return self.tiering.generation

    def counters(self, *, deadline_s: float) -> dict[str, int]:
        """The cache's counters since this generation began."""
        del deadline_s
        return self.cache.counters()

    def usage(self, *, deadline_s: float) -> dict[str, TierUsage]:
        """The budget, and what they hold, of the tiers that answer."""
        with until(Deadline.after(deadline_s)):
            return self.cache.usage()

    def _samples(self) -> Iterator[Sample]:
        yield from counter_samples("cache", self.cache.counters())
        yield from usage_samples(self.cache.usage())
        yield from health_samples(self.cache.health())

    def pins(self, *, deadline_s: float) -> int:
        """How many prefixes are kept for somebody."""
        del deadline_s
        return self.cache.pins()

    def peak_rss_bytes(self, *, deadline_s: float) -> int:
        """The most memory that this process has held."""
        del deadline_s
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self, *, deadline_s: float) -> None:
        """Let go of the tiers, so that their budget is exact for who opens them next."""
        del deadline_s
        self.cache.close()
