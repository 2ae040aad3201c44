"""The runners of one machine: in the call itself, in threads, in processes."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from zephon_ray.errors import RunnerError
from zephon_ray.plan.windows import Position
from zephon_ray.runners.base import FailedUnit, Job, Runner, RunnerStats, name_of, not_started, nothing_left, refuse_start
from zephon_ray.runners.makers import InChild, Interrupted, InThread, Maker
from zephon_ray.runners.schedule import Schedule, Work
from zephon_ray.runners.worker import Made
from zephon_ray.stages.engines import let_go
from zephon_ray.stages.unit import TokenisedUnit

CLOSE_S = 60.0
"""How long `close` waits for units in the making."""

_log = logging.getLogger(__name__)


class _Tally:
    """Counts what was made."""

    def __init__(self) -> None:
        self.units = self.text_bytes = self.skipped_bytes = self.retries = 0
        self.remade = self.cached = self.written = self.corrupt = 0

    def add(self, made: Made) -> None:
        if isinstance(made.unit, TokenisedUnit):
            self.units += 1
            self.text_bytes += made.unit.text_bytes
        self.skipped_bytes += made.effort.skipped_bytes
        self.cached += made.effort.cached
        self.written += made.effort.written
        self.corrupt += made.effort.corrupt
        self.retries += made.retries
        self.remade += made.effort.remade

    def stats(self, workers: int) -> RunnerStats:
        return RunnerStats(
            units=self.units,
            text_bytes=self.text_bytes,
            skipped_bytes=self.skipped_bytes,
            retries=self.retries,
            workers=workers,
            remade=self.remade,
            cached=self.cached,
            written=self.written,
            corrupt=self.corrupt,
        )


def _last(made: Made) -> bool | None:
    """Whether the unit is its group's last; None where nothing after it will be needed."""
    return made.unit.last if isinstance(made.unit, TokenisedUnit) and made.unit.error is None else None


class InlineRunner(Runner):
    """Makes a unit when it is asked for one, in the caller's thread. For tests, and for a debugger."""

    reads_ahead = False

    def __init__(self) -> None:
        self._schedule: Schedule | None = None
        self._maker: InThread | None = None
        self._work: Work | None = None
        self._tally = _Tally()
        self._closed = False

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        self._refuse_fork()
        refuse_start(self._schedule is not None, self._closed)
        self._schedule = Schedule(job.recipe, job.manifests, positions, 1)
        self._maker = InThread(job.options)
        self._pid = os.getpid()

    def allow(self, source: int, windows: int) -> None:
        self._refuse_fork()
        self._started().allow(source, windows)

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        self._refuse_fork()
        schedule = self._started()
        # A call that was interrupted, by Ctrl-C say, has left its unit here.
        self._work = self._work or schedule.next(0)
        if self._closed or self._work is None or self._maker is None:
            raise nothing_left(self._closed)
        made = self._maker.make(self._work.task)
        schedule.made(self._work, _last(made))
        self._work = None
        self._tally.add(made)
        return made.unit

    def close(self) -> None:
        self._closed = True
        if self._maker is not None and self._pid == os.getpid():
            self._maker.close()

    def stats(self) -> RunnerStats:
        self._refuse_fork()
        return self._tally.stats(1)

    def _started(self) -> Schedule:
        if self._schedule is None:
            raise not_started()
        return self._schedule


class _Crew:
    """Worker threads and what they share. It does not know its runner, so that one that was forgotten is collected.

    Where `lent`, worker 0 has no thread: the one who takes is it. What a thread makes for another that waits for it costs a fifth
    to two fifths more than what it makes for itself: both wait for the interpreter, and for caches that the other filled.

    Every field is read and changed under one lock. It is reentrant: a collected runner may stop its crew at any moment,
    inside any other method.
    """

    def __init__(self, schedule: Schedule, makers: Sequence[Maker], name: str, *, lent: bool) -> None:
        lock = threading.RLock()
        self._for_workers = threading.Condition(lock)
        self._for_taker = threading.Condition(lock)
        self._schedule = schedule
        self._makers = makers
        self._lent, self._taker = lent, 0
        self._results: deque[TokenisedUnit | FailedUnit] = deque()
        self._busy: dict[int, tuple[Work, float]] = {}
        self._tally = _Tally()
        self._error: Exception | None = None
        self._closed = False
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"zephon-{name}-{worker}", daemon=True)
            for worker in range(lent, len(makers))
        ]

    def start(self) -> None:
        # Threads that are left when the interpreter ends would come back from native code into nothing.
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def allow(self, source: int, windows: int) -> None:
        with self._for_workers:
            self._schedule.allow(source, windows)
            self._for_workers.notify_all()
            self._for_taker.notify()

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        end = time.monotonic() + timeout_s
        while True:
            with self._for_taker:
                self._for_taker.wait_for(lambda: self._settled() or self._may_make(), end - time.monotonic())
                if self._closed:
                    raise nothing_left(closed=True)
                if self._results:
                    return self._results.popleft()
                if self._error is not None:
                    raise self._error
                if not self._schedule.unmade:
                    raise nothing_left(closed=False)
                if not self._may_make():
                    raise RunnerError(self._overdue(timeout_s))
            self.make_ahead()

    def _settled(self) -> bool:
        return bool(self._results) or self._closed or self._error is not None or not self._schedule.unmade

    def _may_make(self) -> bool:
        """The taker is a worker, and has something to make."""
        return self._lent and self._schedule.has_work(0)

    def make_ahead(self) -> bool:
        """Make one unit, in the thread that takes, if that is a worker; False where there is none for it."""
        with self._for_workers:
            work = self._begin(0) if self._lent else None
            self._taker = threading.get_ident()
        if work is None:
            return False
        maker = self._makers[0]
        try:
            self._deliver(0, work, maker.make(work.task))
        except Exception as error:  # noqa: BLE001  raised by `take`
            self._fail(error)
        finally:
            with self._for_workers:
                self._busy.pop(0, None)
                if self._closed:
                    maker.close()
                    self._for_workers.notify_all()
        return True

    def stuck(self, limit_s: float) -> RunnerError | None:
        with self._for_workers:
            busy = self._busy.get(0) if self._lent else None
            waited = time.monotonic() - busy[1] if busy else 0.0
            return RunnerError(self._overdue(waited)) if waited > limit_s else None

    def _overdue(self, timeout_s: float) -> str:
        now = time.monotonic()
        making = sorted(self._busy.values(), key=lambda busy: busy[1])
        longest = f", the longest for {now - making[0][1]:.1f} s: {name_of(making[0][0].task)}" if making else ""
        return (
            f"no unit came within {timeout_s:g} s. Awaited are {self._schedule.unmade}, of which {len(making)} are in the making{longest}."
            " Look whether the storage answers and the workers have a CPU"
        )

    def stats(self) -> RunnerStats:
        with self._for_workers:
            return self._tally.stats(len(self._makers))

    def stop(self) -> None:
        """Tell all threads to end, and wait for none."""
        if self._pid != os.getpid():
            return  # a forked child has none of the threads, and the processes are not its own
        with self._for_workers:
            self._closed = True
            self._results.clear()
            self._for_workers.notify_all()
            self._for_taker.notify_all()
        for maker in self._makers:
            maker.interrupt()
        atexit.unregister(self.close)

    def close(self) -> None:
        """The same, and wait for them."""
        self.stop()
        if self._pid != os.getpid():
            return
        end = time.monotonic() + CLOSE_S
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, end - time.monotonic()))
        if self._lent:
            with self._for_workers:
                if self._taker != threading.get_ident():
                    self._for_workers.wait_for(lambda: 0 not in self._busy, max(0.0, end - time.monotonic()))
                if 0 not in self._busy:
                    self._makers[0].close()
        late = [name_of(work.task) for work, _ in list(self._busy.values())]
        if late:
            _log.warning("closed after %g s while units are still being made, which cannot be stopped: %s", CLOSE_S, "; ".join(late))

    def _work(self, worker: int) -> None:
        """The whole life of a worker's thread."""
        maker = self._makers[worker]
        try:
            while (work := self._next(worker)) is not None:
                self._deliver(worker, work, maker.make(work.task))
        except Interrupted:
            pass
        except Exception as error:  # noqa: BLE001  raised by `take`
            self._fail(error)
        finally:
            maker.close()
            with self._for_workers:
                self._busy.pop(worker, None)

    def _next(self, worker: int) -> Work | None:
        """Wait for a unit to make; None at the end."""
        with self._for_workers:
            while not (self._closed or self._error is not None):
                if (work := self._begin(worker)) is not None:
                    return work
                self._for_workers.wait()
            return None

    def _begin(self, worker: int) -> Work | None:
        """A unit that the worker is to make now, if there is one."""
        work = None if self._closed or self._error is not None else self._schedule.next(worker)
        if work is not None:
            self._busy[worker] = work, time.monotonic()
        return work

    def _deliver(self, worker: int, work: Work, made: Made) -> None:
        with self._for_workers:
            del self._busy[worker]
            self._tally.add(made)
            if self._schedule.made(work, _last(made)):
                self._for_workers.notify_all()
            if not self._closed:
                self._results.append(made.unit)
            self._for_taker.notify()

    def _fail(self, error: Exception) -> None:
        """Nothing more can be made; what was made can still be taken."""
        with self._for_workers:
            self._error = self._error or error
            self._for_workers.notify_all()
            self._for_taker.notify_all()


class _CrewRunner(Runner):
    """Makes units ahead of the caller, with several workers.

    Args:
        workers: how many, at least 1.
    """

    reads_ahead = True
    _name: ClassVar[str]
    _maker: ClassVar[type[InThread] | type[InChild]]

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}: at least 1")
        self._workers = workers
        self._crew: _Crew | None = None
        self._closed = self._lent = False

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        self._refuse_fork()
        refuse_start(self._crew is not None, self._closed)
        schedule = Schedule(job.recipe, job.manifests, positions, self._workers)
        crew = _Crew(schedule, [self._maker(job.options) for _ in range(self._workers)], self._name, lent=self._lent)
        self._pid = os.getpid()
        self._crew = crew
        weakref.finalize(self, crew.stop).atexit = False  # at exit the crew closes itself
        try:
            crew.start()
        except BaseException:
            crew.close()
            raise

    def allow(self, source: int, windows: int) -> None:
        self._started().allow(source, windows)

    def take(self, timeout_s: float) -> TokenisedUnit | FailedUnit:
        return self._started().take(timeout_s)

    def make_ahead(self) -> bool:
        return self._started().make_ahead()

    def stuck(self, limit_s: float) -> RunnerError | None:
        return self._started().stuck(limit_s)

    def close(self) -> None:
        self._closed = True
        if self._crew is not None:
            self._crew.close()

    def stats(self) -> RunnerStats:
        self._refuse_fork()
        return _Tally().stats(self._workers) if self._crew is None else self._crew.stats()

    def _started(self) -> _Crew:
        self._refuse_fork()
        if self._crew is None:
            raise not_started()
        return self._crew


class ThreadsRunner(_CrewRunner):
    """Makes units in threads of this process. The tokenizer and the readers let go of the interpreter while they work.

    The workers are the parallelism; that of the tokenizers library would only add to the cost. It is turned off by its
    environment variable TOKENIZERS_PARALLELISM, for the whole process, unless that is set.
    """

    _name = "thread"
    _maker = InThread

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        super().start(job, positions)

    def lend(self) -> bool:
        self._lent = True
        return True


class ProcessesRunner(_CrewRunner):
    """Makes units in processes, each behind a thread that waits for it."""

    _name = "process"
    _maker = InChild

    def start(self, job: Job, positions: Sequence[Position]) -> None:
        super().start(job, positions)
        let_go()
