"""`verify`: a run's steps made again and compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict

from zephon_ray import runs
from zephon_ray.batches import GlobalBatch
from zephon_ray.cli.render import emit, progress, show
from zephon_ray.errors import UserError
from zephon_ray.recipe import load_recipe


def compare(
    directory: str,
    steps: str,
    recipe: str | None,
    overrides: Sequence[str],
    runner: str | None,
    workers: int | None,
    address: str | None,
    *,
    as_json: bool,
) -> int:
    """Verify steps of a run. Returns the exit code; differences are raised."""
    if overrides and recipe is None:
        raise UserError("--set changes a recipe, and none is given. Give --recipe too, or leave --set out (a run's own recipe is fixed)")
    first, last = steps_of(steps)
    moved = None if recipe is None else load_recipe(recipe, overrides)
    with progress(wanted=True, columns=["steps"]) as bar:
        task = bar.add_task("verifying", total=None if last is None else last - (first or 1) + 1) if bar else None

        def on_step(batch: GlobalBatch) -> None:
            if bar is not None and task is not None and batch.step >= (first or 1):
                bar.update(task, advance=1)

        summary = runs.verify(
            directory, recipe=moved, first=first, last=last, runner=runner, workers=workers, address=address, on_step=on_step
        )
    if as_json:
        emit({"out": directory, "equal": True, **asdict(summary)})
    else:
        show(f"{directory}: steps {summary.first_step} to {summary.last_step} are equal to the ledger ({summary.seconds:.1f} s)")
    return 0


def steps_of(text: str) -> tuple[int | None, int | None]:
    """(first, last) of "A:B", "A:", ":B" or "A"; None for what is left out.

    Raises:
        UserError: it is none of these.
    """
    match = re.fullmatch(r"(\d*)(:?)(\d*)", text.strip())
    if match is None:
        raise UserError(f"--steps {text}: is no range of steps. Write A:B, A:, :B or A, such as 100:200")
    first = int(match[1]) if match[1] else None
    last = int(match[3]) if match[3] else None if match[2] else first
    if first == 0 or last == 0 or (first and last and first > last):
        raise UserError(f"--steps {text}: steps count from 1, and the first is not after the last. Write A:B, such as 100:200")
    return first, last
