"""The Ray runner: it opens, cuts and replaces waves (`ray_data`), and takes each unit that they give once.

A wave is cut whenever enough was made, the cluster grew or shrank, or its workers are too many or too few. The next one is
launched at that moment, or takes the workers of the one before over. An execution that stands still or died is shut down
first; the next begins where the units have come to. Why so: `docs/decisions/0004-what-runs-where.md`.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import ray

from zephon_ray.errors import RunnerError, ZephonError
from zephon_ray.plan.windows import Position, UnitTask
from zephon_ray.recipe import WorkersSpec
from zephon_ray.runners.base import FailedUnit, Job, Runner, RunnerStats, name_of, not_started, nothing_left, refuse_start
from zephon_ray.runners.fronts import SourceFront
from zephon_ray.runners.load import Load
from zephon_ray.runners.ray_cluster import Cluster, connect, one_line
from zephon_ray.runners.ray_data import Given, Read, Wave, fault_of_ours, fetch
from zephon_ray.runners.ray_demand import Demand
from zephon_ray.runners.ray_mailbox import Mailbox
from zephon_ray.runners.ray_worker import Entry
from zephon_ray.stages.engines import let_go
from zephon_ray.stages.unit import TokenisedUnit

TURN_BYTES, TURN_S = 32 << 20, 20.0
"""Text a task makes, and seconds (a third of the watchdog's limit, if that is less), after both of which a wave is cut: others may want
its CPUs. What was granted before the cut comes on top."""
WAVE_BLOCKS = 4000
"""Blocks after which a wave is cut. Ray keeps some KB of each until then."""
HAND_OVER_S = 3.0
"""Seconds that the workers of a wave which made enough may take to end before the next begins beside them. Begun behind them it gets their
processes, whose tokenizers know what is frequent in the data."""

TICK_S = 0.25
CLOSE_S = 10.0
START_S = 10.0
"""Seconds that a first unit may take, where the watchdog's limit is shorter: processes start in this time."""
STALLS = 3
"""The limit, that many times without a unit, ends the stream with an error."""
DEATHS = 8
"""So many executions that die without a unit between them do, too."""
NARROW_S = 5.0
"""Seconds after which a wave of which only some tasks started is replaced by one of as many tasks: others work beside us."""
_NARROW_FOR_S = 60.0
NARROW = "other work on the cluster leaves room for some of its workers only"
DEMAND_S = 15.0
"""Seconds for which more room is asked for after the taker was hungry last: waves are cut meanwhile, and then little is known."""
_WARN_S = 5.0

_log = logging.getLogger(__name__)


class _Core:
    """The runner's threads and what they share, under one lock. It does not know its runner: one that was forgotten is collected."""

    def __init__(self, job: Job, positions: Sequence[Position], workers: WorkersSpec, stall_s: float, cluster: Cluster, read: Read) -> None:
        self._job, self._workers, self._stall_s, self._cluster, self._read = job, workers, stall_s, cluster, read
        self._fronts = [SourceFront(job.recipe, m, p) for m, p in zip(job.manifests, positions, strict=True)]
        self._allowed = [0] * len(self._fronts)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._results: deque[Any] = deque()
        self._waves: list[Wave] = []
        self._launched = 0
        self._next: tuple[int, float] | None = None
        """Tasks of the wave to be launched, and when at the latest."""
        self._draining: set[int] = set()
        self._units = self._text_bytes = self._skipped_bytes = self._again = 0
        self._remade = self._cached = self._written = self._corrupt = 0
        self._load = Load(time.monotonic())
        self._progress = self._opened = time.monotonic()
        self._deaths = self._reopened = 0
        self._most, self._most_until = workers.max, 0.0
        self._demand, self._hungry_until = Demand(workers), 0.0
        self._warned = False
        self._error: Exception | None = None
        self._closed = False
        self._pid = os.getpid()
        self._job_ref: Any = ray.put(job)
        self._mailboxes = [self._new_mailbox()]
        self._supervisor = threading.Thread(target=self._supervise, name="zephon-ray-supervisor", daemon=True)

    def _new_mailbox(self) -> Any:
        mailbox: Any = ray.remote(Mailbox)
        return mailbox.options(
            num_cpus=0, max_concurrency=10_000, scheduling_strategy=self._cluster.here(), enable_task_events=False
        ).remote()

    def start(self) -> None:
        with self._lock:
            self._launch(self._within_limits(self._workers.max))
        self._supervisor.start()

    # ---- the taker's side

    def allow(self, source: int, windows: int) -> None:
        with self._lock:
            if windows > self._allowed[source]:
                self._allowed[source] = windows
                if not self._waiting:
                    self._progress = time.monotonic()
                self._post()

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        with self._changed:
            self._load.taker_waits(time.monotonic())
            try:
                self._changed.wait_for(self._settled, timeout_s)
            finally:
                self._load.taker_goes_on(time.monotonic())
            if self._closed:
                raise nothing_left(closed=True)
            if self._results:
                unit: TokenisedUnit | FailedUnit = self._results.popleft()
                return unit
            awaited = self._awaited()
            if awaited is None and self._error is None:
                raise nothing_left(closed=False)
            raise self._error or RunnerError(f"no unit came within {timeout_s:g} s. {self._condition()}")

    @property
    def settled(self) -> bool:
        with self._lock:
            return self._settled()

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
                workers=self._wanted,
                remade=self._remade,
                cached=self._cached,
                written=self._written,
                corrupt=self._corrupt,
            )

    def _condition(self) -> str:
        awaited = self._awaited()
        what = f"Awaited is {name_of(awaited)}. " if awaited is not None else ""
        room = f"The cluster has room for {self._cluster.slots(self._workers)} workers of {self._workers.describe()}"
        return f"{what}{room}; look at its nodes, and whether the storage answers"

    # ---- waves; all under the lock

    @property
    def _current(self) -> Wave | None:
        return self._waves[-1] if self._waves and not self._waves[-1].cut else None

    @property
    def _wanted(self) -> int:
        """Tasks of the current wave, or of the one to be launched."""
        wave = self._current
        return wave.tasks if wave is not None else self._next[0] if self._next is not None else 0

    @property
    def _waiting(self) -> bool:
        return any(f.waiting for f in self._fronts)

    def _within_limits(self, tasks: int) -> int:
        """So many tasks, or as many as cluster, recipe and data have use for."""
        widest = self._widest()
        least = min(self._workers.min, widest)
        return max(1, min(max(tasks, least), self._most_now(time.monotonic()), widest, self._cluster.slots(self._workers)))

    def _widest(self) -> int:
        """So many tasks the data have slots for."""
        return max(len(f.starts()) for f in self._fronts)

    def _most_now(self, now: float) -> int:
        return self._most if now < self._most_until else self._workers.max

    def _launch(self, tasks: int) -> None:
        wave = Wave(self._job_ref, self._mailboxes[-1], self._launched, tasks, self._workers, self._read, self._deliver, self._wake)
        self._launched += 1
        self._next = None
        self._waves.append(wave)
        self._load.forget()
        wave.start()
        self._post()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

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
            wave.post(Entry(starts=starts, grants=tuple(grants)))

    def _cut(self, tasks: int, latest: float = 0.0) -> None:
        """End the current wave behind what it was granted. The supervisor launches the next one when it has ended, or at `latest`."""
        assert self._current is not None
        self._current.close_entries()
        self._draining |= {f.source for f in self._fronts if f.waiting}
        self._next = tasks, latest

    def _is_due(self, now: float) -> bool:
        """Whether the next wave is to be launched."""
        if self._next is None:
            return False
        return now >= self._next[1] or not self._waves or (self._waves[-1].ended and self._waves[-1].error is None)

    def _ended_in_time(self) -> bool:
        """The next wave can be launched before the supervisor looks again. Where processes die nothing is done at once."""
        return not self._deaths and self._is_due(0.0)

    # ---- the supervisor's thread

    def _supervise(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._error is not None or self._ended_in_time(), TICK_S)
                over = self._closed or self._error is not None
            if over:
                self._demand.set(0)
                return
            try:
                self._cluster.look(self._workers)  # without the lock: who closes does not wait for a head that is gone
                self._look_after(time.monotonic())
            except Exception as error:  # noqa: BLE001  raised by `take`
                with self._changed:
                    ours = isinstance(error, ZephonError)
                    self._error = error if ours else RunnerError(f"the Ray cluster cannot be used any more: {one_line(error)}")
                    self._changed.notify_all()

    def _look_after(self, now: float) -> None:
        with self._lock:
            if self._closed:  # meanwhile: `close` waits for us only so long
                return
            # One that was cut and died owes what it was granted, as any other.
            self._waves = [w for w in self._waves if not (w.ended and w.cut and (w.given_up or w.error is None))]
            self._load.tick(now, working=self._waiting)
            broken = next((w for w in self._waves if w.ended and (w.error is not None or not w.cut)), None)
            wave = self._current
            if wave is not None and wave.look():
                self._opened = now
            why = self._what_is_wrong(now, broken)
            self._ask_for_room(now)
            if why is None:
                self._fit(self._current, now)
                return
            if self._deaths and now < self._opened + min(5.0, 0.1 * 2**self._deaths):
                return  # processes that die at once are not started again at once
            self._deaths += broken is not None
        self._reopen(why, force=why is not NARROW)

    def _what_is_wrong(self, now: float, broken: Wave | None) -> str | None:
        """Why the execution must be opened again; None if it need not. Raises where that has been tried enough."""
        if broken is not None and (fault := fault_of_ours(broken.error)):
            raise fault if isinstance(fault, ZephonError) else RunnerError(f"a worker failed: {one_line(fault)}")
        room = self._cluster.slots(self._workers)
        self._warn_of_no_room(now, room)
        stood = now - max(self._progress, self._opened)
        start_s = START_S * 2**self._reopened if room and not self._delivers() else 0.0
        if broken is not None:
            why = one_line(broken.error or "it ended early")
        elif self._waiting and stood > max(self._stall_s, start_s):
            why = f"no unit came for {stood:.0f} s"
        elif self._waiting and stood > NARROW_S and self._narrow(now):
            return NARROW
        else:
            return None
        if self._waiting and now - self._progress > STALLS * (max(self._stall_s, START_S) if room else self._stall_s):
            raise RunnerError(f"no unit came for {now - self._progress:.0f} s (the last execution: {why}). {self._condition()}")
        if self._deaths >= DEATHS:
            raise RunnerError(
                f"the workers go on dying: {self._deaths} executions, no unit between them (the last: {why}). {self._condition()}"
            )
        return why

    def _narrow(self, now: float) -> bool:
        """Whether some tasks of the wave have started and others have not. If so, no more than these are wanted for a while."""
        wave = self._current
        if wave is None or not 0 < wave.started < wave.tasks:
            return False
        self._most, self._most_until = wave.started, now + _NARROW_FOR_S
        return True

    def _delivers(self) -> bool:
        return self._current is not None and self._current.delivered

    def _warn_of_no_room(self, now: float, room: int) -> None:
        if room or not self._waiting or now - self._progress < _WARN_S:
            self._warned = self._warned and not room
        elif not self._warned:
            self._warned = True
            _log.warning(
                "no node of the cluster has room for a worker of %s. The stream goes on when one joins within %.0f s",
                self._workers.describe(),
                STALLS * self._stall_s - (now - self._progress),
            )

    def _reopen(self, why: str, *, force: bool) -> None:
        """Give all waves up, and begin again where the units have come to. `force`: their processes may hang, or be dead."""
        _log.info("the Ray execution is opened again where it stopped: %s", why)
        with self._lock:
            waves, mailbox, tasks = list(self._waves), self._mailboxes[-1], self._wanted
            for wave in waves:
                wave.cut = wave.given_up = True
        mailbox.close.remote()
        for wave in waves:
            wave.shut_down(force=force)
        with self._lock:
            if self._closed:
                return
            self._mailboxes.append(self._new_mailbox())  # the one before may be what died
            for front in self._fronts:
                self._again += front.grant_again()
            self._draining.clear()
            self._opened = time.monotonic()
            self._reopened += 1
            self._launch(self._within_limits(tasks))

    def _ask_for_room(self, now: float) -> None:
        """Where the taker waits though all room is in use, let a cluster that scales by itself know how much more would be used."""
        wave = self._current
        # While a stream starts, everyone waits; and room that is meant for tasks of ours would be found by those that only ask for room.
        if self._load.hungry and wave is not None and wave.delivered and wave.started == wave.tasks:
            self._hungry_until = now + DEMAND_S
        wanted = 0
        if now < self._hungry_until:
            room = min(self._cluster.slots(self._workers), self._most_now(now))
            wanted = min(self._workers.max, self._widest()) - max(1, room)  # a wave of one waits where there is no room at all
        self._demand.set(max(0, wanted))

    def _fit(self, wave: Wave | None, now: float) -> None:
        """Cut the wave if it has made enough, or should have more or fewer workers. Launch the next if it is time."""
        if wave is not None:
            self._cut_if_due(wave, now)
        if self._next is not None and self._is_due(now):
            if not self._waiting:  # who waited for the wave did not wait for a unit
                self._progress = now
            self._launch(self._within_limits(self._next[0]))

    def _cut_if_due(self, wave: Wave, now: float) -> None:
        tasks = self._within_limits(wave.tasks)
        if self._load.hungry:
            tasks = self._within_limits(self._workers.max)
        elif self._load.working_share is not None and self._load.working_share < 0.3:
            tasks = self._within_limits(math.ceil(wave.tasks * self._load.working_share / 0.6))
        turn = wave.text_bytes >= TURN_BYTES * wave.tasks and now - wave.began >= min(TURN_S, self._stall_s / 3)
        if tasks != wave.tasks:
            self._cut(tasks)
        elif (turn or wave.blocks >= WAVE_BLOCKS) and wave.text_bytes >= wave.skipped_bytes:
            self._cut(tasks, now + HAND_OVER_S)

    # ---- a wave's thread

    def _deliver(self, wave: Wave, given: Sequence[Given]) -> None:
        with self._changed:
            for unit, effort in given:
                failed = isinstance(unit, FailedUnit)
                last = None if failed or unit.error is not None else unit.last
                front = self._fronts[unit.source]
                wave.skipped_bytes += effort.skipped_bytes
                self._skipped_bytes += effort.skipped_bytes
                self._remade += effort.remade
                self._written += effort.written
                self._corrupt += effort.corrupt
                if not front.take(unit.epoch, unit.group, unit.unit, last):
                    self._again += 1
                    continue
                self._results.append(unit)
                self._units += 1
                self._cached += effort.cached
                self._progress, self._deaths, self._reopened = time.monotonic(), 0, 0
                if not failed:
                    wave.text_bytes += unit.text_bytes
                    self._text_bytes += unit.text_bytes
                if not front.waiting:
                    self._draining.discard(front.source)
            self._post()
            self._changed.notify_all()

    # ---- the end

    def close(self) -> None:
        """End everything, and wait for it."""
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._results.clear()
            self._changed.notify_all()
        self._mailboxes[-1].close.remote()
        if self._supervisor.ident is not None:
            self._supervisor.join(CLOSE_S)
        end = time.monotonic() + CLOSE_S
        for wave in self._waves:
            if self._error is not None:
                wave.shut_down()  # it may wait for room, and would not end by itself
            if not wave.join(max(0.1, end - time.monotonic())):
                wave.shut_down()
                wave.join(CLOSE_S)
        for mailbox in self._mailboxes:
            ray.kill(mailbox)
        self._job_ref = None  # we are in a cycle, which would keep it until some later collection
        self._cluster.leave()
        if ray.is_initialized():  # others use it: what Ray Data has of ours, it has in cycles, with blocks that were not taken
            gc.collect()


class RayRunner(Runner):
    """Makes units on a Ray cluster.

    Args:
        workers: how many, and what each takes.
        stall_s: seconds without a unit after which an execution is given up and opened again. Where none comes for three times as
            long, and for no less than 30 s if a node has room for a worker, the stream ends with an error.
        address: of a cluster ("host:port"); None for the one that this process is connected to, else for one of its own.
        read: says what a block holds; by default its units, brought into this process. `take` gives what it gives.
    """

    reads_ahead = True

    def __init__(self, workers: WorkersSpec, stall_s: float, address: str | None = None, read: Read = fetch) -> None:
        self._workers, self._stall_s, self._address, self._read = workers, stall_s, address, read
        self._core: _Core | None = None
        self._closed = False

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        self._refuse_fork()
        refuse_start(self._core is not None, self._closed)
        cluster = connect(self._address)
        try:
            core = _Core(job, positions, self._workers, self._stall_s, cluster, self._read)
        except BaseException:
            cluster.leave()
            raise
        self._pid, self._core = os.getpid(), core
        weakref.finalize(self, core.close)
        core.start()
        let_go()

    def allow(self, source: int, windows: int) -> None:
        self._started().allow(source, windows)

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        return self._started().take(timeout_s)

    @property
    def would_wait(self) -> bool:
        """`take` would have to wait for a unit."""
        return not self._started().settled

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
