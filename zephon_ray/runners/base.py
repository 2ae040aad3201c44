"""A runner makes units: it is given positions and allowances, and gives tokenised units in any order.

It decides when and where a unit is made, never what is in it. It puts nothing in order; that is the collector's affair.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Self

from zephon_ray.errors import RunnerError
from zephon_ray.manifest import SourceManifest
from zephon_ray.plan.windows import Position, UnitKey, UnitTask
from zephon_ray.recipe import Recipe
from zephon_ray.stages.tokenise import Options
from zephon_ray.stages.unit import TokenisedUnit


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a runner works on.

    Args:
        recipe: gives the order of units and the number of sources.
        manifests: one a source, in the recipe's order.
        options: how units are tokenised.
    """

    recipe: Recipe
    manifests: Sequence[SourceManifest]
    options: Options


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FailedUnit:
    """A unit that cannot be made. It is no error before its window is needed, so that it stops every run at the same step.

    Args:
        source: index of the source in the recipe.
        epoch: from 0.
        group: number of the group within its source.
        unit: number of the unit within its group.
        error: why, to be raised as it is.
    """

    source: int
    epoch: int
    group: int
    unit: int
    error: Exception

    @property
    def key(self) -> UnitKey:
        return self.source, self.epoch, self.group, self.unit


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerStats:
    """What a runner did since its start. All but `workers` only grow.

    Args:
        units: units made, taken or not.
        text_bytes: UTF-8 bytes of their texts.
        skipped_bytes: bytes decoded, but not tokenised, to reach a unit inside a stream.
        retries: units asked for again because their worker died or hung.
        workers: how many units can be in the making at a time.
        remade: units made again by the reference, because the fast engine gave other ids.
        cached: units among them that came from the token cache.
        written: units that were put there.
        corrupt: entries of the token cache that were cut or damaged, so that their units were tokenised again.
    """

    units: int
    text_bytes: int
    skipped_bytes: int
    retries: int
    workers: int
    remade: int = 0
    cached: int = 0
    written: int = 0
    corrupt: int = 0


class Runner(ABC):
    """One runner makes the units of one job, once. `allow` and `close` may be called from any thread, the others from one.

    Used in a forked child of the process that started it, it raises RunnerError: workers do not survive a fork.
    """

    reads_ahead: ClassVar[bool]
    """Units are made between calls of `take` too."""

    _pid: int | None = None

    @abstractmethod
    def start(self, job: Job, positions: Sequence[Position]) -> None:
        """Get ready; nothing is made before it is allowed.

        Args:
            job: what to work on.
            positions: where each source begins, in the recipe's order.

        Raises:
            StateError: a position does not fit its manifest.
            RunnerError: it was started or closed before.
        """

    @abstractmethod
    def allow(self, source: int, windows: int) -> None:
        """Let units be made and given; nothing beyond is ever made.

        Args:
            source: index of the source in the recipe.
            windows: how many windows from the start position on, across epochs. Fewer than before changes nothing.
        """

    @abstractmethod
    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        """One unit that is allowed and was not given before. The order is not defined.

        Args:
            timeout_s: seconds to wait at most. A runner that does not read ahead makes the unit, however long it takes.

        Raises:
            RunnerError: none came in time, none is left of those allowed, workers go on dying, or the runner is closed.
        """

    def lend(self) -> bool:
        """Before the start: make the one who takes a worker, if that spares a thread. He has to call `make_ahead` whenever he has time."""
        return False

    def make_ahead(self) -> bool:
        """Make a unit in the thread that takes, where that is a worker; False where there is none to be made now."""
        return False

    def stuck(self, limit_s: float) -> RunnerError | None:
        """What is wrong where the thread that takes is a worker, and has been making one unit for longer than `limit_s`.

        That thread cannot watch itself; whoever waits for it can, from any other.
        """
        return None

    @abstractmethod
    def close(self) -> None:
        """End all threads and processes. It can be called at any time, from any thread, and again."""

    @abstractmethod
    def stats(self) -> RunnerStats:
        """What was done so far; also after `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _refuse_fork(self) -> None:
        if self._pid not in (None, os.getpid()):
            raise RunnerError(
                f"this runner was started in process {self._pid} and is used in its forked child {os.getpid()}."
                " Start one in each process, after the fork"
            )


def name_of(task: UnitTask) -> str:
    """A unit as messages name it."""
    group = task.group
    place = {"parquet": "row group", "arrow": "record batch"}.get(group.shard.format, "byte range")
    inner = "" if group.shard.compression else f", {place} {group.ordinal}"
    return f"{group.where}{inner}, unit {task.unit} (group {group.group}, epoch {task.epoch})"


def refuse_start(started: bool, closed: bool) -> None:
    if started or closed:
        raise RunnerError(f"this runner was {'closed' if closed else 'started'} before. Make a new one")


def not_started() -> RunnerError:
    return RunnerError("this runner was not started. Call start first")


def nothing_left(closed: bool) -> RunnerError:
    if closed:
        return RunnerError("the runner is closed and gives no further unit")
    return RunnerError("every unit that is allowed was given, so none can come. Allow further windows first")
