"""Micro-batches: all rows of a rank once and in order, and a state at the end of a step only."""

from __future__ import annotations

import pytest

from tests.training.loops import STEPS, corpus, digests_of, folded, row_digests
from zephon_ray.batches import Batch
from zephon_ray.errors import RecipeError
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe
from zephon_ray.training.microbatches import MicroBatches, Rows


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return corpus(tmp_path_factory.mktemp("corpus"))


def _rows(rows: Rows) -> list[bytes]:
    return row_digests(rows.input, rows.labels, rows.positions)


@pytest.mark.parametrize(("ranks", "size"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_micro_batches_of_all_ranks_are_the_global_batch_however_they_are_cut(recipe: Recipe, ranks: int, size: int) -> None:
    loaders = [MicroBatches(Loader(recipe, dp_rank=r, dp_world_size=ranks), size) for r in range(ranks)]
    found = []
    for _ in range(STEPS):
        rows = [[row for _ in range(4 // ranks // size) for row in _rows(next(loader))] for loader in loaders]
        found.append(folded(row for mine in rows for row in mine))
    assert found == digests_of(recipe)
    assert len({loader.state_dict()["zephon_ray"] for loader in loaders}) == 1
    for loader in loaders:
        loader.close()


def test_without_a_size_a_rank_gets_all_of_its_rows_at_once(recipe: Recipe) -> None:
    rows = next(MicroBatches(Loader(recipe, dp_world_size=2)))
    assert rows.input.shape == rows.labels.shape == rows.positions.shape == (2, 32)
    assert {array.dtype.name for array in (rows.input, rows.labels, rows.positions)} == {"int64"}


def test_state_is_that_after_the_last_step_and_goes_on_with_the_next_at_another_size(recipe: Recipe) -> None:
    first = MicroBatches(Loader(recipe, dp_world_size=2), 1)
    for _ in range(2 * 3):
        next(first)
    second = MicroBatches(Loader(recipe), 4)
    second.load_state_dict(first.state_dict())
    assert folded(_rows(next(second))) == digests_of(recipe)[3]
    assert second.state_dict() != first.state_dict()


def test_between_two_micro_batches_of_a_step_there_is_no_state(recipe: Recipe) -> None:
    batches = MicroBatches(Loader(recipe, dp_world_size=2), 1)
    for _ in range(3):
        next(batches)
    with pytest.raises(RecipeError, match=r"taken 6 rows over all ranks.*global_batch_size=4 rows: that is 1\.5 steps"):
        batches.state_dict()
    next(batches)
    assert batches.state_dict()


@pytest.mark.parametrize(("steps", "told"), [(1, "8 a step"), (4, "2 a step")])
def test_a_trainer_that_says_that_its_steps_have_other_rows_is_refused(recipe: Recipe, steps: int, told: str) -> None:
    batches = MicroBatches(Loader(recipe), 4)
    next(batches)
    next(batches)
    with pytest.raises(RecipeError, match=f"taken 8 rows over all ranks in {steps} steps, {told}.*global_batch_size=4"):
        batches.state_dict(trainer_steps=steps)
    assert batches.state_dict(trainer_steps=2)


def test_a_size_that_does_not_divide_the_rows_of_a_rank_is_refused_with_those_that_do(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"local_batch_size=3 does not divide the 4 rows that each of 1 ranks.*one of 1, 2, 4"):
        next(MicroBatches(Loader(recipe), 3))


def test_rows_are_copies_that_keep_no_batch_of_the_loader_alive(recipe: Recipe) -> None:
    class Watched(Loader):
        given: Batch

        def __next__(self) -> Batch:
            self.given = super().__next__()
            return self.given

    loader = Watched(recipe)
    rows = next(MicroBatches(loader, 2))
    for array in (rows.input, rows.labels, rows.positions):
        assert array.base is not loader.given.inputs.base
        assert array.flags.writeable
