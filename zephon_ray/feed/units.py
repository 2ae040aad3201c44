"""References to units: what the feed holds of a tokenised unit, whose arrays stay in the object store.

A block of units is described where a lane worker reads it, and only the description comes here. So the feed puts units in
order, and never sees a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from zephon_ray.plan.windows import Position
from zephon_ray.runners.base import FailedUnit, Job
from zephon_ray.runners.ray_worker import batch_of, made_of, packed, units_of
from zephon_ray.runners.worker import Effort, Made
from zephon_ray.stages.unit import TokenisedUnit

if TYPE_CHECKING:  # a lane worker would load Ray Data for nothing: a second of CPU, while ranks wait for it to start
    from zephon_ray.runners.ray_data import Given
    from zephon_ray.runners.ray_runner import RayRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a unit lies: its number in a block, which is in the object store. Whoever holds it, holds the block."""

    block: Any
    row: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Facts:
    """A unit without its arrays. Fields as in `TokenisedUnit` and `feeding.UnitFacts`."""

    source: int
    epoch: int
    group: int
    unit: int
    last: bool
    digest: int
    text_bytes: int
    bad: int
    empty: int
    short: int
    bad_examples: tuple[str, ...]
    error: str | None
    pairs: int
    nbytes: int


_FACTS = tuple(field.name for field in fields(Facts))

Described = tuple[Facts | FailedUnit, Effort]
"""A unit of a block, and what it took."""


def describe(table: pa.Table) -> list[Described]:
    """The units of a block in order, without their arrays."""
    return [
        (
            made.unit if isinstance(made.unit, FailedUnit) else Facts(**{name: getattr(made.unit, name) for name in _FACTS}),
            made.effort,
        )
        for made in units_of(table)
    ]


def unit_at(block: pa.Table, row: int) -> TokenisedUnit:
    """A unit of a block; its arrays are views of the block's buffers."""
    return TokenisedUnit.from_arrow(_batch_with(block, row), row)


def copied(rows: Iterable[tuple[pa.Table, int]]) -> Iterator[pa.Table]:
    """Rows of blocks, in order, in blocks of their own, which share no buffer with the old ones."""
    return packed(_owned(made_of(_batch_with(block, row), row)) for block, row in rows)


def _owned(made: Made) -> Made:
    return replace(made, unit=made.unit.owned()) if isinstance(made.unit, TokenisedUnit) else made


def _batch_with(block: pa.Table, row: int) -> pa.RecordBatch:
    batch = batch_of(block)
    if row >= batch.num_rows:
        raise IndexError(f"the block has {batch.num_rows} rows, and row {row} was asked for")
    return batch


class Spot:
    """Where a unit lies now: a unit that is kept is moved once."""

    __slots__ = ("place",)

    def __init__(self, place: Place) -> None:
        self.place = place


class Shelf:
    """Units that small sources keep are moved into blocks of their own, or each would hold the whole block that it came in.

    Args:
        copy: puts units into such blocks; gives where each lies then.
    """

    def __init__(self, copy: Callable[[Sequence[Place]], Sequence[Place]]) -> None:
        self._copy = copy
        self._waiting: list[Spot] = []

    def keep(self, spot: Spot) -> Spot:
        """The unit is to be kept; it is moved with the next `move`."""
        kept = Spot(spot.place)
        self._waiting.append(kept)
        return kept

    def move(self) -> None:
        """Move the units that are to be kept."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            for spot, place in zip(waiting, self._copy([spot.place for spot in waiting]), strict=True):
                spot.place = place


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitRef(Facts):
    """A unit whose arrays lie elsewhere.

    Args:
        spot: where.
        shelf: what a kept unit is given to.
    """

    spot: Spot
    shelf: Shelf

    @classmethod
    def of(cls, facts: Facts, place: Place, shelf: Shelf) -> UnitRef:
        return cls(**{name: getattr(facts, name) for name in _FACTS}, spot=Spot(place), shelf=shelf)

    def owned(self) -> UnitRef:
        return replace(self, spot=self.shelf.keep(self.spot))


def refer(block: Any, described: Sequence[Described], shelf: Shelf) -> list[Given]:
    """References to the units of a block that was described."""
    return [
        (unit if isinstance(unit, FailedUnit) else UnitRef.of(unit, Place(block=block, row=row), shelf), effort)
        for row, (unit, effort) in enumerate(described)
    ]


class NotYetError(Exception):
    """No unit is there, and the one who asked does not wait."""


class UnitGiver:
    """Gives what a Ray runner's reading of blocks gives: references to units (`supplies.Giver`).

    Args:
        runner: not started yet.

    Attributes:
        waits: whether `take` waits for a unit.
    """

    reads_ahead = True

    def __init__(self, runner: RayRunner) -> None:
        self._runner = runner
        self.waits = True

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        self._runner.start(job, positions)

    def allow(self, source: int, windows: int) -> None:
        self._runner.allow(source, windows)

    def take(self, timeout_s: float) -> UnitRef | FailedUnit:
        """As the runner's.

        Raises:
            NotYetError: it would have to wait, and is not to.
            RunnerError: as the runner's.
        """
        if not self.waits and self._runner.would_wait:
            raise NotYetError
        return cast(UnitRef | FailedUnit, self._runner.take(timeout_s))
