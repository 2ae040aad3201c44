"""Windows: the order in which a source's units are read and dealt.

A *cursor* walks the windows of one source, epoch after epoch. It does not read anything: whoever reads tells it
which units were the last of their groups, which for some formats is known only then. Source of every rule:
`docs/contract.md`, "Windows".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon_ray.errors import StateError
from zephon_ray.hashing import GROUP_ORDER, extend_key64, key64
from zephon_ray.manifest import Group, SourceManifest
from zephon_ray.recipe import Recipe

UnitKey = tuple[int, int, int, int]
"""(source, epoch, group, unit): the name of a unit in a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTask:
    """One unit that is to be read and tokenised, with everything that a worker must know.

    Args:
        group: the group that it belongs to.
        epoch: from 0. It names the result and does not change an id.
        unit: number of the unit within its group, from 0. It must exist.
    """

    group: Group
    epoch: int
    unit: int

    @property
    def key(self) -> UnitKey:
        return self.group.source, self.epoch, self.group.group, self.unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The start of a window.

    Args:
        epoch: from 0; the number of epochs where a source is at its end.
        window: within the epoch, from 0.
        places: for each slot with a group, (ordinal of the group within the slot, unit within the group), both
            from 0; after a slot's last unit (number of its groups, 0).
    """

    epoch: int
    window: int
    places: tuple[tuple[int, int], ...]


def epoch_order(*, seed: int, source: int, epoch: int, groups: int, shuffled: bool) -> npt.NDArray[np.int64]:
    """Group numbers in the order of one epoch, int64 [groups]."""
    order = np.arange(groups, dtype=np.int64)
    if not shuffled or groups < 2:
        return order
    keys = extend_key64(key64(seed, GROUP_ORDER, source, epoch), order)
    return np.argsort(keys, kind="stable")  # equal keys stay in order of group


class SourceCursor:
    """Walks the windows of one source from a position on.

    Args:
        recipe: gives seed, slots, epochs and whether groups are shuffled.
        manifest: the source's groups.
        position: where to start; None for the beginning.

    Raises:
        StateError: the position does not fit the manifest.
    """

    def __init__(self, recipe: Recipe, manifest: SourceManifest, position: Position | None = None) -> None:
        self._manifest = manifest
        self._source = manifest.source
        self._seed, self._shuffled = recipe.seed, recipe.shuffle.groups
        self._epochs = recipe.sources[manifest.source].epochs
        width = recipe.window_groups_of(manifest.source)
        groups = manifest.num_groups
        self._width = width
        self._groups_of_slot = [(groups - s + width - 1) // width for s in range(min(width, groups))]
        self._order: npt.NDArray[np.int64] | None = None
        self._order_epoch = -1
        start = position or Position(epoch=0, window=0, places=((0, 0),) * len(self._groups_of_slot))
        self._check(start)
        self.epoch, self.window = start.epoch, start.window
        self._places = list(start.places)

    def _check(self, position: Position) -> None:
        fits = len(position.places) == len(self._groups_of_slot) and all(
            0 <= o < n or (o, u) == (n, 0) for (o, u), n in zip(position.places, self._groups_of_slot, strict=False)
        )
        fits = fits and self._window_fits(position)
        fits = fits and all(self._has_unit(position.epoch, slot, o, u) for slot, (o, u) in enumerate(position.places) if u)
        if not fits or (self._epochs is not None and position.epoch > self._epochs):
            raise StateError(
                f"source {self._manifest.name!r}: the state's position {position} does not fit its {self._manifest.num_groups} groups"
                f" in {self._width} slots. Resume with the data and recipe that the state was saved with"
            )

    def _window_fits(self, position: Position) -> bool:
        """A slot gives one unit a window, and a group has at least one; plain JSON lines have exactly one."""
        if not self._groups_of_slot:
            return position.window == 0
        plain = all(shard.format == "jsonl" and shard.compression is None for shard in self._manifest.shards)
        active = [o + u for (o, u), n in zip(position.places, self._groups_of_slot, strict=True) if o < n]
        if plain:
            return bool(active) and all(units == position.window for units in active)
        return bool(active) and max(active) <= position.window

    def _has_unit(self, epoch: int, slot: int, ordinal: int, unit: int) -> bool:
        """False where the group is known to have fewer units."""
        units = self._manifest.group(self._group_at(epoch, slot, ordinal)).units
        return units is None or unit < units

    def _group_at(self, epoch: int, slot: int, ordinal: int) -> int:
        if self._order is None or self._order_epoch != epoch:
            self._order = epoch_order(
                seed=self._seed, source=self._source, epoch=epoch, groups=self._manifest.num_groups, shuffled=self._shuffled
            )
            self._order_epoch = epoch
        return int(self._order[slot + ordinal * self._width])

    @property
    def done(self) -> bool:
        """No window is left, ever."""
        return not self._groups_of_slot or (self._epochs is not None and self.epoch >= self._epochs)

    @property
    def position(self) -> Position:
        """The start of the current window."""
        return Position(epoch=self.epoch, window=self.window, places=tuple(self._places))

    def tasks(self) -> list[UnitTask]:
        """The units of the current window, slot by slot; never empty unless `done`."""
        if self.done:
            return []
        tasks = []
        for slot, (ordinal, unit) in enumerate(self._places):
            if ordinal < self._groups_of_slot[slot]:
                group = self._manifest.group(self._group_at(self.epoch, slot, ordinal))
                tasks.append(UnitTask(group=group, epoch=self.epoch, unit=unit))
        return tasks

    def advance(self, lasts: Sequence[bool]) -> None:
        """Go to the next window.

        Args:
            lasts: for each task of the current window, in order, whether its unit is the last of its group.
        """
        told = iter(lasts)
        left = False
        for slot, (ordinal, unit) in enumerate(self._places):
            if ordinal < self._groups_of_slot[slot]:
                ordinal, unit = (ordinal + 1, 0) if next(told) else (ordinal, unit + 1)
                self._places[slot] = (ordinal, unit)
                left = left or ordinal < self._groups_of_slot[slot]
        self.window += 1
        if not left:
            self.epoch, self.window = self.epoch + 1, 0
            self._places = [(0, 0)] * len(self._places)
