"""Micro-batches: a rank's rows of each step, cut to the size that its trainer computes at a time, and the state at the end of a step.

A step is *whole* once all of its micro-batches were handed out. Only then is there a state that all ranks have alike, so only then is one
given. Nothing here knows of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from zephon_ray.batches import Batch
from zephon_ray.errors import RecipeError
from zephon_ray.loader import State
from zephon_ray.recipe import Recipe
from zephon_ray.state import Identity
from zephon_ray.training.fit import rows_of_rank, size_problems

IntArray = npt.NDArray[np.int64]


class RankLoader(Protocol):
    """What gives a rank's batches: a `Loader` or a feed's loader."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def dp_world_size(self) -> int: ...
    @property
    def identity(self) -> Identity: ...
    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, bytes]: ...
    def load_state_dict(self, state: State) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """A micro-batch: b rows of T pairs, int64 as PyTorch wants indices. The arrays are copies, which keep nothing else alive.

    Args:
        input: [b, T].
        labels: [b, T]; -100 where there is nothing to learn.
        positions: [b, T], from 0, beginning again with each piece.
    """

    input: IntArray
    labels: IntArray
    positions: IntArray


class MicroBatches:
    """An iterator over a rank's micro-batches. Nothing is opened before the first is taken.

    Args:
        loader: of the rank.
        size: rows of a micro-batch; None for all rows of the rank.

    Raises:
        RecipeError: when first used, the size does not divide the rank's rows. Lists those that do.
    """

    def __init__(self, loader: RankLoader, size: int | None = None) -> None:
        self._loader, self._wanted = loader, size
        self._taken = 0
        """Rows of this rank that were handed out since it began, or since a state was loaded."""
        self._rows: Rows | None = None
        """Those of the step in hand, while some are left."""

    @cached_property
    def _rows_a_step(self) -> int:
        return rows_of_rank(self._loader.recipe, self._loader.dp_world_size)

    @cached_property
    def _size(self) -> int:
        if self._wanted is None:
            return self._rows_a_step
        problems = size_problems(self._loader.recipe, self._loader.dp_world_size, self._wanted)
        if problems:
            raise RecipeError(problems)
        return self._wanted

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Rows:
        size, at = self._size, self._taken % self._rows_a_step
        rows = _widened(next(self._loader)) if self._rows is None else self._rows
        self._taken += size
        self._rows = rows if self._taken % self._rows_a_step else None
        mine = slice(at, at + size)
        return Rows(input=rows.input[mine], labels=rows.labels[mine], positions=rows.positions[mine])

    def state_dict(self, trainer_steps: int | None = None) -> dict[str, bytes]:
        """The state after the last step, which must have been handed out whole; whatever was read ahead, the same on every rank.

        Args:
            trainer_steps: steps that the trainer says to have made with what was handed out; None where it says nothing.

        Raises:
            RecipeError: it does not train on `global_batch_size` rows a step. Names both numbers.
        """
        if self._taken:
            self._check_steps(trainer_steps)
        return self._loader.state_dict()

    def _check_steps(self, trainer_steps: int | None) -> None:
        steps, rest = divmod(self._taken, self._rows_a_step)
        if not rest and trainer_steps in (None, steps):
            return
        recipe, R = self._loader.recipe, self._loader.dp_world_size
        B, rows = recipe.global_batch_size, self._taken * R
        told = f" in {trainer_steps} steps, {rows / trainer_steps:g} a step" if trainer_steps else ""
        problem = (
            f"the trainer has taken {rows} rows over all ranks{told}, and a step of recipe {recipe.name!r} has global_batch_size={B}"
            f" rows: that is {self._taken / self._rows_a_step:g} steps. A state after them would not be one of this trainer's steps."
            f" Set the trainer's global batch size to {B}, {self._rows_a_step} rows on each of {R} ranks, or begin a new run with a"
            " recipe that has the trainer's"
        )
        raise RecipeError([problem])

    def load_state_dict(self, state: State) -> None:
        """Go on from a state instead, from the next micro-batch on.

        Raises:
            StateError: it is no state, or (when first used) not one of this run.
        """
        self._loader.load_state_dict(state)
        self._taken, self._rows = 0, None

    def close(self) -> None:
        """End what the loader has started. The state can still be asked for."""
        self._loader.close()


def _widened(batch: Batch) -> Rows:
    """Copies in int64; the batch, perhaps a view of the object store, is not needed any more."""
    return Rows(
        input=batch.inputs.astype(np.int64), labels=batch.labels.astype(np.int64), positions=batch.positions.astype(np.int64)
    )  # fmt: skip
