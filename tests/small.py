"""Small corpora for tests: documents as JSON lines in a folder, and a recipe over them with the golden cases' tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.golden_cases import GOLDEN
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.testing import SPECIALS, documents, write_lines

__all__ = ["a_recipe", "documents", "fields", "write_lines"]


def fields(sources: Mapping[str, Mapping[str, Any]] | None = None, **over: Any) -> dict[str, Any]:
    """A recipe's fields: by default one source `a` in the folder `a`, two lanes, rows of 32 pairs."""
    named = {"a": {}} if sources is None else sources
    recipe = {
        "schema": 1, "name": "small", "seed": 7, "lanes": 2, "sequence_length": 32, "global_batch_size": 4, "unit_bytes": 2048,
        "tokenizer": {"path": str(GOLDEN / "tokenizer.json"), **SPECIALS},
        "sources": [{"name": name, "uri": name, **more} for name, more in named.items()],
        "execution": {"runner": "inline"},
    }  # fmt: skip
    return recipe | over


def a_recipe(folder: Path, sources: Mapping[str, Mapping[str, Any]] | None = None, **over: Any) -> Recipe:
    """As `fields`, validated; sources whose folder is missing get 60 documents in three files."""
    made = fields(sources, **over)
    for index, source in enumerate(made["sources"]):
        if "/" not in source["uri"] and not (folder / source["uri"]).exists():
            for part in range(3):
                write_lines(folder / source["uri"] / f"{part}.jsonl", documents(20, seed=index * 100 + part))
    return recipe_from_dict(made, str(folder))
