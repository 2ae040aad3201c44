"""Generations: which ranks may read a stream now. A state machine of plain values; what time it is, it is told.

A *generation* is all ranks of one incarnation, "RUN_ID:COUNT". A higher COUNT of the same run is the same job after a restart: it
takes over, and older ranks are fenced. Another run is refused while ranks of this one live.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from zephon_ray.errors import FeedError, FencedError, RefusedError
from zephon_ray.feed.protocol import ALIVE_S, OpenRequest
from zephon_ray.rundir import Readers

_REMEMBERED = 4096
"""Sessions that were fenced, and are told so. Older ones are told that they are unknown, and find out when they open again."""


class UnknownSessionError(FeedError):
    """The feed does not know this session: it restarted, or the session was left. Open again."""


@dataclass(kw_only=True, slots=True)
class Member:
    """A client that reads.

    Args:
        session: its name.
        dp_rank: several clients may have one.
        client: "host:pid".
        taken: the step up to which it has its rows.
        called: when it did last.
        waited_s: that it has waited for steps, as it says.
    """

    session: str
    dp_rank: int
    client: str
    taken: int
    called: float
    waited_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class _Generation:
    number: int
    run_id: str
    count: int
    dp_world_size: int
    starts: dict[int, tuple[int, bytes]] = field(default_factory=dict)
    """After how many restores -> the step and chain from which every rank starts."""
    members: dict[str, Member] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    """dp ranks that were there at any time."""
    expected_until: float = -math.inf
    """They read before the feed was started again: until then they are expected back, and count as living."""

    @property
    def incarnation(self) -> str:
        return f"{self.run_id}:{self.count}"

    def alive(self, now: float) -> list[Member]:
        return [member for member in self.members.values() if now - member.called < ALIVE_S]


class Generations:
    """The generations of one stream, the newest of which reads."""

    def __init__(self) -> None:
        self._current: _Generation | None = None
        self._numbers = 0
        self._fenced: dict[str, str] = {}

    @property
    def number(self) -> int:
        """Of the newest generation; 0 before the first."""
        return self._numbers

    @property
    def incarnation(self) -> str:
        """Of the newest generation; "" before the first."""
        return self._current.incarnation if self._current else ""

    @property
    def dp_world_size(self) -> int:
        """Of the newest generation; 0 before the first."""
        return self._current.dp_world_size if self._current else 0

    def restore(self, readers: Readers, feed: str, now: float) -> None:
        """Begin with what was remembered. Where that was of this `feed` before it died, ranks older than those are fenced at once."""
        self._numbers = readers.generation
        if readers.reading and readers.feed == feed:
            run_id, count = parse_incarnation(readers.incarnation)
            self._current = _Generation(
                number=readers.generation,
                run_id=run_id,
                count=count,
                dp_world_size=readers.dp_world_size,
                expected_until=now + ALIVE_S,
            )

    def remembered(self, feed: str, *, reading: bool) -> Readers:
        """What `restore` wants to know of the newest generation, of which there is one."""
        assert self._current is not None
        return Readers(
            feed=feed,
            generation=self._numbers,
            incarnation=self._current.incarnation,
            dp_world_size=self._current.dp_world_size,
            reading=reading,
        )

    def open(self, request: OpenRequest, at: int, now: float) -> bool:
        """A rank joins, comes back, or begins a new generation.

        Args:
            request: what it asks for; its size and state were found possible.
            at: the step from which it goes on.
            now: seconds on a clock that never goes back.

        Returns:
            Whether it is the first of a new generation, or after a restore: ranks start anew.

        Raises:
            RefusedError: ranks of another run live, or it does not agree with its own generation.
            FencedError: a newer incarnation of the run reads.
        """
        run_id, count = parse_incarnation(request.incarnation)
        if self._begins(request, run_id, count, now):
            self._begin(run_id, count, request.dp_world_size)
        generation = self._current
        assert generation is not None
        anew = request.restores not in generation.starts
        start = (request.start_step, request.start_chain) if anew else generation.starts[request.restores]
        self._check_agrees(request, generation, start)
        generation.starts[request.restores] = start
        generation.members[request.session] = Member(
            session=request.session, dp_rank=request.dp_rank, client=request.caller.client, taken=at, called=now
        )
        generation.joined.add(request.dp_rank)
        return anew

    def call(self, session: str, now: float) -> Member:
        """A rank has called.

        Raises:
            FencedError: its generation is over.
            UnknownSessionError: it has to open again.
        """
        member = self._current.members.get(session) if self._current else None
        if member is None:
            if session in self._fenced:
                raise FencedError(self._fenced[session])
            raise UnknownSessionError("the feed does not know this session: it was closed, or the feed restarted. Connect again")
        member.called = now
        return member

    def leave(self, session: str) -> None:
        """A rank is done. When all are, the generation holds nobody off any more."""
        if self._current:
            self._current.members.pop(session, None)

    def alive(self, now: float) -> list[Member]:
        """Who has called within `ALIVE_S`."""
        return self._current.alive(now) if self._current else []

    def slowest(self, now: float) -> int | None:
        """The step up to which all that live have their rows; None where nobody does."""
        return min((member.taken for member in self.alive(now)), default=None)

    def awaited(self) -> tuple[list[int], int]:
        """The dp ranks that never came, and the step from which they would begin."""
        if self._current is None or not self._current.joined:
            return [], 0
        absent = [rank for rank in range(self._current.dp_world_size) if rank not in self._current.joined]
        newest = max(self._current.starts, default=0)
        return absent, self._current.starts.get(newest, (0, b""))[0]

    def _begins(self, request: OpenRequest, run_id: str, count: int, now: float) -> bool:
        """Whether the request begins a new generation; raises where it may not even join."""
        current = self._current
        if current is None:
            return True
        alive = current.alive(now)
        if request.takeover and request.incarnation != current.incarnation:
            return True
        if not alive and now >= current.expected_until:
            return True  # those that were there are done, or dead: nobody would be disturbed, whatever its number
        if run_id != current.run_id:
            lives = f"{_named(alive)}, the last call {_ago(alive, now)}" if alive else "its ranks may come back, for the feed was restarted"
            raise RefusedError(
                f"the feed is read by another run, {current.incarnation}: {lives}."
                f" Stop it, or wait until it has not called for {ALIVE_S:.0f} s, or push it out with takeover=True (you are"
                f" {request.incarnation})"
            )
        if count < current.count:
            raise FencedError(_over(request.incarnation, current.incarnation))
        return count > current.count

    def _begin(self, run_id: str, count: int, dp_world_size: int) -> None:
        new = _Generation(number=self._numbers + 1, run_id=run_id, count=count, dp_world_size=dp_world_size)
        if self._current and self._current.incarnation != new.incarnation:
            reason = _over(self._current.incarnation, new.incarnation)
            self._fenced |= dict.fromkeys(self._current.members, reason)
            for session in list(self._fenced)[:-_REMEMBERED]:
                del self._fenced[session]
        self._current, self._numbers = new, new.number

    @staticmethod
    def _check_agrees(request: OpenRequest, generation: _Generation, start: tuple[int, bytes]) -> None:
        mend = "Ranks of one incarnation start together: give all the same, or a higher count (RUN_ID:COUNT) to those that begin anew"
        if request.dp_world_size != generation.dp_world_size:
            raise RefusedError(
                f"dp_world_size={request.dp_world_size}, and the other ranks of {generation.incarnation} have"
                f" {generation.dp_world_size}. {mend}"
            )
        if (request.start_step, request.start_chain) != start:
            raise RefusedError(
                f"rank {request.dp_rank} starts after step {request.start_step} (chain {request.start_chain.hex()}), and the other"
                f" ranks of {generation.incarnation} after step {start[0]} (chain {start[1].hex()}). {mend}"
            )


def parse_incarnation(token: str) -> tuple[str, int]:
    """The run's id and the count of its restarts.

    Raises:
        RefusedError: it is not "RUN_ID:COUNT".
    """
    run_id, _, count = token.rpartition(":")
    if not run_id or not (count.isascii() and count.isdigit()):
        raise RefusedError(f"incarnation={token!r}: expected RUN_ID:COUNT, the count growing with each restart, as 'my-run:0'")
    return run_id, int(count)


def _over(old: str, new: str) -> str:
    return (
        f"this rank belongs to {old}, and {new} reads the feed now: it was started later, so this process is left over. End it;"
        " nothing that it reads from here on could be trained on"
    )


def _named(members: Iterable[Member], limit: int = 3) -> str:
    found = sorted(members, key=lambda member: member.dp_rank)
    shown = ", ".join(f"rank {member.dp_rank} at {member.client}" for member in found[:limit])
    return shown + (f" and {len(found) - limit} more" if len(found) > limit else "")


def _ago(members: Iterable[Member], now: float) -> str:
    return f"{now - max(member.called for member in members):.0f} s ago"
