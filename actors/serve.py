"""A Ray Serve application over one cluster of workers and tiers: prompts of token ids in, the ids that follow out.

    serve run actors.serve:application engine=transformers:DIR workers=2 host_bytes=8GiB

POST {"tokens": [...], "max_tokens": 16, "session": "..."} answers {"tokens": [...], "restored_tokens": n}. A
conversation's next turn is sent with all of its tokens; what was kept of it is restored on whichever worker is free,
and a tier that fails costs time, never the answer. Needs the `serve` extra; `deploy/kuberay/rayservice.yaml` runs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

from actors.cluster import RayCluster
from actors.sequence import OwnerMethods
from tiered_cache.config import ClusterSettings, TierSettings, WorkerSettings, parse_size
from tiered_cache.deadline import Deadline
from tiered_cache.errors import CapacityError, ConfigError, DeadlineError, TieredCacheError
from tiered_cache.policy.base import Hints
from tiered_cache.service.build import build_engine
from tiered_cache.service.messages import LeaseRef, Prompt, SequenceRef, SpillOffer, TieringPort
from tiered_cache.service.owner import SequenceOwner
from tiered_cache.tiers.base import Durability

DEADLINE_S = 120.0
"""How long a request may take, and after it the keeping of its state."""
TOKENS_MAX = 1 << 20
SPILLS_AT_ONCE = 4
_SIZES = ("host_bytes", "disk_bytes", "object_bytes")
_WORKER = ("engine", "block_tokens", "num_gpus", "device")
_STATUS = ((CapacityError, 503), (DeadlineError, 504), (ValueError, 400))
"""The first row whose class fits decides; else it is 500."""

_log = logging.getLogger(__name__)


class Completed(NamedTuple):
    """What followed a prompt, and the sequence that now holds both."""

    source: SequenceRef
    offer: SpillOffer
    tokens: list[int]


class CompletionWorker(OwnerMethods):
    """A worker with an engine that the settings name, which also decodes."""

    def __init__(self, name: str, node: str, tiering: Callable[[str], TieringPort], settings: WorkerSettings) -> None:
        self.engine = build_engine(settings)
        self.owner = SequenceOwner(self.engine, name=name, node=node, tiering=tiering)

    def complete(
        self, place: SequenceRef | LeaseRef, prompt: Prompt, take_at: tuple[int, ...], count: int, *, deadline_s: float
    ) -> Completed:
        """Compute what is left of the prompt, and decode `count` tokens. After an error the sequence is released."""
        deadline = Deadline.after(deadline_s)
        source = self.owner.run(place, prompt, take_at, deadline_s=deadline_s).source
        tokens: list[int] = []
        try:
            while len(tokens) < count:
                deadline.left_s("complete")
                with self.owner.using(source) as handle:
                    tokens.append(self.engine.next_token(handle))
                self.owner.extend(source, np.array(tokens[-1:], dtype=np.uint32))
            return Completed(source, self.owner.offer(source), tokens)
        except BaseException:
            self.owner.release(source, deadline_s=DEADLINE_S)
            raise


@serve.deployment(max_ongoing_requests=64, ray_actor_options={"num_cpus": 0})
class Completions:
    """Answers prompts, which the workers compute. They outlive a replica: the next one finds what they hold."""

    def __init__(self, settings: ClusterSettings) -> None:
        try:
            self._cluster = RayCluster.start(settings, worker=CompletionWorker, detached=True)
        except ConfigError:  # another replica was faster, or this one's predecessor
            self._cluster = RayCluster.connect(settings.name)
        self._spills = ThreadPoolExecutor(SPILLS_AT_ONCE)

    async def __call__(self, request: Request) -> JSONResponse:
        try:
            prompt, count = _asked(await request.json())
            return JSONResponse(await asyncio.to_thread(self.complete, prompt, count))
        except (TieredCacheError, ValueError) as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
            return JSONResponse({"error": str(error)}, status)

    def complete(self, prompt: Prompt, count: int) -> dict[str, object]:
        """Place, compute, decode; what is worth keeping is kept after the answer."""
        cluster, deadline = self._cluster, Deadline.after(DEADLINE_S)
        placed = cluster.router.place(
            cluster.namespace, prompt, len(prompt.tokens) + count, deadline_s=deadline.left_s("place")
        )
        place = placed.restored.source if placed.restored else placed.lease
        worker: Any = cluster.workers[placed.owner]
        done: Completed = worker.call(
            Completed, "complete", place, prompt, placed.take_at, count, deadline_s=deadline.left_s("complete")
        )
        self._spills.submit(self._keep, placed.owner, placed.node, done)
        return {"tokens": done.tokens, "restored_tokens": placed.restored_tokens}

    def _keep(self, owner: str, node: str, done: Completed) -> None:
        try:
            self._cluster.tierings[node].spill(done.offer, Durability.HOST, Hints(), None, deadline_s=DEADLINE_S)
        except TieredCacheError as error:  # the next turn is computed
            _log.warning("an answer's state was not kept: %s", error.message)
        finally:
            self._cluster.workers[owner].release(done.source, deadline_s=DEADLINE_S)


def _asked(fields: object) -> tuple[Prompt, int]:
    """A request's prompt and how many tokens are to follow. Raises `ValueError` for what is none."""
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - it is data
    tokens, count, session = fields.get("tokens"), fields.get("max_tokens", 16), fields.get("session")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= TOKENS_MAX or {*map(type, tokens)} != {int}:
        raise ValueError(f"tokens: not a list of 1 to {TOKENS_MAX} token ids")
    if not 0 <= min(tokens) <= max(tokens) < 1 << 32:
        raise ValueError("tokens: an id is outside 32 bits")
    if type(count) is not int or not 0 < count <= TOKENS_MAX:
        raise ValueError(f"max_tokens: not a number from 1 to {TOKENS_MAX}")
    if not isinstance(session, str | None):
        raise ValueError("session: not a text")  # noqa: TRY004 - it is data
    return Prompt(np.array(tokens, dtype=np.uint32), session=session), count


def application(arguments: Mapping[str, Any]) -> serve.Application:
    """Serve's builder: settings of `tiered_cache.config` by name, sizes as people write them.

    `workers` and `name` are the cluster's, `engine`, `block_tokens`, `num_gpus`, `device` and `worker_bytes` a
    worker's, all others a node's tiers'. Raises `ConfigError`.
    """
    fields = {**arguments}
    fields |= {size: parse_size(str(fields[size]), size) for size in _SIZES if size in fields}
    worker = {field: fields.pop(field) for field in _WORKER if field in fields}
    if "worker_bytes" in fields:
        worker["capacity_bytes"] = parse_size(str(fields.pop("worker_bytes")), "worker_bytes")
    cluster = {field: fields.pop(field) for field in ("workers", "name") if field in fields}
    if "disk_dir" in fields:
        fields["disk_dir"] = Path(fields["disk_dir"])
    try:
        settings = ClusterSettings(
            int(cluster.pop("workers", 2)), WorkerSettings(**worker), TierSettings(**fields), **cluster
        )
    except TypeError as error:
        raise ConfigError(f"a setting that there is none of, or of another kind: {error}") from error
    deployment: Any = Completions
    bound: serve.Application = deployment.bind(settings)
    return bound
