"""The loader: one data-parallel rank's rows of every global batch, and the state to go on from.

It opens nothing before it is first used, holds no rows but those read ahead, and leaves nothing behind when closed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from zephon_ray.batches import Batch
from zephon_ray.errors import StateError, UserError
from zephon_ray.recipe import Recipe, load_recipe
from zephon_ray.runners.base import RunnerStats
from zephon_ray.state import Identity
from zephon_ray.stream import Stream

STATE_KEY = "zephon_ray"
"""The one key of `state_dict()`; its value is bytes."""

State = Mapping[str, bytes] | bytes


class Loader:
    """An iterator over one rank's `Batch`es.

    Args:
        recipe: a recipe, or the path of one.
        runner: "inline", "threads", "processes" or "ray"; None for the recipe's.
        workers: how many read and tokenise; None for as many as the recipe allows and the machine or cluster has.
        address: of a Ray cluster ("host:port"), for the runner "ray"; None for one of its own, whatever RAY_ADDRESS says. A process
            that is in a cluster already stays in it.
        dp_rank: in [0, dp_world_size).
        dp_world_size: a divisor of `global_batch_size`. It may differ from that of the run that saved the state.
        state: what `state_dict` gave; None for the beginning.

    Raises:
        RecipeError: the recipe is wrong, or the data-parallel size does not fit it.
        When first used also UserError (it is closed, or was given an address and its runner has none), SourceError, StateError,
        StorageError; while iterating BadRecordError, SourceError, DataChangedError, StorageError, RunnerError.
    """

    def __init__(
        self,
        recipe: Recipe | str | os.PathLike[str],
        *,
        runner: str | None = None,
        workers: int | None = None,
        address: str | None = None,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        state: State | None = None,
    ) -> None:
        self.recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
        self.recipe.check_dp(dp_rank, dp_world_size)
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self._runner, self._workers, self._address = runner, workers, address
        self._state = None if state is None else bytes_of(state)
        self._stream: Stream | None = None
        self._closed = False
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        if self._stream is not None:
            raise TypeError("a loader in use cannot be pickled: make one there from the recipe and state_dict()")
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)
        self._lock = threading.RLock()

    def _open(self) -> Stream:
        if self._stream is None:
            if self._closed:
                raise UserError("this loader was closed before it was used. Make a new one, or give it a state with load_state_dict")
            self._stream = Stream(self.recipe, runner=self._runner, workers=self._workers, address=self._address, state=self._state)
        return self._stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        with self._lock:  # two threads may take from one loader; each batch goes to one of them
            if self._closed and self._stream is not None:
                raise StopIteration
            stream = self._open()
        batch = stream.next_batch()
        if batch is None:
            raise StopIteration
        return batch.of_rank(self.dp_rank, self.dp_world_size)

    @property
    def step(self) -> int:
        """The last step that was taken; 0 before the first."""
        return self._open().state.step

    @property
    def identity(self) -> Identity:
        """Of the stream."""
        return self._open().identity

    def state_dict(self) -> dict[str, bytes]:
        """The state after the last batch that was taken, whatever was read ahead: the same on every rank."""
        return {STATE_KEY: self._open().state_bytes()}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state instead, from the next batch on.

        Raises:
            StateError: it is no state, or (when first used) not one of this run.
        """
        loaded = bytes_of(state)
        if self._stream is not None:
            self._stream.close()
        self._stream, self._state, self._closed = None, loaded, False

    def stats(self) -> RunnerStats:
        """What the runner did since the loader was opened."""
        return self._open().stats()

    def close(self) -> None:
        """End threads and processes. The state can still be asked for."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def bytes_of(state: State) -> bytes:
    """The bytes in what `state_dict` gave.

    Raises:
        StateError: it is nothing that `state_dict` gives.
    """
    if isinstance(state, bytes):
        return state
    value = state.get(STATE_KEY) if isinstance(state, Mapping) else None
    if not isinstance(value, bytes):
        raise StateError(
            f"this is no state of zephon_ray: expected bytes, or a mapping with the key {STATE_KEY!r} and bytes, and got"
            f" {sorted(state) if isinstance(state, Mapping) else type(state).__name__}. Pass what state_dict() gave"
        )
    return value
