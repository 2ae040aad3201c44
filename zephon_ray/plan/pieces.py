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

from zephon_ray.hashing import DOC_ORDER, extend_key64, key64

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
        order = np.lexsort((keys, window)) if window[0] != window[-1] else np.argsort(keys, kind="stable")
        window, starts, pairs = window[order], starts[order], pairs[order]
    return CutPieces(window=window, start=starts, pairs=pairs)


def within(counts: I64) -> I64:
    """0, 1, ..., counts[0]-1, 0, 1, ..., counts[1]-1, ...: int64 [sum of counts]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - counts, counts)


def join(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Structured arrays of one dtype end to end. `np.concatenate` compares their fields one by one, which costs more than the copy."""
    dtype = arrays[0].dtype
    return np.concatenate([np.ascontiguousarray(a).view(f"V{dtype.itemsize}") for a in arrays]).view(dtype)
