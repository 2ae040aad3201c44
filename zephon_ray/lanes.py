"""A lane group: some of a run's lanes, from dealt windows to rows.

It is fed the tokenised windows of every source, in order, and gives *chunks*: runs of steps that nothing still to be
read can change. It does not read, wait, or know of other groups: all groups deal all pieces and keep their own lanes',
so the number of groups cannot change a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon_ray.chunk import Chunk, Standing, StepRows
from zephon_ray.plan.dealing import Dealer, SourceStart, phases
from zephon_ray.plan.packing import SEGMENT, Laid, Segments, lay_fills, lay_padding, lay_wrap
from zephon_ray.plan.pieces import I64, PIECE, Pieces, UnitShape, cut_pieces, join
from zephon_ray.plan.windows import Position
from zephon_ray.recipe import Recipe

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class LanesState:
    """Where all lanes stand between two steps: the contract's "State" without its envelope.

    Args:
        sources: one a source.
        open_source: int64 [lanes]; `wrap`: the source of the piece partly used, -1 where there is none.
        open_used: int64 [lanes]; `wrap`: how many of its pairs are used; `best_fit`: rows given of the open fill.
    """

    sources: tuple[SourceStart, ...]
    open_source: I64
    open_used: I64


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
    return LanesState(sources=sources, open_source=zeros - 1, open_used=zeros)


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """What a lane group needs before it can go on: the next windows of `source`, about `pairs` pairs of them."""

    source: int
    pairs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FedWindows:
    """Consecutive windows of one source.

    Args:
        units: their units, windows in order (`window` counts from 0 here), within a window slot by slot.
        pool: uint32 [n], the units' ids end to end; the units' offsets point into it.
        positions: the windows' starts.
        after: the start of the window after them.
    """

    units: Sequence[UnitShape]
    pool: npt.NDArray[np.uint32]
    positions: Sequence[Position]
    after: Position


class LaneGroup:
    """Deals, mixes and packs for the lanes in `lanes`.

    Args:
        recipe: the run's.
        start: where all lanes of the run stand.
        lanes: this group's, a contiguous range; all by default.
        pad_id: input of padding pairs.
    """

    def __init__(self, recipe: Recipe, start: LanesState, *, pad_id: int = 0, lanes: range | None = None) -> None:
        self.lanes = lanes if lanes is not None else range(recipe.lanes)
        self._recipe, self._pad_id = recipe, pad_id
        self._row_pairs = recipe.sequence_length
        self._step_pairs = recipe.rows_per_lane * recipe.sequence_length
        self._wraps = recipe.packing.algorithm == "wrap"
        self._pads = recipe.final_batch == "pad"
        self._stops = recipe.on_exhausted == "stop"
        shares = recipe.shares()
        self._shares = np.array(shares, np.int64)
        first = [phases(seed=recipe.seed, source=s, lanes=recipe.lanes, sequence_length=self._row_pairs) for s in range(len(shares))]
        self._dealers = [
            Dealer(source=s, share=shares[s], keep=self.lanes, phase=first[s], start=src, partial=start.open_source == s)
            for s, src in enumerate(start.sources)
        ]
        mine = slice(self.lanes.start, self.lanes.stop)
        used = start.open_used[mine]
        self._tails = -(used if self._wraps else used * self._row_pairs)  # the open piece or fill is laid from before the start
        self._pending: list[Pieces] = [np.empty(0, PIECE) for _ in shares]
        self._ready: Pieces = np.empty(0, PIECE)
        self._laid = Laid(pieces=np.empty(0, PIECE), segments=np.empty(0, SEGMENT))
        self._pools: dict[int, npt.NDArray[np.int32]] = {}
        self._next_pool = 0
        self._final = np.zeros(len(self.lanes), np.bool_)
        self._standing = Standing.at(start.sources, mine)
        self._begun_pairs = np.array([(src.counts - f)[mine].sum() for src, f in zip(start.sources, first, strict=True)], np.int64)
        self._stale = True

    # ---- input

    def feed(self, source: int, windows: FedWindows) -> int:
        """Deal the next windows of a source. Returns how many pairs they hold, over all lanes of the run."""
        recipe, dealer = self._recipe, self._dealers[source]
        cut = cut_pieces(
            windows.units, seed=recipe.seed, source=source, max_pairs=recipe.max_piece_pairs, shuffled=recipe.shuffle.documents
        )
        pieces = dealer.deal(cut, windows.positions, windows.after, self._next_pool)
        if len(pieces):
            pieces["lane"] -= self.lanes.start
            self._pools[self._next_pool] = windows.pool.view(np.int32)
            self._next_pool += 1
            held = self._pending[source]
            self._pending[source] = join((held, pieces)) if len(held) else pieces
        self._stale = True
        return int(cut.pairs.sum())

    def end(self, source: int) -> None:
        """The source has no window left."""
        self._dealers[source].end()
        self._stale = True

    def ended(self, source: int) -> bool:
        return self._dealers[source].ended

    # ---- what comes next

    def want(self) -> Want | None:
        """What must be fed before `chunk` can be called; None when it can, or when the stream is over (see `over`)."""
        if self._stale:
            self._take_ready()
            self._lay_ready()
            self._stale = False
        short = (self._tails < self._step_pairs) & ~self._final
        if self.over or not short.any():
            return None
        limits = self._limiting_source[short]
        source = int(np.bincount(limits, minlength=len(self._shares)).argmax())
        return Want(source=source, pairs=self._pairs_to_go(short, source))

    def _pairs_to_go(self, short: npt.NDArray[np.bool_], source: int) -> int:
        """A rough number of pairs of one source that the short lanes lack for a step; it decides no byte."""
        live = [s for s, d in enumerate(self._dealers) if not d.ended]
        lacking = int((self._step_pairs - self._tails[short]).sum())
        if not self._wraps:
            lacking = max(lacking, self._recipe.fill_pieces * int(short.sum()))
        return 1 + lacking * int(self._shares[source]) // int(self._shares[live].sum())

    @property
    def over(self) -> bool:
        """No further step can be made. Up to date after `want`."""
        if self._pads:
            return bool(self._final.all()) and int(self._tails.max()) <= 0
        return bool((self._final & (self._tails < self._step_pairs)).any())

    def _take_ready(self) -> None:
        """Move the pieces whose turn nothing still to be dealt can come before from pending to ready, in mixture order."""
        mine = slice(self.lanes.start, self.lanes.stop)
        horizon = np.stack([d.horizon()[mine] for d in self._dealers])
        if not self._stops:
            horizon[[d.ended for d in self._dealers]] = _NEVER  # a source at its end is left, and the others go on
        source = horizon.argmin(axis=0)  # the lowest among equals
        time = horizon[source, np.arange(len(self.lanes))]
        ended = np.array([d.ended for d in self._dealers])
        self._limiting_source = source
        self._final = ended[source]
        taken = []
        for s, pieces in enumerate(self._pending):
            if len(pieces):
                lane, at = pieces["lane"], pieces["virtual_time"]
                turn = (at < time[lane]) | ((at == time[lane]) & (s < source[lane]))
                if turn.any():
                    taken.append(pieces[turn])
                    self._pending[s] = pieces[~turn]
        if taken:
            ready = join(taken)
            ready = ready[np.lexsort((ready["source"], ready["virtual_time"], ready["lane"]))]
            self._ready = join((self._ready, ready)) if len(self._ready) else ready

    def _lay_ready(self) -> None:
        """Pack what is ready behind the lanes' tails."""
        if self._wraps:
            pieces, self._ready = self._ready, self._ready[:0]
            laid = lay_wrap(pieces, self._tails, self._row_pairs)
        else:
            pieces, sizes = self._take_fills()
            if (self._tails < 0).any():  # the open fill of a restored state: begun, and in no count of the state
                again = self._first_fills(pieces, sizes)
                np.add.at(self._begun_pairs, again["source"], again["pairs"])
            laid = lay_fills(pieces, sizes, self._tails, self._row_pairs)
        if len(laid.pieces):
            self._laid = Laid(pieces=join((self._laid.pieces, laid.pieces)), segments=join((self._laid.segments, laid.segments)))

    def _take_fills(self) -> tuple[Pieces, I64]:
        """Fill after fill, the pieces of the lanes' fills, and the fills' sizes; only the last of a final lane is not full."""
        ready = self._ready[np.argsort(self._ready["lane"], kind="stable")]
        size = self._recipe.fill_pieces
        edges = np.searchsorted(ready["lane"], np.arange(len(self.lanes) + 1))
        have = np.diff(edges)
        whole, rest = have // size, have % size
        taken = np.where(self._final, have, whole * size)
        rank = np.arange(len(ready)) - np.repeat(edges[:-1], have)
        take = rank < np.repeat(taken, have)
        self._ready = ready[~take]
        fills = whole + (self._final & (rest > 0))
        sizes = np.full(int(fills.sum()), size, np.int64)
        lasts = np.cumsum(fills)[self._final & (rest > 0)] - 1
        sizes[lasts] = rest[self._final & (rest > 0)]
        return ready[take], sizes

    def _first_fills(self, pieces: Pieces, sizes: I64) -> Pieces:
        """Of fills that are about to be laid, those that begin before the start."""
        lane_of_fill = pieces["lane"][np.cumsum(sizes) - sizes]
        first = np.append(True, lane_of_fill[1:] != lane_of_fill[:-1])[: len(sizes)] & (self._tails[lane_of_fill] < 0)
        again: Pieces = pieces[np.repeat(first, sizes)]
        return again

    # ---- output

    def chunk(self) -> Chunk:
        """The next steps; call it when `want` gives None and the stream is not `over`."""
        recipe, span = self._recipe, self._step_pairs
        full = self._tails // span
        if not self._pads:
            steps = int(full.min())
        elif self._final.all():
            steps = -(-int(self._tails.max()) // span)
        else:
            steps = int(full[~self._final].min())
        end = steps * span
        pieces, segments = self._laid.pieces, self._laid.segments
        chunk = Chunk(
            pieces=pieces[pieces["begun"] < end],
            segments=join((segments[segments["at"] < end], self._padding(end))),
            pools=self._pools.copy(),
            dealers=self._dealers,
            standing=self._standing,
            begun_pairs=self._begun_pairs,
            steps=steps,
            rows_per_lane=recipe.rows_per_lane,
            row_pairs=self._row_pairs,
            pad_id=self._pad_id,
            wraps=self._wraps,
            stops=self._stops,
            lanes=self.lanes,
        )
        self._carry(end)
        self._standing, self._begun_pairs = chunk.end_standing(), chunk.end_pairs
        return chunk

    def state_after(self, step: StepRows) -> LanesState:
        """The state after a step, for a group of all lanes; steps in order, since older windows are forgotten."""
        sources = []
        for s, dealer in enumerate(self._dealers):
            windows = step.standing.windows[s]
            oldest = int(windows.min())
            dealer.forget(oldest)
            position, dealt = dealer.start_of(oldest)
            sources.append(
                SourceStart(
                    position=position,
                    dealt=dealt,
                    windows=windows - oldest,
                    indices=step.standing.indices[s],
                    counts=step.standing.counts[s],
                )
            )
        return LanesState(sources=tuple(sources), open_source=step.open_source, open_used=step.open_used)

    def _padding(self, end: int) -> Segments:
        """What lanes that have ended give up to `end`."""
        short = np.flatnonzero(self._tails < end) if self._pads else np.empty(0, np.int64)
        return lay_padding(short, np.maximum(self._tails[short], 0), end, self._row_pairs)

    def _carry(self, end: int) -> None:
        """Keep what lies behind `end`, which becomes position 0, and the pools that are still needed."""
        pieces, segments = self._laid.pieces, self._laid.segments
        pieces, segments = pieces[pieces["done"] > end], segments[segments["at"] >= end]
        pieces["begun"] -= end
        pieces["done"] -= end
        segments["at"] -= end
        self._laid = Laid(pieces=pieces, segments=segments)
        self._tails = np.maximum(self._tails - end, 0)
        live = set(np.unique(np.concatenate([segments["pool"], self._ready["pool"], *(p["pool"] for p in self._pending)])).tolist())
        self._pools = {n: pool for n, pool in self._pools.items() if n in live}
