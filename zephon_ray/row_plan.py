"""A row plan: which ids the rows of some steps of a lane group are made of, and the making of them.

Inputs and labels come from pools, positions count from each segment's beginning. It neither decides what comes where nor knows of sources.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zephon_ray.plan.packing import PADDING, Segments
from zephon_ray.plan.pieces import I64
from zephon_ray.pools import I32, SHORT

IGNORE = -100
"""Label of a padding pair, which PyTorch's cross entropy leaves out by default."""

_BLOCK = 1 << 15  # pairs made at a time, so that what is needed besides stays in the cache


class RowPlan:
    """The rows of steps 0 to `steps - 1`.

    Args:
        segments: all that the rows are made of, padding too: every pair of every row once.
        pools: ids (as int32) by pool number.
        steps: how many.
        rows_per_lane: rows a step and lane.
        row_pairs: `sequence_length`.
        pad_id: input of padding.
    """

    def __init__(
        self, segments: Segments, pools: Mapping[int, I32], *, steps: int, rows_per_lane: int, row_pairs: int, pad_id: int
    ) -> None:
        self._pools, self._row_pairs, self._pad_id = pools, row_pairs, pad_id
        span = rows_per_lane * row_pairs
        step = segments["at"] // span
        cell = segments["lane"] * np.int64(span) + segments["at"] - step * span
        order = np.lexsort((cell, step))
        self._edges = np.searchsorted(step[order], np.arange(steps + 1)).tolist()
        self._cell = cell[order]  # the pair of the step, row after row, at which a segment begins
        self._pool, self._start, self._length = (segments[name][order] for name in ("pool", "start", "pairs"))
        self._block_rows = max(1, _BLOCK // row_pairs)
        self._ordinals = np.arange(self._block_rows * row_pairs, dtype=np.int32)

    def fill(self, step: int, rows: I32) -> int:
        """Make the rows of a step.

        Args:
            step: which.
            rows: int32 [rows, 3, sequence_length], contiguous; is filled.

        Returns:
            How many of its pairs are padding.
        """
        first, end = self._edges[step], self._edges[step + 1]
        cells = self._cell[first:end]
        padded = 0
        for row in range(0, len(rows), self._block_rows):
            block = rows[row : row + self._block_rows]
            edges = np.searchsorted(cells, (row * self._row_pairs, (row + len(block)) * self._row_pairs)).tolist()
            padded += self._fill_block(block, row * self._row_pairs, slice(first + edges[0], first + edges[1]))
        return padded

    def _fill_block(self, rows: I32, first_cell: int, of: slice) -> int:
        """Whole rows, which segments `of` make up."""
        t = self._row_pairs
        cell, pool, start, length = self._cell[of] - first_cell, self._pool[of], self._start[of], self._length[of]
        to = cell + cell // t * (2 * t)  # where a segment's inputs lie in the line of all numbers
        pairs = len(rows) * t
        begins = np.repeat(cell.astype(np.int32), length).reshape(len(rows), t)
        np.subtract(self._ordinals[:pairs].reshape(len(rows), t), begins, out=rows[:, 2])
        make = self._copy if pairs >= len(cell) * SHORT else self._gather
        return make(rows, pool, start, length, to)

    def _copy(self, rows: I32, pool: I64, start: I64, length: I64, to: I64) -> int:
        """Two slice copies a segment: the least work where segments are long."""
        t, line, pools, padded = self._row_pairs, rows.reshape(-1), self._pools, 0
        for number, first, n, at in zip(pool.tolist(), start.tolist(), length.tolist(), to.tolist(), strict=True):
            if number == PADDING:
                line[at : at + n], line[at + t : at + t + n] = self._pad_id, IGNORE
                padded += n
            else:
                ids = pools[number]
                line[at : at + n] = ids[first : first + n]
                line[at + t : at + t + n] = ids[first + 1 : first + n + 1]
        return padded

    def _gather(self, rows: I32, pool: I64, start: I64, length: I64, to: I64) -> int:
        """No Python a segment, where they are short. Labels are the inputs one place on, but for each segment's last."""
        t, line, padded = self._row_pairs, rows.reshape(-1), 0
        of_pools = [(number, pool == number) for number in set(pool.tolist())]
        for number, mine in of_pools:
            if number != PADDING:
                source, target = _runs(start[mine], length[mine], to[mine])
                line[target] = self._pools[number].take(source)
        rows[:, 1, :-1] = rows[:, 0, 1:]
        for number, mine in of_pools:
            if number != PADDING:
                line[(to + length)[mine] + (t - 1)] = self._pools[number][(start + length)[mine]]
            else:
                _, target = _runs(to[mine], length[mine], to[mine])
                padded = len(target)
                line[target], line[target + t] = self._pad_id, IGNORE
        return padded


def _runs(start: I64, length: I64, to: I64) -> tuple[I64, I64]:
    """Places `start`, `start + 1`, ... and `to`, `to + 1`, ..., as many as each run is long: both int64 [sum of lengths]."""
    ends = length.cumsum()
    before, pair = ends - length, np.arange(ends[-1])
    # A pair's number along the runs says, with one shift a run, where it comes from and where it goes.
    return pair + np.repeat(start - before, length), pair + np.repeat(to - before, length)
