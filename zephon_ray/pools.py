"""Pools: arrays of ids that pieces lie in. A group of all lanes takes over all ids, a group of some those of its pieces only.

Either way they are copied, once, so that nothing fed to a lane group stays held: it may lie in a store of limited size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zephon_ray.plan.pieces import I64, Pieces, within

U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]

SHORT = 200
"""Mean ids a piece below which gathering costs less than a slice copy each; measured."""


def pool_of_all(ids: Sequence[U32]) -> I32:
    """All arrays end to end, as int32 [n]: pieces' starts count along that line already."""
    return np.concatenate(ids).view(np.int32)


def pool_of_own(ids: Sequence[U32], pieces: Pieces) -> I32:
    """The ids of some pieces end to end, as int32 [n].

    Args:
        ids: the arrays whose line the pieces' starts count along.
        pieces: at least one; their starts are changed to count along the pool.
    """
    ends = np.cumsum([len(a) for a in ids])
    array = np.searchsorted(ends, pieces["start"], side="right")
    source = pieces["start"] - np.concatenate(([0], ends))[array]
    size = pieces["pairs"] + 1
    total = np.cumsum(size)
    to = total - size
    pool = np.empty(int(total[-1]), np.uint32)
    if len(pool) < len(pieces) * SHORT:
        _gather(pool, ids, array, source, to, size)
    else:
        for a, first, at, n in zip(array.tolist(), source.tolist(), to.tolist(), size.tolist(), strict=True):
            pool[at : at + n] = ids[a][first : first + n]
    pieces["start"] = to
    return pool.view(np.int32)


def _gather(pool: U32, ids: Sequence[U32], array: I64, source: I64, to: I64, size: I64) -> None:
    """No Python a piece: one array's at a time."""
    order = np.argsort(array, kind="stable")
    edges = np.searchsorted(array[order], np.arange(len(ids) + 1))
    for a, (first, end) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        of = order[first:end]
        count = within(size[of])
        pool[np.repeat(to[of], size[of]) + count] = ids[a][np.repeat(source[of], size[of]) + count]
