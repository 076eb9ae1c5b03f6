"""Files that last as long as this node's part of a Ray cluster, and are Ray's to clear away."""

from __future__ import annotations

import tempfile
from pathlib import Path

import ray

from actors.inline import in_local_mode


def session_file(name: str) -> Path | None:
    """Where actors of this name, one after the other on this node, leave something for the next; None if nowhere.

    In local mode all actors die with the process, and there is no session.
    """
    if in_local_mode():
        return None
    context = ray.get_runtime_context()
    temporary = getattr(context, "get_temp_dir", None)  # Ray 2.54 does not tell
    directory = Path(temporary() if temporary else Path(tempfile.gettempdir()) / "ray") / context.get_session_name()
    return directory / f"tiered-cache-{name.replace('/', '-')}" if directory.is_dir() else None
