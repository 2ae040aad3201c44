"""Election: of the processes of one host and user that want the same thing, exactly one makes it, and the others use it.

The kernel decides, by locks of files that it drops when their holder dies, however it dies. Nothing here knows of Ray.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zephon_ray.errors import FeedError, UserError
from zephon_ray.telemetry import born

_LOOK_S = 0.05


def private_folder() -> Path:
    """The folder of this user on this host; made if it is not there.

    Raises:
        UserError: it belongs to another, or others may enter it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "zephon-ray" if runtime else Path(tempfile.gettempdir()) / f"zephon-ray-{os.getuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{folder}: must be yours alone (mode 0700), for processes find each other by it. Remove it, or mend its mode")
    return folder


class Election:
    """One of several that stand for the same name.

    Args:
        name: of the thing; without a slash.
        folder: where the locks lie.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._holder = _open(folder / f"{name}.lock")
        self._users = _open(folder / f"{name}.users")
        self._note = folder / f"{name}.json"
        self.elected = False
        """This one is to make the thing."""

    def run(self, timeout_s: float) -> dict[str, Any] | None:
        """What the one that was elected has published; None if that is this one, which then publishes, or resigns.

        Raises:
            FeedError: it has published nothing in time.
        """
        until = time.monotonic() + timeout_s
        while True:
            if _lock(self._holder, fcntl.LOCK_EX):
                self._note.unlink(missing_ok=True)  # of one that was killed
                self.elected = True
                return None
            if self._published() is not None and _lock(self._users, fcntl.LOCK_SH):
                published = self._published()  # it may have gone before the lock was ours
                if published is not None:
                    return published
                fcntl.flock(self._users, fcntl.LOCK_UN)
            if time.monotonic() > until:
                raise FeedError(f"another process of this host has held {self._note.stem!r} for {timeout_s:g} s and is not ready")
            time.sleep(_LOOK_S)

    def publish(self, what: dict[str, Any]) -> None:
        """Tell the others, who wait for it."""
        note = {"pid": os.getpid(), "born": born(os.getpid()), "what": what}
        part = self._note.with_suffix(".part")
        with open(part, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump(note, file)
        part.replace(self._note)

    def wait_for_users(self, timeout_s: float) -> bool:
        """Whether all that use the thing have resigned or died. Further ones are kept out."""
        self._note.unlink(missing_ok=True)
        until = time.monotonic() + timeout_s
        while not _lock(self._users, fcntl.LOCK_EX):
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        return True

    def resign(self) -> None:
        """Use it no longer, or, for the one elected, have it no longer. Again does nothing."""
        if self.elected:
            self._note.unlink(missing_ok=True)
        self.elected = False
        for file in (self._users, self._holder):
            if not file.closed:
                fcntl.flock(file, fcntl.LOCK_UN)  # not by closing it, for a forked child may hold it too
                file.close()

    def _published(self) -> dict[str, Any] | None:
        """None also for what one has left that is dead."""
        try:
            note = json.loads(self._note.read_text())
        except FileNotFoundError:
            return None
        what: dict[str, Any] = note["what"]
        return what if born(note["pid"]) == note["born"] else None


def _open(path: Path) -> Any:
    return open(path, "a+b", opener=lambda path, flags: os.open(path, flags, 0o600))


def _lock(file: Any, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
