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
        self._pools: dict[int, tuple[int, int]] = {}

    @property
    def ids(self) -> int:
        """Held in all pools together."""
        return sum(end - first for first, end in self._pools.values())

    def add_all(self, number: int, ids: Sequence[U32], pieces: Pieces) -> None:
        """Take over all arrays, end to end; starts of the pieces, which count along them, are changed to count along the line."""
        at = self._room(number, sum(map(len, ids)))
        np.concatenate(ids, out=self.line[at : self._pools[number][1]].view(np.uint32))
        pieces["start"] += at

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
        at = self._room(number, int(size.sum()))
        pool = self.line[at : self._pools[number][1]].view(np.uint32)
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

    def _room(self, number: int, size: int) -> int:
        """Where a new pool begins: the first gap that is wide enough, or the end of a line that grows."""
        at = self._first
        for first, end in sorted(self._pools.values()):
            if first - at >= size:
                break
            at = end
        if at + size > len(self.line):
            line = np.empty(_ROOM * (at + size), np.int32)
            line[:at] = self.line[:at]
            self.line = line
        self._pools[number] = at, at + size
        return at


def _gather(pool: U32, ids: Sequence[U32], array: I64, source: I64, to: I64, size: I64) -> None:
    """No Python a piece: one array's at a time."""
    order = np.argsort(array, kind="stable")
    edges = np.searchsorted(array[order], np.arange(len(ids) + 1))
    for a, (first, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        of = order[first:end]
        count = within(size[of])
        pool[np.repeat(to[of], size[of]) + count] = ids[a][np.repeat(source[of], size[of]) + count]
