"""What a cache could reach at most on a trace, if it knew the future: two bounds on hit tokens.

`upper_bound` is Belady's rule on rows alone: drop the block that is used again last, among equals the deepest, so that
the prefix stays closed. Checkpoints cost nothing there, so no real cache of hybrid state can reach it.
`feasible_bound` is a schedule that exists: a restore of request r to depth d holds each block of its prefix since the
block's last use, and one checkpoint since the last pass through d; restores are taken by tokens per byte and step while
there is room at every step between. Like the policies, both may refuse what is new, and neither pays for the state of
running requests; one step is one request.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_cache.index import Chain
from tiered_cache.policy.ghost import GhostNode, GhostTree

DEPTHS_MAX = 16
"""How many checkpoints on a request's path are considered, the deepest first."""
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Access:
    """One request of the trace: its prompt's chain, and the chain with its output where that is known."""

    prompt: Chain
    whole: Chain
    blocks_max: int
    """How many blocks of the prompt a restore may bring."""


class PathTree:
    """All prefixes of a trace as a tree whose edges no request splits, and each request's path in it."""

    def __init__(self, accesses: Sequence[Access]) -> None:
        tree = GhostTree(1 << 40)
        branches: list[int] = []
        for access in accesses:
            _, _, common = tree.match(access.prompt)
            branches.append(common)
            tree.add(access.prompt, access.prompt.blocks)
            tree.add(access.whole, access.whole.blocks)
        self.nodes: list[GhostNode] = []
        numbers: dict[GhostNode, int] = {}
        self.paths: list[array[int]] = []
        """For each request, the nodes of its whole path from the top."""
        self.prompts: list[int] = []
        """For each request, how many nodes of its path lie within what a restore may bring."""
        self.branches = branches
        """For each request, how many blocks of its prompt had been seen before."""
        for access in accesses:
            node, _, _ = tree.match(access.whole)
            path = []
            while node.parent is not None:
                if node not in numbers:
                    numbers[node] = len(self.nodes)
                    self.nodes.append(node)
                path.append(numbers[node])
                node = node.parent
            self.paths.append(array("q", reversed(path)))
            self.prompts.append(sum(self.nodes[n].blocks <= access.blocks_max for n in path))


def upper_bound(tree: PathTree, block_bytes: int, capacity_bytes: int) -> list[int]:
    """Blocks hit by each request, if rows alone are kept and the future is known."""
    following = _next_uses(tree)
    room = capacity_bytes // block_bytes
    sizes = [len(node.keys) for node in tree.nodes]
    held = [0] * len(tree.nodes)
    total = 0
    next_use: list[int] = [_NEVER] * len(tree.nodes)
    queue: list[tuple[int, int, int]] = []
    hits = []
    for request, path in enumerate(tree.paths):
        hit = 0
        for place in range(tree.prompts[request]):
            hit += held[path[place]]
            if held[path[place]] < sizes[path[place]]:
                break
        hits.append(hit)
        for place, node in enumerate(path):
            total += sizes[node] - held[node]
            held[node] = sizes[node]
            next_use[node] = following[request][place]
            heapq.heappush(queue, (-next_use[node], -tree.nodes[node].blocks, node))
        while total > room:
            used, _, node = queue[0]
            if -used != next_use[node] or not held[node]:
                heapq.heappop(queue)
                continue
            freed = min(held[node], total - room)
            held[node] -= freed
            total -= freed
    return hits


def _next_uses(tree: PathTree) -> list[array[int]]:
    """For each request and node of its path: the next request that passes the node."""
    coming = [_NEVER] * len(tree.nodes)
    following: list[array[int]] = []
    for request in range(len(tree.paths) - 1, -1, -1):
        path = tree.paths[request]
        following.append(array("q", [coming[node] for node in path]))
        for node in path:
            coming[node] = request
    following.reverse()
    return following


@dataclass(frozen=True, slots=True)
class _Restore:
    """A request could be restored to a node, if this is held until then: (from step, row blocks), nested."""

    request: int
    blocks: int
    holds: tuple[tuple[int, int], ...]
    checkpoint_from: int


def feasible_bound(tree: PathTree, block_bytes: int, checkpoint_bytes: int, capacity_bytes: int) -> list[int]:
    """Blocks hit by each request in a schedule that fits, with one checkpoint for each restore."""
    restores = list(_restores(tree))
    costs = np.array([_cost(restore, block_bytes, checkpoint_bytes) for restore in restores])
    blocks = np.array([restore.blocks for restore in restores])
    best: list[int] = [0] * len(tree.paths)
    chosen: dict[int, _Restore] = {}
    load: npt.NDArray[np.int64] = np.zeros(len(tree.paths) + 1, np.int64)
    for number in np.argsort(-blocks / costs, kind="stable"):
        restore = restores[int(number)]
        before = chosen.get(restore.request)
        if before is not None and before.blocks >= restore.blocks:
            continue
        if before is not None:
            _hold(load, before, block_bytes, checkpoint_bytes, -1)
        _hold(load, restore, block_bytes, checkpoint_bytes, 1)
        start = min(restore.checkpoint_from, restore.holds[-1][0])
        if load[start : restore.request].max() <= capacity_bytes:
            chosen[restore.request] = restore
            best[restore.request] = restore.blocks
            continue
        _hold(load, restore, block_bytes, checkpoint_bytes, -1)
        if before is not None:
            _hold(load, before, block_bytes, checkpoint_bytes, 1)
    return best


def _restores(tree: PathTree) -> Iterable[_Restore]:
    """Every restore that some earlier request's checkpoint allows, each to one of the deepest nodes."""
    passed = [-1] * len(tree.nodes)
    born = [False] * len(tree.nodes)
    for request, path in enumerate(tree.paths):
        holds: list[tuple[int, int]] = []
        found = []
        for place in range(tree.prompts[request]):
            node = path[place]
            if passed[node] < 0:
                break
            if holds and holds[-1][0] == passed[node]:
                holds[-1] = (passed[node], holds[-1][1] + len(tree.nodes[node].keys))
            else:
                holds.append((passed[node], len(tree.nodes[node].keys)))
            if born[node]:
                found.append(_Restore(request, tree.nodes[node].blocks, tuple(holds), passed[node]))
        yield from found[-DEPTHS_MAX:]
        for place, node in enumerate(path):
            passed[node] = request
            if tree.nodes[node].blocks == tree.branches[request] or place == len(path) - 1:
                born[node] = True


def _cost(restore: _Restore, block_bytes: int, checkpoint_bytes: int) -> int:
    rows = sum(blocks * (restore.request - start) for start, blocks in restore.holds)
    return rows * block_bytes + checkpoint_bytes * (restore.request - restore.checkpoint_from)


def _hold(load: npt.NDArray[np.int64], restore: _Restore, block_bytes: int, checkpoint_bytes: int, change: int) -> None:
    for start, blocks in restore.holds:
        load[start : restore.request] += change * blocks * block_bytes
    load[restore.checkpoint_from : restore.request] += change * checkpoint_bytes
