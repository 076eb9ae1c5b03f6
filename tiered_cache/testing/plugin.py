"""pytest plugin: a ready tier for tests of code that spills and restores. It loads nothing heavy until used."""

from __future__ import annotations
