"""Every card is asked of every place where frames can lie, as far as it applies there."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import PLACES, Place, open_place


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    seaweed = request.getfixturevalue("seaweed") if request.param == "s3" else None
    return open_place(request.param, tmp_path, seaweed)
