"""Request traces: reading them, and the tokens that their requests stand for.

A trace is JSON lines, plain or gzip, one request a line in order of arrival. It holds lengths and block ids, never
text. Two formats are read:

- Mooncake's: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (one id a block of 512 tokens);
- runs: `runs` in place of `hash_ids`, `[[first id, count], ...]`, and where known `session`, `turn`, and
  `out_runs` (the decoded tokens, only where a block is one token).

Ids are chained by prefix: equal ids mean equal prefixes up to the end of that block. Only full blocks count: the
id of a last, partial block is dropped, since it never recurs and would make every turn look like a branch.

A trace is data from elsewhere. Whatever is wrong with it is a `TraceError` of one line that names the file, the line
and the field, and no number in it decides how much is allocated before that number was checked.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import reprlib
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import numpy.typing as npt

from tiered_cache.errors import ConfigError, TraceError

LINE_BYTES_MAX: Final = 16 << 20
REQUESTS_MAX: Final = 1 << 24
REQUEST_TOKENS_MAX: Final = 16 << 20  # of a prompt, and of an answer
BLOCK_TOKENS_MAX: Final = 1 << 20
BLOCK_ID_MAX: Final = 2**32 - 1
TIMESTAMP_MS_MAX: Final = 2**53  # whole milliseconds are exact in a double up to here
SESSION_MAX: Final = 2**63 - 1  # of `turn` too

MOONCAKE_BLOCK_TOKENS: Final = 512
SAMPLE_PATH: Final = Path(__file__).parent / "data" / "mooncake_conversation_sample_b512.jsonl.gz"

Runs = tuple[tuple[int, int], ...]  # (first id, count) pairs; adjacent runs are joined, so equal ids are equal runs


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    `index` counts from 0 in the file. `runs` are the ids of the `input_tokens // block_tokens` full blocks,
    `output_runs` those of the `output_tokens` decoded tokens, empty where the trace does not tell them.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    runs: Runs
    output_runs: Runs = ()
    session: int | None = None
    turn: int | None = None


def block_ids(runs: Runs) -> npt.NDArray[np.uint32]:
    """The ids of `runs`, one by one."""
    if not runs:
        return np.empty(0, np.uint32)
    return np.concatenate([np.arange(first, first + count, dtype=np.uint32) for first, count in runs])


class Trace:
    """A trace file. Iterating reads it from its start, line by line, as often as wanted.

    A block has `block_tokens` tokens, else what the file's name says (`..._b64.jsonl.gz`; `..._tok.jsonl` is 1), else
    Mooncake's 512 where the first line has `hash_ids`. Gzip is known by its first bytes, not by its name.

    Raises `TraceError`: at once where the file cannot be read or its first line is no request, while iterating at a
    later line; the requests before that line were sound.
    """

    def __init__(self, path: Path | str, block_tokens: int | None = None) -> None:
        self.path: Final = Path(path)
        if block_tokens is None:
            block_tokens = _block_tokens_of_name(self.path.name)
        if block_tokens is None:
            block_tokens = self._block_tokens_of_format()
        if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
            raise self._error(f"a block has 1 to {BLOCK_TOKENS_MAX} tokens, not {block_tokens}")
        self.block_tokens: Final = block_tokens
        next(iter(self))

    def __iter__(self) -> Iterator[TraceRequest]:
        timestamp_ms = 0.0
        for number, line in self._lines():
            try:
                fields = _json_object(line)
                timestamp_ms = _timestamp_ms(fields, timestamp_ms)
                request = _request(number - 1, timestamp_ms, fields, self.block_tokens)
            except _LineError as error:
                raise self._error(str(error), number) from None
            yield request

    def count_requests(self) -> int:
        """The number of lines. Reads the whole file (12 ms for 12,000 requests) but parses nothing."""
        return sum(1 for _ in self._lines())

    def _block_tokens_of_format(self) -> int:
        number, line = next(self._lines())
        try:
            if "hash_ids" in _json_object(line):
                return MOONCAKE_BLOCK_TOKENS
        except _LineError as error:
            raise self._error(str(error), number) from None
        raise self._error("block size unknown: pass it, or name the file like trace_b64.jsonl (trace_tok.jsonl for 1)")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Pairs of line number (from 1) and line, at least one; a line has at most `LINE_BYTES_MAX` bytes."""
        number = 0
        with self._open() as file:
            try:
                # GzipFile decompresses no further than it is read, so a bomb stops at the limit of its line.
                gzipped = file.peek(2)[:2] == b"\x1f\x8b"
                stream: gzip.GzipFile | io.BufferedReader = gzip.GzipFile(fileobj=file) if gzipped else file
                while line := stream.readline(LINE_BYTES_MAX + 1):
                    number += 1
                    if len(line) > LINE_BYTES_MAX:
                        raise self._error(f"longer than {LINE_BYTES_MAX} bytes", number)
                    if number > REQUESTS_MAX:
                        raise self._error(f"more than {REQUESTS_MAX} requests", number)
                    yield number, line
            except (OSError, EOFError, zlib.error) as error:
                raise self._error(str(error), number + 1) from error
        if number == 0:
            raise self._error("empty: no request in it")

    def _open(self) -> io.BufferedReader:
        try:
            # Opening a pipe would wait for its writer, and a device may have no end.
            file = self.path.open("rb") if stat.S_ISREG(self.path.stat().st_mode) else None
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise self._error(str(getattr(error, "strerror", None) or error)) from error
        if file is None:
            raise self._error("not a regular file")
        return file

    def _error(self, message: str, line: int | None = None) -> TraceError:
        name = str(self.path)
        shown = name if name.isprintable() else repr(name)  # a name with a newline would split the message
        return TraceError(f"{shown}: {message}" if line is None else f"{shown}: line {line}: {message}")


class _LineError(ValueError):
    """What is wrong with one line; `Trace` adds file and line."""


def _block_tokens_of_name(name: str) -> int | None:
    found = re.search(r"_(?:b([0-9]{1,9})|tok)(?:\.jsonl?)?(?:\.gz)?\Z", name)
    if found is None:
        return None
    return 1 if found[1] is None else int(found[1])


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_object(line: bytes) -> dict[str, object]:
    try:
        value = _DECODER.decode(line.decode())
    except json.JSONDecodeError as error:
        raise _LineError(f"not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, NaN, thousands of digits, nested too deeply
        raise _LineError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _LineError(f"not a JSON object but {reprlib.repr(value)}")
    return value


def _timestamp_ms(fields: Mapping[str, object], previous_ms: float) -> float:
    value = _field(fields, "timestamp")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= TIMESTAMP_MS_MAX:
        raise _LineError(f"timestamp: {reprlib.repr(value)} is not a number from 0 to {TIMESTAMP_MS_MAX}")
    if value < previous_ms:
        raise _LineError(f"timestamp: {value} is before the previous request's {previous_ms}")
    return value


def _request(index: int, timestamp_ms: float, fields: Mapping[str, object], block_tokens: int) -> TraceRequest:
    input_tokens = _integer(_field(fields, "input_length"), "input_length", 1, REQUEST_TOKENS_MAX)
    output_tokens = _integer(_field(fields, "output_length"), "output_length", 0, REQUEST_TOKENS_MAX)
    if ("hash_ids" in fields) == ("runs" in fields):
        raise _LineError(f"hash_ids, runs: {'both' if 'runs' in fields else 'neither'} given, one expected")
    field = "hash_ids" if "hash_ids" in fields else "runs"
    runs = _id_runs(fields[field], field) if field == "hash_ids" else _runs(fields[field], field)
    full_blocks, rest = divmod(input_tokens, block_tokens)
    blocks = sum(count for _, count in runs)
    if blocks - full_blocks not in ({0, 1} if rest else {0}):
        raise _LineError(
            f"{field}: {blocks} ids, but input_length {input_tokens} is {full_blocks} blocks of {block_tokens} "
            f"tokens and {rest} tokens more"
        )
    output_runs: list[tuple[int, int]] = []
    if "out_runs" in fields:
        if block_tokens != 1:
            raise _LineError(f"out_runs: only where a block is one token, not {block_tokens}")
        output_runs = _runs(fields["out_runs"], "out_runs")
        decoded = sum(count for _, count in output_runs)
        if decoded != output_tokens:
            raise _LineError(f"out_runs: {decoded} ids, but output_length is {output_tokens}")
    return TraceRequest(
        index=index,
        arrival_s=timestamp_ms / 1000,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        runs=_joined(runs, full_blocks),
        output_runs=_joined(output_runs, output_tokens),
        session=_integer(fields["session"], "session", 0, SESSION_MAX) if "session" in fields else None,
        turn=_integer(fields["turn"], "turn", 0, SESSION_MAX) if "turn" in fields else None,
    )


def _field(fields: Mapping[str, object], name: str) -> object:
    if name not in fields:
        raise _LineError(f"{name}: missing")
    return fields[name]


def _integer(value: object, field: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:  # a bool is an int, so isinstance will not do
        raise _LineError(f"{field}: {reprlib.repr(value)} is not an integer from {low} to {high}")
    return value


def _list(value: object, field: str) -> list[object]:
    if not isinstance(value, list):
        raise _LineError(f"{field}: {reprlib.repr(value)} is not a list")
    return value


def _id_runs(value: object, field: str) -> list[tuple[int, int]]:
    return [(_integer(block_id, field, 0, BLOCK_ID_MAX), 1) for block_id in _list(value, field)]


def _runs(value: object, field: str) -> list[tuple[int, int]]:
    runs = []
    for run in _list(value, field):
        if not isinstance(run, list) or len(run) != 2:
            raise _LineError(f"{field}: {reprlib.repr(run)} is not [first id, count]")
        first = _integer(run[0], f"{field}, first id", 0, BLOCK_ID_MAX)
        runs.append((first, _integer(run[1], f"{field}, count", 1, BLOCK_ID_MAX + 1 - first)))
    return runs


def _joined(runs: Iterable[tuple[int, int]], ids: int) -> Runs:
    """The first `ids` ids of `runs`, adjacent runs joined."""
    joined: list[tuple[int, int]] = []
    for first, available in runs:
        count = min(available, ids)
        if count == 0:
            break
        ids -= count
        if joined and sum(joined[-1]) == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return tuple(joined)


class TokenSource:
    """Tokens for the requests of one trace: equal prefixes of block ids, and only they, give equal tokens.

    A pure function of block size, vocabulary, seed and request: any process makes the same tokens in any order.

    The first tokens of a block spell its id in digits, so different ids differ whatever the vocabulary; SplitMix64
    fills the rest. What follows the last full block spells the request's index in the same way, and where a block
    has several tokens, blocks use the lower and tails the upper half of the vocabulary: a tail equals no part of
    a block, and no other request's tail unless it is too short to spell the index.

    Raises `ConfigError` for a vocabulary outside 2 to 2**32 and, from the methods, for an id that a block is too
    short to spell: with blocks of one token, ids must lie below the vocabulary.
    """

    def __init__(self, block_tokens: int, vocabulary: int, seed: int = 0) -> None:
        if not 2 <= vocabulary <= 2**32:
            raise ConfigError(f"a vocabulary of {vocabulary} token ids is not one of 2 to {2**32}")
        self.block_tokens: Final = block_tokens
        self.vocabulary: Final = vocabulary
        tail_ids = vocabulary // 2 if block_tokens > 1 else 0  # blocks of one token leave no tail
        block_key, tail_key = _splitmix64(np.array([2 * seed % 2**64, (2 * seed + 1) % 2**64], _U64)).tolist()
        self._block_alphabet = _Alphabet(0, vocabulary - tail_ids, block_key)
        self._tail_alphabet = _Alphabet(vocabulary - tail_ids, tail_ids, tail_key)

    def tokens(self, request: TraceRequest) -> npt.NDArray[np.uint32]:
        """The prompt's `input_tokens` token ids."""
        tokens = np.empty(request.input_tokens, np.uint32)
        ids = block_ids(request.runs)
        end = ids.size * self.block_tokens
        self._spell_blocks(ids, tokens[:end])
        if end < tokens.size:
            self._tail_alphabet.spell(np.array([request.index], _U64), tokens[end:].reshape(1, -1))
        return tokens

    def output_token_array(self, request: TraceRequest) -> npt.NDArray[np.uint32]:
        """The answer's token ids: `output_tokens` of them, or none where the trace does not tell them."""
        ids = block_ids(request.output_runs)
        tokens = np.empty(ids.size * self.block_tokens, np.uint32)
        self._spell_blocks(ids, tokens)
        return tokens

    def _spell_blocks(self, ids: npt.NDArray[np.uint32], out: npt.NDArray[np.uint32]) -> None:
        spelled = self._block_alphabet.words(self.block_tokens)
        if ids.size and (id_max := int(ids.max())) >= spelled:
            raise ConfigError(
                f"a vocabulary of {self.vocabulary} token ids cannot tell block id {id_max} from others in blocks of "
                f"{self.block_tokens} tokens: only ids below {spelled}"
            )
        self._block_alphabet.spell(ids.astype(_U64), out.reshape(ids.size, self.block_tokens))


_U64: Final = np.dtype("<u8")  # of declared byte order, since pairs of token ids are read from its halves
_CHUNK: Final = 1 << 14  # u64s that are mixed at a time; two such arrays fit the L2 cache
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_LOW_HALF: Final = np.uint64(0xFFFFFFFF)
_HIGH_HALF: Final = np.uint64(0xFFFFFFFF00000000)


@dataclass(frozen=True, slots=True)
class _Alphabet:
    """The token ids from `first` to `first + size`, in which words (integers below 2**32) are spelled."""

    first: int
    size: int
    key: int

    def words(self, length: int) -> int:
        """How many words `length` tokens tell apart, up to 2**32."""
        return int(min(self.size ** min(length, 32), 2**32))

    def spell(self, words: npt.NDArray[np.uint64], out: npt.NDArray[np.uint32]) -> None:
        """Write each of the words over its row of `out`, shape (words, length)."""
        length = out.shape[1]
        digits = next(n for n in range(1, 33) if n in (length, 32) or self.size**n >= 2**32)
        if digits < length:
            self._fill(words, out)
        shifts = _splitmix64(_GAMMA * np.arange(digits, dtype=_U64) + np.uint64(self.key)) & _LOW_HALF
        size = np.uint64(self.size)
        for digit in range(digits):
            out[:, digit] = (words + shifts[digit]) % size + np.uint64(self.first)
            words = words // size

    def _fill(self, words: npt.NDArray[np.uint64], out: npt.NDArray[np.uint32]) -> None:
        """Fill `out` from counters (word, column // 2): each mixed u64 gives two token ids."""
        length = out.shape[1]
        columns = _GAMMA * np.arange(-(-length // 2), dtype=_U64) + np.uint64(self.key)
        rows = max(1, _CHUNK // columns.size)
        size = np.uint64(self.size)
        for start in range(0, len(words), rows):
            mixed = _splitmix64(np.add.outer((words[start : start + rows] << np.uint64(32)) * _GAMMA, columns))
            # A 32-bit half times size, shifted right by 32, is below size (Lemire, arXiv 1805.10941): no division.
            low = mixed & _LOW_HALF
            low *= size
            low >>= np.uint64(32)
            mixed >>= np.uint64(32)
            mixed *= size
            mixed &= _HIGH_HALF
            mixed |= low
            out[start : start + rows] = mixed.view("<u4")[:, :length]
            if self.first:
                out[start : start + rows] += np.uint32(self.first)


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), in place."""
    scratch = np.empty_like(state)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        np.right_shift(state, np.uint64(shift), out=scratch)
        state ^= scratch
        if factor is not None:
            state *= np.uint64(factor)
    return state
