"""The worker's side of the Ray runner: some slots of every source, made as grants come, a block of units at a time.

A task asks for one *entry* after the other and makes what it grants. Entries never change once they were given, so a
task that Ray runs again makes the same units in the same order. Nothing here imports ray.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from zephon_ray.cache import Tokeniser
from zephon_ray.runners.base import FailedUnit, Job
from zephon_ray.runners.fronts import Grant, SlotStart, SlotWalk
from zephon_ray.runners.worker import EFFORT, Effort, Made, make, portable
from zephon_ray.stages.arrow_arrays import of_numbers
from zephon_ray.stages.unit import SCHEMA, TokenisedUnit, rows_of

NAME = "ZephonUnits"
"""Of what Ray Data reads."""
TITLE = f"Read{NAME}"
"""Ray gives it to processes while they run a task of ours."""

BLOCK_BYTES = 16 << 20
"""Ids a block holds at most, unless a single unit has more. Ray takes some ms a block whatever its size."""

BLOCK_S = 1.0
"""Seconds after which a block is passed on, however little it holds: a slow tokenizer is seen to be alive, and a taker does not wait."""

_UNITS = "units"
"""The column of a block."""

MADE = pa.schema([*SCHEMA, *(pa.field(name, pa.int64(), nullable=False) for name in EFFORT), pa.field("failure", pa.binary())])
"""A unit as a row of a block, with what it took; `failure` is the pickled error of one that was not made, between our own processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the workers of a wave may make next.

    Args:
        starts: of each source that the wave has not met before, its epoch and where each slot goes on.
        grants: windows, one a source at most.
    """

    starts: Mapping[int, tuple[int, Sequence[SlotStart]]]
    grants: Sequence[Grant]


def blocks(job: Job, tokeniser: Tokeniser, task: int, tasks: int, next_entry: Callable[[int], Entry | None]) -> Iterator[pa.Table]:
    """Make the units of every slot whose number is `task` modulo `tasks`, until `next_entry` gives None.

    Args:
        job: what to work on.
        tokeniser: the worker's.
        task: in [0, tasks).
        tasks: of the wave.
        next_entry: gives the entry of a number from 0; waits for it.
    """
    walks: dict[int, SlotWalk] = {}
    number = 0
    while (entry := next_entry(number)) is not None:
        for source, (epoch, starts) in entry.starts.items():
            slots = range(task, len(starts), tasks)
            walks[source] = SlotWalk(job.recipe, job.manifests[source], slots, epoch, starts)
        yield from packed(_made(tokeniser, walks, entry.grants))
        number += 1


def _made(tokeniser: Tokeniser, walks: Mapping[int, SlotWalk], grants: Sequence[Grant]) -> Iterator[Made]:
    """The units of an entry: a window of each source in turn."""
    for grant in grants:
        walks[grant.source].go_to(grant.epoch)
    left = list(grants)
    while left:
        for grant in list(left):
            walk, window = walks[grant.source], None
            while (found := walk.next(grant.end)) is not None and window in (None, found[0]):
                window = found[0]
                made = make(tokeniser, found[1])
                good = isinstance(made.unit, TokenisedUnit) and made.unit.error is None
                walk.made(made.unit.last if good and isinstance(made.unit, TokenisedUnit) else None)
                yield made
            if found is None:
                left.remove(grant)


def packed(units: Iterable[Made]) -> Iterator[pa.Table]:
    """Units in order in blocks of `BLOCK_BYTES`; see `batch_of`. The ids are copied, but for a unit that is alone in its block."""
    held: list[Made] = []
    size, until = 0, time.monotonic() + BLOCK_S
    for made in units:
        more = made.unit.nbytes if isinstance(made.unit, TokenisedUnit) else 0
        if held and size + more > BLOCK_BYTES:
            yield _block(held)
            held, size, until = [], 0, time.monotonic() + BLOCK_S
        held.append(made)
        size += more
        if time.monotonic() >= until:  # now, and not when the next is made, which may take as long
            yield _block(held)
            held, size, until = [], 0, time.monotonic() + BLOCK_S
    if held:
        yield _block(held)


def _block(held: Sequence[Made]) -> pa.Table:
    units = _rows_of(held)
    struct = pa.StructArray.from_arrays(units.columns, fields=list(units.schema))
    return pa.table({_UNITS: pa.LargeListArray.from_arrays(of_numbers(np.array([0, len(struct)])), struct)})


def batch_of(block: pa.Table) -> pa.RecordBatch:
    """The units of a block, one a row. A block has one row, which holds them all: Ray Data, told to pass on at once what a task yields,
    makes an object of each row.
    """
    return pa.RecordBatch.from_struct_array(block.column(_UNITS).chunk(0).flatten())


def _rows_of(held: Sequence[Made]) -> pa.RecordBatch:
    """A row in `MADE` for each unit."""
    rows = rows_of([_standing_for(made.unit) for made in held])
    effort = (of_numbers(np.array([getattr(made.effort, name) for made in held], np.int64)) for name in EFFORT)
    failures = [pickle.dumps(portable(made.unit.error)) if isinstance(made.unit, FailedUnit) else None for made in held]
    failure = pa.nulls(len(held), pa.binary()) if all(f is None for f in failures) else pa.array(failures, pa.binary())
    return pa.RecordBatch.from_arrays([*rows.columns, *effort, failure], schema=MADE)


def _standing_for(unit: TokenisedUnit | FailedUnit) -> TokenisedUnit:
    if isinstance(unit, TokenisedUnit):
        return unit
    return TokenisedUnit.nothing(source=unit.source, epoch=unit.epoch, group=unit.group, unit=unit.unit)


def units_of(block: pa.Table) -> Iterator[Made]:
    """The units of a block; their ids are views of its buffers. Of a task that made none, Ray Data gives a block without a row."""
    if block.num_rows:
        batch = batch_of(block)
        yield from (made_of(batch, row) for row in range(batch.num_rows))


def made_of(batch: pa.RecordBatch, row: int) -> Made:
    """A unit from a row in `MADE`; its ids are a view of the batch's buffers."""
    unit: TokenisedUnit | FailedUnit = TokenisedUnit.from_arrow(batch, row)
    failure = batch.column("failure")[row].as_py()
    if failure is not None:
        error = pickle.loads(failure)  # noqa: S301  our own worker's
        unit = FailedUnit(source=unit.source, epoch=unit.epoch, group=unit.group, unit=unit.unit, error=error)
    return Made(unit=unit, effort=Effort(**{name: batch.column(name)[row].as_py() for name in EFFORT}))
