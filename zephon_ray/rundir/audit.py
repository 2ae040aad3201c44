"""The audit trail of a run: who did what, and when, chained by hashes so that an edit, a removal or a swap in it is found.

On a local disk it is the file `audit.jsonl`; where nothing can be appended to a file, numbered objects `audit/NUMBER.json`.
What it cannot show is that its newest entries were cut off as a whole.
"""

from __future__ import annotations

import datetime
import fcntl
import getpass
import json
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from zephon_ray.errors import RunDirectoryError
from zephon_ray.hashing import canonical_json, sha256_hex
from zephon_ray.storage import Storage, local_path

_FIRST = "0" * 64
_NAME = re.compile(r"(\d{12,})\.json")
_TRIES = 100


class Audit:
    """Appends to the trail and proves it.

    Args:
        storage: opens URLs.
        url: the run's directory.
    """

    def __init__(self, storage: Storage, url: str) -> None:
        self._storage = storage
        self._file = storage.join(url, "audit.jsonl")
        self._folder = storage.join(url, "audit")

    def record(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append an entry.

        Args:
            event: what happened, as "created" or "resumed".
            fields: more about it, as JSON.

        Raises:
            RunDirectoryError: the trail's end cannot be read, so nothing can be chained to it.
        """
        # A directory that was copied from object storage keeps its numbered objects.
        if self._storage.is_local(self._file) and not self._storage.exists(self._folder):
            self._append(event, fields)
        else:
            self._add_object(event, fields)

    def entries(self) -> list[dict[str, Any]]:
        """All entries, oldest first. An unfinished one at the end of the file, left by a crash, is no entry.

        Raises:
            RunDirectoryError: an entry was edited, removed or moved.
        """
        places = [(self._file, number, line) for number, line in enumerate(self._lines(), 1)]
        for name in self._objects():
            place = self._storage.join(self._folder, name)
            places.append((place, len(places) + 1, self._storage.read_bytes(place)))
        entries: list[dict[str, Any]] = []
        for place, number, data in places:
            entries.append(_checked(data, f"{place}, entry {number}"))
            previous = entries[-2]["digest"] if len(entries) > 1 else _FIRST
            if entries[-1].get("number") != number or entries[-1].get("previous") != previous:
                raise RunDirectoryError(
                    f"{place}, entry {number}: the audit trail is broken: it does not follow from the entry before. "
                    "Something was edited or removed there; compare with a copy of the directory."
                )
        return entries

    def _lines(self) -> list[bytes]:
        try:
            return self._storage.read_bytes(self._file).split(b"\n")[:-1]
        except FileNotFoundError:
            return []

    def _objects(self) -> list[str]:
        return sorted(name for name in self._storage.names(self._folder) if _NAME.fullmatch(name))

    def _append(self, event: str, fields: Mapping[str, Any]) -> None:
        """Under a lock of the file, since others may append too: a half entry at the end is cut, and the new entry says so."""
        with open(local_path(self._file), "a+b", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            *lines, torn = file.read().split(b"\n")
            if torn:
                file.truncate(file.tell() - len(torn))
            last = _checked(lines[-1], f"{self._file}, entry {len(lines)}") if lines else None
            entry = _entry(last, event, {**fields, "torn_bytes": len(torn)} if torn else fields)
            file.write(entry + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _add_object(self, event: str, fields: Mapping[str, Any]) -> None:
        for _ in range(_TRIES):
            last = None
            if names := self._objects():
                place = self._storage.join(self._folder, names[-1])
                last = _checked(self._storage.read_bytes(place), place)
            elif lines := self._lines():
                last = _checked(lines[-1], f"{self._file}, entry {len(lines)}")
            entry = _entry(last, event, fields)
            place = self._storage.join(self._folder, f"{last['number'] + 1 if last else 1:012d}.json")
            try:
                self._storage.write_bytes(place, entry, exclusive=True)
            except FileExistsError:
                continue
            if self._storage.read_bytes(place) == entry:  # A store without exclusive create may have given the number twice.
                return
        raise RunDirectoryError(f"{self._folder}: others took the next number {_TRIES} times. Start one writer at a time.")


def _entry(last: Mapping[str, Any] | None, event: str, fields: Mapping[str, Any]) -> bytes:
    entry = {
        "number": last["number"] + 1 if last else 1,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "user": _user(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "event": event,
        "fields": dict(fields),
        "previous": last["digest"] if last else _FIRST,
    }
    return canonical_json({**entry, "digest": sha256_hex(canonical_json(entry))})


def _checked(data: bytes, where: str) -> dict[str, Any]:
    """The entry in `data`, if its digest is right."""
    try:
        entry: dict[str, Any] = json.loads(data)
        sound = canonical_json(entry) == data and entry["digest"] == sha256_hex(
            canonical_json({name: value for name, value in entry.items() if name != "digest"})
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise RunDirectoryError(f"{where}: the audit trail is broken: the entry was edited. Compare with a copy of the directory.")
    return entry


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # A container's user need not have a name.
        return str(os.getuid())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
