"""A row plan: which ids the rows of some steps of a lane group are made of, and the making of them.

Of a row's three arrays only the inputs are gathered from pools. Labels are the inputs one place on, but for the last pair of each
segment; positions count from each segment's beginning. It neither decides what comes where nor knows of sources.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from zephon_ray.plan.packing import PADDING, Segments
from zephon_ray.plan.pieces import I64, within
from zephon_ray.pools import I32, SHORT

IGNORE = -100
"""Label of a padding pair, which PyTorch's cross entropy leaves out by default."""

_BLOCK = 1 << 15  # pairs made at a time, so that what is needed besides stays in the cache
_FEW = 4  # segments of a pool up to which a copy each costs less than gathering


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
        t, line = self._row_pairs, rows.reshape(-1)
        cell, pool, start, length = self._cell[of] - first_cell, self._pool[of], self._start[of], self._length[of]
        to = cell + cell // t * (2 * t)  # where a segment's inputs lie in the line of all numbers
        padding = None
        for number in np.unique(pool).tolist():
            mine = pool == number
            if number == PADDING:
                padding = mine
                continue
            ids, a, n, b = self._pools[number], start[mine], length[mine], to[mine]
            (_copy if len(n) <= _FEW or int(n.sum()) >= len(n) * SHORT else _gather)(line, ids, a, n, b)
        rows[:, 1, :-1] = rows[:, 0, 1:]
        for number in np.unique(pool).tolist():
            if number != PADDING:
                mine = pool == number
                line[(to + length)[mine] + (t - 1)] = self._pools[number][(start + length)[mine]]
        begins = np.repeat(cell.astype(np.int32), length).reshape(len(rows), t)
        np.subtract(self._ordinals[: len(rows) * t].reshape(len(rows), t), begins, out=rows[:, 2])
        return 0 if padding is None else self._pad(line, to[padding], length[padding])

    def _pad(self, line: I32, to: I64, length: I64) -> int:
        target = np.repeat(to, length) + within(length)
        line[target] = self._pad_id
        target += self._row_pairs
        line[target] = IGNORE
        return len(target)


def _copy(line: I32, ids: I32, start: I64, length: I64, to: I64) -> None:
    """One slice copy a segment: the least work where segments are long."""
    for first, n, at in zip(start.tolist(), length.tolist(), to.tolist(), strict=True):
        line[at : at + n] = ids[first : first + n]


def _gather(line: I32, ids: I32, start: I64, length: I64, to: I64) -> None:
    """No Python a segment, where they are short."""
    ends = length.cumsum()
    before, pair = ends - length, np.arange(ends[-1])
    # A pair's number along the segments says, with one shift a segment, where it comes from and where it goes.
    source: npt.NDArray[np.int64] = pair + np.repeat(start - before, length)
    pair += np.repeat(to - before, length)
    line[pair] = ids.take(source)
