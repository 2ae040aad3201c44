"""Making: steps come from a production, which may be lost at any time, and go into the run's directory before anyone gets them.

The directory is the truth, a production is disposable: when it fails, another is opened behind the last step that is kept, or where
the ranks are, and what is made again must be what the ledger says. Rows outlive the production that made them. Used from one thread,
but for `interrupt`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from zephon_ray.batches import GlobalStep
from zephon_ray.errors import DifferenceError, FeedError, ReplayError, RunnerError, StorageError, UserError
from zephon_ray.feed.blocks import RowBlock
from zephon_ray.ledger import Recorded
from zephon_ray.recipe import Recipe
from zephon_ray.rundir import Readers, RunWriter
from zephon_ray.runners.base import Job, RunnerStats
from zephon_ray.state import Identity, StreamState

REOPENS = 4
"""So many productions may fail one after the other without a step."""

FAILING_S = 120.0
"""After so long without a step no further production is opened, but for the first: what fails slowly is not tried so often."""

_HISTORIES = 64
_RETRY_S = 1.0

T = TypeVar("T")
_log = logging.getLogger(__name__)


class Produced(Protocol):
    """What a production gives."""

    @property
    def step(self) -> GlobalStep:
        """The step, without rows."""

    @property
    def blocks(self) -> Sequence[RowBlock]:
        """All of its rows, in order."""


class Production(Protocol):
    """Makes steps one after the other. `close` may be called from any thread, and leaves the rows; the others from one."""

    def next_step(self) -> Produced | None:
        """The next step; None at the end of the stream."""

    def close(self) -> None:
        """End whatever it runs."""

    def stats(self) -> RunnerStats:
        """What it did so far."""


OpenProduction = Callable[[Job, Identity, StreamState | None, Recorded], Production]
"""Opens a production after a state (None: at the beginning), which compares what it reads with what was recorded."""


class ProductionLostError(Exception):
    """A production failed and is gone; another one may do better. The rows of its steps are there still."""


class States(Protocol):
    """Keeps states where all ranks can read them."""

    def put(self, state: StreamState) -> Any:
        """What stands for a state in replies."""

    def get(self, kept: Any) -> StreamState:
        """The state that it stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStep:
    """A step that can be given to ranks.

    Args:
        step: from 1.
        digest, chain: 16 bytes each.
        pairs: of each source, begun so far.
        state: what `States.put` gave.
        blocks: all rows, in order.
        nbytes: of rows and state.
    """

    step: int
    digest: bytes
    chain: bytes
    pairs: tuple[int, ...]
    state: Any
    blocks: tuple[RowBlock, ...]
    nbytes: int


class Maker:
    """Makes and records the steps of one stream.

    Args:
        job: recipe, manifests and options.
        identity: of the stream.
        writer: of its directory; closed by `close`.
        open_production: opens a production.
        states: keeps states.
        patience_s: how long a directory may refuse before that is an error.
        pause: waits for some seconds at most; False where the feed is to stop.
    """

    def __init__(
        self,
        job: Job,
        identity: Identity,
        writer: RunWriter,
        open_production: OpenProduction,
        *,
        states: States,
        patience_s: float,
        pause: Callable[[float], bool],
    ) -> None:
        self._job, self._identity, self._writer, self._open = job, identity, writer, open_production
        self._states, self._patience, self._pause = states, patience_s, pause
        self._production: Production | None = None
        self._state: StreamState | None = None
        self._placed = self._refused = False
        self._histories: dict[int, bytes] = {}
        self._before = _NOTHING
        self._failures, self._began = 0, 0.0
        self.failing: str | None = None
        """Why there was no step since, in words, where a production failed."""
        self.reopened = 0
        """How often a production failed, and another took its place."""
        self.waiting: str | None = None
        """What is waited for, in words."""

    @property
    def position(self) -> int | None:
        """The step before the next one; None where it has to be told by `rewind`."""
        if not self._placed:
            return None
        return self._state.step if self._state else 0

    def stats(self) -> RunnerStats:
        """What all productions did."""
        production = self._production
        return _sum(self._before, production.stats()) if production else self._before

    def expect(self, step: int, chain: bytes) -> None:
        """A rank says that `chain` is what step `step` ended with: it must be so when that step is made."""
        self._histories[step] = chain
        for old in list(self._histories)[:-_HISTORIES]:
            del self._histories[old]

    def rewind(self, step: int, states: Iterable[StreamState]) -> int:
        """Be ready to make steps up to `step` and those after it.

        Args:
            step: from 1.
            states: that are at hand, beside the last one that was made; the directory is looked at for a later one, unless one of
                these is just before `step`.

        Returns:
            The step before the next one that is made.
        """
        end = self._writer.last.step if self._writer.last else 0
        # The ledger has no gap: where its tail was lost, that is made again, whatever the ranks have already.
        fitting = [state for state in (*states, self._state) if state is not None and state.step <= min(step - 1, end)]
        best = max(fitting, key=lambda state: state.step, default=None)
        if best is None or best.step < min(step - 1, end):
            saved = self.patiently(lambda: self._writer.nearest(step - 1))
            if saved and (best is None or saved[0].step > best.step):
                best = saved[0]
        self.drop()
        self._state, self._placed = (best if best and best.step else None), True
        return best.step if best else 0

    def make(self) -> KeptStep | None:
        """The next step, once it is recorded; None at the end of the stream.

        Raises:
            UserError, DifferenceError: of the data or the directory; the same again whoever tries.
            StorageError: data, or for `patience_s` the directory, cannot be reached.
            RunnerError: productions go on failing.
            ProductionLostError: this one failed; `rewind` comes next.
        """
        produced = self._produced()
        if produced is None:
            return None
        step = produced.step
        expected = self._histories.get(step.step, step.chain)
        if expected != step.chain:
            raise another_history(step.step, expected)
        line, state = step.ledger_line, step.state
        self.patiently(lambda: self._writer.write(line, state))
        self._state = state
        recipe = self._job.recipe
        nbytes = 12 * recipe.global_batch_size * recipe.sequence_length + state_nbytes(state)
        return KeptStep(
            step=step.step,
            digest=step.digest,
            chain=step.chain,
            pairs=step.pairs,
            state=self._states.put(state),
            blocks=tuple(produced.blocks),
            nbytes=nbytes,
        )

    def save(self, state: StreamState) -> None:
        """Save a state that was made."""
        self.patiently(lambda: self._writer.save_state(state))

    def audit(self, event: str, **fields: Any) -> None:
        """Add to the audit trail."""
        self.patiently(lambda: self._writer.directory.audit(event, **fields))

    def readers(self) -> Readers | None:
        """The ranks that the directory says were let in last."""
        return self.patiently(self._writer.directory.readers)

    def remember(self, readers: Readers) -> None:
        """Write down which ranks were let in."""
        self.patiently(lambda: self._writer.directory.save_readers(readers))

    def patiently(self, action: Callable[[], T]) -> T:
        """Do something with the directory, again and again where it refuses for a while.

        Raises:
            StorageError: it has refused for `patience_s`.
        """
        began: float | None = None
        while True:
            try:
                if self._refused:
                    self._writer.recover()
                    self._refused = False
                done = action()
            except (StorageError, OSError) as error:
                self._refused = True
                began = began or time.monotonic()
                seconds = time.monotonic() - began
                self.waiting = f"the run's directory {self._writer.directory.url} refuses since {seconds:.0f} s: {error}"
                if seconds >= self._patience or not self._pause(min(_RETRY_S, self._patience - seconds)):
                    raise StorageError(f"{self.waiting}. Mend it, and start the ranks again: they go on where they were") from error
            else:
                self.waiting = None
                return done

    def interrupt(self) -> None:
        """Let a `make` that is under way fail soon."""
        production = self._production
        if production is not None:
            production.close()

    def drop(self) -> None:
        """Be done with the production, wherever it is; `rewind` comes next."""
        self._placed = False
        production, self._production = self._production, None
        if production is not None:
            production.close()
            self._before = _sum(self._before, production.stats())

    def close(self) -> None:
        """Save the last state, seal the ledger, end the production."""
        try:
            self._writer.close()  # before the production, which may take long to end
        finally:
            self.drop()

    def _produced(self) -> Produced | None:
        if not self._failures:
            self._began = time.monotonic()
        try:
            if self._production is None:
                recorded = self.patiently(lambda: self._writer.recorded(self._state))
                self._production = self._open(self._job, self._identity, self._state, recorded)
            produced = self._production.next_step()
        except (UserError, DifferenceError, StorageError):
            raise
        except Exception as error:  # counted in `reopened`, and raised where it lasts
            often = self._failures >= REOPENS or (self._failures and time.monotonic() - self._began > FAILING_S)
            if often or not self._pause(self._failures):
                self._failures, self.failing = 0, None  # whoever tries again, tries as often
                raise error if isinstance(error, RunnerError) else RunnerError(f"steps cannot be made: {error}") from error
            _log.warning("production failed after step %s, another one is opened: %s", self.position, error)
            self._failures += 1
            self.reopened += 1
            self.failing = f"production failed after step {self.position}, attempt {self._failures} of {REOPENS + 1}: {error}"
            with suppress(Exception):  # what failed may fail at its end too
                self.drop()
            raise ProductionLostError(str(error)) from error
        self._failures, self.failing = 0, None
        return produced


def open_maker(
    recipe: Recipe,
    prepared: tuple[Job, Identity],
    out: str,
    open_production: OpenProduction,
    *,
    states: States,
    patience_s: float,
    pause: Callable[[float], bool],
) -> Maker:
    """A maker that writes to the directory `out`, which is waited for where it refuses.

    Raises:
        RunDirectoryError, StorageError: as `RunWriter.open`.
        FeedError: the feed was stopped meanwhile.
    """
    job, identity = prepared
    began = time.monotonic()
    while True:
        try:
            writer = RunWriter.open(recipe, out, identity, job.manifests)
        except (StorageError, OSError) as error:
            if time.monotonic() - began >= patience_s:
                raise StorageError(f"the run's directory {out} cannot be opened: {error}. Mend it, and start the feed again") from error
            if not pause(_RETRY_S):
                raise FeedError("the feed was stopped") from error
        else:
            return Maker(job, identity, writer, open_production, states=states, patience_s=patience_s, pause=pause)


def another_history(step: int, chain: bytes) -> ReplayError:
    """A rank brought a state of step `step` with a chain that is not that of the step as it is made here."""
    return ReplayError(
        f"step {step}: a rank brought a state of it with the chain {chain.hex()}, which is another history than this feed's."
        " Resume from a state of this run, or give the feed a new --out"
    )


def state_nbytes(state: StreamState) -> int:
    """About what a state takes in memory."""
    arrays = [state.lanes.open_source, state.lanes.open_used]
    for source in state.lanes.sources:
        arrays += [source.dealt, source.windows, source.indices, source.counts]
    places = sum(len(source.position.places) for source in state.lanes.sources)
    return int(np.sum([array.nbytes for array in arrays])) + 16 * places


_NOTHING = RunnerStats(units=0, text_bytes=0, skipped_bytes=0, retries=0, workers=0)


def _sum(before: RunnerStats, now: RunnerStats) -> RunnerStats:
    return RunnerStats(
        units=before.units + now.units,
        text_bytes=before.text_bytes + now.text_bytes,
        skipped_bytes=before.skipped_bytes + now.skipped_bytes,
        retries=before.retries + now.retries,
        workers=now.workers,
        remade=before.remade + now.remade,
        cached=before.cached + now.cached,
        written=before.written + now.written,
        corrupt=before.corrupt + now.corrupt,
    )
