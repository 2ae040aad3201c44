"""Joining: the lane blocks of all lane groups become the step of the whole run. It sees no token and remembers nothing.

Groups may be any contiguous ranges of lanes; which they are cannot change what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain as chained
from typing import Any

import numpy as np

from zephon_ray.batches import GlobalBatch, GlobalStep, fold
from zephon_ray.errors import RunnerError
from zephon_ray.lane_blocks import LaneBlock, LanesState
from zephon_ray.ledger.line import LeftOutCounts, WindowUse
from zephon_ray.plan.pieces import I64
from zephon_ray.plan.windows import Position
from zephon_ray.pools import I32

_OF_LANES = ("windows", "indices", "counts", "open_source", "open_used")


@dataclass(kw_only=True, slots=True)  # not frozen: that makes one three times dearer, and there is one a step
class JoinedStep:
    """What all groups say of one step.

    Args:
        step: from 1.
        row_digests: of all lanes, 16 bytes each.
        digest: of the global batch, 16 bytes.
        chain: up to it, 16 bytes.
        padding: pairs that are padding.
        pairs: int64 [sources], pairs of all pieces begun since the run began.
        used_before, used: int64 [sources], newest window in use before and after the step, as in `LaneBlock`.
        lanes: where all lanes stand after the step.
    """

    step: int
    row_digests: tuple[bytes, ...]
    digest: bytes
    chain: bytes
    padding: int
    pairs: I64
    used_before: I64
    used: I64
    lanes: LanesState


def is_over(groups: Iterable[bool], *, pads: bool) -> bool:
    """Whether the stream ends before a step, from what each group says of itself: with padding all must be over, else one is enough."""
    return all(groups) if pads else any(groups)


def join_blocks(previous_chain: bytes, blocks: Sequence[LaneBlock]) -> JoinedStep:
    """Join the blocks of one step.

    Args:
        previous_chain: the chain up to the step before, 16 bytes.
        blocks: of all lanes, in order of lane.

    Raises:
        RunnerError: they are not the blocks of one step, or lanes are missing or doubled: no such step may be handed on.
    """
    _check(blocks)
    whole = blocks[0] if len(blocks) == 1 else _end_to_end(blocks)
    digest, chain = fold(whole.step, previous_chain, whole.row_digests)
    lanes = LanesState(
        oldest=whole.oldest,
        windows=whole.windows,
        indices=whole.indices,
        counts=whole.counts,
        open_source=whole.open_source,
        open_used=whole.open_used,
    )
    return JoinedStep(
        step=whole.step,
        row_digests=whole.row_digests,
        digest=digest,
        chain=chain,
        padding=whole.padding,
        pairs=whole.pairs,
        used_before=whole.used_before,
        used=whole.used,
        lanes=lanes,
    )


def _end_to_end(blocks: Sequence[LaneBlock]) -> LaneBlock:
    """The block that a group of all lanes would have given."""
    # A group in which some lane stands in the oldest window of all knows its start, and what was dealt before it.
    oldest = tuple(min(of_source, key=_ordinal) for of_source in zip(*[b.oldest for b in blocks], strict=True))
    return LaneBlock(
        step=blocks[0].step,
        first_lane=0,
        row_digests=tuple(chained.from_iterable(b.row_digests for b in blocks)),
        padding=sum(b.padding for b in blocks),
        over=all(b.over for b in blocks),
        oldest=oldest,
        pairs=reduce(np.add, [b.pairs for b in blocks]),
        used_before=reduce(np.maximum, [b.used_before for b in blocks]),
        used=reduce(np.maximum, [b.used for b in blocks]),
        **{name: np.concatenate([getattr(b, name) for b in blocks], axis=-1) for name in _OF_LANES},
    )


def step_of(joined: JoinedStep, windows: Mapping[int, tuple[WindowUse, ...]], left_out: Mapping[int, LeftOutCounts]) -> GlobalStep:
    """The step, with what the supplies say of it: the windows that it is the first to use, and what was left out of them."""
    return GlobalStep(**_said(joined), windows=windows, left_out=left_out)


def batch_of(
    joined: JoinedStep, windows: Mapping[int, tuple[WindowUse, ...]], left_out: Mapping[int, LeftOutCounts], rows: I32
) -> GlobalBatch:
    """The same with the rows of all lanes, int32 [B, 3, T]."""
    return GlobalBatch(**_said(joined), windows=windows, left_out=left_out, rows=rows)


def _said(joined: JoinedStep) -> dict[str, Any]:
    return {
        "step": joined.step,
        "row_digests": joined.row_digests,
        "digest": joined.digest,
        "chain": joined.chain,
        "pairs": tuple(joined.pairs.tolist()),
        "padding": joined.padding,
        "lanes": joined.lanes,
    }


def _check(blocks: Sequence[LaneBlock]) -> None:
    lane = 0
    for block in blocks:
        if block.first_lane != lane or block.step != blocks[0].step:
            raise RunnerError(
                f"lane blocks do not make a step: lane {block.first_lane} of step {block.step} came where lane {lane} of step"
                f" {blocks[0].step} should. Resume from the last state"
            )
        lane += len(block.open_used)
    lanes = len(blocks[0].oldest[0][2])
    if lane != lanes:
        raise RunnerError(f"lane blocks do not make a step: lanes {lane} to {lanes - 1} of step {blocks[0].step} are missing")


def _ordinal(oldest: tuple[int, Position, I64]) -> int:
    return oldest[0]
