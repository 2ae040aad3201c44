"""Each recipe of `recipes/` is valid, and does what its comments promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zephon_ray.recipe import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def test_at_least_three_recipes_are_shipped() -> None:
    assert {"laptop", "validation", "web_and_code"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_valid_explained_and_listed(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name.replace("-", "_") == path.stem
    assert recipe.identity()["schema"] == 1
    assert path.read_text().startswith("# ")
    assert f"]({path.name})" in (FOLDER / "README.md").read_text()


def test_the_ranks_that_the_comments_of_web_and_code_name_are_legal() -> None:
    sizes = load_recipe(FOLDER / "web_and_code.yaml").legal_dp_sizes()
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_the_weights_of_web_and_code_are_the_percentages_of_its_comment() -> None:
    shares = load_recipe(FOLDER / "web_and_code.yaml").shares()
    assert [round(100 * share / 2**20) for share in shares] == [60, 25, 10, 5]


def test_the_laptop_recipe_needs_no_store_and_no_cluster() -> None:
    recipe = load_recipe(FOLDER / "laptop.yaml")
    assert recipe.execution.runner == "threads"
    assert all(recipe.source_url(i).startswith(f"{FOLDER}/data/") for i in range(len(recipe.sources)))
    assert recipe.legal_dp_sizes() == [1, 2, 4, 8]


def test_the_validation_recipe_is_finite_in_file_order_and_loses_no_token() -> None:
    recipe = load_recipe(FOLDER / "validation.yaml")
    assert all(source.epochs == 1 for source in recipe.sources)
    assert (recipe.shuffle.groups, recipe.shuffle.documents, recipe.shuffle.window_groups) == (False, False, 1)
    assert (recipe.on_exhausted, recipe.final_batch, recipe.on_bad_record) == ("continue", "pad", "fail")


def test_the_overrides_that_the_readme_shows_work() -> None:
    overrides = [found.strip('"') for found in re.findall(r'--set ("[^"]+"|[^\s"`]+)', (FOLDER / "README.md").read_text())]
    assert len(overrides) >= 3
    assert load_recipe(FOLDER / "web_and_code.yaml", overrides).lanes == 8
