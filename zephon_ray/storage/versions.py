"""Versions: what tells one state of a file from another without reading it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow.fs

FINE_S, COARSE_S = 0.1, 2.0
"""A file that was changed less than so many seconds ago may be changed again without a trace: systems stamp files by a clock that ticks
every 1 to 10 ms, some of them (FAT, files behind a program) by whole seconds."""

_TAGS = ("ETag", "etag", "generation")
_TIMES = ("LastModified", "last_modified", "modified", "mtime", "updated", "created")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileVersion:
    """A state of a file.

    Args:
        size: bytes.
        tag: another one after any change of the file. None where the store has none.
        settled: a change from now on gives another tag for certain.
    """

    size: int
    tag: str | None
    settled: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Aged:
    """A file of a folder: its name there, its bytes, and when it was written, in seconds since 1970 (0 where the store does not say)."""

    name: str
    size: int
    written_s: float


def local_version(path: str) -> FileVersion:
    """By inode, time of the last write and time of the last change.

    The latter nobody can set, so a copy over the file that keeps times, or a rename, is seen too; and so are, without need, new rights or
    a new name.
    """
    status = os.stat(path)
    stamps = status.st_mtime_ns, status.st_ctime_ns
    quiet_s = COARSE_S if any(stamp % 1_000_000_000 == 0 for stamp in stamps) else FINE_S
    settled = time.time_ns() - max(stamps) > quiet_s * 1e9
    return FileVersion(size=status.st_size, tag=f"{status.st_ino}.{stamps[0]}.{stamps[1]}", settled=settled)


def remote_version(fs: pyarrow.fs.FileSystem, path: str) -> FileVersion:
    """By what the store calls the version of an object."""
    if isinstance(fs, pyarrow.fs.PyFileSystem):
        info: dict[str, Any] = fs.handler.fs.info(path)
        size, found = int(info["size"]), [info.get(name) for name in _TAGS]
    else:
        with fs.open_input_file(path) as file:
            info = {_text(name): value for name, value in file.metadata().items()}
            size, found = int(file.size()), [info.get(name) for name in _TAGS]
    # A weak one (RFC 9110, 8.8.1) may stay when bytes change, and some stores give an empty one.
    tags = [tag for value in found if value and (tag := _text(value).strip('"')) and not tag.startswith("W/")]
    return FileVersion(size=size, tag=tags[0] if tags else None, settled=True)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def aged_local(path: str) -> Iterable[Aged]:
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # deleted since it was listed
            if entry.is_file(follow_symlinks=False):
                yield Aged(name=entry.name, size=status.st_size, written_s=status.st_mtime)


def aged_remote(fs: pyarrow.fs.FileSystem, path: str) -> Iterable[Aged]:
    if isinstance(fs, pyarrow.fs.PyFileSystem):
        for info in fs.handler.fs.ls(path, detail=True):
            if info.get("type") == "file":
                stamp = next((info[name] for name in _TIMES if info.get(name)), 0.0)
                yield Aged(name=info["name"].rsplit("/", 1)[1], size=int(info["size"] or 0), written_s=_seconds(stamp))
        return
    for info in fs.get_file_info(pyarrow.fs.FileSelector(path)):
        if info.type == pyarrow.fs.FileType.File:
            yield Aged(name=info.base_name, size=int(info.size or 0), written_s=(info.mtime_ns or 0) / 1e9)


def _seconds(stamp: Any) -> float:
    return float(stamp.timestamp() if hasattr(stamp, "timestamp") else stamp) if not isinstance(stamp, str) else 0.0
