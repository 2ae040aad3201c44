"""A schedule: which unit a worker makes next. It knows neither threads nor processes, and nobody but its owner may call it.

The slots of a source run ahead of each other within what is allowed: a window that waits for its slowest unit does not
hold up the others. A unit's window is the number of units of its slot before it in the epoch, so only at the end of an
epoch must all slots be waited for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from zephon_ray.manifest import SourceManifest
from zephon_ray.plan.windows import Position, SourceCursor, UnitTask, epoch_order
from zephon_ray.recipe import Recipe


@dataclass(frozen=True, slots=True, order=True)
class Work:
    """A unit to be made. They sort by urgency.

    Args:
        window: from the start position on, across epochs.
        slot: of the unit's group.
        task: the unit.
    """

    window: int
    slot: int
    task: UnitTask = field(compare=False)

    @property
    def stream(self) -> tuple[int, int]:
        """(epoch, group): the name of the unit's stream within its source."""
        return self.task.epoch, self.task.group.group

    @property
    def ends_group(self) -> bool:
        """It is known beforehand to be its group's last."""
        units = self.task.group.units
        return units is not None and self.task.unit + 1 >= units


@dataclass(slots=True)
class _Slot:
    """Where a slot is: the place (ordinal, unit) and window of its next unit, and whether that hangs on a unit in the making."""

    groups: int
    ordinal: int
    unit: int
    window: int = 0
    waiting: bool = False

    @property
    def ended(self) -> bool:
        return self.ordinal >= self.groups

    def go_on(self, last: bool) -> None:
        self.ordinal, self.unit = (self.ordinal + 1, 0) if last else (self.ordinal, self.unit + 1)
        self.window += 1


class _Walk:
    """The units of one source from a position on, slot by slot."""

    def __init__(self, recipe: Recipe, manifest: SourceManifest, position: Position) -> None:
        SourceCursor(recipe, manifest, position)  # refuses a position that does not fit
        self._recipe, self._manifest = recipe, manifest
        self._epochs = recipe.sources[manifest.source].epochs
        self._width = recipe.window_groups_of(manifest.source)
        counts = [len(range(slot, manifest.num_groups, self._width)) for slot in range(min(self._width, manifest.num_groups))]
        self._slots = [_Slot(n, ordinal, unit) for n, (ordinal, unit) in zip(counts, position.places, strict=True)]
        self._open(position.epoch)

    @property
    def width(self) -> int:
        return len(self._slots)

    def _open(self, epoch: int) -> None:
        self._epoch = epoch
        self._left = sum(not slot.ended for slot in self._slots)
        self._done = self._left == 0 or (self._epochs is not None and epoch >= self._epochs)
        if not self._done:
            self._order = epoch_order(
                seed=self._recipe.seed,
                source=self._manifest.source,
                epoch=epoch,
                groups=self._manifest.num_groups,
                shuffled=self._recipe.shuffle.groups,
            )

    def begin(self, allowed: int) -> list[Work]:
        """All units before window `allowed` that can be begun and were not."""
        begun: list[Work] = []
        while not self._done:
            for number in range(len(self._slots)):
                self._begin_slot(number, allowed, begun)
            if self._left:
                break
            windows = max(slot.window for slot in self._slots)
            for slot in self._slots:
                slot.ordinal, slot.unit, slot.window = 0, 0, windows
            self._open(self._epoch + 1)
        return begun

    def go_on(self, number: int, last: bool, allowed: int) -> list[Work]:
        """The same, after the unit that a slot hung on was made."""
        slot, begun = self._slots[number], list[Work]()
        slot.waiting = False
        slot.go_on(last)
        self._left -= slot.ended
        self._begin_slot(number, allowed, begun)
        return begun if self._left else begun + self.begin(allowed)

    def _begin_slot(self, number: int, allowed: int, begun: list[Work]) -> None:
        slot = self._slots[number]
        while slot.window < allowed and not (slot.waiting or slot.ended):
            group = self._manifest.group(int(self._order[number + slot.ordinal * self._width]))
            work = Work(slot.window, number, UnitTask(group=group, epoch=self._epoch, unit=slot.unit))
            begun.append(work)
            if work.ends_group:
                slot.go_on(last=True)
                self._left -= slot.ended
            else:
                slot.waiting = True  # a stream is read in order, and may tell only then where it ends


class _Queue:
    """Units of one source that wait for a worker.

    A stream stays with the worker that began it, whose reader is open. A worker takes no more of a source's streams than
    its share, so that no worker is left without while another has two.
    """

    def __init__(self, width: int, workers: int) -> None:
        self._share = -(-width // workers)
        self._free: list[Work] = []  # for any worker
        self._fresh: list[Work] = []  # of streams that no worker has begun
        self._own: defaultdict[int, list[Work]] = defaultdict(list)  # of each worker's streams
        self._owners: dict[tuple[int, int], int] = {}  # (epoch, group) of a stream -> worker
        self._streams: Counter[int] = Counter()  # of each worker

    def add(self, works: Iterable[Work]) -> None:
        for work in works:
            owner = self._owners.get(work.stream)
            if not work.task.group.streamed:
                heappush(self._free, work)
            else:
                heappush(self._fresh if owner is None else self._own[owner], work)

    def _heap_for(self, worker: int) -> list[Work] | None:
        """The heap whose first unit the worker would take."""
        heaps = [self._free, self._own[worker]]
        if self._streams[worker] < self._share:
            heaps.append(self._fresh)
        return min((heap for heap in heaps if heap), key=lambda heap: heap[0], default=None)

    def first(self, worker: int) -> int | None:
        """Window of the most urgent unit that the worker may take."""
        heap = self._heap_for(worker)
        return heap[0].window if heap else None

    def pop(self, worker: int) -> Work:
        heap = self._heap_for(worker)
        assert heap is not None, "asked only after `first` found one"
        work = heappop(heap)
        if heap is self._fresh:
            self._owners[work.stream] = worker
            self._streams[worker] += 1
        return work

    def end_stream(self, work: Work) -> None:
        """No further unit of a unit's stream will be made."""
        self._streams[self._owners.pop(work.stream)] -= 1


class Schedule:
    """Hands out the allowed units of all sources, each once.

    Args:
        recipe: gives slots, epochs and order.
        manifests: one a source.
        positions: where each source begins.
        workers: how many there are, numbered from 0.

    Raises:
        StateError: a position does not fit its manifest.
    """

    def __init__(self, recipe: Recipe, manifests: Sequence[SourceManifest], positions: Sequence[Position], workers: int) -> None:
        self._walks = [_Walk(recipe, manifest, position) for manifest, position in zip(manifests, positions, strict=True)]
        self._queues = [_Queue(walk.width, workers) for walk in self._walks]
        self._allowed = [0] * len(self._walks)
        self.unmade = 0
        """Units that were begun or could be, and are not made."""

    def allow(self, source: int, windows: int) -> None:
        """Units of the first `windows` windows of a source may be made."""
        if windows > self._allowed[source]:
            self._allowed[source] = windows
            self._add(source, self._walks[source].begin(windows))

    def _add(self, source: int, works: list[Work]) -> None:
        self.unmade += len(works)
        self._queues[source].add(works)

    def has_work(self, worker: int) -> bool:
        """Whether `next` would give the worker a unit."""
        return any(queue.first(worker) is not None for queue in self._queues)

    def next(self, worker: int) -> Work | None:
        """The most urgent unit that a worker may make: the longest allowed, then the lowest source. None: there is none now."""
        firsts = ((queue.first(worker), source) for source, queue in enumerate(self._queues))
        found = [(window - self._allowed[source], source) for window, source in firsts if window is not None]
        return self._queues[min(found)[1]].pop(worker) if found else None

    def made(self, work: Work, last: bool | None) -> bool:
        """A unit is made.

        Args:
            work: the unit.
            last: whether it is its group's last; None where it failed: then nothing after it in its slot will be needed.

        Returns:
            whether others than the worker that made it may find something to do now.
        """
        self.unmade -= 1
        group = work.task.group
        if not group.streamed:
            return False
        if last is None or last or work.ends_group:
            self._queues[group.source].end_stream(work)
        if last is None or work.ends_group:  # the slot stays there, or went on already
            return True
        begun = self._walks[group.source].go_on(work.slot, last, self._allowed[group.source])
        self._add(group.source, begun)
        return last or len(begun) > 1
