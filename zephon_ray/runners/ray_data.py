"""The Ray runner: Ray Data reads and tokenises, in bounded *waves* that this module opens, cuts and replaces.

A wave is one Ray Data execution of a few endless-looking read tasks, each of which owns some slots of every source. What
they may make comes as entries from a *mailbox* actor, so that credit, not backpressure, bounds memory. To *cut* a wave is
to close its entries: its tasks make what was granted and end, never waiting for anything again, while the next wave,
launched at that moment, waits for its first entry. So waves replace each other without a gap, whenever enough text was
made, the cluster grew or shrank, or an execution stands still. Why so: `docs/decisions/0004-what-runs-where.md`.

The only module that imports ray.data.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from zephon_ray.errors import RunnerError
from zephon_ray.plan.windows import Position, UnitTask
from zephon_ray.recipe import WorkersSpec
from zephon_ray.runners.base import FailedUnit, Job, Runner, RunnerStats, name_of, not_started, nothing_left, refuse_start
from zephon_ray.runners.fronts import SourceFront
from zephon_ray.runners.ray_cluster import Cluster, connect
from zephon_ray.runners.ray_worker import Entry, blocks, units_of
from zephon_ray.stages.tokenise import UnitTokeniser
from zephon_ray.stages.unit import TokenisedUnit

TASK_BYTES = 32 << 20
"""Text a task makes before its wave is cut; what was granted before the cut comes on top, and 64 MB are not exceeded by much."""

TICK_S = 0.5
IDLE_S = 5.0
HUNGRY_S = 1.0
CLOSE_S = 10.0
START_S = 10.0
_LIVES = 3
_NAME = "ZephonUnits"
_TITLE = f"Read{_NAME}"
"""Ray gives it to processes while they run a task of ours."""

_log = logging.getLogger(__name__)
_CONTEXT = threading.Lock()
"""Ray Data's context is one for the process: whoever sets it to make a dataset holds this."""

_TOKENISERS: dict[str, UnitTokeniser] = {}


class _Mailbox:
    """Holds the entries of waves. Entries are numbered by the one who posts, since calls may overtake each other."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], Entry] = {}
        self._ends: dict[int, int] = {}
        self._closed = False
        self._callers: set[tuple[str, int]] = set()
        self._changed = asyncio.Condition()

    async def callers(self) -> set[tuple[str, int]]:
        """(node, process) of everyone who asked for an entry."""
        return self._callers

    async def post(self, wave: int, number: int, entry: Entry) -> None:
        async with self._changed:
            self._entries[wave, number] = entry
            self._changed.notify_all()

    async def end(self, wave: int, entries: int) -> None:
        """The wave has that many entries and no more."""
        async with self._changed:
            self._ends[wave] = entries
            self._changed.notify_all()

    async def close(self) -> None:
        """No wave gets an entry any more."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def entry(self, wave: int, number: int, caller: tuple[str, int]) -> Entry | None:
        """Wait for an entry; None behind the wave's last."""
        key = (wave, number)
        self._callers.add(caller)
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or key in self._entries or number >= self._ends.get(wave, number + 1))
            return None if self._closed else self._entries.get(key)


class _Slots(Datasource):
    """The read tasks of a wave."""

    def __init__(self, job: ray.ObjectRef[Job], mailbox: Any, wave: int, tasks: int) -> None:
        self._read = [_reader(job, mailbox, wave, task, tasks) for task in range(tasks)]

    def get_name(self) -> str:
        return _NAME

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *args: Any, **kwargs: Any) -> list[ReadTask]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(read, unknown) for read in self._read]


def _reader(job: ray.ObjectRef[Job], mailbox: Any, wave: int, task: int, tasks: int) -> Callable[[], Iterable[pa.Table]]:
    def read() -> Iterator[pa.Table]:
        made = ray.get(job)
        tokeniser = _TOKENISERS.get(job.hex())
        if tokeniser is None:
            _TOKENISERS.clear()
            tokeniser = _TOKENISERS[job.hex()] = UnitTokeniser(made.options)
        caller = ray.get_runtime_context().get_node_id(), os.getpid()
        yield from blocks(made, tokeniser, task, tasks, lambda number: ray.get(mailbox.entry.remote(wave, number, caller)))

    return read


@dataclass(slots=True)
class _Wave:
    """One execution. `entries` were posted so far; `cut` says that there will be no more, `given_up` that nothing is expected of it."""

    number: int
    tasks: int
    mailbox: Any
    entries: int = 0
    cut: bool = False
    given_up: bool = False
    delivered: bool = False
    met: set[int] = field(default_factory=set)
    text_bytes: int = 0
    skipped_bytes: int = 0
    executor: Any = None
    thread: threading.Thread | None = None
    error: Exception | None = None
    ended: bool = False


class _Core:
    """The runner's threads and what they share, under one lock. It does not know its runner: one that was forgotten is collected."""

    def __init__(self, job: Job, positions: Sequence[Position], workers: WorkersSpec, stall_s: float, cluster: Cluster) -> None:
        self._job, self._workers, self._stall_s, self._cluster = job, workers, stall_s, cluster
        self._fronts = [SourceFront(job.recipe, m, p) for m, p in zip(job.manifests, positions, strict=True)]
        self._allowed = [0] * len(self._fronts)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._results: deque[TokenisedUnit | FailedUnit] = deque()
        self._waves: list[_Wave] = []
        self._draining: set[int] = set()
        self._units = self._text_bytes = self._skipped_bytes = self._again = 0
        self._taking_since: float | None = None
        self._progress = time.monotonic()
        self._lives = _LIVES
        self._error: Exception | None = None
        self._closed = self._left = False
        self._pid = os.getpid()
        self._job_ref = ray.put(job)
        self._mailboxes = [self._new_mailbox()]
        self._supervisor = threading.Thread(target=self._supervise, name="zephon-ray-supervisor", daemon=True)

    def _new_mailbox(self) -> Any:
        mailbox: Any = ray.remote(_Mailbox)
        return mailbox.options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=self._cluster.here()).remote()

    def start(self) -> None:
        with self._lock:
            self._launch(self._wanted_tasks(busy=True))
        self._supervisor.start()

    # ---- the taker's side

    def allow(self, source: int, windows: int) -> None:
        with self._lock:
            if windows > self._allowed[source]:
                self._allowed[source] = windows
                self._post()

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        with self._changed:
            self._taking_since = time.monotonic()
            try:
                self._changed.wait_for(self._settled, timeout_s)
            finally:
                self._taking_since = None
            if self._closed:
                raise nothing_left(closed=True)
            if self._results:
                return self._results.popleft()
            awaited = self._awaited()
            if awaited is None and self._error is None:
                raise nothing_left(closed=False)
            raise self._error or RunnerError(f"no unit came within {timeout_s:g} s. {self._condition(awaited)}")

    def _settled(self) -> bool:
        return bool(self._results) or self._closed or self._error is not None or self._awaited() is None

    def _awaited(self) -> UnitTask | None:
        """The first unit that was allowed and did not come."""
        return next((task for f in self._fronts if (task := f.owes(self._allowed[f.source])) is not None), None)

    def stats(self) -> RunnerStats:
        with self._lock:
            return RunnerStats(
                units=self._units,
                text_bytes=self._text_bytes,
                skipped_bytes=self._skipped_bytes,
                retries=self._again,
                workers=sum(w.tasks for w in self._waves if not w.cut),
            )

    def _condition(self, awaited: UnitTask | None) -> str:
        slots = self._cluster.slots(self._workers)
        what = f"Awaited is {name_of(awaited)}. " if awaited is not None else ""
        room = f"The cluster has room for {slots} workers of {self._workers.describe()}"
        return f"{what}{room}; look at its nodes, and whether the storage answers"

    # ---- waves; all under the lock

    @property
    def _current(self) -> _Wave | None:
        return self._waves[-1] if self._waves and not self._waves[-1].cut else None

    def _wanted_tasks(self, *, busy: bool) -> int:
        slots = max(1, self._cluster.slots(self._workers))
        most = max(len(f.starts()) for f in self._fronts)
        return max(1, min(most, slots, self._workers.max if busy else self._workers.min))

    def _launch(self, tasks: int) -> None:
        number = self._waves[-1].number + 1 if self._waves else 0
        wave = _Wave(number=number, tasks=tasks, mailbox=self._mailboxes[-1])
        self._waves.append(wave)
        wave.thread = threading.Thread(target=self._pump, args=(wave,), name=f"zephon-ray-wave-{number}", daemon=True)
        wave.thread.start()
        self._post()

    def _post(self) -> None:
        """Grant the current wave what is allowed, of every source that older waves owe nothing of."""
        wave = self._current
        if wave is None or self._closed:
            return
        grants, starts = [], {}
        for front in self._fronts:
            if front.source in self._draining:
                continue
            at = front.epoch, front.starts()
            grant = front.grant(self._allowed[front.source])
            if grant is not None:
                grants.append(grant)
                if front.source not in wave.met:
                    wave.met.add(front.source)
                    starts[front.source] = at
        if grants:
            wave.mailbox.post.remote(wave.number, wave.entries, Entry(starts=starts, grants=tuple(grants)))
            wave.entries += 1
            self._progress = time.monotonic()

    def _cut(self, tasks: int) -> None:
        """End the current wave behind what it was granted, and launch the next."""
        wave = self._current
        if wave is not None:
            wave.cut = True
            wave.mailbox.end.remote(wave.number, wave.entries)
            self._draining |= {f.source for f in self._fronts if f.waiting}
        self._launch(tasks)

    def _reopen(self, why: str) -> None:
        """Give all waves up, and begin again where the units have come to."""
        self._lives -= 1
        if not self._lives:
            self._error = RunnerError(
                f"no unit came through {_LIVES} executions, each given {self._stall_s:g} s unless it died (the last: {why})."
                f" {self._condition(self._awaited())}"
            )
            self._changed.notify_all()
            return
        _log.warning("the Ray execution is opened again where it stopped: %s", why)
        self._progress = time.monotonic()
        mailbox = self._mailboxes[-1]
        mailbox.close.remote()
        for wave in self._waves:
            wave.cut = wave.given_up = True
            _shut_down(wave)
        self._cluster.reap(mailbox.callers.remote(), _TITLE)
        self._mailboxes.append(self._new_mailbox())  # the one before may be what died
        for front in self._fronts:
            front.grant_again()
        self._draining.clear()
        self._launch(self._wanted_tasks(busy=True))

    def _supervise(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._error is not None, TICK_S)
                if self._closed or self._error is not None:
                    return
                now = time.monotonic()
                waiting = any(f.waiting for f in self._fronts)
                idle_since = now if waiting else idle_since
                try:
                    self._look_after(now, waiting, idle=now - idle_since > IDLE_S)
                except Exception as error:  # noqa: BLE001  raised by `take`
                    self._error = RunnerError(f"the Ray cluster cannot be used any more: {error}")
                    self._changed.notify_all()

    def _patience_s(self) -> float:
        """How long no unit may come. Processes that start take seconds, where there is room for any."""
        fresh = self._current is not None and not self._current.delivered
        return max(self._stall_s, START_S) if fresh and self._cluster.slots(self._workers) else self._stall_s

    def _look_after(self, now: float, waiting: bool, *, idle: bool) -> None:
        self._waves = [w for w in self._waves if not (w.ended and w.cut)]
        broken = next((w for w in self._waves if w.ended), None)
        if broken is not None and _is_ours(broken.error):
            raise broken.error or RunnerError("a wave ended early")
        if broken is not None or (waiting and now - self._progress > self._patience_s()):
            self._reopen(str(broken.error or "it ended early") if broken is not None else f"no unit came for {self._stall_s:g} s")
            return
        wave = self._current
        if wave is None:
            return
        hungry = self._taking_since is not None and now - self._taking_since > HUNGRY_S
        tasks = self._wanted_tasks(busy=not idle)
        full = wave.text_bytes >= max(TASK_BYTES * wave.tasks, wave.skipped_bytes)
        if full or (tasks < wave.tasks and (idle or waiting)) or (tasks > wave.tasks and hungry):
            self._cut(max(tasks, 1) if not full or hungry or idle else wave.tasks)

    # ---- a wave's thread

    def _pump(self, wave: _Wave) -> None:
        try:
            dataset = self._dataset(wave)
            with self._lock:
                wave.executor = dataset._create_executor()
                if wave.given_up:
                    return
            for bundle in dataset._build_bundle_iterator(wave.executor):
                for ref in bundle.block_refs:
                    table: Any = ray.get(cast(Any, ref))
                    self._deliver(wave, table)
        except Exception as error:  # noqa: BLE001  looked after by the supervisor
            wave.error = error
        finally:
            with self._changed:
                wave.ended = True
                self._changed.notify_all()

    def _dataset(self, wave: _Wave) -> ray.data.Dataset:
        context = DataContext.get_current().copy()
        context.target_max_block_size = 1  # what a task yields is a block, and is passed on at once
        context.enable_progress_bars = False
        with _CONTEXT, DataContext.current(context):
            dataset: ray.data.Dataset = ray.data.read_datasource(
                _Slots(self._job_ref, wave.mailbox, wave.number, wave.tasks),
                override_num_blocks=wave.tasks,
                num_cpus=self._workers.num_cpus,
                resources=dict(self._workers.resources) or None,
                label_selector=dict(self._workers.labels) or None,
            )
        return dataset

    def _deliver(self, wave: _Wave, table: pa.Table) -> None:
        with self._changed:
            wave.delivered = True
            for made in units_of(table):
                unit = made.unit
                good = isinstance(unit, TokenisedUnit) and unit.error is None
                last = unit.last if good and isinstance(unit, TokenisedUnit) else None
                front = self._fronts[unit.source]
                wave.skipped_bytes += made.skipped_bytes
                self._skipped_bytes += made.skipped_bytes
                if not front.take(unit.epoch, unit.group, unit.unit, last):
                    self._again += 1
                    continue
                self._results.append(unit)
                self._units += 1
                self._progress, self._lives = time.monotonic(), _LIVES
                if isinstance(unit, TokenisedUnit):
                    wave.text_bytes += unit.text_bytes
                    self._text_bytes += unit.text_bytes
                if not front.waiting:
                    self._draining.discard(front.source)
            self._post()
            self._changed.notify_all()

    # ---- the end

    def stop(self) -> None:
        """Tell everything to end, and wait for nothing."""
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._results.clear()
            self._changed.notify_all()
        self._mailboxes[-1].close.remote()

    def close(self) -> None:
        """End everything, and wait for it."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._left:
                return
            self._left = True
        self.stop()
        if self._supervisor.ident is not None:
            self._supervisor.join(CLOSE_S)
        end = time.monotonic() + CLOSE_S
        for wave in self._waves:
            if self._error is not None:
                _shut_down(wave)  # it may wait for room, and would not end by itself
            if wave.thread is not None:
                wave.thread.join(max(0.1, end - time.monotonic()))
                if wave.thread.is_alive():
                    _shut_down(wave)
                    wave.thread.join(CLOSE_S)
        for mailbox in self._mailboxes:
            ray.kill(mailbox)
        self._cluster.leave()


def _is_ours(error: Exception | None) -> bool:
    """Whether a task raised it, as it would again; and not because a process or node went away under it."""
    cause = getattr(error, "cause", None)
    return isinstance(error, ray.exceptions.RayTaskError) and not isinstance(cause, ray.exceptions.RayError)


def _shut_down(wave: _Wave) -> None:
    if wave.executor is not None:
        wave.executor.shutdown(force=True, exception=RunnerError("the wave was given up"))


class RayRunner(Runner):
    """Makes units on a Ray cluster.

    Args:
        workers: how many, and what each takes.
        stall_s: seconds without a unit after which an execution is given up and opened again.
        address: of a cluster ("host:port"); None for the one that this process is connected to, else for one of its own.
    """

    reads_ahead = True

    def __init__(self, workers: WorkersSpec, stall_s: float, address: str | None = None) -> None:
        self._workers, self._stall_s, self._address = workers, stall_s, address
        self._core: _Core | None = None
        self._closed = False

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        self._refuse_fork()
        refuse_start(self._core is not None, self._closed)
        cluster = connect(self._address, self._workers)
        try:
            core = _Core(job, positions, self._workers, self._stall_s, cluster)
        except BaseException:
            cluster.leave()
            raise
        self._pid, self._core = os.getpid(), core
        weakref.finalize(self, core.close)
        core.start()

    def allow(self, source: int, windows: int) -> None:
        self._started().allow(source, windows)

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        return self._started().take(timeout_s)

    def close(self) -> None:
        self._closed = True
        if self._core is not None:
            self._core.close()

    def stats(self) -> RunnerStats:
        self._refuse_fork()
        return RunnerStats(units=0, text_bytes=0, skipped_bytes=0, retries=0, workers=0) if self._core is None else self._core.stats()

    def _started(self) -> _Core:
        self._refuse_fork()
        if self._core is None:
            raise not_started()
        return self._core
