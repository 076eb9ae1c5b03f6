"""`TicketHolder`: the asker's side of `suspend` and `resume`, each of which a router does in two steps.

An answer can be lost, with the process that gave it or with its caller's patience. So nothing is settled for long
before the asker has the answer and says so:

    suspend    take_off     the sequence stops, and its frames are kept for as long as the answer may take, and a minute
               settle       the asker has the ticket: they are kept for the time promised, and the worker lets go
    resume     bring_back   the sequence is restored, and its ticket used up: for good, and by this asker alone, who may
                            ask again for a minute; what was restored for an answer that was lost is run by nobody
               let_go       the asker has the sequence: the rest of the suspended one can go

If the second step does not come, what the first one holds ends by itself.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Protocol

from tiered_cache.deadline import Clock, Deadline
from tiered_cache.errors import StaleError, TieredCacheError, UnknownOutcomeError
from tiered_cache.identity import FrameKey
from tiered_cache.service.messages import Restored, SequenceRef, Ticket
from tiered_cache.tiers.base import Durability

LET_GO_S = 2.0
"""How long to wait, after a sequence was resumed, until the rest of the suspended one is let go."""
UNSURE_MAX = 1 << 10
"""How many resumptions without an answer are remembered."""


class Steps(Protocol):
    """What a router does for a ticket's holder."""

    def take_off(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket: ...
    def settle(self, source: SequenceRef, ticket: Ticket, *, deadline_s: float) -> None: ...
    def bring_back(self, ticket: Ticket, capacity_tokens: int, by: int, *, deadline_s: float) -> Restored: ...
    def let_go(self, ticket: Ticket, *, deadline_s: float) -> None: ...


class TicketHolder:
    """Whoever suspends and resumes sequences through one router."""

    def __init__(self, router: Steps, *, clock: Clock = time.monotonic) -> None:
        self._router = router
        self._clock = clock
        self._lock = threading.Lock()
        self._unsure: OrderedDict[tuple[FrameKey, ...], int] = OrderedDict()
        """As whom a ticket was last presented for which no sequence has come."""

    def suspend(self, source: SequenceRef, node: str, durability: Durability, *, deadline_s: float) -> Ticket:
        """`RestoreRouter.suspend`."""
        deadline = Deadline.after(deadline_s, self._clock)
        ticket = self._router.take_off(source, node, durability, deadline_s=deadline_s)
        try:
            self._router.settle(source, ticket, deadline_s=deadline.left_s("suspend"))
        except StaleError:  # nothing is kept, and the sequence runs on
            raise
        except TieredCacheError as error:
            what = f"the ticket is here, and it is not known whether it will be kept: {error}"
            raise UnknownOutcomeError(what, error.key, error.tier, ticket=ticket) from error
        return ticket

    def resume(self, ticket: Ticket, capacity_tokens: int, *, deadline_s: float) -> Restored:
        """`RestoreRouter.resume`."""
        deadline = Deadline.after(deadline_s, self._clock)
        tickets = ticket.plan.tickets
        with self._lock:  # two who ask at once are two askers
            by = self._unsure.pop(tickets, 0) or secrets.randbits(62) + 1
        try:
            restored = self._router.bring_back(ticket, capacity_tokens, by, deadline_s=deadline_s)
        except StaleError:
            raise
        except BaseException:
            with self._lock:
                self._unsure[tickets] = by
                if len(self._unsure) > UNSURE_MAX:
                    self._unsure.popitem(last=False)
            raise
        with suppress(TieredCacheError):  # it goes by itself
            self._router.let_go(ticket, deadline_s=deadline.last_step_s(LET_GO_S))
        return restored
