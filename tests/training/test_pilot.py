"""The pilot of a recipe: one state, several numbers of ranks, every row compared; and the command that shows it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.training.loops import corpus
from zephon_ray.batches import GlobalBatch
from zephon_ray.cli.main import run_command
from zephon_ray.errors import RecipeError, UserError
from zephon_ray.loader import Loader
from zephon_ray.recipe import Recipe
from zephon_ray.stream import Stream
from zephon_ray.training.pilot import prove


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return corpus(tmp_path)


def test_each_number_of_ranks_is_compared_row_by_row_with_the_uninterrupted_run(recipe: Recipe) -> None:
    proof = prove(recipe, [1, 2, 4], at_step=2, steps=3)
    assert proof.equal
    assert [(s.dp_size, s.rows, s.compared, s.difference, s.state_equal) for s in proof.sizes] == [
        (1, 4, 12, None, True), (2, 2, 12, None, True), (4, 1, 12, None, True)
    ]  # fmt: skip
    with Loader(recipe) as loader:
        batches = [next(loader) for _ in range(5)]
    assert proof.digests == tuple((b.step, b.digest.hex(), b.chain.hex()) for b in batches[2:])


@pytest.fixture
def spoilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stream that was resumed gives step 4 with another id in its row 3."""
    whole = Stream.next_batch
    streams: list[Stream] = []

    def spoiling(self: Stream) -> GlobalBatch | None:
        batch = whole(self)
        if self not in streams:
            streams.append(self)
        if batch is None or batch.step != 4 or self is streams[0]:
            return batch
        rows = np.array(batch.rows)
        rows[3, 0, 5] += 1
        return replace(batch, rows=rows)

    monkeypatch.setattr(Stream, "next_batch", spoiling)
    return iter(())


@pytest.mark.usefixtures("spoilt")
def test_one_wrong_id_of_one_rank_is_found_and_named(recipe: Recipe) -> None:
    proof = prove(recipe, [2, 4], at_step=2, steps=3)
    assert not proof.equal
    assert [size.difference and size.difference.split(":")[0] for size in proof.sizes] == ["step 4, rank 1, row 1", "step 4, rank 3, row 0"]


def test_sizes_that_cannot_be_and_streams_that_end_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        prove(recipe, [2, 3, 8], at_step=1, steps=1)
    assert [problem.split()[0] for problem in error.value.problems] == ["dp_world_size=3", "dp_world_size=8"]
    with pytest.raises(UserError, match="no number of ranks"):
        prove(recipe, [], at_step=1, steps=1)
    short = corpus(tmp_path / "short", sources=("web",), texts=3, final_batch="pad")
    ending = short.model_copy(update={"sources": (short.sources[0].model_copy(update={"epochs": 1}),)})
    with pytest.raises(UserError, match=r"the stream ends after step \d+\. Ask for fewer steps"):
        prove(ending, [2], at_step=500, steps=1)


def test_the_command_prints_the_table_and_ends_with_0(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["prove", str(tmp_path / "recipe.yaml"), "--gpus", "1,2,4,2", "--at-step", "2", "--steps", "2"]
    assert run_command(words) == 0
    told = capsys.readouterr().out
    assert "after step 2" in told
    assert [line.split()[:4] for line in told.splitlines() if line.strip()[:1].isdigit()] == [
        ["1", "4", "8", "equal"], ["2", "2", "8", "equal"], ["4", "1", "8", "equal"]
    ]  # fmt: skip
    assert run_command([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True
    assert [size["dp_size"] for size in found["sizes"]] == [1, 2, 4]
    assert len(found["digests"]) == 2


@pytest.mark.usefixtures("spoilt")
def test_the_command_ends_with_1_where_something_differs(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["prove", str(tmp_path / "recipe.yaml"), "--gpus", "2,4", "--at-step", "2", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False
    assert run_command(["prove", str(tmp_path / "recipe.yaml"), "--gpus", "2,4", "--at-step", "2"]) == 1
    assert "(!) 2, 4 ranks got something else" in capsys.readouterr().out


@pytest.mark.parametrize("gpus", ["3", "", "two"])
def test_the_command_ends_with_2_for_sizes_that_cannot_be(recipe: Recipe, tmp_path: Path, gpus: str) -> None:
    assert run_command(["prove", str(tmp_path / "recipe.yaml"), "--gpus", gpus, "--at-step", "2"]) == 2
