"""Recipe and trainer: what does not fit is refused, all at once, with both values."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tests.training.loops import TrainersTokenizer, corpus, held_out
from zephon_ray.errors import RecipeError
from zephon_ray.hashing import sha256_hex
from zephon_ray.recipe import load_recipe
from zephon_ray.training.fit import TrainerSizes, check_fit, check_validation
from zephon_ray.training.tokenizers import check_tokenizer, tokenizer_digest


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    recipe = corpus(tmp_path)
    check_fit(recipe, TrainerSizes(dp_rank=1, dp_world_size=2, sequence_length=32, local_batch_size=2))
    with pytest.raises(RecipeError) as error:
        check_fit(recipe, TrainerSizes(dp_rank=1, dp_world_size=2, sequence_length=64, local_batch_size=4))
    length, size = error.value.problems
    assert "sequence_length=32 of the recipe is not the trainer's 64" in length
    assert "local_batch_size=4 does not divide the 2 rows" in size
    assert size.endswith("Use one of 1, 2")
    with pytest.raises(RecipeError, match="dp_world_size=3 cannot share"):
        check_fit(recipe, TrainerSizes(dp_rank=0, dp_world_size=3, sequence_length=32, local_batch_size=1))


def test_the_tokenizer_has_to_be_the_trainers_file_wherever_it_lies(tmp_path: Path) -> None:
    recipe = corpus(tmp_path / "here")
    digest = tokenizer_digest(recipe)
    other = tmp_path / "assets"
    other.mkdir()
    shutil.copy(tmp_path / "here" / "tokenizer.json", other)
    for folder in (other, tmp_path / "here", other / "tokenizer.json"):
        check_tokenizer(TrainersTokenizer(str(folder)), recipe.tokenizer_url, digest)
    changed = (other / "tokenizer.json").read_bytes() + b"\n"
    (other / "tokenizer.json").write_bytes(changed)
    with pytest.raises(RecipeError) as error:
        check_tokenizer(TrainersTokenizer(str(other)), recipe.tokenizer_url, digest)
    for part in (str(other / "tokenizer.json"), sha256_hex(changed), recipe.tokenizer_url, digest):
        assert part in str(error.value)
    (other / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"no tokenizer\.json can be read"):
        check_tokenizer(TrainersTokenizer(str(other)), recipe.tokenizer_url, digest)


def test_a_tokenizer_without_a_file_is_not_compared_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check_tokenizer(None, "tokenizer.json", "0" * 64)
    assert "is not compared with tokenizer.json" in caplog.text


def test_a_recipe_whose_tokenizer_is_missing_says_so(tmp_path: Path) -> None:
    recipe = corpus(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match=r"tokenizer\.path=.*cannot be read"):
        tokenizer_digest(recipe)


def test_validation_needs_an_end_or_a_number_of_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    endless = corpus(tmp_path / "a")
    with pytest.raises(RecipeError, match="its sources web, code have none"):
        check_validation(endless, again=False)
    check_validation(endless, again=True)
    assert "not in file order" in caplog.text
    assert "final_batch: drop" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_validation(load_recipe(held_out(tmp_path / "b")), again=False)
    assert caplog.text == ""
