"""Lanes, batches, digests, and the state after each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.reference.data import Documents
from tests.reference.order import PHASE, Piece, Source, key64

Row = tuple[list[int], list[int], list[int]]
"""Inputs, labels, positions."""

UsedWindow = tuple[int, int, int, list[tuple[int, int, int, tuple[int, ...]]]]
"""(source, epoch, window, [(group, unit, digest of its text, (bad, empty, short))])."""


@dataclass(frozen=True)
class Batch:
    """A global batch, and what is known after it.

    `digest` and `chain` are 16 bytes, `pairs` the pairs a source so far. `state` is the contract's state in plain integers
    (see `reference_state`). `first_used` are the windows first used in this step.
    """

    step: int
    rows: list[Row]
    digest: bytes
    chain: bytes
    pairs: tuple[int, ...]
    state: dict[str, Any]
    first_used: list[UsedWindow]


def shares(recipe: dict[str, Any]) -> list[int]:
    weights = [Fraction(Decimal(repr(source.get("weight", 1)))) for source in recipe["sources"]]
    return [max(1, (weight * 2**20 / sum(weights) + Fraction(1, 2)).__floor__()) for weight in weights]


@dataclass
class _Settings:
    length: int
    shares: list[int]
    on_exhausted: str
    pad: int
    best_fit: bool
    buffer: int


class _Lane:
    """What both packings share: choosing the next piece, and where the lane stands."""

    def __init__(self, number: int, settings: _Settings, sources: list[Source], counts: list[int], places: list[tuple[int, int]]) -> None:
        self._number, self._settings, self.sources = number, settings, sources
        self.counts, self.places = counts, places
        self._left = list(range(len(sources)))
        self._found_at_end: list[int] = []
        self.reached = [window + (index > 0) for window, index in places]
        """For each source, one past the last window that counts as used because of this lane.

        A window counts as used once a piece of it or of a later one is begun (`best_fit`: is in a fill of which a row is given),
        the last windows also once the lane stands at the source's end. A lane that ends does not come to stand there; if it used
        them nevertheless, a resumed run could not know whether it had done so yet.
        """

    def _choose(self, places: list[tuple[int, int]]) -> tuple[Piece, tuple[int, int]] | None:
        """The next piece and the place just after it, by the virtual times; None where the lane ends.

        `places` are where the lane would stand if all pieces that it took were wholly used.
        """
        while self._left:
            source = min(self._left, key=lambda s: ((self.counts[s] << 20) // self._settings.shares[s], s))
            found = self.sources[source].next_piece(self._number, places[source])
            if found is not None:
                window, piece, after = found
                self.counts[source] += piece.pairs
                self.reached[source] = max(self.reached[source], window + 1)
                for ended in self._found_at_end:
                    places[ended] = (len(self.sources[ended].windows), 0)
                    self.reached[ended] = places[ended][0]
                self._found_at_end.clear()
                return piece, after
            self._found_at_end.append(source)
            self._left = [s for s in self._left if s != source and self._settings.on_exhausted == "continue"]
        return None

    def _padded(self, row: Row) -> Row:
        missing = self._settings.length - len(row[0])
        return row[0] + [self._settings.pad] * missing, row[1] + [-100] * missing, row[2] + list(range(missing))

    def row(self) -> tuple[bool, Row]:
        """(whether it holds as much as the packing can give, the row, padded)."""
        raise NotImplementedError

    def standing(self) -> tuple[list[tuple[int, int]], list[int], Any]:
        """Places and counts of the state, and what the packing adds."""
        raise NotImplementedError


class _WrapLane(_Lane):
    def __init__(self, *args: Any, partial: tuple[int, int] | None = None) -> None:
        super().__init__(*args)
        self._piece: tuple[Piece, int, tuple[int, int]] | None = None
        if partial is not None:
            source, used = partial
            found = self.sources[source].next_piece(self._number, self.places[source])
            assert found is not None
            self._piece = found[1], used, found[2]
            self.reached[source] = found[0] + 1

    def row(self) -> tuple[bool, Row]:
        inputs: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        while len(inputs) < self._settings.length:
            if self._piece is None:
                chosen = self._choose(self.places)
                if chosen is None:
                    return False, self._padded((inputs, labels, positions))
                self._piece = chosen[0], 0, chosen[1]
            piece, used, after = self._piece
            until = min(piece.pairs, used + self._settings.length - len(inputs))
            inputs += piece.ids[used:until]
            labels += piece.ids[used + 1 : until + 1]
            positions += range(until - used)
            self._piece = piece, until, after
            if until == piece.pairs:
                self._piece = None
                self.places[piece.source] = after
        return True, (inputs, labels, positions)

    def standing(self) -> tuple[list[tuple[int, int]], list[int], Any]:
        partial = None if self._piece is None else (self._piece[0].source, self._piece[1])
        return list(self.places), list(self.counts), partial


@dataclass
class _Fill:
    rows: list[Row]
    given: int
    places: list[tuple[int, int]]
    counts: list[int]


@dataclass
class _OpenRow:
    room: int
    pieces: list[tuple[int, Piece]] = field(default_factory=list)


class _BestFitLane(_Lane):
    def __init__(self, *args: Any, given: int = 0) -> None:
        super().__init__(*args)
        self._fill: _Fill | None = None
        if given:
            self._fill = self._make_fill()
            self._fill.given = given

    def _make_fill(self) -> _Fill:
        places, counts = list(self.places), list(self.counts)
        pieces: list[Piece] = []
        while len(pieces) < self._settings.buffer:
            chosen = self._choose(self.places)
            if chosen is None:
                break
            piece, self.places[piece.source] = chosen
            pieces.append(piece)
        return _Fill([self._padded(row) for row in _best_fit(pieces, self._settings.length)], 0, places, counts)

    def row(self) -> tuple[bool, Row]:
        if self._fill is None:
            self._fill = self._make_fill()
        if not self._fill.rows:
            self._fill = None
            return False, self._padded(([], [], []))
        row = self._fill.rows[self._fill.given]
        self._fill.given += 1
        if self._fill.given == len(self._fill.rows):
            self._fill = None
        return True, row

    def standing(self) -> tuple[list[tuple[int, int]], list[int], Any]:
        if self._fill is None:
            return list(self.places), list(self.counts), 0
        return list(self._fill.places), list(self._fill.counts), self._fill.given


def _best_fit(pieces: list[Piece], length: int) -> list[Row]:
    rows: list[_OpenRow] = []
    for arrival, piece in sorted(enumerate(pieces), key=lambda item: (-item[1].pairs, item[0])):
        fitting = [row for row in rows if row.room >= piece.pairs]
        if not fitting:
            rows.append(_OpenRow(length))
            fitting = rows[-1:]
        row = min(fitting, key=lambda row: row.room)
        row.room -= piece.pairs
        row.pieces.append((arrival, piece))
    laid = []
    for row in rows:
        in_order = [piece for _, piece in sorted(row.pieces, key=lambda item: item[0])]
        laid.append(
            (
                [i for piece in in_order for i in piece.ids[:-1]],
                [i for piece in in_order for i in piece.ids[1:]],
                [i for piece in in_order for i in range(piece.pairs)],
            )
        )
    return laid


def row_digest(row: Row) -> bytes:
    inputs, labels, positions = row
    data = np.array(inputs, "<u4").tobytes() + np.array(labels, "<i4").tobytes() + np.array(positions, "<i4").tobytes()
    return xxhash.xxh3_128(data).digest()


class Run:
    """Iterates over the global batches of a recipe, from its start or from a state.

    Args:
        recipe: the recipe as the YAML file says it, valid.
        folder: what its relative paths are relative to.
        state: a state of `Batch.state` or `Run.state`.
    """

    def __init__(self, recipe: dict[str, Any], folder: Path, state: dict[str, Any] | None = None) -> None:
        self._recipe = recipe
        packing, length = recipe.get("packing") or {}, recipe["sequence_length"]
        best_fit = packing.get("algorithm", "wrap") == "best_fit"
        max_pairs = packing.get("max_document_tokens") or 8 * length
        documents = Documents(recipe, folder)
        self._settings = _Settings(
            length=length,
            shares=shares(recipe),
            on_exhausted=recipe.get("on_exhausted", "stop"),
            pad=documents.pad[0] if documents.pad else 0,
            best_fit=best_fit,
            buffer=packing.get("buffer") or min(max(65536 // recipe["lanes"], 32), 1024),
        )
        max_pairs = min(max_pairs, length) if best_fit else max_pairs
        self.sources = [Source(recipe, s, documents, folder, max_pairs=max_pairs) for s in range(len(recipe["sources"]))]
        for source, at in zip(self.sources, state["sources"] if state else [], strict=False):
            source.start_at(at["epoch"], at["window"], at["dealt"])
        self._phases = [
            [key64(recipe["seed"], PHASE, s, lane) % length for s in range(len(self.sources))] for lane in range(recipe["lanes"])
        ]
        self._lanes = [self._lane(number, state) for number in range(recipe["lanes"])]
        self._step: int = state["step"] if state else 0
        self._chain: bytes = state["chain"] if state else bytes(16)
        self._used = self._reached() if state else [0] * len(self.sources)
        self.state = self._standing()
        """The state as of the last batch taken."""

    def _lane(self, number: int, state: dict[str, Any] | None) -> _Lane:
        kind = _BestFitLane if self._settings.best_fit else _WrapLane
        fixed = (number, self._settings, self.sources)
        if state is None:
            return kind(*fixed, list(self._phases[number]), [(0, 0)] * len(self.sources))
        extra = "given" if self._settings.best_fit else "partial"
        return kind(*fixed, list(state["counts"][number]), list(state["places"][number]), **{extra: state[extra][number]})

    def _reached(self) -> list[int]:
        return [max(lane.reached[s] for lane in self._lanes) for s in range(len(self.sources))]

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self._batch()) is not None:
            yield batch

    def _batch(self) -> Batch | None:
        pad = self._recipe.get("final_batch", "drop") == "pad"
        rows = []
        for lane in self._lanes:
            for _ in range(self._recipe["global_batch_size"] // len(self._lanes)):
                full, row = lane.row()
                if not full and not pad:
                    return None
                rows.append(row)
        if not any(label != -100 for _, labels, _ in rows for label in labels):
            return None
        digest = xxhash.xxh3_128(b"".join(row_digest(row) for row in rows)).digest()
        self._step += 1
        self._chain = xxhash.xxh3_128(self._chain + self._step.to_bytes(8, "little") + digest).digest()
        self.state = self._standing()
        return Batch(self._step, rows, digest, self._chain, self._pairs(), self.state, self._first_used())

    def _pairs(self) -> tuple[int, ...]:
        begun = [[count - phase for count, phase in zip(lane.counts, self._phases[n], strict=True)] for n, lane in enumerate(self._lanes)]
        return tuple(sum(lane) for lane in zip(*begun, strict=True))

    def _standing(self) -> dict[str, Any]:
        lanes = [lane.standing() for lane in self._lanes]
        oldest = [min(places[s][0] for places, _, _ in lanes) for s in range(len(self.sources))]
        return {
            "step": self._step,
            "chain": self._chain,
            "sources": [source.standing(window) for source, window in zip(self.sources, oldest, strict=True)],
            "places": [[(window - oldest[s], index) for s, (window, index) in enumerate(places)] for places, _, _ in lanes],
            "counts": [counts for _, counts, _ in lanes],
            "given" if self._settings.best_fit else "partial": [extra for _, _, extra in lanes],
        }

    def _first_used(self) -> list[UsedWindow]:
        before, self._used = self._used, self._reached()
        found = []
        for source in self.sources:
            for window in source.windows[before[source.index] : self._used[source.index]]:
                records = []
                for group, unit in window.units:
                    read = source.groups[group][unit]
                    records.append((group, unit, read.digest, tuple(read.left_out)))
                found.append((source.index, window.epoch, window.number, records))
        return found


def reference_batches(recipe: dict[str, Any], folder: Path) -> Iterator[tuple[int, list[Row], str, str, tuple[int, ...]]]:
    """(step, rows, digest hex, chain hex, pairs a source) of every global batch."""
    for batch in Run(recipe, folder):
        yield batch.step, batch.rows, batch.digest.hex(), batch.chain.hex(), batch.pairs


def reference_state(recipe: dict[str, Any], folder: Path, step: int) -> dict[str, Any]:
    """The state after `step` (0: before the first batch; a step past the end: after the last).

    Returns:
        {"step", "chain": 16 bytes,
        "sources": [{"epoch", "window": of the oldest window a lane stands in,
                     "places": [(ordinal of the group, unit)] of each slot with a group, "dealt": pairs a lane, less their minimum}],
        "places": a lane a list of (window from the oldest on, index) a source, "counts": a lane a list of counts a source,
        "partial": a lane (source, pairs used) or None [wrap], or "given": a lane the rows given of the open fill [best_fit]}
    """
    run = Run(recipe, folder)
    for batch in run if step else ():
        if batch.step == step:
            break
    return run.state


def reference_first_used(recipe: dict[str, Any], folder: Path, steps: int) -> Iterator[tuple[int, list[UsedWindow]]]:
    """(step, windows first used in it) of the first `steps` steps; see `Batch.first_used`."""
    for batch in Run(recipe, folder):
        yield batch.step, batch.first_used
        if batch.step == steps:
            return
