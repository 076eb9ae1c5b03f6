"""Trace readers and the tokens made from block ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_cache.errors import ConfigError
from tiered_cache.replay import traces
from tiered_cache.replay.traces import SAMPLE_PATH, TokenSource, Trace, TraceRequest, block_ids


def write(path: Path, *requests: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


MOONCAKE = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}


def request(ids: list[int], input_tokens: int, index: int = 0) -> TraceRequest:
    return TraceRequest(index, 0.0, input_tokens, 0, tuple((i, 1) for i in ids))


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    size = min(a.size, b.size)
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


# ---- reading


def test_mooncake_line_drops_the_partial_block(tmp_path: Path) -> None:
    (only,) = Trace(write(tmp_path / "t.jsonl", MOONCAKE))
    assert only == TraceRequest(0, 27.482, 1100, 52, ((46, 2),))


def test_hash_ids_become_joined_runs(tmp_path: Path) -> None:
    line = MOONCAKE | {"input_length": 6 * 512, "hash_ids": [5, 6, 7, 3, 4, 4]}
    (only,) = Trace(write(tmp_path / "t.jsonl", line))
    assert only.runs == ((5, 3), (3, 2), (4, 1))
    assert block_ids(only.runs).tolist() == line["hash_ids"]


def test_runs_are_cut_at_the_full_blocks_and_joined(tmp_path: Path) -> None:
    line = {"timestamp": 0.5, "input_length": 7 * 64 + 3, "output_length": 0, "runs": [[0, 4], [4, 1], [9, 3]]}
    (only,) = Trace(write(tmp_path / "t_b64.jsonl", line))
    assert only == TraceRequest(0, 0.0005, 7 * 64 + 3, 0, ((0, 5), (9, 2)))


def test_token_trace_has_outputs_session_and_turn(tmp_path: Path) -> None:
    line = {
        "timestamp": 0,
        "input_length": 5,
        "output_length": 3,
        "session": 7,
        "turn": 1,
        "runs": [[0, 5]],
        "out_runs": [[5, 1], [6, 2]],
    }
    (only,) = Trace(write(tmp_path / "t_tok.jsonl", line))
    assert only == TraceRequest(0, 0.0, 5, 3, ((0, 5),), ((5, 3),), session=7, turn=1)


def test_prompt_shorter_than_a_block_has_no_ids(tmp_path: Path) -> None:
    (only,) = Trace(write(tmp_path / "t.jsonl", MOONCAKE | {"input_length": 511, "hash_ids": [3]}))
    assert only.runs == ()
    assert block_ids(only.runs).size == 0
    assert TokenSource(512, 1000).tokens(only).size == 511


@pytest.mark.parametrize(
    ("name", "argument", "block_tokens"),
    [
        ("t_b512.jsonl.gz", None, 512),
        ("t_b16.jsonl", None, 16),
        ("t_b8", None, 8),
        ("a_tok.jsonl", None, 1),
        ("conversation_trace.jsonl", None, 512),  # no suffix, but Mooncake's format
        ("t_b16.jsonl", 32, 32),
    ],
)
def test_block_size(tmp_path: Path, name: str, argument: int | None, block_tokens: int) -> None:
    line = MOONCAKE | {"input_length": block_tokens, "hash_ids": [1]}
    assert Trace(write(tmp_path / name, line), argument).block_tokens == block_tokens


def test_gzip_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    plain = write(tmp_path / "t_b512.jsonl.gz", MOONCAKE)
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(Trace(packed)) == list(Trace(plain))


def test_a_trace_is_read_again_from_its_start(tmp_path: Path) -> None:
    trace = Trace(write(tmp_path / "t.jsonl", MOONCAKE, MOONCAKE, MOONCAKE))
    first, second = iter(trace), iter(trace)
    next(first)
    assert [r.index for r in second] == [0, 1, 2]
    assert [r.index for r in first] == [1, 2]
    assert trace.count_requests() == 3


def test_bundled_sample() -> None:
    trace = Trace(SAMPLE_PATH)
    requests = list(trace)
    assert trace.block_tokens == 512
    assert len(requests) == trace.count_requests() == 400
    assert sum(r.input_tokens for r in requests) == 5_710_530
    assert {"LICENSE", "SOURCE.md"} <= {path.name for path in SAMPLE_PATH.parent.iterdir()}


# ---- tokens


@st.composite
def pairs_of_requests(draw: st.DrawFn) -> tuple[int, int, TraceRequest, TraceRequest]:
    """(block size, vocabulary, two requests of different index); the vocabulary is the least for the ids, or more."""
    block_tokens = draw(st.integers(1, 9))
    ids_max = draw(st.sampled_from([3, 40, 70_000, 2**32 - 1]))
    if block_tokens == 1:
        vocabulary = ids_max + 1
    else:
        vocabulary = 2 * next(size for size in range(2, 2**32) if size**block_tokens > ids_max)
    vocabulary = min(vocabulary + draw(st.sampled_from([0, 1, 1000])), 2**32)
    ids = st.lists(st.integers(0, ids_max), max_size=8)
    shared, a, b = draw(ids), draw(ids), draw(ids)
    tail = st.integers(0, block_tokens - 1)
    index = draw(st.integers(0, 50))
    return (
        block_tokens,
        vocabulary,
        request(shared + a, len(shared + a) * block_tokens + draw(tail), index),
        request(shared + b, len(shared + b) * block_tokens + draw(tail), index + draw(st.integers(1, 50))),
    )


@settings(max_examples=300, deadline=None)
@given(pairs_of_requests(), st.integers(0, 2**64))
def test_token_prefixes_are_equal_exactly_where_id_prefixes_are(
    case: tuple[int, int, TraceRequest, TraceRequest], seed: int
) -> None:
    block_tokens, vocabulary, a, b = case
    source = TokenSource(block_tokens, vocabulary, seed)
    tokens_a, tokens_b = source.tokens(a), source.tokens(b)
    assert tokens_a.size == a.input_tokens
    assert max(tokens_a.max(initial=0), tokens_b.max(initial=0)) < vocabulary

    blocks = common_prefix(block_ids(a.runs), block_ids(b.runs))
    tokens = common_prefix(tokens_a, tokens_b)
    blocks_of_shorter, blocks_of_longer = sorted((len(a.runs), len(b.runs)))
    if blocks < blocks_of_shorter:  # two blocks differ
        assert blocks * block_tokens <= tokens < (blocks + 1) * block_tokens
    elif blocks < blocks_of_longer:  # a block against a tail or an end
        assert tokens == blocks * block_tokens
    else:  # two tails
        tail = min(a.input_tokens, b.input_tokens) - blocks * block_tokens
        spelled = (vocabulary // 2) ** tail
        assert blocks * block_tokens <= tokens
        assert tail == 0 or max(a.index, b.index) >= spelled or tokens < blocks * block_tokens + tail


def test_equal_requests_have_equal_tokens_and_seeds_differ() -> None:
    one = request([1, 2, 3], 3 * 64 + 17, index=5)
    tokens = TokenSource(64, 5000, seed=1).tokens(one)
    assert np.array_equal(tokens, TokenSource(64, 5000, seed=1).tokens(one))
    assert common_prefix(tokens, TokenSource(64, 5000, seed=2).tokens(one)) < 64


def test_tokens_are_spread_over_the_vocabulary() -> None:
    tokens = TokenSource(512, 1000).tokens(request(list(range(400)), 400 * 512)).reshape(400, 512)
    counts = np.bincount(tokens[:, 4:].reshape(-1), minlength=500)  # four digits spell the id
    assert counts.size == 500  # blocks use the lower half
    assert counts.min() > 300  # 406 expected, standard deviation 20
    assert counts.max() < 510


def test_tokens_do_not_depend_on_how_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = request(list(range(50)), 50 * 7 + 3)
    tokens = TokenSource(7, 248_320).tokens(one)
    monkeypatch.setattr(traces, "_CHUNK", 8)
    assert np.array_equal(tokens, TokenSource(7, 248_320).tokens(one))


def test_tokens_are_pinned() -> None:
    """Frames that an earlier run left behind stay valid only while the same request has the same tokens."""
    tokens = TokenSource(8, 248_320, seed=3).tokens(request([0, 2**32 - 1], 19, index=7))
    assert tokens.tolist() == [
        2816,
        23150,
        62704,
        7507,
        74018,
        42106,
        4941,
        52045,
        27391,
        57742,
        43476,
        58861,
        1807,
        110130,
        97999,
        112298,
        182926,
        152399,
        155957,
    ]


def test_splitmix64_against_its_published_sequence() -> None:
    counters = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 4, dtype=np.uint64)  # seed 0
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert traces._splitmix64(counters).tolist() == expected


def test_next_turn_of_a_token_trace_starts_with_the_answer() -> None:
    source = TokenSource(1, 100)
    first = TraceRequest(0, 0.0, 5, 3, ((0, 5),), ((20, 3),))
    second = TraceRequest(1, 1.0, 10, 1, ((0, 5), (20, 3), (60, 2)))
    prefix = np.concatenate([source.tokens(first), source.output_token_array(first)])
    assert common_prefix(prefix, source.tokens(second)) == 8
    assert source.output_token_array(second).size == 0


def test_an_id_that_cannot_be_spelled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocabulary of 256 .* block id 256 .* only ids below 256"):
        TokenSource(1, 256).tokens(request([3, 256], 2))
    with pytest.raises(ConfigError, match="only ids below 4"):
        TokenSource(2, 4).tokens(request([4], 2))
    assert TokenSource(2, 4).tokens(request([3], 2)).tolist() != TokenSource(2, 4).tokens(request([2], 2)).tolist()


@pytest.mark.parametrize("vocabulary", [-1, 0, 1, 2**32 + 1])
def test_vocabulary_out_of_range(vocabulary: int) -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        TokenSource(512, vocabulary)
