"""Prefetch: global batches made in a thread, up to a bound ahead of the one who takes them.

What is read ahead is no part of anything: every batch carries its own state.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from zephon_ray.batches import GlobalBatch
from zephon_ray.errors import RunnerError


class Prefetch:
    """Runs `make` in a daemon thread until it gives None, raises, or `close` is called.

    Args:
        make: the next batch, or None at the end of the stream.
        depth: batches made and not taken, at least 1.
    """

    def __init__(self, make: Callable[[], GlobalBatch | None], depth: int) -> None:
        self._make, self._depth = make, depth
        self._ready: deque[GlobalBatch | BaseException | None] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="zephon-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        going = True
        while going:
            made: GlobalBatch | BaseException | None
            try:
                made = self._make()
            except BaseException as error:  # noqa: BLE001 (handed to the one who takes, who raises it)
                made = error
            going = isinstance(made, GlobalBatch)
            with self._changed:
                self._ready.append(made)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                going = going and not self._closed

    def take(self) -> GlobalBatch | None:
        """The next batch in order; None at the end, again and again. Raises what `make` raised, again and again."""
        if self._pid != os.getpid():
            raise RunnerError(
                f"this stream was opened in process {self._pid} and is used in its forked child {os.getpid()}."
                " Open one in each process, after the fork"
            )
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed)
            if not self._ready:
                return None
            made = self._ready[0]
            if isinstance(made, GlobalBatch):
                self._ready.popleft()
                self._changed.notify_all()
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        """Stop; the thread ends with the batch that it is making."""
        if self._pid != os.getpid():
            return  # the child has no such thread, and the lock may have been held at the fork
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        if self._thread is not threading.current_thread() and self._pid == os.getpid():
            self._thread.join(timeout_s)
