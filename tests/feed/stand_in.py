"""Productions for tests of the feed: the whole pipeline in one process, and one that fails when it is told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_ray.batches import GlobalStep
from zephon_ray.feed.blocks import RowBlock
from zephon_ray.ledger import Recorded
from zephon_ray.runners.base import Job, RunnerStats
from zephon_ray.state import Identity, StreamState, to_bytes
from zephon_ray.stream import Stream

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Produced:
    step: GlobalStep
    blocks: Sequence[RowBlock]


class StreamProduction:
    """Rows of `Stream`, put in blocks of three rows, so that blocks and ranks do not agree."""

    def __init__(
        self, job: Job, identity: Identity, state: StreamState | None, recorded: Recorded, put: Callable[[Rows], Any], runner: str
    ) -> None:
        self._put = put
        self._stream = Stream(
            job.recipe, runner=runner, workers=2, state=to_bytes(state, identity) if state else None, recorded=recorded,
            prepared=(job, identity),
        )  # fmt: skip

    def next_step(self) -> Produced | None:
        batch = self._stream.next_batch()
        if batch is None:
            return None
        blocks = [
            RowBlock(first_row=at, rows=len(batch.rows[at : at + 3]), ref=self._put(batch.rows[at : at + 3]))
            for at in range(0, len(batch.rows), 3)
        ]
        return Produced(batch, blocks)

    def close(self) -> None:
        self._stream.close()

    def stats(self) -> RunnerStats:
        return self._stream.stats()


def open_on_ray(job: Job, identity: Identity, state: StreamState | None, recorded: Recorded) -> StreamProduction:
    """In the actor's process; rows in the object store."""
    import ray

    return StreamProduction(job, identity, state, recorded, ray.put, "threads")


@dataclass
class Ref:
    """Stands for an object, here and now."""

    rows: Rows

    def hex(self) -> str:
        return f"{id(self):x}"


@dataclass
class Here:
    """Opens productions in this process, and lets them fail.

    Args:
        opened: the step after which each was opened.
        faults: raised instead of making the next step, in order; None for no fault.
    """

    opened: list[int] = field(default_factory=list)
    faults: list[Exception | None] = field(default_factory=list)

    def __call__(self, job: Job, identity: Identity, state: StreamState | None, recorded: Recorded) -> Failing:
        self.opened.append(state.step if state else 0)
        return Failing(self, StreamProduction(job, identity, state, recorded, Ref, "inline"))


class Failing:
    def __init__(self, here: Here, inner: StreamProduction) -> None:
        self._here, self._inner = here, inner

    def next_step(self) -> Produced | None:
        fault = self._here.faults.pop(0) if self._here.faults else None
        if fault:
            raise fault
        return self._inner.next_step()

    def close(self) -> None:
        self._inner.close()

    def stats(self) -> RunnerStats:
        return self._inner.stats()


def open_whole(job: Job, identity: Identity, state: StreamState | None, recorded: Recorded) -> Any:
    """The real one: lane workers and units made by Ray Data."""
    from zephon_ray.feed.production import Production

    return Production(job, state, recorded)
