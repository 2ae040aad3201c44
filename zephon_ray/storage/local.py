"""Local paths: what is one, and writing and walking on a disk."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import unquote, urlsplit


class Listed(NamedTuple):
    """One entry of a listing.

    Args:
        path: relative to the folder, parts joined by `/`.
        size: bytes; -1 for a local link that leads nowhere.
        is_directory_mark: an object of no bytes that stands for a folder.
    """

    path: str
    size: int
    is_directory_mark: bool


def is_local(url: str) -> bool:
    """Whether a URL is a path on this machine."""
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> str:
    """The path of a local URL: `file://` is decoded, a path is taken as it stands."""
    return unquote(urlsplit(url.replace("?", "%3F").replace("#", "%23")).path) if url.startswith("file://") else url


def join(url: str, *parts: str) -> str:
    """The name of something below a folder; parts are taken as they stand."""
    if url.startswith("file://"):
        url = local_path(url)
    return "/".join([url[:-1] if url.endswith("/") else url, *parts])


def walk(folder: str, prefix: str, depth: int | None) -> Iterator[Listed]:
    """The files of a local folder. os.walk would pass over a folder that it may not read."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if depth is None or depth > 1:
                    yield from walk(entry.path, f"{prefix}{entry.name}/", None if depth is None else depth - 1)
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                yield Listed(prefix + entry.name, -1, False)
                continue
            if stat.S_ISREG(status.st_mode):
                yield Listed(prefix + entry.name, status.st_size, False)


def write_local(path: str, data: bytes, exclusive: bool, durable: bool = True) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".zephon-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        if exclusive:
            os.link(temporary, path)  # unlike a rename, it fails where the name is taken
            os.unlink(temporary)
        else:
            os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@functools.cache
def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
