"""Fronts: how far the units of each source have come in, and which windows may be asked for next.

For runners whose workers make units far away, in an order and perhaps twice: a front takes each unit once, in order
within its slot, and says where a worker that knows nothing must go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zephon_ray.manifest import SourceManifest
from zephon_ray.plan.windows import Position, SourceCursor, UnitTask, epoch_order
from zephon_ray.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotStart:
    """Where a slot goes on within an epoch: its next unit is `unit` of its `ordinal`-th group, and lies in `window`."""

    ordinal: int
    unit: int
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Windows that workers may make: of `source`, in `epoch`, before window `end` of the epoch."""

    source: int
    epoch: int
    end: int


class SourceFront:
    """What has come in of one source.

    Args:
        recipe: gives order, slots and epochs.
        manifest: the source's.
        position: where it begins.

    Raises:
        StateError: the position does not fit the manifest.
    """

    def __init__(self, recipe: Recipe, manifest: SourceManifest, position: Position) -> None:
        SourceCursor(recipe, manifest, position)  # refuses a position that does not fit
        self.source = manifest.source
        self._recipe, self._manifest = recipe, manifest
        self._epochs = recipe.sources[manifest.source].epochs
        self._width = recipe.window_groups_of(manifest.source)
        groups = manifest.num_groups
        self._groups_of_slot = [len(range(slot, groups, self._width)) for slot in range(min(self._width, groups))]
        self._places = [SlotStart(ordinal=o, unit=u, window=position.window) for o, u in position.places]
        self.failed: set[int] = set()
        self._first_window = -position.window  # of the epoch, counted from the start position on
        self._open_epoch(position.epoch)

    def _open_epoch(self, epoch: int) -> None:
        self.epoch, self.granted = epoch, 0
        groups = self._manifest.num_groups
        order = epoch_order(seed=self._recipe.seed, source=self.source, epoch=epoch, groups=groups, shuffled=self._recipe.shuffle.groups)
        self._place_of_group = np.empty(groups, np.int64)
        self._place_of_group[order] = np.arange(groups)

    @property
    def done(self) -> bool:
        """Nothing will ever come again."""
        return not self._groups_of_slot or (self._epochs is not None and self.epoch >= self._epochs)

    def starts(self) -> tuple[SlotStart, ...]:
        """Where each slot goes on; a slot that has ended stands behind its last group."""
        return tuple(self._places)

    def left(self, slot: int) -> bool:
        return slot not in self.failed and self._places[slot].ordinal < self._groups_of_slot[slot]

    def take(self, epoch: int, group: int, unit: int, last: bool | None) -> bool:
        """A unit came in.

        Args:
            epoch: of the unit.
            group: its number within the source.
            unit: its number within the group.
            last: whether it is the group's last; None where it failed.

        Returns:
            True the first time, False for one that came before. Units of a slot come in order.
        """
        if epoch != self.epoch or self.done:
            return False
        place = int(self._place_of_group[group])
        slot, ordinal = place % self._width, place // self._width
        at = self._places[slot]
        if (ordinal, unit) != (at.ordinal, at.unit) or slot in self.failed:
            return False
        if last is None:
            self.failed.add(slot)
            return True
        ordinal, unit = (ordinal + 1, 0) if last else (ordinal, unit + 1)
        self._places[slot] = SlotStart(ordinal=ordinal, unit=unit, window=at.window + 1)
        if all(p.ordinal >= n for p, n in zip(self._places, self._groups_of_slot, strict=True)):
            self._first_window += max(p.window for p in self._places)
            self._places = [SlotStart(ordinal=0, unit=0, window=0)] * len(self._places)
            self._open_epoch(self.epoch + 1)
        return True

    def grant(self, allowed: int) -> Grant | None:
        """The windows that `allowed` (counted from the start position on) opens and that were not granted yet."""
        end = allowed - self._first_window
        if self.done or end <= self.granted:
            return None
        self.granted = end
        return Grant(source=self.source, epoch=self.epoch, end=end)

    def grant_again(self) -> int:
        """What was granted and has not come in must be granted anew. Returns how many units of slots that go on that is, at most."""
        due = sum(max(0, self.granted - p.window) for slot, p in enumerate(self._places) if self.left(slot))
        self.granted = 0
        return due

    @property
    def waiting(self) -> bool:
        """Units that were granted have not come in."""
        return self._first_left(self.granted) is not None

    def owes(self, allowed: int) -> UnitTask | None:
        """The first unit of the first `allowed` windows (counted from the start position on) that has not come in; None for none."""
        slot = self._first_left(allowed - self._first_window)
        if slot is None:
            return None
        at = self._places[slot]
        group = int(np.flatnonzero(self._place_of_group == slot + at.ordinal * self._width)[0])
        return UnitTask(group=self._manifest.group(group), epoch=self.epoch, unit=at.unit)

    def _first_left(self, end: int) -> int | None:
        if self.done:
            return None
        left = ((p.window, slot) for slot, p in enumerate(self._places) if p.window < end and self.left(slot))
        return min(left, default=(0, None))[1]


class SlotWalk:
    """The worker's side: the units of some slots of one source, in order of windows, as far as grants go.

    Args:
        recipe: gives order and slots.
        manifest: the source's.
        slots: the worker's.
        epoch: where they start.
        starts: of all slots.
    """

    def __init__(self, recipe: Recipe, manifest: SourceManifest, slots: Sequence[int], epoch: int, starts: Sequence[SlotStart]) -> None:
        self._recipe, self._manifest, self._slots = recipe, manifest, slots
        self._width = recipe.window_groups_of(manifest.source)
        self._open_epoch(epoch, starts)

    def _open_epoch(self, epoch: int, starts: Sequence[SlotStart]) -> None:
        self._epoch = epoch
        self._order = epoch_order(
            seed=self._recipe.seed,
            source=self._manifest.source,
            epoch=epoch,
            groups=self._manifest.num_groups,
            shuffled=self._recipe.shuffle.groups,
        )
        self._at = {slot: starts[slot] for slot in self._slots}

    def go_to(self, epoch: int) -> None:
        """Grants are for this epoch now: the one before has been made whole."""
        if epoch != self._epoch:
            self._open_epoch(epoch, [SlotStart(ordinal=0, unit=0, window=0)] * self._width)

    def next(self, end: int) -> tuple[int, UnitTask] | None:
        """(window, unit) of the first unit before window `end` that was not made; None where there is none."""
        open_slots = ((at.window, slot) for slot, at in self._at.items() if at.window < end and self._place(slot) < len(self._order))
        found = min(open_slots, default=None)
        if found is None:
            return None
        self._current = found[1]
        group = self._manifest.group(int(self._order[self._place(self._current)]))
        return found[0], UnitTask(group=group, epoch=self._epoch, unit=self._at[self._current].unit)

    def _place(self, slot: int) -> int:
        return slot + self._at[slot].ordinal * self._width

    def made(self, last: bool | None) -> None:
        """The unit that `next` gave is made. `last`: whether it is its group's last; None where it failed, and its slot ends."""
        at = self._at[self._current]
        if last is None:
            del self._at[self._current]
        elif last:
            self._at[self._current] = SlotStart(ordinal=at.ordinal + 1, unit=0, window=at.window + 1)
        else:
            self._at[self._current] = SlotStart(ordinal=at.ordinal, unit=at.unit + 1, window=at.window + 1)
