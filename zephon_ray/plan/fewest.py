"""The lane with the fewest pairs, piece after piece: the one step of the order that is sequential by nature.

A lane is one number, `dealt * lanes + lane`, so that the least number is the lane with the fewest pairs, the lowest among equals. A heap
of these is the leanest form for few lanes. Of many, the least ones take a piece each at a time, as many as come before the first of them
comes again: some sqrt(lanes) where pieces are of like size, and few where they are not, for which the heap is taken again. Which form
says it cannot change what is said.
"""

from __future__ import annotations

from heapq import heapreplace
from math import isqrt

import numpy as np

from zephon_ray.plan.pieces import I64

MANY = 256
"""Lanes from which on the least ones are taken together; measured."""
_SLAB = 4096  # pieces that the heap deals at a time, so that their numbers stay in the cache
_ROUNDS, _WORTH = 16, 24  # after so many rounds: if they dealt fewer pieces than this on average, the heap is quicker


class Fewest:
    """What each lane was dealt, to say which is next.

    Args:
        dealt: int64 [lanes], pairs, less than 2^63 / lanes.
    """

    def __init__(self, dealt: I64) -> None:
        self._lanes = len(dealt)
        self._keys = np.sort(dealt * self._lanes + np.arange(self._lanes))

    def deal(self, pairs: I64) -> I64:
        """The lane of each piece, int64 [pieces]: the one with the fewest pairs, the lowest among equals.

        Args:
            pairs: int64 [pieces], at least 1 each, in order.
        """
        steps, keys, at = pairs * self._lanes, np.empty(len(pairs), np.int64), 0
        while at < len(steps):
            if self._lanes >= MANY:
                at += self._in_rounds(steps[at:], keys[at:])
            if at < len(steps):
                end = at + _SLAB
                self._by_heap(steps[at:end], keys[at:end])
                at = end
        return keys % self._lanes

    def _by_heap(self, steps: I64, keys: I64) -> None:
        heap = self._keys.tolist()  # sorted, so it is one
        keys[:] = [heapreplace(heap, heap[0] + step) for step in steps.tolist()]
        self._keys = np.sort(np.array(heap, np.int64))

    def _in_rounds(self, steps: I64, keys: I64) -> int:
        """Deal the first so many pieces; 0 or more."""
        least, width = self._keys, 2 * isqrt(self._lanes)
        at = rounds = 0
        while at < len(steps) and at >= rounds // _ROUNDS * (_ROUNDS * _WORTH):
            step = steps[at : at + width]
            dealt = least[: len(step)]
            again = dealt + step
            # The first that comes after one that was dealt before it and comes again.
            late = dealt[1:] > np.minimum.accumulate(again)[:-1]
            first = int(late.argmax()) if len(late) else 0
            n = first + 1 if len(late) and late[first] else len(step)
            keys[at : at + n], least[:n] = dealt[:n], again[:n]
            least.sort()
            at += n
            rounds += 1
        return at
