"""Every policy of the library keeps the policies' contract."""

from __future__ import annotations

from tiered_cache.policy.base import CachePolicy
from tiered_cache.policy.names import POLICIES, build_policy
from tiered_cache.testing.policy_suite import PolicyTests


class TestDefault(PolicyTests):
    def make(self, seed: int) -> CachePolicy:
        return build_policy("default", seed)


class TestLru(PolicyTests):
    def make(self, seed: int) -> CachePolicy:
        return build_policy("lru", seed)


class TestEveryBlock(PolicyTests):
    def make(self, seed: int) -> CachePolicy:
        return build_policy("every-block", seed)


class TestMarconi(PolicyTests):
    def make(self, seed: int) -> CachePolicy:
        return build_policy("marconi", seed)


class TestS3Fifo(PolicyTests):
    def make(self, seed: int) -> CachePolicy:
        return build_policy("s3fifo", seed)


def test_no_policy_is_left_out() -> None:
    tested = {suite.make(suite(), 0).__class__ for suite in PolicyTests.__subclasses__()}  # type: ignore[abstract]
    assert tested == {build_policy(name).__class__ for name in POLICIES}
