"""A row plan: which ids the rows of some steps of a lane group are made of, and the making of them.

Inputs are ids of the line that all pools share, labels the same one place on, positions count from each segment's beginning. It neither
decides what comes where nor knows of sources.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zephon_ray.hashing import digests128
from zephon_ray.plan.packing import PADDING, Segments
from zephon_ray.pools import I32, SHORT

IGNORE = -100
"""Label of a padding pair, which PyTorch's cross entropy leaves out by default."""

_BLOCK = 1 << 15  # pairs made at a time, so that what is needed besides stays in the cache


class RowPlan:
    """The rows of steps 0 to `steps - 1`.

    Args:
        segments: all that the rows are made of, padding too: every pair of every row once.
        line: int32 [n], what the segments' starts count along; it begins with at least a row's worth of the padding's input.
        steps: how many.
        lanes: in all, of `rows_per_lane` rows a step each.
        rows_per_lane: at least 1.
        row_pairs: `sequence_length`.
    """

    def __init__(self, segments: Segments, line: I32, *, steps: int, lanes: int, rows_per_lane: int, row_pairs: int) -> None:
        self._line, self._bytes, self._row_pairs = line, line.data.cast("B"), row_pairs
        span = rows_per_lane * row_pairs
        at, step_pairs = segments["at"], lanes * span
        step = at // span
        place = segments["lane"] * np.int64(span) + at + step * (step_pairs - span)  # on the line of all steps' pairs
        order = np.argsort(place, kind="stable")
        cell = place[order]
        self._start, self._length, pool = (segments[name][order] for name in ("start", "pairs", "pool"))
        self._last = line.take(self._start + self._length)
        self._padding = np.flatnonzero(pool == PADDING)
        self._last[self._padding] = IGNORE
        self._block_rows = max(1, _BLOCK // row_pairs)
        blocks = np.arange(0, lanes * rows_per_lane, self._block_rows) * row_pairs
        bounds = (np.arange(steps)[:, None] * step_pairs + blocks).ravel()
        self._blocks = len(blocks)
        edges = np.append(np.searchsorted(cell, bounds), len(order))
        self._edges = edges.tolist()
        # All that can be made for all blocks at once: each costs as much for the few segments of one.
        self._cell = cell - np.repeat(bounds, np.diff(edges))  # within its block
        self._number, self._end = self._cell.astype(np.int32), self._cell + self._length
        self._first_byte, self._end_byte = self._start * 4, (self._start + self._length) * 4
        self._padding_edges = np.searchsorted(self._padding, self._edges).tolist()
        most = self._block_rows * row_pairs
        self._ordinals, self._numbers = np.arange(most), np.arange(most, dtype=np.int32)
        self._ids = np.empty(most + 1, np.int32)

    def fill(self, step: int, rows: I32) -> tuple[int, tuple[bytes, ...]]:
        """Make the rows of a step.

        Args:
            step: which.
            rows: int32 [rows, 3, sequence_length], contiguous; is filled.

        Returns:
            How many of its pairs are padding, and the digest of each row.
        """
        first, digests = step * self._blocks, list[bytes]()
        for block in range(self._blocks):
            made = rows[block * self._block_rows : (block + 1) * self._block_rows]
            self._fill_block(first + block, made)
            digests += digests128(made)  # while they are in the cache
        begin, end = self._padding_edges[first], self._padding_edges[first + self._blocks]
        return int(self._length[self._padding[begin:end]].sum()) if begin < end else 0, tuple(digests)

    def _fill_block(self, block: int, rows: I32) -> None:
        """Whole rows."""
        of = slice(self._edges[block], self._edges[block + 1])
        shape, pairs = (len(rows), self._row_pairs), len(rows) * self._row_pairs
        length = self._length[of]
        np.subtract(self._numbers[:pairs].reshape(shape), self._number[of].repeat(length).reshape(shape), out=rows[:, 2])
        short = pairs < len(length) * SHORT
        ids = self._gathered(self._start[of] - self._cell[of], length, pairs) if short else self._joined(of)
        rows[:, 0] = ids[:-1].reshape(shape)
        # Labels are the inputs one place on, but for each segment's last.
        ids[self._end[of]] = self._last[of]
        first, end = self._padding_edges[block], self._padding_edges[block + 1]
        for padding in self._padding[first:end].tolist() if first < end else ():
            ids[self._cell[padding] + 1 : self._end[padding]] = IGNORE
        rows[:, 1] = ids[1:].reshape(shape)

    def _joined(self, of: slice) -> I32:
        """A copy a segment: the least work where they are long. One id more than pairs, to be written over."""
        line = self._bytes
        parts = [line[first:end] for first, end in zip(self._first_byte[of].tolist(), self._end_byte[of].tolist(), strict=True)]
        return np.frombuffer(bytearray().join([*parts, line[:4]]), np.int32)

    def _gathered(self, shift: npt.NDArray[np.int64], length: npt.NDArray[np.int64], pairs: int) -> I32:
        """No Python a segment, where they are short."""
        index = np.repeat(shift, length)
        index += self._ordinals[:pairs]
        self._line.take(index, out=self._ids[:pairs], mode="clip")  # the default mode would go by way of another array
        return self._ids[: pairs + 1]
