"""Supplies: the windows of all sources, as lane groups ask for them, over one runner.

It decides how far the runner may go, puts what it gives in order, and knows what each step is the first to use. It
neither deals nor looks at an id, so units may be references to arrays that lie elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from zephon_ray.errors import DataChangedError, RunnerError, SourceError, StorageError
from zephon_ray.feeding import FedWindows, U, UnitFacts, Want
from zephon_ray.joining import JoinedStep
from zephon_ray.lane_blocks import LanesState
from zephon_ray.ledger.line import LeftOutCounts, Recorded, UnitDigests, WindowUse
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import SHARE_BITS
from zephon_ray.runners.base import FailedUnit, Job
from zephon_ray.supply import Memory, SourceSupply

MEMORY_BYTES = 32 << 20
"""Ids that small sources keep in memory, all together, so that their later epochs read nothing."""

WAIT_S = 600.0
"""How long a unit may take before the runner is said to be stuck."""

LEAD_WINDOWS = 2
"""Windows of a source, at least, that a runner may make ahead of those that were fed."""
_MOST_WINDOWS = 4096

U_co = TypeVar("U_co", bound=UnitFacts, covariant=True)


class Giver(Protocol[U_co]):
    """A runner, or what stands before one and gives references to what it made. Methods as `runners.base.Runner`'s."""

    @property
    def reads_ahead(self) -> bool: ...
    def start(self, job: Job, positions: Sequence[Position]) -> None: ...
    def allow(self, source: int, windows: int) -> None: ...
    def take(self, timeout_s: float) -> U_co | FailedUnit: ...


class Supplies(Generic[U]):
    """Windows of all sources of one stream, from a state on. All lane groups are fed what `next_windows` gives, in that order.

    Args:
        job: recipe, manifests and options.
        giver: not started yet; the caller closes it.
        lanes: where the lanes stand.
        recorded: digests of windows that will be read again, to be compared.

    Attributes:
        failed: source -> why its next window cannot be used.

    Raises:
        StateError: a position does not fit the data.
        SourceError: a source has no group.
        RunnerError: the runner was started before, or its workers cannot be.
    """

    def __init__(self, job: Job, giver: Giver[U], lanes: LanesState, recorded: Recorded | None = None) -> None:
        self._recipe, self._giver = job.recipe, giver
        self.failed: dict[int, Exception] = {}
        memory = Memory(MEMORY_BYTES)
        positions = [s.position for s in lanes.sources]
        self._of = [
            SourceSupply[U](job.recipe, m, p, memory, _of_source(recorded or {}, m.source))
            for m, p in zip(job.manifests, positions, strict=True)
        ]
        starts = [int((source.windows - (source.indices == 0)).max()) for source in lanes.sources]
        for supply, newest in zip(self._of, starts, strict=True):
            supply.skip_used(newest)
        self._used = np.array(starts, np.int64)
        giver.start(job, positions)
        if giver.reads_ahead:
            for supply in self._of:
                self._allow(supply)

    @property
    def done(self) -> list[int]:
        """Sources of which no window is left."""
        return [s.source for s in self._of if s.done]

    @property
    def pairs(self) -> int:
        """Next-token pairs of all windows given so far."""
        return sum(s.pairs for s in self._of)

    def next_windows(self, want: Want) -> FedWindows[U] | None:
        """At least one window of the source that is wanted; None where the next cannot be used, and `failed` holds why.

        Raises:
            RunnerError: the workers gave nothing in time, or go on dying.
        """
        supply = self._of[want.source]
        deadline = time.monotonic() + WAIT_S
        while (windows := self._whole(supply, want.pairs)) is None:
            if want.source in self.failed:
                return None
            self._allow(supply)
            left = deadline - time.monotonic()
            if left <= 0:
                raise RunnerError(
                    f"source {supply.name!r}: its next window did not come within {WAIT_S:.0f} s, though other units did."
                    " Look whether its storage answers, or lower its unit_bytes"
                )
            unit = self._giver.take(left)
            self._of[unit.source].put(unit)
        if self._giver.reads_ahead:
            self._allow(supply)
        return windows

    def _whole(self, supply: SourceSupply[U], pairs: int) -> FedWindows[U] | None:
        try:
            return supply.next_windows(pairs, _MOST_WINDOWS)
        except (SourceError, DataChangedError, StorageError) as e:
            self.failed[supply.source] = e
            return None

    def first_used(self, step: JoinedStep) -> tuple[Mapping[int, tuple[WindowUse, ...]], Mapping[int, LeftOutCounts]]:
        """By source, the windows that a step is the first to use, and what was left out of them; steps in order."""
        windows, left_out = dict[int, tuple[WindowUse, ...]](), dict[int, LeftOutCounts]()
        newest = np.maximum(step.used_before, step.used)
        if not (newest > self._used).any():
            return windows, left_out
        for source in np.flatnonzero(newest > self._used).tolist():
            supply = self._of[source]
            supply.skip_used(int(step.used_before[source]))
            used, counts = supply.use(int(step.used[source]))
            if used:
                windows[supply.source] = used
            if any(counts):
                left_out[supply.source] = counts
        self._used = np.maximum(self._used, newest)
        return windows, left_out

    def _allow(self, supply: SourceSupply[U]) -> None:
        """Say how far the runner may go: two windows, or as many small ones as two steps take."""
        if supply.remembered or supply.done:
            return
        lead = 1
        if self._giver.reads_ahead:
            recipe = self._recipe
            step_pairs = recipe.global_batch_size * recipe.sequence_length * recipe.shares()[supply.source] >> SHARE_BITS
            lead = int(np.clip(2 * step_pairs // supply.mean_pairs if supply.fed else 0, LEAD_WINDOWS, _MOST_WINDOWS))
        self._giver.allow(supply.source, supply.fed + lead)


def _of_source(recorded: Recorded, source: int) -> dict[tuple[int, int], UnitDigests]:
    return {(epoch, window): digests for (s, epoch, window), digests in recorded.items() if s == source}
