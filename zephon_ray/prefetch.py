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

HALF_S = 0.005
"""Who finds nothing waits so long at most for half of what may be made ahead: to be woken for each batch costs as much as a small one."""
WATCH_S = 60.0
"""How often the one who waits looks whether the thread is stuck."""


class Prefetch:
    """Runs `make` in a daemon thread until it gives None, raises, or `close` is called.

    Args:
        make: the next batch, or None at the end of the stream.
        depth: batches made and not taken, at least 1.
        rest: something else to do, called again and again while nothing needs to be made, until it gives False.
        watch: called now and then by the one who waits: an error that he is to raise, or None.
    """

    def __init__(
        self,
        make: Callable[[], GlobalBatch | None],
        depth: int,
        *,
        rest: Callable[[], bool],
        watch: Callable[[], Exception | None],
    ) -> None:
        self._make, self._depth, self._rest, self._watch = make, depth, rest, watch
        self._half = self._enough = depth // 2
        self._ready: deque[GlobalBatch | BaseException | None] = deque()
        self._over = self._closed = False
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="zephon-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not (self._over or self._closed):
            try:
                if self._put(self._make()):
                    self._wait_for_room()
            except BaseException as error:  # noqa: BLE001 (handed to the one who takes, who raises it)
                self._put(error)

    def _put(self, made: GlobalBatch | BaseException | None) -> bool:
        """Hand over what was made; True where nothing more may be made now."""
        with self._changed:
            self._ready.append(made)
            self._over = not isinstance(made, GlobalBatch)
            if self._over or len(self._ready) >= self._enough:
                self._changed.notify_all()
            return len(self._ready) >= self._depth

    def _wait_for_room(self) -> None:
        """Return when half of what was made is taken, so that nobody is woken for each batch."""
        while not self._has_room() and self._rest():
            pass
        with self._changed:
            self._changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        return self._over or self._closed or len(self._ready) <= self._half

    def take(self) -> GlobalBatch | None:
        """The next batch in order; None at the end, again and again. Raises what `make` raised, again and again."""
        if self._pid != os.getpid():
            raise RunnerError(
                f"this stream was opened in process {self._pid} and is used in its forked child {os.getpid()}."
                " Open one in each process, after the fork"
            )
        with self._changed:
            if not self._ready:
                self._wait_for_batch()
            if not self._ready:
                return None
            made = self._ready[0]
            if isinstance(made, GlobalBatch):
                self._ready.popleft()
                if len(self._ready) == self._half:
                    self._changed.notify_all()
        if isinstance(made, BaseException):
            raise made
        return made

    def _wait_for_batch(self) -> None:
        """For half of all at once, for a moment; then for one."""
        self._changed.wait_for(lambda: self._over or self._closed or len(self._ready) >= self._half, HALF_S)
        self._enough = 1
        try:
            while not self._changed.wait_for(lambda: self._ready or self._closed, WATCH_S):
                if (error := self._watch()) is not None:
                    raise error
        finally:
            self._enough = self._half

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
