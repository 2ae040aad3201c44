"""The order of a source's pieces: groups into slots, slots into windows, windows into pieces, pieces to lanes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reference.data import MIB, Documents, EmptySource, Unit, groups

GROUP_ORDER, DOC_ORDER, PHASE = 1, 2, 3
MODULUS = 2**64


def mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ x >> 27) * 0x94D049BB133111EB % MODULUS
    return x ^ x >> 31


def key64(*parts: int) -> int:
    h = 0
    for part in parts:
        h = mix64((h + 0x9E3779B97F4A7C15 + part) % MODULUS)
    return h


@dataclass(frozen=True)
class Piece:
    """A piece of a document; `ids` holds one more than its pairs."""

    source: int
    ids: list[int]

    @property
    def pairs(self) -> int:
        return len(self.ids) - 1


@dataclass(frozen=True)
class Window:
    """A window, dealt: `units` are its (group, unit), `deals` the pieces of each lane, `dealt_before` the pairs each lane had before it."""

    epoch: int
    number: int
    units: list[tuple[int, int]]
    deals: list[list[Piece]]
    dealt_before: list[int]


class Source:
    """A source's windows, one after the other from a place on (by default its start), across epochs.

    `windows[0]` is the window at that place. `complete` means that no further window exists, ever.
    """

    def __init__(self, recipe: dict[str, Any], index: int, documents: Documents, folder: Path, *, max_pairs: int) -> None:
        spec, shuffle = recipe["sources"][index], recipe.get("shuffle") or {}
        self.index = index
        self._seed, self._lanes, self._max_pairs = recipe["seed"], recipe["lanes"], max_pairs
        self._epochs = spec.get("epochs")
        self._width = spec.get("window_groups") or shuffle.get("window_groups", 16)
        self._shuffle_groups, self._shuffle_documents = shuffle.get("groups", True), shuffle.get("documents", True)
        unit_bytes = spec.get("unit_bytes") or recipe.get("unit_bytes", MIB)
        text_field = spec.get("text_field", "text")
        self.groups: list[list[Unit]] = [[documents.unit(raw, text_field) for raw in units] for units in groups(spec, unit_bytes, folder)]
        if not any(unit.pairs for units in self.groups for unit in units):
            raise EmptySource(f"source {spec['name']!r} holds no document")
        self._next, self.dealt = (0, 0), [0] * self._lanes
        self.windows: list[Window] = []
        self._slots_of: dict[int, list[list[int]]] = {}

    def start_at(self, epoch: int, window: int, dealt: list[int]) -> None:
        """Begin with a later window. `dealt` are the pairs dealt to each lane before it, or as much less for all lanes."""
        self._next, self.dealt = (epoch, window), list(dealt)

    def slots(self, epoch: int) -> list[list[int]]:
        """The groups of each slot that has one, in order."""
        if epoch not in self._slots_of:
            self._slots_of[epoch] = self._order(epoch)
        return self._slots_of[epoch]

    def _order(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self.groups)))
        if self._shuffle_groups:
            order.sort(key=lambda group: (key64(self._seed, GROUP_ORDER, self.index, epoch, group), group))
        return [order[slot :: self._width] for slot in range(min(self._width, len(order)))]

    def _streams(self, epoch: int) -> list[list[tuple[int, int]]]:
        return [[(group, unit) for group in slot for unit in range(len(self.groups[group]))] for slot in self.slots(epoch)]

    @property
    def complete(self) -> bool:
        return self._epochs is not None and self._next[0] >= self._epochs

    def extend(self) -> None:
        """Deal one more window."""
        epoch, number = self._next
        streams = self._streams(epoch)
        units = [stream[number] for stream in streams if number < len(stream)]
        before = list(self.dealt)
        deals: list[list[Piece]] = [[] for _ in range(self._lanes)]
        for piece in self._pieces(epoch, units):
            lane = min(range(self._lanes), key=lambda lane: (self.dealt[lane], lane))
            self.dealt[lane] += piece.pairs
            deals[lane].append(piece)
        self.windows.append(Window(epoch, number, units, deals, before))
        last = number + 1 == max(len(stream) for stream in streams)
        self._next = (epoch + 1, 0) if last else (epoch, number + 1)

    def _pieces(self, epoch: int, units: list[tuple[int, int]]) -> list[Piece]:
        found = []
        for group, unit in units:
            for document, ids in enumerate(self.groups[group][unit].documents):
                for piece, start in enumerate(range(0, len(ids) - 1, self._max_pairs)):
                    cut = ids[start : start + self._max_pairs + 1]
                    key = key64(self._seed, DOC_ORDER, self.index, epoch, group, unit, document, piece)
                    found.append(((key, group, unit, document, piece), Piece(self.index, cut)))
        if self._shuffle_documents:
            found.sort(key=lambda item: item[0])
        return [piece for _, piece in found]

    def next_piece(self, lane: int, place: tuple[int, int]) -> tuple[int, Piece, tuple[int, int]] | None:
        """(its window, the piece, the place just after it) of the lane's first piece at or after `place`; None: none, ever."""
        window, index = place
        while True:
            while window >= len(self.windows):
                if self.complete:
                    return None
                self.extend()
            deal = self.windows[window].deals[lane]
            if index < len(deal):
                return window, deal[index], (window, index + 1) if index + 1 < len(deal) else (window + 1, 0)
            window, index = window + 1, 0

    def standing(self, window: int) -> dict[str, Any]:
        """What the state says of a source whose oldest window is `windows[window]` (or the one after the last)."""
        if window < len(self.windows):
            epoch, number, dealt = self.windows[window].epoch, self.windows[window].number, self.windows[window].dealt_before
        else:
            (epoch, number), dealt = self._next, self.dealt
        return {
            "epoch": epoch,
            "window": number,
            "places": [self._place_in_slot(slot, number) for slot in self.slots(epoch)],
            "dealt": [pairs - min(dealt) for pairs in dealt],
        }

    def _place_in_slot(self, slot: list[int], unit: int) -> tuple[int, int]:
        for ordinal, group in enumerate(slot):
            if unit < len(self.groups[group]):
                return ordinal, unit
            unit -= len(self.groups[group])
        return len(slot), 0
