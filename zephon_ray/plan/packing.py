"""Packing: a lane's pieces, in mixture order, laid out in rows.

A lane's rows lie end to end on a line counted in pairs: row r is [r*T, (r+1)*T). A *segment* is a run of pairs of one
piece inside one row. Every laid piece knows where on that line it is begun and where it is over: with `wrap` that is
where its pairs lie, with `best_fit` the first and last edge of its fill's rows. So "begun by step t" and "wholly used
by step t" are the same two comparisons for both, and a restored lane simply starts at a negative position.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_ray.plan.pieces import I64, PIECE, Pieces, join, pick, stable_order, within

PADDING = -1
"""Number of the pool of a segment that is padding."""

SEGMENT = np.dtype([("lane", np.int32), ("at", np.int64), ("pairs", np.int64), ("pool", np.int64), ("start", np.int64)])
"""`pairs` pairs from `start` of a pool go to position `at` of the lane's line; positions count from 0 there."""

Segments = npt.NDArray[Any]
"""A structured array [n] of `SEGMENT`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """Pieces laid out: `begun` and `done` are set, and their segments at positions >= 0.

    Of the pieces of a fill, which are begun and done together, only the last of each source is here, and has the `pairs` of all.
    """

    pieces: Pieces
    segments: Segments


def segments_of(lane: Any, at: Any, pairs: Any, pool: Any, start: Any) -> Segments:
    """Columns as an array of `SEGMENT`."""
    out = np.empty(len(at), SEGMENT)
    out["lane"], out["at"], out["pairs"], out["pool"], out["start"] = lane, at, pairs, pool, start
    return out


def lay_wrap(pieces: Pieces, tails: I64, sequence_length: int) -> Laid:
    """Lay pieces end to end behind each lane's tail, cut at the rows' edges.

    Args:
        pieces: sorted by (lane, mixture order); changed in place.
        tails: int64 [lanes], where each lane's line ends; moved on. Lanes as numbered in `pieces`.
        sequence_length: pairs a row.
    """
    lane, pairs = pieces["lane"], pieces["pairs"]
    total = np.cumsum(pairs)
    first = np.searchsorted(lane, np.arange(len(tails) + 1))
    edges = np.concatenate(([0], total))[first]
    begins = int(tails.min())
    begun = (tails - edges[:-1])[lane] + total - pairs
    done = begun + pairs
    tails += np.diff(edges)
    pieces["begun"], pieces["done"] = begun, done

    row = begun // sequence_length
    times = (done - 1) // sequence_length - row + 1
    of = np.repeat(np.arange(len(times)), times)
    edge = (row[of] + within(times)) * sequence_length  # of the row that a segment lies in
    at = np.maximum(begun[of], edge)
    pairs = np.minimum(done[of], edge + sequence_length) - at
    segments = segments_of(lane[of], at, pairs, pieces["pool"][of], (pieces["start"] - begun)[of] + at)
    return Laid(pieces=pieces, segments=segments if begins >= 0 else pick(segments, at >= 0))


def lay_padding(lanes: I64, tails: I64, end: int, sequence_length: int) -> Segments:
    """Padding from each lane's tail (int64 [n], >= 0) up to `end`, a multiple of `sequence_length`, cut at the rows' edges."""
    row = tails // sequence_length
    times = np.maximum(end // sequence_length - row, 0)
    of = np.repeat(np.arange(len(lanes)), times)
    row = row[of] + within(times)
    at = np.maximum(tails[of], row * sequence_length)
    return segments_of(lanes[of], at, (row + 1) * sequence_length - at, PADDING, 0)


def best_fit_rows(pairs: I64, sizes: I64, sequence_length: int) -> tuple[I64, I64]:
    """Pack fills by best-fit decreasing (D. S. Johnson, 1973), with the contract's ties.

    Args:
        pairs: int64 [pieces], of each piece in order of arrival, fill after fill, each in [1, sequence_length].
        sizes: int64 [fills], pieces of each fill, at least 1.
        sequence_length: pairs a row.

    Returns:
        (row of each piece, rows of each fill), int64 [pieces] and [fills]. Rows are counted over all fills, in order of creation.
    """
    firsts = np.cumsum(sizes) - sizes
    fill = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(fill * (sequence_length + 1) - pairs, kind="stable")
    # A row with room is one number, room * scale + row within its fill: the least room first, then the older row.
    scale = int(sizes.max()) + 1
    need, full = pairs[order] * scale, sequence_length * scale
    # Pieces of more than half a row come first, and none of them fits beside another: each opens a row.
    opened = full + within(sizes) - need
    large = np.add.reduceat((2 * pairs > sequence_length).astype(np.int64), firsts)
    rests, rows = list[int](), list[int]()
    for first, alone, end in zip(firsts.tolist(), (firsts + large).tolist(), (firsts + sizes).tolist(), strict=True):
        rests += (begun := opened[first:alone].tolist())
        placed, count = _best_fit(need[alone:end].tolist(), begun, full, scale)
        rests += placed
        rows.append(count)
    rows_of_fills = np.array(rows, np.int64)
    row = np.empty(len(pairs), np.int64)
    row[order] = np.array(rests, np.int64) % scale + np.repeat(np.cumsum(rows_of_fills) - rows_of_fills, sizes)
    return row, rows_of_fills


def _best_fit(needs: list[int], begun: list[int], full: int, scale: int) -> tuple[list[int], int]:
    """Put each piece where there is least room for it.

    Args:
        needs: of the pieces in the order in which they are placed, pairs * scale.
        begun: what is left of the rows that were opened before, ascending, room * scale + row.
        full: room of a new row * scale.
        scale: more than there are rows.

    Returns:
        What was left of each piece's row when it was in it, as in `begun`; how many rows there are.
    """
    rooms = [*begun[bisect_left(begun, scale) :], full + len(begun)]  # the last is the next new row: all others have less room
    placed = []
    for need in needs:
        room = rooms.pop(bisect_left(rooms, need))
        if room >= full:
            rooms.append(room + 1)
        room -= need
        placed.append(room)
        if room >= scale:
            insort(rooms, room)
    return placed, rooms[-1] - full


class Fills:
    """Pieces that wait until the next fill of their lane is full. They are put in order when one is, not whenever some come.

    Args:
        lanes: how many.
        size: pieces of a fill, at least 1.
    """

    def __init__(self, lanes: int, size: int) -> None:
        self._size = size
        self._parts: list[Pieces] = []
        self._waiting = np.zeros(lanes, np.int64)

    def add(self, pieces: Pieces) -> None:
        """Pieces sorted by (lane, mixture order), all after those that wait."""
        if len(pieces):
            self._parts.append(pieces)
            self._waiting += np.bincount(pieces["lane"], minlength=len(self._waiting))

    def take(self, final: npt.NDArray[np.bool_]) -> tuple[Pieces, I64]:
        """The fills that are full, and all that waits in lanes to which nothing comes any more.

        Args:
            final: bool [lanes], which lanes these are.

        Returns:
            Their pieces, fill after fill and lane by lane, and the fills' sizes, int64 [fills].
        """
        whole, rest = np.divmod(self._waiting, self._size)
        closed = final & (rest > 0)
        fills = whole + closed
        sizes = np.full(int(fills.sum()), self._size, np.int64)
        if not len(sizes):
            return np.empty(0, PIECE), sizes
        sizes[np.cumsum(fills)[closed] - 1] = rest[closed]
        held = join(self._parts)
        held = pick(held, stable_order(held["lane"], len(self._waiting)))
        left = np.where(closed, 0, rest)
        taken = within(self._waiting) < np.repeat(self._waiting - left, self._waiting)
        self._parts, self._waiting = [pick(held, ~taken)], left
        return pick(held, taken), sizes

    @property
    def pools(self) -> list[I64]:
        """Numbers of the pools of all pieces that wait, int64 each, in no order and more than once."""
        return [part["pool"] for part in self._parts]


def lay_fills(pieces: Pieces, sizes: I64, tails: I64, sequence_length: int) -> Laid:
    """Lay fills behind their lanes' tails.

    Args:
        pieces: fill after fill, each of one lane and in order of arrival.
        sizes: int64 [fills], pieces of each; at least one fill.
        tails: int64 [lanes], multiples of `sequence_length`; moved on.
        sequence_length: pairs a row.
    """
    row, rows_of_fills = best_fit_rows(pieces["pairs"], sizes, sequence_length)
    lane = pieces["lane"][np.cumsum(sizes) - sizes]
    # A lane's fills come one after the other: each begins where those before it end.
    ends = np.cumsum(rows_of_fills) * sequence_length
    new_lane = np.append(True, lane[1:] != lane[:-1])[: len(lane)]
    first = np.flatnonzero(new_lane)
    before = ends - rows_of_fills * sequence_length
    starts = tails[lane] + before - np.repeat(before[first], np.diff(np.append(first, len(lane))))
    np.add.at(tails, lane, rows_of_fills * sequence_length)
    row_at = np.repeat(starts, rows_of_fills) + within(rows_of_fills) * sequence_length
    order = np.argsort(row, kind="stable")  # within a row by arrival
    segments = _row_segments(pick(pieces, order), row_at, np.bincount(row), sequence_length)
    fill, pieces = _summed_by_source(pieces, sizes)
    pieces["begun"], pieces["done"] = starts[fill], (starts + rows_of_fills * sequence_length)[fill]
    return Laid(pieces=pieces, segments=segments)


def _summed_by_source(pieces: Pieces, sizes: I64) -> tuple[I64, Pieces]:
    """The last piece of each source in each fill, with the pairs of all of them there; and the fill of each, int64 [pieces]."""
    fill = np.repeat(np.arange(len(sizes)), sizes)
    sources = int(pieces["source"].max()) + 1
    place = fill * sources + pieces["source"]
    pairs, last = np.zeros(len(sizes) * sources, np.int64), np.full(len(sizes) * sources, -1, np.int64)
    np.add.at(pairs, place, pieces["pairs"])
    last[place] = np.arange(len(pieces))  # of equal ones the last wins, says numpy
    kept = np.sort(last[last >= 0])
    summed = pick(pieces, kept)
    summed["pairs"] = pairs[place[kept]]
    return fill[kept], summed


def _row_segments(pieces: Pieces, row_at: I64, members: I64, sequence_length: int) -> Segments:
    """Rows of whole pieces, padded at the end.

    Args:
        pieces: row after row.
        row_at: int64 [rows], where on its lane's line each row begins.
        members: int64 [rows], how many pieces are in it, at least 1.
        sequence_length: pairs a row.
    """
    firsts = np.cumsum(members) - members
    used = np.add.reduceat(pieces["pairs"], firsts)
    before = np.cumsum(pieces["pairs"]) - pieces["pairs"]
    at = np.repeat(row_at - before[firsts], members) + before
    real = segments_of(pieces["lane"], at, pieces["pairs"], pieces["pool"], pieces["start"])
    short = np.flatnonzero(used < sequence_length)
    rest = segments_of(pieces["lane"][firsts[short]], row_at[short] + used[short], sequence_length - used[short], PADDING, 0)
    segments = join((real, rest))
    return pick(segments, segments["at"] >= 0)
