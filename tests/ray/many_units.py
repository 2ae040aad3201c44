"""A corpus whose stream is long and needs its workers to the end: many compressed files, each of many units."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.corpora import tokenizer_json
from zephon_ray.recipe import Recipe, recipe_from_dict
from zephon_ray.stream import Stream

_WORDS = [f"w{number}" for number in range(100, 1000)]


def _line(number: int, words: int) -> bytes:
    """Records of one size."""
    first = number * 7919
    return json.dumps({"text": " ".join([_WORDS[(first + i * i) % 900] for i in range(words)])}).encode() + b"\n"


def many_units(folder: Path, *, files: int, units: int, words: int, execution: Mapping[str, Any], **fields: Any) -> Recipe:
    """A recipe over `files` streams of `units` units of two documents, in as many slots: `units` windows.

    Args:
        folder: is filled with the corpus and `recipe.yaml`.
        files: how many.
        units: of each file.
        words: of a document.
        execution: of the recipe.
        fields: others of the recipe.
    """
    (folder / "s").mkdir(parents=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    for file in range(files):
        lines = b"".join(_line(number, words) for number in range(file * 200, file * 200 + 2 * units))
        (folder / f"s/{file:02}.jsonl.gz").write_bytes(gzip.compress(lines, 1, mtime=0))
    source = {"name": "s", "uri": "s", "epochs": 1, "window_groups": files}
    recipe = {
        "schema": 1, "name": "many", "seed": 3, "lanes": 2, "sequence_length": 64, "global_batch_size": 4,
        "tokenizer": {"path": "tokenizer.json", "eos": "<|eos|>"}, "sources": [source], "unit_bytes": 2 * len(_line(0, words)),
        "execution": {"runner": "ray", "prefetch_steps": 1, "stall_seconds": 30, **execution}, **fields,
    }  # fmt: skip
    made = recipe_from_dict(recipe, str(folder))
    (folder / "recipe.yaml").write_text(made.to_yaml())
    return made


def with_execution(recipe: Recipe, **fields: Any) -> Recipe:
    return recipe.model_copy(update={"execution": recipe.execution.model_copy(update=fields)})


def chains_of(recipe: Recipe, most: int | None = None) -> Sequence[str]:
    """What a run without Ray gives, step by step."""
    stream = Stream(recipe, runner="inline")
    found: list[str] = []
    while (most is None or len(found) < most) and (batch := stream.next_batch()) is not None:
        found.append(batch.chain.hex())
    stream.close()
    return found
