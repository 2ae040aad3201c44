"""A lane group: some of a run's lanes, from dealt windows to rows.

It is fed the tokenised windows of every source, in order, and gives steps: the rows of its lanes, and a *lane block* that
says what they are. It does not read, wait, or know of other groups: all groups deal all pieces and keep their own lanes',
so the number of groups cannot change a byte. `docs/decisions/0005-lane-groups.md` says how groups are put together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from zephon_ray.chunk import Chunk, Standing, StepRows
from zephon_ray.feeding import FedWindows, Want
from zephon_ray.lane_blocks import LaneBlock, LanesState
from zephon_ray.plan.dealing import Dealer, phases
from zephon_ray.plan.packing import SEGMENT, Fills, Laid, Segments, lay_fills, lay_padding, lay_wrap
from zephon_ray.plan.pieces import I64, PIECE, Pieces, UnitShape, cut_pieces, join, mixture_order, pick
from zephon_ray.plan.windows import Position
from zephon_ray.pools import I32, Pools
from zephon_ray.recipe import Recipe
from zephon_ray.stages.unit import TokenisedUnit

_NEVER = np.iinfo(np.int64).max
_MOST_STANDINGS = 1 << 20  # of a lane in a source, that a chunk may hold for all its steps: 24 MB


class LaneGroup:
    """Deals, mixes and packs for the lanes in `lanes`.

    Args:
        recipe: the run's.
        start: where all lanes of the run stand.
        step: after which they stand there.
        ordinals: of the windows at which the start begins, in the stream's count; 0 of each source by default. A group that
            takes the place of another must speak of windows as the others do.
        pad_id: input of padding pairs.
        lanes: this group's, a contiguous range; all by default.
    """

    def __init__(
        self,
        recipe: Recipe,
        start: LanesState,
        *,
        step: int = 0,
        ordinals: Sequence[int] | None = None,
        pad_id: int = 0,
        lanes: range | None = None,
    ) -> None:
        self.lanes = lanes if lanes is not None else range(recipe.lanes)
        self._step, self._ordinals = step, np.array(ordinals or [0] * len(start.sources), np.int64)
        self._recipe = recipe
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
        self._fills = Fills(len(self.lanes), recipe.fill_pieces)
        self._laid = Laid(pieces=np.empty(0, PIECE), segments=np.empty(0, SEGMENT))
        self._pools = Pools(pad_id, recipe.sequence_length + 1)
        self._next_pool, self._unused = 0, set[int]()
        self._final = np.zeros(len(self.lanes), np.bool_)
        self._standing = Standing.at(start.sources, mine)
        self._begun_pairs = np.array([(src.counts - f)[mine].sum() for src, f in zip(start.sources, first, strict=True)], np.int64)
        self._stale = True
        self._chunk: Chunk | None = None
        self._oldest_ordinals: list[int] = []
        self._oldest: tuple[tuple[int, Position, I64], ...] = ()

    # ---- input

    def feed(self, source: int, fed: FedWindows[TokenisedUnit]) -> None:
        """Deal the next windows of a source. Nothing of them is held afterwards: the ids that are needed are copied.

        Raises:
            StateError: they do not lead to the places that the start holds.
        """
        recipe, units, ids, at = self._recipe, list[UnitShape](), list[npt.NDArray[np.uint32]](), 0
        for number, window in enumerate(fed.windows):
            for unit in window.units:
                epoch, offsets = window.position.epoch, unit.offsets + at
                units.append(UnitShape(window=number, epoch=epoch, group=unit.group, unit=unit.unit, offsets=offsets))
                ids.append(unit.ids)
                at += len(unit.ids)
        cut = cut_pieces(units, seed=recipe.seed, source=source, max_pairs=recipe.max_piece_pairs, shuffled=recipe.shuffle.documents)
        pieces = self._dealers[source].deal(cut, [w.position for w in fed.windows], fed.after, self._next_pool)
        if len(pieces):
            pieces["lane"] -= self.lanes.start
            self._drop_unused()
            add = self._pools.add_all if len(self.lanes) == recipe.lanes else self._pools.add_own
            add(self._next_pool, ids, pieces)
            self._next_pool += 1
            held = self._pending[source]
            self._pending[source] = join((held, pieces)) if len(held) else pieces
        self._stale = True

    def _drop_unused(self) -> None:
        """Give up pools that nothing behind the last chunk lies in, once that is made."""
        if not self._planned:
            self._pools.drop(self._unused)
            self._unused = set()

    def end(self, source: int) -> None:
        """The source has no window left."""
        self._dealers[source].end()
        self._stale = True

    # ---- what comes next

    def want(self, failed: Collection[int] = ()) -> Want | None:
        """What must be fed before `next_step` can be called; None when it can, when the group is over, or when only `failed` would help.

        Args:
            failed: sources whose next window cannot be had.
        """
        if self._planned:
            return None
        if self._stale:
            self._lay(self._take_ready())
            self._stale = False
        short = self._short
        if self.over or not short.any():
            return None
        waiting = np.bincount(self._limiting_source[short], minlength=len(self._shares))
        waiting[list(failed)] = 0
        source = int(waiting.argmax())
        return Want(source=source, pairs=self._pairs_to_go(short, source)) if waiting[source] else None

    def _pairs_to_go(self, short: npt.NDArray[np.bool_], source: int) -> int:
        """A rough number of pairs of one source that the short lanes lack for a step; it decides no byte."""
        live = [s for s, d in enumerate(self._dealers) if not d.ended]
        lacking = int((self._step_pairs - self._tails[short]).sum())
        if not self._wraps:
            lacking = max(lacking, self._recipe.fill_pieces * int(short.sum()))
        lacking = lacking * self._recipe.lanes // len(self.lanes)  # the lanes of other groups are dealt theirs of it
        return 1 + lacking * int(self._shares[source]) // int(self._shares[live].sum())

    @property
    def _planned(self) -> bool:
        return self._chunk is not None and self._chunk.left > 0

    @property
    def _short(self) -> npt.NDArray[np.bool_]:
        """Lanes that lack pairs for a step and can still get some."""
        return (self._tails < self._step_pairs) & ~self._final

    @property
    def over(self) -> bool:
        """Its lanes have ended. Without padding it makes no further step, with padding it goes on with rows of padding.

        Up to date after `want`, and still if other windows were fed since: what it lacked then, they cannot give.
        """
        if self._planned:
            return False
        if self._pads:
            return bool(self._final.all()) and int(self._tails.max()) <= 0
        return bool((self._final & (self._tails < self._step_pairs)).any())

    @property
    def ready(self) -> bool:
        """`next_step` can be called. Up to date after `want`."""
        return self._planned or (not self._short.any() and (self._pads or not self.over))

    def _take_ready(self) -> Pieces:
        """Take the pieces whose turn nothing still to be dealt can come before from pending, sorted by (lane, mixture order)."""
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
                    taken.append(pick(pieces, turn))
                    self._pending[s] = pick(pieces, ~turn)
        if not taken:
            return np.empty(0, PIECE)
        ready = join(taken)
        return pick(ready, mixture_order(ready["lane"], ready["virtual_time"]))

    def _lay(self, ready: Pieces) -> None:
        """Pack what is ready behind the lanes' tails."""
        if self._wraps:
            laid = lay_wrap(ready, self._tails, self._row_pairs)
        else:
            self._fills.add(ready)
            pieces, sizes = self._fills.take(self._final)
            if not len(sizes):
                return
            if (self._tails < 0).any():  # the open fill of a restored state: begun, and in no count of the state
                again = self._first_fills(pieces, sizes)
                np.add.at(self._begun_pairs, again["source"], again["pairs"])
            laid = lay_fills(pieces, sizes, self._tails, self._row_pairs)
        if len(laid.pieces):
            self._laid = Laid(pieces=join((self._laid.pieces, laid.pieces)), segments=join((self._laid.segments, laid.segments)))

    def _first_fills(self, pieces: Pieces, sizes: I64) -> Pieces:
        """Of fills that are about to be laid, those that begin before the start."""
        lane_of_fill = pieces["lane"][np.cumsum(sizes) - sizes]
        first = np.append(True, lane_of_fill[1:] != lane_of_fill[:-1])[: len(sizes)] & (self._tails[lane_of_fill] < 0)
        return pick(pieces, np.repeat(first, sizes))

    # ---- output

    def next_step(self, rows: I32) -> LaneBlock:
        """Make the next step of the group; call it when it is `ready`.

        Args:
            rows: int32 [rows, 3, sequence_length], contiguous; is filled with the rows of its lanes.
        """
        over = self.over
        if self._chunk is None or not self._chunk.left:
            self._chunk = self._plan()
        self._step += 1
        return self._block(self._chunk.next_step(rows), over)

    def _plan(self) -> Chunk:
        """The next steps, as many as nothing still to be read can change."""
        self._drop_unused()
        recipe, span = self._recipe, self._step_pairs
        full = self._tails // span
        if not self._pads:
            steps = int(full.min())
        elif self._final.all():
            steps = max(1, -(-int(self._tails.max()) // span))  # once it is over, a step of padding at a time
        else:
            steps = int(full[~self._final].min())
        steps = min(steps, max(1, _MOST_STANDINGS // self._standing.windows.size))
        end = steps * span
        pieces, segments = self._laid.pieces, self._laid.segments
        chunk = Chunk(
            pieces=pick(pieces, pieces["begun"] < end),
            segments=join((pick(segments, segments["at"] < end), self._padding(end))),
            line=self._pools.line,
            dealers=self._dealers,
            standing=self._standing,
            begun_pairs=self._begun_pairs,
            ordinals=self._ordinals,
            steps=steps,
            rows_per_lane=recipe.rows_per_lane,
            row_pairs=self._row_pairs,
            wraps=self._wraps,
            stops=self._stops,
            lanes=self.lanes,
        )
        self._carry(end)
        self._standing, self._begun_pairs = chunk.end_standing(), chunk.end_pairs
        return chunk

    def _block(self, step: StepRows, over: bool) -> LaneBlock:
        """What is to be said of a step; steps in order, since windows older than all lanes' are forgotten."""
        if step.oldest != self._oldest_ordinals:
            self._oldest_ordinals = step.oldest
            self._oldest = tuple(self._starts(step.oldest))
        return LaneBlock(
            step=self._step,
            first_lane=self.lanes.start,
            row_digests=step.digests,
            padding=step.padding,
            over=over,
            windows=step.windows,
            indices=step.indices,
            counts=step.counts,
            open_source=step.open_source,
            open_used=step.open_used,
            oldest=self._oldest,
            pairs=step.pairs,
            used_before=step.used_before,
            used=step.used,
        )

    def _starts(self, ordinals: Sequence[int]) -> Iterator[tuple[int, Position, I64]]:
        """What `LaneBlock.oldest` says of windows, one of each source; those before them are never asked for again."""
        for dealer, ordinal, first in zip(self._dealers, ordinals, self._ordinals.tolist(), strict=True):
            dealer.forget(ordinal)
            yield first + ordinal, *dealer.start_of(ordinal)

    def _padding(self, end: int) -> Segments:
        """What lanes that have ended give up to `end`."""
        short = np.flatnonzero(self._tails < end) if self._pads else np.empty(0, np.int64)
        return lay_padding(short, np.maximum(self._tails[short], 0), end, self._row_pairs)

    def _carry(self, end: int) -> None:
        """Keep what lies behind `end`, which becomes position 0; find the pools that are not needed for it."""
        pieces, segments = self._laid.pieces, self._laid.segments
        pieces, segments = pick(pieces, pieces["done"] > end), pick(segments, segments["at"] >= end)
        pieces["begun"] -= end
        pieces["done"] -= end
        segments["at"] -= end
        self._laid = Laid(pieces=pieces, segments=segments)
        self._tails = np.maximum(self._tails - end, 0)
        self._unused = self._pools.without([segments["pool"], *self._fills.pools, *(p["pool"] for p in self._pending)])
