"""A lane team: the lane workers of one stream as actors, told the same events, and asked for steps ahead.

It knows who was asked for what and what came of it. What they are told, and what becomes of their steps, is the production's affair.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from zephon_ray.errors import RunnerError, WorkerLost, ZephonError
from zephon_ray.feed.blocks import RowBlock, cut_rows
from zephon_ray.feed.lane_worker import Answer, Event, LaneWorker
from zephon_ray.feed.units import Described, Place
from zephon_ray.lane_blocks import LaneBlock
from zephon_ray.recipe import Recipe
from zephon_ray.runners.ray_cluster import NO_ROOM, Cluster, one_line
from zephon_ray.state import StreamState

_UNITS = "units"
"""Calls about units have threads of their own in a lane worker: they do not wait for a step in the making."""
_UNIT_THREADS = 2

START_S = 60.0
"""Seconds that a worker may take for its first answer, where the limit is shorter: its process starts in this time."""

CALL_BYTES = 16 << 20
"""Of rows that a call makes, about: they are copied when it is over, and held twice until then."""

NOTHING = Answer(steps=(), events=0)
"""Before the first answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeStep:
    """One step of one lane group, and where its rows are."""

    block: LaneBlock
    rows: tuple[RowBlock, ...]


@dataclass(kw_only=True, slots=True, eq=False)
class Member:
    """A lane worker, as it is known here.

    Args:
        actor: its handle.
        cuts: rows of a global batch that each of its row blocks holds.
        call_steps: that a call makes, at most.
        step: the last that came.
        made: steps that came and were not taken.
        events: not sent yet.
        calls: sent and not answered, in order; references to all that each returns.
        sent: calls so far.
        answer: the last one.
    """

    actor: Any
    cuts: Sequence[range]
    call_steps: int
    step: int
    made: deque[MadeStep] = field(default_factory=deque)
    events: list[Event] = field(default_factory=list)
    calls: deque[list[Any]] = field(default_factory=deque)
    sent: int = 0
    answer: Answer = NOTHING

    def ask(self, until: int) -> None:
        """Have it make steps up to `until`, and tell it what it was not told yet."""
        events, self.events = self.events, []
        advance = self.actor.advance.options(num_returns=1 + self.call_steps * len(self.cuts))
        self.calls.append(advance.remote(self.sent, events, until))
        self.sent += 1

    def take(self, answer: Answer, blocks: Sequence[Any]) -> None:
        """The first call was answered; `blocks` are the references to its row blocks."""
        self.answer = answer
        self.step += len(answer.steps)
        refs = iter(blocks)
        for block in answer.steps:
            rows = tuple(RowBlock(first_row=cut.start, rows=len(cut), ref=next(refs)) for cut in self.cuts)
            self.made.append(MadeStep(block=block, rows=rows))

    @property
    def stuck(self) -> bool:
        """It would give the same answer again."""
        said = self.answer
        return said.want is not None or said.over or bool(said.blocked_by)


class LaneTeam:
    """The lane workers. One thread uses it; `describe` may be called from any, and `close` too.

    Args:
        recipe: the run's.
        start: where the lanes stand.
        pad_id: input of padding pairs.
        groups: lanes of each worker.
        cluster: that this process is in.
        block_bytes: of a row block, at most.
        ahead: steps that workers may be asked for ahead of those that were taken, at least 1.
        wait_s: how long a worker may be silent.

    Attributes:
        told: events so far.
    """

    def __init__(
        self,
        recipe: Recipe,
        start: StreamState,
        *,
        pad_id: int,
        groups: Sequence[range],
        cluster: Cluster,
        block_bytes: int,
        ahead: int,
        wait_s: float,
    ) -> None:
        self.told = 0
        self._batch, self._patience_s, self._started = max(1, ahead // 2), wait_s, False
        make_actor: Any = ray.remote  # its types know no concurrency groups
        body = make_actor(num_cpus=0, enable_task_events=False, concurrency_groups={_UNITS: _UNIT_THREADS})(LaneWorker)
        self.members = []
        for lanes, where in zip(groups, cluster.spread(recipe.execution.workers, len(groups)), strict=True):
            rows = range(lanes.start * recipe.rows_per_lane, lanes.stop * recipe.rows_per_lane)
            row_bytes = 12 * recipe.sequence_length
            cuts = cut_rows(rows, row_bytes, block_bytes)
            call_steps = max(1, min(self._batch, CALL_BYTES // (len(rows) * row_bytes)))
            actor = body.options(scheduling_strategy=where).remote(
                recipe, start.lanes, step=start.step, pad_id=pad_id, lanes=lanes, cuts=cuts, call_steps=call_steps
            )
            self.members.append(Member(actor=actor, cuts=cuts, call_steps=call_steps, step=start.step))
        self._turn, self._turns = itertools.cycle(self.members), threading.Lock()

    @property
    def _wait_s(self) -> float:
        if not self._started:
            self._started = all(member.answer is not NOTHING for member in self.members)
        return self._patience_s if self._started else max(self._patience_s, START_S)

    # ---- units

    def describe(self, block: Any) -> list[Described]:
        """What a block holds, without its arrays.

        Raises:
            WorkerLost: the lane worker that was asked is gone.
            ray.exceptions.RayError: the block is.
        """
        with self._turns:
            member = next(self._turn)
        ref = member.actor.describe.options(concurrency_group=_UNITS).remote([block])
        try:
            described: list[list[Described]] = self._get(ref)
        except WorkerLost as error:
            if isinstance(lost := _raised_there(error.__cause__), ray.exceptions.RayError):
                raise lost from error  # the block: the runner makes it again
            raise
        return described[0]

    def copy_out(self, places: Sequence[Place]) -> list[Place]:
        """Put units into blocks of their own, on the first worker.

        Raises:
            WorkerLost: it is gone, or the blocks are.
        """
        new: list[Place] = self._get(self.members[0].actor.copy_out.options(concurrency_group=_UNITS).remote(places))
        return new

    # ---- steps

    def tell(self, event: Event) -> None:
        """Tell all workers; each learns of it with its next call."""
        self.told += 1
        for member in self.members:
            member.events.append(event)

    def is_current(self, member: Member) -> bool:
        """Its last answer takes all events into account."""
        return member.answer.events == self.told

    def ask(self, until: int) -> None:
        """See to it that all workers have something to do, up to step `until`."""
        for member in self.members:
            while self._is_due(member, until):
                member.ask(until)

    def _is_due(self, member: Member, until: int) -> bool:
        """A worker has one call, and a second behind it where there is news, or where its last call was over before its work was."""
        if member.events:
            return len(member.calls) < 2
        if member.stuck or len(member.calls) > member.answer.more:
            return False
        left = until - member.step
        return left >= self._batch or (left > 0 and (member.answer.more or not member.made))

    @property
    def busy(self) -> bool:
        """Answers are to come."""
        return any(member.calls for member in self.members)

    def gather(self, *, wait: bool) -> None:
        """Take the answers that have come.

        Args:
            wait: for at least one.

        Raises:
            WorkerLost: a worker is gone, is silent, or blocks that it was to be given are gone.
            ZephonError: what a worker raised.
        """
        while heads := {member.calls[0][0]: member for member in self.members if member.calls}:
            come, _ = ray.wait(list(heads), num_returns=1 if wait else len(heads), timeout=self._wait_s if wait else 0)
            if wait and not come:
                raise WorkerLost(f"a lane worker gave nothing for {self._wait_s:g} s. Look at its node; the stream goes on with another")
            if not come:
                return
            wait = False
            for ref in come:
                member = heads[ref]
                _, *blocks = member.calls.popleft()
                member.take(self._get(ref), blocks)

    def _get(self, ref: Any) -> Any:
        try:
            return ray.get(ref, timeout=self._wait_s)
        except ray.exceptions.RayTaskError as error:
            raise _fault(error) from error
        except ray.exceptions.RayError as error:
            raise WorkerLost(f"a lane worker is gone ({one_line(error)})") from error

    def close(self) -> None:
        """End all workers. Rows that were taken stay."""
        if not ray.is_initialized():
            return  # they ended with the cluster, and to call it would start another
        for member in self.members:
            ray.kill(member.actor)


def _raised_there(error: BaseException | None) -> BaseException | None:
    """What a lane worker raised; None where the call did not come so far."""
    return error.cause if isinstance(error, ray.exceptions.RayTaskError) else None


def _fault(error: ray.exceptions.RayTaskError) -> ZephonError:
    cause = error.cause
    if isinstance(cause, NO_ROOM):
        return WorkerLost(f"a lane worker could not write its rows: {one_line(cause)}")
    if isinstance(cause, ray.exceptions.RayError):
        return WorkerLost(f"blocks of units that a lane worker was to read are gone ({one_line(cause)})")
    return cause if isinstance(cause, ZephonError) else RunnerError(f"a lane worker failed: {one_line(cause)}")
