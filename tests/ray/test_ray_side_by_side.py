"""Runs that want more than the cluster has share it: each goes on, and gives what it gives alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from tests.ray.many_units import chains_of, many_units
from zephon_ray.recipe import Recipe
from zephon_ray.stream import Stream

pytestmark = pytest.mark.timeout(120)

LONGEST_S = 25.0
"""Without a step: processes start twice in it, on a machine that others use too. The watchdog's limit is longer."""
STEPS = 40
"""More than the workers are ahead: none of them ends before all have begun."""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> list[Recipe]:
    recipe = many_units(tmp_path_factory.mktemp("many"), files=16, units=50, words=12, execution={"stall_seconds": 30})
    return [recipe, recipe.model_copy(update={"seed": 4})]


@pytest.fixture(scope="module")
def alone(recipes: list[Recipe]) -> list[Sequence[str]]:
    return [chains_of(recipe) for recipe in recipes]


class Run(threading.Thread):
    """Takes some steps, or all, of a run with two workers."""

    def __init__(self, recipe: Recipe, steps: int | None) -> None:
        super().__init__(daemon=True)
        self.stream, self._steps = Stream(recipe, runner="ray", workers=2), steps
        self.got: list[str] = []
        self.longest_s = 0.0
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while self._steps is None or len(self.got) < self._steps:
                began = time.monotonic()
                batch = self.stream.next_batch()
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                if batch is None:
                    return
                self.got.append(batch.chain.hex())
        except Exception as error:  # noqa: BLE001  the test shows it
            self.error = error


def test_two_runs_that_want_all_cpus_each_go_on_together(recipes: list[Recipe], alone: list[Sequence[str]]) -> None:
    runs = [Run(recipe, STEPS) for recipe in recipes]
    try:
        for run in runs:
            run.start()
        for run in runs:
            run.join(50)
        state = [(len(run.got), round(run.longest_s, 1), run.error) for run in runs]
        assert [run.got for run in runs] == [want[:STEPS] for want in alone], state
        assert max(run.longest_s for run in runs) < LONGEST_S, state
    finally:
        for run in runs:
            run.stream.close()


@pytest.mark.long
def test_a_run_that_is_held_in_step_with_another_goes_on(recipes: list[Recipe], alone: list[Sequence[str]]) -> None:
    """As two ranks of one trainer would: neither is asked for a step before the other has given its own."""
    streams = [Stream(recipe, runner="ray", workers=2) for recipe in recipes]
    longest = 0.0
    try:
        for step in range(STEPS):
            began = time.monotonic()
            batches = [stream.next_batch() for stream in streams]
            longest = max(longest, time.monotonic() - began)
            assert [batch.chain.hex() for batch in batches if batch is not None] == [want[step] for want in alone], f"step {step + 1}"
        assert longest < 2 * LONGEST_S
    finally:
        for stream in streams:
            stream.close()
