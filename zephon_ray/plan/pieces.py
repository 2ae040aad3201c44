"""Pieces: documents cut to at most M next-token pairs, in the order in which a source deals them.

A *piece* is a run of next-token pairs of one document: `pairs` of them need `pairs + 1` ids, which lie from `start`
on in a *pool* (the ids of the windows that were fed together, end to end). Nothing here looks at an id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_ray.hashing import DOC_ORDER, U64, extend_key64, key64

I64 = npt.NDArray[np.int64]
"""What lengths, places and counts are kept in, all through the order."""

PIECE = np.dtype(
    [
        ("lane", np.int32),
        ("source", np.int32),
        ("virtual_time", np.int64),
        ("pairs", np.int64),
        ("pool", np.int64),
        ("start", np.int64),
        ("window", np.int64),  # ordinal since the stream was opened
        ("next_window", np.int64),  # the lane's place in the source once the piece is wholly used ...
        ("next_index", np.int64),
        ("count", np.int64),  # ... and its mixing count then
        ("begun", np.int64),  # position in the lane's stream of rows at which it is begun, and is over;
        ("done", np.int64),  # see `plan.packing`
    ]
)
"""A piece that was dealt to a lane; places and counts as the contract's "State" has them."""

Pieces = npt.NDArray[Any]
"""A structured array [n] of `PIECE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitShape:
    """What the order needs to know of one tokenised unit.

    Args:
        window: number of its window among those that are cut together, from 0.
        epoch, group, unit: its name within the source, each from 0.
        offsets: int64 [documents + 1], where each document's ids begin in the pool.
    """

    window: int
    epoch: int
    group: int
    unit: int
    offsets: I64


@dataclass(frozen=True, kw_only=True, slots=True)
class CutPieces:
    """Pieces in the order of dealing; all int64 [n].

    Args:
        window: as in `UnitShape`, ascending.
        start: where the piece's first id lies in the pool.
        pairs: in [1, M].
    """

    window: I64
    start: I64
    pairs: I64


def cut_pieces(units: Sequence[UnitShape], *, seed: int, source: int, max_pairs: int, shuffled: bool) -> CutPieces:
    """Cut the documents of consecutive windows into pieces and put these in order.

    Args:
        units: of whole windows, windows in order, within a window slot by slot.
        seed: the recipe's.
        source: its index in the recipe.
        max_pairs: M of the contract, at least 1.
        shuffled: whether `shuffle.documents` is true.
    """
    if shuffled:
        units = sorted(units, key=lambda u: (u.window, u.group, u.unit))  # so that equal keys fall in the contract's order
    counts = np.array([len(u.offsets) - 1 for u in units], np.int64)
    unit_of_doc = np.repeat(np.arange(len(units)), counts)
    starts = np.concatenate([u.offsets[:-1] for u in units]) if units else np.empty(0, np.int64)
    pairs = np.concatenate([np.diff(u.offsets) for u in units]) - 1 if units else np.empty(0, np.int64)
    document = within(counts)
    piece = np.zeros(len(pairs), np.int64)
    if len(pairs) and pairs.max() > max_pairs:
        times = (pairs + max_pairs - 1) // max_pairs
        doc, piece = np.repeat(np.arange(len(pairs)), times), within(times)
        unit_of_doc, document = unit_of_doc[doc], document[doc]
        starts = starts[doc] + piece * max_pairs
        pairs = np.minimum(pairs[doc] - piece * max_pairs, max_pairs)
    window = np.array([u.window for u in units], np.int64)[unit_of_doc]
    if shuffled and len(pairs) > 1:
        prefix = np.array([key64(seed, DOC_ORDER, source, u.epoch, u.group, u.unit) for u in units], np.uint64)
        keys = extend_key64(prefix[unit_of_doc], document, piece)
        order = _order_of_keys(keys)
        if window[0] != window[-1]:
            order = order[stable_order(window[order], int(window[-1]) + 1)]
        window, starts, pairs = window[order], starts[order], pairs[order]
    return CutPieces(window=window, start=starts, pairs=pairs)


def _order_of_keys(keys: U64) -> I64:
    """Indices that sort keys, equal ones as they come: these are rare, so the sort is one that is quick and does not care."""
    order = np.argsort(keys)
    in_order = keys[order]
    return np.argsort(keys, kind="stable") if (in_order[1:] == in_order[:-1]).any() else order


def within(counts: I64) -> I64:
    """0, 1, ..., counts[0]-1, 0, 1, ..., counts[1]-1, ...: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - counts, counts)


def join(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Structured arrays of one dtype end to end."""
    return arrays[0] if len(arrays) == 1 else np.concatenate([_bare(a) for a in arrays]).view(arrays[0].dtype)


def pick(array: npt.NDArray[Any], which: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Elements of a structured array [n]: those where `which` (bool [n]) holds, or by their numbers (int64 [m])."""
    picked: npt.NDArray[Any] = _bare(array)[which].view(array.dtype)
    return picked


def _bare(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A structured array as one of plain bytes: where numpy knows of fields it copies them one by one, which takes ten times as long."""
    return np.ascontiguousarray(array).view(f"V{array.dtype.itemsize}")


def stable_order(numbers: npt.NDArray[Any], bound: int) -> I64:
    """Indices that sort integers in [0, bound), equal ones as they come. Numpy sorts those of 16 bits by radix."""
    return np.argsort(numbers.astype(np.uint16) if bound <= 1 << 16 else numbers, kind="stable")


def mixture_order(lane: npt.NDArray[np.int32], virtual_time: I64) -> I64:
    """Indices that sort pieces by (lane, virtual time), where those of lower sources come first among equals if they came first.

    Pieces of each source come sorted, so this is a merge: for numpy's stable sort much the quickest if one number says all.
    """
    first = int(virtual_time.min())
    span = int(virtual_time.max()) - first + 1
    if (int(lane.max()) + 1) * span > np.iinfo(np.int64).max:
        return np.lexsort((virtual_time, lane))
    return np.argsort(lane * np.int64(span) + (virtual_time - first), kind="stable")
