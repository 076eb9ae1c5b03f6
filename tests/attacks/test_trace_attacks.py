"""Bad traces: each a TraceError of one line that names file, line and field; nothing hangs, nothing grows."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiered_cache.errors import TraceError
from tiered_cache.replay import traces
from tiered_cache.replay.traces import BLOCK_TOKENS_MAX, LINE_BYTES_MAX, REQUEST_TOKENS_MAX, Trace

GOOD = {"timestamp": 1000, "input_length": 130, "output_length": 4, "runs": [[0, 2]]}


def refusal(path: Path, block_tokens: int | None = 64) -> str:
    """The message of the TraceError that reading `path` ends with."""
    with pytest.raises(TraceError) as caught:
        list(Trace(path, block_tokens))
    message = str(caught.value)
    assert message.isprintable()  # so it is one line
    assert len(message) < 500 + len(str(path))
    assert path.name in message
    return message


BAD_FIELDS = [
    # missing
    *[({k: v for k, v in GOOD.items() if k != name}, name) for name in GOOD],
    # timestamp
    (GOOD | {"timestamp": -1}, "timestamp"),
    (GOOD | {"timestamp": "0"}, "timestamp"),
    (GOOD | {"timestamp": True}, "timestamp"),
    (GOOD | {"timestamp": None}, "timestamp"),
    (GOOD | {"timestamp": 1e300}, "timestamp"),
    (GOOD | {"timestamp": 10**400}, "timestamp"),
    (GOOD | {"timestamp": 999}, "timestamp: 999 is before the previous request's 1000"),
    # lengths
    (GOOD | {"input_length": -130}, "input_length"),
    (GOOD | {"input_length": 0, "runs": []}, "input_length"),
    (GOOD | {"input_length": 130.0}, "input_length"),
    (GOOD | {"input_length": "130"}, "input_length"),
    (GOOD | {"input_length": True}, "input_length"),
    (GOOD | {"input_length": [130]}, "input_length"),
    (GOOD | {"input_length": REQUEST_TOKENS_MAX + 1}, "input_length"),
    (GOOD | {"input_length": 10**4000}, "input_length"),
    (GOOD | {"output_length": -1}, "output_length"),
    (GOOD | {"output_length": False}, "output_length"),
    (GOOD | {"output_length": REQUEST_TOKENS_MAX + 1}, "output_length"),
    # ids that do not fit the length: 130 tokens are 2 full blocks of 64 and a partial one
    (GOOD | {"runs": [[0, 1]]}, "runs: 1 ids, but input_length 130 is 2 blocks of 64 tokens and 2 tokens more"),
    (GOOD | {"runs": [[0, 4]]}, "runs: 4 ids"),
    (GOOD | {"input_length": 128, "runs": [[0, 3]]}, "runs: 3 ids"),
    (GOOD | {"runs": []}, "runs: 0 ids"),
    (GOOD | {"runs": [[0, 2**32]]}, "runs: 4294967296 ids"),
    (GOOD | {"runs": [[0, 2**31]] * 10_000}, "runs"),
    # runs
    (GOOD | {"runs": None}, "runs"),
    (GOOD | {"runs": {"0": 2}}, "runs"),
    (GOOD | {"runs": "ab"}, "runs"),
    (GOOD | {"runs": [0, 2]}, "runs: 0 is not [first id, count]"),
    (GOOD | {"runs": [[0]]}, "runs"),
    (GOOD | {"runs": [[0, 1, 1]]}, "runs"),
    (GOOD | {"runs": [[-1, 2]]}, "runs, first id"),
    (GOOD | {"runs": [[2**32, 2]]}, "runs, first id"),
    (GOOD | {"runs": [[0.0, 2]]}, "runs, first id"),
    (GOOD | {"runs": [[0, 0], [0, 2]]}, "runs, count"),
    (GOOD | {"runs": [[0, 3], [5, -1]]}, "runs, count"),
    (GOOD | {"runs": [[0, True], [1, True]]}, "runs, count"),
    (GOOD | {"runs": [[2**32 - 1, 2]]}, "runs, count"),
    # hash_ids
    (GOOD | {"hash_ids": [0, 1]}, "hash_ids, runs: both"),
    *[
        ({"timestamp": 1000, "input_length": 130, "output_length": 4, "hash_ids": ids}, "hash_ids")
        for ids in ([0], [0, 1, 2, 3], [0, -1], [0, 2**32], [0, "1"], [0, 1.0], [0, True], [0, None], [[0], 1], "01", 7)
    ],
    # the rest
    (GOOD | {"session": -1}, "session"),
    (GOOD | {"session": "a"}, "session"),
    (GOOD | {"session": None}, "session"),
    (GOOD | {"turn": 2**63}, "turn"),
    (GOOD | {"turn": True}, "turn"),
    (GOOD | {"out_runs": [[0, 4]]}, "out_runs: only where a block is one token"),
]


@pytest.mark.parametrize(("fields", "expected"), BAD_FIELDS)
def test_bad_field(tmp_path: Path, fields: dict[str, object], expected: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(fields)}\n")
    message = refusal(path)
    assert "bad.jsonl: line 2: " in message
    assert expected in message


@pytest.mark.parametrize("out_runs", [[], [[9, 3]], [[9, 5]], [[9, 4], [3, 1]], [[-1, 4]], 4])
def test_bad_out_runs(tmp_path: Path, out_runs: object) -> None:
    path = tmp_path / "bad_tok.jsonl"
    path.write_text(json.dumps(GOOD | {"input_length": 2, "out_runs": out_runs}))
    assert "line 1: out_runs" in refusal(path, None)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"not json",
        b"{",
        b"[1, 2]",
        b"17",
        b"null",
        b'"{}"',
        json.dumps(GOOD).encode()[:-1],
        json.dumps(GOOD).encode() * 2,
        json.dumps(GOOD | {"timestamp": float("nan")}).encode(),
        json.dumps(GOOD | {"timestamp": float("inf")}).encode(),
        json.dumps(GOOD | {"output_length": float("-inf")}).encode(),
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        json.dumps(GOOD).encode("utf-16"),
        b'{"timestamp": "\xff"}',
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b'{"timestamp": ' + b"9" * 5000 + b"}",
        b'"\\ud800\\n\x1b[31m"',
        b'["\\u001b[31m\\n\\ud800"]',
        b"__import__('os').abort()",
        pickle.dumps(GOOD),
        b"\x00" * 100,
    ],
    ids=lambda line: repr(line[:24]),
)
def test_bad_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n" + json.dumps(GOOD).encode())
    assert "bad.jsonl: line 2: not " in refusal(path)


def test_requests_before_a_bad_line_are_sound(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\nnonsense\n")
    requests = iter(Trace(path, 64))
    assert [next(requests).index, next(requests).index] == [0, 1]
    with pytest.raises(TraceError, match="line 3"):
        next(requests)


def test_bad_first_line_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad_b64.jsonl"
    path.write_text("nonsense\n")
    with pytest.raises(TraceError, match=r"bad_b64\.jsonl: line 1: not JSON"):
        Trace(path)


@pytest.mark.parametrize("cut", [1, 2, 5, 9, 11, 40, -1, -4, -8, -9])
def test_truncated_gzip(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.jsonl.gz"
    lines = "".join(json.dumps(GOOD | {"output_length": n}) + "\n" for n in range(50))
    path.write_bytes(gzip.compress(lines.encode())[:cut])
    assert "line " in refusal(path)


def test_flipped_gzip_is_never_another_error(tmp_path: Path) -> None:
    lines = "".join(json.dumps(GOOD | {"output_length": n}) + "\n" for n in range(50))
    sound = gzip.compress(lines.encode(), mtime=0)
    path = tmp_path / "flip.jsonl.gz"
    for at in range(10, len(sound)):  # the header before holds a name, a time and flags that may differ
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x10]) + sound[at + 1 :])
        refusal(path)


def test_garbage_after_gzip(tmp_path: Path) -> None:
    path = tmp_path / "tail.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode() + b"\n") + b"garbage")
    assert "line 2" in refusal(path)


@pytest.mark.parametrize("byte", [b"\x00", b" ", b"["], ids=repr)
def test_gzip_bomb_in_one_line_is_read_no_further_than_the_limit(tmp_path: Path, byte: bytes) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(byte * LINE_BYTES_MAX, 1) * 16)  # 256 MiB of one line
    tracemalloc.start()
    try:
        assert f"line 1: longer than {LINE_BYTES_MAX} bytes" in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * LINE_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_too_many_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "REQUESTS_MAX", 3)
    path = tmp_path / "many.jsonl"
    path.write_text((json.dumps(GOOD) + "\n") * 3)
    assert len(list(Trace(path, 64))) == 3
    path.write_text((json.dumps(GOOD) + "\n") * 4)
    assert "line 4: more than 3 requests" in refusal(path)
    with pytest.raises(TraceError, match="line 4: more than 3 requests"):
        Trace(path, 64).count_requests()


@pytest.mark.parametrize("content", [b"", gzip.compress(b"")], ids=["plain", "gzip"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty_b64.jsonl"
    path.write_bytes(content)
    assert "empty_b64.jsonl: empty" in refusal(path)
    assert "empty_b64.jsonl: empty" in refusal(path, None)


@pytest.mark.parametrize("name", ["missing.jsonl", "nul\0.jsonl", "x" * 300, "missing/t.jsonl"])
def test_path_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError) as caught:
        Trace(tmp_path / name, 64)
    assert str(caught.value).isprintable()


def test_name_with_a_newline_stays_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file") as caught:
        Trace(tmp_path / "two\nlines\udcff.jsonl", 64)
    assert str(caught.value).isprintable()


def test_directory_pipe_and_device(tmp_path: Path) -> None:
    assert "not a regular file" in refusal(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in refusal(pipe)
    assert "not a regular file" in refusal(Path("/dev/zero"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "secret.jsonl"
    path.write_text(json.dumps(GOOD))
    path.chmod(0)
    assert "Permission denied" in refusal(path)


@pytest.mark.parametrize("block_tokens", [0, -64, BLOCK_TOKENS_MAX + 1])
def test_block_size_out_of_range(tmp_path: Path, block_tokens: int) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD))
    assert f"not {block_tokens}" in refusal(path, block_tokens)


@pytest.mark.parametrize("name", ["t_b0.jsonl", "t_b999999999.jsonl.gz"])
def test_block_size_in_the_name_out_of_range(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(GOOD))
    assert "a block has 1 to" in refusal(path, None)


@pytest.mark.parametrize("name", ["t.jsonl", "t_b.jsonl", "t_b9999999999.jsonl", "t_b64.jsonl\n", "tok.jsonl"])
def test_block_size_unknown(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(GOOD))
    with pytest.raises(TraceError, match="block size unknown") as caught:
        Trace(path)
    assert str(caught.value).isprintable()


def test_wrong_block_size_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t_b64.jsonl"
    path.write_text(json.dumps(GOOD | {"input_length": 6400, "runs": [[0, 100]]}))
    assert "runs: 100 ids" in refusal(path, 16)
    assert "runs: 100 ids" in refusal(path, 512)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=2),
    max_leaves=8,
)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    field=st.sampled_from(["timestamp", "input_length", "output_length", "runs", "hash_ids", "out_runs", "session"]),
    value=JSON_VALUES,
    block_tokens=st.sampled_from([1, 64]),
)
def test_any_value_in_any_field_is_read_or_refused(
    tmp_path: Path, field: str, value: object, block_tokens: int
) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_text(json.dumps(GOOD | {field: value}))
    try:
        (request,) = Trace(path, block_tokens)
    except TraceError:
        assert "fuzz.jsonl: line 1: " in refusal(path, block_tokens)
    else:
        assert sum(count for _, count in request.runs) == request.input_tokens // block_tokens


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(content=st.binary(max_size=200), gzipped=st.booleans())
def test_any_bytes_are_refused(tmp_path: Path, content: bytes, gzipped: bool) -> None:
    path = tmp_path / "fuzz.jsonl"
    path.write_bytes(gzip.compress(content) if gzipped else content)
    refusal(path)
