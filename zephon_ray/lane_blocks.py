"""A lane block: what one lane group says of one step, so that the groups' blocks can be joined without a token.

It holds integers and digests only, is small, and can be pickled. The rows that it speaks of go another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zephon_ray.plan.dealing import SourceStart, phases
from zephon_ray.plan.pieces import I64
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class LanesState:
    """Where all lanes stand between two steps: the contract's "State" without its envelope.

    Kept as steps give it, windows as ordinals; what it says of each source is put together when asked for, which few steps' are.

    Args:
        oldest: of each source, as in `LaneBlock`.
        windows, indices, counts: int64 [sources, lanes], as in `LaneBlock`.
        open_source: int64 [lanes]; `wrap`: the source of the piece partly used, -1 where there is none.
        open_used: int64 [lanes]; `wrap`: how many of its pairs are used; `best_fit`: rows given of the open fill.
    """

    oldest: tuple[tuple[int, Position, I64], ...]
    windows: I64
    indices: I64
    counts: I64
    open_source: I64
    open_used: I64

    @classmethod
    def of(cls, sources: Sequence[SourceStart], *, open_source: I64, open_used: I64) -> LanesState:
        """From what a state says of each source."""
        return cls(
            oldest=tuple((0, source.position, source.dealt) for source in sources),
            windows=np.stack([source.windows for source in sources]),
            indices=np.stack([source.indices for source in sources]),
            counts=np.stack([source.counts for source in sources]),
            open_source=open_source,
            open_used=open_used,
        )

    @property
    def sources(self) -> tuple[SourceStart, ...]:
        """What the state says of each source."""
        return tuple(
            SourceStart(position=position, dealt=dealt, windows=self.windows[s] - ordinal, indices=self.indices[s], counts=self.counts[s])
            for s, (ordinal, position, dealt) in enumerate(self.oldest)
        )


def beginning(recipe: Recipe, positions: Sequence[Position]) -> LanesState:
    """The state before step 1; `positions` are the sources' first windows."""
    zeros = np.zeros(recipe.lanes, np.int64)
    sources = tuple(
        SourceStart(
            position=position,
            dealt=zeros,
            windows=zeros,
            indices=zeros,
            counts=phases(seed=recipe.seed, source=s, lanes=recipe.lanes, sequence_length=recipe.sequence_length),
        )
        for s, position in enumerate(positions)
    )
    return LanesState.of(sources, open_source=zeros - 1, open_used=zeros)


def split_lanes(lanes: int, groups: int) -> list[range]:
    """All lanes in `groups` contiguous ranges whose sizes differ by one at most; fewer where there are fewer lanes."""
    groups = min(groups, lanes)
    return [range(i * lanes // groups, (i + 1) * lanes // groups) for i in range(groups)]


@dataclass(kw_only=True, slots=True)  # not frozen: that makes one three times dearer, and there is one a step
class LaneBlock:
    """One step of one lane group. Windows are ordinals in the stream's count.

    Args:
        step: from 1.
        first_lane: the group's lanes are this one and those after it, as many as `open_used` is long.
        row_digests: 16 bytes each, lane by lane.
        padding: pairs that are padding.
        over: all its lanes had ended before the step, so that its rows are padding only.
        windows, indices, counts: int64 [sources, lanes of the group], as in the contract's "State".
        open_source, open_used: int64 [lanes of the group], as in `LanesState`.
        oldest: of each source, the oldest window in which one of these lanes stands, its start, and the pairs dealt to each lane of
            the run before it, int64 [lanes], less their minimum.
        pairs: int64 [sources], pairs of all pieces that these lanes have begun since the run began.
        used_before: int64 [sources], newest window that a piece begun before the step lies in, -1 for none; steps before it
            are made, and may have used newer ones.
        used: int64 [sources], the same after the step.
    """

    step: int
    first_lane: int
    row_digests: tuple[bytes, ...]
    padding: int
    over: bool
    windows: I64
    indices: I64
    counts: I64
    open_source: I64
    open_used: I64
    oldest: tuple[tuple[int, Position, I64], ...]
    pairs: I64
    used_before: I64
    used: I64
