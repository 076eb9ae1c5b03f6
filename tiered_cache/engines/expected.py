"""What a restored state has to be, without running its prompt again: digests and outputs, remembered by prefix.

An entry is as good as the sequence that it was taken from. So remember a state only from a sequence that began at its
first token, or from a restored one that was itself found right: then every entry goes back to a computation from
scratch, however often the sequences behind it were spilled and restored.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tiered_cache.engines.base import ComputingEngine
from tiered_cache.identity import Tokens


class ExpectedState(NamedTuple):
    """What tells one state from any other."""

    digest: str
    """`ComputingEngine.digest`."""
    output: int
    """`ComputingEngine.output`."""


class ExpectedStates:
    """The last `entries_max` states that were remembered or asked for, by prefix hash; some 350 bytes each."""

    def __init__(self, engine: ComputingEngine, entries_max: int = 1 << 17) -> None:
        """`engine`: of the same identity and geometry as those that are checked, and with nobody else's sequences."""
        self._engine = engine
        self._entries_max = entries_max
        self._entries: OrderedDict[bytes, ExpectedState] = OrderedDict()
        self.recomputations = 0
        """How many states were computed from scratch."""

    def __len__(self) -> int:
        return len(self._entries)

    def remember(self, prefix: bytes, state: ExpectedState) -> bool:
        """Keep the state of a right sequence; False if another one is remembered for this prefix, which then stays."""
        if self._entries.setdefault(prefix, state) != state:
            return False
        self._entries.move_to_end(prefix)
        if len(self._entries) > self._entries_max:
            self._entries.popitem(last=False)
        return True

    def expect(self, prefix: bytes, tokens: Tokens) -> ExpectedState:
        """The state behind `tokens`, whose hash is `prefix`; computed from scratch if it is not remembered.

        Raises `CapacityError` if it has to be computed and the engine has no room for it.
        """
        state = self._entries.get(prefix)
        if state is None:
            state = self.recompute(tokens)
            self.remember(prefix, state)
        else:
            self._entries.move_to_end(prefix)
        return state

    def recompute(self, tokens: Tokens) -> ExpectedState:
        """The state behind `tokens`, computed from the first one; nothing is remembered. Raises as `expect`."""
        self.recomputations += 1
        sequence = self._engine.start(self._engine.reserve(len(tokens)))
        try:
            self._engine.extend(sequence, tokens)
            return ExpectedState(self._engine.digest(sequence), self._engine.output(sequence))
        finally:
            self._engine.release(sequence)
