"""The reference: the same steps from a plain loader, one rank alone, without trainer, torch or Ray."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from zephon_ray.errors import UserError
from zephon_ray.loader import STATE_KEY, Loader
from zephon_ray.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What each step has to be. Lists begin with what is there before the first step.

    Args:
        digests: of the global batches, 16 bytes each; the first is empty.
        chains: up to each step, 16 bytes each.
        states: after each step.
    """

    digests: list[bytes]
    chains: list[bytes]
    states: list[bytes]


def make_reference(recipe: Recipe, steps: int) -> Reference:
    """The first steps of a recipe.

    Raises:
        UserError: its stream ends before.
        RecipeError, SourceError, StorageError: it cannot be used.
    """
    made = Reference(digests=[b""], chains=[bytes(16)], states=[])
    with Loader(recipe, runner="inline") as loader:
        made.states.append(loader.state_dict()[STATE_KEY])
        for batch in islice(loader, steps):
            made.digests.append(batch.digest)
            made.chains.append(batch.chain)
            made.states.append(loader.state_dict()[STATE_KEY])
    if len(made.states) <= steps:
        raise UserError(
            f"recipe {recipe.name!r} ends after step {len(made.states) - 1}, and the proof takes {steps}. Give its sources more epochs, or"
            " a shorter chain"
        )
    return made
