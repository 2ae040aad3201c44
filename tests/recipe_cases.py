"""A valid recipe to be changed, and the problems of what is not valid."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from zephon_ray.errors import RecipeError
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.recipe_fields import Fields, RecipeFields, keys_of, model_of
from zephon_ray.recipe_yaml import read_yaml

SHA = "ab" * 32


def plain(**changes: Any) -> dict[str, Any]:
    """A valid recipe with two sources; `changes` replace top-level fields."""
    return {
        "schema": 1,
        "name": "plain",
        "seed": 42,
        "lanes": 4,
        "sequence_length": 128,
        "global_batch_size": 24,
        "tokenizer": {"path": "tokenizer.json", "bos": "<b>", "eos": "<e>", "pad": "<p>"},
        "sources": [{"name": "web", "uri": "web", "weight": 0.7}, {"name": "code", "uri": "code/*.parquet", "weight": 0.3}],
        **changes,
    }


def changed(path: str, value: Any, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """A copy of a recipe with one field set; "sources[1].weight", "shuffle.groups"."""
    data = copy.deepcopy(base or plain())
    *way, last = path.replace("[", ".[").split(".")
    at: Any = data
    for step in way:
        at = at[int(step[1:-1])] if step.startswith("[") else at.setdefault(step, {})
    at[int(last[1:-1]) if last.startswith("[") else last] = value
    return data


def problems(data: Any, folder: str = "/data") -> list[str]:
    with pytest.raises(RecipeError) as caught:
        recipe_from_dict(data, folder)
    assert caught.value.exit_code == 2
    return caught.value.problems


def the_problem(data: Any) -> str:
    (problem,) = problems(data)
    return problem


def with_weights(*weights: Any) -> dict[str, Any]:
    return plain(sources=[{"name": f"s{i}", "uri": "x", "weight": w} for i, w in enumerate(weights)])


def all_fields(model: type[Fields] = RecipeFields, prefix: str = "") -> Iterator[str]:
    for key, name in keys_of(model).items():
        inner = model_of(model.model_fields[name].annotation)
        if inner is None:
            yield prefix + key
        else:
            yield from all_fields(inner, f"{prefix}{key}{'[0]' if key == 'sources' else ''}.")


def read_again(recipe: Recipe) -> Recipe:
    data, found = read_yaml(recipe.to_yaml(), "lock")
    assert not found
    return recipe_from_dict(data, "/elsewhere")
