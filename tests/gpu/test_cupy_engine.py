"""The reference engine on a CUDA device: the same states, unchanged, and the very bits of the NumPy device."""

from __future__ import annotations

import pytest

from tiered_cache.devices.cupy import CupyDevice
from tiered_cache.engines.base import ComputingEngine
from tiered_cache.engines.reference import ReferenceEngine
from tiered_cache.errors import ConfigError
from tiered_cache.testing.engine_suite import EngineTests, random_prompt


class OnCuda(EngineTests):
    __test__ = False
    model: str
    staging_slots = 8

    @pytest.fixture(autouse=True)
    def _device(self) -> None:
        try:
            self.device = CupyDevice(staging_bytes=1 << 20)
        except ConfigError as error:
            pytest.skip(str(error))

    def make_engine(self) -> ComputingEngine:
        return ReferenceEngine(self.model, staging_slots=8, capacity_bytes=4 << 20, device=self.device)

    def test_numpy_computes_the_same_bits(self) -> None:
        there = self.make_engine()
        here = ReferenceEngine(self.model, capacity_bytes=4 << 20)
        there.identity.check(here.identity)
        prompt = random_prompt(here, 3 * here.geometry.block_tokens + 5)
        assert self.mark(here, self.run(here, prompt)) == self.mark(there, self.run(there, prompt))


@pytest.mark.gpu
class TestQsaPleGdnOnCuda(OnCuda):
    __test__ = True
    model = "qsa-ple-gdn:small"


@pytest.mark.gpu
class TestMlaDsaKdaOnCuda(OnCuda):
    __test__ = True
    model = "mla-dsa-kda:small"
