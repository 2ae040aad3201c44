"""A bucket on the loopback address: as much of S3 as reading and writing whole objects needs, with faults on order.

It holds what a server on folders (`tests.s3_server`) cannot: keys that end in a slash, an object and a folder of one name, empty parts.
And it is in this process, so that the core's tests start no other.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class FakeS3:
    """Objects by key, for any bucket name.

    Args:
        fault: called with (method, key or "" for a listing, how often that was asked for before); gives None to serve, or
            (status, code) of the refusal, or "cut" to close the connection in the middle of the object.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Callable[[str, str, int], tuple[int, str] | str | None] = lambda method, key, before: None
        self.asked: dict[tuple[str, str], int] = {}
        self.bytes_sent = 0
        self.endpoint = ""
        self.lock = threading.Lock()


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    """A server for as long as the block lasts."""
    store = FakeS3()
    handler = type("Handler", (_Handler,), {"store": store})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    store.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


class _Handler(BaseHTTPRequestHandler):
    store: FakeS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _refused(self, method: str, key: str) -> bool:
        with self.store.lock:
            before = self.store.asked.get((method, key), 0)
            self.store.asked[method, key] = before + 1
        fault = self.store.fault(method, key, before)
        if isinstance(fault, tuple):
            status, code = fault
            self._send(status, f"<Error><Code>{code}</Code><Message>{code} from the store</Message></Error>".encode())
            return True
        self._cut = fault == "cut"
        return False

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _key(self) -> str:
        # Not urlsplit(path).path of the decoded name: a key may hold '?' and '#' itself.
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def _object(self, method: str) -> None:
        key = self._key()
        if self._refused(method, key):
            return
        data = self.store.objects.get(key)
        if data is None:
            self._send(404, b"" if method == "HEAD" else b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>")
            return
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if method == "HEAD":
            self._send(200, b"", headers, length=len(data))
            return
        asked = self.headers.get("Range")
        status, part = 200, data
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            part = data[int(first) : int(last) + 1]
            status = 206
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self.store.bytes_sent += len(part)
        if self._cut:
            self._send(status, part[: len(part) // 2], headers, length=len(part))
            self.close_connection = True
            return
        self._send(status, part, headers)

    def do_HEAD(self) -> None:
        self._object("HEAD")

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._listing(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
        else:
            self._object("GET")

    def _listing(self, prefix: str, delimiter: str) -> None:
        if self._refused("LIST", prefix):
            return
        found, folders = [], set()
        for key in sorted(self.store.objects, key=str.encode):
            if key.startswith(prefix):
                head, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                if mark:
                    folders.add(prefix + head + mark)
                else:
                    found.append(key)
        parts = [
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.store.objects[key])}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in found
        ] + [f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders)]
        body = f"<ListBucketResult><KeyCount>{len(parts)}</KeyCount><IsTruncated>false</IsTruncated>{''.join(parts)}</ListBucketResult>"
        self._send(200, b'<?xml version="1.0"?>' + body.encode(), {"Content-Type": "application/xml"})

    def do_PUT(self) -> None:
        data = self._body()
        if not self._refused("PUT", self._key()):
            self.store.objects[self._key()] = data
            self._send(200, b"", {"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = _dechunked(self.rfile)
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return _dechunked(io.BytesIO(data)) if "aws-chunked" in self.headers.get("Content-Encoding", "") else data

    def do_DELETE(self) -> None:
        if not self._refused("DELETE", self._key()):
            self.store.objects.pop(self._key(), None)
            self._send(204, b"")


def _dechunked(stream: io.BufferedIOBase | IO[bytes]) -> bytes:
    """The content of chunks, each after a line with its size; what trails them is passed over."""
    parts = []
    while size := int(stream.readline().split(b";")[0], 16):
        parts.append(stream.read(size))
        stream.readline()
    while stream.readline().strip():
        pass
    return b"".join(parts)
