"""A lane worker: the body of an actor around one lane group. It takes windows as references, and gives lane blocks and rows.

It reads units out of the object store and returns rows into it, so that whoever orders the groups sees neither. Results of a
call belong to the caller, so they outlive the lane worker. It knows nothing of others, and what it says of a step does not depend on
how it is called.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import ray

from zephon_ray.errors import RunnerError
from zephon_ray.feed.units import Described, Place, copied, describe, unit_at
from zephon_ray.feeding import FedWindows, Want, Window
from zephon_ray.lane_blocks import LaneBlock, LanesState
from zephon_ray.lanes import LaneGroup
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import Recipe
from zephon_ray.runners.ray_worker import batch_of
from zephon_ray.stages.unit import TokenisedUnit

REPLY_S = 0.02
"""A call that has made a step ends after so long, so that the first of many steps need not wait for the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that every lane group of a stream is told, all in the same order.

    Args:
        source: that it is about.
        windows: the next ones: where each begins, and where its units lie, slot by slot.
        after: the start of the window after them; None where there are none.
        ended: no window is left.
        failed: its next window cannot be used.
    """

    source: int
    windows: Sequence[tuple[Position, Sequence[Place]]] = ()
    after: Position | None = None
    ended: bool = False
    failed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of a call.

    Args:
        steps: what is to be said of those that were made, in order.
        events: told so far, all of which are taken into account.
        want: what is needed for the next step, where that can be had.
        over: the group makes no further step. Never with padding: there, its blocks say it.
        blocked_by: sources without whose next window, which cannot be used, the next step cannot be made.
        more: it could go on, and the call's time or room was over.
    """

    steps: tuple[LaneBlock, ...]
    events: int
    want: Want | None = None
    over: bool = False
    blocked_by: tuple[int, ...] = ()
    more: bool = False


class LaneWorker:
    """Calls of `advance` come from one caller, one after the other; the others may come at any time.

    Args:
        recipe: the run's.
        start: where all lanes of the run stand.
        step: after which they stand there.
        pad_id: input of padding pairs.
        lanes: the group's, a contiguous range.
        cuts: rows of a global batch that each row block of the group holds, in order.
        call_steps: made in a call at most, from 1.
    """

    def __init__(
        self, recipe: Recipe, start: LanesState, *, step: int, pad_id: int, lanes: range, cuts: Sequence[range], call_steps: int
    ) -> None:
        self._group = LaneGroup(recipe, start, step=step, pad_id=pad_id, lanes=lanes)
        self._step, self._pads = step, recipe.final_batch == "pad"
        # What a call returns is copied when it is over, so each of its steps has room of its own, which the next call uses again.
        self._rows = np.empty((call_steps, len(lanes) * recipe.rows_per_lane, 3, recipe.sequence_length), np.int32)
        self._parts = [slice(cut.start - cuts[0].start, cut.stop - cuts[0].start) for cut in cuts]
        self._events, self._calls = 0, 0
        self._failed: set[int] = set()

    # ---- units

    def describe(self, blocks: Sequence[Any]) -> list[list[Described]]:
        """What blocks hold, without the arrays; it brings them to this node, where they will be needed."""
        return [describe(table) for table in ray.get(list(blocks))]

    def copy_out(self, places: Sequence[Place]) -> list[Place]:
        """Put units into blocks of their own; gives where they lie then, in order."""
        tables = _tables(places)
        new: list[Place] = []
        for table in copied([(tables[place.block], place.row) for place in places]):
            block = ray.put(table)
            new += [Place(block=block, row=row) for row in range(batch_of(table).num_rows)]
        return new

    # ---- steps

    def advance(self, call: int, events: Sequence[Event], until: int) -> tuple[Any, ...]:
        """Make the next steps, as far as the windows go that it was told of. Call it with as many returns as there are.

        Args:
            call: their number, from 0; they must not overtake each other.
            events: since the call before.
            until: the last step to make.

        Returns:
            The `Answer`, and the row blocks of `call_steps` steps one after the other, int32 [rows of the cut, 3, T] each; None in
            place of those that were not made.

        Raises:
            RunnerError: a call is missing.
            StateError: the windows do not lead to the places that the start holds.
        """
        if call != self._calls:
            raise RunnerError(f"a lane worker was called out of turn: call {call} came where call {self._calls} should")
        self._calls += 1
        for event in events:
            self._take_in(event)
        answer = self._made(until)
        rows = [step[part] for step in self._rows[: len(answer.steps)] for part in self._parts]
        return (answer, *rows, *[None] * (len(self._rows) * len(self._parts) - len(rows)))

    def _made(self, until: int) -> Answer:
        """Make the steps of a call."""
        began, steps = time.monotonic(), list[LaneBlock]()
        while True:
            want = self._group.want(self._failed)
            over = self._group.over and not self._pads
            if want is not None or over or not self._group.ready:
                blocked_by = () if want is not None or over else self._blocked_by()
                return Answer(steps=tuple(steps), events=self._events, want=want, over=over, blocked_by=blocked_by)
            more = self._step < until
            if not more or len(steps) == len(self._rows) or (steps and time.monotonic() - began > REPLY_S):
                return Answer(steps=tuple(steps), events=self._events, more=more)
            steps.append(self._group.next_step(self._rows[len(steps)]))
            self._step += 1

    def _take_in(self, event: Event) -> None:
        self._events += 1
        if event.after is not None:
            tables = _tables(list(chain.from_iterable(places for _, places in event.windows)))
            windows: list[Window[TokenisedUnit]] = [
                Window(position=position, units=[unit_at(tables[place.block], place.row) for place in places])
                for position, places in event.windows
            ]
            self._group.feed(event.source, FedWindows(windows=windows, after=event.after))
        if event.ended:
            self._group.end(event.source)
        if event.failed:
            self._failed.add(event.source)

    def _blocked_by(self) -> tuple[int, ...]:
        """Failed sources that would be wanted, had they not failed."""
        return tuple(source for source in sorted(self._failed) if self._group.want(self._failed - {source}) is not None)


def _tables(places: Sequence[Place]) -> dict[Any, Any]:
    """The blocks that units lie in, brought here."""
    blocks = list(dict.fromkeys(place.block for place in places))
    return dict(zip(blocks, ray.get(blocks), strict=True))
