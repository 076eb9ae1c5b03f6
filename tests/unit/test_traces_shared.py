"""The readers on whole traces: what is in them, and the hit rates that an infinite cache reaches."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tiered_cache.replay.traces import TokenSource, Trace, block_ids

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
MOONCAKE = TRACES / "mooncake_conversation_b512.jsonl.gz"
AGENTIC = TRACES / "agentic_A_b64.jsonl.gz"
SHAREGPT = TRACES / "sharegpt100_sps1_tok.jsonl.gz"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason=f"the traces are not at {TRACES}")


@pytest.mark.parametrize(
    ("path", "block_tokens", "requests", "input_tokens"),
    [
        (MOONCAKE, 512, 12_031, 144_793_823),
        (AGENTIC, 64, 10_740, 1_219_884_182),
        (SHAREGPT, 1, 1_238, 1_408_888),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_contents(path: Path, block_tokens: int, requests: int, input_tokens: int) -> None:
    trace = Trace(path)
    assert trace.block_tokens == block_tokens
    assert trace.count_requests() == requests
    assert sum(request.input_tokens for request in trace) == input_tokens


def infinite_cache_hit_percent(path: Path, match_tokens: int) -> float:
    """Hit tokens over input tokens where every prompt and answer is kept and matched in units of `match_tokens`.

    Ids are chained by prefix, so the last id of a unit stands for everything up to its end.
    """
    trace = Trace(path)
    step = match_tokens // trace.block_tokens
    seen = np.zeros(1 << 20, np.bool_)
    hit_tokens = input_tokens = 0
    for request in trace:
        ends: npt.NDArray[np.uint32] = block_ids(request.runs)[step - 1 :: step]
        misses = np.flatnonzero(~seen[ends])
        hit_tokens += match_tokens * int(misses[0] if misses.size else ends.size)
        input_tokens += request.input_tokens
        seen[ends] = True
        seen[block_ids(request.output_runs)] = True
    return 100 * hit_tokens / input_tokens


@pytest.mark.parametrize(
    ("path", "match_tokens", "percent"),
    [
        (MOONCAKE, 512, 37.34),
        (AGENTIC, 512, 95.60),
        (AGENTIC, 64, 95.80),
        (SHAREGPT, 1, 93.48),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_infinite_cache_hit_rate(path: Path, match_tokens: int, percent: float) -> None:
    assert infinite_cache_hit_percent(path, match_tokens) == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize(
    ("path", "vocabulary", "match_tokens"),
    [(MOONCAKE, 256, 512), (AGENTIC, 50_000, 64), (SHAREGPT, 248_320, 16)],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_tokens_match_where_ids_do(path: Path, vocabulary: int, match_tokens: int) -> None:
    trace = Trace(path)
    step = match_tokens // trace.block_tokens
    source = TokenSource(trace.block_tokens, vocabulary)
    seen_ids: set[int] = set()
    seen_prefixes: set[bytes] = set()
    hits = 0
    for request in itertools.islice(trace, 200):
        ids = block_ids(request.runs)[step - 1 :: step].tolist()
        tokens = source.tokens(request)
        chain = hashlib.sha256()
        prefixes = []
        for block in range(len(ids)):
            chain.update(tokens[block * match_tokens : (block + 1) * match_tokens].data)
            prefixes.append(chain.digest())
        assert [prefix in seen_prefixes for prefix in prefixes] == [block_id in seen_ids for block_id in ids]
        hits += sum(block_id in seen_ids for block_id in ids)
        seen_ids.update(ids)
        seen_prefixes.update(prefixes)
    assert hits > 100
