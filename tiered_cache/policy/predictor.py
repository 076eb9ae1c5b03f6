"""When will each prefix be used again: age, kind and features of each node of a ghost tree, and a model over them."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tiered_cache.index import Chain
from tiered_cache.policy.ghost import GhostNode, GhostTree
from tiered_cache.policy.hazard import Floats, HazardModel, Ints, bucket_of, worth

HINT_TRUST = 0.9
"""The chance that a caller who says when it will be back is right."""
SCAN_REQUESTS = 16
"""So often the model learns from what was not used."""
FAN_MAX = 3
"""A node with this many children is a prefix that sessions share, not one session's past."""
EDIT_TOKENS_MAX = 512
EDIT_SHARE_MAX = 0.05
"""A prompt that leaves a session's end by no more than this goes on with the session: its last tokens were edited."""
_FEATURES = (6, 13, 13, 9, 9, 6)
_TURNS, _GAP, _RHYTHM, _NEW, _OUTPUT, _DEPTH = range(len(_FEATURES))


class Kind(enum.IntEnum):
    """What a node is to those that may come back to it."""

    END = 0  # where a request ended, and no one has come back yet
    SUPERSEDED = 1  # where one session went on: it is deeper now
    BRANCH = 2  # where several ways part
    ABANDONED = 3  # an end that its own session left by an edit


class _Facts:
    """What is remembered of one node beside the arrays, in which it has the place `row`."""

    __slots__ = ("ended", "log_rhythm", "row", "turns")

    def __init__(self, row: int) -> None:
        self.row = row
        self.ended = False
        self.turns = 0
        self.log_rhythm: float | None = None


class _Session:
    """What a request knows of the session that it goes on with."""

    __slots__ = ("gap_s", "log_rhythm", "turns")

    def __init__(self, facts: _Facts, gap_s: float) -> None:
        self.turns = facts.turns + 1
        self.gap_s = gap_s
        log_gap = math.log2(max(gap_s, 0.25))
        self.log_rhythm = log_gap if facts.log_rhythm is None else (log_gap + facts.log_rhythm) / 2


class Arrival:
    """One request's way through the tree, between its start and its end."""

    __slots__ = ("branch", "common", "edited", "input_tokens", "node", "now_s", "session")

    def __init__(self, now_s: float, input_tokens: int, common: int) -> None:
        self.now_s = now_s
        self.input_tokens = input_tokens
        self.common = common
        """How many blocks of the prompt are known."""
        self.session: _Session | None = None
        self.branch = False
        """Whether the prompt leaves a known path at `common`."""
        self.edited: GhostNode | None = None
        """The session's end that it leaves by an edit."""


class Predictor:
    """Watches requests and learns; `worths` is what it is for."""

    def __init__(self, tree: GhostTree) -> None:
        self.model = HazardModel(len(Kind), _FEATURES)
        self._tree = tree
        tree.on_split.append(self._part)
        tree.on_forget.append(self._forget)
        self._kinds: Ints = np.zeros(0, np.int64)
        self._features: Ints = np.zeros((0, len(_FEATURES)), np.int64)
        self._since_s: Floats = np.zeros(0)
        self._expected_s: Floats = np.zeros(0)
        """When a caller said that it would be back, else nan."""
        self._learned: Ints = np.zeros(0, np.int64)
        """Up to which bucket of its age the model has learned from a node."""
        self._alive: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._free: list[int] = []
        self._requests = 0
        self._now_s = 0.0

    def arrive(self, chain: Chain, input_tokens: int, now_s: float, resumed: GhostNode | None) -> Arrival:
        """A request starts, restored from `resumed`; everything that it came back to begins a new age."""
        self._now_s = max(self._now_s, now_s)
        self._requests += 1
        if self._requests % SCAN_REQUESTS == 0:
            self._learn_survivors()
        node, child, common = self._tree.match(chain)
        arrival = Arrival(self._now_s, input_tokens, common)
        parting = child is not None and common > node.blocks
        arrival.branch = parting or bool(node.children and chain.blocks > common)
        past = node if node.parent is not None and len(node.children) < FAN_MAX else None
        if child is not None and parting and self._is_edit(child, common, chain.block_tokens):
            past = arrival.edited = child
        if past is not None:
            facts = self._facts(past)
            arrival.session = _Session(facts, self._now_s - float(self._since_s[facts.row]))
        for back in {id(n): n for n in (node, resumed) if n is not None and n.parent is not None}.values():
            self._use(back)
        return arrival

    def took_branch(self, arrival: Arrival, node: GhostNode) -> None:
        """The request takes a checkpoint where it parted; after an edit, that is where its session will go on."""
        if arrival.edited is not None and node.parent is not None:
            self._kinds[self._facts(node).row] = Kind.SUPERSEDED
            self._kinds[self._facts(arrival.edited).row] = Kind.ABANDONED
            self._describe(node, arrival, 0)

    def end(
        self,
        arrival: Arrival,
        node: GhostNode,
        output_tokens: int,
        block_tokens: int,
        returns_in_s: float | None = None,
    ) -> None:
        """The request ended here; its caller may know when it will be back."""
        if node.parent is None:
            return
        facts = self._facts(node)
        facts.ended = True
        if not node.children:
            self._kinds[facts.row] = Kind.END
            self._since_s[facts.row] = self._now_s
            self._learned[facts.row] = 0
            new_tokens = arrival.input_tokens - arrival.common * block_tokens
            self._describe(node, arrival, output_tokens, new_tokens)
            self._expected_s[facts.row] = np.nan if returns_in_s is None else self._now_s + returns_in_s

    def worths(self, nodes: Sequence[GhostNode], now_s: float) -> Floats:
        """What it is worth to keep each node for one more second, in uses a second. Shape [n]."""
        rows = np.array([self._facts(node).row for node in nodes], np.int64)
        ages_s = max(now_s, self._now_s) - self._since_s[rows]
        learned = worth(self.model.hazards(self._kinds[rows], self._features[rows]), ages_s)
        expected_s = self._expected_s[rows] - self._since_s[rows]  # a hint holds until twice the time has passed
        hinted = HINT_TRUST / np.maximum(np.maximum(expected_s - ages_s, 0.1 * expected_s), 0.25)
        return np.where(ages_s < 2 * expected_s + 1, hinted, learned)

    def kind(self, node: GhostNode) -> int:
        """A `Kind`, as a plain number: asked for many nodes at every eviction."""
        return int(self._kinds[self._facts(node).row])

    def state_bytes(self) -> int:
        arrays = (self._kinds, self._features, self._since_s, self._learned, self._alive)
        return self.model.state_bytes() + sum(a.nbytes for a in arrays) + 100 * len(self._kinds)

    def _facts(self, node: GhostNode) -> _Facts:
        return node.data if isinstance(node.data, _Facts) else self._begin(node, Kind.END)

    def _begin(self, node: GhostNode, kind: Kind) -> _Facts:
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._kinds[row] = kind
        self._features[row] = self.model.offsets
        self._since_s[row] = self._now_s
        self._expected_s[row] = np.nan
        self._learned[row] = 0
        self._alive[row] = True
        node.data = facts = _Facts(row)
        return facts

    def _grow(self) -> None:
        size = len(self._kinds)
        more = max(256, size)
        self._kinds = np.concatenate((self._kinds, np.zeros(more, np.int64)))
        self._features = np.concatenate((self._features, np.zeros((more, len(_FEATURES)), np.int64)))
        self._since_s = np.concatenate((self._since_s, np.zeros(more)))
        self._expected_s = np.concatenate((self._expected_s, np.full(more, np.nan)))
        self._learned = np.concatenate((self._learned, np.zeros(more, np.int64)))
        self._alive = np.concatenate((self._alive, np.zeros(more, np.bool_)))
        self._free = list(range(size, size + more))

    def _part(self, node: GhostNode) -> None:
        self._begin(node, Kind.BRANCH)

    def _forget(self, node: GhostNode) -> None:
        if isinstance(node.data, _Facts):
            self._alive[node.data.row] = False
            self._free.append(node.data.row)
            node.data = None

    def _is_edit(self, child: GhostNode, common: int, block_tokens: int) -> bool:
        if child.children or not self._facts(child).ended:
            return False
        return child.blocks - common <= max(EDIT_TOKENS_MAX // block_tokens, EDIT_SHARE_MAX * child.blocks)

    def _describe(self, node: GhostNode, arrival: Arrival, output_tokens: int, new_tokens: int = 0) -> None:
        """Give a node the features of the request that made it."""
        facts, session = self._facts(node), arrival.session
        facts.turns = session.turns if session else 0
        facts.log_rhythm = session.log_rhythm if session else None
        turns = facts.turns
        values = [0] * len(_FEATURES)
        values[_TURNS] = turns if turns < 3 else 3 if turns < 5 else 4 if turns < 10 else 5
        values[_GAP] = _gap_bin(session.gap_s) if session else 0
        values[_RHYTHM] = _gap_bin(2.0**session.log_rhythm) if session else 0
        values[_NEW] = _octave(new_tokens / 64, 8)
        values[_OUTPUT] = 0 if output_tokens <= 8 else _octave(output_tokens / 8, 8)
        values[_DEPTH] = _octave(math.sqrt(arrival.input_tokens / 512), 5)
        self._features[facts.row] = self.model.offsets + values

    def _use(self, node: GhostNode) -> None:
        """Someone came back to a node."""
        facts = self._facts(node)
        row = facts.row
        bucket = int(bucket_of(self._now_s - self._since_s[row : row + 1])[0])
        self._learn(np.array([row]), np.array([bucket + 1]), used=True)
        self._kinds[row] = Kind.SUPERSEDED if self._kinds[row] == Kind.END else Kind.BRANCH
        gap_s = self._now_s - float(self._since_s[row])
        log_gap = math.log2(max(gap_s, 0.25))
        facts.log_rhythm = log_gap if facts.log_rhythm is None else (log_gap + facts.log_rhythm) / 2
        self._features[row, _GAP] = self.model.offsets[_GAP] + _gap_bin(gap_s)
        self._features[row, _RHYTHM] = self.model.offsets[_RHYTHM] + _gap_bin(2.0**facts.log_rhythm)
        self._since_s[row] = self._now_s
        self._expected_s[row] = np.nan
        self._learned[row] = 0
        self._tree.use(node)

    def _learn_survivors(self) -> None:
        rows = np.flatnonzero(self._alive)
        buckets = bucket_of(self._now_s - self._since_s[rows])
        behind = buckets > self._learned[rows]
        if behind.any():
            self._learn(rows[behind], buckets[behind], used=False)

    def _learn(self, rows: Ints, stops: Ints, *, used: bool) -> None:
        """Learn that these nodes survived the buckets before `stops`, but that they were used in the last one."""
        counts = stops - self._learned[rows]
        which = np.repeat(rows, counts)
        steps = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        outcomes = np.zeros(len(which))
        if used:
            outcomes[np.cumsum(counts) - 1] = 1.0
        self.model.learn(self._kinds[which], self._features[which], self._learned[which] + steps, outcomes)
        self._learned[rows] = stops


def _gap_bin(gap_s: float) -> int:
    """1 below a second, then by octaves; 0 is for none."""
    return 1 if gap_s < 1 else min(12, 2 + int(math.log2(gap_s)))


def _octave(value: float, most: int) -> int:
    return 0 if value < 1 else min(most, int(math.log2(value)))
