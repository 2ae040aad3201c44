"""Waves: bounded executions of Ray Data whose tasks read and tokenise.

A wave is a few endless-looking read tasks, each of which owns some slots of every source. What they may make comes as
entries from a mailbox, so that credit, not backpressure, bounds memory. To *cut* a wave is to close its entries: its tasks
make what was granted and end. When waves are cut and replaced is the runner's affair (`ray_runner`).

The only module that imports ray.data, beside `ray_lean`. Why so: `docs/decisions/0004-what-runs-where.md`.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data import DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from zephon_ray.cache import Tokeniser, open_tokeniser
from zephon_ray.errors import RunnerError, ZephonError
from zephon_ray.recipe import WorkersSpec
from zephon_ray.runners import ray_lean
from zephon_ray.runners.base import Job
from zephon_ray.runners.ray_worker import NAME, TITLE, Entry, units_of
from zephon_ray.runners.ray_worker import blocks as made_blocks
from zephon_ray.runners.worker import Effort

_CONTEXT = threading.Lock()
"""Ray Data's context is one for the process: whoever sets it to make a dataset holds this."""

_TOKENISERS: dict[str, Tokeniser] = {}

LEND_AFTER_S = 2.0
"""Seconds without credit after which a worker's CPU is anyone's."""

Given = tuple[Any, Effort]
"""A unit, or what stands for one, or a `FailedUnit`; and what it took."""

Read = Callable[[Any], Sequence[Given]]
"""Says what a block holds, given a reference to it. It is called in the threads of waves. What it raises of ours ends the stream."""


def fetch(block: Any) -> Sequence[Given]:
    """The units themselves: the block is brought into this process."""
    return [(made.unit, made.effort) for made in units_of(ray.get(block))]


# How read tasks are told not to be retried has no named parameter in Ray 2.60, and the unnamed way warns.
warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated", module=__name__.replace(".", r"\."))


ray_lean.install()


class _NotOurs(logging.Filter):
    """Ray Data logs that an execution of ours died. That is looked after, and is said by the runner."""

    def filter(self, record: logging.LogRecord) -> bool:
        return TITLE not in record.getMessage()


logging.getLogger("ray.data._internal.execution.streaming_executor_state").addFilter(_NotOurs())


class _Slots(Datasource):
    """The read tasks of a wave."""

    def __init__(self, job: ray.ObjectRef[Job], mailbox: Any, wave: int, tasks: int) -> None:
        self._read = [_reader(job, mailbox, wave, task, tasks) for task in range(tasks)]

    def get_name(self) -> str:
        return NAME

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
            tokeniser = _TOKENISERS[job.hex()] = open_tokeniser(made.options)
        yield from made_blocks(made, tokeniser, task, tasks, lambda number: _entry(mailbox.entry.remote(wave, task, number)))

    return read


def _entry(asked: Any) -> Entry | None:
    """Wait for it. Who waits in `ray.get` lends its CPU to whatever the cluster has waiting, which is right where credit is long in coming.

    Where it comes at once, what tells an autoscaler that workers are wanted would find room in every such moment (`ray_demand`).
    """
    try:
        posted: bytes | None = asked.future().result(LEND_AFTER_S)
    except TimeoutError:
        posted = ray.get(asked)
    return None if posted is None else pickle.loads(posted)  # noqa: S301  our own runner's


class Wave:
    """One execution, and the thread that takes its blocks.

    Args:
        job: reference to what is worked on.
        mailbox: the actor that holds its entries.
        number: of the wave, among those of one mailbox.
        tasks: read tasks, at least 1.
        workers: what each of them takes.
        read: says what a block holds.
        deliver: called with what a block holds, in the wave's thread.
        over: called once when the wave has ended, in the wave's thread.

    Attributes:
        began: when it was made, in seconds of the monotonic clock.
        entries: posted so far.
        cut: there will be no more.
        given_up: nothing is expected of it.
        ended, error: it is over, and what of.
        delivered: a block came.
        started: tasks that are at work, as far as is known.
        met: the sources that it was granted windows of.
        blocks: that came.
        text_bytes, skipped_bytes: of the units that it gave, counted by `deliver`.
    """

    def __init__(
        self,
        job: ray.ObjectRef[Job],
        mailbox: Any,
        number: int,
        tasks: int,
        workers: WorkersSpec,
        read: Read,
        deliver: Callable[[Wave, Sequence[Given]], None],
        over: Callable[[], None],
    ) -> None:
        self.tasks, self.entries, self.blocks = tasks, 0, 0
        self.began = time.monotonic()
        self.cut = self.given_up = self.ended = self.delivered = False
        self.error: Exception | None = None
        self.met: set[int] = set()
        self.text_bytes = self.skipped_bytes = self.started = 0
        self._asked: Any = None
        self.number, self._mailbox = number, mailbox
        self._workers, self._read, self._deliver, self._over = workers, read, deliver, over
        self._job: Any = job
        self._executor: Any = None
        self._thread = threading.Thread(target=self._pump, name=f"zephon-ray-wave-{number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, entry: Entry) -> None:
        """Grant it what an entry says."""
        self._mailbox.post.remote(self.number, self.entries, pickle.dumps(entry))
        self.entries += 1

    def close_entries(self) -> None:
        """Cut it: its tasks make what was granted and end."""
        self.cut = True
        self._mailbox.end.remote(self.number, self.entries)

    def look(self) -> bool:
        """Ask how many tasks have started, and take the answer to the question before; whether more have. Waits for nothing."""
        if self.started == self.tasks:
            return False
        before = self.started
        if self._asked is not None:
            if not ray.wait([self._asked], timeout=0)[0]:
                return False
            with suppress(ray.exceptions.RayError):  # the mailbox died; so will the wave
                self.started = ray.get(self._asked)
        self._asked = self._mailbox.started.remote(self.number)
        return self.started > before

    def shut_down(self, *, force: bool = True) -> None:
        """End it from outside; again does it again, for it may not have begun before.

        Args:
            force: kill the processes of its tasks, which may hang. If not, tasks end by themselves, and their processes are used again.
        """
        self.cut = self.given_up = True
        self._end_execution(force=force)

    def _end_execution(self, *, force: bool) -> None:
        if (executor := self._executor) is not None:
            executor.shutdown(force=force, exception=RunnerError("the wave was given up"))

    def join(self, timeout_s: float) -> bool:
        """Wait until it is over; whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _pump(self) -> None:
        try:
            dataset = self._dataset()
            self._executor = dataset._create_executor()
            for bundle in dataset._build_bundle_iterator(self._executor):
                blocks = deque(bundle.block_refs)
                del bundle  # nor any other name holds a block while the next is waited for
                while blocks:
                    if self.given_up:
                        return
                    self._take(blocks.popleft())
        except Exception as error:  # noqa: BLE001  looked after by the runner
            self.error = error
        finally:
            if self.given_up or self.error is not None:  # what failed may be the reading of a block, and the execution goes on
                self._end_execution(force=True)
            self._executor = self._job = None  # it holds blocks that were not taken
            self.ended = True
            self._over()
            self._mailbox.forget.remote(self.number)

    def _take(self, block: Any) -> None:
        given = self._read(block)
        self.delivered = True
        self.blocks += 1
        self._deliver(self, given)

    def _dataset(self) -> ray.data.Dataset:
        context = DataContext.get_current().copy()
        context.target_max_block_size = 1  # what a task yields is a block, and is passed on at once
        context.enable_progress_bars = False
        # Ray Data would ask the autoscaler for twice what busy tasks have, again and again, and those that wait for credit look busy.
        cpus = (self.tasks + 0.5) * self._workers.num_cpus
        context.execution_options.resource_limits = ray.data.ExecutionResources.for_limits(cpu=cpus)
        with _CONTEXT, DataContext.current(context):
            dataset: ray.data.Dataset = ray.data.read_datasource(
                _Slots(self._job, self._mailbox, self.number, self.tasks),
                override_num_blocks=self.tasks,
                num_cpus=self._workers.num_cpus,
                resources=dict(self._workers.resources) or None,
                label_selector=dict(self._workers.labels) or None,
                **_NOT_AGAIN,
            )
        return dataset


# A task that Ray ran again would make all that its wave made so far; the runner goes on at its fronts instead.
_NOT_AGAIN: dict[str, Any] = (
    {"max_retries": 0}
    if "max_retries" in inspect.signature(ray.data.read_datasource).parameters
    else {"ray_remote_args": {"max_retries": 0}}
)


_NOT_INSTALLED = f"No module named '{__name__.partition('.')[0]}'"


def fault_of_ours(error: Exception | None) -> Exception | None:
    """What a task of ours raised, and would raise again, or the reading of a block; None where a process or node went away under it."""
    if isinstance(error, ZephonError):
        return error
    if isinstance(error, ray.exceptions.RayError) and _NOT_INSTALLED in str(error):
        return RunnerError(
            "the cluster's nodes do not have zephon_ray, so no worker can read a unit. Install it there (infra/Dockerfile), or submit a job"
            " from a checkout, which takes it along (jobs/README.md)"
        )
    cause = getattr(error, "cause", None)
    if not isinstance(error, ray.exceptions.RayTaskError) or isinstance(cause, ray.exceptions.RayError):
        return None
    return cause if isinstance(cause, Exception) else error
