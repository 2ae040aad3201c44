"""A production: the steps of a recipe from a state on, made by lane workers out of units that Ray Data makes.

It puts units in order, tells lane workers of them, and joins what they say of each step: it is the `Collector` with the lanes
elsewhere. Units and rows are references here; no token comes into this process. It has no past: where anything of it is
lost it is closed, and another goes on from the last state. `docs/decisions/0005-lane-groups.md`.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from itertools import chain
from typing import Any

from zephon_ray.batches import GlobalStep
from zephon_ray.collector import first_state, no_batch_at_all
from zephon_ray.errors import RunnerError, ZephonError
from zephon_ray.feed.blocks import RowBlock
from zephon_ray.feed.lane_team import LaneTeam
from zephon_ray.feed.lane_worker import Event
from zephon_ray.feed.units import NotYetError, Shelf, UnitGiver, UnitRef, refer
from zephon_ray.feeding import FedWindows, Want
from zephon_ray.joining import is_over, join_blocks, step_of
from zephon_ray.lane_blocks import split_lanes
from zephon_ray.ledger import Recorded
from zephon_ray.runners.base import Job, RunnerStats
from zephon_ray.runners.ray_cluster import Cluster, connect
from zephon_ray.runners.ray_data import Given
from zephon_ray.runners.ray_runner import RayRunner
from zephon_ray.state import StreamState
from zephon_ray.supplies import Supplies

BLOCK_BYTES = 8 << 20
"""Of a row block, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducedStep:
    """One step and where its rows are.

    Args:
        step: what state and ledger are made of.
        blocks: cover all rows of the global batch, in order. Who drops them, gives the store their rows back.
    """

    step: GlobalStep
    blocks: tuple[RowBlock, ...]


class Production:
    """One stream of steps. Close it: it holds actors and threads. `next_step` is called from one thread, `close` from any.

    Row blocks belong to the process that holds the production, not to lane workers: they are there until they are dropped, whatever
    becomes of the production; or until the node on which they were made is lost.

    Args:
        job: recipe, manifests and options.
        state: where to go on; None for the beginning.
        recorded: digests of windows that will be read again, to be compared.
        lane_workers: at least 1; None for as many as the recipe says. Never more than it has lanes.
        block_bytes: of a row block, at most, unless a single row has more.
        address: of a Ray cluster; None for the one that this process is in, else for one of its own.

    Attributes:
        state: after the last step that was given.

    Raises:
        StateError: a position of the state does not fit the data.
        SourceError: a source has no group.
        RunnerError: the cluster cannot be used.
    """

    def __init__(
        self,
        job: Job,
        state: StreamState | None = None,
        recorded: Recorded | None = None,
        *,
        lane_workers: int | None = None,
        block_bytes: int = BLOCK_BYTES,
        address: str | None = None,
    ) -> None:
        self._recipe = recipe = job.recipe
        execution = recipe.execution
        self.state = state = state or first_state(job)
        self._ahead = max(1, execution.prefetch_steps)
        self._error: ZephonError | None = None
        cluster = connect(address)
        try:
            self._team = team = LaneTeam(
                recipe,
                state,
                pad_id=job.options.pad or 0,
                groups=split_lanes(recipe.lanes, lane_workers or execution.lane_workers),
                cluster=cluster,
                block_bytes=block_bytes,
                ahead=self._ahead,
                wait_s=execution.stall_seconds,
            )
        except BaseException:
            cluster.leave()
            raise
        self._shelf = shelf = Shelf(team.copy_out)

        def read(block: Any) -> list[Given]:
            return refer(block, team.describe(block), shelf)

        self._runner = RayRunner(execution.workers, execution.stall_seconds, read=read)
        self._closer = weakref.finalize(self, _close, os.getpid(), team, self._runner, cluster)
        self._units = UnitGiver(self._runner)
        try:
            self._supplies = Supplies[UnitRef](job, self._units, state.lanes, recorded)
        except BaseException:
            self.close()
            raise
        for source in self._supplies.done:
            team.tell(Event(source=source, ended=True))

    def next_step(self) -> ProducedStep | None:
        """The next step; None at the end of the stream. What it raises, it raises again.

        Raises:
            BadRecordError, SourceError, DataChangedError, StorageError: the data cannot be used, or does not make one batch.
            StateError: the data does not lead to the places that the state holds.
            WorkerLost: a lane worker, or what it was to be given, is gone. Close the production and open another.
            RunnerError: the workers gave nothing in time, or go on dying; or the production is closed.
        """
        self._refuse_closed()
        if self._error is not None:
            raise self._error
        try:
            return self._take() if self._wait_for_step() else None
        except ZephonError as error:
            self._refuse_closed()
            self._error = error
            raise

    def _wait_for_step(self) -> bool:
        while (going_on := self._goes_on()) is None:
            if self._team.busy:
                self._team.gather(wait=True)
            elif not self._serve(wait=True):
                raise RunnerError("no lane worker has anything to do, and a step is missing. This is a fault of zephon_ray: report it")
        if not going_on and not self.state.step:
            raise no_batch_at_all(self._recipe, self._supplies.pairs)
        return going_on

    def _refuse_closed(self) -> None:
        if not self._closer.alive:
            raise RunnerError("the production is closed and makes no further step")

    def _goes_on(self) -> bool | None:
        """Whether there is a next step, and it is there; False at the end of the stream, None while workers are to say more.

        As in the collector, a window that cannot be used stops the stream only where the step cannot be made without it.
        """
        team, pads = self._team, self._recipe.final_batch == "pad"
        team.gather(wait=False)
        self._serve(wait=False)
        team.ask(self.state.step + self._ahead)
        if any(member.answer.over and not member.made for member in team.members):
            return False
        if all(member.made for member in team.members):
            return not (pads and is_over((member.made[0].block.over for member in team.members), pads=pads))
        missing = [member for member in team.members if not member.made]
        if all(member.answer.blocked_by and team.is_current(member) for member in missing):
            raise self._supplies.failed[min(chain.from_iterable(member.answer.blocked_by for member in missing))]
        return None

    def _serve(self, *, wait: bool) -> bool:
        """Tell all workers of what one of them wants; False where none wants anything, or it is not there and is not waited for."""
        for member in self._team.members:
            want = member.answer.want
            if want is None or not self._team.is_current(member):
                continue
            self._units.waits = wait
            try:
                windows = self._supplies.next_windows(want)
            except NotYetError:
                continue
            self._shelf.move()
            self._team.tell(self._event(want, windows))
            return True
        return False

    def _event(self, want: Want, windows: FedWindows[UnitRef] | None) -> Event:
        if windows is None:
            return Event(source=want.source, failed=True)
        return Event(
            source=want.source,
            windows=[(window.position, [unit.spot.place for unit in window.units]) for window in windows.windows],
            after=windows.after,
            ended=want.source in self._supplies.done,
        )

    def _take(self) -> ProducedStep:
        made = [member.made.popleft() for member in self._team.members]
        joined = join_blocks(self.state.chain, [step.block for step in made])
        step = step_of(joined, *self._supplies.first_used(joined))
        self.state = step.state
        return ProducedStep(step=step, blocks=tuple(chain.from_iterable(step.rows for step in made)))

    def stats(self) -> RunnerStats:
        """What was done so far to make units; from any thread."""
        return self._runner.stats()

    def close(self) -> None:
        """End actors and threads; again does nothing. Steps that were given keep their rows."""
        self._closer()


def _close(pid: int, team: LaneTeam, runner: RayRunner, cluster: Cluster) -> None:
    if pid != os.getpid():
        return  # a forked child holds none of it
    team.close()  # before the runner, whose threads may wait for a worker that hangs
    runner.close()
    cluster.leave()
