"""Engines of other projects need environments of their own: `requirements-transformers.txt` says what one takes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny
