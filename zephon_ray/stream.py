"""A stream: the global batches of a recipe from a state on, together with the runner that makes their units.

It is what a loader is for one rank, for the whole run: runs, the demo and the feed cut its batches for all ranks.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from functools import partial

from zephon_ray.batches import GlobalBatch
from zephon_ray.collector import Collector, prepare
from zephon_ray.errors import UserError
from zephon_ray.ledger import Recorded
from zephon_ray.prefetch import Prefetch
from zephon_ray.recipe import Recipe
from zephon_ray.runners.base import Job, Runner, RunnerStats
from zephon_ray.runners.registry import idle_options, make_runner
from zephon_ray.state import Identity, from_bytes, to_bytes
from zephon_ray.supplies import WAIT_S

_log = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""How long `close` waits for the batch in the making."""


class Stream:
    """Global batches, one after the other. Close it: it may hold threads and processes.

    Args:
        recipe: checked already.
        runner: its name; None for the recipe's.
        workers: of the runner; None for as many as the recipe allows and the machine or cluster has.
        address: of a Ray cluster ("host:port"), for the runner "ray"; None for one of its own, whatever RAY_ADDRESS says. A process
            in a cluster stays in it.
        state: bytes of a state; None for the beginning.
        recorded: digests of windows that will be read again, to be compared.
        prepared: what `prepare(recipe)` gave, where the caller has it.

    Raises:
        RecipeError, SourceError, StorageError: the tokenizer or the data cannot be used.
        StateError: the state is damaged or belongs to another run.
        UserError: an address for a runner that has none.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        runner: str | None = None,
        workers: int | None = None,
        address: str | None = None,
        state: bytes | None = None,
        recorded: Recorded | None = None,
        prepared: tuple[Job, Identity] | None = None,
    ) -> None:
        name = runner_of(recipe, runner, address)
        job, self.identity = prepared or prepare(recipe)
        start = None if state is None else from_bytes(state, self.identity)
        for sentence in idle_options(recipe):
            _log.warning("%s", sentence)
        self._runner = make_runner(name, recipe, workers=workers, address=address)
        self._prefetch: Prefetch | None = None
        depth = recipe.execution.prefetch_steps if self._runner.reads_ahead else 0
        if depth:
            self._runner.lend()
        try:
            collector = Collector(job, self._runner, start, recorded)
            self.state = collector.state
            if depth:
                watch = partial(self._runner.stuck, WAIT_S)
                self._prefetch = Prefetch(collector.next_batch, depth, rest=self._runner.make_ahead, watch=watch)
        except BaseException:
            self._runner.close()
            raise
        self._next = self._prefetch.take if self._prefetch else collector.next_batch
        self._taking = threading.Lock()
        self._closer = weakref.finalize(self, _close, self._runner, self._prefetch)

    def next_batch(self) -> GlobalBatch | None:
        """The next global batch; None at the end of the stream, and once closed.

        Raises:
            BadRecordError, SourceError, DataChangedError, StorageError, RunnerError: as `Collector.next_batch`.
        """
        if not self._closer.alive:
            return None
        with self._taking:
            batch = self._next()
            if batch is not None:
                self.state = batch.state
        return batch

    def state_bytes(self) -> bytes:
        """The state after the last batch that was taken."""
        return to_bytes(self.state, self.identity)

    def stats(self) -> RunnerStats:
        """What the runner did so far."""
        return self._runner.stats()

    def close(self) -> None:
        """End threads and processes; again does nothing."""
        self._closer()


def runner_of(recipe: Recipe, runner: str | None, address: str | None) -> str:
    """The name of the runner, where it is None that of the recipe.

    Raises:
        UserError: an address is given, and the runner has none.
    """
    name = runner or recipe.execution.runner
    check_address(name, address)
    return name


def check_address(runner: str, address: str | None) -> None:
    """Refuse an address for a runner that has none.

    Raises:
        UserError: that it is so.
    """
    if address is not None and runner != "ray":
        raise UserError(f"address={address} is of a Ray cluster, and the runner is {runner!r}. Use the runner 'ray', or give no address")


def _close(runner: Runner, prefetch: Prefetch | None) -> None:
    end = time.monotonic() + _CLOSE_S
    if prefetch:
        prefetch.close()
    runner.close()
    if prefetch:
        prefetch.join(max(0.0, end - time.monotonic()))  # nothing, where the runner has waited for that thread in vain
