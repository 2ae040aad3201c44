"""A reader: a rank's rows, fetched ahead in a thread. It comes back by itself to a feed that restarts, at the step it is at.

Rows are views of the object store where they lie in one block; references are let go of at once, so a batch that is dropped holds
nothing in the store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import GetTimeoutError, RayError

from zephon_ray.batches import Batch
from zephon_ray.errors import FeedError, RunnerError
from zephon_ray.feed.generations import UnknownSessionError
from zephon_ray.feed.link import AwayError, Link
from zephon_ray.feed.protocol import POLL_S, StepReply, TakeReply, TakeRequest
from zephon_ray.runners.ray_cluster import NO_ROOM, one_line
from zephon_ray.state import Identity, StreamState, to_bytes

FETCH_S = 60.0
"""Rows that do not come in this time are gone, and asked for again."""

_BEAT_S = POLL_S / 2
_LOST_TRIES = 8
_LATE_TRIES = 2
_JOIN_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A step that was fetched.

    Args:
        batch: the rank's rows.
        state: of the stream after it.
    """

    batch: Batch
    state: StreamState


class _LostError(Exception):
    """A step's rows could not be fetched. To ask for them again may help, `tries` times one after the other."""

    def __init__(self, step: int, ref: str, error: RayError) -> None:
        late, full = isinstance(error, GetTimeoutError), isinstance(error, NO_ROOM)
        if late:
            said = f"did not come within {FETCH_S:.0f} s"
            self.mend = "Look whether the object store here is full (`ray memory`), and whether the nodes that hold the rows can be reached"
        elif full:
            said, self.mend = f"find no room: {one_line(error)}", "Make room on the node of this rank, and start the ranks again"
        else:
            said, self.mend = f"are gone: {one_line(error)}", "Look whether nodes of the cluster die"
        super().__init__(f"rows of step {step} {said}")
        self.lost = step, ref
        self.tries = _LATE_TRIES if late else _LOST_TRIES


class Reader:
    """Runs from when it is made until the end of the stream, an error, or `close`.

    Args:
        link: opened.
        identity: of the stream.
        state: from which it goes on.
        rows: of a global batch that are the rank's: first, and the one behind the last.
        depth: batches fetched and not taken, at least 1.
    """

    def __init__(self, link: Link, identity: Identity, state: StreamState, rows: tuple[int, int], depth: int) -> None:
        self._link, self._identity, self._rows, self._depth = link, identity, rows, depth
        self._state = state
        self._ready: deque[Taken | BaseException | None] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._pid = os.getpid()
        self.waited_s = 0.0
        """That `take` has waited."""
        self._thread = threading.Thread(target=self._run, name="zephon-feed-reader", daemon=True)
        self._thread.start()

    def take(self) -> Taken | None:
        """The next step in order; None at the end, and once closed, again and again. An error is raised again and again."""
        if self._pid != os.getpid():
            raise RunnerError(
                f"this feed was connected to in process {self._pid} and is used in its forked child {os.getpid()}."
                " Connect in each process, after the fork"
            )
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._closed)
            self.waited_s += time.monotonic() - began
            if not self._ready or self._closed:
                return None
            found = self._ready[0]
            if isinstance(found, Taken):
                self._ready.popleft()
                self._changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """End the thread, and leave the feed. Not in a forked child."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._link.leave()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # noqa: BLE001 (handed to the one who takes, who raises it)
            self._put(error)

    def _read(self) -> None:
        lost: tuple[int, str] | None = None
        losses = 0
        while (room := self._room()) is not None:
            reply = self._ask(room, lost)
            lost = None
            for step in reply.steps:
                try:
                    self._put(self._fetch(step))
                except _LostError as error:
                    lost, losses = error.lost, losses + 1
                    if losses > error.tries:
                        raise FeedError(f"{error} ({losses} times one after the other). {error.mend}") from error
                    break
                losses = 0
            ended = reply.ended and not lost
            del reply  # and the references in it
            if ended:
                self._put(None)
                return

    def _room(self) -> int | None:
        """How many steps may be fetched; None once closed.

        Half of the depth at least, for a call costs the feed as much for several steps as for one; or fewer, and 0 where there is no
        room, when it is time to call.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) <= self._depth // 2, timeout=_BEAT_S)
            return None if self._closed else self._depth - len(self._ready)

    def _ask(self, room: int, lost: tuple[int, str] | None) -> TakeReply:
        while True:
            request = TakeRequest(session="", taken=self._state.step, count=room, lost=lost, waited_s=self.waited_s)
            try:
                return self._link.take(request)
            except (AwayError, UnknownSessionError):
                if self._closed:
                    return TakeReply()
                self._link.open(to_bytes(self._state, self._identity))

    def _put(self, item: Taken | BaseException | None) -> None:
        with self._changed:
            if self._closed:
                return
            self._ready.append(item)
            if isinstance(item, Taken):
                self._state = item.state
            self._changed.notify_all()

    def _fetch(self, reply: StepReply) -> Taken:
        first, last = self._rows
        refs = [block.ref for block in reply.blocks]
        by_ref = isinstance(reply.state, ray.ObjectRef)
        try:
            found: list[Any] = ray.get([*refs, *([reply.state] if by_ref else [])], timeout=FETCH_S)
        except RayError as error:
            gone = getattr(error, "object_ref_hex", None)
            ref = next((ref.hex() for ref in refs if ref.hex() == gone), refs[0].hex())
            raise _LostError(reply.step, ref, error) from error
        state: StreamState = found.pop() if by_ref else reply.state
        parts: list[npt.NDArray[np.int32]] = []
        for block, rows in zip(reply.blocks, found, strict=True):
            parts.append(rows[max(0, first - block.first_row) : last - block.first_row])
        mine = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(mine) != last - first:
            raise FeedError(f"step {reply.step}: {len(mine)} rows came for rows {first} to {last - 1}. This is a fault of zephon_ray")
        batch = Batch(
            step=reply.step,
            inputs=mine[:, 0].view(np.uint32),
            labels=mine[:, 1],
            positions=mine[:, 2],
            digest=reply.digest,
            chain=reply.chain,
            pairs=reply.pairs,
        )
        return Taken(batch=batch, state=state)
