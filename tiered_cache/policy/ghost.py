"""A tree of prefixes that were seen, with nothing but metadata: it outlives what it describes.

Chains without branches are one edge, which keeps 8 bytes a block. Nodes are where a request ended, where two requests
parted, and the root of each namespace. Those that no one holds are forgotten one by one, the longest unused first, so
that there are never more than `nodes_max` of them; an inner node with one child melts into that child's edge.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable

from tiered_cache.index import Chain, PrefixId

_MASK = (1 << 64) - 1


def block_key(prefix: PrefixId) -> int:
    """64 bits of a prefix id, the same in every process."""
    if isinstance(prefix, bytes):
        return int.from_bytes(prefix[:8], "little")
    return hash(prefix) & _MASK  # of an int: itself


class GhostNode:
    """A block end. `held` counts who holds something here; only nodes that no one holds are forgotten."""

    __slots__ = ("blocks", "children", "data", "held", "keys", "parent")

    def __init__(self, parent: GhostNode | None, blocks: int, keys: array[int]) -> None:
        self.parent = parent
        self.blocks = blocks
        self.keys = keys
        """Of the blocks between the parent and here."""
        self.children: dict[int, GhostNode] = {}
        self.held = 0
        self.data: object | None = None
        """The policy's own."""


class GhostTree:
    """The trees of all namespaces."""

    def __init__(self, nodes_max: int) -> None:
        self._nodes_max = nodes_max
        self._roots: dict[Hashable, GhostNode] = {}
        self._idle: OrderedDict[GhostNode, None] = OrderedDict()
        """Nodes that no one holds, the longest unused first."""
        self.on_split: list[Callable[[GhostNode], None]] = []
        """Told of each node that was put into an edge, and has one child so far."""
        self.on_forget: list[Callable[[GhostNode], None]] = []
        self.blocks = 0
        """Length of all edges."""
        self.nodes = 0

    def root(self, namespace: Hashable) -> GhostNode:
        if namespace not in self._roots:
            self._roots[namespace] = GhostNode(None, 0, array("Q"))
        return self._roots[namespace]

    def match(self, chain: Chain) -> tuple[GhostNode, GhostNode | None, int]:
        """(deepest node on the chain, its child along which the chain goes on, how many blocks the chain follows)."""
        node = self.root(chain.namespace)
        blocks = chain.blocks
        while node.blocks < blocks:
            child = node.children.get(block_key(chain.block_hash(node.blocks + 1)))
            if child is None:
                break
            if child.blocks <= blocks and child.keys[-1] == block_key(chain.block_hash(child.blocks)):
                node = child
                continue
            low, high = node.blocks + 1, min(child.blocks, blocks)
            while low < high:
                middle = (low + high + 1) // 2
                if child.keys[middle - node.blocks - 1] == block_key(chain.block_hash(middle)):
                    low = middle
                else:
                    high = middle - 1
            return node, child, low
        return node, None, node.blocks

    def add(self, chain: Chain, blocks: int) -> GhostNode:
        """The node at the end of the first `blocks` blocks of a chain, made if there is none."""
        node, child, common = self.match(chain)
        while node.blocks > blocks:
            child, node = node, node.parent or node
        common = min(common, blocks)
        if node.blocks == blocks:
            return node
        if child is not None and child.parent is node and common > node.blocks:
            node = self._split(child, common)
        if node.blocks == blocks:
            return node
        keys = array("Q", [block_key(chain.block_hash(index)) for index in range(node.blocks + 1, blocks + 1)])
        new = GhostNode(node, blocks, keys)
        node.children[keys[0]] = new
        self.blocks += len(keys)
        self._born(new)
        return new

    def hold(self, node: GhostNode) -> None:
        node.held += 1
        self._idle.pop(node, None)

    def release(self, node: GhostNode) -> None:
        node.held -= 1
        if not node.held and node.parent is not None:
            self._idle[node] = None
            self._forget()

    def use(self, node: GhostNode) -> None:
        """A node was useful: it is forgotten later than those that were not."""
        if node in self._idle:
            self._idle.move_to_end(node)

    def state_bytes(self) -> int:
        return 8 * self.blocks + 400 * self.nodes

    def _born(self, node: GhostNode) -> None:
        self.nodes += 1
        if not node.held:
            self._idle[node] = None
            self._forget()

    def _split(self, child: GhostNode, blocks: int) -> GhostNode:
        parent = child.parent
        assert parent is not None
        cut = blocks - parent.blocks
        node = GhostNode(parent, blocks, child.keys[:cut])
        child.keys = child.keys[cut:]
        parent.children[node.keys[0]] = node
        node.children[child.keys[0]] = child
        child.parent = node
        for listener in self.on_split:
            listener(node)
        self._born(node)
        return node

    def _forget(self) -> None:
        """Keep to the limit: drop idle leaves, and melt idle nodes that have one child left."""
        turns = len(self._idle)
        while len(self._idle) > self._nodes_max and turns:
            turns -= 1
            node, _ = self._idle.popitem(last=False)
            parent = node.parent
            assert parent is not None
            if len(node.children) > 1:
                self._idle[node] = None
                continue
            first = node.keys[0]
            if node.children:
                (child,) = node.children.values()
                child.keys = node.keys + child.keys
                child.parent = parent
                parent.children[first] = child
            else:
                del parent.children[first]
                self.blocks -= len(node.keys)
            node.parent = None
            self.nodes -= 1
            for listener in self.on_forget:
                listener(node)
