"""`ObjectStoreTier`: one object an entry, in any store that obstore speaks to (the `s3` extra).

    entries/<path>.blob
    quarantine/<path>.blob.<time, 16 hex>.<reason>
    catalogue/<name>                                  notes, which are no entries and are not charged

A put is one request that creates or fails, so an object is whole or not there; on S3 it carries a SHA-256 that the
store checks. Requests run in an executor that is handed in, whose threads bound how many are under way. Each has a
timeout and a few retries, of what can succeed the second time and nothing else (`open_store`); each call has a
deadline besides. What still runs then touches no buffer of the caller any more, and is charged for what it creates.

The credentials need the rights to read, write, delete and list: without the last, S3 answers 403 for what is not there.

Stores differ, callers do not see it: past the end is an empty answer, deleting what is not there is no error, and a
name that is taken is `EXISTS`. Only the store's own "not there" is an absence.

Within one process, changes of one name follow each other. What other processes do meanwhile is seen by the next
listing, and by whoever asks for an object that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, wait
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from tiered_cache.deadline import wait_s
from tiered_cache.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    FrameNotFoundError,
    TieredCacheError,
    TierError,
)
from tiered_cache.tiers.arena import Arena, aligned_empty
from tiered_cache.tiers.base import (
    Durability,
    GetAnswer,
    GetRequest,
    PutItem,
    PutOutcome,
    QuarantinedEntry,
    Reservation,
    Tier,
    TierEntry,
    TierUsage,
    is_path,
    reason_slug,
)
from tiered_cache.tiers.object_budget import LocalBudget, ObjectBudget

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import S3Config

SCHEMES = ("s3", "gs", "az", "file", "memory")
ENTRY_BYTES = 512
"""Charged for an object's name and metadata."""
ENTRY_BYTES_MAX = 5 << 30
"""What S3 takes in one put."""
SUFFIX = ".blob"
STAGED_GRACE_S = 600.0
"""After so long without a write, a file that was to become an object is one that a killed process has left."""
_STAGED = re.compile(r".+#[0-9]+")
_QUARANTINED = re.compile(
    rf"quarantine/(?P<path>.+){re.escape(SUFFIX)}\.(?P<time>[0-9a-f]{{16}})\.(?P<reason>[a-z0-9-]{{1,24}})"
)
_CHUNK_BYTES = 1 << 20  # of a body, copied while it is in the processor's cache
_BUFFERS_BYTES = 64 << 20
_LIST_TOGETHER = 1000
_DELETE_TOGETHER = 32
NOTE_BYTES_MAX = 4096
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_TIMED_OUT = re.compile(r"kind: Timeout|TimedOut|timed out")
_RETRYABLE_STATUS = {408, 409, 425, 429}
_REFUSED_STATUS = {401, 403}
_FULL_STATUS = 507
_NO_SPACE = "No space left on device"

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


def open_store(
    url: str,
    options: Mapping[str, str] | None = None,
    *,
    request_timeout_s: float = 10.0,
    retries: int = 3,
    retry_timeout_s: float = 20.0,
    creates: bool = True,
) -> ObjectStore:
    """The store behind s3://, gs://, az://, file:// or memory://, below the URL's path.

    Credentials, endpoint and region come from the store's usual environment variables and from `options`, which win
    (`endpoint`, `region`, `access_key_id` and so on). Connection errors, timeouts of reads, 429 and 5xx are retried
    after 50 ms, doubled each time, up to `retries` times and until `retry_timeout_s`. A directory at file:// that is
    not there is made if `creates`. Raises `ConfigError`.
    """
    try:
        scheme, host = urlsplit(url).scheme, urlsplit(url).hostname or ""
    except ValueError as error:
        raise ConfigError(f"an object store's URL that is none: {error}") from None
    if scheme not in SCHEMES:
        raise ConfigError(f"object store {scheme}://: none of {', '.join(SCHEMES)}")
    try:
        if scheme == "memory":
            return MemoryStore()
        if scheme == "file":
            if not creates and not Path(url2pathname(urlsplit(url).path)).is_dir():
                raise ConfigError(f"{url}: there is no such directory")
            return LocalStore.from_url(url, mkdir=creates)
        config = dict(options or {})
        if scheme == "s3":
            config.setdefault("checksum_algorithm", "SHA256")
        endpoints = [*(v for k, v in config.items() if "endpoint" in k), *map(os.environ.get, _ENDPOINT_VARIABLES)]
        return from_url(
            url,
            config=cast("S3Config", config),  # or of Google's or Azure's keys: the store checks them
            client_options={
                "allow_http": any(e is not None and e.startswith("http://") for e in endpoints),
                "connect_timeout": timedelta(seconds=min(5.0, request_timeout_s)),
                "timeout": timedelta(seconds=request_timeout_s),
            },
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=retry_timeout_s),
                "backoff": {
                    "init_backoff": timedelta(milliseconds=50),
                    "max_backoff": timedelta(seconds=2),
                    "base": 2,
                },
            },
        )
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"object store {scheme}://{host}: {_told(error)}") from None


def durability_of(url: str) -> Durability:
    """What entries behind a URL survive, as far as the URL tells."""
    return {"memory": Durability.HOST, "file": Durability.DISK}.get(urlsplit(url).scheme, Durability.OBJECT)


class ObjectStoreTier(Tier):
    """Entries as objects of `store`, within `budget` (bytes, or who grants them).

    The tier waits for the executor's threads, so they must not call it; with `owns_executor` it is shut down when the
    tier is closed. Every call ends after `deadline_s`, a listing after so long for each page. Nothing is asked of the
    store before the first call.
    """

    def __init__(
        self,
        store: ObjectStore,
        budget: ObjectBudget | int,
        executor: Executor,
        *,
        name: str = "object",
        durability: Durability = Durability.OBJECT,
        owns_executor: bool = False,
        deadline_s: float = 30.0,
        quarantine_entries: int = 64,
        quarantine_bytes: int | None = None,
        deletes: ObjectStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`deletes`: another client of the same store, for deletes, whose requests are over as `Fence` wants it."""
        self.name = name
        self.durability = durability
        self._store = store
        self._deletes = deletes or store
        self._fence: Fence | None = None
        self._budget = LocalBudget(budget) if isinstance(budget, int) else budget
        self._executor = executor
        self._owns_executor = owns_executor
        self._deadline_s = deadline_s
        self._quarantine_entries = quarantine_entries
        self._quarantine_bytes = self._budget.bytes_max // 16 if quarantine_bytes is None else quarantine_bytes
        self._clock = clock
        self._quarantine_time = 0
        self._claims = _Claims()
        self._buffers = Arena(_BUFFERS_BYTES)
        self._refused = False
        self._closed = False

    @property
    def bytes_max(self) -> int:
        return self._budget.bytes_max

    def footprint(self, bytes_: int) -> int:
        return bytes_ + ENTRY_BYTES

    def reserve(self, sizes: Sequence[int]) -> Reservation:
        """As promised; and no room is granted before it is known what the store holds."""
        self._check_open()
        need = sum(map(self.footprint, sizes))
        if not self._budget.is_counted:
            try:
                for _ in self.list():
                    pass
                self.quarantined()
            except TierError as error:
                raise CapacityError(
                    f"what the store holds cannot be counted: {error.message}", None, self.name
                ) from error
        try:
            self._budget.reserve(need)
        except CapacityError as error:
            raise CapacityError(error.message, None, self.name) from None
        return Reservation(need, self._budget.unreserve)

    def put(self, items: Sequence[PutItem], reservation: Reservation) -> Sequence[PutOutcome]:
        self._check_open()
        new: dict[str, PutItem] = {}
        for item in items:
            if not is_path(item.path):
                raise TierError("not a path", item.path, self.name)
            if item.bytes > ENTRY_BYTES_MAX:
                raise TierError(f"{item.bytes} bytes are more than one object holds", item.path, self.name)
            new.setdefault(item.path, item)
        needed = [item for item in new.values() if not self._budget.is_charged(item.path)]
        footprints = {item.path: self.footprint(item.bytes) for item in needed}
        reservation.take(sum(footprints.values()))
        call = _Call(self._deadline_s, self.name)
        try:
            self._claims.take(new, call)
        except DeadlineError:
            reservation.put_back(sum(footprints.values()))
            raise
        jobs = [partial(self._create, call, item, reservation, footprints.get(path, 0)) for path, item in new.items()]
        outcomes = dict(zip(new, _all_of(self._run(call, jobs)), strict=True))
        return [outcomes.pop(item.path, PutOutcome.EXISTS) for item in items]

    def get(self, requests: Sequence[GetRequest]) -> Sequence[GetAnswer]:
        self._check_open()
        call = _Call(self._deadline_s, self.name)
        answers = self._run(call, [partial(self._read, call, request) for request in requests])
        call.end()
        return [_as_answer(answer) for answer in answers]

    def stat(self, paths: Sequence[str]) -> Sequence[int | None]:
        self._check_open()
        call = _Call(self._deadline_s, self.name)
        return _all_of(self._run(call, [partial(self._stat, call, path) for path in paths]))

    def list(self, prefix: str = "") -> Iterator[TierEntry]:
        self._check_open()
        found: dict[str, int] = {}
        complete = False
        since = self._budget.begin_count()
        try:
            for meta in self._list_objects(f"entries/{prefix}".rpartition("/")[0]):
                path = meta["path"].removeprefix("entries/").removesuffix(SUFFIX)
                if meta["path"] == _name(path) and is_path(path) and path.startswith(prefix):
                    found[path] = self.footprint(meta["size"])
                    yield TierEntry(path, meta["size"])
            complete = not prefix
        finally:
            self._budget.end_count(found if complete else None, since)
        if complete:
            self._collect_staged()

    def delete(self, paths: Sequence[str]) -> Sequence[bool]:
        self._check_open()
        names = [*dict.fromkeys(path for path in paths if is_path(path))]
        call = _Call(self._deadline_s, self.name)
        there: dict[str, bool] = {}
        for start in range(0, len(names), _DELETE_TOGETHER):
            some = names[start : start + _DELETE_TOGETHER]
            self._look()
            self._claims.take(some, call)
            results = self._run(call, [partial(self._delete, call, path) for path in some])
            there |= zip(some, _all_of(results), strict=True)
        return [there.pop(path, False) for path in paths]

    def quarantine(self, path: str, reason: str) -> bool:
        self._check_open()
        if not is_path(path):
            return False
        call = _Call(self._deadline_s, self.name)
        self._look()
        self._claims.take([path], call)
        (moved,) = _all_of(self._run(call, [partial(self._set_aside, call, path, reason)]))
        if moved:
            self._drop_quarantined()
        return moved

    def quarantined(self) -> Sequence[QuarantinedEntry]:
        self._check_open()
        return [entry for _, entry in self._list_quarantine()]

    def usage(self) -> TierUsage:
        self._check_open()
        return self._budget.usage()

    def set_limit(self, bytes_max: int) -> int:
        self._check_open()
        return self._budget.set_limit(bytes_max)

    def expect(self, paths: Iterable[str]) -> None:
        """Other processes put these entries, in room that is reserved here: a listing that shows them charges nothing.

        Until `expect_no_more`, so often as this was called.
        """
        self._budget.expect(paths)

    def expect_no_more(self, paths: Iterable[str]) -> None:
        self._budget.expect_no_more(paths)

    def charge(self, path: str, bytes_: int, reservation: Reservation) -> None:
        """Another process has put this entry, in room that was reserved here. Raises `CapacityError` if it was not."""
        reservation.take(self.footprint(bytes_))
        self._budget.charge(path, self.footprint(bytes_), reserved=True)

    # Notes, and who may delete

    def guard(self, fence: Fence) -> None:
        """From now on no entry is deleted or set aside without this."""
        self._fence = fence

    def notes(self) -> Sequence[str]:
        """The names of the notes, those with a slash left out. Raises `TierError`, as do the others."""
        self._check_open()
        names = [meta["path"].removeprefix("catalogue/") for meta in self._list_objects("catalogue")]
        return [name for name in names if "/" not in name]

    def write_note(self, name: str, body: bytes) -> None:
        """Create a note; one that is there stays as it is."""

        def write() -> None:
            with self._errors(name, call), contextlib.suppress(AlreadyExistsError, PreconditionError):
                obstore.put(self._store, _note(name), body, mode="create", use_multipart=False)

        self._check_open()
        call = _Call(wait_s(self._deadline_s), self.name)
        _all_of(self._run(call, [write]))

    def read_note(self, name: str) -> bytes | None:
        """The beginning of a note, None if it is not there."""

        def read() -> bytes | None:
            with self._errors(name, call):
                try:
                    chunks = obstore.get(self._store, _note(name)).stream(NOTE_BYTES_MAX)
                    return bytes(next(iter(chunks), b""))[:NOTE_BYTES_MAX]
                except FileNotFoundError:
                    return None

        self._check_open()
        call = _Call(wait_s(self._deadline_s), self.name)
        (body,) = _all_of(self._run(call, [read]))
        return body

    def drop_notes(self, names: Sequence[str]) -> None:
        self._check_open()
        call = _Call(wait_s(self._deadline_s), self.name)
        _all_of(self._run(call, [partial(self._delete_now, _note(name), name) for name in names]))

    def close(self) -> None:
        self._closed = True
        if self._owns_executor:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _collect_staged(self) -> None:
        """In a directory, objects are written under another name first: remove those that nobody goes on writing."""
        root = self._store.prefix if isinstance(self._store, LocalStore) else None
        if root is None:
            return
        for file in (file for part in ("entries", "quarantine", "catalogue") for file in Path(root, part).rglob("*#*")):
            with contextlib.suppress(OSError):  # somebody else was faster
                if _STAGED.fullmatch(file.name) and self._clock() - file.lstat().st_mtime > STAGED_GRACE_S:
                    file.unlink()
                    _log.info("%s: %s was never finished, and is removed", self.name, file.name)

    # What runs in the executor

    def _run(self, call: _Call, jobs: Iterable[Callable[[], _T]]) -> Sequence[_T | TieredCacheError]:
        """Do all at once, as far as there are threads; a job that has not ended by the deadline is an error."""
        try:
            futures = [self._executor.submit(job) for job in jobs]
        except RuntimeError as error:  # the executor was shut down, which ends this tier, too
            raise TierError(f"closed: {error}", None, self.name) from error
        wait(futures, call.left_s)
        results: deque[_T | TieredCacheError] = deque()
        for future in futures:
            if not future.done():
                call.end()
                results.append(call.late())
                continue
            try:
                results.append(future.result())
            except TieredCacheError as error:
                results.append(error)
            except CancelledError:  # by whoever shut the executor down
                results.append(call.late())
        return results

    def _create(self, call: _Call, item: PutItem, reservation: Reservation, taken: int) -> PutOutcome:
        """One item; `taken` bytes of the reservation are for it, and go back if it is not created."""
        path = item.path
        try:
            if not taken and self._stat(call, path) is not None:
                return PutOutcome.EXISTS  # known before, and found without sending the body
            call.check()
            if not taken:
                reservation.take(self.footprint(item.bytes))
                taken = self.footprint(item.bytes)
            with self._errors(path, call, writes=True):
                try:
                    obstore.put(self._store, _name(path), self._joined(call, item), mode="create", use_multipart=False)
                except (AlreadyExistsError, PreconditionError):
                    bytes_ = self._stat(call, path)
                    if bytes_ is None:
                        raise TierError("others change it", path, self.name, retryable=True) from None
                    self._budget.charge(path, self.footprint(bytes_), reserved=False)
                    return PutOutcome.EXISTS
            self._budget.charge(path, taken, reserved=True)
            taken = 0
            return PutOutcome.CREATED
        finally:
            reservation.put_back(taken)
            self._claims.give_back([path])

    def _delete(self, call: _Call, path: str) -> bool:
        try:
            if self._stat(call, path) is None:
                return False
            self._remove(path)
            return True
        finally:
            self._claims.give_back([path])

    def _remove(self, path: str) -> None:
        self._delete_object(_name(path), path)
        self._budget.uncharge(path)

    def _look(self) -> None:
        if self._fence is not None:
            self._fence.look()

    def _delete_object(self, name: str, path: str) -> None:
        with nullcontext() if self._fence is None else self._fence.deleting(path):
            self._delete_now(name, path)

    def _delete_now(self, name: str, path: str) -> None:
        with self._errors(path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._deletes, name)

    def _stat(self, call: _Call, path: str) -> int | None:
        call.check()
        if not is_path(path):
            return None
        since = self._budget.moment()
        with self._errors(path, call):
            try:
                return obstore.head(self._store, _name(path))["size"]
            except FileNotFoundError:
                self._budget.uncharge(path, before=since)
                return None

    def _set_aside(self, call: _Call, path: str, reason: str) -> bool:
        try:
            bytes_ = self._stat(call, path)
            if bytes_ is None:
                return False
            self._quarantine_time = max(self._quarantine_time + 1, int(self._clock() * 1e9))
            aside = f"quarantine/{path}{SUFFIX}.{self._quarantine_time:016x}.{reason_slug(reason)}"
            with self._errors(path, call):
                obstore.copy(self._store, _name(path), aside)
            self._remove(path)
            self._budget.set_aside(aside, self.footprint(bytes_))
            return True
        finally:
            self._claims.give_back([path])

    # Reading

    def _read(self, call: _Call, request: GetRequest) -> GetAnswer:
        call.check()
        if not is_path(request.path):
            return FrameNotFoundError("not there", request.path, self.name)
        since = self._budget.moment()
        limits = [
            n for n in (request.bytes, request.into.nbytes if request.into is not None else None) if n is not None
        ]
        limit = min(limits, default=None)
        with self._errors(request.path, call):
            try:
                if limit == 0:
                    obstore.head(self._store, _name(request.path))
                    return self._target(request, 0)
                try:
                    result = obstore.get(self._store, _name(request.path), options=_range(request.offset, limit))
                except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError):
                    raise
                except BaseError:  # stores have no common word for a range past the end
                    if limit is None and not request.offset:
                        raise
                    if request.offset < obstore.head(self._store, _name(request.path))["size"]:
                        raise
                    return self._target(request, 0)
                return self._receive(call, request, result)
            except FileNotFoundError:
                self._budget.uncharge(request.path, before=since)
                return FrameNotFoundError("not there", request.path, self.name)

    def _receive(self, call: _Call, request: GetRequest, result: GetResult) -> memoryview:
        """The body, which must be what was asked for, no more and no less."""
        size = result.meta["size"]
        start, wanted = request.span(size)
        if result.range != (start, start + wanted):
            sent = f"bytes {result.range[0]} to {result.range[1]} of {size}, not {start} to {start + wanted}"
            raise TierError(f"the store sent {sent}", request.path, self.name, retryable=True)
        if wanted > ENTRY_BYTES_MAX:
            raise TierError(f"{wanted} bytes are more than one object holds", request.path, self.name)
        target = self._target(request, wanted)
        done = 0
        for chunk in result.stream(_CHUNK_BYTES):
            came = len(chunk)
            if done + came > wanted:
                raise TierError(f"more than {wanted} bytes came", request.path, self.name, retryable=True)
            call.copy(target[done : done + came], memoryview(chunk))
            done += came
        if done != wanted:
            raise TierError(f"{done} of {wanted} bytes came", request.path, self.name, retryable=True)
        return target.toreadonly() if request.into is None else target

    def _target(self, request: GetRequest, bytes_: int) -> memoryview:
        return self._buffer(bytes_) if request.into is None else request.into.cast("B")[:bytes_]

    def _joined(self, call: _Call, item: PutItem) -> memoryview:
        """A copy of the item: its buffers are the caller's again after the deadline, while they are still sent."""
        joined = self._buffer(item.bytes)
        done = 0
        for view in item.views():
            call.copy(joined[done : done + view.nbytes], view)
            done += view.nbytes
        return joined

    def _buffer(self, bytes_: int) -> memoryview:
        """A warm buffer, which comes back when the last view of it is gone, or a new one if all are lent."""
        runs = self._buffers.allocate(bytes_, in_one=True)
        if not runs:
            return aligned_empty(bytes_).data
        return self._buffers.lend(runs[0], 0, bytes_, partial(self._buffers.free_later, runs), writable=True)

    # Listing

    def _list_objects(self, directory: str) -> Iterator[ObjectMeta]:
        """Everything below, in pages, each by its own deadline."""
        stream = obstore.list(self._store, directory, chunk_size=_LIST_TOGETHER)

        def page() -> Sequence[ObjectMeta]:
            with self._errors(None, call):
                return next(stream, ())

        while True:
            call = _Call(wait_s(self._deadline_s), self.name)
            (found,) = _all_of(self._run(call, [page]))
            yield from found
            if not found:
                return

    def _list_quarantine(self) -> Sequence[tuple[str, QuarantinedEntry]]:
        """(name, entry), oldest first."""
        entries: dict[str, tuple[str, QuarantinedEntry]] = {}
        for meta in self._list_objects("quarantine"):
            match = _QUARANTINED.fullmatch(meta["path"])
            if match and is_path(match["path"]):
                entries[meta["path"]] = match["time"], QuarantinedEntry(match["path"], match["reason"], meta["size"])
        self._budget.count_aside({name: self.footprint(entry.bytes) for name, (_, entry) in entries.items()})
        ordered = sorted(entries.items(), key=lambda found: (found[1][0], found[0]))
        return [(name, entry) for name, (_, entry) in ordered]

    def _drop_quarantined(self) -> None:
        """Delete what the quarantine holds beyond its bounds."""
        entries = self._list_quarantine()
        bytes_ = sum(self.footprint(entry.bytes) for _, entry in entries)
        for index, (name, entry) in enumerate(entries):
            if len(entries) - index <= self._quarantine_entries and bytes_ <= self._quarantine_bytes:
                break
            bytes_ -= self.footprint(entry.bytes)
            self._look()
            call = _Call(self._deadline_s, self.name)
            _all_of(self._run(call, [partial(self._delete_object, name, entry.path)]))
            self._budget.drop_aside(name)

    # Errors

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("closed", None, self.name)

    @contextlib.contextmanager
    def _errors(self, path: str | None, call: _Call | None = None, *, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            failure = self._translated(error, path, writes=writes)
            failure.__cause__ = type(error)(_told(error))  # its own text is long, and may hold a signed URL
            if call is not None and isinstance(error, PermissionDeniedError | UnauthenticatedError):
                call.refuse(failure)
            raise failure from failure.__cause__
        else:
            self._refused = False

    def _translated(self, error: BaseError | OSError, path: str | None, *, writes: bool) -> TieredCacheError:
        text = str(error)
        status = int(match[1]) if (match := _STATUS.search(text)) else 0
        code = match[1] if (match := _CODE.search(text)) else ""
        answer = f"HTTP {status} {code}".rstrip() if status else _told(error)
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in _REFUSED_STATUS:
            if not self._refused:
                self._refused = True
                _log.error("tier %s: the store refuses our credentials: %s", self.name, answer)
            return TierError(f"the store refuses our credentials: {answer}", path, self.name)
        if writes and (status == _FULL_STATUS or _NO_SPACE in text):
            return CapacityError(f"the store is full: {answer}", path, self.name)
        if status:
            retryable = status >= 500 or status in _RETRYABLE_STATUS
            return TierError(f"the store answered {answer}", path, self.name, retryable)
        if _TIMED_OUT.search(text):
            return DeadlineError(f"the store did not answer in time: {answer}", path, self.name)
        return TierError(answer, path, self.name, not isinstance(error, FileNotFoundError))


class Fence(Protocol):
    """Who else may delete and acknowledge in the same store, and whether it is we; as `service.claim` has it."""

    def look(self) -> None:
        """Before deletes. Asks the store; raises `TierError`."""

    def deleting(self, path: str) -> AbstractContextManager[None]:
        """Around one, which is begun at once. Raises `TierError` if the look was too long ago, and asks nobody."""


class _Claims:
    """Names that are being changed: who wants to change one waits for its turn."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._names: set[str] = set()

    def take(self, names: Collection[str], call: _Call) -> None:
        """All of them together. Raises `DeadlineError`, and takes none, if they are not free in time."""
        with self._free:
            if not self._free.wait_for(lambda: self._names.isdisjoint(names), call.left_s):
                raise DeadlineError("an earlier change of the same name has not ended", next(iter(names)), call.tier)
            self._names.update(names)

    def give_back(self, names: Iterable[str]) -> None:
        with self._free:
            self._names.difference_update(names)
            self._free.notify_all()


class _Call:
    """What the jobs of one call share: its deadline, and whether it is over."""

    def __init__(self, deadline_s: float, tier: str) -> None:
        self.tier = tier
        self._deadline_s = deadline_s
        self._until_s = time.monotonic() + deadline_s
        self._settled = threading.Condition()
        self._over = False
        self._copies = 0
        self._refusal: TieredCacheError | None = None

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def late(self) -> DeadlineError:
        return DeadlineError(f"not done within {self._deadline_s} s", None, self.tier)

    def check(self) -> None:
        """Raises `DeadlineError` if it is too late to begin anything, and what another job was refused with."""
        if self._refusal is not None:
            raise self._refusal
        if self._over or not self.left_s:
            raise self.late()

    def refuse(self, why: TieredCacheError) -> None:
        """Nothing that the other jobs could ask would be granted: one answer, not a flood."""
        self._refusal = why

    def copy(self, target: memoryview, source: memoryview) -> None:
        """Into or from a buffer that is the caller's again when the call is over."""
        with self._settled:
            if self._over or not self.left_s:
                raise self.late()
            self._copies += 1
        try:
            _copy(target, source)
        finally:
            with self._settled:
                self._copies -= 1
                self._settled.notify_all()

    def end(self) -> None:
        """From now on nothing is copied, in or out."""
        with self._settled:
            self._over = True
            self._settled.wait_for(lambda: not self._copies)


def _name(path: str) -> str:
    return f"entries/{path}{SUFFIX}"


def _note(name: str) -> str:
    return f"catalogue/{name}"


def _range(offset: int, limit: int | None) -> GetOptions | None:
    if limit is not None:
        return {"range": (offset, offset + limit)}
    return {"range": {"offset": offset}} if offset else None


def _copy(target: memoryview, source: memoryview) -> None:
    """The lock of the interpreter is not held."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _as_answer(result: GetAnswer | TieredCacheError) -> GetAnswer:
    assert isinstance(result, memoryview | FrameNotFoundError | TierError)
    return result


def _all_of(results: Sequence[_T | TieredCacheError]) -> list[_T]:
    """The results; raises the first error instead."""
    good: list[_T] = []
    for result in results:
        if isinstance(result, TieredCacheError):
            raise result
        good.append(result)
    return good


def _told(error: Exception) -> str:
    """The first line of an error's text, without queries, which may be signatures."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return re.sub(r"\?\S*", "", line)[:300]
