"""Runs: a stream written down in a run's directory, gone on with, and verified.

A run is made of steps; its directory holds what each of them was. Nothing here prints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace

from zephon_ray.batches import GlobalBatch, fold, row_digests
from zephon_ray.collector import prepare
from zephon_ray.errors import ReplayError, RunDirectoryError, RunnerError, UserError
from zephon_ray.ledger import LedgerLine, differing_fields
from zephon_ray.ledger.line import NO_CHAIN, describe
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_fields import StorageSpec
from zephon_ray.rundir import RunDirectory, RunWriter, recorded_since
from zephon_ray.runners.base import RunnerStats
from zephon_ray.state import from_bytes
from zephon_ray.storage import Storage
from zephon_ray.stream import Stream, runner_of
from zephon_ray.telemetry import CpuMeter

LAST_STEP_S = 5.0
"""How long a run that is to stop waits for the step in hand."""

_WATCH_S = 0.2

OnStep = Callable[[GlobalBatch], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What `produce` did.

    Args:
        first_step: the first new step; `last_step + 1` where there was none to make.
        last_step: the run's last step; 0 where it has none.
        ended: the stream has no further step.
        digest: of the last global batch, 32 hex digits ("" at step 0).
        chain: 32 hex digits.
        pairs: of each source, pairs begun since the run began.
        made_pairs: of each source, by the new steps.
        padding: padding pairs of the new steps.
        seconds, cpu_seconds: wall clock, and CPU of this process and of those that it started, workers among them.
        cpu_elsewhere: units were made on a cluster that was joined, whose CPU is not in `cpu_seconds`.
        stats: the runner's; None where nothing was to be made.
    """

    first_step: int
    last_step: int
    ended: bool
    digest: str
    chain: str
    pairs: tuple[int, ...]
    made_pairs: tuple[int, ...]
    padding: int
    seconds: float
    cpu_seconds: float
    cpu_elsewhere: bool
    stats: RunnerStats | None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifySummary:
    """What `verify` compared: steps first_step..last_step, `steps` of them equal, in `seconds`."""

    first_step: int
    last_step: int
    steps: int
    seconds: float


def produce(
    recipe: Recipe,
    *,
    steps: int,
    out: str | None = None,
    runner: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    dp_size: int = 1,
    on_step: OnStep | None = None,
    stop: Callable[[], bool] | None = None,
) -> RunSummary:
    """Produce global batches up to and including step `steps`, and write them down.

    Args:
        recipe: what to run.
        steps: at least 0.
        out: the run's directory (a path or URL); an existing one is continued. None writes nothing.
        runner: as `Stream` has it.
        workers: as `Stream` has it.
        address: as `Stream` has it.
        dp_size: for more than one, the rows of every rank are cut, hashed and folded again, and must give the batch's digest.
        on_step: called with every new step, once it is in the ledger.
        stop: asked again and again, from any thread, whether to end early. The step in hand then gets `LAST_STEP_S`.

    Raises:
        RecipeError, SourceError, StorageError, BadRecordError, DataChangedError, RunnerError: as `Stream`.
        RunDirectoryError: `out` belongs to another run or another writer.
        UserError: `dp_size`, `steps` or `address` does not fit.
        ReplayError: a step that is made again differs from the ledger, or a rank's rows from the batch.
    """
    recipe.check_dp(0, dp_size)
    runner = runner_of(recipe, runner, address)
    if steps < 0:
        raise UserError(f"steps={steps} is below 0. Give the last step to make, 0 or more")
    began, cpu = time.monotonic(), CpuMeter()
    prepared = job, identity = prepare(recipe)
    with RunWriter.open(recipe, out, identity, job.manifests) if out is not None else nullcontext() as writer:
        before = writer.ledger.last if writer else None
        made = _Made(sources=len(recipe.sources), before=before, last=before)
        if made.last_step < steps:
            state, recorded = writer.resume() if writer else (None, None)
            stream = Stream(recipe, runner=runner, workers=workers, address=address, state=state, recorded=recorded, prepared=prepared)
            with closing(stream), _stopping(stream, stop) as stopped:
                try:
                    for batch in _batches(stream, steps, stopped, made):
                        _check_ranks(batch, dp_size)
                        _note(batch, writer, on_step, made)
                        cpu.look()
                finally:
                    if writer:
                        writer.save()  # before the stream is closed, which can take long where its workers were stopped too
                made.stats = stream.stats()
                cpu.look(now=True)
    if writer:
        if made.stats and made.stats.remade:
            writer.directory.audit("engine_fault", remade=made.stats.remade)  # not the ledger's: it depends on who made which units
        writer.directory.audit("stopped", step=made.last_step, ended=made.ended)
    return made.summary(time.monotonic() - began, cpu.seconds(), cpu_elsewhere=address is not None and made.stats is not None)


@dataclass(kw_only=True, slots=True)
class _Made:
    """What `produce` has made so far.

    Args:
        sources: how many the recipe has.
        before: the step that was there already, None for none.
        last: the newest step.
    """

    sources: int
    before: LedgerLine | None
    last: LedgerLine | None
    padding: int = 0
    ended: bool = False
    stats: RunnerStats | None = None

    @property
    def last_step(self) -> int:
        return self.last.step if self.last else 0

    def summary(self, seconds: float, cpu: float, *, cpu_elsewhere: bool) -> RunSummary:
        """All of it, made in so many seconds of wall clock and of CPU."""
        nothing = (0,) * self.sources
        pairs, pairs_before = self.last.pairs if self.last else nothing, self.before.pairs if self.before else nothing
        return RunSummary(
            first_step=(self.before.step if self.before else 0) + 1,
            last_step=self.last_step,
            ended=self.ended,
            digest=self.last.digest if self.last else "",
            chain=self.last.chain if self.last else NO_CHAIN,
            pairs=pairs,
            made_pairs=tuple(now - then for now, then in zip(pairs, pairs_before, strict=True)),
            padding=self.padding,
            seconds=seconds,
            cpu_seconds=cpu,
            cpu_elsewhere=cpu_elsewhere,
            stats=self.stats,
        )


def _batches(stream: Stream, steps: int, stopped: Callable[[], bool], made: _Made) -> Iterator[GlobalBatch]:
    """Up to step `steps`, to the end of the stream, or to where it is stopped."""
    while stream.state.step < steps and not stopped():
        try:
            batch = stream.next_batch()
        except RunnerError:
            if stopped():
                return
            raise
        if batch is None:
            made.ended = not stopped()
            return
        yield batch


@contextmanager
def _stopping(stream: Stream, stop: Callable[[], bool] | None) -> Iterator[Callable[[], bool]]:
    """Gives whether to stop. When it is time, the step in hand gets some seconds more, and then the stream is closed.

    For who stops us may stop our workers too, as schedulers do with all processes of a job; then no further step comes.
    """
    if stop is None:
        yield lambda: False
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_S):
            if stop():
                if not over.wait(LAST_STEP_S):
                    stream.close()
                return

    watcher = threading.Thread(target=watch, name="zephon-stop", daemon=True)
    watcher.start()
    try:
        yield stop
    finally:
        over.set()
        watcher.join()


def _note(batch: GlobalBatch, writer: RunWriter | None, on_step: OnStep | None, made: _Made) -> None:
    line = batch.ledger_line
    if writer is None or writer.write(line, batch.state):
        made.last, made.padding = line, made.padding + batch.padding
        if on_step:
            on_step(batch)


def _check_ranks(batch: GlobalBatch, dp_size: int) -> None:
    """Fold the digest again from the arrays that the ranks are given."""
    if dp_size == 1:
        return
    digests = [digest for rank in range(dp_size) for digest in row_digests(batch.of_rank(rank, dp_size))]
    if fold(batch.step, bytes(16), digests)[0] != batch.digest:
        raise ReplayError(
            f"step {batch.step}: the rows of {dp_size} ranks, joined, do not give the digest of the global batch."
            " Memory was damaged, or this is a fault of zephon_ray: run the step again elsewhere, and report it if it stays"
        )


def verify(
    out: str,
    *,
    recipe: Recipe | None = None,
    first: int | None = None,
    last: int | None = None,
    runner: str | None = None,
    workers: int | None = None,
    address: str | None = None,
    on_step: OnStep | None = None,
) -> VerifySummary:
    """Make steps first..last again, from the nearest state, and compare every field of their ledger lines.

    The data is read and tokenised: a token cache is not asked.

    Args:
        out: the run's directory; nothing in it is changed.
        recipe: the run's, where its data or tokenizer have moved since; None for the one in the directory.
        first: from 1; None for the first step.
        last: at least `first`; None for the ledger's last step.
        runner: as `Stream` has it.
        workers: as `Stream` has it.
        address: as `Stream` has it.
        on_step: called with every step that was found equal.

    Raises:
        RunDirectoryError: `out` is no run's directory, is damaged, or does not hold the steps; or recipe, tokenizer or data
            are not the run's.
        ReplayError, DataChangedError: a step, or the text of a unit, is not what the ledger says.
    """
    began = time.monotonic()
    directory = RunDirectory.open(Storage(StorageSpec() if recipe is None else recipe.execution.storage), out)
    recipe = recipe or directory.lock.recipe
    job, identity = prepare(recipe)
    directory.verify_audit()
    directory.check_same_run(identity.fingerprint, identity.fields, job.manifests)
    ledger = directory.read_ledger()
    end = ledger.last.step if ledger.last else 0
    first, last = 1 if first is None else first, end if last is None else last
    if not (1 <= first <= last <= end):
        raise RunDirectoryError(f"{out}: steps {first}:{last} cannot be verified; the ledger holds 1:{end}. Ask for some of these")
    found = directory.states.nearest(first - 1, lambda data: from_bytes(data, identity))
    state = from_bytes(found[1], identity) if found else None
    recorded = recorded_since(ledger, state, len(recipe.sources))
    job = replace(job, options=replace(job.options, token_cache=None))  # what was kept proves nothing of the data
    stream = Stream(
        recipe, runner=runner, workers=workers, address=address, state=found[1] if found else None, recorded=recorded,
        prepared=(job, identity),
    )  # fmt: skip
    with closing(stream):
        for line in ledger.lines(stream.state.step + 1, last):
            _compare(line, stream.next_batch(), on_step)
    return VerifySummary(first_step=first, last_step=last, steps=last - first + 1, seconds=time.monotonic() - began)


def _compare(line: LedgerLine, batch: GlobalBatch | None, on_step: OnStep | None) -> None:
    if batch is None:
        raise ReplayError(
            f"step {line.step}: the ledger holds it, and the stream made again has ended before it."
            " Restore the data that the run was made from, and look whether code or libraries have changed"
        )
    if differing := differing_fields(line, batch.ledger_line):
        raise ReplayError(
            f"step {line.step} differs: {describe(differing, 'recorded', 'made now')}."
            " Look whether data, code or libraries have changed: the versions of the run stand in its recipe.lock.yaml"
        )
    if on_step:
        on_step(batch)
