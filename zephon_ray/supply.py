"""Supply: the tokenised units of one source, put in order of windows again.

It takes units as they come, keyed, and gives whole windows. The units of a source that is small enough are kept, so
that its later epochs read and tokenise nothing. It looks at facts of units only: they may be references to arrays elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic

from zephon_ray.errors import BadRecordError, DataChangedError, SourceError
from zephon_ray.feeding import FedWindows, U, Window
from zephon_ray.ledger.line import LeftOutCounts, UnitDigests, WindowUse
from zephon_ray.manifest import SourceManifest
from zephon_ray.plan.windows import Position, SourceCursor, UnitKey, UnitTask
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import FailedUnit


class Memory:
    """Bytes of ids that all small sources of a stream may keep together.

    Args:
        limit_bytes: at least 0.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit = self.left = limit_bytes


class SourceSupply(Generic[U]):
    """Windows of one source, from a position on.

    Args:
        recipe: gives order, epochs, and what to do with bad records.
        manifest: the source's.
        position: of the first window.
        memory: shared with the other sources.
        recorded: what the ledger holds of windows that are read again: (epoch, window) -> the digests of its units.

    Attributes:
        source, name: of the source.
        fed: windows given so far.
        pairs: next-token pairs in them.
        remembered: a whole epoch is kept, so no unit is needed any more.

    Raises:
        SourceError: the source has no group.
    """

    def __init__(
        self,
        recipe: Recipe,
        manifest: SourceManifest,
        position: Position,
        memory: Memory,
        recorded: Mapping[tuple[int, int], UnitDigests],
    ) -> None:
        self.source, self.name = manifest.source, manifest.name
        self.fed = 0
        self.pairs = 0
        self._manifest, self._recorded = manifest, recorded
        self._cursor = SourceCursor(recipe, manifest, position)
        self._max_bad = recipe.sources[self.source].max_bad_records
        self._arrived: dict[UnitKey, U | FailedUnit] = {}
        self._tasks: list[UnitTask] | None = None
        self._memory, self._kept, self._kept_bytes = memory, dict[tuple[int, int], U](), 0
        epochs = recipe.sources[self.source].epochs
        again = epochs is None or position.epoch + 1 < epochs
        self._keeps = again and manifest.text_bytes <= memory.limit  # ids take four bytes, and stand for about as many
        self.remembered = False
        self._epoch_pairs, self._epoch_bad, self._whole_epoch = 0, 0, position.window == 0
        self._unused: deque[tuple[int, WindowUse, LeftOutCounts]] = deque()
        self._next_ordinal, self._used_before = 0, -1
        if not manifest.num_groups:
            raise SourceError(
                f"source {self.name!r}: none of its {len(manifest.shards)} shards holds a record. Look at its uri, or leave it out"
            )

    @property
    def done(self) -> bool:
        """No window is left."""
        return self._cursor.done

    @property
    def mean_pairs(self) -> int:
        """Pairs a window so far, at least 1."""
        return max(1, self.pairs // max(1, self.fed))

    def put(self, unit: U | FailedUnit) -> None:
        """Take a unit in; windows may need it now, later, or never."""
        if not self.remembered:
            self._arrived[unit.source, unit.epoch, unit.group, unit.unit] = unit

    def next_windows(self, pairs: int, most: int) -> FedWindows[U] | None:
        """The next windows that are whole, until they hold `pairs` pairs or are `most`; None where not even one is.

        A window that cannot be used is an error only when it is the first that is asked for, so that every step that can
        be made without it is made.

        Args:
            pairs: at least 1.
            most: windows, at least 1.

        Raises:
            BadRecordError, SourceError, DataChangedError, StorageError: the next window cannot be used.
        """
        windows: list[Window[U]] = []
        got = 0
        while got < pairs and len(windows) < most and not self.done:
            window = self._next_window()
            if isinstance(window, Exception) and not windows:
                raise window
            if not isinstance(window, Window):
                break
            windows.append(window)
            got += self._account(window)
        if not windows:
            return None
        self.fed += len(windows)
        self.pairs += got
        return FedWindows(windows=windows, after=self._cursor.position)

    def _next_window(self) -> Window[U] | Exception | None:
        """The next window; what is wrong with it; or None while units of it are missing."""
        if self._tasks is None:
            self._tasks = self._cursor.tasks()
        tasks = self._tasks
        if self.remembered:
            units = [self._kept[t.group.group, t.unit] for t in tasks]
        else:
            if any(t.key not in self._arrived for t in tasks):
                return None
            units = []
            for task in tasks:
                unit = self._arrived[task.key]
                if isinstance(unit, FailedUnit):
                    return unit.error
                if fault := self._fault(task, unit):
                    return fault
                units.append(unit)
            if too_many := self._too_many_bad(units):
                return too_many
            for task in tasks:
                del self._arrived[task.key]
            self._keep(units)
        position = self._cursor.position
        self._cursor.advance([u.last for u in units])
        self._tasks = None
        return Window(position=position, units=units)

    def _fault(self, task: UnitTask, unit: U) -> Exception | None:
        if unit.error is not None:
            return BadRecordError(unit.error)
        recorded = self._recorded.get((task.epoch, self._cursor.window), {}).get((unit.group, unit.unit))
        if recorded is None or recorded == unit.digest:
            return None
        return DataChangedError(
            f"{task.group.where}: the text of its group {task.group.ordinal}, unit {unit.unit}, is not what it was when the run first"
            f" read it (digest {unit.digest:016x}, recorded {recorded:016x}). Restore the file, or start a new run"
        )

    def _too_many_bad(self, units: Sequence[U]) -> BadRecordError | None:
        bad = self._epoch_bad + sum(u.bad for u in units)
        if self._max_bad is None or bad <= self._max_bad:
            return None
        return BadRecordError(
            f"source {self.name!r}: {bad} bad records in epoch {self._cursor.epoch}, more than max_bad_records={self._max_bad}."
            f" Mend the data, or raise the limit. The last ones: {'; '.join(x for u in units for x in u.bad_examples)}"
        )

    def _keep(self, units: Sequence[U]) -> None:
        """Remember units while the source may turn out to be small."""
        if not self._keeps:
            return
        for unit in units:
            key, size = (unit.group, unit.unit), unit.nbytes
            if key in self._kept:
                continue
            if size > self._memory.left:
                self._memory.left += self._kept_bytes
                self._kept, self._kept_bytes, self._keeps = {}, 0, False
                return
            self._kept[key] = unit.owned()
            self._kept_bytes += size
            self._memory.left -= size

    def _account(self, window: Window[U]) -> int:
        """Count a window's records; returns its pairs."""
        pairs = sum(u.pairs for u in window.units)
        self._epoch_pairs += pairs
        self._epoch_bad += sum(u.bad for u in window.units)
        if self._next_ordinal > self._used_before:
            use = WindowUse(
                epoch=window.position.epoch,
                window=window.position.window,
                units=tuple((u.group, u.unit, u.digest) for u in window.units),
            )
            left_out = (sum(u.bad for u in window.units), sum(u.empty for u in window.units), sum(u.short for u in window.units))
            self._unused.append((self._next_ordinal, use, left_out))
        self._next_ordinal += 1
        if self._cursor.epoch != window.position.epoch:
            self._end_epoch(window.position.epoch)
        return pairs

    def _end_epoch(self, epoch: int) -> None:
        if self._whole_epoch and not self._epoch_pairs:
            raise SourceError(
                f"source {self.name!r}: its {len(self._manifest.shards)} shards hold no document of at least two tokens."
                " Look at text_field, or leave the source out"
            )
        self._epoch_pairs = self._epoch_bad = 0
        if self._whole_epoch and self._keeps:
            self.remembered = True
            self._arrived.clear()
        self._whole_epoch = True

    def skip_used(self, newest: int) -> None:
        """Windows up to ordinal `newest` were used by steps before the stream was opened; they may not be fed yet."""
        self._used_before = max(self._used_before, newest)
        self.use(newest)

    def use(self, newest: int) -> tuple[tuple[WindowUse, ...], LeftOutCounts]:
        """The windows up to ordinal `newest` that were not used before, in order, and what was left out of them."""
        used, left_out = [], (0, 0, 0)
        while self._unused and self._unused[0][0] <= newest:
            _, use, (bad, empty, short) = self._unused.popleft()
            used.append(use)
            left_out = (left_out[0] + bad, left_out[1] + empty, left_out[2] + short)
        return tuple(used), left_out
