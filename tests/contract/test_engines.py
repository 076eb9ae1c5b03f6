"""The reference engine, in every shape, keeps the promises of the conformance suite."""

from __future__ import annotations

from tiered_cache.engines.base import ComputingEngine
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.testing.engine_suite import EngineTests


class TestQsaPleGdn(EngineTests):
    staging_slots = 8

    def make_engine(self) -> ComputingEngine:
        return ReferenceEngine("qsa-ple-gdn:small", staging_slots=8, capacity_bytes=4 << 20)


class TestMlaDsaKda(EngineTests):
    staging_slots = 8

    def make_engine(self) -> ComputingEngine:
        return ReferenceEngine("mla-dsa-kda:small", staging_slots=8, capacity_bytes=4 << 20)


class TestBlocksThatArePages(EngineTests):
    """Pages as long as blocks, blocks that are no power of two, other weights."""

    staging_slots = 3

    def make_engine(self) -> ComputingEngine:
        return ReferenceEngine(
            "qsa-ple-gdn:small", seed=7, block_tokens=12, page_tokens=12, staging_slots=3, capacity_bytes=4 << 20
        )


class TestBlocksOfOneToken(EngineTests):
    """Every token count is a block's end."""

    staging_slots = 3

    def make_engine(self) -> ComputingEngine:
        return ReferenceEngine("mla-dsa-kda:small", block_tokens=1, staging_slots=3, capacity_bytes=4 << 20)
