"""Pools: the ids that pieces lie in, one pool for all windows of a source that were fed together. They share one *line* of ids.

A group of all lanes takes over all ids that it is fed, a group of some those of its pieces only. Either way they are copied, once, so
that nothing fed to a lane group stays held: it may lie in a store of limited size. The line's memory is used again and again, which
spares the kernel fresh pages, and makes the rows of all pools' pieces one index away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from zephon_ray.plan.pieces import I64, Pieces, within

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]

SHORT = 110
"""Mean ids a piece below which one gather of single ids costs less than a copy a piece; measured."""

_ROOM = 4  # times as long as it has to be is a line made that must grow: what is never written to costs no memory, and growing a copy
_NOWHERE = 1 << 62, 1 << 62  # behind the line


class Pools:
    """The pools of a lane group, by number. Starts of pieces count along the line.

    Args:
        pad_id: what the line begins with, `padding` times, so that padding has a start too: 0.
        padding: ids, at least 1.
    """

    def __init__(self, pad_id: int, padding: int) -> None:
        self.line = np.full(padding, pad_id, np.int32)
        """int32 [n]. It is replaced when there is no room left; what it holds stays where it is, in the old one too."""
        self._first = padding
        self._pools: dict[int, list[tuple[int, int]]] = {}

    @property
    def ids(self) -> int:
        """Held in all pools together."""
        return sum(end - first for spans in self._pools.values() for first, end in spans)

    def add_all(self, number: int, ids: Sequence[U32], pieces: Pieces) -> None:
        """Take over all arrays; starts of the pieces, which count along them end to end, are changed to count along the line."""
        sizes = np.array([len(array) for array in ids])
        places = self._room(number, sizes.tolist())
        line = self.line.view(np.uint32)
        for place, array in zip(places, ids, strict=True):
            line[place : place + len(array)] = array
        before = np.cumsum(sizes) - sizes
        shift = np.array(places) - before
        moved = np.flatnonzero(np.diff(shift)) + 1  # one run of arrays for each gap that was filled
        if len(moved):
            pieces["start"] += shift[np.append(0, moved)][np.searchsorted(before[moved], pieces["start"], side="right")]
        else:
            pieces["start"] += shift[0]

    def add_own(self, number: int, ids: Sequence[U32], pieces: Pieces) -> None:
        """Take over the ids of some pieces, piece after piece.

        Args:
            number: the pool's.
            ids: the arrays whose line the pieces' starts count along.
            pieces: at least one; their starts are changed to count along the line of the pools.
        """
        ends = np.cumsum([len(a) for a in ids])
        array = np.searchsorted(ends, pieces["start"], side="right")
        source = pieces["start"] - np.concatenate(([0], ends))[array]
        size = pieces["pairs"] + 1
        to = np.cumsum(size) - size
        (at,) = self._room(number, [int(size.sum())])
        pool = self.line[at : at + int(size.sum())].view(np.uint32)
        if len(pool) < len(pieces) * SHORT:
            _gather(pool, ids, array, source, to, size)
        else:
            for a, first, start, n in zip(array.tolist(), source.tolist(), to.tolist(), size.tolist(), strict=True):
                pool[start : start + n] = ids[a][first : first + n]
        pieces["start"] = at + to

    def drop(self, numbers: Collection[int]) -> None:
        """Nothing lies in these any more; their room is used again."""
        for number in numbers:
            del self._pools[number]

    def without(self, live: Sequence[I64]) -> set[int]:
        """Numbers of the pools that are in none of some arrays, which hold such and `PADDING`."""
        least = min(self._pools, default=0)
        held = np.zeros(max(self._pools, default=0) - least + 2, np.bool_)
        for of in live:
            held[np.maximum(of - (least - 1), 0)] = True  # padding is at 0, the pools behind it
        return {number for number in self._pools if not held[number - least + 1]}

    def _room(self, number: int, sizes: Sequence[int]) -> list[int]:
        """Where the arrays of a new pool begin: in the gaps, as many as fit, and at the end of a line that grows."""
        taken = iter(sorted(span for spans in self._pools.values() for span in spans))
        begin, end = next(taken, _NOWHERE)
        places, spans = list[int](), list[tuple[int, int]]()
        first = at = self._first
        for size in sizes:
            while begin - at < size:
                spans.append((first, at))
                first = at = end
                begin, end = next(taken, _NOWHERE)
            places.append(at)
            at += size
        self._pools[number] = [span for span in (*spans, (first, at)) if span[0] < span[1]]
        if at > len(self.line):
            line = np.empty(_ROOM * at, np.int32)
            line[:first] = self.line[:first]
            self.line = line
        return places


def _gather(pool: U32, ids: Sequence[U32], array: I64, source: I64, to: I64, size: I64) -> None:
    """No Python a piece: one array's at a time."""
    order = np.argsort(array, kind="stable")
    edges = np.searchsorted(array[order], np.arange(len(ids) + 1))
    for a, (first, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        of = order[first:end]
        count = within(size[of])
        pool[np.repeat(to[of], size[of]) + count] = ids[a][np.repeat(source[of], size[of]) + count]
