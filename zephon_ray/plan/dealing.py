"""Dealing: which lane gets which piece of a source, and when the lane takes it.

A source deals each piece to the lane that it has dealt the fewest pairs so far. What a lane was dealt before a piece
is also what the lane has taken of that source when its turn comes, so the piece's virtual time is known here, and a
lane's stream is its pieces sorted by (virtual time, source): see `docs/decisions/0002-mixing-is-a-sort.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon_ray.errors import StateError
from zephon_ray.hashing import PHASE, key64
from zephon_ray.plan.fewest import Fewest
from zephon_ray.plan.pieces import I64, PIECE, CutPieces, Pieces, pick, stable_order
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import SHARE_BITS


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStart:
    """Where every lane stands in one source: the contract's "State" of a source and of its lanes.

    Args:
        position: start of the oldest window that a lane stands in; window ordinals count from it.
        dealt: int64 [lanes], pairs dealt before that window, less their minimum.
        windows, indices: int64 [lanes], each lane's place.
        counts: int64 [lanes], mixing counts, with all pairs of a piece partly used.
    """

    position: Position
    dealt: I64
    windows: I64
    indices: I64
    counts: I64


def phases(*, seed: int, source: int, lanes: int, sequence_length: int) -> I64:
    """Mixing counts at the beginning, int64 [lanes], each in [0, sequence_length)."""
    return np.array([key64(seed, PHASE, source, lane) % sequence_length for lane in range(lanes)], np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Deal:
    """What was dealt together: enough to say what had been dealt before each of its windows.

    Args:
        first: ordinal of its first window.
        positions: the windows' starts.
        before: int64 [lanes], pairs dealt to each lane before it.
        window, lane, pairs: int64 [pieces], ordinal of its window, its lane, its pairs.
    """

    first: int
    positions: tuple[Position, ...]
    before: I64
    window: I64
    lane: I64
    pairs: I64


class Dealer:
    """Deals the windows of one source to all lanes, and keeps the pieces of some of them.

    Args:
        source: index in the recipe.
        share: of 2^20.
        keep: the lanes (a contiguous range) whose pieces `deal` returns.
        phase: int64 [lanes], the mixing counts of a run's beginning.
        start: where the lanes stand.
        partial: bool [lanes], lanes in which the piece at the place is partly used.
    """

    def __init__(self, *, source: int, share: int, keep: range, phase: I64, start: SourceStart, partial: npt.NDArray[np.bool_]) -> None:
        self.source, self.share = source, share
        self.counts = start.counts.copy()
        self.next_window = 0
        self.end_times: I64 | None = None
        self._keep, self._lanes = keep, len(start.dealt)
        self._dealt = start.dealt.copy()
        self._skip_windows, self._skip_indices, self._partial = start.windows, start.indices, partial.copy()
        self._last_skip = int(start.windows.max())
        self._slack = start.counts - phase - start.dealt
        self._settled = False
        self._fewest = Fewest(self._dealt)
        self._deals: deque[_Deal] = deque()
        self._after = start.position
        self._last_start: tuple[int, tuple[Position, I64]] | None = None

    @property
    def ended(self) -> bool:
        return self.end_times is not None

    def horizon(self) -> I64:
        """Virtual time at which each lane would take its next piece that is not dealt yet, int64 [lanes]; -1 if that is partly used."""
        return np.where(self._partial, -1, (self.counts << SHARE_BITS) // self.share)

    def end(self) -> None:
        """No window is left."""
        self.end_times = self.horizon()

    def deal(self, cut: CutPieces, positions: Sequence[Position], after: Position, pool: int) -> Pieces:
        """Deal the pieces of the next windows.

        Args:
            cut: their pieces, in order.
            positions: the windows' starts.
            after: the start of the window that follows them.
            pool: number of the pool that the pieces' ids lie in.

        Returns:
            The kept lanes' pieces, sorted by (lane, order of dealing).

        Raises:
            StateError: the pieces do not lead to the places that the state holds.
        """
        lane = self._fewest.deal(cut.pairs)
        first = self.next_window
        self.next_window += len(positions)
        self._after = after
        before = self._dealt.copy()
        np.add.at(self._dealt, lane, cut.pairs)
        self._deals.append(
            _Deal(first=first, positions=tuple(positions), before=before, window=cut.window + first, lane=lane, pairs=cut.pairs)
        )
        order = stable_order(lane, self._lanes)
        return self._pieces(lane[order], cut.window[order] + first, cut.start[order], cut.pairs[order], pool)

    def _pieces(self, lane: I64, window: I64, start: I64, pairs: I64, pool: int) -> Pieces:
        n = len(lane)
        new_lane = np.ones(n, np.bool_)
        new_lane[1:] = lane[1:] != lane[:-1]
        new_run = new_lane.copy()  # a run is what one lane gets of one window
        new_run[1:] |= window[1:] != window[:-1]
        run_starts = np.flatnonzero(new_run)
        index = np.arange(n) - np.repeat(run_starts, np.diff(np.append(run_starts, n)))
        last = np.append(new_run[1:], True)[:n]

        kept, resumed = self._after_places(lane, window, index, new_lane)
        if not self._settled:
            self._check_places(lane, window, index, np.where(kept & ~resumed, 0, pairs))
        taken = np.where(kept & ~resumed, pairs, 0)  # a piece partly used is in the count already
        total = np.cumsum(taken)
        lane_starts = np.flatnonzero(new_lane)
        before_lane = np.repeat((total - taken)[lane_starts], np.diff(np.append(lane_starts, n)))
        after = self.counts[lane] + total - before_lane
        times = ((after - taken) << SHARE_BITS) // self.share
        np.add.at(self.counts, lane, taken)

        pieces = np.empty(n, PIECE)
        pieces["lane"], pieces["source"], pieces["pool"] = lane, self.source, pool
        pieces["virtual_time"] = np.where(resumed, -1, times)  # it comes first whatever the virtual times say
        pieces["start"], pieces["pairs"], pieces["window"], pieces["count"] = start, pairs, window, after
        pieces["next_window"], pieces["next_index"] = np.where(last, window + 1, window), np.where(last, 0, index + 1)
        pieces["begun"] = pieces["done"] = 0
        mine = kept & (lane >= self._keep.start) & (lane < self._keep.stop)
        return pieces if mine.all() else pick(pieces, mine)

    def _after_places(
        self, lane: I64, window: I64, index: I64, new_lane: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which pieces lie at or after their lane's place in the state, and which of these were partly used."""
        kept = np.ones(len(lane), np.bool_)
        resumed = np.zeros(len(lane), np.bool_)
        if len(window) and window.min() <= self._last_skip:
            at = self._skip_windows[lane]
            kept = (window > at) | ((window == at) & (index >= self._skip_indices[lane]))
        if self._partial.any():
            rank = np.cumsum(kept)
            lane_starts = np.flatnonzero(new_lane)
            before: I64 = np.repeat((rank - kept)[lane_starts], np.diff(np.append(lane_starts, len(lane))))
            resumed = kept & (rank - before == 1) & self._partial[lane]
            self._partial[lane[resumed]] = False
        return kept, resumed

    def _check_places(self, lane: I64, window: I64, index: I64, used: I64) -> None:
        """Hold the state against the data: what a lane has used since the state's oldest window explains its count.

        A count less its phase is what was dealt to the lane before that window, which is `dealt` and as many pairs more as
        all lanes were dealt, and what it used since. So what is left unexplained is the same in every lane once its place is
        reached, and never less before.
        """
        np.subtract.at(self._slack, lane, used)
        at, index_at = self._skip_windows, self._skip_indices
        reached = ~self._partial & ((at < self.next_window) | ((at == self.next_window) & (index_at == 0)))
        there = np.zeros(self._lanes, np.bool_)
        there[lane[(window == at[lane]) & (index >= index_at[lane])]] = True
        missing = (index_at > 0) & (at < self.next_window) & (at >= self.next_window - len(self._deals[-1].positions)) & ~there
        least = self._slack[reached].min(initial=0) if not reached.any() else self._slack[reached].min()
        if missing.any() or least < 0 or (self._slack < least).any() or (self._slack[reached] != least).any():
            raise StateError(
                f"the state does not fit the data of source {self.source}: the documents from its oldest window on do not lead to the"
                " places and counts that it holds. Restore the data as it was when the state was saved, or use another checkpoint"
            )
        self._settled = bool(reached.all())

    def start_of(self, ordinal: int) -> tuple[Position, I64]:
        """Start of a window that is not forgotten, and pairs dealt to each lane (int64 [lanes]) before it, less their minimum.

        `ordinal` may be the next window, not dealt yet. The array is not to be changed: it is the same as long as `ordinal` is.
        """
        if self._last_start is None or self._last_start[0] != ordinal:
            self._last_start = ordinal, self._find_start(ordinal)
        return self._last_start[1]

    def _find_start(self, ordinal: int) -> tuple[Position, I64]:
        for deal in self._deals:
            if ordinal < deal.first + len(deal.positions):
                dealt = deal.before.copy()
                earlier = deal.window < ordinal
                np.add.at(dealt, deal.lane[earlier], deal.pairs[earlier])
                return deal.positions[ordinal - deal.first], dealt - dealt.min()
        return self._after, self._dealt - self._dealt.min()

    def forget(self, ordinal: int) -> None:
        """Windows before this one are never asked for again."""
        while self._deals and self._deals[0].first + len(self._deals[0].positions) <= ordinal:
            self._deals.popleft()
