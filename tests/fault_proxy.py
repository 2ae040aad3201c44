"""A proxy in front of an S3 server that passes requests on, and answers some of them with faults on order."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request.

    Args:
        method: as in HTTP, or LIST.
        name: the object's key, or the prefix of a listing.
        before: how many requests of this method and name came before it.
        number: how many requests of any kind came before it.
        access_key: whose credentials signed it; "" if none.
        at: seconds on the monotonic clock.
    """

    method: str
    name: str
    before: int
    number: int
    access_key: str
    at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    """Answer with an error; code "" leaves the body out."""

    status: int
    code: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Close the connection after the first half of the body, or (`at_once`) instead of an answer."""

    at_once: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Say nothing until the proxy is closed."""


Fault = Refuse | Cut | Hang | None
SLOW_DOWN = Refuse(status=503, code="SlowDown")


@dataclass(kw_only=True, slots=True)
class FaultProxy:
    """The proxy's orders and its records.

    Args:
        endpoint: URL to reach it by.
        upstream: host:port of the server behind it.
        fault: called with every request, one at a time; says what goes wrong with it.
    """

    endpoint: str
    upstream: str
    fault: Callable[[Asked], Fault] = lambda asked: None
    asked: list[Asked] = field(default_factory=list)
    faults: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def judge(self, method: str, name: str, access_key: str) -> Fault:
        """Take a request down, and say what is to go wrong with it."""
        with self._lock:
            before = self._counts[method, name]
            self._counts[method, name] += 1
            asked = Asked(method=method, name=name, before=before, number=len(self.asked), access_key=access_key, at=time.monotonic())
            self.asked.append(asked)
            fault = self.fault(asked)
            self.faults += fault is not None
            return fault


@contextmanager
def fault_proxy(endpoint: str) -> Iterator[FaultProxy]:
    """A proxy in front of the server at `endpoint` for as long as the block lasts."""
    proxy = FaultProxy(endpoint="", upstream=urlsplit(endpoint).netloc)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.closed.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


class _Handler(BaseHTTPRequestHandler):
    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    timeout = 60

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.proxy.judge(*self._what(), self._access_key())
        if isinstance(fault, Refuse):
            text = f"<Error><Code>{fault.code}</Code><Message>{fault.code} from the store</Message></Error>" if fault.code else ""
            self._answer(fault.status, [("Content-Type", "application/xml")], text.encode(), len(text))
        elif isinstance(fault, Hang):
            self.proxy.closed.wait(self.timeout)
            self.close_connection = True
        elif isinstance(fault, Cut) and fault.at_once:
            self._hang_up()
        else:
            self._pass_on(body, cut=fault is not None)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _relay

    def _what(self) -> tuple[str, str]:
        """(method, key); listings are a method of their own."""
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        if self.command == "GET" and "list-type" in query:
            return "LIST", query.get("prefix", [""])[0]
        return self.command, unquote(parts.path).lstrip("/").partition("/")[2]

    def _access_key(self) -> str:
        _, found, rest = self.headers.get("Authorization", "").partition("Credential=")
        return rest.split("/")[0] if found else ""

    def _pass_on(self, body: bytes, *, cut: bool) -> None:
        upstream = http.client.HTTPConnection(self.proxy.upstream, timeout=self.timeout)
        try:
            # The request goes on as it came, or its signature would not fit it.
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    upstream.putheader(name, value)
            upstream.endheaders(body or None)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        length = int(answer.headers.get("Content-Length", len(data))) if self.command == "HEAD" else len(data)
        kept = [(n, v) for n, v in answer.getheaders() if n.lower() not in ("connection", "content-length", "transfer-encoding")]
        self._answer(answer.status, kept, data[: len(data) // 2] if cut else data, length)
        if cut:
            self._hang_up()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
