"""A chunk: consecutive steps of a lane group that nothing still to be read can change.

It holds what to copy where for each step, and what each step changes in the lanes' standing. Rows are made only when
a step is asked for, so a chunk of many steps costs no memory beyond its plan and the pools that it copies from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon_ray.plan.dealing import Dealer, SourceStart
from zephon_ray.plan.packing import Segments
from zephon_ray.plan.pieces import I64, Pieces, within
from zephon_ray.pools import I32
from zephon_ray.row_plan import RowPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Places and counts of a group's lanes, by window ordinal. Arrays are int64.

    Args:
        windows, indices, counts: [sources, lanes], as in the contract's "State".
        last_time, last_source: [lanes], virtual time and source of the last piece begun.
    """

    windows: I64
    indices: I64
    counts: I64
    last_time: I64
    last_source: I64

    @classmethod
    def at(cls, sources: Sequence[SourceStart], lanes: slice) -> Standing:
        """What a state says of some lanes."""
        n = len(sources[0].windows[lanes])
        return cls(
            windows=np.stack([s.windows[lanes] for s in sources]),
            indices=np.stack([s.indices[lanes] for s in sources]),
            counts=np.stack([s.counts[lanes] for s in sources]),
            last_time=np.full(n, -1, np.int64),
            last_source=np.full(n, -1, np.int64),
        )

    def after(self, step: int) -> Standing:
        """Of arrays with an axis of steps in front, those after one step."""
        return Standing(
            windows=self.windows[step],
            indices=self.indices[step],
            counts=self.counts[step],
            last_time=self.last_time[step],
            last_source=self.last_source[step],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _End:
    """A source at its end under `continue`: a lane has left it once it took a piece of a later (time, source).

    Args:
        source: index in the recipe.
        times: int64 [lanes], virtual time at which each lane would have taken its next piece of it.
        window: ordinal of the window after its last.
    """

    source: int
    times: I64
    window: int

    def left_by(self, times: I64, sources: I64, lanes: I64) -> npt.NDArray[np.bool_]:
        own = self.times[lanes]
        left: npt.NDArray[np.bool_] = (times > own) | ((times == own) & (sources > self.source))
        return left


@dataclass(kw_only=True, slots=True)  # not frozen: that makes one three times dearer, and there is one a step
class StepRows:
    """One step of a lane group.

    Args:
        digests: of the group's rows, lane by lane, 16 bytes each.
        padding: pairs that are padding.
        windows, indices, counts: int64 [sources, lanes], where the lanes stand after it, as in `LaneBlock`.
        oldest: of each source, the oldest window in which one of them stands, as the dealers count.
        open_source, open_used: int64 [lanes], the piece or fill open after it, as in `LanesState`.
        pairs: int64 [sources], pairs of all pieces begun since the run began.
        used_before, used: int64 [sources], the newest window used before and after it, as in `LaneBlock`.
    """

    digests: tuple[bytes, ...]
    padding: int
    windows: I64
    indices: I64
    counts: I64
    oldest: list[int]
    open_source: I64
    open_used: I64
    pairs: I64
    used_before: I64
    used: I64


class Chunk:
    """The plan of some steps. Steps are numbered from 0 within the chunk, and made in order.

    Args:
        pieces: laid pieces that are begun before the chunk's end and over after its start, lane by lane in order.
        segments: all that its rows are made of.
        line: int32 [n], ids that the segments' starts count along, as in `RowPlan`.
        dealers: one a source, read for the sources that are at their end.
        standing: before its first step.
        begun_pairs: int64 [sources], pairs of the pieces begun before it.
        ordinals: int64 [sources], of the dealers' first windows in the stream's count.
        wraps: whether the packing is `wrap`.
        stops: whether a lane ends with the first source that does.
        steps: how many, at least 1.
        rows_per_lane: rows a step and lane.
        row_pairs: `sequence_length`.
        lanes: the group's lanes.
    """

    def __init__(
        self,
        *,
        pieces: Pieces,
        segments: Segments,
        line: I32,
        dealers: Sequence[Dealer],
        standing: Standing,
        begun_pairs: I64,
        ordinals: I64,
        steps: int,
        rows_per_lane: int,
        row_pairs: int,
        wraps: bool,
        stops: bool,
        lanes: range,
    ) -> None:
        self.steps, self.lanes = steps, lanes
        self._span, self._row_pairs, self._wraps = rows_per_lane * row_pairs, row_pairs, wraps
        mine = slice(lanes.start, lanes.stop)
        self._ends = [
            _End(source=d.source, times=d.end_times[mine], window=d.next_window) for d in dealers if d.end_times is not None and not stops
        ]
        self._rows = RowPlan(segments, line, steps=steps, lanes=len(lanes), rows_per_lane=rows_per_lane, row_pairs=row_pairs)
        # The step that is the first after which a piece is begun, or done: row t of what is planned is after the chunk's first t steps.
        begun, done = pieces["begun"] // self._span + 1, -(-pieces["done"] // self._span)
        self._plan_standing(pieces, begun, done, standing)
        self._plan_counts(pieces, np.maximum(begun, 0), begun_pairs, ordinals)
        self._plan_open(pieces, np.maximum(begun, 0))
        self._oldest = self._standing.windows.min(axis=2).tolist()
        self._windows = self._standing.windows + ordinals[:, None]
        self._next = 0

    # ---- the plan of what each step changes, made for all steps at once

    def _plan_standing(self, pieces: Pieces, begun: I64, done: I64, before: Standing) -> None:
        """Where the lanes stand after each step: `Standing` with an axis of steps in front."""
        sources, lanes = before.windows.shape
        source, lane = pieces["source"], pieces["lane"]
        of_source = source * np.int64(lanes) + lane
        counted = begun if self._wraps else done
        used = self._last(done, of_source, sources * lanes).reshape(-1, sources, lanes)
        taken = self._last(counted, of_source, sources * lanes).reshape(-1, sources, lanes)
        last = self._last(counted, lane, lanes)

        def at(number: I64, column: str, otherwise: I64) -> I64:
            values = pieces[column][number] if len(pieces) else otherwise
            return np.where(number < 0, otherwise, values)

        self._standing = Standing(
            windows=at(used, "next_window", before.windows),
            indices=at(used, "next_index", before.indices),
            counts=at(taken, "count", before.counts),
            last_time=at(last, "virtual_time", before.last_time),
            last_source=at(last, "source", before.last_source),
        )
        for end in self._ends:
            left = end.left_by(self._standing.last_time, self._standing.last_source, np.arange(lanes))
            self._standing.windows[:, end.source][left] = end.window
            self._standing.indices[:, end.source][left] = 0

    def _last(self, row: I64, place: I64, places: int) -> I64:
        """Number of the last piece of each place (a lane, or one of a source) up to each row, int64 [steps + 1, places]; -1 for none."""
        last = np.full((self.steps + 1) * places, -1, np.int64)
        mine = (row > 0) & (row <= self.steps)
        last[(row * places + place)[mine]] = np.flatnonzero(mine)  # of equal ones the last wins, says numpy
        return np.maximum.accumulate(last.reshape(-1, places), axis=0)

    def _plan_counts(self, pieces: Pieces, row: I64, begun_pairs: I64, ordinals: I64) -> None:
        """Pairs begun and newest windows used, int64 [steps + 1, sources]."""
        sources = len(ordinals)
        place = row * sources + pieces["source"]
        pairs = np.zeros((self.steps + 1) * sources, np.int64)
        np.add.at(pairs, place, np.where(pieces["begun"] >= 0, pieces["pairs"], 0))
        self._pairs = np.cumsum(pairs.reshape(-1, sources), axis=0) + begun_pairs
        newest = np.full((self.steps + 1) * sources, -1, np.int64)
        np.maximum.at(newest, place, pieces["window"])
        used = newest.reshape(-1, sources)
        for end in self._ends:
            left = end.left_by(pieces["virtual_time"], pieces["source"], pieces["lane"])
            if left.any():
                used[row[left].min(), end.source] = end.window - 1
        self._used = np.maximum.accumulate(used, axis=0) + ordinals

    def _plan_open(self, pieces: Pieces, first: I64) -> None:
        """Pieces (`best_fit`: fills) open after each step: int64 [steps + 1, lanes], as in `LanesState`."""
        times = np.maximum(np.minimum((pieces["done"] - 1) // self._span, self.steps) - first + 1, 0)
        if not self._wraps:  # one piece of each fill says all
            times[1:][(pieces["lane"][1:] == pieces["lane"][:-1]) & (pieces["begun"][1:] == pieces["begun"][:-1])] = 0
        of = np.repeat(np.arange(len(pieces)), times)
        step = first[of] + within(times)
        lane, used = pieces["lane"][of], step * self._span - pieces["begun"][of]
        self._open_source = np.full((self.steps + 1, len(self.lanes)), -1, np.int64)
        self._open_used = np.zeros((self.steps + 1, len(self.lanes)), np.int64)
        if self._wraps:
            self._open_source[step, lane] = pieces["source"][of]
        self._open_used[step, lane] = used if self._wraps else used // self._row_pairs

    def end_standing(self) -> Standing:
        """Where the lanes stand after the chunk's last step."""
        return self._standing.after(self.steps)

    @property
    def end_pairs(self) -> I64:
        """Pairs of the pieces begun by the chunk's end, int64 [sources]."""
        pairs: I64 = self._pairs[-1].copy()
        return pairs

    # ---- rows

    def next_step(self, rows: I32) -> StepRows:
        """Make the next step; at most `steps` times.

        Args:
            rows: int32 [rows, 3, sequence_length], contiguous; is filled with inputs, labels and positions, lane by lane.
        """
        before = self._next
        self._next = after = before + 1
        padding, digests = self._rows.fill(before, rows)
        return StepRows(
            padding=padding,
            digests=digests,
            windows=self._windows[after],
            indices=self._standing.indices[after],
            counts=self._standing.counts[after],
            oldest=self._oldest[after],
            open_source=self._open_source[after],
            open_used=self._open_used[after],
            pairs=self._pairs[after],
            used_before=self._used[before],
            used=self._used[after],
        )

    @property
    def left(self) -> int:
        """Steps that are still to be made."""
        return self.steps - self._next
