"""The other end of a `Bridge`, without Ray: `python bridge_end.py FD`. The cluster's name says how it behaves.

`serves` has a catalogue of the settings' store; `refused` is of another; `hangs` never joins; `slow` joins, and then
answers nothing but `report_absent`; `away then serves` cannot join for the first time.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tiered_cache.errors import ConfigError, TierError
from tiered_cache.service.bridge import Answer, Hello, Serving
from tiered_cache.service.build import ObjectPlace


class Slow:
    """A catalogue that hangs."""

    def report_absent(self, keys: object, *, deadline_s: float) -> None: ...

    def __getattr__(self, method: str) -> Any:
        return lambda *_, **__: time.sleep(600)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    hello: Hello = connection.recv()
    error: Any = None
    if hello.cluster == "hangs":
        time.sleep(600)
    if hello.cluster == "refused":
        error = ConfigError("the catalogue is of object_url file:///a, not file:///b")
    been = Path(hello.ray_address)
    if hello.cluster == "away then serves" and not been.exists():
        been.touch()
        error = TierError("no Ray", retryable=True)
    slow: Any = Slow()
    catalogue = (
        slow if hello.cluster == "slow" else ObjectPlace(hello.tiers).catalogue(ThreadPoolExecutor(2), cluster="test")
    )
    serving = Serving(connection, catalogue)
    serving.send(Answer(0, None, error))
    with suppress(EOFError):
        if error is None:
            serving.serve()


if __name__ == "__main__":
    main()
