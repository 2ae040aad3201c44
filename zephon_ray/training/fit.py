"""Fit: whether a recipe and a trainer want the same of a step. What does not fit is told all at once, with both values."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from zephon_ray.errors import RecipeError
from zephon_ray.recipe import Recipe
from zephon_ray.recipe_checks import divisors

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSizes:
    """What a trainer has been told to train on.

    Args:
        dp_rank: in [0, dp_world_size).
        dp_world_size: R.
        sequence_length: pairs in a row.
        local_batch_size: rows of a micro-batch of a rank.
    """

    dp_rank: int
    dp_world_size: int
    sequence_length: int
    local_batch_size: int


def check_fit(recipe: Recipe, sizes: TrainerSizes) -> None:
    """Refuse a trainer that wants rows of another length, or that cannot share them or cut them.

    Raises:
        RecipeError: lists everything that does not fit.
    """
    problems = []
    if sizes.sequence_length != recipe.sequence_length:
        problems.append(
            f"sequence_length={recipe.sequence_length} of the recipe is not the trainer's {sizes.sequence_length}."
            f" Set the trainer's (--training.seq_len) to {recipe.sequence_length}, or begin a new run with a recipe of its length"
        )
    try:
        recipe.check_dp(sizes.dp_rank, sizes.dp_world_size)
    except RecipeError as error:
        problems += error.problems
    else:
        problems += size_problems(recipe, sizes.dp_world_size, sizes.local_batch_size)
    if problems:
        raise RecipeError(problems)


def size_problems(recipe: Recipe, dp_world_size: int, size: int) -> list[str]:
    """Why a rank's rows cannot be cut into micro-batches of so many, with the sizes that are possible; empty where they can.

    Args:
        recipe: the recipe.
        dp_world_size: R, a divisor of B.
        size: rows of a micro-batch.
    """
    rows = rows_of_rank(recipe, dp_world_size)
    if size >= 1 and rows % size == 0:
        return []
    legal = ", ".join(map(str, divisors(rows)))
    problem = (
        f"local_batch_size={size} does not divide the {rows} rows that each of {dp_world_size} ranks gets of a step"
        f" (global_batch_size={recipe.global_batch_size}). Use one of {legal}"
    )
    return [problem]


def rows_of_rank(recipe: Recipe, dp_world_size: int) -> int:
    """B / R: the rows that a rank gets of each step. R must divide B."""
    return recipe.global_batch_size // dp_world_size


def check_validation(recipe: Recipe, *, again: bool) -> None:
    """Refuse a held-out set without an end, and warn of settings by which its loss means something else each time.

    Args:
        recipe: of the validation.
        again: it begins again when it ends, for the trainer stops it after some steps.

    Raises:
        RecipeError: it has no end, and needs one.
    """
    endless = [source.name for source in recipe.sources if source.epochs is None]
    if endless and not again:
        problem = (
            f"recipe {recipe.name!r} is validated on to its end, and its sources {', '.join(endless)} have none. Give each `epochs: 1`,"
            " or the validator a number of steps"
        )
        raise RecipeError([problem])
    odd = [f"shuffle.{name}: true (not in file order)" for name in ("groups", "documents") if getattr(recipe.shuffle, name)]
    odd += ["final_batch: drop (leaves the last rows out)"] * (recipe.final_batch == "drop")
    odd += ["on_exhausted: stop (the first lane at its end ends all)"] * (recipe.on_exhausted == "stop")
    if odd:
        _log.warning("recipe %r is validated on, and has %s. recipes/validation.yaml shows how it is done", recipe.name, "; ".join(odd))
